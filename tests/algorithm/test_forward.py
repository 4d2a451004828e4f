"""What models say of padded batches; micro-batches, and the step that follows on a gradient."""

import itertools
import math
import random

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from helpers import GRPO, SCRIPTS, rollouts
from helpers.loops import EPISODES
from helpers.rollouts import (
    VOCAB,
    gradients,
    load_policy,
    make_rollout,
    one_of_ranks,
    tiny_args,
    tiny_policy,
)
from safetensors.torch import load_file
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
)

import ppo_vllm_async as script


def load_classifier(path, trained=True, **changes):
    args = tiny_args(**changes)
    model_class = script.ValueModel if trained else script.RewardModel
    return script.load_classifier(Accelerator(cpu=True), model_class, str(path), args, trained)


def outputs_of(model):
    """The log-probabilities or values of a batch."""
    batch = make_rollout()
    outputs = model(batch.input_ids, batch.mask)
    return outputs[0] if isinstance(outputs, tuple) else outputs


# ------------------------------------------------------------------------------------ model folders


def test_dropout_of_the_checkpoint_is_off_and_gradient_checkpointing_on(tmp_path):
    sizes = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 64}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=rollouts.STOP))
    model.save_pretrained(tmp_path)
    value_model = load_classifier(tmp_path)
    torch.nn.init.ones_(value_model.model.score.weight)  # zeros would hide a dropout
    live = script.PolicyModel(model.train(), tiny_args())
    for trained in (load_policy(tmp_path), value_model, live):
        assert trained.model.training  # gradient checkpointing would do nothing otherwise
        assert trained.model.is_gradient_checkpointing == (trained is not live)
        assert torch.equal(outputs_of(trained), outputs_of(trained)) == (trained is not live)
    assert not load_policy(tmp_path, gradient_checkpointing=False).model.is_gradient_checkpointing
    assert not load_policy(tmp_path, trained=False).model.is_gradient_checkpointing


