"""The loop of main(), with a stub in place of vLLM: what a step makes of a rollout, in seconds.

Everything else is real: the debug model and data, the thread and the queues, the updates.
"""

import functools
import importlib
import math
import re
import shutil

import pytest
import torch
import train_reward_model
from accelerate import Accelerator
from helpers import ASYNC, PPO, SCRIPTS, TRAINER, hooks, loops, preference_pairs
from helpers.files import read_json_lines, write_rows
from helpers.formulas import gae_by_definition
from helpers.loops import EPISODES, STEPS, STOP
from helpers.runs import METRICS_OF_POLICY_UPDATES, response_tokens
from pyarrow import parquet
from safetensors.torch import load_file
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
)


def rough_score(data_source, response, ground_truth):
    """Shares of 1, and no score at all of about a third of the stub's answers."""
    if response.startswith(("6", "7", "8")):
        raise OSError("the grader is out of paper")
    return 0.3 * (1 + len(response) % 2)


@pytest.fixture(scope="module")
def run_loop(run_main, few_prompts):
    """run_loop("ppo_sync.py", rough=False): a run, made once for all tests."""

    @functools.cache
    def run(name, rough):
        if not rough:
            return run_main(name)
        changes = {
            "stop_token": "9",  # which the stub never says
            "eval_dataset": few_prompts / "test.parquet",
            "num_evals": 1,
            "eval_prompts": 0,
            "non_stop_penalty": False,
            "mismatch_mask": "token",
            "mismatch_mask_range": 1.5 if name in ASYNC else 1.0001,
            "tis_cap": 1.0,  # in ppo_sync.py all weights are close to it
            "warm_up_steps": 2,
        }
        if name in PPO:
            changes |= {"value_warmup_steps": 1}
        return run_main(name, rough_score, **changes)

    return run


@pytest.fixture(params=SCRIPTS)
def loop(request, run_loop):
    """The run of one of the scripts; of(...) leaves out others."""
    return run_loop(request.param, rough=False)


@pytest.fixture(params=SCRIPTS)
def rough_loop(request, run_loop):
    """A run whose rewards fail, whose value model learns alone at first, and so on."""
    return run_loop(request.param, rough=True)


def of(fixture, scripts):
    return pytest.mark.parametrize(fixture, scripts, indirect=True)


# --------------------------------------------------------------------------- weights and requests


IN_TURNS = ["weights 0", "request 1", "weights 1", "request 2", "weights 2", "request 3"]
BESIDE_TRAINING = ["weights 0", "request 1", "weights 0", "request 2", "weights 1", "request 3"]
LAST_EVALUATION = ["weights 3", "request 4"]


def test_weights_go_out_before_the_request_that_they_answer(loop, run_loop):
    """After the request vLLM is busy: weights would change under it."""
    expected = BESIDE_TRAINING if loop.name in ASYNC else IN_TURNS
    assert loop.vllm.order == expected
    assert run_loop(loop.name, rough=True).vllm.order == expected + LAST_EVALUATION


@pytest.mark.parametrize("name", ASYNC)
def test_without_async_mode_weights_are_those_of_the_step_before(name, run_main):
    run = run_main(name, async_mode=False)
    assert run.vllm.order == IN_TURNS
    assert [line["policy/version"] for line in run.metrics] == [0, 1, 2]
    assert [line["policy/staleness"] for line in run.metrics] == [0, 0, 0]


def test_batches_are_paired_with_the_version_that_sampled(loop):
    sampled = [0, 0, 1] if loop.name in ASYNC else [0, 1, 2]
    samples = read_json_lines(loop.run_dir / "rollouts.jsonl")
    assert [sample["policy_version"] for sample in samples[::4]] == sampled
    if loop.name in ASYNC:
        assert [line["policy/version"] for line in loop.metrics] == [0, 1, 2]
        assert [line["policy/staleness"] for line in loop.metrics] == [0, 1, 1]


