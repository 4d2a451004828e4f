import doctest
import json
import runpy
import sys

import pytest
from helpers import REPO

SCRIPT = REPO / "scripts" / "rewards" / "if_constraints.py"


@pytest.fixture(scope="module")
def score():
    return runpy.run_path(str(SCRIPT), run_name="reward_fn")["compute_score"]


# Name, parameters, responses that meet the constraint, responses that don't.
EXAMPLES = [
    ("keywords:existence", {"keywords": ["cat", "C++"]}, ["Cats like c++."], ["Cats like C."]),
    (
        "keywords:frequency",
        {"keyword": "sun", "frequency": 2, "relation": "at least"},
        ["Sun, sunny."],
        ["The sun. The moon."],
    ),
    (
        "keywords:frequency",
        {"keyword": "sun", "frequency": 2, "relation": "less than"},
        ["The sun."],
        ["Sun, sunny."],
    ),
    (
        "keywords:forbidden_words",
        {"forbidden_words": ["car", "bus"]},
        ["The carpet."],
        ["A car.", "The BUS, then."],
    ),
    (
        "keywords:forbidden_words",
        {"forbidden_words": ["C++", ".NET ", "e.g."]},
        ["C, C+ and C++17 on the Internet.", "ASP.NET, e.g.x"],
        ["I like C++.", "C++ and C.", "In C++", ".net", "Use .NET, then.", "This, e.g. that"],
    ),
    (
        "keywords:letter_frequency",
        {"letter": "Z", "let_frequency": 3, "let_relation": "at least"},
        ["Zigzags, pizza."],
        ["A zoo."],
    ),
    (
        "language:response_language",
        {"language": "de"},
        ["Das ist ein ganz gewöhnlicher deutscher Satz.", "123"],
        ["This is quite an ordinary English sentence."],
    ),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 3, "relation": "less than"},
        ["Dr. Smith came, e.g. by bus. She left at 5.30 p.m. sharp!", "One. Two"],
        ["One. Two! Three?"],
    ),
    (
        "length_constraints:number_paragraphs",
        {"num_paragraphs": 2},
        ["One.\n***\nTwo.", "***\nOne.\n***\nTwo.\n***"],
        ["One.\n\nTwo.", "One.\n***\n\n***\nTwo."],
    ),
    (
        "length_constraints:number_words",
        {"num_words": 4, "relation": "at least"},
        ["It's three words."],
        ["Only three!"],
    ),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Hello"},
        ["One.\n\nhello, two.", 'One.\n\n"Hello" two.\n\n'],
        ["Hello.\n\nTwo.", "One.\n\nHello.\n\nThree.", "Hello"],
    ),
    (
        "detectable_content:number_placeholders",
        {"num_placeholders": 2},
        ["[name], [street] 1"],
        ["[name]"],
    ),
    (
        "detectable_content:postscript",
        {"postscript_marker": "P.S."},
        ["Bye.\np. s. One more."],
        ["Bye. PS: no."],
    ),
    (
        "detectable_content:postscript",
        {"postscript_marker": "P.P.S"},
        ["Bye.\nP.P.S More."],
        ["P.S. No."],
    ),
    (
        "detectable_content:postscript",
        {"postscript_marker": "N.B."},
        ["Bye.\nN.b. this."],
        ["Bye. nxbx"],
    ),
    (
        "detectable_format:number_bullet_lists",
        {"num_bullets": 2},
        ["* a\n- b"],
        ["* a", "* a\n* b\n* c", "** a\n* b"],
    ),
    (
        "detectable_format:constrained_response",
        {},
        ["Well. My answer is maybe."],
        ["Maybe.", "My answer is perhaps."],
    ),
    (
        "detectable_format:number_highlighted_sections",
        {"num_highlights": 2},
        ["*One* and **two**."],
        ["*One*", "* * and ** **"],
    ),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "SECTION", "num_sections": 2},
        ["SECTION 1\nA\nSECTION 2\nB"],
        ["SECTION 1\nA\nSection 2\nB", "SECTION A\nSECTION B"],
    ),
    (
        "detectable_format:json_format",
        {},
        ['{"a": [1]}', '```json\n{"a": 1}\n```'],
        ["{a: 1}", 'Here: {"a": 1}'],
    ),
    ("detectable_format:title", {}, ["<<Storm>>\nIt rained."], ["<Storm>", "<< >>", "<<Sto\nrm>>"]),
    (
        "combination:two_responses",
        {},
        ["A ****** B", "****** A ****** B"],
        ["A", "A ****** A", "A ****** B ****** C"],
    ),
    (
        "combination:repeat_prompt",
        {"prompt_to_repeat": "Say why."},
        ["say why. Because."],
        ["Because. Say why."],
    ),
    (
        "startend:end_checker",
        {"end_phrase": "That is all."},
        ['"Yes. That is ALL."'],
        ["That is all. Bye."],
    ),
    ("startend:quotation", {}, [' "Yes." '], ['"Yes.', '"', "'Yes.'"]),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "at least"},
        ["COVID-19 is BAD."],
        ["COVID-19 is Bad."],
    ),
    (
        "change_case:english_capital",
        {},
        ["THE WEATHER WAS FINE AND THE CHILDREN WERE PLAYING IN THE GARDEN."],
        ["This is quite an ordinary sentence.", "DAS IST EIN GANZ NORMALER SATZ."],
    ),
    (
        "change_case:english_lowercase",
        {},
        ["this is quite an ordinary sentence."],
        ["This is quite an ordinary sentence.", "das ist ein ganz normaler satz."],
    ),
    ("punctuation:no_comma", {}, ["Yes and no."], ["Yes, and no."]),
]


