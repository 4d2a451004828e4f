"""Reward code: the fraction of an example's test cases that the program in the response passes.

    ppo_vllm_async.py --reward_fn scripts/rewards/code_sandbox.py:compute_score ...

The program is in Python and runs in a sandbox. `ground_truth` is one of these, as JSON or not:

    ["assert f(1) == 2", ...]
        each assertion is a test case
    {"test_list": [...], "test_setup_code": "..."}
        the same in MBPP's form; the set-up runs after the program
    {"inputs": ["1 2\\n", ...], "outputs": ["3\\n", ...]}
    [{"input": "1 2\\n", "output": "3\\n", "testtype": "stdin"}, ...]
        programs that read stdin and write stdout; the second form is LiveCodeBench's
    {"test": "def check(candidate): ...", "entry_point": "f"}
        HumanEval's form, with one test case; an additional "prompt" is put before the program

The sandbox is bubblewrap (`apt-get install bubblewrap`; 0.8 or newer, Linux 5.14 or newer, x86-64
or aarch64). It has namespaces without a network, a read-only system without /home, /root and this
project, an empty environment, its own /tmp in memory, and CLOSED_CALLS. Limits are constants below.
Four of them are environment variables: TANDEM_SANDBOX_SECONDS per test case,
TANDEM_SANDBOX_TOTAL_SECONDS per response, TANDEM_SANDBOX_MEMORY_MB per process and for their sum,
and TANDEM_SANDBOX_PROCESSES per response (threads count). Without bubblewrap this file cannot be
imported, so that no program ever runs unprotected.

The script's --reward_timeout (10) must exceed TANDEM_SANDBOX_TOTAL_SECONDS (8) by two seconds. When
the latter is over, the remaining test cases count as failed. The former ends the worker, and counts
as a failure of the reward.

Each test case starts the program again in its own process, which has an empty /tmp and cannot see
later test cases. It counts only if that process reaches its end, so exiting early, printing or
killing is not a success. When the score is known, no process of the program is left.

Where answers are judged:

1. `assert f(1) == 2`, or any assertion that something equals a literal: the program's process sends
   the value out as plain data (None, numbers, text, bytes, lists, tuples, sets, dicts), and it is
   compared outside. The literal is never in the sandbox.
2. Programs for stdin and stdout: expected outputs stay outside as well.
3. Any other assertion, and HumanEval's `check`, run in the process of the program that they judge.
   A malicious program can pass them, for example with objects that equal everything.

Some gaps remain, because an ordinary user has no means against them on every system. The sum of
memory is checked 20 times a second, and between checks processes can use more, each up to its own
limit. The system can be read (/proc, /usr). A hole in the kernel is a hole in the sandbox. Correct
programs cannot use sockets other than pairs (and so no multiprocessing.Manager), shared memory and
semaphores by name (and so no multiprocessing.Pool), or os.nice.
"""

import ast
import contextlib
import inspect
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

