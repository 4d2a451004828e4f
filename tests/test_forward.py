"""What models say of padded batches, and the gradients of optimizer batches."""

import functools
import itertools
import math
import random
from dataclasses import replace

import pytest
import torch
from accelerate import Accelerator
from helpers.formulas import (
    chosen_logprobs,
    logprobs_and_entropies,
    surrogate_loss,
    values_of,
    weights_by_definition,
)
from helpers.processes import gradient_of_ranks
from helpers.rollouts import (
    PAD,
    SIZES,
    STOP,
    VOCAB,
    gradients,
    groups_of_equals,
    make_rollout,
    near_policy,
    one_of_ranks,
    tiny_args,
    tiny_classifier,
    tiny_policy,
    tiny_value_model,
    with_failed_rewards,
    without_rows,
)
from transformers import AutoTokenizer

import grpo_vllm_async as grpo
import ppo_sync
from ppo_sync import Args


def collate(batch, rows, pad_token_id=PAD):
    prompts = [batch.prompt_ids[row] for row in rows]
    responses = [batch.responses[row] for row in rows]
    return ppo_sync.collate(prompts, responses, pad_token_id, "cpu")


def logprobs_of(policy, inputs, width):
    logprobs, _ = policy(inputs, width)
    return logprobs


def every_row_alone(forward, batch):
    """What the model says of each row on its own, without any padding."""
    results = []
    for row in range(len(batch.prompt_ids)):
        inputs, mask = collate(batch, [row])
        assert mask.all() and inputs["attention_mask"].all()
        results.append(forward(inputs, mask.shape[1])[0])
    return results


# ------------------------------------------------------------------------------- log-probabilities


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
def test_logprobs_are_those_of_the_full_softmax(temperature):
    policy = tiny_policy(temperature=temperature)
    batch = make_rollout()
    expected, entropies = logprobs_and_entropies(
        policy.model, batch.prompt_ids, batch.responses, temperature
    )
    for row in range(8):
        inputs, mask = collate(batch, [row])
        chosen, entropy = policy(inputs, mask.shape[1])
        assert chosen[0].tolist() == pytest.approx(expected[row].tolist(), abs=1e-5)
        assert entropy[0].tolist() == pytest.approx(entropies[row].tolist(), abs=1e-5)


def test_chunks_of_the_softmax_and_their_gradients_are_those_of_the_whole():
    torch.manual_seed(0)
    vocab, width, rows = 70_000, 80, 5  # more than one chunk
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    policy = tiny_policy(vocab_size=vocab, temperature=0.7, **sizes)
    prompts = torch.randint(2, vocab, (rows, 3)).tolist()
    responses = torch.randint(2, vocab, (rows, width)).tolist()
    inputs, _ = ppo_sync.collate(prompts, responses, PAD, "cpu")
    weights = torch.randn(rows, width)
    logprobs, _ = policy(inputs, width)
    (logprobs * weights).sum().backward()
    gradient = policy.model.lm_head.weight.grad.clone()
    policy.zero_grad()
    logits = policy.model(**inputs).logits[:, -width - 1 : -1] / 0.7
    expected = torch.log_softmax(logits, -1).gather(-1, inputs["input_ids"][:, -width:, None])[
        ..., 0
    ]
    (expected * weights).sum().backward()
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-5)
    assert (gradient - policy.model.lm_head.weight.grad).norm() < 1e-5 * gradient.norm()


def test_padding_does_not_change_logprobs_or_values():
    batch, policy, value_model = make_rollout(), tiny_policy().eval(), tiny_value_model().eval()
    inputs, mask = collate(batch, range(8))
    assert not mask.all() and not inputs["attention_mask"].all()
    for forward in (functools.partial(logprobs_of, policy), value_model):
        together = forward(inputs, mask.shape[1])
        for row, alone in enumerate(every_row_alone(forward, batch)):
            torch.testing.assert_close(together[row, : len(alone)], alone, rtol=0, atol=1e-5)


