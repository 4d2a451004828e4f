"""How a run can end: what goes wrong in it, what is sent to it, and what is left behind.

Of ppo_sync.py and grpo_vllm_async.py; test_ends_async.py and test_rewards_async.py have the same of
ppo_vllm_async.py, which ends otherwise.
"""

import contextlib
import os
import random
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

import datasets
import psutil
import pytest
import torch
from helpers import GRPO, OLD, REPO
from helpers.files import write_text
from helpers.processes import TWO_RANKS, alive, descendants, finish, shared_memory_of, wait_until
from helpers.runs import batch_of
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
)

import ppo_sync

# --------------------------------------------------------------- a weight sync that lost something


def test_weights_that_vllm_does_not_have_stop_the_run_before_an_update():
    mask = torch.ones(2, 3)
    args = ppo_sync.Args(dtype="float32")
    near, far = torch.full((2, 3), 1e-4), torch.full((2, 3), 0.01)
    ppo_sync.check_sampler(near, torch.zeros(2, 3), mask, args)
    with pytest.raises(RuntimeError, match="at equal weights"):
        ppo_sync.check_sampler(far, torch.zeros(2, 3), mask, args)
    ppo_sync.check_sampler(far, torch.zeros(2, 3), mask, ppo_sync.Args(dtype="bfloat16"))
    # Not finite: the check of the gradient will see it, and save the batch
    ppo_sync.check_sampler(far * float("nan"), torch.zeros(2, 3), mask, args)
    ppo_sync.check_sampler(far * float("inf"), torch.zeros(2, 3), mask, args)


@pytest.mark.slow
def test_tensor_left_out_of_the_sync_stops_the_run(run_script, tmp_path):
    run = run_script(REPO / "tests" / "helpers" / "broken_sync.py", tmp_path)
    assert run.returncode not in (0, 2)
    last = run.stderr.strip().splitlines()[-1]
    assert last.startswith("RuntimeError: ") and "at equal weights" in last


# ----------------------------------------------------------------------------------------- rewards

FAILING = """
import ctypes, os, re, signal, subprocess, sys, time
from pathlib import Path

class Unreadable(Exception):
    def __init__(self, *, line):  # pickle makes it again from its arguments, and there it fails
        super().__init__(f"line {line}")

class Unprintable(Exception):
    def __str__(self):
        raise ValueError("no words for it")

def leave_a_child():
    child = subprocess.Popen(["sleep", "1000"], close_fds=False, start_new_session=True)
    Path(__file__).with_name("child").write_text(str(child.pid))

def right():
    bytes(2**27)  # takes a little memory itself
    return 1.0

def raises(): raise OSError("the grader is out of paper")
def unreadable(): raise Unreadable(line=12)
def unprintable(): raise Unprintable
def unencodable(): raise OSError("\\udcff")
def returns_nan(): return float("nan")
def sys_exit(): sys.exit()
def ctrl_c(): raise KeyboardInterrupt
def os_exit(): os._exit(0)
def reads_nowhere(): ctypes.string_at(0)
def sigsegv(): os.kill(os.getpid(), signal.SIGSEGV)
def hangs(): time.sleep(1000)
def holds_the_gil(): re.match("(a|aa)+$", 99 * "a" + "b")
def stops(): os.kill(os.getpid(), signal.SIGSTOP)
def closes_everything(): os.closerange(3, 1000)

def allocates():
    blocks = []
    while len(blocks) < 64:  # 4 GiB
        blocks.append(bytes(2**26))
    return 1.0

BLOCKS = []

def leaks():  # too much of the worker's memory to let it work on
    while len(BLOCKS) < 64:
        BLOCKS.append(bytes(2**26))
    return 1.0

def leaves_a_child_and_exits():
    leave_a_child()
    os._exit(3)

def leaves_a_child_and_hangs():
    leave_a_child()
    time.sleep(1000)

def forks():
    child = os.fork()
    if child == 0:
        return 0.0
    os.waitpid(child, 0)
    return 1.0

def waits_to_be_killed():
    Path(__file__).with_name(f"busy_{os.getpid()}").touch()
    re.match("(a|aa)+$", 99 * "a" + "b")

def score(data_source, response, ground_truth, extra_info):
    return globals()[response]()
"""


def line_of(way):
    lines = FAILING.splitlines()
    return next(i for i, line in enumerate(lines, start=1) if line.startswith(f"def {way}("))


