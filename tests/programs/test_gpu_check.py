"""scripts/gpu_check.sh without a GPU: what it says; and with stubs, what becomes of its parts."""

import importlib
import json
import math
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import gpu_check
import pytest
import torch
from helpers import REPO
from helpers.processes import environment, wait_until


@pytest.fixture
def check(monkeypatch, capsys):
    """check(*words) -> (exit status, lines of standard output, standard error), as with a GPU."""
    monkeypatch.setattr(gpu_check, "HAS_GPU", True)
    monkeypatch.setattr(gpu_check, "describe_machine", lambda: {"torch": "2.13.0"})

    def check(*words):
        monkeypatch.setattr(sys, "argv", ["gpu_check.py", *words])
        with pytest.raises(SystemExit) as end:
            gpu_check.main()
        out, err = capsys.readouterr()
        return end.value.code, out.splitlines(), err

    return check


@pytest.mark.parametrize(
    ("gpu", "setup", "status", "said"),
    [
        ("exit 9", "", 2, ["gpu_check: there is no NVIDIA GPU here"]),  # nothing is set up or run
        ("echo GPU 0", "echo no compiler >&2; exit 3", 3, ["no compiler"]),
        ("echo GPU 0", "", 1, ["GPU 0", "runs scripts/benchmark/gpu_check.py sync", "an error"]),
    ],
)
def test_command_writes_all_output_to_one_file(gpu, setup, status, said, tmp_path):
    """With shell scripts in place of what it calls, in a folder of its own."""
    python = 'echo "runs $*"; echo "an error" >&2; case $1 in *gpu_check.py) exit 1;; esac'
    texts = {"scripts/gpu_check.sh": (REPO / "scripts/gpu_check.sh").read_text()}
    texts |= {"scripts/setup.sh": setup, "bin/nvidia-smi": f"#!/bin/sh\n{gpu}"}
    texts |= {".venv/bin/python": f"#!/bin/sh\n{python}"}
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    extra = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "PYTHON": ""}
    command = ["bash", tmp_path / "scripts/gpu_check.sh", "sync"]
    done = subprocess.run(command, env=environment(extra), capture_output=True, text=True)
    assert done.returncode == status
    if status == 2:
        assert said[0] in done.stderr and not (tmp_path / "output").exists()
        return
    (report,) = (tmp_path / "output").iterdir()
    *lines, last = done.stdout.splitlines()
    assert last == f"All of this is in output/{report.name}"
    assert report.read_text().splitlines() == lines[1:]  # the first is from before it
    assert [line for line in said if line not in lines] == []


def test_parts_are_chosen_by_how_they_begin_and_need_a_gpu(check, monkeypatch):
    assert gpu_check.choose_parts([]) == list(gpu_check.PARTS)
    assert gpu_check.choose_parts(["overlap", "learn_g"]) == ["learn_grpo", "overlap"]
    assert set(gpu_check.choose_parts(["quick"])) < set(gpu_check.PARTS)
    status, lines, err = check("sync", "snyc")
    assert (status, lines) == (2, [])
    assert "'snyc'" in err and "sync_ppo_float32" in err
    monkeypatch.setattr(gpu_check, "HAS_GPU", False)
    status, lines, err = check("sync")
    assert (status, lines) == (2, [])
    assert "torch finds no GPU" in err and "driver 580" in err


def test_part_that_fails_leaves_the_next_one_running(check, monkeypatch):
    def fail():
        raise RuntimeError("exit status 1\na.py --flag\nTraceback\nCUDA out of memory")

    parts = {"a": fail, "b": lambda: {"figure": 1.0}, "c": lambda: {"x": 2, "error": "too far"}}
    monkeypatch.setattr(gpu_check, "PARTS", parts)
    status, (*lines, machine, a, b, c), _ = check()
    assert status == 1
    assert [json.loads(line)["part"] for line in lines] == ["machine", "a", "b", "c"]
    assert json.loads(lines[1])["error"].endswith("Traceback\nCUDA out of memory")
    assert machine.startswith("machine: passed")
    assert a.startswith("a: FAILED") and "error CUDA out of memory" in a
    assert b.startswith("b: passed, figure 1,")
    assert c.startswith("c: FAILED, x 2, error too far")
    assert check("b")[0] == 0


