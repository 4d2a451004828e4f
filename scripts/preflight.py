r"""Check a run before it is launched, and print its plan, even on a laptop without the GPUs.

    python scripts/preflight.py --config_file scripts/accelerate/one_gpu.yaml SCRIPT FLAGS...
    python scripts/preflight.py --config_file scripts/accelerate/ddp.yaml [--num_processes 6] \
        [--num_gpus 8] [--gpu_memory 80] SCRIPT FLAGS...

SCRIPT is ppo_sync.py, ppo_vllm_async.py, grpo_vllm_async.py, scripts/train_reward_model.py, or a
fork of one. FLAGS are its flags, and --config_file and --num_processes are those of accelerate
launch. The script is loaded as a module. Its own functions read tokenizers, data and models, and
their errors are quoted, so a fork is checked with its changes. The checks of this file find what
would fail late, or silently. A reward is tried in a process like the run's: on all rows if it is
the script's own rule, else on the first row of each data source and on some others.

Each check reports its first error on one line after the plan, and the remaining checks still run.
If there are errors, the exit status is 2. Otherwise the last line is the command that launches the
run. Nothing is written to the disk except the Hub's cache.

If this machine does not have the GPUs that you name, the run is planned for another machine. You
can then plan without downloading weights, and neither the disk nor --output_dir is checked.

Memory is an estimate by internal/resource_plan.py from the sizes of the models. If the run does not
fit, the error names flags with which it does.
"""

import contextlib
import copy
import importlib.util
import io
import json
import math
import os
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

from internal import model_paths

if __name__ == "__main__" and (missing := model_paths.missing(sys.argv[1:])):
    # Report missing files before the imports below, which take seconds
    print(*(f"preflight: error: {line}" for line in missing), sep="\n", file=sys.stderr)
    sys.exit(2)

import datasets
import fork
import huggingface_hub
import torch
import transformers
import tyro
import yaml
from accelerate.commands.config import config_args
from data_preprocess.common import hub_answers, printable
from internal import data_warnings
from internal import resource_plan as plan
from internal.data_warnings import Mistake
from internal.provenance import repo_of
from internal.resource_plan import GIB, in_words
from requests.utils import get_netrc_auth
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
)

# A reward of the user's is tried on so many rows besides the first of each kind, and on no further
# row after so many seconds
FEW_ROWS, SECONDS_OF_TRIALS = 20, 20


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


# Options that a script may lack, such as lora_rank, which a fork has, or those of parts that a copy
# is without (docs/changing_a_script.md, "What can be deleted"). With these values it is as if they
# were missing
ZEROS = ("async_mode", "keep_last_n", "lora_rank", "micro_batch_tokens", "push_to_hub", "save_freq")
ZEROS += ("add_r1_style_format_reward",)
ABSENT = dict.fromkeys(ZEROS, 0) | {"vllm_gpus": (), "vllm_tensor_parallel_size": 1}
ABSENT["resume_from_checkpoint"] = None


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
    # Of each data source: scores of answers to the first of its rows that was tried. Three of them
    # ought to be right, one is wrong, and one is empty
    answers: dict = field(default_factory=dict)
    format: str = ""  # after how many prompts the R1 format gets its reward, if there is one
    run_dir: Path | None = None
    disk: Path | None = None  # the folder that is there, of those on the way to it
    checkpoint_dir: Path | None = None
    changed: dict = field(default_factory=dict)  # arguments since the checkpoint: (was, is)
    notes: list = field(default_factory=list)  # what is no mistake, but should be known

    def __post_init__(self):
        """Lets every part read options that the script lacks; vars(args) has its own alone."""
        for name, value in ABSENT.items():
            if not hasattr(self.args, name):
                setattr(type(self.args), name, value)

    def trains_reward_model(self):
        return hasattr(self.script, "load_pairs")

    def reader(self):
        """The module that reads tokenizers and models, and the arguments as it takes them."""
        if self.trains_reward_model():
            return self.script.ppo, self.script.as_ppo_args(self.args)
        return self.script, self.args

    def shares_gpus(self):
        """Whether vLLM and a learner are on the same GPU."""
        has_engines = not self.trains_reward_model()
        return has_engines and self.options.has_gpus() and not self.args.vllm_gpus

    def max_length(self):
        """Tokens of the longest prompt with its response; of the longest row of pairs."""
        rows = self.train_rows + self.eval_rows
        if self.trains_reward_model():
            return max(pair.length for pair in rows)
        return max(len(prompt.token_ids) for prompt in rows) + self.args.response_length

    def knows_sizes(self):
        """Whether no part that memory depends on has found a mistake."""
        return self.args.num_updates > 0 and self.train_rows is not None and self.has_models


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
    """What goes wrong inside is about the file, data, tokenizer or model that this flag names."""
    try:
        yield
    except Exception as error:
        text = model_paths.trouble_with(flag, path) or describe(error)
        is_of_hub = flag not in model_paths.FILES and model_paths.may_be_on_the_hub(path)
        if is_of_hub and isinstance(error, OSError) and not hub_answers():
            text = "no such folder, nor a copy in the cache, and the hub does not answer"
            if not flag.endswith("dataset"):
                text += "; a folder with config.json and the tokenizer's files is enough to plan"
        elif is_of_hub and not isinstance(error, Mistake):
            kind = "dataset" if flag.endswith("dataset") else "model"
            text = f"no such folder, and no {kind} of the hub that you may read ({text})"
        raise Mistake(f"--{flag} {path}: {text}") from error


# --------------------------------------------------------------------------- script and arguments


def forget_neighbours():
    """Of this file: a script, or a reward, imports its own, which may have the same names."""
    here = sys.path.pop(0)
    for name, module in [*sys.modules.items()]:
        if name != "__main__" and str(getattr(module, "__file__", "")).startswith(here):
            del sys.modules[name]


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
        what = "is not one of the training scripts, nor a fork of one"
        raise Mistake(f"{path} {what} ({describe(error)})") from error
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
            fsdp = config.get("fsdp_config") or {}
            options.variables |= {name.upper(): value for name, value in fsdp.items()}
            options.variables[f"ACCELERATE_USE_{config['distributed_type']}".upper()] = True
            if options.is_set("ACCELERATE_USE_NO"):
                config["num_processes"] = 1  # whatever is in the file
        options.num_processes = options.num_processes or int(config.get("num_processes", 1))
        options.num_machines = options.num_machines or int(config.get("num_machines", 1))
    except Exception as error:
        what = "is not a valid config of accelerate"
        raise Mistake(f"--config_file {path} {what} ({describe(error)})") from error


