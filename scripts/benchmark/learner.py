"""A learner's steps without vLLM: seconds, MFU and memory, and where the time of a GPU goes.

    python scripts/benchmark/learner.py                # the grid, on a GPU: within five minutes
    python scripts/benchmark/learner.py '{"size": "1.5", "micro_batch_tokens": 32768}'  # one cell

Without a GPU the default is a tiny cell, which takes seconds. It needs torch, transformers and
accelerate, and pandas, psutil and pyarrow, which the scripts import. tyro and datasets may be
missing. Models have random weights. Steps 5 to 7 of ppo_vllm_async.py run by its own functions, on
64 rows of 560 tokens, 504 of them the response's. With "tail" responses are shorter, most of them.

A cell is a JSON line:
    seconds         of a step's phases: medians of three steps, after one to warm up. `weights` is
                    what gather_weights does before any message
    tokens_per_s    of an update, for each model that trains
    mfu, hfu        of the update, by 6 N and attention; hfu counts the recomputed forward pass
    allocated_gib, reserved_gib    the peak, by PyTorch
    op_us           microseconds of an operation on one number, which is the machine's own cost
    ratio           the largest |new/old - 1| of the first update: 0 without compiled layers on CPUs
    grad_norm       of the first update, which must be the same in all cells of a size, up to 1e-3
    graphs          that were compiled
    syncs           {line of the script: how often the host waited for the GPU in a step}
    busy            of a profiled step: the part of its time in which the GPU had a kernel to run
    kernels, ops    launched on the GPU, or counted on the CPU
    dearest         ten kernels, with their milliseconds
A cell that fails has an "error", and the next one runs.
"""

import gc
import importlib
import json
import sys
import time
import traceback
import warnings
from collections import Counter
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

sys.path.extend(str(folder) for folder in Path(__file__).resolve().parents[1:3])

from accelerate import Accelerator
from internal import resource_plan as plan
from shapes import config_of
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

# Only a run needs these two
sys.modules |= {name: mock.MagicMock() for name in ("tyro", "datasets") if not find_spec(name)}
script = importlib.import_module("ppo_vllm_async")

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
PROMPT, RESPONSE, ROWS = 56, 504, 64
GRID = [
    {"micro_batch_tokens": 4096},
    {},
    {"micro_batch_tokens": 32_768},
    {"micro_batch_tokens": 4096, "gradient_checkpointing": False},
    {"gradient_checkpointing": False},
    {"compile_layers": True},
    {"compile_layers": True, "gradient_checkpointing": False},
    {"size": "1.5"},
    # No GPU holds all layers of 8 B. So its MFU is that of four, with the whole head
    {"size": "8", "layers": 4, "value_model": False},
    {"micro_batch_tokens": 4096},  # the first one again: what has drifted
]
TINY = {"size": "tiny", "micro_batch_tokens": 300, "rows": 4, "prompt": 6, "response": 64}
SYNCS = {"_local_scalar_dense", "nonzero", "masked_select"}  # ops that wait for a GPU

# ------------------------------------------------------------------------------------- what counts


class Ops(TorchDispatchMode):
    """Counts operations that a GPU would have a kernel for, and those that wait for it.

    seconds: what they take by a roofline. Each operation takes as long as its bytes at a bandwidth,
    or its FLOPs at a rate, whichever is longer.
    """

    def __init__(self, rate=1.0, bandwidth=1.0):
        super().__init__()
        self.rate, self.bandwidth = rate, bandwidth
        self.count, self.seconds, self.syncs = 0, 0.0, Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        name, tensors = function.overloadpacket.__name__, torch.utils._pytree.tree_leaves(args)
        indices = args[1] if name in ("index", "index_put_", "index_put") else ()
        waits = name in SYNCS or any(
            index is not None and (index.dtype == torch.bool or index.device.type != DEVICE)
            for index in indices
        )
        self.syncs.update([name] if waits else [])
        aliases = [argument.alias_info for argument in function._schema.arguments]
        is_view = any(alias and not alias.is_write for alias in aliases) or name == "_unsafe_view"
        if is_view or function.namespace == "prim":
            return result
        made = torch.utils._pytree.tree_leaves(result)
        size = sum(tensor.nbytes for tensor in tensors + made if isinstance(tensor, torch.Tensor))
        flops = flop_registry.get(function.overloadpacket)
        flops = flops(*args, **kwargs, out_val=result) if flops else 0
        self.count += 1
        self.seconds += max(size / self.bandwidth, flops / self.rate)
        return result


