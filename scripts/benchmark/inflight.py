"""What generation without drains gains: seconds a batch of scripts/forks/inflight.diff.

    python scripts/benchmark/inflight.py --step_ms 15
    python scripts/benchmark/inflight.py --prompts 16 --response_length 256

In turn: grpo_vllm_async.py with --no-async_mode ("turns"), with --async_mode ("async"), and the
fork at each --staleness. The model is the debug model with an end token that it does not know, and
lengths are drawn instead, by the seed of a response: log-normal, of which a tenth reach the cap,
--response_length. A spread is the standard deviation of a length's logarithm; with 0 all are at the
cap. So all arms sample responses of the same lengths. Learner and vLLM have a thread each. Other
flags go to the scripts.

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
GROUP = 4  # responses to a prompt
LENGTHS = """

def drawn_length(seed, args):
    spread = float(os.environ["LENGTH_SPREAD"])
    z = np.random.default_rng(seed).normal()
    length = args.response_length * math.exp(spread * (z - 1.2816))  # a tenth is above 1.2816
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


def stretch(path, old, new):
    """Changes how long a script's responses are (old, new), and what a step of vLLM's takes."""
    text = path.read_text("utf-8")
    start = "  # vLLM's own may not pickle\n"
    start += '        raise RuntimeError(f"vLLM does not start: {error!r}") from error\n'
    assert text.count(start) == 1
    text = text.replace(start, start + STEPS)
    assert text.count(old) == 1, f"{path.name} has no {old}"
    before = '\n\nif __name__ == "__main__":'
    path.write_text(text.replace(old, new).replace(before, LENGTHS + before.lstrip("\n")), "utf-8")


def prepare(folder):
    """Writes the two scripts, a reward, and the model to a folder."""
    shutil.copy(REPO / "grpo_vllm_async.py", folder / "script.py")
    write_fork("inflight", folder / "fork.py")
    for name, sampled in (("script.py", ""), ("fork.py", "response.")):
        most = "args.response_length" + (" - " if sampled else ",")
        drawn = most.replace("args.response_length", f"drawn_length({sampled}seed, args)")
        stretch(folder / name, f"max_tokens={most}", f"max_tokens={drawn}")
    (folder / "reward.py").write_text(REWARD, "utf-8")
    make_endless_model(folder / "model")


def measure(folder, script, spread, args, flags):
    """Seconds a batch, and the mean and largest staleness, of a run."""
    shutil.rmtree(folder / "run", ignore_errors=True)
    options = {
        "dataset": "debug_assets/train.parquet",
        "model_name_or_path": folder / "model",
        "reward_fn": f"{folder / 'reward.py'}:score",
        "reward_workers": 1,
        "dtype": "float32",
        "learning_rate": 1e-6,
        "num_evals": 0,
        "response_length": args.response_length,
        "total_episodes": (WARM_UP + args.steps) * args.prompts * GROUP,
        "local_rollout_batch_size": args.prompts,
        "number_samples_per_prompt": GROUP,
        "local_mini_batch_size": args.prompts * GROUP,
        "per_device_train_batch_size": 16,
    }
    words = [folder / script, *flags_of(options), *flags]
    lines, _ = run(words, folder, LENGTH_SPREAD=str(spread), STEP_MS=str(args.step_ms))
    lines = lines[WARM_UP - 1 : -1]  # the last step has nothing to overlap with
    first, last = lines[0]["time/from_scratch"], lines[-1]["time/from_scratch"]
    staleness = [line["policy/staleness"] for line in lines]
    largest = [line.get("policy/staleness_max", line["policy/staleness"]) for line in lines]
    return (last - first) / (len(lines) - 1), statistics.mean(staleness), max(largest)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--spreads", type=float, nargs="+", default=[0.0, 0.5, 1.0])
    parser.add_argument("--staleness", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--prompts", type=int, default=4, help="of a batch; 4 responses each")
    parser.add_argument("--response_length", type=int, default=128)
    parser.add_argument("--step_ms", type=float, default=0.0)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--rounds", type=int, default=2)
    args, flags = parser.parse_known_args()
    arms = {"turns": ("script.py", ["--no-async_mode"]), "async": ("script.py", [])}
    for bound in args.staleness:
        arms[f"in flight, {bound}"] = ("fork.py", ["--max_staleness", str(bound)])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        for spread in args.spreads:
            results = {arm: [] for arm in arms}
            for _ in range(args.rounds):
                for arm, (script, options) in arms.items():
                    found = measure(folder, script, spread, args, [*options, *flags])
                    results[arm].append(found)
            for arm, rows in results.items():
                ratios = [a[0] / b[0] for a, b in zip(results["turns"], rows, strict=True)]
                seconds, mean, largest = (
                    statistics.median(column) for column in zip(*rows, strict=True)
                )
                print(
                    f"spread {spread:g}, {arm}: {seconds:.2f} s a batch, "
                    f"{statistics.median(ratios):.2f} times as fast as turns "
                    f"({min(ratios):.2f} to {max(ratios):.2f}), "
                    f"staleness {mean:.2f}, at most {largest:g}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
