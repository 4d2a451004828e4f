"""What asynchrony gains: time of ppo_vllm_async.py with and without --async_mode.

    python scripts/benchmark/overlap.py toy     # the thread and the queues alone, stubs of 1 s each
    python scripts/benchmark/overlap.py reward  # the same with and without a slow --reward_fn
    python scripts/benchmark/overlap.py real    # pairs of real runs on this machine
    python scripts/benchmark/overlap.py real --local_rollout_batch_size 128   # flags of the script

toy: 7 steps, a line each. One after the other they take 14 s; overlapped, the first generation and
7 trainings, 8 s.

reward: generation takes 0.4 s, training 1 s; 128 responses are scored by 8 workers of --reward_fn,
and every tenth of them takes 0.2 s or nothing. In pairs, async and sync.

real: in turn an async run and, for every number of threads, a sync run; the fastest number of
threads of each mode counts. Times are sums of time/training, without the first steps. The limit is
what perfect overlap would give: (generation + training) / max(generation, training), both as
measured in the sync run.
"""

import argparse
import json
import os
import queue
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

REPO = Path(__file__).resolve().parent.parent.parent
WARM_UP = 3  # steps left out: the first ones of a run


SLOW_REWARD = """
import time

def score(data_source, response, ground_truth, extra_info):
    time.sleep(float(ground_truth))
    return 1.0
"""


class StubVLLM:
    """In the place of vLLM: so many seconds later, a response to each prompt."""

    def __init__(self, script, seconds):
        self.script, self.seconds = script, seconds
        self.policy_version = None

    def sample(self, prompts, seeds, temperature):
        if seeds:
            time.sleep(self.seconds)
        return [self.script.Response(prompt, [], [], True) for prompt in prompts]


def run_toy(async_mode, iterations=7, generation=1.0, training=1.0, prompts=(), reward_fn=None):
    """The script's own thread and queues, with stubs of vLLM and of the update.

    prompts: of each step, whose responses are scored by reward_fn. Returns for each step the
    version that sampled its responses, and its seconds, of which the first has a generation in any
    mode.
    """
    sys.path.insert(0, str(REPO))
    import ppo_vllm_async as script

    args = script.Args(reward_fn=reward_fn, reward_workers=8)
    workers = queue.Queue()
    for _ in range(8 if reward_fn else 0):
        workers.put(script.start_reward_worker(reward_fn))
    tokenizer = SimpleNamespace(decode=lambda *_, **__: "")
    prompts_Q, response_Q = queue.Queue(maxsize=1), queue.Queue(maxsize=1)
    engine = StubVLLM(script, generation)
    threading.Thread(
        target=script.generation_thread,
        args=(engine, workers, tokenizer, prompts_Q, response_Q, args),
        daemon=True,
    ).start()

    def send(version):
        """A weight sync, and the request for the next responses."""
        engine.policy_version = version
        prompts_Q.put(script.Request(list(prompts), [1], []))

    steps = []
    end = time.perf_counter()
    send(0)
    for step in range(1, iterations + 1):
        rollout = script.gather_rollout(response_Q.get(), None)
        if async_mode and step < iterations:
            send(step - 1)
        time.sleep(training)
        if not async_mode and step < iterations:
            send(step)
        start, end = end, time.perf_counter()
        steps.append((rollout.policy_version, end - start))
    script.end_children()
    return steps


def seconds_of(steps):
    return sum(seconds for _, seconds in steps)


def print_trace(steps):
    """A line for each step of run_toy: who trains on whose responses, and when that is done."""
    for step, (sampler, _) in enumerate(steps, start=1):
        print(
            f"step {step}: version {step - 1} trains on responses of version {sampler}, "
            f"and is version {step} after {seconds_of(steps[:step]):.1f} s"
        )


def run_with_rewards(async_mode, seconds):
    """Seconds of run_toy, but for its first step, with 128 responses a step.

    The reward of every tenth of them takes so many seconds.
    """
    sys.path.insert(0, str(REPO))
    import ppo_vllm_async as script

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "slow_reward.py"
        path.write_text(SLOW_REWARD, "utf-8")
        durations = [seconds if i % 10 == 0 else 0.0 for i in range(128)]
        prompts = [script.Prompt("", "", [], "any", str(time), None) for time in durations]
        _, *others = run_toy(
            async_mode, generation=0.4, training=1.0, prompts=prompts, reward_fn=f"{path}:score"
        )
        return seconds_of(others)


