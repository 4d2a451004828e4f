"""A run in the terminal: scripts/inspect_run.py; what limited its speed: summarize_run.py."""

import io
import json
import shlex
import sys
from pathlib import Path

import inspect_run
import pytest
import summarize_run
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

# Of a step with 4 s of training, without waits; and of a batch that took as long
LINE = {
    "policy/staleness": 1.0,
    "time/training": 4.0,
    "time/update": 3.0,
    "time/forward": 1.0,
    "time/generation": 3.0,
    "time/reward": 1.0,
    "time/evaluation": 0.0,
    "time/wait_for_generation": 0.0,
    "time/wait_for_prompts": 0.0,
}
WAITS = {"time/wait_for_generation": 2.0, "time/training": 4.0}
SLOW_REWARD = {"time/generation": 1.0, "time/reward": 3.0}
ON_POLICY = {"policy/staleness": 0.0, "time/wait_for_generation": 1.0}


def in_one_process(line):
    """Metrics of a run whose first step waited for long, with changes to the line of the others."""
    first = {"time/wait_for_generation": 90.0, "time/wait_for_prompts": 90.0}
    return [LINE | line | first, *[LINE | line] * 3]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"time/wait_for_prompts": 0.7}, None),  # 15% of the time of vLLM's side
        (
            {"time/wait_for_prompts": 0.8},
            "vLLM waited for the learner 17% of the time (a training step: updates 75%, forward "
            "passes 25%): more learners or shorter responses help",
        ),
        (
            WAITS,
            "The learner waited for vLLM 50% of the time (a batch: generation 75%, rewards 25%): "
            "more GPUs for vLLM (--vllm_gpus) or shorter responses help",
        ),
        (
            WAITS | SLOW_REWARD,
            "The learner waited for the rewards 50% of the time (a batch: generation 25%, rewards "
            "75%): more --reward_workers or a faster reward help",
        ),
        (
            ON_POLICY | {"time/training": 5.0, "time/generation": 0.95, "time/reward": 0.05},
            "Generation and training took turns (a step: generation 19%, rewards 1%, updates 60%, "
            "forward passes 20%)",
        ),
        (
            ON_POLICY | SLOW_REWARD | {"time/training": 8.0},
            "Generation and training took turns (a step: generation 12%, rewards 38%, updates 38%, "
            "forward passes 12%). The reward is slow: more --reward_workers or a faster reward "
            "help",
        ),
    ],
)
def test_verdict_names_who_waited_and_what_for(line, said):
    assert summarize_run.describe_speed(in_one_process(line)) == said


def test_steps_of_ppo_sync_take_turns():
    line = {name: value for name, value in LINE.items() if "wait" not in name}
    del line["policy/staleness"]
    assert summarize_run.describe_speed([line] * 3).startswith("Generation and training took turns")


def test_nothing_is_said_of_what_one_step_shows():
    for number in (0, 1, 2):  # batch 2 is asked for before step 1
        assert summarize_run.describe_speed(in_one_process(WAITS)[:number]) is None


@pytest.mark.parametrize("is_saved", [True, False])
def test_last_lines_of_a_run_go_on(is_saved, tmp_path):
    for step in (9, 10):
        (tmp_path / f"checkpoints/step_{step}").mkdir(parents=True)
    (tmp_path / "checkpoints/unfinished").mkdir()
    if is_saved:
        (tmp_path / "model").mkdir()
    look, compare, *others = summarize_run.next_steps(tmp_path)
    for line in (look, compare):
        python, program, run, *_ = shlex.split(line.split(":")[1])
        assert Path(python).exists() and Path(program).is_file() and run == str(tmp_path)
    if is_saved:
        assert others[0].endswith(f'AutoModelForCausalLM.from_pretrained("{tmp_path}/model")')
    else:
        newest = tmp_path / "checkpoints/step_10"
        assert others == [f"Resume it:   its command with --resume_from_checkpoint {newest}"]


