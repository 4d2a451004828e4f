"""What the scripts do on a machine with one GPU: a JSON line for each part.

    bash scripts/gpu_check.sh quick                # QUICK
    bash scripts/gpu_check.sh                      # all, in the order of their worth
    bash scripts/gpu_check.sh sync step_0.6B       # those whose names begin so

machine       versions, driver, device and compiler; it always runs
attention     gradients in bfloat16, at lengths where cuDNN's are not finite (pytorch issue 196678)
reverse_text  scripts/train/reverse_text/grpo.sh: reward and KL as its head has them. Without the
              hub it is a random model of this shape: then speed and memory alone are told
step_...      four steps of a script at 0.6 B (the shape of Qwen3) or 1.5 B (Qwen2.5), of 64
              responses of 504 tokens: the run's own line to compare by; the learner's peak by
              PyTorch (learner_gib) beside the preflight's plan (plan_gib), the peak of each process
              by nvidia-smi (process_gib), which has CUDA's context, NCCL and fragments besides, and
              of all (gpu_gib); the responses that vLLM's cache holds (at_once, plan_at_once); and
              the first step's mismatch/kl beside the limit of check_sampler (docs/results.md)
sync_...      how far vLLM's log-probabilities are from the learner's after each weight sync (IPC),
              and how long it takes. --no-async_mode, so that both have the same weights
learn_grpo    the debug command: held-out prompts answered right, before and after
adapters_...  as sync, by the fork lora, which needs bfloat16; at rank 64 with prompts of 1,000
              tokens, where vLLM 0.32's kernel for compute capability 9.0 may be wrong (its issue
              48590)

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
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import distributions
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path

sys.path += [str(Path(__file__).resolve().parents[1] / name) for name in ("benchmark", "")]

import debug_runs as benchmark
import fork
import inspect_run
import torch
from debug_runs import REPO, debug_command, flags_of, rounded
from torch.nn.functional import scaled_dot_product_attention

DEBUG_MODEL = REPO / "debug_assets" / "model"
HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"  # without a GPU main() ends: "cpu" is for tests
TIME_LIMIT = 540  # seconds of a part's runs: with what comes before them it stays below 600
PROGRAM_LIMIT = 90  # seconds of what is no run
ERROR_LENGTH = 3000  # characters of a failed run's output that are shown
PACKAGES = ("torch", "vllm", "transformers", "accelerate", "triton", "torchvision")
PACKAGES += ("flashinfer-python", "nvidia-cudnn-cu13", "nvidia-nccl-cu13")

SYNC, PPO, GRPO = "ppo_sync.py", "ppo_vllm_async.py", "grpo_vllm_async.py"
# Mean differences of log-probabilities. On an H200 they were 2e-4 to 3e-4 and 0.002 to 0.003, on a
# CPU 2e-7 and 0.003 to 0.004; with weights of one update before, 0.012 to 0.053
SYNC_LIMITS = {"float32": 5e-3, "bfloat16": 1e-2}
KL_LIMIT = 0.015  # of check_sampler, in bfloat16 at temperature 1
# PPO trains two models. At 1.5 B their weights, gradients and moments take 49 GB of, say, 80.
MEMORY_OPTIONS = {
    "0.6": {},
    "1.5": {"vllm_gpu_memory_utilization": 0.15},
}
ADAPTERS = {"lora_rank": 16, "learning_rate": 1e-3}
# Attention of Qwen2.5-0.5B, and lengths of 64 modulo 128, where cuDNN fails; 640 is none of them
QUERY_HEADS, KEY_HEADS, HEAD_SIZE, LENGTHS = 14, 2, 64, (64, 192, 704, 640)
RESPONSES = 64  # of a step


# ------------------------------------------------------------------------------------------- runs


def run(command, time_limit=TIME_LIMIT, **environment):
    """Runs a script of the repository with its flags; returns its metrics, a dict for each step.

    They have more. vllm/model_runner: 2 for the second, else 1. vllm/at_once: how many of the
    longest rows vLLM's cache holds; None: vLLM did not tell. compare: the line of that name by
    inspect_run.py. RuntimeError: it failed, or did not end within time_limit seconds. The message
    has the end of its output; of a run that did not end, it says where each of its threads was.
    """

    def watch(process):
        try:
            reasons.append(f"exit status {process.wait(time_limit)}")
        except subprocess.TimeoutExpired:
            reasons.append(f"not over after {time_limit:g} s")
            process.send_signal(signal.SIGABRT)  # the fault handler writes where its threads are

    # At the level INFO vLLM tells its model runner, and what its cache holds
    settings = {"PYTHONFAULTHANDLER": "1", "VLLM_LOGGING_LEVEL": "INFO", "HF_HUB_OFFLINE": "1"}
    # One thread of the learner's, as `accelerate launch` gives it
    threads, reasons = os.environ.get("OMP_NUM_THREADS", "1"), []
    with tempfile.TemporaryDirectory() as folder:
        settings |= {"watch": watch} | environment
        try:
            steps, said = benchmark.run(command, folder, threads, **settings)
        except SystemExit as error:
            words, _, said = str(error).partition("\n")
            raise RuntimeError(f"{reasons[0]}\n{words}\n{said[-ERROR_LENGTH:]}") from error
        run_dir = Path(folder, "run")
        costs = inspect_run.describe_costs(run_dir, inspect_run.read_args(run_dir), steps)
    at_once = re.search(r"Maximum concurrency for [\d,]+ tokens per request: ([\d.]+)x", said)
    of_vllm = {
        "vllm/model_runner": 2 if "Using V2 Model Runner" in said else 1,
        "vllm/at_once": float(at_once[1]) if at_once else None,
        "compare": (costs or "").removeprefix("To compare: "),
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
    }
    if script == GRPO:
        defaults |= {"local_rollout_batch_size": RESPONSES // 4, "number_samples_per_prompt": 4}
    return [script, *flags_of(defaults | options)]


def make_random_model(size, folder):
    """Writes a model with random weights and the debug task's tokenizer.

    Its end token is one of 151,936, so responses have response_length tokens, but for one in
    hundreds.
    """
    from shapes import config_of
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(DEBUG_MODEL)
    config = config_of(size)
    config.bos_token_id, config.eos_token_id = None, tokenizer.eos_token_id
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_rows(path, rows):
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), "utf-8")
    return path


def ask(*command, check=True, seconds=30):
    """What a command prints; nothing where it does not work."""
    options = {"capture_output": True, "encoding": "utf-8", "cwd": REPO, "timeout": seconds}
    try:
        return subprocess.run(command, check=check, **options)
    except (OSError, subprocess.SubprocessError):
        return subprocess.CompletedProcess(command, 1, "", "")


def in_a_process(part):
    """A part's figures; memory that this process had would count in the parts that follow."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(part).result(PROGRAM_LIMIT)


