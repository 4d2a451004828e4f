"""Shows a run in the terminal, while it goes on or when it is finished.

What run it is, its curves, what limited its speed, and the last training
responses with their tokens coloured by advantage.

    python scripts/inspect_run.py output/RUN
    # again every 10 seconds, until the run is at its end or Ctrl-C
    python scripts/inspect_run.py output/RUN --watch 10
    # what the scripts print at a run's end: answers before and after training,
    # what limited its speed, commands that go on from here; draws the pictures
    python scripts/inspect_run.py output/RUN --summary
    # what the model gets wrong: held-out prompts by evaluation, those that it
    # once got right first, with what they scored before; training responses
    python scripts/inspect_run.py output/RUN --wrong

A response is right where its verifiable score is 1 or more, as in the run's
metrics. Older runs have its score alone: there it is right from
--verification_reward on.
"""

import argparse
import contextlib
import functools
import json
import math
import os
import re
import shlex
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import groupby, pairwise
from operator import itemgetter
from pathlib import Path
from statistics import mean

import psutil
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from plot_runs import draw_run, own_metrics, read_lines, read_metrics
from rich.console import Console, Group
from rich.live import Live
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from tokenizers import Tokenizer

RATE, SCORE = "eval/verifiable_correct_rate", "eval/verifiable_score"
NONE_RIGHT = "No answer counts as right: that takes a score of 1, or a reward that returns `right`"
CURVES = ["objective/scores", RATE, "objective/kl", "policy/entropy_avg"]
CURVES += ["objective/sequence_lengths", "objective/stop_rate", "val/explained_variance"]
CURVES += ["objective/accuracy", "eval/accuracy"]  # of a reward model
BLOCKS = "▁▂▃▄▅▆▇█"
GREY, GREEN, RED = (128, 128, 128), (0, 170, 0), (220, 0, 0)  # seen on black and on white
BLOCK = 2**20  # bytes of rollouts.jsonl that are read at a time: it grows with the run
NO_NUMBERS = {"token_ids", "turns", "observed"}  # lists of a line that are no number for each token
# What is shown at most
MOST_METRICS = 8  # of a reward's own, with a response
SHOWN_TURNS = 4  # of a long response's beginning, and of its end
SHOWN_EVALUATIONS = 6  # of a run's beginning, and of its end
LETTERS = 4  # for each of --tokens, of responses without tokens
WRONG_STEPS = 20  # in whose responses wrong ones are looked for

# What is timed (time/NAME) and what it is called: on the side of vLLM, which works beside training
# in an asynchronous run, and on the learner's
GENERATION = {"generation": "generation", "reward": "rewards", "evaluation": "evaluations"}
TRAINING = {
    "update": "updates",
    "forward": "forward passes",
    "reward_model": "reward model",
    "weight_sync": "weight sync",
    "checkpoint": "checkpoints",
}
# Who is waited for, and what helps
REMEDIES = {
    "generation": ("vLLM", "more GPUs for vLLM (--vllm_gpus) or shorter responses help"),
    "reward": ("the rewards", "more --reward_workers or a faster reward help"),
    "evaluation": ("the evaluations", "a smaller --num_evals or fewer --num_eval_prompts help"),
}
LONG = 0.15  # a share of the time that is worth a word


