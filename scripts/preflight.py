r"""Check a run before it is launched, and print its plan, even on a laptop without the GPUs.

    python scripts/preflight.py --config_file scripts/accelerate/one_gpu.yaml SCRIPT FLAGS...
    python scripts/preflight.py --config_file scripts/accelerate/ddp.yaml [--num_processes 6] \
        [--num_gpus 8] [--gpu_memory 80] SCRIPT FLAGS...

SCRIPT is ppo_sync.py, ppo_vllm_async.py, grpo_vllm_async.py, scripts/train_reward_model.py, or a
fork of one. FLAGS are its flags. The script is loaded as a module, and its own functions read the
tokenizer, the data and the checkpoint, so a fork is checked with its changes. The preflight looks
for what would fail late or silently.

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
from dataclasses import asdict, dataclass, field, replace
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
from internal.resource_plan import GIB, format_bytes
from requests.utils import get_netrc_auth
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
)


@dataclass
class Options:
    """Where the run will be launched."""

    config_file: str | None = None
    """File for accelerate launch. Defaults to the one that `accelerate config` wrote, if any."""
    num_processes: int | None = None
    """Learner processes on all nodes. Defaults to the number in config_file, or to 1."""
    num_machines: int | None = None
    """Nodes. Defaults to the number in config_file, or to 1."""
    num_gpus: int | None = None
    """GPUs of each node. Defaults to those of this machine."""
    gpu_memory: float | None = None
    """Memory of each GPU in GiB. Defaults to that of this machine's GPUs."""
    disk: float | None = None
    """Free space in GB on the disk of --output_dir. Defaults to what is free on this machine."""
    variables: tyro.conf.Suppress[dict] = field(default_factory=os.environ.copy)
    """Environment of the run, with the variables that accelerate launch adds."""

    def is_set(self, name):
        """Return whether a variable of accelerate's is on."""
        return str(self.variables.get(name)).lower() in ("1", "true")

    def num_shards(self):
        """Return how many ranks share a model, or 0 if each has a copy."""
        return self.num_processes if self.is_set("ACCELERATE_USE_FSDP") else 0

    def local_processes(self):
        """Return the learner processes of a node."""
        return self.num_processes // self.num_machines

    def has_gpus(self):
        """Return whether the run will have GPUs."""
        return bool(self.num_gpus or self.gpu_memory)

    def is_elsewhere(self):
        """Return whether the run is for another machine, because this one lacks its GPUs."""
        here = torch.cuda.device_count()
        return self.num_gpus > here or (self.has_gpus() and not here)


# Options that a script may lack, because only a fork has them, or because a copy is without a part
# (docs/changing_a_script.md, "What can be deleted"). With these values they have no effect
ABSENT = {"resume_from_checkpoint": None, "vllm_gpus": (), "vllm_tensor_parallel_size": 1}
ABSENT |= dict.fromkeys(("async_mode", "keep_last_n", "lora_rank", "micro_batch_tokens"), 0)
ABSENT |= dict.fromkeys(("add_r1_style_format_reward", "push_to_hub", "save_freq"), 0)


@dataclass
class Run:
    """What the checks have found out about a run. None means unknown, or not used."""

    script: ModuleType
    options: Options
    args: Any  # as given, then as the script completes them. num_updates is 0 until it is known
    tokenizer: Any = None
    raw_rows: list = field(default_factory=list)  # dictionaries, of which the next are made
    train_rows: list | None = None  # the script's Prompts, or the reward model's Pairs
    eval_rows: list = field(default_factory=list)  # those that are evaluated
    data_lines: list = field(default_factory=list)  # of the plan, one for each dataset
    model: Any = None  # without its weights, like the next two
    value_model: Any = None
    reward_model: Any = None
    has_models: bool = False  # whether all of them have been loaded
    # By data source: the scores of five answers to the first of its rows that was tried. Three
    # should be correct, one is incorrect, and one is empty
    answers: dict = field(default_factory=dict)
    format: str = ""  # after how many prompts a response in the R1 format gets its reward
    run_dir: Path | None = None
    disk: Path | None = None  # run_dir, or the nearest folder above it that exists
    checkpoint_dir: Path | None = None
    changed: dict = field(default_factory=dict)  # arguments since the checkpoint: (was, is)
    warnings: list = field(default_factory=list)  # what may spoil the run
    notes: list = field(default_factory=list)  # what was not checked, or is not used

    def __post_init__(self):
        """Let every check read the options that the script lacks. vars(args) stays as it is."""
        for name, value in ABSENT.items():
            if not hasattr(self.args, name):
                setattr(type(self.args), name, value)

    def trains_reward_model(self):
        return hasattr(self.script, "load_pairs")

    def reader(self):
        """Return the script that loads tokenizers and models, and the arguments for it."""
        if self.trains_reward_model():
            return self.script.ppo, self.script.as_ppo_args(self.args)
        return self.script, self.args

    def is_colocated(self):
        """Return whether a vLLM engine and a learner are on the same GPU."""
        has_engines = not self.trains_reward_model()
        return has_engines and self.options.has_gpus() and not self.args.vllm_gpus

    def max_length(self):
        """Return the tokens of the longest prompt with its response, or of the longest pair."""
        rows = self.train_rows + self.eval_rows
        if self.trains_reward_model():
            return max(pair.length for pair in rows)
        return max(len(prompt.token_ids) for prompt in rows) + self.args.response_length

    def knows_sizes(self):
        """Return whether all is known that memory depends on."""
        return self.args.num_updates > 0 and self.train_rows is not None and self.has_models


def describe(error):
    """Return the text of an error, after its type if the text alone says too little."""
    if type(error) in (Mistake, ValueError, NotImplementedError):
        return str(error)
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def is_local(path):
    """Return whether a model or a dataset is on this machine, and not on the Hub."""
    return os.path.exists(path)


@contextlib.contextmanager
def loading(flag, path):
    """Turn any error inside into a Mistake about the file, dataset or model that a flag names."""
    try:
        yield
    except Exception as error:
        text = model_paths.trouble_with(flag, path) or describe(error)
        is_of_hub = flag not in model_paths.FILES and model_paths.may_be_on_the_hub(path)
        if is_of_hub and isinstance(error, OSError) and not hub_answers():
            text = "there is no such folder and no copy in the cache, and the Hub does not answer"
        elif is_of_hub and not isinstance(error, Mistake):
            text = f"there is no such folder, and nothing on the Hub that you may read ({text})"
        raise Mistake(f"--{flag} {path}: {text}") from error


