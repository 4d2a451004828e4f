"""scripts/benchmark/lag.py: whose weights the sampler has; what becomes of a stopped grid."""

import importlib
import json
import re
import sys
from types import SimpleNamespace

import lag
import pytest
import torch
from helpers import REPO, loops
from helpers.files import read_json_lines
from helpers.formulas import logprobs_and_entropies
from helpers.processes import CPU
from helpers.runs import batch_of, response_tokens, weights_of_versions, without_clock
from transformers import AutoModelForCausalLM

# Each version is far from the next
OPTIONS = {"total_episodes": 128, "num_evals": 2, "learning_rate": 3e-3, "env": CPU, "seed": 3}
OPTIONS |= {"local_rollout_batch_size": 8, "number_samples_per_prompt": 4}
GRPO = "grpo_vllm_async.py"


def check_equal(one, other):
    assert [without_clock(line) for line in one.metrics] == [
        without_clock(line) for line in other.metrics
    ]
    for name in ("rollouts.jsonl", "model/model.safetensors"):
        assert (one.run_dir / name).read_bytes() == (other.run_dir / name).read_bytes()


# --------------------------------------------------------------------------- with the real vLLM


@pytest.mark.slow
def test_sampler_at_lag_2_has_the_weights_of_the_version_on_the_label(
    run_script, small_eval, assets, tmp_path
):
    program = (str(REPO / "tests/helpers/lagging.py"), "2")
    # With a beta all responses are computed
    options = OPTIONS | {"eval_dataset": small_eval, "beta": 0.1, "async_mode": False}
    of_lag_2 = run_script(GRPO, tmp_path, launcher=program, **options)
    assert of_lag_2.returncode == 0, of_lag_2.output
    labels = {
        line["training_step"]: line["policy_version"]
        for line in read_json_lines(of_lag_2.run_dir / "rollouts.jsonl")
    }
    assert labels == {1: 0, 2: 0, 3: 0, 4: 1}
    assert [line["policy/staleness"] for line in of_lag_2.metrics] == [0, 1, 2, 2]
    models = {}
    for version, weights in weights_of_versions(of_lag_2).items():
        models[version] = AutoModelForCausalLM.from_pretrained(assets / "model")
        models[version].load_state_dict(weights)
    assert sorted(models) == [0, 1, 2, 3, 4]
    for step, label in labels.items():
        batch = batch_of(of_lag_2, step)
        sampler = torch.cat(response_tokens(batch["mask"], batch["sampler_logprobs"]))
        for version, model in models.items():
            rows, _ = logprobs_and_entropies(
                model, batch["prompt_ids"], batch["responses"], temperature=1.0
            )
            difference = (sampler - torch.cat(rows)).abs().max()
            assert difference < 1e-4 if version == label else difference > 1e-3
    # The last evaluation is of what was trained
    evaluated = [line.get("eval/policy_version") for line in of_lag_2.metrics]
    assert evaluated == [0, None, 0, 4]


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
    ("script", "correction"),
    [*((GRPO, name) for name in lag.CORRECTIONS), ("ppo_vllm_async.py", "truncate")],
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


def test_command_runs_the_script_in_turns_with_a_lag(monkeypatch):
    script = importlib.import_module("grpo_vllm_async")
    programs, started, errors = [], [], []
    monkeypatch.setattr(script, "run_program", lambda name, *_: programs.append(name))
    monkeypatch.setattr(script, "end_at_once", errors.append)
    monkeypatch.setattr(script, "main", lambda args: started.append(args))
    sent = []
    monkeypatch.setattr(script.VLLM, "sync_weights", lambda self, weights, v: sent.append(v))
    monkeypatch.setattr(sys, "argv", ["lag.py", "--run", "1", "0", "grpo_vllm_async.py"])
    sys.argv += ["--seed", "7", "--total_episodes", "2048"]
    lag.main()
    (args,) = started
    assert args.seed == 7 and not args.async_mode and errors == []
    engine = SimpleNamespace(args=SimpleNamespace(num_training_steps=3, seed=7))
    for version in (0, 1, 2):
        script.VLLM.sync_weights(engine, [("weight", torch.zeros(2))], version)
    assert sent == [0, 0, 1]
    for name in ("plot_runs.py", "provenance.py"):
        script.run_program(name)
    assert programs == ["provenance.py"]
    sys.argv += ["--lora_rank", "4"]
    lag.main()
    assert len(started) == 1 and "neither adapters" in str(errors)


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