def test_last_evaluation_has_the_weights_that_are_saved(rough_loop):
    samples = read_json_lines(rough_loop.run_dir / "samples.jsonl")
    assert [sample["policy_version"] for sample in samples] == [0] * 8 + [3] * 8
    evaluated = [line.get("eval/policy_version") for line in rough_loop.metrics]
    assert evaluated == [0, None, 3]
    saved = load_file(rough_loop.run_dir / "model" / "model.safetensors")
    of_vllm = rough_loop.vllm.policy.model.state_dict()
    assert saved.keys() == of_vllm.keys()
    assert all(torch.equal(saved[name], of_vllm[name]) for name in saved)


def test_curves_are_drawn_at_evaluations(rough_loop, run_main):
    drawn = [("plot_runs.py", 1), ("plot_runs.py", 3)]  # with the lines that have evaluations
    assert rough_loop.programs == [("provenance.py", 0), *drawn, ("summarize_run.py", 3)]
    uploading = run_main(rough_loop.name, push_to_hub=True, total_episodes=EPISODES)
    names = [name for name, _ in uploading.programs]
    assert names == ["provenance.py", "summarize_run.py", "push_to_hub.py"]


def test_program_that_is_missing_is_no_fault_but_of_an_upload(run_main, tmp_path, monkeypatch):
    """As of a copied script."""
    monkeypatch.setattr("ppo_sync.PROGRAMS", tmp_path / "scripts")
    assert run_main("ppo_sync.py", total_episodes=EPISODES).programs == []
    with pytest.raises(ValueError, match="--push_to_hub needs"):
        run_main("ppo_sync.py", push_to_hub=True)


def test_evaluations_have_seeds_of_their_own_the_same_each_time(rough_loop):
    seeds = rough_loop.vllm.seeds
    assert seeds[EPISODES : EPISODES + 8] == seeds[-8:] == list(range(8))
    assert len(set(seeds)) == len(seeds) - 8


def test_every_step_has_seeds_and_minibatches_of_its_own(loop):
    assert len(set(loop.vllm.seeds)) == len(loop.vllm.seeds) == STEPS * EPISODES
    assert len(loop.mini_batches) == 2 * STEPS
    assert len({str(rows) for rows in loop.mini_batches}) == 2 * STEPS
    for first, second in zip(loop.mini_batches[::2], loop.mini_batches[1::2], strict=True):
        assert sorted(first + second) == list(range(EPISODES))
    for batch in loop.batches:  # the samples of a prompt are side by side
        assert all(batch.prompt_ids[i] == batch.prompt_ids[i - i % 4] for i in range(EPISODES))


# -------------------------------------------------------------------------------- what a batch has


@of("loop", PPO)
def test_score_is_on_the_last_token_and_the_kl_is_a_penalty_on_all(loop):
    for step, batch in enumerate(loop.batches):
        rewards = response_tokens(batch.mask, batch.rewards)
        logprobs = response_tokens(batch.mask, batch.logprobs)
        ref_logprobs = response_tokens(batch.mask, batch.ref_logprobs)
        for i, score in enumerate(batch.scores.tolist()):
            expected = -0.3 * (logprobs[i] - ref_logprobs[i])
            expected[-1] += score
            torch.testing.assert_close(rewards[i], expected, rtol=1e-5, atol=1e-6)
        assert (batch.rewards[~batch.mask.bool()] == 0).all()
        if step > 0:  # the policy is no longer the reference policy
            assert (batch.logprobs - batch.ref_logprobs).abs().max() > 1e-3


@of("loop", PPO)
def test_advantages_and_returns_follow_from_rewards_and_values(loop):
    for batch in loop.batches:
        rewards = response_tokens(batch.mask, batch.rewards)
        values = response_tokens(batch.mask, batch.values)
        advantages, returns = [], []
        for row, value in zip(rewards, values, strict=True):
            advantages.append(gae_by_definition(row, value, gamma=0.9, lam=0.8))
            returns.append(gae_by_definition(row, value, gamma=0.9, lam=0.7) + value)
        every = torch.cat(advantages)
        found = torch.cat(response_tokens(batch.mask, batch.advantages))
        expected = (every - every.mean()) / every.std()
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        found = torch.cat(response_tokens(batch.mask, batch.returns))
        torch.testing.assert_close(found, torch.cat(returns), rtol=1e-4, atol=1e-5)