CASE_SECONDS = float(os.environ.get("TANDEM_SANDBOX_SECONDS", "4"))
TOTAL_SECONDS = float(os.environ.get("TANDEM_SANDBOX_TOTAL_SECONDS", "8"))
MEMORY_MB = int(os.environ.get("TANDEM_SANDBOX_MEMORY_MB", "1024"))
PROCESSES = int(os.environ.get("TANDEM_SANDBOX_PROCESSES", "16"))
TMP_MB = 64  # all files in /tmp; one file may have a quarter of that
OUTPUT_BYTES = 1_000_000  # what a test case may print
# As seccomp names them (AUDIT_ARCH_...). Their order is that of the numbers below.
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# System calls that fail with ENOSYS in the sandbox, with their numbers.
# Queues, memory and keys that outlive their process. The keys are those of the worker besides.
CLOSED_CALLS = {"shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186)}
CLOSED_CALLS |= {"mq_open": (240, 180), "add_key": (248, 217), "request_key": (249, 218)}
CLOSED_CALLS |= {"keyctl": (250, 219)}
# Memory that no limit counts.
CLOSED_CALLS |= {"memfd_create": (319, 279), "memfd_secret": (447, 447), "vmsplice": (278, 75)}
CLOSED_CALLS |= {"io_setup": (206, 0), "landlock_create_ruleset": (444, 444)}
CLOSED_CALLS |= {"setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7)}
CLOSED_CALLS |= {"setxattrat": (463, 463)}
# The same, and ways out: vsock, netlink, packets. Pairs of sockets need neither.
CLOSED_CALLS |= {"socket": (41, 198), "setsockopt": (54, 208)}
# Other processes' memory and files.
CLOSED_CALLS |= {"ptrace": (101, 117), "process_vm_readv": (310, 270), "kcmp": (312, 272)}
CLOSED_CALLS |= {"process_vm_writev": (311, 271), "process_madvise": (440, 440)}
CLOSED_CALLS |= {"pidfd_getfd": (438, 438)}
# Process 1 of the sandbox could be slowed down, and would be late to end the others.
CLOSED_CALLS |= {"setpriority": (141, 140), "ioprio_set": (251, 30), "sched_setattr": (314, 274)}
CLOSED_CALLS |= {"sched_setparam": (142, 118), "sched_setscheduler": (144, 119)}
# Much of the kernel that no solution needs.
CLOSED_CALLS |= {"io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "bpf": (321, 280)}
CLOSED_CALLS |= {"io_uring_register": (427, 427), "userfaultfd": (323, 282)}
CLOSED_CALLS |= {"perf_event_open": (298, 241), "fanotify_init": (300, 262)}
# System calls that fail with ENOSYS unless their first argument is this: a family of sockets, or
# for the others 0, the process that asks.
RESTRICTED_CALLS = {"socketpair": ((53, 199), socket.AF_UNIX)}
RESTRICTED_CALLS |= {"prlimit64": ((302, 261), 0), "sched_setaffinity": ((203, 122), 0)}


def compute_score(
    data_source: str, response: str, ground_truth: Any, *, extra_info: Any = None
) -> float:
    """Return the fraction of the test cases that the program passes.

    ValueError: a ground truth of no known form; RuntimeError: no sandbox.
    """
    prefix, cases = parse_ground_truth(ground_truth)
    return sum(run_in_sandbox(prefix + extract_code(response), cases)) / len(cases)


def extract_code(response: str) -> str:
    r"""Return the program in a response: its last Python block, else its last bare one, else all.

    >>> extract_code(
    ...     "First\n```python\nx = 1\n```\nthen\n```python\nx = 2\n```\n"
    ...     "and the output:\n```\n2\n```"
    ... )
    'x = 2\n'
    """
    blocks = [(language, code) for language, code in fenced_blocks(response) if code.strip()]
    of_python = [code for language, code in blocks if language == "python"]
    bare = [code for language, code in blocks if language == ""]
    return (of_python or bare or [response])[-1]


@dataclass
class Fence:
    """A fence of a block: a line such as `1. Solution: ~~~python`."""

    number: int  # of the line
    width: int  # of its margin: spaces, and marks of lists and quotes
    marks: str
    language: str  # what it says, which is `python` of all of its names
    opens: bool
    closes: bool


MARGIN = re.compile(r"(?:[ \t>]|[-+*][ \t]|\d+[.)][ \t])*")
MARKS = re.compile(r"`{3,}|~{3,}")
NEAR = 200  # fences in which the end of a block is looked for, so that the search takes linear time


def read_fence(number: int, line: str) -> Fence | None:
    """Margin and marks are looked for one after the other: a line of 100,000 marks is read once.

    In the middle of a line only a word may follow: not "put it between ``` and ```". What closes a
    block stands alone, but for tags such as </answer>.
    """
    line = line.rstrip()
    width = MARGIN.match(line).end()
    marks = MARKS.search(line, width)
    if not marks or "`" in line[marks.end() :]:
        return None
    words, info = line[width : marks.start()], line[marks.end() :]
    is_python = re.match(r"[ \t{.]*(?:python|py)[\d.]*(?![\w-])", info, re.IGNORECASE)
    language = "python" if is_python else info.strip()
    opens = not words or (marks[0][0] == "`" and re.fullmatch(r"\w*", language))
    is_alone = not line[: marks.start()].strip(" \t>")
    closes = is_alone and re.fullmatch(r"(?:\s|</\w+>)*", info)
    return Fence(number, width, marks[0], language, bool(opens), bool(closes))


def fenced_blocks(text: str) -> list[tuple[str, str]]:
    r"""Return (language, code) of each fenced block of a Markdown text.

    They are CommonMark's, and what models write besides: a block may open in the middle of a line,
    and lines in a list may be indented or not. Fences in a string of three quotes are its text. A
    block that is not closed ends with the text, and one of no Python where one of Python opens.

    >>> fenced_blocks("1. So:\n   ```Python title=a.py\n   if x:\n       y()\n   ```\nIt: ```\n1")
    [('python', 'if x:\n    y()\n'), ('', '1')]
    """
    lines = text.splitlines(keepends=True)
    fences = [fence for i, line in enumerate(lines) if (fence := read_fence(i, line))]
    quotes = count_quotes(lines)
    blocks, after = [], 0
    for index, fence in enumerate(fences):
        in_string = fence.language != "python" and ends_in_string(quotes, after, fence.number)
        if fence.number < after or in_string or not fence.opens:
            continue
        end, closing = find_end(quotes, fence, fences[index + 1 : index + 1 + NEAR])
        width = max(fence.width, closing.width if closing else 0)
        blocks.append((fence.language, without_margin(lines[fence.number + 1 : end], width)))
        after = end + 1 if closing else end
    return blocks


def find_end(quotes: list, opening: Fence, later: list[Fence]) -> tuple[int, Fence | None]:
    """Return the number of the line after a block, and its closing fence, if it has one."""
    first = None
    for fence in later:
        if fence.language == "python" and opening.language != "python":
            return fence.number, None
        if fence.closes and fence.marks.startswith(opening.marks):
            if not ends_in_string(quotes, opening.number + 1, fence.number):
                return fence.number, fence
            first = first or fence
    # No string, it seems, but three quotes within one
    return (first.number, first) if first else (len(quotes) - 1, None)


def count_quotes(lines: list[str]) -> list[tuple[int, int]]:
    """Count each kind of three quotes before each line, and at the end."""
    counts = [(0, 0)]
    for line in lines:
        double, single = counts[-1]
        counts.append((double + line.count('"""'), single + line.count("'''")))
    return counts


def ends_in_string(quotes: list, start: int, end: int) -> bool:
    """Return whether a string of three quotes is open after these lines."""
    return any(
        (after - before) % 2 for before, after in zip(quotes[start], quotes[end], strict=True)
    )


def without_margin(lines: list[str], width: int) -> str:
    """Return lines without this many characters of margin, or as many as the first line has."""
    first = next((line for line in lines if line.strip()), "")
    width = min(width, len(first) - len(first.lstrip(" \t>")))
    return "".join(line[:width].lstrip(" \t>") + line[width:] for line in lines)


def parse_ground_truth(ground_truth: Any) -> tuple[str, list[dict]]:
    """Return (code before the program, test cases).

    A case has `test`, or `stdin` and `expected`, or `setup`, `call` and `expected`.
    """
    truth = ground_truth
    if isinstance(truth, str):
        with contextlib.suppress(json.JSONDecodeError):
            truth = json.loads(truth)
    truth = {"test_list": truth} if isinstance(truth, list) else truth
    if isinstance(truth, dict):  # nulls are Arrow's, for the keys of other rows
        truth = {key: value for key, value in truth.items() if value is not None}
    prefix, cases = "", []
    match truth:
        case {"fn_name": _}:
            raise ValueError("ground_truth has fn_name: inputs of functions are not known")
        case {"test_list": [*tests]}:
            cases = [make_case(truth.get("test_setup_code", ""), test) for test in tests]
        case {"inputs": [*inputs], "outputs": [*outputs]}:
            pairs = zip(inputs, outputs, strict=True)
            cases = [stdin_case(given, expected) for given, expected in pairs]
        case {"test": str(test), "entry_point": function}:
            prefix = truth.get("prompt", "")
            cases = [{"test": f"{test}\ncheck({function})"}]
    if not cases:
        forms = "a list of assertions or of {input, output}, {test_list}, {inputs, outputs} with "
        forms += "lists, or {test, entry_point}"
        raise ValueError(
            f"ground_truth must be {forms}, with at least one test case; it is {str(truth)[:200]}"
        )
    return prefix, cases


def make_case(setup: str, test: str | dict) -> dict:
    """Return the test case of an entry in a list of tests."""
    match test:
        case str():
            return equality_case(setup, test) or {"test": f"{setup}\n{test}"}
        case {"input": given, "output": expected} if test.get("testtype") in (None, "stdin"):
            return stdin_case(given, expected)
    raise ValueError(
        f"a test case must be an assertion, or {{input, output}} of a program, with testtype stdin "
        f"if it has one; it is {str(test)[:200]}"
    )


def stdin_case(given: str | list, expected: str | list) -> dict:
    """Return the test case of a program that reads and writes. APPS can have lists of lines."""
    texts = ["\n".join(part) if isinstance(part, list) else part for part in (given, expected)]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f"what is read and written must be text; it is {str(texts)[:200]}")
    return dict(zip(("stdin", "expected"), texts, strict=True))


def equality_case(setup: str, test: str) -> dict | None:
    """Return the test case of an assertion that something equals a literal, or None for others.

    >>> equality_case("", "assert f(2) == 4, 'two'")
    {'setup': '', 'call': 'f(2)', 'expected': '4/1'}
    >>> equality_case("", "assert f(2) > 3")
    """
    try:
        statements = ast.parse(test).body
    except (SyntaxError, ValueError):
        return None
    match statements:
        case [ast.Assert(test=ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]))]:
            for call, literal in ((left, right), (right, left)):
                with contextlib.suppress(ValueError, TypeError):
                    expected = canonical(ast.literal_eval(literal))
                    return {"setup": setup, "call": ast.unparse(call), "expected": expected}
    return None


