"""Read, draw and tabulate the metrics of runs, for the programs that show them."""

import json
import math
import os
from pathlib import Path
from statistics import fmean as mean
from typing import NamedTuple

from internal import warning_signs
from internal.run_files import read_args, read_metrics

# The possible x axes: the metric and the title of each
X_AXES = {
    "step": ("training_step", "training step"),
    "seconds": ("time/from_scratch", "seconds since the start"),
}


class Panel(NamedTuple):
    title: str
    metrics: list[str]
    at_least: tuple[float, float] | None = None  # the y axis always includes this range
    at_most: tuple[float, float] | None = None  # the y axis never exceeds this range
    only_if_nonzero: bool = False  # the panel is drawn only if a value is not 0


SECONDS = ["time/training", "time/generation", "time/update"]
RIGHT, LENGTHS = "verifiable_correct_rate", "sequence_lengths"
FAILED = ["eval/reward_failures", "objective/reward_failures"]
PANELS = [
    # The first three are the reward trainer's
    Panel("Pairs ranked correctly", ["eval/accuracy", "objective/accuracy"], (0.5, 1)),
    Panel("Preference loss", ["eval/loss", "loss/preference_avg"], (0, 0.7)),
    Panel("Score of chosen minus rejected", ["eval/margin", "objective/margin"]),
    Panel("Answered correctly", [f"eval/{RIGHT}", f"objective/{RIGHT}"], (0, 1)),
    Panel("Score", ["eval/scores", "objective/scores"]),
    Panel("Rewards that failed (fraction of responses)", FAILED, (0, 0), only_if_nonzero=True),
    Panel("KL to the reference policy (nats per response)", ["objective/kl"], (0, 0.01)),
    Panel("Entropy (nats per token)", ["policy/entropy_avg"]),
    Panel("Response length (tokens)", [f"eval/{LENGTHS}", f"objective/{LENGTHS}"]),
    Panel("Value model: explained variance", ["val/explained_variance"], (-1, 1), (-1, 1)),
    Panel("Fraction of tokens clipped", ["policy/clipfrac_avg"], (0, 0.05)),
    Panel("Gradient norm before clipping", ["optim/grad_norm", "optim/value_grad_norm"], (0, 0)),
    Panel("Sampler against learner: effective sample size", ["mismatch/ess"], (0, 1)),
    Panel("Seconds per step (without the first)", SECONDS, (0, 0)),
]
# All metrics of the scripts and the reward trainer, with or without a panel
OF_TRAINER = {"eval/scores_mean", "eval/scores_std"}
KNOWN = {"training_step", *warning_signs.METRICS, *OF_TRAINER}
KNOWN |= {"time", "perf", "mismatch", *(name for panel in PANELS for name in panel.metrics)}
SMALLEST_SPAN = 0.2  # of a y axis, as a fraction of the largest value, so that noise stays small
LINE_STYLES = ["-", "--", ":"]

LAST_STEPS = 10
# The table's columns: the metric, and whether it is a mean over the last steps
COLUMNS = {
    "correct*": ("eval/verifiable_correct_rate", False),
    "score*": ("eval/scores", False),
    "score": ("objective/scores", True),
    "accuracy*": ("eval/accuracy", False),
    "accuracy": ("objective/accuracy", True),
    "KL": ("objective/kl", True),
    "length": ("objective/sequence_lengths", True),
    "steps": ("training_step", False),
    "minutes": ("time/from_scratch", False),
}
FOOTNOTE = (
    "* of the last evaluation, on held-out prompts or pairs. Other columns, except steps and "
)
FOOTNOTE += f"minutes, are means over the last {LAST_STEPS} steps"


class Run(NamedTuple):
    name: str
    metrics: list[dict]  # the lines of metrics.jsonl
    args: dict  # of args.json, or empty without it


def read_runs(run_dirs: list[Path]) -> list[Run]:
    """Read runs. Several runs are named by their paths, because folders can have equal names."""
    runs = []
    for run_dir in run_dirs:
        args = read_args(run_dir) if (run_dir / "args.json").is_file() else {}
        name = run_dir if len(run_dirs) > 1 else run_dir.resolve().name
        name = os.fsencode(name).decode(errors="replace")  # a font needs whole characters
        runs.append(Run(name, read_metrics(run_dir), args))
    return runs


def own_metrics(names: set[str]) -> list[str]:
    """Return the metrics that the scripts do not have, except those of a single data source."""
    of_sources = tuple(f"{name}/" for name in KNOWN | names)
    return sorted(name for name in names - KNOWN if not name.startswith(of_sources))


def names_in(runs: list[Run]) -> set[str]:
    return {name for run in runs for line in run.metrics for name in line}