# --------------------------------------------------------------------------- script and arguments


def forget_neighbours():
    """Unload the modules beside this file.

    A script or a reward imports modules beside its own file, which may have the same names.
    """
    here = sys.path.pop(0)
    for name, module in [*sys.modules.items()]:
        if name != "__main__" and str(getattr(module, "__file__", "")).startswith(here):
            del sys.modules[name]


def load_script(path):
    """Load the script as a module, by the name that it has in processes that a run starts."""
    sys.path.insert(0, str(Path(path).resolve().parent))
    try:
        spec = importlib.util.spec_from_file_location("__mp_main__", os.path.abspath(path))
        script = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(script)
        script.Args()
    except (Exception, SystemExit) as error:
        what = "is not one of the training scripts, nor a fork of one"
        raise Mistake(f"{path} {what} ({describe(error)})") from error
    script.__name__, script.__spec__ = Path(path).stem, None  # like a file that Python runs
    return script


def read_config_file(options):
    """Complete the options as accelerate launch does, from --config_file or its default file."""
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
                config["num_processes"] = 1  # the launcher ignores the number in the file
        options.num_processes = options.num_processes or int(config.get("num_processes", 1))
        options.num_machines = options.num_machines or int(config.get("num_machines", 1))
    except Exception as error:
        what = "is not a valid config of accelerate"
        raise Mistake(f"--config_file {path} {what} ({describe(error)})") from error


def check_sharding(run):
    """Refuse launches that the script does not support, or that start fewer ranks than asked."""
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
            f"{path or 'the environment'} asks accelerate for a launch that the script does not "
            f"support; launch with --config_file scripts/accelerate/one_gpu.yaml, ddp.yaml or, if "
            f"the script shards models, fsdp2.yaml, which has fsdp_version 2"
        )


# Numbers that must be above 0. All others may be 0
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


def check_values(run):
    """Refuse numbers out of range, and a ~ that is not expanded. Warn of flags without effect."""
    args = run.args
    for name, value in vars(args).items():
        if isinstance(value, str) and value.startswith("~"):
            raise Mistake(f"--{name} {value}: {model_paths.TILDE}")
        # By its type, because a bool is an int. NaN is not at least 0 either
        if type(value) in (int, float) and not value >= LEAST.get(name, 0):
            raise Mistake(f"--{name} is {value}; it must be at least {LEAST.get(name, 0):g}")
    for name, needed in NEED_ANOTHER.items():
        is_given = name in vars(args) and getattr(args, name) != getattr(type(args), name)
        if is_given and not getattr(args, needed, True):
            run.warnings.append(f"--{name} does nothing without --{needed}")


def check_gpus(run):
    """Refuse GPUs that a node does not have, or that cannot be divided among its engines."""
    num_gpus, learners = run.options.num_gpus, run.options.local_processes()
    gpus, size = run.args.vllm_gpus, run.args.vllm_tensor_parallel_size
    needs_gpus = num_gpus > 0 or gpus
    if needs_gpus and max([learners - 1, *gpus]) >= num_gpus:
        raise Mistake(
            f"a node has {num_gpus} GPUs, too few for {learners} learners or for --vllm_gpus "
            f"{gpus}; before the script, pass another --num_processes or, for another machine, its "
            f"--num_gpus"
        )
    free_gpus = {gpu for gpu in gpus if gpu >= learners}
    num_engines = len(free_gpus) // size
    is_divided = num_engines * size == len(gpus) and 0 < num_engines <= learners
    if (gpus or size > 1) and not is_divided:
        raise Mistake(
            f"--vllm_gpus {gpus} must be GPUs without a learner (not the first {learners}), each "
            f"named once, with --vllm_tensor_parallel_size ({size}) for each engine, and no more "
            f"engines than learners"
        )
    idle = num_gpus - learners - len(gpus)
    if idle > 0:
        run.warnings.append(f"{idle} of a node's {num_gpus} GPUs are not used; see --num_processes")


def check_arguments(run):
    """Refuse arguments that do not fit together, and complete them as the script does."""
    args, options = run.args, run.options
    check_values(run)
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
        args.num_updates = 0  # so that no later check counts on them
        raise Mistake(
            f"--warm_up_steps {args.warm_up_steps} must be less than the policy's updates, which "
            f"are {max(0, updates)}; raise --total_episodes or lower --value_warmup_steps, if the "
            f"script has it"
        )
    warms = ("value_warmup_steps", "value_model_path", "reward_model_path")
    if getattr(args, "lam", 1) < 1 and not any(getattr(args, name) for name in warms):
        run.warnings.append(
            f"--lam {args.lam:g} with an untrained value model makes responses collapse to a few "
            f"tokens. Add --value_warmup_steps 20"
        )
    if args.lora_rank:
        check_adapters(run)


def check_adapters(run):
    """Refuse what vLLM's adapters cannot do on a GPU. Warn of a learning rate of full training."""
    args, options = run.args, run.options
    if options.has_gpus() and args.dtype == "float32":
        raise Mistake("--lora_rank on a GPU needs --dtype bfloat16, because of vLLM's kernels")
    if args.learning_rate <= 1e-6:
        run.warnings.append(
            f"--learning_rate {args.learning_rate:g} is low, because adapters need about ten times "
            f"the learning rate of full training"
        )
    if args.lora_rank <= 32 or not options.has_gpus() or "TRITON_PTXAS_PATH" in options.variables:
        return
    limit = (
        f"--lora_rank {args.lora_rank}: above 32, vLLM 0.32 may compute wrong results on an H100 "
        f"or H200 (vllm issue 48590), unless TRITON_PTXAS_PATH is an assembler of CUDA 13.3 or "
        f"later"
    )
    if options.is_elsewhere():
        run.warnings.append(limit)
    elif torch.cuda.get_device_capability() == (9, 0):
        raise Mistake(limit)


# -------------------------------------------------------------------------------- tokenizer, data


def load_tokenizer(run, flag):
    """Return the tokenizer that a flag names. Refuse one without files of its own."""
    script, args = run.reader()
    path = getattr(args, flag)
    with loading(flag, path):
        tokenizer = AutoTokenizer.from_pretrained(path, revision=script.revision_of(path, args))
        # Without these files transformers makes a tokenizer that knows only special tokens
        if not tokenizer("1 a", add_special_tokens=False)["input_ids"]:
            raise Mistake("there is no tokenizer, such as tokenizer.json")
    return tokenizer


