"""The worked examples in the docstrings."""

import doctest
import importlib

import pytest

SCRIPTS = "ppo_sync ppo_vllm_async grpo_vllm_async train_reward_model"
OTHERS = """
    graders if_constraints plot_runs inspect_run evaluate make_debug_assets
    gpu_check preprocessing provenance push_to_hub helpers.line_links
"""


@pytest.mark.parametrize("name", f"{SCRIPTS} {OTHERS}".split())
def test_examples_are_right(name):
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted > 0
    assert result.failed == 0
