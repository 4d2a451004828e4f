"""The worked examples in the docstrings."""

import doctest
import importlib.util
import subprocess
import sys

import pytest
from helpers import REPO
from helpers.optional import why_no_sandbox
from helpers.processes import environment

FOLDERS = ("*.py", "scripts/**/*.py", "tests/helpers/*.py")
PROGRAMS = sorted(path for pattern in FOLDERS for path in REPO.glob(pattern))
WITH_EXAMPLES = [path for path in PROGRAMS if "    >>> " in path.read_text()]


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=lambda path: str(path.relative_to(REPO)))
def test_examples_are_right(path, monkeypatch):
    why = path.stem == "code_sandbox" and why_no_sandbox()
    if why:
        pytest.skip(f"the file does not load without a sandbox: {why}")
    # Of another name: some files are called alike, and others are loaded already
    spec = importlib.util.spec_from_file_location(f"examples_of_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # dataclasses look there
    spec.loader.exec_module(module)
    assert doctest.testmod(module).failed == 0


def test_suite_is_collected_and_examples_pass_without_bubblewrap(tmp_path):
    """As on a machine where nothing is installed: a file that raises on import would end it."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider"]
    env = environment({"PATH": str(tmp_path), "TMPDIR": str(tmp_path)})

    def call(*words):
        return subprocess.run(
            [*command, *words], cwd=REPO, env=env, capture_output=True, text=True, timeout=300
        )

    examples = call("tests/test_doctests.py", "-k", "examples_are_right and sandbox")
    assert examples.returncode == 0, examples.stdout
    assert "1 skipped" in examples.stdout and "bubblewrap is not installed" in examples.stdout
    collected = call("--collect-only")
    assert collected.returncode == 0, collected.stdout
