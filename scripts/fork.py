"""Writes a fork of a script: scripts/forks/NAME.diff, applied to the script that it is against.

    python scripts/fork.py inflight grpo_inflight.py

docs/forks.md says what each changes. The new file runs where it lies, as any copy of a script does
(docs/fork.md). After a change of yours, this makes the diff again:

    git diff --no-index grpo_vllm_async.py grpo_inflight.py > scripts/forks/inflight.diff

With --bug it is a script with a bug to learn from, scripts/failures/NAME.diff (docs/failures.md).
The first line of the new file says so.

    python scripts/fork.py --bug stale_weights grpo_stale_weights.py

With --without it is a script that lacks parts, scripts/deletions/NAME.diff, in any number
(docs/fork.md).

    python scripts/fork.py --without adapters,fsdp2,placement,resume grpo_small.py
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
FORKS, FAILURES = REPO / "scripts/forks", REPO / "scripts/failures"
DELETIONS = REPO / "scripts/deletions"


def names_in(folder):
    """Those of the diffs in a folder."""
    return sorted(path.stem for path in folder.glob("*.diff"))


def base_of(diff):
    """The script that a diff is against.

    >>> base_of("--- a/ppo_sync.py\\n+++ b/my_fork.py\\n")
    'ppo_sync.py'
    """
    return re.search(r"^--- a/(\S+)", diff, re.MULTILINE)[1]


def refuse_old(output):
    if output.exists():
        raise SystemExit(f"{output} exists; move it away, or choose another name")


def write_fork(name, output, is_bug=False):
    """Writes a fork, or a script with a bug, to a file, which must not exist yet."""
    path = (FAILURES if is_bug else FORKS) / f"{name}.diff"
    diff = path.read_text("utf-8")
    refuse_old(output)
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


def changes_in(diff):
    """The changes of a diff: the index of the first line, how many lines go, and which come.

    >>> changes_in("--- a/x.py\\n+++ b/y.py\\n@@ -3,2 +3,2 @@\\n kept\\n-old\\n+new\\n")
    [[3, 1, ['new\\n']]]
    """
    changes, index, is_in_one = [], 0, False
    for line in diff.splitlines(keepends=True)[2:]:
        if header := re.match(r"@@ -(\d+)", line):
            index, is_in_one = int(header[1]) - 1, False
        elif line.startswith(" "):
            index, is_in_one = index + 1, False
        else:
            if not is_in_one:
                changes.append([index, 0, []])
            is_in_one = True
            if line.startswith("-"):
                changes[-1][1] += 1
                index += 1
            else:
                changes[-1][2].append(line[1:])
    return changes


def leave_out(names):
    """A script without some parts. What one part rewrites and another one takes out is out."""
    diffs = [(DELETIONS / f"{name}.diff").read_text("utf-8") for name in names]
    (base,) = {base_of(diff) for diff in diffs}
    changes = [change for diff in diffs for change in changes_in(diff)]
    rewritten, out, new_lines = set(), set(), defaultdict(list)
    for first, count, new in changes:
        (rewritten if new else out).update(range(first, first + count))
    for first, count, new in changes:
        if not count or not {*range(first, first + count)} <= out:
            new_lines[first] += new
    lines = []
    for index, line in enumerate((REPO / base).read_text("utf-8").splitlines(keepends=True)):
        lines += new_lines[index]
        if index not in rewritten | out:
            lines.append(line)
    return "".join(lines)


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
    parts = names_in(DELETIONS)
    parser.add_argument(
        "--without",
        type=lambda text: text.split(","),
        metavar="NAMES",
        help=f"in place of a fork, with a comma between: {', '.join(parts)}",
    )
    parser.add_argument("output", type=Path, help="the file to write")
    args = parser.parse_args()
    if [args.name, args.bug, args.without].count(None) != 2:
        parser.error("name a fork, or with --bug a bug, or parts, and the file to write")
    output = args.output.expanduser()
    if args.without:
        if unknown := {*args.without} - {*parts}:
            parser.error(f"--without {', '.join(unknown)}: there are {', '.join(parts)}")
        refuse_old(output)
        output.write_text(leave_out(args.without), "utf-8")
    else:
        write_fork(args.name or args.bug, output, is_bug=bool(args.bug))
    print(f"wrote {args.output}")


if __name__ == "__main__":
    main()
