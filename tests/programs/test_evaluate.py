"""scripts/evaluate.py: a saved model's answers to held-out prompts."""

import datetime
import hashlib
import importlib
import json
import math
import os
import runpy
import shutil
import statistics
import subprocess
import sys
from dataclasses import asdict
from decimal import Decimal
from itertools import pairwise
from typing import ClassVar

import evaluate
import numpy as np
import pytest
import report
from helpers import REPO
from helpers.files import read_json_lines, write_configurations, write_rows, write_text
from helpers.processes import environment

import grpo_vllm_async as script


def row(prompt, score, source="a", failure=None, **changes):
    """A line of responses.jsonl whose verifiable score is its score."""
    line = {"score": score, "verifiable_score": score, "failure": failure, "length": 4}
    line |= {"problem": str(prompt), "data_source": source, "stopped": True, "reward_metrics": {}}
    return line | changes


def test_a_failed_reward_is_no_wrong_answer_and_a_share_no_right_one():
    failed = [row(0, None, failure="hangs"), row(1, None, failure="hangs")]
    rows = [row(0, 1.0), failed[0], row(1, 0.5), row(1, 1.0), failed[1]]
    figures = evaluate.summarize(rows)
    assert (figures["prompts"], figures["responses"], figures["reward_failures"]) == (2, 5, 2)
    assert figures["score"]["mean"] == (1.0 + 0.75) / 2
    assert figures["pass@1"]["mean"] == (1.0 + 0.5) / 2
    assert figures["pass@2"] == {"mean": 1.0, "low": 0.2065, "high": 1.0, "prompts": 1}


def shown(rows, capsys, **settings):
    """The lines that evaluate.py prints of responses."""
    settings = {"samples": 1, "eval_temperature": 0.0}
    evaluation = {"model": "M", "dataset": "D", "settings": settings}
    evaluation["results"] = evaluate.summarize(rows)
    evaluation["by_source"] = evaluate.summarize_sources(rows)
    evaluate.show(json.loads(json.dumps(evaluation)))
    return capsys.readouterr().out.splitlines()


def test_a_rate_says_of_how_many_prompts_it_is(capsys):
    failed = [row(prompt, None, failure="hangs") for prompt in range(20)]
    lines = shown([*failed, *(row(prompt, 1.0) for prompt in range(20, 40))], capsys)
    assert "all: 40 prompts, 40 responses, the reward failed on 20" in lines
    (rate,) = (line.split(maxsplit=2) for line in lines if line.startswith("pass@1"))
    assert rate == ["pass@1", "1", "0.8389 to 1             of 20 of 40 prompts"]
    (length,) = (line for line in lines if line.startswith("length"))
    assert not length.endswith("prompts")


def test_prompts_are_the_units_however_often_they_are_answered():
    few = [row(prompt, float(prompt < 15)) for prompt in range(30)]
    many = [line for line in few for _ in range(32)]
    for name in ("score", "pass@1"):
        figures = evaluate.summarize(few)[name]
        assert evaluate.summarize(many)[name] == figures
        assert figures == {"mean": 0.5, "low": 0.3315, "high": 0.6685, "prompts": 30}
    # A prompt that is there twice makes no pass@2
    assert [name for name in evaluate.figures_of([*few, few[0]]) if "pass" in name] == ["pass@1"]


def test_interval_ends_where_scores_do():
    """Of scores of 0 and 1 the normal one would go from 0.905 to 1.028."""
    rows = [row(prompt, float(prompt > 0)) for prompt in range(30)]
    figures = evaluate.summarize(rows)
    assert figures["score"] == figures["pass@1"]
    assert 0.8 < figures["score"]["low"] < 0.9667 < figures["score"]["high"] < 1
    # What a right answer is worth is known also where there is none
    wrong = [row(prompt, 0.0) for prompt in range(30)]
    highs = [evaluate.summarize(wrong, worth)["score"]["high"] for worth in (1.0, 10.0)]
    assert highs == [0.1135, 1.1352]


