"""Definitions written out, one response at a time and without any padding, to compare with."""

import math
from collections import Counter

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

    That is learner over sampler, at most tis_cap.
    """
    ratios = (old - sampler).exp()
    means = geometric_mean(ratios).expand(len(ratios))
    weights = torch.ones_like(ratios)
    if args.tis_cap > 0:
        weights = (means if level == "sequence" else ratios).clamp(max=args.tis_cap)
    return weights


def reference_gradient(models, batch, args):
    """The loss as the papers write it, response by response: its gradient, and sums over tokens.

    models: the policy, and PPO's value model. Of the policy PPO's is GRPO's with a ratio of each
    token, clipped alike at both ends, a mean over tokens and no KL.
    """
    policy, *value_models = models
    level = getattr(args, "importance_sampling_level", "token")
    aggregation = getattr(args, "loss_aggregation", "token")
    total, kept, sums = 0.0, 0, Counter()
    for row, inside in enumerate(batch.loss_mask.bool()):
        if not inside.any():
            continue
        kept += 1
        ids, start = batch.input_ids[row, : batch.lengths[row]].tolist(), int(inside.int().argmax())
        prompt, response = ids[:start], ids[start:]
        in_loss = inside[start : len(ids)]  # a fork's response may have tokens that are not
        of_row = {
            name: value[row, inside]
            for name, value in vars(batch).items()
            if isinstance(value, torch.Tensor) and value.shape == batch.mask.shape
        }
        old, advantages = of_row["logprobs"], of_row["advantages"]
        every = log_softmax_of(policy.model, prompt, response, args.temperature)
        new = at(every, response)[in_loss]
        weights = weights_by_definition(old, of_row["sampler_logprobs"], args, level)
        token_ratio = ratio = (new - old).exp()
        if level == "sequence":  # GSPO, eq. 7: (pi(y) / pi_old(y)) ^ (1 / |y|)
            ratio = geometric_mean(token_ratio).expand(len(new))
        higher = getattr(args, "cliprange_higher", args.cliprange)
        surrogate = surrogate_loss(ratio, advantages, args.cliprange, higher)
        per_token = weights * surrogate
        of_metrics = {
            "tokens": torch.ones(len(new)),
            "loss/policy_avg": per_token,
            "policy/approxkl_avg": (new - old) ** 2 / 2,
            "policy/clipfrac_avg": surrogate != -ratio * advantages,
            "policy/entropy_avg": entropies_of(every)[in_loss],
            "val/ratio": ratio,
            "val/ratio_var": (ratio - 1) ** 2,
        }
        if value_models:
            values = values_of(value_models[0].model, prompt, response)[in_loss]
            limit = args.cliprange_value or math.inf
            near = values.clamp(of_row["values"] - limit, of_row["values"] + limit)
            squares = torch.stack([(x - of_row["returns"]) ** 2 for x in (values, near)])
            vf_loss = squares.amax(0) / 2
            per_token = per_token + vf_loss
            of_metrics |= {"loss/value_avg": vf_loss, "val/clipfrac_avg": squares[1] > squares[0]}
        elif args.beta > 0:
            # For these forms see test_kl_gradient_is_that_of_the_true_kl
            d = new - of_row["ref_logprobs"]
            kl = d if args.kl_estimator == "kl1" else (-d).exp() - 1 + d
            kl = weights * kl * token_ratio
            per_token = per_token + args.beta * kl
            of_metrics["loss/kl_avg"] = kl
        total = total + (per_token.mean() if aggregation == "sequence" else per_token.sum())
        sums.update({name: tensor.sum().item() for name, tensor in of_metrics.items()})
    counts = {"token": sums["tokens"], "sequence": kept, "constant": kept * args.response_length}
    loss = total / counts[aggregation]
    sums["objective/loss"] = loss.item()
    parameters = [parameter for model in models for parameter in model.parameters()]
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return torch.cat([gradient.flatten() for gradient in found if gradient is not None]), sums
