"""From a response to its score."""

import contextlib
import signal
import sys

import numpy
import pytest
import torch
from accelerate import Accelerator
from helpers.files import write_text
from helpers.rollouts import PAD, STOP, make_rollout, tiny_args, tiny_classifier
from transformers import AutoTokenizer

import ppo_sync

# --------------------------------------------------------------------------- the end of a response


@pytest.mark.parametrize(
    ("sampled", "stop_ids", "response"),
    [
        ([5, 6, 1], (1,), [5, 6, 1]),
        ([5, 1, 6, 1], (1,), [5, 1]),  # what follows the first stop token was never said
        ([1, 1, 1], (1,), [1]),
        ([5, 6, 7], (1,), [5, 6, 7]),  # cut at response_length
        ([5, 2, 1], (1, 2), [5, 2]),  # any of several
        ([0, 5, 1], (1,), [0, 5, 1]),  # a pad token that was sampled is a token like others
        ([1], (1,), [1]),
    ],
)
def test_responses_end_with_their_first_stop_token(sampled, stop_ids, response):
    truncated = ppo_sync.truncate_response(sampled, stop_ids)
    assert truncated == response
    # The score stands on the last token of the response, which is the stop token where there is
    # one.
    _, mask = ppo_sync.collate([[9]], [truncated], pad_token_id=0, device="cpu")
    last = int(mask[0].nonzero().max())
    assert last == len(response) - 1
    assert (truncated[last] in stop_ids) == any(token in stop_ids for token in sampled)


# ------------------------------------------------------------------------------------------ scores


@pytest.fixture(scope="module")
def tokenizer(assets):
    return AutoTokenizer.from_pretrained(assets / "model")


class Worker:
    """Calls the reward function of its args in this process."""

    def __init__(self, args):
        self.args = args

    def score(self, prompt, text):
        try:
            return ppo_sync.verifiable_reward(self.args.reward_fn, prompt, text)
        except Exception as error:
            raise RuntimeError(ppo_sync.describe_error(error, self.args.reward_fn)) from None


def make_prompt(
    ground_truth="12", data_source="debug/sorting", extra_info=None, token_ids=(), row=0, text=""
):
    return ppo_sync.Prompt(
        row=f"rows.jsonl, row {row}",
        text=text,
        token_ids=list(token_ids),
        reward_model_token_ids=list(token_ids),
        data_source=data_source,
        ground_truth=ground_truth,
        extra_info=extra_info,
    )


def score_responses(tokenizer, prompts, responses, args, reward_model=None):
    logprobs = [[-1.0] * len(response) for response in responses]
    answers = ppo_sync.grade_answers([Worker(args)], tokenizer, prompts, responses, logprobs, args)
    assert (answers.responses, answers.sampler_logprobs) == (responses, logprobs)
    return ppo_sync.score_answers(Accelerator(cpu=True), reward_model, prompts, answers, args)


def score(tokenizer, texts, truth="12", truths=None, reward_model=None, **options):
    """Scores texts; "." ends a response, which without it was cut."""
    end = tokenizer.eos_token_id
    responses = [tokenizer(t.rstrip("."))["input_ids"] + [end] * t.endswith(".") for t in texts]
    truths = truths or [truth] * len(texts)
    prompts = [make_prompt(truth, row=row) for row, truth in enumerate(truths)]
    args = tiny_args(stop_token_ids=(end,), **options)
    return score_responses(tokenizer, prompts, responses, args, reward_model)


def test_verifiable_reward_counts_as_often_as_it_is_told(tokenizer):
    scored = score(tokenizer, ["12.", "21.", "12"], verification_reward=10.0)
    assert scored.scores == [10.0, 0.0, 10.0]
    assert scored.verifiable == [1.0, 0.0, 1.0]
    assert scored.texts == ["12", "21", "12"]


def test_penalty_takes_the_place_of_the_score_but_not_of_the_correct_rate(tokenizer):
    options = {"non_stop_penalty": True, "penalty_reward_value": -10.0}
    scored = score(tokenizer, ["12.", "12", "21", "21."], **options)
    assert scored.scores == [1.0, -10.0, -10.0, 0.0]
    assert scored.verifiable == [1.0, 1.0, 0.0, 0.0]
    assert scored.penalized == [False, True, True, False]


