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
or aarch64). A program in it has no network, an empty environment, and its own /tmp in memory. It
can read the system, but not /home, /root or this project, and it cannot make the system calls of
CLOSED_CALLS. Without bubblewrap this file cannot be imported, so no program ever runs unprotected.
Limits are constants below. Four of them are environment variables: TANDEM_SANDBOX_SECONDS per test
case, TANDEM_SANDBOX_TOTAL_SECONDS per response, TANDEM_SANDBOX_MEMORY_MB per process and for the
sum of all processes, and TANDEM_SANDBOX_PROCESSES per response (threads count).

The script's --reward_timeout (10) must exceed TANDEM_SANDBOX_TOTAL_SECONDS (8) by two seconds. When
the latter is over, the remaining test cases count as failed. When the former is over, the worker is
ended, and the reward counts as failed.

Each test case starts the program again in its own process, which has an empty /tmp and cannot see
later test cases. A test case counts only if that process reaches its end, so a program does not
pass by exiting early, by printing a result or by killing other processes. When the score is known,
no process of the program is left. sandbox_worker.py does this inside the sandbox.

Three kinds of test cases are judged in two places:

1. An assertion that something equals a literal, such as `assert f(1) == 2`, is judged outside. The
   program's process sends the value out as plain data (None, numbers, text, bytes, lists, tuples,
   sets, dicts). The literal is never in the sandbox.
2. The output of a program that reads stdin and writes stdout is judged outside, too.
3. Any other assertion, and HumanEval's `check`, are judged by the process of the program itself. A
   malicious program can pass them, for example with objects that equal everything.

Some gaps remain, because an ordinary user cannot close them on every system. The sum of memory is
checked only 20 times a second, and in between each process is held only by its own limit. A program
can read /proc and /usr. A hole in the kernel is a hole in the sandbox. Correct programs cannot use
sockets other than pairs (and so no multiprocessing.Manager), shared memory or semaphores by name
(and so no multiprocessing.Pool), or os.nice.
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

import sandbox_worker

