"""How a run ends: whatever goes wrong, it ends at once and leaves nothing behind.

Each fault comes in the second step: helpers/run_with_fault.py. The real vLLM runs where it has a
part in it; elsewhere it is stub_vllm, in a process of its own all the same. The scripts have one
text but for the order of the steps, so two of them have a few faults only.
"""

import re
import signal

import pytest
import torch
from helpers import SCRIPTS
from helpers.endings import check_end, new_mark
from helpers.files import write_text
from helpers.processes import CPU, STUB, TWO_RANKS

pytestmark = pytest.mark.slow

SYNC, ASYNC, GRPO = SCRIPTS
# How the line begins that says the cause
BROKEN = "concurrent.futures.process.BrokenProcessPool: A"
KILLED = f"{BROKEN} process in the process pool was terminated"
BURNT = "OSError: the engine is on fire"
OWN = "OSError: out of luck"
LOST = "RuntimeError: vLLM's log-probabilities are off the learner's"
NOT_FINITE = "FloatingPointError: the gradient is not finite"
AT_WORK, IDLE = "vllm killed at work", "vllm killed while idle"

# A fault; of which script, with which vLLM, on how many ranks; the exit status, and the cause
CASES = [
    (AT_WORK, ASYNC, "real", 1, 1, KILLED),
    (IDLE, ASYNC, "real", 1, 1, BROKEN),
    ("vllm raises in a sync", ASYNC, "real", 1, 1, BURNT),
    ("vllm lacks a tensor", ASYNC, "real", 1, 1, LOST),
    ("SIGKILL", ASYNC, "real", 1, -signal.SIGKILL, None),
    ("SIGINT to the group", ASYNC, "real", 1, -signal.SIGINT, None),
    ("generation raises, stdout is full", ASYNC, "stub", 1, 1, OWN),
    ("killed in a checkpoint", ASYNC, "stub", 1, -signal.SIGKILL, None),
    ("vllm raises in generation", ASYNC, "stub", 2, 1, BURNT),
    ("gradient is not finite", ASYNC, "stub", 2, 1, NOT_FINITE),
    ("SIGKILL", ASYNC, "stub", 2, 1, None),
    (AT_WORK, SYNC, "stub", 1, 1, KILLED),
    ("SIGTERM", SYNC, "stub", 1, -signal.SIGTERM, None),
    ("SIGKILL", SYNC, "stub", 1, -signal.SIGKILL, None),
    ("update raises", SYNC, "stub", 2, 1, OWN),
    ("update raises, killed at its end", ASYNC, "stub", 1, -signal.SIGKILL, OWN),
    ("update raises", ASYNC, "stub, FSDP2", 2, 1, OWN),
    ("generation raises", GRPO, "stub", 1, 1, OWN),
]


@pytest.mark.parametrize(
    ("fault", "script", "vllm", "ranks", "returncode", "cause"),
    CASES,
    ids=[f"{fault}-{script[:-3]} {ranks} {vllm}" for fault, script, vllm, ranks, *_ in CASES],
)
def test_fault_ends_the_run_at_once_and_leaves_nothing(
    fault, script, vllm, ranks, returncode, cause, run_with_fault, tmp_path
):
    mark = new_mark()
    env = mark | CPU | {"FAULT_RANK": str(ranks - 1)}
    options = {"total_episodes": 10 * 32, "save_freq": 1}
    if "FSDP2" in vllm:
        env["FSDP2"] = "1"
    if "stub" in vllm:
        env |= STUB
        if cause is None:  # then nobody can end them but the system
            reward = write_text(tmp_path / "reward.py", "def score(*_, **rest):\n    return 1.0\n")
            options |= {"reward_fn": f"{reward}:score", "reward_workers": 1}
    launcher = ()
    if ranks == 2:
        launcher = TWO_RANKS
        options |= {"local_rollout_batch_size": 8, "local_mini_batch_size": 16}
    run = run_with_fault(script, fault, tmp_path, launcher=launcher, env=env, **options)

    check_end(run.stdout, mark, within=15 if ranks == 1 else 60)
    assert run.returncode == returncode, run.output
    assert not (run.run_dir / "model").exists()
    if cause is None:
        assert "Traceback" not in run.stderr or ranks == 2  # the launcher's
    else:
        # Of an error in vLLM's process there is one there and one here
        told = len(re.findall(f"^{re.escape(cause)}", run.output, re.MULTILINE))
        assert told == {BURNT: 2, NOT_FINITE: told or 1}.get(cause, 1)
    if cause == NOT_FINITE:
        assert torch.load(run.run_dir / "bad_batch.pt", weights_only=False)["mask"].any()

    # vLLM that is idle is asked again in step 3
    in_step = {"vllm lacks a tensor": 1, "killed in a checkpoint": 3, IDLE: 3}.get(fault, 2)
    metrics = run.run_dir / "metrics.jsonl"
    assert (len(run.metrics) if metrics.exists() else 0) == in_step - 1
    names = [path.name for path in (run.run_dir / "checkpoints").glob("step_*")]
    # In step 2 vLLM samples before step_1 is written, or meanwhile; the update comes after it
    may_lack_it = fault.startswith(("vllm", "generation"))
    assert names == ["step_1"] or (may_lack_it and names == [])
