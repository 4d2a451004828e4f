"""What is GRPO's alone: its advantages, its loss, and a run."""

import math
import random
from collections import Counter
from dataclasses import replace

import pytest
import torch
from helpers import formulas, hooks, rollouts
from helpers.files import read_json_lines
from helpers.loops import EPISODES
from helpers.rollouts import STOP, VOCAB, gradients, grpo_args, one_of_ranks, tiny_policy
from helpers.runs import sequences_of

import grpo_vllm_async as grpo

# -------------------------------------------------------------------------------- group advantages


@pytest.mark.parametrize("normalization", ["standard", "centered"])
def test_advantages_are_of_the_known_scores_of_each_group(normalization):
    """What stands in the place of a score that is not known must not matter."""
    scores = torch.randn(24, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 5
    scored = torch.ones_like(scores)
    scored[[7, 11, 23]] = 0
    for stand_in in (0.0, -1e6):
        scores[scored == 0] = stand_in
        advantages = grpo.group_advantages(scores, scored, 6, normalization)
        assert (advantages[scored == 0] == 0).all()
        for i in range(0, 24, 6):
            known = scored[i : i + 6].bool()
            group = scores[i : i + 6][known]
            deviation = group.std(correction=1) if normalization == "standard" else 1
            expected = (group - group.mean()) / deviation
            torch.testing.assert_close(advantages[i : i + 6][known], expected)


@pytest.mark.parametrize("failed", [0, 1, 6, 8])
@pytest.mark.parametrize("score", [0.1, 3.3, -10.0, 1e6])
@pytest.mark.parametrize("normalization", ["standard", "centered"])
def test_constant_group_is_exactly_zero(failed, score, normalization):
    # In float32 the mean of seven 3.3 is not 3.3, and the rest divided by a deviation of 0 + 1e-8
    # is not small. And the zeros of the failed ones are no spread
    scored = torch.tensor([0.0] * failed + [1.0] * (8 - failed))
    scores = score * scored
    assert (grpo.group_advantages(scores, scored, 8, normalization) == 0).all()


# ---------------------------------------------------------------------------------------- the loss


def grpo_rollout(policy, distance):
    """One whose old policy is near this one, with one advantage a response; all are computed."""
    batch = rollouts.near_policy(rollouts.make_rollout(), policy, distance)
    generator = torch.Generator().manual_seed(5)
    advantages = torch.randn(len(rollouts.SIZES), 1, dtype=torch.float64, generator=generator)
    return rollouts.for_grpo(replace(batch, advantages=advantages * batch.mask))


def reference_gradient(policy, batch, args):
    """GRPO's loss as the papers write it, response by response; and sums over its tokens."""
    total, kept, sums = 0.0, 0, Counter()
    for row, (prompt, response) in enumerate(sequences_of(vars(batch))):
        inside = batch.loss_mask[row].bool()
        if not inside.any():
            continue
        kept += 1
        names = ("logprobs", "ref_logprobs", "sampler_logprobs", "advantages")
        old, ref, sampler, advantages = (getattr(batch, name)[row, inside] for name in names)
        every = formulas.log_softmax_of(policy.model, prompt, response, args.temperature)
        new, level = formulas.at(every, response), args.importance_sampling_level
        weights = formulas.weights_by_definition(old, sampler, args, level)
        token_ratio = ratio = (new - old).exp()
        if level == "sequence":  # GSPO, eq. 7: (pi(y) / pi_old(y)) ^ (1 / |y|)
            ratio = formulas.geometric_mean(token_ratio).expand(len(response))
        surrogate = formulas.surrogate_loss(
            ratio, advantages, args.cliprange, args.cliprange_higher
        )
        # For these forms see test_kl_gradient_is_that_of_the_true_kl
        d = new - ref
        kl = (
            weights
            * {
                "kl1": d * token_ratio,
                "kl2": d**2 / 2 * token_ratio.detach(),
                "kl3": ((-d).exp() - 1 + d) * token_ratio,
            }[args.kl_estimator]
        )
        per_token = weights * surrogate + args.beta * kl
        is_mean = args.loss_aggregation == "sequence"
        total = total + (per_token.mean() if is_mean else per_token.sum())
        of_row = formulas.policy_sums(surrogate, weights, ratio, advantages, every, response, old)
        if args.beta > 0:
            of_row["loss/kl_avg"] = kl
        sums.update({name: tensor.sum().item() for name, tensor in of_row.items()})
    counts = {"token": sums["tokens"], "sequence": kept, "constant": kept * args.response_length}
    loss = total / counts[args.loss_aggregation]
    sums["objective/loss"] = loss.item()
    found = torch.autograd.grad(loss, list(policy.parameters()))
    return torch.cat([gradient.flatten() for gradient in found]), sums


SEQUENCE = {"importance_sampling_level": "sequence"}
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
        (0.4, {"tis_cap": 0.0, **SEQUENCE}),
        (0.4, {"loss_aggregation": "sequence"}),
        (0.4, {"loss_aggregation": "constant", **SEQUENCE}),
        (0.4, {**SEQUENCE_MASK, "loss_aggregation": "sequence"}),
        (0.4, {**SEQUENCE_MASK, **SEQUENCE}),
        (0.4, {**SEQUENCE_MASK, "loss_aggregation": "constant", "beta": 0.0}),
        (0.4, {"loss_aggregation": "sequence", "micro_batch_tokens": 45}),
    ],
    ids=str,
)
def test_gradient_is_that_of_the_papers_formula_however_it_is_cut(distance, options, left_out):
    """Responses whose reward failed, and cut ones, may be left out of the loss and its mean."""
    policy, args = tiny_policy().double(), grpo_args(**options)
    rollouts.spoil_padding(policy)
    batch = grpo_rollout(policy, distance)
    batch.loss_mask[left_out] = 0
    expected, expected_sums = reference_gradient(policy, batch, args)
    if options:  # it binds; kl2's gradient is kl3's on every token, but tis_cap is not
        plain, _ = reference_gradient(policy, batch, grpo_args())
        assert (expected - plain).norm() > 1e-3 * expected.norm()
    if args.beta == 0:
        batch.ref_logprobs = None
    for found, sums in rollouts.cut_in_every_way([policy], batch, args):
        assert (found - expected).norm() < 1e-10 * expected.norm()
        assert sums.keys() == expected_sums.keys()
        for name, value in expected_sums.items():
            assert sums[name] == pytest.approx(value, rel=1e-9, abs=1e-9), name


