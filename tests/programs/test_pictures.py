"""The pictures and the table of runs: scripts/plot_runs.py."""

import json

import plot_runs
import pytest
from helpers import SCRIPTS
from helpers.files import write_rows, write_text
from helpers.programs import call_main
from plot_runs import Curve, Run


def steps(**metrics):
    """Lines of metrics.jsonl: steps(lr=[0.1, 0.2]); "__" in a name is "/", None: not there."""
    lines = []
    for step, values in enumerate(zip(*metrics.values(), strict=True), start=1):
        named = zip(metrics, values, strict=True)
        line = {name.replace("__", "/"): value for name, value in named if value is not None}
        lines.append({"training_step": step, "episode": 8 * step} | line)
    return lines


def draw(curves, x_axis="step", more=()):
    """{title of a panel: its axes} of {curve: [metrics of each run]}"""
    curves = [Curve(name, [Run(name, run, {}) for run in runs]) for name, runs in curves.items()]
    figure = plot_runs.draw_curves(curves, x_axis, more)
    return {axes.get_title(): axes for axes in figure.axes}


@pytest.fixture
def make_run(tmp_path):
    """make_run(name, metrics, args of args.json or none) -> the run's folder"""

    def make_run(name, metrics, args=None):
        if args is not None:
            write_text(tmp_path / name / "args.json", json.dumps(args))
        return write_rows(tmp_path / name / "metrics.jsonl", metrics).parent

    return make_run


def test_held_out_and_training_are_told_apart_and_an_evaluation_is_where_its_policy_was():
    lines = steps(eval__scores=[0.1, 0.9], objective__scores=[0.2, 0.4])
    lines[0]["eval/policy_version"] = 0
    lines[1]["eval/policy_version"] = 2
    axes = draw({"run": [lines]})["Score"]
    held_out, training = axes.get_lines()
    said = [text.get_text() for text in axes.get_legend().get_texts()]
    assert said == ["held-out: eval/scores", "training: objective/scores"]
    assert held_out.get_xydata().tolist() == [[0, 0.1], [2, 0.9]]
    assert training.get_xydata().tolist() == [[1, 0.2], [2, 0.4]]
    held_out = draw({"run": [lines]}, "episode")["Score"].get_lines()[0]
    assert held_out.get_xdata().tolist() == [0, 16]


def test_runs_have_one_color_in_all_panels_and_no_panel_without_a_metric():
    lines = steps(objective__scores=[0.8], objective__verifiable_score=[0.3])
    parts = steps(objective__scores=[0.7], objective__verifiable_score=[0.2])
    parts[0]["objective/reward_model_score"] = 0.5
    panels = draw({"A": [lines], "B": [parts]})
    assert list(panels) == ["Score", "Parts of the score, training"]
    for axes in panels.values():
        for line in axes.get_lines():
            (value,) = line.get_ydata()
            assert line.get_color() == ("C0" if value in (0.8, 0.3) else "C1")
    assert list(draw({"A": [lines]})) == ["Score"]  # a part alone is the score once more


def test_seconds_leave_out_the_first_step_of_each_process():
    lines = steps(
        time__training=[60.0, 2.0, 50.0, 3.0],
        time__generation=[1.0, 1.5, None, 1.25],  # after a resume the responses are there
        objective__scores=[0.1, 0.2, 0.3, 0.4],
    )
    panels = draw({"run": [lines]})
    training, generation = panels["Seconds per step, without a process's first"].get_lines()
    assert training.get_xydata().tolist() == [[2, 2], [4, 3]]
    assert generation.get_xydata().tolist() == [[2, 1.5], [4, 1.25]]
    assert len(panels["Score"].get_lines()[0].get_xdata()) == 4
    assert list(draw({"run": [lines[:1]]})) == ["Score"]  # nothing of the time is left


