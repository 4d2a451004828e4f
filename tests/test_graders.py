"""The rules that say whether an answer is right: ppo_sync.py's and scripts/rewards/graders.py's."""

from concurrent.futures import ThreadPoolExecutor

import graders
import pytest

import ppo_sync
from ppo_sync import Args


@pytest.mark.parametrize(
    ("response", "truth", "score"),
    [
        ("so 9 * 8 = 72\n#### 72", "72", 1),
        ("####72", "72", 1),
        ("#### $72", "72", 1),
        ("#### 72.", "72", 1),
        ("#### 72.00", "72", 1),
        ("#### 1,000", "1000", 1),
        ("#### 1000", "1,000", 1),
        ("#### $1,234,567.50.", "1234567.5", 1),
        ("#### 72 apples", "72", 1),
        ("#### 70\nNo. #### 72", "72", 1),
        ("#### -5", "-5", 1),
        ("#### -$5", "-5", 1),
        ("#### 0.5", "0.5", 1),
        ("#### .5", "0.5", 1),
        ("#### 7.2", "72", 0),
        ("#### 72", "73", 0),
        ("#### 5", "-5", 0),
        ("#### 720", "72", 0),
        ("72 is the answer #### 73", "72", 0),
        ("first 10, then 62, so 72", "72", 1),
        ("first 72, then 62", "72", 0),
        ("The answer is 72.", "72", 1),
        ("no number", "72", 0),
        ("", "72", 0),
        ("####", "72", 0),
        ("#### 72", 72, 1),
        ("#### 73", 72, 0),
        ("nan", "72", 0),
        ("#### infinity", "72", 0),
    ],
)
def test_gsm8k_grader(response, truth, score):
    assert ppo_sync.compute_score("openai/gsm8k", response, truth) == float(score)
    assert graders.compute_score("openai/gsm8k", response, truth) == float(score)


@pytest.mark.parametrize(
    ("response", "score"),
    [("12358", 1), ("12358\n", 1), ("1235", 0), ("123588", 0), ("53812", 0), ("", 0)],
)
def test_sorting_grader(response, score):
    assert ppo_sync.compute_score("debug/sorting", response, "12358") == float(score)
    assert graders.compute_score("debug/sorting", response, "12358") == float(score)


@pytest.mark.parametrize(
    ("truth", "response", "score"),
    [
        (r"\frac12", r"so it is \boxed{\frac{1}{2}}.", 1),
        (r"\frac12", "The answer is 1/2", 1),
        (r"\frac{1}{2}", "$0.5$", 1),
        (r"50\%", r"\boxed{50\%}", 1),
        (r"50\%", r"\boxed{0.5}", 1),
        (r"50\%", r"\boxed{50}", 1),
        (r"50\%", r"\boxed{5}", 0),
        (r"12.5\%", r"\boxed{12.5}", 1),
        (r"12.5\%", r"\boxed{12.5\%}", 1),
        (r"12.5\%", r"\boxed{1.25}", 0),
        ("5", r"$\boxed{5}$. So the final answer is 6.", 1),
        ("6", r"$\boxed{5}$. So the final answer is 6.", 0),
        ("x^2+1", r"\boxed{1+x^2}", 1),
        ("1,000", r"\boxed{1000}", 1),
        ("[2,5)", r"\boxed{[2,5)}", 1),
        ("[2,5)", r"\boxed{(2,5]}", 0),
        ("10", r"\boxed{9}, no: \boxed{10}", 1),
        ("10", r"\boxed{10}, no: \boxed{9}", 0),
        ("-1", r"\boxed{1}", 0),
        (r"\text{Evelyn}", r"\boxed{\text{Evelyn}}", 1),
        ("3", "I do not know", 0),
        ("3", "", 0),
        (r"\frac{3}{4}", r"\frac{3}{4}", 1),
        ("3", r"\boxed{", 0),
        ("?? qq ~~", r"\boxed{?? zz ~~}", 0),
    ],
)
def test_math_grader(truth, response, score):
    assert graders.compute_score("DigitalLearningGmbH/MATH-lighteval", response, truth) == float(
        score
    )


def test_math_grader_says_the_same_off_the_main_thread():
    with ThreadPoolExecutor(
        1
    ) as threads:  # where a library's signals do not work, and it scored everything 0
        call = threads.submit(
            graders.compute_score, "lighteval/MATH", r"\boxed{\frac{2}{4}}", "0.5"
        )
        assert call.result() == 1.0


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("#### 2", 1),
        ("#### (2)", 1),
        ("#### A plausible ending is (2)", 1),
        ("The answer is 2. A man would do this.", 1),
        ("(C)", 1),
        ("A man walks in and sits down.", 0),
        ("2", 1),
        ("C", 1),
        ("#### C", 1),
        ("Ending 1 is absurd. #### 2", 1),
        ("#### 2. Not 1", 1),
        ("I choose ending C.", 1),
        ("First 2, then 1", 0),
        ("#### 1", 0),
        ("#### 12", 0),
        ("B", 0),
        ("", 0),
    ],
)
def test_hellaswag_grader(response, score):
    assert graders.compute_score("Rowan/hellaswag", response, "2") == float(score)
    assert graders.compute_score("Rowan/hellaswag", response, 2) == float(score)


def test_article_is_no_letter_of_an_ending():
    assert graders.compute_score("Rowan/hellaswag", "A man walks in and sits down.", "0") == 0.0


def test_unknown_source_names_the_known_ones_and_the_way_out():
    with pytest.raises(NotImplementedError, match=r"no/such.*gsm8k.*math.*--reward_fn.*graders.py"):
        ppo_sync.compute_score("no/such", "1", "1")
    with pytest.raises(NotImplementedError, match=r"no/such.*gsm8k.*math.*--reward_fn"):
        graders.compute_score("no/such", "1", "1")


SCORED = [
    ("openai/gsm8k", "#### 1,000.", "1000", 1.0),
    ("openai/gsm8k", "no number", "1000", 0.0),
    ("lighteval/MATH", r"\boxed{\frac{2}{4}}", "0.5", 1.0),
    ("lighteval/MATH", r"$\boxed{5}$. So the final answer is 6.", "6", 0.0),
    ("Rowan/hellaswag", "#### (C)", "2", 1.0),
    ("Rowan/hellaswag", "#### A", "2", 0.0),
    ("debug/sorting", "12358", "12358", 1.0),
    ("debug/sorting", "53812", "12358", 0.0),
]


@pytest.mark.slow
def test_scores_in_a_worker_are_those_of_the_main_process():
    args = Args(reward_fn=f"{graders.__file__}:compute_score", reward_workers=2, reward_timeout=60)
    workers = ppo_sync.start_reward_workers(args)
    try:
        prompts = [
            ppo_sync.Prompt("", "", [], [], source, truth, extra_info=None)
            for source, _, truth, _ in SCORED
        ]
        responses = [response for _, response, _, _ in SCORED]
        scores = ppo_sync.call_workers(workers, prompts, responses)
        assert scores == [score for *_, score in SCORED]
    finally:
        for worker in workers:
            worker.stop()
    assert [graders.compute_score(*given) for *given, _ in SCORED] == [
        score for *_, score in SCORED
    ]
