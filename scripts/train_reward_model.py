r"""Train a reward model on pairs of a chosen and a rejected response (Bradley-Terry).

To train a tiny one without a GPU, in a minute after the set-up:

    bash scripts/train/debug/reward_model.sh

To train one on a GPU (on eight GPUs use ddp.yaml, on two CPU ranks torchrun --nproc_per_node 2):

    accelerate launch --quiet --config_file scripts/accelerate/one_gpu.yaml \
        scripts/train_reward_model.py \
        --model_name_or_path Qwen/Qwen3-0.6B \
        --dataset rm_train.parquet --eval_dataset rm_test.parquet --save_freq 50

A row is scored as PPO and GRPO will score it. Prompt, response and stop token are tokenized
separately, and the score is read at the last token. The last token is found by length, because the
pad token can be the same as the stop token. The functions of ppo_sync.py read examples, models and
checkpoints.

Deliberate simplifications:
 1. Every response of the data counts as complete, so the model never sees one without its stop
    token (use --non_stop_penalty for those). Pairs that are too long are dropped, not truncated.
 2. Rows are padded, not packed. Chosen and rejected responses are in one batch.
 3. Pairs that do not fill a last mini-batch are not trained on.

Sources on arXiv: 2009.01325 and 2203.02155 for reward models, 2312.09244 for centering.
"""

import math
import sys
import time
from collections import Counter
from dataclasses import dataclass, field, fields
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import torch
import torch.nn.functional as F
import tyro
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForSequenceClassification

sys.path.append(str(Path(__file__).resolve().parents[1]))

import ppo_sync as ppo

# preflight.py calls these as functions of this file
from ppo_sync import (  # noqa: F401
    find_run,
    list_checkpoints,
    load_rows,
    plain_values,
    read_state,
    step_of,
    tokenize_prompt,
)


@dataclass
class Args:
    """Options of a reward model's training. Every run sets a model, a dataset and its sizes."""

    # -- The run
    exp_name: str = "reward_model"
    """Name of the experiment."""
    seed: int = 1
    """Seed of the order of pairs and of the new head."""
    run_name: str | None = None
    """Folder of the run in output_dir. Default: exp_name, seed, the time and random letters."""
    output_dir: str = "output"
    """Folder in which runs are written."""
    save_freq: int = 0
    """Number of updates between checkpoints. 0 writes no checkpoints."""
    keep_last_n: int = 3
    """Number of checkpoints to keep, which are the newest. 0 keeps all."""
    resume_from_checkpoint: str | None = None
    """Checkpoint to resume (newer ones are removed). "latest": run_name's newest, or a new run."""
    with_tracking: bool = False
    """Also log to Weights & Biases."""
    wandb_project_name: str = "tandem"
    """Project in Weights & Biases."""
    wandb_entity: str | None = None
    """Owner of that project (a user or a team)."""

    # -- Data
    dataset: str = "debug_assets/preference_train.parquet"
    """Pairs, as a .parquet or .jsonl file, a folder, or a dataset on the Hub."""
    dataset_config: str | None = None
    """Configuration of the dataset, if it has several."""
    dataset_split: str = "train"
    """Split of a dataset on the Hub."""
    eval_dataset: str | None = None
    """Held-out pairs in the same form. Without them there is no evaluation."""
    eval_dataset_config: str | None = None
    """Configuration of the held-out pairs, if they have several."""
    eval_dataset_split: str = "test"
    """Split of held-out pairs on the Hub."""
    max_token_length: int = 1024
    """Most tokens of prompt, response and stop token. Pairs with a longer row are dropped."""

    # -- Model
    model_name_or_path: str = "debug_assets/model"
    """Language model or one-label classifier to start from, as a folder or a Hub name."""
    model_revision: str | None = None
    """Revision of the model on the Hub."""
    tokenizer_name_or_path: str | None = None
    """Tokenizer, as a folder or a Hub name. Default: the model's."""
    chat_template: str | None = None
    """File with a Jinja chat template. Default: the tokenizer's own."""
    stop_token: str = "eos"
    """Token that ends every response, as the policy's do. "eos" is the tokenizer's end token."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Data type of the weights. The optimizer keeps float32 masters."""
    attn_implementation: str = "sdpa"
    """Attention of the model: sdpa, eager, flash_attention_2, ..."""
    compile_layers: bool = False
    """Compile the model's layers, on GPUs only."""
    gradient_checkpointing: bool = True
    """Recompute activations in the backward pass. This saves much memory and is a third slower."""

    # -- Optimization and batches
    num_train_epochs: int = 1
    """Epochs of the pairs. More than one soon overfits (2203.02155, C.2)."""
    learning_rate: float = 3e-6
    """Peak learning rate."""
    lr_scheduler_type: Literal["linear", "cosine", "constant"] = "linear"
    """Learning rate schedule after warm-up."""
    warmup_ratio: float = 0.03
    """Fraction of all updates over which the learning rate rises."""
    weight_decay: float = 0.0
    """Weight decay of AdamW."""
    max_grad_norm: float = 1.0
    """Norm to which gradients are clipped."""
    center_rewards_coefficient: float = 0.0
    """Weight of (chosen + rejected)^2 in the loss, which pulls scores to 0 (try 0.01)."""
    local_mini_batch_size: int = 64
    """Pairs per optimizer update and rank."""
    per_device_train_batch_size: int = 8
    """Pairs per forward and backward pass (micro-batch) of a rank."""

    # -- Filled in at run time
    mini_batch_size: ppo.FilledIn[int] = 0  # pairs per optimizer update, over all ranks
    num_updates: ppo.FilledIn[int] = 0  # optimizer updates of the run
    warm_up_steps: ppo.FilledIn[int] = 0  # updates in which the learning rate rises
    stop_token_id: ppo.FilledIn[int] = 0  # id that ends every row
    # Date (YYYY-MM-DD) on which the run was first started, for chat templates that contain the date
    start_day: ppo.FilledIn[str] = field(default_factory=lambda: date.today().isoformat())


