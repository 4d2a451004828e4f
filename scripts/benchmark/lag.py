"""What old weights in the sampler cost: a run in turns whose vLLM is k training steps behind.

    python scripts/benchmark/lag.py --lag 4 --correction none
    python scripts/benchmark/lag.py --task ppo --lag 16 --rate 8e-4 --seed 2

A run is a cell, a minute on two cores. What docs/lag.jsonl says of the same cell is printed beside
it: the share of held-out prompts that the last policy answers right, and means over the steps of
mismatch/ess and mismatch/kl.

Lag. The scripts run as they are, with --no-async_mode; VLLM.sync_weights is wrapped. Batch g is
sampled by version max(0, g - 1 - lag). The engine is told the version that it really has, so
policy/staleness and eval/policy_version are true, and check_sampler compares what has equal
weights: batch 1, and with lag 0 every batch. Lag 0 is the script in turns to the bit, and lag 1 is
the script with --async_mode (tests/programs/test_lag.py). The sync after the last step, for the
last evaluation alone, gives the last version.

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


def give_old_weights(script, lag):
    """Has script.VLLM.sync_weights give the engine the weights of `lag` versions ago.

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
            given = version
        for old in [old for old in kept if old < given]:
            del kept[old]
        sync_weights(self, kept[given].items(), given)

    script.VLLM.sync_weights = sync_old_weights


def run_cell(task, lag, correction, rate, seed):
    """Runs a cell; returns its figures and its rate: with None the task's command has it."""
    words = [*debug_command(task), *flags_of(DEBUG)]
    rate = rate or float(words[words.index("--learning_rate") + 1])
    words += flags_of({"learning_rate": rate, "seed": seed} | CORRECTIONS[correction])
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        metrics, _ = run([__file__, "--run", str(lag), *words], folder)
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
        lag, script, *flags = sys.argv[2:]
        flags.append("--no-async_mode")
        call_main(REPO / script, flags, lambda script: give_old_weights(script, int(lag)))
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--task", choices=["grpo", "ppo"], default="grpo")
    add("--lag", type=int, default=0, help="of the sampler, in steps")
    add("--correction", choices=CORRECTIONS, default="truncate")
    add("--rate", type=float, help="learning rate; default: the task's own")
    add("--seed", type=int, default=1)
    cell = vars(parser.parse_args())
    make_debug_assets()
    figures = run_cell(**cell)
    cell["rate"] = figures["rate"]
    print(", ".join(f"{name} {value}" for name, value in cell.items()))
    print(f"here: {describe(figures)}")
    for recorded in read_lines(RECORDED):
        if cell.items() <= recorded.items() and not recorded["noise"]:
            print(f"docs/lag.jsonl: {describe(recorded)}")


if __name__ == "__main__":  # vLLM's processes import this file too
    main()
