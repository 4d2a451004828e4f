"""What each step from turns to refilled batches gains: seconds a batch, one rung at a time.

    python scripts/benchmark/ladder.py     # all rungs and cells, two at a time: an hour
    python scripts/benchmark/ladder.py --rungs "turns" "in flight, 2" --spreads 1 --training 1
    # of a file that has all rungs of its cells
    python scripts/benchmark/ladder.py --results docs/ladder.jsonl --table --draw ladder.png

The rungs: turns with a pass for old log-probabilities, as most trainers make it; without it (GRPO's
first update makes the same pass); one step asynchronous, with it and without; in flight with a
staleness of 1, 2 and 4 at most (scripts/forks/inflight.diff); and refill on top of 2
(scripts/forks/refill.diff), which samples another group where all rewards of one are equal.

The scripts are the real ones, with the debug model, and so is vLLM; times are those of two GPUs,
as far as the processors here keep up: a step of vLLM's takes --step_ms, however many responses it
has. An update takes --training times as long as sampling a longest response, less the share of rows
that it skips; a pass for old log-probabilities a third of that. Lengths are as in inflight.py:
log-normal, of which a tenth reach the cap.

A line is a run: seconds a batch without the first steps; of a batch's groups the share that has a
signal; time/generation (at spread 0 in turns that is --response_length times --step_ms, where the
machine kept up; in flight it is no sum of vLLM's work); mean and largest staleness of a token. What
--results has --rounds times, with the same settings, is not run again. Tables and picture have the
fastest run of a cell: other work only slows.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from inflight import FLAGS, REPO, prepare, stretch, write_fork

WARM_UP = 8  # steps left out: until batches are as old as they get
GROUP = FLAGS["number_samples_per_prompt"]
OLD_PASS = "with the old pass"
RUNGS = {
    f"turns, {OLD_PASS}": ("old_pass.py", ["--no-async_mode"]),
    "turns": ("script.py", ["--no-async_mode"]),
    f"one step async, {OLD_PASS}": ("old_pass.py", []),
    "one step async": ("script.py", []),
    "in flight, 1": ("fork.py", ["--max_staleness", "1"]),
    "in flight, 2": ("fork.py", ["--max_staleness", "2"]),
    "in flight, 4": ("fork.py", ["--max_staleness", "4"]),
    "refill, 2": ("refill.py", ["--max_staleness", "2"]),
}
LEARNER = """

def lasting(function, rows_of):
    def take_long(accelerator, policy, batch, rows, *rest):
        computed = batch.computed[rows_of(rows)].sum().item()
        end = time.perf_counter() + computed * float(os.environ["ROW_MS"]) / 1000 * (
            1 / 3 if function.__name__ == "forward_all" else 1
        )
        result = function(accelerator, policy, batch, rows, *rest)
        time.sleep(max(0.0, end - time.perf_counter()))
        return result

    return take_long


forward_all = lasting(forward_all, lambda mini_batches: sum(mini_batches, []))
accumulate_gradients = lasting(accumulate_gradients, list)

