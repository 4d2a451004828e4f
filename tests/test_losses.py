"""The mathematics of a step: statistics, advantages, losses, the learning rate."""

import math
import sys

import pytest
import torch
from helpers.formulas import gae_by_definition

import grpo_vllm_async as grpo
import ppo_sync
from ppo_sync import Args, lr_multiplier, masked_mean, masked_whiten


def ragged_mask(sizes):
    return (torch.arange(max(sizes)) < torch.tensor(sizes)[:, None]).double()


# ------------------------------------------------------------------------------- masked statistics


def test_masked_mean_ignores_padding():
    values = torch.tensor([[1.0, 2.0, 4.0], [5.0, 7.0, -3.0]])
    mask = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]])
    assert masked_mean(values, mask).item() == 3.0
    values[1, 1:] = 1e9
    assert masked_mean(values, mask).item() == 3.0


def test_mean_of_nothing_is_zero():
    assert masked_mean(torch.tensor([3.0]), torch.tensor([0.0])).item() == 0.0


@pytest.mark.parametrize("shift_mean", [True, False])
def test_whitening_ignores_padding(shift_mean):
    torch.manual_seed(0)
    mask = ragged_mask([5, 1, 3])
    values = torch.randn(3, 5, dtype=torch.float64) * 3 + 7
    whitened = masked_whiten(values, mask, shift_mean)
    wide = torch.full((3, 9), 1e6, dtype=torch.float64)
    wide[:, :5] = torch.where(mask.bool(), values, 1e6)
    wide_mask = torch.cat([mask, torch.zeros(3, 4, dtype=torch.float64)], dim=1)
    torch.testing.assert_close(
        masked_whiten(wide, wide_mask, shift_mean)[:, :5], whitened, rtol=1e-9, atol=1e-9
    )
    assert (whitened[~mask.bool()] == 0).all()


def test_whitening_divides_by_the_unbiased_deviation():
    mask = ragged_mask([4, 2])
    values = torch.tensor([[1.0, 5.0, 2.0, 8.0], [4.0, 3.0, 99.0, 99.0]], dtype=torch.float64)
    real = values[mask.bool()]
    whitened = masked_whiten(values, mask)[mask.bool()]
    torch.testing.assert_close(
        whitened, (real - real.mean()) / real.std(correction=1), rtol=1e-7, atol=1e-7
    )
    assert whitened.std(correction=1).item() == pytest.approx(1.0, abs=1e-7)


def test_whitening_of_rewards_keeps_their_mean():
    mask = ragged_mask([4, 2])
    values = torch.tensor([[1.0, 5.0, 2.0, 8.0], [4.0, 3.0, 99.0, 99.0]], dtype=torch.float64)
    real = values[mask.bool()]
    kept = masked_whiten(values, mask, shift_mean=False)[mask.bool()]
    assert kept.mean().item() == pytest.approx(real.mean().item(), abs=1e-6)
    assert kept.std().item() == pytest.approx(1.0, abs=1e-7)


def test_whitening_of_one_value_or_of_equal_ones_is_finite():
    assert masked_whiten(torch.tensor([[5.0, 9.0]]), torch.tensor([[1.0, 0.0]])).tolist() == [
        [0.0, 0.0]
    ]
    assert masked_whiten(torch.full((2, 2), 3.0), torch.ones(2, 2)).abs().max() < 1e-6


# -------------------------------------------------------------------------------------- advantages


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.5), (1.0, 1.0), (0.97, 0.0)])
def test_advantages_are_those_of_the_definition(gamma, lam):
    torch.manual_seed(1)
    sizes = [7, 1, 4, 2]
    mask = ragged_mask(sizes)
    rewards, values = torch.randn(
        2, 4, 7, dtype=torch.float64
    )  # padding holds rubbish, as models leave it there
    advantages, returns = ppo_sync.compute_gae(rewards, values, mask, gamma, lam)
    for row, size in enumerate(sizes):
        expected = gae_by_definition(rewards[row, :size], values[row, :size], gamma, lam)
        torch.testing.assert_close(advantages[row, :size], expected)
    assert (advantages[~mask.bool()] == 0).all() and (returns[~mask.bool()] == 0).all()
    torch.testing.assert_close(returns, (advantages + values) * mask)


