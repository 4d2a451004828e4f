"""What ranks compute, for test_fsdp2.py: python compute_on_ranks.py FOLDER {one,ddp,fsdp2}.

As many ranks as the launcher starts write FOLDER/<name>.pt, see main(). Each makes the runs that
FOLDER/<name>.json tells of, with a stub of vLLM.
"""

import contextlib
import importlib
import json
import os
import subprocess
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

sys.path.extend(str(folder) for folder in Path(__file__).resolve().parents[1:3])

import pytest
import torch
import tyro
from accelerate import Accelerator
from accelerate.state import PartialState
from safetensors.torch import load_file
from torch.distributed import checkpoint
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only
from transformers import LlamaConfig, LlamaForCausalLM

import ppo_vllm_async as ppo
from helpers import fsdp2, rollouts
from helpers.hooks import around
from helpers.loops import sample_digits
from helpers.processes import flags_of


def whole(tensor):
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def in_float64(script):
    """Else place_model would gather layers in less, and add up their gradients in float32."""
    policy = MixedPrecisionPolicy()
    return mock.patch.object(script, "MixedPrecisionPolicy", lambda *_, **__: policy)


# ----------------------------------------------------------------------- models, without any main()


def own_rows(accelerator):
    """The inputs of a pass: two rows of the batch, other ones on each rank."""
    batch, start = rollouts.make_rollout(), 2 * accelerator.process_index
    return batch.input_ids[start : start + 2], batch.mask[start : start + 2].float()


def trained_models(accelerator, seed=0):
    """{name: (model, its optimizer)}, in float64."""
    args, trained = rollouts.tiny_args(dtype="float64", weight_decay=0.1), {}
    models = {"policy": rollouts.tiny_policy(seed), "value_model": rollouts.tiny_value_model(seed)}
    for name, model in models.items():
        with in_float64(ppo):
            model = ppo.place_model(accelerator, model.double(), args)
        trained[name] = model, ppo.make_optimizer(model, args)
    return trained


def state_of(trained, folder):
    """{part of a checkpoint: its tensors, whole}, as models and optimizers have them now."""
    return {
        path.name: tree_map_only(torch.Tensor, whole, state)
        for state, path in ppo.checkpoint_parts(trained, folder)
    }


def step_and_save(accelerator, folder):
    """A checkpoint in a value warm-up: the policy's optimizer has not stepped. And what it has."""
    trained = trained_models(accelerator)
    value_model, optimizer = trained["value_model"]
    batch = rollouts.make_rollout()
    for scale in (1.0, 2.0):
        (scale * value_model(batch.input_ids[:2], batch.mask[:2]).square().sum()).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    for state, path in ppo.checkpoint_parts(trained, folder):
        checkpoint.save(state, checkpoint_id=path)
    return state_of(trained, folder)


def load(accelerator, folder):
    """What a checkpoint gives to models and optimizers that were others."""
    trained = trained_models(accelerator, seed=7)
    for state, path in ppo.checkpoint_parts(trained, folder):
        checkpoint.load(state, checkpoint_id=path)
    return state_of(trained, folder)


def look_at_units(accelerator, model, args):
    """What is sharded as a unit of its own, and what parts of a model are while it computes."""
    model, dtypes, gradients = ppo.place_model(accelerator, model, args), {}, {}
    if ppo.trained_weights(model):
        ppo.make_optimizer(model, args)

    def note(name):
        def hook(module, *_):
            dtypes[name] = {(isinstance(p, DTensor), p.dtype) for p in module.parameters()}

        return hook

    for name, module in model.named_modules():
        if name.endswith(("mlp", "embed_tokens")):
            module.register_forward_hook(note(name))
    inputs = own_rows(accelerator)
    lora = importlib.import_module("ppo_lora")
    with torch.no_grad():  # the reference policy's pass comes first
        lora.set_adapter_scale(model, 0.0)
        model(*inputs)
        lora.set_adapter_scale(model, 1.0)
    for rows in (slice(None), slice(1)):  # two micro-batches
        outputs = model(*(tensor[rows] for tensor in inputs))
        outputs = outputs[0] if isinstance(outputs, tuple) else outputs
        if outputs.requires_grad:
            outputs.sum().backward()
    for name, weight in ppo.trained_weights(model).items():
        gradients[name] = whole(weight.master.grad)
    return {
        "units": {name for name, m in model.named_modules() if isinstance(m, FSDPModule)},
        "in forward": dtypes,
        "after": {isinstance(p, DTensor) for p in model.parameters()},
        "gradients": gradients,
    }


def units(accelerator):
    """Of models in bfloat16: policies, trained, with an adapter, and frozen of another kind; and a
    value model, whose head is float32."""
    args, lora = rollouts.tiny_args(dtype="bfloat16"), importlib.import_module("ppo_lora")
    adapted = rollouts.tiny_language_model().bfloat16().requires_grad_(False)
    lora.add_adapter(adapted, lora.Args(lora_rank=3))
    rollouts.make_noise(adapted, seed=3)
    llama = LlamaForCausalLM(LlamaConfig(**rollouts.CONFIG))
    models = {
        "trained": rollouts.tiny_language_model().bfloat16(),
        "adapted": adapted,
        "frozen": llama.bfloat16().eval().requires_grad_(False),
    }
    models = {name: ppo.PolicyModel(model, args) for name, model in models.items()}
    models["value"] = rollouts.tiny_value_model().bfloat16()
    models["value"].model.score.float()
    return {name: look_at_units(accelerator, model, args) for name, model in models.items()}


