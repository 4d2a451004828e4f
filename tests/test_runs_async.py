"""Runs of the async scripts: staleness, queues, evaluations, reward models."""

import math
import shutil

import datasets
import overlap
import pytest
import torch
from helpers import ASYNC, GRPO
from helpers.files import read_json_lines
from helpers.formulas import padded_forward
from helpers.processes import TWO_RANKS, folders_of_vllm
from helpers.runs import batch_of, differences, without_clock
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import ppo_sync

pytestmark = pytest.mark.slow


# ------------------------------------------------------------------------------ every version kept


WATCHED_OPTIONS = {
    "total_episodes": 6 * 32,
    "num_epochs": 2,
    "local_mini_batch_size": 16,
    "num_evals": 3,
    "learning_rate": 3e-3,
    "lr_scheduler_type": "constant",
    "save_freq": 3,
}


@pytest.fixture(scope="module", params=ASYNC)
def watched_run(request, run_wrapped_script, small_eval, tmp_path_factory):
    """Six steps with a learning rate at which every version is far from the next."""
    folder = tmp_path_factory.mktemp("watched")
    (folder / "versions").mkdir()
    run = run_wrapped_script(
        request.param,
        "none",
        folder,
        env={"KEEP_VERSIONS": str(folder / "versions")},
        eval_dataset=small_eval,
        **WATCHED_OPTIONS,
    )
    assert run.returncode == 0, run.output
    return run


def largest_difference(model, batch):
    """Between the sampler's log-probabilities and those of a model."""
    (logprobs, _), mask = padded_forward(model, batch["prompt_ids"], batch["responses"])
    return ((logprobs - batch["sampler_logprobs"]) * mask).abs().max().item()


def test_batches_are_one_step_old_and_no_more(watched_run):
    assert [line["policy/version"] for line in watched_run.metrics] == [0, 1, 2, 3, 4, 5]
    assert [line["policy/staleness"] for line in watched_run.metrics] == [0, 1, 1, 1, 1, 1]


def test_version_on_the_label_is_the_one_that_sampled(watched_run, assets):
    versions = {}
    for path in sorted((watched_run.run_dir.parent / "versions").glob("sync_*.pt")):
        versions[int(path.stem.rpartition("_")[2])] = torch.load(path)
    assert sorted(versions) == [0, 1, 2, 3, 4, 6]
    model = ppo_sync.PolicyModel(AutoModelForCausalLM.from_pretrained(assets / "model"), 1.0)
    for step, line in enumerate(watched_run.metrics, start=1):
        sampled_by = line["policy/version"] - line["policy/staleness"]
        differences = {}
        for version in (sampled_by, sampled_by + 1):
            if version in versions:
                model.load_state_dict(versions[version])
                differences[version] = largest_difference(model, batch_of(watched_run, step))
        assert differences.pop(sampled_by) < 1e-4, step
        assert all(difference > 1e-2 for difference in differences.values()), step


# GRPO computes them in the update; test_grpo.py looks there
@pytest.mark.parametrize("watched_run", ASYNC[:1], indirect=True)
def test_weights_are_cut_off_importance_ratios(watched_run):
    batches = [batch_of(watched_run, step) for step in range(1, 7)]
    for batch in batches:
        expected = (batch["logprobs"] - batch["sampler_logprobs"]).exp().clamp(max=2.0)
        torch.testing.assert_close(batch["importance_weights"], expected * batch["mask"])
    weights = torch.cat([b["importance_weights"][b["mask"].bool()] for b in batches])
    assert weights.max() == 2.0 > weights.min() > 0


def test_every_prompt_is_drawn_once_per_pass(watched_run):
    drawn = [
        str(prompt)
        for step in range(1, 7)
        for prompt in batch_of(watched_run, step)["prompt_ids"][::2]
    ]
    assert len(drawn) == len(set(drawn)) == 96


def test_nothing_is_left_in_the_queues(watched_run):
    # Six requests for a step and one for the last evaluation, each with its rollout
    assert "Through the queues: [(7, 7), (7, 7)]" in watched_run.stdout


def test_evaluations_carry_the_version_that_answered(watched_run):
    evaluated = [
        (line["training_step"], line["eval/policy_version"])
        for line in watched_run.metrics
        if "eval/scores" in line
    ]
    assert evaluated == [(1, 0), (3, 1), (5, 3), (6, 6)]
    samples = read_json_lines(watched_run.run_dir / "samples.jsonl")
    assert sorted({sample["policy_version"] for sample in samples}) == [0, 1, 3, 6]


def test_metrics_of_the_queues_are_there(watched_run):
    for line in watched_run.metrics:
        assert {
            "queue/prompts",
            "queue/responses",
            "time/wait_for_prompts",
            "time/wait_for_generation",
        } <= set(line)
        assert all(math.isfinite(value) for value in line.values())
    assert "-bound: " in watched_run.stdout


def test_no_folder_of_vllm_is_left(watched_run):
    folders = folders_of_vllm(watched_run.stdout)
    assert folders and not any(folder.exists() for folder in folders)


