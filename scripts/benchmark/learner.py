"""Measure a learner's steps without vLLM: seconds, MFU, memory, and what a GPU spends its time on.

    python scripts/benchmark/learner.py                # all cells, on a GPU: within five minutes
    python scripts/benchmark/learner.py '{"size": "1.5", "micro_batch_tokens": 32768}'  # one cell

Without a GPU it measures one tiny cell, in seconds. It needs torch, transformers, accelerate,
pandas, psutil and pyarrow, but neither vLLM, tyro nor datasets. Models have random weights. Steps 5
to 7 of ppo_vllm_async.py run by its own functions, on 64 rows of 560 tokens, of which 504 are the
response's.

A cell is a JSON line:
    seconds         Seconds of each phase of a step, as the median of three steps after a warm-up.
                    `weights` is what gather_weights does before any message.
    tokens_per_s    Tokens of an update per second, summed over the trained models.
    mfu, hfu        Model and hardware FLOPs utilization of the update, with 6 N FLOPs per token and
                    attention. hfu includes the recomputed forward pass.
    allocated_gib, reserved_gib    Peaks by PyTorch.
    op_us           Microseconds of an operation on one number, which depend only on the computer.
    ratio           The largest |new/old - 1| in the first update. On CPUs without compiled layers
                    it is 0.
    grad_norm       Norm of the first update's gradient. In all cells of a size it must be the same,
                    up to 1e-3.
    graphs          Number of compiled graphs.
    syncs           {line of the script: how often the host waited there for the GPU in a step}
    busy            Fraction of a profiled step in which the GPU had a kernel to run.
    kernels, ops    Number of kernels on the GPU, or of operations on the CPU.
    slowest         The ten kernels that took the most milliseconds.
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

# The script imports these two, but only a run uses them
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
    # No GPU holds all layers of 8 B, so its MFU is measured with four layers and the whole head
    {"size": "8", "layers": 4, "value_model": False},
    {"micro_batch_tokens": 4096},  # the first cell again, which shows drift
]
TINY = {"size": "tiny", "micro_batch_tokens": 300, "rows": 4, "prompt": 6, "response": 64}
SYNCS = {"_local_scalar_dense", "nonzero", "masked_select"}  # ops that wait for a GPU

# ---------------------------------------------------------------------------------- counting


class Ops(TorchDispatchMode):
    """Count operations for which a GPU runs a kernel, and operations that wait for the GPU.

    `seconds` is a roofline: each operation takes the time of its bytes at the bandwidth or of its
    FLOPs at the rate, whichever is longer.
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
        tensors += torch.utils._pytree.tree_leaves(result)
        size = sum(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))
        count_flops = flop_registry.get(function.overloadpacket)
        flops = count_flops(*args, **kwargs, out_val=result) if count_flops else 0
        self.count += 1
        self.seconds += max(size / self.bandwidth, flops / self.rate)
        return result


@contextmanager
def counting_syncs(syncs):
    """Count in syncs, by line of the script, how often the host waits for the GPU."""

    def note(*_, **__):
        frames = traceback.extract_stack()
        lines = [frame for frame in frames if frame.filename == script.__file__]
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
    """Return the microseconds of an operation on one number."""
    number = torch.zeros(1, device=DEVICE)
    start = time.perf_counter()
    for _ in range(10_000):
        number.add_(0)
    synchronize()
    return (time.perf_counter() - start) * 100


# ----------------------------------------------------------------------------------- models, batch


def load_model(config, model_class, args, is_trained, device, script=script):
    """Return a model with random weights that the script's load_model has made."""

    def from_pretrained(path, config, dtype, attn_implementation, **_):
        options = {"dtype": dtype, "attn_implementation": attn_implementation}
        return model_class._from_config(config, **options), {"missing_keys": []}

    loader = SimpleNamespace(from_pretrained=from_pretrained)
    patch = mock.patch.object(script.AutoConfig, "from_pretrained", return_value=config)
    with patch, torch.device(device):
        model = script.load_model(loader, "", args, is_trained)
    if hasattr(model, "score"):  # load_classifier does the same
        model.score.float().requires_grad_(is_trained)
    return model


def make_responses(cell):
    """Return responses of random tokens, with invented log-probabilities of the sampler."""
    draw = np.random.default_rng(1)
    prompt_length, length = cell.get("prompt", PROMPT), cell.get("response", RESPONSE)
    responses = []
    for row in range(cell.get("rows", ROWS)):
        prompt_ids = draw.integers(2, 900, prompt_length).tolist()
        prompt = script.Prompt(f"row {row}", "", prompt_ids, None, None, None)
        ids, logprobs = draw.integers(2, 900, length), np.full(length, -7.0, np.float32)
        responses.append(script.Response(prompt, ids, logprobs, True, score=draw.normal()))
    return responses


class Learner:
    """Hold the models and the optimizers of a cell, and run its steps."""

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
        """Record the largest |ratio - 1| before the update, and the policy's gradient norm."""
        ratios = []

        def token_losses(outputs, micro_batch, args):
            difference = (outputs[0] - micro_batch.logprobs).detach() * micro_batch.mask
            ratios.append(difference.expm1().abs().max())
            return script.token_losses(outputs, micro_batch, args)

        models = [*self.models[:-1], (self.policy, token_losses)]
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
        """Run a step, and return the seconds of each phase."""
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
    """Return what the GPU does in a step, or without a GPU the number of operations."""
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
    kernels = [event for event in profiler.key_averages() if event.self_device_time_total]
    kernels.sort(key=lambda kernel: -kernel.self_device_time_total)
    return {
        "busy": sum(kernel.self_device_time_total for kernel in kernels) / 1e6 / seconds,
        "kernels": sum(kernel.count for kernel in kernels),
        "slowest": {
            kernel.key[:60]: kernel.self_device_time_total / 1e3 for kernel in kernels[:10]
        },
        "syncs": dict(syncs.most_common()),
    }


def run_cell(cell):
    """Return the figures of a cell."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    host_us, learner = op_us(), Learner(cell)
    learner.step()
    figures = {"ratio": learner.ratio.item(), "grad_norm": learner.norm.item(), "op_us": host_us}
    steps = [learner.step() for _ in range(3)]
    seconds = {phase: median(step[phase] for step in steps) for phase in steps[0]}
    tokens, longest = learner.batch.lengths.sum().item(), learner.batch.mask.shape[1]
    flops = [plan.flops_of(model.model, longest) for model, _ in learner.models]
    update = tokens * sum(of_update for _, of_update in flops)
    recomputed = tokens * sum(of_forward for of_forward, _ in flops)
    if not learner.args.gradient_checkpointing:
        recomputed = 0
    figures["seconds"] = seconds
    figures["tokens_per_s"] = tokens * len(flops) / seconds["update"]
    figures["graphs"] = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    name = torch.cuda.get_device_name() if HAS_GPU else "no GPU"
    if peak := plan.peak_of(name):
        figures["mfu"] = update / seconds["update"] / peak[0]
        figures["hfu"] = (update + recomputed) / seconds["update"] / peak[0]
        figures["allocated_gib"] = torch.cuda.max_memory_allocated() / plan.GIB
        figures["reserved_gib"] = torch.cuda.max_memory_reserved() / plan.GIB
    return {"gpu": name} | figures | profile(learner)


def rounded(value):
    """Round all numbers in nested dictionaries to four digits."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


def main(words):
    transformers_logging = script.transformers.utils.logging
    transformers_logging.set_verbosity_error()
    torch.backends.cuda.enable_cudnn_sdp(False)  # start_ranks does the same
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
