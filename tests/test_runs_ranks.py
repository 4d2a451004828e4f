"""Several ranks, several engines, several nodes: they compute what one does, and they end together.

Runs that are compared have real engines. Those that are broken have stubs of vLLM, in processes of
their own as always.
"""

import json
import re
import shutil
import socket
import time
from pathlib import Path

import psutil
import pytest
import torch
from helpers import REPO
from helpers.files import write_text
from helpers.processes import TWO_RANKS, alive, descendants, finish, wait_until
from helpers.runs import VLLM_OPTIONS, batch_of, without_clock

pytestmark = pytest.mark.slow

ON_RANKS = str(REPO / "tests" / "helpers" / "on_ranks.py")
CPU = {"ACCELERATE_USE_CPU": "true"}


def metrics_of(run):
    return [without_clock(line) for line in run.metrics]


def check_equal_to_the_bit(one, other, done=0):
    """done: steps that the other had done before it was resumed; batches of those it has not."""
    assert metrics_of(one) == metrics_of(other)
    for name in ("samples.jsonl", "rollouts.jsonl"):
        assert (one.run_dir / name).read_bytes() == (other.run_dir / name).read_bytes()
    for step in range(done + 1, len(one.metrics) + 1):
        mine, theirs = batch_of(one, step), batch_of(other, step - done)
        for name, value in mine.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(value, theirs[name]), name
            else:
                assert value == theirs[name], name
    weights = [run.run_dir / "model" / "model.safetensors" for run in (one, other)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


# ----------------------------------------------------------------------------------- they are equal


def test_two_engines_of_a_rank_do_what_one_does(vllm_run, run_script, small_eval, tmp_path):
    options = VLLM_OPTIONS | {"eval_dataset": small_eval, "save_batches": False}
    run = run_script("ppo_sync.py", tmp_path, launcher=(ON_RANKS,), env={"ENGINES": "2"}, **options)
    assert run.returncode == 0, run.output
    check_equal_to_the_bit(vllm_run, run)


HALF = {
    "total_episodes": 6 * 32,
    "local_rollout_batch_size": 8,
    "local_mini_batch_size": 8,
    "per_device_train_batch_size": 4,
}


@pytest.fixture(scope="module")
def one_node(run_script, small_eval, tmp_path_factory):
    """Six steps of asynchronous PPO on two ranks, each with an engine."""
    run = run_script(
        "ppo_vllm_async.py",
        tmp_path_factory.mktemp("one_node"),
        launcher=(*TWO_RANKS, ON_RANKS),
        env=CPU,
        eval_dataset=small_eval,
        **HALF,
        save_freq=3,
    )
    assert run.returncode == 0, run.output
    return run


def test_two_nodes_of_a_rank_do_what_a_node_of_two_does(
    one_node, small_eval, tmp_path, start_script
):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    nodes = []
    for rank in range(2):
        launcher = ("-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "1")
        launcher += ("--node_rank", str(rank), "--master_addr", "127.0.0.1")
        launcher += ("--master_port", str(port), ON_RANKS)
        folder = tmp_path / f"node_{rank}"
        options = HALF | {"eval_dataset": small_eval, "output_dir": tmp_path / "node_0"}
        nodes.append(
            start_script("ppo_vllm_async.py", folder, launcher=launcher, env=CPU, **options)
        )
    runs = [finish(node, 240, time.monotonic()) for node in nodes]
    assert [run.returncode for run in runs] == [0, 0], runs[0].output + runs[1].output
    check_equal_to_the_bit(one_node, runs[0])


@pytest.mark.parametrize("ranks", [2, 1])
def test_resumed_ranks_do_what_they_would_have_done(ranks, one_node, run_script, tmp_path):
    """Two ranks again, to the bit; and one, with the batches of both."""
    shutil.copytree(one_node.run_dir, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "model")
    shutil.rmtree(tmp_path / "run" / "batches")
    options = dict(HALF)
    launcher = (*TWO_RANKS, ON_RANKS)
    if ranks == 1:
        options |= {"local_rollout_batch_size": 16, "local_mini_batch_size": 16}
        launcher = (ON_RANKS,)
    arguments = json.loads((one_node.run_dir / "args.json").read_text())
    options["eval_dataset"] = arguments["eval_dataset"]
    checkpoint = tmp_path / "run" / "checkpoints" / "step_3"
    run = run_script(
        "ppo_vllm_async.py",
        tmp_path,
        launcher=launcher,
        env=CPU,
        resume_from_checkpoint=checkpoint,
        **options,
    )
    assert run.returncode == 0, run.output
    if ranks == 2:
        check_equal_to_the_bit(one_node, run, done=3)
        return
    batch, expected = batch_of(run, 1), batch_of(one_node, 4)
    for name in ("prompt_ids", "responses"):
        assert batch[name] == expected[name]
    assert torch.equal(batch["scores"], expected["scores"])
    for name in ("objective/kl", "objective/loss", "optim/grad_norm", "loss/value_avg", "lr"):
        assert run.metrics[3][name] == pytest.approx(one_node.metrics[3][name], rel=1e-5, abs=1e-6)


# ------------------------------------------------------------------------------- they end together

SLOW_REWARD = """
def score(data_source, response, ground_truth, extra_info):
    return 0.5
"""


@pytest.fixture
def two_ranks(start_script, tmp_path):
    """two_ranks("ppo_vllm_async.py", FAULT="raises") -> a process, whose family fills up later.

    Each rank has a stub of vLLM and two reward workers.
    """
    reward = write_text(tmp_path / "reward.py", SLOW_REWARD)

    def start(script, **variables):
        env = {
            **CPU,
            "PYTHONPATH": str(REPO / "tests" / "helpers" / "stub_vllm"),
            "STUB": "1",
            "STUB_FOLDER": str(tmp_path),
            **variables,
        }
        process = start_script(
            script,
            tmp_path,
            launcher=(*TWO_RANKS, ON_RANKS),
            env=env,
            **HALF | {"total_episodes": 32_000},
            reward_fn=f"{reward}:score",
            reward_workers=2,
        )
        process.family = set()
        return process

    return start


def wait_until_both_generate(process):
    """Returns the ranks' engines, by rank, when both of them hang in a request."""

    def engines():
        process.family.update(descendants(process))
        assert process.poll() is None, (process.folder / "stderr").read_text()
        found = [path for path in process.folder.iterdir() if path.name.isdecimal()]
        return found if len(found) == 2 else None

    pids = [int(path.name) for path in wait_until(engines, 120, "two engines that generate")]
    engines = {}
    for pid in pids:
        engine = psutil.Process(pid)
        engines[int(engine.parent().environ()["RANK"])] = engine
    assert engines.keys() == {0, 1}
    return engines


def check_end(process, *causes):
    """Both ranks end within 30 s, by a cause that is told, and leave nothing behind."""
    started_at = time.monotonic()
    process.family.update(descendants(process))
    run = finish(process, 30, started_at)
    assert run.returncode not in (0, 2)
    for cause in causes:
        assert cause in run.output
    wait_until(lambda: not alive(process.family), 10, f"the end of {process.family}")
    lines = re.findall(r"Folders of vLLM: (.*)", run.stdout)
    folders = [Path(folder) for line in lines for folder in line.split()]
    assert len(folders) == 4  # of two engines
    wait_until(lambda: not any(folder.exists() for folder in folders), 10, f"the end of {folders}")
    assert not (run.run_dir / "model").exists()
    return run


def test_engine_that_dies_ends_both_ranks_while_the_other_engine_generates(two_ranks):
    process = two_ranks("ppo_vllm_async.py", STUB_HANGS_AT="3")
    engines = wait_until_both_generate(process)
    engines[1].kill()
    cause = "RuntimeError: vLLM's process died with exit code -9"
    check_end(process, cause, f"RuntimeError: rank 1 failed: {cause}")


def test_rank_that_is_killed_ends_the_other(two_ranks):
    process = two_ranks("ppo_vllm_async.py", STUB_HANGS_AT="3")
    engines = wait_until_both_generate(process)
    engines[1].parent().kill()
    check_end(process)


def test_rank_that_raises_ends_the_other(two_ranks):
    process = two_ranks("ppo_vllm_async.py", FAULT="raises")
    wait_until(
        lambda: (
            process.family.update(descendants(process))
            or "out of luck" in (process.folder / "stderr").read_text()
        ),
        120,
        "the fault",
    )
    run = check_end(process, "OSError: rank 1 is out of luck")
    assert not (run.run_dir / "metrics.jsonl").exists()  # it was in the first step
