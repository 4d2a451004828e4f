"""Grade an answer to GSM8K in two ways: by the requested format, and by its number only.

    ppo_vllm_async.py --reward_fn scripts/rewards/gsm8k.py:strict ...

The strict grade is the score. Both grades are metrics, objective/reward/strict and
objective/reward/lenient, and in evaluations eval/reward/strict and eval/reward/lenient. Early in a
run, most of what a strict score gains is the format.
"""

import re

from graders import grade_gsm8k


def strict(data_source: str, response: str, ground_truth: str, extra_info: dict | None = None):
    """Return a dictionary with the strict grade as the score, and both grades.

    The strict grade is 1 if the number after the last "#### " (with the space), without thousands
    commas, is exactly the ground truth. (verl reads the first such number.)

    >>> strict("openai/gsm8k", "6 * 200 = 1,200. #### 1,200", "1200")
    {'score': 1.0, 'strict': 1.0, 'lenient': 1.0}
    >>> strict("openai/gsm8k", "The answer is 1200.", "1200")
    {'score': 0.0, 'strict': 0.0, 'lenient': 1.0}
    """
    numbers = re.findall(r"#### (-?[\d.,]+)", response)
    is_strict = float(bool(numbers) and numbers[-1].replace(",", "") == ground_truth)
    lenient = grade_gsm8k(response, ground_truth)
    return {"score": is_strict, "strict": is_strict, "lenient": lenient}
