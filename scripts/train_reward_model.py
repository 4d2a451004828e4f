r"""Trains a reward model on pairs of a chosen and a rejected response (Bradley-Terry), in one file.

No GPU needed, sets itself up, learns in a minute:

    bash scripts/train/debug/reward_model.sh

One GPU (--help lists every option, with a line on each):

    accelerate launch --num_processes 1 scripts/train_reward_model.py \
        --model_name_or_path Qwen/Qwen3-0.6B \
        --dataset rm_train.parquet --eval_dataset rm_test.parquet --save_freq 50

Eight GPUs:

    accelerate launch --num_processes 8 scripts/train_reward_model.py \
        --model_name_or_path Qwen/Qwen3-0.6B \
        --dataset rm_train.parquet --eval_dataset rm_test.parquet

Two ranks without GPUs:

    ACCELERATE_USE_CPU=true torchrun --nproc_per_node 2 scripts/train_reward_model.py ...

A row is scored as PPO and GRPO will score it: prompt, response and stop token, each tokenized on
its own, read at the last token. That one is found by length: where the pad token is also the stop
token, its id says nothing.

Deliberate simplifications:
 1. Every response of the data counts as complete; one without its stop token is never seen
    (--non_stop_penalty of the PPO and GRPO scripts takes care of those). Pairs that are too long
    are dropped, not cut.
 2. Rows are padded, not packed; chosen and rejected go through the model in one batch.
 3. What is left of the pairs when the last optimizer batch is full is not trained on.

Where to start reading: `Pair` is the data, the loop in `main()` is the algorithm. Everything else
is called from there.

arXiv: 2009.01325, 2203.02155 (reward models for RLHF); centering 2312.09244; calibration
1706.04599.
"""

import atexit
import contextlib
import errno
import fcntl
import functools
import hashlib
import itertools
import json
import math
import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
import threading
import time
import unicodedata
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, NoReturn

import huggingface_hub
import psutil
import pyarrow.parquet
import torch
import torch.nn.functional as F
import transformers
import tyro
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, broadcast_object_list
from requests.utils import get_netrc_auth
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

# Format of checkpoints; to be raised when older ones can no longer be read
CHECKPOINT_FORMAT = 1

FilledIn = tyro.conf.Suppress  # marks a field of Args that is no option of the command line


@dataclass
class Args:
    # -- The run
    exp_name: str = "reward_model"
    """name of the experiment"""
    seed: int = 1
    """of everything random: the order of pairs, the new head"""
    run_name: str | None = None
    """folder of the run below output_dir; None: exp_name, seed and the time"""
    output_dir: str = "output"
    """where runs are written"""
    dry_run: bool = False
    """check arguments, data and a local model's files, print the plan and stop"""

    # -- Data
    dataset: str = "debug_assets/preference_train.parquet"
    """pairs: a .parquet or .jsonl file, or a hub dataset"""
    dataset_split: str = "train"
    """its split, when it is on the hub"""
    eval_dataset: str | None = None
    """held-out pairs, in the same form; None: no evaluation"""
    eval_dataset_split: str = "test"
    """its split, when it is on the hub"""
    max_token_length: int = 1024
    """pairs with a longer row (prompt, response, stop token) are dropped, and counted"""

    # -- Model
    model_name_or_path: str = "debug_assets/model"
    """language model or one-label classifier to start from"""
    model_revision: str | None = None
    """its revision on the hub"""
    tokenizer_name_or_path: str | None = None
    """None: the model's"""
    chat_template: str | None = None
    """file with a Jinja chat template; None: the tokenizer's own"""
    stop_token: str | None = None
    """the token that ends every response, as the policy's do; None: the tokenizer's eos"""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """of forward passes; trained weights stay float32"""
    attn_implementation: str = "sdpa"
    """attention: sdpa, eager, flash_attention_2, ..."""
    gradient_checkpointing: bool = False
    """compute activations again in the backward pass: less memory, a third slower"""

    # -- Optimization
    num_train_epochs: int = 1
    """passes over the pairs (more than one soon overfits: 2203.02155, C.2)"""
    learning_rate: float = 3e-6
    """its peak"""
    lr_scheduler_type: Literal["linear", "cosine", "constant"] = "linear"
    """of the learning rate after its warm-up"""
    warmup_ratio: float = 0.03
    """share of all updates in which the learning rate rises"""
    weight_decay: float = 0.0
    """AdamW's"""
    max_grad_norm: float = 1.0
    """gradients are clipped to this norm"""
    center_rewards_coefficient: float = 0.0
    """weight of (chosen + rejected)^2, which pulls scores to 0 (try 0.01)"""

    # -- Batches, per rank
    local_mini_batch_size: int = 64
    """pairs of an optimizer update"""
    per_device_train_batch_size: int = 8
    """pairs of a forward and backward pass (micro-batch)"""

    # -- Checkpoints
    save_freq: int = 0
    """updates between checkpoints; 0: no checkpoints"""
    keep_last_n: int = 3
    """how many checkpoints to keep, the newest; 0: all"""
    resume_from_checkpoint: str | None = None
    """checkpoint to resume, or "latest": the newest of run_name; the run continues in its folder"""

    # -- Output
    with_tracking: bool = False
    """log to Weights & Biases as well"""
    wandb_project_name: str = "tandem"
    """its project"""
    wandb_entity: str | None = None
    """its entity (user or team)"""

    # -- Filled in at run time
    world_size: FilledIn[int] = 1
    """processes"""
    mini_batch_size: FilledIn[int] = 0
    """pairs of an optimizer update, over all ranks"""
    num_updates: FilledIn[int] = 0
    """optimizer updates of the run"""
    warm_up_steps: FilledIn[int] = 0
    """those in which the learning rate rises"""
    stop_token_id: FilledIn[int] = 0
    """id that ends every row"""
    pad_token_id: FilledIn[int] = 0
    """id that fills rows up"""
    data_hash: FilledIn[int] = 0
    """of the pairs to train on"""
    num_parameters: FilledIn[int] = 0
    """of the model"""


