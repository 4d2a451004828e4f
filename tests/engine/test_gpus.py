"""What GPUs need, as far as a CPU can show it.

Attention without a mask, TF32 in the head alone, room for CUDA itself. That gradients are in memory
once is in test_fsdp2.py.
"""

from types import SimpleNamespace

import pytest
import torch
from helpers import SCRIPTS, TRAINER, formulas, preference_pairs, rollouts
from helpers.files import write_rows
from helpers.rollouts import VOCAB, make_rollout, tiny_args
from helpers.runs import sequences_of
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
)

import ppo_vllm_async as script

SIZES = rollouts.CONFIG | {"num_labels": 1}
WHOLE_HEADS = SIZES | {"num_key_value_heads": 2}
# Gemma limits its logits, Cohere and Granite scale them
FAMILIES = {
    "Qwen2": Qwen2Config(**SIZES),
    "Llama": LlamaConfig(**SIZES),
    "Gemma 2": Gemma2Config(**SIZES, head_dim=16, sliding_window=4, final_logit_softcapping=2.0),
    "Mistral": MistralConfig(**SIZES, sliding_window=4),
    "Cohere": CohereConfig(**SIZES, logit_scale=0.3),
    "Granite": GraniteConfig(**SIZES, logits_scaling=4.0),
    "GPTNeoX": GPTNeoXConfig(**WHOLE_HEADS),
    "GPT-2": GPT2Config(**WHOLE_HEADS, n_inner=64, n_positions=64),
}
# Beyond it there is a mask: the longest row of make_rollout has 21 tokens
WITH_A_WINDOW = {"Gemma 2", "Mistral"}
HEAD_ALONE = {"Cohere", "Granite"}  # transformers has no classifiers of theirs


def make_models(name, dtype):
    """A policy, and a value model with values other than zeros."""
    torch.manual_seed(0)
    args, config = tiny_args(), FAMILIES[name]
    models = [script.PolicyModel(AutoModelForCausalLM.from_config(config), args)]
    if name not in HEAD_ALONE:
        classifier = AutoModelForSequenceClassification.from_config(config)
        models.append(script.ValueModel(classifier, args, is_value_model=True))
    return [model.to(dtype).eval() for model in models]


# ------------------------------------------------------------------------ attention without a mask


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_padded_rows_say_without_a_mask_what_each_says_alone(name):
    """Also where a model limits or scales its logits."""
    models, batch = make_models(name, torch.float64), make_rollout()
    policy, *value_models = models
    sequences, inputs = sequences_of(vars(batch)), (batch.input_ids, batch.mask)
    pairs = zip(*sequences, strict=True)
    logprobs, _ = formulas.logprobs_and_entropies(policy.model, *pairs, policy.args.temperature)
    ways = [(policy(*inputs)[0], logprobs)]
    for one in value_models:
        values = [formulas.values_of(one.model, *pair) for pair in sequences]
        ways.append((one(*inputs), values))
    for found, expected in ways:
        expected = torch.cat(expected)
        assert expected.std() > 0.05
        torch.testing.assert_close(found[batch.mask.bool()], expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in HEAD_ALONE])
def test_no_mask_comes_to_the_attention_but_for_a_sliding_window(name, monkeypatch):
    """Without one it is causal by itself, and key heads are not repeated."""
    calls, attention = [], torch.nn.functional.scaled_dot_product_attention

    def note(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **rest):
        calls.append((attn_mask is None, is_causal))
        return attention(query, key, value, attn_mask, dropout_p, is_causal, **rest)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", note)
    models = make_models(name, torch.float32)
    for model in models:
        model.model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    rollouts.gradients(
        rollouts.one_of_ranks(0, 1), models, rollouts.in_float32(make_rollout()), tiny_args()
    )
    without = (True, True)
    assert without in calls or name == "Mistral"
    assert (set(calls) == {without}) == (name not in WITH_A_WINDOW)


def test_reward_trainer_has_no_mask_either(accelerator):
    calls = []
    model = preference_pairs.tiny_reward_model()
    model.model.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: calls.append(kwargs), with_kwargs=True
    )
    preference_pairs.gradient_and_sums(accelerator, model, 3)
    assert calls and all(given == {"use_cache": False} for given in calls)


