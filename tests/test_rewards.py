"""From a response to its score; and whatever --reward_fn does costs its own response alone."""

import math
import queue
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import numpy
import psutil
import pytest
import torch
from helpers import REPO
from helpers.endings import new_mark, processes_with
from helpers.files import write_text
from helpers.processes import alive, end, environment, wait_until
from helpers.rollouts import plain, response_of
from transformers import AutoTokenizer

import ppo_vllm_async as script
from ppo_vllm_async import Args, Prompt, Request, Response, Rollout

# ------------------------------------------------------------------------------------------ scores


def response(data_source="gsm8k", size=3, stopped=True, asked="1 + 1?", **parts):
    prompt = Prompt("row 7", asked, [5], [5], data_source, "2", {"bonus": 3})
    return Response(prompt, [9] * size, [-1.0] * size, stopped, **parts)


FORMAT = "<think>a</think><answer>b</answer>"
PENALTY = {"non_stop_penalty": True, "penalty_reward_value": -2.0, "min_response_length": 4}
NO_RULE = {"apply_verifiable_reward": False}
# name: (response, the reward model's score of it, arguments, its score)
SCORES = {
    "verifiable": (response(verifiable=0.5), None, {"verification_reward": 4.0}, 2.0),
    "no ground truth": (response(), None, {}, 0.0),
    "all": (
        response(text=FORMAT, verifiable=1.0),
        -3.0,
        {
            "add_r1_style_format_reward": True,
            "r1_style_format_reward": 0.25,
            "reward_model_multiplier": 2.0,
        },
        -4.75,
    ),
    "reward model alone": (response(verifiable=1.0), -3.0, NO_RULE, -3.0),
    "failed": (response(text=FORMAT, failure="OSError()"), 5.0, {}, None),
    "failed, and of no interest": (response(failure="OSError()"), 5.0, NO_RULE, 5.0),
    "cut": (response(size=9, stopped=False, verifiable=1.0), 5.0, PENALTY, -2.0),
    "cut without a penalty": (
        response(text=FORMAT, stopped=False, verifiable=1.0),
        None,
        {},
        1.0,
    ),
    "short": (response(size=3, verifiable=1.0), None, PENALTY, -2.0),
    "long enough": (response(size=4, verifiable=1.0), None, PENALTY, 1.0),
    "cut and failed": (response(stopped=False, failure="OSError()"), None, PENALTY, -2.0),
}


@pytest.mark.parametrize("name", SCORES)
def test_score_is_the_sum_of_the_rewards_or_the_penalty(name, monkeypatch, capsys):
    given, model_score, changes, score = SCORES[name]
    monkeypatch.setattr(script, "reward_model_scores", lambda *_: [model_score])
    reward_model = None if model_score is None else "a model"
    (scored,) = script.score_responses(None, reward_model, [given], Args(**changes))
    assert scored == replace(given, model_score=model_score, score=score)
    warning = "the reward failed on 1 of 1 responses, first on row 7: OSError()"
    assert (warning in capsys.readouterr().out) == (given.failure is not None)


def test_means_of_scores_leave_out_what_is_not_known():
    """A failed call is not a wrong answer, and a part of the credit is not a right one."""
    responses = [
        response("gsm8k", text=FORMAT, verifiable=1.0, score=2.0, reward_metrics={"acc": 1.0}),
        response("gsm8k", failure="OSError()", score=None),
        response("math", verifiable=0.5, score=-1.0, size=9, reward_metrics={"acc": 0.25}),
        response("math", score=0.0, stopped=False),
    ]
    args = Args(add_r1_style_format_reward=True)
    expected = {
        "eval/scores": 1 / 3,
        "eval/scores/gsm8k": 2.0,
        "eval/scores/math": -0.5,
        "eval/verifiable_score": 0.75,
        "eval/verifiable_score/gsm8k": 1.0,
        "eval/verifiable_score/math": 0.5,
        "eval/verifiable_correct_rate": 0.5,
        "eval/verifiable_correct_rate/gsm8k": 1.0,
        "eval/verifiable_correct_rate/math": 0.0,
        "eval/reward/acc": 0.625,
        "eval/reward/acc/gsm8k": 1.0,
        "eval/reward/acc/math": 0.25,
        "eval/format_rate": 0.25,
        "eval/format_rate/gsm8k": 0.5,
        "eval/format_rate/math": 0.0,
        "eval/sequence_lengths": 4.5,
        "eval/sequence_lengths/gsm8k": 3.0,
        "eval/sequence_lengths/math": 6.0,
        "eval/stop_rate": 0.75,
        "eval/stop_rate/gsm8k": 1.0,
        "eval/stop_rate/math": 0.5,
        "eval/reward_failures": 1,
    }
    assert script.score_metrics("eval", responses, args) == pytest.approx(expected)
    of_one_source = script.score_metrics("objective", responses[:2], Args())
    names = ["scores", "verifiable_score", "sequence_lengths", "stop_rate", "reward/acc"]
    names += ["verifiable_correct_rate", "reward_failures"]
    assert list(of_one_source) == [f"objective/{name}" for name in names]


