"""A run that was interrupted goes on as if it had not been, to the last bit; what a checkpoint is.

Here with test_loop.py's stub of vLLM; test_runs.py resumes with vLLM itself, test_ranks.py on
another number of ranks. At the end the generation config of a saved model.
"""

import functools
import json
import resource
import shutil
import time
from dataclasses import replace
from datetime import date

import pytest
from accelerate import Accelerator
from helpers import ASYNC, GRPO, LORA, PPO, SCRIPTS, hooks
from helpers.files import read_json_lines, write_rows, write_text
from helpers.loops import EPISODES
from helpers.runs import check_equal_to_the_bit
from torch.distributed.checkpoint.api import CheckpointException
from transformers import AutoTokenizer, GenerationConfig

import ppo_vllm_async as script
from ppo_vllm_async import Args


def score(data_source, response, ground_truth):
    if response.startswith("6"):
        raise OSError("the grader is out of paper")
    return {"score": float(len(response) % 2), "acc": len(response) / 3}


# An evaluation is due after three steps, between the steps of which one is before a checkpoint and
# the other after it
SIX_STEPS = {"total_episodes": 6 * EPISODES, "num_evals": 2, "weight_decay": 0.1}
OF_PPO = {"value_warmup_steps": 2, "warm_up_steps": 3}
LONG_WARMUP = {"num_epochs": 2, "value_warmup_steps": 4, "warm_up_steps": 1}
GSPO = {"importance_sampling_level": "sequence", "beta": 0.0, "num_epochs": 2}
VARIANTS = [(LONG_WARMUP, PPO), (GSPO, GRPO), ({"async_mode": False}, ASYNC)]
VARIANTS += [({"lora_rank": 4}, LORA)]
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
        return run_main(name, score, **options | (OF_PPO if "ppo" in name else {}) | changes)

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


def checkpoints_of(run_dir):
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


# ---------------------------------------------------------------------------- 6 steps are 3 and 3


@pytest.mark.usefixtures("lora_forks")
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


def test_latest_begins_and_goes_on_also_after_a_full_disk(whole, six_steps, tmp_path, monkeypatch):
    """The same command until the run is finished, as a cluster gives it again and again."""
    name, wandb_ids = "ppo_vllm_async.py", set()
    run_dir, again = tmp_path / "run", {"output_dir": tmp_path, "save_freq": 2}
    expected = whole(name)
    users = write_rows(run_dir / "users.jsonl", [{"rows": "of a user"}])
    assert "power" in str(six_steps(name, fails_at=3, **again).error)  # in step 2
    assert len(read_json_lines(run_dir / "metrics.jsonl")) == 1
    with pytest.raises(ValueError, match=r"another run.*--run_name.*latest"):
        six_steps(name, **again)
    again["resume_from_checkpoint"] = "latest"

    def fill_disk(call, given):
        """No file may become larger while step 4 is saved."""
        unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
        if given["step"] == 4:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, unlimited[1]))
        try:
            call()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)

    def note(given):
        wandb_ids.add(given["args"][-1]["wandb"]["id"])

    with monkeypatch.context() as patch:
        hooks.around(script, "save_checkpoint", fill_disk, put=patch.setattr)
        hooks.before(Accelerator, "init_trackers", note, put=patch.setattr)
        with pytest.raises((OSError, CheckpointException), match="too large"):
            six_steps(name, **again)
    assert checkpoints_of(run_dir) == ["step_2", "unfinished"]
    # What it had written of step 4 must not be in the step 4 that follows
    hooks.before(Accelerator, "init_trackers", note, put=monkeypatch.setattr)
    run = six_steps(name, fails_at=6, **again)  # in step 5
    assert len(run.batches) == 2 and checkpoints_of(run_dir) == ["step_2", "step_4"]
    run = six_steps(name, **again)
    assert len(run.batches) == 2 and len(wandb_ids) == 1
    check_equal_to_the_bit(run, expected)
    assert read_json_lines(users) and not list(run_dir.glob("checkpoints/*/users.jsonl"))
    # A copy by another name is another run of Weights & Biases, however often it is resumed
    shutil.copytree(run_dir, tmp_path / "copy")
    for _ in range(2):
        six_steps(name, fails_at=1, run_name="copy", **again)
    assert len(wandb_ids) == 2
    # A finished run has nothing to go on from, and is not begun anew
    shutil.rmtree(run_dir / "checkpoints")
    with pytest.raises(ValueError, match="another run"):
        six_steps(name, **again)


# ---------------------------------------------------------------------------- the folder of a run


def test_run_that_came_to_its_end_goes_back_to_an_older_checkpoint_and_its_data_may_have_moved(
    six_steps, few_prompts, tmp_path
):
    name = "ppo_vllm_async.py"
    finished = six_steps(name, save_freq=2)
    shutil.copytree(finished.run_dir, tmp_path / "run")
    folder = tmp_path / "run" / "checkpoints"
    assert checkpoints_of(tmp_path / "run") == ["step_2", "step_4"]
    for other in ("unfinished", "step_2_good"):
        shutil.copytree(folder / "step_2", folder / other)
    options = {"output_dir": tmp_path, "resume_from_checkpoint": folder / "step_2"}
    six_steps(name, fails_at=1, **options)
    # The copy is the user's; and the model is not of the run as it is now
    assert checkpoints_of(tmp_path / "run") == ["step_2", "step_2_good"]
    assert not (tmp_path / "run/model").exists()
    for file, rows in {"metrics.jsonl": 2, "rollouts.jsonl": 16, "samples.jsonl": 8}.items():
        lines = read_json_lines(finished.run_dir / file)
        assert read_json_lines(tmp_path / "run" / file) == lines[:rows], file

    shutil.copy(few_prompts / "train.parquet", tmp_path / "moved.parquet")
    options["resume_from_checkpoint"] = "latest"
    run = six_steps(name, dataset=tmp_path / "moved.parquet", **options)
    assert len(run.batches) == 4
    check_equal_to_the_bit(run, finished)


