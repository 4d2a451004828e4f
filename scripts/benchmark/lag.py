"""What old weights in the sampler cost: runs in turns whose vLLM is k training steps behind.

    python scripts/benchmark/lag.py --lags 4 --corrections none --seeds 1
    python scripts/benchmark/lag.py --lags 0 4 16 --rates 1e-3 --corrections truncate sequence
    python scripts/benchmark/lag.py --task ppo --lags 0 --noises 0.001 0.01 --seeds 1
    python scripts/benchmark/lag.py --task smollm2 --model PATH --lags 4 --corrections none

Each combination is a cell: a run, a minute on two cores (smollm2: fifteen). docs/lag.jsonl has 251
of them; its line is printed beside the new one, which is added to --results.

A script with its own flags, but for a lag of 4 and a noise of 0.1%:

    python scripts/benchmark/lag.py --run 4 0.001 grpo_vllm_async.py --dataset ...

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

smollm2 is scripts/train/smollm2/grpo.sh (--model: a folder, if not from the hub). --rates are the
policy's learning rates; a value model keeps its own. The highest with which lag 0 learns are 2e-3
for grpo and 8e-4 for ppo.

Corrections: none is --tis_cap 0, truncate is --tis_cap 2, as by default; sequence is
--mismatch_mask sequence on top of that. docs/lag.jsonl has a fourth, token, a mask of single
tokens, which was an option of the scripts once. Other flags go to the script, and make another
cell.

A line of --results is a cell: its settings, the final held-out rate, the steps to 90%, means over
the steps of the effective sample size (ess, mismatch/ess) and of the KL of the sampler to the
learner (kl, mismatch/kl), every evaluation as [version, rate, score], and ess and KL of each step.
A rate is the share of right answers; of smollm2, of those that meet all their constraints.
"""

import argparse
import itertools
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, fields
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
# Flags that are settings of a cell, or of where it runs
OWN_FLAGS = {"learning_rate", "seed", "tis_cap", "mismatch_mask", "async_mode", "no-async_mode"}
OWN_FLAGS |= {"output_dir", "run_name", "lora_rank", "resume_from_checkpoint"}
RIGHT = 0.9  # of held-out prompts, which is to be reached
RECORDED = REPO / "docs/lag.jsonl"


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


def change(script, lag, noise):
    """Gives the script old weights, and takes its pictures."""
    give_old_weights(script, lag, noise)
    run_program = script.run_program

    def run_provenance(program, *args):
        if program == "provenance.py":
            run_program(program, *args)

    script.run_program = run_provenance


# ----------------------------------------------------------------------------------------- cells


@dataclass(frozen=True)
class Cell:
    """The settings of a run."""

    task: str
    lag: int
    correction: str
    rate: float  # the policy's learning rate
    noise: float
    seed: int
    flags: tuple[str, ...]  # others, of the script

    def __str__(self):
        text = f"{self.task}, rate {self.rate:g}, lag {self.lag}, {self.correction}"
        if self.noise:
            text += f", noise {self.noise:g}"
        return " ".join([f"{text}, seed {self.seed}", *self.flags])


def cell_of(line):
    """The Cell of a line of results."""
    settings = {field.name: line[field.name] for field in fields(Cell)}
    return Cell(**settings | {"flags": tuple(line["flags"])})


def command_of(task, model):
    """Script and flags of a task, but for the settings of a cell."""
    if task != "smollm2":
        return [*debug_command(task), *flags_of(DEBUG)]
    text = (REPO / "scripts/train/smollm2/grpo.sh").read_text("utf-8")
    flags = shlex.split(re.search(r"^flags=\(\n(.*?)^\)", text, re.S | re.M)[1], comments=True)
    return ["grpo_vllm_async.py", "--model_name_or_path", model, *flags]


def own_rate(task, model):
    """The learning rate of a task's command.

    >>> own_rate("grpo", None), own_rate("smollm2", "model")
    (0.0005, 3e-05)
    """
    words = command_of(task, model)
    return float(words[words.index("--learning_rate") + 1])


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


def run_cell(cell, model):
    """Runs a cell; returns its line of results."""
    script, *flags = command_of(cell.task, model)
    settings = {"learning_rate": cell.rate, "seed": cell.seed} | CORRECTIONS[cell.correction]
    words = [__file__, "--run", str(cell.lag), str(cell.noise), script]
    words += [*flags, *cell.flags, *flags_of(settings)]
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        # As their commands have it
        metrics, _ = run(words, folder, threads=os.cpu_count() if cell.task == "smollm2" else 1)
        args = json.loads(Path(folder, "run/args.json").read_bytes())
    for version, line in enumerate(metrics):
        assert line["policy/staleness"] == min(cell.lag, version), f"version {version}"
    seconds, commit = round(time.monotonic() - start), args["provenance"]["commit"]
    return asdict(cell) | figures_of(metrics) | {"seconds": seconds, "commit": commit}


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
        if any(flag.startswith(("--lora_rank", "--resume_from")) for flag in flags):
            sys.exit("lag.py takes neither adapters nor a run that is resumed")
        flags.append("--no-async_mode")
        call_main(REPO / script, flags, lambda script: change(script, int(lag), float(noise)))
        return
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--task", choices=["grpo", "ppo", "smollm2"], default="grpo")
    add("--lags", type=int, nargs="+", default=[0, 1, 4, 16], help="of the sampler, in steps")
    add("--corrections", choices=CORRECTIONS, nargs="+", default=[*CORRECTIONS])
    add("--rates", type=float, nargs="+", help="learning rates; default: the task's own")
    noises = "on the sampler's weights: 0.01 is 1%%"
    add("--noises", type=float, nargs="+", default=[0.0], help=noises)
    add("--seeds", type=int, nargs="+", default=[1, 2, 3])
    add("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="of smollm2")
    add("--results", type=Path, default=Path("output/lag.jsonl"), help="lines are added")
    args, flags = parser.parse_known_args()
    if own := OWN_FLAGS & {flag.removeprefix("--").partition("=")[0] for flag in flags}:
        parser.error(f"--{own.pop()} is a setting of the cells, or none of theirs")
    results, model = args.results.expanduser(), os.path.expanduser(args.model)
    results.parent.mkdir(parents=True, exist_ok=True)
    model = str(Path(model).resolve()) if os.path.isdir(model) else model
    make_debug_assets()
    if args.task == "smollm2":
        program = ["scripts/data_preprocess/instructions.py", "--local_save_dir"]
        subprocess.run([sys.executable, *program, "data/instructions"], cwd=REPO, check=True)
    recorded = {cell_of(line): line for line in read_lines(RECORDED)}
    rates = args.rates or [own_rate(args.task, model)]
    # Seed by seed: who stops early has whole tables of fewer seeds
    for seed, rate, noise, lag, correction in itertools.product(
        args.seeds, rates, args.noises, args.lags, args.corrections
    ):
        cell = Cell(args.task, lag, correction, rate, noise, seed, tuple(flags))
        line = run_cell(cell, model)
        with open(results, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(f"{cell}: {describe(line)}", flush=True)
        if cell in recorded:
            print(f"docs/lag.jsonl: {describe(recorded[cell])}", flush=True)


if __name__ == "__main__":  # vLLM's processes import this file too
    main()
