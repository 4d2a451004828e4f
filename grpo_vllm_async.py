r"""GRPO for language models, asynchronous: vLLM generates the next batch while we train.

Without a GPU; this command sets itself up, and learns in minutes:
    bash scripts/train/debug/grpo.sh
One GPU, shared by the learner and a vLLM engine (docs/scaling.md has more GPUs, and several nodes):
    accelerate launch --quiet --config_file scripts/accelerate/one_gpu.yaml grpo_vllm_async.py \
        --dataset train.parquet --model_name_or_path Qwen/Qwen3-0.6B --save_freq 50

Training step g, on every rank (a version of the policy is the number of completed steps):

    main thread                         generation thread              vLLM (its own process)
    1. get batch g from response_Q <--  put responses, with their
       share it with the other ranks      verifiable rewards
       [vLLM is idle] sync weights ---------------------------------->  weights of version g - 1
       put prompts g+1 in prompts_Q --> get prompts, generate -------->  sample
    2. checkpoint                         ...                            ...
    3. scores      4. the batch           ...                            ...
    5. forward passes  6. advantages      ...                            ...
    7. updates                            verifiable rewards
    8. metrics, files; 9. in the last step: the model is saved, then the last evaluation

    step     gets batch    sampled by version    sends weights, prompts    trains version
    start                                        0,     1
    1        1             0                     0,     2                  0
    2        2             0                     1,     3                  1
    3        3             1                     2,     4                  2
    g        g             g - 2                 g - 1, g + 1              g - 1

From step 2 on, a batch is therefore one step older than the policy that trains on it (2410.18252).
In the last step weights go out after the updates, for the last evaluation. No lock is needed,
because weights and prompts go out while no engine samples and no update runs. With --no-async_mode
they go out after the updates of every step, so that every batch is on-policy.

The ratio in the loss compares the learner with itself, as in ppo_sync.py: its probabilities in an
update are divided by its own from before this step's updates. vLLM has sampled with earlier weights
and other kernels. Truncated importance weights correct for that.

A prompt with its response is a row, which is padded on the right. Tensors over tokens are (rows,
length). In a Batch all but input_ids are 0 outside the response. Models must be causal, so that no
token sees the padding after it, and there is no attention mask. They run without dropout. Every
rank has the whole batch, and computes its share of the forward and backward passes.

A token has three log-probabilities, all at the sampling temperature: the sampler's, by vLLM; the
old one, by the learner before this step's updates; the new one, in an update. If beta, the weight
of the KL, is above 0, there is a fourth: the reference policy's.

Deliberate simplifications:
 1. Sampling is by temperature alone: top-p, top-k or a minimum length would change the
    distribution that is sampled from.
 2. One reward per response; one turn, no tools; rows are padded, not packed.
 3. A fault prints its traceback and ends the process; the launcher ends the other ranks. Resume
    from the newest checkpoint. A vLLM that hangs while it samples is waited for.
 4. This file checks few inputs. `python scripts/preflight.py SCRIPT FLAGS` checks data, chat
    templates, models and GPUs before a run, because mistakes in them would otherwise show late or
    never. A copy of this file is without those checks.
 5. A response cut at `response_length` is scored like any other, unless --non_stop_penalty is set.

There is no value model: an advantage is how much better a response scored than its group. The KL is
a term of the loss, not of the reward. With beta 0 a response without an advantage has no gradient,
so updates leave it out. docs/grpo.md has the formulas, and the variants (Dr. GRPO, DAPO, GSPO).

Unlike TRL's by default, importance weights for the sampler are those of tokens and at most 2. TRL's
are those of sequences, and 0 above 3.

Where a change goes. A part of the score goes into score_responses. Advantages are computed in step
6, by group_advantages. A term of the loss goes into token_losses. If it gives rows without an
advantage a gradient, rows_with_gradient must keep them. A tensor that these need is a field of
Batch, filled in step 4, 5 or 6. Metrics come from token_losses and batch_metrics. What a resume
must find again is put into `state`, or it is a model in `trained_models`. docs/fork.md has worked
examples.

Read on to the banner ("The algorithm ends here"), for an hour or a little more. Look up what
follows it when you need it. Where this script differs from another,
tests/promise/test_scripts_agree.py has the reason.
"Collective." in a docstring means that every rank must call the function, in the same order.
arXiv: GRPO 2402.03300; DAPO 2503.14476; Dr. GRPO 2503.20783; GSPO 2507.18071; async 2410.18252.
"""

import contextlib
import ctypes
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
from collections import defaultdict
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
    patch_environment,
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
    """The options that a reader of the loop needs. Args, below the banner, adds all others.

    Flags give the sizes of one rank. The script computes from them, for all ranks:
        rollout_batch_size    prompts of a step: local_rollout_batch_size times the ranks
        episodes_per_step     responses of a step, which are the rows of its batch:
                              rollout_batch_size * number_samples_per_prompt
        mini_batch_size       rows of one update: local_mini_batch_size times the ranks
        updates_per_step      num_epochs * episodes_per_step / mini_batch_size
    A micro-batch is the rows that a rank runs at once, in each pass of each model. It has as many
    rows as fit micro_batch_tokens, but at least one. If per_device_train_batch_size is above 0, it
    has at most that many.

    By default a step has 64 prompts of 8 responses on one rank, and makes 2 updates of 256 rows. If
    it made one, new and old log-probabilities would be equal up to rounding, and no clip would
    bind.
    """

    beta: float = 0.0
    """weight of the KL term in the loss; 0: no reference policy"""
    kl_estimator: Literal["kl1", "kl3"] = "kl3"
    """kl3's gradient is the KL's at each token, kl1's only on average (2510.01555)"""
    cliprange: float = 0.2
    """the ratio's lower limit is 1 - this"""
    cliprange_higher: float = 0.2
    """the ratio's upper limit is 1 + this (DAPO: 0.28)"""
    advantage_normalization: Literal["standard", "centered"] = "standard"
    """(score - mean) / std, or score - mean"""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """level of ratios and importance weights; sequence: GSPO (docs/grpo.md)"""
    loss_aggregation: Literal["token", "sequence", "constant"] = "token"
    """token: mean over tokens; sequence: over responses' means; constant: see loss_divisor"""
    mask_truncated_completions: bool = False
    """leave responses without a stop token out of the loss (DAPO); their group still counts them"""
    tis_cap: float = 2.0
    """truncated importance sampling: cap of a token's weight old/sampler in the loss; 0: none"""
    num_epochs: int = 1
    """how often each row of a batch is trained on"""
    learning_rate: float = 1e-6
    """learning rate of the policy"""
    max_grad_norm: float = 1.0
    """gradients of a model are clipped to this norm"""
    temperature: float = 1.0
    """of sampling, and of all log-probabilities"""
    non_stop_penalty: bool = False
    """a response without a stop token scores penalty_reward_value instead"""
    penalty_reward_value: float = 0.0
    """with non_stop_penalty: score of a response without a stop token"""


@dataclass
class Prompt:
    origin: str  # file and row, for messages
    text: str
    token_ids: list[int]
    data_source: str | None  # chooses the verifiable reward
    ground_truth: Any  # None: no verifiable reward
    extra_info: dict | None  # for --reward_fn


@dataclass
class Response:
    """A sampled response, which gains fields on its way from vLLM to the loss."""

    prompt: Prompt
    token_ids: np.ndarray  # (length,), as sampled; a stop token is the last one
    logprobs: np.ndarray  # (length,), the sampler's
    stopped: bool  # by a stop token; else it was cut
    # From generate_rollout
    text: str = ""
    verifiable: float | None = None  # None: no ground truth, or the call failed
    reward_metrics: dict[str, float] = field(default_factory=dict)  # what --reward_fn told besides
    failure: str | None = None  # why the call failed
    # From the learner
    model_score: float | None = None  # by the reward model
    score: float | None = None  # sum of the rewards, or the non-stop penalty; None: not known

    @property
    def row(self):
        """Token ids of the prompt with the response."""
        return np.concatenate([self.prompt.token_ids, self.token_ids])


@dataclass
class Request:
    """What the learner asks of generation."""

    prompts: list[Prompt]  # (rows,): number_samples_per_prompt copies of each, side by side
    seeds: list[int]  # (rows,)
    eval_prompts: list[Prompt]  # empty where no evaluation is due


@dataclass
class Rollout:
    """The responses to a Request: one engine's share, or all of them after gather_rollout."""

    policy_version: int  # of the policy that sampled
    responses: list[Response]
    eval_responses: list[Response]
    times: dict[str, float]  # metrics: seconds


