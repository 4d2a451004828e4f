"""scripts/data_preprocess: what they write, what they drop, and that ppo_sync.py can load it."""

import doctest
import importlib.util
import subprocess
import sys

import datasets
import pyarrow.parquet
import pytest
from helpers import REPO
from helpers.files import write_rows, write_text
from helpers.processes import environment

import ppo_sync

FOLDER = REPO / "scripts" / "data_preprocess"
SHARED = REPO / "scripts" / "preprocessing.py"
SCRIPTS = ["gsm8k", "math", "hellaswag", "full_hh_rlhf"]

GSM8K = [
    {
        "question": "Ada has 2 bags of 600 beans. How many beans?",
        "answer": "2*600=<<2*600=1200>>1200.\n#### 1,200",
    },
    {"question": "Ben owes 7 and pays 4. What has he?", "answer": "4-7=-3\n#### -3"},
    {"question": "What is the price?", "answer": "Nobody knows."},
    {"question": None, "answer": "#### 4"},
    {"question": "How long is it?", "answer": "It is 1.5 m, not #### 2, so\n#### 1.5"},
    {"question": " ", "answer": "#### 4"},
]
MATH = [
    {
        "problem": "What is $1/4+1/4$?",
        "level": "Level 1",
        "solution": r"Not $\boxed{1}$, but $\boxed{\frac{1}{2}}$.",
    },
    {"problem": "Prove it.", "level": "Level 5", "solution": "Obvious."},
    {
        "problem": "Which set?",
        "level": "Level 2",
        "solution": r"It is \boxed{\left\{1, \{2\}\right.}, you see}.",
    },
]
ENDINGS = ["puts on a hat.", "[title] Boil it. [step] For long.", "flies away.", "sings."]
HELLASWAG = [
    {
        "activity_label": "Cooking",
        "ctx": "[header] How to cook [title] Start. she",
        "endings": ENDINGS,
        "label": "1",
    },
    {"activity_label": "Cooking", "ctx": "A cook is seen. he", "endings": ENDINGS, "label": "0"},
    {"activity_label": "Cooking", "ctx": "A cook is seen. it", "endings": ENDINGS, "label": ""},
    {"activity_label": "Cooking", "ctx": "A cook is seen. they", "endings": ENDINGS, "label": "4"},
    {"activity_label": "Cooking", "ctx": "A cook is seen. we", "endings": ENDINGS, "label": None},
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
    {"prompt": DIALOGUE, "response": " Yes.", "chosen": " Yes.", "rejected": " No."},
    {
        "prompt": "\n\nHuman: Who?\n\nAssistant:",
        "response": " Me.",
        "chosen": " Me.",
        "rejected": " Me.",
    },
    {"prompt": "\n\nHuman: Why?\n\nAssistant:", "response": " ", "chosen": " ", "rejected": " So."},
    {"prompt": "Why?", "response": " So.", "chosen": " So.", "rejected": " Not."},
]


@pytest.fixture(params=SCRIPTS)
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


ROWS = {"gsm8k": GSM8K, "math": MATH, "hellaswag": HELLASWAG, "full_hh_rlhf": HH}


@pytest.fixture
def preprocess(tmp_path, monkeypatch, capfd):
    """preprocess("gsm8k", path, *flags) -> (exit status, lines on stdout, lines on stderr).

    Writes to tmp_path/out.
    """
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")

    def run(name, path, *flags):
        local = [] if path is None else ["--local_dataset_path", str(path)]
        arguments = [f"{name}.py", *local, "--local_save_dir", str(tmp_path / "out"), *flags]
        monkeypatch.setattr(sys, "argv", arguments)
        capfd.readouterr()
        status = 0
        try:
            load(name).main()
        except SystemExit as stop:
            status = stop.code
        captured = capfd.readouterr()
        return status, captured.out.splitlines(), captured.err.splitlines()

    return run


# --------------------------------------------------------------------------------- what is written


def test_gsm8k(preprocess, tmp_path):
    status, said, _ = preprocess("gsm8k", write_rows(tmp_path / "gsm8k_train.jsonl", GSM8K))
    rows = read(tmp_path / "out" / "train.parquet")
    assert status == 0
    why = "2: no text in `question`; 1: no number after ####"
    assert said[0] == f"train: 6 rows, 3 kept, 3 dropped ({why})"
    assert [row["reward_model"] for row in rows] == [
        {"style": "rule", "ground_truth": truth} for truth in ("1200", "-3", "1.5")
    ]
    # The row on the hub, dropped ones counted.
    assert [row["extra_info"]["index"] for row in rows] == [0, 1, 4]
    assert rows[0]["data_source"] == "openai/gsm8k"
    assert rows[0]["ability"] == "math"
    assert rows[0]["extra_info"] == {"split": "train", "index": 0, **GSM8K[0]}
    ((role, content),) = [message.values() for message in rows[0]["prompt"]]
    assert role == "user"
    assert content.startswith(GSM8K[0]["question"])
    assert content.endswith('the final answer after "####".')


