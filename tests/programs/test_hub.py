"""Test provenance.py and push_to_hub.py in scripts/, with a stand-in for the Hub's client."""

import hashlib
import json
import subprocess
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import huggingface_hub
import preflight
import push_to_hub
import pytest
from helpers import REPO
from helpers.files import write_text
from helpers.processes import environment
from helpers.programs import call_main
from internal import provenance

PROVENANCE = REPO / "scripts/internal/provenance.py"
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
    """Write the folder of a finished run. Its model is only a text."""
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
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def args_of(run_dir):
    return json.loads((run_dir / "args.json").read_text())


@pytest.fixture
def hub(monkeypatch):
    """Replace HfApi by a mock."""
    hub = Mock(endpoint="https://hub")
    hub.create_repo.side_effect = lambda repo, **_: SimpleNamespace(
        repo_id=repo if "/" in repo else f"me/{repo}"
    )
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: hub)
    return hub


def sent_to(hub):
    """Return (repo, branch, {name: content}) of the last upload."""
    (repo, operations), options = hub.create_commit.call_args
    hub.create_branch.assert_called_with(repo, branch=options["revision"], exist_ok=True)
    files = {}
    for operation in operations:
        with operation.as_file() as file:
            files[operation.path_in_repo] = file.read()
    return repo, options["revision"], files


CARD = (
    "base_model: Qwen/Qwen2.5-0.5B\n",
    "| evaluated on | openai/gsm8k |",
    "| `verifiable_correct_rate` | 0.0625 | 0.8125 |",
    "| commit | c0ffee-dirty |",
    "accelerate launch ppo_sync.py --run_name 'a run' --lr 3e-7\n",
    "Trained by PPO with Tandem",
)


def test_branch_has_the_files_of_the_run_as_the_dry_run_said(hub, run_dir):
    before = files_of(run_dir)
    head, dry = call_main(push_to_hub, run_dir, "--dry_run")[1].split("\nREADME.md:\n\n")
    assert hub.mock_calls == []
    first, *listed, last = head.splitlines()
    assert first == "These files would be uploaded to LOGIN/ppo_sync, branch run:"
    assert "public" in last
    status, output, errors = call_main(push_to_hub, run_dir)
    assert (status, errors) == (0, "") and files_of(run_dir) == before
    assert output.startswith("Uploaded to https://hub/me/ppo_sync/tree/run\nTo load it:\n\n")
    # Without --private the owner's default decides, which False would overrule
    hub.create_repo.assert_called_with("ppo_sync", private=None, exist_ok=True)
    assert huggingface_hub.get_session().timeout.read == push_to_hub.HUB_TIMEOUT
    repo, branch, sent = sent_to(hub)
    assert (repo, branch, listed) == ("me/ppo_sync", "run", sorted(sent))
    card = sent.pop("README.md").decode()
    assert card == dry.replace("LOGIN/ppo_sync", "me/ppo_sync")
    model = files_of(run_dir / "model")
    del model["README.md"]
    assert sent == model | {name: before[name] for name in push_to_hub.RUN_FILES}
    assert [words for words in CARD if words not in card] == []
    assert "datasets:" not in card  # the dataset is a file
    assert str(run_dir.parent) not in card and "tracked" not in card

    # A reward model is uploaded to another branch, from which the printed lines load it
    args = ARGS | {"hf_repo_id": "team/model", "hf_repo_revision": "first"}
    del args["value_learning_rate"]
    write_text(run_dir / "args.json", json.dumps(args))
    lines = call_main(push_to_hub, run_dir, "--private")[1].partition("To load it:\n\n")[2]
    hub.create_repo.assert_called_with("team/model", private=True, exist_ok=True)
    assert 'pipeline("text-classification", "team/model", revision="first")' in lines
    assert 'function_to_apply="none"' in lines
    assert lines in sent_to(hub)[2]["README.md"].decode()

    # After a failure the command can be repeated
    hub.create_commit.side_effect = OSError("model.safetensors")
    words = [run_dir, "--repo_id", "others/model", "--revision", "x"]
    status, _, errors = call_main(push_to_hub, *words)
    assert status == 1 and "others/model failed: OSError: model.safetensors" in errors
    assert errors.endswith(f"push_to_hub.py {run_dir} --repo_id others/model --revision x\n")


# Without a key wandb would ask for one at the terminal
@pytest.mark.parametrize(("key", "is_there"), [("secret", True), ("", False)])
def test_card_has_the_address_of_the_tracked_run(key, is_there, run_dir, monkeypatch):
    api = Mock(default_entity="us")
    api.runs.return_value = [SimpleNamespace(url="https://wandb.ai/us/newest")]
    login = Mock(return_value=api)
    monkeypatch.setattr("wandb.Api", login)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("NETRC", "/nowhere")
    monkeypatch.setenv("WANDB_API_KEY", key)
    tracked = {"with_tracking": True, "wandb_project_name": "tandem", "wandb_entity": None}
    card = push_to_hub.make_card(run_dir, ARGS | tracked, "me/model", "run")
    assert ("| tracked | https://wandb.ai/us/newest |" in card) == is_there == login.called
    if is_there:
        (project,), options = api.runs.call_args
        assert (project, options["filters"]) == ("us/tandem", {"display_name": "run"})


