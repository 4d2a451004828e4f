"""Test scripts/train_reward_model.py: its gradient, scores and data, and runs in this process."""

import json
import math
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import train_reward_model as rm
from helpers import REPO, hooks, rollouts
from helpers.files import read_json_lines, write_rows
from helpers.preference_pairs import gradient_and_sums, make_pairs, tiny_args
from helpers.preference_pairs import train as train_in_this_process
from helpers.processes import TWO_RANKS, environment, flags_of
from helpers.rollouts import PAD, STOP, tiny_reward_model
from helpers.runs import without_clock
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import ppo_vllm_async as ppo

ASK = {"role": "user", "content": "53="}
OTHER = ASK | {"content": "35="}
GOOD, BAD = ({"role": "assistant", "content": text} for text in ("35", "53"))
DIALOGUE = [ASK, BAD, ASK]
ROW = {"prompt": [ASK], "chosen": "35", "rejected": "53"}
EQUAL = ROW | {"rejected": "35"}


def scores_alone(model, pairs):
    """Return the scores that transformers computes for each row alone, unpadded: (2, pairs)."""
    rows = [pair.chosen_ids for pair in pairs] + [pair.rejected_ids for pair in pairs]
    return torch.stack([model(torch.tensor([ids])).logits[0, 0] for ids in rows]).view(2, -1)


def test_evaluation_metrics_are_those_of_their_definitions():
    chosen, rejected = [3.0, 1.0, 2.0, -999.0], [1.0, 2.0, 2.0, 1.0]
    loss = math.log(1 + math.exp(-2)) + math.log(1 + math.e) + math.log(2) + 1000
    expected = {
        "eval/loss": loss / 4,
        "eval/accuracy": 1 / 4,  # a tie does not count as correct
        "eval/margin": (2 - 1 - 1000) / 4,
        "eval/scores_mean": -987 / 8,
        "eval/scores_std": torch.tensor(chosen + rejected).std().item(),
    }
    metrics = rm.evaluation_metrics(torch.tensor([chosen, rejected]))
    assert metrics == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("size", [3, 8])
def test_gradient_is_that_of_the_mean_over_pairs_for_any_micro_batches(size, accelerator):
    model, pairs = tiny_reward_model(), make_pairs()
    gradient, metrics = gradient_and_sums(accelerator, model, size)
    model.zero_grad()
    good, bad = scores_alone(model.model, pairs)
    loss = (torch.log1p((bad - good).exp()) + 0.1 * (good + bad) ** 2).mean()
    loss.backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert (gradient - expected).norm() < 1e-5 * expected.norm()
    means = [loss, (good > bad).float().mean(), (good - bad).mean(), (good + bad).mean() / 2]
    names = ["loss/preference_avg", "objective/accuracy", "objective/margin", "objective/scores"]
    expected = dict(zip(names, torch.stack(means).tolist(), strict=True))
    assert metrics == pytest.approx(expected, rel=1e-5)


def test_new_head_is_small_and_the_body_the_policys_without_dropout(saved_policy):
    args = tiny_args(model_name_or_path=str(saved_policy))
    model, again = (rm.load_reward_model(args, PAD).model for _ in range(2))
    assert model.score.weight.std().item() == pytest.approx(1 / math.sqrt(512 + 1), rel=0.1)
    assert torch.equal(model.score.weight, again.score.weight)
    policy = AutoModelForCausalLM.from_pretrained(saved_policy)
    for name, weight in policy.model.state_dict().items():
        assert torch.equal(weight, model.model.state_dict()[name])
    assert model.training  # gradient checkpointing would do nothing otherwise
    assert torch.equal(*(scores_alone(model, make_pairs()) for _ in range(2)))


@pytest.fixture(scope="module")
def tokenizer(assets):
    return AutoTokenizer.from_pretrained(assets / "model")


def load_pairs(path, tokenizer, **changes):
    args = rm.Args(stop_token_id=STOP, max_token_length=18, **changes)
    return rm.load_pairs(SimpleNamespace(print=print), str(path), None, "train", tokenizer, args)


def test_every_layout_of_a_pair_gives_the_ids_that_ppo_scores(tokenizer, tmp_path):
    """Arrow adds null for keys that only other messages have. They do not change the prompt."""
    _, prompt_ids = ppo.tokenize_prompt(DIALOGUE, {}, tokenizer)
    texts = "<|user|>53=<|assistant|>53<|end|><|user|>53=<|assistant|>"
    for number, row in enumerate(
        (
            ROW | {"prompt": DIALOGUE},
            ROW | {"prompt": texts},
            {"chosen": [*DIALOGUE, GOOD], "rejected": [*DIALOGUE, BAD]},
            {"prompt": "53=", "chosen": [*DIALOGUE, GOOD], "rejected": [*DIALOGUE, BAD]},
            {"prompt": DIALOGUE, "chosen": [GOOD], "rejected": [*DIALOGUE, BAD]},
            {"prompt": [ASK], "chosen": [BAD, ASK, GOOD], "rejected": [*DIALOGUE, BAD]},
            {"prompt": DIALOGUE, "chosen": [*DIALOGUE, GOOD | {"name": None}], "rejected": "53"},
        )
    ):
        (pair,) = load_pairs(write_rows(tmp_path / f"{number}.jsonl", [row]), tokenizer)
        assert pair.chosen_ids == [*prompt_ids, *tokenizer("35")["input_ids"], STOP]
        assert pair.rejected_ids == [*prompt_ids, *tokenizer("53")["input_ids"], STOP]


