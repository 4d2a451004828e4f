"""What a long run keeps: the memory of all processes of grpo_vllm_async.py, over 3,000 steps.

    python scripts/benchmark/soak.py                        # five minutes on two cores
    python scripts/benchmark/soak.py --worker_calls 1000    # reward workers die, and are replaced
    python scripts/benchmark/soak.py --steps 300 --every 10 --from 50 --response_length 4

A step is 8 responses of one token by the debug model, with all that a long run has: asynchrony,
vLLM, two reward workers, an evaluation every 230 steps (which draws a picture), a checkpoint every
70 of which three are kept. The script runs as it is. This program looks at its processes from
outside, whenever metrics.jsonl has --every lines more. Other flags go to the script. Linux only.

Memory is what a process has of its own: Pss_Anon + Pss_Shmem + SwapPss of /proc/PID/smaps_rollup,
that is its proportional set size (PSS) without pages of files. RSS would count a page once for each
process that shares it, and most processes here are forks. Pages of files are libraries, which the
kernel drops and reads again as it likes; how much PSS or USS count of them depends on whoever else
on the machine runs the same libraries. Without them the sum over all processes is what the run
takes from the machine. A page that fork server and worker share goes over to both when one writes
to it: such growth ends with the last shared page.

Roles are the learner; vLLM's process; the fork server, and the reward workers that it forks; the
resource tracker of Python's multiprocessing; programs, which the script starts for its pictures and
which end; zombies. Anything else is "other".

The table has, for each role, and for all but the programs, which come and go:

    processes       at the end
    MiB             at the first look from --from on, and at the end
    grown KiB       the difference of the two
    KiB/1,000       the slope of a line fitted to all looks from --from on (least squares),
    of late         and to those of the second half of these
    threads, fds    threads and open file descriptors at the same two looks

Below it are numbers of files, at the same two looks: shm, those in /dev/shm that a process of the
run has open or mapped, or that are in vLLM's folder; tmp, those in the run's own TMPDIR. Above it,
when a run has ended, are medians of time/training and time/checkpoint over the first and the last
tenth of the steps, and the number of rewards that failed in training: each has cost a worker.

--results gets a line for each look. The picture is drawn beside it. --draw makes table and picture
from it once more, and runs nothing.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil
from gpu_check import flags_of

REPO = Path(__file__).resolve().parent.parent.parent
EPISODES = 8  # of a step
MORE = 20  # steps of the run after the last look: at its end it takes itself apart
FLAGS = {
    "dataset": "debug_assets/train.parquet",
    "eval_dataset": "debug_assets/test.parquet",
    "num_eval_prompts": 16,
    "num_evals": 13,
    "model_name_or_path": "debug_assets/model",
    "dtype": "float32",
    "gradient_checkpointing": False,
    "response_length": 1,
    "local_rollout_batch_size": 4,
    "number_samples_per_prompt": 2,
    "local_mini_batch_size": EPISODES,
    "per_device_train_batch_size": EPISODES,
    "reward_workers": 2,
    "save_freq": 70,
    "keep_last_n": 3,
    "run_name": "run",
}
REWARD = """
import os

calls = 0


def score(data_source, response, ground_truth, extra_info):
    global calls
    calls += 1
    if calls == LAST_CALL:
        os._exit(1)
    return float(response == ground_truth[:1])
