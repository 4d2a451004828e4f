"""What a learner holds of its GPU, by PyTorch's own count, beside what the preflight plans for it.

    python scripts/benchmark/fake_memory.py readme more  # some minutes each

It prints GiB, and ends with status 1 where plan and count are more than a tenth apart. "readme":
the cells of README's table of what fits. "more": long responses, reference policies, reward models,
no gradient checkpointing.

Tensors are fake (FakeTensorMode): they have shapes and no memory, so any machine will do. The
scripts' own functions load the models, place and run them, and make the optimizers. torch's
MemTracker adds up what is alive. Ranks are those of torch's fake process group, which sends
nothing. Counted are the forward passes of a step, and a micro-batch's passes there and back, when
gradients and AdamW's moments are there. A pass has all tokens that --micro_batch_tokens lets it
have.

No kernel runs. So it does not see what kernels take to work with, nor the allocator's fragments,
CUDA's contexts, NCCL's buffers, or vLLM. Attention is a CPU's, which is fused as a GPU's is.
"""

import argparse
import contextlib
import copy
import functools
import sys
import warnings
from types import SimpleNamespace
from unittest import mock

import fits
import plan
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import distributed
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


def load_model(run, config, model_class, is_trained):
    """A model by the script's load_model, on "meta": peft cannot add adapters to fake tensors."""
    script = run.script

    def from_pretrained(path, config, dtype, attn_implementation, **_):
        options = {"dtype": dtype, "attn_implementation": attn_implementation}
        return model_class._from_config(config, **options), {"missing_keys": []}

    loader = SimpleNamespace(from_pretrained=from_pretrained)
    patch = mock.patch.object(script.AutoConfig, "from_pretrained", return_value=config)
    with patch, torch.device("meta"):
        model = script.load_model(loader, "", run.args, is_trained)
    if hasattr(model, "score"):  # as in load_classifier
        model.score.float().requires_grad_(is_trained)
    return model


def load_models(run):
    """PolicyModels and ValueModels on "meta", by the roles that they have in the plan."""
    script, args, models = run.script, run.args, {}
    trained = plan.trained_models(run)
    for role, model in (trained | plan.frozen_models(run)).items():
        if role == "reference policy" and plan.rank_of(run):
            models[role] = models["policy"]
            continue
        loaded = load_model(run, copy.deepcopy(model.config), type(model), role in trained)
        if hasattr(model, "score"):
            models[role] = script.ValueModel(loaded, args, is_value_model=role in trained)
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
    """Has fully_shard and DDP take this process for one of the run's learners."""
    world_size, patch = run.options.num_processes, mock.patch.object
    torch.distributed.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    mesh = init_device_mesh("cpu", (world_size,))
    shard = functools.partial(run.script.fully_shard, mesh=mesh)
    try:
        # What reads numbers: the shapes that the other ranks have
        reads = patch(distributed, "_verify_param_shape_across_processes")
        with reads, patch(run.script, "fully_shard", shard):
            yield
    finally:
        torch.distributed.destroy_process_group()


def in_ddp(model):
    """A model in DDP, as the scripts ask for it. Its buckets are sent to nobody."""

    def send(_, bucket):
        sent = torch.futures.Future()
        sent.set_result(bucket.buffer())
        return sent

    options = {"gradient_as_bucket_view": True, "forward_sync_buffers": False, "init_sync": False}
    model = distributed.DistributedDataParallel(model, **options)
    model.register_comm_hook(None, send)
    return model


# --------------------------------------------------------------------------------------- the count


def tokens_of(run, is_trained):
    """Tokens of a pass, and those of responses among them."""
    args = run.args
    tokens = args.micro_batch_tokens
    if not tokens:
        flag = "per_device_train_batch_size" if is_trained else "local_rollout_forward_batch_size"
        tokens = getattr(args, flag) * run.max_length()
    return tokens, tokens * args.response_length // run.max_length()


def read_responses(script, num_tokens):
    """PolicyModel.forward for so many response tokens: fake masks do not tell how many."""

    def forward(policy, input_ids, mask):
        tokens = torch.zeros(num_tokens, dtype=torch.long)
        hidden = script.hidden_states(policy.model, input_ids, policy.args)
        hidden = hidden[:, :-1][tokens, tokens]
        return script.ChunkedHead.read(policy.model, hidden, tokens, policy.args)

    return mock.patch.object(script.PolicyModel, "forward", forward)


def read_pass(run, model, is_trained):
    """What a PolicyModel or a ValueModel gives for a micro-batch, for its loss."""
    tokens, num_responses = tokens_of(run, is_trained)
    input_ids, mask = torch.zeros(1, tokens, dtype=torch.long), torch.ones(1, tokens)
    # transformers asks positions whether rows are packed. Fake ones do not tell, and it would make
    # a mask, with which attention takes more
    not_packed = mock.patch.object(masking_utils, "find_packed_sequence_indices", lambda _: None)
    with not_packed, read_responses(run.script, num_responses):
        outputs = model(input_ids, mask)
    return outputs[0] if isinstance(outputs, tuple) else outputs


