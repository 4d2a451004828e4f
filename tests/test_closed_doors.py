"""Odd input of every kind: one printable line, exit status 2, nothing written.

test_bad_input.py has what users get wrong; this file what disks, downloads, editors, launchers and
hubs do to them. ppo_vllm_async.py refuses less, by exceptions: test_mistakes.py.
"""

import datetime
import decimal
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time

import huggingface_hub
import pyarrow
import pyarrow.parquet
import pytest
import torch
import train_reward_model
import transformers
from helpers import REPO
from helpers.files import write_rows, write_text
from helpers.processes import finish, flags_of
from safetensors.torch import load_file, save_file

import grpo_vllm_async
import ppo_sync

SCRIPTS = [ppo_sync, grpo_vllm_async]
ROW = {
    "prompt": "53812=",
    "data_source": "debug/sorting",
    "reward_model": {"style": "rule", "ground_truth": "12358"},
}
PAIR = {"prompt": "53812=", "chosen": "12358", "rejected": "13582"}

# ---------------------------------------------------------------------------------- model folders


def debug_model(folder, **changes):
    """A copy of the debug model, with changes of its config.json."""
    shutil.copytree(REPO / "debug_assets" / "model", folder / "model")
    path = folder / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder / "model"


def with_weights(folder, change):
    """A copy of the debug model whose tensors have been changed."""
    path = debug_model(folder) / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    return path.parent


def with_bytes(folder, change, name="model.safetensors"):
    """A copy of the debug model one of whose files has other bytes."""
    path = debug_model(folder) / name
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(change(content))
    return path.parent


def without_weights(folder):
    (debug_model(folder) / "model.safetensors").unlink()
    return folder / "model"


def pickled(folder):
    """Weights as a pickle, which runs code when it is read."""
    weights = debug_model(folder) / "model.safetensors"
    torch.save(load_file(weights), weights.with_name("pytorch_model.bin"))
    weights.unlink()
    return folder / "model"


def without_a_shard(folder):
    weights = debug_model(folder) / "model.safetensors"
    names = list(load_file(weights))
    files = dict.fromkeys(names, "model-00001-of-00002.safetensors")
    files[names[-1]] = "model-00002-of-00002.safetensors"
    weights.rename(weights.with_name("model-00001-of-00002.safetensors"))
    index = weights.with_name("model.safetensors.index.json")
    index.write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return folder / "model"


def other_kind(name, **changes):
    """A model of another architecture, with its weights and the debug tokenizer."""

    def save(folder):
        shutil.copytree(REPO / "debug_assets" / "model", folder / "model")
        model_class = getattr(transformers, name)
        model_class(model_class.config_class(**changes)).save_pretrained(folder / "model")
        return folder / "model"

    return save


SMALL = {
    "vocab_size": 17,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
}
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"