def check_sharding(run):
    """Refuse launches that start what the script does not know, or fewer ranks than are asked."""
    options, path = run.options, run.options.config_file
    if options.is_set("ACCELERATE_USE_NO") and options.num_processes > 1:
        raise Mistake(
            f"--num_processes is {options.num_processes}, but {path} starts one; launch with "
            f"--config_file scripts/accelerate/ddp.yaml"
        )
    is_fsdp2 = str(options.variables.get("FSDP_VERSION")) == "2"
    is_known = is_fsdp2 and hasattr(run.script, "fully_shard")
    others = ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_MEGATRON_LM", "ACCELERATE_USE_XLA")
    if any(map(options.is_set, others)) or (options.num_shards() and not is_known):
        raise Mistake(
            f"accelerate launch reads {path or 'the environment'}: launch with --config_file "
            f"scripts/accelerate/one_gpu.yaml, ddp.yaml or, if the script shards models, "
            f"fsdp2.yaml, by fsdp_version 2"
        )


# Numbers that must be above 0; all others may be 0
SIZES = ("response_length", "max_prompt_token_length", "number_samples_per_prompt", "num_epochs")
SIZES += ("local_rollout_batch_size", "local_mini_batch_size", "micro_batch_tokens")
SIZES += ("total_episodes", "vllm_tensor_parallel_size")
SIZES += ("lora_rank", "lora_alpha", "max_token_length", "num_train_epochs")
LEAST = dict.fromkeys(SIZES, 1) | {"penalty_reward_value": -math.inf, "temperature": 0.01}
# Flags that do nothing without another
NEED_ANOTHER = {
    "min_response_length": "non_stop_penalty",
    "kl_estimator": "beta",
    "penalty_reward_value": "non_stop_penalty",
    "r1_style_format_reward": "add_r1_style_format_reward",
}


def check_numbers(run):
    """Refuse numbers out of range, and a ~ that is not expanded. Notes flags that do nothing."""
    for option in fields(run.args):
        name, value = option.name, getattr(run.args, option.name)
        needed, least = NEED_ANOTHER.get(name, ""), LEAST.get(name, 0)
        if value != option.default and getattr(run.args, needed, True) in (None, 0, "none"):
            run.notes.append(f"--{name} does nothing without --{needed}")
        if isinstance(value, str) and value.startswith("~"):
            raise Mistake(f"--{name} {value}: {model_paths.TILDE}")
        # A bool is no number here, which isinstance would take for an int. NaN is not above
        if type(value) in (int, float) and not value >= least:
            raise Mistake(f"--{name} is {value}; it must be at least {least:g}")


def check_gpus(run):
    """Refuse GPUs that a machine does not have, or that its engines cannot share out."""
    num_gpus, learners = run.options.num_gpus, run.options.local_processes()
    gpus, size = run.args.vllm_gpus, run.args.vllm_tensor_parallel_size
    if (num_gpus or gpus) and max([learners - 1, *gpus]) >= num_gpus:
        raise Mistake(
            f"there are too few GPUs for {learners} learners or for --vllm_gpus {gpus}, because a "
            f"node has {num_gpus}; before the script, pass --num_processes or, for another "
            f"machine, --num_gpus"
        )
    free_gpus = {gpu for gpu in gpus if gpu >= learners}
    num_engines = len(free_gpus) // size
    is_shared_out = num_engines * size == len(gpus) and 0 < num_engines <= learners
    if (gpus or size > 1) and not is_shared_out:
        raise Mistake(
            f"--vllm_gpus {gpus} must be GPUs without a learner (not the first {learners}), each "
            f"named once, with --vllm_tensor_parallel_size ({size}) for each engine, and no more "
            f"engines than learners"
        )
    idle = num_gpus - learners - len(gpus)
    if idle > 0:
        run.notes.append(f"{idle} of a node's {num_gpus} GPUs are not used; see --num_processes")


def check_arguments(run):
    """Refuse arguments that do not fit together. Fills in those of run time."""
    args, options = run.args, run.options
    check_numbers(run)
    check_gpus(run)
    if run.trains_reward_model():
        args.mini_batch_size = args.local_mini_batch_size * options.num_processes
        return
    if not (
        args.apply_verifiable_reward
        or args.add_r1_style_format_reward
        or run.script.uses_reward_model(args)
    ):
        raise Mistake(
            "there is no reward; add --apply_verifiable_reward, --add_r1_style_format_reward, or a "
            "--reward_model_path whose --reward_model_multiplier is above 0"
        )
    with mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": str(options.local_processes())}):
        args = run.args = run.script.fill_in(args, options.num_processes)
    updates = getattr(args, "num_policy_updates", args.num_updates)
    if args.warm_up_steps >= updates:
        args.num_updates = 0  # that is: not known
        raise Mistake(
            f"--warm_up_steps {args.warm_up_steps}: the policy has {max(0, updates)} updates, and "
            f"must have more; see --total_episodes, and --value_warmup_steps where there is one"
        )
    warms = ("value_warmup_steps", "value_model_path", "reward_model_path")
    if getattr(args, "lam", 1) < 1 and not any(getattr(args, name) for name in warms):
        run.notes.append(
            f"--lam {args.lam:g} with an untrained value model makes responses collapse to a few "
            f"tokens. Add --value_warmup_steps 20"
        )
    if args.lora_rank:
        check_adapters(run)


def check_adapters(run):
    """Refuse what vLLM's adapters cannot do on a GPU. Notes a learning rate of full training."""
    args, options = run.args, run.options
    if options.has_gpus() and args.dtype == "float32":
        raise Mistake("--lora_rank on a GPU needs --dtype bfloat16, for vLLM's kernels")
    if args.learning_rate <= 1e-6:
        run.notes.append(
            f"--learning_rate {args.learning_rate:g} is low, because adapters need about ten times "
            f"the learning rate of full training"
        )
    if args.lora_rank <= 32 or not options.has_gpus() or "TRITON_PTXAS_PATH" in options.variables:
        return
    limit = (
        f"--lora_rank {args.lora_rank}: above 32 vLLM 0.32 may be wrong on an H100 or H200 (its "
        f"issue 48590), unless TRITON_PTXAS_PATH is an assembler of CUDA 13.3 or later"
    )
    if options.is_elsewhere():
        run.notes.append(limit)
    elif torch.cuda.get_device_capability() == (9, 0):
        raise Mistake(limit)


# -------------------------------------------------------------------------------- tokenizer, data


