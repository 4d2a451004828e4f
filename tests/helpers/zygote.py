"""Runs of a script that cost no imports: a process that has made them forks for each run.

A run of `python SCRIPT` imports for five seconds, and so does its vLLM's process and the server of
its reward workers; all else of a short run takes as long. The zygote, which is this file as a
program, has imported what they import. For each connection of its Unix socket it forks, while it
has no other thread, a process that does what `python ARGV` does, by runpy. What that starts by
multiprocessing is forked, too, in place of spawned. The scripts know nothing of it; test_runs.py
holds its runs to the real command's, to the bit. Starting and ending is tested by the real command.
"""

import contextlib
import importlib
import itertools
import json
import multiprocessing as mp
import multiprocessing.forkserver
import multiprocessing.popen_fork
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

REPO = Path(__file__).resolve().parents[2]
# Read when libraries are imported. Arrow's jemalloc would have a thread of its own
AT_IMPORT = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TORCH_COMPILE_DISABLE": "1",
    "TQDM_DISABLE": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
    "ARROW_DEFAULT_MEMORY_POOL": "system",
}
IMPORTS = ["accelerate", "datasets", "torch", "transformers.models.auto", "tyro"]
IMPORTS += ["vllm.entrypoints.llm"]


# ---------------------------------------------------------------------------------- for who tests


class Zygote:
    """Forks runs; ends with the process that made it."""

    def __init__(self, environment):
        self.folder = tempfile.TemporaryDirectory(prefix="zygote_")
        self.address = f"{self.folder.name}/socket"
        self.process = subprocess.Popen(
            [sys.executable, __file__, self.address],
            cwd=REPO,
            env=environment | AT_IMPORT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self.process.stdout.readline() == b"ready\n", "the zygote has not started"

    def start(self, argv, env, folder, ranks=1):
        """A Forked run of `python ARGV`; with ranks by a launcher, which ends with the first."""
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self.address)
        connection.sendall(json.dumps([argv, env, str(folder), ranks]).encode() + b"\n")
        return Forked(argv, connection.makefile())

    def end(self):
        self.process.stdin.close()
        self.process.wait()
        self.folder.cleanup()


class Forked:
    """As a subprocess.Popen, whose status the zygote tells."""

    def __init__(self, args, answers):
        self.args, self.answers = args, answers
        self.pid = int(answers.readline())
        self.returncode = None

    def poll(self):
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout=None):
        if self.returncode is None:
            if not select.select([self.answers], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout)
            self.returncode = int(self.answers.readline())
            self.answers.close()
        return self.returncode

    def kill(self):
        os.kill(self.pid, signal.SIGKILL)


class EngineProcess(mp.context.ForkServerProcess):
    """vLLM's process of a test's own engine: forked by a server that has imported vLLM."""

    server = mp.forkserver.ForkServer()

    def __init__(self, target, args):
        super().__init__(target=born_with, args=(dict(os.environ), target, args))

    def start(self):
        self.server.set_forkserver_preload(["vllm.entrypoints.llm", "ppo_vllm_async"])
        with mock.patch.dict(os.environ, AT_IMPORT):
            self.server.ensure_running()
        connect = self.server.connect_to_new_process
        with mock.patch.object(mp.forkserver, "connect_to_new_process", connect):
            super().start()


class EngineContext(mp.context.ForkServerContext):
    Process = EngineProcess


def born_with(environment, target, args):
    """What a spawned process does: it begins with this environment."""
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    target(*args)


@contextlib.contextmanager
def forked_engines():
    """Whatever makes a VLLM inside, its process needs no imports."""
    get_context = mp.get_context
    contexts = {"spawn": EngineContext()}
    with mock.patch.object(mp, "get_context", lambda name: contexts.get(name) or get_context(name)):
        yield


# ------------------------------------------------------------------------------------- the program


def serve(address):
    """Forks for each request, in which it returns that. None: its input was closed.

    A process between waits for the end of the request's, and tells of it.
    """
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    print("ready", flush=True)
    while True:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those between
        if sys.stdin in select.select([sys.stdin, listener], [], [])[0]:
            return None
        connection, _ = listener.accept()
        assert len(os.listdir("/proc/self/task")) == 1, "it has other threads"
        with connection, connection.makefile() as lines:
            if os.fork():
                continue
            request = json.loads(lines.readline())
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            pid = os.fork()
            if not pid:
                return request
            with contextlib.suppress(OSError):  # who asked may be gone
                connection.sendall(f"{pid}\n".encode())
                status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                connection.sendall(f"{status}\n".encode())
            os._exit(0)


def become(argv, env, folder):
    """Sets what `python ARGV` begins with."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    for number, name in enumerate(("stdout", "stderr"), start=1):
        file = os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None  # it is asked for anew
    sys.argv[:] = argv
    paths = env["PYTHONPATH"].split(os.pathsep) if "PYTHONPATH" in env else []
    sys.path[:1] = [str(Path(argv[0]).resolve().parent), *paths]
    fork_in_place_of_spawn()


def fork_in_place_of_spawn():
    """What multiprocessing starts from now on is forked, and inherits no pipe of its siblings.

    By such a pipe a process sees that the one that started it has ended. Nor is it of the ranks.
    """
    fork = mp.get_context("fork")
    mp.get_context = lambda method=None: fork
    launch, started = mp.popen_fork.Popen._launch, []

    def launch_and_note(popen, process):
        launch(popen, process)
        started.append(popen.finalizer)

    def as_if_spawned():
        torch.distributed.GroupMember.WORLD = None
        pipes = [finalizer._args for finalizer in started if finalizer.still_active()]
        for pipe in itertools.chain(*pipes):
            os.close(pipe)
        started.clear()

    mp.popen_fork.Popen._launch = launch_and_note
    os.register_at_fork(after_in_child=as_if_spawned)


def fork_ranks(count):
    """As torchrun: forks so many ranks, in which it returns; if one fails, it ends the others."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    variables |= {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    ranks = []
    for rank in range(count):
        variables |= {"RANK": rank, "LOCAL_RANK": rank}
        ranks.append(os.fork())
        if ranks[-1] == 0:
            os.environ.update({name: str(value) for name, value in variables.items()})
            return
    while ranks:
        pid, status = os.wait()
        ranks.remove(pid)
        if status:
            for other in ranks:
                os.kill(other, signal.SIGTERM)
            os._exit(os.waitstatus_to_exitcode(status) % 256)
    os._exit(0)


if __name__ == "__main__":
    import torch

    for name in IMPORTS:
        importlib.import_module(name)
    request = serve(sys.argv[1])
    if request:
        argv, env, folder, ranks = request
        become(argv, env, folder)
        if ranks > 1:
            fork_ranks(ranks)
        runpy.run_path(argv[0], run_name="__main__")
