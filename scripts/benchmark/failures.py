"""Run eleven deliberate bugs beside the correct scripts. A metric shows each bug.

    python scripts/benchmark/failures.py temperature      # a minute or two; without a name: all
    python scripts/benchmark/failures.py temperature --seeds 1 2 3
    python scripts/benchmark/failures.py temperature --show    # print commands, write the task

Most of the bugs occurred in other projects (docs/bug_gallery.md). A bug is a diff of a few lines,
scripts/forks/bugs/NAME.diff. FAILURES says which task and which metric show it. The task is that of
a debug command, or a small one of scripts/failures/tasks.py if sorting digits cannot show the bug.

Each bug has three runs: the correct script, the script with the diff, and, if check_sampler has
ended that, the script with the diff and without this check. The program prints the mean of the
metric over its steps, and the mean score of the last five steps. It adds the runs to
output/failures.jsonl, in the form of docs/data/failures.jsonl, where `sources` is a hash of the
diff and the task.
"""

import contextlib
import hashlib
import importlib
import json
import re
import shlex
import shutil
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from debug_runs import REPO, debug_command, make_debug_assets, make_parser, rounded, run

sys.path += [str(REPO / "scripts" / folder) for folder in (".", "failures", "train/debug")]
import fork

RESULTS = REPO / "output/failures.jsonl"
TASKS = "output/failures"  # each task of tasks.py writes a folder there
REWARDS = "scripts/failures/rewards.py"
CAUGHT = "RuntimeError: vLLM's log-probabilities differ"  # the beginning of check_sampler's error
# The results have these metrics, and those of all FAILURES
ALSO_RECORDED = {"objective/scores", "eval/verifiable_correct_rate", "policy/entropy_avg"}


def debug_task(name, episodes, flags=""):
    """Return the script and the flags of a debug command, with further flags."""
    script, *debug_flags = debug_command(name)
    return script, [*debug_flags, "--total_episodes", str(episodes), *flags.split()]


@dataclass(frozen=True)
class Failure:
    """Describe how a bug is shown."""

    command: tuple[str, list[str]]  # the script, and its flags except the seed
    metric: str
    steps: tuple[int, int]  # the mean of the metric from the first to the last of them is compared
    task: str | None = None  # the function of tasks.py that writes the task
    wrong_flags: str = ""  # further flags of the runs with the bug


GRPO, PPO = debug_task("grpo", 40 * 512), debug_task("ppo", 20 * 512)
# The model's responses are too long, and it has to learn to end them
CHATTY = debug_task(
    "grpo",
    20 * 512,
    f"""
    --model_name_or_path {TASKS}/chatty_model/model --response_length 16 --num_evals 4
    --penalty_reward_value 0 --mask_truncated_completions
    --reward_fn {REWARDS}:answer_first --reward_workers 1
    """,
)
# After 30 steps the learning rate is nearly 0
SYSTEM_PROMPT = debug_task(
    "grpo",
    30 * 256,
    f"""
    --dataset {TASKS}/system_prompt/train.parquet
    --eval_dataset {TASKS}/system_prompt/test.parquet
    --model_name_or_path {TASKS}/system_prompt/model
    --local_rollout_batch_size 32 --local_mini_batch_size 128
    --num_eval_prompts 200 --num_evals 5
    """,
)
HALF_IMPOSSIBLE = debug_task(
    "grpo", 20 * 512, f"--dataset {TASKS}/half_impossible/train.parquet --num_evals 4"
)
PAIR_TOKENS = debug_task("grpo", 40 * 512, f"--model_name_or_path {TASKS}/pair_tokens/model")
RANDOM_MODEL = f"""
    --dataset debug_assets/train.parquet --model_name_or_path {TASKS}/random_model/model
    --dtype float32 --no-gradient_checkpointing --response_length 64 --reward_workers 1
"""
ONE = f"""
    --total_episodes 2560 --local_rollout_batch_size 256
    --local_mini_batch_size 256 --per_device_train_batch_size 64
    --learning_rate 0.001 --value_learning_rate 0.0001 --reward_fn {REWARDS}:one {RANDOM_MODEL}
"""
DEAD = f"--reward_fn {REWARDS}:sorting_then_dead --reward_workers 1"
# The correct run is the same with micro-batches of any size
SMALL = "--per_device_train_batch_size 16"

FAILURES = {
    "stale_weights": Failure(GRPO, "mismatch/kl", (31, 40)),
    "prefix_cache": Failure(SYSTEM_PROMPT, "mismatch/kl", (30, 30), "system_prompt"),
    "temperature": Failure(
        debug_task("grpo", 40 * 512, "--temperature 0.7"), "mismatch/kl", (1, 1)
    ),
    "retokenized": Failure(PAIR_TOKENS, "mismatch/kl", (1, 1), "pair_tokens"),
    "end_token": Failure(CHATTY, "objective/stop_rate", (11, 20), "chatty_model"),
    "reward_late": Failure(PPO, "loss/value_avg", (1, 1)),
    "truncated": Failure(CHATTY, "optim/grad_norm", (1, 1), "chatty_model"),
    "micro_batches": Failure(GRPO, "optim/grad_norm", (1, 1), wrong_flags=SMALL),
    "wrong_groups": Failure(
        HALF_IMPOSSIBLE, "val/zero_variance_groups", (11, 20), "half_impossible"
    ),
    "cold_value": Failure(
        ("ppo_vllm_async.py", ONE.split()), "objective/sequence_lengths", (10, 10), "random_model"
    ),
    "dead_reward": Failure(GRPO, "objective/scores", (31, 40), wrong_flags=DEAD),
}


