"""The loop of main(), with a stub in place of vLLM: what a step makes of a rollout, in seconds.

Everything else is real: the debug model and data, the thread and the queues, the updates.
"""

import functools
import importlib
import json
import math
import re
import signal
import time

import datasets
import pytest
import torch
from helpers import ASYNC, GRPO, OLD, PPO, SCRIPTS, hooks, loops
from helpers.files import read_json_lines
from helpers.formulas import gae_by_definition
from helpers.loops import EPISODES, STEPS
from helpers.rollouts import STOP
from helpers.runs import METRICS_OF_POLICY_UPDATES, differences, response_tokens, without_clock
from rich.console import Console
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerBase,
)

import ppo_sync


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
            "model_name_or_path": few_prompts / "model",
            "stop_token": "9",  # which the stub never says
            "eval_dataset": few_prompts / "test.parquet",
            "num_evals": 1,
            "non_stop_penalty": False,
            "mismatch_mask": "token",
            "mismatch_mask_range": 1.5 if name in ASYNC else 1.0001,
            "lr_scheduler_type": None,
        }
        if name in PPO:
            changes |= {"value_warmup_steps": 1, "warm_up_steps": 2}
        return run_main(name, rough_score, **changes)

    return run


@pytest.fixture(params=SCRIPTS)
def loop(request, run_loop):
    """The run of one of the scripts; of_ppo, of_grpo and of_async leave out those without."""
    return run_loop(request.param, rough=False)


@pytest.fixture(params=SCRIPTS)
def rough_loop(request, run_loop):
    """A run whose rewards fail, whose value model learns alone at first, and so on."""
    return run_loop(request.param, rough=True)


def of(fixture, scripts):
    return pytest.mark.parametrize(fixture, scripts, indirect=True)


of_ppo, of_grpo, of_async = of("loop", PPO), of("loop", GRPO), of("loop", ASYNC)


def test_weights_are_sent_before_each_request(loop):
    expected = [0, 0, 1] if loop.name in ASYNC else [0, 1, 2]
    assert loop.vllm.synced == expected


def test_learning_rate_falls_with_every_update(loop):
    falling = [(6 - update) / 6 for update in range(6)]  # two updates a step
    assert loop.rates["policy"] == pytest.approx([1e-3 * share for share in falling])
    if loop.name in PPO:
        assert loop.rates["value"] == pytest.approx([2e-3 * share for share in falling])
    assert [line["lr"] for line in loop.metrics] == loop.rates["policy"][1::2]


@of_async
def test_weights_go_out_before_the_request_that_they_answer(loop):
    """After the request vLLM is busy: weights would change under it."""
    expected = ["weights 0", "request 1", "weights 0", "request 2", "weights 1", "request 3"]
    assert loop.vllm.order == expected


def test_every_step_has_seeds_and_minibatches_of_its_own(loop):
    assert len(set(loop.vllm.seeds)) == len(loop.vllm.seeds) == STEPS * EPISODES
    assert len(loop.mini_batches) == 2 * STEPS
    assert len({str(rows) for rows in loop.mini_batches}) == 2 * STEPS
    for first, second in zip(loop.mini_batches[::2], loop.mini_batches[1::2], strict=True):
        assert sorted(first + second) == list(range(EPISODES))


@of_ppo
def test_score_is_on_the_last_token_and_the_kl_is_a_penalty_on_all(loop):
    for step, batch in enumerate(loop.batches):
        rewards = response_tokens(batch.responses, batch.rewards)
        logprobs = response_tokens(batch.responses, batch.logprobs)
        ref_logprobs = response_tokens(batch.responses, batch.ref_logprobs)
        for i, score in enumerate(batch.scores.tolist()):
            expected = -0.3 * (logprobs[i] - ref_logprobs[i])
            expected[-1] += score
            torch.testing.assert_close(rewards[i], expected, rtol=1e-5, atol=1e-6)
        assert (batch.rewards[~batch.mask.bool()] == 0).all()
        if step > 0:  # the policy is no longer the reference policy
            assert (batch.logprobs - batch.ref_logprobs).abs().max() > 1e-3


