"""What the scripts refuse by themselves: mistakes that nobody would see in the results, or late.

All else is left to the libraries, or to scripts/preflight.py, which test_preflight.py is about.
test_loop.py has what is only seen while a run trains.
"""

import contextlib
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import train_reward_model
from accelerate import Accelerator
from accelerate.utils import DistributedType
from helpers import preference_pairs
from helpers.files import write_rows
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

import grpo_vllm_async
import ppo_vllm_async as script
from ppo_vllm_async import Args

ROW = {
    "prompt": "53812=",
    "data_source": "debug/sorting",
    "reward_model": {"style": "rule", "ground_truth": "12358"},
}

# --------------------------------------------------------------------------------------- arguments

# name: (arguments, fragments of the message)
MISTAKES = {
    "a rest of responses": ({"local_mini_batch_size": 48}, ["(256)", "local_mini_batch_size (48)"]),
    "no reward": (
        {"apply_verifiable_reward": False},
        ["--apply_verifiable_reward", "--add_r1_style_format_reward", "--reward_model_path"],
    ),
    "a reward model of weight 0": (
        {"apply_verifiable_reward": False, "reward_model_path": "m", "reward_model_multiplier": 0},
        ["--reward_model_multiplier is above 0"],
    ),
    # On a node with two learners
    "a learner's GPU": ({"vllm_gpus": (1, 2)}, ["--vllm_gpus (1, 2)", "not the first 2"]),
    "half an engine": (
        {"vllm_gpus": (2, 3, 4), "vllm_tensor_parallel_size": 2},
        ["--vllm_gpus (2, 3, 4)", "--vllm_tensor_parallel_size (2)"],
    ),
    "one twice": ({"vllm_gpus": (2, 2)}, ["--vllm_gpus (2, 2)", "each named once"]),
    "the last, counted from behind": ({"vllm_gpus": (-1,)}, ["must be GPUs without a learner"]),
    "an engine without a learner": ({"vllm_gpus": (2, 3, 4)}, ["no more engines than learners"]),
    "to go on from nowhere": ({"resume_from_checkpoint": "auto"}, ["auto needs a --run_name"]),
    "several shared ones": ({"vllm_tensor_parallel_size": 2}, ["--vllm_tensor_parallel_size (2)"]),
}


def test_default_model_that_is_missing_says_how_it_is_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"--model_name_or_path: bash scripts/setup\.sh makes"):
        script.fill_in(Args(), world_size=1)


