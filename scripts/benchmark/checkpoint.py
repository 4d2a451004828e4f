"""What a checkpoint costs: its seconds and bytes, against the least that it must write.

    python scripts/benchmark/checkpoint.py --model_name_or_path HuggingFaceTB/SmolLM2-135M

Policy and value model of PPO are built from the model, with AdamW's moments as after an update, and
saved three times by the script's own function, with the batch that is in flight. The least is the
weights and both moments in float32, each tensor written once, one after the other, to the disk that
the checkpoint is on. Both wait until the disk has all (fsync).
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))

import torch
import transformers
from accelerate import Accelerator
from transformers import AutoModelForCausalLM

import ppo_vllm_async as script

TIMES = 3


def make_rollout(episodes=64, length=256):
    """A rollout of made-up responses, to no prompts."""
    answers = script.Answers(
        responses=[[7] * length] * episodes,
        sampler_logprobs=[[-1.2345678901] * length] * episodes,
        texts=["word" * length] * episodes,
        verifiable=[1.0] * episodes,
        failures=[None] * episodes,
    )
    nothing = script.Answers([], [], [], [], [])
    return script.Rollout(script.Request(1, [], [], [], []), 0, answers, nothing, times={})


def write_tensors(models, optimizers, path):
    """Writes weights and moments, and nothing else. Returns the bytes."""
    with open(path, "wb") as file:
        for model, optimizer in zip(models, optimizers, strict=True):
            for parameter in model.parameters():
                moments = optimizer.state[parameter]
                for tensor in (parameter.detach(), moments["exp_avg"], moments["exp_avg_sq"]):
                    file.write(tensor.cpu().numpy())
        file.flush()
        os.fsync(file.fileno())
        return file.tell()


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model_name_or_path", required=True)
    parser.add_argument("--output_dir", default="output", help="on the disk that is measured")
    given = parser.parse_args()
    args = script.Args(
        model_name_or_path=given.model_name_or_path, dtype="float32", keep_last_n=1, save_freq=1
    )
    transformers.utils.logging.set_verbosity_error()  # the value head is new, as it should be
    accelerator = Accelerator()
    model, _ = script.load_model(AutoModelForCausalLM, args.model_name_or_path, args, trained=True)
    models = [script.PolicyModel(model, 1.0), script.load_value_model(args)]
    optimizers = []
    for i, model in enumerate(models):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 1e-3)
        models[i], optimizer = accelerator.prepare(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        optimizers.append(optimizer)
    script.use_plain_names(accelerator)
    parameters = sum(p.numel() for model in models for p in model.parameters())
    print(f"{parameters / 1e6:.1f} million parameters of policy and value model")

    os.makedirs(given.output_dir, exist_ok=True)
    rollout = script.pack_rollout(make_rollout(), args)
    seconds = {"least": [], "save": [], "load": []}
    with tempfile.TemporaryDirectory(dir=given.output_dir) as folder:
        for step in range(1, TIMES + 1):
            start = time.perf_counter()
            least = write_tensors(models, optimizers, Path(folder, "least"))
            seconds["least"].append(time.perf_counter() - start)

            state = script.RunState(completed_steps=step, beta=0.0, seconds=0.0, wandb_id=None)
            start = time.perf_counter()
            size = script.save_checkpoint(accelerator, None, Path(folder), state, rollout, args)
            seconds["save"].append(time.perf_counter() - start)

            args.resume_from_checkpoint = str(Path(folder, "checkpoints", f"step_{step}"))
            start = time.perf_counter()
            script.load_checkpoint(accelerator, None, args)
            seconds["load"].append(time.perf_counter() - start)
    for name, values in seconds.items():
        print(f"{name:6} {', '.join(f'{value:.2f}' for value in values)} s")
    print(f"bytes: {size:,} of a checkpoint, {least:,} at least, {size / least:.4f} times")
    ratios = [save / low for save, low in zip(seconds["save"], seconds["least"], strict=True)]
    print(f"seconds: {', '.join(f'{ratio:.2f}' for ratio in ratios)} times the least")


if __name__ == "__main__":
    main()
