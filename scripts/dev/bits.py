"""Compare runs of the scripts as they were at a commit with runs of the working tree, to the bit.

    .venv/bin/python scripts/dev/bits.py OLD_COMMIT              all three scripts, 8 steps
    .venv/bin/python scripts/dev/bits.py OLD_COMMIT --resume     also resume halfway
    .venv/bin/python scripts/dev/bits.py OLD_COMMIT --ranks 2    two ranks, by DDP; or --fsdp2
    .venv/bin/python scripts/dev/bits.py OLD_COMMIT --scripts ppo_sync.py --beta 0.1
    .venv/bin/python scripts/dev/bits.py OLD_COMMIT --fork lora --lora_rank 8    each script's fork

Use it after a change that must not alter results. Each script trains the debug model on a CPU in
float32, with a real vLLM and the same flags on both sides. Other flags are passed to the scripts.
Compared are the metrics of each step (except time/* and perf/*), samples.jsonl, rollouts.jsonl with
its token ids, and the saved model. For each script the first difference is printed, or "equal to
the bit". A key that only one side has is listed, but does not count as a difference. The exit
status is 1 unless all are equal.
"""

import json
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path += [str(Path(__file__).resolve().parents[1] / name) for name in ("benchmark", "")]

import fork
from debug_runs import REPO, make_parser, read_lines, run
from safetensors.torch import load_file

SCRIPTS = ("ppo_sync.py", "ppo_vllm_async.py", "grpo_vllm_async.py")
# A step has two epochs of two mini-batches of two micro-batches. There are three evaluations
FLAGS = f"""
    --dataset {REPO}/debug_assets/train.parquet --eval_dataset {REPO}/debug_assets/test.parquet
    --model_name_or_path {REPO}/debug_assets/model --dtype float32 --no-gradient_checkpointing
    --response_length 8 --number_samples_per_prompt 2 --local_rollout_batch_size 16 --num_epochs 2
    --local_mini_batch_size 16 --learning_rate 5e-4 --warm_up_steps 2 --num_evals 2
    --num_eval_prompts 32 --reward_workers 1 --seed 4242 --micro_batch_tokens 128
"""


def train(script, folder, args, flags):
    """Run a script, and return the run's folder."""
    words = []
    if args.ranks > 1:
        words += shlex.split(f"-m torch.distributed.run --standalone --nproc_per_node {args.ranks}")
    if args.fsdp2:  # accelerate's launcher shards nothing on a CPU
        words.append(REPO / "tests/helpers/fsdp2.py")
    episodes = 32 * args.steps * args.ranks
    flags = [*shlex.split(FLAGS), "--total_episodes", str(episodes), *flags]
    run([*words, script, *flags], folder, HF_HUB_OFFLINE="1")
    return folder / "run"


def values_of(folder):
    """Return {(file, number of the line, key): value} of everything that is compared in a run."""
    values = {}
    for file in ("metrics.jsonl", "rollouts.jsonl", "samples.jsonl"):
        for number, line in enumerate(read_lines(folder / file), start=1):
            for key, value in line.items():
                if not key.startswith(("time/", "perf/")):
                    values[file, number, key] = json.dumps(value)
    for name in ("model", "adapter"):
        for path in sorted((folder / name).glob("*.safetensors")):
            for key, tensor in load_file(path).items():
                values[name, 0, key] = f"{tensor.dtype} {json.dumps(tensor.tolist())}"
    return values


def compare(title, *folders):
    """Print how an old and a new run differ, and return whether they are equal."""
    old, new = map(values_of, folders)
    old_keys, new_keys = ({(file, key) for file, _, key in values} for values in (old, new))
    one_sided = {(file, key) for file, key in old_keys ^ new_keys if "." in file}
    places = [place for place in old | new if old.get(place) != new.get(place)]
    places = [place for place in places if (place[0], place[2]) not in one_sided]
    print(f"{title}: {f'{len(places)} values differ' if places else 'equal to the bit'}")
    for place in places[:1]:
        was, now = (str(values.get(place))[:200] for values in (old, new))
        print(f"    the first is {place[2]} in line {place[1]} of {place[0]}:")
        print(f"    was {was}\n    is  {now}")
    for file, key in sorted(one_sided):
        print(f"    only the {'old' if (file, key) in old_keys else 'new'} run has {key} in {file}")
    return not places


def text_at(commit, name):
    """Return a file's text at a commit, or "" if the commit does not have it."""
    command = ["git", "show", f"{commit}:./{name}"]
    return subprocess.run(command, cwd=REPO, capture_output=True, encoding="utf-8").stdout


def compare_script(name, folder, args, flags):
    """Run a script as it was and as it is, at the same time, and return whether they are equal."""
    old, new = text_at(args.old_commit, name), (REPO / name).read_text("utf-8")
    if args.fork:
        path = fork.FORKS / f"{args.fork}.diff"
        new = fork.apply_diffs([path], script=name)
        # At a commit without this fork, the script itself has the fork's flags
        if diff := text_at(args.old_commit, path.relative_to(REPO)):
            (folder / path.name).write_text(diff, "utf-8")
            old = fork.apply_diffs([folder / path.name], old, name)
    if args.resume:
        flags = [*flags, "--save_freq", str(args.steps // 2)]
    folders, threads = [folder / name / side for side in ("old", "new")], ThreadPoolExecutor()
    for path, text in zip(folders, (old, new), strict=True):
        path.mkdir(parents=True)
        (path / name).write_text(text, "utf-8")
    runs = [*threads.map(lambda path: train(path / name, path, args, flags), folders)]
    is_equal = compare(name, *runs)
    if args.resume:
        path = folder / name / "resumed"
        shutil.copytree(runs[1], path / "run")
        flags = [*flags, "--resume_from_checkpoint", "latest"]
        resumed = train(folders[1] / name, path, args, flags)
        is_equal &= compare(f"{name}, resumed after {args.steps // 2} steps", runs[0], resumed)
    return is_equal


def main():
    sys.stdout.reconfigure(line_buffering=True)
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("old_commit", help="Commit, branch or tag to compare with.")
    add("--steps", type=int, default=8, help="Training steps of each run (%(default)s).")
    add("--ranks", type=int, default=1, help="Ranks of each run (%(default)s).")
    add("--fsdp2", action="store_true", help="Use two ranks that shard their models.")
    add("--resume", action="store_true", help="Also resume the new run halfway.")
    add("--fork", choices=fork.FIT_ALL, help="Compare this fork of each script.")
    add("--scripts", nargs="+", default=SCRIPTS, help="Scripts to compare. Default: all three.")
    args, flags = parser.parse_known_args()
    args.ranks = 2 if args.fsdp2 else args.ranks
    folder = Path(tempfile.mkdtemp(prefix="bits_"))
    print(f"The runs are in {folder}, which is removed if all are equal")
    results = [compare_script(name, folder, args, flags) for name in args.scripts]
    if all(results):
        shutil.rmtree(folder)
    return not all(results)


if __name__ == "__main__":
    sys.exit(main())
