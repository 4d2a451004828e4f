"""What takes over a dataset and rewards of TRL: trl.py of data_preprocess, trl_rewards.py."""

import importlib.util
import queue
import sys

import pytest
from helpers import REPO, modules
from helpers.files import write_rows, write_text
from transformers import AutoTokenizer

import ppo_vllm_async as script
from ppo_vllm_async import Args, Prompt, Response

PROGRAM = REPO / "scripts" / "data_preprocess" / "trl.py"
REWARD_FN = f"{REPO}/scripts/rewards/trl_rewards.py"
# In TRL's form: lists in, a list out, a column of the dataset by its name
REWARDS = """
import asyncio

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

def hinted(hints, **kwargs):
    return [sum(hint["text"] == "sort" for hint in of) for of in hints]

def overlong(completion_ids, **kwargs):
    return [min(0.0, (2 - len(ids)) / 2) for ids in completion_ids]

def last_token(completion_ids, **kwargs):
    return [ids[-1] == 9 for ids in completion_ids]

def telling(completions, log_extra, log_metric, trainer_state=None, **kwargs):
    log_extra("text", completions)
    log_metric(name="length", value=len(completions[0]))
    return [0.5 if trainer_state is None else 1.0]

def by_step(completions, trainer_state, **kwargs):
    return [trainer_state.global_step / 100]

class Judge:
    client = None

    async def __call__(self, completions, **kwargs):
        loop = asyncio.get_running_loop()
        self.client = self.client or loop  # as a client's session, which is for one loop alone
        await asyncio.sleep(0)
        assert self.client is loop
        return [0.75 for _ in completions]

judge = Judge()

def starts_a_loop(completions, **kwargs):
    return asyncio.run(Judge()(completions))

def one_for_all(completions, **kwargs):
    return 1.0
"""
BOTH = "my_rewards.accuracy,my_rewards.brevity=0.1"
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
# What is named after the colon: the score of that response, and metrics
NAMED = {
    "accuracy": (1.0, {"accuracy": 1.0}),
    "accuracy=2,brevity=0,hinted=-1": (1.0, {"accuracy": 1.0, "brevity": 0.25, "hinted": 1.0}),
    "overlong": (-1.0, {"overlong": -1.0}),
    "telling": (0.5, {"telling": 0.5, "length": 8.0}),
    "judge,starts_a_loop,judge": (2.25, {"judge": 0.75, "starts_a_loop": 0.75}),
}
# And what is said of it, in a row of an essay
REFUSED = {
    "accuracy": "'accuracy' is no import path",
    "my_rewards.by_step": "'NoneType' object has no attribute 'global_step'",
    "my_rewards.last_token": "'TokenIds' object is not subscriptable",
    "my_rewards.one_for_all": "cannot unpack non-iterable float",
    "my_rewards.brevity": "all rewards are None",
}


@pytest.fixture(autouse=True)
def my_rewards(tmp_path, monkeypatch):
    """The run starts where TRL's rewards lie."""
    monkeypatch.chdir(tmp_path)
    write_text(tmp_path / "my_rewards.py", REWARDS)
    script.load_reward_fn.cache_clear()
    with modules.put_back(["my_rewards", "trl_rewards"]):
        yield


@pytest.fixture
def convert(tmp_path, assets, monkeypatch):
    """convert(row of TRL's): a Prompt of the script's, from what the program writes."""
    tokenizer = AutoTokenizer.from_pretrained(assets / "model")
    spec = importlib.util.spec_from_file_location("preprocess_trl", PROGRAM)
    program = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, program)  # tyro reads its source
    spec.loader.exec_module(program)

    def convert(row, answer="answer"):
        write_rows(tmp_path / "train.jsonl", [row, row])
        command = ["trl.py", "--local_dataset_path", "train.jsonl", "--local_save_dir", "out"]
        command += ["--answer", answer]
        monkeypatch.setattr(sys, "argv", command)
        program.main()
        args = Args(reward_fn=f"{REWARD_FN}:{BOTH}")
        prompts = script.load_prompts("out/train.parquet", None, "train", tokenizer, args, False)
        assert len(prompts) == 2
        return prompts[1]

    return convert


