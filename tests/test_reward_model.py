"""scripts/train_reward_model.py: its loss, its scores, its data, and runs."""

import json
import math
import subprocess
import sys
from unittest import mock

import make_debug_assets
import pytest
import torch
import train_reward_model as rm
from helpers import REPO
from helpers.files import read_json_lines, write_rows
from helpers.preference_pairs import gradient_and_sums, make_pairs, tiny_args, tiny_reward_model
from helpers.processes import TWO_RANKS, environment, flags_of, gradient_of_ranks
from helpers.rollouts import PAD, STOP, VOCAB, tiny_language_model
from transformers import AutoModelForSequenceClassification, AutoTokenizer

DEBUG = {
    "num_train_epochs": 3,
    "local_mini_batch_size": 128,
    "per_device_train_batch_size": 128,
    "learning_rate": 2e-3,
    "center_rewards_coefficient": 0.01,
}
PAIRS = 16_000  # enough to learn from


def load_tokenizer(args):
    """The tokenizer; the ids that main() takes from it are filled into args."""
    tokenizer, config = rm.load_tokenizer_and_config(args)
    args.stop_token_id = rm.find_stop_token(args, tokenizer)
    args.pad_token_id = rm.find_pad_token(args, tokenizer, config)
    return tokenizer


# ------------------------------------------------------------------------------------- mathematics


@pytest.mark.parametrize("coefficient", [0.0, 0.3])
def test_loss_is_bradley_terrys(coefficient):
    chosen, rejected = torch.randn(2, 50, generator=torch.Generator().manual_seed(0)) * 5
    chosen[0], rejected[0] = -200.0, 200.0  # where exp would overflow
    loss = rm.preference_loss(chosen, rejected, coefficient)
    assert torch.isfinite(loss).all()
    for good, bad, value in zip(chosen.tolist(), rejected.tolist(), loss.tolist(), strict=True):
        expected = math.log1p(math.exp(bad - good)) + coefficient * (good + bad) ** 2
        assert value == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_calibration_of_a_model_that_is_as_right_as_it_is_sure():
    # Of 100 pairs at margin log 3 (75% sure) 75 are right, of 100 at log 9 (90% sure) 90.
    margins = [math.log(3)] * 75 + [-math.log(3)] * 25 + [math.log(9)] * 90 + [-math.log(9)] * 10
    error, bins = rm.calibration(torch.tensor(margins, dtype=torch.float64) * (1 - 1e-9))
    assert error == pytest.approx(0.0, abs=1e-8)
    assert [b.num_pairs for b in bins] == [100, 100]
    assert [b.low for b in bins] == pytest.approx([0.7, 0.85])
    assert [b.high for b in bins] == pytest.approx([0.75, 0.9])
    assert [b.mean_confidence for b in bins] == pytest.approx([0.75, 0.9])
    assert [b.accuracy for b in bins] == pytest.approx([0.75, 0.9])


def test_calibration_error_weighs_bins_by_their_pairs():
    # 30 pairs 60% sure and all right (0.4 off), 10 pairs 80% sure and none right (0.8 off).
    margins = torch.tensor([math.log(1.5)] * 30 + [-math.log(4)] * 10)
    assert rm.calibration(margins)[0] == pytest.approx((30 * 0.4 + 10 * 0.8) / 40, abs=1e-6)
    assert rm.calibration(torch.full((3,), 1e4))[0] == 0.0  # no bin beyond the last one


def test_evaluation_metrics_are_those_of_the_scores():
    metrics, _ = rm.report_scores(torch.tensor([[1.0, 2.0, 0.0], [0.0, 3.0, 0.0]]))
    assert metrics["eval/accuracy"] == pytest.approx(1 / 3)  # a tie is not ranked right
    assert metrics["eval/margin"] == pytest.approx(0.0)
    assert metrics["eval/scores_mean"] == 1.0
    assert metrics["eval/scores_chosen"] == metrics["eval/scores_rejected"] == 1.0
    assert metrics["eval/loss"] == pytest.approx(
        (0.3132617 + 1.3132617 + math.log(2)) / 3, abs=1e-6
    )


# ------------------------------------------------------------------------------------------ scores


