"""A run in the terminal, and what is said of it at its end: scripts/inspect_run.py."""

import json
import sys
from itertools import product

import inspect_run
import pytest
from helpers.files import write_rows, write_text
from helpers.programs import call_main
from inspect_run import RATE, SCORE
from internal import run_files
from transformers import Qwen2Config, Qwen2ForCausalLM

# Of a step with 4 s of training, without waits; and of a batch that took as long
LINE = {"policy/staleness": 1.0, "time/training": 4.0, "time/update": 3.0, "time/forward": 0.8}
LINE |= {"time/reward_model": 0.2, "time/generation": 3.0, "time/reward": 1.0}
LINE |= {"time/evaluation": 0.0, "time/wait_for_generation": 0.0, "time/wait_for_prompts": 0.0}
LONG_WAITS = {"time/wait_for_generation": 90.0, "time/wait_for_prompts": 90.0}
WAITS = {"time/wait_for_generation": 2.0}
RATES = {"perf/response_tokens_per_second": 500.0, "perf/memory_gib": 3.0, "val/update_tokens": 6.0}
SLOW_REWARD = {"time/generation": 1.0, "time/reward": 3.0}
IN_TURNS = {"policy/staleness": 0.0, "time/wait_for_generation": 1.0, "time/training": 8.0}
# (what differs from LINE, what is said of who waited, of shares of the time, and what helps)
VERDICTS = [
    ({"time/wait_for_prompts": 0.7}, ""),  # 15% of the time of vLLM's side
    ({"time/wait_for_prompts": 0.8}, "vLLM waited for the learner 17% |update 75%|more learners"),
    (WAITS, "The learner waited for generation 50% |generation 75%, reward 25%|--vllm_gpus"),
    (WAITS | SLOW_REWARD, "The learner waited for reward 50% |reward 75%|more --reward_workers"),
    (IN_TURNS | SLOW_REWARD, "took turns|generation 12%, reward 38%|The reward is slow: more "),
]


def test_verdict_names_who_waited_and_what_for():
    for line, words in VERDICTS:
        process = [LINE | line | LONG_WAITS, *[LINE | line] * 3]  # it begins with waiting
        said = inspect_run.describe_speed(process)
        assert bool(said) == bool(words) and all(word in said for word in words.split("|") if word)
        resumed = {"time/training": 4.0}  # the responses are the checkpoint's
        assert inspect_run.describe_speed([*process, resumed, *process]) == said
        for number in (0, 1, 2):  # batch 2 is asked for before step 1
            assert inspect_run.describe_speed(process[:number]) is None
    of_ppo_sync = {name: LINE[name] for name in LINE if "wait" not in name and "stale" not in name}
    assert "took turns" in inspect_run.describe_speed([of_ppo_sync] * 3)


# ------------------------------------------------------------------------------ a run's folder


def response(step, text, **changes):
    """A line of rollouts.jsonl."""
    row = {"prompt": "<|user|>213=", "response": text, "score": 1.0, "ground_truth": "123"}
    row |= {"length": len(text), "stopped": True, "policy_version": step - 2}
    return row | {"training_step": step} | changes


@pytest.fixture
def run_dir(tmp_path):
    """A run that goes on: of 5 steps it has 3, and is about to write more."""
    args = {"exp_name": "my_ppo", "run_name": "mine", "num_training_steps": 5}
    args |= {"model_name_or_path": "first", "provenance": {"command": ["my_ppo.py", "my data"]}}
    run = write_text(tmp_path / "mine/args.json", json.dumps(args)).parent
    failed = {"score": None, "failure": "Traceback ...\nValueError: no number\n"}
    rows = [response(2, "old"), response(3, "123"), response(3, "321", stopped=False, **failed)]
    write_rows(run / "rollouts.jsonl", rows)
    line = {"time/from_scratch": 90.0, "objective/reward/short": 0.5, RATE: 0.459, SCORE: 0.5}
    line |= {"eval/policy_version": 0, "objective/stop_rate": 0.5} | LINE | WAITS | RATES
    write_rows(run / "metrics.jsonl", [line | {"training_step": step} for step in (1, 2, 3)])
    for name in ("metrics", "rollouts"):
        with open(run / f"{name}.jsonl", "a") as file:
            file.write('{"training_step": 4, "prom')
    return run


