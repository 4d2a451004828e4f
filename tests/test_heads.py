"""Log-probabilities are the model's own, or the model is refused."""

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


def tiny_model(kind, **changes):
    """A model all of whose parameters are drawn with deviation 1: initial biases are 0."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SIZES, **TOKENS, **KINDS[kind][0] | changes)
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    return model


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_are_the_models_own_or_it_is_refused(kind):
    model = tiny_model(kind)
    policy = script.PolicyModel(model, script.Args(dtype="float32", temperature=0.7))
    generator = torch.Generator().manual_seed(1)
    input_ids = torch.randint(3, 64, (2, 7), generator=generator)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [0, 1, 1, 1, 0, 0, 0]])
    own = torch.log_softmax(model(input_ids).logits / 0.7, dim=-1)
    own = own[:, :-1].gather(-1, input_ids[:, 1:, None]).squeeze(-1) * mask[:, 1:]
    found, _ = policy(input_ids, mask)
    is_own = torch.allclose(found[:, 1:], own, rtol=0, atol=1e-4)
    odd = KINDS[kind][1]
    assert is_own == (odd is None)
    state = torch.random.get_rng_state()
    if odd:
        with pytest.raises(ValueError, match=f"{type(model).__name__} has a head"):
            script.check_head(policy)
    else:
        script.check_head(policy)
    assert torch.equal(torch.random.get_rng_state(), state)  # runs stay what they were


@pytest.mark.parametrize("terms", [("logprobs",), ("entropies",), ("logprobs", "entropies")])
@pytest.mark.parametrize("kind", ["gemma2", "cohere"])  # one caps its logits, one scales them
def test_gradients_of_logprobs_and_entropies_are_the_models_own(kind, terms, monkeypatch):
    """In chunks, of each alone and of both in one loss, at a temperature."""
    monkeypatch.setitem(script.LOGITS_CHUNK, "cpu", 3 * SIZES["vocab_size"])
    model = tiny_model(kind).double()
    model.get_output_embeddings().weight.data *= 0.1  # no probability is near 1
    policy = script.PolicyModel(model, script.Args(dtype="float32", temperature=0.7))
    generator = torch.Generator().manual_seed(1)
    input_ids = torch.randint(3, 64, (2, 9), generator=generator)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1], [0, 1, 1, 1, 0, 0, 0, 0, 0]])
    own = torch.distributions.Categorical(logits=model(input_ids).logits[:, :-1] / 0.7)
    outputs = [*policy(input_ids, mask), own.log_prob(input_ids[:, 1:]), own.entropy()]
    weights = torch.rand(2, 2, 9, generator=generator, dtype=torch.float64) * mask
    gradients = []
    for logprobs, entropies in (outputs[:2], outputs[2:]):
        weighted = {
            "logprobs": logprobs[:, -8:] * weights[0, :, 1:],
            "entropies": entropies[:, -8:] * weights[1, :, 1:],
        }
        loss = sum(weighted[term].sum() for term in terms)
        of_each = torch.autograd.grad(loss, list(model.parameters()))
        gradients.append(torch.cat([gradient.flatten() for gradient in of_each]))
    found, expected = gradients
    assert expected.norm() > 0.1
    assert (found - expected).norm() < 1e-10 * expected.norm()


def test_gradient_of_entropies_is_made_only_where_a_loss_has_them(monkeypatch):
    hidden, head = torch.randn(5, 4, requires_grad=True), torch.randn(7, 4)
    logprobs, entropies = script.ChunkedHead.apply(hidden, head, torch.arange(5), None, False)
    monkeypatch.setattr(torch, "log_softmax", lambda *_, **__: pytest.fail("it was made"))
    logprobs.sum().backward(retain_graph=True)
    with pytest.raises(pytest.fail.Exception, match="it was made"):
        entropies.sum().backward()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("temperature", [0.1, 1.0, 2.0])
def test_head_of_any_precision_and_temperature_is_no_odd_one(dtype, temperature):
    """As in a model that is frozen below its adapters; and a small multiplier still shows."""
    args = script.Args(dtype=dtype, temperature=temperature)
    for changes, is_refused in ({}, False), ({"logits_scaling": 0.9}, True):
        model = tiny_model("hyperclovax", **{"logits_scaling": 1.0} | changes)
        policy = script.PolicyModel(model.to(getattr(torch, dtype)), args)
        if is_refused:
            with pytest.raises(ValueError, match="multiplier"):
                script.check_head(policy)
        else:
            script.check_head(policy)


def test_bias_that_is_small_shows():
    model = tiny_model("phi")
    policy = script.PolicyModel(model, script.Args(dtype="float32"))
    model.lm_head.bias.data.zero_()
    script.check_head(policy)
    model.lm_head.bias.data[5] = 1e-3
    with pytest.raises(ValueError, match="a bias"):
        script.check_head(policy)


def test_run_on_such_a_model_is_refused_before_vllm_starts(run_main, assets, tmp_path):
    folder = tmp_path / "phi"
    tokenizer = AutoTokenizer.from_pretrained(assets / "model")
    model = tiny_model("phi")
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    with pytest.raises(ValueError, match="PhiForCausalLM has a head"):
        run_main("grpo_vllm_async.py", model_name_or_path=folder, output_dir=tmp_path / "output")
    assert not (tmp_path / "output").exists()
