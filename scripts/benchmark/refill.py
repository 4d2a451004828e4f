"""What refill gains: steps, seconds and tokens to a held-out rate, beside the script and inflight.

    python scripts/benchmark/refill.py --seeds 1 2 3
    python scripts/benchmark/refill.py --arms script refill --seeds 4 --target 0.95
    MODEL=PATH python scripts/benchmark/refill.py --task smollm2 --arms script refill

The runs are those of scripts/train/debug/grpo.sh with 40 steps, evaluated after every second one;
other flags go to the script. Both forks have a bound of one step on age, as the script has.
"variable" is the script with batches of variable size: responses without a gradient are left out of
the loss's divisor, too. A response of any arm that has the mean score of its group has none.

The task smollm2 is scripts/train/smollm2/grpo.sh, evaluated likewise. A response that meets three
of its four constraints, or all, scores 1, and any other 0: by the share of constraints, the reward
of that command, hardly a group of eight has but one score.

A line is a run: the share of held-out prompts answered right at last; for the first policy that
reached the target its steps, the seconds that these took (evaluations included), the tokens that
were sampled for them, and how many of those for each response that taught something: that had an
advantage. And the tokens of the last ten steps. What is still under way is not counted. --keep
FOLDER keeps the runs, in a folder that has none yet. No pictures are drawn on the way.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(REPO / "scripts"), str(REPO / "scripts" / "rewards")]
from fork import write_fork  # noqa: E402
from if_constraints import compute_score  # noqa: E402

ARMS = ("script", "variable", "inflight", "refill")
FLAGS = {
    "debug": ["--total_episodes", "20480", "--num_evals", "20"],
    "smollm2": ["--num_evals", "10", "--reward_fn", f"{__file__}:three_of_four"],
}
OUT_OF_GROUPS = "without a full batch"  # of the fork refill
DIVISOR = "loss_divisor(batch.loss_mask[mini_batch], args)"
VARIABLE = "loss_divisor((batch.loss_mask * batch.computed[:, None])[mini_batch], args)"


def three_of_four(data_source, response, ground_truth):
    """The reward of smollm2."""
    return float(compute_score(data_source, response, ground_truth) >= 0.75)


def write_arm(arm, path):
    """Writes the script that an arm runs, to where no programs are that draw pictures."""
    text = (REPO / "grpo_vllm_async.py").read_text("utf-8")
    if arm == "variable":
        before, after = text.split(DIVISOR)  # it is there once
        text = before + VARIABLE + after
    if arm in ("inflight", "refill"):
        write_fork(arm, path)
    else:
        path.write_text(text, "utf-8")


def run(task, arm, seed, folder, flags):
    """The metrics of a run, one dictionary a step, and what it printed."""
    script = folder / f"grpo_{arm}.py"
    if not script.exists():
        write_arm(arm, script)
    if arm in ("inflight", "refill"):
        flags = ["--max_staleness", "1", *flags]
    name = f"{arm}_{seed}"
    options = [*FLAGS[task], "--seed", str(seed), *flags]
    options += ["--output_dir", str(folder), "--run_name", name]
    result = subprocess.run(
        ["bash", f"scripts/train/{task}/grpo.sh", *options],
        cwd=REPO,
        env=os.environ | {"SCRIPT": str(script)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
    )
    if result.returncode and OUT_OF_GROUPS not in result.stdout:
        sys.exit(result.stdout)
    path = folder / name / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()], result.stdout


def tokens_of(metrics):
    """Tokens sampled in some steps, and how many of them for each response with an advantage."""
    tokens = sum(
        line["val/sequence_lengths"] * line["episode"] / line["training_step"]
        + line.get("refill/dropped_tokens", 0)
        for line in metrics
    )
    return round(tokens), round(tokens / sum(line["val/computed_responses"] for line in metrics), 2)


def summarize(metrics, target):
    """What a line says of a run."""
    rate = "eval/verifiable_correct_rate"
    evaluations = [line for line in metrics if rate in line]
    summary = {"steps": len(metrics), "last rate": evaluations[-1][rate]}
    # The policy's steps, some of which were made before the line in which its rate is
    reached = [line["eval/policy_version"] for line in evaluations if line[rate] >= target]
    if reached:
        steps = int(reached[0])
        start = metrics[0]["time/from_scratch"] - metrics[0]["time/training"]
        summary["to target"] = {
            "steps": steps,
            "seconds": round(metrics[steps - 1]["time/from_scratch"] - start, 1),
            "tokens": tokens_of(metrics[:steps])[0],
            "a response that taught": tokens_of(metrics[:steps])[1],
        }
    tokens, each = tokens_of(metrics[-10:])
    return summary | {"last 10 steps": {"tokens": tokens, "a response that taught": each}}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", choices=FLAGS, default="debug")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--target", type=float, default=0.9)
    parser.add_argument("--keep", type=Path)
    args, flags = parser.parse_known_args()
    if "variable" in args.arms and any(flag.startswith("--beta") for flag in flags):
        parser.error("variable is for --beta 0: with a KL every response has a gradient")
    with tempfile.TemporaryDirectory() as folder:
        if args.keep:
            folder = args.keep.resolve()
            folder.mkdir(parents=True)
        for seed in args.seeds:
            for arm in args.arms:
                metrics, output = run(args.task, arm, seed, Path(folder), flags)
                line = {"arm": arm, "seed": seed} | summarize(metrics, args.target)
                print(json.dumps(line), flush=True)
                if OUT_OF_GROUPS in output:
                    print(output[output.rindex("RuntimeError") :].splitlines()[0], flush=True)


if __name__ == "__main__":
    main()