def test_math(preprocess, tmp_path):
    status, said, _ = preprocess("math", write_rows(tmp_path / "math_test.jsonl", MATH))
    rows = read(tmp_path / "out" / "test.parquet")
    assert status == 0
    assert said[0] == r"test: 3 rows, 2 kept, 1 dropped (1: no \boxed{})"
    truths = [row["reward_model"]["ground_truth"] for row in rows]
    assert truths == [r"\frac{1}{2}", r"\left\{1, \{2\}\right."]
    assert rows[1]["extra_info"] == {"split": "test", "index": 2}
    assert {row["data_source"] for row in rows} == {"DigitalLearningGmbH/MATH-lighteval"}
    assert rows[0]["prompt"][0]["content"].startswith(MATH[0]["problem"])
    assert rows[0]["prompt"][0]["content"].endswith(r"the final answer in \boxed{}.")


def test_hellaswag_asks_the_question_and_drops_rows_without_label(preprocess, tmp_path):
    status, said, _ = preprocess(
        "hellaswag", write_rows(tmp_path / "hellaswag_val.jsonl", HELLASWAG)
    )
    rows = read(tmp_path / "out" / "validation.parquet")
    assert status == 0
    why = "2: no label; 1: `label` is not the index of an ending"
    assert said[0] == f"validation: 5 rows, 2 kept, 3 dropped ({why})"
    assert [row["reward_model"]["ground_truth"] for row in rows] == ["1", "0"]
    assert rows[0]["data_source"] == "Rowan/hellaswag"
    content = rows[0]["prompt"][0]["content"]
    assert content.startswith("Cooking: How to cook. Start. she\n")
    choices = ["puts on a hat.", "Boil it. For long.", "flies away.", "sings."]
    assert [line for line in content.splitlines() if line[:1] == "("] == [
        f"({index}) {choice}" for index, choice in enumerate(choices)
    ]
    assert content.splitlines()[-1].startswith("Which ending")
    assert rows[0]["reward_model"]["choices"] == choices


def test_hellaswag_labels_may_be_numbers(preprocess, tmp_path):
    labels = (0, 3, -1, 4, None)
    rows = [{**row, "label": label} for row, label in zip(HELLASWAG, labels, strict=True)]
    status, said, _ = preprocess("hellaswag", write_rows(tmp_path / "train.parquet", rows))
    assert status == 0
    written = read(tmp_path / "out" / "train.parquet")
    assert [row["reward_model"]["ground_truth"] for row in written] == ["0", "3"]
    assert "2: no label" in said[0]


def test_hellaswag_test_split_without_labels_leaves_no_file(preprocess, tmp_path):
    write_rows(tmp_path / "raw" / "test.jsonl", [{**row, "label": ""} for row in HELLASWAG])
    write_rows(tmp_path / "raw" / "train.jsonl", HELLASWAG)
    status, said, _ = preprocess("hellaswag", tmp_path / "raw")
    assert status == 0
    assert "test: 5 rows, 0 kept, 5 dropped (5: no label)" in said
    assert f"{tmp_path / 'out' / 'test.parquet'}: not written, for no row is left" in said
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["train.parquet"]


def test_hh_prompts(preprocess, tmp_path):
    path = write_rows(tmp_path / "train.jsonl", HH)
    status, said, _ = preprocess("full_hh_rlhf", path, "--split", "rl")
    rows = read(tmp_path / "out" / "train.parquet")
    assert status == 0
    assert said[0].startswith("train: 4 rows, 2 kept, 2 dropped (1: ")
    assert "no text in `chosen`" in said[0]
    assert "the prompt does not begin with Human:" in said[0]
    assert rows[0] == {
        "data_source": "Dahoas/full-hh-rlhf",
        "prompt": MESSAGES,
        "ability": "alignment",
        "reward_model": {"style": "model", "ground_truth": "Yes."},
        "extra_info": {"split": "train", "index": 0},
    }


def test_hh_pairs(preprocess, tmp_path):
    path = write_rows(tmp_path / "test.jsonl", HH)
    status, said, _ = preprocess("full_hh_rlhf", path, "--split", "rm")
    assert status == 0
    assert "`chosen` and `rejected` are the same" in said[0]
    assert read(tmp_path / "out" / "test.parquet") == [
        {"prompt": MESSAGES, "chosen": "Yes.", "rejected": "No."}
    ]


