"""From a response to its score; and whatever --reward_fn does costs its own response alone."""

import math
import os
import queue
import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy
import psutil
import pytest
import torch
from helpers import REPO
from helpers.files import write_text
from helpers.processes import alive, end, environment, new_mark, processes_with, wait_until
from transformers import AutoTokenizer

import ppo_vllm_async as script
from ppo_vllm_async import Args, Prompt, Response

# ------------------------------------------------------------------------------------------ scores


class Words:
    """A tokenizer whose ids are words."""

    added_tokens_decoder, bos_token_id, pad_token_id = {}, None, None

    def decode(self, ids):
        return " ".join(map(str, ids))


TOKENIZER = Words()


def response(data_source="gsm8k", size=3, stopped=True, asked="1 + 1?", truth="2", **parts):
    prompt = Prompt("row 7", asked, [5], data_source, truth, {"bonus": 3})
    return Response(prompt, [9] * size, [-1.0] * size, stopped, **parts)


FORMAT = "<think>a</think><answer>b</answer>"
PENALTY = {"non_stop_penalty": True, "penalty_reward_value": -2.0, "min_response_length": 4}
ALL = {
    "add_r1_style_format_reward": True,
    "r1_style_format_reward": 0.25,
    "reward_model_multiplier": 2.0,
    "verification_reward": 4.0,
}
FAILED = {"failure": "OSError()"}
# A response, the reward model's score of it, arguments, its score
SCORES = [
    (response(), None, {}, 0.0),
    (response(truth=None), -3.0, {}, -3.0),  # also where it is held out
    (response(text=FORMAT, verifiable=0.5), -3.0, ALL, -3.75),
    (response(), -3.0, {}, -3.0),
    (response(text=FORMAT, **FAILED), 5.0, {}, None),
    (response(size=9, stopped=False, verifiable=1.0), 5.0, PENALTY, -2.0),
    (response(text=FORMAT, stopped=False, verifiable=1.0), None, {}, 1.0),
    (response(size=3, verifiable=1.0), None, PENALTY, -2.0),
    (response(size=4, verifiable=1.0), None, PENALTY, 1.0),
    (response(stopped=False, **FAILED), None, PENALTY, -2.0),
]


def test_score_is_the_sum_of_the_rewards_or_the_penalty(monkeypatch, capsys):
    for given, model_score, changes, score in SCORES:
        monkeypatch.setattr(script, "reward_model_scores", lambda *_, it=model_score: [it] * 2)
        model = model_score and "a model"
        is_eval = given.prompt.ground_truth is None
        monkeypatch.setattr(script, "warned", set())
        scored = script.score_responses(None, model, [given] * 2, Args(**changes), is_eval)
        assert scored == [replace(given, model_score=model_score, score=score)] * 2
        # Each kind of failure is shown once
        warnings = capsys.readouterr().out.count("the reward failed on row 7: OSError()")
        assert warnings == (given.failure is not None)


def test_means_of_scores_leave_out_what_is_not_known():
    """A failed call is not a wrong answer, and a part of the credit is not a right one."""
    responses = [
        response("gsm8k", text=FORMAT, verifiable=1.0, score=2.0, reward_metrics={"acc": 1.0}),
        response("gsm8k", failure="OSError()", score=None),
        response("math", verifiable=0.5, score=-1.0, size=9, reward_metrics={"acc": 0.25}),
        response("math", score=0.0, stopped=False),
    ]
    means = {  # of all, and of each source
        "scores": [1 / 3, 2.0, -0.5],
        "verifiable_score": [0.75, 1.0, 0.5],
        "verifiable_correct_rate": [0.5, 1.0, 0.0],
        "reward/acc": [0.625, 1.0, 0.25],
        "reward_failures": [0.25, 0.5, 0.0],
        "sequence_lengths": [4.5, 3.0, 6.0],
        "stop_rate": [0.75, 1.0, 0.5],
    }
    found = script.score_metrics("eval", responses, Args())
    assert len(found) == 3 * len(means)
    for name, expected in means.items():
        of_each = [found[f"eval/{name}{source}"] for source in ("", "/gsm8k", "/math")]
        assert of_each == pytest.approx(expected)
    # A source of its own in each row would make thousands of metrics
    wholes = {f"eval/{name}" for name in means}
    many = [response(f"source {i}", verifiable=1.0, score=1.0) for i in range(51)]
    for some in (responses[:2], [*responses, *many]):
        assert set(script.score_metrics("eval", some, Args())) == wholes


def test_truth_that_is_a_list_is_written_as_text():
    """Programs that read a run's responses expect a text."""
    assert script.describe(response(truth=[1, 2]), policy_version=0)["ground_truth"] == "[1, 2]"


# -------------------------------------------------------------------------- the form of a response

