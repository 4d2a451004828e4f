r"""Checks a run before it is launched, and prints its plan; also on a laptop without the GPUs.

    python scripts/preflight.py --config_file scripts/accelerate/one_gpu.yaml SCRIPT FLAGS...
    python scripts/preflight.py --config_file scripts/accelerate/ddp.yaml [--num_processes 6] \
        [--num_gpus 8] [--gpu_memory 80] SCRIPT FLAGS...

SCRIPT is ppo_sync.py, ppo_vllm_async.py, grpo_vllm_async.py, scripts/train_reward_model.py, or a
fork of one; FLAGS are those that it is to be launched with, as --config_file and --num_processes
are those for accelerate launch. It is loaded as a module. Where it has a function that refuses
something, that one is called and quoted, so a fork is checked as it is. A reward is tried in a
process such as the run's: on all rows where it is the script's own rule, else on the first row of
each data source and on some others.

The checks are in parts: arguments, tokenizer, data, models, reward, the output folder and the
checkpoint in it, disk, accounts, memory. Each part tells its first mistake in one line, and the
others go on. Then the exit status is 2. The plan comes before the mistakes. Where there are none,
the command comes last that launches the run. Nothing is left on the disk but what comes from the
hub, in its cache.

Where this machine lacks the GPUs that are named, the run is planned for another machine. Then a
model here may be without its weights, and neither disk nor --output_dir are looked at.

Memory is an estimate from the sizes of the models, by plan.py, which finds what fits, too. It was
compared with what models of the shape of Qwen2 take on CPUs, one rank, two by DDP and two by FSDP2;
the kernels of GPUs are others. What PyTorch's allocator holds and does not use is not in it.
"""

import ast
import contextlib
import copy
import difflib
import importlib.util
import inspect
import io
import json
import math
import os
import queue
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import datasets
import huggingface_hub
import odd_data
import paths
import plan
import torch
import transformers
import tyro
import yaml
from accelerate.commands.config import config_args
from plan import GIB, in_words
from preprocessing import hub_answers, printable
from provenance import repo_of
from requests.utils import get_netrc_auth
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
)

# A reward of the user's is tried on so many data sources and as many other rows, and on no further
# row after so many seconds
FEW_ROWS, SECONDS_OF_TRIALS = 20, 20
# With more data sources one line is about all
FEW_SOURCES = 10


@dataclass
class Options:
    """Where the run is to be launched."""

    config_file: str | None = None
    """as for accelerate launch; None: the default file that accelerate config wrote, if any"""
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

    def is_elsewhere(self):
        """Whether the run is for another machine: this one lacks the GPUs that are named."""
        here = torch.cuda.device_count()
        return self.num_gpus > here or (self.has_gpus() and not here)


@dataclass
class Run:
    """What is known of a run. The parts fill it in; None: unknown, or not used."""

    script: ModuleType
    options: Options
    args: Any  # as they were given, then as the script fills them in: num_updates is 0 until then
    tokenizer: Any = None
    raw_rows: list = field(default_factory=list)  # the dictionaries that the next are made of
    train_rows: list | None = None  # the script's Prompts, or its Pairs
    eval_rows: list = field(default_factory=list)  # those that are evaluated
    of_data: list = field(default_factory=list)  # what the script says of both
    model: Any = None  # without its weights, like the next two
    value_model: Any = None
    reward_model: Any = None
    has_models: bool = False  # all of them
    # Of each data source: scores of a right, a wrong and an empty answer to its first row
    answers: dict = field(default_factory=dict)
    longest_call: float = 0  # seconds of a call of the reward
    read: dict = field(default_factory=dict)  # of texts that are graded: their tokens, what is read
    run_dir: Path | None = None
    checkpoint_dir: Path | None = None
    changed: dict = field(default_factory=dict)  # arguments since the checkpoint: (was, is)
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
        rows = self.train_rows + self.eval_rows
        if self.trains_reward_model():
            return max(pair.length for pair in rows)
        return max(len(prompt.token_ids) for prompt in rows) + self.args.response_length

    def knows_sizes(self):
        """Whether no part that memory depends on has found a mistake."""
        return self.args.num_updates > 0 and self.train_rows is not None and self.has_models


class Mistake(Exception):
    """What is wrong, where, and what to do."""


def describe(error):
    """An exception in words."""
    if type(error) in (Mistake, ValueError, NotImplementedError):  # which say all themselves
        return str(error)
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def is_local(path):
    """Whether a model or a dataset is on this machine, and not on the hub."""
    return os.path.exists(path)


@contextlib.contextmanager
def loading(flag, path):
    """What goes wrong inside is about the model or tokenizer of this flag."""
    try:
        yield
    except Exception as error:
        text = paths.trouble_with_model(path) or describe(error)
        if paths.may_be_on_the_hub(path) and not isinstance(error, Mistake):
            text = f"no such folder, and no model of the hub that you may read ({text})"
        raise Mistake(f"--{flag} {path}: {text}") from error


# --------------------------------------------------------------------------- script and arguments


def forget_neighbours():
    """Of this file: a script, or a reward, imports its own, which may have the same names."""
    for name in ("odd_data", "paths", "plan", "preprocessing", "provenance"):
        del sys.modules[name]
    del sys.path[0]  # the folder of this file


def load_script(path):
    """The script as a module, whatever its name is.

    It gets the name that it has in processes that a run starts; see as_main.
    """
    sys.path.insert(0, str(Path(path).resolve().parent))
    try:
        spec = importlib.util.spec_from_file_location("__mp_main__", os.path.abspath(path))
        script = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(script)
        script.Args()
    except (Exception, SystemExit) as error:
        raise Mistake(f"{path} is no script, nor a fork of one ({describe(error)})") from error
    script.__name__, script.__spec__ = Path(path).stem, None  # as of a file that is run
    return script


@contextlib.contextmanager
def as_main(script):
    """Inside, processes that are started load the script, as in a run, and not this program."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = script
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def parse_flags(script, words):
    """The script's arguments as they are given, and what is wrong with the flags, if anything."""
    args, unknown = tyro.cli(
        script.Args,
        prog=f"{script.__name__}.py",
        args=words,
        return_unknown_args=True,
        use_underscores=True,
    )
    if not unknown:
        return args, None
    if not unknown[0].startswith("-"):
        place = next(i for i, word in enumerate(words) if word.endswith(unknown[0]))
        before = [word for word in words[: place + 1] if word.startswith("--")]
        flag = before[-1].partition("=")[0] if before else "the script"
        value, advice = unknown[0], "takes one value; give a folder of several files"
        if value.lower() in ("true", "false"):
            name = flag.lstrip("-").removeprefix("no-")
            advice = f"takes no value: it is --{name} or --no-{name}"
        return args, Mistake(f"{value!r} behind {flag} is no flag: {flag} {advice}")
    flag = unknown[0].lstrip("-").partition("=")[0].replace("-", "_")
    advice = "--help lists all"
    for similar in difflib.get_close_matches(flag, vars(args), n=1):
        advice = f"did you mean --{similar}?"
    if hasattr(Options, flag):
        advice = "it is an option of preflight.py, and goes before the script"
    return args, Mistake(f"unknown flag {unknown[0]}; {advice}")


