"""How a run can end: what goes wrong in it, what is sent to it, and what is left behind."""

import math
import os
import re
import signal
import time
from pathlib import Path

import datasets
import psutil
import pytest
import torch
from helpers import ASYNC, REPO, SCRIPTS
from helpers.files import write_text
from helpers.processes import TWO_RANKS, alive, descendants, finish, shared_memory_of, wait_until
from helpers.runs import batch_of
from transformers import AutoModelForCausalLM, AutoTokenizer

import ppo_sync

# --------------------------------------------------------------- a weight sync that lost something


def test_weights_that_vllm_does_not_have_stop_the_run_before_an_update():
    mask = torch.ones(2, 3)
    args = ppo_sync.Args(dtype="float32")
    near, far = torch.full((2, 3), 1e-4), torch.full((2, 3), 0.01)
    ppo_sync.check_sampler(near, torch.zeros(2, 3), mask, args)
    with pytest.raises(RuntimeError, match="at equal weights"):
        ppo_sync.check_sampler(far, torch.zeros(2, 3), mask, args)
    ppo_sync.check_sampler(far, torch.zeros(2, 3), mask, ppo_sync.Args(dtype="bfloat16"))
    # Not finite: the check of the gradient will see it, and save the batch
    ppo_sync.check_sampler(far * float("nan"), torch.zeros(2, 3), mask, args)


@pytest.mark.slow
def test_tensor_left_out_of_the_sync_stops_the_run(run_script, tmp_path):
    run = run_script(REPO / "tests" / "helpers" / "broken_sync.py", tmp_path)
    assert run.returncode not in (0, 2)
    last = run.stderr.strip().splitlines()[-1]
    assert last.startswith("RuntimeError: ") and "at equal weights" in last


# ----------------------------------------------------------------------------------------- rewards

UNRELIABLE = """
import time

class Unreadable(Exception):
    def __init__(self, *, line):  # pickle makes it again from its arguments, and there it fails
        super().__init__(f"line {line}")

def score(data_source, response, ground_truth, extra_info):
    mood = extra_info["index"] % 10
    if mood == 1:
        time.sleep(1000)
    if mood == 2:
        raise OSError("the grader is out of paper")
    if mood == 7:
        raise Unreadable(line=12)
    return {3: float("nan"), 4: None, 5: "good", 6: float("inf")}.get(mood, 0.25)
"""


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [(), TWO_RANKS], ids=["one process", "two ranks"])
def test_unreliable_reward_costs_its_own_responses_only(launcher, run_script, assets, tmp_path):
    reward = write_text(tmp_path / "reward.py", UNRELIABLE)
    run = run_script(
        "ppo_sync.py",
        tmp_path,
        launcher=launcher,
        env={"ACCELERATE_USE_CPU": "true"},
        timeout=120,
        generation_backend="transformers",
        reward_fn=f"{reward}:score",
        reward_timeout=0.5,
        local_mini_batch_size=16,
        save_batches=True,
    )
    assert run.returncode == 0, run.output
    tokenizer = AutoTokenizer.from_pretrained(assets / "model")
    rows = datasets.Dataset.from_parquet(str(assets / "train.parquet")).to_list()
    index = {row["prompt"][-1]["content"]: row["extra_info"]["index"] for row in rows}
    seen = set()
    for step, line in enumerate(run.metrics, start=1):
        batch = batch_of(run, step)
        texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in batch["prompt_ids"]]
        moods = [index[re.sub(r"[^0-9=]", "", text)] % 10 for text in texts]
        assert batch["scores"].tolist() == [0.0 if 1 <= mood <= 7 else 0.25 for mood in moods]
        assert line["objective/reward_failures"] == sum(1 <= mood <= 7 for mood in moods)
        # Two workers; a worker that takes the place of a hung one starts from modules that are
        # loaded.
        assert line["time/reward"] < 0.5 * math.ceil(moods.count(1) / 2) + 6
        seen |= set(moods)
    assert seen == set(range(10))
    for cause in ("OSError: the grader is out of paper", "TimeoutError", "Unreadable: line 12"):
        assert cause in run.stdout


HANGING = """
import multiprocessing, os, re
from pathlib import Path

def score(data_source, response, ground_truth, extra_info):
    if multiprocessing.parent_process() is not None:
        Path(__file__).with_name(f"hung_{os.getpid()}").touch()
        re.match("(a|aa)+$", 99 * "a" + "b")  # holds the GIL for longer than anybody lives
    return 1.0
"""


@pytest.mark.slow
def test_killed_script_leaves_no_reward_worker(start_script, tmp_path):
    reward = write_text(tmp_path / "reward.py", HANGING)
    options = {"reward_fn": f"{reward}:score", "reward_timeout": 1000}
    process = start_script("ppo_sync.py", tmp_path, generation_backend="transformers", **options)
    wait_until(
        lambda: process.poll() is not None or len(list(tmp_path.glob("hung_*"))) == 2,
        120,
        "two hung workers",
    )
    assert process.poll() is None, (tmp_path / "stderr").read_text()
    family = descendants(process)
    try:
        assert {f"hung_{child.pid}" for child in family} > {
            path.name for path in tmp_path.glob("hung_*")
        }
        process.kill()
        process.wait()
        wait_until(lambda: not alive(family), 10, f"the end of {family}")
    finally:
        for child in alive(family):
            child.kill()


