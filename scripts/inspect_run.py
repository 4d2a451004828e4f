"""Shows a run in the terminal, while it goes on or when it is finished.

What run it is, its curves, what limited its speed, and the last training
responses with their tokens coloured by advantage.

    python scripts/inspect_run.py output/RUN
    # again every 10 seconds, until the run is at its end or Ctrl-C
    python scripts/inspect_run.py output/RUN --watch 10
"""

import argparse
import contextlib
import functools
import json
import math
import re
import shlex
import sys
import textwrap
import time
from itertools import groupby, pairwise
from pathlib import Path
from statistics import mean

from plot_runs import read_metrics
from rich.console import Console, Group
from rich.live import Live
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from summarize_run import describe_speed, end_of_prompt, show_score

CURVES = [
    "objective/scores",
    "eval/verifiable_correct_rate",
    "objective/kl",
    "policy/entropy_avg",
    "objective/sequence_lengths",
    "objective/stop_rate",
    "val/explained_variance",
    # of a reward model
    "objective/accuracy",
    "eval/accuracy",
]
BLOCKS = "▁▂▃▄▅▆▇█"
ASCII_BLOCKS = "_.-=+*#@"  # for a terminal that knows ASCII alone
GREY, GREEN, RED = (128, 128, 128), (0, 170, 0), (220, 0, 0)  # seen on black and on white
TAIL = 2**24  # bytes of rollouts.jsonl that are read: it grows with the run


