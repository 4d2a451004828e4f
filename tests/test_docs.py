"""README.md and docs/: what they point at is there, and tables are what a command prints."""

import ast
import dataclasses
import importlib
import re
import subprocess
import sys

import fits
import fork
import plan
import pytest
from helpers import REPO, SCRIPTS, TRAINER
from helpers.line_links import pages, with_right_numbers

every_page = pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
# Flags of other programs: the launchers, the preflight, the benchmarks, docker
OTHER_FLAGS = """
    num_processes num_machines machine_rank main_process_ip main_process_port nproc_per_node help
    config_file cpu privileged quiet steps what local_save_dir local_dataset_path split
    center_rewards_coefficient num_gpus gpu_memory disk ranks fsdp2 positions
    seeds x output overwrite metrics watch responses tokens samples temperature prompts model
    summary repo_id revision private mixed_precision dynamo_backend prompts seed ipc shm-size
    compare wrong spreads rounds staleness script moments step_ms worker_calls draw results show
    find_rate rates lags noises corrections task run exclude tensorboard dry_run logdir
    nnodes node_rank master_addr master_port network init nodes job-name signal batch rungs training
    arms adapters temperatures answer
"""


@every_page
def test_links_and_paths_lead_somewhere(page):
    text = page.read_text()
    for target, _, section in re.findall(r"\]\(([^)#]+)(#([^)]*))?\)", text):
        assert target.startswith("http") or (page.parent / target).exists(), target
        if section and target.endswith(".md"):
            headings = re.findall(r"^#+ (.+)$", (page.parent / target).read_text(), re.MULTILINE)
            assert section in {heading.lower().replace(" ", "-") for heading in headings}
    for path in re.findall(r"\b(?:scripts|docs|tests)/[\w/.-]+\.(?:py|sh|md|png)", text):
        assert (REPO / path).exists(), path


@every_page
def test_links_to_lines_lead_to_what_they_name(page):
    assert page.read_text() == with_right_numbers(page), "python tests/helpers/line_links.py"


@every_page
def test_flags_exist(page):
    known = set(OTHER_FLAGS.split())
    for script in SCRIPTS:
        for field in dataclasses.fields(importlib.import_module(script[:-3]).Args):
            known |= {field.name, f"no-{field.name}"}
    for diff in (REPO / "scripts/forks").glob("*.diff"):
        known |= set(re.findall(r"^\+    (\w+): .* = ", diff.read_text(), re.MULTILINE))
    assert set(re.findall(r"(?<![\w-])--([a-z][\w-]+)", page.read_text())) <= known


def test_readme_is_one_page_and_links_every_other():
    readme = (REPO / "README.md").read_text()
    assert len(readme.split()) < 900
    assert [page.name for page in pages()[1:] if f"docs/{page.name}" not in readme] == []


def test_a_newcomer_can_take_in_the_folder_of_programs():
    assert len([path for path in (REPO / "scripts").iterdir() if path.is_file()]) <= 18


def test_pages_of_the_scripts_have_the_same_headings():
    headings = {
        tuple(re.findall(r"^## (.+)$", (REPO / "docs" / name).read_text(), re.MULTILINE))
        for name in ("ppo_sync.md", "ppo_vllm_async.md", "grpo_vllm_async.md")
    }
    assert headings == {("Usage", "Logged metrics", "Implementation details", "Results")}


def test_every_metric_of_a_run_is_explained(run_main):
    text = (REPO / "docs" / "ppo_sync.md").read_text()
    groups = ("time/", "perf/", "eval/", "mismatch/")
    names = {name for line in run_main("ppo_sync.py").metrics for name in line}
    named = {name for name in names if name.startswith(groups) or f"`{name}`" in text}
    assert names - named == set()


def refused_on_resume(text):
    """The arguments that a program compares with those of a checkpoint's run: MUST_AGREE.

    The reward model's training has them in its loop.
    """
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "MUST_AGREE":
            return set(ast.literal_eval(node.value))
        if isinstance(node, ast.For) and "saved_args" in ast.unparse(node.body):
            return set(ast.literal_eval(node.iter))
    raise ValueError("nothing is compared")


