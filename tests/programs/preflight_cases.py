"""Odd input of every kind, as tables: what scripts/preflight.py has to answer.

test_preflight.py asks it, once for each entry; this file has no tests. test_mistakes.py is about
what the scripts themselves refuse. Of CASES, LAUNCHES, FORKS and CHECKPOINTS one line of the answer
has all the words, which bars separate, and there is no other line; of PLANS, LAUNCHED and RESUMED
nothing is wrong, and the plan has the words.
"""

import importlib
import json
import os
import re
import shutil
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import torch
import transformers
import tyro
import yaml
from helpers import ASYNC, GRPO, PPO, REPO, SCRIPTS
from helpers.files import write_rows, write_text
from helpers.processes import flags_of
from safetensors.torch import load_file, save_file

import ppo_sync

TRAINER = ("scripts/train_reward_model.py",)
EVERY = SCRIPTS + TRAINER
MODEL = REPO / "debug_assets" / "model"

ASK = {"role": "user", "content": "53812="}
ROW = {
    "prompt": [ASK],
    "data_source": "debug/sorting",
    "reward_model": {"style": "rule", "ground_truth": "12358"},
    "extra_info": {"index": 0},
}
PAIR = {"prompt": [ASK], "chosen": "12358", "rejected": "13582"}
ROW_AND_PAIR = ROW | PAIR


def good_options(folder, script):
    """Options with which nothing is wrong; a step has 64 responses, and one update."""
    options = {"model_name_or_path": MODEL, "output_dir": folder / "output", "run_name": "run"}
    if script in TRAINER:
        return options | {"dataset": write_rows(folder / "good.jsonl", [PAIR] * 70)}
    options |= {"dataset": write_rows(folder / "good.jsonl", [ROW] * 70), "response_length": 8}
    options |= {"local_rollout_batch_size": 64, "local_mini_batch_size": 64}
    if script in GRPO:
        options |= {"local_rollout_batch_size": 32, "number_samples_per_prompt": 2}
    return options


def words_of(options):
    """Options as they are typed."""
    words = []
    for name, value in options.items():
        if name == "vllm_gpus" and value is not None:
            words += ["--vllm_gpus", *value.split()]
        elif isinstance(value, int | float) and value < 0:
            words.append(f"--{name}={value}")  # -1e-06 alone would be a flag to Python's parser
        else:
            words += flags_of({name: value})
    return words


# ---------------------------------------------------------------------------------------- builders
# Each returns a function from a folder to options.


def given(**options):
    return lambda folder: options


def missing(flag, name="none"):
    """A path where there is nothing."""
    return lambda folder: {flag: folder / name}


def file(flag, name, text):
    return lambda folder: {flag: write_text(folder / name, text)}


def rows(*rows, flag="dataset"):
    return lambda folder: {flag: write_rows(folder / "data.jsonl", rows)}


def asks(prompt):
    """70 rows of a prompt."""
    return rows(*[ROW | {"prompt": prompt}] * 70)


def both(prompt):
    """Rows and pairs, the second of this prompt."""
    return rows(ROW_AND_PAIR, ROW_AND_PAIR | {"prompt": prompt})


def reward(text, function=":f"):
    return lambda folder: {"reward_fn": f"{write_text(folder / 'r.py', text)}{function}"}


def call(line):
    """A reward function of one line, below its head."""
    head = "def f(data_source, response, ground_truth, extra_info):"
    short = "text, truth = response, ground_truth"
    return reward(f"import ctypes, sys, time\n{head}\n    {short}; {line}\n")


def together(*makes):
    return lambda folder: {name: value for make in makes for name, value in make(folder).items()}


def model(*changes, flag="model_name_or_path", to="model"):
    """A copy of the debug model, to whose folder all of this was done."""

    def make(folder):
        shutil.copytree(MODEL, folder / to)
        for change in changes:
            change(folder / to)
        return {flag: folder / to}

    return make


# What may be done to a model's folder


def in_json(name, change):
    def rewrite(folder):
        content = json.loads((folder / name).read_text())
        change(content)
        (folder / name).write_text(json.dumps(content))

    return rewrite


def config(**changes):
    return in_json("config.json", lambda config: config.update(changes))


def remove(name):
    return lambda folder: (folder / name).unlink()


def cut_off(folder):
    path = folder / "model.safetensors"
    os.truncate(path, path.stat().st_size - 1)


def without_q_proj(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors.pop(Q_PROJ)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def swap_digits(tokenizer):
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["1"], vocabulary["2"] = vocabulary["2"], vocabulary["1"]


def empty_vocabulary(tokenizer):
    tokenizer["model"] = {"type": "BPE", "vocab": {}, "merges": []}


SMALL = {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 1}
SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 2}


