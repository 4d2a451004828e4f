"""Checkpoints: a run that was interrupted goes on as if it had not been, to the last bit.

Here with a stub of vLLM; with vLLM itself, on two ranks, in test_runs_ranks.py.
"""

import atexit
import contextlib
import errno
import importlib
import itertools
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import datasets
import pytest
from helpers import ASYNC, GRPO, OLD, PPO, REPO, SCRIPTS, hooks
from helpers.loops import EPISODES, options_of
from helpers.processes import descendants, environment, finish, flags_of, wait_until
from helpers.runs import differences, without_clock

import ppo_sync
import ppo_vllm_async

SIX_STEPS = {"total_episodes": 6 * EPISODES, "save_freq": 3}
VARIANTS = {
    # One is due after three steps
    "evaluation at the seam": {"num_epochs": 2, "num_evals": 2},
    "value warm-up at the seam": {"value_warmup_steps": 4, "warm_up_steps": 1},
    "adaptive KL": {
        "value_warmup_steps": 2,
        "warm_up_steps": 3,
        "kl_target": 0.1,
        "kl_horizon": 100,
    },
    "on-policy": {"async_mode": False},
    "GSPO": {"importance_sampling_level": "sequence", "beta": 0.0},
    "transformers": {"generation_backend": "transformers", "num_evals": 2},
}
ONLY_IN = {
    "value warm-up at the seam": PPO,
    "adaptive KL": PPO,
    "on-policy": ASYNC,
    "GSPO": GRPO,
    "transformers": PPO[:1],
}
FAST = [("ppo_vllm_async.py", name) for name in ("evaluation at the seam", "adaptive KL")]
CASES = [(name, variant) for variant in VARIANTS for name in ONLY_IN.get(variant, SCRIPTS)]
CASES += [(name, "reward model") for name in SCRIPTS]
CASES = [pytest.param(*case, marks=[] if case in FAST else [pytest.mark.slow]) for case in CASES]


@pytest.fixture
def options(few_prompts, reward_model):
    def of(variant=None):
        changes = SIX_STEPS | {"eval_dataset": few_prompts / "test.parquet"}
        if variant == "reward model":
            return changes | {"reward_model_path": reward_model, "num_evals": 2}
        return changes | VARIANTS.get(variant, {})

    return of


def lines_of(run, but=()):
    """The metrics of all steps, but for what a clock says and those that begin like this."""
    return [
        {name: value for name, value in without_clock(line).items() if not name.startswith(but)}
        for line in run.metrics
    ]


def check_equal_to_the_bit(resumed, whole):
    assert lines_of(resumed) == lines_of(whole)
    for name in ("samples.jsonl", "rollouts.jsonl", "model/model.safetensors"):
        assert (resumed.run_dir / name).read_bytes() == (whole.run_dir / name).read_bytes()
    for mine, theirs in zip(resumed.batches[::-1], whole.batches[::-1], strict=False):
        assert differences(vars(mine), vars(theirs)) == []
    for model, rates in resumed.rates.items():
        assert rates == whole.rates[model][-len(rates) :]


def checkpoints_of(run_dir):
    return [path.name for path in ppo_sync.list_checkpoints(run_dir)]


# ---------------------------------------------------------------------------- 6 steps are 3 and 3


@pytest.mark.parametrize(("name", "variant"), CASES)
def test_interrupted_run_goes_on_as_if_it_had_not_been(name, variant, run_main, options, tmp_path):
    changes = options(variant)
    whole = run_main(name, **changes | {"save_freq": 0})
    # In step 5, when there are lines that the checkpoint has not
    updates = len(whole.mini_batches) // 6
    broken = run_main(name, fails_at=4 * updates + 1, **changes, output_dir=tmp_path)
    assert "power" in str(broken.error)
    assert [line["training_step"] for line in broken.metrics] == [1, 2, 3, 4]
    assert checkpoints_of(tmp_path / "run") == ["step_3"]

    folder = tmp_path / "run" / "checkpoints" / "step_3"
    if name in OLD:
        state = json.loads((folder / "checkpoint.json").read_text())["state"]
    else:
        state = json.loads((folder / "state.json").read_text())
    started_at = time.monotonic()
    resumed = run_main(name, **changes, output_dir=tmp_path, resume_from_checkpoint="latest")
    assert len(resumed.batches) == 3
    check_equal_to_the_bit(resumed, whole)
    seconds = resumed.metrics[3]["time/from_scratch"] - state["seconds"]
    assert 0 < seconds < time.monotonic() - started_at
    if variant == "adaptive KL":
        check_betas(resumed.metrics)


def check_betas(lines):
    """1909.08593, 2.2: an error clipped to a fifth, a horizon of 100 episodes, of which a step is
    16; beta waits while the value model warms up."""
    betas = [line["objective/kl_coef"] for line in lines]
    expected = [0.3, 0.3, 0.3]
    for line in lines[2:-1]:
        error = min(0.2, max(-0.2, line["objective/kl"] / 0.1 - 1))
        expected.append(expected[-1] * (1 + error * 16 / 100))
    assert betas == pytest.approx(expected, rel=1e-6)
    assert len(set(betas)) == 4


