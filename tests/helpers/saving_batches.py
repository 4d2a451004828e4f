"""python saving_batches.py SCRIPT ...: a script that writes its batches into its folder.

Beside them it keeps the weights that it sends to vLLM, and it sees to it that vLLM has one call at
a time to answer.
"""

import importlib
import os
import sys
from pathlib import Path

sys.path.extend(str(folder) for folder in Path(__file__).resolve().parents[1:3])

import torch

from helpers import fsdp2
from helpers.hooks import around, before

calls = []  # of vLLM's process, as Futures


def is_idle():
    return all(call.done() for call in calls)


def watched(name):
    """The module of a script whose threads may not call vLLM before it has answered the last call.

    With STUB set it takes whatever log-probabilities vLLM gives: stub_vllm's are nonsense. With
    FSDP2 set its models are sharded. Pictures are drawn at the end alone: each costs two seconds.
    """
    if "FSDP2" in os.environ:
        fsdp2.allow_on_cpu()
    sys.path.append(str(Path(name).parent))  # of a fork
    script = importlib.import_module(Path(name).stem)

    def submit(call, given):
        assert is_idle(), f"{given['function']} is sent to vLLM while it is in use"
        calls.append(call())
        return calls[-1]

    def with_a_small_cache(call, given):
        """A GiB, the default on CPUs, takes two seconds to touch."""
        environment, options = call()
        environment.pop("VLLM_CPU_KVCACHE_SPACE", None)
        return environment, options | {"kv_cache_memory_bytes": 2**27}

    def start(call, given):
        call()
        print("Folders of vLLM:", given["self"].folder, flush=True)

    around(script, "run_program", lambda call, given: given["name"].startswith("plot_") or call())
    around(script, "vllm_settings", with_a_small_cache)
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
    """Does what `python SCRIPT` does."""
    args = script.tyro.cli(script.Args)
    try:
        script.main(args)
    except BaseException as error:
        script.end_at_once(error)


if __name__ == "__main__":  # vLLM's processes import this file too
    module = watched(sys.argv.pop(1))
    save_batches(module)
    run_as_main(module)