@of_ppo
def test_advantages_and_returns_follow_from_rewards_and_values(loop):
    for batch in loop.batches:
        rewards = response_tokens(batch.responses, batch.rewards)
        values = response_tokens(batch.responses, batch.values)
        advantages, returns = [], []
        for row, value in zip(rewards, values, strict=True):
            advantages.append(gae_by_definition(row, value, gamma=0.9, lam=0.8))
            returns.append(gae_by_definition(row, value, gamma=0.9, lam=0.7) + value)
        every = torch.cat(advantages)
        found = torch.cat(response_tokens(batch.responses, batch.advantages))
        expected = (every - every.mean()) / every.std()
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        found = torch.cat(response_tokens(batch.responses, batch.returns))
        torch.testing.assert_close(found, torch.cat(returns), rtol=1e-4, atol=1e-5)


@of_grpo
def test_groups_have_advantages_of_their_own(loop):
    for batch in loop.batches:
        groups = batch.scores.view(-1, 4).double()
        assert all(batch.prompt_ids[i] == batch.prompt_ids[i - i % 4] for i in range(EPISODES))
        spread = groups.std(1, keepdim=True)
        expected = ((groups - groups.mean(1, keepdim=True)) / spread.clamp(min=1e-3)).flatten()
        found = response_tokens(batch.responses, batch.advantages)
        for row, advantage in zip(found, expected, strict=True):
            torch.testing.assert_close(row, torch.full_like(row, advantage), rtol=1e-5, atol=1e-6)


def test_importance_weights_are_learner_over_sampler_and_cut_off(loop):
    far = 0
    for batch in loop.batches:
        ratio = torch.exp((batch.logprobs - batch.sampler_logprobs).double()) * batch.mask
        far += int((ratio > 2.0).sum())
        if loop.name in GRPO:  # they are computed in the update, and cut off there
            args = loop.script.Args(importance_sampling_level="token")
            found = loop.script.importance_weights(
                batch.logprobs, batch.sampler_logprobs, batch.mask, args
            )
            found, expected = found * batch.mask, ratio
        else:
            found, expected = batch.importance_weights, ratio.clamp(max=2.0)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    assert (far > 10) == (loop.name in ASYNC)


@of_async
def test_batches_are_paired_with_the_version_that_sampled(loop):
    assert [line["policy/version"] for line in loop.metrics] == [0, 1, 2]
    assert [line["policy/staleness"] for line in loop.metrics] == [0, 1, 1]


# -------------------------------------------------------------------------------------- schedules


def test_schedule_of_each_model_runs_over_its_own_updates(rough_loop):
    # Two updates a step, and a warm-up of two
    if rough_loop.name in PPO:
        expected = {"value": [0.5, 1, 1, 0.75, 0.5, 0.25], "policy": [0.5, 1, 1, 0.5]}
    else:
        expected = {"policy": [1] * 6}  # GRPO's default is a constant
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


def mean_of_known(scores):
    known = [score for score in scores if score is not None]
    return sum(known) / len(known)


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
        assert torch.equal(batch.loss_mask, batch.mask * batch.scored[:, None])
        known = torch.tensor([score for score in expected if score is not None])
        assert line["objective/scores"] == pytest.approx(mean_of_known(expected))
        assert line["objective/scores_std"] == pytest.approx(known.std(correction=0).item())
        assert line["objective/verifiable_score"] == pytest.approx(mean_of_known(expected))
        assert line["objective/reward_failures"] == failed.sum()
        count = f"the reward failed on {int(failed.sum())} of {EPISODES} responses"
        assert count in rough_loop.output


