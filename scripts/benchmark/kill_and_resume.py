"""Kills runs at random moments, resumes them, and compares what they leave with a run in peace.

    python scripts/benchmark/kill_and_resume.py                                # 20 moments
    python scripts/benchmark/kill_and_resume.py --moments 3 --seed 7
    python scripts/benchmark/kill_and_resume.py --script ppo_sync.py --learning_rate 1e-4

A run on the debug task saves a checkpoint at every step. It gets SIGKILL at a random moment after
its first checkpoint, or, every second time, while it saves one. Then it is resumed and comes to its
end. What it leaves must be that of the undisturbed run, byte by byte: metrics.jsonl (but for what a
clock says), samples.jsonl, rollouts.jsonl and the model. It must begin again at the step after the
newest checkpoint. The exit status is 1 if a run fails to.
"""

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent.parent
STEPS = 8
OF_A_CLOCK = ("time/", "perf/", "queue/")


def start(script, folder, flags):
    """Starts the script; its output goes to a file in the folder."""
    options = {
        "output_dir": folder,
        "run_name": "run",
        "dataset": "debug_assets/train.parquet",
        "eval_dataset": "debug_assets/test.parquet",
        "model_name_or_path": "debug_assets/model",
        "dtype": "float32",
        "response_length": 8,
        "total_episodes": STEPS * 128,
        "local_rollout_batch_size": 32,
        "number_samples_per_prompt": 4,
        "local_mini_batch_size": 64,
        "per_device_train_batch_size": 64,
        "learning_rate": 1e-3,
        "num_evals": 4,
        "save_freq": 1,
        "keep_last_n": 2,
    }
    command = [sys.executable, script]
    for name, value in options.items():
        command += [f"--{name}", str(value)]
    with open(folder / "output.txt", "a") as output:
        return subprocess.Popen([*command, *flags], cwd=REPO, stdout=output, stderr=output)


def wait_for(condition, process, what):
    """Waits until condition() is true, and returns it; RuntimeError: the process has ended."""
    while not (result := condition()):
        if process.poll() is not None:
            raise RuntimeError(f"the run ended with status {process.returncode} before {what}")
        time.sleep(0.001)
    return result


def steps_of(folder, pattern):
    """The steps of the checkpoints whose folders have such names, in order."""
    paths = (folder / "run" / "checkpoints").glob(pattern)
    return sorted(int(path.name.split("_")[1].split(".")[0]) for path in paths)


def complete_checkpoints(folder):
    return [step for step in steps_of(folder, "step_*") if is_complete(folder, step)]


def is_complete(folder, step):
    return (folder / "run" / "checkpoints" / f"step_{step}").is_dir()


def files_of(folder):
    """What a run leaves and another one must leave too, by name."""
    lines = []
    for line in (folder / "run" / "metrics.jsonl").read_text().splitlines():
        metrics = json.loads(line)
        lines.append({name: metrics[name] for name in metrics if not name.startswith(OF_A_CLOCK)})
    files = {"metrics.jsonl": lines}
    for name in ("samples.jsonl", "rollouts.jsonl", "model/model.safetensors"):
        files[name] = (folder / "run" / name).read_bytes()
    return files


def kill(script, folder, flags, choice, while_saving, seconds):
    """Runs the script until a random moment; returns the newest checkpoint, and what was going on.

    while_saving: that moment is in the middle of a checkpoint; else up to so many seconds after the
    first one.
    """
    process = start(script, folder, flags)
    try:
        if while_saving:
            step = choice.randrange(2, STEPS)
            unfinished = folder / "run" / "checkpoints" / f"step_{step}.unfinished"
            wait_for(unfinished.exists, process, f"the checkpoint of step {step}")
            time.sleep(choice.uniform(0, 0.05))  # such a checkpoint takes 0.05 to 0.1 s
        else:
            wait_for(lambda: complete_checkpoints(folder), process, "the first checkpoint")
            time.sleep(choice.uniform(0, seconds))
        if process.poll() is not None:
            return complete_checkpoints(folder)[-1], "the run was at its end"
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.wait()
    unfinished = steps_of(folder, "step_*.unfinished")
    doing = f"while it saved step {unfinished[-1]}" if unfinished else "between two checkpoints"
    return complete_checkpoints(folder)[-1], doing


def check(script, folder, flags, newest, whole):
    """Resumes a run; returns what is wrong with what it leaves, or an empty list."""
    process = start(script, folder, [*flags, "--resume_from_checkpoint", "latest"])
    if process.wait() != 0:
        return [f"it ended with status {process.returncode}: see {folder / 'output.txt'}"]
    files = files_of(folder)
    problems = [f"{name} differs" for name, content in whole.items() if files[name] != content]
    text = (folder / "output.txt").read_text()
    if f"resumes  {folder}/run/checkpoints/step_{newest}\n" not in text:
        problems.append(f"it did not go on from step {newest}")
    return problems


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--moments", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--script", default="ppo_vllm_async.py")
    args, flags = parser.parse_known_args()
    subprocess.run(
        [sys.executable, "scripts/make_debug_assets.py"], cwd=REPO, check=True, capture_output=True
    )
    choice = random.Random(args.seed)
    failures, saving = 0, 0
    with tempfile.TemporaryDirectory() as scratch:
        peace = Path(scratch, "peace")
        peace.mkdir()
        process = start(args.script, peace, flags)
        wait_for(lambda: complete_checkpoints(peace), process, "the first checkpoint")
        first_checkpoint = time.monotonic()
        if process.wait() != 0:
            sys.exit((peace / "output.txt").read_text())
        seconds = time.monotonic() - first_checkpoint
        whole = files_of(peace)
        print(f"In peace: {STEPS} steps, {seconds:.1f} s after the first checkpoint", flush=True)

        for moment in range(args.moments):
            folder = Path(scratch, f"run_{moment}")
            folder.mkdir()
            newest, doing = kill(args.script, folder, flags, choice, moment % 2 == 1, seconds)
            saving += doing.startswith("while")
            problems = check(args.script, folder, flags, newest, whole)
            failures += bool(problems)
            result = "; ".join(problems) or "equal"
            print(
                f"{moment + 1}. killed {doing}, resumed after step {newest}: {result}", flush=True
            )
    equal = args.moments - failures
    print(f"{equal} of {args.moments} equal to the run in peace, {saving} killed while saving")
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
