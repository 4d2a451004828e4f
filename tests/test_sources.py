"""What no source may hold, for it means another thing on another machine."""

import ast
import re

import pytest
from helpers import REPO

SOURCES = sorted(
    path for pattern in ("*.py", "scripts/**/*.py", "tests/**/*.py") for path in REPO.glob(pattern)
)
every_source = pytest.mark.parametrize(
    "path", SOURCES, ids=lambda path: str(path.relative_to(REPO))
)


def nodes_of(path):
    return ast.walk(ast.parse(path.read_bytes()))


@every_source
def test_no_regular_expression_is_possessive(path):
    """Debian 12 has Python 3.11.2, whose `re` then fails to match: every program is graded 0.

    A class of characters that holds both is written [+*]; C++ and a diff's +++ are no expressions.
    """
    quantifier = re.compile(r"[+*?}]\+|\(\?>")
    texts = [
        node.value
        for node in nodes_of(path)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    assert [text for text in texts if quantifier.search(re.sub(r"[Cc]\+\+|\+{3}", "", text))] == []