def distance_to_reference(accelerator):
    """How far a policy in bfloat16 is from the same model, frozen, at most; its log-probabilities.

    On this rank's rows, which are others on each rank.
    """
    args = rollouts.tiny_args(dtype="bfloat16")
    trained, frozen = (rollouts.tiny_language_model().bfloat16() for _ in range(2))
    trained.train().gradient_checkpointing_enable()
    frozen.eval().requires_grad_(False)
    policies = [
        ppo.place_model(accelerator, ppo.PolicyModel(model, args), args)
        for model in (trained, frozen)
    ]
    ppo.make_optimizer(policies[0], args)
    logprobs, expected = (policy(*own_rows(accelerator))[0] for policy in policies)
    return (logprobs - expected).abs().max().item(), logprobs.detach()


# -------------------------------------------------------------------------------------- whole runs


class StubVLLM:
    """Says the same whatever its weights are; the last ones are kept."""

    made = []  # noqa: RUF012

    def __init__(self, placement, config, max_length, args):
        self.engine_index, self.num_engines, _ = placement
        self.args, self.policy_version = args, None
        self.made.append(self)

    def sync_weights(self, weights, version):
        self.weights, self.policy_version = dict(weights), version

    def submit(self, function, prompts, seeds, temperature, version, args):
        responses = self.sample(
            prompts * self.num_engines, [*seeds] * self.num_engines, temperature
        )
        return SimpleNamespace(result=lambda: responses)

    def sample(self, prompts, seeds, temperature):
        bounds = (self.engine_index, self.engine_index + 1)
        first, end = (i * len(prompts) // self.num_engines for i in bounds)
        responses = []
        for prompt, seed in zip(prompts[first:end], seeds[first:end], strict=True):
            ids = sample_digits(seed, self.args)
            logprobs = [-0.5 - token % 7 / 10 for token in ids]
            responses.append(rollouts.response_of(prompt, ids, logprobs, ids[-1] == rollouts.STOP))
        return responses


@contextlib.contextmanager
def main_in_float64(script):
    def with_double(argument):
        def instead(call, given):
            given[argument] = given[argument].double()
            return call()

        return instead

    def batch_in_double(call, given):
        batch = call()
        numbers = {name: value for name, value in vars(batch).items() if value is not None}
        floats = {name: value for name, value in numbers.items() if value.is_floating_point()}
        return replace(batch, **{name: value.double() for name, value in floats.items()})

    with in_float64(script), pytest.MonkeyPatch.context() as patch:
        around(script, "place_model", with_double("model"), put=patch.setattr)
        around(script, "collate", batch_in_double, put=patch.setattr)
        yield


def runs(accelerator, path):
    """Those of a file with [name, options], in float64.

    Returns what in the last weights that vLLM got is not as in the saved model, of each.
    """
    not_sent = []
    subprocess.run = lambda *_, **__: None  # no pictures
    PartialState.destroy_process_group = lambda *_: None  # there is a next run
    for name, options in json.loads(path.read_text()):
        run_dir, script = Path(options["output_dir"], "run"), importlib.import_module(name[:-3])
        sys.argv = [name, *flags_of(options)]
        off = {"check_sampler": lambda *_, **__: 0.0}
        stub = mock.patch.multiple(script, VLLM=StubVLLM, **off)
        with stub, main_in_float64(script):
            script.main(tyro.cli(script.Args))
        saved = load_file(run_dir / "model" / "model.safetensors")
        sent = StubVLLM.made[-1].weights  # of rank 0, which has an engine
        if "lora_rank" in script.Args.__dataclass_fields__:
            saved = load_file(run_dir / "adapter" / "adapter_model.safetensors")
            prefix, default = "base_model.model.", ".default"
            sent = {prefix + name.replace(default, ""): weight for name, weight in sent.items()}
        not_sent += [(name, w) for w in saved if not torch.equal(saved[w].float(), sent[w])]
        accelerator.wait_for_everyone()
    return not_sent


def main():
    folder, name = Path(sys.argv[1]), sys.argv[2]
    sys.path.append(str(folder))  # where forks are
    if name == "fsdp2":
        fsdp2.allow_on_cpu()
    accelerator = Accelerator(cpu=name != "fsdp2")
    assert accelerator.is_fsdp2 == (name == "fsdp2")
    assert accelerator.num_processes == (1 if name == "one" else 2)
    seen = {"distance": distance_to_reference(accelerator)}
    if name == "fsdp2":
        seen["units"] = units(accelerator)
    seen["saved"] = step_and_save(accelerator, folder / f"checkpoint_{name}")
    for path in sorted(folder.glob("checkpoint_*")):
        seen[path.name] = load(accelerator, path)
    seen["not sent"] = runs(accelerator, folder / f"{name}.json")
    if accelerator.is_main_process:
        torch.save(seen, folder / f"{name}.pt")
    accelerator.wait_for_everyone()


if __name__ == "__main__":
    try:
        main()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # gloo's threads can hang a rank that ends a moment after the other
