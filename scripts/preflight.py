r"""Checks a run before it is launched, and prints its plan; also on a laptop without the GPUs.

    python scripts/preflight.py [--num_processes 8] [--num_gpus 8] [--gpu_memory 80] SCRIPT FLAGS...
    python scripts/preflight.py --config_file scripts/accelerate/fsdp2.yaml ... SCRIPT FLAGS...

SCRIPT is ppo_sync.py, ppo_vllm_async.py, grpo_vllm_async.py, scripts/train_reward_model.py, or a
fork of one; FLAGS are those that it is to be launched with. It is loaded as a module, and its own
arguments, data and reward functions are used, so a fork is checked as it is.

The checks are in parts: the environment, the arguments, the tokenizer, the data, the models, the
reward, the output folder and the checkpoint in it, the disk, accounts. Each part tells its first
mistake in one line, and the others go on. Then the exit status is 2. The plan comes before the
mistakes. Nothing is left on the disk but what comes from the hub, in its cache.

Memory is an estimate from the sizes of the models, by plan.py, which finds what fits, too. It was
compared with what models of the shape of Qwen2 take on CPUs, one rank, two by DDP and two by FSDP2;
the kernels of GPUs are others. What PyTorch's allocator holds and does not use is not in it.
"""

import contextlib
import copy
import difflib
import faulthandler
import functools
import hashlib
import importlib
import importlib.util
import inspect
import json
import math
import multiprocessing as mp
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import zipfile
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, get_origin
from unittest import mock

import accelerate
import datasets
import huggingface_hub
import plan
import torch
import transformers
import tyro
import yaml
from plan import GIB, with_changes
from preprocessing import hub_answers, printable
from provenance import repo_of
from requests.utils import get_netrc_auth
from safetensors import safe_open
from torch.distributed.checkpoint import FileSystemReader
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
)

IMPORT_TIMEOUT = 300  # seconds that the file of a --reward_fn may take to be imported
TEMPLATE_TIMEOUT = 5  # seconds for a row: a chat template is a program, and may loop for ever
# With fewer at once vLLM needs about as long for a token of each as for one more of them, since it
# waits for the weights to be read
FEW_RESPONSES = 64


@dataclass
class Options:
    """Where the run is to be launched."""

    config_file: str | None = None
    """as for accelerate launch, such as scripts/accelerate/fsdp2.yaml"""
    num_processes: int | None = None
    """learner processes on all machines, as for accelerate launch; None: by config_file, or 1"""
    num_machines: int | None = None
    """machines, as for accelerate launch; None: by config_file, or 1"""
    num_gpus: int | None = None
    """GPUs of each machine; None: those of this one"""
    gpu_memory: float | None = None
    """GiB of memory of each GPU; None: that of this machine's"""
    disk: float | None = None
    """GB of room on the disk of --output_dir; None: what is free here, if the GPUs are here too"""
    variables: tyro.conf.Suppress[dict] = field(default_factory=os.environ.copy)
    """the environment of the run, with what accelerate's launcher adds"""

    def is_set(self, name):
        """Whether a variable of accelerate's says yes."""
        return str(self.variables.get(name)).lower() in ("1", "true")

    def num_shards(self):
        """Ranks that share a model; 0: each has a copy."""
        return self.num_processes if self.is_set("ACCELERATE_USE_FSDP") else 0

    def local_processes(self):
        """Learner processes of a machine."""
        return self.num_processes // self.num_machines

    def has_gpus(self):
        """Whether the run is to have GPUs."""
        return bool(self.num_gpus or self.gpu_memory)


@dataclass
class Run:
    """What is known of a run. The parts fill it in; None: a part has found a mistake."""

    script: ModuleType
    options: Options
    args: Any  # as they were given, then as the script fills them in
    has_run_name: bool  # whether one was given
    has_good_numbers: bool = False
    is_filled_in: bool = False
    tokenizers: tuple | None = None  # of the policy and of the reward model
    train_rows: list | None = None  # the script's Prompts, or its Pairs
    eval_rows: list | None = None  # those that are evaluated
    model: Any = None  # without its weights, like the next two
    value_model: Any = None
    reward_model: Any = None
    answers: dict | None = None  # scores that the reward gave, by data source and kind of answer
    run_dir: Path | None = None
    checkpoint_dir: Path | None = None
    changed: dict | None = None  # arguments that are not those of the checkpoint: (was, is)
    notes: list = field(default_factory=list)  # what is no mistake, but should be known

    def trains_reward_model(self):
        return hasattr(self.script, "load_pairs")

    def shares_gpus(self):
        """Whether vLLM and a learner are on the same GPU."""
        return (
            self.options.has_gpus() and not self.trains_reward_model() and not self.args.vllm_gpus
        )

    def max_length(self):
        """Tokens of the longest prompt with its response; of the longest row of pairs."""
        if self.trains_reward_model():
            return max(pair.length for pair in self.train_rows + (self.eval_rows or []))
        rows = self.train_rows + (self.eval_rows or [])
        return max(len(prompt.token_ids) for prompt in rows) + self.args.response_length

    def knows_sizes(self):
        """Whether no part that memory depends on has found a mistake."""
        models = [self.model]
        if hasattr(self.args, "value_model_path"):
            models.append(self.value_model)
        if getattr(self.args, "reward_model_path", None) is not None:
            models.append(self.reward_model)
        return self.is_filled_in and self.train_rows is not None and None not in models


class Mistake(Exception):
    """What is wrong, where, and what to do."""


def lacks(run, error):
    """In words: a function or an argument that a fork has not, or not by this name; else None."""
    if isinstance(error, AttributeError):
        if error.obj is run.script:
            return f"the script has no {error.name}"
        if isinstance(error.obj, run.script.Args):
            return f"the script's Args have no {error.name}"
    return None


# --------------------------------------------------------------------------- script and arguments


def load_script(path):
    """The script as a module."""
    if not os.path.isfile(path):
        raise Mistake(f"{path}: no such script")
    name = Path(path).stem
    sys.path.insert(0, str(Path(path).resolve().parent))
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        raise Mistake(f"{path} cannot be imported ({describe(error, path)})") from error
    if not hasattr(module, "Args"):
        raise Mistake(f"{path} has no dataclass Args; it must be one of the scripts, or a fork")
    return module


def parse_flags(script, words):
    """The script's arguments as they are given, and what is wrong with the flags, if anything."""
    args, unknown = tyro.cli(
        script.Args,
        prog=f"{script.__name__}.py",
        args=words,
        return_unknown_args=True,
        use_underscores=True,
    )
    for option in fields(args):
        if getattr(args, option.name) == "" != option.default:
            raise Mistake(f"--{option.name} is empty; give it a value, or leave it out")
    names = [option.name for option in fields(script.Args)]
    for word in unknown:
        flag = word.lstrip("-").partition("=")[0].replace("-", "_")
        if flag in {option.name for option in fields(Options)}:
            return args, Mistake(
                f"--{flag} is an option of preflight.py: it goes before the script"
            )
        similar = difflib.get_close_matches(flag, names, n=1)
        meant = f"did you mean --{similar[0]}?" if similar else "--help lists all"
        return args, Mistake(f"unknown flag {word}; {meant}")
    return args, None


def read_config_file(options):
    """Fills in the numbers and variables that accelerate's launcher gives to a run."""
    path = options.config_file
    try:
        config = yaml.safe_load(Path(path).read_text()) if path else {}
        for name in ("num_processes", "num_machines"):
            if getattr(options, name) is None:
                setattr(options, name, int(config.get(name, 1)))
        fsdp = {"fsdp_cpu_ram_efficient_loading": True} | (config.get("fsdp_config") or {})
    except Exception as error:
        raise Mistake(
            f"--config_file {path}: it is no file of accelerate launch, such as those of "
            f"scripts/accelerate ({describe(error)})"
        ) from error
    if path:
        options.variables[f"ACCELERATE_USE_{config.get('distributed_type')}"] = True
        options.variables |= {name.upper(): value for name, value in fsdp.items()}


def check_launcher(run):
    """What earlier launchers, or a user, have left in the environment."""
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT"]
    ranks = {name: os.environ.get(name, "0" if "RANK" in name else "1") for name in names}
    needed = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
    missing = [name for name in needed if not os.environ.get(name)]
    problem = None
    if not all(value.isdecimal() for value in ranks.values()):
        problem = "must be whole numbers"
    elif int(ranks["MASTER_PORT"]) not in range(1, 2**16):
        problem = "have a MASTER_PORT that is none"
    elif "0" in (ranks["WORLD_SIZE"], ranks["LOCAL_WORLD_SIZE"]):
        problem = "are a launch of no processes"
    elif missing and (int(ranks["WORLD_SIZE"]) > 1 or "LOCAL_RANK" in os.environ):
        problem = f"lack {', '.join(missing)}"
    elif int(ranks["RANK"]) >= int(ranks["WORLD_SIZE"]):
        problem = "have a RANK that is not below the WORLD_SIZE"
    if problem is not None:
        found = [f"{name}={os.environ[name]!r}" for name in names if name in os.environ]
        raise Mistake(
            f"the environment variables {', '.join(found)} {problem}; unset them: the launcher "
            f"sets them"
        )
    check_sharding(run)
    if os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1") != "1":
        raise Mistake(
            "ACCELERATE_GRADIENT_ACCUMULATION_STEPS must be 1: it is --per_device_train_batch_size "
            "that cuts batches"
        )
    try:
        accelerate.utils.TorchDynamoPlugin()  # reads the environment
    except Exception as error:
        raise Mistake(f"accelerate does not start with this environment ({error})") from error


