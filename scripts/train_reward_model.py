r"""Trains a reward model on pairs of a chosen and a rejected response (Bradley-Terry), in one file.

No GPU needed, sets itself up, learns in a minute:

    bash scripts/train/debug/reward_model.sh

One GPU (ddp.yaml: eight GPUs):

    accelerate launch --quiet --config_file scripts/accelerate/one_gpu.yaml \
        scripts/train_reward_model.py \
        --model_name_or_path Qwen/Qwen3-0.6B \
        --dataset rm_train.parquet --eval_dataset rm_test.parquet --save_freq 50

Two ranks without GPUs:

    torchrun --nproc_per_node 2 scripts/train_reward_model.py ...

A row is scored as PPO and GRPO will score it: prompt, response and stop token, each tokenized on
its own, read at the last token. That one is found by length: where the pad token is also the stop
token, its id says nothing.

Deliberate simplifications:
 1. Every response of the data counts as complete; one without its stop token is never seen
    (--non_stop_penalty of the PPO and GRPO scripts takes care of those). Pairs that are too long
    are dropped, not cut.
 2. Rows are padded, not packed; chosen and rejected go through the model in one batch.
 3. What is left of the pairs when the last optimizer batch is full is not trained on.

`Pair` is the data, the loop in main(), at the end of the file, is the algorithm; everything else is
called from there. Functions that the PPO and GRPO scripts have, too, are the same text, but for
main and accumulate_gradients.

"Collective" in a docstring: every rank must call the function, in the same order.

arXiv: 2009.01325, 2203.02155 (reward models for RLHF); centering 2312.09244; calibration
1706.04599.
"""

import contextlib
import ctypes
import fcntl
import hashlib
import json
import math
import os
import shutil
import signal
import sys
import tempfile
import time
import uuid
from collections import Counter
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import datasets
import torch
import torch.nn.functional as F
import transformers
import tyro
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, broadcast_object_list
from pyarrow import parquet
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

FilledIn = tyro.conf.Suppress  # such a field is computed by the script, not a command-line option


@dataclass
class Args:
    """A reward model, from pairs of a chosen and a rejected response."""

    # -- The run
    exp_name: str = "reward_model"
    """name of the experiment"""
    seed: int = 1
    """seed of everything random: order of pairs, the new head"""
    run_name: str | None = None
    """folder of the run below output_dir; None: exp_name, seed and the time"""
    output_dir: str = "output"
    """where runs are written"""

    # -- Data
    dataset: str = "debug_assets/preference_train.parquet"
    """pairs: a .parquet or .jsonl file, a folder, or a dataset on the hub"""
    dataset_config: str | None = None
    """configuration of the pairs, where there are several"""
    dataset_split: str = "train"
    """split of the pairs, when they are on the hub"""
    eval_dataset: str | None = None
    """held-out pairs, in the same form; None: no evaluation"""
    eval_dataset_config: str | None = None
    """configuration of the held-out pairs"""
    eval_dataset_split: str = "test"
    """split of the held-out pairs, when they are on the hub"""
    max_token_length: int = 1024
    """pairs with a longer row (prompt, response, stop token) are dropped, and counted"""

    # -- Model
    model_name_or_path: str = "debug_assets/model"
    """language model or one-label classifier to start from"""
    model_revision: str | None = None
    """revision of the model on the hub"""
    tokenizer_name_or_path: str | None = None
    """tokenizer; None: the model's"""
    chat_template: str | None = None
    """file with a Jinja chat template; None: the tokenizer's own"""
    stop_token: str = "eos"
    """token that ends every response, as the policy's do; "eos" means the tokenizer's end token"""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """precision of forward passes; trained weights stay float32"""
    attn_implementation: str = "sdpa"
    """attention of the model: sdpa, eager, flash_attention_2, ..."""
    gradient_checkpointing: bool = True
    """compute activations again in the backward pass: far less memory, a third slower"""

    # -- Optimization
    num_train_epochs: int = 1
    """passes over the pairs (more than one soon overfits: 2203.02155, C.2)"""
    learning_rate: float = 3e-6
    """peak learning rate"""
    lr_scheduler_type: Literal["linear", "cosine", "constant"] = "linear"
    """how the learning rate changes after its warm-up"""
    warmup_ratio: float = 0.03
    """share of all updates in which the learning rate rises"""
    weight_decay: float = 0.0
    """AdamW's weight decay"""
    max_grad_norm: float = 1.0
    """gradients are clipped to this norm"""
    center_rewards_coefficient: float = 0.0
    """weight of (chosen + rejected)^2, which pulls scores to 0 (try 0.01)"""

    # -- Batches
    local_mini_batch_size: int = 64
    """pairs per optimizer update and rank"""
    per_device_train_batch_size: int = 8
    """pairs per forward and backward pass (micro-batch) of a rank"""

    # -- Checkpoints
    save_freq: int = 0
    """updates between checkpoints; 0: no checkpoints"""
    keep_last_n: int = 3
    """how many checkpoints to keep, the newest; 0: all"""
    resume_from_checkpoint: str | None = None
    """a checkpoint (newer ones are removed); latest: run_name's newest; auto: or a new run"""

    # -- Output
    with_tracking: bool = False
    """log to Weights & Biases as well"""
    wandb_project_name: str = "tandem"
    """project in Weights & Biases"""
    wandb_entity: str | None = None
    """owner of that project (user or team)"""

    # -- Filled in at run time
    mini_batch_size: FilledIn[int] = 0
    """pairs per optimizer update, over all ranks"""
    num_updates: FilledIn[int] = 0
    """optimizer updates of the run"""
    warm_up_steps: FilledIn[int] = 0
    """updates in which the learning rate rises"""
    stop_token_id: FilledIn[int] = 0
    """id that ends every row"""
    data_hash: FilledIn[str] = ""
    """of the pairs to train on"""

    def __post_init__(self):
        for name, value in vars(self).items():
            if isinstance(value, str):  # no shell expands a quoted ~
                setattr(self, name, os.path.expanduser(value))


