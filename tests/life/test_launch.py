"""What starts a run is what was checked: launchers, Slurm's batch script; and paths with a ~."""

import dataclasses
import os
import re
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import evaluate
import launch
import plot_runs
import psutil
import pytest
import tyro
import yaml
from accelerate.commands.launch import launch_command_parser
from helpers import REPO, SCRIPTS
from helpers.files import write_text
from helpers.processes import CPU, end, environment, wait_until
from helpers.programs import call_main
from torch.distributed.run import get_args_parser

import ppo_vllm_async

TRAIN = REPO / "scripts" / "train"

# ---------------------------------------------------------------------------------- the launcher


LAUNCHERS = r"accelerate launch|scripts/preflight\.py|scripts/train/launch\.py .* --"


def test_every_launch_names_its_file():
    """Also every question to the preflight. Else accelerate's default file is read."""
    paths = [*REPO.glob("*.md"), *(REPO / "docs").glob("*.md"), *map(REPO.joinpath, SCRIPTS)]
    for kind in ("py", "sh", "md", "yaml", "diff"):
        paths += (REPO / "scripts").rglob(f"*.{kind}")
    count = 0
    for path in paths:
        text = re.sub(r"\\\n[+-]?", " ", path.read_text())
        variable = "launch" if re.search(r"\blaunch=[(\"]--config_file ", text) else "none"
        for call in re.findall(rf"(?:{LAUNCHERS}) ([^`\n]+)", text):
            if ".py" in call or "$" in call:
                assert re.search(rf"--config_file |\$\{{?{variable}\b", call), f"{path}: {call}"
                count += 1
    assert count > 10


def test_script_without_a_launcher_outlives_its_shell(monkeypatch):
    """As with nohup. That it dies with each launcher, test_ends.py shows."""
    monkeypatch.setattr(os, "environ", dict(CPU))
    monkeypatch.setattr(ppo_vllm_async.ctypes, "CDLL", lambda _: pytest.fail("it would die"))
    ppo_vllm_async.die_with_launcher()


# --------------------------------------------------------------------------------- a recipe's end

# A launcher with a rank, which saves step 20, unless it is to fail at once
LAUNCHER = f"""#!{sys.executable}
import json, os, subprocess, sys, time
words = sys.argv[1:]
if "--fail" in words and "--seed" not in words:
    sys.exit(3)
os.makedirs("output/a run/checkpoints/step_3")
os.makedirs("output/a run/checkpoints/step_20")
os.makedirs("output/a run/checkpoints/unfinished")
json.dump({{"run_name": "a run", "save_freq": 1}}, open("output/a run/args.json", "w"))
open(os.environ["TANDEM_LAUNCHED"], "w").write("output/a run")
if "--fail" in words:
    sys.exit(3)
rank = subprocess.Popen(["sleep", "1000"])
open("started", "w").write(f"{{os.getpid()}} {{rank.pid}}")
time.sleep(1000)
"""
SAVED = "Step 20 is saved. To resume: GPUS=2 bash r.sh"
RESUME = "--run_name 'a run' --resume_from_checkpoint latest"
# (what is typed besides, what ends it, the exit status, the last line)
RECIPE_ENDS = [
    ("--seed 2", "group SIGINT", -signal.SIGINT, f"{SAVED} --seed 2 {RESUME}"),
    ("", "SIGTERM", 128 + signal.SIGTERM, f"{SAVED} {RESUME}"),
    ("", "SIGKILL", -signal.SIGKILL, ""),
    ("--fail", "", 3, ""),  # it has said itself what is wrong
    ("--fail --seed 2", "", 3, f"{SAVED} --fail --seed 2 {RESUME}"),
]


