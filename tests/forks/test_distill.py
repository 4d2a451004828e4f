"""The fork distill: the gradient of the reverse KL to a teacher, and runs with a stub of vLLM."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import loops
from helpers.files import swap_tokens
from helpers.rollouts import gradients, one_of_ranks, tiny_language_model
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPTS = [[2, 5], [3, 9, 4], [7], [8, 8, 6, 2]]
VOCAB = 11


@pytest.fixture(scope="module")
def module(import_fork):
    return import_fork("distill")


# ------------------------------------------------------------------------------------ the gradient


def all_responses(module, policy):
    """A batch with every response of two tokens to each prompt, sampled by chance alike.

    So importance weights are probabilities times their number, and a mean over the batch is the
    expectation under the policy, exactly. The weight of each token is that of its response.
    """
    pairs = list(itertools.product(PROMPTS, itertools.product(range(VOCAB), repeat=2)))
    prompts = {str(ids): module.Prompt("", "", ids, None, None, None) for ids in PROMPTS}
    responses = [
        module.Response(prompts[str(prompt)], np.array(ids), np.zeros(2), stopped=True, score=0.0)
        for prompt, ids in pairs
    ]
    batch = module.collate(responses, "cpu")
    batch.mask = batch.loss_mask = batch.mask.double()
    with torch.no_grad():
        batch.logprobs, _ = policy(batch.input_ids, batch.mask)
    of_rows = batch.logprobs.sum(1, keepdim=True) + 2 * math.log(VOCAB)
    batch.sampler_logprobs = (batch.logprobs - of_rows) * batch.mask
    batch.advantages = torch.zeros_like(batch.mask)
    return batch


def reverse_kl(policy, teacher, batch, to_go):
    """The mean over prompts of KL(policy || teacher) per token, over all responses.

    Without to_go the prefixes of the second token are drawn, but not trained.
    """
    found = []
    for model in (policy, teacher):
        logprobs, _ = model(batch.input_ids, batch.mask)
        tokens = logprobs[batch.mask.bool()].view(len(PROMPTS), VOCAB, VOCAB, 2)
        found.append((tokens[:, :, 0, 0], tokens[..., 1]))  # of the first; of the second
    (first, second), (first_teacher, second_teacher) = found
    of_first = (first.exp() * (first - first_teacher)).sum(1)
    of_second = (second.exp() * (second - second_teacher)).sum(2)
    prefixes = first.exp() if to_go else first.detach().exp()
    return (of_first + (prefixes * of_second).sum(1)).mean() / 2


@pytest.mark.parametrize("estimator", ["kl1", "kl3"])
def test_expected_gradient_is_that_of_the_reverse_kl(estimator, module):
    """With states fixed a token answers for its own KL (2306.13649), else for what follows, too."""
    args = module.Args(
        dtype="float32", response_length=4, temperature=0.8, kl_estimator=estimator, tis_cap=1e9
    )
    policy, teacher = (
        module.PolicyModel(tiny_language_model(seed, vocab_size=VOCAB).double(), args)
        for seed in range(2)
    )
    batch, expected = all_responses(module, policy), {}
    with torch.no_grad():
        batch.ref_logprobs, _ = teacher(batch.input_ids, batch.mask)
    for to_go in (False, True):
        policy.zero_grad()
        reverse_kl(policy, teacher, batch, to_go).backward()
        expected[to_go] = torch.cat([p.grad.flatten() for p in policy.parameters()])
    assert (expected[False] - expected[True]).norm() > 0.1 * expected[True].norm()
    for to_go in (False, True):
        args = replace(args, returns_to_go=to_go)
        rows = range(len(batch.lengths))
        found, _ = gradients(one_of_ranks(0, 1), [policy], batch, args, rows)
        assert (found - expected[to_go]).norm() < 1e-6 * expected[to_go].norm()


# -------------------------------------------------------------------------------------------- runs


@pytest.fixture(scope="module")
def teacher(assets, tmp_path_factory):
    """A folder with a model that is not the debug model, and its tokenizer."""
    folder = tmp_path_factory.mktemp("teacher")
    model = AutoModelForCausalLM.from_pretrained(assets / "model")
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.data += 0.02 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(assets / "model").save_pretrained(folder)
    return folder


@pytest.fixture
def run(module, teacher, run_main):
    options = {"teacher_model_path": teacher, "beta": 1.0}
    return lambda score=None, **more: run_main("grpo_distill.py", score, **options | more)


def test_reference_is_the_teacher_alone(run, module, teacher):
    seen = run(learning_rate=1e-2)
    args = module.Args(dtype="float32", temperature=1.3)
    model = module.PolicyModel(AutoModelForCausalLM.from_pretrained(teacher), args)
    assert len(seen.batches) == loops.STEPS
    for batch in seen.batches:
        with torch.no_grad():
            expected, _ = model(batch.input_ids, batch.mask)
        torch.testing.assert_close(batch.ref_logprobs, expected, rtol=1e-5, atol=1e-5)


def length_of(_, response, __):
    return float(len(response))


def test_rewards_are_metrics_alone_and_none_is_needed(run):
    seen = run(length_of, non_stop_penalty=False)
    assert all(line["objective/scores_std"] > 0 for line in seen.metrics)
    assert not any(batch.advantages.any() for batch in seen.batches)
    # What failed is distilled all the same
    failed = run(lambda *_: 1 / 0, non_stop_penalty=False)
    for batch, line in zip(failed.batches, failed.metrics, strict=True):
        assert torch.equal(batch.loss_mask, batch.mask) and not batch.has_score.any()
        assert line["optim/grad_norm"] > 0
    none = run(apply_verifiable_reward=False, non_stop_penalty=False)
    assert len(none.metrics) == loops.STEPS and none.metrics[0]["optim/grad_norm"] > 0


def test_reward_that_has_a_weight_adds_its_advantages(run):
    seen = run(length_of, reward_weight=0.25, advantage_normalization="centered")
    for batch in seen.batches:
        assert torch.equal(batch.loss_mask, batch.mask)
        scores = batch.scores.view(-1, 4)
        expected = 0.25 * (scores - scores.mean(1, keepdim=True)).flatten()
        found = batch.advantages[range(len(batch.lengths)), batch.lengths - 1]
        torch.testing.assert_close(found, expected)


REFUSED = [
    ({"teacher_model_path": None}, "of another model"),
    # Revisions are told apart by their paths alone
    ({"teacher_model_path": "same", "model_name_or_path": "same"}, "of another model"),
    ({"beta": 0.0}, "a --beta above 0"),
    # One ratio of a response would give each token the mean of all returns
    ({"returns_to_go": True, "importance_sampling_level": "sequence"}, "for each token"),
    ({"reward_weight": 1.0, "number_samples_per_prompt": 1}, "at least 2 samples"),
]


def test_what_would_distil_nothing_is_refused(module):
    given = {"teacher_model_path": "teacher", "local_rollout_batch_size": 256}
    for options, message in REFUSED:
        with pytest.raises(ValueError, match=message):
            module.fill_in(module.Args(**given | options), world_size=1)


def test_teacher_with_another_vocabulary_is_refused(module, tmp_path, assets):
    """One that reads the policy's ids as other tokens; it may know more of them."""
    AutoTokenizer.from_pretrained(assets / "model").save_pretrained(tmp_path)
    swap_tokens(tmp_path)
    args = module.Args(model_name_or_path=str(assets / "model"), teacher_model_path=str(tmp_path))
    with pytest.raises(ValueError, match=r"--teacher_model_path .* must give the policy's tokens"):
        module.load_tokenizer(args)