def read_config_file(options):
    """Fills in the numbers and variables that accelerate's launcher gives to a run.

    As the launcher does, it takes accelerate's default file where it is told of no other.
    """
    if options.config_file is None and os.path.isfile(config_args.default_config_file):
        options.config_file = config_args.default_config_file
    path, config = options.config_file, {}
    try:
        if path:
            config = yaml.safe_load(Path(path).expanduser().read_text("utf-8"))
            fsdp = {"fsdp_cpu_ram_efficient_loading": True} | (config.get("fsdp_config") or {})
            options.variables |= {name.upper(): value for name, value in fsdp.items()}
            options.variables[f"ACCELERATE_USE_{config['distributed_type']}".upper()] = True
            if options.is_set("ACCELERATE_USE_NO"):
                config["num_processes"] = 1  # whatever is in the file
        options.num_processes = options.num_processes or int(config.get("num_processes", 1))
        options.num_machines = options.num_machines or int(config.get("num_machines", 1))
    except Exception as error:
        raise Mistake(f"--config_file {path}: not of accelerate ({describe(error)})") from error


def check_sharding(run):
    """Refuses launches that start what the script does not know, or fewer ranks than are asked."""
    path = run.options.config_file
    if run.options.is_set("ACCELERATE_USE_NO") and run.options.num_processes > 1:
        raise Mistake(
            f"--num_processes {run.options.num_processes}: {path} starts one, so launch with "
            f"--config_file scripts/accelerate/ddp.yaml"
        )
    variables, is_trainer = run.options.variables, run.trains_reward_model()
    is_known = str(variables.get("FSDP_VERSION")) == "2" and not is_trainer
    if run.options.is_set("FSDP_CPU_RAM_EFFICIENT_LOADING"):
        is_known = False
    is_sharded = run.options.is_set("ACCELERATE_USE_FSDP")
    others = ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_MEGATRON_LM", "ACCELERATE_USE_XLA")
    if any(map(run.options.is_set, others)) or (is_sharded and not is_known):
        raise Mistake(
            f"accelerate launch reads {path or 'the environment'}: launch with --config_file "
            f"scripts/accelerate/one_gpu.yaml, or as "
            f"scripts/accelerate/{'ddp' if is_trainer else 'fsdp2'}.yaml does: without DeepSpeed, "
            f"a reward model without FSDP, all else by fsdp_version 2 and with "
            f"fsdp_cpu_ram_efficient_loading false"
        )


# From where to where a number may be. Other integers begin at 1 where their default is not 0, and
# their help does not say what 0 is
RANGES = {
    "penalty_reward_value": (-1e9, 1e9),
    "mismatch_mask_range": (1, math.inf),
    "temperature": (0.01, 2),  # vLLM's own limits
    **dict.fromkeys(["seed", "num_evals"], (0, 1e9)),
    **dict.fromkeys(["learning_rate", "value_learning_rate"], (0, 1)),
    "vllm_gpu_memory_utilization": (0.01, 1),
}


# Flags that do nothing without another
NEED_ANOTHER = {
    "mismatch_mask_range": "mismatch_mask",
    "kl_estimator": "beta",
    "penalty_reward_value": "non_stop_penalty",
    "r1_style_format_reward": "add_r1_style_format_reward",
}


def check_numbers(run):
    """Refuses numbers out of range. Notes flags that do nothing."""
    help_of_args = inspect.getsource(type(run.args))
    for option in fields(run.args):
        name, value = option.name, getattr(run.args, option.name)
        needed = NEED_ANOTHER.get(name, "")
        if value != option.default and getattr(run.args, needed, True) in (None, 0, "none"):
            run.notes.append(f"--{name} does nothing without --{needed}")
        if type(value) in (int, float):  # and not a bool, which isinstance would take for an int
            is_size = type(value) is int and option.default not in (0, None)
            may_be_0 = re.search(rf'\n    {name}: .*\n    """.*\b0: ', help_of_args)
            least, most = RANGES.get(name, (int(is_size and not may_be_0), 1e9))
            if not least <= value <= most:
                raise Mistake(f"--{name} is {value}; it must be from {least:g} to {most:g}")


def check_gpus(run):
    """Refuses GPUs that a machine does not have."""
    num_gpus, learners = run.options.num_gpus, run.options.local_processes()
    gpus = getattr(run.args, "vllm_gpus", ())
    if (num_gpus or gpus) and max([learners - 1, *gpus]) >= num_gpus:
        raise Mistake(
            f"too few GPUs for {learners} learners, or for --vllm_gpus {gpus}: a machine has "
            f"{num_gpus}; before the script there are --num_processes and, of another machine, "
            f"--num_gpus"
        )
    idle = num_gpus - learners - len(gpus)
    if idle > 0:
        run.notes.append(f"{idle} of a machine's {num_gpus} GPUs are not used; see --num_processes")


def check_arguments(run):
    """Refuses arguments that do not fit together. Fills in those of run time."""
    args, options = run.args, run.options
    check_numbers(run)
    check_gpus(run)
    if run.trains_reward_model():
        args.mini_batch_size = args.local_mini_batch_size * options.num_processes
        return
    with mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": str(options.local_processes())}):
        run.args = run.script.fill_in(args, options.num_processes)
    warms = ("value_warmup_steps", "value_model_path", "reward_model_path")
    if getattr(args, "lam", 1) < 1 and not any(getattr(args, name) for name in warms):
        run.notes.append(
            f"--lam {args.lam:g}: below 1 the value model has to be warmed up first "
            f"(--value_warmup_steps), or all responses become short"
        )
    if hasattr(args, "advantage_normalization") and args.number_samples_per_prompt < 2:
        raise Mistake("--number_samples_per_prompt: a group needs at least 2 samples")


def check_updates(run):
    """Refuses warm-ups as long as the run. Notes few updates."""
    args, more = run.args, "--total_episodes"
    if run.trains_reward_model():
        more = "--num_train_epochs"
        args.num_updates = len(run.train_rows) * args.num_train_epochs // args.mini_batch_size
        args.warm_up_steps = round(args.warmup_ratio * args.num_updates)
    warm_up_of_values = getattr(args, "value_warmup_steps", 0) * args.num_updates
    learning = args.num_updates - warm_up_of_values // (getattr(args, "num_training_steps", 0) or 1)
    advice = f"raise {more}, or lower the batch sizes, which count for each rank"
    if args.warm_up_steps >= learning:
        updates, args.num_updates = args.num_updates, 0  # that is: not known
        raise Mistake(
            f"{updates} updates of {args.mini_batch_size} are too few: --warm_up_steps or "
            f"--warmup_ratio takes {args.warm_up_steps} of the policy's {max(0, learning)} (PPO's "
            f"--value_warmup_steps come first): {advice}"
        )
    if args.num_updates < 100:
        run.notes.append(f"{args.num_updates} optimizer updates are few: {advice}")


