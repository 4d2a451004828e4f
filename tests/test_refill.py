"""scripts/forks/refill.diff: rounds without vLLM, and whole runs of the forked script."""

import importlib
import json
import random
import shutil
import sys
import threading
from collections import Counter
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import refill as benchmark
from helpers import REPO
from helpers.files import write_text
from helpers.processes import CPU, TWO_RANKS
from helpers.real_vllm import prompt_of
from test_inflight import IN_FLIGHT, check_same

PROMPTS = [replace(prompt_of([2, 3 + i]), ground_truth="") for i in range(50)]


@pytest.fixture(scope="module")
def forks(git, tmp_path_factory):
    """The folder of grpo_refill.py and of the fork that it is a fork of, grpo_inflight.py."""
    folder = tmp_path_factory.mktemp("forks")
    sys.path.insert(0, str(REPO / "scripts"))
    for name in ("inflight", "refill"):
        importlib.import_module("fork").write_fork(name, folder / f"grpo_{name}.py")
    return folder


@pytest.fixture(scope="module")
def module(forks):
    sys.path.insert(0, str(forks))
    yield importlib.import_module("grpo_refill")
    sys.path.remove(str(forks))


# ------------------------------------------------------------------------------ rounds, by a stub


def args_of(module, **changes):
    options = {"response_length": 9, "local_rollout_batch_size": 5, "number_samples_per_prompt": 4}
    options |= {"local_mini_batch_size": 20, "total_episodes": 160, "num_evals": 0}
    return module.fill_in(module.Args(**options | changes), world_size=1)


class Engine:
    """Stands for vLLM: a response has as many tokens as its seed says, and a step makes one each.

    As many are sampled at once as there are slots. Grades come in an order of chance's.
    """

    def __init__(self, module, rewards, chance, index=0, count=1, slots=40):
        self.module, self.rewards, self.slots = module, rewards, slots
        self.index, self.count, self.policy_version = index, count, None
        self.chance, self.grading = random.Random(chance), []
        self.asked, self.log = {}, []

    def share(self, items, size):
        return self.module.VLLM.share(self, items, size)

    def ask(self, responses, temperature):
        self.asked |= responses
        self.log.append(("ask", *responses))

    def submit(self, function):
        found = {}
        for i in list(self.asked)[: self.slots] * (function is self.module.run_engine):
            found[i] = self.longer(self.asked[i])
        self.asked |= found
        if function is self.module.interrupt:
            found, self.asked = self.asked, {}
        else:
            found = {i: self.asked.pop(i) for i in found if found[i].finished}
        self.log.append((function.__name__, *found))
        assert len(self.log) < 1000, "it runs for ever"
        self.grade_some()
        return SimpleNamespace(result=lambda: found)

    def longer(self, response):
        one = [np.append(values, 5) for values in (response.token_ids, response.logprobs)]
        versions = np.append(response.versions, self.policy_version)
        finished = len(versions) == 1 + response.seed % 9
        token_ids, logprobs = one[0].astype(int), one[1]
        return replace(
            response,
            token_ids=token_ids,
            logprobs=logprobs,
            versions=versions,
            finished=finished,
            stopped=finished,
        )

    def grade(self, responses):
        self.grading.append((future := Future(), responses))
        if not responses:  # no evaluation
            self.grade_some(share=1)
        return future

    def grade_some(self, share=0.2):
        """Some of the grades are there. In place of concurrent.futures.wait: all of them."""
        waiting, self.grading = self.grading, []
        for future, responses in waiting:
            if self.chance.random() < share:
                rewards = [self.rewards(response) for response in responses]
                pairs = zip(responses, rewards, strict=True)
                future.set_result([replace(one, verifiable=reward) for one, reward in pairs])
            else:
                self.grading.append((future, responses))


def flat(share, by=7):
    """Rewards of which a share of prompts has only equal ones: all right, or all wrong."""

    def rewards(response):
        (number,) = response.prompt.token_ids[1:]
        is_flat = random.Random(by * 1000 + number).random() < share
        return float(number % 2 if is_flat else response.seed % 2)

    return rewards


