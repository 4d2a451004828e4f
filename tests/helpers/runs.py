"""What is in the folder of a run, and how it is looked at."""

import operator

import torch

# One optimizer update a step, of rows of unequal length: old and new policy are the same in it, and
# metrics of the update can be recomputed from the batch alone.
VLLM_OPTIONS = {
    "total_episodes": 128,
    "temperature": 1.5,
    "beta": 0.1,
    "gamma": 0.97,
    "lam": 0.9,
    "value_lam": 1.0,
    "whiten_rewards": True,
    "non_stop_penalty": True,
    "penalty_reward_value": -1.0,
    "lr_scheduler_type": "constant",
    "num_evals": 2,
    "save_batches": True,
}
METRICS_OF = {
    "": ["training_step", "episode", "epoch", "lr"],
    "policy/": ["version", "approxkl_avg", "clipfrac_avg", "entropy_avg"],
    "objective/": [
        "kl",
        "scores",
        "rlhf_reward",
        "non_score_reward",
        "entropy",
        "loss",
        "verifiable_correct_rate",
        "verifiable_score",
        "reward_failures",
        "kl_coef",
    ],
    "loss/": ["policy_avg", "value_avg"],
    "time/": [
        "from_scratch",
        "training",
        "wait_for_prompts",
        "generation",
        "reward",
        "wait_for_generation",
        "reward_model",
        "forward",
        "update",
    ],
    "val/": [
        "sequence_lengths",
        "num_stop_token_ids",
        "clipfrac_avg",
        "ratio",
        "ratio_var",
        "stop_rate",
        "explained_variance",
    ],
    "optim/": ["grad_norm", "value_grad_norm"],
    "perf/": ["episodes_per_second", "response_tokens_per_second", "padding_fraction"],
}
PPO_METRICS = {group + name for group, names in METRICS_OF.items() for name in names}
# Those that there are not in steps in which only the value model learns
METRICS_OF_POLICY_UPDATES = {
    "loss/policy_avg",
    "objective/loss",
    "optim/grad_norm",
    "policy/approxkl_avg",
    "policy/clipfrac_avg",
    "policy/entropy_avg",
    "val/ratio",
    "val/ratio_var",
}
MISMATCH_METRICS = {
    f"mismatch/{name}"
    for name in ("logprob_diff_mean", "logprob_diff_max", "kl", "ess", "tis_clipfrac", "masked")
}
EVAL_METRICS = {
    f"eval/{name}"
    for name in (
        "verifiable_correct_rate",
        "verifiable_score",
        "scores",
        "reward_failures",
        "sequence_lengths",
        "stop_rate",
    )
}
# What a clock or a meter says: no two runs agree on it
OF_A_CLOCK = ("time/", "queue/", "perf/episodes", "perf/response", "perf/memory", "perf/checkpoint")


def without_clock(line):
    """The metrics of a step that the same run gives again, to the last bit."""
    return {name: value for name, value in line.items() if not name.startswith(OF_A_CLOCK)}


def differences(one, other):
    """Names of the fields in which two batches, as dicts, are not the same to the last bit."""
    names = []
    for name, value in one.items():
        equal = torch.equal if isinstance(value, torch.Tensor) else operator.eq
        if not equal(value, other[name]):
            names.append(name)
    return names


def batch_of(run, step):
    """The batch of a step of a run with save_batches: the fields of Batch, as a dict."""
    return torch.load(run.run_dir / "batches" / f"step_{step:06d}.pt", weights_only=False)


def response_tokens(responses, tensor):
    """A per-token tensor as a list of the tokens of each response, in float64."""
    return [row[: len(response)].double() for row, response in zip(tensor, responses, strict=True)]


def sampled_ones(batch):
    """Per-token tensors of the batch as lists of the real tokens of each row, in float64."""
    return {
        name: response_tokens(batch["responses"], value)
        for name, value in batch.items()
        if isinstance(value, torch.Tensor) and value.dim() == 2
    }
