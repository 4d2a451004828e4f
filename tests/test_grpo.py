"""What is GRPO's alone: its advantages, its loss, and a run."""

import math
import random
from dataclasses import fields, replace

import pytest
import torch
from helpers import hooks
from helpers.formulas import (
    chosen_logprobs,
    geometric_mean,
    log_softmax_of,
    surrogate_loss,
    weights_by_definition,
)
from helpers.loops import EPISODES
from helpers.rollouts import (
    SIZES,
    STOP,
    VOCAB,
    cut_in_every_way,
    in_float32,
    make_rollout,
    near_policy,
    one_of_ranks,
    spoil_padding,
    tiny_policy,
)
from helpers.runs import sequences_of

import grpo_vllm_async as grpo

# -------------------------------------------------------------------------------- group advantages


def group_advantages(scores, size, normalization, scored=None):
    scored = torch.ones_like(scores) if scored is None else scored
    return grpo.group_advantages(scores, scored, size, normalization)


@pytest.mark.parametrize("normalization", ["standard", "centered"])
def test_groups_are_normalized_each_on_its_own(normalization):
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(24, dtype=torch.float64, generator=generator) * 5 + 3
    advantages = group_advantages(scores, 6, normalization)
    for i in range(0, 24, 6):
        group = scores[i : i + 6]
        deviation = group.std(correction=1) if normalization == "standard" else 1
        torch.testing.assert_close(advantages[i : i + 6], (group - group.mean()) / deviation)


@pytest.mark.parametrize("failed", [0, 1, 6, 8])
@pytest.mark.parametrize("score", [0.1, 3.3, -10.0, 1e6])
@pytest.mark.parametrize("normalization", ["standard", "centered"])
def test_constant_group_is_exactly_zero(failed, score, normalization):
    # In float32 the mean of seven 3.3 is not 3.3, and the rest divided by a deviation of 0 + 1e-8
    # is not small. And the zeros of the failed ones are no spread
    scored = torch.tensor([0.0] * failed + [1.0] * (8 - failed))
    scores = score * scored
    assert grpo.has_spread(scores.view(1, 8), scored.view(1, 8)).tolist() == [[False]]
    assert (group_advantages(scores, 8, normalization, scored) == 0).all()


@pytest.mark.parametrize("normalization", ["standard", "centered"])
def test_failed_reward_is_no_zero_in_its_group(normalization):
    """What stands in its place must not matter."""
    scores = torch.tensor([1.0, 3.0, 4.0, 0.0, 0.0, 2.0, 5.0, 9.0], dtype=torch.float64)
    scored = torch.tensor([1, 1, 1, 0, 0, 1, 1, 1], dtype=torch.float64)
    expected = group_advantages(scores[scored.bool()], 3, normalization)
    for stand_in in (0.0, -1e6):
        scores[[3, 4]] = stand_in
        advantages = group_advantages(scores, 4, normalization, scored)
        torch.testing.assert_close(advantages[scored.bool()], expected)
        assert advantages[[3, 4]].tolist() == [0.0, 0.0]


# ---------------------------------------------------------------------------------------- the loss


def grpo_args(**changes):
    options = {
        "dtype": "float32",
        "per_device_train_batch_size": 8,
        "temperature": 0.8,
        "response_length": 20,  # longer than the longest response
        "beta": 0.1,
        "number_samples_per_prompt": 4,
    }
    return grpo.Args(**options | changes)


def grpo_rollout(policy, distance):
    """make_rollout's as near_policy has it, with one advantage a response; all are computed."""
    batch = near_policy(make_rollout(), policy, distance)
    generator = torch.Generator().manual_seed(5)
    advantages = torch.randn(len(SIZES), 1, dtype=torch.float64, generator=generator)
    batch = vars(replace(batch, advantages=advantages * batch.mask))
    batch["computed"] = torch.ones(len(SIZES), dtype=torch.float64)
    return grpo.Batch(**{field.name: batch[field.name] for field in fields(grpo.Batch)})