def test_short_responses_are_penalized_and_the_stop_token_counts(tokenizer):
    options = {"non_stop_penalty": True, "penalty_reward_value": -3.0}
    assert score(tokenizer, ["12.", "1."], min_response_length=3, **options).scores == [1.0, -3.0]
    assert score(tokenizer, ["12."], min_response_length=4, **options).scores == [-3.0]
    assert score(tokenizer, ["12."], min_response_length=4, penalty_reward_value=-3.0).scores == [
        1.0
    ]


THINKS = [
    "<think>a\nb</think> <answer>1</answer>",
    "\n<think></think>\n<answer>1</answer>\n",
    "<think>1 < 2, and <b>bold</b></think><answer></answer>",
]
DOES_NOT_THINK = [
    "",
    "<answer>1</answer>",
    "<think>a</think><answer>1",
    "well: <think>a</think><answer>1</answer>",
    "<think>a</think><answer>1</answer> or so",
    "<think>a</think> so <answer>1</answer>",
    "<think>a</think> junk <think>b</think><answer>1</answer>",  # a lazy `.*?` reads on over junk
    "<think>a</think><answer>1</answer> junk <answer>2</answer>",
    "<think>a</think><answer>1</answer><think>a</think><answer>1</answer>",
    "<think><think>a</think></think><answer>1</answer>",
    "<think>a <answer>0</answer></think><answer>1</answer>",
    "<think>a</think><answer><answer>1</answer></answer>",
    "<think>a</think><answer><think>b</think>1</answer>",
    "<answer>1</answer><think>a</think>",
    "<think>a</think></think><answer>1</answer>",
]


@pytest.mark.parametrize("text", THINKS)
def test_format_is_one_thought_and_one_answer(text):
    assert ppo_sync.has_r1_format("1 + 1?", text)


@pytest.mark.parametrize("text", DOES_NOT_THINK)
def test_format_is_not_read_into_text_outside_its_tags(text):
    assert not ppo_sync.has_r1_format("1 + 1?", text)


@pytest.mark.parametrize("end", ["<think>", "<think>\n", "<think>\n\n "])
def test_prompt_may_have_opened_the_thought(end):
    rest = "a</think><answer>1</answer>"
    assert ppo_sync.has_r1_format(f"1 + 1? {end}", rest)
    assert not ppo_sync.has_r1_format(f"1 + 1? {end}", f"<think>{rest}")
    assert not ppo_sync.has_r1_format("Write <think> first. 1 + 1?", rest)
    assert not ppo_sync.has_r1_format(f"1 + 1? {end}", "a</think>b</think><answer>1</answer>")


@contextlib.contextmanager
def limit(seconds):
    """TimeoutError where something would never end."""

    def stop(*_):
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


LONG = 300_000


@pytest.mark.parametrize(
    "text",
    [
        "<think>" + "a" * LONG,
        "<think>" * LONG,
        "<think>" + "</think><answer>" * LONG,
        "<think>" + "</think> <answer>" * LONG + "</answer>",
        "<think>a</think>" + " " * LONG + "<answer>1</answer>" + " " * LONG + "x",
        " " * LONG + "x",
        "<" * LONG,
    ],
    ids=lambda text: text[:30],
)
def test_format_of_a_long_response_is_no_hang(text):
    # A search that starts again at each tag would take hours
    with limit(60):
        assert not ppo_sync.has_r1_format("1 + 1?", text)


class Texts:
    """A tokenizer of whole texts, for what the debug one cannot write; ids are the texts' own."""

    def __init__(self, texts):
        self.texts = texts

    def batch_decode(self, responses, skip_special_tokens):
        return [self.texts[ids[0]] for ids in responses]


def score_texts(texts, prompts, args):
    responses = [[i, STOP] for i in range(len(texts))]
    return score_responses(Texts(texts), prompts, responses, args)


def test_format_reward_adds_to_the_verifiable_one(monkeypatch):
    texts = [*THINKS[:2], *DOES_NOT_THINK[:2]]
    prompts = [make_prompt("t")] * len(texts)
    args = tiny_args(
        add_r1_style_format_reward=True, r1_style_format_reward=0.5, verification_reward=2.0
    )
    monkeypatch.setattr(ppo_sync, "compute_score", lambda *_: 1.0)
    scored = score_texts(texts, prompts, args)
    assert scored.scores == [2.5, 2.5, 2.0, 2.0]
    assert scored.formats == [True, True, False, False]
    args.apply_verifiable_reward = False
    assert score_texts(texts, prompts, args).scores == [0.5, 0.5, 0.0, 0.0]
    # The prompt of each response is its own
    prompts[0] = make_prompt("t", text="1 + 1? <think>")
    assert score_texts(texts, prompts, args).formats == [False, True, False, False]


