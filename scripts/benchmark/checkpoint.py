"""What a checkpoint costs: its seconds and bytes, against the least that it must write.

    python scripts/benchmark/checkpoint.py --model_name_or_path HuggingFaceTB/SmolLM2-135M

Policy and value model of PPO are built from the model, with AdamW's moments as after an update, and
saved three times by the script's own functions, with the batch that is in flight. The least is the
weights and both moments in float32, each tensor written once, one after the other, to the same
disk. That waits until the disk has all (fsync); the checkpoint does not.
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
    response = script.Response(
        prompt=None,
        token_ids=[7] * length,
        logprobs=[-1.2345678] * length,
        stopped=True,
        text="word" * length,
        verifiable=1.0,
    )
    return script.Rollout(0, [response] * episodes, [], times={})


def write_tensors(trained_models, path):
    """Writes weights and moments, and nothing else. Returns the bytes."""
    with open(path, "wb") as file:
        for model, optimizer in trained_models.values():
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
    parser.add_argument("--model_name_or_path", type=os.path.expanduser, required=True)
    parser.add_argument("--output_dir", default="output", help="on the disk that is measured")
    given = parser.parse_args()
    given.output_dir = os.path.expanduser(given.output_dir)
    args = script.Args(
        model_name_or_path=given.model_name_or_path, dtype="float32", keep_last_n=1, save_freq=1
    )
    transformers.utils.logging.set_verbosity_error()  # the value head is new, as it should be
    accelerator = Accelerator()
    path = args.model_name_or_path
    model = script.load_model(AutoModelForCausalLM, path, args, trained=True)
    models = {
        "policy": script.place_model(accelerator, script.PolicyModel(model, args), args),
        "value_model": script.load_classifier(accelerator, path, args, trained=True),
    }
    trained_models = {}
    for name, model in models.items():
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 1e-3)
        optimizer.step()
        optimizer.zero_grad()
        trained_models[name] = (model, optimizer)
    parameters = sum(p.numel() for model in models.values() for p in model.parameters())
    print(f"{parameters / 1e6:.1f} million parameters of policy and value model")

    os.makedirs(given.output_dir, exist_ok=True)
    rollout = make_rollout()
    seconds = {"least": [], "save": [], "load": []}
    with tempfile.TemporaryDirectory(dir=given.output_dir) as folder:
        for step in range(1, TIMES + 1):
            start = time.perf_counter()
            least = write_tensors(trained_models, Path(folder, "least"))
            seconds["least"].append(time.perf_counter() - start)

            start = time.perf_counter()
            state = {"seconds": 0.0, "wandb_id": "", "policy_version": 0}
            state["rollout"] = script.pack_rollout(rollout)
            script.save_checkpoint(accelerator, trained_models, Path(folder), step, state, args)
            seconds["save"].append(time.perf_counter() - start)

            checkpoint_dir = Path(folder, "checkpoints", f"step_{step}")
            files = [path for path in checkpoint_dir.rglob("*") if path.is_file()]
            size = sum(path.stat().st_size for path in files)
            start = time.perf_counter()
            script.load_checkpoint(trained_models, checkpoint_dir)
            seconds["load"].append(time.perf_counter() - start)
    for name, values in seconds.items():
        print(f"{name:6} {', '.join(f'{value:.2f}' for value in values)} s")
    print(f"bytes: {size:,} of a checkpoint, {least:,} at least, {size / least:.4f} times")
    ratios = [save / low for save, low in zip(seconds["save"], seconds["least"], strict=True)]
    print(f"seconds: {', '.join(f'{ratio:.2f}' for ratio in ratios)} times the least")


if __name__ == "__main__":
    main()
