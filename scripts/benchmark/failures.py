"""Twelve mistakes, most of them bugs of others: what each does to a run, and which metric tells.

    python scripts/benchmark/failures.py                  # all that --results lacks: 40 minutes
    python scripts/benchmark/failures.py temperature      # some, by name
    python scripts/benchmark/failures.py --draw           # the table; the picture beside --results

A bug in the hand: its task is written, and commands are printed. The last one runs a script with
check_sampler and check_draws off:

    python scripts/benchmark/failures.py temperature --show
    python scripts/benchmark/failures.py --run off grpo_temperature.py FLAGS

A bug is a diff of a few lines, scripts/failures/NAME.diff, against one of the scripts;
docs/failures.md tells where it is from. FAILURES says on which task it is seen, by which metric.
The runs of a failure, with seeds 1, 2 and 3:

    right     the script as it is. Failures of one task share these
    wrong     with the diff. If check_sampler ends it, its line says where, and it runs once more
              with the check off

A failure is told from the right run by a metric's mean over some steps: all three values of the
wrong runs are on the same side of all three of the right ones, and the gap is wider than the spread
of the right ones. The exit status is 1 if one is not told, or not run.

The runs are those of the debug commands, or of a small task where sorting digits cannot show it
(scripts/failures/tasks.py). They go on where they were stopped. A line of --results is a run: what
it was, what ended it, its metrics by step. `sources` stands for the diff and the task: with others
it is another run. On two cores a run takes half a minute.
"""

import argparse
import contextlib
import hashlib
import importlib
import json
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from gpu_check import debug_command, flags_of, rounded

REPO = Path(__file__).resolve().parent.parent.parent
sys.path += [str(REPO / "scripts" / folder) for folder in (".", "failures", "dev")]

SEEDS = (1, 2, 3)
TASKS = "output/failures"  # each task of tasks.py has a folder there
REWARDS = "scripts/failures/rewards.py"
# How check_sampler's message begins
CAUGHT = "RuntimeError: vLLM's log-probabilities are off"


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
    wrong_is_higher: bool
    effect: str = "objective/scores"  # drawn beside the metric
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
    "stale_weights": Failure(
        debug_task("grpo"), metric="mismatch/kl", steps=(31, 40), wrong_is_higher=True
    ),
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
        metric="mismatch/kl",
        steps=(30, 30),
        wrong_is_higher=True,
        task="system_prompt",
    ),
    "temperature": Failure(
        debug_task("grpo", temperature=0.7),
        metric="mismatch/kl",
        steps=(1, 1),
        wrong_is_higher=True,
    ),
    "retokenized": Failure(
        debug_task("grpo", model_name_or_path=f"{TASKS}/pair_tokens/model"),
        metric="mismatch/kl",
        steps=(1, 1),
        wrong_is_higher=True,
        task="pair_tokens",
    ),
    "end_token": Failure(
        CHATTY,
        metric="objective/stop_rate",
        steps=(11, 20),
        wrong_is_higher=False,
        task="chatty_model",
    ),
    "reward_late": Failure(
        debug_task("ppo"), metric="loss/value_avg", steps=(1, 1), wrong_is_higher=False
    ),
    "truncated": Failure(
        CHATTY, metric="optim/grad_norm", steps=(1, 1), wrong_is_higher=False, task="chatty_model"
    ),
    # A right run is the same with any micro-batches
    "micro_batches": Failure(
        debug_task("grpo"),
        metric="optim/grad_norm",
        steps=(1, 1),
        wrong_is_higher=True,
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
        metric="mismatch/masked",
        steps=(2, 16),
        wrong_is_higher=True,
        task="random_model",
    ),
    "wrong_groups": Failure(
        debug_task(
            "grpo",
            dataset=f"{TASKS}/half_impossible/train.parquet",
            total_episodes=20 * 512,
            num_evals=4,
        ),
        metric="val/zero_variance_groups",
        steps=(11, 20),
        wrong_is_higher=False,
        effect="eval/verifiable_correct_rate",
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
        metric="objective/sequence_lengths",
        steps=(10, 10),
        wrong_is_higher=False,
        task="random_model",
    ),
    "dead_reward": Failure(
        debug_task("grpo"),
        metric="objective/scores",
        steps=(31, 40),
        wrong_is_higher=False,
        effect="policy/entropy_avg",
        wrong_flags={"reward_fn": f"{REWARDS}:sorting_then_dead", "reward_workers": 1},
    ),
}


# -------------------------------------------------------------------------- in the run's process


