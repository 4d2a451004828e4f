"""A run that was interrupted goes on as if it had not been, to the last bit; what a checkpoint is.

Here with test_loop.py's stub of vLLM; test_runs.py resumes with vLLM itself, test_ranks.py on
another number of ranks. At the end the generation config of a saved model.
"""

import fcntl
import functools
import json
import os
import shutil
import signal
from datetime import date
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from accelerate import Accelerator
from helpers import ASYNC, GRPO, PPO, REPO, SCRIPTS, hooks
from helpers.files import read_json_lines, write_rows
from helpers.loops import EPISODES
from helpers.runs import differences, without_clock
from pyarrow import parquet
from transformers import AutoTokenizer, GenerationConfig

import ppo_vllm_async as script
from ppo_vllm_async import Args


def score(data_source, response, ground_truth):
    if response.startswith("6"):
        raise OSError("the grader is out of paper")
    return {"score": float(len(response) % 2), "acc": len(response) / 3}


# An evaluation is due after three steps, between the steps of which one is before a checkpoint and
# the other after it
SIX_STEPS = {"total_episodes": 6 * EPISODES, "num_evals": 2}
OF_PPO = {"value_warmup_steps": 2, "warm_up_steps": 3}
LONG_WARMUP = {"num_epochs": 2, "value_warmup_steps": 4, "warm_up_steps": 1}
GSPO = {"importance_sampling_level": "sequence", "beta": 0.0, "num_epochs": 2}
VARIANTS = [(LONG_WARMUP, PPO), (GSPO, GRPO), ({"async_mode": False}, ASYNC)]
VARIANTS += [({"lora_rank": 4}, SCRIPTS)]
IN_BFLOAT16 = (ASYNC[0], {"dtype": "bfloat16"})  # where masters are not the weights
CASES = [*((name, {}) for name in SCRIPTS), IN_BFLOAT16] + [
    pytest.param(name, changes, marks=pytest.mark.slow)
    for changes, names in VARIANTS
    for name in names
]


@pytest.fixture(scope="module")
def six_steps(run_main, few_prompts):
    """six_steps("ppo_sync.py", fails_at=9): a run."""

    def run(name, **changes):
        options = SIX_STEPS | {"eval_dataset": few_prompts / "test.parquet"}
        return run_main(name, score, **options | (OF_PPO if name in PPO else {}) | changes)

    return run


@pytest.fixture(scope="module")
def whole(six_steps):
    """whole("ppo_sync.py"): the run in peace, made once for all tests."""
    return functools.cache(six_steps)


@pytest.fixture(scope="module")
def broken(six_steps):
    """One that ends in step 5, with lines that the checkpoint, after step 3, has not."""

    @functools.cache
    def run(name, **changes):
        updates = 2 * changes.get("num_epochs", 1)  # of a step
        return six_steps(name, save_freq=3, fails_at=4 * updates + 1, **changes)

    return run


