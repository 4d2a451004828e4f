r"""PPO for language models (RLHF), the synchronous version: generate, then train.

No GPU needed, sets itself up, learns in minutes:

    bash scripts/train/debug/ppo_sync.sh

One GPU, shared by the learner and a vLLM engine; --num_processes 8 uses eight GPUs like this:

    accelerate launch --num_processes 1 ppo_sync.py \
        --dataset train.parquet --model_name_or_path Qwen/Qwen3-0.6B --save_freq 50

Eight GPUs, of which six train and two generate, each with an engine of its own:

    accelerate launch --num_processes 6 ppo_sync.py --vllm_gpus 6 7 ...

Two nodes of eight GPUs, the same command on each but for the rank:

    accelerate launch --num_machines 2 --machine_rank 0 --num_processes 16 \
        --main_process_ip HOST --main_process_port 29500 ppo_sync.py ...

Without vLLM, wherever torch runs:

    accelerate launch --num_processes 1 ppo_sync.py --generation_backend transformers ...

Training step g:

    main thread                         generation thread              vLLM (its own process)
    a. [vLLM is idle] sync weights ---------------------------------->  weights of version g - 1
    b. put prompts g in prompts_Q ----> get prompts, generate -------->  sample
       wait                             verifiable rewards
       get batch g from response_Q <--  put the responses with them
       share it with the other ranks
    c. checkpoint, reward model;
       updates with the other ranks

Every rank has these threads, and by default a vLLM engine. There is a thread so that the ranks can
tell one another while they wait if one of them has failed.

Every rank holds the whole batch (token ids and a few floats per token: small). So advantages and
minibatches are the same for one rank and for eight; forward and backward passes are shared out.

Deliberate simplifications:
 1. A response cut at `response_length` counts as finished: no bootstrap from its last value.
 2. Sampling is by temperature alone: top-p, top-k or a minimum length would change the
    distribution that is sampled from.
 3. One reward per response, on its last token; one turn, no tools; prompts are padded, not packed.

Where to start reading: `Rollout` and `Batch` are the data, the loop in `main()` is the algorithm.
Everything else is called from there.

arXiv: PPO 1707.06347; GAE 1506.02438; RLHF 1909.08593, 2009.01325; PPO's implementation details
2403.17031.
"""

import atexit
import contextlib
import copy
import errno
import fcntl
import functools
import hashlib
import importlib.util
import inspect
import itertools
import json
import math
import multiprocessing as mp
import os
import queue
import re
import resource
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import unicodedata
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from datetime import timedelta
from multiprocessing.connection import wait
from operator import methodcaller
from pathlib import Path
from typing import Any, Literal, NoReturn
from unittest import mock

import huggingface_hub
import psutil
import pyarrow.parquet
import torch
import transformers
import tyro
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, broadcast_object_list
from requests.utils import get_netrc_auth
from rich.console import Console
from rich.progress import track
from rich.table import Table
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import reduce_tensor
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

FilledIn = tyro.conf.Suppress  # such a field is computed by the script, not a command-line option

# Logits whose softmax is taken at once: 64 MiB in float32, or one row where that is more
SOFTMAX_CHUNK = 2**24
# Seconds that a reward worker may take to import the file of --reward_fn
REWARD_IMPORT_TIMEOUT = 300
# Seconds that vLLM may take to start, and for each message of a weight sync
VLLM_START_TIMEOUT = 1800
WEIGHT_SYNC_TIMEOUT = 300
# Format of checkpoints; to be raised when older ones can no longer be read
CHECKPOINT_FORMAT = 1


@dataclass
class Args:
    # -- The run
    exp_name: str = Path(__file__).stem
    """name of the experiment"""
    seed: int = 1
    """seed of everything random: order of prompts, sampling, minibatches"""
    run_name: str | None = None
    """folder of the run below output_dir; None: exp_name, seed and the time"""
    output_dir: str = "output"
    """where runs are written"""
    dry_run: bool = False
    """check arguments, data, rewards and the models' files, print the plan and stop"""

    # -- Data
    dataset: str = "debug_assets/train.parquet"
    """training prompts: a .parquet or .jsonl file, or a dataset on the hub"""
    dataset_split: str = "train"
    """split of the training prompts, when they are on the hub"""
    eval_dataset: str | None = None
    """held-out prompts, in the same form; None: no evaluation"""
    eval_dataset_split: str = "test"
    """split of the held-out prompts, when they are on the hub"""
    max_prompt_token_length: int = 256
    """longer prompts are dropped, and counted"""

    # -- Models
    model_name_or_path: str = "debug_assets/model"
    """policy and reference policy: a folder or a name on the hub"""
    model_revision: str | None = None
    """revision of the policy on the hub"""
    tokenizer_name_or_path: str | None = None
    """tokenizer; None: the policy's"""
    chat_template: str | None = None
    """file with a Jinja chat template; None: the tokenizer's own"""
    value_model_path: str | None = None
    """what the value model starts from; None: the reward model, or without one the policy"""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """precision of forward passes and of vLLM; trained weights stay float32"""
    attn_implementation: str = "sdpa"
    """attention of the learner's models: sdpa, eager, flash_attention_2, ..."""
    gradient_checkpointing: bool = False
    """compute activations again in the backward pass: less memory, a third slower"""
    reward_model_path: str | None = None
    """one-label classifier with the policy's tokenizer; None: no reward model"""
    reward_model_revision: str | None = None
    """revision of the reward model on the hub"""

    # -- Optimization
    learning_rate: float = 1e-6
    """learning rate of the policy"""
    value_learning_rate: float = 1e-5
    """learning rate of the value model"""
    value_warmup_steps: int = 0
    """first training steps, in which only the value model learns"""
    lr_scheduler_type: Literal["linear", "cosine", "constant"] = "linear"
    """how the learning rate changes after its warm-up"""
    warm_up_steps: int = 0
    """optimizer updates in which a model's learning rate rises, from its own first update"""
    warmup_ratio: float = 0.0
    """the same, as a share of all updates; used when warm_up_steps is 0"""
    eps: float = 1e-8
    """AdamW's epsilon (2403.17031 has 1e-5, but gradients of large models are as small as that)"""
    weight_decay: float = 0.0
    """AdamW's weight decay"""
    max_grad_norm: float = 1.0
    """gradients are clipped to this norm, separately for each model"""

    # -- Batches
    total_episodes: int = 100_000
    """responses to train on in the whole run"""
    number_samples_per_prompt: int = 1
    """responses sampled for each prompt"""
    local_rollout_batch_size: int = 64
    """prompts per training step and rank"""
    local_mini_batch_size: int = 64
    """responses per optimizer update and rank"""
    per_device_train_batch_size: int = 8
    """responses per forward and backward pass (micro-batch) of a rank"""
    local_rollout_forward_batch_size: int = 32
    """responses per forward pass of models that are not trained (reference policy, reward model)"""
    num_epochs: int = 1
    """passes over each batch of responses"""
    num_evals: int = 10
    """about this many evaluations, the first before any update; one more follows the last update"""
    eval_temperature: float = 0.0
    """sampling temperature of evaluations; 0: greedy"""

    # -- Generation
    generation_backend: Literal["vllm", "transformers"] = "vllm"
    """transformers: the learner's own generate, slower, but it runs wherever torch runs"""
    response_length: int = 256
    """most tokens in a response"""
    stop_token: str | None = None
    """another token that also ends a response; "eos" means the tokenizer's end token"""
    stop_token_id: int | None = None
    """another token that also ends a response, as an id"""
    temperature: float = 1.0
    """sampling temperature; log-probabilities are those of the distribution at this temperature"""
    vllm_gpus: tuple[int, ...] = ()
    """GPUs of each node that only vLLM uses, as indices; none: an engine on every learner's GPU"""
    vllm_tensor_parallel_size: int = 1
    """GPUs of one engine, which share a copy of the model (tensor parallel); needs vllm_gpus"""
    vllm_gpu_memory_utilization: float | None = None
    """share of a GPU's memory for vLLM; None: 0.9 of GPUs of its own, 0.3 of one that it shares"""
    vllm_enforce_eager: bool = False
    """run vLLM without CUDA graphs: starts faster, generates slower"""

    # -- Reward
    reward_model_multiplier: float = 1.0
    """the reward model's score is multiplied by this; 0: it scores nothing (in PPO it still starts
    the value model)"""
    apply_verifiable_reward: bool = True
    """score responses with compute_score, or with reward_fn"""
    verification_reward: float = 1.0
    """the verifiable score is multiplied by this"""
    reward_fn: str | None = None
    """path/to/file.py:function, used instead of compute_score; also gets extra_info=..."""
    reward_workers: int | None = None
    """processes that call reward_fn, on each rank with engines; None: a core each, 8 at most"""
    reward_timeout: float = 10.0
    """seconds for a call of reward_fn; a response whose call fails is left out of the loss, but for
    those that non_stop_penalty scores"""
    reward_memory: float = 4.0
    """GiB of address space that a reward worker may take above what it starts with; 0: no limit"""
    add_r1_style_format_reward: bool = False
    """reward the form <think>...</think><answer>...</answer>"""
    r1_style_format_reward: float = 1.0
    """what the form <think>...</think><answer>...</answer> is worth"""
    non_stop_penalty: bool = False
    """a response without a stop token scores penalty_reward_value, whatever it earned"""
    penalty_reward_value: float = -10.0
    """with non_stop_penalty: the score of a response without a stop token"""
    min_response_length: int = 0
    """with non_stop_penalty: responses of fewer tokens are penalized as well"""

    # -- PPO
    beta: float = 0.01
    """weight of the KL penalty in the reward; with kl_target: in the first step"""
    kl_target: float = 0.0
    """KL of a whole response that beta is adapted to (1909.08593, 2.2); 0: beta stays as it is"""
    kl_horizon: int = 10_000
    """with kl_target: episodes in which beta changes by a fifth where the KL is far off"""
    kl_estimator: Literal["kl1", "kl2", "kl3"] = "kl1"
    """estimator of that penalty; kl2 and kl3 in a reward give almost no gradient (2510.01555)"""
    whiten_rewards: bool = False
    """scale rewards to unit variance, keeping their mean"""
    cliprange: float = 0.2
    """the policy ratio is clipped to 1 +- cliprange"""
    dual_clip: float = 0.0
    """for negative advantages the ratio is clipped to this as well (1912.09729: 3.0); 0: off"""
    cliprange_value: float = 0.0
    """values are clipped to within this of the old ones, in units of reward; 0: no clipping"""
    gamma: float = 1.0
    """discount per token"""
    lam: float = 0.95
    """lambda of GAE for the advantages"""
    value_lam: float = 1.0
    """lambda of GAE for the value targets; 1: plain returns (2503.01491)"""
    tis_cap: float = 2.0
    """cap of the importance weight learner/sampler on the policy's loss terms; 0: no weights"""
    mismatch_mask: Literal["none", "token", "sequence"] = "none"
    """token: no policy gradient from tokens whose ratio learner/sampler is far from 1; sequence:
    from responses where its geometric mean is; either way they still count in the loss's mean"""
    mismatch_mask_range: float = 2.0
    """with mismatch_mask: far from 1 is outside [1/this, this]; inf masks nothing"""

    # -- Checkpoints
    save_freq: int = 0
    """training steps between checkpoints; 0: no checkpoints"""
    keep_last_n: int = 3
    """how many checkpoints to keep, the newest; 0: all"""
    resume_from_checkpoint: str | None = None
    """checkpoint to resume, or "latest": the newest of run_name; the run continues in its folder"""

    # -- Output
    with_tracking: bool = False
    """log to Weights & Biases as well"""
    wandb_project_name: str = "tandem"
    """project in Weights & Biases"""
    wandb_entity: str | None = None
    """owner of that project (user or team)"""

    # -- Filled in at run time
    world_size: FilledIn[int] = 1
    """learner processes"""
    rollout_batch_size: FilledIn[int] = 0
    """prompts per training step, over all ranks"""
    episodes_per_step: FilledIn[int] = 0
    """responses per training step, over all ranks"""
    mini_batch_size: FilledIn[int] = 0
    """responses per optimizer update, over all ranks"""
    num_training_steps: FilledIn[int] = 0
    """training steps of the run"""
    num_updates: FilledIn[int] = 0
    """optimizer updates of the run"""
    eval_steps: FilledIn[tuple[int, ...]] = ()
    """completed steps at which an evaluation is requested, beside the one after the last"""
    stop_token_ids: FilledIn[tuple[int, ...]] = ()
    """ids that end a response"""
    pad_token_id: FilledIn[int] = 0
    """id of padding; any id would do, since masks come from lengths"""
    data_hash: FilledIn[int] = 0
    """of the training prompts"""
    num_parameters: FilledIn[int] = 0
    """of the policy"""


@dataclass
class Prompt:
    """A row of the dataset."""

    row: str  # file and row number, for messages
    text: str
    token_ids: list[int]
    reward_model_token_ids: list[int]  # the same by the reward model's own chat template
    data_source: str | None  # chooses the verifiable reward
    ground_truth: Any  # None: there is no verifiable reward
    extra_info: dict | None  # for --reward_fn


@dataclass
class Request:
    """What the learner asks generation for: the responses of a training step, an evaluation."""

    training_step: int
    prompts: list[Prompt]  # (episodes,), the samples of a prompt side by side
    seeds: list[int]  # (episodes,)
    eval_prompts: list[Prompt]  # held-out prompts; empty where no evaluation is due
    eval_seeds: list[int]


@dataclass
class Answers:
    """Responses to prompts, with their verifiable rewards; each list has one entry a response."""

    responses: list[list[int]]  # sampled token ids; a stop token is the last one
    sampler_logprobs: list[list[float]]  # the sampler's, one for each of those ids
    texts: list[str]
    verifiable: list[float | None]  # None: there is no ground truth, or the call failed
    failures: list[str | None]  # why the verifiable reward failed; None: it did not


@dataclass
class Rollout:
    """What generation hands over: the answers to a Request, or a rank's share of them."""

    request: Request
    policy_version: int | None  # of the policy that sampled: the training steps before it; None:
    # this share is empty, as on a rank without engines
    answers: Answers  # to request.prompts
    eval_answers: Answers  # to request.eval_prompts
    times: dict[str, float]  # seconds of the generation thread, by part


@dataclass
class Scores:
    """What responses earned, in all and by part; each list has one entry a response."""

    scores: list[float | None]  # the sum of all rewards, or the penalty; None: not known, since a
    # reward failed
    texts: list[str]
    verifiable: list[float | None]  # None: there is no ground truth, or the call failed
    model_scores: list[float | None]  # by the reward model; None: there is none
    formats: list[bool]  # whether the response has the form of add_r1_style_format_reward
    penalized: list[bool]  # whether the penalty took the place of the sum
    failures: list[str | None]  # why the verifiable reward failed; None: it did not


@dataclass
class RunState:
    """Where a run was at a checkpoint, which has this beside models, optimizers and a rollout."""

    completed_steps: int  # training steps
    beta: float  # with kl_target it changes
    seconds: float  # that the run has taken
    wandb_id: str | None  # of the run in Weights & Biases; None: it is not there


@dataclass
class Batch:
    """What a training step works on. `width` is the length of its longest response.

    Tensors with a width have one element per response token, and 0 after the end of a response.
    """

    prompt_ids: list[list[int]]  # (episodes,), token ids
    responses: list[list[int]]  # (episodes,), token ids
    mask: Tensor  # (episodes, width), 1.0 where there is a response token
    scores: Tensor  # (episodes,), 0.0 where the score is not known
    scored: Tensor  # (episodes,), 0.0 where the score is not known, else 1.0
    loss_mask: Tensor  # (episodes, width), the mask without the responses whose score is not known
    sampler_logprobs: Tensor  # (episodes, width), log-probabilities by vLLM
    logprobs: Tensor  # (episodes, width), by the policy before this step's updates
    ref_logprobs: Tensor  # (episodes, width), by the reference policy
    values: Tensor  # (episodes, width), by the value model before this step's updates
    rewards: Tensor  # (episodes, width)
    advantages: Tensor  # (episodes, width)
    returns: Tensor  # (episodes, width), the targets of the value model
    importance_weights: Tensor  # (episodes, width), learner/sampler, truncated and masked


# ---------------------------------------------------------------------------------- small helpers


def is_rank_0() -> bool:
    """Whether this process is the first of all; known before there is an Accelerator."""
    return os.environ.get("RANK", "0") == "0"


def is_local_rank_0() -> bool:
    """Whether this process is the first of its node; known before there is an Accelerator."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def printable(text: str) -> str:
    r"""The text with all that a terminal would not show as it is, such as control codes, escaped.

    >>> printable("\x1b[1mtitle\n")
    '\\x1b[1mtitle\\n'
    """
    shown = []
    for character in text:
        is_space = unicodedata.category(character) == "Zs"  # such as the ideographic one
        if character.isprintable() or is_space:
            shown.append(character)
        else:
            shown.append(repr(character)[1:-1])
    return "".join(shown)


def bad_input(message: str) -> NoReturn:
    """Prints in one line what is wrong, where, what to do; ends the script with status 2."""
    if re.search(r"(^|\s)debug_assets/", message) and not os.path.exists("debug_assets"):
        message += "; scripts/make_debug_assets.py makes debug_assets"
    if not is_local_rank_0():
        # Local rank 0 has found the same, as a rule. Its end makes the launcher end this rank
        time.sleep(3)
    line = printable(" ".join(message.split()))
    line = re.sub(r"(\S{80})\S{20,}(\S{20})", r"\1...\2", line)  # very long names
    if len(line) > 450:
        line = f"{line[:450]} ..."
    print(f"{Path(sys.argv[0]).name}: error: {line}", file=sys.stderr)
    sys.exit(2)


def stable_hash(*parts: Any) -> int:
    """A 63-bit integer from its arguments, the same in every process and on every machine."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def on_main_process(accelerator: Accelerator, function: Callable, *args) -> Any:
    """Runs function on rank 0 and returns its result on every rank; if it raises, all raise."""
    result, error, message = None, None, None
    if accelerator.is_main_process:
        try:
            result = function(*args)
        except Exception as raised:
            error = raised
            message = f"rank 0 failed: {type(raised).__name__}: {raised}"
    result, message = broadcast_object_list([result, message])
    if error is not None:
        raise error
    if message is not None:
        raise RuntimeError(message)
    return result


def exchange(cpu_group, value: Any, error: Exception | None = None) -> list:
    """An all-gather: returns the values of all ranks, in their order. Every rank must call it.

    If a rank gives an error, all raise: that rank its own error, the others a RuntimeError with
    its text. cpu_group: the ranks' gloo group; None: there is one rank.
    """
    message = None
    if error is not None:
        message = f"{type(error).__name__}: {error}"
    states = [(value, message)]
    if cpu_group is not None:
        states = [None] * cpu_group.size()
        try:
            torch.distributed.all_gather_object(states, (value, message), group=cpu_group)
        except RuntimeError:  # a rank has ended; but an error of our own says more
            if error is None:
                raise
    if error is not None:
        raise error
    for rank, (_, rank_message) in enumerate(states):
        if rank_message is not None:
            raise RuntimeError(f"rank {rank} failed: {rank_message}")
    return [rank_value for rank_value, _ in states]


def wait_for_all(cpu_group, poll: Callable[[], Any]) -> Any:
    """Waits until every rank has a result of its poll(), and returns this rank's.

    poll() takes a second at most, and returns None as long as there is no result. So at least once
    a second the ranks tell one another whether they are ready. If poll() raises on one, all raise.
    """
    result, error = None, None
    while True:
        if result is None:
            try:
                result = poll()
            except Exception as raised:
                error = raised
        if all(exchange(cpu_group, result is not None, error)):
            return result


@contextlib.contextmanager
def time_limit(seconds: int):
    """Raises TimeoutError inside the block after so many seconds. In the main thread alone."""

    def stop(signal_number, frame) -> NoReturn:
        raise TimeoutError(f"it took longer than {seconds} seconds")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


@contextlib.contextmanager
def timed(times: dict[str, float], name: str):
    """Adds the seconds spent inside to times[name]."""
    start = time.perf_counter()
    yield
    # The generation thread has nothing to do with the learner's kernels, so it does not wait
    if torch.cuda.is_available() and threading.current_thread() is threading.main_thread():
        torch.cuda.synchronize()
    times[name] = times.get(name, 0.0) + time.perf_counter() - start


# ------------------------------------------------------------------------------------------- data


@functools.cache
def hub_answers() -> bool:
    """Whether the hub answers within five seconds. If not, this process goes offline.

    So do its children. Else each file would be waited for, several times.
    """
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        return False
    answers = []

    def ask() -> None:
        with contextlib.suppress(Exception):
            hub = huggingface_hub.constants.ENDPOINT
            answer = huggingface_hub.utils.get_session().head(hub, timeout=5)
            if answer.status_code < 500:
                answers.append(answer)

    # In a thread: the look-up of the hub's address has no time limit of its own
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(5)
    if not answers:
        os.environ["HF_HUB_OFFLINE"] = "1"  # for what is imported later, and other processes
        huggingface_hub.constants.HF_HUB_OFFLINE = True
    return bool(answers)


