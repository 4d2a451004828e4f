"""Draws a run's pictures, and says in a few lines what it did and what is next.

    python scripts/summarize_run.py output/RUN

What it did: answers before and after training, and what limited its speed. A
script calls this at its end.
"""

import argparse
import shlex
import sys
import textwrap
from collections import Counter
from itertools import pairwise
from pathlib import Path

from plot_runs import draw_run, read_lines, read_metrics

RATE, SCORE = "eval/verifiable_correct_rate", "eval/verifiable_score"
VERSION = "eval/policy_version"  # of the policy that was evaluated: the steps that it had trained
LONG = 0.15  # a share of the time that is worth a word
# What the side of vLLM does, beside training in an asynchronous run: who is waited for, a remedy
GENERATION = {
    "generation": ("vLLM", "more GPUs for vLLM (--vllm_gpus) or shorter responses help"),
    "reward": ("the rewards", "more --reward_workers or a faster reward help"),
    "evaluation": ("the evaluations", "a smaller --num_evals or fewer --eval_prompts help"),
}
TRAINING = ["update", "forward", "reward_model", "weight_sync", "checkpoint"]
NAMES = {
    "reward": "rewards",
    "evaluation": "evaluations",
    "update": "updates",
    "forward": "forward passes",
    "reward_model": "reward model",
    "weight_sync": "weight sync",
    "checkpoint": "checkpoints",
}


def describe_evaluations(metrics: list[dict]) -> list[str]:
    """What the first and the last evaluation say: answers right, and where it differs their score.

    >>> first, last = {RATE: 0.5, VERSION: 0}, {RATE: 0.75, SCORE: 0.8, VERSION: 40}
    >>> describe_evaluations([first, {}, last])[0]
    'Held-out prompts answered right: 50.0% before training, 75.0% after 40 steps'
    >>> describe_evaluations([last])[1]
    'Mean verifiable score of their answers: 0.800 after 40 steps'
    """
    evaluations = [line for line in metrics if RATE in line]
    if not evaluations:
        return []
    shown = [evaluations[0], evaluations[-1]] if len(evaluations) > 1 else evaluations
    rates = [f"{line[RATE]:.1%} {when(line)}" for line in shown]
    sentences = [f"Held-out prompts answered right: {', '.join(rates)}"]
    # Rewards that are shares of 1: an answer may be worth something and not be right
    if any(line.get(SCORE, line[RATE]) != line[RATE] for line in evaluations):
        scores = [f"{line.get(SCORE, line[RATE]):.3f} {when(line)}" for line in shown]
        sentences.append(f"Mean verifiable score of their answers: {', '.join(scores)}")
    return sentences


def when(line: dict) -> str:
    """How far the policy of an evaluation had trained."""
    version = line[VERSION]
    return f"after {version:.0f} steps" if version > 0 else "before training"


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
        lines += ["", end_of_prompt(first["prompt"])]
        for when, sample in (("before", first), ("after", last)):
            response = textwrap.shorten(sample["response"], 200, placeholder=" ...")
            lines.append(f"  {when}, score {show_score(sample['score'])}: {response}")
    return lines


def end_of_prompt(prompt: str) -> str:
    """The end of a prompt, which says what was asked, in one line."""
    prompt = " ".join(prompt.split())
    return prompt if len(prompt) <= 200 else f"... {prompt[-200:]}"


def show_score(score: float | None) -> str:
    """None: its reward failed."""
    return "none" if score is None else f"{score:.3g}"


