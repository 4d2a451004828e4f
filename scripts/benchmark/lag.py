r"""What old weights in the sampler cost: runs in turns whose vLLM is k training steps behind.

One cell, which a reader compares with its line:

    python scripts/benchmark/lag.py --lags 4 --corrections none --seeds 1

The grid. It goes on where it was stopped, and what is in --results is not run again:

    python scripts/benchmark/lag.py --find_rate     # the highest rate at which lag 0 learns: 2e-3
    python scripts/benchmark/lag.py --rates 5e-4 1e-3 2e-3
    python scripts/benchmark/lag.py --lags 2 8
    python scripts/benchmark/lag.py --lags 4 16 --seeds 4 5
    python scripts/benchmark/lag.py --lags 0 1 --seeds 4 5 --corrections none truncate
    python scripts/benchmark/lag.py --rates 1e-3 --lags 4 16 --seeds 4 5 \
        --corrections truncate sequence
    python scripts/benchmark/lag.py --lags 0 4 --noises 0.001 0.01 --corrections none truncate
    python scripts/benchmark/lag.py --task ppo --find_rate     # 8e-4
    python scripts/benchmark/lag.py --task ppo --rates 8e-4 1.6e-3 --lags 0 4 16 \
        --corrections none truncate
    python scripts/benchmark/lag.py --draw          # tables, and two pictures beside --results

docs/lag.jsonl has what was run of it; not this, an hour:

    python scripts/benchmark/lag.py --task smollm2 --model PATH --lags 0 4 --seeds 1 \
        --corrections none truncate

A script with its own flags, but for a lag of 4 and a noise of 0.1%:

    python scripts/benchmark/lag.py --run 4 0.001 grpo_vllm_async.py --dataset ...

Lag. The scripts run as they are, with --no-async_mode; VLLM.sync_weights is wrapped. Batch g is
sampled by version max(0, g - 1 - lag): from step lag + 1 on the sampler is exactly `lag` steps
behind. The engine is told the version that it really has. So policy/staleness and
eval/policy_version are true, and check_sampler compares what has equal weights: batch 1, and with
lag 0 every batch. Lag 0 is the script in turns to the bit, and lag 1 is the script with
--async_mode to the bit (tests/test_lag.py).

Noise. Each weight of the sampler is multiplied by 1 + noise * z, z standard normal; rounding to
bfloat16 changes it by up to 0.4%. That is an error of the engine which has nothing to do with age.
A version has one noise, however often the engine gets it. On a CPU, where vLLM has a copy of a tied
head, that has its own. check_sampler and check_draws are off.

Evaluations are answered by the weights that the engine has, and count for their version. The sync
after the last step is for the last evaluation alone, as it is with --async_mode: it gives the last
version, without lag or noise. So the final rate is that of the policy that was trained, after
equally many steps in all arms. In between, versions are seen `lag` steps late, and of the last
ones before the end `lag` are never seen. (Without a lag in evaluations each would cost two syncs,
and a Rollout has one version for both its halves.) So the steps to 90% are an interval: of the
versions that were evaluated, the last one below and the first one that is not. It is wide where a
run with a large lag gets there late.

Tasks: grpo and ppo are 40 steps of the debug commands, with an evaluation every second step. So
lag 0 of grpo is what this command does, and lag 1 is the same without --no-async_mode:

    bash scripts/train/debug/grpo.sh --total_episodes 20480 --num_evals 20 --no-async_mode

smollm2 is scripts/train/smollm2/grpo.sh (--model: a folder, if not from the hub). --rates are the
policy's learning rates; a value model keeps its own. --find_rate doubles the task's own rate, at
lag 0, until with a seed less than 90% are right at the end.

Corrections: none is --tis_cap 0, truncate is --tis_cap 2, as by default; sequence is
--mismatch_mask sequence on top of that, as a user would add it. Without lag or noise it masks
nothing, and must be equal to truncate; --draw checks that, and takes truncate's for those that were
not run. docs/lag.jsonl has a fourth, token, a mask of single tokens, which was an option of the
scripts once. Other flags go to the script, and make another cell.

A line of --results is a cell: its settings, the final held-out rate, the steps to 90%, means over
the steps of the effective sample size (ess, mismatch/ess) and of the KL of the sampler to the
learner (kl, mismatch/kl), every evaluation as [version, rate, score], and ess and KL of each step.
A rate is the share of right answers; of smollm2, of those that meet all their constraints. A run
that fails has its output printed, and no line: the others still run, and the exit status is 1. On
two cores a cell of grpo or ppo takes a minute, of smollm2 about fifteen.
"""