@contextmanager
def counting_syncs(syncs):
    """Adds to syncs the line of the script for which the host waited for the GPU."""

    def note(*_, **__):
        lines = [each for each in traceback.extract_stack() if each.filename == script.__file__]
        syncs[f"{lines[-1].name}: {lines[-1].line}" if lines else "a backward pass"] += 1

    with warnings.catch_warnings(), mock.patch.object(warnings, "showwarning", note):
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        yield
        torch.cuda.set_sync_debug_mode("default")


def synchronize():
    if HAS_GPU:
        torch.cuda.synchronize()


def op_us():
    """Microseconds of an operation on one number."""
    number = torch.zeros(1, device=DEVICE)
    start = time.perf_counter()
    for _ in range(10_000):
        number.add_(0)
    synchronize()
    return (time.perf_counter() - start) * 100


# ----------------------------------------------------------------------------------- models, batch


def load_model(config, model_class, args, is_trained, device, script=script):
    """A model with random weights, by the script's load_model."""

    def from_pretrained(path, config, dtype, attn_implementation, **_):
        options = {"dtype": dtype, "attn_implementation": attn_implementation}
        return model_class._from_config(config, **options), {"missing_keys": []}

    loader = SimpleNamespace(from_pretrained=from_pretrained)
    patch = mock.patch.object(script.AutoConfig, "from_pretrained", return_value=config)
    with patch, torch.device(device):
        model = script.load_model(loader, "", args, is_trained)
    if hasattr(model, "score"):  # as in load_classifier
        model.score.float().requires_grad_(is_trained)
    return model


def make_responses(cell):
    """Responses of random tokens, with the sampler's log-probabilities."""
    draw = np.random.default_rng(1)
    prompt_length, length = cell.get("prompt", PROMPT), cell.get("response", RESPONSE)
    responses = []
    for row in range(cell.get("rows", ROWS)):
        prompt_ids = draw.integers(2, 900, prompt_length).tolist()
        prompt = script.Prompt(f"row {row}", "", prompt_ids, None, None, None)
        drawn = 1 + int(draw.exponential(length / 4))
        count = min(drawn, length) if cell.get("tail") else length
        ids, logprobs = draw.integers(2, 900, count), np.full(count, -7.0, np.float32)
        responses.append(script.Response(prompt, ids, logprobs, True, score=draw.normal()))
    return responses


class Learner:
    """The models of a cell, their optimizers, and a step."""

    def __init__(self, cell):
        names = ("micro_batch_tokens", "gradient_checkpointing", "compile_layers", "dtype")
        self.args = script.Args(**{name: cell[name] for name in names if name in cell})
        self.accelerator = Accelerator(cpu=not HAS_GPU, mixed_precision="no")
        self.responses = make_responses(cell)
        layers = {"num_hidden_layers": cell["layers"]} if "layers" in cell else {}
        self.config = config_of(cell.get("size", "0.5"), **layers)
        self.policy = self.place(AutoModelForCausalLM, script.PolicyModel, True)
        self.reference = self.place(AutoModelForCausalLM, script.PolicyModel, False)
        self.models = [(self.policy, script.token_losses)]
        if cell.get("value_model", True):
            value_model = self.place(AutoModelForSequenceClassification, script.ValueModel, True)
            self.models.insert(0, (value_model, script.value_losses))
        self.optimizers = [script.make_optimizer(model, self.args) for model, _ in self.models]

    def place(self, auto_class, wrapper, is_trained):
        torch.manual_seed(1)
        model_class = auto_class._model_mapping[type(self.config)]
        model = load_model(self.config, model_class, self.args, is_trained, DEVICE)
        return script.place_model(self.accelerator, wrapper(model, self.args), self.args)

    def forward(self):
        self.batch = script.collate(self.responses, self.accelerator.device)
        self.rows = list(range(len(self.responses)))
        for model, names in (
            (self.policy, ("logprobs", "entropies")),
            (self.reference, ("ref_logprobs",)),
            *[(model, ("values",)) for model, _ in self.models[:-1]],
        ):
            results = script.forward_all(
                self.accelerator, model, self.batch, [self.rows], self.args
            )
            vars(self.batch).update(zip(names, results, strict=False))

    def advantages(self):
        args, batch = self.args, self.batch
        batch.kl_rewards, batch.rewards = script.token_rewards(batch, args)
        values = torch.zeros_like(batch.mask) if batch.values is None else batch.values
        advantages, batch.returns = script.compute_gae(
            batch.rewards, values, batch.mask, args.gamma, args.lam
        )
        batch.advantages = script.masked_whiten(advantages, batch.loss_mask)

    def update(self):
        """Notes the largest |ratio - 1| before the update, and the policy's gradient norm."""
        ratios = []

        def losses_of(losses):
            def noted(outputs, part, args):
                if isinstance(outputs, tuple):  # a policy's
                    difference = (outputs[0] - part.logprobs).detach() * part.mask
                    ratios.append(difference.expm1().abs().max())
                return losses(outputs, part, args)

            return noted

        models = [(model, losses_of(losses)) for model, losses in self.models]
        divisor, sums = script.loss_divisor(self.batch.loss_mask), Counter()
        script.accumulate_gradients(
            self.accelerator, models, self.batch, self.rows, divisor, sums, self.args
        )
        for (model, _), optimizer in zip(self.models, self.optimizers, strict=True):
            self.norm = script.apply_gradients(
                self.accelerator, model, optimizer, 1e-6, self.batch, Path("."), self.args
            )
        self.ratio = torch.stack(ratios).max()

    def weights(self):
        for _ in script.gather_weights(self.policy.model, self.args):
            pass

    def step(self):
        """Seconds of each phase."""
        seconds = {}
        for phase in (self.forward, self.advantages, self.update, self.weights):
            synchronize()
            start = time.perf_counter()
            phase()
            synchronize()
            seconds[phase.__name__] = time.perf_counter() - start
        return seconds