def scores_alone(model, pairs):
    """What transformers says of every row on its own, without padding: (2, pairs)."""
    rows = [[pair.chosen_ids for pair in pairs], [pair.rejected_ids for pair in pairs]]
    return torch.tensor(
        [[model(torch.tensor([ids])).logits.item() for ids in part] for part in rows]
    )


@pytest.mark.parametrize("pad", [PAD, STOP, VOCAB - 1])
def test_score_is_at_the_last_token_by_length_not_by_pad_id(accelerator, pad):
    model, pairs = tiny_reward_model(), make_pairs()
    together = torch.stack(rm.score_pairs(accelerator, model, pairs, tiny_args(pad_token_id=pad)))
    torch.testing.assert_close(
        together.float(), scores_alone(model.model, pairs), rtol=0, atol=1e-6
    )
    every = rm.score_all(
        accelerator, model, pairs, tiny_args(pad_token_id=pad, per_device_train_batch_size=3)
    )
    torch.testing.assert_close(every, together.float(), rtol=0, atol=1e-6)


def test_transformers_own_forward_gives_the_same_where_eos_pads(assets, accelerator, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(assets / "model")
    tokenizer.pad_token = tokenizer.eos_token
    tiny_language_model(vocab_size=20, pad_token_id=None).save_pretrained(tmp_path / "policy")
    tokenizer.save_pretrained(tmp_path / "policy")
    args = tiny_args(model_name_or_path=str(tmp_path / "policy"))
    tokenizer = load_tokenizer(args)
    assert tokenizer.pad_token_id == args.stop_token_id == STOP
    model = rm.load_reward_model(args)
    rm.save_reward_model(model, tokenizer, tmp_path / "reward")
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "reward")
    assert loaded.config.num_labels == 1 and loaded.config.pad_token_id not in (None, STOP)

    def within_vocabulary(ids):
        return [i % 17 for i in ids[:-1]] + [STOP]

    pairs = [
        rm.Pair(p.row, within_vocabulary(p.chosen_ids), within_vocabulary(p.rejected_ids))
        for p in make_pairs()
    ]
    together = torch.stack(rm.score_pairs(accelerator, model, pairs, args)).detach()
    assert together.std() > 0.1
    torch.testing.assert_close(together, scores_alone(loaded, pairs), rtol=0, atol=1e-5)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_gradient_does_not_depend_on_micro_batches(accelerator, size):
    model = tiny_reward_model()
    whole, sums = gradient_and_sums(accelerator, model, 8)
    cut, cut_sums = gradient_and_sums(accelerator, model, size)
    assert whole.norm() > 0.1
    assert (whole - cut).norm() < 1e-10 * whole.norm()
    assert cut_sums == pytest.approx(sums, rel=1e-10)


def test_loss_is_the_mean_over_pairs(accelerator):
    model, pairs = tiny_reward_model(), make_pairs()
    gradient, sums = gradient_and_sums(accelerator, model, 2)
    model.zero_grad()
    total = 0.0
    for pair in pairs:
        good, bad = (
            model.model(torch.tensor([ids])).logits[0, 0]
            for ids in (pair.chosen_ids, pair.rejected_ids)
        )
        total = total + torch.log1p((bad - good).exp()) + 0.1 * (good + bad) ** 2
    (total / 8).backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert (gradient - expected).norm() < 1e-8 * expected.norm()
    assert sums["loss/preference_avg"] == pytest.approx(total.item())


@pytest.mark.slow
def test_gradient_of_two_ranks_is_that_of_one(tmp_path):
    expected = gradient_of_ranks("reward_model", 1, 8, tmp_path)
    for size in (4, 1):
        result = gradient_of_ranks("reward_model", 2, size, tmp_path)
        difference = result["gradient"] - expected["gradient"]
        assert difference.norm() < 1e-10 * expected["gradient"].norm()
        assert result["sums"] == pytest.approx(expected["sums"], rel=1e-10)
        torch.testing.assert_close(result["forward"], expected["forward"], rtol=0, atol=1e-6)


# ------------------------------------------------------------------------------------------- model


