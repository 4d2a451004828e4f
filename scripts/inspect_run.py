"""Shows a run in the terminal, while it goes on or when it is finished.

What run it is, how far it came, its last numbers, what limited its speed, and
training responses of the last step.

    python scripts/inspect_run.py output/RUN
    # again every 10 seconds
    watch -n 10 python scripts/inspect_run.py output/RUN
    # what the scripts print at a run's end: answers before and after training,
    # what limited its speed, commands that go on from here; draws the pictures
    python scripts/inspect_run.py output/RUN --summary

Curves, tokens with their numbers, wrong answers by evaluation: report.py.
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

from plot_runs import Run, draw_run, lines_of_table
from rich.console import Console
from rich.padding import Padding
from rich.text import Text
from run_files import matrices_in, read_args, read_lines, read_metrics, read_rollouts

RATE, SCORE = "eval/verifiable_correct_rate", "eval/verifiable_score"
NONE_RIGHT = "No answer counts as right: that takes a score of 1, or a reward that returns `right`"
# What --summary names where it is there: an interrupted run has no model
FILES = {"model": "model", "metrics": "metrics.jsonl", "samples": "samples.jsonl"}
FILES |= {"curves": "curves.png", "prompts' lengths": "token_length.png"}
LETTERS = 500  # of a response at most

# What is timed, time/NAME: on the side of vLLM, which works beside training in an asynchronous
# run, with what helps where it is waited for; and on the learner's
GENERATION = {
    "generation": "shorter responses help, or more GPUs for vLLM (--vllm_gpus) if there are any",
    "reward": "more --reward_workers or a faster reward help",
    "evaluation": "a smaller --num_evals or fewer --num_eval_prompts help",
}
TRAINING = ["update", "forward", "reward_model", "weight_sync", "checkpoint"]
WAITS = ["wait_for_generation", "wait_for_prompts"]
LONG = 0.15  # a share of the time that is worth a word


def printable(text: str) -> str:
    """Without the control characters that a terminal would obey."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", " ", text)


def both_ends(text: str, number: int) -> str:
    """The first and last characters of a text that has more than `number`."""
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
    """A response; of several turns what was observed is in brackets."""
    turns = row.get("turns") or [row["response"]]
    return " ".join(f"[{turn}]" if i % 2 else turn for i, turn in enumerate(turns))


def show_score(score: float | None) -> str:
    return "none (the reward failed)" if score is None else f"{score:.3g}"