def printable(text: str) -> str:
    """Without the control characters that a terminal would obey."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", " ", text)


def end_of_prompt(prompt: str) -> str:
    """The end of a prompt, which says what was asked, in one line."""
    prompt = printable(" ".join(prompt.split()))
    return prompt if len(prompt) <= 200 else f"... {prompt[-200:]}"


def in_one_line(text: str, width: int) -> str:
    """The beginning of a text, whatever it is written in.

    >>> in_one_line("5 + 6\\nis 11", width=20), in_one_line("ab" * 50, width=10)
    ('5 + 6 is 11', 'ababab ...')
    """
    text = printable(" ".join(text.split()))
    return text if len(text) <= width else f"{text[: max(0, width - 4)]} ..."


def without_middle(items: list, number: int, gap) -> list:
    """A long list's first and last `number` items; gap: of how many are left out what stands there.

    >>> without_middle([1, 2, 3, 4, 5, 6, 7], number=2, gap=lambda count: f"{count} more")
    [1, 2, '3 more', 6, 7]
    """
    left_out = len(items) - 2 * number
    if left_out <= 0:
        return items
    return [*items[:number], gap(left_out), *items[len(items) - number :]]


def both_ends(text: str, number: int) -> str:
    """The first and last characters of a text that has more than `number`."""
    if len(text) <= number:
        return text
    half = number // 2
    gap = f" [... {len(text) - 2 * half} more characters ...] "
    return text[:half] + gap + text[len(text) - half :]


def show_score(score: float | None) -> str:
    """None: its reward failed."""
    return "none" if score is None else f"{score:.3g}"


def show_reward(row: dict) -> str:
    """A response's score, the parts of it, and what else its reward returned, or why it failed.

    >>> parts = {"verifiable_score": 1.0, "reward_model_score": -0.5}
    >>> show_reward({"score": 0.5, "reward_metrics": {"strict": 1.0}} | parts)
    'score 0.5 (verifiable 1, reward model -0.5), strict 1'
    >>> show_reward({"score": None, "failure": "Traceback ...\\nValueError: no number\\n"})
    'score none, ValueError: no number'
    """
    said = f"score {show_score(row['score'])}"
    model = row.get("reward_model_score")
    parts = {"verifiable": row.get("verifiable_score"), "reward model": model}
    parts = [f"{name} {value:.3g}" for name, value in parts.items() if value is not None]
    if len(parts) > 1 or row.get("verifiable_score") not in (None, row["score"]):
        said += f" ({', '.join(parts)})"
    metrics = [f"{name} {value:.3g}" for name, value in row.get("reward_metrics", {}).items()]
    left_out = [f"{len(metrics) - MOST_METRICS} more"] if len(metrics) > MOST_METRICS else []
    lines = (row.get("failure") or "").split("\n")
    reasons = [in_one_line(line, 200) for line in lines if line.strip()][-1:]
    return ", ".join(map(printable, [said, *metrics[:MOST_METRICS], *left_out, *reasons]))


# ------------------------------------------------------------------------------ the speed


def describe_speed(metrics: list[dict]) -> str | None:
    """Which side of a run waited for the other, and what to do about it.

    None: neither waited for long, or there are too few steps to know. Where the sides take turns
    none of them waits; then it says what a step was spent on.
    """
    is_async = any(line.get("policy/staleness") for line in metrics)
    training = dict(TRAINING)
    if not any("objective/reward_model_score" in line for line in metrics):
        training["reward_model"] = "reports of evaluations"  # what is timed there besides
    # A process begins with waiting: for its models, and for the first responses. Those of step 2
    # were asked for when nothing was trained yet
    generated = "time/generation"
    steps = [line for last, line in pairwise(metrics) if generated in last and generated in line]
    seconds = Counter()
    for line in steps[1:]:
        seconds.update({name.removeprefix("time/"): value for name, value in line.items()})
    if not seconds["training"]:
        return None

    if not is_async:
        spent = describe_shares(seconds, GENERATION | training, seconds["training"])
        said = f"Generation and training took turns (a step: {spent})"
        if seconds["reward"] < LONG * seconds["training"]:
            return said
        return f"{said}. The reward is slow: {REMEDIES['reward'][1]}"

    generation = sum(seconds[part] for part in GENERATION)
    # A wait reaches over several steps of the learner, so it is compared with what generation does
    vllm_waited = seconds["wait_for_prompts"] / (seconds["wait_for_prompts"] + generation)
    learner_waited = seconds["wait_for_generation"] / seconds["training"]
    if max(vllm_waited, learner_waited) < LONG:
        return None
    if vllm_waited > learner_waited:
        spent = describe_shares(seconds, training, seconds["training"])
        return (
            f"vLLM waited for the learner {vllm_waited:.0%} of the time (a training step: "
            f"{spent}): more learners or shorter responses help"
        )
    spent = describe_shares(seconds, GENERATION, generation)
    slow = [REMEDIES[part] for part in GENERATION if seconds[part] >= generation / 3]
    waited_for = " and ".join(who for who, _ in slow)
    remedies = "; ".join(remedy for _, remedy in slow)
    return (
        f"The learner waited for {waited_for} {learner_waited:.0%} of the time (a batch: "
        f"{spent}): {remedies}"
    )


def describe_shares(seconds, parts: dict[str, str], whole: float) -> str:
    """What share of the whole each part took, where that is 1% or more.

    >>> describe_shares({"update": 3.0, "weight_sync": 1.0, "forward": 0.0}, TRAINING, 4.0)
    'updates 75%, weight sync 25%'
    """
    shares = {called: seconds.get(part, 0.0) / whole for part, called in parts.items()}
    return ", ".join(f"{called} {share:.0%}" for called, share in shares.items() if share >= 0.01)


# ------------------------------------------------------------------------------ --summary


def describe_evaluations(metrics: list[dict]) -> list[str]:
    """What the first and the last evaluation say: answers right, and where it differs their score.

    >>> first, last = {RATE: 0.5}, {RATE: 0.75, SCORE: 0.8, "eval/policy_version": 40}
    >>> describe_evaluations([first | {"eval/policy_version": 0}, {}, last])[0]
    'Held-out prompts answered right: 50.0% before training, 75.0% after 40 steps'
    >>> describe_evaluations([last])[1]
    'Mean verifiable score of their answers: 0.800 after 40 steps'
    >>> describe_evaluations([{RATE: 0.0, SCORE: 0.95, "eval/policy_version": 40}])[0]
    'Mean verifiable score of the answers to held-out prompts: 0.950 after 40 steps'
    """

    def when(line):
        version = line["eval/policy_version"]  # the steps that the policy had trained
        return f"after {version:.0f} steps" if version > 0 else "before training"

    evaluations = [line for line in metrics if RATE in line]
    if not evaluations:
        return []
    shown = [evaluations[0], evaluations[-1]] if len(evaluations) > 1 else evaluations
    rates = [f"{line[RATE]:.1%} {when(line)}" for line in shown]
    scores = ", ".join(f"{line.get(SCORE, line[RATE]):.3f} {when(line)}" for line in shown)
    # Rewards that are shares of 1: an answer may be worth something and not be right
    if all(line.get(SCORE, line[RATE]) == line[RATE] for line in evaluations):
        return [f"Held-out prompts answered right: {', '.join(rates)}"]
    if not any(line[RATE] for line in evaluations):
        return [f"Mean verifiable score of the answers to held-out prompts: {scores}", NONE_RIGHT]
    return [
        f"Held-out prompts answered right: {', '.join(rates)}",
        f"Mean verifiable score of their answers: {scores}",
    ]


def describe_troubles(metrics: list[dict]) -> list[str]:
    """Whether there was nothing to learn from, and whether many of the last responses were cut.

    >>> for said in describe_troubles([{"objective/scores": 0.0, "objective/scores_std": 0.0}]):
    ...     print(said)
    In every step all responses scored alike, at last 0: there was nothing to learn from
    >>> print(*describe_troubles([{"objective/stop_rate": 0.25}]))
    75% of the last responses were cut: a longer --response_length or --non_stop_penalty helps
    """
    sentences = []
    if all(line.get("objective/scores_std", 1) <= 0 for line in metrics):
        score = f"{metrics[-1]['objective/scores']:g}"
        said = f"In every step all responses scored alike, at last {score}"
        sentences.append(f"{said}: there was nothing to learn from")
    cut = 1 - metrics[-1].get("objective/stop_rate", 1)  # a reward trainer's run has none
    if cut > 0.2:
        advice = "a longer --response_length or --non_stop_penalty helps"
        sentences.append(f"{cut:.0%} of the last responses were cut: {advice}")
    return sentences


def describe_samples(samples: list[dict], number: int = 3) -> list[str]:
    """Answers to the first held-out prompts, by the first policy that was asked and by the last."""
    versions = sorted({sample["policy_version"] for sample in samples})
    if len(versions) < 2:
        return []
    ends = {versions[0], versions[-1]}
    asked = [answers for answers in answers_by_prompt(samples) if ends <= answers.keys()]
    lines = []
    for answers in asked[:number]:
        lines += ["", end_of_prompt(answers[versions[0]]["prompt"])]
        for when, version in (("before", versions[0]), ("after", versions[-1])):
            score, response = show_score(answers[version]["score"]), show_turns(answers[version])
            lines.append(f"  {when}, score {score}: {response}")
    return lines


def show_turns(sample: dict) -> str:
    """A response in one line of about 200 characters: of many turns the first ones and the last.

    What was observed is in brackets.

    >>> show_turns({"turns": ["7", "8", "9"]})
    '7 [8] 9'
    >>> show_turns({"turns": list("abcdefghijk")})
    'a [b] c [d] ... 3 more ... [h] i [j] k'
    """
    turns = sample.get("turns") or [sample["response"]]
    width = 200 // min(len(turns), 2 * SHOWN_TURNS)
    turns = [in_one_line(text, width) for text in turns]
    turns[1::2] = [f"[{text}]" for text in turns[1::2]]
    return " ".join(without_middle(turns, SHOWN_TURNS, lambda count: f"... {count} more ..."))


def next_steps(run_dir: Path) -> list[str]:
    """Commands that go on from here, as they can be typed where this program was called."""
    here, scripts = Path.cwd(), Path(__file__).parent

    def command(*words):
        paths = [Path(word) for word in (sys.executable, *words)]
        paths = [path.relative_to(here) if path.is_relative_to(here) else path for path in paths]
        return shlex.join(map(str, paths))

    lines = [
        f"Look at it:  {command(scripts / 'inspect_run.py', run_dir)}",
        f"As a page:   {command(scripts / 'report.py', run_dir)}",
        f"Compare it:  {command(scripts / 'plot_runs.py', run_dir, 'OTHER_RUN')}",
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


def print_summary(run_dir: Path, metrics: list[dict]):
    draw_run(run_dir)
    sentences = [*describe_evaluations(metrics), *describe_troubles(metrics)]
    sentences.append(describe_speed(metrics))
    sentences += [*describe_samples(read_lines(run_dir / "samples.jsonl")), ""]
    sentences.append(f"Model, metrics, samples and pictures: {run_dir}")
    sentences += next_steps(run_dir)
    print(*(said for said in sentences if said is not None), sep="\n")


# ------------------------------------------------------------------------------ reward workers


def reward_workers_of(pid: int) -> list[psutil.Process]:
    """The processes of --reward_fn that a script, of this id, has started.

    Like vLLM's they lead a session each, but their parent is Python's fork server.
    """
    grandchildren = []
    for child in psutil.Process(pid).children():
        grandchildren += child.children()
    return [process for process in grandchildren if os.getsid(process.pid) == process.pid]


def advise_workers(metrics: list[dict], args: dict, cpu_seconds: float) -> str | None:
    """How many workers it takes where --reward_fn waits, as for a network; None: it does not.

    cpu_seconds: what the workers, and what they have started, have used of the cores so far. A
    function that computes gains nothing from more workers than cores.
    """
    last, workers = metrics[-1], args["reward_workers"]
    worker_seconds = workers * sum(line["time/reward"] for line in metrics)
    if cpu_seconds > 0.2 * worker_seconds:
        return None
    # With so many a batch would be graded in the time that it takes to generate it
    wanted = math.ceil(workers * last["time/reward"] / max(1.0, last["time/generation"]))
    wanted = min(wanted, args["episodes_per_step"])
    if wanted <= workers:
        return None
    waited = 1 - cpu_seconds / worker_seconds
    return (
        f"The reward takes {last['time/reward']:.3g} s a batch, in {waited:.0%} of which its "
        f"{workers} processes wait, as for a network: --reward_workers {wanted} would take about "
        f"as long as generation"
    )


def print_advice(run_dir: Path, metrics: list[dict]):
    """What a script asks for after its first batches."""
    workers = reward_workers_of(os.getppid())
    args = json.loads((run_dir / "args.json").read_bytes())
    advice = advise_workers(metrics, args, sum(sum(w.cpu_times()[:4]) for w in workers))
    if workers and advice:
        print(advice, flush=True)


# ------------------------------------------------------------------------------ curves


def sparkline(values, width=28) -> str:
    """A block for each value, or for the mean of neighbours where there are more than `width`.

    Changes of a few per cent look small, also where nothing else happens.

    >>> sparkline([0, 1, 2, 7])
    '▁▂▃█'
    >>> sparkline([6.0, 6.04, 6.0])
    '▁▂▁'
    >>> sparkline(range(100), width=4)
    '▁▃▆█'
    """
    count = min(width, len(values))
    edges = [len(values) * i // count for i in range(count + 1)]
    means = [mean(values[start:end]) for start, end in pairwise(edges)]
    low = min(means)
    span = max(max(means) - low, 0.05 * max(map(abs, means))) or 1.0
    return "".join(BLOCKS[round((value - low) / span * (len(BLOCKS) - 1))] for value in means)


def show_curves(metrics: list[dict]):
    """A table of CURVES and of the run's own metrics: first value, curve, last value."""
    table = Table("metric", "first", "", "last", box=None, pad_edge=False)
    for name in [*CURVES, *own_metrics(metrics)]:
        values = [line[name] for line in metrics if math.isfinite(line.get(name, math.nan))]
        if values:
            table.add_row(name, f"{values[0]:.3g}", sparkline(values), f"{values[-1]:.3g}")
    return table


