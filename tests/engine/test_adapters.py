"""Adapters, the fork lora: what is trained, what is served, what is saved.

Models first, then main() with a stub of vLLM, then vLLM itself. Resuming is in test_resume.py, and
what ranks make together in test_fsdp2.py.
"""

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import fork
import pytest
import torch
from helpers import LORA, hooks, loops, rollouts
from helpers.real_vllm import MAX_LENGTH, PROMPTS, differences, vllm_args
from helpers.rollouts import make_noise
from peft import PeftModel
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

script = fork.import_fork("lora", "ppo_vllm_async.py")
FORKS = [*LORA]
LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LOST = "differ from the learner's"
# Heads of 32 numbers, which vLLM takes on a CPU; and rounding stays small
SIZES = {"hidden_size": 64, "max_position_embeddings": 512, "initializer_range": 0.1}


def adapter_of(model):
    return {name: p for name, p in model.named_parameters() if "lora_" in name}


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def saved_model(request, tmp_path):
    model = rollouts.tiny_language_model(tie_word_embeddings=request.param, **SIZES)
    model.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def args_for(path, **changes):
    options = {"model_name_or_path": str(path), "lora_rank": 3, "lora_alpha": 5}
    return vllm_args(script, **options | changes)


def load(path, args, trained=True):
    return script.load_model(AutoModelForCausalLM, str(path), args, trained)


@torch.no_grad()
def logprobs_of(model, args):
    batch = rollouts.make_rollout()
    return script.PolicyModel(model, args)(batch.input_ids, batch.mask.float())[0]


def merge_by_the_formula(weights, adapter):
    """{name: W + lora_alpha / lora_rank * B A}, of the weights that the adapter changes."""
    merged = {}
    for name, weight in weights.items():
        a, b = (adapter.get(name.replace("weight", f"lora_{x}.default.weight")) for x in "AB")
        if a is not None:
            merged[name] = weight + 5 / 3 * b.float() @ a.float()
    assert len(merged) == 2 * len(LAYERS)
    return merged


# ------------------------------------------------------------------------------------------ models


def test_every_linear_layer_but_the_head_has_an_adapter_and_the_rest_is_frozen(saved_model):
    args = args_for(saved_model, dtype="bfloat16")
    torch.manual_seed(5)
    model = load(saved_model, args)
    found = {name: p for name, p in model.named_parameters() if p.requires_grad}
    modules = {name.rsplit(".lora_")[0].split(".")[-1] for name in found}
    assert modules == set(LAYERS) and len(found) == 2 * 2 * len(LAYERS)
    assert dict(script.gather_weights(model, args)).keys() == found.keys()  # no more is sent
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}  # as in vLLM
    torch.manual_seed(6)  # ranks draw the same
    again, other = load(saved_model, args), load(saved_model, replace(args, seed=2))
    for name, parameter in found.items():
        is_b = "lora_B" in name
        assert is_b or parameter.shape[0] == 3
        assert (parameter == 0).all() == is_b
        assert torch.equal(parameter, adapter_of(again)[name])
        assert torch.equal(parameter, adapter_of(other)[name]) == is_b, name


def test_value_model_has_a_frozen_base_and_a_head_that_is_trained_whole(saved_model, accelerator):
    args = args_for(saved_model, dtype="bfloat16")
    value_model = script.load_classifier(
        accelerator, script.ValueModel, str(saved_model), args, trained=True
    )
    found = {name for name, p in value_model.named_parameters() if p.requires_grad}
    head = value_model.model.score.weight
    assert {name for name in found if "lora_" not in name} == {"model.score.weight"}
    assert len(found) == 1 + 2 * 2 * len(LAYERS)
    assert head.dtype == torch.float32 and not head.any()
    batch = rollouts.make_rollout()
    value_model(batch.input_ids, batch.mask).sum().backward()
    assert head.grad.any()
    # A reward model is frozen, and has none
    tiny = AutoModelForSequenceClassification.from_pretrained(saved_model, num_labels=1)
    tiny.save_pretrained(saved_model)
    judge = script.load_classifier(
        accelerator, script.RewardModel, str(saved_model), args, trained=False
    )
    assert not any(p.requires_grad for p in judge.parameters()) and not adapter_of(judge)


