"""Tiny models and a made-up rollout of unequal lengths, for tests and for two_rank_gradient.py."""

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

import ppo_sync

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


def tiny_policy(seed=0, **changes):
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(tiny_config(**changes))


def tiny_value_model(seed=1, **changes):
    from transformers import Qwen2ForSequenceClassification

    torch.manual_seed(seed)
    return ppo_sync.ValueModel(Qwen2ForSequenceClassification(tiny_config(num_labels=1, **changes)))


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
    """A batch as main() builds it; log-probabilities and values are not those of any model, so that ratios clip."""
    generator = torch.Generator().manual_seed(seed)

    def ids(count):
        return torch.randint(2, VOCAB, (count,), generator=generator).tolist()

    prompts = [ids(prompt) for prompt, _ in sizes]
    responses = [[*ids(response - 1), STOP] for _, response in sizes]
    lengths = [(response, prompt) for prompt, response in sizes]
    counts = torch.tensor([response for response, _ in lengths])
    mask = (torch.arange(int(counts.max())) < counts[:, None]).to(dtype)

    def noise(mean=0.0, scale=1.0):
        return (torch.randn(mask.shape, generator=generator, dtype=torch.float64) * scale + mean).to(dtype) * mask

    batch = {"prompts": prompts, "responses": responses, "lengths": lengths, "mask": mask}
    batch |= {"logprobs": noise(-3.0), "weights": noise(1.0, 0.2).clamp(min=0), "advantages": noise()}
    return batch | {"values": noise(), "returns": noise()}


def gradients(accelerator, policy, value_model, batch, args):
    """One vector of all gradients of one optimizer batch, and the sums that accumulate_gradients returns."""
    for model in (policy, value_model):
        model.zero_grad()
    rows = list(range(len(batch["prompts"])))
    sums = ppo_sync.accumulate_gradients(accelerator, policy, value_model, batch, rows, args)
    parameters = [*policy.parameters(), *value_model.parameters()]
    vector = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
    return vector, {name: value.item() for name, value in sums.items()}