# ------------------------------------------------------------------------------ responses


def read_backwards(path: Path) -> Iterator[dict]:
    """The lines of a .jsonl file, the last one first; without one that is half written."""
    if not path.is_file():
        return
    with open(path, "rb") as file:
        start, rest = file.seek(0, os.SEEK_END), b""
        is_whole = False  # what is behind the last end of a line
        while start > 0:
            size = min(start, BLOCK)
            start -= size
            file.seek(start)
            rest, *lines = (file.read(size) + rest).split(b"\n")
            for line in reversed(lines):
                if is_whole:
                    yield json.loads(line)
                is_whole = True
        if is_whole:
            yield json.loads(rest)


def last_responses(path: Path) -> list[dict]:
    """The lines in rollouts.jsonl of the last training step that has its tokens there."""
    for _, lines in groupby(read_backwards(path), key=itemgetter("training_step")):
        rows = [row for row in lines if "token_ids" in row]
        if rows:
            return rows[::-1]
    return []


@functools.cache
def load_tokenizer(run_dir: Path, name: str, revision: str | None):
    """The run's tokenizer, or while there is no model in the run's folder the one it began with.

    None: not here. Nothing is downloaded. (transformers would take seconds to start.)
    """
    for folder in (run_dir / "model", Path(name)):
        if (folder / "tokenizer.json").is_file():
            return Tokenizer.from_buffer((folder / "tokenizer.json").read_bytes())
    with contextlib.suppress(HFValidationError):  # a path
        path = try_to_load_from_cache(name, "tokenizer.json", revision=revision)
        if isinstance(path, str):
            return Tokenizer.from_buffer(Path(path).read_bytes())
    return None