# Texts, and whether they are one thought and one answer
FORMS = {
    "<think>a\nb</think> <answer>1</answer>": True,
    "\n<think></think>\n<answer>1</answer>\n": True,
    "<think>1 < 2, and <b>bold</b></think><answer></answer>": True,
    "<think>a</think><answer>1": False,
    "well: <think>a</think><answer>1</answer>": False,
    "<think>a</think><answer>1</answer> or so": False,
    "<think>a</think> so <answer>1</answer>": False,
    # A lazy `.*?` reads on over junk
    "<think>a</think> junk <think>b</think><answer>1</answer>": False,
    "<think><think>a</think></think><answer>1</answer>": False,
    "<think>a</think><answer><think>b</think>1</answer>": False,
    "<answer>1</answer><think>a</think>": False,
    # A search that starts again at each tag would take hours
    "<think>" * 300_000: False,
    "<think>" + "</think> <answer>" * 300_000 + "</answer>": False,
    "<think>a</think>" + " " * 300_000 + "<answer>1</answer>" + " " * 300_000 + "x": False,
}


def test_format_is_one_thought_and_one_answer():
    signal.alarm(60)  # it ends the process
    assert {text: script.has_r1_format(response(text=text)) for text in FORMS} == FORMS
    signal.alarm(0)
    rest = "a</think><answer>1</answer>"
    for end_of_prompt in ("<think>", "<think>\n\n "):  # the prompt may have opened the thought
        opened = f"1 + 1? {end_of_prompt}"
        assert script.has_r1_format(response(asked=opened, text=rest))
        assert not script.has_r1_format(response(asked=opened, text=f"<think>{rest}"))
    assert not script.has_r1_format(response(asked="Write <think> first. 1 + 1?", text=rest))


# -------------------------------------------------------------------------------- calls of a reward


def test_text_is_without_stop_tokens_and_padding_but_with_other_special_tokens(assets):
    """Which a reward may be about, as <tool_call>."""
    tokenizer = AutoTokenizer.from_pretrained(assets / "model")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<tool>"], "bos_token": "<s>"})
    tokens = ["<s>", "<tool>", "1", "2", "<tool>", tokenizer.pad_token, tokenizer.eos_token]
    ids = numpy.array(tokenizer.convert_tokens_to_ids(tokens), numpy.int32)
    args = Args(stop_token_ids=(tokenizer.eos_token_id,))
    assert script.response_text(tokenizer, ids, args) == "<tool>12<tool>"
    # A stop token that is plain text is a part of the answer, such as </answer>
    args = Args(stop_token_ids=(tokenizer.convert_tokens_to_ids("2"),))
    assert script.response_text(tokenizer, ids[1:4], args) == "<tool>12"
    # The scripts' own rules grade it; models may have more ids than their tokenizers
    beyond, digits = len(tokenizer) + 3, [*ids[2:4]]
    prompt = Prompt("", "", [], "debug/sorting", "12", None)
    given = [
        Response(prompt, [*digits, beyond, 1], [], True),
        Response(prompt, digits[::-1], [], False),
        Response(replace(prompt, ground_truth=None), digits, [], False),
    ]
    graded = script.grade_responses(given, tokenizer, None, Args(stop_token_ids=(1,)))
    assert [(one.text, one.verifiable) for one in graded] == [("12", 1), ("21", 0), ("12", None)]


def test_reward_is_called_by_the_names_of_its_parameters():
    """A doctest shows that it gets no others."""

    def reward(solution_str, ground_truth, *, data_source, response, extra_info, own="own"):
        return [data_source, response, solution_str, ground_truth, extra_info, own]

    found = reward(**script.reward_arguments(reward, "source", "text", "truth", {"k": 1}))
    assert found == ["source", "text", "text", "truth", {"k": 1}, "own"]


def test_reward_is_the_file_of_its_path_whatever_its_name_beside_its_neighbours(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)  # a path without a folder has neighbours too
    write_text(tmp_path / "neighbour_of_a_reward.py", "BONUS = 7\n")
    imports = "from neighbour_of_a_reward import BONUS\n"
    for name in ("random", "datasets", "my.reward.v2"):
        known = sys.modules.get(name)
        own = f"import {name}\n" if known else ""
        write_text(tmp_path / f"{name}.py", f"{imports}{own}def score(response): return BONUS")
        source = (tmp_path / f"{name}.py").read_bytes()
        monkeypatch.setattr(
            script, "reward_function", script.load_function(f"{name}.py:score", source)
        )
        found = script.call_reward_fn(response(text="a"))
        assert found == response(text="a", verifiable=7.0)
        assert known is None or sys.modules[name] is known


