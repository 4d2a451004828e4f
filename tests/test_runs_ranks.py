"""Several ranks and several nodes compute what one does. How they end: test_ends_async.py."""

import json
import shutil
import socket
import time

import pytest
import torch
from helpers import REPO
from helpers.processes import TWO_RANKS, finish
from helpers.runs import batch_of, without_clock

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
