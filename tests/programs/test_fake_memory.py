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
def two_layers(monkeypatch):
    """The name of a size: Qwen3-0.6B with two layers, which are counted in seconds."""
    hidden_size, _, *others = fits.QWEN3["0.6"]
    monkeypatch.setitem(fits.QWEN3, "0.1", (hidden_size, 2, *others))
    return "0.1"


@pytest.mark.parametrize(
    ("name", "launch", "rank"),
    [
        (GRPO, {"file": "ddp.yaml", "learners": 8}, 0),
        (PPO, {"file": "fsdp2.yaml", "learners": 8}, 0),
        (PPO, {"file": "fsdp2_two_nodes.yaml", "learners": 8, "nodes": 2}, 16),
    ],
)
def test_plan_is_what_pytorch_counts(name, launch, rank, two_layers):
    """A tenth apart would be seen: here tensors that do not grow with the layers are most."""
    run = fits.launch(name, two_layers, 80, rank=rank, **launch)
    assert plan.learner_needs(run) / fake_memory.count(run) == pytest.approx(1, abs=0.04)


def test_what_fsdp2_gathers_is_what_pytorch_counts():
    """In a cell of README, where the root unit in float32, and a buffer for it, are a fifth."""
    run = fits.launch(GRPO, "14", 80, "fsdp2.yaml", learners=6, vllm_gpus=(6, 7))
    ratio = plan.learner_needs(run) / fake_memory.count_by_line(run, few=4, more=5)
    assert 0.99 < ratio < 1.03  # other moments are close


def test_straight_line_is_the_count_of_all_layers(monkeypatch):
    hidden_size, _, *others = fits.QWEN3["0.6"]
    monkeypatch.setitem(fits.QWEN3, "0.2", (hidden_size, 6, *others))
    run = fits.launch(GRPO, "0.2", 80, "one_gpu.yaml")
    counted = fake_memory.count_by_line(run, few=2, more=4)
    assert counted == pytest.approx(fake_memory.count(run), rel=1e-3)


def test_each_part_of_a_step_has_its_line(monkeypatch):
    """DDP's second update takes the most only where there are many layers."""
    run = fits.launch(GRPO, "1.7", 80, "ddp.yaml", learners=8)
    assert plan.learner_memory(run)[0] == "DDP's second update"
    counted = {2: [7, 1, 5], 4: [9, 5, 5]}  # at 28 layers 33, 53 and 5
    monkeypatch.setattr(fake_memory, "count_parts", lambda _, layers: counted[layers])
    assert fake_memory.count_by_line(run, few=2, more=4) == 53


def test_sharded_tensors_are_counted_as_by_pytorchs_tracker_for_fsdp(two_layers, monkeypatch):
    """FSDPMemTracker knows one model; so the program has MemTracker, which sees the same."""
    run = fits.launch(GRPO, two_layers, 80, "fsdp2.yaml", learners=8)

    def train(run, models, roles, tracker):  # it knows one pass, too
        fake_memory.read_pass(run, models["policy"], True, tracker).mean().backward()

    monkeypatch.setattr(fake_memory, "run_passes", train)
    counted = fake_memory.count(run)

    class Tracker(FSDPMemTracker):
        def __init__(self):
            pass

        def track_external(self, policy, optimizer):
            super().__init__(policy, optimizer)

        def begin_part(self, *_):
            pass

        @property
        def peaks(self):
            (kinds,) = self.get_tracker_snapshot("peak").values()
            return [kinds["Total"]]

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
        assert max(tracker.peaks) - before == pytest.approx(gradients, rel=0.01)
        tracker = fake_memory.Tracker()
        tracker.track_external(model)
        with tracker:
            model(batch)
        assert max(tracker.peaks) == pytest.approx(before, rel=0.01)
    finally:
        distributed.destroy_process_group()
