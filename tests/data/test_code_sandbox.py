"""Test scripts/rewards/code_sandbox.py: correct programs score, and hostile ones reach nothing."""

import importlib
import itertools
import json
import os
import platform
import signal
import socket
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import psutil
import pytest
import sandbox_worker
from helpers import REPO
from helpers.machines import why_no_sandbox
from helpers.processes import wait_until

pytestmark = pytest.mark.slow


def load():
    sys.modules.pop("code_sandbox", None)
    return importlib.import_module("code_sandbox")


@pytest.fixture(scope="module")
def sandbox():
    # Nothing else is a reason to skip, because a sandbox with a hole does not load either
    if reason := why_no_sandbox():
        pytest.skip(reason)
    with pytest.MonkeyPatch.context() as patch:
        # These limits are so long that a slow machine does not fail
        for name, value in {"SECONDS": 60, "TOTAL_SECONDS": 120, "MEMORY_MB": 512}.items():
            patch.setenv(f"TANDEM_SANDBOX_{name}", str(value))
        return load()


@pytest.fixture
def score(sandbox):
    return lambda response, truth: sandbox.compute_score("code", response, truth, extra_info=None)


IMPORTS = """import ctypes, mmap, multiprocessing, os, resource, socket, struct
import subprocess, sys, threading, time
libc = ctypes.CDLL(None)
"""


@pytest.fixture
def run(sandbox):
    """Return whether each program reaches its end. All run in one sandbox, one after another."""
    return lambda texts: sandbox.run_in_sandbox(IMPORTS, [{"test": text} for text in texts])


HONEST = "Here it is:\n```python\ndef double(x):\n    return 2 * x\n```\nIt doubles."
HONEST_TESTS = ["assert double(2) == 4", "assert double('ab') == 'abab'"]
WRONG = HONEST.replace("2 * x", "x + 2")  # the second test raises TypeError
MBPP = {"test_list": ["assert depth(root) == 2"], "test_setup_code": "root = Node(Node())"}
NODE = """class Node:
    def __init__(self, below=None): self.below = below
def depth(node): return 1 + depth(node.below) if node else 0"""
HUMANEVAL = {
    "prompt": "def largest(numbers):\n    'The largest number.'\n",
    "test": "def check(candidate):\n    assert candidate([1, 3, 2]) == 3",
    "entry_point": "largest",
}
PAIRS = {"inputs": ["1 2\n", "3 4"], "outputs": ["3\n", "7"]}


# These programs would pass assertions that are judged in their own process
EQUAL_TO_EVERYTHING = """class Equal(str):
    def __eq__(self, other): return True
def double(x): return Equal()"""
READING_THE_ASSERTION = """import ast, sys
def double(x):
    frame = sys._getframe()
    while "case" not in frame.f_locals: frame = frame.f_back
    return ast.literal_eval(frame.f_locals["case"]["test"].split("==")[1].strip())"""


# (a response, a ground truth, the fraction of test cases that pass)
SCORES = [
    (HONEST, HONEST_TESTS, 1.0),
    (EQUAL_TO_EVERYTHING, HONEST_TESTS, 0.0),
    (READING_THE_ASSERTION, HONEST_TESTS, 0.0),
    (HONEST, json.dumps(HONEST_TESTS), 1.0),
    (WRONG, HONEST_TESTS, 0.5),
    (HONEST, ["assert double(2) > 3", "assert double(2) < 3"], 0.5),
    (NODE, MBPP, 1.0),  # the set-up uses the program's class
    ("    return max(numbers)", HUMANEVAL, 1.0),
    ("def largest(numbers): return max(numbers)", HUMANEVAL, 1.0),
    ("    return min(numbers)", HUMANEVAL, 0.0),
    ("if __name__ == '__main__': print(sum(map(int, open(0).read().split())))", PAIRS, 1.0),
    ("print(3)", PAIRS, 0.5),
    ("print(3)\nraise SystemExit(1)", PAIRS, 0.0),
]


def test_score_is_the_fraction_of_test_cases_passed(score):
    scores = [(response, truth, score(response, truth)) for response, truth, _ in SCORES]
    assert scores == SCORES
    for truth in ("def f", "[]", {"test_list": []}, {"inputs": ["1"]}):
        with pytest.raises(ValueError, match="ground_truth must be a list of assertions"):
            score(HONEST, truth)


