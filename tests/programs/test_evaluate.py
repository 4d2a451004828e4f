"""scripts/evaluate.py: a saved model's answers to held-out prompts."""

import hashlib
import importlib
import json
import math
import os
import re
import runpy
import shutil
import statistics
import subprocess
import sys
from dataclasses import asdict
from itertools import pairwise
from typing import ClassVar
from unittest.mock import Mock

import evaluate
import numpy as np
import pytest
from helpers import REPO
from helpers.files import read_json_lines, write_configurations, write_rows, write_text
from helpers.processes import environment
from helpers.programs import call_main
from helpers.rollouts import make_noise

import grpo_vllm_async as script


def row(prompt, score, source="a", failure=None, **changes):
    """A line of responses.jsonl whose verifiable score is its score."""
    line = {"score": score, "verifiable_score": score, "failure": failure, "length": 4}
    line |= {"problem": str(prompt), "data_source": source, "stopped": True, "reward_metrics": {}}
    return line | changes


def test_figures_are_means_over_the_prompts_that_have_them():
    failed = [row(0, None, failure="hangs"), row(1, None, failure="hangs")]
    rows = [row(0, 1.0), failed[0], row(1, 0.5), row(1, 1.0), failed[1]]
    figures = evaluate.summarize(rows)
    assert (figures["prompts"], figures["responses"], figures["reward_failures"]) == (2, 5, 2)
    assert figures["score"]["mean"] == (1.0 + 0.75) / 2
    assert figures["pass@1"]["mean"] == (1.0 + 0.5) / 2
    assert figures["pass@2"] == {"mean": 1.0, "low": 0.2065, "high": 1.0, "prompts": 1}

    # A reward's own: NaN and what a failed one lacks are no numbers, `right` says what is right
    own = [{"strict": float(i > 1), "right": float(i > 2)} for i in range(4)]
    rows = [row(i, 0.95, reward_metrics=metrics) for i, metrics in enumerate(own)]
    rows += [row(4, None, failure="hangs"), row(5, 0.95, reward_metrics={"strict": math.nan})]
    figures = evaluate.summarize(rows)
    assert figures["reward/strict"] == {"mean": 0.5, "low": 0.15, "high": 0.85, "prompts": 4}
    assert figures["pass@1"]["mean"] == 0.2 and figures["score"]["prompts"] == 5

    # Prompts are the units, however often they are answered; one that is there twice is no pass@2
    few = [row(prompt, float(prompt < 15)) for prompt in range(30)]
    expected = {"mean": 0.5, "low": 0.3315, "high": 0.6685, "prompts": 30}
    for rows in (few, [line for line in few for _ in range(32)]):
        figures = evaluate.summarize(rows)
        assert figures["score"] == figures["pass@1"] == expected
    assert [name for name in evaluate.figures_of([*few, few[0]]) if "pass" in name] == ["pass@1"]


def test_interval_knows_what_a_right_answer_is_worth_and_is_the_normal_one_without_limits():
    wrong = [row(prompt, 0.0) for prompt in range(30)]
    highs = [evaluate.summarize(wrong, worth)["score"]["high"] for worth in (1.0, 10.0)]
    assert highs == [0.1135, 1.1352]
    scores = [(i * 37 % 101) / 10 - 70 for i in range(100)]
    figure = evaluate.summarize([row(i, s, verifiable_score=None) for i, s in enumerate(scores)])
    mean, width = statistics.fmean(scores), 1.96 * statistics.stdev(scores) / 10
    ends = [figure["score"][end] for end in ("low", "high")]
    assert ends == pytest.approx([mean - width, mean + width], abs=0.05)


