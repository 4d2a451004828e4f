"""Define what a run's metrics mean, and find the warning signs of a run that is not healthy.

docs/monitoring.md quotes these tables. A warning sign is a hint, not a proof. VALIDATION_NOTE says
how often the rules were correct on runs that they were not chosen on.
"""

import math
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import NamedTuple

# {metric: what it is}
METRICS = tomllib.loads(Path(__file__).with_name("metrics.toml").read_text("utf-8"))
OF_HELD_OUT = "scores verifiable_score verifiable_correct_rate reward_model_score reward_failures"
for _name in (*OF_HELD_OUT.split(), "reward/NAME", "sequence_lengths", "stop_rate"):
    METRICS[f"eval/{_name}"] = f"{METRICS[f'objective/{_name}']}, on held-out prompts"


class Question(NamedTuple):
    question: str
    metrics: tuple[str, ...]
    usual: str  # what the metrics are in a healthy run
    remedy: str  # what to do about its warning signs


SIGNAL, LEARNS, ITSELF = "Is there a signal?", "Does it learn?", "Does it stay itself?"
UPDATES, SAMPLER, BROKEN = "Are updates small?", "Is the sampler the policy?", "Is it broken?"
RIGHT = "verifiable_correct_rate"
QUESTIONS = [
    Question(
        SIGNAL,
        ("objective/scores_std", "val/zero_variance_groups"),
        "0.2 to 0.5 on the debug task, 0.15 to 0.22 with the language model",
        "The task is too hard or too easy, or the reward does not find the answer. Read the "
        "rollouts",
    ),
    Question(
        LEARNS,
        ("objective/scores", "eval/scores", "loss/value_avg"),
        "scores rise, on training and held-out prompts",
        "Try a higher learning rate, more samples per prompt, or more prompts. Check whether the "
        "reward is lost",
    ),
    Question(
        ITSELF,
        ("policy/entropy_avg", "objective/kl", "objective/sequence_lengths"),
        "entropy falls slowly: 0.42 to 0.09 on the debug task, 3.5 to 2.9 with the language model",
        "Try a lower learning rate, a higher --beta, or a reward that asks for what you want",
    ),
    Question(
        UPDATES,
        ("policy/approxkl_avg", "policy/clipfrac_avg", "optim/grad_norm"),
        "approxkl_avg below 0.012, clipfrac_avg below 0.05, grad_norm without a trend",
        "Try a lower learning rate, or fewer updates per step",
    ),
    Question(
        SAMPLER,
        ("mismatch/kl", "mismatch/ess", "mismatch/logprob_diff_mean"),
        "mismatch/kl in float32 1e-13, with asynchrony up to 0.06; in bfloat16 0.002 in step 1, "
        "later up to 0.03; ess mostly above 0.9",
        "Try a lower learning rate, or fewer updates per step. A run with --no-async_mode shows "
        "what remains without asynchrony",
    ),
    Question(
        BROKEN,
        ("objective/reward_failures", "objective/stop_rate", "val/explained_variance"),
        "reward_failures 0, stop_rate near 1, explained_variance above 0",
        "Read why a reward fails, on the console or as failure in rollouts.jsonl",
    ),
]


class Rule(NamedTuple):
    """A warning sign: a metric is above (or below) a limit for a number of steps in a row."""

    question: str
    metric: str
    side: str  # > or <
    limit: float
    steps: int = 1
    of_first: bool = False  # the limit is a fraction of the metric's first value
    where: str = ""  # "at the beginning" is its first five values, "at the end" the last one
    bug: str = ""  # the diff of scripts/forks/bugs that looks like this

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
    Rule(ITSELF, "objective/stop_rate", "<", 0.5, 3, True, bug="end_token"),
    Rule(UPDATES, "policy/clipfrac_avg", ">", 0.1, 3),
    Rule(UPDATES, "policy/approxkl_avg", ">", 0.1, 3),
    Rule(SAMPLER, "mismatch/kl", ">", 0.1, 3, bug="stale_weights"),
    Rule(SAMPLER, "mismatch/ess", "<", 0.8, 6),
    Rule(BROKEN, "objective/reward_failures", ">", 0),
    Rule(BROKEN, "val/explained_variance", "<", -0.05, 10),
]
MEANINGLESS_WHEN_SOLVED = "objective/scores_std", "val/explained_variance"
# {diff of scripts/forks/bugs: its heading in docs/bug_gallery.md, and what it does}
BUGS = {
    "stale_weights": ("Stale weights", "vLLM keeps the weights from before training"),
    "prefix_cache": ("Prefix cache not reset", "new tokens attend to what old weights computed"),
    "temperature": ("Temperature on one side", "the learner computes at another temperature"),
    "retokenized": ("Text tokenized again", "the learner trains on tokens that were not sampled"),
    "end_token": ("End token masked as padding", "the end of a response is never trained"),
    "reward_late": ("Reward one token late", "the score is at a token that no loss sees"),
    "cold_value": ("A cold value model with lambda below 1", "ending early looks best"),
    "dead_reward": ("A reward that dies in its worker", "failures count as incorrect answers"),
}
VALIDATION_NOTE = (
    "A warning sign is a hint, not a proof. Twelve healthy runs that the rules were not chosen on "
    "(debug task and SmolLM2, 2026-11-26) had none. Of the runs in docs/data/lag.jsonl whose "
    "batches were at most one step old, the rules on mismatch/kl and mismatch/ess mark one of 64 "
    "healthy runs, and 13 of the 14 that staleness made worse."
)
# The twelve healthy runs: `bash scripts/train/debug/ppo.sh --seed 11`, the same with grpo.sh and
# ppo_sync.sh, and the three with `--seed 12 --dtype bfloat16`; `bash
# scripts/train/smollm2/grpo.sh`, also with seeds 11 and 12; and four of docs/results.md, "Checks"


