"""What is read from a model's folder, and what is written to one."""

import json
import math
import shutil

import pytest
import torch
from helpers.rollouts import (
    PAD,
    STOP,
    VOCAB,
    load_policy,
    make_rollout,
    tiny_args,
    tiny_policy,
    tiny_value_model,
)
from transformers import AutoConfig, AutoTokenizer, GPT2Config, GPT2LMHeadModel

import ppo_sync

# ------------------------------------------------------------------------------------ value models


def load_value_model(path, **changes):
    args = tiny_args(model_name_or_path=str(path), **changes)
    return ppo_sync.load_value_model(args).model


def test_new_value_head_starts_small(saved_policy):
    heads = [load_value_model(saved_policy, seed=seed).score.weight.flatten() for seed in range(8)]
    std = 1 / math.sqrt(512 + 1)
    assert torch.cat(heads).std().item() == pytest.approx(std, rel=0.06)
    assert abs(torch.cat(heads).mean().item()) < std / 10
    assert not torch.equal(heads[0], heads[1])
    assert torch.equal(heads[0], load_value_model(saved_policy, seed=0).score.weight.flatten())


def test_value_model_starts_from_the_policys_backbone(saved_policy):
    value_model, policy = (
        load_value_model(saved_policy),
        tiny_policy(hidden_size=512, num_hidden_layers=1),
    )
    theirs = policy.model.model.state_dict()
    assert all(
        torch.equal(value, theirs[name]) for name, value in value_model.model.state_dict().items()
    )


def test_value_head_of_a_checkpoint_is_kept(saved_policy, tmp_path):
    trained = tiny_value_model(seed=7, hidden_size=64).model
    trained.save_pretrained(tmp_path / "value")
    loaded = load_value_model(saved_policy, value_model_path=str(tmp_path / "value"))
    assert torch.equal(loaded.score.weight, trained.score.weight)
    assert loaded.score.weight.shape == (1, 64)
    assert torch.equal(
        loaded.model.layers[0].mlp.up_proj.weight, trained.model.layers[0].mlp.up_proj.weight
    )


# ---------------------------------------------------------------------------------------- policies


def test_dropout_of_the_checkpoint_is_off(assets, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(assets / "model")
    qwen = tiny_policy(attention_dropout=0.3).model
    sizes = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 64}
    gpt2 = GPT2LMHeadModel(
        GPT2Config(**sizes, eos_token_id=STOP, bos_token_id=None, pad_token_id=PAD)
    )
    for name, model in (("qwen", qwen), ("gpt2", gpt2)):
        path = tmp_path / name
        model.save_pretrained(path)
        tokenizer.save_pretrained(path)
        args = tiny_args(model_name_or_path=str(path), value_model_path=str(path))
        batch = make_rollout()
        inputs, mask = ppo_sync.collate(batch.prompt_ids, batch.responses, PAD, "cpu")
        policy = load_policy(args)
        value_model = ppo_sync.load_value_model(args)
        assert policy.model.training and value_model.model.training
        logprobs = [policy(inputs, mask.shape[1])[0] for _ in range(2)]
        values = [value_model(inputs, mask.shape[1]) for _ in range(2)]
        assert torch.equal(*logprobs) and torch.equal(*values), name
        live = ppo_sync.PolicyModel(model.train(), 1.0)
        noisy = [live(inputs, mask.shape[1])[0] for _ in range(2)]
        assert not torch.equal(*noisy), f"{name} has no dropout to be turned off"


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0.6, "top_p": 0.9}, {"do_sample": False, "temperature": 0.6}]
)
def test_model_with_sampling_parameters_is_saved(accelerator, sampling, assets, tmp_path):
    # transformers loads such a generation config with a warning, and refuses to save it.
    shutil.copytree(assets / "model", tmp_path / "model")
    path = tmp_path / "model" / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | sampling))
    args = tiny_args(model_name_or_path=str(tmp_path / "model"))
    policy = load_policy(args)
    tokenizer = AutoTokenizer.from_pretrained(assets / "model")
    ppo_sync.save_model(accelerator, policy, tokenizer, tmp_path / "saved")
    assert (
        json.loads((tmp_path / "saved" / "generation_config.json").read_text())["temperature"]
        == 0.6
    )


def test_stop_tokens_are_those_of_the_generation_config_and_the_users(assets):
    model = str(assets / "model")
    ids = {}
    for name, changes in (
        ("own", {}),
        ("more", {"stop_token": "0", "stop_token_id": 3}),
        ("eos", {"stop_token": "eos"}),
    ):
        args = ppo_sync.Args(model_name_or_path=model, **changes)
        tokenizer, _ = ppo_sync.load_tokenizers(args)
        config = AutoConfig.from_pretrained(model)
        ids[name] = ppo_sync.find_stop_tokens(args, tokenizer, config)
    zero = tokenizer.convert_tokens_to_ids("0")
    assert ids == {"own": (1,), "more": tuple(sorted((1, 3, zero))), "eos": (1,)}