def files_of(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def checkpoints_of(run_dir):
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def check_equal_to_the_bit(resumed, whole):
    lines, expected = (list(map(without_clock, run.metrics)) for run in (resumed, whole))
    assert lines == expected
    for name in ("samples.jsonl", "rollouts.jsonl", "model/model.safetensors"):
        assert (resumed.run_dir / name).read_bytes() == (whole.run_dir / name).read_bytes(), name
    for mine, theirs in zip(resumed.batches[::-1], whole.batches[::-1], strict=False):
        assert differences(vars(mine), vars(theirs)) == []
    for model, rates in resumed.rates.items():
        assert rates == whole.rates[model][-len(rates) :]


# ---------------------------------------------------------------------------- 6 steps are 3 and 3


@pytest.mark.parametrize(("name", "changes"), CASES, ids=str)
def test_interrupted_run_goes_on_as_if_it_had_not_been(
    name, changes, whole, broken, six_steps, tmp_path
):
    before = broken(name, **changes)
    assert "power" in str(before.error) and len(before.metrics) == 4
    assert checkpoints_of(before.run_dir) == ["step_3"]
    shutil.copytree(before.run_dir, tmp_path / "run")
    state, arguments = tmp_path / "run/checkpoints/step_3/state.json", tmp_path / "run/args.json"
    saved, args = (json.loads(path.read_text()) for path in (state, arguments))
    assert 0 < saved["seconds"] < before.metrics[-1]["time/from_scratch"]
    state.write_text(json.dumps(saved | {"seconds": 1000.0}))
    assert args["start_day"] == date.today().isoformat()
    arguments.write_text(json.dumps(args | {"start_day": "2024-07-26"}))
    again = {"output_dir": tmp_path, "resume_from_checkpoint": "latest", "save_freq": 3}
    resumed = six_steps(name, **again | changes)
    # There is a checkpoint of step 3, so that an attempt to save another fails
    assert "Warning: no checkpoint" not in resumed.stdout.getvalue()
    # A template may write it
    assert json.loads(arguments.read_text())["start_day"] == "2024-07-26"
    assert len(resumed.batches) == 3
    assert 1000 < resumed.metrics[3]["time/from_scratch"] < 2000  # they go on
    assert "eval/scores" in resumed.metrics[3]
    check_equal_to_the_bit(resumed, whole(name, **changes))


def test_auto_begins_goes_on_and_ends_also_after_a_death_while_it_saved(
    whole, six_steps, tmp_path, monkeypatch
):
    """The same command until the run is finished, as a cluster gives it again and again."""
    name, wandb_ids, copy = "ppo_vllm_async.py", set(), shutil.copy
    again = {"output_dir": tmp_path, "save_freq": 2, "resume_from_checkpoint": "auto"}
    expected = whole(name)
    assert "power" in str(six_steps(name, fails_at=3, **again).error)  # in step 2
    assert len(read_json_lines(tmp_path / "run/metrics.jsonl")) == 1

    def note(given):
        wandb_ids.add(given["args"][-1]["wandb"]["id"])

    def die_in_step_4(source, folder):
        if (tmp_path / "run/checkpoints/step_2").exists():
            raise RuntimeError("the power is gone")
        copy(source, folder)

    hooks.before(Accelerator, "init_trackers", note, put=monkeypatch.setattr)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copy", die_in_step_4)
        assert "power" in str(six_steps(name, **again).error)
    assert checkpoints_of(tmp_path / "run") == ["step_2", "unfinished"]
    # What it had written of step 4 must not be in the step 4 that follows
    run = six_steps(name, fails_at=6, **again)  # in step 5
    assert len(run.batches) == 2 and checkpoints_of(tmp_path / "run") == ["step_2", "step_4"]
    run = six_steps(name, **again)
    assert len(run.batches) == 2 and len(wandb_ids) == 1
    check_equal_to_the_bit(run, expected)
    # As if it had died in its last step, which is the last line
    metrics = run.run_dir / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:-1]))
    run = six_steps(name, **again)
    check_equal_to_the_bit(run, expected)
    before = files_of(run.run_dir)
    run = six_steps(name, push_to_hub=True, **again)  # the upload may have failed
    assert run.vllm is None and run.programs == [("push_to_hub.py", 6)]
    assert files_of(run.run_dir) == before


# ---------------------------------------------------------------------------- the folder of a run


def test_run_that_came_to_its_end_goes_back_to_an_older_checkpoint_and_its_data_may_have_moved(
    six_steps, few_prompts, tmp_path
):
    name = "ppo_vllm_async.py"
    finished = six_steps(name, save_freq=2)
    shutil.copytree(finished.run_dir, tmp_path / "run")
    folder = tmp_path / "run" / "checkpoints"
    assert checkpoints_of(tmp_path / "run") == ["step_2", "step_4"]
    shutil.copytree(folder / "step_2", folder / "unfinished")
    six_steps(name, resume_from_checkpoint=folder / "step_2", fails_at=1)
    assert checkpoints_of(tmp_path / "run") == ["step_2"]
    for file, rows in {"metrics.jsonl": 2, "rollouts.jsonl": 16, "samples.jsonl": 8}.items():
        lines = read_json_lines(finished.run_dir / file)
        assert read_json_lines(tmp_path / "run" / file) == lines[:rows], file

    shutil.copy(few_prompts / "train.parquet", tmp_path / "moved.parquet")
    options = {"output_dir": tmp_path, "resume_from_checkpoint": "latest"}
    run = six_steps(name, dataset=tmp_path / "moved.parquet", **options)
    assert len(run.batches) == 4
    check_equal_to_the_bit(run, finished)


