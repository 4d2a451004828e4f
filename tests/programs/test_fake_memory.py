"""scripts/benchmark/fake_memory.py: the plan of memory beside PyTorch's count of fake tensors."""

import fake_memory
import fits
import pytest
from internal import resource_plan as plan


@pytest.mark.parametrize("file", ["ddp.yaml", "fsdp2.yaml"])
def test_plan_is_what_pytorch_counts(file, monkeypatch):
    """Of Qwen3-0.6B with two layers, which are counted in seconds: what is in no layer is most."""
    config_class, hidden_size, _, *others = fits.SHAPES["0.6"]
    monkeypatch.setitem(fits.SHAPES, "0.1", (config_class, hidden_size, 2, *others))
    run = fits.launch("grpo_vllm_async", "0.1", 80, file, learners=8)
    assert plan.learner_needs(run) / fake_memory.count(run) == pytest.approx(1, abs=0.1)
