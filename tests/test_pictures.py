"""The pictures and the last lines of a run: scripts/plot_runs.py and summarize_run.py."""

import json
import sys

import matplotlib.figure
import plot_runs
import pytest
import summarize_run
from summarize_run import RATE, SCORE

HELD_OUT = "Held-out prompts: answered right, mean score"
PARTS = "Parts of the score (training batches)"


def evaluations(rates, scores):
    """The lines of metrics.jsonl of a run with an evaluation a step."""
    return [
        {"training_step": step, "eval/policy_version": step, RATE: rate, SCORE: score}
        for step, (rate, score) in enumerate(zip(rates, scores, strict=True))
    ]


@pytest.fixture
def draw(monkeypatch, tmp_path):
    """draw({run: its metrics}, more metrics) -> {title of a panel: its axes}."""

    def draw(runs, more=()):
        figures = []
        save = lambda figure, path, **_: figures.append(figure)  # noqa: E731
        monkeypatch.setattr(matplotlib.figure.Figure, "savefig", save)
        for name, metrics in runs.items():
            (tmp_path / name).mkdir()
            text = "".join(json.dumps(line) + "\n" for line in metrics)
            (tmp_path / name / "metrics.jsonl").write_text(text)
        run_dirs = [tmp_path / name for name in runs]
        plot_runs.plot_curves(run_dirs, tmp_path / "curves.png", more)
        (figure,) = figures
        return {axes.get_title(): axes for axes in figure.axes}

    return draw


def curves_of(axes):
    """{name in the legend: values}"""
    names = [text.get_text() for text in axes.get_legend().get_texts()]
    return dict(zip(names, [list(line.get_ydata()) for line in axes.get_lines()], strict=True))


@pytest.mark.parametrize(("score", "limits"), [(0.3, (0, 1)), (-2.0, (-2, 1))])
def test_scores_are_shown_beside_the_rate_whatever_they_are(score, limits, draw):
    axes = draw({"run": evaluations([0.0, 0.5], [score, 0.5])})[HELD_OUT]
    assert curves_of(axes) == {RATE: [0.0, 0.5], SCORE: [score, 0.5]}
    bottom, top = axes.get_ylim()
    assert limits[0] - 0.3 < bottom <= limits[0] and limits[1] <= top < limits[1] + 0.3


def test_runs_share_a_panel_of_the_parts_that_they_have(draw):
    line = {"training_step": 1, "objective/scores": 0.8}
    parts = {"objective/verifiable_score": 0.3, "objective/format_rate": 0.5}
    panels = draw({"A": [line | parts], "B": [line | {"objective/reward_model_score": 0.1}]})
    assert list(panels) == ["Score (training batches)", PARTS]  # none without metrics
    assert curves_of(panels[PARTS]) == {
        "A objective/verifiable_score": [0.3],
        "A objective/format_rate": [0.5],
        "B objective/reward_model_score": [0.1],
    }


def test_metric_of_a_fork_has_a_panel_where_asked_for(draw):
    line = {"training_step": 1, "policy/unsure": 0.8}
    assert list(draw({"A": [line]}, ["policy/unsure"])) == ["policy/unsure"]
    with pytest.raises(SystemExit, match="policy/sure"):
        draw({"B": [line]}, ["policy/sure"])


@pytest.mark.parametrize(
    ("scores", "means"),
    [
        (
            [0.3, 0.5],
            ["Mean verifiable score of their answers: 0.300 before training, 0.500 after"],
        ),
        ([0.459, 1.0], []),  # a score that is the rate is not said again
    ],
)
def test_last_lines_of_a_run(scores, means, monkeypatch, tmp_path, capsys):
    metrics = [line | {"val/stop_rate": 1.0} for line in evaluations([0.459, 1.0], scores)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, metrics)))
    monkeypatch.setattr(sys, "argv", ["summarize_run.py", str(tmp_path)])
    summarize_run.main()
    rates = "Held-out prompts answered right: 45.9% before training, 100.0% after"
    last = f"Model, metrics, samples and pictures: {tmp_path}"
    assert capsys.readouterr().out.splitlines() == [rates, *means, last]


def test_answers_before_and_after_are_of_one_prompt_also_where_a_reward_failed():
    def sample(prompt, version, score):
        return {"prompt": prompt, "policy_version": version, "response": "x", "score": score}

    rows = [sample("a", 0, None), sample("b", 0, 0.5), sample("b", 3, 1.0), sample("b", 7, 0.25)]
    said = summarize_run.describe_samples(rows)
    assert said == ["", "b", "  before, score 0.5: x", "  after, score 0.25: x"]
    assert "  before, score none: x" in summarize_run.describe_samples([*rows, sample("a", 7, 1.0)])
    assert summarize_run.describe_samples(rows[:2]) == []  # one evaluation alone
