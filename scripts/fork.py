"""Writes a fork of a script: scripts/forks/NAME.diff, applied to the script that it is against.

    python scripts/fork.py inflight grpo_inflight.py

docs/forks.md says what each changes. The new file runs where it lies, as any copy of a script does
(docs/fork.md). After a change of yours, this makes the diff again:

    git diff --no-index grpo_vllm_async.py grpo_inflight.py > scripts/forks/inflight.diff

With --bug it is a script with a bug to learn from, scripts/failures/NAME.diff (docs/failures.md).
The first line of the new file says so.

    python scripts/fork.py --bug stale_weights grpo_stale_weights.py
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
FORKS, FAILURES = REPO / "scripts/forks", REPO / "scripts/failures"


def names_in(folder):
    """Those of the diffs in a folder."""
    return sorted(path.stem for path in folder.glob("*.diff"))


def base_of(diff):
    """The script that a diff is against.

    >>> base_of("--- a/ppo_sync.py\\n+++ b/my_fork.py\\n")
    'ppo_sync.py'
    """
    return re.search(r"^--- a/(\S+)", diff, re.MULTILINE)[1]


def write_fork(name, output, is_bug=False):
    """Writes a fork, or a script with a bug, to a file, which must not exist yet."""
    path = (FAILURES if is_bug else FORKS) / f"{name}.diff"
    diff = path.read_text("utf-8")
    if output.exists():
        raise SystemExit(f"{output} exists; move it away, or choose another name")
    if not shutil.which("git"):
        raise SystemExit("git applies the diffs, and is not installed: `apt-get install git`")
    base = base_of(diff)
    with tempfile.TemporaryDirectory() as folder:
        copy = shutil.copy(REPO / base, folder)
        # git patches plain files in a folder that is in no repository
        diff = re.sub(r"^\+\+\+ b/.*$", f"+++ b/{base}", diff, flags=re.MULTILINE)
        diff = re.sub(r"^diff --git .*$", f"diff --git a/{base} b/{base}", diff, flags=re.MULTILINE)
        result = subprocess.run(
            ["git", "apply", "-"],
            cwd=folder,
            env=os.environ | {"GIT_CEILING_DIRECTORIES": str(Path(folder).parent)},
            input=diff,
            encoding="utf-8",
            capture_output=True,
        )
        if result.returncode:
            raise SystemExit(f"{path.name} does not fit {base} any more:\n{result.stderr}")
        text = Path(copy).read_text("utf-8")
    if is_bug:
        text = f"# A deliberate bug, to learn from: {name} (docs/failures.md)\n{text}"
    output.write_text(text, "utf-8")


def main():
    sys.stdout.reconfigure(errors="backslashreplace")  # a terminal may know ASCII alone
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", nargs="?", choices=names_in(FORKS), help="which fork")
    bugs = names_in(FAILURES)
    parser.add_argument(
        "--bug", choices=bugs, metavar="NAME", help=f"in place of a fork: {', '.join(bugs)}"
    )
    parser.add_argument("output", type=Path, help="the file to write")
    args = parser.parse_args()
    if (args.name is None) == (args.bug is None):
        parser.error("name a fork, or with --bug a bug, and the file to write")
    write_fork(args.name or args.bug, args.output.expanduser(), is_bug=bool(args.bug))
    print(f"wrote {args.output}")


if __name__ == "__main__":
    main()