def test_weights_are_learner_over_sampler_cut_off_and_0_where_far_from_1(rough_loop):
    farthest = math.log(1.5 if rough_loop.name in ASYNC else 1.0001)
    masked = []
    for batch, line in zip(rough_loop.batches, rough_loop.metrics, strict=True):
        log_ratio = (batch.logprobs - batch.sampler_logprobs) * batch.mask
        apart = log_ratio.abs() > farthest
        masked.append(apart.sum().item() / batch.mask.sum().item())
        assert line["mismatch/masked"] == pytest.approx(masked[-1], abs=1e-6)
        assert line["mismatch/tis_clipfrac"] > 0
    if rough_loop.name in ASYNC:
        assert masked.pop(0) == 0
    assert all(0.1 < share < 0.9 for share in masked)


@pytest.mark.parametrize("name", SCRIPTS)
def test_without_kl_no_reference_policy_is_loaded(name, run_main, monkeypatch):
    trained = []
    script = importlib.import_module(name.removesuffix(".py"))

    def note(call, given):
        trained.append(given["trained"])
        return call()

    hooks.around(script, "load_model", note, put=monkeypatch.setattr)
    run = run_main(name, beta=0.0, total_episodes=EPISODES)
    (line,), (batch,) = run.metrics, run.batches
    assert trained == ([True, True] if name in PPO else [True])
    assert {"objective/kl", "objective/non_score_reward", "objective/rlhf_reward"}.isdisjoint(line)
    assert all(map(math.isfinite, line.values()))
    assert batch.ref_logprobs is None
    if name in PPO:
        rewards = torch.zeros_like(batch.mask)
        rewards[range(EPISODES), batch.lengths - 1] = batch.scores
        assert torch.equal(batch.rewards, rewards) and batch.scores.any()


@pytest.mark.parametrize("name", [*SCRIPTS, TRAINER])
def test_optimizers_are_fused_and_gradients_in_memory_once(
    name, run_main, assets, tmp_path, monkeypatch
):
    pairs = [{"prompt": "53=", "chosen": "35", "rejected": "53"}] * 128
    dataset = str(write_rows(tmp_path / "pairs.jsonl", pairs))
    options = {"dataset": dataset, "model_name_or_path": str(assets / "model")}
    fused, once = [], []

    def note_optimizer(call, given):
        fused.append(given["fused"])
        return call()

    def note_model(call, given):
        once.append(given["self"].ddp_handler.gradient_as_bucket_view)
        if name == TRAINER:
            raise RuntimeError("enough is seen")
        return call()

    hooks.around(torch.optim.AdamW, "__init__", note_optimizer, put=monkeypatch.setattr)
    hooks.around(Accelerator, "prepare_model", note_model, put=monkeypatch.setattr)
    if name == TRAINER:
        with pytest.raises(RuntimeError, match="enough is seen"):
            train_reward_model.main(preference_pairs.tiny_args(**options))
    else:
        run_main(name, total_episodes=EPISODES)
    assert fused == ([True, True] if name in PPO else [True])
    assert once and all(once)


@pytest.mark.parametrize("decay", [0.0, 0.25])
@pytest.mark.parametrize("name", SCRIPTS)
def test_gradient_norms_are_means_over_updates_whose_decay_is_that_of_the_flag(
    name, decay, run_main, monkeypatch
):
    script = importlib.import_module(name.removesuffix(".py"))
    norms = {"optim/grad_norm": [], "optim/value_grad_norm": []}

    def note(call, given):
        norm = call()
        is_policy = isinstance(given["model"], script.PolicyModel)
        norms["optim/grad_norm" if is_policy else "optim/value_grad_norm"].append(norm.item())
        assert given["optimizer"].param_groups[0]["weight_decay"] == decay  # torch's is 0.01
        return norm

    hooks.around(script, "apply_gradients", note, put=monkeypatch.setattr)
    (line,) = run_main(name, weight_decay=decay, total_episodes=EPISODES).metrics
    for metric, of_updates in norms.items():
        assert len(of_updates) == (2 if metric in line else 0)
        assert not of_updates or line[metric] == pytest.approx(sum(of_updates) / 2)