def check_sharding(run):
    """Refuses ways to share a model among ranks that the script does not know."""
    is_set, is_trainer = run.options.is_set, run.trains_reward_model()
    is_known = not is_trainer and not is_set("FSDP_CPU_RAM_EFFICIENT_LOADING")
    is_known &= str(run.options.variables.get("FSDP_VERSION")) == "2"
    if is_set("ACCELERATE_USE_DEEPSPEED") or (is_set("ACCELERATE_USE_FSDP") and not is_known):
        file = "ddp.yaml" if is_trainer else "fsdp2.yaml"
        raise Mistake(
            f"such sharding does not work here; launch as scripts/accelerate/{file} does: without "
            f"DeepSpeed, a reward model without FSDP, all else by fsdp_version 2 and with "
            f"fsdp_cpu_ram_efficient_loading false"
        )


# A number must be above 0; these, and those whose default is 0, may be 0
MAY_BE_0 = {"seed", "learning_rate", "num_evals", "beta", "gamma", "lam", "tis_cap", "eval_prompts"}
MAY_BE_0 |= {"value_learning_rate", "value_lam", "verification_reward", "keep_last_n"}
MAY_BE_0 |= {"reward_model_multiplier", "penalty_reward_value", "warmup_ratio", "stop_token_id"}
# What is smaller than this does nothing (eps), or becomes 0.01 in vLLM
AT_LEAST = {"temperature": 0.01, "eval_temperature": 0.01, "eps": 1e-20}
# Other floats may be a million at most, integers a billion: more overflows, or fills the memory
AT_MOST = dict.fromkeys(["learning_rate", "value_learning_rate", "weight_decay"], 1)
AT_MOST |= dict.fromkeys(["warmup_ratio", "gamma", "lam", "value_lam"], 1)
AT_MOST |= {"vllm_gpu_memory_utilization": 1, "mismatch_mask_range": math.inf}
AT_MOST |= {"tis_cap": 1e30, "max_grad_norm": 1e30}
AT_MOST |= {"lora_rank": 512}  # vLLM's limit (config/lora.py, MaxLoRARanks)
AT_MOST |= {"num_evals": 10_000, "num_epochs": 1000, "reward_workers": 1000}
AT_MOST |= {"seed": 2**32 - 1, "temperature": 2, "eval_temperature": 2}  # vLLM's limits


def check_number(name, value, default):
    """Refuses a number that is out of range, or that no one can mean."""
    most = AT_MOST.get(name, 10**6 if isinstance(value, float) else 10**9)
    if math.isnan(value) or (math.isinf(value) and most != math.inf):
        raise Mistake(f"--{name} is {value}; it must be finite")
    if value > most:
        raise Mistake(f"--{name} is {value}; it must be at most {most}")
    if name == "penalty_reward_value":
        if value < -most:
            raise Mistake(f"--{name} is {value}; it must be at least {-most}")
    elif name == "mismatch_mask_range":
        if value < 1:
            raise Mistake(f"--{name} is {value}; it must be 1 or more")
    elif value < 0 and (name in MAY_BE_0 or default == 0):
        raise Mistake(f"--{name} is {value}; it must be 0 or more")
    elif value <= 0 and not (name in MAY_BE_0 or default == 0):
        raise Mistake(f"--{name} is {value}; it must be above 0")
    elif 0 < value < AT_LEAST.get(name, 0):
        raise Mistake(f"--{name} is {value}; it must be at least {AT_LEAST[name]}")
    if name == "dual_clip" and 0 < value <= 1:
        raise Mistake(f"--dual_clip is {value}; it must be above 1, or 0")


def check_numbers(run):
    """Refuses numbers out of range."""
    for option in fields(run.args):
        value = getattr(run.args, option.name)
        if type(value) in (int, float):  # and not a bool, which isinstance would take for an int
            check_number(option.name, value, option.default)
    if getattr(run.args, "kl_target", 0) > 0 and run.args.beta == 0:
        raise Mistake("--kl_target: a --beta of 0 stays 0; begin with one above 0")


def sizes_that_divide(whole, part):
    """In words: the sizes nearest to part, below and above, that divide the whole evenly."""
    sizes = [size for size in range(1, whole + 1) if whole % size == 0]
    below = [size for size in sizes if size < part][-1:]
    above = [size for size in sizes if size > part][:1]
    return " or ".join(map(str, below + above)) or "none"


def check_batches(run):
    """Refuses sizes that do not divide; says which would."""
    args = run.args
    mini = args.local_mini_batch_size
    episodes = args.local_rollout_batch_size * args.number_samples_per_prompt
    if episodes * run.options.num_processes > 10**6:
        raise Mistake(
            f"a step would have {episodes * run.options.num_processes:,} responses "
            f"(local_rollout_batch_size * number_samples_per_prompt * ranks); a million at most"
        )
    if episodes % mini:
        raise Mistake(
            f"local_rollout_batch_size * number_samples_per_prompt ({episodes}) must be a multiple "
            f"of local_mini_batch_size ({mini}); a local_mini_batch_size that would do: "
            f"{sizes_that_divide(episodes, mini)}"
        )


def check_warm_up(run):
    """Refuses a run without steps, and warm-ups as long as the run. Notes few updates."""
    args = run.args
    if args.num_training_steps == 0:
        raise Mistake(
            f"--total_episodes {args.total_episodes} is less than the {args.episodes_per_step} of "
            f"one step"
        )
    updates_per_step = args.num_updates // args.num_training_steps
    warm_up_of_values = getattr(args, "value_warmup_steps", 0)
    updates = args.num_updates - warm_up_of_values * updates_per_step
    if updates <= 0:
        raise Mistake(
            f"--value_warmup_steps {warm_up_of_values}: the run has only "
            f"{args.num_training_steps} steps, so the policy would not learn"
        )
    if args.warm_up_steps >= updates:
        raise Mistake(
            f"warm_up_steps or warmup_ratio: the learning rate would rise in {args.warm_up_steps} "
            f"updates, and the policy has only {updates} updates"
        )
    if args.num_updates < 100:
        run.notes.append(
            f"{args.num_updates} optimizer updates are few: raise --total_episodes, or lower "
            f"--local_rollout_batch_size and --local_mini_batch_size, which count for each of "
            f"{run.options.num_processes} ranks"
        )


def check_gpus(run):
    """Refuses GPUs that a machine does not have."""
    machines, processes = run.options.num_machines, run.options.num_processes
    if processes < 1 or machines < 1 or processes % machines:
        raise Mistake(
            f"--num_processes {processes} must be a multiple of --num_machines {machines}, and "
            f"both 1 or more"
        )
    num_gpus, learners = run.options.num_gpus, run.options.local_processes()
    gpus = getattr(run.args, "vllm_gpus", ())
    if gpus and not num_gpus:
        raise Mistake("--vllm_gpus: there is no GPU here; of another machine say --num_gpus")
    if not num_gpus:
        return
    if learners > num_gpus:
        raise Mistake(
            f"{learners} learners on a machine need a GPU each, and it has {num_gpus} GPUs"
        )
    beyond = [gpu for gpu in gpus if gpu >= num_gpus]
    if beyond:
        raise Mistake(
            f"--vllm_gpus {gpus}: there is no GPU {beyond[0]}; a machine has 0 to {num_gpus - 1}"
        )
    if gpus and min(gpus) < learners:
        raise Mistake(
            f"--vllm_gpus {gpus}: the {learners} learners have GPUs 0 to {learners - 1}; name "
            f"others, or launch fewer learners (--num_processes)"
        )
    idle = num_gpus - learners - len(set(gpus))
    if idle > 0:
        run.notes.append(f"{idle} of a machine's {num_gpus} GPUs are not used; see --num_processes")


def check_arguments(run):
    """Refuses arguments that do not fit together. Fills in those of run time."""
    check_numbers(run)
    check_gpus(run)
    local_processes = str(run.options.local_processes())
    if not run.trains_reward_model():
        check_batches(run)
        with mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": local_processes}):
            run.args = run.script.fill_in(run.args, run.options.num_processes)
        check_warm_up(run)
    args = run.args
    warms = ("value_warmup_steps", "value_model_path", "reward_model_path")
    if getattr(args, "lam", 1) < 1 and not any(getattr(args, name) for name in warms):
        run.notes.append(
            f"--lam {args.lam:g}: below 1 the value model has to be warmed up first "
            f"(--value_warmup_steps), or all responses become short"
        )
    # What only GRPO has
    if hasattr(args, "advantage_normalization") and args.number_samples_per_prompt < 2:
        raise Mistake("--number_samples_per_prompt: a group needs at least 2 samples")
    if getattr(args, "importance_sampling_level", "token") == "sequence":
        if args.mismatch_mask == "token":
            raise Mistake("--mismatch_mask token: by GSPO all tokens of a response have one ratio")
        if max(args.cliprange, args.cliprange_higher) > 0.01:
            run.notes.append(
                f"--cliprange {args.cliprange:g} and --cliprange_higher {args.cliprange_higher:g} "
                f"do not bind: the ratio of a whole response stays near 1. GSPO has "
                f"--cliprange 3e-4 --cliprange_higher 4e-4"
            )
    run.has_good_numbers = True
    run.is_filled_in = not run.trains_reward_model()  # of which check_updates does the rest