"""
LASTING = ["learner", "vLLM", "fork server", "reward workers", "resource tracker"]
ROLES = [*LASTING, "programs", "zombies", "other"]


# --------------------------------------------------------------------------- looking at processes


def roles_of(learner):
    """{role: its processes}, of a psutil.Process and all that it has started."""
    roles = {role: [] for role in ROLES}
    roles["learner"].append(learner)
    for process in learner.children(recursive=True):
        try:
            roles[role_of(process, learner)].append(process)
        except psutil.NoSuchProcess:  # it has ended meanwhile
            continue
    return roles


def role_of(process, learner):
    if process.status() == psutil.STATUS_ZOMBIE:
        return "zombies"
    command = " ".join(process.cmdline())
    if "multiprocessing.resource_tracker" in command:
        return "resource tracker"
    if "multiprocessing.forkserver" in command:
        return "fork server" if process.ppid() == learner.pid else "reward workers"
    if "multiprocessing.spawn" in command and process.ppid() == learner.pid:
        return "vLLM"
    return "programs" if f"{REPO}/scripts/" in command else "other"


def memory_of(process):
    """{"own", "pss", "uss", "rss": bytes} of a process; own: see above."""
    text = Path(f"/proc/{process.pid}/smaps_rollup").read_text("utf-8")
    kib = {name: int(size) for name, size in re.findall(r"^(\w+): +(\d+) kB$", text, re.M)}
    sizes = {
        "own": kib["Pss_Anon"] + kib["Pss_Shmem"] + kib["SwapPss"],
        "pss": kib["Pss"] + kib["SwapPss"],
        "uss": kib["Private_Clean"] + kib["Private_Dirty"],
        "rss": kib["Rss"],
    }
    return {name: 1024 * size for name, size in sizes.items()}


def files_in_shm(process):
    """Those that a process has open or mapped; of deleted ones, too."""
    maps = Path(f"/proc/{process.pid}/maps").read_text("utf-8")
    found = set(re.findall(r"/dev/shm/.*$", maps, re.M))
    for descriptor in Path(f"/proc/{process.pid}/fd").iterdir():
        try:
            path = os.readlink(descriptor)
        except FileNotFoundError:  # closed meanwhile
            continue
        if path.startswith("/dev/shm/"):
            found.add(path)
    return found


def files_below(folder):
    return {str(path) for path in Path(folder).rglob("*") if not path.is_dir()}


def look(learner, step, temporary):
    """A line of the results."""
    line = {"step": step, "roles": {}}
    shm = set()
    for role, processes in roles_of(learner).items():
        sums = Counter(processes=0, threads=0, fds=0, own=0, pss=0, uss=0, rss=0)
        for process in processes:
            if role == "zombies":
                sums["processes"] += 1
                continue
            try:
                shm |= files_in_shm(process)
                if role == "vLLM":
                    shm |= files_below(process.cwd())
                found = {"processes": 1, "threads": process.num_threads()}
                found |= {"fds": process.num_fds()} | memory_of(process)
            except (psutil.NoSuchProcess, ProcessLookupError, FileNotFoundError):
                continue  # ended meanwhile
            sums.update(found)
        line["roles"][role] = dict(sums)
    line["files"] = {"shm": len(shm), "tmp": len(files_below(temporary))}
    return line


# -------------------------------------------------------------------------------------------- a run


def steps_seen(learner, path, args):
    """Yields the number of completed steps, at the first and at each multiple of args.every.

    learner: the process; path: of its metrics.jsonl. It ends with args.steps, or with the learner.
    """
    while not path.exists() and learner.poll() is None:
        time.sleep(0.1)
    if learner.poll() is not None:
        return
    step, due = 0, 1
    with open(path, "rb") as metrics:
        while due <= args.steps and learner.poll() is None:
            step += metrics.read().count(b"\n")
            if step >= due:
                yield step
                due = (step // args.every + 1) * args.every
            time.sleep(0.01)


def run(args, flags, folder):
    """Runs the script, and writes a line to args.results every args.every steps.

    RuntimeError: it failed; with its output.
    """
    (folder / "tmp").mkdir()
    (folder / "reward.py").write_text(REWARD.replace("LAST_CALL", str(args.worker_calls)), "utf-8")
    options = FLAGS | {"total_episodes": (args.steps + MORE) * EPISODES, "output_dir": folder}
    options["reward_fn"] = f"{folder}/reward.py:score"
    environment = {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", **os.environ}
    environment["TMPDIR"] = str(folder / "tmp")
    with (
        open(folder / "output.txt", "w", encoding="utf-8") as output,
        open(args.results, "w", encoding="utf-8") as results,
    ):
        learner = psutil.Popen(
            [sys.executable, args.script, *flags_of(options), *flags],
            cwd=REPO,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
        try:
            for step in steps_seen(learner, folder / "run/metrics.jsonl", args):
                line = look(learner, step, folder / "tmp")
                for role in set(LASTING) - {"reward workers"}:  # which may be being replaced
                    if line["roles"][role]["processes"] != 1:
                        printed = (folder / "output.txt").read_text("utf-8")
                        raise RuntimeError(f"{describe(line)}: not one {role}\n{printed}")
                results.write(json.dumps(line) + "\n")
                print(describe(line), flush=True)
            learner.wait()
        finally:
            if learner.poll() is None:
                learner.kill()  # the others end with it
            learner.wait()
    if learner.returncode:
        raise RuntimeError((folder / "output.txt").read_text("utf-8"))
    metrics = read_lines(folder / "run/metrics.jsonl")
    for name in ("time/training", "time/checkpoint"):
        if any(name in line for line in metrics):  # flags may turn checkpoints off
            first, last = medians_of(metrics, name)
            print(f"{name}, median: {first:.4f} to {last:.4f} s")
    failures = EPISODES * sum(line["objective/reward_failures"] for line in metrics)
    print(f"rewards that failed: {failures:.0f}")


def medians_of(metrics, name):
    """Medians of a metric over the first and the last tenth of the lines that have it."""
    values = [line[name] for line in metrics if name in line]
    tenth = max(1, len(values) // 10)
    return [statistics.median(part) for part in (values[:tenth], values[-tenth:])]


def read_lines(path):
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def describe(line):
    """A look, in short."""
    parts = [f"step {line['step']}:"]
    for role, found in line["roles"].items():
        if found["processes"]:
            parts.append(f"{role} {found['own'] / 2**20:.2f} MiB ({found['processes']})")
    return " ".join([parts[0], ", ".join(parts[1:])])


# --------------------------------------------------------------------------- the table, the picture


def slope_of(steps, sizes):
    """KiB per 1,000 steps, of bytes by step.

    >>> slope_of([0, 500, 1000], [0, 1024, 2048])
    2.0
    """
    return statistics.linear_regression(steps, sizes).slope * 1000 / 1024


def growth_of(lines, start):
    """{role: its row of the table}, of looks from step `start` on; see above."""
    lines = [line for line in lines if line["step"] >= start]
    if len(lines) < 4:
        raise ValueError(f"{len(lines)} looks from step {start} on are too few")
    steps = [line["step"] for line in lines]
    late = len(lines) // 2
    rows = {}
    for role in [*ROLES, "all"]:
        found = [all_of(line) if role == "all" else line["roles"][role] for line in lines]
        if not any(each["processes"] for each in found):
            continue
        own = [each["own"] for each in found]
        rows[role] = {
            "processes": found[-1]["processes"],
            "mib": [own[0] / 2**20, own[-1] / 2**20],
            "grown_kib": (own[-1] - own[0]) / 2**10,
            "slope": slope_of(steps, own),
            "late_slope": slope_of(steps[late:], own[late:]),
            "threads": [found[0]["threads"], found[-1]["threads"]],
            "fds": [found[0]["fds"], found[-1]["fds"]],
        }
    return rows


def all_of(line):
    """The sums over the roles of a look, but for programs, which come and go."""
    sums = Counter()
    for role in ROLES:
        if role != "programs":
            sums.update(line["roles"][role])
    return sums


def print_table(lines, start):
    first = next(line for line in lines if line["step"] >= start)
    last = lines[-1]
    print(f"\nFrom step {first['step']} to step {last['step']}, {len(lines)} looks in all:\n")
    print("| role | processes | MiB | grown KiB | KiB/1,000 | of late | threads | fds |")
    print("|---|---|---|---|---|---|---|---|")
    for role, row in growth_of(lines, start).items():
        cells = [role, row["processes"], "{:.1f} to {:.1f}".format(*row["mib"])]
        cells += [f"{row[name]:,.0f}" for name in ("grown_kib", "slope", "late_slope")]
        cells += ["{} to {}".format(*row[name]) for name in ("threads", "fds")]
        print(f"| {' | '.join(map(str, cells))} |")
    for name in first["files"]:
        print(f"files in {name}: {first['files'][name]} to {last['files'][name]}")


def draw(lines, start):
    """Left the memory of each role, right what it has grown since step `start`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.3), layout="constrained")
    whole, change = figure.subplots(1, 2)
    steps = [line["step"] for line in lines]
    late = [step for step in steps if step >= start]
    for role in LASTING:
        own = [line["roles"][role]["own"] / 2**20 for line in lines]
        since = own[-len(late) :]
        whole.plot(steps, own, marker=".", linewidth=1, label=role)
        change.plot(late, [size - since[0] for size in since], marker=".", linewidth=1)
    whole.set_yscale("log")
    whole.set_ylabel("memory, MiB")
    change.set_ylabel(f"grown since step {late[0]}, MiB")
    for axes in (whole, change):
        axes.set_xlabel("training step")
        axes.grid(alpha=0.3)
    figure.legend(loc="outside upper center", ncols=len(LASTING), fontsize=8)
    return figure


def main():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--steps", type=int, default=3000)
    add("--every", type=int, default=100, help="steps between looks")
    add("--from", type=int, default=500, dest="start", help="step from which growth counts")
    add("--worker_calls", type=int, default=0, help="a reward worker dies in this call; 0: none")
    add("--script", type=os.path.expanduser, default="grpo_vllm_async.py", help="or a copy of it")
    add("--results", type=Path, default=Path("output/soak.jsonl"))
    add("--draw", action="store_true", help="run nothing: print the table, draw the picture")
    args, flags = parser.parse_known_args()
    args.results = args.results.expanduser()
    if not args.draw:
        program = ["scripts/dev/make_debug_assets.py"]
        subprocess.run([sys.executable, *program], cwd=REPO, check=True, capture_output=True)
        args.results.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            run(args, flags, Path(folder))
    lines = read_lines(args.results)
    print_table(lines, args.start)
    picture = args.results.with_suffix(".png")
    draw(lines, args.start).savefig(picture, dpi=90)
    print(f"Wrote {picture}")


if __name__ == "__main__":
    main()
