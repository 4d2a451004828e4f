"""Draws the curves of a run, or compares several in a picture and a table.

Only metrics.jsonl is needed. While a run trains, it has the steps so far.
Metrics of your own come after those that the scripts have.

    # curves.png in the run's folder, drawn anew
    python scripts/plot_runs.py output/RUN
    # several runs: comparison.png in this folder, and a table on the terminal
    python scripts/plot_runs.py output/A output/B
    # by the time they took
    python scripts/plot_runs.py output/A output/B --x seconds
    # token_length.png in the run's folder: how long its prompts are
    python scripts/plot_runs.py output/RUN --lengths
"""

import argparse
import json
import math
import os
import sys
from pathlib import Path
from statistics import fmean as mean
from typing import NamedTuple

from internal import warning_signs
from internal.run_files import read_args, read_metrics

# What an x axis can show: the metric that it is read from, and its title
X_AXES = {
    "step": ("training_step", "training step"),
    "seconds": ("time/from_scratch", "seconds since the start"),
}


class Panel(NamedTuple):
    title: str
    metrics: list[str]
    at_least: tuple[float, float] | None = None  # what the y axis shows, whatever the values
    at_most: tuple[float, float] | None = None  # and what it never goes beyond
    is_fault: bool = False  # drawn only where a value is above 0


SECONDS = ["time/training", "time/generation", "time/update"]
RIGHT, LENGTHS = "verifiable_correct_rate", "sequence_lengths"
FAILED = ["eval/reward_failures", "objective/reward_failures"]
PANELS = [
    # The first three are the reward trainer's
    Panel("Pairs ranked right", ["eval/accuracy", "objective/accuracy"], (0.5, 1)),
    Panel("Preference loss", ["eval/loss", "loss/preference_avg"], (0, 0.7)),
    Panel("Score of chosen less rejected", ["eval/margin", "objective/margin"]),
    Panel("Answered right", [f"eval/{RIGHT}", f"objective/{RIGHT}"], (0, 1)),
    Panel("Score", ["eval/scores", "objective/scores"]),
    Panel("Rewards that failed (share of responses)", FAILED, (0, 0), is_fault=True),
    Panel("KL to the reference policy (nats per response)", ["objective/kl"], (0, 0.01)),
    Panel("Entropy (nats per token)", ["policy/entropy_avg"]),
    Panel("Response length (tokens)", [f"eval/{LENGTHS}", f"objective/{LENGTHS}"]),
    Panel("Value model: explained variance", ["val/explained_variance"], (-1, 1), (-1, 1)),
    Panel("Share of tokens clipped", ["policy/clipfrac_avg"], (0, 0.05)),
    Panel("Gradient norm before clipping", ["optim/grad_norm", "optim/value_grad_norm"], (0, 0)),
    Panel("Sampler against learner: effective sample size", ["mismatch/ess"], (0, 1)),
    Panel("Seconds per step, without a process's first", SECONDS, (0, 0)),
]
# All that the scripts and the reward trainer log; report.py draws what has no panel
OF_TRAINER = {"eval/scores_mean", "eval/scores_std"}
KNOWN = {"training_step", *warning_signs.METRICS, *OF_TRAINER}
KNOWN |= {"time", "perf", "mismatch", *(name for panel in PANELS for name in panel.metrics)}
SMALLEST_SPAN = 0.2  # of a y axis, as a share of the largest value: noise is not blown up
LINE_STYLES = ["-", "--", ":"]

LAST_STEPS = 10
# The table's columns: the metric, and whether it is a mean over the last steps
COLUMNS = {
    "right*": ("eval/verifiable_correct_rate", False),
    "score*": ("eval/scores", False),
    "score": ("objective/scores", True),
    "accuracy*": ("eval/accuracy", False),
    "accuracy": ("objective/accuracy", True),
    "KL": ("objective/kl", True),
    "length": ("objective/sequence_lengths", True),
    "steps": ("training_step", False),
    "minutes": ("time/from_scratch", False),
}
FOOTNOTE = "* the last evaluation, on held-out prompts or pairs; other columns, but steps and "
FOOTNOTE += f"minutes: means of the last {LAST_STEPS} training steps"


class Run(NamedTuple):
    name: str
    metrics: list[dict]  # the lines of metrics.jsonl
    args: dict  # of args.json; empty without it


# ------------------------------------------------------------------------------ reading


def read_runs(run_dirs: list[Path]) -> list[Run]:
    """Of several runs each is called by its path, which tells folders of one name apart."""
    runs = []
    for run_dir in run_dirs:
        args = read_args(run_dir) if (run_dir / "args.json").is_file() else {}
        name = run_dir if len(run_dirs) > 1 else run_dir.resolve().name
        name = os.fsencode(name).decode(errors="replace")  # fonts have no halves of characters
        runs.append(Run(name, read_metrics(run_dir), args))
    return runs


