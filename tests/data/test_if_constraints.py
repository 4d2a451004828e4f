"""scripts/rewards/if_constraints.py and tulu3.py: which responses follow which instructions."""

import functools
import json
import random
import re
import time

import if_constraints
import pytest
import tulu3

# Each constraint with its parameters, responses that meet it (+) and others (-)
EXAMPLES = r"""
keywords:existence {"keywords": ["cat", "C++"]}
+ Cats like c++.
- Cats like C.
keywords:frequency {"keyword": "sun", "frequency": 2, "relation": "at least"}
+ Sun, sunny.
- The sun. The moon.
keywords:forbidden_words {"forbidden_words": ["bus", "C++", ".NET ", "e.g."]}
+ C, C+ and C++17 on the Internet of busy ones. | ASP.NET, e.g.x
- The BUS, then. | In C++ | Use .NET, then. | This, e.g. that
keywords:letter_frequency {"letter": "Z", "let_frequency": 3, "let_relation": "at least"}
+ Zigzags, pizza.
- A zoo.
language:response_language {"language": "de"}
+ Das ist ein ganz gewöhnlicher deutscher Satz. | 123
- This is quite an ordinary English sentence.
length_constraints:number_sentences {"num_sentences": 3, "relation": "less than"}
+ Dr. Smith came, e.g. by bus. She left at 5.30 p.m. sharp! | One. Two
- One. Two! Three?
length_constraints:number_paragraphs {"num_paragraphs": 2}
+ One.\n***\nTwo. | ***\nOne.\n***\nTwo.\n***
- One.\n\nTwo. | One.\n***\n\n***\nTwo.
length_constraints:number_words {"num_words": 4, "relation": "at least"}
+ It's three words.
- Only three!
length_constraints:nth_paragraph_first_word {"num_paragraphs":2,"nth_paragraph":2,"first_word":"A"}
+ One.\n\na, two. | One.\n\n"A" two.\n\n
- A.\n\nTwo. | One.\n\nA.\n\nThree.
detectable_content:number_placeholders {"num_placeholders": 2}
+ [name], [street] 1
- [name]
detectable_content:postscript {"postscript_marker": "P.S."}
+ Bye.\np. s. One more.
- Bye. PS: no.
detectable_format:number_bullet_lists {"num_bullets": 2}
+ * a\n- b
- * a\n* b\n* c | ** a\n* b
detectable_format:constrained_response {}
+ Well. My answer is maybe.
- My answer is perhaps.
detectable_format:number_highlighted_sections {"num_highlights": 2}
+ *One* and **two**.
- *One* | * * and ** **
detectable_format:multiple_sections {"section_spliter": "SECTION", "num_sections": 2}
+ SECTION 1\nA\nSECTION 2\nB
- SECTION 1\nA\nSection 2\nB | SECTION A\nSECTION B
detectable_format:json_format {}
+ {"a": [1]} | ```json\n{"a": 1}\n```
- Here: {"a": 1}
detectable_format:title {}
+ <<Storm>>\nIt rained.
- <Storm> | << >> | <<Sto\nrm>>
combination:two_responses {}
+ ****** A ****** B
- A ****** A | A ****** B ****** C
combination:repeat_prompt {"prompt_to_repeat": "Say why."}
+ say why. Because.
- Because. Say why.
startend:end_checker {"end_phrase": "That is all."}
+ "Yes. That is ALL."
- That is all. Bye.
startend:quotation {}
+ "Yes."
- "Yes. | "
change_case:capital_word_frequency {"capital_frequency": 2, "capital_relation": "at least"}
+ COVID-19 is BAD.
- COVID-19 is Bad.
change_case:english_capital {}
+ THE WEATHER WAS FINE AND THE CHILDREN WERE PLAYING IN THE GARDEN.
- This is quite an ordinary sentence. | DAS IST EIN GANZ NORMALER SATZ.
change_case:english_lowercase {}
+ this is quite an ordinary sentence.
- This is quite an ordinary sentence. | das ist ein ganz normaler satz.
punctuation:no_comma {}
+ Yes and no.
- Yes, and no.
"""


