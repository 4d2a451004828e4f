"""Class VLLM and what it samples: its process, its settings, its weights on the CPU.

Most tests share one real vLLM. One test needs two workers (tensor parallel), and one a head in
float32. Weights by CUDA's ways are in test_weight_sync.py.
"""

import copy
import math
import os
import pickle
import shutil
import sys
import threading
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from helpers import real_vllm
from helpers.processes import alive, wait_until
from helpers.real_vllm import PROMPTS, differences, perturb, prompt_of, sample, sync, vllm_args
from helpers.rollouts import STOP, VOCAB, plain

import ppo_vllm_async as script

# ------------------------------------------------------------------------------------ without vLLM


LAUNCHERS = ["RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"]
LAUNCHERS += ["MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "GROUP_WORLD_SIZE"]
USERS = {"RANKING": "mine", "VLLM_LOGGING_LEVEL": "DEBUG", "CUDA_VISIBLE_DEVICES": "3,GPU-5,7"}


def test_engine_is_no_rank_and_sees_its_own_gpus_alone(tmp_path, monkeypatch):
    def settings(gpus, **changes):
        return script.vllm_settings(gpus, "folder", 77, vllm_args(**changes))

    for name, value in (USERS | dict.fromkeys(LAUNCHERS, "1")).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    own = {"vllm_gpus": (1, 2), "vllm_tensor_parallel_size": 2, "vllm_enforce_eager": False}
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "which", lambda *_, **__: None)  # no compiler
        environment, options = settings((1, 2), **own)
    assert not environment.keys() & {*LAUNCHERS, "CUDA_HOME"}
    assert environment.items() > (USERS | {"CUDA_VISIBLE_DEVICES": "GPU-5,7"}).items()
    assert environment["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
    expected = {"weight_transfer_config": {"backend": "nccl"}, "load_format": "dummy"}
    expected |= {"tensor_parallel_size": 2, "max_model_len": 77, "enforce_eager": False}
    assert options == options | expected | {"hf_overrides": {"head_dtype": "float32"}}
    assert "enable_chunked_prefill" not in options

    (tmp_path / "nvcc").touch(0o755)  # of another CUDA than torch's, perhaps
    monkeypatch.setenv("PATH", str(tmp_path))
    pinned = str(Path(torch.__file__).parents[1] / "nvidia" / "cu13")
    for of_user in (None, "/usr/local/mine"):
        if of_user:
            monkeypatch.setenv("CUDA_HOME", of_user)
        environment, shared = settings((1,))
        assert environment["CUDA_HOME"] == (of_user or pinned)
        assert shared["weight_transfer_config"] == {"backend": "ipc"} and shared["enforce_eager"]

    environment, options = settings((), local_world_size=4)
    assert environment["OMP_NUM_THREADS"] == "2"  # four engines have half of the cores
    assert environment["CUDA_VISIBLE_DEVICES"] == USERS["CUDA_VISIBLE_DEVICES"]
    assert options["load_format"] == "dummy"  # random weights
    assert not {"weight_transfer_config", "hf_overrides"} & options.keys()


@pytest.mark.parametrize(
    ("dtype", "temperature", "limit"),
    # Dividing by a low temperature makes rounding larger
    [("float32", 0.5, 2e-4), ("bfloat16", 2.0, 0.015), ("bfloat16", 0.7, 0.0214)],
)
def test_rounding_is_no_lost_weight(dtype, temperature, limit, capsys):
    args = vllm_args(dtype=dtype, temperature=temperature)
    mask = torch.tensor([[1.0, 1.0, 0.0]])
    logprobs = torch.tensor([[-1.0, -2.0, 0.0]])

    def off_by(kl):
        """The mean over the response's tokens counts, of differences of either sign: d^2 / 2."""
        return logprobs + (2 * kl) ** 0.5 * torch.tensor([[-1.0, 1.0, 9e9]])

    script.warned.clear()
    largest = 1e-4 / 3 if dtype == "float32" else 0.005  # of a right run
    script.check_sampler(logprobs, off_by(0.95 * largest), mask, args)
    script.check_sampler(logprobs, logprobs + math.nan, mask, args)  # which is another error's
    assert not capsys.readouterr().out
    for kl in (1.05 * largest, 0.95 * limit, 0.95 * limit):  # 6.6e-3 at 0.7: a bias of the head
        script.check_sampler(logprobs, off_by(kl), mask, args)
    assert capsys.readouterr().out.count("Warning") == 1
    for sampler_logprobs in (off_by(1.05 * limit), logprobs - 1000, logprobs + 1000):
        with pytest.raises(RuntimeError, match="at equal weights"):
            script.check_sampler(logprobs, sampler_logprobs, mask, args)


def test_kl_is_that_of_the_sampler_to_the_learner():
    """Not the other way round: tokens are the sampler's."""
    sampler, learner = torch.tensor([0.9, 0.1]), torch.tensor([0.88, 0.12])
    tokens = [0] * 9 + [1]  # as often as the sampler draws them
    logprobs = [one.log()[None, tokens] for one in (learner, sampler)]
    found = script.check_sampler(*logprobs, torch.ones(1, 10), vllm_args(dtype="bfloat16"))
    assert found == pytest.approx((sampler * (sampler / learner).log()).sum().item(), rel=1e-3)


# ------------------------------------------------------------------------------------------ an end


def test_response_is_complete_if_its_last_possible_token_is_a_stop_token(monkeypatch):
    """vLLM is a stub. Its answers have as many tokens as a response can have."""

    def answer(*ids):
        completion = SimpleNamespace(
            token_ids=ids, logprobs=SimpleNamespace(logprobs=[-0.5] * len(ids))
        )
        return SimpleNamespace(outputs=[completion])

    answers = [answer(5, 6, STOP), answer(5, 6, 7)]
    monkeypatch.setattr(script, "llm", SimpleNamespace(generate=lambda *_, **__: answers))
    args = vllm_args(response_length=3, stop_token_ids=(STOP,))
    responses = script.sample_responses([prompt_of([4]), prompt_of([4])], [1, 2], 1.0, args)
    assert [response.stopped for response in responses] == [True, False]


def test_first_error_alone_is_told(monkeypatch):
    """A call that fails is one in the thread that waits for it, and one in its callback."""
    told, ending = [], threading.Lock()
    monkeypatch.setattr(script, "ending", ending)
    monkeypatch.setattr(script.traceback, "print_exception", told.append)
    monkeypatch.setattr(os, "_exit", told.append)
    script.end_at_once("the first")
    other = threading.Thread(target=script.end_at_once, args=("the second",))
    other.start()
    other.join(0.2)
    assert told == ["the first", 1] and other.is_alive()
    ending.release()
    other.join()


# ----------------------------------------------------------------------------------- a real engine


@contextmanager
def running_vllm(tied=False, **options):
    """A policy and the engine that samples from it, which has random weights yet.

    errors: those that would have ended this process.
    """
    model = real_vllm.tiny_model(tied)
    args = vllm_args(**options)
    errors = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "end_at_once", errors.append)
        patch.setattr(script, "process_groups", [])
        patch.setattr(script, "folders", [])
        patch.setenv("RANK", "0")
        before = dict(os.environ)
        vllm = script.VLLM((0, 1, ()), model.config, real_vllm.MAX_LENGTH, args)
        try:
            assert dict(os.environ) == before
            (pid,) = script.process_groups
            family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
            yield SimpleNamespace(model=model, args=args, vllm=vllm, errors=errors)
        finally:
            script.end_children()
    wait_until(lambda: not alive(family), f"the end of {family}")
    assert not os.path.exists(vllm.folder)


