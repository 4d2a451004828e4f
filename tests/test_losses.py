"""The mathematics of a step: statistics, advantages, losses, masks, the learning rate."""

import math

import pytest
import torch
from helpers.formulas import gae_by_definition

import ppo_vllm_async as script
from ppo_vllm_async import Args, masked_whiten


def ragged_mask(sizes):
    return (torch.arange(max(sizes)) < torch.tensor(sizes)[:, None]).double()


@pytest.mark.parametrize("shift_mean", [True, False])
def test_whitening_is_of_the_tokens_alone_and_unbiased(shift_mean):
    torch.manual_seed(0)
    mask = ragged_mask([5, 1, 3, 0])
    tokens = torch.randn(9, dtype=torch.float64) * 3 + 7
    values = torch.full((4, 5), 1e6, dtype=torch.float64)
    values[mask.bool()] = tokens
    whitened = masked_whiten(values, mask, shift_mean)
    expected = (tokens - tokens.mean()) / tokens.std(correction=1)
    if not shift_mean:  # as rewards are: their mean is what there is to gain
        expected += tokens.mean()
    torch.testing.assert_close(whitened[mask.bool()], expected, rtol=1e-7, atol=1e-7)
    assert (whitened[~mask.bool()] == 0).all()


def test_whitening_of_one_value_or_of_equal_ones_is_finite():
    assert masked_whiten(torch.tensor([[5.0, 9.0]]), torch.tensor([[1.0, 0.0]])).tolist() == [
        [0, 0]
    ]
    assert masked_whiten(torch.full((2, 2), 3.0), torch.ones(2, 2)).abs().max() < 1e-6


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.5), (1.0, 1.0), (0.97, 0.0)])
def test_advantages_are_those_of_the_definition(gamma, lam):
    torch.manual_seed(1)
    sizes = [7, 1, 4, 2]
    mask = ragged_mask(sizes)
    rewards, values = torch.randn(2, 4, 7, dtype=torch.float64)  # rubbish in the padding
    advantages, returns = script.compute_gae(rewards, values, mask, gamma, lam)
    for row, size in enumerate(sizes):
        expected = gae_by_definition(rewards[row, :size], values[row, :size], gamma, lam)
        torch.testing.assert_close(advantages[row, :size], expected)
    assert (advantages[~mask.bool()] == 0).all()
    torch.testing.assert_close(returns, (advantages + values) * mask)


@pytest.mark.parametrize(
    ("estimator", "formula"),
    [("kl1", lambda d: d), ("kl2", lambda d: d * d / 2), ("kl3", lambda d: math.exp(-d) - 1 + d)],
)
def test_kl_estimators_are_those_of_the_paper(estimator, formula):
    differences = [-3.0, -0.25, 0.0, 0.5, 2.0]
    logprobs = torch.tensor([-1.0 + d for d in differences], dtype=torch.float64)
    penalty = script.kl_penalty(logprobs, torch.full_like(logprobs, -1.0), estimator)
    assert penalty.tolist() == pytest.approx([formula(d) for d in differences], abs=1e-14)


def test_kl3_of_nearly_equal_policies_does_not_drown_in_rounding():
    penalty = script.kl_penalty(torch.tensor([1e-4]), torch.tensor([0.0]), "kl3").item()
    assert penalty == pytest.approx(5e-9, rel=1e-2)


# ------------------------------------------------------------------------------------------ losses


