"""Writes what a run left as one page, to look at in a browser: RUN/report.html.

    python scripts/report.py output/RUN
    # runs beside each other: comparison.html in this folder
    python scripts/report.py output/A output/B

Whether it learned and is healthy, curves, answers to held-out prompts, and training responses token
by token. The page needs no network. While a run goes on it can be made again.
"""

import argparse
import ast
import base64
import contextlib
import functools
import hashlib
import json
import math
import re
import shlex
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from itertools import groupby, pairwise
from operator import itemgetter
from pathlib import Path
from statistics import mean

import inspect_run as inspect
from plot_runs import Curve, Run, panels_of, points_of, read_lines, read_runs, table_of

PAGE = Path(__file__).parent / "page"
DOCS = Path(__file__).parent.parent / "docs"
# Bytes of the page; of its curves and answers at most. Rollouts take what is left
MOST, MOST_CURVES, MOST_ANSWERS = 5_900_000, 1_200_000, 1_500_000
MOST_POINTS = 500  # of a curve
MOST_TOKENS = [2000, 400, 80]  # of a response; fewer where not even SEVERAL steps would fit
MOST_CHARACTERS = 6000  # of a text
FIGURES = 5  # of a metric, beside what is usual
SEVERAL, LONG = 3, 10  # steps in a row
TABLE_ROW = re.compile(r"^\| (.*) \|$", re.MULTILINE)
# Rows of healthy.md; what no metric should leave: (row, metric, least, most, for so many steps in a
# row, the failure that does)
SIGNAL, LEARNS, ITSELF = "Is there a signal?", "Does it learn?", "Does it stay itself?"
UPDATES, SAMPLER, ALWAYS = "Are updates small?", "Is the sampler the policy?", "Always an illness"
KL, INF = "mismatch/kl", math.inf
BOUNDS = [
    (SIGNAL, "objective/scores_std", 1e-9, INF, SEVERAL, ""),
    (UPDATES, "policy/clipfrac_avg", 0, 0.1, SEVERAL, ""),
    (UPDATES, "policy/approxkl_avg", 0, 0.1, SEVERAL, ""),
    (SAMPLER, KL, -INF, 0.1, SEVERAL, "stale_weights"),
    (SAMPLER, "mismatch/ess", 0.8, INF, 2 * SEVERAL, ""),
    (SAMPLER, "mismatch/masked", 0, 0.1, SEVERAL, "product_mask"),
    (ALWAYS, "objective/reward_failures", 0, 0, 1, ""),
    (ALWAYS, "val/explained_variance", -0.05, INF, LONG, ""),
]
NO_NUMBERS = {"token_ids", "turns", "observed"}


# ------------------------------------------------------------------------------ the docs


def plain(text: str) -> str:
    """
    >>> plain("**Look** at `loss`: [a bug](failures.md#a-bug)")
    'Look at loss: a bug'
    """
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text).replace("`", "").replace("**", "")


def read_page(name: str) -> str:
    return (DOCS / name).read_text() if (DOCS / name).is_file() else ""


def read_meanings(names: set[str], script: str) -> dict[str, str]:
    """{metric: what the tables of the docs say of it}, without those that they do not have."""
    pages = ["ppo_sync.md", *(["ppo_vllm_async.md"] if script != "ppo_sync" else [])]
    pages += ["grpo_vllm_async.md", "forks.md"] if not script.startswith("ppo") else []
    said = defaultdict(list)
    for row in TABLE_ROW.findall("\n".join(map(read_page, pages))):
        keys, *cells = row.split(" | ")
        for key in re.findall(r"`(\w+(?:/\w+)*)`", keys):
            said[key] += [f"{plain(cell).strip('. |')}." for cell in cells if cell.strip(" |")]
    meanings = {}
    for name in names:
        parts = name.split("/")  # of a data source's, too: objective/scores/debug/sorting
        keys = [name, f"{'/'.join(parts[:2])}/NAME", "/".join(parts[:3]), "/".join(parts[:2])]
        meanings[name] = next((" ".join(said[key]) for key in keys if key in said), "")
    return meanings


