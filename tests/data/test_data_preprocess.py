"""scripts/data_preprocess: what they write, what they drop, and that PPO can load it."""

import json
import runpy
import sys

import datasets
import if_constraints
import pyarrow.parquet
import pytest
from helpers import REPO
from helpers.files import write_rows, write_text

import ppo_vllm_async

FOLDER = REPO / "scripts" / "data_preprocess"
GSM8K = [
    {"question": "How many beans?", "answer": "2*600=<<2*600=1200>>1200.\n#### 1,200"},
    {"question": "Ben owes 7 and pays 4. What has he?", "answer": "4-7=-3\n#### -3"},
    {"question": "What is the price?", "answer": "Nobody knows."},
    {"question": None, "answer": "#### 4"},
    {"question": "How long is it?", "answer": "It is 1.5 m, not #### 2, so\n#### 1.5"},
    {"question": " ", "answer": "#### 4"},
]
MATH = [
    {"problem": "What is $1/4+1/4$?", "solution": r"Not $\boxed{1}$, but $\boxed{\frac{1}{2}}$."},
    {"problem": "Prove it.", "solution": "Obvious."},
    {"problem": "Which set?", "solution": r"It is \boxed {\left\{1, \{2\}\\}, you {see}."},
]
ENDINGS = ["puts on a hat.", "[title] Boil it. [step] For long.", "flies away.", "sings."]
CHOICES = ["puts on a hat.", "Boil it. For long.", "flies away.", "sings."]
CONTEXT = "[header] How to cook [title] Start. she"
HELLASWAG = [
    {"activity_label": "Cooking", "ctx": CONTEXT, "endings": ENDINGS, "label": label}
    for label in ("1", "0", "", "4", None)
]
DIALOGUE = "\n\nHuman: Hello\n\nAssistant: Hi.\n\nWhat now?"
DIALOGUE += "\n\nHuman: Tell me: Human: or not?\n\nAssistant:"
MESSAGES = [
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi.\n\nWhat now?"},
    {"role": "user", "content": "Tell me: Human: or not?"},
]
HH = [
    {"prompt": DIALOGUE, "chosen": " Yes.", "rejected": " No."},
    {"prompt": "\n\nHuman: Who?\n\nAssistant:", "chosen": " Me.", "rejected": " Me."},
    {"prompt": "\n\nHuman: Why?\n\nAssistant:", "chosen": " ", "rejected": " So."},
    {"prompt": "Why?", "chosen": " So.", "rejected": " Not."},
    {"prompt": DIALOGUE, "chosen": "Yes.", "rejected": " No.\n\nHuman: Oh.\n\nAssistant: Yes."},
    {"prompt": DIALOGUE, "chosen": "Yes.", "rejected": None},
]
ROWS = {"gsm8k": GSM8K, "math": MATH, "hellaswag": HELLASWAG, "full_hh_rlhf": HH}


def read(path):
    return pyarrow.parquet.read_table(path).to_pylist()


@pytest.fixture
def preprocess(tmp_path, monkeypatch, capfd):
    """preprocess("gsm8k", *flags) -> (exit status, lines on stdout, lines on stderr)."""

    def run(name, *flags):
        flags = [str(flag) for flag in ("--local_save_dir", tmp_path / "out", *flags)]
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *flags])
        monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])  # as Python starts a program
        capfd.readouterr()
        status = 0
        try:
            runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
        except SystemExit as stop:
            status = stop.code
        assert str(FOLDER) not in sys.path
        captured = capfd.readouterr()
        return status, captured.out.splitlines(), captured.err.splitlines()

    return run


@pytest.fixture
def convert(preprocess, tmp_path):
    """convert("gsm8k", rows) -> (rows written, what was said of them)."""

    def convert(name, rows, split="rl"):
        path = write_rows(tmp_path / "train.jsonl", rows)
        flags = ["--split", split] if name == "full_hh_rlhf" else []
        status, said, errors = preprocess(name, "--local_dataset_path", path, *flags)
        assert status == 0, errors
        return read(tmp_path / "out" / "train.parquet"), said[0]

    return convert


def test_gsm8k(convert):
    rows, said = convert("gsm8k", GSM8K)
    why = "2: no text in `question`; 1: no number after ####"
    assert said == f"train: 6 rows, 3 kept, 3 dropped ({why})"
    truths = [row["reward_model"]["ground_truth"] for row in rows]
    assert truths == ["1200", "-3", "1.5"]
    # The row on the hub, dropped ones counted
    assert [row["extra_info"]["index"] for row in rows] == [0, 1, 4]
    instruction = 'Think step by step, and write the final answer after "####".'
    assert rows[0] == {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"How many beans? {instruction}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "1200"},
        "extra_info": {"split": "train", "index": 0, **GSM8K[0]},
    }


