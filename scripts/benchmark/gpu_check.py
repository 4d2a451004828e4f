"""What the scripts do on a machine with one GPU: a JSON line for each part, and a table at the end.

    bash scripts/gpu_check.sh quick            # QUICK: eight minutes on an H200
    bash scripts/gpu_check.sh                  # all, in the order of their worth: half an hour
    bash scripts/gpu_check.sh sync size_0.5B   # those whose names begin so

machine     versions, driver, device and compiler; it always runs
attention   gradients in bfloat16, at lengths where cuDNN's are not finite (pytorch issue 196678).
            Decisive is what the scripts compute: no mask, cuDNN off; the rest is information
rates       operations a second of a large matrix product
sync_...    how far vLLM's log-probabilities are from the learner's after each weight sync (IPC),
            and how long it takes. --no-async_mode, so that both have the same weights
learn_...   the debug commands: held-out prompts answered right, before and after
size_...    tokens and seconds of a step (time/...); the learner's peak by PyTorch (learner_gib) and
            the preflight's plan of it (plan_gib); the peak of each process by nvidia-smi
            (process_gib), which has CUDA's context, NCCL and fragments besides, and of all
            (gpu_gib); responses that vLLM's cache holds at once (at_once, plan_at_once). Weights
            are random, in the shapes of Qwen2.5
overlap     a training step of PPO with --async_mode against one without, at 0.5 B parameters
adapters_   as these, with --lora_rank 16: vLLM loads the model itself, and serves the adapter. On a
            GPU its kernels for that need bfloat16

vLLM shares the GPU with the learner, and each of its starts takes a minute. A part takes ten
minutes at most. One that fails has an "error" in its line; the others still run, and the exit
status is 1. Without a GPU nothing runs, and the exit status is 2. On GPUs vLLM 0.32 takes its
second model runner; with VLLM_USE_V2_MODEL_RUNNER=0 in the environment the first, as on CPUs.
"""

import argparse
import json
import math
import os
import platform
import re
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import distributions
from pathlib import Path

import run as benchmark
import torch
from run import REPO, debug_command, flags_of, rounded
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

DEBUG_MODEL = REPO / "debug_assets" / "model"
HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"  # without a GPU main() ends: "cpu" is for tests
TIME_LIMIT = 540  # seconds of a part's runs: with what comes before them it stays below 600
PROGRAM_LIMIT = 90  # seconds of what is no run
ERROR_LENGTH = 3000  # characters of a failed run's output that are shown
PACKAGES = ("torch", "vllm", "transformers", "accelerate", "triton", "torchvision")
PACKAGES += ("flashinfer-python", "nvidia-cudnn-cu13", "nvidia-nccl-cu13")

PPO, GRPO = "ppo_vllm_async.py", "grpo_vllm_async.py"
# Mean differences of log-probabilities. On an H200 they were 2e-4 to 3e-4 and 0.002 to 0.003, on a
# CPU 2e-7 and 0.003 to 0.004; with weights of one update before, 0.012 to 0.053
SYNC_LIMITS = {"float32": 5e-3, "bfloat16": 1e-2}
VOCAB_SIZE = 151_936
# Hidden and inner size, layers, heads of attention and of keys: Qwen2.5 0.5B and 1.5B
SHAPES = {"0.5B": (896, 4864, 24, 14, 2), "1.5B": (1536, 8960, 28, 12, 2)}
# PPO trains two models. At 1.5 B their weights, gradients and moments take 49 GB of, say, 80.
MEMORY_OPTIONS = {
    "0.5B": {},
    "1.5B": {"local_rollout_forward_batch_size": 8, "vllm_gpu_memory_utilization": 0.15},
}
ADAPTERS = {"lora_rank": 16, "learning_rate": 1e-3}
# Attention of Qwen2.5-0.5B, and lengths of 64 modulo 128, where cuDNN fails; 640 is none of them
QUERY_HEADS, KEY_HEADS, HEAD_SIZE, LENGTHS = 14, 2, 64, (64, 192, 704, 640)
# Responses and updates of a step of the size parts
RESPONSES, UPDATES = 64, 2


