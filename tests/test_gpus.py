"""What GPUs need, as far as a CPU can show it.

Attention without a mask, TF32 in the head alone, gradients in memory once, room for CUDA itself.
"""

import importlib
from types import SimpleNamespace

import pytest
import torch
import train_reward_model
from helpers import PPO, SCRIPTS, TRAINER, hooks, preference_pairs
from helpers.files import write_rows
from helpers.loops import EPISODES
from helpers.processes import gradient_of_ranks
from helpers.rollouts import (
    VOCAB,
    gradients,
    in_float32,
    make_rollout,
    tiny_args,
    tiny_policy,
)
from helpers.runs import sequences_of
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
)

import ppo_vllm_async as script

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "num_labels": 1,
}
FAMILIES = {
    "Qwen2": Qwen2Config(**SIZES),
    "Llama": LlamaConfig(**SIZES),
    "Gemma 2": Gemma2Config(**SIZES, head_dim=16, sliding_window=4, final_logit_softcapping=2.0),
    "Mistral": MistralConfig(**SIZES, sliding_window=4),
    "GPTNeoX": GPTNeoXConfig(**SIZES | {"num_key_value_heads": 2}),
    "GPT-2": GPT2Config(**SIZES | {"num_key_value_heads": 2}, n_inner=64, n_positions=64),
}
# Beyond it there is a mask: the longest row of make_rollout has 21 tokens
WITH_A_WINDOW = {"Gemma 2", "Mistral"}


def make_models(name, dtype):
    """A policy and a value model, with values other than zeros."""
    torch.manual_seed(0)
    args, config = tiny_args(dtype="float32"), FAMILIES[name]
    language_model = AutoModelForCausalLM.from_config(config)
    classifier = AutoModelForSequenceClassification.from_config(config)
    models = script.PolicyModel(language_model, args), script.ValueModel(classifier, args)
    return [model.to(dtype).eval() for model in models]


# ------------------------------------------------------------------------ attention without a mask


@torch.no_grad()
def masked_outputs(policy, value_model, batch):
    """Log-probabilities and values of the response tokens: (tokens,) each.

    Prompts are padded on the left and responses on the right, with an attention mask that hides the
    padding and positions that do not count it.
    """
    sequences = sequences_of(vars(batch))
    width = max(len(prompt) for prompt, _ in sequences)
    length = width + max(len(response) for _, response in sequences)
    ids, attention_mask = torch.zeros(2, len(sequences), length, dtype=torch.int64)
    inside = torch.zeros_like(ids, dtype=torch.bool)
    for row, (prompt, response) in enumerate(sequences):
        start, end = width - len(prompt), width + len(response)
        ids[row, start:end] = torch.tensor(prompt + response)
        attention_mask[row, start:end] = 1
        inside[row, width:end] = True
    position_ids = (attention_mask.cumsum(1) - 1).clamp(min=0)
    inputs = {"attention_mask": attention_mask, "position_ids": position_ids}
    logits = policy.model(ids, **inputs).logits[:, :-1] / policy.args.temperature
    logprobs = torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    hidden = value_model.model.base_model(ids, **inputs).last_hidden_state[:, :-1]
    values = value_model.model.score(hidden).squeeze(-1)
    return logprobs[inside[:, 1:]], values[inside[:, 1:]]


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-10), (torch.float32, 5e-6)])
@pytest.mark.parametrize("name", FAMILIES)
def test_rows_without_a_mask_say_what_masked_ones_do(name, dtype, limit):
    policy, value_model = make_models(name, dtype)
    batch = make_rollout()
    inside = batch.mask.bool()
    with torch.no_grad():
        logprobs, _ = policy(batch.input_ids, batch.mask)
        values = value_model(batch.input_ids, batch.mask).roll(1, dims=1)
    expected = masked_outputs(policy, value_model, batch)
    for found, one in zip((logprobs[inside], values[inside]), expected, strict=True):
        assert one.std() > 1e-3
        torch.testing.assert_close(found, one, rtol=0, atol=limit)


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_no_mask_comes_to_the_attention_but_for_a_sliding_window(
    name, gradient_checkpointing, monkeypatch
):
    """Without one it is causal by itself, and key heads are not repeated."""
    calls = []

    def note(call, given):
        calls.append((given["attn_mask"] is None, given["is_causal"]))
        return call()

    attention = torch.nn.functional.scaled_dot_product_attention

    def bound(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **rest):
        return attention(query, key, value, attn_mask, dropout_p, is_causal, **rest)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", bound)
    hooks.around(torch.nn.functional, "scaled_dot_product_attention", note, put=monkeypatch.setattr)
    models, batch = make_models(name, torch.float32), in_float32(make_rollout())
    for model in models:
        if gradient_checkpointing:
            model.model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    gradients(SimpleNamespace(process_index=0, num_processes=1), models, batch, tiny_args())
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


@pytest.fixture(scope="module")
def encoders(assets, tmp_path_factory):
    """Classifiers that attend to later tokens, with the debug model's tokenizer: their folders."""
    tokenizer = AutoTokenizer.from_pretrained(assets / "model")
    sizes = SIZES | {"vocab_size": len(tokenizer), "eos_token_id": 1, "bos_token_id": None}
    sizes["initializer_range"] = 0.5  # so that tokens matter to each other, as in trained models
    gemma = Gemma3TextConfig(**sizes, head_dim=16, use_bidirectional_attention=True)
    folders = {}
    for config in (BertConfig(**sizes), gemma):
        folders[config.model_type] = path = tmp_path_factory.mktemp(config.model_type)
        tokenizer.save_pretrained(path)
        AutoModelForSequenceClassification.from_config(config).save_pretrained(path)
    return folders


