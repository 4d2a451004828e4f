"""Prompts from files, and which of them a step takes."""

import itertools
import json
from datetime import date

import pytest
from helpers.files import read_json_lines, write_configurations, write_rows
from tokenizers import Tokenizer, decoders, models, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import ppo_vllm_async as script
from ppo_vllm_async import Args, stable_hash

# ------------------------------------------------------------------------------------------- files


@pytest.fixture(scope="module")
def tokenizer(assets):
    return AutoTokenizer.from_pretrained(assets / "model")


def load(path, tokenizer, is_eval=False, **changes):
    return script.load_prompts(str(path), None, "train", tokenizer, Args(**changes), is_eval)


RULE = {"reward_model": {"style": "rule", "ground_truth": "1"}, "data_source": "debug/sorting"}
FOR_A_MODEL = {"reward_model": {"style": "model", "ground_truth": "the chosen one"}}
HELLASWAG = {
    "reward_model": {"style": "model", "eval": "multiple_choice", "ground_truth": "2"},
    "data_source": "Rowan/hellaswag",
}
CHAT = [{"role": "user", "content": "5="}, {"role": "assistant", "content": "6"}]
OPEN_INSTRUCT = {"messages": CHAT, "ground_truth": "72", "dataset": "gsm8k"}
AGAINST_A_MODEL = {"reward_model_path": "m"}
WITHOUT_RULES = {"reward_model_path": "m", "apply_verifiable_reward": False}

SORTING, ASKED = "debug/sorting", {"prompt": "5="}
AT_THE_TOP = {"ground_truth": "7", "data_source": SORTING}
# A row, arguments, whether it is held out, its ground truth and its data source
ROWS = [
    (ASKED | RULE, {}, False, "1", SORTING),  # verl's
    (OPEN_INSTRUCT, {}, False, "72", "gsm8k"),
    ({"prompt": CHAT} | HELLASWAG, {"reward_fn": "f"}, False, "2", "Rowan/hellaswag"),
    (ASKED | FOR_A_MODEL, AGAINST_A_MODEL, False, None, None),
    (ASKED | RULE, AGAINST_A_MODEL, False, "1", SORTING),
    (ASKED | RULE, WITHOUT_RULES, False, None, SORTING),
    (ASKED | RULE, WITHOUT_RULES, True, "1", SORTING),  # held-out rows have theirs
    # Half of one convention, half of another
    ({"messages": CHAT} | RULE, {}, False, "1", SORTING),
    (ASKED | AT_THE_TOP, {}, False, "7", SORTING),
    (ASKED | RULE | AT_THE_TOP, {}, False, "7", SORTING),
]


def test_row_has_the_ground_truth_that_its_columns_say(tokenizer, tmp_path):
    for row, changes, is_eval, *expected in ROWS:
        for suffix in ("parquet", "jsonl"):
            path = write_rows(tmp_path / f"data.{suffix}", [row | {"extra_info": {"k": 4}}])
            (prompt,) = load(path, tokenizer, is_eval=is_eval, **changes)
            assert [prompt.ground_truth, prompt.data_source] == expected, row
            assert (prompt.origin, prompt.extra_info) == (f"{path}, row 0", {"k": 4})
            assert prompt.token_ids == tokenizer(prompt.text)["input_ids"]


def test_values_of_json_lines_are_as_they_stand_there_in_utf_8(tmp_path):
    """A reader of tables gives a column one type: "01" and 2 became 1 and 2, a date a datetime."""
    rows = [
        {"prompt": "5=\u00e9", "ground_truth": "01", "day": "2024-01-01"},
        {"prompt": "6=\u2028\u0085", "ground_truth": 2, "day": "2024-01-02"},
    ]
    path = tmp_path / "rows.jsonl"
    text = "\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    path.write_bytes(text.encode())
    assert script.load_rows(str(path), None, "train") == rows
    path.write_bytes(text.encode() + b'\n{"prompt": "5=\xe9"}\n')
    with pytest.raises(ValueError, match="row 2: UnicodeDecodeError"):
        script.load_rows(str(path), None, None)


