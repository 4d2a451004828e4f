"""Write a run as one page for a browser: RUN/report.html.

    python scripts/report.py output/RUN
    # several runs beside each other: comparison.html in this folder
    python scripts/report.py output/A output/B

The page shows whether the run learned and is healthy, curves, answers to held-out prompts, and
training responses token by token. It needs no network. You can write it again while a run
continues.
"""

import argparse
import contextlib
import json
import math
import re
import secrets
import shlex
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import inspect_run as inspect
import plot_runs as plots
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from internal import warning_signs
from internal.run_files import is_right, read_lines, read_metrics, read_rollouts
from tokenizers import Tokenizer

PAGE, DOCS = Path(__file__).parent / "internal/report_page", Path(__file__).parent.parent / "docs"
FILES = ("uPlot.min.css", "page.css"), ("uPlot.iife.min.js", "page.js")
# The most bytes of the page, of its curves, and of its answers. Rollouts get what is left
MOST, MOST_CURVES, MOST_ANSWERS = 5_900_000, 1_200_000, 1_500_000
# Lists in a line of rollouts.jsonl that do not hold one number per token
NO_NUMBERS = {"token_ids", "turns", "observed"}
# Characters of a text, tokens of a response and its evaluations, of which there are fewer if too
# few items would fit
DETAILS = (6000, 2000, 99), (2000, 400, 10), (500, 80, 3)


def verdicts(metrics: list[dict], args: dict, first_rows: list[dict]) -> list[dict]:
    """Return the questions of warning_signs.py with a run's figures and warning signs."""
    ill = defaultdict(list)
    for ask, said, failure in warning_signs.illnesses(metrics, args, first_rows):
        heading, wrong = warning_signs.FAILURES.get(failure, ("", ""))
        slug = heading.lower().replace(" ", "-")
        link = f"{(DOCS / 'bug_gallery.md').resolve().as_uri()}#{slug}" if heading else ""
        ill[ask].append([said, link, heading and f"{heading}: {wrong}"])
    shown = []
    for question in warning_signs.QUESTIONS:
        figures = []
        for name in question.metrics:
            values = [f"{line[name]:.3g}" for line in metrics if line.get(name) is not None]
            figures += [[name, ", ".join(spread_out(values, 5))]] if values else []
        row = {"ask": question.ask, "usual": question.usual, "then": question.then}
        shown += [row | {"figures": figures, "ill": ill[question.ask]}] if figures else []
    return shown


def dump(value) -> bytes:
    """Return JSON that is safe in a page's <script>. Numbers that are not finite become null."""
    value = json.loads(json.dumps(value), parse_constant=lambda name: None)
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").encode(errors="replace")


def spread_out(items: list, number: int) -> list:
    """Return `number` evenly spaced items with both ends: of [1, 2, 3, 4, 5] it is [1, 3, 5]."""
    places = {round(i * (len(items) - 1) / max(1, number - 1)) for i in range(number)}
    return [items[place] for place in sorted(places)] if len(items) > number else items


def fit(items: list, build: Callable, most: int, few: int = 3) -> list:
    """Return build(item, detail) of as many evenly spaced items as fit into `most` bytes.

    The first of DETAILS is used with which at least `few` items fit.
    """
    for detail in DETAILS if items else []:
        some = [build(item, detail) for item in spread_out(items, 8)]
        count = min(len(items), int(most * len(some) / len(dump(some))))
        while count >= min(few, len(items)):
            values = [build(item, detail) for item in spread_out(items, count)]
            if len(dump(values)) <= most:
                return values
            count = min(count - 1, int(0.9 * count))
    return []