def test_two_models_are_compared_prompt_by_prompt():
    """Their own intervals overlap; that of the difference leaves 0 out."""
    one = [row(prompt, float(prompt % 10 < 4 or prompt >= 80)) for prompt in range(100)]
    other = [row(prompt, float(prompt % 10 < 4)) for prompt in range(100)]
    low, high = (evaluate.summarize(rows)["score"] for rows in (other, one))
    assert high["low"] < low["high"]
    differences = evaluate.compare(one, other[::-1])
    counts = {"better": 12, "worse": 0, "equal": 88}
    assert differences["score"] == {"mean": 0.12, "low": 0.0495, "high": 0.1858} | counts
    # Nothing is known of prompts that one has no score of
    few = [row(prompt, None, failure="hangs") for prompt in range(80)]
    figure = evaluate.compare([*few, *one[80:]], other)["score"]
    assert [figure[name] for name in counts] == [12, 0, 8] and figure["high"] <= 1


class FakeVLLM:
    """Of the samples of a prompt the first is right, the others are empty."""

    made: ClassVar = []  # of each: its model, its weights, what it was asked
    is_blind = False  # all answers are empty

    def __init__(self, *rest):
        self.made.append(self)
        self.model = rest[-1].model_name_or_path

    def sync_weights(self, weights, version):
        self.weights = dict(weights)

    def sample(self, prompts, seeds, temperature):
        self.truths = {prompt.ground_truth for prompt in prompts}
        self.seeds, self.temperature = seeds, temperature
        tokenizer = script.AutoTokenizer.from_pretrained(REPO / "debug_assets" / "model")
        responses = []
        for last, prompt in pairwise([None, *prompts]):
            text = "" if prompt is last or self.is_blind else prompt.ground_truth
            ids = np.array([*tokenizer(text)["input_ids"], 1])
            responses.append(script.Response(prompt, ids, np.zeros(len(ids)), stopped=True))
        return responses


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
    monkeypatch.setattr(FakeVLLM, "made", [])
    monkeypatch.setattr(FakeVLLM, "is_blind", False)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path / "run"


def change_args(run_dir, **changes):
    saved = json.loads((run_dir / "args.json").read_text())
    write_text(run_dir / "args.json", json.dumps(saved | changes))


def call(*words):
    """What evaluate.py prints, its columns not aligned; or the last line of its errors."""
    status, said, errors = call_main(evaluate, *words)
    return errors.splitlines()[-1] if status else re.sub(" +", " ", said)


def evaluation_in(run_dir):
    """Figures and responses of the newest."""
    path = sorted(run_dir.glob("evaluations/*/evaluation.json"), key=os.path.getmtime)[-1]
    rows = read_json_lines(path.with_name("responses.jsonl"))
    return json.loads(path.read_text())["results"], rows


def test_adapter_is_served_and_not_the_model_that_it_was_merged_into(
    faked_run, assets, import_fork, monkeypatch
):
    """Rounded to the bfloat16 of the run, the merged model would be another.

    The run's fork is gone, so that one is written. Another model has an adapter of zeros.
    """
    lora = import_fork("lora")
    monkeypatch.setattr(lora, "VLLM", FakeVLLM)
    change_args(faked_run, lora_rank=2)
    name, other = str(assets / "model"), faked_run / "model"
    args = lora.Args(model_name_or_path=name, lora_rank=2)
    model = lora.load_model(lora.AutoModelForCausalLM, name, args, True)
    make_noise(model, 1)
    lora.save_adapter(dict(lora.gather_weights(model, args)), faked_run / "adapter", args)
    assert " instead" in call(faked_run)
    call(faked_run, "--model", other)
    served, zeros = FakeVLLM.made
    assert (served.model, zeros.model) == (name, str(other))
    for vllm in FakeVLLM.made:
        assert all(".lora_" in name for name in vllm.weights) and len(vllm.weights) == 28
        is_b = {name: weight for name, weight in vllm.weights.items() if "lora_B" in name}
        assert any(weight.any() for weight in is_b.values()) == (vllm is served)


def test_before_and_after_are_one_command(faked_run, assets):
    said = call(faked_run, "--samples", 2, "--before")
    assert len(FakeVLLM.made) == 2
    assert f"{faked_run}/model minus {assets / 'model'}, per prompt" in said
    assert "remove --model" in call(faked_run, "--before", "--model", assets / "model")


