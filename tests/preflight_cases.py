"""Odd input of every kind: the cases that scripts/preflight.py answers with one line.

The specification of that program. To each of CASES, LAUNCHES, FORKS, CHECKPOINTS, ENVIRONMENTS and
SURROUNDINGS it says what is wrong in one printable line of less than 500 characters, ends with
status 2, and has written nothing. FLAGS cannot be parsed, HUBS do not answer. In PLANS, RESUMED and
LAUNCHED nothing is wrong, but there is something that the plan must say.

    make, words, scripts = CASES[name]
    options = good_options(folder, script) | make(folder)     for each of the scripts
    all(word in line for word in words)

Relative paths are looked up in the folder, where there are no debug assets.
"""

import contextlib
import datetime
import decimal
import hashlib
import importlib
import json
import math
import os
import pickle
import platform
import re
import shutil
import socket
import socketserver
import threading
from dataclasses import asdict, replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import numpy as np
import pyarrow.parquet
import torch
import transformers
import tyro
import yaml
from helpers import ASYNC, GRPO, PPO, REPO, SCRIPTS
from helpers.files import write_rows, write_text
from helpers.processes import flags_of
from safetensors.torch import load_file, save_file

TRAINER = ("scripts/train_reward_model.py",)
EVERY = SCRIPTS + TRAINER
MODEL = REPO / "debug_assets" / "model"

ASK = {"role": "user", "content": "53812="}
GOOD, BAD = ({"role": "assistant", "content": text} for text in ("12358", "13582"))
ROW = {
    "prompt": [ASK],
    "data_source": "debug/sorting",
    "reward_model": {"style": "rule", "ground_truth": "12358"},
    "extra_info": {"index": 0},
}
PAIR = {"prompt": [ASK], "chosen": "12358", "rejected": "13582"}


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


def file(flag, name, content):
    def make(folder):
        path = write_text(folder / name, "")
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return {flag: path}

    return make


def rows(*rows, flag="dataset"):
    return lambda folder: {flag: write_rows(folder / "data.jsonl", rows)}


def parquet(flag, **columns):
    def make(folder):
        pyarrow.parquet.write_table(pyarrow.table(columns), folder / "data.parquet")
        return {flag: folder / "data.parquet"}

    return make


def truth(value):
    """A held-out row with this ground truth."""
    columns = {"prompt": ["5="], "data_source": ["debug/sorting"]}
    return parquet("eval_dataset", **columns, reward_model=[{"ground_truth": value}])


def fifo(folder):
    os.mkfifo(folder / "x.jsonl")
    return {"dataset": folder / "x.jsonl"}


def link(target, **options):
    """A link with the name `link`, which is the output folder, unless options say otherwise."""

    def make(folder):
        (folder / "link").symlink_to(folder / target)
        return options or {"output_dir": folder / "link"}

    return make


def reward(text, function=":f", name="r.py"):
    return lambda folder: {"reward_fn": f"{write_text(folder / name, text)}{function}"}


def call(line):
    """A reward function of one line."""
    return reward(f"import ctypes, os, sys, time\ndef f(*_, extra_info):\n    {line}\n")


def together(*makes):
    return lambda folder: {name: value for make in makes for name, value in make(folder).items()}


def model(*changes, flag="model_name_or_path"):
    """A copy of the debug model, to whose folder all of this was done."""

    def make(folder):
        shutil.copytree(MODEL, folder / "model")
        for change in changes:
            change(folder / "model")
        return {flag: folder / "model"}

    return make


# What may be done to a model's folder


def config(**changes):
    def change(folder):
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def content(name, content):
    return lambda folder: (folder / name).write_bytes(content)


def remove(name):
    return lambda folder: (folder / name).unlink()


def cut_off(folder):
    path = folder / "model.safetensors"
    os.truncate(path, path.stat().st_size - 1)


def tensors(change):
    def rewrite(folder):
        found = load_file(folder / "model.safetensors")
        change(found)
        save_file(found, folder / "model.safetensors", metadata={"format": "pt"})

    return rewrite


def swap_digits(folder):
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["1"], vocabulary["2"] = vocabulary["2"], vocabulary["1"]
    path.write_text(json.dumps(tokenizer))


def empty_vocabulary(folder):
    """A tokenizer that turns every text into nothing."""
    path = folder / "tokenizer.json"
    model = {"type": "BPE", "vocab": {}, "merges": []}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model": model}))


SMALL = {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 1}
SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 2}


def architecture(name, **changes):
    """Another one, of random weights, with the debug model's tokenizer."""
    model_class = getattr(transformers, name)
    settings = {"vocab_size": 17} | (changes if "d_model" in changes else SMALL | changes)
    return lambda folder: model_class(model_class.config_class(**settings)).save_pretrained(folder)


def classifier(*changes, flag="reward_model_path", **settings):
    settings = {"num_labels": 1} | settings
    return model(architecture("Qwen2ForSequenceClassification", **settings), *changes, flag=flag)


# -------------------------------------------------------------------------------------------- data
# name: (builder, words of the line), for the three scripts; or with the scripts that it is for.
# Words are separated by bars.

CSV = file("dataset", "csv/a.csv", "prompt,x\n5=,2\n")
REFUSES = file("chat_template", "t.jinja", "{{ raise_exception('no system role') }}")
ENDLESS = file("chat_template", "t.jinja", "{% for i in range(99999) %}" * 4 + "{% endfor %}" * 4)
FILES = {
    "no file": (missing("dataset", "no.parquet"), "no.parquet | no such file", EVERY),
    "no debug data": (given(dataset="debug_assets/no.parquet"), "make_debug_assets.py", EVERY),
    "no held-out file": (missing("eval_dataset", "no.jsonl"), "no.jsonl | no such file", EVERY),
    "neither file nor hub": (given(dataset="no/such"), "no/such | .parquet | hub"),
    "empty path": (given(dataset=""), "--dataset is empty", EVERY),
    "name too long": (given(dataset="x" * 5000 + ".jsonl"), ".jsonl | no such", EVERY),
    "name with control characters": (given(dataset="a\x1b[31m\ud800.jsonl"), r"a\x1b[31m"),
    "empty": (rows(), "data.jsonl | empty", EVERY),
    "empty parquet": (parquet("dataset", prompt=[], data_source=[]), "data.parquet | empty"),
    "garbage": (file("dataset", "x.jsonl", "{{{\n"), "x.jsonl | read", EVERY),
    "garbage parquet": (file("dataset", "x.parquet", "rubbish"), "x.parquet | read"),
    "row that is a text": (rows("53812="), "data.jsonl | read", EVERY),
    "waits for a writer": (fifo, "x.jsonl: no such file"),
    "latin-1": (file("dataset", "x.jsonl", b'{"prompt": "\xe4"}'), "x.jsonl | utf-8", EVERY),
    "too deep": (file("dataset", "x.jsonl", "[" * 100_000), "x.jsonl | recursion"),
    "CSV": (CSV, "a.csv | .parquet | .jsonl"),
    "folder of CSV": (together(CSV, missing("dataset", "csv")), "csv | `data_source`"),
    "no column prompt": (rows({"data_source": "a"}), "data.jsonl | `prompt` | data_source"),
    "no column data_source": (rows({"prompt": "1="}), "data.jsonl | `data_source` | --reward_fn"),
    "odd columns": (rows({"a\x1b[31m": 1, "[red]b": 2}), r"`prompt` | a\x1b[31m, [red]b"),
    "all prompts too long": (given(max_prompt_token_length=3), "--max_prompt_token_length | none"),
    "no template": (missing("chat_template", "no.jinja"), "--chat_template | no.jinja", EVERY),
    "template that is a program": (given(chat_template="/bin/ls"), "/bin/ls | utf-8"),
    "template without end": (given(chat_template="/dev/zero"), "no such file", EVERY),
    "template in latin-1": (file("chat_template", "t.jinja", b"\xe4"), "t.jinja | utf-8"),
    "huge template": (file("chat_template", "t.jinja", "x" * 2**21), "larger than 1 MiB", EVERY),
    "template that refuses": (REFUSES, "row 0 | `prompt` | --chat_template | no system role"),
    "template that runs for ever": (ENDLESS, "good.jsonl, row 0 | longer than 5 seconds"),
}

