"""Kills runs at random moments, resumes them, and compares what they leave with a run in peace.

    python scripts/benchmark/kill_and_resume.py                                # 20 moments
    python scripts/benchmark/kill_and_resume.py --moments 3 --seed 7
    python scripts/benchmark/kill_and_resume.py --script ppo_sync.py --learning_rate 1e-4

A run on the debug task saves a checkpoint after every step. It gets SIGKILL at a random moment
after its first checkpoint or, every second time, while it saves one. Then it is resumed, and comes
to its end. What it leaves must be what the undisturbed run leaves, byte by byte: metrics.jsonl (but
for what a clock says), samples.jsonl, rollouts.jsonl and the model. And no step may be lost but the
last, whose checkpoint may not have been written yet. The exit status is 1 if a run fails to, or if
less than half of them were killed while they saved.
"""

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent.parent
OF_A_CLOCK = ("time/", "perf/")


def start(script, folder, steps, flags):
    """Starts the script; its output goes to a file in the folder."""
    options = {
        "output_dir": folder,
        "run_name": "run",
        "dataset": "debug_assets/train.parquet",
        "eval_dataset": "debug_assets/test.parquet",
        "model_name_or_path": "debug_assets/model",
        "dtype": "float32",
        "response_length": 8,
        "total_episodes": steps * 128,
        "local_rollout_batch_size": 32,
        "number_samples_per_prompt": 4,
        "local_mini_batch_size": 64,
        "per_device_train_batch_size": 64,
        "learning_rate": 1e-3,
        "num_evals": 4,
        "save_freq": 1,
        "keep_last_n": 0,  # so that what is unfinished is being written, and not removed
    }
    command = [sys.executable, script]
    for name, value in options.items():
        command += [f"--{name}", str(value)]
    with open(folder / "output.txt", "a", encoding="utf-8") as output:
        return subprocess.Popen([*command, *flags], cwd=REPO, stdout=output, stderr=output)


def wait_for(condition, process, what):
    """Waits until condition() is true, and returns it; RuntimeError: the process has ended."""
    while not (result := condition()):
        if process.poll() is not None:
            raise RuntimeError(f"the run ended with status {process.returncode} before {what}")
        time.sleep(0.001)
    return result


def complete_checkpoints(folder):
    """The steps of the checkpoints that are whole, in order."""
    paths = (folder / "run" / "checkpoints").glob("step_?")
    return sorted(int(path.name.removeprefix("step_")) for path in paths)


def is_saving(folder, steps=1):
    """Whether a checkpoint is unfinished, and so many others are there."""
    unfinished = (folder / "run" / "checkpoints").glob("*unfinished")
    return any(unfinished) and len(complete_checkpoints(folder)) >= steps


def lines_of(folder):
    """The lines of metrics.jsonl that are whole."""
    path = folder / "run" / "metrics.jsonl"
    text = path.read_text("utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def files_of(folder):
    """What a run leaves and another one must leave too, by name."""
    lines = []
    for line in lines_of(folder):
        lines.append({name: line[name] for name in line if not name.startswith(OF_A_CLOCK)})
    files = {"metrics.jsonl": lines}
    for name in ("samples.jsonl", "rollouts.jsonl", "model/model.safetensors"):
        files[name] = (folder / "run" / name).read_bytes()
    return files


def kill(process, folder, steps, choice, while_saving, seconds, checkpoint_seconds):
    """Kills a run at a random moment: in the first half of a checkpoint, or at any time.

    steps: of the whole run; seconds: how long it takes after its first checkpoint;
    checkpoint_seconds: what one takes.
    """
    try:
        if while_saving:
            step = choice.randrange(2, steps)
            saving = partial(is_saving, folder, step - 1)
            wait_for(saving, process, f"the checkpoint of step {step}")
            time.sleep(choice.uniform(0, checkpoint_seconds / 2))
        else:
            wait_for(lambda: complete_checkpoints(folder), process, "the first checkpoint")
            time.sleep(choice.uniform(0, seconds))
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.wait()


def resume(script, folder, steps, flags, newest, whole):
    """Resumes a run to its end; returns what is wrong with what it leaves, or an empty list."""
    process = start(script, folder, steps, [*flags, "--resume_from_checkpoint", "latest"])
    if process.wait() != 0:
        output = (folder / "output.txt").read_text("utf-8")
        return [f"it ended with status {process.returncode}: {output[-2000:]}"]
    files = files_of(folder)
    problems = [f"{name} differs" for name, content in whole.items() if files[name] != content]
    text = (folder / "output.txt").read_text("utf-8")
    if not re.search(rf"^Resumed after step {newest};", text, re.MULTILINE):
        problems.append(f"it did not resume step {newest}")
    return problems


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--moments", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=8, help="of a run")
    parser.add_argument("--script", type=os.path.expanduser, default="ppo_vllm_async.py")
    args, flags = parser.parse_known_args()
    subprocess.run(
        [sys.executable, "scripts/dev/make_debug_assets.py"],
        cwd=REPO,
        check=True,
        capture_output=True,
    )
    choice = random.Random(args.seed)
    failures, killed_while_saving = 0, 0
    with tempfile.TemporaryDirectory() as scratch:
        peace = Path(scratch, "peace")
        peace.mkdir()
        process = start(args.script, peace, args.steps, flags)
        wait_for(lambda: complete_checkpoints(peace), process, "the first checkpoint")
        first_checkpoint = time.monotonic()
        if process.wait() != 0:
            sys.exit((peace / "output.txt").read_text("utf-8"))
        seconds = time.monotonic() - first_checkpoint
        whole = files_of(peace)
        checkpoint_seconds = min(line["time/checkpoint"] for line in lines_of(peace)[1:])
        print(f"In peace: {args.steps} steps, {seconds:.1f} s after the first checkpoint;", end=" ")
        print(f"a checkpoint takes {checkpoint_seconds:.3f} s or more", flush=True)

        for moment in range(args.moments):
            folder = Path(scratch, f"run_{moment}")
            folder.mkdir()
            process = start(args.script, folder, args.steps, flags)
            while_saving = moment % 2 == 0
            kill(process, folder, args.steps, choice, while_saving, seconds, checkpoint_seconds)

            newest, lines = complete_checkpoints(folder)[-1], len(lines_of(folder))
            doing = f"with {lines} steps done"
            if is_saving(folder):
                killed_while_saving += 1
                doing += " while it saved"
            problems = []
            if newest < lines - 1:
                problems.append(f"the newest checkpoint is of step {newest}")
            problems += resume(args.script, folder, args.steps, flags, newest, whole)
            failures += bool(problems)
            result = "; ".join(problems) or "equal"
            print(f"{moment + 1}. killed {doing}, resumed step {newest}: {result}", flush=True)
    equal = args.moments - failures
    print(f"{equal} of {args.moments} equal to the run in peace,", end=" ")
    print(f"{killed_while_saving} killed while they saved")
    sys.exit(failures > 0 or killed_while_saving < args.moments // 2)


if __name__ == "__main__":
    main()
