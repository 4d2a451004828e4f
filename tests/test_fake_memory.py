"""scripts/benchmark/fake_memory.py: the plan of memory beside PyTorch's count of fake tensors."""

import fake_memory
import fits
import plan
import pytest
import torch
from torch import distributed, nn
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker

GRPO, PPO = "grpo_vllm_async", "ppo_vllm_async"


@pytest.fixture
def with_layers(monkeypatch):
    """with_layers("0.6", 2): the name of that size with two layers, which are counted in seconds."""

    def cut(size, num_layers):
        hidden_size, _, *others = fits.QWEN3[size]
        monkeypatch.setitem(fits.QWEN3, f"{size}/{num_layers}", (hidden_size, num_layers, *others))
        return f"{size}/{num_layers}"

    return cut


@pytest.mark.parametrize(
    ("name", "size", "launch", "rank"),
    [
        # The most is in the head, backwards
        (PPO, "0.6", {"file": "ddp.yaml", "learners": 8}, 0),
        # ... where both gradients of a tied weight are added up
        (GRPO, "4", {"file": "fsdp2.yaml", "learners": 8}, 0),
        # ... when the root unit is gathered a second time
        (GRPO, "8", {"file": "fsdp2_two_nodes.yaml", "learners": 8, "nodes": 2}, 16),
    ],
)
def test_plan_is_what_pytorch_counts(name, size, launch, rank, with_layers):
    """Within less than in the tables: of two layers, most is what does not grow with layers."""
    run = fits.launch(name, with_layers(size, 2), 80, rank=rank, **launch)
    assert plan.learner_needs(run) / fake_memory.count(run) == pytest.approx(1, abs=0.05)


def test_straight_line_is_the_count_of_all_layers(with_layers):
    run = fits.launch(GRPO, with_layers("0.6", 6), 80, "fsdp2.yaml", learners=16)
    counted = fake_memory.count_by_line(run, few=2, more=4)
    assert counted == pytest.approx(fake_memory.count(run), rel=0.01)


def test_sharded_tensors_are_counted_as_by_pytorchs_tracker_for_fsdp(with_layers, monkeypatch):
    """FSDPMemTracker knows one model; so the program has MemTracker, which sees the same."""
    run = fits.launch(GRPO, with_layers("0.6", 2), 80, "fsdp2.yaml", learners=8)

    def train(run, models, roles):  # it knows one pass, too
        fake_memory.read_pass(run, models["policy"], True).mean().backward()

    monkeypatch.setattr(fake_memory, "run_passes", train)
    counted = fake_memory.count(run)

    class Tracker(FSDPMemTracker):
        def __init__(self):
            pass

        def track_external(self, policy, optimizer):
            super().__init__(policy, optimizer)

        peak = fake_memory.Tracker.peak

    monkeypatch.setattr(fake_memory, "Tracker", Tracker)
    assert fake_memory.count(run) == pytest.approx(counted, rel=1e-3)


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
        tracker = fake_memory.Tracker()
        tracker.track_external(model)
        gradients = sum(parameter.grad.nbytes for parameter in model.parameters())
        before = 2 * gradients  # with the weights
        with tracker:
            model(batch)
        assert tracker.peak() - before == pytest.approx(gradients, rel=0.01)
        tracker = fake_memory.Tracker()
        tracker.track_external(model)
        with tracker:
            model(batch)
        assert tracker.peak() == pytest.approx(before, rel=0.01)
    finally:
        distributed.destroy_process_group()
