"""scripts/train: recipes for real data. What they launch passes the preflight, and fits.

A recipe is run in a copy of the folder in which .venv/bin/python and accelerate only note how they
are called. Then the notes are followed here: rows are preprocessed, and the preflight is asked,
with tiny models of the same family and a few rows in the form of the hub's.
"""

import doctest
import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from unittest import mock

import datasets
import plan
import preflight
import pytest
import torch
import transformers
import tulu3
from helpers import REPO, SCRIPTS, TRAINER, modules
from helpers.files import write_rows
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

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
# How each is run: variables of the environment
RUNS = [
    pytest.param(recipe, env, id=f"{recipe} {' '.join(env.values())}".strip())
    for recipe in RECIPES
    for env in ([NODES] if recipe in FOR_NODES else [{}, {"GPUS": "8"}])
]
NOTE = """#!{python} -SE
import json, os, sys
with open("notes.jsonl", "a") as file:
    print(json.dumps([os.path.basename(sys.argv[0]), *sys.argv[1:]]), file=file)
"""
LOADED = [os.path.basename(name)[:-3] for name in (*SCRIPTS, TRAINER)]
CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# The shapes of the models that the recipes name
QWEN_05B = transformers.Qwen2Config(
    vocab_size=151_936,
    hidden_size=896,
    num_hidden_layers=24,
    num_attention_heads=14,
    num_key_value_heads=2,
    intermediate_size=4864,
    tie_word_embeddings=True,
)
QWEN_3B = transformers.Qwen2Config(
    vocab_size=151_936,
    hidden_size=2048,
    num_hidden_layers=36,
    num_attention_heads=16,
    num_key_value_heads=2,
    intermediate_size=11_008,
    tie_word_embeddings=True,
)
QWEN_15B = transformers.Qwen2Config(
    vocab_size=151_936,
    hidden_size=1536,
    num_hidden_layers=28,
    num_attention_heads=12,
    num_key_value_heads=2,
    intermediate_size=8960,
    tie_word_embeddings=True,
)
LLAMA_8B = transformers.LlamaConfig(
    vocab_size=128_264,
    hidden_size=4096,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    intermediate_size=14_336,
    tie_word_embeddings=False,
)
PYTHIA_1B = transformers.GPTNeoXConfig(
    vocab_size=50_304,
    hidden_size=2048,
    num_hidden_layers=16,
    num_attention_heads=8,
    intermediate_size=8192,
    tie_word_embeddings=False,
)
SHAPES = {
    "Qwen/Qwen2.5-0.5B-Instruct": QWEN_05B,
    "Qwen/Qwen2.5-1.5B-Instruct": QWEN_15B,
    "Qwen/Qwen2.5-3B-Instruct": QWEN_3B,
    "allenai/Llama-3.1-Tulu-3-8B-DPO": LLAMA_8B,
    "cleanrl/EleutherAI_pythia-1b-deduped__sft__tldr": PYTHIA_1B,
}
TINY = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 32,
    "max_position_embeddings": 8192,
    "vocab_size": 260,
}


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
    "tldr": [{"prompt": f"POST: {n}\n\nTL;DR:", "completion": " Nothing."} for n in range(40)],
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
SPLITS = {"tldr": ("train", "validation"), "tulu3": ("train",)}


