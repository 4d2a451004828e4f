"""Prompts from files, and which of them a step takes."""

import copy
import json
from collections import Counter

import pytest
from helpers.files import write_rows
from helpers.rollouts import tiny_args
from transformers import PreTrainedTokenizerFast

import ppo_sync
from ppo_sync import Args, stable_hash

# ------------------------------------------------------------------------------------------- files


@pytest.fixture(scope="module")
def bos_tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    vocab = {
        "<pad>": 0,
        "<end>": 1,
        "<bos>": 2,
        "<unk>": 3,
        "<user>": 4,
        "<assistant>": 5,
        "a": 6,
        "b": 7,
    }
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 2)]
    )
    template = (
        "<bos>{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} {% endfor %}<assistant>"
    )
    special = {
        "pad_token": "<pad>",
        "eos_token": "<end>",
        "bos_token": "<bos>",
        "unk_token": "<unk>",
    }
    extra = {"additional_special_tokens": ["<user>", "<assistant>"], "chat_template": template}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special, **extra)


def prompt_row(prompt, truth="1"):
    return {
        "prompt": prompt,
        "data_source": "debug/sorting",
        "reward_model": {"ground_truth": truth},
    }


def test_prompts_have_one_bos(bos_tokenizer, tmp_path):
    path = str(write_rows(tmp_path / "text.parquet", [prompt_row("a b")]))
    (row,) = ppo_sync.prepare_prompts(path, "train", bos_tokenizer, bos_tokenizer, tiny_args())
    assert row.token_ids == row.reward_model_token_ids == [2, 6, 7]
    messages = [{"role": "user", "content": "a b"}]
    path = str(write_rows(tmp_path / "chat.parquet", [prompt_row(messages)]))
    rows = ppo_sync.prepare_prompts(path, "train", bos_tokenizer, bos_tokenizer, tiny_args())
    assert rows[0].token_ids == [2, 4, 6, 7, 5]
    assert rows[0].text == "<bos><user> a b <assistant>"


def test_reward_model_sees_its_own_template(bos_tokenizer, tmp_path):
    other = copy.deepcopy(bos_tokenizer)
    other.chat_template = (
        "<bos>{% for m in messages %}{{ m['content'] }} <{{ m['role'] }}> {% endfor %}"
    )
    messages = [{"role": "user", "content": "a b"}]
    path = str(write_rows(tmp_path / "chat.parquet", [prompt_row(messages)]))
    (row,) = ppo_sync.prepare_prompts(path, "train", bos_tokenizer, other, tiny_args())
    assert (row.token_ids, row.reward_model_token_ids) == ([2, 4, 6, 7, 5], [2, 6, 7, 4])


def test_columns_of_open_instruct_are_read(bos_tokenizer, tmp_path):
    row = {"messages": [{"role": "user", "content": "a"}], "ground_truth": "72", "dataset": "gsm8k"}
    path = str(write_rows(tmp_path / "rlvr.parquet", [row]))
    (row,) = ppo_sync.prepare_prompts(path, "train", bos_tokenizer, bos_tokenizer, tiny_args())
    assert (row.token_ids, row.ground_truth, row.data_source) == ([2, 4, 6, 5], "72", "gsm8k")


def test_ground_truth_that_is_for_a_reward_model_is_none(bos_tokenizer, tmp_path):
    rows = [
        prompt_row("a"),
        prompt_row("b") | {"reward_model": {"style": "model", "ground_truth": "the chosen one"}},
    ]
    path = write_rows(tmp_path / "mixed.jsonl", rows)
    args = tiny_args(apply_verifiable_reward=False)
    arguments = (str(path), "test", bos_tokenizer, bos_tokenizer, args)
    kept = ppo_sync.prepare_prompts(*arguments, is_eval=True)
    assert [row.ground_truth for row in kept] == ["1", None]
    # Training against a reward model: no rule is asked
    kept = ppo_sync.prepare_prompts(*arguments)
    assert [row.ground_truth for row in kept] == [None, None]