def line_of(cell, final=0.99, **changes):
    figures = {"final": final, "steps_to_90": [2, 4], "ess": 0.9, "kl": 0.01, "seconds": 50}
    figures |= {"evaluations": [[0, 0.5, 0.4], [4, final, 0.9]]}
    figures |= {"ess_of_steps": [1.0] * 4, "kl_of_steps": [0.0] * 4}
    return lag.asdict(cell) | figures | changes


@pytest.fixture
def call(monkeypatch, tmp_path):
    """call(run, *words) -> exit status: lag.py with run(cell, model) in place of runs."""

    def call(run, *words):
        results = str(tmp_path / "a/lag.jsonl")
        monkeypatch.setattr(sys, "argv", ["lag.py", "--results", results, *words])
        monkeypatch.setattr(lag, "run", run)
        monkeypatch.setattr(lag, "prepare", lambda task: None)
        try:
            lag.main()
        except SystemExit as end:
            return end.code
        return 0

    call.results = tmp_path / "a/lag.jsonl"
    return call


def test_grid_goes_on_where_it_was_stopped(call, capsys):
    ran = []

    def run(cell, model, stops_at):
        if len(ran) == stops_at:
            raise KeyboardInterrupt
        if cell.lag == 1:
            raise RuntimeError("the engine is on fire")
        ran.append(cell)
        return line_of(cell)

    words = ("--lags", "0", "1", "4", "--corrections", "none", "--seeds", "1", "2")
    with pytest.raises(KeyboardInterrupt):
        call(lambda *given: run(*given, stops_at=2), *words)
    assert [(cell.seed, cell.lag) for cell in ran] == [(1, 0), (1, 4)]
    assert call(lambda *given: run(*given, stops_at=None), *words) == 1
    out = capsys.readouterr().out
    assert "6 cells, of which 2 are in" in out and "the engine is on fire" in out
    assert "4 of 4: grpo, rate 0.0005, lag 4, none, seed 2 ... 99.0% right at the end" in out
    assert [(cell.seed, cell.lag) for cell in ran[2:]] == [(2, 0), (2, 4)]
    assert [lag.cell_of(line) for line in read_json_lines(call.results)] == ran
    # Another flag of the script makes another cell
    assert (
        call(lambda *given: run(*given, stops_at=None), *words[:2], *words[4:], "--beta", "1") == 0
    )
    assert [cell.flags for cell in ran[4:]] == [("--beta", "1")] * 2


def test_settings_of_a_cell_are_no_flags_of_the_script(call, capsys):
    assert call(None, "--seed", "2") == 2
    assert "--seed is a setting of the cells" in capsys.readouterr().err


def test_rate_is_doubled_until_a_seed_does_not_learn(call, capsys):
    def run(cell, model):
        return line_of(cell, final=0.89 if (cell.rate, cell.seed) == (2e-3, 3) else 0.9)

    assert call(run, "--find_rate") == 0
    assert "at which lag 0 still learns: 0.001\n" in capsys.readouterr().out
    cells = [lag.cell_of(line) for line in read_json_lines(call.results)]
    assert {(cell.lag, cell.correction) for cell in cells} == {(0, "truncate")}
    assert [cell.rate for cell in cells] == [5e-4] * 3 + [1e-3] * 3 + [2e-3] * 3


def test_run_that_fails_says_nothing_of_its_rate(call, capsys):
    def run(cell, model):
        if cell.rate > 5e-4:
            raise RuntimeError("the disk is full")
        return line_of(cell)

    end = call(run, "--find_rate", "--seeds", "1")
    assert end == "a run at 0.001 failed; the highest rate below it that learns: 0.0005"
    assert "still learns" not in capsys.readouterr().out


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


