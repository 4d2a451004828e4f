"""Call rewards that were written for TRL's GRPOTrainer, without changes.

    grpo_vllm_async.py --dataset data/mine/train.parquet \\
        --reward_fn scripts/rewards/trl_rewards.py:my_rewards.accuracy,my_rewards.brevity=0.1 ...

After the colon, list TRL's reward_funcs and reward_weights: import paths, from the folder where the
run starts or of a package (trl.rewards.accuracy_reward), separated by commas. A weight other than 1
follows after "=". A function that a factory makes needs a name: in my_rewards.py, write
`overlong = get_soft_overlong_punishment(1024, 256)`.

Functions, including `async def`, are called as TRL calls them, each time with lists of one
response: prompts, completions, the example's columns (its extra_info, which
scripts/data_preprocess/trl.py writes), num_tokens and stopped. The differences are:

    completion_ids      has a length, but no ids
    trainer_state       is None
    log_metric          logs a metric of the response, objective/reward/NAME
    log_extra           does nothing

The score is the weighted sum, and each reward is a metric. None means that a reward does not apply.
If none applies, there is no score. An answer counts as correct in objective/verifiable_correct_rate
if the first function returns 1 or more, or, if that one does not apply, if the score is 1 or more.
"""

import asyncio
import importlib
import inspect
import math
import os
import sys
from collections.abc import Callable
from typing import Any

# One loop for all calls, as in TRL, because functions keep clients that belong to a loop
LOOP = asyncio.new_event_loop()


class TokenIds:
    """Stand in for a response's token ids, which a reward does not get."""

    def __init__(self, count: int):
        self.count = count

    def __len__(self) -> int:
        return self.count


def __getattr__(names: str) -> Callable:
    """Return the function that --reward_fn names, because this file does not define it."""
    return combine(load_rewards(names))


def load_rewards(names: str) -> list[tuple[str, float, Callable]]:
    """Return (name, weight, function) for each import path in a list such as "a.b.f,a.b.g=0.1".

    >>> load_rewards("math.cos,cmath.exp=0.1")
    [('cos', 1.0, <built-in function cos>), ('exp', 0.1, <built-in function exp>)]
    """
    sys.path.insert(0, os.getcwd())  # as TRL's program does
    rewards = []
    for path in names.split(","):
        path, _, weight = path.partition("=")
        module, _, name = path.rpartition(".")
        if not module:
            raise AttributeError(f"{path!r} is not an import path such as my_rewards.accuracy")
        function = getattr(importlib.import_module(module), name)
        rewards.append((name, float(weight or 1), function))
    return rewards


def combine(rewards: list[tuple[str, float, Callable]]) -> Callable:
    """Return a function for --reward_fn that calls what load_rewards returned.

    >>> def brevity(prompts, completions, longest, **kwargs):
    ...     return [1 - len(text) / longest for text, longest in zip(completions, longest)]
    >>> score = combine([("brevity", 0.5, brevity)])
    >>> score("trl", "4", "4", {"prompt": "2 + 2 = ", "longest": 4, "num_tokens": 2})
    {'right': 0.75, 'brevity': 0.75, 'score': 0.375}
    """

    def score(data_source: str, response: str, ground_truth: Any, extra_info: dict) -> dict:
        given, metrics = arguments_of(response, extra_info)
        values = [call(function, given) for _, _, function in rewards]
        applied = [
            (name, weight, float(value))
            for (name, weight, _), value in zip(rewards, values, strict=True)
            if value is not None
        ]
        if not applied:
            raise ValueError("all rewards are None")
        if values[0] is not None:
            metrics["right"] = float(values[0])
        metrics |= {name: value for name, _, value in applied}
        # sum() of 0.7, 0.2 and 0.1 would be less than 1
        return metrics | {"score": math.fsum(weight * value for _, weight, value in applied)}

    return score


def arguments_of(response: str, extra_info: dict) -> tuple[dict, dict]:
    """Return what TRL passes to a function, and a dictionary for what the function logs."""
    columns = {name: [value] for name, value in extra_info.items()}
    if "prompt" not in columns:
        raise ValueError("extra_info has no prompt; scripts/data_preprocess/trl.py writes it")
    prompts, _ = columns.pop("prompt"), columns.pop("completion", None)
    is_text = isinstance(prompts[0], str)
    logged = {}
    given = {
        "prompts": prompts,
        "completions": [response if is_text else [{"role": "assistant", "content": response}]],
        "completion_ids": [TokenIds(extra_info["num_tokens"])],
        "trainer_state": None,
        "log_extra": lambda column, values: None,
        "log_metric": lambda name, value: logged.update({name: float(value)}),
    }
    return columns | given, logged


def call(function: Callable, given: dict) -> float | None:
    """Call a function of TRL's form, and return the only reward in its list."""
    rewards = function(**given)
    if inspect.isawaitable(rewards):
        rewards = LOOP.run_until_complete(rewards)
    (reward,) = rewards
    return reward
