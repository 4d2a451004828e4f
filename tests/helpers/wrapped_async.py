"""Runs an async script under watch, or with a fault: wrapped_async.py SCRIPT FAULT [its flags].

Whatever the fault, it is checked that one thread at a time uses an engine, and what goes through
the two queues is counted; with KEEP_VERSIONS set to a folder the weights of every sync are kept
there, every batch in the run's folder.

FAULT is one of
    none
    explosion    the first update leaves weights that are out of bounds
    generator    the generation of the third step's responses fails on rank 0 while the second
                 step trains: its first update takes until then
"""

import importlib
import itertools
import os
import queue
import sys
import threading
import time
from pathlib import Path

sys.path.extend(str(folder) for folder in Path(__file__).resolve().parents[1:3])

import torch

from helpers import hooks
from helpers.saving_batches import save_batches


class CountingQueue(queue.Queue):
    made = []  # noqa: RUF012

    def __init__(self, maxsize):
        super().__init__(maxsize)
        self.came, self.went = 0, 0
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


def burn(llm, *args):
    """Called in vLLM's process."""
    raise OSError("the engine is on fire")


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


def main():
    name, fault = sys.argv.pop(1), sys.argv.pop(1)
    script = importlib.import_module(name.removesuffix(".py"))
    if fault == "generator":
        fail_in_generation(script)
    elif fault == "explosion":
        hooks.multiply_learning_rate(script, 1e33)
    else:
        assert fault == "none", fault
    watch(script)
    if "KEEP_VERSIONS" in os.environ:
        keep_versions(script, Path(os.environ["KEEP_VERSIONS"]))
    try:
        script.main()
        print("Through the queues:", [(q.came, q.went) for q in CountingQueue.made])
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":  # vLLM's processes import this file too
    main()