def lines_of_grid():
    lines = []
    for seed in (1, 2):
        for lag_, none in ((0, 1.0), (1, 0.99), (4, 0.8 + 0.1 * seed)):
            for correction in lag.DRAWN:
                final = none if correction == "none" else 1.0
                cell = lag.Cell("grpo", lag_, correction, 5e-4, 0.0, seed, ())
                lines.append(line_of(cell, final, steps_to_90=None if final < 0.95 else [2, 4]))
    lines.append(line_of(lag.Cell("grpo", 4, "none", 5e-4, 0.01, 1, ()), 0.7))
    return lines


def test_table_and_pictures_show_every_run(call, capsys):
    call.results.parent.mkdir()
    call.results.write_text("".join(json.dumps(line) + "\n" for line in lines_of_grid()))
    assert call(None, "--draw") == 0
    out = capsys.readouterr().out
    row = "| 100.0 (100.0 to 100.0, 2 seeds) | 99.0 (99.0 to 99.0, 2 seeds)"
    assert f"| grpo, rate 0.0005 | none {row} | 95.0 (90.0 to 100.0, 2 seeds) | 1 | 1, 4 |\n" in out
    assert "| grpo, rate 0.0005, noise 0.01 | none |  |  | 70.0 (1 seed) |  |  |\n" in out
    assert "6 runs without lag or noise" in out
    assert "  0.8 to 0.9: 2 of 17 runs lost over two points\n" in out
    assert "grpo, 0.0005: 0.0 to 30.0 points, 17 runs\n" in out
    for name in ("lags", "distances"):
        assert (call.results.parent / f"lag_{name}.png").stat().st_size > 0
    above, below = lag.draw_lags(lines_of_grid()).axes  # noise has one lag, and no column
    points = [line for line in above.get_lines() if line.get_linestyle() == "None"]
    assert len(points) == 24
    assert sum(line.get_marker() == "x" for line in below.get_lines()) == 1
    by_ess, _, by_kl, _ = lag.draw_distances(lines_of_grid()).axes
    assert len(by_ess.get_lines()) == len(by_kl.get_lines()) == 25


def test_rows_of_the_page_are_those_of_its_runs(capsys):
    """Each has the means and the worst seeds of a row that the program prints."""
    lines = read_json_lines(REPO / "docs/lag.jsonl")
    lag.check_controls(lines)
    capsys.readouterr()
    lag.print_table(lines)
    printed = re.sub(r" to [\d.]+(, \d seeds)?\)", ")", capsys.readouterr().out).splitlines()
    page = (REPO / "docs/async.md").read_text()
    rows = re.findall(r"^(\| (?:grpo|ppo), .*\|)$", page, re.MULTILINE)
    assert len(rows) == 8
    assert [row for row in rows if not any(line.startswith(row) for line in printed)] == []


def test_masks_that_take_something_away_without_a_lag_are_an_error():
    lines = lines_of_grid()
    lag.check_controls(lines)
    wrong = next(line for line in lines if line["correction"] == "token" and line["lag"] == 0)
    wrong["kl_of_steps"] = [0.1] * 4
    with pytest.raises(AssertionError):
        lag.check_controls(lines)


@pytest.mark.parametrize("task", ["grpo", "ppo", "smollm2"])
def test_flags_of_a_task_are_those_of_its_command(task):
    script, *words = lag.command_of(task, "a/model")
    module = lag.importlib.import_module(script.removesuffix(".py"))
    args = module.tyro.cli(module.Args, args=words)
    filled = module.fill_in(args, 1)
    if task == "smollm2":
        assert filled.num_training_steps == 20 and args.model_name_or_path == "a/model"
    else:
        assert filled.num_training_steps == 40 and args.dtype == "float32"
    assert args.learning_rate == lag.own_rate(task, "a/model")
