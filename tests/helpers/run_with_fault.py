"""Run a script into a fault: run_with_fault.py SCRIPT FAULT [flags of the script].

FAULT is one of FAULTS. It happens in the second step, on rank FAULT_RANK (rank 0 if that is not
set). Before it happens, its time and the semaphores that must not be left behind are printed.
"""

import itertools
import os
import signal
import sys
import time
from functools import partial
from multiprocessing.synchronize import SemLock
from pathlib import Path

sys.path.extend(str(folder) for folder in Path(__file__).resolve().parents[1:3])

from helpers.hooks import around, before
from helpers.saving_batches import run_as_main, watched

semaphores = []  # that were made, as paths


def note_semaphores(make_name=SemLock._make_name):
    def make():
        name = make_name()
        semaphores.append("/dev/shm/sem." + name.removeprefix("/"))
        return name

    SemLock._make_name = staticmethod(make)


def at_call(number, do):
    """Return a function that does this at one of its calls, on the rank of the fault."""
    count = itertools.count(1)
    is_chosen = os.environ.get("RANK", "0") == os.environ.get("FAULT_RANK", "0")

    def maybe(*args):
        if next(count) == number and is_chosen:
            print(f"Fault at {time.monotonic()} with", *semaphores, flush=True)
            do(*args)

    return maybe


def in_update(do, script):
    """do(given) before the first update of the second step; each has one."""
    before(script, "accumulate_gradients", at_call(2, do))


# The number of the request of the second step: an async script has sent two until then
SECOND = 3


def is_request(script, given):
    """Whether a call of vLLM's process is for a step; evaluations have no prompts."""
    return given["function"] is script.sample_responses and bool(given["args"][0])


def raise_error(*_):
    raise OSError("out of luck")


def burn(*_):
    """Called in vLLM's process."""
    raise OSError("the engine is on fire")


def burn_instead(script):
    maybe = at_call(SECOND, lambda given: given.update(function=burn))
    before(script.VLLM, "submit", lambda given: is_request(script, given) and maybe(given))


def kill_vllm_at_work(script):
    # Reward workers were started before
    kill = at_call(SECOND, lambda: os.kill(script.process_groups[-1], signal.SIGKILL))

    def submit(call, given):
        future = call()
        if is_request(script, given):
            kill()
        return future

    around(script.VLLM, "submit", submit)


def raise_without_output(_):
    """As where a pipe was closed, or a disk is full: what was printed cannot be written."""
    sys.stdout = open("/dev/full", "w")  # noqa: SIM115
    print("this cannot be flushed")
    raise_error()


def raise_in_generation(script):
    before(script, "generate_rollout", at_call(SECOND, raise_without_output))


def spoil_gradients(script):
    """On all ranks, of which one takes some time to save the batch."""
    note, count = at_call(3, lambda given: None), itertools.count(1)

    def spoil(given):
        note(given)
        if next(count) == 3:  # the value model's in the second step
            for master in given["optimizer"].param_groups[0]["params"]:
                master.grad.fill_(float("nan"))

    before(script, "apply_gradients", spoil)
    before(script.torch, "save", lambda given: time.sleep(2 * ("bad_batch" in str(given["f"]))))


def kill_self(number):
    return lambda _: os.kill(os.getpid(), number)


def kill_launcher(number):
    """It passes nothing on, or is not asked."""
    return lambda _: os.kill(os.getppid(), number)


def interrupt_group(script):
    # As a shell has it for what it puts into the background
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    in_update(lambda _: os.killpg(os.getpgrp(), signal.SIGINT), script)


FAULTS = {
    "vllm killed at work": kill_vllm_at_work,
    "vllm raises in generation": burn_instead,
    "generation raises, stdout is full": raise_in_generation,
    "gradient is not finite": spoil_gradients,
    "SIGKILL": partial(in_update, kill_self(signal.SIGKILL)),
    "SIGINT to the group": interrupt_group,
    "SIGKILL of the launcher": partial(in_update, kill_launcher(signal.SIGKILL)),
    "SIGHUP of the launcher": partial(in_update, kill_launcher(signal.SIGHUP)),
}


if __name__ == "__main__":  # vLLM's processes import this file too
    name, fault = sys.argv.pop(1), sys.argv.pop(1)
    module = watched(name)
    FAULTS[fault](module)
    note_semaphores()
    run_as_main(module)
