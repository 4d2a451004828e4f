"""Definitions written out, one response at a time and without any padding, to compare with."""

import torch


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
    logits = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits.double() / temperature, -1)


def at(every, response):
    """What is said of each token of a response, (tokens,), of what is said of all there are."""
    return every[range(len(response)), torch.as_tensor(response)]


def entropies_of(every):
    return -(every.exp() * every).sum(-1)


@torch.no_grad()
def logprobs_and_entropies(model, prompts, responses, temperature):
    """Two lists with a tensor for each response, (tokens,); no gradients."""
    logprobs, entropies = [], []
    for prompt, response in zip(prompts, responses, strict=True):
        every = log_softmax_of(model, prompt, response, temperature)
        logprobs.append(at(every, response))
        entropies.append(entropies_of(every))
    return logprobs, entropies


def values_of(model, prompt, response):
    """What a classifier's head says where each token of a response is chosen: (tokens,)."""
    hidden = model.base_model(torch.tensor([[*prompt, *response]])).last_hidden_state[0]
    return (hidden @ model.score.weight[0])[len(prompt) - 1 : -1]


def surrogate_loss(ratio, advantages, lower, higher):
    """Of one response, (tokens,): 1707.06347 eq. 7."""
    return -torch.min(ratio * advantages, ratio.clamp(1 - lower, 1 + higher) * advantages)


def geometric_mean(ratios):
    return ratios.prod() ** (1 / len(ratios))


def weights_by_definition(old, sampler, args, level="token"):
    """What each token of a response counts for the policy, (tokens,).

    That is learner over sampler, at most tis_cap; and 0 where mismatch_mask says so.
    """
    ratios = (old - sampler).exp()
    means = geometric_mean(ratios).expand(len(ratios))
    weights = torch.ones_like(ratios)
    if args.tis_cap > 0:
        weights = (means if level == "sequence" else ratios).clamp(max=args.tis_cap)
    if args.mismatch_mask != "none":
        limit = args.mismatch_mask_range
        weights = weights * ((means >= 1 / limit) & (means <= limit))
    return weights


def policy_sums(surrogate, weights, ratio, advantages, every, response, old):
    """What a response adds to the sums of an update, {metric: (tokens,)}.

    surrogate: its surrogate_loss, before the weights; ratio: new over old, of tokens or of the
    response; every: what the policy says of all tokens; old: what the old one said of the response.
    """
    return {
        "tokens": torch.ones(len(response)),
        "loss/policy_avg": weights * surrogate,
        "policy/approxkl_avg": (at(every, response) - old) ** 2 / 2,
        "policy/clipfrac_avg": surrogate != -ratio * advantages,
        "policy/entropy_avg": entropies_of(every),
        "val/ratio": ratio,
        "val/ratio_var": (ratio - 1) ** 2,
        "mismatch/masked": (weights == 0).double(),
    }
