"""README.md and docs/: each command is asked of the preflight, or is run by another test."""

import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import preflight
import pytest
from helpers import REPO, SCRIPTS, TRAINER, modules
from helpers.files import write_rows
from helpers.line_links import pages

pytestmark = pytest.mark.slow

# What runs the others. Benchmarks take minutes: they are run by hand, and results.md has the date
TESTED = {
    "bash scripts/test.sh": "this suite",
    "bash scripts/setup.sh": "this suite",
    "bash scripts/gpu_check.sh": "test_gpu_check",
    "bash scripts/train/gsm8k/": "test_recipes",
    "python make_sums.py": "below",
    "python scripts/data_preprocess/": "test_data_preprocess",
    "python scripts/plot_runs.py": "test_pictures",
    "python scripts/summarize_run.py": "test_pictures",
    "python scripts/inspect_run.py": "test_inspect",
    "python scripts/evaluate.py": "test_evaluate",
    "python scripts/push_to_hub.py": "test_hub",
    "python scripts/worked_example.py": "test_docs",
    "python scripts/benchmark/": "by hand",
    "python ppo_sync.py --help": "below",
}
PROGRAM = r"(?:\w+=\S+ )*(?:\S*/)?(?:bash|python|accelerate|torchrun) "
# In place of what the pages leave to the reader
LEFT_OPEN = {
    "...": "--dataset train.parquet --model_name_or_path Qwen/Qwen3-0.6B",
    "FLAGS": "--dataset train.parquet --model_name_or_path Qwen/Qwen3-0.6B --save_freq 50",
    "my_copy.py": "ppo_vllm_async.py",
    "SCRIPT": "ppo_sync.py",
    "N": "3",
    "F": "my_rewards.py:score",
}
LONGER = {"max_position_embeddings": 4096}  # than what the debug model takes
LOADED = [Path(script).stem for script in [*SCRIPTS, TRAINER]]
LAUNCH_OPTIONS = ("--num_processes", "--config_file", "--num_machines")


def commands_of(page):
    """The commands of a page's blocks and of its inline code, with variables filled in."""
    text = page.read_text().replace("\\\n", " ").replace("../tandem/", "")
    for match in re.finditer(rf"^    ({PROGRAM}.*)$|`({PROGRAM}[^`]*)`", text, re.MULTILINE):
        line = match[1] or match[2]
        for name, value in re.findall(r'(\w+)="([^"]*)"', text[: match.start()])[::-1]:
            line = line.replace(f"${name}", value)  # the last one of that name
        words = []
        for word in shlex.split(line, comments=True):
            words += shlex.split(LEFT_OPEN.get(word, word))
        while "=" in words[0]:  # the environment
            words.pop(0)
        yield (Path(words[0]).name, *words[1:])


def is_asked(command):
    line = " ".join(command)
    return line != "accelerate launch" and not any(line.startswith(tested) for tested in TESTED)


EVERY = {command for page in pages() for command in commands_of(page)}
COMMANDS = sorted(filter(is_asked, EVERY))