def read_json_lines(path: str) -> list[dict]:
    """The JSON objects of a file with one a line; ValueError says which line is none."""
    rows = []
    # utf-8-sig: editors on Windows put a mark before the text
    with open(path, encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"line {number} is no JSON: {error}") from error
            if not isinstance(row, dict):
                raise ValueError(f"line {number} is no JSON object")
            rows.append(row)
    return rows


def read_rows(path: str, split: str) -> list[dict]:
    """The rows of a .parquet or .jsonl file, or of a dataset on the hub."""
    suffix = Path(path).suffix
    if suffix in (".parquet", ".jsonl") and not os.path.isfile(path):
        bad_input(f"{path}: no such file")
    advice = ".parquet, .jsonl, or the name of a dataset on the hub?"
    if suffix in (".parquet", ".jsonl"):
        advice = "is it damaged?"
    elif not os.path.exists(path) and not hub_answers():
        advice = "no such .parquet or .jsonl, the hub does not answer, and it is not in the cache"
    try:
        if suffix == ".parquet":
            rows = pyarrow.parquet.read_table(path).to_pylist()
        elif suffix == ".jsonl":
            rows = read_json_lines(path)
        else:
            import datasets

            datasets.disable_progress_bars()
            rows = datasets.load_dataset(path, split=split).to_list()
    except Exception as error:
        bad_input(f"{path}: cannot be read; {advice} ({error})")
    if not rows:
        bad_input(f"{path}: the dataset is empty")
    return rows


def ground_truth_of(row: dict) -> Any:
    """What a rule compares a response to; None where a row has nothing for a rule."""
    reward_model = row.get("reward_model")
    if not isinstance(reward_model, dict):
        return None
    # Style "model" means no rule, except in verl's HellaSwag rows, recognized by their `eval`
    if reward_model.get("style") == "model" and not reward_model.get("eval"):
        return None
    return reward_model.get("ground_truth")


def tokenize_prompt(prompt: str | list[dict], tokenizer) -> tuple[str, list[int]]:
    """The text of a prompt and its token ids.

    Messages are rendered with the chat template; an answer that ends them is left out.
    """
    if isinstance(prompt, str):
        return prompt, tokenizer(prompt)["input_ids"]
    for message in prompt:
        if not message["role"] or not message["content"]:
            raise ValueError("a message without role or content")
    if prompt[-1]["role"] == "assistant":
        prompt = prompt[:-1]
    with time_limit(5):  # a template is a program, and may loop for ever
        text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    # The template has written the special tokens already
    return text, tokenizer(text, add_special_tokens=False)["input_ids"]


def uses_reward_model(args: Args) -> bool:
    """Whether a reward model scores responses."""
    return args.reward_model_path is not None and args.reward_model_multiplier > 0


def prepare_prompts(
    path: str, split: str, tokenizer, reward_tokenizer, args: Args, is_eval: bool = False
) -> list[Prompt]:
    """Loads, checks and tokenizes prompts.

    path: a file or a dataset on the hub with verl's columns: `prompt` (a string, or messages),
    `data_source`, `reward_model: {style, ground_truth}`, `extra_info`; or with open-instruct's:
    `messages`, `ground_truth`, `dataset`.
    """
    rows = read_rows(path, split)
    if {"messages", "ground_truth", "dataset"} <= rows[0].keys():
        # open-instruct's columns, renamed to verl's
        rows = [
            {
                "prompt": row.get("messages"),
                "data_source": row.get("dataset"),
                "reward_model": {"ground_truth": row.get("ground_truth")},
                "extra_info": row.get("extra_info"),
            }
            for row in rows
        ]
    if "prompt" not in rows[0]:
        bad_input(f"{path}: there is no column `prompt`; the columns are {', '.join(rows[0])}")
    if args.apply_verifiable_reward and not args.reward_fn and "data_source" not in rows[0]:
        bad_input(
            f"{path}: there is no column `data_source`, which chooses the reward; "
            f"or name a --reward_fn"
        )

    # Held-out prompts are always scored by a rule where there is one
    keep_ground_truth = args.apply_verifiable_reward or is_eval
    # Rows without a ground truth may stand among the others where a reward model scores them
    needs_ground_truth = args.apply_verifiable_reward and not uses_reward_model(args)
    without_rule = (
        "`reward_model.ground_truth` is missing, and the verifiable reward needs it; for rows "
        "without one use --no-apply_verifiable_reward --reward_model_path MODEL"
    )
    prompts = []
    for index, row in enumerate(rows):
        where = f"{path}, row {index}"
        ground_truth = ground_truth_of(row)
        data_source = row.get("data_source")
        if needs_ground_truth and ground_truth is None:
            bad_input(f"{where}: {without_rule}")
        if not isinstance(data_source or "", str):
            bad_input(f"{where}: `data_source` must be a string")
        if is_eval:  # samples.jsonl is going to hold them
            try:
                json.dumps([data_source, ground_truth], ensure_ascii=False).encode()
            except (TypeError, ValueError) as error:
                bad_input(
                    f"{where}: `data_source` and the ground truth must be what JSON can hold, such "
                    f"as texts, numbers and lists ({error})"
                )
        try:
            text, token_ids = tokenize_prompt(row.get("prompt"), tokenizer)
            _, reward_model_token_ids = tokenize_prompt(row.get("prompt"), reward_tokenizer)
        except Exception as error:
            bad_input(
                f"{where}: `prompt` must be a string, or messages with role and content that "
                f"the --chat_template takes ({error!r})"
            )
        if 0 < len(token_ids) <= args.max_prompt_token_length:
            prompt = Prompt(
                row=where,
                text=text,
                token_ids=token_ids,
                reward_model_token_ids=reward_model_token_ids,
                data_source=data_source,
                ground_truth=ground_truth if keep_ground_truth else None,
                extra_info=row.get("extra_info"),
            )
            prompts.append(prompt)

    dropped = (
        f"{len(rows) - len(prompts)} of {len(rows)} prompts, empty or longer than "
        f"--max_prompt_token_length {args.max_prompt_token_length}"
    )
    if not prompts:
        bad_input(f"{path}: none is left; dropped {dropped}")
    if len(prompts) < len(rows) and is_rank_0():
        print(printable(f"{path}: dropped {dropped}"))
    no_ground_truth = all(prompt.ground_truth is None for prompt in prompts)
    if args.apply_verifiable_reward and no_ground_truth and not is_eval:
        bad_input(f"{path}, every row: {without_rule}")
    return prompts


def hash_prompts(prompts: list[Prompt]) -> int:
    """A hash of what the prompts say, in this order, whatever file they come from."""
    hashes = []
    for prompt in prompts:
        parts = (prompt.text, prompt.data_source, prompt.ground_truth, prompt.extra_info)
        hashes.append(stable_hash(*parts))
    return stable_hash(hashes)


def draw_prompts(num_prompts: int, start: int, count: int, seed: int) -> list[int]:
    """Indices of the prompts from `start` to `start + count`, counted over the whole run.

    Each pass over the dataset is one seeded permutation of it.

    >>> sorted(draw_prompts(5, 0, 3, seed=1) + draw_prompts(5, 3, 2, seed=1))
    [0, 1, 2, 3, 4]
    """
    indices = []
    while len(indices) < count:
        pass_index, offset = divmod(start + len(indices), num_prompts)
        generator = torch.Generator().manual_seed(stable_hash(seed, "prompts", pass_index))
        permutation = torch.randperm(num_prompts, generator=generator).tolist()
        indices += permutation[offset:]
    return indices[:count]


def make_request(
    training_step: int, train_prompts: list[Prompt], eval_prompts: list[Prompt], args: Args
) -> Request:
    """The request for a training step, or after the last step for the last evaluation alone.

    It is a function of the step alone. The samples of a prompt stand side by side. Each response
    has a seed of its own, a hash: neighbouring seeds would repeat one another's samples.
    """
    completed_steps = training_step - 1
    prompts = []
    if completed_steps < args.num_training_steps:
        start = completed_steps * args.rollout_batch_size
        drawn = draw_prompts(len(train_prompts), start, args.rollout_batch_size, args.seed)
        for index in drawn:
            prompts += [train_prompts[index]] * args.number_samples_per_prompt
    first_episode = completed_steps * args.episodes_per_step
    seeds = [stable_hash(args.seed, "episode", first_episode + i) for i in range(len(prompts))]

    if completed_steps not in (*args.eval_steps, args.num_training_steps):
        eval_prompts = []
    eval_seeds = [stable_hash(args.seed, "evaluation", i) for i in range(len(eval_prompts))]
    return Request(training_step, prompts, seeds, eval_prompts, eval_seeds)


# ---------------------------------------------------------------------------------------- rewards


def grade_gsm8k(response: str, ground_truth: str) -> float:
    """1.0 if the answer equals the ground truth.

    The answer is the first number after the last "####", or else the last number.

    >>> grade_gsm8k("6 * 200 is 1,200. #### $1,200.", "1200")
    1.0
    """
    truth = float(re.sub(r"[$,\s]", "", str(ground_truth)).rstrip("."))
    number = r"-?\$?\d[\d,]*(?:\.\d+)?|-?\$?\.\d+"  # as in -$1,200.50, or .5
    answers = re.findall(number, response)
    if "####" in response:
        numbers_after_it = re.findall(number, response.rpartition("####")[2])
        answers = numbers_after_it[:1] or answers
    if not answers:
        return 0.0
    answer = float(re.sub(r"[$,]", "", answers[-1]))
    return float(answer == truth)


def compute_score(data_source: str, response: str, ground_truth: str) -> float:
    """The verifiable reward of a response: 1.0 when right, 0.0 otherwise."""
    if data_source == "debug/sorting":
        return float(response.strip() == ground_truth.strip())
    if "gsm8k" in data_source:
        return grade_gsm8k(response, ground_truth)
    raise NotImplementedError(
        f"{data_source!r} is neither debug/sorting nor *gsm8k*; for *math* and *hellaswag* use "
        f"--reward_fn scripts/rewards/graders.py:compute_score, for others one of your own"
    )


@functools.cache
def load_reward_fn(reward_fn: str) -> Callable:
    """The function of --reward_fn path/to/file.py:function; its file is run once in each process.

    As with `python path/to/file.py`, the file can import its neighbours. ImportError: there is no
    such function.
    """
    path, _, name = reward_fn.rpartition(":")
    if reward_fn.endswith(".py"):  # without a name: the error below lists what there is
        path, name = reward_fn, ""
    if not path.endswith(".py"):
        raise ImportError("it must be path/to/file.py:function")
    sys.path.insert(0, str(Path(path).resolve().parent))
    spec = importlib.util.spec_from_file_location("reward_file", os.path.abspath(path))
    module = importlib.util.module_from_spec(spec)
    sys.modules["reward_file"] = module
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        functions = inspect.getmembers(module, inspect.isfunction)
        own = [key for key, function in functions if function.__module__ == "reward_file"]
        known = ", ".join(f"{path}:{key}" for key in own) or "there is none"
        raise ImportError(f"name one of its functions: {known}")
    return function


def verifiable_reward(reward_fn: str | None, prompt: Prompt, response: str) -> float:
    """What compute_score, or path/to/file.py:function, says of a response: a finite number."""
    if reward_fn is None:
        score = compute_score(prompt.data_source, response, prompt.ground_truth)
    else:
        score = load_reward_fn(reward_fn)(
            prompt.data_source, response, prompt.ground_truth, extra_info=prompt.extra_info
        )
    try:
        is_finite = math.isfinite(score)  # of NumPy's and torch's scalars as well
    except TypeError:
        is_finite = False
    if not is_finite:
        raise ValueError(f"the reward is {score!r}, and not a finite number")
    return float(score)


def describe_error(error: BaseException, reward_fn: str) -> str:
    """What went wrong in a reward, and the last line of the file of --reward_fn that led there."""
    path = reward_fn.rpartition(":")[0]
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == os.path.abspath(path)]
    place = f" ({path}, line {lines[-1]})" if lines else ""
    text = f"{type(error).__name__}: {error}{place}"
    return text.encode(errors="backslashreplace").decode()  # so that it can be printed


def die_with_script() -> None:
    """Makes Linux kill this process, a reward worker, when the script ends.

    The sentinel is a pipe whose other end closes when the script ends, in whatever way. Linux
    then sends SIGIO, which kills a process that does not handle it, even one that holds the GIL.
    """
    pipe = mp.parent_process().sentinel
    fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(pipe, fcntl.F_SETFL, os.O_ASYNC)


def run_reward_worker(connection, args: Args, is_quiet: bool) -> None:
    """The main function of a reward worker's process.

    It first imports the file of --reward_fn, then scores each (prompt, response) that comes. Each
    time it answers (score, error, is_last). Any exception of the user's code becomes an error,
    which is a text, SystemExit and KeyboardInterrupt included. is_last: the process is not fit for
    another call. is_quiet: what the user's code prints goes to /dev/null.
    """
    if is_quiet:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
    # A session of its own, which can be ended as a whole, and which a Ctrl-C does not reach
    os.setsid()
    die_with_script()
    pid = os.getpid()
    restart_above = math.inf
    if args.reward_memory > 0:
        allowance = int(args.reward_memory * 2**30)
        limit = psutil.Process().memory_info().vms + allowance
        _, hard_limit = resource.getrlimit(resource.RLIMIT_AS)
        if hard_limit != resource.RLIM_INFINITY:
            limit = min(limit, hard_limit)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        restart_above = limit - allowance / 2

    def attempt(function: Callable, *arguments) -> tuple[Any, str | None]:
        result, error = None, None
        try:
            result = function(*arguments)
        except BaseException as raised:
            error = describe_error(raised, args.reward_fn)
        if os.getpid() != pid:  # a child that the reward has forked must not answer
            os._exit(1)
        return result, error

    _, error = attempt(load_reward_fn, args.reward_fn)
    connection.send((None, error, error is not None))
    with contextlib.suppress(EOFError, OSError):  # the script has closed its end
        while True:
            prompt, response = connection.recv()
            score, error = attempt(verifiable_reward, args.reward_fn, prompt, response)
            # A call that failed with most memory in use may have failed by a leak: so would others
            is_last = error is not None and psutil.Process().memory_info().vms > restart_above
            connection.send((score, error, is_last))


class RewardWorker:
    """A process for --reward_fn, whose code may raise, hang, exit or crash.

    Whatever happens to the process, only the call in progress fails, and the next call finds a
    working process. (pebble's pool and the standard library's do not survive the SIGKILL of an idle
    worker.) One thread at a time may call it.
    """

    def __init__(self, args: Args, is_quiet: bool = False):
        self.args = args
        self.is_quiet = is_quiet
        self.process = None
        self.connection = None
        self.owes_import_answer = False  # whether its first answer is still to be received
        self.is_stopped = False
        self.lock = threading.Lock()  # after a Ctrl-C a thread stops what another is calling

    def start(self) -> None:
        """Starts a process and returns; the process imports the file of --reward_fn meanwhile."""
        if self.is_stopped:
            raise RuntimeError("the reward workers have been stopped")
        # What takes long to import is imported once, and inherited by every worker
        mp.set_forkserver_preload(["accelerate", "transformers.models.auto.modeling_auto", "tyro"])
        context = mp.get_context("forkserver")
        connection, worker_end = context.Pipe()
        process = context.Process(
            target=run_reward_worker, args=(worker_end, self.args, self.is_quiet)
        )
        process.start()
        worker_end.close()  # so that the connection ends with the process
        self.process, self.connection, self.owes_import_answer = process, connection, True

    def wait_for_import(self) -> None:
        """Waits until the process has imported the file. RuntimeError: it failed, and why."""
        if not self.process.is_alive():  # it was killed while it was idle
            self.restart()
        if self.owes_import_answer:
            # Before receive, which makes it True again where it starts another process
            self.owes_import_answer = False
            self.receive("the import", REWARD_IMPORT_TIMEOUT)

    def score(self, prompt: Prompt, response: str) -> float:
        """verifiable_reward in the process. RuntimeError: it failed, and why."""
        self.wait_for_import()
        with contextlib.suppress(OSError):  # it has just been killed; receive will say so
            self.connection.send((prompt, response))
        return self.receive("the call", self.args.reward_timeout)

    def receive(self, task: str, seconds: float) -> float | None:
        """Returns the score of the process's next answer.

        RuntimeError: the answer is an error, or none came within these seconds, or the process has
        died. The process is replaced where it gave no answer, and where its answer was its last.
        """
        if not wait([self.connection, self.process.sentinel], seconds):
            self.restart()
            raise RuntimeError(f"TimeoutError: {task} took longer than {seconds:g} seconds")
        try:
            if not self.connection.poll():  # it is dead, but a child of it holds the connection
                raise EOFError
            score, error, is_last = self.connection.recv()
        except (EOFError, OSError):
            self.process.join(timeout=5)  # its connection ends a moment before it does
            exitcode = self.process.exitcode
            self.restart()
            raise RuntimeError(f"its process ended with exit code {exitcode}") from None
        if is_last:
            self.restart()
        if error is not None:
            raise RuntimeError(error)
        return score

    def restart(self) -> None:
        """Puts a new process in the place of this one."""
        with self.lock:
            self.end_process()
            self.start()

    def end_process(self) -> None:
        """Ends the process, and all that it has started."""
        if self.process is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it is gone
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()  # it may not have its session yet
        self.process.join()
        self.connection.close()

    def stop(self) -> None:
        """Ends the process for good. Any thread may do that."""
        with self.lock:
            self.is_stopped = True
            self.end_process()


def start_reward_workers(args: Args) -> list[RewardWorker]:
    """The processes for --reward_fn; none without it."""
    workers = []
    if args.reward_fn:
        workers = [RewardWorker(args) for _ in range(args.reward_workers)]
    for worker in workers:
        worker.start()
    return workers


def call_workers(
    workers: list[RewardWorker], prompts: list[Prompt], texts: list[str]
) -> list[float | Exception]:
    """For each response its score, or the exception of its call; all workers work at a time."""
    idle_workers = deque(workers)

    def score(prompt: Prompt, text: str) -> float | Exception:
        worker = idle_workers.popleft()
        try:
            return worker.score(prompt, text)
        except Exception as error:
            return error
        finally:
            idle_workers.append(worker)

    with ThreadPoolExecutor(len(workers)) as threads:
        try:
            return list(threads.map(score, prompts, texts))
        except BaseException:  # Ctrl-C, SIGTERM: threads whose worker is dead end at once
            for worker in workers:
                worker.stop()
            raise


def verifiable_rewards(
    workers: list[RewardWorker], prompts: list[Prompt], texts: list[str], args: Args
) -> tuple[list[float | None], list[str | None]]:
    """The verifiable reward of each response, and why it failed where it did.

    The reward is None without a ground truth, and where it failed.
    """
    with_truth = [i for i, prompt in enumerate(prompts) if prompt.ground_truth is not None]
    results = [None] * len(prompts)
    if args.reward_fn and with_truth:
        some_prompts = [prompts[i] for i in with_truth]
        some_texts = [texts[i] for i in with_truth]
        answers = call_workers(workers, some_prompts, some_texts)
        for i, answer in zip(with_truth, answers, strict=True):
            results[i] = answer
    else:
        for i in with_truth:
            try:
                results[i] = verifiable_reward(None, prompts[i], texts[i])
            except Exception as error:
                results[i] = RuntimeError(f"{type(error).__name__}: {error}")

    scores = [None if isinstance(result, Exception) else result for result in results]
    failures = [str(result)[:300] if isinstance(result, Exception) else None for result in results]
    return scores, failures


def warn_of_failures(prompts: list[Prompt], failures: list[str | None]) -> None:
    """Prints how many rewards failed, and the first of each cause with its row."""
    causes = {}
    for prompt, failure in zip(prompts, failures, strict=True):
        if failure is not None:
            causes.setdefault(failure, f"{failure} (on {prompt.row})")
    if causes:
        count = sum(failure is not None for failure in failures)
        some_causes = printable("; ".join(list(causes.values())[:10]))
        print(
            f"Warning: the reward failed on {count} of {len(prompts)} responses, which have no "
            f"verifiable score: {some_causes}"
        )


# The parts may hold anything but these tags
NO_TAG = r"(?:(?!</?(?:think|answer)>).)*"
R1_FORMAT = re.compile(rf"\s*<think>{NO_TAG}</think>\s*<answer>{NO_TAG}</answer>\s*", re.DOTALL)


def has_r1_format(prompt: str, response: str) -> bool:
    """Whether a response has the form <think>...</think><answer>...</answer>.

    A prompt may have opened <think> already, as some chat templates do.

    >>> has_r1_format("1 + 1?", "<think>2</think><answer>2</answer>")
    True
    >>> has_r1_format("1 + 1? <think>", "2</think><answer>2</answer>")
    True
    """
    if prompt.rstrip().endswith("<think>"):
        response = "<think>" + response
    return R1_FORMAT.fullmatch(response) is not None


def grade_answers(
    workers: list[RewardWorker],
    tokenizer,
    prompts: list[Prompt],
    responses: list[list[int]],
    sampler_logprobs: list[list[float]],
    args: Args,
) -> Answers:
    """Responses to some prompts with their texts and verifiable rewards."""
    texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
    verifiable, failures = verifiable_rewards(workers, prompts, texts, args)
    return Answers(
        responses=responses,
        sampler_logprobs=sampler_logprobs,
        texts=texts,
        verifiable=verifiable,
        failures=failures,
    )