@dataclass
class Pair:
    """Two responses to a prompt, of which the first is preferred."""

    chosen_ids: list[int]  # token ids of prompt, response and stop token
    rejected_ids: list[int]
    length: int  # of the longer one


def split_row(prompt, response):
    """Return what precedes a response (a string or messages), and the text of the response.

    A response is a text, or messages whose last one has that text. The messages can begin with
    those of the prompt, continue them, or be the whole dialogue. Raise ValueError otherwise.
    """
    match response:
        case str():
            return prompt, response
        case [*context, {"role": "assistant", "content": str(text)}]:
            pass
        case _:
            raise ValueError(
                f"a response must be a text, or messages that end with a text of the assistant, "
                f"but this one is {str(response)[-80:]}"
            )
    if context and prompt and context[: len(prompt)] != prompt:
        if context[0]["role"] == "assistant":  # the messages continue the prompt
            context = prompt + context
        elif isinstance(prompt, list):
            raise ValueError("its messages must begin with those of the column `prompt`")
    return context or prompt, text


def split_pair(row):
    """Return the prompt of an example (a string or messages), and the texts of its two responses.

    Raise ValueError if there is no prompt, or if the responses have different prompts. Two
    dialogues must agree in all messages except the last.
    """
    prompt, chosen = split_row(row.get("prompt"), row["chosen"])
    other, rejected = split_row(row.get("prompt"), row["rejected"])
    if not prompt:
        raise ValueError(
            "the prompt is missing, both as a column `prompt` and as messages; for dialogues in "
            "HH's form run scripts/data_preprocess/full_hh_rlhf.py --split rm"
        )
    if other != prompt:
        raise ValueError("`chosen` and `rejected` have different prompts")
    if isinstance(prompt, list) and prompt[-1]["role"] == "assistant":
        raise ValueError("the prompt must not end with a message of the assistant")
    return prompt, chosen, rejected


