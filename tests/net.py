"""Makes each wrong change of net.toml in a copy of the repository, and says which no test notices.

    .venv/bin/python tests/net.py gae lock      those with one of these words in their name, or all
    .venv/bin/python tests/net.py --slow        those that only real processes show
    .venv/bin/python tests/net.py --right       nothing is changed: all must survive
The exit status is 1 unless all were noticed.
"""

import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
# By the exit status of pytest, which is 4 or 5 where there is no such test
RESULTS = {0: "SURVIVED", 4: "does not apply", 5: "does not apply"}


def copy_to(folder):
    """Git's files, as they are in the working tree."""
    for name in subprocess.check_output(["git", "ls-files"], cwd=REPO, text=True).splitlines():
        if (REPO / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPO / name, folder / name)
    for name in (".venv", "debug_assets"):
        (folder / name).symlink_to(REPO / name)


def try_change(folder, row, is_right, is_slow):
    """What comes of a row's change: noticed, or one of RESULTS."""
    texts = {path: path.read_text("utf-8") for path in folder.glob(row.get("file", "*.py"))}
    texts = {path: text for path, text in texts.items() if row["text"] in text}
    if {text.count(row["text"]) for text in texts.values()} != {1}:
        return "does not apply"
    for path, text in texts.items():
        path.write_text(text if is_right else text.replace(row["text"], row["other"]), "utf-8")
    command = ["timeout", "600", sys.executable, "-m", "pytest", "-qx", "-p", "no:cacheprovider"]
    command += ["-m", "slow" if is_slow else "not slow", *shlex.split(row["tests"])]
    status = subprocess.run(command, cwd=folder, stdout=subprocess.DEVNULL).returncode
    for path, text in texts.items():
        path.write_text(text, "utf-8")
    return RESULTS.get(status, "noticed")


if __name__ == "__main__":
    is_slow, is_right = ("--slow" in sys.argv), ("--right" in sys.argv)
    words = [word for word in sys.argv[1:] if not word.startswith("--")] or [""]
    results = []
    with tempfile.TemporaryDirectory(prefix="net_") as folder:
        copy_to(Path(folder))
        for name, row in tomllib.loads((REPO / "tests/net.toml").read_text("utf-8")).items():
            if row.get("slow", False) == is_slow and any(word in name for word in words):
                results.append(try_change(Path(folder), row, is_right, is_slow))
                print(f"{results[-1]:<16}{name}", flush=True)
    print(*(f"{count} {result}" for result, count in Counter(results).items()), sep=", ")
    sys.exit(set(results) != {"noticed"})
