"""scripts/setup.sh on machines made of stubs: what it refuses, and what it asks uv and pip for."""

import mmap
import os
import re
import shutil
import subprocess
import sys
import venv

import pytest
from helpers import REPO
from helpers.files import write_text

pytestmark = pytest.mark.slow

PROGRAMS = (
    "bash basename cat cksum cp cut dirname du grep ln ls mkdir mktemp mv paste rm sed sort tail"
)
PROGRAMS += " tee awk flock"
PYTORCH = "--extra-index-url https://download.pytorch.org/whl/cpu"
# It writes down how it was called, and fails if $FAILS matches that
RECORD = """
call="$(basename "$0") $*"
echo "$call" >> "$CALLS"
if [[ -n "$FAILS" && "$call" =~ $FAILS ]]; then echo "no torch here"; exit 1; fi
"""
STUBS = {
    "df": 'echo header; echo "disk 0 0 ${FREE:-99}000000 0%"',
    "uname": 'case $1 in -s) echo Linux ;; -m) echo x86_64 ;; *) echo "Linux x86_64" ;; esac',
    "python": f"""
        case "$*" in
          "-m venv "*)
            mkdir -p $3/bin $3/lib/python3.1{{1,2,3}}/site-packages
            echo "$VERSION" > $3/version
            cp "$STUBS/python_of_venv" $3/bin/python
            echo "#!$PWD/$3/bin/python" > $3/bin/accelerate ;;
          *) PYTHONPATH="$STUBS" exec {sys.executable} "$@" ;;
        esac""",
    "python_of_venv": f"""
        case "$*" in
          "-c "*version_info*)
            VERSION=$(cat "$(dirname "$0")/../version") exec "$STUBS/python" "$@" ;;
          *" config list") [ -s "$PIP_CONFIG_FILE" ] && exec {sys.executable} -m pip config list ;;
          *" install -q uv"*) cp "$STUBS/uv" "$(dirname "$0")/uv" ;;
        esac
        {RECORD}""",
    "python3.11": 'VERSION=3.11.9 exec "$STUBS/python" "$@"',
    "uv": RECORD,
    "gcc": "",
}
NVIDIA_SMI = """
case "$1" in
  -L) echo "GPU 0" ;;
  -i) sed -n "$(($2 + 1))p" <<<"$GPUS" ;;
  *) [ -n "$GPUS" ] && echo "$GPUS" ;;
esac"""
# In place of what the Python would say of its machine
SITE = """
import os, sys, sysconfig
name = "python3.11" if os.environ.get("VERSION", "").startswith("3.11.") else "python"
sys._base_executable = os.path.join(os.environ["STUBS"], name)
os.confstr = lambda name: os.environ["GLIBC"]
sysconfig.get_path = lambda name: os.environ["INCLUDE"]
if os.environ.get("VERSION"):
    sys.version_info = tuple(map(int, os.environ["VERSION"].split(".")))
"""


class Machine:
    """A clone in an empty folder, and a PATH that holds stubs and the shell's own programs only."""

    def __init__(self, folder, has_gpus):
        self.bin, self.clone, self.calls = folder / "bin", folder / "clone", folder / "calls.txt"
        for path in (self.bin, self.clone / "scripts"):
            path.mkdir(parents=True)
        shutil.copy(REPO / "scripts" / "setup.sh", self.clone / "scripts")
        for path in REPO.glob("requirements*.txt"):
            shutil.copy(path, self.clone)
        for name in PROGRAMS.split():
            (self.bin / name).symlink_to(shutil.which(name))
        for name, text in (STUBS | {"nvidia-smi": NVIDIA_SMI} if has_gpus else STUBS).items():
            (self.bin / name).write_text(f"#!{shutil.which('bash')}\n{text}\n")
            (self.bin / name).chmod(0o755)
        (self.bin / "python3.12").symlink_to("python")
        (self.bin / "sitecustomize.py").write_text(SITE)
        (folder / "Python.h").touch()
        paths = {"PATH": self.bin, "STUBS": self.bin, "PYTHON": self.bin / "python"}
        paths |= {"HOME": folder, "INCLUDE": folder, "CALLS": self.calls}
        self.environment = {name: str(path) for name, path in paths.items()}
        self.environment |= {"GLIBC": "glibc 2.36", "FAILS": "", "PIP_CONFIG_FILE": os.devnull}
        self.environment["VERSION"] = ""
        self.environment["GPUS"] = "580.65.06, 9.0\n580.65.06, 9.0"

    def set_up(self, **environment):
        """How it ended, and what it called."""
        self.calls.write_text("")
        environment = self.environment | environment
        command, streams = ["bash", "scripts/setup.sh"], {"capture_output": True, "text": True}
        result = subprocess.run(command, cwd=self.clone, env=environment, **streams)
        return result, self.calls.read_text().splitlines()


@pytest.fixture
def make_machine(tmp_path):
    return lambda has_gpus=False: Machine(tmp_path, has_gpus)