def same_output(printed: str, expected: str) -> bool:
    r"""Return whether texts are equal except for whitespace at the ends of lines and of the text.

    >>> same_output("1 \n2\n", "1\n2"), same_output("1 2", "1\n2")
    (True, False)
    """
    texts = (printed, expected)
    one, other = ([line.rstrip() for line in text.strip().splitlines()] for text in texts)
    return one == other


# ------------------------------------------------------------------------------ inside the sandbox
def canonical(value: object) -> str:
    """Return a line of ASCII that is the same for two values if they are equal in Python.

    TypeError: a value that is neither None, a number, text, bytes, a list, a tuple, a set nor a
    dict, and contains nothing else.

    >>> canonical([True, 1.0, 0.5]), canonical((1,)), canonical({"b": {2, 1}})
    ('[1/1, 1/1, 1/2]', '(1/1)', "{'b': {1/1, 2/1}}")
    """
    import collections.abc

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


def run_cases() -> None:
    """Run the test cases as process 1 of the sandbox, started as `python -c` with this source.

    Runs the test cases of a job on stdin one after another, writes {} when it is ready and a line
    for each: {"reached_end": bool, "stdout": str}.

    stdin is a file: eight bytes of length before each JSON text, one with the program and one for
    each test case. A case is read only when it is its turn, so that programs, which are forks of
    this process, don't have later ones in their memory.
    """
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

    def receive():
        return json.loads(os.read(job, int.from_bytes(os.read(job, 8), "big")))

    def filter_calls(architecture, closed, restricted):
        """Close system calls to this process and its children with a seccomp filter.

        An instruction is (what, steps to skip if true, steps to skip if not, operand); it works on
        the call's struct seccomp_data: the number at 0, the architecture at 4, the first argument
        at 16.
        """
        load, if_equal, if_at_least, leave = 0x20, 0x15, 0x35, 0x06
        allow, deny = (leave, 0, 0, 0x7FFF0000), (leave, 0, 0, 0x50000 | errno.ENOSYS)
        steps = [(load, 0, 0, 4), (if_equal, 1, 0, architecture), deny]
        # x32's calls have the architecture of x86-64, and this bit.
        steps += [(load, 0, 0, 0), (if_at_least, 0, 1, 0x40000000), deny]
        for number in closed:
            steps += [(if_equal, 0, 1, number), deny]
        for number, first_argument in restricted:
            steps += [(if_equal, 0, 4, number)]
            steps += [(load, 0, 0, 16), (if_equal, 0, 1, first_argument), allow, deny]
        steps.append(allow)
        code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
        set_seccomp, filter_mode = 22, 2
        program = struct.pack("HP", len(steps), ctypes.addressof(code))
        if ctypes.CDLL(None).prctl(set_seccomp, filter_mode, program, 0, 0):
            raise OSError("seccomp refuses the filter")

    def set_limits():
        for name, value in (
            (resource.RLIMIT_AS, limits["memory"]),
            (resource.RLIMIT_NPROC, limits["processes"]),
            (resource.RLIMIT_FSIZE, limits["file"]),
            (resource.RLIMIT_NOFILE, limits["files"]),
            (resource.RLIMIT_CORE, 0),
        ):
            resource.setrlimit(name, (value, value))

    def run_function(code, case, secret, sink):
        module = types.ModuleType("solution")
        sys.modules["solution"] = sys.modules["__main__"] = module
        exec(compile(code, "solution.py", "exec"), module.__dict__)
        if "test" in case:
            exec(compile(case["test"], "test.py", "exec"), module.__dict__)
            os.write(sink, secret)
        else:
            exec(compile(case["setup"], "test.py", "exec"), module.__dict__)
            result = eval(compile(case["call"], "test.py", "eval"), module.__dict__)
            with open(sink, "w", encoding="utf-8") as file:
                file.write(canonical(result))

    def child(code, case, secret, source, sink):
        set_limits()
        filter_calls(**program["filter"])
        os.close(job)
        os.dup2(source, 0)
        reads_stdin = "stdin" in case
        os.dup2(sink if reads_stdin else nowhere, 1)
        os.dup2(nowhere, 2)
        if reads_stdin:
            os.execve(sys.executable, [sys.executable, "-s", "-P", "-c", code], dict(os.environ))
        ctypes.CDLL(None).prctl(set_dumpable, 1, 0, 0, 0)
        run_function(code, case, secret, sink)

    def memory_of(process):
        """Return the bytes of a process. Of bytes that n processes share, one n-th counts."""
        try:
            with open(f"/proc/{process}/smaps_rollup", encoding="utf-8") as file:
                return 1024 * sum(map(int, re.findall(r"Pss: +(\d+)", file.read())))
        except PermissionError:  # it has made itself not dumpable: shared ones are counted whole
            with open(f"/proc/{process}/statm", encoding="utf-8") as file:
                return resource.getpagesize() * int(file.read().split()[1])

    def memory_of_all():
        """Return the bytes of all processes except this one."""
        total = 0
        for process in os.listdir("/proc"):
            if process.isdecimal() and process != "1":
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                    total += memory_of(process)
        return total

    def wait(pid, stream, seconds):
        """Return what the child wrote, and whether it ended well.

        That is in time, with status 0 and within the limits of output and of memory in sum.
        """
        deadline, written, ended, watched = time.monotonic() + seconds, b"", False, select.poll()
        next_look = time.monotonic() + limits["look_seconds"]
        exit_of_child = os.pidfd_open(pid)
        watched.register(stream, select.POLLIN)
        watched.register(exit_of_child, select.POLLIN)
        watched.register(1, 0)  # only whether its other end is closed
        while not ended and len(written) <= limits["output"] and time.monotonic() < deadline:
            if time.monotonic() >= next_look:
                if memory_of_all() > limits["memory"]:
                    break
                next_look = time.monotonic() + limits["look_seconds"]
            ready = dict(watched.poll(1000 * max(0, min(deadline, next_look) - time.monotonic())))
            if 1 in ready:
                # The worker is gone. Linux does not tell a process of another user, which it is
                # when root started it.
                sys.exit("nobody reads the results any more")
            if stream in ready:
                chunk = os.read(stream, 65536)
                written += chunk
                if not chunk:
                    watched.unregister(stream)
            else:
                ended = exit_of_child in ready
        os.close(exit_of_child)
        # As process 1: everything in the sandbox but this process. So no child of a child lives on
        # into the next case.
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        status = os.waitpid(pid, 0)[1]
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)
        return written, ended and status == 0 and len(written) <= limits["output"]

    if os.getpid() != 1:
        # What `wait` kills would be the whole machine.
        sys.exit("not the first process of a sandbox")
    job = os.dup(0)
    program, set_dumpable = receive(), 4
    code, limits = program["code"], program["limits"]
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    # The program runs as the same user; where it is not dumpable, this process's memory and files
    # are closed to it.
    ctypes.CDLL(None).prctl(set_dumpable, 0, 0, 0, 0)
    print("{}", flush=True)

    for _ in range(program["number_cases"]):
        case = receive()
        # Where this fails there is no further case: the program has made it hard, to its own harm
        for entry in os.scandir("/tmp"):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            else:
                os.unlink(entry.path)
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
                child(code, case, secret, source, sink)
                status = 0
            finally:
                os._exit(status)
        os.close(sink)
        os.close(source)
        written, reached_end = wait(pid, stream, limits["case_seconds"])
        os.close(stream)
        if "test" in case:
            written, reached_end = b"", reached_end and written == secret
        stdout = written.decode(errors="replace") if reached_end else ""
        print(json.dumps({"reached_end": reached_end, "stdout": stdout}), flush=True)