def check_token_ids(run):
    """Refuse a --tokenizer_name_or_path that gives tokens other ids than the model's tokenizer."""
    tokenizer = load_tokenizer(run, "tokenizer_name_or_path")
    model_ids = {}
    with contextlib.suppress(Mistake):  # the model may come without a tokenizer
        model_ids = load_tokenizer(run, "model_name_or_path").get_vocab()
    # Added tokens may differ if no text contains them
    unused = tokenizer.get_added_vocab().keys() - {tokenizer.eos_token}
    template = str(tokenizer.chat_template)
    unused = {token for token in unused if token not in model_ids or token not in template}
    ids = {token: i for token, i in tokenizer.get_vocab().items() if token not in unused}
    differing = [token for token, i in ids.items() if model_ids.get(token, i) != i]
    if differing:
        raise Mistake(
            f"--tokenizer_name_or_path {run.args.tokenizer_name_or_path}: the model would misread "
            f"{len(differing):,} tokens, which have other ids in its own tokenizer, such as "
            f"{differing[0]!r}"
        )


def check_tokenizers(run):
    """Load the tokenizer as the script does. Refuse one with which the model misreads texts."""
    script, args = run.reader()
    if args.tokenizer_name_or_path:
        check_token_ids(run)
    else:
        load_tokenizer(run, "model_name_or_path")
    flags = [flag for flag in ("reward_model_path", "value_model_path") if getattr(args, flag, "")]
    templates = {flag: load_tokenizer(run, flag).chat_template for flag in flags}
    if args.chat_template:
        with loading("chat_template", args.chat_template):
            if "{" not in Path(args.chat_template).read_text("utf-8"):
                raise Mistake("this is not a Jinja template, because it has no {")
    tokenizer = script.load_tokenizer(args)
    for flag, template in templates.items():
        if template not in (None, tokenizer.chat_template):
            run.warnings.append(f"--{flag} has another chat template, which is not used")
    stop_token = tokenizer.eos_token if run.args.stop_token == "eos" else run.args.stop_token
    if run.args.stop_token and stop_token not in tokenizer.get_vocab():
        raise Mistake(f"--stop_token {run.args.stop_token}: the tokenizer has no such token")
    if run.trains_reward_model():
        run.args.stop_token_id = tokenizer.get_vocab()[stop_token]
    run.tokenizer = tokenizer


def check_split(path, config, split):
    """Refuse a split that load_rows ignores, because local files have no splits in their names."""
    folder = Path(path, config or "")
    names = [path]
    if folder.is_dir():
        files = [file for file in folder.rglob("*") if file.suffix in (".jsonl", ".parquet")]
        names = [str(file.relative_to(folder)) for file in files]
        if any("train" in name or "test" in name for name in names):
            return
    if not names or any(split not in name for name in names):
        raise Mistake(f"its files have no split {split} in their names; leave the split out")


def load_any_length(run, source, is_eval):
    """Return the Prompts or Pairs that the script makes of a dataset, and their lengths.

    The script reads them without its limit, so that the lengths of those that it drops are known.
    """
    script, args = run.script, copy.copy(run.args)
    try:
        if run.trains_reward_model():
            args.max_token_length = sys.maxsize
            log = SimpleNamespace(print=run.warnings.append)
            pairs = script.load_pairs(log, *source, run.tokenizer, args)
            return pairs, [pair.length for pair in pairs]
        args.max_prompt_token_length = sys.maxsize
        with contextlib.redirect_stdout(io.StringIO()):
            prompts = script.load_prompts(*source, run.tokenizer, args, is_eval)
        return prompts, [len(prompt.token_ids) for prompt in prompts]
    except Exception as error:
        page = "docs/rewards.md" if run.trains_reward_model() else "docs/data.md"
        text = describe(error)
        text = text if source[0] in text else f"{source[0]}: {text}"
        raise Mistake(f"{text}; {page} says what files and rows must contain") from error


def load_dataset(run, flag):
    """Return the Prompts or Pairs of a dataset that the run will use. Warn of odd rows."""
    script, args, is_eval = run.script, run.args, flag == "eval_dataset"
    path, config, split = (getattr(args, flag + part) for part in ("", "_config", "_split"))
    with loading(flag, path):
        rows = script.load_rows(path, config, split)
        if is_local(path) and split not in (None, getattr(type(args), f"{flag}_split")):
            check_split(path, config, split)
        if not rows:
            raise Mistake(f"no row was read of the split {split}; the dataset is empty")
    run.warnings += data_warnings.notes_on_files(os.path.join(path, config or ""), split)
    loaded, lengths = load_any_length(run, (path, config, split), is_eval)

    kind, empty, limit_flag = "prompts", "empty", "max_prompt_token_length"
    if run.trains_reward_model():
        kind, empty, limit_flag = "pairs", "empty or equal", "max_token_length"
    limit = getattr(args, limit_flag)
    kept = [row for row, length in zip(loaded, lengths, strict=True) if length <= limit]
    num_empty, num_long = len(rows) - len(loaded), len(loaded) - len(kept)
    if kind == "prompts":  # load_pairs itself reports the others
        lengths += [0] * num_empty
    run.warnings += data_warnings.notes_on_lost_rows(path, lengths, limit_flag, limit)
    dropped = f"dropped: {num_empty:,} {empty}, {num_long:,} longer than --{limit_flag} {limit}"
    counts = (
        f"{len(kept):,} {kind} of {path} ({dropped if num_empty + num_long else 'none dropped'})"
    )
    if not kept:
        raise Mistake(f"--{flag} {path}: {counts}")
    run.data_lines.append(("eval data" if is_eval else "train data", counts))

    if is_eval and kind == "prompts" and 0 < args.num_eval_prompts < len(kept):
        drawn = script.draw_prompts(len(kept), 0, args.num_eval_prompts, seed=0)
        kept = [kept[index] for index in drawn]
    rows = [script.plain_values(row) for row in rows]
    run.raw_rows += rows
    run.warnings += data_warnings.notes_on_rows(run, path, rows, kept)
    return kept


def check_data(run):
    """Read the rows to train on and the held-out rows, as the script does."""
    train_rows, eval_rows = load_dataset(run, "dataset"), []
    if run.args.eval_dataset:
        eval_rows = load_dataset(run, "eval_dataset")
    run.train_rows, run.eval_rows = train_rows, eval_rows
    run.warnings += data_warnings.notes_on_held_out(run)
    if run.trains_reward_model():
        count_updates(run)