@dataclass
class Batch:
    """What a training step works on. A row is a prompt with its response, padded on the right.

    `length` is the longest row's. Tensors of that length are 0 outside responses, except input_ids.
    """

    # By collate
    input_ids: Tensor  # (rows, length)
    lengths: Tensor  # (rows,), int64, tokens of a row
    mask: Tensor  # (rows, length), 1.0 where there is a response token
    loss_mask: Tensor  # (rows, length), the mask, but 0.0 in rows that are out of the loss
    scores: Tensor  # (rows,), 0.0 where there is none
    has_score: Tensor  # (rows,), 1.0 or 0.0
    sampler_logprobs: Tensor  # (rows, length), by vLLM
    # By steps 5 and 6: (rows, length)
    logprobs: Tensor | None = None  # the old ones: by the policy before this step's updates
    entropies: Tensor | None = None  # the policy's, before this step's updates
    ref_logprobs: Tensor | None = None  # None with beta 0
    advantages: Tensor | None = None

    def cut(self, rows, length):
        """A Batch of some rows, which are `length` tokens long at most."""
        parts = {
            name: tensor[rows, :length] if tensor.dim() == 2 else tensor[rows]
            for name, tensor in vars(self).items()
            if tensor is not None
        }
        return Batch(**parts)


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
    args.num_sources = len({prompt.data_source for prompt in prompts})
    # What a resume needs besides the models. A fork may add to it
    first_step, state = read_state(run_dir, checkpoint_dir, prompts, args)
    start_time -= state["seconds"]  # those before a resume

    limit_memory(accelerator.device, args)
    language_model = load_model(AutoModelForCausalLM, args.model_name_or_path, args, trained=True)
    args.stop_token_ids = find_stop_tokens(args, tokenizer, language_model)
    # One set of weights: the wrapper, policy, is what trains; language_model is synced and saved
    policy = place_model(accelerator, PolicyModel(language_model, args), args)
    ref_policy = load_reference_policy(accelerator, policy, args)
    reward_model = load_reward_model(accelerator, args)
    optimizer = make_optimizer(policy, args)
    trained_models = {"policy": (policy, optimizer)}

    engine, workers = start_engine(accelerator, language_model.config, prompts, args)
    load_checkpoint(trained_models, checkpoint_dir)
    open_run(accelerator, run_dir, checkpoint_dir, state, train_prompts, args)

    prompts_Q = queue.Queue(maxsize=1)  # of a Request
    response_Q = queue.Queue(maxsize=1)  # of a Rollout, this rank's share
    threading.Thread(
        target=generation_thread,
        args=(engine, workers, tokenizer, prompts_Q, response_Q, args),
        daemon=True,
    ).start()

    def sync_and_request(version, training_step):
        """Collective. Sends vLLM the weights, of this version, and a step's request."""
        sync_weights(engine, language_model, version, args)
        prompts_Q.put(make_request(training_step, train_prompts, eval_prompts, args))

    if checkpoint_dir:
        # A checkpoint of step N has the rollout of step N + 1, whose weights may be gone
        response_Q.put(load_rollout(state["rollout"]))
    else:
        sync_and_request(version=0, training_step=1)

    # ---- The loop
    for training_step in range(first_step, args.num_training_steps + 1):
        step_start = time.perf_counter()
        version = training_step - 1  # of the policy, until this step's updates
        is_last = training_step == args.num_training_steps
        metrics = {}

        # 1. The responses to this step's prompts. In async mode vLLM is idle now. So it gets the
        # current weights (in step 1 it has them already) and the next prompts, and generates while
        # we train. A fork must keep this order, because nothing else stops weights from changing
        # while vLLM samples
        with timed(metrics, "wait_for_generation"):
            rollout = gather_rollout(response_Q.get(), cpu_group)
        if args.async_mode and not is_last:
            with timed(metrics, "weight_sync"):
                sync_and_request(version, training_step + 1)

        # 2. Every save_freq steps, a checkpoint of the models as the previous step has left them,
        # with this rollout, whose weights may be gone. It comes before this step writes a line into
        # the files that it copies. In the first step of a process there is nothing new to save
        if args.save_freq and version % args.save_freq == 0 and training_step > first_step:
            state["seconds"] = time.time() - start_time
            state["rollout"] = pack_rollout(rollout)
            with timed(metrics, "checkpoint"):
                save_checkpoint(trained_models, run_dir, version, state, args)

        # 3. Scores: the verifiable rewards came with the responses, the reward model's are made
        # now. Where an evaluation was due, its responses came along and are scored as well
        with timed(metrics, "reward_model"):
            if rollout.eval_responses:
                metrics |= report_evaluation(accelerator, reward_model, rollout, run_dir, args)
            responses = score_responses(accelerator, reward_model, rollout.responses, args)

        # 4. The batch: one row of each response, behind its prompt. And its mini-batches
        batch = collate(responses, accelerator.device)
        check_rewards(responses)  # the run ends if the reward has failed on all of them
        epochs = deal_rows(training_step, args)  # [epoch][mini_batch] -> rows

        # 5. Forward passes, before any update. They use the micro-batches of the first epoch, since
        # other padding would change the last bits. So in the first update all ratios are exactly 1
        # (on a CPU, unless rows_with_gradient leaves rows out. --compile_layers makes other kernels
        # for passes with and without gradients)
        with timed(metrics, "forward"):
            batch.logprobs, batch.entropies = forward_all(
                accelerator, policy, batch, epochs[0], args
            )
            if args.beta > 0:
                batch.ref_logprobs = reference_logprobs(accelerator, ref_policy, batch, args)
        # Where vLLM has sampled with this version, its log-probabilities must agree with ours up to
        # a small KL, or the run ends. In async mode this is known of batch 1 alone
        if rollout.policy_version == version:
            check_sampler(batch.logprobs, batch.sampler_logprobs, batch.mask, args)

        # 6. Advantages, one for all tokens of a response
        advantages = group_advantages(
            batch.scores,
            batch.has_score,
            args.number_samples_per_prompt,
            args.advantage_normalization,
        )  # (rows,)
        batch.advantages = advantages[:, None] * batch.mask
        # Responses that were cut may be left out of the loss; in their group they count
        if args.mask_truncated_completions:
            stopped = torch.tensor([float(response.stopped) for response in responses])
            batch.loss_mask = batch.loss_mask * stopped[:, None].to(accelerator.device)

        # 7. Updates
        models = [(policy, token_losses)]
        sums, grad_norms = defaultdict(int), defaultdict(int)
        lr = 0.0  # of the policy, if it is not updated in this step
        with timed(metrics, "update"):
            first_update = version * args.updates_per_step  # counted over the run
            for update, mini_batch in enumerate(itertools.chain(*epochs), first_update):
                divisor = loss_divisor(batch.loss_mask[mini_batch], args)
                # The divisor counts all rows, so leaving some out does not change the gradient
                rows = rows_with_gradient(batch, mini_batch, accelerator.num_processes, args)
                accumulate_gradients(accelerator, models, batch, rows, divisor, sums, args)
                if not batch.loss_mask[mini_batch].any():
                    warn_once("there are updates without a row in the loss; they are left out")
                    continue  # because AdamW would move the weights by its moments alone
                # apply_gradients sums gradients over ranks, clips them, and steps
                lr = args.learning_rate * lr_multiplier(update, args.num_updates, args)
                norm = apply_gradients(accelerator, policy, optimizer, lr, batch, run_dir, args)
                grad_norms["optim/grad_norm"] += norm / args.updates_per_step

        # With --no-async_mode weights and prompts go out only now, after the updates. In the last
        # step they do so in either mode, and the request has the held-out prompts alone
        if is_last or not args.async_mode:
            with timed(metrics, "weight_sync"):
                sync_and_request(training_step, training_step + 1)

        # 8. Metrics, and responses to look at
        loss_tokens = args.num_epochs * batch.loss_mask.sum().item()
        metrics |= update_metrics(accelerator, sums, loss_tokens, args)
        metrics |= batch_metrics(batch, args)
        metrics |= score_metrics("objective", responses, args)
        metrics |= run_metrics(training_step, responses, step_start, start_time, args)
        metrics |= rollout.times | dict(grad_norms) | {"lr": lr}
        metrics |= {"policy/version": version, "policy/staleness": version - rollout.policy_version}
        metrics["epoch"] = training_step * args.rollout_batch_size / len(train_prompts)
        log_rollouts(accelerator, training_step, rollout, responses, batch, run_dir, args)

        # 9. After the last update the model is saved, and then comes the last evaluation
        if is_last:
            save_model(accelerator, language_model, tokenizer, run_dir / "model", args)
            last = gather_rollout(response_Q.get(), cpu_group)
            if last.eval_responses:
                metrics |= report_evaluation(accelerator, reward_model, last, run_dir, args)
        write_metrics(accelerator, metrics, run_dir, args)

    # ---- The end
    end_run(accelerator, run_dir, args)


