"""What a machine may lack: tests of it are skipped there, with a sentence."""

import shutil
import subprocess


def why_no_sandbox():
    """Why bubblewrap cannot work on this machine; None: it can.

    Only this is a reason to skip: a sandbox with a hole does not load either, and is a failure.
    """
    if not shutil.which("bwrap"):
        return "bubblewrap is not installed"
    command = ["bwrap", "--unshare-all", "--unshare-user", "--ro-bind", "/", "/"]
    command += ["--proc", "/proc", "true"]
    if subprocess.run(command, capture_output=True).returncode:
        return "bubblewrap may make no namespaces on this machine"
    return None