def test_math(convert):
    rows, said = convert("math", MATH)
    assert said == r"train: 3 rows, 2 kept, 1 dropped (1: no \boxed{})"
    assert rows[0]["reward_model"] == {"style": "rule", "ground_truth": r"\frac{1}{2}"}
    assert rows[1]["reward_model"]["ground_truth"] == r"\left\{1, \{2\}\\"
    assert rows[1]["extra_info"] == {"split": "train", "index": 2}
    (message,) = rows[0]["prompt"]
    assert message["content"].startswith("What is $1/4+1/4$? ")
    assert message["content"].endswith(r"put the final answer in \boxed{}.")


def test_hellaswag_asks_the_question_and_drops_rows_without_label(convert):
    rows, said = convert("hellaswag", HELLASWAG)
    why = "2: no label; 1: `label` is not the index of an ending"
    assert said == f"train: 5 rows, 2 kept, 3 dropped ({why})"
    truths = [row["reward_model"] for row in rows]
    assert truths[0] == {"style": "rule", "ground_truth": "1", "choices": CHOICES}
    assert truths[1]["ground_truth"] == "0"
    first, *lines = rows[0]["prompt"][0]["content"].splitlines()
    assert first == "Cooking: How to cook. Start. she"
    assert lines[1:5] == [f"({index}) {choice}" for index, choice in enumerate(CHOICES)]
    assert lines[-1].startswith("Which ending")


def test_hh_as_prompts_pairs_and_demonstrations(convert):
    """A row without a rejected response is broken, if nothing else of it is."""
    prompts, said = convert("full_hh_rlhf", HH)
    assert said.startswith("train: 6 rows, 3 kept, 3 dropped (1: ")
    assert "no text in `chosen`" in said and "no text in `rejected`" in said
    assert "the prompt does not begin with Human:" in said
    assert prompts[0] == {
        "data_source": "Dahoas/full-hh-rlhf",
        "prompt": MESSAGES,
        "ability": "alignment",
        "reward_model": {"style": "model", "ground_truth": "Yes."},
        "extra_info": {"split": "train", "index": 0},
    }
    pairs, said = convert("full_hh_rlhf", HH, "rm")
    assert pairs == [{"prompt": MESSAGES, "chosen": "Yes.", "rejected": "No."}]
    assert "`chosen` and `rejected` are the same" in said
    assert "1: further turns in `rejected`" in said
    demonstrations, _ = convert("full_hh_rlhf", HH, "sft")
    assert [row["response"] for row in demonstrations] == ["Yes.", "Me.", "Yes."]


@pytest.mark.parametrize("split", ["rl", "rm", "sft"])
def test_hh_of_its_own_form_gives_what_the_split_one_gives(split, convert):
    """Anthropic's texts are dialogues; an answer to another question is no pair."""
    own = [{name: HH[0]["prompt"] + row[name] for name in ("chosen", "rejected")} for row in HH[:2]]
    two = own[0] | {"rejected": "\n\nHuman: Who?\n\nAssistant: No."}
    theirs = [row | {"prompt": HH[0]["prompt"]} for row in HH[:2]]
    expected, _ = convert("full_hh_rlhf", theirs, split)
    rows, said = convert("full_hh_rlhf", [*own, two], split)
    assert rows == expected
    assert "1: `chosen` and `rejected` have different prompts" in said


DROPPED = {
    # (program, function, the reason): what it is given
    ("full_hh_rlhf", "parse_dialogue", "begin with Human:"): ["Hello\n\nHuman: Hi\n\nAssistant:"],
    ("full_hh_rlhf", "parse_dialogue", "end with Assistant:"): ["Human: Hi\n\nAssistant: Hello."],
    ("full_hh_rlhf", "parse_dialogue", "in a row"): ["Human: Hi\n\nHuman: Hi\n\nAssistant:"],
    ("full_hh_rlhf", "parse_dialogue", "empty turn"): ["Human: Hi\n\nAssistant:" + HH[1]["prompt"]],
    ("math", "last_boxed", "boxed"): ["5}", r"\boxed{5", r"\boxed{ } 5} {", r"\boxed 5"],
    ("gsm8k", "final_number", "no number after ####"): ["####", "5", "#### 1/2", "#### 5 #### x"],
}


def test_row_without_what_it_needs_is_dropped():
    for (name, function, reason), texts in DROPPED.items():
        program = runpy.run_path(str(FOLDER / f"{name}.py"))
        for text in texts:
            with pytest.raises(ValueError, match=reason):
                program[function](text)


def test_hub_is_the_default(preprocess, tmp_path, monkeypatch):
    def load_dataset(*names):
        assert names == ("openai/gsm8k", "main")
        return datasets.DatasetDict({"train": datasets.Dataset.from_list(GSM8K)})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert preprocess("gsm8k")[0] == 0
    assert len(read(tmp_path / "out" / "train.parquet")) == 3
    monkeypatch.setattr(datasets, "load_dataset", lambda *_: 1 / 0)
    status, _, (error,) = preprocess("gsm8k")
    assert status == 2 and "give --local_dataset_path" in error and "ZeroDivisionError" in error


