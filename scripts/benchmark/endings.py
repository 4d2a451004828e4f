"""Ends real runs in seven ways, in a chosen step or at random moments, and looks what they leave.

    python scripts/benchmark/endings.py                      # each ending, 42 runs: 40 minutes
    python scripts/benchmark/endings.py --random 30 --seed 1
    python scripts/benchmark/endings.py --scripts ppo_sync.py --launchers torchrun --endings SIGINT

A run is 12 short steps of the debug task on the CPU: real vLLM, a reward worker for each rank, a
checkpoint after every step, evaluations. The endings:

    SIGINT              to the launcher's process group, as by Ctrl-C
    launcher SIGTERM    to the launcher alone, and so on
    script SIGTERM      to the script, on two ranks to one of them
    engine SIGKILL      to vLLM's process, on two ranks to one of them

Launchers: accelerate with one_gpu.yaml (one rank), torchrun, and accelerate with ddp.yaml (two
ranks each). Without --random the first two are run, and the ending comes in one of the steps 2 to
10. With it script, launcher and ending are drawn, and the moment is one after the launcher's start,
after the start of vLLM, in a step, in a checkpoint, after the model's folder is there or after the
last step. An ending waits for its process. Where the run ends before, it is "over".

The launcher must end within 60 seconds. Ten seconds later nothing may be left: processes, by a
mark in their environment; files of the run's TMPDIR, but for torch's logs and its cache; what
its processes were seen to use in /dev/shm, such as semaphores and vLLM's folder; the lock of the
run's folder. A zombie counts as gone. The newest checkpoint must be whole, and of the last step but
one at least. Each third run is begun again with `--resume_from_checkpoint auto`, and must come to
its end and leave nothing.

A run is a line of the table, and of --results. The exit status is 1 if there is a problem. Linux
only.
"""

import argparse
import contextlib
import fcntl
import itertools
import json
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
from gpu_check import flags_of

REPO = Path(__file__).resolve().parent.parent.parent
SCRIPTS = ("ppo_sync.py", "ppo_vllm_async.py", "grpo_vllm_async.py")
ACCELERATE = ("-m", "accelerate.commands.launch", "--quiet", "--config_file")
LAUNCHERS = {  # and how many ranks they start
    "accelerate": ((*ACCELERATE, "scripts/accelerate/one_gpu.yaml"), 1),
    "torchrun": (("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"), 2),
    "ddp": ((*ACCELERATE, "scripts/accelerate/ddp.yaml", "--num_processes", "2"), 2),
}
ENDINGS = (
    "SIGINT",
    "launcher SIGTERM",
    "launcher SIGKILL",
    "launcher SIGHUP",
    "script SIGTERM",
    "script SIGKILL",
    "engine SIGKILL",
)
STEPS = 12
EPISODES = 16  # of a step
# Where random moments begin, and how many seconds they may be later
MOMENTS = {"start": 12, "vLLM": 10, "step": 0.4, "checkpoint": 0.05, "model": 0.5, "end": 8}
# What torch keeps in TMPDIR: its launcher's logs, and its cache of compiled code
OTHERS = ("torchelastic_", "torchinductor_")
EXIT_LIMIT = 60
GONE_LIMIT = 10
REWARD = """
def score(data_source, response, ground_truth, extra_info):
    return float(response == ground_truth)
"""


# ------------------------------------------------------------------------------------------- a run