def test_failed_answers_to_held_out_prompts_are_counted(rough_loop):
    samples = read_json_lines(rough_loop.run_dir / "samples.jsonl")
    evaluated = [line for line in rough_loop.metrics if "eval/scores" in line]
    assert len(samples) == 8 * len(evaluated) == 16
    assert sum(line["eval/reward_failures"] for line in evaluated) > 0
    for i, line in enumerate(evaluated):
        of_line = samples[8 * i : 8 * (i + 1)]
        scores = [sample["score"] for sample in of_line]
        assert scores == scores_by_rough_score([sample["response"] for sample in of_line])
        assert line["eval/scores"] == pytest.approx(mean_of_known(scores))
        assert line["eval/reward_failures"] == scores.count(None)


def test_share_of_the_reward_is_a_score_and_no_right_answer(rough_loop):
    for line in rough_loop.metrics:
        for group in ("objective", "eval"):
            if f"{group}/scores" in line:
                assert line[f"{group}/verifiable_correct_rate"] == 0
                assert line[f"{group}/verifiable_score"] == pytest.approx(line[f"{group}/scores"])


@of("rough_loop", PPO)
def test_advantages_are_whitened_over_the_scored_responses(rough_loop):
    for batch in rough_loop.batches:
        in_loss = (batch.mask * batch.scored[:, None]).bool()
        assert (batch.advantages[~in_loss] == 0).all()
        assert batch.advantages[in_loss].mean().item() == pytest.approx(0, abs=1e-5)
        assert batch.advantages[in_loss].std().item() == pytest.approx(1, abs=1e-4)


@of("rough_loop", GRPO)
def test_response_without_a_score_does_not_count_in_its_group(rough_loop):
    spreads = 0
    for batch in rough_loop.batches:
        found = batch.advantages[:, 0].view(-1, 4)
        groups, scored = batch.scores.view(-1, 4), batch.scored.view(-1, 4).bool()
        assert (found[~scored] == 0).all()
        for advantages, scores, known in zip(found, groups, scored, strict=True):
            scores = scores[known]
            expected = torch.zeros_like(scores)
            if len(scores.unique()) > 1:
                expected = (scores - scores.mean()) / scores.std()
                spreads += len(scores) < 4
            torch.testing.assert_close(advantages[known], expected, rtol=1e-4, atol=1e-5)
    assert spreads > 0


@pytest.mark.parametrize("name", SCRIPTS)
def test_batch_whose_every_reward_failed_ends_the_run(name, run_main):
    def score(data_source, response, ground_truth):
        if ground_truth not in response:  # the check before the run tries the ground truth
            raise OSError("the grader is out of paper")
        return 1.0

    run = run_main(name, score, non_stop_penalty=False)
    cause = r"the reward failed on all .*responses: OSError.*the grader is out of paper"
    assert re.match(cause, str(run.error))
    assert run.weights == [] and not (run.run_dir / "model").exists()


# ------------------------------------------------------------------------------ sampler and learner


def test_tokens_on_which_sampler_and_learner_disagree_are_masked(rough_loop):
    farthest = math.log(1.5 if rough_loop.name in ASYNC else 1.0001)
    masked = []
    for batch, line in zip(rough_loop.batches, rough_loop.metrics, strict=True):
        log_ratio = (batch.logprobs - batch.sampler_logprobs) * batch.mask
        apart = log_ratio.abs() > farthest
        masked.append(apart.sum().item() / batch.mask.sum().item())
        assert line["mismatch/masked"] == pytest.approx(masked[-1], abs=1e-6)
        if rough_loop.name in PPO:  # GRPO's weights are made in the update
            expected = log_ratio.exp().clamp(max=2.0) * batch.mask * ~apart
            torch.testing.assert_close(batch.importance_weights, expected, rtol=1e-5, atol=1e-6)
    if rough_loop.name in ASYNC:
        assert masked.pop(0) == 0
    assert all(0.1 < share < 0.9 for share in masked)


def test_nothing_is_masked_by_default(loop):
    assert [line["mismatch/masked"] for line in loop.metrics] == [0, 0, 0]


