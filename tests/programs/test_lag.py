"""scripts/benchmark/lag.py: whose weights the sampler has; the rows of docs/async.md."""

import importlib
import re
import statistics
from collections import defaultdict
from types import SimpleNamespace

import lag
import pytest
import torch
from helpers import REPO, loops
from helpers.files import read_json_lines
from helpers.runs import without_clock

GRPO = "grpo_vllm_async.py"


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
        made = run_main(name, async_mode=async_mode, **changes)
        files = ("rollouts.jsonl", "samples.jsonl", "model/model.safetensors")
        paths = [made.run_dir / file for file in files]
        left = [path.read_bytes() for path in paths if path.exists()]
        return [without_clock(line) for line in made.metrics], left

    return run


# A run as it is, and the lag that is the same
SAME = [
    (GRPO, lag.CORRECTIONS["sequence"], False, 0),
    ("ppo_vllm_async.py", lag.CORRECTIONS["truncate"], False, 0),
    (GRPO, {"beta": 0.1, "num_evals": 2}, True, 1),
]


@pytest.mark.parametrize(("script", "options", "async_mode", "lag_"), SAME)
def test_lag_0_is_the_script_in_turns_and_lag_1_the_asynchronous_one(
    script, options, async_mode, lag_, run_lagged, few_prompts
):
    if "num_evals" in options:
        options = options | {"eval_dataset": few_prompts / "test.parquet"}
    as_it_is = run_lagged(script, None, async_mode, **options)
    assert as_it_is[0] and run_lagged(script, lag_, **options) == as_it_is


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


def test_engine_gets_the_weights_of_its_label_and_at_last_the_newest(given):
    expected = {0: [0, 1, 2, 3, 4, 5, 6], 2: [0, 0, 0, 1, 2, 3, 6], 16: [0, 0, 0, 0, 0, 0, 6]}
    for lag_, versions in expected.items():
        seen = given(lag_)
        assert [label for label, _ in seen] == versions
        for label, weights in seen:
            assert weights["a"].eq(1 + label).all() and weights["b"].eq(2).all()


def test_noise_is_relative_and_one_for_a_version_and_none_at_last(given):
    *seen, (label, last) = given(2, noise=0.01)
    for version, weights in seen:
        for name, value in (("a", 1 + version), ("b", 2)):
            assert weights[name].std() / value == pytest.approx(0.01, rel=0.1)
            assert weights[name].mean() / value == pytest.approx(1, abs=2e-3)
    (_, first), (_, second), _, (_, fourth) = seen[:4]  # of versions 0, 0, 0, 1
    assert first["b"].equal(second["b"]) and not first["b"].equal(fourth["b"])
    assert not (first["a"] * 2).equal(first["b"])
    assert label == 6 and last["a"].eq(7).all() and last["b"].eq(2).all()


def test_figures_are_of_a_run_whose_staleness_is_the_lag(monkeypatch):
    evaluation = {"mismatch/ess": 0.5, "mismatch/kl": 0.3, "eval/verifiable_correct_rate": 0.95}
    lines, said = [{"mismatch/ess": 1.0, "mismatch/kl": 0.0}, evaluation, evaluation], []
    lines = [line | {"policy/staleness": min(1, i)} for i, line in enumerate(lines)]
    monkeypatch.setattr(lag, "run", lambda words, folder: said.append(words) or (lines, ""))
    cell = {"task": "grpo", "correction": "none", "rate": None, "noise": 0.0, "seed": 3}
    with pytest.raises(AssertionError, match="version 2"):
        lag.run_cell(lag=2, **cell)
    figures = lag.run_cell(lag=1, **cell)
    figures.pop("seconds")
    assert figures == {"rate": 5e-4, "final": 0.95, "ess": 0.6667, "kl": 0.2}
    _, *words = said[-1]
    assert words[:4] == ["--run", "1", "0.0", GRPO]
    module = importlib.import_module(GRPO.removesuffix(".py"))
    args = module.fill_in(module.tyro.cli(module.Args, args=words[4:]), 1)
    assert (args.learning_rate, args.tis_cap, args.mismatch_mask, args.seed) == (5e-4, 0, "none", 3)
    assert args.num_training_steps == 40 and args.dtype == "float32"


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