def short_name(name: str) -> str:
    """Return the name that a metric of held-out prompts shares with its training counterpart."""
    return name.removeprefix("eval/").removeprefix("objective/")


def points_of(metrics: list[dict], key: str, x_axis: str = "step") -> list[tuple[float, float]]:
    """Return the points (x, value) of one metric.

    An evaluation is at the step of the policy that answered, which is usually the step before its
    line. The times of a process's first step are left out, because that step includes the start of
    vLLM or CUDA.
    """
    x_metric, _ = X_AXES[x_axis]
    x_of = {0: 0} | {line["training_step"]: line[x_metric] for line in metrics if x_metric in line}
    # After a resume the first responses come from the checkpoint, so they took no time
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
    """Return the panels for which the runs have metrics. Metrics of their own come last."""
    names, own = names_in(runs), {}
    for name in own_metrics(names):
        own.setdefault(short_name(name), []).append(name)
    panels = []
    for panel in PANELS + [Panel(title, metrics) for title, metrics in own.items()]:
        values = {
            key: [y for run in runs for _, y in points_of(run.metrics, key)]
            for key in panel.metrics
        }
        if panel.only_if_nonzero and not any(map(any, values.values())):
            continue
        drawn = [key for key in panel.metrics if values[key]]
        panels += [panel._replace(metrics=drawn)] if drawn else []
    return panels


def set_y_axis(axes, panel: Panel):
    """Fit the y axis to the values, without magnifying noise or showing values out of range."""
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
    """Draw a panel. Lines with dots are held-out prompts."""
    from matplotlib.lines import Line2D

    handles, styles = [], iter(LINE_STYLES)
    for key in panel.metrics:
        held_out = key.startswith("eval/")
        look = {"linewidth": 1.2, "markersize": 4, "linestyle": "--" if held_out else next(styles)}
        for number, run in enumerate(runs):
            points = points_of(run.metrics, key, x_axis)
            # A line of one point would be invisible
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
    """Draw a figure with one panel for each group of metrics that the runs have."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import MaxNLocator

    panels = panels_of(runs)
    if not panels:
        raise SystemExit("plot_runs.py: these runs have no metric that can be drawn")
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
    """Write a file in one step, so that a reader never sees a part of it."""
    unfinished = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        write(unfinished)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def draw_run(run_dir: Path):
    save(draw_curves(read_runs([run_dir])).savefig, run_dir / "curves.png")


def draw_lengths(run_dir: Path):
    """Draw the lengths of a run's prompts, unless all are equal. None is above the limit."""
    from matplotlib.figure import Figure

    lengths = json.loads((run_dir / "prompt_lengths.json").read_bytes())
    shortest, longest = min(lengths), max(lengths)
    if shortest == longest:
        return
    limit = read_args(run_dir)["max_prompt_token_length"]
    figure = Figure(figsize=(7, 3.5), dpi=120, layout="constrained")
    axes = figure.add_subplot(xlabel="tokens of a prompt", ylabel="prompts")
    # At most 50 bars, each for the same number of lengths
    width = math.ceil((longest - shortest + 1) / 50)
    edges = range(shortest, longest + 1 + width, width)
    axes.hist(lengths, bins=[edge - 0.5 for edge in edges])
    title = f"{len(lengths):,} prompts of {shortest} to {longest} tokens, limit {limit}"
    axes.set_title(title)
    save(figure.savefig, run_dir / "token_length.png")


def last_number(metrics: list[dict], name: str, is_mean: bool) -> str:
    """Return a metric's last value, or its mean over the last steps, or "" if there is none."""
    lines = metrics[-LAST_STEPS:] if is_mean else metrics
    values = [line[name] for line in lines if line.get(name) is not None]
    if not values:
        return ""
    number = mean(values) if is_mean else values[-1]
    number = number / 60 if name == "time/from_scratch" else number
    return f"{number:,.0f}" if abs(number) >= 100 else f"{number:.3g}"


def lines_of_table(runs: list[Run]) -> list[str]:
    """Return a table with a line per run. Metrics of their own are in its last columns."""
    names, own = names_in(runs), {}
    for name in own_metrics(names):
        held_out = name.startswith("eval/")
        own[short_name(name) + "*" * held_out] = (name, not held_out)
    columns = {title: column for title, column in (COLUMNS | own).items() if column[0] in names}
    table = [["run", *columns]]
    for run in runs:
        cells = (last_number(run.metrics, name, is_mean) for name, is_mean in columns.values())
        table.append([run.name, *cells])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [
        "  ".join([name.ljust(widths[0]), *map(str.rjust, cells, widths[1:])]).rstrip()
        for name, *cells in table
    ]
    return [*lines, FOOTNOTE]
