"""scripts/provenance.py and scripts/push_to_hub.py, with a stand-in for the hub's client."""

import hashlib
import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar
from unittest.mock import Mock

import huggingface_hub
import preflight
import provenance
import push_to_hub
import pytest
from helpers import REPO
from helpers.files import write_text
from helpers.processes import environment
from helpers.programs import call_main

PROVENANCE = REPO / "scripts" / "provenance.py"
COMMAND = ["accelerate", "launch", "ppo_sync.py", "--run_name", "a run", "--lr", "3e-7"]
ARGS = {"exp_name": "ppo_sync", "run_name": "run", "seed": 7, "value_learning_rate": 1e-5}
ARGS |= {"model_name_or_path": "Qwen/Qwen2.5-0.5B", "response_length": 512}
ARGS |= {"dataset": "data/train.parquet", "dataset_split": "train", "eval_temperature": 0.0}
ARGS |= {"eval_dataset": "openai/gsm8k", "eval_dataset_split": "test"}
ARGS |= {"num_training_steps": 40, "num_updates": 160, "push_to_hub": True}
ARGS |= dict.fromkeys(("hf_entity", "hf_repo_id", "hf_repo_revision"))
MADE = {"command": COMMAND, "commit": "c0ffee-dirty", "script_sha256": "beef", "gpu": None}
MADE |= {"versions": {"torch": "2.0"}}
LINES = [
    {"training_step": 1, "eval/verifiable_correct_rate": 0.0625, "eval/policy_version": 0},
    {"training_step": 2},
    {"training_step": 40, "eval/verifiable_correct_rate": 0.8125, "eval/policy_version": 40},
]
LOGIN = {"name": "me", "orgs": [{"name": "team"}], "auth": {"accessToken": {"role": "write"}}}
REFUSED = huggingface_hub.errors.HfHubHTTPError(
    "401 Unauthorized", response=SimpleNamespace(headers={}, request=None)
)


@pytest.fixture
def run_dir(tmp_path):
    """The folder of a finished run, with a model that is none."""
    run_dir = tmp_path / "output" / "run"
    metrics = [json.dumps(line | {"time/from_scratch": 90.0}) + "\n" for line in LINES]
    texts = {"args.json": json.dumps(ARGS | {"provenance": MADE})}
    texts |= {"metrics.jsonl": "".join(metrics), "model/config.json": '{"model_type": "qwen2"}'}
    texts |= {"model/chat_template.jinja": "{{ messages }}", "model/README.md": "The base model's"}
    texts |= {"model/model.safetensors": "weights", "curves.png": "PNG", "rollouts.jsonl": "{}"}
    for name, text in texts.items():
        write_text(run_dir / name, text)
    return run_dir


