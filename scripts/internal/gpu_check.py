"""Check what the scripts do on a GPU. Print a JSON line for each part.

    bash scripts/gpu_check.sh quick                # the five most important parts
    bash scripts/gpu_check.sh                      # all parts, the most important first
    bash scripts/gpu_check.sh sync step_0.6B       # parts whose names begin with these words

machine       versions, driver, device and compiler. It always runs.
attention     Attention's gradients in bfloat16 must be finite, at lengths at which cuDNN's are not
              (pytorch issue 196678).
reverse_text  scripts/train/reverse_text/grpo.sh must reach the reward and the KL that its head
              states. Without the Hub this part is skipped.
step_...      Four steps of a script at 0.6 B (the shape of Qwen3) or 1.5 B (Qwen2.5), each on 64
              responses of 504 tokens. The line has the comparison of inspect_run.py (compare), the
              learner's peak by PyTorch (learner_gib) beside the preflight's plan (plan_gib), the
              responses that fit into vLLM's cache (at_once, plan_at_once), and the first step's
              mismatch/kl beside the limit of check_sampler (docs/results.md).
sync_...      vLLM's log-probabilities must be close to the learner's after each weight sync (IPC).
              The run has --no-async_mode, so that both have the same weights.
learn_grpo    The debug command must learn to answer held-out prompts.
adapters_...  The same as sync_..., with the fork lora, which needs bfloat16.

Learner and vLLM are colocated on the GPU, and each start of vLLM takes a minute. A part takes at
most ten minutes. If it fails, its line has an "error", the other parts still run, and the exit
status is 1. Without a GPU nothing runs, and the exit status is 2. On GPUs, vLLM 0.32 uses its
second model runner. With VLLM_USE_V2_MODEL_RUNNER=0 in the environment it uses the first one, as on
CPUs.
"""

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
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import distributions
from multiprocessing import get_context
from pathlib import Path

sys.path += [str(Path(__file__).resolve().parents[1] / name) for name in ("benchmark", "")]

import debug_runs as benchmark
import fork
import torch
from debug_runs import REPO, debug_command, flags_of, make_parser, rounded
from torch.nn.functional import scaled_dot_product_attention

from internal import run_files, run_summary

DEBUG_MODEL = REPO / "debug_assets" / "model"
HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"  # "cpu" is for tests, because main() requires a GPU
TIME_LIMIT = 540  # seconds for the runs of a part, so that it stays below 600 with everything else
PROGRAM_LIMIT = 90  # seconds for a program that is not a run
ERROR_LENGTH = 3000  # characters of a failed run's output that are shown
PACKAGES = ("torch", "vllm", "transformers", "accelerate", "triton", "torchvision")
PACKAGES += ("flashinfer-python", "nvidia-cudnn-cu13", "nvidia-nccl-cu13")

SYNC, PPO, GRPO = "ppo_sync.py", "ppo_vllm_async.py", "grpo_vllm_async.py"
# Limits of the mean difference of log-probabilities. On an H200 it was 2e-4 to 3e-4 in float32 and
# 0.002 to 0.003 in bfloat16, on a CPU 2e-7 and 0.003 to 0.004. With weights that are one update
# older it was 0.012 to 0.053
SYNC_LIMITS = {"float32": 5e-3, "bfloat16": 1e-2}
KL_LIMIT = 0.015  # of check_sampler, in bfloat16 at temperature 1
# PPO trains two models. At 1.5 B their weights, gradients and moments take 49 GB
MEMORY_OPTIONS = {"0.6": {}, "1.5": {"vllm_gpu_memory_utilization": 0.15}}
ADAPTERS = {"lora_rank": 16, "learning_rate": 1e-3}
# The attention of Qwen2.5-0.5B. cuDNN fails at lengths of 64 modulo 128, which 640 is not
QUERY_HEADS, KEY_HEADS, HEAD_SIZE, LENGTHS = 14, 2, 64, (64, 192, 704, 640)
RESPONSES = 64  # in a step


# ------------------------------------------------------------------------------------------- runs


