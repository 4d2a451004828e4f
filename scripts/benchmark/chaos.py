"""Ends real runs at random moments, looks what they leave, resumes them, and compares what comes of
them with a run in peace.

    python scripts/benchmark/chaos.py                      # 20 runs: about 20 minutes
    python scripts/benchmark/chaos.py --runs 3 --seed 7

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
mark in their environment; files of the run's TMPDIR, but for torch's logs and its cache; what is
new in /dev/shm, such as semaphores and vLLM's folder, so nothing else should write there meanwhile.
No step may be lost but the last, whose checkpoint may not have been written yet. Then the run is
begun again with `--resume_from_checkpoint auto`, which a lock that is still held would refuse. It
must resume the newest checkpoint and leave what the run in peace has left, byte by byte:
metrics.jsonl (but for what a clock says), samples.jsonl, rollouts.jsonl and the model.

A run is a line: what it was, and what is wrong. The exit status is 1 if there is a problem. Linux
only.
"""

import argparse
import contextlib
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

COMMANDS = ("ppo_sync", "ppo", "grpo")  # of scripts/train/debug
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

    def __init__(self, name, launcher, folder, *flags):
        self.script, *debug_flags = debug_command(name)
        self.run_dir, self.temporary = folder / "run", folder / "tmp"
        self.output, self.mark = folder / "output.txt", uuid.uuid4().hex
        self.others = set(os.listdir("/dev/shm"))  # what is there before it
        self.temporary.mkdir(parents=True, exist_ok=True)
        (folder / "reward.py").write_text(REWARD, "utf-8")
        words, ranks = LAUNCHERS[launcher]
        options = {
            "output_dir": folder,
            "run_name": "run",
            "total_episodes": STEPS * EPISODES * ranks,
            "local_rollout_batch_size": 2 if name == "grpo" else EPISODES,
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
                [sys.executable, *words, self.script, *debug_flags, *flags_of(options), *flags],
                cwd=REPO,
                env=os.environ | environment | {"ACCELERATE_USE_CPU": "true"},
                stdout=output,
                stderr=output,
                start_new_session=True,
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
        """All that live, the launcher too; a zombie does not."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):  # it has ended meanwhile
                is_marked = process.environ().get("CHAOS_MARK") == self.mark
                if is_marked and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def left(self):
        """What is there of a run that has ended: processes and files."""
        paths = [path for path in self.temporary.iterdir() if not path.name.startswith(OTHERS)]
        shared = set(os.listdir("/dev/shm")) - self.others
        return [*self.processes(), *paths, *(f"/dev/shm/{name}" for name in shared)]

    def look(self):
        """Waits for the end, and until nothing is left; what is wrong about it."""
        problems = [] if self.wait(EXIT_LIMIT) else ["it hangs"]
        end = time.monotonic() + GONE_LIMIT
        while (left := self.left()) and time.monotonic() < end:
            time.sleep(0.1)
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.launcher.wait()
        return problems + [f"left: {each}" for each in left]

    def results(self):
        """{name: content} of what another run must leave, too."""
        files = {"metrics.jsonl": []}
        for line in read_lines(self.run_dir / "metrics.jsonl"):
            line = {name: line[name] for name in line if not name.startswith(OF_A_CLOCK)}
            files["metrics.jsonl"].append(line)
        for name in ("samples.jsonl", "rollouts.jsonl", "model/model.safetensors"):
            files[name] = (self.run_dir / name).read_bytes()
        return files


def begin_again(name, launcher, folder, newest, expected):
    """Resumes a run, or begins it anew, to its end; what is wrong about it."""
    run = Run(name, launcher, folder, "--resume_from_checkpoint", "auto")
    run.wait(300)
    problems, text = run.look(), run.output.read_text("utf-8")
    if run.launcher.returncode:
        return [*problems, f"status {run.launcher.returncode}: {text[-2000:]}"]
    results = run.results()
    problems += [f"{file} differs" for file in results if results[file] != expected[file]]
    is_resumed = re.search(rf"^Resumed after step {newest};", text, re.MULTILINE)
    if newest and not is_resumed and "is finished" not in text:
        problems.append(f"it did not resume step {newest}")
    return problems


def try_ending(name, launcher, ending, peace, choice, while_saving, folder):
    """A run, its ending, and the run that goes on; when it ended, and what is wrong."""
    expected, seconds, checkpoint_seconds = peace
    rank, step = choice.randrange(LAUNCHERS[launcher][1]), choice.randrange(2, STEPS - 1)
    run = Run(name, launcher, folder)
    if while_saving:
        run.wait(seconds * 5, until=lambda: run.is_saving() and run.newest >= step - 1)
        time.sleep(choice.uniform(0, checkpoint_seconds / 2))
    else:
        run.wait(choice.uniform(0, seconds))
    is_over = run.end(ending, rank)
    when = f"after {run.steps} steps{', saving' * run.is_saving()}{', over' * is_over}"
    problems = run.look()
    # The last step has no checkpoint, and one is written after the next responses are there
    if run.newest < run.steps - 1:
        problems.append(f"after {run.steps} steps the newest checkpoint is {run.newest}")
    if run.launcher.returncode == 0 and run.steps < STEPS:
        problems.append("status 0")
    again = begin_again(name, launcher, folder, run.newest, expected)
    return f"rank {rank}, {when}", problems + [f"begun again: {problem}" for problem in again]


def run_in_peace(name, launcher, folder):
    """What a run leaves, its seconds, and those of a checkpoint."""
    start = time.monotonic()
    run = Run(name, launcher, folder)
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
    args = parser.parse_args()
    make_debug_assets()
    # As in a terminal: what a shell starts in the background ignores these
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    choice, peace, number_good = random.Random(args.seed), {}, 0
    for number in range(args.runs):
        name, launcher, ending = (choice.choice(each) for each in (COMMANDS, [*LAUNCHERS], ENDINGS))
        with tempfile.TemporaryDirectory(prefix="chaos_") as path:
            kind = (name, launcher)
            if kind not in peace:
                peace[kind] = run_in_peace(*kind, Path(path, "peace"))
            when, problems = try_ending(
                *kind, ending, peace[kind], choice, number % 2 == 0, Path(path, "run")
            )
        number_good += not problems
        found = "; ".join(problems) or "no problem"
        print(f"{name}, {launcher}, {ending}, {when}: {found}", flush=True)
    print(f"{number_good} of {args.runs} left nothing, and came to the end of the run in peace")
    sys.exit(number_good < args.runs)


if __name__ == "__main__":
    main()