@dataclass
class Pair:
    """A row of the dataset: two responses to a prompt, of which one is preferred."""

    row: int  # of the dataset, for messages
    chosen_ids: list[int]  # token ids of prompt, response and stop token
    rejected_ids: list[int]

    @property
    def length(self) -> int:
        """Tokens of the longer one."""
        return max(len(self.chosen_ids), len(self.rejected_ids))


@dataclass
class RunState:
    """Where a run was at a checkpoint, which has this beside the model and its optimizer."""

    completed_steps: int  # updates
    seconds: float  # that the run has taken
    wandb_id: str | None  # of the run in Weights & Biases; None: it is not there


@dataclass
class ConfidenceBin:
    """The pairs of which a model is about equally sure."""

    low: float  # their confidence, from
    high: float  # to
    num_pairs: int
    mean_confidence: float
    accuracy: float  # share of them that the model ranks right


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


def plain_messages(messages: list[dict]) -> list[dict]:
    """Messages with their role and content alone, so that equal ones compare equal."""
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def split_row(
    prompt: str | list[dict] | None, response: str | list[dict]
) -> tuple[str | list[dict] | None, str]:
    """What comes before a response (a string, or messages; None: nothing does), and its text.

    The response is a text that follows the prompt, or messages that end with it; those may begin
    with the prompt's, or be the whole dialogue. ValueError: somebody else speaks last.

    >>> question = {"role": "user", "content": "?"}
    >>> answer = {"role": "assistant", "content": "yes"}
    >>> split_row([question], "yes") == ([question], "yes")
    True
    >>> split_row([question], [answer]) == ([question], "yes")
    True
    >>> split_row(None, [question, answer]) == ([question], "yes")
    True
    """
    if isinstance(response, str):
        return prompt, response

    *context, answer = plain_messages(response)
    if answer["role"] != "assistant":
        raise ValueError(f"the last message is of the {answer['role']}")
    if isinstance(prompt, list):
        prompt_messages = plain_messages(prompt)
        if context[: len(prompt_messages)] != prompt_messages:
            context = prompt_messages + context
    if not context:
        return prompt, answer["content"]
    return context, answer["content"]


def tokenize_context(context: str | list[dict], tokenizer) -> list[int]:
    """Token ids of what comes before a response."""
    if isinstance(context, list) and all(turn["role"] and turn["content"] for turn in context):
        with time_limit(5):
            text = tokenizer.apply_chat_template(
                context, tokenize=False, add_generation_prompt=True
            )
        # The template has written the special tokens already
        return tokenizer(text, add_special_tokens=False)["input_ids"]
    return tokenizer(context)["input_ids"]


def tokenize_response(row: dict, column: str, where: str, tokenizer, args: Args) -> list[int]:
    """Token ids of a row's prompt, of the response in one of its columns, and the stop token.

    where: file and number of the row, for the message that refuses it.
    """
    try:
        context, response = split_row(row.get("prompt"), row[column])
        if not isinstance(response, str):
            raise ValueError("the response is no text")
        if context is None:
            raise ValueError("there is no prompt")
        context_ids = tokenize_context(context, tokenizer)
        response_ids = tokenizer(response, add_special_tokens=False)["input_ids"]
    except Exception as error:
        bad_input(
            f"{where}: `{column}` must be a text that follows `prompt` (a text, or messages that "
            f"the --chat_template takes), or messages that end with the assistant's; mend or "
            f"leave out the row ({error!r})"
        )
    return [*context_ids, *response_ids, args.stop_token_id]