def check_shared_gpus(run):
    """Refuses a machine whose GPUs cannot be shared. Weights go to vLLM by CUDA IPC there."""
    if not run.shares_gpus():
        return
    remedy = "or give vLLM GPUs of its own (--vllm_gpus)"
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        value = run.options.variables.get(name, "")
        if "expandable_segments:true" in value.replace(" ", "").lower():
            # pytorch issue 165685: handles of such memory need a right that containers lack
            raise Mistake(f"{name}={value}: vLLM cannot read such memory; unset it, {remedy}")
    if torch.cuda.device_count() == 0:
        return  # the GPUs are another machine's
    if "microsoft" in platform.release().lower():
        raise Mistake(f"WSL has no CUDA IPC, which a shared GPU needs; use Linux, {remedy}")
    pipes = run.options.variables.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")
    if "Exclusive_Process" in compute_modes(run) and not os.path.exists(f"{pipes}/control"):
        raise Mistake(
            f"a GPU in the mode Exclusive_Process has one process, and it is to have two: call "
            f"nvidia-smi --compute-mode=0, start MPS (nvidia-cuda-mps-control -d), {remedy}"
        )


def compute_modes(run):
    """The compute modes of the visible GPUs, by nvidia-smi; none where it does not answer."""
    command = ["nvidia-smi", "--query-gpu=compute_mode", "--format=csv,noheader"]
    visible = run.options.variables.get("CUDA_VISIBLE_DEVICES")
    if visible:
        command.append(f"--id={visible}")
    with contextlib.suppress(OSError):
        return subprocess.run(command, capture_output=True, text=True).stdout.split()
    return []


# -------------------------------------------------------------------------------- tokenizer, data


@contextlib.contextmanager
def time_limit(seconds):
    """Raises TimeoutError inside the block after so many seconds. In the main thread alone."""

    def stop(signal_number, frame):
        raise TimeoutError(f"it took longer than {seconds} seconds")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def describe(error, path=None):
    """An exception in words; with a path, also the last line of that file that led to it."""
    text = f"{type(error).__name__}: {error}".removesuffix(": ")
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if path and same_path(frame.filename, path)]
    if lines:
        text += f" ({path}, line {lines[-1]})"
    return text


def same_path(path, other):
    return os.path.realpath(path) == os.path.realpath(other)


def load_pretrained(auto_class, flag, path, revision):
    """auto_class.from_pretrained(path); where that fails, the path given by --flag is wrong."""
    if not os.path.exists(path) and not hub_answers():
        advice = "no such folder, the hub does not answer, and it is not in the cache"
    elif not os.path.exists(path):
        advice = "no such folder, and the hub has no such model that you may read"
    else:
        advice = None
    try:
        return auto_class.from_pretrained(path, revision=revision, trust_remote_code=False)
    except Exception as error:
        # Of what is not there, a library tells at length where it has looked
        advice = advice or f"it cannot be loaded ({describe(error)})"
        raise Mistake(f"--{flag} {path}: {advice}") from error


def revision_of(run, path):
    args = run.args
    revisions = {
        getattr(args, "reward_model_path", None): getattr(args, "reward_model_revision", None),
        args.model_name_or_path: args.model_revision,
    }
    return revisions.get(path)


def check_tokenizers(run):
    """Loads the tokenizers, whose tokens must be the same."""
    args = run.args
    flag = "tokenizer_name_or_path" if args.tokenizer_name_or_path else "model_name_or_path"
    path = getattr(args, flag)
    tokenizer = load_pretrained(AutoTokenizer, flag, path, revision_of(run, path))
    if args.chat_template is not None:
        tokenizer.chat_template = read_chat_template(args.chat_template)
    if not tokenizer("1 + 1 = 2, is it not?")["input_ids"]:
        raise Mistake(
            f"--{flag} {path}: the tokenizer turns text into nothing; are its files there, such as "
            f"tokenizer.json? Or give a --tokenizer_name_or_path"
        )
    run.tokenizers = (tokenizer, tokenizer)
    reward_model_path = getattr(args, "reward_model_path", None)
    if reward_model_path is not None:
        revision = revision_of(run, reward_model_path)
        load_pretrained(AutoTokenizer, "reward_model_path", reward_model_path, revision)
        run.tokenizers = run.script.load_tokenizers(args)
    if run.trains_reward_model():
        stop_token = tokenizer.eos_token if args.stop_token == "eos" else args.stop_token
        if stop_token not in tokenizer.get_vocab():
            raise Mistake(f"--stop_token {args.stop_token}: no token of the tokenizer {path}")
        args.stop_token_id = tokenizer.get_vocab()[stop_token]


def read_chat_template(path):
    """The text of the file of --chat_template."""
    if not os.path.isfile(path):
        raise Mistake(f"--chat_template {path}: no such file")
    if os.path.getsize(path) > 2**20:
        raise Mistake(f"--chat_template {path}: it is larger than 1 MiB; is it a template?")
    try:
        return Path(path).read_text("utf-8")
    except (OSError, ValueError) as error:
        raise Mistake(f"--chat_template {path}: it cannot be read ({error})") from error


def broken_line(path):
    """File and number of its first line that is no JSON."""
    with open(path) as file:
        for number, line in enumerate(file, start=1):
            try:
                json.loads(line)
            except ValueError:
                return f"{path}, line {number}"
    return path


def read_rows(run, path, split):
    """The rows of a dataset, all of them objects."""
    is_file = Path(path).suffix in (".parquet", ".jsonl")
    if is_file and not os.path.isfile(path):
        raise Mistake(f"{path}: no such file")
    advice = "is it a .parquet, a .jsonl, or the name of a dataset on the hub?"
    if is_file:
        advice = "is it damaged?"
    elif not os.path.exists(path) and not hub_answers():
        advice = "no such .parquet or .jsonl, the hub does not answer, and it is not in the cache"
    try:
        rows = run.script.load_rows(path, split)
    except Exception as error:
        if lacks(run, error):
            raise
        place = broken_line(path) if isinstance(error, json.JSONDecodeError) else path
        raise Mistake(f"{place}: cannot be read; {advice} ({describe(error)})") from error
    if not rows:
        raise Mistake(f"{path}: the dataset is empty")
    for index, row in enumerate(rows):
        if not isinstance(row, dict):
            raise Mistake(f"{path}, row {index}: cannot be read; it must be a JSON object")
    return rows


def check_content(content, name):
    """Refuses what is neither a text nor messages."""
    if isinstance(content, str):
        return
    if not isinstance(content, list) or not content:
        raise Mistake(f"`{name}` must be a text, or messages with role and content")
    for message in content:
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise Mistake(f"`{name}` must be a text, or messages with role and content")
        if message["role"] is None or message["content"] is None:
            raise Mistake(f"`{name}` has a message without role or content")


WITHOUT_TRUTH = (
    'it belongs in the column `reward_model`, as {"style": "rule", "ground_truth": ...}; for rows '
    "without one use --no-apply_verifiable_reward --reward_model_path MODEL"
)


def read_prompt(run, row, name, is_eval):
    """A row as the script's Prompt. Mistake: it has not what it must have."""
    args, columns = run.args, f"the columns are {', '.join(row)}"
    column = "prompt" if row.get("messages") is None else "messages"
    if column in row:  # a fork may have columns of its own
        check_content(row[column], column)
        if not isinstance(row[column], str) and run.tokenizers[0].chat_template is None:
            raise Mistake(
                f"`{column}` has messages, and the tokenizer no template for them: see "
                f"--chat_template"
            )
    source = row.get("data_source" if column == "prompt" else "dataset")
    if not isinstance(source or "", str):
        raise Mistake("`data_source` must be a string")
    rule = row.get("reward_model")
    if rule is not None and not isinstance(rule, dict):
        raise Mistake(f"`reward_model` must be an object with a ground_truth; {WITHOUT_TRUTH}")
    try:  # the run's files are going to hold these
        json.dumps([source, row.get("ground_truth"), rule], ensure_ascii=False).encode()
    except (TypeError, ValueError) as error:
        raise Mistake(f"the ground truth is nothing that JSON holds ({error})") from error
    try:
        with time_limit(TEMPLATE_TIMEOUT):
            return run.script.read_prompt(row, name, *run.tokenizers, args, is_eval)
    except Exception as error:
        if lacks(run, error):
            raise
        if isinstance(error, KeyError):
            raise Mistake(f"there is no column `{error.args[0]}`; {columns}") from error
        uses_source = args.apply_verifiable_reward and args.reward_fn is None
        if source is None and uses_source and not isinstance(error, TimeoutError):
            raise Mistake(
                f"there is no `data_source`, which chooses the reward; or name a --reward_fn; "
                f"{columns}"
            ) from error
        if "ground_truth" in str(error):
            raise Mistake(f"{error}; {WITHOUT_TRUTH}") from error
        if isinstance(error, NotImplementedError | ValueError):
            raise Mistake(str(error)) from error
        raise Mistake(
            f"`{column}` is not what tokenizer and --chat_template take ({describe(error)})"
        ) from error


