"""Runs an async script under watch, or with a fault: wrapped_async.py SCRIPT FAULT [its flags].

Whatever the fault, it is checked that one thread at a time uses an engine, and what goes through
the two queues is counted; with KEEP_VERSIONS set to a folder the weights of every sync are kept
there, every batch in the run's folder.

FAULT is "none", or
    of grpo_vllm_async.py
        explosion    the first update leaves weights that are out of bounds
        generator    the generation of the third step's responses fails on rank 0 while the second
                     step trains: its first update takes until then
    of ppo_vllm_async.py
        one of FAULTS below. It befalls rank FAULT_RANK, 0 if that is not set, in the second step,
        in which weights are synced for the third time and the third request is answered. Before
        it does, its time and what must not be left behind are printed: see tell().
"""

import functools
import importlib
import itertools
import os
import queue
import signal
import sys
import threading
import time
from multiprocessing.synchronize import SemLock
from pathlib import Path

sys.path.extend(str(folder) for folder in Path(__file__).resolve().parents[1:3])

import torch

from helpers import async_hooks, hooks
from helpers.processes import wait_until
from helpers.saving_batches import save_batches


class CountingQueue(queue.Queue):
    made = []  # noqa: RUF012

    def __init__(self, maxsize=0):
        super().__init__(maxsize)
        self.came, self.went = 0, 0
        if maxsize == 1:  # one of reward workers has no bounds
            self.made.append(self)

    def put(self, item):
        super().put(item)
        self.came += 1

    def get(self, timeout=None):
        item = super().get(timeout=timeout)
        self.went += 1
        return item

    @classmethod
    def answers(cls, request_class):
        """What waits in any of the queues and is no request: rollouts, and what went wrong."""
        waiting = [item for one in cls.made for item in list(one.queue)]
        return [item for item in waiting if not isinstance(item, request_class)]


def burn(*args):
    """Called in vLLM's process."""
    raise OSError("the engine is on fire")


# ------------------------------------------------------------------------------- the older scripts


def watch(script):
    """One thread at a time uses an engine; what is counted and told is read by tests."""
    users = {}  # {engine: the thread that waits for its answer}
    changing = threading.Lock()

    def send(call, given):
        with changing:
            if given["self"] in users:
                raise RuntimeError(f"{given['function']} is sent to vLLM while it is in use")
            users[given["self"]] = threading.current_thread()
        return call()

    def receive(call, given):
        user = users.get(given["self"])
        if user is not threading.current_thread():
            raise RuntimeError(f"an answer of vLLM is taken, which {user} waits for")
        try:
            return call()
        finally:
            del users[given["self"]]

    def note_start(engine):
        users[engine] = threading.current_thread()  # it answers when it has started
        print("Folders of vLLM:", engine.folder, engine.temporary_folder, flush=True)

    hooks.around_each_send(script, send)
    hooks.around_each_receive(script, receive)
    hooks.after_engine_start(script, note_start)
    hooks.count_queues(script, CountingQueue)


def keep_versions(script, folder):
    syncs = itertools.count()

    def keep(weights, version):
        weights = {name: value.clone() for name, value in weights.items()}
        torch.save(weights, folder / f"sync_{next(syncs)}_version_{version}.pt")

    hooks.before_each_sync(script, keep)
    save_batches(script)


def fail_in_generation(script):
    generations, updates = itertools.count(1), itertools.count(1)

    def fail_in_the_third_request(call, given):
        # Two of them a request: its prompts, and those of an evaluation
        is_generation = given["function"] is script.sample_responses
        if is_generation and next(generations) == 5 and given["self"].index == 0:
            given["function"] = burn
        return call()

    def wait_in_the_second_step(accelerator):
        if not accelerator.is_main_process:
            return
        print("Gradients of an update are there", flush=True)
        if next(updates) == 3:  # two updates a step
            deadline = time.monotonic() + 60
            while not CountingQueue.answers(script.Request) and time.monotonic() < deadline:
                time.sleep(0.01)

    hooks.around_each_send(script, fail_in_the_third_request)
    hooks.after_gradients(script, wait_in_the_second_step)


# ------------------------------------------------------------------------------- ppo_vllm_async.py


calls = []  # of vLLM's process, as Futures


def is_idle():
    return all(call.done() for call in calls)


def kill_vllm(script):
    os.kill(script.process_groups[-1], signal.SIGKILL)  # reward workers were started before


def watch_calls(script):
    """One call at a time: whatever thread makes it, vLLM must have answered the last one."""

    def submit(call, given):
        if not is_idle():
            raise RuntimeError(f"{given['function']} is sent to vLLM while it is in use")
        calls.append(call())
        return calls[-1]

    hooks.around_each_send(script, submit)
    hooks.after_engine_start(
        script, lambda vllm: print("Folders of vLLM:", vllm.folder, flush=True)
    )
    hooks.count_queues(script, CountingQueue)


def tell():
    """Says when a fault came, and what this process shares with those that it has started."""
    print(f"Fault at {time.monotonic()} with", *semaphores, flush=True)


