"""Runs a script on several ranks or nodes and writes its batches: on_ranks.py SCRIPT [its flags].

As saving_batches.py; the folders of each engine are printed besides.
"""

import importlib
import sys
from pathlib import Path

sys.path.extend(str(folder) for folder in Path(__file__).resolve().parents[1:3])

from helpers import async_hooks, hooks
from helpers.saving_batches import save_batches


def main():
    script = importlib.import_module(Path(sys.argv.pop(1)).stem)
    hooks.after_engine_start(
        script, lambda vllm: print("Folders of vLLM:", vllm.folder, flush=True)
    )
    save_batches(script)
    async_hooks.run_as_main(script)


if __name__ == "__main__":  # vLLM's processes import this file too
    main()
