"""Runs of ppo_sync.py with vLLM: what they write, recomputed; and several runs compared."""

import json
import math
import statistics

import datasets
import pytest
import torch
from helpers.files import read_json_lines
from helpers.formulas import chosen_logprobs, gae_by_definition, logprobs_and_entropies
from helpers.processes import TWO_RANKS, answers_of_vllm
from helpers.rollouts import STOP  # <|end|> of the debug model too
from helpers.runs import (
    EVAL_METRICS,
    MISMATCH_METRICS,
    PPO_METRICS,
    VLLM_OPTIONS,
    batch_of,
    sampled_ones,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

import ppo_sync

pytestmark = pytest.mark.slow


# --------------------------------------------------------------------------- metrics of a vLLM run


def test_every_metric_is_in_every_line_and_finite(vllm_run, multi_update_run):
    for run, steps in ((vllm_run, 4), (multi_update_run, 3)):
        assert [line["training_step"] for line in run.metrics] == list(range(1, steps + 1))
        for line in run.metrics:
            assert PPO_METRICS | MISMATCH_METRICS | {"time/weight_sync"} <= set(line)
            assert all(math.isfinite(value) for value in line.values())
            assert 0 <= line["perf/padding_fraction"] < 1


def test_files_of_a_run_are_there(vllm_run):
    assert json.loads((vllm_run.run_dir / "args.json").read_text())["beta"] == 0.1
    for name in (
        "metrics.jsonl",
        "samples.jsonl",
        "curves.png",
        "token_length.png",
        "model/config.json",
    ):
        assert (vllm_run.run_dir / name).stat().st_size > 0


def test_position_and_learning_rate_are_right(vllm_run, assets):
    for step, line in enumerate(vllm_run.metrics, start=1):
        assert line["episode"] == 32 * step
        assert line["epoch"] == pytest.approx(16 * step / 20_000)
        assert line["policy/version"] == step - 1
        assert line["lr"] == 5e-4


def test_scores_are_of_the_response_to_the_prompt_beside_it(vllm_run, assets):
    tokenizer = AutoTokenizer.from_pretrained(assets / "model")
    for step, line in enumerate(vllm_run.metrics, start=1):
        batch = batch_of(vllm_run, step)
        scores, right = [], []
        for prompt, response in zip(batch["prompt_ids"], batch["responses"], strict=True):
            digits = tokenizer.decode(prompt, skip_special_tokens=True).rstrip("=")
            answer = tokenizer.decode(response, skip_special_tokens=True)
            right.append(float(answer == "".join(sorted(digits))))
            scores.append(right[-1] if response[-1] == STOP else -1.0)
        assert batch["scores"].tolist() == scores
        assert line["objective/scores"] == pytest.approx(sum(scores) / 32)
        assert line["objective/scores_std"] == pytest.approx(statistics.pstdev(scores))
        for name in ("verifiable_correct_rate", "verifiable_score"):
            assert line[f"objective/{name}"] == pytest.approx(sum(right) / 32)
        assert line["objective/penalty_rate"] == scores.count(-1.0) / 32
    assert {-1.0, 0.0, 1.0} == {
        score for step in (1, 2, 3, 4) for score in batch_of(vllm_run, step)["scores"].tolist()
    }


def test_prompts_are_drawn_in_order_and_their_samples_differ(vllm_run, assets):
    rows = datasets.Dataset.from_parquet(str(assets / "train.parquet"))
    tokenizer = AutoTokenizer.from_pretrained(assets / "model")
    different = 0
    for step in (1, 2, 3, 4):
        batch = batch_of(vllm_run, step)
        drawn = ppo_sync.draw_prompts(len(rows), 16 * (step - 1), 16, seed=1)
        contents = [rows[i]["prompt"][0]["content"] for i in drawn for _ in range(2)]
        texts = [f"<|user|>{content}<|assistant|>" for content in contents]
        assert batch["prompt_ids"] == tokenizer(texts)["input_ids"]
        different += sum(
            batch["responses"][i] != batch["responses"][i + 1] for i in range(0, 32, 2)
        )
    assert different > 32  # of 64 pairs, at temperature 1.5


def test_trained_ids_are_the_sampled_ids(vllm_run, multi_update_run):
    for run, steps in ((vllm_run, 4), (multi_update_run, 3)):
        for step in range(1, steps + 1):
            batch = batch_of(run, step)
            for row, ids in enumerate(batch["responses"]):
                assert STOP not in ids[:-1]
                assert ids[-1] == STOP or len(ids) == 8
                mask = [1.0] * len(ids) + [0.0] * (batch["mask"].shape[1] - len(ids))
                assert batch["mask"][row].tolist() == mask
                # A log-probability of each sampled id and none besides
                assert ((batch["sampler_logprobs"][row] != 0).float() == batch["mask"][row]).all()


def test_sampler_has_the_learners_weights_at_every_step(vllm_run, multi_update_run):
    for run in (vllm_run, multi_update_run):
        for line in run.metrics:
            assert 0 < line["mismatch/logprob_diff_max"] < 1e-4
    # ... which are not the ones before: every step of learning moved them by far more
    moved = [batch_of(multi_update_run, step) for step in (2, 3)]
    assert all((batch["logprobs"] - batch["ref_logprobs"]).abs().max() > 0.01 for batch in moved)


def test_logprobs_are_those_of_the_models_at_the_sampling_temperature(vllm_run, assets):
    model = AutoModelForCausalLM.from_pretrained(assets / "model")
    for step in (1, 4):
        batch = batch_of(vllm_run, step)
        mine = sampled_ones(batch)
        logprobs, entropies = logprobs_and_entropies(
            model, batch["prompt_ids"], batch["responses"], temperature=1.5
        )
        torch.testing.assert_close(
            torch.cat(mine["ref_logprobs"]), torch.cat(logprobs), rtol=0, atol=1e-5
        )
        if step == 1:  # the policy is the reference policy still
            for name in ("logprobs", "sampler_logprobs"):
                torch.testing.assert_close(
                    torch.cat(mine[name]), torch.cat(logprobs), rtol=0, atol=1e-4
                )
            entropy = torch.cat(entropies).mean().item()
            assert vllm_run.metrics[0]["policy/entropy_avg"] == pytest.approx(entropy, abs=1e-5)


@pytest.mark.parametrize("step", [1, 2, 3, 4])
def test_rewards_and_advantages_are_recomputed_from_the_batch(vllm_run, step):
    batch = batch_of(vllm_run, step)
    mine = sampled_ones(batch)
    rewards = [
        -0.1 * (new - ref) for new, ref in zip(mine["logprobs"], mine["ref_logprobs"], strict=True)
    ]
    for row, score in zip(rewards, batch["scores"].tolist(), strict=True):
        row[-1] += score
    every = torch.cat(rewards)
    rewards = [(row - every.mean()) / every.std() + every.mean() for row in rewards]
    torch.testing.assert_close(torch.cat(mine["rewards"]), torch.cat(rewards), rtol=1e-4, atol=1e-5)
    advantages, returns = [], []
    for row, values in zip(rewards, mine["values"], strict=True):
        advantages.append(gae_by_definition(row, values, 0.97, 0.9))
        returns.append(gae_by_definition(row, values, 0.97, 1.0) + values)
    every = torch.cat(advantages)
    whitened = (every - every.mean()) / every.std()
    torch.testing.assert_close(torch.cat(mine["advantages"]), whitened, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.cat(mine["returns"]), torch.cat(returns), rtol=1e-4, atol=1e-5)
    weights = [
        (new - old).exp().clamp(max=2.0)
        for new, old in zip(mine["logprobs"], mine["sampler_logprobs"], strict=True)
    ]
    torch.testing.assert_close(
        torch.cat(mine["importance_weights"]), torch.cat(weights), rtol=0, atol=1e-6
    )
    outside = ~batch["mask"].bool()
    for name in ("logprobs", "ref_logprobs", "values", "rewards", "advantages", "returns"):
        assert (batch[name][outside] == 0).all(), name


@pytest.mark.parametrize("step", [1, 2, 3, 4])
def test_metrics_are_recomputed_from_the_batch(vllm_run, step):
    batch, line = batch_of(vllm_run, step), vllm_run.metrics[step - 1]
    mine = sampled_ones(batch)
    flat = {name: torch.cat(rows) for name, rows in mine.items()}
    sizes = [len(ids) for ids in batch["responses"]]
    kl = sum((flat["logprobs"] - flat["ref_logprobs"]).tolist()) / 32
    stops = sum(ids[-1] == STOP for ids in batch["responses"])
    policy_loss = -(flat["advantages"] * flat["importance_weights"]).mean().item()
    value_loss = ((flat["values"] - flat["returns"]) ** 2 / 2).mean().item()
    difference = flat["logprobs"] - flat["sampler_logprobs"]
    trust = difference.exp()
    expected = {
        "objective/kl": kl,
        "objective/non_score_reward": -0.1 * kl,
        "objective/rlhf_reward": batch["scores"].mean().item() - 0.1 * kl,
        "objective/entropy": -flat["logprobs"].sum().item() / 32,
        "objective/loss": policy_loss + value_loss,
        "loss/policy_avg": policy_loss,
        "loss/value_avg": value_loss,
        "val/sequence_lengths": sum(sizes) / 32,
        "val/num_stop_token_ids": stops,
        "val/stop_rate": stops / 32,
        "val/explained_variance": (
            1 - (flat["returns"] - flat["values"]).var() / flat["returns"].var()
        ).item(),
        "mismatch/logprob_diff_mean": difference.abs().mean().item(),
        "mismatch/logprob_diff_max": difference.abs().max().item(),
        "mismatch/kl": (trust - 1 - difference).mean().item(),
        "mismatch/ess": (trust.sum() ** 2 / (trust**2).sum() / len(trust)).item(),
        "mismatch/tis_clipfrac": 0.0,
    }
    for name, value in expected.items():
        assert line[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    assert min(sizes) < max(sizes)
    if step > 1:
        assert abs(kl) > 1e-3  # it is a policy of its own by now


def test_first_minibatch_is_exactly_on_policy(vllm_run):
    for line in vllm_run.metrics:  # one update a step: all of it is the first minibatch
        assert line["policy/clipfrac_avg"] == 0
        assert line["policy/approxkl_avg"] == 0
        assert line["val/ratio"] == 1
        assert line["val/ratio_var"] == 0
        assert line["val/clipfrac_avg"] == 0


def test_later_minibatches_are_not(multi_update_run):
    for line in multi_update_run.metrics:
        assert line["policy/approxkl_avg"] > 1e-6
        assert line["val/ratio_var"] > 1e-6
        assert line["val/ratio"] != 1
        assert 0.5 < line["val/ratio"] < 2
    assert max(line["policy/clipfrac_avg"] for line in multi_update_run.metrics) > 0


def test_gradient_norm_is_that_of_the_whole_batch(vllm_run, assets):
    policy = AutoModelForCausalLM.from_pretrained(assets / "model").double()
    batch = batch_of(vllm_run, 1)
    mine = sampled_ones(batch)
    loss = 0.0
    for row, (prompt, response) in enumerate(
        zip(batch["prompt_ids"], batch["responses"], strict=True)
    ):
        logprobs = chosen_logprobs(policy, prompt, response, temperature=1.5)
        loss = loss - (logprobs * mine["advantages"][row] * mine["importance_weights"][row]).sum()
    (loss / sum(len(ids) for ids in batch["responses"])).backward()
    norm = torch.cat([p.grad.flatten() for p in policy.parameters()]).norm().item()
    assert vllm_run.metrics[0]["optim/grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_padding_fraction_is_that_of_the_update(vllm_run):
    for step, line in enumerate(vllm_run.metrics, start=1):
        batch = batch_of(vllm_run, step)
        pairs = zip(batch["responses"], batch["prompt_ids"], strict=True)
        lengths = [(len(response), len(prompt)) for response, prompt in pairs]
        by_length = sorted(lengths)
        computed = sum(
            len(rows) * (max(r for r, _ in rows) + max(p for _, p in rows))
            for rows in (by_length[i : i + 8] for i in range(0, 32, 8))
        )
        assert line["perf/padding_fraction"] == pytest.approx(1 - sum(map(sum, lengths)) / computed)


def greedy_answers(model, tokenizer, samples):
    answers = []
    for sample in samples:
        ids = torch.tensor([tokenizer(sample["prompt"])["input_ids"]])
        output = model.generate(ids, do_sample=False, max_new_tokens=8, eos_token_id=STOP)[
            0, ids.shape[1] :
        ]
        answers.append(tokenizer.decode(output, skip_special_tokens=True))
    return answers


def test_evaluations_are_of_the_policy_that_they_name(vllm_run, assets):
    lines = vllm_run.metrics
    assert [line["eval/policy_version"] for line in lines if "eval/scores" in line] == [0, 2, 4]
    assert all(set(lines[step]) >= EVAL_METRICS for step in (0, 2, 3))
    samples = read_json_lines(vllm_run.run_dir / "samples.jsonl")
    by_version = {v: [s for s in samples if s["policy_version"] == v] for v in (0, 2, 4)}
    assert [len(of_version) for of_version in by_version.values()] == [32, 32, 32]
    for line in (lines[0], lines[2], lines[3]):
        of_version = by_version[line["eval/policy_version"]]
        right = sum(s["response"] == s["ground_truth"] for s in of_version) / 32
        assert line["eval/verifiable_correct_rate"] == pytest.approx(right)
        assert line["eval/verifiable_score"] == pytest.approx(right)
        assert line["eval/scores"] == pytest.approx(sum(s["score"] for s in of_version) / 32)
    tokenizer = AutoTokenizer.from_pretrained(assets / "model")
    for version, path in ((0, assets / "model"), (4, vllm_run.run_dir / "model")):
        answers = greedy_answers(
            AutoModelForCausalLM.from_pretrained(path), tokenizer, by_version[version]
        )
        assert answers == [s["response"] for s in by_version[version]]


def test_final_model_is_the_last_policy_for_transformers_and_for_vllm(vllm_run, assets, tmp_path):
    path = vllm_run.run_dir / "model"
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(path),
        AutoTokenizer.from_pretrained(path),
    )
    assert tokenizer.chat_template
    start = AutoModelForCausalLM.from_pretrained(assets / "model").state_dict()
    weights = model.state_dict()
    assert set(weights) == set(start)
    assert all(
        value.dtype == torch.float32 and (value != start[name]).any()
        for name, value in weights.items()
    )
    samples = read_json_lines(vllm_run.run_dir / "samples.jsonl")[-4:]
    texts_of_prompts = [sample["prompt"] for sample in samples]
    responses, texts, logprobs = answers_of_vllm(path, texts_of_prompts, tmp_path)
    assert texts == [sample["response"] for sample in samples]
    prompts = tokenizer(texts_of_prompts)["input_ids"]
    mine, _ = logprobs_and_entropies(model, prompts, responses, temperature=1.0)
    for theirs, expected in zip(logprobs, mine, strict=True):
        assert theirs == pytest.approx(expected.tolist(), abs=1e-4)


# --------------------------------------------------------------------------- several runs compared

TIMES = ("time/", "perf/episodes", "perf/response", "perf/memory")


@pytest.fixture(scope="module")
def multi_update_run(run_script, tmp_path_factory):
    """Two epochs of two minibatches a step, so several updates between two weight syncs."""
    run = run_script("ppo_sync.py", tmp_path_factory.mktemp("updates"), **MULTI_UPDATE_OPTIONS)
    assert run.returncode == 0, run.output
    return run


MULTI_UPDATE_OPTIONS = {
    "total_episodes": 96,
    "num_epochs": 2,
    "local_mini_batch_size": 16,
    "temperature": 1.3,
    "learning_rate": 2e-3,
    "cliprange": 0.1,
    "save_batches": True,
}


BEFORE_THE_UPDATE = (
    "objective/",
    "val/sequence_lengths",
    "val/num_stop",
    "val/stop_rate",
    "eval/",
    "epoch",
    "episode",
)


def test_two_ranks_do_what_one_does(vllm_run, run_script, small_eval, tmp_path):
    halves = {
        "local_rollout_batch_size": 8,
        "local_mini_batch_size": 16,
        "per_device_train_batch_size": 4,
        "local_rollout_forward_batch_size": 16,
    }
    options = VLLM_OPTIONS | halves | {"eval_dataset": small_eval}
    cpu = {"ACCELERATE_USE_CPU": "true"}
    run = run_script("ppo_sync.py", tmp_path, launcher=TWO_RANKS, env=cpu, timeout=240, **options)
    assert run.returncode == 0, run.output
    one, two = vllm_run.metrics, run.metrics
    assert len(two) == len(one)
    assert set(two[0]) == set(one[0])
    mine, theirs = batch_of(run, 1), batch_of(vllm_run, 1)
    for name in ("prompt_ids", "responses"):
        assert mine[name] == theirs[name], name
    assert torch.equal(mine["scores"], theirs["scores"])
    for name, value in one[0].items():
        if name.startswith(BEFORE_THE_UPDATE) and name != "objective/loss":
            assert two[0][name] == pytest.approx(value, abs=1e-6), name
        elif not name.startswith((*TIMES, "mismatch/", "perf/")):
            assert two[0][name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
    for name, value in one[1].items():
        if not name.startswith((*TIMES, "mismatch/", "perf/")):
            assert two[1][name] == pytest.approx(value, rel=1e-3, abs=1e-3), name
    assert json.loads((run.run_dir / "args.json").read_text())["world_size"] == 2


def test_minibatches_are_a_new_partition_each_epoch_and_step(multi_update_run):
    lines = read_json_lines(multi_update_run.run_dir / "mini_batches.jsonl")
    epochs, size = MULTI_UPDATE_OPTIONS["num_epochs"], len(lines[0])
    per_epoch = len(lines) // (3 * epochs)
    assert per_epoch > 1 and epochs > 1
    passes = [lines[i : i + per_epoch] for i in range(0, len(lines), per_epoch)]
    for mini_batches in passes:
        assert [len(rows) for rows in mini_batches] == [size] * per_epoch
        assert sorted(row for rows in mini_batches for row in rows) == list(range(size * per_epoch))
    assert len({str(mini_batches) for mini_batches in passes}) == len(passes) == 3 * epochs
