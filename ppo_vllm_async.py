"""PPO for language models (RLHF), asynchronous: vLLM generates the next batch while the learner trains on the last.

Launch:
    bash scripts/train/debug/ppo.sh                                             # no GPU: installs, learns in minutes
    accelerate launch --num_processes 1 ppo_vllm_async.py --help                # every option, one line each
    accelerate launch --num_processes 1 ppo_vllm_async.py --dataset train.parquet --model_name_or_path Qwen/Qwen3-0.6B
    accelerate launch --num_processes 6 ppo_vllm_async.py --vllm_gpus 6 7 --vllm_tensor_parallel_size 2 ...  # 8 GPUs
    torchrun --nproc_per_node 2 ppo_vllm_async.py ... (ACCELERATE_USE_CPU=true)  # two learners without GPUs

What happens in training step g:

    rank 0, main thread                       generation thread                vLLM (processes of its own)
    get batch g from response_Q    <--------  put responses
    [vLLM is idle] sync weights    ---------------------------------------->   weights of version g - 1
    put prompts g + 1 in prompts_Q -------->  get prompts; generate  ------>   sample
    score, train on batch g                   ...                              ...
    (the other ranks get batch g from rank 0, and train on their share of it)

Weights travel between receiving one batch and asking for the next: vLLM is idle then and the learner is not updating,
so there is nothing to lock. Batches 1 and 2 come from the initial policy; every later one comes from the policy one
training step before the one that trains on it (2410.18252). Two things keep that sound: PPO's ratio is against
log-probabilities that the learner computes itself, and what these differ from the sampler's by is a truncated
importance weight. With --no-async_mode weights and prompts go out after the update instead of before: on-policy.

Every rank sees the whole batch (token ids and a few floats a token: small), so that whitening, advantages and
minibatches are those of the whole batch and one rank or eight compute the same thing; only the forward and backward
passes are shared out.

Deliberate simplifications:
 1. A response cut at `response_length` counts as finished: no bootstrap from the value of what would have followed.
 2. Sampling is by temperature alone. top-p, top-k and minimum lengths change the distribution that is sampled from,
    and the importance ratios with it.
 3. One reward per response, given on its last token; no process rewards, no tools, no second turn.
 4. Prompts are padded to the longest of a micro-batch, not packed.

References: asynchronous RLHF 2410.18252; PPO 1707.06347; GAE 1506.02438; RLHF 1909.08593, 2009.01325; the N
implementation details 2403.17031.
"""

import contextlib
import copy
import gc
import hashlib
import importlib.util
import json
import math
import multiprocessing
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, NoReturn

import psutil
import torch
import transformers
import tyro
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, broadcast_object_list
from huggingface_hub import model_info, try_to_load_from_cache
from requests.utils import get_netrc_auth
from rich.console import Console
from rich.progress import Progress, TextColumn
from rich.table import Table
from rich.text import Text
from safetensors.torch import save_file
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
)

FilledIn = tyro.conf.Suppress  # not an option of the command line


@dataclass
class Args:
    # -- The run
    exp_name: str = "ppo_vllm_async"
    """name of the experiment"""
    seed: int = 1
    """seed of everything random: the order of prompts, sampling, minibatches, the value head"""
    run_name: str | None = None
    """folder of the run below output_dir; default: exp_name, seed and the time"""
    output_dir: str = "output"
    """where runs are written"""
    dry_run: bool = False
    """check everything that needs no model (data, rewards, batch sizes, disk), print the plan and stop"""

    # -- Data
    dataset: str = "debug_assets/train.parquet"
    """training prompts: a .parquet or .jsonl file, or the name of a dataset on the hub"""
    dataset_split: str = "train"
    """split of `dataset` when it is on the hub"""
    eval_dataset: str | None = None
    """held-out prompts, in the same form; None: no evaluation"""
    eval_dataset_split: str = "test"
    """split of `eval_dataset` when it is on the hub"""
    max_prompt_token_length: int = 256
    """longer prompts are dropped, and counted"""

    # -- Models
    model_name_or_path: str = "debug_assets/model"
    """the policy to start from, and the reference policy; a folder or a name on the hub"""
    model_revision: str | None = None
    """revision of the policy on the hub"""
    tokenizer_name_or_path: str | None = None
    """tokenizer; None: the policy's"""
    chat_template: str | None = None
    """file with a Jinja chat template; None: the tokenizer's own"""
    value_model_path: str | None = None
    """value model to start from (a one-label sequence classifier or a language model); None: the policy's backbone"""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """what forward passes and vLLM compute in; trained weights and optimizer state are always float32"""
    attn_implementation: str = "sdpa"
    """attention of the learner's models: sdpa, eager, flash_attention_2, ..."""
    gradient_checkpointing: bool = False
    """recompute activations in the backward pass: less memory, about a third more compute"""

    # -- Optimization
    learning_rate: float = 1e-6
    """learning rate of the policy"""
    value_learning_rate: float | None = None
    """learning rate of the value model; None: as the policy's (about ten times that often works better)"""
    value_warmup_steps: int = 0
    """training steps at the start in which only the value model learns"""
    lr_scheduler_type: Literal["linear", "cosine", "constant"] = "linear"
    """shape of the learning rate after the warm-up"""
    warm_up_steps: int = 0
    """optimizer updates in which the learning rate rises"""
    warmup_ratio: float = 0.0
    """the same as a share of all updates; used when warm_up_steps is 0"""
    eps: float = 1e-8
    """AdamW's epsilon (2403.17031 has 1e-5, but gradients of large models are near that: their steps would halve)"""
    weight_decay: float = 0.0
    """AdamW's weight decay"""
    max_grad_norm: float = 1.0
    """gradients are clipped to this norm, the policy's and the value model's each on its own"""

    # -- Batches (prompts: local_rollout_batch_size; the other three count responses, per rank)
    total_episodes: int = 100_000
    """responses to train on in the whole run"""
    local_rollout_batch_size: int = 64
    """prompts per rank and training step"""
    number_samples_per_prompt: int = 1
    """responses sampled for each prompt"""
    local_mini_batch_size: int = 64
    """responses per rank and optimizer update"""
    per_device_train_batch_size: int = 8
    """responses per rank and forward/backward pass of the update (micro-batch)"""
    local_rollout_forward_batch_size: int = 32
    """responses per rank and forward pass of the reference policy"""
    num_epochs: int = 1
    """passes over each batch of responses"""
    num_evals: int = 10
    """evaluations in the run, the one before the first update among them; one more follows the last update"""
    eval_temperature: float = 0.0
    """sampling temperature of evaluations; 0: greedy"""

    # -- Generation
    async_mode: bool = True
    """generate the next batch while training on the last; --no-async_mode: one after the other, on-policy"""
    sync_probe: bool = False
    """compare vLLM's log-probabilities with the learner's after every weight sync, not only after the first"""
    response_length: int = 256
    """most tokens in a response"""
    stop_token: str | None = None
    """a further token that ends a response, beside those of the model's generation config; eos: the tokenizer's"""
    stop_token_id: int | None = None
    """the same, as an id"""
    temperature: float = 1.0
    """sampling temperature; log-probabilities are of the distribution at this temperature"""
    vllm_gpus: tuple[int, ...] = ()
    """GPUs for vLLM alone, as indices into the visible ones, after the learners'; none: vLLM shares rank 0's GPU"""
    vllm_tensor_parallel_size: int = 1
    """GPUs that share one copy of the model in vLLM"""
    vllm_gpu_memory_utilization: float = 0.3
    """share of the GPU's memory for vLLM (weights and KV cache)"""
    vllm_enforce_eager: bool = False
    """run vLLM without CUDA graphs: starts faster, generates slower"""

    # -- Reward
    apply_verifiable_reward: bool = True
    """score responses with compute_score, or with reward_fn"""
    verification_reward: float = 1.0
    """the verifiable score is multiplied by this"""
    reward_fn: str | None = None
    """path/to/file.py:function to use in place of compute_score; same arguments, and extra_info by keyword"""
    add_r1_style_format_reward: bool = False
    """add r1_style_format_reward to responses of the form <think>...</think><answer>...</answer>"""
    r1_style_format_reward: float = 1.0
    """what that form is worth"""
    non_stop_penalty: bool = False
    """a response without a stop token scores penalty_reward_value, whatever else it earned"""
    penalty_reward_value: float = -10.0
    """the score of such a response"""
    min_response_length: int = 0
    """with non_stop_penalty: responses of fewer tokens are penalized as well"""

    # -- PPO
    beta: float = 0.05
    """weight of the KL penalty in the reward"""
    kl_estimator: Literal["kl1", "kl2", "kl3"] = "kl1"
    """estimator of that KL (http://joschu.net/blog/kl-approx.html)"""
    whiten_rewards: bool = False
    """scale rewards to unit variance, keeping their mean"""
    cliprange: float = 0.2
    """the policy ratio is clipped to 1 +- cliprange"""
    cliprange_value: float = 0.0
    """values are clipped to within this of the old ones, in units of reward; 0: not clipped"""
    gamma: float = 1.0
    """discount per token"""
    lam: float = 0.95
    """lambda of GAE for the advantages"""
    value_lam: float | None = None
    """lambda of the value targets; None: as lam (1: plain returns, 2503.01491)"""
    tis_cap: float = 2.0
    """cap of the importance weight learner/sampler on the policy loss; 0: no weight"""

    # -- Output
    save_batches: bool = False
    """write every training batch to batches/ in the run's folder, to look at or to test with"""
    with_tracking: bool = False
    """log to Weights & Biases as well"""
    wandb_project_name: str = "tandem"
    """its project"""
    wandb_entity: str | None = None
    """its entity (user or team)"""

    # -- Filled in at run time (fill_in)
    world_size: FilledIn[int] = 1
    """learner processes"""
    rollout_batch_size: FilledIn[int] = 0
    """prompts per training step, over all ranks"""
    episodes_per_step: FilledIn[int] = 0
    """responses per training step, over all ranks"""
    num_training_steps: FilledIn[int] = 0
    """training steps of the run"""
    num_updates: FilledIn[int] = 0
    """optimizer updates of the run"""
    eval_versions: FilledIn[tuple[int, ...]] = ()
    """policy versions (training steps completed) that are evaluated, beside the last"""
    stop_token_ids: FilledIn[tuple[int, ...]] = ()
    """ids that end a response"""
    pad_token_id: FilledIn[int] = 0
    """id that fills rows up; any would do, since masks come from lengths"""


