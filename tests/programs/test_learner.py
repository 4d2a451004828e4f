"""Test scripts/benchmark/learner.py, and count what would keep a GPU busy or waiting."""

import json

import fits
import learner
import pytest
import torch
import transformers
from helpers import fake_memory, rollouts
from internal import resource_plan as plan
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM

import ppo_vllm_async as script

FAMILIES = ("Qwen2", "Qwen3", "Llama", "Mistral", "SmolLM3", "Phi3", "Granite", "Gemma3Text")
TINY = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 90}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0}


def tiny_policy(family="Qwen2", **changes):
    """Return a policy of this family with random weights, by the script's load_model."""
    config, args = getattr(transformers, f"{family}Config")(**TINY), script.Args(**changes)
    model_class = AutoModelForCausalLM._model_mapping[type(config)]
    torch.manual_seed(0)
    return script.PolicyModel(learner.load_model(config, model_class, args, True, "cpu"), args)


def read(policy, rows, length):
    """Return log-probabilities of a micro-batch with prompts of 5 tokens, and their gradient."""
    mask = torch.ones(rows, length)
    mask[:, :5] = 0
    generator = torch.Generator().manual_seed(rows * length)
    logprobs, _ = policy(torch.randint(2, 90, (rows, length), generator=generator), mask)
    policy.zero_grad()
    logprobs.sum().backward()
    return logprobs, torch.cat([weight.grad.flatten() for weight in policy.parameters()])


def test_cell_has_its_figures_and_a_failed_one_does_not_end_the_rest(capsys):
    smaller = learner.TINY | {"value_model": False}
    cells = ({"size": "tiny", "rows": 0}, learner.TINY, smaller)
    learner.main([json.dumps(cell) for cell in cells])
    failed, three_models, two_models = map(json.loads, capsys.readouterr().out.splitlines())
    assert failed["error"] and "seconds" not in failed
    for cell in (three_models, two_models):
        assert cell["ratio"] == 0 and cell["grad_norm"] > 0 and cell["tokens_per_s"] > 0
        assert cell["seconds"].keys() == {"forward", "advantages", "update", "weights"}
    assert two_models["ops"] < three_models["ops"]


@pytest.mark.parametrize("file", ["ddp.yaml", "fsdp2.yaml"])
def test_plan_is_what_pytorch_counts(file, monkeypatch):
    """Use Qwen3-0.6B with two layers, where most of the memory is in no layer."""
    config_class, hidden_size, _, *others = fits.SHAPES["0.6"]
    monkeypatch.setitem(fits.SHAPES, "0.1", (config_class, hidden_size, 2, *others))
    run = fits.launch("grpo_vllm_async", "0.1", 80, file, learners=8)
    assert plan.learner_needs(run) / fake_memory.count(run) == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("size", ["0.5", "0.6"])
@pytest.mark.parametrize("checkpointing", [True, False])
def test_roofline_of_the_plan_is_that_of_pytorchs_operations(size, checkpointing, monkeypatch):
    """Use four layers of Qwen2.5 and Qwen3. A change of a script that adds casts fails here."""
    config_class, hidden_size, _, *others = fits.SHAPES[size]
    monkeypatch.setitem(fits.SHAPES, "four", (config_class, hidden_size, 4, *others))
    run = fits.launch("ppo_vllm_async", "four", 80, "one_gpu.yaml")
    run.args.gradient_checkpointing = checkpointing
    fits.models_of.cache_clear()
    rows = run.args.micro_batch_tokens / run.max_length()
    rates = plan.peak_of("H100")
    rates = rates[0] * plan.REACHED_FLOPS, rates[1] * plan.REACHED_BANDWIDTH
    wrapper = fake_memory.load_models(run)["value model"]
    with FakeTensorMode():
        fake_memory.fill(wrapper)
        run.script.make_optimizer(wrapper, run.args)
        with learner.Ops(*rates) as forward, torch.no_grad():
            fake_memory.forward_pass(run, wrapper)
        with learner.Ops(*rates) as update:
            fake_memory.forward_pass(run, wrapper).mean().backward()
    for trains, counted in enumerate((forward, update)):
        seconds = plan.pass_seconds(run, run.value_model, rows, trains)
        assert seconds == pytest.approx(counted.seconds, rel=0.15)
        in_python = plan.pass_seconds(run, run.value_model, rows, trains, host=1.0)
        assert in_python == pytest.approx(counted.count, abs=60)  # some are in no layer


def test_host_seldom_waits_for_the_gpu(accelerator):
    """Python waits where it needs the result of an operation, and then nothing is queued."""
    args = rollouts.tiny_args(per_device_train_batch_size=4)
    models = rollouts.tiny_policy(), rollouts.tiny_value_model()
    batch = rollouts.in_float32(rollouts.make_rollout())
    waits = {}
    for limit in (4, 8):
        args.per_device_train_batch_size = limit
        with learner.Ops() as forward:
            script.forward_all(accelerator, models[0], batch, [list(range(8))], args)
        with learner.Ops() as update:
            rollouts.gradients(accelerator, models, batch, args)
        waits[limit] = forward.syncs.total(), update.syncs.total()
    # A limit of 4 rows gives two micro-batches, and a limit of 8 one
    in_forward, in_update = (more - less for more, less in zip(waits[4], waits[8], strict=True))
    assert 0 < in_forward <= 4
    assert 0 < in_update <= 8


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_gets_no_mask_so_that_a_fused_kernel_takes_it(family, monkeypatch):
    seen = []
    attention = torch.nn.functional.scaled_dot_product_attention

    def spy(*tensors, attn_mask=None, is_causal=False, **options):
        seen.append((attn_mask, is_causal))
        return attention(*tensors, attn_mask=attn_mask, is_causal=is_causal, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    read(tiny_policy(family, dtype="float32"), 3, 40)
    assert len(seen) >= 2 and {*seen} == {(None, True)}


# -------------------------------------------------------------------------------- compiled layers


@pytest.fixture
def compiler(monkeypatch):
    """Use a fast backend for Dynamo, and return its counters, which are empty."""
    compile_ = torch.compile
    put = lambda *args, **options: compile_(*args, backend="aot_eager", **options)  # noqa: E731
    monkeypatch.setattr(torch, "compile", put)
    torch._dynamo.reset()
    counters.clear()
    yield counters
    torch._dynamo.reset()


@pytest.mark.slow
def test_layers_of_all_shapes_share_a_graph_and_compute_the_same(compiler):
    """The second forward pass of gradient checkpointing is compiled as well."""
    plain, compiled = (
        tiny_policy(dtype="float32"),
        tiny_policy(dtype="float32", compile_layers=True),
    )
    graphs = set()
    for rows, length in ((4, 33), (5, 40), (2, 64), (3, 50), (7, 21)):
        pairs = zip(read(compiled, rows, length), read(plain, rows, length), strict=True)
        for result, expected in pairs:
            assert (result - expected).norm() <= 1e-6 * expected.norm()
        graphs.add(compiler["stats"]["unique_graphs"])
    assert graphs == {1} and not compiler["graph_break"]


@pytest.mark.slow
def test_layer_that_cannot_be_one_graph_is_an_error(compiler, monkeypatch):
    """Otherwise a part of it would run uncompiled without a message."""
    layer = transformers.models.qwen2.modeling_qwen2.Qwen2MLP
    forward = layer.forward

    def printing(self, x):
        print("here")
        return forward(self, x)

    monkeypatch.setattr(layer, "forward", printing)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        read(tiny_policy(dtype="float32", compile_layers=True), 2, 20)
