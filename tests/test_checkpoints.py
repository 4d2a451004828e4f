"""What is read from a model's folder, and what is written to one."""

import json
import shutil

import pytest
import torch
from helpers.processes import answers_of_vllm
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
from transformers import (
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
)

import ppo_sync

# ------------------------------------------------------------------------------------ value models


def load_value_model(path, **changes):
    args = tiny_args(model_name_or_path=str(path), **changes)
    return ppo_sync.load_value_model(args).model


def test_new_value_head_is_zeros(saved_policy):
    # Random values would be noise in the first advantages: with zeros they are rewards to come
    head = load_value_model(saved_policy).score.weight
    assert head.shape == (1, 512) and head.requires_grad
    assert (head == 0).all()


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
        torch.nn.init.ones_(value_model.model.score.weight)  # zeros would hide a dropout
        assert policy.model.training and value_model.model.training
        logprobs = [policy(inputs, mask.shape[1])[0] for _ in range(2)]
        values = [value_model(inputs, mask.shape[1]) for _ in range(2)]
        assert torch.equal(*logprobs) and torch.equal(*values), name
        live = ppo_sync.PolicyModel(model.train(), 1.0)
        noisy = [live(inputs, mask.shape[1])[0] for _ in range(2)]
        assert not torch.equal(*noisy), f"{name} has no dropout to be turned off"


FIVE = 11  # a digit's id


@pytest.fixture
def save(accelerator, assets, tmp_path):
    """save(changes of the generation config) -> folder of the saved model, that of the original.

    The stop tokens of the run are the model's own and a digit. With None there is no such config.
    """

    def save(changes):
        shutil.copytree(assets / "model", tmp_path / "model")
        path = tmp_path / "model" / "generation_config.json"
        if changes is None:
            path.unlink()
        else:
            path.write_text(json.dumps(json.loads(path.read_text()) | changes))
        args = tiny_args(model_name_or_path=str(tmp_path / "model"), stop_token_ids=(STOP, FIVE))
        tokenizer = AutoTokenizer.from_pretrained(assets / "model")
        ppo_sync.save_model(accelerator, load_policy(args), tokenizer, tmp_path / "saved", args)
        return tmp_path / "saved", tmp_path / "model"

    return save


def generation_config_of(folder):
    config = json.loads((folder / "generation_config.json").read_text())
    return {name: value for name, value in config.items() if name != "transformers_version"}


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.6, "top_p": 0.9, "top_k": 20},
        {"do_sample": False, "temperature": 0.6},
        {"do_sample": True, "repetition_penalty": 1.1, "eos_token_id": [1, 2]},
        {"max_new_tokens": 5, "a_field_of_the_users": "kept"},
    ],
)
def test_end_tokens_alone_change_in_a_generation_config(sampling, save):
    # transformers loads some of these with a warning, and refuses to save them
    saved, original = save(sampling)
    end_tokens = {"eos_token_id": [STOP, FIVE]}
    assert generation_config_of(saved) == generation_config_of(original) | end_tokens
    GenerationConfig.from_pretrained(saved)


def test_model_without_a_generation_config_is_saved_with_its_end_tokens(save):
    saved, _ = save(None)
    assert generation_config_of(saved)["eos_token_id"] == [STOP, FIVE]


@pytest.mark.slow
def test_vllm_stops_a_saved_model_where_the_run_did(save, tmp_path):
    saved, _ = save({"temperature": 0.7, "top_p": 0.8, "top_k": 20})
    prompts = [f"<|user|>{digits}=<|assistant|>" for digits in ("4915", "9301")]
    responses, _, _ = answers_of_vllm(saved, prompts, tmp_path)
    # Without the digit among the end tokens the first answer went on to the 9
    assert [response[-1] for response in responses] == [FIVE, STOP]
    assert not {FIVE, STOP} & {token for response in responses for token in response[:-1]}


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
