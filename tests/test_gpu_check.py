"""scripts/gpu_check.sh without a GPU: what it says; and with stubs, what becomes of its parts."""

import importlib
import json
import math
import os
import subprocess
import sys
from dataclasses import fields
from types import SimpleNamespace

import gpu_check
import pytest
import torch
from helpers import REPO, faked_cuda
from helpers.processes import environment

import ppo_vllm_async

RATES = {"bfloat16_tflops": 500.0, "tf32_tflops": 250.0, "float32_tflops": 50.0}
SWITCH = "VLLM_USE_V2_MODEL_RUNNER"


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


def note_variable(noted, steps):
    """A stub of run() that notes which model runner vLLM was asked for."""

    def run(command, time_limit=gpu_check.TIME_LIMIT):
        noted.append(os.environ.get(SWITCH))
        return steps

    return run


# ------------------------------------------------------------------------------------- the command


def run_command(folder, *words, gpu="GPU 0: NVIDIA H100", **stubs):
    """gpu_check.sh in a folder of its own, with shell scripts in place of what it calls."""
    (folder / "scripts").mkdir()
    (folder / "bin").mkdir()
    command = folder / "scripts" / "gpu_check.sh"
    command.write_text((REPO / "scripts" / "gpu_check.sh").read_text())
    (folder / "scripts" / "setup.sh").write_text(stubs.pop("setup", "echo set up"))
    programs = {"nvidia-smi": f"echo {gpu}" if gpu else "exit 9"} | stubs
    for name, text in programs.items():
        (folder / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / "bin" / name).chmod(0o755)
    extra = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
    if "python" in stubs:
        extra["PYTHON"] = str(folder / "bin" / "python")
    return subprocess.run(
        ["bash", command, *words], env=environment(extra), capture_output=True, text=True
    )


def test_without_a_gpu_nothing_is_set_up_or_run(tmp_path):
    done = run_command(tmp_path, gpu=None)
    assert done.returncode == 2
    assert "no NVIDIA GPU" in done.stderr and "set up" not in done.stdout
    assert not (tmp_path / "output").exists()


def test_torch_without_a_gpu_is_told_and_nothing_runs(check, monkeypatch):
    monkeypatch.setattr(gpu_check, "HAS_GPU", False)
    monkeypatch.setattr(gpu_check, "PARTS", {"a": lambda: pytest.fail("it runs")})
    for words in ([], ["--program", "rates"]):
        status, lines, err = check(*words)
        assert (status, lines) == (2, [])
        assert "torch finds no GPU" in err and "driver 580" in err


def test_all_output_is_in_one_file_that_the_last_line_names(tmp_path):
    stub = 'echo "runs $*"; echo "an error" >&2; case $1 in *gpu_check.py) exit 1;; esac'
    done = run_command(tmp_path, "sync", python=stub)
    assert done.returncode == 1
    *lines, last = done.stdout.splitlines()
    (report,) = (tmp_path / "output").iterdir()
    assert last == f"All of this is in output/{report.name}"
    text = report.read_text()
    for line in ("GPU 0: NVIDIA H100", "an error", "runs scripts/benchmark/gpu_check.py sync"):
        assert line in text.splitlines() and line in lines


def test_set_up_that_fails_ends_it_and_is_in_the_file(tmp_path):
    done = run_command(tmp_path, setup="echo setup: no compiler >&2; exit 3")
    assert done.returncode == 3
    (report,) = (tmp_path / "output").iterdir()
    assert report.read_text().endswith("setup: no compiler\n")


# ----------------------------------------------------------------------------------------- main()


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
        raise RuntimeError("exit status 1\na.py --flag\nTraceback\nCUDA out of memory")

    parts = {"a": fail, "b": lambda: {"figure": 1.0}, "c": lambda: {"x": 2, "error": "too far"}}
    monkeypatch.setattr(gpu_check, "PARTS", parts)
    status, (*lines, head, machine, a, b, c), _ = check()
    assert status == 1
    first, *others = map(json.loads, lines)
    assert (first["part"], first["torch"]) == ("machine", "2.13.0")
    assert [line.get("error") for line in others] == [
        "RuntimeError: exit status 1\na.py --flag\nTraceback\nCUDA out of memory",
        None,
        "too far",
    ]
    assert head.split() == ["part", "result", "seconds", "figures"]
    assert machine.split()[:2] == ["machine", "passed"]
    assert a.split()[:2] == ["a", "FAILED"]
    assert a.endswith("error: RuntimeError: exit status 1 ... CUDA out of memory")
    assert b.split()[:2] == ["b", "passed"] and b.endswith("figure 1")
    assert c.split()[:2] == ["c", "FAILED"] and c.endswith("error: too far, x 2")
    assert check("b")[0] == 0


