"""Define what a run's metrics mean, and find the warning signs of a run that is not healthy.

docs/monitoring.md quotes these tables. A warning sign is a hint, not a proof. TRIED says how often
the rules were correct on runs that they were not chosen on.
"""

import math
from collections import defaultdict
from collections.abc import Iterator
from itertools import groupby, pairwise
from typing import NamedTuple

# What each metric is. It is over the whole batch and all ranks unless it says otherwise
METRICS = {
    "episode": "responses trained on so far",
    "epoch": "epochs of the training prompts so far",
    "lr": "learning rate of the policy; 0 while only the value model is trained",
    "objective/scores": "mean score of a response",
    "objective/scores_std": "standard deviation of the scores over the batch",
    "objective/verifiable_score": "mean of what the reward function returned",
    "objective/verifiable_correct_rate": "fraction of correct responses, by the reward function",
    "objective/reward_model_score": "mean score from the reward model",
    "objective/reward/NAME": "mean of what the reward function returned as NAME",
    "objective/reward_failures": "fraction of responses for which the reward function failed",
    "objective/kl": "logp - logp_ref, summed over a response; mean over responses",
    "objective/non_score_reward": "-beta x KL (GRPO: --kl_estimator), summed over a response; mean",
    "objective/rlhf_reward": "score plus -beta x KL; mean over the responses that have a score",
    "objective/entropy": "-logp, summed over a response's sampled tokens; mean over responses",
    "objective/loss": "the loss that an update minimizes; mean over the step's updates",
    "objective/sequence_lengths": "tokens of a response, including its stop token",
    "objective/stop_rate": "fraction of responses that ended before --response_length",
    "policy/entropy_avg": "exact entropy of a token's distribution, in nats; mean over tokens",
    "policy/approxkl_avg": "(new - old)^2 / 2 of log-probabilities; mean over tokens",
    "policy/clipfrac_avg": "fraction of tokens whose ratio is clipped",
    "policy/version": "steps that the learner had completed before this one",
    "policy/staleness": "policy/version minus the steps of the policy that generated the batch",
    "loss/policy_avg": "the clipped loss; mean over tokens",
    "loss/value_avg": "half the squared error of the values; mean over tokens",
    "loss/kl_avg": "the KL term, before beta; mean over tokens",
    "val/ratio": "new / old probability; mean over tokens",
    "val/ratio_var": "squared distance of new / old from 1; mean over tokens",
    "val/clipfrac_avg": "fraction of tokens for which the value loss is clipped",
    "val/explained_variance": "variance of returns that values explain: 1 all, 0 as a constant",
    "val/sequence_lengths": "tokens of a response, including its stop token",
    "val/num_stop_token_ids": "number of responses that ended with a stop token",
    "val/zero_variance_groups": "number of groups whose scores are all equal",
    "val/update_tokens": "tokens in the rows of the step's updates, including prompts",
    "optim/grad_norm": "norm of the policy's gradient before clipping; mean over updates",
    "optim/value_grad_norm": "norm of the value model's gradient; as optim/grad_norm",
    "mismatch/logprob_diff_mean": "|learner's - sampler's log-probability|; mean over tokens",
    "mismatch/logprob_diff_max": "|learner's - sampler's log-probability|; the largest",
    "mismatch/kl": "KL of the sampler to the learner (k3); mean over tokens",
    "mismatch/ess": "effective sample size by the importance weights, as a fraction of the tokens",
    "mismatch/tis_clipfrac": "fraction of importance weights that are capped at --tis_cap",
    "time/training": "seconds of the step",
    "time/weight_sync": "seconds of sending the weights to vLLM",
    "time/generation": "seconds of generation, on rank 0",
    "time/reward": "seconds of the reward function, on rank 0",
    "time/reward_model": "seconds of the reward model",
    "time/forward": "seconds of the forward passes before the updates",
    "time/update": "seconds of the updates",
    "time/checkpoint": "seconds of saving a checkpoint",
    "time/evaluation": "seconds of generating and grading an evaluation",
    "time/from_scratch": "seconds since the run began",
    "time/wait_for_generation": "seconds that the learner waited for the batch",
    "time/wait_for_prompts": "seconds that generation waited for the learner, on rank 0",
    "perf/episodes_per_second": "responses per second of the step",
    "perf/response_tokens_per_second": "response tokens per second of the step",
    "perf/memory_gib": "GiB of rank 0 without vLLM: on a GPU the peak so far, on a CPU now",
    "eval/policy_version": "steps of the policy that answered the held-out prompts",
}
OF_HELD_OUT = "scores verifiable_score verifiable_correct_rate reward_model_score reward_failures"
for _name in (*OF_HELD_OUT.split(), "reward/NAME", "sequence_lengths", "stop_rate"):
    METRICS[f"eval/{_name}"] = f"{METRICS[f'objective/{_name}']}, on held-out prompts"