# ----------------------------------------------------------------------------- outside the sandbox
def sandbox_command(drop_root: bool) -> list[str]:
    """Return the command that runs run_cases in bubblewrap.

    Processes are counted per user and user namespace, and each run has a namespace of its own: so
    runs don't use up each other's. They aren't counted for root, though, and in a namespace that
    root makes, everyone is root outside. And nobody cannot reach a Python below /root. So with
    `drop_root` there is a first bubblewrap that only puts together the files; in it root becomes
    nobody, and nobody starts the second.
    """
    bwrap, setpriv, choom = (shutil.which(name) or name for name in ("bwrap", "setpriv", "choom"))
    # Of a venv: what it was made from.
    python = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    folders = ["/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"]
    folders += ["/etc/ld.so.cache", "/etc/alternatives"]
    files = [word for folder in folders for word in ("--ro-bind-try", folder, folder)]
    if not sys.base_prefix.startswith("/usr/"):
        for folder in [*Path(sys.base_prefix).parents][-2::-1]:
            files += ["--perms", "0755", "--dir", str(folder)]
        files += ["--ro-bind", sys.base_prefix, sys.base_prefix]
    environment = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8"}
    # Else the order of sets, and with it a score, would change from run to run
    environment["PYTHONHASHSEED"] = "0"
    isolated = [bwrap, "--unshare-all", "--unshare-user", "--uid", "65534", "--gid", "65534"]
    isolated += ["--disable-userns", "--as-pid-1", "--die-with-parent"]
    isolated += ["--new-session", "--clearenv"]
    isolated += [word for name, value in environment.items() for word in ("--setenv", name, value)]
    # The kernel's settings and the names of keys are covered; nobody writes an oom_score_adj.
    mounts = ["--proc", "/proc", "--tmpfs", "/proc/sys", "--remount-ro", "/proc/sys"]
    if os.path.exists("/proc/keys"):
        mounts += ["--ro-bind", "/dev/null", "/proc/keys"]
    mounts += ["--dev", "/dev"]
    mounts += ["--perms", "1777", "--size", str(TMP_MB << 20), "--tmpfs", "/tmp", "--chdir", "/tmp"]
    mounts += [word for folder in ("/proc", "/dev", "/") for word in ("--remount-ro", folder)]
    source = f"{inspect.getsource(canonical)}\n{inspect.getsource(run_cases)}\nrun_cases()"
    inner = [*mounts, python, "-s", "-P", "-c", source]
    # When the machine runs out of memory, Linux ends the processes with 1000 first.
    expendable = [choom, "-n", "1000", "--"]
    if not drop_root:
        return [*expendable, *isolated, *files, *inner]
    outer = [bwrap, "--die-with-parent", "--cap-drop", "ALL"]
    outer += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    outer += [*files, "--bind", "/proc", "/proc", "--dev", "/dev", "--dir", "/tmp"]
    become = [setpriv, "--reuid", "65534", "--regid", "65534", "--clear-groups"]
    return [*expendable, *outer, *become, *isolated, "--ro-bind", "/", "/", *inner]