def plan(command):
    """The preflight's plan of a learner's memory, and of responses that vLLM samples at once.

    For a script with its flags; plan_gib is None where there is none.
    """
    words = [sys.executable, "scripts/preflight.py", "--num_gpus", "1"]
    words += ["--config_file", "scripts/accelerate/one_gpu.yaml", *command]
    done = ask(*words, check=False, seconds=PROGRAM_LIMIT)
    figures = {"plan_gib": None}
    if match := re.search(r"a learner needs about ([\d.]+) GiB.*", done.stdout):
        figures = {"plan_gib": float(match[1]), "plan": match[0]}
    if match := re.search(r"generates ([\d,]+) of a step's", done.stdout):
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


# ------------------------------------------------------------------------------------------ parts


def check_attention():
    """Whether gradients are finite where logits are about -120, as in a head of Qwen2.5's."""
    torch.backends.cuda.enable_cudnn_sdp(False)  # as the scripts do
    for length in LENGTHS:
        query, key, value = (
            0.1 * torch.randn(2, heads, length, HEAD_SIZE, dtype=torch.bfloat16, device=DEVICE)
            for heads in (QUERY_HEADS, KEY_HEADS, KEY_HEADS)
        )
        query[..., 0], key[..., 0] = 1.0, -120 * math.sqrt(HEAD_SIZE)
        tensors = [tensor.requires_grad_() for tensor in (query, key, value)]
        out = scaled_dot_product_attention(*tensors, is_causal=True, enable_gqa=True)
        out.backward(torch.randn_like(out))
        if not all(tensor.grad.isfinite().all() for tensor in tensors):
            return {"error": f"gradients of attention are not finite, of {length} tokens"}
    return {"finite": True}


