"""What the scripts refuse by themselves, because it would show late or not at all.

All else is left to the libraries, or to scripts/preflight.py, which test_preflight.py is about.
test_loop.py has what is only seen while a run trains.
"""

import json
import shutil
from types import SimpleNamespace

import pytest
from helpers import preference_pairs
from helpers.files import write_rows
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

import ppo_vllm_async as script
from ppo_vllm_async import Args

ROW = {
    "prompt": "53812=",
    "data_source": "debug/sorting",
    "reward_model": {"style": "rule", "ground_truth": "12358"},
}

# --------------------------------------------------------------------------------------- arguments


def test_mini_batches_that_do_not_divide_a_step_are_refused():
    with pytest.raises(ValueError, match=r"\(256\).*local_mini_batch_size \(48\)"):
        script.fill_in(Args(local_mini_batch_size=48), world_size=2)


CORES = [(2, 1, 2, 2), (64, 1, 8, 8), (64, 16, 4, 8), (4, 8, 1, 4)]


def test_engines_have_cores_and_memory(monkeypatch):
    for cores, ranks, workers, of_first in CORES:
        monkeypatch.setattr("os.sched_getaffinity", lambda _, it=cores: set(range(it)))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        # The one engine with GPUs of its own belongs to the first rank, which calls all rewards
        for gpus, expected in (((), (workers, 0.3)), ((ranks,), (of_first, 0.9))):
            for given in ({}, {"reward_workers": 3, "vllm_gpu_memory_utilization": 0.5}):
                args = script.fill_in(Args(vllm_gpus=gpus, **given), world_size=ranks)
                found = (args.reward_workers, args.vllm_gpu_memory_utilization)
                assert found == (tuple(given.values()) or expected)
                assert args.mini_batch_size == ranks * args.local_mini_batch_size


def test_groups_of_one_are_refused_before_the_run_begins(run_main, tmp_path):
    changes = {"number_samples_per_prompt": 1, "local_rollout_batch_size": 16}
    with pytest.raises(ValueError, match="--number_samples_per_prompt"):
        run_main("grpo_vllm_async.py", **changes, output_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_launch_that_would_divide_gradients_is_refused(tmp_path, monkeypatch):
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
    """Return the stop tokens of a model with these end tokens and a vocabulary of 20."""
    text_config = SimpleNamespace(vocab_size=20)
    model = SimpleNamespace(
        generation_config=SimpleNamespace(eos_token_id=eos),
        config=SimpleNamespace(get_text_config=lambda: text_config),
    )
    return script.find_stop_tokens(Args(**changes), tokenizer, model)


def test_stop_tokens_are_the_models_the_tokenizers_and_the_users_or_are_refused(tokenizer):
    """The generation config of a tuned base model may not name the token that ends its turns."""
    nine = tokenizer.convert_tokens_to_ids("9")
    assert tokenizer.eos_token_id == 1
    assert stop_tokens(tokenizer, eos=[3, 1]) == (1, 3)
    assert stop_tokens(tokenizer, eos=3, stop_token="9", stop_token_id=19) == (1, 3, nine, 19)
    assert stop_tokens(tokenizer, eos=None) == (1,)
    assert stop_tokens(tokenizer, eos=None, stop_token="eos") == (1,)
    without = SimpleNamespace(eos_token=None, eos_token_id=None, get_vocab=lambda: {"a": 0})
    for one, eos, changes, message in (  # no response can end with these
        (tokenizer, 1, {"stop_token_id": 20}, "--stop_token_id"),
        (tokenizer, 20, {}, "model"),
        (without, None, {}, "--stop_token"),
    ):
        with pytest.raises(ValueError, match=message):
            stop_tokens(one, eos, **changes)


# -------------------------------------------------------------------------------------------- rows


HH = {"style": "model", "ground_truth": "the chosen answer"}
TWELVE = {"data_source": "gsm8k", "reward_model": {"ground_truth": "twelve"}}
SOURCES = ["debug/sorting", "gsm8k", "--reward_fn"]
# A row, or a line that is none; fragments of the message
BAD_ROWS = [
    (ROW | {"reward_model": None}, ["ground_truth"]),
    (ROW | {"reward_model": HH}, ["ground_truth"]),  # one for a reward model
    ({"question": "53812="}, ["no `messages` and no `prompt` among its columns: question"]),
    (ROW | {"prompt": 5}, ["'int' object"]),
    (ROW | {"data_source": None}, ["None", *SOURCES]),
    (ROW | {"data_source": "mine"}, ["'mine'", *SOURCES]),
    (ROW | TWELVE, ["twelve"]),
    ("", []),
    ("{'prompt': 5}", []),
    ("5", []),
]


def test_row_that_cannot_be_rewarded_is_found_before_the_run(tokenizer, tmp_path):
    for row, fragments in BAD_ROWS:
        path = write_rows(tmp_path / "data.jsonl", [ROW])
        line = row if isinstance(row, str) else json.dumps(row)
        path.write_text(path.read_text() + f"{line}\n" * 2)
        with pytest.raises(ValueError, match=r"/data\.jsonl, row 1: ") as refused:
            script.load_prompts(str(path), None, "train", tokenizer, Args(), False)
        assert [part for part in fragments if part not in str(refused.value)] == []


def test_prompts_that_are_all_too_long_or_empty_are_refused(tokenizer, tmp_path):
    for prompt, longest in (("53812=", 5), ("", 256)):
        path = write_rows(tmp_path / "data.jsonl", [ROW | {"prompt": prompt}])
        args = Args(max_prompt_token_length=longest)
        with pytest.raises(ValueError, match=r"data\.jsonl: 0 prompts; .*--max_prompt_token"):
            script.load_prompts(str(path), None, "train", tokenizer, args, False)


# ----------------------------------------------------------------------------------- run and models


def test_model_that_lacks_a_tensor_is_refused(assets, tmp_path):
    """transformers would only warn and make it random. A value model may lack its head."""
    folder = shutil.copytree(assets / "model", tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    gone = "model.layers.0.self_attn.q_proj.weight"
    del tensors[gone]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"lacks {gone}"):
        script.load_model(script.AutoModelForCausalLM, str(folder), Args(), trained=False)
    with pytest.raises(ValueError, match=gone):
        script.load_classifier(None, script.ValueModel, str(folder), Args(), trained=True)