def architecture(name, **changes):
    """Another one, of random weights, with the debug model's tokenizer."""
    model_class = getattr(transformers, name)
    settings = {"vocab_size": 17} | SMALL | changes
    return lambda folder: model_class(model_class.config_class(**settings)).save_pretrained(folder)


def classifier(*changes, flag="reward_model_path", **settings):
    settings = {"num_labels": 1} | settings
    return model(architecture("Qwen2ForSequenceClassification", **settings), *changes, flag=flag)


# ------------------------------------------------------------------------------------------- cases
# name: (builder, words of the line), for the three scripts; or with the scripts that it is for

REFUSES = file("chat_template", "t.jinja", "{{ raise_exception('no system role') }}")
# As of preferences: what stands in place of a ground truth is for a reward model
NO_TRUTH = "`ground_truth` | --no-apply_verifiable_reward --reward_model_path"
NO_NUMBER = ROW | {"data_source": "gsm8k", "reward_model": {"ground_truth": "many"}}
PARTS = [{"role": "user", "content": [{"type": "text", "text": "53812="}]}]


def as_adapter(folder):
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
    adapter = {"base_model_name_or_path": "a/base", "peft_type": "LORA"}
    write_text(folder / "adapter_config.json", json.dumps(adapter))


def as_pointer(folder):
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 1045634\n"
    write_text(folder / "model.safetensors", pointer)


def begins_with_user(tokenizer):
    """As Llama's tokenizers do with <s>, which their templates write, too."""
    token = {"id": "<|user|>", "ids": [3], "tokens": ["<|user|>"]}
    special = {"SpecialToken": {"id": "<|user|>", "type_id": 0}}
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [special, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [special, {"Sequence": {"id": "A", "type_id": 0}}],
        "special_tokens": {"<|user|>": token},
    }


def several(folder):
    """A folder as of openai/gsm8k, which has two configurations."""
    names = ("main", "socratic")
    files = [{"config_name": name, "data_files": f"{name}.jsonl"} for name in names]
    for name in names:
        write_rows(folder / "gsm8k" / f"{name}.jsonl", [ROW_AND_PAIR] * 70)
    readme = f"---\n{yaml.dump({'configs': files})}---\n"
    write_text(folder / "gsm8k" / "README.md", readme)
    return {"dataset": folder / "gsm8k"}


BROKEN = json.dumps(ROW) + "\n{'prompt':\n"
DATA = {
    "no file": (missing("dataset", "no.parquet"), "no.parquet: FileNotFoundError", EVERY),
    "no debug data": (given(dataset="debug_assets/no.jsonl"), "make_debug_assets.py makes", EVERY),
    "empty": (rows(), "data.jsonl | empty", EVERY),
    "broken line": (file("dataset", "x.jsonl", BROKEN), "x.jsonl | JSONDecodeError | in \"{'prom"),
    "no row": (
        file("dataset", "x.jsonl", "5\n"),
        "x.jsonl, row 0: | it has 5 and no columns",
        EVERY,
    ),
    "template refuses parts": (
        together(both(PARTS), REFUSES),
        "data.jsonl, row 0: | no system role",
        EVERY,
    ),
    "no truth": (rows(ROW, ROW, ROW | {"reward_model": {"style": "rule"}}), f"row 2 | {NO_TRUTH}"),
    "held-out, no number": (rows(ROW, NO_NUMBER, flag="eval_dataset"), "row 1 | 'many'"),
    "template refuses": (REFUSES, "good.jsonl, row 0 | chat template | no system role", EVERY),
    "messages as JSON": (
        both(json.dumps([ASK])),
        "row 1: the prompt is the text of a list of messages",
        EVERY,
    ),
    "parts": (both(PARTS), "row 1: a content is a list of parts", EVERY),
    "a dictionary of lists": (
        asks({"role": ["user"], "content": ["5="]}),
        "row 0: its prompt is of type dict | a list of messages",
    ),
    "no role": (asks([{"content": "5="}]), "row 0: a message | has no role"),
    "a number as content": (
        asks([{"role": "user", "content": 5}]),
        "row 0: | content is 5, and must be a text",
    ),
    "half a character": (asks("5\ud83d="), "row 0: | half a character, | ud83d"),
    "tools of no list": (rows(ROW | {"tools": "add"}), "row 0: its tools is 'add' | list"),
    "a reward model of text": (rows(ROW | {"reward_model": "rule"}), "row 0: its reward_model is"),
    "a list of files": (given(dataset="['a.parquet','b']"), "put several files into one", EVERY),
    "several configurations": (several, "Config name | 'socratic' | --dataset_config", EVERY),
    "control characters": (rows(ROW | {"data_source": "\x1b[31mx"}), r"row 0 | \x1b[31mx"),
}