def test_reward_trainer_refuses_an_encoder(assets, tmp_path):
    """Before it trains one that nothing could use: its tokens attend to later ones."""
    tokenizer = AutoTokenizer.from_pretrained(assets / "model")
    tokenizer.save_pretrained(tmp_path)
    sizes = SIZES | {"vocab_size": len(tokenizer), "initializer_range": 0.5}
    config = Gemma3TextConfig(**sizes, head_dim=16, use_bidirectional_attention=True)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    pairs = write_rows(tmp_path / "pairs.jsonl", [{"prompt": "5=", "chosen": "5", "rejected": "3"}])
    options = {"dataset": str(pairs), "model_name_or_path": str(tmp_path), "warmup_ratio": 0.0}
    options |= {"output_dir": str(tmp_path), "local_mini_batch_size": 1}
    with pytest.raises(ValueError, match="attends to later tokens; it must be a causal model"):
        preference_pairs.train(preference_pairs.tiny_args(**options))


# ------------------------------------------------------------------------ the head on tensor cores


PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_)


class Products(TorchDispatchMode):
    """Of each product of two matrices: whether it is the head's, and whether TF32 is allowed."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket in PRODUCTS:
            of_head = any(VOCAB in tensor.shape for tensor in args if tensor.dim() == 2)
            self.seen.add((of_head, torch.backends.cuda.matmul.allow_tf32))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("dtype", "in_head"), [("bfloat16", True), ("float32", False)])
def test_tf32_is_for_the_products_of_the_head_alone(dtype, in_head):
    """A switch for the whole process would round rotary embeddings of positions above 2,048."""
    policy, batch = rollouts.tiny_policy(), rollouts.in_float32(make_rollout())
    policy.args = tiny_args(dtype=dtype)
    with Products() as products:
        logprobs, entropies = policy(batch.input_ids, batch.mask)
        (logprobs.sum() + entropies.sum()).backward()
    assert products.seen == {(True, in_head), (False, False)}
    assert not torch.backends.cuda.matmul.allow_tf32


# ------------------------------------------------------------------ what is set before a run begins


class Enough(Exception):
    pass


def stop_here(*_, **__):
    raise Enough


@pytest.mark.parametrize("name", [*SCRIPTS, TRAINER])
def test_attention_of_cudnn_is_off(name, run_main, monkeypatch):
    """Its backward pass may give NaN, and vLLM turns it off where there is an engine alone."""
    torch.backends.cuda.enable_cudnn_sdp(True)
    monkeypatch.setattr("accelerate.Accelerator.__init__", stop_here)
    with pytest.raises(Enough):
        if name == TRAINER:
            preference_pairs.train(preference_pairs.tiny_args())
        else:
            run_main(name)
    assert not torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize(
    ("gpus", "ranks", "left"),
    [((), 1, 0.7 - 2 / 24), ((), 2, 0.7 - 3 / 24), ((6, 7), 6, 1 - 2 / 24)],
)
def test_room_is_left_for_contexts_and_nccl_and_vllm(gpus, ranks, left, monkeypatch):
    """A context takes 0.5 to 0.8 GiB, NCCL 0.5 to 1.6, whatever the size of the GPU."""
    noted = []
    gpu = SimpleNamespace(total_memory=24 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: gpu)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", noted.append)
    args = tiny_args(vllm_gpus=gpus, world_size=ranks, vllm_gpu_memory_utilization=0.3)
    script.limit_memory(torch.device("cuda"), args)
    script.limit_memory(torch.device("cpu"), args)
    assert noted == [pytest.approx(left)]


@pytest.mark.parametrize("name", SCRIPTS)
def test_memory_is_limited_before_a_model_is_loaded(name, run_main, monkeypatch):
    gpu = SimpleNamespace(total_memory=24 * 2**30)
    monkeypatch.setattr("accelerate.Accelerator.device", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: gpu)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", stop_here)
    with pytest.raises(Enough):
        run_main(name, vllm_gpu_memory_utilization=0.3)
