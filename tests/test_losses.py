"""The mathematics of a step: statistics, advantages, losses, masks, the learning rate."""

import math
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from helpers.formulas import gae_by_definition, weights_by_definition

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


@pytest.mark.parametrize("normalization", ["standard", "centered"])
def test_failed_reward_is_no_zero_in_its_group(normalization):
    """What stands in its place must not matter."""
    scores = torch.tensor([1.0, 3.0, 4.0, 0.0, 2.0, 2.0, 5.0, 9.0], dtype=torch.float64)
    scored = torch.tensor([1, 1, 1, 0, 0, 1, 1, 1], dtype=torch.float64)
    others = torch.tensor([1.0, 3.0, 4.0, 2.0, 5.0, 9.0], dtype=torch.float64)
    expected = grpo.group_advantages(others, 3, normalization)
    for stand_in in (0.0, -1e6):
        scores[[3, 4]] = stand_in
        advantages = grpo.group_advantages(scores, 4, normalization, scored)
        torch.testing.assert_close(advantages[scored.bool()], expected)
        assert advantages[[3, 4]].tolist() == [0.0, 0.0]
    deviation = others[:3].std(correction=1) if normalization == "standard" else 1
    torch.testing.assert_close(advantages[:3], (others[:3] - others[:3].mean()) / deviation)


@pytest.mark.parametrize("normalization", ["standard", "centered"])
@pytest.mark.parametrize("score", [0.1, 3.3, -10.0])
@pytest.mark.parametrize("left", [0, 1, 2, 7])
def test_rest_of_a_group_without_spread_is_exactly_zero(left, score, normalization):
    # As in test_constant_group_is_exactly_zero; and the zeros of the failed ones are no spread
    scored = torch.tensor([0.0] * (8 - left) + [1.0] * left)
    scores = score * scored
    assert grpo.has_spread(scores.view(1, 8), scored.view(1, 8)).tolist() == [[False]]
    assert (grpo.group_advantages(scores, 8, normalization, scored) == 0).all()


def test_where_every_reward_came_nothing_changes():
    scores = torch.randn(24, generator=torch.Generator().manual_seed(0))
    for normalization in ("standard", "centered"):
        expected = grpo.group_advantages(scores, 6, normalization)
        found = grpo.group_advantages(scores, 6, normalization, torch.ones(24))
        assert torch.equal(found, expected)


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


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped"),
    [
        (2.9, -2.0, 5.8, False),
        (3.1, -2.0, 6.0, True),  # far from the old policy: a bad action is not pushed without end
        (1e6, -2.0, 6.0, True),
        (0.5, -2.0, 1.4, True),  # PPO's own clip
        (1.0, -2.0, 2.0, False),
        (3.1, 2.0, -2.4, True),  # good actions have PPO's clip alone
        (0.5, 2.0, -1.0, False),
        (3.1, 0.0, 0.0, False),
    ],
)
def test_dual_clip_bounds_the_loss_of_bad_actions(ratio, advantage, loss, clipped):
    log_ratio = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    tensors = torch.tensor([advantage]).double(), torch.tensor([0.5]).double()
    result, binds = ppo_sync.policy_loss(log_ratio, *tensors, 0.3, 0.2, dual_clip=3.0)
    assert result.item() == pytest.approx(0.5 * loss, abs=1e-12)
    assert binds.item() is clipped
    result.sum().backward()
    assert (log_ratio.grad.item() == 0) is (clipped or advantage == 0)


def test_without_dual_clip_the_loss_of_bad_actions_has_no_bound():
    assert Args().dual_clip == grpo.Args().dual_clip == 0
    tensors = torch.tensor([20.0]), torch.tensor([-2.0]), torch.ones(1)
    for default in ({}, {"dual_clip": 0.0}):
        loss, clipped = ppo_sync.policy_loss(*tensors, 0.2, 0.2, **default)
        assert loss.item() == 2 * tensors[0].exp().item() and not clipped.item()


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


# ----------------------------------------------------------------------------------- mismatch mask


