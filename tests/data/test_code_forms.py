"""Test which program scripts/rewards/code_sandbox.py finds in the Markdown of a response."""

import json
import signal
import sys
import textwrap
import time
import types

import pytest
from helpers import REPO

SCRIPT = REPO / "scripts" / "rewards" / "code_sandbox.py"
RIGHT = """def double(x):
    if not x:
        return x
    return 2 * x
"""
WRONG = RIGHT.replace("2 * x", "x + 2")
NARROW = RIGHT.replace("    ", "  ")
# A program whose docstring contains a block of code
DOCUMENTED = '''def double(x):
    """Twice as much.

    ```
    double(2)
    ```
    """
    return 2 * x
'''


def block(code=RIGHT, info="python", marks="```", margin=""):
    """Return a block of code whose lines all have a margin."""
    return textwrap.indent(f"{marks}{info}\n{code}{marks}\n", margin)


# Responses with a correct program, by what is special about them
GOOD = {
    "nothing fenced": RIGHT,
    "text around": f"So:\n{block()}Done.",
    "py": block(info="py"),
    "Python": block(info="Python"),
    "a version": block(info="python3.11"),
    "a class": block(info="{.python .numberLines}"),
    "spaces": f"``` python  \n{RIGHT}```   \nDone.",
    "Windows' line ends": f"So:\n{block()}Done.".replace("\n", "\r\n"),
    "bare": block(info=""),
    # Several blocks
    "a better one": block(WRONG) + "Better:\n" + block(),
    "bare output after it": block() + "Output:\n" + block("6\n", info=""),
    "a console after it": block() + block(">>> double(3)\n6\n", info="pycon"),
    "output in mid-line after it": block() + "Output: ```\n6\n```",
    "a command before it": block("pip install x\n", info="bash") + block(),
    "a plan that is not closed": "```text\nMultiply.\n\n" + block(),
    "a thought": f"<think>\n{block(WRONG)}No.\n</think>\n<answer>\n{block()}</answer>",
    # Lists and quotes
    "in a list": f"1. So:\n\n{block(margin='   ')}\n2. Done.",
    "in a list by tabs": f"* So:\n\n{block(RIGHT.replace('    ', chr(9)), margin=chr(9))}",
    "bare in a list": f"1. So:\n{block(info='', margin='   ')}",
    "after a list's mark": f"- {block(margin='  ').lstrip()}",
    "in a list, code without margin": f"1. So:\n   ```python\n{RIGHT}   ```\n",
    "in a list, narrow code without margin": f"1. So:\n   ```python\n{NARROW}   ```\n",
    "in a list, fence without margin": "1. So:\n" + block(margin="   ").lstrip(),
    "in a quote": textwrap.indent(f"So:\n\n{block()}", "> ", lambda line: True),
    # In the middle of a line
    "in mid-line": f"So: {block()}Done.",
    "bare in mid-line": f"So: {block(info='')}Done.",
    "in mid-line of a list": f"1. So: {block(margin='   ').lstrip()}Done.",
    "in tags": f"<answer>{block().rstrip()}</answer>",
    "marks in prose": f"It stands between ``` and ```.\n{block()}",
    "marks and a stop in prose": f"It stands after ```.\n{block(info='')}",
    # Fences that are no fences, and longer ones
    "a docstring with a block": block(DOCUMENTED) + "Done.",
    "a docstring with a block, nothing fenced": DOCUMENTED,
    "a docstring with a block of Python": block(
        DOCUMENTED.replace("```\n    d", "```python\n    d")
    ),
    "a docstring of the other quotes": block(DOCUMENTED.replace('"""', "'''")),
    "a module's docstring with a block": block('"""\n```\ndouble(2)\n```\n"""\n' + RIGHT),
    "three quotes that open no string": block(RIGHT + 'MARK = \'"""\'\n') + block("6\n", info=""),
    "four marks": block(marks="````"),
    "four marks around three": block(f"# Use:\n# ```\n{DOCUMENTED}", marks="````"),
    "tildes, bare": block(info="", marks="~~~") + "Done.",
    "marks within tildes": block(f"{RIGHT}TEXT = '''\n```\n'''\n", marks="~~~"),
    # Cut
    "cut": f"So:\n```python\n{RIGHT}",
    "cut after a bare block": f"{block('3', info='')}```python\n{RIGHT.rstrip()}",
    "cut in the output": f"{block()}Output:\n```\n6",
    "cut as another begins": f"{block()}Now:\n```python\n",
}
# Responses whose program is wrong, or which have none
BAD = {
    "wrong": block(WRONG),
    "wrong after a right one": block() + "No:\n" + block(WRONG),
    "wrong, and a right bare one": block(WRONG) + "Or:\n" + block(info=""),
    "wrong, with a right one in its docstring": block(f"{WRONG}'''\n{block()}'''\n"),
    "not closed, for what says something closes nothing": f"```python\n{RIGHT}{block('6', 'text')}",
    "no Python": block(RIGHT.replace(":", "")),
    "prose": "I would rather not.",
    "nothing": "",
}
LONG_TEXTS = [
    "```\n" * 8000,
    '```python\n"""\n' + "```python\n```\n" * 4000,
    " " * 300_000 + "x",
    "1. " * 50_000 + "x",
    "- " * 50_000 + "```x`",
    "`" * 100_000 + " `",
    "```x" * 50_000,
    "```\n```" + "</a> " * 40_000 + "x",
]


