"""--reward_fn of ppo_vllm_async.py: whatever the user's function does costs its own response alone.

Two real workers score batches of responses, whose text says what the function is to do.
"""

import contextlib
import os
import queue
import signal
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest
from helpers import REPO
from helpers.endings import new_mark, processes_with
from helpers.files import write_text
from helpers.processes import alive, end, environment, wait_until

import ppo_vllm_async

pytestmark = pytest.mark.slow

FAILING = """
import ctypes, os, re, signal, subprocess, sys, time
from pathlib import Path

HERE = Path(__file__).parent

class Unreadable(Exception):
    def __init__(self, *, line):  # pickle makes it again from its arguments, and there it fails
        super().__init__(f"line {line}")

class Unprintable(Exception):
    def __repr__(self):
        raise ValueError("no words for it")

def leave_a_child():
    child = subprocess.Popen(["sleep", "1000"], close_fds=False)
    (HERE / "child").write_text(str(child.pid))

def right(): return 1.0
def raises(): raise OSError("the grader is out of paper")
def unreadable(): raise Unreadable(line=12)
def unprintable(): raise Unprintable
def unencodable(): raise OSError("\\udcff")
def returns_nan(): return float("nan")
def returns_none(): return None
def returns_text(): return "good"
def sys_exit(): sys.exit()
def ctrl_c(): raise KeyboardInterrupt
def times_out_itself(): raise TimeoutError("of its own")
def os_exit(): os._exit(0)
def reads_nowhere(): ctypes.string_at(0)
def kills_itself(): os.kill(os.getpid(), signal.SIGKILL)
def hangs(): time.sleep(1000)
def holds_the_gil(): re.match("(a|aa)+$", 99 * "a" + "b")
def stops(): os.kill(os.getpid(), signal.SIGSTOP)
def closes_everything(): os.closerange(3, 1000)

def child_and_exit():
    leave_a_child()
    os._exit(3)

def child_and_hang():
    leave_a_child()
    time.sleep(1000)

def child_and_right():
    leave_a_child()
    return 1.0

def forks():
    child = os.fork()
    if child == 0:
        return 0.0
    os.waitpid(child, 0)
    return 1.0

def score(data_source, response, ground_truth, extra_info):
    return globals()[response]()
"""


def line_of(way):
    lines = FAILING.splitlines()
    return next(i for i, line in enumerate(lines, start=1) if line.startswith(f"def {way}("))


DIED = "BrokenProcessPool"
LATE = "TimeoutError: no answer"
# (what the function does, what the cause must hold)
WAYS_TO_FAIL = [
    ("raises", f"OSError('the grader is out of paper') (PATH, line {line_of('raises')})"),
    ("unreadable", f"Unreadable('line 12') (PATH, line {line_of('unreadable')})"),
    ("unprintable", ""),
    ("unencodable", "OSError("),
    ("returns_nan", "ValueError('the reward is nan')"),
    ("returns_none", "TypeError("),
    ("returns_text", "ValueError("),
    ("sys_exit", "SystemExit"),
    ("ctrl_c", "KeyboardInterrupt"),
    ("times_out_itself", f"(PATH, line {line_of('times_out_itself')})"),
    ("os_exit", DIED),
    ("reads_nowhere", DIED),
    ("kills_itself", DIED),
    ("hangs", LATE),
    ("holds_the_gil", LATE),
    ("stops", LATE),
    ("closes_everything", ""),
    ("child_and_exit", DIED),
    ("child_and_hang", LATE),
]

TOKENIZER = SimpleNamespace(decode=lambda words, **_: " ".join(words))


def arguments(path, **changes):
    options = {"reward_workers": 2, "reward_timeout": 1.0} | changes
    return ppo_vllm_async.Args(reward_fn=f"{path}:score", **options)


def grade(workers, args, *ways, truth="1"):
    """What is said of responses that do this, as (score, failure)."""
    responses = []
    for row, way in enumerate(ways):
        prompt = ppo_vllm_async.Prompt(f"data.jsonl, row {row}", "", [], [], "any", truth, None)
        responses.append(ppo_vllm_async.Response(prompt, [way], [-1.0], stopped=True))
    graded = ppo_vllm_async.grade_responses(responses, TOKENIZER, workers, args)
    assert [response.text for response in graded] == list(ways)
    return [(response.verifiable, response.failure) for response in graded]


RIGHT = (1.0, None)