OPEN_INSTRUCT = {"messages": [ASK], "ground_truth": "72", "dataset": "gsm8k"}
# As of preferences: what stands in place of a ground truth is for a reward model
HH = ROW | {"reward_model": {"style": "model", "ground_truth": "the chosen answer"}}
NO_TRUTH = "ground_truth | --no-apply_verifiable_reward | --reward_model_path"
NO_NUMBER = ROW | {"data_source": "gsm8k", "reward_model": {"ground_truth": "many"}}

# name: (rows, the row which the line must name, its other words)
ROWS = {
    "no ground truth": ([ROW, ROW, ROW | {"reward_model": {"style": "rule"}}], 2, NO_TRUTH),
    "no column reward_model": ([{"prompt": "1=", "data_source": "gsm8k"}], 0, "ground_truth"),
    "reward_model is a text": ([ROW | {"reward_model": "12358"}], 0, "ground_truth"),
    "for a reward model": ([HH], 0, NO_TRUTH),
    "for a reward model among others": ([ROW, HH], 1, NO_TRUTH),
    "source unknown": ([ROW, ROW | {"data_source": "no/such"}], 1, "no/such | gsm8k | --reward_fn"),
    "source is a list": ([OPEN_INSTRUCT | {"dataset": ["gsm8k"]}], 0, "`data_source` | string"),
    "source with control characters": ([ROW | {"data_source": "\x1b[31mx"}], 0, r"\x1b[31mx"),
    "prompt is a number": ([ROW | {"prompt": 5}], 0, "`prompt`"),
    "prompt is null": ([ROW, ROW | {"prompt": None}], 1, "`prompt`"),
    "prompt is a list of texts": ([ROW | {"prompt": ["5="]}], 0, "`prompt` | messages"),
    "prompt with a lone surrogate": ([ROW | {"prompt": "\ud800"}], 0, "`prompt`"),
    "message without content": ([ROW | {"prompt": [{"role": "user"}]}], 0, "content"),
}
REWARD_MODEL = classifier()
OF_NO_USE = together(REWARD_MODEL, given(reward_model_multiplier=0.0))
SURROGATE = ROW | {"reward_model": {"ground_truth": "\ud800"}}
ROWS = {
    name: (rows(*some), f"data.jsonl, row {number} | {words}")
    for name, (some, number, words) in ROWS.items()
} | {
    "for a reward model of weight 0": (together(rows(ROW, HH), OF_NO_USE), f"row 1 | {NO_TRUTH}"),
    "all for a reward model": (together(rows(HH, HH), REWARD_MODEL), f"every row | {NO_TRUTH}"),
    "held-out without a rule": (rows(ROW, HH, flag="eval_dataset"), "data.jsonl, row 1"),
    "held-out, no number": (rows(ROW, NO_NUMBER, flag="eval_dataset"), "row 1 | 'many'"),
    "held-out with a surrogate": (rows(SURROGATE, flag="eval_dataset"), "row 0 | surrogates"),
    "a decimal": (truth(decimal.Decimal("1.5")), "data.parquet, row 0 | JSON"),
    "a date": (truth(datetime.date(2020, 1, 1)), "data.parquet, row 0 | JSON"),
    "bytes": (truth(b"12358"), "data.parquet, row 0 | JSON"),
}

# Of the reward model's training
PAIRS = {
    "no column": (rows({"prompt": "1", "answer": "2"}), "`chosen`, `rejected` | answer"),
    "no prompt": (rows(PAIR, {"chosen": "1", "rejected": "2"}), "row 1 | `chosen` | `prompt`"),
    "rejected is null": (rows(PAIR, PAIR | {"rejected": None}), "row 1 | `rejected`"),
    "no text": (rows(PAIR | {"chosen": [ASK, GOOD | {"content": None}]}), "row 0 | `chosen`"),
    "user speaks last": (rows({"chosen": [ASK, GOOD], "rejected": [ASK, ASK]}), "row 0 | user"),
    "all equal": (rows(*[PAIR | {"rejected": "12358"}] * 3), "3 pairs | 3 whose responses are"),
    "all too long": (given(max_token_length=5), "good.jsonl | 70 longer than --max_token_length 5"),
    "too few": (given(local_mini_batch_size=80), "good.jsonl | 70 pairs | --local_mini_batch_size"),
    "rate": (given(learning_rate=-1.0), "--learning_rate | -1.0 | 0"),
    "not finite": (given(center_rewards_coefficient="nan"), "--center_rewards_coefficient"),
    "warm-up of more than all": (given(warmup_ratio=1.5), "--warmup_ratio | at most 1"),
    "two labels": (classifier(flag="model_name_or_path", num_labels=2), "2 labels"),
    "encoder": (classifier(flag="model_name_or_path", is_causal=False), "later tokens"),
}

# ------------------------------------------------------------------------------------------ models

WEIGHTS, GENERATION = "model.safetensors", "generation_config.json"
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
WITHOUT_Q_PROJ = tensors(lambda found: found.pop(Q_PROJ))
NAN = tensors(lambda found: found[Q_PROJ].view(-1)[5:6].fill_(math.nan))
INFINITE = tensors(lambda found: found[Q_PROJ].view(-1)[5:6].fill_(math.inf))
PICKLED = (remove(WEIGHTS), content("pytorch_model.bin", b""))
INDEX = {"metadata": {}, "weight_map": {Q_PROJ: "model-00002-of-00002.safetensors"}}
INDEX = content("model.safetensors.index.json", json.dumps(INDEX).encode())
NO_SHARD = (remove(WEIGHTS), INDEX)
QUANTIZED = config(quantization_config={"quant_method": "nothing"})
OWN_CODE = config(model_type="mine", auto_map={"AutoConfig": "mine.Config"})
T5 = architecture("T5ForConditionalGeneration", d_model=32, num_layers=1, d_ff=8)
OF_WHISPER = {"d_model": 30, "encoder_layers": 1, "decoder_layers": 1, "pad_token_id": 1}
WHISPER = architecture("WhisperForConditionalGeneration", **OF_WHISPER)
VIT = architecture("ViTForImageClassification", vocab_size=None)
RECURRENT_GEMMA = architecture("RecurrentGemmaForCausalLM", lru_width=32)
OF_FALCON = {"mamba_d_ssm": 32, "mamba_n_heads": 2, "mamba_d_head": 16, "lm_head_multiplier": 0.5}
FALCON = architecture("FalconH1ForCausalLM", **OF_FALCON)
HYPERCLOVAX = architecture("HyperCLOVAXForCausalLM", logits_scaling=4.0)
GEMMA = architecture("Gemma2ForCausalLM", head_dim=16, final_logit_softcapping=30.0)
NINE = architecture("Qwen2ForCausalLM", vocab_size=9, eos_token_id=1)
BERT = architecture("BertForSequenceClassification", num_labels=1)
NO_END = (content(GENERATION, b"{}"), config(eos_token_id=None))


def pickle_weights(folder):
    """The same weights in PyTorch's own format alone."""
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()


ADAPTERS = given(lora_rank=8, learning_rate=1e-5)
GPT2 = together(model(architecture("GPT2LMHeadModel", eos_token_id=1)), ADAPTERS)
STABLELM = together(model(architecture("StableLmForCausalLM")), ADAPTERS)

NO_TOKENIZER = (remove("tokenizer.json"), remove("tokenizer_config.json"))
EMPTY_TOKENIZER = model(empty_vocabulary, flag="tokenizer_name_or_path")

