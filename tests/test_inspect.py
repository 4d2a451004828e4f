"""A run in the terminal, and what is said of it at its end: scripts/inspect_run.py."""

import io
import json
import os
import shlex
import subprocess
import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import inspect_run
import pytest
from helpers.files import write_rows, write_text
from inspect_run import RATE, SCORE
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import ppo_vllm_async as script

# Of a step with 4 s of training, without waits; and of a batch that took as long
LINE = {"policy/staleness": 1.0, "time/training": 4.0, "time/update": 3.0, "time/forward": 0.8}
LINE |= {"time/reward_model": 0.2, "time/generation": 3.0, "time/reward": 1.0}
LINE |= {"time/evaluation": 0.0, "time/wait_for_generation": 0.0, "time/wait_for_prompts": 0.0}
LONG_WAITS = {"time/wait_for_generation": 90.0, "time/wait_for_prompts": 90.0}
WAITS = {"time/wait_for_generation": 2.0}
SLOW_REWARD = {"time/generation": 1.0, "time/reward": 3.0}
IN_TURNS = {"policy/staleness": 0.0, "time/wait_for_generation": 1.0}
VLLM_WAITED = "vLLM waited for the learner 17% of the time (a training step: updates 75%, forward "
VLLM_WAITED += "passes 20%, {} 5%): more learners or shorter responses help"
SLOW = "more --reward_workers or a faster reward help"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"time/wait_for_prompts": 0.7}, None),  # 15% of the time of vLLM's side
        ({"time/wait_for_prompts": 0.8}, VLLM_WAITED.format("reports of evaluations")),
        (
            {"time/wait_for_prompts": 0.8, "objective/reward_model_score": 0.5},
            VLLM_WAITED.format("reward model"),
        ),
        (
            WAITS,
            "The learner waited for vLLM 50% of the time (a batch: generation 75%, rewards 25%): "
            "more GPUs for vLLM (--vllm_gpus) or shorter responses help",
        ),
        (
            WAITS | SLOW_REWARD,
            "The learner waited for the rewards 50% of the time (a batch: generation 25%, rewards "
            f"75%): {SLOW}",
        ),
        (
            IN_TURNS | {"time/training": 5.0, "time/generation": 0.95, "time/reward": 0.05},
            "Generation and training took turns (a step: generation 19%, rewards 1%, updates 60%, "
            "forward passes 16%, reports of evaluations 4%)",
        ),
        (
            IN_TURNS | SLOW_REWARD | {"time/training": 8.0, "time/reward_model": 0.0},
            "Generation and training took turns (a step: generation 12%, rewards 38%, updates 38%, "
            f"forward passes 10%). The reward is slow: {SLOW}",
        ),
    ],
)
def test_verdict_names_who_waited_and_what_for(line, said):
    process = [LINE | line | LONG_WAITS, *[LINE | line] * 3]  # it begins with waiting
    assert inspect_run.describe_speed(process) == said
    resumed = {"time/training": 4.0}  # the responses are the checkpoint's
    assert inspect_run.describe_speed([*process, resumed, *process]) == said
    for number in (0, 1, 2):  # batch 2 is asked for before step 1
        assert inspect_run.describe_speed(process[:number]) is None


def test_steps_of_ppo_sync_take_turns():
    line = {name: LINE[name] for name in LINE if "wait" not in name and "stale" not in name}
    assert inspect_run.describe_speed([line] * 3).startswith("Generation and training took turns")


# ------------------------------------------------------------------------------ a run's folder