@pytest.mark.parametrize("name", PPO)
def test_value_model_is_that_of_its_flag_also_beside_a_reward_model(
    name, run_main, reward_model, tmp_path, monkeypatch
):
    script, loaded = importlib.import_module(name.removesuffix(".py")), []

    def note(call, given):
        loaded.append((given["path"], given["trained"]))
        return call()

    hooks.around(script, "load_classifier", note, put=monkeypatch.setattr)
    value_model = str(shutil.copytree(reward_model, tmp_path / "value"))
    paths = {"reward_model_path": str(reward_model), "value_model_path": value_model}
    run_main(name, **paths, total_episodes=EPISODES)
    assert loaded == [(value_model, True), (str(reward_model), False)]


# --------------------------------------------------------------------------------------- schedules


def test_schedule_of_each_model_runs_over_its_own_updates(rough_loop):
    # Two updates a step, and a warm-up of two
    if rough_loop.name in PPO:
        expected = {"value": [0.5, 1, 1, 0.75, 0.5, 0.25], "policy": [0.5, 1, 1, 0.5]}
    else:
        expected = {"policy": [0.5, 1, 1, 0.75, 0.5, 0.25]}
    rates = {"value": 2e-3, "policy": 1e-3}
    for model, shares in expected.items():
        used = [rate / rates[model] for rate in rough_loop.rates[model]]
        assert used == pytest.approx(shares), model
    assert rough_loop.rates.keys() == expected.keys()
    logged = [line["lr"] for line in rough_loop.metrics if line["lr"] > 0]
    assert logged == rough_loop.rates["policy"][1::2]


@of("rough_loop", PPO)
def test_policy_rests_while_the_value_model_warms_up(rough_loop):
    first, *others = rough_loop.metrics
    assert METRICS_OF_POLICY_UPDATES.isdisjoint(first)
    assert all(set(line) >= METRICS_OF_POLICY_UPDATES for line in others)
    assert [line["lr"] > 0 for line in rough_loop.metrics] == [False, True, True]
    assert first["loss/value_avg"] > 0 and first["optim/value_grad_norm"] > 0
    # Two updates a step, of two micro-batches each
    assert rough_loop.forwards == [0, 0, 2, 2, 2, 2]
    before, _, after_the_step, later, *_ = rough_loop.weights
    assert torch.equal(before, after_the_step)
    assert not torch.equal(after_the_step, later)


@pytest.mark.parametrize("name", PPO)
def test_beta_follows_the_kl_of_whole_responses_and_rests_with_the_policy(name, run_main):
    """1909.08593, 2.2: an error clipped to a fifth; of a horizon of 100 episodes a step is 16."""
    run = run_main(
        name,
        total_episodes=5 * EPISODES,
        lr_scheduler_type="constant",
        value_warmup_steps=2,
        seed=3,  # in which the KL is on both sides of the target
        kl_target=0.2,
        kl_horizon=100,
    )
    expected, errors = [0.3, 0.3, 0.3], []
    for batch in run.batches[2:-1]:
        kl = ((batch.logprobs - batch.ref_logprobs) * batch.mask).sum(1).mean().item()
        errors.append(min(0.2, max(-0.2, kl / 0.2 - 1)))
        expected.append(expected[-1] * (1 + errors[-1] * 16 / 100))
    assert [line["objective/kl_coef"] for line in run.metrics] == pytest.approx(expected, rel=1e-6)
    assert max(errors) > 0 > min(errors)


# ------------------------------------------------------------------------------- rewards that fail


def scores_by_rough_score(texts):
    """None where it fails."""
    scores = []
    for text in texts:
        try:
            scores.append(rough_score(None, text, None))
        except OSError:
            scores.append(None)
    return scores


@pytest.fixture(scope="module")
def tokenizer(assets):
    return AutoTokenizer.from_pretrained(assets / "model")