class Question(NamedTuple):
    ask: str
    metrics: tuple[str, ...]
    usual: str
    then: str  # what to do about its warning signs


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

    ask: str
    metric: str
    side: str  # > or <
    limit: float
    steps: int = 1
    of_first: bool = False  # the limit is a fraction of the metric's first value
    where: str = ""  # "at the beginning" is its first five values, "at the end" the last one
    failure: str = ""  # the diff of scripts/forks/bugs that looks like this

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
    Rule(BROKEN, "objective/reward_failures", ">", 0),
    Rule(BROKEN, "val/explained_variance", "<", -0.05, 10),
]
# These mean nothing once nearly all answers are correct
OF_SOLVED = "objective/scores_std", "val/explained_variance"
# {diff of scripts/forks/bugs: its heading in docs/bug_gallery.md, and what was wrong}
FAILURES = {
    "stale_weights": ("Stale weights", "vLLM keeps the weights from before training"),
    "prefix_cache": ("Prefix cache not reset", "new tokens attend to what old weights computed"),
    "temperature": ("Temperature on one side", "the learner computes at another temperature"),
    "retokenized": ("Text tokenized again", "the learner trains on tokens that were not sampled"),
    "end_token": ("End token masked as padding", "the end of a response is never trained"),
    "reward_late": ("Reward one token late", "the score is at a token that no loss sees"),
    "cold_value": ("A cold value model with lambda below 1", "ending early looks best"),
    "dead_reward": ("A reward that dies in its worker", "failures count as incorrect answers"),
}
TRIED = (
    "A warning sign is a hint, not a proof. Twelve healthy runs that the rules were not chosen on "
    "(debug task and SmolLM2, 2026-11-26) had none. Of the runs in docs/data/lag.jsonl whose "
    "batches were at most one step old, the rules on mismatch/kl and mismatch/ess mark one of 64 "
    "healthy runs, and 13 of the 14 that staleness made worse."
)
# The twelve healthy runs: `bash scripts/train/debug/ppo.sh --seed 11`, the same with grpo.sh and
# ppo_sync.sh, and the three with `--seed 12 --dtype bfloat16`; `bash
# scripts/train/smollm2/grpo.sh`, also with seeds 11 and 12; and four of docs/results.md, "Checks"


def longest(values: list[bool]) -> int:
    """Return the length of the longest sequence of true values."""
    return max((len([*group]) for value, group in groupby(values) if value), default=0)


def lost_rewards(rows: list[dict]) -> bool:
    """Return whether the last return differs from the score in most lines of rollouts.jsonl.

    In a healthy run it is the score minus beta times the last token's KL, for any gamma and lambda.
    """
    rows = [row for row in rows if row.get("returns") and row["score"]]
    off = [abs(row["returns"][-1] - row["score"]) > 0.5 * abs(row["score"]) for row in rows]
    return sum(off) > len(off) / 2


def illnesses(
    metrics: list[dict], args: dict, first_rows: list[dict] = ()
) -> Iterator[tuple[str, str, str]]:
    """Yield (question, warning sign, the failure that looks like it or "").

    first_rows: lines of rollouts.jsonl of step 1.
    """
    columns, trained = defaultdict(list), [line for line in metrics if line.get("lr") != 0]
    for name, value in (pair for line in trained for pair in line.items()):
        columns[name] += [value] if value is not None else []
    scores, entropies = columns["objective/scores"], columns["policy/entropy_avg"]
    kl, first, last = columns["mismatch/kl"], metrics[0], metrics[-1]
    is_first = first["training_step"] == 1 and not first.get("policy/staleness")
    is_solved = max([0, *columns[f"objective/{RIGHT}"], *columns[f"eval/{RIGHT}"]]) > 0.95
    # A sampler that is more than a step old differs on purpose
    is_old = max([0, *columns["policy/staleness"], *columns["policy/staleness_max"]]) > 1
    # check_sampler's limit
    rounding, late = 0.015 / min(1, args.get("temperature", 1)), 0.05
    if args.get("dtype") == "float32":
        rounding, late = 1e-4, 0.01

    if is_off := is_first and first.get("mismatch/kl", 0) > rounding:
        said = f"mismatch/kl of step 1 is above {rounding:.2g}, which is more than rounding"
        yield SAMPLER, said, "temperature"
        yield SAMPLER, "There is a second possible cause", "retokenized"
    is_late = last.get("lr", math.inf) < 0.05 * max(columns["lr"], default=0)
    if is_late and kl and late < kl[-1] < 0.1 and not (is_off or is_old):
        yield SAMPLER, "mismatch/kl stays although the learning rate is nearly 0", "prefix_cache"
    pairs = zip(scores, scores[2:], entropies, entropies[2:], strict=False)
    dies = any(old > 0.5 and new < 0.1 * old and now > 0.7 * was for old, new, was, now in pairs)
    if dies and "objective/reward_model_score" not in first:  # a reward model's 0 means nothing
        yield LEARNS, "The score falls to 0, although the policy hardly changes", "dead_reward"
    if is_first and lost_rewards(first_rows) and not args.get("whiten_rewards"):
        yield LEARNS, "The returns of step 1 do not end with the score", "reward_late"
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
            rule.of_first and limit < 0.05,  # the first value is nearly 0
        ]
        if longest(ill) >= rule.steps and not any(excuses):
            yield rule.ask, str(rule), rule.failure
