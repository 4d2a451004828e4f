"""scripts/data_preprocess: what they write, what they drop, and that ppo_sync.py can load it."""

import doctest
import importlib.util
import random
import resource
import socket
import subprocess
import sys

import datasets
import huggingface_hub
import pyarrow.parquet
import pytest
from datasets.arrow_writer import ArrowWriter
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

    Writes to tmp_path/out, or to the folder `out`.
    """
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")

    def run(name, path, *flags, out=tmp_path / "out"):
        local = [] if path is None else ["--local_dataset_path", str(path)]
        arguments = [f"{name}.py", *local, "--local_save_dir", str(out), *flags]
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


NO_TEXTS = {"null": None, "number": 3, "list": ["No."], "object": {"a": "No."}, "empty": " "}


@pytest.mark.parametrize("split", ["rl", "rm", "sft"])
def test_row_whose_rejected_response_is_no_text_is_dropped(split, preprocess, tmp_path):
    rows = [{**HH[0], "rejected": value} for value in NO_TEXTS.values()]
    path = write_rows(tmp_path / "train.jsonl", [HH[0], *rows])
    status, said, _ = preprocess("full_hh_rlhf", path, "--split", split)
    assert status == 0
    assert said[0] == "train: 6 rows, 1 kept, 5 dropped (5: no text in `rejected`)"
    assert len(read(tmp_path / "out" / "train.parquet")) == 1


@pytest.mark.parametrize("kind", NO_TEXTS)
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_so_is_one_in_a_file_of_its_like(kind, suffix, preprocess, tmp_path):
    # A reader may give a column the type that all its values have
    path = write_rows(
        tmp_path / f"train.{suffix}", [{**HH[0], "rejected": NO_TEXTS[kind]} for _ in range(2)]
    )
    status, said, (error,) = preprocess("full_hh_rlhf", path, "--split", "sft")
    assert status == 2
    assert said == ["train: 2 rows, 0 kept, 2 dropped (2: no text in `rejected`)"]
    assert "no row is left" in error


def test_text_that_looks_like_a_date_is_a_text(preprocess, tmp_path):
    path = write_rows(tmp_path / "train.jsonl", [{**HH[0], "chosen": "2020-01-01T00:00:00"}])
    assert preprocess("full_hh_rlhf", path, "--split", "sft")[0] == 0
    assert read(tmp_path / "out" / "train.parquet")[0]["response"] == "2020-01-01T00:00:00"


@pytest.mark.parametrize(
    ("name", "column", "value"),
    [("gsm8k", "question", "Who?\ud800"), ("hellaswag", "endings", ["a", "b\udfff", "c", "d"])],
)
def test_row_with_half_a_surrogate_pair_is_dropped(name, column, value, preprocess, tmp_path):
    # JSON can hold one, as \ud800, and parquet cannot
    good, *_ = ROWS[name]
    path = write_rows(tmp_path / "train.jsonl", [good, {**good, column: value}])
    status, said, _ = preprocess(name, path)
    assert status == 0
    assert said[0] == (f"train: 2 rows, 1 kept, 1 dropped (1: half a surrogate pair in `{column}`)")
    assert len(read(tmp_path / "out" / "train.parquet")) == 1


def test_rows_need_not_have_all_columns(preprocess, tmp_path):
    path = write_rows(tmp_path / "train.jsonl", [*GSM8K[:1], {"question": "Who?"}, {}])
    status, said, _ = preprocess("gsm8k", path)
    assert status == 0
    assert "2 dropped (1: no text in `answer`; 1: no text in `question`)" in said[0]


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


@pytest.fixture
def closed_port():
    """A port of this machine at which connections are refused."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


@pytest.fixture
def silent_port():
    """A port of this machine that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def deaf_port():
    """A port of this machine that drops connections, like a router that swallows packets."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server:
        waiting = [socket.socket() for _ in range(3)]
        for client in waiting:
            client.setblocking(False)
            client.connect_ex(server.getsockname())
        yield server.getsockname()[1]
        for client in waiting:
            client.close()