def save_tokenizer(path):
    """One of bytes, which loses no character."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate(["<end>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", chat_template=CHAT_TEMPLATE
    )
    fast.save_pretrained(path)


@pytest.fixture(scope="module")
def tiny_models(tmp_path_factory):
    """tiny_models["llama"]: the folder of a policy, and of a reward model."""
    folders = {}
    for config in (QWEN_05B, LLAMA_8B, PYTHIA_1B):
        options = {name: value for name, value in TINY.items() if hasattr(config, name)}
        paths = []
        for auto_class in (AutoModelForCausalLM, AutoModelForSequenceClassification):
            paths.append(tmp_path_factory.mktemp(config.model_type))
            tiny = type(config)(**options, num_labels=1, eos_token_id=0, pad_token_id=0)
            auto_class.from_config(tiny).save_pretrained(paths[-1])
            save_tokenizer(paths[-1])
        folders[config.model_type] = paths
    return folders


def notes_of(recipe, folder, **env):
    """How a recipe calls python and accelerate: their words."""
    copy = folder / "scripts" / "train" / recipe
    copy.parent.mkdir(parents=True)
    copy.write_text((TRAIN / recipe).read_text())
    for name in ("accelerate", "rewards"):
        (folder / "scripts" / name).symlink_to(REPO / "scripts" / name)
    (folder / "scripts" / "setup.sh").touch()
    programs = folder / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name in ("python", "accelerate"):
        (programs / name).write_text(NOTE.format(python=sys.executable))
        (programs / name).chmod(0o755)
    ran = subprocess.run(
        ["bash", copy], cwd=folder, env=os.environ | env, capture_output=True, text=True
    )
    if ran.returncode != 0:
        raise RuntimeError(ran.stderr)
    return [json.loads(line) for line in (folder / "notes.jsonl").read_text().splitlines()]


def load(path, monkeypatch):
    """A program as a module of another name, for two are called tulu3."""
    spec = importlib.util.spec_from_file_location(f"recipe_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # tyro reads its source
    spec.loader.exec_module(module)
    return module


def preprocess(words, monkeypatch):
    """Calls a program of scripts/data_preprocess as a recipe does."""
    monkeypatch.setattr(sys, "argv", words)
    load(REPO / words[0], monkeypatch).main()


def split_words(words):
    """A command's options and its script with flags."""
    start = next(index for index, word in enumerate(words) if word.endswith(".py"))
    return words[:start], words[start:]


def calls_of(notes, program):
    """Calls of the preflight, or launches; without a first look at PPO's flags before its time."""
    calls = [note[1:] for note in notes if note[:2] in (["python", program], [program, "launch"])]
    return [call for call in calls if STAND_IN not in call]


def test_ppos_flags_are_looked_at_before_the_reward_model_trains(tmp_path):
    """A misspelt one would cost the hours of the reward model."""
    notes = notes_of("rm/ppo_hh.sh", tmp_path)
    (first, *_) = (note for note in notes if "ppo_vllm_async.py" in note)
    assert first[1] == "scripts/preflight.py" and STAND_IN in first
    assert first.index("ppo_vllm_async.py") < first.index(STAND_IN)
    trained = [note for note in notes if note[1] == "launch"]
    assert notes.index(first) < notes.index(trained[0])


@pytest.mark.parametrize(("recipe", "env"), RUNS)
def test_what_a_recipe_launches_passes_the_preflight(
    recipe, env, tiny_models, tmp_path, monkeypatch, capfd
):
    kind = recipe.split("/")[0]
    family = {"tulu3": "llama", "tldr": "gpt_neox"}.get(kind, "qwen2")
    policy, reward_model = map(str, tiny_models[family])
    for split in SPLITS.get(kind, ("train", "test")):
        rows = ROWS[kind] * (60 if kind == "tulu3" else 1)
        write_rows(tmp_path / "rows" / f"{split}.jsonl", rows)
    env = env | {"MODEL": policy, "REWARD_MODEL": reward_model, "DATA": str(tmp_path / "rows")}
    folder = tmp_path / "copy"
    notes = notes_of(recipe, folder, **env)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    for _, program, *words in notes:
        if "data_preprocess" in program:
            preprocess([program, *words], monkeypatch)
    trained = folder / "output" / "hh_reward_model"
    trained.mkdir(parents=True)
    (trained / "model").symlink_to(reward_model)

    for question in (note[1:] for note in notes if STAND_IN in note):
        options, script = split_words(question[1:])
        with modules.put_back(LOADED):
            status = preflight.main(
                [*options, "--num_gpus", "8", str(REPO / script[0]), *script[1:]]
            )
        said = capfd.readouterr()
        assert status == 0, said.err
    asked, launched = calls_of(notes, "scripts/preflight.py"), calls_of(notes, "accelerate")
    assert len(asked) == len(launched) > 0
    for question, launch in zip(asked, launched, strict=True):
        options, script = split_words(question[1:])
        launch_options, launched_script = split_words(launch)
        assert script == launched_script  # what was asked is launched
        assert " ".join(options) in " ".join(launch_options)
        machine = ["--num_gpus", "8", "--gpu_memory", "80"]
        if options[-1] == "1":
            machine[1] = "1"
        script[0] = str(REPO / script[0])
        with modules.put_back([*LOADED, "gsm8k", "tulu3", "graders", "if_constraints"]):
            status = preflight.main([*options, *machine, *script])
        said = capfd.readouterr()
        assert status == 0, said.err
        # Not so few as to be a mistake, as divided by ranks they could be
        assert "updates are few" not in said.out or TRAINER in script[0]
        assert "GPUs are not used" not in said.out