def token_texts(token_ids: list[int], tokenizer) -> list[str | None]:
    """The text of each token. None: it is a part of a character, whose last token has the text."""
    texts, context, start = [], 0, 0
    for end in range(1, len(token_ids) + 1):
        # A token's text may depend on the one before it, such as a space at its beginning
        before = tokenizer.decode(token_ids[context:start], skip_special_tokens=False)
        text = tokenizer.decode(token_ids[context:end], skip_special_tokens=False)
        if text.endswith("\N{REPLACEMENT CHARACTER}") and end < len(token_ids):
            texts.append(None)
            continue
        texts.append(text[len(before) :])
        context, start = start, end
    return texts


def numbers_of(row: dict, name: str) -> list[float]:
    """A number for each of a response's token_ids: NaN for observed ones, which have none."""
    numbers = row[name]
    for start, end in row.get("observed", []):
        numbers = [*numbers[:start], *[math.nan] * (end - start), *numbers[start:]]
    return numbers


def split_response(row: dict, tokenizer) -> list[tuple[str, float]]:
    """(text, advantage) of each token of a response; without a tokenizer, of each word.

    Tokens that are parts of one character are together, with their mean. Observed ones have NaN.
    """
    if tokenizer is None:
        words = re.findall(r"\s*\S+", row["response"]) or [""]
        return [(word, mean(row["advantages"])) for word in words]
    pieces, parts = [], []
    texts = token_texts(row["token_ids"], tokenizer)
    for text, advantage in zip(texts, numbers_of(row, "advantages"), strict=True):
        parts.append(advantage)
        if text is not None:
            pieces.append((text, mean(parts)))
            parts = []
    return pieces