@pytest.fixture(scope="module")
def failing(tmp_path_factory):
    """The file of all these functions; and workers for it, which the tests share."""
    path = write_text(tmp_path_factory.mktemp("rewards") / "reward_of_test.py", FAILING)
    args = arguments(path)
    workers = queue.Queue()
    for _ in range(args.reward_workers):
        workers.put(ppo_vllm_async.start_reward_worker(args.reward_fn))
    yield SimpleNamespace(path=path, args=args, workers=workers)
    assert workers.qsize() == len(ppo_vllm_async.process_groups) == 2
    family = [psutil.Process(group) for _, group in list(workers.queue)]
    ppo_vllm_async.end_children()
    wait_until(lambda: not alive(family), 10, f"the end of {family}")
    ppo_vllm_async.process_groups.clear()


def pid_in(path):
    return int(path.read_text()) if path.exists() else None


@pytest.fixture
def child(failing):
    """child(): the processes that a reward has left, which is one or none."""
    path = failing.path.with_name("child")
    path.unlink(missing_ok=True)
    yield lambda: alive([psutil.Process(pid) for pid in psutil.pids() if pid == pid_in(path)])
    if path.exists():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid_in(path), signal.SIGKILL)


@pytest.mark.parametrize(("way", "cause"), WAYS_TO_FAIL, ids=[way for way, _ in WAYS_TO_FAIL])
def test_whatever_a_reward_does_costs_its_own_response_alone(way, cause, failing, child):
    parts = failing.workers, failing.args
    first, failed, *others = grade(*parts, "right", way, "right", "right")
    assert [first, *others] == [RIGHT] * 3
    score, failure = failed
    assert score is None and cause.replace("PATH", str(failing.path)) in failure
    if way.startswith("child"):
        wait_until(lambda: not child(), 10, "the end of what the reward started")
    assert grade(*parts, *["right"] * 4) == [RIGHT] * 4


def test_all_workers_may_fail_at_once(failing):
    found = grade(failing.workers, failing.args, *["os_exit", "kills_itself"], "raises", "right")
    assert [failure is not None for _, failure in found] == [True] * 3 + [False]


def test_forked_child_of_a_reward_does_not_answer_for_it(failing):
    # Its answer would be taken for this call's, and this call's for the next one's
    assert grade(failing.workers, failing.args, "forks", "right", "right") == [RIGHT] * 3


def test_worker_killed_while_idle_costs_one_response(failing):
    _, group = failing.workers.queue[0]
    victim = psutil.Process(group)
    victim.kill()
    wait_until(lambda: not alive([victim]), 10, "the end of an idle worker")
    found = grade(failing.workers, failing.args, *["right"] * 4)
    assert sorted(failure is None for _, failure in found) == [False, True, True, True]
    assert grade(failing.workers, failing.args, *["right"] * 4) == [RIGHT] * 4


def test_response_without_a_ground_truth_is_not_graded(failing):
    found = grade(failing.workers, failing.args, "raises", "hangs", truth=None)
    assert found == [(None, None)] * 2


def test_what_a_reward_has_started_ends_with_the_run(failing, child):
    assert grade(failing.workers, failing.args, "child_and_right") == [RIGHT]
    assert child()
    groups = list(ppo_vllm_async.process_groups)
    ppo_vllm_async.end_children()
    wait_until(lambda: not child(), 10, "the end of what the reward started")
    # For the tests that follow
    ppo_vllm_async.process_groups.clear()
    while not failing.workers.empty():
        failing.workers.get()
    for _ in groups:
        failing.workers.put(ppo_vllm_async.start_reward_worker(failing.args.reward_fn))


@pytest.mark.parametrize(
    ("text", "error"),
    [("import a_module_that_is_not_there\n", ModuleNotFoundError), ("other = 1\n", AttributeError)],
)
def test_file_that_cannot_be_used_is_an_error_at_the_start(text, error, tmp_path):
    path = write_text(tmp_path / "broken_reward_of_test.py", text)
    with pytest.raises(error):
        ppo_vllm_async.start_reward_worker(f"{path}:score")


def test_import_is_not_on_the_clock_of_a_call(tmp_path):
    slow = "import os, time\ntime.sleep(1.5)\n"
    slow += "def score(data_source, response, ground_truth, extra_info):\n"
    slow += "    return os._exit(1) if response == 'exit' else 1.0\n"
    args = arguments(write_text(tmp_path / "slow_reward_of_test.py", slow), reward_workers=1)
    workers, before = queue.Queue(), list(ppo_vllm_async.process_groups)
    workers.put(ppo_vllm_async.start_reward_worker(args.reward_fn))
    (_, failure), *others = grade(workers, args, "exit", "right", "right")
    assert DIED in failure and others == [RIGHT] * 2
    _, group = workers.get()
    ppo_vllm_async.process_groups[:] = before
    os.killpg(group, signal.SIGKILL)