def run(command, time_limit=TIME_LIMIT, **environment):
    """Run a script of the repository with its flags. Return a dictionary of metrics for each step.

    The metrics also have vllm/model_runner (1 or 2), vllm/at_once (how many rows of the maximum
    length fit into vLLM's cache, or None if vLLM does not print it), and compare (the line of that
    name by inspect_run.py). Raise RuntimeError if the run fails or takes longer than time_limit
    seconds. The message has the end of the output. If the run took too long, the output says where
    each of its threads was.
    """

    def watch(process):
        try:
            reasons.append(f"exit status {process.wait(time_limit)}")
        except subprocess.TimeoutExpired:
            reasons.append(f"it did not end in {time_limit:g} s")
            process.send_signal(signal.SIGABRT)  # the fault handler then prints the threads

    # At the level INFO, vLLM prints its model runner and the size of its cache
    settings = {"PYTHONFAULTHANDLER": "1", "VLLM_LOGGING_LEVEL": "INFO", "HF_HUB_OFFLINE": "1"}
    # `accelerate launch` gives a learner one thread as well
    threads, reasons = os.environ.get("OMP_NUM_THREADS", "1"), []
    with tempfile.TemporaryDirectory() as folder:
        settings |= {"watch": watch} | environment
        try:
            steps, output = benchmark.run(command, folder, threads, **settings)
        except SystemExit as error:
            words, _, output = str(error).partition("\n")
            raise RuntimeError(f"{reasons[0]}\n{words}\n{output[-ERROR_LENGTH:]}") from error
        run_dir = Path(folder, "run")
        costs = run_summary.describe_costs(run_dir, run_files.read_args(run_dir), steps)
    at_once = re.search(r"Maximum concurrency for [\d,]+ tokens per request: ([\d.]+)x", output)
    constants = {
        "vllm/model_runner": 2 if "Using V2 Model Runner" in output else 1,
        "vllm/at_once": float(at_once[1]) if at_once else None,
        "compare": (costs or "").removeprefix("To compare: "),
    }
    return [step | constants for step in steps]


def short_command(script, steps, **options):
    """Return a script with flags for a few steps of RESPONSES responses to the debug prompts."""
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
    """Write a model with random weights and the debug task's tokenizer.

    The end token is one of 151,936, so nearly all responses have response_length tokens.
    """
    from shapes import config_of
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(DEBUG_MODEL)
    config = config_of(size)
    config.bos_token_id, config.eos_token_id = None, tokenizer.eos_token_id
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def ask(*command, check=True, seconds=30):
    """Run a command. Return the CompletedProcess, with an empty output if the command fails."""
    options = {"capture_output": True, "encoding": "utf-8", "cwd": REPO, "timeout": seconds}
    try:
        return subprocess.run(command, check=check, **options)
    except (OSError, subprocess.SubprocessError):
        return subprocess.CompletedProcess(command, 1, "", "")


