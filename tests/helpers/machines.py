"""What tests need of the machine, where it is not the same on all of them."""

import os
import platform
import re
import shutil
import subprocess

NAMESPACES = ["bwrap", "--unshare-all", "--unshare-user", "--disable-userns"]
NAMESPACES += ["--ro-bind", "/", "/", "--proc", "/proc", "true"]
NOBODY = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]


def ask(command):
    """(its exit status, the end of what it said on standard error)."""
    done = subprocess.run(command, cwd="/", capture_output=True, text=True)
    return done.returncode, done.stderr.strip()[-200:]


def why_no_sandbox():
    """A sentence where no code sandbox can be on this machine; None: it can.

    Asked of bubblewrap and not of code_sandbox.py, so that what is wrong there fails its tests.
    """
    if not shutil.which("bwrap"):
        return "bubblewrap is not installed"
    if [int(number) for number in re.findall(r"\d+", platform.release())[:2]] < [5, 14]:
        return f"the code sandbox needs Linux 5.14, and this is {platform.release()}"
    # Where root can become an ordinary user, the sandbox is that user's
    is_root = os.geteuid() == 0 and ask([*NOBODY, "true"])[0] == 0
    status, said = ask([*(NOBODY if is_root else []), *NAMESPACES])
    return f"bubblewrap may make no namespaces on this machine: {said}" if status else None