def characters(template=None, begin=None):
    """A tokenizer of single characters, which may put one before each text."""
    letters = {letter: i for i, letter in enumerate(map(chr, range(127)))}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    if begin:
        tokens = [(begin, letters[begin])]
        before = processors.TemplateProcessing(single=f"{begin} $A", special_tokens=tokens)
        tokenizer.post_processor = before
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template)


BEGINS = "^{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}<assistant>"
USER, ASSISTANT = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})
# A prompt, and what its tokens are
PROMPTS = [
    ("a b", "^a b"),
    ([USER], "^<user>a<assistant>"),
    ([USER, ASSISTANT], "^<user>a<assistant>"),  # an answer at the end is not in the prompt
    ([USER, ASSISTANT, USER], "^<user>a<assistant>b<user>a<assistant>"),
]


def test_prompts_have_one_bos_and_no_answer(tmp_path):
    path = write_rows(tmp_path / "data.jsonl", [{"prompt": prompt} | RULE for prompt, _ in PROMPTS])
    rows = load(path, characters(template=BEGINS, begin="^"))
    assert ["".join(map(chr, row.token_ids)) for row in rows] == [text for _, text in PROMPTS]


def test_long_and_empty_prompts_are_dropped_and_counted(tmp_path, capsys):
    """Also where the text of nothing gets a begin token, or a template's."""
    asked = [[ASSISTANT, USER | {"content": text}] for text in ("", " \n", None)]
    prompts = ["a", "a b a b a", "", "b a", " ", *asked, [ASSISTANT]]
    path = write_rows(tmp_path / "data.jsonl", [{"prompt": prompt} | RULE for prompt in prompts])
    tokenizer = characters(template=BEGINS, begin="^")
    kept = load(path, tokenizer, max_prompt_token_length=4)  # the tokens of the fourth
    assert [prompt.origin[-1] for prompt in kept] == ["0", "3"]
    assert (
        "data.jsonl: 2 prompts; 6 are empty, and 1 are longer than --max_prompt"
        in capsys.readouterr().out
    )
    kept = load(path, tokenizer, max_prompt_token_length=50)
    assert [prompt.origin[-1] for prompt in kept] == ["0", "1", "3"]


# A template that writes all that it is given
TEMPLATE = """{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}
{%- if m.role in ('user', 'system', 'assistant', 'tool') %}<{{ m.role }}
{%- if 'name' in m %} {{ m.name }}{% endif %}
{%- if 'tool_calls' in m %} {{ m.tool_calls | length }} calls{% endif %}>
{%- if m.role == 'assistant' %}{{ m.content.split('</think>')[-1] }}
{%- elif m.role == 'tool' %}{{ m.content[0] }}
{%- elif 'content' in m %}{{ m.content | trim }}{% endif %}{% endif %}{% endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}
{%- if enable_thinking is defined and not enable_thinking %}<no thinking>{% endif %}"""
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"a": {"type": "int"}}}}


def render(row, tmp_path, suffix):
    """The prompt that the model reads, of a row in a file beside another one."""
    # Of which Arrow takes the keys: in the other row they are null
    message = {"role": "user", "content": "a", "name": "me", "tool_calls": [{"id": "1"}]}
    other = {"prompt": [message], "chat_template_kwargs": {"enable_thinking": True, "other": 1}}
    other["tools"] = [{"type": "f", "function": {"name": "g", "parameters": {"y": {"type": "s"}}}}]
    for name in ("tools", "chat_template_kwargs"):
        if isinstance(row.get(name), str):  # a column of parquet has one type
            other[name] = json.dumps(other[name])
    path = write_rows(tmp_path / f"data.{suffix}", [row | RULE, other | RULE])
    prompt, _ = load(path, characters(template=TEMPLATE))
    return prompt.text