def test_interval_of_scores_without_limits_is_the_normal_one():
    scores = [(i * 37 % 101) / 10 - 70 for i in range(100)]
    unlimited = {"verifiable_score": None, "reward_model_score": None}
    rows = [row(i, score, **unlimited) for i, score in enumerate(scores)]
    figure = evaluate.summarize(rows)["score"]
    error = 1.96 * statistics.stdev(scores) / 10
    assert figure["low"] == pytest.approx(statistics.fmean(scores) - error, abs=0.05)
    assert figure["high"] == pytest.approx(statistics.fmean(scores) + error, abs=0.05)
    alike = evaluate.summarize([row(i, -3.0, **unlimited) for i in range(2)])
    assert alike["score"] == {"mean": -3.0, "prompts": 2}


def test_reward_s_own_metrics_are_figures():
    rows = [row(i, 1.0, reward_metrics={"strict": float(i > 1)}) for i in range(4)]
    figures = evaluate.summarize([*rows, row(4, None, failure="hangs")])
    assert figures["reward/strict"] == {"mean": 0.5, "low": 0.15, "high": 0.85, "prompts": 4}
    # Of a mean of NaN the interval was from 0 to 0.3
    rows = [row(i, 1.0, reward_metrics={"short": math.nan if i < 2 else 0.5}) for i in range(8)]
    figures = evaluate.summarize(rows)
    assert figures["reward/short"]["mean"] == 0.5 and figures["reward/short"]["prompts"] == 6
    assert figures["score"]["prompts"] == 8


def test_truth_that_json_does_not_know_is_text(tmp_path):
    """As in samples.jsonl: columns of a .parquet file may be of any type."""
    one_day, three = datetime.date(2024, 1, 31), datetime.timedelta(seconds=3723)
    truths = [Decimal("2.50"), one_day, np.float32(0.5), b"\xff", np.int64(7), np.ones(2), three]
    texts = ["2.50", "2024-01-31", "0.5", "b'\\xff'", "7", "[1. 1.]", "1:02:03"]
    for truth, text in [*zip(truths, texts, strict=True), ({"of": truths}, {"of": texts})]:
        prompt = script.Prompt("row 0", "?", [1], one_day, truth, None)
        response = script.Response(prompt, np.array([1]), np.zeros(1), stopped=True)
        evaluate.write_lines(tmp_path / "rows", [evaluate.describe(script, response, 0, 1)])
        (line,) = evaluate.read_lines(tmp_path / "rows")
        assert (line["ground_truth"], line["data_source"]) == (text, "2024-01-31")


def test_sources_are_told_apart_unless_there_are_too_many(capsys):
    rows = [row(prompt, float(prompt < 2), ["all", "b"][prompt % 2]) for prompt in range(4)]
    rows.append(row(4, 1.0, "b"))
    means = {name: each["score"]["mean"] for name, each in evaluate.summarize_sources(rows).items()}
    assert means == {"all": 0.5, "b": 0.6667}
    headings = [line for line in shown(rows, capsys) if "prompts, " in line]
    counts = ["all: 5 prompts, 5", "all: 2 prompts, 2", "b: 3 prompts, 3"]
    assert headings == [f"{count} responses" for count in counts]

    for number, count in ((50, 50), (51, 0)):
        rows = [row(prompt, 1.0, f"source {prompt}") for prompt in range(number)]
        assert len(evaluate.summarize_sources(rows)) == count
    lines = shown(rows, capsys)
    assert lines[-1] == "There are 51 data sources, too many for figures of each"
    assert not any("source 1" in line for line in lines)


def test_reward_may_say_what_is_right():
    rows = [row(i, 0.95, reward_metrics={"right": float(i > 1)}) for i in range(4)]
    assert evaluate.summarize(rows)["pass@1"]["mean"] == 0.5
    lines = [line | {"ground_truth": "4"} for line in rows]
    assert [report.is_right(line) for line in lines] == [False, False, True, True]


