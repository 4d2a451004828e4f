"""Run `accelerate launch` for a recipe, and print how to resume if it is stopped or fails.

    python scripts/train/launch.py RECIPE [FLAG ...] -- [WORD ...]

RECIPE and the FLAGs are what the user typed. The WORDs are the launcher's options, the script and
its flags. The last line says which step is saved, and has the whole command that resumes the run.
"""

import contextlib
import ctypes
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil

# The environment variables that recipes read
VARIABLES = "GPUS MODEL REWARD_MODEL DATA SCRIPT MACHINE_RANK MAIN_PROCESS_IP MAIN_PROCESS_PORT"
RUN_FLAGS = "run_name", "resume_from_checkpoint"


def resuming(typed: list[str], run_name: str) -> list[str]:
    """Return what was typed, with flags that resume the run of this name instead of its own.

    >>> resuming(["a.sh", "--run-name=old", "--seed", "2"], "mine")
    ['a.sh', '--seed', '2', '--run_name', 'mine', '--resume_from_checkpoint', 'latest']
    """
    kept, previous_flag = [], ""
    for word in typed:
        is_flag = word.startswith("--")
        name, _, _ = word.removeprefix("--").replace("-", "_").partition("=")
        is_of_run = name in RUN_FLAGS if is_flag else previous_flag in RUN_FLAGS
        previous_flag = name if is_flag and "=" not in word else ""
        if not is_of_run:
            kept.append(word)
    return [*kept, "--run_name", run_name, "--resume_from_checkpoint", "latest"]


def last_line(typed: list[str], launched: list[str], run_dir: Path) -> str:
    """Return which step of a run is saved, and the command that resumes it."""
    args = json.loads((run_dir / "args.json").read_bytes())
    # A recipe's first stage, such as a reward model, passes "latest" itself
    resumes_itself = "latest" in launched and "latest" not in typed
    words = typed if resumes_itself else resuming(typed, args["run_name"])
    names = [name for name in VARIABLES.split() if name in os.environ]
    variables = [f"{name}={shlex.quote(os.environ[name])}" for name in names]
    command = " ".join([*variables, shlex.join(["bash", *words])])
    steps = [path.name.removeprefix("step_") for path in run_dir.glob("checkpoints/step_*")]
    steps = [int(step) for step in steps if step.isdecimal()]
    if not steps:
        return f"No step is saved (--save_freq {args['save_freq']}). To start again: {command}"
    return f"Step {max(steps)} is saved. To resume: {command}"


def die_with_parent():
    """Let the launcher end with this process. Its scripts end with the launcher."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1 is PR_SET_PDEATHSIG


def main():
    split = sys.argv.index("--")
    typed, launched = sys.argv[1:split], sys.argv[split + 1 :]
    received, ranks = [], []
    with tempfile.NamedTemporaryFile() as file:  # provenance.py writes the run's folder into it
        process = subprocess.Popen(
            [".venv/bin/accelerate", "launch", "--quiet", *launched],
            env=os.environ | {"TANDEM_LAUNCHED": file.name},
            preexec_fn=die_with_parent,
        )

        def pass_on(number, _):
            received.append(number)
            ranks.extend(psutil.Process(process.pid).children())
            process.send_signal(number)

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, pass_on)
        status, run_dir = process.wait(), os.fsdecode(file.read())
    for rank in ranks:  # a rank that is still importing does not end with the launcher
        with contextlib.suppress(psutil.NoSuchProcess):
            rank.kill()
    psutil.wait_procs(ranks, timeout=10)  # so that the last line comes after their output
    if status and run_dir:
        print(last_line(typed, launched, Path(run_dir)), flush=True)
    elif received:
        print("Nothing is saved, because the run had not begun", flush=True)
    if signal.SIGINT in received:  # let a loop in a shell end as well
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    sys.exit(status if status >= 0 else 128 - status)


if __name__ == "__main__":
    main()