# name: (what makes the folder, what the message must hold)
MODELS = {
    "weights missing": (without_weights, ["safetensors", "no file named"]),
    "weights empty": (lambda tmp: with_bytes(tmp, lambda _: b""), ["safetensors", "header"]),
    "weights cut off": (lambda tmp: with_bytes(tmp, lambda b: b[:-1]), ["incomplete"]),
    "weights rubbish": (lambda tmp: with_bytes(tmp, lambda b: b"\xff" * 999), ["header"]),
    "weights of another shape": (
        lambda tmp: debug_model(tmp, intermediate_size=7),
        ["down_proj.weight is [64, 256]", "config.json [64, 7]"],
    ),
    "weights that lack a tensor": (
        lambda tmp: with_weights(tmp, lambda tensors: tensors.pop(Q_PROJ)),
        ["lack", Q_PROJ],
    ),
    "shard missing": (without_a_shard, ["model-00002-of-00002.safetensors"]),
    "pickle": (pickled, ["safetensors"]),
    "T5": (
        other_kind("T5ForConditionalGeneration", vocab_size=17, d_model=32, num_layers=1, d_ff=8),
        ["T5Config"],
    ),
    "BERT": (other_kind("BertForMaskedLM", **SMALL), ["BertForMaskedLM", "decoder"]),
    "ViT": (
        other_kind("ViTForImageClassification", hidden_size=32, num_hidden_layers=1),
        ["ViTConfig"],
    ),
    "whisper": (
        other_kind(
            "WhisperForConditionalGeneration",
            vocab_size=17,
            d_model=32,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            pad_token_id=1,
            bos_token_id=1,
            eos_token_id=1,
            decoder_start_token_id=1,
        ),
        ["WhisperForConditionalGeneration", "decoder"],
    ),
    "no heads": (lambda tmp: debug_model(tmp, num_attention_heads=0), ["config.json"]),
    "heads that do not share": (
        lambda tmp: debug_model(tmp, num_key_value_heads=3),
        ["2 attention heads", "3 key-value heads"],
    ),
    "unknown activation": (lambda tmp: debug_model(tmp, hidden_act="swoosh"), ["swoosh"]),
    "unknown rope": (
        lambda tmp: debug_model(tmp, rope_parameters={"rope_type": "string"}),
        ["config.json", "string"],
    ),
    "negative size": (lambda tmp: debug_model(tmp, hidden_size=-1), ["negative dimension"]),
    "pad token beyond the vocabulary": (
        lambda tmp: debug_model(tmp, pad_token_id=999),
        ["Padding_idx"],
    ),
    "end token beyond the vocabulary": (
        lambda tmp: with_bytes(tmp, lambda _: b'{"eos_token_id": 999}', "generation_config.json"),
        ["999", "vocabulary of 17"],
    ),
    "end token that is a text": (
        lambda tmp: with_bytes(tmp, lambda _: b'{"eos_token_id": "."}', "generation_config.json"),
        ["'.'", "vocabulary of 17"],
    ),
    "broken generation config": (
        lambda tmp: with_bytes(tmp, lambda _: b"{{", "generation_config.json"),
        ["generation_config.json"],
    ),
    "quantized by nothing": (
        lambda tmp: debug_model(tmp, quantization_config={"quant_method": "nothing"}),
        ["quantized"],
    ),
    "code of its own": (
        lambda tmp: debug_model(tmp, model_type="mine", auto_map={"AutoConfig": "mine.Config"}),
        ["custom code"],
    ),
    "no JSON": (lambda tmp: with_bytes(tmp, lambda _: b"[]", "config.json"), ["model_type"]),
    "broken tokenizer": (
        lambda tmp: with_bytes(tmp, lambda _: b"{", "tokenizer.json"),
        ["--model_name_or_path", "Expecting property name"],
    ),
}

# --------------------------------------------------------------------------- folders and files


def link(path, target):
    path.symlink_to(target)
    return path


FOLDERS = {
    "output folder that is a file": lambda tmp: {"output_dir": write_text(tmp / "file", "")},
    "output folder below a file": lambda tmp: {"output_dir": write_text(tmp / "file", "") / "x"},
    "output folder that cannot be written to": lambda _: {"output_dir": "/proc"},
    "output folder that is a dangling link": lambda tmp: {
        "output_dir": link(tmp / "link", tmp / "nowhere")
    },
    "output folder in a loop of links": lambda tmp: {
        "output_dir": link(tmp / "link", tmp / "link")
    },
    "run folder that is a dangling link": lambda tmp: {
        "output_dir": tmp,
        "run_name": link(tmp / "link", tmp / "nowhere").name,
    },
    "name too long": lambda _: {"run_name": "x" * 300},
    "output folder whose name is not UTF-8": lambda tmp: {"output_dir": tmp / "r\udcff"},
    "path too long": lambda tmp: {"output_dir": tmp / "/".join(["x" * 200] * 30)},
}


def rows(tmp, *changes, **options):
    lines = [json.dumps(ROW | change, **options) for change in changes]
    return {"dataset": write_text(tmp / "rows.jsonl", "\n".join(lines))}


def truth(tmp, value):
    """A row of parquet with this ground truth."""
    table = pyarrow.Table.from_pylist([ROW | {"reward_model": {"ground_truth": value}}])
    pyarrow.parquet.write_table(table, tmp / "truth.parquet")
    return {"eval_dataset": tmp / "truth.parquet"}


def latin_1(path):
    path.write_bytes('{"prompt": "\xe4"}'.encode("latin-1"))
    return {"dataset": path}


