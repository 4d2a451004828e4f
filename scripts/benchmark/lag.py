"""What old weights in the sampler cost: a run in turns whose vLLM is k training steps behind.

    python scripts/benchmark/lag.py --lag 4 --correction none
    python scripts/benchmark/lag.py --lag 16 --rate 1e-3 --correction sequence --seed 2
    python scripts/benchmark/lag.py --task ppo --noise 0.01

A run is a cell, a minute on two cores. docs/lag.jsonl has 251 of them; what it says of this one is
printed beside it. The cell's line is added to output/lag.jsonl.

Lag. The scripts run as they are, with --no-async_mode; VLLM.sync_weights is wrapped. Batch g is
sampled by version max(0, g - 1 - lag): from step lag + 1 on the sampler is exactly `lag` steps
behind. The engine is told the version that it really has. So policy/staleness and
eval/policy_version are true, and check_sampler compares what has equal weights: batch 1, and with
lag 0 every batch. Lag 0 is the script in turns to the bit, and lag 1 is the script with
--async_mode to the bit (tests/programs/test_lag.py).

Noise. Each weight of the sampler is multiplied by 1 + noise * z, z standard normal; rounding to
bfloat16 changes it by up to 0.4%. That is an error of the engine which has nothing to do with age.
A version has one noise, however often the engine gets it. check_sampler and check_draws are off.

Evaluations are answered by the weights that the engine has, and count for their version. The sync
after the last step is for the last evaluation alone, as it is with --async_mode: it gives the last
version, without lag or noise. So the final rate is that of the policy that was trained, after
equally many steps in all arms. In between, versions are seen `lag` steps late, so the steps to 90%
are an interval: of the versions that were evaluated, the last one below and the first one that is
not.

Tasks: grpo and ppo are 40 steps of the debug commands, with an evaluation every second step. So
lag 0 of grpo is what this command does, and lag 1 is the same without --no-async_mode:

    bash scripts/train/debug/grpo.sh --total_episodes 20480 --num_evals 20 --no-async_mode

--rate is the policy's learning rate; a value model keeps its own. The highest with which lag 0
learns are 2e-3 for grpo and 8e-4 for ppo.

Corrections: none is --tis_cap 0, truncate is --tis_cap 2, as by default; sequence is
--mismatch_mask sequence on top of that. docs/lag.jsonl has a fourth, token, a mask of single
tokens, which was an option of the scripts once.

A line has a cell's settings, the final held-out rate, the steps to 90%, means over the steps of the
effective sample size (ess, mismatch/ess) and of the KL of the sampler to the learner (kl,
mismatch/kl), every evaluation as [version, rate, score], and ess and KL of each step. A rate is the
share of right answers.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

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
RIGHT = 0.9  # of held-out prompts, which is to be reached
RECORDED, RESULTS = REPO / "docs/lag.jsonl", REPO / "output/lag.jsonl"


# -------------------------------------------------------------------------- in the run's process


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


# ----------------------------------------------------------------------------------------- a cell


def command_of(task):
    """Script and flags of a task, but for the settings of a cell.

    >>> words = command_of("grpo")
    >>> float(words[words.index("--learning_rate") + 1])
    0.0005
    """
    return [*debug_command(task), *flags_of(DEBUG)]


def steps_to(share, evaluations):
    """The last version below a share of right answers, and the first that is not; None: none is.

    evaluations: [version, rate, score] of each, in order.

    >>> steps_to(0.9, [[0, 0.5, 0], [2, 0.8, 0], [8, 0.93, 0], [10, 0.89, 0]])
    [2, 8]
    >>> steps_to(0.9, [[0, 0.5, 0], [2, 0.8, 0]])
    """
    below = 0
    for version, rate, _ in evaluations:
        if rate >= share:
            return [below, version]
        below = version
    return None


def figures_of(metrics):
    """What a line of results says of a run, by the lines of its metrics.jsonl."""
    evaluations = {}  # by version, of which one may be evaluated several times, alike
    for line in metrics:
        if "eval/policy_version" in line:
            rate, score = line["eval/verifiable_correct_rate"], line["eval/scores"]
            evaluations[int(line["eval/policy_version"])] = rounded(rate), rounded(score)
    evaluations = [[version, *found] for version, found in sorted(evaluations.items())]
    ess, kl = ([line[name] for line in metrics] for name in ("mismatch/ess", "mismatch/kl"))
    return {
        "final": evaluations[-1][1],
        "steps_to_90": steps_to(RIGHT, evaluations),
        "ess": rounded(statistics.fmean(ess)),
        "kl": rounded(statistics.fmean(kl)),
        "evaluations": evaluations,
        "ess_of_steps": [rounded(value) for value in ess],
        "kl_of_steps": [rounded(value) for value in kl],
    }


def run_cell(task, lag, correction, rate, noise, seed):
    """Runs a cell; returns its line of results. With a rate of None the task's command has it."""
    words = command_of(task)
    if rate is None:
        rate = float(words[words.index("--learning_rate") + 1])
    settings = {"learning_rate": rate, "seed": seed} | CORRECTIONS[correction]
    cell = {"task": task, "lag": lag, "correction": correction, "rate": rate, "noise": noise}
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        given = [__file__, "--run", str(lag), str(noise), *words, *flags_of(settings)]
        metrics, _ = run(given, folder)
        args = json.loads(Path(folder, "run/args.json").read_bytes())
    for version, line in enumerate(metrics):
        assert line["policy/staleness"] == min(lag, version), f"version {version}"
    seconds, commit = round(time.monotonic() - start), args["provenance"]["commit"]
    figures = figures_of(metrics) | {"seconds": seconds, "commit": commit}
    return cell | {"seed": seed, "flags": []} | figures


def describe(line):
    """A line of results, in short."""
    reached = "90% never seen"
    if line["steps_to_90"]:
        reached = "90% after {} to {} steps".format(*line["steps_to_90"])
    return (
        f"{line['final']:.1%} right at the end, {reached}, ess {line['ess']:.3f}, "
        f"KL {line['kl']:.2g}, {line['seconds']} s"
    )


def main():
    if sys.argv[1:2] == ["--run"]:
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
    line = run_cell(**cell)
    RESULTS.parent.mkdir(exist_ok=True)
    with open(RESULTS, "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    cell["rate"] = line["rate"]
    print(", ".join(f"{name} {value}" for name, value in cell.items()))
    print(f"here: {describe(line)}")
    for recorded in read_lines(RECORDED):
        if cell.items() <= recorded.items():
            print(f"docs/lag.jsonl: {describe(recorded)}")


if __name__ == "__main__":  # vLLM's processes import this file too
    main()
