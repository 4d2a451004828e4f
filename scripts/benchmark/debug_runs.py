"""Run a script and read its metrics, for the programs in this folder."""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]


def make_parser(docstring):
    """Return a parser whose --help prints a program's docstring as it is."""
    return argparse.ArgumentParser(
        description=docstring, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def flags_of(options):
    """Return options as words of a command line.

    >>> flags_of({"response_length": 8, "async_mode": False})
    ['--response_length', '8', '--no-async_mode']
    """
    flags = []
    for name, value in options.items():
        if isinstance(value, bool):
            flags.append(f"--{name}" if value else f"--no-{name}")
        else:
            flags += [f"--{name}", str(value)]
    return flags


def debug_command(name):
    """Return the script and the flags that scripts/train/debug/NAME.sh launches."""
    text = (REPO / f"scripts/train/debug/{name}.sh").read_text("utf-8")
    last_command = text.partition("\nexec ")[2].partition(" -- ")[2].replace("\\\n", " ")
    last_command = re.sub(r"\$\{\w+:-(.*?)\}", r"\1", last_command)  # ${SCRIPT:-its default}
    words = shlex.split(last_command)
    words.remove("$@")
    script = next(word for word in words if word.endswith(".py"))
    return words[words.index(script) :]


def make_debug_assets():
    command = [sys.executable, REPO / "scripts/train/debug/make_debug_assets.py"]
    subprocess.run(command, cwd=REPO, check=True, capture_output=True)


def read_lines(path):
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def rounded(value):
    """Round a number to four digits. None, which stands for a missing figure, stays None.

    >>> rounded(0.0123456), rounded(None)
    (0.01235, None)
    """
    return None if value is None else float(f"{value:.4g}")


def run(words, folder, threads=1, expected=None, watch=None, **environment):
    """Run `python WORDS` with folder/run as the run's folder.

    Return the lines of its metrics.jsonl, and its output. If it fails, end this program with that
    output, unless a line of the output starts with `expected`. While it runs, call watch(process),
    which must return when the process has ended.
    """
    command = [sys.executable, *words, *flags_of({"output_dir": folder, "run_name": "run"})]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)} | environment
    path = Path(folder, "output.txt")
    with open(path, "w", encoding="utf-8") as file:
        options = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": subprocess.STDOUT}
        with subprocess.Popen(command, cwd=REPO, env=environment, **options) as process:
            if watch:
                watch(process)
    output = path.read_text("utf-8")
    if process.returncode and not (expected and f"\n{expected}" in f"\n{output}"):
        sys.exit(f"{shlex.join(map(str, command))}\n{output}")
    metrics = Path(folder, "run/metrics.jsonl")
    return read_lines(metrics) if metrics.exists() else [], output
