import json
import os
import shutil
import sys
from pathlib import Path

import pyarrow.parquet
import pytest
from helpers import REPO
from helpers.files import write_rows, write_text
from helpers.processes import flags_of

import ppo_sync

ROW = {
    "prompt": [{"role": "user", "content": "53812="}],
    "data_source": "debug/sorting",
    "reward_model": {"style": "rule", "ground_truth": "12358"},
    "extra_info": {"index": 0},
}

OPEN_INSTRUCT_ROW = {"messages": ROW["prompt"], "ground_truth": "72", "dataset": "gsm8k"}


def rows_file(folder, rows):
    return write_rows(folder / "data.jsonl", rows)


def without(name):
    return {key: value for key, value in ROW.items() if key != name}


def empty_parquet(folder):
    pyarrow.parquet.write_table(
        pyarrow.table({"prompt": [], "data_source": []}), folder / "empty.parquet"
    )
    return folder / "empty.parquet"


def other_run(folder):
    (folder / "output" / "mine").mkdir(parents=True)
    (folder / "output" / "mine" / "metrics.jsonl").write_text("{}\n")
    return {"output_dir": folder / "output", "run_name": "mine"}


def model_with_a_wider_tokenizer(folder, assets):
    shutil.copytree(assets / "model", folder / "model")
    config = json.loads((folder / "model" / "config.json").read_text())
    (folder / "model" / "config.json").write_text(json.dumps(config | {"vocab_size": 9}))
    return folder / "model"


def reward_model(folder, assets, **changes):
    """With the policy's tokenizer, but for changes of the vocabulary."""
    folder = value_model(
        folder, assets, **{k: v for k, v in changes.items() if k in ("num_labels", "vocab_size")}
    )
    for path in (assets / "model").glob("*token*"):
        shutil.copy(path, folder)
    if changes.get("tokenizer"):
        tokenizer = json.loads((folder / "tokenizer.json").read_text())
        vocab = tokenizer["model"]["vocab"]
        vocab["1"], vocab["2"] = vocab["2"], vocab["1"]
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def value_model(folder, assets, **changes):
    config = json.loads((assets / "model" / "config.json").read_text())
    labels = changes.pop("num_labels", 1)
    config |= {
        "architectures": ["Qwen2ForSequenceClassification"],
        "id2label": {i: str(i) for i in range(labels)},
    }
    (folder / "value").mkdir()
    (folder / "value" / "config.json").write_text(json.dumps(config | changes))
    return folder / "value"


BAD_REWARD = "def f(*arguments, extra_info):\n    return 1 / 0\n"
NOT_PYTHON = "def f(:\n"