@pytest.fixture(scope="module")
def folder(assets, reward_model, tmp_path_factory):
    """What the commands need where they are called: data, rewards, models of any name."""
    folder = tmp_path_factory.mktemp("newcomer")
    for name in ("debug_assets", "debug_assets_rm"):
        (folder / name).symlink_to(assets)
    (folder / "scripts").mkdir()
    for path in (REPO / "scripts").iterdir():
        (folder / "scripts" / path.name).symlink_to(path)
    (folder / "scripts" / "setup.sh").unlink()
    (folder / "scripts" / "setup.sh").touch()
    prompt = [{"role": "user", "content": "21543="}]
    row = {"prompt": prompt, "data_source": "debug/sorting"}
    row["reward_model"] = {"style": "rule", "ground_truth": "12345"}
    pair = {"prompt": prompt, "chosen": "12345", "rejected": "54321"}
    for name in ("train.parquet", "test.parquet", "train.jsonl", "sums.jsonl"):
        write_rows(folder / name, [row] * 64)
    for name in ("rm_train.parquet", "rm_test.parquet"):
        write_rows(folder / name, [pair] * 64)
    rewards = (REPO / "docs" / "rewards.md").read_text()
    (block,) = re.findall(r"    # my_rewards.py\n((?:    .*\n)+)", rewards)
    (folder / "my_rewards.py").write_text(re.sub("^    ", "", block, flags=re.MULTILINE))
    for name in {word for command in COMMANDS for word in command if "Qwen/" in word}:
        shutil.copytree(assets / "model", folder / name)
        config = folder / name / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | LONGER))
    (folder / "output" / "debug_reward_model").mkdir(parents=True)
    (folder / "output" / "debug_reward_model" / "model").symlink_to(reward_model)
    script = REPO / "scripts" / "data_preprocess" / "instructions.py"
    subprocess.run([sys.executable, script], cwd=folder, check=True)

    # In place of .venv: scripts of scripts/train tell what they would launch
    programs = folder / ".venv" / "bin"
    programs.mkdir(parents=True)
    (programs / "accelerate").write_text('#!/bin/sh\nprintf "%s\\n" "$*" >> launched.txt\n')
    (programs / "python").write_text("#!/bin/sh\n")
    for program in programs.iterdir():
        program.chmod(0o755)
    return folder


def launches(words, folder):
    """What a command launches: (launcher's words, script's words)."""
    if words[0] == "bash":
        (folder / "launched.txt").unlink(missing_ok=True)
        environment = os.environ | {"MODEL": "debug_assets/model"}
        subprocess.run(words, cwd=folder, env=environment, check=True, capture_output=True)
        commands = (folder / "launched.txt").read_text().splitlines()
        return [
            each for line in commands for each in launches(["accelerate", *line.split()], folder)
        ]
    start = next(i for i, word in enumerate(words) if word.endswith(".py"))
    return [(words[1:start], words[start:])]


def preflight_words(launcher, script):
    """What the preflight is to be told of a launch on GPUs that this machine lacks."""
    known = []
    for option, value in itertools.pairwise(launcher):
        if option in LAUNCH_OPTIONS:
            known += [option, value]
        if option == "--nproc_per_node":
            known += ["--num_processes", value]
    # On a GPU adapters need bfloat16, which the debug commands have not
    gpus = ["--num_gpus", "16", "--gpu_memory", "80"]
    if "--lora_rank" in script and "float32" in script:
        gpus = ["--num_gpus", "0"]
    return [*known, *gpus, *script]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_commands_pass_the_preflight(words, folder, monkeypatch, capfd):
    monkeypatch.chdir(folder)
    if "scripts/preflight.py" in words:
        asked = [list(words[2:])]
    else:
        asked = [preflight_words(*launch) for launch in launches(list(words), folder)]
    assert asked
    for question in asked:
        script = next(i for i, word in enumerate(question) if word.endswith(".py"))
        question[script] = str(REPO / question[script])
        if "--resume_from_checkpoint" in question:  # there is none yet
            del question[question.index("--resume_from_checkpoint") :]
        with modules.put_back([*LOADED, "my_rewards", "if_constraints"]):
            status = preflight.main(question)
        assert status == 0, capfd.readouterr().err


def test_program_that_makes_sums_does(tmp_path):
    text = (REPO / "docs" / "data.md").read_text()
    (block,) = re.findall(r"((?:    .*\n|\n)+)\nMake it, check, train", text)
    (tmp_path / "make_sums.py").write_text(re.sub("^    ", "", block, flags=re.MULTILINE))
    subprocess.run([sys.executable, "make_sums.py"], cwd=tmp_path, check=True)
    assert len((tmp_path / "sums.jsonl").read_text().splitlines()) == 2000


@pytest.mark.parametrize("columns", ["80", "120"])
def test_help_fits_the_terminal(columns):
    command = [sys.executable, "ppo_sync.py", "--help"]
    environment = os.environ | {"COLUMNS": columns, "NO_COLOR": "1"}
    result = subprocess.run(
        command, cwd=REPO, env=environment, check=True, capture_output=True, text=True
    )
    assert max(map(len, result.stdout.splitlines())) <= int(columns)