@dataclass
class History:
    """The part of a run in which warning signs are found."""

    metrics: list[dict]
    args: dict
    first_rows: list[dict]  # lines of rollouts.jsonl of step 1

    def values(self, name: str) -> list[float]:
        """Return the values of a metric in the steps that trained the policy."""
        trained = [line for line in self.metrics if line.get("lr") != 0]
        return [line[name] for line in trained if line.get(name) is not None]

    @property
    def starts_on_policy(self) -> bool:
        """Return whether the metrics begin with a step whose sampler had the learner's weights."""
        first = self.metrics[0]
        return first["training_step"] == 1 and not first.get("policy/staleness")

    @property
    def is_stale(self) -> bool:
        """Return whether the sampler is more than a step old, so that it differs on purpose."""
        stalenesses = self.values("policy/staleness") + self.values("policy/staleness_max")
        return max([0, *stalenesses]) > 1

    @property
    def is_solved(self) -> bool:
        """Return whether nearly all answers are correct."""
        rates = self.values(f"objective/{RIGHT}") + self.values(f"eval/{RIGHT}")
        return max([0, *rates]) > 0.95


def step_1_mismatches(run: History) -> bool:
    # The same limit as check_sampler's in the scripts
    limit = 0.015 / min(1, run.args.get("temperature", 1))
    if run.args.get("dtype") == "float32":
        limit = 1e-4
    return run.starts_on_policy and run.metrics[0].get("mismatch/kl", 0) > limit


def mismatch_lasts(run: History) -> bool:
    """Return whether a mismatch stays although weights hardly change, so it is not staleness."""
    kl, learning_rates = run.values("mismatch/kl"), run.values("lr")
    is_late = run.metrics[-1].get("lr", math.inf) < 0.05 * max(learning_rates, default=0)
    if not (is_late and kl) or run.is_stale or step_1_mismatches(run):
        return False
    return (0.01 if run.args.get("dtype") == "float32" else 0.05) < kl[-1] < 0.1


def score_collapses(run: History) -> bool:
    """Return whether the score falls to 0 within two steps, while the entropy stays."""
    if "objective/reward_model_score" in run.metrics[0]:  # for which 0 is a score like any other
        return False
    scores, entropies = run.values("objective/scores"), run.values("policy/entropy_avg")
    pairs = zip(scores, scores[2:], entropies, entropies[2:], strict=False)
    return any(
        old > 0.5 and new < 0.1 * old and new_entropy > 0.7 * old_entropy
        for old, new, old_entropy, new_entropy in pairs
    )


def returns_lack_score(run: History) -> bool:
    """Return whether the last return of most responses differs from their score.

    In a healthy run they differ by beta times the last token's KL, for any gamma and lambda.
    """
    if not run.starts_on_policy or run.args.get("whiten_rewards"):
        return False
    rows = [row for row in run.first_rows if row.get("returns") and row["score"]]
    differs = [abs(row["returns"][-1] - row["score"]) > 0.5 * abs(row["score"]) for row in rows]
    return sum(differs) > len(rows) / 2


def evaluation_repeats(run: History) -> bool:
    is_equal = [old == new for old, new in pairwise(run.values("eval/scores"))]
    has_signal = any(run.values("objective/scores_std")[-3:])
    return longest_streak(is_equal) >= 3 and has_signal and not run.is_solved


FIRST_MISMATCH = "mismatch/kl of step 1 is more than rounding (1e-4 in float32, 0.015 in bfloat16)"
COLLAPSE = "The score falls to 0, although the policy hardly changes"
# (question, warning sign, function that finds it, bug that looks like it)
SIGNS = [
    (SAMPLER, FIRST_MISMATCH, step_1_mismatches, "temperature"),
    (SAMPLER, "There is a second possible cause", step_1_mismatches, "retokenized"),
    (SAMPLER, "mismatch/kl stays at a learning rate of nearly 0", mismatch_lasts, "prefix_cache"),
    (LEARNS, COLLAPSE, score_collapses, "dead_reward"),
    (LEARNS, "The returns of step 1 do not end with the score", returns_lack_score, "reward_late"),
    (LEARNS, "eval/scores repeats to the last digit", evaluation_repeats, "stale_weights"),
]


def longest_streak(values: list[bool]) -> int:
    """Return the length of the longest sequence of true values."""
    return max((len([*group]) for value, group in groupby(values) if value), default=0)


def is_broken(rule: Rule, run: History) -> bool:
    """Return whether a run breaks a rule that has a meaning for it."""
    if rule.question == SAMPLER and (run.is_stale or step_1_mismatches(run)):
        return False
    if rule.metric in MEANINGLESS_WHEN_SOLVED and run.is_solved:
        return False
    values = run.values(rule.metric)
    limit = rule.limit * values[0] if rule.of_first and values else rule.limit
    if rule.of_first and limit < 0.05:  # the first value is nearly 0
        return False
    values = {"at the beginning": values[:5], "at the end": values[-1:]}.get(rule.where, values)
    is_past = [value > limit if rule.side == ">" else value < limit for value in values]
    return longest_streak(is_past) >= rule.steps


def find_warning_signs(
    metrics: list[dict], args: dict, first_rows: list[dict] = ()
) -> Iterator[tuple[str, str, str]]:
    """Yield (question, warning sign, the bug that looks like it or "")."""
    run = History(metrics, args, first_rows)
    for question, sign, is_there, bug in SIGNS:
        if is_there(run):
            yield question, sign, bug
    for rule in RULES:
        if is_broken(rule, run):
            yield rule.question, str(rule), rule.bug