def count_updates(run):
    """Count the updates of a reward model as the script does. Refuse a run that only warms up."""
    args = run.args
    if args.mini_batch_size == 0:  # which check_values has refused
        return
    num_updates = len(run.train_rows) * args.num_train_epochs // args.mini_batch_size
    args.warm_up_steps = round(args.warmup_ratio * num_updates)
    if args.warm_up_steps >= num_updates:
        raise Mistake(
            f"{num_updates} updates of {args.mini_batch_size} pairs are too few, because "
            f"{args.warm_up_steps} are warm-up; raise --num_train_epochs or lower "
            f"--local_mini_batch_size"
        )
    args.num_updates = num_updates


# ----------------------------------------------------------------------------------------- models


def load_model(run, auto_class, path, is_trained, **config_options):
    """Return a model as the script loads it, but without its weights.

    A model on the Hub is built from its config, so that its weights are not downloaded. So is a
    model that is here without weights, if the run is for another machine.
    """
    script, args = run.reader()
    revision = script.revision_of(path, args)
    config = AutoConfig.from_pretrained(path, revision=revision, **config_options)
    if getattr(config, "quantization_config", None) is not None:
        raise Mistake("the model is quantized; give the model that it was made from")
    # AutoModelForCausalLM also makes decoders of encoders such as BERT
    saved_as, is_policy = str(config.architectures), auto_class is AutoModelForCausalLM
    if is_policy and re.search("MaskedLM|PreTraining", saved_as):
        raise Mistake(f"the model is {saved_as}, and must be a decoder, a causal language model")
    options = {"config": config, "attn_implementation": args.attn_implementation}
    names = os.listdir(path) if is_local(path) else []
    if any(name.endswith((".safetensors", ".bin")) for name in names):
        # Without this option an error names none of the shapes that differ
        options |= {"ignore_mismatched_sizes": True, "output_loading_info": True}
        model, report = auto_class.from_pretrained(path, device_map="meta", **options)
        for name, shape, needed in sorted(report["mismatched_keys"]):
            raise Mistake(f"the shape of {name} is {list(shape)}, but must be {list(needed)}")
        missing = set(report["missing_keys"]) - ({"score.weight"} if is_trained else set())
        if missing:
            raise Mistake(f"the checkpoint lacks {', '.join(sorted(missing))}")
    else:
        if is_local(path) and not run.options.is_elsewhere():
            raise Mistake(
                "there are no weights, such as model.safetensors. You can plan without them for "
                "another machine, whose --num_gpus and --gpu_memory stand before the script"
            )
        if is_local(path):
            run.notes.append(f"{path} has no weights, so the plan uses its config.json")
        with torch.device("meta"):
            model = auto_class.from_config(**options)
    if is_policy:  # as in the script's load_model, because vLLM starts from this config
        head = model.get_output_embeddings()
        model.config.tie_word_embeddings = head.weight is model.get_input_embeddings().weight
        model.config.architectures = [type(model).__name__]
    return model


def load_policy(run):
    """Return the policy without its weights. Refuse one that does not train as it samples."""
    path = run.args.model_name_or_path
    with loading("model_name_or_path", path):
        model = load_model(run, AutoModelForCausalLM, path, is_trained=True)
        check_weights(model)
        with contextlib.suppress(OSError):  # a model may come without a generation config
            revision = run.script.revision_of(path, run.args)
            model.generation_config = GenerationConfig.from_pretrained(path, revision=revision)
    return model


def load_classifier(run, flag, is_trained):
    """Return a reward or value model without its weights. One that is trained may lack its head."""
    script, args = run.reader()
    path = getattr(args, flag)
    with loading(flag, path):
        config = AutoConfig.from_pretrained(path, revision=script.revision_of(path, args))
        is_classifier = "SequenceClassification" in str(config.architectures)
        labels = config.num_labels if is_classifier else int(is_trained)
        if labels != 1:
            raise Mistake(f"the model has {labels} labels, and must be a classifier with one")
        classifier = AutoModelForSequenceClassification
        model = load_model(run, classifier, path, is_trained, num_labels=1)
        is_causal = getattr(model.config, "is_causal", True)
        if not is_causal or getattr(model.config, "use_bidirectional_attention", False):
            raise Mistake("the model attends to later tokens, and must be causal")
        # Sizes may differ within a family, because some rows of an embedding are not used.
        # check_tokens compares the model that belongs to the tokenizer
        size = model.config.get_text_config().vocab_size
        ids = run.tokenizer.get_vocab().values() if run.tokenizer else [0]
        if flag != "model_name_or_path" and size <= max(ids):
            raise Mistake(f"vocab_size is {size}, too small for the ids of the policy's tokenizer")
    return model


def check_weights(model):
    """Refuse a policy with weights that do not reach vLLM, or that the learner does not read."""
    if any("expert" in name for name, _ in model.named_parameters()):
        raise Mistake("the model is a mixture of experts, whose weight sync failed (docs/gpus.md)")
    # Buffers are not sent to vLLM. It computes those that are not saved
    unread = {name for name, buffer in model.named_buffers() if buffer.is_floating_point()}
    unread &= model.state_dict().keys()
    if getattr(model.get_output_embeddings(), "bias", None) is not None:
        unread.add("the head's bias")  # PolicyModel does not read it
    if unread:
        raise Mistake(f"{', '.join(sorted(unread))} would not be trained")


def check_models(run):
    """Load the policy, the reward model, and the model that the value model starts from."""
    args = run.args
    if run.trains_reward_model():
        run.model = load_classifier(run, "model_name_or_path", is_trained=True)
        run.has_models = True
        return
    run.model = load_policy(run)
    if args.reward_model_path:  # also with a multiplier of 0
        run.reward_model = load_classifier(run, "reward_model_path", is_trained=False)
    if hasattr(args, "value_model_path"):
        starts = ("value_model_path", "reward_model_path", "model_name_or_path")
        flag = next(flag for flag in starts if getattr(args, flag))
        run.value_model = load_classifier(run, flag, is_trained=True)
    run.has_models = True


# What the engine does first: it reads the config, and finds and imports the model's file
ASK_VLLM = """
import sys
from vllm.config import ModelConfig
config = ModelConfig(model=sys.argv[1], skip_tokenizer_init=True, dtype=sys.argv[2])
sys.exit(config.runner_type != "generate" and "it would run as " + config.runner_type)
"""