def byte_tokenizer():
    """A token for each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def response(step, text, advantages, **changes):
    """A line of rollouts.jsonl; advantages: one for each byte."""
    row = {"prompt": "<|user|>213=", "response": text, "score": 1.0, "ground_truth": "123"}
    row |= {"length": len(text), "stopped": True, "policy_version": step - 2}
    row |= {"training_step": step, "token_ids": byte_tokenizer().encode(text).ids}
    return row | {"advantages": advantages} | changes


def metrics_lines(steps, **own):
    line = {"time/from_scratch": 90.0, "objective/reward/short": 0.5, "val/ratio": 1.0} | own
    lines = [
        json.dumps(line | {"training_step": step, "objective/kl": step / 8})
        for step in range(1, steps + 1)
    ]
    return "\n".join(lines) + "\n"


@pytest.fixture
def run_dir(tmp_path):
    """A run that goes on: of 5 steps it has 3, and is about to write more."""
    args = {"exp_name": "my_ppo", "run_name": "mine", "num_training_steps": 5}
    args |= {"model_name_or_path": str(tmp_path / "first"), "model_revision": None}
    args["tokenizer_name_or_path"] = None
    args["provenance"] = {"command": ["my_ppo.py", "--dataset", "my data.parquet"]}
    run = tmp_path / "mine"
    write_text(run / "args.json", json.dumps(args))
    write_text(tmp_path / "first/tokenizer.json", byte_tokenizer().to_str())
    (run / "metrics.jsonl").write_text(metrics_lines(3) + '{"training_st')
    lines = [
        response(2, "old", [1.0] * 3),
        response(3, "123", [0.5, -0.25, 0.0]),
        response(3, "321", [-2.0] * 3, score=None),
        response(3, "4", [1.0], prompt="<|user|>4="),
    ]
    path = write_rows(run / "rollouts.jsonl", lines)
    path.write_text(path.read_text() + json.dumps(lines[0])[:30])
    return run


@pytest.fixture
def inspect(monkeypatch, capsys):
    """inspect(run_dir, flags) -> the lines that inspect_run.py prints where it is no terminal."""

    def inspect(*command):
        monkeypatch.setattr(sys, "argv", ["inspect_run.py", *map(str, command)])
        monkeypatch.setenv("COLUMNS", "200")
        inspect_run.main()
        return [line.rstrip() for line in capsys.readouterr().out.splitlines()]

    return inspect


def test_running_run_is_shown_as_far_as_it_is_written(run_dir, inspect, monkeypatch):
    shown = inspect(run_dir)
    assert shown[0] == f"mine: my_ppo, {run_dir.parent / 'first'}"
    assert shown[1] == "my_ppo.py --dataset 'my data.parquet'"
    assert shown[2].startswith("Step 3 of 5, after 1.5 minutes; that was ")
    assert [line.split() for line in shown[4:7]] == [
        ["metric", "first", "last"],
        ["objective/kl", "0.125", "▁▅█", "0.375"],
        ["objective/reward/short", "0.5", "▁▁▁", "0.5"],  # no metric of the scripts
    ]
    start = shown.index("Responses of step 3, sampled by policy version 1") + 2
    assert shown[start:] == [
        "",
        "<|user|>213=",
        "Ground truth: 123",
        "Scores: 1 none",
        "score 1, advantage +0.08 (-0.25 at '2' to +0.50 at '1'), 3 tokens, stopped",
        "  123",
        "score none, advantage -2.00, 3 tokens, stopped",
        "  321",
        "",
        "<|user|>4=",
        "Ground truth: 123",
        "score 1, advantage +1.00, 1 tokens, stopped",
        "  4",
    ]
    # Of a long file the end is read, as far as the step reaches
    monkeypatch.setattr(inspect_run, "BLOCK", 100)
    assert inspect(run_dir)[3:] == shown[3:]


def test_lines_are_read_backwards_whatever_the_blocks(tmp_path, monkeypatch):
    path = tmp_path / "rows.jsonl"
    assert list(inspect_run.read_backwards(path)) == []
    for block, end, count in product((1, 3, 4, 8, 1000), ("", '{"half": 1', "{"), range(4)):
        monkeypatch.setattr(inspect_run, "BLOCK", block)
        rows = [{"row": "ä" * i} for i in range(count)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows) + end)
        assert list(inspect_run.read_backwards(path)) == rows[::-1]


def shown_answers(lines):
    """The responses in what inspect_run.py prints."""
    return [line.strip() for line in lines if line.startswith("  ")]


def test_each_of_two_groups_is_shown_by_its_best_and_its_worst(run_dir, inspect):
    """Not the first eight: they are one group's."""
    lines = []
    for prompt in "ab":
        for i, advantage in enumerate([-0.5, 1.5, -0.5, -0.5, 1.4, -0.6, -0.4, -0.4]):
            changes = {"prompt": prompt, "score": float(advantage > 0)}
            lines.append(response(3, f"{prompt}{i}", [advantage] * 2, **changes))
    write_rows(run_dir / "rollouts.jsonl", lines)
    shown = inspect(run_dir)
    assert shown_answers(shown) == ["a1", "a3", "a4", "a5", "b1", "b3", "b4", "b5"]
    assert shown.count("Scores: 0 1 0 0 1 0 0 0") == 2
    assert shown[-1] == "8 more are left out: --responses shows more"
    assert shown_answers(inspect(run_dir, "--responses", 3)) == ["a1", "a5", "b1"]