def test_two_models_are_compared_prompt_by_prompt():
    """Their own intervals overlap; that of the difference leaves 0 out."""
    one = [row(prompt, float(prompt % 10 < 4 or prompt >= 80)) for prompt in range(100)]
    other = [row(prompt, float(prompt % 10 < 4)) for prompt in range(100)]
    low, high = (evaluate.summarize(rows)["score"] for rows in (other, one))
    assert high["low"] < low["high"]
    differences = evaluate.compare(one, other)
    counts = {"better": 12, "worse": 0, "equal": 88}
    assert differences["score"] == {"mean": 0.12, "low": 0.0495, "high": 0.1858} | counts
    assert differences["pass@1"] == differences["score"]
    mirrored = evaluate.compare(other, one)["score"]
    assert [mirrored[name] for name in ("low", "high", "better")] == [-0.1858, -0.0495, 0]
    # Nothing is known of prompts that one has no score of
    few = [row(prompt, None, failure="hangs") for prompt in range(80)]
    counts = {"better": 12, "worse": 0, "equal": 8}
    figure = evaluate.compare([*few, *one[80:]], other)["score"]
    assert {name: figure[name] for name in counts} == counts
    assert figure["high"] <= 1
    same = evaluate.compare(one, one)["score"]
    assert same["mean"] == 0 and -0.06 < same["low"] < 0 < same["high"] < 0.06
    assert evaluate.compare(few, other) == {}


class FakeVLLM:
    """Of the samples of a prompt the first is right, the others are empty."""

    asked: ClassVar = []  # (seeds, temperature) of each call
    synced: ClassVar = []  # names of weights
    ranks: ClassVar = []  # of adapters, for which each was made
    is_blind = False  # all answers are empty

    def __init__(self, *rest):
        self.ranks.append(rest[-1].lora_rank)

    def sync_weights(self, weights, version):
        self.synced.append({name for name, _ in weights})

    def sample(self, prompts, seeds, temperature):
        self.asked.append((seeds, temperature))
        tokenizer = script.AutoTokenizer.from_pretrained(REPO / "debug_assets" / "model")
        responses = []
        for last, prompt in pairwise([None, *prompts]):
            text = "" if prompt is last or self.is_blind else prompt.ground_truth
            ids = np.array([*tokenizer(text)["input_ids"], 1])
            responses.append(script.Response(prompt, ids, np.zeros(len(ids)), stopped=True))
        return responses


@pytest.fixture(autouse=True)
def the_path_of_imports_stays(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.fixture
def faked_run(assets, small_eval, monkeypatch, tmp_path):
    """The folder of a run with a model, which FakeVLLM answers for."""
    options = {"eval_dataset": str(small_eval), "num_eval_prompts": 10, "dtype": "float32"}
    args = script.Args(temperature=0.7, response_length=8, stop_token_ids=(1,), **options)
    # As a run of the PPO scripts writes it: with flags that are not of this script
    arguments = asdict(args) | {"gamma": 1.0, "model_name_or_path": str(assets / "model")}
    write_text(tmp_path / "run" / "args.json", json.dumps(arguments))
    shutil.copytree(assets / "model", tmp_path / "run" / "model")
    monkeypatch.setattr(script, "VLLM", FakeVLLM)
    for name in ("asked", "synced", "ranks"):
        monkeypatch.setattr(FakeVLLM, name, [])
    monkeypatch.setattr(FakeVLLM, "is_blind", False)
    return tmp_path / "run"


@pytest.fixture
def call(monkeypatch, capsys):
    """call(RUN, flag, ...) -> what evaluate.py prints."""

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["evaluate.py", *map(str, words)])
        monkeypatch.setattr(evaluate.signal, "signal", lambda *_: None)
        evaluate.main()
        return capsys.readouterr().out

    return call


