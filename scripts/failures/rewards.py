"""Rewards for scripts/benchmark/failures.py, as --reward_fn wants them."""

import itertools

calls = itertools.count(1)  # in this worker's process
CALLS_UNTIL_DEATH = 10_000


def sorting_then_dead(data_source, response, ground_truth, extra_info=None):
    """The reward of the sorting task, until something in the worker breaks for good."""
    if next(calls) > CALLS_UNTIL_DEATH:
        raise ValueError("signal only works in main thread of the main interpreter")
    return float(response.strip() == ground_truth.strip())


def one(data_source, response, ground_truth, extra_info=None):
    """1 for every response."""
    return 1.0


def sevens(data_source, response, ground_truth, extra_info=None):
    """How many of 64 characters are a 7, as a share."""
    return response.count("7") / 64


def answer_first(data_source, response, ground_truth, extra_info=None):
    """1.0 if the response begins with the right answer, whatever follows.

    >>> answer_first("debug/sorting", "1235807", "12358")
    1.0
    """
    return float(response.startswith(ground_truth))
