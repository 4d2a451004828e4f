"""Makes each wrong change of net.toml in a copy of the repository, and says which no test notices.

    .venv/bin/python tests/net.py gae lock      those with one of these words in their name, or all
    .venv/bin/python tests/net.py --slow        those that only real processes show
    .venv/bin/python tests/net.py --right       nothing is changed: all must survive
Two rows at a time, 10 minutes for all fast ones on two cores. The status is 1 unless all were
noticed.
"""

import importlib
import multiprocessing
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

REPO = Path(__file__).resolve().parents[1]
# By the exit status of pytest, which is 4 or 5 where there is no such test
RESULTS = {0: "SURVIVED", 4: "does not apply", 5: "does not apply"}
# What takes long to import, and is not ours. Each row gets it from this process, by a fork
LIBRARIES = ("accelerate", "datasets", "torch.distributed.fsdp", "tyro", "wandb", "transformers")
SECONDS = 600


def copy_to(folder):
    """Git's files, as they are in the working tree."""
    for name in subprocess.check_output(["git", "ls-files"], cwd=REPO, text=True).splitlines():
        if (REPO / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPO / name, folder / name)
    for name in (".venv", "debug_assets"):
        (folder / name).symlink_to(REPO / name)


def change(folder, row):
    """Make a row's change in each file that has its text; False: a file has it twice, or none."""
    texts = {path: path.read_text("utf-8") for path in folder.glob(row.get("file", "*.py"))}
    texts = {path: text for path, text in texts.items() if row["text"] in text}
    for path, text in texts.items():
        path.write_text(text.replace(row["text"], row["other"]), "utf-8")
    return {text.count(row["text"]) for text in texts.values()} == {1}


def run_pytest(folder, words):
    os.setsid()
    os.chdir(folder)
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nothing, number)
    sys.path.remove(str(REPO / "tests"))
    os._exit(pytest.main(["-qx", "-p", "no:cacheprovider", *words]))


def try_change(row, is_right, is_slow):
    """What comes of a row's change: noticed, or one of RESULTS."""
    with tempfile.TemporaryDirectory(prefix="net_", ignore_cleanup_errors=True) as folder:
        copy_to(Path(folder))
        if not change(Path(folder), row | {"other": row["text"]} if is_right else row):
            return "does not apply"
        words = ["-m", "slow" if is_slow else "not slow", *shlex.split(row["tests"])]
        child = multiprocessing.get_context("fork").Process(target=run_pytest, args=(folder, words))
        child.start()
        child.join(SECONDS)
        if child.exitcode is None:
            for process in [*psutil.Process(child.pid).children(recursive=True), child]:
                process.kill()
    return RESULTS.get(child.exitcode, "noticed")


if __name__ == "__main__":
    is_slow, is_right = ("--slow" in sys.argv), ("--right" in sys.argv)
    words = [word for word in sys.argv[1:] if not word.startswith("--")] or [""]
    rows = tomllib.loads((REPO / "tests/net.toml").read_text("utf-8")).items()
    rows = [(name, row) for name, row in rows if row.get("slow", False) == is_slow]
    rows = [(name, row) for name, row in rows if any(word in name for word in words)]
    for name in LIBRARIES:
        importlib.import_module(name)
    results = Counter()
    with ThreadPoolExecutor(2) as pool:
        tries = pool.map(lambda row: try_change(row, is_right, is_slow), [row for _, row in rows])
        for (name, _), result in zip(rows, tries, strict=True):
            results[result] += 1
            print(f"{result:<16}{name}", flush=True)
    print(*(f"{count} {result}" for result, count in results.items()), sep=", ")
    sys.exit(set(results) != {"noticed"})