def test_new_head_starts_small(saved_policy):
    args = [tiny_args(model_name_or_path=str(saved_policy), seed=seed) for seed in range(4)]
    heads = [rm.load_reward_model(a).model.score.weight.detach().flatten() for a in args]
    assert torch.cat(heads).std().item() == pytest.approx(1 / math.sqrt(512 + 1), rel=0.06)
    assert not torch.equal(heads[0], heads[1])
    assert torch.equal(heads[0], rm.load_reward_model(args[0]).model.score.weight.flatten())


def test_dropout_is_off_and_the_body_is_the_policys(saved_policy, accelerator):
    model = rm.load_reward_model(tiny_args(model_name_or_path=str(saved_policy)))
    assert model.training
    first, second = (
        torch.stack(rm.score_pairs(accelerator, model, make_pairs(), tiny_args())) for _ in range(2)
    )
    assert torch.equal(first, second)
    policy = tiny_language_model(hidden_size=512, num_hidden_layers=1).model.state_dict()
    assert all(
        torch.equal(value, policy[name]) for name, value in model.model.model.state_dict().items()
    )


def test_head_of_a_reward_model_is_kept(saved_policy, tmp_path):
    args = tiny_args(model_name_or_path=str(saved_policy))
    model = rm.load_reward_model(args)
    model.model.save_pretrained(tmp_path / "reward")
    again = rm.load_reward_model(tiny_args(model_name_or_path=str(tmp_path / "reward"), seed=5))
    assert torch.equal(again.model.score.weight, model.model.score.weight)


# -------------------------------------------------------------------------------------------- data

ASK = {"role": "user", "content": "53812="}

GOOD, BAD = ({"role": "assistant", "content": text} for text in ("12358", "13582"))

ROW = {"prompt": [ASK], "chosen": "12358", "rejected": "13582"}


def pairs_file(folder, rows):
    return write_rows(folder / "pairs.jsonl", rows)


@pytest.fixture
def tokenizer_and_args(assets):
    args = rm.Args(model_name_or_path=str(assets / "model"))
    return load_tokenizer(args), args


@pytest.mark.parametrize(
    "row",
    [
        ROW,
        {"prompt": "<|user|>53812=<|assistant|>", "chosen": "12358", "rejected": "13582"},
        {"chosen": [ASK, GOOD], "rejected": [ASK, BAD]},
        {"prompt": [ASK], "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": [ASK], "chosen": [ASK, GOOD], "rejected": [ASK, BAD]},
        {"prompt": "53812=", "chosen": [ASK, GOOD], "rejected": [ASK, BAD]},
    ],
    ids=[
        "messages and texts",
        "texts",
        "dialogues",
        "messages",
        "messages and dialogues",
        "text and dialogues",
    ],
)
def test_every_form_of_a_pair_gives_the_ids_that_ppo_scores(row, tokenizer_and_args, tmp_path):
    tokenizer, args = tokenizer_and_args
    (pair,) = rm.prepare_pairs(str(pairs_file(tmp_path, [row])), "train", tokenizer, args)
    prompt = tokenizer.apply_chat_template([ASK], tokenize=False, add_generation_prompt=True)
    for ids, answer in ((pair.chosen_ids, "12358"), (pair.rejected_ids, "13582")):
        assert tokenizer.decode(ids) == f"{prompt}{answer}<|end|>"
        assert ids.count(args.stop_token_id) == 1
    assert pair.length == 14


def test_earlier_turns_stay_in_the_prompt(tokenizer_and_args, tmp_path):
    tokenizer, args = tokenizer_and_args
    dialogue = [ASK, BAD, {"role": "user", "content": "0="}]
    row = {"chosen": [*dialogue, GOOD], "rejected": [*dialogue, BAD]}
    (pair,) = rm.prepare_pairs(str(pairs_file(tmp_path, [row])), "train", tokenizer, args)
    text = tokenizer.decode(pair.chosen_ids)
    assert text == "<|user|>53812=<|assistant|>13582<|end|><|user|>0=<|assistant|>12358<|end|>"


