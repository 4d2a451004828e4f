"""The loop of main(), with a stub in place of vLLM: what a step makes of a rollout, in seconds.

Everything else is real: the debug model and data, the thread and the queues, the updates.
"""

import copy
import functools
import importlib
import sys
from types import SimpleNamespace

import pytest
import torch
from helpers import ASYNC, GRPO, PPO, SCRIPTS, hooks
from helpers.formulas import gae_by_definition
from helpers.processes import flags_of
from helpers.rollouts import STOP
from helpers.runs import response_tokens

STEPS, EPISODES = 3, 16


def make_stub(script):
    """A class for script.VLLM that samples digits, one in four responses without an end.

    The log-probabilities that it reports are those of the weights that it was given last, but for
    an older policy's batches, which need not agree: there they are far off.
    """

    class StubVLLM:
        made = []  # noqa: RUF012

        def __init__(self, accelerator, args):
            self.args, self.synced, self.seeds, self.requests = args, [], [], 0
            self.order = []  # of weight syncs and requests
            self.made.append(self)

        def start(self, config, max_length):
            pass

        def stop(self):
            pass

        def sync_weights(self, policy, version):
            self.policy = copy.deepcopy(policy)
            self.synced.append(version)
            self.order.append(f"weights {version}")

        def generate(self, prompt_ids, seeds, temperature):
            self.seeds += seeds
            if not prompt_ids:
                return [], [], self.synced[-1]
            self.requests += 1
            responses = [self.sample(seed) for seed in seeds]
            inputs, mask = script.collate(prompt_ids, responses, 0, "cpu")
            with torch.no_grad():
                logprobs, _ = self.policy(inputs, mask.shape[1])
            if "async" in script.__name__ and self.requests > 1:
                generator = torch.Generator().manual_seed(seeds[0])
                logprobs += torch.randn(logprobs.shape, generator=generator)
            sizes = mask.sum(1).tolist()
            rows = [row[:size].tolist() for row, size in zip(logprobs, sizes, strict=True)]
            return responses, rows, self.synced[-1]

        def sample(self, seed):
            generator = torch.Generator().manual_seed(seed)
            size = int(torch.randint(1, self.args.response_length, (1,), generator=generator))
            digits = torch.randint(5, 15, (self.args.response_length,), generator=generator)
            if seed % 4 == 0:
                return digits.tolist()
            return [*digits[: size - 1].tolist(), STOP]

    return StubVLLM


@pytest.fixture(scope="module")
def run_loop(assets, tmp_path_factory):
    """run_loop("ppo_sync.py"): its batches, metrics, optimizer batches, and what the stub saw."""

    @functools.cache
    def run(name):
        script = importlib.import_module(name.removesuffix(".py"))
        stub = make_stub(script)
        batches, metrics, mini_batches = [], [], []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(script, "VLLM", stub)
            hooks.with_each_batch(
                script, lambda batch, _: batches.append(copy.deepcopy(batch)), put=patch.setattr
            )
            hooks.before_update(
                script, lambda rows, *_: mini_batches.append(rows), put=patch.setattr
            )
            hooks.collect_metrics(script, metrics, put=patch.setattr)

            def note_request(call, given):
                stub.made[0].order.append(f"request {given['training_step']}")
                return call()

            hooks.around(script, "make_request", note_request, put=patch.setattr)
            patch.setattr("subprocess.run", lambda *_, **__: None)  # no pictures
            options = options_of(name, assets, tmp_path_factory.mktemp("loop"))
            patch.setattr(sys, "argv", [name, *flags_of(options)])
            script.main()
        (vllm,) = stub.made
        return SimpleNamespace(
            name=name,
            script=script,
            vllm=vllm,
            batches=batches,
            metrics=metrics,
            mini_batches=mini_batches,
        )

    return run


@pytest.fixture(params=SCRIPTS)
def loop(request, run_loop):
    """The run of one of the scripts; of_ppo, of_grpo and of_async leave out those without."""
    return run_loop(request.param)


of_ppo = pytest.mark.parametrize("loop", PPO, indirect=True)
of_grpo = pytest.mark.parametrize("loop", GRPO, indirect=True)
of_async = pytest.mark.parametrize("loop", ASYNC, indirect=True)


def options_of(name, assets, folder):
    options = {
        "dataset": assets / "train.parquet",
        "model_name_or_path": assets / "model",
        "output_dir": folder,
        "dtype": "float32",
        "response_length": 6,
        "total_episodes": STEPS * EPISODES,
        "local_rollout_batch_size": EPISODES // 4,
        "number_samples_per_prompt": 4,
        "local_mini_batch_size": 8,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-3,
        "beta": 0.3,
        "kl_estimator": "kl1",
        "non_stop_penalty": True,
        "penalty_reward_value": -1.0,
        "min_response_length": 4,
        "temperature": 1.3,
    }
    if name in PPO:
        options |= {"gamma": 0.9, "lam": 0.8, "value_lam": 0.7, "value_learning_rate": 1e-3}
    return options


def test_weights_are_sent_before_each_request(loop):
    expected = [0, 0, 1] if loop.name in ASYNC else [0, 0, 1, 2]
    assert loop.vllm.synced == expected


def test_learning_rate_falls_with_every_update(loop):
    # Two updates a step: the last ones of the steps are 1, 3 and 5 of 6
    rates = [line["lr"] / 1e-3 for line in loop.metrics]
    assert rates == pytest.approx([5 / 6, 3 / 6, 1 / 6])


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