# -------------------------------------------------------------------------- the form of a response

THINKS = [
    "<think>a\nb</think> <answer>1</answer>",
    "\n<think></think>\n<answer>1</answer>\n",
    "<think>1 < 2, and <b>bold</b></think><answer></answer>",
]
DOES_NOT_THINK = [
    "<think>a</think><answer>1",
    "well: <think>a</think><answer>1</answer>",
    "<think>a</think><answer>1</answer> or so",
    "<think>a</think> so <answer>1</answer>",
    "<think>a</think> junk <think>b</think><answer>1</answer>",  # a lazy `.*?` reads on over junk
    "<think><think>a</think></think><answer>1</answer>",
    "<think>a</think><answer><think>b</think>1</answer>",
    "<answer>1</answer><think>a</think>",
]


def test_format_is_one_thought_and_one_answer():
    assert [text for text in THINKS if not script.has_r1_format(response(text=text))] == []
    assert [text for text in DOES_NOT_THINK if script.has_r1_format(response(text=text))] == []


@pytest.mark.parametrize("end", ["<think>", "<think>\n\n "])
def test_prompt_may_have_opened_the_thought(end):
    rest = "a</think><answer>1</answer>"
    opened = f"1 + 1? {end}"
    assert script.has_r1_format(response(asked=opened, text=rest))
    assert not script.has_r1_format(response(asked=opened, text=f"<think>{rest}"))
    assert not script.has_r1_format(response(asked="Write <think> first. 1 + 1?", text=rest))


LONG = 300_000


@pytest.fixture
def time_limit():
    """TimeoutError after a minute."""

    def stop(*_):
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(
    "text",
    [
        "<think>" * LONG,
        "<think>" + "</think> <answer>" * LONG + "</answer>",
        "<think>a</think>" + " " * LONG + "<answer>1</answer>" + " " * LONG + "x",
        " " * LONG + "x",
    ],
    ids=lambda text: text[:30],
)
def test_format_of_a_long_response_is_no_hang(text, time_limit):
    # A search that starts again at each tag would take hours
    assert not script.has_r1_format(response(text=text))


# -------------------------------------------------------------------------------- calls of a reward


def test_own_rules_grade_texts_without_special_tokens(assets):
    tokenizer = AutoTokenizer.from_pretrained(assets / "model")
    beyond = len(tokenizer) + 3  # models may have more ids than their tokenizers
    digits = [tokenizer.convert_tokens_to_ids(digit) for digit in "12"]
    prompt = Prompt("", "", [], [], "debug/sorting", "12", None)
    given = [
        Response(prompt, [*digits, beyond, 1], [], True),
        Response(prompt, digits[::-1], [], False),
        Response(replace(prompt, ground_truth=None), digits, [], False),
    ]
    graded = script.grade_responses(given, tokenizer, None, Args(reward_workers=2))
    assert [(one.text, one.verifiable) for one in graded] == [("12", 1), ("21", 0), ("12", None)]
    assert [replace(one, text="", verifiable=None) for one in graded] == given


NEIGHBOURS = """
from neighbour_of_a_reward import BONUS

def score(data_source, response, ground_truth, extra_info):
    assert (data_source, response, ground_truth) == ("gsm8k", "a text", "2")
    return BONUS * extra_info["bonus"]
"""