def read_prompts(run, path, split, is_eval):
    """The prompts of a dataset that are neither empty nor too long."""
    rows = read_rows(run, path, split)
    prompts = []
    for index, row in enumerate(rows):
        name = f"{path}, row {index}"
        try:
            prompts.append(read_prompt(run, row, name, is_eval))
        except Mistake as error:
            raise Mistake(f"{name}: {error}") from error
    limit = run.args.max_prompt_token_length
    kept = [prompt for prompt in prompts if 0 < len(prompt.token_ids) <= limit]
    dropped = (
        f"{len(rows) - len(kept)} of {len(rows)} prompts, empty or longer than "
        f"--max_prompt_token_length {limit}"
    )
    if not kept:
        lengths = [len(prompt.token_ids) for prompt in prompts]
        raise Mistake(
            f"{path}: none is left; dropped {dropped} (they have {min(lengths)} to {max(lengths)} "
            f"tokens)"
        )
    if len(kept) < len(rows):
        run.notes.append(f"{path}: dropped {dropped}")
    if isinstance(rows[0].get("prompt"), str) and run.tokenizers[0].chat_template is not None:
        run.notes.append(f"{path}: prompts are text, so the chat template is not used")
    warn_of_lost_characters(run, path, kept)
    return kept


def warn_of_lost_characters(run, path, prompts):
    """Text that is not there any more when it has been encoded and decoded."""
    tokenizer = run.tokenizers[0]
    for prompt in prompts:
        decoded = tokenizer.decode(prompt.token_ids)
        lost = "".join(sorted(set(prompt.text) - set(decoded))).strip()
        if lost:
            run.notes.append(
                f"{prompt.row}: the tokenizer loses {lost[:20]!r}: {prompt.text[-40:]!r} comes "
                f"back as {decoded[-40:]!r}"
            )
            return


def read_pairs(run, path, split):
    """The pairs that are neither equal nor too long."""
    args, tokenizer = run.args, run.tokenizers[0]
    rows = read_rows(run, path, split)
    missing = [name for name in ("chosen", "rejected") if name not in rows[0]]
    if missing:
        missing = ", ".join(f"`{name}`" for name in missing)
        raise Mistake(f"{path}: there is no column {missing}; the columns are {', '.join(rows[0])}")
    pairs, too_long, equal = [], 0, 0
    for index, row in enumerate(rows):
        token_ids = []
        for column in ("chosen", "rejected"):
            try:
                check_content(row.get(column), column)
                context, response = run.script.split_row(row.get("prompt"), row[column])
                check_content(context, f"prompt` or what precedes the answer in `{column}")
                with time_limit(TEMPLATE_TIMEOUT):
                    _, context_ids = run.script.tokenize_prompt(context, tokenizer)
                    response_ids = tokenizer(response, add_special_tokens=False)["input_ids"]
            except Exception as error:
                if lacks(run, error):
                    raise
                what = str(error) if isinstance(error, Mistake) else f"`{column}`: {error}"
                raise Mistake(f"{path}, row {index}: {what}") from error
            token_ids.append([*context_ids, *response_ids, args.stop_token_id])
        pair = run.script.Pair(*token_ids, length=max(map(len, token_ids)))
        if pair.length > args.max_token_length:
            too_long += 1
        elif pair.chosen_ids == pair.rejected_ids:
            equal += 1
        else:
            pairs.append(pair)
    dropped = (
        f"{len(rows) - len(pairs)} of {len(rows)} pairs: {too_long} longer than --max_token_length "
        f"{args.max_token_length}, {equal} whose responses are equal"
    )
    if not pairs:
        raise Mistake(f"{path}: none is left; dropped {dropped}")
    if len(pairs) < len(rows):
        run.notes.append(f"{path}: dropped {dropped}")
    return pairs


def check_data(run):
    """Reads the training rows, as the script will."""
    args = run.args
    if run.trains_reward_model():
        run.train_rows = read_pairs(run, args.dataset, args.dataset_split)
        return
    prompts = read_prompts(run, args.dataset, args.dataset_split, is_eval=False)
    if args.apply_verifiable_reward and all(prompt.ground_truth is None for prompt in prompts):
        raise Mistake(f"{args.dataset}, every row: there is no `ground_truth`; {WITHOUT_TRUTH}")
    run.train_rows = prompts


def check_eval_data(run):
    """Reads the held-out rows."""
    args = run.args
    if args.eval_dataset is None:
        run.eval_rows = []
    elif run.trains_reward_model():
        run.eval_rows = read_pairs(run, args.eval_dataset, args.eval_dataset_split)
    else:
        rows = read_prompts(run, args.eval_dataset, args.eval_dataset_split, is_eval=True)
        if 0 < args.eval_prompts < len(rows):  # as the script draws them
            drawn = run.script.draw_prompts(len(rows), 0, args.eval_prompts, seed=0)
            rows = [rows[index] for index in drawn]
        run.eval_rows = rows


def check_updates(run):
    """The reward model's: the updates follow from the number of pairs."""
    args = run.args
    args.mini_batch_size = args.local_mini_batch_size * run.options.num_processes
    args.num_updates = len(run.train_rows) * args.num_train_epochs // args.mini_batch_size
    args.warm_up_steps = round(args.warmup_ratio * args.num_updates)
    if args.warm_up_steps >= args.num_updates:
        raise Mistake(
            f"{args.dataset}: {len(run.train_rows)} pairs x {args.num_train_epochs} are "
            f"{args.num_updates} updates of {args.mini_batch_size}; more than the warm-up's "
            f"{args.warm_up_steps} are needed: a smaller --local_mini_batch_size?"
        )
    run.is_filled_in = True


# ----------------------------------------------------------------------------------------- models


def is_local(path):
    """Whether a model is in a folder of this machine, and not on the hub."""
    return os.path.exists(path)


