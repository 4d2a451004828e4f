"""Functions of ppo_vllm_async.py whose text is not that of ppo_sync.py.

What has stayed the same, the mathematics above all, is tested through ppo_sync.py; what a step
makes of all this in test_loop.py.
"""

import json
import math
import queue
import random
import shutil
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
import torch
from helpers.files import write_rows
from helpers.formulas import logprobs_and_entropies, values_of
from helpers.rollouts import (
    STOP,
    gradients,
    in_float32,
    make_rollout,
    near_policy,
    one_of_ranks,
    tiny_args,
    tiny_classifier,
    tiny_language_model,
    tiny_policy,
    tiny_value_model,
    with_failed_rewards,
)
from transformers import AutoTokenizer, GenerationConfig

import ppo_vllm_async as script
from ppo_vllm_async import Args, Prompt, Response

# -------------------------------------------------------------------------------------------- rows


@pytest.fixture(scope="module")
def tokenizer(assets):
    return AutoTokenizer.from_pretrained(assets / "model")


RULE = {"reward_model": {"style": "rule", "ground_truth": "1"}, "data_source": "debug/sorting"}
FOR_A_MODEL = {"reward_model": {"style": "model", "ground_truth": "the chosen one"}}
HELLASWAG = {"style": "model", "eval": "multiple_choice", "ground_truth": "2"}
CHAT = [{"role": "user", "content": "5="}, {"role": "assistant", "content": "6"}]
AGAINST_A_MODEL = {"reward_model_path": "m"}
WITHOUT_RULES = {"reward_model_path": "m", "apply_verifiable_reward": False}

# name: (a row, arguments, of what file, ground truth, data source)
ROWS = {
    "verl's": ({"prompt": "5="} | RULE, {}, "train", "1", "debug/sorting"),
    "open-instruct's": (
        {"messages": CHAT, "ground_truth": "72", "dataset": "gsm8k"},
        {},
        "train",
        "72",
        "gsm8k",
    ),
    "verl's HellaSwag": (
        {"prompt": CHAT, "reward_model": HELLASWAG, "data_source": "Rowan/hellaswag"},
        {"reward_fn": "f"},
        "train",
        "2",
        "Rowan/hellaswag",
    ),
    "for a reward model": ({"prompt": "5="} | FOR_A_MODEL, AGAINST_A_MODEL, "train", None, None),
    "a rule beside it": ({"prompt": "5="} | RULE, AGAINST_A_MODEL, "train", "1", "debug/sorting"),
    "no rule is asked": ({"prompt": "5="} | RULE, WITHOUT_RULES, "train", None, "debug/sorting"),
    "but of held-out rows": ({"prompt": "5="} | RULE, WITHOUT_RULES, "eval", "1", "debug/sorting"),
}


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
@pytest.mark.parametrize("name", ROWS)
def test_row_has_the_ground_truth_that_its_columns_say(name, suffix, tokenizer, tmp_path):
    row, changes, kind, truth, source = ROWS[name]
    path = str(write_rows(tmp_path / f"data.{suffix}", [row | {"extra_info": {"k": 4}}]))
    (prompt,) = script.load_prompts(
        path, "train", tokenizer, tokenizer, Args(**changes), is_eval=kind == "eval"
    )
    assert (prompt.ground_truth, prompt.data_source) == (truth, source)
    assert (prompt.row, prompt.extra_info) == (f"{path}, row 0", {"k": 4})
    text = "5="
    if "messages" in row or row["prompt"] is CHAT:  # without the answer at their end
        text = tokenizer.apply_chat_template(CHAT[:1], tokenize=False, add_generation_prompt=True)
    assert prompt.text == text
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert prompt.token_ids == prompt.reward_model_token_ids == ids


def test_values_of_json_lines_are_as_they_stand_there(tmp_path):
    """A reader of tables gives a column one type: "01" and 2 became 1 and 2, a date a datetime."""
    rows = [
        {"prompt": "5=", "ground_truth": "01", "day": "2024-01-01"},
        {"prompt": "6=\u2028", "ground_truth": 2, "day": "2024-01-02"},
    ]
    assert script.load_rows(str(write_rows(tmp_path / "rows.jsonl", rows)), "train") == rows


