"""What generation without drains gains: seconds a batch of scripts/forks/inflight.diff.

    python scripts/benchmark/inflight.py --step_ms 15

In turn: grpo_vllm_async.py with --no-async_mode ("turns"), with --async_mode ("async"), and the
fork with a --max_staleness of 1, 2 and 4. The model is the debug model with an end token that it
does not know, and lengths are drawn instead, by the seed of a response, so all arms sample
responses of the same lengths: log-normal, the standard deviation of a length's logarithm is 1, and
a tenth reach the cap of 128 tokens. A batch is 16 responses. Learner and vLLM have a thread each.

On a CPU a step of vLLM's costs by the row, so a batch's last responses cost little. On a GPU it
takes about as long for few rows as for many, and costs the learner nothing, if that has another
GPU. --step_ms is as near as a CPU comes to that: vLLM sleeps at the end of each step until it has
taken so many milliseconds.

A line is the median over the rounds: seconds a batch, without the first steps; the speed against
the turns of the same round; the mean and the largest staleness of a token.
"""

import argparse
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

from run import REPO, flags_of, make_endless_model, run

sys.path.insert(0, str(REPO / "scripts"))
from fork import write_fork

WARM_UP = 10  # steps left out: until batches are as old as they get
PROMPTS, GROUP, CAP = 4, 4, 128
OPTIONS = {
    "dataset": "debug_assets/train.parquet",
    "reward_workers": 1,
    "dtype": "float32",
    "learning_rate": 1e-6,
    "num_evals": 0,
    "response_length": CAP,
    "local_rollout_batch_size": PROMPTS,
    "number_samples_per_prompt": GROUP,
    "local_mini_batch_size": PROMPTS * GROUP,
    "per_device_train_batch_size": 16,
}
ARMS = {"turns": ("script.py", ["--no-async_mode"]), "async": ("script.py", [])}
ARMS |= {f"in flight, {k}": ("fork.py", ["--max_staleness", str(k)]) for k in (1, 2, 4)}
LENGTHS = """
def drawn_length(seed, args):
    z = np.random.default_rng(seed).normal()
    length = args.response_length * math.exp(z - 1.2816)  # a tenth is above 1.2816
    return min(args.response_length, max(1, round(length)))


"""
REWARD = """
def score(data_source, response, ground_truth, extra_info):
    return float(len(response) % 2)
"""
STEPS = """
    step = llm.llm_engine.step

    def take_long():
        end = time.perf_counter() + float(os.environ["STEP_MS"]) / 1000
        outputs = step()
        time.sleep(max(0.0, end - time.perf_counter()))
        return outputs

    llm.llm_engine.step = take_long
"""
STARTED = '        raise RuntimeError(f"vLLM does not start: {error!r}") from error\n'
MAIN = 'if __name__ == "__main__":'


def stretch(path, old, new):
    """Changes how long a script's responses are (old, new), and what a step of vLLM's takes."""
    text = path.read_text("utf-8")
    for before, after in ((old, new), (STARTED, STARTED + STEPS), (MAIN, LENGTHS.lstrip() + MAIN)):
        assert text.count(before) == 1, f"{path.name} has no {before}"
        text = text.replace(before, after)
    path.write_text(text, "utf-8")


def prepare(folder):
    """Writes the two scripts, a reward, and the model to a folder."""
    shutil.copy(REPO / "grpo_vllm_async.py", folder / "script.py")
    write_fork("inflight", folder / "fork.py")
    most = "max_tokens=args.response_length"
    stretch(folder / "script.py", f"{most},", "max_tokens=drawn_length(seed, args),")
    stretch(folder / "fork.py", f"{most} -", "max_tokens=drawn_length(response.seed, args) -")
    (folder / "reward.py").write_text(REWARD, "utf-8")
    make_endless_model(folder / "model")


def measure(folder, script, flags, args):
    """Seconds a batch, and the mean and largest staleness, of a run."""
    shutil.rmtree(folder / "run", ignore_errors=True)
    options = OPTIONS | {
        "model_name_or_path": folder / "model",
        "reward_fn": f"{folder / 'reward.py'}:score",
        "total_episodes": (WARM_UP + args.steps) * PROMPTS * GROUP,
    }
    words = [folder / script, *flags_of(options), *flags]
    lines, _ = run(words, folder, STEP_MS=str(args.step_ms))
    lines = lines[WARM_UP - 1 : -1]  # the last step has nothing to overlap with
    first, last = lines[0]["time/from_scratch"], lines[-1]["time/from_scratch"]
    staleness = [line["policy/staleness"] for line in lines]
    largest = [line.get("policy/staleness_max", line["policy/staleness"]) for line in lines]
    return (last - first) / (len(lines) - 1), statistics.mean(staleness), max(largest)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--step_ms", type=float, default=0.0)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    results = {arm: [] for arm in ARMS}
    with tempfile.TemporaryDirectory() as name:
        prepare(Path(name))
        for _ in range(args.rounds):
            for arm, command in ARMS.items():
                results[arm].append(measure(Path(name), *command, args))
    for arm, rows in results.items():
        ratio = statistics.median(a[0] / b[0] for a, b in zip(results["turns"], rows, strict=True))
        seconds, mean, largest = map(statistics.median, zip(*rows, strict=True))
        print(
            f"{arm}: {seconds:.2f} s a batch, {ratio:.2f} times as fast as turns, "
            f"staleness {mean:.2f}, at most {largest:g}"
        )


if __name__ == "__main__":
    main()