def run_script(checks, path, flags):
    """Does what `python PATH FLAGS` does, but for pictures; on demand without checks of vLLM."""
    sys.path.insert(0, str(Path(path).parent))  # vLLM's process imports it, too
    script = importlib.import_module(Path(path).stem)
    if checks == "off":
        script.check_sampler = script.check_draws = lambda *_, **__: 0.0
    try:
        script.main(script.tyro.cli(script.Args, args=flags))
    except BaseException as error:
        script.end_at_once(error)


# ------------------------------------------------------------------------------------------ runs


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
        what = f"{self.diff}, checks {self.checks}" if self.diff else f"right {self.script}"
        return f"{what}, seed {self.seed}"


def read_lines(path):
    return (
        [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []
    )


def metrics_to_keep():
    """Those that some failure compares or draws, and the held-out rate."""
    names = {name for failure in FAILURES.values() for name in (failure.metric, failure.effect)}
    return sorted(names | {"objective/scores", "eval/verifiable_correct_rate"})


def start(run):
    """Runs it; returns its line of --results.

    RuntimeError: it failed, and that was not check_sampler ending a wrong run.
    """
    import fork

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = folder / run.script
        if run.diff:
            fork.write_fork(run.diff, path, is_bug=True)
        else:
            shutil.copy(REPO / run.script, path)
        command = [sys.executable, __file__, "--run", run.checks, str(path), *run.flags]
        command += flags_of({"seed": run.seed, "output_dir": folder, "run_name": "run"})
        result = subprocess.run(
            command,
            cwd=REPO,
            env=os.environ | {"OMP_NUM_THREADS": "1"},  # as the debug commands have it
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
        )
        metrics = read_lines(folder / "run/metrics.jsonl")
    error = None
    if result.returncode:
        error = (result.stderr.strip().splitlines() or [""])[-1]
        if not run.diff or run.checks == "off" or not error.startswith(CAUGHT):
            raise RuntimeError(f"{run} failed:\n{result.stdout}\n{result.stderr}")
    values = {
        name: [rounded(line.get(name)) for line in metrics]
        for name in metrics_to_keep()
        if any(name in line for line in metrics)
    }
    return vars(run) | {"completed_steps": len(metrics), "error": error, "metrics": values}


class Results:
    """Lines of runs, read from a file and added to it."""

    def __init__(self, path):
        self.path, self.lines = path, read_lines(path)

    def find(self, run):
        """The line of a run, or None."""
        for line in self.lines:
            if vars(run).items() <= line.items():
                return line
        return None

    def get(self, run):
        """The line of a run, which is made first if there is none."""
        line = self.find(run)
        if line is None:
            print(f"{run} ... ", end="", flush=True)
            started = time.monotonic()
            line = start(run)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            self.lines.append(line)
            ended = line["error"] or f"{line['completed_steps']} steps"
            print(f"{ended}, {time.monotonic() - started:.0f} s", flush=True)
        return line


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


def show(name):
    """Prints how a script with the bug is made and run, and the right script."""
    right, wrong, unchecked = runs_of(name, SEEDS[0])
    copy = f"{right.script.partition('_')[0]}_{name}.py"
    print(f"\n# {name}\npython scripts/fork.py --bug {name} {copy}")
    for program, run in (
        (copy, wrong),
        (right.script, right),
        (f"scripts/benchmark/failures.py --run off {copy}", unchecked),
    ):
        print(f"python {program} {shlex.join(run.flags)} --seed {run.seed}")


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
    with contextlib.redirect_stdout(None):
        getattr(tasks, name)(folder)


def run_failure(name, results):
    for seed in SEEDS:
        right, wrong, unchecked = runs_of(name, seed)
        results.get(right)
        if results.get(wrong)["error"]:
            results.get(unchecked)


# -------------------------------------------------------------------------- the table, the picture


def lines_of(name, results):
    """Lines of a failure by seed: the right runs; the wrong ones, whole; those that a check ended.

    None: some are missing.
    """
    right, wrong, ended = [], [], []
    for seed in SEEDS:
        lines = [results.find(run) for run in runs_of(name, seed)]
        if lines[0] is None or lines[1] is None:
            return None
        is_caught = bool(lines[1]["error"])
        if is_caught and lines[2] is None:
            return None
        right.append(lines[0])
        wrong.append(lines[1 + is_caught])
        if is_caught:
            ended.append(lines[1])
    return right, wrong, ended


def value_of(failure, line):
    """The mean of a failure's metric over its steps."""
    first, last = failure.steps
    return statistics.fmean(line["metrics"][failure.metric][first - 1 : last])


def is_told(right, wrong, wrong_is_higher):
    """Whether all wrong values are beyond all right ones, by more than those differ.

    >>> is_told([1.0, 1.1, 1.2], [1.5, 2.0, 3.0], wrong_is_higher=True)
    True
    >>> is_told([1.0, 1.1, 1.2], [1.3, 2.0, 3.0], wrong_is_higher=True)
    False
    """
    if not wrong_is_higher:
        right, wrong = [-value for value in right], [-value for value in wrong]
    return min(wrong) - max(right) > max(right) - min(right)


def in_short(values):
    """Three digits of each.

    >>> in_short([0.12345, 1e-13])
    '0.123, 1e-13'
    """
    return ", ".join(f"{value:.3g}" for value in values)


def table_of(names, results):
    """A table in Markdown, by lines; and the names of those that are not told, or not run."""
    lines = [
        "| failure | told by | right | wrong | last scores, right | wrong | a check ends it |",
        "|---|---|---|---|---|---|---|",
    ]
    not_told = []
    for name in names:
        failure, sides = FAILURES[name], lines_of(name, results)
        if sides is None:
            not_told.append(name)
            lines.append(f"| {name} | not run | | | | | |")
            continue
        right, wrong, ended = sides
        values = [[value_of(failure, line) for line in side] for side in (right, wrong)]
        scores = [
            [statistics.fmean(line["metrics"]["objective/scores"][-5:]) for line in side]
            for side in (right, wrong)
        ]
        if not is_told(*values, failure.wrong_is_higher):
            not_told.append(name)
        first, last = failure.steps
        steps = f"step {first}" if first == last else f"steps {first} to {last}"
        cells = [name, f"`{failure.metric}`, {steps}", *map(in_short, [*values, *scores])]
        steps = {line["completed_steps"] + 1 for line in ended}
        cells.append(f"in step {', '.join(map(str, sorted(steps)))}" if ended else "none does")
        lines.append(f"| {' | '.join(cells)} |")
    return lines, not_told


def draw(names, results, path):
    """A picture of each failure: its metric and its effect, every seed a line."""
    from matplotlib.figure import Figure

    drawn = {name: lines for name in names if (lines := lines_of(name, results))}
    if not drawn:
        return
    rows = -(-len(drawn) // 2)
    figure = Figure(figsize=(17, 2.6 * rows), layout="constrained")
    panels = iter(figure.subplots(rows, 4, squeeze=False).flatten())
    for name, (right, wrong, _) in drawn.items():
        failure = FAILURES[name]
        for metric in (failure.metric, failure.effect):
            axes = next(panels)
            for lines, color, label in ((right, "C0", "right"), (wrong, "C3", name)):
                for line in lines:
                    values = line["metrics"].get(metric, [])
                    points = [(i, v) for i, v in enumerate(values, 1) if v is not None]
                    if points:
                        axes.plot(*zip(*points, strict=True), color=color, linewidth=1, label=label)
                    label = None
            axes.set_title(f"{name}: {metric}", fontsize=9)
            axes.grid(alpha=0.3)
            if metric == failure.metric:
                axes.legend(fontsize=8)
                axes.axvspan(failure.steps[0] - 0.5, failure.steps[1] + 0.5, color="0.93")
                if metric == "mismatch/kl":
                    axes.set_yscale("log")
    for axes in panels:
        axes.set_axis_off()
    figure.savefig(path, dpi=80)
    print(f"\nWrote {path}")


def main():
    if sys.argv[1:2] == ["--run"]:
        checks, path, *flags = sys.argv[2:]
        run_script(checks, path, flags)
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(FAILURES))
    parser.add_argument("--results", type=Path, default=Path("output/failures.jsonl"))
    parser.add_argument("--draw", action="store_true", help="run nothing")
    parser.add_argument("--show", action="store_true", help="print commands, write the task")
    args = parser.parse_args()
    if unknown := set(args.names) - set(FAILURES):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    names, results = args.names or list(FAILURES), Results(args.results.expanduser().absolute())
    if not args.draw:
        debug_assets = [sys.executable, "scripts/dev/make_debug_assets.py"]
        subprocess.run(debug_assets, cwd=REPO, check=True, capture_output=True)
        os.chdir(REPO)
        for name in names:
            if FAILURES[name].task:
                write_task(FAILURES[name].task)
            show(name) if args.show else run_failure(name, results)
    if args.show:
        return
    table, not_told = table_of(names, results)
    print("\n".join(["", *table, *(f"NOT TOLD: {name}" for name in not_told)]))
    draw(names, results, results.path.with_suffix(".png"))
    sys.exit(bool(not_told))


if __name__ == "__main__":  # vLLM's processes import this file too
    main()