# -------------------------------------------------------------------------------- tokenizer, data


def check_tokenizers(run):
    """Loads the tokenizers as the script does."""
    args = run.args
    flag = "tokenizer_name_or_path" if args.tokenizer_name_or_path else "model_name_or_path"
    path = getattr(args, flag)
    with loading(flag, path):
        tokenizer = AutoTokenizer.from_pretrained(path, revision=revision_of(run, path))
        if not tokenizer("1 + 1 = 2, is it not?")["input_ids"]:
            raise Mistake(
                "the tokenizer turns text into nothing; are its files there, such as "
                "tokenizer.json? Or give a --tokenizer_name_or_path"
            )
    if flag == "tokenizer_name_or_path":
        own = None
        with contextlib.suppress(Exception):  # the model may come without one
            model = args.model_name_or_path
            own = AutoTokenizer.from_pretrained(model, revision=revision_of(run, model))
        has_own = own and own("1 + 1 = 2, is it not?")["input_ids"]
        ids = own.get_vocab() if has_own else {}
        # Added tokens that no text has may differ
        unused = {token for token in tokenizer.get_added_vocab() if token not in ids}
        unused |= {t for t in tokenizer.get_added_vocab() if t not in str(tokenizer.chat_template)}
        unused.discard(tokenizer.eos_token)
        known = {token: i for token, i in tokenizer.get_vocab().items() if token not in unused}
        other = [token for token, i in known.items() if ids.get(token, i) != i]
        if other:
            raise Mistake(
                f"--{flag} {path}: {len(other):,} of its tokens have other ids than in the model's "
                f"own tokenizer, such as {other[0]!r}: the model would read another text"
            )
    if not run.trains_reward_model():
        run.tokenizer = run.script.load_tokenizer(args)
        if args.reward_model_path:
            path = args.reward_model_path
            own = AutoTokenizer.from_pretrained(path, revision=revision_of(run, path))
            if own.chat_template not in (None, run.tokenizer.chat_template):
                run.of_data.append(f"Warning: {path} has a chat template of its own, not used")
        return
    if args.chat_template:
        tokenizer.chat_template = Path(args.chat_template).read_text("utf-8")
    stop_token = tokenizer.eos_token if args.stop_token == "eos" else args.stop_token
    if stop_token not in tokenizer.get_vocab():
        raise Mistake(f"--stop_token {args.stop_token}: no token of the tokenizer {path}")
    args.stop_token_id = tokenizer.get_vocab()[stop_token]
    run.tokenizer = tokenizer


def revision_of(run, path):
    """The revision of a model on the hub."""
    if run.trains_reward_model():
        return run.args.model_revision
    return run.script.revision_of(path, run.args)


def load_rows(run, path, config, split, is_eval):
    """The script's Prompts or Pairs of a dataset. What it prints meanwhile is noted."""
    script, printed, raw_rows = run.script, io.StringIO(), []
    read = getattr(script, "load_rows", None)

    def reading(*words, **options):
        """The script's load_rows, whose rows are kept, and looked at."""
        rows = read(*words, **options)
        raw_rows.append(rows)
        try:
            odd_data.check_types(run, path, rows)
            run.notes += odd_data.notes_on_messages(run, path, rows)
        except ValueError as error:
            raise Mistake(str(error)) from error
        except Exception:  # the script's own reading names the row
            pass
        return rows

    try:
        with (
            contextlib.redirect_stdout(printed),
            mock.patch.object(script, "load_rows", reading, create=True),
        ):
            given = path, config, split
            if run.trains_reward_model():
                accelerator = SimpleNamespace(print=print)
                loaded = script.load_pairs(accelerator, *given, run.tokenizer, run.args)
            else:
                loaded = script.load_prompts(*given, run.tokenizer, run.args, is_eval)
    except Mistake:
        raise
    except Exception as error:
        raise Mistake(what_is_wrong_with_data(run, path, raw_rows, error)) from error
    run.of_data += re.findall(".+", printed.getvalue())  # the lines: others have more line ends
    for rows in raw_rows:
        run.raw_rows += rows
        run.notes += odd_data.notes_on_columns(run, path, rows)
        run.notes += odd_data.notes_on_ends(run, path, rows)
        if run.trains_reward_model():
            run.notes += odd_data.notes_on_pairs(run, path, rows)
    if not run.trains_reward_model():
        run.notes += odd_data.notes_on_repeats(run, path, loaded)
        texts = {prompt.origin: prompt.text for prompt in loaded}
        run.notes += odd_data.notes_on_characters(run.tokenizer, "prompt", texts)
    return loaded


COLUMNS = (
    "`data_source` chooses the reward, or name a --reward_fn; `prompt` is a text, or messages for "
    "the chat template; "
    '`reward_model` is {"ground_truth": ...}, or use '
    "--no-apply_verifiable_reward --reward_model_path MODEL; TRL's rows: docs/coming_from.md"
)
COLUMNS_OF_PAIRS = "`prompt`, `chosen`, `rejected` are texts, or messages for the chat template"


def what_is_wrong_with_data(run, path, raw_rows, error):
    """What the script says, which names file and row; what the row has, and must have."""
    text, cause = describe(error).replace("NotImplementedError: ", ""), error.__cause__
    if isinstance(cause, json.JSONDecodeError):
        return f"{text} in {cause.doc[:60]!r}"
    if not raw_rows and type(error) is ValueError and text.startswith(path):
        return text  # the script's own words
    if not raw_rows:
        advice = "is it a .parquet, a .jsonl, or a dataset on the hub?"
        if re.search(r"[*,\[]", path):
            advice = "several files: put them into a folder, and give that"
        elif os.path.isfile(path):
            advice = "a file must be a .parquet, or a .jsonl with a row a line"
        if "onfig name" in text:  # as datasets says it
            advice = "name one by --dataset_config, or --eval_dataset_config"
        return f"{path}: {text.removeprefix(f'{path}: ')}; {advice}"
    if not raw_rows[0]:
        return f"{path}: the dataset is empty"
    named = re.match(rf"{re.escape(path)}, row (\d+): ", text)
    if not named:  # it is about all rows
        return text
    needed = COLUMNS_OF_PAIRS if run.trains_reward_model() else COLUMNS
    return f"{text}; it has {', '.join(raw_rows[0][int(named[1])])}; {needed}"


def check_data(run):
    """Reads the rows to train on, and those that are held out."""
    args, rows = run.args, []
    given = args.dataset, args.dataset_config, args.dataset_split
    run.train_rows = load_rows(run, *given, is_eval=False)
    if args.eval_dataset:
        given = args.eval_dataset, args.eval_dataset_config, args.eval_dataset_split
        rows = load_rows(run, *given, is_eval=True)
        run.notes += odd_data.notes_on_held_out(run, rows)
    if 0 < getattr(args, "num_eval_prompts", 0) < len(rows):  # as the script draws them
        drawn = run.script.draw_prompts(len(rows), 0, args.num_eval_prompts, seed=0)
        rows = [rows[index] for index in drawn]
    run.eval_rows = rows