# test_loop.py and test_resume.py have the same of every script, with a stub of vLLM
@pytest.mark.parametrize("watched_run", ASYNC[:1], indirect=True)
def test_resumed_run_gives_the_same_bits(watched_run, run_script, small_eval, tmp_path):
    shutil.copytree(watched_run.run_dir, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "batches")
    options = WATCHED_OPTIONS | {"eval_dataset": small_eval, "save_batches": True}
    checkpoint = tmp_path / "run" / "checkpoints" / "step_3"
    again = run_script(ASYNC[0], tmp_path, **options, resume_from_checkpoint=checkpoint)
    assert again.returncode == 0, again.output
    assert len(again.metrics) == 6
    for first, second in zip(watched_run.metrics, again.metrics, strict=True):
        assert without_clock(first) == without_clock(second)
    for step in range(1, 4):  # of this process
        assert differences(batch_of(watched_run, 3 + step), batch_of(again, step)) == []
    models = [run.run_dir / "model" / "model.safetensors" for run in (watched_run, again)]
    assert models[0].read_bytes() == models[1].read_bytes()


# -------------------------------------------------------------------------- against a reward model

SLOW_FOR_HELD_OUT_PROMPTS = """
import time

def score(data_source, response, ground_truth, extra_info):
    time.sleep(0.5 * (extra_info["split"] == "test"))
    return 1.0
"""

# 48 prompts, of which a step takes 32: a second pass begins within the second step, and ends with
# the third.
FEW_PROMPTS = {"dataset": 48, "eval_dataset": 8}


# test_loop.py has the PPO scripts against a reward model, with a stub of vLLM
@pytest.fixture(scope="module")
def reward_model_run(run_script, reward_model, assets, tmp_path_factory):
    """Three steps against a reward model alone, on few prompts and two ranks."""
    folder, files = tmp_path_factory.mktemp("against_a_model"), {}
    for name, split in (("dataset", "train"), ("eval_dataset", "test")):
        files[name] = folder / f"{split}.parquet"
        rows = datasets.Dataset.from_parquet(str(assets / files[name].name)).select(
            range(FEW_PROMPTS[name])
        )
        rows.to_parquet(str(files[name]))
    (folder / "reward.py").write_text(SLOW_FOR_HELD_OUT_PROMPTS)
    run = run_script(
        GRPO[0],
        folder,
        launcher=TWO_RANKS,
        env={"ACCELERATE_USE_CPU": "true"},
        save_batches=True,
        reward_model_path=reward_model,
        reward_model_multiplier=2.0,
        apply_verifiable_reward=False,
        reward_fn=f"{folder / 'reward.py'}:score",
        total_episodes=192,
        local_mini_batch_size=32,
        local_rollout_forward_batch_size=8,
        num_evals=2,
        **files,
    )
    assert run.returncode == 0, run.output
    return run


def test_scores_are_the_reward_models(reward_model_run, reward_model):
    model = AutoModelForSequenceClassification.from_pretrained(reward_model)
    model.config.pad_token_id = (
        None  # transformers' own forward then reads the last token, whatever it is
    )
    for step, line in enumerate(reward_model_run.metrics, start=1):
        batch, expected = batch_of(reward_model_run, step), []
        for prompt, response in zip(batch["prompt_ids"], batch["responses"], strict=True):
            with torch.no_grad():
                expected.append(model(torch.tensor([prompt + response])).logits.item())
        assert len({round(score, 3) for score in expected}) > 16
        assert batch["scores"].tolist() == pytest.approx(
            [2.0 * score for score in expected], abs=1e-4
        )
        assert line["objective/reward_model_score"] == pytest.approx(
            sum(expected) / len(expected), abs=1e-4
        )
        assert line["objective/scores"] == pytest.approx(
            2 * sum(expected) / len(expected), abs=1e-4
        )
        assert (
            "objective/verifiable_correct_rate" not in line
            and line["objective/reward_failures"] == 0
        )
    assert step == 3


def test_few_prompts_come_once_per_pass(reward_model_run):
    drawn = [
        str(prompt)
        for step in (1, 2, 3)
        for prompt in batch_of(reward_model_run, step)["prompt_ids"][::2]
    ]
    assert len(drawn) == 96
    assert len(set(drawn[:48])) == 48 and sorted(drawn[:48]) == sorted(drawn[48:])
    assert drawn[:48] != drawn[48:]


def test_scoring_of_evaluations_is_no_training_time(reward_model_run):
    # Eight held-out prompts at half a second in two workers: two seconds. All else that a step does
    # has a time.
    parts = ("weight_sync", "wait_for_generation", "reward_model", "forward", "update")
    assert [
        line["training_step"] for line in reward_model_run.metrics if "eval/scores" in line
    ] == [1, 2, 3]
    for line in reward_model_run.metrics:
        assert -0.1 < line["time/training"] - sum(line[f"time/{name}"] for name in parts) < 1.5
        assert (
            line.get("eval/verifiable_correct_rate", 1.0) == 1.0
        )  # the function's, in evaluations alone


# ---------------------------------------------------------------------------------------- overlap


def test_generation_and_training_overlap():
    sync, overlapped = (
        sum(overlap.run_toy(mode, generation=0.3, training=0.3)) for mode in (False, True)
    )
    assert 1.6 < sync / overlapped < 1.8  # 14 units against 8