VERL = {"score": 0.5, "acc": True, "pred": "42", "tokens": 7}
# What a function returns, the score and the metrics in it, and how its failure ends
RESULTS = [
    (numpy.bool_(True), 1.0, {}, None),
    (numpy.float32(1), 1.0, {}, None),
    (torch.tensor(1.0), 1.0, {}, None),
    (VERL, 0.5, {"acc": 1.0, "tokens": 7.0}, None),
    ({"acc": 1.0}, None, {}, "KeyError: 'score'"),
    ({"score": math.nan, "acc": 1.0}, None, {}, "ValueError: the reward is nan"),
    ({"score": None}, None, {}, "TypeError: .*"),
]


def test_result_of_a_reward_is_a_score_and_metrics_or_a_failure(monkeypatch):
    for result, *expected, cause in RESULTS:
        monkeypatch.setattr(script, "reward_function", lambda response, it=result: it)
        found = script.call_reward_fn(response())
        assert [found.verifiable, found.reward_metrics] == expected
        assert type(found.verifiable) is type(expected[0])
        failure = found.failure
        assert failure is None if cause is None else re.search(f"\n{cause}\n$", failure)


def test_reward_is_told_how_long_a_response_is_and_whether_it_stopped(monkeypatch):
    """What it says comes back with its response. And a row wins, which may ask for a length."""

    def function(response, extra_info):
        return {"score": 1} | extra_info

    monkeypatch.setattr(script, "reward_function", function)
    workers, args = queue.Queue(), Args(reward_fn="of the test", reward_workers=1)
    monkeypatch.setattr(script, "process_groups", [os.getpid()])
    workers.put((ThreadPoolExecutor(1), os.getpid()))  # in place of a process
    for extra_info in ({"bonus": 3}, {"num_tokens": 500}, None):  # None: the row has none
        cut = response(size=4, stopped=False)
        cut.prompt.extra_info = extra_info
        told = {"num_tokens": 4, "stopped": 0} | (extra_info or {})
        graded = script.grade_responses([cut], TOKENIZER, workers, args)
        assert graded == [replace(cut, text="9 9 9 9", verifiable=1.0, reward_metrics=told)]
        assert cut.prompt.extra_info == extra_info


# --------------------------------------------------------------------------------------- workers

DOES_AS_IT_IS_TOLD = """
import os, re, subprocess, sys, time
from pathlib import Path

class Unreadable(Exception):
    def __init__(self, *, line):  # pickle makes it again from its arguments, and there it fails
        super().__init__(f"line {line}")

def leave_a_child():
    child = subprocess.Popen(["sleep", "300"], close_fds=False)
    Path(__file__).with_name("child").write_text(str(child.pid))

def score(data_source, response, ground_truth, extra_info):
    scope = dict(globals(), answer=1.0)
    exec(response, scope)
    return scope["answer"]
"""
FORKS = """
child = os.fork()
if child:
    os.waitpid(child, 0)
else:
    answer = 0.0
"""
DIED = "BrokenProcessPool: A process in the process pool was terminated"
LATE = "TimeoutError: the call took over"
# What a response has the function do: what the cause must hold; None: it is right
WAYS_TO_FAIL = {
    "raise OSError('no paper')": 'File "<string>", line 1, in <module>\nOSError: no paper',
    "raise Unreadable(line=12)": "Unreadable: line 12",
    "sys.exit()": "SystemExit",
    "os._exit(0)": DIED,
    "time.sleep(1000)": LATE,
    "re.match('(a|aa)+$', 99 * 'a' + 'b')": LATE,  # it holds the GIL
    "leave_a_child(); os._exit(3)": DIED,
    # An answer of the child would be taken for this call's, and this call's for the next one's
    FORKS: None,
}


def test_worker_that_gives_no_answer_in_time_is_replaced_by_the_next_call(monkeypatch):
    """If no other one starts, that costs this call's response alone, and the next call tries it."""
    over, killed, workers = threading.Event(), [], queue.Queue()
    threads = [ThreadPoolExecutor(1)]
    monkeypatch.setattr(script, "process_groups", [7])
    monkeypatch.setattr(script.os, "killpg", lambda group, _: killed.append(group))
    starts = iter([SyntaxError("half a line"), SystemExit("no sandbox"), 8, 9])

    def start(args):
        group = next(starts)
        if isinstance(group, BaseException):
            raise group
        script.process_groups.append(group)
        threads.append(ThreadPoolExecutor(1))  # in place of a process
        return threads[-1], group

    def call(function, timeout=60.0):
        monkeypatch.setattr(script, "call_reward_fn", function)
        answer = script.call_worker(workers, response(), Args(reward_timeout=timeout))
        assert workers.qsize() == 1
        return answer

    def hang(*_):
        assert over.wait(60)

    def grade(response):
        return replace(response, verifiable=1.0)

    monkeypatch.setattr(script, "start_reward_worker", start)
    workers.put((threads[0], 7))
    answer = call(hang, 0.01)
    assert (answer.verifiable, answer.reward_metrics) == (None, {}) and LATE in answer.failure
    assert killed == [7] and script.process_groups == []  # its number may soon be another's
    for cause in ("SyntaxError: half a line", "SystemExit: no sandbox"):
        assert call(grade).failure == cause
    assert call(grade).verifiable == 1.0 and script.process_groups == [8]
    assert call(hang, 0.01).failure and call(grade).verifiable == 1.0  # by 9
    over.set()
    assert killed == [7, 8] and script.process_groups == [9]