# name: (options from a temporary folder and the assets, what the message must hold)
TABLE = {
    "no dataset file": (
        lambda tmp, _: {"dataset": tmp / "none.parquet"},
        ["none.parquet", "no such file"],
    ),
    "no debug assets": (
        lambda *_: {"dataset": "debug_assets/none.parquet"},
        ["scripts/make_debug_assets.py"],
    ),
    "no evaluation file": (
        lambda tmp, _: {"eval_dataset": tmp / "none.jsonl"},
        ["none.jsonl", "no such file"],
    ),
    "neither file nor hub": (
        lambda *_: {"dataset": "no/such-dataset"},
        ["no/such-dataset", ".parquet", "hub"],
    ),
    "empty jsonl": (lambda tmp, _: {"dataset": rows_file(tmp, [])}, ["data.jsonl"]),
    "empty parquet": (lambda tmp, _: {"dataset": empty_parquet(tmp)}, ["empty.parquet", "empty"]),
    "garbage parquet": (
        lambda tmp, _: {"dataset": write_text(tmp / "x.parquet", "rubbish")},
        ["x.parquet", "read"],
    ),
    "garbage jsonl": (
        lambda tmp, _: {"dataset": write_text(tmp / "x.jsonl", "{{{\n")},
        ["x.jsonl", "read"],
    ),
    "no column prompt": (
        lambda tmp, _: {"dataset": rows_file(tmp, [without("prompt")])},
        ["data.jsonl", "`prompt`", "data_source"],
    ),
    "no column data_source": (
        lambda tmp, _: {"dataset": rows_file(tmp, [without("data_source")])},
        ["data.jsonl", "`data_source`", "--reward_fn"],
    ),
    "row without ground truth": (
        lambda tmp, _: {
            "dataset": rows_file(tmp, [ROW, ROW, {**ROW, "reward_model": {"style": "rule"}}])
        },
        ["data.jsonl", "row 2", "ground_truth"],
    ),
    "no column reward_model": (
        lambda tmp, _: {"dataset": rows_file(tmp, [without("reward_model")])},
        ["data.jsonl", "row 0", "ground_truth"],
    ),
    "reward_model is a text": (
        lambda tmp, _: {"dataset": rows_file(tmp, [{**ROW, "reward_model": "12358"}])},
        ["data.jsonl", "row 0", "ground_truth"],
    ),
    "prompt is a number": (
        lambda tmp, _: {"dataset": rows_file(tmp, [{**ROW, "prompt": 5}])},
        ["data.jsonl", "row 0", "`prompt`"],
    ),
    "prompt is null": (
        lambda tmp, _: {"dataset": rows_file(tmp, [ROW, {**ROW, "prompt": None}])},
        ["data.jsonl", "row 1", "`prompt`"],
    ),
    "message without content": (
        lambda tmp, _: {"dataset": rows_file(tmp, [{**ROW, "prompt": [{"role": "user"}]}])},
        ["data.jsonl", "row 0", "content"],
    ),
    "prompt is a list of texts": (
        lambda tmp, _: {"dataset": rows_file(tmp, [{**ROW, "prompt": ["53812="]}])},
        ["data.jsonl", "row 0", "`prompt`", "messages"],
    ),
    "row is a text": (
        lambda tmp, _: {"dataset": write_text(tmp / "x.jsonl", '"53812="\n')},
        ["x.jsonl", "read"],
    ),
    "template that refuses": (
        lambda tmp, _: {
            "chat_template": write_text(tmp / "t.jinja", "{{ raise_exception('no system role') }}")
        },
        ["row 0", "`prompt`", "--chat_template", "no system role"],
    ),
    "value model with two labels": (
        lambda tmp, assets: {"value_model_path": value_model(tmp, assets, num_labels=2)},
        ["--value_model_path", "one label", "has 2"],
    ),
    "value model with another vocabulary": (
        lambda tmp, assets: {"value_model_path": value_model(tmp, assets, vocab_size=99)},
        ["--value_model_path", "vocabulary of 17"],
    ),
    "reward model with two labels": (
        lambda tmp, assets: {"reward_model_path": reward_model(tmp, assets, num_labels=2)},
        ["--reward_model_path", "one label", "has 2"],
    ),
    "reward model without a head": (
        lambda tmp, assets: {"reward_model_path": assets / "model"},
        ["--reward_model_path", "one label", "has 0"],
    ),
    "reward model with another vocabulary": (
        lambda tmp, assets: {"reward_model_path": reward_model(tmp, assets, vocab_size=99)},
        ["--reward_model_path", "vocabulary of 17"],
    ),
    "reward model with another tokenizer": (
        lambda tmp, assets: {"reward_model_path": reward_model(tmp, assets, tokenizer="other")},
        ["--reward_model_path", "tokenizer"],
    ),
    "no reward model": (
        lambda tmp, _: {"reward_model_path": tmp / "none"},
        ["--reward_model_path", "none"],
    ),
    "seed that vLLM refuses": (lambda *_: {"seed": -1}, ["--seed", "-1", "0 or more"]),
    "data source that is a list, as open-instruct's may be": (
        lambda tmp, _: {"dataset": rows_file(tmp, [OPEN_INSTRUCT_ROW | {"dataset": ["gsm8k"]}])},
        ["data.jsonl, row 0", "`data_source`", "string"],
    ),
    "row of verl's after one of open-instruct's": (
        lambda tmp, _: {"dataset": rows_file(tmp, [OPEN_INSTRUCT_ROW, ROW])},
        ["data.jsonl, row 1", "ground_truth"],
    ),
    "row of open-instruct's after one of verl's": (
        lambda tmp, _: {"dataset": rows_file(tmp, [ROW, OPEN_INSTRUCT_ROW])},
        ["data.jsonl, row 1", "ground_truth"],
    ),
    "ground truth of an evaluation that is no number": (
        lambda tmp, _: {
            "eval_dataset": rows_file(
                tmp, [ROW, ROW | {"data_source": "gsm8k", "reward_model": {"ground_truth": "many"}}]
            )
        },
        ["data.jsonl, row 1", "'many'"],
    ),
    "unknown data source": (
        lambda tmp, _: {"dataset": rows_file(tmp, [ROW, {**ROW, "data_source": "no/such"}])},
        ["data.jsonl, row 1", "no/such", "gsm8k", "--reward_fn"],
    ),
    "all prompts too long": (
        lambda *_: {"max_prompt_token_length": 3},
        ["--max_prompt_token_length 3", "none"],
    ),
    "negative": (lambda *_: {"learning_rate": -1e-6}, ["--learning_rate", "-1e-06", "0 or more"]),
    "negative value learning rate": (
        lambda *_: {"value_learning_rate": -1e-6},
        ["--value_learning_rate", "0"],
    ),
    "negative value lambda": (lambda *_: {"value_lam": -0.5}, ["--value_lam", "0"]),
    "zero": (lambda *_: {"response_length": 0}, ["--response_length", "above 0"]),
    "above one": (lambda *_: {"gamma": 1.01}, ["--gamma", "at most 1"]),
    "temperature that vLLM refuses": (lambda *_: {"temperature": 2.5}, ["--temperature", "2"]),
    "not a number": (lambda *_: {"beta": "nan"}, ["--beta", "finite"]),
    "penalty that is not a number": (
        lambda *_: {"penalty_reward_value": "nan"},
        ["--penalty_reward_value", "finite"],
    ),
    "infinite": (lambda *_: {"cliprange": "inf"}, ["--cliprange", "finite"]),
    "no reward file": (
        lambda tmp, _: {"reward_fn": f"{tmp}/none.py:f"},
        ["--reward_fn", "none.py", "No such file"],
    ),
    "reward without function": (
        lambda tmp, _: {"reward_fn": f"{tmp}/none.py"},
        ["--reward_fn", "file.py:function"],
    ),
    "no reward function": (
        lambda tmp, _: {"reward_fn": f"{write_text(tmp / 'r.py', 'x = 1')}:f"},
        ["--reward_fn", "r.py", "'f'"],
    ),
    "reward file with a mistake": (
        lambda tmp, _: {"reward_fn": f"{write_text(tmp / 'r.py', NOT_PYTHON)}:f"},
        ["--reward_fn", "r.py", "SyntaxError"],
    ),
    "reward that fails": (
        lambda tmp, _: {"reward_fn": f"{write_text(tmp / 'r.py', BAD_REWARD)}:f"},
        ["good.jsonl, row 0", "r.py:f", "ZeroDivisionError"],
    ),
    "minibatches do not divide": (
        lambda *_: {"local_mini_batch_size": 24},
        ["local_rollout_batch_size", "64", "local_mini_batch_size", "24"],
    ),
    "micro-batches do not divide": (
        lambda *_: {"per_device_train_batch_size": 7},
        ["local_mini_batch_size", "64", "per_device_train_batch_size", "7"],
    ),
    "too few episodes": (lambda *_: {"total_episodes": 63}, ["--total_episodes 63", "64"]),
    "unknown stop token": (
        lambda *_: {"stop_token": "<|stop|>"},
        ["--stop_token", "<|stop|>", "--stop_token_id"],
    ),
    "stop token beyond the vocabulary": (lambda *_: {"stop_token_id": 17}, ["17", "vocabulary"]),
    "no reward source": (
        lambda *_: {"apply_verifiable_reward": False},
        ["reward", "--apply_verifiable_reward", "--reward_model_path"],
    ),
    "no model": (
        lambda tmp, _: {"model_name_or_path": tmp / "none"},
        ["--model_name_or_path", "none"],
    ),
    "no model on the hub": (
        lambda *_: {"model_name_or_path": "no/such-model"},
        ["--model_name_or_path", "no/such"],
    ),
    "no debug model": (
        lambda *_: {"model_name_or_path": "debug_assets/none"},
        ["debug_assets/none", "scripts/make_debug_assets.py"],
    ),
    "no value model": (
        lambda tmp, _: {"value_model_path": tmp / "none"},
        ["--value_model_path", "none"],
    ),
    "no tokenizer": (
        lambda tmp, _: {"tokenizer_name_or_path": tmp / "none"},
        ["--tokenizer_name_or_path", "none"],
    ),
    "tokenizer of another model": (
        lambda tmp, assets: {
            "model_name_or_path": model_with_a_wider_tokenizer(tmp, assets),
            "tokenizer_name_or_path": assets / "model",
        },
        ["tokenizer", "17", "9"],
    ),
    "no chat template": (
        lambda tmp, _: {"chat_template": tmp / "none.jinja"},
        ["--chat_template", "none.jinja"],
    ),
    "response too long": (
        lambda *_: {"response_length": 256},
        ["--response_length", "positions", "256"],
    ),
    "folder of another run": (lambda tmp, _: other_run(tmp), ["mine", "another run", "--run_name"]),
    "wandb without login": (lambda *_: {"with_tracking": True}, ["--with_tracking", "wandb login"]),
}