@pytest.mark.slow
def test_hub_that_does_not_answer_ends_the_command_soon(
    closed_port, silent_port, deaf_port, tmp_path
):
    own = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    running = []
    for port in (closed_port, silent_port, deaf_port):
        env = environment(
            {
                "HF_ENDPOINT": f"http://127.0.0.1:{port}",
                "HF_HOME": str(tmp_path / "home"),
                "HF_HUB_OFFLINE": "0",
            }
        )
        command = [sys.executable, FOLDER / "gsm8k.py", "--local_save_dir", tmp_path / "out"]
        running.append(subprocess.Popen(command, env=env, **own))
    try:
        ends = [process.communicate(timeout=60) for process in running]
    finally:
        for process in running:
            process.kill()
    for process, (_, errors) in zip(running, ends, strict=True):
        assert process.returncode == 2
        (error,) = errors.splitlines()
        assert "openai/gsm8k: the hub does not answer" in error
        assert "--local_dataset_path" in error
    assert not (tmp_path / "out").exists()


def test_cached_dataset_is_taken_where_the_hub_does_not_answer(
    closed_port, preprocess, tmp_path, monkeypatch
):
    endpoint = f"http://127.0.0.1:{closed_port}"
    for config in (huggingface_hub.constants, datasets.config):
        monkeypatch.setattr(config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", endpoint)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    fill_cache(tmp_path / "cache" / "openai___gsm8k" / "main" / "0.0.0" / "0123456789abcdef")

    status, said, errors = preprocess("gsm8k", None)
    assert (status, errors) == (0, [])
    assert "train: 6 rows, 3 kept" in said[1]
    assert len(read(tmp_path / "out" / "train.parquet")) == 3


def fill_cache(folder):
    """What datasets.load_dataset leaves of GSM8K's rows in its cache."""
    folder.mkdir(parents=True)
    features = datasets.Features({column: datasets.Value("string") for column in GSM8K[0]})
    with ArrowWriter(path=str(folder / "gsm8k-train.arrow"), features=features) as writer:
        for row in GSM8K:
            writer.write(row)
        num_examples, num_bytes = writer.finalize()
    split = {"name": "train", "num_examples": num_examples, "num_bytes": num_bytes}
    datasets.DatasetInfo(
        features=features,
        splits=[{**split, "dataset_name": "gsm8k"}],
        builder_name="parquet",
        dataset_name="gsm8k",
        config_name="main",
        version="0.0.0",
    ).write_to_directory(str(folder))


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


def write_bytes(path, data):
    path.write_bytes(data)
    return path


def link(path, target):
    path.parent.mkdir(exist_ok=True)
    path.symlink_to(target)
    return path


def cut_parquet(folder):
    path = write_rows(folder / "train.parquet", GSM8K)
    return write_bytes(path, path.read_bytes()[:-100])


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
    "empty path": (lambda _: "", [], ["--local_dataset_path", "empty"]),
    "name too long": (lambda tmp: tmp / ("x" * 300), [], ["--local_dataset_path", "no such file"]),
    "path too long": (lambda tmp: tmp / ("x/" * 3000), [], ["no such file"]),
    "below a file": (lambda tmp: write_text(tmp / "a", "") / "b", [], ["a/b", "no such file"]),
    "loop of links": (
        lambda tmp: link(tmp / "train.jsonl", tmp / "train.jsonl"),
        [],
        ["train.jsonl", "no such file"],
    ),
    "loop of links in a folder": (
        lambda tmp: link(tmp / "a" / "train.jsonl", "train.jsonl").parent,
        [],
        ["a: ", ".jsonl or .parquet"],
    ),
    "folder of CSV": (
        lambda tmp: write_text(tmp / "raw" / "train.csv", "question,answer\nWho?,#### 3\n").parent,
        [],
        ["raw", ".jsonl or .parquet"],
    ),
    "latin-1": (
        lambda tmp: write_bytes(tmp / "train.jsonl", b'{"question": "Caf\xe9?"}\n'),
        [],
        ["train.jsonl", "utf-8", "0xe9"],
    ),
    "no object": (
        lambda tmp: write_text(tmp / "train.jsonl", '{"question": "a"}\n[3]\n'),
        [],
        ["train.jsonl", "line 2", "no JSON object"],
    ),
    "nested too deeply": (
        lambda tmp: write_text(tmp / "train.jsonl", "[" * 10**5),
        [],
        ["train.jsonl", "recursion"],
    ),
    "cut parquet": (cut_parquet, [], ["train.parquet", "no rows"]),
    "two columns of a name": (
        lambda tmp: two_columns_of_a_name(tmp / "train.parquet"),
        [],
        ["train.parquet", "no rows"],
    ),
    "no text in parquet": (
        lambda tmp: garbage_table(tmp, {"question": pyarrow.nulls(3), "answer": ["#### 3"] * 3}),
        [],
        ["no row is left"],
    ),
    "text that is no UTF-8": (
        lambda tmp: garbage_table(tmp, {"question": not_utf8(), "answer": ["#### 3"]}),
        [],
        ["train.parquet", "utf-8", "0xff"],
    ),
    "control codes and markup in a column": (
        lambda tmp: write_rows(tmp / "train.jsonl", [{"\x1b[1m[red]\x00": 3, "\x9b": 4}]),
        [],
        [r"\x1b[1m[red]\x00, \x9b", "no column `question`"],
    ),
    "half a surrogate pair in a column": (
        lambda tmp: write_rows(tmp / "train.jsonl", [{"a\ud800": 3}]),
        [],
        [r"a\ud800", "no column `question`"],
    ),
    "long list of columns": (
        lambda tmp: write_rows(tmp / "train.jsonl", [{f"column_{i}": 3 for i in range(200)}]),
        [],
        ["train.jsonl", "no column `question`", "column_199"],
    ),
    "control codes in a name": (
        lambda tmp: write_rows(tmp / "\x1b[1mtrain\u202e.jsonl", [{"a": 3}]),
        [],
        [r"\x1b[1mtrain\u202e.jsonl"],
    ),
    "name that is no UTF-8": (
        lambda tmp: write_rows(tmp / "\udcff.parquet", [{"a": 3}]),
        ["--split_name", "train"],
        [r"\udcff.parquet", "no column `question`"],
    ),
    "control codes in a flag": (lambda _: None, ["--\x1b[1m"], ["unknown flag", r"--\x1b[1m"]),
}