def test_rows_that_are_sometimes_right_are_found_by_their_numbers(
    faked_run, small_eval, tmp_path, monkeypatch
):
    """A dropped row's text may be part of another one's, and two rows may be equal."""
    first, second, *rest = script.load_rows(str(small_eval), None, None)[:4]
    (digits,) = [message["content"] for message in second["prompt"]]
    part = first | {"prompt": [{"role": "user", "content": digits[:2]}]}
    long, empty = (
        first | {"prompt": [{"role": "user", "content": text}]} for text in (digits * 99, " ")
    )
    rows = [empty, part, long, second, second, first | {"prompt": digits}, *rest]
    rows = [row | {"extra_info": {"index": index}} for index, row in enumerate(rows)]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    change_args(faked_run, eval_dataset=str(path), num_eval_prompts=0)
    call(faked_run, "--samples", 2)
    _, answers = evaluation_in(faked_run)
    path = REPO / "scripts/data_preprocess/by_success.py"
    monkeypatch.syspath_prepend(path.parent)  # as Python starts a program
    program = runpy.run_path(str(path))
    kept = program["keep"](rows, answers, 0.5, 0.5)
    assert [row["extra_info"]["index"] for row in kept] == [1, 3, 4, 5, 6, 7]


def test_several_samples_of_each_prompt(faked_run):
    # The saved model has its tokenizer and template, wherever those of the run are now
    change_args(faked_run, tokenizer_name_or_path="/gone", chat_template="/gone.jinja")
    call(faked_run, "--samples", 3)
    (vllm,) = FakeVLLM.made
    assert vllm.temperature == 0.7  # that of training: three greedy answers would be one
    assert len(set(vllm.seeds)) == 30
    figures, rows = evaluation_in(faked_run)
    places = [(i, sample, float(sample == 0)) for i in range(10) for sample in range(3)]
    assert [(row["prompt_index"], row["sample"], row["score"]) for row in rows] == places
    assert [figures[f"pass@{k}"]["mean"] for k in (1, 2)] == [0.3333, 0.6667]
    assert "--temperature 0 is greedy" in call(faked_run, "--samples", 4, "--temperature", 0)


def test_held_out_prompts_are_the_run_s_or_the_flag_s(faked_run, small_eval, tmp_path):
    """Configurations of a dataset are told apart, and rows with another truth are other prompts."""
    rows = script.load_rows(str(small_eval), None, None)
    truths = [row["reward_model"]["ground_truth"] for row in rows]
    folder = tmp_path / "two_for_evaluate"
    write_configurations(folder, {"main": rows[:3], "socratic": rows[3:5]})
    options = {"eval_dataset": str(folder), "eval_dataset_split": "train"}
    change_args(faked_run, **options, eval_dataset_config="main")
    other = rows[0] | {"reward_model": {"style": "rule", "ground_truth": "99999"}}
    repeated = write_rows(tmp_path / "rows.jsonl", [*rows[:3] * 3, other])
    for flags in ([], ["--dataset_config", "socratic"], ["--dataset", repeated]):
        said = call(faked_run, *flags)
    expected = [{*truths[:3]}, {*truths[3:5]}, {*truths[:3], "99999"}]
    assert [vllm.truths for vllm in FakeVLLM.made] == expected
    assert "4 prompts, 10 responses" in said
    assert evaluation_in(faked_run)[0]["pass@2"]["prompts"] == 3

    other = shutil.copytree(faked_run / "model", tmp_path / "other")
    tokenizer = script.AutoTokenizer.from_pretrained(other)
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(other)
    assert "must have the same tokens as the run's" in call(faked_run, "--model", other)


def test_another_reward_grades_and_is_known_by_its_neighbours_too(faked_run, tmp_path, monkeypatch):
    path = write_text(tmp_path / "reward.py", "def score(**_): ...")
    start = Mock(side_effect=InterruptedError)
    monkeypatch.setattr(script, "start_reward_workers", start)
    with pytest.raises(InterruptedError):
        call(faked_run, "--reward_fn", f"{path}:score")
    assert start.call_args.args[0].reward_fn == f"{path}:score"
    write_text(path, "import json\nif True:\n    from package import beside as it, other\n")
    beside = [write_text(path.parent / f"package/{name}.py", "") for name in ("a", "b/c")]
    assert evaluate.files_of_reward(path) == [path, *beside[::-1]]


