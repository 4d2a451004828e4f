"""scripts/benchmark/soak.py: whose memory it reads; a leak that it sees."""

import re
import subprocess
import sys

import psutil
import pytest
import soak
from helpers import REPO
from helpers.files import read_json_lines, write_text
from helpers.processes import environment

LEAKY = """
import sys
import tempfile

sys.path.insert(0, {repo!r})
import grpo_vllm_async as script

kept = []
write_metrics = script.write_metrics


def leak(*args):
    kept.append((b"x" * 2**20, tempfile.NamedTemporaryFile()))
    write_metrics(*args)


script.write_metrics = leak
if __name__ == "__main__":
    script.main(script.tyro.cli(script.Args))
"""


@pytest.mark.slow
def test_leak_of_a_run_is_seen_at_its_process_and_in_its_slope(assets, tmp_path):
    leaky = write_text(tmp_path / "leaky.py", LEAKY.format(repo=str(REPO)))
    program = [sys.executable, REPO / "scripts/benchmark/soak.py", "--script", leaky]
    program += ["--steps", "24", "--every", "2", "--from", "8", "--results", tmp_path / "s.jsonl"]
    # One picture, which is drawn beside the steps
    result = subprocess.run(
        [*program, "--num_evals", "1", "--save_freq", "10"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    lines = read_json_lines(tmp_path / "s.jsonl")
    for line in lines:
        roles = {role: found["processes"] for role, found in line["roles"].items()}
        assert roles.pop("programs") <= 1
        assert roles == dict.fromkeys(soak.LASTING, 1) | {
            "reward workers": 2,
            "zombies": 0,
            "other": 0,
        }
        # vLLM has its cache of 1 GiB; the learner no weights to speak of
        own = {role: found["own"] / 2**20 for role, found in line["roles"].items()}
        assert own["vLLM"] > 1024 > 600 > own["learner"] > own["resource tracker"] > 1
    # A look may come late
    steps = [line["step"] for line in lines]
    assert 24 <= steps[-1] < 30 and len(steps) > 6

    rows = soak.growth_of(lines, 8)
    # A MiB a step
    assert rows["learner"]["slope"] == pytest.approx(1024 * 1000, rel=0.2)
    assert rows["learner"]["late_slope"] == pytest.approx(1024 * 1000, rel=0.2)
    first, last = rows["learner"]["fds"]
    assert last - first == pytest.approx(steps[-1] - min(filter((7).__lt__, steps)), abs=3)
    for role in soak.LASTING[1:]:
        assert abs(rows[role]["slope"]) < 0.2 * 1024 * 1000
    assert lines[-1]["files"]["tmp"] - lines[0]["files"]["tmp"] > 16

    table = re.findall(r"^\| ([\w ]+) \| \d+ \| .* \|$", result.stdout, re.MULTILINE)
    assert table[:5] == soak.LASTING and table[-1] == "all"
    assert "time/checkpoint" in result.stdout
    assert (tmp_path / "s.png").read_bytes().startswith(b"\x89PNG")


FORKING = """
import os

shared = b"x" * (40 * 2**20)
child = os.fork()
own = b"y" * (20 * 2**20 if child == 0 else 0)
print(os.getpid(), flush=True)
input()
"""


def test_memory_that_forks_share_is_counted_once():
    with subprocess.Popen(
        [sys.executable, "-c", FORKING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        pids = [int(parent.stdout.readline()) for _ in range(2)]
        pids.sort(key=lambda pid: pid != parent.pid)
        sizes = [soak.memory_of(psutil.Process(pid)) for pid in pids]
        parent.stdin.write("\n\n")
    own, rss = ([size[name] / 2**20 for size in sizes] for name in ("own", "rss"))
    assert own[1] - own[0] == pytest.approx(20, abs=1)
    assert 60 < sum(own) < 75 < 100 < sum(rss)


def test_growth_by_hand():
    lines = []
    for step in range(0, 1001, 100):
        roles = {role: {"processes": 0, "threads": 0, "fds": 0, "own": 0} for role in soak.ROLES}
        size = 2**20 + 1024 * min(step, 500)
        roles["vLLM"] = {"processes": 1, "threads": 4, "fds": 7 + step, "own": size}
        roles["learner"] = {"processes": 1, "threads": 4, "fds": 7, "own": 1024 * step}
        roles["programs"] = {"processes": 1, "threads": 1, "fds": 3, "own": 2**20 * step}
        lines.append({"step": step, "roles": roles})
    rows = soak.growth_of(lines, 200)
    assert list(rows) == ["learner", "vLLM", "programs", "all"]
    assert rows["learner"]["slope"] == pytest.approx(1000)
    assert rows["vLLM"]["mib"] == [1 + 200 / 1024, 1 + 500 / 1024]
    assert (rows["vLLM"]["grown_kib"], rows["vLLM"]["fds"]) == (300, [207, 1007])
    assert rows["vLLM"]["late_slope"] == pytest.approx(0)
    # Without programs, which come and go
    assert rows["all"]["grown_kib"] == 300 + 800
    with pytest.raises(ValueError, match="2 looks"):
        soak.growth_of(lines, 900)
