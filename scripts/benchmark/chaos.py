"""Ends real runs at random moments, looks what they leave, resumes them, and compares what comes of
them with a run in peace.

    python scripts/benchmark/chaos.py                      # 20 runs: about 20 minutes
    python scripts/benchmark/chaos.py --runs 3 --seed 7
    python scripts/benchmark/chaos.py --scripts ppo_sync.py --launchers torchrun --endings SIGINT

A run is 8 short steps of the debug task on the CPU: real vLLM, a reward worker for each rank, a
checkpoint after every step, evaluations. Script, launcher and ending are drawn:

    SIGINT              to the launcher's process group, as by Ctrl-C
    launcher SIGTERM    to the launcher alone, and so on
    script SIGTERM      to the script, on two ranks to one of them
    engine SIGKILL      to vLLM's process, on two ranks to one of them

Launchers: accelerate with one_gpu.yaml (one rank), torchrun, and accelerate with ddp.yaml (two
ranks each). Every second run is ended while it saves a checkpoint, the others at any time from the
launcher's start on. Where a run ends before its ending comes, it is "over".

The launcher must end within 60 seconds. Ten seconds later nothing may be left: processes, by a
mark in their environment; files of the run's TMPDIR, but for torch's logs and its cache; what
its processes were seen to use in /dev/shm, such as semaphores and vLLM's folder; the lock of the
run's folder. No step may be lost but the last, whose checkpoint may not have been written yet. Then
the run is begun again with `--resume_from_checkpoint auto`. It must resume the newest checkpoint
and leave what the run in peace has left, byte by byte: metrics.jsonl (but for what a clock says),
samples.jsonl, rollouts.jsonl and the model.

A run is a line of the table. The exit status is 1 if there is a problem. Linux only.
"""

import argparse
import contextlib
import fcntl
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import psutil
from run import REPO, debug_command, flags_of, make_debug_assets, read_lines

COMMANDS = {"ppo_sync.py": "ppo_sync", "ppo_vllm_async.py": "ppo", "grpo_vllm_async.py": "grpo"}
ACCELERATE = ("-m", "accelerate.commands.launch", "--quiet", "--config_file")
LAUNCHERS = {  # and how many ranks they start
    "accelerate": ((*ACCELERATE, "scripts/accelerate/one_gpu.yaml"), 1),
    "torchrun": (("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"), 2),
    "ddp": ((*ACCELERATE, "scripts/accelerate/ddp.yaml", "--num_processes", "2"), 2),
}
ENDINGS = ("SIGINT", "launcher SIGTERM", "launcher SIGKILL", "launcher SIGHUP", "script SIGTERM")
ENDINGS += ("script SIGKILL", "engine SIGKILL")
STEPS, EPISODES = 8, 16  # of a run, and of a step on each rank
EXIT_LIMIT, GONE_LIMIT = 60, 10  # seconds
# What torch keeps in TMPDIR: its launcher's logs, and its cache of compiled code
OTHERS = ("torchelastic_", "torchinductor_")
OF_A_CLOCK = ("time/", "perf/")
REWARD = """
def score(data_source, response, ground_truth, extra_info):
    return float(response == ground_truth)
"""


