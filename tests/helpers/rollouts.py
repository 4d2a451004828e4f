"""Tiny models and a made-up batch of unequal lengths."""

import random
import sys
from collections import defaultdict
from dataclasses import fields, replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
)

import grpo_vllm_async as grpo
import ppo_vllm_async as script
from helpers.formulas import logprobs_and_entropies
from helpers.runs import sequences_of

VOCAB, STOP, PAD = 23, 1, 0
INTEGERS = {"input_ids", "lengths"}
# (prompt length, response length)
SIZES = [(3, 1), (9, 12), (1, 5), (4, 2), (7, 9), (2, 7), (5, 3), (6, 11)]


CONFIG = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,  # far from uniform, so that a mistake shows
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": STOP,
    "pad_token_id": PAD,
}


def tiny_language_model(seed=0, **changes):
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(Qwen2Config(**CONFIG | changes))


def tiny_classifier(seed, **changes):
    """Return a model with one label, like reward models and value models."""
    torch.manual_seed(seed)
    return Qwen2ForSequenceClassification(Qwen2Config(**CONFIG | {"num_labels": 1} | changes))


TINY = {"dtype": "float32", "per_device_train_batch_size": 8, "temperature": 0.8}


def tiny_args(**changes):
    return script.Args(**TINY | {"stop_token_ids": (STOP,), "cliprange_value": 0.3} | changes)


def grpo_args(**changes):
    # The length is more than that of the longest response
    options = TINY | {"response_length": 20, "beta": 0.1, "number_samples_per_prompt": 4}
    return grpo.Args(**options | changes)


def tiny_policy(seed=0, temperature=0.8):
    return script.PolicyModel(tiny_language_model(seed), tiny_args(temperature=temperature))


def load_policy(path, trained=True, **changes):
    """As main() does."""
    args = tiny_args(**changes)
    model = script.load_model(AutoModelForCausalLM, str(path), args, trained)
    return script.PolicyModel(model, args)


def tiny_value_model(seed=1):
    return script.ValueModel(tiny_classifier(seed), tiny_args())


def tiny_reward_model(seed=1):
    return script.RewardModel(tiny_classifier(seed), tiny_args())


def make_rollout():
    """Return a batch as main() builds it, with log-probabilities far from any model's."""
    generator = torch.Generator().manual_seed(2)

    def ids(count):
        return torch.randint(VOCAB, (count,), generator=generator).tolist()

    # What collate() pads with is a token as others, and may be the stop token
    sequences = [(ids(prompt), [*ids(response - 1), PAD]) for prompt, response in SIZES]
    input_ids, mask, lengths = collate_pairs(sequences)
    mask = mask.double()

    noise = partial(noise_of_tokens, mask, generator)
    logprobs = noise() - 3.0 * mask
    return script.Batch(
        input_ids=input_ids,
        lengths=lengths,
        mask=mask,
        scores=torch.randn(8, generator=generator, dtype=torch.float64),
        has_score=torch.ones(8, dtype=torch.float64),
        loss_mask=mask.clone(),
        sampler_logprobs=logprobs - 0.5 * noise(),
        logprobs=logprobs,
        ref_logprobs=logprobs - 0.3 * noise(),
        values=noise(),
        advantages=noise(),
        returns=noise(),
    )


def grpo_rollout(policy, distance):
    """Return a batch of GRPO near a policy, with one advantage per response."""
    batch = near_policy(make_rollout(), policy, distance)
    generator = torch.Generator().manual_seed(5)
    advantages = torch.randn(8, 1, dtype=torch.float64, generator=generator) * batch.mask
    parts = vars(batch) | {"advantages": advantages}
    return grpo.Batch(**{field.name: parts[field.name] for field in fields(grpo.Batch)})


def noise_of_tokens(mask, generator):
    """Return a standard normal number for each token of the responses, and 0 elsewhere."""
    values = torch.randn(len(SIZES), 12, generator=generator, dtype=torch.float64)
    counts = torch.tensor([response for _, response in SIZES])
    return script.to_rows(values[torch.arange(12) < counts[:, None]], mask)


def in_float32(batch):
    """Return a copy whose tensors have the dtype of a real run."""
    tensors = {name: value for name, value in vars(batch).items() if name not in INTEGERS}
    return replace(batch, **{n: value.float() for n, value in tensors.items() if value is not None})


def near_policy(batch, policy, distance, temperature=0.8):
    """Return a copy whose old policy is this policy plus noise.

    The sampler and the reference policy keep their distance to it. At distance 0 the old policy is
    this one. At distance 0.4 some ratios are clipped and others are not.
    """
    generator = torch.Generator().manual_seed(6)
    sequences = zip(*sequences_of(vars(batch)), strict=True)
    logprobs, _ = logprobs_and_entropies(policy.model, *sequences, temperature)
    noise = noise_of_tokens(batch.mask, generator)
    old = script.to_rows(torch.cat(logprobs), batch.mask) + distance * noise
    change = old - batch.logprobs
    return replace(
        batch,
        logprobs=old,
        sampler_logprobs=batch.sampler_logprobs + change,
        ref_logprobs=batch.ref_logprobs + change,
    )