def test_machine_that_lacks_what_vllm_compiles_with_fails(monkeypatch):
    machine = gpu_check.describe_machine()
    assert machine["date"].endswith("UTC") and machine["cpus"] == os.cpu_count()
    assert machine["torch"] == torch.__version__
    monkeypatch.setenv("CC", "/nowhere/gcc")
    monkeypatch.setattr(gpu_check.sysconfig, "get_paths", lambda: {"include": "/nowhere"})
    error = gpu_check.describe_machine()["error"]
    assert "gcc or clang" in error and "Python.h" in error


# ----------------------------------------------------------------------------------------- runs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("last", "limit", "error"),
    [
        ("sys.exit('at last')", 60, r"exit status 1\n.*program.py --flag\n(?s:.*)late\nat last\n"),
        (
            "wait_for_weights()",
            3,
            r"not over after 3 s\n.*program.py --flag\n(?s:.*)late\n(?s:.*)in wait_for_weights",
        ),
    ],
)
def test_error_has_the_end_of_the_output_and_where_it_hung(last, limit, error, tmp_path):
    program = tmp_path / "program.py"
    text = "import sys, time\ndef wait_for_weights():\n    time.sleep(100)\n"
    program.write_text(f"{text}print('early ' * 2000)\nprint('late', flush=True)\n{last}\n")
    with pytest.raises(RuntimeError, match=error) as raised:
        gpu_check.run([str(program), "--flag"], time_limit=limit)
    assert len(str(raised.value)) < 4000


@pytest.mark.parametrize("part", gpu_check.WITH_VLLM)
def test_flags_of_a_part_exist_and_an_absent_metric_is_null(part, monkeypatch):
    """A stub of the run: the part itself must fit what the script takes and may leave out."""
    step = {"time/training": 2.0, "time/from_scratch": 9.0, "objective/sequence_lengths": 504.0}
    commands, limits = [], []

    def run(command, time_limit=gpu_check.TIME_LIMIT):
        commands.append(command)
        limits.append(time_limit)
        return [dict(step) for _ in range(6)]

    monkeypatch.setattr(gpu_check, "run", run)
    monkeypatch.setattr(gpu_check, "run_program", lambda name: RATES)
    monkeypatch.setattr(gpu_check, "plan", lambda command: {"plan_gib": 12.5})
    monkeypatch.setattr(gpu_check, "make_random_model", lambda size, folder: None)
    figures = gpu_check.PARTS[part]()
    kind = part.removeprefix("adapters_").partition("_")[0]
    programs = 2 * gpu_check.PROGRAM_LIMIT if kind == "size" else 0
    assert sum(limits) + programs < 600
    for script, *words in commands:
        names = {field.name for field in fields(importlib.import_module(script[:-3]).Args)}
        flags = [word for word in words if word.startswith("--")]
        assert {flag.removeprefix("--").removeprefix("no-") for flag in flags} <= names
    expected = {
        "sync": {"mismatch/kl": [None] * 6},
        "learn": {"before": None, "after": None, "seconds_of_steps": 12},
        "size": {"learner_gib": None, "plan_gib": 12.5, "time/training": 2} | RATES,
        "overlap": {"ratio": 1},
    }
    assert expected[kind].items() <= figures.items()
    assert all(("--lora_rank" in words) == part.startswith("adapters") for words in commands)


# ----------------------------------------------------------------------------- vLLM's model runner


def test_every_part_with_vllm_comes_again_with_the_first_model_runner(monkeypatch):
    noted = []
    monkeypatch.delenv(SWITCH, raising=False)
    monkeypatch.setattr(gpu_check, "run", note_variable(noted, [{}] * 5))
    for name in gpu_check.WITH_VLLM:
        assert f"v1_{name}" in gpu_check.PARTS
    gpu_check.PARTS["sync_grpo_bfloat16"]()
    gpu_check.PARTS["v1_sync_grpo_bfloat16"]()
    assert noted == [None, "0"]
    assert SWITCH not in os.environ


