"""What is GRPO's alone: its advantages, its KL, what updates leave out, and runs."""

import itertools
import math
import random
from dataclasses import replace

import pytest
import torch
from helpers import formulas, rollouts
from helpers.loops import EPISODES
from helpers.rollouts import STOP, VOCAB, gradients, grpo_args, one_of_ranks, tiny_policy

import grpo_vllm_async as grpo

PROMPT = grpo.Prompt("row 0", "", [5, 7, 2], None, None, None)

# -------------------------------------------------------------------------------- group advantages


@pytest.mark.parametrize("normalization", ["standard", "centered"])
def test_advantages_are_of_the_known_scores_of_each_group(normalization):
    """What stands in the place of a score that is not known must not matter."""
    scores = torch.randn(24, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 5
    scored = torch.ones_like(scores)
    scored[[7, 11, 23]] = 0
    for stand_in in (0.0, -1e6):
        scores[scored == 0] = stand_in
        advantages = grpo.group_advantages(scores, scored, 6, normalization)
        assert (advantages[scored == 0] == 0).all()
        groups = [x.view(4, 6) for x in (advantages, scores, scored.bool())]
        for found, group, known in zip(*groups, strict=True):
            group = group[known]
            deviation = group.std(correction=1) if normalization == "standard" else 1
            torch.testing.assert_close(found[known], (group - group.mean()) / deviation)


def test_constant_group_is_exactly_zero():
    """In float32 the mean of seven 3.3 is not 3.3, and divided by next to no deviation it shows."""
    cases = itertools.product([0, 1, 6, 8], [0.1, 3.3, -10.0, 1e6], ["standard", "centered"])
    for failed, score, normalization in cases:
        scored = torch.tensor([0.0] * failed + [1.0] * (8 - failed))
        assert not grpo.group_advantages(score * scored, scored, 8, normalization).any()


# ---------------------------------------------------------------------------------------- the loss


@pytest.mark.parametrize("estimator", ["kl1", "kl3"])
@pytest.mark.parametrize(
    ("old_seed", "sampler_seed"), [(0, 0), (3, 3), (3, 5)], ids=["on policy", "off", "stale"]
)
def test_kl_gradient_is_that_of_the_true_kl(old_seed, sampler_seed, estimator, accelerator):
    """Every token there is, as often as it is sampled: the mean is the reverse KL's gradient."""
    policy, ids, temperature = tiny_policy(seed=0).double(), PROMPT.token_ids, 0.8
    new = formulas.log_softmax_of(policy.model, ids, [STOP], temperature)[0]
    with torch.no_grad():
        models = [tiny_policy(seed).double().model for seed in (old_seed, sampler_seed, 4)]
        every = [formulas.log_softmax_of(model, ids, [STOP], temperature) for model in models]
    (new.exp() * (new - every[2][0])).sum().backward()
    expected = torch.cat([p.grad.flatten() for p in policy.parameters()])
    assert expected.norm() > 0.1

    responses = [rollouts.response_of(PROMPT, [token], score=0.0) for token in range(VOCAB)]
    batch = grpo.collate(responses, "cpu")
    mask = batch.mask.double()
    names = ("logprobs", "sampler_logprobs", "ref_logprobs")
    rows = {name: grpo.to_rows(one[0], mask) for name, one in zip(names, every, strict=True)}
    # Advantages of 0, so that the KL is all there is
    rows |= {"mask": mask, "loss_mask": mask, "advantages": 0 * mask}
    args = grpo_args(beta=1.0, kl_estimator=estimator, tis_cap=1e9)
    found = torch.zeros_like(expected)
    for token, logprob in enumerate(every[1][0]):
        gradient, _ = gradients(
            accelerator, [policy], replace(batch, **rows), args, mini_batch=[token]
        )
        found += logprob.exp() * gradient
    assert (found - expected).norm() < 1e-5 * expected.norm()


# ----------------------------------------------------- responses that no gradient can come from


def test_row_is_computed_where_any_token_has_a_gradient():
    """By what the loss reads: a fork may change advantages, token by token, after their groups."""
    batch = rollouts.grpo_rollout(tiny_policy(), 0.0)
    batch.advantages = 0 * batch.mask
    last = [row.nonzero()[-1].item() for row in batch.mask]  # tokens
    for row in (1, 2, 5):
        batch.advantages[row, last[row]] = -0.5
    batch.loss_mask[5] = 0
    without, with_kl = grpo_args(beta=0.0), grpo_args(beta=0.1)
    mini_batch = [7, 2, 5, 1, 3]
    assert grpo.rows_with_gradient(batch, mini_batch, 1, without) == [2, 1]
    assert grpo.rows_with_gradient(batch, mini_batch, 1, with_kl) == mini_batch
    batch.advantages.zero_()
    assert grpo.rows_with_gradient(batch, mini_batch, 1, without) == [7]


def test_each_rank_has_as_many_rows_however_many_are_left_out():
    """In a pass of its own a rank would wait for the others for ever."""
    mini_batch, draw = list(range(6, 18)), random.Random(0)
    batch = grpo.collate([rollouts.response_of(PROMPT, [6] * (i + 1)) for i in range(24)], "cpu")
    batch.loss_mask = batch.mask
    args = grpo_args(beta=0.0, per_device_train_batch_size=2)
    ranks = [one_of_ranks(rank, 3) for rank in range(3)]
    for count in range(13):
        needed = draw.sample(mini_batch, count)
        batch.advantages = 0 * batch.mask
        batch.advantages[[0, *needed]] = 1
        rows = grpo.rows_with_gradient(batch, mini_batch, len(ranks), args)
        assert {*needed} <= {*rows} <= {*mini_batch}
        assert len(rows) == len({*rows}) == 3 * max(1, math.ceil(count / 3))
        cuts = [grpo.split_into_micro_batches(rank, batch, rows, args) for rank in ranks]
        assert len({str([len(own) for own, _ in cut]) for cut in cuts}) == 1


def test_metrics_are_those_of_a_beta_so_small_that_no_row_is_left_out(run_main):
    """But for those of the new policy, which are of what was computed."""

    def score(data_source, response, ground_truth):
        return float(response.startswith(("6", "7")))  # the same for some groups

    options = {"total_episodes": EPISODES, "num_epochs": 2, "cliprange": 0.01}
    options |= {"cliprange_higher": 0.01, "non_stop_penalty": False}
    runs = [run_main("grpo_vllm_async.py", score, beta=beta, **options) for beta in (0.0, 1e-12)]
    counts = [sum(map(len, run.rows)) for run in runs]
    assert 0 < counts[0] < counts[1] == 2 * EPISODES
    (found,), (expected,) = (run.metrics for run in runs)
    assert 0 < found["policy/clipfrac_avg"] < 1 and found["loss/policy_avg"]
    of_computed = {"policy/entropy_avg", "policy/approxkl_avg", "val/ratio", "val/ratio_var"}
    assert found["policy/approxkl_avg"] > 1.1 * expected["policy/approxkl_avg"] > 0
    of_computed |= {"val/update_tokens"}
    for name, value in found.items():
        if name not in of_computed and not name.startswith(("time/", "perf/")):
            assert value == pytest.approx(expected[name], rel=1e-3, abs=1e-6), name


# ------------------------------------------------------------- log-probabilities before any update


def test_passes_give_entropies_of_their_rows_on_every_rank():
    """Zeros in other rows, which the sum over ranks leaves as they are."""
    policy, args = tiny_policy(), grpo_args(beta=0.1, per_device_train_batch_size=1)
    batch = rollouts.in_float32(rollouts.grpo_rollout(policy, 0.4))
    with torch.no_grad():
        expected = torch.stack(policy(batch.input_ids, batch.mask))
    expected[:, [1, 2, 5, 7]] = 0
    assert (expected[1] > 0).any()
    for rank in range(2):
        accelerator = one_of_ranks(rank, 2)
        accelerator.reduce = torch.neg  # which each of them must go through
        share = -torch.stack(grpo.forward_all(accelerator, policy, batch, [[0, 3, 4, 6]], args))
        assert share.any(2).any(0).sum() == 2  # rows
        expected -= share
    torch.testing.assert_close(expected, torch.zeros_like(expected))


# ------------------------------------------------------------------------------------------ main()


def test_gspo_leaves_out_what_failed_what_was_cut_and_what_has_no_advantage(run_main):
    """Cut responses are in their group, but not in the loss; and metrics are of all responses."""

    def score(data_source, response, ground_truth):
        if response.startswith("6"):
            raise OSError("the grader is out of paper")
        return 0.3 * (1 + len(response) % 2)

    options = {"mask_truncated_completions": True, "non_stop_penalty": False, "beta": 0.0}
    options["importance_sampling_level"] = "sequence"
    run = run_main("grpo_vllm_async.py", score, **options)
    args = grpo_args(importance_sampling_level="sequence")
    computed = [iter(run.rows[2 * step : 2 * step + 2]) for step in range(len(run.batches))]
    for step, (batch, line) in enumerate(zip(run.batches, run.metrics, strict=True)):
        stopped = torch.tensor([float(response[-1] == STOP) for response in batch.responses])
        assert 0 < (stopped * batch.has_score).sum() < batch.has_score.sum() < EPISODES
        in_loss = batch.mask * (stopped * batch.has_score)[:, None]
        assert torch.equal(batch.loss_mask, in_loss)  # computed or not
        advantages = grpo.group_advantages(batch.scores, batch.has_score, 4, "standard")
        assert torch.equal(batch.advantages, advantages[:, None] * batch.mask)
        has_gradient = (batch.advantages * in_loss).any(1)
        assert 0 < has_gradient.sum() < EPISODES
        for mini_batch in run.mini_batches[2 * step : 2 * step + 2]:
            needed = [row for row in mini_batch if has_gradient[row]]
            assert next(computed[step]) == (needed or mini_batch[:1])

        inside = batch.mask.bool()
        logprobs, of_sampler = batch.logprobs, batch.sampler_logprobs
        assert logprobs[inside].all() and batch.entropies[inside].all()
        weights = grpo.importance_weights(logprobs, of_sampler, batch.mask, args)
        assert not weights[~inside].any()
        ratios = [(logprobs - of_sampler)[i, row].double().exp() for i, row in enumerate(inside)]
        means = [formulas.geometric_mean(x).expand(len(x)) for x in ratios]
        means, log_ratio = torch.cat(means), torch.cat(ratios).log()
        found = weights[inside].double()
        torch.testing.assert_close(found, means.clamp(max=2.0), rtol=1e-3, atol=1e-6)
        expected = {
            "val/zero_variance_groups": (advantages.view(4, 4) == 0).all(1).sum(),
            "objective/entropy": -logprobs[inside].double().sum() / EPISODES,
            "mismatch/logprob_diff_max": log_ratio.abs().max(),
            "mismatch/kl": (log_ratio.exp() - 1 - log_ratio).mean(),
            "mismatch/ess": means.sum() ** 2 / (means**2).sum() / len(means),
            "mismatch/tis_clipfrac": (means > 2).double().mean(),
        }
        for name, value in expected.items():
            assert line[name] == pytest.approx(value.item(), rel=1e-4, abs=1e-8), name
