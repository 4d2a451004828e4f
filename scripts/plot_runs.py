"""Draws the pictures of one run or several.

curves.png is drawn from metrics.jsonl, and token_length.png from token_length.json.

    # pictures in the run's folder
    python scripts/plot_runs.py output/RUN
    # the curves of several runs in one picture, such as seeds, and metrics of your own besides
    python scripts/plot_runs.py output/A output/B --output c.png --metrics policy/unsure
"""

import argparse
import json
from pathlib import Path

PANELS = [
    (
        "Held-out prompts: answered right, mean score",
        ["eval/verifiable_correct_rate", "eval/verifiable_score"],
    ),
    ("Score (training batches)", ["objective/scores"]),
    (
        "Parts of the score (training batches)",
        [
            "objective/verifiable_score",
            "objective/reward_model_score",
            "objective/format_rate",
        ],
    ),
    ("KL to the reference policy (nats per response)", ["objective/kl"]),
    ("Entropy (nats per token)", ["policy/entropy_avg"]),
    ("Response length (tokens)", ["val/sequence_lengths"]),
    ("Value model: explained variance", ["val/explained_variance"]),
    ("Sampler against learner: largest log-probability difference", ["mismatch/logprob_diff_max"]),
    ("Seconds per step", ["time/training", "time/generation", "time/update"]),
]
LOGARITHMIC = {"mismatch/logprob_diff_max"}
LIMITS = {"val/explained_variance": (-1, 1)}
RATES = {"eval/verifiable_correct_rate"}  # the axis goes from 0 to 1 at least; scores may go on


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


def plot_curves(run_dirs, path, more=()):
    """One panel for each group of metrics that the runs have, training steps on the x axis.

    more: names of metrics, with a panel each.
    """
    from matplotlib.figure import Figure

    runs = {run_dir.name: read_metrics(run_dir) for run_dir in run_dirs}
    known = {key for metrics in runs.values() for line in metrics for key in line}
    for name in more:
        if name not in known:
            raise SystemExit(f"plot_runs.py: none of these runs has the metric {name}")
    every = PANELS + [(name, [name]) for name in more]
    panels = [(title, keys) for title, keys in every if known.intersection(keys)]
    rows = (len(panels) + 2) // 3
    figure = Figure(figsize=(15, 3.2 * rows), layout="constrained")
    for number, (title, keys) in enumerate(panels, start=1):
        axes = figure.add_subplot(rows, 3, number, title=title, xlabel="training step")
        axes.title.set_fontsize(10)
        for name, metrics in runs.items():
            for key in keys:
                # An evaluation is of the policy before its line's update, but for the last one.
                step = "eval/policy_version" if key.startswith("eval/") else "training_step"
                points = [(line[step], line[key]) for line in metrics if key in line]
                labels = [name] * (len(runs) > 1) + [key] * (len(keys) > 1)
                marker = "o" if key.startswith("eval/") else None
                label = " ".join(labels) or None
                axes.plot(*zip(*points, strict=True), label=label, marker=marker, linewidth=1.2)
        if keys[0] in LOGARITHMIC:
            axes.set_yscale("symlog", linthresh=1e-7)
        if keys[0] in LIMITS:
            axes.set_ylim(*LIMITS[keys[0]])
        if keys[0] in RATES:
            bottom, top = axes.get_ylim()
            axes.set_ylim(min(bottom, 0), max(top, 1))
        axes.grid(alpha=0.3)
        if len(runs) > 1 or len(keys) > 1:
            axes.legend(fontsize=7)
    figure.savefig(path, dpi=90)


def plot_token_lengths(lengths, path):
    """Histogram of the prompts' lengths in tokens."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot(
        title=f"{len(lengths):,} prompts", xlabel="tokens in the prompt", ylabel="prompts"
    )
    axes.hist(lengths, bins=min(50, max(lengths) - min(lengths) + 1))
    figure.savefig(path, dpi=90)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path)
    picture = "the picture of the curves; default: curves.png in the first run"
    parser.add_argument("--output", type=Path, help=picture)
    metrics = "further metrics, such as a fork's own, with a panel each"
    parser.add_argument("--metrics", nargs="+", default=[], metavar="NAME", help=metrics)
    args = parser.parse_args()
    for run_dir in args.runs:
        if not (run_dir / "metrics.jsonl").is_file():
            what = "it is not the folder of a run, or the run made no step"
            parser.error(f"{run_dir} holds no metrics.jsonl: {what}")
    plot_curves(args.runs, args.output or args.runs[0] / "curves.png", args.metrics)
    for run_dir in args.runs:
        lengths = run_dir / "token_length.json"
        if lengths.is_file():
            plot_token_lengths(json.loads(lengths.read_text()), run_dir / "token_length.png")


if __name__ == "__main__":
    main()
