"""scripts/benchmark/lag.py: whose weights the sampler has; the rows of docs/async.md."""

import importlib
import json
import re
import statistics
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import lag
import pytest
import torch
from helpers import REPO, loops
from helpers.files import read_json_lines
from helpers.runs import without_clock

GRPO = "grpo_vllm_async.py"


def check_equal(one, other):
    assert [without_clock(line) for line in one.metrics] == [
        without_clock(line) for line in other.metrics
    ]
    for name in ("rollouts.jsonl", "model/model.safetensors"):
        assert (one.run_dir / name).read_bytes() == (other.run_dir / name).read_bytes()


# ------------------------------------------------------------------------- with a stub of vLLM


@pytest.fixture
def run_lagged(run_main, monkeypatch):
    """run_lagged("ppo_vllm_async.py", lag=0, tis_cap=1.0): main() in turns; lag=None: as it is."""
    make_stub, report = loops.make_stub, loops.report_logprobs

    def run(name, lag_, async_mode=False, **changes):
        def make_lagging(script):
            names = SimpleNamespace(VLLM=make_stub(script), stable_hash=script.stable_hash)
            if lag_ is not None:
                lag.give_old_weights(names, lag_, noise=0.0)
            return names.VLLM

        monkeypatch.setattr(loops, "make_stub", make_lagging)
        # Else the stub says more or less of a response by how old it takes it to be
        monkeypatch.setattr(loops, "report_logprobs", lambda *given: report(*given[:-1], False))
        return run_main(name, async_mode=async_mode, **changes)

    return run


@pytest.mark.parametrize(
    ("script", "correction"), [(GRPO, "sequence"), ("ppo_vllm_async.py", "truncate")]
)
def test_lag_0_is_the_script_in_turns(script, correction, run_lagged):
    options = lag.CORRECTIONS[correction]
    check_equal(run_lagged(script, None, **options), run_lagged(script, 0, **options))


def test_lag_1_is_the_asynchronous_script(run_lagged, few_prompts):
    changes = {"beta": 0.1, "eval_dataset": few_prompts / "test.parquet", "num_evals": 2}
    asynchronous = run_lagged(GRPO, None, async_mode=True, **changes)
    of_lag_1 = run_lagged(GRPO, 1, **changes)
    check_equal(of_lag_1, asynchronous)
    samples = [run.run_dir / "samples.jsonl" for run in (of_lag_1, asynchronous)]
    assert samples[0].read_bytes() == samples[1].read_bytes()


# ----------------------------------------------------------------------------- without any vLLM


@pytest.fixture
def given():
    """given(lag, noise): what an engine gets in 6 steps; (label, weights) of versions 0 to 6.

    The learner's two weights are 1 + version and 2, and it changes them in place.
    """

    def given(lag_, noise=0.0):
        seen = []

        class VLLM:
            args = SimpleNamespace(num_training_steps=6, seed=1)

            def sync_weights(self, weights, version):
                weights = {name: weight.clone() for name, weight in weights}
                seen.append((version, weights))

        script = SimpleNamespace(VLLM=VLLM, stable_hash=lambda *parts: hash(parts) % 2**32)
        script.check_sampler = "the check"
        lag.give_old_weights(script, lag_, noise)
        assert (script.check_sampler == "the check") == (noise == 0)
        weights = {"a": torch.ones(1000), "b": torch.full((1000,), 2.0)}
        for version in range(7):
            VLLM().sync_weights(((name, weight) for name, weight in weights.items()), version)
            weights["a"] += 1
        return seen

    return given


@pytest.mark.parametrize(
    ("lag_", "versions"),
    [(0, [0, 1, 2, 3, 4, 5, 6]), (2, [0, 0, 0, 1, 2, 3, 6]), (16, [0, 0, 0, 0, 0, 0, 6])],
)
def test_engine_gets_the_weights_of_its_label_and_at_last_the_newest(lag_, versions, given):
    seen = given(lag_)
    assert [label for label, _ in seen] == versions
    for label, weights in seen:
        assert weights["a"].eq(1 + label).all() and weights["b"].eq(2).all()


def test_noise_is_relative_and_one_for_a_version_and_none_at_last(given):
    seen, again = given(2, noise=0.01), given(2, noise=0.01)
    for label, weights in seen[:-1]:
        for name, value in (("a", 1 + label), ("b", 2)):
            assert weights[name].std() / value == pytest.approx(0.01, rel=0.1)
            assert weights[name].mean() / value == pytest.approx(1, abs=2e-3)
    (_, first), (_, second), _, (_, fourth) = seen[:4]  # of versions 0, 0, 0, 1
    assert first["b"].equal(second["b"]) and not first["b"].equal(fourth["b"])
    assert not (first["a"] * 2).equal(first["b"])
    assert all(a[1]["a"].equal(b[1]["a"]) for a, b in zip(seen, again, strict=True))
    label, last = seen[-1]
    assert label == 6 and last["a"].eq(7).all() and last["b"].eq(2).all()


