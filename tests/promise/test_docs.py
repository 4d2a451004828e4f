"""README.md and docs/: what they point at is there, and tables are what a command prints."""

import dataclasses
import importlib
import re
import runpy
import subprocess
import sys

import pytest
from helpers import PAGES, REPO, SCRIPTS, files_of_project

# Flags of launchers, docker and Slurm, and of programs of older commits
OTHER_FLAGS = """
    adapters batch draw exclude help init ipc job-name machine_rank main_process_ip
    main_process_port network nodes positions privileged results rounds shm-size signal step_ms
"""


def test_links_and_paths_lead_somewhere():
    for page in PAGES:
        text = page.read_text()
        for target, _, section in re.findall(r"\]\(([^)#]+)(#([^)]*))?\)", text):
            assert target.startswith("http") or (page.parent / target).exists(), target
            if section and target.endswith(".md"):
                headings = re.findall(r"^#+ (.+)$", (page.parent / target).read_text(), re.M)
                assert section in {heading.lower().replace(" ", "-") for heading in headings}
        for path in re.findall(r"(?<!:)\b(?:scripts|docs|tests)/[\w/.-]+\.(?:py|sh|md|png)", text):
            assert (REPO / path).exists(), path
        assert "#L" not in text  # lines move; names are found


@pytest.mark.usefixtures("git")
def test_programs_of_an_older_commit_are_in_it():
    command = ["git", "cat-file", "-e"]
    texts = "".join(page.read_text() for page in PAGES)
    for commit, path in {*re.findall(r"\b([0-9a-f]{7}):([\w/.-]+)", texts)}:
        if subprocess.run([*command, commit], cwd=REPO).returncode == 0:  # a clone may lack it
            subprocess.run([*command, f"{commit}:{path}"], cwd=REPO, check=True)


def test_flags_exist():
    known = set(OTHER_FLAGS.split())
    for script in SCRIPTS:
        for field in dataclasses.fields(importlib.import_module(script[:-3]).Args):
            known |= {field.name, f"no-{field.name}"}
    for path in [*(REPO / "scripts").rglob("*.diff"), *(REPO / "scripts").rglob("*.py")]:
        text = path.read_text()
        known |= set(re.findall(r"^\+?    (\w+): .* = ", text, re.MULTILINE))
        known |= set(re.findall(r'"--([\w-]+)"', text))
    for page in PAGES:
        flags = set(re.findall(r"(?<![\w-])--([a-z][\w-]+)", page.read_text()))
        assert flags <= known, page.name


def test_readme_links_every_other_page():
    readme = (REPO / "README.md").read_text()
    assert [page.name for page in PAGES[1:] if f"docs/{page.name}" not in readme] == []


# What stands directly in scripts/ is typed by a user; all else is in a folder
TYPED = [path for path in files_of_project("scripts/*") if path.is_file()]


@pytest.mark.parametrize("path", TYPED, ids=lambda path: path.name)
def test_what_users_type_is_named_in_readme_and_has_help(path, printed_by):
    assert re.search(rf"\b{re.escape(path.name)}\b", (REPO / "README.md").read_text())
    if path.suffix == ".py":
        assert "usage: " in printed_by(f"scripts/{path.stem}", "--help")


# What that run has not, and held-out prompts', which have those of objective/
OTHER_METRICS = {"objective/reward_model_score", "objective/reward/NAME", "time/checkpoint"}
OTHER_METRICS |= {"eval/*"}


@pytest.mark.parametrize("name", SCRIPTS)
def test_metrics_of_a_run_are_those_of_the_page(name, run_main, few_prompts):
    text = (REPO / "docs" / "reference.md").read_text()
    text = text.partition("## Logged metrics")[2].partition("\n## ")[0]
    of_script = {"": True, "PPO": "ppo" in name, "GRPO": "grpo" in name, "async": "async" in name}
    explained = set()
    for names, mark in re.findall(r"^\| (`[^|(]*`)(?: \(([^)]*)\))? \|", text, re.MULTILINE):
        if of_script[re.sub(r"(, )?beta > 0", "", mark)]:
            explained |= set(re.findall(r"`([^`]+)`", names))
    run = run_main(name, beta=0.1, eval_dataset=few_prompts / "test.parquet", num_evals=1)
    logged = {metric for line in run.metrics for metric in line}
    logged = {re.sub("eval/(?!policy)", "objective/", metric) for metric in logged}
    assert logged == explained - OTHER_METRICS


def test_page_has_all_that_a_resumed_run_must_keep(import_fork):
    rows = re.findall(r"^\| (.*) \| (.*) \|$", (REPO / "docs" / "checkpoints.md").read_text(), re.M)
    said = {who: set(re.findall(r"`(\w+)`", what)) for who, what in rows}
    names = [name.removesuffix(".py") for name in SCRIPTS]
    names += [import_fork(name).__name__ for name in ("multiturn", "refill", "inflight", "distill")]
    for name in names:
        module = importlib.import_module(name)
        options = {field.name for field in dataclasses.fields(module.Algorithm)}
        options -= {"learning_rate", "value_learning_rate"}  # as the page says
        expected = options | said["all three"] | said.get(f"the fork {name[5:]}", set())
        assert set(module.MUST_AGREE) == expected, name
    of_trainer = vars(importlib.import_module("train_reward_model").Args()).keys()
    of_ppo = set(importlib.import_module("ppo_sync").MUST_AGREE)
    assert of_ppo & of_trainer == said["`train_reward_model.py`"]


@pytest.fixture
def printed_by(monkeypatch, capsys):
    """printed_by("docs/worked_example"): what this program prints."""

    def run(program, *words):
        path = str(REPO / f"{program}.py")
        monkeypatch.setattr(sys, "argv", [path, *words])
        # As Python starts a program; the preflight takes its folder's modules out again
        monkeypatch.setattr(sys, "path", [path.rpartition("/")[0], *sys.path])
        before = sys.modules.copy()
        try:
            runpy.run_path(path, run_name="__main__")
        except SystemExit as end:
            assert end.code == 0
        finally:
            sys.modules.update(before)
        return capsys.readouterr().out

    return run


def test_worked_example_is_what_the_command_prints(printed_by):
    assert printed_by("docs/worked_example") in (REPO / "docs" / "ppo.md").read_text()


def test_tables_of_what_fits_are_what_the_command_prints(printed_by):
    tables = [
        line for line in printed_by("scripts/benchmark/fits").splitlines() if line.startswith("|")
    ]
    page = (REPO / "docs" / "memory.md").read_text()
    assert len(tables) > 10 and [line for line in tables if line not in page] == []