def in_a_process(part):
    """Run a part in another process, because memory of this one would be missing in later parts."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(part).result(PROGRAM_LIMIT)


def plan(command):
    """Return what the preflight plans for a script with its flags, and its error if there is one.

    plan_gib is the memory that a learner needs, and plan_at_once the number of responses that vLLM
    generates at once.
    """
    words = [sys.executable, "scripts/preflight.py", "--num_gpus", "1"]
    words += ["--config_file", "scripts/accelerate/one_gpu.yaml", *command]
    done = ask(*words, check=False, seconds=PROGRAM_LIMIT)
    gib = re.search(r"a learner needs about ([\d.]+) GiB", done.stdout)
    at_once = re.search(r"generates ([\d,]+) of a step's", done.stdout)
    figures = {"plan_gib": float(gib[1]) if gib else None}
    figures["plan_at_once"] = int(at_once[1].replace(",", "")) if at_once else None
    if done.stderr and done.returncode != 0:
        figures["plan_refuses"] = done.stderr.strip()[-ERROR_LENGTH:]
    return figures


def ask_driver(fields):
    """Return what nvidia-smi reports of each GPU, or nothing if there is no driver."""
    return ask("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits").stdout


def known(steps, metric):
    """Return the values of a metric in the steps that have it."""
    return [step[metric] for step in steps if step.get(metric) is not None]


# ------------------------------------------------------------------------------------------ parts


def check_attention():
    """Check that gradients are finite if logits are about -120, as in one head of Qwen2.5."""
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
            return {"error": f"attention's gradients are not finite for {length} tokens"}
    return {"finite": True}


def check_sync(script, dtype, **options):
    """Compare vLLM's log-probabilities with the learner's after each sync.

    If the options have a lora_rank, run the script's fork lora.
    """
    defaults = {"dtype": dtype, "async_mode": False, "learning_rate": 1e-4}
    command = short_command(script, 5, **defaults | options)
    with tempfile.TemporaryDirectory() as folder:
        if "lora_rank" in options:
            command[0] = Path(folder, fork.file_of("lora", script))
            fork.write_fork("lora", command[0], script=script)
        steps = run(command)
    figures = {"vllm/model_runner": steps[0].get("vllm/model_runner")}
    for metric in ("mismatch/logprob_diff_mean", "mismatch/kl"):
        figures[metric] = [rounded(step.get(metric)) for step in steps]
    # The last step has no sync
    figures["time/weight_sync"] = [rounded(step.get("time/weight_sync")) for step in steps[:-1]]
    differences = known(steps, "mismatch/logprob_diff_mean")
    if not differences:
        figures["error"] = "the run has no mismatch/logprob_diff_mean"
    elif not all(difference < SYNC_LIMITS[dtype] for difference in differences):
        figures["error"] = "vLLM and the learner differ by more than rounding errors"
    return figures


def check_learning(name):
    """Return the fraction of held-out prompts answered correctly, before and after training."""
    steps = run(debug_command(name))
    rates = known(steps, "eval/verifiable_correct_rate") or [None]
    figures = {
        "vllm/model_runner": steps[0].get("vllm/model_runner"),
        "before": rounded(rates[0]),
        "after": rounded(rates[-1]),
        "steps": len(steps),
        "seconds_of_steps": rounded(sum(known(steps, "time/training"))),
    }
    if rates[-1] is None or rates[-1] < 0.9:
        figures["error"] = "the run has not learnt; on CPUs at least 0.99 are correct at the end"
    return figures


def check_step(size, script):
    """Return the line to compare runs by, the learner's peak beside its plan, and the mismatch."""
    with tempfile.TemporaryDirectory() as model:
        make_random_model(size, model)
        options = {"model_name_or_path": model, "response_length": 504} | MEMORY_OPTIONS[size]
        command = short_command(script, 4, **options)
        figures = plan(command)
        if "needs about" in figures.get("plan_refuses", ""):
            return figures | {"skipped": "it needs more memory than the GPU has"}
        steps = run(command, TIME_LIMIT - 2 * PROGRAM_LIMIT)
    for name in ("compare", "vllm/model_runner", "vllm/at_once"):
        figures[name] = steps[0].get(name)
    figures["time/training"] = [rounded(step.get("time/training")) for step in steps]
    # In the first step both have the same weights
    figures["mismatch/kl"] = rounded(steps[0].get("mismatch/kl"))
    figures["mismatch/kl_limit"] = KL_LIMIT
    figures["learner_gib"] = rounded(max(known(steps, "perf/memory_gib"), default=None))
    return figures