def check_sync(script, dtype, environment=None, **options):
    """Figures of each step. With a lora_rank they are of the script's fork."""
    defaults = {"dtype": dtype, "async_mode": False, "learning_rate": 1e-4}
    command = short_command(script, 5, **defaults | options)
    with tempfile.TemporaryDirectory() as folder:
        if "lora_rank" in options:
            command[0] = Path(folder, fork.file_of("lora", script))
            fork.write_fork("lora", command[0], script=script)
        steps = run(command, **environment or {})
    figures = {"vllm/model_runner": steps[0].get("vllm/model_runner")}
    for metric in ("mismatch/logprob_diff_mean", "mismatch/kl"):
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


def check_long_prompts():
    """check_sync with adapters of rank 64 and prompts of 1,000 tokens; check_adapter reads one.

    The preflight refuses this rank on compute capability 9.0 but with an assembler of CUDA 13.3 or
    later, as Triton has one for newer GPUs.
    """
    environment = {}
    if triton := find_spec("triton"):
        assembler = Path(triton.origin).parent / "backends/nvidia/bin/ptxas-blackwell"
        if assembler.exists() and "TRITON_PTXAS_PATH" not in os.environ:
            environment["TRITON_PTXAS_PATH"] = str(assembler)
    with tempfile.TemporaryDirectory() as folder:
        content = "1" * 998  # a token each, and two of the template
        row = {"prompt": [{"role": "user", "content": content}], "data_source": "debug/sorting"}
        rows = [row | {"reward_model": {"ground_truth": str(number)}} for number in range(100)]
        path = write_rows(Path(folder, "rows.jsonl"), rows)
        make_random_model("0.6", folder)
        options = {"dataset": path, "max_prompt_token_length": 1024, "model_name_or_path": folder}
        options = ADAPTERS | options | {"lora_rank": 64}
        return check_sync(GRPO, "bfloat16", environment, **options)


def check_step(size, script):
    """The line to compare runs by, memory as peaks beside the plan, and the mismatch."""
    with tempfile.TemporaryDirectory() as model, PeakMemory() as memory:
        make_random_model(size, model)
        options = {"model_name_or_path": model, "response_length": 504} | MEMORY_OPTIONS[size]
        command = short_command(script, 4, **options)
        figures = plan(command)
        if "needs about" in figures.get("plan_refuses", ""):
            return figures | {"skipped": "it needs more memory than there is"}
        steps = run(command, TIME_LIMIT - 2 * PROGRAM_LIMIT)
    for name in ("compare", "vllm/model_runner", "vllm/at_once"):
        figures[name] = steps[0].get(name)
    figures["time/training"] = [rounded(step.get("time/training")) for step in steps]
    # In the first step both sides have the same weights
    figures["mismatch/kl"] = rounded(steps[0].get("mismatch/kl"))
    figures["mismatch/kl_limit"] = KL_LIMIT
    figures["learner_gib"] = rounded(max(known(steps, "perf/memory_gib"), default=None))
    figures["gpu_gib"] = rounded(memory.peak)
    figures["process_gib"] = sorted(memory.of_processes.values(), reverse=True)
    return figures


