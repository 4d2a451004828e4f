"""Write a fork of a script: apply scripts/forks/NAME.diff to the script that it was made from.

    python scripts/fork.py inflight grpo_inflight.py

docs/ready_made_forks.md describes the forks. The new file runs where it is, like any copy of a
script (docs/changing_a_script.md). The fork lora (docs/adapters.md) fits each of the three scripts:

    python scripts/fork.py lora ppo_lora.py --script ppo_vllm_async.py

After you have changed a fork, make its diff again:

    git diff --no-index grpo_vllm_async.py grpo_inflight.py > scripts/forks/inflight.diff

You can have edited the script itself, if it still has the lines that a diff changes and those
around them. Otherwise nothing is written.

With --bug it writes a script with a bug to learn from, scripts/forks/bugs/NAME.diff
(docs/bug_gallery.md). The first line of the new file says so.

    python scripts/fork.py --bug stale_weights grpo_stale_weights.py

With --without it writes a script that lacks one or more parts, scripts/forks/deletions/NAME.diff
(docs/changing_a_script.md).

    python scripts/fork.py --without fsdp2,placement,resume grpo_small.py
"""

import argparse
import atexit
import importlib
import itertools
import re
import shutil
import sys
import tempfile
from collections import defaultdict
from functools import cache
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
FORKS, FAILURES = REPO / "scripts/forks", REPO / "scripts/forks/bugs"
DELETIONS = REPO / "scripts/forks/deletions"
SCRIPTS = ("grpo_vllm_async.py", "ppo_vllm_async.py", "ppo_sync.py")
FIT_ALL = ("lora",)  # forks whose diff fits each of the SCRIPTS


def names_in(folder):
    """Return the names of the diffs in a folder."""
    return sorted(path.stem for path in folder.glob("*.diff"))


def base_of(diff):
    """Return the script that a diff was made from.

    >>> base_of("--- a/ppo_sync.py\\n+++ b/my_fork.py\\n")
    'ppo_sync.py'
    """
    return re.search(r"^--- a/(\S+)", diff, re.MULTILINE)[1]


def refuse_existing(output):
    if output.exists():
        raise SystemExit(f"{output} exists; move it, or choose another name")


def write_fork(name, output, is_bug=False, script=None):
    """Write a fork, or a script with a bug, to a file that does not exist yet.

    script: the script to fork. By default it is the one that the diff was made from.
    """
    refuse_existing(output)
    text = apply_diffs([(FAILURES if is_bug else FORKS) / f"{name}.diff"], script=script)
    if is_bug:
        text = f"# A deliberate bug, to learn from: {name} (docs/bug_gallery.md)\n{text}"
    output.write_text(text, "utf-8")


def file_of(name, script=SCRIPTS[0]):
    """Return a name for the file of a fork, for programs that write one.

    >>> file_of("lora"), file_of("lora", "ppo_sync.py")
    ('grpo_lora.py', 'ppo_sync_lora.py')
    """
    return f"{script.removesuffix('.py').replace('_vllm_async', '')}_{name}.py"


@cache
def import_fork(name, script=SCRIPTS[0]):
    """Import a fork from a file in a temporary folder, which exists until this process ends."""
    folder = tempfile.mkdtemp(prefix="fork_")
    atexit.register(shutil.rmtree, folder)
    path = Path(folder, file_of(name, script))
    write_fork(name, path, script=script)
    sys.path.insert(0, folder)
    return importlib.import_module(path.stem)


def changes_in(diff, text):
    """Return a diff's changes as (index of the first line, number of lines to remove, new lines).

    A change is made where the text has the lines of the diff. Raise ValueError unless the text has
    them exactly once.

    >>> diff = "--- a/x.py\\n+++ b/y.py\\n@@ -3,2 +3,2 @@\\n kept\\n-old\\n+new\\n"
    >>> changes_in(diff, "first\\nkept\\nold\\n")
    [(2, 1, ['new\\n'])]
    """
    changes = []
    for hunk in re.split(r"^@@ .*\n", diff, flags=re.MULTILINE)[1:]:
        lines = hunk.splitlines(keepends=True)
        before = "\n" + "".join(line[1:] for line in lines if line[0] in " -")
        if (count := f"\n{text}".count(before)) != 1:
            raise ValueError(f"it must contain these lines once, not {count} times:{before}")
        index = f"\n{text}".partition(before)[0].count("\n")
        for is_kept, group in itertools.groupby(lines, lambda line: line[0] == " "):
            group = list(group)
            new = [line[1:] for line in group if line[0] == "+"]
            count = len(group) - len(new)
            if not is_kept:
                changes.append((index, count, new))
            index += count
    return changes


def apply_diffs(paths, text=None, script=None):
    """Return a script with the changes of diffs. A line is removed if any of them removes it.

    script: by default the one that the diffs were made from. text: by default the script's file.
    """
    diffs = {path: path.read_text("utf-8") for path in paths}
    (base,) = {script} if script else {base_of(diff) for diff in diffs.values()}
    if text is None:
        text = (REPO / base).read_text("utf-8")
    changes = []
    for path, diff in diffs.items():
        try:
            changes += changes_in(diff, text)
        except ValueError as error:
            raise SystemExit(
                f"{path.parent.name}/{path.name} does not fit {base} any more: {error}\n"
                f"Use {base} of the last commit that it fits, or make the diff again "
                f"(scripts/dev/refit.py)"
            ) from error
    # What a diff puts in the place of lines is left out if other diffs remove all of these lines
    gone = {i for first, count, new in changes if not new for i in range(first, first + count)}
    lines = [*text.splitlines(keepends=True), ""]  # a diff can add lines at the end
    removed, added = set(), defaultdict(str)
    for first, count, new in changes:
        replaced = range(first, first + count)
        removed.update(replaced)
        if not count or not gone.issuperset(replaced):
            added[first] += "".join(new)
    return "".join(added[i] + (line if i not in removed else "") for i, line in enumerate(lines))


def leave_out(names):
    """Return a script without some parts."""
    return apply_diffs([DELETIONS / f"{name}.diff" for name in names])


def main():
    sys.stdout.reconfigure(errors="backslashreplace")  # a terminal may support only ASCII
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("name", nargs="?", choices=names_in(FORKS), help="Fork to write.")
    bugs, parts = names_in(FAILURES), names_in(DELETIONS)
    bug = f"Bug to write instead of a fork: {', '.join(bugs)}."
    add("--bug", choices=bugs, metavar="NAME", help=bug)
    without = f"Parts to leave out, separated by commas: {', '.join(parts)}."
    add("--without", type=lambda text: text.split(","), metavar="NAMES", help=without)
    add("output", type=Path, help="File to write.")
    script = f"Script to fork, only for {', '.join(FIT_ALL)}."
    add("--script", choices=SCRIPTS, help=script)
    args = parser.parse_args()
    if [args.name, args.bug, args.without].count(None) != 2:
        parser.error("name the file to write, and one of: a fork, --bug, --without")
    if args.script and args.name not in FIT_ALL:
        parser.error(f"--script: only {', '.join(FIT_ALL)} fits more than one script")
    output = args.output.expanduser()
    if args.without:
        if unknown := {*args.without} - {*parts}:
            parser.error(f"--without {', '.join(unknown)}: there are {', '.join(parts)}")
        refuse_existing(output)
        output.write_text(leave_out(args.without), "utf-8")
    else:
        write_fork(args.name or args.bug, output, is_bug=bool(args.bug), script=args.script)
    print(f"Wrote {args.output}")


if __name__ == "__main__":
    main()