def test_response_whose_reward_failed_is_no_wrong_answer(rough_loop, tokenizer):
    for batch, line in zip(rough_loop.batches, rough_loop.metrics, strict=True):
        texts = tokenizer.batch_decode(batch.responses, skip_special_tokens=True)
        expected = scores_by_rough_score(texts)
        failed = torch.tensor([score is None for score in expected])
        assert 0 < failed.sum() < EPISODES
        assert batch.scored.tolist() == (~failed).tolist()
        torch.testing.assert_close(
            batch.scores, torch.tensor([score or 0.0 for score in expected]), rtol=0, atol=1e-6
        )
        known = torch.tensor([score for score in expected if score is not None])
        score = known.mean().item()
        penalty = line["objective/non_score_reward"]
        assert line["objective/rlhf_reward"] == pytest.approx(score + penalty, abs=1e-5)
        assert line["objective/scores"] == pytest.approx(score)
        assert line["objective/scores_std"] == pytest.approx(known.std(correction=0).item())
        assert line["objective/reward_failures"] == failed.sum()


@of("rough_loop", PPO)
def test_loss_and_whitening_are_over_scored_responses(rough_loop):
    for batch in rough_loop.batches:
        assert torch.equal(batch.loss_mask, batch.mask * batch.scored[:, None])
        in_loss = batch.loss_mask.bool()
        assert (batch.advantages[~in_loss] == 0).all()
        assert batch.advantages[in_loss].mean().item() == pytest.approx(0, abs=1e-5)
        assert batch.advantages[in_loss].std().item() == pytest.approx(1, abs=1e-4)


def test_failed_answers_to_held_out_prompts_are_counted(rough_loop):
    samples = read_json_lines(rough_loop.run_dir / "samples.jsonl")
    evaluated = [line for line in rough_loop.metrics if "eval/scores" in line]
    assert len(samples) == 8 * len(evaluated) == 16
    for i, line in enumerate(evaluated):
        of_line = samples[8 * i : 8 * (i + 1)]
        scores = [sample["score"] for sample in of_line]
        assert scores == scores_by_rough_score([sample["response"] for sample in of_line])
        known = [score for score in scores if score is not None]
        assert line["eval/scores"] == pytest.approx(sum(known) / len(known))
        assert line["eval/reward_failures"] == scores.count(None)


@pytest.mark.slow
def test_evaluations_have_as_many_prompts_as_asked_for_the_same_for_every_seed(
    run_main, few_prompts
):
    """rough_loop has all of them."""
    asked = []
    for seed, name in enumerate(SCRIPTS):
        options = {"eval_dataset": few_prompts / "test.parquet", "total_episodes": EPISODES}
        run = run_main(name, seed=seed, eval_prompts=3, **options)
        samples = read_json_lines(run.run_dir / "samples.jsonl")
        asked.append([sample["ground_truth"] for sample in samples])
    assert len(set(asked[0])) == 3 and asked == [asked[0]] * 3
    rows = parquet.read_table(few_prompts / "test.parquet").to_pylist()
    assert asked[0] != [row["reward_model"]["ground_truth"] for row in rows[:3]]


@pytest.mark.parametrize("name", SCRIPTS)
def test_batch_whose_every_reward_failed_ends_the_run(name, run_main):
    def score(data_source, response, ground_truth):
        raise OSError("the grader is out of paper")

    run = run_main(name, score, non_stop_penalty=False)
    cause = r"(?s)the reward failed on all responses: .*OSError: the grader is out of paper"
    assert re.match(cause, str(run.error))
    assert run.weights == [] and not (run.run_dir / "model").exists()


@pytest.mark.parametrize("name", SCRIPTS)
def test_sampler_that_has_lost_weights_ends_the_run(name, run_main, monkeypatch):
    report = loops.report_logprobs
    monkeypatch.setattr(
        loops, "report_logprobs", lambda *args: [[p - 0.01 for p in row] for row in report(*args)]
    )
    run = run_main(name)
    assert re.match("vLLM's log-probabilities are off the learner's by 0.01", str(run.error))
    assert not (run.run_dir / "metrics.jsonl").exists()


@pytest.mark.parametrize("name", SCRIPTS)
def test_infinite_loss_stops_the_run_and_keeps_the_batch(name, run_main, tmp_path, monkeypatch):
    script = importlib.import_module(name.removesuffix(".py"))
    monkeypatch.setattr(script, "lr_multiplier", lambda *_: 1e33)
    with pytest.raises(FloatingPointError, match="gradient is not finite"):
        run_main(name, output_dir=tmp_path, local_mini_batch_size=EPISODES)
    assert len(read_json_lines(tmp_path / "run" / "metrics.jsonl")) == 1
    assert len(read_json_lines(tmp_path / "run" / "rollouts.jsonl")) == 4  # of the step before
    bad_batch = torch.load(tmp_path / "run" / "bad_batch.pt", weights_only=False)
    assert bad_batch["logprobs"].isnan().any()
    assert not (tmp_path / "run" / "model").exists()