def own_metrics(names: set[str]) -> list[str]:
    """Those that are none of the scripts': a fork's, or from a reward's dictionary.

    Without those that split another metric by data source.
    """
    wholes = tuple(f"{whole}/" for whole in KNOWN | names)
    return sorted(name for name in names - KNOWN if not name.startswith(wholes))


def names_in(runs: list[Run]) -> set[str]:
    return {name for run in runs for line in run.metrics for name in line}


def short_name(name: str) -> str:
    """What a metric of held-out prompts and its counterpart of training have in common."""
    return name.removeprefix("eval/").removeprefix("objective/")


# ------------------------------------------------------------------------------ the picture


def points_of(metrics: list[dict], key: str, x_axis: str = "step") -> list[tuple[float, float]]:
    """(x, value) of one metric.

    An evaluation is of the policy before its line's update, but for the last one. Seconds are
    without the first step of each process, which has the start of vLLM or of CUDA in its time.
    """
    x_metric, _ = X_AXES[x_axis]
    x_of = {0: 0} | {line["training_step"]: line[x_metric] for line in metrics if x_metric in line}
    # After a resume the first responses are the checkpoint's: they took no time
    is_timed = any("time/generation" in line for line in metrics)
    points = {}
    for number, line in enumerate(metrics):
        is_first = number == 0 or (is_timed and "time/generation" not in line)
        if line.get(key) is None or (is_first and key.startswith("time/")):
            continue
        step = line["training_step"]
        if key.startswith("eval/"):
            step = line.get("eval/policy_version", step)
        if step in x_of:
            points[step] = (x_of[step], line[key])
    return [*points.values()]


def panels_of(runs: list[Run]) -> list[Panel]:
    """The panels that the runs have metrics for: the scripts', and the runs' own."""
    names, own = names_in(runs), {}
    for name in own_metrics(names):
        own.setdefault(short_name(name), []).append(name)
    panels = []
    for panel in PANELS + [Panel(title, metrics) for title, metrics in own.items()]:
        values = {
            key: [y for run in runs for _, y in points_of(run.metrics, key)]
            for key in panel.metrics
        }
        if panel.is_fault and not any(map(any, values.values())):
            continue
        drawn = [key for key in panel.metrics if values[key]]
        panels += [panel._replace(metrics=drawn)] if drawn else []
    return panels


def set_y_axis(axes, panel: Panel):
    """Room for what was drawn, neither blown up nor shrunk by values that are out of range."""
    bottom, top = axes.dataLim.intervaly
    if bottom > top:  # no value is finite
        return
    if panel.at_least:
        bottom, top = min(bottom, panel.at_least[0]), max(top, panel.at_least[1])
    if panel.at_most:
        bottom, top = max(bottom, panel.at_most[0]), min(top, panel.at_most[1])
    span = max(top - bottom, SMALLEST_SPAN * max(abs(bottom), abs(top))) or 1
    middle = (bottom + top) / 2
    axes.set_ylim(middle - 0.55 * span, middle + 0.55 * span)