def test_parts_of_a_score_are_beside_it(run_dir, inspect):
    parts = {"verifiable_score": 1.0, "reward_model_score": 0.25, "failure": None}
    parts |= {"score": 1.25, "reward_metrics": {f"m{i}": float(i) for i in range(9)}}
    write_rows(run_dir / "rollouts.jsonl", [response(3, "7", [0.5], **parts)])
    scores = "score 1.25 (verifiable 1, reward model 0.25)"
    metrics = "m0 0, m1 1, m2 2, m3 3, m4 4, m5 5, m6 6, m7 7, 1 more"
    assert inspect(run_dir)[-2] == f"{scores}, {metrics}, advantage +0.50, 1 tokens, stopped"


def test_colours_follow_each_token_s_advantage(run_dir):
    rows = inspect_run.last_responses(run_dir / "rollouts.jsonl")[:1]
    options = SimpleNamespace(responses=8, tokens=120)
    console = Console(file=io.StringIO(), force_terminal=True, color_system="truecolor")
    for part in inspect_run.show_responses(rows, byte_tokenizer(), options):
        console.print(part, markup=False, highlight=False)
    *_, last = console.file.getvalue().splitlines()
    # Half as strong below 0; and 0 has no colour
    assert last == "  \x1b[38;2;0;170;0m1\x1b[0m\x1b[38;2;188;45;45m2\x1b[0m3"


def test_run_without_its_tokenizer_has_words(run_dir, inspect):
    (run_dir.parent / "first/tokenizer.json").unlink()
    write_rows(run_dir / "rollouts.jsonl", [response(3, "one two", [-0.25] * 7, stopped=False)])
    shown = ["score 1, advantage -0.25, 7 tokens, cut", "  one two"]
    assert inspect(run_dir)[-2:] == shown
    assert inspect(run_dir, "--tokens", "0")[-2:] == [shown[0], "   [... 2 more ...]"]


def test_answer_does_not_command_the_terminal(run_dir, inspect):
    hostile = response(3, "\x1b[2Jgone", [1.0] * 8, ground_truth="\x1b[2J", prompt="\x1b[2J")
    write_rows(run_dir / "rollouts.jsonl", [hostile])
    assert "\x1b" not in "".join(inspect(run_dir))


def test_tokens_have_their_characters_and_spaces():
    def texts(tokenizer, ids):
        row = {"token_ids": ids, "advantages": list(range(len(ids)))}
        return inspect_run.split_response(row, tokenizer)

    ids = byte_tokenizer().encode("ä €").ids  # characters of several tokens are whole
    assert texts(byte_tokenizer(), ids) == [("ä", 0.5), (" ", 2), ("€", 4)]
    cut = texts(byte_tokenizer(), ids[:-1])
    assert [text for text, _ in cut] == ["ä", " ", "\N{REPLACEMENT CHARACTER}"]
    tokenizer = Tokenizer(models.WordLevel({"▁a": 0, "▁b": 1}, unk_token="▁a"))
    tokenizer.decoder = decoders.Metaspace()
    assert tokenizer.decode([1]) == "b"  # a lone token would lose its space
    assert texts(tokenizer, [0, 1]) == [("a", 0), (" b", 1)]


def test_run_without_a_step_is_one_that_begins(run_dir, inspect, capsys):
    for name in ("metrics", "rollouts"):
        (run_dir / f"{name}.jsonl").unlink()
    assert inspect(run_dir)[-1] == "No step is finished yet"
    with pytest.raises(SystemExit):
        inspect(run_dir, "--summary")
    assert "the run made no step" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        inspect(run_dir.parent)
    assert "holds no args.json" in capsys.readouterr().err
    assert inspect(run_dir, "--wrong")[-1] == "No response is written yet"


# ------------------------------------------------------------------------------ --wrong


def answer(prompt, version, score, text="x", **changes):
    """A line of samples.jsonl."""
    failure = None if score is not None else "Traceback ...\nValueError: no number\n"
    parts = {"verifiable_score": score, "reward_model_score": None, "failure": failure}
    parts |= {"reward_metrics": {} if failure else {"strict": score / 2}}
    line = {"prompt": prompt, "response": text, "score": score, "ground_truth": f"truth {prompt}"}
    line |= {"data_source": "a", "length": 7, "stopped": True, "policy_version": version}
    return line | parts | changes


