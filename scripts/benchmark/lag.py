"""What old weights in the sampler cost: a run in turns whose vLLM is k training steps behind.

    python scripts/benchmark/lag.py --lag 4 --correction none
    python scripts/benchmark/lag.py --task ppo --lag 16 --rate 8e-4 --seed 2
    python scripts/benchmark/lag.py --noise 0.01

A run is a cell, a minute on two cores. What docs/lag.jsonl says of the same cell is printed beside
it: the share of held-out prompts that the last policy answers right, and means over the steps of
mismatch/ess and mismatch/kl.

Lag. The scripts run as they are, with --no-async_mode; VLLM.sync_weights is wrapped. Batch g is
sampled by version max(0, g - 1 - lag). The engine is told the version that it really has, so
policy/staleness and eval/policy_version are true, and check_sampler compares what has equal
weights: batch 1, and with lag 0 every batch. Lag 0 is the script in turns to the bit, and lag 1 is
the script with --async_mode (tests/programs/test_lag.py). The sync after the last step, for the
last evaluation alone, gives the last version, without lag or noise.

Noise. Each weight of the sampler is multiplied by 1 + noise * z, z standard normal: an error of the
engine which has nothing to do with age. A version has one noise. check_sampler and check_draws are
off.

Tasks are 40 steps of the debug commands. --rate is the policy's learning rate; a value model keeps
its own. Corrections: none is --tis_cap 0, truncate is --tis_cap 2, as by default; sequence is
--mismatch_mask sequence on top of that.
"""

import argparse
import statistics
import sys
import tempfile
import time

from run import (
    REPO,
    call_main,
    debug_command,
    flags_of,
    make_debug_assets,
    read_lines,
    rounded,
    run,
)

DEBUG = {"total_episodes": 40 * 512, "num_evals": 20}
CORRECTIONS = {
    "none": {"tis_cap": 0.0, "mismatch_mask": "none"},
    "truncate": {"tis_cap": 2.0, "mismatch_mask": "none"},
    "sequence": {"tis_cap": 2.0, "mismatch_mask": "sequence"},
}
RECORDED = REPO / "docs/lag.jsonl"


def with_noise(weights, noise, seed):
    """{name: tensor}, each number times 1 + noise * z, with z standard normal by the seed."""
    import torch

    if noise == 0:
        return weights
    generator = torch.Generator().manual_seed(seed)
    noisy = {}
    for name, weight in weights.items():
        z = torch.randn(weight.shape, generator=generator).to(weight.device)
        noisy[name] = (weight * (1 + noise * z)).to(weight.dtype)
    return noisy


def give_old_weights(script, lag, noise):
    """Has script.VLLM.sync_weights give the engine the weights of `lag` versions ago, with noise.

    As long as there is no version so old, version 0; the last version as it is. The engine is told
    the version that it gets.
    """
    sync_weights = script.VLLM.sync_weights
    kept = {}  # {version: {name: tensor}}, of the last lag + 1 versions

    def sync_old_weights(self, weights, version):
        # The learner's own, which it will change
        kept[version] = {name: weight.clone() for name, weight in weights}
        given = max(0, version - lag)
        if version == self.args.num_training_steps:
            sync_weights(self, kept[version].items(), version)
            return
        for old in [old for old in kept if old < given]:
            del kept[old]
        seed = script.stable_hash(self.args.seed, "noise", given)
        sync_weights(self, with_noise(kept[given], noise, seed).items(), given)

    script.VLLM.sync_weights = sync_old_weights
    if noise > 0:
        script.check_sampler = script.check_draws = lambda *_, **__: 0.0


def run_cell(task, lag, correction, rate, noise, seed):
    """Runs a cell; returns its figures and its rate: with None the task's command has it."""
    words = [*debug_command(task), *flags_of(DEBUG)]
    rate = rate or float(words[words.index("--learning_rate") + 1])
    words += flags_of({"learning_rate": rate, "seed": seed} | CORRECTIONS[correction])
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        metrics, _ = run([__file__, "--run", str(lag), str(noise), *words], folder)
    for version, line in enumerate(metrics):
        assert line["policy/staleness"] == min(lag, version), f"version {version}"
    rates = [line.get("eval/verifiable_correct_rate") for line in metrics]
    figures = {"rate": rate, "final": [value for value in rates if value is not None][-1]}
    for name in ("ess", "kl"):
        figures[name] = rounded(statistics.fmean(line[f"mismatch/{name}"] for line in metrics))
    return figures | {"seconds": round(time.monotonic() - start)}


def describe(figures):
    said = "{final:.1%} right at the end, ess {ess:.3f}, KL {kl:.2g}, {seconds} s"
    return said.format(**figures)


def main():
    if sys.argv[1:2] == ["--run"]:  # in the run's own process
        lag, noise, script, *flags = sys.argv[2:]
        flags.append("--no-async_mode")
        call_main(
            REPO / script, flags, lambda script: give_old_weights(script, int(lag), float(noise))
        )
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--task", choices=["grpo", "ppo"], default="grpo")
    add("--lag", type=int, default=0, help="of the sampler, in steps")
    add("--correction", choices=CORRECTIONS, default="truncate")
    add("--rate", type=float, help="learning rate; default: the task's own")
    add("--noise", type=float, default=0.0, help="on the sampler's weights: 0.01 is 1%%")
    add("--seed", type=int, default=1)
    cell = vars(parser.parse_args())
    make_debug_assets()
    figures = run_cell(**cell)
    cell["rate"] = figures["rate"]
    print(", ".join(f"{name} {value}" for name, value in cell.items()))
    print(f"here: {describe(figures)}")
    for recorded in read_lines(RECORDED):
        if cell.items() <= recorded.items():
            print(f"docs/lag.jsonl: {describe(recorded)}")


if __name__ == "__main__":  # vLLM's processes import this file too
    main()