def test_long_and_empty_prompts_are_dropped_and_counted(tokenizer, tmp_path, capsys):
    texts = ["5" * size for size in (1, 6, 3, 0, 5)]
    path = str(write_rows(tmp_path / "data.jsonl", [{"prompt": text} | RULE for text in texts]))
    args = Args(max_prompt_token_length=5)
    prompts = script.load_prompts(path, "train", tokenizer, tokenizer, args, is_eval=False)
    assert [prompt.row[-1] for prompt in prompts] == ["0", "2", "4"]
    assert "2 of 5 prompts dropped" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------ scores


def response(data_source="gsm8k", size=3, stopped=True, text="", **parts):
    prompt = Prompt("row 7", "1 + 1?", [5], [5], data_source, "2", None)
    return Response(prompt, [9] * size, [-1.0] * size, stopped, text, **parts)


FORMAT = "<think>a</think><answer>b</answer>"
# name: (response, the reward model's score of it, arguments, its score)
SCORES = {
    "verifiable": (response(verifiable=0.5), None, {"verification_reward": 4.0}, 2.0),
    "no ground truth": (response(), None, {}, 0.0),
    "form": (
        response(text=FORMAT, verifiable=1.0),
        None,
        {"add_r1_style_format_reward": True, "r1_style_format_reward": 0.25},
        1.25,
    ),
    "form that is not rewarded": (response(text=FORMAT, verifiable=1.0), None, {}, 1.0),
    "all": (
        response(text=FORMAT, verifiable=1.0),
        -3.0,
        {"add_r1_style_format_reward": True, "reward_model_multiplier": 2.0},
        -4.0,
    ),
    "reward model alone": (
        response(verifiable=1.0),
        -3.0,
        {"apply_verifiable_reward": False},
        -3.0,
    ),
    "failed": (response(text=FORMAT, failure="OSError()"), 5.0, {}, None),
    "failed, and of no interest": (
        response(failure="OSError()"),
        5.0,
        {"apply_verifiable_reward": False},
        5.0,
    ),
    "cut": (response(stopped=False, verifiable=1.0), 5.0, {"non_stop_penalty": True}, -10.0),
    "cut without a penalty": (response(stopped=False, verifiable=1.0), None, {}, 1.0),
    "short": (
        response(size=3, verifiable=1.0),
        None,
        {"non_stop_penalty": True, "min_response_length": 4, "penalty_reward_value": -2.0},
        -2.0,
    ),
    "long enough": (
        response(size=4, verifiable=1.0),
        None,
        {"non_stop_penalty": True, "min_response_length": 4},
        1.0,
    ),
    "cut and failed": (
        response(stopped=False, failure="OSError()"),
        None,
        {"non_stop_penalty": True},
        -10.0,
    ),
}


@pytest.mark.parametrize("name", SCORES)
def test_score_is_the_sum_of_the_rewards_or_the_penalty(name, monkeypatch, capsys):
    given, model_score, changes, score = SCORES[name]
    monkeypatch.setattr(script, "reward_model_scores", lambda *_: [model_score])
    reward_model = None if model_score is None else "a model"
    (scored,) = script.score_responses(None, reward_model, [given], Args(**changes))
    parts = {
        "model_score": model_score,
        "has_format": given.text == FORMAT,
        "penalized": score is not None and score in (-10.0, -2.0),
        "score": score,
    }
    assert scored == replace(given, **parts)
    warning = "the reward failed on 1 of 1 responses, first on row 7: OSError()"
    assert (warning in capsys.readouterr().out) == (given.failure is not None)