def test_answer_at_the_end_of_the_messages_is_not_in_the_prompt(bos_tokenizer, tmp_path):
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows = [{"messages": turns[:size], "ground_truth": "72", "dataset": "gsm8k"} for size in (2, 1)]
    rows.append({"messages": [*turns, turns[0]], "ground_truth": "72", "dataset": "gsm8k"})
    path = str(write_rows(tmp_path / "rlvr.parquet", rows))
    kept = ppo_sync.prepare_prompts(path, "train", bos_tokenizer, bos_tokenizer, tiny_args())
    assert [row.token_ids for row in kept] == [[2, 4, 6, 5], [2, 4, 6, 5], [2, 4, 6, 5, 7, 4, 6, 5]]


def test_ground_truth_of_verls_hellaswag_is_used(bos_tokenizer, tmp_path):
    # Its style is "model" although a rule scores it: `eval` says so.
    truth = {
        "style": "model",
        "eval": "multiple_choice",
        "ground_truth": "2",
        "choices": list("abab"),
    }
    row = {
        "data_source": "Rowan/hellaswag",
        "prompt": [{"role": "user", "content": "a"}],
        "ability": "nlp",
    }
    row |= {"reward_model": truth, "extra_info": {"split": "train", "index": 7}}
    path = str(write_rows(tmp_path / "hellaswag.parquet", [row]))
    (kept,) = ppo_sync.prepare_prompts(path, "train", bos_tokenizer, bos_tokenizer, tiny_args())
    assert (kept.ground_truth, kept.data_source, kept.extra_info["index"]) == (
        "2",
        "Rowan/hellaswag",
        7,
    )


def test_training_on_ground_truths_that_are_for_a_reward_model_is_refused(
    bos_tokenizer, tmp_path, capsys
):
    row = prompt_row("a") | {"reward_model": {"style": "model", "ground_truth": "b"}}
    path = str(write_rows(tmp_path / "hh.parquet", [row]))
    with pytest.raises(SystemExit) as stop:
        ppo_sync.prepare_prompts(path, "train", bos_tokenizer, bos_tokenizer, tiny_args())
    assert stop.value.code == 2
    assert "hh.parquet, row 0: `reward_model.ground_truth` is missing" in capsys.readouterr().err


def for_a_reward_model(prompt):
    return prompt_row(prompt) | {"reward_model": {"style": "model", "ground_truth": "chosen"}}


@pytest.mark.parametrize("first", ["rule", "reward model"])
def test_rows_of_both_kinds_may_stand_in_one_file(first, bos_tokenizer, tmp_path):
    rows = [prompt_row("a"), for_a_reward_model("b")]
    truths = ["1", None]
    if first == "reward model":
        rows, truths = rows[::-1], truths[::-1]
    path = str(write_rows(tmp_path / "mixed.jsonl", rows))
    args = tiny_args(reward_model_path="a model")
    for is_eval in (False, True):
        kept = ppo_sync.prepare_prompts(path, "train", bos_tokenizer, bos_tokenizer, args, is_eval)
        assert [row.ground_truth for row in kept] == truths


def test_held_out_rows_may_all_be_for_the_reward_model(bos_tokenizer, tmp_path):
    path = str(write_rows(tmp_path / "hh.jsonl", [for_a_reward_model("a")] * 2))
    arguments = (path, "test", bos_tokenizer, bos_tokenizer)
    args = tiny_args(reward_model_path="a model")
    kept = ppo_sync.prepare_prompts(*arguments, args, is_eval=True)
    assert [row.ground_truth for row in kept] == [None, None]
    with pytest.raises(SystemExit):
        ppo_sync.prepare_prompts(*arguments, args)
    with pytest.raises(SystemExit):
        ppo_sync.prepare_prompts(*arguments, tiny_args(), is_eval=True)


def test_long_prompts_are_dropped_and_counted(bos_tokenizer, tmp_path, capsys):
    rows = [prompt_row(" ".join("a" * n), truth=str(n)) for n in (1, 5, 3, 4, 9)]
    path = str(write_rows(tmp_path / "data.parquet", rows))
    kept = ppo_sync.prepare_prompts(
        path, "train", bos_tokenizer, bos_tokenizer, tiny_args(max_prompt_token_length=5)
    )
    assert [(row.row, row.ground_truth, len(row.token_ids)) for row in kept] == [
        (f"{path}, row 0", "1", 2),
        (f"{path}, row 2", "3", 4),
        (f"{path}, row 3", "4", 5),
    ]
    assert "dropped 2 of 5" in capsys.readouterr().out