# A model to train a reward model from need not be a decoder, and has no generation config
MODELS = {
    "no folder": (missing("model_name_or_path"), "--model_name_or_path | none", EVERY),
    "not on the hub": (given(model_name_or_path="no/such"), "--model_name_or_path | no/such"),
    "no debug model": (given(model_name_or_path="debug_assets/no"), "make_debug_assets.py"),
    "empty path": (given(model_name_or_path=""), "--model_name_or_path is empty"),
    "name too long": (given(model_name_or_path="x" * 5000), "--model_name"),
    "no weights": (model(remove(WEIGHTS)), "safetensors | no file named", EVERY),
    "empty weights": (model(content(WEIGHTS, b"")), "--model_name_or_path | header", EVERY),
    "weights cut off": (model(cut_off), "--model_name_or_path | incomplete", EVERY),
    "rubbish for weights": (model(content(WEIGHTS, b"\xff" * 999)), "header", EVERY),
    "another shape": (model(config(intermediate_size=7)), "down_proj.weight | [64, 7]", EVERY),
    "a tensor lacks": (model(WITHOUT_Q_PROJ), f"lack | {Q_PROJ}", EVERY),
    "not a number": (model(NAN), f"{Q_PROJ} | finite", EVERY),
    "infinite": (model(INFINITE), f"{Q_PROJ} | finite", EVERY),
    "a shard lacks": (model(*NO_SHARD), "model-00002-of-00002.safetensors", EVERY),
    "empty pickle": (model(*PICKLED), "--model_name_or_path | weights", EVERY),
    "T5": (model(T5), "T5Config"),
    "BERT": (model(architecture("BertForMaskedLM")), "BertForMaskedLM | decoder"),
    "ViT": (model(VIT), "ViTConfig"),
    "whisper": (model(WHISPER), "WhisperForConditionalGeneration | decoder"),
    "head with a bias": (
        model(architecture("PhiForCausalLM")),
        "bias of the head of a PhiForCausalLM",
    ),
    "capped logits": (model(RECURRENT_GEMMA), "RecurrentGemmaForCausalLM | logits_soft_cap"),
    "multiplied logits": (model(FALCON), "FalconH1ForCausalLM | lm_head_multiplier"),
    "scaled logits": (model(HYPERCLOVAX), "HyperCLOVAXForCausalLM | logits_scaling"),
    "no heads": (model(config(num_attention_heads=0)), "config.json", EVERY),
    "heads that do not share": (model(config(num_key_value_heads=3)), "2 attention heads | 3 key"),
    "unknown activation": (model(config(hidden_act="swoosh")), "swoosh", EVERY),
    "unknown rope": (model(config(rope_parameters={"rope_type": "string"})), "string", EVERY),
    "negative size": (model(config(hidden_size=-1)), "negative dimension", EVERY),
    "pad token beyond the vocabulary": (model(config(pad_token_id=999)), "Padding_idx"),
    "end token beyond": (model(content(GENERATION, b'{"eos_token_id": 999}')), "999 | vocabulary"),
    "end token of text": (model(content(GENERATION, b'{"eos_token_id": "."}')), "'.' | vocabulary"),
    "no end token": (model(*NO_END), "stop token | --stop_token"),
    "broken generation config": (model(content(GENERATION, b"{{")), GENERATION),
    "quantized by nothing": (model(QUANTIZED), "quantized", EVERY),
    "code of its own": (model(OWN_CODE), "custom code", EVERY),
    "config that is a list": (model(content("config.json", b"[]")), "model_type", EVERY),
    "adapters of no linear layers": (GPT2, "--lora_rank | no linear layers"),
    "adapters without vLLM's": (STABLELM, "--lora_rank | vLLM's StableLmForCausalLM"),
    "unknown attention": (given(attn_implementation="none"), "none | eager", EVERY),
    "attention not installed": (given(attn_implementation="flash_attention_3"), "FlashAttention3"),
    "too few positions": (given(response_length=512), "--response_length | positions | 512"),
    "no tokenizer": (missing("tokenizer_name_or_path"), "--tokenizer_name_or_path | none", EVERY),
    "broken tokenizer": (model(content("tokenizer.json", b"{")), "--model_name_or_path", EVERY),
    "tokenizer lacks": (model(*NO_TOKENIZER), "--model_name_or_path | tokenizer", EVERY),
    "empty tokenizer": (EMPTY_TOKENIZER, "tokenizer | --tokenizer_name_or_path", EVERY),
    "no chat template": (
        model(remove("chat_template.jinja")),
        "row 0 | `prompt` | --chat_template",
    ),
    "tokenizer of another": (model(NINE), "tokenizer | 17 | 9"),
    "unknown stop token": (given(stop_token="<|stop|>"), "--stop_token | <|stop|>", EVERY),
    "stop token beyond": (given(stop_token_id=17), "17 | --stop_token_id"),
}

CLASSIFIERS = {
    "none": (missing, "none"),
    "cut off": (lambda flag: classifier(cut_off, flag=flag), "incomplete"),
    "a tensor lacks": (lambda flag: classifier(WITHOUT_Q_PROJ, flag=flag), Q_PROJ),
    "two labels": (lambda flag: classifier(num_labels=2, flag=flag), "one label | has 2"),
    "vocabulary": (lambda flag: classifier(vocab_size=99, flag=flag), "vocabulary of 17"),
    "encoder": (lambda flag: classifier(is_causal=False, flag=flag), "attends to later tokens"),
}
CLASSIFIERS = {
    f"{flag}, {name}": (make(flag), f"--{flag} | {words}", scripts)
    for flag, scripts in (("value_model_path", PPO), ("reward_model_path", SCRIPTS))
    for name, (make, words) in CLASSIFIERS.items()
} | {
    "value model, no vocabulary": (model(VIT, flag="value_model_path"), "vocabulary of 17", PPO),
    "value model, other head": (model(BERT, flag="value_model_path"), "no head named score", PPO),
    "reward model, no head": (given(reward_model_path=MODEL), "--reward_model_path | one label"),
    "reward model, tokenizer": (classifier(swap_digits), "--reward_model_path | tokenizer"),
}

# ----------------------------------------------------------------------------------------- rewards

FUNCTIONS = "def first(*_, extra_info): return 1.0\ndef second(*_, extra_info): return 1.0\n"
PARSER = "import argparse\nargparse.ArgumentParser().parse_args(['--unknown'])\n"
CLOSED_STDERR = """import os, sys
sys.stderr.close()
os.closerange(0, 3)
def f(*_, extra_info): raise ValueError("no such thing")
"""
# Nothing of what it prints is shown
TALKATIVE = """import argparse, sys, warnings
warnings.warn("careful")
print("imported")
def f(*_, extra_info):
    print("called", file=sys.stderr)
    argparse.ArgumentParser().parse_args(["--help"])
"""
FIVE = ROW | {"reward_model": {"ground_truth": "5"}}
# The wrong answer to a row is another row's ground truth
WRONG = together(call("return 1.0 / (_[1] != '5')"), rows(*[ROW] * 35, *[FIVE] * 35))
EMPTY = reward("def f(_, text, truth, extra_info): return float(text[0] == '1')\n")
HANGS = together(call("time.sleep(1000)"), given(reward_timeout=0.5))
OF_ROW = "good.jsonl, row 0 | r.py:f"

