"""What is GRPO's alone: its loss, and a run. Its group advantages are in test_losses.py."""

import itertools
import json
import math
from dataclasses import replace

import pytest
import torch
from helpers.formulas import (
    chosen_logprobs,
    geometric_mean,
    log_softmax_of,
    surrogate_loss,
    weights_by_definition,
)
from helpers.rollouts import (
    PAD,
    SIZES,
    STOP,
    VOCAB,
    in_float32,
    make_rollout,
    near_policy,
    tiny_args,
    tiny_policy,
    with_failed_rewards,
    without_rows,
)
from helpers.runs import batch_of
from transformers import AutoModelForCausalLM

import grpo_vllm_async as grpo

# ------------------------------------------------------------------------------ the loss's options


def grpo_args(**changes):
    common = vars(tiny_args())
    fields = grpo.Args.__dataclass_fields__
    options = {
        name: value
        for name, value in common.items()
        if name in fields and name not in ("beta", "kl_estimator")
    }
    updates = {
        "num_updates": 2,
        "num_training_steps": 1,
    }  # as in a run in which the old policy is not the new one
    return grpo.Args(**options | {"response_length": 12, "beta": 0.1} | updates | changes)


def grpo_rollout(distance=None):
    """make_rollout's, with a reference policy, and one advantage a response.

    distance: as near_policy has it, to tiny_policy().
    """
    batch = make_rollout()
    if distance is not None:
        batch = near_policy(batch, tiny_policy().double(), distance)
    generator = torch.Generator().manual_seed(5)
    noise = torch.randn(batch.mask.shape, dtype=torch.float64, generator=generator)
    advantages = torch.randn(len(SIZES), 1, dtype=torch.float64, generator=generator)
    return grpo.Batch(
        prompt_ids=batch.prompt_ids,
        responses=batch.responses,
        mask=batch.mask,
        scores=batch.scores,
        scored=batch.scored,
        loss_mask=batch.loss_mask,
        sampler_logprobs=batch.sampler_logprobs,
        logprobs=batch.logprobs,
        ref_logprobs=(batch.logprobs + 0.3 * noise) * batch.mask,
        advantages=advantages * batch.mask,
    )


def with_truncated_responses(batch, rows):
    """A copy, as mask_truncated_completions makes it where these rows have no stop token."""
    stopped = torch.ones(len(SIZES), 1, dtype=torch.float64)
    stopped[rows] = 0
    return replace(batch, loss_mask=batch.loss_mask * stopped)


def gradient_of(policy, batch, args, accelerator):
    policy.zero_grad()
    rows = list(range(len(batch.responses)))
    sums, _ = grpo.accumulate_gradients(accelerator, policy, batch, rows, args)
    return torch.cat([p.grad.flatten() for p in policy.parameters()]), sums


def reference_gradient(policy, batch, args):
    """GRPO's loss as the papers write it, response by response and without padding."""
    policy.zero_grad()
    total, tokens, kept = 0.0, 0, 0
    for row, (prompt, response) in enumerate(zip(batch.prompt_ids, batch.responses, strict=True)):
        if not batch.loss_mask[row, 0]:
            continue
        size = len(response)
        kept, tokens = kept + 1, tokens + size
        new = chosen_logprobs(policy.model, prompt, response, args.temperature)
        names = ("logprobs", "ref_logprobs", "sampler_logprobs", "advantages")
        old, ref, sampler, advantages = (getattr(batch, name)[row, :size] for name in names)
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
OPTIONS = [
    {},
    {"beta": 0.0},
    {"cliprange": 0.05},
    {"cliprange_higher": 4.0},
    {"dual_clip": 1.5},
    SEQUENCE,
    {"tis_cap": 0.0},
    {"tis_cap": 1.1},
    {"loss_aggregation": "sequence"},
    {"loss_aggregation": "constant"},
    {"mask_truncated_completions": True},
    {"kl_estimator": "kl1"},
    {"kl_estimator": "kl2"},
    {"mask_truncated_completions": True, "loss_aggregation": "sequence"},
    {"mask_truncated_completions": True, "loss_aggregation": "constant", **SEQUENCE},
    TOKEN_MASK,
    SEQUENCE_MASK,
    {**TOKEN_MASK, "tis_cap": 0.0},
    {**TOKEN_MASK, "loss_aggregation": "sequence", "kl_estimator": "kl2"},
    {**TOKEN_MASK, "loss_aggregation": "constant", "mask_truncated_completions": True},
    {**TOKEN_MASK, **SEQUENCE, "dual_clip": 1.1},
    {**SEQUENCE_MASK, **SEQUENCE, "kl_estimator": "kl2"},
    {**SEQUENCE_MASK, "loss_aggregation": "sequence", "beta": 0.0},
]