def test_reward_gets_what_belongs_to_a_response_and_has_its_neighbours(tmp_path, monkeypatch):
    write_text(tmp_path / "neighbour_of_a_reward.py", "BONUS = 4.0\n")
    write_text(tmp_path / "reward_with_a_neighbour.py", NEIGHBOURS)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)  # a path without a folder has neighbours too
    found = script.call_reward_fn("reward_with_a_neighbour.py:score", response(text="a text"))
    assert found == (12.0, {}, None)


@pytest.mark.parametrize("reward", [numpy.bool_(True), numpy.float32(1), torch.tensor(1.0)])
def test_scalars_of_numpy_and_torch_are_numbers(reward, monkeypatch):
    monkeypatch.setattr(script, "load_reward_fn", lambda _: lambda *_, extra_info: reward)
    score, metrics, failure = script.call_reward_fn("", response())
    assert (type(score), score, metrics, failure) == (float, 1.0, {}, None)


VERL = """
def score(data_source, response, ground_truth, extra_info):
    return {"score": 0.5, "acc": True, "pred": "42", "tokens": 7}
"""


@pytest.mark.parametrize("reward_fn", [False, True], ids=["compute_score", "reward_fn"])
def test_dictionary_of_verl_is_a_score_and_metrics(reward_fn, tmp_path, monkeypatch):
    functions = {}
    exec(VERL, functions)
    monkeypatch.setattr(script, "compute_score", lambda *given: functions["score"](*given, None))
    monkeypatch.setattr(sys, "path", list(sys.path))
    workers = queue.Queue()
    workers.put((ThreadPoolExecutor(1), None))  # in place of a process
    path = write_text(tmp_path / "reward_like_those_of_verl.py", VERL)
    args = Args(reward_fn=f"{path}:score" if reward_fn else None, reward_workers=1)
    tokenizer = SimpleNamespace(decode=lambda *_, **__: "")
    (graded,) = script.grade_responses([response()], tokenizer, workers, args)
    metrics = {"acc": 1.0, "tokens": 7.0}
    assert graded == response(verifiable=0.5, reward_metrics=metrics)


@pytest.mark.parametrize("result", [{"acc": 1.0}, {"score": math.nan, "acc": 1.0}, {"score": None}])
def test_dictionary_without_a_score_costs_its_response(result, monkeypatch):
    monkeypatch.setattr(script, "load_reward_fn", lambda _: lambda *_, extra_info: result)
    score, metrics, failure = script.call_reward_fn("", response())
    assert (score, metrics) == (None, {})
    name = {"acc": "KeyError: 'score'", "score": "Error: "}[next(iter(result))]
    assert name in failure


# What a function asks for comes back as a metric
ASKING = {
    "nothing": (lambda *_, extra_info: 1.0, {}),
    "num_tokens": (
        lambda *_, extra_info, num_tokens: {"score": 1, "tokens": num_tokens},
        {"tokens": 4},
    ),
    "stopped": (
        lambda source, text, truth, stopped, extra_info: {"score": 1, "stopped": stopped},
        {"stopped": 0},
    ),
    "both": (
        lambda *_, num_tokens=0, stopped=True, extra_info=None: {
            "score": 1,
            "tokens": num_tokens,
            "stopped": stopped,
        },
        {"tokens": 4, "stopped": 0},
    ),
    "all there is": (lambda *_, **rest: {"score": 1} | dict.fromkeys(rest, 1), {"extra_info": 1}),
}


@pytest.mark.parametrize("name", ASKING)
def test_reward_gets_what_it_asks_for(name, monkeypatch):
    function, metrics = ASKING[name]
    monkeypatch.setattr(script, "load_reward_fn", lambda _: function)
    cut = response(size=4, stopped=False)
    assert script.call_reward_fn("", cut) == (1.0, metrics, None)


