"""The pictures and the last lines of a run: scripts/plot_runs.py and summarize_run.py."""

import json
import sys

import matplotlib.figure
import plot_runs
import pytest
import summarize_run

RATE, SCORE = "eval/verifiable_correct_rate", "eval/verifiable_score"


def evaluations(rates, scores):
    """The lines of metrics.jsonl of a run with an evaluation a step."""
    return [
        {"training_step": step, "eval/policy_version": step, RATE: rate, SCORE: score}
        for step, (rate, score) in enumerate(zip(rates, scores, strict=True))
    ]


@pytest.fixture
def draw(monkeypatch, tmp_path):
    """draw({run: its metrics}) -> {title of a panel: its axes}."""

    def draw(runs):
        figures = []
        save = lambda figure, path, **_: figures.append(figure)  # noqa: E731
        monkeypatch.setattr(matplotlib.figure.Figure, "savefig", save)
        for name, metrics in runs.items():
            (tmp_path / name).mkdir()
            text = "".join(json.dumps(line) + "\n" for line in metrics)
            (tmp_path / name / "metrics.jsonl").write_text(text)
        plot_runs.plot_curves([tmp_path / name for name in runs], tmp_path / "curves.png")
        (figure,) = figures
        return {axes.get_title(): axes for axes in figure.axes}

    return draw


def curves_of(axes):
    return {line.get_label(): line.get_ydata().tolist() for line in axes.get_lines()}


def legend_of(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]


@pytest.fixture
def say(monkeypatch, tmp_path, capsys):
    """say(metrics) -> the last lines that the run prints."""

    def say(metrics):
        lines = [json.dumps({"val/stop_rate": 1.0} | line) for line in metrics]
        (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
        monkeypatch.setattr(sys, "argv", ["summarize_run.py", str(tmp_path)])
        summarize_run.main()
        *lines, last = capsys.readouterr().out.splitlines()
        assert last == f"Model, metrics, samples and pictures: {tmp_path}"
        return lines

    return say


def test_rewards_that_are_shares_are_shown_beside_the_rate(draw):
    panels = draw({"run": evaluations([0.0, 0.0], [0.3, 0.3])})
    axes = panels["Held-out prompts: answered right, mean score"]
    assert curves_of(axes) == {RATE: [0.0, 0.0], SCORE: [0.3, 0.3]}
    assert legend_of(axes) == [RATE, SCORE]


@pytest.mark.parametrize(("score", "limits"), [(0.3, (0, 1)), (-2.0, (-2, 1)), (3.0, (0, 3))])
def test_axis_of_the_rate_has_room_for_any_score(score, limits, draw):
    panels = draw({"run": evaluations([0.0, 0.5], [score, 0.5])})
    bottom, top = panels["Held-out prompts: answered right, mean score"].get_ylim()
    assert limits[0] - 0.3 < bottom <= limits[0] and limits[1] <= top < limits[1] + 0.3


def test_parts_of_the_score_that_a_run_has_are_drawn_and_named(draw):
    line = {"training_step": 1, "objective/scores": 0.8}
    parts = {"objective/verifiable_score": 0.3, "objective/format_rate": 0.5}
    axes = draw({"run": [line | parts]})["Parts of the score (training batches)"]
    assert curves_of(axes) == {name: [value] for name, value in parts.items()}
    assert legend_of(axes) == list(parts)


def test_runs_of_different_parts_share_a_panel(draw):
    line = {"training_step": 1, "objective/scores": 0.8}
    runs = {
        "A": [line | {"objective/reward_model_score": 2.0}],
        "B": [line | {"objective/penalty_rate": 0.1}],
    }
    axes = draw(runs)["Parts of the score (training batches)"]
    expected = {"A objective/reward_model_score": [2.0], "B objective/penalty_rate": [0.1]}
    assert curves_of(axes) == expected
    assert legend_of(axes) == list(expected)


def test_panel_without_any_of_its_metrics_is_left_out(draw):
    panels = draw({"run": [{"training_step": 1, "objective/scores": 0.8}]})
    assert list(panels) == ["Score (training batches)"]


def test_constant_share_is_said_to_be_no_right_answer(say):
    assert say(evaluations([0.0, 0.0, 0.0], [0.3, 0.3, 0.3])) == [
        "Held-out prompts answered right: 0.0% before training, 0.0% after",
        "Mean score of their answers: 0.300 before training, 0.300 after",
    ]


def test_score_that_is_the_rate_is_not_said_again(say):
    expected = ["Held-out prompts answered right: 45.9% before training, 100.0% after"]
    metrics = evaluations([0.459, 0.7, 1.0], [0.459, 0.7, 1.0])
    assert say(metrics) == expected
    without_scores = [{name: line[name] for name in line if name != SCORE} for line in metrics]
    assert say(without_scores) == expected


def test_single_evaluation_is_the_one_after_training(say):
    assert say(evaluations([0.5], [0.75])) == [
        "Held-out prompts answered right: 50.0% after training",
        "Mean score of their answers: 0.750 after training",
    ]
    assert say([{"training_step": 1}]) == []


def test_waiting_is_no_news_where_each_side_waits_for_the_other(say):
    line = {"time/training": 4.0, "time/wait_for_generation": 1.0, "time/wait_for_prompts": 2.0}
    assert say([line, line]) == []
    (speed,) = say([line | {"policy/staleness": 1}] * 2)
    assert speed.startswith("training-bound: the other waited 50% of the time")