@dataclass
class Pair:
    """A row of the dataset: two responses to a prompt, of which one is preferred."""

    chosen_ids: list[int]  # token ids of prompt, response and stop token
    rejected_ids: list[int]
    length: int  # of the longer one


# ------------------------------------------------------------------------------------------- data


@contextlib.contextmanager
def naming_row(path, index):
    """Turns any error inside into a ValueError that names file and row."""
    try:
        yield
    except Exception as error:
        kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
        raise ValueError(f"{path}, row {index}: {kind}{error}") from error


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


def tokenize_prompt(prompt, row, tokenizer, variables=None):
    """The text of a prompt and its token ids; "" and [] if nothing is asked.

    prompt: a string; or messages, which the chat template renders with the row's `tools` and
    `chat_template_kwargs` (or their JSON), and further variables. An answer that ends them is left
    out. ValueError: no prompt, or the template writes the same whatever a message says, as of a
    role that it does not know.
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

    def render(messages):
        return tokenizer.apply_chat_template(
            messages,
            tools=drop_nulls(read_json(row.get("tools"))),
            tokenize=False,
            add_generation_prompt=True,
            **(variables or {}) | drop_nulls(read_json(row.get("chat_template_kwargs")) or {}),
        )

    text = render(messages)
    for i, message in enumerate(messages):
        if message["role"] in ("assistant", "tool"):  # which a template may leave out
            continue
        content = message.get("content", "")
        more = "?" if isinstance(content, str) else [{"type": "text", "text": "?"}]
        longer = message | {"content": content + more}
        if render([*messages[:i], longer, *messages[i + 1 :]]) == text:
            raise ValueError(f"the chat template leaves out the message of the {message['role']!r}")
    # The template has written the special tokens
    return text, tokenizer(text, add_special_tokens=False)["input_ids"]


def split_row(prompt, response):
    """What comes before a response (a string, or messages), and its text.

    The response is a text that follows the prompt, or messages that end with it; those may begin
    with the prompt's, go on from them, or be the whole dialogue. ValueError: it is none of these.

    >>> question = {"role": "user", "content": "?"}
    >>> answer = {"role": "assistant", "content": "yes"}
    >>> split_row([question], "yes") == ([question], "yes")
    True
    >>> split_row([question], [answer]) == ([question], "yes")
    True
    >>> split_row(None, [question, answer]) == ([question], "yes")
    True
    """
    match response:
        case str():
            return prompt, response
        case [*context, {"role": "assistant", "content": str(text)}]:
            pass
        case _:
            raise ValueError(
                f"a response is a text, or messages that end with a text of the assistant; not "
                f"{str(response)[-80:]}"
            )
    if context and prompt and context[: len(prompt)] != prompt:
        if context[0]["role"] == "assistant":  # they go on from the prompt
            context = prompt + context
        elif isinstance(prompt, list):
            raise ValueError("the messages do not begin with those of the column `prompt`")
    return context or prompt, text


def split_pair(row):
    """The prompt of a row (a string, or messages), and the texts of its two responses.

    ValueError: there is no prompt, or each response has another one. Of two dialogues all messages
    but the last must agree.
    """
    row = drop_nulls(row)  # equal messages may differ in them
    prompt, chosen = split_row(row.get("prompt"), row["chosen"])
    other, rejected = split_row(row.get("prompt"), row["rejected"])
    if not prompt:
        raise ValueError(
            "it has no prompt, in a column `prompt` or in messages; for dialogues of HH's form run "
            "scripts/data_preprocess/full_hh_rlhf.py --split rm"
        )
    if other != prompt:
        raise ValueError("`chosen` and `rejected` have different prompts")
    if isinstance(prompt, list) and prompt[-1]["role"] == "assistant":
        raise ValueError("the prompt ends with a message of the assistant, which would be left out")
    return prompt, chosen, rejected


def load_pairs(accelerator, path, config, split, tokenizer, args):
    """The Pairs of a dataset. ValueError: a row is no pair, or none is left of them.

    Its columns are `chosen`, `rejected`, and `prompt` unless they hold it. Responses come without
    the stop token.
    """
    rows = load_rows(path, config, split)
    pairs, notes = [], Counter()
    for index, row in enumerate(rows):
        with naming_row(path, index):
            prompt, *responses = split_pair(row)
            _, prompt_ids = tokenize_prompt(prompt, row, tokenizer)
            response_ids = tokenizer(responses, add_special_tokens=False)["input_ids"]
        token_ids = [[*prompt_ids, *ids, args.stop_token_id] for ids in response_ids]
        pair = Pair(*token_ids, length=max(map(len, token_ids)))
        if not prompt_ids:
            notes["dropped for an empty prompt"] += 1
        elif pair.length > args.max_token_length:
            notes[f"dropped as longer than --max_token_length {args.max_token_length}"] += 1
        elif pair.chosen_ids == pair.rejected_ids:
            notes["dropped for equal responses"] += 1
        else:
            pairs.append(pair)
            if not all(response_ids):
                notes["with an empty response"] += 1
    noted = ", ".join(f"{count} {note}" for note, count in notes.items())
    if not pairs:
        raise ValueError(f"{path}: no pair is left of {len(rows)}: {noted}")
    if noted:
        accelerator.print(f"{path}: of {len(rows)} pairs: {noted}")
    return pairs


# ------------------------------------------------------------------------------------------ model


def hidden_states(model, input_ids, args):
    """What a model's head reads: (batch, length, hidden_size).

    The residual stream is in args.dtype; in float32 if a model is trained whole without FSDP2.
    """
    with torch.autocast(model.device.type, torch.bfloat16, enabled=args.dtype == "bfloat16"):
        return model.base_model(input_ids, use_cache=False).last_hidden_state


class RewardModel(nn.Module):
    """A one-label sequence classifier, read at the last token of each row."""

    def __init__(self, model, args):
        super().__init__()
        self.model = model
        self.args = args

    def forward(self, input_ids, last_token):
        """Scores: (batch,). last_token: its index in each row, a list."""
        hidden = hidden_states(self.model, input_ids, self.args)
        hidden = hidden[range(len(last_token)), last_token]  # (batch, hidden_size)
        # The head computes in float32
        return self.model.score(hidden.float()).squeeze(-1)


def load_reward_model(args, pad_token_id):
    """The model without dropout (1909.08593, p. 3), with a new head where the checkpoint has none.

    The new head's standard deviation is 1/sqrt(hidden_size + 1) (2009.01325, p. 11). ValueError:
    the checkpoint lacks another tensor.
    """
    path = args.model_name_or_path
    config = AutoConfig.from_pretrained(path, revision=args.model_revision, num_labels=1)
    for name, value in vars(config).items():
        if isinstance(value, float) and "drop" in name:
            setattr(config, name, 0.0)
    config.pad_token_id = pad_token_id
    config.get_text_config().pad_token_id = pad_token_id
    model, report = AutoModelForSequenceClassification.from_pretrained(
        path,
        config=config,
        revision=args.model_revision,
        dtype=torch.float32,
        attn_implementation=args.attn_implementation,
        output_loading_info=True,
    )
    missing = set(report["missing_keys"])
    if missing - {"score.weight"}:
        raise ValueError(f"the checkpoint {path} lacks {', '.join(missing)}")
    if missing:
        head = model.score.weight.data  # (1, hidden_size)
        torch.manual_seed(args.seed)
        head.copy_(torch.randn(head.shape) / math.sqrt(head.shape[1] + 1))
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()  # gradient checkpointing works in training mode only
    return RewardModel(model, args)


# ------------------------------------------------------------------------------------ mathematics


def preference_loss(chosen, rejected, center_rewards_coefficient):
    """-log sigmoid(chosen - rejected) of each pair (Bradley-Terry), and a term that centers scores.

    The term is the coefficient times (chosen + rejected)^2. Pairs say nothing about the level of
    the scores, so this term may choose it (2312.09244). All are (pairs,).

    >>> preference_loss(torch.tensor([1.0]), torch.tensor([1.0]), 0.25)
    tensor([1.6931])
    """
    loss = -F.logsigmoid(chosen - rejected)
    return loss + center_rewards_coefficient * (chosen + rejected) ** 2


def calibration_error(margins, num_bins=10):
    """Expected calibration error (1706.04599): how far right answers are from as many as claimed.

    margins: chosen - rejected, (pairs,). By Bradley-Terry the model claims a probability of
    sigmoid(|margin|), at least 0.5, for the response that it prefers. Pairs are binned by that. In
    each bin the share of right ones should be the mean claim.

    >>> margins = torch.tensor([1.0, 1.0, 1.0, -1.0]) * math.log(4)  # 80% sure, 75% right
    >>> round(calibration_error(margins), 6)
    0.05
    """
    confidence = margins.abs().sigmoid()  # (pairs,)
    correct = (margins > 0).to(margins.dtype)  # (pairs,)
    bin_of_pair = ((confidence - 0.5) * 2 * num_bins).long().clamp(max=num_bins - 1)  # (pairs,)
    gaps = confidence.new_zeros(num_bins).index_add(0, bin_of_pair, confidence - correct)
    return gaps.abs().sum().item() / len(margins)


def lr_multiplier(update, num_updates, args):
    """The learning rate of a model's update, from 0, as a share of the base rate; never 0.

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


