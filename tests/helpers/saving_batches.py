"""python saving_batches.py SCRIPT ...: a script that writes its batches into its folder."""

import importlib
import itertools
import json
import os
import sys
from pathlib import Path

sys.path.extend(str(folder) for folder in Path(__file__).resolve().parents[1:3])

import torch

from helpers import async_hooks, hooks


def run_dir_of(args):
    return Path(args.output_dir) / args.run_name


def save_batches(script):
    """Has a script's module write each complete batch, and the rows of each optimizer batch."""
    steps = itertools.count(1)

    def save_rows(rows, accelerator, args):
        if accelerator.is_main_process:
            with open(run_dir_of(args) / "mini_batches.jsonl", "a") as file:
                file.write(json.dumps(rows) + "\n")

    def save_batch(batch, args):
        step = next(steps)
        if os.environ.get("RANK", "0") == "0":
            folder = run_dir_of(args) / "batches"
            folder.mkdir(exist_ok=True)
            torch.save(vars(batch), folder / f"step_{step:06d}.pt")

    hooks.before_update(script, save_rows)
    hooks.with_each_batch(script, save_batch)


if __name__ == "__main__":  # vLLM's processes import this file too
    name = sys.argv.pop(1)
    module = importlib.import_module(Path(name).stem)
    save_batches(module)
    async_hooks.run_as_main(module)
