"""Rewards of tasks that others have published figures of (scripts/train/README.md)."""

from difflib import SequenceMatcher

from graders import grade_math


def reverse_text(
    data_source: str, response: str, ground_truth: str, extra_info: dict | None = None
):
    """How much of the text is there backwards, between its tags: difflib's ratio, as in prime-rl's.

    >>> reverse_text("", "<reversed_text>cba</reversed_text>", "cba")
    1.0
    >>> reverse_text("", "<reversed_text>c</reversed_text>", "cba"), reverse_text("", "c", "c")
    (0.5, 0.0)
    """
    _, _, answer = response.partition("<reversed_text>")
    answer, mark, _ = answer.partition("</reversed_text>")
    return SequenceMatcher(None, answer.strip() if mark else "", ground_truth).ratio()


def sanity(data_source: str, response: str, ground_truth: str, extra_info=None) -> float:
    """1.0 where the last box behind the one end of thinking is right, by math-verify.

    >>> sanity("", r"It may be 2.</think> So \\boxed{3}", "3"), sanity("", r"\\boxed{3}", "3")
    (1.0, 0.0)
    """
    _, *answers = response.split("</think>")
    is_formatted = len(answers) == 1 and "\\boxed" in answers[0]
    return grade_math(answers[0], ground_truth) if is_formatted else 0.0
