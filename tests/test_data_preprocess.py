"""scripts/data_preprocess: what they write, what they drop, and that PPO can load it."""

import doctest
import errno
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

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
DIALOGUE = (
    "\n\nHuman: Hello\n\nAssistant: Hi.\n\nWhat now?"
    "\n\nHuman: Tell me: Human: or not?\n\nAssistant:"
)
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
]
ROWS = {"gsm8k": GSM8K, "math": MATH, "hellaswag": HELLASWAG, "full_hh_rlhf": HH}


@pytest.fixture(params=ROWS)
def any_script(request):
    return request.param


def load(name):
    spec = importlib.util.spec_from_file_location(f"preprocess_{name}", FOLDER / f"{name}.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # tyro reads its source
    spec.loader.exec_module(module)
    return module


def read(path):
    return pyarrow.parquet.read_table(path).to_pylist()


def flags_for(name, split="rl"):
    return ["--split", split] if name == "full_hh_rlhf" else []


@pytest.fixture
def preprocess(tmp_path, monkeypatch, capfd):
    """preprocess("gsm8k", path, *flags) -> (exit status, lines on stdout, lines on stderr)."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")

    def run(name, path, *flags):
        local = [] if path is None else ["--local_dataset_path", str(path)]
        out = ["--local_save_dir", str(tmp_path / "out")]
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *local, *out, *flags])
        capfd.readouterr()
        status = 0
        try:
            load(name).main()
        except SystemExit as stop:
            status = stop.code
        captured = capfd.readouterr()
        return status, captured.out.splitlines(), captured.err.splitlines()

    return run


@pytest.fixture
def convert(preprocess, tmp_path):
    """convert("gsm8k", rows) -> (rows written, what was said of them)."""

    def convert(name, rows, split="rl"):
        path = write_rows(tmp_path / "train.jsonl", rows)
        status, said, _ = preprocess(name, path, *flags_for(name, split))
        assert status == 0
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
    prompts, said = convert("full_hh_rlhf", HH)
    assert said.startswith("train: 5 rows, 3 kept, 2 dropped (1: ")
    assert "no text in `chosen`" in said
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
    # (script, function, the reason): what it is given
    ("full_hh_rlhf", "parse_dialogue", "begin with Human:"): ["Hello\n\nHuman: Hi\n\nAssistant:"],
    ("full_hh_rlhf", "parse_dialogue", "end with Assistant:"): ["Human: Hi\n\nAssistant: Hello."],
    ("full_hh_rlhf", "parse_dialogue", "in a row"): ["Human: Hi\n\nHuman: Hi\n\nAssistant:"],
    ("full_hh_rlhf", "parse_dialogue", "empty turn"): ["Human: Hi\n\nAssistant:" + HH[1]["prompt"]],
    ("math", "last_boxed", "boxed"): ["5}", r"\boxed{5", r"\boxed{ } 5} {", r"\boxed 5"],
    ("gsm8k", "final_number", "no number after ####"): ["####", "5", "#### 1/2", "#### 5 #### x"],
}


@pytest.mark.parametrize("case", DROPPED)
def test_row_without_what_it_needs_is_dropped(case):
    script, function, reason = case
    for text in DROPPED[case]:
        with pytest.raises(ValueError, match=reason):
            getattr(load(script), function)(text)


@pytest.mark.parametrize("split", ["rl", "rm", "sft"])
def test_row_whose_rejected_response_is_no_text_is_dropped(split, convert):
    _, said = convert("full_hh_rlhf", [HH[0], {**HH[0], "rejected": None}], split)
    assert said == "train: 2 rows, 1 kept, 1 dropped (1: no text in `rejected`)"


def test_hub_is_the_default(any_script, preprocess, tmp_path, monkeypatch):
    asked = []

    def load_dataset(*names):
        asked.append(names)
        return datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS[any_script])})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert preprocess(any_script, None, *flags_for(any_script))[0] == 0
    assert asked == [load(any_script).HUB]
    assert {row["data_source"] for row in read(tmp_path / "out" / "train.parquet")} == {asked[0][0]}


def test_folder_with_a_file_a_split_and_shards(preprocess, tmp_path):
    write_rows(tmp_path / "raw" / "gsm8k_test.jsonl", GSM8K[:1])
    write_rows(tmp_path / "raw" / "train-00000-of-00002.parquet", GSM8K[:2])
    write_rows(tmp_path / "raw" / "train-00001-of-00002.parquet", GSM8K[2:])
    write_rows(tmp_path / "raw" / "validation.jsonl", GSM8K[2:4])
    status, said, _ = preprocess("gsm8k", tmp_path / "raw")
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
    ({"data.jsonl": GSM8K}, "", "its name tells no split"),
    ({"train.csv": "a,b"}, "", "no .jsonl or .parquet file"),
    ({}, "nowhere", "no such file or folder"),
]


def all_in(folder):
    """What is in a folder, and what is in its files."""
    paths = [path for path in folder.rglob("*") if "cache" not in path.parts]
    return {path: path.read_bytes() if path.is_file() else None for path in paths}


@pytest.mark.parametrize(("files", "given", "words"), BAD)
def test_bad_input_is_one_line_and_status_2(files, given, words, preprocess, tmp_path):
    for name, content in files.items():
        write = write_text if isinstance(content, str) else write_rows
        write(tmp_path / "in" / name, content)
    out = tmp_path / "in" / "out"
    before = all_in(tmp_path)
    path = tmp_path / "in" / given
    status, _, (error,) = preprocess("gsm8k", path, "--local_save_dir", str(out))
    assert status == 2
    assert error.startswith("gsm8k.py: error: ") and words in error
    assert all_in(tmp_path) == before


def test_disk_that_fills_up_leaves_the_older_files(preprocess, tmp_path, monkeypatch):
    for split in ("test", "train"):
        write_rows(tmp_path / "raw" / f"{split}.jsonl", GSM8K)
        write_text(tmp_path / "out" / f"{split}.parquet", "older")
    before = all_in(tmp_path)
    write = Path.write_bytes

    def write_until_full(path, data):
        if path.name == "train.parquet":
            write(path, data[:100])
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, data)

    monkeypatch.setattr(Path, "write_bytes", write_until_full)
    status, _, (error,) = preprocess("gsm8k", tmp_path / "raw")
    assert status == 2
    assert "out: cannot be written to" in error
    assert all_in(tmp_path) == before


def test_ppo_loads_what_is_written(any_script, convert, tmp_path, assets):
    rows, _ = convert(any_script, ROWS[any_script])
    tokenizer = ppo_vllm_async.AutoTokenizer.from_pretrained(assets / "model")
    rule = any_script != "full_hh_rlhf"  # its rows are for a reward model: their `style` is "model"
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


@pytest.mark.slow
def test_command_is_not_misled_by_the_math_beside_it(tmp_path):
    command = [sys.executable, FOLDER / "math.py", "--local_save_dir", tmp_path / "out"]
    command += ["--local_dataset_path", write_rows(tmp_path / "train.jsonl", MATH)]
    subprocess.run(command, check=True, timeout=120)
    assert len(read(tmp_path / "out" / "train.parquet")) == 2


def test_no_script_finds_the_math_of_its_folder(any_script, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])  # as Python starts a script
    module = load(any_script)
    assert str(FOLDER) not in sys.path
    examples = doctest.testmod(module)
    assert examples.attempted > 0 and examples.failed == 0


def test_instructions_are_the_same_every_time_and_held_out_topics_are_new(tmp_path, monkeypatch):
    script = load("instructions")
    assert doctest.testmod(script).failed == 0
    for name in ("a", "b"):
        argv = ["instructions.py", "--local_save_dir", str(tmp_path / name)]
        monkeypatch.setattr(sys, "argv", argv)
        script.main()
    rows = {split: read(tmp_path / "a" / f"{split}.parquet") for split in ("train", "test")}
    assert all(rows[split] == read(tmp_path / "b" / f"{split}.parquet") for split in rows)
    questions = {split: {row["prompt"][0]["content"] for row in rows[split]} for split in rows}
    assert len(questions["train"]) == len(rows["train"]) == 2400  # none twice
    assert any("a volcano" in question for question in questions["test"])
    for topic in script.TEST_TOPICS.split(","):
        assert not any(topic.strip() in question for question in questions["train"])
    truth = script.ground_truth(12)
    for response, score in (("a tower with a lamp for ships", 1.0), ("by the sea", 0.75)):
        assert if_constraints.compute_score("instructions", response, truth) == score


def test_half_an_emoji_costs_its_row_and_windows_mark_none(convert, preprocess, tmp_path):
    half, whole = ({"question": f"How {sad}?", "answer": "#### 4"} for sad in ("\ud83d", "😞é"))
    rows, said = convert("gsm8k", [half, whole])
    assert said.endswith("1 dropped (1: half a character, which no file can hold)")
    assert rows[0]["prompt"][0]["content"].startswith("How 😞é?")
    path = tmp_path / "marked" / "train.jsonl"
    path.parent.mkdir()
    path.write_text(json.dumps(whole), encoding="utf-8-sig")
    assert preprocess("gsm8k", path)[1][0] == "train: 1 rows, 1 kept, 0 dropped"