def run_rounds(module, monkeypatch, engine, args, state=None, first=0):
    """The Rollouts of batches and of rounds' ends of a run, or of one resumed with a state."""
    monkeypatch.setattr(module, "wait", lambda futures: engine.grade_some(share=1))
    stream = module.load_stream(engine, state or {}, PROMPTS, args)
    pause = SimpleNamespace(is_set=lambda: engine.chance.random() < 0.2)
    batches, ends = [], []
    for version in range(first, args.num_training_steps + 1):
        engine.policy_version = version
        request = module.make_request(version, [], args)
        response_Q = SimpleNamespace(put=batches.append)
        ends.append(
            module.generate_round(engine, stream, request, response_Q, pause, engine.grade, args)
        )
        if len(batches[-1].responses) < args.episodes_per_step:  # the learner ends
            break
    return batches, ends


def groups_of(batches, args):
    """(version that trains on it, its samples) of each group that was handed over."""
    size = args.number_samples_per_prompt
    return [
        (batch.policy_version, batch.responses[i : i + size])
        for batch in batches
        for i in range(0, len(batch.responses), size)
    ]


def seeds_of(groups):
    return [[response.seed for response in group] for _, group in groups]


def numbers_of(module, engine, args, count=400):
    """{seeds: number} of an engine's groups, as its stream has them."""
    groups = (module.begin_group(engine, PROMPTS, i, {}, args) for i in range(count))
    return {tuple(response.seed for response in group): i for i, group in enumerate(groups)}


both_modes = pytest.mark.parametrize("deterministic", [True, False])


def test_streams_of_the_engines_are_the_batches_of_the_script(module):
    import grpo_vllm_async as script

    args = args_of(module)
    options = {name: value for name, value in vars(args).items() if name in vars(script.Args())}
    script_args = script.Args(**options)
    for count in (1, 2, 3):
        engines = [Engine(module, None, 0, index, count) for index in range(count)]
        streams = [numbers_of(module, engine, args, count=60) for engine in engines]
        sizes = [len(module.own_groups(engine, args)) for engine in engines]
        for step in range(1, 6):
            request = script.make_request(step, PROMPTS, [], script_args)
            batch = [tuple(request.seeds[i : i + 4]) for i in range(0, 20, 4)]
            found = []
            for size, stream in zip(sizes, streams, strict=True):
                found += list(stream)[size * (step - 1) : size * step]
            assert found == batch
    group = module.begin_group(engines[0], PROMPTS, 3, {}, args)
    assert [response.prompt for response in group] == [group[0].prompt] * 4


@both_modes
@pytest.mark.parametrize("max_staleness", [0, 2])
def test_batch_is_the_next_groups_with_a_signal_in_their_order(
    module, monkeypatch, max_staleness, deterministic
):
    """Nothing is trained on twice, no group overtakes another, and none is too old."""
    args = args_of(module, max_staleness=max_staleness, deterministic=deterministic)
    engine = Engine(module, flat(0.5), chance=1)
    batches, ends = run_rounds(module, monkeypatch, engine, args)
    groups = groups_of(batches, args)
    assert len(groups) == args.num_training_steps * 5
    numbers = numbers_of(module, engine, args)
    found = [numbers[tuple(seeds)] for seeds in seeds_of(groups)]
    has_signal = {
        i: len({engine.rewards(response) for response in group}) > 1
        for i in range(found[-1] + 1)
        for group in [module.begin_group(engine, PROMPTS, i, {}, args)]
    }
    assert found == [i for i, kept in has_signal.items() if kept]
    ages = set()
    for version, group in groups:
        for response in group:
            assert response.finished and response.score == response.verifiable
            ages |= set((version - response.versions).tolist())
    assert ages == set(range(max_staleness + 1))
    # What was dropped is counted, once
    dropped = Counter()
    for batch in batches:
        dropped.update(batch.streams[0]["dropped"])
    assert dropped["groups"] == len(has_signal) - len(found)
    assert dropped["groups"] == dropped["solved"] + dropped["hopeless"]
    assert min(dropped["solved"], dropped["hopeless"]) > 5
    lengths = [sum(1 + seed % 9 for seed in seeds) for seeds in numbers]
    assert dropped["tokens"] == sum(lengths[i] for i, kept in has_signal.items() if not kept)
    assert ends[-1].responses == [] and ends[-1].streams[0]["groups"] == []
    assert ends[-1].streams[0]["begun"] == len(has_signal)