USER_SAYS = {"role": "user", "content": " 5= "}
NULLS, SWITCH = {"name": None, "tool_calls": None}, {"enable_thinking": False}
AS_JSON = {"tools": json.dumps([TOOL]), "chat_template_kwargs": json.dumps(SWITCH)}
SWITCHED = f"{json.dumps([TOOL])}<user>5=<assistant><no thinking>"
THOUGHT = {"role": "assistant", "content": "<think>so</think>b"}
PAGE = {"role": "tool", "content": "a long page", "name": "web"}
PREFILL = {"role": "assistant", "content": "<think>"}
# Messages and columns beside them, and what the model reads
RENDERED = [
    ([USER_SAYS], {}, "<user>5=<assistant>"),  # without the keys that Arrow adds
    ([USER_SAYS | NULLS], {}, "<user>5=<assistant>"),
    ([USER_SAYS], {"tools": [TOOL], "chat_template_kwargs": SWITCH}, SWITCHED),
    ([USER_SAYS], AS_JSON, SWITCHED),  # as TRL has them
    ([USER_SAYS], {"chat_template_kwargs": {"other": 2}}, "<user>5=<assistant>"),
    # An older answer may lose its thoughts, and so may a tool
    ([THOUGHT, USER_SAYS], {}, "<assistant>b<user>5=<assistant>"),
    ([USER_SAYS, PAGE], {}, "<user>5=<tool web>a<assistant>"),
    ([USER_SAYS, PREFILL], {}, "<user>5=<assistant>"),
]


def test_model_reads_what_the_row_says(tmp_path):
    for messages, columns, text in RENDERED:
        for suffix in ("parquet", "jsonl"):
            assert render({"prompt": messages} | columns, tmp_path, suffix) == text, columns


def test_day_that_a_template_writes_is_that_of_the_runs_start(tokenizer, tmp_path):
    tokenizer.chat_template = "{{ strftime_now('%Y%m%d') }}" + TEMPLATE
    path = write_rows(tmp_path / "data.jsonl", [{"prompt": [USER_SAYS]} | RULE])
    (prompt,) = load(path, tokenizer, start_day="2024-07-26")
    assert prompt.text == "20240726<user>5=<assistant>"
    (prompt,) = load(path, tokenizer)  # of a new run it is today
    assert prompt.text.partition("<")[0] == date.today().strftime("%Y%m%d")


# The files of a folder, a configuration and a split, and the files whose rows are read
FOLDERS = [
    ("a.jsonl b/c.parquet d.jsonl", None, "train", "a.jsonl b/c.parquet d.jsonl"),
    ("a.jsonl b/c.parquet", "b", "train", "b/c.parquet"),
    ("a.jsonl b.csv .ipynb_checkpoints/a.jsonl", None, "test", "a.jsonl"),
    ("x/train.parquet x/test.parquet y/train.parquet", "x", "train", "x/train.parquet"),
    ("test/x.jsonl train/0.jsonl train/1.jsonl", None, "train", "train/0.jsonl train/1.jsonl"),
    ("validation.jsonl gsm8k_train.jsonl", None, "validation", "validation.jsonl"),
    # Else a run would train on held-out rows, or be evaluated on what it trains on
    ("train.jsonl", None, "test", ""),
    ("test.jsonl more.jsonl", None, "train", ""),
]


def test_rows_of_a_folder_are_those_of_its_files_by_the_split_in_their_names(tmp_path):
    """`datasets` would read the files of one split or one format, and ignore the others."""
    for number, (files, config, split, read) in enumerate(FOLDERS):
        folder, rows = tmp_path / str(number), {}
        for file in files.split():
            # The columns of each file have another form
            rows[file] = [{"prompt": file, "extra_info": {file: 1}}]
            write_rows(folder / file, rows[file])
        expected = [row for file in read.split() for row in rows[file]]
        assert script.load_rows(str(folder), config, split) == expected, files


