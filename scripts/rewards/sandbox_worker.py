"""Run the test cases of code_sandbox.py, as process 1 of its sandbox.

The sandbox cannot read this project, so code_sandbox.py passes the text of this file to `python
-c`. stdin is a file with a job: JSON texts, each after eight bytes with its length. The first one
has the program, its number of test cases, and its limits. The others are the test cases.

This process writes {} when it is ready, and then one line for each test case:
{"reached_end": bool, "stdout": str}. It reads a test case only when it is that one's turn, so that
programs, which run in forks of this process, do not have later ones in their memory.
"""

import collections.abc
import contextlib
import ctypes
import errno
import json
import os
import re
import resource
import select
import shutil
import signal
import struct
import sys
import time
import types

LOOK_SECONDS = 0.05  # between two looks at the memory of all processes
PR_SET_DUMPABLE, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 4, 22, 2
LIBC = ctypes.CDLL(None)


def canonical(value: object) -> str:
    """Return a line of ASCII that is the same for two values if they are equal in Python.

    Raise TypeError for a value that is neither None, a number, text, bytes, a list, a tuple, a set
    nor a dict, or that contains such a value.

    >>> canonical([True, 1.0, 0.5]), canonical((1,)), canonical({"b": {2, 1}})
    ('[1/1, 1/1, 1/2]', '(1/1)', "{'b': {1/1, 2/1}}")
    """
    if value is None or value is ...:
        return str(value)
    if isinstance(value, str):
        return ascii(str.__str__(value))
    if isinstance(value, bytes | bytearray):
        return f"b{value.hex()}"
    if isinstance(value, list):
        return f"[{', '.join(map(canonical, value))}]"
    if isinstance(value, tuple):
        return f"({', '.join(map(canonical, value))})"
    if isinstance(value, collections.abc.Set):
        return f"{{{', '.join(sorted(map(canonical, value)))}}}"
    if isinstance(value, dict):
        items = sorted(f"{canonical(key)}: {canonical(item)}" for key, item in value.items())
        return f"{{{', '.join(items) or ':'}}}"
    if hasattr(value, "__index__"):
        return f"{value.__index__():x}/1"
    if hasattr(value, "as_integer_ratio"):
        try:
            numerator, denominator = value.as_integer_ratio()
        except (OverflowError, ValueError):  # infinity; and nan, which no literal is
            return str(float(value))
        return f"{numerator:x}/{denominator:x}"
    raise TypeError(f"not plain data: {type(value)}")


def filter_calls(architecture: int, closed: list[int], restricted: list[tuple[int, int]]):
    """Close system calls to this process and its children with a seccomp filter.

    An instruction is (code, steps to skip if true, steps to skip if not, operand). It works on the
    call's struct seccomp_data: the number at 0, the architecture at 4, the first argument at 16.
    """
    load, if_equal, if_at_least, leave = 0x20, 0x15, 0x35, 0x06
    allow, deny = (leave, 0, 0, 0x7FFF0000), (leave, 0, 0, 0x50000 | errno.ENOSYS)
    steps = [(load, 0, 0, 4), (if_equal, 1, 0, architecture), deny]
    # x32's calls have the architecture of x86-64, and this bit
    steps += [(load, 0, 0, 0), (if_at_least, 0, 1, 0x40000000), deny]
    for number in closed:
        steps += [(if_equal, 0, 1, number), deny]
    for number, first_argument in restricted:
        steps += [(if_equal, 0, 4, number)]
        steps += [(load, 0, 0, 16), (if_equal, 0, 1, first_argument), allow, deny]
    steps.append(allow)
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = struct.pack("HP", len(steps), ctypes.addressof(code))
    if LIBC.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program, 0, 0):
        raise OSError("seccomp refuses the filter")


def run_child(job: dict, case: dict, secret: bytes, source: int, sink: int):
    """Run the program on a test case. Return only if it reaches its end.

    The program reads from the file `source`. What it prints goes to `sink`, if that is what the
    case asks for. A call's value goes there otherwise, or the secret if a test raised no error.
    """
    for name, value in job["rlimits"].items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))
    filter_calls(**job["filter"])
    reads_stdin = "stdin" in case
    os.dup2(sink if reads_stdin else 0, 1)  # 0 is still /dev/null here
    os.dup2(0, 2)
    os.dup2(source, 0)
    code = job["code"]
    if reads_stdin:
        os.execve(sys.executable, [sys.executable, "-s", "-P", "-c", code], dict(os.environ))
    LIBC.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
    module = types.ModuleType("solution")
    sys.modules["solution"] = sys.modules["__main__"] = module
    exec(compile(code, "solution.py", "exec"), module.__dict__)
    if "test" in case:
        exec(compile(case["test"], "test.py", "exec"), module.__dict__)
        os.write(sink, secret)
        return
    exec(compile(case["setup"], "test.py", "exec"), module.__dict__)
    result = eval(compile(case["call"], "test.py", "eval"), module.__dict__)
    with open(sink, "w", encoding="utf-8") as file:
        file.write(canonical(result))


