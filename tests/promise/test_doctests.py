"""The worked examples in the docstrings."""

import doctest
import importlib.util
import sys

import pytest
from helpers import REPO
from helpers.machines import why_no_sandbox

FOLDERS = ("*.py", "scripts/**/*.py", "tests/helpers/*.py")
PROGRAMS = sorted(path for pattern in FOLDERS for path in REPO.glob(pattern))
WITH_EXAMPLES = [path for path in PROGRAMS if "    >>> " in path.read_text()]


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=lambda path: str(path.relative_to(REPO)))
def test_examples_are_right(path, monkeypatch):
    # It loads only where there is a sandbox
    if path.name == "code_sandbox.py" and (reason := why_no_sandbox()):
        pytest.skip(reason)
    # Nor does judge.py load without these; its examples ask nobody
    monkeypatch.setenv("TANDEM_JUDGE_URL", "http://judge/v1")
    monkeypatch.setenv("TANDEM_JUDGE_MODEL", "judge")
    monkeypatch.syspath_prepend(path.parent)  # as Python starts a program
    # Of another name: some files are called alike, and others are loaded already
    spec = importlib.util.spec_from_file_location(f"examples_of_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # dataclasses look there
    spec.loader.exec_module(module)
    assert doctest.testmod(module).failed == 0
