"""The worked examples in the docstrings."""

import doctest

import graders
import make_debug_assets
import pytest
import summarize_run
import train_reward_model

import grpo_vllm_async
import ppo_sync
import ppo_vllm_async

# At least so many examples in each
MODULES = [
    (ppo_sync, 11),
    (ppo_vllm_async, 30),
    (grpo_vllm_async, 11),
    (graders, 3),
    (summarize_run, 5),
    (train_reward_model, 2),
    (make_debug_assets, 2),
]


@pytest.mark.parametrize(("module", "least"), MODULES, ids=[m.__name__ for m, _ in MODULES])
def test_doctests_are_right(module, least):
    result = doctest.testmod(module)
    assert result.attempted >= least
    assert result.failed == 0
