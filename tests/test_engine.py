"""What samples: class VLLM, with its process and its weights, and the transformers backend.

The real engine is started twice: with an untied and with a tied head.
"""

import contextlib
import multiprocessing
import os
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from accelerate import Accelerator
from helpers import REPO, hooks
from helpers.engines import engine_of_pipes
from helpers.formulas import padded_forward
from helpers.processes import alive, folders_of_vllm, wait_until
from helpers.rollouts import STOP, VOCAB, load_policy, tiny_args, tiny_config, tiny_policy

import ppo_sync

# ------------------------------------------------------------------------------------ without vLLM


@pytest.mark.parametrize("fails", [False, True])
def test_vllms_environment_is_not_left_in_the_learners(fails, monkeypatch):
    seen, made = {}, []

    def start():
        seen.update(os.environ)
        if fails:
            raise OSError("no more processes")

    def mkdtemp(make=ppo_sync.tempfile.mkdtemp, **options):
        made.append(make(**options))
        return made[-1]

    process = lambda **_: SimpleNamespace(start=start)  # noqa: E731
    context = SimpleNamespace(Pipe=multiprocessing.Pipe, Process=process)
    monkeypatch.setattr(ppo_sync.mp, "get_context", lambda _: context)
    monkeypatch.setattr(ppo_sync.tempfile, "mkdtemp", mkdtemp)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("VLLM_WORKER_MULTIPROC_METHOD", raising=False)
    before = dict(os.environ)
    try:
        with pytest.raises(OSError, match="no more") if fails else contextlib.nullcontext():
            ppo_sync.VLLM((), 0, 1, tiny_args()).start(tiny_config(), 32)
    finally:
        for folder in made:
            shutil.rmtree(folder)
    assert dict(os.environ) == before
    assert seen["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn" and "RANK" not in seen


@pytest.mark.parametrize("dies", ["before", "during", "survived by a child"])
def test_dead_engine_ends_a_call_that_would_wait_for_ever(dies):
    engine = engine_of_pipes()
    if dies == "before":
        engine.theirs.close()
    elif dies == "during":
        threading.Thread(target=lambda: (engine.theirs.recv(), engine.theirs.close())).start()
    else:  # its end of the connection stays open
        threading.Thread(target=lambda: (engine.theirs.recv(), engine.life.close())).start()
    engine.send(str.upper)
    with pytest.raises(RuntimeError, match=r"vLLM's process died with exit code -9"):
        engine.receive()


def test_answer_that_does_not_come_in_time_is_an_error():
    engine = engine_of_pipes()
    engine.send(str.upper)
    with pytest.raises(TimeoutError, match=r"vLLM has not answered for 0\.1 seconds"):
        engine.receive(0.1)
    engine.theirs.send(("an answer", None, ""))
    assert engine.receive(0.1) == "an answer"


def test_engine_that_dies_in_its_start_is_an_error():
    engine = engine_of_pipes()
    assert not engine.has_started(0)
    engine.theirs.send((None, None, ""))
    assert engine.has_started(0) and engine.has_started(0)
    engine.is_ready = False
    engine.theirs.close()
    with pytest.raises(RuntimeError, match="died with exit code -9"):
        engine.has_started(0)


def test_transformers_backend_samples_alike_with_gradient_checkpointing(accelerator, assets):
    # In training mode, checkpointing would drop the cache of keys and values, and with it all but
    # the last token.
    answers = []
    prompts = [[3, *digits, 16, 4] for digits in ([7, 9, 8, 6, 10], [15, 6, 6, 11, 7])]
    for checkpointing in (False, True):
        args = tiny_args(
            model_name_or_path=str(assets / "model"),
            gradient_checkpointing=checkpointing,
            stop_token_ids=(1,),
        )
        policy = load_policy(args)
        answers.append(
            ppo_sync.sample_with_transformers(accelerator, policy, prompts, 1, 0.0, args)
        )
        assert policy.model.training
    assert answers[0] == answers[1] and len(set(answers[0][0])) > 3


class OnCuda(torch.Tensor):
    """A tensor on the CPU that says otherwise."""

    is_cuda = True


@pytest.mark.parametrize(
    ("dtype", "temperature", "tensor_class", "limit"),
    [
        ("float32", 1.0, torch.Tensor, 1e-3),
        ("float32", 0.1, torch.Tensor, 1e-3),
        ("float32", 1.0, OnCuda, 1e-2),  # it may compute with TF32
        ("bfloat16", 1.0, torch.Tensor, 0.1),
        ("bfloat16", 1.0, OnCuda, 0.1),
        ("bfloat16", 2.0, OnCuda, 0.1),
        ("bfloat16", 0.25, OnCuda, 0.4),  # dividing by it makes rounding larger
    ],
)
def test_rounding_is_no_lost_weight(dtype, temperature, tensor_class, limit):
    args = tiny_args(dtype=dtype, temperature=temperature)
    mask = torch.tensor([[1.0, 1.0, 0.0]]).as_subclass(tensor_class)
    learners = torch.tensor([[-1.0, -2.0, 0.0]])
    for sign in (-1, 1):
        # The mean over the response's tokens counts, of differences of either sign
        off = sign * limit * torch.tensor([[-0.5, 1.4, 9e9]])
        ppo_sync.check_sampler(learners, learners + off, mask, args)
        with pytest.raises(RuntimeError, match="at equal weights"):
            ppo_sync.check_sampler(learners, learners + off * 1.1, mask, args)


# ----------------------------------------------------------------------------------- a real engine

PROMPTS = [
    [2 + (7 * i * row + row) % (VOCAB - 2) for i in range(1, 4 + 40 * row)] for row in range(8)
]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(False, marks=pytest.mark.slow, id="untied"),
        pytest.param(True, marks=pytest.mark.slow, id="tied"),
    ],
)
def started_system(request, tmp_path_factory):
    """A policy, the engine that samples from it, and what main() has beside them."""
    policy = tiny_policy(
        temperature=1.0,
        hidden_size=64,
        tie_word_embeddings=request.param,
        max_position_embeddings=512,
    )
    path = tmp_path_factory.mktemp("model")
    policy.model.save_pretrained(path)
    args = tiny_args(
        model_name_or_path=str(path),
        response_length=16,
        vllm_enforce_eager=True,
        vllm_gpu_memory_utilization=0.3,
    )
    before = set(psutil.Process().children(recursive=True))
    accelerator = Accelerator()
    (vllm,) = ppo_sync.make_engines(None, args)
    try:
        ppo_sync.start_engines(None, [vllm], policy.model.config, max_length=400)
        family = set(psutil.Process().children(recursive=True)) - before
        policy = accelerator.prepare(policy)
        weights = {name: value.clone() for name, value in policy.state_dict().items()}
        parts = {"accelerator": accelerator, "policy": policy, "args": args, "vllm": vllm}
        yield SimpleNamespace(weights=weights, **parts)
    finally:
        # vLLM removes it when it ends of itself; but it is killed
        vllm_left_something = list(Path(vllm.temporary_folder).iterdir())
        vllm.stop()
    mine = [
        p for p in family if "resource_tracker" not in "".join(p.cmdline() if alive([p]) else [])
    ]
    assert family
    wait_until(lambda: not alive(mine), 10, f"the end of {mine}")
    assert vllm_left_something
    assert not os.path.exists(vllm.folder) and not os.path.exists(vllm.temporary_folder)


