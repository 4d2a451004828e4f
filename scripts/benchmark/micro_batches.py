"""What micro-batches by tokens save: passes, positions and seconds, by rows and by tokens.

    python scripts/benchmark/micro_batches.py
    python scripts/benchmark/micro_batches.py --tokens 8192 --length 1000 --prompts 20 2000

A made-up batch of lengths as a real run has them: many responses are short and a few reach the cap.
512 responses in mini-batches of 128 for each rank: lengths are log-normal, about 300 tokens in the
mean, and 5% of them are at the cap of 2,048; prompts have 50 to 250 tokens. Every mini-batch is
cut by the script's own cut_micro_batches: by --per_device_train_batch_size, and by
--micro_batch_tokens. For 1 rank and, computed alone, for a rank of 8, whose mini-batch is of 1,024
responses.

positions: those computed, padding included, and how many of them are padding. largest pass: in
positions. seconds: of the forward and backward passes of accumulate_gradients in ppo_vllm_async.py,
with a small random model and its value model in float32 on one thread of the CPU. They are of the
processor, the least of --rounds; the sides take turns. What a GPU loses by small passes does not
show here.
"""

import argparse
import math
import random
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

sys.path.append(str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
from accelerate import Accelerator
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification

import ppo_vllm_async as script

RESPONSES, MINI_BATCH = 512, 128  # of a rank
MOST, AT_MOST = 2048, 0.05  # tokens of a response, and the share of responses that have so many
SIZES = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def make_responses(count, length, prompts):
    """Token ids of prompts and responses, which have about `length` tokens in the mean.

    prompts: the least and the most tokens of a prompt.
    """
    choice = random.Random(1)
    sigma = 0.9
    # A log-normal's mean is exp(mu + sigma^2 / 2)
    mu = math.log((length - AT_MOST * MOST) / (1 - AT_MOST)) - sigma**2 / 2
    responses = []
    for _ in range(count):
        size = MOST
        if choice.random() > AT_MOST:
            size = min(MOST, max(1, round(choice.lognormvariate(mu, sigma))))
        prompt = script.Prompt("", "", [7] * choice.randint(*prompts), None, None, None)
        responses.append(script.Response(prompt, np.full(size, 8), np.zeros(size), stopped=True))
    return responses


def mini_batches_of(count, size):
    rows = random.Random(2).sample(range(count), count)
    return [rows[start : start + size] for start in range(0, count, size)]


def count(num_ranks, given, args):
    """Of each rank's passes over its batch: how many, their positions, and so on."""
    responses = make_responses(RESPONSES * num_ranks, given.length, given.prompts)
    batch = script.collate(responses, "cpu")
    mini_batches = mini_batches_of(len(responses), MINI_BATCH * num_ranks)
    sizes = []  # [rank][pass]
    for rank in range(num_ranks):
        accelerator = SimpleNamespace(process_index=rank, num_processes=num_ranks)
        sizes.append([])
        for mini_batch in mini_batches:
            micro_batches = script.cut_micro_batches(
                accelerator, batch, mini_batch, args.per_device_train_batch_size, args
            )
            sizes[-1] += [part.mask.numel() for _, part in micro_batches]
    positions = sum(map(sum, sizes))
    return {
        "passes": len(sizes[0]),
        "positions": positions / num_ranks,
        "padding": 1 - batch.lengths.sum().item() / positions,
        "largest": max(map(max, sizes)),
    }


def prepare(given):
    """What accumulate_gradients takes, but for the arguments of the run."""
    torch.manual_seed(0)
    args = script.Args(dtype="float32")
    batch = script.collate(make_responses(RESPONSES, given.length, given.prompts), "cpu")
    made_up = ("logprobs", "values", "advantages", "returns")
    batch = replace(batch, loss_mask=batch.mask, **dict.fromkeys(made_up, batch.mask))
    policy = script.PolicyModel(Qwen2ForCausalLM(Qwen2Config(**SIZES)), args)
    classifier = Qwen2ForSequenceClassification(Qwen2Config(**SIZES, num_labels=1))
    return policy, script.ValueModel(classifier, args, is_value_model=True), batch


def measure(accelerator, parts, args):
    """Seconds of the processor for the passes over all mini-batches."""
    start = time.process_time()
    for mini_batch in mini_batches_of(RESPONSES, MINI_BATCH):
        script.accumulate_gradients(accelerator, *parts, mini_batch, True, args)
    return time.process_time() - start


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 2])
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16_384])
    parser.add_argument("--length", type=int, default=300, help="mean of the responses, in tokens")
    parser.add_argument("--prompts", type=int, nargs=2, default=[50, 250], help="least and most")
    parser.add_argument("--rounds", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(1)
    accelerator, parts = Accelerator(cpu=True), prepare(given)
    sides = {f"{rows} rows": {"per_device_train_batch_size": rows} for rows in given.rows}
    sides |= {f"{tokens:,} tokens": {"micro_batch_tokens": tokens} for tokens in given.tokens}
    args = {side: replace(script.Args(dtype="float32"), **sides[side]) for side in sides}
    seconds = {side: [] for side in sides}
    for _ in range(given.rounds):
        for side in sides:
            seconds[side].append(measure(accelerator, parts, args[side]))

    *_, batch = parts
    mean = batch.mask.sum() / RESPONSES
    print(f"{RESPONSES} responses of {mean:.0f} tokens in the mean, torch {torch.__version__}\n")
    print("| ranks | micro-batches | passes | positions | padding | largest pass", end="")
    print(" | seconds | to the first |")
    print("|---|---|---|---|---|---|---|---|")
    first = min(seconds[next(iter(sides))])
    for num_ranks in (1, 8):
        for side in sides:
            found = count(num_ranks, given, args[side])
            cells = [num_ranks, side, found["passes"], f"{found['positions'] / 1e3:,.0f} k"]
            cells += [f"{found['padding']:.0%}", f"{found['largest']:,}"]
            least = min(seconds[side])
            cells += [f"{least:.1f}", f"{least / first:.2f}"] if num_ranks == 1 else ["", ""]
            print(f"| {' | '.join(map(str, cells))} |")


if __name__ == "__main__":
    main()