@pytest.mark.parametrize(("name", "parameters", "right", "wrong"), EXAMPLES)
def test_a_constraint_is_met_by_the_right_responses_only(score, name, parameters, right, wrong):
    truth = {"instruction_id_list": [name], "kwargs": [parameters]}
    for response in right:
        assert score("ifeval", response, truth, extra_info=None) == 1.0, response
    # IFEval: saying nothing follows no instruction, "no commas" included.
    for response in [*wrong, "", " \n"]:
        assert score("ifeval", response, truth, extra_info=None) == 0.0, response


def test_the_examples_cover_every_constraint(score):
    assert {name for name, *_ in EXAMPLES} == set(score.__globals__["CONSTRAINTS"])
    assert len(score.__globals__["CONSTRAINTS"]) == 25


def test_the_score_is_the_share_of_the_constraints_met(score):
    names = [
        "punctuation:no_comma",
        "startend:quotation",
        "length_constraints:number_words",
        "detectable_format:title",
    ]
    # As rows come from the hub, with all parameters of all constraints, or from pandas, with 3.0
    # for 3.
    empty = {"num_words": None, "relation": None, "keywords": None}
    truth = {
        "instruction_id_list": names,
        "kwargs": [empty, None, empty | {"num_words": 3.0, "relation": "at least"}, {}],
    }
    assert score("ifeval", "Three words here.", truth) == 0.5
    assert score("ifeval", "Three words here.", json.dumps(truth)) == 0.5
    assert score("ifeval", '"Three words here."', truth) == 0.75
    nth = {"num_paragraphs": 2.0, "nth_paragraph": 2.0, "first_word": "two"}
    truth = {
        "instruction_id_list": ["length_constraints:nth_paragraph_first_word"],
        "kwargs": [nth],
    }
    assert score("ifeval", "One.\n\nTwo.", truth) == 1.0


def test_the_rows_of_open_instruct_are_read(score):
    row = [
        {
            "instruction_id": ["punctuation:no_comma", "startend:quotation"],
            "kwargs": [None, {"num_words": None}],
        }
    ]
    for truth in (row, json.dumps(row), str(row), [json.dumps(row[0])]):
        assert score("ifeval", "No commas here.", truth) == 0.5


@pytest.mark.parametrize(
    ("truth", "message"),
    [
        (
            {"instruction_id_list": ["keywords:rhyme"], "kwargs": [{}]},
            "'keywords:rhyme'; known are change_case:capital",
        ),
        (
            {"instruction_id_list": ["keywords:existence"], "kwargs": [{}]},
            "keywords:existence with {}: .*'keywords'",
        ),
        ({"instruction_id_list": ["punctuation:no_comma"], "kwargs": []}, "zip"),
        ({"instruction_id_list": [], "kwargs": []}, "ground_truth must be"),
        ({"instruction_id_list": ["punctuation:no_comma"]}, "ground_truth must be"),
        (["punctuation:no_comma"], "ground_truth must be"),
        ("no comma", "ground_truth must be"),
        # open-instruct's other form, of functions by another name.
        (
            {"func_name": "verify_paragraph_count", "N": 2},
            (
                r"^ground_truth must be {instruction_id_list, kwargs} or .*; "
                r"it is .*verify_paragraph_count[^\n]*$"
            ),
        ),
        (
            [{"instruction_id": ["count:rhymes"], "kwargs": [None]}],
            "unknown constraint 'count:rhymes'; known are",
        ),
        (
            {
                "instruction_id_list": ["length_constraints:number_words"],
                "kwargs": [{"num_words": 1, "relation": "more than"}],
            },
            "'less than' or 'at least', not 'more than'",
        ),
    ],
)
def test_a_ground_truth_that_cannot_be_checked_is_an_error(score, truth, message):
    with pytest.raises(ValueError, match=message):
        score("ifeval", "Some text.", json.dumps(truth))


def test_doctests_are_right(score):
    runner = doctest.DocTestRunner()
    for example in doctest.DocTestFinder().find(score, "compute_score", globs=score.__globals__):
        runner.run(example)
    assert runner.summarize() == (0, 2)


def test_without_its_libraries_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "langdetect", None)
    with pytest.raises(RuntimeError, match=r"pip install langdetect==\S+ nltk==\S+"):
        runpy.run_path(str(SCRIPT), run_name="reward_fn")