def check_reverse_text():
    """The recipe's flags, with its model and data, or without the hub with others."""
    text = (REPO / "scripts/train/reverse_text/grpo.sh").read_text("utf-8")
    flags = re.search(r"\nflags=\((.*?)\n\)", text, re.DOTALL)[1]
    flags = re.sub(r"\$\(\((\d+) / gpus\)\)", r"\1", flags)  # of a batch on one GPU
    model = re.search(r"MODEL:-([^}]+)}", text)[1]
    data = [sys.executable, "scripts/data_preprocess/reverse_text.py"]
    data += ["--local_save_dir", "data/reverse_text"]
    has_hub = ask(*data, seconds=PROGRAM_LIMIT).returncode == 0
    with tempfile.TemporaryDirectory() as folder:
        if not has_hub:
            rows = [{"prompt": f"{number:05d}"} for number in range(1000)]
            path = write_rows(Path(folder, "train.jsonl"), rows)
            ask(*data, "--local_dataset_path", str(path))
            model = folder
            make_random_model("0.6", model)
        command = [GRPO, *shlex.split(flags, comments=True), "--model_name_or_path", model]
        steps = run(command, TIME_LIMIT - PROGRAM_LIMIT, HF_HUB_OFFLINE=str(int(not has_hub)))
    scores, divergences = known(steps, "objective/scores"), known(steps[-3:], "mismatch/kl")
    figures = {"model": "the hub's" if has_hub else "random", "compare": steps[0].get("compare")}
    figures |= {"scores": scores, "mismatch/kl": divergences}
    if has_hub and not (scores[-1] > max(0.6, scores[0]) and max(divergences) < 0.02):
        figures["error"] = "prime-rl asks for a reward that rises above 0.6, and a KL below 0.02"
    return figures


PARTS = {
    "attention": partial(in_a_process, check_attention),
    "reverse_text": check_reverse_text,
    "sync_grpo_float32": partial(check_sync, GRPO, "float32"),
    "step_0.6B_ppo_sync": partial(check_step, "0.6", SYNC),
    "step_0.6B_ppo": partial(check_step, "0.6", PPO),
    "step_0.6B_grpo": partial(check_step, "0.6", GRPO),
    "step_1.5B_ppo_sync": partial(check_step, "1.5", SYNC),
    "step_1.5B_ppo": partial(check_step, "1.5", PPO),
    "step_1.5B_grpo": partial(check_step, "1.5", GRPO),
    "adapters_rank_64": check_long_prompts,
    "adapters_sync_ppo": partial(check_sync, PPO, "bfloat16", **ADAPTERS),
    "learn_grpo": partial(check_learning, "grpo"),
    "sync_ppo_bfloat16": partial(check_sync, PPO, "bfloat16"),
}
QUICK = list(PARTS)[:5]


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


def verdict(line):
    """Whether a part passed; of an error the last line.

    >>> verdict({"part": "a", "seconds": 2.0}), verdict({"part": "b", "error": "so\\nno"})
    ('a: passed', 'b: FAILED, no')
    """
    if "error" in line:
        return f"{line['part']}: FAILED, {line['error'].strip().splitlines()[-1]}"
    return f"{line['part']}: {'skipped' if 'skipped' in line else 'passed'}"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", help="quick, or beginnings of names; none: all")
    args = parser.parse_args()
    parts = choose_parts(args.parts)
    if not HAS_GPU:
        driver = "; ".join(ask_driver("name,driver_version")) or "no GPU"
        end(
            f"torch finds no GPU, so nothing was run. torch {torch.__version__} is for CUDA "
            f"{torch.version.cuda}; nvidia-smi says: {driver}. CUDA 13 needs driver 580 or newer"
        )
    # A run that is ended for being too slow would leave a core file of its size
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    lines = []
    for name in ["machine", *parts]:
        lines.append(run_part(name, describe_machine if name == "machine" else PARTS[name]))
        print(json.dumps(lines[-1]), flush=True)
    print(*map(verdict, lines), sep="\n", flush=True)
    sys.exit(1 if any("error" in line for line in lines) else 0)


if __name__ == "__main__":
    main()
