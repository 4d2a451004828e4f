"""Weight syncs of two ranks to stubs of vLLM, under torchrun: what happens on each.

two_rank_sync.py FOLDER writes FOLDER/rank_0.json and FOLDER/rank_1.json: {scenario: what this rank
found}. The ranks, their group and the gathers of sharded weights are real.
"""

import json
import os
import sys
import threading
import time
from pathlib import Path

sys.path.extend(str(folder) for folder in Path(__file__).resolve().parents[1:3])

import torch
from accelerate import Accelerator
from accelerate.utils import TorchDynamoPlugin
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import ppo_sync
from helpers import faked_cuda
from helpers.faked_cuda import StubVLLM
from helpers.rollouts import tiny_args, tiny_config, tiny_policy

RANK = int(os.environ["RANK"])
exports, gathers = [], []


def shard(model, mesh):
    """Spreads each weight over the ranks; those that are one stay one."""
    sharded = {}
    for module in model.modules():
        for name, weight in list(module._parameters.items()):
            if weight is not None:
                if weight not in sharded:
                    pieces = distribute_tensor(weight.detach(), mesh, [Shard(0)])
                    sharded[weight] = torch.nn.Parameter(pieces)
                module._parameters[name] = sharded[weight]


def attempt(function, *args):
    """What this rank finds of a call."""
    exports.clear()
    gathers.clear()
    error = None
    start = time.monotonic()
    try:
        function(*args)
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    return {
        "error": error,
        "seconds": time.monotonic() - start,
        "gathers": len(gathers),
        "exports": len(exports),
    }


class Ranks:
    """Both ranks, as main() has them; each method is called on both."""

    def __init__(self, meetings):
        self.accelerator = Accelerator(cpu=True)
        self.cpu_group = torch.distributed.new_group(backend="gloo")
        self.mesh = init_device_mesh("cpu", (2,))
        self.meetings = meetings

    def make_engines(self, args, names, faults=None):
        """This rank's engines as main() makes them, and the stub of the first."""
        engines = ppo_sync.make_engines(self.cpu_group, args)
        vllm = StubVLLM(names, self.meetings, faults).start()
        for engine in engines:
            vllm.attach(engine)
        return engines, vllm

    def sync(self, gpus, tied=False, faults=None, owns=True):
        """Syncs sharded weights, to rank 0's engines on these GPUs; none: to an engine a rank.

        owns: whether this rank keeps its engines.
        """
        dtype = "float32" if tied else "bfloat16"
        args = tiny_args(vllm_gpus=gpus, dtype=dtype)
        plain = tiny_policy(tie_word_embeddings=tied)
        policy = tiny_policy(tie_word_embeddings=tied)
        shard(policy, self.mesh)
        engines, vllm = self.make_engines(args, plain.model.state_dict(), faults)
        if not owns:
            engines = []
        found = attempt(
            ppo_sync.sync_weights, self.accelerator, self.cpu_group, engines, policy, 1, args
        )
        return found | self.received(engines, vllm, plain, args)

    def received(self, engines, vllm, plain, args):
        """Whose engines they are, and whether the stub has the plain policy's weights."""
        expected = plain.model.to(getattr(torch, args.dtype)).state_dict()
        equal = [torch.equal(weight, expected[name]) for name, weight in vllm.weights.items()]
        return {
            "engines": [engine.gpus for engine in engines],
            "received": len(equal),
            "equal": all(equal),
        }

    def compiled(self):
        """Syncs a policy that accelerate has wrapped in DDP and compiled."""
        plain = tiny_policy()
        plugin = TorchDynamoPlugin(backend="eager")
        self.accelerator.state._shared_state["dynamo_plugin"] = plugin
        policy = self.accelerator.prepare(tiny_policy())
        args = tiny_args(dtype="bfloat16")
        engines, vllm = self.make_engines(args, plain.model.state_dict())
        inside = [type(policy._orig_mod).__name__]
        found = attempt(
            ppo_sync.sync_weights, self.accelerator, self.cpu_group, engines, policy, 1, args
        )
        inside.append(type(policy._orig_mod).__name__)
        return found | self.received(engines, vllm, plain, args) | {"inside": inside}

    def start(self, event):
        """Both ranks start an engine; rank 1's is slow, or dies."""
        args = tiny_args()
        engines = ppo_sync.make_engines(self.cpu_group, args)
        vllm = StubVLLM([], self.meetings)
        ppo_sync.VLLM.start = lambda engine, config, max_length: vllm.attach(engine)
        if RANK == 0:
            vllm.own_end.send((None, None, ""))
        elif event == "dies":
            threading.Timer(1.5, vllm.process.die).start()
        else:
            threading.Timer(1.5, vllm.own_end.send, [(None, None, "")]).start()
        return attempt(ppo_sync.start_engines, self.cpu_group, engines, tiny_config(), 32)


def fail_in(call):
    def fail(vllm):
        raise MemoryError(f"no room in {call}")

    return {call: fail}


def main():
    """All scenarios, in the same order on both ranks."""
    folder = Path(sys.argv[1])
    meetings = faked_cuda.add_nccl(dict.__setitem__)
    ranks = Ranks(meetings)
    faked_cuda.add_gpus(2, setattr, exports)
    full_tensor = DTensor.full_tensor
    DTensor.full_tensor = lambda self: (gathers.append(self.shape), full_tensor(self))[1]
    found = {
        "nccl tied": ranks.sync((2,), tied=True),
        "nccl untied": ranks.sync((2,)),
        "ipc tied": ranks.sync((), tied=True, owns=RANK == 0),
        "ipc untied": ranks.sync((), owns=RANK == 0),
        "colocated": ranks.sync(()),
        "fault: start": ranks.sync((2,), faults=fail_in("start")),
        "fault: layer 1": ranks.sync((2,), faults=fail_in("layer 1")),
        "fault: finish": ranks.sync((2,), faults=fail_in("finish")),
        "fault: dies": ranks.sync((2,), faults={"layer 2": StubVLLM.die}),
        "slow start": ranks.start("is slow"),
        "death in the start": ranks.start("dies"),
        "compiled": ranks.compiled(),
    }
    (folder / f"rank_{RANK}.json").write_text(json.dumps(found))
    torch.distributed.barrier()
    os._exit(0)  # gloo's threads can hang a rank that ends a moment after the other


if __name__ == "__main__":
    main()
