"""CUDA that is not there, for weight syncs of ppo_vllm_async.py: in the learner and in vLLM.

Faked are the device alone and what only works on one: handles of its memory, NCCL, streams. The
vLLM at the other end is real, on the CPU, in a process of its own.

    faked_cuda_async.py FAULT    a weight sync that cannot succeed, whose process has to end. FAULT:
        unknown name             a tensor that vLLM does not know goes by NCCL, or by "ipc"
        killed                   vLLM's process is killed while the learner sends by NCCL
        hung                     vLLM does not answer; WEIGHT_SYNC_TIMEOUT is one second
        worker of two killed     of tensor parallel workers one is killed while they are at work
"""

import contextlib
import itertools
import os
import signal
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

sys.path.extend(str(folder) for folder in Path(__file__).resolve().parents[1:3])

import torch

import ppo_vllm_async
from helpers.rollouts import tiny_language_model

MAX_LENGTH = 64
# What an engine on the CPU has beside, and one on a GPU has not
ENVIRONMENT = {"TORCH_COMPILE_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
START_LLM = ppo_vllm_async.start_llm


def args_for(backend, **changes):
    options = {
        "vllm_gpus": (1,) if backend == "nccl" else (),
        "dtype": "float32",
        "temperature": 1.0,
        "response_length": 8,
        "stop_token_ids": (1,),
        "vllm_enforce_eager": True,
        "vllm_gpu_memory_utilization": 0.3,
    }
    return ppo_vllm_async.Args(**options | changes)


def add_gpus(put, exports):
    """Gives torch two GPUs of which this process uses the first; put: as setattr.

    The handle of a tensor's memory is the tensor itself: a pipe to another process shares its
    memory with that, as CUDA does. exports: a list that notes each tensor that was handed out.
    """
    from vllm.distributed.device_communicators import pynccl

    def reduce_tensor(tensor):
        exports.append(tensor)
        # The seventh is the device's index, which vLLM overwrites with its own
        return "rebuild", (tensor, None, None, None, None, None, 0, None)

    put(torch.cuda, "device_count", lambda: 2)
    put(torch.cuda, "current_device", lambda: 0)
    put(torch.cuda, "get_device_properties", lambda gpu: SimpleNamespace(uuid=f"GPU-{gpu}"))
    put(torch.cuda, "ipc_collect", lambda: None)
    put(torch.cuda, "current_stream", lambda: "the stream")
    put(ppo_vllm_async, "reduce_tensor", reduce_tensor)
    put(ppo_vllm_async, "start_llm", start_llm)
    put(pynccl, "PyNcclCommunicator", Communicator)


class Communicator:
    """PyNcclCommunicator between processes, through the store of the group that it is given.

    A broadcast returns when all have received: who sends to one that has failed waits for ever.
    """

    sent = itertools.count(1)
    kills_at = None  # the broadcast in which vLLM's process is killed

    def __init__(self, group, device):
        self.group = group

    def broadcast(self, tensor, src, stream=None):
        assert self.group.world_size == 2
        if self.group.rank == src:
            if next(self.sent) == self.kills_at:
                os.kill(ppo_vllm_async.process_groups[-1], signal.SIGKILL)
            self.group.broadcast_obj(tensor, src)
        else:
            tensor.copy_(self.group.broadcast_obj(None, src))
        self.group.broadcast_obj("received", 1 - src)


# ------------------------------------------------------------------------------ in vLLM's process


class Restartable:
    """vLLM's LLM, of which start_again makes another one in the same process: that is quick."""

    def __init__(self, make, **options):
        self.make = make
        self.llm = make(**options)

    def __getattr__(self, name):
        return getattr(self.llm, name)


def start_again(options, config):
    config.save_pretrained(options["model"])
    restartable = ppo_vllm_async.llm
    restartable.llm = None
    restartable.llm = restartable.make(**options)


def use_backend(backend):
    """Gives vLLM's worker what it has with another weight_transfer_config."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    def change(wrapper):
        worker = wrapper.worker
        config = replace(worker.vllm_config.weight_transfer_config, backend=backend)
        worker.weight_transfer_engine = WeightTransferEngineFactory.create_engine(
            config, worker.vllm_config, worker.device, worker.get_model()
        )

    ppo_vllm_async.llm.collective_rpc(change)


def start_llm(options, config):
    """ppo_vllm_async.start_llm, on a CPU that passes for a GPU."""
    import vllm
    from vllm.distributed.device_communicators import pynccl
    from vllm.distributed.weight_transfer import ipc_engine
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    def leave_unpacked(self, layer):
        layer.cpu_linear = torch.nn.functional.linear  # with the layer's weight, as on CUDA

    assert os.environ["CUDA_VISIBLE_DEVICES"] in ("0", "1")
    assert options["load_format"] == "dummy"
    UnquantizedEmbeddingMethod.process_weights_after_loading = leave_unpacked
    pynccl.PyNcclCommunicator = Communicator
    ipc_engine.rebuild_cuda_tensor = lambda tensor, *rest: tensor
    torch.cuda.get_device_properties = lambda gpu: SimpleNamespace(uuid="GPU-0")
    torch.cuda.current_stream = lambda: "the stream"
    torch.accelerator.current_device_index = lambda: 0
    torch.accelerator.synchronize = lambda *_: None
    vllm.LLM = partial(Restartable, vllm.LLM)
    pid = START_LLM(options, config)
    names = [path.name for path in Path(options["model"]).iterdir()]
    assert "config.json" in names  # it has started without weights
    assert not any(name.endswith(("safetensors", "bin")) for name in names), names
    return pid


def hang(*args):
    time.sleep(1000)


# ------------------------------------------------------------------- syncs that end their process


def tell(vllm):
    print("Folders of vLLM:", vllm.folder)
    print(f"Fault at {time.monotonic()} with", flush=True)


def fail(fault, backend):
    os.environ.update(ENVIRONMENT)
    args = args_for(backend)
    model = tiny_language_model(hidden_size=64, num_attention_heads=4, num_key_value_heads=2)
    if fault == "worker of two killed":
        args.vllm_tensor_parallel_size = 2
        vllm = ppo_vllm_async.VLLM((0, 1, ()), model.config, MAX_LENGTH, args)
        vllm.sync_weights(model, 0)
        vllm.submit(kill_a_worker)
    else:
        add_gpus(setattr, [])
        gpu = 1 if backend == "nccl" else 0
        vllm = ppo_vllm_async.VLLM((0, 1, (gpu,)), model.config, MAX_LENGTH, args)
        vllm.sync_weights(model, 0)
    tell(vllm)
    if fault == "unknown name":
        model.surplus = torch.nn.Linear(2, 2)
    elif fault == "killed":
        Communicator.sent, Communicator.kills_at = itertools.count(1), 5
    elif fault == "hung":
        ppo_vllm_async.WEIGHT_SYNC_TIMEOUT = 1
        vllm.sync_call = lambda *_: vllm.submit(hang).result(ppo_vllm_async.WEIGHT_SYNC_TIMEOUT)
    prompts = [ppo_vllm_async.Prompt("", "", [3, 4, 5], [], None, None, None)] * 64
    if fault == "worker of two killed":
        vllm.sample(prompts, list(range(64)), 1.0, 1)
    vllm.sync_weights(model, 1)


def kill_a_worker():
    """Of vLLM's process: ends one of its workers in a second, when they are at work."""
    import threading

    import psutil

    def kill():
        workers = [
            child
            for child in psutil.Process().children(recursive=True)
            if "spawn_main" in " ".join(child.cmdline())
        ]
        assert len(workers) == 2, workers
        workers[1].kill()

    threading.Timer(0.1, kill).start()


if __name__ == "__main__":  # vLLM's process imports this file too
    with contextlib.suppress(KeyboardInterrupt):
        try:
            fail(*sys.argv[1:])
        except BaseException as caught:
            ppo_vllm_async.end_at_once(caught)