@dataclass
class Longest(preflight.Run):
    """A run with the longest rows that its flags allow."""

    def max_length(self):
        args = self.args
        if self.trains_reward_model():
            return args.max_token_length
        return args.max_prompt_token_length + args.response_length


@functools.cache
def models_without_weights(name):
    """A policy and a value or reward model of the shape that this name stands for."""
    config = SHAPES[name]
    config.num_labels = 1
    with torch.device("meta"):
        classes = (AutoModelForCausalLM, AutoModelForSequenceClassification)
        return [auto_class.from_config(config) for auto_class in classes]


def planned(options, script, gpu_memory):
    """The run that a launch on such GPUs is to be. Mistake: a learner or vLLM has too little."""
    module = preflight.load_script(str(REPO / script[0]))
    args, mistake = preflight.parse_flags(module, script[1:])
    assert mistake is None
    launch = preflight.Options(gpu_memory=gpu_memory, num_gpus=8)
    for name, value in zip(options[::2], options[1::2], strict=True):
        setattr(launch, name[2:], int(value) if value.isdecimal() else str(REPO / value))
    preflight.read_config_file(launch)
    if hasattr(args, "local_rollout_batch_size"):
        with mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": str(launch.local_processes())}):
            args = module.fill_in(args, launch.num_processes)
    policy, classifier = models_without_weights(args.model_name_or_path)
    models = {"model": policy, "value_model": classifier, "reward_model": classifier}
    run = Longest(module, launch, args, **models)
    if run.trains_reward_model():
        run.model = classifier
    preflight.check_memory(run)
    return run


# Responses a step, responses an update, steps: on any number of GPUs
PUBLISHED = {
    "gsm8k/ppo.sh": (256, 64, 435),
    "gsm8k/grpo.sh": (5120, 1280, 140),
    "gsm8k/grpo_lora.sh": (320, 320, 116),
    "math/grpo.sh": (320, 320, 117),
    "rm/ppo_hh.sh": (256, 64, 400),
    "tldr/ppo_1b.sh": (512, 512, 1953),
    "tulu3/ppo_8b.sh": (192, 192, 10_416),
    "tulu3/ppo_8b_lora.sh": (192, 192, 500),
    "tulu3/grpo_8b.sh": (768, 384, 2604),
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_memory_and_batches_are_what_a_recipe_says(recipe, tmp_path):
    launches = []
    for param in RUNS:
        if param.values[0] == recipe:
            notes = notes_of(recipe, tmp_path / str(len(launches)), **param.values[1])
            launches += calls_of(notes, "scripts/preflight.py")
    sentence = r"^#   .*: (\d+) GiB for a learner, of the (\d+) that it may take of a GPU of (\d+)"
    said = re.findall(sentence, (TRAIN / recipe).read_text(), re.MULTILINE)
    for words, (needed, room, gpu_memory) in zip(launches, said, strict=True):
        with modules.put_back(LOADED):
            run = planned(*split_words(words[1:]), int(gpu_memory))
        assert round(plan.learner_needs(run) / plan.GIB) == int(needed)
        assert int(plan.learner_room(run) / plan.GIB) == int(room)
        args = run.args
        if not run.trains_reward_model():
            batches = (args.episodes_per_step, args.mini_batch_size, args.num_training_steps)
            assert batches == PUBLISHED[recipe]


@pytest.mark.parametrize(
    ("recipe", "env", "said"),
    [
        *(
            (recipe, {"GPUS": "5"}, "GPUS=5 must divide")
            for recipe in RECIPES
            if recipe not in FOR_NODES
        ),
        *((recipe, {"MACHINE_RANK": "0"}, "MAIN_PROCESS_IP: ") for recipe in FOR_NODES),
    ],
)
def test_what_would_be_another_run_is_refused(recipe, env, said, tmp_path):
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


@pytest.mark.parametrize("path", ["rewards/gsm8k", "rewards/tulu3", "data_preprocess/tulu3"])
def test_examples_are_right(path, monkeypatch):
    with modules.put_back([]):
        module = load(REPO / "scripts" / f"{path}.py", monkeypatch)
        result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0
