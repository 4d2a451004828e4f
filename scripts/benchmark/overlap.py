"""What asynchrony gains: time of ppo_vllm_async.py with and without --async_mode.

    python scripts/benchmark/overlap.py toy     # the thread and the queues alone, stubs of 1 s each
    python scripts/benchmark/overlap.py real    # pairs of real runs on this machine

toy: 7 steps, a line each. One after the other they take 14 s; overlapped, the first generation and
7 trainings, 8 s.

real: in turn an async run and a sync run, of the debug model with 64 responses of 128 tokens, each
with one thread and with two; the faster one counts. Times are sums of time/training, without the
first steps. The limit is what perfect overlap would give: (generation + training) /
max(generation, training), both as measured in the sync run.
"""

import argparse
import queue
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

from run import REPO, flags_of, make_endless_model, run

WARM_UP = 3  # steps left out: the first ones of a run
SIZES = {
    "dataset": "debug_assets/train.parquet",
    "dtype": "float32",
    "seed": 1,
    "local_rollout_batch_size": 64,
    "local_mini_batch_size": 64,
    "per_device_train_batch_size": 32,
    "local_rollout_forward_batch_size": 32,
    "response_length": 128,
    "max_prompt_token_length": 16,
}


class StubVLLM:
    """In the place of vLLM: a second, and no responses."""

    policy_version = None

    def sample(self, prompts, seeds, temperature):
        if seeds:
            time.sleep(1)
        return []


def run_toy(async_mode, steps=7):
    """The script's own thread and queues, with stubs of vLLM and of the update; returns seconds."""
    sys.path.insert(0, str(REPO))
    import ppo_vllm_async as script

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


def run_real(async_mode, threads, steps):
    """A real run; returns seconds per step: total, generation, training without waiting."""
    sizes = SIZES | {"async_mode": async_mode}
    sizes["total_episodes"] = (steps + WARM_UP) * sizes["local_rollout_batch_size"]
    with tempfile.TemporaryDirectory() as name:
        model = Path(name, "model")
        make_endless_model(model)
        words = [REPO / "ppo_vllm_async.py", *flags_of(sizes), "--model_name_or_path", model]
        lines, _ = run(words, name, threads=threads)
    # The last async step has nothing to overlap with: it is left out in both modes.
    lines = lines[WARM_UP:-1]
    # What the thread does is to sample, and to ask for rewards
    names = ("time/training", "time/generation", "time/reward", "time/wait_for_generation")
    total, generation, reward, waiting = (
        statistics.mean(line[name] for line in lines) for name in names
    )
    return total, generation + reward, total - waiting


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["toy", "real"])
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=15)
    args = parser.parse_args()
    if args.what == "toy":
        sync, overlapped = run_toy(False), run_toy(True)
        print(f"sync {sync:.2f} s, async {overlapped:.2f} s: {sync / overlapped:.2f} times as fast")
        return
    ratios = []
    for pair in range(1, args.pairs + 1):
        (total, generation, training), (overlapped, _, _) = (
            min(run_real(async_mode, threads, args.steps) for threads in (1, 2))
            for async_mode in (False, True)
        )
        gain, limit = total / overlapped, (generation + training) / max(generation, training)
        ratios.append((gain, gain / limit))
        print(
            f"pair {pair}: sync {total:.3f} s a step (generation {generation:.3f}, training "
            f"{training:.3f}), async {overlapped:.3f} s: {gain:.2f} times as fast, "
            f"limit {limit:.2f}",
            flush=True,
        )
    gain, share = (statistics.median(column) for column in zip(*ratios, strict=True))
    print(f"median of {args.pairs} pairs: {gain:.2f} times as fast, {share:.0%} of the limit")


if __name__ == "__main__":
    main()