def show_figures(row: dict) -> str:
    """A response's score, the parts of it, what else its reward returned, or why it failed.

    >>> row = {"score": 0.5, "verifiable_score": 1.0, "length": 7, "stopped": True}
    >>> show_figures(row | {"reward_model_score": -0.5, "reward_metrics": {"strict": 1.0}})
    'score 0.5, verifiable 1, reward model -0.5, strict 1, 7 tokens, stopped'
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
    end = "stopped" if row["stopped"] else "cut"
    return printable(", ".join([*figures, f"{row['length']} tokens", end]))


def describe_progress(run_dir: Path, args: dict, metrics: list[dict]) -> str:
    """How far a run came; if it is not at its end, how long ago it wrote that."""
    steps = args.get("num_training_steps") or args["num_updates"]  # of a reward model
    last = metrics[-1]
    since = (time.time() - (run_dir / "metrics.jsonl").stat().st_mtime) / 60
    ago = "" if last["training_step"] == steps else f"; that was {since:.1f} minutes ago"
    minutes = last["time/from_scratch"] / 60
    return f"Step {last['training_step']:.0f} of {steps}, after {minutes:.1f} minutes{ago}"


def describe_speed(metrics: list[dict]) -> str | None:
    """Which side of a run waited for the other, and what to do about it.

    None: neither waited for long, or there are too few steps to know. Where the sides take turns
    none of them waits; then it says what a step was spent on.
    """
    # A process begins with waiting: for its models, and for the first responses. Those of step 2
    # were asked for when nothing was trained yet
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
        said = f"Generation and training took turns (a step: {spent})"
        is_slow = seconds["reward"] >= LONG * training
        return f"{said}. The reward is slow: {GENERATION['reward']}" if is_slow else said

    # A wait reaches over several steps of the learner, so it is compared with what generation does
    vllm_waited = seconds["wait_for_prompts"] / (seconds["wait_for_prompts"] + generation)
    learner_waited = seconds["wait_for_generation"] / training
    if max(vllm_waited, learner_waited) < LONG:
        return None
    if vllm_waited > learner_waited:
        said = f"vLLM waited for the learner {vllm_waited:.0%} of the time (a training step: "
        return f"{said}{shares(TRAINING, training)}): more learners or shorter responses help"
    slow = [part for part in GENERATION if seconds[part] >= generation / 3]
    said = f"The learner waited for {' and '.join(slow)} {learner_waited:.0%} of the time"
    remedies = "; ".join(GENERATION[part] for part in slow)
    return f"{said} (a batch: {shares(GENERATION, generation)}): {remedies}"


def model_flops(run_dir: Path, args: dict, metrics: list[dict]) -> tuple[float, float] | None:
    """FLOPs for a token that is in an update: of the update, and of the passes before it.

    By plan.flops_of_token, for policy and value model, which has no head. GRPO's first mini-batch
    has no pass of the policy before. None: there is no saved model.
    """
    model = run_dir / "model"
    if not (model / "config.json").is_file():
        return None
    import plan  # which loads torch

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
    """Model FLOPs as a share of the learners' peak, in updates and over whole steps, or nothing."""
    gpu = args.get("provenance", {}).get("gpu")
    flops = model_flops(run_dir, args, metrics) if gpu else None
    peak = flops and sys.modules["plan"].peak_of(gpu)
    if not peak:
        return ""
    of_gpus = peak[0] * args["world_size"] / mean(line["val/update_tokens"] for line in metrics)
    in_updates, in_all = flops[0] / times["update"], sum(flops) / times["training"]
    said = f"{in_updates / of_gpus:.1%} of the peak in updates, {in_all / of_gpus:.1%} over all"
    return f"; model FLOPs {said} ({gpu})"


def describe_costs(run_dir: Path, args: dict, metrics: list[dict]) -> str | None:
    """A line to compare runs by: rates, the GPUs' utilization, seconds of a step, and memory.

    None: no step is known that has them. Left out are the first two steps and the last, which wait
    or do not overlap, where there are others.
    """
    steps = [line for line in metrics if "val/update_tokens" in line]
    steps = steps[2:-1] or steps
    if not steps:
        return None
    names = [*TRAINING, *GENERATION, *WAITS, "training"]
    times = {name: mean(line.get(f"time/{name}", 0) for line in steps) for name in names}
    sampled = mean(line["perf/response_tokens_per_second"] for line in steps)
    read = mean(line["val/update_tokens"] for line in steps)
    rates = f"{sampled:,.0f} response tokens a second, learner {read / times['update']:,.0f} in "
    rates += f"updates and {read / times['training']:,.0f} over all"
    utilization = describe_utilization(run_dir, args, steps, times)
    whole = times.pop("training")
    spent = ", ".join(f"{name} {s:.3g}" for name, s in times.items() if s >= 0.01 * whole)
    memory = max(line["perf/memory_gib"] for line in metrics if "perf/memory_gib" in line)
    said = f"To compare: {rates}{utilization}; a step {whole:.3g} s ({spent})"
    return f"{said}; a learner's peak {memory:.3g} GiB"