# ------------------------------------------------------------------------------------------- runs


def run(command, time_limit=TIME_LIMIT):
    """Runs a script of the repository with its flags; returns its metrics, a dict for each step.

    They have two more. vllm/model_runner: 2 for the second, else 1. vllm/at_once: how many of the
    longest rows vLLM's cache holds; None: vLLM did not tell.
    RuntimeError: it failed, or did not end within time_limit seconds. The message has the end of
    its output; of a run that did not end, it says where each of its threads was.
    """

    def watch(process):
        try:
            reasons.append(f"exit status {process.wait(time_limit)}")
        except subprocess.TimeoutExpired:
            reasons.append(f"not over after {time_limit:g} s")
            process.send_signal(signal.SIGABRT)  # the fault handler writes where its threads are

    # At the level INFO vLLM tells its model runner, and what its cache holds
    environment = {"PYTHONFAULTHANDLER": "1", "VLLM_LOGGING_LEVEL": "INFO"}
    # One thread of the learner's, as `accelerate launch` gives it; nothing here is on the hub
    environment["HF_HUB_OFFLINE"] = os.environ.get("HF_HUB_OFFLINE", "1")
    threads, reasons = os.environ.get("OMP_NUM_THREADS", "1"), []
    with tempfile.TemporaryDirectory() as folder:
        try:
            steps, said = benchmark.run(command, folder, threads, watch=watch, **environment)
        except SystemExit as error:
            words, _, said = str(error).partition("\n")
            raise RuntimeError(f"{reasons[0]}\n{words}\n{said[-ERROR_LENGTH:]}") from error
    at_once = re.search(r"Maximum concurrency for [\d,]+ tokens per request: ([\d.]+)x", said)
    of_vllm = {
        "vllm/model_runner": 2 if "Using V2 Model Runner" in said else 1,
        "vllm/at_once": float(at_once[1]) if at_once else None,
    }
    return [step | of_vllm for step in steps]