# --------------------------------------------------------------------------- forward and backward


def cut_pairs(accelerator, pairs, indices, size):
    """This rank's share of the pairs at some indices, cut into micro-batches of `size` indices.

    A micro-batch is padded to its longest row, so it gets pairs of like length.
    """
    in_order = sorted(indices, key=lambda index: (pairs[index].length, index))
    share = in_order[accelerator.process_index :: accelerator.num_processes]
    return [share[start : start + size] for start in range(0, len(share), size)]


def collate_pairs(pairs, device):
    """Pads the rows of pairs on the right, all chosen ones first.

    Returns the token ids, (2 * pairs, length), and a list: the index of each row's last token. That
    comes from lengths, so any id will do for padding. It is 0.

    >>> input_ids, last_token = collate_pairs([Pair([5, 6, 9], [7, 9], 3)], device="cpu")
    >>> input_ids.tolist(), last_token
    ([[5, 6, 9], [7, 9, 0]], [2, 1])
    """
    rows = [pair.chosen_ids for pair in pairs] + [pair.rejected_ids for pair in pairs]
    input_ids = pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    return input_ids.to(device), [len(row) - 1 for row in rows]


def score_pairs(accelerator, reward_model, pairs, indices):
    """Scores of pairs, chosen and rejected, from one forward pass: (2, len(indices))."""
    micro_batch = [pairs[index] for index in indices]
    scores = reward_model(*collate_pairs(micro_batch, accelerator.device))
    return scores.view(2, -1)


