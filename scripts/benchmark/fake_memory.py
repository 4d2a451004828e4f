"""What a learner holds of its GPU, by PyTorch's own count, beside what the preflight plans for it.

    python scripts/benchmark/fake_memory.py  # some minutes

It prints GiB for the cells of README's table of what fits, and ends with status 1 where plan and
count are more than a tenth apart.

Tensors are fake (FakeTensorMode): they have shapes and no memory, so any machine will do. The
scripts' own functions load the models, place and run them, and make the optimizers. torch's
MemTracker adds up what is alive, in the forward passes of a step and in a micro-batch's passes
there and back, when gradients and AdamW's moments are there. Ranks are those of torch's fake
process group, which sends nothing. No kernel runs: not counted are what kernels work with, the
allocator's fragments, CUDA's contexts, NCCL's buffers, and vLLM. Attention is a CPU's, which is
fused as a GPU's is.
"""

import contextlib
import copy
import functools
import sys
import warnings
from types import SimpleNamespace
from unittest import mock

import fits
import learner
import torch
from internal import resource_plan as plan
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import masking_utils

LIMIT = 0.1  # that plan and count may be apart


class Tracker(MemTracker):
    """MemTracker without its hooks on modules: sums alone. On frozen parameters they would fail."""

    def ignore(self, *_):
        pass

    _pre_fw_hook = _post_fw_hook = _pre_bw_hook = _post_bw_hook = ignore

    def peak(self):
        """Bytes at the moment with the most."""
        (kinds,) = self.get_tracker_snapshot("peak").values()
        return kinds["Total"]


# --------------------------------------------------------------------------------- models and ranks


def load_models(run):
    """PolicyModels and ValueModels on "meta", by the roles that they have in the plan."""
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
    """Gives a model on "meta" the tensors of this mode. Tied weights stay tied."""

    @functools.cache
    def filled(tensor):
        new = torch.empty(tensor.shape, dtype=tensor.dtype)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(new, tensor.requires_grad)
        return new

    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and tensor.is_meta:
                    tensors[name] = filled(tensor)


@contextlib.contextmanager
def fake_ranks(run):
    """Has fully_shard take this process for one of the run's learners."""
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


def read_pass(run, model):
    """What a PolicyModel or a ValueModel gives for a micro-batch, for its loss.

    Fake masks do not tell how many response tokens there are, so PolicyModel.forward is told.
    """
    script, args = run.script, run.args
    tokens = args.micro_batch_tokens
    responses = torch.zeros(tokens * args.response_length // run.max_length(), dtype=torch.long)

    def forward(policy, input_ids, mask):
        hidden = script.hidden_states(policy.model, input_ids)
        hidden = hidden[:, :-1][responses, responses]
        return script.ChunkedHead.read(policy.model, hidden, responses, args)

    # transformers asks positions whether rows are packed. Fake ones do not tell, and it would make
    # a mask, with which attention takes more
    not_packed = mock.patch.object(masking_utils, "find_packed_sequence_indices", lambda _: None)
    with not_packed, mock.patch.object(script.PolicyModel, "forward", forward):
        outputs = model(torch.zeros(1, tokens, dtype=torch.long), torch.ones(1, tokens))
    return outputs[0] if isinstance(outputs, tuple) else outputs


def run_passes(run, models, roles):
    """The forward passes of a step, then forward and backward of a micro-batch; roles: trained."""
    with torch.no_grad():
        for model in models.values():
            read_pass(run, model)
    for role in reversed(roles):  # first the value model
        read_pass(run, models[role]).mean().backward()


def count(run):
    """Bytes of a learner's tensors, at the moment of a step with the most."""
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
        # Outside of the tracker, which would count sharded tensors as whole ones there
        masters = []
        for optimizer in optimizers:
            optimizer.step()  # which makes the moments
            masters += optimizer.param_groups[0]["params"]
        tracker = Tracker()
        tracker.track_external(*models.values(), *optimizers)
        # Which belong to no model
        tracker.track_external(*masters, *(master.grad for master in masters))
        with tracker:
            run_passes(run, models, roles)
    return tracker.peak()


def main():
    warnings.filterwarnings("ignore")
    far = []
    print("| run | plan | count | plan / count |\n|---|---|---|---|")
    for row, words in fits.ROWS.items():
        titles = ("GRPO", "PPO", "GRPO, adapters", "PPO, adapters")
        for title, found in zip(titles, fits.largest_of(words), strict=True):
            if found is None:  # nothing fits
                continue
            size, _, run = found
            name, needed, counted = f"{row}: {title}, {size} B", plan.learner_needs(run), count(run)
            sizes = f"{needed / plan.GIB:.1f} | {counted / plan.GIB:.1f}"
            print(f"| {name} | {sizes} | {needed / counted:.2f} |", flush=True)
            if abs(needed / counted - 1) > LIMIT:
                far.append(name)
    if far:
        sys.exit(f"more than {LIMIT:.0%} apart: {'; '.join(far)}")


if __name__ == "__main__":
    main()