def test_held_out_prompts_are_the_same_for_every_seed(tokenizer, tmp_path):
    path = str(write_rows(tmp_path / "rows.jsonl", [{"prompt": f"{i}="} | RULE for i in range(20)]))
    args = {"dataset": path, "eval_dataset": path, "num_eval_prompts": 5}
    first, second = (script.load_datasets(tokenizer, Args(**args, seed=seed))[1] for seed in (1, 2))
    assert len(first) == 5 and first == second


def test_run_trains_on_one_configuration_and_is_evaluated_on_another(run_main, tmp_path):
    rows = {"main": [{"prompt": "1="} | RULE] * 4, "socratic": [{"prompt": "12="} | RULE] * 4}
    folder = write_configurations(tmp_path, rows)
    options = {"dataset": folder, "dataset_config": "main", "eval_dataset": folder}
    options |= {"eval_dataset_config": "socratic", "eval_dataset_split": "train", "num_evals": 1}
    run = run_main("ppo_sync.py", **options)
    for file, prompt in (("rollouts", "1="), ("samples", "12=")):
        samples = read_json_lines(run.run_dir / f"{file}.jsonl")
        assert {sample["prompt"] for sample in samples} == {prompt}


# --------------------------------------------------------------------------- the prompts of a step


def test_every_prompt_comes_once_per_pass_whatever_the_batch_size():
    expected = script.draw_prompts(10, 0, 100, seed=3)
    passes = [expected[i : i + 10] for i in range(0, 100, 10)]
    assert all(sorted(one) == list(range(10)) for one in passes)
    assert len({tuple(one) for one in passes}) > 5  # reshuffled
    assert expected != script.draw_prompts(10, 0, 100, seed=4)
    for batch_size in (1, 4, 7, 10, 25):
        drawn = []
        while len(drawn) < 100:
            drawn += script.draw_prompts(10, len(drawn), batch_size, seed=3)
        assert drawn[:100] == expected


STEP = {"local_rollout_batch_size": 4, "number_samples_per_prompt": 2, "local_mini_batch_size": 8}


def requests_of(steps, num_evals, prompts, held_out):
    args = Args(total_episodes=8 * steps, num_evals=num_evals, **STEP)
    args = script.fill_in(args, world_size=1)
    return [script.make_request(step + 1, prompts, held_out, args) for step in range(steps + 1)]


def test_requests_follow_from_the_step():
    """Prompts in the order of the run, their samples side by side, and new seeds in every step."""
    requests = requests_of(4, 1, list("abcdefgh"), list("xyz"))
    drawn = [request.prompts for request in requests]
    assert all(prompts[::2] == prompts[1::2] for prompts in drawn)
    assert "".join(sorted(drawn[0][::2] + drawn[1][::2])) == "abcdefgh"  # a pass
    assert drawn[4] == []
    seeds = [seed for request in requests for seed in request.seeds]
    assert len(seeds) == len(set(seeds)) == 32
    assert [request.eval_prompts for request in requests] == [list("xyz"), [], [], [], list("xyz")]


def test_evaluations_are_as_many_as_asked_and_evenly_spread():
    """None is before the last step: its line of metrics has the last evaluation.

    And at most every second step has one: steps 1 and 2 of an async script are sampled with
    the same weights, which need not be evaluated twice.
    """
    for steps, count in itertools.product((1, 2, 3, 4, 7, 12, 23, 40), range(21)):
        requests = requests_of(steps, count, [0], [1])
        *found, last = [step for step, request in enumerate(requests) if request.eval_prompts]
        assert last == steps
        assert len(found) == min(count, steps // 2) and steps - 1 not in found
        assert found[:1] == [0] * min(1, len(found))
        gaps = {later - step for step, later in itertools.pairwise(found)}
        assert not gaps or 1 < min(gaps) >= max(gaps) - 1


def test_seeds_of_neighbours_do_not_collide():
    hashes = {stable_hash(seed, "episode", i) for seed in range(20) for i in range(2000)}
    assert len(hashes) == 40_000 and all(0 <= number < 2**63 for number in hashes)
    assert stable_hash(1, 23) != stable_hash(12, 3)
