"""Runs a script with other engines or with a fault: on_ranks.py SCRIPT [its flags].

The environment says what: ENGINES is how many each rank owns; with FAULT=raises the second update
of rank 1 raises; with STUB the engines are those of stub_vllm, whose samples are of no policy.
Batches are written as by saving_batches.py, the folders of each engine are printed.
"""

import importlib
import itertools
import os
import sys
from pathlib import Path

sys.path.extend(str(folder) for folder in Path(__file__).resolve().parents[1:3])

from helpers import hooks
from helpers.saving_batches import save_batches


def fail_on_rank_1(script):
    updates = itertools.count(1)

    def fail(rows, accelerator, args):
        if accelerator.process_index == 1 and next(updates) == 2:
            raise OSError("rank 1 is out of luck")

    hooks.before_update(script, fail)


def main():
    script = importlib.import_module(Path(sys.argv.pop(1)).stem)
    if "ENGINES" in os.environ:
        engines = [() for _ in range(int(os.environ["ENGINES"]))]
        script.place_engines = lambda *_, **__: engines
    if os.environ.get("FAULT") == "raises":
        fail_on_rank_1(script)
    if "STUB" in os.environ:
        script.check_sampler = lambda *_: None
    hooks.after_engine_start(
        script, lambda vllm: print("Folders of vLLM:", vllm.folder, vllm.temporary_folder)
    )
    save_batches(script)
    script.main()


if __name__ == "__main__":  # vLLM's processes import this file too
    main()