def test_means_of_scores_leave_out_what_is_not_known():
    """A failed call is not a wrong answer, and a part of the credit is not a right one."""
    responses = [
        response("gsm8k", verifiable=1.0, score=2.0, has_format=True),
        response("gsm8k", failure="OSError()", score=None),
        response("math", verifiable=0.5, score=-1.0, penalized=True),
        response("math", score=0.0),
    ]
    args = Args(add_r1_style_format_reward=True, non_stop_penalty=True)
    expected = {
        "eval/scores": 1 / 3,
        "eval/scores/gsm8k": 2.0,
        "eval/scores/math": -0.5,
        "eval/verifiable_score": 0.75,
        "eval/verifiable_score/gsm8k": 1.0,
        "eval/verifiable_score/math": 0.5,
        "eval/verifiable_correct_rate": 0.5,
        "eval/verifiable_correct_rate/gsm8k": 1.0,
        "eval/verifiable_correct_rate/math": 0.0,
        "eval/format_rate": 0.25,
        "eval/format_rate/gsm8k": 0.5,
        "eval/format_rate/math": 0.0,
        "eval/penalty_rate": 0.25,
        "eval/penalty_rate/gsm8k": 0.0,
        "eval/penalty_rate/math": 0.5,
        "eval/reward_failures": 1,
    }
    assert script.score_metrics("eval", responses, args) == pytest.approx(expected)
    of_one_source = script.score_metrics("objective", responses[:2], Args())
    assert of_one_source == {
        "objective/scores": 2.0,
        "objective/verifiable_score": 1.0,
        "objective/verifiable_correct_rate": 1.0,
        "objective/reward_failures": 1,
    }


# ------------------------------------------------------------------------- engines and their shares


