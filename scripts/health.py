"""What a run's metrics mean, and whether it is ill: tables, which docs/looking.md quotes.

A rule is a hint, no proof. How often the rules were right and wrong on runs that they were not
chosen on is in TRIED.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from itertools import groupby, pairwise
from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).parent.parent / "docs/scripts.md"
OF_HELD_OUT = "scores verifiable_score verifiable_correct_rate reward_model_score reward_failures "
OF_HELD_OUT += "reward/NAME sequence_lengths stop_rate"


def read_meanings() -> dict[str, str]:
    """What each metric is, by the table of docs/scripts.md; {} in a copy that is without docs/.

    >>> METRICS["optim/grad_norm"].partition(". If ")[0]
    "Mean over the step's updates. optim/grad_norm: before clipping"
    """
    text = PAGE.read_text("utf-8") if PAGE.exists() else ""
    table, meanings, heading = text.partition("## Logged metrics")[2], {}, ""
    for first, second in re.findall(r"^\| (.+?) \| (.*?) ?\|$", table, re.MULTILINE):
        heading = first.split("**")[1].strip(".") if "**" in first else heading
        said = re.sub(r"\[([^\]]*)\]\([^)]*\)|[`†]", r"\1", second).strip()
        names = re.findall(r"`([\w/]+)`", first)
        meanings |= dict.fromkeys(names, f"{heading}. {', '.join(names)}: {said}")
    for name in OF_HELD_OUT.split() if meanings else []:
        meanings[f"eval/{name}"] = f"Held-out prompts. {meanings[f'objective/{name}']}"
    return meanings


METRICS = read_meanings()


class Question(NamedTuple):
    ask: str
    metrics: tuple[str, ...]
    usual: str
    then: str  # what to do where it is ill


SIGNAL, LEARNS, ITSELF = "Is there a signal?", "Does it learn?", "Does it stay itself?"
UPDATES, SAMPLER, BROKEN = "Are updates small?", "Is the sampler the policy?", "Is it broken?"
RIGHT = "verifiable_correct_rate"
QUESTIONS = [
    Question(
        SIGNAL,
        ("objective/scores_std", "val/zero_variance_groups"),
        "debug task 0.2 to 0.5, language model 0.15 to 0.22",
        "The task is too hard, too easy, or the reward does not find the answer: read the rollouts",
    ),
    Question(
        LEARNS,
        ("objective/scores", "eval/scores", "loss/value_avg"),
        "rise together",
        "A higher rate, more samples per prompt; more prompts; or the reward is lost",
    ),
    Question(
        ITSELF,
        ("policy/entropy_avg", "objective/kl", "objective/sequence_lengths"),
        "entropy falls slowly: 0.42 to 0.09 on the debug task, 3.5 to 2.9 with the language model",
        "A lower rate, --beta, a reward that asks for what you want",
    ),
    Question(
        UPDATES,
        ("policy/approxkl_avg", "policy/clipfrac_avg", "optim/grad_norm"),
        "under 0.012; under 0.05; no trend",
        "A lower rate, fewer updates a step",
    ),
    Question(
        SAMPLER,
        ("mismatch/kl", "mismatch/ess", "mismatch/logprob_diff_mean"),
        "mismatch/kl in float32 1e-13, with asynchrony to 0.06; in bfloat16 0.002 in step 1, later "
        "to 0.03; ess mostly above 0.9",
        "A lower rate, fewer updates a step; --no-async_mode tells asynchrony from rounding",
    ),
    Question(
        BROKEN,
        ("objective/reward_failures", "objective/stop_rate", "val/explained_variance"),
        "0; near 1; above 0",
        "The console, and failure in rollouts.jsonl, say why a reward fails",
    ),
]


class Rule(NamedTuple):
    """Ill is a metric that is above (or below) a limit for so many steps in a row."""

    ask: str
    metric: str
    side: str  # > or <
    limit: float
    steps: int = 1
    of_first: bool = False  # the limit is a share of the metric's first value
    where: str = ""  # "at the beginning", its first five values; "at the end", the last one
    failure: str = ""  # what looks like it

    def __str__(self):
        first = " x the first" if self.of_first else ""
        where = f", {self.where}" if self.where else ""
        steps = f" for {self.steps} steps" if self.steps > 1 else ""
        return f"{self.metric} {self.side} {self.limit:g}{first}{where}{steps}"


LENGTHS = "objective/sequence_lengths"
RULES = [
    Rule(SIGNAL, "objective/scores_std", "<", 1e-9, 3),
    Rule(LEARNS, f"eval/{RIGHT}", "<", 0.9, of_first=True, where="at the end"),
    Rule(ITSELF, LENGTHS, "<", 0.4, 1, True, "at the beginning", "cold_value"),
    Rule(ITSELF, "objective/stop_rate", "<", 0.5, 3, True, failure="end_token"),
    Rule(UPDATES, "policy/clipfrac_avg", ">", 0.1, 3),
    Rule(UPDATES, "policy/approxkl_avg", ">", 0.1, 3),
    Rule(SAMPLER, "mismatch/kl", ">", 0.1, 3, failure="stale_weights"),
    Rule(SAMPLER, "mismatch/ess", "<", 0.8, 6),
    Rule(SAMPLER, "mismatch/masked", ">", 0.1, 3, failure="product_mask"),
    Rule(BROKEN, "objective/reward_failures", ">", 0),
    Rule(BROKEN, "val/explained_variance", "<", -0.05, 10),
]
OF_SOLVED = "objective/scores_std", "val/explained_variance"  # without meaning once all is right
# {diff of scripts/failures: its heading in docs/failures.md, and what was wrong}
FAILURES = {
    "stale_weights": ("Stale weights", "vLLM goes on with weights from before training"),
    "prefix_cache": ("Prefix cache not reset", "new tokens attend to what old weights computed"),
    "temperature": ("Temperature on one side", "the learner computes at another temperature"),
    "retokenized": ("Text tokenized again", "the learner trains on tokens that were not sampled"),
    "end_token": ("End token masked as padding", "the end of a response is never trained"),
    "reward_late": ("Reward one token late", "the score stands where no loss sees it"),
    "product_mask": ("Sequence mask by the product", "long responses are always masked"),
    "cold_value": ("A cold value model with lambda below 1", "to end early looks best"),
    "dead_reward": ("A reward that dies in its worker", "what fails counts as a wrong answer"),
}
TRIED = (
    "A mark is a hint, no proof. On twelve right runs that the rules were not chosen on (debug "
    "task and SmolLM2, 2026-11-26) none was called ill. Of the runs of docs/lag.jsonl whose "
    "sampler was a step old at most, those of mismatch/kl and mismatch/ess call ill one of 64 "
    "right ones, and 13 of 14 that the lag harmed."
)
# The twelve: `bash scripts/train/debug/ppo.sh --seed 11`, and so grpo.sh and ppo_sync.sh, and the
# three with `--seed 12 --dtype bfloat16`; `bash scripts/train/smollm2/grpo.sh`, also with seeds 11
# and 12; four of docs/results.md, "Checks". Those of the lag: 1f78bb6:tests/programs/test_report.py


def longest(values: list[bool]) -> int:
    """How many in a row are true, at most."""
    return max((len([*group]) for value, group in groupby(values) if value), default=0)


def lost_rewards(rows: list[dict]) -> bool:
    """Whether in lines of rollouts.jsonl the last return is not the score.

    It is that, and beta times the last token's KL, whatever gamma, lambda and the values are.
    """
    rows = [row for row in rows if row.get("returns") and row["score"]]
    off = [abs(row["returns"][-1] - row["score"]) > 0.5 * abs(row["score"]) for row in rows]
    return sum(off) > len(off) / 2


def illnesses(
    metrics: list[dict], args: dict, first_rows: list[dict] = ()
) -> Iterator[tuple[str, str, str]]:
    """(question, what is ill, the failure that looks so or ""); a right run should have none.

    first_rows: lines of rollouts.jsonl of step 1.
    """
    columns, trained = defaultdict(list), [line for line in metrics if line.get("lr") != 0]
    for name, value in (pair for line in trained for pair in line.items()):
        columns[name] += [value] if value is not None else []
    scores, entropies = columns["objective/scores"], columns["policy/entropy_avg"]
    kl, first, last = columns["mismatch/kl"], metrics[0], metrics[-1]
    is_first = first["training_step"] == 1 and not first.get("policy/staleness")
    is_solved = max([0, *columns[f"objective/{RIGHT}"], *columns[f"eval/{RIGHT}"]]) > 0.95
    # Older samplers than by a step differ, and that is meant
    is_old = max([0, *columns["policy/staleness"], *columns["policy/staleness_max"]]) > 1
    # check_sampler's limit
    rounding, late = 0.015 / min(1, args.get("temperature", 1)), 0.05
    if args.get("dtype") == "float32":
        rounding, late = 1e-4, 0.01

    if is_off := is_first and first.get("mismatch/kl", 0) > rounding:
        yield SAMPLER, f"mismatch/kl of step 1 is above {rounding:.2g}: no rounding", "temperature"
        yield SAMPLER, "Or it is this", "retokenized"
    is_late = last.get("lr", math.inf) < 0.05 * max(columns["lr"], default=0)
    if is_late and kl and late < kl[-1] < 0.1 and not (is_off or is_old):
        yield SAMPLER, "mismatch/kl stays where the learning rate is nearly 0", "prefix_cache"
    pairs = zip(scores, scores[2:], entropies, entropies[2:], strict=False)
    dies = any(old > 0.5 and new < 0.1 * old and now > 0.7 * was for old, new, was, now in pairs)
    if dies and "objective/reward_model_score" not in first:  # whose 0 is no nothing
        yield LEARNS, "The score falls to nothing, and the policy hardly changes", "dead_reward"
    if is_first and lost_rewards(first_rows) and not args.get("whiten_rewards"):
        yield LEARNS, "Returns of step 1 end with another number than the score", "reward_late"
    repeats = longest([old == new for old, new in pairwise(columns["eval/scores"])])
    if repeats >= 3 and not is_solved and any(columns["objective/scores_std"][-3:]):
        yield LEARNS, "eval/scores repeats to the last digit", "stale_weights"

    for rule in RULES:
        values = columns[rule.metric]
        limit = rule.limit * (values[0] if rule.of_first and values else 1)
        values = {"at the beginning": values[:5], "at the end": values[-1:]}.get(rule.where, values)
        ill = [value > limit if rule.side == ">" else value < limit for value in values]
        excuses = [
            rule.ask == SAMPLER and (is_off or is_old),
            rule.metric in OF_SOLVED and is_solved,
            rule.of_first and limit < 0.05,  # a share of nearly nothing
        ]
        if longest(ill) >= rule.steps and not any(excuses):
            yield rule.ask, str(rule), rule.failure
