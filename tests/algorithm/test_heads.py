"""Log-probabilities are the model's own, with its weights as vLLM gets them; or it is refused.

Of a head with a multiplier that is not known preflight.py tells (test_preflight.py).
"""

import copy

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import ppo_sync as script

SIZES = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
MORE = {"intermediate_size": 64, "num_key_value_heads": 2}
# name: its config, with multipliers that are not 1; what is odd at its head, if that is refused
KINDS = {
    "qwen2": (MORE, None),
    "qwen3": (MORE | {"head_dim": 32}, None),
    "llama": (MORE, None),
    "gemma2": (MORE | {"head_dim": 32, "final_logit_softcapping": 20.0}, None),
    "gemma3_text": (MORE | {"head_dim": 32, "final_logit_softcapping": 15.0}, None),
    "phi": (MORE, "a bias"),
    "gptj": ({"rotary_dim": 16}, "a bias"),
    "gpt_neox": ({"intermediate_size": 64}, None),
    "granite": (MORE | {"logits_scaling": 4.0, "residual_multiplier": 0.5}, None),
    "cohere": (MORE | {"logit_scale": 0.25}, None),
    "hyperclovax": (MORE | {"logits_scaling": 0.25}, "its own multiplier"),
    "mpt": ({}, None),
}

INPUT_IDS = torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(1))
MASK = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1], [0, 1, 1, 1, 0, 0, 0, 0, 0]])


def tiny_model(kind, **changes):
    """A model all of whose parameters are drawn with deviation 1: initial biases are 0."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SIZES | TOKENS | KINDS[kind][0] | changes)
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    return model


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_are_the_models_own_or_it_is_refused(kind):
    model = tiny_model(kind)
    policy = script.PolicyModel(model, script.Args(dtype="float32", temperature=0.7))
    own = torch.log_softmax(model(INPUT_IDS).logits / 0.7, dim=-1)
    own = own[:, :-1].gather(-1, INPUT_IDS[:, 1:, None]).squeeze(-1) * MASK[:, 1:]
    found, _ = policy(INPUT_IDS, MASK)
    is_own = torch.allclose(found[:, 1:], own, rtol=0, atol=1e-4)
    odd = KINDS[kind][1]
    assert is_own == (odd is None)  # in float32 check_sampler sees the others
    has_bias = getattr(model.get_output_embeddings(), "bias", None) is not None
    assert has_bias == (odd == "a bias")  # by which load_model refuses it


@pytest.mark.parametrize("kind", ["gemma2", "cohere"])  # one caps its logits, one scales them
def test_gradients_of_logprobs_and_entropies_are_the_models_own(kind, monkeypatch):
    """In chunks of some positions, of each alone and of both in one loss, at a temperature."""
    model = tiny_model(kind).double()
    model.get_output_embeddings().weight.data *= 0.1  # no probability is near 1
    policy = script.PolicyModel(model, script.Args(dtype="float32", temperature=0.7))
    own = torch.distributions.Categorical(logits=model(INPUT_IDS).logits[:, :-1] / 0.7)
    expected = torch.stack([own.log_prob(INPUT_IDS[:, 1:]), own.entropy()]) * MASK[:, 1:]
    weights = torch.rand(2, 2, 8, generator=torch.Generator().manual_seed(1))

    def gradient(outputs, terms):
        loss = (outputs * weights)[terms].sum()
        found = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        return torch.cat([each.flatten() for each in found])

    for positions in (1, 3, 50):
        monkeypatch.setitem(script.LOGITS_CHUNK, "cpu", positions * SIZES["vocab_size"])
        outputs = torch.stack(policy(INPUT_IDS, MASK))[..., 1:]
        assert (outputs - expected).norm() < 1e-10 * expected.norm()
        for terms in ([0], [1], [0, 1]):
            right = gradient(expected, terms)
            assert right.norm() > 0.1
            assert (gradient(outputs, terms) - right).norm() < 1e-10 * right.norm()


def test_gradients_that_nothing_needs_are_not_made(monkeypatch):
    """Of the entropies, which no loss may have, and of a frozen head."""
    hidden, head = torch.randn(5, 4, requires_grad=True), torch.randn(7, 4)
    logprobs, entropies = script.ChunkedHead.apply(hidden, head, torch.arange(5), None, head.dtype)
    for name in ("log_softmax", "zeros_like"):
        monkeypatch.setattr(torch, name, lambda *_, **__: pytest.fail("it was made"))
    logprobs.sum().backward(retain_graph=True)
    assert hidden.grad.any()
    with pytest.raises(pytest.fail.Exception, match="it was made"):
        entropies.sum().backward()


def gradients_of(policy):
    """Log-probabilities, entropies, and each parameter's gradient of their sum."""
    logprobs, entropies = policy(INPUT_IDS, MASK)
    (logprobs + entropies).sum().backward()
    of_each = {name: parameter.grad for name, parameter in policy.named_parameters()}
    return {"logprobs": logprobs, "entropies": entropies} | of_each


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "gpt_neox"])
def test_policy_computes_with_its_weights_as_vllm_gets_them(kind, tied, checkpointing, monkeypatch):
    """In bfloat16: to the bit as the same model does whose weights are rounded in place."""
    monkeypatch.setitem(script.LOGITS_CHUNK, "cpu", 3 * SIZES["vocab_size"])
    # Of that size embeddings of Gemma's are multiplied by what bfloat16 has not
    model = tiny_model(kind, tie_word_embeddings=tied, hidden_size=96).train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    rounded, before = copy.deepcopy(model), copy.deepcopy(model.state_dict())
    for parameter in rounded.parameters():
        parameter.data = parameter.data.bfloat16().float()
    args = script.Args(dtype="bfloat16", temperature=0.7)
    policy = script.PolicyModel(model, args)
    monkeypatch.setattr(script, "round_weights", lambda model: None)
    expected = script.PolicyModel(rounded, args)

    found = gradients_of(policy)
    for name, tensor in gradients_of(expected).items():
        assert torch.equal(found[name], tensor), name
        assert found[name].dtype == torch.float32  # a gradient is not rounded
    # The weights that are trained, synced and saved are the unrounded ones
    assert found.keys() - {"logprobs", "entropies"} == dict(policy.named_parameters()).keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]) and tensor.dtype == torch.float32, name
    # And the next pass reads what an update has made of them
    for one, other in zip(model.parameters(), rounded.parameters(), strict=True):
        one.data += 0.01
        other.data = one.data.bfloat16().float()
    assert torch.equal(policy(INPUT_IDS, MASK)[0], expected(INPUT_IDS, MASK)[0])


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_frozen_policy_is_read_as_it_is(kind, monkeypatch):
    """A reference policy, or the base of adapters: it is in bfloat16 already."""
    model = tiny_model(kind, hidden_size=96).bfloat16().requires_grad_(False)
    args = script.Args(dtype="bfloat16")
    found, _ = script.PolicyModel(copy.deepcopy(model), args)(INPUT_IDS, MASK)
    monkeypatch.setattr(script, "round_weights", lambda model: None)
    assert torch.equal(found, script.PolicyModel(model, args)(INPUT_IDS, MASK)[0])