@pytest.mark.parametrize(
    ("ratio", "advantage", "dual_clip", "loss", "clipped"),
    [
        (1.0, 2.0, 0.0, -2.0, False),
        (1.5, 2.0, 0.0, -2.4, True),  # a good action made likelier already: no more to gain
        (1.5, -2.0, 0.0, 3.0, False),  # a bad action made likelier: the whole loss
        (0.5, 2.0, 0.0, -1.0, False),  # a good action made less likely: likewise
        (0.5, -2.0, 0.0, 1.4, True),  # a bad action made less likely; the lower bound is 0.7
        (1e6, -2.0, 0.0, 2e6, False),  # has no bound
        (3.1, -2.0, 3.0, 6.0, True),  # dual clip: a bad action is not pushed without end
        (1e6, -2.0, 3.0, 6.0, True),
        (0.5, -2.0, 3.0, 1.4, True),  # PPO's own clip
        (3.1, 2.0, 3.0, -2.4, True),  # good actions have PPO's clip alone
        (3.1, 0.0, 3.0, 0.0, False),
    ],
)
def test_policy_loss_clips_on_the_pessimistic_side_only(ratio, advantage, dual_clip, loss, clipped):
    """And the importance weight comes after the clipping."""
    log_ratio = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    tensors = torch.tensor([advantage]).double(), torch.tensor([0.5]).double()
    result, binds = script.policy_loss(log_ratio, *tensors, 0.3, 0.2, dual_clip)
    assert result.item() == pytest.approx(0.5 * loss, rel=1e-12)
    assert binds.item() is clipped
    result.sum().backward()
    assert (log_ratio.grad.item() == 0) is (clipped or advantage == 0)


ALL = [[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0]]


@pytest.mark.parametrize(
    ("kind", "limit", "expected"),
    [
        ("none", 2.0, ALL),
        ("token", 2.0, [[1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 0]]),
        ("token", math.inf, ALL),
        # The geometric means are 0.93, 5 and 1.7; arithmetic ones would be 1.7, 5 and 1.7
        ("sequence", 1.6, [[1, 1, 1, 1], [0, 0, 0, 0], [0, 0, 0, 0]]),
        ("sequence", 2.0, [[1, 1, 1, 1], [0, 0, 0, 0], [1, 1, 1, 0]]),
        ("sequence", math.inf, ALL),
    ],
)
def test_tokens_far_from_the_sampler_are_masked_on_both_sides(kind, limit, expected):
    """Without truncation, so that what is left has a weight of 1."""
    ratios = [[1.0, 0.6, 5.0, 0.25], [5.0, 5.0, 1e9, 1.0], [1.7, 1.7, 1.7, 1e9]]
    mask = torch.tensor(ALL, dtype=torch.float64)
    args = Args(mismatch_mask=kind, mismatch_mask_range=limit, tis_cap=0.0)
    log_ratio = torch.tensor(ratios, dtype=torch.float64).log() * mask
    zeros = torch.zeros_like(mask)
    assert script.importance_weights(log_ratio, zeros, mask, args).tolist() == expected
    assert script.importance_weights(zeros, log_ratio, mask, args).tolist() == expected


# ----------------------------------------------------------------------------------- learning rate


@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant"])
@pytest.mark.parametrize(("warm_up", "updates"), [(0, 5), (1, 12), (4, 12), (10, 10**5)])
def test_learning_rate_of_every_update(schedule, warm_up, updates):
    # Another model of the run may have more updates
    args = Args(lr_scheduler_type=schedule, warm_up_steps=warm_up, num_updates=40)
    rates = [script.lr_multiplier(update, updates, args) for update in range(updates)]
    assert rates[:warm_up] == pytest.approx([(u + 1) / warm_up for u in range(warm_up)])
    assert rates[warm_up] == 1.0
    done = [(u - warm_up) / (updates - warm_up) for u in range(warm_up, updates)]
    formula = {
        "linear": lambda x: 1 - x,
        "cosine": lambda x: (1 + math.cos(math.pi * x)) / 2,
        "constant": lambda x: 1,
    }
    assert rates[warm_up:] == pytest.approx([formula[schedule](x) for x in done])
    assert min(rates) > 0


def test_warm_up_as_a_share_of_the_updates():
    args = Args(
        total_episodes=640,
        local_rollout_batch_size=64,
        local_mini_batch_size=16,
        num_epochs=2,
        warmup_ratio=0.25,
    )
    args = script.fill_in(args, world_size=1)
    assert (args.num_training_steps, args.num_updates, args.warm_up_steps) == (10, 80, 20)