# Scores of prompts before training, after 4 steps and after 9
HISTORIES = {"kept": (1.0, 1.0, 1.0), "learned": (0.0, 0.5, 1.0), "lost": (0.0, 1.0, 0.5)}
HISTORIES |= {"never": (0.0, 0.5, 0.0), "failed": (0.0, 1.0, None)}
COUNTS = [["0", "1", "4", "0"], ["4", "3", "2", "0", "2", "0"], ["9", "2", "2", "1", "1", "1"]]


def write_samples(run_dir, histories=HISTORIES, **changes):
    """The only answers that the run has; returns their lines."""
    (run_dir / "rollouts.jsonl").unlink()
    rows = [
        answer(prompt, version, scores[i], f"{prompt} after {version}", **changes)
        for i, version in enumerate((0, 4, 9))
        for prompt, scores in histories.items()
    ]
    write_rows(run_dir / "samples.jsonl", rows)
    return rows


def test_held_out_prompts_that_are_wrong_now_come_with_what_they_were(run_dir, inspect):
    write_samples(run_dir)
    shown = inspect(run_dir, "--wrong")
    headings = ["steps", "trained", "right", "wrong", "not", "known", "learned", "lost"]
    assert [line.split() for line in shown[4:8]] == [headings, *COUNTS]
    assert shown[9:17] == [
        "Wrong now, and right before: 1 of 5 prompts",
        "",
        "lost",
        "Ground truth: truth lost",
        "Scores by steps trained: 0: 0, 4: 1, 9: 0.5",
        "After 4 steps: score 1, strict 0.5: lost after 4",
        "After 9 steps: score 0.5, strict 0.25, 7 tokens, stopped",
        "  lost after 9",
    ]
    assert [line for line in shown[17:] if " of 5 prompts" in line or line.startswith("  ")] == [
        "Never right: 1 of 5 prompts",
        "  never after 9",
        "Their reward failed: 1 of 5 prompts",
        "  failed after 9",
    ]
    assert "After 9 steps: score none, ValueError: no number, 7 tokens, stopped" in shown


def test_what_is_shown_of_wrong_answers_is_limited(run_dir, inspect):
    (run_dir / "rollouts.jsonl").unlink()
    lines = []
    for version in range(20):
        for i in range(70):  # of which one is right at first
            score = float(version < 19 and i == 0)
            changes = {"data_source": f"s{i % 60}", "response": f"{i}: " + "ab" * 400}
            lines.append(answer("the same prompt", version, score, **changes))
    write_rows(run_dir / "samples.jsonl", lines)
    shown = inspect(run_dir, "--wrong", "--tokens", 5, "--responses", 4)
    assert sum(line == "the same prompt" for line in shown) == 4
    assert "Wrong now, and right before: 1 of 70 prompts" in shown
    assert "Never right: 69 of 70 prompts, of which 3 are shown" in shown
    (sources,) = (line for line in shown if line.startswith("Wrong by data source: "))
    assert sources.startswith("Wrong by data source: s0 2 of 2, ")
    assert sources.endswith(", 50 more sources") and sources.count("of 2") == 10
    start = next(i for i, line in enumerate(shown) if line.startswith("steps trained"))
    versions = [line.split()[0] for line in shown[start + 1 : start + 14]]
    assert versions == [*"012345", "...", *map(str, range(14, 20))]
    assert "  0: abababa [... 783 more characters ...] ababababab" in shown


def test_lines_of_older_scripts_are_right_by_their_score(run_dir, inspect):
    args = json.loads((run_dir / "args.json").read_text()) | {"verification_reward": 2.0}
    (run_dir / "args.json").write_text(json.dumps(args))
    rows = write_samples(run_dir)
    new = ("verifiable_score", "reward_model_score", "failure", "reward_metrics")
    rows = [{name: row[name] for name in row if name not in new} for row in rows]
    rows = [row | {"score": row["score"] and 2 * row["score"]} for row in rows]
    write_rows(run_dir / "samples.jsonl", rows)
    shown = inspect(run_dir, "--wrong")
    assert [line.split() for line in shown[5:8]] == COUNTS
    assert shown[-1] == "These files have no verifiable scores: right and wrong are by the score"