def ask_vllm(config, dtype):
    """Return why vLLM cannot serve a model, in vLLM's words, or "" if it can.

    vLLM is asked in a process of its own.
    """
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        command = [sys.executable, "-c", ASK_VLLM, folder, dtype]
        # The working directory may contain a file such as random.py, which must not be imported
        safe = os.environ | {"PYTHONSAFEPATH": "1"}
        done = subprocess.run(command, capture_output=True, encoding="utf-8", env=safe)
    if done.returncode == 0:
        return ""
    lines = done.stderr.splitlines()
    errors = [line for line in lines if re.match(r"\w*(Error|Exception): |  Value error", line)]
    imports = [line for line in errors if line.startswith(("ModuleNotFound", "ImportError"))]
    return (imports or errors[-1:] or lines[-1:] or [f"status {done.returncode}"])[0].strip()


def check_engine(run):
    """Refuse a model that vLLM does not serve."""
    name, options = type(run.model).__name__, run.options
    answer = ask_vllm(run.model.config, run.args.dtype)
    may_be_elsewhere = "'vllm'" in answer or options.is_elsewhere()
    if may_be_elsewhere and re.match("ModuleNotFoundError|ImportError", answer):
        run.notes.append(f"vLLM here was not asked whether it has the model: {answer}")
    elif answer:
        raise Mistake(f"--model_name_or_path: vLLM cannot serve a {name}: {answer}")


def shrink(config):
    """Return a copy of a config for a small model. Heads keep their sizes."""
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
    # Configs with other names, such as GPT-J's and MPT's, understand these as well
    config.num_hidden_layers = config.num_attention_heads = 2
    config.hidden_size = 64 * math.ceil(head_size / 32)
    config.vocab_size = 64
    if hasattr(config, "num_key_value_heads"):
        config.num_key_value_heads = 2
    return config


@torch.no_grad()
def check_head(run):
    """Compare PolicyModel's log-probabilities with those of a small model of the same kind.

    All parameters are random, because biases start at 0 and a cap hardly changes small logits.
    """
    args, name = replace(run.args, dtype="float32"), type(run.model).__name__
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(
                shrink(run.model.config), dtype=torch.float32, attn_implementation="eager"
            ).eval()
            for parameter in model.parameters():
                parameter.normal_()
            input_ids = torch.randint(64, (2, 16))
        logits = model(input_ids, use_cache=False).logits
    except Exception as error:
        run.notes.append(f"PolicyModel was not checked with a small {name} ({describe(error)})")
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
            f"PolicyModel's log-probabilities of a {name} are wrong by {difference:.2g} with "
            f"random weights, because its head has a bias, a multiplier or a cap of its own"
        )


def check_tokens(run):
    """Refuse a tokenizer or lengths that do not fit the model. Find the stop tokens."""
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
    run.warnings += data_warnings.notes_on_template(run, run.raw_rows, stop_ids)
    limit = getattr(config, "max_position_embeddings", None) or math.inf
    if run.train_rows is not None and run.max_length() > limit:
        flag = "--max_token_length" if run.trains_reward_model() else "--response_length"
        raise Mistake(
            f"the longest row has {run.max_length()} positions, but the model has {limit}; lower "
            f"{flag}"
        )


# ----------------------------------------------------------------------------------------- reward

# A --reward_fn is tried on the first row of each kind and on this many others, for this long
MAX_OTHER_ROWS, MAX_SECONDS = 20, 20


def check_reward(run):
    """Try the reward, which refuses some rows. A --reward_fn runs in a process of its own."""
    check_format(run)
    prompts = [row for row in run.train_rows + run.eval_rows if row.ground_truth is not None]
    main, workers = sys.modules["__main__"], None
    sys.modules["__main__"] = run.script  # new processes load the script, as in a run
    try:
        workers = start_worker(run)
        sources = try_reward(run, workers, prompts)
    finally:
        run.script.end_children()
        if workers:  # wait for its thread, which closes a pipe that Python's end would write to
            executor, _ = workers.get()
            executor.shutdown()
        sys.modules["__main__"] = main
    rows = [row for row in prompts if row.data_source in sources]
    texts = {row.origin: answer_in(row.ground_truth) for row in rows}
    lost = data_warnings.notes_on_characters(run.tokenizer, "ground truth", texts)
    run.warnings += [f"{warning}: no response can have it" for warning in lost]


def check_format(run):
    """Warn of prompts after which a response in the R1 format does not get the reward for it."""
    if not run.args.add_r1_style_format_reward:
        return
    responses = [as_response(run, row, in_r1_format(row, "b")) for row in run.train_rows]
    lost = [response for response in responses if not run.script.has_r1_format(response)]
    run.format = f"{len(responses) - len(lost):,} of {len(responses):,} prompts"
    if lost:
        prompt = lost[0].prompt
        run.warnings.append(
            f"{prompt.origin}, one of {len(lost):,} such rows among {len(responses):,}: the "
            f"response {in_r1_format(prompt, 'b')!r} completes the R1 format after the prompt's "
            f"end {prompt.text[-30:]!r}, but does not get --r1_style_format_reward, because the "
            f"run reads {lost[0].text!r}"
        )


def in_r1_format(prompt, answer):
    """Return a response in the R1 format, without the beginning that the prompt has written.

    Chat templates open <think> for a model that thinks, and close it for one that must not.
    """
    written = re.search(r"(<think>\s*(</think>\s*(<answer>\s*)?)?)?$", prompt.text)[0]
    parts = ["<think>", "a</think> ", "<answer>", f"{answer}</answer>"]
    return "".join(parts[written.count(">") :])


def start_worker(run):
    """Start a process for --reward_fn, and for a fork's --env_fn.

    Return a queue with this one worker, or None if there is neither flag.
    """
    flags = {name: vars(run.args).get(name) for name in ("reward_fn", "env_fn")}
    given = " ".join(f"--{name} {value}" for name, value in flags.items() if value)
    if not given:
        return None
    try:
        return run.script.start_reward_workers(replace(run.args, reward_workers=1))
    except (Exception, SystemExit) as error:
        raise Mistake(f"{given}: {describe(error)}") from error


def is_empty(ground_truth):
    return str(ground_truth).strip() in ("", "[]", "{}")


