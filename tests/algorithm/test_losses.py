"""The mathematics of a step that needs no model; losses are in test_gradients.py."""

import math

import pytest
import torch
from helpers.formulas import gae_by_definition

import ppo_vllm_async as script
from ppo_vllm_async import Args, masked_whiten


def ragged_mask(sizes):
    return (torch.arange(max(sizes)) < torch.tensor(sizes)[:, None]).double()


def test_whitening_is_of_the_tokens_alone_and_unbiased():
    torch.manual_seed(0)
    mask = ragged_mask([5, 1, 3, 0])
    tokens = torch.randn(9, dtype=torch.float64) * 3 + 7
    values = torch.full((4, 5), 1e6, dtype=torch.float64)
    values[mask.bool()] = tokens
    whitened = masked_whiten(values, mask)
    expected = (tokens - tokens.mean()) / tokens.std(correction=1)
    torch.testing.assert_close(whitened[mask.bool()], expected, rtol=1e-7, atol=1e-7)
    assert (whitened[~mask.bool()] == 0).all()
    for values, mask in (([5.0, 9.0], [1.0, 0.0]), ([3.0, 3.0], [1.0, 1.0])):  # without spread
        whitened = masked_whiten(torch.tensor(values), torch.tensor(mask))
        assert whitened.abs().max() < 1e-6


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


def test_with_both_lambdas_1_advantages_are_the_sums_of_later_rewards_minus_values():
    """As the defaults have it, so that a fork with Monte-Carlo returns is these flags."""
    args = Args()
    assert args.gamma == args.lam == args.value_lam == 1
    mask = ragged_mask([7, 1, 4, 2])
    torch.manual_seed(2)
    rewards, values = mask * torch.randn(2, 4, 7, dtype=torch.float64)
    later = rewards.flip(1).cumsum(1).flip(1)
    advantages, returns = script.compute_gae(rewards, values, mask, args.gamma, args.lam)
    torch.testing.assert_close(advantages, later - values)
    torch.testing.assert_close(returns, later)


def test_kl_estimators_are_those_of_the_paper():
    """Also of nearly equal policies, where kl3 could drown in rounding."""
    expected = {"kl1": [-3.0, 1e-4], "kl3": [math.exp(3) - 1 - 3, 5e-9]}
    for estimator, values in expected.items():
        found = script.kl_penalty(torch.tensor([-3.0, 1e-4]), torch.zeros(2), estimator)
        assert found.tolist() == pytest.approx(values, rel=1e-2), estimator


@pytest.mark.parametrize(("warm_up", "updates"), [(0, 5), (1, 12), (4, 12), (10, 10**4)])
def test_learning_rate_of_every_update(warm_up, updates):
    formulas = {
        "linear": lambda x: 1 - x,
        "cosine": lambda x: (1 + math.cos(math.pi * x)) / 2,
        "constant": lambda x: 1,
    }
    done = [(u - warm_up) / (updates - warm_up) for u in range(warm_up, updates)]
    for schedule, formula in formulas.items():
        # Another model of the run may have more updates
        args = Args(lr_scheduler_type=schedule, warm_up_steps=warm_up, num_updates=40)
        rates = [script.lr_multiplier(update, updates, args) for update in range(updates)]
        expected = [(u + 1) / warm_up for u in range(warm_up)] + [formula(x) for x in done]
        assert rates == pytest.approx(expected) and min(rates) > 0


@pytest.mark.parametrize(("value_warmup_steps", "warm_up_steps"), [(0, 20), (5, 10)])
def test_warm_up_as_a_share_of_the_policys_updates(value_warmup_steps, warm_up_steps):
    sizes = {"total_episodes": 640, "local_rollout_batch_size": 64, "local_mini_batch_size": 16}
    sizes |= {"num_epochs": 2, "value_warmup_steps": value_warmup_steps}
    args = script.fill_in(Args(**sizes, warmup_ratio=0.25), world_size=1)
    assert (args.num_training_steps, args.num_updates) == (10, 80)
    assert args.warm_up_steps == warm_up_steps