def installs_of(calls):
    """What uv and pip were to install, without what is always there."""
    text = "\n".join(call for call in calls if " install " in call and " -q " not in call)
    text = re.sub(r"python -m pip .*install", "pip", text)
    of_uv = r"uv pip install --python .venv-\d+/bin/python --compile-bytecode --index-strategy \S+"
    return re.sub(of_uv, "uv", text).splitlines()


LIBNUMA = "apt-get install libnuma1"
ONE_OF_TWO = {"GPUS": "580.1, 8.0\n580.1, 7.5", "CUDA_VISIBLE_DEVICES": "0"}
MACHINES = [
    # (has GPUs, the environment, whether gcc is there, the exit status, what it is told)
    (False, {"GLIBC": "glibc 2.4"}, True, 1, "needs glibc 2.31"),
    (False, {"GLIBC": ""}, True, 1, "needs glibc 2.31"),
    (False, {"VERSION": "3.11.1"}, True, 1, "python is not Python 3.11.2 to 3.13"),
    (False, {"VERSION": "3.14.0"}, True, 1, "python is not Python 3.11.2 to 3.13"),
    (False, {"FREE": "7"}, True, 1, "7 GB are free here, but 8 GB are needed"),
    (True, {"GPUS": "99.1, 9.0"}, True, 1, "is 99.1, but CUDA 13 needs 580 or newer"),
    (True, {"GPUS": ""}, True, 1, "needs driver 580 or newer"),  # it does not know the question
    (True, {"GPUS": ONE_OF_TWO["GPUS"]}, True, 1, "compute capability 7.5, but 8.0 is needed"),
    (True, {}, False, 1, "apt-get install gcc"),
    (True, {"INCLUDE": "/nowhere"}, True, 1, "python{}.{}-dev".format(*sys.version_info)),
    (False, {"INCLUDE": "/nowhere", "GLIBC": "glibc 2.31"}, False, 0, None),
    (False, {"VERSION": "3.11.2", "FAILS": "libnuma.so"}, False, 0, LIBNUMA),
    (True, {"GPUS": "1000.1, 10.0", "CC": "cc", "FAILS": "libnuma.so"}, False, 0, None),
    (True, ONE_OF_TWO | {"CC": "cc"}, False, 0, None),
]


@pytest.mark.parametrize(("has_gpus", "environment", "has_gcc", "status", "told"), MACHINES)
def test_machine_that_lacks_something_is_told_what(
    has_gpus, environment, has_gcc, status, told, make_machine
):
    machine = make_machine(has_gpus)
    if not has_gcc:
        (machine.bin / "gcc").unlink()
    result, calls = machine.set_up(**environment)
    made = (machine.clone / ".venv").exists()
    assert (result.returncode, made, calls == []) == (status, status == 0, status == 1)
    if status == 1:
        assert told in result.stderr
    else:
        of_cpus = "" if has_gpus else " torchvision torchaudio"
        (uninstall,) = [call for call in calls if " uninstall " in call]
        assert uninstall.endswith(f" torchcodec{of_cpus}")
        assert (LIBNUMA in result.stdout) == (told == LIBNUMA)
        assert ("python scripts/internal/make_libnuma_stub.py" in calls) == (told == LIBNUMA)


CPU = "-r requirements-cpu.txt"
BY_UV, BY_PIP = [f"uv {CPU}", f"uv {CPU} {PYTORCH}"], [f"pip {CPU}", f"pip {CPU} {PYTORCH}"]
INSTALLS = [
    # (has GPUs, what fails, the exit status, what was tried)
    (True, "", 0, ["uv -r requirements.txt"]),
    (False, "cpu.txt$", 0, BY_UV),
    (False, "^uv|cpu.txt$", 0, BY_UV + BY_PIP),
    (False, "install -q uv", 0, BY_PIP[:1]),
    (True, " -r ", 1, ["uv -r requirements.txt", "pip -r requirements.txt"]),
    (False, " import accelerate", 1, BY_UV[:1]),
]


@pytest.mark.parametrize(("has_gpus", "fails", "status", "installs"), INSTALLS)
def test_what_fails_is_tried_otherwise(has_gpus, fails, status, installs, make_machine):
    machine = make_machine(has_gpus)
    result, calls = machine.set_up(FAILS=fails)
    assert result.returncode == status, result.stderr
    assert installs_of(calls) == installs
    assert (machine.clone / ".venv").exists() == (status == 0)
    again, calls = machine.set_up()
    assert again.returncode == 0 and (machine.clone / ".venv/.complete").exists()
    assert ("up to date" in again.stdout) == (calls == []) == (status == 0)
    if status == 1:  # what is half made is made again
        assert "no torch here" in result.stdout + result.stderr


def add_line(path, line):
    return lambda machine: (machine.clone / path).open("a").write(f"{line}\n") and {}


