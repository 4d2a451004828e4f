r"""Grade responses by the rule for their `data_source`.

    accelerate launch --config_file scripts/accelerate/one_gpu.yaml ppo_vllm_async.py \
        --reward_fn scripts/rewards/graders.py:compute_score ...

`compute_score` grades GSM8K, MATH, HellaSwag, code, constraints and the debug task. It imports the
files beside this one that run code and check constraints only if an example needs them. The scripts
contain the same code for sorting and GSM8K. MATH needs math-verify.
"""

import contextlib
import importlib
import json
import re
from decimal import Decimal
from itertools import accumulate
from types import ModuleType
from typing import Any

# Names of data sources in lower case, as used by verl, open-instruct, Skywork and the Hub. Of
# owner/name the name is matched, and then the owner, if it is exactly one of these. A star stands
# for anything that does not begin with a letter. docs/rewards.md has the same list
NAMES = {
    "hellaswag": "hellaswag*",
    "code": "code code_stdio apps taco taco-verified mbpp* mbppplus* humaneval* human_eval* "
    "humanevalplus* openai_humaneval codecontests* code_contests* codeforces* livecodebench* "
    "train-code*",
    "constraints": "ifeval* if_multi_constraints* instructions",
    "math": "math* aime* amc* numina* numinamath* hendrycks_math* minerva_math minervamath "
    "big-math* dapo-math* deepmath* omni-math* openr1-math* openmathreasoning train-math* "
    "aimo-validation*",
}
# The limit for each of six calls of math-verify, which counts whole seconds. Their sum is less than
# --reward_timeout
MATH_SECONDS = 1
LETTERS = r"(?:[\s({$]|\\(?:text|math)[a-z]*)*([A-J])"  # a choice, with what can precede it
# A box without an answer
EMPTY = r"\\boxed\{(?:[\s{$~?.]|\\[,;:! ]|\\(?:text|math)[a-z]*|\\[lc]?dots|\\q?quad)*\}"
# A number with everything that would change its value: 1/2, 12:30, 3-5, 10^2, 1e6, 1 1/2, 1{,}200
NUMBER = re.compile(r"[-\u2212]?\$?\.?\d(?:(?:[.,:/^*{}\\\u2013\u2212-]+|[eE][-+]?|[^\S\n])?\d)*")


def read_number(text: str) -> Decimal | None:
    """Return a number such as -$1,200.50 as a Decimal, or None if the text is not one number."""
    text = text.replace("\u2212", "-")  # the mathematical minus sign
    if re.fullmatch(r"-?\$?(\d{1,3}(,\d{3})+|\d+|(?=\.\d))(\.\d+)?", text):
        return Decimal(re.sub(r"[$,]", "", text))
    return None


def grade_gsm8k(response: str, ground_truth: str) -> float:
    """Return 1.0 if the first number after the last "####", else the last one, is the ground truth.

    >>> grade_gsm8k("6 * 200 is 1,200. #### $1,200.", "1200")
    1.0
    """
    truth = read_number("".join(str(ground_truth).split()).rstrip("."))
    if truth is None:
        raise ValueError(f"the ground truth must be a number, but it is {ground_truth!r}")
    _, mark, end = response.rpartition("####")
    answers = NUMBER.findall(response)[-1:]
    if mark:
        answers = NUMBER.findall(end)[:1] or answers
    return float(bool(answers) and read_number(answers[0]) == truth)