def test_returns_at_lambda_one_are_sums_of_discounted_rewards():
    rewards = torch.tensor([[1.0, 2.0, 4.0]], dtype=torch.float64)
    values = torch.tensor([[9.0, -3.0, 0.5]], dtype=torch.float64)
    _, returns = ppo_sync.compute_gae(rewards, values, torch.ones(1, 3), gamma=0.5, lam=1.0)
    assert returns.tolist() == [[3.0, 4.0, 4.0]]


# -------------------------------------------------------------------------------- group advantages


@pytest.mark.parametrize(
    ("normalization", "expected"),
    [
        ("standard", [-0.5, -0.5, -0.5, 1.5, 0.0, 0.0, 0.0, 0.0]),
        ("centered", [-1, -1, -1, 3, 0, 0, 0, 0]),
    ],
)
def test_golden_advantages(normalization, expected):
    scores = torch.tensor([0.0, 0.0, 0.0, 4.0, 0.1, 0.1, 0.1, 0.1], dtype=torch.float64)
    advantages = grpo.group_advantages(scores, 4, normalization)
    assert advantages.tolist() == pytest.approx(expected, abs=1e-7)


def test_groups_are_normalized_each_on_its_own():
    scores = (
        torch.randn(24, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 5 + 3
    )
    advantages = grpo.group_advantages(scores, 6, "standard")
    for i in range(0, 24, 6):
        group = scores[i : i + 6]
        torch.testing.assert_close(
            advantages[i : i + 6], (group - group.mean()) / group.std(correction=1)
        )


@pytest.mark.parametrize("size", [2, 3, 7, 8, 100])
@pytest.mark.parametrize("score", [0.0, 0.1, 3.3, -10.0, 1e6])
@pytest.mark.parametrize("normalization", ["standard", "centered"])
def test_constant_group_is_exactly_zero(size, score, normalization):
    # In float32 the mean of seven 3.3 is not 3.3, and the rest divided by a deviation of 0 + 1e-8
    # is not small.
    assert (grpo.group_advantages(torch.full((size,), score), size, normalization) == 0).all()


def test_group_of_one_is_an_error(monkeypatch, capsys, assets):
    with pytest.raises(ValueError, match="at least two"):
        grpo.group_advantages(torch.tensor([1.0, 2.0]), 1, "centered")
    monkeypatch.setattr(sys, "argv", ["grpo_vllm_async.py", "--number_samples_per_prompt", "1"])
    with pytest.raises(SystemExit) as stop:
        grpo.main()
    assert stop.value.code == 2
    assert "--number_samples_per_prompt 1" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------- KL


@pytest.mark.parametrize(
    ("estimator", "formula"),
    [("kl1", lambda d: d), ("kl2", lambda d: d * d / 2), ("kl3", lambda d: math.exp(-d) - 1 + d)],
)
def test_kl_estimators_are_those_of_the_paper(estimator, formula):
    differences = [-3.0, -0.25, 0.0, 0.5, 2.0]
    logprobs = torch.tensor([-1.0 + d for d in differences], dtype=torch.float64)
    penalty = ppo_sync.kl_penalty(logprobs, torch.full_like(logprobs, -1.0), estimator)
    assert penalty.tolist() == pytest.approx([formula(d) for d in differences], abs=1e-14)


def test_kl3_of_nearly_equal_policies_does_not_drown_in_rounding():
    d = 1e-4
    penalty = ppo_sync.kl_penalty(torch.tensor([-1.0 + d]), torch.tensor([-1.0]), "kl3").item()
    assert 0 <= penalty < 1e-7


def test_kl_gradient_is_the_derivative_of_the_true_kl():
    """With samples weighted by their probabilities, each term has the gradient of the KL."""
    theta = torch.tensor([0.3, -1.0, 0.5], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([0.1, 0.4, -0.2], dtype=torch.float64).log_softmax(0)
    new = theta.log_softmax(0)
    (truth,) = torch.autograd.grad((new.exp() * (new - ref)).sum(), theta)
    probabilities = new.detach().exp()
    for estimator in ("kl1", "kl2", "kl3"):
        new = theta.log_softmax(0)
        term = grpo.kl_penalty(new, ref, estimator) * (
            1 if estimator == "kl2" else (new - new.detach()).exp()
        )
        (found,) = torch.autograd.grad((probabilities * term).sum(), theta)
        torch.testing.assert_close(found, truth, rtol=1e-9, atol=1e-12)


# ------------------------------------------------------------------------------------------ losses


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped"),
    [
        (1.0, 2.0, -2.0, False),
        (1.5, 2.0, -2.4, True),  # a good action made likelier already: no more to gain
        (1.5, -2.0, 3.0, False),  # a bad action made likelier: the whole loss, to bring it back
        (0.5, 2.0, -1.0, False),  # a good action made less likely: likewise
        (0.5, -2.0, 1.4, True),  # a bad action made less likely already; the lower bound is 0.7
        (1.1, 2.0, -2.2, False),
    ],
)
def test_policy_loss_clips_on_the_pessimistic_side_only(ratio, advantage, loss, clipped):
    log_ratio = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    tensors = torch.tensor([advantage], dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    result, binds = ppo_sync.policy_loss(log_ratio, *tensors, 0.3, 0.2)
    assert result.item() == pytest.approx(loss, abs=1e-12)
    assert binds.item() is clipped
    result.sum().backward()
    assert (log_ratio.grad.item() == 0) is clipped


def test_importance_weights_come_after_the_clipping():
    log_ratio = torch.tensor([math.log(1.5), math.log(0.5)], dtype=torch.float64)
    advantages = torch.tensor([2.0, 2.0], dtype=torch.float64)
    plain, clipped = ppo_sync.policy_loss(
        log_ratio, advantages, torch.ones(2, dtype=torch.float64), 0.2, 0.2
    )
    weights = torch.tensor([0.1, 2.0], dtype=torch.float64)
    weighted, clipped_too = ppo_sync.policy_loss(log_ratio, advantages, weights, 0.2, 0.2)
    torch.testing.assert_close(weighted, plain * weights)
    assert clipped.tolist() == clipped_too.tolist() == [True, False]


@pytest.mark.parametrize(
    ("value", "old", "target", "cliprange", "loss", "clipped"),
    [
        (3.0, 0.0, 2.0, 0.0, 0.5, False),
        (2.0, 0.0, 2.0, 0.5, 1.125, True),  # has arrived already, by more than a step may go
        (0.25, 0.0, 2.0, 0.5, 1.53125, False),
        (-3.0, 0.0, 2.0, 0.5, 12.5, False),  # goes the wrong way: the whole loss
    ],
)
def test_value_loss_clips_around_the_old_values(value, old, target, cliprange, loss, clipped):
    result, binds = ppo_sync.value_loss(
        *(torch.tensor([x]) for x in (value, old, target)), cliprange
    )
    assert result.item() == pytest.approx(loss)
    assert binds.item() is clipped


# ----------------------------------------------------------------------------------- learning rate


@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant"])
@pytest.mark.parametrize("warm_up", [0, 1, 4])
def test_learning_rate_of_every_update(schedule, warm_up):
    updates = 12
    args = Args(lr_scheduler_type=schedule, warm_up_steps=warm_up, num_updates=updates)
    rates = [lr_multiplier(update, args) for update in range(updates)]
    assert rates[:warm_up] == pytest.approx([(u + 1) / warm_up for u in range(warm_up)])
    assert rates[warm_up] == 1.0
    done = [(u - warm_up) / (updates - warm_up) for u in range(warm_up, updates)]
    formula = {
        "linear": lambda x: 1 - x,
        "cosine": lambda x: (1 + math.cos(math.pi * x)) / 2,
        "constant": lambda x: 1,
    }
    assert rates[warm_up:] == pytest.approx([formula[schedule](x) for x in done])
    assert rates[-1] > 0


def test_warm_up_as_a_share_of_the_updates():
    args = ppo_sync.fill_in(
        Args(
            total_episodes=640,
            local_rollout_batch_size=64,
            local_mini_batch_size=16,
            num_epochs=2,
            warmup_ratio=0.25,
        )
    )
    assert (args.num_training_steps, args.num_updates, args.warm_up_steps) == (10, 80, 20)