@pytest.fixture(scope="module")
def running():
    """An engine whose head is tied. That of test_runs.py is not."""
    with running_vllm(tied=True) as system:
        assert differences(system).mean() > 0.1  # a tensor that is never sent must show
        system.weights = copy.deepcopy(system.model.state_dict())
        yield system


@pytest.fixture
def system(running):
    """The same for every test: the policy has its first weights, and vLLM has them too."""
    running.model.load_state_dict(running.weights)
    sync(running, 0)
    return running


def path_of_the_model():
    """In vLLM's process."""
    return script.llm.llm_engine.model_config.model


def test_error_that_is_no_pickle_is_told_as_what_it_says(monkeypatch, tmp_path):
    """As pydantic's: the last line would be about pickles."""

    class NoPickle(Exception):
        def __init__(self, message, of):
            super().__init__(message)

    def refuse(**options):
        raise NoPickle("no such architecture", of=lambda: None)

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=refuse))
    monkeypatch.chdir(tmp_path)
    config = SimpleNamespace(save_pretrained=lambda folder: None)
    with pytest.raises(RuntimeError, match="no such architecture") as told:
        script.start_llm({}, config, tmp_path)
    assert "no such" in str(pickle.loads(pickle.dumps(told.value)))


def test_sync_loads_its_own_weights_and_none_of_an_earlier_one(monkeypatch):
    """Else vLLM's process would keep a copy of each."""
    loaded = []
    rpc = lambda _, kwargs: loaded.append([*kwargs["weights_iterator"]])  # noqa: E731
    monkeypatch.setattr(script, "llm", SimpleNamespace(collective_rpc=rpc))
    for version in (1, 2):
        script.receive_weight(pickle.dumps(("head", version)))
        script.reload_weights()
    assert loaded == [[("head", 1)], [("head", 2)]]


