"""scripts/benchmark/fake_memory.py: the plan of memory beside PyTorch's count of fake tensors."""

import fake_memory
import fits
import plan
import pytest
import torch
from torch import distributed, nn


@pytest.mark.parametrize("file", ["ddp.yaml", "fsdp2.yaml"])
def test_plan_is_what_pytorch_counts(file, monkeypatch):
    """Of Qwen3-0.6B with two layers, which are counted in seconds: what is in no layer is most."""
    config_class, hidden_size, _, *others = fits.SHAPES["0.6"]
    monkeypatch.setitem(fits.SHAPES, "0.1", (config_class, hidden_size, 2, *others))
    run = fits.launch("grpo_vllm_async", "0.1", 80, file, learners=8)
    assert plan.learner_needs(run) / fake_memory.count(run) == pytest.approx(1, abs=0.1)


def test_ddp_makes_its_buckets_again_beside_the_gradients(tmp_path):
    """In the first pass after the first update: what the plan has as DDP's second update."""
    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1
    )
    try:
        layers = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(8)))
        model = nn.parallel.DistributedDataParallel(layers, gradient_as_bucket_view=True)
        batch = torch.ones(1, 256)
        model(batch).sum().backward()
        gradients = sum(parameter.grad.nbytes for parameter in model.parameters())
        peaks = []
        for _ in range(2):
            tracker = fake_memory.Tracker()
            tracker.track_external(model)
            with tracker:
                model(batch)
            peaks.append(tracker.peak())
        # Beside the weights and the gradients
        assert peaks == [pytest.approx(3 * gradients, rel=0.01), pytest.approx(2 * gradients, 0.01)]
    finally:
        distributed.destroy_process_group()