SAYS = {"role": "assistant", "content": "12358"}
PAIRS = {
    "no column": (rows({"prompt": "1", "answer": "2"}), "row 0 | 'chosen' | answer | `rejected`"),
    "too few": (given(local_mini_batch_size=80), "0 updates of 80 | --num_train_epochs"),
    "encoder": (classifier(flag="model_name_or_path", is_causal=False), "later tokens"),
}

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
QUANTIZED = config(quantization_config={"quant_method": "nothing"})
OWN_CODE = config(model_type="mine", auto_map={"AutoConfig": "mine.Config"})
NINE = architecture("Qwen2ForCausalLM", vocab_size=9, eos_token_id=1)
NO_END = (config(eos_token_id=None), remove("generation_config.json"))
WITHOUT_WEIGHTS = model(remove("model.safetensors"))
OTHER_IDS = model(in_json("tokenizer.json", swap_digits), flag="tokenizer_name_or_path")
EMPTY_TOKENIZER = model(in_json("tokenizer.json", empty_vocabulary), flag="tokenizer_name_or_path")
MODELS = {
    "no folder": (missing("model_name_or_path"), "--model_name_or_path | none: no such", EVERY),
    "not on the hub": (given(model_name_or_path="no/such"), "--model_name_or_path no/such | hub"),
    "no weights": (WITHOUT_WEIGHTS, "it has no weights, | model.safetensors | --num_gpus", EVERY),
    "weights cut off": (model(cut_off), "--model_name_or_path | incomplete", EVERY),
    "another shape": (model(config(intermediate_size=7)), "down_proj.weight | [64, 7]", EVERY),
    "a tensor lacks": (model(without_q_proj), f"lack | {Q_PROJ}", EVERY),
    "BERT": (model(architecture("BertForMaskedLM")), "BertForMaskedLM | decoder"),
    "quantized": (model(QUANTIZED), "quantized", EVERY),
    "code of its own": (model(OWN_CODE), "custom code", EVERY),
    "too few positions": (given(response_length=512), "--response_length | positions | 512"),
    "no tokenizer": (missing("tokenizer_name_or_path"), "--tokenizer_name_or_path | none", EVERY),
    "empty tokenizer": (EMPTY_TOKENIZER, "into nothing | --tokenizer_name_or_path", EVERY),
    "no chat template": (model(remove("chat_template.jinja")), "row 0 | chat_template"),
    "an adapter": (model(as_adapter), "is an adapter of a/base; merge it", EVERY),
    "a pointer": (model(as_pointer), "model.safetensors is a pointer of git-lfs", EVERY),
    "a file": (given(model_name_or_path=MODEL / "model.safetensors"), "it is a file; give", EVERY),
    "a folder above": (given(model_name_or_path=MODEL.parent), "its model is in | /model", EVERY),
    "ids of another": (OTHER_IDS, "--tokenizer_name_or_path | 2 of its tokens have other ids"),
    "tokenizer of another": (model(NINE), "tokenizer | 17 | 9"),
    "unknown stop token": (given(stop_token="<|stop|>"), "--stop_token | <|stop|>", EVERY),
    "bias of the head": (model(architecture("PhiForCausalLM")), "its head has a bias"),
}

BERT = architecture("BertForSequenceClassification", num_labels=1)
TWO_LABELS = classifier(num_labels=2, flag="value_model_path")
OTHER_TOKENS = classifier(in_json("tokenizer.json", swap_digits))
CLASSIFIERS = {
    "two labels": (TWO_LABELS, "--value_model_path | it has 2 labels", PPO),
    "encoder": (classifier(is_causal=False), "--reward_model_path | attends to later tokens"),
    "other head": (model(BERT, flag="value_model_path"), "no head named score", PPO),
    "no head": (given(reward_model_path=MODEL), "--reward_model_path | 0 labels"),
    "tokenizer": (OTHER_TOKENS, "--reward_model_path | policy's tokens"),
}


def truth(answer):
    return ROW | {"reward_model": {"ground_truth": answer}}


