"""Test scripts/report.py: a run as one page for a browser, with its warning signs."""

import json
import math
import re
import shlex
from itertools import pairwise, product

import pytest
import report
import torch
from helpers import REPO
from helpers.files import write_rows, write_text
from helpers.programs import call_main
from internal import warning_signs
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import ppo_sync as ppo

ARGS = {"exp_name": "ppo_vllm_async", "run_name": "mine", "num_training_steps": 12}
ARGS |= {"model_name_or_path": "a/model", "model_revision": None, "tokenizer_name_or_path": None}
ARGS |= {"episodes_per_step": 64, "number_samples_per_prompt": 4, "learning_rate": 3e-4}
ARGS |= {"dtype": "float32", "temperature": 1.0, "beta": 0.001}
ARGS["provenance"] = {"command": ["ppo_vllm_async.py", "--learning_rate", "3e-4"]}
ARGS["provenance"] |= {"commit": "abc", "versions": {"torch": "2.13.0"}}
NUMBERS = ["advantages", "logprobs", "sampler_logprobs", "ref_logprobs", "entropies", "values"]


def byte_tokenizer():
    """Return a tokenizer with a token for each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def metrics_of(steps):
    """Return lines of metrics.jsonl of a healthy run."""
    lines = []
    for step in range(1, steps + 1):
        line = {"training_step": step, "time/from_scratch": 60.0 * step, "lr": 1e-4}
        line |= {"objective/scores": 0.3 + step / 40, "objective/scores_std": 0.4}
        line |= {"policy/entropy_avg": 0.5, "mismatch/kl": 1e-13, "objective/reward/short": 1.0}
        if step in (1, steps):
            line |= {"eval/scores": step / 20, "eval/policy_version": step - 1}
        lines.append(line)
    return lines


def response(step, text, **changes):
    """Return a line of rollouts.jsonl, whose tokens are bytes."""
    ids = byte_tokenizer().encode(text).ids
    row = {"prompt": f"sort {step}=", "response": text, "score": 1.0, "verifiable_score": 1.0}
    row |= {"reward_model_score": None, "reward_metrics": {}, "failure": None}
    row |= {"ground_truth": "123", "data_source": "a", "length": len(ids), "stopped": True}
    row |= {"policy_version": step - 1, "training_step": step, "token_ids": ids}
    for place, name in enumerate(NUMBERS):
        row[name] = [round(0.1 * place - 0.25 * (i % 3), 4) for i in range(len(ids))]
    return row | changes


def answer(number, version, right, **changes):
    """Return a line of samples.jsonl."""
    row = response(1, f"answer {number} of {version}", score=float(right))
    row |= {"verifiable_score": float(right), "policy_version": version}
    row |= {"prompt": f"held out {number}", "data_source": "ab"[number % 2]}
    return {name: value for name, value in row.items() if not isinstance(value, list)} | changes


@pytest.fixture
def make_run(tmp_path):
    """Return a function that writes a run and returns its folder."""

    def make_run(name="mine", metrics=None, rollouts=(), samples=(), **arguments):
        folder = tmp_path / name
        write_text(folder / "model/tokenizer.json", byte_tokenizer().to_str())
        write_text(folder / "args.json", json.dumps(ARGS | arguments))
        lines = {"metrics": metrics or metrics_of(12), "rollouts": rollouts, "samples": samples}
        for file, rows in lines.items():
            write_rows(folder / f"{file}.jsonl", rows)
        return folder

    return make_run


def report_of(*folders):
    """Return the text of a page, and its data."""
    path = folders[0].parent / "page.html"
    assert call_main(report, *folders, "--output", path)[0] == 0
    text = path.read_text()
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    return text, json.loads(data[1])


def rows_of(step):
    return [row for group in step["groups"] for row in group["rows"]]


# ------------------------------------------------------------------------------ is it healthy

RIGHT = "verifiable_correct_rate"


def signs_of(metrics, rows=(), **arguments):
    """Return (warning sign, bug that looks like it)."""
    signs = warning_signs.find_warning_signs(metrics, ARGS | arguments, rows)
    return [(sign, bug) for _, sign, bug in signs]


# Two bugs have no sign in a run's own metrics, one has none in recorded metrics, and one depends on
# the task
NOT_FOUND = {"truncated", "micro_batches", "wrong_groups", "reward_late"}


def test_recorded_bugs_are_found_and_healthy_runs_have_no_sign():
    lines = (REPO / "docs/data/failures.jsonl").read_text().splitlines()
    runs = [run for run in map(json.loads, lines) if run["metrics"]]
    for run in runs:
        steps, bug = run["completed_steps"], run["diff"]
        metrics = [
            {"training_step": step + 1, "lr": 1 - step / steps, "policy/staleness": step > 0}
            | {name: each[step] for name, each in run["metrics"].items() if each[step] is not None}
            for step in range(steps)
        ]
        bugs = [bug for _, bug in signs_of(metrics)]
        if bug is None:
            assert bugs == []
        else:
            assert (bug in bugs) == (bug not in NOT_FOUND), (bug, bugs)
    assert len(runs) > 50


def test_reward_that_never_arrives_is_found_for_any_lengths_of_answers():
    """One answer in eight is correct and has 100 tokens. The others have 2,048."""
    lengths = torch.tensor([100] + 7 * [2048])
    scores, mask = (lengths == 100).float(), (torch.arange(2049) < lengths[:, None]).float()
    for gamma, late in product((1.0, 0.99), (False, True)):
        rewards = torch.zeros_like(mask)
        rewards[range(8), lengths - 1 + late] = scores - 0.5  # an incorrect answer costs something
        _, returns = ppo.compute_gae(rewards, torch.zeros_like(mask), mask, gamma, 1.0)
        rows = [
            {"score": score - 0.5, "returns": row[:length].tolist()}
            for score, row, length in zip(scores.tolist(), returns, lengths, strict=True)
        ]
        bugs = [bug for _, bug in signs_of(metrics_of(12), rows, gamma=gamma)]
        assert bugs == (["reward_late"] if late else [])
        assert signs_of(metrics_of(12), rows, whiten_rewards=True) == []


# (a metric, its values in a run that is healthy otherwise, the warning sign)
RULES = [
    ("objective/reward_failures", [0, 0.1, 0], "objective/reward_failures > 0"),
    ("val/explained_variance", [-0.1] * 10, "val/explained_variance < -0.05 for 10 steps"),
    ("policy/clipfrac_avg", [0.2, 0.2, 0.01, 0.2], None),
    ("policy/clipfrac_avg", [0.2, 0.2, 0.2], "policy/clipfrac_avg > 0.1 for 3 steps"),
    ("objective/scores_std", [0.4, 0, 0, 0], "objective/scores_std < 1e-09 for 3 steps"),
    (f"eval/{RIGHT}", [0.5, 0.7, 0.4], f"eval/{RIGHT} < 0.9 x the first, at the end"),
    (f"eval/{RIGHT}", [0.5, 0.4, 0.7], None),
    (f"eval/{RIGHT}", [0.02, 0.0], None),
    ("eval/scores", [-3.0, -2.9, -3.2], None),  # a reward model's
    ("eval/scores", [0.5] * 4, "eval/scores repeats to the last digit"),
    ("mismatch/ess", [float("nan"), None] * 4, None),
    ("objective/scores", [0.8, 0.8, 0.1], None),
    ("objective/scores", [0.8, 0.8, 0.05], warning_signs.COLLAPSE),
]
SOLVED = {"objective/scores_std": 0.0, "val/explained_variance": -9.0, "eval/scores": 1.0}
WARM_UP = {"lr": 0, "eval/scores": 0.3, "loss/value_avg": 0.1, "val/explained_variance": 0.0}
OLD = {"policy/staleness": 4, "mismatch/kl": 0.4, "mismatch/ess": 0.3}
BFLOAT16 = [{"mismatch/kl": 0.001}, *[{"mismatch/kl": 0.02, "lr": 1e-7}] * 11]
OF_A_MODEL = [{"objective/reward_model_score": x, "objective/scores": x} for x in (1, 0.1, -1)]
# (changes to steps of a run that only looks unhealthy, arguments)
HEALTHY_RUNS = [
    ([SOLVED | {f"objective/{RIGHT}": 0.98}] * 12, {}),
    ([WARM_UP] * 8, {}),  # only the value model learns
    ([WARM_UP] * 12, {}),  # the policy has not learned yet
    (BFLOAT16, {"dtype": "bfloat16"}),
    ([{"mismatch/kl": 0.005}], {"dtype": "bfloat16"}),  # the largest rounding that was measured
    (OF_A_MODEL, {}),  # scores of a reward model cross 0
    ([{}, *[OLD] * 11], {}),  # the sampler is old on purpose
]


def test_warning_signs_are_found_and_healthy_runs_have_none():
    for name, values, sign in RULES:
        lines = [{key: value for key, value in x.items() if key != name} for x in metrics_of(12)]
        for line, value in zip(lines, values, strict=False):
            line[name] = value
        signs = [found for found, _ in signs_of(lines)]
        assert signs == ([sign] if sign else []), (name, values)
    for changes, arguments in HEALTHY_RUNS:
        lines = metrics_of(12)
        for line, change in zip(lines, changes, strict=False):
            line |= change
        assert signs_of(lines, **arguments) == [], changes[-1]
    one_step_old = [line | OLD | {"policy/staleness": 1} for line in metrics_of(12)[1:]]
    assert len(signs_of([metrics_of(1)[0], *one_step_old])) == 2


def test_docs_have_the_metrics_and_quote_the_rules():
    rows = re.findall(r"^\| (`[^|]+) \|", (REPO / "docs/reference.md").read_text(), re.M)
    keys = {key for row in rows for key in re.findall(r"`(\w+/[\w/]+|lr|episode|epoch)`", row)}
    held_out = {name for name in warning_signs.METRICS if name.startswith("eval/")}
    assert keys | held_out == warning_signs.METRICS.keys() and len(keys) > 50
    text = (REPO / "docs/monitoring.md").read_text()
    prose = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text).replace("`", "")
    quoted = [
        words
        for question, _, usual, remedy in warning_signs.QUESTIONS
        for words in (question, usual, remedy)
    ]
    quoted += [*map(str, warning_signs.RULES), warning_signs.VALIDATION_NOTE]
    assert [words for words in quoted if words not in prose] == []
    headings = re.findall(r"^### (.*)$", (REPO / "docs/bug_gallery.md").read_text(), re.M)
    assert {heading for heading, _ in warning_signs.BUGS.values()} <= {*headings}


# ------------------------------------------------------------------------------ the data


def test_tokens_have_their_texts_and_numbers(make_run):
    turns = response(2, "7=8", observed=[[1, 2]], turns=["7", "=", "8"], versions=[4, 5])
    turns |= {name: [0.5, -0.5] for name in NUMBERS}
    rows = [response(1, "3ä"), response(1, "12", logprobs=None, ref_logprobs=[math.nan] * 2)]
    one, two = report_of(make_run(rollouts=[*rows, turns]))[1]["runs"][0]["steps"]
    first, second = rows_of(one)
    assert first["texts"] == ["3", None, "ä"] and first["ids"] == rows[0]["token_ids"]
    assert first["numbers"] == {name: rows[0][name] for name in NUMBERS}
    # GRPO does not compute some lists, and JSON has no NaN
    assert "logprobs" not in second["numbers"] and second["numbers"]["ref_logprobs"] == [None] * 2
    # Observed tokens have no numbers, and turns are not numbers of tokens
    (row,) = rows_of(two)
    assert row["observed"] == [1] and row["numbers"]["advantages"] == [0.5, None, -0.5]
    assert row["numbers"]["versions"] == [4, None, 5] and "turns" not in row["numbers"]

    # Of a long response both ends are shown, with their own numbers
    long = {"token_ids": [*range(9)], "observed": [[6, 8]], "stopped": True}
    long["advantages"] = [i / 8 for i in (*range(6), 8)]
    ends = report.describe_tokens(long, None, max_tokens=4)
    assert (ends["ids"], ends["gap"], ends["observed"]) == ([0, 1, 7, 8], 5, [2])
    assert ends["numbers"] == {"advantages": pytest.approx([0, 1 / 8, math.nan, 1], nan_ok=True)}

    ids = byte_tokenizer().encode("ä €").ids  # two characters consist of several tokens
    assert report.token_texts(ids, byte_tokenizer()) == [None, "ä", " ", None, None, "€"]
    tokenizer = Tokenizer(models.WordLevel({"▁a": 0, "▁b": 1}, unk_token="▁a"))
    tokenizer.decoder = decoders.Metaspace()
    assert report.token_texts([0, 1], tokenizer) == ["a", " b"]  # decoded alone, b loses its space


def test_page_of_a_long_run_is_below_6_mb_with_evenly_spaced_steps_and_all_peaks(make_run):
    """45 steps have up to 2,500 tokens each, and the last one has a response of 30,000."""
    rows = []
    for step in range(1, 47):
        # The steps that fit() builds first are short, so more steps seem to fit than do
        count = 30_000 if step == 46 else 500 if (step - 1) % 13 in (0, 6) else 2500
        numbers = {name: [-0.1234] * count for name in NUMBERS}
        rows.append(response(step, "5", token_ids=[20] * count, **numbers))
    samples = [answer(i, 0, True, response="y" * 3000) for i in range(700)]
    lines = metrics_of(3000)
    lines[1234]["objective/scores"] = 99.0
    text, data = report_of(make_run(metrics=lines, rollouts=rows, samples=samples))
    steps = [step["step"] for step in data["runs"][0]["steps"]]
    assert len(text) < 6e6 and steps[0] == 1 and steps[-1] == 46 and 10 < len(steps) < 45
    gaps = [after - before for before, after in pairwise(steps)]
    assert max(gaps) - min(gaps) <= 1
    (last,) = rows_of(data["runs"][0]["steps"][-1])
    assert last["gap"] == 28_000 and len(last["ids"]) == len(last["numbers"]["values"]) == 2000
    assert data["num_prompts"] == 700 > len(data["answers"]) >= 50
    curve = data["runs"][0]["curves"]["objective/scores"]
    assert len(curve[0]) == len(curve[1]) <= 520 and curve[0] == sorted(curve[0])
    assert curve[1][curve[0].index(1235)] == 99.0


def test_answers_of_two_runs_to_a_prompt_are_together(make_run):
    a = make_run("a", samples=[answer(0, 0, False), answer(1, 0, True), answer(0, 8, True)])
    b = make_run("b", samples=[answer(0, 0, True), answer(0, 0, False)], seed=2)
    shown = [
        (prompt, [[(row["policy_version"], row["right"]) for row in rows] for rows in answers])
        for prompt, _, _, answers in report_of(a, b)[1]["answers"]
    ]
    assert shown == [
        ("held out 0", [[(0, False), (8, True)], [(0, True)]]),
        ("held out 1", [[(0, True)], []]),
        ("held out 0", [[], [(0, False)]]),  # b's data has the prompt twice
    ]


# ------------------------------------------------------------------------------ hostile texts

HOSTILE = [
    "<script>window.ran = 1</script><img src=x onerror='window.ran = 2'>",
    "</script><script>window.ran = 3</script><!-- <script>",
    '"}]}</textarea></style><svg onload="window.ran = 4">',
    "\x00\x07\x1b[31m\x85\u2028\u2029\ud800 {{SCRIPT}} {{NONCE}}",
]
POLICY = (
    "default-src 'none'; base-uri 'none'; form-action 'none'; "
    "script-src 'nonce-{0}'; style-src 'nonce-{0}'"
)


def test_hostile_text_is_only_data_and_only_the_page_s_script_runs(make_run):
    """Hostile are prompts, responses, a ground truth, a metric's name, and a run's name."""
    rows = [response(1, "12", response=text, prompt=text) for text in HOSTILE]
    rows += [response(2, text.replace("\ud800", "")) for text in HOSTILE]
    samples = [answer(i, 0, False, response=text, prompt=text) for i, text in enumerate(HOSTILE)]
    samples += [answer(9, 0, False, data_source=HOSTILE[0], ground_truth=HOSTILE[1])]
    metrics = [line | {f"objective/reward/{HOSTILE[0]}": 1.0} for line in metrics_of(3)]
    run = make_run(metrics=metrics, rollouts=rows, samples=samples, run_name=HOSTILE[1])
    (text, page_data), (again, _) = report_of(run), report_of(run)
    nonce, other = (re.search(r'<script nonce="(\w{32})">', page)[1] for page in (text, again))
    assert nonce != other  # it cannot be guessed
    # Nothing in the data can end its element
    before, _, rest = text.partition('<script type="application/json" id="data">')
    data, _, rest = rest.partition("</script>")
    assert "<" not in data
    assert before.count("<script") == 0 and rest.count("<script") == 1
    policy = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    assert policy == [POLICY.format(nonce)]
    assert [prompt for prompt, *_ in page_data["answers"]][:3] == HOSTILE[:3]
    ways = (
        r"(inner|outer)HTML|insertAdjacentHTML|document\.write|eval\(|Function\(|srcdoc|DOMParser"
    )
    assert not re.search(ways, (REPO / "scripts/internal/report_page/page.js").read_text())


WORDS = ["it's", "a b", "$HOME", "`ls`", 'a"b', "", "--chat_template={{x}}", "new\nline", "ä"]


def test_command_of_the_page_can_be_typed(make_run):
    provenance = {"command": ["python", *WORDS]}
    _, page = report_of(make_run(provenance=provenance))
    assert shlex.split(page["runs"][0]["command"]) == provenance["command"]
    assert report_of(make_run(provenance={}))[1]["runs"][0]["command"] == ""
