"""Test the programs that use a dataset and rewards of TRL: trl.py and trl_rewards.py."""

import functools
import runpy
import sys
from pathlib import Path

import pytest
from helpers import REPO, modules
from helpers.files import write_rows, write_text
from transformers import AutoTokenizer

import ppo_vllm_async as script
from ppo_vllm_async import Args, Prompt, Response

PROGRAM = REPO / "scripts" / "data_preprocess" / "trl.py"
REWARD_FN = f"{REPO}/scripts/rewards/trl_rewards.py"
# Rewards in TRL's form: they get lists, return a list, and get columns of the dataset by name
REWARDS = """
import asyncio

def accuracy(prompts, completions, answer, **kwargs):
    assert kwargs["stopped"] == [True] and "prompt" not in kwargs and "completion" not in kwargs
    if not isinstance(prompts[0], str):
        assert prompts[0][-1]["role"] == "user"
        assert [message["role"] for message in completions[0]] == ["assistant"]
        completions = [completion[0]["content"] for completion in completions]
    return [float(right in text) for right, text in zip(answer, completions, strict=True)]

def brevity(completions, task, num_tokens, **kwargs):
    return [None if of == "essay" else 1 / size for of, size in zip(task, num_tokens, strict=True)]

def overlong(completion_ids, **kwargs):
    return [min(0.0, (2 - len(ids)) / 2) for ids in completion_ids]

def telling(completions, log_extra, log_metric, trainer_state=None, **kwargs):
    log_extra("text", completions)
    log_metric(name="length", value=len(completions[0]))
    return [0.5 if trainer_state is None else 1.0]

class Judge:
    client = None

    async def __call__(self, completions, **kwargs):
        loop = asyncio.get_running_loop()
        self.client = self.client or loop  # like a client's session, which belongs to one loop
        await asyncio.sleep(0)
        assert self.client is loop
        return [0.75 for _ in completions]

judge = Judge()
"""
CHAT = [{"role": "user", "content": "12="}]
ROW = {"prompt": "12=", "answer": "21", "task": "sort", "hints": [{"text": "sort"}]}
ESSAY, WRONG = ROW | {"task": "essay"}, ROW | {"answer": "12"}
BOTH = "accuracy,brevity=0.1"
# Functions, a row of TRL's dataset, the score of a response with "21" in four tokens, whether it is
# correct, and metrics
GRADED = [
    (BOTH, ROW, 1.025, 1, {"accuracy": 1.0, "brevity": 0.25}),
    (BOTH, ROW | {"prompt": CHAT}, 1.025, 1, {"accuracy": 1.0, "brevity": 0.25}),
    (BOTH, WRONG, 0.025, 0, {"accuracy": 0.0, "brevity": 0.25}),
    (BOTH, ESSAY, 1.0, 1, {"accuracy": 1.0}),  # a reward that does not apply
    (BOTH, ROW | {"completion": "21"}, 1.025, 1, {"accuracy": 1.0, "brevity": 0.25}),
    ("accuracy=0.5", ROW, 0.5, 1, {"accuracy": 1.0}),  # the first function decides what is correct
    ("accuracy,brevity=8", WRONG, 2.0, 0, {"accuracy": 0.0, "brevity": 0.25}),
    # The first does not apply, so the score decides
    ("brevity,accuracy=0.5", ESSAY, 0.5, 0, {"accuracy": 1.0}),
    ("overlong", ROW, -1.0, 0, {"overlong": -1.0}),
    ("telling", ROW, 0.5, 0, {"telling": 0.5, "length": 8.0}),
    *[("judge", ROW, 0.75, 0, {"judge": 0.75})] * 2,  # the second call uses the client of the first
]


@pytest.fixture(autouse=True)
def my_rewards(tmp_path, monkeypatch):
    """Work in a folder with rewards of TRL."""
    monkeypatch.chdir(tmp_path)
    write_text(tmp_path / "my_rewards.py", REWARDS)
    load.cache_clear()
    with modules.put_back(["my_rewards", "trl_rewards"]):
        yield


@pytest.fixture
def convert(assets, monkeypatch, tmp_path):
    """Return convert(row of TRL's dataset) -> the script's Prompt of what the program writes."""
    tokenizer = AutoTokenizer.from_pretrained(assets / "model")

    def convert(row, answer="answer"):
        write_rows(tmp_path / "train.jsonl", [row, row])
        command = ["trl.py", "--local_dataset_path", "train.jsonl", "--local_save_dir", "out"]
        monkeypatch.setattr(sys, "argv", [*command, "--answer", answer])
        runpy.run_path(str(PROGRAM), run_name="__main__")
        args = Args(reward_fn=f"{REWARD_FN}:my_rewards.accuracy")
        prompts = script.load_prompts("out/train.parquet", None, "train", tokenizer, args, False)
        assert len(prompts) == 2
        return prompts[1]

    return convert


def grade(row, names):
    prompt = Prompt("row 0", "12=", [5], "trl", row["answer"], row)
    response = Response(prompt, [9] * 4, [-1.0] * 4, stopped=True, text="It is 21")
    script.reward_function = load(names)
    return script.call_reward_fn(response)


@functools.cache
def load(names):
    """A worker loads its functions once, for all of its calls."""
    return script.load_function(f"{REWARD_FN}:{names}", Path(REWARD_FN).read_bytes())


def test_functions_of_trl_work_without_changes_or_give_a_reason():
    for names, row, score, is_correct, metrics in GRADED:
        graded = grade(row, ",".join(f"my_rewards.{name}" for name in names.split(",")))
        assert graded.failure is None and graded.verifiable == pytest.approx(score)
        logged = dict(graded.reward_metrics)
        logged.pop("right", None)
        assert logged == metrics
        means = script.score_metrics("eval", [graded], Args())
        assert means["eval/verifiable_correct_rate"] == is_correct
    graded = grade(ESSAY, "my_rewards.brevity")
    assert graded.verifiable is None and "all rewards are None" in graded.failure


def test_rows_keep_every_column_of_trl(convert, tmp_path):
    keys = {"tools": [{"type": "function"}], "chat_template_kwargs": {"enable_thinking": False}}
    for row in (ROW, ROW | {"prompt": CHAT} | keys):
        prompt = convert(row)
        assert "12=" in prompt.text and prompt.ground_truth == row["answer"]
        assert prompt.extra_info == row
    # Keys for the chat template stay at the top, where the script reads them
    (row, _) = script.load_rows(str(tmp_path / "out" / "train.parquet"), None, "train")
    assert row | keys == row


def test_answer_names_the_column_with_the_ground_truth(convert, capsys):
    row = {"prompt": CHAT, "answer": None, "solution": ["3", "3.0"]}
    assert convert(row, "solution").ground_truth == ["3", "3.0"]
    for answer, error in {"answer": "2: nothing in `answer`", "label": "no column `label`"}.items():
        with pytest.raises(SystemExit):
            convert(row, answer)
        assert error in "".join(capsys.readouterr())
