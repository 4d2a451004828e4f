"""scripts/forks/inflight.diff: rounds of a real vLLM, and a run of two ranks that is resumed.

That it is the script where no response may be older than its round, test_deletions.py shows.
"""

import importlib
import itertools
import json
import queue
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.files import write_text
from helpers.processes import CPU, STUB
from helpers.real_vllm import MAX_LENGTH, prompt_of, sync, tiny_model
from helpers.rollouts import STOP, VOCAB
from helpers.runs import check_equal_to_the_bit

pytestmark = pytest.mark.slow

# Longer than a block of vLLM's prefix cache, 128 tokens on a CPU
PROMPTS = [prompt_of([2 + (5 * i * j + j) % (VOCAB - 2) for j in range(140)]) for i in range(16)]


@pytest.fixture(scope="module")
def module(import_fork):
    return import_fork("inflight")


# -------------------------------------------------------------------------------- rounds of vLLM


SIZES = {"local_rollout_batch_size": 2, "number_samples_per_prompt": 4, "local_mini_batch_size": 8}
SIZES |= {"total_episodes": 96}


def args_of(module, **changes):
    options = {"dtype": "float32", "response_length": 64, "stop_token_ids": (STOP,)}
    options |= {"num_evals": 3, "vllm_enforce_eager": True} | SIZES
    return module.fill_in(module.Args(**options | changes), world_size=1)


@pytest.fixture(scope="module")
def engine(module):
    """An engine of the fork, and the policy whose weights it gets."""
    args = args_of(module)
    model = tiny_model()
    model.lm_head.weight.data.mul_(0.3)  # float32 rounds large logits to 1e-5

    def with_few_slots(call):  # else all batches would be sampled side by side
        return lambda *given: (call(*given)[0], call(*given)[1] | {"max_num_seqs": 8})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "vllm_settings", with_few_slots(module.vllm_settings))
        vllm = module.VLLM((0, 1, ()), model.config, MAX_LENGTH, args)
    first = {name: weight.clone() for name, weight in model.state_dict().items()}
    yield SimpleNamespace(vllm=vllm, model=model, args=args, first=first)
    module.end_children()


@pytest.fixture
def run_rounds(module, engine):
    """run_rounds(max_staleness=2): rounds with very different weights, each ended soon.

    Returns the batches, the answers and what was under way after each round, and the weights.
    """

    def run(num_held_out=0, **changes):
        args = args_of(module, **changes)
        asks, response_Q = itertools.count(), queue.Queue()
        pause = SimpleNamespace(is_set=lambda: next(asks) % 3 == 2)
        seen = SimpleNamespace(batches=[], answers=[], under_way=[[]], weights=[])
        for version in range(args.num_training_steps):
            torch.manual_seed(version)
            for name, weight in engine.model.state_dict().items():
                weight.copy_(engine.first[name] * torch.empty_like(weight).uniform_(0.7, 1.3))
            sync(engine, version)
            seen.weights.append({k: v.clone() for k, v in engine.model.state_dict().items()})
            first = {} if version == 0 else None
            request = module.make_request(version, first, PROMPTS, PROMPTS[:num_held_out], args)
            rollout = module.generate_round(
                engine.vllm,
                seen.under_way[-1],
                request,
                response_Q,
                pause,
                lambda responses: SimpleNamespace(result=lambda: responses),
                args,
            )
            seen.batches.append(response_Q.get_nowait().result())
            seen.answers.append(rollout.eval_responses)
            seen.under_way.append(rollout.responses)
        return seen

    return run


def logprobs_of(module, engine, weights, response):
    engine.model.load_state_dict(weights)
    batch = module.collate([response], "cpu")
    with torch.no_grad():
        logprobs, _ = module.PolicyModel(engine.model, engine.args)(batch.input_ids, batch.mask)
    return logprobs[batch.mask.bool()].numpy()


def test_each_token_has_the_logprob_of_the_version_on_its_label(module, engine, run_rounds):
    seen = run_rounds(max_staleness=4)
    ages, parts = set(), 0
    for step, batch in enumerate(seen.batches):
        assert len(batch) == 8
        for response in batch:
            versions = response.versions
            assert response.finished and len(versions) == len(response.token_ids)
            assert (np.diff(versions) >= 0).all()
            ages |= {*(step - versions).tolist()}
            parts = max(parts, len({*versions}))
            of_each = [logprobs_of(module, engine, weights, response) for weights in seen.weights]
            errors = np.abs(response.logprobs - np.array(of_each))
            for version in {*versions}:
                own, *others = np.roll(errors[:, versions == version].max(1), -version)
                assert own < 1e-4
                # Of few tokens another version may say the same
                assert min(others) > 1e-3 or sum(versions == version) < 4
    assert ages == {0, 1, 2, 3, 4}  # up to the bound, and no further
    assert parts >= 2  # of one response