def memory_of(process: str) -> int:
    """Return the bytes of a process. Of bytes that n processes share, one n-th counts."""
    try:
        with open(f"/proc/{process}/smaps_rollup", encoding="utf-8") as file:
            return 1024 * sum(map(int, re.findall(r"Pss: +(\d+)", file.read())))
    except PermissionError:  # it has made itself not dumpable: shared ones are counted whole
        with open(f"/proc/{process}/statm", encoding="utf-8") as file:
            return resource.getpagesize() * int(file.read().split()[1])


def memory_of_all() -> int:
    """Return the bytes of all processes except this one."""
    total = 0
    for process in os.listdir("/proc"):
        if process.isdecimal() and process != "1":
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                total += memory_of(process)
    return total


def read_until_end(pid: int, stream: int, limits: dict) -> tuple[bytes, bool]:
    """Return what a child wrote, and whether it ended by itself.

    It did not if it took too long, or exceeded the limits of output or of memory in sum.
    """
    written, has_ended = b"", False
    deadline = time.monotonic() + limits["case_seconds"]
    next_look = time.monotonic() + LOOK_SECONDS
    exit_of_child = os.pidfd_open(pid)
    watched = select.poll()
    watched.register(stream, select.POLLIN)
    watched.register(exit_of_child, select.POLLIN)
    watched.register(1, 0)  # only whether its other end is closed
    while not has_ended and len(written) <= limits["output"] and time.monotonic() < deadline:
        if time.monotonic() >= next_look:
            if memory_of_all() > limits["memory"]:
                break
            next_look = time.monotonic() + LOOK_SECONDS
        ready = dict(watched.poll(1000 * max(0, min(deadline, next_look) - time.monotonic())))
        if 1 in ready:
            # The reward's worker has ended. Linux does not report the end of a parent that is
            # another user's, as it is if root started it
            sys.exit("the results are not read any more")
        if stream not in ready:
            has_ended = exit_of_child in ready
            continue
        chunk = os.read(stream, 65536)
        written += chunk
        if not chunk:
            watched.unregister(stream)
    os.close(exit_of_child)
    return written, has_ended and len(written) <= limits["output"]


def end_all(pid: int) -> int:
    """Kill every process except this one. Return the wait status of the child `pid`."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)
    return status


def run_case(job: dict, case: dict, job_file: int) -> dict:
    """Run the program in a child on one test case. Return what it printed if it reached its end."""
    secret = os.urandom(16)
    source = os.memfd_create("stdin")
    with open(source, "wb", closefd=False) as file:
        file.write(case.get("stdin", "").encode())
    os.lseek(source, 0, os.SEEK_SET)
    stream, sink = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(job_file)
            run_child(job, case, secret, source, sink)
            status = 0
        finally:
            os._exit(status)
    os.close(sink)
    os.close(source)
    written, has_ended = read_until_end(pid, stream, job["limits"])
    reached_end = end_all(pid) == 0 and has_ended
    os.close(stream)
    if "test" in case:
        written, reached_end = b"", reached_end and written == secret
    stdout = written.decode(errors="replace") if reached_end else ""
    return {"reached_end": reached_end, "stdout": stdout}


def read_text(file: int) -> dict:
    return json.loads(os.read(file, int.from_bytes(os.read(file, 8), "big")))


def main():
    if os.getpid() != 1:
        # end_all would kill all processes of the user
        sys.exit("not the first process of a sandbox")
    job_file = os.dup(0)
    job = read_text(job_file)
    with open(os.devnull, "r+b") as nowhere:
        os.dup2(nowhere.fileno(), 0)
    # The program runs as the same user. A process that is not dumpable keeps its memory and files
    # closed to that user
    LIBC.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    print("{}", flush=True)
    for _ in range(job["number_cases"]):
        case = read_text(job_file)
        # If a program makes its files impossible to remove, there are no further test cases
        for entry in os.scandir("/tmp"):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            else:
                os.unlink(entry.path)
        print(json.dumps(run_case(job, case, job_file)), flush=True)


if __name__ == "__main__":
    main()