def gradient_of(policy, batch, args, accelerator, rows=range(8), is_first=False):
    policy.zero_grad()
    rows = list(rows)
    sums = grpo.accumulate_gradients(accelerator, policy, batch, rows, is_first, args)
    gradient = torch.cat([p.grad.flatten() for p in policy.parameters()])
    return gradient, {name: value.item() for name, value in sums.items()}


def reference_gradient(policy, batch, args):
    """GRPO's loss as the papers write it, response by response and without padding."""
    policy.zero_grad()
    total, tokens, kept = 0.0, 0, 0
    for row, (prompt, response) in enumerate(sequences_of(vars(batch))):
        if not batch.loss_mask[row].any():
            continue
        size, inside = len(response), batch.mask[row].bool()
        kept, tokens = kept + 1, tokens + size
        new = chosen_logprobs(policy.model, prompt, response, args.temperature)
        names = ("logprobs", "ref_logprobs", "sampler_logprobs", "advantages")
        old, ref, sampler, advantages = (getattr(batch, name)[row, inside] for name in names)
        level = args.importance_sampling_level
        weights = weights_by_definition(old, sampler, args, level)
        token_ratio = ratio = (new - old).exp()
        if level == "sequence":  # GSPO, eq. 7: (pi(y) / pi_old(y)) ^ (1 / |y|)
            ratio = geometric_mean(token_ratio).expand(size)
        pg_loss = surrogate_loss(
            ratio, advantages, args.cliprange, args.cliprange_higher, args.dual_clip
        )
        # For these forms see test_kl_gradient_is_that_of_the_true_kl
        d = new - ref
        kl = {
            "kl1": d * token_ratio,
            "kl2": d**2 / 2 * token_ratio.detach(),
            "kl3": ((-d).exp() - 1 + d) * token_ratio,
        }[args.kl_estimator]
        per_token = weights * (pg_loss + args.beta * kl)
        if args.loss_aggregation == "sequence":
            total = total + per_token.mean()
        else:
            total = total + per_token.sum()
    count = {"token": tokens, "sequence": kept, "constant": kept * args.response_length}
    (total / count[args.loss_aggregation]).backward()
    return torch.cat([p.grad.flatten() for p in policy.parameters()])


SEQUENCE = {"importance_sampling_level": "sequence"}
TOKEN_MASK = {"mismatch_mask": "token", "mismatch_mask_range": 1.3}
SEQUENCE_MASK = {"mismatch_mask": "sequence", "mismatch_mask_range": 1.2}


@pytest.mark.parametrize("left_out", [[], [3, 6]], ids=["all", "two left out"])
@pytest.mark.parametrize(
    ("distance", "options"),
    [
        (0.0, {}),
        (0.4, {}),
        (0.4, {"beta": 0.0}),
        (0.4, {"kl_estimator": "kl1"}),
        (0.4, {"kl_estimator": "kl2", "tis_cap": 1.1}),
        (0.4, {"cliprange": 0.05}),
        (0.4, {"cliprange_higher": 4.0}),
        (0.4, {"dual_clip": 1.5}),
        (0.4, {"tis_cap": 0.0, **SEQUENCE}),
        (0.4, {"loss_aggregation": "sequence"}),
        (0.4, {"loss_aggregation": "constant", **SEQUENCE}),
        (0.4, {**TOKEN_MASK, "loss_aggregation": "sequence"}),
        (0.4, {**SEQUENCE_MASK, **SEQUENCE, "dual_clip": 1.1}),
        (0.4, {**SEQUENCE_MASK, "loss_aggregation": "constant", "beta": 0.0}),
        (0.4, {"loss_aggregation": "sequence", "micro_batch_tokens": 45}),
    ],
    ids=str,
)
def test_gradient_is_that_of_the_papers_formula_however_it_is_cut(
    distance, options, left_out, accelerator
):
    """Responses whose reward failed, and cut ones, may be left out of the loss and its mean."""
    policy, args = tiny_policy().double(), grpo_args(**options)
    spoil_padding(policy)
    batch = grpo_rollout(policy, distance)
    batch.loss_mask[left_out] = 0
    expected = reference_gradient(policy, batch, args)
    if options:  # it binds; kl2's gradient is kl3's on every token, but tis_cap is not
        plain = reference_gradient(policy, batch, grpo_args())
        assert (expected - plain).norm() > 1e-3 * expected.norm()
    if args.beta == 0:
        batch.ref_logprobs = None

    def compute(accelerator, args):
        return gradient_of(policy, batch, args, accelerator)

    _, expected_sums = compute(accelerator, args)
    assert expected_sums["tokens"] == batch.loss_mask.sum()
    for found, sums in cut_in_every_way(compute, args):
        assert (found - expected).norm() < 1e-10 * expected.norm()
        for name in sums.keys() - {"padded_positions"}:
            assert sums[name] == pytest.approx(expected_sums[name], rel=1e-9, abs=1e-12), name