class Run:
    """A launcher that was started, with the mark of all that it starts."""

    def __init__(self, script, launcher, folder, *flags):
        self.script, self.run_dir, self.temporary = script, folder / "run", folder / "tmp"
        self.output, self.mark, self.inodes = folder / "output.txt", uuid.uuid4().hex, set()
        self.looked_at = 0.0
        self.temporary.mkdir(parents=True, exist_ok=True)
        (folder / "reward.py").write_text(REWARD, "utf-8")
        words, ranks = LAUNCHERS[launcher]
        _, *debug_flags = debug_command(COMMANDS[script])
        options = {
            "output_dir": folder,
            "run_name": "run",
            "total_episodes": STEPS * EPISODES * ranks,
            "local_rollout_batch_size": 2 if script.startswith("grpo") else EPISODES,
            "local_mini_batch_size": EPISODES,
            "per_device_train_batch_size": EPISODES,
            "warm_up_steps": 0,
            "num_evals": 4,
            "num_eval_prompts": 8,
            "save_freq": 1,
            "keep_last_n": 0,  # so that what is unfinished is being written, and not removed
            "reward_fn": f"{folder / 'reward.py'}:score",
            "reward_workers": 1,
        }
        environment = {"CHAOS_MARK": self.mark, "TMPDIR": str(self.temporary)}
        with open(self.output, "a", encoding="utf-8") as output:
            self.launcher = subprocess.Popen(
                [sys.executable, *words, script, *debug_flags, *flags_of(options), *flags],
                cwd=REPO,
                env=os.environ | environment | {"ACCELERATE_USE_CPU": "true"},
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=heed_signals,
            )

    @property
    def steps(self):
        """How many steps are written."""
        path = self.run_dir / "metrics.jsonl"
        return path.read_text("utf-8").count("\n") if path.exists() else 0

    @property
    def newest(self):
        """The step of the newest checkpoint that is whole, or 0."""
        paths = self.run_dir.glob("checkpoints/step_?")
        return max((int(path.name[-1]) for path in paths), default=0)

    def is_saving(self):
        return any(self.run_dir.glob("checkpoints/*unfinished"))

    def wait(self, seconds, until=lambda: False):
        """Waits for the launcher's end or until() for so long; whether the launcher has ended."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.launcher.poll() is None and not until():
            if time.monotonic() > self.looked_at + 0.3:
                self.processes()
                self.looked_at = time.monotonic()
            time.sleep(0.002)
        return self.launcher.poll() is not None

    def target(self, name, rank):
        """The process that a signal is for, or None if it is not there."""
        process = psutil.Process(self.launcher.pid)
        words = {"launcher": [], "script": [self.script]}
        for word in words.get(name, [self.script, "multiprocessing.spawn"]):
            children = process.children()
            # Before it is replaced, a new process has its parent's command
            children = [each for each in children if each.cmdline() != process.cmdline()]
            children = [each for each in children if word in " ".join(each.cmdline())]
            process = next((e for e in children if int(e.environ().get("RANK", 0)) == rank), None)
            if process is None:
                return None
        return process

    def end(self, ending, rank):
        """Ends the run by a signal; whether it was over before."""
        name, number = ending.split()[0], signal.Signals[ending.split()[-1]]
        while not self.wait(0.01):
            with contextlib.suppress(psutil.Error):
                if name == "SIGINT":
                    os.killpg(self.launcher.pid, number)
                    return False
                if process := self.target(name, rank):
                    process.send_signal(number)
                    return False
        return True

    def processes(self):
        """All that live, the launcher too; a zombie does not. Notes what they use in /dev/shm."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):  # it has ended meanwhile
                is_marked = process.environ().get("CHAOS_MARK") == self.mark
                if is_marked and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
                    self.inodes |= inodes_in_shm(process)
        return found

    def left(self):
        """What is there of a run that has ended: processes, files, the lock."""
        paths = [path for path in self.temporary.iterdir() if not path.name.startswith(OTHERS)]
        with os.scandir("/dev/shm") as entries:
            paths += [entry.path for entry in entries if entry.inode() in self.inodes]
        return [*self.processes(), *paths, *(["the lock"] if is_locked(self.run_dir) else [])]

    def look(self):
        """Waits for the end; seconds from the launcher's until nothing is left, and problems."""
        problems = [] if self.wait(EXIT_LIMIT) else ["it hangs"]
        exited_at = time.monotonic()
        while (left := self.left()) and time.monotonic() < exited_at + GONE_LIMIT:
            time.sleep(0.1)
        seconds = time.monotonic() - exited_at
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.launcher.wait()
        return seconds, problems + [f"left: {each}" for each in left]

    def results(self):
        """{name: content} of what another run must leave, too."""
        files = {"metrics.jsonl": []}
        for line in read_lines(self.run_dir / "metrics.jsonl"):
            line = {name: line[name] for name in line if not name.startswith(OF_A_CLOCK)}
            files["metrics.jsonl"].append(line)
        for name in ("samples.jsonl", "rollouts.jsonl", "model/model.safetensors"):
            files[name] = (self.run_dir / name).read_bytes()
        return files


