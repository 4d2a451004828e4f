"""Several ranks and engines: which are where, who answers what, and that the outcome is one.

The runs are with stub_vllm; test_refill.py and test_inflight.py have two ranks with the real one.
"""

import copy
import json
import queue
import shutil
import socket
import time

import pytest
import torch
from helpers.processes import CPU, STUB, TWO_RANKS, finish
from helpers.rollouts import plain, response_of
from helpers.runs import batch_of, check_equal_to_the_bit

import ppo_vllm_async as script
from ppo_vllm_async import Args, Prompt

# ------------------------------------------------------------------------- who answers which prompt


class Engine(script.VLLM):
    """Says the first token of a prompt, and its seed; the version is 4."""

    def __init__(self, index, count):
        self.engine_index, self.num_engines, self.policy_version = index, count, 4
        self.args = Args(stop_token_ids=(2,))

    def submit(self, function, prompts, seeds, temperature, args):
        assert function is script.sample_responses
        self.answer = [
            response_of(prompt, [prompt.token_ids[0], seed], [temperature, -0.5])
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]
        return self

    def result(self):
        return self.answer


PROMPTS = [Prompt(f"row {i // 2}", "", [i // 2, 50], "any", "1", None) for i in range(10)]
REQUEST = script.Request(PROMPTS, list(range(100, 110)), PROMPTS[1:6:2])
ARGS = Args(number_samples_per_prompt=2, temperature=0.7, eval_temperature=0.0)


@pytest.fixture
def without_rewards(monkeypatch):
    monkeypatch.setattr(script, "grade_responses", lambda responses, *_: responses)


class Group:
    """Of ranks that hand over these shares, as all_gather_object gives them to each."""

    def __init__(self, shares, monkeypatch):
        self.size = lambda: len(shares)
        monkeypatch.setattr(torch.distributed, "all_gather_object", self.gather)
        self.shares = shares

    def gather(self, shares, mine, group):
        assert group is self and any(mine is share for share in self.shares)
        shares[:] = copy.deepcopy(self.shares)


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_shares_of_all_ranks_are_what_one_engine_answers(count, without_rewards, monkeypatch):
    """Of eight engines some have nothing to do; and a rank more has no engine."""
    engines = [*(Engine(index, count) for index in range(count)), script.NoEngine()]
    shares = [script.generate_rollout(vllm, None, None, REQUEST, ARGS) for vllm in engines]
    assert shares[-1].responses == shares[-1].eval_responses == []
    group, held_out = Group(shares, monkeypatch), REQUEST.eval_prompts
    expected = [response_of(PROMPTS[i], [i // 2, 100 + i], [0.7, -0.5]) for i in range(10)]
    # Evaluations have the same seeds whenever they are
    evaluated = [response_of(held_out[i], [i, i], [0.0, -0.5]) for i in range(3)]
    for share in shares:
        rollout = script.gather_rollout(share, group)
        assert rollout.policy_version == 4
        assert plain(rollout.responses) == plain(expected)
        assert plain(rollout.eval_responses) == plain(evaluated)
        assert set(rollout.times) == {"time/generation", "time/reward", "time/evaluation"}
    assert script.gather_rollout(shares[0], None) is shares[0]


def test_thread_answers_each_request_and_its_error_ends_the_process(without_rewards, monkeypatch):
    """Python would end the thread alone, and the learner would wait for ever."""
    prompts_Q, response_Q, errors = queue.Queue(), queue.Queue(), []
    monkeypatch.setattr(script, "end_at_once", errors.append)
    for request in (REQUEST, script.Request(PROMPTS[:4], [7] * 4, []), "not a request"):
        prompts_Q.put(request)
    script.generation_thread(Engine(0, 1), None, None, prompts_Q, response_Q, ARGS)
    rollouts, (error,) = list(response_Q.queue), errors
    assert [len(rollout.responses) for rollout in rollouts] == [10, 4]
    assert [len(rollout.eval_responses) for rollout in rollouts] == [3, 0]
    assert all("time/wait_for_prompts" in rollout.times for rollout in rollouts)
    assert isinstance(error, AttributeError)


# -------------------------------------------------------------------------------- runs of two ranks


@pytest.fixture(scope="module")
def run_nodes(start_script, small_eval):
    """run_nodes([folder, ...], [launcher, ...], env): what the first of these nodes has made."""
    options = {"eval_dataset": small_eval, "num_evals": 2, "total_episodes": 4 * 32, "beta": 0.1}
    options |= dict.fromkeys(("local_rollout_batch_size", "local_mini_batch_size"), 8)
    options |= {"per_device_train_batch_size": 4, "save_freq": 2, "save_batches": True}

    def run(folders, launchers, env, **more):
        nodes = [
            start_script("ppo_vllm_async.py", *place, env=STUB | env, **options | more)
            for place in zip(folders, launchers, strict=True)
        ]
        runs = [finish(node, 900, time.monotonic()) for node in nodes]
        for one in runs:
            assert one.returncode == 0 and one.stdout.count("Folders of vLLM") == 1, one.output
        return runs[0]

    return run


@pytest.fixture(scope="module")
def one_node(run_nodes, tmp_path_factory):
    """Its two ranks share an engine. No variable of accelerate's says that they are on a CPU."""
    folder = tmp_path_factory.mktemp("one_node")
    return run_nodes([folder], [TWO_RANKS], {"CUDA_VISIBLE_DEVICES": ""}, vllm_gpus=2)


@pytest.mark.slow
def test_ranks_of_torchrun_meet_on_a_cpu_and_count_for_both(one_node):
    """Each would have trained alone, on the same files."""
    assert json.loads((one_node.run_dir / "args.json").read_text())["world_size"] == 2
    for step, line in enumerate(one_node.metrics, 1):
        lengths = [len(response) for _, response in batch_of(one_node, step)["sequences"]]
        assert line["episode"] == 32 * step and len(lengths) == 32
        assert line["val/num_stop_token_ids"] == 32 * line["objective/stop_rate"]
        assert line["val/sequence_lengths"] == sum(lengths) / 32


@pytest.mark.slow
def test_two_nodes_with_an_engine_each_go_on_from_the_checkpoint_of_one(
    one_node, run_nodes, tmp_path
):
    shutil.copytree(one_node.run_dir, tmp_path / "run")
    for name in ("model", "batches"):
        shutil.rmtree(tmp_path / "run" / name)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    node = ("-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "1")
    node += ("--master_addr", "127.0.0.1", "--master_port", port, "--node_rank")
    options = {"resume_from_checkpoint": tmp_path / "run" / "checkpoints" / "step_2"}
    folders, launchers = [tmp_path / "0", tmp_path / "1"], [(*node, "0"), (*node, "1")]
    resumed = run_nodes(folders, launchers, CPU, output_dir=tmp_path, **options)
    resumed.run_dir = tmp_path / "run"
    check_equal_to_the_bit(one_node, resumed, steps=(3, 4))