@pytest.mark.parametrize(
    ("kind", "limit", "expected"),
    [
        ("none", 2.0, [[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0]]),
        ("token", 2.0, [[1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 0]]),
        ("token", 5.5, [[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0]]),
        ("token", 1.0, [[1, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]),
        # The geometric means are 0.93, 5 and 1.7; arithmetic ones would be 1.7, 5 and 1.7
        ("sequence", 1.6, [[1, 1, 1, 1], [0, 0, 0, 0], [0, 0, 0, 0]]),
        ("sequence", 2.0, [[1, 1, 1, 1], [0, 0, 0, 0], [1, 1, 1, 0]]),
        ("sequence", 1.05, [[0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]),
    ],
)
def test_tokens_far_from_the_sampler_are_masked_on_both_sides(kind, limit, expected):
    ratios = [[1.0, 0.6, 5.0, 0.25], [5.0, 5.0, 1e9, 1.0], [1.7, 1.7, 1.7, 1e9]]
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0]], dtype=torch.float64)
    args = Args(mismatch_mask=kind, mismatch_mask_range=limit)
    log_ratio = torch.tensor(ratios, dtype=torch.float64).log() * mask
    assert ppo_sync.mismatch_mask(log_ratio, mask, args).tolist() == expected
    assert ppo_sync.mismatch_mask(-log_ratio, mask, args).tolist() == expected


@pytest.mark.parametrize("kind", ["token", "sequence"])
def test_mismatch_mask_is_that_of_the_definition(kind):
    sizes = [7, 1, 4, 2, 7, 7]
    mask = ragged_mask(sizes)
    generator = torch.Generator().manual_seed(0)
    old, sampler = torch.randn(2, 6, 7, dtype=torch.float64, generator=generator) * mask
    for limit in (1.1, 1.5, 3.0):
        args = Args(mismatch_mask=kind, mismatch_mask_range=limit, tis_cap=0.0)
        found = ppo_sync.mismatch_mask(old - sampler, mask, args)
        for row, size in enumerate(sizes):
            expected = weights_by_definition(old[row, :size], sampler[row, :size], args)
            assert found[row].tolist() == expected.tolist() + [0.0] * (7 - size)


def test_mismatch_mask_without_limit_masks_nothing():
    mask = ragged_mask([5, 1, 3]).float()
    log_ratio = torch.tensor([[0.0, 80.0, -80.0, 1.0, -1e4]] * 3) * mask
    off = ppo_sync.mismatch_mask(log_ratio, mask, Args())
    assert Args().mismatch_mask == "none"
    for kind in ("token", "sequence"):
        args = Args(mismatch_mask=kind, mismatch_mask_range=math.inf)
        assert torch.equal(ppo_sync.mismatch_mask(log_ratio, mask, args), off)


@pytest.mark.parametrize("kind", ["token", "sequence"])
def test_share_of_masked_tokens_is_reported(kind):
    mask = ragged_mask([4, 1, 2])
    ratios = torch.tensor([[1.0, 1.0, 4.0, 1.0], [4.0] * 4, [0.25] * 4], dtype=torch.float64)
    batch = SimpleNamespace(mask=mask, logprobs=ratios.log() * mask, sampler_logprobs=0 * mask)
    args = Args(mismatch_mask=kind, mismatch_mask_range=2.0)
    metrics = ppo_sync.mismatch_metrics(batch, ratios, args)
    masked = {"token": 4 / 7, "sequence": 3 / 7}[kind]
    assert metrics["mismatch/masked"].item() == pytest.approx(masked)
    everything = ppo_sync.mismatch_metrics(batch, ratios, Args(mismatch_mask_range=2.0))
    without_limit = replace(args, mismatch_mask_range=math.inf)
    assert ppo_sync.mismatch_metrics(batch, ratios, without_limit) == everything
    assert everything["mismatch/masked"] == 0


# ----------------------------------------------------------------------------------- learning rate


@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant"])
@pytest.mark.parametrize("warm_up", [0, 1, 4])
@pytest.mark.parametrize("updates", [5, 12])
def test_learning_rate_of_every_update(schedule, warm_up, updates):
    # Another model of the run may have more updates
    args = Args(lr_scheduler_type=schedule, warm_up_steps=warm_up, num_updates=40)
    rates = [lr_multiplier(update, updates, args) for update in range(updates)]
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


@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant"])
def test_learning_rate_of_a_long_run_is_above_zero_to_the_end(schedule):
    args = Args(lr_scheduler_type=schedule, warm_up_steps=10)
    last, before = (lr_multiplier(update, 10**6, args) for update in (10**6 - 1, 10**6 - 2))
    assert 0 < last <= before


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