def garbage_table(folder, columns):
    pyarrow.parquet.write_table(pyarrow.table(columns), folder / "train.parquet")
    return folder / "train.parquet"


def two_columns_of_a_name(path):
    pyarrow.parquet.write_table(pyarrow.table([["a"], ["b"]], names=["question"] * 2), path)
    return path


def not_utf8():
    """A column of text that holds b"\\xff"."""
    return pyarrow.array([b"\xff"]).view(pyarrow.string())


def all_in(folder):
    """What is in a folder, and what is in its files; None for all else, such as folders, links."""
    paths = [path for path in folder.rglob("*") if "cache" not in path.parts]
    return {path: path.read_bytes() if path.is_file() else None for path in paths}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_and_status_2(name, preprocess, tmp_path):
    make, flags, fragments = BAD[name]
    path = make(tmp_path)
    before = all_in(tmp_path)
    status, said, errors = preprocess("gsm8k", path, *flags)
    assert status == 2
    (error,) = errors
    assert error.startswith("gsm8k.py: error: ")
    assert len(error) < 500
    assert all(line.isprintable() for line in (error, *said))
    for fragment in fragments:
        assert fragment in error
    assert all_in(tmp_path) == before


def folder_in_the_way(folder):
    (folder / "train.parquet").mkdir(parents=True)
    return folder


# name: (--local_save_dir from a temporary folder, what the message must hold)
BAD_OUTPUTS = {
    "a file": (lambda tmp: write_text(tmp / "out", ""), "out: cannot be written"),
    "below a file": (lambda tmp: write_text(tmp / "a", "") / "b" / "c", "a/b/c: cannot be written"),
    "dangling link": (lambda tmp: link(tmp / "out", tmp / "none"), "out: cannot be written"),
    "below a dangling link": (lambda tmp: link(tmp / "a", tmp / "none") / "b", "a/b: cannot be"),
    "loop of links": (lambda tmp: link(tmp / "out", tmp / "out"), "out: cannot be written"),
    "name too long": (lambda tmp: tmp / "new" / ("x" * 300), "cannot be written"),
    "path too long": (lambda tmp: tmp / ("x/" * 3000), "cannot be written"),
    "empty path": (lambda _: "", "--local_save_dir is empty"),
    "folder in the way": (
        lambda tmp: folder_in_the_way(tmp / "out"),
        "out/train.parquet: in the way",
    ),
    "loop of links in the way": (
        lambda tmp: link(tmp / "out" / "train.parquet", "train.parquet").parent,
        "out/train.parquet: in the way",
    ),
}


