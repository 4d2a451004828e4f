"""Draws the curves of a run, or compares several in a picture and a table.

Only metrics.jsonl is needed. While a run trains, it has the steps so far.

    # curves.png in the run's folder, drawn anew, and token_length.png
    python scripts/plot_runs.py output/RUN
    # several runs: comparison.png in this folder, and a table on the terminal
    python scripts/plot_runs.py output/A output/B
    # runs that differ in their seed alone as one curve, by the time they took
    python scripts/plot_runs.py output/A1 output/A2 output/B1 output/B2 \\
        --seeds --x seconds
"""

import argparse
import json
import math
import os
from pathlib import Path
from typing import NamedTuple

# What an x axis can show: the metric that it is read from, and its title
X_AXES = {
    "step": ("training_step", "training step"),
    "episode": ("episode", "episode"),
    "seconds": ("time/from_scratch", "seconds since the start"),
}


class Panel(NamedTuple):
    title: str
    metrics: list[str]
    at_least: tuple[float, float] | None = None  # what the y axis shows, whatever the values
    at_most: tuple[float, float] | None = None  # and what it never goes beyond
    logarithmic: bool = False
    fewest: int = 1  # metrics; a run with fewer of them has no such panel


PANELS = [
    # The first three are the reward trainer's
    Panel("Pairs ranked right", ["eval/accuracy", "objective/accuracy"], at_least=(0.5, 1)),
    Panel("Preference loss", ["eval/loss", "loss/preference_avg"], at_least=(0, 0.7)),
    Panel("Score of chosen less rejected", ["eval/margin", "objective/margin"]),
    Panel(
        "Answered right",
        ["eval/verifiable_correct_rate", "objective/verifiable_correct_rate"],
        at_least=(0, 1),
    ),
    Panel("Score", ["eval/scores", "objective/scores"]),
    Panel(
        "Parts of the score (training batches)",
        ["objective/verifiable_score", "objective/reward_model_score", "objective/format_rate"],
        fewest=2,
    ),
    Panel("KL to the reference policy (nats per response)", ["objective/kl"], at_least=(0, 0.01)),
    Panel("Entropy (nats per token)", ["policy/entropy_avg"]),
    Panel("Response length (tokens)", ["eval/sequence_lengths", "objective/sequence_lengths"]),
    Panel("Value model: explained variance", ["val/explained_variance"], (-1, 1), (-1, 1)),
    Panel("Share of tokens clipped", ["policy/clipfrac_avg"], at_least=(0, 0.05)),
    Panel(
        "Gradient norm, before it is clipped",
        ["optim/grad_norm", "optim/value_grad_norm"],
        at_least=(0, 0),
    ),
    Panel("Sampler against learner: effective sample size", ["mismatch/ess"], at_least=(0, 1)),
    Panel(
        "Sampler against learner: largest log-probability difference",
        ["mismatch/logprob_diff_max"],
        logarithmic=True,
    ),
    Panel(
        "Seconds per step, without a process's first",
        ["time/training", "time/generation", "time/update"],
        at_least=(0, 0),
    ),
]
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
}
# Arguments in which the runs of one group may differ: what a seed changes, and names
OF_A_RUN = {"seed", "data_hash", "run_name", "output_dir", "resume_from_checkpoint", "provenance"}
OF_A_RUN |= {"with_tracking", "wandb_project_name", "wandb_entity"}
OF_A_RUN |= {"push_to_hub", "hf_entity", "hf_repo_id", "hf_repo_revision"}


class Run(NamedTuple):
    name: str
    metrics: list[dict]  # the lines of metrics.jsonl
    args: dict  # of args.json; empty without it


class Curve(NamedTuple):
    """What has one colour: a run, or several that differ in their seed."""

    name: str
    runs: list[Run]


# ------------------------------------------------------------------------------ reading


def read_lines(path):
    """The lines of a .jsonl file as a list of dicts; the last one is left out if it was cut off."""
    lines = []
    for line in path.read_text().splitlines():
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return lines