FIVE, EMPTY = truth("5"), truth("")
# The wrong answer to a row is another row's ground truth
FIRST = call("return text[0] == '1'")
IS_IN = call("return float(truth in text)")
LATER = together(call("return 1.0 / (truth != '68')"), rows(*[truth(f"{i}") for i in range(70)]))
OF_ROW = "good.jsonl, row 0: | r.py:f"
OF_TRUTH = "to the ground truth '12358', extra_info {'index': 0}: "
OF_TEXT = rows(ROW, ROW | {"extra_info": "index 1"})
REWARDS = {
    "no file": (missing("reward_fn", "none.py:f"), "--reward_fn | none.py | file.py:function"),
    "no such function": (reward("def g(): 1\n"), "--reward_fn | r.py:f: | no attribute 'f'"),
    "fails": (call("return 1 / 0"), f"{OF_ROW} | {OF_TRUTH} | line 3"),
    "fails on an empty answer": (FIRST, f"{OF_ROW} | answer '' (a model may answer | IndexError"),
    "fails on a later row": (LATER, "row 68: | answer '68' | ZeroDivision"),
    "fails on another type": (
        together(IS_IN, rows(ROW, truth(5))),
        "row 1: | ground truth 5, | TypeError",
    ),
    "no number": (call("return float('nan')"), f"{OF_ROW} | the reward is nan"),
    "empty truth": (
        together(IS_IN, rows(ROW, EMPTY, EMPTY)),
        "row 1: | empty, and any answer is right: '12358'",
    ),
    "text as extra_info": (together(IS_IN, OF_TEXT), "row 1: | extra_info 'index 1': | TypeError"),
}
# Each starts a process
HANGS = together(call("time.sleep(99)"), given(reward_timeout=0.5))
OF_TRL = "def f(completions, **more): return 0\n"
IN_PROCESS = {
    "file exits": (reward("import sys\nsys.exit('no licence')\n"), "SystemExit: no licence"),
    "takes something else": (reward(OF_TRL), "r.py:f: it takes (completions, | coming_from"),
    "hangs": (HANGS, "TimeoutError | 0.5 s | is imported, or raise --reward_timeout"),
    "crashes": (call("ctypes.string_at(0)"), f"{OF_ROW} | BrokenProcessPool"),
}

TEN = {"total_episodes": 640}  # updates
NUMBERS = {
    "seed": (given(seed=-1), "--seed | -1 | from 0"),
    "response": (given(response_length=0), "--response_length | from 1"),
    "not a number": (given(beta="nan"), "--beta is nan"),
    "not finite": (given(penalty_reward_value="-inf"), "--penalty_reward_value is -inf"),
    "mask that leaves no ratio": (given(mismatch_mask_range=0.5), "--mismatch_mask_range | from 1"),
    "rest of a step": (given(local_mini_batch_size=24), "(64) | (24) | 8 would do"),
    "group of one": (given(number_samples_per_prompt=1, local_mini_batch_size=32), "group", GRPO),
}

A_FILE = file("output_dir", "file", "")
OTHER_RUN = file("output_dir", "output/mine/metrics.jsonl", "{}\n")
OTHER_RUN = together(OTHER_RUN, missing("output_dir", "output"), given(run_name="mine"))
FOLDERS = {
    "below a file": (together(A_FILE, missing("output_dir", "file/x")), "--output_dir", EVERY),
    "another run": (OTHER_RUN, "mine | another run | --run_name", EVERY),
}

TABLES = {
    "data": DATA,
    "pairs": PAIRS,
    "model": MODELS,
    "classifier": CLASSIFIERS,
    "reward": REWARDS,
    "process": IN_PROCESS,
    "number": NUMBERS,
    "output": FOLDERS,
}
CASES = {
    f"{subject}: {name}": (make, words, *(scripts or [default]))
    for subject, table in TABLES.items()
    for default in [TRAINER if table is PAIRS else SCRIPTS]
    for name, (make, words, *scripts) in table.items()
}

SHARDED = REPO / "scripts" / "accelerate" / "fsdp2.yaml"
ONE_GPU = SHARDED.with_name("one_gpu.yaml")
FSDP2 = "scripts/accelerate/fsdp2.yaml | fsdp_version 2"
ONE_PROCESS = "--num_processes 8 | one_gpu.yaml starts one | scripts/accelerate/ddp.yaml"


def launch_file(**changes):
    """A function from a folder to what preflight is told: to read a changed fsdp2.yaml."""
    content = yaml.safe_load(SHARDED.read_text()) | changes
    return file("config_file", "launch.yaml", yaml.dump(content))


LEARNER = {"vllm_gpus": "1", "per_device_train_batch_size": 64, "response_length": 500}
LEARNER |= {"gradient_checkpointing": False}
HELP = "a learner needs about 0.4 GiB of its GPU, and has 0.2 GiB; this fits: | "
HELP += "--gradient_checkpointing: 0.1 GiB of 0.2 GiB"
# Each fits, and the two do not, with 2 GiB for CUDA
BOTH = "a learner needs about | has 0.0 MiB; this fits: --vllm_gpu_memory_utilization 0."
ADAPTERS = {"lora_rank": 8, "dtype": "float32"}
PAIRS_OF_FSDP = {"local_mini_batch_size": 8}


def gpus(num_gpus, gpu_memory=None, **launch):
    return given(num_gpus=num_gpus, gpu_memory=gpu_memory, **launch)


def share(size):
    return {"vllm_gpu_memory_utilization": size}