def test_folder_with_a_file_a_split_and_shards(preprocess, tmp_path):
    write_rows(tmp_path / "raw" / "gsm8k_test.jsonl", GSM8K[:1])
    write_rows(tmp_path / "raw" / "train-00000-of-00002.parquet", GSM8K[:2])
    write_rows(tmp_path / "raw" / "train-00001-of-00002.parquet", GSM8K[2:])
    write_rows(tmp_path / "raw" / "validation.jsonl", GSM8K[2:4])
    status, said, _ = preprocess("gsm8k", "--local_dataset_path", tmp_path / "raw")
    assert status == 0
    files = {path.stem: len(read(path)) for path in (tmp_path / "out").iterdir()}
    assert files == {"train": 3, "test": 1}
    assert f"{tmp_path}/out/validation.parquet: not written, for no row is left" in said


BAD = [
    # ({file: its text, or rows}, the path that is given, words)
    ({"train.jsonl": '{"a": 1}\n{{\n'}, "train.jsonl", "line 2 is no JSON"),
    ({"train.jsonl": [{"b": 3, "a": 4}]}, "", "no column `question`; the columns are b, a"),
    ({"train.jsonl": GSM8K[2:4]}, "train.jsonl", "no row is left"),
    ({"out/train.parquet": GSM8K}, "out", "would be overwritten; choose another --local_save_dir"),
    ({"train.jsonl": GSM8K, "my_train.jsonl": GSM8K}, "", "several files for train, my_train, "),
    ({"data.jsonl": GSM8K}, "", "no split (train, validation, test) in the name"),
    ({"train_test.jsonl": GSM8K}, "", "no split (train, validation, test) in the name"),
]


@pytest.mark.parametrize(("files", "given", "words"), BAD)
def test_bad_input_is_one_line_and_status_2(files, given, words, preprocess, tmp_path):
    for name, content in files.items():
        write = write_text if isinstance(content, str) else write_rows
        path = write(tmp_path / "in" / name, content)
    before = path.read_bytes()
    flags = ["--local_dataset_path", tmp_path / "in" / given]
    status, _, (error,) = preprocess("gsm8k", *flags, "--local_save_dir", tmp_path / "in" / "out")
    assert status == 2
    assert error.startswith("gsm8k.py: error: ") and words in error
    assert path.read_bytes() == before
    assert [file for file in tmp_path.rglob("*.parquet") if file != path] == []


@pytest.mark.parametrize("name", ROWS)
def test_ppo_loads_what_is_written(name, convert, tmp_path, assets):
    rows, _ = convert(name, ROWS[name])
    tokenizer = ppo_vllm_async.AutoTokenizer.from_pretrained(assets / "model")
    rule = name != "full_hh_rlhf"  # its rows are for a reward model: their `style` is "model"
    args = ppo_vllm_async.Args(
        max_prompt_token_length=10_000,
        apply_verifiable_reward=rule,
        reward_fn="scripts/rewards/graders.py:compute_score",
    )
    written = str(tmp_path / "out" / "train.parquet")
    prompts = ppo_vllm_async.load_prompts(str(written), None, "train", tokenizer, args, False)
    assert len(prompts) == len(rows) > 0
    for prompt, row in zip(prompts, rows, strict=True):
        assert prompt.ground_truth == (row["reward_model"]["ground_truth"] if rule else None)
        assert prompt.data_source == row["data_source"]
        assert prompt.text.startswith(f"<|user|>{row['prompt'][0]['content']}")
        assert prompt.text.endswith(f"<|user|>{row['prompt'][-1]['content']}<|assistant|>")


def test_instructions_are_the_same_every_time_and_held_out_topics_are_new(preprocess, tmp_path):
    script = runpy.run_path(str(FOLDER / "instructions.py"))
    for folder in ("out", "again"):
        assert preprocess("instructions", "--local_save_dir", tmp_path / folder)[0] == 0
    rows = {split: read(tmp_path / "out" / f"{split}.parquet") for split in ("train", "test")}
    assert all(rows[split] == read(tmp_path / "again" / f"{split}.parquet") for split in rows)
    questions = {split: {row["prompt"][0]["content"] for row in rows[split]} for split in rows}
    assert len(questions["train"]) == len(rows["train"]) == 2400  # none twice
    assert any("a volcano" in question for question in questions["test"])
    for topic in script["TEST_TOPICS"].split(","):
        assert not any(topic.strip() in question for question in questions["train"])
    truth = script["ground_truth"](12)
    for response, score in (("a tower with a lamp for ships", 1.0), ("by the sea", 0.75)):
        assert if_constraints.compute_score("instructions", response, truth) == score


def test_half_an_emoji_costs_its_row_and_windows_mark_and_dates_nothing(convert, tmp_path):
    half, whole = ({"question": f"How {sad}?", "answer": "#### 4"} for sad in ("\ud83d", "😞é"))
    rows, said = convert("gsm8k", [half, whole])
    assert said.endswith("1 dropped (1: half a character, which no file can hold)")
    assert rows[0]["prompt"][0]["content"].startswith("How 😞é?")
    read_rows = runpy.run_path(str(REPO / "scripts" / "preprocessing.py"))["read_rows"]
    path, row = tmp_path / "marked.jsonl", {"question": "2020-01-01"}
    path.write_text(json.dumps(row), encoding="utf-8-sig")
    assert read_rows(path) == [row]
