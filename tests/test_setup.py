"""scripts/setup.sh on machines made of stubs: what it refuses, and what it asks uv and pip for."""

import os
import re
import shutil
import subprocess
import sys

import pytest
from helpers import REPO

pytestmark = pytest.mark.slow

PROGRAMS = "bash basename cat cksum cp cut dirname du grep mkdir mktemp rm sed sort tail tee awk"
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
          "-m venv .venv") mkdir -p .venv/bin; cp "$STUBS/python_of_venv" .venv/bin/python ;;
          *) PYTHONPATH="$STUBS" exec {sys.executable} "$@" ;;
        esac""",
    "python_of_venv": f"""
        case "$*" in
          *" config list") exec {sys.executable} -m pip config list ;;
          *" install -q uv"*) cp "$STUBS/uv" .venv/bin/uv ;;
        esac
        {RECORD}""",
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
import os, sysconfig
os.confstr = lambda name: os.environ["GLIBC"]
sysconfig.get_path = lambda name: os.environ["INCLUDE"]
"""


class Machine:
    """A clone in an empty folder, and a PATH that holds stubs and the shell's own programs only."""

    def __init__(self, folder):
        self.bin = folder / "bin"
        self.clone = folder / "clone"
        self.bin.mkdir()
        (self.clone / "scripts").mkdir(parents=True)
        shutil.copy(REPO / "scripts" / "setup.sh", self.clone / "scripts")
        for path in REPO.glob("requirements*.txt"):
            shutil.copy(path, self.clone)
        for name in PROGRAMS.split():
            (self.bin / name).symlink_to(shutil.which(name))
        for name, text in STUBS.items():
            self.add(name, text)
        (self.bin / "sitecustomize.py").write_text(SITE)
        (folder / "Python.h").touch()
        self.calls_file = folder / "calls.txt"
        self.environment = {
            "PATH": str(self.bin),
            "HOME": str(folder),
            "PYTHON": str(self.bin / "python"),
            "STUBS": str(self.bin),
            "CALLS": str(self.calls_file),
            "FAILS": "",
            "GLIBC": "glibc 2.36",
            "INCLUDE": str(folder),
            "PIP_CONFIG_FILE": os.devnull,
        }

    def add(self, name, text):
        (self.bin / name).write_text(f"#!{shutil.which('bash')}\n{text}\n")
        (self.bin / name).chmod(0o755)

    def set_up(self, **environment):
        self.calls_file.unlink(missing_ok=True)
        return subprocess.run(
            ["bash", "scripts/setup.sh"],
            cwd=self.clone,
            env=self.environment | environment,
            capture_output=True,
            text=True,
        )

    @property
    def calls(self):
        return self.calls_file.read_text().splitlines() if self.calls_file.exists() else []

    @property
    def installs(self):
        """What uv and pip were to install, without what is always there."""
        text = [call for call in self.calls if " install " in call and " -q " not in call]
        text = [re.sub(r"python -m pip .*install", "pip", call) for call in text]
        text = [
            re.sub("uv pip install --python .venv/bin/python --compile-bytecode", "uv", call)
            for call in text
        ]
        return [call.replace(" --index-strategy unsafe-best-match", "") for call in text]


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


@pytest.fixture
def gpu_machine(machine):
    machine.add("nvidia-smi", NVIDIA_SMI)
    machine.environment["GPUS"] = "580.65.06, 9.0\n580.65.06, 9.0"
    return machine


def refused(machine, **environment):
    """The sentence of a refusal that has installed nothing and removed nothing."""
    old = machine.clone / ".venv" / "old"
    old.mkdir(parents=True)
    result = machine.set_up(**environment)
    assert result.returncode == 1
    assert machine.calls == []
    assert old.exists()
    return result.stderr


@pytest.mark.parametrize("glibc", ["glibc 2.28", "glibc 2.4", ""])
def test_old_glibc_is_refused(machine, glibc):
    assert "needs glibc 2.31" in refused(machine, GLIBC=glibc)


def test_full_disk_is_refused(machine):
    assert "7 GB free here, 8 GB are needed" in refused(machine, FREE="7")


@pytest.mark.parametrize("driver", ["570.172.08", "99.1"])
def test_old_driver_is_refused(gpu_machine, driver):
    message = refused(gpu_machine, GPUS=f"{driver}, 9.0")
    assert f"driver here is {driver}, and CUDA 13 needs 580 or newer" in message


def test_driver_that_does_not_know_the_question_is_refused(gpu_machine):
    assert "needs driver 580 or newer" in refused(gpu_machine, GPUS="")


def test_any_old_gpu_is_refused(gpu_machine):
    message = refused(gpu_machine, GPUS="580.65.06, 9.0\n580.65.06, 7.5")
    assert "compute capability 7.5; 8.0 is needed" in message


def test_missing_compiler_is_refused(gpu_machine):
    (gpu_machine.bin / "gcc").unlink()
    assert "apt-get install gcc" in refused(gpu_machine)


def test_missing_python_headers_are_refused(gpu_machine):
    message = refused(gpu_machine, INCLUDE=str(gpu_machine.bin))
    assert "apt-get install python{}.{}-dev".format(*sys.version_info) in message


