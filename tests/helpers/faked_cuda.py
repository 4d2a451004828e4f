"""CUDA that is not there: what weight syncs call of it, in the learner and in vLLM's process.

Faked are the device alone and what only works on one: handles of its memory, NCCL, streams. Two
things can be at the other end of a sync.
    run_vllm    takes the place of ppo_sync's: the real vLLM, on the CPU, in a process of its own
    StubVLLM    in a thread: notes what it is told, and fails where a test wants it to
"""

import contextlib
import queue
import sys
import threading
from dataclasses import replace
from functools import partial
from multiprocessing import Pipe
from types import SimpleNamespace

import torch

import ppo_sync

STREAM = "the stream"
RUN_VLLM = ppo_sync.run_vllm


def add_gpus(count, put, exports):
    """Gives torch so many GPUs of which this process uses the first; put: as setattr.

    The handle of a tensor's memory is the tensor itself: a pipe to another process shares its
    memory with that, as CUDA does. exports: a list that notes each tensor that was handed out.
    """

    def reduce_tensor(tensor):
        exports.append(tensor)
        # The seventh is the device's index, which vLLM overwrites with its own
        return "rebuild", (tensor, None, None, None, None, None, 0, None)

    put(torch.cuda, "is_available", lambda: True)
    put(torch.cuda, "device_count", lambda: count)
    put(torch.cuda, "current_device", lambda: 0)
    put(torch.cuda, "current_stream", lambda: STREAM)
    put(torch.cuda, "get_device_properties", lambda gpu: SimpleNamespace(uuid=f"GPU-{gpu}"))
    put(torch.cuda, "ipc_collect", lambda: None)
    put(ppo_sync, "reduce_tensor", reduce_tensor)


def rebuild_cuda_tensor(tensor, *rest):
    return tensor


# ------------------------------------------------------------------------------ the real vLLM


class Communicator:
    """PyNcclCommunicator between processes, through the store of the group that it is given.

    A broadcast returns when all have received: who sends to one that has failed waits for ever.
    """

    def __init__(self, group, device):
        self.group = group

    def broadcast(self, tensor, src, stream=None):
        assert self.group.world_size == 2
        if self.group.rank == src:
            self.group.broadcast_obj(tensor, src)
        else:
            tensor.copy_(self.group.broadcast_obj(None, src))
        self.group.broadcast_obj("received", 1 - src)

    def destroy(self):
        pass


class Restartable:
    """vLLM's LLM, of which start_again makes another one in the same process: that is quick."""

    def __init__(self, make, **options):
        self.make = make
        self.llm = make(**options)

    def __getattr__(self, name):
        return getattr(self.llm, name)


def start_again(llm, options):
    """Runs in vLLM's process."""
    llm.llm = None
    llm.llm = llm.make(**options)
    llm.policy_version = None


