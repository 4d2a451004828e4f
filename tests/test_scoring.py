"""From a response to its score."""

from concurrent.futures import Future

import pytest
import torch
from accelerate import Accelerator
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


class Workers:
    """A pool of none: what is scheduled is done at once."""

    def schedule(self, function, args, timeout):
        future = Future()
        try:
            future.set_result(function(*args))
        except Exception as error:
            future.set_exception(error)
        return future


def make_prompt(ground_truth="12", data_source="debug/sorting", extra_info=None, token_ids=()):
    return ppo_sync.Prompt(
        row="rows.jsonl, row 0",
        text="",
        token_ids=list(token_ids),
        reward_model_token_ids=list(token_ids),
        data_source=data_source,
        ground_truth=ground_truth,
        extra_info=extra_info,
    )


def score_responses(tokenizer, prompts, responses, args, reward_model=None):
    return ppo_sync.score_responses(
        Accelerator(cpu=True), reward_model, Workers(), tokenizer, prompts, responses, args
    )


def score(tokenizer, texts, truth="12", truths=None, reward_model=None, **options):
    """Scores texts; "." ends a response, which without it was cut."""
    end = tokenizer.eos_token_id
    responses = [tokenizer(t.rstrip("."))["input_ids"] + [end] * t.endswith(".") for t in texts]
    prompts = [make_prompt(truth) for truth in truths or [truth] * len(texts)]
    args = tiny_args(stop_token_ids=(end,), **options)
    return score_responses(tokenizer, prompts, responses, args, reward_model)


def test_verifiable_reward_counts_as_often_as_it_is_told(tokenizer):
    scored = score(tokenizer, ["12.", "21.", "12"], verification_reward=10.0)
    assert scored.scores == [10.0, 0.0, 10.0]
    assert scored.correct == [True, False, True]
    assert scored.texts == ["12", "21", "12"]


def test_penalty_takes_the_place_of_the_score_but_not_of_the_correct_rate(tokenizer):
    options = {"non_stop_penalty": True, "penalty_reward_value": -10.0}
    scored = score(tokenizer, ["12.", "12", "21", "21."], **options)
    assert scored.scores == [1.0, -10.0, -10.0, 0.0]
    assert scored.correct == [True, True, False, False]


def test_short_responses_are_penalized_and_the_stop_token_counts(tokenizer):
    options = {"non_stop_penalty": True, "penalty_reward_value": -3.0}
    assert score(tokenizer, ["12.", "1."], min_response_length=3, **options).scores == [1.0, -3.0]
    assert score(tokenizer, ["12."], min_response_length=4, **options).scores == [-3.0]
    assert score(tokenizer, ["12."], min_response_length=4, penalty_reward_value=-3.0).scores == [
        1.0
    ]


def test_format_reward_adds_to_the_verifiable_one(monkeypatch):
    class Words:
        """A tokenizer of whole texts: the debug one cannot write <think>."""

        def batch_decode(self, responses, skip_special_tokens):
            return [texts[ids[0]] for ids in responses]

    texts = [
        "<think>a\nb</think> <answer>1</answer>",
        "\n<think></think>\n<answer>1</answer>\n",
        "<answer>1</answer>",
        "<think>a</think><answer>1",
        "well: <think>a</think><answer>1</answer>",
        "<think>a</think><answer>1</answer> or so",
    ]
    prompts = [make_prompt("t")] * len(texts)
    args = tiny_args(
        add_r1_style_format_reward=True, r1_style_format_reward=0.5, verification_reward=2.0
    )
    responses = [[i, STOP] for i in range(len(texts))]
    monkeypatch.setattr(ppo_sync, "compute_score", lambda *_: 1.0)
    scored = score_responses(Words(), prompts, responses, args)
    assert scored.scores == [2.5, 2.5, 2.0, 2.0, 2.0, 2.0]
    args.apply_verifiable_reward = False
    scored = score_responses(Words(), prompts, responses, args)
    assert scored.scores == [0.5, 0.5, 0.0, 0.0, 0.0, 0.0]


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
    assert (scored.scores, scored.correct) == ([1.0, 0.0], [True, None])


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


def test_rewards_add_up_and_the_penalty_replaces_them_all(tokenizer, monkeypatch):
    monkeypatch.setattr(ppo_sync, "reward_model_scores", lambda *_: [0.5, 0.25, 0.125])
    model = {"reward_model": "a model"}
    options = model | {"reward_model_multiplier": 2.0, "verification_reward": 4.0}
    assert score(tokenizer, ["12.", "21.", "12"], **options).scores == [5.0, 0.5, 4.25]
    penalty = {"non_stop_penalty": True, "penalty_reward_value": -3.0}
    assert score(tokenizer, ["12.", "21.", "12"], **options, **penalty).scores == [5.0, 0.5, -3.0]
    scored = score(tokenizer, ["12.", "21.", "12."], apply_verifiable_reward=False, **model)
    assert (scored.scores, scored.correct) == ([0.5, 0.25, 0.125], [True, False, True])


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
