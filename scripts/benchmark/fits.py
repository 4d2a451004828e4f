"""Print the tables of docs/memory.md: which model fits on which GPUs, by resource_plan.py.

    python scripts/benchmark/fits.py

docs/memory.md explains a cell. The first table has the largest model of all launches on such GPUs.
vLLM must have room for 8 responses at once. The figures are computed, not measured, for the shapes
of Qwen3 and Qwen2.5, prompts of 512 tokens, responses of 1,024, and otherwise the defaults.
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
COLOCATED, SEPARATE = {"learners": 8}, {"learners": 6, "vllm_gpus": (6, 7)}
TWO_NODES = {"nodes": 2}
LAUNCHES = {  # memory of a GPU in GB, accelerate's file, and further arguments of launch
    "one GPU of 24 GB, colocated": (24, "one_gpu.yaml", {}),
    "one GPU of 40 GB, colocated": (40, "one_gpu.yaml", {}),
    "one GPU of 80 GB, colocated": (80, "one_gpu.yaml", {}),
    "8 x 80 GB, DDP, colocated": (80, "ddp.yaml", COLOCATED),
    "8 x 80 GB, DDP, 6 + 2 for vLLM": (80, "ddp.yaml", SEPARATE),
    "8 x 80 GB, FSDP2, colocated": (80, "fsdp2.yaml", COLOCATED),
    "8 x 80 GB, FSDP2, 6 + 2 for vLLM": (80, "fsdp2.yaml", SEPARATE),
    "16 x 80 GB, FSDP2, colocated": (80, "fsdp2_two_nodes.yaml", COLOCATED | TWO_NODES),
    "16 x 80 GB, FSDP2, 12 + 4 for vLLM": (80, "fsdp2_two_nodes.yaml", SEPARATE | TWO_NODES),
}
# The rows of the first table, with the beginning of their launches' names
ROWS = {
    "24 GB": "one GPU of 24 GB",
    "40 GB": "one GPU of 40 GB",
    "80 GB": "one GPU of 80 GB",
    "eight of 80 GB": "8 x 80 GB",
}


class Run(preflight.Run):
    """Replace the length of a run's longest row."""

    def max_length(self):
        return PROMPT + self.args.response_length


def launch(name, size, gpu_memory, file, nodes=1, learners=1, vllm_gpus=(), rank=0):
    """Return a Run of a model of this size, in billions of parameters.

    `learners` and `vllm_gpus` are those of a node. With a rank, the script's fork trains adapters.
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


def largest(name, launches, rank):
    """Return the largest size that fits, the flags for vLLM's fraction of a GPU, and the Run.

    Return None if no size fits with any of the launches.
    """
    for size in reversed(SHAPES):
        for gpu_memory, file, arguments in launches:
            run = launch(name, size, gpu_memory, file, rank=rank, **arguments)
            if (flags_and_run := plan.with_engine_fraction(run)) is not None:
                return size, *flags_and_run
    return None


def largest_by_column(beginning):
    """Return `largest` for each column, for the launches whose names begin like this."""
    launches = [LAUNCHES[name] for name in LAUNCHES if name.startswith(beginning)]
    columns = itertools.product((0, 16), ("grpo_vllm_async", "ppo_vllm_async"))
    return [largest(name, launches, rank) for rank, name in columns]


def cell(size, flags, run):
    needed = f"{plan.learner_needs(run) / plan.GIB:.0f}"
    return f"{size} ({', '.join([needed, *(f'at {share:g}' for share in flags.values())])})"


def main():
    columns = "GRPO | PPO | GRPO, adapters | PPO, adapters"
    print(f"The largest:\n\n| GPUs | {columns} |\n|---|---|---|---|---|")
    for row, beginning in ROWS.items():
        sizes = [found[0] if found else "-" for found in largest_by_column(beginning)]
        print(f"| {row} | {' | '.join(sizes)} |")
    print(f"\nBy launch:\n\n| GPUs | a learner has | {columns} |\n|---|---|---|---|---|---|")
    for name, (gpu_memory, file, arguments) in LAUNCHES.items():
        run = launch("grpo_vllm_async", "0.6", gpu_memory, file, **arguments)
        cells = [cell(*found) if found else "-" for found in largest_by_column(name)]
        room = plan.learner_room(run) / plan.GIB
        print(f"| {name} | {room:.0f} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