def evaluation_is_due(steps, args):
    """Whether the policy is evaluated after this number of training steps.

    ppo_sync.py answers an evaluation after s steps by version s. The asynchronous scripts answer it
    by version s - 1, and after 0 steps by version 0. So evaluations are at least two steps apart,
    because after 0 steps and after 1 they would be the same. The last one is answered by the last
    version, in every script.
    """
    num_steps = args.num_training_steps
    num_evals = min(args.num_evals, num_steps // 2)
    return steps in (*(i * num_steps // num_evals for i in range(num_evals)), num_steps)


# ------------------------------------------------------------------------------- KL and advantages


def kl_penalty(logprobs, ref_logprobs, estimator):
    """KL(policy || reference), estimated at each sampled token; logprobs' shape.

    With d = logprobs - ref_logprobs, kl1 is d and kl3 is exp(-d) - 1 + d
    (http://joschu.net/blog/kl-approx.html). PPO has kl1 in its reward. With kl3 the reward would
    hardly pull towards the reference near it, because there kl3 is about d^2 / 2 (2510.01555).

    >>> kl_penalty(torch.tensor([0.0]), torch.tensor([-1.0]), "kl1").item()
    1.0
    """
    d = logprobs - ref_logprobs
    if estimator == "kl1":
        return d
    return torch.expm1(-d) + d


def masked_mean(values, mask):
    """Mean of values where mask is 1; 0 if it is nowhere 1. Shapes alike; a scalar.

    >>> masked_mean(torch.tensor([1.0, 2.0, 9.0]), torch.tensor([1, 1, 0])).item()
    1.5
    """
    return (values * mask).sum() / mask.sum().clamp(min=1)


def group_advantages(scores, has_score, number_samples_per_prompt, normalization):
    """Return how much better a response scored than its group (2402.03300): (rows,), like scores.

    The samples of a prompt stand side by side. "standard" divides by the group's unbiased
    deviation + 1e-8, "centered" does not (2503.20783). A group whose scores are all equal has
    advantages of exactly 0. What has no score does not count in its group, and gets 0.

    >>> scores = torch.tensor([1.0, 2.0, 3.0, 0.9, 0.9, 0.9])
    >>> group_advantages(scores, torch.ones(6), 3, "standard").tolist()
    [-1.0, 0.0, 1.0, 0.0, 0.0, 0.0]
    """
    groups = scores.view(-1, number_samples_per_prompt)
    has_score = has_score.view(-1, number_samples_per_prompt)
    counts = has_score.sum(1, keepdim=True)
    means = (groups * has_score).sum(1, keepdim=True) / counts.clamp(min=1)
    advantages = (groups - means) * has_score
    if normalization == "standard":
        variances = (advantages**2).sum(1, keepdim=True) / (counts - 1).clamp(min=1)
        advantages = advantages / (variances.sqrt() + 1e-8)
    # Equal scores may differ from their mean by rounding, which the division would enlarge: such
    # groups get 0. So do those without scores, whose largest is -inf and smallest inf
    largest = groups.masked_fill(has_score == 0, -math.inf).amax(1, keepdim=True)
    smallest = groups.masked_fill(has_score == 0, math.inf).amin(1, keepdim=True)
    return advantages.masked_fill(largest <= smallest, 0.0).flatten()


# ------------------------------------------------------------------------------ losses and updates


def accumulate_gradients(accelerator, models, batch, rows, divisor, sums, args):
    """Run rows of the batch forward and backward, of which this rank takes its share. Collective.

    models: pairs of a model and the function that computes its losses. divisor: that of the whole
    mini-batch, on all ranks. Every rank divides by it, and apply_gradients sums over the ranks, so
    the gradient does not depend on how the rows are split up. sums: {metric: sum}, to which this
    rank adds its sums over loss tokens, the tokens of its rows (val/update_tokens), and its part of
    the losses of all models (objective/loss).
    """
    for _, part in cut_micro_batches(accelerator, batch, rows, args):
        mask = part.loss_mask
        sums["tokens"] += mask.sum(dtype=torch.float64)
        sums["val/update_tokens"] += part.lengths.sum()
        for model, losses_of in models:
            outputs = model(part.input_ids, part.mask)
            losses, per_token = losses_of(outputs, part, args)
            loss = (losses * mask).sum() / divisor
            loss.backward()
            sums["objective/loss"] += loss.detach()
            add_sums(sums, per_token, mask)


def token_losses(outputs, part, args):
    """Return the policy's loss of each token, and what is logged of it: {metric: tensor}.

        ratio  = new / old                      of the token's probabilities; GSPO: see below
        weight = min(old / sampler, tis_cap)    see importance_weights
        loss   = -min(ratio * A, clip(ratio, 1 - cliprange, 1 + cliprange_higher) * A) * weight
                 + beta * kl * new / old * weight

    A is the response's advantage. GSPO's ratio and weight are geometric means over the response
    (sequence_mean). With --loss_aggregation sequence a loss is divided by the tokens of its
    response. Where A is 0 and beta is 0, what is named loss/* or clipfrac must be 0 (see
    update_metrics).

    outputs: the policy's new log-probabilities and entropies. part: a Batch, which has the old
    ones. All tensors are (rows, length).
    """
    new_logprobs, entropies = outputs
    mask = part.loss_mask
    tis_weights = importance_weights(part.logprobs, part.sampler_logprobs, mask, args)
    # The mask comes before exp, because 0 * inf would be NaN
    token_log_ratio = (new_logprobs - part.logprobs) * mask
    log_ratio = token_log_ratio
    if args.importance_sampling_level == "sequence":
        log_ratio = sequence_mean(token_log_ratio, mask)
    losses, clipped = policy_loss(
        log_ratio,
        part.advantages,
        tis_weights,
        cliprange=args.cliprange,
        cliprange_higher=args.cliprange_higher,
    )
    ratio = log_ratio.exp()
    per_token = {
        "loss/policy_avg": losses,
        "policy/approxkl_avg": token_log_ratio**2 / 2,
        "policy/clipfrac_avg": clipped,
        "policy/entropy_avg": entropies,
        "val/ratio": ratio,
        "val/ratio_var": (ratio - 1) ** 2,  # the mean of the ratio is 1 under the old policy
    }
    if args.beta > 0:
        # Times new / old and the weight, kl3 has the KL's own gradient at each token, and kl1 has
        # it on average (2510.01555; docs/grpo.md)
        kl = kl_penalty(new_logprobs * mask, part.ref_logprobs * mask, args.kl_estimator)
        kl = kl * token_log_ratio.exp() * tis_weights
        losses = losses + args.beta * kl
        per_token["loss/kl_avg"] = kl
    if args.loss_aggregation == "sequence":  # each response counts as one token
        losses = losses * (mask / mask.sum(1, keepdim=True).clamp(min=1))
    return losses, per_token


def importance_weights(old_logprobs, sampler_logprobs, mask, args):
    """Return the importance weight of each token, old/sampler and at most tis_cap: (rows, length).

    It corrects for the sampler, which has other kernels (https://fengyao.notion.site/off-policy-rl)
    and, in async mode, older weights. With --importance_sampling_level sequence each token of a
    response has the geometric mean over the response (GSPO). With --tis_cap 0 all weights are 1.

    >>> learner, sampler = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-1.5, -2.0]])
    >>> importance_weights(learner, sampler, torch.ones(1, 2), Args(tis_cap=2.0))
    tensor([[1.6487, 2.0000]])
    """
    log_ratios = (old_logprobs - sampler_logprobs) * mask
    if args.importance_sampling_level == "sequence":
        log_ratios = sequence_mean(log_ratios, mask)
    weights = mask
    if args.tis_cap > 0:
        weights = mask * log_ratios.exp().clamp(max=args.tis_cap)
    return weights


def policy_loss(log_ratio, advantages, tis_weights, cliprange, cliprange_higher):
    """PPO's clipped surrogate (1707.06347) times the importance weight, and where a clip binds.

    log_ratio: new - old. The ratio is clipped to [1 - cliprange, 1 + cliprange_higher]. A number
    for each token, all of one shape.

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


def sequence_mean(values, mask):
    """Each token gets the mean over its response: (rows, length), like values.

    Of log-ratios, this is the logarithm of GSPO's ratio (2507.18071, eq. 7).

    >>> sequence_mean(torch.tensor([[1.0, 3.0], [5.0, 9.0]]), torch.tensor([[1, 1], [1, 0]]))
    tensor([[2., 2.],
            [5., 0.]])
    """
    means = (values * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    return means * mask


@torch.no_grad()
def add_sums(sums, per_token, mask):
    """Adds to sums[metric] the sum over the mask of each tensor in per_token, {metric: tensor}."""
    for name, tensor in per_token.items():
        sums[name] += (tensor * mask).sum(dtype=torch.float64)


def loss_divisor(loss_mask, args):
    """Return the divisor of a mini-batch's loss, which depends on loss_aggregation.

    loss_mask: (rows, length). "token" counts its tokens and "sequence" its responses. "constant" is
    the number of responses times response_length (2503.20783). What is out of the loss is not
    counted.

    >>> loss_mask = torch.tensor([[0.0, 1.0, 1.0], [0.0, 0.0, 0.0]])
    >>> loss_divisor(loss_mask, Args(loss_aggregation="token"))
    2
    >>> loss_divisor(loss_mask, Args(loss_aggregation="constant", response_length=8))
    8
    """
    if args.loss_aggregation == "token":
        return max(1, int(loss_mask.sum()))
    divisor = max(1, int(loss_mask.amax(1).sum()))
    if args.loss_aggregation == "constant":
        divisor *= args.response_length
    return divisor


def deal_rows(training_step, args):
    """Return the mini-batches of a step's epochs, equal on all ranks: [epoch][mini_batch] -> rows.

    In each epoch all rows of the batch are shuffled again.
    """
    seed = stable_hash(args.seed, "minibatches", training_step)
    generator = torch.Generator().manual_seed(seed)
    epochs = []
    for _ in range(args.num_epochs):
        shuffled = torch.randperm(args.episodes_per_step, generator=generator)
        epochs.append(shuffled.view(-1, args.mini_batch_size).tolist())
    return epochs


def rows_with_gradient(batch, mini_batch, num_ranks, args):
    """Return the rows of a mini-batch that an update must compute, for speed.

    With beta 0 a row has no gradient if its advantage is 0, or if it is out of the loss. Each rank
    needs equally many rows, and at least one, so some rows without a gradient may stay. Metrics
    such as val/ratio are means over what is computed (docs/grpo.md).
    """
    if args.beta > 0:
        return mini_batch
    has_gradient = (batch.advantages * batch.loss_mask != 0).any(1).tolist()
    needed_first = sorted(mini_batch, key=lambda row: not has_gradient[row])
    needed = sum(has_gradient[row] for row in mini_batch)
    return needed_first[: max(1, math.ceil(needed / num_ranks)) * num_ranks]


def cut_micro_batches(accelerator, batch, mini_batch, args):
    """Yield this rank's share of a mini-batch in micro-batches: (rows, a Batch of them) of each.

    Rows are sorted by length, so that little of a micro-batch is padding. A rank takes every
    num_ranks-th of them. All ranks cut at the same places, because under FSDP2 they compute
    together.

    >>> prompt = Prompt("row 0", "", [5], None, None, None)
    >>> responses = [Response(prompt, [6] * n, np.zeros(n), True) for n in (2, 9, 3, 3)]
    >>> rank, batch = Accelerator(cpu=True), collate(responses, "cpu")
    >>> parts = cut_micro_batches(rank, batch, [0, 1, 2, 3], Args(micro_batch_tokens=15))
    >>> [(rows, part.mask.shape) for rows, part in parts]
    [([0, 2, 3], torch.Size([3, 4])), ([1], torch.Size([1, 10]))]
    """
    num_ranks = accelerator.num_processes
    lengths = batch.lengths.tolist()
    by_length = sorted(mini_batch, key=lambda row: (lengths[row], row))
    own_rows = by_length[accelerator.process_index :: num_ranks]
    # The last rank's n-th row is the longest n-th row of all ranks, because the rows are sorted. So
    # all ranks cut by the lengths of the last one's, and pad to them
    longest = [lengths[row] for row in by_length[num_ranks - 1 :: num_ranks]]
    for start, end in itertools.pairwise(cut_places(longest, args)):
        rows = own_rows[start:end]
        yield rows, batch.cut(rows, longest[end - 1])


def cut_places(lengths, args):
    """Return where rows of these lengths, in ascending order, are cut into micro-batches.

    The tokens of a micro-batch include its padding. A row that is longer than the limit is a
    micro-batch of its own.

    >>> cut_places([3, 4, 4, 10, 20], Args(micro_batch_tokens=15))
    [0, 3, 4, 5]
    >>> cut_places([3, 4, 4, 10, 20], Args(micro_batch_tokens=15, per_device_train_batch_size=2))
    [0, 2, 3, 4, 5]
    """
    max_rows = args.per_device_train_batch_size or len(lengths)
    places = [0]
    for i, length in enumerate(lengths):
        if i - places[-1] >= max(1, min(max_rows, args.micro_batch_tokens // length)):
            places.append(i)
    return [*places, len(lengths)]


def apply_gradients(accelerator, model, optimizer, lr, batch, run_dir, args):
    """Sum the gradients over ranks, clip them, and step the optimizer. Collective.

    Each trained weight has a float32 master, whose gradient is the sum over the backward passes
    (see make_optimizer). The optimizer updates the masters. round_masters then sets each weight to
    its master, rounded to args.dtype, because the learner must compute with the same weights as
    vLLM. Return the norm before clipping, a tensor. If it is not finite, save the batch and raise
    FloatingPointError. The norm is the same on all ranks, so all of them raise.
    """
    masters = optimizer.param_groups[0]["params"]
    sum_over_ranks(accelerator, [master.grad for master in masters])
    norm = nn.utils.clip_grad_norm_(masters, args.max_grad_norm)
    if isinstance(norm, DTensor):  # under FSDP2
        norm = norm.full_tensor()
    if not torch.isfinite(norm):
        if is_rank_0():
            torch.save(vars(batch), run_dir / "bad_batch.pt")
        # The batch must be saved first, because the launcher ends all ranks when one ends
        accelerator.wait_for_everyone()
        raise FloatingPointError(f"the gradient is not finite; its batch is {run_dir}/bad_batch.pt")
    optimizer.param_groups[0]["lr"] = lr
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)  # the next backward passes add to these tensors
    round_masters(model)
    return norm


def lr_multiplier(update, num_updates, args):
    """Return the factor on the learning rate in a model's n-th update, counted from 0; never 0.

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
    """Run a model over mini-batches, which are lists of rows. Collective.

    Return log-probabilities, values or scores on every rank, and a policy's entropies. Each is
    (rows, length), and 0 in rows that were not run.
    """
    whole = torch.zeros_like(batch.mask)
    entropies = whole.clone()
    for mini_batch in mini_batches:
        # Each rank has equally many of its micro-batches
        for rows, part in cut_micro_batches(accelerator, batch, mini_batch, args):
            outputs = model(part.input_ids, part.mask)
            if isinstance(outputs, tuple):  # a policy's
                outputs, part_entropies = outputs
                entropies[rows, : part_entropies.shape[1]] = part_entropies
            whole[rows, : outputs.shape[1]] = outputs
    # The sum over ranks is exact: a row is 0 on all of them but one
    return accelerator.reduce(whole), accelerator.reduce(entropies)


def reference_logprobs(accelerator, ref_policy, batch, args):
    """Collective. Log-probabilities by the reference policy: (rows, length)."""
    all_rows = range(len(batch.lengths))
    return forward_all(accelerator, ref_policy, batch, [all_rows], args)[0]


class PolicyModel(nn.Module):
    """A causal language model, read at the positions that predict the response tokens."""

    def __init__(self, model, args):
        super().__init__()
        self.model = model
        self.args = args

    def forward(self, input_ids, mask):
        """Log-probabilities of the response tokens and entropies: (rows, length), 0 elsewhere.

        mask: 1 where there is a response token.
        """
        hidden = hidden_states(self.model, input_ids)  # (rows, length, hidden_size)
        # Token t is predicted at t - 1. The mask is 0 at t = 0, so both lines take the same tokens
        # in the same order
        hidden = hidden[:, :-1][mask[:, 1:].bool()]  # (tokens, hidden_size)
        labels = input_ids[mask.bool()]  # (tokens,)
        # ChunkedHead computes token_logprobs of the head's logits, divided by the temperature, in
        # chunks, because all logits together would need too much memory. Both results have
        # gradients. Those of the entropies are computed only if a loss uses them
        logprobs, entropies = ChunkedHead.read(self.model, hidden, labels, self.args)
        return to_rows(logprobs, mask), to_rows(entropies, mask)


def token_logprobs(logits, labels):
    """Log-probabilities of the labels, and entropies: each (positions,).

    logits: (positions, vocabulary), at the sampling temperature; labels: (positions,), token ids.
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
        """Scores of the texts up to and with each token: (rows, length)."""
        hidden = hidden_states(self.model, input_ids)  # (rows, length, hidden_size)
        return self.model.score(hidden.to(self.model.score.weight.dtype)).squeeze(-1)


def hidden_states(model, input_ids):
    """What a model's head reads: (rows, length, hidden_size)."""
    return model.base_model(input_ids, use_cache=False).last_hidden_state


def collate(responses, device):
    """A Batch with one row of each response; what steps 5 and 6 make is None.

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
    # A failed reward is no wrong answer: the response is left out of the loss
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
    """Puts values where the mask is 1, in order, and 0 elsewhere. Returns a tensor like the mask.

    >>> to_rows(torch.tensor([5.0, 6.0, 7.0]), torch.tensor([[0, 1, 1], [0, 1, 0]]))
    tensor([[0., 5., 6.],
            [0., 7., 0.]])
    """
    return torch.zeros_like(mask, dtype=values.dtype).masked_scatter(mask.bool(), values)


# ------------------------------------------------------------------------------------------ scores


def score_responses(accelerator, reward_model, responses, args, is_eval=False):
    """Collective. Copies of the responses with their scores.

    A score is the weighted sum of the reward model's, the verifiable and the format reward. In an
    evaluation the reward model's counts only where there is no ground truth. The score is None if
    the verifiable reward failed. With non_stop_penalty, a response that was cut or is shorter than
    min_response_length has the penalty for its score instead, even if its reward failed.
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
            score = None  # which does not mean wrong
        is_complete = response.stopped and len(response.token_ids) >= args.min_response_length
        if args.non_stop_penalty and not is_complete:  # also if the reward failed
            score = args.penalty_reward_value
        with_scores.append(replace(response, model_score=model_score, score=score))

    failed = [response for response in responses if response.failure]
    if failed and is_rank_0():
        print(
            f"Warning: the reward failed on {len(failed)} of {len(responses)} responses, first on "
            f"{failed[0].prompt.origin}: {failed[0].failure}"
        )
    return with_scores


# -------------------------------------------------------------------------------------- generation


def generation_thread(engine, workers, tokenizer, prompts_Q, response_Q, args):
    """Answers each Request in prompts_Q with this rank's share of a Rollout, in response_Q.

    It calls no collective function, because from two threads the ranks would call them in different
    orders.
    """
    try:
        while True:
            times = {}
            with timed(times, "wait_for_prompts"):
                request = prompts_Q.get()
            rollout = generate_rollout(engine, workers, tokenizer, request, args)
            rollout.times |= times
            response_Q.put(rollout)
    except BaseException as error:  # Python would end the thread alone
        end_at_once(error)


def generate_rollout(engine, workers, tokenizer, request, args):
    """Sample this rank's share of a Request, and grade it: a Rollout.

    Each rank has the whole Request, of which its engine takes its share of the prompts.
    """
    times = {}
    with timed(times, "generation"):
        responses = engine.sample(request.prompts, request.seeds, args.temperature)
    with timed(times, "reward"):
        responses = grade_responses(responses, tokenizer, workers, args)
    with timed(times, "evaluation"):
        # With the same seeds in every evaluation
        answers = engine.sample(
            request.eval_prompts, range(len(request.eval_prompts)), args.eval_temperature
        )
        answers = grade_responses(answers, tokenizer, workers, args)
    return Rollout(engine.policy_version, responses, answers, times)


# ================================================================================================
# The algorithm ends here. What follows is machinery: look it up when you need it.
# ================================================================================================


# --------------------------------------------------------------------------------------- arguments


FilledIn = tyro.conf.Suppress  # computed by the script: no command-line option


@dataclass
class Args(Algorithm):
    """What a run is told."""

    # -- Batches
    total_episodes: int = 100_000
    """responses to train on"""
    number_samples_per_prompt: int = 8
    """responses sampled for each prompt: a group"""
    local_rollout_batch_size: int = 64
    """prompts per training step and rank"""
    local_mini_batch_size: int = 256
    """responses per optimizer update and rank"""
    micro_batch_tokens: int = 16_384
    """most tokens of a micro-batch, padding included; a longer row is run by itself"""
    per_device_train_batch_size: int = 0
    """most responses of a micro-batch; 0: as many as micro_batch_tokens allows"""

    # -- Optimization
    lr_scheduler_type: Literal["linear", "cosine", "constant"] = "constant"
    """learning rate after its warm-up"""
    warm_up_steps: int = 0
    """a model's first updates (not steps), in which its learning rate rises"""
    warmup_ratio: float = 0.0
    """warm_up_steps as a share of the policy's updates"""
    eps: float = 1e-8
    """AdamW's; 1e-5 (2403.17031) would halve large models' steps"""
    weight_decay: float = 0.0
    """AdamW's"""

    # -- Generation
    async_mode: bool = True
    """generate the next batch while training; --no-async_mode: on-policy"""
    response_length: int = 256
    """most tokens in a response"""
    stop_token: str | None = None
    """another token that ends a response; "eos": the tokenizer's"""
    stop_token_id: int | None = None
    """another token that ends a response, as an id"""

    # -- Reward
    reward_model_multiplier: float = 1.0
    """times the reward model's score; 0: PPO's value model still starts from it"""
    apply_verifiable_reward: bool = True
    """score responses with compute_score or reward_fn"""
    verification_reward: float = 1.0
    """times the verifiable score"""
    reward_fn: str | None = None
    """path/to/file.py:function in place of compute_score (docs/rewards.md)"""
    reward_workers: int | None = None
    """processes that call reward_fn, for each engine; None: a core each, 8 at most"""
    reward_timeout: float = 10.0
    """seconds for a call of reward_fn; one that fails leaves the response out of the loss"""
    add_r1_style_format_reward: bool = False
    """reward <think>...</think><answer>...</answer>"""
    r1_style_format_reward: float = 1.0
    """worth of that form"""
    min_response_length: int = 0
    """with non_stop_penalty: shorter responses are penalized, too"""

    # -- Models
    model_name_or_path: str = "debug_assets/model"
    """policy and reference policy: a folder or a name on the hub; setup.sh makes this one"""
    model_revision: str | None = None
    """its revision on the hub"""
    tokenizer_name_or_path: str | None = None
    """None: the policy's"""
    chat_template: str | None = None
    """file with a Jinja chat template; None: the tokenizer's own"""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """data type of weights, in the learner and in vLLM; the optimizer updates float32 masters"""
    attn_implementation: str = "sdpa"
    """sdpa, eager, flash_attention_2, ..."""
    compile_layers: bool = False
    """compile the models' layers, on GPUs alone: no GPU has shown the gain yet (docs/scaling.md)"""
    gradient_checkpointing: bool = True
    """compute activations again in the backward pass: less memory, a third slower"""
    reward_model_path: str | None = None
    """one-label classifier with the policy's tokenizer"""
    reward_model_revision: str | None = None
    """its revision on the hub"""

    # -- Data and evaluation
    dataset: str = "debug_assets/train.parquet"
    """training prompts: a .parquet or .jsonl file, a folder, or a dataset on the hub"""
    dataset_config: str | None = None
    """its configuration, where there are several"""
    dataset_split: str = "train"
    """its split, unless it is a file"""
    eval_dataset: str | None = None
    """held-out prompts, in the same form; None: no evaluation"""
    eval_dataset_config: str | None = None
    """its configuration, where there are several"""
    eval_dataset_split: str = "test"
    """its split, unless it is a file"""
    max_prompt_token_length: int = 256
    """longer prompts are dropped"""
    num_evals: int = 10
    """evaluations while training, the first before any update; one more at the end"""
    num_eval_prompts: int = 500
    """held-out prompts, the same for every seed; 0: all"""
    eval_temperature: float = 0.0
    """of evaluations; 0: greedy"""

    # -- Engines' GPUs
    vllm_gpus: tuple[int, ...] = ()
    """each node's GPUs for vLLM alone, as indices; none: an engine on every learner's GPU"""
    vllm_tensor_parallel_size: int = 1
    """GPUs of one engine (tensor parallel); needs vllm_gpus"""
    vllm_gpu_memory_utilization: float | None = None
    """vLLM's share of a GPU; None: 0.9 of its own GPUs, 0.3 of a shared one"""
    vllm_enforce_eager: bool = False
    """no CUDA graphs: starts faster, generates slower"""

    # -- The run and its checkpoints
    exp_name: str = Path(__file__).stem
    """name of the experiment"""
    seed: int = 1
    """seed of everything random"""
    run_name: str | None = None
    """name of the run, its folder in output_dir; None: exp_name, seed, time and random letters"""
    output_dir: str = "output"
    """folder of all runs"""
    save_freq: int = 0
    """steps between checkpoints; 0: no checkpoints"""
    keep_last_n: int = 3
    """newest checkpoints to keep; 0: all"""
    resume_from_checkpoint: str | None = None
    """checkpoint to resume from; latest: run_name's newest, or a new run. Newer ones are removed"""

    # -- Trackers and the hub
    with_tracking: bool = False
    """log to Weights & Biases as well"""
    wandb_project_name: str = os.environ.get("WANDB_PROJECT", "tandem")
    """project there"""
    wandb_entity: str | None = None
    """its owner (user or team)"""
    push_to_hub: bool = False
    """upload the model at the end, by scripts/push_to_hub.py"""
    hf_entity: str | None = None
    """owner of the repository; None: who is logged in"""
    hf_repo_id: str | None = None
    """repository; None: exp_name"""
    hf_repo_revision: str | None = None
    """branch; None: the run's name"""

    # -- Filled in at run time
    mini_batch_size: FilledIn[int] = 0
    """responses per update, over all ranks"""
    world_size: FilledIn[int] = 1
    """learner processes"""
    local_world_size: FilledIn[int] = 1
    """learner processes of a node"""
    rollout_batch_size: FilledIn[int] = 0
    """prompts per step, over all ranks"""
    episodes_per_step: FilledIn[int] = 0
    """responses per step, over all ranks"""
    updates_per_step: FilledIn[int] = 0
    """optimizer updates per step"""
    start_day: FilledIn[str] = field(default_factory=lambda: date.today().isoformat())
    """YYYY-MM-DD on which the run was first started, for chat templates that write the date"""
    num_training_steps: FilledIn[int] = 0
    """of the run"""
    num_updates: FilledIn[int] = 0
    """of the run"""
    stop_token_ids: FilledIn[tuple[int, ...]] = ()
    """ids that end a response"""
    num_sources: FilledIn[int] = 0
    """data sources of all prompts"""

    def __post_init__(self):
        for name, value in vars(self).items():
            if isinstance(value, str):  # no shell expands a quoted ~
                setattr(self, name, os.path.expanduser(value))


# ------------------------------------------------------------------------------------------ set-up


def start_ranks(args):
    """The Accelerator, and a gloo group of the ranks for what is no tensor; None: one rank."""
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
    timeout = timedelta(hours=2)  # others wait while a rank loads or saves a model
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),  # else torchrun's processes would not meet on a CPU
        mixed_precision="no",  # weights are in args.dtype already
        log_with="wandb" if args.with_tracking else None,
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timeout)],
    )
    # FSDP2 is "FSDP", too. Its RAM-efficient loading gives all ranks but a node's first zeros
    is_refused = accelerator.distributed_type in ("FSDP", "DEEPSPEED")
    if accelerator.is_fsdp2:
        is_refused = accelerator.state.fsdp_plugin.cpu_ram_efficient_loading
    if is_refused:
        raise ValueError(
            "launch as the files in scripts/accelerate do: models are sharded by FSDP2 alone "
            "(fsdp_version 2, fsdp_cpu_ram_efficient_loading false)"
        )
    if args.compile_layers and accelerator.device.type == "cpu":
        raise ValueError("--compile_layers is for GPUs: on a CPU the compiler takes minutes")
    if accelerator.num_processes == 1:
        return accelerator, None
    return accelerator, torch.distributed.new_group(backend="gloo", timeout=timeout)


