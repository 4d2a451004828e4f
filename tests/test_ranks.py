"""Several ranks and engines: which are where, who answers what, and that the outcome is one.

At the end a run of two ranks, from whose checkpoint others go on. vLLM is stub_vllm there;
test_runs.py has two ranks with the real one.
"""

import copy
import queue
import shutil
import socket
import time

import numpy as np
import pytest
import torch
from helpers.processes import CPU, STUB, TWO_RANKS, finish
from helpers.rollouts import plain, response_of
from helpers.runs import batch_of, check_equal_to_the_bit, response_tokens
from safetensors.numpy import load_file

import ppo_vllm_async as script
from ppo_vllm_async import Args, Prompt

# --------------------------------------------------------------------------- where the engines are

LEARNERS = [(gpu,) for gpu in range(8)]


@pytest.mark.parametrize(
    ("nodes", "learners", "gpus", "size", "of_node"),
    [
        (1, 1, (), 1, LEARNERS[:1]),
        (2, 8, (), 1, LEARNERS),
        (1, 6, (6, 7), 1, [(6,), (7,)]),
        (2, 4, (4, 5, 6, 7), 2, [(4, 5), (6, 7)]),
        (3, 2, (2, 5, 3, 4), 2, [(2, 5), (3, 4)]),  # in the order of the flag
        (1, 2, (2, 3, 4, 5, 6, 7), 3, [(2, 3, 4), (5, 6, 7)]),
    ],
)
def test_engines_belong_to_the_first_ranks_of_each_node(nodes, learners, gpus, size, of_node):
    args = Args(vllm_gpus=gpus, vllm_tensor_parallel_size=size)
    args.world_size, args.local_world_size = nodes * learners, learners
    count, expected = nodes * len(of_node), []
    for node in range(nodes):
        index = node * len(of_node)
        expected += [(index + i, count, own) for i, own in enumerate(of_node)]
        expected += [None] * (learners - len(of_node))
    ranks = range(nodes * learners)
    assert [script.place_engine(rank, 8, args) for rank in ranks] == expected
    on_the_cpu = [placement and (*placement[:2], ()) for placement in expected]
    assert [script.place_engine(rank, 0, args) for rank in ranks] == on_the_cpu


