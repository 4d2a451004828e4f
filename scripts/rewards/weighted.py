"""An example of several rewards: the score is their weighted sum, and each is a metric.

    grpo_vllm_async.py --reward_fn scripts/rewards/weighted.py:compute_score ...

Copy it and change REWARDS, say by `import judge` and "judge": (0.5, judge.compute_score). A weight
of 0 shows a reward without training on it. Where one reward fails the score is not known, so the
response has none.

An answer counts as right (objective/verifiable_correct_rate) where `right` is 1, whatever the sum;
without a reward of that name, where the sum is 1 or more.
"""

import math

import graders

LENGTH = 256  # tokens, at which an answer has lost all that it gets for being short


def short(data_source: str, response: str, ground_truth: str, extra_info: dict) -> float:
    """1 for an answer of no tokens, 0 from LENGTH tokens on, and a line between.

    >>> short("openai/gsm8k", "#### 4", "4", {"num_tokens": 64})
    0.75
    """
    return max(0.0, 1 - extra_info["num_tokens"] / LENGTH)


def marked(data_source: str, response: str, ground_truth: str, extra_info: dict) -> float:
    """1 if the answer stands after one "####"."""
    return float(response.count("####") == 1)


REWARDS = {  # name: (weight, function)
    "right": (1.0, graders.compute_score),
    "short": (0.1, short),
    "marked": (0.05, marked),
}


def compute_score(data_source: str, response: str, ground_truth: str, extra_info: dict) -> dict:
    """The weighted sum as `score`, and each reward, without its weight, under its name.

    >>> compute_score("openai/gsm8k", "2 + 2 = 4. #### 4", "4", {"num_tokens": 128})
    {'right': 1.0, 'short': 0.5, 'marked': 1.0, 'score': 1.1}
    """
    given = (data_source, response, ground_truth, extra_info)
    rewards = {name: reward(*given) for name, (_, reward) in REWARDS.items()}
    # Of 0.7, 0.2 and 0.1 sum() would make less than 1
    score = math.fsum(weight * rewards[name] for name, (weight, _) in REWARDS.items())
    return rewards | {"score": score}