def run_in_sandbox(code: str, cases: list[dict], command: list[str] | None = None) -> list[bool]:
    """Return whether each case passed. Raise RuntimeError if the sandbox did not start."""
    limits = {"case_seconds": CASE_SECONDS, "memory": MEMORY_MB << 20, "look_seconds": 0.05}
    limits |= {"processes": PROCESSES, "file": TMP_MB << 18, "files": 64, "output": OUTPUT_BYTES}
    column = list(ARCHITECTURES).index(platform.machine())
    calls = {"architecture": ARCHITECTURES[platform.machine()]}
    calls["closed"] = [numbers[column] for numbers in CLOSED_CALLS.values()]
    calls["restricted"] = [(numbers[column], first) for numbers, first in RESTRICTED_CALLS.values()]
    program = {"code": code, "number_cases": len(cases), "limits": limits, "filter": calls}
    given = [{name: value for name, value in case.items() if name != "expected"} for case in cases]
    with open(os.memfd_create("job"), "w+b") as job:
        for text in (json.dumps(part).encode() for part in (program, *given)):
            job.write(len(text).to_bytes(8, "big") + text)
        job.seek(0)
        stdout, stderr = run_until_gone(command or SANDBOX, job, TOTAL_SECONDS)
    # Whoever kills everything in reach ends the run in the middle of a line at worst: those cases
    # are failures.
    lines = stdout.decode().split("\n")[:-1]
    if not lines:
        reason = stderr.decode(errors="replace").strip()[-300:] or f"not within {TOTAL_SECONDS} s"
        raise RuntimeError(f"the sandbox did not start: {reason}")
    results = [json.loads(line) for line in lines[1:]]
    passed = []
    for result, case in zip(results, cases, strict=False):
        expected, stdout = case.get("expected"), result["stdout"]
        # A call's is compared as text, and never parsed: a program may have written it
        same = stdout == expected if "call" in case else same_output(stdout, expected or "")
        passed.append(result["reached_end"] and ("test" in case or same))
    return passed + [False] * (len(cases) - len(passed))


