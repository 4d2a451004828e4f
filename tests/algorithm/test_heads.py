"""Log-probabilities and values are the model's own, with its weights as vLLM gets them.

Or the model is refused. A head with a multiplier that is not known ends a run in its first step,
by check_sampler.
"""

import contextlib

import preflight
import pytest
import torch
import transformers
from helpers import formulas, rollouts
from helpers.rollouts import VOCAB, make_rollout, tiny_args
from helpers.runs import sequences_of
from transformers import AutoConfig, AutoModelForCausalLM

import ppo_vllm_async as script

MORE = {"intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 32}
WINDOW = MORE | {"sliding_window": 4}  # the longest row of make_rollout has 21 tokens
# Configs, with multipliers that are not 1
KINDS = dict.fromkeys(("qwen2", "qwen3", "llama", "phi"), MORE) | {
    "mistral": WINDOW,
    "gemma2": WINDOW | {"final_logit_softcapping": 20.0},
    "gemma3_text": WINDOW | {"final_logit_softcapping": 15.0},
    "gptj": {"rotary_dim": 16},
    "gpt_neox": {"intermediate_size": 64},
    "gpt2": {},
    "granite": MORE | {"logits_scaling": 4.0, "residual_multiplier": 0.5},
    "cohere": MORE | {"logit_scale": 0.25},
    "hyperclovax": MORE | {"logits_scaling": 0.25},
    "mpt": {},
}
# What is odd at the heads of those that are refused
ODD = {"phi": "a bias", "gptj": "a bias", "hyperclovax": "its own multiplier"}
EXPERTS = MORE | {"num_local_experts": 4, "num_experts_per_tok": 2}
MIXTURES = dict.fromkeys(("mixtral", "granitemoe", "phimoe"), EXPERTS)
MIXTURES["qwen3_moe"] = EXPERTS | {"moe_intermediate_size": 32, "num_experts": 4}

INPUT_IDS = torch.randint(3, VOCAB, (2, 9), generator=torch.Generator().manual_seed(1))
MASK = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1], [0, 1, 1, 1, 0, 0, 0, 0, 0]])


def tiny_model(kind, auto_class=AutoModelForCausalLM, **changes):
    """A model all of whose parameters are drawn with deviation 1: initial biases are 0."""
    torch.manual_seed(0)
    sizes = rollouts.CONFIG | {"hidden_size": 64, "num_key_value_heads": 2, "num_labels": 1}
    model = auto_class.from_config(
        AutoConfig.for_model(kind, **sizes | (KINDS | MIXTURES)[kind] | changes)
    )
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    return model.eval()


def tiny_classifier(kind):
    """A value model; None: transformers has no classifier of this kind."""
    config = AutoConfig.for_model(kind)
    if type(config) in transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        classifier = tiny_model(kind, transformers.AutoModelForSequenceClassification)
        return script.ValueModel(classifier, tiny_args())


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_padded_rows_say_what_each_says_alone_or_the_model_is_refused(kind):
    """Of what a model does after its last layer nothing may be lost; and there is no mask."""
    batch, policy = make_rollout(), script.PolicyModel(tiny_model(kind).double(), tiny_args())
    sequences, inputs = sequences_of(vars(batch)), (batch.input_ids, batch.mask)
    inside = batch.mask.bool()
    pairs = zip(*sequences, strict=True)
    own, _ = formulas.logprobs_and_entropies(policy.model, *pairs, policy.args.temperature)
    is_own = torch.allclose(policy(*inputs)[0][inside], torch.cat(own), rtol=0, atol=1e-5)
    assert is_own == (kind not in ODD)  # in float32 check_sampler sees the others
    has_bias = getattr(policy.model.get_output_embeddings(), "bias", None) is not None
    assert has_bias == (ODD.get(kind) == "a bias")  # by which the preflight refuses it
    if value_model := tiny_classifier(kind):
        value_model.double()
        values = torch.cat([formulas.values_of(value_model.model, *pair) for pair in sequences])
        torch.testing.assert_close(value_model(*inputs)[inside], values, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["qwen2", "llama", "gemma2", "mistral", "gpt_neox", "gpt2"])
def test_no_mask_comes_to_the_attention_but_for_a_sliding_window(kind, monkeypatch):
    """Without one it is causal by itself, and key heads are not repeated."""
    calls, attention = [], torch.nn.functional.scaled_dot_product_attention

    def note(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **rest):
        calls.append((attn_mask is None, is_causal))
        return attention(query, key, value, attn_mask, dropout_p, is_causal, **rest)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", note)
    models = [script.PolicyModel(tiny_model(kind), tiny_args()), tiny_classifier(kind)]
    for model in models:
        model.model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    batch = rollouts.in_float32(make_rollout())
    rollouts.gradients(rollouts.one_of_ranks(0, 1), models, batch, tiny_args())
    without = (True, True)
    assert without in calls or kind == "mistral"
    assert (set(calls) == {without}) == (kind not in ("gemma2", "mistral"))


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
        monkeypatch.setitem(script.LOGITS_CHUNK, "cpu", positions * VOCAB)
        outputs = torch.stack(policy(INPUT_IDS, MASK))[..., 1:]
        assert (outputs - expected).norm() < 1e-10 * expected.norm()
        for terms in ([0], [1], [0, 1]):
            right = gradient(expected, terms)
            assert right.norm() > 0.1
            assert (gradient(outputs, terms) - right).norm() < 1e-10 * right.norm()


def test_gradient_of_entropies_is_not_made_in_vain_and_no_other_head_is_kept(monkeypatch):
    """No loss may have them, and both take memory of a vocabulary."""
    hidden, head = torch.randn(5, 4, requires_grad=True), torch.randn(7, 4).bfloat16()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        outputs = script.ChunkedHead.apply(hidden, head, torch.arange(5), None)
    assert {x.data_ptr() for x in saved if x.shape == head.shape} == {head.data_ptr()}
    monkeypatch.setattr(torch, "log_softmax", lambda *_, **__: pytest.fail("it was made"))
    logprobs, entropies = outputs
    logprobs.sum().backward(retain_graph=True)
    assert hidden.grad.any()
    with pytest.raises(pytest.fail.Exception, match="it was made"):
        entropies.sum().backward()


HAS_BIAS = "the head's bias would not be trained"
REFUSED = {"phi": HAS_BIAS, "gptj": HAS_BIAS} | dict.fromkeys(MIXTURES, "a mixture of experts")


@pytest.mark.parametrize("kind", [*KINDS, *MIXTURES])
def test_preflight_refuses_a_model_whose_weights_reach_vllm_wrongly_and_no_other(kind):
    """Those of experts have other names in memory than in vLLM."""
    is_refused = pytest.raises(preflight.Mistake, match=REFUSED.get(kind))
    with is_refused if kind in REFUSED else contextlib.nullcontext():
        preflight.check_weights(tiny_model(kind))


def test_preflight_refuses_buffers_that_vllm_would_not_get():
    """As Gemma 4's layer_scalar. Rotary embeddings have others, which are computed."""
    model = tiny_model("llama")
    model.model.register_buffer("layer_index", torch.ones(1, dtype=torch.int64))
    model.model.register_buffer("cached", torch.ones(1), persistent=False)
    preflight.check_weights(model)
    model.model.register_buffer("layer_scalar", torch.ones(1))
    with pytest.raises(preflight.Mistake, match=r"^model\.layer_scalar would not be trained"):
        preflight.check_weights(model)