def rows_to_try(run, prompts):
    """Return all prompts for the script's own rule, or some of each kind for a --reward_fn.

    Rows of a kind have the same source, and the same types of ground truth and extra_info. Rows
    with an empty ground truth come last.
    """
    if not run.args.reward_fn:
        return prompts
    first_of_kind = {}
    for row in prompts:
        kind = type(row.ground_truth), is_empty(row.ground_truth), type(row.extra_info)
        first_of_kind.setdefault((row.data_source, *kind), row)
    others = prompts[:: math.ceil(len(prompts) / MAX_OTHER_ROWS) or 1]
    rows = {row.origin: row for row in [*first_of_kind.values(), *others]}
    return sorted(rows.values(), key=lambda row: is_empty(row.ground_truth))


def answer_in(ground_truth):
    """Return the answer in a ground truth, which may be a list with one entry, or its JSON.

    >>> [answer_in(ground_truth) for ground_truth in ('["16"]', [16], '["4", "5"]', "[", 16)]
    ['16', '16', '["4", "5"]', '[', '16']
    """
    value = ground_truth
    with contextlib.suppress(TypeError, ValueError):
        value = json.loads(ground_truth)
    return str(value[0] if isinstance(value, list) and len(value) == 1 else ground_truth)


LOW_SCORES = (
    ", bare, in \\boxed{} and in the R1 format, scores no more than an incorrect or an empty "
    "answer. Does a correct answer have another form? Ignore this for test cases and constraints"
)
PARTIAL_SCORES = " scores less than 1, so it does not count as correct (docs/rewards.md)"


def try_reward(run, workers, prompts):
    """Try the reward on five answers to each prompt of rows_to_try. Return sources of answers.

    Three answers should be correct: the ground truth as it stands, as \\boxed{...}, and in the R1
    format. One is incorrect, because it is the ground truth of another row, and one is empty. In a
    source of answers a ground truth scored more than the empty answer, bare or in a box, so ground
    truths are not test cases or constraints.
    """
    start, sources, count = time.perf_counter(), set(), 0
    texts = {}  # the answers of each source
    for prompt in prompts:
        texts.setdefault(prompt.data_source, {})[answer_in(prompt.ground_truth)] = True
    low, partial = {}, {}  # answers by row
    rows = rows_to_try(run, prompts)
    for prompt in rows:
        if time.perf_counter() - start > MAX_SECONDS:
            run.notes.append(f"only {count:,} of {len(rows):,} rows were tried in {MAX_SECONDS} s")
            break
        count += 1
        truth = answer_in(prompt.ground_truth)
        others = (text for text in texts[prompt.data_source] if text != truth)
        other = next((text for text in others if not is_empty(text)), "I do not know.")
        answers = truth, f"\\boxed{{{truth}}}", in_r1_format(prompt, truth), other, ""
        responses = [score(run, workers, as_response(run, prompt, answer)) for answer in answers]
        scores = tuple(response.verifiable for response in responses)
        *correct, incorrect, empty = scores
        first = run.answers.setdefault(prompt.data_source, scores)
        if is_empty(prompt.ground_truth) and incorrect >= max(first[:3]) > first[3]:
            raise Mistake(
                f"{prompt.origin}: the ground truth is empty, so any answer counts as correct: "
                f"{other[:60]!r} scores {incorrect:g}"
            )
        if max(correct[:2]) > empty:
            sources.add(prompt.data_source)
        if max(correct) <= max(incorrect, empty):
            low[prompt.origin] = truth
        elif all(each.reward_metrics.get("right", each.verifiable) < 1 for each in responses[:3]):
            partial[prompt.origin] = truth
    for truths, text in ((low, LOW_SCORES), (partial, PARTIAL_SCORES)):
        for origin in [*truths][:1]:
            run.warnings.append(
                f"{origin}, one of {len(truths):,} such rows among {count:,} that were tried: the "
                f"ground truth {truths[origin][:60]!r}{text}"
            )
    return sources


def as_response(run, prompt, answer):
    """Return an answer as the run would read it: decoded, and only up to the first stop token."""
    token_ids = run.tokenizer(answer, add_special_tokens=False)["input_ids"]
    ends = [n for n, token_id in enumerate(token_ids, 1) if token_id in run.args.stop_token_ids]
    token_ids = token_ids[: ends[0]] if ends else token_ids
    text = run.script.response_text(run.tokenizer, token_ids, run.args)
    # A response ends with a stop token
    given = {"prompt": prompt, "token_ids": token_ids if ends else [*token_ids, 0], "text": text}
    return run.script.Response(**given, logprobs=None, stopped=True)


def score(run, workers, response):
    """Return a response with its score. Raise a Mistake if the reward fails."""
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


# ------------------------------------------------------------------ folder, checkpoint, disk, Hub


def check_run_folder(run):
    """Refuse a run folder with another run, or one that cannot be written. Find the checkpoint."""
    args = run.args
    found = run.script.find_run(args)
    # A script without checkpoints returns only the folder
    run_dir, checkpoint_dir = found if "resume_from_checkpoint" in vars(args) else (found, None)
    run_name, args.run_name = args.run_name, os.path.relpath(run_dir, args.output_dir)
    named = os.path.join(args.output_dir, run_name or "")
    is_of_another = run_name and os.path.realpath(named) != os.path.realpath(run_dir)
    if is_of_another and checkpoint_dir and (checkpoint_dir / "state.json").exists():
        raise Mistake(
            f"--resume_from_checkpoint {checkpoint_dir}: this checkpoint is not of the run {named}"
        )
    run_dir = run_dir.absolute()
    folder = next(folder for folder in (run_dir, *run_dir.parents) if folder.exists())
    can_write = folder.is_dir() and os.access(folder, os.W_OK)
    if not (can_write or run.options.is_elsewhere()):
        raise Mistake(f"--output_dir {args.output_dir}: {folder} is no folder to write to")
    run.run_dir, run.disk, run.checkpoint_dir = run_dir, folder, checkpoint_dir
    if checkpoint_dir is not None:  # prompts may contain the day on which the run began
        with contextlib.suppress(OSError, ValueError, KeyError):
            args.start_day = json.loads((run_dir / "args.json").read_bytes())["start_day"]


MAY_DIFFER = {"run_name", "output_dir", "resume_from_checkpoint"}