def curves_of(run: plots.Run, most: int) -> dict[str, list]:
    """Return {metric: [steps, values]}. Of many neighbouring points only the extremes are kept."""
    curves = {}
    for name in sorted(plots.names_in([run]) - {"training_step"}):
        points = plots.points_of(run.metrics, name)
        points = [(x, float(f"{y:.5g}")) for x, y in points if math.isfinite(y)]
        size = -(-2 * len(points) // most)
        if size > 2:
            parts = [points[start : start + size] for start in range(0, len(points), size)]
            points = sorted({f(part, key=itemgetter(1)) for part in parts for f in (min, max)})
        curves[name] = [[x for x, _ in points], [y for _, y in points]]
    return curves


def describe(row: dict, detail: tuple) -> dict:
    """Return what the page shows of a response beside its tokens."""
    text = "\n".join(row.get("turns") or [row["response"]])
    said = {name: row[name] for name in ("policy_version", "score", "length")} | {
        "right": is_right(row)
    }
    return said | {"figures": inspect.show_figures(row), "text": inspect.both_ends(text, detail[0])}


def answers_of(run_dirs: list[Path], runs: list[plots.Run], most: int) -> dict:
    """Return held-out prompts as [prompt, ground truth, source, each run's answers in order]."""
    prompts, times = defaultdict(lambda: [[] for _ in runs]), Counter()
    for i, run_dir in enumerate(run_dirs):
        for row in read_lines(run_dir / "samples.jsonl"):
            key = row["prompt"], str(row["ground_truth"]), str(row.get("data_source"))
            time = i, row["policy_version"], *key  # a dataset may contain a prompt twice
            times[time] += 1
            prompts[*key, times[time]][i].append(row)

    def build(key, detail):
        texts, answers = [inspect.both_ends(text, detail[0]) for text in key[:3]], []
        for rows in prompts[key]:
            rows = spread_out(rows, detail[2])
            answers.append([describe(row, detail) for row in rows])
        return [*texts, answers]

    return {"asked": len(prompts), "answers": fit([*prompts], build, most, few=50)}


def load_tokenizer(run_dir: Path, name: str, revision: str | None):
    """Load the run's tokenizer, or the one it began with if the run has no model yet.

    Return None if neither is on this disk, because nothing is downloaded. transformers is not used
    here, because it would take seconds to start.
    """
    for folder in (run_dir / "model", Path(name)):
        if (folder / "tokenizer.json").is_file():
            return Tokenizer.from_buffer((folder / "tokenizer.json").read_bytes())
    with contextlib.suppress(HFValidationError):  # the name is a path
        path = try_to_load_from_cache(name, "tokenizer.json", revision=revision)
        if isinstance(path, str):
            return Tokenizer.from_buffer(Path(path).read_bytes())
    return None


def token_texts(token_ids: list[int], tokenizer) -> list[str | None]:
    """Return the text of each token.

    It is None for a token that ends within a character, whose last token has the text.
    """
    texts, context, start = [], 0, 0
    for end in range(1, len(token_ids) + 1):
        # A token's text may depend on the one before it, such as a space at its beginning
        before = tokenizer.decode(token_ids[context:start], skip_special_tokens=False)
        text = tokenizer.decode(token_ids[context:end], skip_special_tokens=False)
        if text.endswith("\N{REPLACEMENT CHARACTER}") and end < len(token_ids):
            texts.append(None)
            continue
        texts.append(text[len(before) :])
        context, start = start, end
    return texts


def numbers_of(row: dict, name: str) -> list[float]:
    """Return a number for each of a response's token_ids. Observed tokens have none and get NaN."""
    numbers = row[name]
    for start, end in row.get("observed", []):
        numbers = [*numbers[:start], *[math.nan] * (end - start), *numbers[start:]]
    return numbers


def describe_tokens(row: dict, tokenizer, most: int) -> dict:
    """Return the texts, ids and numbers of a response's tokens, of many only both ends."""
    count, gap = len(row["token_ids"]), max(0, len(row["token_ids"]) - most)
    kept = [*range((count - gap) // 2), *range((count + gap) // 2, count)]
    ids = [row["token_ids"][place] for place in kept]
    texts = token_texts(ids, tokenizer) if tokenizer else [f"{i} " for i in ids]
    spans, numbers = row.get("observed", []), {}
    observed = [i for i, place in enumerate(kept) if any(a <= place < b for a, b in spans)]
    for name in {name for name in row if isinstance(row[name], list)} - NO_NUMBERS:
        values = numbers_of(row, name)
        numbers[name] = [values[place] for place in kept]
    said = {"texts": texts, "ids": ids, "observed": observed, "gap": gap, "numbers": numbers}
    return said | {"stopped": row["stopped"], "text": ""}


def rollouts_of(run_dir: Path, args: dict, most: int) -> dict:
    """Return the steps of rollouts.jsonl with their groups, and a note on how many fit."""
    lines = read_rollouts(run_dir)
    whole = {step for step, (line, *_) in lines.items() if "token_ids" in json.loads(line)}
    name = args.get("tokenizer_name_or_path") or args["model_name_or_path"]
    tokenizer = load_tokenizer(run_dir, name, args.get("model_revision"))

    def build(step, detail):
        groups = []
        for prompt, rows in groupby(map(json.loads, lines[step]), key=itemgetter("prompt")):
            groups.append({"prompt": inspect.both_ends(prompt, detail[0]), "rows": []})
            for row in rows:
                tokens = describe_tokens(row, tokenizer, detail[1]) if step in whole else {}
                groups[-1]["rows"].append(describe(row, detail) | tokens)
                groups[-1]["truth"] = inspect.show_truth(row)
        return {"step": step, "groups": groups}

    rest = [step for step in lines if step not in whole]
    shown = fit(sorted(whole), build, most)
    texts = fit(rest, build, most - len(dump(shown))) if len(shown) == len(whole) else []
    said = f"This page has {len(shown)} of the {len(whole)} steps that were written with tokens"
    said += f", and {len(texts)} of the {len(rest)} steps with text only" if rest else ""
    added = tokenizer.get_added_tokens_decoder().items() if tokenizer else []
    steps = sorted(shown + texts, key=itemgetter("step"))
    return {"steps": steps, "note": said, "special": [i for i, token in added if token.special]}


def describe_run(run: plots.Run, run_dir: Path, points: int) -> dict:
    name, metrics, args = run
    first = [json.loads(line) for line in read_rollouts(run_dir).get(1, [])]
    sentences = [inspect.describe_progress(run_dir, args, metrics)]
    sentences += inspect.describe_evaluations(metrics) + inspect.describe_troubles(metrics)
    sentences.append(inspect.describe_speed(metrics) or "Nothing stands out that limited its speed")
    sentences += filter(None, [inspect.describe_costs(run_dir, args, metrics)])
    said = {"name": name, "args": args, "sentences": sentences}
    said["command"] = shlex.join(args.get("provenance", {}).get("command", []))
    said |= {"health": verdicts(metrics, args, first)}
    return said | {"curves": curves_of(run, points)}


def make_page(run_dirs: list[Path]) -> bytes:
    """Return the page, which loads nothing, and in which a browser runs only the page's script."""
    runs = plots.read_runs(run_dirs)
    points = min(500, MOST_CURVES // (16 * len(runs) * len(plots.names_in(runs))))
    data = {
        "runs": [describe_run(*each, points) for each in zip(runs, run_dirs, strict=True)],
        "table": "\n".join(plots.lines_of_table(runs)) if len(runs) > 1 else "",
        "panels": [[panel.title, panel.metrics] for panel in plots.panels_of(runs)],
        "meanings": warning_signs.METRICS,
        "tried": warning_signs.TRIED,
        **answers_of(run_dirs, runs, MOST_ANSWERS),
    }
    style, script = (b"".join((PAGE / each).read_bytes() for each in files) for files in FILES)
    rest = (MOST - len(dump(data)) - len(style) - len(script)) // len(runs)
    for run, shown, run_dir in zip(runs, data["runs"], run_dirs, strict=True):
        shown |= rollouts_of(run_dir, run.args, rest)
    nonce = secrets.token_hex(16).encode()  # a browser runs only the script that has it
    parts = {b"STYLE": style, b"SCRIPT": script, b"DATA": dump(data), b"NONCE": nonce}
    return re.sub(rb"{{(\w+)}}", lambda name: parts[name[1]], (PAGE / "page.html").read_bytes())


def main():
    sys.stdout.reconfigure(errors="backslashreplace")  # a terminal may support only ASCII
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="Folder of a run.")
    output = "File to write. Defaults to RUN/report.html, or comparison.html for several runs."
    parser.add_argument("--output", type=Path, metavar="FILE", help=output)
    options = parser.parse_args()
    for run_dir in options.runs:
        if not ((run_dir / "args.json").is_file() and read_metrics(run_dir)):
            parser.error(f"{run_dir} has no args.json, or metrics.jsonl has no step yet")
    one = options.runs[0] / "report.html" if len(options.runs) == 1 else Path("comparison.html")
    output, page = options.output or one, make_page(options.runs)
    plots.save(lambda path: path.write_bytes(page), output)
    print(f"Wrote {output} ({len(page) / 1e6:.1f} MB). Open it in a browser.")


if __name__ == "__main__":
    main()