class Run:
    """A launcher that was started, with the mark of all that it starts."""

    def __init__(self, script, launcher, folder, *flags):
        self.run_dir, self.temporary = folder / "run", folder / "tmp"
        self.output = folder / "output.txt"
        self.script = script
        self.mark = uuid.uuid4().hex
        words, ranks = LAUNCHERS[launcher]
        self.temporary.mkdir(exist_ok=True)
        (folder / "reward.py").write_text(REWARD, "utf-8")
        options = {
            "output_dir": folder,
            "run_name": "run",
            "dataset": "debug_assets/train.parquet",
            "eval_dataset": "debug_assets/test.parquet",
            "num_eval_prompts": 8,
            "num_evals": 4,
            "model_name_or_path": "debug_assets/model",
            "dtype": "float32",
            "gradient_checkpointing": False,
            "response_length": 8,
            "total_episodes": STEPS * EPISODES,
            "local_rollout_batch_size": EPISODES // ranks,
            "local_mini_batch_size": EPISODES // ranks,
            "per_device_train_batch_size": EPISODES // ranks,
            "save_freq": 1,
            "reward_fn": f"{folder / 'reward.py'}:score",
            "reward_workers": 1,
        }
        if script.startswith("grpo"):
            options |= {"number_samples_per_prompt": 2}
            options["local_rollout_batch_size"] //= 2
        environment = {"ENDINGS_MARK": self.mark, "TMPDIR": str(self.temporary)}
        environment["ACCELERATE_USE_CPU"] = "true"
        self.inodes, self.looked_at = set(), 0.0
        with open(self.output, "a", encoding="utf-8") as output:
            self.launcher = subprocess.Popen(
                [sys.executable, *words, script, *flags_of(options), *flags],
                cwd=REPO,
                env=os.environ | environment,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=heed_signals,
            )
        self.started_at = time.monotonic()

    @property
    def steps(self):
        """How many steps are written."""
        path = self.run_dir / "metrics.jsonl"
        return path.read_text("utf-8").count("\n") if path.exists() else 0

    @property
    def checkpoints(self):
        """The steps of the checkpoints that have their names, in order."""
        paths = self.run_dir.glob("checkpoints/step_*")
        return sorted(int(path.name.removeprefix("step_")) for path in paths)

    @property
    def is_saving(self):
        return (self.run_dir / "checkpoints/unfinished").exists()

    def processes(self):
        """All that live; the launcher, too."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                is_marked = process.environ().get("ENDINGS_MARK") == self.mark
                if is_marked and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def look(self, seconds=0.3):
        """Notes what the run uses in /dev/shm; not more often than that."""
        if time.monotonic() > self.looked_at + seconds:
            for process in self.processes():
                self.inodes |= inodes_in_shm(process)
            self.looked_at = time.monotonic()

    def children(self, parent, word):
        """Processes with a word in their command, by rank."""
        found = {}
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                command = process.cmdline()
                # Before it is replaced, a new process has its parent's command
                is_new = command == psutil.Process(parent).cmdline()
                if process.ppid() == parent and word in " ".join(command) and not is_new:
                    found[int(process.environ().get("RANK", 0))] = process
        return found

    def target(self, name, rank):
        """The process that a signal is for, or None if it is not there."""
        if name == "launcher":
            return psutil.Process(self.launcher.pid)
        script = self.children(self.launcher.pid, self.script).get(rank)
        if name == "script" or not script:
            return script
        engines = self.children(script.pid, "multiprocessing.spawn")
        return next(iter(engines.values()), None)

    def wait_for(self, condition):
        """Waits until condition() is true, and returns it; None: the launcher has ended."""
        while not (result := condition()):
            if self.launcher.poll() is not None:
                return None
            self.look()
            time.sleep(0.002)
        return result

    def wait_for_exit(self, seconds):
        """Whether the launcher ends in that time."""
        until = time.monotonic() + seconds
        self.wait_for(lambda: time.monotonic() > until)
        return self.launcher.poll() is not None

    def wait_for_moment(self, moment, step, seconds):
        """Waits for one of the MOMENTS, and then for some seconds."""
        conditions = {
            "start": lambda: True,
            "vLLM": lambda: "Starting vLLM" in self.output.read_text("utf-8"),
            "step": lambda: self.steps >= step - 1,
            "checkpoint": lambda: self.is_saving and self.steps >= step - 1,
            "model": lambda: (self.run_dir / "model").exists(),
            "end": lambda: self.steps == STEPS,
        }
        self.wait_for(conditions[moment])
        self.wait_for_exit(seconds)


def heed_signals():
    """As in a terminal: what a shell starts in the background ignores some signals."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def commit(run, ending, rank):
    """Ends the run; returns False if it was over before."""
    run.look(seconds=0)
    name, number = ending.split()[0], signal.Signals[ending.split()[-1]]
    if name == "SIGINT":
        if run.launcher.poll() is None:
            os.killpg(run.launcher.pid, number)
            return True
        return False
    process = run.wait_for(partial(run.target, name, rank))
    if not process or run.launcher.poll() is not None:
        return False
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return False
    return True


