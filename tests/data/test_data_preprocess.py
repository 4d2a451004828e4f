"""Test what the programs of scripts/data_preprocess write and drop, and that PPO can load it."""

import json
import runpy
import sys

import datasets
import if_constraints
import pyarrow.parquet
import pytest
from helpers import REPO
from helpers.files import write_rows, write_text
from test_dataset import characters

import ppo_vllm_async

FOLDER = REPO / "scripts" / "data_preprocess"
ENDINGS = ["puts on a hat.", "[title] Boil it. [step] For long.", "flies away.", "sings."]
CHOICES = "(0) puts on a hat.\n(1) Boil it. For long.\n(2) flies away.\n(3) sings."
CONTEXT = "[header] How to cook [title] Start. she"
COOKING = {"activity_label": "Cooking", "ctx": CONTEXT, "endings": ENDINGS}
LABELS = {"1": None, "0": None, "": "no label", "4": "`label` is not the index of an ending"}
TWO = "\n\nHuman: Hello\n\nAssistant: Hi.\n\nWhat now?"
TWO += "\n\nHuman: Tell me: Human: or not?\n\nAssistant:"
MESSAGES = [
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi.\n\nWhat now?"},
    {"role": "user", "content": "Tell me: Human: or not?"},
]
WHO = "\n\nHuman: Who?\n\nAssistant:"
NUMBER, BOX = "no number after ####", r"no \boxed{}"
# For each program: its columns, and rows with their ground truth or the reason why they are dropped
ROWS = {
    "gsm8k": [
        ("question answer", None),
        (("How many beans?", "2*600=<<2*600=1200>>1200.\n#### 1,200"), "1200"),
        (("Ben owes 7 and pays 4. What has he?", "4-7=-3\n#### -3"), "-3"),
        ((None, "#### 4"), "no text in `question`"),
        (("How long is it?", "It is 1.5 m, not #### 2, so\n#### 1.5"), "1.5"),
        ((" ", "#### 4"), "no text in `question`"),
        *((("How?", answer), NUMBER) for answer in ("####", "5", "#### 1/2", "#### 5 #### x")),
    ],
    "math_dataset": [
        ("problem solution", None),
        (("What is $1/4+1/4$?", r"Not $\boxed{1}$, but $\boxed{\frac{1}{2}}$."), r"\frac{1}{2}"),
        (("Which set?", r"It is \boxed {\left\{1, \{2\}\\}, you {see}."), r"\left\{1, \{2\}\\"),
        *((("Prove it.", solution), BOX) for solution in ("Obvious.", "5}", r"\boxed 5")),
        (("Which?", r"\boxed{5"), r"\boxed{} is empty or not closed"),
        (("Which?", r"\boxed{ } 5} {"), r"\boxed{} is empty or not closed"),
    ],
    "hellaswag": [
        ("activity_label ctx endings label", None),
        *(((*COOKING.values(), label), reason or label) for label, reason in LABELS.items()),
        ((*COOKING.values(), None), "no label"),
    ],
    "full_hh_rlhf": [
        ("prompt chosen rejected", None),
        ((TWO, " Yes.", " No."), "Yes."),
        ((WHO, " Me.", " Me."), "Me."),
        ((WHO, " ", " So."), "no text in `chosen`"),
        ((TWO, "Yes.", " No.\n\nHuman: Oh.\n\nAssistant: Yes."), "Yes."),
        ((TWO, "Yes.", None), "no text in `rejected`"),
        (("Hi" + WHO, "Yes.", "No."), "the prompt does not begin with Human:"),
        (("Human: Hi\n\nAssistant: Hello.", "Yes.", "No."), "the prompt does not end with Assist"),
        (("Human: Hi" + WHO, "Yes.", "No."), "the prompt has two turns of one speaker in a row"),
        (("Human: Hi\n\nAssistant:" + WHO, "Yes.", "No."), "the prompt has an empty turn"),
    ],
}
# The beginning and the end of the first row's prompt
ASKED = {
    "gsm8k": ("How many beans? Think", '"####".'),
    "math_dataset": ("What is $1/4+1/4$? Think", r"put the final answer in \boxed{}."),
    "hellaswag": (f"Cooking: How to cook. Start. she\n\n{CHOICES}\n\nWhich ending", '"####".'),
    "full_hh_rlhf": ("Hello", "Tell me: Human: or not?"),
}


def rows_of(name):
    (columns, _), *rows = ROWS[name]
    return [dict(zip(columns.split(), values, strict=True)) for values, _ in rows]