def score_answers(
    accelerator: Accelerator,
    reward_model: torch.nn.Module | None,
    prompts: list[Prompt],
    answers: Answers,
    args: Args,
) -> Scores:
    """The score of every response of all ranks, and its parts; every rank gets all of them."""
    responses, verifiable, failures = answers.responses, answers.verifiable, answers.failures
    if is_rank_0():
        warn_of_failures(prompts, failures)
    model_scores = [None] * len(prompts)
    if reward_model is not None:
        model_scores = reward_model_scores(accelerator, reward_model, prompts, responses, args)
    formats = [has_r1_format(p.text, text) for p, text in zip(prompts, answers.texts, strict=True)]

    scores, penalized = [], []
    for i, response in enumerate(responses):
        stopped = response[-1] in args.stop_token_ids
        too_short = len(response) < args.min_response_length
        penalized.append(args.non_stop_penalty and (not stopped or too_short))
        if penalized[i]:
            score = args.penalty_reward_value
        elif args.apply_verifiable_reward and failures[i] is not None:
            score = None  # not known, which is not the same as wrong
        else:
            score = 0.0
            if model_scores[i] is not None:
                score += model_scores[i] * args.reward_model_multiplier
            if args.apply_verifiable_reward and verifiable[i] is not None:
                score += verifiable[i] * args.verification_reward
            if args.add_r1_style_format_reward and formats[i]:
                score += args.r1_style_format_reward
        scores.append(score)
    return Scores(
        scores=scores,
        texts=answers.texts,
        verifiable=verifiable,
        model_scores=model_scores,
        formats=formats,
        penalized=penalized,
        failures=failures,
    )


def check_scores(scores: Scores) -> None:
    """RuntimeError: the reward failed on every response of a batch. All ranks see the same."""
    if all(cause is not None for cause in scores.failures):
        raise RuntimeError(
            f"the reward failed on all {len(scores.failures)} responses: {scores.failures[0]}"
        )


# ----------------------------------------------------------------------------------------- models


def revision_of(path: str, args: Args) -> str | None:
    """The revision of a model on the hub."""
    if path == args.model_name_or_path:
        return args.model_revision
    if path == args.reward_model_path:
        return args.reward_model_revision
    return None


def check_weights(model: torch.nn.Module, path: str) -> None:
    """Refuses weights that are not finite."""
    for name, weight in model.named_parameters():
        if not weight.detach().sum().isfinite():  # which one that is not would spoil
            bad_input(f"{path}: {name} holds numbers that are not finite; the model is damaged")


def load_model(
    auto_class: type,
    path: str,
    args: Args,
    trained: bool,
    device_map: str | None = None,
    **config_options,
) -> tuple[torch.nn.Module, dict[str, Any]]:
    """A model without dropout (1909.08593, p. 3), and transformers' report on its checkpoint.

    A trained model is float32 and needs gradients; a frozen one is of args.dtype. With device_map
    "meta" the weights are not loaded; only their names and shapes are read, for the report.
    """
    revision = revision_of(path, args)
    config = AutoConfig.from_pretrained(
        path, revision=revision, trust_remote_code=False, **config_options
    )
    for name, value in vars(config).items():
        if isinstance(value, float) and "drop" in name:
            setattr(config, name, 0.0)
    model, report = auto_class.from_pretrained(
        path,
        config=config,
        revision=revision,
        dtype=torch.float32 if trained else getattr(torch, args.dtype),
        attn_implementation=args.attn_implementation,
        device_map=device_map,
        trust_remote_code=False,
        use_safetensors=True,  # a pickle can hold code
        ignore_mismatched_sizes=device_map == "meta",  # the report names them
        output_loading_info=True,
    )
    if device_map is None:
        check_weights(model, path)
    if auto_class is AutoModelForCausalLM:
        # A head that the checkpoint has of its own is not tied, even if its config says so
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        if head is not None and head.weight is not embedding.weight:
            model.config.tie_word_embeddings = False
    if trained and args.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train(trained)  # gradient checkpointing works in training mode only
    model.requires_grad_(trained)
    return model, report


