"""Several ranks and engines: which are where, who answers which prompts, who waits for whom.

Here ranks and engines are made up, but for the last part: two real ranks, without engines.
test_runs_ranks.py has runs.
"""

import json
import os
import queue
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from helpers import REPO
from helpers.engines import engine_of_pipes
from helpers.processes import environment
from helpers.rollouts import tiny_args

import ppo_sync

# --------------------------------------------------------------------------- where the engines are


@pytest.fixture
def engines_of_ranks(monkeypatch):
    """engines_of_ranks(nodes, learners, gpus, args): what make_engines makes, rank by rank."""

    def make(nodes, learners, gpus, args):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        counts = []  # of all ranks; the first pass is for these
        for _ in ("count", "make"):
            made = []
            for rank in range(nodes * learners):
                monkeypatch.setenv("RANK", str(rank))
                monkeypatch.setenv("LOCAL_RANK", str(rank % learners))

                def exchange(group, count, rank=rank):
                    assert group == "the group"
                    if len(counts) < nodes * learners:
                        counts.append(count)
                        return counts
                    assert counts[rank] == count
                    return counts

                monkeypatch.setattr(ppo_sync, "exchange", exchange)
                made.append(ppo_sync.make_engines("the group", args))
        return made

    return make


def test_engines_of_two_nodes_belong_to_the_first_rank_of_each(engines_of_ranks):
    """Four learners on each, and two engines of two GPUs."""
    args = tiny_args(vllm_gpus=(4, 5, 6, 7), vllm_tensor_parallel_size=2)
    made = engines_of_ranks(nodes=2, learners=4, gpus=8, args=args)
    owners = [rank for rank, engines in enumerate(made) for _ in engines]
    engines = [engine for engines in made for engine in engines]
    assert owners == [0, 0, 4, 4]
    assert [engine.gpus for engine in engines] == [(4, 5), (6, 7)] * 2
    assert [(engine.index, engine.count) for engine in engines] == [(i, 4) for i in range(4)]
    assert all(engine.args is args for engine in engines)


def test_each_learner_has_an_engine_on_its_own_gpu(engines_of_ranks):
    made = engines_of_ranks(nodes=2, learners=8, gpus=8, args=tiny_args())
    assert [[engine.gpus for engine in engines] for engines in made] == [
        [(gpu,)] for gpu in [*range(8), *range(8)]
    ]
    assert [engines[0].index for engines in made] == list(range(16))


def test_each_learner_has_an_engine_on_the_cpu(engines_of_ranks):
    made = engines_of_ranks(nodes=1, learners=3, gpus=0, args=tiny_args())
    assert [[engine.gpus for engine in engines] for engines in made] == [[()]] * 3


@pytest.mark.parametrize(
    ("gpus", "size", "engines"),
    [
        ((7,), 1, [(7,)]),
        ((6, 7), 1, [(6,), (7,)]),
        ((2, 5, 3, 4), 2, [(2, 5), (3, 4)]),  # in the order of the flag
        ((4, 5, 6, 7), 4, [(4, 5, 6, 7)]),
        ((2, 3, 4, 5, 6, 7), 3, [(2, 3, 4), (5, 6, 7)]),
    ],
)
def test_gpus_of_vllm_are_shared_out_in_the_order_of_the_flag(gpus, size, engines):
    assert ppo_sync.place_engines(gpus, size, local_rank=0, num_gpus=8) == engines
    assert ppo_sync.place_engines(gpus, size, local_rank=1, num_gpus=8) == []


@pytest.mark.parametrize(
    ("nodes", "learners", "gpus", "options", "place"),
    [
        (1, 1, 0, {}, "one for each learner"),
        (1, 3, 0, {}, "one for each learner"),
        (2, 8, 8, {}, "one on each learner's GPU"),
        (1, 6, 8, {"vllm_gpus": (6, 7)}, "on GPU 6, 7"),
        (
            2,
            4,
            8,
            {"vllm_gpus": (4, 5, 6, 7), "vllm_tensor_parallel_size": 2},
            "on GPU 4, 5, 6, 7 of each of 2 nodes",
        ),
    ],
)
def test_plan_has_as_many_engines_as_there_will_be(
    nodes, learners, gpus, options, place, engines_of_ranks, monkeypatch
):
    args = tiny_args(world_size=nodes * learners, **options)
    made = engines_of_ranks(nodes, learners, gpus, args)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(learners))
    count = sum(map(len, made))
    assert ppo_sync.describe_engines(args) == f"{count} of vLLM, {place}"


