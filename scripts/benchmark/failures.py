"""Eleven mistakes, most of them bugs of others, each beside the right run and told by a metric.

    python scripts/benchmark/failures.py temperature      # a minute or two; without a name: all
    python scripts/benchmark/failures.py temperature --seeds 1 2 3
    # write the task, and print the commands; the last one has check_sampler off
    python scripts/benchmark/failures.py temperature --show

A bug is a diff of a few lines, scripts/forks/bugs/NAME.diff; docs/bug_gallery.md tells where it is
from. FAILURES says on which task it is seen, by which metric. The runs are those of the debug
commands, or of a small task where sorting digits cannot show it (scripts/failures/tasks.py): the
script as it is ("right"); with the diff; and without checks, if check_sampler has ended that. The
mean of the metric over its steps is shown, and of the scores of the last five steps.
output/failures.jsonl gets their lines, as docs/data/failures.jsonl has them; `sources` stands for
the diff and the task.
"""

import argparse
import contextlib
import hashlib
import json
import re
import shlex
import shutil
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from debug_runs import REPO, call_main, debug_command, make_debug_assets, rounded, run

sys.path += [str(REPO / "scripts" / folder) for folder in (".", "failures", "train/debug")]
import fork

RESULTS = REPO / "output/failures.jsonl"
TASKS = "output/failures"  # each task of tasks.py has a folder there
REWARDS = "scripts/failures/rewards.py"
CAUGHT = "RuntimeError: vLLM's log-probabilities differ"  # check_sampler's message begins so
# In lines of results, beside the metrics that tell
ALSO_KEPT = {"objective/scores", "eval/verifiable_correct_rate", "policy/entropy_avg"}


def debug_task(name, episodes, flags=""):
    """Script and flags of a debug command, and what else is said."""
    script, *own = debug_command(name)
    return script, [*own, "--total_episodes", str(episodes), *flags.split()]


@dataclass(frozen=True)
class Failure:
    """How a bug is shown: NAME.diff on a task, and what tells the wrong run from the right one."""

    command: tuple[str, list[str]]  # script and flags, but for those of a run
    metric: str
    steps: tuple[int, int]  # the mean over these, first and last, is compared
    task: str | None = None  # the function of tasks.py that writes it
    wrong_flags: str = ""  # of the wrong runs alone


GRPO, PPO = debug_task("grpo", 40 * 512), debug_task("ppo", 20 * 512)
# Responses that have to learn to stop
CHATTY = debug_task(
    "grpo",
    20 * 512,
    f"""
    --model_name_or_path {TASKS}/chatty_model/model --response_length 16 --num_evals 4
    --penalty_reward_value 0 --mask_truncated_completions
    --reward_fn {REWARDS}:answer_first --reward_workers 1
    """,
)
# In 30 steps, so that the learning rate is nearly 0 in the last
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
# A right run is the same with any micro-batches
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
    """The runs of a failure: right; wrong; wrong without the check.

    A run is what its line of results begins with; a diff of None is the script as it is.
    """
    failure = FAILURES[name]
    script, flags = failure.command
    sources = ["tasks.py", "rewards.py"] if failure.task else []
    right = {"script": script, "diff": None, "checks": "on", "flags": flags, "seed": seed}
    right["sources"] = hash_of(sources)
    if "reward_fn" in failure.wrong_flags and not failure.task:
        sources = ["rewards.py"]
    wrong = right | {"diff": name, "flags": [*flags, *failure.wrong_flags.split()]}
    wrong["sources"] = hash_of([*sources, f"{name}.diff"])
    return right, wrong, wrong | {"checks": "off"}


def hash_of(names):
    """A hash of diffs and of what is beside the REWARDS; of diffs the lines that they change."""
    folders = {".diff": fork.FAILURES, ".py": (REPO / REWARDS).parent}
    paths = [folders[Path(name).suffix] / name for name in names]
    texts = [path.read_text("utf-8") for path in paths]
    for i, text in enumerate(texts):
        if text.startswith("diff "):
            texts[i] = re.findall(r"^[-+](?![-+]{2} ).*", text, re.MULTILINE)
    return hashlib.blake2b(repr(texts).encode(), digest_size=4).hexdigest()


