"""End real runs at random moments, check what they leave behind, and resume them.

    python scripts/benchmark/chaos.py                      # 20 runs: about 20 minutes
    python scripts/benchmark/chaos.py --runs 3 --seed 7

A run has 8 short steps of the debug task on the CPU, with a real vLLM, a reward worker for each
rank, a checkpoint after every step, and evaluations. The script, the launcher (with one rank or
two) and the ending are random. An ending is a signal to the launcher's process group, to the
launcher, to one rank's script, or to one rank's engine. Every second run is ended while it saves a
checkpoint, and the others at any time.

The launcher must end within 60 seconds. Ten seconds later nothing may be left: no process of the
run, no file in its TMPDIR (except torch's files and the folder of the reward workers' socket), and
nothing new in /dev/shm, where no other program should write meanwhile. At most the last step may be
lost, because its checkpoint may not have been written yet. Then the same command is run with
`--resume_from_checkpoint latest`. It must resume the newest checkpoint and leave the same bytes as
an uninterrupted run: metrics.jsonl (except for times), samples.jsonl, rollouts.jsonl and the model.

One line is printed for each run, with the ending and all problems. The exit status is 1 if there
are any. Linux only.
"""

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
from functools import partial
from pathlib import Path

import psutil
from debug_runs import REPO, debug_command, flags_of, make_debug_assets, make_parser, read_lines

COMMANDS = ("ppo_sync", "ppo", "grpo")  # of scripts/train/debug
ACCELERATE = ("-m", "accelerate.commands.launch", "--quiet", "--config_file")
LAUNCHERS = {  # the command of each launcher, and the number of ranks that it starts
    "accelerate": ((*ACCELERATE, "scripts/accelerate/one_gpu.yaml"), 1),
    "torchrun": (("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"), 2),
    "ddp": ((*ACCELERATE, "scripts/accelerate/ddp.yaml", "--num_processes", "2"), 2),
}
ENDINGS = ["group SIGINT", "launcher SIGTERM", "launcher SIGKILL", "launcher SIGHUP"]
ENDINGS += ["script SIGTERM", "script SIGKILL", "engine SIGKILL"]
STEPS, EPISODES = 8, 16  # steps of a run, and episodes of a step on each rank
OPTIONS = {
    "run_name": "run",
    "local_mini_batch_size": EPISODES,
    "per_device_train_batch_size": EPISODES,
    "warm_up_steps": 0,
    "num_evals": 4,
    "num_eval_prompts": 8,
    "save_freq": 1,
    "keep_last_n": 0,  # no checkpoint is removed, so an unfinished one is being written
    "reward_workers": 1,
}
EXIT_LIMIT, CLEANUP_LIMIT = 60, 10  # seconds
# Names in TMPDIR that may stay: the logs of torch's launcher, its cache of compiled code, and the
# folder of the socket through which reward workers are forked
MAY_STAY = ("torchelastic_", "torchinductor_", "pymp-")
TIMES = ("time/", "perf/")
REWARD = """
def score(data_source, response, ground_truth, extra_info):
    return float(response == ground_truth)
"""


class Run:
    """Start a launcher, and find all processes and files that belong to it."""

    def __init__(self, command, launcher, folder, *flags):
        self.script, *debug_flags = debug_command(command)
        self.run_dir, self.tmpdir = folder / "run", folder / "tmp"
        self.output = folder / "output.txt"
        self.mark = uuid.uuid4().hex  # every process of the run inherits it
        self.shm_before = set(os.listdir("/dev/shm"))
        self.tmpdir.mkdir(parents=True, exist_ok=True)
        (folder / "reward.py").write_text(REWARD, "utf-8")
        launch_words, num_ranks = LAUNCHERS[launcher]
        options = OPTIONS | {
            "output_dir": folder,
            "total_episodes": STEPS * EPISODES * num_ranks,
            "local_rollout_batch_size": 2 if command == "grpo" else EPISODES,
            "reward_fn": f"{folder / 'reward.py'}:score",
        }
        words = [*launch_words, self.script, *debug_flags, *flags_of(options), *flags]
        environment = {"CHAOS_MARK": self.mark, "TMPDIR": str(self.tmpdir)}
        with open(self.output, "a", encoding="utf-8") as output:
            self.launcher = subprocess.Popen(
                [sys.executable, *words],
                cwd=REPO,
                env=os.environ | environment | {"ACCELERATE_USE_CPU": "true"},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    @property
    def num_steps(self):
        """Count the steps in metrics.jsonl."""
        path = self.run_dir / "metrics.jsonl"
        return path.read_text("utf-8").count("\n") if path.exists() else 0

    @property
    def newest_checkpoint(self):
        """Return the step of the newest complete checkpoint, or 0."""
        return max((int(p.name[-1]) for p in self.run_dir.glob("checkpoints/step_?")), default=0)

    def is_saving(self):
        return any(self.run_dir.glob("checkpoints/*unfinished"))

    def wait(self, seconds, until=lambda: False):
        """Wait until the launcher ends or `until` is true. Return whether the launcher has ended.

        `seconds` is the longest time to wait.
        """
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.launcher.poll() is None and not until():
            time.sleep(0.002)
        return self.launcher.poll() is not None

    def find_target(self, name, rank):
        """Return the process that gets the signal, or None if it does not exist."""
        process = psutil.Process(self.launcher.pid)
        paths = {"launcher": [], "script": [self.script]}
        for word in paths.get(name, [self.script, "multiprocessing.spawn"]):
            children = [child for child in process.children() if word in " ".join(child.cmdline())]
            # Until it calls exec, a new process has its parent's command
            children = [child for child in children if child.cmdline() != process.cmdline()]
            of_rank = (c for c in children if int(c.environ().get("RANK", 0)) == rank)
            process = next(of_rank, None)
            if process is None:
                return None
        return process

    def end(self, ending, rank):
        """End the run with a signal. Return whether it had ended before."""
        name, signal_name = ending.split()
        number = signal.Signals[signal_name]
        while not self.wait(0.01):
            with contextlib.suppress(psutil.Error):
                if name == "group":
                    os.killpg(self.launcher.pid, number)
                    return False
                if process := self.find_target(name, rank):
                    process.send_signal(number)
                    return False
        return True

    def find_processes(self):
        """Return all live processes of the run, including the launcher but not zombies."""
        processes = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):  # it has ended meanwhile
                is_marked = process.environ().get("CHAOS_MARK") == self.mark
                if is_marked and process.status() != psutil.STATUS_ZOMBIE:
                    processes.append(process)
        return processes

    def find_leftovers(self):
        """Return the processes and files of the run that still exist."""
        paths = [path for path in self.tmpdir.iterdir() if not path.name.startswith(MAY_STAY)]
        shm = set(os.listdir("/dev/shm")) - self.shm_before
        return [*self.find_processes(), *paths, *(f"/dev/shm/{name}" for name in shm)]

    def wait_for_end(self):
        """Wait until the run has ended and nothing is left. Return the problems."""
        problems = [] if self.wait(EXIT_LIMIT) else [f"it has not ended after {EXIT_LIMIT} s"]
        end = time.monotonic() + CLEANUP_LIMIT
        while (leftovers := self.find_leftovers()) and time.monotonic() < end:
            time.sleep(0.1)
        for process in self.find_processes():
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.launcher.wait()
        return problems + [f"it left {leftover}" for leftover in leftovers]

    def results(self):
        """Return {name: content} of everything that must be equal in another run."""
        names = ("samples.jsonl", "rollouts.jsonl", "model/model.safetensors")
        files = {name: (self.run_dir / name).read_bytes() for name in names}
        for step, line in enumerate(read_lines(self.run_dir / "metrics.jsonl"), start=1):
            metrics = {name: line[name] for name in line if not name.startswith(TIMES)}
            files[f"metrics of step {step}"] = metrics
        return files