@pytest.mark.parametrize("name", BAD_OUTPUTS)
def test_bad_output_is_refused_before_a_row_is_read(name, preprocess, tmp_path, monkeypatch):
    make, fragment = BAD_OUTPUTS[name]
    monkeypatch.chdir(tmp_path)
    path = write_text(tmp_path / "train.jsonl", "no row that can be read")
    out = make(tmp_path)
    before = all_in(tmp_path)
    for flags in (["full_hh_rlhf", path, "--split", "rl"], ["gsm8k", path]):
        status, _, (error,) = preprocess(*flags, out=out)
        assert status == 2
        assert "--local_save_dir" in error or "in the way" in error
        assert fragment in error
        assert error.isprintable()
    assert all_in(tmp_path) == before


@pytest.fixture
def small_disk(mount_disk):
    return mount_disk(2**20)


@pytest.mark.parametrize("kind", ["full", "read-only"])
def test_disk_that_cannot_be_written_to_is_refused_before_a_row_is_read(
    kind, small_disk, preprocess, tmp_path
):
    path = write_text(tmp_path / "train.jsonl", "no row that can be read")
    if kind == "full":
        (small_disk / "filler").write_bytes(bytes(2**20 - 2**13))
    else:
        subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    before = all_in(tmp_path)
    for out in (small_disk, small_disk / "new" / "folder"):
        status, _, (error,) = preprocess("gsm8k", path, out=out)
        assert status == 2
        assert f"--local_save_dir {out}: cannot be written to" in error
    assert all_in(tmp_path) == before


@pytest.mark.slow
def test_disk_that_fills_up_leaves_the_older_files(tmp_path):
    # Written as it comes, it would cut the older file, and Arrow would die by a signal.
    letters = random.Random(0)
    rows = [
        {"question": "".join(letters.choices("abcdefgh", k=400)), "answer": f"#### {number}"}
        for number in range(8000)
    ]
    write_rows(tmp_path / "raw" / "train.jsonl", rows)
    write_rows(tmp_path / "raw" / "test.jsonl", rows[:10])
    for split in ("train", "test"):
        write_text(tmp_path / "out" / f"{split}.parquet", "older")
    before = all_in(tmp_path)
    limit = 2**19  # of a file, in bytes: the one for train is larger
    for out in (tmp_path / "out", tmp_path / "new" / "folder"):
        options = ["--local_dataset_path", tmp_path / "raw", "--local_save_dir", out]
        done = subprocess.run(
            [sys.executable, FOLDER / "gsm8k.py", *options],
            env=environment({}),
            capture_output=True,
            text=True,
            timeout=120,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
        )
        assert done.returncode == 2
        (error,) = done.stderr.splitlines()
        assert f"--local_save_dir {out}: cannot be written to" in error
        assert "written" not in done.stdout
        assert all_in(tmp_path) == before


def test_older_files_are_replaced(preprocess, tmp_path):
    write_text(tmp_path / "out" / "train.parquet", "older")
    assert preprocess("gsm8k", write_rows(tmp_path / "train.jsonl", GSM8K))[0] == 0
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["train.parquet"]
    assert len(read(tmp_path / "out" / "train.parquet")) == 3


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
    # Python puts the folder of the script on its path, and with it a math.py that is not its own,
    # whether that is the current folder, as in the first run, or not.
    path = write_rows(tmp_path / "train.jsonl", ROWS[any_script])
    out = tmp_path / "caf\u00e9\x1b[1m"
    options = ["--local_dataset_path", str(path), "--local_save_dir", str(out)]
    options += flags_for(any_script)
    env = environment({"PYTHONIOENCODING": "ascii"})  # a terminal that cannot show all names
    own = {"env": env, "capture_output": True, "text": True, "timeout": 120}
    command = [sys.executable, f"{any_script}.py", *options]
    done = subprocess.run(command, cwd=FOLDER, **own)
    assert (done.returncode, done.stderr) == (0, "")
    first, second = done.stdout.splitlines()
    assert first.startswith(f"train: {len(ROWS[any_script])} rows, ")
    assert r"caf\xe9\x1b[1m/train.parquet: " in second
    assert len(read(out / "train.parquet")) > 0
    path.unlink()
    command = [sys.executable, str(FOLDER / f"{any_script}.py"), *options]
    done = subprocess.run(command, cwd=tmp_path, **own)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1


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