def test_adapter_is_served_and_not_the_model_that_it_was_merged_into(faked_run, call, assets):
    """Rounded to the bfloat16 of the run, the merged model would be another."""
    path = faked_run / "args.json"
    args = json.loads(path.read_text()) | {"lora_rank": 2}
    path.write_text(json.dumps(args))
    args = script.Args(model_name_or_path=args["model_name_or_path"], lora_rank=2)
    model = script.load_model(script.AutoModelForCausalLM, args.model_name_or_path, args, True)
    script.save_adapter(dict(script.gather_weights(model, args)), faked_run / "adapter", args)
    call(faked_run)
    call(faked_run, "--model", faked_run / "model")
    assert FakeVLLM.ranks == [2, 0]
    served, whole = FakeVLLM.synced
    layer = "model.layers.0.mlp.up_proj"
    assert f"{layer}.lora_A.weight" in served and all(".lora_" in name for name in served)
    assert f"{layer}.weight" in whole and not any(".lora_" in name for name in whole)


def evaluation_in(run_dir):
    (path,) = run_dir.glob("evaluations/*/evaluation.json")
    return json.loads(path.read_text()), read_json_lines(path.with_name("responses.jsonl"))


def test_several_samples_of_each_prompt(faked_run, call):
    said = call(faked_run, "--samples", 3)
    ((seeds, temperature),) = FakeVLLM.asked
    assert temperature == 0.7  # that of training: three greedy answers would be one
    assert len(set(seeds)) == 30
    evaluation, rows = evaluation_in(faked_run)
    assert [(row["prompt_index"], row["sample"]) for row in rows] == [
        (prompt, sample) for prompt in range(10) for sample in range(3)
    ]
    assert [row["score"] for row in rows] == [1.0, 0.0, 0.0] * 10
    figures = evaluation["results"]
    assert figures["pass@1"]["mean"] == 0.3333
    assert figures["pass@2"]["mean"] == 0.6667
    assert "pass@4" not in figures
    assert "pass@2               0.6667    0.3678 to 0.873" in said


def test_same_question_is_asked_anew_and_nothing_is_lost(faked_run, call):
    said = [call(faked_run, "--prompts", 500) for _ in range(2)]
    assert len(FakeVLLM.asked) == len(list(faked_run.glob("evaluations/*/evaluation.json"))) == 2
    names = {path.name for path in faked_run.glob("evaluations/trained_test_32x1_t0_*")}
    assert len(names) == 2  # of 500 prompts there were 32
    assert not any("prompt by prompt" in text for text in said)  # of a model with itself


def test_rows_of_one_prompt_are_one_prompt_where_their_truth_is_one(faked_run, call, tmp_path):
    args = json.loads((faked_run / "args.json").read_text())
    rows = script.load_rows(args["eval_dataset"], None, None)[:3]
    other = rows[0] | {"reward_model": {"style": "rule", "ground_truth": "99999"}}
    said = call(faked_run, "--dataset", write_rows(tmp_path / "rows.jsonl", [*rows * 3, other]))
    assert "all: 4 prompts, 10 responses" in said
    evaluation, _ = evaluation_in(faked_run)
    assert evaluation["results"]["pass@2"]["prompts"] == 3


REWARD = """
def score(data_source, response, ground_truth, extra_info=None):
    return {"score": 0.5, "tokens": extra_info["num_tokens"], "ended": extra_info["stopped"]}
"""


@pytest.fixture
def reward(monkeypatch, tmp_path):
    """The path of a reward, which is called in this process."""

    def call_worker(workers, response, args):
        path, _, name = args.reward_fn.rpartition(":")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setattr(script, "load_reward_fn", lambda *_: runpy.run_path(path)[name])
        return script.call_reward_fn(args.reward_fn, response)

    monkeypatch.setattr(script, "start_reward_worker", lambda *_: None)
    monkeypatch.setattr(script, "call_worker", call_worker)
    return f"{write_text(tmp_path / 'reward.py', REWARD)}:score"