@pytest.mark.parametrize(
    ("nodes", "learners", "gpus", "size"),
    [(1, 1, (), 1), (2, 4, (), 1), (1, 6, (6, 7), 1), (2, 4, (7, 5, 4, 6), 2), (3, 2, (2, 3), 2)],
)
def test_engines_are_numbered_by_rank_and_share_no_gpu(nodes, learners, gpus, size):
    args = Args(vllm_gpus=gpus, vllm_tensor_parallel_size=size)
    args.world_size, args.local_world_size = nodes * learners, learners
    placements = [script.place_engine(rank, 8, args) for rank in range(nodes * learners)]
    placed = [placement for placement in placements if placement is not None]
    engines_of_node = len(gpus) // size or learners
    assert placements[0] is not None  # rank 0 hands the batch of a checkpoint over
    assert [index for index, _, _ in placed] == list(range(nodes * engines_of_node))
    assert {count for _, count, _ in placed} == {len(placed)}
    for node in range(nodes):
        of_node = placed[node * engines_of_node : (node + 1) * engines_of_node]
        used = [gpu for *_, own in of_node for gpu in own]
        assert used == list(gpus or range(learners))
    on_the_cpu = [script.place_engine(rank, 0, args) for rank in range(nodes * learners)]
    assert [p and (*p[:2], ()) for p in placements] == on_the_cpu


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_every_group_goes_to_the_engine_of_the_definition(count, group):
    for num_groups in range(20):
        items = [i for i in range(num_groups) for _ in range(group)]
        shares = [items[script.share_of(len(items), index, count, group)] for index in range(count)]
        assert [item for share in shares for item in share] == items
        for index, share in enumerate(shares):
            assert all(i * count // num_groups == index for i in share)


def test_engine_is_no_rank_and_sees_its_own_gpus_alone(monkeypatch):
    launchers = ["RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"]
    launchers += ["MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "GROUP_WORLD_SIZE"]
    for name in launchers:
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("RANKING", "mine")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")  # what the user sets is for vLLM
    monkeypatch.setenv("TMPDIR", "elsewhere")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-5,7")
    args = Args(vllm_gpus=(1, 2), vllm_tensor_parallel_size=2, vllm_gpu_memory_utilization=0.5)
    environment, options = script.vllm_settings((1, 2), "folder", 77, args)
    assert [name for name in launchers if name in environment] == []
    assert environment["RANKING"] == "mine" and environment["TMPDIR"] == "folder"
    assert environment["VLLM_LOGGING_LEVEL"] == "DEBUG"
    assert environment["CUDA_VISIBLE_DEVICES"] == "GPU-5,7"
    assert options["weight_transfer_config"] == {"backend": "nccl"}
    assert (options["tensor_parallel_size"], options["max_model_len"]) == (2, 77)
    assert not options["enforce_eager"] and "enable_chunked_prefill" not in options

    _, options = script.vllm_settings((1,), "folder", 77, Args())
    assert options["weight_transfer_config"] == {"backend": "ipc"}
    environment, options = script.vllm_settings((), "folder", 77, Args())
    assert environment["CUDA_VISIBLE_DEVICES"] == "3,GPU-5,7"
    assert options["enforce_eager"] and not {"weight_transfer_config", "load_format"} & set(options)


class Engine:
    """Says the first token of a prompt, and its seed."""

    policy_version = 4

    def sample(self, prompts, seeds, temperature, num_samples):
        if temperature is None:
            raise OSError("the engine is on fire")
        parts = zip(prompts, seeds, strict=True)
        return [Response(p, [p.token_ids[0], seed], [temperature] * 2, True) for p, seed in parts]


def answer(request, monkeypatch, engine, **changes):
    """What the generation thread hands over, and the error that ends it where there is one."""
    prompts_Q, response_Q, errors = queue.Queue(), queue.Queue(), []
    monkeypatch.setattr(script, "grade_responses", lambda responses, *_: responses[::-1])
    monkeypatch.setattr(script, "end_at_once", errors.append)
    prompts_Q.put(request)
    prompts_Q.put(None)  # it takes no such request
    args = Args(**{"temperature": 0.7} | changes)
    script.generation_thread(engine, None, None, prompts_Q, response_Q, args)
    (error,) = errors
    return response_Q.get_nowait() if response_Q.qsize() else None, error


PROMPTS = [Prompt(f"row {i}", "", [i], [i], None, None, None) for i in range(3)]
REQUEST = script.Request(9, PROMPTS[:2], [11, 12], PROMPTS[2:], [13])


def test_thread_grades_what_the_engine_says_of_a_request(monkeypatch):
    rollout, _ = answer(REQUEST, monkeypatch, Engine(), eval_temperature=0.0)
    assert (rollout.training_step, rollout.policy_version) == (9, 4)
    assert rollout.responses == [
        Response(PROMPTS[1], [1, 12], [0.7, 0.7], True),
        Response(PROMPTS[0], [0, 11], [0.7, 0.7], True),
    ]
    assert rollout.eval_responses == [Response(PROMPTS[2], [2, 13], [0.0, 0.0], True)]
    assert set(rollout.times) == {"wait_for_prompts", "generation", "reward", "evaluation"}


def test_rank_without_an_engine_has_an_empty_share(monkeypatch):
    rollout, _ = answer(REQUEST, monkeypatch, None)
    assert (rollout.training_step, rollout.policy_version, rollout.responses) == (9, None, [])


def test_error_in_the_thread_ends_the_process(monkeypatch):
    """Python would end the thread alone, and the learner would wait for ever."""
    rollout, error = answer(REQUEST, monkeypatch, Engine(), temperature=None)
    assert rollout is None and str(error) == "the engine is on fire"


class Group:
    """Of ranks of which the others hand these shares over."""

    def __init__(self, others, monkeypatch):
        self.others = others
        monkeypatch.setattr(torch.distributed, "all_gather_object", self.gather)

    def size(self):
        return 1 + len(self.others)

    def gather(self, shares, mine, group):
        assert group is self
        shares[:] = [mine, *self.others]


def share_of(names, eval_names, version):
    rows, eval_rows = ([response(text=name) for name in some] for some in (names, eval_names))
    return script.Rollout(9, version, rows, eval_rows, {"generation": 1.0})


def receive(own, others, monkeypatch):
    response_Q = queue.Queue()
    response_Q.put(own)
    return script.receive_rollout(response_Q, Group(others, monkeypatch))


def test_rollout_is_the_shares_of_all_engines_in_their_order(monkeypatch):
    others = [share_of("c", "", 4), share_of("", "", None), share_of("d", "z", 4)]
    found = receive(share_of("ab", "xy", 4), others, monkeypatch)
    assert found == share_of("abcd", "xyz", 4)


def test_shares_of_different_versions_are_no_batch(monkeypatch):
    with pytest.raises(AssertionError, match="versions"):
        receive(share_of("a", "", 4), [share_of("b", "", 3)], monkeypatch)


# ------------------------------------------------------------------------- forward and backward


def small_args(**changes):
    """tiny_args as this script's."""
    names = {field.name for field in fields(Args)}
    given = vars(tiny_args(**changes))
    return Args(**{name: value for name, value in given.items() if name in names})


def small_batch(batch):
    """A batch of ppo_sync.py as this script's."""
    parts = dict(vars(batch))
    sequences = list(zip(parts.pop("prompt_ids"), parts.pop("responses"), strict=True))
    return script.Batch(sequences=sequences, **parts)


def models_of(dtype=torch.float64):
    """The policy and the value model of tiny_policy and tiny_value_model."""
    args = small_args()
    policy = script.PolicyModel(tiny_language_model(), args)
    return policy.to(dtype), script.ValueModel(tiny_classifier(seed=1), 1, args).to(dtype)


def test_token_that_is_also_the_padding_is_no_padding():
    micro_batch = script.collate([0, 1], [([0, 0], [0]), ([0], [3, 0, 0])], "cpu")
    assert micro_batch.mask.tolist() == [[1, 0, 0], [1, 1, 1]]
    assert micro_batch.inputs["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [0, 1, 1, 1, 1]]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_share_rows_of_like_length(world_size):
    generator = random.Random(5)
    lengths = [(generator.randint(1, 50), generator.randint(1, 50)) for _ in range(64)]
    sequences = [([7] * prompt, [8] * size) for prompt, size in lengths]
    rows = generator.sample(range(64), 48)
    mini_batches = [rows[:16], rows[16:]]
    shares = [
        script.cut_micro_batches(one_of_ranks(rank, world_size), mini_batches, sequences, 4)
        for rank in range(world_size)
    ]
    # With DDP each rank needs as many backward passes as the others
    assert {len(share) for share in shares} == {48 // world_size // 4}
    all_rows = [row for share in shares for micro_batch in share for row in micro_batch.rows]
    assert sorted(all_rows) == sorted(rows)
    # None has the long ones, for which the others would wait
    totals = [sum(int(micro_batch.mask.sum()) for micro_batch in share) for share in shares]
    assert max(totals) - min(totals) <= 2 * 50
    for share in shares:
        for part in (share[: 4 // world_size], share[4 // world_size :]):  # of a mini-batch each
            by_size = [len(sequences[row][1]) for micro_batch in part for row in micro_batch.rows]
            assert by_size == sorted(by_size)


@pytest.mark.parametrize("world_size", [1, 3, 16])
def test_outputs_of_all_ranks_are_those_of_each_row_alone(world_size):
    """Of eight rows: some ranks have fewer than others, and of sixteen some have none."""
    batch, (policy, value_model) = make_rollout(), models_of()
    sequences = small_batch(batch).sequences
    logprobs, _ = logprobs_and_entropies(policy.model, batch.prompt_ids, batch.responses, 0.8)
    values = [values_of(value_model.model, *pair).detach() for pair in sequences]
    for model, expected in ((policy, logprobs), (value_model, values)):
        total = torch.zeros_like(batch.mask)
        for rank in range(world_size):
            accelerator = one_of_ranks(rank, world_size)
            micro_batches = script.cut_micro_batches(accelerator, [range(8)], sequences, 3)
            total += script.forward_all(accelerator, model, micro_batches, batch.mask)
        for row, alone in enumerate(expected):
            torch.testing.assert_close(total[row, : len(alone)], alone, rtol=0, atol=1e-6)
            assert not total[row, len(alone) :].any()


def test_reward_model_is_read_at_the_last_token(accelerator):
    model, sequences = tiny_classifier(seed=3), small_batch(make_rollout()).sequences
    responses = [
        Response(Prompt("", "", [2], prompt, None, None, None), ids, [], True)
        for prompt, ids in sequences
    ]
    args = small_args(local_rollout_forward_batch_size=3)
    scores = script.reward_model_scores(
        accelerator, script.ValueModel(model, 0, args), responses, args
    )
    for (prompt, ids), score in zip(sequences, scores, strict=True):
        with torch.no_grad():
            hidden = model.base_model(torch.tensor([prompt + ids])).last_hidden_state[0, -1]
        assert score == pytest.approx(model.score(hidden).item(), abs=1e-5)


def small_gradients(accelerator, models, batch, args, trains_policy=True):
    """One vector of all gradients, and the sums over tokens."""
    for model in models:
        model.zero_grad()
    rows = list(range(len(batch.sequences)))
    sums = script.accumulate_gradients(accelerator, *models, batch, rows, trains_policy, args)
    parameters = [p for model in models for p in model.parameters() if p.grad is not None]
    return torch.cat([p.grad.flatten() for p in parameters]), sums


@pytest.mark.parametrize(
    ("options", "failed", "trains_policy"),
    [
        ({}, [1, 6], True),
        ({"dual_clip": 1.5, "cliprange_value": 0.0}, [], True),
        ({}, [], False),
    ],
)
def test_gradient_is_that_of_ppo_sync_however_it_is_cut(
    options, failed, trains_policy, accelerator
):
    """test_forward.py has ppo_sync.py's against the papers' formulas."""
    theirs = tiny_policy().double(), tiny_value_model().double()
    batch = with_failed_rewards(near_policy(make_rollout(), theirs[0], 0.4), failed)
    expected, expected_sums = gradients(
        accelerator, *theirs, batch, tiny_args(**options), trains_policy
    )
    models, batch = models_of(), small_batch(batch)
    for size in (8, 2):
        args = small_args(**options, per_device_train_batch_size=size)
        found, sums = small_gradients(accelerator, models, batch, args, trains_policy)
        assert (found - expected).norm() < 1e-10 * expected.norm()
        of_ranks = [
            small_gradients(one_of_ranks(rank, 2), models, batch, args, trains_policy)
            for rank in (0, 1)
        ]
        mean = (of_ranks[0][0] + of_ranks[1][0]) / 2  # as DDP averages
        assert (mean - expected).norm() < 1e-10 * expected.norm()
        of_both = {name: of_ranks[0][1][name] + of_ranks[1][1][name] for name in sums}
        assert sums.keys() == expected_sums.keys()
        for name in sums.keys() - {"padded_positions"}:
            value = expected_sums[name]
            assert sums[name].item() == pytest.approx(value, rel=1e-9), name
            assert of_both[name].item() == pytest.approx(value, rel=1e-9), name
    assert sums["padded_positions"] < expected_sums["padded_positions"]


# ----------------------------------------------------------------------------------------- metrics


def test_metrics_of_the_updates_are_means_over_tokens(accelerator):
    models = models_of(torch.float32)
    batch = in_float32(with_failed_rewards(near_policy(make_rollout(), models[0], 0.4), [1]))
    args = small_args(per_device_train_batch_size=3)
    _, sums = small_gradients(accelerator, models, small_batch(batch), args)
    metrics = script.update_metrics(accelerator, sums)
    new, entropies = logprobs_and_entropies(models[0].model, batch.prompt_ids, batch.responses, 0.8)
    kept = [row for row in range(8) if row != 1]
    ratios = torch.cat([(new[row] - batch.logprobs[row, : len(new[row])]).exp() for row in kept])
    entropies = torch.cat([entropies[row] for row in kept])
    assert metrics["val/ratio"] == pytest.approx(ratios.mean().item(), rel=1e-4)
    assert metrics["val/ratio_var"] == pytest.approx(ratios.var(correction=0).item(), rel=1e-3)
    expected = (ratios.log() ** 2 / 2).mean().item()
    assert metrics["policy/approxkl_avg"] == pytest.approx(expected, rel=1e-4)
    assert metrics["policy/entropy_avg"] == pytest.approx(entropies.mean().item(), rel=1e-4)
    loss = metrics["loss/policy_avg"] + metrics["loss/value_avg"]
    assert metrics["objective/loss"] == pytest.approx(loss)
    assert metrics["perf/padding_fraction"] == pytest.approx(
        1 - sums["positions"].item() / sums["padded_positions"].item()
    )
    of_value_model = {"loss/value_avg", "val/clipfrac_avg", "perf/padding_fraction"}
    _, sums = small_gradients(accelerator, models, small_batch(batch), args, trains_policy=False)
    assert script.update_metrics(accelerator, sums).keys() == of_value_model


def test_metrics_of_a_batch_are_those_of_their_definitions():
    batch = with_failed_rewards(make_rollout(), [3])
    generator = torch.Generator().manual_seed(8)
    noise = torch.randn(batch.mask.shape, generator=generator, dtype=torch.float64)
    scores = torch.randn(8, generator=generator, dtype=torch.float64) * batch.scored
    batch = replace(batch, ref_logprobs=batch.logprobs - 0.3 * noise * batch.mask, scores=scores)
    args = Args(kl_estimator="kl2", tis_cap=1.2, mismatch_mask="token", mismatch_mask_range=1.5)
    found = {k: v.item() for k, v in script.batch_metrics(small_batch(batch), 0.7, args).items()}

    inside, known = batch.mask.bool(), batch.scored.bool()
    ratios = (batch.logprobs - batch.sampler_logprobs).exp()[inside]
    d = (batch.logprobs - batch.ref_logprobs) * batch.mask
    penalty = -0.7 * (d**2 / 2).sum() / 8
    in_loss = batch.loss_mask.bool()
    returns, values = batch.returns[in_loss], batch.values[in_loss]
    limit = math.log(1.5)
    expected = {
        "objective/kl": d.sum() / 8,
        "objective/non_score_reward": penalty,
        "objective/rlhf_reward": scores[known].mean() + penalty,
        "objective/scores_std": scores[known].std(correction=0),
        "objective/entropy": -batch.logprobs[inside].sum() / 8,
        "val/sequence_lengths": torch.tensor(sum(map(len, batch.responses)) / 8),
        "val/explained_variance": 1 - (returns - values).var() / returns.var(),
        "mismatch/logprob_diff_mean": ratios.log().abs().mean(),
        "mismatch/logprob_diff_max": ratios.log().abs().max(),
        "mismatch/kl": (ratios - 1 - ratios.log()).mean(),
        "mismatch/ess": ratios.mean() ** 2 / (ratios**2).mean(),
        "mismatch/tis_clipfrac": (ratios > 1.2).double().mean(),
        "mismatch/masked": (ratios.log().abs() > limit).double().mean(),
    }
    assert found == pytest.approx({name: value.item() for name, value in expected.items()})
    assert 0 < found["mismatch/tis_clipfrac"] < 1 and 0 < found["mismatch/masked"] < 1


# ------------------------------------------------------------------------------------ saved models


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.6, "top_p": 0.9, "top_k": 20},
        {"do_sample": False, "temperature": 0.6},
        {"do_sample": True, "repetition_penalty": 1.1, "eos_token_id": [1, 2]},
        {"max_new_tokens": 5, "a_field_of_the_users": "kept"},
        None,
    ],
)
def test_end_tokens_alone_change_in_a_generation_config(sampling, assets, tokenizer, tmp_path):
    # transformers loads some of these with a warning, and refuses to save them
    shutil.copytree(assets / "model", tmp_path / "model")
    path = tmp_path / "model" / "generation_config.json"
    expected = {"eos_token_id": [STOP, 11]}
    if sampling is None:
        path.unlink()
    else:
        path.write_text(json.dumps(json.loads(path.read_text()) | sampling))
        expected = json.loads(path.read_text()) | expected
    args = small_args(stop_token_ids=(STOP, 11))
    model = script.load_model(
        script.AutoModelForCausalLM, str(tmp_path / "model"), args, trained=True
    )
    script.save_model(SimpleNamespace(model=model), tokenizer, tmp_path / "saved", args)
    saved = json.loads((tmp_path / "saved" / "generation_config.json").read_text())
    if sampling is None:
        saved = {"eos_token_id": saved["eos_token_id"]}
    expected.pop("transformers_version", None)
    saved.pop("transformers_version", None)
    assert saved == expected
    GenerationConfig.from_pretrained(tmp_path / "saved")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "saved"]
