"""What models say of padded batches, and the gradients of optimizer batches."""

import functools
import math
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from helpers.formulas import logprobs_and_entropies
from helpers.processes import gradient_of_ranks
from helpers.rollouts import (
    PAD,
    SIZES,
    STOP,
    VOCAB,
    gradients,
    make_rollout,
    tiny_args,
    tiny_policy,
    tiny_value_model,
)

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


def test_loss_is_the_mean_over_tokens_not_over_responses(accelerator):
    batch, args = make_rollout(), tiny_args()
    policy, value_model = tiny_policy().double(), tiny_value_model().double()
    gradient, sums = gradients(accelerator, policy, value_model, batch, args)
    policy.zero_grad()
    value_model.zero_grad()
    pg_total = vf_total = 0.0
    for row, (_, size) in enumerate(SIZES):
        inputs, _ = collate(batch, [row])
        logprobs, _ = policy(inputs, size)
        values = value_model(inputs, size)
        old, weights, advantages, old_values, returns = (
            getattr(batch, name)[row, :size]
            for name in ("logprobs", "importance_weights", "advantages", "values", "returns")
        )
        ratio = (logprobs[0] - old).exp()
        surrogate = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        near = old_values + (values[0] - old_values).clamp(-0.3, 0.3)
        pg_total = pg_total - (weights * surrogate).sum()
        vf_total = vf_total + torch.max((values[0] - returns) ** 2, (near - returns) ** 2).sum() / 2
    tokens = sum(size for _, size in SIZES)
    ((pg_total + vf_total) / tokens).backward()
    expected = torch.cat(
        [p.grad.flatten() for p in [*policy.parameters(), *value_model.parameters()]]
    )
    assert (gradient - expected).norm() < 1e-10 * expected.norm()
    assert sums["loss/policy_avg"] == pytest.approx(pg_total.item())
    assert sums["loss/value_avg"] == pytest.approx(vf_total.item())


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
    batch.responses, batch.mask = [[], []], torch.zeros_like(batch.mask)
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
    for name in ("mask", "logprobs", "importance_weights", "advantages", "values", "returns"):
        whole = getattr(batch, name)
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
        accelerator = SimpleNamespace(
            process_index=rank,
            num_processes=2,
            device=torch.device("cpu"),
            no_sync=lambda model: torch.no_grad() if model is None else torch.enable_grad(),
            backward=lambda loss: loss.backward(),
        )
        share, _ = gradients(accelerator, *models, batch, args)
        shares.append(share)
    mean = (shares[0] + shares[1]) / 2  # as DDP averages
    assert (mean - whole).norm() < 1e-10 * whole.norm()
    assert (shares[0] - shares[1]).norm() > 1e-2 * whole.norm()


@pytest.mark.slow
def test_gradient_of_two_ranks_is_that_of_one(tmp_path):
    expected = gradient_of_ranks("ppo", 1, 8, tmp_path)
    assert expected["gradient"].norm() > 0.1
    for ranks, size in ((1, 1), (2, 4), (2, 2)):
        result = gradient_of_ranks("ppo", ranks, size, tmp_path)
        difference = result["gradient"] - expected["gradient"]
        assert difference.norm() < 1e-10 * expected["gradient"].norm()
        torch.testing.assert_close(result["forward"], expected["forward"], rtol=0, atol=1e-5)
        for name, value in expected["sums"].items():
            if name != "padded_positions":
                assert result["sums"][name] == pytest.approx(value, rel=1e-10), name
