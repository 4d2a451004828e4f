"""A run as one page, to look at in a browser: scripts/report.py."""

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
    """A token for each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def metrics_of(steps):
    """Lines of metrics.jsonl of a run that is healthy."""
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
    """A line of rollouts.jsonl; its tokens are bytes."""
    ids = byte_tokenizer().encode(text).ids
    row = {"prompt": f"sort {step}=", "response": text, "score": 1.0, "verifiable_score": 1.0}
    row |= {"reward_model_score": None, "reward_metrics": {}, "failure": None}
    row |= {"ground_truth": "123", "data_source": "a", "length": len(ids), "stopped": True}
    row |= {"policy_version": step - 1, "training_step": step, "token_ids": ids}
    for place, name in enumerate(NUMBERS):
        row[name] = [round(0.1 * place - 0.25 * (i % 3), 4) for i in range(len(ids))]
    return row | changes


def answer(number, version, right, **changes):
    """A line of samples.jsonl."""
    row = response(1, f"answer {number} of {version}", score=float(right))
    row |= {"verifiable_score": float(right), "policy_version": version}
    row |= {"prompt": f"held out {number}", "data_source": "ab"[number % 2]}
    return {name: value for name, value in row.items() if not isinstance(value, list)} | changes


@pytest.fixture
def make_run(tmp_path):
    """make_run(name, metrics, rollouts, samples, arguments) -> the run's folder"""

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
    """The page's text and its data."""
    path = folders[0].parent / "page.html"
    assert call_main(report, *folders, "--output", path)[0] == 0
    text = path.read_text()
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    return text, json.loads(data[1])


def rows_of(step):
    return [row for group in step["groups"] for row in group["rows"]]


# ------------------------------------------------------------------------------ is it healthy

RIGHT = "verifiable_correct_rate"


def ill(metrics, rows=(), **arguments):
    return [each[1:] for each in warning_signs.find_warning_signs(metrics, ARGS | arguments, rows)]


# Two have no sign in a run's own metrics, one none in those that are recorded, and one is a matter
# of the task
NOT_TOLD = {"truncated", "micro_batches", "wrong_groups", "reward_late"}


def test_recorded_failures_are_told_and_right_runs_are_not_ill():
    lines = (REPO / "docs/data/failures.jsonl").read_text().splitlines()
    wrong, runs = [], [run for run in map(json.loads, lines) if run["metrics"]]
    for run in runs:
        steps = run["completed_steps"]
        metrics = [
            {"training_step": step + 1, "lr": 1 - step / steps, "policy/staleness": step > 0}
            | {name: each[step] for name, each in run["metrics"].items() if each[step] is not None}
            for step in range(steps)
        ]
        told = [failure for _, failure in ill(metrics)]
        is_told = run["diff"] in told if run["diff"] else told != []
        wrong += [(run["diff"], told)] * (is_told != (run["diff"] not in {None, *NOT_TOLD}))
    assert wrong == [] and len(runs) > 50


def test_reward_that_never_arrives_is_told_however_long_right_and_wrong_answers_are():
    """One right answer in ten, of 100 tokens; wrong ones have 2,048."""
    lengths = torch.tensor([100] + 7 * [2048])
    scores, mask = (lengths == 100).float(), (torch.arange(2049) < lengths[:, None]).float()
    for gamma, late in product((1.0, 0.99), (False, True)):
        rewards = torch.zeros_like(mask)
        rewards[range(8), lengths - 1 + late] = scores - 0.5  # a wrong one costs something
        _, returns = ppo.compute_gae(rewards, torch.zeros_like(mask), mask, gamma, 1.0)
        rows = [
            {"score": score - 0.5, "returns": row[:length].tolist()}
            for score, row, length in zip(scores.tolist(), returns, lengths, strict=True)
        ]
        told = [failure for _, failure in ill(metrics_of(12), rows, gamma=gamma)]
        assert told == (["reward_late"] if late else [])
        assert ill(metrics_of(12), rows, whiten_rewards=True) == []