def test_hh_demonstrations_are_the_chosen_responses(preprocess, tmp_path):
    status, _, _ = preprocess(
        "full_hh_rlhf", write_rows(tmp_path / "train.jsonl", HH), "--split", "sft"
    )
    assert status == 0
    assert [row["response"] for row in read(tmp_path / "out" / "train.parquet")] == ["Yes.", "Me."]


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ("Hello\n\nHuman: Hi\n\nAssistant:", "begin with Human:"),
        ("\n\nAssistant: Hi\n\nHuman: Hi\n\nAssistant:", "begin with Human:"),
        ("\n\nHuman: Hi", "end with Assistant:"),
        ("\n\nHuman: Hi\n\nAssistant: Hello.", "end with Assistant:"),
        ("\n\nHuman: Hi\n\nHuman: Hi\n\nAssistant:", "in a row"),
        ("\n\nHuman: Hi\n\nAssistant: A\n\nAssistant:", "in a row"),
        ("\n\nHuman: Hi\n\nAssistant:\n\nHuman: Hi\n\nAssistant:", "empty turn"),
        ("\n\nHuman:\n\nAssistant:", "empty turn"),
    ],
)
def test_dialogues_that_no_chat_template_takes_are_dropped(prompt, reason):
    with pytest.raises(ValueError, match=reason):
        load("full_hh_rlhf").parse_dialogue(prompt.strip())


def test_response_in_which_the_dialogue_goes_on_is_dropped(preprocess, tmp_path):
    row = {**HH[0], "rejected": " No.\n\nHuman: Oh.\n\nAssistant: Yes."}
    path = write_rows(tmp_path / "train.jsonl", [*HH, row])
    _, said, _ = preprocess("full_hh_rlhf", path, "--split", "rm")
    assert "1: further turns in `rejected`" in said[0]


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        (r"\boxed{5}", "5"),
        (r"\boxed {5} and {6}", "5"),
        (r"\boxed{a^{b^{c}}} {d}", "a^{b^{c}}"),
        (r"\boxed{\} }", r"\}"),
        (r"\boxed{\text{two\\ lines}}", r"\text{two\\ lines}"),
        (r"\boxed{\boxed{5}}", "5"),
    ],
)
def test_last_box(solution, answer):
    assert load("math").last_boxed(solution) == answer


@pytest.mark.parametrize(
    ("solution", "reason"),
    [
        ("5}", "no .boxed"),
        (r"\boxed{5", "not closed"),
        (r"\boxed{ } 5} {", "empty"),
        (r"\boxed 5", "no .boxed"),
    ],
)
def test_solution_without_a_box_is_dropped(solution, reason):
    with pytest.raises(ValueError, match=reason):
        load("math").last_boxed(solution)


@pytest.mark.parametrize(
    "answer", ["####", "5", "#### 1/2", "#### five", "#### 5 #### x", "#### -", "#### ."]
)
def test_answer_without_a_number_is_dropped(answer):
    with pytest.raises(ValueError, match="no number after ####"):
        load("gsm8k").final_number(answer)


# -------------------------------------------------------------------------------------- where from


def test_hub_is_the_default(any_script, preprocess, tmp_path, monkeypatch):
    asked = []

    def load_dataset(*names):
        asked.append(names)
        return datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS[any_script])})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    status, said, _ = preprocess(any_script, None, *flags_for(any_script))
    hub = {
        "gsm8k": ("openai/gsm8k", "main"),
        "math": ("DigitalLearningGmbH/MATH-lighteval",),
        "hellaswag": ("Rowan/hellaswag",),
        "full_hh_rlhf": ("Dahoas/full-hh-rlhf",),
    }
    assert status == 0
    assert asked == [hub[any_script]]
    assert hub[any_script][0] in said[0]
    assert {row["data_source"] for row in read(tmp_path / "out" / "train.parquet")} == {asked[0][0]}


def test_folder_with_a_file_a_split(preprocess, tmp_path):
    write_rows(tmp_path / "raw" / "gsm8k_test.jsonl", GSM8K[:1])
    write_rows(tmp_path / "raw" / "train-00000-of-00002.parquet", GSM8K[:2])
    write_rows(tmp_path / "raw" / "train-00001-of-00002.parquet", GSM8K[2:])
    (tmp_path / "raw" / "README.md").write_text("x")
    status, said, _ = preprocess("gsm8k", tmp_path / "raw")
    assert status == 0
    assert any(line.startswith("train: 6 rows, 3 kept") for line in said)
    assert any(line.startswith("test: 1 rows, 1 kept") for line in said)
    assert len(read(tmp_path / "out" / "train.parquet")) == 3
    assert len(read(tmp_path / "out" / "test.parquet")) == 1