def run_real(async_mode, threads, steps, flags):
    """A real run; returns seconds per step: total, generation, training without waiting."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            str(REPO / "ppo_vllm_async.py"),
            "--async_mode" if async_mode else "--no-async_mode",
        ]
        command += [
            "--output_dir",
            folder,
            "--run_name",
            "run",
            "--dtype",
            "float32",
            "--seed",
            "1",
        ]
        # The debug model with another end token, which it does not know: every response has
        # response_length tokens.
        shutil.copytree(REPO / "debug_assets" / "model", Path(folder) / "model")
        for name in ("config.json", "generation_config.json"):
            config = json.loads((Path(folder) / "model" / name).read_bytes()) | {"eos_token_id": 5}
            (Path(folder) / "model" / name).write_text(json.dumps(config), "utf-8")
        command += [
            "--dataset",
            "debug_assets/train.parquet",
            "--model_name_or_path",
            f"{folder}/model",
        ]
        sizes = {
            "local_rollout_batch_size": 64,
            "local_mini_batch_size": 64,
            "per_device_train_batch_size": 32,
        }
        sizes |= {
            "local_rollout_forward_batch_size": 32,
            "response_length": 128,
            "max_prompt_token_length": 16,
        }
        for name, value in zip(flags[::2], flags[1::2], strict=True):
            sizes[name.removeprefix("--")] = value
        episodes = int(sizes["local_rollout_batch_size"]) * int(
            sizes.get("number_samples_per_prompt", 1)
        )
        sizes["total_episodes"] = (steps + WARM_UP) * episodes
        for name, value in sizes.items():
            command += [f"--{name}", str(value)]
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        result = subprocess.run(
            command, cwd=REPO, env=environment, capture_output=True, encoding="utf-8"
        )
        if result.returncode:
            sys.exit(result.stderr)
        lines = [
            json.loads(line)
            for line in (Path(folder) / "run" / "metrics.jsonl").read_text("utf-8").splitlines()
        ]
    # The last async step has nothing to overlap with: it is left out in both modes.
    lines = lines[WARM_UP:-1]
    total = statistics.mean(line["time/training"] for line in lines)
    # What the thread does: it samples, and asks for rewards
    generation = statistics.mean(line["time/generation"] + line["time/reward"] for line in lines)
    return (
        total,
        generation,
        total - statistics.mean(line["time/wait_for_generation"] for line in lines),
    )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["toy", "reward", "real"])
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument(
        "--threads", type=int, nargs="+", default=[1, 2], help="numbers of learner threads to try"
    )
    args, flags = parser.parse_known_args()
    if len(flags) % 2:
        parser.error(
            f"flags of the script need a value each, as in --num_epochs 2: {' '.join(flags)}"
        )
    if args.what == "toy":
        times = []
        for async_mode in (False, True):
            print("async" if async_mode else "sync")
            steps = run_toy(async_mode)
            print_trace(steps)
            times.append(seconds_of(steps))
        sync, overlapped = times
        print(f"sync {sync:.2f} s, async {overlapped:.2f} s: {sync / overlapped:.2f} times as fast")
        return
    if args.what == "reward":
        for async_mode in (True, False):
            mode = "async" if async_mode else "sync"
            ratios = []
            for _ in range(args.pairs):
                slow, fast = (run_with_rewards(async_mode, seconds) for seconds in (0.2, 0.0))
                ratios.append(slow / fast)
                print(f"{mode}: {slow:.2f} s with slow rewards, {fast:.2f} s without", flush=True)
            print(f"{mode}, median of {args.pairs} pairs: {statistics.median(ratios):.3f} times")
        return
    ratios = []
    for pair in range(1, args.pairs + 1):
        runs = {
            mode: [run_real(mode, n, args.steps, flags) for n in args.threads]
            for mode in (False, True)
        }
        (sync, generation, training), (overlapped, *_) = min(runs[False]), min(runs[True])
        limit = (generation + training) / max(generation, training)
        ratios.append((sync / overlapped, sync / overlapped / limit))
        print(
            f"pair {pair}: sync {sync:.3f} s a step "
            f"(generation {generation:.3f}, training {training:.3f}), "
            f"async {overlapped:.3f} s: {ratios[-1][0]:.2f} times as fast, limit {limit:.2f}",
            flush=True,
        )
    gain, share = (statistics.median(column) for column in zip(*ratios, strict=True))
    print(f"median of {args.pairs} pairs: {gain:.2f} times as fast, {share:.0%} of the limit")


if __name__ == "__main__":
    main()
