"""Tries scripts/train/slurm.sbatch on a Slurm of its own: faults, a time limit, a cancel.

    apt-get install slurm-wlm munge
    python scripts/dev/try_slurm.py                                          # as root, minutes
    python scripts/dev/try_slurm.py --nodes 2 --launcher torchrun --seed 7

munged, slurmctld and two slurmd run on this machine, in a folder that is removed. Two jobs train on
the debug task, without a GPU. One is left in peace. The other one comes to its time limit, is
killed three times (its step, by Slurm; one of its processes; all, by a requeue) and cancelled once,
at random steps. Each time it is begun again as a user would. After each nothing may be left: no
process that has the job's environment, no file of theirs in /dev/shm. At the end metrics.jsonl (but
for what a clock says), samples.jsonl and rollouts.jsonl must be those of the job in peace, byte by
byte; and a job that is submitted once more finds the run finished. The exit status is 1 if not.

Further flags go to the script.
"""

import argparse
import contextlib
import json
import math
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from datetime import datetime
from pathlib import Path

import psutil

REPO = Path(__file__).resolve().parent.parent.parent
OF_A_CLOCK = ("time/", "perf/", "queue/")
CONFIG = """\
ClusterName=try
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
# Not cgroups, which a container may not have: processes that leave their group are not Slurm's
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SlurmdParameters=config_overrides
ReturnToService=2
MinJobAge=86400
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 RealMemory=1000
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 RealMemory=1000
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=1-0
"""
# So a run lasts long enough for a time limit
REWARD = """import time

def score(response, ground_truth, **_):
    time.sleep(0.06)
    return float(response == ground_truth)
"""
# A script whose ranks share their weights by gloo
FSDP2 = """import runpy
import sys

if __name__ == "__main__":
    sys.path[:0] = ["{repo}", "{repo}/tests"]
    from helpers import fsdp2

    fsdp2.allow_on_cpu()
    runpy.run_path("{repo}/{script}", run_name="__main__")
"""


class Cluster:
    """A Slurm with the nodes n1 and n2, both this machine."""

    def __init__(self, folder):
        self.folder, self.daemons = folder, []
        with contextlib.ExitStack() as stack:
            sockets = [stack.enter_context(socket.socket()) for _ in range(3)]
            for each in sockets:
                each.bind(("127.0.0.1", 0))
            ports = [each.getsockname()[1] for each in sockets]
        host = os.uname().nodename
        (folder / "slurm.conf").write_text(
            CONFIG.format(host=host, ports=ports, folder=folder), "utf-8"
        )
        for name in ("state", "n1", "n2"):
            (folder / name).mkdir()
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o400)
        self.environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}

    def __enter__(self):
        files = [f"--{name}-file={self.folder}/munge.{name}" for name in ("key", "pid", "seed")]
        files += [f"--log-file={self.folder}/munge.log", f"--socket={self.folder}/munge.socket"]
        self.start("munged", "--foreground", "--force", *files)
        wait_until((self.folder / "munge.socket").exists, 20, "munged")
        self.start("slurmctld", "-D")
        self.start("slurmd", "-D", "-N", "n1")
        self.start("slurmd", "-D", "-N", "n2")
        wait_until(lambda: self.ask("sinfo", "-h", "-t", "idle", "-o", "%D") == "2", 60, "Slurm")
        return self

    def start(self, *command):
        with open(self.folder / "daemons.log", "a", encoding="utf-8") as output:
            self.daemons.append(
                subprocess.Popen(command, env=self.environment, stdout=output, stderr=output)
            )

    def __exit__(self, *_):
        self.ask("scancel", "--user", "root")
        wait_until(lambda: not self.ask("squeue", "-h"), 60, "the end of all jobs")
        for daemon in self.daemons[::-1]:
            daemon.terminate()
            daemon.wait()

    def ask(self, *command):
        """What one of Slurm's commands prints, or nothing if it fails."""
        ran = subprocess.run(command, env=self.environment, capture_output=True, encoding="utf-8")
        return ran.stdout.strip()

    def state(self, job):
        """Such as RUNNING; a job that is still being ended is COMPLETING."""
        return self.ask("squeue", "-h", "-t", "all", "-j", job, "-o", "%T")


def wait_until(condition, seconds, what):
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {seconds} s: {what}")
        time.sleep(0.05)
    return result