def test_another_reward_grades(faked_run, call, reward):
    call(faked_run, "--reward_fn", reward)
    evaluation, rows = evaluation_in(faked_run)
    assert evaluation["results"]["score"]["mean"] == 0.5
    for line in rows:
        assert line["reward_metrics"] == {"tokens": line["length"], "ended": 1.0}


def test_reward_is_known_by_its_neighbours_too(tmp_path):
    reward = write_text(tmp_path / "reward.py", "import beside\n")
    beside = write_text(tmp_path / "beside.py", "")
    assert evaluate.files_of_reward(reward) == [reward, beside]


def add_provenance(run_dir, path, **changes):
    """As if the script at this path had made the run."""
    saved = json.loads((run_dir / "args.json").read_text())
    made = {"command": ["accelerate", "launch", str(path), "--seed", "1"]}
    made |= {"script_sha256": hashlib.sha256(path.read_bytes()).hexdigest()} | changes
    write_text(run_dir / "args.json", json.dumps(saved | {"provenance": made}))


def test_copy_s_run_is_graded_by_the_copy(faked_run, call, tmp_path, monkeypatch):
    """Wherever it is. Where it is gone, changed, or another engine's, that is said."""
    text, rule = (REPO / "grpo_vllm_async.py").read_text(), "return float(response.strip() =="
    assert text.count(rule) == 1
    copy = tmp_path / "elsewhere/my_grpo.py"
    write_text(copy, text.replace(rule, "return 0.5 * float(response.strip() =="))
    monkeypatch.syspath_prepend(copy.parent)
    monkeypatch.setattr(importlib.import_module("my_grpo"), "VLLM", FakeVLLM)
    add_provenance(faked_run, copy)
    said = call(faked_run)
    assert "Warning" not in said and "pass@1                    0 " in said
    add_provenance(faked_run, copy, script_sha256="another")
    assert f"is not here as it was; {copy} takes its place" in call(faked_run)
    add_provenance(faked_run, copy)
    copy.unlink()
    said = call(faked_run)
    assert f"is not here as it was; {REPO}/grpo_vllm_async.py takes its place" in said
    assert "pass@1                    1 " in said


def test_models_with_other_evaluations_of_the_same_are_compared(faked_run, call, reward, capsys):
    base = REPO / "debug_assets" / "model"
    whole = call(faked_run, "--samples", 2)
    assert "prompt by prompt" not in whole
    other = shutil.copytree(faked_run, faked_run.with_name("other"))
    os.utime(other / "model" / "config.json", (1e9, 1e9))
    shutil.rmtree(other / "evaluations")
    script.VLLM.is_blind = True
    said = call(other, "--samples", 2, "--compare", faked_run, "--seed", 7)
    start = said.index(f"\n{other}/model less {faked_run}/model, prompt by prompt")
    assert [line.split() for line in said[start:].splitlines()[2:4]] == [
        ["mean", "95%", "interval", "better", "worse", "equal"],
        ["score", "-0.5", "-0.573", "to", "-0.2603", "0", "10", "0"],
    ]
    # The newest of each; beside each other, without a flag; and not where the question is another
    script.VLLM.is_blind = False
    said = call(faked_run, "--samples", 2, "--model", base)
    assert f"{faked_run}/model less {base}, prompt by prompt" in said  # after less before
    assert "score                     0 " in said
    assert "prompt by prompt" not in call(faked_run, "--samples", 3, "--model", base)
    for flags, differs in (
        (["--reward_fn", reward], "like this one (the nearest differs in reward)"),
        (["--prompts", 5], "(the nearest differs in prompts)"),
        (["--compare", other.parent], "of another model like this one"),
    ):
        with pytest.raises(SystemExit):
            call(other, "--samples", 2, "--compare", faked_run, *flags)
        assert differs in capsys.readouterr().err.splitlines()[-1]


