"""Test scripts/gpu_check.sh without a GPU. Stubs replace the runs."""

import importlib
import json
import math
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import preflight
import pytest
import torch
from helpers import REPO
from helpers.files import write_text
from helpers.processes import environment
from internal import gpu_check
from preflight_cases import call_rewards_here


@pytest.fixture
def check(monkeypatch, capsys):
    """Return check(*words) -> (exit status, lines of standard output, standard error)."""
    monkeypatch.setattr(gpu_check, "HAS_GPU", True)
    monkeypatch.setattr(gpu_check, "describe_machine", lambda: {"torch": "2.13.0"})

    def check(*words):
        monkeypatch.setattr(sys, "argv", ["gpu_check.py", *words])
        with pytest.raises(SystemExit) as end:
            gpu_check.main()
        out, err = capsys.readouterr()
        return end.value.code, out.splitlines(), err

    return check


def test_command_writes_all_output_to_one_file(tmp_path):
    """Use shell scripts for everything that it calls. Without a GPU it must set nothing up."""
    python = 'echo "runs $*"; echo "an error" >&2; case $1 in *gpu_check.py) exit 1;; esac'
    texts = {"gpu_check.sh": (REPO / "scripts/gpu_check.sh").read_text(), "setup.sh": ""}
    texts |= {"../.venv/bin/python": f"#!/bin/sh\n{python}"}
    command = ["bash", tmp_path / "scripts/gpu_check.sh", "sync"]
    extra = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "PYTHON": ""}
    for gpu, status in (("exit 9", 2), ("echo GPU 0", 1)):
        for name, text in (texts | {"../bin/nvidia-smi": f"#!/bin/sh\n{gpu}"}).items():
            write_text(tmp_path / "scripts" / name, text).chmod(0o755)
        done = subprocess.run(command, env=environment(extra), capture_output=True, text=True)
        assert done.returncode == status and (tmp_path / "output").exists() == (status == 1)
    (report,) = (tmp_path / "output").iterdir()
    *lines, last = done.stdout.splitlines()
    assert last == f"The report is output/{report.name}"
    assert report.read_text().splitlines() == lines[1:]  # the first line is older than the file
    assert "runs scripts/internal/gpu_check.py sync" in lines and "an error" in lines


def test_parts_are_chosen_by_the_beginnings_of_names_and_need_a_gpu(check, monkeypatch):
    assert gpu_check.choose_parts([]) == list(gpu_check.PARTS)
    assert gpu_check.choose_parts(["sync_p", "learn_g"]) == ["learn_grpo", "sync_ppo_bfloat16"]
    status, lines, err = check("sync", "snyc")
    assert (status, lines) == (2, []) and "'snyc'" in err and "sync_ppo_bfloat16" in err
    monkeypatch.setattr(gpu_check, "HAS_GPU", False)
    status, lines, err = check("sync")
    assert (status, lines) == (2, []) and "torch finds no GPU" in err and "driver 580" in err


def test_part_that_fails_leaves_the_next_one_running(check, monkeypatch):
    def fail():
        raise RuntimeError("exit status 1\na.py --flag\nTraceback\nCUDA out of memory")

    parts = {"a": fail, "b": lambda: {"figure": 1.0}, "c": lambda: {"x": 2, "error": "too far"}}
    monkeypatch.setattr(gpu_check, "PARTS", parts)
    status, (*lines, machine, a, b, c), _ = check()
    assert [json.loads(line)["part"] for line in lines] == ["machine", "a", "b", "c"]
    assert json.loads(lines[1])["error"].endswith("Traceback\nCUDA out of memory")
    assert (status, machine, a) == (1, "machine: passed", "a: FAILED, CUDA out of memory")
    assert (b, c) == ("b: passed", "c: FAILED, too far") and check("b")[0] == 0


def test_machine_is_described_without_a_gpu_and_a_compiler(monkeypatch):
    monkeypatch.setenv("CC", "/nowhere/gcc")
    machine = gpu_check.describe_machine()
    assert machine["torch"] == torch.__version__ and machine["compiler"] is None


@pytest.mark.slow
def test_error_has_the_end_of_the_output_and_where_it_hung(tmp_path):
    text = "import time\ndef wait_for_weights():\n    time.sleep(100)\nprint('early ' * 2000)\n"
    program = write_text(tmp_path / "program.py", f"{text}print('late')\nwait_for_weights()\n")
    error = r"it did not end in 3 s\n.*program.py --flag(?s:.*)late\n(?s:.*)in wait_for_weights"
    with pytest.raises(RuntimeError, match=error) as raised:
        gpu_check.run([str(program), "--flag"], time_limit=3, PYTHONUNBUFFERED="1")
    assert len(str(raised.value)) < 4000


