"""scripts/gpu_check.sh: its first part on this machine, and what becomes of a part that fails."""

import importlib
import json
import math
import os
import subprocess
import sys
from dataclasses import fields

import gpu_check
import pytest
from helpers import REPO
from helpers.processes import environment


@pytest.fixture
def check(monkeypatch, capsys):
    """check(*words) -> (exit status, lines of standard output, standard error)."""

    def check(*words):
        monkeypatch.setattr(sys, "argv", ["gpu_check.py", *words])
        with pytest.raises(SystemExit) as end:
            gpu_check.main()
        out, err = capsys.readouterr()
        return end.value.code, [json.loads(line) for line in out.splitlines()], err

    return check


def test_parts_are_chosen_by_how_they_begin():
    assert gpu_check.choose_parts([]) == list(gpu_check.PARTS)
    assert gpu_check.choose_parts(["size_0.5B"]) == ["size_0.5B_ppo", "size_0.5B_grpo"]
    assert gpu_check.choose_parts(["overlap", "learn_g"]) == ["learn_grpo", "overlap"]


def test_bad_name_is_one_line_and_status_2(check):
    status, lines, err = check("sync", "snyc")
    assert (status, lines) == (2, [])
    assert len(err.splitlines()) == 1
    assert "'snyc'" in err and "sync_ppo_float32" in err


def test_part_that_fails_leaves_the_next_one_running(check, monkeypatch):
    def fail():
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(gpu_check, "PARTS", {"a": fail, "b": lambda: {"figure": 1.0}})
    status, (machine, a, b), _ = check()
    assert status == 1
    assert machine["date"].endswith("UTC") and machine["torch"]
    assert a["part"] == "a" and a["error"] == "RuntimeError: CUDA out of memory"
    assert b["part"] == "b" and b["figure"] == 1.0 and "error" not in b
    assert check("b")[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("last", "limit", "error"),
    [
        ("sys.exit('at last')", 60, r"program.py --flag\nexit status 1\n(?s:.*)late\nat last\n"),
        ("wait_for_weights()", 3, r"not over after 3 s\n(?s:.*)late\n(?s:.*)in wait_for_weights"),
    ],
)
def test_error_has_the_end_of_the_output_and_where_it_hung(last, limit, error, tmp_path):
    program = tmp_path / "program.py"
    text = "import sys, time\ndef wait_for_weights():\n    time.sleep(100)\n"
    program.write_text(f"{text}print('early ' * 2000)\nprint('late', flush=True)\n{last}\n")
    with pytest.raises(RuntimeError, match=error) as raised:
        gpu_check.run([str(program), "--flag"], time_limit=limit)
    assert len(str(raised.value)) < 4000


@pytest.mark.parametrize("has_gpu", [False, True])
@pytest.mark.parametrize("part", gpu_check.PARTS)
def test_flags_of_a_part_exist_and_an_absent_metric_is_null(part, has_gpu, monkeypatch):
    """A stub of the run: the part itself must fit what the script takes and may leave out."""
    step = {"time/training": 2.0, "time/from_scratch": 9.0, "val/sequence_lengths": 504.0}
    commands, limits = [], []

    def run(command, time_limit=gpu_check.TIME_LIMIT):
        commands.append(command)
        limits.append(time_limit)
        return [dict(step) for _ in range(6)]

    monkeypatch.setattr(gpu_check, "run", run)
    monkeypatch.setattr(gpu_check, "HAS_GPU", has_gpu)
    monkeypatch.setattr(gpu_check, "make_random_model", lambda size, folder: None)
    figures = gpu_check.PARTS[part]()
    assert sum(limits) < 600
    for script, *words in commands:
        names = {field.name for field in fields(importlib.import_module(script[:-3]).Args)}
        flags = [word for word in words if word.startswith("--")]
        assert {flag.removeprefix("--").removeprefix("no-") for flag in flags} <= names
    expected = {
        "sync": {"mismatch/kl": [None] * 6},
        "learn": {"before": None, "after": None, "seconds_of_steps": 12},
        "size": {"learner_gib": None, "val/sequence_lengths": 504, "time/training": 2},
        "overlap": {"ratio": 1},
    }
    assert expected.get(part.partition("_")[0], {}).items() <= figures.items()


@pytest.mark.slow
def test_sampler_and_learner_agree_on_this_machine(assets):
    done = subprocess.run(
        ["bash", "scripts/gpu_check.sh", "sync_ppo_float32"],
        cwd=REPO,
        env=environment({"PYTHON": sys.executable}),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout
    machine, line = map(json.loads, done.stdout.splitlines())
    assert (machine["part"], machine["cpus"]) == ("machine", os.cpu_count())
    assert len(line["time/weight_sync"]) == 4
    for name in ("logprob_diff_mean", "logprob_diff_max", "kl"):
        assert len(line[f"mismatch/{name}"]) == 5
        assert all(map(math.isfinite, line[f"mismatch/{name}"]))
    assert 0 < max(line["mismatch/logprob_diff_max"]) < 1e-3
