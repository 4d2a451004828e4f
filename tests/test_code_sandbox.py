import contextlib
import doctest
import http.server
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
from concurrent.futures import ThreadPoolExecutor
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


def test_doctests_are_right(reward):
    runner = doctest.DocTestRunner()
    for name in ("extract_code", "same_output"):
        for example in doctest.DocTestFinder().find(reward[name], name, globs=dict(reward)):
            runner.run(example)
    assert runner.summarize() == (0, 2)


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


def test_what_a_case_leaves_in_files_does_not_reach_the_next(score):
    program = (
        "import os\nfound = os.listdir('/tmp')\n"
        "os.makedirs('a/b')\nopen('a/b/c', 'w').write('x')\nopen('d', 'w')"
    )
    assert score(program, ["assert found == []"] * 3) == 1.0


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
    filtered = names["SYSTEM_V"][platform.machine()]
    monkeypatch.setitem(filtered, "calls", [])
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
