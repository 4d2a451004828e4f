"""Write a run as one page for a browser: RUN/report.html.

    python scripts/report.py output/RUN
    # several runs beside each other: comparison.html in this folder
    python scripts/report.py output/A output/B

The page shows whether the run learned and is healthy, curves, answers to held-out prompts, and
training responses token by token. It needs no network. You can write it again while a run
continues.
"""

import contextlib
import json
import math
import re
import secrets
import shlex
from collections import Counter, defaultdict
from collections.abc import Callable
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from internal import run_curves, warning_signs
from internal.run_files import is_right, make_parser, read_lines, read_metrics, read_rollouts
from internal.run_summary import both_ends, describe_run, show_figures, show_truth
from tokenizers import Tokenizer

PAGE = Path(__file__).parent / "internal/report_page"
BUG_GALLERY = Path(__file__).resolve().parent.parent / "docs/bug_gallery.md"
STYLES, SCRIPTS = ("uPlot.min.css", "page.css"), ("uPlot.iife.min.js", "page.js")
# Limits in bytes for the page, its curves, and its answers. Rollouts get what is left
MAX_BYTES, MAX_CURVES, MAX_ANSWERS = 5_900_000, 1_200_000, 1_500_000
# Lists in a line of rollouts.jsonl that do not hold one number per token
NO_NUMBERS = {"token_ids", "turns", "observed"}


class Detail(NamedTuple):
    characters: int  # of a text
    tokens: int  # of a response
    evaluations: int  # of a held-out prompt


# The most that the page shows of an item; there are fewer details if too few items would fit
DETAILS = Detail(6000, 2000, 99), Detail(2000, 400, 10), Detail(500, 80, 3)


def verdicts(metrics: list[dict], args: dict, first_rows: list[dict]) -> list[dict]:
    """Return the questions of warning_signs.py with a run's figures and warning signs."""
    signs = defaultdict(list)
    for question, sign, bug in warning_signs.find_warning_signs(metrics, args, first_rows):
        heading, effect = warning_signs.BUGS.get(bug, ("", ""))
        link = f"{BUG_GALLERY.as_uri()}#{heading.lower().replace(' ', '-')}"
        signs[question].append([sign, link, heading and f"{heading}: {effect}"])
    shown = []
    for question, names, usual, remedy in warning_signs.QUESTIONS:
        figures = []
        for name in names:
            values = [f"{line[name]:.3g}" for line in metrics if line.get(name) is not None]
            figures += [[name, ", ".join(spread_out(values, 5))]] if values else []
        row = {"question": question, "usual": usual, "remedy": remedy, "signs": signs[question]}
        shown += [row | {"figures": figures}] if figures else []
    return shown


def dump(value) -> bytes:
    """Return JSON that is safe in a page's <script>. Numbers that are not finite become null."""
    value = json.loads(json.dumps(value), parse_constant=lambda name: None)
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").encode(errors="replace")


def spread_out(items: list, number: int) -> list:
    """Return `number` evenly spaced items with both ends, such as [1, 3, 5] of [1, 2, 3, 4, 5]."""
    places = {round(i * (len(items) - 1) / max(1, number - 1)) for i in range(number)}
    return [items[place] for place in sorted(places)] if len(items) > number else items


def fit(items: list, build: Callable, max_bytes: int, min_items: int = 3) -> list:
    """Return build(item, detail) of as many evenly spaced items as fit into `max_bytes`.

    The first of DETAILS is used with which at least `min_items` items fit.
    """
    for detail in DETAILS if items else []:
        some = [build(item, detail) for item in spread_out(items, 8)]
        count = min(len(items), int(max_bytes * len(some) / len(dump(some))))
        while count >= min(min_items, len(items)):
            values = [build(item, detail) for item in spread_out(items, count)]
            if len(dump(values)) <= max_bytes:
                return values
            count = min(count - 1, int(0.9 * count))
    return []


def curves_of(run: run_curves.Run, max_points: int) -> dict[str, list]:
    """Return {metric: [steps, values]}. Of many neighbouring points only the extremes are kept."""
    curves = {}
    for name in sorted(run_curves.names_in([run]) - {"training_step"}):
        points = run_curves.points_of(run.metrics, name)
        points = [(x, float(f"{y:.5g}")) for x, y in points if math.isfinite(y)]
        size = math.ceil(2 * len(points) / max_points)
        if size > 2:
            parts = [points[start : start + size] for start in range(0, len(points), size)]
            points = sorted({f(part, key=itemgetter(1)) for part in parts for f in (min, max)})
        curves[name] = [[x for x, _ in points], [y for _, y in points]]
    return curves