def read_metrics(run_dir):
    return read_lines(run_dir / "metrics.jsonl")


def read_runs(run_dirs: list[Path]) -> list[Run]:
    """Each is called what its folder is called, or its path where two folders have one name."""
    names = [run_dir.resolve().name for run_dir in run_dirs]
    runs = []
    for run_dir, name in zip(run_dirs, names, strict=True):
        args_file = run_dir / "args.json"
        args = json.loads(args_file.read_text()) if args_file.is_file() else {}
        unique = name if names.count(name) == 1 else str(run_dir)
        runs.append(Run(unique, read_metrics(run_dir), args))
    return runs


def group_seeds(runs: list[Run]) -> list[Curve]:
    """Runs whose arguments differ in nothing but seed and names become one curve.

    Its name is what their names begin with; of two alike, each says in what it differs.

    >>> runs = [Run(f"ppo_{i}", [], {"seed": i, "beta": beta}) for i, beta in enumerate([0, 0, 1])]
    >>> [curve.name for curve in group_seeds(runs)]
    ['ppo (2 runs)', 'ppo_2']
    >>> runs.append(runs[2]._replace(name="ppo_3"))
    >>> [curve.name for curve in group_seeds(runs)]
    ['ppo, beta 0 (2 runs)', 'ppo, beta 1 (2 runs)']
    """
    groups = {}
    for run in runs:
        same = {name: value for name, value in run.args.items() if name not in OF_A_RUN}
        groups.setdefault(json.dumps(same, sort_keys=True), []).append(run)
    curves = []
    for group in groups.values():
        name = group[0].name
        if len(group) > 1:
            shared = os.path.commonprefix([run.name for run in group])  # noqa: RUF071
            name = shared.rstrip("_-. ") or name
        curves.append(Curve(name, group))

    named = []
    for curve in curves:
        args = curve.runs[0].args
        others = [other.runs[0].args for other in curves if other.name == curve.name]
        differing = [
            f"{name} {value}"
            for name, value in args.items()
            if name not in OF_A_RUN and any(other.get(name) != value for other in others)
        ]
        name = ", ".join([curve.name, *differing[:2]])
        if len(curve.runs) > 1:
            name += f" ({len(curve.runs)} runs)"
        named.append(Curve(name, curve.runs))
    return named


# ------------------------------------------------------------------------------ the picture


def points_of(metrics: list[dict], key: str, x_axis: str) -> dict[int, tuple[float, float]]:
    """{training steps that were done: (x, value)} of one metric.

    An evaluation is of the policy before its line's update, but for the last one.

    >>> first = {"training_step": 1, "episode": 8, "eval/policy_version": 0, "eval/scores": 0.5}
    >>> last = {"training_step": 2, "episode": 16, "eval/policy_version": 2, "eval/scores": 0.9}
    >>> points_of([first, last], "eval/scores", "episode")
    {0: (0, 0.5), 2: (16, 0.9)}
    """
    x_metric, _ = X_AXES[x_axis]
    x_of = {0: 0} | {line["training_step"]: line[x_metric] for line in metrics if x_metric in line}
    left_out = first_steps(metrics) if key.startswith("time/") else set()
    points = {}
    for line in metrics:
        step = line["training_step"]
        if line.get(key) is None or step in left_out:
            continue
        if key.startswith("eval/"):
            step = line.get("eval/policy_version", step)
        if step in x_of:
            points[step] = (x_of[step], line[key])
    return points


def first_steps(metrics: list[dict]) -> set[int]:
    """The first step of each process: it has the start of vLLM or of CUDA in its time.

    The responses of the first step after a resume are the checkpoint's: they took no time.
    """
    generated = {line["training_step"] for line in metrics if "time/generation" in line}
    resumed = {line["training_step"] for line in metrics} - generated if generated else set()
    return {metrics[0]["training_step"], *resumed}