def template(tmp, content):
    (tmp / "template.jinja").write_bytes(content)
    return {"chat_template": tmp / "template.jinja"}


def fifo(path):
    os.mkfifo(path)
    return path


ENDLESS_TEMPLATE = b"{% for i in range(99999) %}" * 4 + b"{% endfor %}" * 4
NOT_JSON = ["truth.parquet, row 0", "JSON"]

# name: (options from a temporary folder, what the message must hold)
FILES = {
    "empty path": (lambda _: {"dataset": ""}, ["--dataset is empty"]),
    "empty model": (lambda _: {"model_name_or_path": ""}, ["--model_name_or_path is empty"]),
    "file name too long": (lambda _: {"dataset": "x" * 5000 + ".jsonl"}, [".jsonl", "no such"]),
    "model name too long": (lambda _: {"model_name_or_path": "x" * 5000}, ["--model_name"]),
    "file that waits for a writer": (
        lambda tmp: {"dataset": fifo(tmp / "x.jsonl")},
        ["x.jsonl: no such file"],
    ),
    "template that is a program": (lambda _: {"chat_template": "/bin/ls"}, ["/bin/ls", "utf-8"]),
    "template without end": (lambda _: {"chat_template": "/dev/zero"}, ["no such file"]),
    "template that is huge": (lambda tmp: template(tmp, b"x" * 2**21), ["larger than 1 MiB"]),
    "template in latin-1": (lambda tmp: template(tmp, b"\xe4"), ["template.jinja", "utf-8"]),
    "template that runs for ever": (
        lambda tmp: (
            rows(tmp, {"prompt": [{"role": "user", "content": "1="}]})
            | template(tmp, ENDLESS_TEMPLATE)
        ),
        ["rows.jsonl, row 0", "longer than 5 seconds"],
    ),
    "lone surrogate in a prompt": (
        lambda tmp: rows(tmp, {"prompt": "\ud800"}),
        ["rows.jsonl, row 0", "`prompt`"],
    ),
    "lone surrogate in a ground truth": (
        lambda tmp: {
            "eval_dataset": rows(tmp, {"reward_model": {"ground_truth": "\ud800"}})["dataset"]
        },
        ["rows.jsonl, row 0", "surrogates"],
    ),
    "latin-1": (
        lambda tmp: latin_1(tmp / "x.jsonl"),
        ["x.jsonl", "utf-8"],
    ),
    "columns with control characters and markup": (
        lambda tmp: {"dataset": write_text(tmp / "x.jsonl", '{"a\\u001b[31m": 1, "[red]b": 2}')},
        ["`prompt`", r"a\x1b[31m, [red]b"],
    ),
    "source with control characters": (
        lambda tmp: rows(tmp, {"data_source": "\x1b[31mx"}),
        ["rows.jsonl, row 0", r"\x1b[31mx"],
    ),
    "file name with control characters": (
        lambda _: {"dataset": "a\x1b[31m\ud800.jsonl"},
        [r"a\x1b[31m"],
    ),
    "folder of CSV": (
        lambda tmp: {"dataset": write_text(tmp / "csv" / "a.csv", "prompt,x\n1,2\n").parent},
        ["csv", "`data_source`"],
    ),
    "CSV": (
        lambda tmp: {"dataset": write_text(tmp / "a.csv", "prompt,x\n1,2\n")},
        ["a.csv", ".parquet", ".jsonl"],
    ),
    "JSON that is too deep": (
        lambda tmp: {"dataset": write_text(tmp / "x.jsonl", "[" * 100_000)},
        ["x.jsonl", "recursion"],
    ),
    "decimal as a ground truth": (lambda tmp: truth(tmp, decimal.Decimal("1.5")), NOT_JSON),
    "date as a ground truth": (lambda tmp: truth(tmp, datetime.date(2020, 1, 1)), NOT_JSON),
    "bytes as a ground truth": (lambda tmp: truth(tmp, b"12358"), NOT_JSON),
    "attention that is not known": (lambda _: {"attn_implementation": "none"}, ["none", "eager"]),
    "attention that is not installed": (
        lambda _: {"attn_implementation": "flash_attention_3"},
        ["FlashAttention3"],
    ),
}

# ------------------------------------------------------------------------------ rewards, numbers


