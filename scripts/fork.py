"""Writes a fork of a script: scripts/forks/NAME.diff, applied to the file that it is against.

    python scripts/fork.py inflight grpo_inflight.py

docs/forks.md says what each changes. Bugs to learn from are in scripts/failures in the same form
(docs/failures.md). The new file runs where it lies, as any copy of a script does (docs/fork.md).
After a change of yours, this makes the diff again:

    git diff --no-index grpo_vllm_async.py grpo_inflight.py > scripts/forks/inflight.diff

A diff may be against what another one writes: refill's is against grpo_inflight.py, in which
inflight's diff calls its result (+++). Then both are applied.
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


def base_of(diff):
    """The file that a diff is against: a script, or a fork.

    >>> base_of("--- a/ppo_sync.py\\n+++ b/my_fork.py\\n")
    'ppo_sync.py'
    """
    return re.search(r"^--- a/(\S+)", diff, re.MULTILINE)[1]


def find_diffs():
    """Forks and failures, no two of a name: {name: path of its diff}."""
    return {path.stem: path for folder in (FORKS, FAILURES) for path in folder.glob("*.diff")}


def write_base(diff, output):
    """Writes the file that a diff is against."""
    base = base_of(diff)
    for name, path in find_diffs().items():
        if f"\n+++ b/{base}\n" in path.read_text("utf-8"):
            return write_fork(name, output)
    shutil.copy(REPO / base, output)


def write_fork(name, output):
    """Writes a fork to a file, which must not exist yet."""
    diff = find_diffs()[name].read_text("utf-8")
    if output.exists():
        raise SystemExit(f"{output} exists; move it away, or choose another name")
    if not shutil.which("git"):
        raise SystemExit("git applies the diffs, and is not installed: `apt-get install git`")
    base = base_of(diff)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, base)
        write_base(diff, copy)
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
            raise SystemExit(f"{name}.diff does not fit {base} any more:\n{result.stderr}")
        shutil.copy(copy, output)


def main():
    sys.stdout.reconfigure(errors="backslashreplace")  # a terminal may know ASCII alone
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=sorted(find_diffs()), help="which fork")
    parser.add_argument("output", type=Path, help="the file to write")
    args = parser.parse_args()
    write_fork(args.name, args.output.expanduser())
    print(f"wrote {args.output}")


if __name__ == "__main__":
    main()