@both_modes
def test_as_many_are_under_way_as_without_refill(module, monkeypatch, deterministic):
    """A bound on age by construction: what is behind a batch's end comes a round later."""
    args = args_of(module, max_staleness=2, deterministic=deterministic)
    engine = Engine(module, flat(0.5), chance=1)
    _, ends = run_rounds(module, monkeypatch, engine, args)
    counts = [len(end.streams[0]["groups"]) for end in ends]
    assert max(counts) <= 10
    if not deterministic:  # which leaves places empty up to the next round
        assert counts[:-3] == [10] * 6


@both_modes
@pytest.mark.parametrize("max_refill", [0, 3])
def test_prompts_without_a_signal_end_with_a_batch_that_is_short(
    module, monkeypatch, max_refill, deterministic
):
    args = args_of(module, max_refill=max_refill, deterministic=deterministic)
    engine = Engine(module, flat(1.0), chance=1)
    (batch,), _ = run_rounds(module, monkeypatch, engine, args)
    assert batch.responses == []
    # Those that were under way when the bound was met are dropped as well
    assert 5 * max_refill < batch.streams[0]["dropped"]["groups"] <= 5 * max_refill + 15
    metrics = module.refill_metrics(batch, args)
    assert metrics["refill/solved"] + metrics["refill/hopeless"] == 1
    assert min(metrics["refill/solved"], metrics["refill/hopeless"]) > 0.2


def test_the_bound_is_that_of_each_batch(module, monkeypatch):
    args = args_of(module, max_refill=3)
    engine = Engine(module, flat(0.6), chance=1)
    batches, _ = run_rounds(module, monkeypatch, engine, args)
    dropped = [batch.streams[0]["dropped"].get("groups", 0) for batch in batches[:-1]]
    assert len(dropped) == args.num_training_steps
    assert sum(dropped) > 3 * 5 >= max(dropped)


def test_no_clock_decides_with_deterministic(module, monkeypatch):
    """When grades arrive, and when the learner asks for the end."""
    logs = []
    for chance in range(3):
        args = args_of(module, deterministic=True)
        engine = Engine(module, flat(0.5), chance)
        run_rounds(module, monkeypatch, engine, args)
        logs.append(engine.log)
    assert logs[0] == logs[1] == logs[2]


def test_resumed_after_any_round_it_goes_on_as_if_nothing_had_been(module, monkeypatch):
    args = args_of(module, deterministic=True)
    whole, ends = run_rounds(module, monkeypatch, Engine(module, flat(0.5), chance=0), args)
    expected = [(one.streams, seeds_of(groups_of([one], args))) for one in whole]
    went_on = 0
    for first, end in enumerate(ends[:-1], start=1):
        saved = {"under_way": module.pack_rollout(end), "streams": end.streams}
        went_on += any(one.token_ids.any() and not one.finished for one in end.responses)
        state = json.loads(json.dumps(saved))
        engine = Engine(module, flat(0.5), chance=first)
        batches, _ = run_rounds(module, monkeypatch, engine, args, state, first)
        found = [(one.streams, seeds_of(groups_of([one], args))) for one in batches]
        assert found == expected[first:]
        for one, other in zip(batches, whole[first:], strict=True):
            for a, b in zip(one.responses, other.responses, strict=True):
                np.testing.assert_array_equal(a.versions, b.versions)
    assert went_on > 3


def test_what_was_dropped_since_the_last_batch_survives(module, monkeypatch):
    """The bound counts it. With --deterministic it is nothing at a round's end."""
    args = args_of(module)
    engine = Engine(module, flat(0.5), chance=0)
    _, ends = run_rounds(module, monkeypatch, engine, args)
    assert sum(bool(end.streams[0]["dropped"]) for end in ends) > 1
    for end in ends:
        saved = {"under_way": module.pack_rollout(end), "streams": end.streams}
        stream = module.load_stream(engine, json.loads(json.dumps(saved)), PROMPTS, args)
        assert stream.state == end.streams[0]
        loaded = [response for group in stream.groups.values() for response in group]
        for one, other in zip(loaded, end.responses, strict=True):
            assert (one.prompt, one.seed, one.finished) == (
                other.prompt,
                other.seed,
                other.finished,
            )
            np.testing.assert_array_equal(one.token_ids, other.token_ids)