def describe_speed(metrics: list[dict]) -> str | None:
    """Which side of a run waited for the other, and what to do about it.

    None: neither waited for long, or there are too few steps to know. Where the sides take turns
    none of them waits; then it says what a step was spent on.

    >>> line = {"time/training": 4.0, "time/update": 3.0, "time/forward": 1.0}
    >>> line |= {"time/generation": 1.5, "time/reward": 0.4, "time/evaluation": 0.1}
    >>> line |= {"time/wait_for_prompts": 2.0, "time/wait_for_generation": 0.0}
    >>> line["policy/staleness"] = 1
    >>> first = line | {"time/wait_for_prompts": 60.0}  # a process starts
    >>> resumed = {"time/training": 4.0, "policy/staleness": 1}  # responses of the checkpoint
    >>> said = describe_speed([first, line, line, resumed, first, line])
    >>> print(textwrap.fill(said, 88))
    vLLM waited for the learner 50% of the time (a training step: updates 75%, forward
    passes 25%): more learners or shorter responses help
    """
    is_async = any(line.get("policy/staleness") for line in metrics)
    # A process begins with waiting: for its models, and for the first responses. Those of step 2
    # were asked for when nothing was trained yet
    generated = "time/generation"
    metrics = [line for last, line in pairwise(metrics) if generated in last and generated in line]
    seconds = Counter()
    for line in metrics[1:]:
        seconds.update({name.removeprefix("time/"): value for name, value in line.items()})
    if not seconds["training"]:
        return None

    if not is_async:
        spent = describe_shares(seconds, [*GENERATION, *TRAINING], seconds["training"])
        said = f"Generation and training took turns (a step: {spent})"
        if seconds["reward"] < LONG * seconds["training"]:
            return said
        return f"{said}. The reward is slow: {GENERATION['reward'][1]}"

    generation = sum(seconds[part] for part in GENERATION)
    # A wait reaches over several steps of the learner, so it is compared with what generation does
    vllm_waited = seconds["wait_for_prompts"] / (seconds["wait_for_prompts"] + generation)
    learner_waited = seconds["wait_for_generation"] / seconds["training"]
    if max(vllm_waited, learner_waited) < LONG:
        return None
    if vllm_waited > learner_waited:
        spent = describe_shares(seconds, TRAINING, seconds["training"])
        return (
            f"vLLM waited for the learner {vllm_waited:.0%} of the time (a training step: "
            f"{spent}): more learners or shorter responses help"
        )
    spent = describe_shares(seconds, GENERATION, generation)
    slow = [GENERATION[part] for part in GENERATION if seconds[part] >= generation / 3]
    waited_for = " and ".join(who for who, _ in slow)
    remedies = "; ".join(remedy for _, remedy in slow)
    return (
        f"The learner waited for {waited_for} {learner_waited:.0%} of the time (a batch: "
        f"{spent}): {remedies}"
    )


def describe_shares(seconds, parts, whole) -> str:
    """What share of the whole each part took, where that is 1% or more.

    >>> describe_shares({"update": 3.0, "weight_sync": 1.0, "forward": 0.0}, TRAINING, 4.0)
    'updates 75%, weight sync 25%'
    """
    shares = {part: seconds.get(part, 0.0) / whole for part in parts}
    return ", ".join(
        f"{NAMES.get(part, part)} {share:.0%}" for part, share in shares.items() if share >= 0.01
    )


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

    >>> describe_cuts([{"objective/stop_rate": 0.25}])
    '75% of the last responses were cut: a longer --response_length or --non_stop_penalty helps'
    """
    share = 1 - metrics[-1].get("objective/stop_rate", 1)  # a reward trainer's run has none
    if share <= 0.2:
        return None
    advice = "a longer --response_length or --non_stop_penalty helps"
    return f"{share:.0%} of the last responses were cut: {advice}"


def next_steps(run_dir: Path) -> list[str]:
    """Commands that go on from here, as they can be typed where this program was called."""
    python, scripts = Path(sys.executable), Path(__file__).parent

    def command(*words):
        here = Path.cwd()
        paths = [Path(word) for word in words]
        paths = [path.relative_to(here) if path.is_relative_to(here) else path for path in paths]
        return shlex.join(map(str, paths))

    lines = [
        f"Look at it:  {command(python, scripts / 'inspect_run.py', run_dir)}",
        f"Compare it:  {command(python, scripts / 'plot_runs.py', run_dir, 'OTHER_RUN')}",
    ]
    model, checkpoints = run_dir / "model", list(run_dir.glob("checkpoints/step_*"))
    if model.is_dir():
        lines.append(f'Use it:      transformers.AutoModelForCausalLM.from_pretrained("{model}")')
        # vLLM would choose bfloat16, which rounds a part of a merged adapter's change away
        dtype = ', dtype="float32"' if (run_dir / "adapter").is_dir() else ""
        lines.append(f'             vllm.LLM("{model}"{dtype})')
    elif checkpoints:
        newest = max(checkpoints, key=lambda path: int(path.name.removeprefix("step_")))
        lines.append(f"Resume it:   its command with --resume_from_checkpoint {newest}")
    return lines


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
    draw_run(run_dir)
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
    print("\n".join(next_steps(run_dir)))


if __name__ == "__main__":
    main()
