"""What the project's two documents name is there: open-instruct's page on PPO, and verl's.

Nothing of it may go for the sake of something else.
"""

import json
import shutil
from unittest import mock

import plot_runs
import pytest
from accelerate import Accelerator
from helpers import REPO, SCRIPTS
from helpers.files import read_json_lines, swap_tokens, write_rows
from transformers import AutoTokenizer

import ppo_sync as script

# A feature, and a file or the first words of a test that show it
FEATURES = {
    # open-instruct
    "training and generation side by side": "test_runs.py::generation_and_training_overlap",
    "the sampling policy is a step old": "test_loop.py::weights_go_out_before_the_request",
    "a debug command": "scripts/train/debug/ppo.sh",
    "the recipe of Tulu 3 by PPO on two nodes": "scripts/train/tulu3/ppo_8b.sh",
    "the upload is linked with the tracked run": "test_hub.py::card_has_the_address_of_the_tracked",
    "lengths of prompts in wandb": "test_seeds.py::trackers_get_lengths_and_samples",
    "and as a picture": "test_seeds.py::lengths_of_prompts_are_drawn_unless_all_are_one",
    "samples": "test_runs.py::wandb_gets_the_metrics_the_samples",
    "samples without held-out prompts": "test_seeds.py::trackers_get_lengths_and_samples",
    "dropout is off": "test_forward.py::dropout_of_the_checkpoint_is_off",
    "the head of a new reward model": "test_reward_model.py::new_head_is_small",
    "other vocabularies are refused": "test_seeds.py::models_of_other_tokens_are_refused",
    "prompts are shuffled and come again": "test_dataset.py::every_prompt_comes_once_per_pass",
    "responses end at the stop token": "test_engine.py::responses_are_cut_at_a_stop_token",
    "a penalty without stop token": "test_rewards.py::score_is_the_sum_of_the_rewards_or_the_penal",
    "the format reward": "test_rewards.py::format_is_one_thought_and_one_answer",
    # verl
    "parquet in verl's columns": "test_dataset.py::row_has_the_ground_truth_that_its_columns_say",
    "GSM8K": "scripts/data_preprocess/gsm8k.py",
    "MATH": "scripts/data_preprocess/math.py",
    "HellaSwag": "scripts/data_preprocess/hellaswag.py",
    "full_hh_rlhf": "scripts/data_preprocess/full_hh_rlhf.py",
    "rules by data source": "test_graders.py::source_says_who_grades_its_rows",
    "a reward of one's own": "test_rewards.py::reward_is_called_by_the_names",
    "a reward model": "test_loop.py::reward_model_scores_times_its_multiplier",
    "code goes to a sandbox": "scripts/rewards/code_sandbox.py",
    "validation is by the rule": "test_seeds.py::run_is_evaluated_by_the_rule",
    "where roles are placed": "test_doctests.py::examples_are_right",
    "FSDP": "test_fsdp2.py",
    "generalized advantages": "test_losses.py::advantages_are_those_of_the_definition",
}


def test_every_feature_has_what_shows_it():
    texts = {path.name: path.read_text() for path in REPO.glob("tests/*/test_*.py")}
    for shown in FEATURES.values():
        file, _, test = shown.partition("::")
        is_there = f"\ndef test_{test}" in texts.get(file, "") if test else file in texts
        assert is_there or (not test and (REPO / file).exists()), shown


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


@pytest.mark.parametrize("name", SCRIPTS)
def test_trackers_get_lengths_and_samples(name, tracker, run_main, tmp_path):
    of_row = {"data_source": "debug/sorting", "ground_truth": "1"}
    rows = [of_row | {"prompt": "1" * (1 + i % 7) + "="} for i in range(64)]
    data = write_rows(tmp_path / "prompts.jsonl", rows)
    run = run_main(name, dataset=data, num_evals=1, beta=0.1)
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


@pytest.mark.parametrize("name", SCRIPTS)
def test_run_is_evaluated_by_the_rule_also_where_it_trains_by_a_reward_model(
    name, tracker, run_main, reward_model, few_prompts
):
    options = {"apply_verifiable_reward": False, "reward_model_path": reward_model}
    options |= {"eval_dataset": few_prompts / "test.parquet", "num_evals": 1}
    run = run_main(name, non_stop_penalty=False, **options)
    samples = read_json_lines(run.run_dir / "samples.jsonl")
    for sample in samples:
        assert sample["score"] == float(sample["response"].strip() == sample["ground_truth"])
    # Before the first update, and after the last
    tables = [logged.kwargs["dataframe"] for logged in tracker.log_table.call_args_list]
    assert [len(table) for table in tables] == [8, 8]
    assert len({score for batch in run.batches for score in batch.scores.tolist()}) > 16
    line = run.metrics[-1]
    assert line["eval/scores"] == line["eval/verifiable_score"] != line["eval/reward_model_score"]
