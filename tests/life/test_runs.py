"""Runs of the three scripts with vLLM itself: which weights sampled, and what a run leaves.

What a step computes is in test_loop.py, with a stub of vLLM, in seconds.
"""

import json
import re

import pytest
import torch
from helpers import ASYNC, GRPO, SCRIPTS
from helpers.files import read_json_lines
from helpers.formulas import logprobs_and_entropies
from helpers.processes import ONE_RANK, folders_of_vllm, new_mark, processes_with
from helpers.runs import (
    VLLM_OPTIONS,
    batch_of,
    response_tokens,
    weights_of_versions,
)
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.slow

STEPS = range(1, 5)
# With this learning rate each version is far from the next
OPTIONS = VLLM_OPTIONS | {"learning_rate": 3e-3, "save_freq": 2}
OF_GRPO = {"local_rollout_batch_size": 8, "number_samples_per_prompt": 4, "kl_estimator": "kl1"}
OF_GRPO |= {"learning_rate": 1e-3, "seed": 3}  # the first groups have spread
OF_GRPO |= dict.fromkeys(("gamma", "lam", "value_lam", "whiten_rewards"))  # GRPO has none of these
OF_GRPO |= {"with_tracking": True}


@pytest.fixture(scope="module", params=SCRIPTS)
def run(request, run_script, small_eval, tmp_path_factory):
    """A run of four steps with one update each, which accelerate's launcher has started."""
    folder, mark = tmp_path_factory.mktemp("run"), new_mark()
    options = OPTIONS | (OF_GRPO if request.param in GRPO else {}) | {"eval_dataset": small_eval}
    env = {"WANDB_DIR": str(folder), "WANDB_MODE": "offline"} | mark
    run = run_script(request.param, folder, ONE_RANK, env=env, **options)
    assert run.returncode == 0, run.output
    run.script, run.mark = request.param, mark
    return run


@pytest.fixture
def models(run, assets):
    """{version: the policy that was sent to vLLM as this version}"""
    models = {}
    for version, weights in weights_of_versions(run).items():
        models[version] = AutoModelForCausalLM.from_pretrained(assets / "model")
        models[version].load_state_dict(weights)
    return models


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


@pytest.mark.parametrize("run", ASYNC, indirect=True)
def test_run_that_is_over_leaves_nothing_behind(run):
    assert processes_with(run.mark) == []
    (folder,) = folders_of_vllm(run.stdout)
    assert not folder.exists()
    assert not any(word in run.stderr for word in ("Traceback", "leaked", "Warning"))
    assert "Held-out prompts answered correctly: " in run.stdout  # the summary


@pytest.mark.parametrize("run", GRPO, indirect=True)
def test_wandb_gets_the_metrics_the_samples_and_the_config(run):
    (path,) = run.run_dir.parent.glob("wandb/offline-run-*/run-*.wandb")
    log, block = path.read_bytes(), 2**15  # what is split goes on behind a block's header
    log = b"".join(log[i + 7 : i + block] for i in range(0, len(log), block)).decode("latin1")

    def logged(name):
        """By protobuf: its length, the name, a tag, the length of its JSON, that."""
        field = re.escape(chr(len(name)) + name) + "\x82\x01[\x80-\xff]*[^\x80-\xff]"
        decode = json.JSONDecoder().raw_decode
        return [decode(log, found.end())[0] for found in re.finditer(field, log, re.DOTALL)]

    for name, value in json.loads((run.run_dir / "args.json").read_text()).items():
        assert value in logged(name), name
    for name in set().union(*run.metrics):
        values = iter(logged(name))
        assert all(line[name] in values for line in run.metrics if name in line), name

    paths = path.parent.glob("files/media/table/sample_completions_*.json")
    paths = sorted(paths, key=lambda path: int(path.name.split("_")[2]))
    tables = [json.loads(path.read_text()) for path in paths]
    samples = [
        dict(zip(table["columns"], row, strict=True)) for table in tables for row in table["data"]
    ]
    assert len(tables) == 3  # numbers are numbers
    assert samples == read_json_lines(run.run_dir / "samples.jsonl")