@torch.no_grad()
def score_all(accelerator, reward_model, pairs, args):
    """Collective. Scores of all pairs, chosen and rejected: (2, pairs), on every rank."""
    whole = torch.zeros(2, len(pairs), device=accelerator.device)
    all_indices = range(len(pairs))
    for indices in cut_pairs(accelerator, pairs, all_indices, args.per_device_train_batch_size):
        whole[:, indices] = score_pairs(accelerator, reward_model, pairs, indices)
    # A pair is 0 on all ranks but one, so the sum is exact
    return accelerator.reduce(whole)


def accumulate_gradients(accelerator, reward_model, pairs, mini_batch, args):
    """Collective. Forward and backward of one mini-batch, of which this rank takes its share.

    mini_batch: indices of pairs.
    The loss is the mean over the pairs of all ranks, so the gradient does not depend on how the
    batch is cut. Nothing is stepped. Returns the metrics of the update: means over its pairs.
    """
    micro_batches = cut_pairs(accelerator, pairs, mini_batch, args.per_device_train_batch_size)
    sums = Counter()
    for i, indices in enumerate(micro_batches):
        # DDP exchanges gradients in the last pass alone (as by its no_sync)
        reward_model.require_backward_grad_sync = i == len(micro_batches) - 1
        chosen, rejected = score_pairs(accelerator, reward_model, pairs, indices)
        loss = preference_loss(chosen, rejected, args.center_rewards_coefficient)  # (pairs,)
        mean_loss = loss.sum() / len(mini_batch)
        # Ranks average their gradients; times the number of ranks, that is their sum
        (mean_loss * accelerator.num_processes).backward()

        with torch.no_grad():
            per_pair = {
                "loss/preference_avg": loss,
                "objective/accuracy": chosen > rejected,
                "objective/margin": chosen - rejected,
                "objective/scores": (chosen + rejected) / 2,
            }
            for name, values in per_pair.items():
                sums[name] += values.sum(dtype=torch.float64)
    totals = accelerator.reduce(torch.stack(list(sums.values()))).tolist()
    return {name: total / len(mini_batch) for name, total in zip(sums, totals, strict=True)}