def one_of_ranks(rank, world_size):
    """Return the accelerator of a rank without the others, whose sums are its own part."""
    return SimpleNamespace(
        process_index=rank,
        num_processes=world_size,
        device=torch.device("cpu"),
        reduce=lambda tensor: tensor,
    )


def gradients(accelerator, models, batch, args, mini_batch=range(8)):
    """Return one vector of all gradients of a mini-batch, and the sums over its tokens.

    models: those of the policy and PPO's value model that are trained.
    """
    for model in models:
        model.zero_grad()
    script, rows = sys.modules[type(batch).__module__], list(mini_batch)  # a fork's is its own
    pairs = [(model, losses_of(script, model)) for model in models]
    has_args = hasattr(script.Args, "loss_aggregation")
    divisor = script.loss_divisor(batch.loss_mask[rows], *([args] if has_args else []))
    sums = defaultdict(int)
    script.accumulate_gradients(accelerator, pairs, batch, rows, divisor, sums, args)
    parameters = [p for model in models for p in model.parameters() if p.grad is not None]
    vector = torch.cat([p.grad.flatten() for p in parameters])
    del sums["val/update_tokens"]  # ranks can need more rows
    return vector, {name: value.item() for name, value in sums.items()}


def losses_of(script, model):
    """Return the function that computes a model's losses in main()."""
    is_policy = type(model).__name__ == "PolicyModel"
    return script.token_losses if is_policy else script.value_losses


def check_any_cut(models, batch, args, expected, expected_sums, ways=8):
    """Check that gradients() returns this for any order of rows, any sizes and any ranks."""
    draw = random.Random(7)
    for _ in range(ways):
        sizes = {"per_device_train_batch_size": draw.randint(0, 8)}
        sizes["micro_batch_tokens"] = draw.choice([16_384, 45])
        rows, count = draw.sample(range(8), 8), draw.choice([1, 2, 4])
        cut = replace(args, **sizes)
        shares = [gradients(one_of_ranks(i, count), models, batch, cut, rows) for i in range(count)]
        vectors, sums = zip(*shares, strict=True)
        found = sum(vectors)
        assert (found - expected).norm() < 1e-10 * expected.norm(), (sizes, count)
        assert {*sums[0]} == {*expected_sums}
        for name, value in expected_sums.items():
            total = sum(of_rank[name] for of_rank in sums)
            assert total == pytest.approx(value, rel=1e-9, abs=1e-9), name


def groups_of_equals():
    """Return 32 groups of four responses. Those of a group have the same token ids.

    One prompt has two groups, and one response follows two prompts.
    """
    generator = torch.Generator().manual_seed(4)

    def ids(most):
        count = int(torch.randint(1, most + 1, (1,), generator=generator))
        return torch.randint(2, VOCAB, (count,), generator=generator).tolist()

    pairs = [(ids(most=9), ids(most=12)) for _ in range(32)]
    pairs[1] = (pairs[0][0], pairs[1][1])
    pairs[3] = (pairs[3][0], pairs[2][1])
    prompts = [prompt_of(prompt) for prompt, _ in pairs]
    return [response_of(prompts[i // 4], pairs[i // 4][1]) for i in range(4 * len(pairs))]


def prompt_of(token_ids):
    return script.Prompt("", "", token_ids, None, None, None)


def response_of(prompt, token_ids, logprobs=None, stopped=True, **rest):
    """Return a Response, whose numbers are arrays as vLLM's process makes them."""
    logprobs = [0.0] * len(token_ids) if logprobs is None else logprobs
    token_ids, logprobs = np.array(token_ids, np.int32), np.array(logprobs, np.float32)
    return script.Response(prompt, token_ids, logprobs, stopped, **rest)


def collate_pairs(pairs):
    """Return what collate() makes of prompts and responses: (input_ids, mask, lengths)."""
    batch = script.collate([response_of(prompt_of([*ids]), more) for ids, more in pairs], "cpu")
    return batch.input_ids, batch.mask, batch.lengths


def plain(responses):
    """Return responses as dicts that == compares to the bit, which it cannot do with arrays."""
    return [
        {
            name: (str(value.dtype), value.tolist()) if isinstance(value, np.ndarray) else value
            for name, value in vars(response).items()
        }
        for response in responses
    ]


def make_noise(model, seed):
    """Give a model an adapter that changes much."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.1, generator=generator)