def test_first_ratio_is_exactly_one(accelerator):
    args = tiny_args(per_device_train_batch_size=3)
    batch = make_rollout(dtype=torch.float32)
    policy, value_model = tiny_policy(), tiny_value_model()
    prompts, responses, rows = batch.prompt_ids, batch.responses, list(range(8))
    old = ppo_sync.forward_all(accelerator, policy, prompts, responses, [rows], 3, args)
    for micro_batch in ppo_sync.cut_micro_batches(rows, prompts, responses, 3, 0, 1):
        inputs, mask = collate(batch, micro_batch)
        new = logprobs_of(policy, inputs, mask.shape[1])
        assert new.requires_grad and not old.requires_grad
        assert torch.equal(new * mask, old[micro_batch, : mask.shape[1]])
    assert (old[~batch.mask.bool()] == 0).all()
    batch.logprobs = old
    _, sums = gradients(accelerator, policy, value_model, batch, args)
    tokens = batch.mask.sum().item()
    assert sums["val/ratio"] == sums["val/ratio_squared"] == tokens
    assert sums["policy/approxkl_avg"] == sums["policy/clipfrac_avg"] == 0


def test_forward_all_puts_every_row_in_its_place(accelerator):
    args, batch, policy = tiny_args(), make_rollout(dtype=torch.float32), tiny_policy()
    mini_batches = [[6, 1, 0, 7], [3, 2, 4, 5]]
    whole = ppo_sync.forward_all(
        accelerator, policy, batch.prompt_ids, batch.responses, mini_batches, 3, args
    )
    for row, alone in enumerate(every_row_alone(functools.partial(logprobs_of, policy), batch)):
        torch.testing.assert_close(whole[row, : len(alone)], alone.detach(), rtol=0, atol=1e-5)


def test_entropy_can_be_trained_on():
    """An entropy bonus at the loss line has to reach the weights."""
    policy, batch = tiny_policy(), make_rollout()
    inputs, mask = collate(batch, range(8))
    _, entropies = policy(inputs, mask.shape[1])
    (entropies * mask).sum().backward()
    found = policy.model.lm_head.weight.grad.clone()
    policy.zero_grad()
    logits = policy.model(**inputs).logits[:, -mask.shape[1] - 1 : -1] / policy.temperature
    expected = torch.distributions.Categorical(logits=logits).entropy()
    torch.testing.assert_close(entropies, expected, rtol=0, atol=1e-5)
    (expected * mask).sum().backward()
    assert found.norm() > 0.1
    assert (found - policy.model.lm_head.weight.grad).norm() < 1e-4 * found.norm()


# ----------------------------------------------------------------------------------------- padding


def test_stop_token_is_learned_where_it_also_pads(accelerator):
    args = tiny_args(pad_token_id=STOP, tis_cap=0.0)
    batch, policy, value_model = (
        make_rollout(dtype=torch.float32),
        tiny_policy(),
        tiny_value_model(),
    )
    sizes = batch.mask.sum(1).long()
    inputs, mask = collate(batch, range(8), pad_token_id=STOP)
    assert (
        mask.sum(1).tolist() == sizes.tolist()
    )  # the stop token is in, the padding of the same id is not
    ends = torch.zeros_like(batch.mask)
    ends[torch.arange(8), sizes - 1] = 1.0
    batch.advantages, batch.importance_weights = ends, batch.mask
    with torch.no_grad():
        before = logprobs_of(policy, inputs, mask.shape[1])
    batch.logprobs = before * batch.mask
    gradients(accelerator, policy, value_model, batch, args)
    assert policy.model.lm_head.weight.grad[STOP].norm() > 0.01
    torch.optim.SGD(policy.parameters(), lr=0.01).step()
    with torch.no_grad():
        after = logprobs_of(policy, inputs, mask.shape[1])
    assert ((after - before) * ends).sum() > 0.01


def test_padding_after_the_response_has_no_gradient(accelerator):
    args, policy, value_model = tiny_args(), tiny_policy(), tiny_value_model()
    batch = make_rollout()
    vector, _ = gradients(accelerator, policy.double(), value_model.double(), batch, args)
    padding = ~batch.mask.bool()
    for name in ("logprobs", "advantages", "importance_weights", "values", "returns"):
        setattr(batch, name, torch.where(padding, 3.5, getattr(batch, name)))
    with_rubbish, _ = gradients(accelerator, policy, value_model, batch, args)
    assert torch.equal(vector, with_rubbish)


# ------------------------------------------------------------------------------------------ values


