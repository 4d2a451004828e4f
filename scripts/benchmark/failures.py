"""Twelve mistakes, most of them bugs of others, each beside the right run and told by a metric.

    python scripts/benchmark/failures.py temperature      # a minute or two; without a name: all
    python scripts/benchmark/failures.py temperature --seeds 1 2 3

A bug in the hand: its task is written, and commands are printed. The last one runs a script with
check_sampler and check_draws off:

    python scripts/benchmark/failures.py temperature --show
    python scripts/benchmark/failures.py --run off grpo_temperature.py FLAGS

A bug is a diff of a few lines, scripts/failures/NAME.diff, against one of the scripts;
docs/failures.md tells where it is from. FAILURES says on which task it is seen, by which metric.
The runs, which are those of the debug commands, or of a small task where sorting digits cannot show
it (scripts/failures/tasks.py):

    right           the script as it is
    NAME            with the diff
    NAME, no check  the same without checks, if check_sampler has ended it

A run is a line on the terminal, with the line that docs/failures.jsonl has of it: the mean of the
metric over its steps, and the scores of the last five steps. And it is a line of --results: what it
was, what ended it, its metrics by step. `sources` stands for the diff and the task: with others it
is another run. On two cores a run takes half a minute.
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
from dataclasses import dataclass, field
from pathlib import Path

from run import (
    REPO,
    call_main,
    debug_command,
    flags_of,
    make_debug_assets,
    read_lines,
    rounded,
    run,
)

sys.path += [str(REPO / "scripts" / folder) for folder in (".", "failures", "dev")]
import fork

RECORDED = REPO / "docs/failures.jsonl"

TASKS = "output/failures"  # each task of tasks.py has a folder there
REWARDS = "scripts/failures/rewards.py"
# How check_sampler's message begins
CAUGHT = "RuntimeError: vLLM's log-probabilities are off"
# In lines of results, beside the metrics that tell
ALSO_KEPT = {"objective/scores", "eval/verifiable_correct_rate", "policy/entropy_avg"}


def debug_task(name, **flags):
    """Script and flags of a debug command, in 40 steps of GRPO or 20 of PPO."""
    script, *own = debug_command(name)
    episodes = {"grpo": 40 * 512, "ppo": 20 * 512}[name]
    return script, [*own, *flags_of({"total_episodes": episodes} | flags)]


def random_model_task(script, **flags):
    """Script and flags of a task of random_model, whose responses have up to 64 tokens."""
    flags |= {
        "dataset": "debug_assets/train.parquet",
        "model_name_or_path": f"{TASKS}/random_model/model",
        "dtype": "float32",
        "gradient_checkpointing": False,
        "response_length": 64,
        "reward_workers": 1,
    }
    return script, flags_of(flags)


@dataclass(frozen=True)
class Failure:
    """How a bug is shown: NAME.diff on a task, and what tells the wrong run from the right one."""

    command: tuple[str, list[str]]  # script and flags, but for those of a run
    metric: str
    steps: tuple[int, int]  # the mean over these, first and last, is compared
    task: str | None = None  # the function of tasks.py that writes it
    wrong_flags: dict = field(default_factory=dict)  # of the wrong runs alone


# Responses that have to learn to stop
CHATTY = debug_task(
    "grpo",
    model_name_or_path=f"{TASKS}/chatty_model/model",
    response_length=16,
    total_episodes=20 * 512,
    num_evals=4,
    penalty_reward_value=0,
    mask_truncated_completions=True,
    reward_fn=f"{REWARDS}:answer_first",
    reward_workers=1,
)

FAILURES = {
    "stale_weights": Failure(debug_task("grpo"), "mismatch/kl", (31, 40)),
    # In 30 steps, so that the learning rate is nearly 0 in the last
    "prefix_cache": Failure(
        debug_task(
            "grpo",
            dataset=f"{TASKS}/system_prompt/train.parquet",
            eval_dataset=f"{TASKS}/system_prompt/test.parquet",
            model_name_or_path=f"{TASKS}/system_prompt/model",
            total_episodes=30 * 256,
            local_rollout_batch_size=32,
            local_mini_batch_size=128,
            num_eval_prompts=200,
            num_evals=5,
        ),
        "mismatch/kl",
        (30, 30),
        task="system_prompt",
    ),
    "temperature": Failure(debug_task("grpo", temperature=0.7), "mismatch/kl", (1, 1)),
    "retokenized": Failure(
        debug_task("grpo", model_name_or_path=f"{TASKS}/pair_tokens/model"),
        "mismatch/kl",
        (1, 1),
        task="pair_tokens",
    ),
    "end_token": Failure(CHATTY, "objective/stop_rate", (11, 20), task="chatty_model"),
    "reward_late": Failure(debug_task("ppo"), "loss/value_avg", (1, 1)),
    "truncated": Failure(CHATTY, "optim/grad_norm", (1, 1), task="chatty_model"),
    # A right run is the same with any micro-batches
    "micro_batches": Failure(
        debug_task("grpo"),
        "optim/grad_norm",
        (1, 1),
        wrong_flags={"per_device_train_batch_size": 16},
    ),
    "product_mask": Failure(
        random_model_task(
            "grpo_vllm_async.py",
            total_episodes=16 * 256,
            local_rollout_batch_size=32,
            number_samples_per_prompt=8,
            local_mini_batch_size=32,
            per_device_train_batch_size=32,
            learning_rate=1e-3,
            mismatch_mask="sequence",
            reward_fn=f"{REWARDS}:sevens",
        ),
        "mismatch/masked",
        (2, 16),
        task="random_model",
    ),
    "wrong_groups": Failure(
        debug_task(
            "grpo",
            dataset=f"{TASKS}/half_impossible/train.parquet",
            total_episodes=20 * 512,
            num_evals=4,
        ),
        "val/zero_variance_groups",
        (11, 20),
        task="half_impossible",
    ),
    "cold_value": Failure(
        random_model_task(
            "ppo_vllm_async.py",
            total_episodes=10 * 256,
            local_rollout_batch_size=256,
            local_mini_batch_size=256,
            per_device_train_batch_size=64,
            learning_rate=1e-3,
            value_learning_rate=1e-4,
            reward_fn=f"{REWARDS}:one",
        ),
        "objective/sequence_lengths",
        (10, 10),
        task="random_model",
    ),
    "dead_reward": Failure(
        debug_task("grpo"),
        "objective/scores",
        (31, 40),
        wrong_flags={"reward_fn": f"{REWARDS}:sorting_then_dead", "reward_workers": 1},
    ),
}


@dataclass(frozen=True)
class Run:
    """A run; what its line in --results begins with."""

    script: str
    diff: str | None  # a name; None: the script as it is
    checks: str  # on or off
    flags: list[str] = field(hash=False)
    seed: int
    sources: str  # a hash of the diff and the task

    def __str__(self):
        return f"{self.diff or 'right'}{', no check' * (self.checks == 'off')}, seed {self.seed}"


def runs_of(name, seed):
    """The runs of a failure: right; wrong; wrong without the check."""
    failure = FAILURES[name]
    script, flags = failure.command
    wrong_flags = [*flags, *flags_of(failure.wrong_flags)]
    sources = ["tasks.py", "rewards.py"] if failure.task else []
    right = hash_of(sources)
    if "reward_fn" in failure.wrong_flags and not failure.task:
        sources = ["rewards.py"]
    wrong = hash_of([*sources, f"{name}.diff"])
    return (
        Run(script, None, "on", flags, seed, right),
        Run(script, name, "on", wrong_flags, seed, wrong),
        Run(script, name, "off", wrong_flags, seed, wrong),
    )


def hash_of(names):
    """A hash of some files of scripts/failures; of diffs the lines that they change."""
    texts = [(REPO / "scripts/failures" / name).read_text("utf-8") for name in names]
    for i, text in enumerate(texts):
        if text.startswith("diff "):
            texts[i] = re.findall(r"^[-+](?![-+]{2} ).*", text, re.MULTILINE)
    return hashlib.blake2b(repr(texts).encode(), digest_size=4).hexdigest()


def without_checks(script):
    script.check_sampler = script.check_draws = lambda *_, **__: 0.0


def start(one):
    """Makes a run; returns its line of --results.

    The program ends if the run fails, unless that was check_sampler ending a wrong one.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, one.script)
        if one.diff:
            fork.write_fork(one.diff, path, is_bug=True)
        else:
            shutil.copy(REPO / one.script, path)
        words = [__file__, "--run", one.checks, path, *one.flags, "--seed", str(one.seed)]
        may_end = one.diff and one.checks == "on"
        metrics, said = run(words, folder, expected=CAUGHT if may_end else None)
    kept = {failure.metric for failure in FAILURES.values()} | ALSO_KEPT
    error = re.search(f"^{re.escape(CAUGHT)}.*", said, re.MULTILINE)
    values = {
        name: [rounded(line.get(name)) for line in metrics]
        for name in sorted(kept)
        if any(name in line for line in metrics)
    }
    line = vars(one) | {"completed_steps": len(metrics), "error": error and error[0]}
    return line | {"metrics": values}