# ------------------------------------------------------------------------------------ reward model


@pytest.mark.parametrize("name", PPO)
def test_reward_model_scores_and_starts_the_value_model(name, run_main, reward_model):
    run = run_main(
        name,
        reward_model_path=reward_model,
        reward_model_multiplier=2.0,
        apply_verifiable_reward=False,
        non_stop_penalty=False,
        total_episodes=2 * EPISODES,
    )
    model = AutoModelForSequenceClassification.from_pretrained(reward_model)
    for batch, line in zip(run.batches, run.metrics, strict=True):
        hidden = [
            model.base_model(torch.tensor([prompt + response])).last_hidden_state[0]
            for prompt, response in batch.sequences
        ]
        of_model = torch.cat([model.score(one[-1]) for one in hidden]).detach()
        assert len(set(of_model.tolist())) > EPISODES / 2
        torch.testing.assert_close(batch.scores, 2.0 * of_model, rtol=0, atol=1e-4)
        score = of_model.mean().item()
        assert line["objective/reward_model_score"] == pytest.approx(score, abs=1e-4)
        if batch is run.batches[0]:
            values = response_tokens(batch.mask, batch.values)
            for (prompt, _), one, found in zip(batch.sequences, hidden, values, strict=True):
                expected = model.score(one[len(prompt) - 1 : -1]).flatten().detach().double()
                torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
                assert expected.abs().max() > 1e-3  # a head of its own would be zeros


# ------------------------------------------------------------------------------- what a run leaves


@pytest.mark.parametrize("name", SCRIPTS)
def test_all_ranks_have_the_run_name_of_the_first(name, run_main, monkeypatch):
    """Without --run_name it has the time in it, which need not be the same on all."""
    script = importlib.import_module(name.removesuffix(".py"))
    monkeypatch.setattr(script, "broadcast_object_list", lambda names: ["first"])
    run = run_main(name, run_name=None, total_episodes=EPISODES)
    assert [path.name for path in run.run_dir.parent.iterdir()] == ["first"]


def test_few_responses_of_every_step_can_be_read(rough_loop, tokenizer):
    samples = read_json_lines(rough_loop.run_dir / "rollouts.jsonl")
    assert [sample["training_step"] for sample in samples] == [1] * 4 + [2] * 4 + [3] * 4
    for i, sample in enumerate(samples):
        step, row = divmod(i, 4)
        batch = rough_loop.batches[step]
        response = batch.responses[row]
        assert tokenizer(sample["prompt"])["input_ids"] == batch.prompt_ids[row]
        assert sample["response"] == tokenizer.decode(response, skip_special_tokens=True)
        assert [sample["score"]] == scores_by_rough_score([sample["response"]])
        assert sample["length"] == len(response)
        assert sample["stopped"] == (response[-1] == STOP)
        advantages = batch.advantages[row][batch.mask[row].bool()]
        assert sample["advantages"] == advantages.tolist()
        assert sample["token_ids"] == response
    for name in ("score", "stopped"):
        assert len({sample[name] for sample in samples}) > 1, name
    assert None in {sample["score"] for sample in samples}


def test_grpo_keeps_a_whole_group_of_every_step(run_main):
    sizes = {"number_samples_per_prompt": 8, "local_rollout_batch_size": EPISODES // 8}
    run = run_main("grpo_vllm_async.py", total_episodes=EPISODES, **sizes)
    samples = read_json_lines(run.run_dir / "rollouts.jsonl")
    assert len(samples) == 8 and len({sample["prompt"] for sample in samples}) == 1


def test_saved_model_stops_where_the_run_did(rough_loop, tokenizer):
    saved = GenerationConfig.from_pretrained(rough_loop.run_dir / "model")
    assert saved.eos_token_id == [STOP, tokenizer.convert_tokens_to_ids("9")]