def fill_in(args, world_size):
    """A copy with the fields of run time. ValueError: arguments do not fit together."""
    if not (
        args.apply_verifiable_reward or args.add_r1_style_format_reward or uses_reward_model(args)
    ):
        raise ValueError(
            "no reward: add --apply_verifiable_reward, --add_r1_style_format_reward, or a "
            "--reward_model_path whose --reward_model_multiplier is above 0"
        )
    if args.min_response_length and not args.non_stop_penalty:
        raise ValueError("--min_response_length needs --non_stop_penalty")
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
    if args.warm_up_steps == 0:
        args.warm_up_steps = round(args.warmup_ratio * args.num_updates)
    if args.warm_up_steps >= args.num_updates:
        raise ValueError(
            f"--warm_up_steps ({args.warm_up_steps}) must be below the number of updates "
            f"({args.num_updates}); see --total_episodes"
        )
    if args.number_samples_per_prompt < 2:
        raise ValueError("--number_samples_per_prompt: a group needs at least 2 samples")
    num_engines = count_engines(args)
    if not args.reward_workers:
        args.reward_workers = min(8, os.cpu_count() // num_engines or 1)
    if not args.vllm_gpu_memory_utilization:
        args.vllm_gpu_memory_utilization = 0.9 if args.vllm_gpus else 0.3
    return args


# -------------------------------------------------------------------------------- the run's folder


def agree_on_run(args):
    """Let rank 0 choose the run's folder for all ranks. Collective.

    Return args with run_name and start_day, the folder, and the checkpoint to resume from (or
    None). The name can be random, and other nodes can see a new folder late, so only rank 0 looks.
    A resumed run keeps its first day, because chat templates can write the date into prompts.
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
    folder holds another run, or a finished run without checkpoints, or is not that of run_name.
    """
    if args.resume_from_checkpoint == "latest" and not args.run_name:
        raise ValueError("--resume_from_checkpoint latest needs a --run_name")
    if args.resume_from_checkpoint not in (None, "latest"):
        checkpoint_dir = Path(os.path.abspath(args.resume_from_checkpoint))
        run_dir = checkpoint_dir.parents[1]
        named = Path(args.output_dir, args.run_name or ".")
        if args.run_name and named.resolve() != run_dir.resolve():
            raise ValueError(
                f"{checkpoint_dir} is no checkpoint of the run {named}, such as "
                f"{named}/checkpoints/step_100"
            )
        return run_dir, checkpoint_dir
    # Random letters, because two runs can start in the same second
    start = f"{time.strftime('%Y%m%d_%H%M%S')}_{os.urandom(3).hex()}"
    run_dir = Path(args.output_dir, args.run_name or f"{args.exp_name}__{args.seed}__{start}")
    checkpoints = list_checkpoints(run_dir)
    if args.resume_from_checkpoint and checkpoints:
        return run_dir, checkpoints[-1]
    # args.json exists as soon as a run has started, and model/ only after its last update. With
    # "latest" an unfinished run starts again; without it, any run in this folder is refused
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
    run_program("provenance.py", run_dir)  # adds commit and versions to args.json
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
    """Load the tokenizer. Raise ValueError if a reward or value model gives tokens other ids."""
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
        if not vocabulary.items() <= other.get_vocab().items():  # it may know more
            raise ValueError(f"--{flag} {path} must know the policy's tokens by the same ids")
    return tokenizer


def find_stop_tokens(args, tokenizer, model):
    """The ids that end a response: the model's end tokens, the tokenizer's, and the flags'."""
    eos = model.generation_config.eos_token_id
    stop_ids = {args.stop_token_id, tokenizer.eos_token_id}
    stop_ids |= set(eos if isinstance(eos, list) else [eos])
    if args.stop_token:
        stop_token = tokenizer.eos_token if args.stop_token == "eos" else args.stop_token
        # inf: not in the vocabulary, and refused below
        stop_ids.add(tokenizer.get_vocab().get(stop_token, math.inf))
    stop_ids.discard(None)
    if not stop_ids or max(stop_ids) >= model.config.get_text_config().vocab_size:
        raise ValueError(
            f"stop tokens {stop_ids}: there are none, or one is not in the vocabulary; see "
            f"--stop_token {args.stop_token}, --stop_token_id and the model's generation config"
        )
    return tuple(sorted(stop_ids))


def load_datasets(tokenizer, args):
    """The prompts to train on, and those that are held out (none without eval_dataset)."""
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
    """The prompts of a dataset. ValueError: a row is unusable, or none is left."""
    rows = load_rows(path, config, split)
    prompts = []
    for index, row in enumerate(rows):
        with naming_row(path, index):
            prompt = read_prompt(row, f"{path}, row {index}", tokenizer, args, is_eval)
        if 0 < len(prompt.token_ids) <= args.max_prompt_token_length:
            prompts.append(prompt)
    if not prompts:
        raise ValueError(
            f"{path}: prompts are longer than --max_prompt_token_length, or the tokenizer drops all"
        )
    if is_rank_0():
        print(f"{path}: {len(prompts)} prompts; {len(rows) - len(prompts)} are empty or too long")
    return prompts


def read_prompt(row, origin, tokenizer, args, is_eval):
    """A row of a dataset as a Prompt. ValueError: it lacks what its reward needs.

    Its columns are verl's, `prompt` (a string, or messages), `data_source`, `reward_model: {style,
    ground_truth}`, `extra_info`, or open-instruct's, `messages`, `dataset`, `ground_truth`.
    """
    content = row.get("messages") or row.get("prompt")
    data_source = row.get("data_source") or row.get("dataset")
    ground_truth = row.get("ground_truth")
    rule = row.get("reward_model") or {}
    # Style "model" means no rule, except in verl's HellaSwag rows, which have `eval`
    if ground_truth is None and (rule.get("style") != "model" or rule.get("eval")):
        ground_truth = rule.get("ground_truth")
    # Without a ground truth a row may be scored by the reward model
    if ground_truth is None and args.apply_verifiable_reward and not uses_reward_model(args):
        raise ValueError("it has no `ground_truth`, which the reward needs")
    # Held-out prompts are scored by a rule where they can be
    if not args.apply_verifiable_reward and not is_eval:
        ground_truth = None
    if ground_truth is not None and not args.reward_fn:
        compute_score(data_source, "", ground_truth)  # it must know the source
    # For templates it is the run's first day: a resume must make the same prompts
    variables = {"strftime_now": date.fromisoformat(args.start_day).strftime}
    text, token_ids = tokenize_prompt(content, row, tokenizer, variables)
    return Prompt(origin, text, token_ids, data_source, ground_truth, row.get("extra_info"))


def tokenize_prompt(prompt, row, tokenizer, variables=None):
    """Return the text of a prompt and its token ids, or "" and [] if nothing is asked.

    prompt: a string; or messages, which the chat template renders with the row's `tools` and
    `chat_template_kwargs` (or their JSON), and further variables. An answer that ends them is left
    out. Raise ValueError if there is no prompt.
    """
    if isinstance(prompt, str):
        return prompt, tokenizer(prompt)["input_ids"] if prompt.strip() else []
    messages = drop_nulls(prompt)
    if messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if not messages:
        raise ValueError("it has no prompt")
    asked = [message.get("content") or "" for message in messages if message["role"] == "user"]
    if not all(str(content).strip() for content in asked):
        return "", []
    text = tokenizer.apply_chat_template(
        messages,
        tools=drop_nulls(read_json(row.get("tools"))),
        tokenize=False,
        add_generation_prompt=True,
        **(variables or {}) | drop_nulls(read_json(row.get("chat_template_kwargs")) or {}),
    )
    # The template has written the special tokens
    return text, tokenizer(text, add_special_tokens=False)["input_ids"]


def load_rows(path, config, split):
    """Rows of a .parquet or .jsonl file, of a folder, or of a dataset on the hub: dictionaries.

    ValueError: of a file a split is asked that is no default; or a folder has files of several
    formats, of which datasets would read one.
    """
    is_saved = Path(path, "state.json").exists()  # by Dataset.save_to_disk
    is_default = split in (None, Args.dataset_split, Args.eval_dataset_split)
    if not is_default and (is_saved or Path(path).is_file()):
        raise ValueError(f"{path} has no splits, such as {split}; leave it out, or give a folder")
    formats = {file.suffix for file in Path(path).rglob("*")} & {".jsonl", ".parquet", ".csv"}
    is_described = is_saved or Path(path, "README.md").exists()
    if len(formats) > 1 and not is_described:
        raise ValueError(
            f"{path} has files of {sorted(formats)}, of which one format would be read; keep one, "
            f"or name the files in a README.md, as on the hub"
        )
    if path.endswith(".jsonl"):
        # datasets would make "01" beside 2 a 1
        rows = []
        with open(path, "rb") as file:
            for line in file:
                with naming_row(path, len(rows)):
                    rows.append(json.loads(line))
        return rows
    if path.endswith(".parquet"):
        return parquet.read_table(path).to_pylist()
    if is_saved:
        return datasets.load_from_disk(path).to_list()
    with tempfile.TemporaryDirectory() as cache:
        # datasets knows a folder by its name: it would take the rows of another one, or older ones
        cache_dir = cache if Path(path).is_dir() else None
        return datasets.load_dataset(path, config, split=split, cache_dir=cache_dir).to_list()


@contextlib.contextmanager
def naming_row(path, index):
    """Turns any error inside into a ValueError that names file and row."""
    try:
        yield
    except Exception as error:
        kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
        raise ValueError(f"{path}, row {index}: {kind}{error}") from error


def read_json(value):
    """A value; of a text, what it says as JSON (nothing: None)."""
    return json.loads(value or "null") if isinstance(value, str) else value


def drop_nulls(value):
    """A value without the null entries of its dictionaries, which Arrow adds and templates see.

    >>> drop_nulls([{"role": "user", "tool_calls": None}])
    [{'role': 'user'}]
    """
    if isinstance(value, dict):
        return {key: drop_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [drop_nulls(item) for item in value]
    return value


def uses_reward_model(args):
    return args.reward_model_path and args.reward_model_multiplier


def make_request(training_step, train_prompts, eval_prompts, args):
    """The request for a training step; after the last, for the last evaluation alone.

    Seeds are hashes: with sums, runs of neighbouring --seed would share responses.
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
    """Indices of prompts number `start` to `start + count` of the run.

    Each pass over the dataset is a seeded permutation.

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
    for part in (config, config.get_text_config()):  # of a vision model another one
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
        # vLLM starts from this config. A head that the checkpoint has is not tied, whatever the
        # config says; and of a vision model the language model alone has been loaded
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
    # Gradient checkpointing needs training mode. Dropout is off by the config
    model.train(trained).requires_grad_(trained)
    return model


def revision_of(path, args):
    return {
        args.reward_model_path: args.reward_model_revision,
        args.model_name_or_path: args.model_revision,
    }.get(path)


def load_reference_policy(accelerator, policy, args):
    """Collective. The policy as it was loaded; with beta 0, which needs none, the policy itself."""
    if args.beta == 0:
        return policy
    model = load_model(AutoModelForCausalLM, args.model_name_or_path, args, trained=False)
    return place_model(accelerator, PolicyModel(model, args), args)


def load_reward_model(accelerator, args):
    """Collective. None: the run has none."""
    if not uses_reward_model(args):
        return None
    return load_classifier(accelerator, RewardModel, args.reward_model_path, args, trained=False)


def load_classifier(accelerator, model_class, path, args, trained):
    """Load a RewardModel or ValueModel with a float32 head. Collective.

    With a bfloat16 head many scores would be equal.
    """
    model = load_model(AutoModelForSequenceClassification, path, args, trained, num_labels=1)
    model.score.float()
    return place_model(accelerator, model_class(model, args), args)


def place_model(accelerator, model, args):
    """Move a PolicyModel, RewardModel or ValueModel to this rank's device. Collective.

    Under FSDP2 each rank holds a part of each parameter. Otherwise each rank holds a whole copy.
    The copies start equal, because all ranks load the same files.
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
    """Return {name: parameter} of the parameters that train."""
    return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}


def add_to_master(weight):
    """Add the gradient of one backward pass to that of the weight's master, and clear it."""
    weight.master.grad += weight.grad
    weight.grad = None


@torch.no_grad()
def round_masters(model):
    """Set each trained weight to its master, rounded to the weight's dtype."""
    for weight in trained_weights(model).values():
        weight.copy_(weight.master)


def sum_over_ranks(accelerator, gradients):
    """Sum gradients over the ranks, in place, because each rank had other rows. Collective."""
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
        """Log-probabilities of labels (positions,) and entropies, at the sampling temperature.

        hidden: what the language model's head reads, (positions, hidden_size).
        """
        # Some models scale their logits (Cohere, Granite), or cap them (Gemma)
        config = model.config.get_text_config()
        scale = getattr(config, "logit_scale", None) or 1.0  # MPT's is None
        scale = scale / getattr(config, "logits_scaling", 1.0) / args.temperature
        # Capped and scaled by s: s * cap * tanh(x / cap), which is s * x with the cap s * cap
        soft_cap = getattr(config, "final_logit_softcapping", None)
        if soft_cap:
            soft_cap *= scale
        head = model.get_output_embeddings().weight
        # Logits are float32 (2506.13585)
        hidden = hidden.to(torch.promote_types(head.dtype, torch.float32)) * scale
        return cls.apply(hidden, head, labels, soft_cap)

    @staticmethod
    def logits(hidden, head, soft_cap):
        """Logits, kept within plus or minus soft_cap unless that is None.

        hidden: (positions, hidden_size); head: (vocabulary, hidden_size).
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
        ctx.set_materialize_grads(False)  # of an output that no loss has backward() gets None
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
                if entropies_grad is not None:  # that of the entropy H is -p (log p + H)
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


# Seconds for the start of vLLM or a reward worker, and for each call of a weight sync
START_TIMEOUT = 1800
WEIGHT_SYNC_TIMEOUT = 300


def start_engine(accelerator, config, prompts, args):
    """This rank's engine, a VLLM or NoEngine, and a queue of its reward workers, or None.

    config: of the policy.
    """
    placement = place_engine(accelerator.process_index, torch.cuda.device_count(), args)
    if not placement:
        return NoEngine(), None
    workers = start_reward_workers(args) if args.reward_fn else None
    accelerator.print(f"Starting vLLM (a minute or so) for {args.output_dir}/{args.run_name}")
    max_length = max(len(prompt.token_ids) for prompt in prompts) + args.response_length
    return VLLM(placement, config, max_length, args), workers


class VLLM:
    """One vLLM engine in a process of its own. One thread at a time may use it."""

    def __init__(self, placement, config, max_length, args):
        """Starts the engine, and waits until it is up.

        placement: see place_engine; max_length: of a prompt with its response.
        """
        self.index, self.count, self.gpus = placement
        self.args = args
        self.policy_version = None  # of the weights that were synced last
        self.nccl = None  # the communicator of this rank and vLLM's workers
        self.folder = tempfile.mkdtemp(prefix="tandem_")
        folders.append(self.folder)
        self.way = way_of_weights(self.gpus, args)
        environment, options = vllm_settings(self.gpus, self.folder, max_length, args)
        if self.gpus:
            options["max_num_seqs"] = responses_at_once(args.episodes_per_step // self.count)
        self.executor = ProcessPoolExecutor(
            1, mp.get_context("spawn"), initializer=die_with_script, initargs=(self.folder,)
        )
        # vLLM and torch read the environment when they are imported: the process is born with it
        with clear_environment():
            os.environ.update(environment)
            start = self.submit(start_llm, options, config, self.folder)
        process_groups.append(start.result(START_TIMEOUT))

    def submit(self, function, *args, **kwargs):
        """Makes vLLM's process run a function. If it fails, this process ends at once."""
        call = self.executor.submit(function, *args, **kwargs)
        call.add_done_callback(end_if_failed)
        return call

    def call(self, method, *args, **kwargs):
        """Has vLLM's process call a method of LLM, with the time limit of weight syncs."""
        return self.submit(call_llm, method, *args, **kwargs).result(WEIGHT_SYNC_TIMEOUT)

    def sample(self, prompts, seeds, temperature):
        """Samples the Responses to this engine's share of some Prompts."""
        first, end = (i * len(prompts) // self.count for i in (self.index, self.index + 1))
        return self.submit(
            sample_responses, prompts[first:end], seeds[first:end], temperature, self.args
        ).result()

    def sync_weights(self, weights, version):
        """Give vLLM the weights of a version, as gather_weights yields them. vLLM must be idle."""
        if self.way == "pipe":
            for named_weight in weights:
                # Pickled here, because the executor's own pickler would move the learner's
                # parameter to shared memory. One at a time, because each queued one is a copy
                self.submit(receive_weight, pickle.dumps(named_weight)).result(WEIGHT_SYNC_TIMEOUT)
            self.submit(reload_weights).result(WEIGHT_SYNC_TIMEOUT)
        else:
            self.send_weights(weights)
        was_idle = self.call("reset_prefix_cache")
        assert was_idle, "vLLM was busy during a weight sync"
        self.policy_version = version

    def send_weights(self, weights):
        """Sends weights by the protocol of vLLM's workers ("ipc", "nccl"), in vLLM's dtype."""
        if self.policy_version is None:
            self.connect()
        self.call("start_weight_update")
        for names, tensors in in_messages(weights):
            info = {
                "names": names,
                "dtype_names": [self.args.dtype] * len(names),
                "shapes": [list(tensor.shape) for tensor in tensors],
            }
            if self.way == "ipc":
                uuid = str(torch.cuda.get_device_properties().uuid)
                info["ipc_handles"] = [{uuid: reduce_tensor(tensor)[1]} for tensor in tensors]
            update = self.submit(call_llm, "update_weights", {"update_info": info})
            if self.way == "nccl":
                for tensor in tensors:
                    self.nccl.broadcast(tensor, src=0, stream=torch.cuda.current_stream())
            update.result(WEIGHT_SYNC_TIMEOUT)
            tensors.clear()  # before the next are gathered
        self.call("finish_weight_update")
        torch.cuda.ipc_collect()  # memory that vLLM has read

    def connect(self):
        """Prepares vLLM's workers for "ipc" or "nccl", before the first weight sync."""
        if self.way == "ipc":
            self.call("init_weight_transfer_engine", {"init_info": {}})
            return
        from vllm.distributed.weight_transfer.nccl_common import stateless_init_process_group

        port = get_free_port()
        world_size = 1 + len(self.gpus)  # this rank is number 0, vLLM's workers follow
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


def way_of_weights(gpus, args):
    """How weights get to an engine: by the name of the way.

    pipe:    without a GPU: copies, through the pipe to vLLM's process
    ipc:     on a shared GPU: handles of the learner's memory
    nccl:    to vLLM's own GPUs: the numbers
    """
    if not gpus:
        return "pipe"
    return "nccl" if args.vllm_gpus else "ipc"


def in_messages(weights, num_bytes=2**28):
    """Weights as (names, contiguous tensors): each time as many as reach so many bytes together.

    A message costs 3 ms (docs/results.md, "On a GPU").
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
    """Yield (name, whole tensor) of a policy's weights. Collective."""
    # On a CPU vLLM has its own copy of a tied head, so it is also sent under the head's name
    for name, parameter in model.named_parameters(remove_duplicate=model.device.type == "cuda"):
        # This is the same tensor, except for modules that a model keeps in float32
        weight = parameter.detach().to(getattr(torch, args.dtype))
        if isinstance(weight, DTensor):  # under FSDP2 the ranks exchange their parts
            weight = weight.full_tensor()
        yield name, weight


def sync_weights(engine, language_model, version, args):
    """Collective. Gives each engine a version's weights."""
    engine.sync_weights(gather_weights(language_model, args), version)


def gather_rollout(share, cpu_group):
    """Collective. The shares of all ranks, each a Rollout, as one Rollout.

    cpu_group: the ranks' gloo group; None: one rank. Shares by rank are in the request's order.
    """
    if not cpu_group:
        return share
    shares = [None] * cpu_group.size()
    torch.distributed.all_gather_object(shares, share, group=cpu_group)
    rollout, *others = shares  # the first rank's, which has an engine: its times are reported
    for other in others:
        rollout.responses += other.responses
        rollout.eval_responses += other.eval_responses
    return rollout


def check_sampler(logprobs, sampler_logprobs, mask, args):
    """vLLM must have sampled with exactly the learner's weights. For on-policy batches only.

    All are (rows, length). RuntimeError: the KL of vLLM's policy to the learner's is above
    0.015 (in float32 1e-4), divided by a temperature below 1. Right runs stayed below a third of
    it, above which there is a warning (docs/results.md, "Checks"). A NaN passes: apply_gradients
    finds it, and saves the batch. Returns the KL.
    """
    kl = masked_mean(kl_penalty(sampler_logprobs * mask, logprobs * mask, "kl3"), mask).item()
    # In float32 vLLM's kernels on a GPU may use TF32
    limit = (1e-4 if args.dtype == "float32" else 0.015) / min(1.0, args.temperature)
    if kl > limit:
        raise RuntimeError(
            f"vLLM's log-probabilities are off the learner's by a KL of {kl:.2g} at equal weights"
        )
    if kl > limit / 3:
        warn_once(f"a KL of vLLM's policy to the learner's above {limit / 3:.2g}: in no right run")
    return kl


def end_if_failed(call):
    """Ends this process where a call of vLLM's has failed, or its process has died."""
    if call.exception() is not None:
        end_at_once(call.exception())


def responses_at_once(share):
    """The most that vLLM samples at once on a GPU: no more than its default, or a step's share.

    The memory of its sampler grows with them, which its plan of the GPU's memory leaves out. 128 at
    least, for evaluations.
    """
    device = torch.cuda.get_device_properties()
    is_large = device.total_memory >= 70 * 2**30 and "A100" not in device.name
    return min(1024 if is_large else 256, max(128, share))


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
        options["weight_transfer_config"] = {"backend": way_of_weights(gpus, args)}
    else:
        environment.setdefault("TORCH_COMPILE_DISABLE", "1")  # saves 6 to 20 s
        # Learner and engine share the cores
        environment["OMP_NUM_THREADS"] = str(os.cpu_count() // (2 * args.local_world_size) or 1)
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
    """A rank's engine: its number, how many there are, its GPUs; None: the rank owns none.

    Without vllm_gpus every rank owns one, on its own GPU; with them a node's first ranks do. GPUs
    are indices into the node's num_gpus visible ones; () is the CPU.

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
    """In place of a VLLM, on a rank that has none: no prompt is in its share."""

    count, policy_version = 0, None

    def sample(self, prompts, seeds, temperature):
        return []

    def sync_weights(self, weights, version):
        """Going through the weights gathers them: this rank has a part."""
        for _ in weights:
            pass


def limit_memory(device, args):
    """Leaves room on a GPU for what is not PyTorch's: CUDA contexts, NCCL, vLLM if it shares it."""
    if device.type != "cuda":
        return
    gib = 2**30 / torch.cuda.get_device_properties().total_memory
    share = 0 if args.vllm_gpus else args.vllm_gpu_memory_utilization  # vLLM's of this GPU
    # A GiB for the context of each process on this GPU, and one for NCCL, which connects ranks, and
    # a rank to an engine on other GPUs
    room = 2 if args.vllm_gpus or args.world_size == 1 else 3
    torch.cuda.set_per_process_memory_fraction(1 - share - room * gib)


# --------------------------------------------------------------------- what runs in vLLM's process


llm = None  # vLLM's LLM
received = []  # weights of a sync by "pipe" that is not complete yet: (name, tensor)


def start_llm(options, config, folder):
    """Makes the LLM. Returns the id of the process, which is its process group's, too.

    config: of the policy; folder: the engine's own.
    """
    global llm
    # vLLM's cache of compiled code goes by the model's path: "." in every run
    os.chdir(folder)
    config.save_pretrained(".")
    # vLLM has no prefix cache of a hybrid's states without chunked prefill, which is off on a CPU
    if {"conv", "mamba", "linear_attention"} & {*(getattr(config, "layer_types", None) or ())}:
        options["enable_prefix_caching"] = options.get("enable_chunked_prefill", True)
    from vllm import LLM

    try:
        llm = LLM(**options)
    except Exception as error:  # vLLM's own may not pickle
        raise RuntimeError(f"vLLM does not start: {error!r}") from error
    return os.getpid()


def call_llm(method, *args, **kwargs):
    """Calls a method of vLLM's LLM."""
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
    """Samples a Response to each Prompt, each with its seed."""
    from vllm import SamplingParams

    inputs = [{"prompt_token_ids": prompt.token_ids} for prompt in prompts]
    sampling = [
        SamplingParams(
            seed=seed,
            temperature=temperature,
            max_tokens=args.response_length,
            stop_token_ids=args.stop_token_ids,
            ignore_eos=True,  # stop_token_ids alone end a response
            logprobs=0,  # of the sampled token alone
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
    """The text of a response, for rewards, samples and evaluations.

    It leaves out special stop tokens, begin token and padding, and keeps other special tokens, such
    as <tool_call>: they are part of an answer.
    """
    left_out = {*args.stop_token_ids, tokenizer.bos_token_id, tokenizer.pad_token_id}
    left_out &= special_ids(tokenizer)
    return tokenizer.decode([token_id for token_id in token_ids if token_id not in left_out])


def grade_responses(responses, tokenizer, workers, args):
    """Copies of the responses with texts and verifiable rewards.

    workers: see start_reward_workers; None: there is no --reward_fn.
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
    """Raise RuntimeError if every reward of a batch failed, as it does where a judge has died."""
    if all(response.failure for response in responses):
        raise RuntimeError(f"the reward failed on all responses: {responses[0].failure}")


def reward_model_scores(accelerator, reward_model, responses, args):
    """Collective. The reward model's scores at the last token of each response, or Nones.

    Equal responses are scored once: what else is in a micro-batch moves the last bits.
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
    """The verifiable reward of a response."""
    if data_source == "debug/sorting":
        return float(response.strip() == ground_truth.strip())
    if "gsm8k" in str(data_source):
        return grade_gsm8k(response, ground_truth)
    raise NotImplementedError(
        f"{data_source!r} is neither debug/sorting nor *gsm8k*; for *math*, *hellaswag*, code and "
        f"constraints --reward_fn scripts/rewards/graders.py:compute_score, else one of your own"
    )


def grade_gsm8k(response, ground_truth):
    """1.0 if the first number after the last "####", or else the last one, is the ground truth.

    scripts/rewards/graders.py also knows fractions, units and other forms (docs/rewards.md).

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


# The parts may hold anything but these tags
NO_TAG = r"(?:(?!</?(?:think|answer)>).)*"
R1_FORMAT = re.compile(rf"\s*<think>{NO_TAG}</think>\s*<answer>{NO_TAG}</answer>\s*", re.DOTALL)


def has_r1_format(response):
    """Whether a response has the form <think>...</think><answer>...</answer>.

    The prompt may have opened <think> already.
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
    # The current folder can contain a random.py, which Python must not import for its own
    with patch_environment(PYTHONSAFEPATH="1"):
        for _ in range(args.reward_workers):
            workers.put(start_reward_worker(args))
    return workers


def start_reward_worker(args):
    """Start a process for --reward_fn. Return its executor, and the id of its process group."""
    context = mp.get_context("forkserver")
    executor = ProcessPoolExecutor(1, context, initializer=die_with_script)
    process_group = executor.submit(os.getpid).result(START_TIMEOUT)  # it leads its group
    process_groups.append(process_group)
    try:
        file = read_reward_file(args.reward_fn)
        executor.submit(start_reward_process, args.reward_fn, file).result(START_TIMEOUT)
    except BaseException:  # such as of sys.exit() in the file
        kill_group(process_group)
        raise
    return executor, process_group


@cache
def read_reward_file(reward_fn):
    """Return the content of the file in path/to/file.py:function.

    It is cached, so that a later edit of the file is noticed.
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
        if not psutil.pid_exists(process_group):  # it has died while it was idle
            kill_group(process_group)
        if process_group not in process_groups:
            executor, process_group = start_reward_worker(args)
        return executor.submit(call_reward_fn, args.reward_fn, response).result(args.reward_timeout)
    except BaseException as error:  # sys.exit() in the file raises no Exception
        kill_group(process_group)
        is_late = isinstance(error, TimeoutError)
        cause = f"it took over {args.reward_timeout:g} s" if is_late else error
        return replace(response, failure=f"{type(error).__name__}: {cause}")
    finally:
        workers.put((executor, process_group))


# ---------------------------------------------------------- what runs in a reward worker's process


def start_reward_process(reward_fn, file):
    """Prepare a worker's process.

    file: the content of the reward's file at the start of the run. Raise RuntimeError if it has
    changed, because old and new workers would grade differently.
    """
    if read_reward_file(reward_fn) != file:
        raise RuntimeError(
            f"the file of {reward_fn} has changed since the run began, and the other workers have "
            f"the old one; restore it, or stop and resume the run to use the new one"
        )
    os.environ.pop("PYTHONSAFEPATH", None)  # it was only for the fork server
    reward_arguments(load_reward_fn(reward_fn), "data_source", "response", "ground_truth", {})


@cache
def load_reward_fn(reward_fn):
    """The function of path/to/file.py:function, which can import its neighbours."""
    path, _, name = reward_fn.rpartition(":")
    sys.path.insert(0, str(Path(path).resolve().parent))
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(spec.name, module)  # unless Python has another one of this name
    spec.loader.exec_module(module)
    return getattr(module, name)


def call_reward_fn(reward_fn, response):
    """A copy of a response with its verifiable reward, or with what went wrong."""
    pid, prompt = os.getpid(), response.prompt
    about = {"num_tokens": len(response.token_ids), "stopped": response.stopped}
    try:
        function = load_reward_fn(reward_fn)
        arguments = reward_arguments(
            function,
            prompt.data_source,
            response.text,
            prompt.ground_truth,
            about | (prompt.extra_info or {}),
        )
        score, metrics = read_score(function(**arguments))
        if not math.isfinite(score):
            raise ValueError(f"the reward is {score}")
        response = replace(response, verifiable=score, reward_metrics=metrics)
    except BaseException:  # sys.exit() raises no Exception
        response = replace(response, failure=traceback.format_exc(limit=-1))
    if os.getpid() != pid:  # a child that the reward has forked must not answer
        os._exit(1)
    return response


def reward_arguments(reward_fn, data_source, response, ground_truth, extra_info):
    """Return those of these arguments that a reward function takes, by name.

    solution_str is verl's name for the response. Raise ValueError if the function takes neither.

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
    signature = inspect.signature(reward_fn)
    parameters = signature.parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return values
    if not {"solution_str", "response"} & parameters.keys():
        raise ValueError(f"it takes {signature}, and neither solution_str nor response")
    return {name: value for name, value in values.items() if name in parameters}


def read_score(result):
    """The score in what a reward function returned, and its metrics (verl's return a dictionary).

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
    """Return the metrics of a step's updates, from each rank's sums. Collective.

    loss_tokens: those of all updates, on all ranks. GRPO computes only a part of them.
    """
    totals = torch.tensor(list(sums.values()), dtype=torch.float64, device=accelerator.device)
    totals = dict(zip(sums, accelerator.reduce(totals).tolist(), strict=True))
    metrics = {
        "objective/loss": totals.pop("objective/loss") / args.updates_per_step,
        "val/update_tokens": totals.pop("val/update_tokens"),  # with their prompts'
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
    log_ratios = mismatch
    if args.importance_sampling_level == "sequence":
        log_ratios = sequence_mean(mismatch, mask)
    ratios = log_ratios.exp()[mask.bool()]  # (tokens,)
    has_spread = batch.advantages.abs().amax(1).view(-1, args.number_samples_per_prompt).any(1)
    metrics = {
        "objective/entropy": -logprobs.sum(1).mean(),
        "val/zero_variance_groups": (~has_spread).sum(),
        "mismatch/logprob_diff_mean": masked_mean(mismatch.abs(), mask),
        "mismatch/logprob_diff_max": mismatch.abs().max(),
        # KL of the sampler to the learner
        "mismatch/kl": masked_mean(kl_penalty(sampler_logprobs, logprobs, "kl3"), mask),
        # Effective sample size, as a share of the tokens
        "mismatch/ess": ratios.sum() ** 2 / (ratios**2).sum() / len(ratios),
        "mismatch/tis_clipfrac": (ratios > (args.tis_cap or math.inf)).float().mean(),
    }
    if batch.has_score.any():
        metrics["objective/scores_std"] = batch.scores[batch.has_score.bool()].std(correction=0)
    if args.beta > 0:  # to look at alone, because GRPO's loss has the KL and its reward has not
        ref_logprobs = batch.ref_logprobs * mask
        kl = kl_penalty(logprobs, ref_logprobs, args.kl_estimator)
        non_score_reward = (-args.beta * kl).sum(1)  # (rows,)
        metrics["objective/kl"] = (logprobs - ref_logprobs).sum(1).mean()
        metrics["objective/non_score_reward"] = non_score_reward.mean()
        metrics["objective/rlhf_reward"] = masked_mean(
            batch.scores + non_score_reward, batch.has_score
        )
    return metrics


def run_metrics(training_step, responses, step_start, start_time, args):
    """Where the run is, and how fast: metrics of a step."""
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
    """What responses earned: metrics of a prefix, "objective" or "eval".

    With several data sources, not hundreds, there is each mean for each of them, too.
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
                if len(sources) > 1 and args.num_sources <= 50:
                    collected[f"{prefix}/{name}/{response.prompt.data_source}"].append(value)
    return {name: sum(values) / len(values) for name, values in collected.items()}


def describe(response, policy_version):
    """What samples.jsonl and rollouts.jsonl say of a response."""
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
    """Writes the responses to a step's first prompts. In some 200 of the steps, evenly spaced, each
    with what the batch has of its tokens."""
    per_prompt = args.number_samples_per_prompt
    count = max(2, 8 // per_prompt) * per_prompt  # whole groups: two at least
    samples = [describe(response, rollout.policy_version) for response in responses[:count]]
    every = math.ceil(args.num_training_steps / 200)
    has_tokens = (training_step - 1) % every == 0 or training_step == args.num_training_steps
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
    """Collective. Scores answers to held-out prompts, writes them, returns eval/*."""
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
    """Histograms of the prompts' token counts: in the trackers; end_run has the picture."""
    lengths = [len(prompt.token_ids) for prompt in prompts]
    (run_dir / "prompt_lengths.json").write_text(json.dumps(lengths))
    for tracker in accelerator.trackers:
        import wandb

        tracker.log({"prompt_lengths": wandb.Histogram(lengths)}, commit=False)


def write_metrics(accelerator, metrics, run_dir, args):
    """Writes a step's metrics to metrics.jsonl and the trackers, and shows some."""
    metrics = {name: float(value) for name, value in metrics.items()}
    accelerator.log(metrics)
    append_line(run_dir / "metrics.jsonl", metrics)
    if not is_rank_0():
        return
    step, num_steps = metrics["training_step"], args.num_training_steps
    left = timedelta(seconds=round(metrics["time/from_scratch"] / step * (num_steps - step)))
    print(f"step {step:.0f} of {num_steps}, {left} left  ", end="")
    for name in ("objective/scores", "eval/scores"):
        if name in metrics:
            print(f"{name}: {metrics[name]:.4g}  ", end="")
    print(flush=True)


# Programs that work on a run's folder; a copy of this script may be without
PROGRAMS = Path(__file__).with_name("scripts")


def run_program(name, run_dir, *options):
    """Runs one of the PROGRAMS on the run's folder, on rank 0."""
    path = PROGRAMS / name
    if is_rank_0() and path.exists():
        # Out of a Ctrl-C's reach, which is for this script
        subprocess.run([sys.executable, path, run_dir, *options], start_new_session=True)


def save_model(accelerator, model, tokenizer, path, args):
    """Collective. Writes a model and its tokenizer in Hugging Face format.

    The generation config is the model's, with the run's end tokens.
    """
    weights = accelerator.get_state_dict(model)  # gathered under FSDP2
    if not is_rank_0():
        return
    generation_config = model.generation_config
    generation_config.eos_token_id = list(args.stop_token_ids)
    # transformers refuses to save some that models come with (a temperature without do_sample): it
    # saves a default, and we write this file
    model.generation_config = transformers.GenerationConfig()
    model.save_pretrained(path, state_dict=weights)
    tokenizer.save_pretrained(path)
    generation_config.to_json_file(path / "generation_config.json")


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
            "--resume_from_checkpoint: the prompts were others; the data, the chat template or the "
            "tokenizer has changed"
        )
    step = step_of(checkpoint_dir)
    if is_rank_0():
        print(f"Resumed from the checkpoint of step {step}; later steps are repeated")
    return step + 1, state | saved


def load_checkpoint(trained_models, checkpoint_dir):
    """Collective. Fills models and optimizers from a checkpoint, if there is one."""
    if checkpoint_dir:
        for part, folder in checkpoint_parts(trained_models, checkpoint_dir):
            checkpoint.load(part, checkpoint_id=folder)
        for model, _ in trained_models.values():
            round_masters(model)


def save_checkpoint(trained_models, run_dir, step, state, args):
    """Write checkpoints/step_N with models, optimizers, `state` and the run's files. Collective.

    It is written as `unfinished`, and renamed when it is complete. Older checkpoints than the
    newest keep_last_n are removed.
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
    print(f"To go on from step {step}: --resume_from_checkpoint {folder}")
    if args.keep_last_n > 0:
        remove_checkpoints(list_checkpoints(run_dir)[: -args.keep_last_n])


def checkpoint_parts(trained_models, folder):
    """Yield (state dict, folder) for each model and each optimizer in a checkpoint. Collective.

    trained_models: {name: (model, its optimizer)}. A model's state dict holds the float32 masters,
    which checkpoint.load fills in place. A resume can use another number of ranks, with FSDP2 or
    without.
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


def pack_rollout(rollout):
    """Return a rollout as a text, since a checkpoint's state is written as JSON, by rank 0."""
    return pickle.dumps(rollout).hex() if is_rank_0() else ""


def load_rollout(text):
    """Return the rollout in a text of pack_rollout.

    Ranks other than 0 return an empty one, because gather_rollout joins those of all ranks.
    """
    rollout = pickle.loads(bytes.fromhex(text))
    return rollout if is_rank_0() else replace(rollout, responses=[], eval_responses=[])


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
    """Remove checkpoints. Each is first renamed, so that no half of one looks complete."""
    for path in checkpoints:
        unfinished = path.with_name("unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        path.rename(unfinished)
        shutil.rmtree(unfinished)


def rewind_run(run_dir, checkpoint_dir):
    """Take a run's files back to a checkpoint, or to the start, and remove what is newer."""
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


def is_rank_0():
    return os.environ.get("RANK", "0") == "0"


@cache
def warn_once(text):
    if is_rank_0():
        print(f"Warning: {text}")


def stable_hash(*parts):
    """A 63-bit integer, the same in every process and on every machine."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


@contextlib.contextmanager
def timed(metrics, name):
    """Notes the seconds spent inside, as the metric time/<name>."""
    start = time.perf_counter()
    yield
    # Kernels run behind Python; only the main thread starts any
    if torch.cuda.is_available() and threading.current_thread() is threading.main_thread():
        torch.cuda.synchronize()
    metrics[f"time/{name}"] = time.perf_counter() - start


# ------------------------------------------------------------------------------ how a process ends


def end_run(accelerator, run_dir, args):
    """End the child processes; then programs in scripts/ draw, sum up and upload. Collective."""
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
    hold. A shell that is our child could be waited for by a reward that waits for all its children,
    so it runs in the background of another shell, which ends.
    """
    os.setsid()  # a Ctrl-C is for the script alone
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
    """Print an error and end this process, even if other threads are waiting."""
    ending.acquire()  # and never release it, so that a second thread waits here for the end
    try:
        traceback.print_exception(error)
        sys.stdout.flush()
    finally:  # also if printing fails, for example because the pipe is closed
        end_children()
        os._exit(1)


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="backslashreplace")  # a terminal may know only ASCII
    command_line = tyro.cli(Args, use_underscores=True)
    try:
        main(command_line)
    except BaseException as error:
        end_at_once(error)