def test_metrics_of_a_reward_are_in_a_checkpoint(tmp_path):
    prompts = [response().prompt] * 2
    graded = [
        response_of(prompts[0], [9], [-1.0], verifiable=0.5, reward_metrics={"acc": 1 / 3}),
        response_of(prompts[1], [9, 8], [-1.0, -2.0], stopped=False),
    ]
    (tmp_path / "checkpoints/unfinished").mkdir(parents=True)
    script.save_rollout(tmp_path, Rollout(5, graded[:1], graded[1:], {}))
    request = Request(prompts[:1], [1], prompts[1:])
    loaded = script.load_rollout(tmp_path / "checkpoints/unfinished", 5, request)
    assert (loaded.policy_version, len(loaded.responses), len(loaded.eval_responses)) == (5, 1, 1)
    assert plain(loaded.responses + loaded.eval_responses) == plain(graded)


# --------------------------------------------------------------------------------------- workers

FAILING = """
import ctypes, os, re, subprocess, sys, time
from pathlib import Path

HERE = Path(__file__).parent

class Unreadable(Exception):
    def __init__(self, *, line):  # pickle makes it again from its arguments, and there it fails
        super().__init__(f"line {line}")

class Unprintable(Exception):
    def __repr__(self):
        raise ValueError("no words for it")

def leave_a_child():
    child = subprocess.Popen(["sleep", "300"], close_fds=False)
    (HERE / "child").write_text(str(child.pid))

def right(): return 1.0
def raises(): raise OSError("the grader is out of paper")
def unreadable(): raise Unreadable(line=12)
def unprintable(): raise Unprintable
def returns_nan(): return float("nan")
def returns_none(): return None
def sys_exit(): sys.exit()
def os_exit(): os._exit(0)
def reads_nowhere(): ctypes.string_at(0)
def hangs(): time.sleep(1000)
def holds_the_gil(): re.match("(a|aa)+$", 99 * "a" + "b")

def child_and_exit():
    leave_a_child()
    os._exit(3)

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
# What the function does: what the cause must hold
WAYS_TO_FAIL = {
    "raises": f'File "PATH", line {line_of("raises")}, in raises',
    "unreadable": f'File "PATH", line {line_of("unreadable")}, in unreadable',
    "unprintable": "",
    "returns_nan": "ValueError: the reward is nan",
    "returns_none": "TypeError: ",
    "sys_exit": "SystemExit",
    "os_exit": DIED,
    "reads_nowhere": DIED,
    "hangs": LATE,
    "holds_the_gil": LATE,
    "child_and_exit": DIED,
}

TOKENIZER = SimpleNamespace(decode=lambda words, **_: " ".join(words))
RIGHT = (1.0, None)


def start_workers(path, count=2, timeout=1.0):
    """What grade() needs: the workers, and arguments."""
    args = Args(reward_fn=f"{path}:score", reward_workers=count, reward_timeout=timeout)
    workers = queue.Queue()
    for _ in range(count):
        workers.put(script.start_reward_worker(args.reward_fn))
    return workers, args


def grade(workers, args, *ways):
    """What is said of responses that do this, as (score, failure)."""
    prompt = Prompt("row 0", "", [], [], "any", "1", None)
    responses = [Response(prompt, [way], [-1.0], stopped=True) for way in ways]
    graded = script.grade_responses(responses, TOKENIZER, workers, args)
    assert [one.text for one in graded] == list(ways)
    return [(one.verifiable, one.failure) for one in graded]


@pytest.fixture(scope="module")
def failing(tmp_path_factory):
    """The file of all these functions; and workers for it, which the tests share."""
    path = write_text(tmp_path_factory.mktemp("rewards") / "reward_of_test.py", FAILING)
    workers, args = start_workers(path)
    yield SimpleNamespace(path=path, parts=(workers, args))
    assert workers.qsize() == len(script.process_groups) == 2
    family = [psutil.Process(group) for _, group in list(workers.queue)]
    script.end_children()
    wait_until(lambda: not alive(family), 10, f"the end of {family}")
    script.process_groups.clear()


def child_of(failing):
    """What leave_a_child has left last: one process or none."""
    pid = int(failing.path.with_name("child").read_text())
    return alive([process for process in psutil.process_iter() if process.pid == pid])


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS_TO_FAIL)
def test_whatever_a_reward_does_costs_its_own_response_alone(way, failing):
    first, failed, *others = grade(*failing.parts, "right", way, "right", "right")
    assert [first, *others] == [RIGHT] * 3
    score, failure = failed
    assert score is None and WAYS_TO_FAIL[way].replace("PATH", str(failing.path)) in failure
    if way == "child_and_exit":
        wait_until(lambda: not child_of(failing), 10, "the end of what the reward started")
    assert grade(*failing.parts, *["right"] * 4) == [RIGHT] * 4


@pytest.mark.slow
def test_all_workers_may_fail_at_once(failing):
    found = grade(*failing.parts, "os_exit", "reads_nowhere", "raises", "right")
    assert [failure is not None for _, failure in found] == [True] * 3 + [False]


@pytest.mark.slow
def test_forked_child_of_a_reward_does_not_answer_for_it(failing):
    # Its answer would be taken for this call's, and this call's for the next one's
    assert grade(*failing.parts, "forks", "right", "right") == [RIGHT] * 3


@pytest.mark.slow
def test_worker_killed_while_idle_costs_one_response(failing):
    _, group = failing.parts[0].queue[0]
    victim = psutil.Process(group)
    victim.kill()
    wait_until(lambda: not alive([victim]), 10, "the end of an idle worker")
    found = grade(*failing.parts, *["right"] * 4)
    assert sorted(failure is None for _, failure in found) == [False, True, True, True]
    assert grade(*failing.parts, *["right"] * 4) == [RIGHT] * 4


@pytest.mark.slow
def test_what_a_reward_has_started_ends_with_the_run(failing, monkeypatch):
    monkeypatch.setattr(script, "process_groups", [])
    assert grade(*start_workers(failing.path, count=1), "child_and_right") == [RIGHT]
    assert child_of(failing)
    script.end_children()
    wait_until(lambda: not child_of(failing), 10, "the end of what the reward started")


@pytest.mark.slow
def test_file_that_cannot_be_used_is_an_error_at_the_start(tmp_path):
    path = write_text(tmp_path / "broken_reward_of_test.py", "other = 1\n")
    with pytest.raises(AttributeError):
        script.start_reward_worker(f"{path}:score")


@pytest.mark.slow
def test_import_is_not_on_the_clock_of_a_call(tmp_path, monkeypatch):
    slow = "import os, time\ntime.sleep(1.5)\n"
    slow += "def score(data_source, response, ground_truth, extra_info):\n"
    slow += "    return os._exit(1) if response == 'exit' else 1.0\n"
    monkeypatch.setattr(script, "process_groups", [])
    parts = start_workers(write_text(tmp_path / "slow_reward_of_test.py", slow), count=1)
    (_, failure), *others = grade(*parts, "exit", "right", "right")
    script.end_children()
    assert DIED in failure and others == [RIGHT] * 2


# ----------------------------------------------------------------------- with a script around them

BUSY = """
import os, re, time
from pathlib import Path