"""
FORWARD = '        with timed(metrics, "forward"):\n'
EXTRA = "            forward_all(accelerator, policy, batch, epochs[0], size, args)\n"


def prepare_all(folder):
    """Writes scripts, forks, a reward and the model to a folder."""
    prepare(folder)
    write_fork("refill", folder / "refill.py")
    old, new = (
        "max_tokens=args.response_length - ",
        "max_tokens=drawn_length(response.seed, args) - ",
    )
    stretch(folder / "refill.py", old, new)
    for name in ("script", "fork", "refill"):
        path = folder / f"{name}.py"
        before = 'if __name__ == "__main__":'
        path.write_text(
            path.read_text("utf-8").replace(before, LEARNER.lstrip("\n") + "\n" + before), "utf-8"
        )
    text = (folder / "script.py").read_text("utf-8")
    assert text.count(FORWARD) == 1
    (folder / "old_pass.py").write_text(text.replace(FORWARD, FORWARD + EXTRA), "utf-8")


def run(folder, rung, spread, training, run_name, args):
    """The line of a run, in a folder of its own beside the scripts."""
    script, flags = RUNGS[rung]
    episodes = args.prompts * GROUP
    values = FLAGS | {"local_rollout_batch_size": args.prompts, "local_mini_batch_size": episodes}
    values |= {"total_episodes": (WARM_UP + args.steps) * episodes}
    values |= {"response_length": args.response_length}
    values |= {"dataset": REPO / "debug_assets/train.parquet", "model_name_or_path": "model"}
    values |= {"reward_fn": "reward.py:score", "reward_workers": 1}
    values |= {"run_name": run_name}
    command = [sys.executable, script]
    for name, value in values.items():
        command += [f"--{name}", str(value)]
    row_ms = training * args.response_length * args.step_ms / episodes
    settings = {"LENGTH_SPREAD": spread, "STEP_MS": args.step_ms, "ROW_MS": row_ms}
    settings["OMP_NUM_THREADS"] = 1
    environment = os.environ | {name: str(value) for name, value in settings.items()}
    result = subprocess.run(
        [*command, *flags], cwd=folder, env=environment, capture_output=True, encoding="utf-8"
    )
    if result.returncode:
        raise RuntimeError(f"{rung}, spread {spread}: {result.stdout}\n{result.stderr}")
    run_dir = folder / "output" / values["run_name"]
    lines = [
        json.loads(line) for line in (run_dir / "metrics.jsonl").read_text("utf-8").splitlines()
    ]
    shutil.rmtree(run_dir)
    lines = lines[WARM_UP - 1 : -1]  # the last step has nothing to overlap with
    seconds = lines[-1]["time/from_scratch"] - lines[0]["time/from_scratch"]
    lines = lines[1:]

    def average(name):
        return round(statistics.mean(line.get(name, 0.0) for line in lines), 4)

    largest = max(line.get("policy/staleness_max", line["policy/staleness"]) for line in lines)
    return {
        "rung": rung,
        "spread": spread,
        "training": training,
        "seconds_a_batch": round(seconds / len(lines), 4),
        "with_signal": 1 - average("val/zero_variance_groups") / args.prompts,
        "seconds_of_vllm": average("time/generation"),
        "staleness": average("policy/staleness"),
        "staleness_max": largest,
        "steps": len(lines),
        "step_ms": args.step_ms,
        "response_length": args.response_length,
        "prompts": args.prompts,
    }


def fastest(lines):
    """{(training, rung, spread): the line of the run that was the fastest of its cell}"""
    by_speed = sorted(lines, key=lambda line: line["seconds_a_batch"], reverse=True)
    return {(line["training"], line["rung"], line["spread"]): line for line in by_speed}


def tables(lines):
    """Markdown: a table for each training, each with a row for each rung; a cell has all spreads.

    Speeds are against turns with the old pass, of the same spread.
    """
    found = fastest(lines)
    trainings, spreads = (sorted({key[i] for key in found}) for i in (0, 2))
    of_spreads = "spread " + ", ".join(f"{spread:g}" for spread in spreads)
    text = ""
    for training in trainings:
        text += f"| an update takes {training:g} times as long as sampling | seconds a batch, "
        text += f"{of_spreads} | times as fast | the same by groups with a signal "
        text += "| staleness, mean and largest |\n|---|---|---|---|---|\n"
        base = [found[training, f"turns, {OLD_PASS}", spread] for spread in spreads]
        for rung in RUNGS:
            row = [found[training, rung, spread] for spread in spreads]
            seconds = [line["seconds_a_batch"] for line in row]
            speeds = [
                first["seconds_a_batch"] / line["seconds_a_batch"]
                for first, line in zip(base, row, strict=True)
            ]
            signals = [
                speed * line["with_signal"] / first["with_signal"]
                for speed, first, line in zip(speeds, base, row, strict=True)
            ]
            columns = [seconds, speeds, signals]
            cells = [", ".join(f"{value:.2f}" for value in column) for column in columns]
            ages = [f"{line['staleness']:.1f} {line['staleness_max']:.0f}" for line in row]
            text += f"| {rung} | {' | '.join(cells)} | {', '.join(ages)} |\n"
        text += "\n"
    return text


def draw(lines, path):
    """Speed against turns with the old pass: a panel for each training, a bar for each spread."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = fastest(lines)
    trainings, spreads = (sorted({key[i] for key in found}) for i in (0, 2))
    figure, axes = pyplot.subplots(
        1,
        len(trainings),
        figsize=(12, 5),
        sharex=True,
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for axis, training in zip(axes[0], trainings, strict=True):
        for i, spread in enumerate(spreads):
            rungs = [rung for rung in RUNGS if (training, rung, spread) in found]
            seconds = {rung: found[training, rung, spread]["seconds_a_batch"] for rung in rungs}
            base = seconds[f"turns, {OLD_PASS}"]
            places = [list(RUNGS).index(rung) - 0.27 + 0.27 * i for rung in rungs]
            speeds = [base / seconds[rung] for rung in rungs]
            axis.barh(places, speeds, 0.25, label=f"spread of lengths {spread:g}", color=f"C{i}")
        axis.axvline(1, color="grey", linewidth=0.8)
        axis.set_yticks(range(len(RUNGS)), RUNGS)
        axis.set_title(f"an update takes {training:g} x sampling", fontsize=10)
        axis.set_xlabel("times as fast as turns with the old pass")
    axes[0][0].invert_yaxis()
    handles, labels = axes[0][-1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(spreads))
    figure.savefig(path, dpi=100)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rungs", nargs="+", choices=RUNGS, default=list(RUNGS))
    parser.add_argument("--spreads", type=float, nargs="+", default=[0.0, 0.5, 1.0])
    parser.add_argument("--training", type=float, nargs="+", default=[0.5, 1.0, 2.0])
    parser.add_argument("--prompts", type=int, default=4, help="of a batch; 4 responses each")
    parser.add_argument("--response_length", type=int, default=48)
    parser.add_argument("--step_ms", type=float, default=20.0)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--at_once", type=int, default=2, help="runs at the same time")
    parser.add_argument("--results", type=Path, default=Path("ladder.jsonl"))
    parser.add_argument("--draw", type=Path, metavar="PICTURE", help="of the lines that are there")
    parser.add_argument("--table", action="store_true", help="of the lines that are there")
    args = parser.parse_args()
    text = args.results.read_text("utf-8") if args.results.exists() else ""
    lines = [json.loads(line) for line in text.splitlines()]
    cells = {(line["training"], line["spread"]) for line in lines}
    if (args.table or args.draw) and len(fastest(lines)) < len(cells) * len(RUNGS):
        parser.error(f"{args.results} lacks some rungs of its cells")
    if args.table:
        print(tables(lines), end="")
    if args.draw:
        draw(lines, args.draw)
    if args.table or args.draw:
        return
    settings = {name: getattr(args, name) for name in ("step_ms", "response_length", "prompts")}
    settings["steps"] = args.steps - 1  # the last one does not count
    alike = [line for line in lines if line | settings == line]
    made = Counter((line["rung"], line["spread"], line["training"]) for line in alike)
    cells = [(r, s, t) for t in args.training for s in args.spreads for r in args.rungs]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.at_once) as pool:
        prepare_all(Path(folder))
        jobs = [
            pool.submit(run, Path(folder), *cell, f"run_{i}_{place}", args)
            for i in range(args.rounds)
            for place, cell in enumerate(cells)
            if made[cell] <= i
        ]
        try:
            for job in jobs:
                line = json.dumps(job.result())
                print(line, flush=True)
                with args.results.open("a", encoding="utf-8") as file:
                    file.write(line + "\n")
        finally:
            pool.shutdown(cancel_futures=True)  # after a failure none begins


if __name__ == "__main__":
    main()
