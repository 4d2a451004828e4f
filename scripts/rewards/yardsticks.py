"""Reward the tasks for which others have published figures (scripts/train/README.md)."""

from difflib import SequenceMatcher

from graders import grade_math


def reverse_text(
    data_source: str, response: str, ground_truth: str, extra_info: dict | None = None
):
    """Return how similar the text between the tags is to the reversed one, as prime-rl does.

    >>> reverse_text("", "<reversed_text>cba</reversed_text>", "cba")
    1.0
    >>> reverse_text("", "<reversed_text>c</reversed_text>", "cba"), reverse_text("", "c", "c")
    (0.5, 0.0)
    """
    _, _, answer = response.partition("<reversed_text>")
    answer, mark, _ = answer.partition("</reversed_text>")
    return SequenceMatcher(None, answer.strip() if mark else "", ground_truth).ratio()


def sanity(data_source: str, response: str, ground_truth: str, extra_info=None) -> float:
    """Return 1.0 if thinking ends exactly once, and the last box after it is correct.

    >>> sanity("", r"It may be 2.</think> So \\boxed{3}", "3"), sanity("", r"\\boxed{3}", "3")
    (1.0, 0.0)
    """
    _, *answers = response.split("</think>")
    is_formatted = len(answers) == 1 and "\\boxed" in answers[0]
    return grade_math(answers[0], ground_truth) if is_formatted else 0.0