def section_of(failure: str) -> list[str]:
    """Of a diff of scripts/failures: the link to its section, and what that says up to the diff."""
    for section in read_page("failures.md").split("\n### "):
        text, found, _ = section.partition(f"- [Diff](../scripts/failures/{failure}.diff)")
        if found:
            title, _, text = text.partition("\n\n")
            return [f"failures.md#{title.lower().replace(' ', '-')}", plain(text.strip())]
    return ["", ""]


# ------------------------------------------------------------------------------ is it healthy


def longest(values: list[bool], wanted: bool) -> int:
    """How many in a row are as wanted, at most."""
    return max((len([*group]) for value, group in groupby(values) if value == wanted), default=0)


def illnesses(metrics: list[dict], args: dict) -> Iterator[tuple[str, str, str]]:
    """(row of healthy.md, what is ill, the failure that looks so or ""), as far as the run came.

    A right run has none: tests/test_report.py asks the runs of docs/failures.jsonl.
    """
    columns = defaultdict(list)
    for line in metrics:
        for name, value in line.items():
            if value is not None and math.isfinite(value):
                columns[name].append(value)
    scores, stds = columns["objective/scores"], columns["objective/scores_std"]
    entropies, held_out = columns["policy/entropy_avg"], columns["eval/scores"]
    rates, kl = columns["objective/verifiable_correct_rate"], columns["mismatch/kl"]
    first, last = metrics[0], metrics[-1]
    is_first = first["training_step"] == 1 and not first.get("policy/staleness")
    rounding = 4e-3 / min(1, args["temperature"]) if args["dtype"] == "bfloat16" else 1e-4
    if is_off := is_first and kl and kl[0] > rounding:  # check_sampler's limit
        yield SAMPLER, f"mismatch/kl of step 1 is {kl[0]:.2g}: no rounding", "temperature"
        yield SAMPLER, "Or it is this", "retokenized"
    elif kl and kl[-1] > 0.01 and last.get("lr", math.inf) < 0.05 * max(columns["lr"]):
        yield SAMPLER, "mismatch/kl stays where the learning rate is nearly 0", "prefix_cache"

    solved, by_response = rates[-1:] == [1], args.get("importance_sampling_level") == "sequence"
    for row, name, least, most, steps, failure in BOUNDS:
        inside = [least <= value <= most for value in columns[name]]
        is_known = (name == KL and is_off) or (row == SIGNAL and solved)
        if (
            longest(inside, False) >= steps
            and not is_known
            and not (row == UPDATES and by_response)
        ):
            side = f"above {most:g}" if most < math.inf else f"below {least:g}"
            yield (
                row,
                f"{name} is {side} in {longest(inside, False)} steps, one after another",
                failure,
            )

    constant, size = columns["val/zero_variance_groups"], args.get("number_samples_per_prompt")
    if len(constant) >= LONG and rates:
        groups = args["episodes_per_step"] / size
        chance = mean(groups * (p**size + (1 - p) ** size) for p in rates[-LONG:])
        found = mean(constant[-LONG:])
        if found < 2 * chance < groups / 4:
            said = f"{found:.1f} of {groups:.0f} groups score alike, by chance it were {chance:.1f}"
            yield SIGNAL, said, "wrong_groups"

    for before, after, entropy, new in zip(
        scores, scores[2:], entropies, entropies[2:], strict=False
    ):
        if before > 0.2 and after < 0.1 * before and new > 0.7 * entropy:
            yield LEARNS, "The score falls to nothing, and the policy hardly changes", "dead_reward"
            break
    loss, is_zero = first.get("loss/value_avg"), first.get("val/explained_variance") == 0
    if is_first and is_zero and loss < (scores[0] ** 2 + stds[0] ** 2) / 4:
        yield LEARNS, f"loss/value_avg of step 1 is {loss:.2g}: rewards get lost", "reward_late"
    same = [before == after for before, after in pairwise(held_out)]
    if longest(same, True) >= SEVERAL and not solved and any(stds[-SEVERAL:]):
        yield LEARNS, "eval/scores repeats to the last digit", "stale_weights"
    elif len(metrics) >= LONG and held_out and held_out[-1] < min(held_out[0], 0.95):
        yield LEARNS, "Held-out prompts score less than before training", ""

    lengths, stops = columns["objective/sequence_lengths"], columns["objective/stop_rate"]
    if lengths and min(lengths[:5]) < 0.4 * lengths[0]:
        yield ITSELF, "Responses shrink to a third within five steps", "cold_value"
    if entropies and entropies[-1] < 0.01 and scores[-1] < 0.5 * max(scores):
        yield ITSELF, "Entropy is near 0, and the score far below its best", ""
    if len(stops) > SEVERAL and mean(stops[-SEVERAL:]) < 0.5 * mean(stops[:SEVERAL]):
        yield ITSELF, "Fewer and fewer responses stop", "end_token"