@pytest.mark.parametrize(
    ("kinds", "options", "has_cache"),
    [
        (["linear_attention", "full_attention"], {"enable_chunked_prefill": False}, False),
        (["conv", "full_attention"], {"enable_chunked_prefill": False}, False),
        (["conv", "full_attention"], {}, True),
        (["sliding_attention"], {"enable_chunked_prefill": False}, None),
        (None, {}, None),
    ],
)
def test_hybrid_has_a_prefix_cache_where_its_prefill_is_chunked(
    kinds, options, has_cache, monkeypatch, tmp_path
):
    """Else vLLM does not start. None: as vLLM has it."""
    started = {}
    stub = SimpleNamespace(LLM=lambda **given: started.update(given))
    monkeypatch.setitem(sys.modules, "vllm", stub)
    monkeypatch.chdir(tmp_path)
    config = SimpleNamespace(save_pretrained=lambda folder: None, layer_types=kinds)
    monkeypatch.setattr(script, "llm", None)
    script.start_llm(options, config, tmp_path)
    assert started.get("enable_prefix_caching") == has_cache


@pytest.mark.slow
def test_vllm_has_an_environment_and_a_folder_of_its_own(system):
    def of_vllm(name):
        return system.vllm.submit(os.getenv, name).result()

    assert of_vllm("RANK") is None
    assert of_vllm("TMPDIR") == system.vllm.folder
    assert of_vllm("VLLM_ENABLE_V1_MULTIPROCESSING") == "0"
    assert system.vllm.submit(os.getcwd).result() == system.vllm.folder
    # By this path it finds what it has compiled: it must be that of every run
    assert system.vllm.submit(path_of_the_model).result() == "."
    # Weights never go by files
    names = {path.name for path in Path(system.vllm.folder).rglob("*.*")}
    assert "config.json" in names and not any("safetensors" in name for name in names)


# ----------------------------------------------------------------------------------------- weights


@pytest.mark.slow
def test_sampler_has_the_weights_that_were_synced_and_no_prefixes_of_old_ones(system, monkeypatch):
    assert differences(system).max() < 1e-4
    for version in (1, 2):
        perturb(system.model, version)
        assert differences(system).mean() > 1e-2
        sync(system, version)
        assert differences(system).max() < 1e-4
        assert system.vllm.policy_version == version
    # The executor would have moved a parameter to shared memory
    assert not any(parameter.is_shared() for parameter in system.model.parameters())

    call = system.vllm.call

    def keep_the_cache(method, *args, **kwargs):
        return method == "reset_prefix_cache" or call(method, *args, **kwargs)

    perturb(system.model, 3)
    monkeypatch.setattr(system.vllm, "call", keep_the_cache)
    sync(system, 3)
    assert differences(system).max() > 1e-2  # so the cache is in use


# ---------------------------------------------------------------------------------------- sampling


@torch.no_grad()
def errors_of_draws(policy, batch):
    """How far from 0 log-probability and entropy of a response add up to, in standard errors.

    Both are the policy's. Where tokens are drawn by the policy, the expected sum is 0.
    """
    logprobs, entropies = policy(batch.input_ids, batch.mask)
    sums = (logprobs + entropies).sum(1)
    return (sums.mean() / sums.std() * len(sums) ** 0.5).item()


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
def test_temperature_is_on_both_sides_and_tokens_are_drawn_by_the_policy(system, temperature):
    responses = sample(system.vllm, PROMPTS * 32, temperature=temperature)
    for learners in (0.5, 1.0, 1.5):
        found = differences(system, responses[: len(PROMPTS)], learners)
        assert found.max() < 1e-4 if learners == temperature else found.mean() > 1e-2
    batch = script.collate(responses, "cpu")
    policy = script.PolicyModel(system.model, replace(system.args, temperature=temperature))
    assert abs(errors_of_draws(policy, batch)) < 5
    perturb(system.model, 5)
    assert errors_of_draws(policy, batch) < -9