def sparkline(values, blocks=BLOCKS, width=28):
    """A block for each value, or for the mean of neighbours where there are more than `width`.

    Changes of a few per cent look small, also where nothing else happens.

    >>> sparkline([0, 1, 2, 7])
    '▁▂▃█'
    >>> sparkline([6.0, 6.04, 6.0])
    '▁▂▁'
    >>> sparkline(range(100), width=4)
    '▁▃▆█'
    """
    count = min(width, len(values))
    edges = [len(values) * i // count for i in range(count + 1)]
    means = [mean(values[start:end]) for start, end in pairwise(edges)]
    low = min(means)
    span = max(max(means) - low, 0.05 * max(map(abs, means))) or 1.0
    return "".join(blocks[round((value - low) / span * (len(blocks) - 1))] for value in means)


def show_curves(metrics, blocks):
    """A table of the metrics that the run has: first value, curve, last value."""
    table = Table("metric", "first", "", "last", box=None, pad_edge=False)
    for name in CURVES:
        values = [line[name] for line in metrics if math.isfinite(line.get(name, math.nan))]
        if values:
            table.add_row(name, f"{values[0]:.3g}", sparkline(values, blocks), f"{values[-1]:.3g}")
    return table


def describe_run(run_dir, args, metrics, is_finished):
    """Lines on what run it is, and how far."""
    script, model = args["exp_name"], args["model_name_or_path"]
    lines = [f"{args['run_name']}: {script}, {model}"]
    command = args.get("provenance", {}).get("command")
    if command:
        lines.append(shlex.join(command))
    if not metrics:
        return [*lines, "No step is finished yet"]
    last = metrics[-1]
    step = f"Step {last['training_step']:.0f} of {number_of_steps(args)}"
    minutes = f"{last['time/from_scratch'] / 60:.1f} minutes"
    since = (time.time() - (run_dir / "metrics.jsonl").stat().st_mtime) / 60
    ago = "" if is_finished else f"; that was {since:.1f} minutes ago"
    return [*lines, f"{step}, after {minutes}{ago}"]


def number_of_steps(args):
    return args.get("num_training_steps") or args["num_updates"]  # of a reward model


def last_responses(path):
    """The lines of the last training step in rollouts.jsonl; without one that is half written."""
    start = max(0, path.stat().st_size - TAIL)
    with open(path, "rb") as file:
        file.seek(start)
        lines = file.read().split(b"\n")[start > 0 : -1]
    rows = []
    for line in reversed(lines):
        row = json.loads(line)
        if rows and row["training_step"] != rows[0]["training_step"]:
            break
        rows.insert(0, row)
    return rows


@functools.cache
def load_tokenizer(run_dir, name, revision):
    """The run's tokenizer, or while there is no model in the run's folder the one it began with.

    None: not here. Nothing is downloaded. (transformers would take seconds to start.)
    """
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError
    from tokenizers import Tokenizer

    for folder in (run_dir / "model", Path(name)):
        if (folder / "tokenizer.json").is_file():
            return Tokenizer.from_file(str(folder / "tokenizer.json"))
    with contextlib.suppress(HFValidationError):  # a path
        path = try_to_load_from_cache(name, "tokenizer.json", revision=revision)
        if isinstance(path, str):
            return Tokenizer.from_file(path)
    return None


def split_tokens(tokenizer, token_ids, advantages):
    """A response's (text, advantage) of each token.

    Tokens that are parts of one character are together, with their mean.
    """
    pieces, context, start = [], 0, 0
    for end in range(1, len(token_ids) + 1):
        # A token's text may depend on the one before it, such as a space at its beginning
        before = tokenizer.decode(token_ids[context:start], skip_special_tokens=False)
        text = tokenizer.decode(token_ids[context:end], skip_special_tokens=False)
        if text.endswith("\N{REPLACEMENT CHARACTER}") and end < len(token_ids):
            continue
        pieces.append((text[len(before) :], mean(advantages[start:end])))
        context, start = start, end
    return pieces


def split_response(row, tokenizer):
    """(text, advantage) of each token of a line of rollouts.jsonl; without tokens, of each word."""
    if tokenizer is not None and "token_ids" in row:
        return split_tokens(tokenizer, row["token_ids"], row["advantages"])
    words = re.findall(r"\s*\S+", row["response"]) or [""]
    return [(word, mean_advantage(row)) for word in words]


def mean_advantage(row):
    return mean(row["advantages"]) if "advantages" in row else row["advantage"]


def style_of(advantage, largest):
    """A colour for an advantage: green above 0, red below, the stronger the larger.

    >>> style_of(0.5, largest=0.5), style_of(-0.1, largest=0.5), style_of(0.0, largest=0.5)
    ('rgb(0,170,0)', 'rgb(168,72,72)', '')
    """
    if advantage == 0:
        return ""
    share = 0.3 + 0.7 * abs(advantage) / largest
    strong = GREEN if advantage > 0 else RED
    channels = [round(a + share * (b - a)) for a, b in zip(GREY, strong, strict=True)]
    return f"rgb({','.join(map(str, channels))})"


def printable(text):
    """Without the control characters that a terminal would obey."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", " ", text)


def show_response(row, pieces, largest, number):
    """A line of figures, and below it the response: of more than `number` tokens the two ends."""
    average = mean_advantage(row)
    advantage = f"advantage {average:+.2f}"
    in_order = sorted(pieces, key=lambda piece: piece[1])
    (worst, low), (best, high) = in_order[0], in_order[-1]
    if low < high:  # so that it can be seen without colours, too
        advantage += f" ({low:+.2f} at {worst!r} to {high:+.2f} at {best!r})"
    end = "stopped" if row["stopped"] else "cut"
    figures = f"score {show_score(row['score'])}, {advantage}, {row['length']} tokens, {end}"
    if len(pieces) > number:
        half = number // 2
        gap = (f" [... {len(pieces) - 2 * half} more ...] ", 0.0)
        pieces = [*pieces[:half], gap, *pieces[len(pieces) - half :]]
    text = Text.assemble(*((printable(piece), style_of(a, largest)) for piece, a in pieces))
    return Group(
        Text(figures, style_of(average, largest)), Padding(text, (0, 0, 0, 2), expand=False)
    )


def show_responses(rows, tokenizer, options):
    """What rollouts.jsonl has of a step, with a heading for each prompt."""
    pieces = [split_response(row, tokenizer) for row in rows]
    largest = max(abs(advantage) for response in pieces for _, advantage in response)
    step, version = rows[0]["training_step"], rows[0]["policy_version"]
    parts = [
        Text(f"Responses of step {step}, sampled by policy version {version}", "bold"),
        "Green: an advantage above 0; red: below",
    ]
    shown = list(zip(rows, pieces, strict=True))[: options.responses]
    for prompt, responses in groupby(shown, key=lambda pair: pair[0]["prompt"]):
        responses = list(responses)
        group = [row for row in rows if row["prompt"] == prompt]
        parts += ["", Text(printable(end_of_prompt(prompt)), "bold")]
        truth = group[0]["ground_truth"]
        if truth not in (None, "None"):  # a reward model alone scored
            truth = textwrap.shorten(printable(truth), 100, placeholder=" ...")
            parts.append(f"Ground truth: {truth}")
        if len(group) > 1:
            parts.append("Scores: " + " ".join(show_score(row["score"]) for row in group))
        parts += [show_response(*pair, largest, options.tokens) for pair in responses]
    return parts


def show_run(run_dir, args, options, blocks=BLOCKS):
    """What is to be printed, and whether the run is at its end."""
    has_metrics = (run_dir / "metrics.jsonl").is_file()
    metrics = read_metrics(run_dir) if has_metrics else []
    is_finished = bool(metrics) and metrics[-1]["training_step"] == number_of_steps(args)
    first, *others = describe_run(run_dir, args, metrics, is_finished)
    parts = [Text(first, "bold"), *others, ""]
    if metrics:
        parts += [show_curves(metrics, blocks), ""]
    speed = describe_speed(metrics)
    if speed:
        parts += [speed, ""]
    rollouts = run_dir / "rollouts.jsonl"
    rows = last_responses(rollouts) if rollouts.is_file() else []
    if rows:
        name = args["tokenizer_name_or_path"] or args["model_name_or_path"]
        tokenizer = load_tokenizer(run_dir, name, args["model_revision"])
        parts += show_responses(rows, tokenizer, options)
    return Group(*parts), is_finished


def main():
    if sys.stdout is not None:
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal may know ASCII alone
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("--watch", type=float, metavar="SECONDS", help="show it again so often")
    responses, tokens = "how many responses at most (8)", "of each response at most (120)"
    parser.add_argument("--responses", type=int, default=8, metavar="N", help=responses)
    parser.add_argument("--tokens", type=int, default=120, metavar="N", help=tokens)
    options = parser.parse_args()
    if not (options.run / "args.json").is_file():
        parser.error(f"{options.run} holds no args.json; plot_runs.py can do without it")
    args = json.loads((options.run / "args.json").read_text())

    console = Console(markup=False, emoji=False, highlight=False)
    blocks = BLOCKS if console.encoding.startswith("utf") else ASCII_BLOCKS
    show = functools.partial(show_run, options.run, args, options, blocks)
    shown, is_finished = show()
    if options.watch is None:
        console.print(shown)
        return
    with contextlib.suppress(KeyboardInterrupt), Live(shown, console=console) as live:
        while not is_finished:
            time.sleep(options.watch)
            shown, is_finished = show()
            live.update(shown)


if __name__ == "__main__":
    main()