# ------------------------------------------------------------------------------ what must be found


def wait_for_end(run):
    """Seconds until the launcher has ended, and until the last process has; and problems."""
    since = time.monotonic()
    problems = [] if run.wait_for_exit(EXIT_LIMIT) else ["it hangs"]
    exited_at = time.monotonic()
    while (left := run.processes()) and time.monotonic() < exited_at + GONE_LIMIT:
        time.sleep(0.1)
    gone_at = time.monotonic()
    for process in left:
        with contextlib.suppress(psutil.Error):
            problems.append(f"left: process {' '.join(process.cmdline())[:200]}")
    while (files := files_left(run)) and time.monotonic() < exited_at + GONE_LIMIT:
        time.sleep(0.1)
    problems += [f"left: {path}" for path in files]
    if is_locked(run.run_dir):
        problems.append("left: the lock")
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.kill()
    run.launcher.wait()
    return exited_at - since, gone_at - since, problems


def files_left(run):
    """What the run's TMPDIR has, and what is in /dev/shm of what its processes have used."""
    paths = [path for path in run.temporary.iterdir() if not path.name.startswith(OTHERS)]
    with os.scandir("/dev/shm") as entries:
        paths += [entry.path for entry in entries if entry.inode() in run.inodes]
    return sorted(map(str, paths))


def inodes_in_shm(process):
    """Of the files that a process has mapped, and of the folders that it has been given.

    By name a semaphore would not be found: the process that makes it has it mapped by another one.
    """
    found = set()
    with contextlib.suppress(OSError, psutil.Error):  # it has ended meanwhile
        maps = Path("/proc", str(process.pid), "maps").read_text("utf-8")
        found |= {int(inode) for inode in re.findall(r" (\d+) +/dev/shm/", maps)}
        for folder in (process.cwd(), process.environ().get("TMPDIR", "")):
            if folder.startswith("/dev/shm/"):
                found.add(os.stat(folder).st_ino)
    return found