def be_busy():
    Path(__file__).with_name(f"busy_{os.getpid()}").touch()
    re.match("(a|aa)+$", 99 * "a" + "b")  # holds the GIL for longer than anybody lives

"""
HANGS_IN_ITS_CALLS = BUSY + "def score(*args, **rest):\n    be_busy()\n"
HANGS_IN_ITS_IMPORT = BUSY + "be_busy()\n"

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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reward", "busy"),
    [(HANGS_IN_ITS_CALLS, 2), (HANGS_IN_ITS_IMPORT, 1)],
    ids=["in its calls", "at its start"],
)
def test_killed_script_leaves_no_worker_that_holds_the_gil(reward, busy, tmp_path):
    path = write_text(tmp_path / "reward_that_is_busy.py", reward)
    program = write_text(tmp_path / "grades.py", GRADES)
    mark = new_mark()
    process = subprocess.Popen(
        [sys.executable, str(program), f"{path}:score"],
        env=environment(mark | {"PYTHONPATH": str(REPO)}),
        start_new_session=True,
    )
    try:
        wait_until(
            lambda: process.poll() is not None or len(list(tmp_path.glob("busy_*"))) == busy,
            120,
            "busy workers",
        )
        assert process.poll() is None
        family = {f"busy_{one.pid}" for one in processes_with(mark)}
        assert family > {path.name for path in tmp_path.glob("busy_*")}
        process.kill()
        wait_until(lambda: not processes_with(mark), 20, "the end of all of them")
    finally:
        end(process)
        for left in processes_with(mark):
            left.kill()