def test_machine_that_lacks_what_vllm_needs_fails(monkeypatch):
    monkeypatch.setenv("CC", "/nowhere/gcc")
    monkeypatch.setattr(gpu_check.sysconfig, "get_paths", lambda: {"include": "/nowhere"})
    monkeypatch.setattr(gpu_check, "HAS_GPU", True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    machine = gpu_check.describe_machine()
    assert machine["torch"] == torch.__version__
    assert all(what in machine["error"] for what in ("gcc or clang", "Python.h", "torchvision"))
    assert "capability" not in machine["error"]


# ------------------------------------------------------------------------------------------- runs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("last", "limit", "error"),
    [
        ("sys.exit('at last')", 60, r"exit status 1\n.*program.py --flag (?s:.*)late\nat last\n"),
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


def test_run_tells_which_model_runner_vllm_took(tmp_path):
    """What the script and vLLM in it would do: tell at the level INFO."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os, pathlib, sys\n"
        "if os.environ['VLLM_LOGGING_LEVEL'] == 'INFO':\n"
        "    print('INFO Using V2 Model Runner')\n"
        "print('INFO Maximum concurrency for 1,536 tokens per request: 12.50x')\n"
        "folder = pathlib.Path(sys.argv[2], 'run')\n"
        "folder.mkdir()\n"
        "(folder / 'metrics.jsonl').write_text('{}\\n')\n"
    )
    assert gpu_check.run([str(program)]) == [{"vllm/model_runner": 2, "vllm/at_once": 12.5}]


WITH_VLLM = [part for part in gpu_check.PARTS if part not in gpu_check.PROGRAMS]


@pytest.mark.parametrize("part", WITH_VLLM)
def test_flags_of_a_part_exist_and_an_absent_metric_is_null(part, monkeypatch):
    """A stub of the run: the part itself must fit what the script takes and may leave out."""
    step = {"time/training": 2.0, "time/from_scratch": 9.0, "objective/sequence_lengths": 504.0}
    commands, limits = [], []

    def run(command, time_limit=gpu_check.TIME_LIMIT):
        commands.append(command)
        limits.append(time_limit)
        return [dict(step) for _ in range(6)]

    monkeypatch.setattr(gpu_check, "run", run)
    monkeypatch.setattr(gpu_check, "plan", lambda command: {"plan_gib": 12.5})
    monkeypatch.setattr(gpu_check, "make_random_model", lambda size, folder: None)
    figures = gpu_check.PARTS[part]()
    kind = part.removeprefix("adapters_").partition("_")[0]
    programs = 2 * gpu_check.PROGRAM_LIMIT if kind == "size" else 0
    assert sum(limits) + programs < 600
    for script, *words in commands:
        names = {field.name for field in fields(importlib.import_module(Path(script).stem).Args)}
        flags = [word for word in words if word.startswith("--")]
        assert {flag.removeprefix("--").removeprefix("no-") for flag in flags} <= names
    expected = {
        "sync": {"mismatch/kl": [None] * 6},
        "learn": {"before": None, "after": None, "seconds_of_steps": 12},
        "size": {"learner_gib": None, "plan_gib": 12.5, "time/training": 2},
        "overlap": {"ratio": 1},
    }
    assert expected[kind].items() <= figures.items()
    assert all(("--lora_rank" in words) == part.startswith("adapters") for words in commands)


# ---------------------------------------------------------------------------------------- figures


@pytest.mark.parametrize(
    ("is_broken", "finite"),
    [
        (lambda mask: False, [True, True, True]),
        # As cuDNN is: with a mask, and only where it is on
        (lambda mask: mask and torch.backends.cuda.cudnn_sdp_enabled(), [True, True, False]),
        (lambda mask: True, [False, False, False]),
    ],
)
def test_nan_is_an_error_where_the_scripts_would_meet_it(is_broken, finite, monkeypatch):
    attention = gpu_check.scaled_dot_product_attention

    def broken(query, *tensors, attn_mask=None, **options):
        if query.dtype == torch.bfloat16 and query[0, 0, 0, 0] == 1:  # the logits about -120
            query = query * (math.nan if is_broken(attn_mask is not None) else 1)
        return attention(query, *tensors, attn_mask=attn_mask, **options)

    torch.backends.cuda.enable_cudnn_sdp(False)
    monkeypatch.setattr(gpu_check, "scaled_dot_product_attention", broken)
    monkeypatch.setattr(gpu_check, "LENGTHS", (64,))
    figures = gpu_check.check_attention()
    names = ("finite", "finite_with_mask", "finite_with_mask_and_cudnn")
    assert [figures[name] for name in names] == finite
    assert ("error" in figures) == (not finite[0])
    assert 0 < figures["relative_error"] < 0.02
    assert not torch.backends.cuda.cudnn_sdp_enabled()


DIFFERENCE, RATE = "mismatch/logprob_diff_mean", "eval/verifiable_correct_rate"


@pytest.mark.parametrize(
    ("part", "metric", "value", "is_right"),
    [
        ("sync_ppo_float32", DIFFERENCE, 2e-7, True),
        ("sync_ppo_float32", DIFFERENCE, 0.012, False),
        ("sync_ppo_bfloat16", DIFFERENCE, 0.004, True),
        ("sync_ppo_bfloat16", DIFFERENCE, 0.0135, False),
        ("sync_ppo_bfloat16", DIFFERENCE, math.nan, False),
        ("learn_grpo", RATE, 0.99, True),
        ("learn_grpo", RATE, 0.5, False),
    ],
)
def test_old_weights_and_no_learning_are_errors(part, metric, value, is_right, monkeypatch):
    monkeypatch.setattr(gpu_check, "run", lambda command: [{metric: 1e-7}, {metric: value}])
    assert ("error" not in gpu_check.PARTS[part]()) == is_right


def test_memory_of_each_process_is_the_drivers_peak(tmp_path, monkeypatch):
    """With a shell script for nvidia-smi, whose figures fall the second time."""
    answers = tmp_path / "answers"
    smi = f"""#!/bin/sh
case "$1" in
  --query-gpu=*) echo 20480; exit ;;
esac
echo x >> {answers}
if [ $(wc -l < {answers}) = 1 ]; then echo "17, 10240"; echo "18, 2048"; echo "19, [N/A]"
else echo "17, 5120"; echo "18, 4096"; fi
"""
    (tmp_path / "nvidia-smi").write_text(smi)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(gpu_check, "HAS_GPU", True)
    with gpu_check.PeakMemory() as memory:
        wait_until(lambda: answers.exists() and len(answers.read_text()) >= 6, "three answers")
    assert memory.peak == 20
    assert memory.of_processes == {"17": 10, "18": 4}