def heed_signals():
    """As in a terminal: what a shell starts in the background ignores some signals."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def inodes_in_shm(process):
    """Of the files that a process has mapped, and of the folders that it has been given.

    By name a semaphore would not be found: the process that makes it has it mapped by another one.
    """
    maps = Path("/proc", str(process.pid), "maps").read_text("utf-8")
    found = {int(inode) for inode in re.findall(r" (\d+) +/dev/shm/", maps)}
    for folder in (process.cwd(), process.environ().get("TMPDIR", "")):
        if folder.startswith("/dev/shm/"):
            found.add(os.stat(folder).st_ino)
    return found


def is_locked(run_dir):
    try:
        with open(run_dir / "lock", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:  # the run had not begun
        return False
    except BlockingIOError:
        return True
    return False


def begin_again(script, launcher, folder, newest, expected):
    """Resumes a run, or begins it anew, to its end; what it did, and problems."""
    run = Run(script, launcher, folder, "--resume_from_checkpoint", "auto")
    run.wait(300)
    _, problems = run.look()
    text = run.output.read_text("utf-8")
    if run.launcher.returncode:
        return "failed", [*problems, f"status {run.launcher.returncode}: {text[-2000:]}"]
    results = run.results()
    problems += [f"{name} differs" for name in results if results[name] != expected[name]]
    if newest == 0 or "is finished" in text:
        return "finished" if newest else "anew", problems
    if not re.search(rf"^Resumed after step {newest};", text, re.MULTILINE):
        problems.append(f"it did not resume step {newest}")
    return f"resumed {newest}", problems


def try_ending(drawn, peace, choice, while_saving, folder):
    """A run, its ending, and the run that goes on: its cells of the table."""
    script, launcher, ending = drawn
    expected, seconds, checkpoint_seconds = peace
    rank, step = choice.randrange(LAUNCHERS[launcher][1]), choice.randrange(2, STEPS - 1)
    run = Run(script, launcher, folder)
    if while_saving:
        run.wait(seconds * 5, until=lambda: run.is_saving() and run.newest >= step - 1)
        time.sleep(choice.uniform(0, checkpoint_seconds / 2))
    else:
        run.wait(choice.uniform(0, seconds))
    is_over = run.end(ending, rank)
    was_saving = run.is_saving()
    gone, problems = run.look()
    # The last step has no checkpoint, and one is written after the next responses are there
    if run.newest < run.steps - 1:
        problems.append(f"after {run.steps} steps the newest checkpoint is {run.newest}")
    if run.launcher.returncode == 0 and run.steps < STEPS:
        problems.append("status 0")
    when = f"{run.steps}{', saving' * was_saving}{', over' * is_over}"
    again, further = begin_again(script, launcher, folder, run.newest, expected)
    problems = "; ".join([*problems, *(f"begun again: {problem}" for problem in further)])
    return [*drawn, rank, when, run.launcher.returncode, f"{gone:.1f}", again, problems or "none"]


def run_in_peace(script, launcher, folder):
    """What a run leaves, its seconds, and those of a checkpoint."""
    start = time.monotonic()
    run = Run(script, launcher, folder)
    if run.launcher.wait():
        sys.exit(run.output.read_text("utf-8"))
    lines = read_lines(run.run_dir / "metrics.jsonl")
    saving = min(line["time/checkpoint"] for line in lines if "time/checkpoint" in line)
    return run.results(), time.monotonic() - start, saving


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--scripts", nargs="+", choices=COMMANDS, default=[*COMMANDS])
    parser.add_argument("--launchers", nargs="+", choices=LAUNCHERS, default=[*LAUNCHERS])
    parser.add_argument("--endings", nargs="+", choices=ENDINGS, default=ENDINGS)
    args = parser.parse_args()
    make_debug_assets()
    choice, peace, rows = random.Random(args.seed), {}, []
    print("| script | launcher | ending | rank | steps | status | gone | again | problems |")
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    for number in range(args.runs):
        drawn = [choice.choice(each) for each in (args.scripts, args.launchers, args.endings)]
        kind = tuple(drawn[:2])
        with tempfile.TemporaryDirectory(prefix="chaos_") as name:
            if kind not in peace:
                peace[kind] = run_in_peace(*kind, Path(name, "peace"))
            folder = Path(name, "run")
            rows.append(try_ending(drawn, peace[kind], choice, number % 2 == 0, folder))
        print(f"| {' | '.join(map(str, rows[-1]))} |", flush=True)
    good, saving = (sum(word in row[i] for row in rows) for i, word in ((8, "none"), (4, "saving")))
    print(
        f"\n{good} of {args.runs} left nothing, and came to the end of the run in peace;", end=" "
    )
    print(f"{saving} were ended while they saved")
    sys.exit(good < args.runs)


if __name__ == "__main__":
    main()