def test_run_tells_which_model_runner_vllm_took(tmp_path):
    """What the script and vLLM in it would do: obey the variable, and tell at the level INFO."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os, pathlib, sys\n"
        f"second = os.environ.get('{SWITCH}') != '0'\n"
        "if second and os.environ['VLLM_LOGGING_LEVEL'] == 'INFO':\n"
        "    print('INFO Using V2 Model Runner')\n"
        "folder = pathlib.Path(sys.argv[2], 'run')\n"
        "folder.mkdir()\n"
        "(folder / 'metrics.jsonl').write_text('{}\\n')\n"
    )
    part = gpu_check.partial(gpu_check.run, [str(program)])
    assert part() == [{"vllm/model_runner": 2}]
    assert gpu_check.with_first_runner(part) == [{"vllm/model_runner": 1}]


def test_script_hands_the_variable_to_its_engine(monkeypatch):
    faked_cuda.add_gpus(monkeypatch.setattr, [])
    monkeypatch.setenv(SWITCH, "0")
    args = ppo_vllm_async.Args()
    variables, _ = ppo_vllm_async.vllm_settings([2], "folder", 16, args)
    assert variables[SWITCH] == "0" and variables["CUDA_VISIBLE_DEVICES"] == "2"


@pytest.mark.slow
def test_installed_vllm_knows_the_variable(monkeypatch):
    from vllm import envs
    from vllm.config import VllmConfig

    config = SimpleNamespace(attention_config=SimpleNamespace(hisparse_config=None))
    for value, is_second in (("0", False), ("1", True)):
        monkeypatch.setenv(SWITCH, value)
        assert envs.environment_variables[SWITCH]() is is_second
        assert VllmConfig.use_v2_model_runner.fget(config) is is_second
    monkeypatch.delenv(SWITCH)
    assert envs.environment_variables[SWITCH]() is None


# ------------------------------------------------------------------------------- attention, rates


def test_programs_have_cudnns_attention_off(check, monkeypatch, capsys):
    def tell():
        return {"is_on": torch.backends.cuda.cudnn_sdp_enabled()}

    monkeypatch.setattr(gpu_check, "PROGRAMS", {"tell": tell})
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--program", "tell"])
    torch.backends.cuda.enable_cudnn_sdp(True)
    gpu_check.main()
    assert json.loads(capsys.readouterr().out) == {"is_on": False}


@pytest.fixture
def cudnn_is_off():
    torch.backends.cuda.enable_cudnn_sdp(False)


def test_gradients_of_attention_are_right_here(cudnn_is_off, monkeypatch):
    monkeypatch.setattr(gpu_check, "LENGTHS", (64, 192))
    figures = gpu_check.check_attention()
    assert [name for name in figures if name.startswith("finite")] == [
        "finite",
        "finite_with_mask",
        "finite_with_cudnn",
        "finite_with_mask_and_cudnn",
    ]
    assert all(figures[name] for name in figures if name.startswith("finite"))
    assert 0 < figures["relative_error"] < 0.02 and "error" not in figures
    assert not torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize(
    ("is_broken", "finite", "error"),
    [
        # As cuDNN is: with a mask, and only where it is on
        (lambda mask: mask and torch.backends.cuda.cudnn_sdp_enabled(), [True, True, False], None),
        (lambda mask: mask, [True, False, False], None),
        (lambda mask: True, [False, False, False], "not finite"),
    ],
)
def test_nan_is_an_error_where_the_scripts_would_meet_it(
    is_broken, finite, error, cudnn_is_off, monkeypatch
):
    attention = gpu_check.scaled_dot_product_attention

    def broken(query, *tensors, attn_mask=None, **options):
        if query.dtype == torch.bfloat16 and query[0, 0, 0, 0] == 1:  # the logits about -120
            query = query * (math.nan if is_broken(attn_mask is not None) else 1)
        return attention(query, *tensors, attn_mask=attn_mask, **options)

    monkeypatch.setattr(gpu_check, "scaled_dot_product_attention", broken)
    monkeypatch.setattr(gpu_check, "LENGTHS", (64,))
    figures = gpu_check.check_attention()
    names = ("finite", "finite_with_mask", "finite_with_mask_and_cudnn")
    assert [figures[name] for name in names] == finite
    assert (error is None and "error" not in figures) or error in figures["error"]


def test_logits_of_the_check_are_where_cudnn_fails(monkeypatch):
    """A row's logsumexp must be below -88.7, and key heads grouped."""
    calls = []

    def note(query, key, value, **options):
        calls.append((query, key))
        return query * key.mean() * value.mean()

    monkeypatch.setattr(gpu_check, "scaled_dot_product_attention", note)
    gpu_check.attend(64, True, False, torch.bfloat16)
    ((query, key),) = calls
    assert query.shape[1] == 14 and key.shape[1] == 2
    logits = query[:, :2].float() @ key.float().transpose(-1, -2) / 8
    assert logits.min() > -125 and logits.logsumexp(-1).max() < -88.7
    assert {length % 128 for length in gpu_check.LENGTHS} == {0, 64}


def test_rates_are_measured():
    rates = gpu_check.measure_rates()
    assert rates.keys() == RATES.keys() and min(rates.values()) > 0


# ---------------------------------------------------------------------------- figures of the parts


