"""scripts/evaluate.py: a saved model's answers to held-out prompts."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict
from typing import ClassVar

import evaluate
import pytest
from helpers import REPO
from helpers.files import read_json_lines, write_configurations, write_text
from helpers.processes import environment

import grpo_vllm_async as script


def row(prompt, score, source="a", failure=None):
    """A line of responses.jsonl whose verifiable score is its score."""
    scores = {"score": score, "verifiable_score": score, "failure": failure}
    return scores | {"prompt_index": prompt, "data_source": source, "length": 4, "stopped": True}


def test_a_failed_reward_is_no_wrong_answer_and_a_share_no_right_one():
    failed = [row(0, None, failure="hangs"), row(1, None, failure="hangs")]
    rows = [row(0, 1.0), failed[0], row(1, 0.5), row(1, 1.0), failed[1]]
    figures = evaluate.summarize(rows)
    assert (figures["prompts"], figures["responses"], figures["reward_failures"]) == (2, 5, 2)
    assert figures["score"]["mean"] == (1.0 + 0.75) / 2
    assert figures["pass@1"]["mean"] == (1.0 + 0.5) / 2
    assert figures["pass@2"] == {"mean": 1.0, "low": 0.2065, "high": 1.0}  # of prompt 1 alone


def test_prompts_are_the_units_and_sources_are_told_apart():
    few = [row(prompt, float(prompt < 2), "ab"[prompt % 2]) for prompt in range(4)]
    many = [line for line in few for _ in range(10)]
    for name in ("score", "pass@1"):
        assert evaluate.summarize(many)[name] == evaluate.summarize(few)[name]
    results = evaluate.summarize_sources([*few, row(4, 1.0, "b")])
    means = {source: figures["score"]["mean"] for source, figures in results.items()}
    assert means == {"all": 0.6, "a": 0.5, "b": 0.6667}


class FakeVLLM:
    """Of the samples of a prompt the first is right, the others are empty."""

    asked: ClassVar = []  # (seeds, temperature) of each call
    synced: ClassVar = []  # names of weights
    ranks: ClassVar = []  # of adapters, for which each was made

    def __init__(self, *rest):
        self.ranks.append(rest[-1].lora_rank)

    def sync_weights(self, weights, version):
        self.synced.append({name for name, _ in weights})

    def sample(self, prompts, seeds, temperature):
        self.asked.append((seeds, temperature))
        tokenizer = script.AutoTokenizer.from_pretrained(REPO / "debug_assets" / "model")
        before = [None, *prompts]
        texts = [
            "" if one is last else one.ground_truth
            for one, last in zip(prompts, before, strict=False)
        ]
        answers = [[*tokenizer(text)["input_ids"], 1] for text in texts]
        return [
            script.Response(prompt, script.np.array(ids), script.np.zeros(len(ids)), True)
            for prompt, ids in zip(prompts, answers, strict=True)
        ]


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
    figures = evaluation["results"]["all"]
    assert figures["pass@1"]["mean"] == 0.3333
    assert figures["pass@2"]["mean"] == 0.6667
    assert "pass@4" not in figures
    assert "pass@2               0.6667    0.3678 to 0.873" in said


def test_what_is_there_is_not_made_again(faked_run, call):
    first = call(faked_run, "--prompts", 500)
    again = call(faked_run, "--prompts", 500)
    assert len(FakeVLLM.asked) == 1
    figures = again[again.index(" on ") : again.index("\nThis evaluation was there already")]
    assert "pass@1 " in figures and figures in first
    (folder,) = (faked_run / "evaluations").iterdir()
    assert folder.name.startswith("trained_test_32x1_t0_")  # of 500 prompts there were 32
    call(faked_run, "--temperature", 0.5)
    call(faked_run, "--model", REPO / "debug_assets" / "model")
    os.utime(faked_run / "model" / "config.json", (1e9, 1e9))  # a resumed run saves another model
    call(faked_run, "--prompts", 500)
    assert len(FakeVLLM.asked) == len(list(faked_run.glob("evaluations/*/responses.jsonl"))) == 4


def test_configurations_of_a_dataset_are_told_apart(faked_run, small_eval, call, tmp_path):
    """The run's; or the flag's, which is another evaluation."""
    rows = script.load_rows(str(small_eval), None, None)
    configurations = {"main": rows[:3], "socratic": rows[3:5]}
    folder = write_configurations(tmp_path / "two_for_evaluate", configurations)
    args = json.loads((faked_run / "args.json").read_text())
    args |= {"eval_dataset": str(folder), "eval_dataset_split": "train"}
    (faked_run / "args.json").write_text(json.dumps(args | {"eval_dataset_config": "main"}))
    call(faked_run)
    call(faked_run, "--dataset_config", "socratic")
    asked = []
    for path in (faked_run / "evaluations").glob("*/responses.jsonl"):
        asked.append([line["ground_truth"] for line in read_json_lines(path)])
    truths = [
        [row["reward_model"]["ground_truth"] for row in each] for each in configurations.values()
    ]
    assert sorted(map(sorted, asked)) == sorted(map(sorted, truths))


def test_reward_model_of_the_run_scores_too(faked_run, reward_model, call):
    args = json.loads((faked_run / "args.json").read_text())
    changes = {"reward_model_path": str(reward_model), "reward_model_multiplier": 2.0}
    (faked_run / "args.json").write_text(json.dumps(args | changes))
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
        (["--reward_fn", "no.py:score"], "--reward_fn no.py:score: there is no such file"),
        (["--dataset", "no.jsonl"], "No such file or directory: 'no.jsonl'"),
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


def greedy_answers(model_dir, prompts):
    """What transformers answers: [(text, whether it stopped)]."""
    model = script.AutoModelForCausalLM.from_pretrained(model_dir)
    tokenizer = script.AutoTokenizer.from_pretrained(model_dir)
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)["input_ids"]
        options = {"do_sample": False, "max_new_tokens": 8, "eos_token_id": 1, "pad_token_id": 0}
        new = model.generate(ids, **options)[0, ids.shape[1] :].tolist()
        yield tokenizer.decode(new, skip_special_tokens=True), new[-1] == 1


@pytest.mark.slow
def test_vllm_answers_greedily_and_a_hanging_reward_costs_its_own(faked_run, tmp_path):
    args = json.loads((faked_run / "args.json").read_text())
    rows = script.load_rows(args["eval_dataset"], None, "test")
    truths = [row["reward_model"]["ground_truth"] for row in rows]
    reward = write_text(tmp_path / "reward.py", HANGS.format(truth=truths[0]))
    args |= {"reward_timeout": 1.0, "num_eval_prompts": 0, "reward_fn": f"{reward}:score"}
    write_text(faked_run / "args.json", json.dumps(args))

    command = [sys.executable, "scripts/evaluate.py", faked_run]
    streams = {"env": environment(), "capture_output": True, "text": True}
    result = subprocess.run(command, cwd=REPO, timeout=300, **streams)
    assert result.returncode == 0, result.stderr
    evaluation, answers = evaluation_in(faked_run)
    expected = list(greedy_answers(faked_run / "model", [answer["prompt"] for answer in answers]))
    assert [(answer["response"], answer["stopped"]) for answer in answers] == expected
    scores = [float(text == truth) for (text, _), truth in zip(expected, truths, strict=True)]
    assert [answer["score"] for answer in answers] == [None, *scores[1:]]
    assert {0.0, 1.0} == set(scores[1:])
    assert evaluation["results"]["all"]["reward_failures"] == 1
