"""The mathematics of a step that needs no model; losses are in test_gradients.py."""

import math

import pytest
import torch

import ppo_vllm_async as script
from ppo_vllm_async import Args


def test_values_without_spread_are_whitened_to_zeros():
    for values, mask in (([5.0, 9.0], [1.0, 0.0]), ([3.0, 3.0], [1.0, 1.0])):
        whitened = script.masked_whiten(torch.tensor(values), torch.tensor(mask))
        assert whitened.abs().max() < 1e-6


def test_returns_are_sums_of_later_rewards_by_default():
    """So that a fork with Monte-Carlo returns is these flags."""
    args = Args()
    assert args.gamma == args.lam == args.value_lam == 1


def test_kl_estimators_are_those_of_the_paper():
    """Also of nearly equal policies, where kl3 could drown in rounding."""
    expected = {"kl1": [-3.0, 1e-4], "kl3": [math.exp(3) - 1 - 3, 5e-9]}
    for estimator, values in expected.items():
        found = script.kl_penalty(torch.tensor([-3.0, 1e-4]), torch.zeros(2), estimator)
        assert found.tolist() == pytest.approx(values, rel=1e-2), estimator


def test_learning_rate_falls_by_a_cosine_or_stays():
    args = Args(warm_up_steps=2, lr_scheduler_type="cosine")
    rates = [script.lr_multiplier(update, 6, args) for update in range(6)]
    half = 2**-0.5
    assert rates == pytest.approx([0.5, 1, 1, (1 + half) / 2, 0.5, (1 - half) / 2])
    args.lr_scheduler_type = "constant"
    assert script.lr_multiplier(5, 6, args) == 1


@pytest.mark.parametrize(("value_warmup_steps", "warm_up_steps"), [(0, 20), (5, 10)])
def test_warm_up_as_a_share_of_the_policys_updates(value_warmup_steps, warm_up_steps):
    sizes = {"total_episodes": 640, "local_rollout_batch_size": 64, "local_mini_batch_size": 16}
    sizes |= {"num_epochs": 2, "value_warmup_steps": value_warmup_steps}
    args = script.fill_in(Args(**sizes, warmup_ratio=0.25), world_size=1)
    assert (args.num_training_steps, args.num_updates) == (10, 80)
    assert args.warm_up_steps == warm_up_steps