NO_REWARD = "no reward | --apply_verifiable_reward | --reward_model_path"
REWARDS = {
    "none": (given(apply_verifiable_reward=False), NO_REWARD),
    "weight 0": (together(OF_NO_USE, given(apply_verifiable_reward=False)), NO_REWARD),
    "no file": (missing("reward_fn", "none.py:f"), "--reward_fn | none.py | No such file"),
    "function not named": (reward(FUNCTIONS, function=""), "r.py:first | r.py:second"),
    "no such function": (reward(FUNCTIONS), "--reward_fn | r.py:f: | r.py:first | r.py:second"),
    "no function": (reward("f = 1.0\n" + FUNCTIONS), "--reward_fn | r.py:f: | r.py:first"),
    "not of Python": (reward(FUNCTIONS, name="r.txt"), "--reward_fn | r.txt | file.py:function"),
    "mistake": (reward("def f(:\n"), "--reward_fn | r.py | SyntaxError | line 1"),
    "file fails": (reward("import os\nos.environ['NO']\n"), "r.py | KeyError | line 2"),
    "file exits": (reward("import sys\nsys.exit('no licence')\n"), "r.py | SystemExit: no licence"),
    "file crashes": (reward("import os\nos.abort()\n"), "r.py | exit code -6"),
    # Where the seconds that an import may take are set to a few
    "file hangs": (reward("import time\ntime.sleep(1000)\n"), "r.py:f | TimeoutError"),
    "file parses arguments": (reward(PARSER), "r.py:f | SystemExit | line 2"),
    "fails": (call("return 1 / 0"), f"{OF_ROW} | ZeroDivisionError | line 3"),
    # Of these the line quotes the answer
    "fails on a wrong answer": (WRONG, "data.jsonl, row 0 | answer '5' | ZeroDivisionError"),
    "fails on an empty answer": (EMPTY, f"{OF_ROW} | answer '' | IndexError"),
    "hangs": (HANGS, f"{OF_ROW} | TimeoutError | 0.5 seconds"),
    "exits": (call("sys.exit(0)"), f"{OF_ROW} | SystemExit"),
    "ends its process": (call("os._exit(0)"), f"{OF_ROW} | exit code 0"),
    "crashes": (call("ctypes.string_at(0)"), f"{OF_ROW} | exit code -11"),
    "returns nothing": (call("print(1, file=sys.stderr)"), f"{OF_ROW} | the reward is None"),
    "wants more": (reward("def f(*_, extra_info, judge): return 1.0\n"), f"{OF_ROW} | judge"),
    "dictionary": (call("return {'acc': 1.0}"), f"{OF_ROW} | {{'acc': 1.0}} | `score`"),
    "score in a dictionary": (call("return {'score': None}"), f"{OF_ROW} | the reward is None"),
    "coroutine": (reward("async def f(*_, extra_info): return 1.0\n"), "r.py:f | coroutine"),
    "closes stderr": (reward(CLOSED_STDERR), "r.py:f | no such thing | line 4"),
    "prints and exits": (reward(TALKATIVE), "SystemExit: 0 | line 6"),
    "name of Python's own module": (
        reward(FUNCTIONS, ":first", "math.py"),
        "math.py:first | rename",
    ),
    "odd error": (call(r"raise ValueError('\ud800\x1b[31m')"), r"r.py:f | \ud800\x1b[31m"),
}

# ------------------------------------------------------------------------- numbers, GPUs, folders

TEN = {"total_episodes": 640}  # updates
GSPO = {"importance_sampling_level": "sequence"}
MASK = {"mismatch_mask": "token", "mismatch_mask_range": 0.5}
NUMBERS = {
    "seed": (given(seed=-1), "--seed | -1 | 0 or more"),
    "rate": (given(learning_rate=-1e-6), "--learning_rate | -1e-06 | 0"),
    "value rate": (given(value_learning_rate=-1e-6), "--value_learning_rate | 0", PPO),
    "value lambda": (given(value_lam=-0.5), "--value_lam | 0", PPO),
    "response": (given(response_length=0), "--response_length | above 0"),
    "discount": (given(gamma=1.01), "--gamma | at most 1", PPO),
    "temperature": (given(temperature=2.5), "--temperature | 2"),
    "beta": (given(beta="nan"), "--beta | finite"),
    "adapters of less than nothing": (given(lora_rank=-1), "--lora_rank | 0 or more"),
    "large adapters": (given(lora_rank=513), "--lora_rank | at most 512"),
    "adapters that add nothing": (given(lora_alpha=0), "--lora_alpha | above 0"),
    "target of no penalty": (given(beta=0.0, kl_target=6.0), "--kl_target | --beta", PPO),
    "held-out prompts": (given(eval_prompts=-1), "--eval_prompts | 0 or more"),
    "stop token below 0": (given(stop_token_id=-5), "--stop_token_id | 0 or more"),
    "penalty": (given(penalty_reward_value="nan"), "--penalty_reward_value | finite"),
    "clip range": (given(cliprange="inf"), "--cliprange | finite"),
    "mask of nan": (given(mismatch_mask_range="nan"), "--mismatch_mask_range | nan"),
    "mask that leaves no ratio": (given(**MASK), "--mismatch_mask_range | 0.5 | 1 or more"),
    "second clip of 1": (given(dual_clip=1.0), "--dual_clip | 1.0 | above 1"),
    "second clip below": (given(dual_clip=0.5), "--dual_clip | 0.5 | above 1"),
    "multiplier": (given(reward_model_multiplier=-1.0), "--reward_model_multiplier | 0 or more"),
    # Not impossible, but no one means it
    "huge rate": (given(learning_rate=1e30), "--learning_rate | at most", EVERY),
    "huge value rate": (given(value_learning_rate=1e30), "--value_learning_rate | at most", PPO),
    "huge decay": (given(weight_decay=1e30), "--weight_decay | at most"),
    "huge value clip": (given(cliprange_value=1e308), "--cliprange_value | at most", PPO),
    "huge beta": (given(beta=1e308), "--beta | at most"),
    "huge reward": (given(verification_reward=1e308), "--verification_reward | at most"),
    "huge timeout": (given(reward_timeout=1e308), "--reward_timeout | at most"),
    "huge penalty": (given(penalty_reward_value=-1e308), "--penalty_reward_value | at least"),
    "many evaluations": (given(num_evals=10**9), "--num_evals | at most"),
    "many epochs": (given(num_epochs=10**8), "--num_epochs | at most"),
    "tokens of less than a row": (
        given(micro_batch_tokens=14),
        "--micro_batch_tokens 14 | takes 16",
    ),
    "many workers": (given(reward_workers=10**9), "--reward_workers | at most"),
    "many episodes": (given(total_episodes=10**30), "--total_episodes | at most"),
    "cold": (given(temperature=1e-300), "--temperature | at least"),
    "cold evaluation": (given(eval_temperature=1e-300), "--eval_temperature | at least"),
    "small epsilon": (given(eps=1e-300), "--eps | at least"),
    # Which do not fit each other
    "rest of a step": (given(local_mini_batch_size=24), "(64) | (24) | 16 or 32"),
    "billion": (given(local_rollout_batch_size=10**8, number_samples_per_prompt=10), "a million"),
    "no step": (given(total_episodes=63), "--total_episodes"),
    "warm-up": (given(**TEN, warm_up_steps=10), "warm_up_steps | 10 updates"),
    "warm-up of all": (given(**TEN, warmup_ratio=1.0), "10 updates"),
    "warm-up, rounded": (given(total_episodes=64, warmup_ratio=0.6), "1 updates"),
    "both warm-ups": (given(**TEN, value_warmup_steps=7, warm_up_steps=3), "3 updates", PPO),
    "value warm-up": (given(**TEN, value_warmup_steps=10), "--value_warmup_steps", PPO),
    "group of one": (given(number_samples_per_prompt=1, local_mini_batch_size=32), "group", GRPO),
    "mask of equal ratios": (given(**GSPO, mismatch_mask="token"), "--mismatch_mask token", GRPO),
}

# With --num_processes 2, on a node of eight GPUs: (vllm_gpus, words of their own; size, words)
GPUS = {
    "a learner's": ("1 2", 1, "--vllm_gpus (1, 2)"),
    "not there": ("7 8", 1, "--vllm_gpus (7, 8)"),
    "twice": ("2 2", 1, "--vllm_gpus (2, 2) | each named once"),
    "twice for one engine": ("2 2", 2, "--vllm_gpus (2, 2) | each named once"),
    "half an engine": ("2 3 4", 2, "--vllm_gpus (2, 3, 4) | --vllm_tensor_parallel_size"),
    "less than an engine": ("2 3", 4, "--vllm_gpus (2, 3) | --vllm_tensor_parallel_size"),
    "a shared one and another": (None, 2, "--vllm_tensor_parallel_size | --vllm_gpus"),
}
GPUS = {
    name: (given(vllm_gpus=gpus, vllm_tensor_parallel_size=size), words)
    for name, (gpus, size, words) in GPUS.items()
}

