"""scripts/failures, and the program that shows them; docs/failures.md tells of each."""

import ast
import re
import sys
from types import SimpleNamespace

import failures
import fork
import pytest
from helpers import REPO

RESULTS = REPO / "docs" / "failures.jsonl"
NAMES = list(failures.FAILURES)
each = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(scope="module")
def page():
    return (REPO / "docs" / "failures.md").read_text()


def test_each_has_a_diff_and_a_section(page):
    diffs = sorted(path.stem for path in fork.FAILURES.glob("*.diff"))
    assert sorted(NAMES) == diffs and len(diffs) == 12
    sections = page.split("\n### ")[1:]
    assert [re.findall(r"failures/(\w+)\.diff", section) for section in sections] == [
        [name] for name in NAMES
    ]
    # The thread that it is from
    assert [len(re.findall(r"\]\(https://", section)) > 0 for section in sections] == [True] * 12


@each
@pytest.mark.usefixtures("git")
def test_diff_is_a_few_lines_of_the_script(name, tmp_path):
    script, _ = failures.FAILURES[name].command
    diff = (fork.FAILURES / f"{name}.diff").read_text()
    assert fork.base_of(diff) == script
    fork.write_fork(name, tmp_path / script, is_bug=True)
    text = (tmp_path / script).read_text()
    assert text.startswith(f"# A deliberate bug, to learn from: {name} (docs/failures.md)\n")
    docstring = ast.get_docstring(ast.parse((REPO / script).read_text()))
    assert ast.get_docstring(ast.parse(text)) == docstring  # --help shows it
    changed = [line for line in diff.splitlines() if re.match(r"[-+](?![-+]{2} )", line)]
    assert 0 < len(changed) <= 16


def test_all_are_told_by_the_runs_in_the_docs(page):
    """A diff, a task or a flag of the debug commands that changes asks for new runs."""
    table, not_told = failures.table_of(NAMES, failures.Results(RESULTS))
    assert not_told == []
    assert "\n".join(table) in page


# ---------------------------------------------------------------------------- the program, faked


def line_of(run, metrics, error=None):
    steps = len(metrics["objective/scores"])
    return vars(run) | {"completed_steps": steps, "error": error, "metrics": metrics}


@pytest.fixture
def call(monkeypatch, tmp_path):
    """call(start, "temperature") -> exit status: failures.py with start(run) in place of runs."""

    def call(start, *words):
        results = str(tmp_path / "failures.jsonl")
        monkeypatch.setattr(sys, "argv", ["failures.py", "--results", results, *words])
        monkeypatch.setattr(failures, "start", start)
        monkeypatch.setattr(failures.subprocess, "run", lambda *_, **__: None)
        monkeypatch.chdir(REPO)  # main() does, too
        try:
            failures.main()
        except SystemExit as end:
            return end.code
        return None

    call.results = tmp_path / "failures.jsonl"
    return call


def test_goes_on_where_it_was_stopped_and_runs_again_without_the_check(call, capsys):
    metric, ran = failures.FAILURES["temperature"].metric, []

    def start(run):
        ran.append((run.diff, run.checks, run.seed))
        if run.diff and run.checks == "on":
            return line_of(run, {"objective/scores": []}, failures.CAUGHT)
        value = 0.5 if run.diff else 0.001 * run.seed
        return line_of(run, {"objective/scores": [0.3], metric: [value] * 40})

    assert call(start, "temperature") == 0
    assert ran == [
        (diff, checks, seed)
        for seed in (1, 2, 3)
        for diff, checks in ((None, "on"), ("temperature", "on"), ("temperature", "off"))
    ]
    out = capsys.readouterr().out
    assert "| 0.001, 0.002, 0.003 | 0.5, 0.5, 0.5 |" in out and "| in step 1 |" in out
    lines = call.results.read_text().splitlines()
    call.results.write_text("\n".join(lines[:-1]) + "\n")
    assert call(start, "temperature") == 0
    assert ran[9:] == [("temperature", "off", 3)]
    assert call(None, "--draw", "temperature") == 0
    assert call.results.with_suffix(".png").exists()


def test_failure_that_is_not_told_is_an_error(call, capsys):
    metric = failures.FAILURES["temperature"].metric

    def start(run):
        value = 0.002 if run.diff else 0.001 * run.seed
        return line_of(run, {"objective/scores": [0.3], metric: [value] * 40})

    assert call(start, "temperature") == 1
    out = capsys.readouterr().out
    assert "NOT TOLD: temperature" in out and "none does" in out


def test_runs_of_another_diff_are_not_taken_for_this_one(call, monkeypatch, capsys):
    metric = failures.FAILURES["temperature"].metric

    def start(run):
        value = 0.5 if run.diff else 0.001 * run.seed
        return line_of(run, {"objective/scores": [0.3], metric: [value] * 40})

    assert call(start, "temperature") == 0
    monkeypatch.setattr(failures, "hash_of", lambda names: str(len(names)))
    assert call(start, "temperature", "--draw") == 1
    assert "| temperature | not run |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("diff", "checks", "error"),
    [
        ("temperature", "on", "RuntimeError: Engine core initialization failed"),
        ("temperature", "off", failures.CAUGHT),
        (None, "on", failures.CAUGHT),
        ("temperature", "on", ""),
    ],
)
def test_run_that_fails_otherwise_has_no_line(diff, checks, error, monkeypatch):
    ended = SimpleNamespace(returncode=1, stdout="what it said", stderr=error)
    monkeypatch.setattr(failures.subprocess, "run", lambda *_, **__: ended)
    monkeypatch.setattr(fork, "write_fork", lambda name, path, is_bug: None)
    with pytest.raises(RuntimeError, match="what it said"):
        failures.start(failures.Run("grpo_vllm_async.py", diff, checks, [], 1, ""))


def test_commands_are_shown_with_the_check_off_as_well(call, capsys):
    assert call(None, "temperature", "--show") is None
    lines = capsys.readouterr().out.splitlines()
    made = "python scripts/fork.py --bug temperature grpo_temperature.py"
    assert lines[1:3] == ["# temperature", made]
    programs = ["grpo_temperature.py", "grpo_vllm_async.py"]
    programs.append("scripts/benchmark/failures.py --run off grpo_temperature.py")
    for line, program in zip(lines[3:], programs, strict=True):
        assert line.startswith(f"python {program} --dataset") and "--temperature 0.7" in line


# ----------------------------------------------------------------------------- with a real vLLM


@pytest.mark.slow
def test_check_ends_the_wrong_run_and_is_off_on_demand(assets):
    script, flags = failures.FAILURES["temperature"].command
    flags = [*flags, "--total_episodes", "512", "--num_evals", "0", "--warm_up_steps", "0"]
    wrong, unchecked = (
        failures.start(failures.Run(script, "temperature", checks, flags, 1, ""))
        for checks in ("on", "off")
    )
    assert wrong["completed_steps"] == 0
    assert re.match("RuntimeError: vLLM's log-probabilities are off", wrong["error"])
    assert unchecked["error"] is None and unchecked["completed_steps"] == 1
    assert unchecked["metrics"]["mismatch/kl"][0] > 1e-3