CASE_SECONDS = float(os.environ.get("TANDEM_SANDBOX_SECONDS", "4"))
TOTAL_SECONDS = float(os.environ.get("TANDEM_SANDBOX_TOTAL_SECONDS", "8"))
MEMORY_MB = int(os.environ.get("TANDEM_SANDBOX_MEMORY_MB", "1024"))
PROCESSES = int(os.environ.get("TANDEM_SANDBOX_PROCESSES", "16"))
TMP_MB = 64  # all files in /tmp; one file may have a quarter of that
OUTPUT_BYTES = 1_000_000  # what a test case may print
# Processors with seccomp's numbers for them (AUDIT_ARCH_...), in the order of the numbers below
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# System calls that fail with ENOSYS in the sandbox, with their numbers on both processors.
# Queues, memory and keys that outlive their process. The keys are also those of the reward's worker
CLOSED_CALLS = {"shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186)}
CLOSED_CALLS |= {"mq_open": (240, 180), "add_key": (248, 217), "request_key": (249, 218)}
CLOSED_CALLS |= {"keyctl": (250, 219)}
# Memory that no limit counts
CLOSED_CALLS |= {"memfd_create": (319, 279), "memfd_secret": (447, 447), "vmsplice": (278, 75)}
CLOSED_CALLS |= {"io_setup": (206, 0), "landlock_create_ruleset": (444, 444)}
CLOSED_CALLS |= {"setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7)}
CLOSED_CALLS |= {"setxattrat": (463, 463)}
# Uncounted memory, and ways out: vsock, netlink, packets. Pairs of sockets need neither call
CLOSED_CALLS |= {"socket": (41, 198), "setsockopt": (54, 208)}
# Memory and files of other processes
CLOSED_CALLS |= {"ptrace": (101, 117), "process_vm_readv": (310, 270), "kcmp": (312, 272)}
CLOSED_CALLS |= {"process_vm_writev": (311, 271), "process_madvise": (440, 440)}
CLOSED_CALLS |= {"pidfd_getfd": (438, 438)}
# Calls by which process 1 could be slowed down, so that it would end the others too late
CLOSED_CALLS |= {"setpriority": (141, 140), "ioprio_set": (251, 30), "sched_setattr": (314, 274)}
CLOSED_CALLS |= {"sched_setparam": (142, 118), "sched_setscheduler": (144, 119)}
# Large parts of the kernel that no solution needs
CLOSED_CALLS |= {"io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "bpf": (321, 280)}
CLOSED_CALLS |= {"io_uring_register": (427, 427), "userfaultfd": (323, 282)}
CLOSED_CALLS |= {"perf_event_open": (298, 241), "fanotify_init": (300, 262)}
# System calls that fail with ENOSYS unless their first argument is this one, which is a family of
# sockets, or 0 for the calling process
RESTRICTED_CALLS = {"socketpair": ((53, 199), socket.AF_UNIX)}
RESTRICTED_CALLS |= {"prlimit64": ((302, 261), 0), "sched_setaffinity": ((203, 122), 0)}


def compute_score(
    data_source: str, response: str, ground_truth: Any, *, extra_info: Any = None
) -> float:
    """Return the fraction of the test cases that the program passes.

    Raise ValueError for a ground truth of no known form, and RuntimeError if no sandbox starts.
    """
    prefix, cases = parse_ground_truth(ground_truth)
    return sum(run_in_sandbox(prefix + extract_code(response), cases)) / len(cases)


def extract_code(response: str) -> str:
    r"""Return the last block of Python, or else the last one without a language, or else all.

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
    """A line that can begin or end a block, such as `1. Solution: ~~~python`."""

    number: int  # of the line
    width: int  # of the margin, which has spaces and the marks of lists and quotes
    marks: str
    language: str  # `python` for each of that language's names
    opens: bool
    closes: bool


MARGIN = re.compile(r"(?:[ \t>]|[-+*][ \t]|\d+[.)][ \t])*")
MARKS = re.compile(r"`{3,}|~{3,}")
NEAR = 200  # fences that are searched for the end of a block, so that the search takes linear time


def read_fence(number: int, line: str) -> Fence | None:
    """Return the Fence of a line, or None if the line has none.

    If words precede the marks, at most one word can follow them, so that "put it between ``` and
    ```" is no fence. A fence that closes a block stands alone on its line, except for tags such as
    </answer>. Two expressions look for margin and marks one after the other, so that a line of
    100,000 marks is read only once.
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

    A block can also open in the middle of a line, unlike in CommonMark, and the lines of a list can
    be indented or not. Fences inside a string in triple quotes belong to it. A block that is never
    closed ends with the text, or where a Python block opens, unless it is Python itself.

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
    # Every closing fence seemed to be in a string, so the triple quotes probably open none
    return (first.number, first) if first else (len(quotes) - 1, None)


def count_quotes(lines: list[str]) -> list[tuple[int, int]]:
    """Count both kinds of triple quotes before each line, and at the end."""
    counts = [(0, 0)]
    for line in lines:
        double, single = counts[-1]
        counts.append((double + line.count('"""'), single + line.count("'''")))
    return counts


def ends_in_string(quotes: list, start: int, end: int) -> bool:
    """Return whether the lines from start to end leave a string in triple quotes open."""
    return any(
        (after - before) % 2 for before, after in zip(quotes[start], quotes[end], strict=True)
    )


def without_margin(lines: list[str], width: int) -> str:
    """Return lines without their margin of this width, or of the first line's width if smaller."""
    first = next((line for line in lines if line.strip()), "")
    width = min(width, len(first) - len(first.lstrip(" \t>")))
    return "".join(line[:width].lstrip(" \t>") + line[width:] for line in lines)


def parse_ground_truth(ground_truth: Any) -> tuple[str, list[dict]]:
    """Return (code before the program, test cases).

    A test case has `test`, or `stdin` and `expected`, or `setup`, `call` and `expected`.
    """
    truth = ground_truth
    if isinstance(truth, str):
        with contextlib.suppress(json.JSONDecodeError):
            truth = json.loads(truth)
    truth = {"test_list": truth} if isinstance(truth, list) else truth
    if isinstance(truth, dict):  # Arrow adds null for each key that only other examples have
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
                    expected = sandbox_worker.canonical(ast.literal_eval(literal))
                    return {"setup": setup, "call": ast.unparse(call), "expected": expected}
    return None


def same_output(printed: str, expected: str) -> bool:
    r"""Return whether texts are equal except for whitespace at the ends of lines and of the text.

    >>> same_output("\n1 \n2\n\n", "1\n2"), same_output("1 2", "1\n2")
    (True, False)
    """
    texts = (printed, expected)
    one, other = ([line.rstrip() for line in text.strip().splitlines()] for text in texts)
    return one == other


def sandbox_command(drop_root: bool) -> list[str]:
    """Return the command that runs sandbox_worker.py in bubblewrap.

    Linux counts processes per user and user namespace. Each run has its own namespace, so that runs
    do not use up each other's processes. But the processes of root are not counted, and in a
    namespace that root makes every user is root outside. The program must therefore run as the user
    `nobody`, who cannot reach a Python below /root. With `drop_root` a first bubblewrap only mounts
    the files. In it root becomes `nobody`, who then starts the second bubblewrap.
    """
    bwrap, setpriv, choom = (shutil.which(name) or name for name in ("bwrap", "setpriv", "choom"))
    # In a venv this is the Python that the venv was made from
    python = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    folders = ["/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"]
    folders += ["/etc/ld.so.cache", "/etc/alternatives"]
    files = [word for folder in folders for word in ("--ro-bind-try", folder, folder)]
    if not sys.base_prefix.startswith("/usr/"):
        for folder in [*Path(sys.base_prefix).parents][-2::-1]:
            files += ["--perms", "0755", "--dir", str(folder)]
        files += ["--ro-bind", sys.base_prefix, sys.base_prefix]
    environment = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8"}
    # Without this the order of sets, and with it a score, would change from run to run
    environment["PYTHONHASHSEED"] = "0"
    isolated = [bwrap, "--unshare-all", "--unshare-user", "--uid", "65534", "--gid", "65534"]
    isolated += ["--disable-userns", "--as-pid-1", "--die-with-parent"]
    isolated += ["--new-session", "--clearenv"]
    isolated += [word for name, value in environment.items() for word in ("--setenv", name, value)]
    # Cover the kernel's settings and the names of keys. A read-only /proc protects oom_score_adj
    mounts = ["--proc", "/proc", "--tmpfs", "/proc/sys", "--remount-ro", "/proc/sys"]
    if os.path.exists("/proc/keys"):
        mounts += ["--ro-bind", "/dev/null", "/proc/keys"]
    mounts += ["--dev", "/dev"]
    mounts += ["--perms", "1777", "--size", str(TMP_MB << 20), "--tmpfs", "/tmp", "--chdir", "/tmp"]
    mounts += [word for folder in ("/proc", "/dev", "/") for word in ("--remount-ro", folder)]
    inner = [*mounts, python, "-s", "-P", "-c", inspect.getsource(sandbox_worker)]
    # When the machine runs out of memory, Linux ends the processes with 1000 first
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
    memory = MEMORY_MB << 20
    limits = {"case_seconds": CASE_SECONDS, "memory": memory, "output": OUTPUT_BYTES}
    # The names are those of setrlimit
    rlimits = {"AS": memory, "NPROC": PROCESSES, "FSIZE": TMP_MB << 18, "NOFILE": 64, "CORE": 0}
    column = list(ARCHITECTURES).index(platform.machine())
    calls = {"architecture": ARCHITECTURES[platform.machine()]}
    calls["closed"] = [numbers[column] for numbers in CLOSED_CALLS.values()]
    calls["restricted"] = [(numbers[column], first) for numbers, first in RESTRICTED_CALLS.values()]
    job = {"code": code, "number_cases": len(cases), "filter": calls}
    job |= {"limits": limits, "rlimits": rlimits}
    sent = [{name: value for name, value in case.items() if name != "expected"} for case in cases]
    with open(os.memfd_create("job"), "w+b") as job_file:
        for text in (json.dumps(part).encode() for part in (job, *sent)):
            job_file.write(len(text).to_bytes(8, "big") + text)
        job_file.seek(0)
        stdout, stderr = run_until_gone(command or SANDBOX, job_file, TOTAL_SECONDS)
    # A program that kills all processes can end the sandbox in the middle of a line. That test case
    # and those after it count as failed
    lines = stdout.decode().split("\n")[:-1]
    if not lines:
        reason = stderr.decode(errors="replace").strip()[-300:] or f"not within {TOTAL_SECONDS} s"
        raise RuntimeError(f"the sandbox did not start: {reason}")
    results = [json.loads(line) for line in lines[1:]]
    passed = []
    for result, case in zip(results, cases, strict=False):
        expected, stdout = case.get("expected"), result["stdout"]
        # A call's value is compared as text and never parsed, because a program can write anything
        same = stdout == expected if "call" in case else same_output(stdout, expected or "")
        passed.append(result["reached_end"] and ("test" in case or same))
    return passed + [False] * (len(cases) - len(passed))


def run_until_gone(command: list[str], job_file: BinaryIO, seconds: float) -> tuple[bytes, bytes]:
    """Return (stdout, stderr) of a sandbox. Afterwards no process of it is left."""
    streams = {"stdin": job_file, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    try:
        sandbox = subprocess.Popen(command, env={}, cwd="/", start_new_session=True, **streams)
    except OSError as error:
        return b"", str(error).encode()
    with sandbox:
        try:
            return sandbox.communicate(timeout=seconds)
        except subprocess.TimeoutExpired as timeout:
            # Process 1 of the sandbox ends when its results are not read, and then Linux ends all
            # other processes in it. bubblewrap waits for that, which it cannot if it is killed now
            sandbox.stdout.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                sandbox.wait(1)
            return timeout.stdout or b"", timeout.stderr or b""
        finally:
            sandbox.kill()


def find_sandbox() -> list[str]:
    """Return the command of a sandbox that has been tested, or raise RuntimeError."""
    promise = "code is never run outside a sandbox"
    if not shutil.which("bwrap"):
        raise RuntimeError(
            "code is run in bubblewrap, which is not installed: "
            f"`apt-get install bubblewrap`; {promise}"
        )
    linux = tuple(map(int, re.findall(r"\d+", platform.release())[:2]))
    if linux < (5, 14) or platform.machine() not in ARCHITECTURES:
        raise RuntimeError(
            f"code is run on Linux 5.14 or newer, on {' or '.join(ARCHITECTURES)}; this is "
            f"{platform.release()} on {platform.machine()}; {promise}"
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
    # Root of a container can be an ordinary user outside, whom limits bind and who cannot become
    # another user
    for drop_root in (True, False) if os.geteuid() == 0 else (False,):
        command = sandbox_command(drop_root)
        try:
            passed = run_in_sandbox("", [{"test": test} for test in probes.values()], command)
            if all(passed):
                return command
            results = zip(probes, passed, strict=True)
            reasons += [f"not true in it: {claim}" for claim, is_true in results if not is_true]
        except RuntimeError as error:
            reasons.append(str(error))
    remedy = (
        "user namespaces must be allowed, in a container with `docker run --privileged`, "
        "on Ubuntu 24.04 with `sysctl kernel.apparmor_restrict_unprivileged_userns=0`"
    )
    raise RuntimeError(f"bubblewrap does not work here ({'; '.join(reasons)}): {remedy}; {promise}")


def raises(statement: str, error: str) -> str:
    """Return a test that passes if the statement raises that error."""
    return f"import os, time\ntry:\n {statement}\nexcept {error}:\n pass\nelse:\n assert False"


SANDBOX = find_sandbox()
