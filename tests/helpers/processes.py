"""The processes that tests start: how they begin, how they end, and what is left of them."""

import contextlib
import os
import re
import subprocess
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from helpers import REPO
from helpers.files import read_json_lines

TWO_RANKS = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
ONE_RANK = ("-m", "accelerate.commands.launch", "--quiet", "--config_file")
ONE_RANK += (str(REPO / "scripts" / "accelerate" / "one_gpu.yaml"),)
CPU = {"ACCELERATE_USE_CPU": "true"}
STUB = {"STUB": "1", "PYTHONPATH": str(REPO / "tests" / "helpers" / "stub_vllm")}


@dataclass
class Run:
    """What is left of a finished process; run_dir may not exist."""

    returncode: int
    stdout: str
    stderr: str
    run_dir: Path
    seconds: float

    @property
    def metrics(self):
        return read_json_lines(self.run_dir / "metrics.jsonl")

    @property
    def output(self):
        return f"{self.stdout}\n{self.stderr}"


def flags_of(options):
    """{"lam": 0.9, "whiten_rewards": True, "beta": None} -> ["--lam", "0.9", "--whiten_rewards"]"""
    flags = []
    for name, value in options.items():
        if isinstance(value, bool):
            flags.append(f"--{name}" if value else f"--no-{name}")
        elif value is not None:
            flags += [f"--{name}", str(value)]
    return flags


def environment(extra=None):
    """Return a user's environment, without the launcher and the login of whoever runs the tests.

    A process gets one thread, because more would wait for each other when two files are tested at
    the same time.
    """
    hidden = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "WANDB_MODE", "WANDB_API_KEY")
    return (
        {name: value for name, value in os.environ.items() if name not in hidden}
        | {"OMP_NUM_THREADS": "1"}
        | (extra or {})
    )


def wait_until(condition, what, seconds=120):
    """Wait for a condition. The limit is long, because a slow machine is not a failure."""
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.05)
    return result


def alive(processes):
    def lives(process):
        try:
            return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False

    return [process for process in processes if lives(process)]


def new_mark():
    """Return a variable of the environment that marks a process and everything that it starts."""
    return {"TANDEM_TEST": uuid.uuid4().hex}


def processes_with(mark):
    """Return the processes that have a mark."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("TANDEM_TEST") == mark["TANDEM_TEST"]:
                found.append(process)
    return found


def folders_of_vllm(stdout):
    """Return the folders that saving_batches.watched has named (none before vLLM was started)."""
    line = re.search(r"^Folders of vLLM: (.*)$", stdout, re.MULTILINE)
    return [Path(folder) for folder in line[1].split()] if line else []


def end(process):
    """End a process that a test started, and everything that it started."""
    children = []
    with contextlib.suppress(psutil.Error):
        children = psutil.Process(process.pid).children(recursive=True)
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    for child in children:
        with contextlib.suppress(psutil.Error):
            child.kill()
    process.wait()


def finish(process, timeout, started_at):
    try:
        process.wait(timeout)
    except BaseException as error:
        end(process)
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        tail = (process.folder / "stderr").read_text()[-2000:]
        pytest.fail(f"{process.args} still ran after {timeout} s; stderr ends with:\n{tail}")
    stdout, stderr = ((process.folder / name).read_text() for name in ("stdout", "stderr"))
    return Run(process.returncode, stdout, stderr, process.run_dir, time.monotonic() - started_at)