def run_uninterrupted(command, launcher, folder):
    """Return the results of an uninterrupted run, and its seconds."""
    start = time.monotonic()
    run = Run(command, launcher, folder)
    if run.launcher.wait():
        sys.exit(run.output.read_text("utf-8"))
    return run.results(), time.monotonic() - start


def end_and_resume(start, rank, ending, reference, rng, while_saving):
    """Start a run, end it, and resume it. Return when it was ended, and the problems.

    start(*flags) returns the Run. `reference` is what run_uninterrupted returned for such a run.
    """
    expected, seconds = reference
    step, run = rng.randrange(2, STEPS - 1), start()
    if while_saving:
        run.wait(seconds * 5, until=lambda: run.is_saving() and run.newest_checkpoint >= step - 1)
        time.sleep(rng.uniform(0, 0.05))
    else:
        run.wait(rng.uniform(0, seconds))
    had_ended = run.end(ending, rank)
    when = f"rank {rank}, after {run.num_steps} steps"
    when += f"{', saving' * run.is_saving()}{', had ended' * had_ended}"
    problems, newest = run.wait_for_end(), run.newest_checkpoint
    # The last step has no checkpoint, because one is written when the next responses are there
    if newest < run.num_steps - 1:
        problems.append(f"after {run.num_steps} steps the newest checkpoint is {newest}")
    if run.launcher.returncode == 0 and run.num_steps < STEPS:
        problems.append("the exit status is 0, although steps are missing")

    resumed = start("--resume_from_checkpoint", "latest")
    resumed.wait(300)
    problems += [f"resumed: {problem}" for problem in resumed.wait_for_end()]
    text = resumed.output.read_text("utf-8")
    if status := resumed.launcher.returncode:
        return when, [*problems, f"resumed: exit status {status}: {text[-2000:]}"]
    results = resumed.results()
    problems += [f"{name} differs" for name in expected if results.get(name) != expected[name]]
    first_line = rf"^Resumed from the checkpoint of step {newest};"
    if newest and not re.search(first_line, text, re.MULTILINE):
        problems.append(f"it did not resume step {newest}")
    return when, problems


def main():
    parser = make_parser(__doc__)
    parser.add_argument("--runs", type=int, default=20, help="Number of runs (%(default)s).")
    parser.add_argument("--seed", type=int, default=1, help="Seed of all choices (%(default)s).")
    args = parser.parse_args()
    make_debug_assets()
    # A shell starts programs in the background with these signals ignored, and runs inherit that
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    rng, references, num_good = random.Random(args.seed), {}, 0
    for number in range(args.runs):
        command, launcher, ending = map(rng.choice, (COMMANDS, [*LAUNCHERS], ENDINGS))
        with tempfile.TemporaryDirectory(prefix="chaos_") as path:
            kind, while_saving = (command, launcher), number % 2 == 0
            if kind not in references:
                references[kind] = run_uninterrupted(*kind, Path(path, "uninterrupted"))
            start = partial(Run, *kind, Path(path, "run"))
            rank = rng.randrange(LAUNCHERS[launcher][1])
            when, problems = end_and_resume(
                start, rank, ending, references[kind], rng, while_saving
            )
        num_good += not problems
        verdict = "; ".join(problems) or "no problem"
        print(f"{command}, {launcher}, {ending}, {when}: {verdict}", flush=True)
    print(f"{num_good} of {args.runs} runs left nothing and ended as an uninterrupted run does")
    sys.exit(num_good < args.runs)


if __name__ == "__main__":
    main()