# name: (of the launch, options, words), for the three scripts; or with the scripts that it is for
LAUNCHES = {
    "too few GPUs": (gpus(2, num_processes=4), {}, "4 learners | a machine has 2"),
    "a learner's": (gpus(8, num_processes=2), {"vllm_gpus": "1 2"}, "(1, 2) | not the first 2"),
    "no such GPU": (gpus(8), {"vllm_gpus": "7 8"}, "--vllm_gpus (7, 8) | a machine has 8"),
    "adapters in float32": (gpus(1), ADAPTERS, "--lora_rank | --dtype bfloat16"),
    "memory of vLLM": (gpus(1, 2.0), share(0.1), "--vllm_gpu_memory_utilization 0.1 | GiB"),
    "memory of a learner": (gpus(2, 2.25), LEARNER, HELP),
    "memory of both": (gpus(1, 10.0), share(0.8), BOTH),
    "memory of nothing": (gpus(1, 0.5), {}, "a learner needs about | no flags make room"),
    "no such file": (given(config_file="no.yaml"), {}, "no.yaml | accelerate"),
    "FSDP1": (launch_file(fsdp_config={"fsdp_version": 1}), {}, FSDP2),
    "DeepSpeed": (launch_file(distributed_type="DEEPSPEED"), {}, FSDP2),
    "ranks of one process": (gpus(8, num_processes=8, config_file=ONE_GPU), {}, ONE_PROCESS),
    "sharded pairs": (given(config_file=SHARDED), PAIRS_OF_FSDP, "accelerate/ddp.yaml", TRAINER),
}


# A fork is a file with the name fork.py, of ppo_vllm_async.py unless the case says otherwise


def fork(text):
    return lambda folder: write_text(folder / "fork.py", text)


def rename(*names):
    """The script with functions or arguments of other names."""

    def make(folder):
        text = (REPO / ASYNC[0]).read_text()
        for name in names:
            text = re.sub(rf"\b{name}\b", f"my_{name}", text)
        return write_text(folder / "fork.py", text)

    return make


# name: (builder of the script, words)
FORKS = {
    "not there": (lambda folder: folder / "none.py", "none.py | No such file"),
    "no script": (fork("x = 1\n"), "fork.py | Args"),
    "no load_prompts": (rename("load_prompts", "load_rows"), "no attribute 'load_rows'"),
    "no compute_score": (rename("compute_score"), "no attribute 'compute_score'"),
}

# ------------------------------------------------------------------------------------- checkpoints


def options_of_run(folder, script):
    """Of ten steps, or of eight updates of a reward model."""
    length = {"local_mini_batch_size": 8} if script in TRAINER else {"total_episodes": 640}
    return good_options(folder, script) | length


def stepped(model):
    """A model, and its optimizer after a step."""
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return model, optimizer


def load_tokenizer():
    return transformers.AutoTokenizer.from_pretrained(MODEL)


def save_run(folder, script):
    """A run that was interrupted in step 8, with checkpoints after 3 and 6, in output/run."""
    module = importlib.import_module(Path(script).stem)
    args = tyro.cli(module.Args, args=words_of(options_of_run(folder, script)))
    if script in TRAINER:
        args.mini_batch_size, args.num_updates, args.stop_token_id = 8, 8, 1
        rows = module.load_pairs(None, args.dataset, None, None, load_tokenizer(), args)
        args.data_hash = ppo_sync.stable_hash(rows)
    else:
        args = module.fill_in(args, 1)
        args.stop_token_ids = (1,)
        train, held_out = module.load_datasets(load_tokenizer(), args)
        rows = [vars(prompt) | {"origin": None} for prompt in train + held_out]
        args.data_hash = module.stable_hash(rows)
    run_dir = folder / "output" / "run"
    write_text(run_dir / "args.json", json.dumps(asdict(args), indent=2))
    state = {"seconds": 12.5, "wandb_id": "abc", "beta": getattr(args, "beta", 0)}
    for step in (3, 6):
        write_text(run_dir / "metrics.jsonl", '{"training_step": 7}\n')
        (run_dir / "checkpoints/unfinished").mkdir(parents=True)
        rank_0 = SimpleNamespace(is_main_process=True)
        ppo_sync.finish_checkpoint(rank_0, run_dir, step, state, args)


def nothing(run_dir):
    pass


def cut_state(run_dir):
    (run_dir / "checkpoints/step_3/state.json").write_text('{"seconds": 1')


