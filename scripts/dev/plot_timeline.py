"""Draws docs/timeline.png: what generation and training do at the same time, with and without it.

python scripts/dev/plot_timeline.py docs/timeline.png
"""

import sys

GENERATE, TRAIN, SYNC = "#9ecae1", "#fdae6b", "#636363"
STEPS = 4
GENERATION, TRAINING, WEIGHT_SYNC = 1.0, 1.2, 0.08  # lengths in the picture, no measurements


def synchronous_bars():
    """(row, start, length, color, label) of each bar: one thing at a time."""
    bars, now = [], 0.0
    for step in range(1, STEPS + 1):
        bars.append(("learner", now, WEIGHT_SYNC, SYNC, ""))
        now += WEIGHT_SYNC
        bars.append(("vLLM", now, GENERATION, GENERATE, f"batch {step}, v{step - 1}"))
        now += GENERATION
        bars.append(("learner", now, TRAINING, TRAIN, f"train on {step}"))
        now += TRAINING
    return bars


def asynchronous_bars():
    """The same, with the next batch generated during the training on the last."""
    bars = [("learner", 0.0, WEIGHT_SYNC, SYNC, "")]
    ready = WEIGHT_SYNC + GENERATION  # when the next batch is there
    bars.append(("vLLM", WEIGHT_SYNC, GENERATION, GENERATE, "batch 1, v0"))
    learner_free = 0.0
    for step in range(1, STEPS + 1):
        now = max(ready, learner_free)
        if step < STEPS:
            bars.append(("learner", now, WEIGHT_SYNC, SYNC, ""))
            now += WEIGHT_SYNC
            version = max(0, step - 1)
            label = f"batch {step + 1}, v{version}"
            bars.append(("vLLM", now, GENERATION, GENERATE, label))
            ready = now + GENERATION
        bars.append(("learner", now, TRAINING, TRAIN, f"train on {step}"))
        learner_free = now + TRAINING
    return bars


def main():
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.4), layout="constrained")
    runs = [
        ("ppo_sync.py: generate, then train", synchronous_bars()),
        (
            "ppo_vllm_async.py: generate the next batch while training on the last",
            asynchronous_bars(),
        ),
    ]
    end = max(start + length for _, bars in runs for _, start, length, _, _ in bars)
    for number, (title, bars) in enumerate(runs, start=1):
        axes = figure.add_subplot(2, 1, number)
        axes.set_title(title, fontsize=10, loc="left")
        for row, start, length, color, label in bars:
            y = {"vLLM": 1, "learner": 0}[row]
            axes.barh(y, length, left=start, height=0.8, color=color, edgecolor="white")
            axes.text(start + length / 2, y, label, ha="center", va="center", fontsize=8)
        axes.set_yticks([0, 1], ["learner", "vLLM"])
        axes.set_xticks([])
        axes.set_xlim(0, end)
        for side in ("top", "right", "bottom"):
            axes.spines[side].set_visible(False)
    axes.set_xlabel(
        "time →   dark: weights travel;   v: version of the weights that sample", fontsize=9
    )
    figure.savefig(sys.argv[1], dpi=110)


if __name__ == "__main__":
    main()