def reward(text):
    return lambda tmp: {"reward_fn": f"{write_text(tmp / 'r.py', text)}:f"}


ARGPARSE = """import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--model", required=True)
parser.parse_args()
"""
CLOSED_STDERR = """import os, sys
sys.stderr.close()
os.closerange(0, 3)
def f(*_, extra_info): raise ValueError("no such thing")
"""
WARNING = """import sys, warnings
warnings.warn("careful")
def f(*_, extra_info):
    print("a word", file=sys.stderr)
    return None
"""
REWARDS = {
    "reward that is a coroutine": (
        reward("async def f(*_, extra_info): return 1.0\n"),
        ["r.py:f", "coroutine"],
    ),
    "reward that parses arguments": (reward(ARGPARSE), ["r.py:f", "SystemExit", "line 4"]),
    "reward that closes stderr": (reward(CLOSED_STDERR), ["r.py:f", "no such thing", "line 4"]),
    "reward that warns and prints": (reward(WARNING), ["r.py:f", "the reward is None"]),
    "reward that crashes in C": (
        reward("import ctypes\ndef f(*_, extra_info): ctypes.string_at(0)\n"),
        ["r.py:f", "exit code -11"],
    ),
    "reward whose error has a lone surrogate": (
        reward("def f(*_, extra_info): raise ValueError('\\ud800\\x1b[31m')\n"),
        ["r.py:f", r"\ud800\x1b[31m"],
    ),
}

NUMBERS = {
    "learning_rate": 1e30,
    "value_learning_rate": 1e30,
    "weight_decay": 1e30,
    "temperature": 1e-300,
    "eval_temperature": 1e-300,
    "eps": 1e-300,
    "cliprange_value": 1e308,
    "beta": 1e308,
    "penalty_reward_value": -1e308,
    "verification_reward": 1e308,
    "reward_timeout": 1e308,
    "reward_memory": 1e308,
    "num_evals": 10**9,
    "num_epochs": 10**8,
    "reward_workers": 10**9,
    "total_episodes": 10**30,
}

CASES = {
    **{
        f"model: {name}": (lambda tmp, make=make: {"model_name_or_path": make(tmp)}, fragments)
        for name, (make, fragments) in MODELS.items()
    },
    **{
        name: (make, ["link" if "link" in name else "--output_dir"])
        for name, make in FOLDERS.items()
    },
    **FILES,
    **REWARDS,
    **{
        f"number: {name}": (
            lambda _, name=name, value=value: {name: value},
            [f"--{name}", "at most" if abs(value) > 1 and value > 0 else "at least"],
        )
        for name, value in NUMBERS.items()
    },
    "a step of a billion responses": (
        lambda _: {"local_rollout_batch_size": 10**8, "number_samples_per_prompt": 10},
        ["a million"],
    ),
}


def files_of(folder):
    return sorted(path for path in folder.rglob("*") if "__pycache__" not in str(path))


def refusal(module, options, folder, monkeypatch, capfd, *flags):
    """The one line with which a script refuses these options, having written nothing."""
    before = files_of(folder)
    monkeypatch.setattr(sys, "argv", [f"{module.__name__}.py", *flags_of(options), *flags])
    monkeypatch.chdir(folder)
    with pytest.raises(SystemExit) as stop:
        module.main()
    assert stop.value.code == 2
    (line,) = capfd.readouterr().err.strip().split("\n")
    assert line.isprintable()
    assert line.startswith(f"{module.__name__}.py: error: ")
    assert len(line) < 500
    assert files_of(folder) == before
    return line


def options_of(folder, assets):
    return {
        "dataset": write_rows(folder / "good.jsonl", [ROW] * 70),
        "model_name_or_path": assets / "model",
        "response_length": 8,
        "output_dir": folder / "output",
        "run_name": "run",
    }


@pytest.mark.parametrize("name", CASES)
def test_odd_input_is_one_line(name, assets, tmp_path, monkeypatch, capfd):
    make, fragments = CASES[name]
    options = options_of(tmp_path, assets) | make(tmp_path)
    line = refusal(ppo_sync, options, tmp_path, monkeypatch, capfd, "--dry_run")
    assert [fragment for fragment in fragments if fragment not in line] == []