@functools.cache
def find_infinite(path):
    """The first tensor in a model's folder that is not finite; None: there is none."""
    for file in sorted(Path(path).glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (it is no dictionary)
                tensor = tensors.get_tensor(name)
                # One such number makes the sum one
                if tensor.is_floating_point() and not tensor.sum(dtype=torch.float32).isfinite():
                    return name
    return None


def build_model(run, auto_class, flag, path, may_lack=(), **config_options):
    """The model without its weights, whose names and shapes must be those that its config asks for.

    A model on the hub is built from its config alone: its weights are not downloaded.
    """
    revision = revision_of(run, path)
    config = load_pretrained(AutoConfig, flag, path, revision)
    if getattr(config, "quantization_config", None) is not None:
        raise Mistake(f"--{flag} {path} is quantized; give the model that it was made from")
    text_config = config.get_text_config()
    heads = getattr(text_config, "num_attention_heads", None)
    groups = getattr(text_config, "num_key_value_heads", None)
    report = {"missing_keys": set(), "mismatched_keys": set()}
    try:
        if heads and groups and heads % groups != 0:
            raise ValueError(f"{heads} attention heads cannot share {groups} key-value heads")
        if is_local(path):
            model, report = auto_class.from_pretrained(
                path,
                device_map="meta",
                trust_remote_code=False,
                ignore_mismatched_sizes=True,  # the report names them
                output_loading_info=True,
                attn_implementation=run.args.attn_implementation,
                **config_options,
            )
        else:
            for name, value in config_options.items():
                setattr(config, name, value)
            with torch.device("meta"):
                model = auto_class.from_config(
                    config, attn_implementation=run.args.attn_implementation
                )
            if auto_class is AutoModelForCausalLM:
                with contextlib.suppress(OSError):  # a model may come without one
                    model.generation_config = GenerationConfig.from_pretrained(
                        path, revision=revision
                    )
    except Exception as error:
        raise Mistake(
            f"--{flag} {path}: no model can be built from its config.json and weights "
            f"({describe(error)})"
        ) from error
    missing = sorted(set(report["missing_keys"]) - set(may_lack))
    if missing:
        raise Mistake(f"--{flag} {path}: its weights lack {', '.join(missing[:3])}")
    for name, shape, needed_shape in sorted(report["mismatched_keys"]):
        raise Mistake(
            f"--{flag} {path}: in its weights {name} is {list(shape)}, and by its config.json "
            f"{list(needed_shape)}"
        )
    damaged = find_infinite(path)
    if damaged is not None:
        raise Mistake(f"--{flag} {path}: {damaged} holds numbers that are not finite")
    return model


# What models make of their logits, by argument of their configs, and where it changes nothing.
# PolicyModel computes final_logit_softcapping, logit_scale and logits_scaling alone
NOT_COMPUTED = {
    "logits_soft_cap": None,
    "output_logit_soft_cap": None,
    "lm_head_multiplier": 1,
    "logits_mup_width_multiplier": 1,
}


def check_policy(run):
    """Refuses a policy that is no decoder, or whose logits the script does not compute."""
    path = run.args.model_name_or_path
    model = build_model(run, AutoModelForCausalLM, "model_name_or_path", path)
    name = type(model).__name__
    # AutoModelForCausalLM builds decoders of encoders such as BERT, too; what was saved tells
    saved_as = str(model.config.architectures or name)
    is_decoder = name in saved_as or "CausalLM" in saved_as or "LMHead" in saved_as
    if model.config.is_encoder_decoder or not is_decoder:
        raise Mistake(
            f"--model_name_or_path {path} is {saved_as}; it must be a decoder, a causal language "
            f"model"
        )
    config = model.config.get_text_config()
    unknown = [
        key for key, neutral in NOT_COMPUTED.items() if getattr(config, key, neutral) != neutral
    ]
    if getattr(model.get_output_embeddings(), "bias", None) is not None:
        unknown.append("the bias of the head")
    if config.model_type == "hyperclovax" and config.logits_scaling != 1:  # others divide by it
        unknown.append("logits_scaling")
    if unknown:
        raise Mistake(
            f"--model_name_or_path {path}: no script computes {', '.join(unknown)} of a {name}"
        )
    generation_config = Path(path, "generation_config.json")
    if generation_config.exists():
        try:
            model.generation_config = GenerationConfig.from_pretrained(path)
        except Exception as error:
            raise Mistake(f"--model_name_or_path {path}: {error}") from error
    run.model = model


# Whether vLLM's class for the first architecture that it knows takes adapters; for the others it
# runs the model by the code of transformers, which does
ASK_VLLM = """
import sys
from vllm.model_executor.models import ModelRegistry, supports_lora
known = [name for name in sys.argv[1:] if name in ModelRegistry.models]
sys.exit(3 if known and not supports_lora(ModelRegistry.models[known[0]].load_model_cls()) else 0)
"""


def check_adapters(run):
    """Refuses a policy whose adapters vLLM does not take. Notes a learning rate as without them."""
    args, path = run.args, run.args.model_name_or_path
    if plan.rank_of(run) == 0:
        return
    if not plan.adapted_layers(run.model):
        raise Mistake(f"--lora_rank: {path} has no linear layers but its head to adapt")
    if run.options.has_gpus() and args.dtype == "float32":
        raise Mistake("--lora_rank: on a GPU vLLM's kernels for adapters need --dtype bfloat16")
    if importlib.util.find_spec("vllm") is not None:  # which a laptop may lack
        names = run.model.config.architectures or [type(run.model).__name__]
        # In a process of its own: vLLM starts threads, and this one is going to fork
        command = [sys.executable, "-c", ASK_VLLM, *names]
        if subprocess.run(command, capture_output=True).returncode == 3:
            raise Mistake(f"--lora_rank: vLLM's {names[0]} takes no adapters; train all weights")
    if args.learning_rate <= 1e-6:
        run.notes.append(
            f"--learning_rate {args.learning_rate:g}: with adapters the rate is about ten times "
            f"that of full training"
        )


def reads_later_tokens(config):
    """Whether a token's hidden state depends on the token after it, as an encoder's does.

    It is found with a small model of the kind: a layer of random weights.
    """
    config = copy.deepcopy(config)
    small = {"num_hidden_layers": 1, "intermediate_size": 64, "vocab_size": 3, "pad_token_id": 0}
    with contextlib.suppress(Exception):  # a kind that cannot be so small; the script looks, too
        for name, value in small.items():
            setattr(config.get_text_config(), name, value)
        model = AutoModel.from_config(config).eval()
        with torch.no_grad():
            outputs = model(torch.tensor([[1, 1], [1, 2]]), use_cache=False)
        hidden = outputs.last_hidden_state  # (2, 2, hidden_size)
        return not torch.allclose(*hidden[:, 0], atol=1e-4)
    return False


def build_classifier(run, flag, path, may_lack_head):
    """A reward or value model, with one label and the policy's vocabulary."""
    config = load_pretrained(AutoConfig, flag, path, revision_of(run, path))
    labels = 1 if may_lack_head else 0
    if "SequenceClassification" in str(config.architectures):
        labels = config.num_labels
    vocab_size = getattr(config.get_text_config(), "vocab_size", 0)  # a ViT has none
    needed = vocab_size
    if run.model is not None:
        needed = run.model.config.get_text_config().vocab_size
    if labels != 1 or vocab_size != needed:
        raise Mistake(
            f"--{flag} {path} needs one label (it has {labels} labels) and the policy's vocabulary "
            f"of {needed} (it has {vocab_size})"
        )
    may_lack = ("score.weight",) if may_lack_head else ()
    model = build_model(run, AutoModelForSequenceClassification, flag, path, may_lack, num_labels=1)
    if not hasattr(model, "score"):
        raise Mistake(f"--{flag} {path}: a {type(model).__name__} has no head named score")
    if reads_later_tokens(config):
        raise Mistake(f"--{flag} {path} attends to later tokens; it must be a causal model")
    return model


def check_trained_reward_model(run):
    """The model that a reward model is to be made from."""
    path = run.args.model_name_or_path
    run.model = build_classifier(run, "model_name_or_path", path, may_lack_head=True)


def check_value_model(run):
    """What the value model starts from."""
    args = run.args
    flags = ("value_model_path", "reward_model_path", "model_name_or_path")
    flag = next(flag for flag in flags if getattr(args, flag) is not None)
    if flag == "model_name_or_path" and run.model is None:
        return  # a mistake has been found in it already
    run.value_model = build_classifier(run, flag, getattr(args, flag), may_lack_head=True)


def check_reward_model(run):
    """The reward model, also one of weight 0, which a value model starts from."""
    if run.args.reward_model_path is not None:
        path = run.args.reward_model_path
        run.reward_model = build_classifier(run, "reward_model_path", path, may_lack_head=False)


def check_tokens(run):
    """Stop tokens, vocabulary and lengths: tokenizer, model and data together."""
    args, tokenizer = run.args, run.tokenizers[0]
    config = run.model.config.get_text_config()
    if len(tokenizer) > config.vocab_size:
        raise Mistake(
            f"the tokenizer has {len(tokenizer)} tokens and the model only {config.vocab_size}; "
            f"see --tokenizer_name_or_path"
        )
    if not run.trains_reward_model():
        known = (args.stop_token, args.stop_token_id, run.model.generation_config.eos_token_id)
        if known == (None, None, None):
            raise Mistake("no stop token is known; give a --stop_token, such as eos")
        try:
            args.stop_token_ids = run.script.find_stop_tokens(args, tokenizer, run.model)
        except (TypeError, ValueError) as error:
            raise Mistake(
                f"{error}; by its generation_config.json the model's own stop token is "
                f"{run.model.generation_config.eos_token_id!r}, its vocabulary {config.vocab_size}"
            ) from error
    if run.train_rows is None:
        return
    if 0 < getattr(args, "micro_batch_tokens", 0) < run.max_length():
        raise Mistake(
            f"--micro_batch_tokens {args.micro_batch_tokens}: the longest prompt with "
            f"--response_length takes {run.max_length()}, and a pass has a whole row at the least"
        )
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and run.max_length() > limit:
        flag = "--max_token_length" if run.trains_reward_model() else "--response_length"
        raise Mistake(
            f"the longest row takes {run.max_length()} positions by {flag}; the model has {limit}"
        )


# ----------------------------------------------------------------------------------------- reward


def serve_calls(connection, compute_score, reward_fn, calls):
    """The main function of a process of its own: tries the reward on (prompt, answer, its tokens).

    It sends (score, what went wrong) for the import, and then for each of the calls.
    """
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):  # what a reward prints would stand among the plan's lines
        os.dup2(nowhere, number)
    faulthandler.disable()  # a crash is told by its exit code
    os.setsid()
    pid, path = os.getpid(), reward_fn and reward_fn.rpartition(":")[0]

    def attempt(function, *arguments, **options):
        try:
            answer = function(*arguments, **options), None
        except BaseException as error:  # sys.exit() raises no Exception
            answer = None, describe(error, path)
        if os.getpid() != pid:  # a child that the reward has forked must not answer
            os._exit(1)
        connection.send(answer)
        return answer[0]

    def load():
        nonlocal function
        function = load_reward_fn(reward_fn) if reward_fn else compute_score

    def score(prompt, answer, num_tokens):
        options = {}
        if reward_fn:
            offered = {"num_tokens": num_tokens, "stopped": True}
            parameters = inspect.signature(function).parameters
            options = {name: offered[name] for name in offered.keys() & parameters}
            options["extra_info"] = prompt.extra_info
        value = function(prompt.data_source, answer, prompt.ground_truth, **options)
        if isinstance(value, dict):
            value = value.get("score", value)
        try:
            is_finite = math.isfinite(value)
        except TypeError:
            is_finite = False
        if not is_finite:
            raise ValueError(f"the reward is {value!r}; it must be finite, or have such a `score`")
        return float(value)

    function = None
    attempt(load)
    if function is not None:
        for call in calls:
            attempt(score, *call)
    os._exit(0)


def load_reward_fn(reward_fn):
    """The function of --reward_fn path/to/file.py:function. ImportError: there is none."""
    path, _, name = reward_fn.rpartition(":")
    if reward_fn.endswith(".py"):  # without a name: the error below lists what there is
        path, name = reward_fn, ""
    if not path.endswith(".py"):
        raise ImportError("it must be path/to/file.py:function")
    if not os.path.isfile(path):
        raise ImportError(f"{path}: No such file")
    stem = Path(path).stem
    if stem in sys.modules or stem in sys.stdlib_module_names or "." in stem:
        raise ImportError(f"{stem} is the name of another module, or none; rename the file")
    sys.path.insert(0, str(Path(path).resolve().parent))
    module = importlib.import_module(stem)
    function = getattr(module, name, None)
    if not callable(function):
        functions = inspect.getmembers(module, inspect.isfunction)
        own = [key for key, function in functions if function.__module__ == stem]
        known = ", ".join(f"{path}:{key}" for key in own) or "there is none"
        raise ImportError(f"name one of its functions: {known}")
    return function