EVALUATIONS = [
    {"num_evals": 0},
    {"num_evals": 3},
    {"num_evals": 6},
    {"eval_dataset": "train.parquet"},
    {"eval_temperature": 1.0},
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "evaluations"),
    [("grpo_vllm_async.py", evaluations) for evaluations in EVALUATIONS]
    + [("ppo_sync.py", EVALUATIONS[1])],
    ids=str,
)
def test_evaluations_may_change(evaluations, name, run_main, options, few_prompts, tmp_path):
    changes = options("evaluation at the seam")
    whole = run_main(name, **changes, output_dir=tmp_path)
    assert "eval/scores" in whole.metrics[3]
    if "eval_dataset" in evaluations:
        evaluations = {"eval_dataset": few_prompts / evaluations["eval_dataset"]}
    again = {"output_dir": tmp_path, "resume_from_checkpoint": "latest"}
    resumed = run_main(name, **changes | evaluations | again)
    assert lines_of(resumed, but="eval/") == lines_of(whole, but="eval/")
    # What came with the checkpoint are answers to the evaluation that had been planned
    is_still_due = evaluations == {"num_evals": 6}
    assert ("eval/scores" in resumed.metrics[3]) == is_still_due


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ppo_sync.py", "grpo_vllm_async.py"])
def test_run_with_a_constant_learning_rate_may_become_longer(name, run_main, options, tmp_path):
    changes = options() | {"lr_scheduler_type": "constant", "num_evals": 0}
    longer = changes | {"total_episodes": 8 * EPISODES}
    whole = run_main(name, **longer)
    run_main(name, **changes, output_dir=tmp_path)
    resumed = run_main(name, **longer, output_dir=tmp_path, resume_from_checkpoint="latest")
    assert len(resumed.batches) == 5
    # But for the evaluation at what had been the end
    lines = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").open()]
    assert {line["policy_version"] for line in lines} == {8}
    check_equal_to_the_bit(resumed, whole)


@pytest.mark.slow
def test_run_can_be_interrupted_again_and_again(run_main, options, tmp_path):
    changes = options() | {"save_freq": 1}
    name = "ppo_vllm_async.py"
    whole = run_main(name, **changes)
    broken = run_main(name, fails_at=4, **changes, output_dir=tmp_path)  # two updates a step
    for _ in range(2):
        again = {"output_dir": tmp_path, "resume_from_checkpoint": "latest"}
        broken = run_main(name, fails_at=4, **changes, **again)
        assert "power" in str(broken.error)
    resumed = run_main(name, **changes, **again)
    assert len(resumed.batches) < 5
    check_equal_to_the_bit(resumed, whole)


# -------------------------------------------------------------------------------- which are there


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({"keep_last_n": 2}, ["step_4", "step_5"]),
        ({"keep_last_n": 0}, ["step_1", "step_2", "step_3", "step_4", "step_5"]),
        ({"save_freq": 2}, ["step_2", "step_4"]),
        ({"save_freq": 6}, []),  # after the last step there is the model
        ({"save_freq": 0}, []),
    ],
)
def test_newest_checkpoints_are_kept(changes, kept, run_main, options):
    run = run_main("ppo_sync.py", **options() | {"save_freq": 1} | changes)
    assert checkpoints_of(run.run_dir) == kept
    folder = run.run_dir / "checkpoints"
    assert [path.name for path in sorted(folder.glob("*"))] == kept
    for checkpoint in folder.glob("*"):
        sizes = [path.stat().st_size for path in checkpoint.iterdir()]
        step = int(checkpoint.name.removeprefix("step_"))
        written = run.metrics[step]["perf/checkpoint_bytes"]  # in the next step's line
        assert written == sum(sizes) - (checkpoint / "checkpoint.json").stat().st_size
        assert run.metrics[step]["time/checkpoint"] > 0


def test_more_than_nine_steps_are_in_their_order(tmp_path):
    for step in (9, 10, 100):
        (tmp_path / "checkpoints" / f"step_{step}").mkdir(parents=True)
    assert checkpoints_of(tmp_path) == ["step_9", "step_10", "step_100"]


@pytest.mark.slow
def test_unfinished_checkpoint_is_none_and_goes_with_the_next(run_main, options, tmp_path):
    changes = options() | {"output_dir": tmp_path}
    whole = run_main("ppo_sync.py", **changes)
    folder = whole.run_dir / "checkpoints"
    shutil.copytree(folder / "step_3", folder / "step_5.unfinished")
    (folder / "mine").mkdir()
    assert checkpoints_of(whole.run_dir) == ["step_3"]
    run_main("ppo_sync.py", **changes, resume_from_checkpoint="latest")
    assert sorted(path.name for path in folder.iterdir()) == ["mine", "step_3"]


