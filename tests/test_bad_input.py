import json
import math
import os
import shutil
import sys
import time
from types import SimpleNamespace

import pyarrow.parquet
import pytest
import torch
from helpers import REPO
from helpers.files import write_rows, write_text
from helpers.processes import TWO_RANKS, finish, flags_of
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

import grpo_vllm_async
import ppo_sync

# ppo_vllm_async.py refuses less, by exceptions: test_mistakes.py
PPO = [ppo_sync]
MODULES = [*PPO, grpo_vllm_async]

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


def save_model(folder, assets, auto_class=AutoModelForCausalLM, **changes):
    """A model of random weights, as the debug model but for changes of its config."""
    config = AutoConfig.from_pretrained(assets / "model", **changes)
    auto_class.from_config(config).save_pretrained(folder)
    return folder


def model(folder, assets, **changes):
    """The debug model, with another config.json."""
    shutil.copytree(assets / "model", folder / "model")
    path = folder / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder / "model"


def value_model(folder, assets, num_labels=1, **changes):
    return save_model(
        folder / "value",
        assets,
        AutoModelForSequenceClassification,
        num_labels=num_labels,
        **changes,
    )


def reward_model(folder, assets, tokenizer=None, **changes):
    """With the policy's tokenizer, but for changes of the vocabulary."""
    folder = value_model(folder, assets, **changes)
    for path in (assets / "model").glob("*token*"):
        shutil.copy(path, folder)
    if tokenizer:
        tokenizer = json.loads((folder / "tokenizer.json").read_text())
        vocab = tokenizer["model"]["vocab"]
        vocab["1"], vocab["2"] = vocab["2"], vocab["1"]
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


NOT_PYTHON = "def f(:\n"
TWO_FUNCTIONS = "def first(*_, extra_info): return 1.0\ndef second(*_, extra_info): return 1.0\n"


def reward(folder, line, **options):
    """Options with a reward function of one line."""
    path = write_text(
        folder / "r.py", f"import os, sys, time\ndef f(*_, extra_info):\n    {line}\n"
    )
    return {"reward_fn": f"{path}:f", **options}


def reward_file(folder, text, function=":f", name="r.py"):
    return {"reward_fn": f"{write_text(folder / name, text)}{function}"}