def try_reward(run, calls):
    """The scores of calls, as in serve_calls. Mistake: one of them fails, hangs or crashes."""
    args = run.args
    name = f"--reward_fn {args.reward_fn}" if args.reward_fn else "compute_score"
    context = mp.get_context("fork")  # it has the script, and what that has imported
    ours, theirs = context.Pipe()
    job = (theirs, run.script.compute_score, args.reward_fn, calls)
    process = context.Process(target=serve_calls, args=job)
    process.start()
    theirs.close()

    def receive(seconds):
        try:
            if not ours.poll(seconds):
                return None, f"TimeoutError: no answer in {seconds:g} seconds"
            return ours.recv()
        except EOFError:
            process.join()
            return None, f"its process has ended, with exit code {process.exitcode}"

    try:
        _, failure = receive(IMPORT_TIMEOUT)
        if failure is not None:
            raise Mistake(f"{name}: {failure}")
        scores = []
        for prompt, answer, _ in calls:
            score, failure = receive(min(args.reward_timeout, IMPORT_TIMEOUT))
            if failure is not None:
                answer = answer if len(answer) < 60 else answer[:60] + "..."
                raise Mistake(
                    f"{prompt.row}: {name} fails on the answer {answer!r}, but a model may answer "
                    f"anything: {failure}"
                )
            scores.append(score)
        return scores
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()
        ours.close()


def is_answer(prompt):
    """Whether a ground truth may be an answer; JSON is a rule: constraints, or test cases."""
    truth = prompt.ground_truth
    try:
        truth = json.loads(truth) if isinstance(truth, str) else truth
    except json.JSONDecodeError:
        return True
    return not isinstance(truth, dict | list)


def check_reward(run):
    """Tries the reward on a right, a wrong and an empty answer, one row of each data source.

    Right is the ground truth, as it stands or as \\boxed{...}; wrong is that of another row.
    """
    prompts = [p for p in run.train_rows + (run.eval_rows or []) if p.ground_truth is not None]
    of_source = {}
    for prompt in prompts:
        of_source.setdefault(prompt.data_source, []).append(prompt)
    kinds, calls = [], []
    for source, rows in of_source.items():
        truth = str(rows[0].ground_truth)
        others = (str(row.ground_truth) for row in rows)
        wrong = next((text for text in others if text not in (truth, "")), "I do not know.")
        answers = {truth: "right", f"\\boxed{{{truth}}}": "right", wrong: "wrong", "": "empty"}
        for answer, kind in answers.items():
            kinds.append((source, kind))
            token_ids = run.tokenizers[0](answer)["input_ids"]
            calls.append((rows[0], answer, len(token_ids) + 1))  # with a stop token
    if not calls and not run.args.reward_fn:
        return
    scores = {}
    for kind, score in zip(kinds, try_reward(run, calls), strict=True):
        scores[kind] = max(score, scores.get(kind, -math.inf))
    run.answers = {source: {} for source, rows in of_source.items() if is_answer(rows[0])}
    for (source, kind), score in scores.items():
        if source in run.answers:
            run.answers[source][kind] = score
    for source, by_kind in run.answers.items():
        if by_kind["right"] <= max(by_kind["wrong"], by_kind["empty"]):
            run.notes.append(
                f"{source}: the ground truth as an answer scores no more than a wrong or an empty "
                f"answer; is a right answer of another form?"
            )


# ------------------------------------------------------------------ folder, checkpoint, disk, hub


def check_run_folder(run):
    """Refuses a run folder with another run, or which cannot be written."""
    args = run.args
    if args.resume_from_checkpoint == "latest" and not run.has_run_name:
        raise Mistake("--resume_from_checkpoint latest: of which run? Give its --run_name")
    if args.run_name is None:
        args.run_name = f"{args.exp_name}__{args.seed}__{time.strftime('%Y%m%d_%H%M%S')}"
    run_dir = Path(args.output_dir, args.run_name).absolute()
    if args.resume_from_checkpoint is not None:
        run_dir = find_checkpoint(run, run_dir)
    try:
        if (run_dir / "metrics.jsonl").exists() and args.resume_from_checkpoint is None:
            advice = ""
            if run.script.list_checkpoints(run_dir):
                advice = ", or go on with --resume_from_checkpoint latest"
            raise Mistake(
                f"{run_dir} holds another run; choose another --run_name or --output_dir{advice}"
            )
        str(run_dir).encode()  # the libraries that write the model need a name in UTF-8
        if run_dir.is_symlink() and not run_dir.exists():
            raise OSError("a link that leads nowhere")
        existing = next(p for p in (run_dir, *run_dir.parents) if os.path.lexists(p))
        # The same folders are made and removed in one of their own
        with tempfile.TemporaryDirectory(prefix=".probe-", dir=existing) as folder:
            probe = Path(folder, run_dir.relative_to(existing))
            probe.mkdir(parents=True, exist_ok=True)
            (probe / "metrics.jsonl").write_text("a probe")
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise Mistake(
            f"--output_dir {args.output_dir}: {run_dir} cannot be written to ({reason})"
        ) from error
    run.run_dir = run_dir


def find_checkpoint(run, run_dir):
    """Finds the checkpoint to resume. Returns the folder of its run."""
    args, script = run.args, run.script
    given = f"--resume_from_checkpoint {args.resume_from_checkpoint}"
    if args.resume_from_checkpoint == "latest":
        checkpoints = script.list_checkpoints(run_dir)
        if not checkpoints:
            raise Mistake(
                f"{given}: {run_dir} has no checkpoint; is it the right --run_name? To begin a run "
                f"leave the flag out"
            )
        run.checkpoint_dir = checkpoints[-1]
        return run_dir
    path = Path(args.resume_from_checkpoint).absolute()
    is_named = re.fullmatch(r"step_\d+", path.name) and path.parent.name == "checkpoints"
    if not is_named or not path.is_dir():
        advice = "it must be a folder such as output/RUN_NAME/checkpoints/step_100"
        with contextlib.suppress(ValueError):  # names of another form
            checkpoints = script.list_checkpoints(path)
            if checkpoints:
                advice = f"its newest is {checkpoints[-1]}"
        raise Mistake(f"{given}: this is no checkpoint; {advice}")
    run.checkpoint_dir = path
    return path.parents[1]


# Under others the steps until the checkpoint would have been others. The scripts refuse them, too
MUST_AGREE = ["seed", "beta", "episodes_per_step", "number_samples_per_prompt", "mini_batch_size"]
MUST_AGREE += ["num_epochs", "num_updates", "data_hash"]
# Where it runs, and what follows from the rest
MAY_DIFFER = {"exp_name", "run_name", "output_dir", "resume_from_checkpoint", "world_size"}
MAY_DIFFER |= {"local_world_size", "rollout_batch_size", "reward_workers"}
# What the users themselves may have changed, where something of the above does not agree
CAUSES = {"total_episodes", "local_rollout_batch_size", "local_mini_batch_size", "dataset"}
CAUSES |= {"eval_dataset", "eval_prompts", "num_train_epochs"}
# Where the model goes on the hub, and what programs add to args.json
MAY_DIFFER |= {"push_to_hub", "hf_entity", "hf_repo_id", "hf_repo_revision"}
ADDED = {"provenance", "hf_repo_url"}


def hash_data(run):
    """The hash that the script takes of its data."""
    if run.trains_reward_model():
        return hashlib.sha256(repr(run.train_rows).encode()).hexdigest()
    stable_hash = run.script.stable_hash
    prompts = run.train_rows + run.eval_rows
    return stable_hash([stable_hash(replace(prompt, row="")) for prompt in prompts])