def load_pairs(accelerator, path, config, split, tokenizer, args):
    """Load the Pairs of a dataset. Raise ValueError if an example is not a pair, or none is left.

    The columns are `chosen` and `rejected`, and also `prompt` unless these two contain it.
    Responses do not contain the stop token.
    """
    rows = load_rows(path, config, split)
    pairs, notes = [], Counter()
    # A run that is resumed on another day must make the same pairs
    variables = {"strftime_now": date.fromisoformat(args.start_day).strftime}
    for index, row in enumerate(rows):
        with ppo.naming_row(path, index):
            row = plain_values(row)
            prompt, *responses = split_pair(row)
            _, prompt_ids = tokenize_prompt(prompt, row, tokenizer, variables)
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
    counts = ", ".join(f"{count} {note}" for note, count in notes.items())
    if not pairs:
        raise ValueError(f"{path}: none of {len(rows)} pairs is left: {counts}")
    if counts:
        accelerator.print(f"{path}: of {len(rows)} pairs: {counts}")
    return pairs


def as_ppo_args(args):
    """Return PPO's Args for its functions, with the values of the options that both files have."""
    names = {field.name for field in fields(ppo.Args)} & vars(args).keys()
    return ppo.Args(**{name: getattr(args, name) for name in names})


def load_reward_model(args, pad_token_id):
    """Load a RewardModel, whose scores are (rows, length).

    A language model has no head for scores. It gets a random one with a standard deviation of
    1/sqrt(hidden_size + 1) (2009.01325, p. 11).
    """
    path, auto_class = args.model_name_or_path, AutoModelForSequenceClassification
    model = ppo.load_model(auto_class, path, as_ppo_args(args), trained=True, num_labels=1)
    model.config.pad_token_id = model.config.get_text_config().pad_token_id = pad_token_id
    head = model.score.weight.data  # (1, hidden_size)
    if not head.any():  # load_model adds a missing head as zeros
        torch.manual_seed(args.seed)
        head.copy_(torch.randn(head.shape) / math.sqrt(head.shape[1] + 1))
    return ppo.RewardModel(model, args)


def preference_loss(chosen, rejected, center_rewards_coefficient):
    """Return -log sigmoid(chosen - rejected) per pair (Bradley-Terry), plus a centering term.

    The term is the coefficient times (chosen + rejected)^2. Pairs determine only differences of
    scores, so this term can set their level (2312.09244). All tensors are (pairs,).

    >>> preference_loss(torch.tensor([1.0]), torch.tensor([1.0]), 0.25)
    tensor([1.6931])
    """
    loss = -F.logsigmoid(chosen - rejected)
    return loss + center_rewards_coefficient * (chosen + rejected) ** 2


def split_into_micro_batches(accelerator, pairs, indices, size):
    """Split this rank's part of some pairs, given by their indices, into micro-batches.

    A micro-batch has at most `size` pairs of similar length, because it is padded to the longest.
    """
    by_length = sorted(indices, key=lambda index: (pairs[index].length, index))
    of_rank = by_length[accelerator.process_index :: accelerator.num_processes]
    return [of_rank[start : start + size] for start in range(0, len(of_rank), size)]


def score_pairs(accelerator, reward_model, pairs, indices):
    """Return the scores of pairs, chosen and rejected, from one forward pass: (2, pairs)."""
    micro_batch = [pairs[index] for index in indices]
    rows = [pair.chosen_ids for pair in micro_batch] + [pair.rejected_ids for pair in micro_batch]
    # The last tokens are found by lengths, so padding can have any id, here 0
    input_ids = pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    scores = reward_model(input_ids.to(accelerator.device), None)
    return scores[range(len(rows)), [len(row) - 1 for row in rows]].view(2, -1)


@torch.no_grad()
def score_all(accelerator, reward_model, pairs, args):
    """Return the scores of all pairs, chosen and rejected: (2, pairs).

    Every rank must call this, in the same order.
    """
    scores = torch.zeros(2, len(pairs), device=accelerator.device)
    size = args.per_device_train_batch_size
    for indices in split_into_micro_batches(accelerator, pairs, range(len(pairs)), size):
        scores[:, indices] = score_pairs(accelerator, reward_model, pairs, indices)
    # A pair's scores are 0 on all ranks except one, so the sum over ranks is exact
    return accelerator.reduce(scores)