def check_tokenizers(run):
    """Loads the tokenizer as the script does. Refuses ids that the model knows otherwise."""
    script, args = run.reader()
    flag = "tokenizer_name_or_path" if args.tokenizer_name_or_path else "model_name_or_path"
    path, ids = getattr(args, flag), {}

    def load(path):
        loaded = AutoTokenizer.from_pretrained(path, revision=script.revision_of(path, args))
        # Without its files transformers makes one that knows special tokens alone
        if not loaded("1 a", add_special_tokens=False)["input_ids"]:
            raise Mistake("it has no tokenizer, such as tokenizer.json")
        return loaded

    with loading(flag, path):
        tokenizer = load(path)
        if args.tokenizer_name_or_path:
            with contextlib.suppress(Exception):  # the model may come without one
                ids = load(args.model_name_or_path).get_vocab()
        # Added tokens that no text has may differ
        unused = tokenizer.get_added_vocab().keys() - {tokenizer.eos_token}
        unused = {t for t in unused if t not in ids or t not in str(tokenizer.chat_template)}
        known = {token: i for token, i in tokenizer.get_vocab().items() if token not in unused}
        other = [token for token, i in known.items() if ids.get(token, i) != i]
        if other:
            raise Mistake(
                f"{len(other):,} of its tokens have other ids than in the model's own tokenizer, "
                f"such as {other[0]!r}: the model would read another text"
            )
    templates = {}
    for flag in ("reward_model_path", "value_model_path"):
        if path := getattr(args, flag, None):
            with loading(flag, path):
                templates[flag] = load(path).chat_template
    if args.chat_template:
        with loading("chat_template", args.chat_template):
            if "{" not in Path(args.chat_template).read_text("utf-8"):
                raise Mistake("it is no Jinja template, for it writes the same for every prompt")
    tokenizer = script.load_tokenizer(args)
    other = templates.get("reward_model_path")
    if other not in (None, tokenizer.chat_template):
        run.notes.append(f"the chat template of {args.reward_model_path} is not used")
    stop_token = tokenizer.eos_token if run.args.stop_token == "eos" else run.args.stop_token
    if run.args.stop_token and stop_token not in tokenizer.get_vocab():
        raise Mistake(f"--stop_token {run.args.stop_token}: the tokenizer has no such token")
    if run.trains_reward_model():
        run.args.stop_token_id = tokenizer.get_vocab()[stop_token]
    run.tokenizer = tokenizer


def check_data(run):
    """Reads the rows to train on, and those that are held out, as the script does."""
    script, args, read, printed = run.script, run.args, [], io.StringIO()
    load_rows, is_trainer = script.load_rows, run.trains_reward_model()
    # What a row becomes first, and what its length is
    maker = "Pair" if is_trainer else "read_prompt"
    make = getattr(script, maker)
    limit = "max_token_length" if is_trainer else "max_prompt_token_length"

    def reading(path, config, split):
        """The script's load_rows, whose rows are kept."""
        files.clear()
        with loading("dataset" if path == args.dataset else "eval_dataset", path):
            rows = load_rows(path, config, split)
            is_default = split in (None, args_class.dataset_split, args_class.eval_dataset_split)
            for index, row in enumerate(rows):
                if not isinstance(row, dict):
                    raise Mistake(f"row {index} is no JSON object, but {row!r:.40}")
            has_split = files and all(split in file for file in files)
            if is_local(path) and not (is_default or has_split):
                raise Mistake(f"its files have no split {split} in their names; leave it out")
            run.notes += data_warnings.notes_on_files(
                os.path.join(path, config or ""), files, split
            )
            if not rows:
                raise Mistake(f"no row was read of the split {split}; the dataset is empty")
        read.append((path, rows, []))
        return rows

    def making(*values, **more):
        """The script's read_prompt or Pair. Keeps lengths, also of rows that are dropped then."""
        made = make(*values, **more)
        read[-1][-1].append(made.length if is_trainer else len(made.token_ids))
        return made

    def read_file(path):
        files.append(os.path.normpath(path))
        return read_rows(path)

    reader, _ = run.reader()
    plain, read_rows, args_class, files = reader.plain_values, reader.read_file, type(args), []
    watched = mock.patch.multiple(script, **{"load_rows": reading, maker: making})
    reads = mock.patch.object(reader, "read_file", read_file)
    try:
        with contextlib.redirect_stdout(printed), watched, reads:
            loaded = load_pairs(run) if is_trainer else script.load_datasets(run.tokenizer, args)
    except Mistake:
        raise
    except Exception as error:
        path, rows, _ = read[-1]
        needs_truth = not is_trainer and not script.uses_reward_model(args)
        for index in map(int, re.findall(r", row (\d+): ", str(error))[:1]):
            data_warnings.check_row(path, index, plain(rows[index]), needs_truth)
        text = describe(error).replace("NotImplementedError: ", "")
        text = text if path in text else f"{path}: {text}"
        due = "docs/rewards.md" if is_trainer else "docs/data.md"
        raise Mistake(f"{text}; {due} says what files and rows are to be") from error
    finally:
        for path, _, lengths in read:
            run.notes += data_warnings.notes_on_lost_rows(
                path, lengths, limit, getattr(args, limit)
            )
    run.train_rows, run.eval_rows = loaded
    run.of_data += re.findall(".+", printed.getvalue())  # the lines: others have more line ends
    for (path, rows, _), made in zip(read, loaded, strict=False):
        rows = [plain(row) for row in rows]
        run.raw_rows += rows
        run.notes += data_warnings.notes_on_rows(run, path, rows, made)
    run.notes += data_warnings.notes_on_held_out(run)


def load_pairs(run):
    """The pairs to train on, and those that are held out. Counts updates, as the script does."""
    script, args = run.script, run.args
    sources = [(args.dataset, args.dataset_config, args.dataset_split)]
    if args.eval_dataset:
        sources.append((args.eval_dataset, args.eval_dataset_config, args.eval_dataset_split))
    log = SimpleNamespace(print=print)
    pairs = [script.load_pairs(log, *source, run.tokenizer, args) for source in sources]
    num_pairs = len(pairs[0]) * args.num_train_epochs
    args.num_updates = num_pairs // args.mini_batch_size if args.mini_batch_size else 0
    args.warm_up_steps = round(args.warmup_ratio * args.num_updates)
    if args.mini_batch_size and args.warm_up_steps >= args.num_updates:
        updates, args.num_updates = args.num_updates, 0  # that is: not known
        raise Mistake(
            f"{updates} updates of {args.mini_batch_size} are too few: {args.warm_up_steps} are "
            f"the warm-up's; see --num_train_epochs, --local_mini_batch_size"
        )
    return *pairs, *[[]] * (2 - len(pairs))