# ------------------------------------------------------------------------------- what a run leaves


def test_few_responses_of_every_step_can_be_read(rough_loop, tokenizer):
    samples = read_json_lines(rough_loop.run_dir / "rollouts.jsonl")
    assert [sample["training_step"] for sample in samples] == [1] * 4 + [2] * 4 + [3] * 4
    for i, sample in enumerate(samples):
        step, row = divmod(i, 4)
        batch, line = rough_loop.batches[step], rough_loop.metrics[step]
        response = batch.responses[row]
        assert tokenizer(sample["prompt"])["input_ids"] == batch.prompt_ids[row]
        assert sample["response"] == tokenizer.decode(response, skip_special_tokens=True)
        assert [sample["score"]] == scores_by_rough_score([sample["response"]])
        assert sample["length"] == len(response)
        assert sample["stopped"] == (response[-1] == STOP)
        advantages = batch.advantages[row, : len(response)]
        assert sample["advantage"] == pytest.approx(advantages.mean().item(), abs=1e-6)
        assert sample["policy_version"] == line["policy/version"] - line.get("policy/staleness", 0)
    for name in ("score", "advantage", "stopped"):
        assert len({sample[name] for sample in samples}) > 1, name
    assert None in {sample["score"] for sample in samples}


def test_saved_model_stops_where_the_run_did(rough_loop, few_prompts, tokenizer):
    saved, original = (
        json.loads((folder / "generation_config.json").read_text())
        for folder in (rough_loop.run_dir / "model", few_prompts / "model")
    )
    nine = tokenizer.convert_tokens_to_ids("9")
    versions = {"transformers_version": saved["transformers_version"]}
    assert saved == original | versions | {"eos_token_id": [STOP, nine]}
    GenerationConfig.from_pretrained(rough_loop.run_dir / "model")

    model = AutoModelForCausalLM.from_pretrained(rough_loop.run_dir / "model")
    prompt = torch.tensor([rough_loop.batches[0].prompt_ids[0]])
    torch.manual_seed(0)
    hot = {"do_sample": True, "temperature": 2.0, "top_k": 0, "top_p": 1.0}
    output = model.generate(prompt, **hot, max_new_tokens=32, num_return_sequences=64)
    ends = set()
    for row in output[:, prompt.shape[1] :].tolist():
        end = min((row.index(token) for token in (STOP, nine) if token in row), default=31)
        assert set(row[end + 1 :]) <= {tokenizer.pad_token_id}
        ends.add(row[end])
    assert {STOP, nine} <= ends


@pytest.mark.parametrize(
    ("stop_rate", "penalized", "warns"),
    [(0.79, False, True), (0.8, False, False), (1.0, False, False), (0.1, True, False)],
)
def test_responses_cut_short_are_warned_of(
    stop_rate, penalized, warns, accelerator, tmp_path, capsys
):
    args = ppo_sync.Args(
        response_length=77, non_stop_penalty=penalized, num_training_steps=1, total_episodes=64
    )
    metrics = {"training_step": 1, "val/stop_rate": torch.tensor(stop_rate)}
    ppo_sync.write_metrics(accelerator, metrics, tmp_path, Console(soft_wrap=True), args)
    output = capsys.readouterr().out
    warning = f"{1 - stop_rate:.0%} of the responses were cut at --response_length 77"
    assert (warning in output) == warns == ("Warning" in output)


@pytest.mark.parametrize("name", OLD)
def test_run_warns_of_responses_cut_short_unless_they_are_penalized(name, run_loop):
    penalized, rough = run_loop(name, rough=False), run_loop(name, rough=True)
    cut = [[line["val/stop_rate"] < 0.8 for line in run.metrics] for run in (penalized, rough)]
    assert any(cut[0]) and any(cut[1])
    assert rough.output.count("were cut at --response_length 6") == sum(cut[1])
    assert "were cut at" not in penalized.output