def test_values_have_the_same_text_if_they_are_equal_in_python():
    values = [0, -0.0, False, 1, 1.0, True, 0.1, 10**300, -1e999, Fraction(1, 10), Decimal("0.1")]
    values += [None, "1", "1/1", "", "None", "\n", b"1", bytearray(b"1"), [], (), [1], (1,)]
    values += [["1, 1"], ["1", "1"], set(), {1, "1"}, frozenset({"1", True}), {}, {1: 2}, {"1": 2}]
    for one, other in itertools.product(values, repeat=2):
        has_same_text = sandbox_worker.canonical(one) == sandbox_worker.canonical(other)
        assert has_same_text == (one == other), (one, other)
    with pytest.raises(TypeError):
        sandbox_worker.canonical([1, range(3)])


# Honest programs that use what the sandbox limits
THREADS = """resource.setrlimit(resource.RLIMIT_STACK, (-1, -1))
threading.stack_size(64 << 20)
def depth(n): return n and depth(n - 1) + 1
found = []
threads = [threading.Thread(target=lambda: found.append(depth(900))) for _ in range(3)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert found == [900] * 3"""
CHILD_PROCESSES = """one, other = multiprocessing.Pipe()
multiprocessing.Process(target=other.send, args=(7,)).start()
assert one.recv() == 7
assert int(subprocess.check_output([sys.executable, "-c", "print(7)"])) == 7"""
# A program that leaves files and processes, and one that needs an empty /tmp and 12 processes
LEFT = """os.makedirs('a/b')
open('a/b/c', 'w')
try:
    while True: os.fork() or os.setsid() or time.sleep(60)
except OSError: pass"""
CLEAN = "assert os.listdir('/tmp') == []\npids = [os.fork() or os._exit(0) for _ in range(12)]"
CLOSED = "os.makedirs('a/b')\nos.chmod('a', 0)"


def test_case_has_what_it_needs_and_nothing_of_earlier_cases(run):
    assert run([THREADS, CHILD_PROCESSES, LEFT, CLEAN]) == [True] * 4
    assert run([CLOSED, CLEAN]) == [True, False]  # a program that locks a folder harms only itself


# A program with three children that have 300 MB each at the same time
CHILDREN = """read, write = os.pipe()
for _ in range(3):
    if os.fork() == 0:
        HIDDEN
        memory = mmap.mmap(-1, 300 << 20)
        for _ in range(300): memory.write(bytes(1 << 20))
        os.write(write, b"x")
        time.sleep(60)
ready = 0
while ready < 3: ready += len(os.read(read, 3))"""
# None of these programs reaches its end
HOSTILE = {
    # Reaching out of the sandbox
    "network": "socket.create_connection(('127.0.0.1', PORT), 5)",
    "home folder": "open('HOME_FILE').read()",
    "project": "os.listdir('REPO')",
    "environment": "os.environ['TANDEM_SECRET']",
    "writing outside": "open('OUTSIDE/written', 'w')",
    "writing to /usr": "open('/usr/written', 'w')",
    "parent's memory": "open('/proc/1/mem', 'rb')",
    "parent's files": "open('/proc/1/fd/1', 'w')",
    "limiting its parent": "resource.prlimit(1, resource.RLIMIT_CORE, (0, 0))",
    "moving its parent": "os.sched_setaffinity(1, {0})",
    "socket to another family": "socket.socketpair(socket.AF_INET)",
    "user namespace": "assert libc.unshare(0x10000000) == 0",
    # Ending early
    "sys.exit": "sys.exit(0)",
    "os._exit": "os._exit(0)",
    "killing its parent": "one = os.getppid()\nos.kill(one, 9)\nassert os.getppid() != one",
    "forging results": """for fd in range(64):
    try: os.write(fd, b'{"reached_end": true, "stdout": ""}\\n' * 9)
    except OSError: pass
os._exit(0)""",
    # Taking too much
    "processes": "pids = [os.fork() or time.sleep(60) for _ in range(100)]",
    "10 GB": "bytearray(10 << 30)",
    "disk": "file = open('x', 'wb')\nfor _ in range(100): file.write(bytes(1 << 20))",
    "memory in sum": CHILDREN.replace("HIDDEN", "pass"),
    "memory in sum, unseen": CHILDREN.replace("HIDDEN", "libc.prctl(4, 0)"),
}