# ----------------------------------------------------------------------------------------- models


def load_model(run, auto_class, path, trained, **config_options):
    """A model by the script's load_model, which refuses what it lacks, without its weights.

    One on the hub is built from its config alone: its weights are not downloaded. So is one here
    that has none, if the run is for another machine.
    """
    script, args = run.reader()

    def build(path, config, **_):
        if getattr(config, "quantization_config", None) is not None:
            raise Mistake("it is quantized; give the model that it was made from")
        options = {"config": config, "attn_implementation": args.attn_implementation}
        report, is_here = {"missing_keys": [], "mismatched_keys": []}, is_local(path)
        if is_here and any(name.endswith((".safetensors", ".bin")) for name in os.listdir(path)):
            # The report names shapes that are others
            options |= {"ignore_mismatched_sizes": True, "output_loading_info": True}
            model, report = auto_class.from_pretrained(path, device_map="meta", **options)
        elif is_here and not run.options.is_elsewhere():
            raise Mistake(
                "it has no weights, such as model.safetensors; a plan for another machine needs "
                "none: say its --num_gpus and --gpu_memory, before the script"
            )
        else:
            if is_here:
                run.notes.append(f"{path} has no weights, so the plan uses its config.json")
            with torch.device("meta"):
                model = auto_class.from_config(**options)
        for name, shape, needed in sorted(report["mismatched_keys"]):
            raise Mistake(f"in its weights {name} is {list(shape)}, and should be {list(needed)}")
        # AutoModelForCausalLM finds the text model in one for images, too. But it makes decoders
        # of encoders such as BERT, as which they were not trained
        saved_as = str(config.architectures)
        if auto_class is AutoModelForCausalLM and re.search("MaskedLM|PreTraining", saved_as):
            raise Mistake(f"it is {saved_as}, and must be a decoder, a causal language model")
        return model, report

    without_weights = SimpleNamespace(from_pretrained=build)
    no_adapter = mock.patch.object(script, "add_adapter", lambda *_: None, create=True)
    with mock.patch.object(script, auto_class.__name__, without_weights), no_adapter:
        return script.load_model(without_weights, path, args, trained, **config_options)


def load_classifier(run, path, is_trained):
    """A reward or value model: causal, with one label. One that is trained may lack its head."""
    script, args = run.reader()
    config = AutoConfig.from_pretrained(path, revision=script.revision_of(path, args))
    is_classifier = "SequenceClassification" in str(config.architectures)
    labels = config.num_labels if is_classifier else int(is_trained)
    if labels != 1:
        raise Mistake(f"it has {labels} labels, and must be a classifier with one")
    model = load_model(run, AutoModelForSequenceClassification, path, is_trained, num_labels=1)
    if not hasattr(model, "score"):  # as of BERT
        raise Mistake(f"a {type(model).__name__} has no head named score")
    is_causal = getattr(model.config, "is_causal", True)
    if not is_causal or getattr(model.config, "use_bidirectional_attention", False):
        raise Mistake("it attends to later tokens; it must be a causal model")
    return model


def check_weights(model):
    """Refuse a policy with weights that do not reach vLLM, or that the learner does not read."""
    if any("expert" in name for name, _ in model.named_parameters()):
        raise Mistake("it is a mixture of experts, whose syncs failed (docs/gpus.md)")
    # Buffers are not sent to vLLM. Those that are not saved are computed there, too
    unread = {name for name, buffer in model.named_buffers() if buffer.is_floating_point()}
    unread &= model.state_dict().keys()
    if getattr(model.get_output_embeddings(), "bias", None) is not None:
        unread.add("the head's bias")  # PolicyModel does not read it
    if unread:
        raise Mistake(f"{', '.join(sorted(unread))} would not be trained")


def check_vocabulary(run, model):
    """Refuse a reward or value model whose embedding lacks an id of the tokenizer.

    Within a family the sizes may differ, because some rows of an embedding are not used.
    """
    size = model.config.get_text_config().vocab_size
    if run.tokenizer and size <= max(run.tokenizer.get_vocab().values()):
        raise Mistake(f"its vocab_size is {size}, too small for the ids of the policy's tokenizer")


def check_models(run):
    """The policy; the reward model, also one of weight 0; what the value model starts from."""
    script, args = run.reader()
    flags = {"model": "model_name_or_path"}
    if args.reward_model_path:
        flags["reward_model"] = "reward_model_path"
    if hasattr(run.args, "value_model_path"):
        starts = ("value_model_path", "reward_model_path", "model_name_or_path")
        flags["value_model"] = next(flag for flag in starts if getattr(args, flag))
    for role, flag in flags.items():
        path = getattr(args, flag)
        with loading(flag, path):
            if role == "model" and not run.trains_reward_model():
                model = load_model(run, AutoModelForCausalLM, path, trained=True)
                check_weights(model)
                with contextlib.suppress(OSError):  # a model may come without one
                    revision = script.revision_of(path, args)
                    generation_config = GenerationConfig.from_pretrained(path, revision=revision)
                    model.generation_config = generation_config
            else:
                model = load_classifier(run, path, is_trained=role != "reward_model")
                if flag != "model_name_or_path":  # of which check_tokens knows
                    check_vocabulary(run, model)
        setattr(run, role, model)
    run.has_models = True


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
        # Where the run starts there may be a random.py, as start_reward_workers says
        safe = os.environ | {"PYTHONSAFEPATH": "1"}
        asked = subprocess.run(command, capture_output=True, encoding="utf-8", env=safe)
    if asked.returncode == 0:
        return ""
    lines = asked.stderr.splitlines()
    told = [line for line in lines if re.match(r"\w*(Error|Exception): |  Value error", line)]
    causes = [line for line in told if line.startswith(("ModuleNotFound", "ImportError"))]
    return (causes or told[-1:] or lines[-1:] or [f"status {asked.returncode}"])[0].strip()