def short_command(script, steps, **options):
    """Script and flags of a few steps of RESPONSES episodes on the prompts of the debug task."""
    defaults = {
        "dataset": REPO / "debug_assets" / "train.parquet",
        "model_name_or_path": DEBUG_MODEL,
        "response_length": 8,
        "total_episodes": RESPONSES * steps,
        "local_rollout_batch_size": RESPONSES,
        "local_mini_batch_size": RESPONSES,
        "per_device_train_batch_size": 8,
    }
    if script == GRPO:
        defaults |= {"local_rollout_batch_size": RESPONSES // 4, "number_samples_per_prompt": 4}
    return [script, *flags_of(defaults | options)]


def make_random_model(size, folder):
    """Writes a model with random weights and the debug task's tokenizer.

    Its end token is one of VOCAB_SIZE, so responses have response_length tokens, but for one in
    hundreds.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config

    tokenizer = AutoTokenizer.from_pretrained(DEBUG_MODEL)
    hidden_size, intermediate_size, layers, heads, key_heads = SHAPES[size]
    config = Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def ask(*command, check=True, seconds=30):
    """What a command prints; nothing where it does not work."""
    options = {"capture_output": True, "encoding": "utf-8", "cwd": REPO, "timeout": seconds}
    try:
        return subprocess.run(command, check=check, **options)
    except (OSError, subprocess.SubprocessError):
        return subprocess.CompletedProcess(command, 1, "", "")


def run_program(name):
    """Figures of one of PROGRAMS, in a process of its own: memory that this one had would count."""
    done = ask(sys.executable, __file__, "--program", name, check=False, seconds=PROGRAM_LIMIT)
    if done.returncode != 0:
        raise RuntimeError(f"exit status {done.returncode}\n{done.stderr[-ERROR_LENGTH:]}")
    return json.loads(done.stdout.splitlines()[-1])


def plan(command):
    """The preflight's plan of a learner's memory, and of responses that vLLM samples at once.

    For a script with its flags; plan_gib is None where there is none.
    """
    words = [sys.executable, "scripts/preflight.py", "--num_gpus", "1"]
    words += ["--config_file", "scripts/accelerate/one_gpu.yaml", *command]
    done = ask(*words, check=False, seconds=PROGRAM_LIMIT)
    figures = {"plan_gib": None}
    if match := re.search(r"of a learner: about ([\d.]+) GiB.*", done.stdout):
        figures = {"plan_gib": float(match[1]), "plan": match[0]}
    if match := re.search(r"has room for ([\d,]+) of a step's", done.stdout):
        figures["plan_at_once"] = int(match[1].replace(",", ""))
    if done.stderr and done.returncode != 0:
        figures["plan_refuses"] = done.stderr.strip()[-ERROR_LENGTH:]
    return figures


def ask_driver(fields, kind="gpu"):
    """What nvidia-smi says of each GPU, or of "compute-apps"; nothing where there is no driver."""
    words = ("nvidia-smi", f"--query-{kind}={fields}", "--format=csv,noheader,nounits")
    return ask(*words).stdout.splitlines()


# ---------------------------------------------------------------------------------------- figures


def known(steps, metric):
    """A metric's values in the steps that have it."""
    return [step[metric] for step in steps if step.get(metric) is not None]


def median(steps, metric):
    """A metric's median; None: it is not known.

    Over the steps to time: not the first three, and not the last, where nothing overlaps.
    """
    values = known(steps[3:-1], metric)
    return rounded(statistics.median(values)) if values else None


class PeakMemory:
    """The most memory that all processes together had on the GPU, and each, by nvidia-smi.

    `peak` is in GiB; None: it is not known. of_processes: {process's number: GiB}, which may be
    empty in a container.
    """

    def __enter__(self):
        self.peak, self.of_processes = None, {}
        self.is_over = threading.Event()
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def watch(self):
        while HAS_GPU and not self.is_over.wait(0.5):
            for mebibytes in ask_driver("memory.used"):
                if mebibytes.isdecimal():
                    self.peak = max(self.peak or 0.0, int(mebibytes) / 1024)
            for line in ask_driver("pid,used_memory", "compute-apps"):
                pid, _, mebibytes = line.partition(", ")
                if mebibytes.isdecimal():
                    gib = rounded(int(mebibytes) / 1024)
                    self.of_processes[pid] = max(self.of_processes.get(pid, 0.0), gib)

    def __exit__(self, *_):
        self.is_over.set()
        self.thread.join()


# --------------------------------------------------------------------------------------- programs


def attend(length, is_far, has_mask, dtype):
    """Gradients of queries, keys and values, for causal attention in the shape of Qwen2.5-0.5B's.

    is_far: all logits are about -120, as in one of its heads. has_mask: the mask is a tensor.
    """
    torch.manual_seed(0)
    query, key, value, gradient = (
        torch.randn(2, heads, length, HEAD_SIZE, dtype=torch.bfloat16, device=DEVICE)
        for heads in (QUERY_HEADS, KEY_HEADS, KEY_HEADS, QUERY_HEADS)
    )
    if is_far:
        query, key = query * 0.1, key * 0.1
        query[..., 0], key[..., 0] = 1.0, -120 * math.sqrt(HEAD_SIZE)
    tensors = [tensor.to(dtype).requires_grad_() for tensor in (query, key, value)]
    query, key, value = tensors
    if has_mask:  # transformers repeats key heads then
        repeats = QUERY_HEADS // KEY_HEADS
        key, value = (tensor.repeat_interleave(repeats, 1) for tensor in (key, value))
        mask = torch.ones(length, length, dtype=torch.bool, device=DEVICE).tril()
        out = scaled_dot_product_attention(query, key, value, attn_mask=mask)
    else:
        out = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    out.backward(gradient.to(dtype))
    return [tensor.grad for tensor in tensors]


def is_finite(has_mask):
    """Whether all gradients of attention are finite; a message: it cannot be computed."""
    try:
        return all(
            gradient.isfinite().all().item()
            for length in LENGTHS
            for gradient in attend(length, True, has_mask, torch.bfloat16)
        )
    except RuntimeError as error:
        return str(error).splitlines()[0]


def check_attention():
    """Whether gradients are finite, by mask and cuDNN; and how far they are from float32's."""
    with sdpa_kernel(SDPBackend.MATH):
        exact = attend(704, False, False, torch.float32)
    computed = attend(704, False, False, torch.bfloat16)
    errors = [(a.float() - b).norm() / b.norm() for a, b in zip(computed, exact, strict=True)]
    figures = {
        "cudnn_is_on": torch.backends.cuda.cudnn_sdp_enabled(),
        "relative_error": rounded(max(errors).item()),
        "finite": is_finite(has_mask=False),
        "finite_with_mask": is_finite(has_mask=True),
    }
    torch.backends.cuda.enable_cudnn_sdp(True)
    figures["finite_with_cudnn"] = is_finite(has_mask=False)
    figures["finite_with_mask_and_cudnn"] = is_finite(has_mask=True)
    torch.backends.cuda.enable_cudnn_sdp(False)
    if figures["cudnn_is_on"]:
        figures["error"] = "cuDNN's attention is on"
    elif figures["finite"] is not True:
        figures["error"] = "gradients of attention are not finite"
    elif not figures["relative_error"] < 0.05:
        figures["error"] = "gradients of attention are wrong"
    return figures


def measure_rates():
    """Tera-operations a second of a matrix product, by what its factors are rounded to."""
    size, rounds = (8192, 20) if HAS_GPU else (256, 2)
    wait = torch.cuda.synchronize if HAS_GPU else lambda: None
    figures = {}
    for name in ("bfloat16", "tf32", "float32"):
        torch.backends.cuda.matmul.allow_tf32 = name == "tf32"
        dtype = torch.bfloat16 if name == "bfloat16" else torch.float32
        a, b = (torch.randn(size, size, dtype=dtype, device=DEVICE) for _ in range(2))
        for _ in range(3):  # to warm up
            a @ b
        wait()
        start = time.perf_counter()
        for _ in range(rounds):
            a @ b
        wait()
        seconds = time.perf_counter() - start
        figures[f"{name}_tflops"] = rounded(rounds * 2 * size**3 / seconds / 1e12)
    return figures


PROGRAMS = {"attention": check_attention, "rates": measure_rates}


# ------------------------------------------------------------------------------------------ parts


def check_sync(script, dtype, **options):
    """Figures of each step."""
    defaults = {"dtype": dtype, "async_mode": False, "learning_rate": 1e-4}
    steps = run(short_command(script, 5, **defaults | options))
    figures = {"vllm/model_runner": steps[0].get("vllm/model_runner")}
    for metric in ("mismatch/logprob_diff_mean", "mismatch/logprob_diff_max", "mismatch/kl"):
        figures[metric] = [rounded(step.get(metric)) for step in steps]
    # There is no sync after the last step
    figures["time/weight_sync"] = [rounded(step.get("time/weight_sync")) for step in steps[:-1]]
    differences = known(steps, "mismatch/logprob_diff_mean")
    if not differences:
        figures["error"] = "the run has no mismatch/logprob_diff_mean"
    elif not all(difference < SYNC_LIMITS[dtype] for difference in differences):
        figures["error"] = "vLLM and learner differ by more than rounding"
    return figures


def check_learning(name):
    """Held-out prompts answered right, before and after, and seconds without start and end."""
    steps = run(debug_command(name))
    rates = known(steps, "eval/verifiable_correct_rate") or [None]
    figures = {
        "vllm/model_runner": steps[0].get("vllm/model_runner"),
        "before": rounded(rates[0]),
        "after": rounded(rates[-1]),
        "steps": len(steps),
        "seconds_of_steps": rounded(sum(known(steps, "time/training"))),
    }
    if rates[-1] is None or rates[-1] < 0.9:  # on CPUs it is 0.996 and more
        figures["error"] = "it has not learnt: on CPUs 0.99 are right at the end"
    return figures


def check_overlap():
    """Medians of seconds, asynchronous and not."""
    figures = {}
    with tempfile.TemporaryDirectory() as model:
        make_random_model("0.5B", model)
        for name, async_mode in (("async", True), ("sync", False)):
            options = {"model_name_or_path": model, "response_length": 504}
            # Both runs are one part
            steps = run(short_command(PPO, 12, async_mode=async_mode, **options), TIME_LIMIT / 2)
            figures["vllm/model_runner"] = steps[0].get("vllm/model_runner")
            figures[f"{name}_training"] = median(steps, "time/training")
            figures[f"{name}_generation"] = median(steps, "time/generation")
    if figures["async_training"] and figures["sync_training"]:
        figures["ratio"] = rounded(figures["sync_training"] / figures["async_training"])
    return figures


def check_size(size, script, **options):
    """Speed, as medians, and memory, as peaks, beside the plan."""
    defaults = {"response_length": 504, "local_mini_batch_size": RESPONSES // UPDATES}
    with tempfile.TemporaryDirectory() as model, PeakMemory() as memory:
        make_random_model(size, model)
        options = {"model_name_or_path": model} | defaults | MEMORY_OPTIONS[size] | options
        command = short_command(script, 9, **options)
        figures = plan(command)
        if "needs about" in figures.get("plan_refuses", ""):
            return figures | {"skipped": "it needs more memory than there is"}
        steps = run(command, TIME_LIMIT - 2 * PROGRAM_LIMIT)
    figures["vllm/model_runner"] = steps[0].get("vllm/model_runner")
    times = [name for name in steps[-1] if name.startswith("time/") and name != "time/from_scratch"]
    for metric in ("perf/response_tokens_per_second", "objective/sequence_lengths", *times):
        figures[metric] = median(steps, metric)
    # In the first step both sides have the same weights
    for metric in ("mismatch/logprob_diff_mean", "mismatch/kl"):
        figures[metric] = rounded(steps[0].get(metric))
    figures["learner_gib"] = rounded(max(known(steps, "perf/memory_gib"), default=None))
    figures["gpu_gib"] = rounded(memory.peak)
    figures["process_gib"] = sorted(memory.of_processes.values(), reverse=True)
    figures["at_once"] = steps[0].get("vllm/at_once")
    return figures


PARTS = {
    "attention": partial(run_program, "attention"),
    "rates": partial(run_program, "rates"),
    "sync_ppo_bfloat16": partial(check_sync, PPO, "bfloat16"),
    "sync_grpo_float32": partial(check_sync, GRPO, "float32"),
    "learn_grpo": partial(check_learning, "grpo"),
    "size_0.5B_ppo": partial(check_size, "0.5B", PPO),
    "overlap": check_overlap,
    "size_1.5B_grpo": partial(check_size, "1.5B", GRPO),
    "adapters_sync_grpo_bfloat16": partial(check_sync, GRPO, "bfloat16", **ADAPTERS),
    "learn_ppo": partial(check_learning, "ppo"),
    "size_1.5B_ppo": partial(check_size, "1.5B", PPO),
    "size_0.5B_grpo": partial(check_size, "0.5B", GRPO),
    "sync_ppo_float32": partial(check_sync, PPO, "float32"),
    "sync_grpo_bfloat16": partial(check_sync, GRPO, "bfloat16"),
    "adapters_sync_ppo_bfloat16": partial(check_sync, PPO, "bfloat16", **ADAPTERS),
    "adapters_size_1.5B_ppo": partial(check_size, "1.5B", PPO, **ADAPTERS),
}
QUICK = list(PARTS)[:6]


# ------------------------------------------------------------------------------------------- main


def choose_parts(beginnings):
    """The parts whose names begin so, in the order of PARTS; all, where nothing is given."""
    if beginnings == ["quick"]:
        return QUICK
    for beginning in beginnings:
        if not any(part.startswith(beginning) for part in PARTS):
            names = ", ".join(["quick", *PARTS])
            end(f"no part begins with {beginning!r}; there are {names}")
    return [part for part in PARTS if part.startswith(tuple(beginnings or [""]))]


def end(message):
    print(f"gpu_check: {message}", file=sys.stderr)
    sys.exit(2)


def describe_machine():
    """When and on what this runs."""
    fields = "name,driver_version,compute_cap,memory.total,compute_mode"
    include = Path(sysconfig.get_paths()["include"])
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang") or "gcc"
    versions = {package.name: package.version for package in distributions()}
    prefixes = ("CUDA_", "NCCL_", "PYTORCH_", "VLLM_", "TORCH_")
    machine = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
        "commit": ask("git", "rev-parse", "HEAD").stdout.strip() or None,
        fields: "; ".join(ask_driver(fields)) or None,
        "cuda": torch.version.cuda,
        "cpus": os.cpu_count(),
        "kernel": platform.release(),
        "libc": " ".join(platform.libc_ver()),
        "python": platform.python_version(),
        "compiler": ask(compiler, "--version").stdout.partition("\n")[0] or None,  # Triton's
        "python_h": (include / "Python.h").exists(),
        "shm_gib": rounded(shutil.disk_usage("/dev/shm").total / 2**30),
        "variables": {name: os.environ[name] for name in os.environ if name.startswith(prefixes)},
        **{package: versions.get(package) for package in PACKAGES},
    }
    lacking = {
        "compute capability 8.0 or newer": HAS_GPU and torch.cuda.get_device_capability() < (8, 0),
        "gcc or clang": machine["compiler"] is None,
        "Python.h (Debian and Ubuntu: apt-get install python3-dev)": not machine["python_h"],
        "torchvision, which vLLM imports on GPUs": HAS_GPU and machine["torchvision"] is None,
    }
    if any(lacking.values()):
        machine["error"] = f"there is no {', no '.join(name for name in lacking if lacking[name])}"
    return machine


def run_part(name, part):
    """The line of a part."""
    start = time.perf_counter()
    line = {"part": name}
    try:
        line |= part()
    except Exception as error:  # the parts that follow are still worth their time
        line["error"] = f"{type(error).__name__}: {error}"
    line["seconds"] = rounded(time.perf_counter() - start)
    return line


def in_short(value):
    """A figure in a table.

    >>> in_short([0.25, None, 0.5]), in_short(None), in_short(12.0), in_short("a\\nb")
    ('0.25 to 0.5', 'None', '12', 'a b')
    """
    if isinstance(value, list):
        numbers = [number for number in value if number is not None]
        return f"{min(numbers):g} to {max(numbers):g}" if numbers else "None"
    return f"{value:g}" if isinstance(value, float) else " ".join(str(value).split())


def table(lines):
    """Of each part whether it passed, and its figures; of an error the last line.

    >>> print(table([{"part": "a", "seconds": 2.0, "x": 1.5}, {"part": "b", "error": "so\\nno"}]))
    a: passed, seconds 2, x 1.5
    b: FAILED, error no
    """
    rows = []
    for line in lines:
        figures = {name: in_short(line[name]) for name in line if name != "part"}
        result = "FAILED" if "error" in line else "skipped" if "skipped" in line else "passed"
        if "error" in line:
            figures["error"] = line["error"].strip().splitlines()[-1]
        words = [f"{name} {figure}" for name, figure in figures.items()]
        rows.append(f"{line['part']}: {', '.join([result, *words])}")
    return "\n".join(rows)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", help="quick, or beginnings of names; none: all")
    parser.add_argument("--program", choices=PROGRAMS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    parts = choose_parts(args.parts)
    if not HAS_GPU:
        driver = "; ".join(ask_driver("name,driver_version")) or "no GPU"
        end(
            f"torch finds no GPU, so nothing was run. torch {torch.__version__} is for CUDA "
            f"{torch.version.cuda}; nvidia-smi says: {driver}. CUDA 13 needs driver 580 or newer"
        )
    if args.program:
        torch.backends.cuda.enable_cudnn_sdp(False)  # as the scripts do
        print(json.dumps(PROGRAMS[args.program]()))
        return
    # A run that is ended for being too slow would leave a core file of its size
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    lines = []
    for name in ["machine", *parts]:
        lines.append(run_part(name, describe_machine if name == "machine" else PARTS[name]))
        print(json.dumps(lines[-1]), flush=True)
    print(table(lines), flush=True)
    sys.exit(1 if any("error" in line for line in lines) else 0)


if __name__ == "__main__":
    main()