def bad_input(message: str) -> NoReturn:
    """Ends the script with one line on what is wrong, where, and what to do, and exit status 2."""
    if int(os.environ.get("RANK", 0)) == 0:
        print(f"{Path(sys.argv[0]).name}: error: {message}", file=sys.stderr, flush=True)
    sys.exit(2)


def first_line(error: BaseException) -> str:
    """The first line of what an exception says, or its name where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def stable_hash(*parts: Any) -> int:
    """A 63-bit integer from its arguments, the same in every process and on every machine.

    >>> stable_hash(1, "episode", 0) == stable_hash(1, "episode", 0) != stable_hash(1, "episode", 1)
    True
    """
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big") >> 1


def fill_in(args: Args) -> Args:
    """Checks the numbers in args and computes those that follow from them."""
    rank, any_sign = int(os.environ.get("RANK", 0)), ("seed", "penalty_reward_value", "stop_token_id")
    may_be_0 = """value_warmup_steps warm_up_steps warmup_ratio weight_decay num_evals eval_temperature beta gamma lam
        min_response_length cliprange_value tis_cap value_lam verification_reward r1_style_format_reward"""
    for name, value in vars(args).items():
        if name == "world_size":
            break  # what follows is not given but computed
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        if not math.isfinite(value):
            bad_input(f"--{name} is {value}; it must be a finite number")
        if name not in any_sign and (value < 0 or (value == 0 and name not in may_be_0.split())):
            bad_input(f"--{name} is {value}; it must be {'0 or more' if name in may_be_0.split() else 'above 0'}")
        if name in ("temperature", "eval_temperature") and value > 2:
            bad_input(f"--{name} is {value}; vLLM samples at temperatures of at most 2")
        if name in ("warmup_ratio", "gamma", "lam", "value_lam", "vllm_gpu_memory_utilization") and value > 1:
            bad_input(f"--{name} is {value}; it must be at most 1")
    args.value_learning_rate = args.value_learning_rate or args.learning_rate
    args.value_lam = args.lam if args.value_lam is None else args.value_lam
    args.run_name = args.run_name or f"{args.exp_name}__{args.seed}__{time.strftime('%Y%m%d_%H%M%S')}"
    args.world_size = int(os.environ.get("WORLD_SIZE", 1))
    args.rollout_batch_size = args.local_rollout_batch_size * args.world_size
    args.episodes_per_step = args.rollout_batch_size * args.number_samples_per_prompt
    local_episodes = args.local_rollout_batch_size * args.number_samples_per_prompt
    if local_episodes % args.local_mini_batch_size:
        sizes = f"({local_episodes}) must be a multiple of local_mini_batch_size ({args.local_mini_batch_size})"
        bad_input(f"local_rollout_batch_size * number_samples_per_prompt {sizes}; change one of them")
    if args.local_mini_batch_size % args.per_device_train_batch_size:
        sizes = f"({args.local_mini_batch_size}) must be a multiple of per_device_train_batch_size"
        bad_input(f"local_mini_batch_size {sizes} ({args.per_device_train_batch_size}); change one of them")
    args.num_training_steps = args.total_episodes // args.episodes_per_step
    if args.vllm_gpus and min(args.vllm_gpus) < int(os.environ.get("LOCAL_WORLD_SIZE", 1)):
        bad_input(f"--vllm_gpus {args.vllm_gpus} overlap the learners', which take the first GPUs, one each")
    if args.vllm_gpus and max(args.vllm_gpus) >= torch.cuda.device_count():
        bad_input(f"--vllm_gpus {args.vllm_gpus}: only {torch.cuda.device_count()} GPUs are visible")
    if args.vllm_tensor_parallel_size not in (1, len(args.vllm_gpus)):
        bad_input("--vllm_tensor_parallel_size must be the number of --vllm_gpus, or 1")
    if args.num_training_steps == 0:
        bad_input(f"--total_episodes {args.total_episodes} is less than one training step of {args.episodes_per_step}")
    args.num_updates = args.num_training_steps * args.num_epochs * (local_episodes // args.local_mini_batch_size)
    args.warm_up_steps = args.warm_up_steps or round(args.warmup_ratio * args.num_updates)
    eval_every = max(1, args.num_training_steps // args.num_evals) if args.num_evals else args.num_training_steps
    args.eval_versions = tuple(range(0, max(1, args.num_training_steps - 1), eval_every))
    if args.kl_estimator != "kl1" and args.beta > 0 and rank == 0:
        print(f"Warning: {args.kl_estimator} in the reward barely pulls the policy back; kl1 does (2510.01555)")
    return args


# ---------------------------------------------------------------------------------------------------------- data


def load_rows(path: str, split: str) -> list[dict]:
    """Rows of a .parquet or .jsonl file, or of a split of a dataset on the hub."""
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    reader = {".parquet": "parquet", ".jsonl": "json", ".json": "json"}.get(Path(path).suffix)
    if reader and not Path(path).is_file():
        hint = "; run `python scripts/make_debug_assets.py` first" if path.startswith("debug_assets/") else ""
        bad_input(f"{path}: no such file{hint}")
    try:
        if reader is None:
            return datasets.load_dataset(path, split=split).to_list()
        with tempfile.TemporaryDirectory() as cache:
            return datasets.load_dataset(reader, data_files=path, split="train", cache_dir=cache).to_list()
    except Exception as error:
        what = f"cannot be read as {reader}" if reader else "neither a .parquet or .jsonl file nor on the hub"
        bad_input(f"{path}: {what} ({first_line(error.__cause__ or error)})")


def prepare_prompts(path: str, split: str, tokenizer, args: Args) -> list[dict]:
    """Loads, checks and tokenizes prompts, in the schema of verl's parquet files.

    A row has `prompt` (a string, or messages {role, content}, rendered with the chat template), `data_source`,
    `reward_model: {ground_truth}` and, optionally, `extra_info`. Returns rows {index, prompt, prompt_ids, data_source,
    ground_truth, extra_info}; bad input names file, column and row.
    """
    rows, prompts = load_rows(path, split), []
    if not rows:
        bad_input(f"{path}: the dataset is empty")
    if "prompt" not in rows[0]:
        bad_input(f"{path}: there is no column `prompt`; the columns are {', '.join(rows[0])}")
    if args.apply_verifiable_reward and "data_source" not in rows[0] and not args.reward_fn:
        bad_input(
            f"{path}: there is no column `data_source`, which chooses the reward function; or name a --reward_fn"
        )
    for index, row in enumerate(rows):
        where, prompt = f"{path}, row {index}", row["prompt"]
        reward_model = row.get("reward_model")
        ground_truth = reward_model.get("ground_truth") if isinstance(reward_model, dict) else None
        if args.apply_verifiable_reward and ground_truth is None:
            bad_input(f"{where}: `reward_model.ground_truth` is missing, and the verifiable reward needs it")
        if isinstance(prompt, str):
            ids = tokenizer(prompt)["input_ids"]
        elif not (prompt and isinstance(prompt, list)) or not all(
            isinstance(m, dict) and m.get("role") and m.get("content") for m in prompt
        ):
            bad_input(f"{where}: `prompt` must be a string or a list of messages with role and content")
        elif not tokenizer.chat_template:
            bad_input(
                f"{where}: `prompt` holds messages and the tokenizer has no chat template; give a --chat_template"
            )
        else:
            # Rendered first, then tokenized without special tokens: the template writes its own BOS.
            prompt = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
            ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        if 0 < len(ids) <= args.max_prompt_token_length:
            kept = {"index": index, "prompt": prompt, "prompt_ids": ids, "ground_truth": ground_truth}
            prompts.append({**kept, "data_source": row.get("data_source"), "extra_info": row.get("extra_info")})
    limit = f"--max_prompt_token_length {args.max_prompt_token_length}"
    if not prompts:
        bad_input(f"{path}: none of its {len(rows)} prompts has between 1 token and {limit}")
    if len(prompts) < len(rows) and int(os.environ.get("RANK", 0)) == 0:
        print(f"{path}: dropped {len(rows) - len(prompts)} of {len(rows)} prompts, empty or longer than {limit}")
    return prompts


def draw_prompts(num_prompts: int, start: int, count: int, seed: int) -> list[int]:
    """Indices of the prompts number `start` to `start + count` that the run draws.

    Every pass over the dataset is one seeded permutation: a prompt comes once per pass whatever the batch size, and
    the position in the data is one number.

    >>> sorted(draw_prompts(5, 0, 3, seed=1) + draw_prompts(5, 3, 2, seed=1))
    [0, 1, 2, 3, 4]
    """
    indices = []
    while count > 0:
        passes, offset = divmod(start, num_prompts)
        generator = torch.Generator().manual_seed(stable_hash(seed, "prompts", passes))
        taken = torch.randperm(num_prompts, generator=generator)[offset : offset + count].tolist()
        indices += taken
        start, count = start + len(taken), count - len(taken)
    return indices


# ------------------------------------------------------------------------------------------------------- rewards


def compute_score(data_source: str, response: str, ground_truth: str) -> float:
    """The verifiable reward of a response: 1.0 when right, 0.0 otherwise.

    >>> compute_score("debug/sorting", "12358", "12358")
    1.0
    >>> compute_score("openai/gsm8k", "6 * 200 is 1,200. #### $1,200.", "1200")
    1.0
    """
    if data_source == "debug/sorting":
        return float(response.strip() == ground_truth.strip())
    if data_source == "openai/gsm8k":
        # The number after the last "####", else the last number.
        number = r"-?\$?\d[\d,]*(?:\.\d+)?|-?\$?\.\d+"
        answers = re.findall(number, response.rsplit("####", 1)[1]) if "####" in response else []
        answer = answers[0] if answers else (re.findall(number, response) or [None])[-1]
        clean = [re.sub(r"[$,\s]", "", text or "nan").rstrip(".") for text in (answer, ground_truth)]
        try:
            return float(float(clean[0]) == float(clean[1]))
        except ValueError:
            return 0.0
    known = "debug/sorting, openai/gsm8k"
    raise NotImplementedError(f"no reward for data_source {data_source!r}; known: {known}. For your own: --reward_fn")


def load_reward_fn(spec: str | None) -> Callable[..., float]:
    """compute_score, or the function that `path/to/file.py:function` names."""
    if spec is None:
        return lambda *args, extra_info: compute_score(*args)
    path, _, name = spec.rpartition(":")
    if not Path(path).is_file():
        bad_input(f"--reward_fn {spec}: no such file; give path/to/file.py:function")
    module_spec = importlib.util.spec_from_file_location("reward_fn", path)
    module = importlib.util.module_from_spec(module_spec)
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:
        bad_input(f"--reward_fn {spec}: {path} cannot be imported: {type(error).__name__}: {error}")
    if not callable(getattr(module, name, None)):
        bad_input(f"--reward_fn {spec}: there is no function {name!r} in {path}")
    return getattr(module, name)


R1_FORMAT = r"\s*<think>.*?</think>\s*<answer>.*?</answer>\s*"


def score_responses(
    args: Args, reward_fn: Callable, tokenizer, rows: list[dict], responses: list[list[int]]
) -> dict[str, list]:
    """Scores a response to each row: {scores, verifiable (what the reward function said), texts}.

    With non_stop_penalty the penalty takes the place of all that was earned; `verifiable` is what it was before.
    """
    texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
    scores, verifiable = [], []
    for row, ids, text in zip(rows, responses, texts, strict=True):
        right = 0.0
        if args.apply_verifiable_reward:
            right = float(reward_fn(row["data_source"], text, row["ground_truth"], extra_info=row["extra_info"]))
        score = right * args.verification_reward
        if args.add_r1_style_format_reward and re.fullmatch(R1_FORMAT, text, re.DOTALL):
            score += args.r1_style_format_reward
        if args.non_stop_penalty and (ids[-1] not in args.stop_token_ids or len(ids) < args.min_response_length):
            score = args.penalty_reward_value
        scores.append(score)
        verifiable.append(right)
    return {"scores": scores, "verifiable": verifiable, "texts": texts}


def check_rewards(args: Args, reward_fn: Callable, rows: list[dict]) -> dict[str, float]:
    """Scores the ground truth of one row of each data source; a reward that cannot do that is bad input."""
    examples = {}
    for row in rows if args.apply_verifiable_reward else []:
        source, truth = row["data_source"], row["ground_truth"]
        if source not in examples:
            try:
                examples[source] = float(reward_fn(source, str(truth), truth, extra_info=row["extra_info"]))
            except NotImplementedError as error:
                bad_input(f"row {row['index']}: {error}")
            except Exception as error:
                name = args.reward_fn or "compute_score"
                bad_input(f"row {row['index']}: {name} fails on the ground truth {truth!r}: {error!r}")
    return examples


# -------------------------------------------------------------------------------------------------------- models


def without_dropout(config):
    """The config with every dropout at 0: else the same weights give other log-probabilities (1909.08593, p. 3)."""
    for name, value in vars(config).items():
        if isinstance(value, float) and "drop" in name:
            setattr(config, name, 0.0)
    return config


def load_tokenizer_and_config(args: Args) -> tuple:
    """The tokenizer and the policy's config; fills in the ids that end a response and the one that pads."""
    path, revision = args.model_name_or_path, args.model_revision
    for name in ("model_name_or_path", "tokenizer_name_or_path", "value_model_path"):
        where = getattr(args, name)
        try:
            if where and not Path(where).is_dir() and not try_to_load_from_cache(where, "config.json"):
                model_info(where, timeout=10)  # transformers would ask a hub out of reach for half a minute
            if where and name != "tokenizer_name_or_path":
                AutoConfig.from_pretrained(where)
            elif where or args.tokenizer_name_or_path is None:
                AutoTokenizer.from_pretrained(where or path)
        except Exception as error:
            hint = "; run `python scripts/make_debug_assets.py` first" if where.startswith("debug_assets/") else ""
            what = "tokenizer" if name == "tokenizer_name_or_path" else "model"
            bad_input(f"--{name} {where}: there is no {what}{hint} ({first_line(error)[:200]})")
    config = without_dropout(AutoConfig.from_pretrained(path, revision=revision))
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer_name_or_path or path, revision=revision)
    if args.chat_template:
        if not Path(args.chat_template).is_file():
            bad_input(f"--chat_template {args.chat_template}: no such file")
        tokenizer.chat_template = Path(args.chat_template).read_text()
    if len(tokenizer) > config.vocab_size:
        bad_input(f"the tokenizer has {len(tokenizer)} tokens and the model {config.vocab_size}: not one another's")
    try:
        eos = GenerationConfig.from_pretrained(path, revision=revision).eos_token_id
    except OSError:
        eos = config.eos_token_id
    stop_ids = {*(eos if isinstance(eos, list) else [eos]), args.stop_token_id} - {None}
    if args.stop_token is not None:
        stop_token = tokenizer.eos_token if args.stop_token == "eos" else args.stop_token
        if stop_token not in tokenizer.get_vocab():
            bad_input(f"--stop_token {args.stop_token!r} is not a token of the tokenizer; or give a --stop_token_id")
        stop_ids.add(tokenizer.convert_tokens_to_ids(stop_token))
    if not stop_ids:
        bad_input("nothing ends a response: the model names no eos token; give --stop_token or --stop_token_id")
    if not 0 <= min(stop_ids) <= max(stop_ids) < config.vocab_size:
        bad_input(f"the stop tokens {sorted(stop_ids)} are not all in the vocabulary of {config.vocab_size}")
    args.stop_token_ids = tuple(sorted(stop_ids))
    args.pad_token_id = args.stop_token_ids[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    return tokenizer, config


class ValueModel(torch.nn.Module):
    """A language model's backbone with a linear head that reads a value from every position."""

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.model = model  # AutoModelForSequenceClassification, of which the forward pass, which pools, is not used

    def forward(self, **inputs) -> torch.Tensor:
        hidden = self.model.base_model(**inputs).last_hidden_state  # (batch, length, hidden_size)
        with torch.autocast(hidden.device.type, enabled=False):
            return self.model.score(hidden.to(self.model.score.weight.dtype)).squeeze(-1)  # (batch, length)


def load_policy(args: Args, config, dtype: torch.dtype) -> torch.nn.Module:
    """The policy (float32, trained) or the reference policy (args.dtype, frozen)."""
    loading = {"revision": args.model_revision, "attn_implementation": args.attn_implementation}
    return AutoModelForCausalLM.from_pretrained(args.model_name_or_path, config=config, dtype=dtype, **loading)


def load_value_model(args: Args, config) -> ValueModel:
    """The value model; a head that the checkpoint lacks gets std 1/sqrt(hidden_size + 1) (2009.01325, p. 11)."""
    path, revision = args.model_name_or_path, args.model_revision
    if args.value_model_path:
        path, revision = args.value_model_path, None
        config = without_dropout(AutoConfig.from_pretrained(path))
    config = copy.deepcopy(config)  # the policy's has no labels
    config.num_labels = 1
    loading = {"revision": revision, "attn_implementation": args.attn_implementation, "output_loading_info": True}
    model, info = AutoModelForSequenceClassification.from_pretrained(
        path, config=config, dtype=torch.float32, **loading
    )
    if "score.weight" in info["missing_keys"]:
        generator = torch.Generator().manual_seed(stable_hash(args.seed, "value head"))
        std = 1 / math.sqrt(config.hidden_size + 1)
        model.score.weight.data = torch.randn(model.score.weight.shape, generator=generator) * std
    return ValueModel(model)


def collate(prompts: list[list[int]], responses: list[list[int]], pad_token_id: int, device) -> tuple:
    """Pads prompts on the left and responses on the right, to the longest of each.

    Returns the model's inputs, each (batch, prompt_length + response_length), and the response mask
    (batch, response_length). Masks come from lengths: a pad token that is also the end token must not hide it.

    >>> inputs, mask = collate([[5], [6, 7]], [[8, 9], [9]], pad_token_id=0, device="cpu")
    >>> inputs["input_ids"].tolist(), inputs["attention_mask"].tolist(), inputs["position_ids"].tolist(), mask.tolist()
    ([[0, 5, 8, 9], [6, 7, 9, 0]], [[0, 1, 1, 1], [1, 1, 1, 0]], [[0, 0, 1, 2], [0, 1, 2, 2]], [[1, 1], [1, 0]])
    """
    prompt_length, response_length = max(map(len, prompts)), max(map(len, responses))
    ids, mask = [], []
    for prompt, response in zip(prompts, responses, strict=True):
        left, right = prompt_length - len(prompt), response_length - len(response)
        ids.append([pad_token_id] * left + prompt + response + [pad_token_id] * right)
        mask.append([0] * left + [1] * (len(prompt) + len(response)) + [0] * right)
    attention_mask = torch.tensor(mask, device=device)
    inputs = {
        "input_ids": torch.tensor(ids, device=device),
        "attention_mask": attention_mask,
        "position_ids": (attention_mask.cumsum(1) - 1).clamp(min=0),
        "use_cache": False,
    }
    return inputs, attention_mask[:, prompt_length:]


def policy_forward(model, inputs: dict, response_length: int, temperature: float) -> tuple:
    """Log-probabilities of the response tokens, and the entropies where they were sampled (0 without gradients).

    inputs: from collate. Returns two tensors (batch, response_length) in float32. Only the logits of the response are
    computed, and their float32 softmax in chunks, again in the backward pass: these are the step's largest tensors.
    """
    # The logits at a position predict the next token: one position earlier, and not the last.
    logits = model(**inputs, logits_to_keep=response_length + 1).logits[:, :-1]  # (batch, response_length, vocab)
    labels = inputs["input_ids"][:, inputs["input_ids"].shape[1] - response_length :]

    def chunk_logprobs(logits, labels):
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
        logprobs = torch.log_softmax(logits, dim=-1)
        chosen = logprobs.gather(-1, labels[..., None]).squeeze(-1)
        if not torch.is_grad_enabled():
            return chosen, torch.zeros_like(chosen)
        return chosen, -(logprobs.detach().exp() * logprobs.detach()).sum(-1)

    rows = max(1, 2**24 // max(1, logits[0].numel()))  # 64 MiB in float32
    chunks = zip(logits.split(rows), labels.split(rows), strict=True)
    results = [checkpoint(chunk_logprobs, *chunk, use_reentrant=False) for chunk in chunks]
    return torch.cat([chosen for chosen, _ in results]), torch.cat([entropy for _, entropy in results])


def value_forward(model, inputs: dict, response_length: int) -> torch.Tensor:
    """Values of the states in which the response tokens were chosen: (batch, response_length)."""
    return model(**inputs)[:, -response_length - 1 : -1]


def deal_rows(rows: list[int], lengths: list[tuple[int, int]], size: int, world_size: int) -> list[list[list[int]]]:
    """Cuts rows into micro-batches of `size` for each rank, rows of like length together: little padding, equal work.

    lengths[row] is (response length, prompt length). Returns [rank][micro-batch] -> rows.

    >>> deal_rows([0, 1, 2, 3], lengths=[(9, 1), (2, 1), (8, 1), (3, 1)], size=2, world_size=1)
    [[[1, 3], [2, 0]]]
    """
    ordered = sorted(rows, key=lambda row: (lengths[row], row))
    shares = [ordered[rank::world_size] for rank in range(world_size)]
    return [[share[i : i + size] for i in range(0, len(share), size)] for share in shares]


def draw_mini_batches(num_rows: int, size: int, *seed: Any) -> list[list[int]]:
    """One permutation of the rows of the whole batch, cut into minibatches of `size` rows (over all ranks)."""
    generator = torch.Generator().manual_seed(stable_hash("minibatches", *seed))
    order = torch.randperm(num_rows, generator=generator).tolist()
    return [order[i : i + size] for i in range(0, num_rows, size)]


# --------------------------------------------------------------------------------------------------- mathematics


def truncate_response(token_ids: list[int], stop_token_ids: list[int]) -> list[int]:
    """The response up to and including its first stop token; what follows was never said.

    >>> truncate_response([7, 1, 8, 1], stop_token_ids=[1])
    [7, 1]
    """
    for i, token_id in enumerate(token_ids):
        if token_id in stop_token_ids:
            return token_ids[: i + 1]
    return token_ids


def masked_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean of values where mask is 1; 0 if it is nowhere 1. Shapes alike; returns a scalar.

    >>> masked_mean(torch.tensor([1.0, 2.0, 9.0]), torch.tensor([1, 1, 0])).item()
    1.5
    """
    return (values * mask).sum() / mask.sum().clamp(min=1)


def masked_whiten(values: torch.Tensor, mask: torch.Tensor, shift_mean: bool = True) -> torch.Tensor:
    """Scales values to unit variance where mask is 1, and to mean 0 unless shift_mean is False (which keeps the mean).

    Bessel-corrected, eps 1e-8; 0 outside the mask. Shapes alike, any.

    >>> masked_whiten(torch.tensor([1.0, 3.0, 9.0]), torch.tensor([1, 1, 0])).tolist()
    [-0.7071067690849304, 0.7071067690849304, 0.0]
    """
    mean = masked_mean(values, mask)
    count = mask.sum()
    variance = ((values - mean) ** 2 * mask).sum() / (count - 1).clamp(min=1)
    whitened = (values - mean) * torch.rsqrt(variance + 1e-8)
    return (whitened if shift_mean else whitened + mean) * mask


def kl_penalty(logprobs: torch.Tensor, ref_logprobs: torch.Tensor, estimator: str) -> torch.Tensor:
    """Estimate per token of KL(policy || reference), from tokens sampled by the policy; shape of logprobs.

    With d = logprobs - ref_logprobs: kl1 = d, kl2 = d^2/2, kl3 = exp(-d) - 1 + d (http://joschu.net/blog/kl-approx.html).

    >>> kl_penalty(torch.tensor([0.0]), torch.tensor([-1.0]), "kl2").item()
    0.5
    """
    d = logprobs - ref_logprobs
    return {"kl1": lambda: d, "kl2": lambda: d**2 / 2, "kl3": lambda: torch.expm1(-d) + d}[estimator]()


def compute_gae(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, gamma: float, lam: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalized advantage estimation (1506.02438) over responses padded on the right.

    rewards, values, mask: (batch, response_length). Returns advantages (not whitened) and returns (advantages +
    values), both 0 outside the mask. The last token of a response is terminal.

    >>> advantages, returns = compute_gae(torch.tensor([[0.0, 1.0, 0.0]]), torch.tensor([[0.5, 0.5, 9.0]]),
    ...                                   torch.tensor([[1, 1, 0]]), gamma=1.0, lam=0.5)
    >>> advantages.tolist(), returns.tolist()
    ([[0.25, 0.5, 0.0]], [[0.75, 1.0, 0.0]])
    """
    rewards, values = rewards * mask, values * mask
    advantages = torch.zeros_like(values)
    advantage, next_value = torch.zeros_like(values[:, 0]), torch.zeros_like(values[:, 0])
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = delta + gamma * lam * advantage
        advantages[:, t], next_value = advantage, values[:, t]
    advantages = advantages * mask
    return advantages, advantages + values


def policy_loss(
    log_ratio: torch.Tensor, advantages: torch.Tensor, weights: torch.Tensor, cliprange: float, cliprange_higher: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """PPO's clipped surrogate (1707.06347) per token, times the importance weight of learner against sampler.

    log_ratio: new - old log-probabilities; all (batch, response_length). Returns the loss, and where the clip binds.

    >>> loss, clipped = policy_loss(torch.tensor([0.0, 1.0]), torch.tensor([2.0, 2.0]), torch.ones(2), 0.2, 0.2)
    >>> loss.tolist(), clipped.tolist()
    ([-2.0, -2.4000000953674316], [False, True])
    """
    ratio = log_ratio.exp()
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - cliprange, 1 + cliprange_higher)
    # The weight comes after the max: it says how much a sample counts, not which branch is the pessimistic one.
    return torch.max(plain, clipped) * weights, clipped > plain


def value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, cliprange_value: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Half the squared error of the values per token, clipped around the old values unless cliprange_value is 0.

    All (batch, response_length). Returns the loss and a mask of where the clipped branch binds.

    >>> value_loss(torch.tensor([3.0]), torch.tensor([0.0]), torch.tensor([2.0]), 1.0)
    (tensor([0.5000]), tensor([False]))
    """
    loss = (values - returns) ** 2 / 2
    if not cliprange_value:
        return loss, torch.zeros_like(loss, dtype=torch.bool)
    clipped_values = old_values + (values - old_values).clamp(-cliprange_value, cliprange_value)
    clipped_loss = (clipped_values - returns) ** 2 / 2
    return torch.max(loss, clipped_loss), clipped_loss > loss


def importance_weights(old_logprobs: torch.Tensor, sampler_logprobs: torch.Tensor, cap: float) -> torch.Tensor:
    """min(exp(old - sampler), cap) per token; ones where cap is 0. Shape of old_logprobs.

    vLLM's kernels are not the learner's, so what it samples is slightly off-policy; the cap bounds the variance
    (truncated importance sampling, https://fengyao.notion.site/off-policy-rl; decoupled PPO, 2110.00641).
    """
    return (old_logprobs - sampler_logprobs).exp().clamp(max=cap) if cap else torch.ones_like(old_logprobs)


def lr_multiplier(update: int, args: Args) -> float:
    """Learning rate of optimizer update `update`, from 0, as a share of the base rate; above 0 to the end.

    >>> args = Args(warm_up_steps=2, num_updates=4)
    >>> [lr_multiplier(u, args) for u in range(4)]
    [0.5, 1.0, 1.0, 0.5]
    """
    if update < args.warm_up_steps:
        return (update + 1) / args.warm_up_steps
    progress = (update - args.warm_up_steps) / max(1, args.num_updates - args.warm_up_steps)  # in [0, 1)
    return {"linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2, "constant": 1.0}[
        args.lr_scheduler_type
    ]


# ---------------------------------------------------------------------------------------------------- generation

# A process beside the script that outlives it. However the script ends, SIGKILL included, the pipe to it closes; then
# what is left of vLLM's processes ends, and the folder in shared memory goes. argv: pid of the script, folder.
WATCHER = """
import contextlib, psutil, select, shutil, sys
script, engine = psutil.Process(int(sys.argv[1])), set()
before = set(script.children(recursive=True))
with contextlib.suppress(psutil.Error):
    while not select.select([sys.stdin], [], [], 0.2)[0]:  # until the engine is up
        engine |= set(script.children(recursive=True)) - before
sys.stdin.read()  # until the script is gone
for process in list(engine):
    with contextlib.suppress(psutil.Error):
        engine |= set(process.children(recursive=True))
for process in engine:
    with contextlib.suppress(psutil.Error):
        if "resource_tracker" not in " ".join(process.cmdline()):  # it removes shared memory, and then ends by itself
            process.kill()
shutil.rmtree(sys.argv[2], ignore_errors=True)
"""


def start_vllm(args: Args, config, max_length: int) -> dict:
    """Starts vLLM in processes of its own, with random weights: the first sync must bring every tensor, or it shows.

    Returns the engine: {llm, processes (vLLM's, to watch), sync_dir (memory-backed folder for weights), watcher}.
    """
    cuda = torch.cuda.is_available()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker,ignore::FutureWarning")  # of vLLM's processes
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # forked processes would hold the watcher's pipe open
    if cuda:
        os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # CUDA IPC handles, to its own worker process
    else:
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
        os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")  # one sampler helper compiles, for 6 to 20 s
    sync_dir = tempfile.mkdtemp(prefix="tandem_", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
    watch = [sys.executable, "-c", WATCHER, str(os.getpid()), sync_dir]
    watcher = subprocess.Popen(watch, stdin=subprocess.PIPE, start_new_session=True)
    # The engine is a world of its own: what the launcher tells the learner about ranks and ports is not for it.
    launcher = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
    launcher += ("CUDA_VISIBLE_DEVICES",) if args.vllm_gpus else ()
    hidden = {k: os.environ.pop(k) for k in list(os.environ) if k in launcher or k.startswith("TORCHELASTIC")}
    if args.vllm_gpus:
        visible = hidden.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible.split(",")[gpu] for gpu in args.vllm_gpus)
    earlier = set(multiprocessing.active_children())
    try:
        from vllm import LLM

        if not cuda:  # vLLM cannot reload what it started with load_format="dummy"
            AutoModelForCausalLM.from_config(config).save_pretrained(sync_dir)
        llm = LLM(
            model=args.model_name_or_path if cuda else sync_dir,
            revision=args.model_revision if cuda else None,
            load_format="dummy" if cuda else "auto",
            skip_tokenizer_init=True,  # token ids go in and come out
            generation_config="vllm",  # not the model's top-k and friends
            logprobs_mode="processed_logprobs",  # of the distribution at the sampling temperature
            dtype=args.dtype,
            seed=args.seed,
            max_model_len=max_length,
            tensor_parallel_size=args.vllm_tensor_parallel_size,
            gpu_memory_utilization=args.vllm_gpu_memory_utilization,
            enforce_eager=args.vllm_enforce_eager or not cuda,
            # On the CPU a seeded request must not be prefilled in two parts: the engine dies (0.32).
            enable_chunked_prefill=cuda,
            max_num_batched_tokens=None if cuda else max(8192, max_length),
            weight_transfer_config={"backend": "nccl" if args.vllm_gpus else "ipc"} if cuda else None,
            use_tqdm_on_load=False,
        )
    finally:
        if args.vllm_gpus:
            del os.environ["CUDA_VISIBLE_DEVICES"]
        os.environ.update(hidden)
    watcher.stdin.write(b"up\n")
    watcher.stdin.flush()
    processes = [process for process in multiprocessing.active_children() if process not in earlier]
    return {"llm": llm, "processes": processes, "sync_dir": sync_dir, "watcher": watcher}


def stop_vllm(engine: dict) -> None:
    """Ends vLLM's processes, politely at first."""
    for process in engine["processes"]:
        process.terminate()
    for process in engine["processes"]:
        process.join(timeout=3)
    engine["watcher"].stdin.close()  # the watcher ends what is left
    engine["watcher"].wait()


def check_engine(engine: dict) -> None:
    """Raises RuntimeError if a process of vLLM's has died.

    vLLM's `generate` neither returns nor raises when its engine process is killed (0.32): so every wait for it looks.
    """
    for process in engine["processes"]:
        if not process.is_alive():
            died = f"{process.name} (pid {process.pid}) died with exit code {process.exitcode}"
            raise RuntimeError(f"vLLM's process {died}; the run cannot go on")


def call_engine(engine: dict, function: Callable, *args) -> Any:
    """function(*args) in a thread, with an eye on vLLM's processes while it runs."""
    outcome = queue.Queue(maxsize=1)

    def call():
        try:
            outcome.put((function(*args), None))
        except BaseException as error:
            outcome.put((None, error))

    threading.Thread(target=call, daemon=True).start()
    while True:
        with contextlib.suppress(queue.Empty):
            result, error = outcome.get(timeout=0.5)
            if error is not None:
                raise error
            return result
        check_engine(engine)


def on_main_process(accelerator: Accelerator, function: Callable, *args) -> Any:
    """Runs function on rank 0 and returns its result on every rank; if it raises, every rank raises.

    Without it the other ranks would wait for ever for a result that does not come.
    """
    message, error = [None, None], None
    if accelerator.is_main_process:
        try:
            message[0] = function(*args)
        except Exception as raised:
            error, message[1] = raised, f"{type(raised).__name__}: {raised}"
    broadcast_object_list(message)
    if error is not None:
        raise error
    if message[1] is not None:
        raise RuntimeError(f"rank 0 failed: {message[1]}")
    return message[0]


def connect_weight_sync(accelerator: Accelerator, policy, llm, args: Args) -> Any:
    """On CUDA the sending end of vLLM's weight-transfer API, for every rank; elsewhere None: weights go by file."""
    if not torch.cuda.is_available():
        return None
    from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.base import ModuleSource
    from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    client = llm and SimpleNamespace(
        init_weight_transfer_engine=lambda info: llm.init_weight_transfer_engine({"init_info": info}),
        start_weight_update=llm.start_weight_update,
        update_weights=lambda info: llm.update_weights({"update_info": info}),
        finish_weight_update=llm.finish_weight_update,
    )
    source = ModuleSource(accelerator.unwrap_model(policy))
    init_info = IPCTrainerInitInfo(rank=accelerator.process_index)
    if args.vllm_gpus:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = {"master_address": "127.0.0.1", "master_port": free.getsockname()[1]}
        world_size = 1 + args.vllm_tensor_parallel_size  # rank 0 of the learners, and vLLM's workers
        init_info = NCCLTrainerInitInfo(rank=accelerator.process_index, world_size=world_size, **address)
    return WeightTransferTrainerFactory.trainer_init(init_info, client=client, source=source)


def sync_weights(accelerator: Accelerator, policy, engine: dict, sender: Any) -> None:
    """Brings the policy's weights to vLLM, which must be idle, and empties its prefix cache. Called on every rank."""
    if sender is not None:
        sender.send_weights()
    state = None if sender else accelerator.get_state_dict(policy)

    def reload_weights():
        llm = engine["llm"]
        if sender is None:
            # Every name that vLLM may look for, a tied lm_head too: what is missing keeps its old value, silently.
            names = [name for name, _ in accelerator.unwrap_model(policy).named_parameters(remove_duplicate=False)]
            weights = {name: state[name].detach().cpu().clone() for name in names}
            save_file(weights, os.path.join(engine["sync_dir"], "model.safetensors"), metadata={"format": "pt"})
            llm.collective_rpc("reload_weights", kwargs={"weights_path": engine["sync_dir"]})
        if not llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not empty its prefix cache: it was not idle during the weight sync")

    on_main_process(accelerator, call_engine, engine, reload_weights)


def generate_vllm(llm, prompts: list[list[int]], seeds: list[int], temperature: float, args: Args) -> tuple:
    """Samples a response to each prompt: token ids as sampled, stop token included, and their log-probabilities.

    One request and one seed per response, whatever else is in the batch, so that a run can be repeated (the seeds are
    hashes: vLLM gives neighbouring seeds shared streams). Returns (responses, logprobs), two lists of lists.
    """
    from vllm import SamplingParams

    sampling = {"temperature": temperature, "max_tokens": args.response_length, "stop_token_ids": args.stop_token_ids}
    sampling |= {"ignore_eos": True}  # the end tokens are those in stop_token_ids, and no others
    sampling |= {"logprobs": 0, "flat_logprobs": True, "detokenize": False}  # logprobs of the sampled token only
    # The whole batch at once: otherwise the engine starts on the first requests while others are still coming, and the
    # batches that it forms, and so the last bits of its results, depend on the time.
    llm.sleep(level=0)
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    llm.enqueue(requests, [SamplingParams(seed=seed, **sampling) for seed in seeds], use_tqdm=False)
    llm.wake_up(tags=["scheduling"])
    outputs = llm.wait_for_completion(use_tqdm=False)  # in the order of the requests
    responses, logprobs = [], []
    for output, prompt in zip(outputs, prompts, strict=True):
        if output.prompt_token_ids != prompt:
            raise RuntimeError(f"vLLM's request {output.request_id} holds another prompt than the one it was given")
        responses.append(truncate_response(list(output.outputs[0].token_ids), args.stop_token_ids))
        logprobs.append(list(output.outputs[0].logprobs.logprobs)[: len(responses[-1])])
    return responses, logprobs


def generation_thread(engine: dict, prompts_Q: queue.Queue, response_Q: queue.Queue, args: Args) -> None:
    """Answers each request in prompts_Q with a rollout in response_Q, or with the exception that stopped it.

    A request is {step, version (of vLLM's weights), ids, prompts, seeds, evaluation (held-out prompts, or none)}; a
    rollout is the request without the last three, and with responses, logprobs, evaluation_responses and times. The
    thread never touches weights, and while it generates nobody else touches vLLM.
    """
    while True:
        times = {}
        with timed(times, "wait_for_prompts"):
            request = prompts_Q.get()
        try:
            prompts, seeds, held_out = (request.pop(name) for name in ("prompts", "seeds", "evaluation"))
            responses, logprobs, answers = [], [], []
            if prompts:
                with timed(times, "generation"):
                    responses, logprobs = generate_vllm(engine["llm"], prompts, seeds, args.temperature, args)
            if held_out:
                with timed(times, "evaluation"):
                    seeds = [stable_hash(args.seed, "evaluation", i) for i in range(len(held_out))]
                    answers, _ = generate_vllm(engine["llm"], held_out, seeds, args.eval_temperature, args)
            request.update(responses=responses, logprobs=logprobs, evaluation_responses=answers, times=times)
            response_Q.put(request)
        except BaseException as error:
            response_Q.put(error)
            return


def receive_rollout(engine: dict, response_Q: queue.Queue) -> dict:
    """The next rollout; raises what stopped the generation thread, or RuntimeError if a process of vLLM's has died."""
    while True:
        with contextlib.suppress(queue.Empty):
            rollout = response_Q.get(timeout=0.5)
            if isinstance(rollout, BaseException):
                check_engine(engine)
                raise RuntimeError(f"generation failed with {type(rollout).__name__}: {rollout}") from rollout
            return rollout
        check_engine(engine)


def probe_sync(accelerator: Accelerator, policy, engine: dict, prompts: list[list[int]], args: Args) -> float:
    """Largest difference between vLLM's and the learner's log-probabilities, on a short generation at equal weights.

    vLLM must be idle. Raises RuntimeError when they are not the same model: a weight that the sync did not bring.
    """
    short = replace(args, response_length=min(16, args.response_length))
    request = (engine.get("llm"), prompts, list(range(1, len(prompts) + 1)), args.temperature, short)
    responses, sampler_logprobs = on_main_process(accelerator, call_engine, engine, generate_vllm, *request)
    inputs, mask = collate(prompts, responses, args.pad_token_id, accelerator.device)
    with torch.no_grad(), autocast(args, accelerator):
        logprobs, _ = policy_forward(policy, inputs, mask.shape[1], args.temperature)
    sampler = torch.tensor(list(chain(*sampler_logprobs)), device=accelerator.device)
    difference = (logprobs[mask.bool()] - sampler).abs()
    if difference.mean() > (1e-3 if args.dtype == "float32" else 0.1):
        raise RuntimeError(
            f"with the same weights vLLM's log-probabilities are not the learner's (mean difference "
            f"{difference.mean():.2g}): weights did not reach it, or its model differs"
        )
    return difference.max().item()


# --------------------------------------------------------------------------------------------- forward and backward


def autocast(args: Args, accelerator: Accelerator):
    """The context in which models compute in args.dtype."""
    return torch.autocast(accelerator.device.type, dtype=torch.bfloat16, enabled=args.dtype == "bfloat16")


def forward_batch(
    accelerator: Accelerator, forward: Callable, micro_batches: list[list[int]], batch: dict, args: Args
) -> torch.Tensor:
    """Per-token results for the whole batch, without gradients, from the micro-batches of this rank and the others.

    forward(inputs, width) -> (micro_batch, width). Returns (episodes, response_length), 0 outside the mask.
    """
    whole = torch.zeros_like(batch["mask"])
    with torch.no_grad(), autocast(args, accelerator):
        for rows in micro_batches:
            prompts, responses = ([batch[name][row] for row in rows] for name in ("prompts", "responses"))
            inputs, mask = collate(prompts, responses, args.pad_token_id, accelerator.device)
            whole[rows, : mask.shape[1]] = forward(inputs, mask.shape[1]) * mask
    return accelerator.reduce(whole)  # a row is 0 on all ranks but one: the sum is exact


def accumulate_gradients(
    accelerator: Accelerator, policy, value_model, batch: dict, mini_batch: list[int], args: Args
) -> dict[str, torch.Tensor]:
    """Forward and backward passes of one optimizer batch, in micro-batches; nothing is stepped.

    mini_batch: rows of the batch, over all ranks, of which this rank takes its share. The loss is the mean over the
    response tokens of mini_batch on all ranks, so the gradient does not depend on how it is cut (2503.14476, 3.3).
    Returns sums over this rank's response tokens (and of tokens: `real`, and `computed` with padding), in float64.
    """
    num_tokens = max(1, sum(batch["lengths"][row][0] for row in mini_batch))
    shares = deal_rows(mini_batch, batch["lengths"], args.per_device_train_batch_size, accelerator.num_processes)
    micro_batches, sums = shares[accelerator.process_index], Counter()
    for i, rows in enumerate(micro_batches):
        prompts, responses = ([batch[name][row] for row in rows] for name in ("prompts", "responses"))
        inputs, mask = collate(prompts, responses, args.pad_token_id, accelerator.device)
        width = mask.shape[1]
        names = ("logprobs", "weights", "advantages", "values", "returns")
        old_logprobs, weights, advantages, old_values, returns = (batch[name][rows, :width] for name in names)
        with contextlib.ExitStack() as stack:
            if i < len(micro_batches) - 1:  # gradients travel between ranks once, with the last micro-batch
                stack.enter_context(accelerator.no_sync(policy))
                stack.enter_context(accelerator.no_sync(value_model))
            with autocast(args, accelerator):
                logprobs, entropy = policy_forward(policy, inputs, width, args.temperature)
                values = value_forward(value_model, inputs, width)
            log_ratio = (logprobs - old_logprobs) * mask  # (micro_batch, width), as all below
            pg_loss, clipped = policy_loss(log_ratio, advantages, weights, args.cliprange, args.cliprange)
            vf_loss, values_clipped = value_loss(values, old_values, returns, args.cliprange_value)
            # Ranks average their gradients; times the number of ranks, that is the sum.
            accelerator.backward((pg_loss * mask).sum() / num_tokens * accelerator.num_processes)
            accelerator.backward((vf_loss * mask).sum() / num_tokens * accelerator.num_processes)
        with torch.no_grad():
            ratio = log_ratio.exp()
            per_token = {
                "policy_loss": pg_loss,
                "value_loss": vf_loss,
                "approxkl": log_ratio**2 / 2,
                "entropy": entropy,
            }
            per_token |= {
                "clipped": clipped,
                "values_clipped": values_clipped,
                "ratio": ratio,
                "ratio_squared": ratio**2,
            }
            sums.update({name: (x * mask).sum(dtype=torch.float64) for name, x in per_token.items()})
            computed = torch.ones_like(inputs["input_ids"])
            sums.update(real=inputs["attention_mask"].sum().double(), computed=computed.sum().double())
    return dict(sums)


# ------------------------------------------------------------------------------------------------------- logging

CONSOLE_FIGURES = {"score": "objective/scores", "kl": "objective/kl", "length": "val/sequence_lengths"}
CONSOLE_FIGURES |= {"right": "objective/verifiable_correct_rate", "episodes/s": "perf/episodes_per_second"}


@contextlib.contextmanager
def timed(times: dict, name: str):
    """Adds the seconds spent inside to times[name]."""
    start = time.perf_counter()
    yield
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    times[name] = times.get(name, 0.0) + time.perf_counter() - start


def mean_by_source(name: str, rows: list[dict], values: list[float]) -> dict[str, float]:
    """Mean of values, and where rows come from several data sources, the mean of each.

    >>> mean_by_source("eval/scores", [{"data_source": "a"}, {"data_source": "b"}], [1.0, 0.0])
    {'eval/scores': 0.5, 'eval/scores/a': 1.0, 'eval/scores/b': 0.0}
    """
    groups = {name: values}
    for row, value in zip(rows, values, strict=True):
        groups.setdefault(f"{name}/{row['data_source']}", []).append(value)
    return {key: sum(group) / len(group) for key, group in groups.items() if key == name or len(groups) > 2}


def print_samples(console: Console, title: str, samples: list[dict]) -> None:
    """A table of a few evaluation prompts, responses and scores."""
    columns = ("prompt", "response", "ground_truth", "score")
    table = Table(*columns, title=title, title_justify="left")
    for sample in samples:
        cells = [str(sample[column]) for column in columns]
        table.add_row(*(Text(cell if len(cell) <= 300 else f"{cell[:200]} ... {cell[-95:]}") for cell in cells))
    console.print(table)


def save_model(accelerator: Accelerator, policy, tokenizer, path: Path) -> None:
    """Writes the policy and its tokenizer in Hugging Face format; the folder is complete or not there."""
    state = accelerator.get_state_dict(policy)

    def write():
        unfinished = path.with_name(path.name + ".unfinished")
        accelerator.unwrap_model(policy).save_pretrained(unfinished, state_dict=state)
        tokenizer.save_pretrained(unfinished)
        unfinished.rename(path)

    on_main_process(accelerator, write)


def print_plan(args: Args, config, train_rows: list[dict], eval_rows: list[dict], examples: dict) -> None:
    """Prints what the run will do: data, steps, updates, memory, rewards."""
    with torch.device("meta"):
        parameters = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    trained, frozen = (factor * parameters / 2**30 for factor in (2 * 16, 4 if args.dtype == "float32" else 2))
    longest = max(len(row["prompt_ids"]) for row in train_rows)
    tokens = args.episodes_per_step * (longest + args.response_length)
    passes = args.num_training_steps * args.rollout_batch_size / len(train_rows)
    updates = args.num_updates // args.num_training_steps
    print(f"""Plan
  data     {len(train_rows):,} prompts of up to {longest} tokens, drawn {passes:.2f} times; {len(eval_rows):,} held out
  steps    {args.num_training_steps:,} of {args.rollout_batch_size:,} prompts x {args.number_samples_per_prompt} \
responses, at most {tokens:,} tokens each
  updates  {updates} a step, of {args.local_mini_batch_size * args.world_size:,} responses; {args.num_updates:,} in all
  model    {parameters:,} parameters
  memory   per rank, without activations: {trained:.2f} GiB for policy and value model (weights, gradients, AdamW),
           {frozen:.2f} GiB for the reference policy; {frozen:.2f} GiB for vLLM's weights""")
    for source, score in examples.items():
        print(f"  reward   the ground truth of a row of {source} scores {score:g}")


# ---------------------------------------------------------------------------------------------------------- main


def main() -> None:
    start_time = time.time()
    args = fill_in(tyro.cli(Args, description=__doc__.split("\n\n")[0]))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the shell started us with it ignored
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    transformers.utils.logging.set_verbosity_error()  # no reports on heads that are missing, as they should be
    transformers.utils.logging.disable_progress_bar()

    # ---- Everything that can be wrong, before a model is loaded
    if importlib.util.find_spec("vllm") is None:
        bad_input("vLLM is not installed (requirements.txt); ppo_sync.py --generation_backend transformers needs none")
    if not (args.apply_verifiable_reward or args.add_r1_style_format_reward):
        bad_input("there is no source of reward: use --apply_verifiable_reward or --add_r1_style_format_reward")
    reward_fn = load_reward_fn(args.reward_fn)
    tokenizer, config = load_tokenizer_and_config(args)
    train_rows = prepare_prompts(args.dataset, args.dataset_split, tokenizer, args)
    eval_rows = []
    if args.eval_dataset:
        eval_rows = prepare_prompts(args.eval_dataset, args.eval_dataset_split, tokenizer, args)
    examples = check_rewards(args, reward_fn, train_rows + eval_rows)
    max_length = max(len(row["prompt_ids"]) for row in train_rows + eval_rows) + args.response_length
    limit = getattr(config, "max_position_embeddings", None)
    if limit and max_length > limit:
        bad_input(f"prompts and --response_length take {max_length} tokens, and the model's positions end at {limit}")
    run_dir = Path(args.output_dir) / args.run_name
    if int(os.environ.get("RANK", 0)) == 0 and run_dir.exists():
        bad_input(f"{run_dir} holds another run; choose another --run_name or --output_dir")
    if args.with_tracking:
        import wandb

        login = os.environ.get("WANDB_API_KEY") or get_netrc_auth("https://api.wandb.ai")
        if os.environ.get("WANDB_MODE") not in ("offline", "disabled") and not login:
            bad_input("--with_tracking needs a login: run `wandb login`, or set WANDB_MODE=offline")
    if int(os.environ.get("RANK", 0)) == 0:
        print_plan(args, config, train_rows, eval_rows, examples)
    if args.dry_run:
        return

    # ---- Models, optimizers, vLLM
    accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(hours=2))])
    device, is_main, rank = accelerator.device, accelerator.is_main_process, accelerator.process_index
    args.run_name = broadcast_object_list([args.run_name])[0]  # it may hold the time
    run_dir, console = Path(args.output_dir) / args.run_name, Console(soft_wrap=True)
    if is_main:
        run_dir.mkdir(parents=True)
        (run_dir / "args.json").write_text(json.dumps(asdict(args), indent=2) + "\n")
        prompt_lengths = [len(row["prompt_ids"]) for row in train_rows]
        (run_dir / "token_length.json").write_text(json.dumps(prompt_lengths) + "\n")
        if args.with_tracking:
            names = {"project": args.wandb_project_name, "entity": args.wandb_entity, "name": args.run_name}
            wandb.init(config=asdict(args), **names)
            wandb.log({"token_length": wandb.Histogram(prompt_lengths)}, step=0)
    policy, value_model = load_policy(args, config, torch.float32), load_value_model(args, config)
    ref_policy = load_policy(args, config, getattr(torch, args.dtype)).to(device).eval().requires_grad_(False)
    for model in (policy, value_model.model):
        model.train()  # dropout is off in the config; gradient checkpointing works in training mode only
        if args.gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    adamw = {"eps": args.eps, "weight_decay": args.weight_decay}
    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.learning_rate, **adamw)
    value_optimizer = torch.optim.AdamW(value_model.parameters(), lr=args.value_learning_rate, **adamw)
    policy, optimizer = accelerator.prepare(policy, optimizer)
    value_model, value_optimizer = accelerator.prepare(value_model, value_optimizer)

    def draw_rows(step: int) -> tuple[list[int], list[dict]]:
        """Indices of the prompts of a training step, and its rows; the samples of a prompt stand side by side."""
        size = args.rollout_batch_size if step <= args.num_training_steps else 0
        drawn = draw_prompts(len(train_rows), (step - 1) * args.rollout_batch_size, size, args.seed)
        return drawn, [train_rows[i] for i in drawn for _ in range(args.number_samples_per_prompt)]

    def send(step: int, version: int) -> None:
        """Brings the policy, of this version, to vLLM and asks for the rollout of a training step, on every rank.

        After the last step there are no prompts to draw, and what is asked for is the last evaluation.
        """
        with timed(times, "weight_sync"):
            sync_weights(accelerator, policy, engine, sender)
        if args.sync_probe or step == 1:
            prompts = [row["prompt_ids"] for row in train_rows[:8]]
            metrics["mismatch/sync_probe"] = probe_sync(accelerator, policy, engine, prompts, args)
        if is_main:
            ids, rows = draw_rows(step)
            episode, due = (step - 1) * args.episodes_per_step, (*args.eval_versions, args.num_training_steps)
            request = {"step": step, "version": version, "ids": ids, "prompts": [row["prompt_ids"] for row in rows]}
            request["seeds"] = [stable_hash(args.seed, "episode", episode + i) for i in range(len(rows))]
            request["evaluation"] = [row["prompt_ids"] for row in eval_rows] if step - 1 in due else []
            prompts_Q.put(request)

    def report_evaluation(version: int, responses: list[list[int]]) -> dict:
        """Scores answers to the held-out prompts, prints and writes samples; returns the eval/* metrics."""
        scored = on_main_process(accelerator, score_responses, args, reward_fn, tokenizer, eval_rows, responses)
        metrics = {
            **mean_by_source("eval/verifiable_correct_rate", eval_rows, [float(v > 0) for v in scored["verifiable"]]),
            **mean_by_source("eval/scores", eval_rows, scored["scores"]),
            "eval/sequence_lengths": sum(map(len, responses)) / len(responses),
            "eval/stop_rate": sum(ids[-1] in args.stop_token_ids for ids in responses) / len(responses),
            "eval/policy_version": version,
        }
        correct_rates.append(metrics["eval/verifiable_correct_rate"])
        if is_main:
            kept = [{k: row[k] for k in ("prompt", "ground_truth", "data_source")} for row in eval_rows]
            results = zip(kept, scored["texts"], scored["scores"], scored["verifiable"], strict=True)
            samples = [
                {"policy_version": version, **row, "response": text, "score": score, "correct": verifiable > 0}
                for row, text, score, verifiable in results
            ]
            with open(run_dir / "samples.jsonl", "a") as file:
                file.writelines(json.dumps(sample) + "\n" for sample in samples)
            title = f"Held-out prompts, policy version {version}: {correct_rates[-1]:.1%} right"
            print_samples(console, title, samples[:4])
            if args.with_tracking:
                rows = [[str(value) for value in sample.values()] for sample in samples]
                wandb.log({"sample_completions": wandb.Table(columns=list(samples[0]), data=rows)}, step=version)
        return metrics

    engine, sender, update, correct_rates, waits = {}, None, 0, [], Counter()
    prompts_Q, response_Q = queue.Queue(maxsize=1), queue.Queue(maxsize=1)
    progress = Progress(*Progress.get_default_columns(), TextColumn("{task.fields[figures]}"), console=console)
    progress.disable = not (is_main and console.is_terminal)
    try:
        if is_main:
            console.print("Starting vLLM ...")
        on_main_process(accelerator, lambda: engine.update(start_vllm(args, config, max_length)))
        sender = connect_weight_sync(accelerator, policy, engine.get("llm"), args)
        threading.Thread(target=generation_thread, args=(engine, prompts_Q, response_Q, args), daemon=True).start()
        gc.freeze()  # the data set and the modules stay: a full collection would look through them for half a second
        progress.start()
        task = progress.add_task("training", total=args.num_training_steps, figures="")
        times, metrics = {}, {}
        send(step=1, version=0)
        for training_step in range(1, args.num_training_steps + 1):
            step_start, times = time.perf_counter(), {}
            version = training_step - 1  # of the policy: training steps completed

            # ---- 1. The responses to this step's prompts
            ids, rows = draw_rows(training_step)
            prompts = [row["prompt_ids"] for row in rows]
            depths = {"queue/prompts": prompts_Q.qsize(), "queue/responses": response_Q.qsize()}
            with timed(times, "wait_for_generation"):
                rollout = on_main_process(accelerator, receive_rollout, engine, response_Q)
            if rollout["step"] != training_step or rollout["ids"] != ids:
                raise RuntimeError(f"training step {training_step} was handed the rollout of step {rollout['step']}")
            responses, sampler_logprobs = rollout["responses"], rollout["logprobs"]

            # ---- 2. vLLM is idle: it gets the current policy and the next prompts, and generates while we train
            if args.async_mode and training_step < args.num_training_steps:
                send(step=training_step + 1, version=version)
            if rollout["evaluation_responses"]:
                metrics |= report_evaluation(rollout["version"], rollout["evaluation_responses"])

            # ---- 3. Scores
            with timed(times, "reward"):
                scored = on_main_process(accelerator, score_responses, args, reward_fn, tokenizer, rows, responses)
            scores = torch.tensor(scored["scores"], dtype=torch.float32, device=device)  # (episodes,)
            stopped = torch.tensor([ids[-1] in args.stop_token_ids for ids in responses], device=device)

            # ---- 4. Log-probabilities and values, (episodes, response_length). The old ones are computed in the very
            # micro-batches of the first epoch: in another shape the last bits differ, and the first ratio from 1
            sizes = torch.tensor([len(ids) for ids in responses], device=device)  # (episodes,)
            mask = (torch.arange(int(sizes.max()), device=device) < sizes[:, None]).float()
            lengths = [(len(response), len(prompt)) for prompt, response in zip(prompts, responses, strict=True)]
            batch = {"prompts": prompts, "responses": responses, "lengths": lengths, "scores": scores, "mask": mask}
            mini_batches = [
                draw_mini_batches(len(rows), args.local_mini_batch_size * args.world_size, args.seed, training_step, e)
                for e in range(args.num_epochs)
            ]
            size, ref_size = args.per_device_train_batch_size, args.local_rollout_forward_batch_size
            first = [m for rows_ in mini_batches[0] for m in deal_rows(rows_, lengths, size, args.world_size)[rank]]
            every = deal_rows(range(len(rows)), lengths, ref_size, args.world_size)[rank]
            with timed(times, "forward"):
                forwards = [
                    (lambda inputs, width: policy_forward(policy, inputs, width, args.temperature)[0], first),
                    (lambda inputs, width: value_forward(value_model, inputs, width), first),
                    (lambda inputs, width: policy_forward(ref_policy, inputs, width, args.temperature)[0], every),
                ]
                logprobs, values, ref_logprobs = (
                    forward_batch(accelerator, forward, micro, batch, args) for forward, micro in forwards
                )
            sampler = torch.zeros_like(mask)
            sampler[mask.bool()] = torch.tensor(list(chain(*sampler_logprobs)), device=device)

            # ---- 5. Rewards per token: the KL penalty everywhere, the score on the last token
            kl = kl_penalty(logprobs, ref_logprobs, args.kl_estimator) * mask
            rewards = -args.beta * kl
            rewards[torch.arange(len(rows), device=device), sizes - 1] += scores
            if args.whiten_rewards:
                rewards = masked_whiten(rewards, mask, shift_mean=False)

            # ---- 6. Advantages and value targets, on the whole batch
            advantages, returns = compute_gae(rewards, values, mask, args.gamma, args.lam)
            if args.value_lam != args.lam:
                _, returns = compute_gae(rewards, values, mask, args.gamma, args.value_lam)
            advantages = masked_whiten(advantages, mask)
            weights = importance_weights(logprobs, sampler, args.tis_cap)
            batch.update(logprobs=logprobs, ref_logprobs=ref_logprobs, sampler_logprobs=sampler, weights=weights)
            batch.update(values=values, rewards=rewards, advantages=advantages, returns=returns)
            if args.save_batches and is_main:
                (run_dir / "batches").mkdir(exist_ok=True)
                torch.save(batch, run_dir / "batches" / f"step_{training_step:06d}.pt")

            # ---- 7. Updates
            sums, grad_norms, value_grad_norms = Counter(), [], []
            with timed(times, "update"):
                for mini_batch in chain(*mini_batches):
                    sums.update(accumulate_gradients(accelerator, policy, value_model, batch, mini_batch, args))
                    grad_norms.append(accelerator.clip_grad_norm_(policy.parameters(), args.max_grad_norm))
                    value_grad_norms.append(accelerator.clip_grad_norm_(value_model.parameters(), args.max_grad_norm))
                    if not torch.isfinite(grad_norms[-1] + value_grad_norms[-1]):  # the same on every rank
                        torch.save(batch, run_dir / f"bad_batch_rank{rank}.pt")
                        message = "the gradient is not finite; the batch is saved in"
                        raise FloatingPointError(f"training step {training_step}: {message} {run_dir}")
                    lr = lr_multiplier(update, args)
                    for group in optimizer.param_groups:
                        group["lr"] = lr * args.learning_rate
                    for group in value_optimizer.param_groups:
                        group["lr"] = lr * args.value_learning_rate
                    if training_step > args.value_warmup_steps:
                        optimizer.step()
                    value_optimizer.step()
                    optimizer.zero_grad()
                    value_optimizer.zero_grad()
                    update += 1
            if not args.async_mode and training_step < args.num_training_steps:
                send(step=training_step + 1, version=training_step)

            # ---- 8. Metrics; README.md says what each means
            totals = accelerator.reduce(torch.stack(list(sums.values()))).tolist()
            sums = dict(zip(sums, totals, strict=True))
            mean = {name: value / (mask.sum().item() * args.num_epochs) for name, value in sums.items()}
            non_score_reward = (-args.beta * kl).sum(1)
            residual, target = (returns - values)[mask.bool()], returns[mask.bool()]
            waited = min(times["wait_for_generation"], rollout["times"].pop("evaluation", 0.0))  # for an evaluation
            training_time = time.perf_counter() - step_start - waited
            times["generation"], idle = rollout["times"]["generation"], rollout["times"]["wait_for_prompts"]
            waits.update(time=training_time, learner=times["wait_for_generation"] - waited, generator=idle)
            metrics |= {
                "training_step": training_step,
                "episode": training_step * args.episodes_per_step,
                "epoch": training_step * args.rollout_batch_size / len(train_rows),
                "lr": lr * args.learning_rate,
                "policy/version": version,
                "policy/staleness": version - rollout["version"],
                "objective/kl": ((logprobs - ref_logprobs) * mask).sum(1).mean(),
                "objective/scores": scores.mean(),
                "objective/rlhf_reward": (scores + non_score_reward).mean(),
                "objective/non_score_reward": non_score_reward.mean(),
                "objective/entropy": (-logprobs * mask).sum(1).mean(),
                "objective/loss": mean["policy_loss"] + mean["value_loss"],
                "loss/policy_avg": mean["policy_loss"],
                "loss/value_avg": mean["value_loss"],
                "policy/approxkl_avg": mean["approxkl"],
                "policy/clipfrac_avg": mean["clipped"],
                "policy/entropy_avg": mean["entropy"],
                "val/clipfrac_avg": mean["values_clipped"],
                "val/ratio": mean["ratio"],
                "val/ratio_var": max(0.0, mean["ratio_squared"] - mean["ratio"] ** 2),
                "val/sequence_lengths": mask.sum(1).mean(),
                "val/num_stop_token_ids": stopped.sum(),
                "val/stop_rate": stopped.float().mean(),
                "val/explained_variance": 1 - residual.var() / target.var().clamp(min=1e-8),
                "optim/grad_norm": torch.stack(grad_norms).mean(),
                "optim/value_grad_norm": torch.stack(value_grad_norms).mean(),
                "time/training": training_time,
                "time/from_scratch": time.time() - start_time,
                **{f"time/{name}": seconds for name, seconds in times.items()},
                **depths,
                "queue/wait_for_prompts": idle,
                "perf/episodes_per_second": len(rows) / training_time,
                "perf/response_tokens_per_second": mask.sum() / training_time,
                "perf/padding_fraction": 1 - sums["real"] / sums["computed"],
                "perf/memory_gib": (torch.cuda.max_memory_allocated() or psutil.Process().memory_info().rss) / 2**30,
            }
            right = [float(v > 0) for v in scored["verifiable"]]
            metrics |= mean_by_source("objective/verifiable_correct_rate", rows, right)
            difference = (logprobs - sampler) * mask
            trust = difference.exp()[mask.bool()]  # importance weights before they are cut off
            metrics |= {
                "mismatch/logprob_diff_mean": masked_mean(difference.abs(), mask),
                "mismatch/logprob_diff_max": difference.abs().max(),
                "mismatch/kl": masked_mean(kl_penalty(sampler, logprobs, "kl3"), mask),
                "mismatch/ess": trust.sum() ** 2 / (trust**2).sum() / len(trust),
                "mismatch/tis_clipfrac": (trust > (args.tis_cap or math.inf)).float().mean(),
            }

            # ---- 9. The evaluation after the last update
            if eval_rows and training_step == args.num_training_steps:
                send(step=training_step + 1, version=training_step)
                rollout = on_main_process(accelerator, receive_rollout, engine, response_Q)
                metrics |= report_evaluation(training_step, rollout["evaluation_responses"])
            metrics = {name: v.item() if isinstance(v, torch.Tensor) else v for name, v in metrics.items()}
            if is_main:
                with open(run_dir / "metrics.jsonl", "a") as file:
                    file.write(json.dumps(metrics) + "\n")
                if args.with_tracking:
                    wandb.log(metrics, step=training_step)
                figures = "  ".join(f"{name} {metrics[key]:.3g}" for name, key in CONSOLE_FIGURES.items())
                progress.update(task, advance=1, figures=figures)
                if not console.is_terminal and training_step % max(1, args.num_training_steps // 20) == 0:
                    console.print(f"step {training_step}/{args.num_training_steps}  {figures}")
            metrics = {}
        save_model(accelerator, policy, tokenizer, run_dir / "model")
    finally:
        gc.unfreeze()
        progress.stop()
        if engine:
            stop_vllm(engine)

    # ---- What came out
    if is_main:
        subprocess.run([sys.executable, Path(__file__).parent / "scripts" / "plot_runs.py", run_dir], check=False)
        if correct_rates:
            before, after = correct_rates[0], correct_rates[-1]
            console.print(f"Held-out prompts answered right: {before:.1%} before training, {after:.1%} after")
        learner, generator = (waits[name] / waits["time"] for name in ("learner", "generator"))
        if learner > generator:
            advice = (
                f"generation-bound: the learner waited for vLLM {learner:.0%} of the time; more --vllm_gpus or shorter"
            )
            console.print(f"{advice} responses help")
        else:
            advice = f"training-bound: vLLM waited for the learner {generator:.0%} of the time; more learners, larger"
            console.print(f"{advice} micro-batches or fewer epochs help")
        console.print(f"Model, metrics, samples and pictures: {run_dir}")
        if args.with_tracking:
            wandb.finish()
    accelerator.end_training()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        print("Interrupted", file=sys.stderr)
        sys.exit(130)