# (way to fail, what the cause must hold)
WAYS_TO_FAIL = [
    ("raises", f"OSError: the grader is out of paper (PATH, line {line_of('raises')})"),
    ("unreadable", f"Unreadable: line 12 (PATH, line {line_of('unreadable')})"),
    ("unprintable", ""),
    ("unencodable", "OSError: \\udcff"),
    ("returns_nan", "ValueError: the reward is nan"),
    ("sys_exit", "SystemExit"),
    ("ctrl_c", "KeyboardInterrupt"),
    ("os_exit", "exit code 0"),
    ("reads_nowhere", "exit code -11"),
    ("sigsegv", "exit code -11"),
    ("hangs", "TimeoutError: the call took longer than 2 seconds"),
    ("holds_the_gil", "TimeoutError"),
    ("stops", "TimeoutError"),
    ("closes_everything", ""),
    ("allocates", "MemoryError"),
    ("leaks", "MemoryError"),
    ("leaves_a_child_and_exits", "exit code 3"),
    ("leaves_a_child_and_hangs", "TimeoutError"),
]


def start_pool(reward, **options):
    options = {"reward_workers": 2, "reward_timeout": 2.0, "reward_memory": 0.5} | options
    return ppo_sync.start_reward_workers(ppo_sync.Args(reward_fn=f"{reward}:score", **options))


def call(pool, *texts):
    """What the pool says of each text: a score, or the text of an error."""
    prompts = [
        ppo_sync.Prompt(f"data.jsonl, row {i}", "", [], [], "any", "1", None)
        for i in range(len(texts))
    ]
    results = ppo_sync.call_workers(pool, prompts, list(texts))
    return [str(result) if isinstance(result, Exception) else result for result in results]


def family_of(pool):
    return [psutil.Process(worker.process.pid) for worker in pool]


@pytest.fixture(scope="module")
def failing(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("rewards") / "reward.py", FAILING)


@pytest.fixture(scope="module")
def pool_of_all(failing):
    pool = start_pool(failing)
    yield pool
    for worker in pool:
        worker.stop()


@pytest.fixture
def pool(pool_of_all, failing):
    """Two workers for the file of all failures; a child that a reward left ends with the test."""
    yield pool_of_all
    pid = failing.with_name("child")
    if pid.exists():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid.read_text()), signal.SIGKILL)
        pid.unlink()


@pytest.mark.slow
@pytest.mark.parametrize(("way", "cause"), WAYS_TO_FAIL, ids=[way for way, _ in WAYS_TO_FAIL])
def test_whatever_a_reward_does_costs_that_call_alone(way, cause, pool, failing):
    first, failed, *others = call(pool, "right", way, "right", "right", "right")
    assert [first, *others] == [1.0] * 4
    assert isinstance(failed, str)
    assert cause.replace("PATH", str(failing)) in failed
    assert call(pool, *["right"] * 4) == [1.0] * 4


@pytest.mark.slow
def test_all_workers_may_fail_at_once(pool):
    found = call(pool, *["os_exit", "sigsegv", "raises"] * 3, "right")
    assert [isinstance(result, str) for result in found] == [True] * 9 + [False]
    assert call(pool, *["right"] * 4) == [1.0] * 4


@pytest.mark.slow
def test_forked_child_of_a_reward_does_not_answer_for_it(pool):
    # Its answer would be taken for this call's, and this call's for the next one's
    assert call(pool, "forks", "right", "right") == [1.0] * 3
    assert call(pool, *["right"] * 4) == [1.0] * 4


@pytest.mark.slow
def test_worker_killed_while_idle_costs_no_call(pool):
    assert call(pool, "right", "right") == [1.0, 1.0]
    for victims in (pool[:1], pool):
        for worker in victims:
            worker.process.kill()
        wait_until(
            lambda victims=victims: not any(worker.process.is_alive() for worker in victims),
            10,
            "the end of idle workers",
        )
        assert call(pool, *["right"] * 4) == [1.0] * 4


