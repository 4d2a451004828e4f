"""A tiny reward model and made-up pairs; and train_reward_model.py in this process."""

import os
from unittest import mock

import torch
import train_reward_model as rm

from helpers.rollouts import STOP, VOCAB

# Responses of (chosen, rejected): no two micro-batches have the same width.
SIZES = [(3, 7), (12, 5), (2, 2), (9, 4), (6, 15), (4, 3), (5, 5), (11, 10)]


def tiny_args(**changes):
    options = {"dtype": "float32", "stop_token_id": STOP, "center_rewards_coefficient": 0.1}
    return rm.Args(**options | changes)


def make_pairs():
    generator = torch.Generator().manual_seed(2)

    def ids(count):
        return [*torch.randint(2, VOCAB, (count,), generator=generator).tolist(), STOP]

    return [rm.Pair(ids(one), ids(other), length=max(one, other) + 1) for one, other in SIZES]


def gradient_and_sums(accelerator, model, size):
    """One vector of all gradients of the eight pairs, and the metrics of their update."""
    model.zero_grad()
    args = tiny_args(per_device_train_batch_size=size)
    metrics = rm.accumulate_gradients(accelerator, model, make_pairs(), list(range(8)), args)
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return gradient, metrics


def train(args):
    """main() in this process, whose children's environment it would set for good."""
    with mock.patch.dict(os.environ):
        rm.main(args)