@pytest.mark.parametrize(
    ("name", "split"),
    [("dev_train.jsonl", "train"), ("my-Test.jsonl", "test"), ("valid.jsonl", "validation")],
)
def test_split_is_in_the_name_of_the_file(name, split, preprocess, tmp_path):
    assert preprocess("gsm8k", write_rows(tmp_path / name, GSM8K))[0] == 0
    assert [path.name for path in (tmp_path / "out").iterdir()] == [f"{split}.parquet"]


def test_split_name_is_for_files_whose_name_tells_none(preprocess, tmp_path):
    path = write_rows(tmp_path / "trained_on_this.jsonl", GSM8K)
    status, _, (error,) = preprocess("gsm8k", path)
    assert status == 2
    assert "--split_name" in error
    status, _, _ = preprocess("gsm8k", path, "--split_name", "test")
    assert status == 0
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["test.parquet"]


# --------------------------------------------------------------------------------------- bad input


def without(column, name):
    return [{key: value for key, value in row.items() if key != column} for row in ROWS[name]]


@pytest.mark.parametrize(
    ("name", "column"),
    [
        ("gsm8k", "answer"),
        ("math", "solution"),
        ("hellaswag", "label"),
        ("full_hh_rlhf", "rejected"),
        ("full_hh_rlhf", "chosen"),
    ],
)
def test_missing_column_is_named(name, column, preprocess, tmp_path):
    path = write_rows(tmp_path / "train.jsonl", without(column, name))
    status, _, (error,) = preprocess(name, path, *flags_for(name, "rm"))
    assert status == 2
    assert all(part in error for part in (str(path), f"no column `{column}`", "the columns are"))


def two_of_a_split(folder):
    write_rows(folder / "raw" / "a_train.jsonl", GSM8K)
    return write_rows(folder / "raw" / "b_train.jsonl", GSM8K).parent


# name: (path from a temporary folder, further flags, what the message must hold)
BAD = {
    "no file": (
        lambda tmp: tmp / "none.jsonl",
        [],
        ["--local_dataset_path", "none.jsonl", "no such file"],
    ),
    "other kind of file": (
        lambda tmp: write_text(tmp / "train.csv", "x"),
        [],
        ["train.csv", ".jsonl or .parquet"],
    ),
    "folder of nothing": (
        lambda tmp: write_rows(tmp / "a" / "x.json", []).parent,
        [],
        ["a: ", ".jsonl or .parquet"],
    ),
    "empty file": (lambda tmp: write_text(tmp / "train.jsonl", ""), [], ["train.jsonl", "empty"]),
    "blank lines": (
        lambda tmp: write_text(tmp / "train.jsonl", "\n\n"),
        [],
        ["train.jsonl", "no rows"],
    ),
    "no rows": (
        lambda tmp: garbage_table(tmp, {"question": [], "answer": []}),
        [],
        ["train.parquet", "no rows"],
    ),
    "no JSON": (
        lambda tmp: write_text(tmp / "train.jsonl", '{"question": "a"}\n{{\n'),
        [],
        ["train.jsonl", "JSON"],
    ),
    "no parquet": (
        lambda tmp: write_text(tmp / "train.parquet", "rubbish"),
        [],
        ["train.parquet", "read"],
    ),
    "nothing kept": (
        lambda tmp: write_rows(tmp / "train.jsonl", GSM8K[2:4]),
        [],
        ["no row is left", "out"],
    ),
    "two files of a split": (
        two_of_a_split,
        [],
        ["a_train.jsonl, b_train.jsonl", "train", "give one"],
    ),
    "two splits in a name": (
        lambda tmp: write_rows(tmp / "train_test.jsonl", GSM8K),
        [],
        ["--split_name"],
    ),
    "split name of a folder": (
        lambda tmp: write_rows(tmp / "raw" / "train.jsonl", GSM8K).parent,
        ["--split_name", "test"],
        ["--split_name", "single file"],
    ),
    "split name of the hub": (
        lambda _: None,
        ["--split_name", "test"],
        ["--split_name", "--local_dataset_path"],
    ),
    "no hub": (lambda _: None, [], ["openai/gsm8k", "hub", "--local_dataset_path"]),
    "source would be overwritten": (
        lambda tmp: write_rows(tmp / "out" / "train.parquet", GSM8K).parent,
        [],
        ["train.parquet", "overwritten", "--local_save_dir"],
    ),
    "unknown flag": (
        lambda tmp: write_rows(tmp / "train.jsonl", GSM8K),
        ["--bogus", "3"],
        ["--bogus", "--help"],
    ),
    "cannot be written": (
        lambda tmp: (write_text(tmp / "out", ""), write_rows(tmp / "train.jsonl", GSM8K))[1],
        [],
        ["--local_save_dir", "out", "cannot be written"],
    ),
}