def check_checkpoint(run):
    """Refuse a checkpoint of another run, or of another script. Find the arguments that changed."""
    path = run.checkpoint_dir
    args = SimpleNamespace(**vars(run.args))  # only the script's own options, without ABSENT
    try:
        saved = json.loads((path.parents[1] / "args.json").read_bytes())
        with contextlib.redirect_stdout(io.StringIO()):
            run.script.read_state(run.run_dir, path, run.train_rows + run.eval_rows, args)
    except (OSError, ValueError) as error:
        raise Mistake(
            f"--resume_from_checkpoint {path}: this is no checkpoint, a damaged one, or one of "
            f"another run ({describe(error)}); give an older one, latest, or a folder such as "
            f"output/RUN_NAME/checkpoints/step_100"
        ) from error
    current = json.loads(json.dumps(asdict(run.args)))  # because in JSON a tuple is a list
    for name in current.keys() - MAY_DIFFER:
        if saved.get(name, "missing") != current[name]:
            run.changed[name] = saved.get(name, "missing"), current[name]


def check_disk(run):
    """Refuse a disk without room for checkpoints, the final model and 32 MiB of logs."""
    disk = run.options.disk
    if not disk and run.options.is_elsewhere():
        run.notes.append(
            "disk space was not checked, because the run is planned for another machine; pass "
            "--disk with its free space in GB"
        )
        return
    free = disk * 1e9 if disk else shutil.disk_usage(run.disk).free
    # Existing checkpoints will be removed
    existing = [path for path in run.run_dir.glob("checkpoints/**/*") if path.is_file()]
    free += sum(path.stat().st_size for path in existing)
    number, size = plan.checkpoints_on_disk(run)
    needed = number * size + plan.final_model(run) + 2**25
    if free < needed:
        raise Mistake(
            f"--output_dir {run.args.output_dir} has {format_bytes(free)} free, but the run needs "
            f"{format_bytes(needed)}, of which {format_bytes(number * size)} are for checkpoints; "
            f"lower --keep_last_n"
        )


def check_shared_memory(run):
    """Warn of a /dev/shm with little room for NCCL and vLLM's workers, as in a plain container."""
    options = run.options
    if options.is_elsewhere():
        return
    free = shutil.disk_usage("/dev/shm").free
    if options.local_processes() + len(run.args.vllm_gpus) > 1 and free < GIB:
        run.warnings.append(
            f"/dev/shm has only {format_bytes(free)} free. NCCL and vLLM's workers use it to "
            f"exchange data; docker run --ipc=host or --shm-size=8g gives more"
        )


def check_accounts(run):
    """Refuse tracking without a login, and an upload that the Hub would refuse."""
    if run.args.with_tracking and os.environ.get("WANDB_MODE") not in ("offline", "disabled"):
        server = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
        if not os.environ.get("WANDB_API_KEY") and not get_netrc_auth(server):
            raise Mistake("--with_tracking needs `wandb login`, or WANDB_MODE=offline")
    if run.args.push_to_hub:
        check_hub(run)


def check_hub(run):
    """Refuse an upload without its program, with a wrong name, or with a login that may not write.

    The upload comes after the last step, so these errors would be late.
    """
    args = run.args
    if not (run.script.PROGRAMS / "push_to_hub.py").exists():
        raise Mistake("--push_to_hub needs scripts/push_to_hub.py beside the script")
    repo, branch = repo_of(vars(args), args.hf_entity), args.hf_repo_revision or args.run_name
    hub_answers()  # if not, this sets the process offline, so that nothing waits for the Hub
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
    problem = ""
    if branch and (not re.fullmatch(r"\w[\w.+=/-]*", branch) or ".." in branch):
        problem = f"{branch!r} cannot be a branch; give another --run_name or --hf_repo_revision"
    elif slash and owner not in owners:
        problem = f"this login can write only to repositories of {' and '.join(owners)}"
    elif login.get("auth", {}).get("accessToken", {}).get("role") == "read":
        problem = "this token may only read; make one that may write"
    if problem:
        raise Mistake(f"--push_to_hub to {repo}: {problem}")


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
        name = f"vLLM (--vllm_gpu_memory_utilization {args.vllm_gpu_memory_utilization:g})"
        sizes.append((name, plan.engine_needs(run), plan.engine_room(run)))
    problem = "; ".join(
        f"{name} needs about {format_bytes(needed)} of its GPU, but can use {format_bytes(room)}"
        for name, needed, room in sizes
        if needed > room
    )
    advice = "no flags make it fit; take a smaller model or, if the script has it, --vllm_gpus"
    if solution := plan.what_fits(run):
        advice = f"with these flags it fits: {plan.format_flags(*solution)}"
    raise Mistake(f"memory: {problem}; {advice}")


# ------------------------------------------------------------------------------------------- plan


