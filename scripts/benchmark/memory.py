"""What a run takes in memory on a CPU, beside what the preflight plans and PyTorch counts.

    python scripts/benchmark/memory.py [--ranks 2] [--fsdp2] SCRIPT FLAGS...

Runs SCRIPT on one or more ranks, and looks ten times a second at all processes of the run together,
with pages that they share counted once (PSS). From their peak it takes off what each process had
before it loaded a model. Each process's own peak is the kernel's (VmHWM), which misses nothing.
Linux only. Nothing else large should run beside it.
"""

import argparse
import contextlib
import functools
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

REPO = Path(__file__).resolve().parents[2]
GIB = 2**30


def pss(process):
    """Bytes of a process, with shared pages in proportion."""
    with contextlib.suppress(psutil.Error):
        return process.memory_full_info().pss
    return 0


def peak_rss(pid):
    """The most that a process has held since its peak was reset, in bytes."""
    status = Path(f"/proc/{pid}/status").read_text("utf-8")
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


# ------------------------------------------------------------------------------- inside of the run


def note_before(module, name, prepare):
    """Has a function of the script write down, before its first call, what its process holds."""
    function = getattr(module, name)

    @functools.wraps(function)
    def noted(*args, **kwargs):
        path = Path(os.environ["NOTES"], str(os.getpid()))
        if not path.exists():
            prepare()
            Path("/proc/self/clear_refs").write_text("5", "utf-8")  # resets the peak
            path.write_text(f"{pss(psutil.Process())} {peak_rss('self')}", "utf-8")
        return function(*args, **kwargs)

    setattr(module, name, noted)


def import_peft():
    """Which a script does that has loaded a model to add adapters to."""
    importlib.import_module("peft")


def import_vllm():
    importlib.import_module("vllm").LLM  # noqa: B018


if "NOTES" in os.environ:  # in a rank, or in vLLM's process, which imports this file as well
    sys.path[:0] = [str(REPO), str(REPO / "tests")]
    script = importlib.import_module(os.environ["SCRIPT"])
    note_before(script, "load_model", import_peft)
    note_before(script, "start_llm", import_vllm)


def run_rank():
    """Does what `python SCRIPT FLAGS...` does."""
    if "FSDP2" in os.environ:
        importlib.import_module("helpers.fsdp2").allow_on_cpu()
    try:
        script.main(script.tyro.cli(script.Args))
    except BaseException as error:
        script.end_at_once(error)


# ---------------------------------------------------------------------------- outside, looking on


def look_on(process, notes):
    """The largest sum over all processes of the run, less the notes, and the peak of each."""
    largest, peaks = 0, {}
    while process.poll() is None:
        sizes = {}
        for each in [process, *process.children(recursive=True)]:
            note = notes / str(each.pid)
            if note.exists() and len(before := note.read_text("utf-8").split()) == 2:
                sizes[each.pid] = pss(each) - int(before[0])
                with contextlib.suppress(OSError, IndexError):  # it has just ended
                    peaks[each.pid] = peak_rss(each.pid) - int(before[1])
        largest = max(largest, sum(sizes.values()))
        time.sleep(0.1)
    return largest, sorted(peaks.values(), reverse=True)


def planned(path, flags, ranks, is_fsdp2):
    """Bytes of all learners by the preflight, of all engines, and of all learners as counted."""
    sys.path[:0] = [str(REPO), str(REPO / "scripts")]
    preflight, plan = map(importlib.import_module, ("preflight", "plan"))
    fake_memory = importlib.import_module("fake_memory")
    file = REPO / "scripts/accelerate" / f"{'fsdp2' if is_fsdp2 else 'ddp'}.yaml"
    options = preflight.Options(num_processes=ranks, num_gpus=0, config_file=str(file))
    preflight.read_config_file(options)
    script = preflight.load_script(path)
    args, _ = preflight.parse_flags(script, flags)
    run = preflight.Run(script, options, args)
    for mistake in preflight.check(run):
        sys.exit(preflight.one_line(mistake))
    engines = len(args.vllm_gpus) or ranks
    counted = ranks * fake_memory.count(run)
    return ranks * plan.learner_needs(run), engines * plan.engine_memory(run), counted


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--fsdp2", action="store_true", help="shard the models")
    parser.add_argument("script", type=os.path.expanduser)
    parser.add_argument("flags", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    of_learners, of_engines, counted = planned(
        options.script, options.flags, options.ranks, options.fsdp2
    )
    with tempfile.TemporaryDirectory() as notes:
        environment = os.environ | {
            "NOTES": notes,
            "SCRIPT": Path(options.script).stem,
            "ACCELERATE_USE_CPU": "true",
            "OMP_NUM_THREADS": "1",
            # The C library would keep what FSDP2 frees after each layer
            "MALLOC_MMAP_THRESHOLD_": str(2**18),
        }
        if options.fsdp2:
            environment["FSDP2"] = "1"
        command = [sys.executable]
        if options.ranks > 1:
            command += ["-m", "torch.distributed.run", "--standalone"]
            command += [f"--nproc_per_node={options.ranks}"]
        command += [__file__, *options.flags, f"--output_dir={notes}/output"]
        process = psutil.Popen(command, cwd=REPO, env=environment, stdout=subprocess.DEVNULL)
        largest, sizes = look_on(process, Path(notes))
        if process.returncode != 0:
            sys.exit(f"{options.script} ended with status {process.returncode}")
    plan = of_learners + of_engines
    measured = {
        "script": options.script,
        "ranks": options.ranks,
        "fsdp2": options.fsdp2,
        "peak_gib": round(largest / GIB, 2),
        "of_processes_gib": [round(size / GIB, 2) for size in sizes],
        "planned_gib": round(plan / GIB, 2),
        "of_learners_gib": round(of_learners / GIB, 2),
        "of_learners_counted_gib": round(counted / GIB, 2),
        "planned/peak": round(plan / largest, 2),
    }
    print(json.dumps(measured))


if __name__ == "__main__":
    if "NOTES" in os.environ:
        run_rank()
    else:
        main()