def test_penalties_and_the_reward_of_a_form_make_nothing_right_or_wrong(run_dir, inspect):
    (run_dir / "rollouts.jsonl").unlink()
    lines = [answer("cut", 0, 1.0) | {"score": -1.0}, answer("formal", 0, 0.0) | {"score": 1.0}]
    write_rows(run_dir / "samples.jsonl", lines)
    shown = inspect(run_dir, "--wrong")
    assert "Never right: 1 of 2 prompts" in shown
    assert "After 0 steps: score 1 (verifiable 0), strict 0, 7 tokens, stopped" in shown


def test_wrong_training_responses_are_those_of_the_last_steps(run_dir, inspect):
    def graded(step, text, score, **changes):
        parts = {"verifiable_score": score, "reward_metrics": {"strict": 0.5}, "failure": None}
        return response(step, text, [0.5] * len(text), score=score, **parts | changes)

    lines = [graded(1, "too old", 0.0), graded(2, "no", 0.0, prompt="2=")]
    lines += [graded(step, "yes", 1.0) for step in range(3, 21)]
    lines += [graded(21, "yes", 1.0), graded(21, "bad", 0.25), graded(21, "worse", 0.0)]
    lines.append(graded(21, "what", None, prompt="4=", failure="TimeoutError"))
    write_rows(run_dir / "rollouts.jsonl", lines)
    first, *_, second = "\n".join(inspect(run_dir, "--wrong")[2:]).split("\n\n")
    said = "Training responses of steps 2 to 21: 3 of 22 are wrong, of which 2 are shown, one of "
    assert first == f"{said}a prompt"
    assert second.splitlines() == [
        "Step 21: <|user|>213=",
        "Ground truth: 123",
        "Scores: 1 0.25 0",
        "score 0.25, strict 0.5, 3 tokens, stopped",
        "  bad",
    ]
    for count in (2, 1, 0):
        shown = shown_answers(inspect(run_dir, "--wrong", "--responses", count))
        assert shown == ["no", "bad"][2 - count :]


def test_where_a_reward_model_alone_scores_the_lowest_are_shown(run_dir, inspect):
    scores = {"good": (0.0, 1.0, 2.0), "bad": (0.0, 0.0, -3.0), "none": (0.0, 0.0, 0.5)}
    alone = {"ground_truth": "None", "verifiable_score": None, "reward_metrics": {}}
    write_samples(run_dir, scores, **alone)
    shown = inspect(run_dir, "--wrong", "--responses", 2)
    said = "No answer has a verifiable score. Those with the lowest scores: 3 of 3 prompts, of "
    assert f"{said}which 2 are shown" in shown
    assert shown_answers(shown) == ["bad after 9", "none after 9"]


# ------------------------------------------------------------------------------ --watch