def use_backend(llm, backend):
    """Gives vLLM's worker what it has with another weight_transfer_config. Runs in its process."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    def change(wrapper):
        worker = wrapper.worker
        config = replace(worker.vllm_config.weight_transfer_config, backend=backend)
        worker.weight_transfer_engine = WeightTransferEngineFactory.create_engine(
            config, worker.vllm_config, worker.device, worker.get_model()
        )

    llm.collective_rpc(change)


def run_vllm(*args):
    """ppo_sync.run_vllm, on a CPU that passes for a GPU."""
    import vllm
    from vllm.distributed.device_communicators import pynccl
    from vllm.distributed.weight_transfer import ipc_engine
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    def leave_unpacked(self, layer):
        layer.cpu_linear = torch.nn.functional.linear  # with the layer's weight, as on CUDA

    UnquantizedEmbeddingMethod.process_weights_after_loading = leave_unpacked
    pynccl.PyNcclCommunicator = Communicator
    ipc_engine.rebuild_cuda_tensor = rebuild_cuda_tensor
    torch.cuda.get_device_properties = lambda gpu: SimpleNamespace(uuid="GPU-0")
    torch.cuda.current_stream = lambda: STREAM
    torch.accelerator.current_device_index = lambda: 0
    torch.accelerator.synchronize = lambda *_: None
    vllm.LLM = partial(Restartable, vllm.LLM)
    RUN_VLLM(*args)


# ------------------------------------------------------------------------------ vLLM in a thread


class Process:
    """A stand-in for the process of an engine."""

    def __init__(self):
        self.sentinel, self.life = Pipe(duplex=False)
        self.exitcode = None
        self.pid = None

    def die(self):
        self.exitcode = -9
        self.life.close()

    def join(self, timeout=None):
        pass


class Rendezvous:
    """What the communicators of one group share in one process; it notes who joined it, and how."""

    def __init__(self):
        self.members = []
        self.worker_joined = threading.Event()
        self.tensors = queue.Queue()
        self.receipts = queue.Queue()


class StubCommunicator:
    """Communicator for threads."""

    def __init__(self, group, device):
        self.group = group

    def broadcast(self, tensor, src, stream):
        assert src == 0 and stream == STREAM and tensor.is_contiguous()
        self.group.rendezvous.tensors.put(tensor)
        self.group.rendezvous.receipts.get()


def add_nccl(put_item, meetings=None, communicator=StubCommunicator, waits=True):
    """vLLM's modules for NCCL, in the learner; put_item: as monkeypatch.setitem.

    Returns meetings: the Rendezvous of each port. waits: for the other side to join.
    """
    meetings = {} if meetings is None else meetings

    def create(host, port, rank, world_size):
        rendezvous = meetings.setdefault(port, Rendezvous())
        rendezvous.members.append((host, rank, world_size))
        if waits:
            rendezvous.worker_joined.wait()
        return SimpleNamespace(rendezvous=rendezvous)

    pynccl = SimpleNamespace(PyNcclCommunicator=communicator)
    utils = SimpleNamespace(StatelessProcessGroup=SimpleNamespace(create=create))
    put_item(sys.modules, "vllm.distributed.device_communicators.pynccl", pynccl)
    put_item(sys.modules, "vllm.distributed.utils", utils)
    return meetings


def wait_for_ever(vllm=None):
    """A fault in which vLLM does not answer."""
    threading.Event().wait()


class StubVLLM:
    """What a weight sync sees of vLLM's LLM; it knows the names of the weights that it has.

    calls: what it was asked to do, in order. weights: all that it received, by name.
    faults: {call: function}, which is run instead; the call of the n-th layer is "layer n".
    """

    def __init__(self, names, meetings, faults=None):
        self.names = set(names)
        self.meetings = meetings
        self.faults = faults or {}
        self.calls = []
        self.infos = []
        self.weights = {}
        self.rendezvous = None
        self.policy_version = None
        self.process = Process()
        self.connection, self.own_end = Pipe()

    def start(self):
        """Answers in a thread, as run_vllm does in a process."""
        threading.Thread(target=self.answer, daemon=True).start()
        return self

    def attach(self, engine):
        """Becomes the process of an engine."""
        engine.process, engine.connection = self.process, self.connection
        return engine

    def answer(self):
        with contextlib.suppress(EOFError, OSError):
            while True:
                function, args = self.own_end.recv()
                result, error = None, None
                try:
                    result = function(self, *args)
                except Exception as raised:
                    error = raised
                self.own_end.send((result, error, "in a stub"))

    def die(self):
        """Ends as a killed process does."""
        self.process.die()
        self.own_end.close()
        raise EOFError

    def die_with_a_child_left(self):
        """The same, but another process still holds the connection."""
        self.process.die()
        wait_for_ever()

    def note(self, call):
        self.calls.append(call)
        if call in self.faults:
            self.faults[call](self)

    # The methods of vLLM's LLM

    def init_weight_transfer_engine(self, request):
        self.note("init")
        info = request["init_info"]
        self.infos.append(info)
        if info:
            rendezvous = self.meetings.setdefault(info["master_port"], Rendezvous())
            member = (info["master_address"], info["rank_offset"], info["world_size"])
            rendezvous.members.append(member)
            rendezvous.worker_joined.set()
            self.rendezvous = rendezvous

    def start_weight_update(self):
        self.note("start")

    def update_weights(self, request):
        layers = sum(call.startswith("layer") for call in self.calls)
        self.note(f"layer {layers}")
        info = request["update_info"]
        self.infos.append(info)
        for i, name in enumerate(info["names"]):
            if self.rendezvous is None:
                weight = rebuild_cuda_tensor(*info["ipc_handles"][i]["GPU-0"])
            else:
                assert "ipc_handles" not in info
                weight = self.rendezvous.tensors.get()
            # As vLLM does: it has received the tensor when it looks at its name
            if name not in self.names:
                raise ValueError(f"There is no module or parameter named {name}")
            self.weights[name] = weight.clone()
            if self.rendezvous is not None:
                self.rendezvous.receipts.put("received")

    def finish_weight_update(self):
        self.note("finish")

    def reset_prefix_cache(self):
        self.note("reset_prefix_cache")
        return True