# ------------------------------------------------------------------------- an engine's environment


@pytest.fixture
def eight_gpus(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)


@pytest.mark.parametrize(
    ("own", "gpus", "visible"),
    [
        (None, (6,), "6"),
        (None, (2, 5), "2,5"),
        ("", (0,), "0"),
        ("4,5,6,7", (2, 3), "6,7"),
        ("GPU-8f1e,GPU-03ab,GPU-77cd", (2, 0), "GPU-77cd,GPU-8f1e"),
    ],
)
def test_engine_sees_its_own_gpus_alone(own, gpus, visible, eight_gpus, monkeypatch):
    """The indices are of what the user lets the learners see."""
    if own is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", own)
    found = ppo_sync.vllm_environment(gpus, "folder")
    assert found["CUDA_VISIBLE_DEVICES"] == visible


def test_engine_on_the_cpu_is_told_nothing_of_gpus(eight_gpus, monkeypatch):
    assert "CUDA_VISIBLE_DEVICES" not in ppo_sync.vllm_environment((), "folder")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = ppo_sync.vllm_environment((), "folder")
    assert found["CUDA_VISIBLE_DEVICES"] == ""
    assert found["VLLM_CPU_KVCACHE_SPACE"] == found["TORCH_COMPILE_DISABLE"] == "1"
    assert found["VLLM_ALLOW_INSECURE_SERIALIZATION"] == "0"


def test_engine_on_a_gpu_may_compile_and_reads_handles(eight_gpus, monkeypatch):
    monkeypatch.delenv("TORCH_COMPILE_DISABLE", raising=False)
    found = ppo_sync.vllm_environment((1,), "folder")
    assert "TORCH_COMPILE_DISABLE" not in found
    assert found["VLLM_ALLOW_INSECURE_SERIALIZATION"] == "1"


@pytest.mark.parametrize(
    ("cores", "ranks", "threads"), [(2, None, 1), (16, None, 8), (16, 4, 2), (16, 8, 1), (2, 4, 1)]
)
def test_engines_of_a_node_share_half_of_its_cores(cores, ranks, threads, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "77")  # the learner's
    if ranks is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    assert ppo_sync.vllm_environment((), "folder")["OMP_NUM_THREADS"] == str(threads)


def test_engine_is_no_rank_of_the_learners(monkeypatch):
    launchers = ["RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"]
    launchers += ["MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"]
    for name in launchers:
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")  # what the user sets is for vLLM
    monkeypatch.setenv("RANKING", "mine")
    found = ppo_sync.vllm_environment((), "folder")
    assert [name for name in launchers if name in found] == []
    assert found["VLLM_LOGGING_LEVEL"] == "DEBUG" and found["RANKING"] == "mine"
    assert found["TMPDIR"] == "folder"


# ------------------------------------------------------------------------- who answers which prompt


