import contextlib
import doctest
import http.server
import itertools
import json
import os
import platform
import runpy
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, OrderedDict, namedtuple
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import psutil
import pytest
from helpers import REPO
from helpers.processes import alive, descendants, environment, wait_until

SCRIPT = REPO / "scripts" / "rewards" / "code_sandbox.py"
pytestmark = pytest.mark.slow

HONEST = "Here it is:\n```python\ndef double(x):\n    return 2 * x\n```\nIt doubles."
HONEST_TESTS = ["assert double(2) == 4", "assert double('ab') == 'abab'"]


@pytest.fixture(scope="module")
def reward():
    """The names in the file, loaded as the scripts load it."""
    if not shutil.which("bwrap"):
        pytest.skip("bubblewrap is not installed (apt-get install bubblewrap)")
    # Only this is a reason to skip: a sandbox with a hole, too, does not load.
    namespaces = ["bwrap", "--unshare-all", "--unshare-user"]
    namespaces += ["--ro-bind", "/", "/", "--proc", "/proc", "true"]
    if (tried := subprocess.run(namespaces, capture_output=True, text=True)).returncode:
        pytest.skip(f"this machine lets bubblewrap make no namespaces: {tried.stderr.strip()}")
    # Less than the defaults, so that what runs until it is ended is soon over.
    limits = {"SECONDS": "2", "TOTAL_SECONDS": "5", "MEMORY_MB": "512"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in limits.items():
            patch.setenv(f"TANDEM_SANDBOX_{name}", value)
        return runpy.run_path(str(SCRIPT), run_name="reward_fn")


@pytest.fixture(scope="module")
def score(reward):
    return lambda response, truth: reward["compute_score"]("code", response, truth, extra_info=None)


HUMANEVAL = {
    "prompt": (
        "from typing import List\n\n\n"
        'def largest(numbers: List[int]) -> int:\n    """The largest number."""\n'
    ),
    "test": (
        "def check(candidate):\n"
        "    assert candidate([1, 3, 2]) == 3\n"
        "    assert candidate([-1]) == -1\n"
    ),
    "entry_point": "largest",
}
MBPP = {
    "test_list": ["assert depth(root) == 2", "assert depth(None) == 0"],
    "test_setup_code": "root = Node(Node())",
}
MBPP_SOLUTION = """class Node:
    def __init__(self, below=None):
        self.below = below
def depth(node):
    return 1 + depth(node.below) if node else 0
"""
PAIRS = {"inputs": ["1 2\n", "3 4"], "outputs": ["3\n", "7"]}


def test_right_programs_score_1_and_wrong_ones_their_share(score):
    assert score(HONEST, HONEST_TESTS) == 1.0
    assert score(HONEST, json.dumps(HONEST_TESTS)) == 1.0
    wrong = HONEST.replace("2 * x", "x + 2")
    assert score(wrong, HONEST_TESTS) == 0.5  # the second raises TypeError
    assert score(MBPP_SOLUTION, MBPP) == 1.0  # the set-up uses the program's class
    assert score("I would rather not.", MBPP) == 0.0
    whole = f"```python\n{HUMANEVAL['prompt']}    return max(numbers)\n```"
    without_prompt = {name: value for name, value in HUMANEVAL.items() if name != "prompt"}
    assert score(whole, without_prompt) == score(whole, HUMANEVAL) == 1.0
    assert score("    return max(numbers)", HUMANEVAL) == 1.0
    assert score(whole.replace("max", "min"), HUMANEVAL) == 0.0
    assert score("print(sum(map(int, input().split())))", PAIRS) == 1.0
    assert score("print(3)", PAIRS) == 0.5
    # Competitive programs do their work in a thread with a larger stack, or read the file 0.
    threaded = "import threading\ndef main():\n  print(sum(map(int, open(0).read().split())))\n"
    threaded += "if __name__ == '__main__':\n  threading.Thread(target=main).start()"
    assert score(threaded, PAIRS) == 1.0


def test_the_last_python_block_is_the_program(reward):
    extract = reward["extract_code"]
    assert extract("```python\nx = 1\n```\n```py\nx = 2\n```\n```text\noutput\n```") == "x = 2\n"
    assert extract("```\nx = 1\n```") == "x = 1\n"
    assert extract("x = 1") == "x = 1"
    assert extract("```python\nx = 1\n# cut off") == "x = 1\n# cut off"


def test_a_response_of_many_letters_is_soon_read(reward):
    started = time.monotonic()
    letters = "a" * 200_000
    assert reward["extract_code"](f"```python{letters}") == f"```python{letters}"
    assert reward["extract_code"](f"```python\n{letters}") == letters
    assert reward["extract_code"]("```\n" * 50_001) == ""
    assert time.monotonic() - started < 5


def test_doctests_are_right(reward):
    runner = doctest.DocTestRunner()
    for name in ("extract_code", "same_output", "equality_case", "canonical"):
        for example in doctest.DocTestFinder().find(reward[name], name, globs=dict(reward)):
            runner.run(example)
    assert runner.summarize() == (0, 5)


def test_values_are_sent_as_the_same_text_where_python_calls_them_equal(reward):
    canonical = reward["canonical"]
    numbers = [0, -0.0, False, 1, 1.0, True, 1 + 0j, 1j, 2j, -1, 0.1, 1e300, 10**300, 1 << 20_000]
    numbers += [Fraction(1, 10), Fraction(1), Decimal(1), Decimal("0.1"), float("inf"), -1e999]
    texts = ["1", "1/1", "", "None", "é\n", "\ud800", b"1", b"", bytearray(b"1"), None, ...]
    lists = [[], (), [1], (1,), ((1,),), [[1], 1], [1, [1]], ["1, 1"], ["1", "1"]]
    sets = [set(), {1}, {1, "1"}, frozenset({"1", True}), {1: 2}.keys(), {(1, 2)}]
    dicts = [{}, {1: 2}, {"1": 2}, {1: 2, 3: 4}, {3: 4, 1.0: 2}, {(1, 2): [{}]}]
    dicts += [OrderedDict({3: 4, 1: 2}), Counter([1, 1]), namedtuple("One", "x")(1)]
    values = [*numbers, *texts, *lists, *sets, *dicts]
    for one, other in itertools.product(values, repeat=2):
        assert (canonical(one) == canonical(other)) == (one == other), (one, other)
        assert canonical(one).isascii()
        assert "\n" not in canonical(one)


@pytest.mark.parametrize("value", [object(), int, iter([]), [1, range(3)]])
def test_what_is_no_data_is_not_sent(reward, value):
    with pytest.raises(TypeError):
        reward["canonical"](value)


def test_assertions_that_something_equals_a_literal_are_judged_outside(reward):
    case = reward["equality_case"]
    assert case("x = 1", "assert {1, 2} == f([x])[0]")["call"] == "f([x])[0]"
    assert case("", "assert f(1) == set()")["expected"] == "{}"
    assert case("", "assert f() == -1.5, message()")["call"] == "f()"
    others = ["assert f()", "assert not f()", "assert f() is True", "assert f() == g()", "f() == 1"]
    others += ["assert f() == 1 == g()", "x = 1\nassert f() == 1", "assert f() == {[]: 1}", "a b"]
    assert [case("", other) for other in others] == [None] * len(others)


UNKNOWN = [
    "def f",
    5,
    [],
    {},
    {"test_list": []},
    {"inputs": ["1"]},
    {"fn_name": "f", "inputs": [1], "outputs": [1]},
]


@pytest.mark.parametrize("truth", UNKNOWN)
def test_a_ground_truth_of_no_known_form_is_an_error(score, truth):
    with pytest.raises(ValueError, match="ground_truth must be a list of assertions"):
        score(HONEST, truth if isinstance(truth, str) else json.dumps(truth))


# Forks, and its children fork, until there are 100 of them or the next is refused. Only the first
# process comes back.
FORKS = """import os, time
first, count = os.getpid(), os.open("/tmp/count", os.O_RDWR | os.O_CREAT | os.O_APPEND)
try:
    while os.fstat(count).st_size < 100:
        if os.fork():
            os.write(count, b"1")
        else:
            IN_CHILD
except OSError:
    pass
if os.getpid() != first:
    time.sleep(60)
forks = os.fstat(count).st_size
"""
# Calls the system by a number, that of x86-64 or that of aarch64.
CALL = """import ctypes, os
def call(x86_64, aarch64, *arguments):
    number = {"x86_64": x86_64, "aarch64": aarch64}[os.uname().machine]
    return ctypes.CDLL(None).syscall(number, *arguments)
"""
# Has three children that each have 300 MB at the same time.
CHILDREN = """import mmap, os, time
read, write = os.pipe()
for _ in range(3):
    if os.fork() == 0:
        IN_CHILD
        os.write(write, b"x")
        time.sleep(60)
ready = 0
while ready < 3:
    ready += len(os.read(read, 3))
"""
# Of each, the program and an assertion that holds if it got what it wanted.
HOSTILE = {
    "endless loop": ("while True: pass", "assert True"),
    "sleep": ("import time\ntime.sleep(60)", "assert True"),
    "fork bomb": (FORKS.replace("IN_CHILD", "pass"), "assert forks >= 100"),
    "fork bomb in sessions of its own": (
        FORKS.replace("IN_CHILD", "os.setsid()"),
        "assert forks >= 100",
    ),
    "10 GB": ("data = bytearray(10 << 30)", "assert data"),
    "10 GB in a child": (
        (
            "import os\nif os.fork() == 0:\n  bytearray(10 << 30)\n  os._exit(0)\n"
            "status = os.wait()[1]"
        ),
        "assert status == 0",
    ),
    "memory that outlives its process": (
        """import ctypes
c = ctypes.CDLL(None)
made = [c.shmget(0, 1 << 20, 0o1600), c.msgget(0, 0o1600), c.semget(0, 1, 0o1600)]""",
        "assert max(made) >= 0",
    ),
    "memory in sum": (
        CHILDREN.replace("IN_CHILD", "memory = bytearray(300 << 20)"),
        "assert ready",
    ),
    "memory in sum, unseen": (
        CHILDREN.replace(
            "IN_CHILD",
            "import ctypes; ctypes.CDLL(None).prctl(4, 0); memory = bytearray(300 << 20)",
        ),
        "assert ready",
    ),
    "memory in sum, its first thread gone": (
        CHILDREN.replace(
            "IN_CHILD",
            """def hold():
            while ") Z " not in open(f"/proc/{os.getpid()}/stat").read(): pass
            memory = bytearray(300 << 20)
            os.write(write, b"x")
            time.sleep(60)
        import ctypes, threading
        threading.Thread(target=hold).start()
        ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[os.uname().machine], 0)""",
        ),
        "assert ready",
    ),
    "shared memory without reserve in sum": (
        CHILDREN.replace(
            "IN_CHILD",
            "memory = mmap.mmap(-1, 300 << 20, flags=mmap.MAP_SHARED | 0x4000)\n"
            "        for _ in range(300): memory.write(bytes(1 << 20))",
        ),
        "assert ready",
    ),
    "files without a name": ("import os\nfile = os.memfd_create('x')", "assert file"),
    "extended attributes": (
        "import os\nopen('x', 'w')\nos.setxattr('x', 'user.x', bytes(60_000))",
        "assert os.listxattr('x')",
    ),
    "larger socket buffers": (
        """import socket
one, other = socket.socketpair()
before = one.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * before)""",
        "assert one.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) > before",
    ),
    "sockets that listen": (
        "import socket\nserver = socket.socket(socket.AF_UNIX)\n"
        "server.bind('x')\nserver.listen(4096)",
        "assert server",
    ),
    "sockets of other families": (
        """import socket
opened = []
for family in range(2, 46):
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW):
        try:
            opened.append(socket.socket(family, kind))
        except OSError:
            pass""",
        "assert opened",
    ),
    "session keyring": (f"{CALL}keyring = call(250, 219, 0, -3, 0)", "assert keyring > 0"),
    "a key": (
        f"{CALL}key = call(248, 217, b'user', b'name', b'data', 4, -3)",
        "assert key > 0",
    ),
    "a key asked for": (
        f"{CALL}call(249, 218, b'user', b'name', None, 0)\nerror = ctypes.get_errno()\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "libc.syscall({'x86_64': 249, 'aarch64': 218}[os.uname().machine], b'user', b'x', None, 0)",
        "assert ctypes.get_errno() == 126  # ENOKEY: it was looked for",
    ),
    "names of keys": ("names = open('/proc/keys')", "assert names"),
    "message queue": (
        "import ctypes, os\n"
        "queue = ctypes.CDLL(None).mq_open(b'/x', os.O_CREAT | os.O_RDWR, 0o600, None)",
        "assert queue >= 0",
    ),
    "io_uring": (
        f"{CALL}ring = call(425, 425, 1, ctypes.create_string_buffer(120))",
        "assert ring >= 0",
    ),
    "userfaultfd": (f"{CALL}faults = call(323, 282, 1)", "assert faults >= 0"),
    "memory of another process": (
        f"""{CALL}
import struct
word = ctypes.create_string_buffer(b"secret")
copy = ctypes.create_string_buffer(6)
def vector(buffer):
    return struct.pack("PN", ctypes.addressof(buffer), 6)
call(310, 270, os.getpid(), vector(copy), 1, vector(word), 1, 0)""",
        "assert copy.raw == b'secret'",
    ),
    "ptrace": (
        "import ctypes\ntraced = ctypes.CDLL(None).ptrace(0, 0, 0, 0)",
        "assert traced == 0",
    ),
    "slowing down its parent": (
        "import os\nos.setpriority(os.PRIO_PROCESS, 1, 19)",
        "assert os.getpriority(os.PRIO_PROCESS, 1) == 19",
    ),
    "limiting its parent": (
        "import resource\nresource.prlimit(1, resource.RLIMIT_CORE, (0, 0))",
        "assert True",
    ),
    "lowering oom_score_adj": (
        "try: open('/proc/self/oom_score_adj', 'w').write('999')\nexcept OSError: pass",
        "assert open('/proc/self/oom_score_adj').read() != '1000\\n'",
    ),
    "settings of the kernel": ("import os\nnames = os.listdir('/proc/sys')", "assert names"),
    "full disk": (
        "with open('/tmp/x', 'wb') as f:\n  for _ in range(1000): f.write(bytes(1 << 20))",
        "assert True",
    ),
    "network": (
        "import socket\nconnection = socket.create_connection(('127.0.0.1', PORT), 5)",
        "assert connection",
    ),
    "home folder": ("text = open('HOME_FILE').read()", "assert text"),
    "project": ("import os\nnames = os.listdir('REPO')", "assert names"),
    "environment": ("import os", "assert 'TANDEM_SECRET' in os.environ"),
    "writing outside": (
        """import os
written = []
for folder in ("OUTSIDE", "/", "/usr", "/usr/lib", "/etc", "/dev", "/home", "/root", \
os.path.dirname(os.__file__)):
    try:
        open(folder + "/written", "w")
        written.append(folder)
    except OSError:
        pass""",
        "assert written",
    ),
    "deep recursion": (
        "import sys\nsys.setrecursionlimit(10**9)\ndef f(): return f()\nf()",
        "assert True",
    ),
    "deep recursion in C": (
        "import sys\nsys.setrecursionlimit(10**9)\nx = []\nfor _ in range(10**6): x = [x]\nrepr(x)",
        "assert True",
    ),
    "killing its parent": (
        "import os\nparent = os.getppid()\nos.kill(parent, 9)",
        "assert os.getppid() != parent",
    ),
    "killing all": ("import os\nos.kill(-1, 9)\nparent = os.getppid()", "assert parent != 1"),
    "parent's memory": ("memory = open('/proc/1/mem', 'rb')", "assert memory"),
    "parent's files": ("results = open('/proc/1/fd/1', 'w')", "assert results"),
    "user namespace": (
        "import ctypes\nresult = ctypes.CDLL(None).unshare(0x10000000)",
        "assert result == 0",
    ),
    "sys.exit": ("import sys\nsys.exit(0)", "assert True"),
    "os._exit": ("def f():\n  import os\n  os._exit(0)", "assert f() == 1"),
    "exit in the function": ("def f():\n  exit()", "assert f() == 1"),
    "a forged result": (
        """import os
for fd in range(64):
    try:
        os.write(fd, b'{"reached_end": true, "stdout": ""}\\n' * 9)
    except OSError:
        pass
os._exit(0)""",
        "assert True",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_program_gets_nothing_and_disturbs_nothing(score, tmp_path, monkeypatch, name):
    monkeypatch.setenv("TANDEM_SECRET", "1")
    tmp_path.chmod(0o777)
    program, test = HOSTILE[name]
    with (
        tempfile.NamedTemporaryFile(dir=Path.home()) as file,
        socket.create_server(("127.0.0.1", 0)) as server,
    ):
        file.write(b"text")
        file.flush()
        places = {
            "PORT": server.getsockname()[1],
            "HOME_FILE": file.name,
            "REPO": REPO,
            "OUTSIDE": tmp_path,
        }
        for word, value in places.items():
            program = program.replace(word, str(value))
        started = time.monotonic()
        assert score(program, [test]) == 0.0
        assert time.monotonic() - started < 10
    assert list(tmp_path.iterdir()) == []
    assert score(HONEST, HONEST_TESTS) == 1.0


def test_every_closed_call_is_closed(reward, score):
    calls = reward["call_filter"]()
    numbers = [*calls["closed"], *(number for number, _ in calls["restricted"])]
    assert len(numbers) > 30
    # No call has a first argument like this; EBADF or EINVAL would say that it was let through.
    program = """import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
def error(number):
    libc.syscall(number, -1, -1, -1, -1, -1, -1)
    return errno.errorcode[ctypes.get_errno()]
"""
    tests = [f"assert error({number}) == 'ENOSYS'" for number in numbers]
    assert score(program, ["\n".join(tests)]) == 1.0


@pytest.mark.parametrize("last", ["", "import os\nos._exit(0)"])
def test_a_gigabyte_of_output_is_neither_kept_nor_right(score, last):
    started = time.monotonic()
    program = f"for _ in range(1000): print('x' * 1_000_000)\n{last}"
    assert score(program, {"inputs": [""], "outputs": ["x"]}) == 0.0
    assert time.monotonic() - started < 10
    assert score(HONEST, HONEST_TESTS) == 1.0


def test_many_endless_cases_end_with_the_time_of_the_response(score):
    started = time.monotonic()
    program = "def f(endless):\n  while endless: pass"
    assert score(program, ["f(False)"] + ["f(True)"] * 19) == 1 / 20
    assert time.monotonic() - started < 10


def test_what_a_case_leaves_running_does_not_reach_the_next(score):
    # The first case takes all processes; the second needs one.
    program = """import os, sys
def bomb():
    while True:
        try:
            if os.fork() == 0:
                os.setsid()
        except OSError:
            pass
def fork():
    if os.fork() == 0:
        os._exit(7)
    return os.waitstatus_to_exitcode(os.wait()[1])
"""
    assert score(program, ["bomb()", "assert fork() == 7"]) == 0.5


# Folders and files that the next case finds, if they can't be removed.
FILES = {
    "in folders": "os.makedirs('a/b')\nopen('a/b/c', 'w').write('x')\nopen('d', 'w')",
    "closed": "os.makedirs('a/b')\nopen('a/b/c', 'w')\nos.chmod('a/b', 0)\nos.chmod('a', 0)",
    "in a closed /tmp": "os.mkdir('a')\nos.chmod('/tmp', 0o500)",
    "very deep": "for _ in range(3000):\n  os.mkdir('a' * 200)\n  os.chdir('a' * 200)",
    "linked": "os.mkdir('a')\nos.symlink('/usr', 'a/b')\nos.mkfifo('c')\nos.symlink('.', 'd')",
}


@pytest.mark.parametrize("name", FILES)
def test_what_a_case_leaves_in_files_does_not_reach_the_next(score, name):
    program = f"import os\nfound = os.listdir('/tmp')\n{FILES[name]}"
    assert score(program, ["assert not found"] * 3) == 1.0


# Programs that use what the sandbox limits; each has an f() that returns 7.
RIGHT = {
    "threads": """import threading
found = []
def f():
    threads = [threading.Thread(target=found.append, args=(1,)) for _ in range(7)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    return len(found)""",
    "a larger stack": """import resource, sys, threading
resource.setrlimit(resource.RLIMIT_STACK, (-1, -1))
threading.stack_size(64 << 20)
sys.setrecursionlimit(10**6)
def depth(n): return n and depth(n - 1) + 1
found = []
def f():
    thread = threading.Thread(target=lambda: found.append(depth(50_000)))
    thread.start()
    thread.join()
    return found[0] // 50_000 * 7""",
    "subprocess": """import subprocess, sys
def f():
    return int(subprocess.check_output([sys.executable, "-c", "print(7)"]))""",
    "multiprocessing": """import multiprocessing
def child(end): end.send(7)
def f():
    one, other = multiprocessing.Pipe()
    multiprocessing.Process(target=child, args=(other,)).start()
    return one.recv()""",
    "asyncio": """import asyncio
async def echo():
    process = await asyncio.create_subprocess_exec("echo", "7", stdout=asyncio.subprocess.PIPE)
    return int((await process.communicate())[0])
def f(): return asyncio.run(echo())""",
    "files": """import os, shutil, tempfile
def f():
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as file:
        file.write(b"7")
        file.seek(0)
        open(f"{folder}/one", "wb").write(file.read())
        shutil.copytree(folder, f"{folder}/two")
        return int(open(f"{folder}/two/one").read())""",
    "sqlite": """import sqlite3
def f():
    database = sqlite3.connect("x.db")
    database.execute("create table numbers (n)")
    database.execute("insert into numbers values (7)")
    database.commit()
    return database.execute("select n from numbers").fetchone()[0]""",
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_program_may_use_what_it_needs(score, name):
    assert score(RIGHT[name], ["assert f() == 7"]) == 1.0


# Programs that pass assertions that are judged in their own process.
TRICKS = {
    "equal to everything": """class Equal:
    def __eq__(self, other): return True
def double(x): return Equal()""",
    "a text equal to everything": """class Equal(str):
    def __eq__(self, other): return True
def double(x): return Equal()""",
    "the assertion replaced": """import builtins
builtins.compile = lambda *_: "pass"
def double(x): return 0""",
    "the assertion replaced, with a result": """import builtins
builtins.compile = lambda *_: "0"
def double(x): return 0""",
    "the secret from frames": """import os, sys
frame = sys._getframe()
while "secret" not in frame.f_locals: frame = frame.f_back
os.write(frame.f_locals["sink"], frame.f_locals["secret"])
os._exit(0)""",
    "reading the assertion": """import ast, gc, sys
def double(x):
    frame = sys._getframe()
    while "case" not in frame.f_locals: frame = frame.f_back
    return ast.literal_eval(frame.f_locals["case"]["test"].split("==")[1].strip())""",
    # From the line that runs the program over the one that runs the assertion.
    "a trace that jumps": """import sys
def jump(frame, event, argument):
    if event == "line":
        frame.f_lineno += 1
        sys.settrace(None)
sys.settrace(jump)
sys._getframe(1).f_trace = jump""",
}


@pytest.mark.parametrize("name", TRICKS)
def test_no_trick_passes_an_assertion_that_is_judged_outside(score, name):
    assert score(TRICKS[name], HONEST_TESTS) == 0.0


def test_a_result_is_not_right_before_the_program_ends(score):
    program = "import os\ndef double(x):\n  print(4)\n  os._exit(0)"
    assert score(program, HONEST_TESTS) == 0.0


def test_a_case_cannot_find_later_ones_in_its_memory(score):
    program = """import re
def find():
    with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as memory:
        for line in maps:
            start, end = (int(address, 16) for address in line.split()[0].split("-"))
            if line.split()[1].startswith("rw"):
                memory.seek(start)
                if re.search(b"z[e]bra", memory.read(end - start)):
                    return True
    return False
"""
    # The program has the pattern, only the last case has the word; that it is found there shows
    # that it could be.
    assert score(program, ["assert not find()", "assert find()  # zebra"]) == 1.0


def test_a_fork_bomb_takes_no_processes_from_others(score):
    forks = "import os\npids = [os.fork() or os._exit(0) for _ in range(8)]"
    bomb = "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass"
    with ThreadPoolExecutor(1) as pool:
        bombed = pool.submit(score, bomb, ["assert True"])
        scores = []
        while not bombed.done() or not scores:
            scores.append(score(forks, ["assert len(pids) == 8"]))
    assert bombed.result() == 0.0
    assert scores == [1.0] * len(scores)


def test_sandboxes_side_by_side_have_memory_and_files_of_their_own(score):
    program = """import os, time
found = os.listdir("/tmp")
open("x", "w")
memory = bytearray(300 << 20)
time.sleep(0.5)
"""
    with ThreadPoolExecutor(2) as pool:
        scores = list(pool.map(score, [program] * 2, [["assert found == []"]] * 2))
    assert scores == [1.0, 1.0]


def test_nothing_lives_on_after_the_score(reward, monkeypatch):
    # Sixteen processes that want all of the processors, and leave process 1 of the sandbox none.
    program = """import os
try:
    os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0))
except OSError:
    pass
for _ in range(4):
    os.fork()
while True:
    pass
"""
    mark = f"# {time.time_ns()}"
    names = reward["compute_score"].__globals__
    monkeypatch.setitem(names, "CASE_SECONDS", 60)
    monkeypatch.setitem(names, "TOTAL_SECONDS", 2)
    truth = {"inputs": [""], "outputs": ["x"]}
    assert names["compute_score"]("code", program + mark, truth) == 0.0
    running = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    assert not any(mark in argument for arguments in running for argument in arguments)


def test_twenty_megabytes_of_stdin_are_read(score):
    given = f"{'7' * 99}\n" * 200_000
    program = "import sys\nprint(len(sys.stdin.read()))"
    assert score(program, {"inputs": [given], "outputs": [str(len(given))]}) == 1.0


def test_a_killed_worker_leaves_nothing_running(reward):
    """The scripts kill a worker that takes too long."""
    call = (
        f"import runpy; runpy.run_path({str(SCRIPT)!r})"
        "['compute_score']('', 'while True: pass', ['assert True'])"
    )
    # Without the limit of a case the program would run for longer than the test waits.
    limits = {"TANDEM_SANDBOX_SECONDS": "60", "TANDEM_SANDBOX_TOTAL_SECONDS": "60"}
    worker = subprocess.Popen([sys.executable, "-c", call], env=environment(limits))

    def loops():
        # The worker's own sandbox to try things in, when it loads the file, is never busy for that
        # long.
        with contextlib.suppress(psutil.Error):
            return any(process.cpu_times().user > 0.5 for process in descendants(worker))

    try:
        wait_until(loops, 30, "the program runs")
        running = descendants(worker)
    finally:
        worker.kill()
        worker.wait()
    wait_until(lambda: not alive(running), 10, "the sandbox ends with its worker")


def test_without_bubblewrap_nothing_runs(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"apt-get install bubblewrap.*never run outside"):
        runpy.run_path(str(SCRIPT), run_name="reward_fn")


def test_a_bubblewrap_that_does_not_work_is_refused(monkeypatch, tmp_path):
    (tmp_path / "bwrap").write_text(
        "#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n"
    )
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    why = r"does not work here.*No permissions to create new namespace.*--privileged"
    with pytest.raises(RuntimeError, match=why):
        runpy.run_path(str(SCRIPT), run_name="reward_fn")


@pytest.mark.parametrize(
    ("instead", "what"),
    [
        # Process namespaces stay, always: the first process of the sandbox kills all that it sees.
        ({"--unshare-all": ["--unshare-pid"]}, "there is no network"),
        ({"--disable-userns": []}, "user namespaces are closed"),
    ],
)
def test_a_sandbox_with_a_hole_is_refused(reward, monkeypatch, instead, what):
    names = reward["compute_score"].__globals__
    whole = names["sandbox_command"]

    def command(drop_root):
        return [new for word in whole(drop_root) for new in instead.get(word, [word])]

    monkeypatch.setitem(names, "sandbox_command", command)
    with pytest.raises(RuntimeError, match=f"not true in it: {what}"):
        names["find_sandbox"]()


def test_a_sandbox_whose_filter_does_not_work_is_refused(reward, monkeypatch):
    names = reward["compute_score"].__globals__
    monkeypatch.setitem(names, "CLOSED_CALLS", {})
    with pytest.raises(RuntimeError, match="not true in it: System V memory is closed"):
        names["find_sandbox"]()


def test_a_machine_of_another_kind_is_refused(reward, monkeypatch):
    names = reward["compute_score"].__globals__
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(RuntimeError, match="needs x86_64 or aarch64, this is riscv64"):
        names["find_sandbox"]()


def test_a_project_that_shows_in_the_sandbox_is_refused(reward, monkeypatch):
    names = reward["compute_score"].__globals__
    monkeypatch.setitem(names, "__file__", "/usr/bin/env")
    with pytest.raises(RuntimeError, match="not true in it: this project cannot be read"):
        names["find_sandbox"]()


class Service(http.server.BaseHTTPRequestHandler):
    """Answers as SandboxFusion does; runs what these tests wrote themselves."""

    def do_POST(self):
        job = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.jobs.append(job)
        time.sleep(self.server.queue_seconds)
        started = time.monotonic()
        own = {"capture_output": True, "text": True, "timeout": job["run_timeout"]}
        try:
            ran = subprocess.run([sys.executable, "-c", job["code"]], input=job["stdin"], **own)
            status, stdout = "Failed" if ran.returncode else "Success", ran.stdout
        except subprocess.TimeoutExpired:
            status, stdout = "Failed", ""
        result = {"stdout": stdout, "execution_time": time.monotonic() - started}
        status = self.server.status or status
        answer = {"status": status, "message": "no workers", "run_result": result}
        body = json.dumps(answer).encode()
        with contextlib.suppress(BrokenPipeError):
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture
def service(monkeypatch, tmp_path):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Service)
    server.jobs, server.status, server.queue_seconds = [], None, 0
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("TANDEM_SANDBOX_URL", f"http://127.0.0.1:{server.server_port}/run_code")
    monkeypatch.setenv("PATH", str(tmp_path))  # without bubblewrap
    monkeypatch.setenv("TANDEM_SANDBOX_SECONDS", "30")
    monkeypatch.setenv("TANDEM_SANDBOX_TOTAL_SECONDS", "60")
    yield server
    server.shutdown()
    server.server_close()


def test_a_service_runs_the_code_instead(service):
    score = runpy.run_path(str(SCRIPT), run_name="reward_fn")["compute_score"]
    assert score("code", HONEST, HONEST_TESTS) == 1.0
    assert score("code", HONEST.replace("2 * x", "x + 2"), HONEST_TESTS) == 0.5
    assert score("code", "import sys\nsys.exit(0)", HONEST_TESTS) == 0.0
    assert score("code", "print(3)", PAIRS) == 0.5
    asked = {"language": "python", "stdin": "1 2\n", "code": "print(3)"}
    assert asked.items() <= service.jobs[-2].items()
    # Of an assertion that something equals a literal, only the something is sent.
    assert "== 4" not in "".join(job["code"] for job in service.jobs)
    assert score("code", TRICKS["equal to everything"], HONEST_TESTS) == 0.0
    assert score("code", "print = str = None\ndef double(x): return x + x", HONEST_TESTS) == 1.0
    assert score("code", HONEST, ["assert double(2) > 3", "assert double(2) < 3"]) == 0.5
    # A service in trouble is no verdict on the program.
    service.status = "SandboxError"
    with pytest.raises(RuntimeError, match="SandboxError: no workers"):
        score("code", HONEST, HONEST_TESTS)


def test_waiting_for_a_service_is_no_failure_of_the_program(service, monkeypatch):
    monkeypatch.setenv("TANDEM_SANDBOX_TOTAL_SECONDS", "3")
    score = runpy.run_path(str(SCRIPT), run_name="reward_fn")["compute_score"]
    service.queue_seconds = 1.5
    assert score("code", HONEST, HONEST_TESTS) == 1.0
    assert service.jobs[1]["run_timeout"] > 2  # of 3, although half of them are over
    started = time.monotonic()
    why = r"run_code is too slow: [12] of 30 test cases in 4 s, of which programs ran"
    with pytest.raises(RuntimeError, match=why):
        score("code", HONEST, HONEST_TESTS * 15)
    assert time.monotonic() - started < 5


def test_an_endless_program_at_a_service_is_its_own_failure(service, monkeypatch):
    monkeypatch.setenv("TANDEM_SANDBOX_SECONDS", "2")
    monkeypatch.setenv("TANDEM_SANDBOX_TOTAL_SECONDS", "5")
    score = runpy.run_path(str(SCRIPT), run_name="reward_fn")["compute_score"]
    program = "def f(endless):\n  while endless: pass"
    assert score("code", program, ["f(False)"] + ["f(True)"] * 19) == 1 / 20
    assert len(service.jobs) < 6