# ------------------------------------------------------------------------------ metrics and files


def evaluation_metrics(scores):
    """The eval/* metrics of held-out pairs, the loss without its term that centers scores.

    scores: what score_all returns, (2, pairs).
    """
    scores = scores.double()
    chosen, rejected = scores
    return {
        "eval/loss": preference_loss(chosen, rejected, 0.0).mean().item(),
        "eval/calibration_error": calibration_error(chosen - rejected),
        "eval/accuracy": (chosen > rejected).double().mean().item(),
        "eval/margin": (chosen - rejected).mean().item(),
        "eval/scores_mean": scores.mean().item(),
        "eval/scores_std": scores.std().item(),
    }


def save_reward_model(reward_model, tokenizer, path):
    """Writes model and tokenizer in Hugging Face format; they get their name when whole."""
    unfinished = path.with_name("model.unfinished")
    reward_model.model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    shutil.rmtree(path, ignore_errors=True)  # of a run that had come to its end, and was resumed
    unfinished.rename(path)


# ------------------------------------------------------------------------------------ checkpoints


def list_checkpoints(run_dir):
    """A run's checkpoints, the newest last. They get their names when they are whole."""
    return sorted(run_dir.glob("checkpoints/step_*"), key=step_of)


def step_of(checkpoint_dir):
    """The completed training steps of checkpoints/step_N: N."""
    return int(checkpoint_dir.name.removeprefix("step_"))