def inspect(*words):
    """The lines that inspect_run.py prints where it is no terminal, or its errors."""
    status, said, errors = call_main(inspect_run, *words)
    return errors if status else [line.strip() for line in said.splitlines()]


def test_running_run_is_shown_as_far_as_it_is_written(run_dir):
    shown = inspect(run_dir)
    assert shown[:2] == ["mine: my_ppo, first", "my_ppo.py 'my data'"]
    assert shown[2].startswith("Step 3 of 5, after 1.5 minutes; that was ")
    for step, version, said in ((1, 0, "0"), (3, 2, "2"), (9, 2, "2, which were 6 steps old")):
        line, *_ = inspect_run.show_responses([response(step, "", policy_version=version)], 1)
        assert line.strip() == f"Responses of step {step}, sampled by the weights after step {said}"
    assert any(line.startswith("To compare: 500 response tokens a second") for line in shown)
    old = "which were 1 step old"
    start = shown.index(f"Responses of step 3, sampled by the weights after step 1, {old}")
    scores = "Scores: 1 none (the reward failed)"
    failed = "score none, the reward failed: ValueError: no number, 3 tokens, cut"
    for words in ("<|user|>213=", "Ground truth: 123", scores, "123", failed, "321"):
        assert words in shown[start:]


def test_lines_are_read_whatever_is_half_written(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    assert run_files.read_rollouts(tmp_path) == {} and run_files.read_lines(path) == []
    for end, count in product(("", '{"half": 1', "{", '{"training_step": 9}'), range(4)):
        rows = [{"row": 'ä "training_step": 8', "training_step": max(1, i)} for i in range(count)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows) + end)
        assert run_files.read_lines(path) == rows
        steps = run_files.read_rollouts(tmp_path).items()
        read = [(step, json.loads(line)) for step, lines in steps for line in lines]
        assert read == [(row["training_step"], row) for row in rows]


def test_each_group_is_shown_by_its_best_and_its_worst(run_dir):
    """Not the first eight: they are one group's."""
    scores = [0.5, 1, 0.25, 0.5, 1, -1, None, 0]
    rows = [
        response(3, f"{prompt}{i}", prompt=prompt, score=score)
        for prompt in "ab"
        for i, score in enumerate(scores)
    ]
    write_rows(run_dir / "rollouts.jsonl", rows)
    texts = {row["response"] for row in rows}
    for number, expected in ((8, ["a1", "a5", "b1", "b5"]), (3, ["a1", "a5", "b1"])):
        shown = inspect(run_dir, "--responses", number)
        assert [line for line in shown if line in texts] == expected


def test_answer_does_not_command_the_terminal(run_dir):
    command = "\x1b[2J\x9b2J"  # in the two forms that terminals know
    hostile = response(3, f"{command}gone", ground_truth=command, prompt=command)
    write_rows(run_dir / "rollouts.jsonl", [hostile])
    write_rows(run_dir / "samples.jsonl", [hostile, hostile | {"policy_version": 7}])
    for shown in (inspect(run_dir), inspect(run_dir, "--summary")):
        assert {"\x1b", "\x9b"}.isdisjoint("".join(shown)) and "gone" in "".join(shown)


# ------------------------------------------------------------------------------ --summary


def test_last_lines_of_a_run(run_dir):
    (run_dir / "checkpoints/unfinished").mkdir(parents=True)
    for step in (9, 10):
        (run_dir / f"checkpoints/step_{step}").mkdir()
    rate, score, cut, speed, *_ = shown = inspect(run_dir, "--summary")
    assert rate.startswith("Held-out prompts answered right: 45.9% before training, ")
    assert score.startswith("Mean verifiable score of their answers: 0.500 before training")
    assert cut.startswith("50% of the last responses were cut: a longer --response_length")
    assert speed.startswith("The learner waited for generation 50% of the time")
    assert (run_dir / "curves.png").is_file() and "To compare" not in "".join(shown)
    alike = {"objective/scores_std": 0.0, "objective/scores": 0.25}
    assert "at last 0.25: there was nothing to learn" in inspect_run.describe_troubles([alike])[0]
    assert shown[-1].endswith(f"--resume_from_checkpoint {run_dir}/checkpoints/step_10")