@pytest.mark.parametrize("estimator", ["kl1", "kl2", "kl3"])
@pytest.mark.parametrize(
    ("old_seed", "sampler_seed"), [(0, 0), (3, 3), (3, 5)], ids=["on policy", "off", "stale"]
)
def test_kl_gradient_is_that_of_the_true_kl(old_seed, sampler_seed, estimator, accelerator):
    """Every token there is, as often as it is sampled: the mean is the reverse KL's gradient."""
    policy, prompt, temperature = tiny_policy(seed=0).double(), [5, 7, 2], 0.8
    new = formulas.log_softmax_of(policy.model, prompt, [STOP], temperature)[0]
    with torch.no_grad():
        old, sampler, ref = (
            formulas.log_softmax_of(tiny_policy(seed).double().model, prompt, [STOP], temperature)[
                0
            ]
            for seed in (old_seed, sampler_seed, 4)
        )
    (new.exp() * (new - ref)).sum().backward()
    expected = torch.cat([p.grad.flatten() for p in policy.parameters()])
    assert expected.norm() > 0.1

    every_token = [(prompt, [token]) for token in range(VOCAB)]
    input_ids, mask, lengths = rollouts.collate_pairs(every_token)
    mask = mask.double()
    batch = replace(
        grpo_rollout(policy, 0.0),
        input_ids=input_ids,
        lengths=lengths,
        mask=mask,
        loss_mask=mask,
        scores=torch.zeros(VOCAB, dtype=torch.float64),
        has_score=torch.ones(VOCAB, dtype=torch.float64),
        logprobs=grpo.to_rows(old, mask),
        sampler_logprobs=grpo.to_rows(sampler, mask),
        ref_logprobs=grpo.to_rows(ref, mask),
        computed=torch.ones(VOCAB, dtype=torch.float64),
        advantages=0 * mask,  # so that the KL is all there is
    )
    args = grpo_args(beta=1.0, kl_estimator=estimator, tis_cap=1e9)
    found = torch.zeros_like(expected)
    for token, probability in enumerate(sampler.exp()):
        gradient, _ = gradients(accelerator, [policy], batch, args, rows=[token])
        found += probability * gradient
    assert (found - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.parametrize("zeros", ["loss_mask", "computed"])
@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_nothing_to_learn_from_gives_a_finite_zero(aggregation, zeros, accelerator):
    policy = tiny_policy()
    batch = rollouts.in_float32(grpo_rollout(policy, 0.4))
    getattr(batch, zeros).zero_()
    args = grpo_args(per_device_train_batch_size=3, loss_aggregation=aggregation)
    gradient, sums = gradients(accelerator, [policy], batch, args)
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
    expected, sums = gradients(accelerator, [policy], batch, args)
    expected_loss = sums["objective/loss"]
    rows = [0, 3, 6]  # of two ranks one has another row besides
    _, expected_sums = gradients(accelerator, [policy], batch, args, rows)
    batch.computed[[1, 2, 4, 5, 7]] = 0
    for found, sums in rollouts.cut_in_every_way([policy], batch, args):
        assert (found - expected).norm() < 1e-10 * expected.norm()
        assert sums["tokens"] == batch.mask[rows].sum()
        expected_sums["objective/loss"] = expected_loss  # of all of them, computed or not
        for name in sums:
            assert sums[name] == pytest.approx(expected_sums[name], rel=1e-9, abs=1e-12), name


@pytest.mark.parametrize("count", range(13))
def test_each_rank_has_as_many_rows_however_many_responses_are_computed(count):
    """In a pass of its own a rank would wait for the others for ever."""
    mini_batch, computed = list(range(6, 18)), torch.zeros(24)
    needed = random.Random(count).sample(mini_batch, count)
    computed[[0, *needed]] = 1
    prompt = grpo.Prompt("row 0", "", [5], None, None, None)
    batch = grpo.collate([rollouts.response_of(prompt, [6] * (i + 1)) for i in range(24)], "cpu")
    batch.computed = computed
    args = grpo_args(micro_batch_tokens=0)
    shares = [
        [rows for rows, _ in grpo.cut_micro_batches(rank, batch, mini_batch, 2, args)]
        for rank in (one_of_ranks(number, 3) for number in range(3))
    ]
    assert len({str([len(rows) for rows in share]) for share in shares}) == 1
    rows = [row for share in shares for rows in share for row in rows]
    assert len(rows) == len(set(rows)) == 3 * max(1, math.ceil(count / 3))
    assert set(needed) <= set(rows) <= set(mini_batch)


# ------------------------------------------------------------- log-probabilities before any update


@pytest.mark.parametrize("options", [{}, {"micro_batch_tokens": 45}], ids=["by rows", "by tokens"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_first_update_gives_the_old_logprobs_of_a_pass_of_their_own(ranks, options):
    """To the bit, as the ratio, which is 1. What its weights are made of are those, too."""
    policy, args = tiny_policy(), grpo_args(per_device_train_batch_size=3, beta=0.0, **options)
    batch = rollouts.in_float32(grpo_rollout(policy, 0.4))
    batch.computed[[2, 5]] = 0
    size, rows = args.per_device_train_batch_size, list(range(8))
    for rank in range(ranks):
        accelerator = one_of_ranks(rank, ranks)
        expected = grpo.forward_all(accelerator, policy, batch, [rows], size, args)
        batch.logprobs = torch.zeros_like(batch.mask)  # not known yet
        _, found = grpo.accumulate_gradients(accelerator, policy, batch, rows, True, args)
        assert all(map(torch.Tensor.any, expected)) and torch.equal(found, torch.stack(expected))
        first, first_sums = gradients(accelerator, [policy], batch, args, flag=True)
        assert first_sums["val/ratio"] == first_sums["tokens"] > 0
        batch.logprobs, _ = expected
        again, sums = gradients(accelerator, [policy], batch, args)
        assert first.any() and torch.equal(first, again) and first_sums == sums


def test_passes_give_entropies_of_their_rows_on_every_rank():
    """Zeros in other rows, which the sum over ranks leaves as they are."""
    policy, args = tiny_policy(), grpo_args(beta=0.1)
    batch = rollouts.in_float32(grpo_rollout(policy, 0.4))
    with torch.no_grad():
        expected = torch.stack(policy(batch.input_ids, batch.mask))
    shares = []
    for rank in range(2):
        accelerator = one_of_ranks(rank, 2)
        accelerator.reduce = torch.neg  # which each of them must go through
        outputs = grpo.forward_all(accelerator, policy, batch, [[0, 3, 4, 6]], 1, args)
        shares.append(torch.stack(outputs))
        assert (shares[-1].abs().sum((0, 2)) > 0).sum() == 2  # rows
    found = -(shares[0] + shares[1])
    expected[:, [1, 2, 5, 7]] = 0
    torch.testing.assert_close(found, expected)
    assert (expected[1] > 0).any()


@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize("updates", [1, 2])
def test_sampler_is_checked_after_the_passes_of_the_first_update(
    updates, beta, run_main, monkeypatch
):
    """Its first mini-batch has no other passes, and no step may come before.

    With beta 0 responses are skipped by what was sampled, so that its samples cannot be checked.
    """
    events = []

    def note_forward(call, given):
        events.append(f"{len(given['mini_batches'])} passes")
        return call()

    def note_samples(call, given):
        assert (given["entropies"][given["mask"].bool()] > 0).all()
        events.append("samples")
        return call()

    def note_check(call, given):
        assert (given["logprobs"][given["mask"].bool()] < 0).all()
        events.append("check")
        return call()

    hooks.around(grpo, "forward_all", note_forward, put=monkeypatch.setattr)
    hooks.around(grpo, "check_sampler", note_check, put=monkeypatch.setattr)
    hooks.around(grpo, "check_draws", note_samples, put=monkeypatch.setattr)
    sizes = {"total_episodes": EPISODES, "local_mini_batch_size": EPISODES // updates}
    with hooks.before_each_optimizer_step(lambda optimizer: events.append("step")):
        run_main("grpo_vllm_async.py", lambda *_: 1.0, beta=beta, non_stop_penalty=False, **sizes)
    # With beta the reference policy makes passes, and how vLLM drew is checked
    passes, checks = (["1 passes"], ["check", "samples"]) if beta else ([], ["check"])
    assert events == [f"{updates - 1} passes", *passes, *checks, *["step"] * updates]


# ------------------------------------------------------------------------------------------ main()


def test_gspo_leaves_out_what_failed_what_was_cut_and_what_has_no_advantage(run_main):
    """Cut responses are in their group, but not in the loss; and metrics are of those computed."""

    def score(data_source, response, ground_truth):
        if response.startswith("6"):
            raise OSError("the grader is out of paper")
        return 0.3 * (1 + len(response) % 2)

    options = {"mask_truncated_completions": True, "non_stop_penalty": False, "beta": 0.0}
    run = run_main("grpo_vllm_async.py", score, **options, **SEQUENCE)
    args = grpo_args(**SEQUENCE)
    for batch, line in zip(run.batches, run.metrics, strict=True):
        stopped = torch.tensor([float(response[-1] == STOP) for response in batch.responses])
        assert 0 < (stopped * batch.has_score).sum() < batch.has_score.sum() < EPISODES
        in_loss = batch.mask * (stopped * batch.has_score)[:, None]
        assert torch.equal(batch.loss_mask, in_loss)  # computed or not
        advantages = grpo.group_advantages(batch.scores, batch.has_score, 4, "standard")
        assert torch.equal(batch.advantages, advantages[:, None] * batch.mask)
        computed = (batch.advantages * in_loss).any(1)
        assert torch.equal(batch.computed, computed.float())
        assert 0 < computed.sum() < EPISODES

        inside = (batch.mask * batch.computed[:, None]).bool()
        logprobs = batch.logprobs[inside].double()
        log_ratio = logprobs - batch.sampler_logprobs[inside]
        weights = grpo.importance_weights(batch.logprobs, batch.sampler_logprobs, batch.mask, args)
        assert not weights[~batch.mask.bool()].any()
        means = []
        for row, of_row in enumerate(inside):
            if of_row.any():
                ratios = (batch.logprobs - batch.sampler_logprobs)[row, of_row].double().exp()
                means.append(formulas.geometric_mean(ratios).expand(len(ratios)))
        means = torch.cat(means)
        found = weights[inside].double()
        torch.testing.assert_close(found, means.clamp(max=2.0), rtol=1e-3, atol=1e-6)
        expected = {
            "val/zero_variance_groups": (advantages.view(4, 4) == 0).all(1).sum(),
            "val/computed_responses": computed.sum(),
            "objective/entropy": -logprobs.sum() / computed.sum(),
            "mismatch/logprob_diff_mean": log_ratio.abs().mean(),
            "mismatch/logprob_diff_max": log_ratio.abs().max(),
            "mismatch/kl": (log_ratio.exp() - 1 - log_ratio).mean(),
            "mismatch/ess": means.sum() ** 2 / (means**2).sum() / len(means),
            "mismatch/tis_clipfrac": (means > 2).double().mean(),
        }
        for name, value in expected.items():
            assert line[name] == pytest.approx(value.item(), rel=1e-4, abs=1e-8), name
    # Of what was not computed nothing is written down, and of all else what it is
    lines = read_json_lines(run.run_dir / "rollouts.jsonl")
    for i, line in enumerate(lines):
        batch, row = run.batches[i // 8], i % 8
        for name in ("logprobs", "entropies"):
            known = getattr(batch, name)[row][batch.mask[row].bool()]
            assert (line[name] is not None) == batch.computed[row]
            if line[name]:
                assert known.all()
                torch.testing.assert_close(torch.tensor(line[name]), known, atol=6e-5, rtol=0)
    assert 0 < sum(line["entropies"] is None for line in lines) < len(lines)


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