@pytest.mark.slow
def test_response_is_a_function_of_its_prompt_and_its_seed(system):
    prompts = [PROMPTS[2]] * 8 + [PROMPTS[3]] * 8
    first = sample(system.vllm, prompts, temperature=2.0)
    again = sample(system.vllm, prompts, temperature=2.0)
    assert plain(again) == plain(first)  # the last bits included
    others = sample(system.vllm, prompts, range(100, 116), temperature=2.0)
    assert len({str(response.token_ids) for response in first + others}) > 24

    # Whatever the order of the request, that in which they finish, and the engine that answers
    assert len({len(response.token_ids) for response in first}) > 3
    order = [(i * 7 + 3) % 16 for i in range(16)]
    mixed = []
    for index in range(3):
        engine = copy.copy(system.vllm)
        engine.engine_index, engine.num_engines = index, 3
        mixed += sample(engine, [prompts[i] for i in order], order, temperature=2.0)
    for one, i in zip(mixed, order, strict=True):  # batches of other sizes may move the last bits
        assert one.token_ids.tolist() == first[i].token_ids.tolist()
        assert one.logprobs == pytest.approx(first[i].logprobs, rel=0, abs=1e-4)


@pytest.mark.slow
def test_responses_are_cut_at_a_stop_token_and_nowhere_else(system, monkeypatch):
    stops = (5, 7)
    monkeypatch.setattr(system.vllm, "args", replace(system.args, stop_token_ids=stops))
    responses = sample(system.vllm, [PROMPTS[0]] * 200, temperature=2.0)
    for response in responses:
        ids = response.token_ids
        assert not set(ids[:-1]) & set(stops)
        assert response.stopped == (ids[-1] in stops)
        assert response.stopped or len(ids) == system.args.response_length
        assert len(response.logprobs) == len(ids) and max(ids) < VOCAB
    ends = {response.token_ids[-1] for response in responses if response.stopped}
    assert ends == set(stops)
    assert any(STOP in response.token_ids[:-1] for response in responses)  # the model's own


@pytest.mark.slow
def test_many_prompt_tokens_at_once_do_not_kill_the_engine(system):
    # Prefilled in two parts, a request with a seed ended vLLM 0.32 on the CPU: "CPU Generator does
    # not use offset". Last of its engine, which is dead then
    prompts = [
        prompt_of([2 + (row + i * i) % (VOCAB - 2) for i in range(300)]) for row in range(60)
    ]
    assert len(sample(system.vllm, prompts)) == 60


# --------------------------------------------------------------------------------- tensor parallel


def die_as_second(worker):
    if worker.rpc_rank == 1:
        os._exit(1)


@pytest.mark.slow
def test_two_workers_have_the_weights_and_the_death_of_one_is_noticed(monkeypatch):
    if shutil.disk_usage("/dev/shm").free < 2**28:
        pytest.skip("vLLM's workers share 160 MiB in /dev/shm, and a plain container has 64")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # there may be fewer than two cores
    with running_vllm(vllm_tensor_parallel_size=2) as system:
        sync(system, 0)
        assert differences(system).max() < 1e-4
        call = system.vllm.submit(script.call_llm, "collective_rpc", die_as_second)
        wait_until(lambda: system.errors, "the end")
        assert system.errors == [call.exception()]
        names = [path.name for path in Path(system.vllm.folder).glob("vllm_dist_*")]
    for name in names:  # workers that are killed leave it; on GPUs there is none
        for path in Path("/dev/shm").glob(f"{name}*"):
            path.unlink()


@pytest.mark.slow
def test_head_in_float32_is_what_the_learner_has(monkeypatch):
    """In bfloat16 logits of 4 to 8 are 0.03 apart. On GPUs it is on: forced here on a CPU.

    The model's layers add nothing, and its hidden states are 1 and -1: the head alone rounds.
    """
    settings = script.vllm_settings
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    _, of_gpus = settings((0,), "folder", 77, vllm_args())

    def on_cpu(*given):
        environment, options = settings(*given)
        return environment, options | {"hf_overrides": of_gpus["hf_overrides"]}

    monkeypatch.setattr(script, "vllm_settings", on_cpu)
    with running_vllm(dtype="bfloat16") as system:
        for name, parameter in system.model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.data.zero_()
        embedding = system.model.get_input_embeddings().weight
        embedding.data.sign_()
        head = system.model.lm_head.weight
        head.data = (head * 6 / (head @ embedding.T).std()).bfloat16().float()
        logits = embedding @ head.T
        assert (logits - logits.bfloat16()).abs().mean() > 1e-3  # a head in bfloat16 would show
        sync(system, 0)
        found = differences(system, sample(system.vllm, temperature=2.0), temperature=2.0)
    assert found.mean() < 1e-5, found
