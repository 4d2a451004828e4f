"""Reward following instructions that a program can check.

    ppo_vllm_async.py --reward_fn scripts/rewards/if_constraints.py:compute_score ...

The reward is the fraction of an example's constraints that a response meets.

There are the 25 kinds of IFEval (arXiv 2311.07911), with its names and parameters. `ground_truth`
has IFEval's two columns, as JSON or not. Parameters that are null count as missing, as in the Hub's
rows. It can also be a list of open-instruct's IF_multi_constraints, as JSON, as Python's text or
not, but kinds that are not IFEval's are an error:

    {"instruction_id_list": ["punctuation:no_comma", ...], "kwargs": [{}, ...]}
    [{"instruction_id": ["punctuation:no_comma", ...], "kwargs": [null, ...]}]

The rules are those of IFEval's strict accuracy, including its quirks. An empty response meets
nothing. Bold text counts as highlighted. A text whose language cannot be detected counts as being
in the requested language, and a short text in capitals is often detected as another language. This
file differs from IFEval in three ways. Keywords, markers and separators are plain text (in IFEval
they are regular expressions, so "C++" fails), and forbidden words can begin or end with a symbol. A
missing parameter is an error (IFEval draws it at random). Sentences are split by NLTK's Punkt rules
with the list of abbreviations below, instead of a trained model that must be downloaded.

It needs `pip install langdetect==1.0.9 nltk==3.10.4`.
"""

import ast
import contextlib
import json
import re
from typing import Any

try:
    import langdetect
    from nltk.tokenize import NLTKWordTokenizer
    from nltk.tokenize.punkt import PunktParameters, PunktSentenceTokenizer
except ImportError as error:
    raise RuntimeError(f"{error}: pip install langdetect==1.0.9 nltk==3.10.4") from None

langdetect.DetectorFactory.seed = 0  # without a seed, the result for a text is random
RULES = PunktParameters()
ABBREVIATIONS = """
    a.d a.m al apr assn ave b.c b.s aug blvd capt cf co col corp ct d.c dec dept dr e.g est etc feb
    fig ft gen gov hon i.e inc jan jr l.a lt ltd m.d messrs mr mrs ms mt n.y nov oct p.m p.s ph.d
    prof rep rev sen sep sept sgt sr st u.k u.n u.s u.s.a vol vs
"""
RULES.abbrev_types = set(ABBREVIATIONS.split())
SENTENCES, WORDS = PunktSentenceTokenizer(RULES), NLTKWordTokenizer()


def compute_score(
    data_source: str, response: str, ground_truth: Any, *, extra_info: Any = None
) -> float:
    """Return the fraction of the constraints that a response meets.

    Raise ValueError for a ground truth that cannot be checked.

    >>> truth = {
    ...     "instruction_id_list": ["punctuation:no_comma", "startend:quotation"],
    ...     "kwargs": [{}, {}],
    ... }
    >>> compute_score("ifeval", "No commas here.", truth)
    0.5
    """
    followed = []
    for name, parameters in parse_ground_truth(ground_truth):
        if name not in CONSTRAINTS:
            known = ", ".join(sorted(CONSTRAINTS))
            raise ValueError(f"unknown constraint {name!r}; known are {known}")
        given = {key: value for key, value in (parameters or {}).items() if value is not None}
        # In a column with nulls, integers can have become floats such as 3.0
        given |= {key: int(value) for key, value in given.items() if isinstance(value, float)}
        try:
            followed.append(CONSTRAINTS[name](response, **given) and bool(response.strip()))
        except TypeError as error:
            raise ValueError(f"{name} with {given}: {error}") from error
    return sum(followed) / len(followed)


def parse_ground_truth(ground_truth: Any) -> list[tuple[str, dict | None]]:
    """Return (name, parameters) of each constraint."""
    truth = ground_truth
    if isinstance(truth, str):
        try:
            truth = json.loads(truth)
        except json.JSONDecodeError:
            with contextlib.suppress(ValueError, SyntaxError):
                truth = ast.literal_eval(truth)
    if isinstance(truth, list) and len(truth) == 1:
        return parse_ground_truth(truth[0])
    truth = truth if isinstance(truth, dict) else {}
    names = truth.get("instruction_id_list") or truth.get("instruction_id")
    if not names or "kwargs" not in truth:
        forms = "{instruction_id_list, kwargs} or [{instruction_id, kwargs}], with a constraint"
        raise ValueError(f"ground_truth must be {forms}, but it is {str(ground_truth)[:200]}")
    return list(zip(names, truth["kwargs"], strict=True))


def compare(count: int, relation: str, limit: int) -> bool:
    if relation not in ("less than", "at least"):
        raise ValueError(f"a relation must be 'less than' or 'at least', not {relation!r}")
    return count < limit if relation == "less than" else count >= limit


def is_in_language(text: str, language: str) -> bool:
    try:
        return langdetect.detect(text) == language
    except langdetect.LangDetectException:
        return True


# ------------------------------------------------------------------------------------- constraints
# Each takes linear time for any text. A response whose reward takes longer than --reward_timeout
# has no score, so a policy that repeats "[" would never learn that this is incorrect. Therefore no
# expression may read the same text again from a later start.


def avoids_words(text: str, forbidden_words: list[str]) -> bool:
    # \b would not do, because it would require a letter after the last plus of "C++"
    words = [rf"(?<!\w){re.escape(word.strip())}(?!\w)" for word in forbidden_words]
    return not any(re.search(word, text, re.IGNORECASE) for word in words)