semaphores = []  # that were made, as paths


def note_semaphores(make_name=SemLock._make_name):
    def make():
        name = make_name()
        semaphores.append("/dev/shm/sem." + name.removeprefix("/"))
        return name

    SemLock._make_name = staticmethod(make)


def happens_here():
    return os.environ.get("RANK", "0") == os.environ.get("FAULT_RANK", "0")


def at_call(number, do):
    """A hook's function that does this at one of its calls."""
    calls = itertools.count(1)

    def maybe(*args):
        if next(calls) == number and happens_here():
            tell()
            do(*args)

    return maybe


def raise_error(*args):
    raise OSError("out of luck")


def raise_in_generation(script):
    async_hooks.before_each_sample(script, at_call(5, raise_error))


def raise_in_update(script):
    hooks.before_update(script, at_call(2, raise_error))


def raise_in_generation_without_output(script):
    """As where a pipe was closed, or a disk is full: what was printed cannot be written."""

    def fail(*_):
        sys.stdout = open("/dev/full", "w")  # noqa: SIM115
        print("this cannot be flushed")
        raise_error()

    async_hooks.before_each_sample(script, at_call(5, fail))


def at_submit(number, script, is_meant, do):
    """do(given) at this of the calls of vLLM's process that are meant, before it is made."""
    maybe = at_call(number, do)

    def submit(call, given):
        if is_meant(given):
            maybe(given)
        return call()

    hooks.around_each_send(script, submit)


def burn_instead(given):
    given["function"] = burn


def burn_in_sync(script):
    at_submit(3, script, lambda given: given["args"][:1] == ("reset_prefix_cache",), burn_instead)


def burn_in_generation(script):
    at_submit(3, script, lambda given: is_request(script, given), burn_instead)


def is_request(script, given):
    """For a batch; evaluations have no prompts."""
    return given["function"] is script.sample_responses and given["args"][0]


def lose_a_tensor(script):
    hooks.leave_out(script, "lm_head.weight")
    # The first batches are on-policy, and the check is made before an update
    hooks.around(script, "check_sampler", lambda call, given: (tell(), call())[1])


def kill_vllm_at_work(script):
    kill_at_third = at_call(3, lambda: kill_vllm(script))

    def submit(call, given):
        future = call()
        if is_request(script, given):
            kill_at_third()
        return future

    hooks.around_each_send(script, submit)


def kill_idle_vllm(script):
    def kill(*_):
        # It has answered the third request, whose evaluation is empty
        wait_until(lambda: CountingQueue.answers(script.Request), 60, "the answer of vLLM")
        assert is_idle()
        kill_vllm(script)

    hooks.before_update(script, at_call(2, kill))


def signal_script(number, script):
    hooks.before_update(script, at_call(2, lambda *_: os.kill(os.getpid(), number)))


def signal_group(number, script):
    hooks.before_update(script, at_call(2, lambda *_: os.killpg(os.getpgrp(), number)))


def kill_in_checkpoint(script):
    """Models are written, the rest is not."""
    hooks.around(
        script.parquet,
        "write_table",
        lambda call, given: (at_second_checkpoint(), call())[1],
    )


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


at_second_checkpoint = at_call(2, die)

FAULTS = {
    "vllm killed at work": kill_vllm_at_work,
    "vllm killed while idle": kill_idle_vllm,
    "vllm raises in a sync": burn_in_sync,
    "vllm raises in generation": burn_in_generation,
    "vllm lacks a tensor": lose_a_tensor,
    "generation thread raises": raise_in_generation,
    "update raises": raise_in_update,
    "generation thread raises, stdout is full": raise_in_generation_without_output,
    "killed in a checkpoint": kill_in_checkpoint,
    "SIGKILL": functools.partial(signal_script, signal.SIGKILL),
    "SIGTERM": functools.partial(signal_script, signal.SIGTERM),
    "SIGINT": functools.partial(signal_script, signal.SIGINT),
    "SIGTERM to the group": functools.partial(signal_group, signal.SIGTERM),
    "SIGINT to the group": functools.partial(signal_group, signal.SIGINT),
}


def main():
    name, fault = sys.argv.pop(1), sys.argv.pop(1)
    script = importlib.import_module(name.removesuffix(".py"))
    is_new = async_hooks.is_crash_only(script)
    if "STUB" in os.environ:
        hooks.around(script, "check_sampler", lambda call, given: None)
    if is_new and fault in FAULTS:
        FAULTS[fault](script)
    elif fault == "generator":
        fail_in_generation(script)
    elif fault == "explosion":
        hooks.multiply_learning_rate(script, 1e33)
    else:
        assert fault == "none", fault
    (watch_calls if is_new else watch)(script)
    note_semaphores()
    if "KEEP_VERSIONS" in os.environ:
        keep_versions(script, Path(os.environ["KEEP_VERSIONS"]))
    try:
        async_hooks.run_as_main(script)
        print("Through the queues:", [(q.came, q.went) for q in CountingQueue.made])
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":  # vLLM's processes import this file too
    main()
