"""What the commands of README.md, docs/ and scripts/train launch has flags that fit together.

Scripts of bash are run in a folder in which .venv/bin/python and accelerate only note how they are
called. What a recipe launches passes the whole preflight: rows have the form of the hub's; models
have shapes, and no weights.
"""

import itertools
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import datasets
import fork
import preflight
import pytest
import tyro
from helpers import GRPO, PAGES, REPO, SCRIPTS, TRAINER, modules
from helpers.files import read_json_lines, write_rows, write_text
from internal import resource_plan as plan
from preflight_cases import call_rewards_here
from test_report import byte_tokenizer
from transformers import AutoConfig

TRAIN = REPO / "scripts" / "train"
LOADED = [*SCRIPTS, TRAINER, "my_rewards.py", "calculator.py", "tools.py", "__mp_main__.py"]
LOADED += [path.name for path in (REPO / "scripts" / "rewards").glob("*.py")]
LOADED = [Path(name).stem for name in LOADED]
NOTE = f"""#!{sys.executable} -SE
import json, os, sys
if sys.argv[1:2] == ["scripts/train/launch.py"]:
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
with open("notes.jsonl", "a") as file:
    print(json.dumps([os.path.basename(sys.argv[0]), *sys.argv[1:]]), file=file)
"""


def make_folder(folder):
    """Where commands are called: scripts/, but for the set-up, and stubs in place of .venv."""
    (folder / "scripts").mkdir(parents=True)
    for path in (REPO / "scripts").iterdir():
        if path.name != "setup.sh":
            (folder / "scripts" / path.name).symlink_to(path)
    write_text(folder / "scripts" / "setup.sh", "")
    for name in ("python", "accelerate"):
        write_text(folder / ".venv" / "bin" / name, NOTE).chmod(0o755)
    return folder


def notes_of(words, folder, **env):
    """How a bash script calls python and accelerate: their words."""
    (folder / "notes.jsonl").unlink(missing_ok=True)
    ran = subprocess.run(words, cwd=folder, env=os.environ | env, capture_output=True, text=True)
    if ran.returncode != 0:
        raise RuntimeError(ran.stderr)
    return read_json_lines(folder / "notes.jsonl")


def split_words(words):
    """A command's options and its script with flags."""
    start = next(index for index, word in enumerate(words) if word.endswith(".py"))
    return words[:start], words[start:]


# ---------------------------------------------------------------------------------------- documents

PROGRAM = r"(?:\w+=\S+ )*(?:\S*/)?(?:bash|python|accelerate|torchrun) "
# What launches a script or asks about it. Other programs are run by their own tests
ASKED = r"(?:SCRIPT=\S+ )?(?:(?:accelerate|torchrun) .*\.py"
ASKED += r"|python (?:scripts/preflight|(?!make_sums|ppo_sync\.py --help)\w+)\.py"
ASKED += r"|bash scripts/train/(?:debug|smollm2)/)"
# In place of what the pages leave to the reader
LEFT_OPEN = {
    "...": "--dataset train.parquet",
    "FLAGS": "--dataset train.parquet --save_freq 50",
    "my_copy.py": "ppo_vllm_async.py",
    "SCRIPT": "ppo_sync.py",
    "N": "3",
    "F": "my_rewards.py:score",
}
VARIABLE = r'(\w+)=(["(])([^")]*)[")]'
LAUNCH_OPTIONS = {name: name for name in ("--num_processes", "--config_file", "--num_machines")}
LAUNCH_OPTIONS["--nproc_per_node"] = "--num_processes"


def commands_of(page):
    """The commands of a page's blocks and of its inline code, with variables filled in."""
    text = page.read_text().replace("\\\n", " ").replace("../tandem/", "")
    for match in re.finditer(rf"^    ({PROGRAM}.*)$|`({PROGRAM}[^`]*)`", text, re.MULTILINE):
        line = match[1] or match[2]
        for name, _, value in re.findall(VARIABLE, text[: match.start()])[::-1]:
            # Only this form of a variable works in every shell: zsh does not split $name
            line = line.replace(f'"${{{name}[@]}}"', value)  # the last one of that name
        words = []
        for word in shlex.split(line, comments=True):
            words += shlex.split(LEFT_OPEN.get(word, word))
        variables = list(itertools.takewhile(lambda word: "=" in word, words))  # the environment
        program, *rest = words[len(variables) :]
        scripts = [variable for variable in variables if variable.startswith("SCRIPT=")]
        yield (*scripts, Path(program).name, *rest)


FOUND = {each for page in PAGES for each in commands_of(page)}
COMMANDS = sorted(words for words in FOUND if re.match(ASKED, " ".join(words)))


def launches_of(words, folder):
    """What a command launches: words, those of the script among them."""
    variables = {"MODEL": "debug_assets/model"}
    if words[0].startswith("SCRIPT="):
        variables["SCRIPT"], words = words[0].removeprefix("SCRIPT="), words[1:]
    if words[0] != "bash":
        return [words[2:] if "scripts/preflight.py" in words else words]
    return [note for note in notes_of(words, folder, **variables) if note[0] == "accelerate"]