import argparse
import importlib
import itertools
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from gpu_check import debug_command, flags_of, rounded

REPO = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(REPO))  # vLLM's process imports the script, too

DEBUG = {"total_episodes": 40 * 512, "num_evals": 20}
CORRECTIONS = {
    "none": {"tis_cap": 0.0, "mismatch_mask": "none"},
    "truncate": {"tis_cap": 2.0, "mismatch_mask": "none"},
    "sequence": {"tis_cap": 2.0, "mismatch_mask": "sequence"},
}
DRAWN = ("none", "truncate", "token", "sequence")  # token: in docs/lag.jsonl
# Flags that are settings of a cell, or of where it runs
OWN_FLAGS = {"learning_rate", "seed", "tis_cap", "mismatch_mask", "async_mode", "no-async_mode"}
OWN_FLAGS |= {"output_dir", "run_name"}
RIGHT = 0.9  # of held-out prompts, which is to be reached
TOLERANCE = 0.02  # a lag whose final rate is this far below lag 0's is too large
SMALLEST_KL = 1e-7  # in pictures: below is float32's rounding
ESS_EDGES = (0, 0.4, 0.6, 0.7, 0.8, 0.9, 1)  # of the second table


# -------------------------------------------------------------------------- in the run's process


def with_noise(weights, noise, seed):
    """{name: tensor}, each number times 1 + noise * z, with z standard normal by the seed."""
    import torch

    if noise == 0:
        return weights
    generator = torch.Generator().manual_seed(seed)
    noisy = {}
    for name, weight in weights.items():
        z = torch.randn(weight.shape, generator=generator).to(weight.device)
        noisy[name] = (weight * (1 + noise * z)).to(weight.dtype)
    return noisy


def give_old_weights(script, lag, noise):
    """Has script.VLLM.sync_weights give the engine the weights of `lag` versions ago, with noise.

    As long as there is no version so old, version 0; the last version as it is. The engine is told
    the version that it gets.
    """
    sync_weights = script.VLLM.sync_weights
    kept = {}  # {version: {name: tensor}}, of the last lag + 1 versions

    def sync_old_weights(self, weights, version):
        # The learner's own, which it will change
        kept[version] = {name: weight.clone() for name, weight in weights}
        given = max(0, version - lag)
        if version == self.args.num_training_steps:
            sync_weights(self, kept[version].items(), version)
            return
        for old in [old for old in kept if old < given]:
            del kept[old]
        seed = script.stable_hash(self.args.seed, "noise", given)
        sync_weights(self, with_noise(kept[given], noise, seed).items(), given)

    script.VLLM.sync_weights = sync_old_weights
    if noise > 0:
        script.check_sampler = script.check_draws = lambda *_, **__: 0.0


def run_script(lag, noise, name, flags):
    """Does what `python SCRIPT --no-async_mode` does, but for its pictures, with lag and noise."""
    script = importlib.import_module(name.removesuffix(".py"))
    give_old_weights(script, lag, noise)
    run_program = script.run_program

    def run_provenance(program, *args):
        if program == "provenance.py":
            run_program(program, *args)

    script.run_program = run_provenance
    args = script.tyro.cli(script.Args, args=[*flags, "--no-async_mode"])
    try:
        if args.lora_rank or args.resume_from_checkpoint:
            raise ValueError("lag.py takes neither adapters nor a run that is resumed")
        script.main(args)
    except BaseException as error:
        script.end_at_once(error)