def describe(row: dict, detail: Detail) -> dict:
    """Return what the page shows of a response beside its tokens."""
    text = "\n".join(row.get("turns") or [row["response"]])
    facts = {name: row[name] for name in ("policy_version", "score", "length")}
    facts |= {"right": is_right(row), "figures": show_figures(row)}
    return facts | {"text": both_ends(text, detail.characters)}


def answers_of(run_dirs: list[Path], max_bytes: int) -> dict:
    """Return held-out prompts as [prompt, ground truth, source, each run's answers in order]."""
    prompts, counts = defaultdict(lambda: [[] for _ in run_dirs]), Counter()
    for i, run_dir in enumerate(run_dirs):
        for row in read_lines(run_dir / "samples.jsonl"):
            key = row["prompt"], str(row["ground_truth"]), str(row.get("data_source"))
            # A dataset can contain a prompt twice, so answers of one evaluation are counted
            evaluation = i, row["policy_version"], *key
            counts[evaluation] += 1
            prompts[*key, counts[evaluation]][i].append(row)

    def build(key, detail):
        texts = [both_ends(text, detail.characters) for text in key[:3]]
        answers = [
            [describe(row, detail) for row in spread_out(rows, detail.evaluations)]
            for rows in prompts[key]
        ]
        return [*texts, answers]

    answers = fit([*prompts], build, max_bytes, min_items=50)
    return {"num_prompts": len(prompts), "answers": answers}


def load_tokenizer(run_dir: Path, name: str, revision: str | None):
    """Load the run's tokenizer, or the one it began with if the run has no model yet.

    Return None if neither is on this disk. transformers is not imported, because it takes seconds.
    """
    for folder in (run_dir / "model", Path(name)):
        if (folder / "tokenizer.json").is_file():
            return Tokenizer.from_buffer((folder / "tokenizer.json").read_bytes())
    with contextlib.suppress(HFValidationError):  # raised if the name is a path
        path = try_to_load_from_cache(name, "tokenizer.json", revision=revision)
        if isinstance(path, str):
            return Tokenizer.from_buffer(Path(path).read_bytes())
    return None


def token_texts(token_ids: list[int], tokenizer) -> list[str | None]:
    """Return the text of each token.

    If a character consists of several tokens, the last one gets its text, and the others get None.
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
    """Return a number for each of a response's token_ids, which is NaN for observed tokens."""
    numbers = row[name]
    for start, end in row.get("observed", []):
        numbers = [*numbers[:start], *[math.nan] * (end - start), *numbers[start:]]
    return numbers