DIES = "The score falls to 0, although the policy hardly changes"
# (a metric, its values in a run that is right otherwise, what is said)
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
    ("objective/scores", [0.8, 0.8, 0.05], DIES),
]
SOLVED = {"objective/scores_std": 0.0, "val/explained_variance": -9.0, "eval/scores": 1.0}
WARM_UP = {"lr": 0, "eval/scores": 0.3, "loss/value_avg": 0.1, "val/explained_variance": 0.0}
OLD = {"policy/staleness": 4, "mismatch/kl": 0.4, "mismatch/ess": 0.3}
BFLOAT16 = [{"mismatch/kl": 0.001}, *[{"mismatch/kl": 0.02, "lr": 1e-7}] * 11]
OF_A_MODEL = [{"objective/reward_model_score": x, "objective/scores": x} for x in (1, 0.1, -1)]
# (what steps have besides, of a run that only looks ill, arguments)
RIGHT_RUNS = [
    ([SOLVED | {f"objective/{RIGHT}": 0.98}] * 12, {}),
    ([WARM_UP] * 8, {}),  # the value model learns alone
    ([WARM_UP] * 12, {}),  # so far
    (BFLOAT16, {"dtype": "bfloat16"}),  # far from its sampler
    ([{"mismatch/kl": 0.005}], {"dtype": "bfloat16"}),  # the most that it is off
    (OF_A_MODEL, {}),  # which cross 0
    ([{}, *[OLD] * 11], {}),  # the sampler is to be old
]


def test_what_is_ill_is_said_and_nothing_else():
    for name, values, said in RULES:
        lines = [{key: value for key, value in x.items() if key != name} for x in metrics_of(12)]
        for line, value in zip(lines, values, strict=False):
            line[name] = value
        assert [each for each, _ in ill(lines)] == ([said] if said else []), (name, values)
    for changes, arguments in RIGHT_RUNS:
        lines = metrics_of(12)
        for line, change in zip(lines, changes, strict=False):
            line |= change
        assert ill(lines, **arguments) == [], changes[-1]
    of_one_step = [line | OLD | {"policy/staleness": 1} for line in metrics_of(12)[1:]]
    assert len(ill([metrics_of(1)[0], *of_one_step])) == 2


def test_docs_have_the_metrics_and_quote_the_rules():
    rows = re.findall(r"^\| (`[^|]+) \|", (REPO / "docs/reference.md").read_text(), re.M)
    keys = {key for row in rows for key in re.findall(r"`(\w+/[\w/]+|lr|episode|epoch)`", row)}
    held_out = {name for name in warning_signs.METRICS if name.startswith("eval/")}
    assert keys | held_out == warning_signs.METRICS.keys() and len(keys) > 50
    text = (REPO / "docs/monitoring.md").read_text()
    said = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text).replace("`", "")
    quoted = [
        words
        for question, _, usual, remedy in warning_signs.QUESTIONS
        for words in (question, usual, remedy)
    ]
    quoted += [*map(str, warning_signs.RULES), warning_signs.VALIDATION_NOTE]
    quoted = [words for words in quoted if words not in said]
    headings = re.findall(r"^### (.*)$", (REPO / "docs/bug_gallery.md").read_text(), re.M)
    assert quoted == [] and {each for each, _ in warning_signs.BUGS.values()} <= {*headings}


# ------------------------------------------------------------------------------ the data


def test_tokens_have_their_texts_and_numbers(make_run):
    turns = response(2, "7=8", observed=[[1, 2]], turns=["7", "=", "8"], versions=[4, 5])
    turns |= {name: [0.5, -0.5] for name in NUMBERS}
    rows = [response(1, "3ä"), response(1, "12", logprobs=None, ref_logprobs=[math.nan] * 2)]
    one, two = report_of(make_run(rollouts=[*rows, turns]))[1]["runs"][0]["steps"]
    first, second = rows_of(one)
    assert first["texts"] == ["3", None, "ä"] and first["ids"] == rows[0]["token_ids"]
    assert first["numbers"] == {name: rows[0][name] for name in NUMBERS}
    # What GRPO did not compute; and what is no number
    assert "logprobs" not in second["numbers"] and second["numbers"]["ref_logprobs"] == [None] * 2
    # Observations have no numbers, and turns are no tokens
    (said,) = rows_of(two)
    assert said["observed"] == [1] and said["numbers"]["advantages"] == [0.5, None, -0.5]
    assert said["numbers"]["versions"] == [4, None, 5] and "turns" not in said["numbers"]

    ids = byte_tokenizer().encode("ä €").ids  # characters of several tokens are whole
    assert report.token_texts(ids, byte_tokenizer()) == [None, "ä", " ", None, None, "€"]
    tokenizer = Tokenizer(models.WordLevel({"▁a": 0, "▁b": 1}, unk_token="▁a"))
    tokenizer.decoder = decoders.Metaspace()
    assert report.token_texts([0, 1], tokenizer) == ["a", " b"]  # a lone token would lose its space