def number_paragraphs(text: str, num_paragraphs: int) -> bool:
    """Count paragraphs between dividers of three asterisks. There must be text between dividers."""
    filled = [bool(part.strip()) for part in re.split(r"\s?\*\*\*\s?", text)]
    return all(filled[1:-1]) and sum(filled) == num_paragraphs


def nth_paragraph_first_word(
    text: str, num_paragraphs: int, nth_paragraph: int, first_word: str
) -> bool:
    """Check a word of paragraphs between blank lines. Empty ones have a number but do not count."""
    paragraphs = [paragraph.strip() for paragraph in text.split("\n\n")]
    count = sum(bool(paragraph) for paragraph in paragraphs)
    if nth_paragraph > count or not paragraphs[nth_paragraph - 1]:
        return False
    word = paragraphs[nth_paragraph - 1].split()[0].lstrip("'").lstrip('"')
    return count == num_paragraphs and re.split(r"[.,?!'\"]", word)[0].lower() == first_word.lower()


def has_postscript(text: str, postscript_marker: str) -> bool:
    marker = postscript_marker.strip()
    spellings = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}
    return bool(re.search(spellings.get(marker, re.escape(marker.lower())), text.lower()))


def number_bullets(text: str, num_bullets: int) -> bool:
    """Count lines that start with one asterisk or a dash."""
    asterisks = re.findall(r"^[^\S\n]*\*[^\*].*$", text, re.MULTILINE)
    dashes = re.findall(r"^[^\S\n]*-.*$", text, re.MULTILINE)
    return len(asterisks + dashes) == num_bullets


def number_highlights(text: str, num_highlights: int) -> bool:
    single = [part.strip("*") for part in re.findall(r"\*[^\n\*]*\*", text)]
    double = [part[2:-2] for part in re.findall(r"\*\*[^\n\*]*\*\*", text)]
    return sum(bool(part.strip()) for part in single + double) >= num_highlights


def number_sections(text: str, section_spliter: str, num_sections: int) -> bool:
    heading = rf"\s?{re.escape(section_spliter.strip())}\s?\d+\s?"
    return len(re.findall(heading, text)) >= num_sections


def has_title(text: str) -> bool:
    """Find text in double angular brackets, from the first to the last brackets of a line."""
    for line in text.split("\n"):
        start, end = line.find("<<"), line.rfind(">>")
        if 0 <= start < end - 2 and line[start:end].lstrip("<").rstrip(">").strip():
            return True
    return False


def is_json(text: str) -> bool:
    text = re.sub(r"\A```(json|Json|JSON)?", "", text.strip()).removesuffix("```")
    try:
        json.loads(text.strip())
    except (ValueError, RecursionError):
        return False
    return True


def gives_two_responses(text: str) -> bool:
    parts = [part.strip() for part in text.split("******")]
    responses = [part for part in parts if part]
    return all(parts[1:-1]) and len(responses) == 2 and responses[0] != responses[1]


def is_quoted(text: str) -> bool:
    text = text.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


CONSTRAINTS = {
    "keywords:existence": lambda text, keywords: all(
        keyword.lower() in text.lower() for keyword in keywords
    ),
    "keywords:frequency": lambda text, keyword, frequency, relation: compare(
        text.lower().count(keyword.strip().lower()), relation, frequency
    ),
    "keywords:forbidden_words": avoids_words,
    "keywords:letter_frequency": lambda text, letter, let_frequency, let_relation: compare(
        text.lower().count(letter.strip().lower()), let_relation, let_frequency
    ),
    "language:response_language": is_in_language,
    "length_constraints:number_sentences": lambda text, num_sentences, relation: compare(
        len(SENTENCES.tokenize(text)), relation, num_sentences
    ),
    "length_constraints:number_paragraphs": number_paragraphs,
    "length_constraints:number_words": lambda text, num_words, relation: compare(
        len(re.findall(r"\w+", text)), relation, num_words
    ),
    "length_constraints:nth_paragraph_first_word": nth_paragraph_first_word,
    "detectable_content:number_placeholders": lambda text, num_placeholders: (
        len(re.findall(r"\[[^][\n]*\]", text)) >= num_placeholders
    ),
    "detectable_content:postscript": has_postscript,
    "detectable_format:number_bullet_lists": number_bullets,
    "detectable_format:constrained_response": lambda text: any(
        f"My answer is {answer}." in text for answer in ("yes", "no", "maybe")
    ),
    "detectable_format:number_highlighted_sections": number_highlights,
    "detectable_format:multiple_sections": number_sections,
    "detectable_format:json_format": is_json,
    "detectable_format:title": has_title,
    "combination:two_responses": gives_two_responses,
    "combination:repeat_prompt": lambda text, prompt_to_repeat: (
        text.strip().lower().startswith(prompt_to_repeat.strip().lower())
    ),
    "startend:end_checker": lambda text, end_phrase: (
        text.strip().strip('"').lower().endswith(end_phrase.strip().lower())
    ),
    "startend:quotation": is_quoted,
    # Words are as NLTK splits them: COVID-19 is one, NASA's is two
    "change_case:capital_word_frequency": lambda text, capital_frequency, capital_relation: compare(
        sum(word.isupper() for word in WORDS.tokenize(text)), capital_relation, capital_frequency
    ),
    "change_case:english_capital": lambda text: text.isupper() and is_in_language(text, "en"),
    "change_case:english_lowercase": lambda text: text.islower() and is_in_language(text, "en"),
    "punctuation:no_comma": lambda text: "," not in text,
}