@pytest.mark.parametrize(("typed", "ending", "status", "last"), RECIPE_ENDS)
def test_last_line_of_a_recipe_says_how_to_resume_and_nothing_is_left(
    typed, ending, status, last, tmp_path
):
    write_text(tmp_path / ".venv/bin/accelerate", LAUNCHER).chmod(0o755)
    program = f"{sys.executable} {TRAIN / 'launch.py'}"
    write_text(tmp_path / "r.sh", f'exec {program} "$0" "$@" -- --num_processes 1 a.py "$@"')
    command, env = ["bash", "r.sh", *typed.split()], environment({"GPUS": "2"})
    with open(tmp_path / "log", "w") as log:
        streams = {"stdout": log, "stderr": log, "process_group": 0}
        process = subprocess.Popen(command, cwd=tmp_path, env=env, **streams)
    pids = []
    if ending:
        wait_until((tmp_path / "started").exists, "it has started")
        pids = [*map(int, wait_until((tmp_path / "started").read_text, "pids").split())]
        send = os.killpg if "group" in ending else os.kill
        send(process.pid, signal.Signals[ending.split()[-1]])
    assert process.wait(60) == status
    assert "".join((tmp_path / "log").read_text().splitlines()[-1:]) == last
    if ending == "SIGKILL":  # a rank sees to it itself (test_ends.py)
        os.kill(pids.pop(), signal.SIGKILL)
    wait_until(lambda: not any(map(psutil.pid_exists, pids)), "all end")


TYPED = [
    "",
    "--seed 3 --run_name old",
    "--run-name=old --resume-from-checkpoint=latest --seed 3",
    "--resume_from_checkpoint output/old/checkpoints/step_5 --exp_name x=--run_name",
]


@pytest.mark.parametrize("typed", TYPED)
def test_resuming_command_is_what_was_typed_and_resumes(typed):
    """Also when it is stopped and resumed again, which adds nothing."""
    words = launch.resuming(typed.split(), "a run")
    assert launch.resuming(words, "a run") == words
    need = ["--dataset", "x", "--model_name_or_path", "x"]

    def parse(words):
        return tyro.cli(ppo_vllm_async.Args, args=[*need, *words], use_underscores=True)

    args = parse(words)
    assert (args.run_name, args.resume_from_checkpoint) == ("a run", "latest")
    own = {"run_name": "a run", "resume_from_checkpoint": "latest"}
    assert args == dataclasses.replace(parse(typed.split()), **own)


# ------------------------------------------------------------------------------------------- Slurm

SBATCH = TRAIN / "slurm.sbatch"
# What a job finds: Slurm's programs, launchers, and a script
STUBS = {
    "bin/srun": 'while [ "${1#--}" != "$1" ]; do shift; done; SLURM_NODEID=1 exec "$@"',
    "bin/scontrol": 'echo "$*" >> calls; touch ended',
    ".venv/bin/launcher": 'echo "$0 $*" > launched; while [ "${1%.py}" = "$1" ]; do shift; done;'
    f'{sys.executable} "$@"',
}
# It saves a checkpoint, or never; and runs until it is ended
RANK = """import os, sys, time
if "--save" in sys.argv:
    os.makedirs(f"output/{sys.argv[2]}/checkpoints/step_9")
open("started", "w").close()
while "--run" in sys.argv and not os.path.exists("ended"):
    time.sleep(0.01)
sys.exit(3 * ("--fail" in sys.argv))
"""


