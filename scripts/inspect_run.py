"""Show a run in the terminal, while it trains or afterwards.

It prints how far the run is, its last metrics, what limited its speed, and
training responses of the last step.

    python scripts/inspect_run.py output/RUN
    # every 10 seconds
    watch -n 10 python scripts/inspect_run.py output/RUN
    # what the scripts print at the end of a run: answers before and after
    # training, what limited its speed, and next commands; also draws the curves
    python scripts/inspect_run.py output/RUN --summary

For curves, tokens with their numbers, and incorrect answers, use report.py.
"""

import argparse
import json
import re
import shlex
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import mean
from types import SimpleNamespace

from internal.run_files import (
    NONE_RIGHT,
    matrices_in,
    read_args,
    read_lines,
    read_metrics,
    read_rollouts,
)
from plot_runs import Run, draw_run, lines_of_table
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

RATE, SCORE = "eval/verifiable_correct_rate", "eval/verifiable_score"
# What --summary lists if it exists: an interrupted run has no model
FILES = {"model": "model", "metrics": "metrics.jsonl", "samples": "samples.jsonl"}
FILES |= {"curves": "curves.png", "prompts' lengths": "token_length.png"}
LETTERS = 500  # characters that are shown of a response

# Timed parts (time/NAME) of generation, which runs beside training in an asynchronous run, each
# with what helps if the learner waits for it. Then those of training
GENERATION = {
    "generation": "shorter responses help, or more GPUs for vLLM (--vllm_gpus) if there are any",
    "reward": "more --reward_workers or a faster reward help",
    "evaluation": "a smaller --num_evals or fewer --num_eval_prompts help",
}
TRAINING = ["update", "forward", "reward_model", "weight_sync", "checkpoint"]
WAITS = ["wait_for_generation", "wait_for_prompts"]
LONG = 0.15  # the fraction of the time from which a wait is reported