def runs_of(name, seed):
    """Return three runs: without the bug, with it, and with it but without the check.

    A run is the first part of its line in the results. Its diff is None without the bug.
    """
    failure = FAILURES[name]
    script, flags = failure.command
    sources = ["tasks.py", "rewards.py"] if failure.task else []
    correct = {"script": script, "diff": None, "checks": "on", "flags": flags, "seed": seed}
    correct["sources"] = hash_of(sources)
    if "reward_fn" in failure.wrong_flags and not failure.task:
        sources = ["rewards.py"]
    wrong = correct | {"diff": name, "flags": [*flags, *failure.wrong_flags.split()]}
    wrong["sources"] = hash_of([*sources, f"{name}.diff"])
    return correct, wrong, wrong | {"checks": "off"}


def hash_of(names):
    """Return a hash of files beside REWARDS, and of the lines that diffs change."""
    folders = {".diff": fork.FAILURES, ".py": (REPO / REWARDS).parent}
    paths = [folders[Path(name).suffix] / name for name in names]
    texts = [path.read_text("utf-8") for path in paths]
    for i, text in enumerate(texts):
        if text.startswith("diff "):
            texts[i] = re.findall(r"^[-+](?![-+]{2} ).*", text, re.MULTILINE)
    return hashlib.blake2b(repr(texts).encode(), digest_size=4).hexdigest()


def start(script, diff, checks, flags, seed, **_):
    """Start a run. Return its metrics, and check_sampler's error or None.

    Any other error, or one of check_sampler in a run without the bug, ends this program.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, script)
        if diff:
            fork.write_fork(diff, path, is_bug=True)
        else:
            shutil.copy(REPO / script, path)
        words = [__file__, "--run", checks, path, *flags, "--seed", str(seed)]
        may_end = diff and checks == "on"
        metrics, output = run(words, folder, expected=CAUGHT if may_end else None)
    error = re.search(f"^{re.escape(CAUGHT)}.*", output, re.MULTILINE)
    return metrics, error and error[0]


def value_of(failure, line):
    """Return the mean of a failure's metric over its steps."""
    first, last = failure.steps
    return statistics.fmean(line["metrics"][failure.metric][first - 1 : last])


def compare(name, seed):
    """Start the runs of a failure, print how they differ, and add their lines to the results."""
    failure, error = FAILURES[name], None
    recorded = {failure.metric for failure in FAILURES.values()} | ALSO_RECORDED
    for settings in runs_of(name, seed):
        if settings["checks"] == "off" and not error:
            break
        metrics, error = start(**settings)
        names = sorted(recorded & {key for line in metrics for key in line})
        values = {key: [rounded(line.get(key)) for line in metrics] for key in names}
        line = settings | {"completed_steps": len(metrics), "error": error, "metrics": values}
        with open(RESULTS, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        if error:
            result = f"check_sampler ended it in step {len(metrics) + 1}"
        else:
            scores = statistics.fmean(values["objective/scores"][-5:])
            result = f"{value_of(failure, line):.3g}, last scores {scores:.3g}"
        unchecked = ", no check" * (settings["checks"] == "off")
        print(f"{settings['diff'] or 'correct'}{unchecked}, seed {seed}: {result}", flush=True)


def show(name, seed):
    """Print how to make and run a script with the bug, and how to run the correct script."""
    correct, wrong, _ = runs_of(name, seed)
    copy = f"{correct['script'].partition('_')[0]}_{name}.py"
    unchecked = f"scripts/benchmark/failures.py --run off {copy}"
    print(f"python scripts/fork.py --bug {name} {copy}")
    for program, settings in ((copy, wrong), (correct["script"], correct), (unchecked, wrong)):
        print(f"python {program} {shlex.join(settings['flags'])} --seed {seed}")


def write_task(name):
    """Write a task of tasks.py. It is the same to the bit for any number of CPU cores."""
    import tasks
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    folder = REPO / TASKS / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    print(f"Writing {folder.relative_to(REPO)} ...", flush=True)
    with contextlib.chdir(REPO), contextlib.redirect_stdout(None):
        getattr(tasks, name)(folder)


def run_script(checks, path, *flags):
    """Run `python PATH FLAGS` in this process, without check_sampler if `checks` is "off"."""
    sys.path.insert(0, str(Path(path).resolve().parent))  # vLLM's process imports it as well
    script = importlib.import_module(Path(path).stem)
    if checks == "off":
        script.check_sampler = lambda *_, **__: 0.0
    try:
        script.main(script.tyro.cli(script.Args, args=flags))
    except BaseException as error:
        script.end_at_once(error)


def main():
    if sys.argv[1:2] == ["--run"]:
        return run_script(*sys.argv[2:])
    parser = make_parser(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(FAILURES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1], help="Seeds of the runs (1).")
    parser.add_argument("--show", action="store_true", help="Print commands and write the task.")
    args = parser.parse_args()
    if unknown := set(args.names) - set(FAILURES):
        parser.error(f"there is no failure {', '.join(sorted(unknown))}")
    RESULTS.parent.mkdir(exist_ok=True)
    make_debug_assets()
    for name in args.names or FAILURES:
        first, last = FAILURES[name].steps
        print(f"\n# {name}: {FAILURES[name].metric}, steps {first} to {last}")
        if FAILURES[name].task:
            write_task(FAILURES[name].task)
        for seed in args.seeds:
            (show if args.show else compare)(name, seed)


if __name__ == "__main__":  # vLLM's processes import this file as well
    main()