@pytest.mark.parametrize("failed", [[], [3, 6]], ids=["all scored", "two failed"])
@pytest.mark.parametrize("distance", [0.0, 0.4], ids=["on policy", "off policy"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradient_is_that_of_the_papers_formula(options, distance, failed, accelerator):
    policy, args = tiny_policy().double(), grpo_args(**options)
    batch = with_failed_rewards(grpo_rollout(distance), failed)
    if args.mask_truncated_completions:
        batch = with_truncated_responses(batch, [1, 4])
    expected = reference_gradient(policy, batch, args)
    assert expected.norm() > 1e-3
    for size in (8, 3):
        args.per_device_train_batch_size = size
        found, sums = gradient_of(policy, batch, args, accelerator)
        assert (found - expected).norm() < 1e-10 * expected.norm(), size
        assert sums["tokens"] == batch.loss_mask.sum()
    if distance == 0:
        found, _ = gradient_of(policy, replace(batch, logprobs=None), args, accelerator)
        assert (found - expected).norm() < 1e-10 * expected.norm()


def test_every_option_changes_the_gradient(accelerator):
    policy, found = tiny_policy().double(), []
    for options in OPTIONS:
        batch, args = grpo_rollout(0.4), grpo_args(**options)
        if args.mask_truncated_completions:
            batch = with_truncated_responses(batch, [1])
        gradient, sums = gradient_of(policy, batch, args, accelerator)
        # With kl2, whose gradient is kl3's on every token, only the metric is another
        kl = torch.tensor([sums.get("loss/kl_avg", 0.0)])
        found.append(torch.cat([gradient, kl]))
    for (one, i), (other, j) in itertools.combinations(zip(found, OPTIONS, strict=True), 2):
        assert (one - other).norm() > 1e-4 * one.norm(), f"{i} as {j}"


@pytest.mark.parametrize("estimator", ["kl1", "kl2", "kl3"])
@pytest.mark.parametrize("old_seed", [0, 3], ids=["on policy", "off policy"])
def test_kl_gradient_is_that_of_the_true_kl(old_seed, estimator, accelerator):
    """Every token there is, as the old policy samples it: the mean is the reverse KL's gradient."""
    policy, prompt, temperature = tiny_policy(seed=0).double(), [5, 7, 2], 0.8
    new = log_softmax_of(policy.model, prompt, [STOP], temperature)[0]
    with torch.no_grad():
        old, ref = (
            log_softmax_of(tiny_policy(seed).double().model, prompt, [STOP], temperature)[0]
            for seed in (old_seed, 4)
        )
    (new.exp() * (new - ref)).sum().backward()
    expected = torch.cat([p.grad.flatten() for p in policy.parameters()])
    assert expected.norm() > 0.1

    ones = torch.ones(VOCAB, 1, dtype=torch.float64)
    batch = grpo.Batch(
        prompt_ids=[prompt] * VOCAB,
        responses=[[token] for token in range(VOCAB)],
        mask=ones,
        scores=0 * ones[:, 0],
        scored=ones[:, 0],
        loss_mask=ones,
        sampler_logprobs=old[:, None],
        logprobs=old[:, None],
        ref_logprobs=ref[:, None],
        advantages=0 * ones,  # so that the KL is all there is
    )
    args = grpo_args(beta=1.0, kl_estimator=estimator, tis_cap=0.0)
    found = torch.zeros_like(expected)
    for token, probability in enumerate(old.exp()):
        policy.zero_grad()
        grpo.accumulate_gradients(accelerator, policy, batch, [token], args)
        found += probability * torch.cat([p.grad.flatten() for p in policy.parameters()])
    assert (found - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("options", [TOKEN_MASK, SEQUENCE_MASK], ids=str)
def test_masked_tokens_teach_nothing_but_stay_in_the_mean(options, beta, accelerator):
    policy, batch = tiny_policy().double(), grpo_rollout(0.4)
    args, unmasked = grpo_args(beta=beta, **options), grpo_args(beta=beta)
    gone = torch.zeros_like(batch.mask)
    for row, size in enumerate(map(len, batch.responses)):
        logprobs = batch.logprobs[row, :size], batch.sampler_logprobs[row, :size]
        gone[row, :size] = (weights_by_definition(*logprobs, args) == 0).double()
    gone = gone.bool()
    assert 5 < gone.sum() < batch.mask.sum() - 5
    found, sums = gradient_of(policy, batch, args, accelerator)
    assert sums["tokens"] == batch.mask.sum()
    left = replace(batch, loss_mask=batch.mask * ~gone)
    expected, _ = gradient_of(policy, left, unmasked, accelerator)
    expected = expected * left.loss_mask.sum() / batch.mask.sum()
    assert (found - expected).norm() < 1e-6 * expected.norm()
    batch.advantages = torch.where(gone, 1e3, batch.advantages)
    batch.ref_logprobs = torch.where(gone, -9.0, batch.ref_logprobs)
    again, _ = gradient_of(policy, batch, args, accelerator)
    assert torch.equal(again, found)


@pytest.mark.parametrize("kind", ["token", "sequence"])
@pytest.mark.parametrize("tis_cap", [0.0, 2.0])
def test_mismatch_mask_without_limit_is_none_to_the_bit(tis_cap, kind, accelerator):
    policy, batch = tiny_policy(), in_float32(grpo_rollout(0.4))
    off = grpo_args(tis_cap=tis_cap)
    args = grpo_args(tis_cap=tis_cap, mismatch_mask=kind, mismatch_mask_range=math.inf)
    expected, sums = gradient_of(policy, batch, off, accelerator)
    found, sums_without_limit = gradient_of(policy, batch, args, accelerator)
    assert torch.equal(found, expected) and sums_without_limit == sums
    ratios = (batch.logprobs - batch.sampler_logprobs).exp()
    assert grpo.mismatch_metrics(batch, ratios, args) == grpo.mismatch_metrics(batch, ratios, off)


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_response_without_a_score_is_not_in_the_loss(aggregation, accelerator):
    """As if it were not there: not in the sums, and not in what they are divided by."""
    policy, failed = tiny_policy().double(), [1, 6]
    batch, args = with_failed_rewards(grpo_rollout(0.4), failed), grpo_args()
    args.loss_aggregation = aggregation
    rest = without_rows(grpo_rollout(0.4), failed)
    expected, expected_sums = gradient_of(policy, rest, args, accelerator)
    for size in (8, 3, 1):
        args.per_device_train_batch_size = size
        found, sums = gradient_of(policy, batch, args, accelerator)
        assert (found - expected).norm() < 1e-10 * expected.norm()
        for name in sums.keys() - {"positions", "padded_positions"}:
            assert sums[name].item() == pytest.approx(expected_sums[name].item(), rel=1e-9), name
    batch.advantages[failed] = 1e3
    batch.ref_logprobs[failed] = -9.0
    again, sums_again = gradient_of(policy, batch, args, accelerator)
    assert torch.equal(again, found) and sums_again == sums


def test_without_kl_the_gradient_far_from_the_old_policy_is_finite(accelerator):
    """exp(100) is more than float32 holds, and 0 times infinity is not a number."""
    policy, batch, args = tiny_policy(), grpo_rollout(), grpo_args(beta=0.0)
    batch = in_float32(batch)
    batch.logprobs = batch.sampler_logprobs = (batch.logprobs + 100) * batch.mask
    found, _ = gradient_of(policy, batch, args, accelerator)
    assert found.isfinite().all()


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_one_update_a_step_needs_no_forward_pass_before_it(level, accelerator):
    """The update's own pass gives the old log-probabilities: the same gradient, bit for bit."""
    policy, batch = tiny_policy(), in_float32(grpo_rollout())
    args = grpo_args(per_device_train_batch_size=3, importance_sampling_level=level)
    rows = list(range(len(SIZES)))
    batch.logprobs = grpo.forward_all(
        accelerator, policy, batch.prompt_ids, batch.responses, [rows], 3, args
    )
    expected, sums = gradient_of(policy, batch, args, accelerator)
    without = replace(batch, logprobs=None)
    found, sums_without = gradient_of(policy, without, args, accelerator)
    assert expected.norm() > 1e-3 and (found == expected).all()
    _, logprobs = grpo.accumulate_gradients(accelerator, policy, without, rows, args)
    assert (logprobs == batch.logprobs).all()
    assert {n: v.item() for n, v in sums.items()} == {n: v.item() for n, v in sums_without.items()}


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_padding_that_the_policy_finds_impossible_is_no_nan(beta, accelerator):
    # exp(88.8) is infinite in float32, and infinity times a mask of 0 is not 0.
    policy, batch = tiny_policy(), grpo_rollout()
    batch = in_float32(batch)
    bias = torch.zeros(VOCAB)
    bias[PAD] = -100.0

    def lower(module, args, output):
        output.logits = output.logits + bias

    policy.model.register_forward_hook(lower)
    gradient, sums = gradient_of(policy, batch, grpo_args(beta=beta), accelerator)
    assert torch.isfinite(gradient).all() and gradient.norm() > 0
    assert all(math.isfinite(value) for value in sums.values())


def test_all_responses_out_of_the_loss_give_a_finite_zero(accelerator):
    policy, batch = tiny_policy().double(), grpo_rollout()
    batch.loss_mask = torch.zeros_like(batch.mask)
    gradient, sums = gradient_of(
        policy, batch, grpo_args(per_device_train_batch_size=2), accelerator
    )
    assert (gradient == 0).all()
    assert all(math.isfinite(value) for value in sums.values())


# -------------------------------------------------------------------------------------- a real run


@pytest.fixture(scope="module")
def grpo_run(run_script, tmp_path_factory):
    """Four steps on policy, one update each: old and new policy agree."""
    options = {
        "total_episodes": 4 * 32,
        "local_rollout_batch_size": 8,
        "number_samples_per_prompt": 4,
    }
    options |= {
        "temperature": 1.5,
        "beta": 0.1,
        "kl_estimator": "kl1",
        "cliprange_higher": 0.3,
        "async_mode": False,
    }
    options |= {
        "non_stop_penalty": True,
        "penalty_reward_value": -1,
        "mask_truncated_completions": True,
    }
    options |= {
        "lr_scheduler_type": "constant",
        "save_batches": True,
        "learning_rate": 2e-3,
        "response_length": 6,
    }
    run = run_script("grpo_vllm_async.py", tmp_path_factory.mktemp("grpo"), **options)
    assert run.returncode == 0, run.output
    return run


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 2, 3, 4])
def test_metrics_are_recomputed_from_the_batch(grpo_run, step):
    batch = batch_of(grpo_run, step)
    line, scores = grpo_run.metrics[step - 1], batch["scores"].double()
    ends = [ids[-1] == STOP for ids in batch["responses"]]
    stopped = torch.tensor(ends, dtype=torch.float32)
    assert torch.equal(batch["loss_mask"], batch["mask"] * stopped[:, None])
    assert batch["scored"].tolist() == [1.0] * 32
    prompts = batch["prompt_ids"]
    assert (
        all(prompts[i] == prompts[i - i % 4] for i in range(32))
        and len({str(prompt) for prompt in prompts}) == 8
    )
    constant, advantages = 0, []
    for i in range(0, 32, 4):
        group = scores[i : i + 4]
        same = len(set(group.tolist())) == 1
        constant += same
        advantages += (
            [0.0] * 4 if same else ((group - group.mean()) / (group.std() + 1e-8)).tolist()
        )
    assert line["val/zero_variance_groups"] == constant
    for row, advantage in enumerate(advantages):
        size = len(batch["responses"][row])
        assert batch["advantages"][row, :size].tolist() == pytest.approx(
            [advantage] * size, abs=1e-6
        )
    mask = batch["mask"].bool()
    in_loss = mask & torch.tensor(ends)[:, None]
    kl = (batch["logprobs"] - batch["ref_logprobs"]).double()
    weights = (batch["logprobs"] - batch["sampler_logprobs"]).exp().clamp(max=2.0)
    policy_loss = -(batch["advantages"] * weights)[in_loss].mean().item()
    kl_loss = (kl * weights)[in_loss].mean().item()
    expected = {
        "objective/scores": scores.mean().item(),
        "objective/scores_std": scores.std(correction=0).item(),
        "objective/kl": kl.sum().item() / 32,
        "objective/non_score_reward": -0.1 * kl.sum().item() / 32,
        "objective/rlhf_reward": scores.mean().item() - 0.1 * kl.sum().item() / 32,
        "loss/policy_avg": policy_loss,
        "loss/kl_avg": kl_loss,
        "objective/loss": policy_loss + 0.1 * kl_loss,
        "val/stop_rate": sum(ends) / 32,
        "val/sequence_lengths": mask.sum().item() / 32,
        "policy/approxkl_avg": 0.0,
        "policy/clipfrac_avg": 0.0,
        "val/ratio": 1.0,
    }
    for name, value in expected.items():
        assert line[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    assert all(math.isfinite(value) for value in line.values())
    if step > 1:
        assert abs(line["objective/kl"]) > 1e-3


@pytest.mark.slow
def test_every_batch_is_of_the_newest_policy_without_async_mode(grpo_run):
    assert [line["policy/version"] for line in grpo_run.metrics] == [0, 1, 2, 3]
    assert [line["policy/staleness"] for line in grpo_run.metrics] == [0, 0, 0, 0]
    assert max(line["mismatch/logprob_diff_max"] for line in grpo_run.metrics) < 1e-4
    # In the second step the policy before is the reference policy, and that is far away
    batch = batch_of(grpo_run, 2)
    assert (batch["logprobs"] - batch["ref_logprobs"]).abs().max() > 0.01


@pytest.mark.slow
def test_some_of_the_responses_were_truncated(grpo_run):
    assert any(0 < line["val/stop_rate"] < 1 for line in grpo_run.metrics)


@pytest.mark.slow
def test_final_model_loads(grpo_run, assets):
    model = AutoModelForCausalLM.from_pretrained(grpo_run.run_dir / "model")
    start = AutoModelForCausalLM.from_pretrained(assets / "model").state_dict()
    assert all((value != start[name]).any() for name, value in model.state_dict().items())
    assert json.loads((grpo_run.run_dir / "args.json").read_text())["pad_token_id"] == PAD