@pytest.fixture
def no_login(monkeypatch, tmp_path):
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("HOME", str(tmp_path))


def options_of(name, tmp_path, assets):
    data = write_rows(tmp_path / "good.jsonl", [ROW] * 70)
    defaults = {"dataset": data, "model_name_or_path": assets / "model", "response_length": 8}
    defaults |= {"output_dir": tmp_path / "output", "run_name": "run"}
    return defaults | TABLE[name][0](tmp_path, assets)


def check_message(stderr, fragments):
    (line,) = stderr.strip().splitlines()
    assert line.startswith("ppo_sync.py: error: ")
    assert len(line) < 500
    for fragment in fragments:
        assert fragment in line


@pytest.mark.parametrize("name", TABLE)
def test_bad_input_is_one_line_and_status_2(name, assets, tmp_path, monkeypatch, capfd, no_login):
    options = options_of(name, tmp_path, assets)
    before = sorted(tmp_path.rglob("*"))
    arguments = [*flags_of(options), "--dry_run"]
    monkeypatch.setattr(sys, "argv", ["ppo_sync.py", *arguments])
    monkeypatch.chdir(Path(ppo_sync.__file__).parent)
    with pytest.raises(SystemExit) as stop:
        ppo_sync.main()
    check_message(capfd.readouterr().err, TABLE[name][1])
    assert stop.value.code == 2
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "no dataset file",
        "row without ground truth",
        "no model",
        "folder of another run",
        "wandb without login",
    ],
)
def test_bad_input_ends_the_real_command(name, assets, tmp_path, run_script):
    options = options_of(name, tmp_path, assets)
    home = tmp_path / "home"
    home.mkdir()
    environment = {"HOME": str(home), "NETRC": str(home / "netrc")}
    run = run_script("ppo_sync.py", tmp_path / "streams", timeout=60, env=environment, **options)
    check_message(run.stderr, TABLE[name][1])
    assert run.returncode == 2
    assert "Traceback" not in run.output
    assert run.seconds < 20
    written = list((tmp_path / "output").rglob("*"))
    assert {path.name for path in written} <= {"mine", "metrics.jsonl"}  # what was there before