@pytest.fixture
def system(started_system):
    """The same for every test; its policy has its first weights."""
    started_system.policy.load_state_dict(started_system.weights)
    return started_system


def sync(system, version=0):
    ppo_sync.sync_weights(
        system.accelerator, None, [system.vllm], system.policy, version, system.args
    )


def generate(system, prompts=PROMPTS, seeds=None, temperature=1.0):
    seeds = seeds or [ppo_sync.stable_hash(row) for row in range(len(prompts))]
    system.vllm.send(ppo_sync.sample_responses, prompts, seeds, temperature, system.args)
    responses, logprobs, _ = system.vllm.receive()
    return responses, logprobs


def version_that_answers(system):
    system.vllm.send(ppo_sync.sample_responses, PROMPTS[:1], [1], 1.0, system.args)
    _, _, version = system.vllm.receive()
    return version


def learner_logprobs(system, prompts, responses, temperature):
    """The learner's log-probabilities of some responses, as one flat tensor, on the CPU."""
    policy = ppo_sync.PolicyModel(system.policy.model, temperature)
    device = system.accelerator.device
    (logprobs, _), mask = padded_forward(policy, prompts, responses, device)
    return logprobs[mask.bool()].cpu()


def differences(system, temperature=1.0, **request):
    """|learner's - vLLM's log-probability| of each token that vLLM samples now."""
    prompts = request.get("prompts", PROMPTS)
    responses, logprobs = generate(system, temperature=temperature, **request)
    found = []
    for prompt, response, theirs in zip(prompts, responses, logprobs, strict=True):
        mine = learner_logprobs(system, [prompt], [response], temperature)
        assert len(theirs) == len(response)
        found.append((mine - torch.tensor(theirs)).abs())
    return torch.cat(found)