def mean_points(runs: list[Run], key: str, x_axis: str) -> list[tuple[float, ...]]:
    """(x, mean, least, greatest) of each step that all runs have come to, of those with the metric.

    >>> lines = [[{"training_step": 1, "lr": 0.5}], [{"training_step": 1, "lr": 1.0}]]
    >>> mean_points([Run("a", lines[0], {}), Run("b", lines[1], {})], "lr", "step")
    [(1.0, 0.75, 0.5, 1.0)]
    """
    every = [points for run in runs if (points := points_of(run.metrics, key, x_axis))]
    if not every:
        return []
    rows = []
    for step in sorted(set.intersection(*map(set, every))):
        xs, values = zip(*(points[step] for points in every), strict=True)
        mean = sum(values) / len(values)
        rows.append((sum(xs) / len(xs), mean, min(values), max(values)))
    return rows


def label_of(key: str, panel: Panel) -> str:
    """How a panel's legend calls a metric: where it shows both kinds, held-out or training."""
    if not any(other.startswith("eval/") for other in panel.metrics):
        return key
    return f"{'held-out' if key.startswith('eval/') else 'training'}: {key}"


def set_y_axis(axes, panel: Panel):
    """Room for what was drawn, neither blown up nor shrunk by values that are out of range."""
    bottom, top = axes.dataLim.intervaly
    if bottom > top:  # no value is finite
        return
    if panel.logarithmic:  # whole powers of ten
        lowest = math.floor(math.log10(max(bottom, 1e-7)))
        highest = math.ceil(math.log10(max(top, 1e-7)))
        axes.set_ylim(10.0**lowest, 10.0 ** max(highest, lowest + 2))
        axes.set_yscale("log")
        return
    if panel.at_least:
        bottom, top = min(bottom, panel.at_least[0]), max(top, panel.at_least[1])
    if panel.at_most:
        bottom, top = max(bottom, panel.at_most[0]), min(top, panel.at_most[1])
    span = max(top - bottom, SMALLEST_SPAN * max(abs(bottom), abs(top))) or 1
    middle = (bottom + top) / 2
    axes.set_ylim(middle - 0.55 * span, middle + 0.55 * span)


def draw_panel(axes, panel: Panel, curves: list[Curve], colors: list, x_axis: str):
    """Lines with dots are of held-out prompts; a shade goes from the least run to the greatest."""
    from matplotlib.lines import Line2D

    handles = []
    styles = iter(LINE_STYLES)
    for key in panel.metrics:
        held_out = key.startswith("eval/")
        look = {"linewidth": 1.2, "linestyle": "--" if held_out else next(styles)}
        drawn = False
        for curve, color in zip(curves, colors, strict=True):
            points = mean_points(curve.runs, key, x_axis)
            if not points:
                continue
            xs, means, least, greatest = zip(*points, strict=True)
            # A line of one point is not to be seen
            look["marker"] = "o" if held_out else "." if len(xs) == 1 else None
            axes.plot(xs, means, color=color, markersize=4, **look)
            if len(curve.runs) > 1:
                axes.fill_between(xs, least, greatest, color=color, alpha=0.2, linewidth=0)
            drawn = True
        if drawn:
            color = "0.3" if len(curves) > 1 else colors[0]
            label = label_of(key, panel)
            handles.append(Line2D([], [], color=color, label=label, markersize=4, **look))
    set_y_axis(axes, panel)
    axes.set_title(panel.title, fontsize=10)
    axes.grid(alpha=0.3)
    if len(panel.metrics) > 1:
        axes.legend(handles=handles, fontsize=7)
    else:
        axes.set_ylabel(panel.metrics[0], fontsize=7)