GSM8K, HH = rows_of("gsm8k"), rows_of("full_hh_rlhf")


def read(path):
    return pyarrow.parquet.read_table(path).to_pylist()


@pytest.fixture
def preprocess(tmp_path, monkeypatch, capfd):
    """Return preprocess("gsm8k", *flags) -> (exit status, lines on stdout, lines on stderr)."""

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
        captured = capfd.readouterr()
        return status, captured.out.splitlines(), captured.err.splitlines()

    return run


@pytest.fixture
def convert(preprocess, tmp_path):
    """Return convert("gsm8k", rows) -> (rows that were written, first line of the output)."""

    def convert(name, rows, split="rl"):
        path = write_rows(tmp_path / "train.jsonl", rows)
        flags = ["--split", split] if name == "full_hh_rlhf" else []
        status, lines, errors = preprocess(name, "--local_dataset_path", path, *flags)
        assert status == 0, errors
        return read(tmp_path / "out" / "train.parquet"), lines[0]

    return convert


@pytest.mark.parametrize("name", ROWS)
def test_rows_are_converted_or_dropped_for_a_reason_and_ppo_loads_them(
    name, convert, tmp_path, assets
):
    written, line = convert(name, rows_of(name))
    rows = {row["extra_info"]["index"]: row for row in written}  # the index before rows are dropped
    for index, (_, outcome) in enumerate(ROWS[name][1:]):
        if index in rows:
            assert rows[index]["reward_model"]["ground_truth"] == outcome
        else:
            assert f": {outcome}" in line
    assert f": {index + 1} rows, {len(rows)} kept, {index + 1 - len(rows)} dropped" in line
    template = ppo_vllm_async.AutoTokenizer.from_pretrained(assets / "model").chat_template
    rule = name != "full_hh_rlhf"  # otherwise the rows are for a reward model
    args = ppo_vllm_async.Args(
        max_prompt_token_length=10_000,
        apply_verifiable_reward=rule,
        reward_fn="scripts/rewards/graders.py:compute_score",
    )
    path = str(tmp_path / "out" / "train.parquet")
    tokenizer = characters(template=template)
    prompts = ppo_vllm_async.load_prompts(path, None, "train", tokenizer, args, False)
    for prompt, row in zip(prompts, written, strict=True):
        assert prompt.ground_truth == (row["reward_model"]["ground_truth"] if rule else None)
        assert prompt.data_source == row["data_source"]
    start, end = ASKED[name]
    assert prompts[0].text.startswith(f"<|user|>{start}")
    assert prompts[0].text.endswith(f"{end}<|assistant|>")


def test_hh_as_pairs_and_demonstrations(convert):
    pairs, line = convert("full_hh_rlhf", HH, "rm")
    assert pairs == [{"prompt": MESSAGES, "chosen": "Yes.", "rejected": "No."}]
    assert "`chosen` and `rejected` are the same" in line
    assert "1: further turns in `rejected`" in line
    demonstrations, _ = convert("full_hh_rlhf", HH, "sft")
    assert [row["response"] for row in demonstrations] == ["Yes.", "Me.", "Yes."]


@pytest.mark.parametrize("split", ["rl", "rm", "sft"])
def test_hh_in_anthropics_form_gives_the_same_rows(split, convert):
    """Anthropic's texts are whole dialogues. Two with different prompts are not a pair."""
    own = [{name: TWO + row[name] for name in ("chosen", "rejected")} for row in HH[:2]]
    two = own[0] | {"rejected": f"{WHO} No."}
    expected, _ = convert("full_hh_rlhf", [row | {"prompt": TWO} for row in HH[:2]], split)
    rows, line = convert("full_hh_rlhf", [*own, two], split)
    assert rows == expected
    assert "1: `chosen` and `rejected` have different prompts" in line


def test_hub_is_the_default(preprocess, tmp_path, monkeypatch):
    def load_dataset(*names):
        assert names == ("openai/gsm8k", "main")
        return datasets.DatasetDict({"train": datasets.Dataset.from_list(GSM8K)})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert preprocess("gsm8k")[0] == 0
    assert len(read(tmp_path / "out" / "train.parquet")) == 3
    monkeypatch.setattr(datasets, "load_dataset", lambda *_: 1 / 0)
    status, _, (error,) = preprocess("gsm8k")
    assert status == 2 and "pass --local_dataset_path" in error and "ZeroDivisionError" in error