# The same checks, word for word, are in all scripts; that they are called shows one case of each
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_each_script_looks_at_its_model_and_folder(script, assets, tmp_path, monkeypatch, capfd):
    good = options_of(tmp_path, assets)
    model = with_bytes(tmp_path, lambda content: content[:-1])
    for flag in ("model_name_or_path", "reward_model_path"):
        line = refusal(script, good | {flag: model}, tmp_path, monkeypatch, capfd, "--dry_run")
        assert f"--{flag}" in line
    file = write_text(tmp_path / "file", "")
    line = refusal(script, good | {"output_dir": file}, tmp_path, monkeypatch, capfd, "--dry_run")
    assert "--output_dir" in line


@pytest.mark.parametrize("kind", ["value_model_path", "reward_model_path"])
def test_classifiers_are_looked_at_as_policies_are(kind, assets, tmp_path, monkeypatch, capfd):
    config = transformers.AutoConfig.from_pretrained(assets / "model", num_labels=1)
    model = transformers.AutoModelForSequenceClassification.from_config(config)
    shutil.copytree(assets / "model", tmp_path / "model")
    model.save_pretrained(tmp_path / "model")
    options = options_of(tmp_path, assets) | {kind: tmp_path / "model"}
    path = tmp_path / "model" / "model.safetensors"
    tensors = load_file(path)
    tensors.pop(Q_PROJ)
    save_file(tensors, path, metadata={"format": "pt"})
    line = refusal(ppo_sync, options, tmp_path, monkeypatch, capfd, "--dry_run")
    assert f"--{kind}" in line and Q_PROJ in line


def test_value_model_whose_head_has_another_name_is_refused(assets, tmp_path, monkeypatch, capfd):
    model = other_kind("BertForSequenceClassification", **SMALL, num_labels=1)(tmp_path)
    options = options_of(tmp_path, assets) | {"value_model_path": model}
    line = refusal(ppo_sync, options, tmp_path, monkeypatch, capfd, "--dry_run")
    assert "--value_model_path" in line and "no head named score" in line


def test_value_model_without_a_vocabulary_is_refused(assets, tmp_path, monkeypatch, capfd):
    model = MODELS["ViT"][0](tmp_path)
    options = options_of(tmp_path, assets) | {"value_model_path": model}
    line = refusal(ppo_sync, options, tmp_path, monkeypatch, capfd, "--dry_run")
    assert "--value_model_path" in line and "vocabulary of 17" in line


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_of_two_runs_of_one_name_the_later_is_refused(script, assets, tmp_path, monkeypatch, capfd):
    make_run_folder = script.make_run_folder

    def make_another_before(*args):
        (tmp_path / "output" / "run").mkdir(parents=True)
        return make_run_folder(*args)

    monkeypatch.setattr(script, "make_run_folder", make_another_before)
    options = flags_of(options_of(tmp_path, assets))
    monkeypatch.setattr(sys, "argv", [f"{script.__name__}.py", *options])
    with pytest.raises(SystemExit) as stop:
        script.main()
    assert stop.value.code == 2
    assert "holds another run" in capfd.readouterr().err


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("module", [*SCRIPTS, train_reward_model], ids=lambda m: m.__name__)
def test_weights_that_are_not_finite_are_seen_when_they_are_read(
    module, value, assets, tmp_path, monkeypatch, capfd
):
    model = with_weights(tmp_path, lambda tensors: tensors[Q_PROJ].view(-1)[5:6].fill_(value))
    options = options_of(tmp_path, assets) | {"model_name_or_path": model}
    if module is train_reward_model:
        del options["response_length"]
        options["dataset"] = write_rows(tmp_path / "pairs.jsonl", [PAIR] * 70)
    line = refusal(module, options, tmp_path, monkeypatch, capfd)
    assert Q_PROJ in line and "finite" in line


OF_REWARD_MODEL = [
    *[name for name in CASES if name.startswith("model: ")],
    *FOLDERS,
    "empty path",
    "file name too long",
    "template without end",
    "template that is huge",
    "latin-1",
    "number: learning_rate",
    "attention that is not known",
]
# A reward model need not be a decoder that writes, and has no generation config
SPARED = (
    "generation config",
    "heads that do not share",
    "end token",
    "pad token",
    "BERT",
    "T5",
    "ViT",
    "whisper",
)