def remove_checkpoints(checkpoints):
    """Removes checkpoints; while it does, none has the name of a whole one."""
    for path in checkpoints:
        unfinished = path.with_name("unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        path.rename(unfinished)
        shutil.rmtree(unfinished)


def finish_checkpoint(accelerator, run_dir, step, state, args):
    """Adds the run's .jsonl files and `state` to checkpoints/unfinished, and names it; on rank 0.

    Only the newest keep_last_n checkpoints are kept.
    """
    folder = run_dir / "checkpoints/unfinished"
    if not accelerator.is_main_process:
        return
    (folder / "state.json").write_text(json.dumps(state))
    for path in run_dir.glob("*.jsonl"):
        shutil.copy(path, folder)
    folder.rename(folder.with_name(f"step_{step}"))
    if args.keep_last_n > 0:
        remove_checkpoints(list_checkpoints(run_dir)[: -args.keep_last_n])


def find_run(args):
    """The folder of the run, and the checkpoint to resume, or None."""
    run_dir = Path(args.output_dir, args.run_name)
    checkpoints = list_checkpoints(run_dir)
    if args.resume_from_checkpoint in ("auto", "latest"):
        if args.resume_from_checkpoint == "latest" and not checkpoints:
            raise ValueError(f"{run_dir} has no checkpoint to resume; is it the right --run_name?")
        return run_dir, checkpoints[-1] if checkpoints else None
    if args.resume_from_checkpoint:
        checkpoint_dir = Path(args.resume_from_checkpoint).resolve()
        return checkpoint_dir.parents[1], checkpoint_dir
    if (run_dir / "metrics.jsonl").exists():
        raise ValueError(
            f"{run_dir} holds another run; choose another --run_name or --output_dir, or add "
            f"--resume_from_checkpoint latest"
        )
    return run_dir, None


def is_finished(accelerator, run_dir, num_steps, args):
    """Collective. Whether `auto` finds a run that has written its last step, after its model."""
    path = run_dir / "metrics.jsonl"
    is_over = args.resume_from_checkpoint == "auto" and path.exists()
    is_over = is_over and path.read_bytes().count(b"\n") >= num_steps
    is_over = broadcast_object_list([is_over])[0]  # as rank 0 sees it
    if is_over:
        accelerator.print(f"{run_dir} is finished")
    return is_over


@cache  # which keeps the file open
def lock_run(run_dir):
    """Locks a run's folder, which is unlocked when this process ends, whatever ends it.

    ValueError: another process has locked it.
    """
    file = open(run_dir / "lock", "a+")  # noqa: SIM115
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        raise ValueError(f"{run_dir}: its run goes on, by {file.read()}; end that first") from None
    except OSError as error:
        print(f"Warning: {run_dir} cannot be locked ({error}); start no second run in it")
        return file
    file.truncate(0)
    file.write(f"process {os.getpid()} on {os.uname().nodename}")
    file.flush()
    return file


def rewind_run(run_dir, checkpoint_dir):
    for path in checkpoint_dir.glob("*.jsonl"):
        shutil.copy(path, run_dir)
    step = step_of(checkpoint_dir)
    remove_checkpoints([path for path in list_checkpoints(run_dir) if step_of(path) > step])


# ------------------------------------------------------------------------------------------- main


def end_with_launcher():
    """Has the system kill this process when its launcher dies, which tells nobody of a SIGKILL.

    A script that was started by itself goes on when its shell ends.
    """
    if not {"TORCHELASTIC_RUN_ID", "ACCELERATE_DYNAMO_MODE"} & os.environ.keys():
        return  # what launchers set, and users do not
    launcher = os.getppid()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1: PR_SET_PDEATHSIG
    is_gone = os.getppid() != launcher
    if launcher == 1:
        # In a container process 1 may be the launcher, which runs this Python. Any other one has
        # adopted an orphan
        is_gone = True
        with contextlib.suppress(PermissionError):  # process 1 is another user's
            is_gone = not os.path.samefile("/proc/1/exe", sys.executable)
    if is_gone:
        print(f"{sys.argv[0]} ends: its launcher is gone", file=sys.stderr)
        os._exit(1)


def main(args):
    end_with_launcher()
    start_time = time.time()
    # A missing head is expected: no warning about it
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()

    # torch 2.13 prefers cuDNN's attention on new GPUs. It may give gradients of NaN (pytorch issue
    # 196678), and prepares itself for each shape, for up to a second
    torch.backends.cuda.enable_cudnn_sdp(False)

    # ---- Ranks and arguments
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),  # else torchrun's processes would not meet on a CPU
        mixed_precision="no",  # autocast is ours
        log_with="wandb" if args.with_tracking else None,
        # Gradients are in DDP's buckets alone
        kwargs_handlers=[
            DistributedDataParallelKwargs(gradient_as_bucket_view=True, broadcast_buffers=False)
        ],
    )
    is_sharded = accelerator.distributed_type in ("FSDP", "DEEPSPEED")
    if is_sharded or accelerator.gradient_accumulation_steps != 1:
        raise ValueError("FSDP, DeepSpeed and accelerate's gradient accumulation do not work here")
    args.mini_batch_size = args.local_mini_batch_size * accelerator.num_processes
    if args.resume_from_checkpoint == "auto" and not args.run_name:
        raise ValueError("--resume_from_checkpoint auto needs a --run_name")
    if args.run_name is None:
        args.run_name = f"{args.exp_name}__{args.seed}__{time.strftime('%Y%m%d_%H%M%S')}"
    # Rank 0 decides: a name may hold the time, and other machines may see a folder late
    places = find_run(args) if accelerator.is_main_process else None
    run_dir, checkpoint_dir = broadcast_object_list([places])[0]
    args.run_name = run_dir.name

    # ---- Data and model
    path = args.tokenizer_name_or_path or args.model_name_or_path
    tokenizer = AutoTokenizer.from_pretrained(path, revision=args.model_revision)
    if args.chat_template:
        tokenizer.chat_template = Path(args.chat_template).read_text("utf-8")
    stop_token = tokenizer.eos_token if args.stop_token == "eos" else args.stop_token
    args.stop_token_id = tokenizer.get_vocab()[stop_token]
    # transformers' own forward pass reads the last token that is not padding, so the stop token,
    # which is the last one, must be another
    if tokenizer.pad_token_id in (None, args.stop_token_id):
        tokenizer.pad_token_id = (args.stop_token_id + 1) % len(tokenizer)
    train_pairs = load_pairs(
        accelerator, args.dataset, args.dataset_config, args.dataset_split, tokenizer, args
    )
    eval_pairs = []
    if args.eval_dataset:
        eval_pairs = load_pairs(
            accelerator,
            args.eval_dataset,
            args.eval_dataset_config,
            args.eval_dataset_split,
            tokenizer,
            args,
        )
    args.num_updates = len(train_pairs) * args.num_train_epochs // args.mini_batch_size
    args.warm_up_steps = round(args.warmup_ratio * args.num_updates)
    if args.warm_up_steps >= args.num_updates:
        raise ValueError(
            f"{len(train_pairs)} pairs x num_train_epochs are {args.num_updates} updates of "
            f"{args.mini_batch_size}; there must be more than warm-up has ({args.warm_up_steps})"
        )
    if is_finished(accelerator, run_dir, args.num_updates, args):
        return
    is_main = accelerator.is_main_process
    if is_main and run_dir.exists():
        lock_run(run_dir)
    args.data_hash = hashlib.sha256(repr(train_pairs).encode()).hexdigest()
    first_step = 1
    state = {"seconds": 0.0, "wandb_id": uuid.uuid4().hex}
    if checkpoint_dir is not None:
        first_step = step_of(checkpoint_dir) + 1
        state = json.loads((checkpoint_dir / "state.json").read_bytes())
        # Under other arguments or data the steps until the checkpoint would have been others
        saved_args = json.loads((run_dir / "args.json").read_bytes())
        for name in ("seed", "mini_batch_size", "num_updates", "data_hash"):
            if saved_args[name] != getattr(args, name):
                raise ValueError(f"--resume_from_checkpoint: {name} was {saved_args[name]}")
    start_time -= state["seconds"]

    model = load_reward_model(args, tokenizer.pad_token_id)
    # Its learning rate is set before each update
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=args.weight_decay, fused=True)
    # The same model, with what accelerate may put around it to train it
    reward_model, optimizer = accelerator.prepare(model, optimizer)

    # Padding must not reach the tokens before it: the score of a first token depends on no other
    # token, so its gradient is exactly 0 there, whatever the precision
    input_ids = torch.arange(8, device=accelerator.device)[None]
    embeddings = model.model.get_input_embeddings().weight  # (vocabulary, hidden_size)
    if torch.autograd.grad(model(input_ids, [0]), embeddings)[0][1:].any():
        raise ValueError(
            f"{args.model_name_or_path} attends to later tokens; it must be a causal model"
        )

    # ---- The run's folder
    if checkpoint_dir is not None:
        # By way of the CPU, since two copies may not fit on a GPU
        accelerator.print(f"Resuming {checkpoint_dir}")
        accelerator.load_state(checkpoint_dir, map_location="cpu")
    if is_main:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock_run(run_dir)
        for path in run_dir.glob("*.jsonl"):
            path.unlink()
        shutil.rmtree(run_dir / "checkpoints/unfinished", ignore_errors=True)
        if checkpoint_dir is not None:
            rewind_run(run_dir, checkpoint_dir)
        (run_dir / "args.json").write_text(json.dumps(asdict(args), indent=2), "utf-8")
    wandb_run = {
        "name": args.run_name,
        "entity": args.wandb_entity,
        "id": state["wandb_id"],
        "resume": "allow",
    }
    accelerator.init_trackers(args.wandb_project_name, asdict(args), {"wandb": wandb_run})

    # ---- The order of the pairs: a permutation for each pass over them
    generator = torch.Generator().manual_seed(args.seed)
    order = []  # indices of train_pairs
    for _ in range(args.num_train_epochs):
        order += torch.randperm(len(train_pairs), generator=generator).tolist()

    # ---- The loop
    steps = range(first_step, args.num_updates + 1)
    for training_step in tqdm(steps, disable=None if is_main else True):
        step_start = time.perf_counter()

        # 1. Every save_freq updates a checkpoint of the model as the last one left it. The first
        # step of a process saves none: its model is the initial one, or that of a checkpoint.
        is_due = args.save_freq > 0 and (training_step - 1) % args.save_freq == 0
        if is_due and training_step > first_step:
            state["seconds"] = time.time() - start_time
            accelerator.save_state(run_dir / "checkpoints/unfinished")
            accelerator.wait_for_everyone()
            finish_checkpoint(accelerator, run_dir, training_step - 1, state, args)

        # 2. The gradient of this update's pairs, and metrics of the model before it
        start = (training_step - 1) * args.mini_batch_size
        mini_batch = order[start : start + args.mini_batch_size]
        metrics = accumulate_gradients(accelerator, reward_model, train_pairs, mini_batch, args)
        grad_norm = accelerator.clip_grad_norm_(reward_model.parameters(), args.max_grad_norm)
        if not grad_norm.isfinite():  # the same on every rank
            raise FloatingPointError(f"the gradient of update {training_step} is not finite")

        # 3. The update
        lr = lr_multiplier(training_step - 1, args.num_updates, args) * args.learning_rate
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        # They are in DDP's buckets. If they became None, the next passes would make others beside
        optimizer.zero_grad(set_to_none=False)
        metrics |= {
            "training_step": training_step,
            "epoch": training_step * args.mini_batch_size / len(train_pairs),
            "lr": lr,
            "optim/grad_norm": grad_norm.item(),
            "time/training": time.perf_counter() - step_start,
        }

        # 4. After the last update the model is saved, and then comes the evaluation
        if training_step == args.num_updates:
            if is_main:
                save_reward_model(model, tokenizer, run_dir / "model")
            if eval_pairs:
                metrics |= evaluation_metrics(score_all(accelerator, model, eval_pairs, args))
                accelerator.print(f"Held-out pairs ranked right: {metrics['eval/accuracy']:.1%}")

        # 5. Files, and what is shown
        metrics["time/from_scratch"] = time.time() - start_time
        accelerator.log(metrics, step=training_step)
        if is_main:
            with open(run_dir / "metrics.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps(metrics) + "\n")
            if training_step % max(1, args.num_updates // 20) == 0:
                tqdm.write(
                    f"step {training_step}/{args.num_updates}"
                    f"  loss {metrics['loss/preference_avg']:.3g}"
                    f"  accuracy {metrics['objective/accuracy']:.3g}"
                    f"  margin {metrics['objective/margin']:.3g}"
                )

    accelerator.print(f"Reward model: {run_dir / 'model'}; metrics: {run_dir / 'metrics.jsonl'}")
    # The last reference to gloo's group of ranks must not be DDP's: that holds Python's lock while
    # it waits for gloo's threads, which may need it
    accelerator.clear()
    del reward_model
    accelerator.end_training()


if __name__ == "__main__":
    main(tyro.cli(Args, use_underscores=True))