def prepare_pairs(path: str, split: str, tokenizer, args: Args) -> list[Pair]:
    """Loads, checks and tokenizes pairs.

    path: a file or a dataset on the hub with the columns `chosen`, `rejected` and, unless they
    hold it, `prompt`.
    """
    rows = read_rows(path, split)
    missing = [f"`{column}`" for column in ("chosen", "rejected") if column not in rows[0]]
    if missing:
        bad_input(
            f"{path}: there is no column {', '.join(missing)}; the columns are {', '.join(rows[0])}"
        )

    pairs = []
    too_long = 0
    same = 0
    for index, row in enumerate(rows):
        where = f"{path}, row {index}"
        pair = Pair(
            row=index,
            chosen_ids=tokenize_response(row, "chosen", where, tokenizer, args),
            rejected_ids=tokenize_response(row, "rejected", where, tokenizer, args),
        )
        if pair.length > args.max_token_length:
            too_long += 1
        elif pair.chosen_ids == pair.rejected_ids:
            same += 1
        else:
            pairs.append(pair)

    reasons = (
        f"{too_long} longer than --max_token_length {args.max_token_length}, "
        f"{same} whose responses are the same"
    )
    if not pairs:
        bad_input(f"{path}: nothing is left of its {len(rows)} pairs: {reasons}")
    dropped = len(rows) - len(pairs)
    if dropped > 0 and is_rank_0():
        print(printable(f"{path}: dropped {dropped} of {len(rows)} pairs: {reasons}"))
    return pairs


# ------------------------------------------------------------------------------------------ model


class RewardModel(torch.nn.Module):
    """A one-label sequence classifier, read at the last token of each row."""

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.model = model

    def forward(self, inputs: dict, last_token: Tensor) -> Tensor:
        """Scores in float32: (batch,). last_token: its index in each row, (batch,)."""
        hidden = self.model.base_model(**inputs).last_hidden_state  # (batch, length, hidden_size)
        rows = torch.arange(len(last_token), device=hidden.device)
        hidden = hidden[rows, last_token]  # (batch, hidden_size)
        with torch.autocast(hidden.device.type, enabled=False):
            scores = self.model.score(hidden.to(self.model.score.weight.dtype))
        return scores.squeeze(-1)


def check_weights(model: torch.nn.Module, path: str) -> None:
    """Refuses weights that are not finite."""
    for name, weight in model.named_parameters():
        if not weight.detach().sum().isfinite():  # which one that is not would spoil
            bad_input(f"{path}: {name} holds numbers that are not finite; the model is damaged")


def load_reward_model(args: Args, device_map: str | None = None) -> RewardModel:
    """The model without dropout (1909.08593, p. 3), with a new head where the checkpoint has none.

    The new head's standard deviation is 1/sqrt(hidden_size + 1) (2009.01325, p. 11). The config
    names the pad token, so that transformers finds the last token of a row as well. With device_map
    "meta" the weights are not loaded, but it is looked whether they could be.
    """
    path = args.model_name_or_path
    config = AutoConfig.from_pretrained(
        path, revision=args.model_revision, num_labels=1, trust_remote_code=False
    )
    for name, value in vars(config).items():
        if isinstance(value, float) and "drop" in name:
            setattr(config, name, 0.0)
    config.pad_token_id = args.pad_token_id
    config.get_text_config().pad_token_id = args.pad_token_id
    try:
        model, report = AutoModelForSequenceClassification.from_pretrained(
            path,
            config=config,
            revision=args.model_revision,
            dtype=torch.float32,
            attn_implementation=args.attn_implementation,
            device_map=device_map,
            trust_remote_code=False,
            use_safetensors=True,  # a pickle can hold code
            ignore_mismatched_sizes=device_map == "meta",  # the report names them
            output_loading_info=True,
        )
    except Exception as error:
        bad_input(
            f"--model_name_or_path {path}: no model can be built from its config.json and "
            f".safetensors ({type(error).__name__}: {error})"
        )
    if not hasattr(model, "score"):
        bad_input(f"--model_name_or_path {path}: a {type(model).__name__} has no head `score`")
    missing = sorted(report["missing_keys"] - {"score.weight"})
    if missing:
        bad_input(f"--model_name_or_path {path}: its .safetensors lack {', '.join(missing[:3])}")
    for name, shape, needed_shape in sorted(report["mismatched_keys"]):
        bad_input(
            f"--model_name_or_path {path}: in its .safetensors {name} is {list(shape)}, and by its "
            f"config.json {list(needed_shape)}"
        )
    if "score.weight" in report["missing_keys"]:
        generator = torch.Generator().manual_seed(args.seed)
        head = torch.randn(model.score.weight.shape, generator=generator)  # (1, hidden_size)
        with torch.no_grad():
            model.score.weight.copy_(head / math.sqrt(head.shape[1] + 1))
    if device_map is None:
        check_weights(model, path)
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()  # gradient checkpointing works in training mode only
    return RewardModel(model)


# ------------------------------------------------------------------------------------ mathematics


def preference_loss(chosen: Tensor, rejected: Tensor, center_rewards_coefficient: float) -> Tensor:
    """-log sigmoid(chosen - rejected) of each pair (Bradley-Terry), and a term that centers scores.

    The term is the coefficient times (chosen + rejected)^2. Pairs say nothing about the level of
    the scores, so this term may choose it (2312.09244). All are (pairs,).

    >>> preference_loss(torch.tensor([1.0]), torch.tensor([1.0]), 0.25)
    tensor([1.6931])
    """
    loss = -F.logsigmoid(chosen - rejected)
    return loss + center_rewards_coefficient * (chosen + rejected) ** 2