def test_ids_above_the_tokenizers_vocabulary_are_decoded(tokenizer):
    one = tokenizer("1")["input_ids"]
    beyond = [len(tokenizer) + 3]
    args = tiny_args(stop_token_ids=(tokenizer.eos_token_id,))
    scored = score_responses(tokenizer, [make_prompt("1")], [one + beyond], args)
    assert scored.texts == ["1"]


def test_reward_function_gets_the_text_and_what_belongs_to_it(tokenizer, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def f(source, text, truth, extra_info):\n    return extra_info['bonus'] * 2\n")
    prompt = make_prompt("1", data_source="any", extra_info={"bonus": 3})
    one = tokenizer("1")["input_ids"]
    scored = score_responses(tokenizer, [prompt], [one], tiny_args(reward_fn=f"{path}:f"))
    assert scored.scores == [6.0]


def test_row_without_ground_truth_is_neither_right_nor_wrong(tokenizer):
    scored = score(tokenizer, ["12.", "12."], truths=["12", None])
    assert (scored.scores, scored.verifiable) == ([1.0, 0.0], [1.0, None])
    assert scored.failures == [None, None]


@pytest.mark.parametrize("pad", [PAD, STOP], ids=["pad", "pad is the stop token"])
def test_reward_model_is_read_at_the_last_token_by_length(accelerator, pad):
    # By looking for the pad token, as transformers does, it would be read before a stop token that
    # also pads.
    model, batch = tiny_classifier(seed=3).eval(), make_rollout()
    prompts = [make_prompt(token_ids=prompt) for prompt in batch.prompt_ids]
    expected = []
    for prompt, response in zip(batch.prompt_ids, batch.responses, strict=True):
        with torch.no_grad():
            hidden = model.base_model(torch.tensor([prompt + response])).last_hidden_state[0, -1]
            expected.append(model.score(hidden).item())
    args = tiny_args(pad_token_id=pad, local_rollout_forward_batch_size=3)
    found = ppo_sync.reward_model_scores(accelerator, model, prompts, batch.responses, args)
    assert found == pytest.approx(expected, abs=1e-5)
    assert len({round(score, 3) for score in found}) == len(prompts)


@pytest.mark.parametrize("reward", [numpy.bool_(True), numpy.float32(1), torch.tensor(1.0)])
def test_scalars_of_numpy_and_torch_are_numbers(reward, monkeypatch):
    monkeypatch.setattr(ppo_sync, "compute_score", lambda *_: reward)
    score = ppo_sync.verifiable_reward(None, make_prompt(), "1")
    assert (type(score), score) == (float, 1.0)


def test_reward_model_without_a_finite_score_stops_the_run(accelerator):
    # In a group it would be mistaken for equal scores, whose advantages are zero.
    model, batch = tiny_classifier(seed=3).eval(), make_rollout()
    model.score.weight.data.fill_(float("nan"))
    prompts = [make_prompt(token_ids=prompt) for prompt in batch.prompt_ids]
    with pytest.raises(FloatingPointError, match="reward model"):
        ppo_sync.reward_model_scores(accelerator, model, prompts, batch.responses, tiny_args())


def test_rewards_add_up_and_the_penalty_replaces_them_all(tokenizer, monkeypatch):
    monkeypatch.setattr(ppo_sync, "reward_model_scores", lambda *_: [0.5, 0.25, 0.125])
    model = {"reward_model": "a model"}
    options = model | {"reward_model_multiplier": 2.0, "verification_reward": 4.0}
    assert score(tokenizer, ["12.", "21.", "12"], **options).scores == [5.0, 0.5, 4.25]
    penalty = {"non_stop_penalty": True, "penalty_reward_value": -3.0}
    assert score(tokenizer, ["12.", "21.", "12"], **options, **penalty).scores == [5.0, 0.5, -3.0]
    scored = score(tokenizer, ["12.", "21.", "12."], apply_verifiable_reward=False, **model)
    assert (scored.scores, scored.verifiable) == ([0.5, 0.25, 0.125], [1.0, 0.0, 1.0])


# ------------------------------------------------------------------------------ rewards that fail

NO_ANSWER = """
def score(data_source, response, ground_truth, extra_info):
    if not response.startswith("1"):
        raise OSError("the grader is out of paper")
    return float(response == ground_truth)
"""


@pytest.fixture
def no_answer(tmp_path):
    return f"{write_text(tmp_path / 'mine.py', NO_ANSWER)}:score"


def test_failed_reward_is_no_wrong_answer(tokenizer, no_answer, capsys):
    scored = score(tokenizer, ["12.", "21.", "13.", "22."], reward_fn=no_answer)
    assert scored.scores == [1.0, None, 0.0, None]
    assert scored.verifiable == [1.0, None, 0.0, None]
    path = no_answer.removesuffix(":score")
    cause = f"OSError: the grader is out of paper ({path}, line 4)"
    assert [failure and cause in failure for failure in scored.failures] == [None, True, None, True]
    (line,) = capsys.readouterr().out.splitlines()
    for fragment in ("2 of 4", cause, "rows.jsonl, row 1"):
        assert fragment in line
    ppo_sync.check_scores(scored)


def test_other_rewards_do_not_stand_in_for_one_that_failed(tokenizer, no_answer, monkeypatch):
    monkeypatch.setattr(ppo_sync, "reward_model_scores", lambda *_: [0.5, 0.25])
    model = {"reward_model": "a model", "reward_fn": no_answer}
    assert score(tokenizer, ["12.", "21."], **model).scores == [1.5, None]
    scored = score(tokenizer, ["12.", "21."], apply_verifiable_reward=False, **model)
    assert scored.scores == [0.5, 0.25]  # it is only looked at


def test_penalty_is_known_whatever_failed(tokenizer, no_answer):
    options = {"non_stop_penalty": True, "penalty_reward_value": -3.0, "reward_fn": no_answer}
    scored = score(tokenizer, ["12.", "21", "21.", "12"], **options)
    assert scored.scores == [1.0, -3.0, None, -3.0]
    assert scored.penalized == [False, True, False, True]
    assert [cause is None for cause in scored.failures] == [True, False, False, True]


def test_failing_rule_of_the_script_costs_its_own_response(tokenizer, capsys):
    prompts = [make_prompt("12"), make_prompt("12", data_source="no/such", row=7)]
    args = tiny_args(stop_token_ids=(tokenizer.eos_token_id,))
    responses = [[*tokenizer("12")["input_ids"], tokenizer.eos_token_id]] * 2
    scored = score_responses(tokenizer, prompts, responses, args)
    assert scored.scores == [1.0, None]
    assert scored.failures[1].startswith("NotImplementedError: 'no/such'")
    assert "rows.jsonl, row 7" in capsys.readouterr().out


def test_batch_whose_rewards_all_failed_stops_the_run(tokenizer, no_answer):
    scored = score(tokenizer, ["21.", "22."], reward_fn=no_answer)
    with pytest.raises(RuntimeError, match="all 2 responses: OSError: the grader is out of paper"):
        ppo_sync.check_scores(scored)
    ppo_sync.check_scores(score(tokenizer, ["21.", "12."], reward_fn=no_answer))
    ppo_sync.check_scores(score(tokenizer, ["21.", "22."], truths=[None, None]))


@pytest.mark.parametrize("value", ["float('nan')", "float('inf')", "None", "'good'", "1j"])
def test_reward_is_a_finite_number_or_it_failed(value, tokenizer, tmp_path):
    path = write_text(tmp_path / "mine.py", f"def f(*_, extra_info):\n    return {value}\n")
    scored = score(tokenizer, ["12."], reward_fn=f"{path}:f")
    assert (scored.scores, scored.verifiable) == ([None], [None])
    assert "Error: " in scored.failures[0]


@pytest.fixture
def fresh_imports(monkeypatch):
    """What a reward file adds to the imports of this process goes with the test."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "reward_file", None)


WITH_NEIGHBOUR = """
from __future__ import annotations

from dataclasses import dataclass

from neighbour_of_a_reward import BONUS

@dataclass
class Grade:  # dataclasses look their module up by its name
    points: float
    notes: dict[str, int] | None = None

def score(data_source, response, ground_truth, extra_info):
    return Grade(BONUS).points
"""


def test_reward_file_is_a_module_among_its_neighbours(
    tokenizer, tmp_path, monkeypatch, fresh_imports
):
    write_text(tmp_path / "neighbour_of_a_reward.py", "BONUS = 4.0\n")
    write_text(tmp_path / "mine.py", WITH_NEIGHBOUR)
    monkeypatch.chdir(tmp_path)  # a path without a folder has neighbours too
    assert score(tokenizer, ["12."], reward_fn="mine.py:score").scores == [4.0]


TWO_FUNCTIONS = """
from os.path import join

def first(*_, extra_info):
    return 1.0

def second(*_, extra_info):
    return 2.0
"""


@pytest.mark.parametrize("name", ["", ":third", ":join.me"])
def test_reward_function_that_is_not_there_lists_those_that_are(name, tmp_path, fresh_imports):
    path = write_text(tmp_path / "mine.py", TWO_FUNCTIONS)
    with pytest.raises(ImportError) as error:
        ppo_sync.load_reward_fn(f"{path}{name}")
    assert str(error.value).endswith(f": {path}:first, {path}:second")


# ----------------------------------------------------------------------------------- their metrics


def test_metrics_of_several_sources_are_told_apart():
    prompts = [ppo_sync.Prompt("", "", [], [], name, "1", extra_info=None) for name in "abb"]
    assert ppo_sync.mean_by_source("m", prompts, [3.0, 0.0, 3.0]) == {
        "m": 2.0,
        "m/a": 3.0,
        "m/b": 1.5,
    }
    assert ppo_sync.mean_by_source("m", prompts[1:], [0.0, 3.0]) == {"m": 1.5}
    assert ppo_sync.mean_by_source("m", prompts, [None, 1.0, 2.0]) == {"m": 1.5}
    assert ppo_sync.mean_by_source("m", prompts, [None] * 3) == {}


def scores_of(**parts):
    """Scores of as many responses as the parts are long; the other parts are of no interest."""
    count = len(next(iter(parts.values())))
    empty = {"scores": 0.0, "texts": "", "verifiable": None, "model_scores": None}
    empty |= {"formats": False, "penalized": False, "failures": None}
    return ppo_sync.Scores(**{name: [value] * count for name, value in empty.items()} | parts)


def test_part_of_the_credit_is_not_right():
    """Nor is a failed call wrong."""
    scores = scores_of(
        scores=[1.0, 0.3, None, 2.0, 0.5],
        verifiable=[1.0, 0.3, None, 2.0, None],
        failures=[None, None, "OSError: out of paper", None, None],
    )
    prompts = [make_prompt()] * 5
    assert ppo_sync.score_metrics("objective", prompts, scores, tiny_args()) == {
        "objective/scores": pytest.approx(3.8 / 4),
        "objective/verifiable_score": pytest.approx(3.3 / 3),
        "objective/verifiable_correct_rate": pytest.approx(2 / 3),
        "objective/reward_failures": 1,
    }
    scores = scores_of(scores=[0.3] * 5, verifiable=[0.3] * 5)
    metrics = ppo_sync.score_metrics("eval", prompts, scores, tiny_args())
    assert metrics["eval/verifiable_correct_rate"] == 0
    assert metrics["eval/verifiable_score"] == pytest.approx(0.3)
    assert metrics["eval/reward_failures"] == 0


def test_parts_of_the_score_are_measured_where_they_are_on():
    scores = scores_of(formats=[True, False, True, True], penalized=[False, False, False, True])
    prompts = [make_prompt()] * 4
    found = {}
    for flags in ((), ("add_r1_style_format_reward",), ("non_stop_penalty",)):
        args = tiny_args(**dict.fromkeys(flags, True))
        metrics = ppo_sync.score_metrics("objective", prompts, scores, args)
        found[flags] = {name: metrics[name] for name in metrics if name.endswith("_rate")}
    assert found == {
        (): {},
        ("add_r1_style_format_reward",): {"objective/format_rate": 0.75},
        ("non_stop_penalty",): {"objective/penalty_rate": 0.25},
    }
    assert "objective/reward_model_score" not in metrics
    scores = scores_of(model_scores=[0.5, -1.0, 2.0, 0.5])
    metrics = ppo_sync.score_metrics("objective", prompts, scores, tiny_args())
    assert metrics["objective/reward_model_score"] == 0.5