def respond(row):
    prompt = Prompt("row 0", QUESTION, [5], "trl", row["answer"], row)
    return Response(prompt, [9] * 4, [-1.0] * 4, stopped=True, text="It is 21")


def grade(row, names=BOTH):
    return script.call_reward_fn(f"{REWARD_FN}:{names}", respond(row))


@pytest.mark.parametrize("name", ROWS)
def test_rows_and_rewards_of_trl_work_as_they_are(name, convert):
    row, score, metrics = ROWS[name]
    prompt = convert(row)
    assert QUESTION in prompt.text and prompt.ground_truth == row["answer"]
    assert prompt.extra_info == row
    graded = grade(prompt.extra_info)
    assert graded.failure is None
    assert graded.verifiable == pytest.approx(score)
    assert graded.reward_metrics == metrics | {"right": metrics["accuracy"]}


@pytest.mark.parametrize("names", NAMED)
def test_functions_are_named_as_in_trl_with_their_weights(names):
    score, metrics = NAMED[names]
    paths = ",".join(f"my_rewards.{name}" for name in names.split(","))
    for _ in range(2):
        graded = grade(ROW, paths)
        assert graded.failure is None
        assert graded.verifiable == pytest.approx(score)
        first = next(iter(metrics.values()))
        assert graded.reward_metrics == metrics | {"right": first}


@pytest.mark.parametrize("names", REFUSED)
def test_what_does_not_work_is_said(names):
    graded = grade(ROW | {"task": "essay"}, names)
    assert graded.verifiable is None and REFUSED[names] in graded.failure


def test_first_reward_says_what_is_right():
    wrong, essay = ROW | {"answer": "12"}, ROW | {"task": "essay"}
    for names, row, is_right in (
        ("my_rewards.accuracy=0.5", ROW, True),  # whatever the score is
        ("my_rewards.accuracy,my_rewards.hinted=2", wrong, False),
        # It does not apply; so the score says it
        ("my_rewards.brevity,my_rewards.accuracy", essay, True),
    ):
        metrics = script.score_metrics("eval", [grade(row, names)], Args())
        assert metrics["eval/verifiable_correct_rate"] == is_right


@pytest.mark.slow
def test_worker_finds_rewards_where_the_run_starts_before_others(tmp_path):
    """Of a name that scripts/rewards has, too."""
    write_text(tmp_path / "judge.py", REWARDS)
    workers = queue.Queue()
    args = Args(reward_fn=f"{REWARD_FN}:judge.accuracy", reward_timeout=30)
    try:
        workers.put(script.start_reward_worker(args.reward_fn))
        graded = script.call_worker(workers, respond(ROW), args)
    finally:
        script.end_children()
    assert (graded.verifiable, graded.failure) == (1.0, None)


def test_column_with_the_answer_is_named(convert, capsys):
    row = {"prompt": CHAT, "answer": None, "solution": ["3", "3.0"]}
    assert convert(row, "solution").ground_truth == ["3", "3.0"]
    for answer, said in {"answer": "2: nothing in `answer`", "label": "no column `label`"}.items():
        with pytest.raises(SystemExit):
            convert(row, answer)
        assert said in "".join(capsys.readouterr())


def test_keys_for_the_chat_template_stay_where_they_are_read(convert, tmp_path):
    keys = {"tools": [{"type": "function"}], "chat_template_kwargs": {"enable_thinking": False}}
    convert(ROW | {"prompt": CHAT} | keys)
    (row, _) = script.load_rows(str(tmp_path / "out" / "train.parquet"), None, "train")
    assert {name: row[name] for name in keys} == {name: row["extra_info"][name] for name in keys}
    assert row | keys == row