def run_passes(run, models, roles):
    """The forward passes of a step, then forward and backward of a micro-batch; roles: trained."""
    with torch.no_grad():
        for role, model in models.items():
            read_pass(run, model, role in roles)
    for role in reversed(roles):  # first the value model
        read_pass(run, models[role], True).mean().backward()


def trained_parameters(model):
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def take_step(models, optimizers, set_to_none):
    """AdamW's step of each model, which has it make the moments."""
    for model, optimizer in zip(models, optimizers, strict=True):
        for parameter in trained_parameters(model):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad(set_to_none)


def count(run):
    """Bytes of a learner's tensors, at the moment of a step with the most."""
    script, args, options = run.script, run.args, run.options
    is_sharded = bool(options.num_shards())
    is_in_ddp = options.num_processes > 1 and not is_sharded
    accelerator = SimpleNamespace(
        is_fsdp2=is_sharded, prepare_model=lambda model, evaluation_mode: model
    )
    models = load_models(run)
    roles = [role for role in models if role in plan.trained_models(run)]
    ranks = fake_ranks(run) if options.num_processes > 1 else contextlib.nullcontext()
    chunk = script.LOGITS_CHUNK["cuda" if options.has_gpus() else "cpu"]
    chunks = mock.patch.dict(script.LOGITS_CHUNK, cpu=chunk)
    with ranks, chunks, FakeTensorMode():
        for model in {id(model): model for model in models.values()}.values():
            fill(model)
            script.place_model(accelerator, model, args)
        trained = [models[role] for role in roles]
        optimizers = [script.make_optimizer(model, args) for model in trained]
        # Outside of the tracker, which would count sharded tensors as whole ones there
        take_step(trained, optimizers, set_to_none=is_in_ddp)
        tracker = Tracker()
        tracker.track_external(*models.values(), *optimizers)
        with tracker:
            if is_in_ddp:
                models |= {role: in_ddp(models[role]) for role in roles}
            run_passes(run, models, roles)
            if is_in_ddp:
                take_step(trained, optimizers, set_to_none=False)
                # DDP makes its buckets a second time, which it cannot with fake tensors
                sizes = [sum(map(torch.numel, trained_parameters(model))) for model in trained]
                torch.empty(max(sizes))
    return tracker.peak()


# -------------------------------------------------------------------------------------- the tables


def more_runs():
    """Of what README's table does not have."""
    grpo, ppo = "grpo_vllm_async", "ppo_vllm_async"
    one, eight = (80, "one_gpu.yaml"), (80, "fsdp2.yaml", 1, 8)
    long = {"response_length": 8192, "micro_batch_tokens": 512 + 8192}
    rows = {"micro_batch_tokens": 0, "per_device_train_batch_size": 4}
    scored, whole = {"reward_model_path": "a reward model"}, {"gradient_checkpointing": False}
    runs = {
        "GRPO 1.7 B, responses of 8,192": (grpo, "1.7", one, 0, long),
        "GRPO 8 B, adapters, responses of 8,192": (grpo, "8", one, 16, long),
        "PPO 8 B, FSDP2 on 8, responses of 8,192": (ppo, "8", eight, 0, long),
        "GRPO 1.7 B, --beta 0.01": (grpo, "1.7", one, 0, {"beta": 0.01}),
        "PPO 1.7 B with a reward model": (ppo, "1.7", one, 0, scored),
        "PPO 8 B, adapters, with a reward model": (ppo, "8", one, 16, scored),
        "PPO 4 B, FSDP2 on 8, with a reward model": (ppo, "4", eight, 0, scored),
        "GRPO 0.6 B, --per_device_train_batch_size 4": (grpo, "0.6", one, 0, rows),
        "PPO 0.6 B, --no-gradient_checkpointing": (ppo, "0.6", one, 0, whole),
        "GRPO 1.7 B, adapters, --no-gradient_checkpointing": (grpo, "1.7", one, 16, whole),
    }
    for words, (name, size, given, rank, changes) in runs.items():
        run = plan.with_changes(fits.launch(name, size, *given, rank=rank), changes)
        run.reward_model = run.value_model
        yield words, run


def readme_runs():
    """Pairs of words and a Run, as all tables have."""
    for row, words in fits.ROWS.items():
        titles = ("GRPO", "PPO", "GRPO, adapters", "PPO, adapters")
        for title, (size, _, run) in zip(titles, fits.largest_of(words), strict=True):
            yield f"{row}: {title}, {size} B", run


TABLES = {"readme": readme_runs, "more": more_runs}


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("tables", nargs="+", choices=TABLES)
    warnings.filterwarnings("ignore")
    far = []
    for name in parser.parse_args().tables:
        print("| run | plan | count | plan / count |\n|---|---|---|---|")
        for words, run in TABLES[name]():
            sizes = plan.learner_needs(run), count(run)
            plan_gib, count_gib = (size / plan.GIB for size in sizes)
            ratio = plan_gib / count_gib
            print(f"| {words} | {plan_gib:.1f} | {count_gib:.1f} | {ratio:.2f} |", flush=True)
            if abs(ratio - 1) > LIMIT:
                far.append(words)
    if far:
        sys.exit(f"more than {LIMIT:.0%} apart: {'; '.join(far)}")


if __name__ == "__main__":
    main()