def printable(text: str) -> str:
    """Replace the control characters that a terminal would obey."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", " ", text)


def both_ends(text: str, number: int) -> str:
    """Return the first and last characters of a text that has more than `number`."""
    if len(text) <= number:
        return text
    half = number // 2
    return f"{text[:half]} [... {len(text) - 2 * half} more characters ...] {text[-half:]}"


def in_one_line(text: str) -> str:
    return printable(" ".join(text.split()))


def end_of_prompt(row: dict) -> str:
    prompt = in_one_line(row["prompt"])
    return prompt if len(prompt) <= 200 else f"... {prompt[-200:]}"


def text_of(row: dict) -> str:
    """Return a response. If it has several turns, observations are in brackets."""
    turns = row.get("turns") or [row["response"]]
    return " ".join(f"[{turn}]" if i % 2 else turn for i, turn in enumerate(turns))


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
    is_said = reason and row["score"] is None
    figures = ["score none" if is_said else f"score {show_score(row['score'])}"]
    figures += [f"{k.replace('_', ' ')} {v:.3g}" for k, v in parts.items() if v is not None]
    figures += [f"the reward failed: {in_one_line(reason[:200])}"] if reason else []
    end = "complete" if row["stopped"] else "truncated"
    return printable(", ".join([*figures, f"{row['length']} tokens", end]))


def describe_progress(run_dir: Path, args: dict, metrics: list[dict]) -> str:
    """Return how far a run is. If it has not ended, add how long ago it wrote that."""
    steps = args.get("num_training_steps") or args["num_updates"]  # a reward model has updates
    last = metrics[-1]
    since = (time.time() - (run_dir / "metrics.jsonl").stat().st_mtime) / 60
    ago = "" if last["training_step"] == steps else f" (written {since:.1f} minutes ago)"
    minutes = last["time/from_scratch"] / 60
    return f"Step {last['training_step']:.0f} of {steps}, after {minutes:.1f} minutes{ago}"


def describe_speed(metrics: list[dict]) -> str | None:
    """Return which side of a run waited for the other, and what to do about it.

    Return None if neither waited for long, or if there are too few steps. If generation and
    training take turns, return what a step was spent on, because then neither waits.
    """
    # A process begins by waiting for its models and for the first responses. Those of step 2 were
    # requested before anything was trained
    generated = "time/generation"
    steps = [line for last, line in pairwise(metrics) if generated in last and generated in line]
    seconds = Counter()
    for line in steps[1:]:
        seconds.update({name.removeprefix("time/"): value for name, value in line.items()})
    training, generation = seconds["training"], sum(seconds[part] for part in GENERATION)
    if not training:
        return None

    def shares(parts, whole):
        every = {part: seconds[part] / whole for part in parts}
        return ", ".join(f"{part} {share:.0%}" for part, share in every.items() if share >= 0.01)

    if not any(line.get("policy/staleness") for line in metrics):
        spent = shares([*GENERATION, *TRAINING], training)
        said = f"Generation and training took turns. Of a step, {spent}"
        is_slow = seconds["reward"] >= LONG * training
        return f"{said}. The reward is slow: {GENERATION['reward']}" if is_slow else said

    # A wait can span several steps of the learner, so it is compared with the time of generation
    vllm_waited = seconds["wait_for_prompts"] / (seconds["wait_for_prompts"] + generation)
    learner_waited = seconds["wait_for_generation"] / training
    if max(vllm_waited, learner_waited) < LONG:
        return None
    if vllm_waited > learner_waited:
        return (
            f"vLLM waited for the learner {vllm_waited:.0%} of the time (of a training step, "
            f"{shares(TRAINING, training)}): more learners or shorter responses help"
        )
    slow = [part for part in GENERATION if seconds[part] >= generation / 3]
    return (
        f"The learner waited for {' and '.join(slow)} {learner_waited:.0%} of the time (of a "
        f"batch, {shares(GENERATION, generation)}): {'; '.join(GENERATION[part] for part in slow)}"
    )


def model_flops(run_dir: Path, args: dict, metrics: list[dict]) -> tuple[float, float] | None:
    """Return a token's model FLOPs in an update, and in the forward passes before it.

    They are resource_plan.flops_of_token for the policy and the value model, which has no head. In
    GRPO the first mini-batch has no forward pass of the policy before its update. Return None if
    the run has no saved model.
    """
    model = run_dir / "model"
    if not (model / "config.json").is_file():
        return None
    from internal import resource_plan as plan  # which loads torch

    config = json.loads((model / "config.json").read_bytes())
    config = SimpleNamespace(**config.get("text_config") or config)
    lengths = [line["val/sequence_lengths"] for line in metrics]
    prompts = json.loads((run_dir / "prompt_lengths.json").read_bytes())
    attention = config.num_hidden_layers * plan.widths(config)[0] * (mean(lengths) + mean(prompts))
    matrices, has_adapters = matrices_in(model), bool(args.get("lora_rank"))
    forward, update = plan.flops_of_token(matrices, attention, has_adapters)
    epochs, is_ppo = args["num_epochs"], "value_learning_rate" in args
    left_out = 0 if is_ppo else epochs / args["updates_per_step"]
    before = forward * (1 - left_out + (args["beta"] > 0))
    if is_ppo:
        matrices -= config.vocab_size * config.hidden_size
        of_value = plan.flops_of_token(matrices, attention, has_adapters)
        before, update = before + of_value[0], update + of_value[1]
    return update, before / epochs


def describe_utilization(run_dir: Path, args: dict, metrics: list[dict], times: dict) -> str:
    """Return model FLOPs as fractions of the learners' peak, or "" if they are not known."""
    gpu = args.get("provenance", {}).get("gpu")
    flops = model_flops(run_dir, args, metrics) if gpu else None
    peak = flops and sys.modules["internal.resource_plan"].peak_of(gpu)
    if not peak:
        return ""
    of_gpus = peak[0] * args["world_size"] / mean(line["val/update_tokens"] for line in metrics)
    in_updates, in_all = flops[0] / times["update"], sum(flops) / times["training"]
    said = f"{in_updates / of_gpus:.1%} of the peak in updates, {in_all / of_gpus:.1%} overall"
    return f"; model FLOPs {said} ({gpu})"


def describe_costs(run_dir: Path, args: dict, metrics: list[dict]) -> str | None:
    """Return a line to compare runs by: rates, utilization of GPUs, seconds of a step, and memory.

    The first two steps and the last are left out if there are others, because they wait or do not
    overlap. Return None if no step has these metrics.
    """
    steps = [line for line in metrics if "val/update_tokens" in line]
    steps = steps[2:-1] or steps
    if not steps:
        return None
    names = [*TRAINING, *GENERATION, *WAITS, "training"]
    times = {name: mean(line.get(f"time/{name}", 0) for line in steps) for name in names}
    sampled = mean(line["perf/response_tokens_per_second"] for line in steps)
    read = mean(line["val/update_tokens"] for line in steps)
    rates = f"{sampled:,.0f} response tokens per second; learner {read / times['update']:,.0f} "
    rates += f"tokens per second in updates and {read / times['training']:,.0f} overall"
    utilization = describe_utilization(run_dir, args, steps, times)
    whole = times.pop("training")
    spent = ", ".join(f"{name} {s:.3g}" for name, s in times.items() if s >= 0.01 * whole)
    memory = max(line["perf/memory_gib"] for line in metrics if "perf/memory_gib" in line)
    said = f"To compare: {rates}{utilization}; {whole:.3g} s per step ({spent})"
    return f"{said}; learner's peak memory {memory:.3g} GiB"