@pytest.mark.parametrize("estimator", ["kl1", "kl2", "kl3"])
@pytest.mark.parametrize(
    ("old_seed", "sampler_seed"), [(0, 0), (3, 3), (3, 5)], ids=["on policy", "off", "stale"]
)
def test_kl_gradient_is_that_of_the_true_kl(old_seed, sampler_seed, estimator, accelerator):
    """Every token there is, as often as it is sampled: the mean is the reverse KL's gradient."""
    policy, prompt, temperature = tiny_policy(seed=0).double(), [5, 7, 2], 0.8
    new = log_softmax_of(policy.model, prompt, [STOP], temperature)[0]
    with torch.no_grad():
        old, sampler, ref = (
            log_softmax_of(tiny_policy(seed).double().model, prompt, [STOP], temperature)[0]
            for seed in (old_seed, sampler_seed, 4)
        )
    (new.exp() * (new - ref)).sum().backward()
    expected = torch.cat([p.grad.flatten() for p in policy.parameters()])
    assert expected.norm() > 0.1

    every_token = [(prompt, [token]) for token in range(VOCAB)]
    input_ids, mask, lengths = grpo.collate(every_token, "cpu")
    mask = mask.double()
    batch = replace(
        grpo_rollout(policy, 0.0),
        input_ids=input_ids,
        lengths=lengths,
        mask=mask,
        loss_mask=mask,
        logprobs=grpo.to_rows(old, mask),
        sampler_logprobs=grpo.to_rows(sampler, mask),
        ref_logprobs=grpo.to_rows(ref, mask),
        computed=torch.ones(VOCAB, dtype=torch.float64),
        advantages=0 * mask,  # so that the KL is all there is
    )
    args = grpo_args(beta=1.0, kl_estimator=estimator, tis_cap=1e9)
    found = torch.zeros_like(expected)
    for token, probability in enumerate(sampler.exp()):
        gradient, _ = gradient_of(policy, batch, args, accelerator, [token])
        found += probability * gradient
    assert (found - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.parametrize("zeros", ["loss_mask", "computed"])
@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_nothing_to_learn_from_gives_a_finite_zero(aggregation, zeros, accelerator):
    policy = tiny_policy()
    batch = in_float32(grpo_rollout(policy, 0.4))
    setattr(batch, zeros, torch.zeros_like(getattr(batch, zeros)))
    args = grpo_args(per_device_train_batch_size=3, loss_aggregation=aggregation)
    gradient, sums = gradient_of(policy, batch, args, accelerator)
    assert (gradient == 0).all()
    assert all(math.isfinite(value) for value in sums.values())
    assert sums["tokens"] == 0


# ----------------------------------------------------- responses that no gradient can come from


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_responses_without_advantage_need_not_be_computed(aggregation, level, accelerator):
    """The gradient is the same, and the metrics are over the others."""
    policy = tiny_policy().double()
    args = grpo_args(beta=0.0, loss_aggregation=aggregation, importance_sampling_level=level)
    batch = grpo_rollout(policy, 0.4)
    batch.advantages[[1, 2, 4, 7]] = 0
    batch.loss_mask[5] = 0
    expected, _ = gradient_of(policy, batch, args, accelerator)
    rows = [0, 3, 6]  # of two ranks one has another row besides
    _, expected_sums = gradient_of(policy, batch, args, accelerator, rows)
    batch.computed[[1, 2, 4, 5, 7]] = 0

    def compute(accelerator, args):
        return gradient_of(policy, batch, args, accelerator)

    for found, sums in cut_in_every_way(compute, args):
        assert (found - expected).norm() < 1e-10 * expected.norm()
        assert sums["tokens"] == batch.mask[rows].sum()
        for name in sums.keys() - {"positions", "padded_positions"}:
            assert sums[name] == pytest.approx(expected_sums[name], rel=1e-9, abs=1e-12), name


@pytest.mark.parametrize("count", range(13))
def test_each_rank_makes_as_many_passes_however_many_responses_are_computed(count):
    """With DDP the others would wait for its gradients for ever."""
    mini_batch, computed = list(range(6, 18)), torch.zeros(24)
    computed[[0, *random.Random(count).sample(mini_batch, count)]] = 1
    rows = grpo.rows_to_compute(mini_batch, computed, num_ranks=3)
    shares = [
        grpo.cut_micro_batches(one_of_ranks(rank, 3), rows, torch.arange(2, 26), 2, grpo_args())
        for rank in range(3)
    ]
    assert len({len(share) for share in shares}) == 1 and shares[0]
    dealt = [row for share in shares for rows, _ in share for row in rows]
    needed = {row for row in mini_batch if computed[row]}
    assert needed <= set(dealt) <= set(mini_batch)
    assert len(dealt) == len(set(dealt)) <= max(3, len(needed) + 2)


# ------------------------------------------------------------- log-probabilities before any update


@pytest.mark.parametrize("options", [{}, {"micro_batch_tokens": 45}], ids=["by rows", "by tokens"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_first_update_gives_the_old_logprobs_of_a_pass_of_their_own(ranks, options):
    """To the bit, as the ratio, which is 1. What its weights are made of are those, too."""
    policy, args = tiny_policy(), grpo_args(per_device_train_batch_size=3, beta=0.0, **options)
    batch = in_float32(grpo_rollout(policy, 0.4))
    batch.computed[[2, 5]] = 0
    inputs = batch.input_ids, batch.mask, batch.lengths
    size = args.per_device_train_batch_size
    for rank in range(ranks):
        accelerator = one_of_ranks(rank, ranks)
        rows = grpo.rows_to_compute(list(range(8)), batch.computed, ranks)
        expected = grpo.forward_all(accelerator, policy, [rows], *inputs, size, args)
        batch.logprobs = torch.zeros_like(batch.mask)  # not known yet
        first, first_sums = gradient_of(policy, batch, args, accelerator, is_first=True)
        assert expected.any() and torch.equal(batch.logprobs, expected)
        assert first_sums["val/ratio"] == first_sums["tokens"] > 0
        batch.logprobs = expected
        again, sums = gradient_of(policy, batch, args, accelerator)
        assert first.any() and torch.equal(first, again) and first_sums == sums


def test_sampler_is_checked_before_the_first_step_of_the_optimizer(run_main, monkeypatch):
    """With the log-probabilities of all mini-batches: of the first, which come with its update."""
    events = []

    def note(call, given):
        assert (given["logprobs"][given["mask"].bool()] < 0).all()
        events.append("check")
        return call()

    hooks.around(grpo, "check_sampler", note, put=monkeypatch.setattr)
    with hooks.before_each_optimizer_step(lambda optimizer: events.append("step")):
        run_main("grpo_vllm_async.py", total_episodes=EPISODES)
    assert events == ["check", "step", "step"]


@pytest.mark.parametrize(("updates", "passes"), [(1, 0), (2, 1)])
def test_no_pass_for_what_the_first_update_computes(updates, passes, run_main, monkeypatch):
    seen = []

    def note(call, given):
        seen.append(given["mini_batches"])
        return call()

    hooks.around(grpo, "forward_all", note, put=monkeypatch.setattr)
    size = EPISODES // updates
    run_main(
        "grpo_vllm_async.py",
        total_episodes=EPISODES,
        beta=0.0,
        num_epochs=1,
        local_mini_batch_size=size,
    )
    (mini_batches,) = seen
    assert len(mini_batches) == passes


# ------------------------------------------------------------------------------------------ main()


@pytest.fixture(scope="module")
def sequence_run(run_main):
    """GSPO; some rewards fail, some responses are cut."""

    def score(data_source, response, ground_truth):
        if response.startswith("6"):
            raise OSError("the grader is out of paper")
        return 0.3 * (1 + len(response) % 2)

    return run_main(
        "grpo_vllm_async.py",
        score,
        beta=0.0,
        importance_sampling_level="sequence",
        mask_truncated_completions=True,
        non_stop_penalty=False,
    )


def test_truncated_responses_are_in_their_group_but_not_in_the_loss(sequence_run):
    for batch, line in zip(sequence_run.batches, sequence_run.metrics, strict=True):
        stopped = torch.tensor([float(response[-1] == STOP) for response in batch.responses])
        assert 0 < (stopped * batch.scored).sum() < batch.scored.sum() < EPISODES
        assert torch.equal(batch.loss_mask, batch.mask * (stopped * batch.scored)[:, None])
        expected = grpo.group_advantages(batch.scores, batch.scored, 4, "standard")
        assert torch.equal(batch.advantages, expected[:, None] * batch.mask)
        without_spread = (expected.view(4, 4) == 0).all(1).sum()
        assert line["val/zero_variance_groups"] == without_spread


def test_responses_are_computed_where_they_have_an_advantage(sequence_run):
    for batch, line in zip(sequence_run.batches, sequence_run.metrics, strict=True):
        computed = (batch.advantages * batch.loss_mask).any(1)
        assert torch.equal(batch.computed, computed.float())
        assert 0 < computed.sum() == line["val/computed_responses"] < EPISODES
        inside = (batch.mask * batch.computed[:, None]).bool()
        logprobs = batch.logprobs[inside].double()
        log_ratio = logprobs - batch.sampler_logprobs[inside]
        expected = {
            "objective/entropy": -logprobs.sum() / computed.sum(),
            "mismatch/logprob_diff_mean": log_ratio.abs().mean(),
            "mismatch/logprob_diff_max": log_ratio.abs().max(),
            "mismatch/kl": (log_ratio.exp() - 1 - log_ratio).mean(),
        }
        for name, value in expected.items():
            assert line[name] == pytest.approx(value.item(), rel=1e-4, abs=1e-8), name


@pytest.mark.parametrize(("beta", "correct"), [(0.0, ("",)), (0.1, ("6", "7"))])
def test_all_responses_are_computed_with_a_kl_or_where_none_has_an_advantage(
    beta, correct, run_main
):
    def score(data_source, response, ground_truth):
        return float(response.startswith(correct))

    options = {"total_episodes": EPISODES, "non_stop_penalty": False, "beta": beta}
    run = run_main("grpo_vllm_async.py", score, **options)
    (line,), (batch,) = run.metrics, run.batches
    assert batch.computed.all() and line["val/computed_responses"] == EPISODES
    assert (batch.logprobs[batch.mask.bool()] < 0).all()
    assert line["val/zero_variance_groups"] > 0 and all(map(math.isfinite, line.values()))
    assert (line["optim/grad_norm"] == 0) == (not batch.advantages.any()) == (beta == 0)


def test_weight_of_a_response_is_the_geometric_mean_of_its_ratios(sequence_run):
    args = grpo_args(importance_sampling_level="sequence")
    for batch, line in zip(sequence_run.batches, sequence_run.metrics, strict=True):
        far = 0
        weights = grpo.importance_weights(batch.logprobs, batch.sampler_logprobs, batch.mask, args)
        assert not weights[~batch.mask.bool()].any()
        for row in batch.computed.nonzero().flatten().tolist():
            inside = batch.mask[row].bool()
            ratios = (batch.logprobs - batch.sampler_logprobs)[row, inside].double().exp()
            mean = geometric_mean(ratios)
            far += len(ratios) * (mean > 2).item()
            expected = mean.clamp(max=2.0).expand(len(ratios))
            found = weights[row, inside].double()
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
        tokens = batch.mask[batch.computed.bool()].sum().item()
        assert line["mismatch/tis_clipfrac"] == pytest.approx(far / tokens)
