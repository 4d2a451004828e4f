"""README.md and docs/: each command is asked of the preflight, or is run by another test."""

import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import fork
import preflight
import pytest
from helpers import PAGES, REPO, SCRIPTS, TRAINER, modules
from helpers.files import write_rows, write_text

from ppo_sync import Args

pytestmark = pytest.mark.slow

# What the others begin with. Benchmarks take minutes: they are run by hand
TESTED_ELSEWHERE = (
    "accelerate launch",  # by itself
    "accelerate config",  # asks
    "bash scripts/test.sh",
    "bash scripts/setup.sh",
    "bash scripts/gpu_check.sh",
    "bash scripts/train/gsm8k/",
    "python make_sums.py",
    "python -m pip",
    "python ppo_sync.py --help",
    "python scripts/benchmark/",
    "python scripts/dev/",
    "python scripts/data_preprocess/",
    *(f"python scripts/{name}.py" for name in ("plot_runs", "inspect_run", "report", "fork")),
    *(f"python scripts/{name}.py" for name in ("evaluate", "push_to_hub", "dev/worked_example")),
)
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
LOADED = [Path(script).stem for script in [*SCRIPTS, TRAINER]]
LOADED += [f"grpo_{path.stem}" for path in fork.FORKS.glob("*.diff")]
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
        variables = list(itertools.takewhile(lambda word: "=" in word, words))  # the environment
        program, *rest = words[len(variables) :]
        scripts = [variable for variable in variables if variable.startswith("SCRIPT=")]
        yield (*scripts, Path(program).name, *rest)


def is_asked(command):
    line = " ".join(command)
    return line != TESTED_ELSEWHERE[0] and not line.startswith(TESTED_ELSEWHERE[1:])


COMMANDS = sorted(filter(is_asked, {each for page in PAGES for each in commands_of(page)}))


def block_of(page, pattern):
    """A program that a page shows."""
    (block,) = re.findall(pattern, (REPO / "docs" / page).read_text())
    return re.sub("^    ", "", block, flags=re.MULTILINE)


@pytest.fixture(scope="module")
def folder(git, assets, take_rows, reward_model, tmp_path_factory):
    """What the commands need where they are called: data, rewards, models of any name."""
    folder = tmp_path_factory.mktemp("newcomer")
    files = ("train.parquet", "test.parquet", "preference_train.parquet", "preference_test.parquet")
    few = take_rows(dict.fromkeys(files, 512))
    (few / "model").symlink_to(assets / "model")
    for name in ("debug_assets", "debug_assets_rm", "debug_assets_calculator"):
        (folder / name).symlink_to(few)
    for path in fork.FORKS.glob("*.diff"):
        fork.write_fork(path.stem, folder / f"grpo_{path.stem}.py")
    (folder / "scripts").mkdir()
    for path in (REPO / "scripts").iterdir():
        if path.name != "setup.sh":
            (folder / "scripts" / path.name).symlink_to(path)
    write_text(folder / "scripts" / "setup.sh", "")
    prompt = [{"role": "user", "content": "21543="}]
    row = {"prompt": prompt, "data_source": "debug/sorting"}
    row["reward_model"] = {"style": "rule", "ground_truth": "12345"}
    pair = {"prompt": prompt, "chosen": "12345", "rejected": "54321"}
    for name in ("train.parquet", "test.parquet", "train.jsonl", "sums.jsonl"):
        write_rows(folder / name, [row] * 64)
    for name in ("rm_train.parquet", "rm_test.parquet"):
        write_rows(folder / name, [pair] * 64)
    rewards = block_of("rewards.md", r"    # my_rewards.py\n((?:    .*\n)+)")
    write_text(folder / "my_rewards.py", rewards)
    text = (REPO / "docs" / "forks.md").read_text()
    step = re.search(r"```python\n(def step.*?)```", text, re.DOTALL)[1]
    write_text(folder / "tools.py", f"import re\n\n\n{step}")
    for name in {word for command in COMMANDS for word in command if "Qwen/" in word}:
        shutil.copytree(assets / "model", folder / name)
        config = json.loads((folder / name / "config.json").read_text())
        config["max_position_embeddings"] = 4096
        write_text(folder / name / "config.json", json.dumps(config))
    (folder / "output" / "debug_reward_model").mkdir(parents=True)
    (folder / "output" / "debug_reward_model" / "model").symlink_to(reward_model)
    (folder / "output" / "teacher").mkdir()
    (folder / "output" / "teacher" / "model").symlink_to(assets / "model")
    script = REPO / "scripts" / "data_preprocess" / "instructions.py"
    subprocess.run([sys.executable, script], cwd=folder, check=True)

    # In place of .venv: scripts of scripts/train tell what they would launch
    note = '#!/bin/sh\nprintf "%s\\n" "$*" >> launched.txt\n'
    for name, text in (("accelerate", note), ("python", "#!/bin/sh\n")):
        write_text(folder / ".venv" / "bin" / name, text).chmod(0o755)
    return folder