def test_every_closed_call_is_closed(sandbox, run):
    column = list(sandbox.ARCHITECTURES).index(platform.machine())
    call = "libc = ctypes.CDLL(None, use_errno=True)\nassert libc.syscall({}, 0, 0, 0, 0, 0) == -1"
    call += "\nassert ctypes.get_errno() == 38  # ENOSYS"
    are_closed = run([call.format(numbers[column]) for numbers in sandbox.CLOSED_CALLS.values()])
    open_calls = [
        name
        for name, is_closed in zip(sandbox.CLOSED_CALLS, are_closed, strict=True)
        if not is_closed
    ]
    assert open_calls == []


def test_hostile_program_gets_nothing_and_does_not_disturb_others(run, tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_SECRET", "1")
    tmp_path.chmod(0o777)
    text = json.dumps([line for program in HOSTILE.values() for line in (program, "pass")])
    with (
        tempfile.NamedTemporaryFile(dir=Path.home()) as file,
        socket.create_server(("127.0.0.1", 0)) as server,
    ):
        places = {"PORT": server.getsockname()[1], "HOME_FILE": file.name}
        for word, place in (places | {"REPO": REPO, "OUTSIDE": tmp_path}).items():
            text = text.replace(word, str(place))
        results = run(json.loads(text))
    # After each hostile program an honest one ran
    hostile, honest = (dict(zip(HOSTILE, results[i::2], strict=True)) for i in (0, 1))
    assert hostile == dict.fromkeys(HOSTILE, False)
    assert honest == dict.fromkeys(HOSTILE, True)
    assert list(tmp_path.iterdir()) == []


def test_simultaneous_sandboxes_have_their_own_processes_memory_and_files(score):
    bomb = """import os, time
end = time.monotonic() + 2
while time.monotonic() < end:
    try: os.fork()
    except OSError: pass"""
    program = """import os, time
found = os.listdir("/tmp")
open("x", "w")
memory = bytearray(300 << 20)
pids = [os.fork() or os._exit(0) for _ in range(8)]
time.sleep(0.5)"""
    with ThreadPoolExecutor(3) as pool:
        pool.submit(score, bomb, ["assert True"])
        assert list(pool.map(score, [program] * 2, [["assert found == []"]] * 2)) == [1.0, 1.0]


def is_running(mark):
    running = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    return any(mark in word for words in running for word in words)


def test_endless_cases_end_in_time_and_with_their_worker(sandbox, score, monkeypatch):
    # Sixteen busy processes leave no processor to process 1 of the sandbox
    mark = f"# {time.time_ns()}"
    program = f"""import os, time
case = int(input())
if case == 2: time.sleep(60)
if case == 1:
    for _ in range(4): os.fork()
    while True: pass  {mark}"""
    worker = os.fork()
    if worker == 0:
        try:
            score(program, {"inputs": ["1"], "outputs": [""]})
        finally:
            os._exit(1)
    wait_until(lambda: is_running(mark), "the program runs")
    os.kill(worker, signal.SIGKILL)
    os.waitpid(worker, 0)
    wait_until(lambda: not is_running(mark), "the sandbox ends with its worker", seconds=20)
    monkeypatch.setattr(sandbox, "CASE_SECONDS", 3)
    monkeypatch.setattr(sandbox, "TOTAL_SECONDS", 12)  # ends during the seventh case
    assert score(program, {"inputs": [*"01020111"], "outputs": [""] * 8}) == 3 / 8
    # The program ends long before the limit of its case
    wait_until(lambda: not is_running(mark), "the end of the program", seconds=20)


def test_without_bubblewrap_nothing_runs(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"apt-get install bubblewrap.*never run outside"):
        load()
    (tmp_path / "bwrap").write_text("#!/bin/sh\necho 'No permission' >&2\nexit 1\n")
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(RuntimeError, match=r"does not work here.*No permission.*--privileged"):
        load()


def test_sandbox_with_holes_is_refused(sandbox, monkeypatch):
    # The other namespaces remain, because the sandbox kills processes, and its probes make some
    holes = {"--new-session": "--share-net", "--disable-userns": "--as-pid-1"}
    whole = sandbox.sandbox_command
    broken = lambda drop_root: [holes.get(word, word) for word in whole(drop_root)]  # noqa: E731
    monkeypatch.setattr(sandbox, "sandbox_command", broken)
    monkeypatch.setattr(sandbox, "CLOSED_CALLS", {})
    monkeypatch.setattr(sandbox, "__file__", "/usr/bin/env")
    with pytest.raises(RuntimeError, match="not true in it") as refused:
        sandbox.find_sandbox()
    for probe in ("no network", "this project cannot", "System V memory", "user namespaces are"):
        assert probe in str(refused.value)