def test_value_is_read_where_the_token_is_predicted():
    value_model, batch = tiny_value_model(), make_rollout()
    for row in range(8):
        prompt, response = batch.prompt_ids[row], batch.responses[row]
        hidden = value_model.model.model(torch.tensor([prompt + response])).last_hidden_state[0]
        every = (hidden @ value_model.model.score.weight[0]).tolist()
        inputs, mask = collate(batch, [row])
        values = value_model(inputs, mask.shape[1])[0].tolist()
        assert values == pytest.approx(every[len(prompt) - 1 : -1], abs=1e-5)


def test_value_of_a_state_does_not_know_the_token_to_come():
    value_model, batch = tiny_value_model(), make_rollout()
    inputs, mask = collate(batch, [1])
    values = value_model(inputs, mask.shape[1])
    inputs["input_ids"][0, -4] = (inputs["input_ids"][0, -4] + 1) % VOCAB
    changed = value_model(inputs, mask.shape[1])
    same = (values == changed)[0].tolist()
    assert same == [True] * (mask.shape[1] - 3) + [False] * 3


def test_first_values_are_zero_unless_the_checkpoint_has_a_head(saved_policy, tmp_path):
    batch = make_rollout()
    args = tiny_args(model_name_or_path=str(saved_policy))
    inputs, mask = collate(batch, range(8))
    for seed in (0, 1):
        torch.manual_seed(seed)
        assert (ppo_sync.load_value_model(args)(inputs, mask.shape[1]) == 0).all()
    classifier = tiny_classifier(seed=7)
    classifier.save_pretrained(tmp_path / "classifier")
    expected = ppo_sync.ValueModel(classifier)(inputs, mask.shape[1])
    assert (expected != 0).all()
    for flag in ("value_model_path", "reward_model_path"):
        loaded = ppo_sync.load_value_model(replace(args, **{flag: str(tmp_path / "classifier")}))
        assert torch.equal(loaded(inputs, mask.shape[1]), expected)


def answers_of_the_debug_task(tokenizer):
    """Prompts like 53812=, and answers of which about every third is right."""
    rng = random.Random(0)
    prompts, responses = [], []
    for _ in range(96):
        digits = [rng.choice("0123456789") for _ in range(5)]
        written = sorted(digits) if rng.random() < 0.3 else [*sorted(digits[:-1]), digits[-1]]
        prompts.append(tokenizer("".join(digits) + "=")["input_ids"])
        responses.append([*tokenizer("".join(written))["input_ids"], tokenizer.eos_token_id])
    return prompts, responses


def test_first_advantages_are_the_outcome_and_not_noise(accelerator, assets):
    args = tiny_args(model_name_or_path=str(assets / "model"), lam=0.95)
    prompts, responses = answers_of_the_debug_task(AutoTokenizer.from_pretrained(assets / "model"))
    scores = (torch.rand(96, generator=torch.Generator().manual_seed(0)) < 0.3).float()
    value_model = ppo_sync.load_value_model(args)

    def correlation():
        rows = list(range(96))
        values = ppo_sync.forward_all(
            accelerator, value_model, prompts, responses, [rows], 32, args
        )
        rewards, mask = torch.zeros_like(values), torch.ones_like(values)
        rewards[:, -1] = scores
        advantages, _ = ppo_sync.compute_gae(rewards, values, mask, gamma=1.0, lam=args.lam)
        advantages = ppo_sync.masked_whiten(advantages, mask)
        outcome = scores[:, None].expand_as(mask)
        return torch.corrcoef(torch.stack([advantages.flatten(), outcome.flatten()]))[0, 1].item()

    assert correlation() > 0.95
    # So it is not the task that makes them agree
    head = value_model.model.score.weight.data
    head.normal_(std=1 / math.sqrt(head.shape[1] + 1), generator=torch.Generator().manual_seed(0))
    assert correlation() < 0.7


# ------------------------------------------------------------------------------ reward model scores


def assert_equals_have_equal_scores(prompts, responses, scores):
    """And their advantages are exactly 0, and others have other scores."""
    score_of = {}
    pairs = zip(prompts, responses, strict=True)
    for (prompt, response), score in zip(pairs, scores, strict=True):
        ids = tuple(prompt.reward_model_token_ids), tuple(response)
        assert score_of.setdefault(ids, score) == score
    assert len(set(score_of.values())) == len(score_of)
    for normalization in ("standard", "centered"):
        assert (grpo.group_advantages(torch.tensor(scores), 4, normalization) == 0).all()