def is_locked(run_dir):
    try:
        with open(run_dir / "lock", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:  # the run had not begun
        pass
    return False


def checkpoint_problems(run):
    """What the newest checkpoint lacks."""
    newest = max(run.checkpoints, default=0)
    # One is written after the next step's responses are there; the last step has none
    problems = []
    if newest < run.steps - 1:
        problems.append(f"after {run.steps} steps the newest checkpoint is {newest}")
    if not newest:
        return problems
    folder = run.run_dir / "checkpoints" / f"step_{newest}"
    parts = [path for path in folder.iterdir() if path.is_dir()]
    if {"policy", "policy_optimizer"} - {path.name for path in parts}:
        problems.append(f"{folder} has {[path.name for path in parts]} alone")
    problems += [f"{path} is not whole" for path in parts if not (path / ".metadata").exists()]
    json.loads((folder / "state.json").read_bytes())
    if (folder / "metrics.jsonl").read_text("utf-8").count("\n") != newest:
        problems.append(f"{folder} has other metrics")
    return problems


def begin_again(script, launcher, folder):
    """Resumes or begins anew, to the end; what it did, and problems."""
    was_finished = (folder / "output.txt").read_text("utf-8").count("is finished")
    run = Run(script, launcher, folder, "--resume_from_checkpoint", "auto")
    newest = max(run.checkpoints, default=0)
    run.wait_for_exit(300)
    _, _, problems = wait_for_end(run)
    problems = [f"begun again: {problem}" for problem in problems]
    text = run.output.read_text("utf-8")
    if run.launcher.returncode or run.steps != STEPS or not (run.run_dir / "model").exists():
        problems.append(f"begun again, it ended in step {run.steps + 1}: {text[-2000:]}")
    if text.count("is finished") > was_finished:
        return "finished", problems
    if newest and not re.search(rf"^Resumed after step {newest};", text, re.MULTILINE):
        problems.append(f"it did not resume step {newest}")
    return f"resumed {newest}" if newest else "anew", problems


# ---------------------------------------------------------------------------------------- the table


def try_ending(case, is_begun_again, folder):
    """A run, its ending and what is left: a line of the results."""
    run = Run(case["script"], case["launcher"], folder)
    run.wait_for_moment(case["moment"], case["step"], case["later"])
    was_ended = commit(run, case["ending"], case["rank"])
    after = time.monotonic() - run.started_at
    seen = {"after": after, "steps": run.steps, "saving": run.is_saving}
    exit_seconds, gone_seconds, problems = wait_for_end(run)
    status = run.launcher.returncode
    if status == 0 and run.steps < STEPS:
        problems.append("status 0")
    problems += checkpoint_problems(run)
    text = run.output.read_text("utf-8")
    line = case | seen | {"over": not was_ended, "status": status, "exit": exit_seconds}
    line |= {"gone": gone_seconds, "checkpoint": max(run.checkpoints, default=0)}
    line["again"] = ""
    if is_begun_again:
        line["again"], further = begin_again(case["script"], case["launcher"], folder)
        problems += further
    if problems:
        line["output"] = text[-3000:]
    return line | {"problems": problems}


def draw(choice, scripts, launchers, endings, moments):
    """A random case."""
    launcher = choice.choice(launchers)
    moment = choice.choice(moments)
    return {
        "script": choice.choice(scripts),
        "launcher": launcher,
        "ending": choice.choice(endings),
        "rank": choice.randrange(LAUNCHERS[launcher][1]),
        "moment": moment,
        "step": choice.randrange(2, STEPS - 1),
        "later": choice.uniform(0, MOMENTS[moment]),
    }


COLUMNS = ("script", "launcher", "ending", "rank", "moment", "after", "steps", "checkpoint")
COLUMNS += ("status", "exit", "gone", "again", "problems")


def print_row(cells):
    cells = [f"{cell:.1f}" if isinstance(cell, float) else str(cell) for cell in cells]
    print(f"| {' | '.join(cells)} |", flush=True)


def row_of(line):
    cells = dict(line)
    cells["moment"] += f" {line['step']}" * (line["moment"] in ("step", "checkpoint"))
    cells["ending"] += " (over)" * line["over"]
    cells["problems"] = "; ".join(line["problems"]) or "none"
    return [cells[name] for name in COLUMNS]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--random", type=int, default=0, help="so many random cases; 0: each ending in a step")
    add("--seed", type=int, default=1)
    add("--scripts", nargs="+", type=os.path.expanduser, default=SCRIPTS)
    add("--launchers", nargs="+", choices=LAUNCHERS)
    add("--endings", nargs="+", choices=ENDINGS, default=ENDINGS)
    add("--moments", nargs="+", choices=MOMENTS, default=list(MOMENTS), help="of --random")
    add("--results", type=Path, default=Path("output/endings.jsonl"), help="lines are added")
    args = parser.parse_args()
    results = args.results.expanduser()
    results.parent.mkdir(parents=True, exist_ok=True)
    program = ["scripts/dev/make_debug_assets.py"]
    subprocess.run([sys.executable, *program], cwd=REPO, check=True, capture_output=True)

    choice = random.Random(args.seed)
    launchers = args.launchers or (list(LAUNCHERS) if args.random else ["accelerate", "torchrun"])
    if args.random:
        space = (args.scripts, launchers, args.endings, args.moments)
        cases = [draw(choice, *space) for _ in range(args.random)]
    else:
        each = itertools.product(args.scripts, launchers, args.endings)
        cases = [draw(choice, [one], [by], [ending], ["step"]) for one, by, ending in each]

    print(f"Seed {args.seed}")
    print_row(COLUMNS)
    print_row(["---"] * len(COLUMNS))
    lines = []
    for number, case in enumerate(cases):
        with tempfile.TemporaryDirectory(prefix="endings_") as folder:
            lines.append(try_ending(case, number % 3 == 0, Path(folder)))
        print_row(row_of(lines[-1]))
        with open(results, "a", encoding="utf-8") as file:
            file.write(json.dumps(lines[-1]) + "\n")
    hangs = sum("hangs" in problem for line in lines for problem in line["problems"])
    left = sum("left: " in problem for line in lines for problem in line["problems"])
    again = sum(bool(line["again"]) for line in lines)
    print(f"\n{len(lines)} endings, {left} left, {hangs} hangs, {again} begun again;", end=" ")
    print(f"the last process was gone after {max(line['gone'] for line in lines):.1f} s at most")
    sys.exit(any(line["problems"] for line in lines))


if __name__ == "__main__":
    main()
