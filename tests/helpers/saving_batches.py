"""python saving_batches.py SCRIPT ...: run a script and keep its batches in the run's folder.

The weights that it sends to vLLM are kept, too, and vLLM must get one call at a time.
"""

import importlib
import os
import sys
from pathlib import Path

sys.path.extend(str(folder) for folder in Path(__file__).resolve().parents[1:3])

import torch

from helpers.hooks import around, before

calls = []  # Futures of the calls of vLLM's process


def is_idle():
    return all(call.done() for call in calls)


def watched(name):
    """Import a script whose threads must not call vLLM before it has answered the last call.

    With the variable STUB the script accepts any log-probabilities, because those of stub_vllm are
    made up.
    """
    sys.path.append(str(Path(name).parent))  # of a fork
    script = importlib.import_module(Path(name).stem)

    def submit(call, given):
        assert is_idle(), f"{given['function']} is sent to vLLM while it is in use"
        calls.append(call())
        return calls[-1]

    def start(call, given):
        call()
        print("Folders of vLLM:", given["self"].folder, flush=True)

    around(script.VLLM, "submit", submit)
    around(script.VLLM, "__init__", start)
    if "STUB" in os.environ:
        around(script, "check_sampler", lambda call, given: 0.0)
    return script


def save_batches(script):
    def save(folder, name, what, args):
        folder = Path(args.output_dir, args.run_name, folder)
        if script.is_rank_0():
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(what, folder / f"{name}.pt")

    def save_batch(given):
        args = given["args"]
        metrics = Path(args.output_dir, args.run_name, "metrics.jsonl")  # of the steps before
        step = 1 + (len(metrics.read_text().splitlines()) if metrics.exists() else 0)
        save("batches", step, vars(given["batch"]), args)

    def save_weights(given):
        given["weights"] = list(given["weights"])  # a generator, which can be read once
        save("versions", given["version"], dict(given["weights"]), given["self"].args)

    before(script, "batch_metrics", save_batch)
    before(script.VLLM, "sync_weights", save_weights)


def run_as_main(script):
    """Do what `python SCRIPT` does."""
    args = script.tyro.cli(script.Args)
    try:
        script.main(args)
    except BaseException as error:
        script.end_at_once(error)


if __name__ == "__main__":  # vLLM's processes import this file too
    module = watched(sys.argv.pop(1))
    save_batches(module)
    run_as_main(module)
