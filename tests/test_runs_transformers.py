"""A run of ppo_sync.py with --generation_backend transformers."""

import json
import math

import datasets
import pytest
import torch
from helpers.files import read_json_lines, write_text
from helpers.formulas import logprobs_and_entropies, padded_forward
from helpers.rollouts import STOP  # <|end|> of the debug model too
from helpers.runs import METRICS_OF_POLICY_UPDATES, PPO_METRICS, batch_of, sampled_ones
from transformers import AutoModelForCausalLM

import ppo_sync

pytestmark = pytest.mark.slow

REWARD_WITH_EXTRA_INFO = """
import json

def score(data_source, response, ground_truth, extra_info):
    with open(LOG, "a") as file:
        file.write(json.dumps([data_source, ground_truth, extra_info]) + "\\n")
    return 0.25 + (response == ground_truth)
"""


@pytest.fixture(scope="module")
def transformers_run(run_script, small_eval, tmp_path_factory):
    """Twelve steps of two epochs and two minibatches, with a reward function of a file and wandb.

    The value model learns alone in the first two.
    """
    folder = tmp_path_factory.mktemp("transformers")
    log = f"LOG = {str(folder / 'calls.jsonl')!r}\n"
    reward = write_text(folder / "reward.py", log + REWARD_WITH_EXTRA_INFO)
    run = run_script(
        "ppo_sync.py",
        folder,
        "--with_tracking",
        env={"WANDB_MODE": "offline", "WANDB_DIR": str(folder)},
        generation_backend="transformers",
        eval_dataset=small_eval,
        reward_fn=f"{reward}:score",
        total_episodes=12 * 32,
        num_epochs=2,
        local_mini_batch_size=16,
        temperature=1.5,
        num_evals=3,
        save_batches=True,
        warm_up_steps=10,
        value_warmup_steps=2,
    )
    assert run.returncode == 0, run.output
    return run


def test_transformers_backend_has_every_metric_but_those_of_the_mismatch(transformers_run):
    assert len(transformers_run.metrics) == 12
    expected = PPO_METRICS - {"time/wait_for_prompts"}  # the learner samples, and waits for nobody
    for step, line in enumerate(transformers_run.metrics, start=1):
        of_value_model = expected - METRICS_OF_POLICY_UPDATES
        assert set(line) & PPO_METRICS == (expected if step > 2 else of_value_model)
        assert not any(name.startswith("mismatch/") for name in line)
        assert all(math.isfinite(value) for value in line.values())
        assert 0 <= line["perf/padding_fraction"] < 1
    evaluated = [
        line["eval/policy_version"] for line in transformers_run.metrics if "eval/scores" in line
    ]
    assert evaluated == [0, 4, 8, 12]


def test_transformers_backend_samples_from_the_policy_at_the_temperature(transformers_run, assets):
    batch = batch_of(transformers_run, 1)
    mine = sampled_ones(batch)
    model = AutoModelForCausalLM.from_pretrained(assets / "model")
    logprobs, entropies = logprobs_and_entropies(
        model, batch["prompt_ids"], batch["responses"], temperature=1.5
    )
    torch.testing.assert_close(torch.cat(mine["logprobs"]), torch.cat(logprobs), rtol=0, atol=1e-5)
    assert (batch["importance_weights"][batch["mask"].bool()] == 1).all()
    # Minus the mean log-probability of samples estimates the entropy: neither greedy nor cut to the
    # top k.
    tokens = torch.cat(logprobs)
    error = 4 * tokens.std().item() / len(tokens) ** 0.5
    assert -tokens.mean().item() == pytest.approx(torch.cat(entropies).mean().item(), abs=error)
    assert len({str(ids) for ids in batch["responses"]}) > 20
    for ids in batch["responses"]:
        assert STOP not in ids[:-1] and (ids[-1] == STOP or len(ids) == 8)


def test_learning_rate_of_every_step_is_logged(transformers_run):
    updates = [4 * step - 1 for step in range(1, 11)]  # the policy's last of each step, of 40
    expected = [0, 0] + [(u + 1) / 10 if u < 10 else 1 - (u - 10) / 30 for u in updates]
    assert [line["lr"] / 5e-4 for line in transformers_run.metrics] == pytest.approx(expected)
    assert transformers_run.metrics[-1]["lr"] > 0


def test_reward_function_of_a_file_gets_what_the_row_holds(transformers_run, assets):
    calls = read_json_lines(transformers_run.run_dir.parent / "calls.jsonl")

    rows = {
        split: datasets.Dataset.from_parquet(str(assets / f"{split}.parquet")).to_list()
        for split in ("train", "test")
    }
    # Two calls to try it out, four evaluations of 32, twelve steps of 32
    assert len(calls) == 2 + 4 * 32 + 12 * 32
    for source, truth, extra_info in calls:
        assert source == "debug/sorting"
        assert (
            rows[extra_info["split"]][extra_info["index"]]["reward_model"]["ground_truth"] == truth
        )
    for step, line in enumerate(transformers_run.metrics, start=1):
        scores = batch_of(transformers_run, step)["scores"]
        assert set(scores.tolist()) <= {0.25, 1.25}
        assert line["objective/scores"] == pytest.approx(scores.mean().item())


def test_value_model_learns_alone_in_its_warm_up(transformers_run, assets):
    value_model = ppo_sync.load_value_model(ppo_sync.Args(model_name_or_path=str(assets / "model")))
    changes = {"policy": [], "values": []}
    for step in range(1, 5):
        batch = batch_of(transformers_run, step)
        changes["policy"].append((batch["logprobs"] - batch["ref_logprobs"]).abs().max().item())
        at_first, mask = padded_forward(value_model, batch["prompt_ids"], batch["responses"])
        changes["values"].append((batch["values"] - at_first * mask).abs().max().item())
    # A batch is from before its step's updates.
    assert max(changes["policy"][:3]) < 1e-4 and changes["values"][0] < 1e-4
    assert changes["policy"][3] > 1e-3 and min(changes["values"][1:]) > 1e-2


def test_memory_does_not_grow_with_the_steps(transformers_run):
    memory = [line.get("perf/memory_gib") for line in transformers_run.metrics]
    if None in memory:
        pytest.skip("perf/memory_gib is not logged")
    assert memory[-1] < 1.05 * memory[2]


def test_wandb_gets_the_metrics_and_samples(transformers_run):
    folder = transformers_run.run_dir.parent
    (log,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    log = log.read_bytes()
    for name, value in transformers_run.metrics[-1].items():
        assert name.encode() in log and json.dumps(value).encode() in log, name
    assert b"token_length" in log
    tables = [
        json.loads(path.read_text())
        for path in folder.glob("wandb/**/sample_completions*.table.json")
    ]
    assert tables and all(
        len(table["data"]) == 32 and "response" in table["columns"] for table in tables
    )
