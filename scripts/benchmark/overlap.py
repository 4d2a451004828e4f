"""What asynchrony gains: time of ppo_vllm_async.py with and without --async_mode.

    python scripts/benchmark/overlap.py toy     # the thread and the queues alone, stubs of 1 s each
    python scripts/benchmark/overlap.py real    # pairs of real runs on this machine
    python scripts/benchmark/overlap.py real --local_rollout_batch_size 128   # flags of the script

toy: 7 steps, a line each. One after the other they take 14 s; overlapped, the first generation and
7 trainings, 8 s.

real: in turn an async run and, for every number of threads, a sync run; the fastest number of
threads of each mode counts. Times are sums of time/training, without the first steps. The limit is
what perfect overlap would give: (generation + training) / max(generation, training), both as
measured in the sync run.
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


def run_toy(async_mode, iterations=7):
    """The script's own thread and queues, with stubs of vLLM and of the update, of a second each.

    Returns for each step the version that sampled its responses, and its seconds, of which the
    first has a generation in any mode.
    """
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

    steps = []
    end = time.perf_counter()
    send(0)
    for step in range(1, iterations + 1):
        rollout = script.gather_rollout(response_Q.get(), None)
        if async_mode and step < iterations:
            send(step - 1)
        time.sleep(1)
        if not async_mode and step < iterations:
            send(step)
        start, end = end, time.perf_counter()
        steps.append((rollout.policy_version, end - start))
    return steps


def compare_toys():
    times = []
    for async_mode in (False, True):
        print("async" if async_mode else "sync")
        seconds = 0
        for step, (sampler, duration) in enumerate(run_toy(async_mode), start=1):
            seconds += duration
            print(
                f"step {step}: version {step - 1} trains on responses of version {sampler}, "
                f"and is version {step} after {seconds:.1f} s"
            )
        times.append(seconds)
    sync, overlapped = times
    print(f"sync {sync:.2f} s, async {overlapped:.2f} s: {sync / overlapped:.2f} times as fast")


def run_real(async_mode, threads, steps, flags):
    """A real run; returns seconds per step: total, generation, training without waiting."""
    sizes = SIZES | {"async_mode": async_mode}
    for name, value in zip(flags[::2], flags[1::2], strict=True):
        sizes[name.removeprefix("--")] = value
    sizes["total_episodes"] = (steps + WARM_UP) * int(sizes["local_rollout_batch_size"])
    with tempfile.TemporaryDirectory() as name:
        model = Path(name, "model")
        make_endless_model(model)
        words = [REPO / "ppo_vllm_async.py", *flags_of(sizes), "--model_name_or_path", model]
        lines, _ = run(words, name, threads=threads)
    # The last async step has nothing to overlap with: it is left out in both modes.
    lines = lines[WARM_UP:-1]
    total = statistics.mean(line["time/training"] for line in lines)
    # What the thread does: it samples, and asks for rewards
    generation = statistics.mean(line["time/generation"] + line["time/reward"] for line in lines)
    waiting = statistics.mean(line["time/wait_for_generation"] for line in lines)
    return total, generation, total - waiting


def compare_runs(pairs, steps, threads, flags):
    ratios = []
    for pair in range(1, pairs + 1):
        sync, overlapped = (
            min(run_real(async_mode, number, steps, flags) for number in threads)
            for async_mode in (False, True)
        )
        total, generation, training = sync
        gain = total / overlapped[0]
        limit = (generation + training) / max(generation, training)
        ratios.append((gain, gain / limit))
        print(
            f"pair {pair}: sync {total:.3f} s a step "
            f"(generation {generation:.3f}, training {training:.3f}), "
            f"async {overlapped[0]:.3f} s: {gain:.2f} times as fast, limit {limit:.2f}",
            flush=True,
        )
    gain, share = (statistics.median(column) for column in zip(*ratios, strict=True))
    print(f"median of {pairs} pairs: {gain:.2f} times as fast, {share:.0%} of the limit")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["toy", "real"])
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=15)
    learner = "numbers of learner threads to try"
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help=learner)
    args, flags = parser.parse_known_args()
    if len(flags) % 2:
        parser.error(f"flags of the script need a value each, as in --num_epochs 2: {flags}")
    if args.what == "toy":
        compare_toys()
    else:
        compare_runs(args.pairs, args.steps, args.threads, flags)


if __name__ == "__main__":
    main()
