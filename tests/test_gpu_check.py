"""scripts/gpu_check.sh: its first parts on this machine, and what becomes of a part that fails."""

import doctest
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
from helpers.processes import end, environment

# What a run writes in a step, in part
STEP = {
    "time/training": 2.0,
    "time/generation": 1.0,
    "time/from_scratch": 9.0,
    "val/sequence_lengths": 504.0,
}


def lines_of(text):
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture
def check(monkeypatch, capsys):
    """check(*words) -> (exit status, lines of standard output, standard error)."""

    def check(*words):
        monkeypatch.setattr(sys, "argv", ["gpu_check.py", *words])
        with pytest.raises(SystemExit) as end:
            gpu_check.main()
        out, err = capsys.readouterr()
        return end.value.code, lines_of(out), err

    return check


# ---------------------------------------------------------------------------------------- choosing


@pytest.mark.parametrize(
    ("beginnings", "chosen"),
    [
        ([], list(gpu_check.PARTS)),
        (
            ["sync"],
            ["sync_ppo_float32", "sync_ppo_bfloat16", "sync_grpo_float32", "sync_grpo_bfloat16"],
        ),
        (["size_0.5B"], ["size_0.5B_ppo", "size_0.5B_grpo"]),
        (["transformers", "overlap", "over"], ["overlap", "transformers"]),
    ],
)
def test_parts_are_chosen_by_how_they_begin(beginnings, chosen):
    assert gpu_check.choose_parts(beginnings) == chosen


def test_bad_name_is_one_line_and_status_2(check):
    status, lines, err = check("sync", "snyc")
    assert (status, lines) == (2, [])
    assert len(err.splitlines()) == 1
    assert "'snyc'" in err and "sync_ppo_float32" in err


# ----------------------------------------------------------------------------------------- failing


def test_part_that_fails_leaves_the_next_one_running(check, monkeypatch):
    def fail():
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(gpu_check, "PARTS", {"a": fail, "b": lambda: {"figure": 1.0}})
    status, (machine, a, b), _ = check()
    assert status == 1
    assert machine["date"].endswith("UTC") and machine["torch"]
    assert a["part"] == "a" and a["error"] == "RuntimeError: CUDA out of memory"
    assert b["part"] == "b" and b["figure"] == 1.0 and "error" not in b
    assert {line["device"] for line in (machine, a, b)} == {machine["device"]}


def test_status_is_0_where_all_parts_run(check, monkeypatch):
    monkeypatch.setattr(gpu_check, "PARTS", {"a": lambda: {"figure": 1.0}})
    assert check("a")[0] == 0


@pytest.mark.slow
def test_error_has_the_end_of_the_output(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("import sys\nprint('early ' * 2000)\nprint('late')\nsys.exit('at last')\n")
    with pytest.raises(RuntimeError) as error:
        gpu_check.run([str(program), "--flag"])
    message = str(error.value)
    assert "program.py --flag\nexit status 1\n" in message
    assert "late\n" in message and message.endswith("at last\n")
    assert len(message) < 4000


@pytest.mark.slow
def test_run_that_hangs_is_ended_and_says_where_it_was(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("import time\n\n\ndef wait_for_weights():\n    time.sleep(100)\n\n\n")
    with open(program, "a") as file:
        file.write("wait_for_weights()\n")
    with pytest.raises(RuntimeError, match=r"not over after 2 s\n(?s:.*)in wait_for_weights"):
        gpu_check.run([str(program)], time_limit=2)


# ----------------------------------------------------------------- what only a GPU runs in earnest


@pytest.mark.parametrize("has_gpu", [False, True])
@pytest.mark.parametrize("part", gpu_check.PARTS)
def test_flags_of_a_part_exist_and_an_absent_metric_is_null(part, has_gpu, monkeypatch):
    """A stub of the run: the part itself must fit what the script takes and may leave out."""
    commands, limits = [], []

    def run(command, time_limit=gpu_check.TIME_LIMIT):
        commands.append(command)
        limits.append(time_limit)
        return [dict(STEP) for _ in range(6)]

    monkeypatch.setattr(gpu_check, "run", run)
    monkeypatch.setattr(gpu_check, "HAS_GPU", has_gpu)
    monkeypatch.setattr(gpu_check, "make_random_model", lambda size, folder: None)
    figures = gpu_check.PARTS[part]()
    json.dumps(figures)
    assert sum(limits) < 600
    for script, *words in commands:
        names = {field.name for field in fields(importlib.import_module(script[:-3]).Args)}
        flags = [word for word in words if word.startswith("--")]
        assert {flag.removeprefix("--").removeprefix("no-") for flag in flags} <= names
    if part.startswith("sync"):
        assert figures["mismatch/kl"] == [None] * 6
    if part.startswith("learn"):
        assert (figures["before"], figures["after"], figures["seconds_of_steps"]) == (
            None,
            None,
            12,
        )
    if part.startswith("size"):
        assert figures["perf/response_tokens_per_second"] is None
        assert figures["learner_gib"] is None
        assert (figures["val/sequence_lengths"], figures["time/training"]) == (504, 2)
    if part == "overlap":
        assert figures["ratio"] == 1


def test_doctests_are_right():
    result = doctest.testmod(gpu_check)
    assert (result.attempted, result.failed) == (2, 0)


def test_debug_command_is_that_of_the_file():
    script, *flags = gpu_check.debug_command("grpo")
    assert script == "grpo_vllm_async.py"
    assert flags[flags.index("--total_episodes") + 1] == "51200"
    text = (REPO / "scripts" / "train" / "debug" / "grpo.sh").read_text()
    assert all(flag in text for flag in flags)
    assert flags[-2:] == ["--penalty_reward_value", "-1"]


def test_random_model_has_the_debug_tasks_end_token_in_a_large_vocabulary(
    assets, tmp_path, monkeypatch
):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # As 0.5 B, but 2 layers of 64
    small = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    monkeypatch.setitem(gpu_check.SHAPES, "0.5B", gpu_check.SHAPES["0.5B"] | small)
    gpu_check.make_random_model("0.5B", str(tmp_path))
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.get_input_embeddings().weight.shape == (151_936, 64)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert tokenizer.eos_token == "<|end|>"


# ------------------------------------------------------------------------------------ real runs


@pytest.mark.slow
def test_sampler_and_learner_agree(assets):
    parts = ["sync_grpo_float32", "sync_grpo_bfloat16"]
    largest_differences = []
    # Both at once: a run is for the most part imports
    processes = [
        subprocess.Popen(
            ["bash", "scripts/gpu_check.sh", part],
            cwd=REPO,
            env=environment({"PYTHON": sys.executable}),
            stdout=subprocess.PIPE,
            text=True,
        )
        for part in parts
    ]
    try:
        for part, process in zip(parts, processes, strict=True):
            output, _ = process.communicate(timeout=300)
            assert process.returncode == 0, output
            machine, line = lines_of(output)
            assert (machine["part"], machine["cpus"]) == ("machine", os.cpu_count())
            assert (line["part"], line["device"]) == (part, machine["device"])
            seconds = line["time/weight_sync"]
            assert len(seconds) == 4 and all(0 < value < 10 for value in seconds)
            for name in ("logprob_diff_mean", "logprob_diff_max", "kl"):
                values = line[f"mismatch/{name}"]
                assert len(values) == 5 and all(map(math.isfinite, values))
            largest_differences.append(max(line["mismatch/logprob_diff_max"]))
    finally:
        for process in processes:
            end(process)
    float32, bfloat16 = largest_differences
    assert 0 < float32 < 1e-3
    assert float32 < bfloat16