def calibration(margins: Tensor, num_bins: int = 10) -> tuple[float, list[ConfidenceBin]]:
    """Expected calibration error (1706.04599) of margins, and its bins that hold pairs.

    margins: chosen - rejected, (pairs,). By Bradley-Terry the model is sigmoid(|margin|) sure, at
    least 0.5, that the response it prefers is the chosen one, whichever of them stands first; how
    often it is (margin > 0) should be just that.

    >>> margins = torch.tensor([1.0, 1.0, 1.0, -1.0]) * math.log(4)  # 80% sure, 75% right
    >>> error, bins = calibration(margins)
    >>> round(error, 6)
    0.05
    """
    confidence = margins.double().abs().sigmoid()  # (pairs,)
    correct = (margins > 0).double()  # (pairs,)
    bin_of_pair = ((confidence - 0.5) * 2 * num_bins).long().clamp(max=num_bins - 1)  # (pairs,)
    error = 0.0
    bins = []
    for i in bin_of_pair.unique().tolist():
        inside = bin_of_pair == i
        confidence_bin = ConfidenceBin(
            low=0.5 + i / num_bins / 2,
            high=0.5 + (i + 1) / num_bins / 2,
            num_pairs=inside.sum().item(),
            mean_confidence=confidence[inside].mean().item(),
            accuracy=correct[inside].mean().item(),
        )
        distance = abs(confidence_bin.mean_confidence - confidence_bin.accuracy)
        error += distance * confidence_bin.num_pairs / len(margins)
        bins.append(confidence_bin)
    return error, bins


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


# --------------------------------------------------------------------------- forward and backward


def cut_pairs(
    pairs: list[Pair], indices: list[int], size: int, rank: int, world_size: int
) -> list[list[int]]:
    """A rank's share of the pairs at some indices, cut into micro-batches of `size` pairs.

    A micro-batch is padded to its longest row, so it gets pairs of like length.

    >>> pairs = [Pair(row, chosen_ids=[7] * (9 - row), rejected_ids=[8]) for row in range(4)]
    >>> cut_pairs(pairs, [0, 1, 2, 3], size=2, rank=0, world_size=1)
    [[3, 2], [1, 0]]
    >>> cut_pairs(pairs, [0, 1, 2, 3], size=2, rank=0, world_size=2)
    [[3, 1]]
    """

    def length(index: int) -> tuple[int, int]:
        return pairs[index].length, index

    share = sorted(indices, key=length)[rank::world_size]
    return [share[start : start + size] for start in range(0, len(share), size)]


def collate_pairs(pairs: list[Pair], pad_token_id: int, device) -> tuple[dict, Tensor]:
    """Pads the rows of pairs on the right, all chosen ones first.

    Returns the model's inputs, with tensors (2 * pairs, length), and the index of each row's last
    token, (2 * pairs,). Both come from lengths, since the pad token may also be the stop token.

    >>> inputs, last_token = collate_pairs([Pair(0, [5, 6, 9], [7, 9])], 0, device="cpu")
    >>> inputs["input_ids"].tolist()
    [[5, 6, 9], [7, 9, 0]]
    >>> inputs["attention_mask"].tolist()
    [[1, 1, 1], [1, 1, 0]]
    >>> last_token.tolist()
    [2, 1]
    """
    rows = [pair.chosen_ids for pair in pairs] + [pair.rejected_ids for pair in pairs]
    tensors = [torch.tensor(row) for row in rows]
    ids = pad_sequence(tensors, batch_first=True, padding_value=pad_token_id).to(device)
    lengths = torch.tensor([len(row) for row in rows], device=device)
    positions = torch.arange(ids.shape[1], device=device)
    inputs = {
        "input_ids": ids,
        "attention_mask": (positions < lengths[:, None]).long(),
        "use_cache": False,
    }
    return inputs, lengths - 1


def autocast(accelerator: Accelerator, args: Args) -> torch.autocast:
    """Forward passes compute in args.dtype."""
    use_bfloat16 = args.dtype == "bfloat16"
    return torch.autocast(accelerator.device.type, dtype=torch.bfloat16, enabled=use_bfloat16)


def score_pairs(
    accelerator: Accelerator, reward_model: torch.nn.Module, pairs: list[Pair], args: Args
) -> tuple[Tensor, Tensor]:
    """Scores of the chosen and of the rejected responses, each (pairs,), from one forward pass."""
    inputs, last_token = collate_pairs(pairs, args.pad_token_id, accelerator.device)
    with autocast(accelerator, args):
        scores = reward_model(inputs, last_token)  # (2 * pairs,)
    chosen, rejected = scores.chunk(2)
    return chosen, rejected


@torch.no_grad()
def score_all(
    accelerator: Accelerator, reward_model: torch.nn.Module, pairs: list[Pair], args: Args
) -> Tensor:
    """Scores of all pairs, chosen and rejected: (2, pairs), on every rank."""
    model = accelerator.unwrap_model(reward_model)
    micro_batches = cut_pairs(
        pairs,
        list(range(len(pairs))),
        args.per_device_train_batch_size,
        accelerator.process_index,
        accelerator.num_processes,
    )
    whole = torch.zeros(2, len(pairs), device=accelerator.device)
    for indices in micro_batches:
        scores = score_pairs(accelerator, model, [pairs[i] for i in indices], args)
        whole[:, indices] = torch.stack(scores).float()
    # A pair is 0 on all ranks but one, so the sum is exact
    return accelerator.reduce(whole)