OTHER_RUN = file("output_dir", "output/mine/metrics.jsonl", "{}\n")
OTHER_RUN = together(OTHER_RUN, missing("output_dir", "output"), given(run_name="mine"))
A_FILE = file("output_dir", "file", "")
FOLDERS = {
    "a file": (A_FILE, "--output_dir", EVERY),
    "below a file": (together(A_FILE, missing("output_dir", "file/x")), "--output_dir", EVERY),
    "not to be written to": (given(output_dir="/proc"), "--output_dir", EVERY),
    "dangling link": (link("nowhere"), "link", EVERY),
    "loop of links": (link("link"), "link", EVERY),
    "dangling run": (link("nowhere", output_dir=".", run_name="link"), "link", EVERY),
    "long name": (given(run_name="x" * 300), "--output_dir", EVERY),
    "long path": (missing("output_dir", "/".join(["x" * 200] * 30)), "--output_dir", EVERY),
    "name that is not UTF-8": (missing("output_dir", "r\udcff"), "--output_dir", EVERY),
    "another run": (OTHER_RUN, "mine | another run | --run_name", EVERY),
}

TABLES = {
    "data": FILES,
    "row": ROWS,
    "pairs": PAIRS,
    "model": MODELS,
    "classifier": CLASSIFIERS,
    "reward": REWARDS,
    "number": NUMBERS,
    "GPUs": GPUS,
    "output": FOLDERS,
}
CASES = {
    f"{subject}: {name}": (make, words.split(" | "), *(scripts or [default]))
    for subject, table in TABLES.items()
    for default in [TRAINER if table is PAIRS else SCRIPTS]
    for name, (make, words, *scripts) in table.items()
}

# What preflight is told of the machines, for the case; for those of GPUS
EIGHT_GPUS = {"num_processes": 2, "num_gpus": 8}
SHARDED = REPO / "scripts" / "accelerate" / "fsdp2.yaml"
FSDP2 = "scripts/accelerate/fsdp2.yaml | fsdp_version 2"


def launch_file(**changes):
    """A function from a folder to what preflight is told: to read a changed fsdp2.yaml."""
    content = yaml.safe_load(SHARDED.read_text()) | changes
    return file("config_file", "launch.yaml", yaml.dump(content))


# name: (the same, or what makes it in a folder; options, words)
LAUNCHES = {
    "no processes": ({"num_processes": 0}, {}, "--num_processes"),
    "no machines": ({"num_machines": 0}, {}, "--num_machines"),
    "uneven machines": ({"num_processes": 3, "num_machines": 2}, {}, "--num_machines"),
    "too few GPUs": ({"num_processes": 4, "num_gpus": 2}, {}, "4 learners | 2 GPUs"),
    "memory of vLLM": (
        {"num_gpus": 1, "gpu_memory": 2.0},
        {"vllm_gpu_memory_utilization": 0.1},
        "--vllm_gpu_memory_utilization 0.1 | GiB",
    ),
    "memory of a learner": (
        {"num_gpus": 2, "gpu_memory": 1.25},
        {"vllm_gpus": "1", "per_device_train_batch_size": 64, "response_length": 500}
        | {"gradient_checkpointing": False},
        "a learner needs about 1.4 GiB of its GPU, and has 1.2 GiB; this fits: | "
        "--gradient_checkpointing: 1.1 GiB of 1.2 GiB; --micro_batch_tokens 508: 1.0 GiB of",
    ),
    # Each fits, and the two do not, with 2 GiB for CUDA
    "memory of both": (
        {"num_gpus": 1, "gpu_memory": 10.0},
        {"vllm_gpu_memory_utilization": 0.8},
        "a learner needs about | has 0.0 MiB; this fits: --vllm_gpu_memory_utilization 0.",
    ),
    # Another would do, but it is not there
    "memory of nothing": (
        {"num_gpus": 1, "gpu_memory": 0.5},
        {},
        "a learner needs about | no flags make room",
    ),
    "no such file": ({"config_file": "no.yaml"}, {}, "no.yaml | scripts/accelerate"),
    "FSDP1": (launch_file(fsdp_config={"fsdp_version": 1}), {}, FSDP2),
    "FSDP without a version": (launch_file(fsdp_config={}), {}, FSDP2),
    "RAM-efficient loading": (launch_file(fsdp_config={"fsdp_version": 2}), {}, FSDP2),
    "DeepSpeed": (launch_file(distributed_type="DEEPSPEED"), {}, FSDP2),
    "file without numbers": (launch_file(num_processes="all"), {}, "launch.yaml | 'all'"),
    "sharded reward model": (
        {"config_file": SHARDED},
        {"local_mini_batch_size": 8},
        "scripts/accelerate/ddp.yaml",
        TRAINER,
    ),
}


# A fork is a file with the name fork.py, of ppo_vllm_async.py unless the case says otherwise


def fork(text, name="fork.py"):
    return lambda folder: write_text(folder / name, text)


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
    "not there": (lambda folder: folder / "none.py", "none.py | no such"),
    "no Python by its name": (fork("", "fork.sh"), "fork.sh | script"),
    "no Python": (fork("def f(:\n"), "fork.py | SyntaxError | line 1"),
    "fails": (fork("\nraise OSError('no licence')\n"), "fork.py | OSError: no licence | line 2"),
    "exits": (fork("import sys\nsys.exit(0)\n"), "fork.py | SystemExit"),
    "no script": (fork("x = 1\n"), "fork.py | Args"),
    "another name of fill_in": (rename("fill_in"), "the script has no fill_in"),
    "other names for data": (rename("load_rows", "load_prompts"), "the script has no load_rows"),
    "other names for rows": (
        rename("read_prompt", "load_prompts"),
        "the script has no read_prompt",
    ),
    "another name of compute_score": (rename("compute_score"), "the script has no compute_score"),
    "no held-out data": (rename("eval_dataset"), "eval_dataset"),
}

# ------------------------------------------------------------------------------------- checkpoints


def filled_in(script, options):
    """Arguments of a run as its main() has them when it writes args.json, and the prompts."""
    module = importlib.import_module(Path(script).stem)
    args = tyro.cli(module.Args, args=words_of(options))
    if script in TRAINER:
        tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
        args.stop_token_id = tokenizer.eos_token_id
        rows = module.load_pairs(None, args.dataset, args.dataset_split, tokenizer, args)
        args.mini_batch_size = args.local_mini_batch_size
        args.num_updates = len(rows) * args.num_train_epochs // args.mini_batch_size
        args.data_hash = hashlib.sha256(repr(rows).encode()).hexdigest()
        return args, rows
    args = module.fill_in(args, 1)
    tokenizers = module.load_tokenizers(args)
    rows = module.load_prompts(args.dataset, "train", *tokenizers, args, is_eval=False)
    args.data_hash = module.stable_hash([module.stable_hash(replace(row, row="")) for row in rows])
    args.stop_token_ids = (1,)
    return args, rows


def options_of_run(folder, script):
    """Of ten steps, or of eight updates of a reward model."""
    length = {"local_mini_batch_size": 8} if script in TRAINER else {"total_episodes": 640}
    return good_options(folder, script) | length