def test_long_and_equal_pairs_are_dropped_and_counted(tokenizer_and_args, tmp_path, capsys):
    tokenizer, args = tokenizer_and_args
    args.max_token_length = 14
    long = ROW | {"rejected": "123588"}
    rows = [long, ROW, ROW | {"rejected": "12358"}, long, ROW]
    path = str(pairs_file(tmp_path, rows))
    assert [pair.row for pair in rm.prepare_pairs(path, "train", tokenizer, args)] == [1, 4]
    out = capsys.readouterr().out
    assert "dropped 3 of 5" in out
    assert "2 longer than --max_token_length 14, 1 whose responses are the same" in out


# name: (options from a temporary folder, what the message must hold)
TABLE = {
    "no file": (lambda tmp: {"dataset": tmp / "none.parquet"}, ["none.parquet", "no such file"]),
    "no evaluation file": (
        lambda tmp: {"eval_dataset": tmp / "none.jsonl"},
        ["none.jsonl", "no such file"],
    ),
    "no debug assets": (
        lambda _: {"dataset": "debug_assets/none.parquet"},
        ["scripts/make_debug_assets.py"],
    ),
    "garbage": (
        lambda tmp: {"dataset": pairs_file(tmp, ["{"])},
        ["pairs.jsonl", "read"],
    ),
    "empty": (
        lambda tmp: {"dataset": pairs_file(tmp, [])},
        ["pairs.jsonl", "empty"],
    ),
    "no column": (
        lambda tmp: {"dataset": pairs_file(tmp, [{"prompt": "1", "response": "2"}])},
        ["pairs.jsonl", "`chosen`, `rejected`", "response"],
    ),
    "no prompt": (
        lambda tmp: {"dataset": pairs_file(tmp, [ROW, {"chosen": "1", "rejected": "2"}])},
        ["pairs.jsonl", "row 1", "`chosen`", "`prompt`"],
    ),
    "rejected is null": (
        lambda tmp: {"dataset": pairs_file(tmp, [ROW, ROW, ROW | {"rejected": None}])},
        ["pairs.jsonl", "row 2", "`rejected`"],
    ),
    "content is null": (
        lambda tmp: {
            "dataset": pairs_file(tmp, [ROW | {"chosen": [ASK, GOOD | {"content": None}]}])
        },
        ["row 0", "`chosen`", "no text"],
    ),
    "user speaks last": (
        lambda tmp: {"dataset": pairs_file(tmp, [{"chosen": [ASK, GOOD], "rejected": [ASK, ASK]}])},
        ["row 0", "`rejected`", "assistant", "of the user"],
    ),
    "all equal": (
        lambda tmp: {"dataset": pairs_file(tmp, [ROW | {"rejected": "12358"}] * 3)},
        ["pairs.jsonl", "3 pairs", "3 whose responses are the same"],
    ),
    "all too long": (
        lambda _: {"max_token_length": 5},
        ["good.jsonl", "70 longer than --max_token_length 5"],
    ),
    "too few pairs": (
        lambda _: {"local_mini_batch_size": 80},
        ["good.jsonl", "70 pairs", "--local_mini_batch_size"],
    ),
    "batches that do not divide": (
        lambda _: {"per_device_train_batch_size": 7},
        ["local_mini_batch_size", "64", "7"],
    ),
    "negative": (lambda _: {"learning_rate": -1.0}, ["--learning_rate", "above 0"]),
    "not finite": (
        lambda _: {"center_rewards_coefficient": "nan"},
        ["--center_rewards_coefficient"],
    ),
    "warm-up of more than all": (lambda _: {"warmup_ratio": 1.5}, ["--warmup_ratio", "at most 1"]),
    "no model": (
        lambda tmp: {"model_name_or_path": tmp / "none"},
        ["--model_name_or_path", "none"],
    ),
    "no tokenizer": (
        lambda tmp: {"tokenizer_name_or_path": tmp / "none"},
        ["--tokenizer_name_or_path", "none"],
    ),
    "no template": (
        lambda tmp: {"chat_template": tmp / "none.jinja"},
        ["--chat_template", "no such file"],
    ),
    "unknown stop token": (lambda _: {"stop_token": "<|stop|>"}, ["--stop_token", "<|stop|>"]),
    "folder of another run": (
        lambda tmp: {"output_dir": tmp.parent, "run_name": tmp.name},
        ["--run_name"],
    ),
}


