"""What is GRPO's alone: its advantages, its KL, what it need not compute, and a run."""

import itertools
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

import grpo_vllm_async as grpo

PROMPT = grpo.Prompt("row 0", "", [5, 7, 2], None, None, None)

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
        groups = [x.view(4, 6) for x in (advantages, scores, scored.bool())]
        for found, group, known in zip(*groups, strict=True):
            group = group[known]
            deviation = group.std(correction=1) if normalization == "standard" else 1
            torch.testing.assert_close(found[known], (group - group.mean()) / deviation)


def test_constant_group_is_exactly_zero():
    """In float32 the mean of seven 3.3 is not 3.3, and divided by next to no deviation it shows."""
    cases = itertools.product([0, 1, 6, 8], [0.1, 3.3, -10.0, 1e6], ["standard", "centered"])
    for failed, score, normalization in cases:
        scored = torch.tensor([0.0] * failed + [1.0] * (8 - failed))
        assert not grpo.group_advantages(score * scored, scored, 8, normalization).any()


# ---------------------------------------------------------------------------------------- the loss


@pytest.mark.parametrize("estimator", ["kl1", "kl3"])
@pytest.mark.parametrize(
    ("old_seed", "sampler_seed"), [(0, 0), (3, 3), (3, 5)], ids=["on policy", "off", "stale"]
)
def test_kl_gradient_is_that_of_the_true_kl(old_seed, sampler_seed, estimator, accelerator):
    """Every token there is, as often as it is sampled: the mean is the reverse KL's gradient."""
    policy, ids, temperature = tiny_policy(seed=0).double(), PROMPT.token_ids, 0.8
    new = formulas.log_softmax_of(policy.model, ids, [STOP], temperature)[0]
    with torch.no_grad():
        models = [tiny_policy(seed).double().model for seed in (old_seed, sampler_seed, 4)]
        every = [formulas.log_softmax_of(model, ids, [STOP], temperature) for model in models]
    (new.exp() * (new - every[2][0])).sum().backward()
    expected = torch.cat([p.grad.flatten() for p in policy.parameters()])
    assert expected.norm() > 0.1

    responses = [rollouts.response_of(PROMPT, [token], score=0.0) for token in range(VOCAB)]
    batch = grpo.collate(responses, "cpu")
    mask = batch.mask.double()
    names = ("logprobs", "sampler_logprobs", "ref_logprobs")
    rows = {name: grpo.to_rows(one[0], mask) for name, one in zip(names, every, strict=True)}
    # Advantages of 0, so that the KL is all there is
    rows |= {"mask": mask, "loss_mask": mask, "computed": mask.amax(1), "advantages": 0 * mask}
    args = grpo_args(beta=1.0, kl_estimator=estimator, tis_cap=1e9)
    found = torch.zeros_like(expected)
    for token, logprob in enumerate(every[1][0]):
        gradient, _ = gradients(accelerator, [policy], replace(batch, **rows), args, rows=[token])
        found += logprob.exp() * gradient
    assert (found - expected).norm() < 1e-5 * expected.norm()


# ----------------------------------------------------- responses that no gradient can come from


def test_row_is_computed_where_any_token_has_a_gradient():
    """By what the loss reads: a fork may change advantages, token by token, after their groups."""
    batch = rollouts.grpo_rollout(tiny_policy(), 0.0)
    batch.advantages = 0 * batch.mask
    rows = [row.nonzero()[-1].item() for row in batch.mask]  # of each the last token
    for row in (1, 2, 5):
        batch.advantages[row, rows[row]] = -0.5
    batch.loss_mask[5] = 0
    expected = torch.tensor([float(row in (1, 2)) for row in range(8)])
    assert torch.equal(grpo.rows_to_compute(batch, grpo_args(beta=0.0)), expected)
    assert grpo.rows_to_compute(batch, grpo_args(beta=0.1)).all()
    batch.advantages.zero_()
    assert grpo.rows_to_compute(batch, grpo_args(beta=0.0)).all()


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_responses_without_advantage_need_not_be_computed(aggregation, level, accelerator):
    """The gradient is the same, and the metrics are over the others."""
    policy = tiny_policy().double()
    args = grpo_args(beta=0.0, loss_aggregation=aggregation, importance_sampling_level=level)
    batch = rollouts.grpo_rollout(policy, 0.4)
    batch.advantages[[1, 2, 4, 7]] = 0
    batch.loss_mask[5] = 0
    expected, of_all = gradients(accelerator, [policy], batch, args)
    rows = [0, 3, 6]  # of several ranks some have other rows besides
    _, sums = gradients(accelerator, [policy], batch, args, rows)
    sums["objective/loss"] = of_all["objective/loss"]  # computed or not
    assert sums["tokens"] == batch.mask[rows].sum()
    batch.computed[[1, 2, 4, 5, 7]] = 0
    rollouts.check_any_cut([policy], batch, args, expected, sums)


