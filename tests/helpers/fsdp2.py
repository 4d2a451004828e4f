"""FSDP2 without GPUs: torch's runs on gloo, and accelerate has to be told that it may.

python fsdp2.py SCRIPT ...: runs a script so, on a rank that torchrun starts.
"""

import os
import runpy
import sys

import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType

# What accelerate's launcher makes of scripts/accelerate/fsdp2.yaml; test_fsdp2.py compares
ENVIRONMENT = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
}


def allow_on_cpu():
    """Has accelerate take ranks on the CPU for ranks with a GPU each."""

    def set_device(state):
        state.device = torch.device("cpu")

    initialize = PartialState.__init__
    # The scripts ask for CPUs where there is no GPU
    PartialState.__init__ = lambda state, cpu=False, **options: initialize(state, **options)
    PartialState._prepare_backend = lambda *_: ("gloo", DistributedType.MULTI_GPU)
    PartialState.set_device = set_device
    os.environ.pop("ACCELERATE_USE_CPU", None)
    os.environ |= ENVIRONMENT


if __name__ == "__main__":
    del sys.argv[0]
    allow_on_cpu()
    runpy.run_path(sys.argv[0], run_name="__main__")