def test_figures_are_read_from_the_output_of_vllm_and_of_inspect_run(monkeypatch):
    output = "INFO Using V2 Model Runner\n"
    output += "INFO Maximum concurrency for 1,536 tokens per request: 12.50x\n"
    monkeypatch.setattr(gpu_check.benchmark, "run", lambda *_, **__: ([{}], output))
    monkeypatch.setattr(gpu_check.run_files, "read_args", lambda run_dir: {})
    costs = "9 response tokens per second"
    monkeypatch.setattr(gpu_check.run_summary, "describe_costs", lambda *_: f"To compare: {costs}")
    figures = {"vllm/model_runner": 2, "vllm/at_once": 12.5, "compare": costs}
    assert gpu_check.run(["program.py"]) == [figures]


def test_plan_is_read_from_what_the_preflight_prints(assets, monkeypatch, capsys):
    def ask(_, program, *words, **__):  # without a process
        status = preflight.main(list(words))
        return subprocess.CompletedProcess(program, status, *capsys.readouterr())

    call_rewards_here(monkeypatch)
    monkeypatch.setattr(gpu_check, "ask", ask)
    options = {"response_length": 500, "micro_batch_tokens": 32_512}
    options |= {"gradient_checkpointing": False}
    command = gpu_check.short_command(gpu_check.PPO, 4, **options)
    figures = gpu_check.plan(["--gpu_memory", "24", *command])
    assert 0.1 < figures["plan_gib"] < 1 and figures["plan_at_once"] == gpu_check.RESPONSES


STEP = {"time/training": 2.0, "objective/scores": 0.5, "mismatch/logprob_diff_mean": 1e-7}


@pytest.mark.parametrize("part", list(gpu_check.PARTS)[1:])
def test_flags_of_a_part_exist_and_a_missing_metric_is_null(part, lora_forks, monkeypatch):
    commands, limits = [], []

    def run(command, time_limit=gpu_check.TIME_LIMIT, **_):
        commands.append(command)
        limits.append(time_limit)
        return [dict(STEP) for _ in range(6)]

    done = subprocess.CompletedProcess([], 0, "", "")
    monkeypatch.setattr(gpu_check, "run", run)
    monkeypatch.setattr(gpu_check, "ask", lambda *_, **__: done)
    monkeypatch.setattr(gpu_check, "plan", lambda command: {"plan_gib": 12.5})
    monkeypatch.setattr(gpu_check, "make_random_model", lambda size, folder: None)
    figures, kind = gpu_check.PARTS[part](), part.partition("_")[0]
    assert sum(limits) + {"step": 2, "reverse": 1}.get(kind, 0) * gpu_check.PROGRAM_LIMIT < 600
    for script, *words in commands:
        is_fork = Path(script).name in lora_forks
        names = {field.name for field in fields(importlib.import_module(Path(script).stem).Args)}
        flags = [word for word in words if word.startswith("--")]
        assert {flag.removeprefix("--").removeprefix("no-") for flag in flags} <= names
        assert ("--lora_rank" in words) == is_fork == (kind == "adapters")
    expected = {"learn": {"before": None}, "step": {"plan_gib": 12.5, "learner_gib": None}}
    expected["reverse"] = {"scores": [0.5] * 6, "mismatch/kl": []}
    assert expected.get(kind, {"mismatch/kl": [None] * 6}).items() <= figures.items()


def test_part_is_skipped_without_the_hub_or_without_enough_memory(monkeypatch):
    failed = subprocess.CompletedProcess(
        [], 2, "", "preflight: error: memory: it needs about 9 GiB"
    )
    monkeypatch.setattr(gpu_check, "ask", lambda *_, **__: failed)
    monkeypatch.setattr(gpu_check, "make_random_model", lambda size, folder: None)
    for part in ("reverse_text", "step_1.5B_ppo"):
        assert "skipped" in gpu_check.PARTS[part]()


def test_nan_is_an_error(monkeypatch):
    attention = gpu_check.scaled_dot_product_attention
    monkeypatch.setattr(gpu_check, "LENGTHS", (64,))
    assert "error" not in gpu_check.check_attention()
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    broken = lambda query, *rest, **options: attention(math.nan * query, *rest, **options)  # noqa: E731
    monkeypatch.setattr(gpu_check, "scaled_dot_product_attention", broken)
    assert "not finite" in gpu_check.check_attention()["error"]


DIFFERENCE, RATE = "mismatch/logprob_diff_mean", "eval/verifiable_correct_rate"


@pytest.mark.parametrize(
    ("part", "metric", "good", "bad"),
    [
        ("sync_grpo_float32", DIFFERENCE, 2e-7, 0.012),
        ("sync_ppo_bfloat16", DIFFERENCE, 0.004, 0.0135),
        ("sync_ppo_bfloat16", DIFFERENCE, 0.004, math.nan),
        ("learn_grpo", RATE, 0.99, 0.5),
    ],
)
def test_old_weights_and_no_learning_are_errors(part, metric, good, bad, monkeypatch):
    for value in (good, bad):
        steps = [{metric: 1e-7}, {metric: value}]
        monkeypatch.setattr(gpu_check, "run", lambda _, steps=steps: steps)
        assert ("error" in gpu_check.PARTS[part]()) == (value is bad)