def check_flags(launch, folder):
    """The preflight's check of arguments, on GPUs that this machine lacks."""
    options, (name, *flags) = split_words(launch)
    known = []
    for option, value in itertools.pairwise(options):
        if option in LAUNCH_OPTIONS:
            known += [LAUNCH_OPTIONS[option], value]
    script = preflight.load_script(folder / name if (folder / name).exists() else REPO / name)
    # On a GPU adapters need bfloat16, which the debug commands have not
    num_gpus = 0 if "lora_rank" in script.Args.__dataclass_fields__ and "float32" in flags else 16
    known += ["--num_gpus", str(num_gpus)]
    launch = tyro.cli(preflight.Options, args=known, use_underscores=True)
    args = tyro.cli(script.Args, args=flags, use_underscores=True)
    preflight.read_config_file(launch)
    run = preflight.Run(script, launch, args)
    preflight.check_sharding(run)
    preflight.check_arguments(run)


@pytest.mark.slow
def test_commands_have_flags_that_fit_together(assets, tmp_path, monkeypatch):
    folder = make_folder(tmp_path / "clone")
    monkeypatch.chdir(folder)
    (folder / "debug_assets").symlink_to(assets)
    (folder / "my_copy.py").symlink_to(REPO / GRPO[0])
    for path in fork.FORKS.glob("*.diff"):
        fork.write_fork(path.stem, folder / fork.file_of(path.stem))
    fork.write_fork("lora", folder / "ppo_lora.py", script="ppo_vllm_async.py")
    assert len(COMMANDS) > 40
    with modules.put_back(LOADED):
        for words in COMMANDS:
            launches = launches_of(list(words), folder)
            assert launches, words
            for launch in launches:
                check_flags(launch, folder)


# ------------------------------------------------------------------------------------------ recipes

RECIPES = sorted(str(path.relative_to(TRAIN)) for path in TRAIN.glob("*/*.sh"))
RECIPES = [recipe for recipe in RECIPES if not recipe.startswith(("debug", "smollm2"))]
FOR_NODES = ["tulu3/ppo_8b.sh"]
STAND_IN = "--add_r1_style_format_reward"  # for a reward model that is not trained yet
# The models that the recipes name: vocab_size, hidden_size, num_hidden_layers, ...
SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
SIZES += ("num_key_value_heads", "intermediate_size", "tie_word_embeddings")
SHAPES = {
    "Qwen/Qwen2.5-0.5B-Instruct": ("Qwen2", 151_936, 896, 24, 14, 2, 4864, True),
    "Qwen/Qwen2.5-1.5B-Instruct": ("Qwen2", 151_936, 1536, 28, 12, 2, 8960, True),
    "Qwen/Qwen2.5-3B-Instruct": ("Qwen2", 151_936, 2048, 36, 16, 2, 11_008, True),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": ("Qwen2", 151_936, 1536, 28, 12, 2, 8960, False),
    "PrimeIntellect/Qwen3-0.6B-Reverse-Text-SFT": ("Qwen3", 151_936, 1024, 28, 16, 8, 3072, True),
    "allenai/Llama-3.1-Tulu-3-8B-DPO": ("Llama", 128_264, 4096, 32, 32, 8, 14_336, False),
}
# Responses a step, responses an update, steps: on any number of GPUs
PUBLISHED = {
    "gsm8k/ppo.sh": (256, 64, 435),
    "gsm8k/grpo.sh": (5120, 1280, 140),
    "gsm8k/grpo_lora.sh": (320, 320, 116),
    "math/grpo.sh": (320, 320, 117),
    "reverse_text/grpo.sh": (128, 128, 20),
    "sanity/grpo.sh": (512, 128, 600),
    "rm/ppo_hh.sh": (256, 64, 400),
    "tulu3/ppo_8b.sh": (192, 192, 10_416),
}
NEEDS = r"^#   .*: a learner needs (\d+) GiB of the (\d+) that it can use on a GPU with (\d+) GB"


def of_open_instruct(text, truth, **columns):
    return {"messages": [{"role": "user", "content": text}], "ground_truth": truth} | columns


NO_COMMAS = json.dumps({"func_name": "validate_no_commas", "N": None})
HALVES = r"So $\boxed{\frac{1}{2}}$."
ANSWERED = {"chosen": " 1.", "rejected": " 2."}
# Rows in the form of the hub's, by recipe's folder
ROWS = {
    "gsm8k": [{"question": f"{n}?", "answer": f"So.\n#### {n}"} for n in range(1, 40)],
    "math": [{"problem": f"{n}?", "solution": HALVES} for n in range(1, 40)],
    "reverse_text": [{"prompt": f"Number {n}"} for n in range(1, 40)],
    "sanity": [of_open_instruct(f"{n}?", "2") for n in range(70)],
    "rm": [{"prompt": f"\n\nHuman: {n}?\n\nAssistant:"} | ANSWERED for n in range(150)],
    "tulu3": [
        *(of_open_instruct(f"{n}?", "4", dataset="gsm8k") for n in "12"),
        of_open_instruct("A half?", r"\frac{1}{2}", dataset="MATH"),
        of_open_instruct("No commas.", NO_COMMAS, dataset="ifeval"),
    ]
    * 60,
}