def test_watching_ends_with_the_run_or_with_ctrl_c(run_dir, inspect, monkeypatch):
    steps = iter([4, 5])

    def write_a_step(seconds):
        assert seconds == 7
        (run_dir / "metrics.jsonl").write_text(metrics_lines(next(steps)))

    def press(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(inspect_run.time, "sleep", press)
    try:
        assert any("Step 3 of 5" in line for line in inspect(run_dir, "--watch", 7))
    except KeyboardInterrupt:  # it would end all tests
        pytest.fail("Ctrl-C shows a traceback")
    monkeypatch.setattr(inspect_run.time, "sleep", write_a_step)
    assert "Step 5 of 5, after 1.5 minutes" in inspect(run_dir, "--watch", 7)


# ------------------------------------------------------------------------------ --summary


def test_last_lines_of_a_run(run_dir, inspect):
    own = {RATE: 0.459, SCORE: 0.5, "eval/policy_version": 0, "objective/stop_rate": 1.0}
    (run_dir / "metrics.jsonl").write_text(metrics_lines(1, **own))
    assert inspect(run_dir, "--summary") == [
        "Held-out prompts answered right: 45.9% before training",
        "Mean verifiable score of their answers: 0.500 before training",
        "",
        f"Model, metrics, samples and pictures: {run_dir}",
        *inspect_run.next_steps(run_dir),
    ]
    assert (run_dir / "curves.png").is_file()
    own[SCORE] = own[RATE]  # a score that is the rate is not said again
    assert len(inspect_run.describe_evaluations([own])) == 1


@pytest.mark.parametrize("is_saved", [True, False])
def test_last_lines_of_a_run_go_on(is_saved, tmp_path):
    for step in (9, 10):
        (tmp_path / f"checkpoints/step_{step}").mkdir(parents=True)
    (tmp_path / "checkpoints/unfinished").mkdir()
    if is_saved:
        (tmp_path / "model").mkdir()
    look, page, compare, *others = inspect_run.next_steps(tmp_path)
    for line in (look, page, compare):
        python, program, run, *_ = shlex.split(line.split(":")[1])
        assert Path(python).exists() and Path(program).is_file() and run == str(tmp_path)
    if is_saved:
        assert others[0].endswith(f'AutoModelForCausalLM.from_pretrained("{tmp_path}/model")')
    else:
        newest = tmp_path / "checkpoints/step_10"
        assert others == [f"Resume it:   its command with --resume_from_checkpoint {newest}"]


def test_answers_before_and_after_are_of_one_prompt_also_where_a_reward_failed():
    def sample(prompt, version, score):
        line = {"prompt": prompt, "ground_truth": "1", "policy_version": version}
        return line | {"response": "x", "score": score}

    rows = [sample("a", 0, None), sample("b", 0, 0.5), sample("b", 3, 1.0), sample("b", 7, 0.25)]
    said = inspect_run.describe_samples(rows)
    assert said == ["", "b", "  before, score 0.5: x", "  after, score 0.25: x"]
    assert "  before, score none: x" in inspect_run.describe_samples([*rows, sample("a", 7, 1.0)])
    assert inspect_run.describe_samples(rows[:2]) == []  # one evaluation alone
    twice = [sample("a", version, score) for version in (0, 7) for score in (0.25, 0.75)]
    scores = [line.split()[2] for line in inspect_run.describe_samples(twice) if "score" in line]
    assert scores == ["0.25:", "0.25:", "0.75:", "0.75:"]


def test_answers_of_many_turns_and_without_spaces_are_shown():
    """From 34 turns on a turn had no room; and of one long word nothing was left."""
    turns = [f"turn {i}" for i in range(67)]
    row = {"prompt": "a", "policy_version": 0, "response": "", "score": 0.0, "ground_truth": "1"}
    said = inspect_run.describe_samples([row | {"turns": turns}, row | {"policy_version": 7}])
    first, last = "turn 0 [turn 1] turn 2 [turn 3]", "[turn 63] turn 64 [turn 65] turn 66"
    assert said[2] == f"  before, score 0: {first} ... 59 more ... {last}"
    after = row | {"policy_version": 7, "response": "答" * 300}
    assert inspect_run.describe_samples([row, after])[-1].endswith(f": {'答' * 196} ...")


# ---------------------------------------------------------------------------------- reward workers


def advice(cpu_seconds, reward=19.5, generation=0.4, episodes_per_step=128):
    """What is said of two workers whose batches took so long three times."""
    line = {"time/reward": reward, "time/generation": generation}
    args = {"reward_workers": 2, "episodes_per_step": episodes_per_step}
    return inspect_run.advise_workers([line] * 3, args, cpu_seconds)


def test_reward_that_waits_is_told_how_many_workers_it_takes():
    """128 calls of 0.3 s, as of a judge on the network: with two workers 19.5 s a batch."""
    assert "19.5 s a batch, in 99% of which its 2 processes wait" in advice(cpu_seconds=1.0)
    assert "--reward_workers 39 " in advice(cpu_seconds=1.0)
    assert "--reward_workers 4 " in advice(cpu_seconds=1.0, generation=10.0)
    assert "--reward_workers 16 " in advice(cpu_seconds=1.0, episodes_per_step=16)
    # One that computes, or is faster than generation, needs no more
    assert advice(cpu_seconds=100.0) is None
    assert advice(cpu_seconds=1.0, generation=20.0) is None
    assert advice(cpu_seconds=0.0, reward=0.5) is None


@pytest.mark.slow
def test_reward_workers_are_found_among_a_scripts_processes(tmp_path, monkeypatch):
    path = write_text(tmp_path / "of_the_test.py", "def score(response): return 1.0")
    monkeypatch.setattr(script, "process_groups", [])
    workers = [script.start_reward_worker(f"{path}:score") for _ in range(2)]
    with subprocess.Popen(["sleep", "300"], start_new_session=True) as other:
        found = inspect_run.reward_workers_of(os.getpid())
        other.kill()
    script.end_children()
    assert {process.pid for process in found} >= {group for _, group in workers}
    assert other.pid not in {process.pid for process in found}
