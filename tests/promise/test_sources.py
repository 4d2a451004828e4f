"""What no source may hold, for it means another thing on another machine."""

import ast
import re

from helpers import REPO

PROGRAMS = sorted(path for pattern in ("*.py", "scripts/**/*.py") for path in REPO.glob(pattern))


def nodes_of(path):
    return ast.walk(ast.parse(path.read_bytes()))


def test_no_regular_expression_is_possessive():
    """Debian 12 has Python 3.11.2, whose `re` then fails to match: every program is graded 0.

    A class of characters that holds both is written [+*]; C++ and a diff's +++ are no expressions.
    """
    quantifier = re.compile(r"[+*?}]\+|\(\?>")
    found = [
        (path.name, node.value)
        for path in [*PROGRAMS, *REPO.glob("tests/**/*.py")]
        for node in nodes_of(path)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if quantifier.search(re.sub(r"[Cc]\+\+|\+{3}", "", node.value))
    ]
    assert found == []


# Functions that write JSON, hence ASCII
LEFT = "lock_run open_run append_line report_prompt_lengths finish_checkpoint"


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


def test_what_depends_on_the_locale_is_found():
    depends = """
        open(path)
        open('b')
        open(path, 'a')
        path.open('w')
        (folder / name).read_text()
        path.write_text(text)
        subprocess.run(command, text=True)
    """
    does_not = """
        open(path, 'rb')
        path.open('wb')
        path.read_text('utf-8')
        path.read_bytes()
        path.write_text(text, 'utf-8')
        subprocess.run(command, encoding='utf-8')
        os.open(path, os.O_PATH)
        Response(text='word')
    """
    for texts, expected in ((depends, True), (does_not, False)):
        for text in texts.split("\n")[1:-1]:
            call = ast.parse(text.strip(), mode="eval").body
            assert depends_on_locale(call) == expected, text
