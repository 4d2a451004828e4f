r"""Synchronous PPO for language models (RLHF). vLLM generates first, then the learner trains.

Without a GPU, this command does all the set-up and learns within minutes:
    bash scripts/train/debug/ppo_sync.sh
On one GPU, with learner and vLLM colocated (docs/gpus.md has more GPUs, and several nodes):
    accelerate launch --quiet --config_file scripts/accelerate/one_gpu.yaml ppo_sync.py \
        --dataset train.parquet --model_name_or_path Qwen/Qwen3-0.6B --save_freq 50

Training step g on every rank (policy version v is the policy after v completed steps):

    main thread                                                        vLLM (its own process)
    1. sync weights ------------------------------------------------->  weights of version g - 1
       prompts g ---------------------------------------------------->  generate
       verifiable rewards <------------------------------------------   responses
       gather the parts of all ranks
    2. checkpoint: the models after step g - 1
    3. scores: adds the reward model's
    4. the batch: one row per response
    5. forward passes: log-probabilities, values
    6. rewards per token, advantages
    7. updates
    8. metrics, files
    9. in the last step: save the model, then the final evaluation

The learner waits while vLLM generates, and vLLM waits while the learner trains. In
ppo_vllm_async.py they work at the same time.

A prompt and its response form a row, which is padded on the right. Tensors over tokens have the
shape (rows, length). In a step's Batch (see below), such tensors are 0 outside the response, except
input_ids. There is no attention mask, so models must be causal, which keeps every token from seeing
the padding after it. Models run without dropout. Every rank holds the whole batch, and computes its
own part of the forward and backward passes.

Each token has three log-probabilities, all at the sampling temperature. vLLM returns the sampler's.
The learner computes the old one before this step's updates, and the new one during an update. If
beta, the weight of the KL, is above 0, there is a fourth, which is the reference policy's.

Deliberate simplifications:
 1. Sampling uses the temperature only. Top-p, top-k or a minimum length would change the
    distribution that is sampled from.
 2. A response has one reward. There is one turn, there are no tools, and rows are padded instead of
    packed.
 3. An error prints its traceback and ends the process, and the launcher then ends the other ranks.
    Resume from the newest checkpoint. A vLLM that hangs during generation is not detected.
 4. This file checks few inputs. `python scripts/preflight.py SCRIPT FLAGS` checks data, chat
    templates, models and GPUs before a run, because errors in them would otherwise show late or
    never. A copy of this file alone has none of those checks.
 5. A response truncated at `response_length` is scored like any other, unless --non_stop_penalty is
    set. Its last token still counts as terminal, so no value of a continuation is added.

Unlike in CleanRL's PPO, an episode is one response with one score. The value model shares no
weights with the policy. Advantages are whitened over all rows of the step that have a score. By
default both lambdas of GAE (lam, value_lam) are 1, and values are not clipped. There is no entropy
bonus. The policy's loss has an importance weight, because vLLM's probabilities are not exactly the
learner's.

Where to make a change (docs/changing_a_script.md has worked examples):
    a part of the score            score_responses
    rewards, advantages            step 6
    a term of the loss             token_losses for the policy, value_losses for the value model
    a tensor that these need       a field of Batch, which step 4, 5 or 6 fills in
    a metric                       the losses (for each token), or batch_metrics
    what a resume must find again  `state`, or `trained_models` if it is a model

Reading on to the banner ("The algorithm ends here") takes 60 to 80 minutes. Look up the rest when
you need it. ppo_sync.py, ppo_vllm_async.py and grpo_vllm_async.py have the same text wherever they
can, and tests/promise/test_scripts_agree.py gives the reasons where they cannot. Ranks that
exchange data wait for each other, so the docstring of a function in which they do ends with "Every
rank must call this, in the same order."

arXiv: PPO 1707.06347; GAE 1506.02438; RLHF 1909.08593, 2009.01325; PPO's details 2403.17031.
"""

import contextlib
import ctypes
import glob
import hashlib
import importlib.util
import inspect
import itertools
import json
import math
import multiprocessing as mp
import os
import pickle
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import defaultdict, deque
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import date, timedelta
from functools import cache
from pathlib import Path
from typing import Any, Literal

import datasets
import numpy as np
import pandas
import psutil
import torch
import transformers
import tyro
from accelerate import Accelerator
from accelerate.utils import (
    InitProcessGroupKwargs,
    broadcast_object_list,
    clear_environment,
)
from accelerate.utils.other import get_free_port
from pyarrow import parquet
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import reduce_tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)


@dataclass
class Algorithm:
    """Options that a reader of the loop needs. Args, below the banner, adds all others.

    Flags give the sizes of one rank. From them the script computes those of all ranks:
        rollout_batch_size    prompts of a step, local_rollout_batch_size times the ranks
        episodes_per_step     responses of a step, which are the rows of its batch,
                              rollout_batch_size * number_samples_per_prompt
        mini_batch_size       rows of one update, local_mini_batch_size times the ranks
        updates_per_step      num_epochs * episodes_per_step / mini_batch_size
        num_updates           updates of the run, of which num_policy_updates come after the first
                              value_warmup_steps steps
    A micro-batch is the rows that a rank runs at once, in each pass of each model. It has as many
    rows as fit into micro_batch_tokens, but at least one. If per_device_train_batch_size is above
    0, it has at most that many.

    By default a step has 256 prompts with one response each on one rank, and makes 4 updates of 64
    rows. Gamma and both lambdas are 1. Before whitening, a token's advantage is therefore the sum
    of the rewards from this token on, minus its value.
    """

    beta: float = 0.001
    """Weight of the KL penalty in the reward. 0 means that there is no reference policy."""
    whiten_rewards: bool = False
    """Scale rewards per token to unit variance before GAE. Their mean is kept."""
    cliprange: float = 0.2
    """Limit of the ratio's change. The ratio is clipped to [1 - cliprange, 1 + cliprange]."""
    cliprange_value: float = 0.0
    """Clip new values to within this distance of the old ones. 0 disables value clipping."""
    gamma: float = 1.0
    """Discount factor per token."""
    lam: float = 1.0
    """Lambda of GAE for advantages. Below 1, warm up the value model first (docs/reference.md)."""
    value_lam: float = 1.0
    """Lambda of GAE for the value targets. 1 makes them plain returns (2503.01491)."""
    tis_cap: float = 2.0
    """Cap of truncated importance weights (old / sampler) in the loss. 0 makes all weights 1."""
    num_epochs: int = 1
    """Number of epochs over each batch. Each epoch trains on every row once."""
    learning_rate: float = 1e-6
    """Learning rate of the policy."""
    value_learning_rate: float = 1e-5
    """Learning rate of the value model."""
    max_grad_norm: float = 1.0
    """Norm to which the gradient of each model is clipped."""
    temperature: float = 1.0
    """Temperature of sampling. All log-probabilities are computed at the same temperature."""
    non_stop_penalty: bool = False
    """Score responses that are truncated, or too short, with penalty_reward_value instead."""
    penalty_reward_value: float = -10.0
    """Score that non_stop_penalty gives. min_response_length says what is too short."""
    value_warmup_steps: int = 0
    """Number of first steps in which only the value model is trained."""


@dataclass
class Prompt:
    origin: str  # file and row, for messages
    text: str
    token_ids: list[int]
    data_source: str | None  # selects the verifiable reward
    ground_truth: Any  # None if there is no verifiable reward
    extra_info: dict | None  # for --reward_fn


@dataclass
class Response:
    """A response, which gains fields on its way from vLLM to the loss."""

    prompt: Prompt
    token_ids: np.ndarray  # (length,), as sampled. A stop token is the last one
    logprobs: np.ndarray  # (length,), the sampler's
    stopped: bool  # by a stop token. Otherwise the response is truncated
    # Filled in by generate_rollout
    text: str = ""
    verifiable: float | None = None  # None without a ground truth, or if the reward failed
    reward_metrics: dict[str, float] = field(default_factory=dict)  # other results of --reward_fn
    failure: str | None = None  # why the reward failed
    # Filled in by the learner
    model_score: float | None = None  # from the reward model
    score: float | None = None  # sum of the rewards, or the non-stop penalty. None if unknown

    @property
    def row(self):
        """Return the token ids of the prompt and the response."""
        return np.concatenate([self.prompt.token_ids, self.token_ids])


@dataclass
class Request:
    """What the learner requests from generation, for all ranks."""

    prompts: list[Prompt]  # (rows,), each prompt number_samples_per_prompt times in succession
    seeds: list[int]  # (rows,)
    eval_prompts: list[Prompt]  # empty if no evaluation is due


@dataclass
class Rollout:
    """The responses to a Request, of one engine or, after gather_rollout, of all engines."""

    policy_version: int  # of the policy that generated
    responses: list[Response]
    eval_responses: list[Response]
    times: dict[str, float]  # seconds, by the name of a metric


@dataclass
class Batch:
    """The tensors of a step. A row is a prompt with its response, padded on the right.

    `length` is the length of the longest row. Tensors with this dimension are 0 outside responses,
    except input_ids.
    """

    # Filled in by collate
    input_ids: Tensor  # (rows, length)
    lengths: Tensor  # (rows,), int64, number of tokens in a row
    mask: Tensor  # (rows, length), 1.0 at response tokens
    loss_mask: Tensor  # (rows, length), the mask, but 0.0 in rows that the loss leaves out
    scores: Tensor  # (rows,), 0.0 if there is none
    has_score: Tensor  # (rows,), 1.0 or 0.0
    sampler_logprobs: Tensor  # (rows, length), from vLLM
    # Filled in by steps 5 and 6, all (rows, length)
    logprobs: Tensor | None = None  # the old ones, from before this step's updates
    entropies: Tensor | None = None  # the policy's, from before this step's updates
    ref_logprobs: Tensor | None = None  # None with beta 0
    values: Tensor | None = None  # the old ones, from before this step's updates
    kl_rewards: Tensor | None = None  # the KL's part of the rewards. None with beta 0
    rewards: Tensor | None = None
    advantages: Tensor | None = None
    returns: Tensor | None = None  # what the value model should predict

    def select(self, rows, length):
        """Return a Batch of some rows, which are at most `length` tokens long."""
        selected = {
            name: tensor[rows, :length] if tensor.dim() == 2 else tensor[rows]
            for name, tensor in vars(self).items()
            if tensor is not None
        }
        return Batch(**selected)


# -------------------------------------------------------------------------------------------- main


def main(args):
    # ---- Set-up
    start_time = time.time()
    accelerator, cpu_group = start_ranks(args)
    args = fill_in(args, accelerator.num_processes)
    args, run_dir, checkpoint_dir = agree_on_run(args)

    tokenizer = load_tokenizer(args)
    train_prompts, eval_prompts = load_datasets(tokenizer, args)
    prompts = train_prompts + eval_prompts
    # `state` holds what a resume needs in addition to the models. Your copy can add to it
    first_step, state = read_state(run_dir, checkpoint_dir, prompts, args)
    start_time -= state["seconds"]  # count the seconds before a resume, too

    limit_memory(accelerator.device, args)
    language_model = load_model(AutoModelForCausalLM, args.model_name_or_path, args, trained=True)
    args.stop_token_ids = find_stop_tokens(args, tokenizer, language_model)
    # `policy` wraps language_model, so both have the same weights. Training goes through policy.
    # What is sent to vLLM and saved is language_model
    policy = place_model(accelerator, PolicyModel(language_model, args), args)
    ref_policy = load_reference_policy(accelerator, policy, args)
    value_model = load_value_model(accelerator, args)
    reward_model = load_reward_model(accelerator, args)
    optimizer = make_optimizer(policy, args)
    value_optimizer = make_optimizer(value_model, args)
    trained_models = {"policy": (policy, optimizer), "value_model": (value_model, value_optimizer)}

    engine, workers = start_engine(accelerator, language_model.config, prompts, args)
    load_checkpoint(trained_models, checkpoint_dir)
    open_run(accelerator, run_dir, checkpoint_dir, state, train_prompts, args)

    def generate(training_step):
        """Return the Rollout of a step, whose responses have their verifiable rewards.

        Every rank must call this, in the same order.
        """
        request = make_request(training_step, train_prompts, eval_prompts, args)
        share = generate_rollout(engine, workers, tokenizer, request, args)
        return gather_rollout(share, cpu_group)

    # ---- The loop
    for training_step in range(first_step, args.num_training_steps + 1):
        step_start = time.perf_counter()
        version = training_step - 1  # of the policy, until this step's updates
        is_last = training_step == args.num_training_steps
        metrics = {}

        # 1. Send vLLM the current weights. It generates the responses to this step's prompts
        with timed(metrics, "weight_sync"):
            sync_weights(engine, language_model, version, args)
        rollout = generate(training_step)

        # 2. Every save_freq steps, save the models as the previous step left them. Save before step
        # 3, which can write to the run's files, because a checkpoint copies them. In the first step
        # of a process there is nothing new to save
        if args.save_freq and version % args.save_freq == 0 and training_step > first_step:
            state["seconds"] = time.time() - start_time
            with timed(metrics, "checkpoint"):
                save_checkpoint(trained_models, run_dir, version, state, args)

        # 3. Scores. Verifiable rewards came with the responses, and the reward model runs here. If
        # an evaluation was due, its responses came with the batch and are scored here, too
        with timed(metrics, "reward_model"):
            if rollout.eval_responses:
                metrics |= report_evaluation(accelerator, reward_model, rollout, run_dir, args)
            responses = score_responses(accelerator, reward_model, rollout.responses, args)

        # 4. Build the batch, one row per response with its prompt, and assign rows to mini-batches
        batch = collate(responses, accelerator.device)
        check_rewards(responses)  # ends the run if the reward failed on all of them
        epochs = shuffle_into_mini_batches(training_step, args)  # [epoch][mini_batch] -> rows

        # 5. Forward passes before any update. Trained models run in the micro-batches of the first
        # epoch of updates. In others a row could have other padding, and its old log-probabilities
        # would differ from the new ones in their last bits. On a CPU all ratios of the first update
        # are therefore exactly 1
        with timed(metrics, "forward"):
            batch.logprobs, batch.entropies = forward_all(
                accelerator, policy, batch, epochs[0], args
            )
            batch.values, _ = forward_all(accelerator, value_model, batch, epochs[0], args)
            if args.beta > 0:
                batch.ref_logprobs = reference_logprobs(accelerator, ref_policy, batch, args)
        # vLLM's log-probabilities must agree with the learner's up to a small KL. Otherwise the run
        # ends, because vLLM has generated with other weights
        check_sampler(batch.logprobs, batch.sampler_logprobs, batch.mask, args)

        # 6. Rewards per token. Advantages use lam, and are whitened over the rows that have a
        # score. Returns use value_lam, and are what the value model should predict
        batch.kl_rewards, batch.rewards = token_rewards(batch, args)
        rewards, values = batch.rewards, batch.values
        advantages, _ = compute_gae(rewards, values, batch.mask, args.gamma, args.lam)
        batch.advantages = masked_whiten(advantages, batch.loss_mask)
        _, batch.returns = compute_gae(rewards, values, batch.mask, args.gamma, args.value_lam)

        # 7. Updates. In the first value_warmup_steps steps only the value model is trained
        models = [(value_model, value_losses)]
        trains_policy = training_step > args.value_warmup_steps
        if trains_policy:
            models.append((policy, token_losses))
        updates_before_policy = args.num_updates - args.num_policy_updates  # in the warm-up
        sums, grad_norms = defaultdict(int), defaultdict(int)
        lr = 0.0  # logged if this step does not update the policy
        with timed(metrics, "update"):
            first_update = version * args.updates_per_step  # counted over the run
            for update, mini_batch in enumerate(itertools.chain(*epochs), first_update):
                divisor = loss_divisor(batch.loss_mask[mini_batch])
                accumulate_gradients(accelerator, models, batch, mini_batch, divisor, sums, args)
                if not batch.loss_mask[mini_batch].any():
                    warn_once("updates are skipped if no row of their mini-batch is in the loss")
                    continue  # its passes were only for the metrics, and left gradients of 0
                # apply_gradients sums gradients over ranks, clips them, and steps the optimizer
                value_lr = args.value_learning_rate * lr_multiplier(update, args.num_updates, args)
                norm = apply_gradients(
                    accelerator, value_model, value_optimizer, value_lr, batch, run_dir, args
                )
                grad_norms["optim/value_grad_norm"] += norm / args.updates_per_step
                if trains_policy:
                    lr = args.learning_rate * lr_multiplier(
                        update - updates_before_policy, args.num_policy_updates, args
                    )
                    norm = apply_gradients(accelerator, policy, optimizer, lr, batch, run_dir, args)
                    grad_norms["optim/grad_norm"] += norm / args.updates_per_step

        # 8. Compute the metrics, and log responses to look at
        loss_tokens = args.num_epochs * batch.loss_mask.sum().item()
        metrics |= update_metrics(accelerator, sums, loss_tokens, args)
        metrics |= batch_metrics(batch, args)
        metrics |= score_metrics("objective", responses, args)
        metrics |= run_metrics(training_step, responses, step_start, start_time, args)
        metrics |= rollout.times | dict(grad_norms) | {"lr": lr}
        metrics["epoch"] = training_step * args.rollout_batch_size / len(train_prompts)
        log_rollouts(accelerator, training_step, rollout, responses, batch, run_dir, args)

        # 9. After the last update, save the model. Then comes the final evaluation
        if is_last:
            save_model(accelerator, language_model, tokenizer, run_dir / "model", args)
            if eval_prompts:
                sync_weights(engine, language_model, training_step, args)
                # The request of a step after the last has only held-out prompts
                last = generate(training_step + 1)
                metrics |= report_evaluation(accelerator, reward_model, last, run_dir, args)
        write_metrics(accelerator, metrics, run_dir, args)

    # ---- The end
    end_run(accelerator, run_dir, args)