# ----------------------------------------------------------------------------------------- models


def lacks_weights(run, path):
    """Whether a model's folder has no weights, which is a mistake where the run is for here."""
    if any(name.endswith((".safetensors", ".bin")) for name in os.listdir(path)):
        return False
    if not run.options.is_elsewhere():
        raise Mistake(
            "it has no weights, such as model.safetensors; a plan for another machine needs none: "
            "say its --num_gpus and --gpu_memory, before the script"
        )
    run.notes.append(f"{path} has no weights: the plan is by its config.json")
    return True


def build_model(run, auto_class, path, config, may_lack=()):
    """The model without its weights, whose names and shapes must be those that its config asks for.

    A model on the hub is built from its config alone: its weights are not downloaded. So is one
    here that has none, if the run is for another machine.
    """
    if getattr(config, "quantization_config", None) is not None:
        raise Mistake("it is quantized; give the model that it was made from")
    attention = run.args.attn_implementation
    if not is_local(path) or lacks_weights(run, path):
        with torch.device("meta"):
            return auto_class.from_config(config, attn_implementation=attention)
    model, report = auto_class.from_pretrained(
        path,
        config=config,
        device_map="meta",
        ignore_mismatched_sizes=True,  # the report names them
        output_loading_info=True,
        attn_implementation=attention,
    )
    for name, shape, needed in sorted(report["mismatched_keys"]):
        raise Mistake(f"in its weights {name} is {list(shape)}, and should be {list(needed)}")
    missing = sorted(set(report["missing_keys"]) - {*may_lack})
    if missing:
        raise Mistake(f"its weights lack {', '.join(missing[:3])}")
    return model


def check_policy(run):
    """Refuses a policy that is no decoder, or not what its config.json says."""
    path = run.args.model_name_or_path
    with loading("model_name_or_path", path):
        revision = revision_of(run, path)
        config = AutoConfig.from_pretrained(path, revision=revision)
        model = build_model(run, AutoModelForCausalLM, path, config)
        # AutoModelForCausalLM builds decoders of encoders such as BERT, too; what was saved tells
        name = type(model).__name__
        saved_as = str(config.architectures or name)
        is_decoder = name in saved_as or "CausalLM" in saved_as or "LMHead" in saved_as
        if not is_decoder:
            raise Mistake(f"it is {saved_as}, and must be a decoder, a causal language model")
        if any("expert" in name for name, _ in model.named_parameters()):
            raise Mistake("it is a mixture of experts, whose syncs failed (docs/scaling.md)")
        with contextlib.suppress(OSError):  # a model may come without one
            model.generation_config = GenerationConfig.from_pretrained(path, revision=revision)
    run.model = model


def shrunk(config):
    """A copy of a config, for a model that is built in no time; sizes of attention's heads stay."""
    config = copy.deepcopy(config.get_text_config())
    num_layers = config.num_hidden_layers
    head_size = config.hidden_size / config.num_attention_heads
    for name, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == num_layers:  # such as layer_types
            setattr(config, name, value[:2])
        elif name.endswith("_token_id"):
            setattr(config, name, 0)
        elif isinstance(value, int) and re.search("intermediate_size|^vocab_size", name):
            setattr(config, name, 64)
    # By these names also where the config has others, as GPT-J's and MPT's
    config.num_hidden_layers = config.num_attention_heads = 2
    config.hidden_size = 64 * math.ceil(head_size / 32)
    config.vocab_size = 64
    if hasattr(config, "num_key_value_heads"):
        config.num_key_value_heads = 2
    return config


# What the engine does first: it reads the config, and finds and imports the model's file
ASK_VLLM = """
import sys
from vllm.config import ModelConfig
config = ModelConfig(model=sys.argv[1], skip_tokenizer_init=True, dtype=sys.argv[2])
sys.exit(config.runner_type != "generate" and "it would run as " + config.runner_type)
"""


def ask_vllm(config, dtype):
    """Why vLLM cannot serve a model, by its own words; "": it can. In a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        command = [sys.executable, "-c", ASK_VLLM, folder, dtype]
        # Where the run starts there may be a random.py, as start_fork_server says
        safe = os.environ | {"PYTHONSAFEPATH": "1"}
        asked = subprocess.run(command, capture_output=True, encoding="utf-8", env=safe)
    if asked.returncode == 0:
        return ""
    lines = asked.stderr.splitlines()
    told = [line for line in lines if re.match(r"\w*(Error|Exception): |  Value error", line)]
    causes = [line for line in told if line.startswith(("ModuleNotFound", "ImportError"))]
    return (causes or told[-1:] or lines[-1:] or [f"status {asked.returncode}"])[0].strip()


def check_engine(run):
    """Refuses a model that vLLM does not serve."""
    answer = ask_vllm(run.model.config, run.args.dtype)
    is_missing = "'vllm'" in answer or run.options.is_elsewhere()
    if is_missing and re.match("ModuleNotFoundError|ImportError", answer):
        run.notes.append(f"vLLM here was not asked whether it has the model: {answer}")
    elif answer:
        name = type(run.model).__name__
        raise Mistake(f"--model_name_or_path: vLLM cannot serve a {name}: {answer}")


@torch.no_grad()
def check_head(run):
    """Compares PolicyModel's log-probabilities with those of a small model of the same kind.

    Its parameters are drawn anew: biases begin at 0, and a cap changes small logits by nothing.
    """
    args, name = replace(run.args, dtype="float32"), type(run.model).__name__
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(
                shrunk(run.model.config), dtype=torch.float32, attn_implementation="eager"
            ).eval()
            for parameter in model.parameters():
                parameter.normal_()
            input_ids = torch.randint(64, (2, 16))
        logits = model(input_ids, use_cache=False).logits
    except Exception as error:
        run.notes.append(f"{name}: not compared with PolicyModel ({describe(error)})")
        return
    policy = run.script.PolicyModel(model, args)
    mask = torch.ones_like(input_ids)
    mask[:, 0] = 0
    logprobs, _ = policy(input_ids, mask)  # (2, 16)
    expected = torch.log_softmax(logits / args.temperature, dim=-1)
    expected = expected[:, :-1].gather(-1, input_ids[:, 1:, None]).squeeze(-1)  # (2, 15)
    difference = (logprobs[:, 1:] - expected).abs().max()
    if not difference <= 0.01 * expected.abs().max():
        raise Mistake(
            f"PolicyModel's log-probabilities of a {name} are wrong: by {difference:.2g} with "
            f"random weights; its head has a bias, a multiplier or a cap of its own"
        )


def check_adapters(run):
    """Refuses what vLLM's kernels for adapters lack. Notes a learning rate as without adapters."""
    args = run.args
    if plan.rank_of(run) and run.options.has_gpus() and args.dtype == "float32":
        raise Mistake("--lora_rank: on a GPU vLLM's kernels for adapters need --dtype bfloat16")
    if plan.rank_of(run) and args.learning_rate <= 1e-6:
        run.notes.append(
            f"--learning_rate {args.learning_rate:g}: with adapters the rate is about ten times "
            f"that of full training"
        )