# -------------------------------------------------------------------------------------- provenance

CALLER = f"""
import subprocess, sys
sys.exit(subprocess.run([sys.executable, {str(PROVENANCE)!r}, sys.argv[1]]).returncode)
"""
LAUNCHER = """
import os, subprocess, sys
os.environ["ACCELERATE_MIXED_PRECISION"] = "no"
sys.exit(subprocess.run([sys.executable, *sys.argv[2:]]).returncode)
"""


@pytest.mark.slow
@pytest.mark.usefixtures("git")
def test_provenance_of_a_run_is_recorded(run_dir, tmp_path):
    folder, args = tmp_path / "code", ARGS | {"push_to_hub": False}
    write_text(run_dir / "args.json", json.dumps(args))
    caller = write_text(folder / "train.py", CALLER)
    launcher = write_text(folder / "accelerate", LAUNCHER)
    write_text(folder / "nvidia-smi", "#!/bin/sh\necho Fast GPU\necho Fast GPU\n").chmod(0o755)
    git = ["git", "-C", folder, "-c", "user.name=a", "-c", "user.email=a@example.org"]
    for words in ("init -q", "add train.py", "commit -q -m first"):
        subprocess.run([*git, *words.split()], check=True)

    def provenance_of(*command):
        secrets = {"HF_TOKEN": "hf_secret", "PATH": f"{folder}:{environment()['PATH']}"}
        command = [sys.executable, *map(str, command), str(run_dir), "--seed", "2"]
        subprocess.run(command, env=environment(secrets), check=True, timeout=60)
        written = args_of(run_dir)
        recorded = written.pop("provenance")
        assert written == args and "hf_secret" not in json.dumps(recorded)
        return recorded

    recorded = provenance_of(launcher, "launch", caller)
    command = ["accelerate", "launch", str(caller), str(run_dir), "--seed", "2"]
    assert recorded["command"] == command
    assert recorded["script_sha256"] == hashlib.sha256(caller.read_bytes()).hexdigest()
    assert len(recorded["commit"]) == 40 and recorded["gpu"] == "2 x Fast GPU"
    assert recorded["versions"]["transformers"] and recorded["versions"]["python"]
    # One script is a copy that git does not know, and one has changed
    for path in (write_text(folder / "copy.py", CALLER), write_text(caller, f"{CALLER}# changed")):
        recorded = provenance_of(path)
        assert recorded["commit"].endswith("-dirty") and recorded["command"][1] == str(path)


def test_place_on_the_hub_is_known_before_the_training(run_dir, monkeypatch):
    monkeypatch.setattr(provenance, "find_script", lambda process: PROVENANCE)
    monkeypatch.setattr(provenance, "find_command", lambda process: COMMAND)
    monkeypatch.setenv("HF_ENDPOINT", "https://hub/")
    monkeypatch.setattr(huggingface_hub, "whoami", lambda: LOGIN)
    monkeypatch.setenv("TANDEM_LAUNCHED", str(run_dir.parent / "launched"))
    assert call_main(provenance, run_dir)[0] == 0
    assert (run_dir.parent / "launched").read_text() == str(run_dir)  # train/launch.py asks
    args = args_of(run_dir)
    place = (args["hf_repo_id"], args["hf_repo_revision"], args["hf_repo_url"])
    assert place == ("me/ppo_sync", "run", "https://hub/me/ppo_sync/tree/run")

    # Without a valid login everything else is still recorded
    write_text(run_dir / "args.json", json.dumps(ARGS))
    monkeypatch.setattr(huggingface_hub, "whoami", Mock(side_effect=REFUSED))
    status, _, errors = call_main(provenance, run_dir)
    assert status == 1 and "does not return the name of the login: 401" in errors
    assert args_of(run_dir)["provenance"]["command"] == COMMAND


# ----------------------------------------------------------------------- preflight.check_accounts

READS = LOGIN | {"auth": {"accessToken": {"role": "read"}}}
# (arguments, the Hub's answer about the login, words of the error)
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
        monkeypatch.setattr(huggingface_hub, "whoami", Mock(side_effect=[login]))
        args = SimpleNamespace(**ARGS | {"with_tracking": False} | changes)
        run = SimpleNamespace(args=args, script=SimpleNamespace(PROGRAMS=REPO / "scripts"))
        message = ""
        try:
            preflight.check_accounts(run)
        except preflight.Mistake as error:
            message = str(error)
        assert bool(message) == bool(words) and words in message