# ----------------------------------------------------------------------- with a script around them

HANGING = """
import os, re
from pathlib import Path

def score(data_source, response, ground_truth, extra_info):
    Path(__file__).with_name(f"hung_{os.getpid()}").touch()
    re.match("(a|aa)+$", 99 * "a" + "b")  # holds the GIL for longer than anybody lives
"""

GRADES = """
import queue, sys
from types import SimpleNamespace
import ppo_vllm_async as script

if __name__ == "__main__":
    args = script.Args(reward_fn=sys.argv[1], reward_workers=2, reward_timeout=1000)
    workers = queue.Queue()
    for _ in range(2):
        workers.put(script.start_reward_worker(args.reward_fn))
    prompt = script.Prompt("row 0", "", [], [], "any", "1", None)
    responses = [script.Response(prompt, [], [], stopped=True)] * 4
    tokenizer = SimpleNamespace(decode=lambda *_, **__: "")
    script.grade_responses(responses, tokenizer, workers, args)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_killed_script_leaves_no_worker_that_holds_the_gil(number, tmp_path):
    reward = write_text(tmp_path / "hanging_reward_of_test.py", HANGING)
    program = write_text(tmp_path / "grades.py", GRADES)
    mark = new_mark()
    command = [sys.executable, str(program), f"{reward}:score"]
    env = environment(mark | {"PYTHONPATH": str(REPO)})
    with open(tmp_path / "stderr", "w") as stderr:
        process = subprocess.Popen(command, env=env, stderr=stderr, start_new_session=True)
    try:
        wait_until(
            lambda: process.poll() is not None or len(list(tmp_path.glob("hung_*"))) == 2,
            120,
            "two hung workers",
        )
        assert process.poll() is None, (tmp_path / "stderr").read_text()
        family = processes_with(mark)
        assert {f"hung_{p.pid}" for p in family} > {p.name for p in tmp_path.glob("hung_*")}
        process.send_signal(number)
        wait_until(lambda: not processes_with(mark), 20, "the end of all of them")
    finally:
        end(process)
        for left in processes_with(mark):
            left.kill()


STARTING = """
import os, time
from pathlib import Path
Path(__file__).with_name(f"starts_{os.getpid()}").touch()
time.sleep(1000)
"""
STARTS = """
import sys
import ppo_vllm_async
if __name__ == "__main__":
    ppo_vllm_async.start_reward_worker(sys.argv[1])
"""


def test_killed_script_leaves_no_worker_that_still_starts(tmp_path):
    reward = write_text(tmp_path / "starting_reward_of_test.py", STARTING)
    program = write_text(tmp_path / "starts.py", STARTS)
    mark = new_mark()
    env = environment(mark | {"PYTHONPATH": str(REPO)})
    command = [sys.executable, str(program), f"{reward}:score"]
    process = subprocess.Popen(command, env=env, start_new_session=True)
    try:
        wait_until(lambda: list(tmp_path.glob("starts_*")), 120, "the import of the reward")
        process.send_signal(signal.SIGKILL)
        wait_until(lambda: not processes_with(mark), 20, "the end of all of them")
    finally:
        end(process)
        for left in processes_with(mark):
            left.kill()


ALL_FAIL = """
def score(data_source, response, ground_truth, extra_info):
    raise OSError("the grader is out of paper")
"""
STUB = {"STUB": "1", "PYTHONPATH": str(REPO / "tests" / "helpers" / "stub_vllm")}


def test_batch_whose_rewards_all_fail_stops_the_run(run_wrapped_script, tmp_path):
    reward = write_text(tmp_path / "failing_reward_of_test.py", ALL_FAIL)
    run = run_wrapped_script(
        "ppo_vllm_async.py",
        "none",
        tmp_path,
        env=STUB,
        reward_fn=f"{reward}:score",
        reward_workers=2,
        timeout=120,
    )
    assert run.returncode == 1
    cause = f"RuntimeError: the reward failed on all responses: OSError({chr(39)}the grader is out"
    assert run.stderr.count(cause) == 1
    assert f"({reward}, line 3)" in run.stderr
    assert "the reward failed on 32 of 32 responses" in run.stdout
    assert run.metrics == [] if (run.run_dir / "metrics.jsonl").exists() else True