FOLDER = given(resume_from_checkpoint="output/run")
SAVED_BY_GRPO = in_json("args.json", lambda saved: saved.pop("value_model_path"))
# name: (what has happened to the run, builder of options, words), for the three scripts; or with
# the scripts that it is for. Unless they say otherwise, options are to resume step_3
CHECKPOINTS = {
    "state cut off": (cut_state, given(), "step_3 | damaged | older", EVERY),
    "the run's folder": (nothing, FOLDER, "no checkpoint | /checkpoints/step_", EVERY),
    "another script's": (SAVED_BY_GRPO, given(), "another script | value_model", PPO),
    "seed": (nothing, given(seed=2), "seed was 1 and is 2", EVERY),
    "adapters": (nothing, given(lora_rank=8, learning_rate=1e-5), "lora_rank was 0 and is 8"),
    "other prompts": (
        nothing,
        asks("8="),
        "its data were others: rows, chat template or tokenizer",
    ),
    "pairs": (nothing, given(local_mini_batch_size=16), "num_updates was 8 and is 4", TRAINER),
}

NEWER = "resumes | checkpoints/step_3 and removes what is newer: step_6"
# Nothing is wrong. name: (as in CHECKPOINTS, words of the plan, scripts)
RESUMED = {
    "older": (nothing, given(), NEWER, EVERY),
    "rate": (nothing, given(learning_rate=0.5), "learning_rate was | and is 0.5", EVERY),
    "evaluations": (nothing, given(num_evals=5), "num_evals was 10 and is 5", PPO[:1]),
}

# ------------------------------------------------------------------------------- nothing is wrong

OPEN_INSTRUCT = {"messages": [ASK], "ground_truth": "72", "dataset": "gsm8k"}
LOST = [ROW, ROW | {"prompt": "5\u00e9\u2028\u20ac4="}] * 35  # one of them ends a line
UNWRITABLE = [ROW, truth("5\u00e94")] * 35
OF_ITS_OWN = [ROW | {"data_source": f"mine/{number}"} for number in range(40)]
WARMS_UP = "global ready; time.sleep(0 if 'ready' in globals() else 1.2); ready = True"
WARMS_UP = call(f"{WARMS_UP}; return float(truth in text)")
WARMS_UP = together(WARMS_UP, given(reward_timeout=2.2))
NOTHING_ALONE = given(penalty_reward_value=-1.0, r1_style_format_reward=2.0)
HELD_OUT = rows(*[ROW] * 5, flag="eval_dataset")
HELD_OUT = together(HELD_OUT, given(**TEN, num_eval_prompts=3, num_evals=2))
ALWAYS = together(rows(*[ROW] * 35, *[FIVE] * 35), call("return 1.0"))
BY_BOTH = together(classifier(), given(verification_reward=2.0, reward_model_multiplier=0.25))
LENGTH = "def f(response, extra_info): return extra_info['stopped'] / extra_info['num_tokens']\n"
ENDS_EARLY = together(call("return float(text == truth)"), rows(*[truth("5<|end|>")] * 70))
RULE = ROW | {"reward_model": {"ground_truth": '{"N": 3}'}}