@pytest.mark.slow
def test_worker_killed_while_busy_costs_its_call_alone(failing):
    pool = start_pool(failing, reward_timeout=1000)
    try:
        with ThreadPoolExecutor(1) as thread:
            found = thread.submit(call, pool, "right", "waits_to_be_killed", "right", "right")
            (busy,) = wait_until(
                lambda: list(failing.parent.glob("busy_*")), 60, "a worker that is busy"
            )
            os.kill(int(busy.name.removeprefix("busy_")), signal.SIGKILL)
            assert found.result(60) == [1.0, "its process ended with exit code -9", 1.0, 1.0]
        assert call(pool, *["right"] * 4) == [1.0] * 4
    finally:
        for worker in pool:
            worker.stop()
        for path in failing.parent.glob("busy_*"):
            path.unlink()


@pytest.mark.slow
def test_import_of_the_reward_file_is_not_on_the_clock(tmp_path):
    slow = "import os, time\ntime.sleep(3)\n"
    slow += "def score(data_source, response, ground_truth, extra_info):\n"
    slow += "    return os._exit(1) if response == 'exit' else 1.0\n"
    pool = start_pool(write_text(tmp_path / "slow.py", slow), reward_timeout=1.0)
    try:
        assert call(pool, *["right"] * 4) == [1.0] * 4
        # Nor is that of the worker that takes the place of another
        first, *others = call(pool, "exit", *["right"] * 4)
        assert "exit code 1" in first
        assert others == [1.0] * 4
        assert call(pool, *["right"] * 4) == [1.0] * 4
    finally:
        for worker in pool:
            worker.stop()


@pytest.mark.slow
def test_ctrl_c_while_rewards_hang_waits_for_none_of_them(failing, monkeypatch):
    # The threads of the calls see their workers end, and must not clean up beside the main thread:
    # a connection closed twice is an OSError. They are slow here, so that they meet.
    close = Connection._close

    def close_slowly(connection):
        in_main_thread = threading.current_thread() is threading.main_thread()
        time.sleep(0.5 if in_main_thread else 0.2)
        close(connection)

    monkeypatch.setattr(Connection, "_close", close_slowly)
    # A shell starts what it puts into the background with Ctrl-C ignored
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    pool = start_pool(failing, reward_timeout=60)
    threads = set(threading.enumerate())
    family, pressed_at = set(), []

    def press_ctrl_c():
        wait_until(lambda: len(list(failing.parent.glob("busy_*"))) == 2, 60, "two busy workers")
        family.update(family_of(pool))
        pressed_at.append(time.monotonic())
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    try:
        with ThreadPoolExecutor(1) as thread:
            pressed = thread.submit(press_ctrl_c)
            with pytest.raises(KeyboardInterrupt):
                call(pool, *["waits_to_be_killed"] * 2, *["right"] * 1000)
            pressed.result()
        assert time.monotonic() - pressed_at[0] < 60
        assert len(family) == 2
        assert alive(family) == []
        assert set(threading.enumerate()) <= threads
        assert not any(worker.process.is_alive() for worker in pool)
    finally:
        signal.signal(signal.SIGINT, before)
        for worker in pool:
            worker.stop()
        for path in failing.parent.glob("busy_*"):
            path.unlink()


@pytest.mark.slow
def test_warnings_name_the_row_the_file_and_the_line(pool, failing, capsys):
    texts = ["right", "raises", "raises", "sigsegv", "right"]
    prompts = [
        ppo_sync.Prompt(f"data.jsonl, row {10 + i}", "", [], [], "any", truth, None)
        for i, truth in enumerate(["1", "1", "1", "1", None])
    ]
    args = pool[0].args
    scores, failures = ppo_sync.verifiable_rewards(pool, prompts, texts, args)
    assert scores == [1.0, None, None, None, None]
    assert [cause is not None for cause in failures] == [False, True, True, True, False]
    ppo_sync.warn_of_failures(prompts, failures)
    (line,) = capsys.readouterr().out.splitlines()
    for fragment in (
        "3 of 5",
        f"OSError: the grader is out of paper ({failing}, line {line_of('raises')})",
        "data.jsonl, row 11",  # the first of this kind
        "exit code -11",
        "data.jsonl, row 13",
    ):
        assert fragment in line
    assert "row 12" not in line


UNRELIABLE = """
import os, time

class Unreadable(Exception):
    def __init__(self, *, line):  # pickle makes it again from its arguments, and there it fails
        super().__init__(f"line {line}")

def score(data_source, response, ground_truth, extra_info):
    mood = extra_info["index"] % 10
    if mood == 1:
        time.sleep(1000)
    if mood == 2:
        raise OSError("the grader is out of paper")
    if mood == 6:
        os._exit(3)
    if mood == 7:
        raise Unreadable(line=12)
    return {3: float("nan"), 4: None, 5: "good"}.get(mood, 0.25)
"""


