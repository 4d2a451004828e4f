"""What is GRPO's alone: its loss, and a run. Its group advantages are in test_losses.py."""

import itertools
import json
import math
from dataclasses import replace

import pytest
import torch
from helpers.formulas import chosen_logprobs
from helpers.rollouts import PAD, SIZES, STOP, VOCAB, make_rollout, tiny_args, tiny_policy
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


def grpo_rollout():
    """make_rollout's, with a sampler, a reference policy, and one advantage a response."""
    batch = make_rollout()
    generator = torch.Generator().manual_seed(5)
    noise = torch.randn(batch.mask.shape, dtype=torch.float64, generator=generator)
    advantages = torch.randn(len(SIZES), 1, dtype=torch.float64, generator=generator)
    return grpo.Batch(
        prompt_ids=batch.prompt_ids,
        responses=batch.responses,
        mask=batch.mask,
        scores=batch.scores,
        sampler_logprobs=(batch.logprobs - 0.5 * noise.flip(0)) * batch.mask,
        logprobs=batch.logprobs,
        ref_logprobs=(batch.logprobs + 0.3 * noise) * batch.mask,
        advantages=advantages * batch.mask,
        in_loss=torch.ones(len(SIZES), dtype=torch.float64),
    )


def in_float32(batch):
    """A copy, whose tensors are of the dtype of a real run."""
    tensors = {n: v.float() for n, v in vars(batch).items() if isinstance(v, torch.Tensor)}
    return replace(batch, **tensors)


def gradient_of(policy, batch, args, accelerator):
    policy.zero_grad()
    rows = list(range(len(SIZES)))
    sums, _ = grpo.accumulate_gradients(accelerator, policy, batch, rows, args)
    return torch.cat([p.grad.flatten() for p in policy.parameters()]), sums


def reference_gradient(policy, batch, args):
    """GRPO's loss as the papers write it, response by response and without padding."""
    policy.zero_grad()
    total, count, kept = 0.0, {"token": 0, "sequence": 0, "constant": 0}, 0
    for row, (prompt, response) in enumerate(zip(batch.prompt_ids, batch.responses, strict=True)):
        if not batch.in_loss[row]:
            continue
        size, kept = len(response), kept + 1
        count = {
            "token": count["token"] + size,
            "sequence": kept,
            "constant": kept * args.response_length,
        }
        new = chosen_logprobs(policy.model, prompt, response, args.temperature)
        names = ("logprobs", "ref_logprobs", "sampler_logprobs", "advantages")
        old, ref, sampler, advantages = (getattr(batch, name)[row, :size] for name in names)
        w = (old - sampler).exp().clamp(max=args.tis_cap)
        token_ratio = ratio = (new - old).exp()
        if (
            args.importance_sampling_level == "sequence"
        ):  # GSPO, eq. 7: (pi(y) / pi_old(y)) ^ (1 / |y|)
            ratio = ((new.sum() - old.sum()) / size).exp().expand(size)
            w = (old - sampler).mean().exp().clamp(max=args.tis_cap).expand(size)
        clipped = ratio.clamp(1 - args.cliprange, 1 + args.cliprange_higher)
        surrogate = torch.min(ratio * advantages, clipped * advantages)
        d = new - ref
        kl = {"kl1": d * token_ratio, "kl2": d**2 / 2, "kl3": ((-d).exp() - 1 + d) * token_ratio}[
            args.kl_estimator
        ]
        per_token = w * (args.beta * kl - surrogate)
        total = total + (
            per_token.mean() if args.loss_aggregation == "sequence" else per_token.sum()
        )
    (total / count[args.loss_aggregation]).backward()
    return torch.cat([p.grad.flatten() for p in policy.parameters()])


OPTIONS = [
    {},
    {"beta": 0.0},
    {"cliprange_higher": 4.0},
    {"importance_sampling_level": "sequence"},
    {"tis_cap": 1.1},
    {"loss_aggregation": "sequence"},
    {"loss_aggregation": "constant"},
    {"mask_truncated_completions": True},
    {"kl_estimator": "kl1"},
    {"kl_estimator": "kl2"},
    {"mask_truncated_completions": True, "loss_aggregation": "sequence"},
    {
        "mask_truncated_completions": True,
        "loss_aggregation": "constant",
        "importance_sampling_level": "sequence",
    },
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradient_is_that_of_the_papers_formula(options, accelerator):
    policy, batch, args = tiny_policy().double(), grpo_rollout(), grpo_args(**options)
    if args.mask_truncated_completions:
        batch.in_loss = torch.tensor([1, 0, 1, 1, 0, 1, 1, 1], dtype=torch.float64)
    expected = reference_gradient(policy, batch, args)
    assert expected.norm() > 1e-3
    for size in (8, 3, 1):
        args.per_device_train_batch_size = size
        found, _ = gradient_of(policy, batch, args, accelerator)
        assert (found - expected).norm() < 1e-10 * expected.norm(), size


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


def test_every_option_changes_the_gradient(accelerator):
    found = []
    for options in OPTIONS:
        policy, batch, args = tiny_policy().double(), grpo_rollout(), grpo_args(**options)
        batch.in_loss[1] = not args.mask_truncated_completions
        found.append(gradient_of(policy, batch, args, accelerator)[0])
    for (one, i), (other, j) in itertools.combinations(zip(found, OPTIONS, strict=True), 2):
        assert (one - other).norm() > 1e-4 * one.norm(), f"{i} as {j}"


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
    batch.in_loss = torch.zeros(len(SIZES))
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
    assert batch["in_loss"].bool().tolist() == ends
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
    assert line["mismatch/logprob_diff_max"] < 1e-4
    if step > 1:
        assert abs(line["objective/kl"]) > 1e-3


@pytest.mark.slow
def test_some_of_the_responses_were_truncated(grpo_run):
    assert any(0 < line["val/stop_rate"] < 1 for line in grpo_run.metrics)


@pytest.mark.slow
def test_without_kl_no_reference_policy_is_loaded(run_wrapped_script, tmp_path):
    loaded = {}
    for beta in (0.0, 0.1):
        folder = tmp_path / str(beta)
        options = {"total_episodes": 2 * 32, "beta": beta}
        run = run_wrapped_script("grpo_vllm_async.py", "none", folder, **options)
        assert run.returncode == 0, run.output
        loaded[beta] = run.stdout.count("A model is loaded")
        assert all(("objective/kl" in line) == (beta > 0) for line in run.metrics)
    assert loaded == {0.0: 1, 0.1: 2}


@pytest.mark.slow
def test_final_model_loads(grpo_run, assets):
    model = AutoModelForCausalLM.from_pretrained(grpo_run.run_dir / "model")
    start = AutoModelForCausalLM.from_pretrained(assets / "model").state_dict()
    assert all((value != start[name]).any() for name, value in model.state_dict().items())
    assert json.loads((grpo_run.run_dir / "args.json").read_text())["pad_token_id"] == PAD