# ----------------------------------------------------------------------------- faults within a run


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [(), TWO_RANKS], ids=["one process", "two ranks"])
@pytest.mark.parametrize("script", ASYNC)
def test_dead_generator_stops_every_rank(script, launcher, run_wrapped_script, tmp_path):
    run = run_wrapped_script(
        script,
        "generator",
        tmp_path,
        launcher=launcher,
        env={"ACCELERATE_USE_CPU": "true"},
        timeout=120,
        local_mini_batch_size=16,
        total_episodes=20 * 32,
    )
    assert run.returncode not in (0, 2)
    cause = "OSError: the engine is on fire"
    if launcher:
        assert cause in run.output
        assert f"RuntimeError: rank 0 failed: {cause}" in run.output
    else:
        assert run.stderr.strip().splitlines()[-1] == cause
    # It was seen before the second step was over: of its two updates, the second was not made.
    assert len(run.metrics) == 1
    assert run.stdout.count("Gradients of an update are there") < 4
    assert not (run.run_dir / "model").exists()


@pytest.mark.slow
@pytest.mark.parametrize("script", ASYNC)
def test_full_disk_at_the_final_save_keeps_the_metrics(script, run_wrapped_script, tmp_path):
    run = run_wrapped_script(script, "disk", tmp_path, total_episodes=2 * 32, timeout=120)
    assert run.returncode not in (0, 2)
    assert "No space left on device" in run.stderr.strip().splitlines()[-1]
    assert len(run.metrics) == 2
    assert not (run.run_dir / "model").exists()


@pytest.mark.slow
@pytest.mark.parametrize("script", ASYNC)
def test_infinite_loss_stops_the_run_and_keeps_the_batch(script, run_script, tmp_path):
    # After one step the weights are out of bounds
    options = {"learning_rate": 1e30, "lr_scheduler_type": "constant"}
    run = run_script(script, tmp_path, total_episodes=320, timeout=120, **options)
    assert run.returncode not in (0, 2)
    last = run.stderr.strip().splitlines()[-1]
    assert last.startswith("FloatingPointError: gradient not finite in step 2")
    assert len(run.metrics) == 1
    assert torch.load(run.run_dir / "bad_batch.pt", weights_only=False)["logprobs"].isnan().any()


# ------------------------------------------------------------------------------- ends from outside


@pytest.fixture(scope="module")
def tireless_model(assets, tmp_path_factory):
    """The debug model with an end token that it never learned to say: its responses are long."""
    model, tokenizer = (
        cls.from_pretrained(assets / "model") for cls in (AutoModelForCausalLM, AutoTokenizer)
    )
    path = tmp_path_factory.mktemp("tireless")
    model.config.eos_token_id = model.generation_config.eos_token_id = 2
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(params=SCRIPTS)
def generating(request, start_script, tireless_model, tmp_path):
    """A run that has made a step and generates for the next, which takes it most of its time."""
    before = set(Path("/dev/shm").glob("tandem_*"))
    process = start_script(
        request.param,
        tmp_path,
        model_name_or_path=tireless_model,
        response_length=160,
        total_episodes=32_000,
    )
    metrics = process.run_dir / "metrics.jsonl"
    wait_until(
        lambda: process.poll() is not None or (metrics.exists() and metrics.read_text()),
        240,
        "a first step",
    )
    assert process.poll() is None, (tmp_path / "stderr").read_text()
    process.family = descendants(process)
    process.engine = next(
        child for child in process.family if "spawn_main" in "".join(child.cmdline())
    )
    (process.sync_dir,) = set(Path("/dev/shm").glob("tandem_*")) - before
    process.shared_memory = set().union(*(shared_memory_of(child) for child in process.family))
    yield process
    for child in alive(process.family):
        child.kill()


def check_nothing_left(process):
    wait_until(lambda: not alive(process.family), 10, f"the end of {process.family}")
    for path in (process.sync_dir, *process.shared_memory):
        wait_until(lambda path=path: not os.path.exists(path), 10, f"the end of {path}")


@pytest.mark.slow
def test_dead_engine_ends_the_run(generating):
    started_at = time.monotonic()
    generating.engine.kill()
    run = finish(generating, 15, started_at)
    assert run.returncode not in (0, 2)
    last = run.stderr.strip().splitlines()[-1]
    assert "vLLM's process" in last and "died" in last
    check_nothing_left(generating)
    assert not (generating.run_dir / "model").exists()


@pytest.mark.slow
@pytest.mark.parametrize("generating", ASYNC, indirect=True)
def test_killed_script_leaves_no_engine(generating):
    generating.kill()
    generating.wait()
    check_nothing_left(generating)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("generating", "kill"),
    # A terminal sends it to everyone in the foreground, vLLM's processes too; others to the script
    # alone.
    [(SCRIPTS[0], os.killpg), (SCRIPTS[1], os.kill), (SCRIPTS[2], os.killpg)],
    indirect=["generating"],
)
def test_ctrl_c_leaves_no_engine(generating, kill):
    started_at = time.monotonic()
    kill(generating.pid, signal.SIGINT)
    run = finish(generating, 15, started_at)
    assert run.returncode == 130
    assert run.stderr.strip().splitlines()[-1] == "Interrupted"
    check_nothing_left(generating)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("generating", "kill"),
    [(SCRIPTS[1], os.killpg), (SCRIPTS[2], os.kill)],
    indirect=["generating"],
)
def test_terminated_script_leaves_no_engine(generating, kill):
    started_at = time.monotonic()
    kill(generating.pid, signal.SIGTERM)
    run = finish(generating, 15, started_at)
    assert run.returncode == 143
    assert run.stderr.strip().splitlines()[-1] == "Terminated"
    check_nothing_left(generating)


@pytest.mark.slow
def test_finished_run_leaves_nothing_behind(vllm_run):
    ours = [
        p
        for p in psutil.process_iter(["cmdline"])
        if str(vllm_run.run_dir.parent) in (p.info["cmdline"] or [])
    ]
    assert ours == []
    assert not any(word in vllm_run.stderr for word in ("Traceback", "leaked", "UserWarning"))