def test_summary_names_what_is_there(run_dir):
    """The interrupted run has no model, and its prompts are of one length."""
    for added, names in (
        (None, "Metrics, curves"),
        ("samples.jsonl", "Metrics, samples, curves"),
        ("token_length.png", "Metrics, samples, curves, prompts' lengths"),
        ("model/config.json", "Model, metrics, samples, curves, prompts' lengths"),
    ):
        if added:
            write_text(run_dir / added, "")
        assert f"{names}: {run_dir}" in inspect(run_dir, "--summary")


def test_commands_name_the_environment_that_is_there_later(run_dir, monkeypatch):
    """Not the one that .venv is a link to, because that is exchanged."""
    folder = run_dir.parent
    write_text(folder / ".venv-1/bin/python", "")
    monkeypatch.setattr(sys, "executable", str(folder / ".venv-1/bin/python"))
    monkeypatch.setattr(sys, "prefix", str(folder / ".venv-1"))
    for link, named in ((None, ".venv-1"), ("other", ".venv-1"), (".venv-1", ".venv")):
        write_text(folder / "other/bin/python", "")
        (folder / ".venv").unlink(missing_ok=True)
        (folder / ".venv").symlink_to(link or "nowhere")
        assert f" {folder}/{named}/bin/python " in inspect_run.next_steps(run_dir)[0]


@pytest.mark.parametrize("is_ppo", [True, False])
def test_runs_are_compared_by_model_flops_of_the_peak(is_ppo, run_dir):
    """By hand; the head counts where it is tied, too."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 100}
    policy = Qwen2ForCausalLM(Qwen2Config(**sizes, tie_word_embeddings=True))
    policy.save_pretrained(run_dir / "model")
    write_text(run_dir / "prompt_lengths.json", "[10, 20]")
    args = run_files.read_args(run_dir) | {"world_size": 2, "beta": 0.1, "num_epochs": 2}
    args |= {"updates_per_step": 8} | ({"value_learning_rate": 1e-5} if is_ppo else {})
    args["provenance"]["gpu"] = "2 x NVIDIA H200"
    line = LINE | RATES | {"val/update_tokens": 1.2e10, "val/sequence_lengths": 35.0}
    # The first two steps and the last one do not count
    odd = line | {"val/update_tokens": 1.0, "perf/response_tokens_per_second": 1.0}
    metrics = [odd, odd, line, line, odd]
    policy, head = 2 * (2 * (4 * 64 * 64 + 3 * 64 * 128) + 64 * 100) + 4 * 2 * 64 * 50, 2 * 64 * 100
    # Each row by policy and reference policy; PPO's by the value model, too, GRPO's first of four
    # mini-batches not by the policy
    update = 3 * (2 * policy - head if is_ppo else policy)
    before = 3 * policy - head if is_ppo else 1.75 * policy
    shares = 1.2e10 * update / 3, (1.2e10 * update + 0.6e10 * before) / 4
    said = inspect_run.describe_costs(run_dir, args, metrics)
    assert "500 response tokens a second, learner 4,000,000,000 in updates and 3,000," in said
    in_updates, in_all = (f"{share / 2 / 989e12:.1%}" for share in shares)
    assert f"FLOPs {in_updates} of the peak in updates, {in_all} over all" in said
    args["provenance"]["gpu"] = "1 x Tesla T4"
    said = inspect_run.describe_costs(run_dir, args, metrics)
    assert "FLOPs" not in said and said.endswith("; a learner's peak 3 GiB")


def test_answers_before_and_after_are_of_one_prompt_also_where_a_reward_failed():
    def sample(prompt, version, score, **changes):
        line = {"prompt": prompt, "ground_truth": "1", "policy_version": version}
        return line | {"response": "x", "score": score} | changes

    rows = [sample("a", 0, None), sample("b", 0, 0.5), sample("b", 3, 1.0), sample("b", 7, 0.25)]
    said = inspect_run.describe_samples(rows)
    assert said == ["", "b", "  before, score 0.5: x", "  after, score 0.25: x"]
    assert "  before, score none (the reward failed): x" in inspect_run.describe_samples(
        [*rows, sample("a", 7, 1.0)]
    )