def check_reverse_text():
    """Run the recipe's flags with its model and data, and check what its head expects."""
    data = ["scripts/data_preprocess/reverse_text.py", "--local_save_dir", "data/reverse_text"]
    if ask(sys.executable, *data, seconds=PROGRAM_LIMIT).returncode != 0:
        return {"skipped": "the data cannot be loaded from the Hub"}
    text = (REPO / "scripts/train/reverse_text/grpo.sh").read_text("utf-8")
    flags = re.search(r"\nflags=\((.*?)\n\)", text, re.DOTALL)[1]
    flags = re.sub(r"\$\(\((\d+) / gpus\)\)", r"\1", flags)  # on one GPU, all of a batch
    model = re.search(r"MODEL:-([^}]+)}", text)[1]
    command = [GRPO, *shlex.split(flags, comments=True), "--model_name_or_path", model]
    steps = run(command, TIME_LIMIT - PROGRAM_LIMIT, HF_HUB_OFFLINE="0")
    scores, kls = known(steps, "objective/scores"), known(steps[-3:], "mismatch/kl")
    figures = {"compare": steps[0].get("compare"), "scores": scores, "mismatch/kl": kls}
    if not (scores[-1] > max(0.6, scores[0]) and max(kls, default=math.inf) < 0.02):
        figures["error"] = "prime-rl expects a reward that rises above 0.6, and a KL below 0.02"
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
    "adapters_sync_ppo": partial(check_sync, PPO, "bfloat16", **ADAPTERS),
    "learn_grpo": partial(check_learning, "grpo"),
    "sync_ppo_bfloat16": partial(check_sync, PPO, "bfloat16"),
}
QUICK = list(PARTS)[:5]


# ------------------------------------------------------------------------------------------- main


def choose_parts(beginnings):
    """Return the parts whose names begin with one of these words, or all if there are no words."""
    if beginnings == ["quick"]:
        return QUICK
    for beginning in beginnings:
        if not any(part.startswith(beginning) for part in PARTS):
            names = ", ".join(["quick", *PARTS])
            end(f"no part begins with {beginning!r}; the parts are {names}")
    return [part for part in PARTS if part.startswith(tuple(beginnings or [""]))]


def end(message):
    print(f"gpu_check: {message}", file=sys.stderr)
    sys.exit(2)


def describe_machine():
    """Return the date, the commit, the GPU, versions, and variables of the environment."""
    fields = "name,driver_version,compute_cap,memory.total,compute_mode"
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang") or "gcc"
    versions = {package.name: package.version for package in distributions()}
    prefixes = ("CUDA_", "NCCL_", "PYTORCH_", "VLLM_", "TORCH_")
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
        "commit": ask("git", "rev-parse", "HEAD").stdout.strip() or None,
        fields: ask_driver(fields).strip() or None,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "compiler": ask(compiler, "--version").stdout.partition("\n")[0] or None,  # for Triton
        "shm_gib": rounded(shutil.disk_usage("/dev/shm").total / 2**30),
        "variables": {name: os.environ[name] for name in os.environ if name.startswith(prefixes)},
        **{package: versions.get(package) for package in PACKAGES},
    }


def run_part(name, part):
    """Return the line of a part."""
    start = time.perf_counter()
    line = {"part": name}
    try:
        line |= part()
    except Exception as error:  # the remaining parts are still worth running
        line["error"] = f"{type(error).__name__}: {error}"
    line["seconds"] = rounded(time.perf_counter() - start)
    return line


def verdict(line):
    """Return whether a part passed, with the last line of its error.

    >>> verdict({"part": "a", "seconds": 2.0}), verdict({"part": "b", "error": "so\\nno"})
    ('a: passed', 'b: FAILED, no')
    """
    if "error" in line:
        return f"{line['part']}: FAILED, {line['error'].strip().splitlines()[-1]}"
    return f"{line['part']}: {'skipped' if 'skipped' in line else 'passed'}"


def main():
    parser = make_parser(__doc__)
    parser.add_argument("parts", nargs="*", help="quick, or beginnings of names. Default: all.")
    args = parser.parse_args()
    parts = choose_parts(args.parts)
    if not HAS_GPU:
        driver = ask_driver("name,driver_version").strip() or "no GPU"
        end(
            f"torch finds no GPU, so nothing was run. torch {torch.__version__} is for CUDA "
            f"{torch.version.cuda}; nvidia-smi reports {driver}. CUDA 13 needs driver 580 or newer"
        )
    # SIGABRT, which ends a run that takes too long, would leave a core file of its size
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    lines = []
    for name in ["machine", *parts]:
        lines.append(run_part(name, describe_machine if name == "machine" else PARTS[name]))
        print(json.dumps(lines[-1]), flush=True)
    print(*map(verdict, lines), sep="\n", flush=True)
    sys.exit(any("error" in line for line in lines))


if __name__ == "__main__":
    main()