def describe_evaluations(metrics: list[dict]) -> list[str]:
    """Return sentences on the first and last evaluation: correct answers, and scores if different.

    >>> first, last = {RATE: 0.5, SCORE: 0.5}, {RATE: 0.75, SCORE: 0.8, "eval/policy_version": 40}
    >>> print(*describe_evaluations([first | {"eval/policy_version": 0}, {}, last]), sep="\\n")
    Held-out prompts answered correctly: 50.0% before training, 75.0% after 40 steps
    Mean verifiable score of their answers: 0.500 before training, 0.800 after 40 steps
    """
    evaluations = [line for line in metrics if RATE in line]
    rates, scores = [], []
    for line in [*evaluations[:1], *evaluations[1:][-1:]]:
        version = line["eval/policy_version"]
        when = f"after {version:.0f} steps" if version > 0 else "before training"
        rates.append(f"{line[RATE]:.1%} {when}")
        scores.append(f"{line[SCORE]:.3f} {when}")
    said = [f"Held-out prompts answered correctly: {', '.join(rates)}"] if rates else []
    # With a reward between 0 and 1, an answer can score something without being correct
    if any(line[SCORE] != line[RATE] for line in evaluations):
        said.append(f"Mean verifiable score of their answers: {', '.join(scores)}")
        said += [] if any(line[RATE] for line in evaluations) else [NONE_RIGHT]
    return said


def describe_troubles(metrics: list[dict]) -> list[str]:
    """Return warnings: there was nothing to learn from, or many responses were truncated."""
    sentences, last = [], metrics[-1]
    if all(line.get("objective/scores_std", 1) <= 0 for line in metrics):
        said = f"All responses of a step always had the same score ({last['objective/scores']:g}"
        sentences.append(f"{said} in the last step), so there was nothing to learn from")
    truncated = 1 - last.get("objective/stop_rate", 1)  # a reward trainer's run has no stop rate
    if truncated > 0.2:
        advice = "a higher --response_length or --non_stop_penalty helps"
        sentences.append(f"{truncated:.0%} of the last responses were truncated: {advice}")
    return sentences


# ------------------------------------------------------------------------------ --summary


def describe_samples(samples: list[dict], number: int = 3) -> list[str]:
    """Return answers to the first held-out prompts, by the first and by the last policy."""
    versions = sorted({sample["policy_version"] for sample in samples})
    answers = defaultdict(dict)
    for row in samples:
        answers[row["prompt"], row.get("ground_truth")][row["policy_version"]] = row
    asked = [each for each in answers.values() if {versions[0], versions[-1]} <= each.keys()]
    lines = []
    for each in asked[:number] if len(versions) > 1 else []:
        lines += ["", end_of_prompt(each[versions[0]])]
        for when, version in (("before", versions[0]), ("after", versions[-1])):
            score = show_score(each[version]["score"])
            answer = both_ends(in_one_line(text_of(each[version])), 200)
            lines.append(f"  {when}, score {score}: {answer}")
    return lines


def next_steps(run_dir: Path) -> list[str]:
    """Return the next commands, as they can be typed where this program was called."""
    python = Path(sys.prefix).with_name(".venv") / "bin/python"  # a link to this environment
    if not (python.exists() and python.parent.samefile(Path(sys.executable).parent)):
        python = sys.executable

    def command(program, *words):
        paths = [python, Path(__file__).with_name(program), run_dir, *words]
        return shlex.join(str(path).removeprefix(f"{Path.cwd()}/") for path in paths)

    lines = [
        f"Look at it:  {command('inspect_run.py')}",
        f"As a page:   {command('report.py')}",
        f"Compare it:  {command('plot_runs.py', 'OTHER_RUN')}",
    ]
    model = run_dir / "model"
    steps = [path.name.removeprefix("step_") for path in run_dir.glob("checkpoints/step_*")]
    steps = [int(step) for step in steps if step.isdecimal()]
    if model.is_dir():
        lines.append(f'Use it:      transformers.AutoModelForCausalLM.from_pretrained("{model}")')
        # vLLM would choose bfloat16, whose rounding removes part of what a merged adapter changed
        dtype = ', dtype="float32"' if (run_dir / "adapter").is_dir() else ""
        lines.append(f'             vllm.LLM("{model}"{dtype})')
    elif steps:
        newest = run_dir / f"checkpoints/step_{max(steps)}"
        lines.append(f"Resume it:   repeat its command with --resume_from_checkpoint {newest}")
    return lines


