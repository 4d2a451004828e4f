"""Writes the gradient of one optimizer batch on made-up data, from as many ranks as the launcher starts.

python two_rank_gradient.py OUT.pt MICRO_BATCH_SIZE
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from accelerate import Accelerator
from rollouts import gradients, make_rollout, tiny_args, tiny_policy, tiny_value_model

import ppo_sync


def main():
    path, size = sys.argv[1], int(sys.argv[2])
    accelerator = Accelerator(cpu=True)
    batch = make_rollout()
    policy, value_model = (accelerator.prepare(m) for m in (tiny_policy().double(), tiny_value_model().double()))
    args = tiny_args(per_device_train_batch_size=size, world_size=accelerator.num_processes)
    vector, sums = gradients(accelerator, policy, value_model, batch, args)
    totals = accelerator.reduce(torch.tensor(list(sums.values()), dtype=torch.float64))

    # What each rank computes of the whole batch, put together.
    micro_batches = ppo_sync.deal_rows(range(8), batch["lengths"], size, args.world_size)[accelerator.process_index]
    model = accelerator.unwrap_model(policy)
    logprobs = ppo_sync.forward_batch(
        accelerator, lambda i, width: ppo_sync.policy_forward(model, i, width, 1.0)[0], micro_batches, batch, args
    )
    if accelerator.is_main_process:
        result = {"gradient": vector, "sums": dict(zip(sums, totals.tolist(), strict=True)), "logprobs": logprobs}
        torch.save(result | {"ranks": accelerator.num_processes}, path)
    accelerator.wait_for_everyone()
    os._exit(0)  # gloo's threads can hang a rank that ends a moment after the other


if __name__ == "__main__":
    main()