def check_checkpoint(run):
    """Refuses a checkpoint with damaged files, or of another run."""
    path, script = run.checkpoint_dir, run.script
    given = f"--resume_from_checkpoint {path}"
    try:
        for file in path.glob("*.safetensors"):
            with safe_open(file, "pt"):
                pass
        for file in path.glob("*/"):  # what torch has saved
            for part in FileSystemReader(file).read_metadata().storage_data.values():
                if os.path.getsize(file / part.relative_path) < part.offset + part.length:
                    raise ValueError(f"{part.relative_path} is cut off")
        for file in path.glob("*.bin"):
            zipfile.ZipFile(file).close()
        for file in path.glob("*.json"):
            json.loads(file.read_text())
        for file in path.glob("*.jsonl"):
            for line in file.read_text().splitlines():
                json.loads(line)
        file = path / "state.json"
        state = json.loads(file.read_text())
        file = path.parents[1] / "args.json"
        saved = json.loads(file.read_text())
        if not isinstance(state, dict) or not isinstance(saved, dict):
            raise ValueError("state.json and args.json must be objects")
    except Exception as error:
        raise Mistake(
            f"{given}: {file.name} is damaged or missing; resume an older one ({error})"
        ) from error
    needed, expected, must_agree = ["seconds", "wandb_id"], ["policy"], [*MUST_AGREE]
    if run.trains_reward_model():
        expected = ["model.safetensors", "optimizer.bin"]
    else:  # a checkpoint of adapters has not the weights that they adapt
        must_agree += ["model_name_or_path", "lora_rank", "lora_alpha"]
    if hasattr(run.args, "value_learning_rate"):
        needed.append("beta")
        expected.append("value_model")
        must_agree += ["value_model_path", "reward_model_path"]
    if hasattr(script, "load_rollout"):
        needed.append("policy_version")
        must_agree += ["num_evals", "eval_temperature"]  # it may have an evaluation
        expected += ["next_rollout.json", "next_rollout.safetensors"]
    run.args.data_hash = saved.get("data_hash")
    if run.train_rows is not None and run.eval_rows is not None:
        run.args.data_hash = hash_data(run)
    current = json.loads(json.dumps(asdict(run.args)))  # by way of JSON a tuple is a list
    known = ADDED | current.keys()
    differing = [f"{name} too many in args.json" for name in saved if name not in known]
    names = [name for name in must_agree if name in current and name not in saved]
    differing += [f"{name} missing in args.json" for name in names]
    differing += [f"{name} missing in state.json" for name in needed if name not in state]
    if differing:
        raise Mistake(f"{given} was written by another script: {', '.join(differing)}")
    missing = [name for name in expected if not (path / name).exists()]
    if missing:
        raise Mistake(f"{given} lacks {', '.join(missing)}; resume an older one")
    run.changed = {
        option.name: (saved[option.name], current[option.name])
        for option in fields(run.args)
        if option.name in saved and saved[option.name] != current[option.name]
        # What the script fills in follows from other arguments, but for what must agree
        if get_origin(option.type) is not Annotated or option.name in must_agree
        if option.name not in MAY_DIFFER
    }
    if any(name in run.changed for name in must_agree):
        differences = [
            f"{name} was {was} and is {now}"
            for name, (was, now) in run.changed.items()
            if name != "data_hash" and (name in must_agree or name in CAUSES)
        ]
        if "data_hash" in run.changed:
            differences.append("--dataset or --eval_dataset has other rows")
        raise Mistake(f"{given} is of a run with other arguments: {'; '.join(differences)}")
    step = script.step_of(path)
    steps = getattr(run.args, "num_training_steps", run.args.num_updates)
    if step >= steps:
        raise Mistake(
            f"{given}: its {step} steps are done, and this run has only {steps}: it is at its end"
        )


def check_disk(run):
    """Refuses a disk that has no room for checkpoints, the final model, and a little besides."""
    args, disk = run.args, run.options.disk
    existing = next(path for path in (run.run_dir, *run.run_dir.parents) if path.exists())
    free = shutil.disk_usage(existing).free if disk is None else int(disk * 1e9)
    if run.checkpoint_dir is not None:  # its run has some of them already
        free += sum(file.stat().st_size for file in run.run_dir.glob("checkpoints/**/*"))
    number, size = plan.checkpoints_on_disk(run)
    checkpoints = number * size
    needed = checkpoints + plan.final_model(run) + 2**25
    if free >= needed:
        return
    problem = (
        f"--output_dir {args.output_dir}: {free >> 20} MiB free, {needed >> 20} are needed, "
        f"{checkpoints >> 20} of them for checkpoints; see --keep_last_n"
    )
    if disk is None and run.options.has_gpus() and torch.cuda.device_count() == 0:
        run.notes.append(f"{problem}; of another machine say --disk, in GB, before the script")
    else:
        raise Mistake(problem)


def check_accounts(run):
    """Refuses tracking by somebody who is not logged in, and an upload that would be refused."""
    if run.args.with_tracking and os.environ.get("WANDB_MODE") not in ("offline", "disabled"):
        server = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
        if not os.environ.get("WANDB_API_KEY") and not get_netrc_auth(server):
            raise Mistake("--with_tracking: run `wandb login`, or set WANDB_MODE=offline")
    if getattr(run.args, "push_to_hub", False):
        check_hub(run)


def check_hub(run):
    """Refuses names that the hub does not know as such, and a login that may not write there."""
    args, program = run.args, Path(run.script.__file__).parent / "scripts/push_to_hub.py"
    if not program.is_file():
        raise Mistake(f"--push_to_hub: there is no {program}, which uploads")
    repo, branch = repo_of(vars(args), args.hf_entity), args.hf_repo_revision or args.run_name
    try:
        huggingface_hub.utils.validate_repo_id(repo)
    except ValueError as error:
        raise Mistake(f"--hf_entity, --hf_repo_id: {error}") from error
    if branch and (not re.fullmatch(r"\w[\w.+=/-]*", branch) or ".." in branch):
        raise Mistake(
            f"--push_to_hub: {branch!r} can be no branch of a repo; choose another --run_name, or "
            "give --hf_repo_revision"
        )
    if huggingface_hub.get_token() is None:
        raise Mistake("--push_to_hub: run `hf auth login`, or set HF_TOKEN")
    if not hub_answers():
        raise Mistake(
            "--push_to_hub: the hub does not answer; train without it, and call "
            "scripts/push_to_hub.py later"
        )
    try:
        login = huggingface_hub.whoami()
    except huggingface_hub.errors.HfHubHTTPError as error:
        reason = " ".join(str(error).split())
        raise Mistake(f"--push_to_hub: run `hf auth login`, or set HF_TOKEN; {reason}") from error
    owners = [login["name"], *(team["name"] for team in login.get("orgs", []))]
    if "/" in repo and repo.split("/")[0] not in owners:
        raise Mistake(
            f"--push_to_hub: {repo} is somebody else's; this login may write to repos of "
            f"{' and '.join(owners)}"
        )
    if login.get("auth", {}).get("accessToken", {}).get("role") == "read":
        raise Mistake("--push_to_hub: this token may only read; make one that may write")


# ----------------------------------------------------------------------------------------- memory


def in_words(count):
    """A number of bytes, as MiB or GiB."""
    return f"{count / GIB:.1f} GiB" if count >= GIB / 10 else f"{count / 2**20:.1f} MiB"


def check_memory(run):
    """Refuses a run that needs more memory than its GPUs have."""
    if run.options.gpu_memory is None and torch.cuda.device_count() > 0:
        run.options.gpu_memory = torch.cuda.get_device_properties(0).total_memory / GIB
    if run.options.gpu_memory is None:
        return
    if plan.fits(run):
        return
    parts = {"a learner": (plan.learner_needs(run), plan.learner_room(run))}
    if not run.trains_reward_model():
        name = f"vLLM, by --vllm_gpu_memory_utilization {run.args.vllm_gpu_memory_utilization:g},"
        parts[name] = (plan.engine_needs(run), plan.engine_room(run))
    problem = "; ".join(
        f"{name} needs about {in_words(needed)} of its GPU, and has {in_words(room)}"
        for name, (needed, room) in parts.items()
        if needed > room
    )
    helps = [in_flags(*found) for found in plan.what_fits(run)[:4]]
    if helps:
        raise Mistake(f"memory: {problem}; this fits: {'; '.join(helps)}")
    smaller = plan.smaller_model(run)
    advice = "it takes a smaller model"
    if smaller is not None:
        name, *found = smaller
        advice = f"the largest of its family that does is {name}, with {in_flags(*found)}"
    some = f"{plan.SOME_RESPONSES} responses at once"
    raise Mistake(f"memory: {problem}; no flags make room for it and {some}; {advice}")


def in_flags(flags, run):
    """What is typed, and what a learner then needs and has."""
    words = [f"--{name}" if value is True else f"--{name} {value}" for name, value in flags.items()]
    needed, room = map(in_words, (plan.learner_needs(run), plan.learner_room(run)))
    return f"{' '.join(words) or 'these flags'}: {needed} of {room}"


# ------------------------------------------------------------------------------------------- plan


def plan_of_data(run):
    """Lines on data, steps and updates."""
    args = run.args
    kind = "pairs" if run.trains_reward_model() else "prompts"
    yield "model", f"{args.model_name_or_path}"
    if run.train_rows is not None:
        yield "data", f"{args.dataset}: {len(run.train_rows):,} {kind} to train on"
    if run.eval_rows:
        yield "", f"{args.eval_dataset}: {len(run.eval_rows):,} {kind} to evaluate on"
    if run.train_rows is not None and not run.trains_reward_model():
        text = run.tokenizers[0].decode(run.train_rows[0].token_ids)
        shown = repr(text) if len(text) <= 120 else f"{text[:50]!r} ... {text[-70:]!r}"
        yield "", f"the first prompt, as the model reads it: {shown}"
    if not run.is_filled_in:
        return
    if run.trains_reward_model():
        yield "updates", f"{args.num_updates:,} of {args.mini_batch_size} pairs"
        return
    batch = f"{args.rollout_batch_size:,} prompts x {args.number_samples_per_prompt}"
    yield "steps", f"{args.num_training_steps:,} of {batch} responses"
    if run.train_rows is not None:
        longest = run.max_length() - args.response_length
        yield (
            "",
            f"prompts of up to {longest:,} tokens, responses of up to {args.response_length:,}",
        )
    if run.eval_rows:
        yield "", f"evaluations: {len(args.eval_steps)}, and one after the last step"
    updates = args.num_updates // args.num_training_steps
    yield "updates", f"{updates} a step, {args.num_updates:,} in all, {args.mini_batch_size} each"
    if run.options.num_processes > 1:
        ranks = run.options.num_processes
        yield (
            "",
            f"sizes are per rank: one rank has {ranks} times the steps, each {ranks} times smaller",
        )


