"""What starts a run is what was checked: launchers, Slurm's batch script; and paths with a ~."""

import os
import re
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import evaluate
import plot_runs
import pytest
import tyro
import yaml
from accelerate.commands.launch import launch_command_parser
from helpers import REPO, SCRIPTS
from helpers.files import write_text
from helpers.processes import end, environment, wait_until
from helpers.programs import call_main
from torch.distributed.run import get_args_parser

import ppo_vllm_async

# ---------------------------------------------------------------------------------- the launcher


def test_every_launch_names_its_file():
    """Also every question to the preflight. Else accelerate's default file is read."""
    paths = [*REPO.glob("*.md"), *(REPO / "docs").glob("*.md"), *map(REPO.joinpath, SCRIPTS)]
    for kind in ("py", "sh", "md", "yaml", "diff"):
        paths += (REPO / "scripts").rglob(f"*.{kind}")
    count = 0
    for path in paths:
        text = re.sub(r"\\\n[+-]?", " ", path.read_text())
        variable = "launch" if re.search(r"\blaunch=[(\"]--config_file ", text) else "none"
        for call in re.findall(r"(?:accelerate launch|scripts/preflight\.py) ([^`\n]+)", text):
            if ".py" in call or "$" in call:
                assert re.search(rf"--config_file |\$\{{?{variable}\b", call), f"{path}: {call}"
                count += 1
    assert count > 10


# ------------------------------------------------------------------------------------------- Slurm

SBATCH = REPO / "scripts" / "train" / "slurm.sbatch"
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
