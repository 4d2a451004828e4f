"""Runs of the three scripts with vLLM itself: which weights sampled, what was evaluated and saved.

What a step computes is in test_loop.py, with a stub of vLLM, in seconds.
"""

import json
import math
import re
import threading
import time
from types import SimpleNamespace

import overlap
import pytest
import torch
from helpers import ASYNC, SCRIPTS
from helpers.endings import new_mark, processes_with
from helpers.files import read_json_lines
from helpers.formulas import logprobs_and_entropies
from helpers.processes import CPU, ONE_RANK, folders_of_vllm
from helpers.rollouts import STOP  # <|end|> of the debug model too
from helpers.runs import (
    VLLM_OPTIONS,
    batch_of,
    check_equal_to_the_bit,
    response_tokens,
    weights_of_versions,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.slow

STEPS = range(1, 5)
LENGTH = VLLM_OPTIONS["response_length"]
# Each version is far from the next
ASYNC_OPTIONS = VLLM_OPTIONS | {"learning_rate": 3e-3, "save_freq": 2}
OF_GRPO = {"local_rollout_batch_size": 8, "number_samples_per_prompt": 4, "kl_estimator": "kl1"}
OF_GRPO |= {"learning_rate": 1e-3, "seed": 3}  # whose first groups have spread
OF_GRPO |= dict.fromkeys(("gamma", "lam", "value_lam", "whiten_rewards"))  # it has none of these


@pytest.fixture(scope="module")
def launched(run_script, small_eval, tmp_path_factory):
    """launched("ppo_vllm_async.py", ONE_RANK, wandb's variables): a run that went well."""

    def run(script, launcher=None, env=None, **options):
        folder, mark = tmp_path_factory.mktemp("run"), new_mark()
        env = {"WANDB_DIR": str(folder)} | mark | (env or {})
        options = {"eval_dataset": small_eval} | ASYNC_OPTIONS | options
        run = run_script(script, folder, launcher, env=env, **options)
        assert run.returncode == 0, run.output
        run.mark = mark
        return run

    return run


@pytest.fixture(scope="module")
def ppo_run(launched):
    return launched("ppo_vllm_async.py", ONE_RANK)


@pytest.fixture(scope="module")
def grpo_run(launched):
    env = {"WANDB_MODE": "offline"}
    return launched("grpo_vllm_async.py", ONE_RANK, env, with_tracking=True, **OF_GRPO)


@pytest.fixture(params=SCRIPTS)
def run(request):
    """Of four steps and one update each."""
    fixtures = ("vllm_run", "ppo_run", "grpo_run")
    run = request.getfixturevalue(fixtures[SCRIPTS.index(request.param)])
    run.script = request.param
    return run


@pytest.fixture(scope="session")
def tokenizer(assets):
    return AutoTokenizer.from_pretrained(assets / "model")


@pytest.fixture
def models(run, assets):
    """{version: the policy that was sent to vLLM as this version}"""
    models = {}
    for version, weights in weights_of_versions(run).items():
        models[version] = AutoModelForCausalLM.from_pretrained(assets / "model")
        models[version].load_state_dict(weights)
    return models


def test_every_step_has_its_line_of_finite_metrics(run):
    timers = {f"time/{part}" for part in ("generation", "reward", "forward", "update", "training")}
    if run.script in ASYNC:
        timers |= {"time/wait_for_prompts", "time/wait_for_generation"}
    for step, line in zip(STEPS, run.metrics, strict=True):
        assert line["training_step"] == step
        assert all(math.isfinite(value) for value in line.values())
        assert timers <= set(line) and min(line[timer] for timer in timers) >= 0
    assert (run.run_dir / "curves.png").stat().st_size > 0
    lines = re.findall(r"^step (\d of 4), \S+ left  objective/scores: ", run.stdout, re.MULTILINE)
    assert lines == [f"{step} of 4" for step in STEPS]


def test_sampler_had_the_weights_of_the_version_that_it_names(run, models):
    """In async scripts of one step before, and of none else."""
    for step, line in zip(STEPS, run.metrics, strict=True):
        sampled_by = max(0, step - 2) if run.script in ASYNC else step - 1
        if run.script in ASYNC:
            assert line["policy/version"] == step - 1
            assert line["policy/staleness"] == step - 1 - sampled_by
        batch = batch_of(run, step)
        prompts, responses = batch["prompt_ids"][::4], batch["responses"][::4]
        sampler, learner, reference = (
            torch.cat(response_tokens(batch["mask"][::4], batch[name][::4]))
            for name in ("sampler_logprobs", "logprobs", "ref_logprobs")
        )
        for version, model in models.items():
            rows, _ = logprobs_and_entropies(model, prompts, responses, temperature=1.5)
            logprobs = torch.cat(rows)
            difference = (sampler - logprobs).abs().max()
            assert difference < 1e-4 if version == sampled_by else difference > 1e-3
            if version == step - 1:
                torch.testing.assert_close(learner, logprobs, rtol=0, atol=1e-4)
            if version == 0:
                torch.testing.assert_close(reference, logprobs, rtol=0, atol=1e-4)


def test_score_is_of_the_response_to_the_prompt_beside_it(run, tokenizer):
    samples = 4 if "grpo" in run.script else 2
    drawn, seen = [], set()
    for step, line in zip(STEPS, run.metrics, strict=True):
        batch = batch_of(run, step)
        drawn += batch["prompt_ids"]
        right = []
        for row, (prompt, response) in enumerate(batch["sequences"]):
            digits = tokenizer.decode(prompt, skip_special_tokens=True).rstrip("=")
            answer = tokenizer.decode(response, skip_special_tokens=True)
            right.append(float(answer == "".join(sorted(digits))))
            stopped = response[-1] == STOP
            assert batch["scores"][row] == (right[-1] if stopped else -1.0)
            assert STOP not in response[:-1] and (stopped or len(response) == LENGTH)
        for name in ("verifiable_correct_rate", "verifiable_score"):
            assert line[f"objective/{name}"] == pytest.approx(sum(right) / 32)
        seen |= {*batch["scores"].tolist()}
    assert {-1.0, 0.0} <= seen  # few are right at this temperature, and 1.0
    assert all(drawn[i] == drawn[i - i % samples] for i in range(128))
    assert len(set(map(str, drawn))) == 128 / samples


def test_evaluations_are_greedy_answers_of_the_version_that_they_name(run, models, tokenizer):
    versions = [0, 1, 4] if run.script in ASYNC else [0, 2, 4]
    lines = [run.metrics[step - 1] for step in (1, 3, 4)]
    assert [line for line in run.metrics if "eval/scores" in line] == lines
    assert [line["eval/policy_version"] for line in lines] == versions
    every = read_json_lines(run.run_dir / "samples.jsonl")
    assert len(every) == 3 * 32
    for line, version, start in zip(lines, versions, (0, 32, 64), strict=True):
        samples, model = every[start : start + 32], models[version]
        assert {sample["policy_version"] for sample in samples} == {version}
        for sample in samples[:8]:
            ids = torch.tensor([tokenizer(sample["prompt"])["input_ids"]])
            answer = model.generate(ids, do_sample=False, max_new_tokens=LENGTH, eos_token_id=STOP)
            text = tokenizer.decode(answer[0, ids.shape[1] :], skip_special_tokens=True)
            assert text == sample["response"]
        right = sum(s["response"] == s["ground_truth"] for s in samples) / 32
        assert line["eval/verifiable_correct_rate"] == pytest.approx(right)
        assert line["eval/stop_rate"] == sum(s["stopped"] for s in samples) / 32


@pytest.mark.parametrize("run", ASYNC, indirect=True)
def test_run_that_is_over_leaves_nothing_behind(run):
    assert processes_with(run.mark) == []
    (folder,) = folders_of_vllm(run.stdout)
    assert not folder.exists()
    assert not any(word in run.stderr for word in ("Traceback", "leaked", "Warning"))
    assert "Held-out prompts answered right: " in run.stdout  # the summary


def test_wandb_gets_the_metrics_the_samples_and_the_config(grpo_run):
    (path,) = grpo_run.run_dir.parent.glob("wandb/offline-run-*/run-*.wandb")
    log, block = path.read_bytes(), 2**15  # what is split goes on behind a block's header
    log = b"".join(log[i + 7 : i + block] for i in range(0, len(log), block)).decode("latin1")

    def logged(name):
        """By protobuf: its length, the name, a tag, the length of its JSON, that."""
        field = re.escape(chr(len(name)) + name) + "\x82\x01[\x80-\xff]*[^\x80-\xff]"
        decode = json.JSONDecoder().raw_decode
        return [decode(log, found.end())[0] for found in re.finditer(field, log, re.DOTALL)]

    for name, value in json.loads((grpo_run.run_dir / "args.json").read_text()).items():
        assert value in logged(name), name
    for name in set().union(*grpo_run.metrics):
        values = iter(logged(name))
        assert all(line[name] in values for line in grpo_run.metrics if name in line), name

    paths = path.parent.glob("files/media/table/sample_completions_*.json")
    paths = sorted(paths, key=lambda path: int(path.name.split("_")[2]))
    tables = [json.loads(path.read_text()) for path in paths]
    samples = [
        dict(zip(table["columns"], row, strict=True)) for table in tables for row in table["data"]
    ]
    assert len(tables) == 3  # numbers are numbers
    assert samples == read_json_lines(grpo_run.run_dir / "samples.jsonl")


# --------------------------------------------------------------------------- several runs compared


def test_forked_run_gives_the_bits_of_the_real_command(run, launched):
    """Else what other tests find in forked runs would not be what a user has."""
    of_sync = {"learning_rate": 5e-4, "save_freq": None}
    changes = {"ppo_sync.py": of_sync, "grpo_vllm_async.py": OF_GRPO}
    again = launched(run.script, **changes.get(run.script, {}))
    check_equal_to_the_bit(run, again, STEPS)


# What a sampler's rounding or a padded width moves
NOT_COMPARED = ("time/", "perf/", "mismatch/")


def test_two_ranks_do_what_one_does(vllm_run, run_script, small_eval, tmp_path):
    options = VLLM_OPTIONS | {"eval_dataset": small_eval, "num_evals": 1, "total_episodes": 64}
    options |= {"local_rollout_batch_size": 8, "local_mini_batch_size": 16}
    options |= {"per_device_train_batch_size": 4, "local_rollout_forward_batch_size": 16}
    run = run_script("ppo_sync.py", tmp_path, ranks=2, env=CPU, **options)
    assert run.returncode == 0, run.output
    assert json.loads((run.run_dir / "args.json").read_text())["world_size"] == 2
    one, two = batch_of(vllm_run, 1), batch_of(run, 1)
    assert one["sequences"] == two["sequences"]
    assert torch.equal(one["scores"], two["scores"])
    for name, value in vllm_run.metrics[0].items():
        if not name.startswith(NOT_COMPARED):
            assert run.metrics[0][name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
    # Of a gradient next to nothing AdamW takes the sign, which rounding decides
    one, two = (weights_of_versions(each)[1] for each in (vllm_run, run))
    differences = torch.cat([(one[name] - two[name]).abs().flatten() for name in one])
    assert (differences < 1e-6).double().mean() > 0.99


@pytest.mark.parametrize("async_mode", [False, True])
def test_generation_and_training_overlap_and_only_then_are_responses_a_step_old(
    async_mode, monkeypatch, capsys
):
    """Asynchronously a training waits for the next generation to begin, and that for it."""
    events, both = [], threading.Barrier(2, timeout=60)

    def sleep(_):
        is_training = threading.current_thread() is threading.main_thread()
        name = "training" if is_training else "generation"
        events.append(name)
        count = events.count(name)
        if async_mode and count != (7 if is_training else 1):
            both.wait()
        events.append(f"{name} ends")

    clock = SimpleNamespace(sleep=sleep, perf_counter=time.perf_counter)
    monkeypatch.setattr(overlap, "time", clock)
    overlap.run_steps(async_mode)
    samplers = [int(version) for version in re.findall(r"of version (\d)", capsys.readouterr().out)]
    assert samplers == ([0, 0, 1, 2, 3, 4, 5] if async_mode else [0, 1, 2, 3, 4, 5, 6])
    in_turn = ["generation", "generation ends", "training", "training ends"]
    assert (events == 7 * in_turn) != async_mode