class Job:
    """A run of the debug task, submitted to a cluster."""

    def __init__(self, cluster, name, args, flags):
        self.cluster, self.name = cluster, name
        self.mark = uuid.uuid4().hex
        self.begun = 0  # characters of the log, when it was begun again last
        self.run_dir = cluster.folder / "output" / name
        self.log = cluster.folder / f"{name}.log"
        ranks = args.nodes
        options = {
            "dataset": "debug_assets/train.parquet",
            "eval_dataset": "debug_assets/test.parquet",
            "model_name_or_path": "debug_assets/model",
            "dtype": "float32",
            "response_length": 8,
            "total_episodes": args.steps * 64,
            "local_rollout_batch_size": 16 // ranks,
            "number_samples_per_prompt": 4,
            "local_mini_batch_size": 32 // ranks,
            "per_device_train_batch_size": 32 // ranks,
            "learning_rate": 1e-4,
            "num_evals": 2,
            "save_freq": 3,
            "reward_fn": f"{cluster.folder}/reward.py:score",
            "reward_workers": 2 // ranks,
        }
        self.flags = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        self.flags += flags
        self.options = ["--nodes", str(args.nodes), "--job-name", name, "--output", self.log]
        self.options += ["--time", "60", "--gpus-per-node", "0", "--mem", "1000"]
        self.variables = {"SCRIPT": args.script, "LAUNCHER": args.launcher, "TRY": self.mark}
        if args.ddp:
            self.variables["CONFIG"] = "scripts/accelerate/ddp.yaml"
        elif args.nodes > 1 and args.launcher == "accelerate":
            path = cluster.folder / "fsdp2.py"
            path.write_text(FSDP2.format(repo=REPO, script=args.script), "utf-8")
            self.variables["SCRIPT"] = str(path)
        self.variables |= {"OUTPUT_DIR": str(self.run_dir.parent), "OMP_NUM_THREADS": "1"}

    def submit(self):
        command = ["sbatch", "--parsable", *self.options, "scripts/train/slurm.sbatch"]
        environment = self.cluster.environment | self.variables
        ran = subprocess.run(
            [*command, *self.flags],
            cwd=REPO,
            env=environment,
            capture_output=True,
            encoding="utf-8",
        )
        if ran.returncode != 0:
            raise RuntimeError(ran.stderr)
        self.id = ran.stdout.strip()

    def steps(self):
        path = self.run_dir / "metrics.jsonl"
        return path.read_text("utf-8").count("\n") if path.exists() else 0

    def processes(self):
        """All that have its environment, whoever started them."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("TRY") == self.mark:
                    found.append(process)
        return found

    def vital_processes(self):
        """Those that the job cannot do without, with their commands: shells, srun, ranks, vLLM."""
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                command = " ".join(process.cmdline())
                if re.search(f"slurm_script|spawn_main|{self.variables['SCRIPT']}", command):
                    found.append((process, command))
        return found

    def shared_memory(self):
        """Files and folders in /dev/shm that its processes use."""
        paths = set()
        for process in self.processes():
            with contextlib.suppress(psutil.Error, FileNotFoundError):
                maps = Path(f"/proc/{process.pid}/maps").read_text("utf-8").splitlines()
                used = [line.split(maxsplit=5)[-1] for line in maps]
                used += [process.cwd(), *(file.path for file in process.open_files())]
                paths |= {path for path in used if path.startswith("/dev/shm/")}
        return [path for path in paths if os.path.exists(path)]

    def wait_for_state(self, states, seconds):
        def state():
            now = self.cluster.state(self.id)
            if now == "FAILED" and now not in states:
                raise RuntimeError(f"{self.name} has failed: {self.log}")
            return now if now in states else None

        return wait_until(state, seconds, f"{self.name} is {' or '.join(states)}")

    def wait_for_steps(self, steps):
        """Waits until it has done some steps since it was begun again last."""

        def are_done():
            now = self.cluster.state(self.id)
            if now not in ("RUNNING", "PENDING", "COMPLETING"):
                raise RuntimeError(f"{self.name} is {now}: {self.log}")
            lines = self.log.read_text("utf-8")[self.begun :] if self.log.exists() else ""
            return now == "RUNNING" and len(re.findall("^step ", lines, re.MULTILINE)) >= steps

        wait_until(are_done, 1200, f"{steps} steps of {self.name}")


def disturb(job, fault, choice):
    """Has a fault happen to a job that runs, and begins it again; returns what it did."""
    cluster, did = job.cluster, fault
    if fault == "limit":  # to be reached in one minute or two: Slurm sends its signal at once
        started = datetime.fromisoformat(cluster.ask("squeue", "-h", "-j", job.id, "-o", "%S"))
        minutes = math.ceil((datetime.now() - started).total_seconds() / 60) + 1
        cluster.ask("scontrol", "update", f"JobId={job.id}", f"TimeLimit={minutes}")
    elif fault == "step":
        cluster.ask("scancel", "--signal=KILL", f"{job.id}.0")
    elif fault == "requeue":
        cluster.ask("scontrol", "requeue", job.id)
    elif fault == "cancel":
        cluster.ask("scancel", job.id)
    elif fault == "process":
        process, command = choice.choice(job.vital_processes())
        did += f" ({command[:50]}...)"
        process.send_signal(signal.SIGKILL)
    state = job.wait_for_state(("PENDING", "FAILED", "CANCELLED", "NODE_FAIL"), 150)
    return f"{did}: {state}"


def what_is_left(job, used):
    """Processes of a job that has ended, and those of the paths `used` that exist; after 10 s."""

    def left():
        processes = [f"{each.pid} {each.name()}" for each in job.processes()]
        return processes + [path for path in used if os.path.exists(path)]

    with contextlib.suppress(TimeoutError):
        wait_until(lambda: not left(), 10, "nothing is left")
    return left()


def begin_again(job):
    """As a user would; without the two minutes that Slurm lets a requeued job wait."""
    time.sleep(2)  # what ended and begins in one second is revoked: "Job credential revoked"
    job.begun = len(job.log.read_text("utf-8"))
    state = job.cluster.state(job.id)
    if state == "CANCELLED":
        job.submit()
        return
    if state != "PENDING":
        job.cluster.ask("scontrol", "requeue", job.id)
        job.wait_for_state(("PENDING", "RUNNING"), 60)
    job.cluster.ask("scontrol", "update", f"JobId={job.id}", "StartTime=now", "TimeLimit=60")


def files_of(run_dir):
    """What a run leaves and another one must leave too, by name."""
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text("utf-8").splitlines())
    metrics = [
        {name: line[name] for name in line if not name.startswith(OF_A_CLOCK)} for line in lines
    ]
    files = {"metrics.jsonl": metrics}
    for name in ("samples.jsonl", "rollouts.jsonl"):
        files[name] = (run_dir / name).read_bytes()
    return files


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=1, choices=(1, 2))
    parser.add_argument("--script", default="ppo_vllm_async.py")
    parser.add_argument("--launcher", default="accelerate", choices=("accelerate", "torchrun"))
    parser.add_argument("--ddp", action="store_true", help="on two nodes, in place of FSDP2")
    parser.add_argument("--steps", type=int, default=24, help="of a run")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", action="store_true", help="the folder, with all logs")
    args, flags = parser.parse_known_args()
    missing = [name for name in ("munged", "slurmctld", "slurmd") if not shutil.which(name)]
    if missing or os.getuid() != 0:
        sys.exit(f"this needs root and Slurm (apt-get install slurm-wlm munge); missing: {missing}")
    subprocess.run([sys.executable, "scripts/dev/make_debug_assets.py"], cwd=REPO, check=True)
    choice = random.Random(args.seed)
    folder = Path(tempfile.mkdtemp(prefix="try_slurm_"))
    (folder / "reward.py").write_text(REWARD, "utf-8")
    problems = []
    try:
        with Cluster(folder) as cluster:
            peace = Job(cluster, "peace", args, flags)
            peace.submit()
            peace.wait_for_state(("COMPLETED",), 1800)
            print(f"in peace: {peace.steps()} steps", flush=True)

            job = Job(cluster, "disturbed", args, flags)
            job.submit()
            kills = ["step", "requeue", "process", "cancel"]
            choice.shuffle(kills)
            # The first has to last until the limit; a later one is at its start, or in a step
            for fault in ("limit", *kills):
                job.wait_for_steps(3 if fault == "limit" else choice.randrange(5))
                time.sleep(choice.uniform(0, 3))
                used = job.shared_memory()
                done = disturb(job, fault, choice)
                if left := what_is_left(job, used):
                    problems.append(f"left by {fault}: {left}")
                print(f"in step {job.steps() + 1}: {done}; left: {left or 'nothing'}", flush=True)
                begin_again(job)
            job.wait_for_state(("COMPLETED",), 1800)
            whole, files = files_of(peace.run_dir), files_of(job.run_dir)
            problems += [f"{name} differs" for name in whole if whole[name] != files[name]]
            job.submit()
            job.wait_for_state(("COMPLETED",), 600)
            if not job.log.read_text("utf-8").rstrip().endswith("is finished"):
                problems.append("submitted once more, it does not say that it is finished")
            print(
                "\n".join(re.findall("^Resumed after.*", job.log.read_text("utf-8"), re.MULTILINE))
            )
    finally:
        if args.keep or sys.exc_info()[0]:
            print(f"kept: {folder}")
        else:
            shutil.rmtree(folder)
    print("\n".join(problems) or "equal to the run in peace; nothing was left")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
