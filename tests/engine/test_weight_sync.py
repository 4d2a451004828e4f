"""Weight syncs by CUDA's ways, "ipc" and NCCL, with only the device faked: helpers/faked_cuda.py.

The way without CUDA, by a pipe, is tested in test_engine.py.
"""

import multiprocessing
import shutil
import sys
import threading
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from helpers import faked_cuda
from helpers.faked_cuda import StubLLM, sync
from helpers.processes import wait_until
from helpers.real_vllm import MAX_LENGTH, differences, perturb, tiny_model, vllm_args

import ppo_vllm_async as script

BACKENDS = ("ipc", "nccl")
# The engine's GPUs: that of the learner, or its own
GPUS = {"ipc": (2,), "nccl": (3,), "nccl to two": (1, 3)}


def args_for(backend, **changes):
    return vllm_args(vllm_gpus=() if backend == "ipc" else GPUS[backend], **changes)


# ---------------------------------------------------------------------- vLLM is a stub in a thread


@pytest.fixture
def start_stub(monkeypatch):
    """start_stub("ipc", faults={...}, dtype="bfloat16"): a VLLM whose process is a thread.

    Where a call fails there, errors has what would have ended this process.
    """
    exports, errors, put = [], [], monkeypatch.setattr
    faked_cuda.add_gpus(put, exports)
    put(script, "ProcessPoolExecutor", lambda workers, context, **_: ThreadPoolExecutor(workers))
    put(script, "start_llm", lambda *_: None)
    put(script, "process_groups", [])
    put(script, "folders", [])

    def start(backend, faults=None, **changes):
        llm = StubLLM(lambda name, module: monkeypatch.setitem(sys.modules, name, module), faults)
        put(script, "end_at_once", lambda error: (errors.append(error), llm.end()))
        put(script, "llm", llm)
        vllm = script.VLLM((0, 1, GPUS[backend]), None, MAX_LENGTH, args_for(backend, **changes))
        return SimpleNamespace(vllm=vllm, llm=llm, exports=exports, errors=errors)

    yield start
    for folder in script.folders:
        shutil.rmtree(folder)


@pytest.mark.parametrize("backend", GPUS)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_weight_is_sent_once(dtype, tied, backend, start_stub):
    model = tiny_model(tied)
    mlp = model.model.layers[0].mlp
    mlp.up_proj.weight = torch.nn.Parameter(mlp.up_proj.weight.detach().T.contiguous().T)
    weights = model.state_dict()
    if tied:  # its head is the embedding
        del weights["lm_head.weight"]
    system = start_stub(backend, dtype=dtype)
    for version in (3, 4):
        perturb(model, version)
        sync(system.vllm, model, version)
        assert system.vllm.policy_version == version
        init = ["init"] if version == 3 else []  # once
        assert system.llm.calls == [*init, "start", len(weights), "finish", "reset_prefix_cache"]
        assert list(system.llm.weights) == list(weights)
        for name, weight in system.llm.weights.items():
            assert weight.dtype == getattr(torch, dtype)
            assert torch.equal(weight, weights[name].to(weight.dtype)), name
        shapes = [list(weight.shape) for weight in weights.values()]
        assert system.llm.infos == [(shape, dtype, True) for shape in shapes]
        handed_out = len(weights) if backend == "ipc" else 0
        assert [tensor is not None for tensor in system.exports] == [True] * handed_out + [False]
        for noted in (system.llm.calls, system.llm.infos, system.exports):
            noted.clear()
    # The learner is rank 0 of the communicator, and vLLM's workers follow
    members = {(host, rank, size) for host, _, rank, size in system.llm.members}
    size = 1 + len(GPUS[backend])
    assert members == (set() if backend == "ipc" else {("127.0.0.1", i, size) for i in (0, 1)})
    assert len({port for _, port, *_ in system.llm.members}) <= 1 and system.errors == []


def test_message_has_some_tensors_and_none_is_lost():
    weights = [(str(i), torch.zeros(size)) for i, size in enumerate((10, 30, 100, 5, 5))]
    messages = [names for names, _ in script.in_messages(weights, num_bytes=4 * 40)]
    assert messages == [["0", "1"], ["2"], ["3", "4"]]
    assert [*script.in_messages([])] == []


ALL = len(tiny_model().state_dict())  # in one message
CALLS = ("init", "start", ALL, "finish", "reset_prefix_cache")


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_worker_that_fails_or_hangs_ends_the_process(backend, call, start_stub, monkeypatch):
    failure, over = MemoryError("no room"), threading.Event()

    def fail():
        raise failure

    system = start_stub(backend, faults={call: fail})
    # By NCCL the learner waits in a broadcast that nobody receives
    with pytest.raises((MemoryError, AssertionError)):
        sync(system.vllm, tiny_model(), 0)
    wait_until(lambda: system.errors, "the end")
    assert system.errors == [failure] and system.llm.calls[-1] == call
    assert system.vllm.policy_version is None

    monkeypatch.setattr(script, "WEIGHT_SYNC_TIMEOUT", 0.1)
    system = start_stub(backend, faults={call: lambda: over.wait(10)})
    for _ in range(ALL):  # CUDA's broadcasts return before they are received
        system.llm.receipts.put("received")
    with pytest.raises(TimeoutError):
        sync(system.vllm, tiny_model(), 0)
    over.set()


def test_prefix_cache_that_is_not_emptied_is_an_error(start_stub):
    system = start_stub("ipc")
    system.llm.is_idle = False
    with pytest.raises(AssertionError, match="busy"):
        sync(system.vllm, tiny_model(), 0)
    assert system.vllm.policy_version is None


# -------------------------------------------------------------------------- the real vLLM, on a CPU


@pytest.fixture(scope="module")
def process():
    """What takes the place of CUDA, and the process of all engines, one after the other."""
    executor = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
    pynccl = "vllm.distributed.device_communicators.pynccl"
    replaced = {"start_llm": faked_cuda.start_llm, "end_at_once": lambda error: None}
    replaced |= {"ProcessPoolExecutor": lambda workers, context, **_: executor}
    with pytest.MonkeyPatch.context() as patch:
        faked_cuda.add_gpus(patch.setattr, exports=[])
        patch.setattr(f"{pynccl}.PyNcclCommunicator", faked_cuda.Communicator)
        for name, value in (replaced | {"process_groups": [], "folders": []}).items():
            patch.setattr(script, name, value)
        # What an engine on the CPU has beside, and one on a GPU has not
        patch.setenv("TORCH_COMPILE_DISABLE", "1")
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        yield
        script.end_children()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "tied", "dtype"), [("ipc", False, "bfloat16"), ("nccl", True, "float32")]
)
def test_vllm_has_the_weights_that_were_synced(backend, tied, dtype, process):
    args, model = args_for(backend, dtype=dtype), tiny_model(tied)
    vllm = script.VLLM((0, 1, GPUS[backend]), model.config, MAX_LENGTH, args)
    system = SimpleNamespace(model=model, args=args, vllm=vllm)
    for version in (1, 2):
        # It has random weights; then those of before the change
        assert differences(system).mean() > 0.5
        sync(vllm, model, version)
        found = differences(system)
        assert found.max() < 1e-4 if dtype == "float32" else found.mean() < 0.2
        perturb(model, version)
    # A name that vLLM does not know is an error, which in a run ends the process
    model.surplus = torch.nn.Linear(2, 2, bias=False)
    with pytest.raises(ValueError, match="surplus"):
        sync(vllm, model, 3)
