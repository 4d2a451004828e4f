"""Test scripts/evaluate.py: a saved model's answers to held-out prompts."""

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
    """Return a line of responses.jsonl whose verifiable score is its score."""
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

    # Of the numbers that rewards return, NaN and missing ones are ignored. `right` means correct
    own = [{"strict": float(i > 1), "right": float(i > 2)} for i in range(4)]
    rows = [row(i, 0.95, reward_metrics=metrics) for i, metrics in enumerate(own)]
    rows += [row(4, None, failure="hangs"), row(5, 0.95, reward_metrics={"strict": math.nan})]
    figures = evaluate.summarize(rows)
    assert figures["reward/strict"] == {"mean": 0.5, "low": 0.15, "high": 0.85, "prompts": 4}
    assert figures["pass@1"]["mean"] == 0.2 and figures["score"]["prompts"] == 5

    # Intervals are over prompts, not answers. A single prompt that is there twice gives no pass@2
    few = [row(prompt, float(prompt < 15)) for prompt in range(30)]
    expected = {"mean": 0.5, "low": 0.3315, "high": 0.6685, "prompts": 30}
    for rows in (few, [line for line in few for _ in range(32)]):
        figures = evaluate.summarize(rows)
        assert figures["score"] == figures["pass@1"] == expected
    assert [name for name in evaluate.figures_of([*few, few[0]]) if "pass" in name] == ["pass@1"]


def test_interval_has_the_worth_of_an_answer_as_limit_and_is_the_normal_one_without_limits():
    wrong = [row(prompt, 0.0) for prompt in range(30)]
    highs = [evaluate.summarize(wrong, worth)["score"]["high"] for worth in (1.0, 10.0)]
    assert highs == [0.1135, 1.1352]
    scores = [(i * 37 % 101) / 10 - 70 for i in range(100)]
    figure = evaluate.summarize([row(i, s, verifiable_score=None) for i, s in enumerate(scores)])
    mean, width = statistics.fmean(scores), 1.96 * statistics.stdev(scores) / 10
    ends = [figure["score"][end] for end in ("low", "high")]
    assert ends == pytest.approx([mean - width, mean + width], abs=0.05)


def test_two_models_are_compared_prompt_by_prompt():
    """The intervals of the models overlap, but that of the difference does not contain 0."""
    one = [row(prompt, float(prompt % 10 < 4 or prompt >= 80)) for prompt in range(100)]
    other = [row(prompt, float(prompt % 10 < 4)) for prompt in range(100)]
    low, high = (evaluate.summarize(rows)["score"] for rows in (other, one))
    assert high["low"] < low["high"]
    differences = evaluate.compare(one, other[::-1])
    counts = {"better": 12, "worse": 0, "equal": 88}
    assert differences["score"] == {"mean": 0.12, "low": 0.0495, "high": 0.1858} | counts
    # Prompts for which one model has no score are left out
    few = [row(prompt, None, failure="hangs") for prompt in range(80)]
    figure = evaluate.compare([*few, *one[80:]], other)["score"]
    assert [figure[name] for name in counts] == [12, 0, 8] and figure["high"] <= 1


class FakeVLLM:
    """Answer the first sample of each prompt correctly, and all others with an empty text."""

    made: ClassVar = []  # all instances
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
    """Return the folder of a run with a model, for which FakeVLLM answers."""
    options = {"eval_dataset": str(small_eval), "num_eval_prompts": 10, "dtype": "float32"}
    args = script.Args(temperature=0.7, response_length=8, stop_token_ids=(1,), **options)
    # The PPO scripts also write flags that this script does not have
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
    """Return what evaluate.py prints, with single spaces, or the last line of its errors."""
    status, output, errors = call_main(evaluate, *words)
    return errors.splitlines()[-1] if status else re.sub(" +", " ", output)


def evaluation_in(run_dir):
    """Return figures and responses of a run's newest evaluation."""
    path = sorted(run_dir.glob("evaluations/*/evaluation.json"), key=os.path.getmtime)[-1]
    rows = read_json_lines(path.with_name("responses.jsonl"))
    return json.loads(path.read_text())["results"], rows


def test_adapter_is_served_and_not_the_model_that_it_was_merged_into(
    faked_run, assets, import_fork, monkeypatch
):
    """A merged model that is rounded to bfloat16 would be a different one.

    The run's fork is missing, so evaluate.py writes one. Another model gets an adapter of zeros.
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
    output = call(faked_run, "--samples", 2, "--before")
    assert len(FakeVLLM.made) == 2
    assert f"{faked_run}/model minus {assets / 'model'}, per prompt" in output
    assert "remove --model" in call(faked_run, "--before", "--model", assets / "model")


def test_examples_that_are_sometimes_correct_are_found_by_their_numbers(
    faked_run, small_eval, tmp_path, monkeypatch
):
    """The text of a dropped example can be part of another one's, and two can be equal."""
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
    # The saved model has its own tokenizer and template, so those of the run can be missing
    change_args(faked_run, tokenizer_name_or_path="/gone", chat_template="/gone.jinja")
    call(faked_run, "--samples", 3)
    (vllm,) = FakeVLLM.made
    assert (
        vllm.temperature == 0.7
    )  # the temperature of training, because greedy answers would be equal
    assert len(set(vllm.seeds)) == 30
    figures, rows = evaluation_in(faked_run)
    places = [(i, sample, float(sample == 0)) for i in range(10) for sample in range(3)]
    assert [(row["prompt_index"], row["sample"], row["score"]) for row in rows] == places
    assert [figures[f"pass@{k}"]["mean"] for k in (1, 2)] == [0.3333, 0.6667]
    assert "--temperature 0 is greedy" in call(faked_run, "--samples", 4, "--temperature", 0)