def token_logprobs(logits: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the labels, and entropies: each (batch, response_length), in float32.

    logits: (batch, response_length, vocabulary); labels: (batch, response_length), token ids.
    """
    if logits.dtype != torch.float64:  # the tests use it
        logits = logits.float()
    logits = logits / temperature
    logprobs = torch.log_softmax(logits, dim=-1)
    label_logprobs = logprobs.gather(-1, labels[..., None]).squeeze(-1)
    entropies = -(logprobs.exp() * logprobs).sum(-1)
    return label_logprobs, entropies


class PolicyModel(torch.nn.Module):
    """A causal language model, read at the positions that predict the response tokens."""

    def __init__(self, model: torch.nn.Module, temperature: float):
        super().__init__()
        self.model = model
        self.temperature = temperature

    def forward(self, inputs: dict, response_length: int) -> tuple[Tensor, Tensor]:
        """Log-probabilities of the response tokens and entropies: (batch, response_length).

        Both can be trained on. Only the logits of the response exist. Their softmax is taken a
        few rows at a time, and computed again in the backward pass: it would be the largest thing
        in memory.
        """
        output = self.model(**inputs, logits_to_keep=response_length + 1)
        # The logits at a position predict the token after it: (batch, response_length, vocabulary)
        logits = output.logits[:, :-1]
        prompt_length = inputs["input_ids"].shape[1] - response_length
        labels = inputs["input_ids"][:, prompt_length:]  # (batch, response_length)
        logits_per_row = max(1, logits[0].numel())
        rows = max(1, SOFTMAX_CHUNK // logits_per_row)
        logprobs, entropies = [], []
        for some_logits, some_labels in zip(logits.split(rows), labels.split(rows), strict=True):
            some_logprobs, some_entropies = checkpoint(
                token_logprobs, some_logits, some_labels, self.temperature, use_reentrant=False
            )
            logprobs.append(some_logprobs)
            entropies.append(some_entropies)
        return torch.cat(logprobs), torch.cat(entropies)


class ValueModel(torch.nn.Module):
    """A one-label sequence classifier, whose head is read at every response token."""

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.model = model

    def forward(self, inputs: dict, response_length: int) -> Tensor:
        """Values of the states in which response tokens were chosen: (batch, response_length)."""
        hidden = self.model.base_model(**inputs).last_hidden_state
        # A token is chosen at the position before its own: (batch, response_length, hidden_size)
        hidden = hidden[:, -response_length - 1 : -1]
        with torch.autocast(hidden.device.type, enabled=False):  # the head computes in float32
            values = self.model.score(hidden.to(self.model.score.weight.dtype))
        return values.squeeze(-1)


def load_value_model(args: Args) -> ValueModel:
    """The value model; a head that the checkpoint lacks is zeros.

    So the first advantages are rewards to come. With random values they would be noise.
    """
    path = args.value_model_path or args.reward_model_path or args.model_name_or_path
    model, report = load_model(
        AutoModelForSequenceClassification, path, args, trained=True, num_labels=1
    )
    if "score.weight" in report["missing_keys"]:
        model.score.weight.data.zero_()
    return ValueModel(model)


def collate(
    prompt_ids: list[list[int]], responses: list[list[int]], pad_token_id: int, device
) -> tuple[dict, Tensor]:
    """Pads prompts on the left and responses on the right.

    Returns the model's inputs, with tensors (batch, prompt_length + response_length), and the
    response mask (batch, response_length). Masks come from lengths: where a pad token is also the
    end token, its id must not hide the end of a response.

    >>> inputs, mask = collate([[5], [6, 7]], [[8, 9], [9]], pad_token_id=0, device="cpu")
    >>> inputs["input_ids"].tolist()
    [[0, 5, 8, 9], [6, 7, 9, 0]]
    >>> inputs["attention_mask"].tolist()
    [[0, 1, 1, 1], [1, 1, 1, 0]]
    >>> inputs["position_ids"].tolist()
    [[0, 0, 1, 2], [0, 1, 2, 2]]
    >>> mask.tolist()
    [[1, 1], [1, 0]]
    """
    prompt_length = max(len(prompt) for prompt in prompt_ids)
    response_length = max(len(response) for response in responses)
    input_ids, attention = [], []
    for prompt, response in zip(prompt_ids, responses, strict=True):
        left = prompt_length - len(prompt)
        right = response_length - len(response)
        input_ids.append([pad_token_id] * left + prompt + response + [pad_token_id] * right)
        attention.append([0] * left + [1] * (len(prompt) + len(response)) + [0] * right)
    attention_mask = torch.tensor(attention, device=device)
    inputs = {
        "input_ids": torch.tensor(input_ids, device=device),
        "attention_mask": attention_mask,
        "position_ids": (attention_mask.cumsum(1) - 1).clamp(min=0),
        "use_cache": False,
    }
    return inputs, attention_mask[:, prompt_length:]


def pad(rows: list[list[float]], device) -> Tensor:
    """Rows of numbers as one tensor, with zeros on the right.

    >>> pad([[1.0, 2.0], [3.0]], "cpu")
    tensor([[1., 2.],
            [3., 0.]])
    """
    tensors = [torch.tensor(row) for row in rows]
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True).to(device)


# ------------------------------------------------------------------------------------ mathematics


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of values where mask is 1; 0 if it is nowhere 1. Shapes alike; returns a scalar.

    >>> masked_mean(torch.tensor([1.0, 2.0, 9.0]), torch.tensor([1, 1, 0])).item()
    1.5
    """
    return (values * mask).sum() / mask.sum().clamp(min=1)


def sequence_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Each token gets the mean over its response: (batch, response_length), like values.

    Of log-ratios, this is the logarithm of GSPO's ratio (2507.18071, eq. 7).

    >>> sequence_mean(torch.tensor([[1.0, 3.0], [5.0, 9.0]]), torch.tensor([[1, 1], [1, 0]]))
    tensor([[2., 2.],
            [5., 0.]])
    """
    means = (values * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    return means * mask


def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """Scales values to unit variance (Bessel-corrected, eps 1e-8). Shapes alike; 0 where masked.

    Their mean becomes 0; with shift_mean=False it stays what it is.

    >>> masked_whiten(torch.tensor([1.0, 3.0, 9.0]), torch.tensor([1, 1, 0])).tolist()
    [-0.7071067690849304, 0.7071067690849304, 0.0]
    """
    mean = masked_mean(values, mask)
    variance = ((values - mean) ** 2 * mask).sum() / (mask.sum() - 1).clamp(min=1)
    whitened = (values - mean) * torch.rsqrt(variance + 1e-8)
    if not shift_mean:
        whitened = whitened + mean
    return whitened * mask


def kl_penalty(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """Estimate per token of KL(policy || reference) from tokens of the policy; logprobs' shape.

    With d = logprobs - ref_logprobs: kl1 = d, kl2 = d^2/2, kl3 = exp(-d) - 1 + d
    (http://joschu.net/blog/kl-approx.html).

    >>> kl_penalty(torch.tensor([0.0]), torch.tensor([-1.0]), "kl2").item()
    0.5
    """
    d = logprobs - ref_logprobs
    if estimator == "kl1":
        return d
    if estimator == "kl2":
        return d**2 / 2
    return torch.expm1(-d) + d


def adapted_beta(kl: float, args: Args) -> float:
    """The next step's beta: larger where the KL of this one was above kl_target (1909.08593, 2.2).

    kl: mean over the step's responses; args.beta: this step's beta.

    >>> adapted_beta(9.0, Args(beta=1.0, kl_target=6.0, kl_horizon=100, episodes_per_step=50))
    1.1
    """
    error = min(0.2, max(-0.2, kl / args.kl_target - 1))
    return args.beta * (1 + error * args.episodes_per_step / args.kl_horizon)


def compute_gae(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation (1506.02438).

    Gives the advantages (not whitened) and the returns (advantages + values). All tensors are
    (batch, response_length), padded on the right; both results are 0 outside the mask. The last
    token of a response is terminal.

    >>> advantages, returns = compute_gae(
    ...     rewards=torch.tensor([[0.0, 1.0, 0.0]]),
    ...     values=torch.tensor([[0.5, 0.5, 9.0]]),
    ...     mask=torch.tensor([[1, 1, 0]]),
    ...     gamma=1.0,
    ...     lam=0.5,
    ... )
    >>> advantages.tolist(), returns.tolist()
    ([[0.25, 0.5, 0.0]], [[0.75, 1.0, 0.0]])
    """
    rewards = rewards * mask
    values = values * mask
    advantages = torch.zeros_like(values)
    next_advantage, next_value = 0.0, 0.0  # there is no token after the last
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantages[:, t] = delta + gamma * lam * next_advantage
        next_advantage = advantages[:, t]
        next_value = values[:, t]
    advantages = advantages * mask
    return advantages, advantages + values


def mismatch_mask(log_ratio: Tensor, mask: Tensor, args: Args) -> Tensor:
    """1 where the policy may train on a token, 0 where learner and sampler are too far apart.

    log_ratio: learner - sampler log-probabilities. All are (batch, response_length).

    >>> log_ratio, mask = torch.tensor([[0.5, 1.0], [1.0, 0.0]]), torch.ones(2, 2)
    >>> args = Args(mismatch_mask="token", mismatch_mask_range=2.0)
    >>> mismatch_mask(log_ratio, mask, args)
    tensor([[1., 0.],
            [0., 1.]])
    >>> mismatch_mask(log_ratio, mask, replace(args, mismatch_mask="sequence"))
    tensor([[0., 0.],
            [1., 1.]])
    """
    if args.mismatch_mask == "none":
        return mask
    if args.mismatch_mask == "sequence":
        log_ratio = sequence_mean(log_ratio, mask)
    return mask * (log_ratio.abs() <= math.log(args.mismatch_mask_range))


def policy_loss(
    log_ratio: Tensor,
    advantages: Tensor,
    importance_weights: Tensor,
    cliprange: float,
    cliprange_higher: float,
    dual_clip: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """PPO's clipped surrogate (1707.06347) times the importance weight, and where a clip binds.

    The ratio is clipped to [1 - cliprange, 1 + cliprange_higher], of which PPO has one value. For
    negative advantages a dual_clip above 0 is another upper limit (1912.09729).
    log_ratio: new - old log-probabilities. All tensors have one shape, one element per token.

    >>> loss, clipped = policy_loss(
    ...     log_ratio=torch.tensor([0.0, 1.0]),
    ...     advantages=torch.tensor([2.0, 2.0]),
    ...     importance_weights=torch.ones(2),
    ...     cliprange=0.2,
    ...     cliprange_higher=0.2,
    ... )
    >>> loss.tolist(), clipped.tolist()
    ([-2.0, -2.4000000953674316], [False, True])
    """
    plain_loss = -advantages * log_ratio.exp()
    clipped_loss = -advantages * log_ratio.exp().clamp(1 - cliprange, 1 + cliprange_higher)
    loss = torch.max(plain_loss, clipped_loss)
    clipped = clipped_loss > plain_loss
    if dual_clip > 0:
        largest_loss = -advantages * dual_clip
        too_large = (advantages < 0) & (loss > largest_loss)
        loss = torch.where(too_large, largest_loss, loss)
        clipped = clipped | too_large
    # The importance weight comes after the max: it says how much a sample counts, not which
    # branch is the pessimistic one.
    return loss * importance_weights, clipped


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, cliprange_value: float
) -> tuple[Tensor, Tensor]:
    """Half the squared error per token, and where its clip around the old values binds.

    All are of one shape. With cliprange_value 0 nothing is clipped.

    >>> value_loss(torch.tensor([3.0]), torch.tensor([0.0]), torch.tensor([2.0]), 1.0)
    (tensor([0.5000]), tensor([False]))
    """
    plain_loss = (values - returns) ** 2 / 2
    if cliprange_value == 0:
        return plain_loss, torch.zeros_like(plain_loss, dtype=torch.bool)
    change = (values - old_values).clamp(-cliprange_value, cliprange_value)
    clipped_loss = (old_values + change - returns) ** 2 / 2
    return torch.max(plain_loss, clipped_loss), clipped_loss > plain_loss


def lr_multiplier(update: int, num_updates: int, args: Args) -> float:
    """A model's learning rate in its own update number `update`, as a share of the base rate.

    Updates count from 0. The rate is above 0 to the last of num_updates.

    >>> args = Args(warm_up_steps=2, lr_scheduler_type="linear")
    >>> [lr_multiplier(update, num_updates=4, args=args) for update in range(4)]
    [0.5, 1.0, 1.0, 0.5]
    """
    if update < args.warm_up_steps:
        return (update + 1) / args.warm_up_steps
    updates_left = max(1, num_updates - args.warm_up_steps)
    done = (update - args.warm_up_steps) / updates_left  # in [0, 1)
    if args.lr_scheduler_type == "linear":
        return 1 - done
    if args.lr_scheduler_type == "cosine":
        return (1 + math.cos(math.pi * done)) / 2
    return 1.0


# ------------------------------------------------------------------------------------- generation


# The next three functions run in vLLM's process. `llm` is vLLM's LLM.


def run_vllm(connection, folders: list[str], options: dict, config) -> None:
    """The main function of vLLM's process: makes an LLM and answers what VLLM.send sends.

    At its end it removes the folders. config: None, or that of a model with random weights, which
    is written to options["model"] for vLLM to start from.
    """
    # A session of its own: Ctrl-C is for the script alone, and all that vLLM starts ends with it
    os.setsid()

    def end() -> None:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        os.killpg(0, signal.SIGKILL)

    def watch_script() -> None:
        mp.parent_process().join()
        end()

    threading.Thread(target=watch_script, daemon=True).start()
    if config is not None:
        transformers.utils.logging.disable_progress_bar()
        AutoModelForCausalLM.from_config(config).save_pretrained(options["model"])
    from vllm import LLM

    llm = LLM(**options)
    llm.policy_version = None  # before the first weight sync
    connection.send((None, None, ""))  # an answer to nothing: vLLM has started
    with contextlib.suppress(EOFError, OSError):  # the script has closed its end
        while True:
            function, args = connection.recv()
            result, error, details = None, None, ""
            try:
                result = function(llm, *args)
            except Exception as raised:
                error, details = raised, traceback.format_exc()
            connection.send((result, error, details))
    end()


def sample_responses(
    llm, prompt_ids: list[list[int]], seeds: list[int], temperature: float, args: Args
) -> tuple[list[list[int]], list[list[float]], int]:
    """Samples a response to each prompt.

    Returns lists of token ids, the stop token included; the log-probability of each of those ids;
    and the version of the policy that sampled. Each response is a request of its own with its own
    seed, so that a run can be repeated.
    """
    from vllm import SamplingParams

    requests = [{"prompt_token_ids": prompt} for prompt in prompt_ids]
    sampling = [
        SamplingParams(
            seed=seed,
            temperature=temperature,
            max_tokens=args.response_length,
            stop_token_ids=args.stop_token_ids,
            ignore_eos=True,  # the end tokens are those in stop_token_ids, and no others
            logprobs=0,  # of the sampled token alone
            flat_logprobs=True,
            detokenize=False,
        )
        for seed in seeds
    ]
    outputs = llm.generate(requests, sampling, use_tqdm=False)
    answered = [output.prompt_token_ids for output in outputs]
    assert answered == prompt_ids, "vLLM answered other prompts"
    completions = [output.outputs[0] for output in outputs]
    responses = [list(completion.token_ids) for completion in completions]
    # flat_logprobs: one number per sampled token
    logprobs = [list(completion.logprobs.logprobs) for completion in completions]
    return responses, logprobs, llm.policy_version


def finish_weight_sync(llm, version: int) -> None:
    """Forgets what the old weights computed, and labels later samples with the new version."""
    if not llm.reset_prefix_cache():
        raise RuntimeError("vLLM did not empty its prefix cache: it was busy during a weight sync")
    llm.policy_version = version


# All that follows runs in the learner's process.


def place_engines(
    vllm_gpus: tuple[int, ...], tensor_parallel_size: int, local_rank: int, num_gpus: int
) -> list[tuple[int, ...]]:
    """The engines that a rank owns, each by its GPUs: indices into the visible ones of its node.

    Without vllm_gpus every rank owns an engine, on its own GPU, or on the CPU where there is none.
    With them the first rank of each node owns the engines of its node. num_gpus: of the node.

    >>> [place_engines((), 1, local_rank, num_gpus=2) for local_rank in (0, 1)]
    [[(0,)], [(1,)]]
    >>> place_engines((), 1, local_rank=1, num_gpus=0)
    [()]
    >>> [place_engines((4, 5, 6, 7), 2, local_rank, num_gpus=8) for local_rank in (0, 1)]
    [[(4, 5), (6, 7)], []]
    """
    if not vllm_gpus:
        if num_gpus == 0:
            return [()]
        return [(local_rank % num_gpus,)]
    if local_rank > 0:
        return []
    firsts = range(0, len(vllm_gpus), tensor_parallel_size)
    return [vllm_gpus[first : first + tensor_parallel_size] for first in firsts]


def share_of(items: list, index: int, count: int, group: int = 1) -> list:
    """What one of `count` engines gets of a list: group i of n goes to engine i * count // n.

    group: how many items stay together, as the samples of a prompt do. A share may be empty.

    >>> [share_of(["a", "a", "b", "b", "c", "c"], index, count=2, group=2) for index in range(2)]
    [['a', 'a', 'b', 'b'], ['c', 'c']]
    """
    num_groups = len(items) // group
    first = math.ceil(index * num_groups / count)
    end = math.ceil((index + 1) * num_groups / count)
    return items[first * group : end * group]


def vllm_environment(gpus: tuple[int, ...], temporary_folder: str) -> dict[str, str]:
    """The environment variables of the process of an engine on these GPUs."""
    # The engine is a world of its own: the learners' ranks and ports are not for it
    launcher = re.compile(
        r"((LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE))|MASTER_(ADDR|PORT)|TORCHELASTIC_.*"
    )
    # Defaults, which the user's own environment overrides
    environment = {
        "VLLM_LOGGING_LEVEL": "ERROR",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "PYTHONWARNINGS": "ignore",
    }
    if not gpus:
        environment["VLLM_CPU_KVCACHE_SPACE"] = "1"  # GiB
        environment["TORCH_COMPILE_DISABLE"] = "1"  # one sampler helper compiles, for 6 to 20 s
    for name, value in os.environ.items():
        if not launcher.fullmatch(name):
            environment[name] = value

    # These override the user's environment
    environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the process is ours already
    environment["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    environment["TMPDIR"] = temporary_folder  # vLLM leaves files there when it is killed
    if not gpus:
        # On a CPU each learner has an engine, and wants some threads for itself, too
        learners = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        environment["OMP_NUM_THREADS"] = str(max(1, os.cpu_count() // (2 * learners)))
    # CUDA's handles for weights travel as pickles, which vLLM calls insecure
    environment["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1" if gpus else "0"
    if gpus:
        visible = environment.get("CUDA_VISIBLE_DEVICES", "").split(",")
        if visible == [""]:
            visible = [str(gpu) for gpu in range(torch.cuda.device_count())]
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(visible[gpu] for gpu in gpus)
    return environment


def vllm_options(
    gpus: tuple[int, ...], config, folder: str, max_length: int, args: Args
) -> dict[str, Any]:
    """The arguments of vLLM's LLM, for an engine on these GPUs, or on the CPU.

    It starts with random weights, so that a tensor that a weight sync leaves out shows at once.
    On a CPU vLLM 0.32 cannot reload "dummy" weights, so it finds a random model in `folder`.
    """
    options = {
        "dtype": args.dtype,
        "seed": args.seed,
        "max_model_len": max_length,
        "skip_tokenizer_init": True,  # token ids in and out
        "generation_config": "vllm",  # and not the model's, which may have a top-k
        "logprobs_mode": "processed_logprobs",  # those at the sampling temperature
        "gpu_memory_utilization": args.vllm_gpu_memory_utilization,
        "tensor_parallel_size": args.vllm_tensor_parallel_size,
        "enforce_eager": args.vllm_enforce_eager,
        "use_tqdm_on_load": False,
    }
    if gpus:
        options["model"] = args.model_name_or_path
        options["revision"] = args.model_revision
        options["load_format"] = "dummy"
        options["weight_transfer_config"] = {"backend": "nccl" if args.vllm_gpus else "ipc"}
        if not config.get_text_config().tie_word_embeddings:
            # The folder's config may say otherwise of a head that is not tied (see load_model)
            options["hf_overrides"] = {"tie_word_embeddings": False}
    else:
        options["model"] = folder
        options["enforce_eager"] = True
        # vLLM 0.32 on a CPU dies of a seeded request that it prefills in two parts
        options["enable_chunked_prefill"] = False
        options["max_num_batched_tokens"] = max(8192, max_length)
    return options


class VLLM:
    """One vLLM engine in a process of its own, which the rank that owns it starts, asks and ends.

    One thread at a time may use it, but any may stop it.
    """

    def __init__(self, gpus: tuple[int, ...], index: int, count: int, args: Args):
        self.gpus = gpus  # indices of its GPUs; none: it is on the CPU
        self.index = index  # its number among the engines of all ranks
        self.count = count  # of engines, on all ranks
        self.args = args
        self.process = None
        self.connection = None
        self.is_ready = False
        self.folder = None  # where weights are handed over without CUDA, in memory if possible
        self.temporary_folder = None  # vLLM's own
        self.weights = {}  # without CUDA: those of a weight sync, until its end
        self.is_connected = False  # on CUDA: whether vLLM's weight transfer is set up
        self.communicator = None  # with --vllm_gpus: NCCL's, of this rank and vLLM's workers

    def start(self, config, max_length: int) -> None:
        """Starts the process and returns.

        config: the policy's; max_length: the most tokens of a prompt with its response.
        """
        memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
        self.folder = tempfile.mkdtemp(prefix="tandem_", dir=memory)
        self.temporary_folder = tempfile.mkdtemp(prefix="tandem_")
        options = vllm_options(self.gpus, config, self.folder, max_length, self.args)
        context = mp.get_context("spawn")
        self.connection, engine_end = context.Pipe()
        folders = [self.folder, self.temporary_folder]
        random_model = None if self.gpus else config
        self.process = context.Process(
            target=run_vllm, args=(engine_end, folders, options, random_model), name="vLLM"
        )
        # vLLM and torch read the environment when they are imported, so the process is born with
        # it; patch.dict gives ours back afterwards
        environment = vllm_environment(self.gpus, self.temporary_folder)
        with mock.patch.dict(os.environ, environment, clear=True):
            self.process.start()
        engine_end.close()  # so that the connection ends with the process

    def has_answer(self, seconds: float | None) -> bool:
        """Waits so many seconds at most; whether receive() would have something to say then."""
        return bool(wait([self.connection, self.process.sentinel], seconds))

    def has_started(self, seconds: float) -> bool:
        """Waits so many seconds at most; whether vLLM is up then. RuntimeError: it died."""
        if not self.is_ready and self.has_answer(seconds):
            self.receive()
            self.is_ready = True
        return self.is_ready

    def send(self, function: Callable, *args) -> None:
        """Makes vLLM's process run function(llm, *args), whose result receive() returns.

        For a method of llm use methodcaller: methodcaller("sleep", 1) runs llm.sleep(1).
        """
        with contextlib.suppress(OSError):  # it is dead; receive will say so
            self.connection.send((function, args))

    def receive(self, seconds: float | None = None) -> Any:
        """Returns the result of what was sent, or raises its error.

        RuntimeError: the process has died. TimeoutError: no answer came within so many seconds.
        """
        if not self.has_answer(seconds):
            raise TimeoutError(f"vLLM has not answered for {seconds:g} seconds")
        try:
            if not self.connection.poll():  # it is dead, but a child of it holds the connection
                raise EOFError
            result, error, details = self.connection.recv()
        except (EOFError, OSError):
            self.process.join(timeout=5)
            exitcode = self.process.exitcode
            raise RuntimeError(
                f"vLLM's process died with exit code {exitcode}; see above"
            ) from None
        if error is not None:
            raise error from RuntimeError(f"in vLLM's process:\n{details}")
        return result

    # A weight sync is start_sync, then load_weights for each layer, then finish_sync. Without CUDA
    # the layers are collected, and go into a file that vLLM reads. On CUDA they travel by the
    # protocol of vLLM's workers: on a shared GPU as handles of the learner's memory ("ipc"), to
    # other GPUs by NCCL.

    def sync_call(self, function: Callable, *args) -> None:
        """send and receive, with the time limit of weight syncs."""
        self.send(function, *args)
        self.receive(WEIGHT_SYNC_TIMEOUT)

    def sync_call_beside(self, ours: Callable[[], None], function: Callable, *args) -> None:
        """The same, while a thread calls ours(), our part of what NCCL does on both sides.

        If vLLM fails in its part, NCCL blocks our thread for ever. It is a daemon, so it ends with
        this process.
        """
        errors = []

        def run() -> None:
            try:
                ours()
            except Exception as error:
                errors.append(error)

        self.send(function, *args)
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        deadline = time.monotonic() + WEIGHT_SYNC_TIMEOUT
        while not errors and not self.has_answer(seconds=1):
            if time.monotonic() > deadline:
                raise TimeoutError(f"vLLM has not answered for {WEIGHT_SYNC_TIMEOUT} seconds")
        if not errors:
            self.receive()
            thread.join(WEIGHT_SYNC_TIMEOUT)
        if errors:
            if self.has_answer(seconds=1):  # if vLLM has failed too, its error is the cause
                self.receive()
            raise errors[0]
        if thread.is_alive():
            raise TimeoutError(f"NCCL has sent nothing for {WEIGHT_SYNC_TIMEOUT} seconds")

    def connect(self) -> None:
        """Sets vLLM's weight transfer up; with --vllm_gpus makes an NCCL communicator."""
        if not self.args.vllm_gpus:
            self.sync_call(methodcaller("init_weight_transfer_engine", {"init_info": {}}))
            return
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
        from vllm.distributed.utils import StatelessProcessGroup

        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        world_size = 1 + len(self.gpus)  # this rank is number 0, vLLM's workers follow
        device = torch.cuda.current_device()

        def join() -> None:
            group = StatelessProcessGroup.create(
                host="127.0.0.1", port=port, rank=0, world_size=world_size
            )
            self.communicator = PyNcclCommunicator(group, device=device)

        info = {
            "master_address": "127.0.0.1",
            "master_port": port,
            "rank_offset": 1,
            "world_size": world_size,
        }
        init = methodcaller("init_weight_transfer_engine", {"init_info": info})
        self.sync_call_beside(join, init)

    def start_sync(self) -> None:
        """Begins a weight sync; vLLM must be idle."""
        self.weights = {}
        if self.gpus:
            if not self.is_connected:
                self.connect()
                self.is_connected = True
            self.sync_call(methodcaller("start_weight_update"))

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        """Hands some weights over. On CUDA vLLM has them then; else finish_sync sends them."""
        if not self.gpus:
            # Copies, for tied weights share memory, which the file must not
            self.weights |= {name: tensor.cpu().clone() for name, tensor in weights.items()}
            return
        tensors = list(weights.values())
        info = {
            "names": list(weights),
            "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors],
            "shapes": [list(tensor.shape) for tensor in tensors],
        }
        update = methodcaller("update_weights", {"update_info": info})
        if self.communicator is None:
            gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
            info["ipc_handles"] = [{str(gpu.uuid): reduce_tensor(tensor)[1]} for tensor in tensors]
            self.sync_call(update)
            return
        stream = torch.cuda.current_stream()

        def broadcast() -> None:
            for tensor in tensors:
                self.communicator.broadcast(tensor, src=0, stream=stream)

        self.sync_call_beside(broadcast, update)

    def finish_sync(self, version: int) -> None:
        """Ends a weight sync. version: the training steps that these weights have completed."""
        if self.gpus:
            self.sync_call(methodcaller("finish_weight_update"))
            torch.cuda.ipc_collect()  # memory that vLLM has read
        else:
            path = os.path.join(self.folder, "model.safetensors")
            save_file(self.weights, path, metadata={"format": "pt"})
            self.weights = {}
            # llm.collective_rpc("reload_weights", kwargs=...)
            reload = methodcaller(
                "collective_rpc", "reload_weights", kwargs={"weights_path": self.folder}
            )
            self.sync_call(reload)
        self.sync_call(finish_weight_sync, version)

    def stop(self) -> None:
        """Ends the process, and with it all that vLLM has started."""
        if self.process is not None and self.process.pid is not None:
            self.process.kill()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.join()
        if self.communicator is not None:
            with contextlib.suppress(Exception):
                self.communicator.destroy()  # also of a broadcast that vLLM has left
        for folder in (self.folder, self.temporary_folder):
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)


def make_engines(cpu_group, args: Args) -> list[VLLM]:
    """The engines that this rank owns, not yet started; they are numbered over all ranks."""
    placement = place_engines(
        args.vllm_gpus,
        args.vllm_tensor_parallel_size,
        local_rank=int(os.environ.get("LOCAL_RANK", 0)),
        num_gpus=torch.cuda.device_count(),
    )
    counts = exchange(cpu_group, len(placement))
    rank = int(os.environ.get("RANK", 0))
    first = sum(counts[:rank])
    return [VLLM(gpus, first + i, sum(counts), args) for i, gpus in enumerate(placement)]


def start_engines(cpu_group, engines: list[VLLM], config, max_length: int) -> None:
    """Starts this rank's engines, and waits until those of all ranks can be used."""
    deadline = time.monotonic() + VLLM_START_TIMEOUT

    def poll() -> bool | None:
        for engine in engines:
            if engine.process is None:
                engine.start(config, max_length)
        started = [engine.has_started(1 / len(engines)) for engine in engines]
        if all(started):
            return True
        if time.monotonic() > deadline:
            raise TimeoutError(f"vLLM has not started within {VLLM_START_TIMEOUT} seconds")
        return None

    wait_for_all(cpu_group, poll)


def gather_layers(model: torch.nn.Module, args: Args) -> Iterator[dict[str, Tensor]]:
    """The weights of a model in args.dtype, a layer at a time: {name: tensor}.

    What belongs to no layer, such as the embedding, comes alone. Weights that are sharded are
    gathered, in which all ranks take part.
    """
    weights = model.state_dict(keep_vars=True)
    if torch.cuda.is_available():
        # A tied head is the embedding. On a CPU it must be sent too, for vLLM has a copy of its own
        names = {id(weight): name for name, weight in reversed(weights.items())}
        weights = {name: weight for name, weight in weights.items() if name == names[id(weight)]}

    def layer_of(name: str) -> str:
        return re.match(r".*?\.\d+\.|.*", name)[0]  # model.layers.12. of model.layers.12.mlp...

    for _, names in itertools.groupby(weights, key=layer_of):
        layer = {}
        for name in names:
            tensor = weights[name].detach()
            if isinstance(tensor, DTensor):
                tensor = tensor.full_tensor()
            if tensor.is_floating_point():
                tensor = tensor.to(getattr(torch, args.dtype))
            layer[name] = tensor.contiguous()
        yield layer


def sync_weights(
    accelerator: Accelerator,
    cpu_group,
    engines: list[VLLM],
    policy: torch.nn.Module,
    version: int,
    args: Args,
) -> None:
    """Brings the policy's weights to the engines, which must be idle. Called on every rank.

    version: the training steps that these weights have completed.
    """
    # Without the PolicyModel around it, and what accelerate may have put around that
    model = accelerator.unwrap_model(policy, keep_torch_compile=False).model
    layers = gather_layers(model, args)
    error = None
    try:
        for engine in engines:
            engine.start_sync()
        for weights in layers:
            for engine in engines:
                engine.load_weights(weights)
        for engine in engines:
            engine.finish_sync(version)
    except Exception as raised:
        error = raised
    # After an engine's failure the other ranks go on gathering, and would wait for this one
    for _ in layers:
        pass
    exchange(cpu_group, None, error)


def receive_all(engines: list[VLLM]) -> list[Any]:
    """The result of what was sent to each engine; the first error is raised at once."""
    results = {}
    while len(results) < len(engines):
        waiting = [engine for engine in engines if engine not in results]
        wait([end for engine in waiting for end in (engine.connection, engine.process.sentinel)])
        for engine in waiting:
            if engine.has_answer(0):
                results[engine] = engine.receive()
    return [results[engine] for engine in engines]


def sample_share(
    engines: list[VLLM],
    prompts: list[Prompt],
    seeds: list[int],
    temperature: float,
    num_samples: int,
    args: Args,
) -> tuple[list[Prompt], list[list[int]], list[list[float]], int | None]:
    """Samples the responses to this rank's share of some prompts, with each engine a part of it.

    Returns the prompts of the share, the responses, their log-probabilities, and the policy's
    version (None: this rank has no engine). num_samples: samples of a prompt; equal prompts are
    adjacent.
    """
    own_prompts = []
    for engine in engines:
        some_prompts = share_of(prompts, engine.index, engine.count, num_samples)
        some_seeds = share_of(seeds, engine.index, engine.count, num_samples)
        prompt_ids = [prompt.token_ids for prompt in some_prompts]
        engine.send(sample_responses, prompt_ids, some_seeds, temperature, args)
        own_prompts += some_prompts

    responses, logprobs, version = [], [], None
    for some_responses, some_logprobs, engine_version in receive_all(engines):
        responses += some_responses
        logprobs += some_logprobs
        version = engine_version  # all are given the same weights
    return own_prompts, responses, logprobs, version


def generate_rollout(
    engines: list[VLLM], workers: list[RewardWorker], tokenizer, args: Args, request: Request
) -> Rollout:
    """This rank's share of the answers to a request, sampled and graded. It touches no weights."""
    times = {}
    with timed(times, "generation"):
        prompts, responses, logprobs, version = sample_share(
            engines,
            request.prompts,
            request.seeds,
            args.temperature,
            args.number_samples_per_prompt,
            args,
        )
    with timed(times, "evaluation"):
        eval_prompts, eval_responses, eval_logprobs, _ = sample_share(
            engines, request.eval_prompts, request.eval_seeds, args.eval_temperature, 1, args
        )
    with timed(times, "reward"):
        answers = grade_answers(workers, tokenizer, prompts, responses, logprobs, args)
    with timed(times, "evaluation"):
        eval_answers = grade_answers(
            workers, tokenizer, eval_prompts, eval_responses, eval_logprobs, args
        )
    return Rollout(request, version, answers, eval_answers, times)


def generation_thread(
    generate: Callable[[Request], Rollout], prompts_Q: queue.Queue, response_Q: queue.Queue
) -> None:
    """Answers each Request in prompts_Q with a Rollout in response_Q, or with what went wrong.

    generate: generate_rollout with every argument given but the request.
    """
    while True:
        times = {}
        with timed(times, "wait_for_prompts"):
            request = prompts_Q.get()
        try:
            rollout = generate(request)
            rollout.times.update(times)
            response_Q.put(rollout)
        except Exception as error:
            response_Q.put(error)
        except BaseException as error:  # SystemExit of a compute_score would end the thread alone
            response_Q.put(RuntimeError(f"generation ended with {error!r}"))


def join_answers(shares: list[Answers]) -> Answers:
    """Several answers as one."""
    joined = {}
    for name in vars(shares[0]):
        joined[name] = [item for share in shares for item in getattr(share, name)]
    return Answers(**joined)


def receive_rollout(cpu_group, response_Q: queue.Queue) -> Rollout:
    """Takes this rank's share from response_Q, and returns the shares of all ranks as one rollout.

    What goes wrong on one rank is raised on all at once, even if others still generate.
    """

    def take() -> Rollout | None:
        try:
            answer = response_Q.get(timeout=1)
        except queue.Empty:
            return None
        if isinstance(answer, Exception):
            raise answer
        return answer

    own_share = wait_for_all(cpu_group, take)
    # Engines are numbered by rank, so one share after the other is in the order of the request,
    # which every rank has
    shares = exchange(cpu_group, replace(own_share, request=None))
    shares = [share for share in shares if share.policy_version is not None]
    versions = {share.policy_version for share in shares}
    assert len(versions) == 1, f"engines have different weights, of versions {versions}"
    return Rollout(
        request=own_share.request,
        policy_version=versions.pop(),
        answers=join_answers([share.answers for share in shares]),
        eval_answers=join_answers([share.eval_answers for share in shares]),
        times={  # of each part the slowest rank's
            name: max(share.times[name] for share in shares) for name in own_share.times
        },
    )


def check_generation(cpu_group, response_Q: queue.Queue) -> None:
    """Raises on every rank an error that waits in a response_Q; takes nothing out."""
    error = None
    for answer in list(response_Q.queue):
        if isinstance(answer, Exception):
            error = answer
    exchange(cpu_group, None, error)


# Generation without vLLM: --generation_backend transformers.


def truncate_response(token_ids: list[int], stop_token_ids: tuple[int, ...]) -> list[int]:
    """The response up to and including its first stop token; what follows was never said.

    >>> truncate_response([7, 1, 8, 1], stop_token_ids=(1,))
    [7, 1]
    """
    for i, token_id in enumerate(token_ids):
        if token_id in stop_token_ids:
            return token_ids[: i + 1]
    return token_ids


def sample_with_transformers(
    accelerator: Accelerator,
    policy: torch.nn.Module,
    prompt_ids: list[list[int]],
    seed: int,
    temperature: float,
    args: Args,
) -> list[list[int]]:
    """Samples a response to each prompt with the learner's own model.

    What generate() is not told it takes from the model's generation config, and then top_k = 50: so
    every option is set.
    """
    config = transformers.GenerationConfig(
        max_new_tokens=args.response_length,
        do_sample=temperature > 0,
        temperature=temperature if temperature > 0 else 1.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        typical_p=1.0,
        repetition_penalty=1.0,
        num_beams=1,
        eos_token_id=list(args.stop_token_ids),
        pad_token_id=args.pad_token_id,
    )
    torch.manual_seed(seed)
    responses = []
    model = accelerator.unwrap_model(policy, keep_torch_compile=False).model
    model.eval()  # gradient checkpointing would drop the KV cache in training mode
    size = args.local_rollout_forward_batch_size
    for start in range(0, len(prompt_ids), size):
        micro_batch = prompt_ids[start : start + size]
        no_responses = [[] for _ in micro_batch]
        inputs, _ = collate(micro_batch, no_responses, args.pad_token_id, accelerator.device)
        with torch.no_grad(), autocast(accelerator, args):
            output = model.generate(
                inputs["input_ids"],
                attention_mask=inputs["attention_mask"],
                generation_config=config,
            )
        sampled = output[:, inputs["input_ids"].shape[1] :].tolist()
        responses += [truncate_response(token_ids, args.stop_token_ids) for token_ids in sampled]
    model.train()
    return responses


def generate_with_transformers(
    accelerator: Accelerator,
    policy: torch.nn.Module,
    workers: list[RewardWorker],
    tokenizer,
    request: Request,
    response_Q: queue.Queue,
    args: Args,
) -> None:
    """Does what the generation thread does, without vLLM and in the main thread.

    There are no log-probabilities of the sampler then.
    """
    rank, world_size = accelerator.process_index, accelerator.num_processes

    def sample(prompts: list[Prompt], seeds: list[int], temperature: float) -> list[list[int]]:
        prompt_ids = [prompt.token_ids for prompt in prompts]
        seed = stable_hash(seeds, rank)
        return sample_with_transformers(accelerator, policy, prompt_ids, seed, temperature, args)

    times = {}
    prompts = share_of(request.prompts, rank, world_size)
    eval_prompts = share_of(request.eval_prompts, rank, world_size)
    try:
        with timed(times, "generation"):
            responses = sample(prompts, request.seeds, args.temperature)
        with timed(times, "evaluation"):
            eval_responses = sample(eval_prompts, request.eval_seeds, args.eval_temperature)
        with timed(times, "reward"):
            answers = grade_answers(workers, tokenizer, prompts, responses, [], args)
        with timed(times, "evaluation"):
            eval_answers = grade_answers(workers, tokenizer, eval_prompts, eval_responses, [], args)
        version = request.training_step - 1
        response_Q.put(Rollout(request, version, answers, eval_answers, times))
    except Exception as error:
        response_Q.put(error)


# --------------------------------------------------------------------------- forward and backward


def draw_mini_batches(num_episodes: int, training_step: int, args: Args) -> list[list[list[int]]]:
    """The optimizer batches of a training step: [epoch][mini_batch] -> rows of the batch.

    Each epoch is a permutation of its own; all ranks draw the same.
    """
    generator = torch.Generator()
    generator.manual_seed(stable_hash(args.seed, "minibatches", training_step))
    size = args.local_mini_batch_size * args.world_size
    epochs = []
    for _ in range(args.num_epochs):
        permutation = torch.randperm(num_episodes, generator=generator)
        epochs.append([rows.tolist() for rows in permutation.split(size)])
    return epochs


def cut_micro_batches(
    rows: list[int],
    prompt_ids: list[list[int]],
    responses: list[list[int]],
    size: int,
    rank: int,
    world_size: int,
) -> list[list[int]]:
    """A rank's share of some rows of the batch, cut into micro-batches of `size` rows.

    A micro-batch is padded to its longest row, so it gets rows of like length.

    >>> prompt_ids, responses = [[7], [7], [7], [7]], [[8] * 9, [8] * 2, [8] * 8, [8] * 3]
    >>> cut_micro_batches([0, 1, 2, 3], prompt_ids, responses, size=2, rank=0, world_size=1)
    [[1, 3], [2, 0]]
    """

    def length(row: int) -> tuple[int, int, int]:
        return len(responses[row]), len(prompt_ids[row]), row

    share = sorted(rows, key=length)[rank::world_size]
    return [share[start : start + size] for start in range(0, len(share), size)]


def collate_micro_batches(
    accelerator: Accelerator,
    rows: list[int],
    prompt_ids: list[list[int]],
    responses: list[list[int]],
    size: int,
    args: Args,
) -> list[tuple[list[int], dict, Tensor]]:
    """This rank's micro-batches of some rows of the batch, each as (rows, inputs, mask)."""
    rank, world_size = accelerator.process_index, accelerator.num_processes
    micro_batches = []
    for micro_rows in cut_micro_batches(rows, prompt_ids, responses, size, rank, world_size):
        inputs, mask = collate(
            [prompt_ids[row] for row in micro_rows],
            [responses[row] for row in micro_rows],
            args.pad_token_id,
            accelerator.device,
        )
        micro_batches.append((micro_rows, inputs, mask))
    return micro_batches


def autocast(accelerator: Accelerator, args: Args) -> torch.autocast:
    """Forward passes compute in args.dtype."""
    use_bfloat16 = args.dtype == "bfloat16"
    return torch.autocast(accelerator.device.type, dtype=torch.bfloat16, enabled=use_bfloat16)


@torch.no_grad()
def forward_all(
    accelerator: Accelerator,
    model: torch.nn.Module,
    prompt_ids: list[list[int]],
    responses: list[list[int]],
    mini_batches: list[list[int]],
    size: int,
    args: Args,
) -> Tensor:
    """Runs a PolicyModel or a ValueModel over all rows, with `size` rows in a micro-batch.

    Returns log-probabilities or values on every rank: (episodes, width), 0 outside responses.
    Each mini-batch is cut exactly as in the update, since the shape of a micro-batch changes the
    last bits of what comes out.
    """
    width = max(len(response) for response in responses)
    whole = torch.zeros(len(responses), width, device=accelerator.device)
    for mini_batch in mini_batches:
        for rows, inputs, mask in collate_micro_batches(
            accelerator, mini_batch, prompt_ids, responses, size, args
        ):
            micro_width = mask.shape[1]
            with autocast(accelerator, args):
                outputs = model(inputs, micro_width)
            if isinstance(outputs, tuple):  # a policy's entropies are not asked for
                outputs, _ = outputs
            whole[rows, :micro_width] = outputs * mask
    # A row is 0 on all ranks but one, so the sum is exact
    return accelerator.reduce(whole, reduction="sum")


@torch.no_grad()
def reward_model_scores(
    accelerator: Accelerator,
    reward_model: torch.nn.Module,
    prompts: list[Prompt],
    responses: list[list[int]],
    args: Args,
) -> list[float]:
    """The reward model's scores: its head at the last token of each response, found by length.

    Equal responses to a prompt are scored once: what else is in a micro-batch moves the last bits,
    and group advantages (GRPO) make much of differences however small.
    """
    pairs = [
        (tuple(prompt.reward_model_token_ids), tuple(response))
        for prompt, response in zip(prompts, responses, strict=True)
    ]
    distinct = list(dict.fromkeys(pairs))
    prompt_ids = [list(prompt) for prompt, _ in distinct]
    distinct_responses = [list(response) for _, response in distinct]
    all_rows = list(range(len(distinct)))
    size = args.local_rollout_forward_batch_size
    head = reward_model.score.weight.float()  # in bfloat16 many scores would be equal
    scores = torch.zeros(len(distinct), device=accelerator.device)
    for rows, inputs, mask in collate_micro_batches(
        accelerator, all_rows, prompt_ids, distinct_responses, size, args
    ):
        with autocast(accelerator, args):
            hidden = reward_model.base_model(**inputs).last_hidden_state
            hidden = hidden[:, -mask.shape[1] :]  # (batch, response_length, hidden_size)
            last_token = mask.sum(1) - 1
            hidden = hidden[torch.arange(len(rows)), last_token].float()  # (batch, hidden_size)
            scores[rows] = (hidden * head).sum(-1)
    scores = accelerator.reduce(scores, reduction="sum").tolist()
    if not all(map(math.isfinite, scores)):
        raise FloatingPointError("the reward model gave a score that is not finite")
    score_of = dict(zip(distinct, scores, strict=True))
    return [score_of[pair] for pair in pairs]


def accumulate_gradients(
    accelerator: Accelerator,
    policy: torch.nn.Module,
    value_model: torch.nn.Module,
    batch: Batch,
    mini_batch: list[int],
    trains_policy: bool,
    args: Args,
) -> dict[str, Tensor]:
    """Forward and backward passes of one optimizer batch, of which this rank takes its share.

    Each loss is the mean over the mini-batch's tokens in the loss, on all ranks together, so the
    gradient does not depend on how the batch is cut (2503.14476, 3.3). No optimizer is stepped.
    Returns sums over this rank's tokens, which token_means turns into metrics. Without
    trains_policy nothing is computed for the policy.
    """
    num_tokens = max(1, int(batch.loss_mask[mini_batch].sum()))
    size = args.per_device_train_batch_size
    micro_batches = collate_micro_batches(
        accelerator, mini_batch, batch.prompt_ids, batch.responses, size, args
    )
    sums = defaultdict(float)
    for i, (rows, inputs, mask) in enumerate(micro_batches):
        # All that follows is (micro_batch, width)
        width = mask.shape[1]
        loss_mask = batch.loss_mask[rows, :width]
        old_logprobs = batch.logprobs[rows, :width]
        importance_weights = batch.importance_weights[rows, :width]
        advantages = batch.advantages[rows, :width]
        old_values = batch.values[rows, :width]
        returns = batch.returns[rows, :width]

        with contextlib.ExitStack() as stack:
            if i < len(micro_batches) - 1:  # ranks exchange gradients on the last one only
                stack.enter_context(accelerator.no_sync(policy))
                stack.enter_context(accelerator.no_sync(value_model))
            with autocast(accelerator, args):
                values = value_model(inputs, width)
            vf_loss, vf_clipped = value_loss(values, old_values, returns, args.cliprange_value)
            loss = (vf_loss * loss_mask).sum() / num_tokens
            # Ranks average their gradients; times the number of ranks, that is their sum
            accelerator.backward(loss * accelerator.num_processes)
            per_token = {"loss/value_avg": vf_loss, "val/clipfrac_avg": vf_clipped}

            if trains_policy:
                with autocast(accelerator, args):
                    logprobs, entropies = policy(inputs, width)
                log_ratio = (logprobs - old_logprobs) * loss_mask
                pg_loss, pg_clipped = policy_loss(
                    log_ratio,
                    advantages,
                    importance_weights,
                    cliprange=args.cliprange,
                    cliprange_higher=args.cliprange,
                    dual_clip=args.dual_clip,
                )
                loss = (pg_loss * loss_mask).sum() / num_tokens
                accelerator.backward(loss * accelerator.num_processes)
                log_ratio = log_ratio.detach()
                ratio = log_ratio.exp()
                per_token |= {
                    "loss/policy_avg": pg_loss,
                    "policy/approxkl_avg": log_ratio**2 / 2,
                    "policy/clipfrac_avg": pg_clipped,
                    "policy/entropy_avg": entropies,
                    "val/ratio": ratio,
                    "val/ratio_squared": ratio**2,
                }

        with torch.no_grad():
            for name, tensor in per_token.items():
                sums[name] += (tensor * loss_mask).sum(dtype=torch.float64)
            sums["tokens"] += loss_mask.sum(dtype=torch.float64)
            sums["positions"] += inputs["attention_mask"].sum(dtype=torch.float64)
            # A tensor like the others, so that ranks can add it up
            padded = torch.ones_like(inputs["attention_mask"])
            sums["padded_positions"] += padded.sum(dtype=torch.float64)
    return dict(sums)


def sum_over_ranks(accelerator: Accelerator, sums: dict[str, Tensor]) -> dict[str, float]:
    """Each of these scalars, summed over all ranks."""
    totals = accelerator.reduce(torch.stack(list(sums.values())), reduction="sum")
    return dict(zip(sums, totals.tolist(), strict=True))


def check_sampler(logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor, args: Args) -> None:
    """Only for on-policy batches: vLLM must have sampled them with exactly the learner's weights.

    All tensors are (episodes, width). RuntimeError: the log-probabilities differ by more than
    rounding. A difference that is not finite is left to check_gradient, which saves the batch.
    """
    difference = masked_mean(((logprobs - sampler_logprobs) * mask).abs(), mask).item()
    # GPUs may compute float32 with TF32; dividing by a low temperature makes rounding larger
    limit = 1e-2 if mask.is_cuda else 1e-3
    if args.dtype == "bfloat16":
        limit = 0.1 / min(1.0, args.temperature)
    if limit < difference < math.inf:
        raise RuntimeError(
            f"vLLM's log-probabilities are off the learner's by {difference:.2g} at equal weights"
        )


def check_gradient(norms: Tensor, batch: Batch, training_step: int, run_dir: Path) -> None:
    """Stops the run where a gradient norm is not finite, and saves the batch that made it so.

    All ranks see the same norms. FloatingPointError: one of them is not finite.
    """
    if torch.isfinite(norms).all():
        return
    if is_rank_0():
        torch.save(vars(batch), run_dir / "bad_batch.pt")
    raise FloatingPointError(
        f"gradient not finite in step {training_step}; its batch is bad_batch.pt in {run_dir}"
    )


# ---------------------------------------------------------------------------- metrics and files


def token_means(sums: dict[str, float]) -> dict[str, float]:
    """The metrics of a step's updates, from sums over their tokens (accumulate_gradients)."""
    tokens = max(1, sums["tokens"])
    counts = ("tokens", "positions", "padded_positions")
    metrics = {name: total / tokens for name, total in sums.items() if name not in counts}
    if "val/ratio" in metrics:  # else the policy was not trained
        variance = metrics.pop("val/ratio_squared") - metrics["val/ratio"] ** 2
        metrics["val/ratio_var"] = max(0.0, variance)  # rounding can take it below 0
    metrics["perf/padding_fraction"] = 1 - sums["positions"] / sums["padded_positions"]
    return metrics


def mismatch_metrics(batch: Batch, untruncated_weights: Tensor, args: Args) -> dict[str, Tensor]:
    """How far the sampler's log-probabilities are from the learner's.

    untruncated_weights: importance weights before truncation, (episodes, width).
    """
    mask = batch.mask
    difference = (batch.logprobs - batch.sampler_logprobs) * mask
    weights = untruncated_weights[mask.bool()]  # (tokens,)
    cut_off = torch.zeros_like(weights)
    if args.tis_cap > 0:
        cut_off = (weights > args.tis_cap).float()
    return {
        "mismatch/logprob_diff_mean": masked_mean(difference.abs(), mask),
        "mismatch/logprob_diff_max": difference.abs().max(),
        "mismatch/kl": masked_mean(kl_penalty(batch.sampler_logprobs, batch.logprobs, "kl3"), mask),
        # The effective sample size, as a share of the tokens
        "mismatch/ess": weights.sum() ** 2 / (weights**2).sum() / len(weights),
        "mismatch/tis_clipfrac": cut_off.mean(),
        "mismatch/masked": 1 - masked_mean(mismatch_mask(difference, mask, args), mask),
    }


def mean_by_source(
    name: str, prompts: list[Prompt], values: list[float | None]
) -> dict[str, float]:
    """Mean of the values that are not None; with several data sources, the mean of each as well."""
    groups = {}
    for prompt, value in zip(prompts, values, strict=True):
        if value is not None:
            groups.setdefault(name, []).append(value)
            groups.setdefault(f"{name}/{prompt.data_source}", []).append(value)
    if len(groups) == 2:  # all, and a single source, whose mean is the same
        groups = {name: groups[name]}
    return {key: sum(group) / len(group) for key, group in groups.items()}


def score_metrics(
    group: str, prompts: list[Prompt], scores: Scores, args: Args
) -> dict[str, float]:
    """What responses earned, in all and by part: metrics of a group, "objective" or "eval"."""
    parts = {
        "scores": scores.scores,
        "reward_model_score": scores.model_scores,
        "verifiable_score": scores.verifiable,
        # Rewards may give partial credit, and only the whole is right
        "verifiable_correct_rate": [
            None if score is None else score >= 1 for score in scores.verifiable
        ],
    }
    if args.add_r1_style_format_reward:
        parts["format_rate"] = scores.formats
    if args.non_stop_penalty:
        parts["penalty_rate"] = scores.penalized
    metrics = {}
    for name, values in parts.items():
        metrics |= mean_by_source(f"{group}/{name}", prompts, values)
    metrics[f"{group}/reward_failures"] = sum(cause is not None for cause in scores.failures)
    return metrics


def response_metrics(batch: Batch, args: Args) -> dict[str, Any]:
    """The metrics of a step's responses: spread of their scores, their entropy, their length."""
    stopped = [response[-1] in args.stop_token_ids for response in batch.responses]
    return {
        "objective/scores_std": batch.scores[batch.scored.bool()].std(correction=0),
        "objective/entropy": (-batch.logprobs * batch.mask).sum(1).mean(),
        "val/num_stop_token_ids": sum(stopped),
        "val/stop_rate": torch.tensor(stopped).float().mean(),
        "val/sequence_lengths": batch.mask.sum(1).mean(),
    }


def kl_metrics(batch: Batch, args: Args) -> dict[str, Tensor]:
    """The KL to the reference policy, summed over each response, and its cost in reward."""
    kl1 = (batch.logprobs - batch.ref_logprobs) * batch.mask
    kl = kl_penalty(batch.logprobs, batch.ref_logprobs, args.kl_estimator) * batch.mask
    non_score_reward = (-args.beta * kl).sum(1).mean()
    return {
        "objective/kl": kl1.sum(1).mean(),
        "objective/non_score_reward": non_score_reward,
        "objective/rlhf_reward": masked_mean(batch.scores, batch.scored) + non_score_reward,
    }


def compute_metrics(batch: Batch, sums: dict[str, float], args: Args) -> dict[str, Any]:
    """The metrics of a training step: a function of its batch, and of sums over its updates.

    sums: what accumulate_gradients returns, added up over updates and ranks. Values are floats,
    or tensors of one element. docs/ppo_sync.md says what each metric means.
    """
    metrics = {
        **token_means(sums),
        **response_metrics(batch, args),
        **kl_metrics(batch, args),
    }
    if "loss/policy_avg" in metrics:
        metrics["objective/loss"] = metrics["loss/policy_avg"] + metrics["loss/value_avg"]
    in_loss = batch.loss_mask.bool()
    returns = batch.returns[in_loss]  # (tokens,)
    residuals = (batch.returns - batch.values)[in_loss]
    unexplained = residuals.var() / returns.var().clamp(min=1e-8)
    metrics["val/explained_variance"] = 1 - unexplained
    return metrics


def step_times(times: dict[str, float], rollout: Rollout, seconds: float) -> dict[str, float]:
    """The seconds of a training step and of its parts, as if there were no evaluation.

    times: what the learner's parts took; seconds: from the step's start to its end. What counts
    as evaluation is its scoring, and its generation as far as the learner had to wait for it.
    """
    result = {**times, **rollout.times}
    scoring = result.pop("evaluation_scoring", 0.0)
    waiting = min(result.pop("evaluation"), result["wait_for_generation"])
    result["wait_for_generation"] -= waiting
    result["training"] = seconds - scoring - waiting
    return result


def speed_metrics(times: dict[str, float], batch: Batch) -> dict[str, Any]:
    """The metrics of a training step that a faster machine would change."""
    memory = torch.cuda.max_memory_allocated() or psutil.Process().memory_info().rss
    return {
        **{f"time/{name}": seconds for name, seconds in times.items()},
        "perf/memory_gib": memory / 2**30,
        "perf/episodes_per_second": len(batch.responses) / times["training"],
        "perf/response_tokens_per_second": batch.mask.sum() / times["training"],
    }


def evaluation_metrics(rollout: Rollout, scores: Scores, args: Args) -> dict[str, float]:
    """The eval/* metrics of a rollout's answers to the held-out prompts."""
    prompts, responses = rollout.request.eval_prompts, rollout.eval_answers.responses
    stopped = [response[-1] in args.stop_token_ids for response in responses]
    return {
        **score_metrics("eval", prompts, scores, args),
        "eval/policy_version": rollout.policy_version,
        "eval/sequence_lengths": sum(map(len, responses)) / len(responses),
        "eval/stop_rate": sum(stopped) / len(responses),
    }


def append_lines(path: Path, lines: list[dict]) -> None:
    """Appends lines to a .jsonl file."""
    with open(path, "a") as file:
        for line in lines:
            file.write(json.dumps(line) + "\n")


def write_samples(
    accelerator: Accelerator, rollout: Rollout, scores: Scores, run_dir: Path
) -> None:
    """Writes the answers to the held-out prompts to samples.jsonl, and shows a few of them."""
    if not accelerator.is_main_process:
        return
    version = rollout.policy_version
    samples = []
    prompts = rollout.request.eval_prompts
    for prompt, text, score in zip(prompts, scores.texts, scores.scores, strict=True):
        sample = {
            "prompt": prompt.text,
            "response": text,
            "ground_truth": prompt.ground_truth,
            "score": score,
            "data_source": prompt.data_source,
            "policy_version": version,
        }
        samples.append(sample)
    append_lines(run_dir / "samples.jsonl", samples)

    columns = list(samples[0])
    cells = [[str(value) for value in sample.values()] for sample in samples]
    for tracker in accelerator.trackers:
        tracker.log_table("sample_completions", columns, cells, commit=False)

    known_scores = [score for score in scores.scores if score is not None]
    mean_score = "unknown"
    if known_scores:
        mean_score = f"{sum(known_scores) / len(known_scores):.3f}"
    title = f"Held-out prompts, policy version {version}: score {mean_score}"
    table = Table(*columns[:4], title=title, title_justify="left")
    for row in cells[:4]:
        shown = []
        for text in row[:4]:
            if len(text) > 300:
                text = f"{text[:200]} ... {text[-95:]}"
            lines = [printable(line) for line in text.split("\n")]
            shown.append("\n".join(lines))
        table.add_row(*shown)
    Console(soft_wrap=True, markup=False, emoji=False).print(table)


def write_rollouts(
    accelerator: Accelerator,
    rollout: Rollout,
    batch: Batch,
    scores: Scores,
    run_dir: Path,
    args: Args,
) -> None:
    """Appends a step's first four responses to rollouts.jsonl, with score and advantage."""
    if not accelerator.is_main_process:
        return
    lengths = batch.mask.sum(1)  # (episodes,)
    advantages = (batch.advantages.sum(1) / lengths).tolist()  # the mean over a response's tokens
    samples = []
    for i, response in enumerate(batch.responses[:4]):
        sample = {
            "training_step": rollout.request.training_step,
            "prompt": rollout.request.prompts[i].text,
            "response": scores.texts[i],
            "score": scores.scores[i],
            "advantage": advantages[i],
            "length": len(response),
            "stopped": response[-1] in args.stop_token_ids,
            "policy_version": rollout.policy_version,
        }
        samples.append(sample)
    append_lines(run_dir / "rollouts.jsonl", samples)


def report_evaluation(
    accelerator: Accelerator,
    reward_model: torch.nn.Module | None,
    rollout: Rollout,
    run_dir: Path,
    args: Args,
) -> dict[str, float]:
    """Scores a rollout's answers to the held-out prompts, writes them down, returns eval/*."""
    prompts = rollout.request.eval_prompts
    scores = score_answers(accelerator, reward_model, prompts, rollout.eval_answers, args)
    write_samples(accelerator, rollout, scores, run_dir)
    return evaluation_metrics(rollout, scores, args)


def write_metrics(
    accelerator: Accelerator, metrics: dict[str, Any], run_dir: Path, console: Console, args: Args
) -> None:
    """Writes a step's metrics to metrics.jsonl and to the trackers, and shows some of them."""
    metrics = {
        name: value.item() if isinstance(value, Tensor) else value
        for name, value in metrics.items()
    }
    step = metrics["training_step"]
    accelerator.log(metrics, step=step)
    if not accelerator.is_main_process:
        return
    append_lines(run_dir / "metrics.jsonl", [metrics])
    if step % max(1, args.num_training_steps // 20) == 0:
        shown = (
            "objective/scores",
            "objective/kl",
            "val/sequence_lengths",
            "perf/episodes_per_second",
        )
        figures = [f"{name.split('/')[1]} {metrics[name]:.3g}" for name in shown if name in metrics]
        console.print(f"step {step}/{args.num_training_steps}  {'  '.join(figures)}")
        if metrics["val/stop_rate"] < 0.8 and not args.non_stop_penalty:
            console.print(
                f"Warning: {1 - metrics['val/stop_rate']:.0%} of the responses were cut at "
                f"--response_length {args.response_length}; allow more, or add --non_stop_penalty"
            )


def save_model(
    accelerator: Accelerator, policy: torch.nn.Module, tokenizer, path: Path, args: Args
) -> None:
    """Writes the policy and its tokenizer in Hugging Face format, under another name at first.

    Its generation config is the one that it came with, but for the end tokens, which are the run's.
    """
    model = accelerator.unwrap_model(policy).model
    state = accelerator.get_state_dict(model)
    generation_config = copy.deepcopy(model.generation_config)
    generation_config.eos_token_id = list(args.stop_token_ids)

    def write() -> None:
        unfinished = path.with_name(path.name + ".unfinished")
        # transformers refuses to save what a model may have come with, such as a temperature
        # without do_sample. So it saves a default in its place, and we write this file ourselves.
        with mock.patch.object(model, "generation_config", transformers.GenerationConfig()):
            model.save_pretrained(unfinished, state_dict=state)
        text = generation_config.to_json_string(keys_to_pop=["compile_config"])
        (unfinished / "generation_config.json").write_text(text)
        tokenizer.save_pretrained(unfinished)
        older = path.with_name(path.name + ".older")
        if path.exists():  # of a run that had come to its end, and was resumed
            shutil.rmtree(older, ignore_errors=True)
            path.rename(older)
        unfinished.rename(path)
        shutil.rmtree(older, ignore_errors=True)

    on_main_process(accelerator, write)


# ------------------------------------------------------------------------------------ checkpoints


def list_checkpoints(run_dir: Path) -> list[Path]:
    """A run's complete checkpoints, the newest last."""
    found = {}
    for path in run_dir.glob("checkpoints/step_*"):
        match = re.fullmatch(r"step_(\d+)", path.name)
        if match:
            found[int(match[1])] = path
    return [found[step] for step in sorted(found)]


def remove_checkpoints(run_dir: Path, checkpoints: list[Path]) -> None:
    """Removes these checkpoints, and all unfinished ones: interrupted while written or removed."""
    for path in [*run_dir.glob("checkpoints/step_*.unfinished"), *checkpoints]:
        unfinished = path.with_suffix(".unfinished")
        try:
            path.rename(unfinished)  # half a checkpoint must not look like a whole one
            shutil.rmtree(unfinished)
        except OSError as error:
            print(f"Warning: {path} cannot be removed ({error})")


def use_plain_names(accelerator: Accelerator) -> None:
    """Makes checkpoints independent of the number of ranks: DDP would prefix names of weights."""

    def before_saving(models: list, weights: list[dict], folder: str) -> None:
        for i in range(len(weights)):  # FSDP, which saves by itself, has none here
            model = accelerator.unwrap_model(models[i])
            named = itertools.chain(model.named_parameters(), model.named_buffers())
            names = {name for name, _ in named}  # of tied weights one name
            state = model.state_dict()
            weights[i] = {name: state[name].contiguous() for name in state if name in names}

    def before_loading(models: list, folder: str) -> None:
        models[:] = [accelerator.unwrap_model(model) for model in models]

    accelerator.register_save_state_pre_hook(before_saving)
    accelerator.register_load_state_pre_hook(before_loading)


def save_checkpoint(
    accelerator: Accelerator,
    cpu_group,
    run_dir: Path,
    state: RunState,
    rollout: dict | None,
    args: Args,
) -> int:
    """Writes checkpoints/step_N: models, optimizers, state, a rollout, the run's files so far.

    The folder has another name until all of it is on the disk. Then only the newest keep_last_n
    checkpoints are kept. Every rank must call this. rollout: the next step's, by pack_rollout.
    Returns the bytes of its files. OSError: it could not be saved, and what there was is removed.
    """
    folder = run_dir / "checkpoints" / f"step_{state.completed_steps}"
    unfinished = folder.with_suffix(".unfinished")

    def begin() -> None:
        remove_checkpoints(run_dir, [])  # unfinished ones
        unfinished.mkdir(parents=True)

    def finish() -> int:
        for name in ("args.json", "metrics.jsonl", "samples.jsonl", "rollouts.jsonl"):
            if (run_dir / name).exists():
                shutil.copyfile(run_dir / name, unfinished / name)
        if rollout is not None:
            (unfinished / "next_rollout.json").write_text(json.dumps(rollout))
        files = [path for path in unfinished.rglob("*") if path.is_file()]
        sizes = {str(path.relative_to(unfinished)): path.stat().st_size for path in files}
        description = {"format": CHECKPOINT_FORMAT, "state": asdict(state), "sizes": sizes}
        (unfinished / "checkpoint.json").write_text(json.dumps(description))
        for path in [*files, unfinished / "checkpoint.json"]:
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        unfinished.rename(folder)
        return sum(sizes.values())

    try:
        on_main_process(accelerator, begin)
        error = None
        try:
            if not unfinished.is_dir():
                raise OSError(
                    f"--output_dir {args.output_dir} is not on a disk that all nodes share"
                )
            accelerator.save_state(unfinished)
        except Exception as raised:
            error = raised
        exchange(cpu_group, None, error)
        size = on_main_process(accelerator, finish)
    except Exception as error:
        message = f"{folder} could not be saved"
        if run_dir.exists():
            message += f"; its disk has {shutil.disk_usage(run_dir).free >> 20} MiB free"
        raise OSError(message) from error
    finally:
        if accelerator.is_main_process:
            shutil.rmtree(unfinished, ignore_errors=True)
    oldest = list_checkpoints(run_dir)[: -args.keep_last_n]  # none where keep_last_n is 0
    on_main_process(accelerator, remove_checkpoints, run_dir, oldest)
    return size


def lock_run_folder(run_dir: Path) -> None:
    """Refuses a run that another process trains. This process has the lock until its end."""
    try:
        lock = os.open(run_dir / ".lock", os.O_CREAT | os.O_WRONLY)
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            bad_input(f"{run_dir}: another process trains this run; end that first")
        # Some shared disks have no locks
        print(f"Warning: {run_dir} cannot be locked ({error}); start no second process in it")


def load_checkpoint(accelerator: Accelerator, cpu_group, args: Args) -> None:
    """Loads weights and optimizer states. Every rank must call this."""
    path = Path(args.resume_from_checkpoint)
    if is_rank_0():
        lock_run_folder(path.parent.parent)  # another process could remove the checkpoint
    error = None
    try:
        # By way of the CPU, since two copies may not fit on a GPU
        accelerator.load_state(path, map_location="cpu")
    except Exception as raised:
        error = raised
    try:
        exchange(cpu_group, None, error)
    except Exception as error:
        bad_input(
            f"--resume_from_checkpoint {path}: it cannot be loaded; resume an older one "
            f"({type(error).__name__}: {error})"
        )


def hash_evaluation(request: Request, args: Args) -> int:
    """A hash of the evaluation that a request asks for."""
    return stable_hash(hash_prompts(request.eval_prompts), args.eval_temperature)


def pack_rollout(rollout: Rollout, args: Args) -> dict:
    """A rollout as JSON can hold it. Its request is left out, being a function of the step."""
    return {
        "policy_version": rollout.policy_version,
        "answers": vars(rollout.answers),
        "eval_answers": vars(rollout.eval_answers),
        "evaluation": hash_evaluation(rollout.request, args),
        "times": rollout.times,
    }


def unpack_rollout(path: Path, request: Request, args: Args) -> Rollout:
    """Reads a rollout that pack_rollout made. Rank 0 gets all answers, and other ranks none.

    So receive_rollout can join these shares. Answers to held-out prompts are dropped where the
    request asks for another evaluation, or for none.
    """
    packed = json.loads(path.read_text())
    answers = Answers(**packed["answers"])
    eval_answers = Answers(**packed["eval_answers"])
    version = packed["policy_version"]
    nothing = Answers(responses=[], sampler_logprobs=[], texts=[], verifiable=[], failures=[])
    if packed["evaluation"] != hash_evaluation(request, args):
        request = replace(request, eval_prompts=[], eval_seeds=[])
        eval_answers = nothing
    if not is_rank_0():
        answers, eval_answers, version = nothing, nothing, None
    return Rollout(request, version, answers, eval_answers, packed["times"])


def rewind_run_folder(run_dir: Path, args: Args) -> None:
    """Takes a run's .jsonl files back to what they were at the checkpoint."""
    checkpoint = Path(args.resume_from_checkpoint)
    for name in ("metrics.jsonl", "samples.jsonl", "rollouts.jsonl"):
        if (checkpoint / name).exists():
            unfinished = run_dir / f"{name}.unfinished"
            shutil.copyfile(checkpoint / name, unfinished)
            unfinished.rename(run_dir / name)
        else:
            (run_dir / name).unlink(missing_ok=True)


def newer_checkpoints(args: Args) -> list[Path]:
    """The checkpoints of a run that are newer than the one to resume."""
    if not args.resume_from_checkpoint:
        return []
    checkpoints = list_checkpoints(Path(args.output_dir, args.run_name))
    return checkpoints[checkpoints.index(Path(args.resume_from_checkpoint)) + 1 :]


def print_resume_command(run_dir: Path) -> None:
    """Prints the command that resumes the run from its newest checkpoint, if there is one."""
    checkpoints = list_checkpoints(run_dir)
    if not checkpoints:
        return
    command = sys.argv
    with contextlib.suppress(psutil.Error):
        process = psutil.Process()
        for ancestor in (process, *process.parents()[:1]):  # a launcher's command ends with ours
            if ancestor.cmdline()[-len(sys.argv) :] == sys.argv:
                command = ancestor.cmdline()
    words = []
    for previous, word in itertools.pairwise(["", *command]):
        flags = ("--resume_from_checkpoint", "--resume-from-checkpoint")
        if not word.startswith(flags) and previous not in flags:
            words.append(word)
    words += ["--resume_from_checkpoint", str(checkpoints[-1])]
    print(f"To resume: {shlex.join(words)}", file=sys.stderr, flush=True)


# ------------------------------------------------------------------------- checks and the set-up


def check_launcher() -> None:
    """Refuses environment variables of a launcher that are malformed or do not fit together."""
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT"]
    ranks = {name: os.environ.get(name, "0" if "RANK" in name else "1") for name in names}
    needed = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
    missing = [name for name in needed if not os.environ.get(name)]
    problem = None
    if not all(value.isdecimal() for value in ranks.values()):
        problem = "must be whole numbers"
    elif int(ranks["MASTER_PORT"]) not in range(1, 2**16):
        problem = "have a MASTER_PORT that is none"
    elif "0" in (ranks["WORLD_SIZE"], ranks["LOCAL_WORLD_SIZE"]):
        problem = "are a launch of no processes"
    elif missing and (int(ranks["WORLD_SIZE"]) > 1 or "LOCAL_RANK" in os.environ):
        problem = f"lack {', '.join(missing)}"
    elif int(ranks["RANK"]) >= int(ranks["WORLD_SIZE"]):
        problem = "have a RANK that is not below the WORLD_SIZE"
    if problem is not None:
        found = [f"{name}={os.environ[name]!r}" for name in names if name in os.environ]
        os.environ.pop(
            "LOCAL_RANK", None
        )  # another rank than the first would wait before it prints
        bad_input(
            f"the environment variables {', '.join(found)} {problem}; unset them, or let torchrun "
            f"or accelerate set them"
        )


def check_numbers(args: Args) -> None:
    """Refuses numbers that are out of range.

    A number must be above 0. It may be 0 if its default is 0 or its name is in may_be_0. If its
    name is not in at_most, a float may be a million and an int a billion at most: what is larger
    overflows, or fills the memory.
    """
    may_be_0 = {"seed", "learning_rate", "num_evals", "beta", "gamma", "lam", "tis_cap"}
    may_be_0 |= {"value_learning_rate", "value_lam", "verification_reward", "reward_memory"}
    may_be_0 |= {"reward_model_multiplier", "keep_last_n"}
    at_least = {
        "temperature": 0.01,  # below, vLLM samples at 0.01
        "eval_temperature": 0.01,
        "eps": 1e-20,  # a float32 that is much smaller is 0
    }
    at_most = {
        "learning_rate": 1,
        "value_learning_rate": 1,
        "weight_decay": 1,
        "warmup_ratio": 1,
        "gamma": 1,
        "lam": 1,
        "value_lam": 1,
        "vllm_gpu_memory_utilization": 1,
        "seed": 2**32 - 1,  # this limit, and those of both temperatures, are vLLM's
        "temperature": 2,
        "eval_temperature": 2,
        "tis_cap": 1e30,
        "max_grad_norm": 1e30,
        "num_evals": 10_000,
        "num_epochs": 1000,
        "reward_workers": 1000,
    }
    for name, value in vars(args).items():
        if type(value) not in (int, float):  # isinstance would take True for a number
            continue
        if name == "stop_token_id":
            continue
        if not math.isfinite(value) and name != "mismatch_mask_range":
            bad_input(f"--{name} is {value}; it must be finite")
        largest = at_most.get(name, 10**6 if isinstance(value, float) else 10**9)
        if value > largest and name != "mismatch_mask_range":
            bad_input(f"--{name} is {value}; it must be at most {largest}")
        if name == "penalty_reward_value":
            if value < -largest:
                bad_input(f"--{name} is {value}; it must be at least {-largest}")
            continue
        default = getattr(Args, name)
        if name in may_be_0 or default == 0:
            if value < 0:
                bad_input(f"--{name} is {value}; it must be 0 or more")
        elif value <= 0:
            bad_input(f"--{name} is {value}; it must be above 0")
        if 0 < value < at_least.get(name, 0):
            bad_input(f"--{name} is {value}; it must be at least {at_least[name]}")
    if not args.mismatch_mask_range >= 1:
        bad_input(f"--mismatch_mask_range is {args.mismatch_mask_range}; it must be 1 or more")
    if 0 < args.dual_clip <= 1:
        bad_input(f"--dual_clip is {args.dual_clip}; it must be above 1, or 0")


def fill_in(args: Args) -> Args:
    """Checks the numbers, and returns a copy with defaults and run-time fields filled in."""
    check_numbers(args)
    if not (
        args.apply_verifiable_reward or args.add_r1_style_format_reward or uses_reward_model(args)
    ):
        bad_input(
            "no reward; add --apply_verifiable_reward, --add_r1_style_format_reward, or a "
            "--reward_model_path whose --reward_model_multiplier is above 0"
        )
    args = replace(args)  # a copy
    args.world_size = int(os.environ.get("WORLD_SIZE", 1))
    if args.resume_from_checkpoint:
        find_checkpoint(args)
    if not args.run_name:
        args.run_name = f"{args.exp_name}__{args.seed}__{time.strftime('%Y%m%d_%H%M%S')}"

    # Batches
    local_episodes = args.local_rollout_batch_size * args.number_samples_per_prompt
    args.rollout_batch_size = args.local_rollout_batch_size * args.world_size
    args.episodes_per_step = local_episodes * args.world_size
    args.mini_batch_size = args.local_mini_batch_size * args.world_size
    if local_episodes % args.local_mini_batch_size != 0:
        bad_input(
            f"local_rollout_batch_size * number_samples_per_prompt ({local_episodes}) must be "
            f"a multiple of local_mini_batch_size ({args.local_mini_batch_size})"
        )
    if args.local_mini_batch_size % args.per_device_train_batch_size != 0:
        bad_input(
            f"local_mini_batch_size ({args.local_mini_batch_size}) must be a multiple of "
            f"per_device_train_batch_size ({args.per_device_train_batch_size})"
        )

    if args.episodes_per_step > 10**6:
        bad_input(
            f"a step would have {args.episodes_per_step:,} responses (local_rollout_batch_size * "
            f"number_samples_per_prompt * ranks); it must be a million at most"
        )

    # Steps
    args.num_training_steps = args.total_episodes // args.episodes_per_step
    if args.num_training_steps == 0:
        bad_input(
            f"--total_episodes {args.total_episodes} is less than the {args.episodes_per_step} "
            f"of one step"
        )
    updates_per_epoch = local_episodes // args.local_mini_batch_size
    args.num_updates = args.num_training_steps * args.num_epochs * updates_per_epoch
    if args.warm_up_steps == 0:
        args.warm_up_steps = round(args.warmup_ratio * args.num_updates)
    if args.warm_up_steps >= args.num_updates:
        bad_input(
            f"--warm_up_steps {args.warm_up_steps} (or --warmup_ratio {args.warmup_ratio:g}): the "
            f"run has {args.num_updates} updates, so the learning rate would not rise to its full "
            f"value before the last"
        )
    if args.num_evals > 0:
        eval_every = max(1, args.num_training_steps // args.num_evals)
        # After 0, eval_every, 2 * eval_every ... steps. But not before the last step, whose line of
        # metrics has the last evaluation already.
        before_last_step = max(1, args.num_training_steps - 1)
        args.eval_steps = tuple(range(0, before_last_step, eval_every))

    # GPUs and CPU cores
    learners = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if args.reward_workers is None:
        scoring_ranks = 1 if args.vllm_gpus else learners  # of a node
        args.reward_workers = min(8, max(1, os.cpu_count() // scoring_ranks))
    if args.vllm_gpu_memory_utilization is None:
        args.vllm_gpu_memory_utilization = 0.9 if args.vllm_gpus else 0.3
    free_gpus = list(range(learners, torch.cuda.device_count()))
    if len(set(args.vllm_gpus) & set(free_gpus)) < len(args.vllm_gpus):
        bad_input(
            f"--vllm_gpus {args.vllm_gpus} must be GPUs without a learner, each named once: "
            f"{free_gpus}"
        )
    if args.vllm_gpus and len(args.vllm_gpus) % args.vllm_tensor_parallel_size != 0:
        bad_input(
            f"--vllm_gpus {args.vllm_gpus} must be a multiple of --vllm_tensor_parallel_size "
            f"({args.vllm_tensor_parallel_size}), the GPUs of one engine"
        )
    if not args.vllm_gpus and args.vllm_tensor_parallel_size > 1:
        bad_input(
            f"--vllm_tensor_parallel_size {args.vllm_tensor_parallel_size} needs --vllm_gpus: an "
            f"engine that shares a learner's GPU has that one alone"
        )
    return args


def load_or_refuse(auto_class: type, flag: str, path: str, args: Args) -> Any:
    """auto_class.from_pretrained(path); where that fails, the path given by --flag is bad input."""
    advice = "it cannot be loaded"
    if not os.path.exists(path):
        advice = "no such folder, and the hub has no such model that you may read"
        if not hub_answers():
            advice = "no such folder, the hub does not answer, and it is not in the cache"
    try:
        return auto_class.from_pretrained(
            path, revision=revision_of(path, args), trust_remote_code=False
        )
    except Exception as error:
        bad_input(f"--{flag} {path}: {advice} ({error})")


def read_chat_template(path: str) -> str:
    """The text of the file of --chat_template."""
    if not os.path.isfile(path):
        bad_input(f"--chat_template {path}: no such file")
    if os.path.getsize(path) > 2**20:
        bad_input(f"--chat_template {path}: it is larger than 1 MiB; is it a template?")
    try:
        return Path(path).read_text("utf-8")
    except (OSError, ValueError) as error:
        bad_input(f"--chat_template {path}: it cannot be read ({error})")


def load_tokenizers(args: Args) -> tuple:
    """The tokenizers of the policy and of the reward model, which must agree on text."""
    if args.tokenizer_name_or_path:
        flag, path = "tokenizer_name_or_path", args.tokenizer_name_or_path
    else:
        flag, path = "model_name_or_path", args.model_name_or_path
    tokenizer = load_or_refuse(AutoTokenizer, flag, path, args)
    if args.chat_template:
        tokenizer.chat_template = read_chat_template(args.chat_template)
    if not args.reward_model_path:
        return tokenizer, tokenizer

    path = args.reward_model_path
    reward_tokenizer = load_or_refuse(AutoTokenizer, "reward_model_path", path, args)
    if reward_tokenizer.chat_template is None:
        reward_tokenizer.chat_template = tokenizer.chat_template
    probe = "Is 2 + 2 = 4?\n Yes."
    ids = tokenizer(probe, add_special_tokens=False)["input_ids"]
    reward_ids = reward_tokenizer(probe, add_special_tokens=False)["input_ids"]
    if ids != reward_ids:
        bad_input(f"--reward_model_path {path}: its tokenizer is not the policy's")
    return tokenizer, reward_tokenizer


def check_model(
    auto_class: type, flag: str, path: str, args: Args, may_lack: tuple = (), **config_options
) -> torch.nn.Module:
    """Builds the model without its weights; what load_model would fail on is bad input.

    The names and shapes of the weights are compared with those that the model needs. may_lack:
    names that need not be there. Where the model is on the hub this downloads it, so with --dry_run
    it is built from its config alone.
    """
    config = load_or_refuse(AutoConfig, flag, path, args)
    if getattr(config, "quantization_config", None) is not None:
        bad_input(f"--{flag} {path} is quantized; give the model that it was made from")
    report = {"missing_keys": set(), "mismatched_keys": set()}
    try:
        text_config = config.get_text_config()
        heads = getattr(text_config, "num_attention_heads", None)
        groups = getattr(text_config, "num_key_value_heads", None)
        if heads and groups and heads % groups != 0:
            raise ValueError(f"{heads} attention heads cannot share {groups} key-value heads")
        if os.path.exists(path) or not args.dry_run:
            model, report = load_model(
                auto_class, path, args, trained=True, device_map="meta", **config_options
            )
        else:
            with torch.device("meta"):
                model = auto_class.from_config(config, attn_implementation=args.attn_implementation)
    except Exception as error:
        bad_input(
            f"--{flag} {path}: no model can be built from its config.json and .safetensors "
            f"({type(error).__name__}: {error})"
        )
    missing = sorted(report["missing_keys"] - set(may_lack))
    if missing:
        bad_input(f"--{flag} {path}: its .safetensors lack {', '.join(missing[:3])}")
    for name, shape, needed_shape in sorted(report["mismatched_keys"]):
        bad_input(
            f"--{flag} {path}: in its .safetensors {name} is {list(shape)}, and by its config.json "
            f"{list(needed_shape)}"
        )
    return model


def check_policy(args: Args) -> int:
    """Refuses a policy that is no decoder; returns the number of its parameters."""
    path = args.model_name_or_path
    model = check_model(AutoModelForCausalLM, "model_name_or_path", path, args)
    name = type(model).__name__
    # AutoModelForCausalLM builds decoders of encoders such as BERT, too; what was saved tells
    saved_as = str(model.config.architectures or name)
    is_decoder = name in saved_as or "CausalLM" in saved_as or "LMHead" in saved_as
    if model.config.is_encoder_decoder or not is_decoder:
        bad_input(
            f"--model_name_or_path {path} is {saved_as}; it must be a decoder, a causal language "
            f"model"
        )
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        bad_input(f"--model_name_or_path {path}: a {name} takes no logits_to_keep, which is needed")
    return sum(parameter.numel() for parameter in model.parameters())


def check_classifier(flag: str, path: str, vocab_size: int, args: Args, may_lack_head: bool) -> int:
    """Refuses a reward or value model that has several labels, or not the policy's vocabulary.

    Returns the number of its parameters.
    """
    config = load_or_refuse(AutoConfig, flag, path, args)
    if "SequenceClassification" in str(config.architectures):
        labels = config.num_labels
    elif may_lack_head:
        labels = 1  # it gets a head
    else:
        labels = 0
    own_vocab_size = getattr(config.get_text_config(), "vocab_size", 0)  # a ViT has none
    if labels != 1 or own_vocab_size != vocab_size:
        bad_input(
            f"--{flag} {path} needs one label (it has {labels}) and the policy's vocabulary "
            f"of {vocab_size} (it has {own_vocab_size})"
        )
    may_lack = ("score.weight",) if may_lack_head else ()
    model = check_model(
        AutoModelForSequenceClassification, flag, path, args, may_lack, num_labels=1
    )
    if not hasattr(model, "score"):
        bad_input(f"--{flag} {path}: a {type(model).__name__} has no head named score")
    return sum(parameter.numel() for parameter in model.parameters())


def find_stop_tokens(args: Args, tokenizer, config) -> tuple[int, ...]:
    """The ids that end a response: the end tokens of the model, and those of the flags."""
    eos = config.get_text_config().eos_token_id
    path = args.model_name_or_path
    try:
        generation_config = transformers.GenerationConfig.from_pretrained(
            path, revision=args.model_revision
        )
        if generation_config.eos_token_id is not None:
            eos = generation_config.eos_token_id
    except OSError as error:  # a model may come without a generation config
        if os.path.exists(os.path.join(path, "generation_config.json")):
            bad_input(f"--model_name_or_path {path}: {error}")
    stop_ids = list(eos) if isinstance(eos, list) else [eos]
    stop_ids.append(args.stop_token_id)
    if args.stop_token is not None:
        stop_token = tokenizer.eos_token if args.stop_token == "eos" else args.stop_token
        if stop_token not in tokenizer.get_vocab():
            bad_input(
                f"--stop_token {args.stop_token!r} is not a token of the tokenizer; or give a "
                f"--stop_token_id"
            )
        stop_ids.append(tokenizer.get_vocab()[stop_token])
    stop_ids = [token_id for token_id in stop_ids if token_id is not None]

    if not stop_ids:
        bad_input("the model names no stop token; give a --stop_token or a --stop_token_id")
    vocab_size = config.get_text_config().vocab_size
    if any(token_id not in range(vocab_size) for token_id in stop_ids):
        bad_input(
            f"stop tokens {stop_ids}: they must be in the model's vocabulary of {vocab_size}; see "
            f"--stop_token, --stop_token_id, and the model's generation_config.json"
        )
    return tuple(sorted(set(stop_ids)))


def check_rewards(args: Args, prompts: list[Prompt]) -> dict[str, float]:
    """Tries the reward out on the ground truth of the first prompt of each data source.

    The ground truth is given as the response, as it stands and as \\boxed{...}; the better score
    counts. Returns {data source: score}; a reward function that fails on one of them is bad input.
    The first rank of a node does it for all: a call may be expensive.
    """
    if not is_local_rank_0():
        return {}
    first_prompts = {}
    for prompt in prompts:
        if prompt.ground_truth is not None:
            first_prompts.setdefault(prompt.data_source, prompt)
    worker = RewardWorker(args, is_quiet=True)  # what it prints would hide the line of bad_input
    truth_scores = {}
    try:
        if args.reward_fn and first_prompts:
            worker.start()
            try:
                worker.wait_for_import()
            except RuntimeError as error:
                bad_input(f"--reward_fn {args.reward_fn}: {error}")
        for source, prompt in first_prompts.items():
            truth = str(prompt.ground_truth)
            answers = [truth, f"\\boxed{{{truth}}}"]
            try:
                if args.reward_fn:
                    scores = [worker.score(prompt, answer) for answer in answers]
                else:
                    scores = [verifiable_reward(None, prompt, answer) for answer in answers]
            except Exception as error:
                name = f"--reward_fn {args.reward_fn}" if args.reward_fn else "compute_score"
                bad_input(f"{name} fails on {prompt.row} with {truth!r}: {error}")
            truth_scores[source] = max(scores)
    finally:
        worker.stop()
    return truth_scores


def parse_args() -> Args:
    """The arguments of the command line, not yet checked."""
    description = __doc__.split("\n\n")[0]
    args, unknown = tyro.cli(Args, description=description, return_unknown_args=True)
    if unknown:
        bad_input(f"unknown flag {' '.join(unknown)}; --help lists all")
    for name, value in vars(args).items():
        if value == "":
            bad_input(f"--{name} is empty; give it a value, or leave it out")
    return args


def find_checkpoint(args: Args) -> None:
    """Fills in the path of the checkpoint to resume, and the folder of its run."""
    given = f"--resume_from_checkpoint {args.resume_from_checkpoint}"
    if args.resume_from_checkpoint == "latest":
        if not args.run_name:
            bad_input(f"{given}: of which run? Give its --run_name")
        run_dir = Path(args.output_dir, args.run_name)
        checkpoints = list_checkpoints(run_dir)
        if not checkpoints:
            advice = "leave the flag out"
            if run_dir.exists():
                advice = "remove that folder, or choose another --run_name, and leave the flag out"
            bad_input(f"{given}: {run_dir} has no checkpoint; to begin a run {advice}")
        args.resume_from_checkpoint = str(checkpoints[-1])
        return
    path = Path(os.path.abspath(args.resume_from_checkpoint))
    is_named = re.fullmatch(r"step_\d+", path.name) and path.parent.name == "checkpoints"
    if not is_named or not (path / "checkpoint.json").is_file():
        advice = "it must be a folder such as output/RUN_NAME/checkpoints/step_100"
        checkpoints = list_checkpoints(path)
        if checkpoints:
            advice = f"its newest is {checkpoints[-1]}"
        bad_input(f"{given}: this is no checkpoint; {advice}")
    run_dir = path.parent.parent
    if args.run_name and Path(args.output_dir, args.run_name).resolve() != run_dir.resolve():
        bad_input(f"{given} is of another run than --run_name {args.run_name}; leave that out")
    args.resume_from_checkpoint = str(path)
    args.output_dir, args.run_name = str(run_dir.parent), run_dir.name


def read_checkpoint(args: Args) -> RunState:
    """Reads the state in a checkpoint. Refuses one whose files are missing or cut."""
    folder = Path(args.resume_from_checkpoint)
    given = f"--resume_from_checkpoint {folder}"
    try:
        description = json.loads((folder / "checkpoint.json").read_text())
        if description["format"] != CHECKPOINT_FORMAT:
            bad_input(
                f"{given} has format {description['format']}, and this script reads "
                f"{CHECKPOINT_FORMAT}; resume it with the version that wrote it"
            )
        sizes, state = dict(description["sizes"]), dict(description["state"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        bad_input(f"{given}: checkpoint.json is damaged; resume an older one ({error!r})")
    if state.keys() != {field.name for field in fields(RunState)}:
        bad_input(f"{given} was written by another script; resume it with that")
    for name, size in sizes.items():
        found = (folder / name).stat().st_size if (folder / name).is_file() else None
        if found is None:
            bad_input(f"{given} lacks {name}; resume an older one")
        if found != size:
            bad_input(f"{given}: {name} has {found} bytes and not {size}; resume an older one")
    for name in ("args.json", "next_rollout.json"):
        try:
            if name in sizes:
                json.loads((folder / name).read_text())
        except ValueError as error:
            bad_input(f"{given}: {name} is damaged; resume an older one ({error})")
    return RunState(**state)


def check_same_run(args: Args, state: RunState, num_steps: int) -> None:
    """Refuses arguments or data under which the steps until the checkpoint would have been others.

    num_steps: training steps of the whole run.
    """
    # Names of all scripts that have this function; not every script has each of them
    may_differ = {"exp_name", "run_name", "output_dir", "dry_run", "resume_from_checkpoint"}
    may_differ |= {"save_freq", "keep_last_n"}
    may_differ |= {"with_tracking", "wandb_project_name", "wandb_entity"}
    may_differ |= {"eval_dataset", "eval_dataset_split", "num_evals", "eval_temperature"}
    # How fast it goes, and how batches are split. Their sizes over all ranks are compared
    may_differ |= {"world_size", "local_rollout_batch_size", "local_mini_batch_size"}
    may_differ |= {"per_device_train_batch_size", "local_rollout_forward_batch_size"}
    may_differ |= {"gradient_checkpointing", "vllm_gpus", "vllm_tensor_parallel_size"}
    may_differ |= {"vllm_gpu_memory_utilization", "vllm_enforce_eager"}
    # Time, memory and processes that a reward function may take
    may_differ |= {"reward_workers", "reward_timeout", "reward_memory"}
    # What follows from them is compared: data_hash, warm_up_steps, total_episodes
    may_differ |= {"dataset", "dataset_split", "warmup_ratio"}
    may_differ |= {"num_training_steps", "num_updates", "eval_steps"}
    if args.num_parameters == 0:  # a model on the hub, which --dry_run does not look at
        may_differ |= {"num_parameters"}
    if args.lr_scheduler_type == "constant":  # other schedules depend on the length of the run
        may_differ |= {"total_episodes", "num_train_epochs"}

    given = f"--resume_from_checkpoint {args.resume_from_checkpoint}"
    saved = json.loads(Path(args.resume_from_checkpoint, "args.json").read_text())
    # By way of JSON, as the saved ones: a tuple is a list there
    current = json.loads(json.dumps(asdict(args)))
    defaults = json.loads(json.dumps(asdict(Args())))
    saved = defaults | saved  # an older version of this script had fewer
    differences = []
    for name in sorted(saved.keys() - may_differ):
        was, now = saved[name], current.get(name, "unknown")
        if name == "data_hash" and was != now:
            differences.append("the rows of --dataset are others")
        elif was != now:
            differences.append(f"{name} was {was} and is {now}")
    if differences:
        bad_input(f"{given} is of a run with other arguments: {'; '.join(differences)}")
    if state.completed_steps >= num_steps:
        bad_input(
            f"{given}: its {state.completed_steps} steps are done, and this run has only "
            f"{num_steps}; make it longer"
        )


def check_run_folder(args: Args) -> None:
    """Refuses a run folder that is there (unless its run is resumed), or cannot be written."""
    run_dir = Path(args.output_dir, args.run_name).absolute()
    if args.resume_from_checkpoint:
        try:
            with tempfile.TemporaryDirectory(prefix=".probe-", dir=run_dir):
                return
        except OSError as error:
            bad_input(f"{run_dir} cannot be written to ({error.strerror})")
    if os.path.lexists(run_dir):
        bad_input(f"{run_dir} holds another run; choose another --run_name or --output_dir")
    try:
        str(run_dir).encode()  # the libraries that write the model need a name in UTF-8
        # The same folders are made and removed in one of their own, since several runs may start at
        # once and share what is above theirs
        existing = next(path for path in run_dir.parents if os.path.lexists(path))
        with tempfile.TemporaryDirectory(prefix=".probe-", dir=existing) as folder:
            probe = Path(folder, run_dir.relative_to(existing))
            probe.mkdir(parents=True)
            (probe / "metrics.jsonl").write_text("a probe")
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        bad_input(f"--output_dir {args.output_dir}: {run_dir} cannot be made ({reason})")


def bytes_of_checkpoints(bytes_of_one: int, num_steps: int, args: Args) -> int:
    """About the bytes that a run's checkpoints take on the disk, all that are there at once.

    The oldest is removed only when a new one is complete. num_steps: training steps of the run.
    """
    if args.save_freq == 0:
        return 0
    count = (num_steps - 1) // args.save_freq  # there is none after the last step
    if args.keep_last_n > 0:
        count = min(count, args.keep_last_n + 1)
    return bytes_of_one * count


def check_disk(args: Args, num_parameters: int, checkpoint_bytes: int) -> None:
    """Refuses a disk that has no room for the final model, checkpoints, and a little besides."""
    run_dir = Path(args.output_dir, args.run_name).absolute()
    existing = next(path for path in (run_dir, *run_dir.parents) if path.exists())

    def bytes_in(folder: Path) -> int:
        return sum(path.stat().st_size for path in folder.rglob("*"))

    free = shutil.disk_usage(existing).free
    # Where a run is resumed, some checkpoints are there already, and what is unfinished will go
    for folder in [*run_dir.glob("checkpoints/*.unfinished"), *run_dir.glob("model.*")]:
        free += bytes_in(folder)
    for folder in list_checkpoints(run_dir)[-args.keep_last_n :]:
        checkpoint_bytes -= bytes_in(folder)
    checkpoint_bytes = max(0, checkpoint_bytes)
    needed = 4 * num_parameters + checkpoint_bytes + 2**25
    if free < needed:
        bad_input(
            f"--output_dir {args.output_dir}: {free >> 20} MiB free, {needed >> 20} are needed, "
            f"{checkpoint_bytes >> 20} of them for checkpoints"
        )


def check_run(args: Args, tokenizer, config, max_length: int) -> None:
    """Refuses what cannot work with this model on this machine.

    max_length: the most tokens of a prompt with its response.
    """
    text_config = config.get_text_config()
    if len(tokenizer) > text_config.vocab_size:
        bad_input(
            f"the tokenizer has {len(tokenizer)} tokens and the model only {text_config.vocab_size}"
        )
    limit = getattr(text_config, "max_position_embeddings", None)
    if limit is not None and max_length > limit:
        bad_input(
            f"prompts with --response_length take {max_length} positions; the model has {limit}"
        )

    if args.with_tracking and os.environ.get("WANDB_MODE") not in ("offline", "disabled"):
        server = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
        if not os.environ.get("WANDB_API_KEY") and not get_netrc_auth(server):
            bad_input("--with_tracking: run `wandb login`, or set WANDB_MODE=offline")


def describe_engines(args: Args) -> str:
    """How many vLLM engines there will be, and where."""
    if not args.vllm_gpus:
        place = "on each learner's GPU" if torch.cuda.is_available() else "for each learner"
        return f"{args.world_size} of vLLM, one {place}"
    nodes = args.world_size // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    engines = nodes * len(args.vllm_gpus) // args.vllm_tensor_parallel_size
    gpus = ", ".join(map(str, args.vllm_gpus))
    place = f"GPU {gpus}" if nodes == 1 else f"GPU {gpus} of each of {nodes} nodes"
    return f"{engines} of vLLM, on {place}"


def print_plan(
    args: Args,
    checkpoint_bytes: int,
    train_prompts: list[Prompt],
    eval_prompts: list[Prompt],
    truth_scores: dict[str, float],
    engines: str,
) -> None:
    """Prints what the run will do: data, steps, processes, updates, memory, rewards.

    engines: what samples the responses, in words. checkpoint_bytes: of all checkpoints.
    """
    num_parameters = args.num_parameters
    longest = max(len(prompt.token_ids) for prompt in train_prompts)
    steps = args.num_training_steps
    tokens = args.episodes_per_step * (longest + args.response_length)
    trained = 16 * num_parameters / 2**30  # float32: weights, gradients, AdamW's two moments
    frozen = (4 if args.dtype == "float32" else 2) * num_parameters / 2**30
    batch = f"{args.rollout_batch_size:,} prompts x {args.number_samples_per_prompt}"
    print("Plan")
    if hub_answers.cache_info().misses > 0 and not hub_answers():
        print("  hub      it does not answer; what the caches have of it is used")
    print(f"  data     {len(train_prompts):,} prompts of up to {longest} tokens,", end=" ")
    print(f"and {len(eval_prompts):,} held out")
    print(f"  steps    {steps:,} of {batch}, up to {tokens:,} tokens")
    print(f"  engines  {engines}")
    print(f"  learners {args.world_size}")
    # `accelerate launch --cpu --num_processes 2` sets these, and not WORLD_SIZE
    launched_for_several = {"ACCELERATE_MIXED_PRECISION", "MASTER_PORT"} <= os.environ.keys()
    if launched_for_several and "WORLD_SIZE" not in os.environ:
        print("           The launcher was told of several processes and has started one. Without")
        print("           GPUs: ACCELERATE_USE_CPU=true torchrun --nproc_per_node 2 SCRIPT ...")
    print(f"  updates  {args.num_updates // steps} a step, {args.num_updates:,} in all")
    print(
        f"  memory   {trained:.3g} GiB per rank for each trained model (weights, gradients,",
        end=" ",
    )
    print(f"AdamW), {frozen:.3g} GiB for each")
    print(f"           frozen one and for vLLM's ({num_parameters:,} parameters); and activations")
    saves = "no checkpoints (--save_freq)"
    if args.save_freq > 0:
        size = f"{checkpoint_bytes / 2**30:.3g} GiB of disk for all"
        saves = f"a checkpoint every {args.save_freq} steps, {size}"
    print(f"  saves    {saves}")
    if args.resume_from_checkpoint:
        print(f"  resumes  {printable(args.resume_from_checkpoint)}")
        newer = ", ".join(path.name for path in newer_checkpoints(args))
        if newer:
            print(f"           and removes {newer}, which are newer")
    rewards = []
    if args.apply_verifiable_reward:
        name = printable(args.reward_fn or "compute_score")
        rewards.append(f"{args.verification_reward:g} x {name}")
    if uses_reward_model(args):
        rewards.append(f"{args.reward_model_multiplier:g} x the reward model's score")
    if args.add_r1_style_format_reward:
        rewards.append(f"{args.r1_style_format_reward:g} for <think> and <answer>")
    print(f"  reward   {' + '.join(rewards)}")
    if args.non_stop_penalty:
        print(f"           or {args.penalty_reward_value:g} without a stop token")
    for source, score in truth_scores.items():
        name = printable(str(source))
        print(f"           the ground truth of a row of {name} scores {score:g}")


def handle_signals() -> None:
    """Makes SIGTERM and Ctrl-C raise an exception, so that `finally` is reached; once.

    Launchers send them twice, and the second must not interrupt what `finally` does.
    """

    def end(signal_number, frame) -> None:
        ignore_signals()
        if signal_number == signal.SIGINT:
            raise KeyboardInterrupt
        print("Terminated", file=sys.stderr)
        sys.exit(143)

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)


def ignore_signals() -> None:
    """Makes SIGTERM and Ctrl-C do nothing any more."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def make_run_folder(
    accelerator: Accelerator, prompts: list[Prompt], state: RunState, args: Args
) -> Path:
    """Makes the run's folder with its arguments, and starts wandb where it is asked for.

    A run that is resumed continues in its folder, whose lines are taken back to the checkpoint, and
    in its run in Weights & Biases. Fills in state.wandb_id on rank 0.
    """
    run_dir = Path(args.output_dir) / args.run_name
    is_resumed = args.resume_from_checkpoint is not None
    prompt_lengths = [len(prompt.token_ids) for prompt in prompts]
    if accelerator.is_main_process:
        try:
            run_dir.mkdir(parents=True, exist_ok=is_resumed)
        except FileExistsError:  # made since it was looked at
            bad_input(f"{run_dir} holds another run; choose another --run_name or --output_dir")
        lock_run_folder(run_dir)
        # Printed where the run ends early
        atexit.register(print_resume_command, run_dir)
        if is_resumed:
            rewind_run_folder(run_dir, args)
        (run_dir / "args.json").write_text(json.dumps(asdict(args), indent=2) + "\n")
        (run_dir / "token_length.json").write_text(json.dumps(prompt_lengths))
    accelerator.init_trackers(
        args.wandb_project_name,
        config=asdict(args),
        init_kwargs={
            "wandb": {
                "name": args.run_name,
                "entity": args.wandb_entity,
                "id": state.wandb_id,
                "resume": "allow",
            }
        },
    )
    for tracker in accelerator.trackers:
        import wandb

        if accelerator.is_main_process:
            state.wandb_id = tracker.run.id
        if not is_resumed:
            tracker.log({"token_length": wandb.Histogram(prompt_lengths)}, step=0)
    return run_dir


# ------------------------------------------------------------------------------------------- main


def main() -> None:
    start_time = time.time()
    check_launcher()
    args = fill_in(parse_args())
    # What only PPO has
    updates_per_step = args.num_updates // args.num_training_steps
    value_warmup_updates = args.value_warmup_steps * updates_per_step
    num_policy_updates = args.num_updates - value_warmup_updates
    if args.warm_up_steps >= num_policy_updates:
        bad_input(
            f"--value_warmup_steps {args.value_warmup_steps} leaves the policy "
            f"{max(0, num_policy_updates)} updates of {args.num_updates}, too few for its learning "
            f"rate to rise to its full value (--warm_up_steps {args.warm_up_steps})"
        )
    if args.kl_target > 0 and (args.beta == 0 or args.kl_horizon < args.episodes_per_step):
        bad_input(
            f"--kl_target needs --beta above 0 ({args.beta}), and a --kl_horizon of at least the "
            f"{args.episodes_per_step} episodes of a step ({args.kl_horizon})"
        )
    # A shell starts what it puts into the background with Ctrl-C ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # A missing head is expected: no warning about it
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()

    timeout = timedelta(hours=2)  # others wait while a rank downloads, loads or saves a model
    try:
        accelerator = Accelerator(
            mixed_precision="no",  # autocast is ours
            log_with="wandb" if args.with_tracking else None,
            kwargs_handlers=[InitProcessGroupKwargs(timeout=timeout)],
        )
    except Exception as error:
        bad_input(f"accelerate cannot start; is it launched and configured right? ({error})")
    if accelerator.num_processes != args.world_size:
        bad_input(
            f"the launcher started {args.world_size} processes, and accelerate found "
            f"{accelerator.num_processes}; without GPUs set ACCELERATE_USE_CPU=true"
        )
    cpu_group = None  # NCCL would wait for a rank that has ended; gloo raises an error
    if accelerator.num_processes > 1:
        cpu_group = torch.distributed.new_group(backend="gloo", timeout=timeout)
    args.run_name = exchange(cpu_group, args.run_name)[0]  # it may have the time in it

    # ---- All that can be wrong, before a model is loaded
    if args.generation_backend != "vllm" and args.vllm_gpus:
        bad_input("--vllm_gpus: there is no vLLM with --generation_backend transformers")
    if args.generation_backend == "vllm" and importlib.util.find_spec("vllm") is None:
        bad_input("vLLM is not installed (requirements.txt); --generation_backend transformers")
    state = RunState(completed_steps=0, beta=args.beta, seconds=0.0, wandb_id=None)
    if args.resume_from_checkpoint:
        state = read_checkpoint(args)
    first_step = state.completed_steps + 1
    start_time -= state.seconds
    if is_rank_0():
        check_run_folder(args)
    config = load_or_refuse(AutoConfig, "model_name_or_path", args.model_name_or_path, args)
    tokenizer, reward_tokenizer = load_tokenizers(args)
    train_prompts = prepare_prompts(
        args.dataset, args.dataset_split, tokenizer, reward_tokenizer, args
    )
    eval_prompts = []
    if args.eval_dataset:
        eval_prompts = prepare_prompts(
            args.eval_dataset,
            args.eval_dataset_split,
            tokenizer,
            reward_tokenizer,
            args,
            is_eval=True,
        )
    truth_scores = check_rewards(args, train_prompts + eval_prompts)

    # The models come last, for what is on the hub is downloaded now
    args.num_parameters = check_policy(args)
    vocab_size = config.get_text_config().vocab_size
    # The value model is made from the reward model, another one, or the policy
    if args.reward_model_path:
        num_value_parameters = check_classifier(
            "reward_model_path", args.reward_model_path, vocab_size, args, may_lack_head=False
        )
    if args.value_model_path:
        num_value_parameters = check_classifier(
            "value_model_path", args.value_model_path, vocab_size, args, may_lack_head=True
        )
    elif not args.reward_model_path:
        num_value_parameters = check_classifier(
            "model_name_or_path", args.model_name_or_path, vocab_size, args, may_lack_head=True
        )
    args.stop_token_ids = find_stop_tokens(args, tokenizer, config)
    args.pad_token_id = tokenizer.pad_token_id
    if args.pad_token_id is None:
        args.pad_token_id = args.stop_token_ids[0]

    longest_prompt = max(len(prompt.token_ids) for prompt in train_prompts + eval_prompts)
    max_length = longest_prompt + args.response_length
    check_run(args, tokenizer, config, max_length)
    args.data_hash = hash_prompts(train_prompts)
    if args.resume_from_checkpoint:
        check_same_run(args, state, args.num_training_steps)
    if is_rank_0():
        # Weights and AdamW's two moments in float32; and responses, about 30 bytes a token
        bytes_of_one = 12 * (args.num_parameters + num_value_parameters)
        num_responses = args.episodes_per_step + len(eval_prompts)
        bytes_of_one += 30 * num_responses * args.response_length
        checkpoint_bytes = bytes_of_checkpoints(bytes_of_one, args.num_training_steps, args)
        check_disk(args, args.num_parameters, checkpoint_bytes)
        sampler = "none; each learner samples with transformers"
        if args.generation_backend == "vllm":
            sampler = describe_engines(args)
        print_plan(args, checkpoint_bytes, train_prompts, eval_prompts, truth_scores, sampler)
    # All ranks wait for one another here, and end where one found bad input
    found = (hash_prompts(train_prompts + eval_prompts), state.completed_steps)
    if len(set(exchange(cpu_group, found))) > 1:
        bad_input(
            "ranks have read different prompts or checkpoints; every node needs the same files"
        )
    if args.dry_run:
        return

    # ---- Models and optimizers, and the run's folder
    device = accelerator.device
    is_main = accelerator.is_main_process
    console = Console(soft_wrap=True, quiet=not is_main)
    uses_vllm = args.generation_backend == "vllm"
    if device.type == "cuda" and uses_vllm and not args.vllm_gpus:
        # What vLLM needs of the GPU that it shares; and a little for CUDA itself
        for_others = args.vllm_gpu_memory_utilization + 0.02
        torch.cuda.set_per_process_memory_fraction(max(0.05, 1 - for_others), device)

    model, _ = load_model(AutoModelForCausalLM, args.model_name_or_path, args, trained=True)
    ref_model, _ = load_model(AutoModelForCausalLM, args.model_name_or_path, args, trained=False)
    policy = PolicyModel(model, args.temperature)
    ref_policy = PolicyModel(ref_model, args.temperature).to(device)
    value_model = load_value_model(args)
    reward_model = None
    if uses_reward_model(args):
        reward_model, _ = load_model(
            AutoModelForSequenceClassification, args.reward_model_path, args, trained=False
        )
        reward_model.to(device)

    # Their learning rates are set before each update
    optimizer = torch.optim.AdamW(policy.parameters(), eps=args.eps, weight_decay=args.weight_decay)
    value_optimizer = torch.optim.AdamW(
        value_model.parameters(), eps=args.eps, weight_decay=args.weight_decay
    )
    policy, optimizer = accelerator.prepare(policy, optimizer)
    value_model, value_optimizer = accelerator.prepare(value_model, value_optimizer)
    # Not earlier: Python runs no handler while a rank waits for one that has found bad input. By
    # default SIGTERM ends it there
    handle_signals()
    use_plain_names(accelerator)
    if args.resume_from_checkpoint:
        load_checkpoint(accelerator, cpu_group, args)
    run_dir = make_run_folder(accelerator, train_prompts, state, args)
    args.beta = state.beta  # not earlier: args.json has the one of the command line
    if cpu_group is not None:
        torch.distributed.barrier(cpu_group)
    prompts_Q = queue.Queue(maxsize=1)  # of a Request
    response_Q = queue.Queue(maxsize=1)  # of a Rollout, this rank's share, or of an exception
    engines = make_engines(cpu_group, args) if uses_vllm else []
    workers = start_reward_workers(args) if engines or not uses_vllm else []
    generate = functools.partial(generate_rollout, engines, workers, tokenizer, args)
    try:
        # ---- vLLM, and the thread that generates
        if uses_vllm:
            console.print("Starting vLLM ...")
            start_engines(cpu_group, engines, model.config, max_length)
            threading.Thread(
                target=generation_thread, args=(generate, prompts_Q, response_Q), daemon=True
            ).start()
        # Not earlier: if vLLM did not start, these checkpoints would be lost for nothing
        on_main_process(accelerator, remove_checkpoints, run_dir, newer_checkpoints(args))

        # ---- The loop
        steps = range(first_step, args.num_training_steps + 1)
        for training_step in track(steps, console=console, disable=not console.is_terminal):
            step_start = time.perf_counter()
            times = {}
            version = training_step - 1  # of the policy, until this step's updates
            metrics = {}

            # 1. The current weights go to vLLM
            if uses_vllm:
                with timed(times, "weight_sync"):
                    sync_weights(accelerator, cpu_group, engines, policy, version, args)

            # 2. This step's prompts, and held-out ones where an evaluation is due; the responses
            request = make_request(training_step, train_prompts, eval_prompts, args)
            with timed(times, "wait_for_generation"):
                if args.resume_from_checkpoint and training_step == first_step:
                    # The checkpoint has the responses
                    path = Path(args.resume_from_checkpoint, "next_rollout.json")
                    response_Q.put(unpack_rollout(path, request, args))
                elif uses_vllm:
                    prompts_Q.put(request)
                else:
                    generate_with_transformers(
                        accelerator, policy, workers, tokenizer, request, response_Q, args
                    )
                rollout = receive_rollout(cpu_group, response_Q)
            request, answers = rollout.request, rollout.answers

            # 3. Every save_freq steps a checkpoint: the models after the previous step, and this
            # step's responses, which would not be sampled alike on a GPU. The first step of a
            # process saves none: its models are the initial ones, or those of a checkpoint.
            is_due = args.save_freq > 0 and version % args.save_freq == 0
            if is_due and training_step > first_step:
                state.completed_steps = version
                state.beta = args.beta
                state.seconds = time.time() - start_time
                next_rollout = pack_rollout(rollout, args)
                with timed(times, "checkpoint"):
                    metrics["perf/checkpoint_bytes"] = save_checkpoint(
                        accelerator, cpu_group, run_dir, state, next_rollout, args
                    )

            # 4. Scores: the verifiable rewards came with the responses, the reward model's are
            # made now. Where an evaluation was due, those of its answers too
            if request.eval_prompts:
                with timed(times, "evaluation_scoring"):
                    metrics |= report_evaluation(accelerator, reward_model, rollout, run_dir, args)
            prompt_ids = [prompt.token_ids for prompt in request.prompts]
            responses = answers.responses
            with timed(times, "reward_model"):
                response_scores = score_answers(
                    accelerator, reward_model, request.prompts, answers, args
                )
            check_scores(response_scores)
            # A failed reward does not mean a wrong answer: the response is left out of the loss
            scored = torch.tensor([score is not None for score in response_scores.scores])
            scored = scored.float().to(device)  # (episodes,)
            scores = torch.tensor([score or 0.0 for score in response_scores.scores], device=device)

            # 5. Log-probabilities and values before any update, (episodes, width). The policy and
            # the value model see the very micro-batches of the first epoch: other shapes would
            # change the last bits, and the ratios of the first update would not be exactly 1.
            epochs = draw_mini_batches(len(responses), training_step, args)
            train_size = args.per_device_train_batch_size
            forward_size = args.local_rollout_forward_batch_size
            all_rows = list(range(len(responses)))
            with timed(times, "forward"):
                logprobs = forward_all(
                    accelerator, policy, prompt_ids, responses, epochs[0], train_size, args
                )
                values = forward_all(
                    accelerator, value_model, prompt_ids, responses, epochs[0], train_size, args
                )
                ref_logprobs = forward_all(
                    accelerator, ref_policy, prompt_ids, responses, [all_rows], forward_size, args
                )
            mask = pad([[1.0] * len(response) for response in responses], device)
            loss_mask = mask * scored[:, None]
            sampler_logprobs = logprobs  # where the learner is the sampler
            if uses_vllm:
                sampler_logprobs = pad(answers.sampler_logprobs, device)
                check_sampler(logprobs, sampler_logprobs, mask, args)
            # The sampler is not the learner: its kernels are others. So there are importance
            # weights (https://fengyao.notion.site/off-policy-rl).
            untruncated_weights = (logprobs - sampler_logprobs).exp()
            importance_weights = mask  # all 1
            if args.tis_cap > 0:
                importance_weights = untruncated_weights.clamp(max=args.tis_cap) * mask
            # With weight 0 the policy does not train on a token, but the value model does, and the
            # token counts in the mean
            in_range = mismatch_mask(logprobs - sampler_logprobs, mask, args)
            importance_weights = importance_weights * in_range

            # 6. Rewards per token: the KL penalty everywhere, the score on the last token
            rewards = -args.beta * kl_penalty(logprobs, ref_logprobs, args.kl_estimator) * mask
            last_token = mask.sum(1).long() - 1  # (episodes,)
            rewards[all_rows, last_token] += scores
            if args.whiten_rewards:
                rewards = masked_whiten(rewards, loss_mask, shift_mean=False)

            # 7. Advantages, and the value model's targets with a lambda of their own, on the whole
            # batch: (episodes, width)
            advantages, _ = compute_gae(rewards, values, mask, args.gamma, args.lam)
            advantages = masked_whiten(advantages, loss_mask)
            _, returns = compute_gae(rewards, values, mask, args.gamma, args.value_lam)

            batch = Batch(
                prompt_ids=prompt_ids,
                responses=responses,
                mask=mask,
                scores=scores,
                scored=scored,
                loss_mask=loss_mask,
                sampler_logprobs=sampler_logprobs,
                logprobs=logprobs,
                ref_logprobs=ref_logprobs,
                values=values,
                rewards=rewards,
                advantages=advantages,
                returns=returns,
                importance_weights=importance_weights,
            )

            # 8. Updates. The schedule of each learning rate starts at the model's own first update.
            trains_policy = training_step > args.value_warmup_steps
            sums = defaultdict(float)
            grad_norms = defaultdict(list)
            update = version * updates_per_step  # counted over the run; the value model has all
            lr = 0.0  # while only the value model learns
            with timed(times, "update"):
                for mini_batch in itertools.chain(*epochs):
                    update_sums = accumulate_gradients(
                        accelerator, policy, value_model, batch, mini_batch, trains_policy, args
                    )
                    for name, total in update_sums.items():
                        sums[name] += total

                    norm = accelerator.clip_grad_norm_(value_model.parameters(), args.max_grad_norm)
                    grad_norms["optim/value_grad_norm"].append(norm)
                    check_gradient(norm, batch, training_step, run_dir)
                    value_lr = args.value_learning_rate
                    value_lr *= lr_multiplier(update, args.num_updates, args)
                    value_optimizer.param_groups[0]["lr"] = value_lr
                    value_optimizer.step()
                    value_optimizer.zero_grad()

                    if trains_policy:
                        norm = accelerator.clip_grad_norm_(policy.parameters(), args.max_grad_norm)
                        grad_norms["optim/grad_norm"].append(norm)
                        check_gradient(norm, batch, training_step, run_dir)
                        policy_update = update - value_warmup_updates
                        lr = args.learning_rate
                        lr *= lr_multiplier(policy_update, num_policy_updates, args)
                        optimizer.param_groups[0]["lr"] = lr
                        optimizer.step()
                        optimizer.zero_grad()
                    update += 1

            # 9. Metrics
            times = step_times(times, rollout, time.perf_counter() - step_start)
            times["from_scratch"] = time.time() - start_time
            sums = sum_over_ranks(accelerator, sums)
            metrics |= compute_metrics(batch, sums, args)
            if uses_vllm:
                metrics |= mismatch_metrics(batch, untruncated_weights, args)
            metrics |= score_metrics("objective", request.prompts, response_scores, args)
            metrics |= speed_metrics(times, batch)
            for name, norms in grad_norms.items():
                metrics[name] = torch.stack(norms).mean()
            metrics["training_step"] = training_step
            metrics["episode"] = training_step * args.episodes_per_step
            metrics["epoch"] = training_step * args.rollout_batch_size / len(train_prompts)
            metrics["lr"] = lr
            metrics["objective/kl_coef"] = args.beta
            metrics["policy/version"] = version
            write_rollouts(accelerator, rollout, batch, response_scores, run_dir, args)

            if args.kl_target > 0 and trains_policy:
                args.beta = adapted_beta(metrics["objective/kl"].item(), args)

            # 10. After the last update the model is saved, and then comes the last evaluation. The
            # step's metrics are written even if that fails.
            try:
                if training_step == args.num_training_steps:
                    save_model(accelerator, policy, tokenizer, run_dir / "model", args)
                    if eval_prompts:
                        request = make_request(training_step + 1, train_prompts, eval_prompts, args)
                        if uses_vllm:
                            sync_weights(
                                accelerator, cpu_group, engines, policy, training_step, args
                            )
                            prompts_Q.put(request)
                        else:
                            generate_with_transformers(
                                accelerator, policy, workers, tokenizer, request, response_Q, args
                            )
                        last = receive_rollout(cpu_group, response_Q)
                        metrics |= report_evaluation(accelerator, reward_model, last, run_dir, args)
            finally:
                write_metrics(accelerator, metrics, run_dir, console, args)
        atexit.unregister(print_resume_command)
    finally:
        ignore_signals()
        for engine in engines:
            engine.stop()
        for worker in workers:
            worker.stop()
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C can end whatever hangs after this

    # ---- Pictures, and a summary of the run
    handle_signals()
    if is_main:
        for tool in ("plot_runs.py", "summarize_run.py"):
            path = Path(__file__).parent / "scripts" / tool
            subprocess.run([sys.executable, path, run_dir], check=False)
    accelerator.end_training()


if __name__ == "__main__":
    if sys.stdout is not None:
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal may know ASCII alone
    try:
        main()
    except KeyboardInterrupt:
        print("Interrupted", file=sys.stderr)
        sys.exit(130)
