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
                lag.give_old_weights(names, lag_)
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


def test_engine_gets_the_weights_of_its_label_and_at_last_the_newest():
    """The learner's weights are 1 + version, in place."""
    expected = {0: [0, 1, 2, 3, 4, 5, 6], 2: [0, 0, 0, 1, 2, 3, 6], 16: [0, 0, 0, 0, 0, 0, 6]}
    for lag_, versions in expected.items():
        seen = []

        class VLLM:
            args = SimpleNamespace(num_training_steps=6)

            def sync_weights(self, weights, version, seen=seen):
                seen.append((version, [(name, weight.tolist()) for name, weight in weights]))

        lag.give_old_weights(SimpleNamespace(VLLM=VLLM), lag_)
        weight = torch.ones(2)
        for version in range(7):
            VLLM().sync_weights((pair for pair in [("a", weight)]), version)
            weight += 1
        assert seen == [(label, [("a", [1.0 + label] * 2)]) for label in versions]


def test_figures_are_of_a_run_whose_staleness_is_the_lag(monkeypatch):
    evaluation = {"mismatch/ess": 0.5, "mismatch/kl": 0.3, "eval/verifiable_correct_rate": 0.95}
    lines, said = [{"mismatch/ess": 1.0, "mismatch/kl": 0.0}, evaluation, evaluation], []
    lines = [line | {"policy/staleness": min(1, i)} for i, line in enumerate(lines)]
    monkeypatch.setattr(lag, "run", lambda words, folder: said.append(words) or (lines, ""))
    cell = {"task": "grpo", "correction": "none", "rate": None, "seed": 3}
    with pytest.raises(AssertionError, match="version 2"):
        lag.run_cell(lag=2, **cell)
    figures = lag.run_cell(lag=1, **cell)
    figures.pop("seconds")
    assert figures == {"rate": 5e-4, "final": 0.95, "ess": 0.6667, "kl": 0.2}
    _, *words = said[-1]
    assert words[:3] == ["--run", "1", GRPO]
    module = importlib.import_module(GRPO.removesuffix(".py"))
    args = module.fill_in(module.tyro.cli(module.Args, args=words[3:]), 1)
    assert (args.learning_rate, args.tis_cap, args.mismatch_mask, args.seed) == (5e-4, 0, "none", 3)
    assert args.num_training_steps == 40 and args.dtype == "float32"


def test_rows_of_the_page_are_those_of_its_runs():
    """In %, the mean of the seeds and the worst; masks without a lag are truncate's."""
    finals = defaultdict(dict)
    for line in read_json_lines(lag.RECORDED):
        cell = SimpleNamespace(**line)
        if cell.noise == 0:
            finals[cell.task, cell.rate, cell.correction, cell.lag][cell.seed] = line["final"]
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
