"""One small batch through PPO's and GRPO's formulas, by the functions of the scripts.

    python docs/worked_example.py

Two responses to one prompt, of three and two tokens. What models would compute is given. The
columns of the prompt, which are 0 in all tensors, are left out.
docs/ppo.md has what this prints. It and docs/grpo.md have the formulas.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

import torch

from grpo_vllm_async import group_advantages
from ppo_sync import (
    Args,
    compute_gae,
    importance_weights,
    kl_penalty,
    masked_mean,
    masked_whiten,
    policy_loss,
    value_loss,
)

BETA, LAMBDA, CLIP, CAP = 0.1, 0.95, 0.2, 2.0


def show(name, tensor):
    """Prints a tensor with its shape, a row a line."""
    rows = tensor if tensor.dim() == 2 else tensor[None]
    texts = ["  ".join(f"{round(value, 3) + 0.0:7.3f}" for value in row.tolist()) for row in rows]
    shape = str(tuple(tensor.shape))
    for text in texts:
        print(f"{name:<24}{shape:<8}{text}".rstrip())
        name = shape = ""


def ppo():
    mask = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]])
    # Of each sampled token: by vLLM, by the learner before any update, by the reference policy
    sampler_logprobs = torch.tensor([[-1.0, -0.5, -0.2], [-1.1, -0.7, 0.0]])
    logprobs = torch.tensor([[-1.0, -0.6, -0.2], [-1.0, -0.7, 0.0]])
    ref_logprobs = torch.tensor([[-1.2, -0.6, -0.3], [-1.0, -0.5, 0.0]])
    values = torch.tensor([[0.4, 0.5, 0.7], [0.4, 0.2, 0.0]])
    scores = torch.tensor([1.0, 0.0])  # of the two responses
    show("mask", mask)
    show("log-probs, sampler", sampler_logprobs)
    show("log-probs, old", logprobs)
    show("log-probs, reference", ref_logprobs)
    show("scores", scores)

    rewards = -BETA * kl_penalty(logprobs, ref_logprobs, "kl1") * mask
    last_token = mask.sum(1).long() - 1
    rewards[[0, 1], last_token] += scores
    show("rewards", rewards)

    advantages, _ = compute_gae(rewards, values, mask, gamma=1.0, lam=LAMBDA)
    _, returns = compute_gae(rewards, values, mask, gamma=1.0, lam=1.0)
    show("values", values)
    show("advantages", advantages)
    show("returns", returns)
    advantages = masked_whiten(advantages, mask)
    show("advantages, whitened", advantages)

    weights = importance_weights(logprobs, sampler_logprobs, mask, Args(tis_cap=CAP))
    show("importance weights", weights)

    # The policy and the values after one update; another update is about to be made
    new_logprobs = torch.tensor([[-0.7, -0.4, -0.1], [-1.2, -0.9, 0.0]])
    new_values = torch.tensor([[0.6, 0.6, 0.8], [0.3, 0.1, 0.0]])
    log_ratio = (new_logprobs - logprobs) * mask
    losses, clipped = policy_loss(log_ratio, advantages, weights, CLIP, CLIP)
    show("log-probs, new", new_logprobs)
    show("ratio", log_ratio.exp() * mask)
    show("clipped", clipped * mask)
    show("policy loss", losses * mask)
    show("its mean over tokens", masked_mean(losses, mask).reshape(1))
    losses, _ = value_loss(new_values, values, returns, cliprange_value=0.0)
    show("values, new", new_values)
    show("value loss", losses * mask)
    show("its mean over tokens", masked_mean(losses, mask).reshape(1))


def grpo():
    scores = torch.tensor([[1.0, 0.0, 0.0], [1.0, 1.0, 1.0]])  # three responses to each prompt
    everyone = torch.ones(6)  # no reward has failed
    show("scores", scores)
    for name in ("standard", "centered"):
        advantages = group_advantages(scores.flatten(), everyone, 3, name)
        show(f"advantages, {name}", advantages.view(2, 3))


if __name__ == "__main__":
    print("PPO: two responses, of three and of two tokens")
    ppo()
    print()
    print("GRPO: three responses to each of two prompts")
    grpo()