def evaluation_is_due(steps, args):
    """Return whether an evaluation is due after this number of steps.

    The num_evals evaluations are spread evenly over the run, the first before any update. One more
    follows after the last step, also if num_evals is 0. In async mode, step s requests the
    evaluation after s steps before its own updates. This evaluation is therefore of version s - 1.
    Only the first (version 0) and the last (the last version) are not delayed. Evaluations after 0
    steps and after 1 step would both be of version 0, so at most every second step has one.
    """
    num_steps = args.num_training_steps
    num_evals = min(args.num_evals, num_steps // 2)
    return steps in (*(i * num_steps // num_evals for i in range(num_evals)), num_steps)


# ------------------------------------------------------------------------------- KL and advantages


def kl_penalty(logprobs, ref_logprobs, estimator):
    """Estimate KL(policy || reference) at each sampled token, in the shape of logprobs.

    With d = logprobs - ref_logprobs, kl1 is d and kl3 is exp(-d) - 1 + d
    (http://joschu.net/blog/kl-approx.html). The PPO scripts have the KL in the reward, and use kl1
    there. As a part of the reward, kl3 would have almost no effect on a policy that is close to the
    reference, because it is then only about d^2 / 2 (2510.01555).

    >>> kl_penalty(torch.tensor([0.0]), torch.tensor([-1.0]), "kl1").item()
    1.0
    """
    d = logprobs - ref_logprobs
    if estimator == "kl1":
        return d
    return torch.expm1(-d) + d


def token_rewards(batch, args):
    """Return the KL's part of each token's reward (None with beta 0), and the whole reward.

    The score of a response is part of the reward of its last token. Both results have the shape
    (rows, length).
    """
    kl_rewards, rewards = None, torch.zeros_like(batch.mask)
    if args.beta > 0:
        kl = kl_penalty(batch.logprobs, batch.ref_logprobs, "kl1")
        kl_rewards = -args.beta * kl
        rewards += kl_rewards
    rewards[range(len(batch.lengths)), batch.lengths - 1] += batch.scores
    if args.whiten_rewards:
        rewards = masked_whiten(rewards, batch.loss_mask, shift_mean=False)
    return kl_rewards, rewards


def compute_gae(rewards, values, mask, gamma, lam):
    """Compute advantages and returns by generalized advantage estimation (1506.02438).

    Returns are advantages + values. All tensors have the shape (rows, length). In each row of the
    mask, the 1s stand side by side, and the last of them is at the terminal token. Results are 0
    outside the mask.

    >>> rewards, values = torch.tensor([[0.0, 1.0, 0.0]]), torch.tensor([[0.5, 0.5, 9.0]])
    >>> compute_gae(rewards, values, torch.tensor([[1, 1, 0]]), gamma=1.0, lam=0.5)
    (tensor([[0.2500, 0.5000, 0.0000]]), tensor([[0.7500, 1.0000, 0.0000]]))
    """
    # Rewards and values after the last token count as 0
    rewards = rewards * mask
    values = values * mask
    advantages = torch.zeros_like(values)
    next_advantage, next_value = 0.0, 0.0  # after the last token
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantages[:, t] = delta + gamma * lam * next_advantage
        next_advantage = advantages[:, t]
        next_value = values[:, t]
    advantages = advantages * mask
    return advantages, advantages + values


def masked_whiten(values, mask, shift_mean=True):
    """Scale values to unit variance (Bessel-corrected, eps 1e-8).

    Their mean becomes 0. With shift_mean=False it stays. values, mask and the result have the same
    shape. The result is 0 where mask is 0.

    >>> masked_whiten(torch.tensor([1.0, 3.0, 9.0]), torch.tensor([1, 1, 0])).tolist()
    [-0.7071067690849304, 0.7071067690849304, 0.0]
    """
    mean = masked_mean(values, mask)
    variance = ((values - mean) ** 2 * mask).sum() / (mask.sum() - 1).clamp(min=1)
    whitened = (values - mean) * torch.rsqrt(variance + 1e-8)
    if not shift_mean:
        whitened = whitened + mean
    return whitened * mask


def masked_mean(values, mask):
    """Return the mean of the values at which mask is 1, as a scalar.

    It is 0 if mask is 1 nowhere. values and mask have the same shape.

    >>> masked_mean(torch.tensor([1.0, 2.0, 9.0]), torch.tensor([1, 1, 0])).item()
    1.5
    """
    return (values * mask).sum() / mask.sum().clamp(min=1)


# ------------------------------------------------------------------------------ losses and updates


def accumulate_gradients(accelerator, models, batch, rows, divisor, sums, args):
    """Run this rank's part of a mini-batch's rows forward and backward.

    Args:
        models: pairs of a model and the function that computes its losses.
        divisor: the divisor of the whole mini-batch on all ranks. Every rank divides by it, and
            apply_gradients sums over the ranks, so the gradient does not depend on how the rows are
            split up.
        sums: {name: sum}. This rank adds each metric, summed over its loss tokens. It also adds the
            number of these tokens under "tokens", the number of all tokens in its rows under
            "val/update_tokens", and its part of all models' losses under "objective/loss".

    Every rank must call this, in the same order.
    """
    for _, micro_batch in split_into_micro_batches(accelerator, batch, rows, args):
        # micro_batch.mask only selects the tokens for which a model returns outputs
        mask = micro_batch.loss_mask
        sums["tokens"] += mask.sum(dtype=torch.float64)
        sums["val/update_tokens"] += micro_batch.lengths.sum()
        for model, losses_of in models:
            outputs = model(micro_batch.input_ids, micro_batch.mask)
            losses, per_token = losses_of(outputs, micro_batch, args)
            loss = (losses * mask).sum() / divisor
            loss.backward()
            sums["objective/loss"] += loss.detach()
            add_sums(sums, per_token, mask)


def token_losses(outputs, micro_batch, args):
    """Return the policy's loss for each token, and {metric: tensor} to log.

        ratio  = new / old                      of the token's probabilities
        weight = min(old / sampler, tis_cap)    see importance_weights
        loss   = -min(ratio * A, clip(ratio, 1 - cliprange, 1 + cliprange) * A) * weight

    A is the token's advantage.

    outputs holds the policy's new log-probabilities and entropies. micro_batch is a Batch, which
    holds the old log-probabilities. All tensors have the shape (rows, length).
    """
    new_logprobs, entropies = outputs
    mask = micro_batch.loss_mask
    tis_weights = importance_weights(micro_batch.logprobs, micro_batch.sampler_logprobs, mask, args)
    # Outside the mask log_ratio must be 0 before exp. Otherwise exp could be inf there, and the
    # later product of inf with the mask's 0 would be NaN
    log_ratio = (new_logprobs - micro_batch.logprobs) * mask
    losses, clipped = policy_loss(
        log_ratio,
        micro_batch.advantages,
        tis_weights,
        cliprange=args.cliprange,
        cliprange_higher=args.cliprange,  # DAPO's is higher
    )
    ratio = log_ratio.exp()
    per_token = {
        "loss/policy_avg": losses,
        "policy/approxkl_avg": log_ratio**2 / 2,
        "policy/clipfrac_avg": clipped,
        "policy/entropy_avg": entropies,
        "val/ratio": ratio,
        "val/ratio_var": (ratio - 1) ** 2,  # the ratio's expectation is 1
    }
    return losses, per_token


def value_losses(values, micro_batch, args):
    """Return the value model's loss for each token, and {metric: tensor} to log.

    values are the value model's new ones. micro_batch is a Batch, which holds the old values and
    the returns.
    """
    losses, clipped = value_loss(
        values, micro_batch.values, micro_batch.returns, args.cliprange_value
    )
    return losses, {"loss/value_avg": losses, "val/clipfrac_avg": clipped}


def importance_weights(old_logprobs, sampler_logprobs, mask, args):
    """Return the importance weight of each token, which is old / sampler but at most tis_cap.

    It corrects for the sampler, which has other kernels (https://fengyao.notion.site/off-policy-rl)
    and, in the asynchronous scripts, older weights. With --tis_cap 0 all weights are 1.
    The result has the shape (rows, length).

    >>> learner, sampler = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-1.5, -2.0]])
    >>> importance_weights(learner, sampler, torch.ones(1, 2), Args(tis_cap=2.0))
    tensor([[1.6487, 2.0000]])
    """
    log_ratios = (old_logprobs - sampler_logprobs) * mask
    weights = mask
    if args.tis_cap > 0:
        weights = mask * log_ratios.exp().clamp(max=args.tis_cap)
    return weights


def policy_loss(log_ratio, advantages, tis_weights, cliprange, cliprange_higher):
    """Return PPO's clipped surrogate loss (1707.06347), and True where clipping changed it.

    The loss is multiplied by tis_weights, the importance weights. log_ratio is new - old. The ratio
    is clipped to [1 - cliprange, 1 + cliprange_higher]. All tensors have the same shape, with one
    number per token.

    >>> loss, clipped = policy_loss(
    ...     log_ratio=torch.tensor([0.0, 1.0]),
    ...     advantages=torch.tensor([2.0, 2.0]),
    ...     tis_weights=torch.ones(2),
    ...     cliprange=0.2,
    ...     cliprange_higher=0.2,
    ... )
    >>> loss.tolist(), clipped.tolist()
    ([-2.0, -2.4000000953674316], [False, True])
    """
    plain_loss = -advantages * log_ratio.exp()
    clipped_loss = -advantages * log_ratio.exp().clamp(1 - cliprange, 1 + cliprange_higher)
    return torch.max(plain_loss, clipped_loss) * tis_weights, clipped_loss > plain_loss


def value_loss(values, old_values, returns, cliprange_value):
    """Return half the squared error of each value, and True where clipping changed it.

    Values are clipped to within cliprange_value of the old ones. If it is 0, they are not clipped.
    All tensors have the same shape, with one number per token.

    >>> value_loss(torch.tensor([2.0]), torch.tensor([0.0]), torch.tensor([2.0]), 1.0)
    (tensor([0.5000]), tensor([True]))
    """
    plain_loss = (values - returns) ** 2 / 2
    if cliprange_value == 0:
        return plain_loss, torch.zeros_like(plain_loss, dtype=torch.bool)
    change = (values - old_values).clamp(-cliprange_value, cliprange_value)
    clipped_loss = (old_values + change - returns) ** 2 / 2
    return torch.max(plain_loss, clipped_loss), clipped_loss > plain_loss


@torch.no_grad()
def add_sums(sums, per_token, mask):
    """Add to sums[metric] the sum over the mask of each tensor in per_token, {metric: tensor}."""
    for name, tensor in per_token.items():
        sums[name] += (tensor * mask).sum(dtype=torch.float64)


def loss_divisor(loss_mask):
    """Return the divisor of a mini-batch's loss, which is the number of its loss tokens.

    loss_mask has the shape (rows, length).
    """
    return max(1, int(loss_mask.sum()))


def shuffle_into_mini_batches(training_step, args):
    """Return the mini-batches of a step's epochs as [epoch][mini_batch] -> rows.

    They are equal on all ranks. In each epoch all rows of the batch are shuffled again.
    """
    seed = stable_hash(args.seed, "minibatches", training_step)
    generator = torch.Generator().manual_seed(seed)
    epochs = []
    for _ in range(args.num_epochs):
        shuffled = torch.randperm(args.episodes_per_step, generator=generator)
        epochs.append(shuffled.view(-1, args.mini_batch_size).tolist())
    return epochs


def split_into_micro_batches(accelerator, batch, mini_batch, args):
    """Split this rank's part of a mini-batch into micro-batches. Yield (rows, their Batch) of each.

    Rows are sorted by length, so that micro-batches have little padding, and each rank takes every
    num_ranks-th row. All ranks split at the same places, because under FSDP2 they compute together.

    >>> prompt = Prompt("row 0", "", [5], None, None, None)
    >>> responses = [Response(prompt, [6] * n, np.zeros(n), True) for n in (2, 9, 3, 3)]
    >>> rank, batch = Accelerator(cpu=True), collate(responses, "cpu")
    >>> parts = split_into_micro_batches(rank, batch, [0, 1, 2, 3], Args(micro_batch_tokens=15))
    >>> [(rows, part.mask.shape) for rows, part in parts]
    [([0, 2, 3], torch.Size([3, 4])), ([1], torch.Size([1, 10]))]
    """
    num_ranks = accelerator.num_processes
    lengths = batch.lengths.tolist()
    by_length = sorted(mini_batch, key=lambda row: (lengths[row], row))
    own_rows = by_length[accelerator.process_index :: num_ranks]
    # Rows are dealt to the ranks in rounds, in ascending order of length. The last rank gets the
    # longest row of each round, so all ranks split and pad by the last rank's lengths. Every round
    # has num_ranks rows, because the rows of a mini-batch are a multiple of num_ranks
    longest = [lengths[row] for row in by_length[num_ranks - 1 :: num_ranks]]
    for start, end in itertools.pairwise(micro_batch_boundaries(longest, args)):
        rows = own_rows[start:end]
        yield rows, batch.select(rows, longest[end - 1])


def micro_batch_boundaries(lengths, args):
    """Return the boundaries at which rows of these lengths are split into micro-batches.

    lengths are in ascending order. The tokens of a micro-batch include its padding. A row that is
    longer than micro_batch_tokens is a micro-batch of its own.

    >>> micro_batch_boundaries([3, 4, 4, 10, 20], Args(micro_batch_tokens=15))
    [0, 3, 4, 5]
    >>> micro_batch_boundaries([3, 4, 4, 10, 20], Args(per_device_train_batch_size=2))
    [0, 2, 4, 5]
    """
    max_rows = args.per_device_train_batch_size or len(lengths)
    boundaries = [0]
    for i, length in enumerate(lengths):
        # With row i, the micro-batch would be padded to the length of row i
        rows_that_fit = max(1, min(max_rows, args.micro_batch_tokens // length))
        if i - boundaries[-1] >= rows_that_fit:  # no room for row i
            boundaries.append(i)
    return [*boundaries, len(lengths)]


def apply_gradients(accelerator, model, optimizer, lr, batch, run_dir, args):
    """Sum the gradients over ranks, clip them, and step the optimizer.

    Each trained weight has a float32 copy, its master (see make_optimizer). In every backward pass
    a hook adds the weight's gradient to that of its master. The optimizer updates the masters, and
    masters_to_weights then sets each weight to its master, rounded to args.dtype, because the
    learner must compute with the same weights as vLLM.

    Return the norm before clipping, as a tensor. If it is not finite, save the batch and raise
    FloatingPointError. All ranks then raise it, because the norm is the same on all of them.

    Every rank must call this, in the same order.
    """
    masters = optimizer.param_groups[0]["params"]
    # Under FSDP2 the gradients are averages over the ranks, so this multiplies them by their number
    sum_over_ranks(accelerator, [master.grad for master in masters])
    norm = nn.utils.clip_grad_norm_(masters, args.max_grad_norm)
    if isinstance(norm, DTensor):  # under FSDP2
        norm = norm.full_tensor()
    if not torch.isfinite(norm):
        if is_rank_0():
            torch.save(vars(batch), run_dir / "bad_batch.pt")
        # Wait until the batch is saved, because the launcher ends all ranks when one ends
        accelerator.wait_for_everyone()
        raise FloatingPointError(f"the gradient is not finite; its batch is {run_dir}/bad_batch.pt")
    optimizer.param_groups[0]["lr"] = lr
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)  # the next backward passes add to these tensors
    masters_to_weights(model)
    return norm


def lr_multiplier(update, num_updates, args):
    """Return the factor on the learning rate in a model's n-th update, with n from 0.

    The factor is never 0. warm_up_steps counts updates.

    >>> args = Args(warm_up_steps=2, lr_scheduler_type="linear")
    >>> [lr_multiplier(update, num_updates=4, args=args) for update in range(4)]
    [0.5, 1.0, 1.0, 0.5]
    """
    if update < args.warm_up_steps:
        return (update + 1) / args.warm_up_steps
    done = (update - args.warm_up_steps) / (num_updates - args.warm_up_steps)  # in [0, 1)
    if args.lr_scheduler_type == "linear":
        return 1 - done
    if args.lr_scheduler_type == "cosine":
        return (1 + math.cos(math.pi * done)) / 2
    return 1.0


# ----------------------------------------------------------------------- forward passes and models


@torch.no_grad()
def forward_all(accelerator, model, batch, mini_batches, args):
    """Run a model over mini-batches, which are lists of rows.

    Return (outputs, entropies) on every rank, both (rows, length). Outputs are log-probabilities of
    a policy, or values or scores. Entropies are those of a policy, or zeros.

    Every rank must call this, in the same order.
    """
    all_outputs = torch.zeros_like(batch.mask)
    all_entropies = all_outputs.clone()
    for mini_batch in mini_batches:
        # Each rank has the same number of micro-batches
        for rows, micro_batch in split_into_micro_batches(accelerator, batch, mini_batch, args):
            outputs = model(micro_batch.input_ids, micro_batch.mask)
            if isinstance(outputs, tuple):  # a policy's outputs
                outputs, entropies = outputs
                all_entropies[rows, : entropies.shape[1]] = entropies
            all_outputs[rows, : outputs.shape[1]] = outputs
    # The sum over ranks is exact, because a row is 0 on all of them except one
    return accelerator.reduce(all_outputs), accelerator.reduce(all_entropies)


def reference_logprobs(accelerator, ref_policy, batch, args):
    """Return log-probabilities of the reference policy, (rows, length).

    Every rank must call this, in the same order.
    """
    all_rows = range(len(batch.lengths))
    return forward_all(accelerator, ref_policy, batch, [all_rows], args)[0]


class PolicyModel(nn.Module):
    """A causal language model, read at the positions that predict the response tokens."""

    def __init__(self, model, args):
        super().__init__()
        self.model = model
        self.args = args

    def forward(self, input_ids, mask):
        """Return log-probabilities of the response tokens, and entropies.

        Both have the shape (rows, length), and are 0 elsewhere. mask is 1 at response tokens.
        """
        hidden = hidden_states(self.model, input_ids)  # (rows, length, hidden_size)
        # Token t is predicted at position t - 1. The next two lines select the same tokens t,
        # because no response begins at t = 0
        hidden = hidden[:, :-1][mask[:, 1:].bool()]  # (tokens, hidden_size)
        labels = input_ids[mask.bool()]  # (tokens,)
        # ChunkedHead computes token_logprobs of the head's logits, divided by the temperature. It
        # does so in chunks, because all logits together would need too much memory. Both results
        # have gradients, but those of the entropies are computed only if a loss uses them
        logprobs, entropies = ChunkedHead.read(self.model, hidden, labels, self.args)
        return to_rows(logprobs, mask), to_rows(entropies, mask)


def token_logprobs(logits, labels):
    """Return log-probabilities of the labels, and entropies, each (positions,).

    logits are (positions, vocabulary), at the sampling temperature. labels are token ids,
    (positions,).
    """
    logprobs = torch.log_softmax(logits, dim=-1)
    entropies = -torch.linalg.vecdot(logprobs.exp(), logprobs)
    return logprobs.gather(-1, labels[:, None]).squeeze(-1), entropies


class RewardModel(nn.Module):
    """A one-label sequence classifier, whose head is read at every token."""

    def __init__(self, model, args):
        super().__init__()
        self.model = model
        self.args = args

    def forward(self, input_ids, mask):
        """Return the scores of the texts that end with each token, (rows, length).

        The mask is not needed here, but all models have the same arguments.
        """
        hidden = hidden_states(self.model, input_ids)  # (rows, length, hidden_size)
        return self.model.score(hidden.to(self.model.score.weight.dtype)).squeeze(-1)


class ValueModel(RewardModel):
    """A one-label sequence classifier, which predicts the rewards that are still to come.

    The value of token t is the prediction before t is chosen. It is therefore read at position
    t - 1, like the token's log-probability.
    """

    def forward(self, input_ids, mask):
        """Return the values, (rows, length), which are 0 outside the mask of response tokens."""
        # Shift right by one. The last value moves to t = 0, where the mask is 0
        return super().forward(input_ids, mask).roll(1, dims=1) * mask


def hidden_states(model, input_ids):
    """Return the hidden states that a model's head reads, (rows, length, hidden_size)."""
    return model.base_model(input_ids, use_cache=False).last_hidden_state


def collate(responses, device):
    """Build a Batch with one row per response.

    The fields that steps 5 and 6 fill in are still None.

    >>> prompt = Prompt("row 0", "", [5, 6], None, None, None)
    >>> responses = [
    ...     Response(prompt, np.array([7, 8]), np.array([-0.5, -0.5]), stopped=True, score=1.0),
    ...     Response(prompt, np.array([9]), np.array([-0.5]), stopped=True),
    ... ]
    >>> batch = collate(responses, device="cpu")
    >>> batch.input_ids.tolist(), batch.lengths.tolist()
    ([[5, 6, 7, 8], [5, 6, 9, 0]], [4, 3])
    >>> batch.mask.tolist(), batch.loss_mask[1].tolist()
    ([[0.0, 0.0, 1.0, 1.0], [0.0, 0.0, 1.0, 0.0]], [0.0, 0.0, 0.0, 0.0])
    """
    prompt_lengths = torch.tensor([len(response.prompt.token_ids) for response in responses])
    rows = [response.row for response in responses]
    lengths = torch.tensor([len(row) for row in rows])
    positions = torch.arange(lengths.max())
    is_token = positions < lengths[:, None]
    mask = (is_token & (positions >= prompt_lengths[:, None])).float()
    logprobs = torch.tensor(np.concatenate([response.logprobs for response in responses]))
    # A response without a score is left out of the loss, because its score is unknown, not 0
    has_score = torch.tensor([float(response.score is not None) for response in responses])
    return Batch(
        input_ids=to_rows(torch.tensor(np.concatenate(rows)), is_token).to(device),
        lengths=lengths.to(device),
        mask=mask.to(device),
        loss_mask=(mask * has_score[:, None]).to(device),
        scores=torch.tensor([response.score or 0.0 for response in responses], device=device),
        has_score=has_score.to(device),
        sampler_logprobs=to_rows(logprobs, mask).to(device),
    )


def to_rows(values, mask):
    """Return a tensor like the mask that has the values where mask is 1, in order, and 0 elsewhere.

    >>> to_rows(torch.tensor([5.0, 6.0, 7.0]), torch.tensor([[0, 1, 1], [0, 1, 0]]))
    tensor([[0., 5., 6.],
            [0., 7., 0.]])
    """
    return torch.zeros_like(mask, dtype=values.dtype).masked_scatter(mask.bool(), values)


# ------------------------------------------------------------------------------------------ scores


def score_responses(accelerator, reward_model, responses, args, is_eval=False):
    """Return copies of the responses with their scores.

    A score is the weighted sum of the reward model's score, the verifiable reward and the format
    reward. In an evaluation the reward model's score counts only if there is no ground truth. The
    score is None if the verifiable reward failed. With non_stop_penalty, a response that is
    truncated or shorter than min_response_length gets the penalty as its score instead, even if its
    reward failed.

    Every rank must call this, in the same order.
    """
    model_scores = reward_model_scores(accelerator, reward_model, responses, args)
    with_scores = []
    for response, model_score in zip(responses, model_scores, strict=True):
        has_truth = response.prompt.ground_truth is not None
        score = 0.0
        if model_score is not None and not (has_truth and is_eval):
            score += model_score * args.reward_model_multiplier
        if response.verifiable is not None:
            score += response.verifiable * args.verification_reward
        if args.add_r1_style_format_reward and has_r1_format(response):
            score += args.r1_style_format_reward
        if response.failure:
            score = None  # unknown, which does not mean incorrect
        is_complete = response.stopped and len(response.token_ids) >= args.min_response_length
        if args.non_stop_penalty and not is_complete:  # even if the reward failed
            score = args.penalty_reward_value
        with_scores.append(replace(response, model_score=model_score, score=score))
        if response.failure:
            # Warn once for each type of error. The metrics count all of them
            kind = response.failure.splitlines()[-1].partition(":")[0]
            origin = response.prompt.origin
            warn_once(f"the reward failed on {origin}: {response.failure}", kind)
    return with_scores


# -------------------------------------------------------------------------------------- generation


def generate_rollout(engine, workers, tokenizer, request, args):
    """Generate and grade this rank's part of the responses to a Request. Return a Rollout.

    Every rank gets the whole Request, and engine.sample generates this rank's part of it. On a rank
    without vLLM this part is empty.
    """
    times = {}
    with timed(times, "generation"):
        responses = engine.sample(request.prompts, request.seeds, args.temperature)
    with timed(times, "reward"):
        responses = grade_responses(responses, tokenizer, workers, args)
    with timed(times, "evaluation"):
        # The seeds are the same in every evaluation
        answers = engine.sample(
            request.eval_prompts, range(len(request.eval_prompts)), args.eval_temperature
        )
        answers = grade_responses(answers, tokenizer, workers, args)
    return Rollout(engine.policy_version, responses, answers, times)


# ================================================================================================
# The algorithm ends here. What follows is machinery. Look it up when you need it.
# ================================================================================================


# --------------------------------------------------------------------------------------- arguments


FilledIn = tyro.conf.Suppress  # computed by the script, so not a command-line option


@dataclass
class Args(Algorithm):
    """Options of a training run.

    Nearly every run sets --dataset, --model_name_or_path, --total_episodes, --response_length,
    --learning_rate, --local_rollout_batch_size, --local_mini_batch_size, and --reward_fn or
    --reward_model_path. Sizes with `local_` in their names are those of one rank.

    The options of the algorithm come first. Then come batches, optimization, generation, rewards,
    models, data and evaluation, engines, checkpoints, and trackers.
    """

    # -- Batches
    total_episodes: int = 100_000
    """Number of responses to train on."""
    number_samples_per_prompt: int = 1
    """Number of responses generated for each prompt. Together they are a group."""
    local_rollout_batch_size: int = 256
    """Prompts per step and rank."""
    local_mini_batch_size: int = 64
    """Responses per optimizer update and rank."""
    micro_batch_tokens: int = 16_384
    """Most tokens of a micro-batch, padding included. A longer row is run by itself."""
    per_device_train_batch_size: int = 0
    """Most responses of a micro-batch. With 0, micro_batch_tokens alone limits it."""

    # -- Optimization
    lr_scheduler_type: Literal["linear", "cosine", "constant"] = "linear"
    """Schedule of the learning rate after its warm-up."""
    warm_up_steps: int = 0
    """Number of a model's first updates (not steps) in which its learning rate rises."""
    warmup_ratio: float = 0.0
    """Warm-up as a fraction of the policy's updates. It is used if warm_up_steps is 0."""
    eps: float = 1e-8
    """Epsilon of AdamW. The 1e-5 of 2403.17031 would halve the updates of large models."""
    weight_decay: float = 0.0
    """Weight decay of AdamW."""

    # -- Generation
    response_length: int = 256
    """Largest number of tokens in a response."""
    stop_token: str | None = None
    """Further token that ends a response. "eos" means the tokenizer's end token."""
    stop_token_id: int | None = None
    """Id of a further token that ends a response."""

    # -- Reward
    reward_model_multiplier: float = 1.0
    """Factor on the reward model's score. At 0, PPO's value model still starts from it."""
    apply_verifiable_reward: bool = True
    """Score responses with compute_score or reward_fn."""
    verification_reward: float = 1.0
    """Factor on the verifiable reward."""
    reward_fn: str | None = None
    """Function in place of compute_score, as path/to/file.py:function (docs/rewards.md)."""
    reward_workers: int | None = None
    """Processes per engine that call reward_fn. Unset means one per core, but at most 8."""
    reward_timeout: float = 10.0
    """Seconds for a call of reward_fn. If it fails or is late, the loss omits the response."""
    add_r1_style_format_reward: bool = False
    """Reward the form <think>...</think><answer>...</answer>."""
    r1_style_format_reward: float = 1.0
    """Size of the reward that add_r1_style_format_reward gives."""
    min_response_length: int = 0
    """Number of tokens below which non_stop_penalty also penalizes a complete response."""

    # -- Models
    model_name_or_path: str = "debug_assets/model"
    """Policy and reference policy, a folder or a Hub name. scripts/setup.sh makes the default."""
    model_revision: str | None = None
    """Revision of model_name_or_path on the Hub."""
    tokenizer_name_or_path: str | None = None
    """Tokenizer, a folder or a Hub name. Unset means the policy's."""
    chat_template: str | None = None
    """File with a Jinja chat template. Unset means the tokenizer's own."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Data type of weights in learner and vLLM. The optimizer updates float32 masters."""
    attn_implementation: str = "sdpa"
    """Implementation of attention, such as sdpa, eager or flash_attention_2."""
    compile_layers: bool = False
    """Compile the models' layers, on GPUs only. The gain has not been measured on a GPU yet."""
    gradient_checkpointing: bool = True
    """Compute activations again in the backward pass. Less memory, but a third slower."""
    reward_model_path: str | None = None
    """Reward model, a one-label classifier with the policy's tokenizer. Unset means none."""
    reward_model_revision: str | None = None
    """Revision of reward_model_path on the Hub."""
    value_model_path: str | None = None
    """Start of the value model. Unset means the reward model or, without one, the policy."""

    # -- Data and evaluation
    dataset: str = "debug_assets/train.parquet"
    """Training prompts in a .parquet or .jsonl file, a folder, or a dataset on the Hub."""
    dataset_config: str | None = None
    """Configuration of the dataset, if it has several."""
    dataset_split: str = "train"
    """Split of the dataset, unless it is a file."""
    eval_dataset: str | None = None
    """Held-out prompts in the same form as the dataset. Unset means no evaluation."""
    eval_dataset_config: str | None = None
    """Configuration of eval_dataset, if it has several."""
    eval_dataset_split: str = "test"
    """Split of eval_dataset, unless it is a file."""
    max_prompt_token_length: int = 256
    """Largest number of tokens in a prompt. Longer prompts are dropped."""
    num_evals: int = 10
    """Evaluations during training, the first before any update. One more follows at the end."""
    num_eval_prompts: int = 500
    """Number of held-out prompts, which are the same for every seed. 0 means all."""
    eval_temperature: float = 0.0
    """Temperature of evaluations. 0 means greedy decoding."""

    # -- Engines' GPUs
    vllm_gpus: tuple[int, ...] = ()
    """Indices of each node's GPUs for vLLM only. Unset means an engine on each learner's GPU."""
    vllm_tensor_parallel_size: int = 1
    """Number of GPUs per engine (tensor parallel). More than one needs vllm_gpus."""
    vllm_gpu_memory_utilization: float | None = None
    """Fraction of a GPU for vLLM. Unset means 0.9 of its own GPUs, or 0.3 of a colocated one."""
    vllm_enforce_eager: bool = False
    """Do without CUDA graphs. vLLM then starts faster but generates slower."""

    # -- The run and its checkpoints
    exp_name: str = Path(__file__).stem
    """Name of the experiment."""
    seed: int = 1
    """Seed of everything random."""
    run_name: str | None = None
    """Name of the run and its folder. Unset means exp_name, seed, time and random letters."""
    output_dir: str = "output"
    """Folder that contains the folders of all runs."""
    save_freq: int = 0
    """Steps between checkpoints. 0 means no checkpoints."""
    keep_last_n: int = 3
    """Number of newest checkpoints to keep. 0 means all."""
    resume_from_checkpoint: str | None = None
    """Checkpoint to resume, or latest (run_name's newest, or a new run). Removes newer ones."""

    # -- Trackers and the hub
    with_tracking: bool = False
    """Log to Weights & Biases as well."""
    wandb_project_name: str = os.environ.get("WANDB_PROJECT", "tandem")
    """Project on Weights & Biases."""
    wandb_entity: str | None = None
    """Owner of the project on Weights & Biases, a user or a team."""
    push_to_hub: bool = False
    """Upload the model at the end, by scripts/push_to_hub.py."""
    hf_entity: str | None = None
    """Owner of the repository on the Hub. Unset means the user who is logged in."""
    hf_repo_id: str | None = None
    """Repository on the Hub. Unset means exp_name."""
    hf_repo_revision: str | None = None
    """Branch of the repository on the Hub. Unset means the run's name."""

    # -- Filled in at run time
    mini_batch_size: FilledIn[int] = 0
    """Responses per update on all ranks."""
    world_size: FilledIn[int] = 1
    """Number of ranks."""
    local_world_size: FilledIn[int] = 1
    """Number of ranks on a node."""
    rollout_batch_size: FilledIn[int] = 0
    """Prompts per step on all ranks."""
    episodes_per_step: FilledIn[int] = 0
    """Responses per step on all ranks."""
    updates_per_step: FilledIn[int] = 0
    """Optimizer updates per step."""
    start_day: FilledIn[str] = field(default_factory=lambda: date.today().isoformat())
    """Day (YYYY-MM-DD) of the run's first start, for chat templates that write the date."""
    num_training_steps: FilledIn[int] = 0
    """Steps of the run."""
    num_updates: FilledIn[int] = 0
    """Optimizer updates of the run."""
    num_policy_updates: FilledIn[int] = 0
    """Updates of the policy, which start after the value model's warm-up."""
    stop_token_ids: FilledIn[tuple[int, ...]] = ()
    """Ids of the tokens that end a response."""


# ------------------------------------------------------------------------------------------ set-up


def start_ranks(args):
    """Set up signals, warnings and accelerate.

    Return the Accelerator, and a gloo group by which ranks exchange Python objects (None if there
    is one rank).
    """
    die_with_launcher()
    for number in (signal.SIGINT, signal.SIGTERM):  # they end this process, whatever it waits for
        signal.signal(number, signal.SIG_DFL)
    os.environ.setdefault("PYTHONWARNINGS", "ignore")  # of child processes
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", module="torch.distributed|accelerate")
    # On new GPUs torch 2.13 prefers cuDNN's attention, which may give gradients of NaN (pytorch
    # issue 196678), and prepares itself for each shape
    torch.backends.cuda.enable_cudnn_sdp(False)
    # Under FSDP2 this would give zeros to all ranks but the first of a node
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    # accelerate would take the tasks of Slurm or MPI for ranks, which only a launcher starts
    if "LOCAL_RANK" not in os.environ:
        for name in ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"):
            os.environ.pop(name, None)
    timeout = timedelta(hours=2)  # others wait while a rank loads or saves a model
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),  # else torchrun's processes would not meet on a CPU
        mixed_precision="no",  # weights are in args.dtype already
        log_with="wandb" if args.with_tracking else None,
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timeout)],
    )
    if accelerator.num_processes == 1:
        return accelerator, None
    return accelerator, torch.distributed.new_group(backend="gloo", timeout=timeout)