def style_of(advantage: float, largest: float) -> str:
    """A colour for an advantage: green above 0, red below, the stronger the larger.

    >>> style_of(0.5, largest=0.5), style_of(-0.1, largest=0.5), style_of(0.0, largest=0.5)
    ('rgb(0,170,0)', 'rgb(168,72,72)', '')
    """
    if math.isnan(advantage):
        return "italic"
    if advantage == 0:
        return ""
    share = 0.3 + 0.7 * abs(advantage) / largest
    strong = GREEN if advantage > 0 else RED
    channels = [round(a + share * (b - a)) for a, b in zip(GREY, strong, strict=True)]
    return f"rgb({','.join(map(str, channels))})"


def show_response(row, pieces, largest, number):
    """A line of figures, and below it the response: of more than `number` tokens the two ends."""
    average = mean(row["advantages"])
    advantage = f"advantage {average:+.2f}"
    in_order = sorted((p for p in pieces if not math.isnan(p[1])), key=lambda piece: piece[1])
    (worst, low), (best, high) = in_order[0], in_order[-1]
    if low < high:  # so that it can be seen without colours, too
        advantage += f" ({low:+.2f} at {worst!r} to {high:+.2f} at {best!r})"
    end = "stopped" if row["stopped"] else "cut"
    figures = f"{show_reward(row)}, {advantage}, {row['length']} tokens, {end}"
    pieces = without_middle(pieces, number // 2, lambda count: (f" [... {count} more ...] ", 0.0))
    text = Text.assemble(*((printable(piece), style_of(a, largest)) for piece, a in pieces))
    return [Text(figures, style_of(average, largest)), Padding(text, (0, 0, 0, 2), expand=False)]


def share_out(sizes: list[int], number: int) -> list[int]:
    """How many of each group are shown: equally many, as far as it has them, `number` in all.

    >>> share_out([1, 9, 3], number=8)
    [1, 4, 3]
    """
    places = sorted((place, group) for group, size in enumerate(sizes) for place in range(size))
    counts = Counter(group for _, group in places[:number])
    return [counts[group] for group in range(len(sizes))]


def choose(rows: list[dict], number: int) -> list[int]:
    """Indices of the responses that are shown: of each prompt equally many.

    Of a prompt's they are by turns those with the highest and the lowest advantage.

    >>> rows = [{"prompt": "a", "advantages": [value]} for value in (0.5, -0.1, 2.0, -0.2)]
    >>> choose([*rows, {"prompt": "b", "advantages": [0.0]}], number=4)
    [0, 2, 3, 4]
    """
    groups = defaultdict(list)
    for index, row in enumerate(rows):
        groups[row["prompt"]].append(index)
    counts = share_out([*map(len, groups.values())], number)
    chosen = []
    for group, count in zip(groups.values(), counts, strict=True):
        group.sort(key=lambda index: mean(rows[index]["advantages"]), reverse=True)
        chosen += [group.pop(-(place % 2)) for place in range(count)]
    return sorted(chosen)


def show_truth(row: dict) -> list[str]:
    if row["ground_truth"] in (None, "None"):  # a reward model alone scored
        return []
    return [f"Ground truth: {in_one_line(str(row['ground_truth']), 100)}"]


def show_scores(rows: list[dict]) -> str:
    return "Scores: " + " ".join(show_score(row["score"]) for row in rows)


def show_responses(rows: list[dict], tokenizer, options) -> list:
    """What rollouts.jsonl has of a step, with a heading for each prompt."""
    shown = [(rows[i], split_response(rows[i], tokenizer)) for i in choose(rows, options.responses)]
    advantages = [advantage for _, response in shown for _, advantage in response]
    largest = max((abs(each) for each in advantages if not math.isnan(each)), default=0.0)
    step, version = rows[0]["training_step"], rows[0]["policy_version"]
    parts = [
        Text(f"Responses of step {step}, sampled by policy version {version}", "bold"),
        "Green: an advantage above 0; red: below",
    ]
    if any(row.get("observed") for row in rows):
        parts.append("Italic: observed, not sampled")
    for prompt, responses in groupby(shown, key=lambda pair: pair[0]["prompt"]):
        group = [row for row in rows if row["prompt"] == prompt]
        parts += ["", Text(end_of_prompt(prompt), "bold"), *show_truth(group[0])]
        if len(group) > 1:
            parts.append(show_scores(group))
        for row, response in responses:
            parts += show_response(row, response, largest, options.tokens)
    if len(shown) < len(rows):
        parts += ["", f"{len(rows) - len(shown)} more are left out: --responses shows more"]
    return parts


# ------------------------------------------------------------------------------ --wrong


def is_right(row: dict, worth: float) -> bool | None:
    """Whether a response is right; None: it has no verifiable score.

    worth: the run's --verification_reward, for lines of older scripts, which have the score alone.
    """
    if row["ground_truth"] in (None, "None"):  # a reward model alone scored
        return None
    score, least = row["score"], worth
    if "verifiable_score" in row:
        score, least = row["verifiable_score"], 1
    if score is not None:
        score = row.get("reward_metrics", {}).get("right", score)
    return None if score is None else score >= least


def answers_by_prompt(samples: list[dict]) -> list[dict[int, dict]]:
    """Of each held-out prompt {policy version: its answer's line}. Prompts may be there twice."""
    answers, times = defaultdict(dict), Counter()
    for row in samples:
        prompt, version = (row["prompt"], row.get("ground_truth")), row["policy_version"]
        times[prompt, version] += 1
        answers[prompt, times[prompt, version]][version] = row
    return list(answers.values())


def show_evaluations(prompts: list[dict[int, dict]], versions: list[int], worth: float) -> Table:
    """A line for each evaluation: how many prompts are right, and what changed since the last."""
    table = Table("steps trained", box=None, pad_edge=False)
    for heading in ("right", "wrong", "not known", "learned", "lost"):
        table.add_column(heading, justify="right")
    rows, before = [], []
    for version in versions:
        now = [is_right(each[version], worth) if version in each else ... for each in prompts]
        counts = [now.count(known) for known in (True, False, None)]
        if before:
            changes = list(zip(before, now, strict=True))
            counts += [changes.count((False, True)), changes.count((True, False))]
        rows.append([str(version), *map(str, counts)])
        before = now
    for row in without_middle(rows, SHOWN_EVALUATIONS, lambda count: [f"... {count} more ..."]):
        table.add_row(*row)
    return table


def show_sources(wrong: list[dict], rows: list[dict]) -> list[str]:
    """How many are wrong of each data source, where there are several; of the worst ten."""
    whole = Counter(str(row.get("data_source")) for row in rows)
    counts = Counter(str(row.get("data_source")) for row in wrong).most_common()
    if len(whole) == 1 or not wrong:
        return []
    said = [f"{source} {count} of {whole[source]}" for source, count in counts[:10]]
    left_out = [f"{len(counts) - 10} more sources"] if len(counts) > 10 else []
    return ["", f"Wrong by data source: {printable(', '.join(said + left_out))}"]


def show_figures(row: dict) -> str:
    end = "stopped" if row["stopped"] else "cut"
    return f"{show_reward(row)}, {row['length']} tokens, {end}"


def show_answer(row: dict, said: str, number: int) -> list:
    """Figures, and the text of a response; of more than `number` characters the two ends."""
    turns = list(row.get("turns") or [row["response"]])
    turns[1::2] = [f"[{text}]" for text in turns[1::2]]
    text = both_ends(printable("\n".join(turns)), number)
    return [said + show_figures(row), Padding(Text(text), (0, 0, 0, 2), expand=False)]


def show_history(answers: dict[int, dict], worth: float, number: int) -> list:
    """A held-out prompt: its scores by evaluation, its last right answer, and the last one."""
    *before, last = answers
    parts = ["", Text(end_of_prompt(answers[last]["prompt"]), "bold"), *show_truth(answers[last])]
    if before:
        scores = [f"{version}: {show_score(row['score'])}" for version, row in answers.items()]
        scores = without_middle(scores, SHOWN_EVALUATIONS, lambda count: f"... {count} more ...")
        parts.append(f"Scores by steps trained: {', '.join(scores)}")
    right = [version for version in before if is_right(answers[version], worth)]
    if right:
        row = answers[right[-1]]
        parts.append(f"After {right[-1]} steps: {show_reward(row)}: {show_turns(row)}")
    return [*parts, *show_answer(answers[last], f"After {last} steps: ", number)]


def show_wrong_answers(samples: list[dict], worth: float, options) -> list:
    """Held-out prompts that are wrong at the last evaluation in samples.jsonl."""
    versions = sorted({row["policy_version"] for row in samples})
    prompts = answers_by_prompt(samples)
    parts = [Text("Held-out prompts", "bold"), "", show_evaluations(prompts, versions, worth)]

    asked = [answers for answers in prompts if versions[-1] in answers]
    now = [is_right(answers[versions[-1]], worth) for answers in asked]
    groups = {"Wrong now, and right before": [], "Never right": [], "Their reward failed": []}
    for answers, right in zip(asked, now, strict=True):
        row = answers[versions[-1]]
        if right is False:
            was_right = any(is_right(before, worth) for before in answers.values())
            name = "Wrong now, and right before" if was_right else "Never right"
            groups[name].append(answers)
        elif row.get("failure") or row["score"] is None:
            groups["Their reward failed"].append(answers)
    rows = [answers[versions[-1]] for answers in asked]
    wrong = [row for row, right in zip(rows, now, strict=True) if right is False]
    parts += show_sources(wrong, rows)
    if set(now) == {None}:
        asked.sort(key=lambda answers: answers[versions[-1]]["score"] or 0)
        groups = {"No answer has a verifiable score. Those with the lowest scores": asked}
    counts = share_out([*map(len, groups.values())], options.responses)
    for (title, group), count in zip(groups.items(), counts, strict=True):
        if group:
            said = f"{title}: {len(group):,} of {len(asked):,} prompts"
            said += f", of which {count} are shown" if count < len(group) else ""
            parts += ["", Text(said, "bold")]
        for answers in group[:count]:
            parts += show_history(answers, worth, LETTERS * options.tokens)
    return parts


def show_wrong_responses(path: Path, worth: float, options) -> list:
    """Wrong responses of the last training steps that rollouts.jsonl has."""
    rows = []
    for row in read_backwards(path):
        if rows and row["training_step"] <= rows[0]["training_step"] - WRONG_STEPS:
            break
        numbers = {name for name, value in row.items() if isinstance(value, list)}
        rows.append({name: row[name] for name in row.keys() - (numbers - {"turns"})})
    rows.reverse()
    groups = defaultdict(list)
    for row in rows:
        groups[row["training_step"], row["prompt"]].append(row)
    wrong = [row for row in rows if is_right(row, worth) is False]
    known = [row for row in rows if is_right(row, worth) is not None]
    steps = f"steps {rows[0]['training_step']} to {rows[-1]['training_step']}"
    said = f"Training responses of {steps}: {len(wrong):,} of {len(known):,} are wrong"
    first = {(row["training_step"], row["prompt"]): row for row in reversed(wrong)}
    shown = sorted(first.values(), key=itemgetter("training_step"))
    shown = shown[max(0, len(shown) - options.responses) :]
    if len(shown) < len(wrong):
        said += f", of which {len(shown)} are shown, one of a prompt"
    parts = [Text(said, "bold"), *show_sources(wrong, known)]
    for row in shown:
        group = groups[row["training_step"], row["prompt"]]
        prompt = f"Step {row['training_step']}: {end_of_prompt(row['prompt'])}"
        parts += ["", Text(prompt, "bold"), *show_truth(row)]
        if len(group) > 1:
            parts.append(show_scores(group))
        parts += show_answer(row, "", LETTERS * options.tokens)
    return parts


def show_wrong(run_dir: Path, args: dict, options):
    """What is to be printed."""
    worth = args.get("verification_reward", 1.0)
    samples, rollouts = read_lines(run_dir / "samples.jsonl"), run_dir / "rollouts.jsonl"
    parts = [Text(f"{args['run_name']}: {args['exp_name']}, {args['model_name_or_path']}", "bold")]
    if samples:
        parts += ["", *show_wrong_answers(samples, worth, options)]
    last = next(read_backwards(rollouts), None)
    if last:
        parts += ["", *show_wrong_responses(rollouts, worth, options)]
    if not samples and not last:
        parts.append("No response is written yet")
    elif "verifiable_score" not in (last or samples[-1]):
        parts += ["", "These files have no verifiable scores: right and wrong are by the score"]
    return Group(*parts)


# ------------------------------------------------------------------------------ the program


def describe_progress(run_dir: Path, args: dict, metrics: list[dict]) -> str:
    """How far a run came; if it is not at its end, how long ago it wrote that."""
    steps = args.get("num_training_steps") or args["num_updates"]  # of a reward model
    last = metrics[-1]
    where = f"Step {last['training_step']:.0f} of {steps}"
    since = (time.time() - (run_dir / "metrics.jsonl").stat().st_mtime) / 60
    ago = "" if last["training_step"] == steps else f"; that was {since:.1f} minutes ago"
    return f"{where}, after {last['time/from_scratch'] / 60:.1f} minutes{ago}"


def show_run(run_dir: Path, args: dict, options):
    """What is to be printed, and whether the run is at its end."""
    metrics = read_metrics(run_dir)
    model = args["model_name_or_path"]
    parts = [Text(f"{args['run_name']}: {args['exp_name']}, {model}", "bold")]
    if "provenance" in args:
        parts.append(shlex.join(args["provenance"]["command"]))
    if not metrics:
        return Group(*parts, "No step is finished yet"), False
    progress = describe_progress(run_dir, args, metrics)
    parts += [progress, "", show_curves(metrics), ""]
    speed = describe_speed(metrics)
    if speed:
        parts += [speed, ""]
    rows = last_responses(run_dir / "rollouts.jsonl")
    if rows:
        name = args["tokenizer_name_or_path"] or model
        tokenizer = load_tokenizer(run_dir, name, args["model_revision"])
        parts += show_responses(rows, tokenizer, options)
    return Group(*parts), not progress.endswith("ago")


def main():
    sys.stdout.reconfigure(errors="backslashreplace")  # a terminal may know ASCII alone
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    one = parser.add_mutually_exclusive_group()
    one.add_argument("--watch", type=float, metavar="SECONDS", help="show it again so often")
    one.add_argument("--summary", action="store_true", help="what the scripts say at its end")
    one.add_argument("--advice", action="store_true", help="a script's own call, in step 3")
    one.add_argument("--wrong", action="store_true", help="what the model gets wrong")
    responses = "how many responses at most, shared out among the prompts (8); with --wrong how "
    responses += "many prompts, held-out ones and as many of training"
    tokens = f"of each response at most (120); with --wrong {LETTERS} characters for each of them"
    parser.add_argument("--responses", type=int, default=8, metavar="N", help=responses)
    parser.add_argument("--tokens", type=int, default=120, metavar="N", help=tokens)
    options = parser.parse_args()
    run_dir = options.run.expanduser()
    if not (run_dir / "args.json").is_file():
        parser.error(f"{run_dir} holds no args.json: it is not the folder of a run")
    if options.summary:
        metrics = read_metrics(run_dir)
        if not metrics:
            parser.error(f"{run_dir} has no metrics.jsonl yet: the run made no step")
        print_summary(run_dir, metrics)
        return
    if options.advice:
        print_advice(run_dir, read_metrics(run_dir))
        return
    args = json.loads((run_dir / "args.json").read_bytes())
    console = Console(markup=False, emoji=False, highlight=False)
    if options.wrong:
        console.print(show_wrong(run_dir, args, options))
        return
    shown, is_finished = show_run(run_dir, args, options)
    if options.watch is None:
        console.print(shown)
        return
    with contextlib.suppress(KeyboardInterrupt), Live(shown, console=console) as live:
        while not is_finished:
            time.sleep(options.watch)
            shown, is_finished = show_run(run_dir, args, options)
            live.update(shown)


if __name__ == "__main__":
    main()