def draw_panel(axes, panel: Panel, runs: list[Run], x_axis: str):
    """Lines with dots are of held-out prompts."""
    from matplotlib.lines import Line2D

    handles, styles = [], iter(LINE_STYLES)
    for key in panel.metrics:
        held_out = key.startswith("eval/")
        look = {"linewidth": 1.2, "markersize": 4, "linestyle": "--" if held_out else next(styles)}
        for number, run in enumerate(runs):
            points = points_of(run.metrics, key, x_axis)
            # A line of one point is not to be seen
            look["marker"] = "o" if held_out else "." if len(points) == 1 else None
            if points:
                axes.plot(*zip(*points, strict=True), color=f"C{number}", **look)
        color = "0.3" if len(runs) > 1 else "C0"
        kind = "held-out" if held_out else "training"
        handles.append(Line2D([], [], color=color, label=f"{kind}: {key}", **look))
    set_y_axis(axes, panel)
    axes.set_title(panel.title, fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(handles=handles, fontsize=7)


def draw_curves(runs: list[Run], x_axis="step"):
    """A figure with one panel for each group of metrics that the runs have."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import MaxNLocator

    panels = panels_of(runs)
    if not panels:
        raise SystemExit("plot_runs.py: these runs have no metric that it draws")
    rows, columns = math.ceil(len(panels) / 3), min(3, len(panels))
    figure = Figure(figsize=(5 * columns, 3.2 * rows + 0.4), dpi=90, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.08)
    x_metric, x_title = X_AXES[x_axis]
    farthest = max(line.get(x_metric, 0) for run in runs for line in run.metrics)
    for number, panel in enumerate(panels, start=1):
        axes = figure.add_subplot(rows, columns, number, xlabel=x_title)
        draw_panel(axes, panel, runs, x_axis)
        axes.set_xlim(-0.03 * farthest, 1.03 * farthest)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 5, 10]))
    if len(runs) == 1:
        figure.suptitle(f"{runs[0].name} ({runs[0].args.get('exp_name', '')})", fontsize=12)
        return figure
    handles = [
        Line2D([], [], color=f"C{number}", linewidth=3, label=run.name)
        for number, run in enumerate(runs)
    ]
    figure.legend(handles=handles, loc="outside upper center", ncols=columns)
    return figure


def save(write, path: Path):
    """Whoever looks at it while it is written sees the old one, never half a new one."""
    unfinished = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        write(unfinished)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def draw_run(run_dir: Path):
    save(draw_curves(read_runs([run_dir])).savefig, run_dir / "curves.png")


def draw_lengths(run_dir: Path):
    """How long a run's prompts are, unless all are of one length.

    The scripts write the file. Prompts above the limit are dropped and not in it.
    """
    from matplotlib.figure import Figure

    lengths = json.loads((run_dir / "prompt_lengths.json").read_bytes())
    shortest, longest = min(lengths), max(lengths)
    if shortest == longest:
        return
    limit = read_args(run_dir)["max_prompt_token_length"]
    figure = Figure(figsize=(7, 3.5), dpi=120, layout="constrained")
    axes = figure.add_subplot(xlabel="tokens of a prompt", ylabel="prompts")
    # At most 50 bars, each of as many lengths as the others
    width = math.ceil((longest - shortest + 1) / 50)
    edges = range(shortest, longest + 1 + width, width)
    axes.hist(lengths, bins=[edge - 0.5 for edge in edges])
    said = f"{len(lengths):,} prompts of {shortest} to {longest} tokens, limit {limit}"
    axes.set_title(said)
    save(figure.savefig, run_dir / "token_length.png")


# ------------------------------------------------------------------------------ the table


def last_number(metrics: list[dict], name: str, is_mean: bool) -> str:
    """A metric's last value, or its mean over the last steps; "": the run does not have it."""
    lines = metrics[-LAST_STEPS:] if is_mean else metrics
    values = [line[name] for line in lines if line.get(name) is not None]
    if not values:
        return ""
    number = mean(values) if is_mean else values[-1]
    number = number / 60 if name == "time/from_scratch" else number
    return f"{number:,.0f}" if abs(number) >= 100 else f"{number:.3g}"


def lines_of_table(runs: list[Run]) -> list[str]:
    """A row for each run. The columns are those that the runs have: COLUMNS, and their own."""
    names, own = names_in(runs), {}
    for name in own_metrics(names):
        held_out = name.startswith("eval/")
        own[short_name(name) + "*" * held_out] = (name, not held_out)
    columns = {title: column for title, column in (COLUMNS | own).items() if column[0] in names}
    table = [["run", *columns]]
    for run in runs:
        table.append([run.name, *(last_number(run.metrics, *each) for each in columns.values())])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    said = [
        "  ".join([name.ljust(widths[0]), *map(str.rjust, cells, widths[1:])]).rstrip()
        for name, *cells in table
    ]
    return [*said, FOOTNOTE]


# ------------------------------------------------------------------------------ the program


def main():
    sys.stdout.reconfigure(errors="backslashreplace")  # a terminal may know ASCII alone
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="folders of runs")
    add("--x", choices=X_AXES, default="step", help="the x axis; default: step")
    output = "the picture, .png, .svg or .pdf, in place of curves.png or comparison.png"
    add("--output", type=Path, metavar="FILE", help=output)
    add("--overwrite", action="store_true", help="replace a picture; curves.png always is")
    add("--lengths", action="store_true", help="a script's own call: how long its prompts are")
    args = parser.parse_args()
    run_dirs = [run.expanduser() for run in args.runs]
    if args.lengths:
        draw_lengths(run_dirs[0])
        return
    one = run_dirs[0] / "curves.png" if len(run_dirs) == 1 else Path("comparison.png")
    output = (args.output or one).expanduser()
    runs = read_runs(run_dirs)
    for run_dir, run in zip(run_dirs, runs, strict=True):
        if not run.metrics:
            parser.error(f"{run_dir} holds no metrics.jsonl with a step: it is no run's folder yet")
    if output.exists() and not args.overwrite and output.name != "curves.png":
        parser.error(f"{output} exists: --overwrite replaces it, --output names another")
    try:
        save(draw_curves(runs, args.x).savefig, output)
    except (OSError, ValueError) as error:  # no such folder, or kind of picture
        parser.error(f"--output {output}: {error}")
    print(f"Wrote {output}")
    if len(runs) > 1:
        print(*lines_of_table(runs), sep="\n")


if __name__ == "__main__":
    main()