def test_held_out_prompts_are_the_run_s_or_the_flag_s(faked_run, small_eval, tmp_path):
    """Examples with different ground truths are different prompts."""
    rows = script.load_rows(str(small_eval), None, None)
    truths = [row["reward_model"]["ground_truth"] for row in rows]
    folder = tmp_path / "two_for_evaluate"
    write_configurations(folder, {"main": rows[:3], "socratic": rows[3:5]})
    options = {"eval_dataset": str(folder), "eval_dataset_split": "train"}
    change_args(faked_run, **options, eval_dataset_config="main")
    other = rows[0] | {"reward_model": {"style": "rule", "ground_truth": "99999"}}
    repeated = write_rows(tmp_path / "rows.jsonl", [*rows[:3] * 3, other])
    for flags in ([], ["--dataset_config", "socratic"], ["--dataset", repeated]):
        output = call(faked_run, *flags)
    expected = [{*truths[:3]}, {*truths[3:5]}, {*truths[:3], "99999"}]
    assert [vllm.truths for vllm in FakeVLLM.made] == expected
    assert "4 prompts, 10 responses" in output
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
    """If the copy is missing or has changed, a warning is printed."""
    text, rule = (REPO / "grpo_vllm_async.py").read_text(), "return float(response.strip() =="
    assert text.count(rule) == 1
    copy = tmp_path / "elsewhere/my_grpo.py"
    write_text(copy, text.replace(rule, "return 0.5 * float(response.strip() =="))
    monkeypatch.syspath_prepend(copy.parent)
    monkeypatch.setattr(importlib.import_module("my_grpo"), "VLLM", FakeVLLM)
    provenance = {"command": ["accelerate", "launch", str(copy), "--seed", "1"]}
    provenance["script_sha256"] = hashlib.sha256(copy.read_bytes()).hexdigest()
    change_args(faked_run, provenance=provenance)
    output = call(faked_run)
    assert "Warning" not in output and "pass@1 0 " in output
    copy.unlink()
    output = call(faked_run)
    assert "is missing or has changed" in output and "pass@1 1 " in output


def test_models_with_other_evaluations_of_the_same_are_compared(faked_run, tmp_path):
    """A model is not compared with itself, and only with the newest evaluation of another."""
    base = REPO / "debug_assets" / "model"
    script.VLLM.is_blind = True
    output = call(faked_run, "--samples", 2)  # an older evaluation with other figures
    script.VLLM.is_blind = False
    output += call(faked_run, "--samples", 2)
    names = {path.name for path in faked_run.glob("evaluations/trained_10x2_*")}
    assert "has no evaluation of another model" in output
    assert ", per prompt" not in output and len(names) == len(FakeVLLM.made) == 2
    other = shutil.copytree(faked_run, faked_run.with_name("other"))
    os.utime(other / "model" / "config.json", (1e9, 1e9))
    shutil.rmtree(other / "evaluations")
    script.VLLM.is_blind = True
    output = call(other, "--samples", 2, "--compare", faked_run, "--seed", 7)
    assert f"\n{other}/model minus {faked_run}/model, per prompt" in output
    assert "\nscore -0.5 -0.573 -0.2603 0 10 0\n" in output
    script.VLLM.is_blind = False
    output = call(faked_run, "--samples", 2, "--model", base)
    assert f"{faked_run}/model minus {base}, per prompt" in output  # the trained model comes first
    assert "\nscore 0 " in output
    output = call(faked_run, "--samples", 3, "--model", base)
    assert ", per prompt" not in output and "differs in samples (2 there, 3 here)\n" in output
    reward = f"{write_text(tmp_path / 'reward.py', '')}:score"
    for flags, what in ((["--reward_fn", reward], "reward"), (["--prompts", 5], "prompts")):
        output = call(other, "--samples", 2, "--compare", faked_run, *flags)
        assert re.search(
            rf"Not compared with {faked_run}/\S+, because it differs in {what} \(", output
        )


def test_score_of_a_run_with_a_reward_model_is_that_of_its_evaluations(faked_run, reward_model):
    """Where there is a ground truth, that is the rule's alone."""
    change_args(faked_run, reward_model_path=str(reward_model))
    call(faked_run, "--samples", 2)
    _, answers = evaluation_in(faked_run)
    assert [answer["score"] for answer in answers] == [1.0, 0.0] * 10
    assert all(answer["reward_model_score"] for answer in answers)


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
