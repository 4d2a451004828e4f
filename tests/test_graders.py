"""The rules that say whether an answer is right: the scripts' and scripts/rewards/graders.py's."""

from concurrent.futures import ThreadPoolExecutor

import graders
import pytest

import ppo_vllm_async

GSM8K, MATH, HELLASWAG = "openai/gsm8k", "DigitalLearningGmbH/MATH-lighteval", "Rowan/hellaswag"


# Those that the scripts know as well
@pytest.mark.parametrize("grader", [ppo_vllm_async, graders], ids=lambda module: module.__name__)
@pytest.mark.parametrize(
    ("source", "truth", "response", "score"),
    [
        (GSM8K, "72", "so 9 * 8 = 72\n#### 72", 1),
        (GSM8K, "72", "####72", 1),
        (GSM8K, "72", "#### $72", 1),
        (GSM8K, "72", "#### 72.", 1),
        (GSM8K, "72", "#### 72.00", 1),
        (GSM8K, "72", "#### 72 apples", 1),
        (GSM8K, "72", "#### 70\nNo. #### 72", 1),
        (GSM8K, "72", "first 10, then 62, so 72", 1),
        (GSM8K, 72, "The answer is 72.", 1),
        (GSM8K, "1000", "#### 1,000", 1),
        (GSM8K, "1,000", "#### 1000", 1),
        (GSM8K, "1234567.5", "#### $1,234,567.50.", 1),
        (GSM8K, "-5", "#### -$5", 1),
        (GSM8K, "0.5", "#### .5", 1),
        (GSM8K, "72", "#### 7.2", 0),
        (GSM8K, "72", "#### 720", 0),
        (GSM8K, "-5", "#### 5", 0),
        (GSM8K, "72", "72 is the answer #### 73", 0),
        (GSM8K, "72", "first 72, then 62", 0),
        (GSM8K, "72", "no number", 0),
        (GSM8K, "72", "", 0),
        (GSM8K, "72", "#### infinity", 0),
        ("debug/sorting", "12358", "12358\n", 1),
        ("debug/sorting", "12358", "1235", 0),
        ("debug/sorting", "12358", "53812", 0),
    ],
)
def test_numbers_and_sorting(grader, source, truth, response, score):
    assert grader.compute_score(source, response, truth) == float(score)


@pytest.mark.parametrize(
    ("truth", "response", "score"),
    [
        (r"\frac12", r"so it is \boxed{\frac{1}{2}}.", 1),
        (r"\frac12", "The answer is 1/2", 1),
        (r"\frac{1}{2}", "$0.5$", 1),
        (r"50\%", r"\boxed{0.5}", 1),
        (r"50\%", r"\boxed{50}", 1),
        (r"50\%", r"\boxed{5}", 0),
        ("5", r"$\boxed{5}$. So the final answer is 6.", 1),
        ("6", r"$\boxed{5}$. So the final answer is 6.", 0),
        ("10", r"\boxed{9}, no: \boxed{10}", 1),
        ("10", r"\boxed{10}, no: \boxed{9}", 0),
        ("x^2+1", r"\boxed{1+x^2}", 1),
        ("[2,5)", r"\boxed{[2,5)}", 1),
        ("[2,5)", r"\boxed{(2,5]}", 0),
        ("-1", r"\boxed{1}", 0),
        (r"\text{Evelyn}", r"\boxed{\text{Evelyn}}", 1),
        ("3", "I do not know", 0),
        ("3", r"\boxed{", 0),
    ],
)
def test_math(truth, response, score):
    assert graders.compute_score(MATH, response, truth) == float(score)


def test_math_is_graded_off_the_main_thread():
    # Where a library's signals do not work, and it scored everything 0
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(graders.compute_score, MATH, r"\boxed{\frac{2}{4}}", "0.5")
        assert call.result() == 1.0


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("#### 2", 1),
        ("#### A plausible ending is (2)", 1),
        ("The answer is 2. A man would do this.", 1),
        ("#### C", 1),
        ("Ending 1 is absurd. #### 2. Not 1", 1),
        ("I choose ending C.", 1),
        ("First 2, then 1", 0),
        ("#### 12", 0),
        ("B", 0),
        ("", 0),
    ],
)
def test_hellaswag(response, score):
    assert graders.compute_score(HELLASWAG, response, "2") == float(score)
    assert graders.compute_score(HELLASWAG, response, 2) == float(score)


def test_article_is_no_letter_of_an_ending():
    assert graders.compute_score(HELLASWAG, "A man walks in and sits down.", "0") == 0.0


@pytest.mark.parametrize("grader", [ppo_vllm_async, graders], ids=lambda module: module.__name__)
def test_unknown_source_names_the_known_ones_and_the_way_out(grader):
    with pytest.raises(NotImplementedError, match=r"no/such.*gsm8k.*math.*--reward_fn"):
        grader.compute_score("no/such", "1", "1")
