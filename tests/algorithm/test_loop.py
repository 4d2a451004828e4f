"""main() of each script with a stub of vLLM: what a step makes of a rollout, and what it writes.

All else is real: model, data, thread, queues, updates. A run takes half a second. Interrupted runs
are in test_resume.py, runs with vLLM itself in test_runs.py, and the ends of processes in
test_ends.py.
"""

import copy
import functools
import importlib
import itertools
import math
import re
import shutil

import pytest
import torch
from helpers import ASYNC, GRPO, PPO, SCRIPTS, hooks, loops
from helpers.files import read_json_lines
from helpers.formulas import gae_by_definition, values_of
from helpers.loops import EPISODES, STEPS, STOP
from helpers.runs import flat_tokens, response_tokens
from pyarrow import parquet
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer, GenerationConfig

METRICS_OF_POLICY_UPDATES = {"loss/policy_avg", "optim/grad_norm", "val/ratio", "val/ratio_var"}
METRICS_OF_POLICY_UPDATES |= {f"policy/{x}_avg" for x in ("approxkl", "clipfrac", "entropy")}
# By name in ASYNC, because otherwise vLLM's log-probabilities are close to the learner's
TIS_CAP = {True: 1.2, False: 1.0}


def rough_score(data_source, response, ground_truth):
    """Shares of 1, and no score at all of about a third of the stub's answers."""
    if response.startswith(("6", "7", "8")):
        raise OSError("the grader is out of paper")
    return 0.3 * (1 + len(response) % 2)


def scores_by_rough_score(texts):
    """None where it fails."""
    fails = ("6", "7", "8")
    return [None if text.startswith(fails) else rough_score("", text, "") for text in texts]


@pytest.fixture(scope="module")
def run_loop(run_main, few_prompts):
    """run_loop("ppo_sync.py", rough=False): a run, made once for all tests.

    Of one update a step. A rough one has two, rewards that fail and are whitened, evaluations, a
    weight decay, and a value model that learns alone at first.
    """

    evaluations = {"eval_dataset": few_prompts / "test.parquet", "num_evals": 1}
    of_rough = {"num_eval_prompts": 6, "non_stop_penalty": False, "warm_up_steps": 2}
    of_rough |= {"stop_token": "9", "weight_decay": 0.25}  # the stub never says 9
    of_ppo, of_grpo = {"value_warmup_steps": 1, "whiten_rewards": True}, {"kl_estimator": "kl3"}

    @functools.cache
    def run(name, rough):
        changes = {"tis_cap": TIS_CAP[name in ASYNC]}
        if not rough:
            return run_main(name, local_mini_batch_size=EPISODES, **changes)
        changes |= evaluations | of_rough | (of_ppo if name in PPO else of_grpo)
        return run_main(name, rough_score, seed=1 + SCRIPTS.index(name), **changes)

    return run


@pytest.fixture(params=SCRIPTS)
def rough_loop(request, run_loop):
    return run_loop(request.param, rough=True)


@pytest.fixture(scope="module")
def tokenizer(assets):
    return AutoTokenizer.from_pretrained(assets / "model")


# ------------------------------------------------------------------ weights, requests, evaluations


IN_TURNS = ["weights 0", "request 1", "weights 1", "request 2", "weights 2", "request 3"]
BESIDE_TRAINING = ["weights 0", "request 1", "weights 0", "request 2", "weights 1", "request 3"]