# On one process: test_loop.py, and above what each way to fail costs
@pytest.mark.slow
def test_unreliable_reward_costs_its_own_responses_only(run_script, assets, tmp_path):
    reward = write_text(tmp_path / "reward.py", UNRELIABLE)
    run = run_script(
        "ppo_sync.py",
        tmp_path,
        launcher=TWO_RANKS,
        env={"ACCELERATE_USE_CPU": "true"},
        timeout=180,
        generation_backend="transformers",
        reward_fn=f"{reward}:score",
        reward_timeout=0.5,
        local_mini_batch_size=16,
        save_batches=True,
    )
    assert run.returncode == 0, run.output
    tokenizer = AutoTokenizer.from_pretrained(assets / "model")
    rows = datasets.Dataset.from_parquet(str(assets / "train.parquet")).to_list()
    index = {row["prompt"][-1]["content"]: row["extra_info"]["index"] for row in rows}
    seen = set()
    for step, line in enumerate(run.metrics, start=1):
        batch = batch_of(run, step)
        texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in batch["prompt_ids"]]
        moods = [index[re.sub(r"[^0-9=]", "", text)] % 10 for text in texts]
        failed = [1 <= mood <= 7 for mood in moods]
        assert batch["scored"].tolist() == [float(not one) for one in failed]
        assert batch["scores"].tolist() == [0.0 if one else 0.25 for one in failed]
        # Left out: not trained on as if the answer had been wrong
        assert torch.equal(batch["loss_mask"], batch["mask"] * batch["scored"][:, None])
        assert line["objective/reward_failures"] == sum(failed)
        assert line["objective/scores"] == line["objective/verifiable_score"] == 0.25
        assert line["objective/verifiable_correct_rate"] == 0
        seen |= set(moods)
    assert seen == set(range(10))
    for cause in ("OSError: the grader is out of paper", "TimeoutError", "Unreadable: line 12"):
        assert cause in run.stdout
    assert "exit code 3" in run.stdout


FAILS_IN_THE_RUN = """
from pathlib import Path

def score(data_source, response, ground_truth, extra_info):
    if Path(__file__).with_name("run").exists():
        raise OSError("the grader is out of paper")
    return 1.0
"""


@pytest.mark.slow
def test_batch_whose_rewards_all_fail_stops_every_rank(run_script, tmp_path):
    reward = write_text(tmp_path / "reward.py", FAILS_IN_THE_RUN)
    run = run_script(
        "ppo_sync.py",
        tmp_path,
        launcher=TWO_RANKS,
        env={"ACCELERATE_USE_CPU": "true"},
        timeout=120,
        generation_backend="transformers",
        reward_fn=f"{reward}:score",
    )
    assert run.returncode not in (0, 2)
    cause = "the reward failed on all 64 responses: OSError: the grader is out of paper"
    assert run.stderr.count(f"RuntimeError: {cause} ({reward}, line 6)") == 2
    assert not (run.run_dir / "metrics.jsonl").exists()
    assert not (run.run_dir / "model").exists()


HANGING = """
import multiprocessing, os, re
from pathlib import Path

def score(data_source, response, ground_truth, extra_info):
    if Path(__file__).with_name("run").exists():
        Path(__file__).with_name(f"hung_{os.getpid()}").touch()
        re.match("(a|aa)+$", 99 * "a" + "b")  # holds the GIL for longer than anybody lives
    return 1.0
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "returncode", "last_line"),
    [
        (signal.SIGKILL, -signal.SIGKILL, None),
        (signal.SIGINT, 130, "Interrupted"),
    ],
    ids=["killed", "ctrl-c"],
)
def test_ended_script_leaves_no_reward_worker(
    number, returncode, last_line, start_script, tmp_path
):
    reward = write_text(tmp_path / "reward.py", HANGING)
    options = {"reward_fn": f"{reward}:score", "reward_timeout": 1000, "reward_workers": 2}
    process = start_script("ppo_sync.py", tmp_path, generation_backend="transformers", **options)
    wait_until(
        lambda: process.poll() is not None or len(list(tmp_path.glob("hung_*"))) == 2,
        120,
        "two hung workers",
    )
    assert process.poll() is None, (tmp_path / "stderr").read_text()
    family = descendants(process)
    try:
        assert {f"hung_{child.pid}" for child in family} > {
            path.name for path in tmp_path.glob("hung_*")
        }
        started_at = time.monotonic()
        process.send_signal(number)
        run = finish(process, 60, started_at)  # and not the 1000 s of a hung call
        assert run.returncode == returncode
        if last_line:
            assert run.stderr.strip().splitlines()[-1] == last_line
        wait_until(lambda: not alive(family), 10, f"the end of {family}")
    finally:
        for child in alive(family):
            child.kill()


WAITS_TO_BE_KILLED = """
import os, time
from pathlib import Path