# As of preferences: what stands in place of a ground truth is for a reward model
HH_ROW = ROW | {"reward_model": {"style": "model", "ground_truth": "the chosen answer"}}
ASK_A_REWARD_MODEL = ["ground_truth", "--no-apply_verifiable_reward", "--reward_model_path"]

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
        ["data.jsonl, row 2", *ASK_A_REWARD_MODEL],
    ),
    "rows for a reward model": (
        lambda tmp, _: {"dataset": rows_file(tmp, [HH_ROW])},
        ["data.jsonl, row 0", *ASK_A_REWARD_MODEL],
    ),
    "row for a reward model among others": (
        lambda tmp, _: {"dataset": rows_file(tmp, [ROW, HH_ROW])},
        ["data.jsonl, row 1", *ASK_A_REWARD_MODEL],
    ),
    "row for a reward model that does not score": (
        lambda tmp, assets: {
            "dataset": rows_file(tmp, [ROW, HH_ROW]),
            "reward_model_path": reward_model(tmp, assets),
            "reward_model_multiplier": 0.0,
        },
        ["data.jsonl, row 1", *ASK_A_REWARD_MODEL],
    ),
    "no row for the rule": (
        lambda tmp, assets: {
            "dataset": rows_file(tmp, [HH_ROW, HH_ROW]),
            "reward_model_path": reward_model(tmp, assets),
        },
        ["data.jsonl, every row", *ASK_A_REWARD_MODEL],
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
        lambda tmp, _: reward_file(tmp, TWO_FUNCTIONS, function=""),
        ["--reward_fn", "r.py:first", "r.py:second"],
    ),
    "no reward function": (
        lambda tmp, _: reward_file(tmp, TWO_FUNCTIONS),
        ["--reward_fn", "r.py:f:", "r.py:first", "r.py:second"],
    ),
    "reward that is no function": (
        lambda tmp, _: reward_file(tmp, "f = 1.0\n" + TWO_FUNCTIONS),
        ["--reward_fn", "r.py:f:", "r.py:first", "r.py:second"],
    ),
    "reward file that is not of Python": (
        lambda tmp, _: reward_file(tmp, TWO_FUNCTIONS, name="r.txt"),
        ["--reward_fn", "r.txt", "file.py:function"],
    ),
    "reward file with a mistake": (
        lambda tmp, _: reward_file(tmp, NOT_PYTHON),
        ["--reward_fn", "r.py", "SyntaxError", "line 1"],
    ),
    "reward file that fails": (
        lambda tmp, _: reward_file(tmp, "import os\nos.environ['NO_SUCH_KEY']\n"),
        ["--reward_fn", "r.py", "KeyError", "line 2"],
    ),
    "reward file that exits": (
        lambda tmp, _: reward_file(tmp, "import sys\nsys.exit('no licence')\n"),
        ["--reward_fn", "r.py", "SystemExit: no licence"],
    ),
    "reward file that crashes": (
        lambda tmp, _: reward_file(tmp, "import os\nos.abort()\n"),
        ["--reward_fn", "r.py", "exit code -6"],
    ),
    "reward that fails": (
        lambda tmp, _: reward(tmp, "return 1 / 0"),
        ["good.jsonl, row 0", "r.py:f", "ZeroDivisionError", "line 3"],
    ),
    "reward that hangs": (
        lambda tmp, _: reward(tmp, "time.sleep(1000)", reward_timeout=0.5),
        ["good.jsonl, row 0", "r.py:f", "TimeoutError", "0.5 seconds"],
    ),
    "reward that exits": (
        lambda tmp, _: reward(tmp, "sys.exit(0)"),
        ["good.jsonl, row 0", "r.py:f", "SystemExit"],
    ),
    "reward that ends its process": (
        lambda tmp, _: reward(tmp, "os._exit(0)"),
        ["good.jsonl, row 0", "r.py:f", "exit code 0"],
    ),
    "reward that crashes": (
        lambda tmp, _: reward(tmp, "os.kill(os.getpid(), 11)"),
        ["good.jsonl, row 0", "r.py:f", "exit code -11"],
    ),
    "reward that returns nothing": (
        lambda tmp, _: reward(tmp, "pass"),
        ["good.jsonl, row 0", "r.py:f", "the reward is None"],
    ),
    "warm-up as long as the run": (
        lambda *_: {"total_episodes": 640, "warm_up_steps": 10},
        ["--warm_up_steps 10", "10 updates"],
    ),
    "warm-up that is the whole run": (
        lambda *_: {"total_episodes": 640, "warmup_ratio": 1.0},
        ["--warm_up_steps 10", "10 updates"],
    ),
    "warm-up that is rounded to the whole run": (
        lambda *_: {"total_episodes": 64, "warmup_ratio": 0.6},
        ["--warm_up_steps 1", "1 updates"],
    ),
    "mask that leaves no ratio": (
        lambda *_: {"mismatch_mask": "token", "mismatch_mask_range": 0.5},
        ["--mismatch_mask_range", "0.5", "1 or more"],
    ),
    "mask that is not a number": (
        lambda *_: {"mismatch_mask_range": "nan"},
        ["--mismatch_mask_range", "nan"],
    ),
    "second clip of one": (lambda *_: {"dual_clip": 1.0}, ["--dual_clip", "1.0", "above 1"]),
    "second clip below one": (lambda *_: {"dual_clip": 0.5}, ["--dual_clip", "0.5"]),
    "negative multiplier": (
        lambda *_: {"reward_model_multiplier": -1.0},
        ["--reward_model_multiplier", "0 or more"],
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
    "reward model that counts for nothing as the only reward": (
        lambda tmp, assets: {
            "apply_verifiable_reward": False,
            "reward_model_path": reward_model(tmp, assets),
            "reward_model_multiplier": 0.0,
        },
        ["no reward", "--apply_verifiable_reward", "--reward_model_path"],
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
            "model_name_or_path": save_model(tmp / "model", assets, vocab_size=9),
            "tokenizer_name_or_path": assets / "model",
        },
        ["tokenizer", "17", "9"],
    ),
    "no chat template": (
        lambda tmp, _: {"chat_template": tmp / "none.jinja"},
        ["--chat_template", "none.jinja"],
    ),
    "response too long": (
        lambda *_: {"response_length": 512},
        ["--response_length", "positions", "512"],
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


def files_of(folder):
    """All but what Python keeps of a reward file that it has imported."""
    return sorted(path for path in folder.rglob("*") if "__pycache__" not in str(path))


def options_of(name, tmp_path, assets):
    data = write_rows(tmp_path / "good.jsonl", [ROW] * 70)
    defaults = {"dataset": data, "model_name_or_path": assets / "model", "response_length": 8}
    defaults |= {"output_dir": tmp_path / "output", "run_name": "run"}
    return defaults | TABLE[name][0](tmp_path, assets)


def check_message(stderr, fragments, program="ppo_sync.py"):
    (line,) = stderr.strip().splitlines()
    assert line.startswith(f"{program}: error: ")
    assert len(line) < 500
    for fragment in fragments:
        assert fragment in line


@pytest.mark.parametrize("name", TABLE)
def test_bad_input_is_one_line_and_status_2(name, assets, tmp_path, monkeypatch, capfd, no_login):
    options = options_of(name, tmp_path, assets)
    before = files_of(tmp_path)
    arguments = [*flags_of(options), "--dry_run"]
    monkeypatch.setattr(sys, "argv", ["ppo_sync.py", *arguments])
    monkeypatch.chdir(tmp_path)  # where there are no debug assets
    with pytest.raises(SystemExit) as stop:
        ppo_sync.main()
    check_message(capfd.readouterr().err, TABLE[name][1])
    assert stop.value.code == 2
    assert files_of(tmp_path) == before


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["folder of another run", "wandb without login"],
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
    check_message(capsys.readouterr().err, ["no stop token", "--stop_token"])


def test_reward_file_that_hangs_is_no_endless_start(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(ppo_sync, "REWARD_IMPORT_TIMEOUT", 0.5)
    monkeypatch.setattr(sys, "argv", ["ppo_sync.py"])
    path = write_text(tmp_path / "r.py", "import time\ntime.sleep(1000)\n")
    prompt = ppo_sync.Prompt("data.jsonl, row 0", "", [], [], "any", "1", None)
    with pytest.raises(SystemExit) as stop:
        ppo_sync.check_rewards(ppo_sync.Args(reward_fn=f"{path}:f"), [prompt])
    assert stop.value.code == 2
    check_message(capsys.readouterr().err, ["r.py:f", "TimeoutError"])


@pytest.mark.parametrize(
    ("rank", "local_rank", "waits"), [(0, 0, False), (1, 1, True), (8, 0, False), (9, 1, True)]
)
def test_first_rank_of_each_node_prints_the_error(rank, local_rank, waits, monkeypatch, capsys):
    # What is wrong may be wrong on the second node alone: a file that is not there. The launcher
    # ends the other ranks of a node while they wait.
    pauses = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    with pytest.raises(SystemExit) as stop:
        ppo_sync.fill_in(ppo_sync.Args(learning_rate=-1.0))
    assert stop.value.code == 2
    assert "--learning_rate" in capsys.readouterr().err
    assert bool(pauses) == waits


def fill_in(script, **options):
    return script.fill_in(script.Args(**options))


@pytest.mark.parametrize("script", MODULES, ids=lambda script: script.__name__)
def test_limits_themselves_are_allowed(script):
    episodes = 4 * script.Args.local_rollout_batch_size * script.Args.number_samples_per_prompt
    updates = fill_in(script, total_episodes=episodes).num_updates
    args = fill_in(script, total_episodes=episodes, warm_up_steps=updates - 1)
    assert (args.num_updates, args.warm_up_steps) == (updates, updates - 1)
    assert fill_in(script, total_episodes=episodes, warmup_ratio=0.5).warm_up_steps == updates / 2
    for options in (
        {"mismatch_mask": "token", "mismatch_mask_range": 1.0},
        {"mismatch_mask": "sequence", "mismatch_mask_range": math.inf},
        {"dual_clip": 0.0},
        {"dual_clip": 3.0},
        {"reward_model_multiplier": 0.0},
        {"reward_model_multiplier": 0.0, "reward_model_path": "a model"},
        {
            "apply_verifiable_reward": False,
            "add_r1_style_format_reward": True,
            "reward_model_multiplier": 0.0,
            "reward_model_path": "a model",
        },
    ):
        filled_in = fill_in(script, **options)
        assert {name: getattr(filled_in, name) for name in options} == options


def run_main(script, options, monkeypatch):
    """main() on the first rows of its dataset: all of them take seconds."""
    read_rows = script.read_rows
    with monkeypatch.context() as patch:
        patch.setattr(script, "read_rows", lambda *args: read_rows(*args)[:100])
        patch.setattr(sys, "argv", [f"{script.__name__}.py", *flags_of(options)])
        patch.chdir(REPO)
        script.main()


@pytest.mark.parametrize("script", PPO, ids=lambda script: script.__name__)
def test_policy_that_would_only_warm_up_is_refused(script, assets, tmp_path, monkeypatch, capsys):
    # Ten steps of an update each; the policy's learning rate starts to rise after its value model's
    options = {"total_episodes": 640, "value_warmup_steps": 7, "output_dir": tmp_path}
    with pytest.raises(SystemExit) as stop:
        run_main(script, options | {"dry_run": True, "warm_up_steps": 3}, monkeypatch)
    assert stop.value.code == 2
    fragments = ["--value_warmup_steps 7", "3 updates", "--warm_up_steps 3"]
    check_message(capsys.readouterr().err, fragments, program=f"{script.__name__}.py")
    with pytest.raises(SystemExit):
        run_main(script, options | {"dry_run": True, "value_warmup_steps": 10}, monkeypatch)
    assert "--value_warmup_steps 10" in capsys.readouterr().err
    run_main(script, options | {"dry_run": True, "warm_up_steps": 2}, monkeypatch)


# (of PPO, of GRPO)
DEFAULTS = {
    "learning_rate": (1e-6, 1e-6),
    "lr_scheduler_type": ("linear", "constant"),
    "beta": (0.01, 0.01),
    "penalty_reward_value": (-10.0, 0.0),
    "local_mini_batch_size": (64, 256),
    "reward_timeout": (10.0, 10.0),
    "reward_memory": (4.0, 4.0),
    "dual_clip": (0.0, 0.0),
    "mismatch_mask": ("none", "none"),
    "vllm_gpu_memory_utilization": (None, None),
    "reward_workers": (None, None),
}
DEFAULTS_OF_PPO = {"value_learning_rate": 1e-5, "lam": 0.95, "value_lam": 1.0, "gamma": 1.0}


@pytest.mark.parametrize("script", MODULES, ids=lambda script: script.__name__)
def test_defaults_train_a_model(script):
    args = vars(script.Args())
    expected = {name: values[script is grpo_vllm_async] for name, values in DEFAULTS.items()}
    if script in PPO:
        expected |= DEFAULTS_OF_PPO
    assert {name: args[name] for name in expected} == expected


@pytest.mark.parametrize("script", MODULES, ids=lambda script: script.__name__)
def test_bare_dry_run_passes(script, assets, monkeypatch, capsys):
    before = sorted(REPO.glob("output/*"))
    run_main(script, {"dry_run": True}, monkeypatch)
    output = capsys.readouterr()
    assert output.err == ""
    for line in ("learners 1", "reward   1 x compute_score", "row of debug/sorting scores 1"):
        assert line in output.out
    assert "Warning" not in output.out
    assert sorted(REPO.glob("output/*")) == before


@pytest.mark.parametrize("script", MODULES, ids=lambda script: script.__name__)
def test_share_of_a_gpu_depends_on_who_else_uses_it(script, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    own = {"vllm_gpus": (1,)}
    assert fill_in(script).vllm_gpu_memory_utilization == 0.3
    assert fill_in(script, **own).vllm_gpu_memory_utilization == 0.9
    for options in ({}, own):
        args = fill_in(script, vllm_gpu_memory_utilization=0.5, **options)
        assert args.vllm_gpu_memory_utilization == 0.5


# On a node of 8 GPUs, of which two have a learner
REFUSED_GPUS = {
    "a learner's": ({"vllm_gpus": (1, 2)}, ["--vllm_gpus (1, 2)", "[2, 3, 4, 5, 6, 7]"]),
    "one that is not there": ({"vllm_gpus": (7, 8)}, ["--vllm_gpus (7, 8)", "without a learner"]),
    "one twice": ({"vllm_gpus": (2, 2)}, ["--vllm_gpus (2, 2)", "each named once"]),
    "one twice for an engine of two": (
        {"vllm_gpus": (2, 2), "vllm_tensor_parallel_size": 2},
        ["--vllm_gpus (2, 2)", "each named once"],
    ),
    "half an engine": (
        {"vllm_gpus": (2, 3, 4), "vllm_tensor_parallel_size": 2},
        ["--vllm_gpus (2, 3, 4)", "a multiple of --vllm_tensor_parallel_size (2)"],
    ),
    "fewer than an engine": (
        {"vllm_gpus": (2, 3), "vllm_tensor_parallel_size": 4},
        ["--vllm_gpus (2, 3)", "a multiple of --vllm_tensor_parallel_size (4)"],
    ),
    "a shared one and another": (
        {"vllm_tensor_parallel_size": 2},
        ["--vllm_tensor_parallel_size 2 needs --vllm_gpus"],
    ),
}


@pytest.fixture
def eight_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(sys, "argv", ["ppo_sync.py"])


@pytest.mark.parametrize("name", REFUSED_GPUS)
def test_gpus_that_cannot_be_vllms_are_refused(name, eight_gpus, capsys):
    options, fragments = REFUSED_GPUS[name]
    with pytest.raises(SystemExit) as stop:
        fill_in(ppo_sync, **options)
    assert stop.value.code == 2
    check_message(capsys.readouterr().err, fragments)


@pytest.mark.parametrize(
    ("gpus", "size"), [((), 1), ((7,), 1), ((2, 3, 4, 5, 6, 7), 1), ((2, 5, 3, 4), 2), ((2, 3), 2)]
)
def test_several_engines_are_allowed(gpus, size, eight_gpus):
    args = fill_in(ppo_sync, vllm_gpus=gpus, vllm_tensor_parallel_size=size)
    assert (args.vllm_gpus, args.vllm_tensor_parallel_size) == (gpus, size)


@pytest.mark.slow
def test_ranks_that_would_not_find_each_other_are_refused(start_script, tmp_path, monkeypatch):
    """Each would train alone, and all write to one folder."""
    if torch.cuda.is_available():
        pytest.skip("accelerate starts as many ranks as the launcher did")
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    process = start_script("ppo_sync.py", tmp_path, launcher=TWO_RANKS)
    run = finish(process, 60, time.monotonic())
    assert run.returncode != 0
    line = next(line for line in run.stderr.splitlines() if "error: " in line)
    check_message(
        line,
        [
            "the launcher started 2 processes, and accelerate found 1",
            "without GPUs set ACCELERATE_USE_CPU=true",
        ],
    )
    assert run.seconds < 30  # most of them for imports
    assert not run.run_dir.exists()


@pytest.mark.slow
def test_plan_tells_of_a_launcher_that_started_one_process_of_several(start_script, tmp_path):
    # For CPUs accelerate launch starts one, whatever it is told
    launcher = ("-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2")
    process = start_script("ppo_sync.py", tmp_path, launcher=launcher, dry_run=True)
    run = finish(process, 60, time.monotonic())
    assert run.returncode == 0, run.output
    plan = run.stdout[run.stdout.index("learners 1") :]
    assert "told of several processes and has started one" in plan


@pytest.mark.parametrize(
    ("cores", "ranks", "workers"), [(2, 1, 2), (64, 1, 8), (64, 16, 4), (12, 8, 1), (4, 8, 1)]
)
def test_reward_workers_are_as_many_as_the_cores_of_a_rank(cores, ranks, workers, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: ranks + 1)
    for script in MODULES:
        assert fill_in(script).reward_workers == workers
        # The first rank of a node owns all engines then, and asks for all rewards
        assert fill_in(script, vllm_gpus=(ranks,)).reward_workers == min(8, cores)
        assert fill_in(script, reward_workers=3).reward_workers == 3


def plan(script, options, tmp_path, monkeypatch, capsys):
    run_main(script, {"output_dir": tmp_path, "dry_run": True, **options}, monkeypatch)
    return " ".join(capsys.readouterr().out.split())


def test_plan_names_the_parts_of_the_score_that_are_in_use(assets, tmp_path, monkeypatch, capsys):
    arguments = (tmp_path, monkeypatch, capsys)
    model = {"reward_model_path": reward_model(tmp_path, assets)}
    all_of_them = model | {
        "verification_reward": 2.0,
        "reward_model_multiplier": 0.25,
        "add_r1_style_format_reward": True,
        "r1_style_format_reward": 0.5,
        "non_stop_penalty": True,
        "penalty_reward_value": -3.0,
    }
    assert (
        "reward 2 x compute_score + 0.25 x the reward model's score + 0.5 for <think> and <answer> "
        "or -3 without a stop token"
    ) in plan(ppo_sync, all_of_them, *arguments)

    alone = plan(ppo_sync, model | {"apply_verifiable_reward": False}, *arguments)
    assert "reward 1 x the reward model's score" in alone
    assert not any(word in alone for word in ("compute_score", "<think>", "stop token"))

    unused = plan(ppo_sync, model | {"reward_model_multiplier": 0.0}, *arguments)
    assert "reward 1 x compute_score" in unused
    assert "the reward model" not in unused

    # There are no 15 others
    monkeypatch.setattr(ppo_sync, "check_launcher", lambda: None)
    monkeypatch.setattr(ppo_sync, "Accelerator", lambda **_: SimpleNamespace(num_processes=16))
    monkeypatch.setattr(torch.distributed, "new_group", lambda **_: None)
    monkeypatch.setenv("WORLD_SIZE", "16")
    of_many = plan(ppo_sync, {}, *arguments)
    assert "engines 16 of vLLM, one " in of_many and "learners 16" in of_many


def test_ranks_that_read_other_prompts_are_refused(assets, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(ppo_sync, "exchange", lambda group, value: [value, ("other", value)])
    with pytest.raises(SystemExit) as stop:
        run_main(ppo_sync, {"output_dir": tmp_path, "dry_run": True}, monkeypatch)
    assert stop.value.code == 2
    check_message(capsys.readouterr().err, ["different prompts", "every node"])


@pytest.mark.parametrize(
    ("options", "warns"),
    [
        ({"importance_sampling_level": "sequence"}, True),
        ({"importance_sampling_level": "sequence", "cliprange": 3e-4}, True),
        (
            {
                "importance_sampling_level": "sequence",
                "cliprange": 3e-4,
                "cliprange_higher": 4e-4,
            },
            False,
        ),
        ({"importance_sampling_level": "token"}, False),
    ],
)
def test_sequence_ratios_that_never_clip_are_warned_of(
    options, warns, assets, tmp_path, monkeypatch, capsys
):
    output = plan(grpo_vllm_async, options, tmp_path, monkeypatch, capsys)
    assert ("--cliprange 3e-4 --cliprange_higher 4e-4" in output) == warns


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