def examples():
    """(constraint, parameters, response, whether it meets it)"""
    lines = EXAMPLES.strip().splitlines()
    for heading, right, wrong in zip(lines[::3], lines[1::3], lines[2::3], strict=True):
        name, parameters = heading.split(" ", 1)
        for line in (right, wrong):
            for response in line[2:].replace("\\n", "\n").split(" | "):
                yield name, json.loads(parameters), response, line is right


def test_constraint_is_met_by_the_right_responses_only():
    wrong = []
    for name, parameters, response, meets in examples():
        truth = {"instruction_id_list": [name], "kwargs": [parameters]}
        # IFEval: saying nothing follows no instruction, "no commas" included
        scores = [if_constraints.compute_score("ifeval", text, truth) for text in (response, " \n")]
        wrong += [(name, response)] if scores != [meets, 0] else []
    assert wrong == []
    assert {name for name, *_ in examples()} == set(if_constraints.CONSTRAINTS)


# What the constraints count, by expressions that look again at text which they have read
SLOW = (
    lambda text: len(re.findall(r"\[.*?\]", text)),
    lambda text: len(re.findall(r"(?m)^\s*\*[^\*].*$", text) + re.findall(r"(?m)^\s*-.*$", text)),
    lambda text: sum(
        bool(one.lstrip("<").rstrip(">").strip()) for one in re.findall(r"<<[^\n]+>>", text)
    ),
)
ALL = if_constraints.CONSTRAINTS


def test_counts_are_those_of_the_simple_expressions():
    drawn = random.Random(0)
    parts = ["[", "]", "<", ">", "<<", ">>", "*", "-", "\n", " ", "\r", "\u3000", "a"]
    for _ in range(4000):
        text = "".join(drawn.choices(parts, k=drawn.randrange(14)))
        placeholders, bullets, titles = (count(text) for count in SLOW)
        found = ALL["detectable_content:number_placeholders"]
        assert [found(text, placeholders + more) for more in (0, 1)] == [True, False], text
        assert ALL["detectable_format:number_bullet_lists"](text, bullets), text
        assert ALL["detectable_format:title"](text) == bool(titles), text


def degenerate_texts(length):
    """Yield texts of a beginning, one part again and again, and an end."""
    parts = ["[", "[a ", "<", "<<", "<<>", "*", "* ", "**", "-", "- ", "\n", " \n", "\n*", " "]
    parts += [". ", "a ", "a.", "A ", '"', "'", "{", "p.", "``", "(", ",", "\u3000", "```\n"]
    for part in parts:
        yield f'"a.{part * (length // len(part))}x'


def test_time_of_each_constraint_is_linear_in_the_text():
    """Eight times the text takes less than 24 times as long: quadratic would be 64."""

    def seconds(function, text):
        start = time.process_time()
        function(text)
        return time.process_time() - start

    slow = []
    for name, parameters in {name: parameters for name, parameters, *_ in examples()}.items():
        check = functools.partial(ALL[name], **parameters)
        for short, long in zip(degenerate_texts(3000), degenerate_texts(24_000), strict=True):
            # Below a millisecond a clock says nothing. A process beside this one may slow down one
            # measurement of three
            ratios = (seconds(check, long) / max(0.001, seconds(check, short)) for _ in range(3))
            slow += [(name, short[:8])] if all(ratio > 24 for ratio in ratios) else []
    assert slow == []


def test_score_is_the_share_of_the_constraints_in_every_form_of_the_ground_truth():
    names = ["punctuation:no_comma", "startend:quotation", "length_constraints:number_words"]
    # With all parameters of all constraints, as rows come from the hub, or 3.0, as from pandas
    kwargs = [{"num_words": None}, None, {"num_words": 3.0, "relation": "at least", "letter": None}]
    ifeval = {"instruction_id_list": names, "kwargs": kwargs}
    open_instruct = [{"instruction_id": names, "kwargs": kwargs}]
    for truth in (ifeval, json.dumps(ifeval), str(open_instruct)):
        assert if_constraints.compute_score("ifeval", "Three words here.", truth) == 2 / 3