def test_signal_is_what_the_advantages_and_the_loss_say(module):
    def group(*scores, stopped=True):
        ids = np.array([4])
        return [
            module.Response(PROMPTS[0], ids, ids * -0.5, stopped=stopped, score=score)
            for score in scores
        ]

    args = args_of(module)
    assert module.has_signal(group(0.0, 1.0), args)
    assert not module.has_signal(group(3.3, 3.3), args)
    # As group_advantages sees them, in float32
    assert not module.has_signal(group(0.1 + 0.2, 0.3), args)
    # Where the reward failed there is no score
    assert not module.has_signal(group(None, 1.0), args)
    assert not module.has_signal(group(None, None), args)
    assert module.has_signal(group(None, 1.0, 0.0), args)
    masked = args_of(module, mask_truncated_completions=True)
    assert not module.has_signal(group(0.0, 1.0, stopped=False), masked)
    assert module.has_signal(group(0.0, 1.0, stopped=False) + group(1.0), masked)


def test_what_is_solved_and_what_is_hopeless(module):
    def kind(*rewards):
        response = module.start_responses(PROMPTS[:1], [0], {})[0]
        counts = module.count_group([replace(response, verifiable=reward) for reward in rewards])
        return counts["solved"], counts["hopeless"]

    assert kind(1.0, 2.0) == (True, False)
    assert kind(0.0, 0.3) == (False, True)
    assert kind(1.0, 0.0) == kind(None, None) == kind(0.0, None) == (False, False)


def test_groups_whose_rewards_fail_are_counted(module):
    """Else a reward that is broken would pass for prompts that are neither solved nor hopeless."""
    response = module.start_responses(PROMPTS[:1], [0], {})[0]
    group = [replace(response, verifiable=1.0), replace(response, failure="out of paper")]
    dropped = Counter(module.count_group(group)) + Counter(module.count_group(group[:1]))
    rollout = module.Rollout(0, [], [], {}, [{"begun": 2, "dropped": dropped}])
    metrics = module.refill_metrics(rollout, args_of(module))
    assert metrics["refill/failed"] == metrics["refill/solved"] == 0.5


def test_the_data_is_permuted_once_for_a_pass_and_not_for_each_group(module, monkeypatch):
    calls, randperm = [], module.torch.randperm
    note = lambda *given, **options: calls.append(given) or randperm(*given, **options)  # noqa: E731
    monkeypatch.setattr(module.torch, "randperm", note)
    args, engine = args_of(module, seed=77), Engine(module, None, 0)
    for number in range(40):  # eight batches
        module.begin_group(engine, PROMPTS, number, {}, args)
    assert len(calls) == 8


def test_one_groups_reward_does_not_wait_for_anothers(module, monkeypatch):
    """The first that is asked for is answered last."""
    second = threading.Event()

    def grade_responses(responses, *_):
        if responses == ["first"]:
            assert second.wait(30)
        second.set()
        return responses

    futures = []

    def round_of(engine, stream, request, response_Q, pause, grade, args):
        futures.extend([grade(["first"]), grade(["second"])])
        raise SystemExit

    ended = []
    monkeypatch.setattr(module, "grade_responses", grade_responses)
    monkeypatch.setattr(module, "generate_round", round_of)
    monkeypatch.setattr(module, "end_at_once", ended.append)
    prompts_Q = SimpleNamespace(get=lambda: None)
    module.generation_thread(
        "an engine",
        None,
        None,
        None,
        prompts_Q,
        None,
        None,
        None,
        args_of(module, reward_workers=2),
    )
    assert [future.result(30) for future in futures] == [["first"], ["second"]]