def accumulate_gradients(accelerator, reward_model, pairs, mini_batch, args):
    """Run forward and backward passes over this rank's part of a mini-batch; return metrics.

    mini_batch: indices of pairs. The loss is the mean over the pairs of all ranks, so the gradient
    does not depend on how the mini-batch is split. Metrics are means over the pairs. Every rank
    must call this, in the same order.
    """
    sums, size = Counter(), args.per_device_train_batch_size
    for indices in split_into_micro_batches(accelerator, pairs, mini_batch, size):
        chosen, rejected = score_pairs(accelerator, reward_model, pairs, indices)
        loss = preference_loss(chosen, rejected, args.center_rewards_coefficient)  # (pairs,)
        (loss.sum() / len(mini_batch)).backward()
        per_pair = {
            "loss/preference_avg": loss,
            "objective/accuracy": chosen > rejected,
            "objective/margin": chosen - rejected,
            "objective/scores": (chosen + rejected) / 2,
        }
        ppo.add_sums(sums, per_pair, torch.ones_like(loss))
    totals = accelerator.reduce(torch.stack(list(sums.values()))).tolist()
    return {name: total / len(mini_batch) for name, total in zip(sums, totals, strict=True)}


def evaluation_metrics(scores):
    """Return the eval/* metrics of score_all's scores, with the loss without its centering term."""
    scores = scores.double()  # (2, pairs)
    chosen, rejected = scores
    return {
        "eval/loss": preference_loss(chosen, rejected, 0.0).mean().item(),
        "eval/accuracy": (chosen > rejected).double().mean().item(),
        "eval/margin": (chosen - rejected).mean().item(),
        "eval/scores_mean": scores.mean().item(),
        "eval/scores_std": scores.std().item(),
    }