def test_dropped_pairs_are_counted_by_reason(tokenizer, tmp_path, capsys):
    """The tokenizer has no \u00e9, so the model cannot distinguish the responses of `lost`."""
    lost = ROW | {"chosen": "3\u00e9", "rejected": "3"}
    long, longest, empty = (ROW | {"rejected": text} for text in ("5" * 12, "5" * 13, ""))
    path = write_rows(tmp_path / "pairs.jsonl", [long, EQUAL, longest, ROW, lost, empty])
    assert [pair.length for pair in load_pairs(path, tokenizer)] == [18, 8, 8]
    output = capsys.readouterr().out
    for words in ("of 6 pairs", "2 dropped for equal", "1 dropped as longer", "1 with an empty"):
        assert words in output


TWO = "`chosen` and `rejected` have different prompts"
NO_ANSWER = (
    "a response must be a text, or messages that end with a text of the assistant, but this one is "
)
HH = "\n\nHuman: 53=\n\nAssistant: "
NO_PAIRS = [
    ({"chosen": [ASK, GOOD], "rejected": [OTHER, BAD]}, TWO),
    ({"prompt": "53=", "chosen": "35", "rejected": [ASK, BAD]}, TWO),
    ({"prompt": [OTHER], "chosen": [ASK, GOOD], "rejected": [ASK, BAD]}, "its messages must begin"),
    # The template would leave out the message before the response
    (ROW | {"prompt": [ASK, BAD]}, "the prompt must not end with a message of the assistant"),
    # PPO has messages of HH, so a model trained on HH's texts would see another form
    ({"chosen": f"{HH}35", "rejected": f"{HH}53"}, "the prompt is missing, both as a column"),
    (ROW | {"chosen": [GOOD | {"content": None}]}, NO_ANSWER),
    ({"chosen": [ASK], "rejected": [ASK]}, f"{NO_ANSWER}{[ASK]}"),
]


def test_example_that_is_not_a_pair_is_refused_by_its_number(tokenizer, tmp_path):
    for number, (row, message) in enumerate(NO_PAIRS):
        path = write_rows(tmp_path / f"{number}.jsonl", [ROW, row, ROW])
        with pytest.raises(
            ValueError, match=f"^{re.escape(f'{path}, row 1: ValueError: {message}')}"
        ):
            load_pairs(path, tokenizer)


@pytest.fixture(scope="module")
def options(assets, accelerator, tmp_path_factory):
    """Return options of a run with two epochs of three updates. The pad token is the stop token."""
    folder = tmp_path_factory.mktemp("files")
    rows = rm.load_rows(str(assets / "preference_train.parquet"), None, None)[:192]
    path = str(write_rows(folder / "pairs.jsonl", [EQUAL, *rows]))
    AutoTokenizer.from_pretrained(assets / "model", pad_token="<|end|>").save_pretrained(folder)
    few = str(write_rows(folder / "few.jsonl", rows[:33]))  # one of two ranks has one pair more
    options = {"dataset": path, "eval_dataset": few, "tokenizer_name_or_path": str(folder)}
    # These have no effect, because a file has no configurations
    options |= {"dataset_config": "main", "eval_dataset_config": "other"}
    options |= {"run_name": "run", "dtype": "float32", "per_device_train_batch_size": 32}
    schedule = {"num_train_epochs": 2, "learning_rate": 2e-3, "warmup_ratio": 0.3, "save_freq": 3}
    return options | schedule


def run(folder, options):
    train_in_this_process(rm.Args(output_dir=str(folder), **options))
    return [without_clock(line) for line in read_json_lines(folder / "run/metrics.jsonl")]


