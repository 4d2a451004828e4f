"""Draws how long a run's prompts are: RUN/token_length.png, from RUN/prompt_lengths.json.

    python scripts/plot_lengths.py output/RUN

The scripts write the file and call this program at the start of a run. Prompts above
--max_prompt_token_length are dropped and not in it. Where all prompts are of one length there is
nothing to draw, and a sentence says so.
"""

import argparse
import json
import math
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # no display is needed

import matplotlib.pyplot as plt


def draw(run_dir):
    """Writes the picture, or says why there is none."""
    lengths = json.loads((run_dir / "prompt_lengths.json").read_bytes())
    if min(lengths) == max(lengths):
        print(f"All {len(lengths):,} prompts have {lengths[0]} tokens")
        return
    limit = json.loads((run_dir / "args.json").read_bytes())["max_prompt_token_length"]
    figure, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
    # At most 50 bars, each of as many lengths as the others
    width = math.ceil((max(lengths) - min(lengths) + 1) / 50)
    edges = range(min(lengths), max(lengths) + 1 + width, width)
    axes.hist(lengths, bins=[edge - 0.5 for edge in edges])
    axes.set_xlabel("tokens of a prompt")
    axes.set_ylabel("prompts")
    axes.set_title(
        f"{len(lengths):,} prompts of {min(lengths)} to {max(lengths)} tokens, limit {limit}"
    )
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(run_dir / "token_length.png", dpi=120)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="the run's folder")
    draw(parser.parse_args().run.expanduser())


if __name__ == "__main__":
    main()
