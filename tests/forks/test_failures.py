"""Test scripts/forks/bugs, benchmark/failures.py, and the figures of docs/bug_gallery.md."""

import ast
import re
import statistics
import sys

import failures
import fork
import pytest
from helpers import REPO
from helpers.files import read_json_lines

NAMES = list(failures.FAILURES)
each = pytest.mark.parametrize("name", NAMES)
PAGE = (REPO / "docs" / "bug_gallery.md").read_text()


@each
def test_diff_is_a_few_lines_of_the_script_and_has_its_section(name, tmp_path):
    script, _ = failures.FAILURES[name].command
    diff = (fork.FAILURES / f"{name}.diff").read_text()
    assert fork.base_of(diff) == script
    fork.write_fork(name, tmp_path / script, is_bug=True)
    text = (tmp_path / script).read_text()
    assert text.startswith(f"# A deliberate bug, to learn from: {name} (docs/bug_gallery.md)\n")
    docstring = ast.get_docstring(ast.parse((REPO / script).read_text()))
    assert ast.get_docstring(ast.parse(text)) == docstring  # of --help
    changed = [line for line in diff.splitlines() if re.match(r"[-+](?![-+]{2} )", line)]
    assert 0 < len(changed) <= 16
    section = PAGE.split("\n### ")[1:][NAMES.index(name)]
    assert re.findall(r"bugs/(\w+)\.diff", section) == [name]
    assert "](https://" in section  # the thread that reported it
    assert len(NAMES) == len(fork.names_in(fork.FAILURES)) == 11


@each
def test_table_of_the_page_has_the_recorded_runs_and_the_metric_shows_the_bug(name):
    """A change of the diff, the task or the flags of a debug command requires new runs."""
    recorded, failure = read_json_lines(REPO / "docs/data/failures.jsonl"), failures.FAILURES[name]
    correct, wrong, ended = [], [], set()
    for seed in (1, 2, 3):
        runs = failures.runs_of(name, seed)
        lines = [
            next((line for line in recorded if run.items() <= line.items()), None) for run in runs
        ]
        is_ended = lines[1]["error"] is not None
        ended |= {lines[1]["completed_steps"] + 1} if is_ended else set()
        correct.append(lines[0])
        wrong.append(lines[1 + is_ended])
    values = [[failures.value_of(failure, line) for line in side] for side in (correct, wrong)]
    below, above = sorted(values)
    assert min(above) - max(below) > max(values[0]) - min(values[0])
    scores = [
        [statistics.fmean(line["metrics"]["objective/scores"][-5:]) for line in side]
        for side in (correct, wrong)
    ]
    cells = [", ".join(f"{value:.3g}" for value in side) for side in [*values, *scores]]
    cells.append(f"in step {', '.join(map(str, sorted(ended)))}" if ended else "none does")
    first, last = failure.steps
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    assert f"| {name} | `{failure.metric}`, {steps} | {' | '.join(cells)} |" in PAGE


def test_wrong_run_that_the_check_ended_is_repeated_without_it(monkeypatch, tmp_path, capsys):
    """Use invented results of runs."""
    ran, forked, results = [], [], tmp_path / "a/f.jsonl"
    lines = [{"objective/scores": 0.3, "mismatch/kl": 0.5}] * 40
    caught = f"Traceback:\n{failures.CAUGHT}: 0.06\nvLLM ends\n"

    def run(words, folder, expected=None):
        ran.append([words[2], expected])
        return ([], caught) if words[2] == "on" and len(forked) == 1 else (lines, "")

    monkeypatch.setattr(failures, "RESULTS", results)
    monkeypatch.setattr(failures, "run", run)
    monkeypatch.setattr(failures, "make_debug_assets", lambda: None)
    monkeypatch.setattr(fork, "write_fork", lambda name, path, is_bug: forked.append(name))
    monkeypatch.setattr(sys, "argv", ["failures.py", "temperature"])
    failures.main()
    assert ran == [["on", None], ["on", failures.CAUGHT], ["off", None]]
    assert forked == ["temperature", "temperature"]
    assert capsys.readouterr().out.splitlines()[2:] == [
        "correct, seed 1: 0.5, last scores 0.3",
        "temperature, seed 1: check_sampler ended it in step 1",
        "temperature, no check, seed 1: 0.5, last scores 0.3",
    ]
    correct, ended, unchecked = read_json_lines(results)
    assert [line["completed_steps"] for line in (correct, ended, unchecked)] == [40, 0, 40]
    assert ended["error"] == f"{failures.CAUGHT}: 0.06" and correct["error"] is None
    assert unchecked["metrics"]["mismatch/kl"] == [0.5] * 40

    monkeypatch.setattr(sys, "argv", ["failures.py", "temperature", "--show"])
    failures.main()
    made, wrong, _, off = capsys.readouterr().out.splitlines()[2:]
    assert made == "python scripts/fork.py --bug temperature grpo_temperature.py"
    assert wrong.startswith("python grpo_temperature.py --dataset") and "perature 0.7" in wrong
    assert off.startswith("python scripts/benchmark/failures.py --run off grpo_temperature.py --d")
    assert len(ran) == 3


@pytest.mark.slow
def test_check_sampler_ends_a_wrong_run(assets):
    script, flags = failures.FAILURES["temperature"].command
    flags = [*flags, "--total_episodes", "512", "--num_evals", "0", "--warm_up_steps", "0"]
    completed, error = failures.start(script, "temperature", "on", flags, seed=1)
    assert completed == [] and error.startswith(failures.CAUGHT)
