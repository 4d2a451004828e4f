"""What asynchrony gains: the thread and the queues of ppo_vllm_async.py alone, with stubs.

    python scripts/benchmark/overlap.py

Generation and training take a second each. 7 steps, a line each: one after the other they take
14 s; overlapped, the first generation and 7 trainings, 8 s.
"""

import queue
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import ppo_vllm_async as script


class StubVLLM:
    """In the place of vLLM: a second, and no responses."""

    policy_version = None

    def sample(self, prompts, seeds, temperature):
        if seeds:
            time.sleep(1)
        return []


def run_steps(async_mode, steps=7):
    """Makes the steps; returns their seconds."""
    prompts_Q, response_Q = queue.Queue(maxsize=1), queue.Queue(maxsize=1)
    engine = StubVLLM()
    given = (engine, queue.Queue(), None, prompts_Q, response_Q, script.Args())
    threading.Thread(target=script.generation_thread, args=given, daemon=True).start()

    def send(version):
        """A weight sync, and the request for the next responses."""
        engine.policy_version = version
        prompts_Q.put(script.Request([], [1], []))

    print("async" if async_mode else "sync")
    start = time.perf_counter()
    send(0)
    for step in range(1, steps + 1):
        rollout = script.gather_rollout(response_Q.get(), None)
        if async_mode and step < steps:
            send(step - 1)
        time.sleep(1)
        if not async_mode and step < steps:
            send(step)
        seconds = time.perf_counter() - start
        print(
            f"step {step}: version {step - 1} trains on responses of version "
            f"{rollout.policy_version}, and is version {step} after {seconds:.1f} s"
        )
    return seconds


if __name__ == "__main__":
    sync, overlapped = run_steps(False), run_steps(True)
    print(f"sync {sync:.2f} s, async {overlapped:.2f} s: {sync / overlapped:.2f} times as fast")