def plan_of_processes(run):
    """Lines on learners and engines."""
    args, options = run.args, run.options
    yield "learners", f"{options.num_processes}"
    if options.num_processes > 1 and not options.has_gpus():
        local = options.local_processes()
        yield "", f"no GPUs: ACCELERATE_USE_CPU=true torchrun --nproc_per_node {local} SCRIPT ..."
    if run.trains_reward_model() or not run.is_filled_in:
        return
    place = "on each learner's GPU" if options.has_gpus() else "for each learner, on the CPU"
    engines = options.num_processes
    if args.vllm_gpus:
        gpus = len(args.vllm_gpus) * options.num_machines
        engines = gpus // args.vllm_tensor_parallel_size
        place = f"on GPUs {', '.join(map(str, args.vllm_gpus))} of each machine"
    yield "engines", f"{engines} of vLLM, {place}"


def room_for_responses(run):
    """In words: how many responses vLLM samples at once on a shared GPU, and what would help."""
    count, share = plan.responses_at_once(run), plan.propose_share(run)
    words = (
        f"which has room for {count:,} of a step's {plan.local_episodes(run):,} responses at once, "
        f"if all are of {run.max_length():,} tokens with their prompts"
    )
    if count >= min(plan.local_episodes(run), FEW_RESPONSES):
        return words
    other = with_changes(run, {"vllm_gpu_memory_utilization": share})
    if share <= run.args.vllm_gpu_memory_utilization or not plan.fits(other):
        return f"{words}: few, but the learner needs the rest; see --vllm_gpus"
    return f"{words}: few; with {share:g} there is room for {plan.responses_at_once(other):,}"


def plan_of_memory(run):
    """Lines on memory, by part and in sum, and on the disk."""
    args, room = run.args, plan.learner_room(run)
    largest, parts = plan.learner_memory(run)
    limit = "" if room is None else f", of the {in_words(room)} that it may take of its GPU"
    yield "memory", f"of a learner: about {in_words(plan.learner_needs(run))}{limit}"
    yield "", f"at the most, in {largest}:"
    for name, size in parts.items():
        yield "", f"{in_words(size):>10}  {name}"
    is_on = args.gradient_checkpointing
    other = in_words(plan.learner_needs(with_changes(run, {"gradient_checkpointing": not is_on})))
    yield "", f"with --{'no-' * is_on}gradient_checkpointing: {other} in all"
    if run.options.local_processes() > 1:
        whole = plan.host_memory(run)
        yield "", f"of a machine, not of GPUs: {in_words(whole)}, while learners load whole models"
    if not run.trains_reward_model():
        least = plan.engine_needs(run) if run.options.has_gpus() else plan.engine_memory(run)
        share = f"{args.vllm_gpu_memory_utilization:g} (--vllm_gpu_memory_utilization)"
        yield "", f"of vLLM: at least {in_words(least)}; of GPUs {share}"
        if run.shares_gpus() and run.options.gpu_memory:
            yield "", room_for_responses(run)
    number, size = plan.checkpoints_on_disk(run)
    model = in_words(plan.final_model(run))
    yield "disk", f"{in_words(number * size)} for {number} checkpoints, {model} for the final model"
    if args.save_freq == 0:
        yield "", "no checkpoints: a run that ends early has to begin again (--save_freq)"


def plan_of_reward(run):
    """Lines on the parts of a score."""
    args, rewards = run.args, []
    if args.apply_verifiable_reward:
        rewards.append(f"{args.verification_reward:g} x {args.reward_fn or 'compute_score'}")
    if run.script.uses_reward_model(args):
        rewards.append(f"{args.reward_model_multiplier:g} x the reward model's score")
    if args.add_r1_style_format_reward:
        rewards.append(f"{args.r1_style_format_reward:g} for <think> and <answer>")
    yield "reward", " + ".join(rewards)
    if args.non_stop_penalty:
        yield "", f"or {args.penalty_reward_value:g} without a stop token"
    for source, scores in (run.answers or {}).items():
        others = f"a wrong answer {scores['wrong']:g}, an empty one {scores['empty']:g}"
        yield "", f"the ground truth of a row of {source} scores {scores['right']:g}, {others}"


def plan_of_checkpoint(run):
    """Lines on what is resumed."""
    yield "resumes", str(run.checkpoint_dir)
    step = run.script.step_of
    run_dir = run.checkpoint_dir.parents[1]
    checkpoints = run.script.list_checkpoints(run_dir)
    newer = [path.name for path in checkpoints if step(path) > step(run.checkpoint_dir)]
    if newer:
        yield "", f"and removes what is newer: {', '.join(newer)}"
    if (run_dir / "model").exists():
        yield "", "the run was at its end; its last steps and model/ are made again"
    for name, (was, now) in (run.changed or {}).items():
        yield "", f"{name} was {was} and is {now}"


def print_plan(run):
    """Prints what the run will do, as far as it is known."""
    parts = [plan_of_data, plan_of_processes]
    if run.knows_sizes():
        parts.append(plan_of_memory)
    if not run.trains_reward_model():
        parts.append(plan_of_reward)
    if run.checkpoint_dir is not None:
        parts.append(plan_of_checkpoint)
    print(f"Plan of {run.script.__name__}.py")
    for part in parts:
        try:
            lines = list(part(run))
        except Exception as error:  # of a fork, as in check
            name = part.__name__.replace("_", " ")
            lines = [("note", f"{lacks(run, error) or describe(error)}, so there is no {name}")]
        for name, text in lines:
            print(f"  {name:<9}{printable(text)}")
    for note in run.notes:
        print(f"  note     {printable(note)}")


# ------------------------------------------------------------------------------------------- main


def one_line(mistake):
    """A mistake in one line that a terminal shows."""
    message = " ".join(str(mistake).split())
    if re.search(r"(^|\s)debug_assets/", message) and not os.path.exists("debug_assets"):
        message += "; scripts/make_debug_assets.py makes debug_assets"
    line = re.sub(r"(\S{80})\S{20,}(\S{20})", r"\1...\2", printable(message))  # very long names
    if len(line) > 450:
        line = f"{line[:330]} ... {line[-115:]}"
    return f"preflight: error: {line}"


def check(run):
    """All parts; returns the mistakes, the first of each part."""
    mistakes = []

    def attempt(part, *needed):
        """Runs a part, unless another has not found what it needs."""
        if any(need is None or need is False for need in needed):
            return
        try:
            part(run)
        except (Mistake, ValueError) as error:  # the latter from the script
            mistakes.append(error)
        except Exception as error:  # of a fork, whose functions may take other arguments, say
            name = part.__name__.replace("_", " ")
            mistakes.append(f"{lacks(run, error) or describe(error)}, so preflight cannot {name}")

    is_trainer = run.trains_reward_model()
    attempt(check_launcher)
    attempt(check_arguments)
    attempt(check_shared_gpus)
    attempt(check_tokenizers)
    attempt(check_data, run.tokenizers)
    attempt(check_eval_data, run.tokenizers)
    if is_trainer:
        attempt(check_updates, run.has_good_numbers, run.train_rows)
        attempt(check_trained_reward_model)
    else:
        attempt(check_policy)
        attempt(check_adapters, run.has_good_numbers, run.model)
        if hasattr(run.args, "value_learning_rate"):
            attempt(check_value_model)
        attempt(check_reward_model)
        attempt(check_reward, run.train_rows)
    attempt(check_tokens, run.tokenizers, run.model)
    attempt(check_run_folder)
    attempt(check_checkpoint, run.is_filled_in, run.checkpoint_dir)
    attempt(check_disk, run.run_dir, run.knows_sizes())
    attempt(check_accounts)
    attempt(check_memory, run.knows_sizes())
    return mistakes


def main(words):
    """Checks and prints; returns the exit status."""
    sys.stdout.reconfigure(errors="backslashreplace")  # a terminal may know ASCII alone
    sys.stderr.reconfigure(errors="backslashreplace")
    torch.set_num_threads(1)  # a process that is forked beside more may hang
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    own = [index for index, word in enumerate(words) if word.endswith(".py")]
    split = own[0] if own else len(words)
    try:
        options, unknown = tyro.cli(
            Options,
            args=words[:split],
            description=__doc__,
            return_unknown_args=True,
            use_underscores=True,
        )
        if unknown or not own:
            found = f"{unknown[0]} is neither an option nor a script of Python; " if unknown else ""
            raise Mistake(f"{found}it is preflight.py [OPTIONS] script.py FLAGS..., see --help")
        script = load_script(words[split])
        args, mistake = parse_flags(script, words[split + 1 :])
        read_config_file(options)
    except Mistake as error:
        print(one_line(error), file=sys.stderr)
        return 2
    if options.num_gpus is None:
        options.num_gpus = torch.cuda.device_count()
    run = Run(script, options, args, has_run_name=args.run_name is not None)
    mistakes = check(run)
    if mistake is not None:
        mistakes.insert(0, mistake)
    if hub_answers.cache_info().misses > 0 and not hub_answers():
        run.notes.append("the hub does not answer; what is in the cache of it is used")
    print_plan(run)
    sys.stdout.flush()
    for line in dict.fromkeys(map(one_line, mistakes)):
        print(line, file=sys.stderr)
    return 2 if mistakes else 0


if __name__ == "__main__":
    sys.dont_write_bytecode = True  # beside the script, or the file of a reward
    sys.exit(main(sys.argv[1:]))