@pytest.mark.parametrize(
    ("name", "async_mode"), [(SCRIPTS[0], None), *((n, mode) for n in ASYNC for mode in (0, 1))]
)
def test_weights_go_out_before_the_request_that_they_answer(name, async_mode, run_main, run_loop):
    """After it vLLM is busy, and weights would change under it."""
    run = run_main(name, async_mode=False) if async_mode == 0 else run_loop(name, rough=False)
    # In the asynchronous scripts a request follows the last step, also where it asks for nothing
    last = ["weights 3", "request 4"] if name in ASYNC else []
    assert run.vllm.order == [*(BESIDE_TRAINING if async_mode else IN_TURNS), *last]
    sampled = [0, 0, 1] if async_mode else [0, 1, 2]
    samples = read_json_lines(run.run_dir / "rollouts.jsonl")
    found = dict.fromkeys((sample["training_step"], sample["policy_version"]) for sample in samples)
    assert list(found) == list(enumerate(sampled, 1))
    if name in ASYNC:
        assert [line["policy/version"] for line in run.metrics] == [0, 1, 2]
        assert [2 - line["policy/staleness"] for line in run.metrics[2:]] == sampled[2:]


def test_last_evaluation_has_the_weights_that_are_saved(rough_loop, tokenizer):
    samples = read_json_lines(rough_loop.run_dir / "samples.jsonl")
    assert [sample["policy_version"] for sample in samples] == [0] * 6 + [3] * 6
    assert [line.get("eval/policy_version") for line in rough_loop.metrics] == [0, None, 3]
    assert rough_loop.vllm.order[-2:] == ["weights 3", "request 4"]
    saved = load_file(rough_loop.run_dir / "model" / "model.safetensors")
    of_vllm = rough_loop.vllm.policy.model.state_dict()
    assert saved.keys() == of_vllm.keys()
    for name, weight in saved.items():
        assert weight.dtype == torch.float32 and torch.equal(weight, of_vllm[name])
    assert AutoTokenizer.from_pretrained(rough_loop.run_dir / "model").chat_template
    ends = GenerationConfig.from_pretrained(rough_loop.run_dir / "model").eos_token_id
    assert ends == [STOP, tokenizer.convert_tokens_to_ids("9")]


def test_evaluations_have_the_same_prompts_and_seeds_each_time_and_count_failures(
    rough_loop, run_loop, few_prompts
):
    seeds = rough_loop.vllm.seeds
    assert seeds[EPISODES : EPISODES + 6] == seeds[-6:] == list(range(6))
    assert len(set(seeds)) == len(seeds) - 6  # each step has others
    temperatures = rough_loop.vllm.temperatures
    assert temperatures[EPISODES : EPISODES + 6] == temperatures[-6:] == [0.0] * 6
    assert temperatures.count(1.3) == STEPS * EPISODES
    samples = read_json_lines(rough_loop.run_dir / "samples.jsonl")
    for line, of_line in zip(rough_loop.metrics[::2], (samples[:6], samples[6:]), strict=True):
        scores = [sample["score"] for sample in of_line]
        assert scores == scores_by_rough_score([sample["response"] for sample in of_line])
        known = [score for score in scores if score is not None]
        assert line["eval/scores"] == pytest.approx(sum(known) / len(known))
        assert line["eval/reward_failures"] == scores.count(None) / len(scores)
    # Drawn of eight, whatever --seed is
    other = read_json_lines(run_loop(SCRIPTS[0], rough=True).run_dir / "samples.jsonl")
    truths = [sample["ground_truth"] for sample in samples]
    assert truths == [sample["ground_truth"] for sample in other] and truths[:6] == truths[6:]
    rows = parquet.read_table(few_prompts / "test.parquet").to_pylist()
    assert truths[:6] != [row["reward_model"]["ground_truth"] for row in rows[:6]]


def test_every_step_and_epoch_has_minibatches_of_its_own(rough_loop, run_main):
    epochs = run_main(rough_loop.name, num_epochs=3, total_episodes=EPISODES)
    for run, count in ((rough_loop, 2 * STEPS), (epochs, 2 * 3)):
        assert len(run.mini_batches) == len({str(rows) for rows in run.mini_batches}) == count
        for first, second in zip(run.mini_batches[::2], run.mini_batches[1::2], strict=True):
            assert sorted(first + second) == list(range(EPISODES))
    for batch in rough_loop.batches:  # the samples of a prompt are side by side
        assert all(batch.prompt_ids[i] == batch.prompt_ids[i - i % 4] for i in range(EPISODES))


