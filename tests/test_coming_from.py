"""docs/coming_from.md: the lines that take over a dataset and rewards of TRL."""

import re
import runpy

import pytest
from helpers import REPO, modules
from helpers.files import write_rows, write_text
from transformers import AutoTokenizer

import ppo_vllm_async as script
from ppo_vllm_async import Args, Response

PAGE = (REPO / "docs" / "coming_from.md").read_text()
# In TRL's form: lists in, a list out, a column of the dataset by its name
REWARDS = """
def texts_of(prompts, completions):
    if isinstance(prompts[0], str):
        return completions
    assert prompts[0][-1]["role"] == "user"
    assert [message["role"] for message in completions[0]] == ["assistant"]
    return [completion[0]["content"] for completion in completions]

def accuracy(prompts, completions, answer, **kwargs):
    assert kwargs["stopped"] == [True] and "prompt" not in kwargs and "completion" not in kwargs
    texts = texts_of(prompts, completions)
    return [float(right in text) for right, text in zip(answer, texts, strict=True)]

def brevity(completions, task, num_tokens, **kwargs):
    return [None if of == "essay" else 1 / size for of, size in zip(task, num_tokens, strict=True)]
"""
QUESTION = "12="
CHAT = [{"role": "user", "content": QUESTION}]
ROW = {"prompt": QUESTION, "answer": "21", "task": "sort", "hints": [{"text": "sort"}]}
# A row of TRL's; the score of a response that says 21 in four tokens, and metrics
ROWS = {
    "text": (ROW, 1.025, {"accuracy": 1.0, "brevity": 0.25}),
    "conversation": (ROW | {"prompt": CHAT}, 1.025, {"accuracy": 1.0, "brevity": 0.25}),
    "wrong": (ROW | {"answer": "12"}, 0.025, {"accuracy": 0.0, "brevity": 0.25}),
    "a reward that does not apply": (ROW | {"task": "essay"}, 1.0, {"accuracy": 1.0}),
    "with a completion": (ROW | {"completion": "21"}, 1.025, {"accuracy": 1.0, "brevity": 0.25}),
}


def block(name):
    """A program that the page shows."""
    pattern = rf"^    # {re.escape(name)}\n((?:    .*\n|\n(?=    ))+)"
    (lines,) = re.findall(pattern, PAGE, re.MULTILINE)
    return re.sub("^    ", "", lines, flags=re.MULTILINE)


@pytest.fixture
def convert(tmp_path, assets, monkeypatch):
    """convert(row of TRL's): a Prompt of the script's, by the page's first program."""
    tokenizer = AutoTokenizer.from_pretrained(assets / "model")
    program = write_text(tmp_path / "convert.py", block("convert.py"))
    monkeypatch.chdir(tmp_path)

    def convert(row):
        write_rows(tmp_path / "trl.jsonl", [row, row])
        runpy.run_path(str(program), run_name="__main__")
        args = Args(reward_fn="trl_reward.py:score")
        prompts = script.load_prompts("train.parquet", None, "train", tokenizer, args, False)
        assert len(prompts) == 2
        return prompts[1]

    return convert


def grade(prompt, text, folder, rewards=REWARDS):
    """A response with its reward, by the page's second program, in a file beside TRL's rewards."""
    write_text(folder / "my_rewards.py", rewards)
    path = write_text(folder / "trl_reward.py", block("trl_reward.py"))
    response = Response(prompt, [9] * 4, [-1.0] * 4, stopped=True, text=text)
    with modules.put_back(["my_rewards", "trl_reward"]):
        return script.call_reward_fn(f"{path}:score", response)


@pytest.mark.parametrize("name", ROWS)
def test_rows_and_rewards_of_trl_work_in_the_lines_of_the_page(name, convert, tmp_path):
    row, score, metrics = ROWS[name]
    prompt = convert(row)
    assert QUESTION in prompt.text and prompt.ground_truth == row["answer"]
    assert prompt.extra_info == row
    graded = grade(prompt, "It is 21", tmp_path)
    assert graded.failure is None
    assert graded.verifiable == pytest.approx(score)
    assert graded.reward_metrics == metrics


def test_response_to_which_no_reward_of_trl_applies_has_no_score(convert, tmp_path):
    prompt = convert(ROW | {"task": "essay"})
    graded = grade(prompt, "It is 21", tmp_path, REWARDS + "\naccuracy = brevity\n")
    assert graded.verifiable is None and "all rewards are None" in graded.failure