def options_of(name, folder, assets):
    options = {
        "dataset": write_rows(folder / "good.jsonl", [ROW] * 70),
        "model_name_or_path": assets / "model",
    }
    return options | {"output_dir": folder / "output", "run_name": "run"} | TABLE[name][0](folder)


@pytest.mark.parametrize("name", TABLE)
def test_bad_input_is_one_line_and_status_2(name, assets, tmp_path, monkeypatch, capfd):
    options = options_of(name, tmp_path, assets)
    monkeypatch.setattr(sys, "argv", ["train_reward_model.py", *flags_of(options)])
    load_reward_model = rm.load_reward_model

    def look_at_headers(args, device_map=None):
        assert device_map == "meta", "a model was loaded"
        return load_reward_model(args, device_map)

    monkeypatch.setattr(rm, "load_reward_model", look_at_headers)
    monkeypatch.chdir(tmp_path)  # where there are no debug assets
    with pytest.raises(SystemExit) as stop:
        rm.main()
    (line,) = capfd.readouterr().err.strip().splitlines()
    assert stop.value.code == 2
    assert line.startswith("train_reward_model.py: error: ") and len(line) < 500
    assert [fragment for fragment in TABLE[name][1] if fragment not in line] == []
    assert not (tmp_path / "output").exists()


def test_classifier_of_several_labels_is_refused(saved_policy, capsys):
    config = json.loads((saved_policy / "config.json").read_text())
    config |= {
        "architectures": ["Qwen2ForSequenceClassification"],
        "id2label": {"0": "a", "1": "b"},
    }
    (saved_policy / "config.json").write_text(json.dumps(config))
    with pytest.raises(SystemExit):
        rm.load_tokenizer_and_config(
            tiny_args(
                model_name_or_path=str(saved_policy), tokenizer_name_or_path="debug_assets/model"
            )
        )
    assert "2 labels" in capsys.readouterr().err


def test_main_takes_the_ids_of_stop_and_pad_tokens_from_the_tokenizer(
    assets, tmp_path, monkeypatch
):
    class ReachedModel(Exception):
        pass

    def load_reward_model(args, device_map=None):
        raise ReachedModel(args.stop_token_id, args.pad_token_id)

    tokenizer = AutoTokenizer.from_pretrained(assets / "model")
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    options = {
        "dataset": pairs_file(tmp_path, [ROW] * 70),
        "model_name_or_path": assets / "model",
        "tokenizer_name_or_path": tmp_path / "tokenizer",
        "output_dir": tmp_path,
    }
    monkeypatch.setattr(sys, "argv", ["train_reward_model.py", *flags_of(options)])
    monkeypatch.setattr(rm, "Accelerator", mock.MagicMock(**{"return_value.num_processes": 1}))
    monkeypatch.setattr(rm, "load_reward_model", load_reward_model)
    with pytest.raises(ReachedModel) as reached:
        rm.main()
    vocab_size = json.loads((assets / "model" / "config.json").read_text())["vocab_size"]
    assert reached.value.args == (STOP, vocab_size - 1)


def test_debug_pairs_are_right_and_wrong_and_held_out(assets):
    import pyarrow.parquet

    prompts = {}
    for split in ("train", "test"):
        rows = pyarrow.parquet.read_table(assets / f"preference_{split}.parquet").to_pylist()
        digits = [row["prompt"][0]["content"][:-1] for row in rows]
        assert [row["chosen"] for row in rows] == [make_debug_assets.sort_digits(d) for d in digits]
        assert not any(row["rejected"] == row["chosen"] for row in rows)
        careless = [
            r["rejected"] == make_debug_assets.careless_sort(d)
            for r, d in zip(rows, digits, strict=True)
        ]
        assert 0.01 < sum(careless) / len(rows) < 0.2
        assert {len(row["rejected"]) for row in rows} == set(range(8))
        prompts[split] = set(digits)
    assert not prompts["train"] & prompts["test"] and len(prompts["test"]) == 1000


# -------------------------------------------------------------------------------------------- runs