def test_no_gradient_of_the_frozen_head_is_made(monkeypatch):
    """It would take the memory of a vocabulary."""
    hidden, head = torch.randn(5, 4, requires_grad=True), torch.randn(7, 4).bfloat16()
    logprobs, _ = script.ChunkedHead.apply(hidden, head, torch.arange(5), None)
    monkeypatch.setattr(torch, "zeros_like", lambda *_, **__: pytest.fail("it was made"))
    logprobs.sum().backward()
    assert hidden.grad.any()


# ------------------------------------------------------------------------------------------- saved


def test_saved_model_is_merged_once_in_float32(saved_model, accelerator, assets, tmp_path):
    """Rounded to bfloat16 a small update would be lost."""
    args = args_for(saved_model, dtype="bfloat16", stop_token_ids=(1, 7))
    model = load(saved_model, args)
    make_noise(model, 1)
    for parameter in adapter_of(model).values():
        parameter.data *= 1e-2
    before = {name: p.clone() for name, p in model.named_parameters()}
    tokenizer = AutoTokenizer.from_pretrained(assets / "model")
    script.save_model(accelerator, model, tokenizer, tmp_path / "model", args)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())

    plain = load(saved_model, args, trained=False).float()
    found = load_file(tmp_path / "model/model.safetensors")
    weights = dict(plain.named_parameters())  # a tied head once
    expected = weights | merge_by_the_formula(weights, before)
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert found[name].dtype == torch.float32
        torch.testing.assert_close(found[name], weight.data, rtol=1e-6, atol=1e-8)
        assert torch.equal(weight, weights[name]) == (weight is weights[name])

    path, exact = tmp_path / "model", replace(args, dtype="float32")
    merged, report = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not any(report.values()) and merged.dtype == torch.float32
    assert merged.generation_config.eos_token_id == [1, 7] and (path / "tokenizer.json").exists()
    assert not (path / "adapter_config.json").exists()  # by which it would go on to the base
    adapter = PeftModel.from_pretrained(plain, tmp_path / "adapter").get_base_model()
    for one in (adapter, model.float()):
        found, expected = logprobs_of(one, exact), logprobs_of(merged, exact)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(saved_model)


# -------------------------------------------------------------------------- main(), a stub of vLLM


@pytest.mark.parametrize("name", FORKS)
def test_reference_is_the_policy_without_its_adapter_and_the_rest_is_in_no_checkpoint(
    name, run_main, lora_forks, monkeypatch
):
    module, loaded = lora_forks[name], []

    def note(given):
        loaded.append(given["trained"])

    with monkeypatch.context() as patch:
        hooks.before(module, "load_model", note, put=patch.setattr)
        run = run_main(name, lora_rank=4, save_freq=1)
    # The stub's policy and the learner's, the value model, and the model that is merged at the end
    assert loaded == [True, True, True, False] if "ppo" in name else [True, True, False]
    lines = [line["objective/kl"] for line in run.metrics]
    assert abs(lines[0]) < 1e-6 < abs(lines[1])
    first, *_, last = run.batches
    torch.testing.assert_close(first.ref_logprobs, first.logprobs, rtol=0, atol=1e-5)
    base = load("debug_assets/model", vllm_args(script), trained=False)
    args = module.Args(dtype="float32", temperature=1.3)
    with torch.no_grad():
        expected, _ = module.PolicyModel(base, args)(last.input_ids, last.mask)
    torch.testing.assert_close(last.ref_logprobs, expected, rtol=0, atol=1e-4)
    assert (last.logprobs - expected).abs().max() > 1e-3

    for model in ("policy", "value_model") if "ppo" in name else ("policy",):
        reader = FileSystemReader(run.run_dir / "checkpoints" / "step_2" / model)
        names = set(reader.read_metadata().state_dict_metadata)
        others = {name for name in names if "lora_" not in name}
        assert others == ({"model.score.weight"} if model == "value_model" else set())
        assert len(names) - len(others) == 28
    assert (run.run_dir / "adapter" / "adapter_config.json").exists()


# Ways to serve another adapter than that of the learner: factors of its B
FACTORS = {"ignores it": 0, "another alpha": 2, "not a number": math.nan, "stale": 1}


