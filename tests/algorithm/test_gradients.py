"""The gradient of an optimizer batch, of PPO and of GRPO, however it is cut.

GRPO's other gradients are in test_grpo.py; formulas.py has the losses as the papers write them.
"""

import itertools
import math

import pytest
import torch
from helpers import formulas, rollouts
from helpers.rollouts import gradients, grpo_args, one_of_ranks, tiny_args

SEQUENCE = {"importance_sampling_level": "sequence"}
OF_PPO = [{}, {"cliprange": 0.05}, {"cliprange_value": 0.0}, {"tis_cap": 0.0}, {"tis_cap": 1.1}]
OF_GRPO = [
    {},
    {"beta": 0.0},
    {"kl_estimator": "kl1"},
    {"tis_cap": 1.1},
    {"cliprange": 0.05},
    {"cliprange_higher": 4.0},
    {"tis_cap": 0.0, **SEQUENCE},
    {"loss_aggregation": "sequence"},
    {"loss_aggregation": "constant", **SEQUENCE},
    {"loss_aggregation": "constant", "beta": 0.0},
]


def models_of(algorithm, dtype=torch.float64):
    models = [rollouts.tiny_policy(), rollouts.tiny_value_model()]
    return [model.to(dtype) for model in models[: 2 if algorithm == "ppo" else 1]]


def batch_near(models, distance):
    policy, *value_models = models
    if value_models:
        return rollouts.near_policy(rollouts.make_rollout(), policy, distance)
    return rollouts.grpo_rollout(policy, distance)


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [*(("ppo", options) for options in OF_PPO), *(("grpo", options) for options in OF_GRPO)],
    ids=str,
)
def test_gradient_is_that_of_the_papers_formula_however_it_is_cut(algorithm, options):
    """A mean over tokens or responses, without those whose reward failed or that were cut."""
    models, args_of = models_of(algorithm), tiny_args if algorithm == "ppo" else grpo_args
    args = args_of(**options)
    cases = [(0.4, [1, 4])] if options else [(0.4, [1, 4]), (0.4, []), (0.0, [1, 4])]
    for distance, left_out in cases:
        batch = batch_near(models, distance)
        batch.loss_mask[left_out] = 0
        expected = formulas.reference_gradient(models, batch, args)
        if options:  # it binds
            plain, _ = formulas.reference_gradient(models, batch, args_of())
            assert (expected[0] - plain).norm() > 1e-3 * expected[0].norm()
        if args.beta == 0:
            batch.ref_logprobs = None
        rollouts.check_any_cut(models, batch, args, *expected)


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_batch_with_nothing_to_train_on_gives_a_finite_zero(algorithm):
    """It is what remains of a mini-batch whose rewards all failed."""
    models, every_args = models_of(algorithm, torch.float32), [tiny_args()]
    batch = rollouts.in_float32(batch_near(models, 0.4))
    batch.loss_mask.zero_()
    if algorithm == "grpo":
        kinds = ("token", "sequence", "constant")
        every_args = [grpo_args(per_device_train_batch_size=3, loss_aggregation=k) for k in kinds]
    for args, rank in itertools.product(every_args, (one_of_ranks(0, 1), one_of_ranks(1, 2))):
        vector, sums = gradients(rank, models, batch, args)
        assert (vector == 0).all() and all(map(math.isfinite, sums.values()))
        assert sums["tokens"] == sums["loss/policy_avg"] == sums.get("loss/value_avg", 0) == 0