def describe_evaluations(metrics: list[dict]) -> list[str]:
    """What the first and the last evaluation say: answers right, and where it differs their score.

    >>> first, last = {RATE: 0.5, SCORE: 0.5}, {RATE: 0.75, SCORE: 0.8, "eval/policy_version": 40}
    >>> print(*describe_evaluations([first | {"eval/policy_version": 0}, {}, last]), sep="\\n")
    Held-out prompts answered right: 50.0% before training, 75.0% after 40 steps
    Mean verifiable score of their answers: 0.500 before training, 0.800 after 40 steps
    """
    evaluations = [line for line in metrics if RATE in line]
    rates, scores = [], []
    for line in [*evaluations[:1], *evaluations[1:][-1:]]:
        version = line["eval/policy_version"]  # the steps that the policy had trained
        when = f"after {version:.0f} steps" if version > 0 else "before training"
        rates.append(f"{line[RATE]:.1%} {when}")
        scores.append(f"{line[SCORE]:.3f} {when}")
    said = [f"Held-out prompts answered right: {', '.join(rates)}"] if rates else []
    # Rewards that are shares of 1: an answer may be worth something and not be right
    if any(line[SCORE] != line[RATE] for line in evaluations):
        said.append(f"Mean verifiable score of their answers: {', '.join(scores)}")
        said += [] if any(line[RATE] for line in evaluations) else [NONE_RIGHT]
    return said


def describe_troubles(metrics: list[dict]) -> list[str]:
    """Whether there was nothing to learn from, and whether many of the last responses were cut."""
    sentences, last = [], metrics[-1]
    if all(line.get("objective/scores_std", 1) <= 0 for line in metrics):
        said = f"In every step all responses scored alike, at last {last['objective/scores']:g}"
        sentences.append(f"{said}: there was nothing to learn from")
    cut = 1 - last.get("objective/stop_rate", 1)  # a reward trainer's run has none
    if cut > 0.2:
        advice = "a longer --response_length or --non_stop_penalty helps"
        sentences.append(f"{cut:.0%} of the last responses were cut: {advice}")
    return sentences


# ------------------------------------------------------------------------------ --summary


def describe_samples(samples: list[dict], number: int = 3) -> list[str]:
    """Answers to the first held-out prompts, by the first policy that was asked and by the last."""
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
    """Commands that go on from here, as they can be typed where this program was called."""

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
        # vLLM would choose bfloat16, which rounds a part of a merged adapter's change away
        dtype = ', dtype="float32"' if (run_dir / "adapter").is_dir() else ""
        lines.append(f'             vllm.LLM("{model}"{dtype})')
    elif steps:
        newest = run_dir / f"checkpoints/step_{max(steps)}"
        lines.append(f"Resume it:   its command with --resume_from_checkpoint {newest}")
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
    """Of each prompt the response with the highest score and the one with the lowest."""
    groups = defaultdict(list)
    for row in rows:
        groups[row["prompt"]].append(row)
    step, version = rows[0]["training_step"], rows[0]["policy_version"]
    age = step - 1 - version
    late = f", which were {age} step{'s' * (age > 1)} old" if age else ""
    yield f"\nResponses of step {step}, sampled by the weights after step {version}{late}"
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
    yield f"\n{number - left} of {len(rows)} responses; --responses N shows more, report.py all"


# ------------------------------------------------------------------------------ the program


def show_run(run_dir: Path, args: dict, metrics: list[dict], number: int) -> Iterator:
    yield f"{args['run_name']}: {args['exp_name']}, {args['model_name_or_path']}"
    yield shlex.join(args.get("provenance", {}).get("command", []))
    if not metrics:
        yield "No step is finished yet"
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
    sys.stdout.reconfigure(errors="backslashreplace")  # a terminal may know ASCII alone
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("--summary", action="store_true", help="what the scripts say at its end")
    responses = "how many responses at most, of each prompt two (8)"
    parser.add_argument("--responses", type=int, default=8, metavar="N", help=responses)
    options = parser.parse_args()
    run_dir = options.run.expanduser()
    if not (run_dir / "args.json").is_file():
        parser.error(f"{run_dir} holds no args.json: it is not the folder of a run")
    args, metrics = read_args(run_dir), read_metrics(run_dir)
    if options.summary and not metrics:
        parser.error(f"{run_dir} has no metrics.jsonl yet: the run made no step")
    if options.summary:
        print_summary(run_dir, args, metrics)
    else:
        console = Console(markup=False, emoji=False, highlight=False)
        console.print(*show_run(run_dir, args, metrics, options.responses), sep="\n")


if __name__ == "__main__":
    main()
