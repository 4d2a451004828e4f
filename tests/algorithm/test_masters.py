"""Weights are held as vLLM has them, in bfloat16 by default, and trained through float32 masters.

That ranks sum up their gradients, and that FSDP2 makes the same, is in test_fsdp2.py; that a run
in bfloat16 resumes to the bit, in test_resume.py.
"""

from collections import Counter

import pytest
import torch
from helpers import rollouts
from helpers.rollouts import load_policy, make_rollout, tiny_args
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

import ppo_vllm_async as script

BFLOAT16 = {"dtype": "bfloat16"}


@pytest.fixture
def folder(tmp_path):
    rollouts.tiny_language_model().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_what_is_sent_to_vllm_is_what_the_learner_computes_with(folder):
    """The very tensors. A cast of a loaded model would round its float32 buffers as well."""
    policy, exact = load_policy(folder, **BFLOAT16), load_policy(folder)
    parameters = dict(policy.model.named_parameters())
    assert {weight.dtype for weight in parameters.values()} == {torch.bfloat16}
    for name, sent in script.gather_weights(policy.model, policy.args):
        assert sent.data_ptr() == parameters[name].data_ptr(), name
    frequencies = [each.model.model.rotary_emb.inv_freq for each in (policy, exact)]
    assert torch.equal(*frequencies) and frequencies[0].dtype == torch.float32


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_masters_keep_updates_that_are_too_small_for_the_weights(
    dtype, folder, accelerator, tmp_path
):
    """An update of 1e-6 would leave a bfloat16 weight of 0.3 as it is, however often it came."""
    policy = load_policy(folder, dtype=dtype)
    args = policy.args
    weight = policy.model.lm_head.weight
    before = weight.detach().to(torch.float32, copy=True)
    optimizer = script.make_optimizer(policy, args)
    for _ in range(300):
        weight.master.grad.fill_(1e-3)
        script.apply_gradients(accelerator, policy, optimizer, 1e-6, None, tmp_path, args)
        assert torch.equal(weight, weight.master.to(weight.dtype))
    assert (weight.master.data_ptr() == weight.data_ptr()) == (dtype == "float32")
    expected = torch.full_like(before, -3e-4)
    torch.testing.assert_close(weight.master - before, expected, rtol=0.1, atol=0)
    assert (weight != before).any()


def test_masters_sum_up_gradients_in_float32():
    """In bfloat16 a thousand terms of 0.01 would add up to 4."""
    layer = torch.nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    script.make_optimizer(layer, tiny_args(**BFLOAT16))
    for _ in range(1000):
        (0.01 * layer.weight).sum().backward()
    assert layer.weight.grad is None  # the memory of a gradient is one master's
    assert layer.weight.master.grad.item() == pytest.approx(10, rel=2e-3)


class Operations(TorchDispatchMode):
    """Count what is computed or copied; a view is neither."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if not function.is_view and function is not torch.ops.aten._unsafe_view.default:
            self.counts[str(function)] += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("checkpointing", "limit"), [(True, 160), (False, 124)])
def test_a_layer_takes_few_operations(checkpointing, limit, tmp_path):
    """Casts, and hooks that round weights, would each be a kernel on a GPU."""
    totals = []
    for layers in (2, 3):
        path = tmp_path / str(layers)
        config = LlamaConfig(**rollouts.CONFIG | {"num_hidden_layers": layers})
        LlamaForCausalLM(config).save_pretrained(path)
        policy = load_policy(path, gradient_checkpointing=checkpointing, **BFLOAT16)
        script.make_optimizer(policy, policy.args)
        batch = rollouts.in_float32(make_rollout())
        with Operations() as seen:
            logprobs, _ = policy(batch.input_ids, batch.mask)
            logprobs.sum().backward()
        totals.append(seen.counts)
    a_layer = totals[1] - totals[0]
    assert 50 < a_layer.total() <= limit


def test_flags_of_adamw_are_those_of_its_only_group(folder):
    """By default torch's AdamW decays weights by 0.01."""
    for flags in ({"eps": 1e-6, "weight_decay": 0.25}, {}):
        policy = load_policy(folder, **flags)
        (group,) = script.make_optimizer(policy, policy.args).param_groups
        assert {name: group[name] for name in flags} == flags
        assert flags or group["weight_decay"] == 0
