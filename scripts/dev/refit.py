"""Make the diffs below scripts/forks again after a change of a script.

    .venv/bin/python scripts/dev/refit.py               the script differs from the last commit
    .venv/bin/python scripts/dev/refit.py HEAD~3 main   the diffs fit scripts of other commits

A diff that no longer fits is merged (three-way) with the change of its script. If both changed the
same lines, the merged fork is left as NAME.diff.conflict.py. Edit that file, as after `git merge`,
until it is the fork that you want, and run the same command again. It makes the diff from the file,
and removes the file. A diff in a page of docs/ that no longer fits is printed, so that you can edit
the page. The exit status is 1 while something is left to do.
"""

import contextlib
import re
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

import fork


def git(*words):
    """Return the output of a git command in the repository."""
    command = ["git", *words]
    return subprocess.run(command, cwd=fork.REPO, capture_output=True, encoding="utf-8").stdout


def merge(path, script, commits, folder):
    """Return the text of a diff's fork of today's script, perhaps with conflicts.

    Raise ValueError if the diff fits neither the script nor its version at one of the commits.
    """
    old, forked = folder / "old.py", folder / "forked.py"
    older_texts = [git("show", f"{commit}:./{script.name}") for commit in commits]
    for text in [script.read_text("utf-8"), *older_texts]:
        with contextlib.suppress(SystemExit):
            forked.write_text(fork.apply_diffs([path], text), "utf-8")
            old.write_text(text, "utf-8")
            names = ("-L", "fork", "-L", "the script as it was", "-L", "the script as it is")
            return git("merge-file", "-p", *names, forked, old, script)
    known = ", ".join(["now", *commits])
    raise ValueError(f"{path} fits {script.name} at none of {known}; pass another commit")


def refit(path, commits, folder):
    """Make a diff again. Raise ValueError with what is left to do."""
    before, conflict = path.read_text("utf-8"), path.with_suffix(".diff.conflict.py")
    script, forked = fork.REPO / fork.base_of(before), folder / "forked.py"
    if not conflict.exists():
        conflict.write_text(merge(path, script, commits, folder), "utf-8")
    text = conflict.read_text("utf-8")
    if "\n<<<<<<< " in text:
        raise ValueError(f"edit {conflict}, which has conflicts, and run this again")
    forked.write_text(text, "utf-8")
    conflict.unlink()
    head = before.partition("@@ ")[0]
    # Find the number of context lines with which the place of each change is unique
    scripts = fork.SCRIPTS if path.stem in fork.FIT_ALL else [script.name]
    is_short = path.parent == fork.DELETIONS or len(scripts) > 1
    for context in range(1 if is_short else 3, 20):
        diff = git("diff", "--no-index", f"-U{context}", script, forked)
        path.write_text(head + "".join(diff.partition("@@ ")[1:]), "utf-8")
        with contextlib.suppress(SystemExit):
            for name in scripts:
                fork.apply_diffs([path], script=name)
            break
    else:
        raise ValueError(f"{path} fits {script.name}, but not all of {', '.join(scripts)}")
    if path.read_text("utf-8") != before:
        print(f"made again: {path.relative_to(fork.REPO)}")


def check_page(path):
    """Yield a line for each diff of a page that does not fit its script."""
    for part in path.read_text("utf-8").split("n a copy of ")[1:]:
        for name in re.findall(r"`(\w+\.py)`", re.match(r"`\S+`( or `\S+`)?|", part)[0]):
            script = (fork.REPO / name).read_text("utf-8")
            for diff in re.findall(r"```diff\n(.*?)```", part, re.DOTALL):
                try:
                    fork.changes_in(f"@@ \n{diff}", script)
                except ValueError as error:
                    yield f"docs/{path.name}: a diff does not fit {name}: {error}"


def main(commits):
    left = [line for page in sorted(fork.REPO.glob("docs/*.md")) for line in check_page(page)]
    for path in sorted(fork.REPO.glob("scripts/forks/**/*.diff")):
        try:
            with tempfile.TemporaryDirectory() as folder:
                refit(path, commits, Path(folder))
        except ValueError as error:
            left.append(str(error))
    print("\n".join(left) or "all diffs fit")
    return bool(left)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or ["HEAD"]))