def plan_of_data(run):
    """Yield the lines on data, steps and updates."""
    args = run.args
    yield "model", f"{args.model_name_or_path}"
    yield from run.data_lines
    if run.train_rows is not None and not run.trains_reward_model():
        text = run.tokenizer.decode(run.train_rows[0].token_ids)
        shown = repr(text) if len(text) <= 120 else f"{text[:50]!r} ... {text[-70:]!r}"
        yield "", f"first prompt as the model reads it: {shown}"
    if args.num_updates == 0:
        return
    if args.num_updates < 100:
        more = "--num_train_epochs" if run.trains_reward_model() else "--total_episodes"
        run.warnings.append(
            f"{args.num_updates} optimizer updates are few. Raise {more}, or lower the batch "
            f"sizes, which are per rank"
        )
    if run.trains_reward_model():
        pairs = f"{args.mini_batch_size} of the {len(run.train_rows):,} pairs"
        yield "updates", f"{args.num_updates:,}, each on {pairs}"
        return
    prompts, samples = args.rollout_batch_size, args.number_samples_per_prompt
    batch = f"{prompts * samples:,} responses ({prompts:,} prompts x {samples})"
    yield "steps", f"{args.num_training_steps:,}, each on {batch}"
    updates = args.num_updates // args.num_training_steps
    batch = f"{args.mini_batch_size:,} responses"
    yield "updates", f"{args.num_updates:,}, which are {updates} per step, each on {batch}"
    if run.train_rows is not None:
        count = len(run.train_rows)
        epochs = args.num_training_steps * prompts / count
        number = f"{epochs:,.0f}" if epochs >= 10 else f"{epochs:.2g}"
        yield "epochs", f"{number} of the {count:,} prompts"
        length = f"{run.max_length():,} tokens, of which {args.response_length:,} are the response"
        yield "rows", f"have up to {length}"
        if prompts > count:
            run.warnings.append(
                f"a step takes {prompts:,} prompts, but there are {count:,}, so a step repeats "
                f"prompts. Lower --local_rollout_batch_size, or raise --number_samples_per_prompt "
                f"instead"
            )
    if run.eval_rows:
        count = min(args.num_evals, args.num_training_steps // 2)
        yield "evals", f"{count} on {len(run.eval_rows):,} prompts, and one at the end"


def plan_of_memory(run):
    """Yield the lines on memory, by part and in sum, and on the disk."""
    if not run.knows_sizes():
        return
    args, room = run.args, plan.learner_room(run)
    peak, parts = plan.learner_memory(run)
    limit = "" if room is None else f" of {format_bytes(room)} available"
    yield "memory", f"a learner needs about {format_bytes(plan.learner_needs(run))}{limit}"
    yield "", f"peak: {peak}"
    for name, size in parts.items():
        yield "", f"{format_bytes(size):>10}  {name}"
    if run.options.local_processes() > 1:
        size = format_bytes(plan.host_memory(run))
        yield "", f"a node needs {size} of host memory, because each learner loads a whole model"
    if not run.trains_reward_model():
        yield from plan.plan_of_engine(run)
        yield from (("advice", line) for line in plan.advice(run))
    yield "disk", f"{format_bytes(plan.final_model(run))} for the final model"
    number, size = plan.checkpoints_on_disk(run)
    if number > 0:
        yield "", f"{format_bytes(number * size)} for {number} checkpoints"
    elif "save_freq" in vars(args):
        yield "", f"no checkpoints, because of --save_freq {args.save_freq}, so a run that ends"
        yield "", "early cannot be resumed"


def plan_of_reward(run):
    """Yield the lines on what scores consist of, and what the reward returned in trials."""
    args = run.args
    if run.trains_reward_model():
        return
    if args.apply_verifiable_reward:
        yield "reward", f"{args.verification_reward:g} x {args.reward_fn or 'compute_score'}"
    if run.script.uses_reward_model(args):
        yield "reward", f"{args.reward_model_multiplier:g} x the reward model's score"
    if run.format:
        yield "reward", f"{args.r1_style_format_reward:g} x the R1 format, after {run.format}"
    sources = {}  # those with the same scores
    for source, scores in run.answers.items():
        sources.setdefault(scores, []).append(str(source))
    for (bare, boxed, in_format, incorrect, empty), names in sources.items():
        shown = ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")
        yield "trial", f"in examples of {shown} the ground truth scores {bare:g}"
        yield "", f"({boxed:g} in \\boxed{{}}, {in_format:g} in the R1 format),"
        yield "", f"an incorrect answer {incorrect:g}, and an empty answer {empty:g}"


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
    """Print what the run will do as far as it is known, then the warnings and the notes."""
    print(f"Plan of {run.script.__name__}.py")
    parts = [plan_of_data, plan.plan_of_processes, plan_of_memory, plan_of_reward]
    for part in [*parts, plan_of_checkpoint]:
        try:
            for name, text in part(run):
                print(f"  {name:<11}{printable(text)}")
        except Exception as error:  # for example, a fork may lack a function
            run.notes.append(f"{part.__name__} failed: {describe(error)}")
    for name, lines in (("warning", run.warnings), ("note", run.notes)):
        for line in dict.fromkeys(lines):
            print(f"  {name:<11}{printable(line)}")


def launch_command(options, words):
    """Return the command that launches what was checked, with the launcher beside this Python.

    Without a --config_file it names the file of scripts/accelerate that does the same.
    """
    learners, machines = options.num_processes, options.num_machines
    launcher = Path(sys.executable).with_name("accelerate")
    file = Path(__file__).with_name("accelerate") / ("ddp.yaml" if learners > 1 else "one_gpu.yaml")
    command = [os.path.relpath(launcher), "launch", "--quiet"]
    # The launcher does not expand ~
    command += ["--config_file", os.path.expanduser(options.config_file or os.path.relpath(file))]
    flags = f"--num_processes {learners}"
    if machines > 1:
        flags += f" --num_machines {machines} --machine_rank 0 --main_process_ip HOST"
        flags += " --main_process_port 29500"
    return shlex.join(command + flags.split() + words)


# ------------------------------------------------------------------------------------------- main


def error_line(error):
    """Return an error as one line that a terminal can show."""
    line = printable(" ".join(str(error).split()))
    if len(line) > 450:
        line = f"{line[:330]} ... {line[-115:]}"
    return f"preflight: error: {line}"


def check(run):
    """Run all checks. Return the first error of each."""
    errors = []

    def attempt(part, *needed):
        if None not in needed and False not in needed:
            try:
                part(run)
            except Exception as error:  # for example, a fork may lack a function
                errors.append(describe(error))

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
    # Several checks read a model, and only the first error about it is shown
    by_place = {error.partition(": ")[0]: error for error in reversed(errors)}
    return [*reversed(by_place.values())]


def load_run(words):
    """Return the Run that a command line describes, and its words from the script on."""
    split = next((index for index, word in enumerate(words) if word.endswith(".py")), len(words))
    options = tyro.cli(Options, args=words[:split], description=__doc__, use_underscores=True)
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
    if options.num_gpus is None:
        options.num_gpus = torch.cuda.device_count()
    program = f"preflight.py [OPTIONS] {name}"
    args = tyro.cli(script.Args, prog=program, args=words[split + 1 :], use_underscores=True)
    return Run(script, options, args), words[split:]


def main(words):
    """Check a run, print its plan, and return the exit status."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    # Refuse code that comes with a model, without asking
    transformers.dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0
    try:
        run, command = load_run(words)
    except Mistake as error:
        print(error_line(error), file=sys.stderr)
        return 2
    args = run.args
    if not (is_local(args.model_name_or_path) and is_local(args.dataset)) and not hub_answers():
        run.notes.append("the Hub does not answer, so its cache is used")
    errors = check(run)
    print_plan(run)
    verdict = f"Errors: {len(errors)}. Warnings: {len({*run.warnings})}."
    if errors:
        print(verdict, flush=True)
        print(*map(error_line, errors), sep="\n", file=sys.stderr)
        return 2
    others = " on HOST, and on every other node with its own --machine_rank"
    place = others if run.options.num_machines > 1 else ""
    print(f"{verdict} Launch{place}:\n{launch_command(run.options, command)}")
    return 0


if __name__ == "__main__":
    # Write nothing beside the script or, in another process, beside the file of a reward
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    forget_neighbours()
    sys.exit(main(sys.argv[1:]))