@pytest.mark.parametrize(
    ("names", "kwargs", "message"),
    [
        (["keywords:rhyme"], [{}], "'keywords:rhyme'; known are change_case:capital"),
        (["keywords:existence"], [{}], "keywords:existence with {}: .*'keywords'"),
        ([], [], "ground_truth must be"),
    ],
)
def test_ground_truth_that_cannot_be_checked_is_an_error(names, kwargs, message):
    truth = {"instruction_id_list": names, "kwargs": kwargs}
    with pytest.raises(ValueError, match=message):
        if_constraints.compute_score("ifeval", "Some text.", truth)


# A function of open-instruct, its parameters, a response that meets them, and one that does not
OF_TULU3 = [
    ("verify_keywords", {"keyword_list": ["sea", "salt"]}, "Sea and salt.", "Sea."),
    ("verify_keyword_frequency", {"word": "sea", "N": 2}, "sea, Sea seas", "sea"),
    ("validate_forbidden_words", {"forbidden_words": ["sea"]}, "A season.", "The sea."),
    ("verify_letter_frequency", {"letter": "a", "N": 2}, "banA a", "banana"),
    ("validate_response_language", {"language": "en"}, "This is an English text.", "Das ist es."),
    ("verify_paragraph_count", {"N": 2}, "One.\n* * *\nTwo.", "One.\n\nTwo."),
    ("validate_word_constraint", {"N": 3, "quantifier": "at most"}, "one two", "1 2 3 4"),
    ("verify_sentence_constraint", {"N": 3, "quantifier": "around"}, "One. Two.", "One."),
    ("validate_paragraphs", {"N": 2, "i": 2, "first_word": "So"}, "A.\n\nSo.", "So.\n\nA."),
    ("verify_postscript", {"postscript_marker": "P.S."}, "Yes.\nP.S. No.", "Yes."),
    ("validate_placeholders", {"N": 2}, "[name], [town]", "[name]"),
    ("verify_bullet_points", {"N": 2}, "* one\n- two", "* one\n* two\n* three"),
    ("validate_title", {}, "<<Sea>> It is salty.", "Sea"),
    ("validate_choice", {"options": ["yes", "no"]}, "I say yes.", "Perhaps."),
    ("validate_highlighted_sections", {"N": 1}, "*this*", "this"),
    ("validate_sections", {"N": 2, "section_splitter": "Part"}, "Part 1 a Part 2 b", "Part 1 a"),
    ("validate_json_format", {}, '{"a": 1}', "a: 1"),
    ("validate_repeat_prompt", {"original_prompt": "Why?"}, "Why? Because.", "Because."),
    ("validate_two_responses", {}, "One ****** two", "One"),
    ("validate_uppercase", {}, "ALL OF IT", "Some of IT"),
    ("validate_lowercase", {}, "all of it", "Some of it"),
    ("validate_frequency_capital_words", {"N": 2, "quantifier": "at least"}, "AN ODD one", "AN"),
    ("validate_end", {"end_phrase": "That is all."}, "Yes. That is all.", "That is all. Yes."),
    ("validate_quotation", {}, '"Yes."', "Yes."),
    ("validate_no_commas", {}, "Yes and no", "Yes, and no"),
]


def test_constraints_of_tulu3_are_met_by_the_right_responses_only():
    wrong = []
    for name, parameters, good, bad in OF_TULU3:
        truth = json.dumps({"func_name": name, "N": None} | parameters)
        scores = [tulu3.compute_score("ifeval", text, truth) for text in (good, bad, "")]
        wrong += [(name, scores)] if scores != [1, 0, 0] else []
    assert wrong == []
    assert {name for name, *_ in OF_TULU3} == set(tulu3.RULES)
    assert tulu3.compute_score("gsm8k", "So the answer is 42.", "42") == 1.0