@pytest.fixture(scope="module")
def module():
    """Load the file without its last line, which needs bubblewrap."""
    text = SCRIPT.read_text()
    assert text.count("SANDBOX = find_sandbox()\n") == 1
    module = types.ModuleType("code_sandbox_of_forms")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, module.__name__, module)  # dataclasses look there
        exec(text.removesuffix("SANDBOX = find_sandbox()\n"), vars(module))
    return module


@pytest.fixture(scope="module")
def extract_code(module):
    return module.extract_code


def passes(program):
    """Return whether a program is correct. All programs above are harmless."""
    names = {}
    try:
        exec(program, names)
        return names["double"](3) == 6 and names["double"](0) == 0
    except Exception:
        return False


def test_program_is_found_in_every_form(extract_code):
    passed = {name: passes(extract_code(text)) for name, text in (GOOD | BAD).items()}
    assert passed == dict.fromkeys(GOOD, True) | dict.fromkeys(BAD, False)
    body = "    return 2 * x\n"  # the rest of HumanEval's prompt
    for response in (block(body), block(body, info=""), f"So: {block(body)}", body):
        assert extract_code(response) == body
    assert extract_code(f"1. So:\n{block(body, margin='   ')}") == body


def test_long_text_takes_linear_time(extract_code):
    signal.alarm(100)  # the signal ends the process
    assert all(extract_code(text) in text for text in LONG_TEXTS)
    signal.alarm(0)
    # In blocks with an open string each search for an end fails. Eight times as many take less than
    # 24 times as long. Another process can slow down one of three tries
    part = '"""\n```python\n"""\n```\n'

    def seconds(count):
        start = time.process_time()
        extract_code(part * count)
        return time.process_time() - start

    assert any(seconds(4000) < 24 * seconds(500) for _ in range(3))


CASES = [{"stdin": "1\n", "expected": "2\n"}, {"stdin": "3", "expected": "4\n5"}]
DICTIONARIES = [{"input": case["stdin"], "output": case["expected"]} for case in CASES]
PAIRS = {"inputs": ["1\n", ["3"]], "outputs": ["2\n", ["4", "5"]]}
NULLS = dict.fromkeys(("fn_name", "test_list", "test", "entry_point", "inputs", "outputs"))
REFUSED = [
    ([{"input": "1", "output": "2", "testtype": "functional"}], "with testtype stdin"),
    (PAIRS | {"fn_name": "f"}, "has fn_name"),
    ({"inputs": "1\n", "outputs": "2\n"}, "inputs, outputs} with lists"),
    ({"test_list": "assert f(1) == 2"}, "must be a list of assertions"),
    ([["1", "2"]], "a test case must be"),
    ({"inputs": [1], "outputs": ["2"]}, "must be text"),
    (NULLS, "at least one test case"),
]


def test_every_form_of_test_cases_is_read_or_refused_with_its_reason(module):
    """Forms can be JSON, and can have null for the keys of all other forms, which Arrow adds."""
    stdin = [case | {"testtype": "stdin"} for case in DICTIONARIES]
    for truth in (PAIRS, DICTIONARIES, stdin, [case | NULLS for case in stdin]):
        for form in (truth, json.dumps(truth)):
            assert module.parse_ground_truth(form) == ("", CASES)
    forms = ({"test_list": ["assert f(1) == 2"]}, PAIRS, {"test": "def", "entry_point": "f"})
    for truth in forms:
        prefix, cases = module.parse_ground_truth(truth)
        assert cases and module.parse_ground_truth(NULLS | truth) == (prefix, cases)
    for truth, words in REFUSED:
        for form in (truth, json.dumps(truth)):
            with pytest.raises(ValueError, match=words):
                module.parse_ground_truth(form)