def test_each_rank_has_as_many_rows_however_many_responses_are_computed():
    """In a pass of its own a rank would wait for the others for ever."""
    mini_batch, draw = list(range(6, 18)), random.Random(0)
    batch = grpo.collate([rollouts.response_of(PROMPT, [6] * (i + 1)) for i in range(24)], "cpu")
    args, ranks = grpo_args(micro_batch_tokens=0), [one_of_ranks(rank, 3) for rank in range(3)]
    for count in range(13):
        needed = draw.sample(mini_batch, count)
        batch.computed = torch.zeros(24)
        batch.computed[[0, *needed]] = 1
        cuts = [grpo.cut_micro_batches(rank, batch, mini_batch, 2, args) for rank in ranks]
        assert len({str([len(rows) for rows, _ in cut]) for cut in cuts}) == 1
        times = Counter(row for cut in cuts for rows, _ in cut for row in rows)
        assert times.total() == len(times) == 3 * max(1, math.ceil(count / 3))
        assert {*needed} <= {*times} <= {*mini_batch}


# ------------------------------------------------------------- log-probabilities before any update


@pytest.mark.parametrize("options", [{}, {"micro_batch_tokens": 45}], ids=["by rows", "by tokens"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_first_update_gives_the_old_logprobs_of_a_pass_of_their_own(ranks, options):
    """To the bit, as the ratio, which is 1. What its weights are made of are those, too."""
    policy, args = tiny_policy(), grpo_args(per_device_train_batch_size=3, beta=0.0, **options)
    batch = rollouts.in_float32(rollouts.grpo_rollout(policy, 0.4))
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
    batch = rollouts.in_float32(rollouts.grpo_rollout(policy, 0.4))
    with torch.no_grad():
        expected = torch.stack(policy(batch.input_ids, batch.mask))
    expected[:, [1, 2, 5, 7]] = 0
    assert (expected[1] > 0).any()
    for rank in range(2):
        accelerator = one_of_ranks(rank, 2)
        accelerator.reduce = torch.neg  # which each of them must go through
        share = -torch.stack(grpo.forward_all(accelerator, policy, batch, [[0, 3, 4, 6]], 1, args))
        assert share.any(2).any(0).sum() == 2  # rows
        expected -= share
    torch.testing.assert_close(expected, torch.zeros_like(expected))


@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize("updates", [1, 2])
def test_sampler_is_checked_after_the_passes_of_the_first_update(
    updates, beta, run_main, monkeypatch
):
    """Its first mini-batch has no other passes, and no step may come before."""
    events = []

    def note_passes(given):
        events.append(f"{len(given['mini_batches'])} passes")

    def note_check(given):
        inside = given["mask"].bool()
        assert (given["logprobs"][inside] < 0).all()
        events.append("check")

    for name, note in {"forward_all": note_passes, "check_sampler": note_check}.items():
        hooks.before(grpo, name, note, put=monkeypatch.setattr)
    options = {"total_episodes": EPISODES, "local_mini_batch_size": EPISODES // updates}
    options |= {"beta": beta, "non_stop_penalty": False}
    note_step = lambda given: events.append("step")  # noqa: E731
    hooks.before(torch.optim.AdamW, "step", note_step, put=monkeypatch.setattr)
    run = run_main("grpo_vllm_async.py", lambda *_: 1.0, **options)
    passes = ["1 passes"] if beta else []  # by the reference policy
    assert events == [f"{updates - 1} passes", *passes, "check", *["step"] * updates]
    (line,) = run.metrics  # without an advantage all responses are computed
    assert line["val/computed_responses"] == EPISODES and all(map(math.isfinite, line.values()))
    assert (line["optim/grad_norm"] == 0) == (beta == 0)


# ------------------------------------------------------------------------------------------ main()


def test_gspo_leaves_out_what_failed_what_was_cut_and_what_has_no_advantage(run_main):
    """Cut responses are in their group, but not in the loss; and metrics are of those computed."""

    def score(data_source, response, ground_truth):
        if response.startswith("6"):
            raise OSError("the grader is out of paper")
        return 0.3 * (1 + len(response) % 2)

    options = {"mask_truncated_completions": True, "non_stop_penalty": False, "beta": 0.0}
    options["importance_sampling_level"] = "sequence"
    run = run_main("grpo_vllm_async.py", score, **options)
    args = grpo_args(importance_sampling_level="sequence")
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
        logprobs, of_sampler = batch.logprobs, batch.sampler_logprobs
        weights = grpo.importance_weights(logprobs, of_sampler, batch.mask, args)
        assert not weights[~batch.mask.bool()].any()
        ratios = [(logprobs - of_sampler)[i, row].double().exp() for i, row in enumerate(inside)]
        means = [formulas.geometric_mean(x).expand(len(x)) for x in ratios if len(x)]
        means, log_ratio = torch.cat(means), torch.cat(ratios).log()
        found = weights[inside].double()
        torch.testing.assert_close(found, means.clamp(max=2.0), rtol=1e-3, atol=1e-6)
        expected = {
            "val/zero_variance_groups": (advantages.view(4, 4) == 0).all(1).sum(),
            "val/computed_responses": computed.sum(),
            "objective/entropy": -logprobs[inside].double().sum() / computed.sum(),
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