@pytest.mark.slow
def test_older_checkpoint_takes_the_run_back(run_main, options, tmp_path):
    changes = options() | {"save_freq": 2, "output_dir": tmp_path}
    whole = run_main("ppo_sync.py", **changes)
    files = {name: (whole.run_dir / name).read_bytes() for name in ("metrics.jsonl", "args.json")}
    assert checkpoints_of(whole.run_dir) == ["step_2", "step_4"]
    path = whole.run_dir / "checkpoints" / "step_2"
    again = {"resume_from_checkpoint": path, "fails_at": 3}  # in step 4
    broken = run_main("ppo_sync.py", **changes, **again)
    assert [line["training_step"] for line in broken.metrics] == [1, 2, 3]
    assert checkpoints_of(whole.run_dir) == ["step_2"]
    assert (whole.run_dir / "metrics.jsonl").read_bytes() != files["metrics.jsonl"]


# In the middle of the second checkpoint's weights, of its optimizers, and of its last small files
@pytest.mark.slow
@pytest.mark.parametrize("checkpoints", [1.1, 1.6, 1.995])
def test_full_disk_ends_the_run_and_the_older_checkpoint_stands(
    checkpoints, run_main, options, mount_disk, monkeypatch
):
    changes = options() | {"save_freq": 2}
    whole = run_main("ppo_sync.py", **changes)
    size = whole.metrics[2]["perf/checkpoint_bytes"]
    disk = mount_disk(int(checkpoints * size) + 2**16)
    # It fills up while the script runs; the check is of the disk as it is at the start
    monkeypatch.setattr(ppo_sync, "check_disk", lambda *_: None)
    cause = r"step_4 could not be saved; its disk has \d+ MiB free"
    with pytest.raises(OSError, match=cause):
        run_main("ppo_sync.py", **changes, output_dir=disk)
    run_dir = disk / "run"
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["step_2"]
    assert len((run_dir / "metrics.jsonl").read_text().splitlines()) == 4

    subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
    again = {"output_dir": disk, "resume_from_checkpoint": "latest"}
    check_equal_to_the_bit(run_main("ppo_sync.py", **changes, **again), whole)


@pytest.mark.slow
@pytest.mark.parametrize("name", OLD)
def test_failing_last_evaluation_loses_nothing(name, run_main, options, monkeypatch):
    script = importlib.import_module(name.removesuffix(".py"))

    def fail_at_last(call, given):
        rollout = call()
        if rollout.request.training_step == 7:
            raise RuntimeError("the power is gone")
        return rollout

    hooks.around(script, "receive_rollout", fail_at_last, put=monkeypatch.setattr)
    run = run_main(name, **options())
    assert "power" in str(run.error)
    assert (run.run_dir / "model" / "config.json").exists()
    assert [line["training_step"] for line in run.metrics] == [1, 2, 3, 4, 5, 6]
    assert "eval/scores" not in run.metrics[5]


# ----------------------------------------------------------------------------- ppo_vllm_async.py