def test_copy_s_run_is_graded_by_the_copy(faked_run, tmp_path, monkeypatch):
    """Wherever it is. Where it is gone or changed, that is said."""
    text, rule = (REPO / "grpo_vllm_async.py").read_text(), "return float(response.strip() =="
    assert text.count(rule) == 1
    copy = tmp_path / "elsewhere/my_grpo.py"
    write_text(copy, text.replace(rule, "return 0.5 * float(response.strip() =="))
    monkeypatch.syspath_prepend(copy.parent)
    monkeypatch.setattr(importlib.import_module("my_grpo"), "VLLM", FakeVLLM)
    made = {"command": ["accelerate", "launch", str(copy), "--seed", "1"]}
    made["script_sha256"] = hashlib.sha256(copy.read_bytes()).hexdigest()
    change_args(faked_run, provenance=made)
    said = call(faked_run)
    assert "Warning" not in said and "pass@1 0 " in said
    copy.unlink()
    said = call(faked_run)
    assert "is missing or has changed" in said and "pass@1 1 " in said


def test_models_with_other_evaluations_of_the_same_are_compared(faked_run, tmp_path):
    """The newest of each, and no model with itself; not where the question is another."""
    base = REPO / "debug_assets" / "model"
    script.VLLM.is_blind = True
    said = call(faked_run, "--samples", 2)  # the older one has other figures
    script.VLLM.is_blind = False
    said += call(faked_run, "--samples", 2)
    names = {path.name for path in faked_run.glob("evaluations/trained_10x2_*")}
    assert "has no evaluation of another model" in said
    assert ", per prompt" not in said and len(names) == len(FakeVLLM.made) == 2
    other = shutil.copytree(faked_run, faked_run.with_name("other"))
    os.utime(other / "model" / "config.json", (1e9, 1e9))
    shutil.rmtree(other / "evaluations")
    script.VLLM.is_blind = True
    said = call(other, "--samples", 2, "--compare", faked_run, "--seed", 7)
    assert f"\n{other}/model minus {faked_run}/model, per prompt" in said
    assert "\nscore -0.5 -0.573 -0.2603 0 10 0\n" in said
    script.VLLM.is_blind = False
    said = call(faked_run, "--samples", 2, "--model", base)
    assert f"{faked_run}/model minus {base}, per prompt" in said  # after less before
    assert "\nscore 0 " in said
    said = call(faked_run, "--samples", 3, "--model", base)
    assert ", per prompt" not in said and "differs in samples (2 there, 3 here)\n" in said
    reward = f"{write_text(tmp_path / 'reward.py', '')}:score"
    for flags, what in ((["--reward_fn", reward], "reward"), (["--prompts", 5], "prompts")):
        said = call(other, "--samples", 2, "--compare", faked_run, *flags)
        assert re.search(
            rf"Not compared with {faked_run}/\S+, because it differs in {what} \(", said
        )


@pytest.mark.slow
def test_vllm_answers(faked_run, small_eval):
    change_args(faked_run, num_eval_prompts=0)
    command = [sys.executable, "scripts/evaluate.py", faked_run, "--before"]
    streams = {"env": environment(), "capture_output": True, "text": True}
    result = subprocess.run(command, cwd=REPO, timeout=900, **streams)
    assert result.returncode == 0, result.stderr
    assert ", per prompt" in result.stdout  # vLLM has started twice
    rows = script.load_rows(str(small_eval), None, "test")
    truths = [row["reward_model"]["ground_truth"] for row in rows]
    _, answers = evaluation_in(faked_run)
    scores = [float(row["response"] == truth) for row, truth in zip(answers, truths, strict=True)]
    assert [answer["score"] for answer in answers] == scores and {*scores} == {0.0, 1.0}