ASSETS = f"{REPO}/debug_assets/../debug_assets/model"
OTHERS = {"seed": 2, "beta": 0.1, "num_epochs": 2, "lora_rank": 4, "lora_alpha": 16}
OTHERS["model_name_or_path"] = ASSETS
OF_PPO_ALONE = {"value_model_path": ASSETS, "reward_model_path": ASSETS}
# What is told as another one, where it is not the flag
SMALLER = {"local_rollout_batch_size": 8}
DERIVED = [
    ("episodes_per_step", SMALLER | {"total_episodes": 192}),
    ("number_samples_per_prompt", SMALLER | {"number_samples_per_prompt": 2}),
    ("mini_batch_size", {"local_mini_batch_size": 16}),
    ("num_updates", {"total_episodes": 128}),
    ("data_hash", {"dataset": "test.parquet"}),
    ("data_hash", {"eval_dataset": "train.parquet"}),
    ("data_hash", {"eval_dataset": None}),
    ("data_hash", {"dataset": "of_another_truth.parquet"}),
]
# The checkpoint has answers to an evaluation; they would be taken for those to another
OF_ANOTHER_EVALUATION = {"num_evals": 3, "eval_temperature": 0.5}


@pytest.mark.parametrize("name", SCRIPTS)
def test_checkpoint_of_a_run_that_was_another_is_refused(name, broken, six_steps, few_prompts):
    run_dir = broken(name).run_dir
    before = files_of(run_dir)
    options = {"output_dir": run_dir.parent, "resume_from_checkpoint": "latest"}
    rows = parquet.read_table(few_prompts / "train.parquet").to_pylist()
    rows[-1]["reward_model"]["ground_truth"] = "0"
    write_rows(few_prompts / "of_another_truth.parquet", rows)
    flags = OTHERS | (OF_PPO_ALONE if name in PPO else {})
    flags |= OF_ANOTHER_EVALUATION if name in ASYNC else {}
    for argument, changes in [*DERIVED, *((flag, {flag: value}) for flag, value in flags.items())]:
        paths = {k: few_prompts / v for k, v in changes.items() if str(v).endswith("parquet")}
        with pytest.raises(ValueError, match=f"--resume_from_checkpoint: {argument} was"):
            six_steps(name, **options | changes | paths)
    assert files_of(run_dir) == before