def run_until_gone(command: list[str], job: BinaryIO, seconds: float) -> tuple[bytes, bytes]:
    """Return (stdout, stderr) of a sandbox. Afterwards no process of it is left."""
    own = {"env": {}, "cwd": "/", "start_new_session": True}
    try:
        sandbox = subprocess.Popen(
            command, stdin=job, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **own
        )
    except OSError as error:
        return b"", str(error).encode()
    with sandbox:
        try:
            return sandbox.communicate(timeout=seconds)
        except subprocess.TimeoutExpired as late:
            # Its process 1 ends when nobody reads its results, and Linux everything else with it;
            # bubblewrap waits for that. It would not if it were killed.
            sandbox.stdout.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                sandbox.wait(1)
            return late.stdout or b"", late.stderr or b""
        finally:
            sandbox.kill()


def find_sandbox() -> list[str]:
    """Return the command of a sandbox that has been tested, or raise RuntimeError."""
    hint = "code is never run outside a sandbox"
    if not shutil.which("bwrap"):
        raise RuntimeError(
            "code is run in bubblewrap, which is not installed: "
            f"`apt-get install bubblewrap`; {hint}"
        )
    linux = tuple(map(int, re.findall(r"\d+", platform.release())[:2]))
    if linux < (5, 14) or platform.machine() not in ARCHITECTURES:
        raise RuntimeError(
            f"code is run on Linux 5.14 or newer, on {' or '.join(ARCHITECTURES)}; this is "
            f"{platform.release()} on {platform.machine()}; {hint}"
        )
    here, load_libc = os.path.abspath(__file__), "import ctypes\nlibc = ctypes.CDLL(None)\n"
    names = "{line.split(':')[0].strip() for line in open('/proc/net/dev').readlines()[2:]}"
    probes = {
        "a program can run": "open('/tmp/file', 'w').write('x')",
        "there is no network": f"assert {names} <= {{'lo'}}",
        "this project cannot be read": f"import os\nassert not os.path.exists({here!r})",
        "memory is limited": raises(f"bytearray({MEMORY_MB} << 20)", "MemoryError"),
        "System V memory is closed": f"{load_libc}assert libc.shmget(0, 4096, 0o1600) == -1",
        "processes are limited": raises(
            f"for _ in range({PROCESSES}):\n  os.fork() or time.sleep(9)", "OSError"
        ),
        "memory in sum can be read": "assert 'Pss:' in open('/proc/self/smaps_rollup').read()",
        "user namespaces are closed": f"{load_libc}assert libc.unshare(0x10000000) == -1",
    }
    reasons = []
    # Root of a container may be an ordinary user outside, who is bound by limits and has no user to
    # change to.
    for drop_root in (True, False) if os.geteuid() == 0 else (False,):
        command = sandbox_command(drop_root)
        try:
            passed = run_in_sandbox("", [{"test": test} for test in probes.values()], command)
            if all(passed):
                return command
            results = zip(probes, passed, strict=True)
            reasons += [f"not true in it: {what}" for what, held in results if not held]
        except RuntimeError as error:
            reasons.append(str(error))
    what = (
        "user namespaces must be allowed, in a container with `docker run --privileged`, "
        "on Ubuntu 24.04 with `sysctl kernel.apparmor_restrict_unprivileged_userns=0`"
    )
    raise RuntimeError(f"bubblewrap does not work here ({'; '.join(reasons)}): {what}; {hint}")


def raises(statement: str, error: str) -> str:
    """Return a test that passes if the statement raises that error."""
    return f"import os, time\ntry:\n {statement}\nexcept {error}:\n pass\nelse:\n assert False"


SANDBOX = find_sandbox()
