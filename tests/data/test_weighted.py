"""scripts/rewards/weighted.py, as the script calls it: the sum is the score, each part a metric."""

import numpy as np
import pytest
import weighted
from helpers import REPO

import ppo_vllm_async as script

REWARD_FN = f"{REPO}/scripts/rewards/weighted.py:compute_score"
# A response to a question whose answer is 4, its tokens, its score and its metrics
RESPONSES = {
    "right": ("2 + 2 = 4. #### 4", 64, 1.125, {"right": 1.0, "short": 0.75, "marked": 1.0}),
    "right, and no more": ("It is 4", 999, 1.0, {"right": 1.0, "short": 0.0, "marked": 0.0}),
    "all but right": ("#### 5", 0, 0.15, {"right": 0.0, "short": 1.0, "marked": 1.0}),
    # A share of the code's tests, or of the constraints
    "right in part": ("#### 4", 0, 1.05, {"right": 0.9, "short": 1.0, "marked": 1.0}),
}


def respond(text, count, data_source="openai/gsm8k"):
    prompt = script.Prompt("row 0", "2 + 2?", [5], data_source, "4", None)
    return script.Response(prompt, np.zeros(count), np.zeros(count), stopped=True, text=text)


@pytest.mark.parametrize("name", RESPONSES)
def test_score_is_the_weighted_sum_and_each_reward_a_metric(name, monkeypatch):
    text, count, score, metrics = RESPONSES[name]
    rewards = weighted.REWARDS | {"right": (1.0, lambda *_: metrics["right"])}
    monkeypatch.setattr(weighted, "REWARDS", rewards)
    monkeypatch.setattr(script, "load_reward_fn", lambda _: weighted.compute_score)
    graded = script.call_reward_fn(REWARD_FN, respond(text, count))
    assert graded.failure is None
    assert (graded.verifiable, graded.reward_metrics) == (pytest.approx(score), metrics)
    rate = script.score_metrics("eval", [graded], script.Args())["eval/verifiable_correct_rate"]
    assert rate == (metrics["right"] == 1)


def test_response_of_which_one_reward_fails_has_no_score():
    graded = script.call_reward_fn(REWARD_FN, respond("4", 1, data_source="poems"))
    assert graded.verifiable is None and "NotImplementedError" in graded.failure


def test_sum_is_exact_and_no_reward_takes_its_place(monkeypatch):
    # In binary the plain sum of 0.7, 0.2 and 0.1 is less than 1
    rewards = {"a": (0.7, lambda *_: 1.0), "b": (0.2, lambda *_: 1.0)}
    monkeypatch.setattr(weighted, "REWARDS", rewards | {"score": (0.05, lambda *_: 2.0)})
    assert weighted.compute_score("", "", "", {})["score"] == 1.0