def test_configurations_of_a_dataset_are_told_apart(faked_run, small_eval, call, tmp_path):
    """The run's; or the flag's, which is another evaluation."""
    rows = script.load_rows(str(small_eval), None, None)
    folder = tmp_path / "two_for_evaluate"
    write_configurations(folder, {"main": rows[:3], "socratic": rows[3:5]})
    args = json.loads((faked_run / "args.json").read_text())
    args |= {"eval_dataset": str(folder), "eval_dataset_split": "train"}
    (faked_run / "args.json").write_text(json.dumps(args | {"eval_dataset_config": "main"}))
    call(faked_run)
    call(faked_run, "--dataset_config", "socratic")
    asked = [
        [line["ground_truth"] for line in read_json_lines(path)]
        for path in faked_run.glob("evaluations/*/responses.jsonl")
    ]
    truths = [row["reward_model"]["ground_truth"] for row in rows]
    assert sorted(map(sorted, asked)) == sorted(map(sorted, (truths[:3], truths[3:5])))


def test_reward_model_of_the_run_scores_too(faked_run, reward_model, call):
    path, changes = faked_run / "args.json", {"reward_model_path": str(reward_model)}
    changes["reward_model_multiplier"] = 2.0
    write_text(path, json.dumps(json.loads(path.read_text()) | changes))
    said = call(faked_run)
    _, rows = evaluation_in(faked_run)
    assert {row["verifiable_score"] for row in rows} == {1.0}
    assert {row["score"] for row in rows} == {1.0}  # the rule's, where there is one
    assert len({row["reward_model_score"] for row in rows}) > 1
    assert "score " in said and "reward_model_score " in said


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--samples", 4, "--temperature", 0], "--temperature 0 is greedy"),
        (["--model", "tests"], "tests holds no config.json"),
        (["--dataset=~/no.jsonl"], "No such file or directory: '{tmp_path}/no.jsonl'"),
        (["--reward_fn=~/no.py:score"], "--reward_fn {tmp_path}/no.py:score: there is no such"),
        (["--dataset", "{tmp_path}/rows.jsonl"], "row 0: it has no `ground_truth`"),
        (["--model", "{tmp_path}/other"], "has other tokens than the run's model"),
    ],
)
def test_mistake_is_one_line(flags, message, faked_run, call, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write_text(tmp_path / "rows.jsonl", '{"prompt": "12="}\n')
    other = shutil.copytree(faked_run / "model", tmp_path / "other")
    tokenizer = script.AutoTokenizer.from_pretrained(other)
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(other)
    with pytest.raises(SystemExit):
        call(faked_run, *[str(flag).format(tmp_path=tmp_path) for flag in flags])
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("evaluate.py: error: ")
    assert message.format(tmp_path=tmp_path) in last
    assert FakeVLLM.asked == []


HANGS = """
import signal
def score(data_source, response, ground_truth, extra_info=None):
    if ground_truth == {truth!r}:
        signal.pause()
    return float(response.strip() == ground_truth)
"""


@pytest.mark.slow
def test_vllm_answers_and_a_hanging_reward_costs_its_own(faked_run, tmp_path):
    args = json.loads((faked_run / "args.json").read_text())
    rows = script.load_rows(args["eval_dataset"], None, "test")
    truths = [row["reward_model"]["ground_truth"] for row in rows]
    reward = write_text(tmp_path / "reward.py", HANGS.format(truth=truths[0]))
    args |= {"reward_timeout": 5.0, "num_eval_prompts": 0, "reward_fn": f"{reward}:score"}
    write_text(faked_run / "args.json", json.dumps(args))

    command = [sys.executable, "scripts/evaluate.py", faked_run]
    streams = {"env": environment(), "capture_output": True, "text": True}
    result = subprocess.run(command, cwd=REPO, timeout=900, **streams)
    assert result.returncode == 0, result.stderr
    evaluation, answers = evaluation_in(faked_run)
    scores = [float(row["response"] == truth) for row, truth in zip(answers, truths, strict=True)]
    assert [answer["score"] for answer in answers] == [None, *scores[1:]]
    assert {0.0, 1.0} == set(scores[1:])
    assert evaluation["results"]["reward_failures"] == 1