def build_classifier(run, flag, may_lack_head):
    """A reward or value model: causal, with one label and the policy's vocabulary."""
    path = getattr(run.args, flag)
    with loading(flag, path):
        config = AutoConfig.from_pretrained(path, revision=revision_of(run, path))
        labels = 1 if may_lack_head else 0
        if "SequenceClassification" in str(config.architectures):
            labels = config.num_labels
        if labels != 1:
            raise Mistake(f"it has {labels} labels, and must be a classifier with one")
        config.num_labels = 1
        may_lack = ["score.weight"] * may_lack_head
        model = build_model(run, AutoModelForSequenceClassification, path, config, may_lack)
        if not hasattr(model, "score"):  # as of BERT
            raise Mistake(f"a {type(model).__name__} has no head named score")
        is_causal = getattr(config, "is_causal", True)
        if not is_causal or getattr(config, "use_bidirectional_attention", False):
            raise Mistake("it attends to later tokens; it must be a causal model")
    return model


def check_classifiers(run):
    """The reward model, also one of weight 0, and what the value model starts from."""
    args = run.args
    if run.trains_reward_model():
        run.model = build_classifier(run, "model_name_or_path", may_lack_head=True)
    elif args.reward_model_path:
        run.reward_model = build_classifier(run, "reward_model_path", may_lack_head=False)
    if hasattr(args, "value_model_path"):
        flags = ("value_model_path", "reward_model_path", "model_name_or_path")
        flag = next(flag for flag in flags if getattr(args, flag))
        run.value_model = build_classifier(run, flag, may_lack_head=True)
    run.has_models = True


def check_tokens(run):
    """Stop tokens, vocabulary and lengths: tokenizer, model and data together."""
    tokenizer, model = run.tokenizer, run.model
    config = model.config.get_text_config()
    if len(tokenizer) > config.vocab_size:
        raise Mistake(
            f"the tokenizer has {len(tokenizer)} tokens and the model only {config.vocab_size}; "
            f"see --tokenizer_name_or_path"
        )
    if run.trains_reward_model():
        stop_ids = [run.args.stop_token_id]
    else:
        stop_ids = run.args.stop_token_ids = run.script.find_stop_tokens(run.args, tokenizer, model)
    run.notes += odd_data.notes_on_template(run, run.raw_rows, stop_ids)
    limit = getattr(config, "max_position_embeddings", None) or math.inf
    if run.train_rows is not None and run.max_length() > limit:
        flag = "--max_token_length" if run.trains_reward_model() else "--response_length"
        raise Mistake(
            f"the longest row takes {run.max_length()} positions by {flag}; the model has {limit}"
        )


# ----------------------------------------------------------------------------------------- reward


def check_reward(run):
    """Tries the reward. Where it is a function of the user's, that is in a process of its own."""
    workers = queue.Queue()
    if run.model is not None:  # what is read of an answer is without stop tokens
        found = run.script.find_stop_tokens(run.args, run.tokenizer, run.model)
        run.args.stop_token_ids = found
    prompts = [row for row in run.train_rows + run.eval_rows if row.ground_truth is not None]
    for row in prompts:
        if run.args.reward_fn and not isinstance(row.extra_info or {}, dict):
            raise Mistake(f"{row.origin}: extra_info is no dictionary: {row.extra_info!r:.60}")
    truths = {row.origin: row.ground_truth for row in prompts}
    texts = {row: str(truth) for row, truth in truths.items() if not odd_data.is_rule(truth)}
    lost = odd_data.notes_on_characters(run.tokenizer, "ground truth", texts)
    run.notes += [f"{note}: no response can have it" for note in lost]
    with as_main(run.script):
        try:
            start_worker(run, workers)
            try_reward(run, workers, prompts)
        finally:
            run.script.end_children()
            # Waits for their thread, which closes a pipe that Python's end would write to
            for executor, _ in workers.queue:
                executor.shutdown()


def start_worker(run, workers):
    """Starts the process of --reward_fn, and of a fork's --env_fn, if there is either."""
    flags = [flag for flag in ("reward_fn", "env_fn") if hasattr(run.args, flag)]
    given = {flag: getattr(run.args, flag) for flag in flags}
    try:
        for function in filter(None, given.values()):
            path = function.rpartition(":")[0]
            if not (os.path.isfile(path) and path.endswith(".py")):
                raise Mistake("it must be path/to/file.py:function, of a file that is there")
        if any(given.values()):
            workers.put(run.script.start_reward_worker(*given.values()))
    except (Exception, SystemExit) as error:
        text = describe(error)
        if "completions" in text:
            text += "; functions of TRL's form: docs/coming_from.md"
        words = " ".join(f"--{flag} {name}" for flag, name in given.items() if name)
        raise Mistake(f"{words}: {text}") from error


def is_empty(truth):
    return str(truth).strip() in ("", "[]", "{}")


def rows_to_try(run, prompts):
    """All where the rule is the script's own. Else those with a new kind of truth, and some others.

    A kind is a type, or that it is empty. Empty ones come last.
    """
    if not run.args.reward_fn:
        return prompts
    by_kind, by_source = {}, {}
    for prompt in prompts:
        kind = type(prompt.ground_truth), is_empty(prompt.ground_truth)
        by_kind.setdefault(kind, prompt)
        by_source.setdefault((prompt.data_source, *kind), prompt)
    chosen = [*by_kind.values()]
    for rows in ([*by_source.values()], prompts):
        chosen += rows[:: math.ceil(len(rows) / FEW_ROWS) or 1]
    chosen = {prompt.origin: prompt for prompt in chosen}.values()
    return sorted(chosen, key=lambda prompt: is_empty(prompt.ground_truth))