def check_engine(run):
    """Refuse a model that vLLM does not serve."""
    name, options = type(run.model).__name__, run.options
    answer = ask_vllm(run.model.config, run.args.dtype)
    is_missing = "'vllm'" in answer or options.is_elsewhere()
    if is_missing and re.match("ModuleNotFoundError|ImportError", answer):
        run.notes.append(f"vLLM here was not asked whether it has the model: {answer}")
    elif "'torchvision'" in answer and not options.has_gpus():
        raise Mistake(
            f"--model_name_or_path: a {name} does not run on CPUs: vLLM's file for it imports "
            f"torchvision, which scripts/setup.sh removes there"
        )
    elif answer:
        raise Mistake(f"--model_name_or_path: vLLM cannot serve a {name}: {answer}")


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
    run.notes += data_warnings.notes_on_template(run, run.raw_rows, stop_ids)
    limit = getattr(config, "max_position_embeddings", None) or math.inf
    if run.train_rows is not None and run.max_length() > limit:
        flag = "--max_token_length" if run.trains_reward_model() else "--response_length"
        raise Mistake(
            f"the longest row takes {run.max_length()} positions by {flag}; the model has {limit}"
        )


# ----------------------------------------------------------------------------------------- reward


def check_reward(run):
    """Tries the reward. Where it is a function of the user's, that is in a process of its own."""
    check_format(run)
    workers = None
    prompts = [row for row in run.train_rows + run.eval_rows if row.ground_truth is not None]
    with as_main(run.script):
        try:
            workers = start_worker(run)
            sources = try_reward(run, workers, prompts)
        finally:
            run.script.end_children()
            if workers:  # wait for its thread, which closes a pipe that Python's end would write to
                executor, _ = workers.get()
                executor.shutdown()
    judged = [row for row in prompts if row.data_source in sources]
    texts = {row.origin: answer_in(row.ground_truth) for row in judged}
    lost = data_warnings.notes_on_characters(run.tokenizer, "ground truth", texts)
    run.notes += [f"{note}: no response can have it" for note in lost]


def check_format(run):
    """Note prompts after which a response in the R1 format would not get the reward for it."""
    if not run.args.add_r1_style_format_reward:
        return
    lost = {}
    for prompt in run.train_rows:
        response = as_response(run, prompt, in_r1_format(prompt, "b"))
        if not run.script.has_r1_format(response):
            lost[prompt.origin] = response
    count = len(run.train_rows)
    run.format = f"{count - len(lost):,} of {count:,} prompts"
    for origin, response in [*lost.items()][:1]:
        run.notes.append(
            f"{origin}, and so {len(lost):,} of {count:,}: after a prompt that ends with "
            f"{response.prompt.text[-30:]!r} the response {in_r1_format(response.prompt, 'b')!r} "
            f"completes the R1 format, and does not get --r1_style_format_reward. The run reads "
            f"{response.text!r}"
        )


def in_r1_format(prompt, answer):
    """Return a response in the R1 format, without the beginning that the prompt has written.

    Chat templates open <think> for a model that thinks, and close it for one that must not.
    """
    written = re.search(r"(<think>\s*(</think>\s*(<answer>\s*)?)?)?$", prompt.text)[0]
    parts = ["<think>", "a</think> ", "<answer>", f"{answer}</answer>"]
    return "".join(parts[written.count(">") :])


def start_worker(run):
    """Start the process of --reward_fn, and of a fork's --env_fn. Return None if there is neither.

    Otherwise return a queue with this one worker.
    """
    given = vars(run.args)
    given = {flag: given[flag] for flag in ("reward_fn", "env_fn") if flag in given}
    words = " ".join(f"--{flag} {name}" for flag, name in given.items() if name)
    if not words:
        return None
    try:
        return run.script.start_reward_workers(replace(run.args, reward_workers=1))
    except (Exception, SystemExit) as error:
        raise Mistake(f"{words}: {describe(error)}") from error


def is_empty(truth):
    return str(truth).strip() in ("", "[]", "{}")


def rows_to_try(run, prompts):
    """All where the rule is the script's own. Else the first of each kind, and some others.

    A kind is a source with the types of truth and extra_info. Rows without a truth come last.
    """
    if not run.args.reward_fn:
        return prompts
    kinds = {}
    for row in prompts:
        kind = type(row.ground_truth), is_empty(row.ground_truth), type(row.extra_info)
        kinds.setdefault((row.data_source, *kind), row)
    chosen = [*kinds.values(), *prompts[:: math.ceil(len(prompts) / FEW_ROWS) or 1]]
    chosen = {row.origin: row for row in chosen}.values()
    return sorted(chosen, key=lambda row: is_empty(row.ground_truth))


POOR = (
    "{}, bare, in \\boxed{{}} and in the R1 format, scores no more than a wrong or an empty "
    "answer. Does a right one have another form? Of test cases or constraints this says nothing"
)
PARTIAL = "{} scores less than 1, which counts as right: see `right` in docs/rewards.md"


def answer_in(truth):
    """Return the answer that a ground truth names: of a list with one entry, or its JSON, that.

    >>> [answer_in(truth) for truth in ('["16"]', [16], '["4", "5"]', "[", 16)]
    ['16', '16', '["4", "5"]', '[', '16']
    """
    read = truth
    with contextlib.suppress(TypeError, ValueError):
        read = json.loads(truth)
    return str(read[0] if isinstance(read, list) and len(read) == 1 else truth)


def try_reward(run, workers, prompts):
    """Tries the reward on five answers to some prompts, or to all. Returns sources of answers.

    Three ought to be right: the ground truth as it stands, as \\boxed{...}, and in the R1 format.
    One is wrong, the truth of another row, and one is empty. A source of answers has a truth that
    scored more than the empty answer, bare or in a box, so it is no test case.
    """
    start, truths, count, found = time.perf_counter(), {}, 0, {POOR: {}, PARTIAL: {}}
    for prompt in prompts:  # the texts of each source
        truths.setdefault(prompt.data_source, {})[answer_in(prompt.ground_truth)] = prompt
    chosen, sources = rows_to_try(run, prompts), set()
    for prompt in chosen:
        if time.perf_counter() - start > SECONDS_OF_TRIALS:
            run.notes.append(f"the reward is slow: tried on {count} of {len(chosen):,} rows")
            break
        origin, source, truth = prompt.origin, prompt.data_source, answer_in(prompt.ground_truth)
        others = (text for text in truths[source] if text != truth and not is_empty(text))
        wrong_text = next(others, "I do not know.")
        answers = truth, f"\\boxed{{{truth}}}", in_r1_format(prompt, truth), wrong_text, ""
        graded = [score(run, workers, as_response(run, prompt, answer)) for answer in answers]
        *right, wrong, empty = scores = tuple(each.verifiable for each in graded)
        count += 1
        usual = run.answers.setdefault(source, scores)
        if is_empty(prompt.ground_truth) and wrong >= max(usual[:3]) > usual[3]:
            raise Mistake(
                f"{origin}: the ground truth is empty, and any answer is right: "
                f"{wrong_text[:60]!r} scores {wrong:g}"
            )
        if max(right[:2]) > empty:
            sources.add(source)
        if max(right) <= max(wrong, empty):
            found[POOR][origin] = truth
        elif not any(each.reward_metrics.get("right", each.verifiable) >= 1 for each in graded[:3]):
            found[PARTIAL][origin] = truth
    for words, answers in found.items():
        for origin, answer in [*answers.items()][:1]:
            of_all = f"{len(answers):,} of {count:,} that were tried"
            run.notes.append(f"{origin}, and so {of_all}: {words.format(repr(answer[:60]))}")
    return sources