@pytest.mark.slow
def test_model_that_does_not_exist_is_no_long_wait(tmp_path, run_script):
    # As on a machine without network: no HF_HUB_OFFLINE, and a hub that refuses the connection.
    environment = {
        "HF_HUB_OFFLINE": "0",
        "HF_ENDPOINT": "http://127.0.0.1:9",
        "HF_HOME": str(tmp_path),
    }
    run = run_script(
        "ppo_sync.py", tmp_path, model_name_or_path="no/such-model", timeout=60, env=environment
    )
    assert run.returncode == 2
    assert "Traceback" not in run.output
    assert run.stderr.splitlines()[-1].startswith(
        "ppo_sync.py: error: --model_name_or_path no/such-model"
    )
    assert run.seconds < 20


@pytest.mark.parametrize(
    ("flag", "fragments"),
    [
        (["--bogus", "3"], ["--bogus", "--help"]),
        (["--lr_scheduler_type", "cubic"], ["cubic", "linear", "cosine", "constant"]),
        (["--total_episodes", "many"], ["many", "total"]),
    ],
)
def test_flags_that_do_not_parse_are_named(flag, fragments, monkeypatch, capfd):
    monkeypatch.setattr(sys, "argv", ["ppo_sync.py", *flag])
    with pytest.raises(SystemExit) as stop:
        ppo_sync.main()
    stderr = capfd.readouterr().err
    assert stop.value.code == 2
    assert "Traceback" not in stderr
    assert all(fragment in stderr for fragment in fragments)