ENCODER = "attends to later tokens; it must be a causal model"


def test_reward_trainer_refuses_an_encoder(encoders, tmp_path):
    """Before it trains one that nothing could use."""
    pairs = write_rows(tmp_path / "pairs.jsonl", [{"prompt": "5=", "chosen": "5", "rejected": "3"}])
    args = preference_pairs.tiny_args(
        dataset=str(pairs), local_mini_batch_size=1, warmup_ratio=0.0, output_dir=str(tmp_path)
    )
    args.model_name_or_path = str(encoders["gemma3_text"])
    with pytest.raises(ValueError, match=ENCODER):
        train_reward_model.main(args)


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
            is_allowed = torch.backends.cuda.matmul.allow_tf32
            self.seen.add((str(function.overloadpacket), of_head, is_allowed))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("dtype", "in_head"), [("bfloat16", True), ("float32", False)])
def test_tf32_is_for_the_products_of_the_head_alone(dtype, in_head):
    """A switch for the whole process would round rotary embeddings of positions above 2,048."""
    policy, batch = tiny_policy(), in_float32(make_rollout())
    policy.args = tiny_args(dtype=dtype)
    with Products() as products:
        logprobs, entropies = policy(batch.input_ids, batch.mask)
        (logprobs.sum() + entropies.sum()).backward()
    assert {name for name, of_head, _ in products.seen if of_head} == {"aten.mm", "aten.addmm_"}
    assert {allowed for _, of_head, allowed in products.seen if of_head} == {in_head}
    assert {allowed for _, of_head, allowed in products.seen if not of_head} == {False}
    assert not torch.backends.cuda.matmul.allow_tf32


@pytest.mark.parametrize(("device", "logits"), [("cpu", 2**25), ("cuda", 2**27)])
def test_chunks_are_larger_on_gpus(device, logits, monkeypatch):
    """At 220 rows, reading the head would take as long as its products."""
    sizes = []

    def note(logits, labels):
        sizes.append(len(logits))
        return torch.zeros(2, len(logits))

    monkeypatch.setattr(script, "head_logits", lambda hidden, head, soft_cap: hidden)
    monkeypatch.setattr(script, "token_logprobs", note)
    monkeypatch.setitem(script.LOGITS_CHUNK, "cpu", script.LOGITS_CHUNK[device])
    hidden, head, labels = torch.zeros(70, 1), torch.zeros(2**22, 1), torch.zeros(70)
    script.ChunkedHead.apply(hidden, head, labels, None, False)
    assert max(sizes) == logits // len(head) and sum(sizes) == 70


# ------------------------------------------------------------------ what is set before a run begins


class Enough(Exception):
    pass


@pytest.mark.parametrize("name", [*SCRIPTS, TRAINER])
def test_attention_of_cudnn_is_off(name, run_main, monkeypatch):
    """Its backward pass may give NaN, and vLLM turns it off where there is an engine alone."""
    torch.backends.cuda.enable_cudnn_sdp(True)

    def look(*_, **__):
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        raise Enough

    monkeypatch.setattr("accelerate.Accelerator.__init__", look)
    with pytest.raises(Enough):
        if name == TRAINER:
            train_reward_model.main(preference_pairs.tiny_args())
        else:
            run_main(name)


@pytest.mark.parametrize("gigabytes", [24, 80])
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_shared_gpu_leaves_2_gib_to_cuda(name, gigabytes, run_main, monkeypatch):
    """Two contexts take 0.9 GiB, whatever the size of the GPU."""
    fractions = []
    gpu = SimpleNamespace(total_memory=gigabytes * 2**30)

    def note(fraction):
        fractions.append(fraction)
        raise Enough

    monkeypatch.setattr("accelerate.Accelerator.device", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: gpu)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", note)
    with pytest.raises(Enough):
        run_main(name, vllm_gpu_memory_utilization=0.3)
    assert fractions == [pytest.approx(0.7 - 2 / gigabytes)]


# ------------------------------------------------------------------------------- gradients, once


@pytest.mark.slow
def test_gradients_are_in_ddps_buckets_alone(tmp_path):
    """After each backward pass, from the third update on: DDP arranges buckets in the first two."""
    result = gradient_of_ranks("storages", 2, 2, tmp_path)
    for buckets, in_passes in result["updates"][2:]:
        assert buckets and len(in_passes) == 2 * 2  # two passes of two models
        assert len(buckets) == len(set(buckets))  # ranks exchange them once
        assert all(storages == set(buckets) for storages in in_passes)


@pytest.mark.parametrize("name", PPO)
def test_policy_has_no_gradients_while_the_value_model_warms_up(name, run_main, monkeypatch):
    seen = []

    def note(call, given):
        call_result = call()
        policy, value_model = given["policy"], given["value_model"]
        seen.append(
            [{p.grad is None for p in model.parameters()} for model in (policy, value_model)]
        )
        return call_result

    hooks.around(
        importlib.import_module(name.removesuffix(".py")),
        "accumulate_gradients",
        note,
        put=monkeypatch.setattr,
    )
    run_main(name, total_episodes=2 * EPISODES, value_warmup_steps=1, num_epochs=1)
    assert seen[0] == [{True}, {False}]
    assert seen[-1] == [{False}, {False}]