@pytest.mark.usefixtures("lora_forks")
@pytest.mark.parametrize(
    ("name", "kind"),
    [(FORKS[0], "ignores it"), (FORKS[1], "another alpha"), (FORKS[2], "not a number")]
    + [(name, "stale") for name in FORKS],
)
def test_engine_that_serves_another_adapter_ends_the_run(kind, name, run_main, monkeypatch):
    """At the start; one that keeps an old adapter at its second step, where steps take turns."""
    make_stub, factor = loops.make_stub, FACTORS[kind]

    def spoil(given):
        weights = [(n, w * factor if "lora_B" in n else w) for n, w in given["weights"]]
        given["weights"] = [] if kind == "stale" and given["version"] > 0 else weights

    def make(module):
        stub = make_stub(module)
        hooks.before(stub, "sync_weights", spoil)
        return stub

    monkeypatch.setattr(loops, "make_stub", make)
    options = {"async_mode": False} if "sync" not in name else {}
    run = run_main(name, lora_rank=4, learning_rate=1e-2, **options)
    assert ("an adapter are NaN" if kind == "not a number" else LOST) in str(run.error)
    assert run.run_dir.exists() == (kind == "stale")  # else before anything is written
    assert kind != "stale" or len(run.metrics) == 1


def test_engine_loads_the_checkpoint_by_our_config(saved_model, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    for gpus in ((), (0,)):
        _, options = script.vllm_settings(gpus, "folder", 77, args_for(saved_model))
        assert options["model"] == str(saved_model) and options["hf_config_path"] == "."
        assert options["max_loras"] == 2 and options["enable_lora"]
        assert not {"load_format", "weight_transfer_config"} & options.keys()
    # What vLLM can be prepared for
    for rank, most in ((1, 8), (8, 8), (9, 16), (100, 128), (512, 512)):
        _, options = script.vllm_settings((), "", 77, args_for(saved_model, lora_rank=rank))
        assert options["max_lora_rank"] == most


# ----------------------------------------------------------------------------------- a real engine


@pytest.fixture(scope="module")
def system(tmp_path_factory):
    """A policy with an adapter and an engine; its config says that the head is tied, wrongly."""
    folder = tmp_path_factory.mktemp("base")
    rollouts.tiny_language_model(**SIZES).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    before = {path: path.read_bytes() for path in folder.rglob("*.*")}
    args = args_for(folder, dtype="float32")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("process_groups", "folders"):
            patch.setattr(script, name, [])
        model = load(folder, args)
        vllm = script.VLLM((0, 1, ()), model.config, MAX_LENGTH, args)
        yield SimpleNamespace(model=model, args=args, vllm=vllm)
        script.end_children()
    assert {path: path.read_bytes() for path in folder.rglob("*.*")} == before


def sync(system, version):
    system.vllm.sync_weights(script.gather_weights(system.model, system.args), version)


def is_close(system):
    return differences(system).max() < 1e-5


@pytest.mark.slow
def test_sampler_has_the_adapter_of_each_version_and_the_guard_knows_others(system, monkeypatch):
    folder = Path(system.vllm.folder)
    for version in range(5):
        if version > 0:
            make_noise(system.model, version)
            assert differences(system).mean() > 0.1  # those of the version before
        sync(system, version)
        assert is_close(system)
        (adapter,) = folder.glob("version_*")  # of the others nobody asks
        assert adapter.name == f"version_{version}"
        sync(system, version)  # as the asynchronous scripts do with version 0
        assert is_close(system)
    config = json.loads((folder / "config.json").read_text())
    assert config["tie_word_embeddings"] is False

    policy = script.PolicyModel(system.model, system.args)
    check = [system.vllm, policy, system.model, PROMPTS[1], system.args]
    script.check_adapter(*check)
    # Training begins with the model that was loaded
    assert all((p == 0).all() for n, p in adapter_of(system.model).items() if "lora_B" in n)
    # vLLM knows two versions, so that it reads that of the next check anew
    for version in (0, 1):
        make_noise(system.model, 9 + version)
        sync(system, version)
        assert is_close(system)
    monkeypatch.setattr(system.vllm, "args", replace(system.args, lora_alpha=10))
    with pytest.raises(RuntimeError, match=LOST):
        script.check_adapter(*check)