CHANGES = [
    # (what changes, whether that takes another environment)
    (add_line("scripts/setup.sh", "# a comment"), False),
    (add_line("requirements-cpu.txt", "\n# a comment"), False),
    # Python 3.12, which is there, will do
    (lambda machine: {"PYTHON": "", "VERSION": "3.12.1"}, False),
    (add_line("requirements-cpu.txt", "one-more==1"), True),
    (lambda machine: {"VERSION": "3.12.1"}, True),
    (lambda machine: {"VERSION": "3.13.1", "PYTHON": "python"}, True),
]


@pytest.mark.parametrize(("change", "takes_another"), CHANGES)
def test_environment_stays_for_the_runs_that_are_in_it(change, takes_another, make_machine):
    machine = make_machine()
    machine.set_up(VERSION="3.11.9")
    link = machine.clone / ".venv"
    old = link.resolve()
    changes = {"VERSION": "3.11.9"} | change(machine)
    failed, _ = machine.set_up(FAILS=" import accelerate", **changes)
    assert failed.returncode == takes_another and link.resolve() == old  # until the end
    result, calls = machine.set_up(**changes)
    is_another = link.resolve() != old
    assert (old / ".complete").exists() and (calls != []) == is_another == takes_another
    assert (f"rm -rf {old.name}\n" in result.stdout) == takes_another
    # An interpreter that is gone, and a clone that was moved
    shutil.rmtree(link.resolve() / "bin")
    assert machine.set_up(**changes)[1] != [] and (link / "bin/python").exists()
    machine.clone = machine.clone.rename(machine.clone.with_name("moved"))
    assert machine.set_up(**changes)[1] != [] and machine.set_up(**changes)[1] == []


def test_folder_of_an_older_set_up_serves_on_or_is_moved_when_no_process_uses_it(make_machine):
    machine = make_machine()
    machine.set_up()
    folder, packages = machine.clone / ".venv", machine.clone / "requirements-cpu.txt"
    made = folder.resolve()
    folder.unlink()
    made.rename(folder)
    write_text(folder / "bin/accelerate", f"#!{folder}/bin/python\n")
    crc = subprocess.check_output(["cksum"], input=packages.read_bytes()).decode().strip()
    write_text(folder / ".complete", f"requirements-cpu.txt {crc} 4165753095 6895\n")
    assert machine.set_up()[1] == [] and not folder.is_symlink()
    packages.write_text(packages.read_text() + "one-more==1\n")
    with (
        open(folder / "bin/accelerate", "rb") as file,
        mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ),
    ):
        result, _ = machine.set_up()
    assert result.returncode == 1 and str(os.getpid()) in result.stderr and not folder.is_symlink()
    result, calls = machine.set_up()
    assert result.returncode == 0 and calls == [] and folder.is_symlink()
    assert (machine.clone / ".venv-old/bin/accelerate").exists()


def test_process_imports_from_the_environment_that_it_was_started_in(tmp_path):
    """Which is another one than .venv, when that was exchanged meanwhile."""
    line = re.search(
        r"^import os, sys; .*\n", (REPO / "scripts/setup.sh").read_text(), re.MULTILINE
    )
    for name in ("old", "new"):
        venv.create(tmp_path / name)
        (packages,) = (tmp_path / name).glob("lib/*/site-packages")
        write_text(packages / "stay.pth", line[0])
        write_text(packages / "which.py", f"name = {name!r}")
    (tmp_path / ".venv").symlink_to("old")
    child = "print(flush=True); input(); import which; print(which.name)"
    command, pipe = [tmp_path / ".venv/bin/python", "-c", child], subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, bufsize=1)
    process.stdout.readline()  # it has started
    (tmp_path / ".link").symlink_to("new")
    (tmp_path / ".link").rename(tmp_path / ".venv")
    assert process.communicate("\n")[0] == "old\n"


def test_uv_is_told_what_pip_is_configured_for(make_machine, tmp_path):
    (tmp_path / "pip.conf").write_text(
        "[global]\nindex-url = https://a/simple\nextra-index-url =\n  https://b/1\n  https://b/2\n"
        "find-links = /wheels\nconstraint = /cap.txt\ntrusted-host = a\ntimeout = 60\n"
        "[install]\nconstraint = /lower.txt\n"
    )
    machine = make_machine()
    machine.environment["PIP_CONFIG_FILE"] = str(tmp_path / "pip.conf")
    _, calls = machine.set_up(PIP_FIND_LINKS="/more /wheels")
    assert installs_of(calls) == [
        "uv --index-url https://a/simple --extra-index-url https://b/1 --extra-index-url https://b/2"
        " --find-links /more --find-links /wheels --constraint /lower.txt --trusted-host a"
        f" {CPU}"
    ]
    # What it cannot be told is left to pip
    (machine.clone / ".venv" / ".complete").unlink()
    assert installs_of(machine.set_up(PIP_NO_BINARY="1")[1]) == BY_PIP[:1]


def test_the_compiler_of_kernels_is_of_one_release():
    text = (REPO / "requirements.txt").read_text()
    releases = re.findall(r"^nvidia-(?:cuda-nvcc|cuda-crt|nvvm)==(\S+);", text, re.MULTILINE)
    assert releases == ["13.0.88"] * 3
