"""Says in a few lines what a run did: answers before and after, what limited its speed.

python scripts/summarize_run.py output/RUN
"""

import argparse
import sys
import textwrap
from itertools import pairwise
from pathlib import Path

from plot_runs import read_lines, read_metrics

RATE, SCORE = "eval/verifiable_correct_rate", "eval/verifiable_score"


def describe_evaluations(metrics: list[dict]) -> list[str]:
    """What the first and the last evaluation say: answers right, and where it differs their score.

    >>> describe_evaluations([{RATE: 0.5}, {}, {RATE: 0.75}])
    ['Held-out prompts answered right: 50.0% before training, 75.0% after']
    >>> describe_evaluations([{RATE: 0.0, SCORE: 0.3}])[1]
    'Mean verifiable score of their answers: 0.300 after training'
    """
    evaluations = [line for line in metrics if RATE in line]
    if not evaluations:
        return []
    rates = [f"{line[RATE]:.1%}" for line in evaluations]
    sentences = [describe_change("Held-out prompts answered right", rates)]
    # Rewards that are shares of 1: an answer may be worth something and not be right
    if any(line.get(SCORE, line[RATE]) != line[RATE] for line in evaluations):
        scores = [f"{line[SCORE]:.3f}" for line in evaluations]
        sentences.append(describe_change("Mean verifiable score of their answers", scores))
    return sentences


def describe_change(what: str, values: list[str]) -> str:
    """One value of each evaluation, the first of which is from before training if there are two."""
    if len(values) == 1:
        return f"{what}: {values[0]} after training"
    return f"{what}: {values[0]} before training, {values[-1]} after"


def describe_samples(samples: list[dict], number: int = 3) -> list[str]:
    """Answers to the first held-out prompts, by the first policy that was asked and by the last.

    >>> sample = {"prompt": "<|user|>213=<|assistant|>", "ground_truth": "123", "score": 0.0}
    >>> before = sample | {"policy_version": 0, "response": "231"}
    >>> after = sample | {"policy_version": 9, "response": "123", "score": 1.0}
    >>> print("\\n".join(describe_samples([before, after])))
    <BLANKLINE>
    <|user|>213=<|assistant|>
      before, score 0: 231
      after, score 1: 123
    """
    versions = sorted({sample["policy_version"] for sample in samples})
    if len(versions) < 2:
        return []
    before = [sample for sample in samples if sample["policy_version"] == versions[0]]
    after = {s["prompt"]: s for s in samples if s["policy_version"] == versions[-1]}
    lines = []
    for first in before[:number]:
        last = after.get(first["prompt"])
        if last is None:  # the run was resumed with other held-out prompts
            continue
        prompt = " ".join(first["prompt"].split())  # its end says what was asked
        lines += ["", prompt if len(prompt) <= 200 else f"... {prompt[-200:]}"]
        for when, sample in (("before", first), ("after", last)):
            score = sample["score"]
            shown = "none" if score is None else f"{score:.3g}"  # none: its reward failed
            response = textwrap.shorten(sample["response"], 200, placeholder=" ...")
            lines.append(f"  {when}, score {shown}: {response}")
    return lines


def describe_speed(metrics: list[dict]) -> str | None:
    """Which side of an asynchronous run waited for the other, and what to do about it.

    >>> line = {"time/training": 4.0, "time/wait_for_generation": 1.0, "time/wait_for_prompts": 2.0}
    >>> line |= {"time/generation": 1.5, "time/reward": 0.5, "time/evaluation": 0.0}
    >>> describe_speed([line, line])  # of a run in turns: either side always waits for the other
    >>> line["policy/staleness"] = 1
    >>> first = line | {"time/wait_for_prompts": 60.0}  # the run's start is in it
    >>> resumed = {"time/training": 4.0, "policy/staleness": 1}  # generated before the checkpoint
    >>> describe_speed([first, line, resumed, first, line])
    'training-bound: vLLM waited 50% of the time; more learners, shorter responses help'
    """
    if not any(line.get("policy/staleness") for line in metrics):
        return None
    # A process begins with waiting: for its models, and for the first responses
    waited = "time/wait_for_prompts"
    metrics = [line for last, line in pairwise(metrics) if waited in last and waited in line]
    if not metrics:
        return None

    def seconds(*parts):
        return sum(line[f"time/{part}"] for line in metrics for part in parts)

    learner_waited = seconds("wait_for_generation") / seconds("training")
    # A wait reaches over several steps of the learner, so it is compared with what generation does
    generation_waited = seconds("wait_for_prompts") / seconds(
        "wait_for_prompts", "generation", "reward", "evaluation"
    )
    if learner_waited > generation_waited:
        who, waited, remedy = "generation-bound: the learner", learner_waited, "--vllm_gpus"
    else:
        who, waited, remedy = "training-bound: vLLM", generation_waited, "learners"
    return f"{who} waited {waited:.0%} of the time; more {remedy}, shorter responses help"


def describe_signal(metrics: list[dict]) -> str | None:
    """Whether there was anything to learn from.

    >>> describe_signal([{"objective/scores": 0.0, "objective/scores_std": 0.0}])
    'In every step all responses scored alike, at last 0: there was nothing to learn from'
    """
    if any(line.get("objective/scores_std", 1) > 0 for line in metrics):
        return None
    score = metrics[-1]["objective/scores"]
    return (
        f"In every step all responses scored alike, at last {score:g}: there was nothing to learn "
        f"from"
    )


def describe_cuts(metrics: list[dict]) -> str | None:
    """Whether many responses of the last step were cut, and what to do about it.

    >>> describe_cuts([{"val/stop_rate": 0.25}])
    '75% of the last responses were cut: a longer --response_length or --non_stop_penalty helps'
    """
    share = 1 - metrics[-1]["val/stop_rate"]
    if share <= 0.2:
        return None
    advice = "a longer --response_length or --non_stop_penalty helps"
    return f"{share:.0%} of the last responses were cut: {advice}"


def main():
    if sys.stdout is not None:
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal may know ASCII alone
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    run_dir = parser.parse_args().run
    if not (run_dir / "metrics.jsonl").is_file():
        parser.error(f"{run_dir} holds no metrics.jsonl: it is not the folder of a run")
    metrics = read_metrics(run_dir)
    if not metrics:
        parser.error(f"{run_dir}/metrics.jsonl is empty: the run made no step")
    sentences = [
        *describe_evaluations(metrics),
        describe_signal(metrics),
        describe_cuts(metrics),
        describe_speed(metrics),
    ]
    for sentence in sentences:
        if sentence:
            print(sentence)
    samples = run_dir / "samples.jsonl"
    if samples.exists():
        print("\n".join([*describe_samples(read_lines(samples)), ""]))
    print(f"Model, metrics, samples and pictures: {run_dir}")


if __name__ == "__main__":
    main()