def verdicts(metrics: list[dict], args: dict) -> list[dict]:
    """The rows of healthy.md, with a run's figures and what is ill."""
    ill = defaultdict(list)
    for row, said, failure in illnesses(metrics, args):
        ill[row].append([said, *section_of(failure)])
    table = read_page("healthy.md").partition("| ask |")[2].partition("\n\n")[0]
    rows = [row.split(" | ") for row in TABLE_ROW.findall(table)]
    look = "`objective/reward_failures`, `objective/stop_rate`, `val/explained_variance`"
    rows.append([ALWAYS, look, "0; near 1; above 0", "", ""])
    shown = []
    for ask, look, usual, _, then in rows:
        figures = []
        for name in re.findall(r"`(\w+/\w+)`", look):
            values = [f"{line[name]:.3g}" for line in metrics if line.get(name) is not None]
            figures += [[name, ", ".join(spread_out(values, FIGURES))]] if values else []
        texts = {"ask": ask, "usual": plain(usual), "then": plain(then), "ill": ill[ask]}
        shown += [texts | {"figures": figures}] if figures else []
    return shown


# ------------------------------------------------------------------------------ what fits


def dump(value) -> str:
    """JSON that may stand in a page's <script>."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")


def spread_out(items: list, number: int) -> list:
    """
    >>> spread_out([1, 2, 3, 4, 5, 6, 7], 3)
    [1, 4, 7]
    """
    places = {round(i * (len(items) - 1) / max(1, number - 1)) for i in range(number)}
    return [items[place] for place in sorted(places)] if len(items) > number else items


def fit(items: list, build: Callable, most: int) -> list:
    """What is built of evenly spaced items, of as many as fit into `most` bytes."""

    def size_of(values):
        return len(dump(values).encode(errors="replace"))

    few = [build(item) for item in spread_out(items, 8)]
    count = min(len(items), int(1.2 * most * len(few) / size_of(few)))
    while count:
        values = [build(item) for item in spread_out(items, count)]
        if size_of(values) <= most:
            return values
        count = int(0.9 * count)
    return []


def shorten(text: str) -> str:
    return inspect.both_ends(text, MOST_CHARACTERS)


def number(value: float | None) -> float | None:
    """With four decimals; None: it is not finite."""
    return round(value, 4) if value is not None and math.isfinite(value) else None


# ------------------------------------------------------------------------------ what a page has


def curves_of(run: Run, most: int) -> dict[str, list]:
    """{metric: [steps, values]}; of many points the least and the greatest of neighbours."""
    curves = {}
    for name in sorted({name for line in run.metrics for name in line} - {"training_step"}):
        points = [*points_of(run.metrics, name, "step").values()]
        points = [(x, float(f"{y:.5g}")) for x, y in points if math.isfinite(y)]
        size = -(-2 * len(points) // most)
        if size > 2:
            parts = [points[start : start + size] for start in range(0, len(points), size)]
            points = sorted({f(part, key=itemgetter(1)) for part in parts for f in (min, max)})
        curves[name] = [[x for x, _ in points], [y for _, y in points]]
    return curves


def answers_of(run_dirs: list[Path], runs: list[Run], most: int) -> dict:
    """Held-out prompts [prompt, truth, source, of each run its answers by evaluation]."""
    prompts, times = defaultdict(lambda: [[] for _ in run_dirs]), Counter()
    worths = [run.args.get("verification_reward", 1.0) for run in runs]
    for i, run_dir in enumerate(run_dirs):
        for row in read_lines(run_dir / "samples.jsonl"):
            key = row["prompt"], str(row["ground_truth"]), str(row.get("data_source"))
            time = i, row["policy_version"], *key  # a prompt may be there twice
            times[time] += 1
            prompts[*key, times[time]][i].append(row)

    def build(key, versions):
        every = zip(prompts[key], worths, strict=True)
        rows = [
            [describe(row, worth) for row in spread_out(rows, versions)] for rows, worth in every
        ]
        return [shorten(key[0]), shorten(key[1]), key[2], rows]

    for versions in (100, 10, 3):
        shown = fit([*prompts], functools.partial(build, versions=versions), most)
        if len(shown) >= min(50, len(prompts)):
            break
    return {"asked": len(prompts), "answers": shown}


def describe(row: dict, worth: float) -> dict:
    """What is said of a response beside its tokens."""
    text = "\n".join(row.get("turns") or [row["response"]])
    said = {"version": row["policy_version"], "right": inspect.is_right(row, worth)}
    said |= {"score": number(row["score"]), "length": row["length"]}
    return said | {"figures": inspect.show_figures(row), "text": shorten(text)}


def describe_tokens(row: dict, tokenizer, most: int) -> dict:
    """Texts, ids and numbers of a response's tokens; of more than `most` the two ends."""
    if "token_ids" not in row:
        return {}
    count, gap = len(row["token_ids"]), max(0, len(row["token_ids"]) - most)
    kept = [*range((count - gap) // 2), *range((count + gap) // 2, count)]
    ids = [row["token_ids"][place] for place in kept]
    texts = inspect.token_texts(ids, tokenizer) if tokenizer else [f"{i} " for i in ids]
    spans = row.get("observed", [])
    observed = [i for i, place in enumerate(kept) if any(a <= place < b for a, b in spans)]
    numbers = {}
    for name in [name for name in row if isinstance(row[name], list) and name not in NO_NUMBERS]:
        # GRPO leaves zeros in rows that it does not compute
        left_out = name in ("logprobs", "entropies") and not any(row[name])
        if not (left_out and any(row["sampler_logprobs"])):
            values = inspect.numbers_of(row, name)
            numbers[name] = [number(values[place]) for place in kept]
    said = {"texts": texts, "ids": ids, "observed": observed, "gap": gap, "numbers": numbers}
    return said | {"stopped": row["stopped"]}


def rollouts_of(run_dir: Path, args: dict, most: int) -> dict:
    """Steps of rollouts.jsonl with their groups, and a sentence that says how many fit."""
    path, worth, lines = run_dir / "rollouts.jsonl", args.get("verification_reward", 1.0), {}
    if not path.is_file():
        return {"steps": [], "note": "", "special": []}
    with open(path, "rb") as file:
        for step, group in groupby(places_of(file), key=itemgetter(0)):
            lines[step] = [*group]  # (step, where the line begins, whether it has tokens)
        name = args.get("tokenizer_name_or_path") or args["model_name_or_path"]
        tokenizer = inspect.load_tokenizer(run_dir, name, args["model_revision"])

        def build(step, most_tokens=0):
            groups = []
            for _, place, _ in lines[step]:
                file.seek(place)
                row = json.loads(file.readline())
                if not groups or groups[-1]["prompt"] != shorten(row["prompt"]):
                    truth = inspect.show_truth(row)
                    groups.append({"prompt": shorten(row["prompt"]), "truth": truth, "rows": []})
                tokens = describe_tokens(row, tokenizer, most_tokens)
                groups[-1]["rows"].append(describe(row, worth) | tokens)
            return {"step": step, "groups": groups}

        whole = [step for step, group in lines.items() if group[0][2]]
        for tokens in MOST_TOKENS:
            shown = fit(whole, functools.partial(build, most_tokens=tokens), most)
            if len(shown) >= min(SEVERAL, len(whole)):
                break
        rest = [step for step in lines if step not in whole]
        texts = fit(rest, build, most - len(dump(shown).encode(errors="replace")))
    said = f"{len(shown)} of {len(whole)} steps that have tokens are in this page"
    said += f", and {len(texts)} of {len(rest)} steps with text alone" if rest else ""
    special = tokenizer.get_added_tokens_decoder() if tokenizer else {}
    special = [i for i, token in special.items() if token.special]
    steps = sorted(shown + texts, key=itemgetter("step"))
    return {"steps": steps, "note": said, "special": special}


def places_of(file) -> Iterator[tuple[int, int, bool]]:
    """Of each whole line of rollouts.jsonl: its step, where it begins, and if it has tokens."""
    place = 0
    for line in file:
        if not line.endswith(b"\n"):  # half written
            return
        row = json.loads(line)
        yield row["training_step"], place, "token_ids" in row
        place += len(line)


def arguments_of(args: dict) -> list[list[str]]:
    """[name, value, default] of the arguments that differ from their script's defaults."""
    words = args.get("provenance", {"command": []})["command"]
    script = next((word for word in words if word.endswith(".py")), f"{args['exp_name']}.py")
    paths = [path for path in (Path(script), DOCS.parent / script) if path.is_file()]
    fields = []
    for node in ast.walk(ast.parse(paths[0].read_text() if paths else "")):
        if isinstance(node, ast.ClassDef) and node.name == "Args":
            fields = [field for field in node.body if isinstance(field, ast.AnnAssign)]
    shown = []
    for field in fields:
        with contextlib.suppress(ValueError, TypeError):  # filled in by the script
            name, default = field.target.id, ast.literal_eval(field.value)
            if args.get(name, default) != default:
                shown.append([name, str(args[name]), str(default)])
    return shown


# ------------------------------------------------------------------------------ the program


def describe_run(run: Run, run_dir: Path, most_points: int) -> dict:
    metrics, args = run.metrics, run.args
    sentences = [*inspect.describe_evaluations(metrics), *inspect.describe_troubles(metrics)]
    sentences.append(inspect.describe_speed(metrics) or "Neither side waited for the other")
    provenance = args.get("provenance", {})
    versions = [f"{name} {version}" for name, version in provenance.get("versions", {}).items()]
    return {
        "name": run.name,
        "title": f"{args['exp_name']}, {args['model_name_or_path']}",
        "progress": inspect.describe_progress(run_dir, args, metrics),
        "sentences": sentences,
        "health": verdicts(metrics, args),
        "curves": curves_of(run, most_points),
        "arguments": arguments_of(args),
        "command": shlex.join(provenance.get("command", [])),
        "versions": [f"commit {provenance.get('commit')}", *versions],
    }


def make_page(run_dirs: list[Path]) -> str:
    """The whole file: nothing in it is loaded from elsewhere, and of scripts its own alone run."""
    runs = read_runs(run_dirs)
    logged = {name for run in runs for line in run.metrics for name in line}
    most_points = min(MOST_POINTS, MOST_CURVES // (16 * len(runs) * len(logged)))
    curves = [Curve(run.name, [run]) for run in runs]
    panels = [[panel.title, panel.metrics] for panel in panels_of(curves, "step", [])]
    data = {
        "runs": [describe_run(*pair, most_points) for pair in zip(runs, run_dirs, strict=True)],
        "table": table_of(curves) if len(runs) > 1 else None,
        "panels": panels,
        "meanings": read_meanings(logged, runs[0].args["exp_name"]),
        **answers_of(run_dirs, runs, MOST_ANSWERS),
    }
    script, style = read("uPlot.iife.min.js", "page.js"), read("uPlot.min.css", "page.css")
    rest = MOST - len((script + style + dump(data)).encode(errors="replace"))
    for run, shown, run_dir in zip(runs, data["runs"], run_dirs, strict=True):
        shown |= rollouts_of(run_dir, run.args, rest // len(runs))
    page = (PAGE / "page.html").read_text()
    parts = {"STYLE": style, "DATA": dump(data), "SCRIPT": script}
    parts |= {f"HASH_OF_{name}": hash_of(parts[name]) for name in ("STYLE", "SCRIPT")}
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], page)


def read(*names: str) -> str:
    return "\n".join((PAGE / name).read_text() for name in names)


def hash_of(text: str) -> str:
    """By which a browser knows what it may run."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("--output", type=Path, metavar="FILE", help="in place of these")
    options = parser.parse_args()
    run_dirs = [run.expanduser() for run in options.runs]
    for run_dir in run_dirs:
        if not ((run_dir / "args.json").is_file() and read_lines(run_dir / "metrics.jsonl")):
            parser.error(f"{run_dir} has no args.json, or no step in metrics.jsonl yet")
    default = run_dirs[0] / "report.html" if len(run_dirs) == 1 else Path("comparison.html")
    output = options.output or default
    output.write_bytes(make_page(run_dirs).encode(errors="replace"))
    print(f"Wrote {output}, {output.stat().st_size / 1e6:.1f} MB: open it in a browser")


if __name__ == "__main__":
    main()
