"""What a process that has ended must not have left, whatever ended it."""

import contextlib
import os
import re
import time
import uuid

import psutil

from helpers.processes import folders_of_vllm, wait_until


def new_mark():
    """What to put into the environment of a process, to know it and all that it starts."""
    return {"TANDEM_TEST": uuid.uuid4().hex}


def processes_with(mark):
    """The processes that have a mark; there are others on this machine."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("TANDEM_TEST") == mark["TANDEM_TEST"]:
                found.append(process)
    return found


def check_end(run, mark, within=15):
    """Now, at its end: it came soon after the fault, and nothing is left.

    Soon is within so many seconds; on a slow machine sooner than what came before the fault. run:
    of run_with_fault.py.
    """
    ((fault, names),) = re.findall(r"^Fault at (\S+) with(.*)$", run.stdout, re.MULTILINE)
    assert time.monotonic() - float(fault) < max(within, run.seconds / 2)
    try:
        wait_until(lambda: not processes_with(mark), f"the end of {processes_with(mark)}")
    finally:
        for process in processes_with(mark):
            process.kill()
    folders = folders_of_vllm(run.stdout)
    assert folders
    assert not [path for path in (*folders, *names.split()) if os.path.exists(path)]