@pytest.fixture
def job(tmp_path):
    """job(*flags, **variables): the batch script as a job, in a folder without Slurm."""
    for name, text in STUBS.items():
        write_text(tmp_path / name, f"#!/bin/bash\n{text}\n").chmod(0o755)
    for name in ("accelerate", "torchrun"):
        (tmp_path / ".venv" / "bin" / name).symlink_to("launcher")
    write_text(tmp_path / "ppo_vllm_async.py", RANK)
    variables = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "1", "SLURM_JOB_NODELIST": "n[1-2]"}
    variables |= {"SLURM_JOB_NAME": f"job_{uuid.uuid4().hex}"}
    variables["PATH"] = f"{tmp_path}/bin:{os.environ['PATH']}"
    started = []

    def start(*flags, **more):
        log = open(tmp_path / "log", "w")  # noqa: SIM115
        command, env = ["bash", SBATCH, *flags], environment(variables | more)
        started.append(subprocess.Popen(command, cwd=tmp_path, env=env, stdout=log))
        return started[-1]

    yield start
    (tmp_path / "ended").touch()  # for ranks that have lost their parent
    for process in started:
        end(process)


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("launcher", ["accelerate", "torchrun"])
def test_job_launches_on_each_node_what_launcher_and_script_know(nodes, launcher, job, tmp_path):
    gpus = {"SLURM_NNODES": str(nodes), "SLURM_GPUS_ON_NODE": "8", "LAUNCHER": launcher}
    assert job("--seed", "2", **gpus).wait(120) == 0
    program, *words = (tmp_path / "launched").read_text().split()
    assert Path(program).name == launcher
    if launcher == "accelerate":
        options = launch_command_parser().parse_args(words[1:])
        assert (options.num_machines, options.num_processes) == (nodes, 8 * nodes)
        rank, host = options.machine_rank, options.main_process_ip
        is_fsdp = yaml.safe_load((REPO / options.config_file).read_text())["distributed_type"]
        assert (is_fsdp == "FSDP") == (nodes == 2)
    else:
        options = get_args_parser().parse_args(words)
        assert (options.nnodes, options.nproc_per_node) == (str(nodes), "8")
        rank, host = options.node_rank, options.master_addr
    assert (int(rank), host) == (1, os.uname().nodename)
    args = tyro.cli(ppo_vllm_async.Args, args=options.training_script_args, use_underscores=True)
    assert (args.seed, args.resume_from_checkpoint) == (2, "latest")
    assert args.save_freq > 0 and args.run_name.startswith("job_")


@pytest.mark.parametrize("saves", [True, False])
def test_job_at_its_time_limit_requeues_itself_if_it_has_come_further(saves, job, tmp_path):
    """Else it would begin at the same step for ever."""
    process = job("--run", "--save" if saves else "")
    wait_until((tmp_path / "started").exists, "the script has started")
    process.send_signal(signal.SIGUSR1)
    if not saves:
        wait_until(lambda: "not requeued" in (tmp_path / "log").read_text(), "it says so")
        (tmp_path / "ended").touch()
    assert process.wait(120) == 0
    calls = tmp_path / "calls"
    assert (calls.read_text() if calls.exists() else "") == ("requeue 7\n" if saves else "")


@pytest.mark.parametrize("sizes", ['"num_training_steps": 2, "num_updates": 8', '"num_updates": 2'])
def test_job_of_a_finished_run_starts_nothing(sizes, job, tmp_path):
    run_dir = tmp_path / "output/mine"
    write_text(run_dir / "args.json", f"{{{sizes}}}")
    for steps in (1, 2):
        write_text(run_dir / "metrics.jsonl", "{}\n" * steps)
        assert job(SLURM_JOB_NAME="mine").wait(120) == 0
        assert ("is finished" in (tmp_path / "log").read_text()) == (steps == 2)
        assert (tmp_path / "started").exists() == (steps == 1)
        (tmp_path / "started").unlink(missing_ok=True)


def test_job_ends_with_the_status_of_its_script(job):
    assert job("--fail").wait(120) == 3


# -------------------------------------------------------------------------------------------- home


def test_home_is_expanded_where_no_shell_does_it(tmp_path, monkeypatch):
    """Such as in --output=~/x, or in a quoted variable."""
    for name in ("args.json", "metrics.jsonl"):
        write_text(tmp_path / "run" / name, '{"training_step": 1, "episode": 8}\n')
    write_text(tmp_path / "there.png", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    answers = call_main(plot_runs, "~/run", "--output=~/there.png")
    assert f"{tmp_path}/there.png exists" in "".join(map(str, answers))
    answers = call_main(evaluate, "~/run", "--model=~/no")
    assert f"{tmp_path}/no: no such folder" in "".join(map(str, answers))