@pytest.mark.slow
def test_worker_that_is_replaced_does_not_grade_by_an_edited_file(tmp_path):
    """All responses of a run are graded by the source that the file had when the run started."""
    text = "import time\ndef score(response):\n    time.sleep(99 * (response == 'hang'))\n"
    path = write_text(tmp_path / "edited_reward.py", text + "    return 1.0\n")
    args = Args(reward_fn=f"{path}:score", reward_workers=1, reward_timeout=5.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "process_groups", [])
        workers = script.start_reward_workers(args)

        def grade(text):
            return script.call_worker(workers, response(text=text), args)

        assert grade("hang").failure.startswith(LATE)
        write_text(path, text + "    return 0.0\n")
        assert grade("again").verifiable == 1.0
        script.end_children()


@pytest.mark.slow
def test_whatever_a_reward_does_costs_its_own_response_alone(tmp_path):
    path = write_text(tmp_path / "reward_of_test.py", DOES_AS_IT_IS_TOLD)
    args = Args(reward_fn=f"{path}:score", reward_workers=2, reward_timeout=10.0)
    workers = script.start_reward_workers(args)

    def grade(*ways):
        prompt = Prompt("row 0", "", [], "any", "1", None)
        responses = [Response(prompt, [way], [-1.0], stopped=True) for way in ways]
        graded = script.grade_responses(responses, TOKENIZER, workers, args)
        assert [one.text for one in graded] == list(ways)
        return [(one.verifiable, one.failure) for one in graded]

    given, right = [one for way in WAYS_TO_FAIL for one in (way, "pass", "pass")], (1.0, None)
    for way, (score, failure) in zip(given, grade(*given), strict=True):
        cause = WAYS_TO_FAIL.get(way)
        assert (score, failure) == right if cause is None else score is None and cause in failure
    pid = int((tmp_path / "child").read_text())
    left = [process for process in psutil.process_iter() if process.pid == pid]
    wait_until(lambda: not alive(left), "the end of what the reward started")
    assert workers.qsize() == len(script.process_groups) == 2
    family = [psutil.Process(group) for _, group in workers.queue]
    script.end_children()
    wait_until(lambda: not alive(family), f"the end of {family}")
    script.process_groups.clear()


BE_BUSY = """
subprocess.Popen(["sleep", "1000"])
Path(__file__).with_suffix(".busy").touch()
re.match("(a|aa)+$", 99 * "a" + "b")  # holds the GIL for longer than anybody lives
"""
# The call of a worker, and the start of others beside it
CALLS = """
import sys
import ppo_vllm_async as script

if __name__ == "__main__":
    text, reward_fn, *others = sys.argv[1:]
    args = script.Args(reward_fn=reward_fn, reward_workers=1)
    executor, _ = script.start_reward_workers(args).get()
    prompt = script.Prompt("", "", [], "", "", None)
    response = script.Response(prompt, [], [], stopped=True, text=text)
    executor.submit(script.call_reward_fn, response)
    for other in others:
        script.start_reward_worker(script.Args(reward_fn=other))
"""


@pytest.mark.slow
def test_killed_script_leaves_no_worker_that_holds_the_gil_nor_what_it_has_started(tmp_path):
    """One in a call, and one that is not yet at its first."""
    write_text(tmp_path / "in_a_call.py", DOES_AS_IT_IS_TOLD)
    write_text(tmp_path / "at_its_start.py", DOES_AS_IT_IS_TOLD + BE_BUSY)
    program, mark = write_text(tmp_path / "elsewhere" / "calls.py", CALLS), new_mark()
    process = subprocess.Popen(
        [sys.executable, str(program), BE_BUSY, "in_a_call.py:score", "at_its_start.py:score"],
        cwd=tmp_path,
        env=environment(mark | {"PYTHONPATH": str(REPO)}),
        start_new_session=True,
    )
    try:
        wait_until(lambda: len(list(tmp_path.glob("*.busy"))) == 2, "two busy workers")
        assert len(processes_with(mark)) > 4
        process.kill()
        wait_until(lambda: not processes_with(mark), "the end of all of them")
    finally:
        end(process)
        for left in processes_with(mark):
            left.kill()