def try_reward(run, workers, prompts):
    """Tries the reward on a right, a wrong and an empty answer to some prompts, or to all.

    Right is the ground truth, as it stands or as \\boxed{...}; wrong is that of another row.
    """
    start, count, truths = time.perf_counter(), 0, {}
    poor, partial, respelled = [], {}, {}  # by origin, what is said of them
    for prompt in prompts:  # the texts of each source
        truths.setdefault(prompt.data_source, {})[str(prompt.ground_truth)] = prompt
    chosen = rows_to_try(run, prompts)
    for prompt in chosen:
        if time.perf_counter() - start > SECONDS_OF_TRIALS:
            run.notes.append(f"the reward is slow: tried on {count} of {len(chosen):,} rows")
            break
        source, truth = prompt.data_source, str(prompt.ground_truth)
        others = (text for text in truths[source] if text != truth and not is_empty(text))
        answers = truth, f"\\boxed{{{truth}}}", next(others, "I do not know."), ""
        graded = [score(run, workers, prompt, answer) for answer in answers]
        bare, boxed, wrong, empty = (each.verifiable for each in graded)
        count += 1
        if odd_data.is_rule(prompt.ground_truth):
            continue
        if graded[0].text != truth:  # the tokenizer has made another text of it
            as_it_stands = score(run, workers, prompt, truth, is_read=False).verifiable
            if bare < as_it_stands:
                respelled[prompt.origin] = graded[0].text, truth, bare, as_it_stands
        scores = max(bare, boxed), wrong, empty
        usual = run.answers.setdefault(source, scores)
        if is_empty(truth) and wrong >= usual[0] > usual[1]:
            raise Mistake(
                f"{prompt.origin}: the ground truth is empty, and any answer is right: "
                f"{answers[2][:60]!r} scores {wrong:g}"
            )
        if scores[0] <= max(wrong, empty) and prompt.origin not in respelled:
            poor.append(prompt.origin)
        elif prompt.origin not in respelled and not any(map(is_right, graded[:2])):
            partial[prompt.origin] = scores[0]
    for origin, (text, truth, bare, as_it_stands) in [*respelled.items()][:1]:
        run.notes.append(
            f"{origin}, and so {len(respelled):,} of {count:,} that were tried: no response can "
            f"have the ground truth {truth[:60]!r}; as tokens it reads {text[:60]!r} and scores "
            f"{bare:g}, not {as_it_stands:g}"
        )
    for origin, most in [*partial.items()][:1]:
        run.notes.append(
            f"{origin}, and so {len(partial):,} of {count:,} that were tried: the ground truth "
            f"scores {most:g}, and 1 counts as right: unless an answer of another form scores "
            f"more, the share of right answers will say 0; the reward may return `right` as well "
            f"(docs/rewards.md)"
        )
    if poor:
        run.notes.append(
            f"{poor[0]}, and so {len(poor):,} of {count:,} that were tried: the ground truth as an "
            f"answer scores no more than a wrong or an empty answer; is a right answer of another "
            f"form?"
        )
    if run.longest_call > run.args.reward_timeout / 2:
        run.notes.append(f"a call of the reward took {run.longest_call:.1f} s: {SLOW_CALLS}")


SLOW_CALLS = "load what takes long when the file is imported, or raise --reward_timeout"


def is_right(response):
    """Whether an answer counts as right, as in the run's metrics."""
    return response.reward_metrics.get("right", response.verifiable) >= 1


def score(run, workers, prompt, answer, is_read=True):
    """An answer as a Response with its score. Mistake: the reward fails on it.

    is_read: the reward gets what the run would read of it, as tokens; else its text as it stands.
    """
    script, args = run.script, run.args
    if answer not in run.read:
        token_ids = run.tokenizer(answer, add_special_tokens=False)["input_ids"]
        read = getattr(script, "response_text", None)  # an older copy has none
        text = read(run.tokenizer, token_ids, args) if read else answer
        run.read[answer] = token_ids, text
    token_ids, text = run.read[answer]
    text = text if is_read else answer
    start = time.perf_counter()
    try:
        response = script.Response(
            prompt=prompt,
            token_ids=[*token_ids, 0],  # with a stop token
            logprobs=None,
            stopped=True,
            text=text,
        )
        if not args.reward_fn:
            value = script.compute_score(prompt.data_source, text, prompt.ground_truth)
            return replace(response, verifiable=value)
        response = script.call_worker(workers, response, args)
        failure = response.failure
    except Exception as error:
        failure = describe(error)
    if not failure:
        run.longest_call = max(run.longest_call, time.perf_counter() - start)
        return response
    cause = "but a model may answer anything"
    # The right answer is no odd one; and extra_info[...], extra_info.get(...) reads the row
    if answer == str(prompt.ground_truth) or re.search(r"extra_info[\[.']", failure):
        cause = (
            f"so look at the row, whose ground truth is {prompt.ground_truth!r:.60} and whose "
            f"extra_info is {prompt.extra_info!r:.60}"
        )
    if f'File "{script.__file__}"' in failure:  # none of the function's own lines
        cause = "so look at what it takes and returns"
    if failure.startswith("TimeoutError"):
        cause = SLOW_CALLS
    raise Mistake(
        f"{prompt.origin}: {args.reward_fn or 'compute_score'} fails on the answer "
        f"{text[:60]!r}, {cause}: {failure}"
    )


# ------------------------------------------------------------------ folder, checkpoint, disk, hub


def existing_folder(path):
    """The folder that is there, of those on the way to a path."""
    return next(folder for folder in (path, *path.parents) if folder.exists())


def check_run_folder(run):
    """Refuses a run folder with another run, or which cannot be written. Finds the checkpoint."""
    args = replace(run.args, run_name=run.args.run_name or run.args.exp_name)
    run_dir, checkpoint_dir = run.script.find_run(args)
    if checkpoint_dir is not None and not (checkpoint_dir / "state.json").exists():
        raise Mistake(
            f"--resume_from_checkpoint {checkpoint_dir}: this is no checkpoint; it must be latest, "
            f"or a folder such as output/RUN_NAME/checkpoints/step_100"
        )
    run_dir = run_dir.absolute()
    folder = existing_folder(run_dir)
    can_write = folder.is_dir() and os.access(folder, os.W_OK)
    if not (can_write or run.options.is_elsewhere()):
        raise Mistake(f"--output_dir {args.output_dir}: {folder} is no folder to write to")
    run.run_dir, run.checkpoint_dir = run_dir, checkpoint_dir
    if checkpoint_dir is not None:  # prompts may have the day in them
        with contextlib.suppress(OSError, ValueError, KeyError):
            run.args.start_day = json.loads((run_dir / "args.json").read_bytes())["start_day"]


MAY_DIFFER = {"run_name", "output_dir", "resume_from_checkpoint", "data_hash", "num_sources"}


def kept_arguments(script):
    """Arguments that may not change on resume: MUST_AGREE, or those that a loop looks at."""
    names = set(getattr(script, "MUST_AGREE", ()))
    for node in ast.walk(ast.parse(inspect.getsource(script))):
        if isinstance(node, ast.For) and "--resume_from_checkpoint: " in ast.unparse(node.body):
            with contextlib.suppress(ValueError):  # it goes over MUST_AGREE
                names.update(ast.literal_eval(node.iter))
    return names


def check_checkpoint(run):
    """Refuses a checkpoint of another run, or of another script. Finds what has changed."""
    path, must_agree = run.checkpoint_dir, kept_arguments(run.script)
    given = f"--resume_from_checkpoint {path}"
    try:
        json.loads((path / "state.json").read_bytes())
        saved = json.loads((path.parents[1] / "args.json").read_bytes())
    except (OSError, ValueError) as error:
        raise Mistake(f"{given}: it is damaged; resume an older one ({error})") from error
    current = json.loads(json.dumps(asdict(run.args)))  # by way of JSON a tuple is a list
    if not must_agree:
        run.notes.append("what the script refuses on resume is not known; see check_checkpoint")
    strange = must_agree & current.keys() - saved.keys()
    if strange:
        raise Mistake(f"{given} was written by another script: it has no {', '.join(strange)}")
    run.changed = {
        name: (saved[name], value)
        for name, value in current.items()
        if name not in MAY_DIFFER and saved.get(name, value) != value
    }
    differences = [
        f"{name} was {was} and is {now}"
        for name, (was, now) in run.changed.items()
        if name in must_agree
    ]
    if differences:
        raise Mistake(f"{given} is of a run with other arguments: {'; '.join(differences)}")
    if not run.trains_reward_model():
        prompts = [vars(prompt) | {"origin": None} for prompt in run.train_rows + run.eval_rows]
        if saved["data_hash"] != run.script.stable_hash(prompts):
            raise Mistake(f"{given} is of a run with other data: {other_data(run)}")