def garbage_table(folder, columns):
    pyarrow.parquet.write_table(pyarrow.table(columns), folder / "train.parquet")
    return folder / "train.parquet"


def files_of(folder):
    files = [path for path in folder.rglob("*") if path.is_file() and "cache" not in path.parts]
    return {path: path.read_bytes() for path in files}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_and_status_2(name, preprocess, tmp_path):
    make, flags, fragments = BAD[name]
    path = make(tmp_path)
    before = files_of(tmp_path)
    status, _, errors = preprocess("gsm8k", path, *flags)
    assert status == 2
    (error,) = errors
    assert error.startswith("gsm8k.py: error: ")
    assert len(error) < 500
    for fragment in fragments:
        assert fragment in error
    assert files_of(tmp_path) == before


def test_hh_wants_to_know_what_for(preprocess, tmp_path):
    status, _, errors = preprocess("full_hh_rlhf", write_rows(tmp_path / "train.jsonl", HH))
    assert status == 2
    assert "--split" in "\n".join(errors)


# -------------------------------------------------------------------------------------- as a whole


def test_ppo_loads_what_is_written(any_script, preprocess, tmp_path, assets):
    path = write_rows(tmp_path / "train.jsonl", ROWS[any_script])
    assert preprocess(any_script, path, *flags_for(any_script))[0] == 0
    tokenizer = ppo_sync.AutoTokenizer.from_pretrained(assets / "model")
    rule = any_script != "full_hh_rlhf"  # its rows are for a reward model: their `style` is "model"
    args = ppo_sync.Args(max_prompt_token_length=10_000, apply_verifiable_reward=rule)
    written = tmp_path / "out" / "train.parquet"
    prompts = ppo_sync.prepare_prompts(str(written), "train", tokenizer, tokenizer, args)
    rows = read(written)
    assert len(prompts) == len(rows) > 0
    for prompt, row in zip(prompts, rows, strict=True):
        assert prompt.ground_truth == (row["reward_model"]["ground_truth"] if rule else None)
        assert prompt.data_source == row["data_source"]
        assert prompt.text.startswith(f"<|user|>{row['prompt'][0]['content']}")
        assert prompt.text.endswith(f"<|user|>{row['prompt'][-1]['content']}<|assistant|>")


@pytest.mark.slow
def test_real_command(any_script, tmp_path):
    # Python puts the folder of the script on its path, and with it a math.py that is not its own.
    path = write_rows(tmp_path / "train.jsonl", ROWS[any_script])
    options = ["--local_dataset_path", str(path), "--local_save_dir", str(tmp_path / "out")]
    options += flags_for(any_script)
    command = [sys.executable, str(FOLDER / f"{any_script}.py"), *options]
    env = environment({"HF_DATASETS_CACHE": str(tmp_path / "cache")})
    own = {"cwd": tmp_path, "env": env, "capture_output": True, "text": True, "timeout": 120}
    done = subprocess.run(command, **own)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"train: {len(ROWS[any_script])} rows, ")
    assert len(read(tmp_path / "out" / "train.parquet")) > 0
    path.unlink()
    done = subprocess.run(command, **own)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.slow
def test_real_command_in_the_folder_of_the_script(any_script, tmp_path):
    path = write_rows(tmp_path / "train.jsonl", ROWS[any_script])
    options = ["--local_dataset_path", str(path), "--local_save_dir", str(tmp_path / "out")]
    options += flags_for(any_script)
    env = environment({"HF_DATASETS_CACHE": str(tmp_path / "cache")})
    own = {"cwd": FOLDER, "env": env, "capture_output": True, "text": True, "timeout": 120}
    done = subprocess.run([sys.executable, f"{any_script}.py", *options], **own)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(read(tmp_path / "out" / "train.parquet")) > 0


def test_no_script_finds_the_math_of_its_folder(any_script, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])  # as Python starts a script
    load(any_script)
    assert str(FOLDER) not in sys.path


def test_doctests_are_right(any_script):
    result = doctest.testmod(load(any_script))
    assert result.attempted > 0
    assert result.failed == 0


def test_doctests_of_the_shared_module_are_right():
    result = doctest.testmod(load("gsm8k").preprocessing)
    assert result.attempted > 0
    assert result.failed == 0
