"""What the project's two documents name, open-instruct's page on PPO and verl's, and no other file
tests.

Nothing of it may go for the sake of something else.
"""

import json
import shutil
from unittest import mock

import plot_runs
import pytest
from accelerate import Accelerator
from helpers.files import read_json_lines, swap_tokens, write_rows
from transformers import AutoTokenizer

import ppo_sync as script


def test_lengths_of_prompts_are_drawn_unless_all_are_one(tmp_path, capsys):
    (tmp_path / "args.json").write_text(json.dumps({"max_prompt_token_length": 64}))
    for lengths in ([3, 3, 3], [2, 5, 5, 40]):
        (tmp_path / "prompt_lengths.json").write_text(json.dumps(lengths))
        plot_runs.draw_lengths(tmp_path)
        assert (tmp_path / "token_length.png").exists() == (len(lengths) == 4)
    assert capsys.readouterr().out == ""
    assert (tmp_path / "token_length.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def tracker(monkeypatch):
    """In place of accelerate's for Weights & Biases: notes what it is told."""
    tracker = mock.Mock()
    put = lambda accelerator, *_: setattr(accelerator, "trackers", [tracker])  # noqa: E731
    monkeypatch.setattr(Accelerator, "init_trackers", put)
    for name in ("log", "end_training"):
        monkeypatch.setattr(Accelerator, name, lambda *_: None)
    return tracker


def test_trackers_get_lengths_and_samples(tracker, run_main, tmp_path):
    of_row = {"data_source": "debug/sorting", "ground_truth": "1"}
    rows = [of_row | {"prompt": "1" * (1 + i % 7) + "="} for i in range(64)]
    data = write_rows(tmp_path / "prompts.jsonl", rows)
    run = run_main("ppo_sync.py", dataset=data, num_evals=1, beta=0.1)
    (logged,) = tracker.log.call_args_list
    histogram = logged.args[0]["prompt_lengths"]
    lengths = json.loads((run.run_dir / "prompt_lengths.json").read_text())
    assert lengths == [len(row["prompt"]) for row in rows]  # a token for each letter
    assert sum(histogram.histogram) == 64
    assert (histogram.bins[0], histogram.bins[-1]) == (min(lengths), max(lengths))
    (logged,) = tracker.log_table.call_args_list  # in step 1, where an evaluation would have been
    assert logged.args == ("sample_completions",)
    table = logged.kwargs["dataframe"]
    assert not logged.kwargs["commit"]  # the step's metrics come after it
    rollouts = read_json_lines(run.run_dir / "rollouts.jsonl")
    first = [sample["response"] for sample in rollouts if sample["training_step"] == 1]
    assert list(table["response"]) == first
    assert set(table["policy_version"]) == {0}


@pytest.mark.parametrize("flag", ["reward_model_path", "value_model_path"])
def test_models_of_other_tokens_are_refused(flag, assets, tmp_path):
    """One that reads other words, silently."""
    folders = {"swapped": 17, "padded": 64, "more": 64}  # sizes of vocabularies
    for folder, size in folders.items():
        shutil.copytree(assets / "model", tmp_path / folder)
        config = json.loads((tmp_path / folder / "config.json").read_text())
        (tmp_path / folder / "config.json").write_text(json.dumps(config | {"vocab_size": size}))
    swap_tokens(tmp_path / "swapped")
    # As trainers of reward models add a token to pad with
    tokenizer = AutoTokenizer.from_pretrained(assets / "model")
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    tokenizer.save_pretrained(tmp_path / "more")

    def load(folder, policy=assets / "model"):
        path = {flag: str(tmp_path / folder)}
        return script.load_tokenizer(script.Args(model_name_or_path=str(policy), **path))

    with pytest.raises(ValueError, match=f"--{flag} .*swapped must know the policy's tokens"):
        load("swapped")
    assert load("more").get_vocab() == load("padded").get_vocab()  # sizes differ within a family
    # Not so the other way round: the policy could sample what the other does not know
    with pytest.raises(ValueError, match="must know the policy's tokens"):
        load("padded", policy=tmp_path / "more")


def test_run_is_evaluated_by_the_rule_also_where_it_trains_by_a_reward_model(
    tracker, run_main, reward_model, few_prompts
):
    options = {"apply_verifiable_reward": False, "reward_model_path": reward_model}
    options |= {"eval_dataset": few_prompts / "test.parquet", "num_evals": 1}
    run = run_main("ppo_sync.py", non_stop_penalty=False, **options)
    samples = read_json_lines(run.run_dir / "samples.jsonl")
    for sample in samples:
        assert sample["score"] == float(sample["response"].strip() == sample["ground_truth"])
    # Before the first update, and after the last
    tables = [logged.kwargs["dataframe"] for logged in tracker.log_table.call_args_list]
    assert [len(table) for table in tables] == [8, 8]
    assert len({score for batch in run.batches for score in batch.scores.tolist()}) > 16
    line = run.metrics[-1]
    assert line["eval/scores"] == line["eval/verifiable_score"] != line["eval/reward_model_score"]