def launches(words, folder):
    """What a command launches: words, those of the script among them."""
    environment = os.environ | {"MODEL": "debug_assets/model"}
    if words[0].startswith("SCRIPT="):
        environment["SCRIPT"], words = words[0].removeprefix("SCRIPT="), words[1:]
    if words[0] != "bash":
        return [words]
    (folder / "launched.txt").unlink(missing_ok=True)
    subprocess.run(words, cwd=folder, env=environment, check=True, capture_output=True)
    return [["accelerate", *line.split()] for line in open(folder / "launched.txt")]


def question_of(words):
    """What the preflight is to be told of a launch on GPUs that this machine lacks."""
    start = next(i for i, word in enumerate(words) if word.endswith(".py"))
    known = []
    for option, value in itertools.pairwise(words[:start]):
        if option in LAUNCH_OPTIONS:
            known += [option, value]
        if option == "--nproc_per_node":
            known += ["--num_processes", value]
    # On a GPU adapters need bfloat16, which the debug commands have not
    gpus = ["--num_gpus", "16", "--gpu_memory", "80"]
    if "--lora_rank" in words and "float32" in words:
        gpus = ["--num_gpus", "0"]
    return [*known, *gpus, *words[start:]]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_commands_pass_the_preflight(words, folder, monkeypatch, capfd):
    monkeypatch.chdir(folder)
    if "scripts/preflight.py" in words:
        asked = [list(words[2:])]
    else:
        asked = [question_of(launch) for launch in launches(list(words), folder)]
    assert asked
    for question in asked:
        script = next(i for i, word in enumerate(question) if word.endswith(".py"))
        is_fork = (folder / question[script]).exists()
        question[script] = str((folder if is_fork else REPO) / question[script])
        if "--resume_from_checkpoint" in question:  # there is none yet
            del question[question.index("--resume_from_checkpoint") :]
        with modules.put_back([*LOADED, "my_rewards", "if_constraints", "calculator"]):
            status = preflight.main(question)
        assert status == 0, capfd.readouterr().err


def test_program_that_makes_sums_does(tmp_path):
    program = block_of("data.md", r"((?:    .*\n|\n)+)\nMake it, check, train")
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True)
    assert len((tmp_path / "sums.jsonl").read_text().splitlines()) == 2000


def test_help_fits_the_terminal_and_has_flags_as_documents_have_them():
    """With underscores, in the order of the groups: the algorithm comes first."""
    command = [sys.executable, "ppo_sync.py", "--help"]
    environment = os.environ | {"COLUMNS": "80", "NO_COLOR": "1"}
    shown = subprocess.check_output(command, cwd=REPO, env=environment, text=True)
    assert max(map(len, shown.splitlines())) <= 80
    flags = re.findall(r"^│ (--\w+)", shown, re.MULTILINE)
    named = [f"--{field.name}" for field in fields(Args) if field.name != "mini_batch_size"]
    assert flags[0] == "--beta" and flags == named[: len(flags)] and len(flags) > 80
