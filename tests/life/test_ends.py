"""How a run ends: whatever goes wrong, it ends at once and leaves nothing behind.

Each fault comes in the second step: helpers/run_with_fault.py. The real vLLM runs where it has a
part in it; elsewhere it is stub_vllm, in a process of its own all the same. The scripts have one
text but for the order of the steps, so two of them have a few faults only.
"""

import os
import re
import signal
import tempfile
import time
from pathlib import Path

import pytest
import torch
from helpers import SCRIPTS
from helpers.files import write_text
from helpers.processes import (
    CPU,
    ONE_RANK,
    STUB,
    TWO_RANKS,
    folders_of_vllm,
    new_mark,
    processes_with,
    wait_until,
)

pytestmark = pytest.mark.slow

SYNC, ASYNC, GRPO = SCRIPTS
# How the line begins that says the cause
BROKEN = "concurrent.futures.process.BrokenProcessPool: A process in the process pool"
BURNT = "OSError: the engine is on fire"
OWN = "OSError: out of luck"
NOT_FINITE = "FloatingPointError: the gradient is not finite"

# A fault; of which script, with which vLLM, on how many ranks; the exit status, and the cause
CASES = [
    ("vllm killed at work", ASYNC, "stub", 1, 1, BROKEN),
    ("SIGKILL", ASYNC, "real", 1, -signal.SIGKILL, None),
    ("generation raises, stdout is full", GRPO, "stub", 1, 1, OWN),
    ("vllm raises in generation", ASYNC, "stub", 2, 1, BURNT),
    ("gradient is not finite", ASYNC, "stub", 2, 1, NOT_FINITE),
    # What a user has started is the launcher
    ("SIGINT to the group", SYNC, "real, launched", 1, -signal.SIGINT, None),
    ("SIGHUP of the launcher", SYNC, "stub, launched", 1, -signal.SIGHUP, None),
    ("SIGKILL of the launcher", ASYNC, "stub, torchrun", 1, -signal.SIGKILL, None),
]
TORCHRUN = (*TWO_RANKS[:-1], "1")
HALVES = {"local_rollout_batch_size": 8, "local_mini_batch_size": 16}


def own_reward(folder):
    reward = write_text(folder / "reward.py", "def score(*_, **rest):\n    return 1.0\n")
    return {"reward_fn": f"{reward}:score", "reward_workers": 1}


def check_end(run, mark, within):
    """Check that a run ended soon after its fault, and that nothing is left of it.

    Soon means within that many seconds, or on a slow machine sooner than the fault came.
    """
    ((fault, names),) = re.findall(r"^Fault at (\S+) with(.*)$", run.stdout, re.MULTILINE)
    assert time.monotonic() - float(fault) < max(within, run.seconds / 2)
    try:
        wait_until(lambda: not processes_with(mark), f"the end of {processes_with(mark)}")
    finally:
        for process in processes_with(mark):
            process.kill()
    folders = folders_of_vllm(run.stdout)
    assert folders
    assert not [path for path in (*folders, *names.split()) if os.path.exists(path)]


@pytest.mark.parametrize(
    ("fault", "script", "vllm", "ranks", "returncode", "cause"),
    CASES,
    ids=[f"{fault}-{script[:-3]} {ranks} {vllm}" for fault, script, vllm, ranks, *_ in CASES],
)
def test_fault_ends_the_run_at_once_and_leaves_nothing(
    fault, script, vllm, ranks, returncode, cause, run_with_fault, tmp_path
):
    mark = new_mark()
    env = mark | CPU | {"FAULT_RANK": str(ranks - 1)} | (STUB if "stub" in vllm else {})
    options = {"total_episodes": 10 * 32, "save_freq": 1}
    if "stub" in vllm and cause is None:  # then nobody can end workers but the system
        options |= own_reward(tmp_path)
    launcher = {"launched": ONE_RANK, "torchrun": TORCHRUN}.get(vllm.partition(", ")[2])
    options |= {"ranks": ranks, "launcher": launcher}
    options |= HALVES if ranks == 2 else {}
    # A short name: sockets have them of 107 bytes at most
    with tempfile.TemporaryDirectory() as temporary:
        env["TMPDIR"] = temporary
        run = run_with_fault(script, fault, tmp_path, env=env, **options)
        check_end(run, mark, within=15 if ranks == 1 else 60)
        # But for logs of torch's launcher, its cache, and the socket by which workers were forked
        others = ("torch", "pymp-")
        left = [name for name in os.listdir(temporary) if not name.startswith(others)]

    assert not left
    assert run.returncode == returncode, run.output
    assert not (run.run_dir / "model").exists()
    if cause is None:
        # A launcher prints one of its own
        assert "Traceback" not in run.stderr or launcher
    else:
        # Of an error in vLLM's process there is one there and one here
        told = len(re.findall(f"^{re.escape(cause)}", run.output, re.MULTILINE))
        assert told == {BURNT: 2, NOT_FINITE: told or 1}.get(cause, 1)
    if cause == NOT_FINITE:
        assert torch.load(run.run_dir / "bad_batch.pt", weights_only=False)["mask"].any()

    metrics = run.run_dir / "metrics.jsonl"
    steps = len(run.metrics) if metrics.exists() else 0
    # A launcher takes a moment to die
    assert steps == 1 or ("launcher" in fault and steps > 1)
    names = [path.name for path in (run.run_dir / "checkpoints").glob("step_*")]
    # In step 2 vLLM samples before step_1 is written, or meanwhile; the update comes after it
    may_lack_it = fault.startswith(("vllm", "generation"))
    assert "step_1" in names or (may_lack_it and names == [])
    told = re.findall(r"^To resume from step .*_checkpoint (.*)$", run.stdout, re.MULTILINE)
    assert {Path(path).name for path in told} >= set(names)