# ------------------------------------------------------------------------------------------- cells


def profile(learner):
    """What a GPU does in a step, or how many operations a CPU counts."""
    if not HAS_GPU:
        with Ops() as ops:
            learner.step()
        return {"ops": ops.count, "syncs": dict(ops.syncs)}
    syncs = Counter()
    with counting_syncs(syncs):
        learner.step()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        seconds = sum(learner.step().values())
    events = [each for each in profiler.key_averages() if each.self_device_time_total]
    events.sort(key=lambda each: -each.self_device_time_total)
    return {
        "busy": sum(each.self_device_time_total for each in events) / 1e6 / seconds,
        "kernels": sum(each.count for each in events),
        "dearest": {each.key[:60]: each.self_device_time_total / 1e3 for each in events[:10]},
        "syncs": dict(syncs.most_common()),
    }


def run_cell(cell):
    """The figures of a cell."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    host_us, learner = op_us(), Learner(cell)
    learner.step()
    figures = {"ratio": learner.ratio.item(), "grad_norm": learner.norm.item(), "op_us": host_us}
    steps = [learner.step() for _ in range(3)]
    seconds = {phase: median(step[phase] for step in steps) for phase in steps[0]}
    tokens, longest = learner.batch.lengths.sum().item(), learner.batch.mask.shape[1]
    flops = [plan.flops_of(model.model, longest) for model, _ in learner.models]
    update = tokens * sum(each[1] for each in flops)
    again = tokens * sum(each[0] for each in flops) * learner.args.gradient_checkpointing
    figures |= {"seconds": seconds}
    figures["tokens_per_s"] = tokens * len(flops) / seconds["update"]
    figures["graphs"] = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    name = torch.cuda.get_device_name() if HAS_GPU else "no GPU"
    if peak := plan.peak_of(name):
        figures["mfu"] = update / seconds["update"] / peak[0]
        figures["hfu"] = (update + again) / seconds["update"] / peak[0]
        figures["allocated_gib"] = torch.cuda.max_memory_allocated() / plan.GIB
        figures["reserved_gib"] = torch.cuda.max_memory_reserved() / plan.GIB
    return {"gpu": name} | figures | profile(learner)


def rounded(value):
    """Four digits of each number in a structure of dictionaries."""
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


def main(words):
    transformers_logging = script.transformers.utils.logging
    transformers_logging.set_verbosity_error()
    torch.backends.cuda.enable_cudnn_sdp(False)  # as start_ranks does
    for cell in [json.loads(word) for word in words] or (GRID if HAS_GPU else [TINY]):
        gc.collect()
        if HAS_GPU:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        try:
            figures = run_cell(cell)
        except Exception as error:
            figures = {"error": f"{type(error).__name__}: {error}"[:500]}
        figures["wall_s"] = time.perf_counter() - start
        print(json.dumps(cell | rounded(figures)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