def describe_tokens(row: dict, tokenizer, max_tokens: int) -> dict:
    """Return the texts, ids and numbers of a response's tokens. Of many, return only both ends."""
    count, gap = len(row["token_ids"]), max(0, len(row["token_ids"]) - max_tokens)
    kept = [*range((count - gap) // 2), *range((count + gap) // 2, count)]
    ids = [row["token_ids"][place] for place in kept]
    texts = token_texts(ids, tokenizer) if tokenizer else [f"{i} " for i in ids]
    spans, numbers = row.get("observed", []), {}
    observed = [i for i, place in enumerate(kept) if any(a <= place < b for a, b in spans)]
    for name in {name for name in row if isinstance(row[name], list)} - NO_NUMBERS:
        values = numbers_of(row, name)
        numbers[name] = [values[place] for place in kept]
    tokens = {"texts": texts, "ids": ids, "observed": observed, "gap": gap, "numbers": numbers}
    return tokens | {"stopped": row["stopped"], "text": ""}


def rollouts_of(run_dir: Path, args: dict, max_bytes: int) -> dict:
    """Return the steps of rollouts.jsonl with their groups, and a note on how many fit."""
    lines = read_rollouts(run_dir)
    with_tokens = {step for step, (line, *_) in lines.items() if "token_ids" in json.loads(line)}
    name = args.get("tokenizer_name_or_path") or args["model_name_or_path"]
    tokenizer = load_tokenizer(run_dir, name, args.get("model_revision"))

    def build(step, detail):
        groups = []
        for prompt, rows in groupby(map(json.loads, lines[step]), key=itemgetter("prompt")):
            groups.append({"prompt": both_ends(prompt, detail.characters), "rows": []})
            for row in rows:
                tokens = {}
                if step in with_tokens:
                    tokens = describe_tokens(row, tokenizer, detail.tokens)
                groups[-1]["rows"].append(describe(row, detail) | tokens)
                groups[-1]["truth"] = show_truth(row)
        return {"step": step, "groups": groups}

    without = [step for step in lines if step not in with_tokens]
    shown = fit(sorted(with_tokens), build, max_bytes)
    all_fit = len(shown) == len(with_tokens)
    texts = fit(without, build, max_bytes - len(dump(shown))) if all_fit else []
    note = f"This page has {len(shown)} of the {len(with_tokens)} steps that have tokens"
    note += f", and {len(texts)} of the {len(without)} steps with text only" if without else ""
    added = tokenizer.get_added_tokens_decoder().items() if tokenizer else []
    steps = sorted(shown + texts, key=itemgetter("step"))
    return {"steps": steps, "note": note, "special": [i for i, token in added if token.special]}


def show_run(run: run_curves.Run, run_dir: Path, max_points: int) -> dict:
    """Return what the page shows of a run, except for its rollouts."""
    name, metrics, args = run
    first_rows = [json.loads(line) for line in read_rollouts(run_dir).get(1, [])]
    return {
        "name": name,
        "args": args,
        "sentences": describe_run(run_dir, args, metrics),
        "command": shlex.join(args.get("provenance", {}).get("command", [])),
        "health": verdicts(metrics, args, first_rows),
        "curves": curves_of(run, max_points),
    }


def make_page(run_dirs: list[Path]) -> bytes:
    """Return the page, which loads nothing, and in which a browser runs only the page's script."""
    runs = run_curves.read_runs(run_dirs)
    max_points = min(500, MAX_CURVES // (16 * len(runs) * len(run_curves.names_in(runs))))
    shown_runs = [show_run(*pair, max_points) for pair in zip(runs, run_dirs, strict=True)]
    data = {
        "runs": shown_runs,
        "table": "\n".join(run_curves.lines_of_table(runs)) if len(runs) > 1 else "",
        "panels": [[panel.title, panel.metrics] for panel in run_curves.panels_of(runs)],
        "meanings": warning_signs.METRICS,
        "validation_note": warning_signs.VALIDATION_NOTE,
        **answers_of(run_dirs, MAX_ANSWERS),
    }
    style = b"".join((PAGE / name).read_bytes() for name in STYLES)
    script = b"".join((PAGE / name).read_bytes() for name in SCRIPTS)
    rest = (MAX_BYTES - len(dump(data)) - len(style) - len(script)) // len(runs)
    for run, shown, run_dir in zip(runs, shown_runs, run_dirs, strict=True):
        shown |= rollouts_of(run_dir, run.args, rest)
    nonce = secrets.token_hex(16).encode()  # a browser runs only the script that has it
    parts = {b"STYLE": style, b"SCRIPT": script, b"DATA": dump(data), b"NONCE": nonce}
    return re.sub(rb"{{(\w+)}}", lambda name: parts[name[1]], (PAGE / "page.html").read_bytes())


def main():
    parser = make_parser(__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="Folder of a run.")
    output = "File to write. Defaults to RUN/report.html, or comparison.html for several runs."
    parser.add_argument("--output", type=Path, metavar="FILE", help=output)
    options = parser.parse_args()
    for run_dir in options.runs:
        if not ((run_dir / "args.json").is_file() and read_metrics(run_dir)):
            parser.error(f"{run_dir} has no args.json, or metrics.jsonl has no step yet")
    is_single = len(options.runs) == 1
    default = options.runs[0] / "report.html" if is_single else Path("comparison.html")
    output, page = options.output or default, make_page(options.runs)
    run_curves.save(lambda path: path.write_bytes(page), output)
    print(f"Wrote {output} ({len(page) / 1e6:.1f} MB). Open it in a browser.")


if __name__ == "__main__":
    main()
