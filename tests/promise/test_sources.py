"""What no source may hold, for it means another thing on another machine."""

import ast
import re

from helpers import files_of_project

PROGRAMS = [*files_of_project("*.py"), *files_of_project("scripts/**/*.py")]
PROGRAMS += files_of_project("docs/*.py")


def nodes_of(path):
    return ast.walk(ast.parse(path.read_bytes()))


def test_no_regular_expression_is_possessive():
    """Debian 12 has Python 3.11.2, whose `re` then fails to match: every program is graded 0.

    A class of characters that holds both is written [+*]; C++ and a diff's +++ are no expressions.
    """
    quantifier = re.compile(r"[+*?}]\+|\(\?>")
    for path in [*PROGRAMS, *files_of_project("tests/**/*.py")]:
        for node in nodes_of(path):
            text = str(node.value) if isinstance(node, ast.Constant) else ""
            assert not quantifier.search(re.sub(r"[Cc]\+\+|\+{3}", "", text)), (path.name, text)


# Functions that write JSON, hence ASCII
LEFT = "open_run append_line report_prompt_lengths save_checkpoint"


def depends_on_locale(call):
    """Whether a call opens, reads, writes or pipes text in the encoding of the locale."""
    name = ast.unparse(call.func)
    given = {keyword.arg for keyword in call.keywords}
    if "encoding" in given or name == "os.open":
        return False
    if name == "open" or name.endswith(".open"):
        (mode,) = call.args[name == "open" :][:1] or [ast.Constant("r")]
        return "b" not in mode.value
    positions = {"read_text": 0, "write_text": 1}
    last = name.rpartition(".")[2]
    is_pipe = "text" in given and name.startswith("subprocess.")
    return is_pipe or (last in positions and len(call.args) <= positions[last])


def test_text_is_utf_8_whatever_the_locale():
    found = []
    for path in PROGRAMS:
        left = set()
        for node in nodes_of(path):  # a function comes before what is in it
            if isinstance(node, ast.FunctionDef) and node.name in LEFT.split():
                left |= {*ast.walk(node)}
            if isinstance(node, ast.Call) and node not in left and depends_on_locale(node):
                found.append((path.name, ast.unparse(node)))
    assert found == []