def accumulate_gradients(
    accelerator: Accelerator,
    reward_model: torch.nn.Module,
    pairs: list[Pair],
    mini_batch: list[int],
    args: Args,
) -> dict[str, Tensor]:
    """Forward and backward passes of one optimizer batch, of which this rank takes its share.

    The loss is the mean over the pairs of all ranks, so the gradient does not depend on how the
    batch is cut. Nothing is stepped. Returns sums over this rank's pairs.
    """
    micro_batches = cut_pairs(
        pairs,
        mini_batch,
        args.per_device_train_batch_size,
        accelerator.process_index,
        accelerator.num_processes,
    )
    sums = Counter()
    for i, indices in enumerate(micro_batches):
        micro_batch = [pairs[index] for index in indices]
        with contextlib.ExitStack() as stack:
            if i < len(micro_batches) - 1:  # ranks exchange gradients with the last one, at once
                stack.enter_context(accelerator.no_sync(reward_model))
            chosen, rejected = score_pairs(accelerator, reward_model, micro_batch, args)
            loss = preference_loss(chosen, rejected, args.center_rewards_coefficient)  # (pairs,)
            mean_loss = loss.sum() / len(mini_batch)
            # Ranks average their gradients: times their number, that is the sum over all
            accelerator.backward(mean_loss * accelerator.num_processes)

        with torch.no_grad():
            per_pair = {
                "loss/preference_avg": loss,
                "objective/accuracy": chosen > rejected,
                "objective/margin": chosen - rejected,
                "objective/scores": (chosen + rejected) / 2,
            }
            for name, values in per_pair.items():
                sums[name] += values.sum(dtype=torch.float64)
    return dict(sums)


def sum_over_ranks(accelerator: Accelerator, sums: dict[str, Tensor]) -> dict[str, float]:
    """Each of these scalars, summed over all ranks."""
    totals = accelerator.reduce(torch.stack(list(sums.values())), reduction="sum")
    return dict(zip(sums, totals.tolist(), strict=True))


# ------------------------------------------------------------------------------ metrics and files


def report_scores(scores: Tensor) -> tuple[dict[str, float], Table]:
    """The eval/* metrics of held-out pairs, and a table of how far confidence can be trusted.

    scores: what score_all returns, (2, pairs).
    """
    scores = scores.double()
    chosen, rejected = scores
    error, bins = calibration(chosen - rejected)
    metrics = {
        "eval/loss": preference_loss(chosen, rejected, 0.0).mean().item(),
        "eval/calibration_error": error,
        "eval/accuracy": (chosen > rejected).double().mean().item(),
        "eval/margin": (chosen - rejected).mean().item(),
        "eval/scores_mean": scores.mean().item(),
        "eval/scores_std": scores.std().item(),
        "eval/scores_chosen": chosen.mean().item(),
        "eval/scores_rejected": rejected.mean().item(),
    }

    title = (
        f"Held-out pairs: is the model right as often as it is sure? "
        f"(calibration error {error:.3f})"
    )
    table = Table(
        "confidence", "pairs", "mean confidence", "right", title=title, title_justify="left"
    )
    for confidence_bin in bins:
        table.add_row(
            f"{confidence_bin.low:.0%} to {confidence_bin.high:.0%}",
            f"{confidence_bin.num_pairs:,}",
            f"{confidence_bin.mean_confidence:.1%}",
            f"{confidence_bin.accuracy:.1%}",
        )
    return metrics, table


def save_reward_model(reward_model: RewardModel, tokenizer, path: Path) -> None:
    """Writes model and tokenizer in Hugging Face format; the folder is complete or not there."""
    unfinished = path.with_name(path.name + ".unfinished")
    reward_model.model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    older = path.with_name(path.name + ".older")
    if path.exists():  # of a run that had come to its end, and was resumed
        shutil.rmtree(older, ignore_errors=True)
        path.rename(older)
    unfinished.rename(path)
    shutil.rmtree(older, ignore_errors=True)


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


# -------------------------------------------------------------------------- checks and the set-up


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
    """Refuses numbers that are out of range. A field whose default is 0 may be 0.

    If its name is not in at_most, a float may be a million and an int a billion at most: what is
    larger overflows, or fills the memory.
    """
    may_be_0 = {"seed", "warmup_ratio", "keep_last_n"}
    at_most = {
        "seed": 2**32 - 1,
        "warmup_ratio": 1,
        "learning_rate": 1,
        "weight_decay": 1,
        "num_train_epochs": 1000,
    }
    for name, value in vars(args).items():
        if type(value) not in (int, float):
            continue
        if not math.isfinite(value):
            bad_input(f"--{name} is {value}; it must be finite")
        if name in may_be_0 or getattr(Args, name) == 0:
            if value < 0:
                bad_input(f"--{name} is {value}; it must be 0 or more")
        elif value <= 0:
            bad_input(f"--{name} is {value}; it must be above 0")
        largest = at_most.get(name, 10**6 if isinstance(value, float) else 10**9)
        if value > largest:
            bad_input(f"--{name} is {value}; it must be at most {largest}")