def test_a_cpu_needs_neither_compiler_nor_headers(machine):
    (machine.bin / "gcc").unlink()
    assert machine.set_up(INCLUDE="/nowhere", GLIBC="glibc 2.31").returncode == 0


@pytest.mark.parametrize(
    "environment",
    [
        {"GPUS": "580.65.06, 8.0"},
        {"GPUS": "1000.1, 10.0"},
        {"GPUS": "580.65.06, 9.0\n580.65.06, 7.5", "CUDA_VISIBLE_DEVICES": "0"},
        {"CC": "cc"},
    ],
)
def test_new_gpus_pass(gpu_machine, environment):
    if "CC" in environment:
        (gpu_machine.bin / "gcc").unlink()
    else:
        (gpu_machine.bin / "gcc").rename(gpu_machine.bin / "clang")
    result = gpu_machine.set_up(**environment)
    assert result.returncode == 0, result.stderr


def test_uv_installs_and_a_second_call_does_nothing(machine):
    result = machine.set_up()
    assert result.returncode == 0, result.stderr
    assert machine.installs == ["uv -r requirements-cpu.txt"]
    assert "up to date" in machine.set_up().stdout
    assert machine.calls == []


def test_a_gpu_gets_its_requirements_and_no_torchcodec(gpu_machine):
    gpu_machine.set_up()
    assert gpu_machine.installs == ["uv -r requirements.txt"]
    (uninstall,) = [call for call in gpu_machine.calls if " uninstall " in call]
    assert uninstall.endswith(" torchcodec")


def test_a_cpu_gets_no_companions_of_torch(machine):
    machine.set_up()
    (uninstall,) = [call for call in machine.calls if " uninstall " in call]
    assert uninstall.endswith(" torchcodec torchvision torchaudio")


def test_second_try_of_a_cpu_has_the_index_of_pytorch(machine):
    assert machine.set_up(FAILS="cpu.txt$").returncode == 0
    tries = ["uv -r requirements-cpu.txt", f"uv -r requirements-cpu.txt {PYTORCH}"]
    assert machine.installs == tries


def test_pip_installs_what_uv_cannot(machine):
    result = machine.set_up(FAILS="^uv|cpu.txt$")
    assert result.returncode == 0, result.stderr
    assert machine.installs == [
        "uv -r requirements-cpu.txt",
        f"uv -r requirements-cpu.txt {PYTORCH}",
        "pip -r requirements-cpu.txt",
        f"pip -r requirements-cpu.txt {PYTORCH}",
    ]
    assert "no torch here" in result.stderr
    assert "pip tries now" in result.stdout


def test_pip_installs_without_uv(machine):
    result = machine.set_up(FAILS="install -q uv")
    assert result.returncode == 0, result.stderr
    assert machine.installs == ["pip -r requirements-cpu.txt"]


def test_failure_shows_the_last_lines(gpu_machine):
    result = gpu_machine.set_up(FAILS=" -r ")
    assert result.returncode == 1
    assert gpu_machine.installs == ["uv -r requirements.txt", "pip -r requirements.txt"]
    assert result.stderr.count("no torch here") == 2
    assert "could not install requirements.txt" in result.stderr
    assert not (gpu_machine.clone / ".venv" / ".complete").exists()


def test_packages_that_do_not_import_are_no_success(machine):
    result = machine.set_up(FAILS=" import accelerate")
    assert result.returncode == 1
    assert "do not import" in result.stderr
    assert not (machine.clone / ".venv" / ".complete").exists()


def test_uv_is_told_what_pip_is_configured_for(machine, tmp_path):
    (tmp_path / "pip.conf").write_text(
        "[global]\nindex-url = https://a/simple\nextra-index-url =\n  https://b/1\n  https://b/2\n"
        "find-links = /wheels\nconstraint = /cap.txt\ntrusted-host = a\ntimeout = 60\n"
        "[install]\nconstraint = /lower.txt\n"
    )
    result = machine.set_up(
        PIP_CONFIG_FILE=str(tmp_path / "pip.conf"), PIP_FIND_LINKS="/more /wheels"
    )
    assert result.returncode == 0, result.stderr
    assert machine.installs == [
        "uv --index-url https://a/simple --extra-index-url https://b/1 --extra-index-url https://b/2"
        " --find-links /more --find-links /wheels --constraint /lower.txt --trusted-host a"
        " -r requirements-cpu.txt"
    ]
    assert "--index-strategy unsafe-best-match" in "\n".join(machine.calls)


@pytest.mark.parametrize("option", ["PIP_NO_INDEX", "PIP_PRE", "PIP_NO_BINARY"])
def test_what_uv_cannot_be_told_is_left_to_pip(machine, option):
    result = machine.set_up(**{option: "1"})
    assert result.returncode == 0, result.stderr
    assert machine.installs == ["pip -r requirements-cpu.txt"]


def test_the_compiler_of_kernels_is_of_one_release():
    text = (REPO / "requirements.txt").read_text()
    releases = re.findall(r"^nvidia-(?:cuda-nvcc|cuda-crt|nvvm)==(\S+);", text, re.MULTILINE)
    assert releases == ["13.0.88"] * 3
