"""python lagging.py LAG SCRIPT ...: saving_batches.py with vLLM so many training steps behind.

The weights that it keeps are the learner's, by their versions; it looks before lag.py does.
"""

import sys
from pathlib import Path

sys.path.extend(str(folder) for folder in Path(__file__).resolve().parents[1:3])
sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts" / "benchmark"))

from lag import give_old_weights

from helpers.saving_batches import run_as_main, save_batches, watched

if __name__ == "__main__":  # vLLM's processes import this file too
    lag = int(sys.argv.pop(1))
    module = watched(sys.argv.pop(1))
    give_old_weights(module, lag, noise=0.0)
    save_batches(module)
    run_as_main(module)