def test_a_response_that_goes_on_does_not_get_the_same_random_numbers(module):
    (response,) = module.start_responses([prompt_of([2])], [7], {})
    longer = [replace(response, token_ids=np.arange(length)) for length in range(4)]
    seeds = [module.next_seed(each) for each in longer]
    assert seeds[0] == 7 and len(set(seeds)) == 4


def test_an_evaluation_is_of_one_version_and_a_round_waits_for_it(run_rounds):
    seen = run_rounds(num_held_out=3, max_staleness=2)
    counts = [len(answers) for answers in seen.answers]
    assert {version: count for version, count in enumerate(counts) if count} == {0: 3, 4: 3, 8: 3}
    for version, answers in enumerate(seen.answers):
        assert all(answer.finished and {*answer.versions} == {version} for answer in answers)


def test_batches_have_the_rows_of_the_script_in_order_and_a_response_only_grows(run_rounds):
    script = importlib.import_module("grpo_vllm_async")
    seen = run_rounds(max_staleness=2)
    args = script.fill_in(script.Args(**SIZES), world_size=1)
    final = {response.seed: response for batch in seen.batches for response in batch}
    for step, batch in enumerate(seen.batches, start=1):
        request = script.make_request(step, PROMPTS, [], args)
        assert [response.seed for response in batch] == request.seeds
        assert [response.prompt for response in batch] == request.prompts
    grown = 0
    for response in itertools.chain(*seen.under_way):
        length = len(response.token_ids)
        for name in ("token_ids", "logprobs", "versions"):
            whole = getattr(final[response.seed], name)
            np.testing.assert_array_equal(getattr(response, name), whole[:length])
        grown += 0 < length < len(final[response.seed].token_ids)
    assert grown > 10


# ------------------------------------------------------------------------------------- a whole run


# In a copy of the fork: so what a model has learned does not say which responses are under way
LENGTHS = {
    "max_tokens=args.response_length": "max_tokens=(24 if response.seed in {} else 2)",
    "stop_token_ids=args.stop_token_ids,\n            ignore_eos": "ignore_eos",
}
VARIES = """
import hashlib

def score(data_source, response, ground_truth):
    return hashlib.sha256(response.encode()).digest()[0] / 255
"""


def test_two_ranks_resume_to_the_bit_with_responses_under_way(
    module, run_script, few_prompts, tmp_path, monkeypatch
):
    """In the third and in the fifth batch each rank has a response that is long.

    No clock ends a round. Nor does a thread call vLLM while another's call runs, which
    saving_batches.py asserts.
    """
    third, fifth = (
        {module.stable_hash(1, "episode", 16 * batch + rank * 8) for rank in (0, 1)}
        for batch in (2, 4)
    )
    text = Path(module.__file__).read_text()
    for old, new in LENGTHS.items():
        assert text.count(old) == 1
        text = text.replace(old, new.format(third | fifth))
    path = write_text(tmp_path / "grpo_copy.py", text)
    reward = write_text(tmp_path / "varies.py", VARIES)
    options = {"response_length": 24, "num_evals": 2, "max_staleness": 2, "deterministic": True}
    options |= {"eval_dataset": few_prompts / "test.parquet", "total_episodes": 6 * 16}
    options |= {"save_freq": 2, "number_samples_per_prompt": 2, "local_rollout_batch_size": 4}
    options |= {"local_mini_batch_size": 8, "reward_fn": f"{reward}:score"}
    options |= {"ranks": 2, "env": CPU | STUB, "save_batches": True}
    whole = run_script(path, tmp_path / "whole", **options)
    assert whole.returncode == 0, whole.output
    assert all(line["optim/grad_norm"] > 0 for line in whole.metrics)
    ages = [(line["policy/staleness"], line["policy/staleness_max"]) for line in whole.metrics]
    assert [most for _, most in ages] == [0, 1, 2, 2, 2, 2]
    assert [mean < most for mean, most in ages] == [False, False, True, False, True, False]

    shutil.copytree(whole.run_dir, tmp_path / "again/run")
    shutil.rmtree(tmp_path / "again/run/checkpoints/step_4")
    saved = json.loads((tmp_path / "again/run/checkpoints/step_2/state.json").read_text())
    monkeypatch.setitem(sys.modules, "grpo_copy", module)  # whose classes the run has pickled
    under_way = module.load_under_way(saved)
    halves = {seed: each for seed, each in under_way.items() if not each.finished}
    assert halves.keys() == third
    assert all(2 < len(each.token_ids) < 24 for each in halves.values())
    again = run_script(path, tmp_path / "again", resume_from_checkpoint="latest", **options)
    assert "Resumed from the checkpoint of step 2" in again.stdout, again.output
    check_equal_to_the_bit(again, whole)