@pytest.mark.parametrize("size", [1, 3, 7, 32])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_equal_responses_have_equal_scores(world_size, size):
    """What else is in their micro-batch moves the last bits, which "standard" makes large."""
    model, (prompts, responses) = tiny_classifier(seed=3).eval(), groups_of_equals()
    order = torch.randperm(len(prompts), generator=torch.Generator().manual_seed(1)).tolist()
    args = tiny_args(local_rollout_forward_batch_size=size)
    for rows in (range(len(prompts)), order):
        some = [prompts[row] for row in rows], [responses[row] for row in rows]
        shares = [
            ppo_sync.reward_model_scores(one_of_ranks(rank, world_size), model, *some, args)
            for rank in range(world_size)
        ]
        scores = [sum(parts) for parts in zip(*shares, strict=True)]  # all 0 but one
        of_row = dict(zip(rows, scores, strict=True))
        in_groups = [of_row[row] for row in range(len(prompts))]
        assert_equals_have_equal_scores(prompts, responses, in_groups)


def test_score_of_equal_responses_is_that_of_one_alone(accelerator):
    model, (prompts, responses) = tiny_classifier(seed=3).eval(), groups_of_equals()
    scores = ppo_sync.reward_model_scores(accelerator, model, prompts, responses, tiny_args())
    for prompt, response, score in zip(prompts, responses, scores, strict=True):
        ids = torch.tensor([prompt.reward_model_token_ids + response])
        with torch.no_grad():
            expected = model.score(model.base_model(ids).last_hidden_state[0, -1]).item()
        assert score == pytest.approx(expected, abs=1e-5)


# ------------------------------------------------------------------- minibatches and micro-batches


def test_minibatches_are_other_ones_in_every_epoch_and_step():
    args = Args(num_epochs=3, local_mini_batch_size=8, world_size=2)
    drawn = [ppo_sync.draw_mini_batches(64, step, args) for step in (1, 2)]
    for mini_batches in (epoch for epochs in drawn for epoch in epochs):
        assert [len(rows) for rows in mini_batches] == [16] * 4
        assert sorted(row for rows in mini_batches for row in rows) == list(range(64))
    assert len({str(epoch) for epochs in drawn for epoch in epochs}) == 6


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_share_all_rows_in_equally_many_micro_batches(world_size):
    generator = torch.Generator().manual_seed(5)
    sizes = torch.randint(1, 50, (64, 2), generator=generator).tolist()
    prompts = [[7] * prompt for prompt, _ in sizes]
    responses = [[8] * response for _, response in sizes]
    rows = torch.randperm(64, generator=generator)[:48].tolist()
    shares = [
        ppo_sync.cut_micro_batches(rows, prompts, responses, 4, rank, world_size)
        for rank in range(world_size)
    ]
    assert {len(share) for share in shares} == {48 // world_size // 4}
    assert sorted(row for share in shares for micro in share for row in micro) == sorted(rows)


def test_micro_batches_hold_rows_of_like_length():
    responses = [[8] * size for size in (9, 1, 8, 2, 7, 3, 6, 4)]
    micro_batches = ppo_sync.cut_micro_batches(list(range(8)), [[7]] * 8, responses, 2, 0, 1)
    lengths = [sorted(len(responses[row]) for row in rows) for rows in micro_batches]
    assert lengths == [[1, 2], [3, 4], [6, 7], [8, 9]]


# --------------------------------------------------------------------------------------- gradients


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-6)])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_gradient_does_not_depend_on_micro_batches(accelerator, dtype, tolerance, size):
    policy, value_model, batch = (
        tiny_policy().to(dtype),
        tiny_value_model().to(dtype),
        make_rollout(dtype=dtype),
    )
    whole, sums = gradients(accelerator, policy, value_model, batch, tiny_args())
    cut, cut_sums = gradients(
        accelerator, policy, value_model, batch, tiny_args(per_device_train_batch_size=size)
    )
    assert whole.norm() > 0.1
    assert (whole - cut).norm() < tolerance * whole.norm()
    assert cut_sums["positions"] == sums["positions"] == sum(map(sum, SIZES))
    assert cut_sums["padded_positions"] < sums["padded_positions"] == 8 * (12 + 9)
    for name in sums.keys() - {"positions", "padded_positions"}:
        assert cut_sums[name] == pytest.approx(sums[name], rel=1e-4)