def test_resume_of_another_run_is_refused(broken, assets):
    """Also of other prompts, to which a checkpoint's responses would be taken for answers."""
    run_dir = broken("ppo_vllm_async.py").run_dir
    checkpoint_dir = run_dir / "checkpoints/step_3"
    args = Args(**json.loads((run_dir / "args.json").read_text()))
    train, held_out = script.load_datasets(AutoTokenizer.from_pretrained(assets / "model"), args)

    def read(prompts=train + held_out, **changes):
        return script.read_state(run_dir, checkpoint_dir, prompts, replace(args, **changes))

    for name in script.MUST_AGREE:
        with pytest.raises(ValueError, match=f"--resume_from_checkpoint: {name} was "):
            read(**{name: 77})
    first, *others = train + held_out
    changed = [replace(first, **{name: None}) for name in ("token_ids", "ground_truth")]
    for prompts in ([*others, first], train, *([prompt, *others] for prompt in changed)):
        with pytest.raises(ValueError, match=r"--resume_from_checkpoint: the prompts have changed"):
            read(prompts)
    # All else may change: files may move
    may = {"per_device_train_batch_size": 2, "world_size": 2, "learning_rate": 77.0}
    step, state = read([replace(first, origin="moved"), *others], **may)
    assert step == 4 and state["rollout"]


def test_ranks_go_by_what_the_first_one_finds(monkeypatch):
    """A network file system may show a folder late to others."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(script, "find_run", pytest.fail)
    monkeypatch.setattr(script, "broadcast_object_list", lambda objects: ["the first one's"])
    assert script.agree_on_run(Args()) == "the first one's"


def test_second_run_of_one_name_ends_and_touches_nothing(six_steps, tmp_path, monkeypatch):
    """The other one has begun meanwhile."""
    run_dir = tmp_path / "run"

    def begin(_):
        for name in ("args.json", "metrics.jsonl"):
            write_text(run_dir / name, "of the other one")

    hooks.before(script, "open_run", begin, put=monkeypatch.setattr)
    with pytest.raises(FileExistsError, match=r"run/args\.json"):
        six_steps("ppo_vllm_async.py", output_dir=tmp_path)
    assert {path.read_text() for path in run_dir.iterdir()} == {"of the other one"}


def test_run_keeps_its_name_with_a_slash_and_a_default_name_is_its_own(tmp_path, monkeypatch):
    options = {"output_dir": str(tmp_path), "run_name": "exp/a"}
    args, run_dir, _ = script.agree_on_run(Args(**options))
    assert (args.run_name, run_dir) == ("exp/a", tmp_path / "exp/a")
    write_text(run_dir / "args.json", '{"start_day": "2024-07-26"}')
    (run_dir / "checkpoints/step_5").mkdir(parents=True)
    monkeypatch.chdir(run_dir / "checkpoints/step_5")
    for given in ({"resume_from_checkpoint": "latest"}, {"resume_from_checkpoint": "."}):
        args, *found = script.agree_on_run(Args(**options | given))
        assert (args.run_name, args.start_day) == ("exp/a", "2024-07-26")
        assert found == [run_dir, run_dir / "checkpoints/step_5"]
    monkeypatch.setattr(time, "strftime", lambda _: "now")
    assert len({script.find_run(Args())[0] for _ in range(9)}) == 9
    with pytest.raises(ValueError, match="latest needs a --run_name"):
        script.find_run(Args(resume_from_checkpoint="latest"))


@pytest.mark.parametrize(("keep", "kept"), [(2, [9, 10]), (0, [8, 9, 10])])
def test_newest_checkpoints_are_the_last_by_number(keep, kept, tmp_path):
    run_dir = tmp_path / "run"
    for step in (8, 9, 10):
        (run_dir / "checkpoints/unfinished").mkdir(parents=True)
        script.save_checkpoint({}, run_dir, step, {"seconds": 1.0}, Args(keep_last_n=keep))
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


# What models come with. transformers refuses to save the first
SAMPLING = [{"do_sample": False, "temperature": 0.6}, {"repetition_penalty": 1.1, "top_k": 1}]


@pytest.mark.parametrize("sampling", SAMPLING)
def test_saved_model_is_sampled_from_as_the_run_did(sampling, assets, tmp_path):
    """vLLM and transformers take their defaults from its generation config."""
    path = shutil.copytree(assets / "model", tmp_path / "model") / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | sampling))
    args = Args(dtype="float32", stop_token_ids=(1, 11), temperature=0.9)
    model = script.load_model(script.AutoModelForCausalLM, tmp_path / "model", args, trained=True)
    tokenizer = AutoTokenizer.from_pretrained(assets / "model")
    script.save_model(Accelerator(cpu=True), model, tokenizer, tmp_path / "saved", args)
    saved = json.loads((tmp_path / "saved" / "generation_config.json").read_text())
    assert saved.items() >= {"do_sample": True, "temperature": 0.9, "top_k": 0}.items()
    assert saved["eos_token_id"] == [1, 11] and "repetition_penalty" not in saved
    GenerationConfig.from_pretrained(tmp_path / "saved")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "saved"]
