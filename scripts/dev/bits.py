"""Compares runs of the scripts as they were at a commit with runs of the working tree, to the bit.

    .venv/bin/python scripts/dev/bits.py OLD_COMMIT                    all three scripts, 8 steps
    .venv/bin/python scripts/dev/bits.py OLD_COMMIT --resume           and resumed halfway, too
    .venv/bin/python scripts/dev/bits.py OLD_COMMIT --ranks 2          two ranks, by DDP
    .venv/bin/python scripts/dev/bits.py OLD_COMMIT --fsdp2            two ranks, by FSDP2
    .venv/bin/python scripts/dev/bits.py OLD_COMMIT --scripts ppo_sync.py --beta 0.1

After a change that must not alter results, this shows that it does not. Each script trains the
debug model on a CPU in float32, with vLLM itself and the same flags on both sides; further flags go
to the scripts. Compared are the metrics of each step (except time/* and perf/*, which depend on the
clock), the responses in samples.jsonl and rollouts.jsonl with their token ids, and the saved model.
For each script the first difference is printed, or "equal to the bit". A key that only one side has
is listed and is no difference. The exit status is 1 unless all are equal.
"""

import argparse
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file

REPO = Path(__file__).resolve().parents[2]
SCRIPTS = ("ppo_sync.py", "ppo_vllm_async.py", "grpo_vllm_async.py")
# Two mini-batches of two micro-batches each; a warm-up, an evaluation before, between and after
FLAGS = shlex.split("""
    --run_name run --seed 4242 --dtype float32 --no-gradient_checkpointing --response_length 8
    --local_rollout_batch_size 16 --number_samples_per_prompt 2 --local_mini_batch_size 16
    --per_device_train_batch_size 8 --local_rollout_forward_batch_size 16 --num_epochs 2
    --learning_rate 5e-4 --warm_up_steps 2 --num_evals 2 --num_eval_prompts 32 --reward_workers 1
""")
EPISODES = 32  # of a step and rank
# A user's environment, except that threads cannot change the order of a sum, nor the hub a run
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def start_run(script, output_dir, args, more_flags):
    """A process that trains `script`; what it prints goes to output_dir/log."""
    ranks = 2 if args.fsdp2 else args.ranks
    launcher = []
    if ranks > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    if args.fsdp2:  # accelerate's own launcher shards nothing on a CPU
        launcher.append(str(REPO / "tests/helpers/fsdp2.py"))
    assets = REPO / "debug_assets"
    flags = ["--model_name_or_path", assets / "model", "--dataset", assets / "train.parquet"]
    flags += ["--eval_dataset", assets / "test.parquet", "--output_dir", output_dir]
    flags += ["--total_episodes", args.steps * EPISODES * ranks, *FLAGS, *more_flags]
    if "ppo" in script.stem.split("_"):
        flags += ["--value_learning_rate", "1e-3"]
    output_dir.mkdir(parents=True, exist_ok=True)
    with open(output_dir / "log", "w") as log:
        return subprocess.Popen(
            [sys.executable, *launcher, script, *map(str, flags)],
            env=os.environ | ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def wait_for(process, output_dir):
    """The folder of a run that has ended well."""
    if process.wait():
        raise SystemExit(
            f"{(output_dir / 'log').read_text()[-3000:]}\n"
            f"This run failed, so that nothing can be compared. All it printed: {output_dir}/log"
        )
    return output_dir / "run"


def read_run(run):
    """{(file, number of the line, key): value as text} of what is compared in a run's folder."""
    values = {}
    for name in ("metrics.jsonl", "rollouts.jsonl", "samples.jsonl"):
        for number, line in enumerate((run / name).read_text("utf-8").splitlines(), start=1):
            for key, value in json.loads(line).items():
                if not key.startswith(("time/", "perf/")):
                    values[name, number, key] = json.dumps(value)  # every digit; NaN equals NaN
    for path in (run / "model").glob("*.safetensors"):
        for key, tensor in load_file(path).items():
            data = tensor.flatten().view(torch.uint8).numpy().tobytes()
            digest = hashlib.sha256(data).hexdigest()[:12]
            values["model", 0, key] = f"{tensor.dtype} {[*tensor.shape]} with the hash {digest}"
    return values


def compare(title, old_run, new_run):
    """Prints how two runs compare, and returns whether they are equal."""
    old, new = read_run(old_run), read_run(new_run)
    names = [{(file, key) for file, _, key in values} for values in (old, new)]
    one_sided = {(file, key) for file, key in names[0] ^ names[1] if file != "model"}
    places = [
        place
        for place in old | new
        if old.get(place) != new.get(place) and (place[0], place[2]) not in one_sided
    ]
    print(f"{title}: {f'{len(places)} values differ' if places else 'equal to the bit'}")
    for place in places[:1]:
        file, number, key = place
        print(f"    first in {file}{f', line {number}' if number else ''}: {key}")
        print(f"        was {old.get(place)}\n        is  {new.get(place)}")
    for file, key in sorted(one_sided):
        which = "old" if (file, key) in names[0] else "new"
        print(f"    only the {which} run has {key} in {file}")
    return not places


def compare_script(name, folder, args, more_flags):
    """Runs a script as it was and as it is, at the same time; returns whether all are equal."""
    old_text = subprocess.check_output(["git", "show", f"{args.old_commit}:{name}"], cwd=REPO)
    texts = {"old": old_text, "new": (REPO / name).read_bytes()}
    if args.resume:
        more_flags = [*more_flags, "--save_freq", args.steps // 2]
    scripts, processes, runs = {}, {}, {}
    for side, text in texts.items():
        scripts[side] = folder / side / name
        scripts[side].parent.mkdir(parents=True, exist_ok=True)
        scripts[side].write_bytes(text)
        processes[side] = start_run(scripts[side], folder / side / name[:-3], args, more_flags)
    for side, process in processes.items():
        runs[side] = wait_for(process, folder / side / name[:-3])
    is_equal = compare(name, runs["old"], runs["new"])
    if args.resume:
        output_dir = folder / "resumed" / name[:-3]
        shutil.copytree(runs["new"], output_dir / "run")
        flags = [*more_flags, "--resume_from_checkpoint", "latest"]
        resumed = wait_for(start_run(scripts["new"], output_dir, args, flags), output_dir)
        is_equal &= compare(f"{name}, resumed after {args.steps // 2} steps", runs["old"], resumed)
    return is_equal


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old_commit", help="commit, branch or tag to compare with")
    parser.add_argument("--steps", type=int, default=8, help="training steps of each run")
    parser.add_argument("--ranks", type=int, default=1, help="processes of each run")
    parser.add_argument("--fsdp2", action="store_true", help="two ranks that shard their models")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="also resume the new run from a checkpoint after half of its steps",
    )
    parser.add_argument("--scripts", nargs="+", default=SCRIPTS, help="which scripts to compare")
    args, more_flags = parser.parse_known_args()
    sys.stdout.reconfigure(line_buffering=True)
    folder = Path(tempfile.mkdtemp(prefix="bits_"))
    print(f"The runs are in {folder}, which is removed if all are equal")
    results = [compare_script(name, folder, args, more_flags) for name in args.scripts]
    if not all(results):
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
