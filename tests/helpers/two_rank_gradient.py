"""Writes the gradient of a reward model's optimizer batch, from as many ranks as there are.

python two_rank_gradient.py reward_model OUT.pt MICRO_BATCH_SIZE

OUT.pt is a dict: the gradient, the sums over the batch, the scores of five pairs ("forward"), and
the number of ranks.
"""

import os
import sys
from pathlib import Path

sys.path.extend(str(folder) for folder in Path(__file__).resolve().parents[1:3])
sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))

import torch
from accelerate import Accelerator

from helpers import preference_pairs


def main():
    _, path, size = sys.argv[1:]
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(preference_pairs.tiny_reward_model())
    gradient, sums = preference_pairs.gradient_and_sums(accelerator, model, int(size))
    # An odd number: one rank has a pair more
    args = preference_pairs.tiny_args(per_device_train_batch_size=2)
    pairs = preference_pairs.make_pairs()[:5]
    scores = preference_pairs.rm.score_all(accelerator, model, pairs, args)
    if accelerator.is_main_process:
        result = {"gradient": gradient, "sums": sums, "forward": scores}
        torch.save(result | {"ranks": accelerator.num_processes}, path)
    accelerator.wait_for_everyone()
    os._exit(0)  # gloo's threads can hang a rank that ends a moment after the other


if __name__ == "__main__":
    main()
