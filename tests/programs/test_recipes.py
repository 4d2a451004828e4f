"""scripts/train: recipes for real data. What they launch passes the preflight, and fits.

A recipe is run in a copy of the folder in which .venv/bin/python and accelerate only note how they
are called. Then the notes are followed here: rows are preprocessed, a few in the form of the hub's,
and the preflight is asked, with models of the right shape, but without weights.
"""

import functools
import json
import os
import re
import runpy
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import datasets
import plan
import preflight
import pytest
import torch
import tulu3
from helpers import REPO, SCRIPTS, TRAINER, modules
from helpers.files import read_json_lines, write_rows, write_text
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

TRAIN = REPO / "scripts" / "train"
STAND_IN = "--add_r1_style_format_reward"  # for a reward model that is not trained yet
BY_OTHERS = ("debug", "smollm2")  # test_commands asks these
RECIPES = sorted(
    str(path.relative_to(TRAIN))
    for path in TRAIN.glob("*/*.sh")
    if path.parent.name not in BY_OTHERS
)
NODES = {"MACHINE_RANK": "1", "MAIN_PROCESS_IP": "localhost"}
FOR_NODES = [recipe for recipe in RECIPES if "MACHINE_RANK" in (TRAIN / recipe).read_text()]
# How each is run: the number of the run, and variables of the environment
RUNS = [
    pytest.param(recipe, number, env, id=f"{recipe} {' '.join(env.values())}".strip())
    for recipe in RECIPES
    for number, env in enumerate([NODES] if recipe in FOR_NODES else [{}, {"GPUS": "8"}])
]
NOTE = """#!{python} -SE
import json, os, sys
with open("notes.jsonl", "a") as file:
    print(json.dumps([os.path.basename(sys.argv[0]), *sys.argv[1:]]), file=file)
"""
LOADED = [Path(name).stem for name in (*SCRIPTS, TRAINER)]
LOADED += ["gsm8k", "tulu3", "graders", "if_constraints"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CLASSES = (AutoModelForCausalLM, AutoModelForSequenceClassification)
SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
SIZES += ("num_key_value_heads", "intermediate_size", "tie_word_embeddings")
# The models that the recipes name
SHAPES = {
    "Qwen/Qwen2.5-0.5B-Instruct": (Qwen2Config, (151_936, 896, 24, 14, 2, 4864, True)),
    "Qwen/Qwen2.5-1.5B-Instruct": (Qwen2Config, (151_936, 1536, 28, 12, 2, 8960, True)),
    "Qwen/Qwen2.5-3B-Instruct": (Qwen2Config, (151_936, 2048, 36, 16, 2, 11_008, True)),
    "allenai/Llama-3.1-Tulu-3-8B-DPO": (LlamaConfig, (128_264, 4096, 32, 32, 8, 14_336, False)),
}
# Responses a step, responses an update, steps: on any number of GPUs
PUBLISHED = {
    "gsm8k/ppo.sh": (256, 64, 435),
    "gsm8k/grpo.sh": (5120, 1280, 140),
    "gsm8k/grpo_lora.sh": (320, 320, 116),
    "math/grpo.sh": (320, 320, 117),
    "rm/ppo_hh.sh": (256, 64, 400),
    "tulu3/ppo_8b.sh": (192, 192, 10_416),
}
NEEDS = r"^#   .*: (\d+) GiB for a learner, of the (\d+) that it may take of a GPU of (\d+)"


def message(text):
    return [{"role": "user", "content": text}]


# Rows in the form of the hub's, by recipe's folder
ROWS = {
    "gsm8k": [{"question": "How many?", "answer": f"So.\n#### {n}"} for n in range(1, 40)],
    "math": [
        {"problem": f"What is ${n}/2$?", "solution": rf"It is $\boxed{{\frac{{{n}}}{{2}}}}$."}
        for n in range(1, 40)
    ],
    "rm": [
        {"prompt": f"\n\nHuman: {n}?\n\nAssistant:", "chosen": " Yes.", "rejected": " No."}
        for n in range(150)
    ],
    "tulu3": [
        *({"messages": message(f"{n}?"), "ground_truth": "4", "dataset": "gsm8k"} for n in "12"),
        {"messages": message("A half?"), "ground_truth": r"\frac{1}{2}", "dataset": "MATH"},
        {
            "messages": message("Use no commas."),
            "ground_truth": json.dumps({"func_name": "validate_no_commas", "N": None}),
            "dataset": "ifeval",
        },
    ],
}
SPLITS = {"tulu3": ("train",)}


def save_tokenizer(path):
    """One of bytes, which loses no character."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokens = ["<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    options = {"eos_token": "<end>", "chat_template": CHAT_TEMPLATE}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options).save_pretrained(path)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """models(name): the folders of a policy and of a reward model, which lack their weights."""

    @functools.cache
    def save(name):
        config_class, shape = SHAPES[name]
        options = {"eos_token_id": 0, "pad_token_id": 0, "max_position_embeddings": 8192}
        config = config_class(**dict(zip(SIZES, shape, strict=True)), num_labels=1, **options)
        paths = []
        for auto_class in CLASSES:
            paths.append(tmp_path_factory.mktemp("model"))
            config.architectures = [auto_class._model_mapping[config_class].__name__]
            config.save_pretrained(paths[-1])
            save_tokenizer(paths[-1])
        return paths

    return save


@functools.cache
def build_model(path, auto_class):
    with torch.device("meta"):
        return auto_class.from_config(AutoConfig.from_pretrained(path))


def notes_of(recipe, folder, **env):
    """How a recipe calls python and accelerate: their words."""
    copy = write_text(folder / "scripts" / "train" / recipe, (TRAIN / recipe).read_text())
    for name in ("accelerate", "rewards"):
        (folder / "scripts" / name).symlink_to(REPO / "scripts" / name)
    (folder / "scripts" / "setup.sh").touch()
    for name in ("python", "accelerate"):
        program = write_text(folder / ".venv/bin" / name, NOTE.format(python=sys.executable))
        program.chmod(0o755)
    ran = subprocess.run(
        ["bash", copy], cwd=folder, env=os.environ | env, capture_output=True, text=True
    )
    if ran.returncode != 0:
        raise RuntimeError(ran.stderr)
    return read_json_lines(folder / "notes.jsonl")


def split_words(words):
    """A command's options and its script with flags."""
    start = next(index for index, word in enumerate(words) if word.endswith(".py"))
    return words[:start], words[start:]


def calls_of(notes, program):
    """Calls of the preflight, or launches; without a first look at PPO's flags before its time."""
    calls = [note[2:] for note in notes if note[:2] in (["python", program], [program, "launch"])]
    return [call for call in calls if STAND_IN not in call]


@dataclass
class Longest(preflight.Run):
    """A run with the longest rows that its flags allow."""

    made: ClassVar = []

    def __post_init__(self):
        self.made.append(self)

    def max_length(self):
        args = self.args
        if self.trains_reward_model():
            return args.max_token_length
        return args.max_prompt_token_length + args.response_length


@pytest.mark.parametrize(("recipe", "number", "env"), RUNS)
def test_what_a_recipe_launches_passes_the_preflight_and_is_what_it_says(
    recipe, number, env, models, tmp_path, monkeypatch, capfd
):
    kind, text = recipe.split("/")[0], (TRAIN / recipe).read_text()
    policy, reward_model = map(str, models(re.search(r"{MODEL:-([^}]+)}", text)[1]))
    for split in SPLITS.get(kind, ("train", "test")):
        rows = ROWS[kind] * (60 if kind == "tulu3" else 1)
        write_rows(tmp_path / "rows" / f"{split}.jsonl", rows)
    variables = {"MODEL": policy, "REWARD_MODEL": reward_model, "DATA": str(tmp_path / "rows")}
    folder = tmp_path / "copy"
    notes = notes_of(recipe, folder, **env | variables)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    for _, program, *words in notes:
        if "data_preprocess" in program:
            monkeypatch.setattr(sys, "argv", [program, *words])
            runpy.run_path(str(REPO / program), run_name="__main__")
    trained = folder / "output" / "hh_reward_model"
    trained.mkdir(parents=True)
    (trained / "model").symlink_to(reward_model)

    monkeypatch.setattr(preflight, "Run", Longest)
    monkeypatch.setattr(
        preflight,
        "build_model",
        lambda run, auto_class, path, *_, **options: build_model(path, auto_class),
    )

    def ask(question, gpu_memory):
        """What the preflight prints of a launch that it finds right, and the run."""
        Longest.made.clear()
        options, script = split_words(question)
        machine = ["--num_gpus", "1" if options[-1] == "1" else "8", "--gpu_memory", gpu_memory]
        with modules.put_back(LOADED):
            status = preflight.main([*options, *machine, str(REPO / script[0]), *script[1:]])
        said = capfd.readouterr()
        assert status == 0, said.err
        return said.out, Longest.made[0]  # others are variants of it

    if recipe == "rm/ppo_hh.sh":  # PPO's flags, before a reward model trains for hours
        first_launch = [note[1] for note in notes].index("launch")
        (early,) = (note for note in notes[:first_launch] if STAND_IN in note)
        ask(early[2:], "80")
    asked, launched = calls_of(notes, "scripts/preflight.py"), calls_of(notes, "accelerate")
    count = len(asked)
    assert count > 0
    needs = re.findall(NEEDS, text, re.MULTILINE)[number * count :][:count]
    for question, launch, (needed, room, memory) in zip(asked, launched, needs, strict=True):
        (options, script), (launch_options, launched_script) = map(split_words, (question, launch))
        assert script == launched_script  # what was asked is launched
        assert " ".join(options) in " ".join(launch_options)
        said, run = ask(question, memory)
        assert round(plan.learner_needs(run) / plan.GIB) == int(needed)
        assert int(plan.learner_room(run) / plan.GIB) == int(room)
        assert "GPUs are not used" not in said
        args = run.args
        if script[0] != TRAINER:
            batches = (args.episodes_per_step, args.mini_batch_size, args.num_training_steps)
            assert batches == PUBLISHED[recipe]


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_would_be_another_run_is_refused(recipe, tmp_path):
    env, said = {"GPUS": "5"}, "GPUS=5 must divide"
    if recipe in FOR_NODES:
        env, said = {"MACHINE_RANK": "0"}, "MAIN_PROCESS_IP: "
    with pytest.raises(RuntimeError, match=said):
        notes_of(recipe, tmp_path, **env)


def test_table_has_every_recipe():
    table = (TRAIN / "README.md").read_text()
    named = set(re.findall(r"`([\w/]+\.sh)`", table))
    assert named == {str(path.relative_to(TRAIN)) for path in TRAIN.glob("*/*.sh")}


# A function of open-instruct, its parameters, a response that meets them, and one that does not
CONSTRAINTS = [
    ("verify_keywords", {"keyword_list": ["sea", "salt"]}, "Sea and salt.", "Sea."),
    ("verify_keyword_frequency", {"word": "sea", "N": 2}, "sea, Sea seas", "sea"),
    ("validate_forbidden_words", {"forbidden_words": ["sea"]}, "A season.", "The sea."),
    ("verify_letter_frequency", {"letter": "a", "N": 2}, "banA a", "banana"),
    ("validate_response_language", {"language": "en"}, "This is an English text.", "Das ist es."),
    ("verify_paragraph_count", {"N": 2}, "One.\n* * *\nTwo.", "One.\n\nTwo."),
    ("validate_word_constraint", {"N": 3, "quantifier": "at most"}, "one two", "1 2 3 4"),
    ("verify_sentence_constraint", {"N": 3, "quantifier": "around"}, "One. Two.", "One."),
    ("validate_paragraphs", {"N": 2, "i": 2, "first_word": "So"}, "A.\n\nSo.", "So.\n\nA."),
    ("verify_postscript", {"postscript_marker": "P.S."}, "Yes.\nP.S. No.", "Yes."),
    ("validate_placeholders", {"N": 2}, "[name], [town]", "[name]"),
    ("verify_bullet_points", {"N": 2}, "* one\n- two", "* one\n* two\n* three"),
    ("validate_title", {}, "<<Sea>> It is salty.", "Sea"),
    ("validate_choice", {"options": ["yes", "no"]}, "I say yes.", "Perhaps."),
    ("validate_highlighted_sections", {"N": 1}, "*this*", "this"),
    ("validate_sections", {"N": 2, "section_splitter": "Part"}, "Part 1 a Part 2 b", "Part 1 a"),
    ("validate_json_format", {}, '{"a": 1}', "a: 1"),
    ("validate_repeat_prompt", {"original_prompt": "Why?"}, "Why? Because.", "Because."),
    ("validate_two_responses", {}, "One ****** two", "One"),
    ("validate_uppercase", {}, "ALL OF IT", "Some of IT"),
    ("validate_lowercase", {}, "all of it", "Some of it"),
    ("validate_frequency_capital_words", {"N": 2, "quantifier": "at least"}, "AN ODD one", "AN"),
    ("validate_end", {"end_phrase": "That is all."}, "Yes. That is all.", "That is all. Yes."),
    ("validate_quotation", {}, '"Yes."', "Yes."),
    ("validate_no_commas", {}, "Yes and no", "Yes, and no"),
]


@pytest.mark.parametrize(
    ("name", "parameters", "good", "bad"), CONSTRAINTS, ids=lambda x: str(x)[:25]
)
def test_constraints_of_tulu3(name, parameters, good, bad):
    truth = json.dumps({"func_name": name, "N": None} | parameters)
    assert [tulu3.compute_score("ifeval", text, truth) for text in (good, bad, "")] == [1, 0, 0]


def test_every_constraint_of_tulu3_is_tried():
    assert {name for name, *_ in CONSTRAINTS} == set(tulu3.RULES)
    assert tulu3.compute_score("gsm8k", "So the answer is 42.", "42") == 1.0