# ----------------------------------------------------------------------------------------- cells


@dataclass(frozen=True)
class Cell:
    """The settings of a run."""

    task: str
    lag: int
    correction: str  # of DRAWN
    rate: float  # the policy's learning rate
    noise: float
    seed: int
    flags: tuple[str, ...]  # others, of the script

    def __str__(self):
        text = f"{self.task}, rate {self.rate:g}, lag {self.lag}, {self.correction}"
        if self.noise:
            text += f", noise {self.noise:g}"
        return " ".join([f"{text}, seed {self.seed}", *self.flags])


def cell_of(line):
    """The Cell of a line of results."""
    settings = {field.name: line[field.name] for field in fields(Cell)}
    return Cell(**settings | {"flags": tuple(line["flags"])})


def read_lines(path):
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def command_of(task, model):
    """Script and flags of a task, but for the settings of a cell."""
    if task != "smollm2":
        return [*debug_command(task), *flags_of(DEBUG)]
    text = (REPO / "scripts/train/smollm2/grpo.sh").read_text("utf-8")
    flags = shlex.split(re.search(r"^flags=\(\n(.*?)^\)", text, re.S | re.M)[1], comments=True)
    return ["grpo_vllm_async.py", "--model_name_or_path", model, *flags]


def own_rate(task, model):
    """The learning rate of a task's command.

    >>> own_rate("grpo", None), own_rate("smollm2", "model")
    (0.0005, 3e-05)
    """
    words = command_of(task, model)
    return float(words[words.index("--learning_rate") + 1])


def prepare(task):
    """Writes the prompts of a task, and the debug model."""
    program = ["scripts/dev/make_debug_assets.py"]
    if task == "smollm2":
        program = ["scripts/data_preprocess/instructions.py", "--local_save_dir"]
        program.append("data/instructions")
    subprocess.run([sys.executable, *program], cwd=REPO, check=True, capture_output=True)


def steps_to(share, evaluations):
    """The last version below a share of right answers, and the first that is not; None: none is.

    evaluations: [version, rate, score] of each, in order.

    >>> steps_to(0.9, [[0, 0.5, 0], [2, 0.8, 0], [8, 0.93, 0], [10, 0.89, 0]])
    [2, 8]
    >>> steps_to(0.9, [[0, 0.5, 0], [2, 0.8, 0]])
    """
    below = 0
    for version, rate, _ in evaluations:
        if rate >= share:
            return [below, version]
        below = version
    return None


def figures_of(metrics):
    """What a line of results says of a run, by the lines of its metrics.jsonl."""
    evaluations = {}  # by version, of which one may be evaluated several times, alike
    for line in metrics:
        if "eval/policy_version" in line:
            rate, score = line["eval/verifiable_correct_rate"], line["eval/scores"]
            evaluations[int(line["eval/policy_version"])] = rounded(rate), rounded(score)
    evaluations = [[version, *found] for version, found in sorted(evaluations.items())]
    ess, kl = ([line[name] for line in metrics] for name in ("mismatch/ess", "mismatch/kl"))
    return {
        "final": evaluations[-1][1],
        "steps_to_90": steps_to(RIGHT, evaluations),
        "ess": rounded(statistics.fmean(ess)),
        "kl": rounded(statistics.fmean(kl)),
        "evaluations": evaluations,
        "ess_of_steps": [rounded(value) for value in ess],
        "kl_of_steps": [rounded(value) for value in kl],
    }