def test_page_of_a_long_run_is_below_6_mb_with_evenly_spaced_steps_and_all_peaks(make_run):
    """Of 45 steps with 2,500 tokens each, and a response of 30,000."""
    rows = []
    for step in range(1, 47):
        # Those that are looked at first are short: more seem to fit than do
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
    said = [
        (prompt, [[(row["policy_version"], row["right"]) for row in rows] for rows in answers])
        for prompt, _, _, answers in report_of(a, b)[1]["answers"]
    ]
    assert said == [
        ("held out 0", [[(0, False), (8, True)], [(0, True)]]),
        ("held out 1", [[(0, True)], []]),
        ("held out 0", [[], [(0, False)]]),  # it is in b's data twice
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


def test_hostile_text_is_data_and_the_page_runs_its_own_script_alone(make_run):
    """What a browser needs for that, on the file, of texts, names of metrics and a run's name."""
    rows = [response(1, "12", response=text, prompt=text) for text in HOSTILE]
    rows += [response(2, text.replace("\ud800", "")) for text in HOSTILE]
    samples = [answer(i, 0, False, response=text, prompt=text) for i, text in enumerate(HOSTILE)]
    samples += [answer(9, 0, False, data_source=HOSTILE[0], ground_truth=HOSTILE[1])]
    metrics = [line | {f"objective/reward/{HOSTILE[0]}": 1.0} for line in metrics_of(3)]
    run = make_run(metrics=metrics, rollouts=rows, samples=samples, run_name=HOSTILE[1])
    (text, page), (again, _) = report_of(run), report_of(run)
    nonce, other = (re.search(r'<script nonce="(\w{32})">', each)[1] for each in (text, again))
    assert nonce != other  # nobody can guess it
    # Nothing in the data can end its element
    before, _, rest = text.partition('<script type="application/json" id="data">')
    data, _, rest = rest.partition("</script>")
    assert "<" not in data
    assert before.count("<script") == 0 and rest.count("<script") == 1
    policy = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    assert policy == [POLICY.format(nonce)]
    assert [prompt for prompt, *_ in page["answers"]][:3] == HOSTILE[:3]
    ways = (
        r"(inner|outer)HTML|insertAdjacentHTML|document\.write|eval\(|Function\(|srcdoc|DOMParser"
    )
    assert not re.search(ways, (REPO / "scripts/internal/report_page/page.js").read_text())


WORDS = ["it's", "a b", "$HOME", "`ls`", 'a"b', "", "--chat_template={{x}}", "new\nline", "ä"]


def test_command_of_the_page_can_be_typed(make_run):
    made = {"command": ["python", *WORDS]}
    _, page = report_of(make_run(provenance=made))
    assert shlex.split(page["runs"][0]["command"]) == made["command"]
    assert report_of(make_run(provenance={}))[1]["runs"][0]["command"] == ""
    # The page shows it as it is
    assert (
        'make("pre", { tabIndex: 0 }, run.command)'
        in (REPO / "scripts/internal/report_page/page.js").read_text()
    )


def test_history_of_a_prompt_says_that_a_reward_failed(make_run):
    rows = [answer(1, 0, False, score=None, failure="Traceback\nValueError: no number")]
    _, page = report_of(make_run(samples=rows))
    (said,) = page["answers"][0][3][0]
    assert said["score"] is None and said["figures"].startswith(
        "score none, the reward failed: Val"
    )
    assert (
        'each.score ?? "none (the reward failed)"'
        in (REPO / "scripts/internal/report_page/page.js").read_text()
    )