def stepped():
    """A small model, and its optimizer after a step."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2)).backward()
    optimizer.step()
    return model, optimizer


def save_run(folder, script):
    """A run that was interrupted in step 8, with checkpoints after 3 and 6 whose weights are small.

    Its folder is output/run.
    """
    module = importlib.import_module(Path(script).stem)
    args, rows = filled_in(script, options_of_run(folder, script))
    run_dir = folder / "output" / "run"
    write_text(run_dir / "args.json", json.dumps(asdict(args), indent=2))
    state = {"seconds": 12.5, "wandb_id": "abc"}
    trained = {"policy": stepped()}
    if script in PPO:
        state["beta"] = args.beta
        trained["value_model"] = stepped()
    checkpoint = run_dir / "checkpoints/unfinished"
    rank_0 = SimpleNamespace(is_main_process=True)
    for step in range(1, 8):
        with open(run_dir / "metrics.jsonl", "a") as file:
            file.write(json.dumps({"training_step": step}) + "\n")
        if step in (3, 6):
            checkpoint.mkdir(parents=True)
            if script in TRAINER:  # accelerate's save_state writes these
                save_file({"weight": torch.ones(2)}, checkpoint / "model.safetensors")
                torch.save({"state": {}, "param_groups": []}, checkpoint / "optimizer.bin")
                (checkpoint / "random_states_0.pkl").write_bytes(pickle.dumps({}))
            else:
                module.save_models(trained, checkpoint)
            if script in ASYNC:
                ids, logprobs = np.array([5, 1], np.int32), np.array([-0.5, -0.25], np.float32)
                responses = [module.Response(row, ids, logprobs, True, "5") for row in rows[:64]]
                module.save_rollout(run_dir, module.Rollout(step - 1, responses, [], {}))
                state["policy_version"] = step - 1
            module.finish_checkpoint(rank_0, run_dir, step, state, args)


# What may have happened to a run, whose folder it is given


def at(name, change, step=3):
    """A change of a file of a checkpoint."""
    return lambda run_dir: change(run_dir / "checkpoints" / f"step_{step}" / name)


def cut(path):
    os.truncate(path, path.stat().st_size - 9)


def unlink(path):
    path.unlink()


def empty(path):
    path.write_bytes(b"")


def zeros(path):
    path.write_bytes(bytes(path.stat().st_size))


def rewrite(change):
    """A change of an object in JSON, which it gets."""

    def do(path):
        content = json.loads(path.read_text())
        change(content)
        path.write_text(json.dumps(content))

    return do


def list_of(path):
    path.write_text("[]")


def arguments(change):
    return lambda run_dir: change(run_dir / "args.json")


def move(old, new):
    def do(run_dir):
        (run_dir / new).parent.mkdir(exist_ok=True)
        (run_dir / "checkpoints" / old).rename(run_dir / new)

    return do


def no_checkpoints(run_dir):
    shutil.rmtree(run_dir / "checkpoints")


def nothing(run_dir):
    pass


LATEST = {"resume_from_checkpoint": "latest"}
ROLLOUT, TOKENS = "next_rollout.json", "next_rollout.safetensors"
SAVED, OF_TRAINER = "policy/__0_0.distcp", "model.safetensors"
SEVERAL = {"seed": 2, "beta": 0.5}
BATCH = {"local_rollout_batch_size": 32, "local_mini_batch_size": 32}
BATCH_OF_GRPO = {"local_rollout_batch_size": 16, "local_mini_batch_size": 32}
UNFINISHED = {"resume_from_checkpoint": "output/run/checkpoints/unfinished"}
LEFT_OVER = move("step_3", "checkpoints/unfinished")
BEST = {"resume_from_checkpoint": "output/run/best/step_3"}
DONE = {"resume_from_checkpoint": "output/run/checkpoints/step_10"}


def copy_of_model(folder):
    shutil.copytree(MODEL, folder / "model")
    return {"model_name_or_path": folder / "model"}


def other_data(folder):
    return {"dataset": write_rows(folder / "other.jsonl", [ROW] * 69)}


# name: (what has happened to the run; options, or what builds them in the folder; words)
# Unless they say otherwise, options are to resume output/run/checkpoints/step_3
CHECKPOINTS = {
    "weights cut off": (at(SAVED, cut), {}, "policy | __0_0.distcp is cut off | older"),
    "no weights": (at(SAVED, unlink), {}, "policy | __0_0.distcp | older"),
    "no list of weights": (at("policy/.metadata", unlink), {}, "policy | .metadata | older"),
    "list of zeros": (at("policy/.metadata", zeros), {}, "policy | older"),
    "no policy": (at("policy", shutil.rmtree), {}, "lacks policy | older"),
    "no value model": (at("value_model", shutil.rmtree), {}, "lacks value_model | older", PPO),
    "optimizer cut off": (
        at("policy_optimizer/__0_0.distcp", cut),
        {},
        "policy_optimizer is damaged | older",
    ),
    "trainer's weights cut off": (at(OF_TRAINER, cut), {}, f"{OF_TRAINER} | older", TRAINER),
    "trainer's weights of zeros": (at(OF_TRAINER, zeros), {}, f"{OF_TRAINER} | older", TRAINER),
    "trainer has no weights": (at(OF_TRAINER, unlink), {}, f"{OF_TRAINER} | older", TRAINER),
    "trainer's optimizer cut off": (at("optimizer.bin", cut), {}, "optimizer.bin", TRAINER),
    "trainer's optimizer is empty": (at("optimizer.bin", empty), {}, "optimizer.bin", TRAINER),
    "no state": (at("state.json", unlink), {}, "state.json | older", EVERY),
    "state cut off": (at("state.json", cut), {}, "state.json | older", EVERY),
    "state of zeros": (at("state.json", zeros), {}, "state.json | older", EVERY),
    "state that is a list": (at("state.json", list_of), {}, "state.json", EVERY),
    "state without seconds": (
        at("state.json", rewrite(lambda state: state.pop("seconds"))),
        {},
        "state.json | seconds",
        EVERY,
    ),
    "no rollout": (at(ROLLOUT, unlink), {}, ROLLOUT, ASYNC),
    "rollout cut off": (at(ROLLOUT, cut), {}, f"{ROLLOUT} | older", ASYNC),
    "rollout of zeros": (at(ROLLOUT, zeros), {}, f"{ROLLOUT} | older", ASYNC),
    "tokens cut off": (at(TOKENS, cut), {}, f"{TOKENS} | older", ASYNC),
    "no tokens": (at(TOKENS, unlink), {}, f"lacks {TOKENS} | older", ASYNC),
    "metrics cut off": (at("metrics.jsonl", cut), {}, "metrics.jsonl | older", EVERY),
    "no arguments": (arguments(unlink), {}, "args.json", EVERY),
    "arguments cut off": (arguments(cut), {}, "args.json", EVERY),
    "arguments that are a list": (arguments(list_of), {}, "args.json", EVERY),
    "arguments without the seed": (
        arguments(rewrite(lambda args: args.pop("seed"))),
        {},
        "args.json | seed",
        EVERY,
    ),
    # What is given
    "unfinished": (LEFT_OVER, UNFINISHED, "unfinished | no checkpoint", EVERY),
    "the run's folder": (
        nothing,
        {"resume_from_checkpoint": "output/run"},
        "no checkpoint | its newest | output/run/checkpoints/step_6",
        EVERY,
    ),
    "no such folder": (
        nothing,
        {"resume_from_checkpoint": "output/run/checkpoints/step_4"},
        "step_4 | no checkpoint",
        EVERY,
    ),
    "elsewhere": (move("step_3", "best/step_3"), BEST, "no checkpoint | /checkpoints/step_", EVERY),
    "empty": (nothing, {"resume_from_checkpoint": ""}, "--resume_from_checkpoint", EVERY),
    "latest of no run": (nothing, LATEST | {"run_name": None}, "--run_name", EVERY),
    "latest of another": (
        nothing,
        LATEST | {"run_name": "other"},
        "other has no checkpoint | --run_name",
        EVERY,
    ),
    "latest of none": (no_checkpoints, LATEST, "run has no checkpoint", EVERY),
    "latest, cut off": (at(SAVED, cut, 6), LATEST, "step_6 | older"),
    "all steps are done": (
        move("step_6", "checkpoints/step_10"),
        DONE,
        "step_10 | 10 steps are done",
    ),
    # Arguments by which the steps so far would have been others
    "seed": (nothing, {"seed": 2}, "seed was 1 and is 2", EVERY),
    "beta": (nothing, {"beta": 0.5}, "beta was 0.001 and is 0.5", PPO),
    "several": (nothing, SEVERAL, "seed was 1 and is 2 | beta was 0.001 and is 0.5", PPO),
    "epochs": (nothing, {"num_epochs": 2}, "num_epochs was 1 and is 2"),
    "data": (nothing, other_data, "--dataset"),
    "held-out data": (
        nothing,
        lambda folder: {"eval_dataset": write_rows(folder / "other.jsonl", [ROW] * 8)},
        "--eval_dataset",
    ),
    "batches": (nothing, BATCH, "episodes_per_step was 64 and is 32", PPO),
    "batches of GRPO": (nothing, BATCH_OF_GRPO, "episodes_per_step was 64 and is 32", GRPO),
    "samples": (
        nothing,
        {"number_samples_per_prompt": 4, "local_rollout_batch_size": 16},
        "number_samples_per_prompt was",
    ),
    "mini-batches": (nothing, {"local_mini_batch_size": 32}, "mini_batch_size was 64 and is 32"),
    "longer": (nothing, {"total_episodes": 1280}, "num_updates was 10 and is 20"),
    "shorter": (nothing, {"total_episodes": 128}, "num_updates was 10 and is 2"),
    "evaluations": (nothing, {"num_evals": 5}, "num_evals was 10 and is 5", ASYNC),
    "warm evaluations": (
        nothing,
        {"eval_temperature": 0.5},
        "eval_temperature was 0.0 and is 0.5",
        ASYNC,
    ),
    "another model": (nothing, copy_of_model, "model_name_or_path was"),
    "adapters": (nothing, {"lora_rank": 8}, "lora_rank was 0 and is 8"),
    "larger adapters": (nothing, {"lora_alpha": 16}, "lora_alpha was 32 and is 16"),
    "before there were adapters": (
        arguments(rewrite(lambda saved: saved.pop("lora_rank"))),
        {},
        "another script: lora_rank missing",
    ),
    "pairs": (
        nothing,
        lambda folder: {"dataset": write_rows(folder / "other.jsonl", [PAIR] * 69)},
        "--dataset",
        TRAINER,
    ),
    "batches of pairs": (
        nothing,
        {"local_mini_batch_size": 16},
        "mini_batch_size was 8 and is 16; num_updates was 8 and is 4",
        TRAINER,
    ),
}

# name: (the script that has written it, the one that is to go on, words)
OTHER_SCRIPTS = {
    "PPO by GRPO": ("ppo_vllm_async.py", "grpo_vllm_async.py", "another script"),
    "GRPO by PPO": ("grpo_vllm_async.py", "ppo_vllm_async.py", "another script"),
    "synchronous by asynchronous": ("ppo_sync.py", "ppo_vllm_async.py", "another script"),
    "reward model by PPO": ("scripts/train_reward_model.py", "ppo_sync.py", "another script"),
}


def move_data(folder):
    (folder / "good.jsonl").rename(folder / "moved.jsonl")
    return {"dataset": folder / "moved.jsonl"}


def added(saved):
    saved.update(provenance={"command": []}, hf_repo_url="https://huggingface.co/a")


# Nothing is wrong. name: (as in CHECKPOINTS, words of the plan, scripts)
RESUMED = {
    "older": (nothing, {}, "resumes | checkpoints/step_3 and removes what is newer: step_6", EVERY),
    "newest": (nothing, LATEST, "resumes | checkpoints/step_6", EVERY),
    "unfinished besides": (move("step_6", "checkpoints/unfinished"), LATEST, "step_3", EVERY),
    "another folder is given": (nothing, {"run_name": "other"}, "run/checkpoints/step_3", EVERY),
    "moved data": (nothing, move_data, "dataset was | moved.jsonl", EVERY),
    "rate": (nothing, {"learning_rate": 0.5}, "learning_rate was | and is 0.5", EVERY),
    "model": (nothing, copy_of_model, "model_name_or_path was | and is", TRAINER),
    "what programs add": (arguments(rewrite(added)), {}, "step_3", EVERY),
    "evaluations": (nothing, {"num_evals": 5, "eval_temperature": 0.5}, "step_3", PPO[:1]),
    "adapted beta": (
        at("state.json", rewrite(lambda state: state.update(beta=0.03))),
        {"kl_target": 6.0},
        "step_3",
        PPO,
    ),
}

# ------------------------------------------------------------------------- not from options alone

# name: (flags as they are typed, words)
FLAGS = {
    "unknown": ("--bogus 3", "--bogus | --help"),
    "misspelt": ("--learning_rat 1", "--learning_rat | --learning_rate"),
    "no such choice": ("--lr_scheduler_type cubic", "cubic | linear | cosine | constant"),
    "no number": ("--total_episodes many", "many | total"),
}

ACCUMULATION = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
# name: (variables of a launcher or of accelerate that are left in the environment, words)
ENVIRONMENTS = {
    "rank of no number": ({"RANK": "first"}, "RANK"),
    "empty rank": ({"LOCAL_RANK": ""}, "LOCAL_RANK"),
    "rank below 0": ({"LOCAL_RANK": "-1"}, "LOCAL_RANK"),
    "rank beyond the world": ({"RANK": "5"}, "RANK"),
    "rank without a world": ({"LOCAL_RANK": "0"}, "LOCAL_RANK"),
    "world without ranks": ({"WORLD_SIZE": "2"}, "WORLD_SIZE"),
    "world of nobody": ({"WORLD_SIZE": "0"}, "WORLD_SIZE"),
    "world of no number": ({"LOCAL_WORLD_SIZE": "2.5"}, "LOCAL_WORLD_SIZE"),
    "port of no number": ({"MASTER_PORT": "tcp"}, "MASTER_PORT"),
    "port beyond all": ({"MASTER_PORT": "99999"}, "MASTER_PORT"),
    "empty address": (ALONE | {"MASTER_ADDR": "", "MASTER_PORT": "1"}, "MASTER_ADDR"),
    "FSDP1": ({"ACCELERATE_USE_FSDP": "true"}, "fsdp2.yaml", SCRIPTS),
    "DeepSpeed": ({"ACCELERATE_USE_DEEPSPEED": "true"}, "fsdp2.yaml", SCRIPTS),
    "sharded reward model": ({"ACCELERATE_USE_FSDP": "1"}, "ddp.yaml", TRAINER),
    "accumulation": ({ACCUMULATION: "2"}, f"{ACCUMULATION} | 1"),
    "accumulation of nothing": ({ACCUMULATION: "0"}, f"{ACCUMULATION} | 1"),
    "unknown compiler": ({"ACCELERATE_DYNAMO_BACKEND": "x"}, "accelerate"),
}


def little_room(patch, folder):
    usage = shutil.disk_usage(folder)
    patch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10 << 20))


def nobody(patch, folder):
    for name in ("WANDB_API_KEY", "WANDB_MODE", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        patch.delenv(name, raising=False)
    patch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", folder / "home" / "token")
    for name in ("HOME", "NETRC"):
        patch.setenv(name, str(folder / "home"))


# name: (what arranges them by a MonkeyPatch in a folder, options, words)
SURROUNDINGS = {
    "little room": (little_room, {}, "--output_dir | 10 MiB free"),
    "nobody is logged in": (nobody, {"with_tracking": True}, "--with_tracking | wandb login"),
    "nor to the hub": (nobody, {"push_to_hub": True}, "--push_to_hub | hf auth login"),
}


def variable(name, value):
    return lambda patch, folder: patch.setenv(name, value)


def wsl(patch, folder):
    patch.setattr(platform, "release", lambda: "6.6.87.2-microsoft-standard-WSL2")


def exclusive(patch, folder):
    """A GPU for one process, by a stub of nvidia-smi; and no MPS."""
    program = write_text(folder / "bin" / "nvidia-smi", "#!/bin/sh\necho Exclusive_Process\n")
    program.chmod(0o755)
    patch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    patch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(folder / "pipes"))


def exclusive_by_mps(patch, folder):
    exclusive(patch, folder)
    write_text(folder / "pipes" / "control", "")


# Of a machine with two GPUs. name: (what arranges them by a MonkeyPatch in a folder, words of the
# line where the GPU is shared, None: nothing is wrong)
SEGMENTS = "expandable_segments:True | unset it"
SHARED_GPUS = {
    "expandable segments": (
        variable("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),
        f"PYTORCH_CUDA_ALLOC_CONF={SEGMENTS}",
    ),
    "expandable segments, new name": (
        variable("PYTORCH_ALLOC_CONF", "max_split_size_mb:64,expandable_segments:True"),
        f"PYTORCH_ALLOC_CONF=max_split_size_mb:64,{SEGMENTS}",
    ),
    "no expandable segments": (variable("PYTORCH_ALLOC_CONF", "expandable_segments:False"), None),
    "WSL": (wsl, "WSL has no CUDA IPC | use Linux"),
    "exclusive": (exclusive, "Exclusive_Process | nvidia-smi --compute-mode=0 | MPS"),
    "exclusive, by MPS": (exclusive_by_mps, None),
}

# The hub, for --dataset no/such: it is asked once, for five seconds, and the line has both names
HUBS = ("no/such | the hub does not answer", ("refuses", "silent", "full", "out of order"))


class OutOfOrder(BaseHTTPRequestHandler):
    """A server that knows no GET, and says nothing of it in a terminal."""

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def hub(kind):
    """The address of a hub that does not work."""
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), OutOfOrder) as server:
        address = server.server_address
        if kind == "refuses":
            server.socket.close()
        elif kind == "full":
            server.socket.listen(0)
            others = [socket.socket() for _ in range(4)]  # that wait to be accepted
            for other in others:
                other.setblocking(False)
                other.connect_ex(address)
        elif kind == "out of order":
            threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{address[1]}"
        if kind == "out of order":
            server.shutdown()


# Nothing is wrong. name: (builder, words of the plan, for the three scripts or those it is for)
PARTS = {"verification_reward": 2.0, "reward_model_multiplier": 0.25, "penalty_reward_value": -3.0}
PARTS |= {"add_r1_style_format_reward": True, "non_stop_penalty": True}
SCORE = "2 x compute_score + 0.25 x the reward model's score + 1 for <think> | or -3 without a stop"
MODEL_ALONE = together(REWARD_MODEL, given(apply_verifiable_reward=False))
LIMITS = {"mismatch_mask": "token", "mismatch_mask_range": 1.0, "dual_clip": 3.0}
MASK_NOTHING = {"mismatch_mask": "sequence", "mismatch_mask_range": "inf"}
LOST = [ROW, ROW | {"prompt": "5\u00e94="}] * 35
ALWAYS = together(rows(*[ROW] * 35, *[FIVE] * 35), call("return 1.0"))
TWO = [FIVE | {"data_source": name} for name in ("openai/gsm8k", "\x1b[31mgsm8k, français")] * 35
ODD_NAMES = r"openai/gsm8k scores 1 | \x1b[31mgsm8k, fran"

HELD_OUT = rows(*[ROW] * 5, flag="eval_dataset")
DICTIONARY = call("return {'score': 1, 'acc': True, 'pred': '12358'}")
LENGTH = reward("def f(*_, num_tokens, stopped, extra_info): return stopped / num_tokens\n")


def not_one_step(folder):
    """The folder of a run that ended while vLLM started."""
    write_text(folder / "output/run/args.json", "{}")
    (folder / "output/run/checkpoints/unfinished").mkdir(parents=True)
    return {}


PLANS = {
    "debug": (given(), "learners 1 | 1 x compute_score | a row of debug/sorting scores 1"),
    "steps": (given(**TEN), "70 prompts | 10 of | 1 a step, 10 in all, 64 each"),
    "pairs": (given(local_mini_batch_size=8), "70 pairs | 8 of 8 pairs | learners 1", TRAINER),
    "empty answer": (rows(*[PAIR | {"rejected": ""}] * 70), "70 pairs", TRAINER),
    "held-out rows": (
        together(given(**TEN), HELD_OUT),
        "5 prompts to evaluate on | evaluations: 5, and one",
    ),
    "some held-out rows": (
        together(given(**TEN, eval_prompts=3, num_evals=2), HELD_OUT),
        "3 prompts to evaluate on | evaluations: 2, and one",
    ),
    "dictionary": (DICTIONARY, "debug/sorting scores 1, a wrong answer 1"),
    "length of a response": (LENGTH, "scores 0.166667, a wrong answer 1, an empty one 1"),
    "capped logits": (model(GEMMA), "learners 1"),
    "lambda without a warm-up": (given(lam=0.95), "--lam 0.95 | --value_warmup_steps", PPO),
    "no step was finished": (not_one_step, "learners 1", EVERY),
    "rows by verl and by open-instruct": (rows(ROW, OPEN_INSTRUCT), "gsm8k scores 1"),
    "characters are lost": (rows(*LOST), "data.jsonl, row 1 | loses '\u00e9' | 5\u00e94="),
    "right and wrong alike": (ALWAYS, "debug/sorting | no more than a wrong"),
    "rest of a batch": (given(per_device_train_batch_size=7), "learners 1"),
    "limits": (given(**LIMITS, **TEN, warm_up_steps=9), "learners 1"),
    "mask of nothing": (given(**MASK_NOTHING), "learners 1"),
    "all parts of a score": (together(REWARD_MODEL, given(**PARTS)), SCORE),
    "reward model alone": (MODEL_ALONE, "reward 1 x the reward model's score"),
    "reward model of weight 0": (OF_NO_USE, "reward 1 x compute_score"),
    # In a terminal that knows ASCII alone (PYTHONIOENCODING=ascii:strict) it is fran\xe7ais
    "odd sources": (rows(*TWO), ODD_NAMES),
    "never clips": (given(**GSPO), "--cliprange 3e-4 --cliprange_higher 4e-4", GRPO),
    "one bound of two": (given(**GSPO, cliprange=3e-4), "--cliprange 3e-4", GRPO),
}

LARGE = {"num_gpus": 8, "gpu_memory": 80.0}
# As LAUNCHES, but nothing is wrong; words of the plan
LAUNCHED = {
    "eight GPUs": (LARGE | {"num_processes": 8}, {}, "learners 8 | engines 8"),
    "two of them for vLLM": (
        LARGE | {"num_processes": 6},
        {"vllm_gpus": "6 7"},
        "learners 6 | engines 2 | GPUs 6, 7",
    ),
    "one engine of two": (
        LARGE | {"num_processes": 6},
        {"vllm_gpus": "6 7", "vllm_tensor_parallel_size": 2},
        "engines 1",
    ),
    "two machines": (
        LARGE | {"num_processes": 12, "num_machines": 2},
        {"vllm_gpus": "6 7"},
        "learners 12 | engines 4 | steps 130 of 768",
    ),
    "two ranks without GPUs": ({"num_processes": 2}, {}, "ACCELERATE_USE_CPU=true torchrun"),
    "memory": (
        {"num_gpus": 1, "gpu_memory": 24.0},
        {},
        "of the 14.8 GiB that it may take | policy | room for 64 of a step's 64 responses at once",
    ),
    "memory of a GPU of its own": (
        {"num_gpus": 2, "gpu_memory": 24.0},
        {"vllm_gpus": "1"},
        "of the 24.0 GiB that it may take | 1.0 GiB CUDA",
    ),
    "FSDP2": (
        LARGE | {"config_file": SHARDED},
        {},
        "learners 8 | gathered by FSDP2 | of a machine, not of GPUs",
    ),
    "FSDP2 on fewer": (LARGE | {"config_file": SHARDED, "num_processes": 4}, {}, "learners 4"),
    "two machines by a file": (
        LARGE | {"config_file": SHARDED.with_name("fsdp2_two_nodes.yaml")},
        {},
        "learners 16 | engines 16 of vLLM",
    ),
    "tokens and not rows": (
        {},
        {"micro_batch_tokens": 200, "per_device_train_batch_size": 64},
        "(--micro_batch_tokens 200)",
    ),
    "few updates": ({}, {"total_episodes": 99 * 64}, "99 optimizer updates | --total_episodes"),
    "few updates on two ranks": (
        {"num_processes": 2},
        {"total_episodes": 99 * 128},
        "99 optimizer updates | --local_rollout_batch_size and --local_mini_batch_size | 2 ranks",
    ),
}
