"""Describe a run and its responses in sentences, for inspect_run.py and report.py."""

import json
import re
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from statistics import mean
from types import SimpleNamespace

from internal.run_files import NONE_RIGHT, matrices_in

RATE, SCORE = "eval/verifiable_correct_rate", "eval/verifiable_score"
# Timed parts (time/NAME) of generation, which runs beside training in an asynchronous run, each
# with what helps if the learner waits for it. Then those of training
GENERATION = {
    "generation": "Shorter responses help, or more GPUs for vLLM (--vllm_gpus) if there are any",
    "reward": "More --reward_workers or a faster reward help",
    "evaluation": "A smaller --num_evals or fewer --num_eval_prompts help",
}
TRAINING = ["update", "forward", "reward_model", "weight_sync", "checkpoint"]
NOTABLE_FRACTION = 0.15  # of the time, from which a wait is reported


def printable(text: str) -> str:
    """Replace the control characters that a terminal would obey."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", " ", text)


def in_one_line(text: str) -> str:
    return printable(" ".join(text.split()))


def both_ends(text: str, number: int) -> str:
    """Return the first and last characters of a text that has more than `number`."""
    if len(text) <= number:
        return text
    half = number // 2
    return f"{text[:half]} [... {len(text) - 2 * half} more characters ...] {text[-half:]}"


def show_truth(row: dict) -> list[str]:
    """Return a line with the ground truth of a response, or no line if it has none."""
    truth = in_one_line(row["ground_truth"])
    return [f"Ground truth: {both_ends(truth, 100)}"] if truth != "None" else []


def show_score(score: float | None) -> str:
    return "none (the reward failed)" if score is None else f"{score:.3g}"


def show_figures(row: dict) -> str:
    """Return a response's score with its parts, what else its reward returned, or why it failed.

    >>> row = {"score": 0.5, "verifiable_score": 1.0, "length": 7, "stopped": True}
    >>> show_figures(row | {"reward_model_score": -0.5, "reward_metrics": {"strict": 1.0}})
    'score 0.5, verifiable 1, reward model -0.5, strict 1, 7 tokens, complete'
    """
    parts = {}
    if row["score"] not in (None, row.get("verifiable_score")):
        parts = {name: row.get(f"{name}_score") for name in ("verifiable", "reward_model")}
    parts |= row.get("reward_metrics", {})
    reason = (row.get("failure") or "").strip().rpartition("\n")[2]
    has_reason = reason and row["score"] is None
    figures = ["score none" if has_reason else f"score {show_score(row['score'])}"]
    figures += [f"{k.replace('_', ' ')} {v:.3g}" for k, v in parts.items() if v is not None]
    figures += [f"the reward failed: {in_one_line(reason[:200])}"] if reason else []
    end = "complete" if row["stopped"] else "truncated"
    return printable(", ".join([*figures, f"{row['length']} tokens", end]))


def describe_run(run_dir: Path, args: dict, metrics: list[dict]) -> list[str]:
    """Return all sentences about a run that has finished a step."""
    sentences = [describe_progress(run_dir, args, metrics)]
    sentences += describe_evaluations(metrics) + describe_troubles(metrics)
    sentences.append(describe_speed(metrics) or "Nothing stands out that limited its speed")
    costs = describe_costs(run_dir, args, metrics)
    return sentences + ([costs] if costs else [])


def describe_progress(run_dir: Path, args: dict, metrics: list[dict]) -> str:
    """Return how far a run is. If it has not ended, add how long ago it wrote that."""
    steps = args.get("num_training_steps") or args["num_updates"]  # a reward model has updates
    last = metrics[-1]
    since = (time.time() - (run_dir / "metrics.jsonl").stat().st_mtime) / 60
    ago = "" if last["training_step"] == steps else f" (written {since:.1f} minutes ago)"
    minutes = last["time/from_scratch"] / 60
    return f"Step {last['training_step']:.0f} of {steps}, after {minutes:.1f} minutes{ago}"


def describe_evaluations(metrics: list[dict]) -> list[str]:
    """Return sentences on the first and last evaluation: correct answers, and scores if different.

    >>> first, last = {RATE: 0.5, SCORE: 0.5}, {RATE: 0.75, SCORE: 0.8, "eval/policy_version": 40}
    >>> print(*describe_evaluations([first | {"eval/policy_version": 0}, {}, last]), sep="\\n")
    Held-out prompts answered correctly: 50.0% before training, 75.0% after 40 steps
    Mean verifiable score of their answers: 0.500 before training, 0.800 after 40 steps
    """
    evaluations = [line for line in metrics if RATE in line]
    if not evaluations:
        return []
    rates, scores = [], []
    for line in evaluations[:1] + evaluations[1:][-1:]:
        version = line["eval/policy_version"]
        when = f"after {version:.0f} steps" if version > 0 else "before training"
        rates.append(f"{line[RATE]:.1%} {when}")
        scores.append(f"{line[SCORE]:.3f} {when}")
    sentences = [f"Held-out prompts answered correctly: {', '.join(rates)}"]
    # With a reward between 0 and 1, an answer can score something without being correct
    if any(line[SCORE] != line[RATE] for line in evaluations):
        sentences.append(f"Mean verifiable score of their answers: {', '.join(scores)}")
        if not any(line[RATE] for line in evaluations):
            sentences.append(NONE_RIGHT)
    return sentences


def describe_troubles(metrics: list[dict]) -> list[str]:
    """Return warnings: there was nothing to learn from, or many responses were truncated."""
    sentences, last = [], metrics[-1]
    if all(line.get("objective/scores_std", 1) <= 0 for line in metrics):
        equal = f"All responses of a step always had the same score ({last['objective/scores']:g}"
        sentences.append(f"{equal} in the last step), so there was nothing to learn from")
    truncated = 1 - last.get("objective/stop_rate", 1)  # a reward trainer's run has no stop rate
    if truncated > 0.2:
        remedy = "A higher --response_length or --non_stop_penalty helps"
        sentences.append(f"{truncated:.0%} of the last responses were truncated. {remedy}")
    return sentences


def describe_speed(metrics: list[dict]) -> str | None:
    """Return which side of a run waited for the other, and what to do about it.

    Return None if neither waited for long, or if there are too few steps. If generation and
    training take turns, return what a step was spent on, because then neither waits.
    """
    seconds = seconds_of_parts(metrics)
    training, generation = seconds["training"], sum(seconds[part] for part in GENERATION)
    if not training:
        return None
    if not any(line.get("policy/staleness") for line in metrics):
        return describe_turns(seconds)
    # A wait can span several steps of the learner, so it is compared with the time of generation
    vllm_waited = seconds["wait_for_prompts"] / (seconds["wait_for_prompts"] + generation)
    learner_waited = seconds["wait_for_generation"] / training
    if max(vllm_waited, learner_waited) < NOTABLE_FRACTION:
        return None
    if vllm_waited > learner_waited:
        return describe_wait_of_vllm(vllm_waited, seconds)
    return describe_wait_of_learner(learner_waited, seconds)


def seconds_of_parts(metrics: list[dict]) -> Counter:
    """Add up the seconds of each part, over the steps that show the pace of a run.

    Steps in which a process waits for its models and first responses are left out, and so is step
    2, whose responses were requested before anything was trained.
    """
    generated = "time/generation"
    steps = [line for last, line in pairwise(metrics) if generated in last and generated in line]
    seconds = Counter()
    for line in steps[1:]:
        seconds.update({name.removeprefix("time/"): value for name, value in line.items()})
    return seconds


def show_fractions(parts: list[str], seconds: Counter, whole: float) -> str:
    """Return the parts that took at least 1% of the time: "update 75%, forward 20%"."""
    fractions = {part: seconds[part] / whole for part in parts}
    return ", ".join(f"{part} {number:.0%}" for part, number in fractions.items() if number >= 0.01)


def describe_turns(seconds: Counter) -> str:
    parts = show_fractions([*GENERATION, *TRAINING], seconds, seconds["training"])
    sentence = f"Generation and training took turns. The time of a step: {parts}"
    if seconds["reward"] < NOTABLE_FRACTION * seconds["training"]:
        return sentence
    return f"{sentence}. The reward is slow. {GENERATION['reward']}"


def describe_wait_of_vllm(waited: float, seconds: Counter) -> str:
    parts = show_fractions(TRAINING, seconds, seconds["training"])
    return (
        f"vLLM waited for the learner {waited:.0%} of the time. The time of a training step: "
        f"{parts}. More learners or shorter responses help"
    )


def describe_wait_of_learner(waited: float, seconds: Counter) -> str:
    generation = sum(seconds[part] for part in GENERATION)
    parts = show_fractions([*GENERATION], seconds, generation)
    slow = [part for part in GENERATION if seconds[part] >= generation / 3]
    return (
        f"The learner waited for {' and '.join(slow)} {waited:.0%} of the time. The time of a "
        f"batch: {parts}. {'. '.join(GENERATION[part] for part in slow)}"
    )


def model_flops(plan, run_dir: Path, args: dict, metrics: list[dict]) -> tuple[float, float]:
    """Return a token's model FLOPs in an update, and in the forward passes before it.

    They are those of the policy and the value model, which has no head. In GRPO the policy has no
    forward pass over the first mini-batch before its update. plan: the module resource_plan.
    """
    config = json.loads((run_dir / "model/config.json").read_bytes())
    config = SimpleNamespace(**config.get("text_config") or config)
    lengths = [line["val/sequence_lengths"] for line in metrics]
    prompts = json.loads((run_dir / "prompt_lengths.json").read_bytes())
    attention = config.num_hidden_layers * plan.widths(config)[0] * (mean(lengths) + mean(prompts))
    matrices, has_adapters = matrices_in(run_dir / "model"), bool(args.get("lora_rank"))
    forward, update = plan.flops_of_token(matrices, attention, has_adapters)
    epochs, is_ppo = args["num_epochs"], "value_learning_rate" in args
    left_out = 0 if is_ppo else epochs / args["updates_per_step"]
    before = forward * (1 - left_out + (args["beta"] > 0))
    if is_ppo:
        matrices -= config.vocab_size * config.hidden_size
        value_forward, value_update = plan.flops_of_token(matrices, attention, has_adapters)
        before, update = before + value_forward, update + value_update
    return update, before / epochs


def describe_utilization(run_dir: Path, args: dict, metrics: list[dict], times: dict) -> str:
    """Return model FLOPs as fractions of the learners' peak, or "" if they are not known."""
    gpu = args.get("provenance", {}).get("gpu")
    if not gpu or not (run_dir / "model/config.json").is_file():
        return ""
    from internal import resource_plan as plan  # which loads torch

    if not plan.peak_of(gpu):
        return ""
    peak = plan.peak_of(gpu)[0] * args["world_size"]
    tokens = mean(line["val/update_tokens"] for line in metrics)
    update, before = (tokens * flops / peak for flops in model_flops(plan, run_dir, args, metrics))
    in_updates, overall = update / times["update"], (update + before) / times["training"]
    return f"; model FLOPs {in_updates:.1%} of the peak in updates, {overall:.1%} overall ({gpu})"