def start(script, diff, checks, flags, seed, **_):
    """Makes a run; returns its metrics, and check_sampler's message if that has ended it.

    The program ends if the run fails, unless that was check_sampler ending a wrong one.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, script)
        if diff:
            fork.write_fork(diff, path, is_bug=True)
        else:
            shutil.copy(REPO / script, path)
        words = [__file__, "--run", checks, path, *flags, "--seed", str(seed)]
        may_end = diff and checks == "on"
        metrics, said = run(words, folder, expected=CAUGHT if may_end else None)
    error = re.search(f"^{re.escape(CAUGHT)}.*", said, re.MULTILINE)
    return metrics, error and error[0]


def value_of(failure, line):
    """The mean of a failure's metric over its steps."""
    first, last = failure.steps
    return statistics.fmean(line["metrics"][failure.metric][first - 1 : last])


def compare(name, seed):
    """Makes the runs of a failure, prints what tells them apart, and adds their lines to a file."""
    failure, error = FAILURES[name], None
    kept = {each.metric for each in FAILURES.values()} | ALSO_KEPT
    for one in runs_of(name, seed):
        if one["checks"] == "off" and not error:
            break
        metrics, error = start(**one)
        names = sorted(kept & {key for line in metrics for key in line})
        values = {key: [rounded(line.get(key)) for line in metrics] for key in names}
        line = one | {"completed_steps": len(metrics), "error": error, "metrics": values}
        with open(RESULTS, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        said = f"ended in step {len(metrics) + 1} by check_sampler"
        if not error:
            scores = statistics.fmean(values["objective/scores"][-5:])
            said = f"{value_of(failure, line):.3g}, last scores {scores:.3g}"
        unchecked = ", no check" * (one["checks"] == "off")
        print(f"{one['diff'] or 'right'}{unchecked}, seed {seed}: {said}", flush=True)


def show(name, seed):
    """Prints how a script with the bug is made and run, and the right script."""
    right, wrong, _ = runs_of(name, seed)
    copy = f"{right['script'].partition('_')[0]}_{name}.py"
    unchecked = f"scripts/benchmark/failures.py --run off {copy}"
    print(f"python scripts/fork.py --bug {name} {copy}")
    for program, one in ((copy, wrong), (right["script"], right), (unchecked, wrong)):
        print(f"python {program} {shlex.join(one['flags'])} --seed {seed}")


def write_task(name):
    import tasks
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)  # the same bits for any number of cores
    torch.manual_seed(1)
    folder = REPO / TASKS / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    print(f"Writing {folder.relative_to(REPO)} ...", flush=True)
    with contextlib.chdir(REPO), contextlib.redirect_stdout(None):
        getattr(tasks, name)(folder)


def without_checks(script):
    script.check_sampler = lambda *_, **__: 0.0


def main():
    if sys.argv[1:2] == ["--run"]:
        checks, path, *flags = sys.argv[2:]
        call_main(path, flags, without_checks if checks == "off" else lambda script: None)
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(FAILURES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--show", action="store_true", help="print commands, write the task")
    args = parser.parse_args()
    if unknown := set(args.names) - set(FAILURES):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    RESULTS.parent.mkdir(exist_ok=True)
    make_debug_assets()
    for name in args.names or FAILURES:
        first, last = FAILURES[name].steps
        print(f"\n# {name}: {FAILURES[name].metric}, steps {first} to {last}")
        if FAILURES[name].task:
            write_task(FAILURES[name].task)
        for seed in args.seeds:
            (show if args.show else compare)(name, seed)


if __name__ == "__main__":  # vLLM's processes import this file too
    main()