# --------------------------------------------------------------------------- runs beside each other


@pytest.mark.parametrize("name", SCRIPTS)
def test_same_seed_gives_the_same_bits(name, run_loop, run_main):
    """Though a thread generates beside the updates; test_runs_async.py has it with vLLM."""
    one, other = run_loop(name, rough=False), run_main(name)
    for first, second in zip(one.metrics, other.metrics, strict=True):
        assert without_clock(first) == without_clock(second)
    for first, second in zip(one.batches, other.batches, strict=True):
        assert differences(vars(first), vars(second)) == []
    models = [run.run_dir / "model" / "model.safetensors" for run in (one, other)]
    assert models[0].read_bytes() == models[1].read_bytes()


@pytest.mark.parametrize(("beta", "models"), [(0.0, 1), (0.1, 2)])
def test_without_kl_no_reference_policy_is_loaded(beta, models, run_main, monkeypatch):
    loaded = []
    script = importlib.import_module("grpo_vllm_async")
    hooks.at_each_loading(script, lambda: loaded.append("a model"), put=monkeypatch.setattr)
    run = run_main("grpo_vllm_async.py", beta=beta)
    assert len(loaded) == models
    assert [("objective/kl" in line) for line in run.metrics] == [beta > 0] * STEPS


@pytest.mark.parametrize("name", ASYNC)
def test_without_async_mode_weights_are_sent_before_each_request(name, run_main, monkeypatch):
    script = importlib.import_module(name.removesuffix(".py"))
    # It would refuse the log-probabilities of the stub: they are as far off as an older policy's
    monkeypatch.setattr(script, "check_sampler", lambda *_: None)
    run = run_main(name, async_mode=False)
    expected = ["weights 0", "request 1", "weights 1", "request 2", "weights 2", "request 3"]
    assert run.vllm.order == expected
    assert [line["policy/version"] for line in run.metrics] == [0, 1, 2]
    assert [line["policy/staleness"] for line in run.metrics] == [0, 0, 0]


@pytest.mark.parametrize("name", PPO)
@pytest.mark.parametrize("multiplier", [0.0, 2.0])
def test_reward_model_scores_and_starts_the_value_model(multiplier, name, run_main, reward_model):
    run = run_main(
        name,
        lambda data_source, response, ground_truth: 1.0,
        reward_model_path=reward_model,
        reward_model_multiplier=multiplier,
        apply_verifiable_reward=multiplier == 0,
        non_stop_penalty=False,
    )
    model = AutoModelForSequenceClassification.from_pretrained(reward_model)
    # transformers' own forward then reads the last token, whatever it is
    model.config.pad_token_id = None
    for batch, line in zip(run.batches, run.metrics, strict=True):
        rows = zip(batch.prompt_ids, batch.responses, strict=True)
        with torch.no_grad():
            outputs = [model(torch.tensor([prompt + response])).logits for prompt, response in rows]
        of_model = torch.cat(outputs).squeeze(-1)
        assert len(set(of_model.tolist())) > EPISODES / 2
        if multiplier == 0:  # it is not asked, and the verifiable reward is all there is
            expected = torch.ones(EPISODES)
            assert "objective/reward_model_score" not in line
            assert line["objective/verifiable_correct_rate"] == 1
        else:
            expected = multiplier * of_model
            score = of_model.mean().item()
            assert line["objective/reward_model_score"] == pytest.approx(score, abs=1e-4)
            assert "objective/verifiable_correct_rate" not in line
        torch.testing.assert_close(batch.scores, expected, rtol=0, atol=1e-4)
        assert line["objective/scores"] == pytest.approx(expected.mean().item(), abs=1e-4)
        assert line["objective/reward_failures"] == 0

    batch = run.batches[0]
    inputs, mask = ppo_sync.collate(batch.prompt_ids, batch.responses, 0, "cpu")
    with torch.no_grad():
        hidden = model.base_model(**inputs).last_hidden_state[:, -mask.shape[1] - 1 : -1]
        values = model.score(hidden).squeeze(-1) * mask
    assert values.abs().max() > 0.1  # a head of its own would be zeros
    torch.testing.assert_close(batch.values, values, rtol=0, atol=1e-4)


