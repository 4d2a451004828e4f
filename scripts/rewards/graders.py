r"""Rewards by rule: a row is graded as its `data_source` says.

    accelerate launch --config_file scripts/accelerate/one_gpu.yaml ppo_vllm_async.py \
        --reward_fn scripts/rewards/graders.py:compute_score ...

`compute_score` knows GSM8K, MATH, HellaSwag, code, constraints and the debug task. The files beside
this one that run code and check constraints are imported when a row needs them. Sorting and GSM8K
are in the scripts as well, in the same words; MATH needs math-verify, and HellaSwag's answers take
some reading.
"""

import importlib
import re
from decimal import Decimal
from types import ModuleType
from typing import Any

# A part of a data source says what grades it, in small letters: names as verl, open-instruct and
# the hub have them. The first kind that fits counts
CODE = (
    r"mbpp|human_?eval|codecontests|codeforces|livecodebench"
    r"|(?<![a-z])(?:code|apps|taco)(?![a-z])"
)
CONSTRAINTS = r"ifeval|if_multi_constraints|^instructions$"
MATH = r"math|aime|numina|(?<![a-z])amc(?![a-z])"
# Of each of six questions to math-verify, which counts whole seconds. Their sum is less than
# --reward_timeout
MATH_SECONDS = 1
# A number, with all that would make it another one: 1/2, 12:30, 3-5, 10^2, 1e6, 1 1/2, 1{,}200
NUMBER = re.compile(r"[-\u2212]?\$?\.?\d(?:(?:[.,:/^*{}\\\u2013\u2212-]+|[eE][-+]?|[^\S\n])?\d)*")


def read_number(text: str) -> Decimal | None:
    """A number such as -$1,200.50 as a Decimal; None: it is none as a whole."""
    text = text.replace("\u2212", "-")  # the minus of mathematics
    if re.fullmatch(r"-?\$?(\d{1,3}(,\d{3})+|\d+|(?=\.\d))(\.\d+)?", text):
        return Decimal(re.sub(r"[$,]", "", text))
    return None


def grade_gsm8k(response: str, ground_truth: str) -> float:
    """1.0 if the first number after the last "####", or else the last one, is the ground truth.

    >>> grade_gsm8k("6 * 200 is 1,200. #### $1,200.", "1200")
    1.0
    """
    truth = read_number("".join(str(ground_truth).split()).rstrip("."))
    if truth is None:
        raise ValueError(f"the ground truth is {ground_truth!r}, and must be a number")
    _, mark, end = response.rpartition("####")
    answers = NUMBER.findall(response)[-1:]
    if mark:
        answers = NUMBER.findall(end)[:1] or answers
    return float(bool(answers) and read_number(answers[0]) == truth)


def grade_hellaswag(response: str, ground_truth: str | int) -> float:
    """1.0 where the response names the right ending, by its index or by its letter.

    What counts is the first answer after the last "####", else the last answer. A letter needs a
    full stop, a colon or a bracket behind it, or the end of the response: an "A" may be an article.

    >>> grade_hellaswag("Ending 1 is absurd. #### (2)", "2"), grade_hellaswag("I choose C.", 2)
    (1.0, 1.0)
    """
    answer = r"\b(?:[0-3]|[A-D](?=[.):]|\W*$))\b"
    if "####" in response:
        answers = re.findall(answer, response.rpartition("####")[2])[:1]
    else:
        answers = re.findall(answer, response)
    letter = "ABCD"[int(ground_truth)]
    return float(bool(answers) and answers[-1] in (str(ground_truth), letter))


def grade_math(response: str, ground_truth: str) -> float:
    """1.0 where math-verify finds the last box, else the last formula or number, equal to it.

    12.5 is right where the truth is 12.5\\%, and so is 0.125. An answer that takes longer than
    MATH_SECONDS to read or to compare is wrong, as 9^{9^{9}} is. The limits are signals: where they
    do not work, in a thread, math-verify raises.

    >>> grade_math(r"so it is $\\boxed{\\frac{1}{2}}$", "0.5")
    1.0
    """
    import math_verify

    extraction = [
        math_verify.LatexExtractionConfig(boxed_match_priority=0),
        math_verify.ExprExtractionConfig(),
    ]

    def parse(text: str) -> list:
        return math_verify.parse(text, extraction_config=extraction, parsing_timeout=MATH_SECONDS)

    def equal(truth: str, answer: str) -> bool:
        return math_verify.verify(parse(truth), parse(answer), timeout_seconds=MATH_SECONDS)

    last_box = max(0, response.rfind("\\boxed"))  # the whole response where there is no box
    texts = (f"\\boxed{{{ground_truth}}}", response[last_box:])
    without_percent = tuple(text.replace("\\%", "") for text in texts)
    is_right = equal(*texts) or (without_percent != texts and equal(*without_percent))
    return float(is_right)


def import_neighbour(name: str, data_source: str) -> ModuleType:
    """A file beside this one. NotImplementedError: it needs what this machine does not have."""
    try:
        return importlib.import_module(name)
    except RuntimeError as error:
        raise NotImplementedError(f"{data_source!r} cannot be graded here: {error}") from None


def compute_score(
    data_source: str, response: str, ground_truth: Any, extra_info: dict | None = None
) -> float:
    """The verifiable reward of a response: 1.0 when right, a share of test cases or constraints.

    NotImplementedError: an unknown data source, or one that needs what this machine does not have.
    ValueError: a ground truth that is none.
    """
    source = str(data_source).lower()
    if source == "debug/sorting":
        return float(response.strip() == ground_truth.strip())
    if "gsm8k" in source:
        return grade_gsm8k(response, ground_truth)
    if "hellaswag" in source:
        return grade_hellaswag(response, ground_truth)
    if re.search(CODE, source):
        sandbox = import_neighbour("code_sandbox", data_source)
        return sandbox.compute_score(data_source, response, ground_truth)
    if re.search(CONSTRAINTS, source):
        if "func_name" in str(ground_truth):  # Tulu 3's rows have the tag ifeval as well
            return import_neighbour("tulu3", data_source).grade_constraint(response, ground_truth)
        constraints = import_neighbour("if_constraints", data_source)
        return constraints.compute_score(data_source, response, ground_truth)
    if re.search(MATH, source):
        return grade_math(response, ground_truth)
    raise NotImplementedError(
        f"{data_source!r} is no debug/sorting, *gsm8k*, *hellaswag*, code (*mbpp*, *humaneval*, "
        f"apps, taco, code, ...), constraints (*ifeval*, instructions, ...) or *math* (*aime*, "
        f"*numina*, ...): write a function for --reward_fn"
    )