def draw_curves(curves: list[Curve], x_axis="step", more=()):
    """A figure with one panel for each group of metrics that the runs have.

    more: names of metrics, with a panel each.
    """
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import MaxNLocator

    runs = [run for curve in curves for run in curve.runs]
    panels = []
    for panel in PANELS + [Panel(name, [name]) for name in more]:
        drawn = [
            key
            for key in panel.metrics
            if any(mean_points(curve.runs, key, x_axis) for curve in curves)
        ]
        if len(drawn) >= panel.fewest:
            panels.append(panel._replace(metrics=drawn))
    if not panels:
        raise SystemExit("plot_runs.py: these runs have no metric that it draws; see --metrics")
    colors = [f"C{i}" for i in range(len(curves))]
    if len(curves) > 10:
        colors = [matplotlib.colormaps["turbo"](i / (len(curves) - 1)) for i in range(len(curves))]

    rows = (len(panels) + 2) // 3
    columns = min(3, len(panels))
    figure = Figure(figsize=(5 * columns, 3.2 * rows + 0.4), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.08)
    x_metric, x_title = X_AXES[x_axis]
    farthest = max(line.get(x_metric, 0) for run in runs for line in run.metrics)
    for number, panel in enumerate(panels, start=1):
        axes = figure.add_subplot(rows, columns, number, xlabel=x_title)
        draw_panel(axes, panel, curves, colors, x_axis)
        axes.set_xlim(-0.03 * farthest, 1.03 * farthest)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 5, 10]))

    scripts = sorted({run.args["exp_name"] for run in runs if "exp_name" in run.args})
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    if scripts:
        title += f" ({', '.join(scripts)})"
    if len(curves) < len(runs):
        title += "; lines: means; shades: from the least to the greatest"
    if len(curves) == 1:
        figure.suptitle(title, fontsize=12)
        return figure
    handles = [
        Line2D([], [], color=color, linewidth=3, label=curve.name)
        for curve, color in zip(curves, colors, strict=True)
    ]
    legend = figure.legend(handles=handles, title=title, loc="outside upper center", ncols=columns)
    legend.get_title().set_fontsize(12)
    return figure


def draw_token_lengths(lengths: list[int], run_name: str):
    """Histogram of the prompts' lengths in tokens."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="tokens in the prompt", ylabel="prompts")
    axes.set_title(f"{run_name}: {len(lengths):,} prompts", fontsize=10)
    width = (max(lengths) - min(lengths)) // 50 + 1  # whole lengths, 50 bins at most
    edges = [length - 0.5 for length in range(min(lengths), max(lengths) + width + 1, width)]
    axes.hist(lengths, bins=edges)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    return figure


def save(figure, path: Path):
    """Whoever looks at the picture while it is written sees the old one, never half a new one."""
    unfinished = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        figure.savefig(unfinished, dpi=90)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    print(f"Wrote {path}")


def draw_run(run_dir: Path, x_axis="step", more=()):
    """Draws a run's own pictures: its curves, and once the lengths of its prompts."""
    (run,) = read_runs([run_dir])
    save(draw_curves([Curve(run.name, [run])], x_axis, more), run_dir / "curves.png")
    lengths, picture = run_dir / "token_length.json", run_dir / "token_length.png"
    if not lengths.is_file():
        return
    if not picture.exists() or picture.stat().st_mtime < lengths.stat().st_mtime:
        save(draw_token_lengths(json.loads(lengths.read_text()), run.name), picture)


# ------------------------------------------------------------------------------ the table


def last_numbers(metrics: list[dict]) -> dict[str, float]:
    """{column of the table: value}, of what a run has.

    >>> last_numbers([{"training_step": 1, "eval/scores": 0.25, "time/from_scratch": 90}])
    {'score*': 0.25, 'steps': 1, 'minutes': 1.5}
    """
    numbers = {}
    for column, (key, is_mean) in COLUMNS.items():
        lines = metrics[-LAST_STEPS:] if is_mean else metrics
        values = [line[key] for line in lines if line.get(key) is not None]
        if values:
            numbers[column] = sum(values) / len(values) if is_mean else values[-1]
    if "time/from_scratch" in metrics[-1]:
        numbers["minutes"] = metrics[-1]["time/from_scratch"] / 60
    return numbers


def show(number: float) -> str:
    """
    >>> [show(number) for number in (0.93824, 12345.0, 6.0, -0.00039)]
    ['0.938', '12,345', '6', '-0.00039']
    """
    return f"{number:,.0f}" if abs(number) >= 100 else f"{number:.3g}"