def run(folder, assets, launcher=(), env=None, **options):
    defaults = {
        "dataset": assets / "preference_train.parquet",
        "eval_dataset": assets / "preference_test.parquet",
        "model_name_or_path": assets / "model",
        "dtype": "float32",
        "output_dir": folder,
        "run_name": "run",
    }
    command = [
        sys.executable,
        *launcher,
        "scripts/train_reward_model.py",
        *flags_of(defaults | options),
    ]
    streams = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL}
    done = subprocess.run(command, cwd=REPO, env=environment(env), timeout=280, **streams)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, read_json_lines(folder / "run" / "metrics.jsonl")


@pytest.fixture(scope="module")
def debug_run(assets, tmp_path_factory):
    """What scripts/train/debug/reward_model.sh does, once and with fewer pairs."""
    import datasets

    folder = tmp_path_factory.mktemp("debug")
    rows = datasets.Dataset.from_parquet(str(assets / "preference_train.parquet"))
    rows.select(range(PAIRS)).to_parquet(str(folder / "train.parquet"))
    options = DEBUG | {"num_train_epochs": 1, "dataset": folder / "train.parquet"}
    stdout, metrics = run(folder, assets, **options)
    return folder / "run", stdout, metrics


@pytest.mark.slow
def test_debug_run_learns(debug_run):
    _, stdout, metrics = debug_run
    assert len(metrics) == PAIRS // 128 and metrics[-1]["training_step"] == len(metrics)
    assert 0.2 < metrics[0]["objective/accuracy"] < 0.8 and metrics[0]["lr"] < 2e-3
    assert metrics[-1]["eval/accuracy"] >= 0.95
    assert metrics[-1]["eval/margin"] > 3 and abs(metrics[-1]["eval/scores_mean"]) < 0.5  # centered
    assert "confidence" in stdout and "Held-out pairs ranked right: " in stdout


@pytest.mark.slow
def test_saved_model_gives_the_scores_of_the_run(debug_run, assets, accelerator):
    run_dir, _, metrics = debug_run
    model = AutoModelForSequenceClassification.from_pretrained(run_dir / "model")
    args = rm.Args(model_name_or_path=str(run_dir / "model"), dtype="float32")
    tokenizer = load_tokenizer(args)
    assert (model.config.num_labels, model.config.pad_token_id) == (1, tokenizer.pad_token_id)
    pairs = rm.prepare_pairs(str(assets / "preference_test.parquet"), "test", tokenizer, args)
    scores = scores_alone(model, pairs)
    # The head that was saved is kept, and transformers' own forward agrees with ours.
    ours = rm.score_all(accelerator, rm.load_reward_model(args), pairs, args)
    torch.testing.assert_close(ours, scores, rtol=0, atol=1e-3)
    accuracy = (scores[0] > scores[1]).double().mean().item()
    assert accuracy == pytest.approx(metrics[-1]["eval/accuracy"], abs=2e-3)
    assert scores.std().item() == pytest.approx(metrics[-1]["eval/scores_std"], abs=1e-3)


@pytest.mark.slow
def test_two_ranks_train_as_one(assets, tmp_path):
    import datasets

    for split, count in (("train", 512), ("test", 33)):  # an odd number: one rank has a pair more
        rows = datasets.Dataset.from_parquet(str(assets / f"preference_{split}.parquet"))
        rows.select(range(count)).to_parquet(str(tmp_path / f"{split}.parquet"))
    options = {
        "dataset": tmp_path / "train.parquet",
        "eval_dataset": tmp_path / "test.parquet",
        "learning_rate": 1e-3,
        "center_rewards_coefficient": 0.01,
    }
    _, one = run(
        tmp_path / "one",
        assets,
        local_mini_batch_size=128,
        per_device_train_batch_size=32,
        **options,
    )
    sizes = {"local_mini_batch_size": 64, "per_device_train_batch_size": 16}
    cpu = {"ACCELERATE_USE_CPU": "true"}
    _, two = run(tmp_path / "two", assets, launcher=TWO_RANKS, env=cpu, **sizes, **options)
    assert len(one) == len(two) == 4
    for mine, theirs in zip(one, two, strict=True):
        for name in mine.keys() - {"time/training", "time/from_scratch"}:
            assert theirs[name] == pytest.approx(mine[name], rel=1e-3, abs=1e-4), name
