"""Whether responses keep their length where nothing rewards another one: ppo_sync.py with a reward
of 1 for everything.

    python scripts/benchmark/constant_reward.py
    python scripts/benchmark/constant_reward.py --lam 0.95 --learning_rate 1e-3 --seeds 1

A random model of 0.5 M parameters, responses of at most 64 tokens, 512 in a step, one update a
step, and no warm-up of the value model, whose head is zeros. The mean length of a batch of 512
scatters by about 5%.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent.parent
REWARD = """
def one(data_source, response, ground_truth, extra_info=None):
    return 1.0
"""


def make_model(folder, seed):
    """A random model with the debug task's tokenizer."""
    sys.path.insert(0, str(REPO / "scripts" / "dev"))
    import make_debug_assets
    import torch

    torch.manual_seed(seed)
    tokenizer = make_debug_assets.make_tokenizer()
    model = make_debug_assets.make_model(tokenizer, {"hidden_size": 128, "num_layers": 2})
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def lengths(seed, lam, learning_rate, steps):
    """The mean length of each step's responses."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "model", seed)
        (folder / "reward.py").write_text(REWARD, "utf-8")
        flags = {
            "dataset": REPO / "debug_assets/train.parquet",
            "model_name_or_path": folder / "model",
            "dtype": "float32",
            "response_length": 64,
            "total_episodes": 512 * steps,
            "local_rollout_batch_size": 512,
            "local_mini_batch_size": 512,
            "per_device_train_batch_size": 128,
            "learning_rate": learning_rate,
            "lr_scheduler_type": "constant",
            "lam": lam,
            "reward_fn": f"{folder / 'reward.py'}:one",
            "seed": seed,
            "output_dir": folder,
            "run_name": "run",
        }
        command = [sys.executable, REPO / "ppo_sync.py", "--no-gradient_checkpointing"]
        command += [str(word) for flag, value in flags.items() for word in (f"--{flag}", value)]
        run = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            env=os.environ | {"OMP_NUM_THREADS": "1"},  # as `accelerate launch` sets it
        )
        if run.returncode:
            sys.exit(run.stdout)
        lines = (folder / "run/metrics.jsonl").read_text("utf-8").splitlines()
        return [json.loads(line)["objective/sequence_lengths"] for line in lines]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--lam", type=float, nargs="+", default=[1.0, 0.95])
    parser.add_argument("--learning_rate", type=float, nargs="+", default=[1e-4, 1e-3])
    parser.add_argument("--steps", type=int, default=25)
    args = parser.parse_args()
    for lam in args.lam:
        for learning_rate in args.learning_rate:
            for seed in args.seeds:
                found = lengths(seed, lam, learning_rate, args.steps)
                print(
                    f"lam {lam:g}, learning rate {learning_rate:g}, seed {seed}: "
                    f"{found[0]:.1f} tokens in step 1, {found[-1]:.1f} in step {args.steps}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