def other_data(run):
    """What tells the prompts of a run from those that it would have now: the first one."""
    path = run.run_dir / "rollouts.jsonl"
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    (drawn,) = run.script.draw_prompts(len(run.train_rows), 0, 1, run.args.seed)
    first = run.train_rows[drawn]
    if lines:
        was = json.loads(lines[0])
        for name, now in (("prompt", first.text), ("ground_truth", str(first.ground_truth))):
            if was[name] != now:
                return f"its first {name} was {was[name][:80]!r}, and is {now[:80]!r}"
    return "other rows, or other held-out prompts"


def check_disk(run):
    """Refuses a disk that has no room for checkpoints, the final model, and a little besides."""
    args, disk = run.args, run.options.disk
    if not disk and run.options.is_elsewhere():
        run.notes.append("the other machine's disk is not checked; say its room by --disk, in GB")
        return
    free = disk * 1e9 if disk else shutil.disk_usage(existing_folder(run.run_dir)).free
    # Checkpoints that are there already will make way
    there = [path for path in run.run_dir.glob("checkpoints/**/*") if path.is_file()]
    free += sum(path.stat().st_size for path in there)
    number, size = plan.checkpoints_on_disk(run)
    needed = number * size + plan.final_model(run) + 2**25
    if free >= needed:
        return
    raise Mistake(
        f"--output_dir {args.output_dir}: {in_words(free)} free, {in_words(needed)} are needed, "
        f"{in_words(number * size)} of them for checkpoints; see --keep_last_n"
    )


def check_shared_memory(run):
    """Refuses a /dev/shm without room for what goes by it to vLLM, as of a plain container."""
    options = run.options
    if options.is_elsewhere():
        return
    free = shutil.disk_usage("/dev/shm").free
    text = f"/dev/shm: {in_words(free)} free; docker run --ipc=host or --shm-size=8g gives more"
    needed = options.local_processes() * plan.shared_memory(run)
    if needed > free:
        raise Mistake(f"{text}. Weights go to vLLM by files there, of {in_words(needed)}")
    if options.local_processes() + len(run.args.vllm_gpus) > 1 and free < GIB:
        run.notes.append(f"{text}. By it NCCL, and vLLM's workers, exchange what they have")


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
    args = run.args
    repo, branch = repo_of(vars(args), args.hf_entity), args.hf_repo_revision or args.run_name
    if branch and (not re.fullmatch(r"\w[\w.+=/-]*", branch) or ".." in branch):
        raise Mistake(
            f"--push_to_hub: {branch!r} can be no branch of a repo; choose another --run_name, or "
            "give --hf_repo_revision"
        )
    hub_answers()  # else nobody is waited for
    try:
        huggingface_hub.utils.validate_repo_id(repo)
        login = huggingface_hub.whoami()
    except Exception as error:
        raise Mistake(
            f"--push_to_hub: run `hf auth login`, or set HF_TOKEN, or give another --hf_repo_id; "
            f"{describe(error)}"
        ) from error
    owners = [login["name"], *(team["name"] for team in login.get("orgs", []))]
    if "/" in repo and repo.split("/")[0] not in owners:
        raise Mistake(
            f"--push_to_hub: {repo} is somebody else's; this login may write to repos of "
            f"{' and '.join(owners)}"
        )
    if login.get("auth", {}).get("accessToken", {}).get("role") == "read":
        raise Mistake("--push_to_hub: this token may only read; make one that may write")


# ----------------------------------------------------------------------------------------- memory


def check_memory(run):
    """Refuses a run that needs more memory than its GPUs have."""
    if run.options.gpu_memory is None and torch.cuda.device_count() > 0:
        run.options.gpu_memory = torch.cuda.get_device_properties(0).total_memory / GIB
    if run.options.gpu_memory is None or plan.fits(run):
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
    helps = "; ".join(plan.in_flags(*found) for found in plan.what_fits(run)[:4])
    other = "no flags make room; GPUs for vLLM alone may (--vllm_gpus), or a smaller model"
    raise Mistake(f"memory: {problem}; {f'this fits: {helps}' if helps else other}")


# ------------------------------------------------------------------------------------------- plan


