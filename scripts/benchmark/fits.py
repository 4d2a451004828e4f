"""Which model fits on which GPUs: the tables of README and docs/scaling.md, by plan.py.

    python scripts/benchmark/fits.py

A cell has what a learner needs, in GiB of memory of its GPU; beside it the share of a shared GPU
(--vllm_gpu_memory_utilization) that vLLM is to have, where its default of 0.3 does not do; "no":
none does, so that learner and vLLM have what they need, with room for 8 responses at once.
README's table has the largest model that fits by one of the launches.
Computed, not measured: for the shapes of Qwen3 and Qwen2.5, prompts of 512 tokens, responses of
1,024, --micro_batch_tokens 4096, and otherwise the defaults.
"""

import functools
import importlib
import itertools
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.extend(str(folder) for folder in Path(__file__).resolve().parents[1:3])

import plan
import preflight
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Qwen2Config,
    Qwen3Config,
)

PROMPT, RESPONSE = 512, 1024
# Hidden size, layers, heads of attention and of keys, inner size, whether the head is tied; by the
# config.json of each
QWEN3 = {
    "0.6": (1024, 28, 16, 8, 3072, True),
    "1.7": (2048, 28, 16, 8, 6144, True),
    "4": (2560, 36, 32, 8, 9728, True),
    "8": (4096, 36, 32, 8, 12_288, False),
    "14": (5120, 40, 40, 8, 17_408, False),
    "32": (5120, 64, 64, 8, 25_600, False),
}
# Sizes that Qwen3 does not have
QWEN2_5 = {
    "0.5": (896, 24, 14, 2, 4864, True),
    "1.5": (1536, 28, 12, 2, 8960, True),
    "3": (2048, 36, 16, 2, 11_008, True),
    "7": (3584, 28, 28, 4, 18_944, False),
}
SIZES = sorted([*QWEN3, *QWEN2_5], key=float)


@dataclass
class Run(preflight.Run):
    """A run whose rows have these lengths."""

    def max_length(self):
        return PROMPT + self.args.response_length


@functools.cache
def models_of(size):
    """A policy and a value model, without memory for their weights."""
    config_class, shapes = (Qwen3Config, QWEN3) if size in QWEN3 else (Qwen2Config, QWEN2_5)
    hidden_size, layers, heads, key_heads, inner_size, is_tied = shapes[size]
    config = config_class(
        vocab_size=152_064 if size == "7" else 151_936,
        hidden_size=hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        intermediate_size=inner_size,
        tie_word_embeddings=is_tied,
        num_labels=1,
    )
    with torch.device("meta"):
        classes = (AutoModelForCausalLM, AutoModelForSequenceClassification)
        return [auto_class.from_config(config) for auto_class in classes]


def launch(name, size, gpu_memory, file, nodes=1, learners=1, vllm_gpus=(), rank=0):
    """A Run of the model of this size, in billions; learners and vllm_gpus are those of a node."""
    script = importlib.import_module(name)
    options = preflight.Options(
        config_file=str(Path(__file__).parents[1] / "accelerate" / file),
        num_processes=learners * nodes,
        num_machines=nodes,
        gpu_memory=gpu_memory,
    )
    preflight.read_config_file(options)
    args = script.Args(
        response_length=RESPONSE,
        micro_batch_tokens=4096,
        vllm_gpus=vllm_gpus,
        vllm_gpu_memory_utilization=0.9 if vllm_gpus else 0.3,
        lora_rank=rank,
    )
    model, value_model = models_of(size)
    return Run(script, options, args, model=model, value_model=value_model)


def cell(run):
    words = f"{plan.learner_needs(run) / plan.GIB:.0f}"
    solved = plan.with_share(run)
    if solved is None:
        return f"no, {words}"
    return f"{words}{''.join(f', at {share:g}' for share in solved[0].values())}"


SHARED, SPLIT = {"learners": 8}, {"learners": 6, "vllm_gpus": (6, 7)}
LAUNCHES = {
    **{f"one GPU of {size} GB, shared": (size, "one_gpu.yaml", {}) for size in (24, 40, 80)},
    "8 x 80 GB, DDP, shared": (80, "ddp.yaml", SHARED),
    "8 x 80 GB, DDP, 6 + 2 for vLLM": (80, "ddp.yaml", SPLIT),
    "8 x 80 GB, FSDP2, shared": (80, "fsdp2.yaml", SHARED),
    "8 x 80 GB, FSDP2, 6 + 2 for vLLM": (80, "fsdp2.yaml", SPLIT),
    "16 x 80 GB, FSDP2, shared": (80, "fsdp2_two_nodes.yaml", SHARED | {"nodes": 2}),
    "16 x 80 GB, FSDP2, 12 + 4 for vLLM": (80, "fsdp2_two_nodes.yaml", SPLIT | {"nodes": 2}),
}


def print_table(launches, sizes, rank):
    columns = [(name, size) for name in ("grpo_vllm_async", "ppo_vllm_async") for size in sizes]
    titles = [f"{name.split('_')[0].upper()} {size} B" for name, size in columns]
    print(f"| GPUs | a learner has | {' | '.join(titles)} |")
    print("|---" * (len(titles) + 2) + "|")
    for words in launches:
        gpu_memory, file, numbers = LAUNCHES[words]
        runs = [launch(*column, gpu_memory, file, rank=rank, **numbers) for column in columns]
        room = plan.learner_room(runs[0]) / plan.GIB
        print(f"| {words} | {room:.0f} | {' | '.join(map(cell, runs))} |")


# README's rows: what the launches begin with
ROWS = {f"{size} GB": f"one GPU of {size} GB" for size in (24, 40, 80)}
ROWS["eight of 80 GB"] = "8 x 80 GB"


def largest(name, row, rank):
    """The largest size that fits by a launch of one of README's rows, and that run; or None."""
    launches = [LAUNCHES[words] for words in LAUNCHES if words.startswith(ROWS[row])]
    for size in reversed(SIZES):
        for *given, more in launches:
            solved = plan.with_share(launch(name, size, *given, rank=rank, **more))
            if solved is not None:
                return size, solved[1]
    return None


def largest_of(row):
    """What README's row has: for GRPO, PPO, and both with adapters."""
    columns = itertools.product((0, 16), ("grpo_vllm_async", "ppo_vllm_async"))
    return [largest(name, row, rank) for rank, name in columns]


def print_largest():
    print("| GPUs | GRPO | PPO | GRPO, adapters | PPO, adapters |\n|---|---|---|---|---|")
    for row in ROWS:
        print(f"| {row} | {' | '.join(cell[0] if cell else '' for cell in largest_of(row))} |")


def main():
    print("The largest:\n")
    print_largest()
    print("\nAll weights are trained:\n")
    print_table(LAUNCHES, ["0.6", "1.7", "4", "8", "14"], rank=0)
    print("\nAdapters are trained (--lora_rank 16):\n")
    print_table([words for words in LAUNCHES if words[:2] != "16"], QWEN3, rank=16)


if __name__ == "__main__":
    main()
