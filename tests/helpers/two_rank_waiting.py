"""Two ranks wait for each other in every way that the scripts have: one of the two.

RANK=0 python two_rank_waiting.py FOLDER

It writes FOLDER/rank_0.json: what each way came to on this rank, or the error that it raised. At
the end rank 1 dies, and rank 0 notices.
"""

import json
import os
import queue
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

sys.path.extend(str(folder) for folder in Path(__file__).resolve().parents[1:3])

import torch

import ppo_sync

RANK = int(os.environ["RANK"])


def exchange_values(group):
    return ppo_sync.exchange(group, {"rank": RANK})


def exchange_with_an_error(group):
    error = OSError("no paper") if RANK == 1 else None
    return ppo_sync.exchange(group, None, error)


def wait_for_the_slower(group):
    """Rank 0 has its value at once, rank 1 at the third call."""
    calls = []

    def poll():
        calls.append(None)
        if RANK == 0 or len(calls) == 3:
            return f"of rank {RANK}"
        return None

    return [ppo_sync.wait_for_all(group, poll), len(calls)]


def wait_for_one_that_fails(group):
    """Rank 0 never has a value; rank 1 raises in the second call."""
    calls = []

    def poll():
        calls.append(None)
        time.sleep(0.05)
        if RANK == 1 and len(calls) == 2:
            raise OSError("no ink")

    return ppo_sync.wait_for_all(group, poll)


def rollout_of(texts, version, times):
    count = len(texts)
    answers = ppo_sync.Answers(
        [[7]] * count, [[-1.0]] * count, texts, [1.0] * count, [None] * count
    )
    request = ppo_sync.Request(5, ["prompts"], [1], [], [])
    return ppo_sync.Rollout(request, version, answers, answers, times)


def receive_shares(group):
    """That of rank 0 comes later."""
    response_Q = queue.Queue()
    share = rollout_of([f"of rank {RANK}"], 4, {"generation": [2.0, 1.0][RANK], "reward": RANK})
    threading.Timer(0.5 - 0.5 * RANK, response_Q.put, [share]).start()
    rollout = ppo_sync.receive_rollout(group, response_Q)
    request = rollout.request.training_step
    return [request, rollout.policy_version, rollout.answers.texts, rollout.times]


def receive_what_went_wrong(group):
    """Rank 0 would generate for ever."""
    response_Q = queue.Queue()
    if RANK == 1:
        response_Q.put(OSError("the engine is on fire"))
    return ppo_sync.receive_rollout(group, response_Q)


def check_what_went_wrong(group):
    response_Q = queue.Queue()
    response_Q.put(OSError("the engine is on fire") if RANK == 1 else rollout_of([], 4, {}))
    return ppo_sync.check_generation(group, response_Q)


def wait_for_one_that_dies(group):
    def poll():
        time.sleep(0.05)

    return ppo_sync.wait_for_all(group, poll)


WAYS = [
    exchange_values,
    exchange_with_an_error,
    wait_for_the_slower,
    wait_for_one_that_fails,
    receive_shares,
    receive_what_went_wrong,
    check_what_went_wrong,
    wait_for_one_that_dies,
]


def main():
    folder = Path(sys.argv[1])
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'store'}",
        rank=RANK,
        world_size=2,
        timeout=timedelta(seconds=60),
    )
    group = torch.distributed.new_group(backend="gloo")
    found = {}
    for way in WAYS:
        if way is wait_for_one_that_dies and RANK == 1:
            break
        started_at = time.monotonic()
        try:
            result = way(group)
        except Exception as error:
            result = f"{type(error).__name__}: {error}"
        found[way.__name__] = {"result": result, "seconds": time.monotonic() - started_at}
    (folder / f"rank_{RANK}.json").write_text(json.dumps(found))
    os._exit(0)


if __name__ == "__main__":
    main()