def as_response(run, prompt, answer):
    """An answer as the run would have it: until the first stop token, and decoded."""
    token_ids = run.tokenizer(answer, add_special_tokens=False)["input_ids"]
    ends = [n for n, token_id in enumerate(token_ids, 1) if token_id in run.args.stop_token_ids]
    token_ids = token_ids[: ends[0]] if ends else token_ids
    text = run.script.response_text(run.tokenizer, token_ids, run.args)
    # A response has a stop token at its end
    given = {"prompt": prompt, "token_ids": token_ids if ends else [*token_ids, 0], "text": text}
    return run.script.Response(**given, logprobs=None, stopped=True)


def score(run, workers, response):
    """A response with its score. Mistake: the reward fails on it."""
    script, args, prompt, text = run.script, run.args, response.prompt, response.text
    try:
        if args.reward_fn:
            response = script.call_worker(workers, response, args)
        else:
            value = script.compute_score(prompt.data_source, text, prompt.ground_truth)
            response = replace(response, verifiable=value)
        failure = response.failure
    except Exception as error:
        failure = describe(error)
    if failure:
        raise Mistake(
            f"{prompt.origin}: {args.reward_fn or 'compute_score'} fails on the answer "
            f"{text[:60]!r} (a model may answer anything) to the ground truth "
            f"{prompt.ground_truth!r:.60}, extra_info {prompt.extra_info!r:.60}: {failure}"
        )
    return response


# ------------------------------------------------------------------ folder, checkpoint, disk, hub


def check_run_folder(run):
    """Refuse a run folder with another run, or which cannot be written. Finds the checkpoint."""
    args = run.args
    found = run.script.find_run(args)
    # A script without checkpoints finds the folder alone
    run_dir, checkpoint_dir = found if "resume_from_checkpoint" in vars(args) else (found, None)
    run_name, args.run_name = args.run_name, os.path.relpath(run_dir, args.output_dir)
    named = os.path.join(args.output_dir, run_name or "")
    is_of_another = run_name and os.path.realpath(named) != os.path.realpath(run_dir)
    if is_of_another and checkpoint_dir and (checkpoint_dir / "state.json").exists():
        raise Mistake(f"--resume_from_checkpoint {checkpoint_dir}: it is not of the run {named}")
    run_dir = run_dir.absolute()
    folder = next(folder for folder in (run_dir, *run_dir.parents) if folder.exists())
    can_write = folder.is_dir() and os.access(folder, os.W_OK)
    if not (can_write or run.options.is_elsewhere()):
        raise Mistake(f"--output_dir {args.output_dir}: {folder} is no folder to write to")
    run.run_dir, run.disk, run.checkpoint_dir = run_dir, folder, checkpoint_dir
    if checkpoint_dir is not None:  # prompts may have the day in them
        with contextlib.suppress(OSError, ValueError, KeyError):
            args.start_day = json.loads((run_dir / "args.json").read_bytes())["start_day"]


MAY_DIFFER = {"run_name", "output_dir", "resume_from_checkpoint"}


def check_checkpoint(run):
    """Refuse a checkpoint of another run, or of another script. Finds what has changed."""
    path = run.checkpoint_dir
    try:
        json.loads((path / "state.json").read_bytes())
        saved = json.loads((path.parents[1] / "args.json").read_bytes())
    except (OSError, ValueError) as error:
        raise Mistake(
            f"--resume_from_checkpoint {path}: no checkpoint, or a damaged one ({error}); give an "
            f"older one, latest, or a folder such as output/RUN_NAME/checkpoints/step_100"
        ) from error
    current = json.loads(json.dumps(asdict(run.args)))  # by way of JSON a tuple is a list
    for name in current.keys() - MAY_DIFFER:
        if saved.get(name, "missing") != current[name]:
            run.changed[name] = saved.get(name, "missing"), current[name]
    args = SimpleNamespace(**vars(run.args))  # the script's own options, without ABSENT
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            run.script.read_state(run.run_dir, path, run.train_rows + run.eval_rows, args)
    except ValueError as error:
        raise Mistake(f"{path} is of another run: {error}") from error


def check_disk(run):
    """Refuse a disk that has no room for checkpoints, the final model, and a little besides."""
    disk = run.options.disk
    if not disk and run.options.is_elsewhere():
        run.notes.append(
            "disk space was not checked, because the run is planned for another machine; pass "
            "--disk with its free space in GB"
        )
        return
    free = disk * 1e9 if disk else shutil.disk_usage(run.disk).free
    # Checkpoints that are there already will make way
    there = [path for path in run.run_dir.glob("checkpoints/**/*") if path.is_file()]
    free += sum(path.stat().st_size for path in there)
    number, size = plan.checkpoints_on_disk(run)
    needed = number * size + plan.final_model(run) + 2**25
    if free < needed:
        raise Mistake(
            f"--output_dir {run.args.output_dir} has {in_words(free)} free, but {in_words(needed)} "
            f"are needed, {in_words(number * size)} of them for checkpoints; see --keep_last_n"
        )


def check_shared_memory(run):
    """Note a /dev/shm with little room for NCCL and vLLM's workers, as of a plain container."""
    options = run.options
    if options.is_elsewhere():
        return
    free = shutil.disk_usage("/dev/shm").free
    if options.local_processes() + len(run.args.vllm_gpus) > 1 and free < GIB:
        run.notes.append(
            f"/dev/shm has only {in_words(free)} free. NCCL and vLLM's workers use it to exchange "
            f"data; docker run --ipc=host or --shm-size=8g gives more"
        )


def check_accounts(run):
    """Refuse tracking without a login, and an upload that would be refused."""
    if run.args.with_tracking and os.environ.get("WANDB_MODE") not in ("offline", "disabled"):
        server = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
        if not os.environ.get("WANDB_API_KEY") and not get_netrc_auth(server):
            raise Mistake("--with_tracking: run `wandb login`, or set WANDB_MODE=offline")
    if run.args.push_to_hub:
        check_hub(run)