@pytest.mark.parametrize(
    "name", [name for name in OF_REWARD_MODEL if not any(word in name for word in SPARED)]
)
def test_reward_models_training_refuses_the_same(name, assets, tmp_path, monkeypatch, capfd):
    make, fragments = CASES[name]
    options = options_of(tmp_path, assets) | make(tmp_path)
    del options["response_length"]
    if options["dataset"] == tmp_path / "good.jsonl":
        options["dataset"] = write_rows(tmp_path / "pairs.jsonl", [PAIR] * 70)
    line = refusal(train_reward_model, options, tmp_path, monkeypatch, capfd, "--dry_run")
    assert [fragment for fragment in fragments if fragment not in line] == []


def test_disk_with_too_little_room_is_refused(assets, tmp_path, monkeypatch, capfd):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10 << 20))
    options = options_of(tmp_path, assets)
    line = refusal(ppo_sync, options, tmp_path, monkeypatch, capfd, "--dry_run")
    assert "--output_dir" in line and "10 MiB free" in line


TALKATIVE = """import argparse, sys, warnings
warnings.warn("careful")
print("imported")
def f(*_, extra_info):
    print("called", file=sys.stderr)
    argparse.ArgumentParser().parse_args(["--help"])
"""


def test_what_a_reward_prints_does_not_hide_what_is_wrong(assets, tmp_path, monkeypatch, capfd):
    path = write_text(tmp_path / "r.py", TALKATIVE)
    options = options_of(tmp_path, assets) | {"reward_fn": f"{path}:f"}
    monkeypatch.setattr(sys, "argv", ["ppo_sync.py", *flags_of(options), "--dry_run"])
    with pytest.raises(SystemExit) as stop:
        ppo_sync.main()
    assert stop.value.code == 2
    written = capfd.readouterr()  # that of the reward's own process, too
    assert written.out == ""
    (line,) = written.err.strip().splitlines()
    assert "SystemExit: 0" in line and "line 6" in line


# ------------------------------------------------------------------------------- the environment

LAUNCHER = {
    "a rank that is no number": {"RANK": "first"},
    "a rank that is empty": {"LOCAL_RANK": ""},
    "a rank below 0": {"LOCAL_RANK": "-1"},
    "a world of nobody": {"WORLD_SIZE": "0"},
    "a world that is no number": {"LOCAL_WORLD_SIZE": "2.5"},
    "a port that is no number": {"MASTER_PORT": "tcp"},
    "a port beyond all": {"MASTER_PORT": "99999"},
    "a place that is empty": {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "",
        "MASTER_PORT": "1",
    },
    "an unknown way to compile": {"ACCELERATE_DYNAMO_BACKEND": "nonsense"},
    "a rank beyond the world": {"RANK": "5"},
    "a world without ranks": {"WORLD_SIZE": "2"},
    "a rank without a world": {"LOCAL_RANK": "0"},
}


@pytest.mark.parametrize("name", LAUNCHER)
@pytest.mark.parametrize("module", [ppo_sync, train_reward_model], ids=lambda m: m.__name__)
def test_odd_launcher_is_one_line(name, module, tmp_path, monkeypatch, capfd):
    for variable, value in LAUNCHER[name].items():
        monkeypatch.setenv(variable, value)
    line = refusal(module, {}, tmp_path, monkeypatch, capfd)
    assert any(variable in line for variable in (*LAUNCHER[name], "accelerate"))


def test_control_characters_of_the_data_are_not_shown_as_they_are(
    assets, tmp_path, monkeypatch, capsys
):
    odd = ROW | {"data_source": "\x1b[31mgsm8k", "reward_model": {"ground_truth": "5"}}
    options = options_of(tmp_path, assets)
    options["dataset"] = write_rows(tmp_path / "odd.jsonl", [odd] * 70)
    monkeypatch.setattr(sys, "argv", ["ppo_sync.py", *flags_of(options), "--dry_run"])
    ppo_sync.main()
    output = capsys.readouterr().out
    assert r"a row of \x1b[31mgsm8k scores 1" in output
    assert "\x1b" not in output