def perturb(policy, seed):
    torch.manual_seed(seed)
    for parameter in policy.parameters():
        parameter.data.mul_(torch.empty_like(parameter).uniform_(0.2, 1.8))


def keep_the_cache(llm, version):
    """finish_weight_sync without its reset. Runs in vLLM's process."""
    llm.policy_version = version


def fail_to_reset(llm, version):
    """finish_weight_sync where vLLM does not empty its cache. Runs in vLLM's process."""
    from unittest import mock

    with mock.patch.object(llm, "reset_prefix_cache", lambda: False):
        ppo_sync.finish_weight_sync(llm, version)


def fails(llm, argument):
    raise KeyError(argument)


# --------------------------------------------------------------------------------------- its calls


def test_failure_of_an_engine_call_is_its_own(system):
    system.vllm.send(fails, "this one")
    with pytest.raises(KeyError, match="this one") as caught:
        system.vllm.receive()
    assert "in fails" in str(caught.value.__cause__)  # where it happened
    assert len(generate(system)[0]) == 8  # and it goes on


# ----------------------------------------------------------------------------------------- weights


def test_engine_starts_without_the_policys_weights(system):
    assert differences(system).max() > 0.1  # before the tests below: nothing was synced yet


def test_sampler_has_the_weights_that_were_synced(system):
    sync(system)
    assert differences(system).max() < 1e-4
    for seed in (1, 2):
        perturb(system.policy, seed)
        assert differences(system).mean() > 1e-2  # the change is a large one
        sync(system)
        assert differences(system).max() < 1e-4


def test_prefix_cache_of_old_weights_is_not_used(system, monkeypatch):
    sync(system)
    assert differences(system).max() < 1e-4
    perturb(system.policy, 3)
    sync(system)
    assert differences(system).max() < 1e-4
    with monkeypatch.context() as patch:  # without the reset it would be
        patch.setattr(ppo_sync, "finish_weight_sync", keep_the_cache)
        perturb(system.policy, 4)
        sync(system)
        assert differences(system).max() > 1e-2
    sync(system)
    assert differences(system).max() < 1e-4


def test_cache_that_is_not_emptied_is_an_error(system, monkeypatch):
    sync(system, version=7)
    monkeypatch.setattr(ppo_sync, "finish_weight_sync", fail_to_reset)
    with pytest.raises(RuntimeError, match="prefix cache"):
        sync(system, version=8)
    assert version_that_answers(system) == 7


def test_answers_carry_the_version_that_was_synced_last(system):
    for version in (3, 5):
        sync(system, version)
        assert version_that_answers(system) == version