def test_ranks_go_by_what_the_first_one_finds(monkeypatch):
    """A network file system may show a folder late to others."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(script, "find_run", pytest.fail)
    monkeypatch.setattr(script, "broadcast_object_list", lambda objects: ["the first one's"])
    assert script.agree_on_run(Args(resume_from_checkpoint="auto")) == "the first one's"


@pytest.mark.parametrize("option", ["latest", "auto"])
def test_folder_of_a_living_process_is_refused(option, broken, six_steps, tmp_path):
    """As its lock says; before anything is loaded, and without a trace. An old lock is none."""
    name = "ppo_sync.py"
    shutil.copytree(broken(name).run_dir, tmp_path / "run")
    (tmp_path / "run/lock").write_text("process 7 on elsewhere")
    before = files_of(tmp_path / "run")
    options = {"output_dir": tmp_path, "resume_from_checkpoint": option}
    with open(tmp_path / "run/lock") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="its run goes on, by process 7 on elsewhere"):
            six_steps(name, **options)
    assert files_of(tmp_path / "run") == before
    assert len(six_steps(name, **options).batches) == 3


def test_lock_is_of_one_process(tmp_path):
    (tmp_path / "lock").write_text("process 7 on elsewhere, which is gone")
    script.lock_run(tmp_path)
    script.lock_run(tmp_path)  # its own
    assert (tmp_path / "lock").read_text() == f"process {os.getpid()} on {os.uname().nodename}"
    with open(tmp_path / "lock") as file:
        with pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        script.lock_run.cache_clear()  # which closes its file, as the process's end does
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_folder_that_cannot_be_locked_costs_only_a_warning(tmp_path, monkeypatch, capsys):
    """Some network file systems have no locks."""
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError("No locks available")))
    script.lock_run(tmp_path)
    assert "cannot be locked (No locks available)" in capsys.readouterr().out


def test_ranks_other_than_the_first_lock_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(script, "lock_run", pytest.fail)
    assert script.read_state(tmp_path, None, Args())[0] == 1


def test_wish_for_a_checkpoint_is_any_ranks_and_is_granted_once(monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda number, handler: handler(number, None))
    script.heed_sigusr1()  # as if there were one
    of_others = [0.0, 0.0, 1.0, 0.0]
    accelerator = SimpleNamespace(device="cpu", reduce=lambda own: own + of_others.pop(0))
    due = [script.checkpoint_is_due(accelerator, step, Args(save_freq=0)) for step in range(4)]
    assert due == [True, False, True, False]


@pytest.mark.parametrize(("keep", "kept"), [(2, [9, 10]), (0, [8, 9, 10])])
def test_newest_checkpoints_are_the_last_by_number(keep, kept, tmp_path):
    run_dir = tmp_path / "run"
    for step in (8, 9, 10):
        (run_dir / "checkpoints/unfinished").mkdir(parents=True)
        accelerator, state = SimpleNamespace(is_main_process=True), {"seconds": 1.0}
        script.finish_checkpoint(accelerator, run_dir, step, state, Args(keep_last_n=keep))
    assert [script.step_of(path) for path in script.list_checkpoints(run_dir)] == kept
    script.rewind_run(run_dir, run_dir / "checkpoints" / "step_10")
    assert checkpoints_of(run_dir) == sorted(f"step_{step}" for step in kept)
    args = Args(output_dir=str(tmp_path), run_name="run", resume_from_checkpoint="latest")
    assert script.find_run(args) == (run_dir, run_dir / "checkpoints" / "step_10")
    script.rewind_run(run_dir, run_dir / "checkpoints" / "step_9")
    assert checkpoints_of(run_dir) == [f"step_{step}" for step in kept[:-1]]


def test_checkpoint_whose_removal_is_interrupted_no_longer_has_its_name(tmp_path, monkeypatch):
    """A resume would take the half of it that is left for a whole one."""
    path = tmp_path / "checkpoints/step_3"
    path.mkdir(parents=True)
    # A kill comes before anything is removed
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)
    script.remove_checkpoints([path])
    assert script.list_checkpoints(tmp_path) == []


# ------------------------------------------------------------------------------------ saved models


# transformers loads some of these with a warning, and refuses to save them
SAMPLING = [{"do_sample": False, "temperature": 0.6}, {"repetition_penalty": 1.1, "users": "kept"}]


@pytest.mark.parametrize("sampling", [*SAMPLING, None])
def test_end_tokens_alone_change_in_a_generation_config(sampling, assets, tmp_path):
    path = shutil.copytree(assets / "model", tmp_path / "model") / "generation_config.json"
    expected = json.loads(path.read_text()) | (sampling or {})
    path.write_text(json.dumps(expected | {"eos_token_id": [1, 2]}))
    if sampling is None:
        path.unlink()
    args = Args(dtype="float32", stop_token_ids=(1, 11))
    model = script.load_model(script.AutoModelForCausalLM, tmp_path / "model", args, trained=True)
    tokenizer = AutoTokenizer.from_pretrained(assets / "model")
    script.save_model(Accelerator(cpu=True), model, tokenizer, tmp_path / "saved", args)
    saved = json.loads((tmp_path / "saved" / "generation_config.json").read_text())
    assert saved["eos_token_id"] == [1, 11]
    if sampling:
        same = {"eos_token_id": [1, 11], "transformers_version": saved["transformers_version"]}
        assert saved == expected | same
    GenerationConfig.from_pretrained(tmp_path / "saved")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "saved"]
