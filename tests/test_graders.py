"""The rules that say whether an answer is right: the scripts' and scripts/rewards/graders.py's."""

from concurrent.futures import ThreadPoolExecutor

import graders
import pytest

import ppo_vllm_async

# {(data source, ground truth): responses that are right, and others}
IN_THE_SCRIPTS = {
    ("openai/gsm8k", "72"): (
        [
            "so 9 * 8 = 72\n#### 72",
            "####72",
            "#### $72",
            "#### 72.",
            "#### 72.00",
            "#### 72 apples",
        ],
        ["#### 7.2", "#### 720", "72 is the answer #### 73", "first 72, then 62", "no number", ""],
    ),
    ("my_gsm8k", "72"): (["#### 70\nNo. #### 72", "first 10, so 72"], ["#### infinity"]),
    ("openai/gsm8k", 72): (["The answer is 72."], []),
    ("openai/gsm8k", "1,000"): (["#### 1000", "#### 1,000"], []),
    ("openai/gsm8k", "1000"): (["#### 1,000"], []),
    ("openai/gsm8k", "1234567.5"): (["#### $1,234,567.50."], []),
    ("openai/gsm8k", "-5"): (["#### -$5"], ["#### 5"]),
    ("openai/gsm8k", "0.5"): (["#### .5"], []),
    ("debug/sorting", "12358"): (["12358\n"], ["1235", "53812"]),
}
MATH, HELLASWAG = "DigitalLearningGmbH/MATH-lighteval", "Rowan/hellaswag"
ENDINGS = (
    ["#### 2", "#### An ending is (2)", "It is 2. A man would.", "#### C", "#### 1? #### 2"],
    ["First 2, then 1", "#### 12", "B", ""],
)
IN_GRADERS = {
    (MATH, r"\frac12"): ([r"so it is \boxed{\frac{1}{2}}.", "The answer is 1/2"], []),
    (MATH, r"\frac{1}{2}"): (["$0.5$"], []),
    (MATH, r"50\%"): ([r"\boxed{0.5}", r"\boxed{50}"], [r"\boxed{5}"]),
    (MATH, "5"): ([r"$\boxed{5}$. So the final answer is 6."], []),
    (MATH, "6"): ([], [r"$\boxed{5}$. So the final answer is 6."]),
    (MATH, "10"): ([r"\boxed{9}, no: \boxed{10}"], [r"\boxed{10}, no: \boxed{9}"]),
    (MATH, "x^2+1"): ([r"\boxed{1+x^2}"], []),
    (MATH, "[2,5)"): ([r"\boxed{[2,5)}"], [r"\boxed{(2,5]}"]),
    (MATH, r"\text{Evelyn}"): ([r"\boxed{\text{Evelyn}}"], []),
    (MATH, "3"): ([], ["I do not know", r"\boxed{", r"\boxed{-3}"]),
    (HELLASWAG, "2"): ENDINGS,
    (HELLASWAG, 2): ENDINGS,
    (HELLASWAG, "3"): (["Ending 1 is absurd. #### 3. Not 1"], []),
    (HELLASWAG, "0"): ([], ["A man walks in and sits down."]),  # an article is no letter
}
every_grader = pytest.mark.parametrize(
    "grader", [ppo_vllm_async, graders], ids=lambda module: module.__name__
)


def wrongly_graded(grader, case, answers):
    source, truth = case
    return [
        response
        for score, responses in zip((1.0, 0.0), answers, strict=True)
        for response in responses
        if grader.compute_score(source, response, truth) != score
    ]


@every_grader
@pytest.mark.parametrize("case", IN_THE_SCRIPTS, ids=str)
def test_numbers_and_sorting(grader, case):
    assert wrongly_graded(grader, case, IN_THE_SCRIPTS[case]) == []


@pytest.mark.parametrize("case", IN_GRADERS, ids=str)
def test_math_and_endings(case):
    # Off the main thread a library's signals do not work, and it scored everything 0
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(wrongly_graded, graders, case, IN_GRADERS[case]).result() == []


@every_grader
def test_unknown_source_names_the_known_ones_and_the_way_out(grader):
    with pytest.raises(NotImplementedError, match=r"no/such.*gsm8k.*math.*--reward_fn"):
        grader.compute_score("no/such", "1", "1")