def test_tensor_that_is_left_out_shows(system, monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("weights do not go by file here")
    names = ["lm_head.weight", "model.norm.weight", "model.layers.1.mlp.down_proj.weight"]
    if not system.policy.model.config.tie_word_embeddings:
        names.append("model.embed_tokens.weight")
    for seed, left_out in enumerate(names):
        sync(system)
        perturb(system.policy, 10 + seed)
        with monkeypatch.context() as patch:
            hooks.leave_out(ppo_sync, left_out, put=patch.setattr)
            sync(system)
        found = differences(system)
        assert found.max() > 1e-2, left_out
        assert found.mean() > 1e-3, left_out  # where main() stops the run
    sync(system)
    assert differences(system).max() < 1e-4


# ---------------------------------------------------------------------------------------- sampling


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
def test_temperature_is_on_both_sides(system, temperature):
    sync(system)
    assert differences(system, temperature=temperature).max() < 1e-4
    for other in {0.5, 1.0, 1.5} - {temperature}:
        responses, logprobs = generate(system, temperature=temperature)
        mine = learner_logprobs(system, PROMPTS, responses, other)
        theirs = torch.tensor([p for row in logprobs for p in row])
        assert (mine - theirs).abs().mean() > 1e-2


def test_equal_prompts_get_different_responses(system):
    sync(system)
    responses, _ = generate(system, prompts=[PROMPTS[2]] * 32, temperature=2.0)
    assert len({str(ids) for ids in responses}) > 24


def test_seed_reaches_the_engine(system):
    sync(system)
    first, second = generate(system), generate(system)
    assert first == second  # the last bit of the log-probabilities included
    others, _ = generate(system, seeds=[ppo_sync.stable_hash("other", row) for row in range(8)])
    assert sum(one != other for one, other in zip(first[0], others, strict=True)) > 5
    reordered, _ = generate(
        system, PROMPTS[::-1], [ppo_sync.stable_hash(row) for row in range(7, -1, -1)]
    )
    assert reordered[::-1] == first[0]


def test_samples_of_a_group_come_back_in_order_whenever_they_finish(system):
    sync(system)
    prompts, seeds = (
        [PROMPTS[2]] * 8 + [PROMPTS[3]] * 8,
        [ppo_sync.stable_hash("group", i) for i in range(16)],
    )
    responses, logprobs = generate(system, prompts, seeds, temperature=2.0)
    assert len({len(ids) for ids in responses}) > 3  # the short ones were there first
    order = [(i * 7 + 3) % 16 for i in range(16)]
    mixed, mixed_logprobs = generate(
        system, [prompts[i] for i in order], [seeds[i] for i in order], temperature=2.0
    )
    assert mixed == [responses[i] for i in order]
    for mine, theirs in zip(mixed_logprobs, (logprobs[i] for i in order), strict=True):
        assert mine == pytest.approx(theirs, abs=1e-5)


def test_responses_are_cut_at_the_stop_token_and_nowhere_else(system):
    sync(system)
    responses, logprobs = generate(system, prompts=[PROMPTS[0]] * 200, temperature=2.0)
    assert all(len(ids) == len(row) for ids, row in zip(responses, logprobs, strict=True))
    assert all(STOP not in ids[:-1] for ids in responses)
    assert all(ids[-1] == STOP or len(ids) == system.args.response_length for ids in responses)
    assert len({len(ids) for ids in responses}) > 5
    assert max(max(ids) for ids in responses) < VOCAB


def test_greedy_answers_are_the_likeliest_tokens(system):
    sync(system)
    responses, _ = generate(system, temperature=0.0)
    for prompt, response in zip(PROMPTS, responses, strict=True):
        ids = torch.tensor([prompt + response], device=system.accelerator.device)
        with torch.no_grad():
            logits = system.policy.model(ids).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == response
    assert generate(system, temperature=0.0)[0] == responses


def test_many_prompt_tokens_at_once_do_not_kill_the_engine(system):
    # Prefilled in two parts, a request with a seed ended vLLM 0.32 on the CPU: "CPU Generator does
    # not use offset". Last in this file: an engine that is dead fails whatever comes after.
    sync(system)
    prompts = [
        [2 + (row + i * i) % (VOCAB - 2) for i in range(300)] for row in range(60)
    ]  # no prefix in common
    responses, _ = generate(system, prompts=prompts)
    assert len(responses) == 60


# ------------------------------------------------------------------------------- what it leaves


@pytest.mark.slow
def test_killed_script_leaves_no_folder_of_vllm(start_script, tmp_path):
    (tmp_path / "temporary").mkdir()
    wrapped = str(REPO / "tests" / "helpers" / "wrapped_async.py")
    process = start_script(
        "none",
        tmp_path,
        launcher=(wrapped, "grpo_vllm_async.py"),
        env={"TMPDIR": str(tmp_path / "temporary")},
        total_episodes=32_000,
    )
    metrics = process.run_dir / "metrics.jsonl"
    wait_until(lambda: process.poll() is not None or metrics.exists(), 240, "a first step")
    assert process.poll() is None, (tmp_path / "stderr").read_text()
    weights, temporary = folders_of_vllm((tmp_path / "stdout").read_text())
    assert list(weights.iterdir())
    assert temporary.parent == tmp_path / "temporary" and list(temporary.iterdir())
    process.kill()
    process.wait()
    wait_until(
        lambda: not weights.exists() and not list((tmp_path / "temporary").glob("*")),
        10,
        f"the end of {weights} and {temporary}",
    )