@pytest.mark.slow
def test_terminal_may_know_ascii_alone(assets, tmp_path, run_script):
    row = ROW | {"data_source": "gsm8k, français", "reward_model": {"ground_truth": "5"}}
    run = run_script(
        "ppo_sync.py",
        tmp_path,
        "--dry_run",
        dataset=write_rows(tmp_path / "rows.jsonl", [row] * 70),
        env={"PYTHONIOENCODING": "ascii:strict"},
    )
    assert run.returncode == 0, run.output
    assert r"a row of gsm8k, fran\xe7ais scores 1" in run.output


# ---------------------------------------------------------------------------------------- the hub


@pytest.fixture(
    params=["refuses", "accepts and is silent", "has no room for us", "is out of order"]
)
def dead_hub(request):
    """The address of a hub that does not work."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=0)
    address = listener.getsockname()
    others = []

    def answer():
        while request.param in ("accepts and is silent", "is out of order"):
            try:
                connection, _ = listener.accept()
            except OSError:  # the test is over
                return
            others.append(connection)
            if request.param == "is out of order":
                connection.sendall(b"HTTP/1.1 503 Unavailable\r\nContent-Length: 0\r\n\r\n")

    thread = threading.Thread(target=answer)
    thread.start()
    if request.param == "refuses":
        listener.close()
    if request.param == "has no room for us":
        for _ in range(4):  # they fill the queue of those that wait to be accepted
            others.append(socket.socket())
            others[-1].setblocking(False)
            others[-1].connect_ex(address)
    yield f"http://127.0.0.1:{address[1]}"
    if request.param != "refuses":
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
    for connection in others:
        connection.close()
    thread.join()


@pytest.mark.slow  # it waits for each hub for five seconds
def test_hub_that_does_not_work_is_asked_once(dead_hub, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", dead_hub)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    hub_answers = ppo_sync.hub_answers.__wrapped__  # without its cache
    assert not hub_answers()
    assert huggingface_hub.is_offline_mode()
    assert os.environ["HF_HUB_OFFLINE"] == "1"


@pytest.mark.slow
def test_silent_hub_is_no_long_wait(tmp_path, start_script):
    with socket.create_server(("127.0.0.1", 0)) as hub:
        environment = {
            "HF_HUB_OFFLINE": "0",
            "HF_ENDPOINT": f"http://127.0.0.1:{hub.getsockname()[1]}",
            "HF_HOME": str(tmp_path / "cache"),
        }
        started_at = time.monotonic()
        process = start_script("ppo_sync.py", tmp_path, env=environment, dataset="no/such")
        run = finish(process, 60, started_at)
    (line,) = run.stderr.strip().splitlines()
    assert run.returncode == 2
    assert "no/such" in line and "the hub does not answer" in line
    assert run.seconds < 25  # 5 of them for the hub; datasets would wait for longer than that


# --------------------------------------------------------------------------------------- two ranks


@pytest.mark.slow
@pytest.mark.parametrize("finder", [0, 1])
def test_all_ranks_end_with_the_one_that_finds_bad_input(finder, assets, tmp_path):
    """Two nodes of one rank; what is wrong is wrong on one of them alone."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    nodes = []
    for rank in range(2):
        options = options_of(tmp_path / str(rank), assets)
        if rank == finder == 0:
            options["output_dir"] = write_text(tmp_path / "file", "")
        elif rank == finder:
            options["dataset"] = tmp_path / "none.jsonl"
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
        command += ["--node_rank", str(rank), "--nproc_per_node", "1"]
        command += ["--master_addr", "127.0.0.1", "--master_port", str(port)]
        command += [str(REPO / "ppo_sync.py"), *flags_of(options)]
        environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
        nodes.append(
            subprocess.Popen(command, cwd=REPO, env=environment, stderr=subprocess.PIPE, text=True)
        )
    try:
        outputs = [node.communicate(timeout=60)[1] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
            node.wait()
    assert all(node.returncode != 0 for node in nodes)
    assert outputs[finder].startswith("ppo_sync.py: error: ")  # before any traceback
    assert "ppo_sync.py: error: " not in outputs[1 - finder]
    assert not list(tmp_path.rglob("args.json"))