def save_models(name, assets, folder):
    """The folders of a policy and of a reward model, which lack their weights."""
    family, *shape = SHAPES[name]
    options = {"eos_token_id": 0, "pad_token_id": 0, "max_position_embeddings": 16_384}
    options |= dict(zip(SIZES, shape, strict=True))
    config = AutoConfig.for_model(family.lower(), num_labels=1, **options)
    for kind in ("CausalLM", "SequenceClassification"):
        shutil.copytree(assets / "model", folder / kind, ignore=lambda *_: ["model.safetensors"])
        config.architectures = [f"{family}For{kind}"]
        config.save_pretrained(folder / kind)
        byte_tokenizer().save(str(folder / kind / "tokenizer.json"))  # no letter is lost
        yield str(folder / kind)


def max_length(run):
    """In place of Run's: the longest row that the flags allow."""
    if run.trains_reward_model():
        return run.args.max_token_length
    return run.args.max_prompt_token_length + run.args.response_length


def ways_to_run():
    """Recipes, the number of the run, and variables of its environment."""
    for recipe in RECIPES:
        nodes = {"MACHINE_RANK": "1", "MAIN_PROCESS_IP": "localhost"}
        for number, env in enumerate([nodes] if recipe in FOR_NODES else [{}, {"GPUS": "8"}]):
            yield pytest.param(recipe, number, env, id=f"{recipe} {' '.join(env.values())}".strip())


@pytest.mark.parametrize(("recipe", "number", "env"), ways_to_run())
def test_what_a_recipe_launches_passes_the_preflight_and_is_what_it_says(
    recipe, number, env, assets, tmp_path, monkeypatch, capfd
):
    kind, text = recipe.split("/")[0], (TRAIN / recipe).read_text()
    name = re.search(r"{MODEL:-([^}]+)}", text)[1]
    policy, reward_model = save_models(name, assets, tmp_path / "models")
    for split in ("train",) if kind == "tulu3" else ("train", "test"):
        write_rows(tmp_path / "rows" / f"{split}.jsonl", ROWS[kind])
    folder = make_folder(tmp_path / "clone")
    fork.write_fork("lora", folder / "grpo_lora.py")
    variables = {"MODEL": policy, "REWARD_MODEL": reward_model, "DATA": str(tmp_path / "rows")}
    notes = notes_of(["bash", f"scripts/train/{recipe}"], folder, **env | variables)
    monkeypatch.chdir(folder)
    runs = []
    call_rewards_here(monkeypatch)
    monkeypatch.setattr(preflight, "print_plan", runs.append)
    monkeypatch.setattr(preflight.Run, "max_length", max_length)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    for _, program, *words in notes:
        if "data_preprocess" in program:
            monkeypatch.setattr(sys, "argv", [program, *words])
            monkeypatch.syspath_prepend((REPO / program).parent)  # as Python starts a program
            runpy.run_path(str(REPO / program), run_name="__main__")
    trained = folder / "output" / "hh_reward_model" / "model"

    def ask(options, script, gpu_memory="80"):
        gpus = ["--num_gpus", "1" if options[-1] == "1" else "8", "--gpu_memory", gpu_memory]
        with modules.put_back(LOADED):
            path = next(path for path in (REPO / script[0], folder / script[0]) if path.exists())
            status = preflight.main([*options, *gpus, str(path), *script[1:]])
        assert status == 0, capfd.readouterr().err
        return runs[-1]

    asked = [split_words(note[2:]) for note in notes if note[1] == "scripts/preflight.py"]
    launched = [split_words(note[2:]) for note in notes if note[1] == "launch"]
    # PPO's flags, before a reward model trains for hours
    early = [asked.pop(0)] if STAND_IN in asked[0][1] else []
    assert len(early) == (recipe == "rm/ppo_hh.sh")
    for question in early:
        ask(*question)
    needs = re.findall(NEEDS, text, re.MULTILINE)[number * len(asked) :][: len(asked)]
    for question, launch, (needed, room, memory) in zip(asked, launched, needs, strict=True):
        assert question[1] == launch[1]  # what was asked is launched
        assert " ".join(question[0]) in " ".join(launch[0])
        if question is asked[-1]:
            trained.parent.mkdir(parents=True)
            trained.symlink_to(reward_model)
        run = ask(*question, memory)
        sizes = plan.learner_needs(run) / plan.GIB, plan.learner_room(run) / plan.GIB
        assert sizes == pytest.approx((int(needed), int(room)), rel=0.1)
        assert not any("GPUs are not used" in warning for warning in run.warnings)
    args = run.args  # the last is the script's
    assert PUBLISHED[recipe] == (
        args.episodes_per_step,
        args.mini_batch_size,
        args.num_training_steps,
    )


def test_table_has_every_recipe():
    named = set(re.findall(r"`([\w/]+\.sh)`", (TRAIN / "README.md").read_text()))
    assert named == {str(path.relative_to(TRAIN)) for path in TRAIN.glob("*/*.sh")}