def test_arguments_that_do_not_fit_together_are_refused(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    for name, (changes, fragments) in MISTAKES.items():
        with pytest.raises(ValueError) as refused:
            script.fill_in(Args(**changes), world_size=2)
        assert [part for part in fragments if part not in str(refused.value)] == [], name


ARGUMENTS_THAT_FIT = [
    {},
    {"vllm_gpus": (2, 5)},
    {"vllm_gpus": (2, 5, 3, 4), "vllm_tensor_parallel_size": 2},
    {"local_mini_batch_size": 32, "per_device_train_batch_size": 24},
    {"apply_verifiable_reward": False, "add_r1_style_format_reward": True},
    {"apply_verifiable_reward": False, "reward_model_path": "m"},
]


def test_arguments_that_fit_are_not(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    for changes in ARGUMENTS_THAT_FIT:
        filled_in = script.fill_in(Args(**changes), world_size=2)
        assert {name: getattr(filled_in, name) for name in changes} == changes


@pytest.mark.parametrize(
    ("cores", "ranks", "workers", "of_first"),
    [(2, 1, 2, 2), (64, 1, 8, 8), (64, 16, 4, 8), (4, 8, 1, 4)],
)
def test_engines_have_cores_and_memory(cores, ranks, workers, of_first, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    # With GPUs of its own the one engine is the first rank's, which asks for all rewards
    for gpus, expected in (((), (workers, 0.3)), ((ranks,), (of_first, 0.9))):
        for given in ({}, {"reward_workers": 3, "vllm_gpu_memory_utilization": 0.5}):
            args = script.fill_in(Args(vllm_gpus=gpus, **given), world_size=ranks)
            found = (args.reward_workers, args.vllm_gpu_memory_utilization)
            assert found == (tuple(given.values()) or expected)
            assert args.mini_batch_size == ranks * args.local_mini_batch_size


# What only the main() of a script refuses. Six updates in three steps
ONLY_WARM_UP = r"--warm_up_steps.*--total_episodes"
ONE_SAMPLE = {"number_samples_per_prompt": 1, "local_rollout_batch_size": 16}


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("ppo_vllm_async.py", {"value_warmup_steps": 3}, r"--value_warmup_steps"),
        ("ppo_vllm_async.py", {"value_warmup_steps": 2, "warm_up_steps": 2}, ONLY_WARM_UP),
        ("ppo_sync.py", {"value_warmup_steps": 2, "warm_up_steps": 2}, ONLY_WARM_UP),
        ("grpo_vllm_async.py", {"warm_up_steps": 6}, ONLY_WARM_UP),
        ("grpo_vllm_async.py", ONE_SAMPLE, "--number_samples_per_prompt"),
    ],
    ids=str,
)
def test_run_that_would_be_for_nothing_is_refused_before_it_begins(
    name, changes, message, run_main, tmp_path
):
    with pytest.raises(ValueError, match=message):
        run_main(name, **changes, output_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_flag_that_would_do_nothing_is_refused(tmp_path):
    args = grpo_vllm_async.Args(min_response_length=4, output_dir=str(tmp_path))
    with pytest.raises(ValueError, match="--min_response_length needs --non_stop"):
        grpo_vllm_async.main(args)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("module", [script, train_reward_model])
def test_home_is_expanded_in_every_text(module, monkeypatch):
    """No shell does it in quotes; the run was written to a folder named ~."""
    monkeypatch.setenv("HOME", "/home/me")
    args = module.Args(output_dir="~/runs", dataset="~/a.jsonl", chat_template="~")
    assert (args.output_dir, args.dataset) == ("/home/me/runs", "/home/me/a.jsonl")
    assert args.chat_template == "/home/me"
    assert replace(args, eval_dataset="~/b").eval_dataset == "/home/me/b"
    assert args.model_name_or_path == "debug_assets/model" and args.eval_dataset is None


def test_checkpoint_is_found_from_inside_its_folder(tmp_path, monkeypatch):
    step = tmp_path / "output" / "mine" / "checkpoints" / "step_5"
    step.mkdir(parents=True)
    other = step.with_name("step_9")
    other.mkdir()
    places = [(step.parent, "step_5"), (step, "."), (other, "../step_5"), (tmp_path, f"{step}/")]
    for folder, path in places:
        monkeypatch.chdir(folder)
        args = Args(run_name="another", resume_from_checkpoint=path)
        for module in (script, train_reward_model):
            assert module.find_run(args) == (step.parents[1], step)


def test_deepspeed_is_refused(run_main, tmp_path, monkeypatch):
    monkeypatch.setattr(Accelerator, "distributed_type", DistributedType.DEEPSPEED)
    with pytest.raises(ValueError, match="scripts/accelerate"):
        run_main("ppo_sync.py", output_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_accelerate_that_would_divide_gradients_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "2")
    options = {"output_dir": tmp_path, "dataset": "not_read.jsonl"}
    with pytest.raises(ValueError, match=r"accelerate.*must be 1|accelerate's gradient accum"):
        preference_pairs.train(preference_pairs.tiny_args(**options))
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------- tokens, tokenizers


@pytest.fixture(scope="module")
def tokenizer(assets):
    return AutoTokenizer.from_pretrained(assets / "model")


def stop_tokens(tokenizer, eos=None, **changes):
    """Those of a model with these end tokens, and a vocabulary of 20."""
    text_config = SimpleNamespace(vocab_size=20)
    model = SimpleNamespace(
        generation_config=SimpleNamespace(eos_token_id=eos),
        config=SimpleNamespace(get_text_config=lambda: text_config),
    )
    return script.find_stop_tokens(Args(**changes), tokenizer, model)


def test_stop_tokens_that_no_response_can_end_with_are_refused(tokenizer):
    """Of a tokenizer that has none, too: the model's own would end, and the flag say nothing."""
    without = SimpleNamespace(eos_token=None, eos_token_id=None, get_vocab=lambda: {"a": 0})
    for one, eos, changes, message in (
        (tokenizer, 1, {"stop_token": "<end>"}, "--stop_token <end>"),
        (tokenizer, 1, {"stop_token_id": 20}, "--stop_token_id"),
        (tokenizer, 20, {}, "model"),
        (without, 1, {"stop_token": "eos"}, "--stop_token eos"),
        (without, None, {}, "--stop_token"),
    ):
        with pytest.raises(ValueError, match=message):
            stop_tokens(one, eos, **changes)


def test_stop_tokens_are_the_models_the_tokenizers_and_the_users(tokenizer):
    """A tuned base model's generation config may name another token than its turns end with."""
    nine, eos = tokenizer.convert_tokens_to_ids("9"), tokenizer.eos_token_id
    assert eos == 1
    assert stop_tokens(tokenizer, eos=[3, 1]) == (1, 3)
    assert stop_tokens(tokenizer, eos=3, stop_token="9", stop_token_id=19) == (1, 3, nine, 19)
    assert stop_tokens(tokenizer, eos=None) == (1,)
    assert stop_tokens(tokenizer, eos=None, stop_token="eos") == (1,)


# -------------------------------------------------------------------------------------------- rows


def load(folder, rows, tokenizer, **changes):
    path = write_rows(folder / "data.jsonl", rows)
    return script.load_prompts(str(path), None, "train", tokenizer, Args(**changes), False)


HH = {"style": "model", "ground_truth": "the chosen answer"}
TWELVE = {"data_source": "gsm8k", "reward_model": {"ground_truth": "twelve"}}
SOURCES = ["'mine'", "debug/sorting", "gsm8k", "--reward_fn"]
TRUTH = {"reward_model": {"ground_truth": "12345"}}
ANSWER = {"role": "assistant", "content": "12345"}
# name: (a row, fragments of the message)
BAD_ROWS = {
    "no ground truth": (ROW | {"reward_model": None}, ["ground_truth"]),
    "one for a reward model": (ROW | {"reward_model": HH}, ["ground_truth"]),
    "no prompt": ({"data_source": "debug/sorting"} | TRUTH, ["no prompt"]),
    "no messages": (ROW | {"prompt": []}, ["no prompt"]),
    "an answer alone": (ROW | {"prompt": [ANSWER]}, ["no prompt"]),
    "a number": (ROW | {"prompt": 5}, ["'int' object"]),
    "no source": (ROW | {"data_source": None}, ["None", *SOURCES[1:]]),
    "unknown source": (ROW | {"data_source": "mine"}, SOURCES),
    "no number": (ROW | TWELVE, ["twelve"]),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_row_that_cannot_be_rewarded_is_found_before_the_run(name, tokenizer, tmp_path):
    row, fragments = BAD_ROWS[name]
    with pytest.raises(ValueError, match=r"/data\.jsonl, row 1: ") as refused:
        load(tmp_path, [ROW, row, row], tokenizer)
    assert [part for part in fragments if part not in str(refused.value)] == []


def test_line_that_is_no_row_is_named(tokenizer, tmp_path):
    for line in ("", "{'prompt': 5}", "5"):
        path = write_rows(tmp_path / "data.jsonl", [ROW])
        path.write_text(path.read_text() + f"{line}\n")
        with pytest.raises(ValueError, match=r"/data\.jsonl, row 1: "):
            script.load_prompts(str(path), None, "train", tokenizer, Args(), False)


def test_prompts_that_are_all_too_long_or_empty_are_refused(tokenizer, tmp_path):
    for prompt, longest in (("53812=", 5), ("", 256)):
        with pytest.raises(ValueError, match=r"data\.jsonl: .*--max_prompt_token_length.*tokeniz"):
            load(tmp_path, [ROW | {"prompt": prompt}], tokenizer, max_prompt_token_length=longest)


# ----------------------------------------------------------------------------------- run and models


def test_folder_of_another_run_is_refused_and_one_without_checkpoints_is_not_resumed(tmp_path):
    args = Args(output_dir=str(tmp_path), run_name="mine")
    assert script.find_run(args) == (tmp_path / "mine", None)
    (tmp_path / "mine" / "checkpoints" / "unfinished").mkdir(parents=True)
    (tmp_path / "mine" / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match=r"another run.*--run_name"):
        script.find_run(args)
    with pytest.raises(ValueError, match=r"no checkpoint.*--run_name"):
        script.find_run(replace(args, resume_from_checkpoint="latest"))


def test_model_that_lacks_a_tensor_is_refused(assets, tmp_path):
    """transformers would make it random, and only warn. A value model may lack its head alone."""
    folder = shutil.copytree(assets / "model", tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    gone = "model.layers.0.self_attn.q_proj.weight"
    del tensors[gone]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for trained in (True, False):
        with pytest.raises(ValueError, match=f"lacks {gone}"):
            script.load_model(script.AutoModelForCausalLM, str(folder), Args(), trained=trained)
    with pytest.raises(ValueError, match=gone):
        script.load_classifier(None, str(folder), Args(), trained=True)


@pytest.mark.parametrize("persistent", [True, False])
def test_model_with_buffers_that_vllm_would_not_get_is_refused(persistent, assets, monkeypatch):
    """As Gemma 4's layer_scalar. Rotary embeddings have others, which are computed."""
    load = script.AutoModelForCausalLM.from_pretrained

    def load_with_buffer(*args, **options):
        model, report = load(*args, **options)
        model.model.register_buffer("layer_scalar", torch.ones(1), persistent=persistent)
        return model, report

    monkeypatch.setattr(script.AutoModelForCausalLM, "from_pretrained", load_with_buffer)
    path, refused = str(assets / "model"), pytest.raises(ValueError, match=r"model\.layer_scalar")
    with refused if persistent else contextlib.nullcontext():
        script.load_model(script.AutoModelForCausalLM, path, Args(), trained=True)