def files_of(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def small_run(run_main, few_prompts, tmp_path_factory):
    """The folder of a run of ppo_vllm_async.py, with checkpoints after steps 2 and 4."""
    folder = tmp_path_factory.mktemp("small_run")
    options = {"eval_dataset": few_prompts / "test.parquet", "num_evals": 3, "save_freq": 2}
    run_main("ppo_vllm_async.py", **SIX_STEPS | options, output_dir=folder)
    return folder


@pytest.fixture
def resume(small_run, run_main, few_prompts, tmp_path):
    """resume(seed=2): goes on with a copy of small_run, in tmp_path."""
    shutil.copytree(small_run, tmp_path, dirs_exist_ok=True)

    def of(**changes):
        options = {"eval_dataset": few_prompts / "test.parquet", "num_evals": 3, "save_freq": 2}
        options |= {"output_dir": tmp_path, "resume_from_checkpoint": "latest"}
        return run_main("ppo_vllm_async.py", **SIX_STEPS | options | changes)

    return of


def test_resuming_takes_the_folder_back_to_its_checkpoint(resume, tmp_path):
    folder = tmp_path / "run" / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["step_2", "step_4"]
    before = {path.name: path.read_text() for path in (tmp_path / "run").glob("*.jsonl")}
    shutil.copytree(folder / "step_2", folder / "unfinished")
    broken = resume(resume_from_checkpoint=folder / "step_2", fails_at=1)  # in step 3
    assert "power" in str(broken.error)
    assert [path.name for path in folder.iterdir()] == ["step_2"]
    rows = {"metrics.jsonl": 2, "rollouts.jsonl": 8, "samples.jsonl": 16}
    for name, text in before.items():
        lines = text.splitlines(keepends=True)
        # Those of the evaluation that came with step 3 are there again already
        assert (tmp_path / "run" / name).read_text() == "".join(lines[: rows[name]]), name
    assert before.keys() == rows.keys()


def test_run_that_came_to_its_end_can_be_resumed_and_its_data_may_have_moved(
    resume, few_prompts, tmp_path
):
    shutil.copy(few_prompts / "train.parquet", tmp_path / "moved.parquet")
    before = files_of(tmp_path / "run" / "model")
    (tmp_path / "run" / "model" / "of_another_run").write_text("")
    assert len(resume(dataset=tmp_path / "moved.parquet").batches) == 2
    assert files_of(tmp_path / "run" / "model") == before


OF_ANOTHER_RUN = {
    "seed": {"seed": 2},
    "beta": {"beta": 0.1},
    "episodes_per_step": {"local_rollout_batch_size": 8, "total_episodes": 192},
    "number_samples_per_prompt": {"local_rollout_batch_size": 8, "number_samples_per_prompt": 2},
    "mini_batch_size": {"local_mini_batch_size": 16},
    "num_epochs": {"num_epochs": 2},
    "num_updates": {"total_episodes": 128},
    "data_hash": {"dataset": "test.parquet"},
    "num_evals": {"num_evals": 2},
    "eval_temperature": {"eval_temperature": 0.5},
}


@pytest.mark.parametrize("name", OF_ANOTHER_RUN)
def test_checkpoint_of_a_run_that_was_another_is_refused(name, resume, few_prompts, tmp_path):
    changes = dict(OF_ANOTHER_RUN[name])
    if "dataset" in changes:
        changes["dataset"] = few_prompts / changes["dataset"]
    before = files_of(tmp_path)
    with pytest.raises(ValueError, match=f"--resume_from_checkpoint: {name} was"):
        resume(**changes)
    assert files_of(tmp_path) == before


def save_fake_checkpoints(script, run_dir, steps, responses=(), **changes):
    """Checkpoints without a model, and with these responses."""

    def save_state(folder):
        folder.mkdir(parents=True)
        (folder / "model").write_text("weights")

    accelerator = SimpleNamespace(
        save_state=save_state, wait_for_everyone=lambda: None, is_main_process=True
    )
    rollout = script.Rollout(1, 0, list(responses[:2]), list(responses[2:]), {})
    for step in steps:
        state = script.RunState(step, 0.1, 2.5, "id", policy_version=step - 1)
        script.save_checkpoint(accelerator, run_dir, state, rollout, script.Args(**changes))


@pytest.mark.parametrize(
    ("keep", "kept"), [(2, ["step_9", "step_10"]), (0, ["step_8", "step_9", "step_10"])]
)
def test_newest_checkpoints_are_the_last_by_number(keep, kept, tmp_path):
    script = ppo_vllm_async
    save_fake_checkpoints(script, tmp_path / "run", (8, 9, 10), keep_last_n=keep)
    folder = tmp_path / "run" / "checkpoints"
    assert {path.name for path in folder.iterdir()} == set(kept)
    (folder / "unfinished").mkdir()
    options = {"output_dir": str(tmp_path), "run_name": "run", "resume_from_checkpoint": "latest"}
    found = script.find_run(script.Args(**options))
    assert found == (tmp_path / "run", folder / "step_10")
    script.rewind_run(tmp_path / "run", folder / "step_9")
    assert {path.name for path in folder.iterdir()} == set(kept) - {"step_10"}


def test_responses_of_a_checkpoint_come_back_to_the_bit(tmp_path):
    script = ppo_vllm_async
    prompts = [script.Prompt(str(i), "", [i], [i], None, None, None) for i in range(3)]
    ones = [
        script.Response(prompts[0], [5, 1], [-0.1, -1 / 3], True, "5", 1.0, None),
        script.Response(prompts[1], [7], [-2.5], False, "a\nb", None, "OSError()"),
        script.Response(prompts[2], [1], [-1e-30], True, "", None, None),
    ]
    save_fake_checkpoints(script, tmp_path, [4], ones)
    folder = tmp_path / "checkpoints" / "step_4"
    state = script.RunState(**json.loads((folder / "state.json").read_text()))
    assert state == script.RunState(4, 0.1, 2.5, "id", policy_version=3)
    request = script.Request(5, prompts[:2], [1, 2], prompts[2:], [3])
    rollout = script.load_rollout(folder, state, request)
    assert rollout == script.Rollout(5, 3, ones[:2], ones[2:], {})


def test_rollout_of_a_checkpoint_is_the_first_ranks_alone(tmp_path, monkeypatch):
    """Each rank would bring it, and the batch would be of another size."""
    script = ppo_vllm_async
    save_fake_checkpoints(script, tmp_path, [4])
    monkeypatch.setenv("RANK", "1")
    state = script.RunState(4, 0.1, 2.5, "id", policy_version=3)
    request = script.Request(5, [], [], [], [])
    rollout = script.load_rollout(tmp_path / "checkpoints" / "step_4", state, request)
    assert rollout.policy_version is None  # as of a rank without an engine


# ------------------------------------------------------------------------------- what is refused


@pytest.fixture(scope="module")
def saved(run_main, few_prompts, tmp_path_factory):
    """Runs of which there is a checkpoint after step 3, by script."""
    folders = {}
    for name in ("ppo_sync.py", "grpo_vllm_async.py"):
        folders[name] = tmp_path_factory.mktemp("saved")
        options = {"eval_dataset": few_prompts / "test.parquet", "output_dir": folders[name]}
        run_main(name, **SIX_STEPS | options)
    return folders


def cut(name):
    def damage(checkpoint):
        path = checkpoint / name
        os.truncate(path, path.stat().st_size - 1)

    return damage


def remove(name):
    return lambda checkpoint: (checkpoint / name).unlink()


def rewrite(name, **changes):
    def damage(checkpoint):
        path = checkpoint / name
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
        description = json.loads((checkpoint / "checkpoint.json").read_text())
        if name != "checkpoint.json":
            description["sizes"][name] = path.stat().st_size
            (checkpoint / "checkpoint.json").write_text(json.dumps(description))

    return damage


def overwrite(name):
    def damage(checkpoint):
        path = checkpoint / name
        path.write_bytes(bytes(path.stat().st_size))

    return damage


def nothing(checkpoint):
    pass


# What is done to the checkpoint, flags that are others, what the line names
REFUSED = {
    "cut model": (cut("model.safetensors"), {}, ["model.safetensors", "bytes", "older"]),
    "cut rollout": (cut("next_rollout.json"), {}, ["next_rollout.json", "bytes"]),
    "cut metrics": (cut("metrics.jsonl"), {}, ["metrics.jsonl", "bytes"]),
    "no optimizer": (remove("optimizer_1.bin"), {}, ["lacks optimizer_1.bin"]),
    "no arguments": (remove("args.json"), {}, ["lacks args.json"]),
    "other version": (rewrite("checkpoint.json", format=99), {}, ["format 99", "reads 1"]),
    "state of another version": (
        rewrite("checkpoint.json", state={"completed_steps": 3}),
        {},
        ["written by another script"],
    ),
    "cut description": (cut("checkpoint.json"), {}, ["checkpoint.json is damaged"]),
    "damaged arguments": (overwrite("args.json"), {}, ["args.json is damaged"]),
    "damaged rollout": (overwrite("next_rollout.json"), {}, ["next_rollout.json is damaged"]),
    "sizes that are none": (
        rewrite("checkpoint.json", sizes=3),
        {},
        ["checkpoint.json is damaged"],
    ),
    "no description": (remove("checkpoint.json"), {}, ["no checkpoint"]),
    "other seed": (nothing, {"seed": 2}, ["seed was 1 and is 2"]),
    "several": (
        nothing,
        {"learning_rate": 1e-4, "temperature": 1.0},
        ["learning_rate was 0.001 and is 0.0001; temperature was 1.3 and is 1.0"],
    ),
    "other data": (nothing, {"dataset": "test.parquet"}, ["the rows of --dataset are others"]),
    "other model": (nothing, {"model_name_or_path": "model"}, ["model_name_or_path was"]),
    "other model of this name": (
        rewrite("args.json", num_parameters=7),
        {},
        ["num_parameters was 7 and is"],
    ),
    "other batch": (
        nothing,
        {"local_rollout_batch_size": 8},
        ["episodes_per_step was 16 and is 32", "rollout_batch_size was 4 and is 8"],
    ),
    "other mini-batch": (nothing, {"local_mini_batch_size": 16}, ["mini_batch_size was 8"]),
    "longer": (nothing, {"total_episodes": 8 * EPISODES}, ["total_episodes was 96 and is 128"]),
    "of a run that ended before": (
        rewrite("args.json", lr_scheduler_type="constant"),
        {"lr_scheduler_type": "constant", "total_episodes": 3 * EPISODES},
        ["its 3 steps are done, and this run has only 3"],
    ),
    "unfinished": (
        lambda checkpoint: checkpoint.rename(checkpoint.with_name("step_3.unfinished")),
        {"resume_from_checkpoint": "run/checkpoints/step_3.unfinished"},
        ["no checkpoint"],
    ),
    "folder of the run": (nothing, {"resume_from_checkpoint": "run"}, ["its newest is", "step_3"]),
    "no such folder": (nothing, {"resume_from_checkpoint": "run/step_3"}, ["no checkpoint"]),
    "latest of no run": (
        nothing,
        {"resume_from_checkpoint": "latest", "run_name": None},
        ["--run_name"],
    ),
    "latest of another run": (
        nothing,
        {"resume_from_checkpoint": "latest", "run_name": "other"},
        ["has no checkpoint", "other"],
    ),
    "latest of a run without": (
        lambda checkpoint: shutil.rmtree(checkpoint),
        {"resume_from_checkpoint": "latest"},
        ["has no checkpoint", "remove that folder"],
    ),
    "other run": (nothing, {"run_name": "other"}, ["is of another run", "--run_name other"]),
    "PPO for GRPO": (nothing, {"script": "grpo_vllm_async.py"}, ["and is unknown"]),
    "not in its place": (
        lambda checkpoint: checkpoint.parent.rename(checkpoint.parent.with_name("best")),
        {"resume_from_checkpoint": "run/best/step_3"},
        ["no checkpoint", "output/RUN_NAME/checkpoints"],
    ),
    "state of another format": (
        rewrite("checkpoint.json", format=99, state={}),
        {},
        ["format 99", "reads 1"],
    ),
}


def one_line(capfd, name):
    (line,) = capfd.readouterr().err.strip().splitlines()
    assert line.startswith(f"{name}: error: ")
    assert len(line) < 500
    return line


@pytest.mark.parametrize("case", REFUSED)
def test_bad_checkpoint_is_refused_before_a_model_loads(
    case, saved, few_prompts, tmp_path, monkeypatch, capfd
):
    damage, changes, fragments = REFUSED[case]
    changes = dict(changes)
    name = changes.pop("script", "ppo_sync.py")
    shutil.copytree(saved["ppo_sync.py"], tmp_path, dirs_exist_ok=True)
    shutil.copytree(few_prompts / "model", tmp_path / "model")
    damage(tmp_path / "run" / "checkpoints" / "step_3")
    options = options_of(name, few_prompts, tmp_path) | SIX_STEPS
    options["resume_from_checkpoint"] = tmp_path / "run" / "checkpoints" / "step_3"
    for flag in ("dataset", "model_name_or_path", "tokenizer_name_or_path"):
        if flag in changes:
            changes[flag] = few_prompts / changes[flag]
    if "/" in changes.get("resume_from_checkpoint", "") or case == "folder of the run":
        changes["resume_from_checkpoint"] = tmp_path / changes["resume_from_checkpoint"]
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    script = importlib.import_module(name.removesuffix(".py"))
    monkeypatch.setattr(sys, "argv", [name, *flags_of(options | changes), "--dry_run"])
    with pytest.raises(SystemExit) as stop:
        script.main()
    line = one_line(capfd, name)
    assert stop.value.code == 2
    for fragment in fragments:
        assert fragment in line
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.bin", "optimizer_1.bin"])
def test_checkpoint_that_cannot_be_loaded_is_refused(name, saved, run_main, tmp_path, capfd):
    shutil.copytree(saved["ppo_sync.py"], tmp_path, dirs_exist_ok=True)
    overwrite(name)(tmp_path / "run" / "checkpoints" / "step_3")
    lines = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    with pytest.raises(SystemExit) as stop:
        run_main("ppo_sync.py", **SIX_STEPS, output_dir=tmp_path, resume_from_checkpoint="latest")
    assert stop.value.code == 2
    assert "cannot be loaded; resume an older one" in one_line(capfd, "ppo_sync.py")
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == lines


# --------------------------------------------------------------------------------- real processes


HOLD_THE_LOCK = """
import fcntl, sys
with open(sys.argv[1], "w") as file:
    fcntl.lockf(file, fcntl.LOCK_EX)
    print("locked", flush=True)
    sys.stdin.read()
"""


def test_run_folder_has_one_process(saved, run_main, tmp_path, capfd):
    shutil.copytree(saved["ppo_sync.py"], tmp_path, dirs_exist_ok=True)
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    changes = {"output_dir": tmp_path, "resume_from_checkpoint": "latest"}
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD_THE_LOCK, tmp_path / "run" / ".lock"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with other:
        assert other.stdout.readline() == b"locked\n"
        with pytest.raises(SystemExit) as stop:
            run_main("ppo_sync.py", **SIX_STEPS, **changes)
        other.stdin.close()
    assert stop.value.code == 2
    assert "another process trains this run" in one_line(capfd, "ppo_sync.py")
    assert files == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


def test_disk_without_locks_is_warned_of(tmp_path, monkeypatch, capsys):
    def lockf(*_):
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(ppo_sync.fcntl, "lockf", lockf)
    ppo_sync.lock_run_folder(tmp_path)
    assert "cannot be locked" in capsys.readouterr().out


def test_all_ranks_have_the_run_name_of_the_first(run_main, tmp_path, monkeypatch):
    """Without --run_name it has the time in it, which need not be the same on all."""
    names = []

    def exchange(group, value, error=None):
        return ["first", value] if isinstance(value, str) else [value]

    def note(call, given):
        names.append(given["args"].run_name)
        return call()

    monkeypatch.setattr(ppo_sync, "exchange", exchange)
    hooks.around(ppo_sync, "check_run_folder", note, put=monkeypatch.setattr)
    run_main("ppo_sync.py", output_dir=tmp_path, run_name=None, dry_run=True)
    assert names == ["first"]


def test_rank_without_the_shared_disk_says_so(accelerator, tmp_path, monkeypatch):
    # Rank 0 makes the folder, on another disk
    monkeypatch.setattr(ppo_sync, "on_main_process", lambda *_: None)
    state = ppo_sync.RunState(completed_steps=3, beta=0.0, seconds=0.0, wandb_id=None)
    with pytest.raises(OSError, match="could not be saved") as ended:
        ppo_sync.save_checkpoint(accelerator, None, tmp_path, state, None, ppo_sync.Args())
    assert "not on a disk that all nodes share" in str(ended.value.__cause__)
    assert list(tmp_path.iterdir()) == []


def test_disk_counts_what_a_killed_run_has_left(mount_disk):
    one = 4 * 2**20
    disk = mount_disk(4 * one + 2**25)
    for name in ("step_1", "step_2", "step_3", "step_4.unfinished"):
        (disk / "run" / "checkpoints" / name).mkdir(parents=True)
        (disk / "run" / "checkpoints" / name / "weights").write_bytes(bytes(one - 2**16))
    args = ppo_sync.Args(
        output_dir=str(disk), run_name="run", keep_last_n=3, resume_from_checkpoint="latest"
    )
    ppo_sync.check_disk(args, 0, checkpoint_bytes=4 * one - 2**18)
    with pytest.raises(SystemExit):
        ppo_sync.check_disk(args, 0, checkpoint_bytes=5 * one)


@pytest.mark.parametrize(
    ("changes", "size"),
    [
        ({}, 0),
        ({"save_freq": 10, "keep_last_n": 3}, 4),
        ({"save_freq": 10, "keep_last_n": 0}, 9),
        ({"save_freq": 40, "keep_last_n": 3}, 2),
        ({"save_freq": 100}, 0),
    ],
)
def test_disk_of_checkpoints(changes, size):
    args = ppo_sync.Args(**changes)
    assert ppo_sync.bytes_of_checkpoints(7, num_steps=100, args=args) == 7 * size


@pytest.mark.slow
@pytest.mark.parametrize("name", OLD)
def test_plan_says_the_bytes_of_the_checkpoints(name, run_main, monkeypatch):
    script = importlib.import_module(name.removesuffix(".py"))
    planned = []

    def note(call, given):
        planned.append(given["bytes_of_one"])
        return call()

    hooks.around(script, "bytes_of_checkpoints", note, put=monkeypatch.setattr)
    run = run_main(name, **SIX_STEPS)
    written = run.metrics[3]["perf/checkpoint_bytes"]
    assert planned[0] < written < 1.1 * planned[0]
    assert "a checkpoint every 3 steps, " in run.output


@pytest.fixture
def interrupted(start_script, small_eval, tmp_path):
    """interrupted(signal.SIGTERM): a real run that gets this signal after its second step.

    It has no vLLM, but a launcher, and wandb. What is left of it, as finish() says.
    """

    def interrupt(number):
        launcher = ("-m", "accelerate.commands.launch", "--num_processes", "1", "--cpu", "--quiet")
        process = start_script(
            "ppo_sync.py",
            tmp_path,
            launcher=launcher,
            env={"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path)},
            generation_backend="transformers",
            eval_dataset=small_eval,
            total_episodes=20 * 32,
            lr_scheduler_type="constant",
            save_freq=2,
            with_tracking=True,
        )
        checkpoint = process.run_dir / "checkpoints" / "step_2"
        wait_until(lambda: checkpoint.exists() or process.poll() is not None, 120, "step 2")
        # accelerate passes no signal on; a terminal sends it to both, but the launcher's own words
        # are not what is tested
        (script,) = (child for child in descendants(process) if "ppo_sync.py" in child.cmdline())
        script.send_signal(number)
        return finish(process, 60, time.monotonic())

    return interrupt


@pytest.mark.parametrize("cause", [signal.SIGINT, signal.SIGTERM, RuntimeError, None])
def test_whatever_ends_a_run_early_the_command_is_printed(cause, run_main, monkeypatch):
    """atexit prints it after whatever else is said, such as a traceback."""
    to_print = []

    def unregister(function):  # libraries call it too, when something is collected
        to_print[:] = [call for call in to_print if call[0] is not function]

    monkeypatch.setattr(atexit, "register", lambda *call, **_: to_print.append(call))
    monkeypatch.setattr(atexit, "unregister", unregister)
    registered_at_the_end = []
    monkeypatch.setattr(ppo_sync, "ignore_signals", lambda: registered_at_the_end.extend(to_print))

    def end(*_):
        if cause is RuntimeError:
            raise RuntimeError("the power is gone")
        if cause is not None:
            signal.raise_signal(cause)

    hooks.before_update(ppo_sync, end, put=monkeypatch.setattr)
    with contextlib.suppress(KeyboardInterrupt, SystemExit):
        run_main("ppo_sync.py")
    functions = {function for function, *_ in registered_at_the_end}
    assert (ppo_sync.print_resume_command in functions) == (cause is not None)


@pytest.mark.slow
def test_last_line_is_the_command_that_resumes(interrupted, tmp_path):
    run = interrupted(signal.SIGTERM)
    assert run.returncode != 0
    *_, before, last = run.stderr.strip().splitlines()
    assert before == "Terminated"
    assert last.startswith("To resume: ")
    command = [*shlex.split(last.removeprefix("To resume: ")), "--total_episodes", "256"]
    assert "accelerate.commands.launch" in command
    environ = environment({"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path)})
    again = subprocess.run(command, cwd=REPO, env=environ, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert "To resume" not in again.stderr
    lines = [json.loads(line) for line in (run.run_dir / "metrics.jsonl").open()]
    assert [line["training_step"] for line in lines] == [1, 2, 3, 4, 5, 6, 7, 8]
    samples = [json.loads(line) for line in (run.run_dir / "samples.jsonl").open()]
    assert {sample["policy_version"] for sample in samples} >= {0, 8}
    assert (run.run_dir / "curves.png").exists()
    before, after = (lines[i]["eval/verifiable_correct_rate"] for i in (0, -1))
    assert f"{before:.1%} before training, {after:.1%} after" in again.stdout

    runs = list(tmp_path.glob("wandb/offline-run-*"))
    assert len(runs) == 2
    assert len({path.name.rpartition("-")[2] for path in runs}) == 1  # of one run


@pytest.mark.slow
def test_killed_runs_go_on_as_if_they_had_not_been(small_eval):
    """At three random moments; with vLLM, and at more, kill_and_resume.py runs by hand."""
    command = [sys.executable, "scripts/benchmark/kill_and_resume.py", "--moments", "3"]
    command += ["--steps", "4", "--eval_dataset", small_eval]
    command += ["--script", "ppo_sync.py", "--generation_backend", "transformers"]
    done = subprocess.run(
        command, cwd=REPO, env=environment(), capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 of 3 equal to the run in peace" in done.stdout


def test_command_names_the_newest_checkpoint_alone(tmp_path, monkeypatch, capsys):
    ppo_sync.print_resume_command(tmp_path)
    assert capsys.readouterr().err == ""
    newest = tmp_path / "checkpoints" / "step_10"
    (tmp_path / "checkpoints" / "step_9").mkdir(parents=True)
    newest.mkdir()
    old = "output/a/checkpoints/step_2"
    words = ["ppo_sync.py", "--reward_fn", "a b.py:score", "--resume_from_checkpoint", old]
    words += ["--resume-from-checkpoint", old, f"--resume_from_checkpoint={old}", "--seed", "2"]
    monkeypatch.setattr(sys, "argv", words)
    ppo_sync.print_resume_command(tmp_path)
    expected = f"ppo_sync.py --reward_fn 'a b.py:score' --seed 2 --resume_from_checkpoint {newest}"
    assert capsys.readouterr().err == f"To resume: {expected}\n"


# ------------------------------------------------------------------------------------ reward model


def test_interrupted_training_of_a_reward_model_goes_on(assets, tmp_path, monkeypatch):
    import train_reward_model as rm

    rows = datasets.Dataset.from_parquet(str(assets / "preference_train.parquet"))
    rows.select(range(64)).to_parquet(str(tmp_path / "train.parquet"))

    def train(folder, fails_at=None, **changes):
        updates = itertools.count(1)

        def fail(call, given):
            if next(updates) == fails_at:
                raise RuntimeError("the power is gone")
            return call()

        options = {
            "dataset": tmp_path / "train.parquet",
            "eval_dataset": tmp_path / "train.parquet",
            "model_name_or_path": assets / "model",
            "dtype": "float32",
            "output_dir": folder,
            "run_name": "run",
            "local_mini_batch_size": 8,
            "num_train_epochs": 1,
            "learning_rate": 1e-3,
            "warmup_ratio": 0.3,
            "save_freq": 3,
        }
        monkeypatch.setattr(sys, "argv", ["train_reward_model.py", *flags_of(options | changes)])
        with contextlib.ExitStack() as stack:
            for number in (signal.SIGINT, signal.SIGTERM):
                stack.callback(signal.signal, number, signal.getsignal(number))
            stack.callback(atexit.unregister, rm.print_resume_command)
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            hooks.around(rm, "accumulate_gradients", fail, put=patch.setattr)
            rm.main()

    train(tmp_path / "whole", save_freq=0)
    with pytest.raises(RuntimeError, match="power"):
        train(tmp_path / "broken", fails_at=5)
    with pytest.raises(SystemExit):
        train(tmp_path / "broken", seed=2, resume_from_checkpoint="latest")
    train(tmp_path / "broken", resume_from_checkpoint="latest")
    whole, resumed = (
        [
            without_clock(json.loads(line))
            for line in (tmp_path / name / "run" / "metrics.jsonl").open()
        ]
        for name in ("whole", "broken")
    )
    assert len(whole) == 8
    assert resumed == whole
    whole, resumed = (
        (tmp_path / name / "run" / "model" / "model.safetensors").read_bytes()
        for name in ("whole", "broken")
    )
    assert resumed == whole