def byte_tokenizer():
    """A token for each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def response(step, text, advantages, **changes):
    """A line of rollouts.jsonl; advantages: one for each byte, or the mean of an older run."""
    row = {
        "prompt": "<|user|>213=",
        "response": text,
        "score": 1.0,
        "ground_truth": "123",
        "data_source": "debug/sorting",
        "length": len(text),
        "stopped": True,
        "policy_version": step - 2,
        "training_step": step,
    }
    if isinstance(advantages, list):
        row |= {"token_ids": byte_tokenizer().encode(text).ids, "advantages": advantages}
    else:
        row["advantage"] = advantages
    return json.dumps(row | changes) + "\n"


def metrics_line(step):
    return json.dumps({"training_step": step, "time/from_scratch": 90.0, "objective/kl": step / 8})


@pytest.fixture
def run_dir(tmp_path):
    """A run that goes on: of 5 steps it has 3, and is about to write more."""
    args = {
        "exp_name": "my_ppo",
        "run_name": "mine",
        "model_name_or_path": str(tmp_path / "first"),
        "model_revision": None,
        "tokenizer_name_or_path": None,
        "num_training_steps": 5,
        "provenance": {"command": ["my_ppo.py", "--dataset", "my data.parquet"]},
    }
    run = tmp_path / "mine"
    for folder in (run, tmp_path / "first"):
        folder.mkdir()
    (run / "args.json").write_text(json.dumps(args))
    byte_tokenizer().save(str(tmp_path / "first/tokenizer.json"))
    lines = [metrics_line(step) + "\n" for step in (1, 2, 3)]
    (run / "metrics.jsonl").write_text("".join(lines) + '{"training_st')
    lines = [
        response(2, "old", [1.0] * 3),
        response(3, "123", [0.5, -0.25, 0.0]),
        response(3, "321", [-2.0] * 3, score=None),
        response(3, "4", [1.0], prompt="<|user|>4="),
    ]
    (run / "rollouts.jsonl").write_text("".join(lines) + lines[0][:30])
    return run


@pytest.fixture
def inspect(monkeypatch, capsys):
    """inspect(run_dir, flags) -> what inspect_run.py prints where it is no terminal."""

    def inspect(*command):
        monkeypatch.setattr(sys, "argv", ["inspect_run.py", *map(str, command)])
        monkeypatch.setenv("COLUMNS", "200")
        inspect_run.main()
        return capsys.readouterr().out

    return inspect


def test_running_run_is_shown_as_far_as_it_is_written(run_dir, inspect):
    shown = [line.rstrip() for line in inspect(run_dir).splitlines()]
    assert shown[0] == f"mine: my_ppo, {run_dir.parent / 'first'}"
    assert shown[1] == "my_ppo.py --dataset 'my data.parquet'"
    assert shown[2].startswith("Step 3 of 5, after 1.5 minutes; that was ")
    assert "objective/kl  0.125  ▁▅█  0.375" in shown
    start = shown.index("Responses of step 3, sampled by policy version 1")
    assert shown[start + 2 :] == [
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


def test_colours_follow_each_token_s_advantage(run_dir):
    rows = inspect_run.last_responses(run_dir / "rollouts.jsonl")[:1]
    options = type("Options", (), {"responses": 8, "tokens": 120})
    console = Console(file=io.StringIO(), force_terminal=True, color_system="truecolor")
    for part in inspect_run.show_responses(rows, byte_tokenizer(), options):
        console.print(part, markup=False, highlight=False)
    *_, last = console.file.getvalue().splitlines()
    # Half as strong below 0; and 0 has no colour
    assert last == "  \x1b[38;2;0;170;0m1\x1b[0m\x1b[38;2;188;45;45m2\x1b[0m3"


def test_run_that_is_older_than_advantages_of_tokens_has_words(run_dir, inspect):
    (run_dir / "rollouts.jsonl").write_text(response(3, "one two", -0.25, stopped=False))
    shown = inspect(run_dir, "--tokens", "0").splitlines()[-2:]
    assert shown == ["score 1, advantage -0.25, 7 tokens, cut", "   [... 2 more ...] "]
    assert inspect(run_dir).splitlines()[-1] == "  one two"


def test_run_without_its_tokenizer_has_words(run_dir, inspect):
    (run_dir.parent / "first/tokenizer.json").unlink()
    assert inspect(run_dir).splitlines()[-1] == "  4"


def test_answer_does_not_command_the_terminal(run_dir, inspect):
    (run_dir / "rollouts.jsonl").write_text(
        response(3, "\x1b[2Jgone", [1.0] * 8, ground_truth="\x1b[2J")
    )
    assert "\x1b" not in inspect(run_dir)


def test_characters_of_several_tokens_are_whole():
    ids = byte_tokenizer().encode("ä €").ids
    pieces = inspect_run.split_tokens(byte_tokenizer(), ids, [1.0, 2.0, 0.0, 1.0, 2.0, 6.0])
    assert pieces == [("ä", 1.5), (" ", 0.0), ("€", 3.0)]
    cut = inspect_run.split_tokens(byte_tokenizer(), ids[:-1], [1.0] * 5)
    assert [text for text, _ in cut] == ["ä", " ", "\N{REPLACEMENT CHARACTER}"]


def test_spaces_that_a_lone_token_would_lose_are_kept():
    tokenizer = Tokenizer(models.WordLevel({"▁a": 0, "▁b": 1}, unk_token="▁a"))
    tokenizer.decoder = decoders.Metaspace()
    assert tokenizer.decode([1]) == "b"
    assert inspect_run.split_tokens(tokenizer, [0, 1], [1.0, 2.0]) == [("a", 1.0), (" b", 2.0)]


def test_end_of_a_long_file_is_enough(run_dir, monkeypatch):
    path = run_dir / "rollouts.jsonl"
    rows = inspect_run.last_responses(path)
    assert [row["response"] for row in rows] == ["123", "321", "4"]
    monkeypatch.setattr(inspect_run, "TAIL", path.stat().st_size // 2)
    fewer = inspect_run.last_responses(path)
    assert fewer and fewer == rows[-len(fewer) :]


def test_run_without_a_step_is_one_that_begins(run_dir, inspect):
    for name in ("metrics", "rollouts"):
        (run_dir / f"{name}.jsonl").unlink()
    assert "No step is finished yet" in inspect(run_dir)


def test_watching_ends_with_the_run(run_dir, inspect, monkeypatch):
    steps = iter([4, 5])

    def write_a_step(seconds):
        assert seconds == 7
        lines = [metrics_line(step) + "\n" for step in range(1, next(steps) + 1)]
        (run_dir / "metrics.jsonl").write_text("".join(lines))

    monkeypatch.setattr(inspect_run.time, "sleep", write_a_step)
    assert "Step 5 of 5, after 1.5 minutes\n" in inspect(run_dir, "--watch", 7)


def test_watching_ends_with_ctrl_c(run_dir, inspect, monkeypatch):
    def press(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(inspect_run.time, "sleep", press)
    try:
        assert "Step 3 of 5" in inspect(run_dir, "--watch", 7)
    except KeyboardInterrupt:  # it would end all tests
        pytest.fail("Ctrl-C shows a traceback")


def test_another_folder_is_refused(tmp_path, inspect, capsys):
    with pytest.raises(SystemExit):
        inspect(tmp_path)
    assert "holds no args.json" in capsys.readouterr().err
