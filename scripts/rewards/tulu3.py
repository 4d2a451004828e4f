"""Reward the constraints of Tulu 3's last stage, one per prompt.

    ppo_vllm_async.py --reward_fn scripts/rewards/graders.py:compute_score ...

grades this whole stage, including GSM8K and MATH, and calls this file for examples of `ifeval`.
Their ground truth is JSON with a function of open-instruct and its parameters, such as
{"func_name": "validate_end", "end_phrase": "That is all."}. The table below has these functions. If
IFEval has the same constraint, if_constraints.py checks it, which differs from open-instruct's
functions in details (bold text, empty paragraphs).
"""

import json
import re
from typing import Any

import if_constraints as ifeval
from graders import compute_score  # noqa: F401  because earlier runs name it in this file


def quantity(count: int, truth: dict, tolerance: int) -> bool:
    """Return whether a count is at least, at most or around N, by the ground truth's quantifier."""
    wanted = truth["N"]
    return {
        "at least": count >= wanted,
        "at most": count <= wanted,
        "around": abs(count - wanted) <= tolerance,
    }[truth["quantifier"]]


def tenth(truth: dict) -> int:
    """Return a tenth of N, but at least 1."""
    return max(1, round(truth["N"] / 10))


IFEVAL = ifeval.CONSTRAINTS
RULES = {
    "verify_keywords": lambda text, t: IFEVAL["keywords:existence"](text, t["keyword_list"]),
    "verify_keyword_frequency": lambda text, t: (
        re.findall(r"\w+", text.lower()).count(t["word"].lower()) == t["N"]
    ),
    "validate_forbidden_words": lambda text, t: ifeval.avoids_words(text, t["forbidden_words"]),
    "verify_letter_frequency": lambda text, t: text.count(t["letter"]) == t["N"],
    "validate_response_language": lambda text, t: ifeval.is_in_language(text, t["language"]),
    "verify_paragraph_count": lambda text, t: ifeval.number_paragraphs(
        text.replace("* * *", "***"), t["N"]
    ),
    "validate_word_constraint": lambda text, t: quantity(len(text.split()), t, tenth(t)),
    "verify_sentence_constraint": lambda text, t: quantity(
        len(ifeval.SENTENCES.tokenize(text)), t, 1
    ),
    "validate_paragraphs": lambda text, t: ifeval.nth_paragraph_first_word(
        text, t["N"], t["i"], t["first_word"]
    ),
    "verify_postscript": lambda text, t: ifeval.has_postscript(text, t["postscript_marker"]),
    "validate_placeholders": lambda text, t: IFEVAL["detectable_content:number_placeholders"](
        text, t["N"]
    ),
    "verify_bullet_points": lambda text, t: ifeval.number_bullets(text, t["N"]),
    "validate_title": lambda text, t: IFEVAL["detectable_format:title"](text),
    "validate_choice": lambda text, t: any(option in text for option in t["options"]),
    "validate_highlighted_sections": lambda text, t: ifeval.number_highlights(text, t["N"]),
    "validate_sections": lambda text, t: ifeval.number_sections(
        text, t["section_splitter"], t["N"]
    ),
    "validate_json_format": lambda text, t: ifeval.is_json(text),
    "validate_repeat_prompt": lambda text, t: IFEVAL["combination:repeat_prompt"](
        text, t["original_prompt"]
    ),
    "validate_two_responses": lambda text, t: ifeval.gives_two_responses(text),
    "validate_uppercase": lambda text, t: text == text.upper(),
    "validate_lowercase": lambda text, t: text == text.lower(),
    "validate_frequency_capital_words": lambda text, t: quantity(
        len(re.findall(r"\b[A-Z]+\b", text)), t, tenth(t)
    ),
    "validate_end": lambda text, t: IFEVAL["startend:end_checker"](text, t["end_phrase"]),
    "validate_quotation": lambda text, t: ifeval.is_quoted(text),
    "validate_no_commas": lambda text, t: "," not in text,
}


def grade_constraint(response: str, ground_truth: Any) -> float:
    """Return 1.0 if the constraint is met, else 0.0. An empty response meets none.

    Raise ValueError if the ground truth does not name a constraint.

    >>> truth = '{"func_name": "validate_word_constraint", "N": 10, "quantifier": "around"}'
    >>> grade_constraint("Nine words are near enough to ten of them.", truth)
    1.0
    >>> grade_constraint("Four are too few.", truth)
    0.0
    """
    truth = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
    name = truth.get("func_name") if isinstance(truth, dict) else None
    if name not in RULES:
        raise ValueError(f"{name!r} is not one of {', '.join(RULES)}: {str(ground_truth)[:200]}")
    return float(bool(response.strip()) and RULES[name](response.strip(), truth))