def test_no_eos_anywhere_is_named(assets, tmp_path, monkeypatch, capsys):
    shutil.copytree(assets / "model", tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text("{}")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"eos_token_id": None}))
    options = options_of("negative", tmp_path, assets) | {"learning_rate": 1e-6}
    options |= {"model_name_or_path": tmp_path / "model"}
    monkeypatch.setattr(sys, "argv", ["ppo_sync.py", *flags_of(options), "--dry_run"])
    with pytest.raises(SystemExit):
        ppo_sync.main()
    check_message(capsys.readouterr().err, ["stop tokens []", "--stop_token"])


def test_only_rank_0_prints_the_error(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit) as stop:
        ppo_sync.fill_in(ppo_sync.Args(learning_rate=-1.0))
    assert stop.value.code == 2
    assert capsys.readouterr().err == ""


def test_dry_run_scores_a_row_of_every_source(tmp_path, assets, monkeypatch, capsys):
    """A file of three sources, as verl's scripts write them."""
    truths = {
        "openai/gsm8k": "72",
        "DigitalLearningGmbH/MATH-lighteval": r"\frac{3}{4}",
        "Rowan/hellaswag": "2",
    }
    rows = [
        ROW | {"data_source": name, "reward_model": {"style": "rule", "ground_truth": t}}
        for name, t in truths.items()
    ]
    options = {
        "dataset": rows_file(tmp_path, rows * 30),
        "model_name_or_path": assets / "model",
        "response_length": 8,
        "output_dir": tmp_path,
        "reward_fn": f"{REPO / 'scripts' / 'rewards' / 'graders.py'}:compute_score",
    }
    monkeypatch.setattr(sys, "argv", ["ppo_sync.py", *flags_of(options), "--dry_run"])
    ppo_sync.main()
    output = capsys.readouterr().out
    for name in truths:
        assert f"the ground truth of a row of {name} scores 1" in output


@pytest.mark.slow
def test_dry_run_prints_the_plan_and_writes_nothing(tmp_path, run_script, small_eval, assets):
    options = {"output_dir": tmp_path / "output", "eval_dataset": small_eval, "num_epochs": 2}
    run = run_script("ppo_sync.py", tmp_path / "streams", dry_run=True, **options)
    assert (run.returncode, run.stderr) == (0, "")
    for figure in (
        "20,000 prompts",
        "32 held out",
        "2 of 16 prompts x 2",
        "2 a step",
        "4 in all",
        "debug/sorting",
    ):
        assert figure in run.stdout
    assert not (tmp_path / "output").exists()
    assert not any(name.startswith("tandem_") for name in os.listdir(tmp_path))