def run(cell, model):
    """Runs a cell; returns its line of results. RuntimeError: it failed; with its output."""
    script, *flags = command_of(cell.task, model)
    settings = {"learning_rate": cell.rate, "seed": cell.seed, "run_name": "run"}
    settings |= CORRECTIONS[cell.correction]
    # As their commands have it
    threads = os.cpu_count() if cell.task == "smollm2" else 1
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--run", str(cell.lag), str(cell.noise), script]
        command += [*flags, *cell.flags, *flags_of(settings | {"output_dir": folder})]
        result = subprocess.run(
            command,
            cwd=REPO,
            env={"OMP_NUM_THREADS": str(threads), **os.environ},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
        )
        if result.returncode:
            raise RuntimeError(f"{result.stdout}\n{result.stderr}")
        run_dir = Path(folder, "run")
        metrics = read_lines(run_dir / "metrics.jsonl")
        commit = json.loads((run_dir / "args.json").read_bytes())["provenance"]["commit"]
    for version, line in enumerate(metrics):
        assert line["policy/staleness"] == min(cell.lag, version), f"version {version}"
    seconds = round(time.monotonic() - start)
    return asdict(cell) | figures_of(metrics) | {"seconds": seconds, "commit": commit}


def run_all(cells, path, model):
    """Runs the cells of which path has no line, one at a time.

    Returns the lines of all cells, in their order; None for one that failed.
    """
    lines = {cell_of(line): line for line in read_lines(path)} if path.exists() else {}
    to_do = [cell for cell in cells if cell not in lines]
    print(f"{len(cells)} cells, of which {len(cells) - len(to_do)} are in {path}", flush=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    for number, cell in enumerate(to_do, 1):
        print(f"{number} of {len(to_do)}: {cell} ... ", end="", flush=True)
        try:
            line = run(cell, model)
        except RuntimeError as error:
            print(f"FAILED\n{error}", flush=True)
            continue
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        lines[cell] = line
        left = (time.monotonic() - start) / number * (len(to_do) - number)
        print(f"{describe(line)}; {left / 60:.0f} minutes left", flush=True)
    return [lines.get(cell) for cell in cells]


def describe(line):
    """A line of results, in short."""
    reached = "90% never seen"
    if line["steps_to_90"]:
        reached = "90% after {} to {} steps".format(*line["steps_to_90"])
    return (
        f"{line['final']:.1%} right at the end, {reached}, ess {line['ess']:.3f}, "
        f"KL {line['kl']:.2g}, {line['seconds']} s"
    )


def find_rate(task, seeds, flags, path, model):
    """The highest learning rate at which lag 0 learns: with every seed 90% are right at the end.

    From the task's own on it is doubled until that fails. None: its own fails.
    """
    highest = None
    for doublings in itertools.count():
        rate = own_rate(task, model) * 2**doublings
        cells = [Cell(task, 0, "truncate", rate, 0.0, seed, flags) for seed in seeds]
        lines = run_all(cells, path, model)
        if None in lines:
            sys.exit(f"a run at {rate:g} failed; the highest rate below it that learns: {highest}")
        if min(line["final"] for line in lines) < RIGHT:
            return highest
        highest = rate


# ------------------------------------------------------------------------- the table, the pictures


def setting_of(line):
    """What the lines of a panel share: all but lag, correction and seed. It sorts them, too."""
    return line["task"], tuple(line["flags"]), line["rate"], line["noise"]


def title_of(setting):
    task, flags, rate, noise = setting
    title = f"{task}, rate {rate:g}" + f", noise {noise:g}" * (noise > 0)
    return " ".join([title, *flags])


def group(lines, key):
    """{key(line): its lines}, sorted by key."""
    groups = {}
    for line in lines:
        groups.setdefault(key(line), []).append(line)
    return dict(sorted(groups.items()))


def corrections_in(lines):
    """Those of DRAWN that lines have: (number, name, its lines)."""
    for number, name in enumerate(DRAWN):
        own = [line for line in lines if line["correction"] == name]
        if own:
            yield number, name, own


def largest_lag(rates):
    """The largest lag up to which all final rates are within two points of lag 0's.

    rates: {lag: rate}.

    >>> largest_lag({0: 0.99, 1: 0.98, 4: 0.9, 16: 0.98})
    1
    """
    least = rates[0] - TOLERANCE - 1e-9  # the last: of rounding
    return max(itertools.takewhile(lambda lag: rates[lag] >= least, sorted(rates)))


def is_compared(rates):
    """Whether there are a lag 0 and another; rates: {lag: rate}."""
    return 0 in rates and len(rates) > 1


def cell_text(finals):
    """The mean of some rates, in %, and the least and the greatest; their number unless it is 3.

    >>> cell_text([0.99, 0.98, 1.0]), cell_text([0.5])
    ('99.0 (98.0 to 100.0)', '50.0 (1 seed)')
    """
    mean, least, most = (100 * of(finals) for of in (statistics.fmean, min, max))
    if len(finals) == 1:
        return f"{mean:.1f} (1 seed)"
    number = "" if len(finals) == 3 else f", {len(finals)} seeds"
    return f"{mean:.1f} ({least:.1f} to {most:.1f}{number})"


def equal_runs(own, of_setting):
    """Runs of truncate that a mask's missing ones would be equal to: without lag or noise."""
    if own[0]["correction"] in ("none", "truncate") or own[0]["noise"]:
        return []
    seeds = {line["seed"] for line in own if line["lag"] == 0}
    return [
        line
        for line in of_setting
        if line["correction"] == "truncate" and line["lag"] == 0 and line["seed"] not in seeds
    ]


def print_table(lines):
    """The final rate by lag, in Markdown; and up to which lag it is within two points of lag 0's.

    That is given for the means, and for each seed that has a lag 0.
    """
    lags = sorted({line["lag"] for line in lines})
    print(f"| | correction | {' | '.join(f'lag {lag}' for lag in lags)} | to lag | of each seed |")
    print("|---|---|" + "---|" * (len(lags) + 2))
    for setting, of_setting in group(lines, setting_of).items():
        for _, name, own in corrections_in(of_setting):
            own = own + equal_runs(own, of_setting)
            by_lag = group(own, lambda line: line["lag"])
            finals = {lag: [line["final"] for line in same] for lag, same in by_lag.items()}
            means = {lag: statistics.fmean(rates) for lag, rates in finals.items()}
            seeds = [
                str(largest_lag(rates))
                for _, same in group(own, lambda line: line["seed"]).items()
                if is_compared(rates := {line["lag"]: line["final"] for line in same})
            ]
            largest = largest_lag(means) if is_compared(means) else ""
            cells = [cell_text(finals[lag]) if lag in finals else "" for lag in lags]
            cells = [title_of(setting), name, *cells, largest, ", ".join(seeds)]
            print(f"| {' | '.join(map(str, cells))} |")


def losses_of(lines):
    """(line, loss) of each run that had a lag: what it ended below the mean of lag 0.

    Lag 0 is that of the same task and learning rate, without noise.
    """
    for _, same in group(
        lines, lambda line: (line["task"], tuple(line["flags"]), line["rate"])
    ).items():
        exact = [line["final"] for line in same if line["lag"] == 0 == line["noise"]]
        others = [line for line in same if line["lag"]]
        for line in others if exact else []:
            yield line, statistics.fmean(exact) - line["final"]


def print_thresholds(lines):
    """How many runs lost over two points, by effective sample size; and what they lost."""
    print("\nlosses by the effective sample size (mean over the steps), against lag 0:")
    losses = list(losses_of(lines))
    for low, high in itertools.pairwise(ESS_EDGES):
        of_size = [(line, loss) for line, loss in losses if low < line["ess"] <= high]
        if not of_size:
            continue
        hurt = sum(loss > TOLERANCE + 1e-9 for _, loss in of_size)
        print(f"  {low:g} to {high:g}: {hurt} of {len(of_size)} runs lost over two points")
        keys = group(of_size, lambda pair: (pair[0]["task"], pair[0]["rate"]))
        for (task, rate), pairs in keys.items():
            of_rate = [100 * loss for _, loss in pairs]
            print(
                f"{'':10}{task}, {rate:g}: {min(of_rate):.1f} to {max(of_rate):.1f} points, "
                f"{len(of_rate)} runs"
            )


def check_controls(lines):
    """Without lag or noise masks take nothing away: those runs must be equal to truncate's."""
    exact = [line for line in lines if line["lag"] == 0 == line["noise"]]
    exact = [line for line in exact if line["correction"] != "none"]
    for (*_, seed), same in group(exact, lambda line: (*setting_of(line), line["seed"])).items():
        for name in ("evaluations", "ess_of_steps", "kl_of_steps"):
            values = [line[name] for line in same]
            assert values.count(values[0]) == len(values), (title_of(setting_of(same[0])), seed)
    print(f"{len(exact)} runs without lag or noise: those of a seed and rate are equal")


def draw_steps(axes, x, line, **look):
    """The steps to 90% as an interval, with a mark at its end; a cross at the top: never seen."""
    top = len(line["ess_of_steps"]) * 1.1
    if line["steps_to_90"] is None:
        axes.plot(x, top, color=look["color"], marker="x", linestyle="")
        return
    axes.plot([x, x], line["steps_to_90"], color=look["color"], linewidth=0.8, alpha=0.5)
    axes.plot(x, line["steps_to_90"][1], linestyle="", **look)


def draw_lags(lines):
    """Held-out rate at the end, and steps to 90%, against lag: a column for each rate, no noise."""
    from matplotlib.figure import Figure

    columns = {
        setting: own
        for setting, own in group(lines, setting_of).items()
        if len({line["lag"] for line in own}) > 1 and not own[0]["noise"]
    }
    if not columns:
        return None
    figure = Figure(figsize=(4 * len(columns), 6.5), layout="constrained")
    grid = figure.subplots(2, len(columns), squeeze=False, sharey="row")
    for (above, below), (setting, of_setting) in zip(grid.T, columns.items(), strict=True):
        lags, seeds = (sorted({line[name] for line in of_setting}) for name in ("lag", "seed"))
        for number, name, own in corrections_in(of_setting):
            look = {"color": f"C{number}", "marker": "o", "markersize": 4}
            place = {lag: i + 0.16 * (number - 1.5) for i, lag in enumerate(lags)}
            for line in own:
                # Seeds beside each other
                x = place[line["lag"]] + 0.03 * (seeds.index(line["seed"]) - len(seeds) / 2)
                above.plot(x, line["final"], linestyle="", **look)
                draw_steps(below, x, line, **look)
            by_lag = group(own, lambda line: line["lag"])
            means = [statistics.fmean(line["final"] for line in same) for same in by_lag.values()]
            xs = [place[lag] for lag in by_lag]
            above.plot(xs, means, color=f"C{number}", linewidth=1, label=name)
        above.set_title(title_of(setting), fontsize=10)
        above.set_ylabel("held-out prompts right at the end")
        above.legend(fontsize=8)
        below.set_ylabel("steps to 90% (cross: not seen)")
        below.set_ylim(bottom=0)
        below.set_xlabel("lag of the sampler, training steps")
        for axes in (above, below):
            axes.set_xticks(range(len(lags)), lags)
            axes.set_xlim(-0.5, len(lags) - 0.5)
            axes.grid(alpha=0.3)
    return figure


def draw_distances(lines):
    """The same against effective sample size and KL: a row for each task, all else in one panel."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    rows = group(lines, lambda line: (line["task"], tuple(line["flags"])))
    figure = Figure(figsize=(17, 3.6 * len(rows) + 0.6), layout="constrained")
    grid = figure.subplots(len(rows), 4, squeeze=False)
    lags = sorted({line["lag"] for line in lines})
    marks = dict(zip(lags, itertools.cycle("osD^vP*"), strict=False))
    for panels, ((task, flags), of_task) in zip(grid, rows.items(), strict=True):
        rates = sorted({line["rate"] for line in of_task})
        for number, _, own in corrections_in(of_task):
            for line in own:
                look = {"color": f"C{number}", "marker": marks[line["lag"]]}
                look["markersize"] = 4 + 2 * rates.index(line["rate"])
                look["markerfacecolor"] = "none" if line["noise"] else f"C{number}"
                kl = max(line["kl"], SMALLEST_KL)
                for x, on_rate, on_steps in ((line["ess"], *panels[:2]), (kl, *panels[2:])):
                    on_rate.plot(x, line["final"], linestyle="", alpha=0.7, **look)
                    draw_steps(on_steps, x, line, alpha=0.7, **look)
        for axes in panels:
            axes.grid(alpha=0.3)
            axes.set_title(" ".join([task, *flags]), fontsize=10)
        for axes in panels[:2]:
            axes.set_xlabel("effective sample size, mean over the steps")
        for axes in panels[2:]:
            axes.set_xscale("log")
            axes.set_xlabel(f"KL of sampler to learner, mean; at least {SMALLEST_KL:g}")
        for axes in panels[::2]:
            axes.set_ylabel("held-out prompts right at the end")
        for axes in panels[1::2]:
            axes.set_ylabel("steps to 90% (cross: not seen)")
    handles = [
        Line2D([], [], color=f"C{number}", linewidth=3, label=name)
        for number, name, _ in corrections_in(lines)
    ]
    for lag, mark in marks.items():
        handles.append(Line2D([], [], color="0.4", marker=mark, linestyle="", label=f"lag {lag}"))
    title = "larger: a higher learning rate; hollow: noise on the sampler's weights"
    figure.legend(handles=handles, title=title, loc="outside upper center", ncols=len(handles))
    return figure


def draw(path):
    """Prints the table of a file of results, and draws its two pictures beside it."""
    lines = read_lines(path)
    check_controls(lines)
    print_table(lines)
    print_thresholds(lines)
    for name, figure in (("lags", draw_lags(lines)), ("distances", draw_distances(lines))):
        if figure is None:
            print(f"No picture of lags: {path} has one lag of each setting")
            continue
        picture = path.with_name(f"{path.stem}_{name}.png")
        figure.savefig(picture, dpi=90)
        print(f"Wrote {picture}")


# -------------------------------------------------------------------------------------- the program


def main():
    if sys.argv[1:2] == ["--run"]:
        lag, noise, script, *flags = sys.argv[2:]
        run_script(int(lag), float(noise), script, flags)
        return
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--task", choices=["grpo", "ppo", "smollm2"], default="grpo")
    add("--lags", type=int, nargs="+", default=[0, 1, 4, 16], help="of the sampler, in steps")
    add("--corrections", choices=CORRECTIONS, nargs="+", default=[*CORRECTIONS])
    add("--rates", type=float, nargs="+", help="learning rates; default: the task's own")
    add(
        "--noises",
        type=float,
        nargs="+",
        default=[0.0],
        help="on the sampler's weights: 0.01 is 1%%",
    )
    add("--seeds", type=int, nargs="+", default=[1, 2, 3])
    add("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="of smollm2")
    add("--results", type=Path, default=Path("output/lag.jsonl"))
    add("--find_rate", action="store_true", help="find the highest rate at which lag 0 learns")
    add("--draw", action="store_true", help="run nothing: print the table, draw the pictures")
    args, flags = parser.parse_known_args()
    args.results = args.results.expanduser()
    if args.draw:
        draw(args.results)
        return
    if own := OWN_FLAGS & {flag.removeprefix("--").partition("=")[0] for flag in flags}:
        parser.error(f"--{own.pop()} is a setting of the cells")
    prepare(args.task)
    model = os.path.expanduser(args.model)
    model = str(Path(model).resolve()) if os.path.isdir(model) else model
    if args.find_rate:
        highest = find_rate(args.task, args.seeds, tuple(flags), args.results, model)
        print(f"The highest learning rate at which lag 0 still learns: {highest}")
        return
    rates = args.rates or [own_rate(args.task, model)]
    # Seed by seed: who stops early has whole tables of fewer seeds
    arms = itertools.product(args.seeds, rates, args.noises, args.lags, args.corrections)
    cells = [
        Cell(args.task, lag, correction, rate, noise, seed, tuple(flags))
        for seed, rate, noise, lag, correction in arms
    ]
    lines = run_all(cells, args.results, model)
    sys.exit(None in lines)


if __name__ == "__main__":  # vLLM's processes import this file too
    main()