def test_text_model_of_one_that_sees_is_loaded_without_dropout_and_by_its_name(tmp_path):
    """vLLM would take a config without architectures for another kind of model."""
    linear = {f"linear_num_{name}_heads": 2 for name in ("key", "value")}
    linear |= {f"linear_{name}_head_dim": 8 for name in ("key", "value")}
    text = {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": VOCAB}
    text |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
    text |= {"attention_dropout": 0.1, "layer_types": ["linear_attention", "full_attention"]}
    eyes = {"hidden_size": 16, "intermediate_size": 16, "out_hidden_size": 32, "num_heads": 2}
    config = Qwen3_5Config(text_config=text | linear, vision_config=eyes | {"depth": 1})
    Qwen3_5ForConditionalGeneration(config).save_pretrained(tmp_path)
    policy = load_policy(tmp_path)
    assert policy.model.config.architectures == ["Qwen3_5ForCausalLM"]
    assert policy.model.config.get_text_config().attention_dropout == 0.0
    assert torch.equal(outputs_of(policy), outputs_of(policy))


def test_new_value_head_is_zeros_and_that_of_a_checkpoint_is_kept(saved_policy, tmp_path):
    """Random values would be noise in the first advantages."""
    value_model = load_classifier(saved_policy)
    assert (outputs_of(value_model) == 0).all()
    assert value_model.model.score.weight.requires_grad
    backbone = value_model.model.model.state_dict()
    for name, weight in load_policy(saved_policy).model.model.state_dict().items():
        assert torch.equal(backbone[name], weight)

    rollouts.tiny_classifier(seed=7).save_pretrained(tmp_path / "value")
    loaded = load_classifier(tmp_path / "value")
    assert torch.equal(outputs_of(loaded), outputs_of(rollouts.tiny_value_model(seed=7)))
    with pytest.raises(ValueError, match=r"lacks score\.weight"):  # of a reward model
        load_classifier(saved_policy, trained=False)
    with pytest.raises(ValueError, match=r"lacks lm_head\.weight"):  # its answers would be noise
        load_policy(tmp_path / "value")


@pytest.mark.parametrize("config_says", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_tied_head_is_saved_once_and_an_untied_one_beside_it(
    tied, config_says, assets, accelerator, tmp_path
):
    """A checkpoint may have a head, and a config that says otherwise: vLLM starts from that."""
    model = rollouts.tiny_language_model(tie_word_embeddings=tied)
    model.config.tie_word_embeddings = config_says or tied
    model.save_pretrained(tmp_path / "model")
    policy = load_policy(tmp_path / "model")
    head, embedding = policy.model.lm_head.weight, policy.model.model.embed_tokens.weight
    assert (head is embedding) == policy.model.config.tie_word_embeddings == tied
    # vLLM on a CPU has a copy of a tied one
    assert "lm_head.weight" in dict(script.gather_weights(policy.model, policy.args))
    head.data += 1
    tokenizer = AutoTokenizer.from_pretrained(assets / "model")
    script.save_model(accelerator, policy.model, tokenizer, tmp_path / "saved", policy.args)
    assert ("lm_head.weight" in load_file(tmp_path / "saved/model.safetensors")) != tied
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert torch.equal(loaded.lm_head.weight, head)
    assert torch.equal(loaded.model.embed_tokens.weight, embedding)


def test_bfloat16_is_for_weights_and_not_for_the_softmax_or_a_score(saved_policy, tmp_path):
    """In bfloat16 many log-probabilities, and many scores, would be equal."""
    rollouts.tiny_classifier(seed=7).save_pretrained(tmp_path / "value")
    for load, folder in ((load_policy, saved_policy), (load_classifier, tmp_path / "value")):
        for is_trained in (True, False):
            exact = outputs_of(load(folder, trained=is_trained))
            model = load(folder, trained=is_trained, dtype="bfloat16")
            outputs = outputs_of(model)
            assert 1e-3 < (outputs - exact).abs().mean() < 0.5
            assert not torch.equal(outputs, outputs.bfloat16().float())
            assert outputs.requires_grad == model.model.training == is_trained
            assert model.model.base_model.embed_tokens.weight.dtype == torch.bfloat16
            if load is load_classifier:
                assert model.model.score.weight.dtype == torch.float32


# ---------------------------------------------------------------------------------- forward passes


class Logits(TorchDispatchMode):
    """Sees each tensor that is made of positions and the vocabulary, in backward passes too."""

    def __init__(self):
        super().__init__()
        self.sizes, self.storages = [], []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for made in result if isinstance(result, tuple) else [result]:
            # What has a side of hidden_size is the head
            if isinstance(made, torch.Tensor) and VOCAB in made.shape and 32 not in made.shape:
                self.sizes.append(made.numel())
                self.storages.append(StorageWeakRef(made.untyped_storage()))
        return result

    def alive(self):
        return sum(not storage.expired() for storage in self.storages)


def test_logits_exist_a_chunk_at_a_time_and_are_gone_after_the_backward_pass(
    monkeypatch, accelerator
):
    """The metrics must not keep them in memory through the next pass."""
    monkeypatch.setitem(script.LOGITS_CHUNK, "cpu", 5 * VOCAB + 1)
    policy, value_model, logits, alive = tiny_policy(), rollouts.tiny_value_model(), Logits(), []
    for model in (policy, value_model):
        model.register_forward_pre_hook(lambda *_: alive.append(logits.alive()))
    args = tiny_args(per_device_train_batch_size=3)
    with logits:
        gradients(accelerator, (policy, value_model), rollouts.in_float32(make_rollout()), args)
    assert max(logits.sizes) == 5 * VOCAB
    assert [*alive, logits.alive()] == [0] * 7


@pytest.mark.parametrize("size", [1, 7, 32])
@torch.no_grad()
def test_equal_responses_have_equal_scores_at_their_last_token(size, accelerator):
    """What else is in their micro-batch moves the last bits, which a group's deviation blows up."""
    model, responses = rollouts.tiny_reward_model(seed=3), rollouts.groups_of_equals()
    # Of arrays of more than 1,000 numbers numpy prints the first and the last three alone
    ids = np.full((2, 1200), 5, np.int32)
    ids[1, 600] = 7
    responses += [rollouts.response_of(responses[0].prompt, row) for row in ids]
    args = tiny_args(per_device_train_batch_size=size)
    score_of = {}
    scores = script.reward_model_scores(accelerator, model, responses, args)
    for response, score in zip(responses, scores, strict=True):
        row = torch.tensor(response.row)[None]
        assert score_of.setdefault(str(row.tolist()), score) == score
        last = model.model.base_model(row).last_hidden_state[0, -1]
        assert score == pytest.approx(model.model.score(last).item(), abs=1e-5)
    assert len(set(score_of.values())) == len(score_of) == 34


# ------------------------------------------------------------------- minibatches and micro-batches


@pytest.mark.parametrize("tokens", [1, 60, 150, 700, 10**6])
@pytest.mark.parametrize("limit", [0, 4])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_micro_batches_are_of_like_length_and_as_large_as_they_may_be(world_size, limit, tokens):
    draw = random.Random(5)
    lengths = [draw.randint(2, 100) for _ in range(64)]
    prompt = script.Prompt("row 0", "", [5], None, None, None)
    responses = [rollouts.response_of(prompt, range(1, length)) for length in lengths]
    batch = script.collate(responses, "cpu")
    rows = draw.sample(range(64), 48)
    args = tiny_args(micro_batch_tokens=tokens, per_device_train_batch_size=limit)
    ranks = [one_of_ranks(number, world_size) for number in range(world_size)]
    shares = [script.split_into_micro_batches(rank, batch, rows, args) for rank in ranks]

    def fits(count, longest):
        return count == 1 or (count * longest <= tokens and count <= (limit or 48))

    passes = []  # each with its rows, one for each rank and then again one for each
    for parts in zip(*shares, strict=True):  # ranks wait for each other in each pass
        passes.append(
            [row for each in zip(*(own for own, _ in parts), strict=True) for row in each]
        )
        for own, part in parts:
            assert torch.equal(part.lengths, batch.lengths[own])
            assert part.mask.shape[1] == max(lengths[row] for row in passes[-1])
            assert fits(len(own), part.mask.shape[1])
    dealt = [row for some in passes for row in some]
    assert dealt == sorted(rows, key=lambda row: (lengths[row], row))
    for some, following in itertools.pairwise(passes):
        longer = some + following[:world_size]
        assert not fits(len(longer) // world_size, lengths[longer[-1]])


# --------------------------------------------------------------------------------------- gradients


def test_gradients_are_clipped_and_stepped_at_the_rate_of_this_update(accelerator, tmp_path):
    model = torch.nn.Linear(2, 1, bias=False)
    script.make_optimizer(model, tiny_args())
    master = model.weight.master
    optimizer = torch.optim.SGD([master], lr=9.0)
    for gradient, clipped in (([3.0, 4.0], [0.3, 0.4]), ([0.03, 0.04], [0.03, 0.04])):
        before = model.weight.detach().clone()
        master.grad = torch.tensor([gradient])
        args = tiny_args(max_grad_norm=0.5)
        norm = script.apply_gradients(accelerator, model, optimizer, 0.1, None, tmp_path, args)
        assert norm.item() == pytest.approx(math.hypot(*gradient))
        change = (before - model.weight)[0].tolist()
        assert change == pytest.approx([0.1 * part for part in clipped], rel=1e-3)
        assert (master.grad == 0).all()  # and not None: the next passes add to it


# ------------------------------------------------------------------------------------------ main()


@pytest.mark.parametrize("tokens", [16_384, 150], ids=["by rows", "by tokens"])
@pytest.mark.parametrize(("name", "beta"), [*((name, 0.3) for name in SCRIPTS), (*GRPO, 0.0)])
def test_ratio_is_exactly_one_until_the_policy_changes(name, beta, tokens, run_main):
    """The passes before the updates have the shapes of those in them, mini-batch by mini-batch.

    Where rows are left out, micro-batches are others and have other padding.
    """

    def score(data_source, response, ground_truth):
        return float(response.startswith(("6", "7")))  # the same for some groups

    options = {"total_episodes": EPISODES, "response_length": 40, "non_stop_penalty": False}
    options["micro_batch_tokens"] = tokens
    run = run_main(name, score, learning_rate=0.0, beta=beta, **options)
    (line,) = run.metrics
    if beta == 0:
        assert 0 < sum(map(len, run.rows)) < EPISODES
        assert line["val/ratio"] == pytest.approx(1) and line["policy/approxkl_avg"] < 1e-12
    else:
        assert line["val/ratio"] == 1 and line["policy/approxkl_avg"] == 0