def main(args):
    # ---- Ranks and arguments
    start_time = time.time()
    accelerator, _ = ppo.start_ranks(args)
    if accelerator.is_fsdp2 or accelerator.gradient_accumulation_steps != 1:
        raise ValueError("launch with ddp.yaml, without FSDP or accelerate's gradient accumulation")
    args, run_dir, checkpoint_dir = ppo.agree_on_run(args)
    args.mini_batch_size = args.local_mini_batch_size * accelerator.num_processes

    # ---- Data
    tokenizer = ppo.load_tokenizer(as_ppo_args(args))
    stop_token = tokenizer.eos_token if args.stop_token == "eos" else args.stop_token
    args.stop_token_id = tokenizer.get_vocab()[stop_token]
    # transformers reads the score at the last token that is not padding, which is the stop token.
    # It must therefore not be the pad token
    if tokenizer.pad_token_id in (None, args.stop_token_id):
        tokenizer.pad_token_id = (args.stop_token_id + 1) % len(tokenizer)
    source = args.dataset, args.dataset_config, args.dataset_split
    train_pairs = load_pairs(accelerator, *source, tokenizer, args)
    source = args.eval_dataset, args.eval_dataset_config, args.eval_dataset_split
    eval_pairs = load_pairs(accelerator, *source, tokenizer, args) if args.eval_dataset else []
    args.num_updates = len(train_pairs) * args.num_train_epochs // args.mini_batch_size
    args.warm_up_steps = round(args.warmup_ratio * args.num_updates)
    if args.warm_up_steps >= args.num_updates:
        raise ValueError(
            f"{len(train_pairs)} pairs in --num_train_epochs are {args.num_updates} updates of "
            f"{args.mini_batch_size}, but more than the {args.warm_up_steps} of warm-up are needed"
        )
    first_step, state = read_state(run_dir, checkpoint_dir, train_pairs + eval_pairs, args)
    start_time -= state["seconds"]

    # ---- The model
    model = load_reward_model(args, tokenizer.pad_token_id)
    reward_model = ppo.place_model(accelerator, model, args)
    # A token's score must not depend on later tokens, because these can be padding
    input_ids = torch.arange(8, device=accelerator.device)[None]
    embeddings = model.model.get_input_embeddings().weight  # (vocabulary, hidden_size)
    if torch.autograd.grad(model(input_ids, None)[0, 0], embeddings)[0][1:].any():
        raise ValueError("the model attends to later tokens, but it must be a causal model")
    # The learning rate is set before each update
    optimizer = ppo.make_optimizer(reward_model, as_ppo_args(args))
    trained_models = {"reward_model": (reward_model, optimizer)}
    ppo.load_checkpoint(trained_models, checkpoint_dir)

    # ---- The run's folder and the tracker, by PPO's functions
    rows = [SimpleNamespace(token_ids=pair.chosen_ids) for pair in train_pairs]
    ppo.open_run(accelerator, run_dir, checkpoint_dir, state, rows, args)

    # ---- The loop. Each epoch has its own permutation of the pairs
    generator = torch.Generator().manual_seed(args.seed)
    epochs = range(args.num_train_epochs)
    orders = [torch.randperm(len(train_pairs), generator=generator) for _ in epochs]
    order = torch.cat(orders).tolist()  # indices of train_pairs
    for training_step in range(first_step, args.num_updates + 1):
        step_start = time.perf_counter()

        # 1. Save a checkpoint of the model after the previous update, if this process made that one
        done = training_step - 1
        if args.save_freq and done % args.save_freq == 0 and training_step > first_step:
            state["seconds"] = time.time() - start_time
            ppo.save_checkpoint(trained_models, run_dir, done, state, args)

        # 2. The gradient of this update, and metrics of the model before it
        start = done * args.mini_batch_size
        mini_batch = order[start : start + args.mini_batch_size]
        metrics = accumulate_gradients(accelerator, reward_model, train_pairs, mini_batch, args)

        # 3. The update. If the gradient is not finite, its pairs are saved and the run ends
        lr = ppo.lr_multiplier(done, args.num_updates, args) * args.learning_rate
        batch = SimpleNamespace(pairs=[vars(train_pairs[index]) for index in mini_batch])
        norm = ppo.apply_gradients(accelerator, reward_model, optimizer, lr, batch, run_dir, args)
        metrics |= {
            "training_step": training_step,
            "epoch": training_step * args.mini_batch_size / len(train_pairs),
            "lr": lr,
            "optim/grad_norm": norm.item(),
            "time/training": time.perf_counter() - step_start,
        }

        # 4. After the last update, save the model, rename it when it is complete, and evaluate it
        if training_step == args.num_updates:
            if accelerator.is_main_process:
                unfinished = run_dir / "model.unfinished"
                model.model.save_pretrained(unfinished)
                tokenizer.save_pretrained(unfinished)
                unfinished.rename(run_dir / "model")
            if eval_pairs:
                metrics |= evaluation_metrics(score_all(accelerator, model, eval_pairs, args))
                accuracy = f"{metrics['eval/accuracy']:.1%}"
                accelerator.print(f"Held-out pairs ranked correctly: {accuracy}")

        # 5. Write and print the metrics
        metrics["time/from_scratch"] = time.time() - start_time
        accelerator.log(metrics, step=training_step)
        ppo.append_line(run_dir / "metrics.jsonl", metrics)
        if accelerator.is_main_process and training_step % max(1, args.num_updates // 20) == 0:
            names = ("loss/preference_avg", "objective/accuracy", "objective/margin")
            shown = "  ".join(f"{name}: {metrics[name]:.3g}" for name in names)
            print(f"step {training_step} of {args.num_updates}  {shown}", flush=True)

    accelerator.print(f"Reward model: {run_dir / 'model'}; metrics: {run_dir / 'metrics.jsonl'}")
    accelerator.end_training()


if __name__ == "__main__":
    main(tyro.cli(Args, use_underscores=True))
