"""Shows that scripts/train/slurm.sbatch saves, requeues and resumes, on a Slurm of its own.

    apt-get install slurm-wlm munge
    python scripts/dev/try_slurm.py                # as root, some minutes, without a GPU
    python scripts/dev/try_slurm.py --nodes 2      # two nodes, by DDP; both are this machine

Two jobs train on the debug task. One is left in peace. The other one comes to its time limit, is
killed, and is cancelled; each time it goes on, as a user would have it. None of its processes may
be left then. At the end its files must be those of the job in peace, but for what a clock says.
"""

import argparse
import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
CONFIG = """\
ClusterName=try
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
# Not cgroups, which a container may not have: processes that leave their group are not Slurm's
ProctrackType=proctrack/pgid
SelectType=select/cons_tres
SlurmdParameters=config_overrides
MinJobAge=86400
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 RealMemory=1000
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 RealMemory=1000
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=1-0
"""
REWARD = """import time
def score(response, ground_truth, **_):
    time.sleep(0.06)  # so that a run lasts until its time limit
    return float(response == ground_truth)
"""


def wait_until(condition, seconds, what):
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {seconds} s: {what}")
        time.sleep(0.1)


def ask(*command):
    """What a command prints."""
    return subprocess.run(command, cwd=REPO, capture_output=True, encoding="utf-8").stdout.strip()


@contextlib.contextmanager
def cluster(folder):
    """A Slurm with the nodes n1 and n2, both this machine."""
    ports = [20000 + 3 * (os.getpid() % 3000) + i for i in range(3)]
    text = CONFIG.format(host=os.uname().nodename, ports=ports, folder=folder)
    (folder / "slurm.conf").write_text(text, "utf-8")
    (folder / "state").mkdir()
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o400)
    munge = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "seed", "log")]
    munge += ["--foreground", "--force", f"--socket={folder}/munge.socket"]
    nodes = [["slurmd", "-D", "-N", name] for name in ("n1", "n2")]
    with open(folder / "daemons.log", "w", encoding="utf-8") as log:
        daemons = []
        for command in [["munged", *munge], ["slurmctld", "-D"], *nodes]:
            daemons.append(subprocess.Popen(command, stdout=log, stderr=log))
            wait_until((folder / "munge.socket").exists, 20, "munged")
        try:
            wait_until(lambda: ask("sinfo", "-h", "-t", "idle", "-o", "%D") == "2", 60, "Slurm")
            yield
        finally:
            ask("scancel", "--user", "root")
            time.sleep(5)
            for daemon in daemons[::-1]:
                daemon.terminate()
                daemon.wait()


class Job:
    """A run of the debug task."""

    def __init__(self, folder, name, nodes):
        self.run_dir, self.log = folder / "output" / name, folder / f"{name}.log"
        self.log.touch()
        size = 32 // nodes  # of a rank
        self.command = f"""env TRY={self.log} OUTPUT_DIR={self.run_dir.parent} OMP_NUM_THREADS=1
            CONFIG=scripts/accelerate/ddp.yaml sbatch --parsable --nodes {nodes} --job-name {name}
            --output {self.log} --time 60 --gpus-per-node 0 --mem 1000 scripts/train/slurm.sbatch
            --dataset debug_assets/train.parquet --eval_dataset debug_assets/test.parquet
            --model_name_or_path debug_assets/model --dtype float32 --response_length 8
            --reward_fn {folder}/reward.py:score --reward_workers {2 // nodes} --num_evals 2
            --local_rollout_batch_size {2 * size} --local_mini_batch_size {size} --save_freq 3
            --per_device_train_batch_size {size} --total_episodes 1536""".split()

    def submit(self):
        self.id = ask(*self.command)

    def said(self):
        return self.log.read_text("utf-8")

    def wait_for(self, state):
        now = ["squeue", "-h", "-t", "all", "-j", self.id, "-o", "%T"]
        wait_until(lambda: ask(*now) == state, 900, f"{self.log} is {state}")

    def files(self):
        """What it leaves, but for what a clock says."""
        names = ("metrics", "samples", "rollouts")
        texts = [(self.run_dir / f"{name}.jsonl").read_text("utf-8") for name in names]
        return [re.sub(r'"(time|perf|queue)/[^,}]*,? ?', "", text) for text in texts]


def disturb(job, fault, state):
    """Has it end early, and go on; state: what Slurm calls it when it has ended."""
    begun = len(job.said())
    wait_until(lambda: job.said().count("\nstep ", begun) >= 4, 600, "four steps")
    if fault == "limit":  # in one minute or two: Slurm sends its signal at once
        minutes = int(ask("squeue", "-h", "-j", job.id, "-o", "%M").split(":")[-2])
        ask("scontrol", "update", f"JobId={job.id}", f"TimeLimit={minutes + 2}")
    else:
        ask("scancel", *(["--signal=KILL", f"{job.id}.0"] if fault == "kill" else [job.id]))
    job.wait_for(state)
    left = ["sh", "-c", f"grep -lsF TRY={job.log} /proc/[0-9]*/environ"]  # whoever started it
    wait_until(lambda: not ask(*left), 10, f"no process is left by {fault}")
    time.sleep(2)  # what ended and begins in one second is revoked: "Job credential revoked"
    if fault == "limit":  # it is requeued; Slurm would let it wait for two minutes
        ask("scontrol", "update", f"JobId={job.id}", "StartTime=now", "TimeLimit=60")
    else:
        job.submit()
    wait_until(lambda: "Resumed after" in job.said()[begun:], 300, "it goes on")
    print(f"{fault}: {state}, {re.findall('Resumed after.*', job.said())[-1]}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nodes", type=int, default=1, choices=(1, 2))
    nodes = parser.parse_args().nodes
    if os.getuid() != 0 or not all(map(shutil.which, ("munged", "slurmctld", "slurmd"))):
        sys.exit("this needs root and Slurm: apt-get install slurm-wlm munge")
    subprocess.run([sys.executable, "scripts/dev/make_debug_assets.py"], cwd=REPO, check=True)
    folder = Path(tempfile.mkdtemp(prefix="try_slurm_"))  # kept, with all logs, if anything fails
    (folder / "reward.py").write_text(REWARD, "utf-8")
    os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
    with cluster(folder):
        peace, job = Job(folder, "peace", nodes), Job(folder, "disturbed", nodes)
        peace.submit()
        peace.wait_for("COMPLETED")
        print(f"in peace: {peace.files()[0].count(chr(10))} steps", flush=True)
        job.submit()
        for fault in {"limit": "PENDING", "kill": "FAILED", "cancel": "CANCELLED"}.items():
            disturb(job, *fault)
        job.wait_for("COMPLETED")
    if job.files() != peace.files():
        sys.exit(f"it is not the run in peace: {folder}")
    shutil.rmtree(folder)
    print("equal to the run in peace; nothing was left")


if __name__ == "__main__":
    main()