def plan_of_data(run):
    """Lines on data, steps and updates."""
    args = run.args
    yield "model", f"{args.model_name_or_path}"
    for line in run.of_data:
        yield "data", line
    if run.train_rows is not None and not run.trains_reward_model():
        text = run.tokenizer.decode(run.train_rows[0].token_ids)
        shown = repr(text) if len(text) <= 120 else f"{text[:50]!r} ... {text[-70:]!r}"
        yield "", f"the first prompt, as the model reads it: {shown}"
    if args.num_updates == 0:
        return
    if run.trains_reward_model():
        pairs = f"of the {len(run.train_rows):,} pairs"
        yield "updates", f"{args.num_updates:,} of {args.mini_batch_size} {pairs}"
        return
    batch = f"{args.rollout_batch_size:,} prompts x {args.number_samples_per_prompt}"
    yield "steps", f"{args.num_training_steps:,} of {batch} responses"
    if run.train_rows is not None:
        length = f"{run.max_length():,} tokens, of which {args.response_length:,} for the response"
        yield "", f"a row has up to {length}"
    if run.eval_rows:
        count = f"of {len(run.eval_rows):,} prompts"
        evaluations = min(args.num_evals, args.num_training_steps // 2)
        yield "", f"evaluations {count}: {evaluations}, and one after the last step"
    updates = args.num_updates // args.num_training_steps
    yield "updates", f"{updates} a step, {args.num_updates:,} in all, {args.mini_batch_size} each"


def plan_of_memory(run):
    """Lines on memory, by part and in sum, and on the disk."""
    if not run.knows_sizes():
        return
    args, room = run.args, plan.learner_room(run)
    largest, parts = plan.learner_memory(run)
    limit = "" if room is None else f", of the {in_words(room)} that it may take of its GPU"
    yield "memory", f"of a learner: about {in_words(plan.learner_needs(run))}{limit}"
    yield "", f"at the most, in {largest}:"
    for name, size in parts.items():
        yield "", f"{in_words(size):>10}  {name}"
    if run.options.local_processes() > 1:
        whole = plan.host_memory(run)
        yield "", f"of a machine, not of GPUs: {in_words(whole)}, while learners load whole models"
    if not run.trains_reward_model():
        least = plan.engine_needs(run) if run.options.has_gpus() else plan.engine_memory(run)
        share = f"{args.vllm_gpu_memory_utilization:g} (--vllm_gpu_memory_utilization)"
        yield "", f"of vLLM: at least {in_words(least)}; of GPUs {share}"
        if run.shares_gpus() and run.options.gpu_memory:
            yield "", plan.room_for_responses(run)
    number, size = plan.checkpoints_on_disk(run)
    model = in_words(plan.final_model(run))
    yield "disk", f"{in_words(number * size)} for {number} checkpoints, {model} for the final model"
    if not number and getattr(args, "save_freq", 0):
        steps = getattr(args, "num_training_steps", args.num_updates)
        yield "", f"no checkpoint is ever due: --save_freq {args.save_freq} of {steps:,} steps"
        yield "", "lower it, or a run that ends early has to begin again"
    elif not number:
        yield "", "no checkpoints: a run that ends early has to begin again (--save_freq)"


def span(scores):
    """From the least to the most, or the one that all are."""
    least, most = min(scores), max(scores)
    return f"{least:g}" if least == most else f"{least:g} to {most:g}"


def plan_of_reward(run):
    """Lines on what scores are made of, and how the reward has scored."""
    args = run.args
    if run.trains_reward_model():
        return
    if args.apply_verifiable_reward:
        yield "reward", f"{args.verification_reward:g} x {args.reward_fn or 'compute_score'}"
    if run.script.uses_reward_model(args):
        yield "reward", f"{args.reward_model_multiplier:g} x the reward model's score"
    tried = {f"a row of {source}": [scores] for source, scores in run.answers.items()}
    if len(tried) > FEW_SOURCES:
        tried = {f"{len(tried):,} sources that were tried": run.answers.values()}
    for rows, scores in tried.items():
        right, wrong, empty = map(span, zip(*scores, strict=True))
        others = f"a wrong answer {wrong}, an empty one {empty}"
        yield "", f"the ground truth of {rows} scores {right}, {others}"


def plan_of_checkpoint(run):
    """Lines on what is resumed."""
    if run.checkpoint_dir is None:
        return
    yield "resumes", str(run.checkpoint_dir)
    step = run.script.step_of
    checkpoints = run.script.list_checkpoints(run.run_dir)
    newer = [path.name for path in checkpoints if step(path) > step(run.checkpoint_dir)]
    if newer:
        yield "", f"and removes what is newer: {', '.join(newer)}"
    for name, (was, now) in run.changed.items():
        yield "", f"{name} was {was} and is {now}"


def print_plan(run):
    """Prints what the run will do, as far as it is known."""
    print(f"Plan of {run.script.__name__}.py")
    parts = [plan_of_data, plan.plan_of_processes, plan_of_memory, plan_of_reward]
    for part in [*parts, plan_of_checkpoint]:
        try:
            for name, text in part(run):
                print(f"  {name:<9}{printable(text)}")
        except Exception as error:  # of a fork, as in check
            run.notes.append(f"{part.__name__} ends: {describe(error)}")
    for note in dict.fromkeys(run.notes):
        print(f"  note     {printable(note)}")


def launch_command(options, words):
    """The command that launches what was checked, by the launcher beside this Python.

    Where no file of accelerate is named, it is the one of this folder that does the same.
    """
    learners, machines = options.num_processes, options.num_machines
    launcher = Path(sys.executable).with_name("accelerate")
    is_on_path = shutil.which("accelerate") == str(launcher)
    file = Path(__file__).with_name("accelerate") / ("ddp.yaml" if learners > 1 else "one_gpu.yaml")
    command = ["accelerate" if is_on_path else os.path.relpath(launcher), "launch", "--quiet"]
    # The launcher does not expand a home
    command += ["--config_file", os.path.expanduser(options.config_file or os.path.relpath(file))]
    flags = f"--num_processes {learners}"
    if machines > 1:
        flags += f" --num_machines {machines} --machine_rank 0"
        flags += " --main_process_ip HOST --main_process_port 29500"
    return shlex.join(command + flags.split() + words)


# ------------------------------------------------------------------------------------------- main


def one_line(mistake):
    """A mistake in one line that a terminal shows."""
    line = printable(" ".join(str(mistake).split()))
    if " debug_assets/" in f" {line}" and not os.path.exists("debug_assets"):
        line += "; scripts/dev/make_debug_assets.py makes debug_assets"
    if len(line) > 450:
        line = f"{line[:330]} ... {line[-115:]}"
    return f"preflight: error: {line}"


def check(run):
    """All parts; returns the mistakes, the first of each part."""
    mistakes = []

    def attempt(part, *needed):
        """Runs a part, unless another has not found what it needs."""
        if None in needed or False in needed:
            return
        try:
            part(run)
        except Exception as error:  # such as of a fork, which may lack a function or an argument
            mistakes.append(describe(error))

    is_trainer = run.trains_reward_model()
    attempt(check_sharding)
    attempt(check_arguments)
    attempt(check_tokenizers)
    attempt(check_run_folder)
    attempt(check_data, run.tokenizer)
    attempt(check_updates, run.args.mini_batch_size > 0, not is_trainer or run.train_rows)
    if not is_trainer:
        attempt(check_policy)
        attempt(check_engine, run.model)
        attempt(check_head, run.model)
        attempt(check_adapters)
        attempt(check_reward, run.train_rows)
    attempt(check_classifiers, run.model or is_trainer)
    attempt(check_tokens, run.tokenizer, run.model)
    attempt(check_checkpoint, run.args.num_updates > 0, run.train_rows, run.checkpoint_dir)
    attempt(check_disk, run.run_dir, run.knows_sizes())
    attempt(check_shared_memory, not is_trainer, run.knows_sizes())
    attempt(check_accounts)
    attempt(check_memory, run.knows_sizes())
    return mistakes


def main(words):
    """Checks and prints; returns the exit status."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    # Code that comes with a model is refused, and nobody is asked
    transformers.dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0
    split = next((index for index, word in enumerate(words) if word.endswith(".py")), len(words))
    options = tyro.cli(Options, args=words[:split], description=__doc__, use_underscores=True)
    try:
        if split == len(words):
            raise Mistake("which script? It is preflight.py [OPTIONS] script.py FLAGS...")
        script = load_script(words[split])
        args, mistake = parse_flags(script, words[split + 1 :])
        read_config_file(options)
    except Mistake as error:
        print(one_line(error), file=sys.stderr)
        return 2
    if options.num_gpus is None:
        options.num_gpus = torch.cuda.device_count()
    run = Run(script, options, args)
    if not (is_local(args.model_name_or_path) and is_local(args.dataset)) and not hub_answers():
        run.notes.append("the hub does not answer; what is in the cache of it is used")
    mistakes = check(run)
    if mistake is not None:
        mistakes.insert(0, mistake)
    print_plan(run)
    sys.stdout.flush()
    for line in dict.fromkeys(map(one_line, mistakes)):
        print(line, file=sys.stderr)
    if mistakes:
        return 2
    where = ""
    if options.num_machines > 1:
        where = " on HOST, and on each other machine by its own --machine_rank"
    print(f"Launch{where}:\n{launch_command(options, words[split:])}")
    return 0


if __name__ == "__main__":
    # Beside the script, or, in another process, the file of a reward
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    forget_neighbours()
    sys.exit(main(sys.argv[1:]))
