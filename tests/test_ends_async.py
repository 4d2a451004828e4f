"""How a run of ppo_vllm_async.py ends: whatever goes wrong, it ends at once and leaves nothing.

Each fault comes in the second step, from within: helpers/wrapped_async.py. The real vLLM runs where
it has a part in the fault; elsewhere it is stub_vllm, in a process of its own all the same.
"""

import json
import re
import signal

import pytest
import torch
from helpers import REPO
from helpers.endings import check_end, new_mark
from helpers.files import write_text
from helpers.processes import TWO_RANKS
from pyarrow import parquet

pytestmark = pytest.mark.slow

STUB = {"STUB": "1", "PYTHONPATH": str(REPO / "tests" / "helpers" / "stub_vllm")}
KILLED = (
    "concurrent.futures.process.BrokenProcessPool: A process in the process pool was terminated"
)
BURNT = "OSError: the engine is on fire"
OWN = "OSError: out of luck"
AT_WORK = "vllm killed at work"
IDLE = "vllm killed while idle"
LOST = "RuntimeError: vLLM's log-probabilities are off the learner's"

# What happens; with which vLLM, on how many ranks; how the process ends, and by which cause. Of an
# error in vLLM's process there are two lines: there, and here
CASES = [
    (AT_WORK, "real", 1, 1, KILLED, 1),
    (IDLE, "real", 1, 1, "concurrent.futures.process.BrokenProcessPool: A", 1),
    ("vllm raises in a sync", "real", 1, 1, BURNT, 2),
    ("vllm lacks a tensor", "real", 1, 1, LOST, 1),
    ("SIGKILL", "real", 1, -signal.SIGKILL, None, 0),
    ("SIGINT to the group", "real", 1, -signal.SIGINT, None, 0),
    ("vllm raises in generation", "stub", 1, 1, BURNT, 2),
    ("generation thread raises", "stub", 1, 1, OWN, 1),
    ("update raises", "stub", 1, 1, OWN, 1),
    ("generation thread raises, stdout is full", "stub", 1, 1, OWN, 1),
    ("killed in a checkpoint", "stub", 1, -signal.SIGKILL, None, 0),
    ("SIGINT", "stub", 1, -signal.SIGINT, None, 0),
    ("SIGTERM", "stub", 1, -signal.SIGTERM, None, 0),
    ("SIGTERM to the group", "stub", 1, -signal.SIGTERM, None, 0),
    (AT_WORK, "stub", 2, 1, KILLED, 1),
    ("generation thread raises", "stub", 2, 1, OWN, 1),
    ("update raises", "stub", 2, 1, OWN, 1),
    ("SIGKILL", "stub", 2, 1, None, 0),
]


def check_checkpoint(path):
    assert json.loads((path / "state.json").read_text())["completed_steps"] > 0
    assert parquet.read_table(path / "next_rollout.parquet").num_rows > 0
    assert len(list(path.glob("model*.safetensors"))) == 2
    for optimizer in ("optimizer.bin", "optimizer_1.bin"):
        torch.load(path / optimizer)


@pytest.mark.parametrize(
    ("fault", "vllm", "ranks", "returncode", "cause", "lines"),
    CASES,
    ids=[f"{fault}-{ranks} {vllm}" for fault, vllm, ranks, *_ in CASES],
)
def test_fault_ends_the_run_at_once_and_leaves_nothing(
    fault, vllm, ranks, returncode, cause, lines, run_wrapped_script, tmp_path
):
    mark = new_mark()
    env = {**mark, "ACCELERATE_USE_CPU": "true"}
    options = {"local_mini_batch_size": 32, "total_episodes": 10 * 32 * ranks, "save_freq": 1}
    if vllm == "stub":
        env |= STUB
    if vllm == "stub" and (cause is None or fault == "update raises"):  # takes some seconds
        reward = write_text(tmp_path / "reward.py", "def score(*args, **rest):\n    return 1.0\n")
        options |= {"reward_fn": f"{reward}:score", "reward_workers": 1}
    launcher = ()
    if ranks == 2:
        env |= {"FAULT_RANK": "1"}
        launcher = TWO_RANKS
        options |= {"local_rollout_batch_size": 8, "local_mini_batch_size": 16}
    run = run_wrapped_script(
        "ppo_vllm_async.py", fault, tmp_path, launcher=launcher, env=env, timeout=150, **options
    )
    check_end(run.stdout, mark, within=15 if ranks == 1 else 60)
    assert run.returncode == returncode, run.output
    if cause:
        assert len(re.findall(f"^{re.escape(cause)}", run.output, re.MULTILINE)) == lines
        if fault != IDLE:  # its death is noticed at the next call, or during it
            assert run.output.count("in vLLM's process") == (lines > 1 or fault == AT_WORK)
    elif ranks == 1:
        assert "Traceback" not in run.stderr
    assert not (run.run_dir / "model").exists()
    # vLLM that is idle is asked again in step 3
    in_step = {"vllm lacks a tensor": 1, "killed in a checkpoint": 3, IDLE: 3}.get(fault, 2)
    steps = len(run.metrics) if (run.run_dir / "metrics.jsonl").exists() else 0
    assert steps == in_step - 1
    # In step 2 vLLM samples while step_1 is written; the update comes after it
    checkpoints = sorted((run.run_dir / "checkpoints").glob("step_*"))
    assert checkpoints or fault.startswith(("vllm", "generation"))
    assert [path.name for path in checkpoints] in ([], ["step_1"])
    for path in checkpoints:
        check_checkpoint(path)
