"""scripts/provenance.py, scripts/push_to_hub.py: the real client against tests/helpers/hub.py."""

import hashlib
import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import preflight
import push_to_hub
import pytest
from helpers import REPO
from helpers.files import write_text
from helpers.hub import ME, TEAM, TOKEN, running_hub
from helpers.processes import environment

PUSH, PROVENANCE = (REPO / "scripts" / name for name in ("push_to_hub.py", "provenance.py"))
COMMAND = ["accelerate", "launch", "ppo_sync.py", "--run_name", "a run", "--lr", "3e-7"]
ARGS = {
    "exp_name": "ppo_sync",
    "run_name": "run",
    "seed": 7,
    "model_name_or_path": "Qwen/Qwen2.5-0.5B",
    "dataset": "data/train.parquet",
    "dataset_split": "train",
    "eval_dataset": "openai/gsm8k",
    "eval_dataset_split": "test",
    "eval_temperature": 0.0,
    "value_learning_rate": 1e-5,
    "response_length": 512,
    "num_training_steps": 40,
    "num_updates": 160,
    "push_to_hub": True,
    "hf_entity": None,
    "hf_repo_id": None,
    "hf_repo_revision": None,
}
MADE = {"command": COMMAND, "commit": "c0ffee-dirty", "versions": {"torch": "2.0"}, "gpu": None}
LINES = [
    {"training_step": 1, "eval/verifiable_correct_rate": 0.0625, "eval/policy_version": 0},
    {"training_step": 2},
    {"training_step": 40, "eval/verifiable_correct_rate": 0.8125, "eval/policy_version": 40},
]
# Programs with shorter waiting times, as code for `python -c`
IMPATIENT = """
import sys, time
sys.path.insert(0, {folder!r})
import provenance, push_to_hub
provenance.HUB_TIMEOUT = push_to_hub.SILENCE = 1
time.sleep = lambda _: None
{name}.main()
"""


@pytest.fixture
def hub():
    with running_hub() as hub:
        yield hub


@pytest.fixture
def run_dir(tmp_path):
    """The folder of a finished run, with a model that is none."""
    run_dir = tmp_path / "output" / "run"
    metrics = [json.dumps(line | {"time/from_scratch": 90.0}) for line in LINES]
    write_text(run_dir / "args.json", json.dumps(ARGS | {"provenance": MADE}))
    write_text(run_dir / "metrics.jsonl", "\n".join(metrics))
    write_text(run_dir / "model/config.json", '{"model_type": "qwen2"}')
    write_text(run_dir / "model/chat_template.jinja", "{{ messages }}")
    write_text(run_dir / "model/README.md", "Of the base model")
    (run_dir / "model/model.safetensors").write_bytes(bytes(range(256)) * 4096)
    (run_dir / "curves.png").write_bytes(b"\x89PNG")
    write_text(run_dir / "rollouts.jsonl", "{}")
    return run_dir


def files_of(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in Path(folder).rglob("*")
        if path.is_file()
    }