def check_hub(run):
    """Refuse an upload without its program, by a wrong name, or with a login that may not write."""
    args = run.args
    if not (run.script.PROGRAMS / "push_to_hub.py").exists():
        raise Mistake("--push_to_hub needs scripts/push_to_hub.py beside the script")
    repo, branch = repo_of(vars(args), args.hf_entity), args.hf_repo_revision or args.run_name
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
    owner, slash, _ = repo.rpartition("/")
    wrong = ""
    if branch and (not re.fullmatch(r"\w[\w.+=/-]*", branch) or ".." in branch):
        wrong = f"{branch!r} can be no branch; give another --run_name, or --hf_repo_revision"
    elif slash and owner not in owners:
        wrong = f"{repo} is somebody else's; this login may write to {' and '.join(owners)}"
    elif login.get("auth", {}).get("accessToken", {}).get("role") == "read":
        wrong = "this token may only read; make one that may write"
    if wrong:
        raise Mistake(f"--push_to_hub: {wrong}")


# ----------------------------------------------------------------------------------------- memory


def check_memory(run):
    """Refuse a run that needs more memory than its GPUs have."""
    args, options = run.args, run.options
    if options.gpu_memory is None and torch.cuda.device_count() > 0:
        options.gpu_memory = torch.cuda.get_device_properties(0).total_memory / GIB
    if options.gpu_memory is None or plan.fits(run):
        return
    sizes = [("a learner", plan.learner_needs(run), plan.learner_room(run))]
    if not run.trains_reward_model():
        name = f"vLLM, by --vllm_gpu_memory_utilization {args.vllm_gpu_memory_utilization:g},"
        sizes.append((name, plan.engine_needs(run), plan.engine_room(run)))
    problem = "; ".join(
        f"{name} needs about {in_words(needed)} of its GPU, but can use {in_words(room)}"
        for name, needed, room in sizes
        if needed > room
    )
    helps = "no flags make room; a smaller model may, or GPUs for vLLM alone, if the script has "
    helps += "--vllm_gpus"
    for found in plan.what_fits(run)[:1]:
        helps = f"this fits: {plan.in_flags(*found)}"
    raise Mistake(f"memory: {problem}; {helps}")


# ------------------------------------------------------------------------------------------- plan