def test_seeds_are_a_mean_and_a_shade_as_far_as_all_came():
    seeds = [
        steps(objective__scores=[0.0, 0.5, 0.9], time__from_scratch=[10, 20, 30]),
        steps(objective__scores=[0.5, 1.0], time__from_scratch=[20, 40]),
    ]
    axes = draw({"ppo": seeds}, "seconds")["Score"]
    (line,) = axes.get_lines()
    assert line.get_xydata().tolist() == [[15, 0.25], [30, 0.75]]
    (shade,) = axes.collections
    (path,) = shade.get_paths()
    corners = {tuple(corner) for corner in path.vertices}
    assert corners == {(15, 0.0), (15, 0.5), (30, 0.5), (30, 1.0)}


def test_runs_of_one_group_differ_in_their_seed_alone(make_run):
    line, run_dirs = steps(objective__scores=[0.5]), []
    for seed, lr in [(1, 0.1), (2, 0.1), (1, 0.3), (2, 0.3), (1, 0.5)]:
        args = {"run_name": f"ppo_{seed}_{lr}", "data_hash": seed, "provenance": {"gpu": seed}}
        args |= {"exp_name": "ppo", "seed": seed, "learning_rate": lr}
        run_dirs.append(make_run(f"{lr}/{seed}", line, args))
    curves = plot_runs.group_seeds(plot_runs.read_runs(run_dirs))
    assert [(curve.name, [run.args["seed"] for run in curve.runs]) for curve in curves] == [
        ("ppo, learning_rate 0.1 (2 runs)", [1, 2]),
        ("ppo, learning_rate 0.3 (2 runs)", [1, 2]),
        (str(run_dirs[4]), [1]),  # its path: other folders have its name
    ]


def test_metrics_of_one_s_own_come_after_those_of_the_scripts():
    own = {"eval__reward__short": [None, 0.25], "objective__reward__short": [0.5, 0.75]}
    own |= {"policy__unsure": [0.8, 0.9], "objective__reward__short__gsm8k": [1, 1]}
    own = steps(objective__scores=[0.5, 0.75], **own)
    panels = draw({"A": [own]})
    assert list(panels) == ["Score", "reward/short", "policy/unsure"]
    assert len(panels["reward/short"].get_lines()) == 2
    assert list(draw({"A": [own]}, more=["objective/scores"]))[-1] == "objective/scores"
    head, row, _ = plot_runs.lines_of_table([Curve("A", [Run("A", own, {})])])
    assert " ".join(head.split()) == "run score steps reward/short* reward/short policy/unsure"
    assert " ".join(row.split()) == "A 0.625 2 0.25 0.625 0.85"


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_have_no_metric_that_is_taken_for_one_s_own(script, run_main):
    metrics = run_main(script).metrics
    assert metrics and plot_runs.own_metrics(metrics) == []


def test_runs_own_picture_is_drawn_anew_and_a_comparison_is_not(make_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    a, b = (make_run(name, steps(objective__scores=[0.5, 0.75])) for name in "AB")
    write_text(a / "curves.png", "old")
    assert call_main(plot_runs, a)[0] == 0
    assert (a / "curves.png").read_bytes().startswith(b"\x89PNG")
    comparison = write_text(tmp_path / "comparison.png", "mine")
    status, _, errors = call_main(plot_runs, a, b)
    assert status == 2 and "--overwrite" in errors and comparison.read_text() == "mine"
    status, said, _ = call_main(plot_runs, a, b, "--overwrite")
    assert comparison.read_bytes().startswith(b"\x89PNG") and said.startswith("Wrote comparison")
    assert not (b / "curves.png").exists()


def test_table_has_the_last_evaluation_and_means_of_the_last_steps():
    scores, rates = [9.0, *[0.5] * 9, 0.7], [0.1, *[None] * 4, 0.8, *[None] * 5]
    seconds = list(range(30, 360, 30))
    lines = steps(objective__scores=scores, eval__scores=rates, time__from_scratch=seconds)
    other = [line | {"eval/scores": 0.4} for line in lines]
    curve = Curve("ppo", [Run("ppo_1", lines, {}), Run("ppo_2", other, {})])
    assert [line.split() for line in plot_runs.lines_of_table([curve])][:4] == [
        ["run", "score*", "score", "steps", "minutes"],
        ["ppo_1", "0.8", "0.52", "11", "5.5"],
        ["ppo_2", "0.4", "0.52", "11", "5.5"],
        ["mean:", "ppo", "0.6", "0.52", "11", "5.5"],
    ]