def prompts(*contents, **columns):
    """70 rows of these prompts in turn: texts of a user, or messages."""
    given = [text if isinstance(text, list) else [ASK | {"content": text}] for text in contents]
    return rows(*[ROW | columns | {"prompt": messages} for messages in given] * (70 // len(given)))


def template(text):
    return file("chat_template", "t.jinja", text)


USER = "{% for m in messages %}{% if m.role == 'user' %}<|user|>{{ m.content }}"
ENDS = "{% endif %}{% endfor %}"
GENERATE = ENDS + "{% if add_generation_prompt %}<|assistant|>{% endif %}"
UNPROMPTED = template(USER + "{% else %}<|assistant|>{{ m.content }}<|end|>" + ENDS)
# As Llama 2's: what asks for an answer ends the user's turn
INSTRUCTED = template(USER + "<|assistant|>{% else %} {{ m.content }} <|end|>" + ENDS)
# As Qwen3's: before an answer it writes thoughts, of which there are none
THINKS = template(USER + "{% else %}<|assistant|>= {{ m.content }}<|end|>" + GENERATE)
ENDLESS = template(USER + "{% else %}<|assistant|>{{ m.content }}" + GENERATE)
TEXT_ENDS = template(USER + "{% else %}<|assistant|>{{ m.content }} 7 8" + GENERATE)
OF_PARTS = "{% for part in m.content %}{{ part.text }}{% endfor %}"
BY_PARTS = template("{% for m in messages %}" + OF_PARTS + "{% endfor %}")
# A base model: its end is another than that of its template's turns
BASE = model(
    config(eos_token_id=0),
    in_json("generation_config.json", lambda settings: settings.update(eos_token_id=0)),
    in_json("tokenizer_config.json", lambda settings: settings.update(eos_token="<|pad|>")),
)
GOES_ON = "ends an answer with '<|end|>' | no stop token | --stop_token '<|end|>'"
# A message alone is none of its
SECOND = template("{{ messages[0].content }}{{ messages[1].content }}")
IMAGE = {"images": [{"path": "1.png"}]}
DIALOGUE = {"chosen": [ASK, SAYS], "rejected": [ASK, SAYS | {"content": "1"}]}
HELD_OUT_MAIN = given(eval_dataset="gsm8k", eval_dataset_config="main", eval_dataset_split="train")
HELD_OUT_MAIN = together(lambda folder: several(folder) and {}, HELD_OUT_MAIN)
BEGINS = model(
    in_json("tokenizer.json", begins_with_user),
    in_json("tokenizer_config.json", lambda settings: settings.update(bos_token="<|user|>")),
)
NO_TEMPLATE = together(model(remove("chat_template.jinja")), asks("1="))
SEEN = together(rows(*[ROW] * 70), rows(*[ROW] * 70, flag="eval_dataset"))
TWICE = {"prompt": "1=", "chosen": "1=1", "rejected": "1=2"}
TURNED = PAIR | {"chosen": PAIR["rejected"], "rejected": PAIR["chosen"]}
# name: (builder, words of the plan), for the three scripts; or with the scripts that it is for
ODD = {
    "images": (prompts("1=", "2=", **IMAGE), "nobody reads the column images"),
    "videos": (rows(*[PAIR | {"videos": ["1.mp4"]}] * 70), "reads the column videos", TRAINER),
    "equal to the model": (prompts("5\u00e9=", "5\u00e8="), "all 70 prompts"),
    "repeats": (prompts("1=", "2=", "3=", "1=", "1="), "of 70 prompts 3 are distinct"),
    "begun answers": (prompts([ASK, SAYS], [ASK]), "35 of 70 prompts end with a message of the"),
    "rendered": (prompts("1=", "<|user|>2="), "row 1, and so 35 of 70: | special token <|user|>"),
    "no generation prompt": (UNPROMPTED, "has to begin its turn with '<|assistant|>'"),
    "base model": (BASE, GOES_ON, EVERY),
    "no end": (ENDLESS, "writes nothing after an answer"),
    "text as an end": (TEXT_ENDS, "ends an answer with '7', and '7' is no stop token | see --stop"),
    "a system column": (prompts("1=", "2=", system="Be brief."), "reads the column system"),
    "texts of a chat model": (asks("1="), "70 of 70 prompts are texts"),
    "today": (template(USER + GENERATE + "{{ strftime_now('%d') }}"), "writes today's date"),
    "a second begin token": (
        together(BEGINS, asks("<|user|>1=")),
        "so 70 of 70 that were tried: | adds '<|user|>' a second",
    ),
    "held-out prompts that are trained on": (SEEN, "70 of the 70 held-out prompts are trained on"),
    "prompt in the answers": (rows(*[TWICE] * 70), "70 of 70 responses begin with their", TRAINER),
    "both orders": (rows(*[PAIR, TURNED] * 35), "70 pairs are there in both orders", TRAINER),
    "larger reward model": (classifier(vocab_size=99), "the reward model's score"),
    "configuration": (together(several, given(dataset_config="main")), "learners 1", EVERY),
    "configuration of held-out rows": (HELD_OUT_MAIN, "evaluations of 70 prompts"),
}
SEVENTY = prompts(*map(str, range(10, 80)))
# The same, with what must not be in the plan
NOT_ODD = {
    "prompts": (SEVENTY, "equal | distinct | nobody | template | left out"),
    "images of none": (prompts("1=", images=[]), "images"),
    "a text in brackets": (asks('["role"]='), "list"),
    "tokens in a text": (asks("<|user|>1="), "special token"),
    "parts": (together(prompts(PARTS), BY_PARTS), "list of parts"),
    "instructions": (INSTRUCTED, "generation prompt | stop token"),
    "thoughts": (THINKS, "generation prompt | stop token"),
    "tokenizer's end": (model(*NO_END), "stop token"),
    "texts of a base model": (NO_TEMPLATE, "are texts"),
    "a begin token": (together(BEGINS, asks("1=")), "a second time"),
    "columns that are known": (rows(*[ROW | {"input_ids": [1], "level": 3}] * 70), "nobody reads"),
    "base model's flag": (together(BASE, given(stop_token="<|end|>")), "stop token", EVERY),
    "template of other messages": (together(prompts([ASK, ASK]), SECOND), "template"),
    "answers of pairs": (rows(*[DIALOGUE] * 70), "left out | equal | distinct", TRAINER),
}

# name: (builder, words of the plan), for the three scripts; or with the scripts that it is for
PLANS = {
    "debug": (given(), "learners 1 | 1 x compute_score | a row of debug/sorting scores 1"),
    "steps": (given(**TEN), "70 prompts | 10 of | 16 tokens | 1 a step, 10 in all, 64 each"),
    "pairs": (given(local_mini_batch_size=8), "8 of 8 of the 70 pairs | learners 1", TRAINER),
    "some held-out rows": (HELD_OUT, "evaluations of 3 prompts: 2, and one"),
    "lambda without a warm-up": (given(lam=0.95), "--lam 0.95 | --value_warmup_steps", PPO),
    "rate of full training": (given(lora_rank=8, learning_rate=1e-6), "about ten times"),
    "rows of two forms": (rows(*[ROW, OPEN_INSTRUCT] * 35), "gsm8k scores 1"),
    "characters are lost": (
        rows(*LOST),
        "loses: \u00e9\\u2028\u20ac | row 1, and so 35 of 70: | of the prompt, of all",
    ),
    "characters of a truth are lost": (
        rows(*UNWRITABLE),
        "row 1, and so 35 of 70: | of the ground truth | '\u00e9': no",
    ),
    "right and wrong alike": (ALWAYS, "row 0, and so 18 of 18 that were tried: | no more than"),
    "a source of its own": (
        together(IS_IN, rows(*OF_ITS_OWN)),
        "a row of mine/0, mine/1, | mine/9, ... scores 1, a wrong answer 0",
    ),
    "slow first call": (
        WARMS_UP,
        "a call of the reward took | is imported, or raise --reward_timeout",
    ),
    "flags that do nothing": (
        NOTHING_ALONE,
        "--penalty_reward_value does nothing without --non_stop | --r1_style_format_reward does",
    ),
    "length of a response": (reward(LENGTH), "scores 0.166667, a wrong answer 1, an empty one 1"),
    "limits": (given(mismatch_mask_range="inf", temperature=2.0, num_eval_prompts=0), "learners 1"),
    "both rewards": (BY_BOTH, "2 x compute_score | 0.25 x the reward model's score"),
    "a truth that ends with a stop token": (
        ENDS_EARLY,
        "no response can have | as tokens it reads '5' and scores 0",
    ),
    "a truth that is no right answer": (
        call("return 0.95 * (text == truth)"),
        "so 18 of 18 | scores 0.95, and 1 counts as right",
    ),
    "no checkpoint is due": (given(**TEN, save_freq=50), "--save_freq 50 of 10 steps"),
}

ONE = {"num_gpus": 1, "gpu_memory": 24.0}
EIGHT = {"num_gpus": 8, "gpu_memory": 80.0}
SIX = EIGHT | {"num_processes": 6}
NODES = EIGHT | {"num_processes": 12, "num_machines": 2}
BY_FILE = EIGHT | {"config_file": SHARDED.with_name("fsdp2_two_nodes.yaml")}
OWN = {"vllm_gpus": "6 7"}
SHARES = "of the 14.8 GiB that it may take | room for 64 of a step's 64 responses at once"
KEEPS = {"save_freq": 2, "total_episodes": 640}
# name: (the launch, options, words of the plan)
LAUNCHED = {
    "eight GPUs": (EIGHT | {"num_processes": 8}, {}, "learners 8 | engines 8"),
    "idle GPUs": (EIGHT, {}, "7 of a machine's 8 GPUs are not used"),
    "two for vLLM": (SIX, OWN, "learners 6 | engines 2 | GPUs 6, 7 | of the 78.0 GiB that it may"),
    "two machines": (NODES, OWN, "learners 12 | engines 4 | steps 130 of 768"),
    "memory": (ONE, {}, f"{SHARES} | policy"),
    "FSDP2": (EIGHT | {"config_file": SHARDED}, {}, "learners 8 | gathered by FSDP2 | a machine,"),
    "two machines by a file": (BY_FILE, {}, "learners 16 | engines 16 of vLLM"),
    "tokens and not rows": ({}, {"micro_batch_tokens": 200}, "(--micro_batch_tokens 200)"),
    "disk": ({}, KEEPS, "for 4 checkpoints | 0.5 MiB for the final model"),
}

# architecture: (what its config has, whether PolicyModel knows its head, and not only refuses it)
HEADS = {
    "qwen2": ({}, True),
    "qwen3": ({}, True),
    "llama": ({}, True),
    "gemma2": ({"final_logit_softcapping": 20.0}, True),
    "gemma3_text": ({"final_logit_softcapping": 20.0}, True),
    "phi": ({}, False),
    "gptj": ({"n_embd": 1024}, False),
    "gpt_neox": ({}, True),
    "granite": ({"logits_scaling": 4.0}, True),
    "cohere": ({"logit_scale": 0.25}, True),
    "hyperclovax": ({"logits_scaling": 0.25}, False),
    "mpt": ({}, True),
    "mpt: a multiplier that transformers does not apply": ({"logit_scale": 0.5}, False),
}
