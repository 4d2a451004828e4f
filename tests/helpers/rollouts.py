"""Tiny models and a made-up rollout of unequal lengths, for tests and two_rank_gradient.py."""

from dataclasses import replace
from types import SimpleNamespace

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification

import ppo_sync
from helpers.formulas import chosen_logprobs

VOCAB, STOP, PAD = 23, 1, 0
# (prompt length, response length): no two micro-batches have the same width.
SIZES = [(3, 1), (9, 12), (1, 5), (4, 2), (7, 9), (2, 7), (5, 3), (6, 11)]


def tiny_config(**changes):
    options = {
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
    return Qwen2Config(**options | changes)


def tiny_language_model(seed=0, **changes):
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(tiny_config(**changes))


def tiny_classifier(seed, **changes):
    """One label, as reward and value models have."""
    torch.manual_seed(seed)
    return Qwen2ForSequenceClassification(tiny_config(num_labels=1, **changes))


def tiny_policy(seed=0, temperature=0.8, **changes):
    return ppo_sync.PolicyModel(tiny_language_model(seed, **changes), temperature)


def tiny_value_model(seed=1, **changes):
    return ppo_sync.ValueModel(tiny_classifier(seed, **changes))


def load_policy(args):
    """The policy as main() loads it."""
    model, _ = ppo_sync.load_model(
        ppo_sync.AutoModelForCausalLM, args.model_name_or_path, args, trained=True
    )
    return ppo_sync.PolicyModel(model, args.temperature)


def tiny_args(**changes):
    options = {
        "stop_token_ids": (STOP,),
        "pad_token_id": PAD,
        "dtype": "float32",
        "per_device_train_batch_size": 8,
        "local_rollout_forward_batch_size": 8,
        "temperature": 0.8,
        "cliprange_value": 0.3,
    }
    return ppo_sync.Args(**options | changes)


def make_rollout(sizes=SIZES, seed=2, dtype=torch.float64):
    """A batch as main() builds it; no model gave its log-probabilities: ratios clip."""
    generator = torch.Generator().manual_seed(seed)

    def ids(count):
        return torch.randint(2, VOCAB, (count,), generator=generator).tolist()

    prompts = [ids(prompt) for prompt, _ in sizes]
    responses = [[*ids(response - 1), STOP] for _, response in sizes]
    counts = torch.tensor([response for _, response in sizes])
    mask = (torch.arange(int(counts.max())) < counts[:, None]).to(dtype)

    def noise(mean=0.0, scale=1.0):
        values = torch.randn(mask.shape, generator=generator, dtype=torch.float64)
        return (values * scale + mean).to(dtype) * mask

    # In this order: they are drawn from one generator
    logprobs, weights = noise(-3.0), noise(1.0, 0.2).clamp(min=0)
    advantages, values, returns = noise(), noise(), noise()
    sampler_logprobs = logprobs - 0.5 * noise()
    return ppo_sync.Batch(
        prompt_ids=prompts,
        responses=responses,
        mask=mask,
        scores=torch.zeros(len(sizes), dtype=dtype),
        scored=torch.ones(len(sizes), dtype=dtype),
        loss_mask=mask.clone(),
        sampler_logprobs=sampler_logprobs,
        logprobs=logprobs,
        ref_logprobs=logprobs.clone(),
        values=values,
        rewards=torch.zeros_like(mask),
        advantages=advantages,
        returns=returns,
        importance_weights=weights,
    )


def one_of_ranks(rank, world_size):
    """An accelerator of a rank that meets no others: what it would add up is its own share."""
    return SimpleNamespace(
        process_index=rank,
        num_processes=world_size,
        device=torch.device("cpu"),
        no_sync=lambda model: torch.no_grad() if model is None else torch.enable_grad(),
        backward=lambda loss: loss.backward(),
        reduce=lambda tensor, reduction: tensor,
    )


def in_float32(batch):
    """A copy, whose tensors are of the dtype of a real run."""
    tensors = {n: v.float() for n, v in vars(batch).items() if isinstance(v, torch.Tensor)}
    return replace(batch, **tensors)


def near_policy(batch, policy, distance, temperature=0.8):
    """A copy whose old policy is this one, but for noise; the sampler is as far as it was.

    At distance 0 it is this one; at 0.4 some ratios are clipped and others are not.
    """
    generator = torch.Generator().manual_seed(6)
    noise = torch.randn(batch.mask.shape, dtype=torch.float64, generator=generator)
    old = torch.zeros_like(batch.mask)
    rows = zip(batch.prompt_ids, batch.responses, strict=True)
    for row, (prompt, response) in enumerate(rows):
        with torch.no_grad():
            logprobs = chosen_logprobs(policy.model, prompt, response, temperature)
        old[row, : len(response)] = logprobs
    old = (old + distance * noise) * batch.mask
    change = old - batch.logprobs
    return replace(
        batch,
        logprobs=old,
        sampler_logprobs=batch.sampler_logprobs + change,
        ref_logprobs=batch.ref_logprobs + change,
    )


def with_failed_rewards(batch, rows):
    """A copy, as main() makes it where the rewards of these rows failed."""
    scored = batch.scored.clone()
    scored[rows] = 0
    return replace(batch, scored=scored, loss_mask=batch.loss_mask * scored[:, None])


def without_rows(batch, rows):
    """A copy without these rows."""
    kept = [row for row in range(len(batch.responses)) if row not in rows]
    parts = {
        name: value[kept] if isinstance(value, torch.Tensor) else [value[row] for row in kept]
        for name, value in vars(batch).items()
    }
    return replace(batch, **parts)


def groups_of_equals(groups=32, samples=4, seed=4):
    """Prompts and responses, of which those of a group are the same token ids.

    One prompt has two groups, and one response comes after two prompts.
    """
    generator = torch.Generator().manual_seed(seed)

    def ids(most):
        count = int(torch.randint(1, most + 1, (1,), generator=generator))
        return torch.randint(2, VOCAB, (count,), generator=generator).tolist()

    pairs = [(ids(most=9), ids(most=12)) for _ in range(groups)]
    pairs[1] = (pairs[0][0], pairs[1][1])
    pairs[3] = (pairs[3][0], pairs[2][1])
    prompts, responses = [], []
    for prompt, response in pairs:
        # A reward model may have a chat template of its own
        prompts += [ppo_sync.Prompt("", "", [2], prompt, None, None, None)] * samples
        responses += [list(response) for _ in range(samples)]
    return prompts, responses


def gradients(accelerator, policy, value_model, batch, args, trains_policy=True):
    """One vector of all gradients of one optimizer batch, and the sums over its tokens."""
    for model in (policy, value_model):
        model.zero_grad()
    rows = list(range(len(batch.prompt_ids)))
    sums = ppo_sync.accumulate_gradients(
        accelerator, policy, value_model, batch, rows, trains_policy, args
    )
    parameters = [*policy.parameters(), *value_model.parameters()]
    vector = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
    return vector, {name: value.item() for name, value in sums.items()}