def test_another_seed_draws_other_prompts_responses_and_minibatches(run_loop, run_main):
    """If two seeds shared random numbers, their runs would agree more than independent runs do."""
    one = run_loop(PPO[0], rough=False)
    other = run_main(PPO[0], seed=2, total_episodes=EPISODES)
    assert set(one.vllm.seeds).isdisjoint(other.vllm.seeds)
    assert one.batches[0].prompt_ids != other.batches[0].prompt_ids
    assert one.mini_batches[0] != [*itertools.chain(*other.mini_batches)]


# --------------------------------------------------------------------- what batches and lines have


@pytest.mark.parametrize("rough", [False, True])
@pytest.mark.parametrize("name", PPO)
def test_advantages_and_returns_follow_from_scores_kl_and_values(name, rough, run_loop):
    for batch in run_loop(name, rough).batches:
        mask, in_loss = batch.mask.bool(), batch.loss_mask.bool()
        assert torch.equal(in_loss, mask * batch.has_score.bool()[:, None])
        assert torch.equal(in_loss, mask) != rough
        d = (batch.logprobs - batch.ref_logprobs).double()
        rewards = -0.3 * d
        rewards[range(EPISODES), batch.lengths - 1] += batch.scores
        if rough:  # whitened, but for their mean, and without what failed
            known = rewards[in_loss]
            rewards = (rewards - known.mean()) / known.std() + known.mean()
            rewards *= in_loss
        expected = []
        rows = (response_tokens(batch.mask, each) for each in (rewards, batch.values))
        for of_row, values in zip(*rows, strict=True):
            advantages = gae_by_definition(of_row, values, gamma=0.9, lam=0.8)
            returns = gae_by_definition(of_row, values, gamma=0.9, lam=0.7) + values
            expected.append(torch.stack([advantages, returns]))
        advantages, returns = torch.cat(expected, 1)
        scored = advantages[in_loss[mask]]
        advantages = (advantages - scored.mean()) / scored.std() * in_loss[mask]
        for field, values in {"advantages": advantages, "returns": returns}.items():
            found = getattr(batch, field)
            torch.testing.assert_close(found[mask].double(), values, rtol=1e-4, atol=1e-5)
            assert not found[~mask].any()
    # The policy is no longer the reference policy
    assert (batch.logprobs - batch.ref_logprobs).abs().max() > 1e-3


NORMS = {"policy": "optim/grad_norm", "value": "optim/value_grad_norm"}
AGGREGATIONS = ("token", "sequence", "constant")