def fill_in(args, world_size):
    """Return a copy of args with the fields that are filled in at run time.

    Raise ValueError if the sizes of batches do not fit together.
    """
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    args = replace(args, world_size=world_size, local_world_size=local_world_size)

    local_episodes = args.local_rollout_batch_size * args.number_samples_per_prompt
    args.rollout_batch_size = args.local_rollout_batch_size * world_size
    args.episodes_per_step = local_episodes * world_size
    args.mini_batch_size = args.local_mini_batch_size * world_size
    if local_episodes % args.local_mini_batch_size:
        raise ValueError(
            f"local_rollout_batch_size * number_samples_per_prompt ({local_episodes}) must be a "
            f"multiple of local_mini_batch_size ({args.local_mini_batch_size}); "
            f"{math.gcd(local_episodes, args.local_mini_batch_size)} would do"
        )

    args.num_training_steps = args.total_episodes // args.episodes_per_step
    args.updates_per_step = args.num_epochs * local_episodes // args.local_mini_batch_size
    args.num_updates = args.num_training_steps * args.updates_per_step
    # The policy learns after the value model's warm-up
    warm_up_of_values = args.value_warmup_steps * args.updates_per_step
    args.num_policy_updates = args.num_updates - warm_up_of_values
    if args.warm_up_steps == 0:
        args.warm_up_steps = round(args.warmup_ratio * args.num_policy_updates)
    num_engines = count_engines(args)
    if not args.reward_workers:
        args.reward_workers = min(8, count_cores() // num_engines or 1)
    if not args.vllm_gpu_memory_utilization:
        args.vllm_gpu_memory_utilization = 0.9 if args.vllm_gpus else 0.3
    return args


# -------------------------------------------------------------------------------- the run's folder


def agree_on_run(args):
    """Let rank 0 choose the run's folder for all ranks.

    Return args with run_name and start_day, the folder, and the checkpoint to resume from (or
    None). The name can be random, and other nodes can see a new folder late, so only rank 0 looks.
    A resumed run keeps its first day, because chat templates can write the date into prompts.

    Every rank must call this, in the same order.
    """
    found = None
    if is_rank_0():
        run_dir, checkpoint_dir = find_run(args)
        args.run_name = os.path.relpath(run_dir, args.output_dir)
        if checkpoint_dir:
            args.start_day = json.loads((run_dir / "args.json").read_bytes())["start_day"]
        found = args, run_dir, checkpoint_dir
    return broadcast_object_list([found])[0]


def find_run(args):
    """Return the run's folder, and the checkpoint to resume from (None if there is none).

    With "latest" a run without a checkpoint starts again from step 1. Raise ValueError if the
    folder holds another run, or a finished run without checkpoints.
    """
    if args.resume_from_checkpoint == "latest" and not args.run_name:
        raise ValueError("--resume_from_checkpoint latest needs a --run_name")
    if args.resume_from_checkpoint not in (None, "latest"):
        checkpoint_dir = Path(os.path.abspath(args.resume_from_checkpoint))
        return checkpoint_dir.parents[1], checkpoint_dir
    # Random letters, because two runs can start in the same second
    start = f"{time.strftime('%Y%m%d_%H%M%S')}_{os.urandom(3).hex()}"
    run_dir = Path(args.output_dir, args.run_name or f"{args.exp_name}__{args.seed}__{start}")
    checkpoints = list_checkpoints(run_dir)
    if args.resume_from_checkpoint and checkpoints:
        return run_dir, checkpoints[-1]
    # args.json exists as soon as a run has started, and model/ only after its last update. With
    # "latest" an unfinished run starts again. Without "latest", any run in this folder is refused
    of_another = "model" if args.resume_from_checkpoint else "args.json"
    if (run_dir / of_another).exists():
        raise ValueError(
            f"{run_dir} holds another run, or a finished one; choose another --run_name or "
            f"--output_dir. --resume_from_checkpoint latest resumes a run that was interrupted"
        )
    return run_dir, None


def open_run(accelerator, run_dir, checkpoint_dir, state, train_prompts, args):
    """Make the run's folder, or restore its files from the checkpoint. Start the trackers."""
    if not is_rank_0():
        return
    run_dir.mkdir(parents=True, exist_ok=True)
    # Mode "x" raises an error if the file exists, so that two new runs cannot share a folder
    with open(run_dir / "args.json", "w" if args.resume_from_checkpoint else "x") as file:
        json.dump(asdict(args), file, indent=2)
    if args.resume_from_checkpoint:
        rewind_run(run_dir, checkpoint_dir)
    run_program("internal/provenance.py", run_dir)  # adds commit and versions to args.json
    wandb_run = {
        "name": os.environ.get("WANDB_NAME", args.run_name),
        "entity": args.wandb_entity,
        # A copy of the folder has another name, and is another run
        "id": str(stable_hash(state["wandb_id"], args.run_name)),
        "resume": "allow",
    }
    config = json.loads((run_dir / "args.json").read_bytes())
    accelerator.init_trackers(args.wandb_project_name, config, {"wandb": wandb_run})
    report_prompt_lengths(accelerator, train_prompts, run_dir)


# -------------------------------------------------------------------- tokenizer, data and requests


def load_tokenizer(args):
    """Load the tokenizer.

    Raise ValueError if the tokenizer of a reward or value model gives the policy's tokens other
    ids.
    """
    path = args.tokenizer_name_or_path or args.model_name_or_path
    tokenizer = AutoTokenizer.from_pretrained(path, revision=revision_of(path, args))
    if args.chat_template:
        tokenizer.chat_template = Path(args.chat_template).read_text("utf-8")
    vocabulary = tokenizer.get_vocab()
    # GRPO has no value model
    for flag in ("reward_model_path", "value_model_path"):
        path = getattr(args, flag, None)
        if not path:
            continue
        other = AutoTokenizer.from_pretrained(path, revision=revision_of(path, args))
        if not vocabulary.items() <= other.get_vocab().items():  # it may have more tokens
            raise ValueError(f"--{flag} {path} must give the policy's tokens the same ids")
    return tokenizer


def find_stop_tokens(args, tokenizer, model):
    """Return the ids of the tokens that end a response.

    These are the end tokens of the model and of the tokenizer, and the tokens of the flags. Raise
    ValueError if there are none, or if one is not in the vocabulary.
    """
    eos = model.generation_config.eos_token_id
    stop_ids = {args.stop_token_id, tokenizer.eos_token_id}
    stop_ids |= set(eos if isinstance(eos, list) else [eos])
    if args.stop_token:
        stop_token = tokenizer.eos_token if args.stop_token == "eos" else args.stop_token
        stop_ids.add(tokenizer.get_vocab()[stop_token])
    stop_ids.discard(None)
    if not stop_ids or max(stop_ids) >= model.config.get_text_config().vocab_size:
        raise ValueError(
            f"stop tokens {stop_ids}: there are none, or one is not in the vocabulary; see "
            f"--stop_token {args.stop_token}, --stop_token_id and the model's generation config"
        )
    return tuple(sorted(stop_ids))


def load_datasets(tokenizer, args):
    """Return the prompts to train on, and the held-out prompts (none without eval_dataset)."""
    train_prompts = load_prompts(
        args.dataset, args.dataset_config, args.dataset_split, tokenizer, args, is_eval=False
    )
    if not args.eval_dataset:
        return train_prompts, []
    eval_prompts = load_prompts(
        args.eval_dataset,
        args.eval_dataset_config,
        args.eval_dataset_split,
        tokenizer,
        args,
        is_eval=True,
    )
    if 0 < args.num_eval_prompts < len(eval_prompts):
        drawn = draw_prompts(len(eval_prompts), 0, args.num_eval_prompts, seed=0)
        eval_prompts = [eval_prompts[i] for i in drawn]
    return train_prompts, eval_prompts


def load_prompts(path, config, split, tokenizer, args, is_eval):
    """Return the prompts of a dataset, and say how many are left out.

    Raise ValueError if a row cannot be used, or if no prompt is left.
    """
    prompts = []
    for index, row in enumerate(load_rows(path, config, split)):
        with naming_row(path, index):
            prompts.append(read_prompt(row, f"{path}, row {index}", tokenizer, args, is_eval))
    asked = [prompt for prompt in prompts if prompt.token_ids]
    kept = [prompt for prompt in asked if len(prompt.token_ids) <= args.max_prompt_token_length]
    counts = (
        f"{path}: {len(kept)} prompts; {len(prompts) - len(asked)} are empty, and "
        f"{len(asked) - len(kept)} are longer than --max_prompt_token_length"
    )
    if not kept:
        raise ValueError(counts)
    if is_rank_0():
        print(counts)
    return kept


def read_prompt(row, origin, tokenizer, args, is_eval):
    """Return a row of a dataset as a Prompt.

    Its columns are verl's, `prompt` (a string, or messages), `data_source`, `reward_model: {style,
    ground_truth}`, `extra_info`, or open-instruct's, `messages`, `dataset`, `ground_truth`. Raise
    ValueError if it has no prompt, or lacks what its reward needs.
    """
    row = plain_values(row)
    content = row.get("messages") or row.get("prompt")
    if content is None:
        raise ValueError(f"no `messages` and no `prompt` among its columns: {', '.join(row)}")
    data_source = row.get("data_source") or row.get("dataset")
    ground_truth = row.get("ground_truth")
    rule = row.get("reward_model") or {}
    # Style "model" means no rule, except in verl's HellaSwag rows, which have `eval`
    if ground_truth is None and (rule.get("style") != "model" or rule.get("eval")):
        ground_truth = rule.get("ground_truth")
    # Without a ground truth a row may be scored by the reward model
    if ground_truth is None and args.apply_verifiable_reward and not uses_reward_model(args):
        raise ValueError("no `ground_truth`, which the reward needs")
    # Held-out prompts are scored by a rule where they can be
    if not args.apply_verifiable_reward and not is_eval:
        ground_truth = None
    if ground_truth is not None and not args.reward_fn:
        compute_score(data_source, "", ground_truth)  # it must know the source
    # For templates it is the run's first day, because a resume must make the same prompts
    variables = {"strftime_now": date.fromisoformat(args.start_day).strftime}
    text, token_ids = tokenize_prompt(content, row, tokenizer, variables)
    return Prompt(origin, text, token_ids, data_source, ground_truth, row.get("extra_info"))


def tokenize_prompt(prompt, row, tokenizer, variables=None):
    """Return the text of a prompt and its token ids, or "" and [] if nothing is asked.

    prompt: a string; or messages, which the chat template renders with the row's `tools` and
    `chat_template_kwargs`, and further variables. An answer that ends them is left out.
    """
    if isinstance(prompt, str):
        return prompt, tokenizer(prompt)["input_ids"] if prompt.strip() else []
    messages = prompt[:-1] if prompt and prompt[-1]["role"] == "assistant" else prompt
    asked = [message.get("content") or "" for message in messages if message["role"] == "user"]
    if not messages or not all(str(content).strip() for content in asked):
        return "", []
    text = tokenizer.apply_chat_template(
        messages,
        tools=row.get("tools"),
        tokenize=False,
        add_generation_prompt=True,
        **(variables or {}) | (row.get("chat_template_kwargs") or {}),
    )
    # The template has written the special tokens
    return text, tokenizer(text, add_special_tokens=False)["input_ids"]


# Columns, and keys inside them, that are objects. They may come as JSON text
OBJECTS = {"tools", "arguments", "chat_template_kwargs", "reward_model", "extra_info"}


def plain_values(value, name=None):
    """Return a row, or the value of a name in it, without null entries and JSON text.

    Arrow adds null entries, because it gives all rows the same keys.

    >>> plain_values({"tools": '[{"name": "add"}]', "prompt": [{"content": "[]", "role": None}]})
    {'tools': [{'name': 'add'}], 'prompt': [{'content': '[]'}]}
    """
    if name in OBJECTS and isinstance(value, str):
        value = json.loads(value or "null")
    if isinstance(value, list):
        return [plain_values(item) for item in value]
    if isinstance(value, dict):
        return {key: plain_values(item, key) for key, item in value.items() if item is not None}
    return value


def load_rows(path, config, split):
    """Return the rows of a .jsonl or .parquet file, of a folder, or of a dataset on the hub.

    Of a folder (or, with a config, of the folder with this name in it) all such files are read, in
    sorted order. If the name of one has "train" or "test" in it, then only those are read that have
    the split's name in theirs, such as train.jsonl and train/0.parquet.
    """
    if not os.path.exists(path):
        return datasets.load_dataset(path, config, split=split).to_list()
    if os.path.isfile(path):
        return read_file(path)
    folder = os.path.join(path, config or "")
    names = glob.glob("**/*.jsonl", root_dir=folder, recursive=True)
    names = sorted(names + glob.glob("**/*.parquet", root_dir=folder, recursive=True))
    if any("train" in name or "test" in name for name in names):
        names = [name for name in names if split in name]
    rows = []
    for name in names:
        rows += read_file(os.path.join(folder, name))
    return rows


def read_file(path):
    """Return the rows of a .parquet file, or of a file with one JSON object a line."""
    if path.endswith(".parquet"):
        return parquet.read_table(path).to_pylist()
    # Python's own reader, because that of `datasets` would make 1 of "01" beside 2
    rows = []
    with open(path, "rb") as file:
        for line in file:
            with naming_row(path, len(rows)):
                rows.append(json.loads(line))
    return rows


@contextlib.contextmanager
def naming_row(path, index):
    """Turn any error inside into a ValueError that names file and row."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{path}, row {index}: {type(error).__name__}: {error}") from error


def uses_reward_model(args):
    return args.reward_model_path and args.reward_model_multiplier


def make_request(training_step, train_prompts, eval_prompts, args):
    """Build the request of a step or, after the last step, that of the final evaluation only.

    Seeds are hashes, because with sums, runs with neighbouring values of --seed would share
    responses.
    """
    steps_before, num_steps = training_step - 1, args.num_training_steps
    count = args.rollout_batch_size if steps_before < num_steps else 0
    drawn = draw_prompts(len(train_prompts), steps_before * count, count, args.seed)
    prompts = [train_prompts[i] for i in drawn for _ in range(args.number_samples_per_prompt)]
    seeds = [
        stable_hash(args.seed, "episode", steps_before * args.episodes_per_step + i)
        for i in range(len(prompts))
    ]
    if not evaluation_is_due(steps_before, args):
        eval_prompts = []
    return Request(prompts, seeds, eval_prompts)


def draw_prompts(num_prompts, start, count, seed):
    """Return the indices of the prompts with the numbers `start` to `start + count` of the run.

    Each traversal of the dataset (a data epoch) is a permutation that depends on the seed.

    >>> sorted(draw_prompts(5, 0, 3, seed=1) + draw_prompts(5, 3, 2, seed=1))
    [0, 1, 2, 3, 4]
    """
    indices = []
    while len(indices) < count:
        pass_index, offset = divmod(start + len(indices), num_prompts)
        generator = torch.Generator().manual_seed(stable_hash(seed, "prompts", pass_index))
        indices += torch.randperm(num_prompts, generator=generator).tolist()[offset:]
    return indices[:count]


# ---------------------------------------------------------------------------------- loading models


def load_model(auto_class, path, args, trained, **config_options):
    """Load a model in args.dtype, without dropout (1909.08593, p. 3).

    It is loaded directly in that dtype, because a later cast would also round its float32 buffers,
    such as the frequencies of rotary embeddings. If the checkpoint of a value model has no head,
    the head starts as zeros, so that values start at 0 and the first advantages are not noise.
    Raise ValueError if the checkpoint lacks another tensor.
    """
    revision = revision_of(path, args)
    config = AutoConfig.from_pretrained(path, revision=revision, **config_options)
    for part in (config, config.get_text_config()):  # a vision model has two configs
        for name, value in vars(part).items():
            if isinstance(value, float) and "drop" in name:
                setattr(part, name, 0.0)
    model, report = auto_class.from_pretrained(
        path,
        config=config,
        revision=revision,
        dtype=getattr(torch, args.dtype),
        attn_implementation=args.attn_implementation,
        output_loading_info=True,
    )
    missing = set(report["missing_keys"])
    if trained and missing == {"score.weight"}:
        model.score.weight.data.zero_()
    elif missing:
        raise ValueError(f"the checkpoint {path} lacks {', '.join(missing)}")
    if auto_class is AutoModelForCausalLM:
        head = model.get_output_embeddings()
        # vLLM starts from this config. A head that the checkpoint contains is not tied, even if the
        # config says that it is. Of a vision model, only the language model has been loaded
        model.config.tie_word_embeddings = head.weight is model.get_input_embeddings().weight
        model.config.architectures = [type(model).__name__]
    if args.compile_layers:
        # By layer, because a model that is compiled as a whole gets a mask, and so loses flash
        # attention. Sizes are symbols, so that all layers and micro-batches share a few graphs.
        # A layer that cannot be one graph raises an error. Else it would run uncompiled in silence
        torch._dynamo.config.recompile_limit = 64
        for layer in model.base_model.layers:
            layer.compile(dynamic=True, fullgraph=True)
    if trained and args.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    # Gradient checkpointing needs training mode. The config has turned dropout off
    model.train(trained).requires_grad_(trained)
    return model


def revision_of(path, args):
    return {
        args.reward_model_path: args.reward_model_revision,
        args.model_name_or_path: args.model_revision,
    }.get(path)


def load_reference_policy(accelerator, policy, args):
    """Load the reference policy. With beta 0, which needs none, return the policy itself.

    Every rank must call this, in the same order.
    """
    if args.beta == 0:
        return policy
    model = load_model(AutoModelForCausalLM, args.model_name_or_path, args, trained=False)
    return place_model(accelerator, PolicyModel(model, args), args)


def load_value_model(accelerator, args):
    """Load the value model.

    It starts from value_model_path or, if that is unset, from the reward model or else the policy.

    Every rank must call this, in the same order.
    """
    path = args.value_model_path or args.reward_model_path or args.model_name_or_path
    return load_classifier(accelerator, ValueModel, path, args, trained=True)


def load_reward_model(accelerator, args):
    """Load the reward model. Return None if the run has none.

    Every rank must call this, in the same order.
    """
    if not uses_reward_model(args):
        return None
    return load_classifier(accelerator, RewardModel, args.reward_model_path, args, trained=False)


def load_classifier(accelerator, model_class, path, args, trained):
    """Load a RewardModel or ValueModel with a float32 head.

    With a bfloat16 head many scores would be equal. Every rank must call this, in the same order.
    """
    model = load_model(AutoModelForSequenceClassification, path, args, trained, num_labels=1)
    model.score.float()
    return place_model(accelerator, model_class(model, args), args)


def place_model(accelerator, model, args):
    """Move a PolicyModel, RewardModel or ValueModel to this rank's device.

    Under FSDP2 each rank holds a part of each parameter. Otherwise each rank holds a whole copy.
    The copies start equal, because all ranks load the same files.

    Every rank must call this, in the same order.
    """
    if not accelerator.is_fsdp2:
        return model.to(accelerator.device)
    precision = MixedPrecisionPolicy(reduce_dtype=torch.float32)  # gradients are averaged in it
    for name, module in model.named_modules():
        is_layer = type(module).__name__ in model.model._no_split_modules
        # Parameters of one unit must have one dtype, and a classifier's head is float32
        if is_layer or name == "model.score":
            fully_shard(module, mp_policy=precision)
    return fully_shard(model, mp_policy=precision, reshard_after_forward=True)


# ------------------------------------------------------------------ float32 masters of the weights


def make_optimizer(model, args):
    """Give each trained weight a float32 copy, its master (1710.03740). Return their AdamW.

    A master also holds the gradient, summed over backward passes. In bfloat16, small updates of a
    weight would be rounded away, and so would small terms of the sum of gradients. A float32 weight
    and its master share their memory.
    """
    weights = trained_weights(model).values()
    for weight in weights:
        dtype = torch.promote_types(weight.dtype, torch.float32)
        weight.master = nn.Parameter(weight.detach().to(dtype))
        weight.master.grad = torch.zeros_like(weight.master)
        weight.register_post_accumulate_grad_hook(add_to_master)
    options = {"eps": args.eps, "weight_decay": args.weight_decay, "fused": True}
    return torch.optim.AdamW([weight.master for weight in weights], **options)


def trained_weights(model):
    """Return {name: parameter} of the parameters that are trained."""
    return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}


def add_to_master(weight):
    """Add the gradient of one backward pass to that of the weight's master, and clear it."""
    weight.master.grad += weight.grad
    weight.grad = None


@torch.no_grad()
def masters_to_weights(model):
    """Set each trained weight to its master, rounded to the weight's dtype."""
    for weight in trained_weights(model).values():
        weight.copy_(weight.master)


def sum_over_ranks(accelerator, gradients):
    """Sum gradients over the ranks, in place, because each rank had other rows.

    Every rank must call this, in the same order.
    """
    for gradient in gradients:
        if accelerator.is_fsdp2:  # FSDP2 has averaged them
            gradient *= accelerator.num_processes
        elif accelerator.num_processes > 1:
            torch.distributed.all_reduce(gradient)


# ----------------------------------------------------------------------------- the head, in chunks


# Number of logits in a chunk. In float32 this is 128 MiB on a CPU, and 512 MiB on a GPU, because
# small chunks are slow on a GPU
LOGITS_CHUNK = {"cpu": 2**25, "cuda": 2**27}


class ChunkedHead(torch.autograd.Function):
    """Compute token_logprobs of the head's logits in chunks of positions.

    All logits at once would be the largest tensor in memory. The backward pass therefore computes
    each chunk's logits again, and adds each chunk's gradient of the head to one tensor. It computes
    the gradient of the entropies only if the loss uses them. torch's linear_cross_entropy cannot be
    used, because it supports neither entropies nor soft_cap. torch.utils.checkpoint over the chunks
    would hold twice the memory (docs/results.md, "Weights in bfloat16").
    """

    @classmethod
    def read(cls, model, hidden, labels, args):
        """Return log-probabilities of labels, and entropies, at the sampling temperature.

        Both are (positions,). labels are token ids, (positions,). hidden is what the language
        model's head reads, (positions, hidden_size).
        """
        # Some models scale their logits (Cohere, Granite), or cap them (Gemma)
        config = model.config.get_text_config()
        scale = getattr(config, "logit_scale", None) or 1.0  # MPT's is None
        scale = scale / getattr(config, "logits_scaling", 1.0) / args.temperature
        # Scaling a capped logit by s gives s * cap * tanh(x / cap), which is s * x with the cap s *
        # cap
        soft_cap = getattr(config, "final_logit_softcapping", None)
        if soft_cap:
            soft_cap *= scale
        head = model.get_output_embeddings().weight
        # Compute the logits in float32 (2506.13585)
        hidden = hidden.to(torch.promote_types(head.dtype, torch.float32)) * scale
        return cls.apply(hidden, head, labels, soft_cap)

    @staticmethod
    def logits(hidden, head, soft_cap):
        """Return logits, which stay within plus or minus soft_cap unless that is None.

        hidden is (positions, hidden_size), and head is (vocabulary, hidden_size).
        """
        logits = hidden @ head.T
        if not soft_cap:
            return logits
        return soft_cap * torch.tanh(logits / soft_cap)

    @staticmethod
    def forward(ctx, hidden, weight, labels, soft_cap):
        ctx.soft_cap = soft_cap
        size = max(1, LOGITS_CHUNK[hidden.device.type] // len(weight))  # positions
        ctx.parts = [slice(start, start + size) for start in range(0, len(hidden), size)]
        logprobs, entropies = (hidden.new_empty(len(hidden)) for _ in range(2))
        with in_dtype(weight, hidden.dtype) as head:
            for part in ctx.parts:
                logits = ChunkedHead.logits(hidden[part], head, soft_cap)
                logprobs[part], entropies[part] = token_logprobs(logits, labels[part])
        ctx.save_for_backward(hidden, weight, labels, entropies)
        ctx.set_materialize_grads(False)  # backward() gets None for an output that no loss uses
        return logprobs, entropies

    @staticmethod
    def backward(ctx, logprobs_grad, entropies_grad):
        hidden, weight, labels, entropies = ctx.saved_tensors
        if logprobs_grad is None:
            logprobs_grad = torch.zeros_like(entropies)
        hidden_grad = torch.empty_like(hidden)
        head_grad = torch.zeros_like(weight, dtype=hidden.dtype)
        with in_dtype(weight, hidden.dtype) as head:
            for part in ctx.parts:
                logits = ChunkedHead.logits(hidden[part], head, ctx.soft_cap)
                # The gradient of log p(label) is onehot(label) - p
                factors = -logprobs_grad[part, None]
                if entropies_grad is not None:  # the gradient of the entropy H is -p (log p + H)
                    factors = factors - entropies_grad[part, None] * (
                        torch.log_softmax(logits, dim=-1) + entropies[part, None]
                    )
                logits_grad = torch.softmax(logits, dim=-1).mul_(factors)
                logits_grad.scatter_add_(1, labels[part, None], logprobs_grad[part, None])
                if ctx.soft_cap:
                    logits_grad *= 1 - (logits / ctx.soft_cap) ** 2
                hidden_grad[part] = logits_grad @ head
                head_grad.addmm_(logits_grad.T, hidden[part])
        return hidden_grad, head_grad, None, None


@contextlib.contextmanager
def in_dtype(weight, dtype):
    """Yield a head's weight in `dtype`, in which its matrix products are computed.

    While this context is open, a GPU can use TF32 for products if the weight is bfloat16. That
    makes them five times as fast. Elsewhere TF32 stays off, because its 11 bits cannot represent
    positions above 2,048 in rotary embeddings.
    """
    torch.backends.cuda.matmul.allow_tf32 = weight.dtype == torch.bfloat16
    yield weight.to(dtype)
    torch.backends.cuda.matmul.allow_tf32 = False


# -------------------------------------------------------------------------------------- the engine


# Time limits in seconds. They hold for the start of vLLM or a reward worker, and for each call of a
# weight sync
START_TIMEOUT = 1800
WEIGHT_SYNC_TIMEOUT = 300


def start_engine(accelerator, config, prompts, args):
    """Start this rank's engine and its reward workers.

    Return a VLLM, or a NoEngine if this rank owns no engine, and the queue of reward workers (or
    None). config is the policy's.
    """
    placement = place_engine(accelerator.process_index, torch.cuda.device_count(), args)
    if not placement:
        return NoEngine(), None
    workers = start_reward_workers(args) if args.reward_fn else None
    accelerator.print(f"Starting vLLM (a minute or so) for {args.output_dir}/{args.run_name}")
    max_length = max(len(prompt.token_ids) for prompt in prompts) + args.response_length
    return VLLM(placement, config, max_length, args), workers


class VLLM:
    """One vLLM engine in a process of its own. Only one thread at a time may use it."""

    def __init__(self, placement, config, max_length, args):
        """Start the engine, and wait until it is up.

        For placement see place_engine. max_length is the length of the longest prompt with its
        response.
        """
        self.engine_index, self.num_engines, self.gpus = placement
        self.args = args
        self.policy_version = None  # of the weights that were synced last
        self.nccl = None  # the communicator of this rank and vLLM's workers
        self.folder = tempfile.mkdtemp(prefix="tandem_")
        folders.append(self.folder)
        self.transfer = transfer_method(self.gpus, args)
        environment, options = vllm_settings(self.gpus, self.folder, max_length, args)
        if self.gpus:
            # vLLM's plan leaves out the memory of its sampler, which grows with this number. The
            # number is therefore at most vLLM's default, and at most what this engine needs
            most = 1024 if torch.cuda.get_device_properties().total_memory > 70e9 else 256
            needed = args.episodes_per_step // self.num_engines
            options["max_num_seqs"] = min(most, max(128, needed))
        self.executor = ProcessPoolExecutor(
            1, mp.get_context("spawn"), initializer=die_with_script, initargs=(self.folder,)
        )
        # vLLM and torch read the environment when they are imported, so the process must start with
        # it
        with clear_environment():
            os.environ.update(environment)
            start = self.submit(start_llm, options, config, self.folder)
        process_groups.append(start.result(START_TIMEOUT))

    def submit(self, function, *args, **kwargs):
        """Run a function in vLLM's process. If it fails, this process ends at once."""
        call = self.executor.submit(function, *args, **kwargs)
        call.add_done_callback(end_if_failed)
        return call

    def call(self, method, *args, **kwargs):
        """Call a method of LLM in vLLM's process, with the time limit of weight syncs."""
        return self.submit(call_llm, method, *args, **kwargs).result(WEIGHT_SYNC_TIMEOUT)

    def sample(self, prompts, seeds, temperature):
        """Generate the Responses to this engine's part of some Prompts."""
        first = len(prompts) * self.engine_index // self.num_engines
        end = len(prompts) * (self.engine_index + 1) // self.num_engines
        return self.submit(
            sample_responses, prompts[first:end], seeds[first:end], temperature, self.args
        ).result()

    def sync_weights(self, weights, version):
        """Give vLLM the weights of a version, as gather_weights yields them. vLLM must be idle."""
        if self.transfer == "pipe":
            for named_weight in weights:
                # Pickle here, because the executor's own pickler would move the learner's parameter
                # to shared memory. Send one weight at a time, because each queued one is a copy
                self.submit(receive_weight, pickle.dumps(named_weight)).result(WEIGHT_SYNC_TIMEOUT)
            self.submit(reload_weights).result(WEIGHT_SYNC_TIMEOUT)
        else:
            self.send_weights(weights)
        was_idle = self.call("reset_prefix_cache")
        assert was_idle, "vLLM was busy during a weight sync"
        self.policy_version = version

    def send_weights(self, weights):
        """Send weights by the protocol of vLLM's workers ("ipc" or "nccl"), in vLLM's dtype."""
        if self.policy_version is None:
            self.connect()
        self.call("start_weight_update")
        for names, tensors in in_messages(weights):
            info = {
                "names": names,
                "dtype_names": [self.args.dtype] * len(names),
                "shapes": [list(tensor.shape) for tensor in tensors],
            }
            if self.transfer == "ipc":
                uuid = str(torch.cuda.get_device_properties().uuid)
                info["ipc_handles"] = [{uuid: reduce_tensor(tensor)[1]} for tensor in tensors]
            update = self.submit(call_llm, "update_weights", {"update_info": info})
            if self.transfer == "nccl":
                for tensor in tensors:
                    self.nccl.broadcast(tensor, src=0, stream=torch.cuda.current_stream())
            update.result(WEIGHT_SYNC_TIMEOUT)
            tensors.clear()  # before the next ones are gathered
        self.call("finish_weight_update")
        torch.cuda.ipc_collect()  # frees memory that vLLM has read

    def connect(self):
        """Prepare vLLM's workers for "ipc" or "nccl", before the first weight sync."""
        if self.transfer == "ipc":
            self.call("init_weight_transfer_engine", {"init_info": {}})
            return
        from vllm.distributed.weight_transfer.nccl_common import stateless_init_process_group

        port = get_free_port()
        world_size = 1 + len(self.gpus)  # this rank is number 0, and vLLM's workers follow
        info = {
            "master_address": "127.0.0.1",
            "master_port": port,
            "rank_offset": 1,
            "world_size": world_size,
        }
        joined = self.submit(call_llm, "init_weight_transfer_engine", {"init_info": info})
        self.nccl = stateless_init_process_group(
            "127.0.0.1", port, 0, world_size, torch.cuda.current_device()
        )
        joined.result(WEIGHT_SYNC_TIMEOUT)


def transfer_method(gpus, args):
    """Return the name of the method by which weights are transferred to an engine.

    pipe sends copies through the pipe to vLLM's process, if there is no GPU. ipc sends handles of
    the learner's memory, if the GPU is colocated. nccl sends the numbers to vLLM's own GPUs.
    """
    if not gpus:
        return "pipe"
    return "nccl" if args.vllm_gpus else "ipc"


def in_messages(weights, num_bytes=2**28):
    """Yield weights in messages of at least num_bytes, each (names, contiguous tensors).

    Only the last message can be smaller. A message costs 3 ms (docs/results.md, "On a GPU").
    """
    names, tensors = [], []
    for name, tensor in weights:
        names.append(name)
        tensors.append(tensor.contiguous())
        if sum(tensor.nbytes for tensor in tensors) >= num_bytes:
            yield names, tensors
            names, tensors = [], []
    if names:
        yield names, tensors


def gather_weights(model, args):
    """Yield (name, whole tensor) for each of a policy's weights.

    Every rank must call this, in the same order.
    """
    # On a CPU vLLM has its own copy of a tied head, so the weight is also sent under the head's
    # name
    for name, parameter in model.named_parameters(remove_duplicate=model.device.type == "cuda"):
        # This is the same tensor, except for modules that a model keeps in float32
        weight = parameter.detach().to(getattr(torch, args.dtype))
        if isinstance(weight, DTensor):  # under FSDP2 the ranks exchange their parts
            weight = weight.full_tensor()
        yield name, weight


def sync_weights(engine, language_model, version, args):
    """Give each engine the weights of a version.

    Every rank must call this, in the same order.
    """
    engine.sync_weights(gather_weights(language_model, args), version)


def gather_rollout(part, cpu_group):
    """Join the parts of all ranks, each a Rollout, into one Rollout.

    cpu_group is the ranks' gloo group, or None with one rank. The parts, in the order of the ranks,
    are in the order of the request.

    Every rank must call this, in the same order.
    """
    if not cpu_group:
        return part
    parts = [None] * cpu_group.size()
    torch.distributed.all_gather_object(parts, part, group=cpu_group)
    rollout, *others = parts  # rank 0 has an engine, so its times are reported
    for other in others:
        rollout.responses += other.responses
        rollout.eval_responses += other.eval_responses
    return rollout


def check_sampler(logprobs, sampler_logprobs, mask, args):
    """Check that vLLM has generated with exactly the learner's weights. Return the KL.

    This holds for on-policy batches only. All tensors have the shape (rows, length). Raise
    RuntimeError if the KL of vLLM's policy to the learner's is above 0.015 (1e-4 in float32),
    divided by the temperature if that is below 1. Healthy runs stayed below a third of this limit,
    so there is a warning above a third (docs/results.md, "Checks"). A NaN raises nothing here,
    because apply_gradients finds it and saves the batch.
    """
    kl = masked_mean(kl_penalty(sampler_logprobs * mask, logprobs * mask, "kl3"), mask).item()
    # In float32, vLLM's kernels on a GPU can use TF32
    limit = (1e-4 if args.dtype == "float32" else 0.015) / min(1.0, args.temperature)
    if kl > limit:
        raise RuntimeError(
            f"vLLM's log-probabilities differ from the learner's by a KL of {kl:.2g} at equal "
            f"weights"
        )
    if kl > limit / 3:
        warn_once(f"the KL of vLLM's policy to the learner's is above {limit / 3:.2g}")
    return kl


def end_if_failed(call):
    """End this process if a call of vLLM has failed or vLLM's process has died."""
    if call.exception() is not None:
        end_at_once(call.exception())


def vllm_settings(gpus, folder, max_length, args):
    """Return the environment of an engine's process, and the arguments of vLLM's LLM.

    Here are the settings without which numbers would change or an engine would not start, and a
    few that keep it quiet and private. The engine starts with random weights, so that a tensor that
    a weight sync leaves out shows.
    """
    # The learners' RANK, MASTER_PORT, ... are not for the engine
    launcher = r"((LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE))|MASTER_(ADDR|PORT)|TORCHELASTIC_.*"
    environment = {
        # Defaults, which the user's environment overrides
        "VLLM_LOGGING_LEVEL": "ERROR",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "TQDM_DISABLE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        **{name: os.environ[name] for name in os.environ if not re.fullmatch(launcher, name)},
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the process is ours already
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "TMPDIR": folder,  # vLLM leaves files there when it is killed
    }
    options = {
        "model": ".",  # start_llm goes to the engine's folder
        "load_format": "dummy",  # random weights
        "dtype": args.dtype,
        "max_model_len": max_length,
        "skip_tokenizer_init": True,  # token ids in and out
        "generation_config": "vllm",  # not the model's, which may have a top-k
        "logprobs_mode": "processed_logprobs",  # at the sampling temperature
        "gpu_memory_utilization": args.vllm_gpu_memory_utilization,
        "tensor_parallel_size": args.vllm_tensor_parallel_size,
        "enforce_eager": args.vllm_enforce_eager or not gpus,
    }
    if gpus:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        devices = visible.split(",") if visible else range(torch.cuda.device_count())
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(str(devices[gpu]) for gpu in gpus)
        # As the learner's: in bfloat16 logits of 16 to 32 are 0.125 apart. On a CPU vLLM would cast
        # the head for each token
        options["hf_overrides"] = {"head_dtype": "float32"}
        options["weight_transfer_config"] = {"backend": transfer_method(gpus, args)}
    else:
        environment.setdefault("TORCH_COMPILE_DISABLE", "1")  # saves 6 to 20 s
        # Learner and engine share the cores
        environment["OMP_NUM_THREADS"] = str(count_cores() // (2 * args.local_world_size) or 1)
    # For vLLM 0.32: another version may need none of these. FlashInfer's sampler is for top-k and
    # top-p, which we do not use, and its import may fail
    environment.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    if gpus:
        # If FlashInfer would find another CUDA's compiler, it must take that of torch's CUDA
        toolkit = Path(torch.__file__).parents[1] / "nvidia/cu13"
        if shutil.which("nvcc", path=f"{os.environ['PATH']}:/usr/local/cuda/bin"):
            environment.setdefault("CUDA_HOME", str(toolkit))
    else:
        # On a CPU it dies of a seeded request that it prefills in two parts
        options["enable_chunked_prefill"] = False
        options["max_num_batched_tokens"] = max(8192, max_length)
    return environment, options


# ---------------------------------------------------------- placement: the ranks' engines and GPUs


def count_engines(args):
    """Return the number of engines of a node. Its first ranks own them, one each."""
    gpus = args.vllm_gpus or range(args.local_world_size)
    return len(gpus) // args.vllm_tensor_parallel_size


def place_engine(rank, num_gpus, args):
    """Return a rank's engine as (its number, the number of engines, its GPUs), or None.

    Without vllm_gpus every rank owns an engine, on its own GPU. With vllm_gpus the first ranks of a
    node own one each, and the result is None for the others. GPUs are indices into the node's
    num_gpus visible ones. () means the CPU.

    >>> [place_engine(3, gpus, Args(world_size=4, local_world_size=2)) for gpus in (2, 0)]
    [(3, 4, (1,)), (3, 4, ())]
    >>> args = Args(vllm_gpus=(4, 6, 5, 7), vllm_tensor_parallel_size=2)
    >>> args.world_size, args.local_world_size = 8, 4  # two nodes
    >>> [place_engine(rank, 8, args) for rank in (4, 5, 6)]
    [(2, 4, (4, 6)), (3, 4, (5, 7)), None]
    """
    node, local_rank = divmod(rank, args.local_world_size)
    size = args.vllm_tensor_parallel_size
    gpus = args.vllm_gpus or tuple(range(args.local_world_size))
    engines_per_node = count_engines(args)
    if local_rank >= engines_per_node:
        return None
    own_gpus = gpus[local_rank * size : (local_rank + 1) * size] if num_gpus else ()
    count = args.world_size // args.local_world_size * engines_per_node
    return node * engines_per_node + local_rank, count, own_gpus


class NoEngine:
    """What a rank without an engine has instead of a VLLM. No prompt is in its part."""

    num_engines, policy_version = 0, None

    def sample(self, prompts, seeds, temperature):
        return []

    def sync_weights(self, weights, version):
        """Iterate over the weights, because gathering them needs this rank's part."""
        for _ in weights:
            pass


def limit_memory(device, args):
    """Leave room on a GPU for memory that is not PyTorch's.

    CUDA contexts and NCCL need such memory, and so does vLLM if it is colocated.
    """
    if device.type != "cuda":
        return
    gib = 2**30 / torch.cuda.get_device_properties().total_memory
    # vLLM's fraction of this GPU
    of_vllm = 0 if args.vllm_gpus else args.vllm_gpu_memory_utilization
    # 1 GiB is for the CUDA context of each process on this GPU. 1 GiB is for NCCL, which connects
    # ranks with each other, and a rank with an engine on other GPUs
    room = 2 if args.vllm_gpus or args.world_size == 1 else 3
    torch.cuda.set_per_process_memory_fraction(1 - of_vllm - room * gib)


# --------------------------------------------------------------------- what runs in vLLM's process


llm = None  # vLLM's LLM
received = []  # (name, tensor) of the weights in an incomplete sync by "pipe"


def start_llm(options, config, folder):
    """Create the LLM. Return the id of this process, which is also that of its process group.

    config is the policy's, and folder is the engine's own.
    """
    global llm
    # vLLM's cache of compiled code depends on the model's path, which is "." in every run
    os.chdir(folder)
    config.save_pretrained(".")
    # vLLM has no prefix cache for the states of a hybrid model without chunked prefill, which is
    # off on a CPU
    if {"conv", "mamba", "linear_attention"} & {*(getattr(config, "layer_types", None) or ())}:
        options["enable_prefix_caching"] = options.get("enable_chunked_prefill", True)
    from vllm import LLM

    try:
        llm = LLM(**options)
    except Exception as error:  # vLLM's own error may not be picklable
        raise RuntimeError(f"vLLM does not start: {error!r}") from error
    return os.getpid()


def call_llm(method, *args, **kwargs):
    """Call a method of vLLM's LLM."""
    return getattr(llm, method)(*args, **kwargs)


def receive_weight(pickled):
    """Unpickle a weight, (name, tensor), and keep it until reload_weights."""
    received.append(pickle.loads(pickled))


def reload_weights():
    """Load all weights that receive_weight has collected into vLLM.

    They go in one call, because vLLM discards the tensors of a layer if a call brings only some.
    """
    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": received})
    received.clear()


def sample_responses(prompts, seeds, temperature, args):
    """Generate a Response to each Prompt, each with its own seed."""
    from vllm import SamplingParams

    inputs = [{"prompt_token_ids": prompt.token_ids} for prompt in prompts]
    sampling = [
        SamplingParams(
            seed=seed,
            temperature=temperature,
            max_tokens=args.response_length,
            stop_token_ids=args.stop_token_ids,
            ignore_eos=True,  # only stop_token_ids end a response
            logprobs=0,  # of the sampled token only
            flat_logprobs=True,
            detokenize=False,
        )
        for seed in seeds
    ]
    outputs = llm.generate(inputs, sampling, use_tqdm=False)
    responses = []
    for prompt, output in zip(prompts, outputs, strict=True):
        (completion,) = output.outputs
        token_ids = np.array(completion.token_ids, np.int32)
        logprobs = np.array(completion.logprobs.logprobs, np.float32)
        stopped = token_ids[-1] in args.stop_token_ids
        responses.append(Response(prompt, token_ids, logprobs, stopped))
    return responses


# ----------------------------------------------------------- graders, reward model, reward workers


@cache
def special_ids(tokenizer):
    return {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}


def response_text(tokenizer, token_ids, args):
    """Return the text of a response, for rewards, samples and evaluations.

    Special stop tokens, the begin token and padding are left out. Other special tokens, such as
    <tool_call>, stay, because they are part of the response.
    """
    left_out = {*args.stop_token_ids, tokenizer.bos_token_id, tokenizer.pad_token_id}
    left_out &= special_ids(tokenizer)
    return tokenizer.decode([token_id for token_id in token_ids if token_id not in left_out])


def grade_responses(responses, tokenizer, workers, args):
    """Return copies of the responses with their texts and verifiable rewards.

    For workers see start_reward_workers. It is None if there is no --reward_fn.
    """

    def grade(response):
        prompt = response.prompt
        text = response_text(tokenizer, response.token_ids, args)
        response = replace(response, text=text)
        if prompt.ground_truth is None:
            return response
        if args.reward_fn:
            return call_worker(workers, response, args)
        return replace(
            response, verifiable=compute_score(prompt.data_source, text, prompt.ground_truth)
        )

    with ThreadPoolExecutor(args.reward_workers) as threads:
        return list(threads.map(grade, responses))


def check_rewards(responses):
    """Raise RuntimeError if every reward of a batch failed, for example if a judge has died."""
    if all(response.failure for response in responses):
        raise RuntimeError(f"the reward failed on all responses: {responses[0].failure}")


def reward_model_scores(accelerator, reward_model, responses, args):
    """Return the reward model's score at the last token of each response, or Nones.

    Equal responses are scored once, because the other rows of a micro-batch change the last bits.

    Every rank must call this, in the same order.
    """
    if not reward_model:
        return [None] * len(responses)
    distinct = {tuple(response.row): response for response in responses}
    to_score = list(distinct.values())
    to_score += to_score[:1] * (-len(to_score) % accelerator.num_processes)
    batch = collate(to_score, accelerator.device)
    all_rows = range(len(to_score))
    values, _ = forward_all(accelerator, reward_model, batch, [all_rows], args)
    scores = dict(zip(distinct, values[all_rows, batch.lengths - 1].tolist(), strict=False))
    return [scores[tuple(response.row)] for response in responses]


def compute_score(data_source: str, response: str, ground_truth: str) -> float:
    """Return the verifiable reward of a response."""
    if data_source == "debug/sorting":
        return float(response.strip() == ground_truth.strip())
    if "gsm8k" in str(data_source):
        return grade_gsm8k(response, ground_truth)
    raise NotImplementedError(
        f"no rule for the data source {data_source!r}: this file grades debug/sorting and *gsm8k*. "
        f"For MATH, HellaSwag, code and constraints use --reward_fn "
        f"scripts/rewards/graders.py:compute_score, and for others a function of your own"
    )


def grade_gsm8k(response, ground_truth):
    """Return 1.0 if a response has the ground truth as its answer, else 0.0.

    The answer is the first number after the last "####" or, without a "####", the last number.
    scripts/rewards/graders.py also reads fractions, units and other forms (docs/rewards.md).

    >>> grade_gsm8k("6 * 200 is 1,200. #### $1,200.", "1200")
    1.0
    """

    def read(number):
        return float(re.sub(r"[$,]", "", number))

    truth = read(str(ground_truth))
    _, mark, end = response.rpartition("####")
    numbers = re.findall(r"-?\$?[\d,]*\.?\d+", end)
    if not numbers:
        return 0.0
    answer = numbers[0] if mark else numbers[-1]
    return float(read(answer) == truth)


# The parts can hold anything except these tags
NO_TAG = r"(?:(?!</?(?:think|answer)>).)*"
R1_FORMAT = re.compile(rf"\s*<think>{NO_TAG}</think>\s*<answer>{NO_TAG}</answer>\s*", re.DOTALL)


def has_r1_format(response):
    """Return whether a response has the form <think>...</think><answer>...</answer>.

    The prompt can have opened <think> already.
    """
    text = response.text
    if response.prompt.text.rstrip().endswith("<think>"):
        text = "<think>" + text
    return R1_FORMAT.fullmatch(text) is not None


def start_reward_workers(args):
    """Start the processes for --reward_fn. Return a queue of (executor, process group)."""
    # The fork server imports these slow modules once, and workers inherit them
    mp.set_forkserver_preload(["accelerate", "datasets", "transformers.models.auto", "tyro"])
    workers = queue.Queue()
    for _ in range(args.reward_workers):
        workers.put(start_reward_worker(args))
    return workers


def start_reward_worker(args):
    """Start a process for --reward_fn. Return its executor, and the id of its process group."""
    context = mp.get_context("forkserver")
    executor = ProcessPoolExecutor(1, context, initializer=die_with_script)
    source = read_reward_file(args.reward_fn)
    start = executor.submit(start_reward_process, args.reward_fn, source)
    process_group = start.result(START_TIMEOUT)
    process_groups.append(process_group)
    return executor, process_group


@cache
def read_reward_file(reward_fn):
    """Return the source of the file in path/to/file.py:function.

    It is cached, so that all workers grade by the same source, even if the file is edited later.
    """
    path, _, _ = reward_fn.rpartition(":")
    return Path(path).read_bytes()


def call_worker(workers, response, args):
    """Run call_reward_fn in an idle worker.

    --reward_fn can raise, hang, exit or crash. Then this response gets no score. A worker that dies
    or exceeds reward_timeout is killed, and the next call with this place in the queue starts a new
    one. If the new one does not start, the response of that call gets no score either.
    """
    executor, process_group = workers.get()
    try:
        if process_group not in process_groups:
            executor, process_group = start_reward_worker(args)
        return executor.submit(call_reward_fn, response).result(args.reward_timeout)
    except BaseException as error:  # sys.exit() in the file raises no Exception
        kill_group(process_group)
        is_late = isinstance(error, TimeoutError)
        cause = f"the call took over {args.reward_timeout:g} s" if is_late else error
        return replace(response, failure=f"{type(error).__name__}: {cause}")
    finally:
        workers.put((executor, process_group))


# ---------------------------------------------------------- what runs in a reward worker's process


reward_function = None  # that of --reward_fn


def start_reward_process(reward_fn, source):
    """Load the reward function. Return the id of this process, which is also that of its group."""
    global reward_function
    reward_function = load_function(reward_fn, source)
    return os.getpid()


def load_function(path_and_name, source):
    """Load the function of path/to/file.py:function, which can import its neighbours.

    source: the content of the file.
    """
    path, _, name = path_and_name.rpartition(":")
    sys.path.insert(0, str(Path(path).resolve().parent))
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(spec.name, module)  # unless Python has another one of this name
    exec(compile(source, path, "exec"), vars(module))
    return getattr(module, name)


def call_reward_fn(response):
    """Return a copy of a response with its verifiable reward, or with the error as its failure."""
    pid, prompt = os.getpid(), response.prompt
    about = {"num_tokens": len(response.token_ids), "stopped": response.stopped}
    try:
        arguments = reward_arguments(
            reward_function,
            prompt.data_source,
            response.text,
            prompt.ground_truth,
            about | (prompt.extra_info or {}),
        )
        score, metrics = read_score(reward_function(**arguments))
        if not math.isfinite(score):
            raise ValueError(f"the reward is {score}")
        response = replace(response, verifiable=score, reward_metrics=metrics)
    except BaseException:  # sys.exit() raises no Exception
        response = replace(response, failure=traceback.format_exc(limit=-1))
    if os.getpid() != pid:  # a child that the reward has forked must not answer
        os._exit(1)
    return response


def reward_arguments(reward_fn, data_source, response, ground_truth, extra_info):
    """Return the arguments that a reward function takes, by name.

    solution_str is verl's name for the response.

    >>> reward_arguments(lambda solution_str, ground_truth: 0, "gsm8k", "#### 4", "4", None)
    {'solution_str': '#### 4', 'ground_truth': '4'}
    """
    values = {
        "data_source": data_source,
        "solution_str": response,
        "response": response,
        "ground_truth": ground_truth,
        "extra_info": extra_info,
    }
    parameters = inspect.signature(reward_fn).parameters
    return {name: value for name, value in values.items() if name in parameters}


def read_score(result):
    """Return the score in the result of a reward function, and its metrics.

    The functions of verl return a dictionary.

    >>> read_score({"score": 0.5, "acc": True, "pred": "42"})
    (0.5, {'acc': 1.0})
    """
    if not isinstance(result, dict):
        return float(result), {}
    metrics = {
        name: float(value)
        for name, value in result.items()
        if name != "score" and isinstance(value, int | float | np.number | np.bool_)
    }
    return float(result["score"]), metrics


# ------------------------------------------------------------------------------- metrics and files


def update_metrics(accelerator, sums, loss_tokens, args):
    """Return the metrics of a step's updates, from each rank's sums.

    loss_tokens is the number of loss tokens in all updates, on all ranks. GRPO computes only a part
    of them.

    Every rank must call this, in the same order.
    """
    totals = torch.tensor(list(sums.values()), dtype=torch.float64, device=accelerator.device)
    totals = dict(zip(sums, accelerator.reduce(totals).tolist(), strict=True))
    metrics = {
        "objective/loss": totals.pop("objective/loss") / args.updates_per_step,
        "val/update_tokens": totals.pop("val/update_tokens"),  # with the tokens of prompts
    }
    computed = totals.pop("tokens")
    for name, total in totals.items():
        # A token without a gradient adds 0 to these, so they are means over all loss tokens
        is_of_all = name.startswith("loss/") or "clipfrac" in name
        metrics[name] = total / max(1, loss_tokens if is_of_all else computed)
    return metrics


def batch_metrics(batch, args):
    """Metrics of a step's batch, before its updates: tensors of one element."""
    mask = batch.mask
    logprobs, sampler_logprobs = batch.logprobs * mask, batch.sampler_logprobs * mask
    # How far the sampler's log-probabilities are from the learner's
    mismatch = logprobs - sampler_logprobs
    ratios = mismatch.exp()[mask.bool()]  # (tokens,)
    metrics = {
        "objective/entropy": -logprobs.sum(1).mean(),
        "mismatch/logprob_diff_mean": masked_mean(mismatch.abs(), mask),
        "mismatch/logprob_diff_max": mismatch.abs().max(),
        # KL of the sampler to the learner
        "mismatch/kl": masked_mean(kl_penalty(sampler_logprobs, logprobs, "kl3"), mask),
        # Effective sample size, as a fraction of the tokens
        "mismatch/ess": ratios.sum() ** 2 / (ratios**2).sum() / len(ratios),
        "mismatch/tis_clipfrac": (ratios > (args.tis_cap or math.inf)).float().mean(),
    }
    if batch.has_score.any():
        metrics["objective/scores_std"] = batch.scores[batch.has_score.bool()].std(correction=0)
        returns = batch.returns[batch.loss_mask.bool()]  # (tokens,)
        residuals = (batch.returns - batch.values)[batch.loss_mask.bool()]
        explained = 1 - residuals.var() / returns.var().clamp(min=1e-8)
        metrics["val/explained_variance"] = explained
    if args.beta > 0:
        ref_logprobs = batch.ref_logprobs * mask
        non_score_reward = batch.kl_rewards.sum(1)  # (rows,)
        metrics["objective/kl"] = (logprobs - ref_logprobs).sum(1).mean()
        metrics["objective/non_score_reward"] = non_score_reward.mean()
        metrics["objective/rlhf_reward"] = masked_mean(
            batch.scores + non_score_reward, batch.has_score
        )
    return metrics


def run_metrics(training_step, responses, step_start, start_time, args):
    """Return metrics of a step that show the run's progress and its speed."""
    memory = torch.cuda.max_memory_allocated() or psutil.Process().memory_info().rss
    seconds = time.perf_counter() - step_start
    lengths = [len(response.token_ids) for response in responses]
    return {
        "training_step": training_step,
        "episode": training_step * args.episodes_per_step,
        "val/sequence_lengths": sum(lengths) / len(lengths),
        "val/num_stop_token_ids": sum(response.stopped for response in responses),
        "time/training": seconds,
        "time/from_scratch": time.time() - start_time,
        "perf/memory_gib": memory / 2**30,
        "perf/episodes_per_second": len(responses) / seconds,
        "perf/response_tokens_per_second": sum(lengths) / seconds,
    }


def score_metrics(prefix, responses, args):
    """Return means over responses, of their scores and more.

    prefix: "objective" or "eval". If the responses have 2 to 50 data sources, there is also each
    mean for each source.
    """
    sources = {response.prompt.data_source for response in responses}
    collected = defaultdict(list)
    for response in responses:
        parts = {
            "scores": response.score,
            "reward_model_score": response.model_score,
            "verifiable_score": response.verifiable,
            "reward_failures": response.failure is not None,
            "sequence_lengths": len(response.token_ids),
            "stop_rate": response.stopped,
        }
        parts |= {f"reward/{name}": value for name, value in response.reward_metrics.items()}
        if response.verifiable is not None:
            # A score may hold bonuses and penalties: a reward can say what is right
            right = response.reward_metrics.get("right", response.verifiable)
            parts["verifiable_correct_rate"] = right >= 1
        for name, value in parts.items():
            if value is not None:
                collected[f"{prefix}/{name}"].append(value)
                if 1 < len(sources) <= 50:
                    collected[f"{prefix}/{name}/{response.prompt.data_source}"].append(value)
    return {name: sum(values) / len(values) for name, values in collected.items()}


def describe(response, policy_version):
    """Return what samples.jsonl and rollouts.jsonl record about a response."""
    return {
        "prompt": response.prompt.text,
        "response": response.text,
        "score": response.score,
        "verifiable_score": response.verifiable,
        "reward_model_score": response.model_score,
        "reward_metrics": response.reward_metrics,
        "failure": response.failure,
        "ground_truth": str(response.prompt.ground_truth),
        "data_source": response.prompt.data_source,
        "length": len(response.token_ids),
        "stopped": response.stopped,
        "policy_version": policy_version,
    }


NOT_LOGGED = {"input_ids", "mask", "loss_mask"}  # fields of Batch


def log_rollouts(accelerator, training_step, rollout, responses, batch, run_dir, args):
    """Write the responses to a step's first prompts to rollouts.jsonl.

    In up to 200 steps, evenly spaced, they come with what the batch has for each of their tokens.
    """
    per_prompt = args.number_samples_per_prompt
    count = max(2, 8 // per_prompt) * per_prompt  # whole groups: two at least
    samples = [describe(response, rollout.policy_version) for response in responses[:count]]
    every = math.ceil(args.num_training_steps / 200)
    has_tokens = (training_step - 1) % every == 0
    for row, sample in enumerate(samples):
        line = sample | {"training_step": training_step}
        if has_tokens:
            line["token_ids"] = responses[row].token_ids.tolist()
            is_response = batch.mask[row].bool()
            for name, tensor in vars(batch).items():
                if name not in NOT_LOGGED and tensor is not None and tensor.dim() == 2:
                    line[name] = [round(value, 4) for value in tensor[row][is_response].tolist()]
        append_line(run_dir / "rollouts.jsonl", line)
    if not args.eval_dataset and evaluation_is_due(training_step - 1, args):
        log_samples(accelerator, samples)


def log_samples(accelerator, samples):
    for tracker in accelerator.trackers:
        tracker.log_table("sample_completions", dataframe=pandas.DataFrame(samples), commit=False)


def report_evaluation(accelerator, reward_model, rollout, run_dir, args):
    """Score the responses to held-out prompts, write them to files, and return the metrics eval/*.

    Every rank must call this, in the same order.
    """
    responses = score_responses(
        accelerator, reward_model, rollout.eval_responses, args, is_eval=True
    )
    samples = [describe(response, rollout.policy_version) for response in responses]
    for sample in samples:
        append_line(run_dir / "samples.jsonl", sample)
    log_samples(accelerator, samples)
    return score_metrics("eval", responses, args) | {"eval/policy_version": rollout.policy_version}


def append_line(path, line):
    if is_rank_0():
        with open(path, "a") as file:
            file.write(json.dumps(line, default=str, separators=(",", ":")) + "\n")


def report_prompt_lengths(accelerator, prompts, run_dir):
    """Record the number of tokens of each prompt.

    The trackers get a histogram of them, and end_run draws one.
    """
    lengths = [len(prompt.token_ids) for prompt in prompts]
    (run_dir / "prompt_lengths.json").write_text(json.dumps(lengths))
    for tracker in accelerator.trackers:
        import wandb

        tracker.log({"prompt_lengths": wandb.Histogram(lengths)}, commit=False)


step_seconds = deque(maxlen=10)  # of this process's last steps


def write_metrics(accelerator, metrics, run_dir, args):
    """Write a step's metrics to metrics.jsonl and the trackers, and print some."""
    metrics = {name: float(value) for name, value in metrics.items()}
    accelerator.log(metrics)
    append_line(run_dir / "metrics.jsonl", metrics)
    if not is_rank_0():
        return
    step, num_steps = metrics["training_step"], args.num_training_steps
    step_seconds.append(metrics["time/training"])
    left = sum(step_seconds) / len(step_seconds) * (num_steps - step)
    # The first step of a process is slow, and says little of the others
    left = f", {timedelta(seconds=round(left))} left" if len(step_seconds) > 1 else ""
    print(f"step {step:.0f} of {num_steps}{left}  ", end="")
    for name in ("objective/scores", "eval/scores"):
        if name in metrics:
            print(f"{name}: {metrics[name]:.4g}  ", end="")
    if failures := metrics["objective/reward_failures"]:
        print(f"rewards failed: {failures:.0%}  ", end="")
    print(flush=True)


# Programs that work on a run's folder. A copy of this script may lack them
PROGRAMS = Path(__file__).with_name("scripts")


def run_program(name, run_dir, *options):
    """Run one of the PROGRAMS on the run's folder, on rank 0."""
    path = PROGRAMS / name
    if is_rank_0() and path.exists():
        # A new session keeps a Ctrl-C, which is meant for this script, from reaching the program
        subprocess.run([sys.executable, path, run_dir, *options], start_new_session=True)


def save_model(accelerator, model, tokenizer, path, args):
    """Write a model and its tokenizer in Hugging Face format.

    Its generation config makes others sample as the run did, and not by the base model's top-k or
    repetition penalty.

    Every rank must call this, in the same order.
    """
    weights = accelerator.get_state_dict(model)  # gathered under FSDP2
    if not is_rank_0():
        return
    model.generation_config = transformers.GenerationConfig(
        eos_token_id=list(args.stop_token_ids),
        pad_token_id=tokenizer.pad_token_id,
        do_sample=True,
        temperature=args.temperature,
        top_k=0,  # none
    )
    model.save_pretrained(path, state_dict=weights)
    tokenizer.save_pretrained(path)


# -------------------------------------------------------------------------- checkpoints and resume


# Files that grow by lines in each step. A checkpoint copies them, and a resume restores the copies
RUN_FILES = ("metrics.jsonl", "rollouts.jsonl", "samples.jsonl")

# Options that a resume must not change. They define the models and the batches, and how the
# responses in a checkpoint were sampled
MUST_AGREE = (
    *(each.name for each in fields(Algorithm) if "learning_rate" not in each.name),
    "seed",
    "dtype",
    "model_name_or_path",
    "model_revision",
    "reward_model_path",
    "reward_model_revision",
    "value_model_path",
    "episodes_per_step",
    "number_samples_per_prompt",
    "mini_batch_size",
    "num_updates",
    "num_evals",
    "eval_temperature",
)


def read_state(run_dir, checkpoint_dir, prompts, args):
    """Return the first training step, and the values that cannot be computed from a step number.

    These are the seconds so far, a random part of the tracker's id, and a hash of all prompts. On
    resume the asynchronous scripts also find the rollout of the next step, as text. Raise
    ValueError if the checkpoint belongs to a run with other batches, models or prompts.
    """
    # With other prompts, a checkpoint's responses would be taken for answers to them
    data = stable_hash([vars(prompt) | {"origin": None} for prompt in prompts])
    state = {"seconds": 0.0, "wandb_id": os.urandom(8).hex(), "data_hash": data}
    if not checkpoint_dir:
        return 1, state
    saved_args = json.loads((run_dir / "args.json").read_bytes())
    for name in MUST_AGREE:
        if saved_args.get(name) != getattr(args, name, None):  # GRPO has no value model
            raise ValueError(
                f"--resume_from_checkpoint: {name} was {saved_args.get(name)}, and must not change"
            )
    saved = json.loads((checkpoint_dir / "state.json").read_bytes())
    if saved["data_hash"] != data:
        raise ValueError(
            "--resume_from_checkpoint: the prompts have changed, because the data, the chat "
            "template or the tokenizer has"
        )
    step = step_of(checkpoint_dir)
    if is_rank_0():
        print(f"Resumed from the checkpoint of step {step}; later steps are repeated")
    return step + 1, state | saved


def load_checkpoint(trained_models, checkpoint_dir):
    """Fill models and optimizers from a checkpoint, if there is one.

    Every rank must call this, in the same order.
    """
    if checkpoint_dir:
        for part, folder in checkpoint_parts(trained_models, checkpoint_dir):
            checkpoint.load(part, checkpoint_id=folder)
        for model, _ in trained_models.values():
            masters_to_weights(model)


def save_checkpoint(trained_models, run_dir, step, state, args):
    """Write checkpoints/step_N with models, optimizers, `state` and the run's files.

    It is written as `unfinished`, and renamed when it is complete. Checkpoints older than the
    newest keep_last_n are removed. With 0 all are kept.

    Every rank must call this, in the same order.
    """
    folder = run_dir / "checkpoints/unfinished"
    for part, path in checkpoint_parts(trained_models, folder):
        checkpoint.save(part, checkpoint_id=path)  # if one rank fails, each raises
    if not is_rank_0():
        return
    (folder / "state.json").write_text(json.dumps(state))
    for name in RUN_FILES:
        if (run_dir / name).exists():
            shutil.copy(run_dir / name, folder)
    folder = folder.rename(folder.with_name(f"step_{step}"))
    print(f"To resume from step {step}: --resume_from_checkpoint {folder}")
    if args.keep_last_n > 0:
        remove_checkpoints(list_checkpoints(run_dir)[: -args.keep_last_n])


def checkpoint_parts(trained_models, folder):
    """Yield (state dict, folder) for each model and each optimizer in a checkpoint.

    trained_models: {name: (model, its optimizer)}. A model's state dict holds the float32 masters,
    which checkpoint.load fills in place. A resume can use another number of ranks, with or without
    FSDP2.

    Every rank must call this, in the same order.
    """
    for name, (model, optimizer) in trained_models.items():
        masters = {key: weight.master for key, weight in trained_weights(model).items()}
        yield {key: master.detach() for key, master in masters.items()}, folder / name
        # AdamW makes its moments in its first step. For loading, a step with zero gradients and a
        # learning rate of 0 makes them, and changes no weight
        path = folder / f"{name}_optimizer"
        if path.exists() and not optimizer.state:
            optimizer.param_groups[0]["lr"] = 0.0
            optimizer.step()
        if optimizer.state:
            yield {key: optimizer.state[master] for key, master in masters.items()}, path


def list_checkpoints(run_dir):
    """Return a run's complete checkpoints, the newest last.

    Folders with other names, such as step_5_good, belong to the user and are ignored.
    """
    paths = run_dir.glob("checkpoints/step_*")
    return sorted([path for path in paths if path.name[5:].isdecimal()], key=step_of)


def step_of(checkpoint_dir):
    """Return N for a folder checkpoints/step_N."""
    return int(checkpoint_dir.name.removeprefix("step_"))


def remove_checkpoints(checkpoints):
    """Remove checkpoints.

    Each is renamed first, so that a checkpoint that is only partly removed does not look complete.
    """
    for path in checkpoints:
        shutil.rmtree(path.rename(path.with_name("unfinished")))


def rewind_run(run_dir, checkpoint_dir):
    """Restore a run's files to a checkpoint, or to the start, and remove everything newer."""
    for name in ("checkpoints/unfinished", "model"):
        shutil.rmtree(run_dir / name, ignore_errors=True)
    for name in RUN_FILES:
        (run_dir / name).unlink(missing_ok=True)
        if checkpoint_dir and (checkpoint_dir / name).exists():
            shutil.copy(checkpoint_dir / name, run_dir)
    if checkpoint_dir:
        step = step_of(checkpoint_dir)
        remove_checkpoints([path for path in list_checkpoints(run_dir) if step_of(path) > step])


# ----------------------------------------------------------------------------------------- helpers


def count_cores():
    """Return the number of cores that this process may use, which a cluster can restrict."""
    return len(os.sched_getaffinity(0))


def is_rank_0():
    return os.environ.get("RANK", "0") == "0"


warned = set()  # kinds of warnings


def warn_once(text, kind=None):
    """Print a warning, unless one of this kind was printed. The kind is its text if not given."""
    kind = kind or text
    if kind not in warned and is_rank_0():
        print(f"Warning: {text}")
    warned.add(kind)


def stable_hash(*parts):
    """Return a 63-bit integer, which is the same in every process and on every node."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


@contextlib.contextmanager
def timed(metrics, name):
    """Record the seconds spent inside, as the metric time/<name>."""
    start = time.perf_counter()
    yield
    # Wait for kernels, which run asynchronously. Only the main thread starts any
    if torch.cuda.is_available() and threading.current_thread() is threading.main_thread():
        torch.cuda.synchronize()
    metrics[f"time/{name}"] = time.perf_counter() - start


# ------------------------------------------------------------------------------ how a process ends


def end_run(accelerator, run_dir, args):
    """End the child processes. Then let programs in scripts/ draw, summarize and upload.

    Every rank must call this, in the same order.
    """
    end_children()
    accelerator.end_training()
    run_program("plot_runs.py", run_dir, "--lengths")
    run_program("inspect_run.py", run_dir, "--summary")  # draws the curves, too
    if args.push_to_hub:
        place = [f"--repo_id={args.hf_repo_id}"] if args.hf_repo_id else []
        run_program("push_to_hub.py", run_dir, *place)


def die_with_launcher():
    """Ask the kernel to kill this process when its launcher dies.

    A launcher that is killed cannot end its processes. A script that was started without one is not
    affected.
    """
    # What launchers set, and users do not
    if {"TORCHELASTIC_RUN_ID", "ACCELERATE_DYNAMO_MODE"} & os.environ.keys():
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1 is PR_SET_PDEATHSIG


# A shell program, with a folder as $0. It waits for a pipe to close, which happens when the script
# ends. Then it removes the folder and kills its own process group. rm can fail while vLLM still
# writes into the folder, so it is tried twice
END_WITH_SCRIPT = """
exec 3<&0  # because in the background standard input is /dev/null
{
    trap '' INT TERM HUP
    read line
    rm -rf "$0" || rm -rf "$0"
    kill -KILL 0
} <&3 &
"""


def die_with_script(folder=""):
    """Make this process and its children end when the script ends, even if the script is killed.

    This runs first in a new process. It makes the process the leader of a process group and starts
    a shell in that group, which waits for the script's end. Three simpler ways would fail. The
    kernel's death signal would not reach a reward worker, because its parent is the fork server,
    which outlives the script. A thread could wait for ever for Python's lock, which a reward can
    hold. A reward that waits for all its children would also wait for a shell that is one of them,
    so the shell runs in the background of another shell, which ends.
    """
    os.setsid()  # a Ctrl-C is meant for the script only
    watch = ["sh", "-c", END_WITH_SCRIPT, folder]
    subprocess.run(watch, stdin=mp.parent_process().sentinel, check=True)


process_groups = []  # vLLM's and the reward workers'
folders = []  # vLLM's
ending = threading.Lock()


def end_children():
    """End vLLM and the reward workers, with the processes and files that they have made."""
    for process_group in [*process_groups]:
        kill_group(process_group)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def kill_group(process_group):
    """Kill vLLM or a reward worker, with what it has started."""
    if process_group in process_groups:
        process_groups.remove(process_group)  # its number may soon be another group's
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process_group, signal.SIGKILL)


def end_at_once(error):
    """Print an error and end this process, even if other threads are waiting.

    die_with_script then ends the child processes.
    """
    ending.acquire()  # and never release it, so that a second thread waits here for the end
    try:
        traceback.print_exception(error)
        sys.stdout.flush()
    finally:  # also if printing fails, for example because the pipe is closed
        os._exit(1)


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="backslashreplace")  # a terminal may support only ASCII
    command_line = tyro.cli(Args, use_underscores=True)
    try:
        main(command_line)
    except BaseException as error:
        end_at_once(error)
