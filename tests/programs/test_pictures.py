"""Test scripts/plot_runs.py: the pictures of runs, and their table."""

import plot_runs
import pytest
from helpers.files import write_rows, write_text
from helpers.programs import call_main
from internal import run_curves
from internal.run_curves import Run


def steps(**metrics):
    """Return lines of metrics.jsonl, as in steps(lr=[0.1, 0.2]).

    "__" in a name means "/", and None means that the step does not have the metric.
    """
    lines = []
    for step, values in enumerate(zip(*metrics.values(), strict=True), start=1):
        named = zip(metrics, values, strict=True)
        line = {name.replace("__", "/"): value for name, value in named if value is not None}
        lines.append({"training_step": step} | line)
    return lines


def draw(*runs, x_axis="step"):
    """Return {title of a panel: its axes}."""
    figure = run_curves.draw_curves([Run("run", metrics, {}) for metrics in runs], x_axis)
    return {axes.get_title(): axes for axes in figure.axes}


def points_in(axes):
    return [line.get_xydata().tolist() for line in axes.get_lines()]


def test_held_out_and_training_differ_and_an_evaluation_is_at_the_step_of_its_policy():
    lines = steps(eval__scores=[0.1, 0.9], objective__scores=[0.2, 0.4])
    for line, version in zip(lines, (0, 2), strict=True):
        line |= {"eval/policy_version": version, "time/from_scratch": 8 * line["training_step"]}
    axes = draw(lines)["Score"]
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["held-out: eval/scores", "training: objective/scores"]
    assert points_in(axes) == [[[0, 0.1], [2, 0.9]], [[1, 0.2], [2, 0.4]]]
    assert points_in(draw(lines, x_axis="seconds")["Score"])[0] == [[0, 0.1], [16, 0.9]]


def test_rewards_that_failed_are_drawn_if_there_are_any():
    title, none = "Rewards that failed (fraction of responses)", [0.0, 0.0]
    for failed, held_out, is_drawn in (
        (none, none, False),
        (none, [None, None], False),
        ([0.0, 0.34], none, True),
        (none, [0.01, None], True),
    ):
        lines = steps(objective__reward_failures=failed, eval__reward_failures=held_out)
        others = steps(objective__scores=none, objective__reward_failures=none)
        assert (title in draw(others, lines)) == (title in draw(lines, others)) == is_drawn


def test_seconds_leave_out_the_first_step_of_each_process():
    lines = steps(
        time__training=[60.0, 2.0, 50.0, 3.0],
        time__generation=[1.0, 1.5, None, 1.25],  # a checkpoint contains the next responses
        objective__scores=[0.1, 0.2, 0.3, 0.4],
    )
    panels = draw(lines)
    training, generation = points_in(panels["Seconds per step (without the first)"])
    assert training == [[2, 2], [4, 3]] and generation == [[2, 1.5], [4, 1.25]]
    assert len(points_in(panels["Score"])[0]) == 4
    assert list(draw(lines[:1])) == ["Score"]


def test_own_metrics_come_after_those_of_the_scripts_and_a_run_has_one_color():
    own = {"eval__reward__short": [None, 0.25], "objective__reward__short": [0.5, 0.75]}
    own |= {"policy__unsure": [0.8, 0.9], "objective__reward__short__gsm8k": [1, 1]}
    own, other = steps(objective__scores=[0.5, 0.75], **own), steps(objective__scores=[0.1, 0.2])
    panels = draw(other, own)
    assert list(panels) == ["Score", "reward/short", "policy/unsure"]
    colors = [[line.get_color() for line in axes.get_lines()] for axes in panels.values()]
    assert colors == [["C0", "C1"], ["C1", "C1"], ["C1"]]
    head, row, _ = run_curves.lines_of_table([Run("A", own, {})])
    assert " ".join(head.split()) == "run score steps reward/short* reward/short policy/unsure"
    assert " ".join(row.split()) == "A 0.625 2 0.25 0.625 0.85"


def test_own_picture_of_a_run_is_replaced_and_a_comparison_is_not(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = steps(objective__scores=[0.5, 0.75])
    a, b = (write_rows(tmp_path / name / "metrics.jsonl", lines).parent for name in "AB")
    old = [write_text(path, "old") for path in (a / "curves.png", tmp_path / "comparison.png")]
    assert [call_main(plot_runs, *runs)[0] for runs in ([a], [a, b])] == [0, 2]
    assert [path.read_bytes()[1:4] for path in old] == [b"PNG", b"ld"]
    assert call_main(plot_runs, a, b, "--overwrite")[0] == 0 and old[1].read_bytes()[1:4] == b"PNG"

    def write_half(path):
        path.write_text("half")
        raise OSError("no space is left")

    with pytest.raises(OSError, match="no space"):
        run_curves.save(write_half, old[0])
    assert old[0].read_bytes()[1:4] == b"PNG" and len([*a.iterdir()]) == 2


def test_table_has_the_last_evaluation_and_means_of_the_last_steps():
    scores, rates = [9.0, *[0.5] * 9, 0.7], [0.1, *[None] * 4, 0.8, *[None] * 5]
    seconds = list(range(30, 360, 30))
    lines = steps(objective__scores=scores, eval__scores=rates, time__from_scratch=seconds)
    table = [line.split() for line in run_curves.lines_of_table([Run("ppo", lines, {})])]
    assert table[0] == ["run", "score*", "score", "steps", "minutes"]
    assert table[1] == ["ppo", "0.8", "0.52", "11", "5.5"]