# ------------------------------------------------------------------------- who answers which prompt


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_shares_are_those_of_the_definition(count, group):
    """Group i of n goes to engine i * count // n."""
    for num_groups in range(20):
        items = [i for i in range(num_groups) for _ in range(group)]
        shares = [items[script.share_of(len(items), index, count, group)] for index in range(count)]
        assert [item for share in shares for item in share] == items
        for index, share in enumerate(shares):
            assert all(i * count // num_groups == index for i in share)


class Engine(script.VLLM):
    """Says the first token of a prompt, and its seed; the version is 4."""

    def __init__(self, index, count):
        self.index, self.count, self.policy_version = index, count, 4
        self.args = Args(stop_token_ids=(2,))

    def submit(self, function, prompts, seeds, temperature, version, args):
        assert function is script.sample_responses and version == 4
        self.answer = [
            response_of(prompt, [prompt.token_ids[0], seed], [temperature, -0.5], stopped=seed == 2)
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]
        return self

    def result(self):
        return self.answer


PROMPTS = [Prompt(f"row {i // 2}", "", [i // 2, 50], [], "any", "1", None) for i in range(10)]
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
    engines = [*(Engine(index, count) for index in range(count)), None]
    shares = [script.generate_rollout(vllm, None, None, REQUEST, ARGS) for vllm in engines]
    assert shares[-1] is None
    group = Group(shares, monkeypatch)
    rollouts = [script.gather_rollout(share, group) for share in shares]
    for rollout in rollouts:
        assert rollout.policy_version == 4
        expected = [
            response_of(prompt, [i // 2, 100 + i], [0.7, -0.5], stopped=False)
            for i, prompt in enumerate(PROMPTS)
        ]
        assert plain(rollout.responses) == plain(expected)
        # Evaluations have the same seeds whenever they are
        expected = [
            response_of(prompt, [i, i], [0.0, -0.5], stopped=i == 2)
            for i, prompt in enumerate(REQUEST.eval_prompts)
        ]
        assert plain(rollout.eval_responses) == plain(expected)
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

HALVES = {
    "total_episodes": 4 * 32,
    "local_rollout_batch_size": 8,
    "local_mini_batch_size": 8,
    "per_device_train_batch_size": 4,
    "num_evals": 2,
    "save_batches": True,
}
WHOLE = HALVES | {"local_rollout_batch_size": 16, "local_mini_batch_size": 16}


@pytest.fixture(scope="module")
def two_ranks(run_script, small_eval, tmp_path_factory):
    """Four steps of two updates on one node, whose ranks share an engine."""
    run = run_script(
        "ppo_vllm_async.py",
        tmp_path_factory.mktemp("two_ranks"),
        launcher=TWO_RANKS,
        env=CPU | STUB,
        eval_dataset=small_eval,
        save_freq=2,
        vllm_gpus=2,
        **HALVES,
    )
    assert run.returncode == 0, run.output
    assert run.stdout.count("Folders of vLLM") == 1
    return run


@pytest.fixture
def resume(two_ranks, start_script, small_eval, tmp_path):
    """resume(options, launcher of each node): the run goes on after its second step."""
    shutil.copytree(two_ranks.run_dir, tmp_path / "run")
    for name in ("model", "batches"):
        shutil.rmtree(tmp_path / "run" / name)
    options = {
        "eval_dataset": small_eval,
        "output_dir": tmp_path,
        "resume_from_checkpoint": tmp_path / "run" / "checkpoints" / "step_2",
    }

    def go_on(changes, *launchers):
        nodes = [
            start_script(
                "ppo_vllm_async.py",
                tmp_path / f"node_{rank}",
                launcher=launcher,
                # A node of one rank would have a thread for each core, and sums of another order
                env=CPU | STUB | {"OMP_NUM_THREADS": "1"},
                **options | changes,
            )
            for rank, launcher in enumerate(launchers)
        ]
        runs = [finish(node, 300, time.monotonic()) for node in nodes]
        output = "".join(run.output for run in runs)
        assert [run.returncode for run in runs] == [0] * len(nodes), output
        assert output.count("Folders of vLLM") == len(nodes)
        runs[0].run_dir = tmp_path / "run"
        return runs[0]

    return go_on


@pytest.mark.slow
def test_responses_travel_and_are_saved_as_arrays(two_ranks):
    """Lists would be pickled number by number, and a checkpoint would have to be trusted."""
    batch = batch_of(two_ranks, 3)
    saved = load_file(two_ranks.run_dir / "checkpoints/step_2/next_rollout.safetensors")
    logprobs = response_tokens(batch["mask"], batch["sampler_logprobs"])
    for i, ids in enumerate(batch["responses"]):
        assert saved[f"token_ids {i}"].dtype == np.int32
        assert saved[f"logprobs {i}"].dtype == np.float32
        assert saved[f"token_ids {i}"].tolist() == ids
        assert saved[f"logprobs {i}"].tolist() == logprobs[i].tolist()
    files = {path.suffix or path.name for path in two_ranks.run_dir.glob("checkpoints/*/**/*")}
    folders = {"policy", "policy_optimizer", "value_model", "value_model_optimizer"}
    assert files == {".json", ".jsonl", ".safetensors", ".distcp", ".metadata", *folders}


@pytest.mark.slow
def test_two_nodes_with_an_engine_each_do_what_one_node_with_one_does(two_ranks, resume):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    node = ("-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "1")
    node += ("--master_addr", "127.0.0.1", "--master_port", port, "--node_rank")
    run = resume(HALVES, (*node, "0"), (*node, "1"))
    check_equal_to_the_bit(two_ranks, run, steps=(3, 4))


@pytest.mark.slow
def test_one_rank_goes_on_with_the_batches_of_two(two_ranks, resume):
    run = resume(WHOLE, ())
    batch, expected = batch_of(run, 3), batch_of(two_ranks, 3)
    assert batch["sequences"] == expected["sequences"]
    assert torch.equal(batch["scores"], expected["scores"])
    # Their sums are of another order, and their padding is another
    for name, value in two_ranks.metrics[2].items():
        if not name.startswith(("time/", "perf/")):
            assert run.metrics[2][name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