def print_table(curves: list[Curve]):
    """A row for each run, and one for the means of those that share a curve."""
    rows = []
    for curve in curves:
        numbers = [last_numbers(run.metrics) for run in curve.runs]
        rows += zip([run.name for run in curve.runs], numbers, strict=True)
        if len(curve.runs) > 1:
            shared = [column for column in numbers[0] if all(column in row for row in numbers)]
            means = {c: sum(row[c] for row in numbers) / len(numbers) for c in shared}
            rows.append((f"mean: {curve.name}", means))
    columns = [c for c in [*COLUMNS, "minutes"] if any(c in numbers for _, numbers in rows)]
    table = [["run", *columns]]
    for name, numbers in rows:
        table.append([name, *(show(numbers[c]) if c in numbers else "" for c in columns)])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for name, *cells in table:
        padded = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        print(name.ljust(widths[0]), *padded, sep="  ")
    print("* the last evaluation, on held-out prompts or pairs")
    print(f"score, accuracy, KL, length: means of the last {LAST_STEPS} training steps")


# ------------------------------------------------------------------------------ the program


def check(args, parser):
    """What a user may have got wrong is one line, before anything is drawn or written."""
    from matplotlib.figure import Figure

    known = set()
    for run_dir in args.runs:
        if not (run_dir / "metrics.jsonl").is_file():
            what = "it is not the folder of a run, or the run made no step"
            parser.error(f"{run_dir} holds no metrics.jsonl: {what}")
        metrics = read_metrics(run_dir)
        if not metrics:
            parser.error(f"{run_dir}/metrics.jsonl is empty: the run made no step")
        if X_AXES[args.x][0] not in metrics[-1]:
            parser.error(f"--x {args.x}: {run_dir} has no metric {X_AXES[args.x][0]}")
        if args.seeds and not (run_dir / "args.json").is_file():
            parser.error(f"--seeds compares the runs' args.json, and {run_dir} has none")
        known.update(*metrics)
    for name in args.metrics:
        if name not in known:
            parser.error(f"none of these runs has the metric {name}")
    output = args.output
    if output is None:  # the run's own picture, which is there to be drawn anew
        return
    if output.suffix[1:] not in (formats := Figure().canvas.get_supported_filetypes()):
        parser.error(f"{output} has to end in one of {', '.join(formats)}")
    if not output.parent.is_dir():
        parser.error(f"there is no folder {output.parent}")
    if output.exists() and not args.overwrite:
        parser.error(f"{output} exists: --overwrite replaces it, --output names another")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run")
    x_axis = "what the x axis shows; default: step"
    parser.add_argument("--x", choices=X_AXES, default="step", help=x_axis)
    seeds = (
        "runs whose args.json differ in nothing but the seed and names are one curve: "
        "their mean, shaded from the least to the greatest, as far as all of them came"
    )
    parser.add_argument("--seeds", action="store_true", help=seeds)
    metrics = "further metrics, such as a fork's own, with a panel each"
    parser.add_argument("--metrics", nargs="+", default=[], metavar="NAME", help=metrics)
    picture = (
        "the picture of the curves, .png, .svg or .pdf; default: of one run its curves.png, "
        "of several comparison.png in this folder"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help=picture)
    overwrite = "replace the picture if it exists; a run's own curves.png always is"
    parser.add_argument("--overwrite", action="store_true", help=overwrite)
    args = parser.parse_args()
    if len(args.runs) > 1 and args.output is None:
        args.output = Path("comparison.png")
    check(args, parser)

    if args.output is None:
        draw_run(args.runs[0], args.x, args.metrics)
        return
    runs = read_runs(args.runs)
    curves = group_seeds(runs) if args.seeds else [Curve(run.name, [run]) for run in runs]
    save(draw_curves(curves, args.x, args.metrics), args.output)
    if len(runs) > 1:
        print_table(curves)


if __name__ == "__main__":
    main()
