"""Test the bugs of docs/bug_gallery.md: scripts/forks/bugs and scripts/benchmark/failures.py."""

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
each_bug = pytest.mark.parametrize("name", NAMES)
PAGE = (REPO / "docs" / "bug_gallery.md").read_text()


@each_bug
def test_diff_is_a_few_lines_of_the_script_and_has_its_section(name, tmp_path):
    script, _ = failures.FAILURES[name].command
    diff = (fork.FAILURES / f"{name}.diff").read_text()
    assert fork.base_of(diff) == script
    fork.write_fork(name, tmp_path / script, is_bug=True)
    text = (tmp_path / script).read_text()
    assert text.startswith(f"# A deliberate bug, to learn from: {name} (docs/bug_gallery.md)\n")
    docstring = ast.get_docstring(ast.parse((REPO / script).read_text()))
    assert ast.get_docstring(ast.parse(text)) == docstring  # --help shows it
    changed = [line for line in diff.splitlines() if re.match(r"[-+](?![-+]{2} )", line)]
    assert 0 < len(changed) <= 16
    section = PAGE.split("\n### ")[1:][NAMES.index(name)]
    assert re.findall(r"bugs/(\w+)\.diff", section) == [name]
    assert "](https://" in section  # the thread that it is from
    assert len(NAMES) == len(fork.names_in(fork.FAILURES)) == 11


@each_bug
def test_row_of_the_page_has_the_figures_of_recorded_runs(name):
    """New runs must be recorded after a change to a diff, a task or a flag of the commands."""
    recorded, failure = read_json_lines(REPO / "docs/data/failures.jsonl"), failures.FAILURES[name]
    healthy, buggy, ended = [], [], set()
    for seed in (1, 2, 3):
        runs = failures.runs_of(name, seed)
        lines = [
            next((line for line in recorded if run.items() <= line.items()), None) for run in runs
        ]
        is_ended = lines[1]["error"] is not None
        ended |= {lines[1]["completed_steps"] + 1} if is_ended else set()
        healthy.append(lines[0])
        buggy.append(lines[1 + is_ended])
    values = [[failures.value_of(failure, line) for line in side] for side in (healthy, buggy)]
    below, above = sorted(values)
    assert min(above) - max(below) > max(values[0]) - min(values[0])
    scores = [
        [statistics.fmean(line["metrics"]["objective/scores"][-5:]) for line in side]
        for side in (healthy, buggy)
    ]
    cells = [", ".join(f"{value:.3g}" for value in side) for side in [*values, *scores]]
    cells.append(f"in step {', '.join(map(str, sorted(ended)))}" if ended else "none does")
    first, last = failure.steps
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    assert f"| {name} | `{failure.metric}`, {steps} | {' | '.join(cells)} |" in PAGE


def test_a_run_that_a_check_ends_is_repeated_without_the_check(monkeypatch, tmp_path, capsys):
    """The runs of the program are faked."""
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
        "right, seed 1: 0.5, last scores 0.3",
        "temperature, seed 1: ended in step 1 by check_sampler",
        "temperature, no check, seed 1: 0.5, last scores 0.3",
    ]
    healthy, ended, unchecked = read_json_lines(results)
    assert [line["completed_steps"] for line in (healthy, ended, unchecked)] == [40, 0, 40]
    assert ended["error"] == f"{failures.CAUGHT}: 0.06" and healthy["error"] is None
    assert unchecked["metrics"]["mismatch/kl"] == [0.5] * 40

    monkeypatch.setattr(sys, "argv", ["failures.py", "temperature", "--show"])
    failures.main()
    write, run_it, _, run_unchecked = capsys.readouterr().out.splitlines()[2:]
    assert write == "python scripts/fork.py --bug temperature grpo_temperature.py"
    assert run_it.startswith("python grpo_temperature.py --dataset") and "perature 0.7" in run_it
    assert run_unchecked.startswith(
        "python scripts/benchmark/failures.py --run off grpo_temperature.py --d"
    )
    assert len(ran) == 3


@pytest.mark.slow
def test_check_ends_a_run_with_a_bug(assets):
    script, flags = failures.FAILURES["temperature"].command
    flags = [*flags, "--total_episodes", "512", "--num_evals", "0", "--warm_up_steps", "0"]
    completed, error = failures.start(script, "temperature", "on", flags, seed=1)
    assert completed == [] and error.startswith(failures.CAUGHT)