HERE = Path(__file__).parent

def score(data_source, response, ground_truth, extra_info):
    if (HERE / "run").exists() and extra_info["index"] % 16 == 5:
        time.sleep(1000)
    return 0.5

(HERE / f"worker_{os.getpid()}").touch()
"""


@pytest.mark.slow
def test_run_outlives_its_reward_workers(start_script, tmp_path):
    """Any of them is killed, busy or idle, again and again; some calls end in no other way."""
    reward = write_text(tmp_path / "reward.py", WAITS_TO_BE_KILLED)
    options = {"reward_fn": f"{reward}:score", "reward_timeout": 1000, "reward_workers": 2}
    options |= {"generation_backend": "transformers", "total_episodes": 4 * 32}
    process = start_script("ppo_sync.py", tmp_path, **options)
    choice, family, killed = random.Random(1), set(), 0
    started_at = time.monotonic()
    deadline = started_at + 240
    while process.poll() is None and time.monotonic() < deadline:
        members = descendants(process)
        family.update(members)
        # Those that have imported the file, of a run whose start is over
        workers = [
            child
            for child in members
            if process.run_dir.exists() and (tmp_path / f"worker_{child.pid}").exists()
        ]
        if workers:
            with contextlib.suppress(psutil.NoSuchProcess):
                choice.choice(workers).kill()
                killed += 1
        time.sleep(0.3)
    run = finish(process, 1, started_at)
    assert run.returncode == 0, run.output
    assert killed > 0
    assert len(run.metrics) == 4
    failures = [line["objective/reward_failures"] for line in run.metrics]
    assert sum(failures) >= 1
    told = re.findall(r"the reward failed on (\d+) of 32 responses, .* exit code -9", run.stdout)
    assert sum(failures) == sum(map(int, told))
    assert all(line["objective/verifiable_score"] == 0.5 for line in run.metrics)
    wait_until(lambda: not alive(family), 10, f"the end of {family}")


# ----------------------------------------------------------------------------- faults within a run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "launcher"),
    [("grpo_vllm_async.py", TWO_RANKS), ("grpo_vllm_async.py", ())],
    ids=["two ranks", "one process"],
)
def test_dead_generator_stops_every_rank(script, launcher, run_wrapped_script, tmp_path):
    run = run_wrapped_script(
        script,
        "generator",
        tmp_path,
        launcher=launcher,
        env={"ACCELERATE_USE_CPU": "true"},
        timeout=120,
        local_mini_batch_size=16,
        total_episodes=20 * 32,
    )
    assert run.returncode not in (0, 2)
    cause = "OSError: the engine is on fire"
    if launcher:
        assert cause in run.output
        assert f"RuntimeError: rank 0 failed: {cause}" in run.output
    else:
        assert run.stderr.strip().splitlines()[-1] == cause
    # It was seen before the second step was over: of its two updates, the second was not made.
    assert len(run.metrics) == 1
    assert run.stdout.count("Gradients of an update are there") < 4
    assert not (run.run_dir / "model").exists()


# test_loop.py has the same in every script, with a stub of vLLM
@pytest.mark.slow
def test_infinite_loss_stops_the_run_and_keeps_the_batch(run_wrapped_script, tmp_path):
    run = run_wrapped_script(
        "grpo_vllm_async.py", "explosion", tmp_path, total_episodes=320, save_freq=1, timeout=120
    )
    assert run.returncode not in (0, 2)
    *_, cause, last = run.stderr.strip().splitlines()
    assert cause.startswith("FloatingPointError: gradient not finite in step 2")
    checkpoint = run.run_dir / "checkpoints" / "step_1"
    assert last.startswith("To resume: ")
    assert last.endswith(f"--resume_from_checkpoint {checkpoint}")
    assert (checkpoint / "checkpoint.json").exists()
    assert len(run.metrics) == 1
    assert torch.load(run.run_dir / "bad_batch.pt", weights_only=False)["logprobs"].isnan().any()


# ------------------------------------------------------------------------------- ends from outside


@pytest.fixture(scope="module")
def tireless_model(assets, tmp_path_factory):
    """The debug model with an end token that it never learned to say: its responses are long."""
    model, tokenizer = (
        cls.from_pretrained(assets / "model") for cls in (AutoModelForCausalLM, AutoTokenizer)
    )
    path = tmp_path_factory.mktemp("tireless")
    model.config.eos_token_id = model.generation_config.eos_token_id = 2
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(params=OLD)
def generating(request, start_script, tireless_model, tmp_path):
    """A run that has made a step and generates for the next, which takes it most of its time."""
    before = set(Path("/dev/shm").glob("tandem_*"))
    process = start_script(
        request.param,
        tmp_path,
        model_name_or_path=tireless_model,
        response_length=160,
        total_episodes=32_000,
    )
    metrics = process.run_dir / "metrics.jsonl"
    wait_until(
        lambda: process.poll() is not None or (metrics.exists() and metrics.read_text()),
        240,
        "a first step",
    )
    assert process.poll() is None, (tmp_path / "stderr").read_text()
    process.family = descendants(process)
    process.engine = next(
        child for child in process.family if "spawn_main" in "".join(child.cmdline())
    )
    (process.sync_dir,) = set(Path("/dev/shm").glob("tandem_*")) - before
    process.shared_memory = set().union(*(shared_memory_of(child) for child in process.family))
    yield process
    for child in alive(process.family):
        child.kill()


def check_nothing_left(process):
    wait_until(lambda: not alive(process.family), 10, f"the end of {process.family}")
    for path in (process.sync_dir, *process.shared_memory):
        wait_until(lambda path=path: not os.path.exists(path), 10, f"the end of {path}")


# What the scripts share is the same text, and test_loop.py has the ends of each main() with a stub.
# So here one script, or a synchronous and an asynchronous one, stands for all.


@pytest.mark.slow
@pytest.mark.parametrize("generating", OLD, indirect=True)
def test_dead_engine_ends_the_run(generating):
    started_at = time.monotonic()
    generating.engine.kill()
    run = finish(generating, 15, started_at)
    assert run.returncode not in (0, 2)
    last = run.stderr.strip().splitlines()[-1]
    assert "vLLM's process" in last and "died" in last
    check_nothing_left(generating)
    assert not (generating.run_dir / "model").exists()


@pytest.mark.slow
@pytest.mark.parametrize("generating", GRPO, indirect=True)
def test_killed_script_leaves_no_engine(generating):
    generating.kill()
    generating.wait()
    check_nothing_left(generating)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("generating", "kill"),
    # A terminal sends it to everyone in the foreground, vLLM's processes too; others to the script
    # alone.
    [(OLD[0], os.kill), (OLD[1], os.killpg)],
    indirect=["generating"],
)
def test_ctrl_c_leaves_no_engine(generating, kill):
    started_at = time.monotonic()
    kill(generating.pid, signal.SIGINT)
    run = finish(generating, 15, started_at)
    assert run.returncode == 130
    assert run.stderr.strip().splitlines()[-1] == "Interrupted"
    check_nothing_left(generating)


@pytest.mark.slow
@pytest.mark.parametrize("generating", GRPO, indirect=True)
def test_terminated_script_leaves_no_engine(generating):
    started_at = time.monotonic()
    generating.send_signal(signal.SIGTERM)
    run = finish(generating, 15, started_at)
    assert run.returncode == 143
    assert run.stderr.strip().splitlines()[-1] == "Terminated"
    check_nothing_left(generating)


@pytest.mark.slow
def test_finished_run_leaves_nothing_behind(vllm_run):
    ours = [
        p
        for p in psutil.process_iter(["cmdline"])
        if str(vllm_run.run_dir.parent) in (p.info["cmdline"] or [])
    ]
    assert ours == []
    assert not any(word in vllm_run.stderr for word in ("Traceback", "leaked", "UserWarning"))
