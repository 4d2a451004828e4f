"""Definitions written out, one response at a time and without any padding, to compare with."""

import torch

import ppo_sync


def gae_by_definition(rewards, values, gamma, lam):
    """Of one response, (tokens,): sum over l of (gamma * lam)^l delta_(t+l), 1506.02438 eq. 16."""
    rewards, values = rewards.tolist(), values.tolist()
    size = len(rewards)
    following = [*values[1:], 0.0]
    deltas = [rewards[t] + gamma * following[t] - values[t] for t in range(size)]
    advantages = [
        sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, size)) for t in range(size)
    ]
    return torch.tensor(advantages, dtype=torch.float64)


def log_softmax_of(model, prompt, response, temperature):
    """What a model says at each token of a response: (tokens, vocabulary), in float64."""
    logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits.double() / temperature, -1)


def chosen_logprobs(model, prompt, response, temperature):
    """The log-probability of each token of a response, (tokens,), in float64."""
    return log_softmax_of(model, prompt, response, temperature)[range(len(response)), response]


def logprobs_and_entropies(model, prompts, responses, temperature):
    """Two lists with a tensor for each response, (tokens,); no gradients."""
    logprobs, entropies = [], []
    for prompt, response in zip(prompts, responses, strict=True):
        with torch.no_grad():
            every = log_softmax_of(model, prompt, response, temperature)
        logprobs.append(every[range(len(response)), response])
        entropies.append(-(every.exp() * every).sum(-1))
    return logprobs, entropies


def padded_forward(model, prompts, responses, device="cpu"):
    """What a PolicyModel or ValueModel returns for a padded batch, and the mask; no gradients."""
    inputs, mask = ppo_sync.collate(prompts, responses, 0, device)
    with torch.no_grad():
        return model(inputs, mask.shape[1]), mask
