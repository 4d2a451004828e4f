"""End real runs at random moments, check what they leave, resume them, and compare the results.

They are compared with a run without interruption.

    python scripts/benchmark/chaos.py                      # 20 runs: about 20 minutes
    python scripts/benchmark/chaos.py --runs 3 --seed 7

A run is 8 short steps of the debug task on the CPU: real vLLM, a reward worker for each rank, a
checkpoint after every step, evaluations. Script, launcher (one rank, or two) and ending are drawn:
a signal to the launcher's process group, to the launcher, to the script of a rank, or to a rank's
engine. Every second run is ended while it saves a checkpoint, the others at any time.

The launcher must end within 60 seconds. Ten seconds later nothing may be left: processes, by a mark
in their environment; files of the run's TMPDIR, except torch's and the socket by which reward
workers are forked; what is new in /dev/shm, so nothing else should write there meanwhile. No step
may be lost but the last, whose checkpoint may not have been written yet. Then the run is begun
again with `--resume_from_checkpoint latest`. It must resume the newest checkpoint and leave the
same bytes as the uninterrupted run: metrics.jsonl (except for times), samples.jsonl, rollouts.jsonl
and the model.

It prints a line per run, with what was done and what is wrong. The exit status is 1 if anything is
wrong. Linux only.
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
from debug_runs import REPO, debug_command, flags_of, make_debug_assets, read_lines

COMMANDS = ("ppo_sync", "ppo", "grpo")  # of scripts/train/debug
ACCELERATE = ("-m", "accelerate.commands.launch", "--quiet", "--config_file")
LAUNCHERS = {  # and how many ranks they start
    "accelerate": ((*ACCELERATE, "scripts/accelerate/one_gpu.yaml"), 1),
    "torchrun": (("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"), 2),
    "ddp": ((*ACCELERATE, "scripts/accelerate/ddp.yaml", "--num_processes", "2"), 2),
}
ENDINGS = ("group SIGINT", "launcher SIGTERM", "launcher SIGKILL", "launcher SIGHUP")
ENDINGS += ("script SIGTERM", "script SIGKILL", "engine SIGKILL")
STEPS, EPISODES = 8, 16  # of a run, and of a step on each rank
OPTIONS = {
    "run_name": "run",
    "local_mini_batch_size": EPISODES,
    "per_device_train_batch_size": EPISODES,
    "warm_up_steps": 0,
    "num_evals": 4,
    "num_eval_prompts": 8,
    "save_freq": 1,
    "keep_last_n": 0,  # so that what is unfinished is being written, and not removed
    "reward_workers": 1,
}
EXIT_LIMIT, GONE_LIMIT = 60, 10  # seconds
# What stays in TMPDIR: torch's logs of its launcher, its cache of compiled code, and the folder of
# the socket by which reward workers are forked
OTHERS = ("torchelastic_", "torchinductor_", "pymp-")
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
        options = OPTIONS | {
            "output_dir": folder,
            "total_episodes": STEPS * EPISODES * ranks,
            "local_rollout_batch_size": 2 if name == "grpo" else EPISODES,
            "reward_fn": f"{folder / 'reward.py'}:score",
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
        return max((int(p.name[-1]) for p in self.run_dir.glob("checkpoints/step_?")), default=0)

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
        name, number = ending.split()[0], signal.Signals[ending.split()[1]]
        while not self.wait(0.01):
            with contextlib.suppress(psutil.Error):
                if name == "group":
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
        names = ("samples.jsonl", "rollouts.jsonl", "model/model.safetensors")
        files = {name: (self.run_dir / name).read_bytes() for name in names}
        for step, line in enumerate(read_lines(self.run_dir / "metrics.jsonl"), start=1):
            kept = {name: line[name] for name in line if not name.startswith(OF_A_CLOCK)}
            files[f"metrics of step {step}"] = kept
        return files


def run_in_peace(name, launcher, folder):
    """What a run leaves, and its seconds."""
    start = time.monotonic()
    run = Run(name, launcher, folder)
    if run.launcher.wait():
        sys.exit(run.output.read_text("utf-8"))
    return run.results(), time.monotonic() - start


def try_ending(name, launcher, ending, peace, choice, while_saving, folder):
    """A run, its ending, and the run that goes on; when it ended, and what is wrong."""
    expected, seconds = peace
    rank, step = choice.randrange(LAUNCHERS[launcher][1]), choice.randrange(2, STEPS - 1)
    run = Run(name, launcher, folder)
    if while_saving:
        run.wait(seconds * 5, until=lambda: run.is_saving() and run.newest >= step - 1)
        time.sleep(choice.uniform(0, 0.05))
    else:
        run.wait(choice.uniform(0, seconds))
    is_over = run.end(ending, rank)
    when = f"rank {rank}, after {run.steps} steps"
    when += f"{', saving' * run.is_saving()}{', over' * is_over}"
    problems, newest = run.look(), run.newest
    # The last step has no checkpoint, and one is written after the next responses are there
    if newest < run.steps - 1:
        problems.append(f"after {run.steps} steps the newest checkpoint is {newest}")
    if run.launcher.returncode == 0 and run.steps < STEPS:
        problems.append("status 0")

    again = Run(name, launcher, folder, "--resume_from_checkpoint", "latest")
    again.wait(300)
    problems += [f"begun again: {problem}" for problem in again.look()]
    text = again.output.read_text("utf-8")
    if again.launcher.returncode:
        return when, [*problems, f"begun again: status {again.launcher.returncode}: {text[-2000:]}"]
    results = again.results()
    problems += [f"{file} differs" for file in expected if results.get(file) != expected[file]]
    is_resumed = re.search(rf"^Resumed from the checkpoint of step {newest};", text, re.MULTILINE)
    if newest and not is_resumed:
        problems.append(f"it did not resume step {newest}")
    return when, problems


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
            rest = (peace[kind], choice, number % 2 == 0, Path(path, "run"))
            when, problems = try_ending(*kind, ending, *rest)
        number_good += not problems
        found = "; ".join(problems) or "no problem"
        print(f"{name}, {launcher}, {ending}, {when}: {found}", flush=True)
    print(f"{number_good} of {args.runs} left nothing, and came to the end of the run in peace")
    sys.exit(number_good < args.runs)


if __name__ == "__main__":
    main()
