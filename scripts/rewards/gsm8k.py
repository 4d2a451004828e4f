"""Two readings of an answer to GSM8K: by the form that was asked for, and by its number alone.

    ppo_vllm_async.py --reward_fn scripts/rewards/gsm8k.py:strict ...

The first is the score, both are metrics: objective/reward/strict and objective/reward/lenient, and
the same of evaluations. Early in a run most of what a strict score gains is the form.
"""

import re

from graders import grade_gsm8k


def strict(data_source: str, response: str, ground_truth: str, extra_info: dict | None = None):
    """A dictionary with the strict grade as its score, and both grades.

    Strict: the number after the last "#### ", a space between them, without thousands commas, is
    the ground truth letter for letter. (verl takes the first such number.)

    >>> strict("openai/gsm8k", "6 * 200 = 1,200. #### 1,200", "1200")
    {'score': 1.0, 'strict': 1.0, 'lenient': 1.0}
    >>> strict("openai/gsm8k", "The answer is 1200.", "1200")
    {'score': 0.0, 'strict': 0.0, 'lenient': 1.0}
    """
    numbers = re.findall(r"#### (-?[\d.,]+)", response)
    is_strict = float(bool(numbers) and numbers[-1].replace(",", "") == ground_truth)
    lenient = grade_gsm8k(response, ground_truth)
    return {"score": is_strict, "strict": is_strict, "lenient": lenient}