def test_jsonl_is_read_as_well(bos_tokenizer, tmp_path):
    path = write_rows(tmp_path / "data.jsonl", [prompt_row("a") | {"extra_info": {"k": 4}}])
    (row,) = ppo_sync.prepare_prompts(str(path), "train", bos_tokenizer, bos_tokenizer, tiny_args())
    assert (row.token_ids, row.ground_truth, row.extra_info) == ([2, 6], "1", {"k": 4})


def test_line_separators_inside_json_are_not_line_ends(bos_tokenizer, tmp_path):
    path = tmp_path / "data.jsonl"
    row = prompt_row("a\u2028b") | {"extra_info": {"text": "c\u0085d"}}
    path.write_text(json.dumps(row, ensure_ascii=False) + "\n\n", encoding="utf-8")
    (row,) = ppo_sync.prepare_prompts(str(path), "train", bos_tokenizer, bos_tokenizer, tiny_args())
    assert row.extra_info["text"] == "c\u0085d"


# --------------------------------------------------------------------------- the prompts of a step


@pytest.mark.parametrize("batch_size", [1, 4, 7, 10, 25])
def test_every_prompt_comes_once_per_pass(batch_size):
    drawn = []
    while len(drawn) < 100:
        drawn += ppo_sync.draw_prompts(10, len(drawn), batch_size, seed=3)
    passes = [drawn[i : i + 10] for i in range(0, 100, 10)]
    assert all(sorted(one) == list(range(10)) for one in passes)
    assert len({tuple(one) for one in passes}) > 5  # reshuffled


def test_prompts_do_not_depend_on_the_batch_size():
    whole = ppo_sync.draw_prompts(10, 0, 40, seed=3)
    assert [
        i for start in range(0, 40, 8) for i in ppo_sync.draw_prompts(10, start, 8, seed=3)
    ] == whole


def test_prompts_differ_between_seeds():
    assert ppo_sync.draw_prompts(100, 0, 100, seed=1) != ppo_sync.draw_prompts(100, 0, 100, seed=2)


def test_without_evaluations_there_is_the_one_after_training():
    args = ppo_sync.fill_in(Args(total_episodes=64 * 4, num_evals=0))
    requests = [ppo_sync.make_request(step, ["a"], ["x"], args) for step in (1, 2, 3, 4, 5)]
    assert [len(request.eval_prompts) for request in requests] == [0, 0, 0, 0, 1]


def test_requests_follow_from_the_step():
    """Prompts in the order of the run, their samples side by side, and new seeds in every step."""
    args = ppo_sync.fill_in(
        Args(
            total_episodes=24,
            local_rollout_batch_size=4,
            number_samples_per_prompt=2,
            local_mini_batch_size=8,
            num_evals=1,
        )
    )
    train, held_out = list("abcdefgh"), list("xyz")
    requests = [ppo_sync.make_request(step, train, held_out, args) for step in (1, 2, 3, 4)]
    drawn = [request.prompts for request in requests]
    assert all(prompts[::2] == prompts[1::2] for prompts in drawn)
    assert sorted(drawn[0][::2] + drawn[1][::2]) == train  # a pass
    assert drawn[3] == [] and requests[3].training_step == 4
    seeds = [seed for request in requests for seed in request.seeds]
    assert len(seeds) == len(set(seeds)) == 24
    assert [request.eval_prompts for request in requests] == [held_out, [], [], held_out]
    assert (
        requests[0].eval_seeds == requests[3].eval_seeds and len(set(requests[0].eval_seeds)) == 3
    )


def test_seeds_of_neighbours_do_not_collide():
    hashes = {stable_hash(seed, "episode", i) for seed in range(20) for i in range(2000)}
    assert len(hashes) == 40_000
    assert all(0 <= number < 2**63 for number in hashes)
    assert stable_hash(1, 23) != stable_hash(12, 3)
    bits = Counter(bit for i in range(1000) for bit in range(63) if stable_hash(1, i) >> bit & 1)
    assert all(400 < bits[bit] < 600 for bit in range(63))