def fill_in(args: Args) -> Args:
    """Checks the numbers, and returns args with those that follow from them filled in."""
    check_numbers(args)
    args = replace(args)  # a copy
    args.world_size = int(os.environ.get("WORLD_SIZE", 1))
    args.mini_batch_size = args.local_mini_batch_size * args.world_size
    if args.resume_from_checkpoint:
        find_checkpoint(args)
    if not args.run_name:
        args.run_name = f"{args.exp_name}__{args.seed}__{time.strftime('%Y%m%d_%H%M%S')}"
    if args.local_mini_batch_size % args.per_device_train_batch_size != 0:
        bad_input(
            f"local_mini_batch_size ({args.local_mini_batch_size}) must be a multiple of "
            f"per_device_train_batch_size ({args.per_device_train_batch_size}); "
            f"change one of them"
        )
    return args


def load_pretrained(auto_class: type, flag: str, path: str, revision: str | None) -> Any:
    """auto_class.from_pretrained(path); where that fails, the path given by --flag is bad input."""
    advice = "it cannot be loaded"
    if not os.path.exists(path):
        advice = "no such folder, and the hub has no such model that you may read"
        if not hub_answers():
            advice = "no such folder, the hub does not answer, and it is not in the cache"
    try:
        return auto_class.from_pretrained(path, revision=revision, trust_remote_code=False)
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


def load_tokenizer_and_config(args: Args) -> tuple:
    """The tokenizer, with its chat template, and the model's config; refuses what does not fit."""
    path = args.model_name_or_path
    config = load_pretrained(AutoConfig, "model_name_or_path", path, args.model_revision)
    if args.tokenizer_name_or_path:
        tokenizer = load_pretrained(
            AutoTokenizer, "tokenizer_name_or_path", args.tokenizer_name_or_path, revision=None
        )
    else:
        tokenizer = load_pretrained(AutoTokenizer, "model_name_or_path", path, args.model_revision)
    if args.chat_template:
        tokenizer.chat_template = read_chat_template(args.chat_template)

    if getattr(config, "quantization_config", None) is not None:
        bad_input(f"--model_name_or_path {path} is quantized; give the model that it was made from")
    vocab_size = getattr(config.get_text_config(), "vocab_size", 0)
    if len(tokenizer) > vocab_size:
        bad_input(f"the tokenizer has {len(tokenizer)} tokens and the model only {vocab_size}")
    if "SequenceClassification" in str(config.architectures) and config.num_labels != 1:
        bad_input(f"--model_name_or_path {path} has {config.num_labels} labels and not one")
    return tokenizer, config


def find_stop_token(args: Args, tokenizer) -> int:
    """The id that ends every row."""
    stop_token = args.stop_token or tokenizer.eos_token
    stop_token_id = tokenizer.get_vocab().get(stop_token)
    if stop_token_id is not None:
        return stop_token_id
    advice = "give one of its tokens, that with which the policy ends a response"
    if args.stop_token:
        bad_input(f"--stop_token {args.stop_token!r} is not a token of the tokenizer; {advice}")
    bad_input(f"--stop_token: the tokenizer has no eos token; {advice}")


def find_pad_token(args: Args, tokenizer, config) -> int:
    """The id that fills rows up: the tokenizer's, unless that is also the stop token.

    transformers reads the last token that is not the pad token, and that must be the stop token.
    The last id of the vocabulary is often one that no text has.
    """
    if tokenizer.pad_token_id not in (None, args.stop_token_id):
        return tokenizer.pad_token_id
    last_id = config.get_text_config().vocab_size - 1
    if last_id == args.stop_token_id:
        return last_id - 1
    return last_id


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


def check_training(args: Args, config, num_pairs: int, longest_row: int) -> None:
    """Refuses what cannot work with this model and these pairs on this machine.

    num_pairs: those to train on; longest_row: the most tokens of a row.
    """
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    if limit and longest_row > limit:
        bad_input(
            f"a row takes {longest_row} positions and the model has {limit}; "
            f"--max_token_length {limit}?"
        )
    if args.num_updates == 0:
        bad_input(
            f"{args.dataset}: its {num_pairs} pairs x --num_train_epochs are less than one "
            f"optimizer batch of {args.mini_batch_size}; set a smaller --local_mini_batch_size"
        )
    if args.warm_up_steps >= args.num_updates:
        bad_input(
            f"--warmup_ratio {args.warmup_ratio}: the run has {args.num_updates} updates, so the "
            f"learning rate would not rise to its full value before the last"
        )

    if args.with_tracking and os.environ.get("WANDB_MODE") not in ("offline", "disabled"):
        server = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
        if not os.environ.get("WANDB_API_KEY") and not get_netrc_auth(server):
            bad_input("--with_tracking: run `wandb login`, or set WANDB_MODE=offline")


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