def with_weights(batch, args):
    """A copy with the importance weights that main() gives the policy's tokens."""
    log_ratio = batch.logprobs - batch.sampler_logprobs
    weights = batch.mask
    if args.tis_cap > 0:
        weights = log_ratio.exp().clamp(max=args.tis_cap) * batch.mask
    return replace(
        batch, importance_weights=weights * ppo_sync.mismatch_mask(log_ratio, batch.mask, args)
    )


def reference_gradient(policy, value_model, batch, args):
    """PPO's losses as the papers write them, response by response; and both summed over tokens."""
    policy.zero_grad()
    value_model.zero_grad()
    pg_total = vf_total = tokens = 0.0
    for row, (prompt, response) in enumerate(zip(batch.prompt_ids, batch.responses, strict=True)):
        if not batch.scored[row]:
            continue
        size = len(response)
        tokens += size
        names = ("logprobs", "sampler_logprobs", "advantages", "values", "returns")
        old, sampler, advantages, old_values, returns = (
            getattr(batch, name)[row, :size] for name in names
        )
        new = chosen_logprobs(policy.model, prompt, response, args.temperature)
        weights = weights_by_definition(old, sampler, args)
        pg_loss = surrogate_loss(
            (new - old).exp(), advantages, args.cliprange, args.cliprange, args.dual_clip
        )
        pg_total = pg_total + (weights * pg_loss).sum()
        values = values_of(value_model.model, prompt, response)
        squares = (values - returns) ** 2
        if args.cliprange_value > 0:
            near = values.clamp(
                old_values - args.cliprange_value, old_values + args.cliprange_value
            )
            squares = torch.max(squares, (near - returns) ** 2)
        vf_total = vf_total + squares.sum() / 2
    ((pg_total + vf_total) / tokens).backward()
    parameters = [*policy.parameters(), *value_model.parameters()]
    return torch.cat([p.grad.flatten() for p in parameters]), pg_total.item(), vf_total.item()


OPTIONS = [
    {},
    {"cliprange": 0.05},
    {"dual_clip": 1.5},
    {"cliprange_value": 0.0},
    {"tis_cap": 0.0},
    {"tis_cap": 1.1},
    {"mismatch_mask": "token", "mismatch_mask_range": 1.3},
    {"mismatch_mask": "sequence", "mismatch_mask_range": 1.2},
    {"mismatch_mask": "token", "mismatch_mask_range": 1.3, "tis_cap": 0.0},
    {"mismatch_mask": "sequence", "mismatch_mask_range": 1.2, "dual_clip": 1.2},
]