def test_arithmetic_of_a_step_by_hand(monkeypatch):
    monkeypatch.setattr(gpu_check, "VOCAB_SIZE", 7)
    shape = {
        "hidden_size": 2,
        "intermediate_size": 3,
        "num_hidden_layers": 5,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    # A layer: 4 + 4 weights for queries and output, 2 + 2 for keys and values, 3 x 6 for the MLP.
    # Body: 2 x 5 x 30 x 10 tokens = 3,000 operations at 1,000 a second: 3 s.
    # Head: 2 x 7 x 2 x 4 tokens = 112 operations at 100 a second: 1.12 s
    rates = {"bfloat16_tflops": 1e-9, "tf32_tflops": 1e-10}
    ppo = gpu_check.arithmetic(shape, gpu_check.PPO, 10, 4, rates)
    grpo = gpu_check.arithmetic(shape, gpu_check.GRPO, 10, 4, rates)
    assert ppo == {"arithmetic/forward": 11.24, "arithmetic/update": 28.48}
    assert grpo == {"arithmetic/forward": 2.06, "arithmetic/update": 16.48}


@pytest.mark.parametrize(
    ("dtype", "difference", "is_right"),
    # By one update old weights, --async_mode had 0.012 to 0.053 in the steps 2 to 5 on a CPU
    [
        ("float32", 2e-7, True),
        ("float32", 0.012, False),
        ("bfloat16", 0.004, True),
        ("bfloat16", 0.0135, False),
        ("bfloat16", math.nan, False),
        ("bfloat16", None, False),
    ],
)
def test_sync_fails_where_the_difference_is_more_than_rounding(
    dtype, difference, is_right, monkeypatch
):
    values = [None] if difference is None else [1e-7, difference, 1e-7]
    steps = [{"mismatch/logprob_diff_mean": value} for value in values]
    monkeypatch.setattr(gpu_check, "run", note_variable([], steps))
    figures = gpu_check.check_sync(gpu_check.PPO, dtype)
    assert ("error" not in figures) == is_right


@pytest.mark.parametrize(("after", "is_right"), [(0.99, True), (0.5, False)])
def test_learning_fails_where_nothing_is_learnt(after, is_right, monkeypatch):
    steps = [{"eval/verifiable_correct_rate": rate} for rate in (0.46, after)]
    monkeypatch.setattr(gpu_check, "run", note_variable([], steps))
    figures = gpu_check.check_learning("grpo")
    assert (figures["before"], figures["after"]) == (0.46, after)
    assert ("error" not in figures) == is_right


@pytest.mark.parametrize(
    ("out", "status", "expected"),
    [
        ("  memory   of a learner: about 21.5 GiB, of the 54.4 GiB\n", 0, {"plan_gib": 21.5}),
        ("  memory   of a learner: about 51.2 MiB\n", 0, {"plan_gib": 0.05}),
        ("  steps    3\n", 2, {"plan_gib": None, "plan_refuses": "memory: it needs about 9 GiB"}),
    ],
)
def test_plan_is_read_from_the_preflight(out, status, expected, monkeypatch):
    def run(words, **_):
        assert "--num_gpus" in words and words[-1] == "flag"
        return subprocess.CompletedProcess(words, status, out, "memory: it needs about 9 GiB\n")

    monkeypatch.setattr(gpu_check.subprocess, "run", run)
    assert expected.items() <= gpu_check.plan(["script.py", "flag"]).items()


@pytest.mark.slow
def test_preflight_says_what_the_plan_is_read_from(assets):
    command = ["grpo_vllm_async.py", "--dataset", str(assets / "train.parquet")]
    figures = gpu_check.plan([*command, "--model_name_or_path", str(assets / "model")])
    assert figures["plan_gib"] > 0 and "plan_refuses" not in figures


def test_size_that_does_not_fit_is_skipped(check, monkeypatch):
    plan = {"plan_gib": 59.0, "plan_refuses": "memory: a learner needs about 59.0 GiB"}
    monkeypatch.setattr(gpu_check, "run_program", lambda name: RATES)
    monkeypatch.setattr(gpu_check, "plan", lambda command: plan)
    monkeypatch.setattr(gpu_check, "make_random_model", lambda size, folder: None)
    monkeypatch.setattr(gpu_check, "run", lambda *_: pytest.fail("it runs"))
    status, lines, _ = check("size_1.5B_ppo")
    assert status == 0
    assert lines[-1].split()[:2] == ["size_1.5B_ppo", "skipped"] and "plan_gib 59" in lines[-1]


@pytest.mark.slow
def test_sampler_and_learner_agree_on_this_machine(assets):
    line = gpu_check.check_sync(gpu_check.PPO, "float32")
    assert "error" not in line and line["vllm/model_runner"] == 1  # as on all CPUs
    assert len(line["time/weight_sync"]) == 4
    for name in ("logprob_diff_mean", "logprob_diff_max", "kl"):
        assert len(line[f"mismatch/{name}"]) == 5
        assert all(map(math.isfinite, line[f"mismatch/{name}"]))
    assert 0 < max(line["mismatch/logprob_diff_max"]) < 1e-3