def test_folder_with_a_file_a_split_and_shards(preprocess, tmp_path):
    for name, rows in (
        ("gsm8k_test.jsonl", GSM8K[:1]),
        ("train-00000-of-00002.parquet", GSM8K[:2]),
        ("train-00001-of-00002.parquet", GSM8K[2:]),
        ("validation.jsonl", GSM8K[4:]),
    ):
        write_rows(tmp_path / "raw" / name, rows)
    status, lines, _ = preprocess("gsm8k", "--local_dataset_path", tmp_path / "raw")
    assert status == 0
    files = {path.stem: len(read(path)) for path in (tmp_path / "out").iterdir()}
    assert files == {"train": 3, "test": 1}
    assert f"{tmp_path}/out/validation.parquet: not written, because no row is left" in lines


@pytest.mark.parametrize("name", ["data.jsonl", "my-rows2.parquet", "training.jsonl", "test.jsonl"])
def test_one_file_is_the_training_split_unless_its_name_says_another(name, preprocess, tmp_path):
    for path in (write_rows(tmp_path / "raw" / name, GSM8K), tmp_path / "raw"):
        assert preprocess("gsm8k", "--local_dataset_path", path)[0] == 0
        (written,) = (tmp_path / "out").iterdir()
        assert written.stem == ("test" if name == "test.jsonl" else "train")
        written.unlink()


NO_SPLIT = "must have one split (train, validation, test) in its name"
BAD = [
    # ({file: its text, or rows}, the path that is passed, words of the error)
    ({"train.jsonl": '{"a": 1}\n{{\n'}, "train.jsonl", "is not a JSON object"),
    ({"train.jsonl": [{"b": 3, "a": 4}]}, "", "no column `question`; its columns are b, a"),
    ({"train.jsonl": GSM8K[4:]}, "train.jsonl", "no row is left"),
    ({"out/train.parquet": GSM8K}, "out", "would be overwritten; choose another --local_save_dir"),
    ({"train.jsonl": GSM8K, "my_train.jsonl": GSM8K}, "", "several files for train: my_train, "),
    ({"data.jsonl": GSM8K, "more.jsonl": GSM8K}, "", NO_SPLIT),
    ({"train_test.jsonl": GSM8K}, "", NO_SPLIT),
]


def test_bad_input_is_one_line_and_status_2(preprocess, tmp_path):
    for case, (files, given, words) in enumerate(BAD):
        folder = tmp_path / str(case)
        for name, content in files.items():
            path = (write_text if isinstance(content, str) else write_rows)(folder / name, content)
        before = path.read_bytes()
        flags = ["--local_dataset_path", folder / given, "--local_save_dir", folder / "out"]
        status, _, (error,) = preprocess("gsm8k", *flags)
        assert status == 2 and error.startswith("gsm8k.py: error: ") and words in error
        assert path.read_bytes() == before
        assert [file for file in folder.rglob("*.parquet") if file != path] == []


def test_instructions_are_the_same_every_time_and_held_out_topics_are_new(preprocess, tmp_path):
    script = runpy.run_path(str(FOLDER / "instructions.py"))
    for folder in ("out", "again"):
        assert preprocess("instructions", "--local_save_dir", tmp_path / folder)[0] == 0
    rows = {split: read(tmp_path / "out" / f"{split}.parquet") for split in ("train", "test")}
    assert all(rows[split] == read(tmp_path / "again" / f"{split}.parquet") for split in rows)
    questions = {split: {row["prompt"][0]["content"] for row in rows[split]} for split in rows}
    assert len(questions["train"]) == len(rows["train"]) == 2400  # all are different
    assert any("a volcano" in question for question in questions["test"])
    for topic in script["TEST_TOPICS"].split(","):
        assert not any(topic.strip() in question for question in questions["train"])
    truth = script["ground_truth"](12)
    for response, score in (("a tower with a lamp for ships", 1.0), ("by the sea", 0.75)):
        assert if_constraints.compute_score("instructions", response, truth) == score


def test_half_an_emoji_drops_its_row_but_a_windows_mark_and_dates_are_read(convert, tmp_path):
    half, whole = ({"question": f"How {sad}?", "answer": "#### 4"} for sad in ("\ud83d", "😞é"))
    rows, line = convert("gsm8k", [half, whole])
    assert line.endswith("1 dropped (1: half a character, which cannot be written)")
    assert rows[0]["prompt"][0]["content"].startswith("How 😞é?")
    read_rows = runpy.run_path(str(REPO / "scripts/data_preprocess/common.py"))["read_rows"]
    path, row = tmp_path / "marked.jsonl", {"question": "2020-01-01"}
    path.write_text(json.dumps(row), encoding="utf-8-sig")
    assert read_rows(path) == [row]