def test_a_reward_model_is_refused(module):
    with pytest.raises(ValueError, match="--reward_model_path"):
        args_of(module, reward_model_path="a model")


# ------------------------------------------------------------------ scripts/benchmark/refill.py


def test_batch_of_variable_size_is_the_script_with_another_divisor(tmp_path):
    path = tmp_path / "grpo_variable.py"
    benchmark.write_arm("variable", path)
    lines = (REPO / "grpo_vllm_async.py").read_text().splitlines()
    changed = [
        pair for pair in zip(lines, path.read_text().splitlines(), strict=True) if len({*pair}) > 1
    ]
    ((before, after),) = changed
    mask = "batch.loss_mask"
    computed = f"({mask} * batch.computed[:, None])"
    assert "normalizer" in before and after == before.replace(mask, computed)
    compile(path.read_text(), path.name, "exec")


def test_reward_of_the_language_model_is_three_of_four_constraints():
    names = ["punctuation:no_comma", "change_case:english_lowercase", "startend:quotation"]
    truth = {"instruction_id_list": [*names, "punctuation:no_comma"], "kwargs": [{}] * 4}
    assert benchmark.three_of_four("any", "three of them", truth) == 1.0
    assert benchmark.three_of_four("any", "Two of them", truth) == 0.0


# ------------------------------------------------------------------------------------- whole runs

# Of two responses one is right in three groups of eight, whatever the model has learned
SOMETIMES = """
import hashlib

def score(data_source, response, ground_truth, extra_info):
    return float(hashlib.sha256(response.encode()).digest()[0] % 4 == 0)
"""
HOPELESS = """
def score(data_source, response, ground_truth, extra_info):
    return 0.0
"""


@pytest.mark.slow
def test_two_ranks_resume_to_the_bit_with_groups_dropped(forks, run_script, small_eval, tmp_path):
    reward = write_text(tmp_path / "sometimes.py", SOMETIMES)
    options = IN_FLIGHT | {"launcher": TWO_RANKS, "env": CPU, "eval_dataset": small_eval}
    options |= {"local_rollout_batch_size": 8, "local_mini_batch_size": 16}
    options |= {"reward_fn": f"{reward}:score"}
    fork = forks / "grpo_refill.py"
    whole = run_script(fork, tmp_path / "whole", **options)
    assert whole.returncode == 0, whole.output
    lines = whole.metrics
    assert max(line["policy/staleness_max"] for line in lines) > 0
    assert {line["val/zero_variance_groups"] for line in lines} == {0}
    assert sum(line["refill/dropped_groups"] for line in lines[2:]) > 0  # after the checkpoint
    assert [line["episode"] for line in lines] == [32 * step for step in range(1, 7)]
    dropped = sum(line["refill/dropped_groups"] for line in lines)
    assert lines[-1]["refill/begun_groups"] == 6 * 16 + dropped

    shutil.copytree(whole.run_dir, tmp_path / "again/run")
    shutil.rmtree(tmp_path / "again/run/checkpoints/step_4")
    saved = json.loads((tmp_path / "again/run/checkpoints/step_2/state.json").read_text())
    rows = saved["under_way"].values()
    assert any(row["token_ids"] and not row["finished"] for row in rows)
    begun = [stream["begun"] for stream in saved["streams"]]
    assert len(begun) == 2
    again = run_script(fork, tmp_path / "again", resume_from_checkpoint="latest", **options)
    assert again.returncode == 0, again.output
    assert "Resumed after step 2" in again.stdout
    check_same(again, whole)


@pytest.mark.slow
def test_a_hopeless_task_ends_with_a_sentence_and_leaves_its_model(forks, run_script, tmp_path):
    reward = write_text(tmp_path / "hopeless.py", HOPELESS)
    options = IN_FLIGHT | {"reward_fn": f"{reward}:score", "max_refill": 1}
    run = run_script(forks / "grpo_refill.py", tmp_path / "run", **options)
    assert run.returncode == 1
    assert "--max_refill 1 leaves step 1 without a full batch" in run.output
    assert "0% solved, 100% hopeless, 0% failed" in run.output
    assert (run.run_dir / "model/model.safetensors").exists()
