"""CUDA that is not there, for weight syncs of ppo_vllm_async.py: in the learner and in vLLM.

Faked are the device alone and what only works on one: handles of its memory, NCCL, streams. Two
things can be at the other end of a sync.
    start_llm   takes the place of the script's: the real vLLM, on the CPU, in its own process
    StubLLM     in a thread: notes what it is told, and fails where a test wants it to
"""

import os
import queue
from types import SimpleNamespace
from unittest import mock

import torch

import ppo_vllm_async as script

STREAM = "the stream"
START_LLM = script.start_llm


def add_gpus(put, exports):
    """Gives torch four GPUs of which this process uses the third; put: as setattr.

    The handle of a tensor's memory is the tensor itself: a pipe to another process shares its
    memory with that, as CUDA does. exports: a list that notes each tensor that was handed out, and
    None where CUDA was told to collect what vLLM has read.
    """

    def reduce_tensor(tensor):
        exports.append(tensor)
        # The seventh is the device's index, which vLLM overwrites with its own
        return "rebuild", (tensor, None, None, None, None, None, 0, None)

    put(torch.cuda, "device_count", lambda: 4)
    put(torch.cuda, "current_device", lambda: 2)
    device = SimpleNamespace(uuid="GPU-2", name="NVIDIA H100 80GB HBM3", total_memory=80 * 2**30)
    put(torch.cuda, "get_device_properties", lambda: device)
    put(torch.cuda, "ipc_collect", lambda: exports.append(None))
    put(torch.cuda, "current_stream", lambda: STREAM)
    put(script, "reduce_tensor", reduce_tensor)


def sync(vllm, model, version):
    """A sync of weights that say that they are on a GPU."""
    with mock.patch.object(type(model), "device", torch.device("cuda")):
        weights = list(script.gather_weights(model, vllm.args))
    vllm.sync_weights(weights, version)


# ------------------------------------------------------------------------------- the real vLLM


class Communicator:
    """PyNcclCommunicator between processes, through the store of the group that it is given."""

    def __init__(self, group, device):
        self.group = group

    def broadcast(self, tensor, src, stream=None):
        assert self.group.world_size == 2
        if self.group.rank == src:
            self.group.broadcast_obj(tensor, src)
        else:
            tensor.copy_(self.group.broadcast_obj(None, src))
        self.group.broadcast_obj("received", 1 - src)


def start_llm(options, config, folder):
    """The script's start_llm, on a CPU that passes for a GPU.

    One process may make one LLM after the other: the second takes seconds.
    """
    import vllm.model_executor.layers.vocab_parallel_embedding as embedding
    from vllm.distributed.device_communicators import pynccl
    from vllm.distributed.weight_transfer import ipc_engine

    def leave_unpacked(self, layer):
        layer.cpu_linear = torch.nn.functional.linear  # with the layer's weight, as on CUDA

    embedding.UnquantizedEmbeddingMethod.process_weights_after_loading = leave_unpacked
    pynccl.PyNcclCommunicator = Communicator
    ipc_engine.rebuild_cuda_tensor = lambda tensor, *rest: tensor
    torch.cuda.get_device_properties = lambda gpu: SimpleNamespace(uuid="GPU-2")
    torch.cuda.current_stream = lambda: STREAM
    torch.accelerator.current_device_index = lambda: 0
    torch.accelerator.synchronize = lambda *_: None
    script.llm = None
    pid = START_LLM(options, config, folder)
    os.setsid = lambda: None  # it has its session now
    return pid


# ------------------------------------------------------------------------------ vLLM in a thread


class StubLLM:
    """What a weight sync sees of vLLM's LLM; and of NCCL, in the learner and in vLLM's worker.

    calls: what it was asked to do, in order. weights: all that it received, by name; infos: what it
    was told of them. members: (address, port, rank, world size) of each in the communicator.
    faults: {call: function}, which is run before the call. A broadcast returns when it was
    received, or when end() says that the process would be over.
    """

    def __init__(self, put_item, faults=None):
        self.faults, self.is_idle = faults or {}, True
        self.calls, self.infos, self.members, self.weights = [], [], [], {}
        self.sent, self.receipts = queue.Queue(), queue.Queue()
        common = SimpleNamespace(stateless_init_process_group=self.join)
        put_item("vllm.distributed.weight_transfer.nccl_common", common)

    def join(self, host, port, rank, world_size, device=None):
        self.members.append((host, port, rank, world_size))
        assert rank > 0 or device == 2
        return self

    def broadcast(self, tensor, src, stream):
        assert src == 0 and stream == STREAM and tensor.is_contiguous()
        self.sent.put(tensor)
        assert self.receipts.get(timeout=30) == "received"

    def end(self):
        self.receipts.put("none, for the process is over")

    def note(self, call):
        self.calls.append(call)
        self.faults.get(call, lambda: None)()

    # The methods of vLLM's LLM

    def init_weight_transfer_engine(self, request):
        self.note("init")
        info = request["init_info"]
        if info:
            names = ("master_address", "master_port", "rank_offset", "world_size")
            self.join(*(info[name] for name in names))

    def start_weight_update(self):
        self.note("start")

    def update_weights(self, request):
        info = request["update_info"]
        self.note(len(info["names"]))
        for i, name in enumerate(info["names"]):
            if "ipc_handles" in info:
                tensor = info["ipc_handles"][i]["GPU-2"][0]
            else:
                tensor = self.sent.get(timeout=30)
            self.infos.append((info["shapes"][i], info["dtype_names"][i], tensor.is_contiguous()))
            self.weights[name] = tensor.clone()
            self.receipts.put("received")

    def finish_weight_update(self):
        self.note("finish")

    def reset_prefix_cache(self):
        self.note("reset_prefix_cache")
        return self.is_idle