@pytest.mark.parametrize("failed", [[], [1, 4]], ids=["all scored", "two failed"])
@pytest.mark.parametrize("distance", [0.0, 0.4], ids=["on policy", "off policy"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradient_is_that_of_the_papers_formula(options, distance, failed, accelerator):
    """A mean over tokens, not over responses."""
    policy, value_model = tiny_policy().double(), tiny_value_model().double()
    batch, args = near_policy(make_rollout(), policy, distance), tiny_args(**options)
    batch = with_failed_rewards(batch, failed)
    expected, pg_total, vf_total = reference_gradient(policy, value_model, batch, args)
    assert expected.norm() > 0.1
    batch = with_weights(batch, args)
    for size in (8, 3):
        args.per_device_train_batch_size = size
        found, sums = gradients(accelerator, policy, value_model, batch, args)
        assert (found - expected).norm() < 1e-10 * expected.norm(), size
        assert sums["loss/policy_avg"] == pytest.approx(pg_total, rel=1e-9)
        assert sums["loss/value_avg"] == pytest.approx(vf_total, rel=1e-9)
        assert sums["tokens"] == sum(len(batch.responses[r]) for r in range(8) if r not in failed)


def test_every_option_changes_the_gradient(accelerator):
    models, found = (tiny_policy().double(), tiny_value_model().double()), []
    batch = near_policy(make_rollout(), models[0], 0.4)
    for options in OPTIONS:
        args = tiny_args(**options)
        found.append(gradients(accelerator, *models, with_weights(batch, args), args)[0])
    for (one, i), (other, j) in itertools.combinations(zip(found, OPTIONS, strict=True), 2):
        assert (one - other).norm() > 1e-4 * one.norm(), f"{i} as {j}"


def gradient_of(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("kind", ["token", "sequence"])
def test_mismatch_mask_is_for_the_policy_alone(kind, accelerator):
    """The value model learns from what the policy may not, and what is masked is in the mean."""
    policy, value_model = tiny_policy().double(), tiny_value_model().double()
    args = tiny_args(mismatch_mask=kind, mismatch_mask_range=1.2)
    plain = with_weights(make_rollout(), tiny_args())
    masked = with_weights(make_rollout(), args)
    gone = (masked.importance_weights == 0) & plain.mask.bool()
    assert 5 < gone.sum() < plain.mask.sum() - 5
    _, plain_sums = gradients(accelerator, policy, value_model, plain, tiny_args())
    of_value = gradient_of(value_model)
    _, sums = gradients(accelerator, policy, value_model, masked, args)
    of_policy = gradient_of(policy)
    assert torch.equal(gradient_of(value_model), of_value)
    assert sums["loss/value_avg"] == plain_sums["loss/value_avg"]
    assert sums["tokens"] == plain.mask.sum()
    # The tokens that are left, and their mean for their sum over all
    left = replace(plain, loss_mask=plain.mask * ~gone)
    gradients(accelerator, policy, value_model, left, tiny_args())
    expected = gradient_of(policy) * left.loss_mask.sum() / plain.mask.sum()
    assert (of_policy - expected).norm() < 1e-6 * expected.norm()
    # and nothing of the others
    masked.advantages = torch.where(gone, 1e3, masked.advantages)
    masked.logprobs = torch.where(gone, -5.0, masked.logprobs)
    gradients(accelerator, policy, value_model, masked, args)
    assert torch.equal(gradient_of(policy), of_policy)


@pytest.mark.parametrize("kind", ["token", "sequence"])
def test_mismatch_mask_without_limit_is_none_to_the_bit(kind, accelerator):
    models, batch = (tiny_policy(), tiny_value_model()), make_rollout(dtype=torch.float32)
    off, args = tiny_args(), tiny_args(mismatch_mask=kind, mismatch_mask_range=math.inf)
    expected, sums = gradients(accelerator, *models, with_weights(batch, off), off)
    found, sums_without_limit = gradients(accelerator, *models, with_weights(batch, args), args)
    assert torch.equal(found, expected) and sums_without_limit == sums


@pytest.mark.parametrize("size", [8, 3])
def test_policy_that_does_not_train_costs_nothing(size, accelerator):
    """The value model's warm-up: the same gradient to the bit, and none of the policy."""
    policy, value_model = tiny_policy(), tiny_value_model()
    batch = make_rollout(dtype=torch.float32)
    args = tiny_args(per_device_train_batch_size=size)
    _, with_policy = gradients(accelerator, policy, value_model, batch, args)
    expected = gradient_of(value_model)
    policy.forward = lambda *_: pytest.fail("the policy was computed")
    _, sums = gradients(accelerator, policy, value_model, batch, args, trains_policy=False)
    assert expected.norm() > 0.1 and torch.equal(gradient_of(value_model), expected)
    assert all(p.grad is None for p in policy.parameters())
    names = {"loss/value_avg", "val/clipfrac_avg", "tokens", "positions", "padded_positions"}
    assert sums == {name: with_policy[name] for name in names}
    metrics = ppo_sync.token_means(sums)
    assert not [name for name in metrics if "policy" in name or "ratio" in name]
    assert with_policy.keys() - names == {
        "loss/policy_avg",
        "policy/approxkl_avg",
        "policy/clipfrac_avg",
        "policy/entropy_avg",
        "val/ratio",
        "val/ratio_squared",
    }


@pytest.mark.parametrize("size", [8, 3, 1])
def test_response_without_a_score_is_in_neither_loss(size, accelerator):
    """As if it were not there: not in the sums, and not in what they are divided by."""
    models = tiny_policy().double(), tiny_value_model().double()
    failed, args = [1, 6], tiny_args(per_device_train_batch_size=size)
    batch = with_failed_rewards(make_rollout(), failed)
    rest = without_rows(make_rollout(), failed)
    expected, expected_sums = gradients(accelerator, *models, rest, tiny_args())
    found, sums = gradients(accelerator, *models, batch, args)
    assert (found - expected).norm() < 1e-10 * expected.norm()
    for name in sums.keys() - {"positions", "padded_positions"}:
        assert sums[name] == pytest.approx(expected_sums[name], rel=1e-9), name
    for name in ("advantages", "values", "returns"):
        getattr(batch, name)[failed] += 1e3
    again, sums_again = gradients(accelerator, *models, batch, args)
    assert torch.equal(again, found) and sums_again == sums


def test_losses_of_policy_and_value_model_do_not_mix(accelerator):
    policy, value_model, batch = (
        tiny_policy(),
        tiny_value_model(),
        make_rollout(dtype=torch.float32),
    )
    batch.advantages = torch.zeros_like(batch.advantages)
    gradients(accelerator, policy, value_model, batch, tiny_args())
    assert all(p.grad is None or (p.grad == 0).all() for p in policy.parameters())
    assert any((p.grad != 0).any() for p in value_model.parameters() if p.grad is not None)


def test_micro_batch_with_nothing_to_train_on_gives_a_finite_zero(accelerator):
    args, policy, value_model = tiny_args(), tiny_policy(), tiny_value_model()
    batch = make_rollout(sizes=[(3, 2), (4, 2)], dtype=torch.float32)
    batch.responses = [[], []]
    batch.mask = batch.loss_mask = torch.zeros_like(batch.mask)
    vector, sums = gradients(accelerator, policy, value_model, batch, args)
    assert torch.isfinite(vector).all() and (vector == 0).all()
    assert all(math.isfinite(value) for value in sums.values())
    assert sums["loss/policy_avg"] == sums["loss/value_avg"] == 0


def test_row_with_nothing_to_train_on_leaves_the_others_alone(accelerator):
    args, policy, value_model = tiny_args(), tiny_policy().double(), tiny_value_model().double()
    batch = make_rollout()
    alone, _ = gradients(accelerator, policy, value_model, batch, args)
    batch.prompt_ids.append([5, 6])
    batch.responses.append([])
    for name, whole in list(vars(batch).items()):
        if isinstance(whole, list):
            continue
        setattr(batch, name, torch.cat([whole, torch.zeros_like(whole[:1])]))
    together, _ = gradients(
        accelerator, policy, value_model, batch, tiny_args(per_device_train_batch_size=3)
    )
    assert (alone - together).norm() < 1e-10 * alone.norm()


# ------------------------------------------------------------------------------------------- ranks


@pytest.mark.parametrize("size", [8, 2])
def test_two_ranks_add_up_to_one(size):
    """The loss is a mean over the tokens of all ranks: what each of them computes adds up."""
    batch, models = make_rollout(), (tiny_policy().double(), tiny_value_model().double())
    whole, _ = gradients(Accelerator(cpu=True), *models, batch, tiny_args())
    args = tiny_args(per_device_train_batch_size=size)
    shares = []
    for rank in (0, 1):
        share, _ = gradients(one_of_ranks(rank, 2), *models, batch, args)
        shares.append(share)
    mean = (shares[0] + shares[1]) / 2  # as DDP averages
    assert (mean - whole).norm() < 1e-10 * whole.norm()
    assert (shares[0] - shares[1]).norm() > 1e-2 * whole.norm()


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory):
    """What two_rank_gradient.py writes, by number of ranks and size of micro-batches."""
    folder = tmp_path_factory.mktemp("ranks")
    runs = ((1, 8), (1, 1), (2, 4), (2, 2))
    return {(ranks, size): gradient_of_ranks("ppo", ranks, size, folder) for ranks, size in runs}


@pytest.mark.slow
def test_gradient_of_two_ranks_is_that_of_one(of_ranks):
    expected = of_ranks[1, 8]
    assert expected["gradient"].norm() > 0.1
    for result in of_ranks.values():
        difference = result["gradient"] - expected["gradient"]
        assert difference.norm() < 1e-10 * expected["gradient"].norm()
        torch.testing.assert_close(result["forward"], expected["forward"], rtol=0, atol=1e-5)
        for name, value in expected["sums"].items():
            if name != "padded_positions":
                assert result["sums"][name] == pytest.approx(value, rel=1e-10), name


@pytest.mark.slow
def test_equal_responses_have_equal_scores_on_two_ranks(of_ranks):
    prompts, responses = groups_of_equals()
    for result in of_ranks.values():
        assert_equals_have_equal_scores(prompts, responses, result["scores"])
        assert len(set(result["scores_of_one"])) == 1
        assert result["scores"] == pytest.approx(of_ranks[1, 8]["scores"], abs=1e-5)
        assert result["scores_of_one"] == pytest.approx(result["scores"][:4], abs=1e-5)
