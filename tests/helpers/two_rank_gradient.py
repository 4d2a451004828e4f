"""Writes the gradient of one optimizer batch, from as many ranks as the launcher starts.

python two_rank_gradient.py {ppo,reward_model,storages} OUT.pt MICRO_BATCH_SIZE

OUT.pt is a dict: the gradient, the sums over the batch's tokens, what all ranks together compute of
the whole batch ("forward"), the number of ranks, and for PPO the scores of equal responses. Of
"storages" it has "updates": see there.
"""

import os
import sys
from pathlib import Path

sys.path.extend(str(folder) for folder in Path(__file__).resolve().parents[1:3])
sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import ppo_vllm_async as script
from helpers import preference_pairs, rollouts
from helpers.hooks import around


def ppos(accelerator, size):
    batch = rollouts.make_rollout()
    args = rollouts.tiny_args(per_device_train_batch_size=size)
    policy = script.place_model(accelerator, rollouts.tiny_policy().double(), args)
    value_model = script.place_model(accelerator, rollouts.tiny_value_model().double(), args)
    gradient, sums = rollouts.gradients(accelerator, (policy, value_model), batch, args)
    totals = accelerator.reduce(torch.tensor(list(sums.values()), dtype=torch.float64))
    inputs = batch.input_ids, batch.mask, batch.lengths
    reward_model = rollouts.tiny_value_model(seed=3)
    responses = rollouts.groups_of_equals()
    return {
        "gradient": gradient,
        "sums": dict(zip(sums, totals.tolist(), strict=True)),
        "forward": script.forward_all(accelerator, policy, [range(8)], *inputs, size, args),
        "scores": script.reward_model_scores(accelerator, reward_model, responses, args),
    }


def reward_models(accelerator, size):
    model = accelerator.prepare(preference_pairs.tiny_reward_model())
    gradient, sums = preference_pairs.gradient_and_sums(accelerator, model, size)
    # An odd number: one rank has a pair more
    args = preference_pairs.tiny_args(per_device_train_batch_size=2)
    pairs = preference_pairs.make_pairs()[:5]
    scores = preference_pairs.rm.score_all(accelerator, model, pairs, args)
    return {"gradient": gradient, "sums": sums, "forward": scores}


def storages(accelerator, size):
    """Where the policy's gradients are after each pass of four updates, and DDP's buckets.

    Both by addresses: [(those of the buckets that ranks exchanged, in this order, [those of the
    gradients, ...]), ...]
    """
    args = rollouts.tiny_args(per_device_train_batch_size=size)
    batch = rollouts.in_float32(rollouts.make_rollout())
    models = [
        script.place_model(accelerator, model, args)
        for model in (rollouts.tiny_policy(), rollouts.tiny_value_model())
    ]
    policy, _ = models
    optimizer = torch.optim.AdamW(policy.parameters())
    updates, buckets, in_passes = [], [], []

    def note_bucket(state, bucket):
        buckets.append(bucket.buffer().untyped_storage().data_ptr())
        return allreduce_hook(None, bucket)

    def note_pass(call, given):
        result = call()
        in_passes.append(
            {p.grad.untyped_storage().data_ptr() for p in policy.parameters() if p.grad is not None}
        )
        return result

    policy.register_comm_hook(None, note_bucket)
    around(torch.Tensor, "backward", note_pass)
    for _ in range(4):
        script.accumulate_gradients(accelerator, *models, batch, list(range(8)), True, args)
        script.apply_gradients(accelerator, policy, optimizer, 1e-3, batch, None, args)
        updates.append((list(buckets), list(in_passes)))
        buckets.clear()
        in_passes.clear()
    return {"updates": updates}


def main():
    subject, path, size = sys.argv[1:]
    in_buckets = DistributedDataParallelKwargs(gradient_as_bucket_view=True)  # as in main()
    accelerator = Accelerator(cpu=True, kwargs_handlers=[in_buckets])
    compute = {"ppo": ppos, "reward_model": reward_models, "storages": storages}[subject]
    result = compute(accelerator, int(size))
    if accelerator.is_main_process:
        torch.save({**result, "ranks": accelerator.num_processes}, path)
    accelerator.wait_for_everyone()
    os._exit(0)  # gloo's threads can hang a rank that ends a moment after the other


if __name__ == "__main__":
    main()