@pytest.mark.parametrize("rough", [False, True])
@pytest.mark.parametrize("name", SCRIPTS)
def test_metrics_are_computed_again_from_the_batch(name, rough, run_loop):
    run = run_loop(name, rough)
    cap = TIS_CAP[name in ASYNC]
    for step, (batch, line) in enumerate(zip(run.batches, run.metrics, strict=True), 1):
        flat, has_score = flat_tokens(vars(batch)), batch.has_score.bool()
        in_loss = flat["loss_mask"].bool()
        scores = batch.scores[has_score].double()  # failed rewards count nowhere
        stops = sum(ids[-1] == STOP for ids in batch.responses)
        log_ratio = flat["logprobs"] - flat["sampler_logprobs"]
        ratio = log_ratio.exp()
        weights = ratio.clamp(max=cap)
        kl_of_rows = response_tokens(batch.mask, batch.logprobs - batch.ref_logprobs)
        kl, by_kl3 = torch.cat(kl_of_rows), rough and name in GRPO
        of_rows = [torch.expm1(-d) + d if by_kl3 else d for d in kl_of_rows]
        penalties = 0.3 * torch.stack([row.sum() for row in of_rows])
        expected = {
            "training_step": step,
            "episode": step * EPISODES,
            "epoch": step * EPISODES / 4 / 64,
            "objective/kl": kl.sum() / EPISODES,
            "objective/non_score_reward": -penalties.mean(),
            # Of the very responses that have a score
            "objective/rlhf_reward": scores.mean() - penalties[has_score].mean(),
            "objective/scores": scores.mean(),
            "objective/scores_std": scores.std(correction=0),
            "objective/entropy": -flat["logprobs"].sum() / EPISODES,
            "objective/sequence_lengths": batch.mask.sum(1).mean(),
            "val/sequence_lengths": batch.mask.sum(1).mean(),
            "val/num_stop_token_ids": stops,
            "objective/stop_rate": stops / EPISODES,
            "objective/reward_failures": 1 - len(scores) / EPISODES,
            "mismatch/logprob_diff_mean": log_ratio.abs().mean(),
            "mismatch/logprob_diff_max": log_ratio.abs().max(),
            "mismatch/kl": (ratio - 1 - log_ratio).mean(),
            "mismatch/ess": ratio.sum() ** 2 / (ratio**2).sum() / len(ratio),
            "mismatch/tis_clipfrac": (ratio > cap).double().mean(),
        }
        if name in PPO:
            returns, residuals = flat["returns"], flat["returns"] - flat["values"]
            explained = 1 - residuals[in_loss].var() / returns[in_loss].var()
            expected["val/explained_variance"] = explained
        if not rough:  # one update, by the policy that the old log-probabilities are of
            expected |= {"policy/clipfrac_avg": 0, "policy/approxkl_avg": 0, "val/ratio_var": 0}
            policy_loss = -(flat["advantages"] * weights).mean()
            other, loss, weight = "loss/kl_avg", (kl * weights).mean(), 0.3
            if name in PPO:
                other, loss, weight = "loss/value_avg", (residuals**2 / 2).mean(), 1.0
            expected |= {"val/ratio": 1, "loss/policy_avg": policy_loss, other: loss}
            expected["objective/loss"] = policy_loss + weight * loss
        for model, metric in NORMS.items():
            if norms := run.norms[model, step]:  # of each update
                expected[metric] = sum(norms) / len(norms)
        for metric, value in expected.items():
            assert line[metric] == pytest.approx(float(value), rel=1e-4, abs=1e-6), metric


@pytest.mark.parametrize(
    ("name", "aggregation"), [(PPO[0], None), (PPO[1], None), *((GRPO[0], a) for a in AGGREGATIONS)]
)
def test_loss_is_the_mean_over_updates_of_what_each_minimizes(name, aggregation, run_main):
    """Not the mean over tokens: of two updates one has longer responses. No step moves a model."""
    options = {"learning_rate": 0.0, "tis_cap": 0.0}
    options |= {"value_learning_rate": 0.0} if name in PPO else {"loss_aggregation": aggregation}
    run = run_main(name, rough_score, seed=4, **options)
    found = []
    for step, (batch, line) in enumerate(zip(run.batches, run.metrics, strict=True)):
        losses = -batch.advantages.double()
        if name in PPO:
            losses += (batch.returns - batch.values).double() ** 2 / 2
        else:
            losses += 0.3 * (batch.logprobs - batch.ref_logprobs).double()
        of_updates = []
        for rows in run.mini_batches[2 * step : 2 * step + 2]:
            mask = batch.loss_mask[rows].double()
            counted = mask.amax(1).sum()
            if aggregation == "sequence":
                mask = mask / mask.sum(1, keepdim=True).clamp(min=1)
            count = counted * 6 if aggregation == "constant" else mask.sum()
            of_updates.append((losses[rows] * mask).sum() / count)
        found.append(sum(of_updates).item() / 2)
        assert line["objective/loss"] == pytest.approx(found[-1], rel=1e-4, abs=1e-6)
    assert max(map(abs, found)) > 1e-2