def test_run_has_a_line_if_its_staleness_is_the_lag(monkeypatch):
    lines = [{"policy/staleness": staleness} for staleness in (0, 1, 1)]
    args, given = {"provenance": {"commit": "abc"}}, []

    def run(words, folder):
        given.append(" ".join(words))
        Path(folder, "run").mkdir()
        Path(folder, "run/args.json").write_text(json.dumps(args))
        return lines, ""

    monkeypatch.setattr(lag, "run", run)
    cell = {"task": "grpo", "correction": "none", "rate": None, "noise": 0.0, "seed": 1}
    with pytest.raises(AssertionError, match="version 2"):
        lag.run_cell(lag=2, **cell)
    monkeypatch.setattr(lag, "figures_of", lambda metrics: {"final": 1.0})
    line = lag.run_cell(lag=1, **cell)
    assert cell | {"lag": 1, "rate": 5e-4, "final": 1.0, "commit": "abc"} == {
        name: line[name] for name in (*cell, "lag", "final", "commit")
    }
    assert "lag.py --run 1 0.0 grpo_vllm_async.py --dataset" in given[1]
    flags = "--learning_rate 0.0005 --seed 1 --tis_cap 0.0 --mismatch_mask none"
    assert given[1].endswith(flags)


def test_figures_of_a_run_by_hand():
    metrics = [
        {"mismatch/ess": 1.0, "mismatch/kl": 0.0, "eval/policy_version": 0.0},
        {"mismatch/ess": 0.5, "mismatch/kl": 0.2, "eval/policy_version": 0.0},
        {"mismatch/ess": 0.6, "mismatch/kl": 0.1},
        {"mismatch/ess": 0.7, "mismatch/kl": 0.1, "eval/policy_version": 4.0},
    ]
    rates = {"eval/verifiable_correct_rate": 0.5, "eval/scores": 0.25}
    metrics = [line | (rates if "eval/policy_version" in line else {}) for line in metrics]
    metrics[-1]["eval/verifiable_correct_rate"] = 0.95
    figures = lag.figures_of(metrics)
    assert figures["evaluations"] == [[0, 0.5, 0.25], [4, 0.95, 0.25]]
    assert (figures["final"], figures["steps_to_90"]) == (0.95, [0, 4])
    assert (figures["ess"], figures["kl"]) == (0.7, 0.1)


def test_rows_of_the_page_are_those_of_its_runs():
    """In %, the mean of the seeds and the worst; masks without a lag are truncate's, to the bit."""
    finals, exact = defaultdict(dict), defaultdict(set)
    for line in read_json_lines(lag.RECORDED):
        cell = SimpleNamespace(**line)
        if cell.noise == 0:
            finals[cell.task, cell.rate, cell.correction, cell.lag][cell.seed] = line["final"]
        if cell.lag == cell.noise == 0 and cell.correction != "none":
            values = str([line[name] for name in ("evaluations", "ess_of_steps", "kl_of_steps")])
            exact[cell.task, cell.rate, cell.seed].add(values)
    assert {len(values) for values in exact.values()} == {1}
    page = (REPO / "docs/async.md").read_text()
    rows = re.findall(r"^\| (grpo|ppo), rate ([\d.]+) \| (\w+) \| (.*) \|$", page, re.MULTILINE)
    assert len(rows) == 8
    for task, rate, correction, cells in rows:
        for age, cell in zip((0, 1, 2, 4, 8, 16), cells.split(" | "), strict=True):
            of_truncate = finals[task, float(rate), "truncate", 0] if age == 0 else {}
            of_cell = finals[task, float(rate), correction, age]
            if correction == "sequence":
                of_cell = of_truncate | of_cell
            rates = [100 * value for value in of_cell.values()]
            text = f"{statistics.fmean(rates):.1f} ({min(rates):.1f})" if rates else ""
            assert cell.strip() == text, (task, rate, correction, age)


@pytest.mark.parametrize("task", ["grpo", "ppo"])
def test_flags_of_a_task_are_those_of_its_command(task):
    script, *words = lag.command_of(task)
    module = importlib.import_module(script.removesuffix(".py"))
    args = module.tyro.cli(module.Args, args=words)
    assert module.fill_in(args, 1).num_training_steps == 40 and args.dtype == "float32"