@pytest.fixture(scope="module")
def whole(options, tmp_path_factory):
    seen = SimpleNamespace(folder=tmp_path_factory.mktemp("whole"), orders=[], sources=[])
    notes = {
        "accumulate_gradients": lambda given: seen.orders.append(given["mini_batch"]),
        "load_rows": lambda given: seen.sources.append((given["config"], given["split"])),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, note in notes.items():
            hooks.before(rm, name, note, put=patch.setattr)
        seen.metrics = run(seen.folder, options)
    return seen


@torch.no_grad()
def test_saved_model_scores_as_transformers_and_ppo_read_it(whole, options, accelerator):
    path = str(whole.folder / "run/model")
    tokenizer = AutoTokenizer.from_pretrained(path)
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    pairs = load_pairs(options["eval_dataset"], tokenizer)
    scores = scores_alone(AutoModelForSequenceClassification.from_pretrained(path), pairs)
    expected = whole.metrics[-1] | rm.evaluation_metrics(scores)
    assert whole.metrics[-1] == pytest.approx(expected, rel=1e-4)
    args = rollouts.tiny_args()
    model = ppo.load_classifier(accelerator, ppo.RewardModel, path, args, trained=False)
    responses = [
        rollouts.response_of(ppo.Prompt("", "", ids[:5], None, None, None), ids[5:])
        for ids in [pair.chosen_ids for pair in pairs] + [pair.rejected_ids for pair in pairs]
    ]
    of_ppo = torch.tensor(ppo.reward_model_scores(accelerator, model, responses, args))
    torch.testing.assert_close(of_ppo.view(2, -1), scores, rtol=0, atol=1e-5)


def test_prompt_is_the_one_that_ppo_reads_from_the_row(assets, tmp_path):
    """The prompt also depends on the day of the run's start, on tools, and on switches."""
    tokenizer = AutoTokenizer.from_pretrained(assets / "model")
    tokenizer.chat_template = (
        "{{ strftime_now('%Y%m%d') }}{{ tools | length if tools }}{{ 7 if short }}"
        "{% for message in messages %}{{ message.content }}={% endfor %}"
    )
    switches, tools = {"chat_template_kwargs": {"short": True}}, {"tools": [{"type": "function"}]}
    day = {"start_day": "2024-07-26"}
    args = ppo.Args(apply_verifiable_reward=False, **day)
    parts = ({}, switches, tools, switches | tools)
    as_text = ({name: json.dumps(value) for name, value in part.items()} for part in parts)
    for number, columns in enumerate([*parts, *as_text]):
        row = ROW | columns
        (pair,) = load_pairs(write_rows(tmp_path / f"{number}.jsonl", [row]), tokenizer, **day)
        prompt = ppo.read_prompt(row, "", tokenizer, args, is_eval=False)
        assert pair.chosen_ids[: len(prompt.token_ids)] == prompt.token_ids
        assert prompt.text.startswith("20240726") and ("7" in prompt.text[8:]) == (
            "short" in str(row)
        )


def test_each_epoch_has_every_pair_of_its_split_once_in_its_own_order(
    options, whole, tmp_path, monkeypatch
):
    assert whole.sources == [("main", "train"), ("other", "test")]
    orders = torch.tensor(whole.orders).view(2, 192)
    assert orders.sort().values.tolist() == [list(range(192))] * 2
    assert not torch.equal(*orders)
    rates = [line["lr"] for line in whole.metrics]
    assert rates == pytest.approx([1e-3, 2e-3, 2e-3, 1.5e-3, 1e-3, 0.5e-3])
    # Another seed has another order
    monkeypatch.setattr(rm, "accumulate_gradients", Mock(side_effect=InterruptedError))
    with pytest.raises(InterruptedError):
        run(tmp_path, options | {"seed": 2})
    assert rm.accumulate_gradients.call_args.args[3] != whole.orders[0]


def test_resumed_run_is_the_same_to_the_bit(options, whole, tmp_path):
    shutil.copytree(whole.folder / "run", tmp_path / "run")
    (tmp_path / "run/model/model.safetensors").write_bytes(b"")
    state = tmp_path / "run/checkpoints/step_3/state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"seconds": 1000.0}))
    assert run(tmp_path, options | {"resume_from_checkpoint": "latest"}) == whole.metrics
    after = read_json_lines(tmp_path / "run/metrics.jsonl")
    assert 1000 < after[3]["time/from_scratch"] < 2000  # the clock continues
    one, other = (folder / "run/model/model.safetensors" for folder in (whole.folder, tmp_path))
    assert one.read_bytes() == other.read_bytes()


def test_other_pairs_and_arguments_are_refused(options, whole):
    for changes, message in (
        ({"seed": 2}, "seed was 1"),
        ({"num_train_epochs": 3}, "num_updates was 6"),
        ({"stop_token": "<|pad|>"}, "the prompts have changed"),
        ({"max_token_length": 5}, "none of 193 pairs is left: 193 dropped as longer than"),
    ):
        with pytest.raises(ValueError, match=message):
            run(whole.folder, options | {"resume_from_checkpoint": "latest"} | changes)


@pytest.mark.slow
def test_two_ranks_do_what_one_does(options, whole, tmp_path):
    halves = {"local_mini_batch_size": rm.Args.local_mini_batch_size // 2}
    options = options | halves | {"output_dir": tmp_path}
    command = [sys.executable, *TWO_RANKS, "scripts/train_reward_model.py", *flags_of(options)]
    subprocess.run(command, cwd=REPO, env=environment(), check=True, timeout=900)
    lines = map(without_clock, read_json_lines(tmp_path / "run/metrics.jsonl"))
    for line, expected in zip(lines, whole.metrics, strict=True):
        assert line == pytest.approx(
            expected, rel=1e-4, abs=1e-4
        )  # the order of sums differs, by 6e-6