@pytest.mark.usefixtures("git")
def test_page_has_all_that_a_resumed_run_must_keep(tmp_path):
    rows = re.findall(r"^\| (.*) \| (.*) \|$", (REPO / "docs" / "checkpoints.md").read_text(), re.M)
    said = {who: set(re.findall(r"`(\w+)`", what)) for who, what in rows}
    scripts, of_ppo = said["all three"], said["both PPO scripts"]
    of_async, of_inflight = said["the asynchronous ones and their forks"], said["the fork inflight"]
    of_refill = said["the fork refill"]
    expected = {
        "ppo_sync.py": scripts | of_ppo,
        "ppo_vllm_async.py": scripts | of_ppo | of_async,
        "grpo_vllm_async.py": scripts | of_async,
        TRAINER: said["`train_reward_model.py`"],
        "multiturn": scripts | of_async,
        "inflight": scripts | of_async | of_inflight,
        "refill": scripts | of_async | of_inflight | of_refill,
    }
    for name, arguments in expected.items():
        path = REPO / name
        if not path.exists():  # a fork
            path = tmp_path / f"{name}.py"
            fork.write_fork(name, path)
        assert refused_on_resume(path.read_text()) == arguments, name


def printed_by(program):
    command = [sys.executable, f"scripts/{program}.py"]
    return subprocess.check_output(command, cwd=REPO, text=True)


def test_worked_example_is_what_the_command_prints():
    assert printed_by("dev/worked_example") in (REPO / "docs" / "ppo.md").read_text()


@pytest.mark.slow
def test_tables_of_what_fits_are_what_the_command_prints():
    """Those of scaling.md, and README's of the largest model."""
    tables = [line for line in printed_by("benchmark/fits").splitlines() if line.startswith("|")]
    pages = (REPO / "README.md").read_text() + (REPO / "docs" / "scaling.md").read_text()
    assert [line for line in tables if line not in pages] == []


def test_every_cell_of_readme_has_a_command_that_fits():
    text = (REPO / "docs" / "scaling.md").read_text()
    text = text.partition("### Commands for what fits")[2].partition("\n### ")[0]
    for name, value in re.findall(r'(\w+)="([^"]*)"', text):
        text = text.replace(f"${name}", value)
    cells = {}  # of a row: GRPO, PPO, the same with adapters
    for line in re.findall(r"^    (.*)$", text, re.MULTILINE):
        if heading := re.match(r"# (one|eight|two nodes) .*?of (?:(\d+) GB|eight)", line):
            row = heading[1], int(heading[2] or 80)
            cells[row] = [""] * 4
        if line.startswith("accelerate"):
            words = line.split()
            flags = dict(zip(words, [*words[1:], ""], strict=True))
            script = next(word for word in words if word.endswith("async.py"))[:-3]
            family, size = re.match(r"Qwen/(.*)-([\d.]+)B", flags["--model_name_or_path"]).groups()
            assert size in {"Qwen3": fits.QWEN3, "Qwen2.5": fits.QWEN2_5}[family], line
            file = flags["--config_file"].rpartition("/")[2]
            own = (6, 7) if "--vllm_gpus" in flags else ()
            learners = 1 if row[0] == "one" else 8 - len(own)
            rank = int(flags.get("--lora_rank", 0))
            nodes = 2 if row[0] == "two nodes" else 1
            run = fits.launch(script, size, row[1], file, nodes, learners, own, rank)
            if share := flags.get("--vllm_gpu_memory_utilization"):
                run.args.vllm_gpu_memory_utilization = float(share)
            run.args.vllm_tensor_parallel_size = int(flags.get("--vllm_tensor_parallel_size", 1))
            assert plan.fits(run, plan.SOME_RESPONSES), line
            cells[row][2 * (rank > 0) + script.startswith("ppo")] = size
    del cells["two nodes", 80]
    table = re.findall(
        r"^\| (eight of )?(\d+) GB \| (.*) \|$", (REPO / "README.md").read_text(), re.MULTILINE
    )
    assert cells == {
        ("eight" if are_several else "one", int(memory)): [cell.strip() for cell in row.split("|")]
        for are_several, memory, row in table
    }