def test_rounded_copy_of_the_head_is_not_kept_for_the_backward_pass():
    hidden, head = torch.randn(5, 4), torch.randn(7, 4, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        script.ChunkedHead.apply(hidden, head, torch.arange(5), None, torch.bfloat16)
    kept = {tensor.data_ptr() for tensor in saved if tensor.shape == head.shape}
    assert kept == {head.data_ptr()}


MIXTURES = {
    "qwen3_moe": {"moe_intermediate_size": 32, "num_experts": 4, "head_dim": 32},
    "mixtral": {"num_local_experts": 4},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "phimoe": {"num_local_experts": 4},
}


@pytest.mark.parametrize("kind", MIXTURES)
def test_mixture_of_experts_is_refused(kind, tmp_path):
    """Its weights have other names in memory than in vLLM, or reach it wrongly."""
    config = AutoConfig.for_model(kind, **SIZES, **TOKENS, **MORE, **MIXTURES[kind])
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is a mixture of experts"):
        script.load_model(AutoModelForCausalLM, str(tmp_path), script.Args(), trained=True)


def test_run_on_such_a_model_is_refused_before_vllm_starts(run_main, assets, tmp_path):
    folder = tmp_path / "phi"
    tokenizer = AutoTokenizer.from_pretrained(assets / "model")
    model = tiny_model("phi")
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    with pytest.raises(ValueError, match="its head has a bias"):
        run_main("grpo_vllm_async.py", model_name_or_path=folder, output_dir=tmp_path / "output")
    assert not (tmp_path / "output").exists()