def call(hub, *command, **variables):
    """A finished program that is logged in to the hub."""
    account = {"HF_ENDPOINT": hub.address, "HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "0"}
    account |= {"HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1"} | variables
    return subprocess.run(
        [sys.executable, *map(str, command)],
        env=environment(account),
        capture_output=True,
        text=True,
        timeout=60,
    )


def check_refusal(result, run_dir, *words):
    """Two lines: what failed, and the command that repeats it."""
    assert result.returncode == 1
    (what,) = (line for line in result.stderr.splitlines() if line.startswith("Not uploaded to "))
    assert [word for word in words if word not in what] == [], what
    assert str(run_dir) in result.stderr.partition("\nTo try again: ")[2]
    assert "Traceback" not in result.stderr


def impatient(name):
    return "-c", IMPATIENT.format(folder=str(PUSH.parent), name=name)


# ----------------------------------------------------------------------------------------- upload


@pytest.mark.slow
def test_branch_has_the_files_of_the_run(hub, run_dir):
    before = files_of(run_dir)
    result = call(hub, PUSH, run_dir)
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"Uploaded: {hub.address}/{ME}/ppo_sync/tree/run\n"
    sent = hub.branches[f"{ME}/ppo_sync", "run"]
    card = sent.pop("README.md").decode()
    wanted = files_of(run_dir / "model")
    del wanted["README.md"]
    wanted |= {name: before[name] for name in ("curves.png", "args.json", "metrics.jsonl")}
    assert sent == wanted
    assert hub.branches[f"{ME}/ppo_sync", "main"] == {}
    assert files_of(run_dir) == before
    for words in (
        "base_model: Qwen/Qwen2.5-0.5B\n",
        "| `verifiable_correct_rate` | 0.0625 | 0.8125 |",
        "| commit | c0ffee-dirty |",
        "| versions | torch 2.0 |",
        "| GPUs | none |",
        "accelerate launch ppo_sync.py \\\n  --run_name 'a run' \\\n  --lr 3e-7\n",
        f'from_pretrained("{ME}/ppo_sync", revision="run")',
        "apply_chat_template",
        "![Curves of the run](curves.png)",
    ):
        assert words in card
    assert "datasets:" not in card  # a file of this machine is no dataset of the hub
    assert str(run_dir.parent) not in card


@pytest.mark.parametrize(
    ("key", "found", "has_address"),
    [
        ("secret", [SimpleNamespace(url="https://wandb.ai/us/tandem/runs/newest")], True),
        ("secret", [], False),
        ("", None, False),  # without a login wandb would ask for one at the terminal
    ],
)
def test_card_has_the_address_of_the_tracked_run(key, found, has_address, run_dir, monkeypatch):
    class Api:
        default_entity = "us"

        def __init__(self, timeout):
            assert found is not None

        def runs(self, project, filters, **_):
            assert (project, filters) == ("us/tandem", {"display_name": "run"})
            return found

    monkeypatch.setattr("wandb.Api", Api)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("NETRC", "/nowhere")
    monkeypatch.setenv("WANDB_API_KEY", key)
    args = json.loads((run_dir / "args.json").read_text())
    tracked = {"with_tracking": True, "wandb_project_name": "tandem", "wandb_entity": None}
    card = push_to_hub.make_card(run_dir, args | tracked, "me/model", "run")
    assert ("| tracked | https://wandb.ai/us/tandem/runs/newest |" in card) == has_address
    assert "tracked" not in push_to_hub.make_card(run_dir, args, "me/model", "run")


@pytest.mark.slow
def test_names_of_the_arguments_are_taken(hub, run_dir):
    names = {"hf_repo_id": f"{TEAM}/model", "hf_repo_revision": "first"}
    write_text(run_dir / "args.json", json.dumps(ARGS | names))
    (run_dir / "model/model.safetensors").unlink()  # what is small goes up the same way with Xet
    result = call(hub, PUSH, run_dir, HF_HUB_DISABLE_XET="0")
    assert result.stdout == f"Uploaded: {hub.address}/{TEAM}/model/tree/first\n", result.stderr


@pytest.mark.slow
def test_upload_that_was_cut_is_repeated(hub, run_dir):
    before = files_of(run_dir)
    for hub.cuts in ("PUT /large/", "/commit/"):  # a large file, then what goes up with the commit
        result = call(hub, *impatient("push_to_hub"), run_dir)
        check_refusal(result, run_dir, "Server disconnected")
        assert hub.branches[f"{ME}/ppo_sync", "run"] == {}
        assert files_of(run_dir) == before
    hub.cuts = None
    assert call(hub, PUSH, run_dir).returncode == 0
    sent = hub.branches[f"{ME}/ppo_sync", "run"]
    assert sent["model.safetensors"] == before["model/model.safetensors"]


@pytest.mark.slow
def test_refusals_are_told_in_two_lines(hub, run_dir):
    result = call(hub, PUSH, run_dir, HF_TOKEN="hf_old")
    check_refusal(result, run_dir, "401")
    assert "hf_old" not in result.stdout + result.stderr
    result = call(hub, PUSH, run_dir, "--repo_id", "others/model", "--revision", "x")
    check_refusal(result, run_dir, "others/model", "rights")
    assert f"{PUSH} {run_dir} --repo_id others/model --revision x" in result.stderr
    assert not any(hub.branches.values())
    (run_dir / "model/config.json").unlink()  # the run has not ended
    result = call(hub, PUSH, run_dir)
    assert result.returncode == 2
    assert "has no model/config.json" in result.stderr.splitlines()[-1]


# -------------------------------------------------------------------------------------- provenance


CALLER = """
import subprocess, sys
sys.exit(subprocess.run([sys.executable, *{program!r}, {run_dir!r}]).returncode)
"""
LAUNCHER = """
import subprocess, sys
sys.exit(subprocess.run([sys.executable, *sys.argv[2:]]).returncode)
"""


@pytest.fixture
def caller(run_dir, tmp_path):
    """A script that asks for its provenance, under git; beside it a launcher and nvidia-smi."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    folder = tmp_path / "code"
    program = CALLER.format(program=[str(PROVENANCE)], run_dir=str(run_dir))
    write_text(folder / "train.py", program)
    write_text(folder / "nvidia-smi", "#!/bin/sh\necho Fast GPU\necho Fast GPU\n").chmod(0o755)
    write_text(folder / "accelerate", LAUNCHER)
    git = ["git", "-C", folder, "-c", "user.name=a", "-c", "user.email=a@example.org"]
    for words in ("init -q", "add train.py", "commit -q -m first"):
        subprocess.run([*git, *words.split()], check=True)
    write_text(run_dir / "args.json", json.dumps(ARGS | {"push_to_hub": False}))
    return folder / "train.py"


def provenance_of(run_dir):
    return json.loads((run_dir / "args.json").read_text())["provenance"]


@pytest.mark.slow
def test_what_made_a_run_is_written_down(hub, caller, run_dir):
    path = f"{caller.parent}:{environment()['PATH']}"
    result = call(hub, caller, "--seed", "2", PATH=path)
    assert result.returncode == 0, result.stderr
    command = provenance_of(run_dir)["command"]
    assert command == [Path(sys.executable).name, str(caller), "--seed", "2"]
    call(hub, caller.with_name("accelerate"), "launch", caller, "--seed", "2", PATH=path)
    args = json.loads((run_dir / "args.json").read_text())
    made = args.pop("provenance")
    assert made["command"] == ["accelerate", "launch", str(caller), "--seed", "2"]
    assert made["script_sha256"] == hashlib.sha256(caller.read_bytes()).hexdigest()
    assert len(made["commit"]) == 40
    assert made["gpu"] == "2 x Fast GPU"
    assert made["versions"]["transformers"] and made["versions"]["python"]
    assert args == ARGS | {"push_to_hub": False}
    assert hub.requests == [] and TOKEN not in json.dumps(made)


@pytest.mark.slow
def test_commit_says_that_the_script_was_changed(hub, caller, run_dir):
    write_text(caller, caller.read_text() + "# changed\n")
    call(hub, caller)
    assert provenance_of(run_dir)["commit"].endswith("-dirty")
    copy = write_text(caller.with_name("copy.py"), caller.read_text())  # git does not know it
    subprocess.run(["git", "-C", caller.parent, "checkout", "-q", "train.py"], check=True)
    call(hub, copy)
    assert provenance_of(run_dir)["commit"].endswith("-dirty")


@pytest.mark.slow
def test_place_on_the_hub_is_known_before_the_training(hub, caller, run_dir):
    write_text(run_dir / "args.json", json.dumps(ARGS))
    with open(run_dir / "args.json") as reader:
        assert call(hub, caller).returncode == 0
        assert json.loads(reader.read()) == ARGS  # never a file that is half written
    args = json.loads((run_dir / "args.json").read_text())
    place = (args["hf_repo_id"], args["hf_repo_revision"], args["hf_repo_url"])
    assert place == (f"{ME}/ppo_sync", "run", f"{hub.address}/{ME}/ppo_sync/tree/run")
    # A refused login costs the place alone
    write_text(run_dir / "args.json", json.dumps(ARGS))
    result = call(hub, caller, HF_TOKEN="hf_old")
    assert result.returncode == 1
    assert len(result.stderr.splitlines()) == 1 and "logged in" in result.stderr
    assert provenance_of(run_dir)["commit"]


@pytest.mark.slow
def test_hub_that_never_answers_is_not_waited_for(run_dir, tmp_path):
    program = CALLER.format(program=impatient("provenance"), run_dir=str(run_dir))
    caller = write_text(tmp_path / "train.py", program)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # the system accepts, nobody reads
        hub = SimpleNamespace(address=f"http://127.0.0.1:{silent.getsockname()[1]}")
        result = call(hub, caller)
        pushed = call(hub, *impatient("push_to_hub"), run_dir)
    assert result.returncode == 1
    assert result.stderr == "provenance.py: no answer of the hub in 1 s\n"
    assert provenance_of(run_dir)["versions"]
    assert pushed.returncode == 1 and "timed out" in pushed.stderr


# --------------------------------------------------------------------------------------- preflight

ENTITY = {"hf_entity": "others"}
# name: (arguments, token, its role, words)
ACCOUNTS = {
    "good": ({}, TOKEN, "write", None),
    "of a team": ({"hf_entity": TEAM, "hf_repo_id": "name"}, TOKEN, "write", None),
    "refused": ({}, "hf_old", "write", "--push_to_hub | hf auth login | token"),
    "somebody else's": (ENTITY, TOKEN, "write", "others/ppo_sync | me and team"),
    "reads": ({}, TOKEN, "read", "may only read"),
    "no name": ({"hf_repo_id": "a b"}, TOKEN, "write", "--hf_repo_id | a b"),
    "no branch": ({"run_name": "a run"}, TOKEN, "write", "a run | --hf_repo_revision"),
}


@pytest.mark.parametrize("name", ACCOUNTS)
def test_preflight_asks_the_hub_who_is_logged_in(name, hub, monkeypatch):
    changes, token, hub.role, words = ACCOUNTS[name]
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", hub.address)
    monkeypatch.setattr(huggingface_hub.hf_api.api, "endpoint", hub.address)
    monkeypatch.setattr(preflight, "hub_answers", lambda: True)
    monkeypatch.setenv("HF_TOKEN", token)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    args = SimpleNamespace(**ARGS | {"with_tracking": False} | changes)
    run = SimpleNamespace(args=args, script=SimpleNamespace(__file__=str(REPO / "ppo_sync.py")))
    mistake = ""
    try:
        preflight.check_accounts(run)
    except preflight.Mistake as error:
        mistake = str(error)
    assert bool(mistake) == bool(words)
    assert [word for word in (words or "").split(" | ") if word not in mistake] == []
