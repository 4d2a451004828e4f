"""scripts/failures, and the program that shows them; docs/failures.md tells of each."""

import ast
import re
import statistics
import sys

import failures
import fork
import pytest
from helpers import REPO
from helpers.files import read_json_lines

SEEDS = (1, 2, 3)
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


@each
def test_row_of_the_page_is_of_the_recorded_runs_and_tells(name, page):
    """A diff, a task or a flag of the debug commands that changes asks for new runs."""
    recorded, failure = read_json_lines(REPO / "docs/failures.jsonl"), failures.FAILURES[name]
    right, wrong, ended = [], [], set()
    for seed in SEEDS:
        runs = failures.runs_of(name, seed)
        lines = [
            next((line for line in recorded if run.items() <= line.items()), None) for run in runs
        ]
        is_ended = lines[1]["error"] is not None
        ended |= {lines[1]["completed_steps"] + 1} if is_ended else set()
        right.append(lines[0])
        wrong.append(lines[1 + is_ended])
    values = [[failures.value_of(failure, line) for line in side] for side in (right, wrong)]
    below, above = sorted(values)
    assert min(above) - max(below) > max(values[0]) - min(values[0])
    scores = [
        [statistics.fmean(line["metrics"]["objective/scores"][-5:]) for line in side]
        for side in (right, wrong)
    ]
    cells = [", ".join(f"{value:.3g}" for value in side) for side in [*values, *scores]]
    cells.append(f"in step {', '.join(map(str, sorted(ended)))}" if ended else "none does")
    first, last = failure.steps
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    assert f"| {name} | `{failure.metric}`, {steps} | {' | '.join(cells)} |" in page


# ---------------------------------------------------------------------------- the program, faked


@pytest.fixture
def call(monkeypatch, tmp_path):
    """call("temperature") runs failures.py: each run(words, ...) gives call.outcome(words)."""

    def run(words, folder, expected=None):
        call.ran.append([words[2], expected])
        return call.outcome(words)

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["failures.py", *words])
        monkeypatch.setattr(failures, "RESULTS", call.results)
        monkeypatch.setattr(failures, "run", run)
        monkeypatch.setattr(failures, "make_debug_assets", lambda: None)
        monkeypatch.setattr(fork, "write_fork", lambda name, path, is_bug: call.forked.append(name))
        failures.main()

    call.ran, call.forked, call.results = [], [], tmp_path / "a/f.jsonl"
    return call


def test_a_wrong_run_that_is_ended_runs_again_without_the_check(call, capsys):
    lines = [{"objective/scores": 0.3, "mismatch/kl": 0.5}] * 40
    caught = f"Traceback:\n{failures.CAUGHT}: 0.06\nvLLM ends\n"
    call.outcome = lambda words: (
        ([], caught) if words[2] == "on" and len(call.forked) == 1 else (lines, "")
    )
    call("temperature")
    assert call.ran == [["on", None], ["on", failures.CAUGHT], ["off", None]]
    assert call.forked == ["temperature", "temperature"]
    out = capsys.readouterr().out
    right, ended, unchecked = read_json_lines(call.results)
    assert out.splitlines()[2:] == [
        "right, seed 1: 0.5, last scores 0.3",
        "temperature, seed 1: ended in step 1 by check_sampler",
        "temperature, no check, seed 1: 0.5, last scores 0.3",
    ]
    assert [line["completed_steps"] for line in (right, ended, unchecked)] == [40, 0, 40]
    assert ended["error"] == f"{failures.CAUGHT}: 0.06" and right["error"] is None
    assert unchecked["metrics"]["mismatch/kl"] == [0.5] * 40


def test_commands_are_shown_with_the_check_off_as_well(call, capsys):
    call("temperature", "--show")
    made, *commands = capsys.readouterr().out.splitlines()[2:]
    assert made == "python scripts/fork.py --bug temperature grpo_temperature.py"
    programs = ["grpo_temperature.py", "grpo_vllm_async.py"]
    programs.append("scripts/benchmark/failures.py --run off grpo_temperature.py")
    for line, program in zip(commands, programs, strict=True):
        assert line.startswith(f"python {program} --dataset") and "--temperature 0.7" in line
    assert call.ran == []


# ----------------------------------------------------------------------------- with a real vLLM


@pytest.mark.slow
def test_check_ends_the_wrong_run_and_is_off_on_demand(assets):
    script, flags = failures.FAILURES["temperature"].command
    flags = [*flags, "--total_episodes", "512", "--num_evals", "0", "--warm_up_steps", "0"]
    (completed, error), (unchecked, no_error) = (
        failures.start(script, "temperature", checks, flags, seed=1) for checks in ("on", "off")
    )
    assert completed == [] and error.startswith("RuntimeError: vLLM's log-probabilities are off")
    assert no_error is None and len(unchecked) == 1 and unchecked[0]["mismatch/kl"] > 1e-3