def plan_of_data(run):
    """Yield the lines on data, steps and updates."""
    args = run.args
    yield "model", f"{args.model_name_or_path}"
    for line in run.of_data:
        yield "data", line
    if run.train_rows is not None and not run.trains_reward_model():
        text = run.tokenizer.decode(run.train_rows[0].token_ids)
        shown = repr(text) if len(text) <= 120 else f"{text[:50]!r} ... {text[-70:]!r}"
        yield "", f"first prompt as the model reads it: {shown}"
    if args.num_updates == 0:
        return
    if args.num_updates < 100:
        more = "--num_train_epochs" if run.trains_reward_model() else "--total_episodes"
        run.notes.append(
            f"{args.num_updates} optimizer updates are few. Raise {more}, or lower the batch "
            f"sizes, which are per rank"
        )
    if run.trains_reward_model():
        pairs = f"{args.mini_batch_size} of the {len(run.train_rows):,} pairs"
        yield "updates", f"{args.num_updates:,}, each on {pairs}"
        return
    samples = args.number_samples_per_prompt
    batch = f"{args.rollout_batch_size * samples:,} responses ({args.rollout_batch_size:,} prompts "
    yield "steps", f"{args.num_training_steps:,}, each on {batch}x {samples})"
    if run.train_rows is not None:
        count = len(run.train_rows)
        passes = args.num_training_steps * args.rollout_batch_size / count
        number = f"{passes:,.0f}" if passes >= 10 else f"{passes:.2g}"
        yield "", f"{number} epochs of the {count:,} prompts"
        if args.rollout_batch_size > count:
            run.notes.append(
                f"a step takes {args.rollout_batch_size:,} prompts, but there are {count:,}, so a "
                f"step repeats prompts. Lower --local_rollout_batch_size, or raise "
                f"--number_samples_per_prompt instead"
            )
        length = f"{run.max_length():,} tokens, {args.response_length:,} of them for the response"
        yield "", f"a row has up to {length}"
    if run.eval_rows:
        count = min(args.num_evals, args.num_training_steps // 2)
        yield "", f"{count} evaluations on {len(run.eval_rows):,} prompts, and one at the end"
    updates = args.num_updates // args.num_training_steps
    each = f"{updates} per step, each on {args.mini_batch_size} responses"
    yield "updates", f"{args.num_updates:,}, which are {each}"


def plan_of_memory(run):
    """Yield the lines on memory, by part and in sum, and on the disk."""
    if not run.knows_sizes():
        return
    args, room = run.args, plan.learner_room(run)
    largest, parts = plan.learner_memory(run)
    limit = "" if room is None else f" of {in_words(room)} available"
    yield "memory", f"a learner needs about {in_words(plan.learner_needs(run))}{limit}"
    yield "", f"peak: {largest}"
    for name, size in parts.items():
        yield "", f"{in_words(size):>10}  {name}"
    for line in plan.advice(run):
        yield "", line
    if run.options.local_processes() > 1:
        whole = in_words(plan.host_memory(run))
        yield "", f"a node needs {whole} of host memory, because each learner loads a whole model"
    if not run.trains_reward_model():
        least = plan.engine_needs(run) if run.options.has_gpus() else plan.engine_memory(run)
        share = f"{args.vllm_gpu_memory_utilization:.0%} (--vllm_gpu_memory_utilization)"
        yield "", f"vLLM needs at least {in_words(least)}; of GPUs it gets {share}"
        if run.shares_gpus() and run.options.gpu_memory:
            for line in plan.room_for_responses(run):
                yield "", line
    number, size = plan.checkpoints_on_disk(run)
    steps = getattr(args, "num_training_steps", args.num_updates)
    model = in_words(plan.final_model(run))
    yield "disk", f"{in_words(number * size)} for {number} checkpoints, {model} for the final model"
    if not number and "save_freq" in vars(args):
        yield "", f"--save_freq {args.save_freq} writes no checkpoint in {steps:,} steps, so a run"
        yield "", "that ends early cannot be resumed"


def plan_of_reward(run):
    """Yield the lines on what scores consist of, and what the reward returned in trials."""
    args = run.args
    if run.trains_reward_model():
        return
    if args.apply_verifiable_reward:
        yield "reward", f"{args.verification_reward:g} x {args.reward_fn or 'compute_score'}"
    if run.script.uses_reward_model(args):
        yield "reward", f"{args.reward_model_multiplier:g} x the reward model's score"
    sources = {}  # of the same scores
    for source, scores in run.answers.items():
        sources.setdefault(scores, []).append(str(source))
    for (bare, boxed, in_format, wrong, empty), names in sources.items():
        shown = ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")
        yield "", f"tried on examples of {shown}: the ground truth scores {bare:g}"
        yield "", f"({boxed:g} in \\boxed{{}}, {in_format:g} in the R1 format),"
        yield "", f"a wrong answer {wrong:g}, an empty answer {empty:g}"
    if run.format:
        yield "reward", f"{args.r1_style_format_reward:g} x the R1 format, after {run.format}"


def plan_of_checkpoint(run):
    """Yield the lines on the checkpoint that the run resumes."""
    if run.checkpoint_dir is None:
        if run.args.resume_from_checkpoint and run.run_dir:
            yield "resumes", f"no checkpoint: {run.run_dir} has none, so a new run begins there"
        return
    yield "resumes", str(run.checkpoint_dir)
    step = run.script.step_of
    checkpoints = run.script.list_checkpoints(run.run_dir)
    if newer := [path.name for path in checkpoints if step(path) > step(run.checkpoint_dir)]:
        yield "", f"newer checkpoints will be removed: {', '.join(newer)}"
    for name, (was, now) in run.changed.items():
        yield "", f"--{name} was {was} and is now {now}"


def print_plan(run):
    """Print what the run will do, as far as it is known."""
    print(f"Plan of {run.script.__name__}.py")
    parts = [plan_of_data, plan.plan_of_processes, plan_of_memory, plan_of_reward]
    for part in [*parts, plan_of_checkpoint]:
        try:
            for name, text in part(run):
                print(f"  {name:<9}{printable(text)}")
        except Exception as error:  # a fork may lack a function, as in check
            run.notes.append(f"{part.__name__} failed: {describe(error)}")
    for note in dict.fromkeys(run.notes):
        print(f"  note     {printable(note)}")


def launch_command(options, words):
    """Return the command that launches what was checked, with the launcher beside this Python.

    Without a --config_file it names the file of scripts/accelerate that does the same.
    """
    learners, machines = options.num_processes, options.num_machines
    launcher = Path(sys.executable).with_name("accelerate")
    file = Path(__file__).with_name("accelerate") / ("ddp.yaml" if learners > 1 else "one_gpu.yaml")
    is_on_path = shutil.which("accelerate") == str(launcher)
    command = ["accelerate" if is_on_path else os.path.relpath(launcher), "launch", "--quiet"]
    # The launcher does not expand ~
    command += ["--config_file", os.path.expanduser(options.config_file or os.path.relpath(file))]
    flags = f"--num_processes {learners}"
    if machines > 1:
        flags += f" --num_machines {machines} --machine_rank 0 --main_process_ip HOST"
        flags += " --main_process_port 29500"
    return shlex.join(command + flags.split() + words)


# ------------------------------------------------------------------------------------------- main


def one_line(mistake):
    """Return a mistake as one line that a terminal can show."""
    line = printable(" ".join(str(mistake).split()))
    if len(line) > 450:
        line = f"{line[:330]} ... {line[-115:]}"
    return f"preflight: error: {line}"


def check(run):
    """Run all checks; return the mistakes, of each check the first."""
    mistakes = []

    def attempt(part, *needed):
        if None not in needed and False not in needed:
            try:
                part(run)
            except Exception as error:  # for example, a fork may lack a function
                mistakes.append(describe(error))

    is_trainer = run.trains_reward_model()
    attempt(check_sharding)
    attempt(check_arguments)
    attempt(check_tokenizers)
    attempt(check_run_folder)
    attempt(check_data, run.tokenizer)
    attempt(check_models)
    attempt(check_engine, not is_trainer, run.model)
    attempt(check_head, not is_trainer, run.model)
    attempt(check_tokens, run.tokenizer, run.model)
    attempt(check_reward, not is_trainer, run.train_rows)
    attempt(check_checkpoint, run.args.num_updates > 0, run.train_rows, run.checkpoint_dir)
    attempt(check_disk, run.run_dir, run.knows_sizes())
    attempt(check_shared_memory, not is_trainer, run.knows_sizes())
    attempt(check_accounts)
    attempt(check_memory, run.knows_sizes())
    return mistakes


def main(words):
    """Check a run, print its plan, and return the exit status."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    # Refuse code that comes with a model, without asking
    transformers.dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0
    split = next((index for index, word in enumerate(words) if word.endswith(".py")), len(words))
    options = tyro.cli(Options, args=words[:split], description=__doc__, use_underscores=True)
    try:
        if split == len(words):
            raise Mistake("name the script: preflight.py [OPTIONS] script.py FLAGS...")
        script = load_script(words[split])
        name, flags = Path(words[split]).name, " ".join(words[split:])
        if name in fork.SCRIPTS and re.search(" --lora[-_]", flags):
            raise Mistake(
                f"--lora_rank: {name} has no adapters; write its fork, which has them: python "
                f"scripts/fork.py lora {fork.file_of('lora', name)} --script {name}"
            )
        read_config_file(options)
    except Mistake as error:
        print(one_line(error), file=sys.stderr)
        return 2
    name = f"preflight.py [FLAGS OF THE LAUNCH] {script.__name__}.py"
    args = tyro.cli(script.Args, prog=name, args=words[split + 1 :], use_underscores=True)
    if options.num_gpus is None:
        options.num_gpus = torch.cuda.device_count()
    run = Run(script, options, args)
    if not (is_local(args.model_name_or_path) and is_local(args.dataset)) and not hub_answers():
        run.notes.append("the Hub does not answer, so its cache is used")
    mistakes = check(run)
    print_plan(run)
    sys.stdout.flush()
    # Several parts read a model, and only the first one's words are shown
    first = {mistake.partition(": ")[0]: mistake for mistake in reversed(mistakes)}
    for mistake in reversed(first.values()):
        print(one_line(mistake), file=sys.stderr)
    if mistakes:
        return 2
    others = ", and on every other node with its own --machine_rank"
    where = f" on HOST{others}" if options.num_machines > 1 else ""
    notes = f", {len(dict.fromkeys(run.notes))} notes" if run.notes else ""
    print(f"No errors{notes}. Launch{where}:\n{launch_command(options, words[split:])}")
    return 0


if __name__ == "__main__":
    # Beside the script, or, in another process, the file of a reward
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    forget_neighbours()
    sys.exit(main(sys.argv[1:]))