def files_of(folder):
    paths = [path for path in Path(folder).rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


class Hub:
    """In place of HfApi: what it was sent, and an error that the next upload ends with."""

    endpoint = "https://hub"
    branches: ClassVar = {}
    error = None

    def create_repo(self, repo, private, exist_ok):
        assert exist_ok
        return SimpleNamespace(repo_id=repo if "/" in repo else f"me/{repo}")

    def create_branch(self, repo, branch, exist_ok):
        assert exist_ok
        self.branches[repo, branch] = {}

    def create_commit(self, repo, operations, commit_message, revision):
        if self.error:
            raise self.error
        for operation in operations:
            with operation.as_file() as file:
                self.branches[repo, revision][operation.path_in_repo] = file.read()


@pytest.fixture
def push(monkeypatch):
    """push(*words) -> (exit status, what push_to_hub.py prints, its errors)"""
    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    monkeypatch.setattr(Hub, "branches", {})
    return partial(call_main, push_to_hub)


# ----------------------------------------------------------------------------------------- upload


CARD = (
    "base_model: Qwen/Qwen2.5-0.5B\n",
    "| evaluated on | `openai/gsm8k`, split `test`, at temperature 0 |",
    "| `verifiable_correct_rate` | 0.0625 | 0.8125 |",
    "| commit | c0ffee-dirty |",
    "accelerate launch ppo_sync.py \\\n  --run_name 'a run' \\\n  --lr 3e-7\n",
    "Trained by PPO with Tandem",
    "| steps | 40 of 40, in 1.5 minutes |",
)


def test_branch_has_the_files_of_the_run_as_the_dry_run_said(push, run_dir, monkeypatch):
    before = files_of(run_dir)
    with monkeypatch.context() as offline:
        offline.setattr(huggingface_hub, "HfApi", None)
        said = push(run_dir, "--dry_run")[1]
    head, dry = said.split("\nREADME.md:\n\n")
    first, *listed, last = head.splitlines()
    assert first == "Would be uploaded to LOGIN/ppo_sync, branch run:" and "public" in last
    status, said, errors = push(run_dir)
    assert (status, errors) == (0, "") and files_of(run_dir) == before
    assert said.startswith("Uploaded: https://hub/me/ppo_sync/tree/run\nTo load it:\n\n")
    sent = Hub.branches["me/ppo_sync", "run"]
    card = sent.pop("README.md").decode()
    model = files_of(run_dir / "model")
    del model["README.md"]
    assert sent == model | {name: before[name] for name in push_to_hub.BESIDES}
    assert sorted(line.split()[1] for line in listed) == sorted([*sent, "README.md"])
    assert card == dry.replace("LOGIN/ppo_sync", "me/ppo_sync")
    assert [words for words in CARD if words not in card] == []
    assert "datasets:" not in card  # a file of this machine is no dataset of the hub
    assert str(run_dir.parent) not in card and "tracked" not in card

    names = {"hf_repo_id": "team/model", "hf_repo_revision": "first"}
    write_text(run_dir / "args.json", json.dumps(ARGS | names))
    assert push(run_dir)[1].startswith("Uploaded: https://hub/team/model/tree/first\n")
    said = push(run_dir, "--dry_run", "--repo_id", "team/x", "--private")[1]
    assert "to team/x, branch" in said and "is made: private." in said


@pytest.mark.parametrize("task", ["text-generation", "text-classification"])
def test_lines_that_are_printed_load_the_model_from_its_branch(task, push, run_dir):
    args, asked = ARGS | {"hf_repo_revision": "first"}, "max_new_tokens=512"
    if task == "text-classification":  # of a reward model, which answers nothing
        asked = 'function_to_apply="none"'
        del args["value_learning_rate"]
    write_text(run_dir / "args.json", json.dumps(args))
    lines = push(run_dir)[1].partition("To load it:\n\n")[2]
    compile(lines, "lines", "exec")
    assert f'pipeline("{task}", "me/ppo_sync", revision="first")' in lines and asked in lines
    card = Hub.branches["me/ppo_sync", "first"]["README.md"].decode()
    assert lines in card and f"pipeline_tag: {task}\n" in card


# Without a login, "", wandb would ask for one at the terminal
@pytest.mark.parametrize(("key", "is_there"), [("secret", True), ("", False)])
def test_card_has_the_address_of_the_tracked_run(key, is_there, run_dir, monkeypatch):
    class Api:
        default_entity = "us"

        def __init__(self, timeout):
            assert is_there

        def runs(self, project, filters, **_):
            assert (project, filters) == ("us/tandem", {"display_name": "run"})
            return [SimpleNamespace(url="https://wandb.ai/us/newest")]

    monkeypatch.setattr("wandb.Api", Api)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("NETRC", "/nowhere")
    monkeypatch.setenv("WANDB_API_KEY", key)
    tracked = {"with_tracking": True, "wandb_project_name": "tandem", "wandb_entity": None}
    card = push_to_hub.make_card(run_dir, ARGS | tracked, "me/model", "run")
    assert ("| tracked | https://wandb.ai/us/newest |" in card) == is_there


def test_upload_that_fails_is_told_in_two_lines_and_can_be_repeated(push, run_dir, monkeypatch):
    before = files_of(run_dir)
    monkeypatch.setattr(Hub, "error", OSError("model.safetensors"))
    Hub.error.__cause__ = ConnectionError("Server\ndisconnected")
    status, _, errors = push(run_dir, "--repo_id", "others/model", "--revision", "x")
    assert status == 1 and files_of(run_dir) == before
    what, how = errors.splitlines()
    assert what.endswith("others/model: OSError: model.safetensors Server disconnected")
    assert how.endswith(f"push_to_hub.py {run_dir} --repo_id others/model --revision x")
    (run_dir / "model/config.json").unlink()
    status, _, errors = push(run_dir)
    assert status == 2 and "has no model/config.json" in errors


# -------------------------------------------------------------------------------------- provenance


CALLER = """
import subprocess, sys
sys.exit(subprocess.run([sys.executable, {program!r}, {run_dir!r}]).returncode)
"""
LAUNCHER = """
import os, subprocess, sys
os.environ["ACCELERATE_MIXED_PRECISION"] = "no"
sys.exit(subprocess.run([sys.executable, *sys.argv[2:]]).returncode)
"""


def call(*command, **variables):
    """A finished program."""
    return subprocess.run(
        [sys.executable, *map(str, command)],
        env=environment({"NO_PROXY": "127.0.0.1"} | variables),
        capture_output=True,
        text=True,
        timeout=60,
    )


def provenance_of(run_dir):
    return json.loads((run_dir / "args.json").read_text())["provenance"]


@pytest.mark.slow
@pytest.mark.usefixtures("git")
def test_what_made_a_run_is_written_down(run_dir, tmp_path):
    folder, args = tmp_path / "code", ARGS | {"push_to_hub": False}
    write_text(run_dir / "args.json", json.dumps(args))
    text = CALLER.format(program=str(PROVENANCE), run_dir=str(run_dir))
    caller = write_text(folder / "train.py", text)
    write_text(folder / "nvidia-smi", "#!/bin/sh\necho Fast GPU\necho Fast GPU\n").chmod(0o755)
    launcher = write_text(folder / "accelerate", LAUNCHER)
    git = ["git", "-C", folder, "-c", "user.name=a", "-c", "user.email=a@example.org"]
    for words in ("init -q", "add train.py", "commit -q -m first"):
        subprocess.run([*git, *words.split()], check=True)

    secrets = {"HF_TOKEN": "hf_secret", "PATH": f"{folder}:{environment()['PATH']}"}
    assert call(caller, "--seed", "2", **secrets).returncode == 0
    command = provenance.as_typed([sys.executable, str(caller), "--seed", "2"], str(Path.cwd()))
    assert provenance_of(run_dir)["command"] == command
    call(launcher, "launch", caller, "--seed", "2", **secrets)
    made = provenance_of(run_dir)
    assert json.loads((run_dir / "args.json").read_text()) == args | {"provenance": made}
    assert made["command"] == ["accelerate", "launch", str(caller), "--seed", "2"]
    assert made["script_sha256"] == hashlib.sha256(caller.read_bytes()).hexdigest()
    assert len(made["commit"]) == 40 and made["gpu"] == "2 x Fast GPU"
    assert made["versions"]["transformers"] and made["versions"]["python"]
    assert "hf_secret" not in json.dumps(made)

    copy = write_text(folder / "copy.py", text)  # git does not know it
    call(copy)
    assert provenance_of(run_dir)["commit"].endswith("-dirty")
    call(write_text(caller, f"{text}# changed\n"))
    assert provenance_of(run_dir)["commit"].endswith("-dirty")


def test_place_on_the_hub_is_known_before_the_training(run_dir, monkeypatch):
    monkeypatch.setattr(provenance, "find_script", lambda process: PROVENANCE)
    monkeypatch.setattr(provenance, "find_command", lambda process: COMMAND)
    monkeypatch.setenv("HF_ENDPOINT", "https://hub/")
    monkeypatch.setattr(huggingface_hub, "whoami", lambda: LOGIN)
    with open(run_dir / "args.json") as reader:
        assert call_main(provenance, run_dir)[0] == 0
        assert json.loads(reader.read())["provenance"] == MADE  # never a file half written
    args = json.loads((run_dir / "args.json").read_text())
    place = (args["hf_repo_id"], args["hf_repo_revision"], args["hf_repo_url"])
    assert place == ("me/ppo_sync", "run", "https://hub/me/ppo_sync/tree/run")

    # A refused login costs the place alone
    write_text(run_dir / "args.json", json.dumps(ARGS))
    monkeypatch.setattr(huggingface_hub, "whoami", Mock(side_effect=REFUSED))
    status, _, errors = call_main(provenance, run_dir)
    assert status == 1 and "does not say who is logged in: 401" in errors
    assert provenance_of(run_dir)["command"] == COMMAND


# --------------------------------------------------------------------------------------- preflight

READS = LOGIN | {"auth": {"accessToken": {"role": "read"}}}
# (arguments, what the hub says of the login, words)
ACCOUNTS = [
    ({"hf_entity": "team", "hf_repo_id": "name"}, LOGIN, ""),
    ({}, REFUSED, "hf auth login"),
    ({"hf_entity": "others"}, LOGIN, "me and team"),
    ({}, READS, "may only read"),
    ({"hf_repo_id": "a b"}, LOGIN, "--hf_repo_id"),
    ({"run_name": "a run"}, LOGIN, "--hf_repo_revision"),
]


def test_preflight_asks_the_hub_who_is_logged_in(monkeypatch):
    monkeypatch.setattr(preflight, "hub_answers", lambda: True)
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    for changes, login, words in ACCOUNTS:
        whoami = Mock(side_effect=[login])  # an error is raised
        monkeypatch.setattr(huggingface_hub, "whoami", whoami)
        args = SimpleNamespace(**ARGS | {"with_tracking": False} | changes)
        run = SimpleNamespace(args=args, script=SimpleNamespace(__file__=str(REPO / "ppo_sync.py")))
        mistake = ""
        try:
            preflight.check_accounts(run)
        except preflight.Mistake as error:
            mistake = str(error)
        assert bool(mistake) == bool(words) and words in mistake