def find(one, lines):
    """The line of a run among those of a file, or None."""
    return next((line for line in lines if vars(one).items() <= line.items()), None)


def value_of(failure, line):
    """The mean of a failure's metric over its steps."""
    first, last = failure.steps
    return statistics.fmean(line["metrics"][failure.metric][first - 1 : last])


def describe(failure, line):
    """A line of results, in short."""
    if line is None:
        return "no such run"
    if line["error"]:
        return f"ended in step {line['completed_steps'] + 1} by check_sampler"
    scores = statistics.fmean(line["metrics"]["objective/scores"][-5:])
    return f"{value_of(failure, line):.3g}, last scores {scores:.3g}"


def compare(name, seed, results):
    """Makes the runs of a failure, prints what tells them apart, and adds their lines to a file."""
    failure, recorded = FAILURES[name], read_lines(RECORDED)
    error = None
    for one in runs_of(name, seed):
        if one.checks == "off" and not error:
            break
        line = start(one)
        error = line["error"]
        with open(results, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        before = describe(failure, find(one, recorded))
        print(f"{one}: {describe(failure, line)} (docs/failures.jsonl: {before})", flush=True)


def show(name, seed):
    """Prints how a script with the bug is made and run, and the right script."""
    right, wrong, unchecked = runs_of(name, seed)
    copy = f"{right.script.partition('_')[0]}_{name}.py"
    print(f"python scripts/fork.py --bug {name} {copy}")
    for program, one in (
        (copy, wrong),
        (right.script, right),
        (f"scripts/benchmark/failures.py --run off {copy}", unchecked),
    ):
        print(f"python {program} {shlex.join(one.flags)} --seed {one.seed}")


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
    parser.add_argument("--results", type=Path, default=Path("output/failures.jsonl"))
    parser.add_argument("--show", action="store_true", help="print commands, write the task")
    args = parser.parse_args()
    if unknown := set(args.names) - set(FAILURES):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    results = args.results.expanduser()
    results.parent.mkdir(parents=True, exist_ok=True)
    make_debug_assets()
    for name in args.names or FAILURES:
        first, last = FAILURES[name].steps
        print(f"\n# {name}: {FAILURES[name].metric}, steps {first} to {last}")
        if FAILURES[name].task:
            write_task(FAILURES[name].task)
        for seed in args.seeds:
            if args.show:
                show(name, seed)
            else:
                compare(name, seed, results)


if __name__ == "__main__":  # vLLM's processes import this file too
    main()