@pytest.mark.parametrize("group", [1, 2, 3])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8])
def test_shares_are_those_of_the_definition(count, group):
    """Group i of n goes to engine i * count // n. They partition the list, in its order."""
    for num_groups in range(20):
        items = [(i, sample) for i in range(num_groups) for sample in range(group)]
        shares = [ppo_sync.share_of(items, index, count, group) for index in range(count)]
        for index, share in enumerate(shares):
            groups = [i for i in range(num_groups) if i * count // num_groups == index]
            assert share == [(i, sample) for i in groups for sample in range(group)]
        assert [item for share in shares for item in share] == items
        sizes = [len(share) // group for share in shares]
        assert max(sizes) - min(sizes) <= 1


PROMPTS = [
    ppo_sync.Prompt(f"row {row}", f"text {row}", [row, 50], [], "any", str(row), None)
    for row in range(5)
    for _ in range(2)
]
SEEDS = [100 + i for i in range(10)]
HELD_OUT = PROMPTS[1:6:2]


def answer(prompt_ids, seeds, temperature, args):
    """What an engine samples of each prompt: its first token, and its seed."""
    responses = [[ids[0], seed] for ids, seed in zip(prompt_ids, seeds, strict=True)]
    return responses, [[-temperature, -0.5] for _ in responses], 3


def work(engine, seconds=0.0, calls=1, seen=None):
    """In a thread: answers what the engine is sent, each after so many seconds."""

    def run():
        for _ in range(calls):
            function, args = engine.theirs.recv()
            assert function is ppo_sync.sample_responses
            if seen is not None:
                seen.append(args)
            time.sleep(seconds)
            try:
                engine.theirs.send((answer(*args), None, ""))
            except Exception as error:  # it would be a hang
                engine.theirs.send((None, error, ""))

    threading.Thread(target=run, daemon=True).start()


def sample(engines, prompts=PROMPTS, seeds=SEEDS, num_samples=2):
    return ppo_sync.sample_share(engines, prompts, seeds, 0.7, num_samples, tiny_args())


@pytest.mark.parametrize("slow", [0, 1, 2])
def test_answers_are_in_order_whichever_engine_is_slow(slow):
    engines = [engine_of_pipes(index, count=3) for index in range(3)]
    for index, engine in enumerate(engines):
        work(engine, seconds=0.3 * (index == slow))
    prompts, responses, logprobs, version = sample(engines)
    assert prompts == PROMPTS
    assert responses == [[i // 2, 100 + i] for i in range(10)]
    assert logprobs == [[-0.7, -0.5]] * 10
    assert version == 3


def test_samples_of_a_prompt_are_of_one_engine():
    """Their prompt is computed once there: vLLM keeps it in its prefix cache."""
    engines, seen = [engine_of_pipes(index, count=2) for index in range(2)], [[], []]
    for engine, of_engine in zip(engines, seen, strict=True):
        work(engine, seen=of_engine)
    sample(engines)
    rows = [[ids[0] for ids in prompt_ids] for ((prompt_ids, *_),) in seen]
    assert rows == [[0, 0, 1, 1, 2, 2], [3, 3, 4, 4]]


def test_rank_samples_its_own_share_alone():
    """Rank 0 of three owns one engine, rank 1 two, rank 2 none."""
    of_ranks, index = [], 0
    for count in (1, 2, 0):
        engines = [engine_of_pipes(index + i, count=3) for i in range(count)]
        index += count
        for engine in engines:
            work(engine)
        of_ranks.append(sample(engines))
    (prompts_0, responses_0, *_), (prompts_1, responses_1, *_), of_rank_2 = of_ranks
    assert prompts_0 == PROMPTS[:4] and prompts_1 == PROMPTS[4:]
    assert responses_0 + responses_1 == [[i // 2, 100 + i] for i in range(10)]
    assert of_rank_2 == ([], [], [], None)


def test_engine_may_have_nothing_to_do():
    engines = [engine_of_pipes(index, count=3) for index in range(3)]
    for engine in engines:
        work(engine)
    prompts, responses, _, version = sample(engines, PROMPTS[:2], SEEDS[:2])
    assert prompts == PROMPTS[:2] and responses == [[0, 100], [0, 101]] and version == 3


@pytest.mark.parametrize("dies", [False, True])
@pytest.mark.parametrize("failing", [0, 1])
def test_failure_of_an_engine_is_raised_while_another_generates(failing, dies):
    engines = [engine_of_pipes(index, count=2) for index in range(2)]
    work(engines[1 - failing], seconds=20)

    def fail():
        engines[failing].theirs.recv()
        time.sleep(0.2)
        if dies:
            engines[failing].life.close()
        else:
            engines[failing].theirs.send((None, KeyError("this one"), "its traceback"))

    threading.Thread(target=fail, daemon=True).start()
    started_at = time.monotonic()
    expected = (RuntimeError, "died with exit code -9") if dies else (KeyError, "this one")
    with pytest.raises(expected[0], match=expected[1]):
        sample(engines)
    assert time.monotonic() - started_at < 5


class Worker:
    """Calls compute_score in this process."""

    def score(self, prompt, text):
        return ppo_sync.verifiable_reward(None, prompt, text)


def test_shares_of_two_ranks_are_the_answers_of_one(monkeypatch):
    def score(data_source, response, ground_truth):
        if response == "4-108":
            raise OSError("the grader is out of paper")
        return float(response.startswith(ground_truth)) + 0.5 * (response == "2-202")

    monkeypatch.setattr(ppo_sync, "compute_score", score)
    tokenizer = SimpleNamespace(
        batch_decode=lambda responses, skip_special_tokens: [
            "-".join(map(str, response)) for response in responses
        ]
    )
    args = tiny_args(number_samples_per_prompt=2, temperature=0.7, eval_temperature=0.2)
    request = ppo_sync.Request(8, PROMPTS, SEEDS, HELD_OUT, [200, 201, 202])

    def generate(index, count):
        engine = engine_of_pipes(index, count)
        work(engine, calls=2)
        return ppo_sync.generate_rollout([engine], [Worker()], tokenizer, args, request)

    shares, whole = [generate(0, 2), generate(1, 2)], generate(0, 1)
    assert [len(share.answers.texts) for share in shares] == [6, 4]
    assert [len(share.eval_answers.texts) for share in shares] == [2, 1]
    for name in ("answers", "eval_answers"):
        joined = ppo_sync.join_answers([getattr(share, name) for share in shares])
        assert joined == getattr(whole, name)
    assert whole.answers.responses == [[i // 2, 100 + i] for i in range(10)]
    assert whole.answers.sampler_logprobs == [[-0.7, -0.5]] * 10
    assert whole.eval_answers.texts == ["0-200", "1-201", "2-202"]
    assert whole.eval_answers.sampler_logprobs == [[-0.2, -0.5]] * 3
    assert whole.answers.verifiable == [1.0] * 8 + [None, 1.0]
    assert whole.answers.failures[8] == "OSError: the grader is out of paper"
    assert whole.eval_answers.verifiable == [1.0, 1.0, 1.5]
    assert whole.policy_version == 3 and whole.request is request
    assert whole.times.keys() == {"generation", "evaluation", "reward"}


# ---------------------------------------------------------------------------------- one for another


class MadeUpGroup:
    """A group in which this is rank 1; the other ranks give what stands in `others`."""

    def __init__(self, others, monkeypatch):
        self.others = others
        monkeypatch.setattr(torch.distributed, "all_gather_object", self.gather)

    def size(self):
        return 1 + len(self.others)

    def gather(self, states, mine, group):
        assert group is self
        self.mine = mine
        states[:] = [self.others[0], mine, *self.others[1:]]


def test_values_of_all_ranks_come_by_rank(monkeypatch):
    group = MadeUpGroup([("a", None), (None, None)], monkeypatch)
    assert ppo_sync.exchange(group, "b") == ["a", "b", None]


def test_failure_of_another_rank_is_raised_and_names_it(monkeypatch):
    group = MadeUpGroup([("a", None), (None, "OSError: no paper")], monkeypatch)
    with pytest.raises(RuntimeError, match=r"^rank 2 failed: OSError: no paper$"):
        ppo_sync.exchange(group, "b")


def test_own_failure_is_raised_as_it_is_after_the_others_know(monkeypatch):
    group = MadeUpGroup([(None, "OSError: no paper")], monkeypatch)
    error = KeyError("this one")
    with pytest.raises(KeyError) as caught:
        ppo_sync.exchange(group, "b", error)
    assert caught.value is error
    assert group.mine == ("b", "KeyError: 'this one'")


@pytest.mark.parametrize("error", [OSError("no paper"), None])
def test_own_failure_is_not_hidden_by_the_end_of_another_rank(error, monkeypatch):
    class Group(MadeUpGroup):
        def gather(self, states, mine, group):
            raise RuntimeError("connection closed by peer")

    group = Group([None], monkeypatch)
    with pytest.raises((OSError, RuntimeError)) as caught:
        ppo_sync.exchange(group, None, error)
    assert str(caught.value) == ("connection closed by peer" if error is None else "no paper")


def test_single_rank_exchanges_with_itself():
    assert ppo_sync.exchange(None, "a") == ["a"]
    error = OSError("no paper")
    with pytest.raises(OSError) as caught:
        ppo_sync.exchange(None, "a", error)
    assert caught.value is error


@pytest.mark.parametrize("result", ["a rollout", [], False])
def test_single_rank_polls_until_there_is_something(result):
    polled = iter([None, None, result])
    assert ppo_sync.wait_for_all(None, lambda: next(polled)) == result
    assert list(polled) == []


def test_rank_that_is_ready_waits_for_the_others_and_polls_no_more(monkeypatch):
    """A second rollout would be lost."""
    ready = iter([False, False, True])
    calls = []

    class Group(MadeUpGroup):
        def gather(self, states, mine, group):
            self.others = [(next(ready), None)]
            super().gather(states, mine, group)

    def poll():
        calls.append(None)
        return f"rollout {len(calls)}"

    assert ppo_sync.wait_for_all(Group([None], monkeypatch), poll) == "rollout 1"
    assert len(calls) == 1 and list(ready) == []


def test_single_rank_ends_with_a_failing_poll():
    error, calls = OSError("no paper"), []

    def poll():
        calls.append(None)
        if len(calls) == 2:
            raise error

    with pytest.raises(OSError) as caught:
        ppo_sync.wait_for_all(None, poll)
    assert caught.value is error and len(calls) == 2


def answers_of(*texts):
    """Answers of these texts."""
    count = len(texts)
    return ppo_sync.Answers(
        [[7]] * count, [[-1.0]] * count, list(texts), [1.0] * count, [None] * count
    )


def rollout_of(texts, eval_texts, version, request=None, **times):
    return ppo_sync.Rollout(request, version, answers_of(*texts), answers_of(*eval_texts), times)


def queue_of(item):
    response_Q = queue.Queue(maxsize=1)
    response_Q.put(item)
    return response_Q


def test_rollout_is_of_all_ranks_and_as_slow_as_the_slowest(monkeypatch):
    """Rank 2 has no engines: it was at work for no time, and waited for hours."""
    others = [
        rollout_of(["a", "b"], ["x"], 4, generation=2.0, reward=0.1, wait_for_prompts=0.3),
        rollout_of([], [], None, generation=0.0, reward=0.0, wait_for_prompts=9000.0),
        rollout_of(["d"], [], 4, generation=1.0, reward=0.2, wait_for_prompts=0.4),
    ]
    request = ppo_sync.Request(5, ["prompts"] * 10_000, [1], [], [])
    times = {"generation": 1.5, "reward": 0.15, "wait_for_prompts": 0.35}
    share = rollout_of(["c"], ["y"], 4, request, **times)
    sent = []

    class Group(MadeUpGroup):
        def gather(self, states, mine, group):
            sent.append(mine)
            values = [True, True, True]
            if isinstance(mine[0], ppo_sync.Rollout):
                values = [others[0], *others[1:]]
            self.others = [(value, None) for value in values]
            super().gather(states, mine, group)

    rollout = ppo_sync.receive_rollout(Group([None] * 3, monkeypatch), queue_of(share))
    assert rollout.request is request
    assert rollout.policy_version == 4
    assert rollout.answers == answers_of("a", "b", "c", "d")
    assert rollout.eval_answers == answers_of("x", "y")
    assert rollout.times == {"generation": 2.0, "reward": 0.2, "wait_for_prompts": 0.4}
    assert len(str(sent)) < 2000  # every rank has the request: it does not travel


def test_versions_that_differ_are_no_batch(monkeypatch):
    class Group(MadeUpGroup):
        def gather(self, states, mine, group):
            is_share = isinstance(mine[0], ppo_sync.Rollout)
            self.others = [(rollout_of(["a"], [], 3) if is_share else True, None)]
            super().gather(states, mine, group)

    with pytest.raises(AssertionError, match="engines have different weights, of versions"):
        ppo_sync.receive_rollout(Group([None], monkeypatch), queue_of(rollout_of(["b"], [], 4)))


def test_what_went_wrong_in_the_thread_is_raised_where_its_rollout_is_due():
    error = OSError("the engine is on fire")
    with pytest.raises(OSError) as caught:
        ppo_sync.receive_rollout(None, queue_of(error))
    assert caught.value is error


def test_what_went_wrong_is_found_before_its_rollout_is_due(monkeypatch):
    error, share = OSError("the engine is on fire"), rollout_of([], [], 4)
    for response_Q in (queue.Queue(), queue_of(share)):
        ppo_sync.check_generation(None, response_Q)
        assert list(response_Q.queue) in ([], [share])  # it takes nothing out
    with pytest.raises(OSError) as caught:
        ppo_sync.check_generation(None, queue_of(error))
    assert caught.value is error
    group = MadeUpGroup([(None, "OSError: no paper")], monkeypatch)
    with pytest.raises(RuntimeError, match="rank 0 failed: OSError: no paper"):
        ppo_sync.check_generation(group, queue_of(share))


def test_thread_answers_each_request_or_says_what_went_wrong():
    def generate(request):
        if request == "a bad one":
            raise OSError("the engine is on fire")
        return rollout_of([], [], 4, request, generation=1.0)

    prompts_Q, response_Q = queue.Queue(maxsize=1), queue.Queue(maxsize=1)
    arguments = (generate, prompts_Q, response_Q)
    threading.Thread(target=ppo_sync.generation_thread, args=arguments, daemon=True).start()
    prompts_Q.put("a bad one")
    error = response_Q.get(timeout=10)
    assert isinstance(error, OSError) and str(error) == "the engine is on fire"
    time.sleep(0.2)
    prompts_Q.put("a good one")
    rollout = response_Q.get(timeout=10)
    assert rollout.request == "a good one"
    assert rollout.times["generation"] == 1.0
    assert 0.1 < rollout.times["wait_for_prompts"] < 5


# ----------------------------------------------------------------------------------- two real ranks


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """What two_rank_waiting.py found on each of them."""
    folder = tmp_path_factory.mktemp("two_ranks")
    program = str(REPO / "tests" / "helpers" / "two_rank_waiting.py")
    command = [sys.executable, program, str(folder)]
    ranks = []
    for rank in range(2):
        variables = environment({"RANK": str(rank), "OMP_NUM_THREADS": "1"})
        process = subprocess.Popen(command, env=variables, stderr=subprocess.PIPE, text=True)
        ranks.append(process)
    try:
        for process in ranks:
            _, stderr = process.communicate(timeout=120)
            assert process.returncode == 0, stderr
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    return [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(2)]


ON_BOTH = {
    "exchange_values": ([{"rank": 0}, {"rank": 1}],) * 2,
    "exchange_with_an_error": (
        "RuntimeError: rank 1 failed: OSError: no paper",
        "OSError: no paper",
    ),
    "wait_for_the_slower": (["of rank 0", 1], ["of rank 1", 3]),
    "wait_for_one_that_fails": ("RuntimeError: rank 1 failed: OSError: no ink", "OSError: no ink"),
    "receive_shares": ([5, 4, ["of rank 0", "of rank 1"], {"generation": 2.0, "reward": 1}],) * 2,
    "receive_what_went_wrong": (
        "RuntimeError: rank 1 failed: OSError: the engine is on fire",
        "OSError: the engine is on fire",
    ),
    "check_what_went_wrong": (
        "RuntimeError: rank 1 failed: OSError: the engine is on fire",
        "OSError: the engine is on fire",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", ON_BOTH)
def test_ranks_wait_for_each_other_and_fail_together(way, two_ranks):
    found = tuple(of_rank[way]["result"] for of_rank in two_ranks)
    assert found == ON_BOTH[way]
    assert max(of_rank[way]["seconds"] for of_rank in two_ranks) < 10


@pytest.mark.slow
def test_rank_that_has_died_is_noticed(two_ranks):
    found = two_ranks[0]["wait_for_one_that_dies"]
    assert "Error: " in found["result"]
    assert found["seconds"] < 10