def print_summary(run_dir: Path, args: dict, metrics: list[dict]):
    draw_run(run_dir)
    sentences = [*describe_evaluations(metrics), *describe_troubles(metrics)]
    sentences += [describe_speed(metrics), *describe_samples(read_lines(run_dir / "samples.jsonl"))]
    named = [what for what, file in FILES.items() if (run_dir / file).exists()]
    sentences += ["", f"{', '.join(named).capitalize()}: {run_dir}", *next_steps(run_dir)]
    print(*(said for said in sentences if said is not None), sep="\n")


# ------------------------------------------------------------------------------ the last responses


def show_truth(row: dict) -> list[str]:
    truth = in_one_line(row["ground_truth"])
    return [f"Ground truth: {both_ends(truth, 100)}"] if truth != "None" else []


def show_responses(rows: list[dict], number: int) -> Iterator:
    """Yield, for each prompt, the response with the highest score and the one with the lowest."""
    groups = defaultdict(list)
    for row in rows:
        groups[row["prompt"]].append(row)
    step, version = rows[0]["training_step"], rows[0]["policy_version"]
    age = step - 1 - version
    late = f", {age} step{'s' * (age > 1)} old" if age else ""
    yield f"\nResponses of step {step}, generated by policy version {version}{late}"
    left = number
    for group in groups.values():
        best_first = sorted(group, key=lambda row: row["score"] or 0, reverse=True)
        shown = (best_first[:1] + best_first[1:][-1:])[:left]
        if not shown:
            break
        left -= len(shown)
        yield Text(f"\n{end_of_prompt(group[0])}", "bold")
        yield from show_truth(group[0])
        if len(group) > 1:
            yield "Scores: " + " ".join(show_score(row["score"]) for row in group)
        for row in shown:
            yield show_figures(row)
            answer = both_ends(printable(text_of(row)), LETTERS)
            yield Padding(answer, (0, 0, 0, 2), expand=False)
    shown = f"\n{number - left} of {len(rows)} responses are shown"
    yield f"{shown}. --responses N shows more, report.py shows all"


# ------------------------------------------------------------------------------ the program


def show_run(run_dir: Path, args: dict, metrics: list[dict], number: int) -> Iterator:
    yield f"{args['run_name']}: {args['exp_name']}, {args['model_name_or_path']}"
    yield shlex.join(args.get("provenance", {}).get("command", []))
    if not metrics:
        yield "No step has finished yet"
        return
    yield describe_progress(run_dir, args, metrics)
    run = Run(args["run_name"], metrics, args)
    yield "\n".join(["", *lines_of_table([run]), ""])
    yield from [*describe_evaluations(metrics), *describe_troubles(metrics)]
    yield describe_speed(metrics) or "Nothing stands out that limited its speed"
    yield from filter(None, [describe_costs(run_dir, args, metrics)])
    steps = read_rollouts(run_dir)
    if steps:
        yield from show_responses([json.loads(row) for row in steps[max(steps)]], number)


def main():
    sys.stdout.reconfigure(errors="backslashreplace")  # a terminal may support only ASCII
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="Folder of the run.")
    summary = "Print the summary that the scripts print at the end of a run."
    parser.add_argument("--summary", action="store_true", help=summary)
    responses = "Number of responses to show, up to two for each prompt (default 8)."
    parser.add_argument("--responses", type=int, default=8, metavar="N", help=responses)
    options = parser.parse_args()
    run_dir = options.run.expanduser()
    if not (run_dir / "args.json").is_file():
        parser.error(f"{run_dir} is not the folder of a run, because it has no args.json")
    args, metrics = read_args(run_dir), read_metrics(run_dir)
    if options.summary and not metrics:
        parser.error(f"{run_dir} has no metrics.jsonl yet, because the run has finished no step")
    if options.summary:
        print_summary(run_dir, args, metrics)
    else:
        console = Console(markup=False, emoji=False, highlight=False)
        console.print(*show_run(run_dir, args, metrics, options.responses), sep="\n")


if __name__ == "__main__":
    main()