def describe_costs(run_dir: Path, args: dict, metrics: list[dict]) -> str | None:
    """Return a line to compare runs by: rates, utilization of GPUs, seconds of a step, and memory.

    The first two steps and the last are left out if there are others, because they wait or do not
    overlap. Return None if no step has these metrics.
    """
    steps = [line for line in metrics if "val/update_tokens" in line]
    steps = steps[2:-1] or steps
    if not steps:
        return None
    waits = ("wait_for_generation", "wait_for_prompts")
    names = [*TRAINING, *GENERATION, *waits, "training"]
    times = {name: mean(line.get(f"time/{name}", 0) for line in steps) for name in names}
    generated = mean(line["perf/response_tokens_per_second"] for line in steps)
    learned = mean(line["val/update_tokens"] for line in steps)
    utilization = describe_utilization(run_dir, args, steps, times)
    step = times.pop("training")
    parts = ", ".join(f"{name} {s:.3g}" for name, s in times.items() if s >= 0.01 * step)
    memory = max(line["perf/memory_gib"] for line in metrics if "perf/memory_gib" in line)
    return (
        f"To compare: {generated:,.0f} response tokens per second; learner "
        f"{learned / times['update']:,.0f} tokens per second in updates and {learned / step:,.0f} "
        f"overall{utilization}; {step:.3g} s per step ({parts}); learner's peak memory "
        f"{memory:.3g} GiB"
    )