@pytest.mark.parametrize("name", SCRIPTS)
def test_metrics_of_updates_are_means_over_all_of_several_epochs(name, run_main):
    """Where no step moves a model, a mean over two epochs is that over one."""
    options = {"total_episodes": EPISODES, "learning_rate": 0.0}
    options |= {"value_learning_rate": 0.0} if name in PPO else {}
    runs = [run_main(name, rough_score, num_epochs=count, **options) for count in (1, 2)]
    (one,), (two,) = (run.metrics for run in runs)
    names = {name for name in one if name.startswith(("loss/", "policy/", "val/"))}
    names -= {"val/update_tokens"}
    assert one["loss/policy_avg"] and two["val/update_tokens"] == 2 * one["val/update_tokens"]
    for name in names:
        assert two[name] == pytest.approx(one[name], rel=1e-4, abs=1e-6), name


def text_of(tokenizer, token_ids):
    """Without the stop token; what the tokenizer does not know is a special token, and stays."""
    return tokenizer.decode([token_id for token_id in token_ids if token_id != STOP])


@pytest.mark.parametrize("own_value_model", [False, True])
@pytest.mark.parametrize("name", PPO)
def test_reward_model_scores_times_its_multiplier_and_starts_the_value_model(
    name, own_value_model, run_main, reward_model, tmp_path
):
    """Unless that has a path of its own."""
    model = value_model = AutoModelForSequenceClassification.from_pretrained(reward_model)
    changes = {"apply_verifiable_reward": False, "non_stop_penalty": False}
    changes |= {"reward_model_path": reward_model, "reward_model_multiplier": 2.0}
    if own_value_model:
        value_model = copy.deepcopy(model)
        value_model.score.weight.data.neg_()
        changes["value_model_path"] = shutil.copytree(reward_model, tmp_path / "value")
        value_model.save_pretrained(tmp_path / "value")
    run = run_main(name, total_episodes=2 * EPISODES, **changes)
    for batch, line in zip(run.batches, run.metrics, strict=True):
        # A token more, for the score is read after the last one
        with torch.no_grad():
            read = [values_of(model, prompt, [*ids, STOP]) for prompt, ids in batch.sequences]
            values = [values_of(value_model, *pair) for pair in batch.sequences]
        scores = torch.stack([row[-1] for row in read])
        assert len(set(scores.tolist())) > EPISODES / 2
        torch.testing.assert_close(batch.scores, 2.0 * scores, rtol=0, atol=1e-4)
        mean = scores.mean().item()
        assert line["objective/reward_model_score"] == pytest.approx(mean, abs=1e-4)
        if batch is run.batches[0]:
            found = batch.values[batch.mask.bool()]
            torch.testing.assert_close(found, torch.cat(values), rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", SCRIPTS)
def test_without_kl_no_reference_policy_is_loaded(name, run_main, monkeypatch):
    script = importlib.import_module(name.removesuffix(".py"))
    trained, fused, put = [], [], monkeypatch.setattr
    hooks.before(script, "load_model", lambda given: trained.append(given["trained"]), put)
    hooks.before(torch.optim.AdamW, "__init__", lambda given: fused.append(given["fused"]), put)
    run = run_main(name, beta=0.0, total_episodes=EPISODES)
    assert trained == fused == ([True, True] if name in PPO else [True])
    (line,), (batch,) = run.metrics, run.batches
    assert {"objective/kl", "objective/non_score_reward", "objective/rlhf_reward"}.isdisjoint(line)
    assert all(map(math.isfinite, line.values()))
    assert batch.ref_logprobs is None
    if name in PPO:  # by the options of loops.py: a value_lam of 0.7, and a gamma of 0.9
        last = range(EPISODES), batch.lengths - 1
        torch.testing.assert_close(batch.returns[last], batch.scores)
        assert batch.scores.any()


@pytest.mark.parametrize("name", PPO)
def test_cost_of_the_kl_is_that_of_the_rewards_if_beta_changes_later(name, run_main, monkeypatch):
    """A fork may learn beta, and change it after the step's rewards."""
    script = importlib.import_module(name.removesuffix(".py"))

    def change_beta(given):
        given["args"] = copy.copy(given["args"])
        given["args"].beta = 7.0

    hooks.before(script, "batch_metrics", change_beta, monkeypatch.setattr)
    run = run_main(name)
    for batch, line in zip(run.batches, run.metrics, strict=True):
        cost = -0.3 * (batch.logprobs - batch.ref_logprobs).sum(1).mean().item()
        assert line["objective/non_score_reward"] == pytest.approx(cost, rel=1e-4, abs=1e-7)
    assert abs(cost) > 1e-3


# --------------------------------------------------------------------------------------- schedules


def test_schedule_of_each_model_runs_over_its_own_updates_and_a_policy_may_rest(
    rough_loop, run_loop
):
    # Two updates a step, and a warm-up of two
    expected = {"policy": [0.5, 1, 1, 0.75, 0.5, 0.25]}
    if rough_loop.name in PPO:
        expected = {"value": expected["policy"], "policy": [0.5, 1, 1, 0.5]}
    rates = {"value": 2e-3, "policy": 1e-3}
    used = {
        model: [rate / rates[model] for rate in each] for model, each in rough_loop.rates.items()
    }
    assert used == {model: pytest.approx(shares) for model, shares in expected.items()}
    assert rough_loop.decays == {0.25} and run_loop(SCRIPTS[0], rough=False).decays == {0.0}
    logged = [line["lr"] for line in rough_loop.metrics]
    assert logged == [0] * (rough_loop.name in PPO) + rough_loop.rates["policy"][1::2]
    for line in rough_loop.metrics:  # while it rests, nothing is said of its updates
        found = METRICS_OF_POLICY_UPDATES & line.keys()
        assert found == (METRICS_OF_POLICY_UPDATES if line["lr"] else set())


# ------------------------------------------------------------------------------ what ends a run


@pytest.mark.parametrize("name", SCRIPTS)
def test_batch_whose_every_reward_failed_ends_the_run(name, run_main):
    """As where a judge has died; also where responses that were cut have a score, the penalty."""
    calls = itertools.count()
    run = run_main(name, lambda *_: 1 / (next(calls) < EPISODES), non_stop_penalty=True)
    failed = r"(?s)the reward failed on all responses: .*ZeroDivision"
    assert re.match(failed, str(run.error)) and len(run.metrics) == 1
    assert not (run.run_dir / "model").exists()


@pytest.mark.parametrize("name", SCRIPTS)
def test_update_whose_every_reward_failed_is_left_out(name, run_main):
    """Else AdamW would move the weights by its moments, without any data."""
    calls = itertools.count()
    run = run_main(name, lambda *_: 1 / (next(calls) % EPISODES == 0), non_stop_penalty=False)
    updates, steps = EPISODES // 8, len(run.metrics)
    assert len(run.mini_batches) == updates * steps and len(run.rates["policy"]) == steps
    for line in run.metrics:
        assert line["objective/reward_failures"] == 1 - 1 / EPISODES
        assert math.isfinite(line["optim/grad_norm"])


@pytest.mark.parametrize("name", SCRIPTS)
def test_sampler_that_has_lost_weights_ends_the_run(name, run_main, monkeypatch):
    report = loops.report_logprobs
    monkeypatch.setattr(
        loops, "report_logprobs", lambda *args: [[p - 0.02 for p in row] for row in report(*args)]
    )
    lost = run_main(name)
    message = str(lost.error)
    assert "differ from the learner's by a KL of 0.0002 at equal weights" in message
    assert not (lost.run_dir / "metrics.jsonl").exists()


@pytest.mark.parametrize("name", SCRIPTS)
def test_infinite_loss_stops_the_run_and_keeps_the_batch(name, run_main, tmp_path, monkeypatch):
    script = importlib.import_module(name.removesuffix(".py"))
    monkeypatch.setattr(script, "lr_multiplier", lambda *_: 1e33)
    with pytest.raises(FloatingPointError, match="gradient is not finite"):
        run_main(name, output_dir=tmp_path, local_mini_batch_size=EPISODES)
    assert len(read_json_lines(tmp_path / "run" / "metrics.jsonl")) == 1  # of the step before
    bad_batch = torch.load(tmp_path / "run" / "bad_batch.pt", weights_only=False)
    assert bad_batch["logprobs"].isnan().any()
    assert not (tmp_path / "run" / "model").exists()


# ------------------------------------------------------------------------------- what a run leaves


def test_responses_of_every_step_can_be_read_token_by_token(rough_loop, tokenizer, run_main):
    samples = read_json_lines(rough_loop.run_dir / "rollouts.jsonl")
    tensors = {"sampler_logprobs", "logprobs", "entropies", "advantages"}
    of_ppo = {"values", "returns", "rewards", "kl_rewards"}
    tensors |= of_ppo if rough_loop.name in PPO else set()
    for i, sample in enumerate(samples):
        step, row = divmod(i, 8)  # two groups of four
        batch = rough_loop.batches[step]
        response = batch.responses[row]
        assert tokenizer(sample["prompt"])["input_ids"] == batch.prompt_ids[row]
        (score,) = scores_by_rough_score([sample["response"]])
        expected = {"training_step": step + 1, "response": text_of(tokenizer, response)}
        expected |= {"token_ids": response, "length": len(response), "score": score}
        assert sample == sample | expected | {"stopped": response[-1] == STOP}
        lists = {name for name, value in sample.items() if isinstance(value, list)}
        assert tensors <= lists - {"token_ids"} <= tensors | {"ref_logprobs"}
        for name in lists - {"token_ids"}:
            known = getattr(batch, name)[row][batch.mask[row].bool()]
            torch.testing.assert_close(torch.tensor(sample[name]), known, atol=6e-5, rtol=0)
        assert (sample["verifiable_score"] is None) == ("out of paper" in str(sample["failure"]))
    assert len(samples) == 8 * STEPS
    for name in ("score", "stopped", "advantages"):
        assert len({str(sample[name]) for sample in samples}) > 1, name
    # Groups of eight are written whole, too: two of the three
    sizes = {"number_samples_per_prompt": 8, "local_rollout_batch_size": 3, "total_episodes": 24}
    run = run_main(rough_loop.name, **sizes)
    assert len(read_json_lines(run.run_dir / "rollouts.jsonl")) == 16


def test_progress_is_printed_after_every_step(rough_loop):
    # A process's first step does not say how much is left
    line = r"^step (\d) of 3(?:, \S+ left)?  objective/scores: "
    assert re.findall(line, rough_loop.stdout.getvalue(), re.MULTILINE) == ["1", "2", "3"]


def test_programs_beside_a_script_are_called_once_at_the_start_and_at_the_end(
    rough_loop, run_main, tmp_path, monkeypatch
):
    """A copied script, where they are missing, goes without; the preflight refuses its upload."""
    steps = [("plot_runs.py", STEPS), ("inspect_run.py", STEPS)]
    assert rough_loop.programs == [("provenance.py", 0), *steps]
    uploading = run_main(rough_loop.name, push_to_hub=True, total_episodes=EPISODES)
    names = [name for name, _ in uploading.programs]
    assert names == ["provenance.py", "plot_runs.py", "inspect_run.py", "push_to_hub.py"]
    monkeypatch.setattr(rough_loop.script, "PROGRAMS", tmp_path / "scripts")
    assert run_main(rough_loop.name, push_to_hub=True, total_episodes=EPISODES).programs == []