@pytest.mark.slow  # rewards are slow in it
@pytest.mark.parametrize("name", OLD)
def test_scoring_of_evaluations_is_no_training_time(name, run_main, few_prompts):
    rows = datasets.Dataset.from_parquet(str(few_prompts / "test.parquet"))
    held_out = {row["reward_model"]["ground_truth"] for row in rows}

    def score(data_source, response, ground_truth):
        if ground_truth in held_out:
            time.sleep(0.1)
        return 1.0

    run = run_main(name, score, eval_dataset=few_prompts / "test.parquet", num_evals=1)
    first, *_ = run.metrics
    # All else that a step does has a time; the scores took eight tenths of a second
    parts = ("weight_sync", "wait_for_generation", "reward", "forward", "update")
    assert "eval/scores" in first
    assert -0.1 < first["time/training"] - sum(first[f"time/{name}"] for name in parts) < 0.5


# ------------------------------------------------------------------------------ runs that end early
# How the process ends, with an engine beside it, is in test_faults.py.


@pytest.mark.parametrize("name", OLD)
def test_full_disk_at_the_final_save_keeps_the_metrics(name, run_main, tmp_path, monkeypatch):
    def full_disk(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(PreTrainedTokenizerBase, "save_pretrained", full_disk)
    with pytest.raises(OSError, match="No space left on device"):
        run_main(name, output_dir=tmp_path)
    assert len(read_json_lines(tmp_path / "run" / "metrics.jsonl")) == STEPS
    assert not (tmp_path / "run" / "model").exists()


@pytest.mark.parametrize("name", SCRIPTS)
def test_infinite_loss_stops_the_run_and_keeps_the_batch(name, run_main, tmp_path, monkeypatch):
    script = importlib.import_module(name.removesuffix(".py"))
    hooks.multiply_learning_rate(script, 1e33, put=monkeypatch.setattr)
    with pytest.raises(FloatingPointError, match=r"gradient (is )?not finite"):
        run_main(name, output_dir=tmp_path, local_mini_batch_size=EPISODES)
    assert len(read_json_lines(tmp_path / "run" / "metrics.jsonl")) == 1
    assert len(read_json_lines(tmp_path / "run" / "rollouts.jsonl")) == 4  # of the step before
    bad_batch = torch.load(tmp_path / "run" / "bad_batch.pt", weights_only=False)
    assert bad_batch["logprobs"].isnan().any()
    assert not (tmp_path / "run" / "model").exists()


def no_handler(number, frame):
    raise AssertionError(f"main() has no handler for signal {number}")


@pytest.mark.parametrize("name", OLD)
@pytest.mark.parametrize(
    ("number", "error"),
    [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit), (None, OSError)],
    ids=["ctrl-c", "terminated", "an error"],
)
def test_whatever_ends_a_run_vllm_ends_too(number, error, name, run_main, monkeypatch):
    script = importlib.import_module(name.removesuffix(".py"))
    stopped, make = [], loops.make_stub

    def make_stub_that_tells(script):
        stub = make(script)
        monkeypatch.setattr(stub, "stop", lambda vllm: stopped.append(vllm))
        return stub

    def end(*_):
        assert stopped == []
        if number is None:
            raise OSError("no more memory")
        signal.raise_signal(number)

    monkeypatch.setattr(loops, "make_stub", make_stub_that_tells)
    hooks.before_update(script, end, put=monkeypatch.setattr)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for one in before:
        signal.signal(one, no_handler)
    try:
        with pytest.raises(error) as ended:
            run_main(name)
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
    assert len(stopped) == 1
    if error is SystemExit:
        assert ended.value.code == 143