# ------------------------------------------------------------------------------------------- main


def main() -> None:
    start_time = time.time()
    check_launcher()
    args = fill_in(parse_args())
    # A shell starts what it puts into the background with Ctrl-C ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # No reports on heads that are missing, as they should be
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()

    timeout = timedelta(hours=2)  # others wait while a rank loads or saves
    try:
        accelerator = Accelerator(
            mixed_precision="no",  # autocast is ours
            log_with="wandb" if args.with_tracking else None,
            kwargs_handlers=[InitProcessGroupKwargs(timeout=timeout)],
        )
    except Exception as error:
        bad_input(f"accelerate cannot start; is it launched and configured right? ({error})")
    cpu_group = None  # NCCL would wait for a rank that has ended; gloo raises an error
    if accelerator.num_processes > 1:
        cpu_group = torch.distributed.new_group(backend="gloo", timeout=timeout)
    args.run_name = exchange(cpu_group, args.run_name)[0]  # it may have the time in it

    # ---- All that can be wrong, before a model is loaded
    state = RunState(completed_steps=0, seconds=0.0, wandb_id=None)
    if args.resume_from_checkpoint:
        state = read_checkpoint(args)
    first_step = state.completed_steps + 1
    start_time -= state.seconds
    if is_rank_0():
        check_run_folder(args)
    tokenizer, config = load_tokenizer_and_config(args)
    args.stop_token_id = find_stop_token(args, tokenizer)
    args.pad_token_id = find_pad_token(args, tokenizer, config)
    train_pairs = prepare_pairs(args.dataset, args.dataset_split, tokenizer, args)
    eval_pairs = []
    if args.eval_dataset:
        eval_pairs = prepare_pairs(args.eval_dataset, args.eval_dataset_split, tokenizer, args)

    # The model comes last, for what is on the hub is downloaded now; with --dry_run it is not
    if os.path.exists(args.model_name_or_path) or not args.dry_run:
        model = load_reward_model(args, device_map="meta")
        args.num_parameters = sum(parameter.numel() for parameter in model.parameters())
    longest_row = max(pair.length for pair in train_pairs + eval_pairs)
    args.num_updates = len(train_pairs) * args.num_train_epochs // args.mini_batch_size
    args.warm_up_steps = round(args.warmup_ratio * args.num_updates)
    check_training(args, config, len(train_pairs), longest_row)
    hashes = [stable_hash(pair.chosen_ids, pair.rejected_ids) for pair in train_pairs]
    args.data_hash = stable_hash(hashes)
    if args.resume_from_checkpoint:
        check_same_run(args, state, args.num_updates)
    if is_rank_0():
        bytes_of_one = 12 * args.num_parameters  # float32: weights, and AdamW's two moments
        checkpoint_bytes = bytes_of_checkpoints(bytes_of_one, args.num_updates, args)
        check_disk(args, args.num_parameters, checkpoint_bytes)
        print(
            f"Plan: {args.num_updates:,} updates of {args.mini_batch_size:,} of "
            f"{len(train_pairs):,} pairs; {len(eval_pairs):,} held out; up to {longest_row} tokens "
            f"in a row, as the model reads it here:"
        )
        print(repr(tokenizer.decode(train_pairs[0].chosen_ids)))
        if args.save_freq > 0:
            size = f"{checkpoint_bytes / 2**30:.3g} GiB of disk for all"
            print(f"A checkpoint every {args.save_freq} updates, {size}")
        if args.resume_from_checkpoint:
            print(f"Resumes {printable(args.resume_from_checkpoint)}")
        if newer_checkpoints(args):
            newer = ", ".join(path.name for path in newer_checkpoints(args))
            print(f"and removes {newer}, which are newer")
    # All ranks wait for one another here, and end where one found bad input
    if len(set(exchange(cpu_group, (args.data_hash, state.completed_steps)))) > 1:
        bad_input("ranks have read different pairs or checkpoints; every node needs the same files")
    if args.dry_run:
        return

    # ---- Model and optimizer, and the run's folder
    is_main = accelerator.is_main_process
    console = Console(soft_wrap=True)
    reward_model = load_reward_model(args)
    # Its learning rate is set before each update
    optimizer = torch.optim.AdamW(reward_model.parameters(), weight_decay=args.weight_decay)
    reward_model, optimizer = accelerator.prepare(reward_model, optimizer)
    # Not earlier: Python runs no handler while a rank waits for one that has found bad input. By
    # default SIGTERM ends it there
    handle_signals()
    use_plain_names(accelerator)
    if args.resume_from_checkpoint:
        load_checkpoint(accelerator, cpu_group, args)
    run_dir = Path(args.output_dir) / args.run_name
    if is_main:
        try:
            run_dir.mkdir(parents=True, exist_ok=args.resume_from_checkpoint is not None)
        except FileExistsError:  # made since it was looked at
            bad_input(f"{run_dir} holds another run; choose another --run_name or --output_dir")
        lock_run_folder(run_dir)
        # Printed where the run ends early
        atexit.register(print_resume_command, run_dir)
        if args.resume_from_checkpoint:
            rewind_run_folder(run_dir, args)
        (run_dir / "args.json").write_text(json.dumps(asdict(args), indent=2) + "\n")
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
    if accelerator.trackers and is_main:
        state.wandb_id = accelerator.trackers[0].run.id

    on_main_process(accelerator, remove_checkpoints, run_dir, newer_checkpoints(args))

    # ---- The order of the pairs: a permutation for each pass over them
    generator = torch.Generator().manual_seed(args.seed)
    order = []  # indices of train_pairs
    for _ in range(args.num_train_epochs):
        order += torch.randperm(len(train_pairs), generator=generator).tolist()

    # ---- The loop
    progress = Progress(
        *Progress.get_default_columns(),
        "{task.fields[figures]}",
        console=console,
        disable=not is_main or not console.is_terminal,
    )
    with progress:
        progress_bar = progress.add_task(
            "training", total=args.num_updates, completed=state.completed_steps, figures=""
        )
        for training_step in range(first_step, args.num_updates + 1):
            step_start = time.perf_counter()
            checkpoint_metrics = {}

            # 1. Every save_freq updates a checkpoint of the model as the last one left it. Not in
            # the first step of this process, whose model is new or comes from that very checkpoint.
            is_due = args.save_freq > 0 and (training_step - 1) % args.save_freq == 0
            if is_due and training_step > first_step:
                state.completed_steps = training_step - 1
                state.seconds = time.time() - start_time
                size = save_checkpoint(accelerator, cpu_group, run_dir, state, None, args)
                checkpoint_metrics["perf/checkpoint_bytes"] = size
                checkpoint_metrics["time/checkpoint"] = time.perf_counter() - step_start

            # 2. The gradient of this step's pairs
            first = (training_step - 1) * args.mini_batch_size
            mini_batch = order[first : first + args.mini_batch_size]
            sums = accumulate_gradients(accelerator, reward_model, train_pairs, mini_batch, args)
            grad_norm = accelerator.clip_grad_norm_(reward_model.parameters(), args.max_grad_norm)
            if not torch.isfinite(grad_norm):  # the same on every rank
                rows = sorted(train_pairs[index].row for index in mini_batch)
                raise FloatingPointError(
                    f"gradient not finite in update {training_step}, with rows {rows} of "
                    f"{args.dataset}"
                )

            # 3. The update
            lr = lr_multiplier(training_step - 1, args.num_updates, args) * args.learning_rate
            optimizer.param_groups[0]["lr"] = lr
            optimizer.step()
            optimizer.zero_grad()

            # 4. Metrics: means over the pairs of the update, as the model was before it
            metrics = {
                "training_step": training_step,
                "epoch": training_step * args.mini_batch_size / len(train_pairs),
                "lr": lr,
            }
            for name, total in sum_over_ranks(accelerator, sums).items():
                metrics[name] = total / args.mini_batch_size
            metrics |= checkpoint_metrics
            metrics["optim/grad_norm"] = grad_norm.item()
            metrics["time/training"] = time.perf_counter() - step_start

            # 5. After the last update the model is saved, and then comes the evaluation
            if training_step == args.num_updates:
                model = accelerator.unwrap_model(reward_model)
                on_main_process(accelerator, save_reward_model, model, tokenizer, run_dir / "model")
            if eval_pairs and training_step == args.num_updates:
                scores = score_all(accelerator, reward_model, eval_pairs, args)
                eval_metrics, calibration_table = report_scores(scores)
                metrics.update(eval_metrics)
            metrics["time/from_scratch"] = time.time() - start_time

            # 6. Files, and what is shown
            accelerator.log(metrics, step=training_step)
            if is_main:
                with open(run_dir / "metrics.jsonl", "a") as file:
                    file.write(json.dumps(metrics) + "\n")
                shown = ("loss/preference_avg", "objective/accuracy", "objective/margin")
                figures = "  ".join(f"{name.split('/')[1]} {metrics[name]:.3g}" for name in shown)
                progress.update(progress_bar, advance=1, figures=figures)
                is_due = training_step % max(1, args.num_updates // 20) == 0
                if is_due and not console.is_terminal:
                    console.print(f"step {training_step}/{args.num_updates}  {figures}")

    # ---- What came out
    atexit.unregister(print_resume_command)
    if is_main:
        if eval_pairs:
            console.print(calibration_table)
            console.print(
                f"Held-out pairs ranked right: {metrics['eval/accuracy']:.1%}; "
                f"chosen above rejected by {metrics['eval/margin']:.2f} in the mean; "
                f"scores {metrics['eval/scores_mean']:.2f} +- {metrics['eval/scores_std']:.2f} "
                f"(mean, deviation)"
            )
        console.print(f"Reward model: {run_dir / 'model'}; metrics: {run_dir / 'metrics.jsonl'}")
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    if sys.stdout is not None:
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal may know ASCII alone
    try:
        main()
    except KeyboardInterrupt:
        print("Interrupted", file=sys.stderr)
        sys.exit(130)
