"""Count the memory of a learner's GPU with PyTorch. Tests compare it with the preflight's plan.

Tensors are fake (FakeTensorMode): they have shapes but no memory, so the count runs on any
computer. The scripts' own functions load the models, place and run them, and make the optimizers.
torch's MemTracker adds up the live tensors in a step's forward passes, and in the forward and
backward pass of a micro-batch, after gradients and AdamW's moments have been allocated. The ranks
are those of torch's fake process group, which sends nothing. Because no kernel runs, the count does
not include workspaces of kernels, fragmentation in the allocator, CUDA contexts, NCCL's buffers,
and vLLM. Attention is that of a CPU, which is fused like a GPU's.
"""

import contextlib
import copy
import functools
from types import SimpleNamespace
from unittest import mock

import learner
import torch
from internal import resource_plan as plan
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import masking_utils


class Tracker(MemTracker):
    """Track memory without MemTracker's hooks on modules, which fail on frozen parameters."""

    def ignore(self, *_):
        pass

    _pre_fw_hook = _post_fw_hook = _pre_bw_hook = _post_bw_hook = ignore

    def peak(self):
        """Return the largest number of bytes at any moment."""
        (kinds,) = self.get_tracker_snapshot("peak").values()
        return kinds["Total"]


# --------------------------------------------------------------------------------- models and ranks


def load_models(run):
    """Return {role in the plan: the script's wrapper of a model on "meta"}."""
    script, args, models = run.script, run.args, {}
    trained = plan.trained_models(run)
    for role, model in (trained | plan.frozen_weights(run)).items():
        config = copy.deepcopy(model.config)
        # On "meta", because peft cannot add adapters to fake tensors
        loaded = learner.load_model(config, type(model), args, role in trained, "meta", script)
        if hasattr(model, "score"):
            wrapper = script.ValueModel if role in trained else script.RewardModel
            models[role] = wrapper(loaded, args)
        else:
            models[role] = script.PolicyModel(loaded, args)
    return models


def fill(model):
    """Replace a model's tensors on "meta" by fake ones. Tied weights stay tied."""

    @functools.cache
    def fake(tensor):
        new = torch.empty(tensor.shape, dtype=tensor.dtype)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(new, tensor.requires_grad)
        return new

    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and tensor.is_meta:
                    tensors[name] = fake(tensor)


@contextlib.contextmanager
def fake_ranks(run):
    """Let fully_shard treat this process as one of the run's ranks."""
    world_size = run.options.num_processes
    torch.distributed.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    mesh = init_device_mesh("cpu", (world_size,))
    shard = functools.partial(run.script.fully_shard, mesh=mesh)
    try:
        with mock.patch.object(run.script, "fully_shard", shard):
            yield
    finally:
        torch.distributed.destroy_process_group()


# --------------------------------------------------------------------------------------- the count


def forward_pass(run, model):
    """Return the log-probabilities or values of a micro-batch.

    PolicyModel.forward is replaced, because it selects the response tokens by the mask, and a fake
    mask has no values.
    """
    script, args = run.script, run.args
    tokens = args.micro_batch_tokens
    responses = torch.zeros(tokens * args.response_length // run.max_length(), dtype=torch.long)

    def forward(policy, input_ids, mask):
        hidden = script.hidden_states(policy.model, input_ids)
        hidden = hidden[:, :-1][responses, responses]
        return script.ChunkedHead.read(policy.model, hidden, responses, args)

    # From positions, transformers infers whether rows are packed. Fake positions have no values, so
    # it would make a mask, with which attention needs more memory
    not_packed = mock.patch.object(masking_utils, "find_packed_sequence_indices", lambda _: None)
    with not_packed, mock.patch.object(script.PolicyModel, "forward", forward):
        outputs = model(torch.zeros(1, tokens, dtype=torch.long), torch.ones(1, tokens))
    return outputs[0] if isinstance(outputs, tuple) else outputs


def run_passes(run, models, trained_roles):
    """Run a step's forward passes, and then the forward and backward pass of a micro-batch."""
    with torch.no_grad():
        for model in models.values():
            forward_pass(run, model)
    for role in reversed(trained_roles):  # the value model first, as in the scripts
        forward_pass(run, models[role]).mean().backward()


def count(run):
    """Return the bytes of a learner's tensors at the moment of a step with the most."""
    script, args, options = run.script, run.args, run.options
    is_sharded = bool(options.num_shards())
    accelerator = SimpleNamespace(is_fsdp2=True)
    models = load_models(run)
    roles = [role for role in models if role in plan.trained_models(run)]
    chunk = script.LOGITS_CHUNK["cuda" if options.has_gpus() else "cpu"]
    chunks = mock.patch.dict(script.LOGITS_CHUNK, cpu=chunk)
    with fake_ranks(run) if is_sharded else contextlib.nullcontext(), chunks, FakeTensorMode():
        for model in models.values():
            fill(model)
            if is_sharded:
                script.place_model(accelerator, model, args)
        optimizers = [script.make_optimizer(models[role], args) for role in roles]
        # The step allocates the moments. Under the tracker it would count sharded tensors in full
        masters = []
        for optimizer in optimizers:
            optimizer.step()
            masters += optimizer.param_groups[0]["params"]
        tracker = Tracker()
        tracker.track_external(*models.values(), *optimizers)
        # The masters belong to no model
        tracker.track_external(*masters, *(master.grad for master in masters))
        with tracker:
            run_passes(run, models, roles)
    return tracker.peak()
