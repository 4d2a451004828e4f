"""Which model fits on which GPUs: the tables of docs/memory.md, by resource_plan.py.

    python scripts/benchmark/fits.py

The page says what a cell has. The first table has the largest of the launches on a machine. vLLM
must have room for 8 responses at once. Computed, not measured: for the shapes of Qwen3 and Qwen2.5,
prompts of 512 tokens, responses of 1,024, and otherwise the defaults.
"""

import importlib
import itertools
import sys
from pathlib import Path

sys.path.extend(str(folder) for folder in Path(__file__).resolve().parents[1:3])

import fork
import preflight
from internal import resource_plan as plan
from shapes import SHAPES, models_of

PROMPT, RESPONSE = 512, 1024


class Run(preflight.Run):
    """A run whose rows have these lengths."""

    def max_length(self):
        return PROMPT + self.args.response_length


def launch(name, size, gpu_memory, file, nodes=1, learners=1, vllm_gpus=(), rank=0):
    """A Run of the model of this size, in billions; learners and vllm_gpus are those of a node.

    rank: of adapters, which the script's fork has; 0: all weights are trained.
    """
    script = fork.import_fork("lora", f"{name}.py") if rank else importlib.import_module(name)
    options = preflight.Options(
        config_file=str(Path(__file__).parents[1] / "accelerate" / file),
        num_processes=learners * nodes,
        num_machines=nodes,
        gpu_memory=gpu_memory,
    )
    preflight.read_config_file(options)
    args = script.Args(
        response_length=RESPONSE,
        vllm_gpus=vllm_gpus,
        vllm_gpu_memory_utilization=0.9 if vllm_gpus else 0.3,
        **({"lora_rank": rank} if rank else {}),
    )
    model, value_model = models_of(size)
    return Run(script, options, args, model=model, value_model=value_model)


ON_8 = {"8 x 80 GB, DDP": "ddp.yaml", "8 x 80 GB, FSDP2": "fsdp2.yaml"}
ON_16 = {"16 x 80 GB, FSDP2": "fsdp2_two_nodes.yaml"}
LAUNCHES = {f"one GPU of {size} GB, shared": (size, "one_gpu.yaml", {}) for size in (24, 40, 80)}
for nodes, files in enumerate((ON_8, ON_16), start=1):
    for words, file in files.items():
        split = {"nodes": nodes, "learners": 6, "vllm_gpus": (6, 7)}
        LAUNCHES[f"{words}, shared"] = (80, file, {"nodes": nodes, "learners": 8})
        LAUNCHES[f"{words}, {6 * nodes} + {2 * nodes} for vLLM"] = (80, file, split)
# The first table's rows: what the launches begin with
ROWS = {f"{size} GB": f"one GPU of {size} GB" for size in (24, 40, 80)}
ROWS["eight of 80 GB"] = "8 x 80 GB"


def largest(name, launches, rank):
    """Return the largest size that fits by one of some launches, its flags for vLLM, and its Run.

    Return None if no size fits.
    """
    for size in reversed(SHAPES):
        for gpu_memory, file, numbers in launches:
            run = launch(name, size, gpu_memory, file, rank=rank, **numbers)
            if (solved := plan.with_engine_fraction(run)) is not None:
                return size, *solved
    return None


def largest_of(words):
    """For GRPO, PPO, and both with adapters, by the launches that begin so."""
    launches = [LAUNCHES[each] for each in LAUNCHES if each.startswith(words)]
    columns = itertools.product((0, 16), ("grpo_vllm_async", "ppo_vllm_async"))
    return [largest(name, launches, rank) for rank, name in columns]


def cell(size, shares, run):
    needed = f"{plan.learner_needs(run) / plan.GIB:.0f}"
    return f"{size} ({', '.join([needed, *(f'at {share:g}' for share in shares.values())])})"


def main():
    columns = "GRPO | PPO | GRPO, adapters | PPO, adapters |"
    print(f"The largest:\n\n| GPUs | {columns}\n|---|---|---|---|---|")
    for row, words in ROWS.items():
        print(
            f"| {row} | {' | '.join(found[0] if found else '-' for found in largest_of(words))} |"
        )
    print(f"\nBy launch:\n\n| GPUs | a learner has | {columns}\n|---|---|---|---|---|---|")
    for words, (gpu_memory, file, numbers) in LAUNCHES.items():
        run = launch("grpo_vllm_async", "0.6", gpu_memory, file, **numbers)
        cells = [cell(*found) if found else "-" for found in largest_of(words)]
        room = plan.learner_room(run) / plan.GIB
        print(f"| {words} | {room:.0f} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
