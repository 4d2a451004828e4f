"""What check_sampler and check_draws see in right runs: those of the debug commands.

    python scripts/benchmark/checks.py >> checks.jsonl     # 20 seeds of each: an hour on two cores
    python scripts/benchmark/checks.py ppo --seeds 3

The commands of scripts/train/debug run with --no-async_mode, so that both checks see every batch
but those of GRPO's first updates; and GRPO with --beta 0.001, without which check_draws is not
called. A line is a run: the largest KL, which check_sampler limits to 1e-4 in float32, the lowest
mean of log-probability and entropy over responses in standard errors, which check_draws limits to
-9, over how many steps, and the rate of right answers at the end.
"""

import argparse
import importlib
import json
import math
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from gpu_check import debug_command

REPO = Path(__file__).resolve().parents[2]
OPTIONS = {"ppo": [], "grpo": ["--beta", "0.001"]}


def run_script(name, flags):
    """Does what `python SCRIPT FLAGS` does, but for its pictures, and prints what checks saw."""
    sys.path.insert(0, str(REPO))
    script = importlib.import_module(name.removesuffix(".py"))
    check_sampler, check_draws = script.check_sampler, script.check_draws
    divergences, scores = [], []

    def noted_sampler(logprobs, sampler_logprobs, mask, args):
        kl = script.kl_penalty(sampler_logprobs * mask, logprobs * mask, "kl3")
        divergences.append(script.masked_mean(kl, mask).item())
        check_sampler(logprobs, sampler_logprobs, mask, args)

    def noted_samples(logprobs, entropies, mask):
        sums = ((logprobs + entropies) * mask).sum(1)
        sums = sums[sums != 0]
        scores.append((sums.mean() / sums.std()).item() * math.sqrt(len(sums)))
        check_draws(logprobs, entropies, mask)

    script.check_sampler, script.check_draws = noted_sampler, noted_samples
    script.run_program = lambda *_: None  # no pictures
    try:
        script.main(script.tyro.cli(script.Args, args=flags))
        seen = {"steps": len(scores), "largest_kl": max(divergences), "lowest": min(scores)}
        print("seen:", json.dumps(seen), flush=True)
    except BaseException as error:
        script.end_at_once(error)


def start(name, seed):
    """The line of a run."""
    script, *flags = debug_command(name)
    with tempfile.TemporaryDirectory() as folder:
        flags += [*OPTIONS[name], "--no-async_mode", "--seed", str(seed), "--output_dir", folder]
        command = [sys.executable, __file__, "--run", script, *flags, "--run_name", "run"]
        result = subprocess.run(command, capture_output=True, encoding="utf-8", cwd=REPO)
        if result.returncode:
            raise RuntimeError(f"{name}, seed {seed}:\n{result.stdout}\n{result.stderr}")
        last = Path(folder, "run", "metrics.jsonl").read_text("utf-8").splitlines()[-1]
        rate = json.loads(last)["eval/verifiable_correct_rate"]
    seen = json.loads(re.search(r"^seen: (.*)$", result.stdout, re.MULTILINE)[1])
    return {"name": name, "seed": seed} | seen | {"rate": rate}


def main():
    if sys.argv[1:2] == ["--run"]:
        run_script(sys.argv[2], sys.argv[3:])
        return
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("name", nargs="?", choices=OPTIONS, help="one of both")
    parser.add_argument("--first_seed", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=20)
    given = parser.parse_args()
    for seed in range(given.first_seed, given.first_seed + given.seeds):
        for name in [given.name] if given.name else OPTIONS:
            print(json.dumps(start(name, seed)), flush=True)


if __name__ == "__main__":  # vLLM's process imports this file, too
    main()