def grade_hellaswag(response: str, ground_truth: str | int) -> float:
    """Return 1.0 if the response names the correct ending, by its index or by its letter.

    The first answer after the last "####" counts, else the last answer. A letter must be followed
    by a full stop, a colon, a bracket or the end of the response, because "A" can be an article.

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


def answer_of(response: str) -> str:
    """Return what follows the thinking of a response, or nothing if the thinking does not end."""
    return response.rpartition("</think>")[2].partition("<think>")[0]


def read_truths(ground_truth: Any) -> list[str]:
    r"""Return the ground truths of an example of MATH, one of which an answer must equal.

    A list of texts has several. Stars and similar marks around them are Markdown. Raise ValueError
    if there are none.

    >>> read_truths("**4**"), read_truths('["1,2"]'), read_truths("[2, 5]")
    (['4'], ['1,2'], ['[2, 5]'])
    """
    truths = ground_truth
    if isinstance(truths, str):
        with contextlib.suppress(ValueError):
            truths = json.loads(truths)
        # A list of anything else is a formula, because [2, 5] is an interval
        if not (isinstance(truths, list) and all(isinstance(truth, str) for truth in truths)):
            truths = ground_truth
    truths = truths if isinstance(truths, list) else [truths]
    truths = [str(truth).strip("*_` \n") for truth in truths if truth is not None]
    if not all(truths) or not truths:
        raise ValueError(f"the ground truth must be formulas, but it is {ground_truth!r}")
    return truths


def is_choice(box: str, truth: str) -> bool:
    r"""Return whether the truth is a letter, and a box begins with it and names no other letter.

    >>> boxes = (r"\boxed{\text{(C) } 5}", r"\boxed{C. A cat}", r"\boxed{C. or D.}", r"\boxed{C-5}")
    >>> [is_choice(box, "C") for box in boxes]
    [True, True, False, False]
    """
    letter = re.fullmatch(LETTERS + r"[\s)}.:$]*", truth)
    named = re.match(r"\\boxed\{" + LETTERS + r"\s*[).:}]", box)
    if not letter or not named:
        return False
    depths = [*accumulate((each == "{") - (each == "}") for each in box)]
    end = depths.index(0, 7) if 0 in depths[7:] else len(box)
    # "A cat" and "I am" do not name a letter
    letters = re.findall(r"(?<![A-Za-z\\])(?![AI]\s+[a-z])[A-J](?![A-Za-z])", box[7:end])
    return {*letters, named[1]} == {letter[1]}


def grade_math(response: str, ground_truth: Any) -> float:
    """Return 1.0 if the last box, else the last formula or number, equals the ground truth.

    math-verify compares them. Empty boxes are ignored, and `\\fbox` is a box as well. A letter
    before an answer, as in C. 5, is correct if the truth is a letter. If the truth is 12.5\\%, both
    12.5 and 0.125 are correct. An answer that takes longer than MATH_SECONDS to read or to compare,
    such as 9^{9^{9}}, is incorrect. These limits are signals. In a thread signals do not work, and
    math-verify raises. Raise ValueError for a truth that math-verify cannot read.

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
        gold = parse(truth)
        if not gold:
            raise ValueError(f"math-verify cannot read the ground truth {ground_truth!r}")
        return math_verify.verify(gold, parse(answer), timeout_seconds=MATH_SECONDS)

    text = re.sub(r"\\(?:boxed|fbox|framebox)\s*\{", r"\\boxed{", answer_of(response))
    text = re.sub(EMPTY, "", text)
    answer = text[max(0, text.rfind("\\boxed")) :]  # the whole text if there is no box
    for truth in read_truths(ground_truth):
        texts = (f"\\boxed{{{truth}}}", answer)
        without_percent = tuple(text.replace("\\%", "") for text in texts)
        is_right = is_choice(answer, truth) or equal(*texts)
        if is_right or (without_percent != texts and equal(*without_percent)):
            return 1.0
    return 0.0


def kind_of(data_source: str) -> str | None:
    """Return the kind of rule for a data source, or None if it is not known.

    >>> [kind_of(name) for name in ("my/AIME_2024", "math/own", "claimed_facts", "aimed")]
    ['math', 'math', None, None]
    """
    *owner, name = str(data_source).lower().split("/")
    if "gsm8k" in name:  # anywhere in the name, as in the scripts
        return "gsm8k"
    for kind, names in NAMES.items():
        stars = re.escape(names).replace(r"\*", "(?:[^a-z].*)?")
        if re.fullmatch(stars.replace(r"\ ", "|"), name, re.DOTALL):
            return kind
    for kind, names in NAMES.items():
        if owner and owner[0] in names.replace("*", "").split():
            return kind
    return None


def import_neighbour(name: str, data_source: str) -> ModuleType:
    """Import a file beside this one. Raise NotImplementedError if what it needs is missing."""
    try:
        return importlib.import_module(name)
    except RuntimeError as error:
        raise NotImplementedError(f"{data_source!r} cannot be graded here: {error}") from None


def compute_score(
    data_source: str, response: str, ground_truth: Any, extra_info: dict | None = None
) -> float:
    """Return the verifiable reward: 1.0 if correct, or the fraction of test cases or constraints.

    Raise NotImplementedError for an unknown data source, or if something that it needs is missing,
    and ValueError for a ground truth that is not valid.
    """
    if str(data_source).lower() == "debug/sorting":
        return float(response.strip() == ground_truth.strip())
    kind, response = kind_of(data_source), answer_of(response)
    if kind == "gsm8k":
        return grade_gsm8k(response, ground_truth)
    if kind == "hellaswag":
        return grade_hellaswag(response, ground_truth)
    if kind == "code":
        sandbox = import_neighbour("code_sandbox", data_source)
        return sandbox.compute_score(data_source, response, ground_truth)
    if kind == "constraints":
        if "func_name" in str(ground_truth):  # Tulu 3's examples also have the source ifeval
            return import_neighbour("tulu3", data_source).grade_constraint(response, ground_truth)
        constraints = import_neighbour("if_constraints", data_source)
        return constraints.compute_score(data_source, response, ground_truth)
    if kind == "math":
        return grade_math(response, ground_truth)
    known = "; ".join(f"{kind}: {names}" for kind, names in NAMES.items())
    raise NotImplementedError(
        f"{data_source!r} is not debug/sorting or *gsm8k*, and none of these names ({known}); "
        f"rename the source, or write a function for --reward_fn"
    )
