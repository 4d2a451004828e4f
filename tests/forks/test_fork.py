"""Diffs of the pages: they apply to copies of the scripts, which run and do what the pages say.

Of scripts/forks here is what all have in common; each has a file of tests of its own.
"""

import ast
import difflib
import doctest
import importlib
import itertools
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from types import SimpleNamespace

import fork as program
import pytest
import refit
import torch
from helpers import ASYNC, GRPO, PAGES, PPO, REPO, SCRIPTS, loops, rollouts
from helpers.files import write_rows, write_text
from helpers.programs import call_main
from helpers.runs import without_clock

import grpo_vllm_async as grpo

SECTIONS = "".join(page.read_text() for page in PAGES[1:])
SECTIONS = dict(re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", SECTIONS, re.MULTILINE | re.DOTALL))
HEADINGS = [heading for heading, section in SECTIONS.items() if "```diff" in section]
each_script = pytest.mark.parametrize("script", ASYNC)


def fork(heading, script=None, text=None):
    """The text of a copy of a script, with the diffs that a section has for it.

    script: None: the one that the section names first. A text names the scripts of its diffs.
    text: of the copy, None: the script's.
    """
    parts = SECTIONS[heading].split("n a copy of ")[1:]
    named = [re.findall(r"`(\w+\.py)`", re.match(r"`\S+`( or `\S+`)?", part)[0]) for part in parts]
    script = script or named[0][0]
    text = text or (REPO / script).read_text()
    told = PPO[1] if script in PPO else script
    mine = [part for part, scripts in zip(parts, named, strict=True) if told in scripts]
    for diff in re.findall(r"```diff\n(.*?)```", "".join(mine), re.DOTALL):
        old, new = (
            "".join(f"{line[1:]}\n" for line in diff.splitlines() if line[0] in kept)
            for kept in (" -", " +")
        )
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


@pytest.fixture
def write_fork(tmp_path, monkeypatch):
    """write_fork("The data"): the name of a module, which a copy is."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(heading, script=None):
        name = f"fork_{uuid.uuid4().hex}"
        (tmp_path / f"{name}.py").write_text(fork(heading, script))
        importlib.invalidate_caches()
        return name

    return write


@pytest.fixture
def run_fork(run_main, write_fork):
    """run_fork("The data", lam=0.9): what was seen of a copy's loop, with a stub of vLLM."""

    def run(heading, script=None, score=None, **options):
        return run_main(f"{write_fork(heading, script)}.py", score, **options)

    return run


def test_every_change_has_diffs_for_grpo_and_what_ppo_has_is_for_both_of_its_scripts():
    """Where a diff is in main() or a loss, the tests below run both of the asynchronous ones."""
    for heading in HEADINGS:
        changed = [name for name in SCRIPTS if fork(heading, name) != (REPO / name).read_text()]
        of_grpo = ("CISPO", "Leave one out", "Rewards that see the group", "Rows that are not run")
        assert changed == list(GRPO if heading in of_grpo else SCRIPTS), heading


@pytest.mark.parametrize("heading", HEADINGS)
def test_every_change_fits_the_forks_too(heading, import_fork):
    for name in program.names_in(program.FORKS):
        # As the page says
        if (name, heading) not in [("multiturn", "The reward"), ("distill", "CISPO")]:
            ast.parse(fork(heading, *GRPO, Path(import_fork(name).__file__).read_text()))


def test_rule_and_length_penalty_are_in_the_scores(run_fork, tmp_path):
    row = {"prompt": "54321=", "data_source": "my digits"}
    row["reward_model"] = {"style": "rule", "ground_truth": "12345"}
    options = {"non_stop_penalty": False, "length_penalty": 0.25}
    options["dataset"] = write_rows(tmp_path / "train.parquet", [row] * 64)
    seen = run_fork("The reward", **options)
    score = seen.script.compute_score
    assert (score("my digits", "12345", "12345"), score("my digits", "12999", "12345")) == (1, 0.4)
    for line in seen.metrics:
        expected = line["objective/verifiable_score"] - 0.25 * line["objective/sequence_lengths"]
        assert line["objective/scores"] == pytest.approx(expected)


def test_columns_of_ones_own_are_read(run_fork, tmp_path):
    rows = [{"question": f"{number:02}432=", "answer": "1234"} for number in range(64)]
    data = write_rows(tmp_path / "train.parquet", rows)
    seen = run_fork("The data", score=lambda *_: 1.0, dataset=data)
    assert len(seen.metrics) == loops.STEPS
    assert "432=" in (seen.run_dir / "rollouts.jsonl").read_text()


@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("aggregation", ["token", "sequence"])
def test_clipped_ratio_of_cispo_is_a_constant_weight_of_the_log_probability(
    aggregation, beta, write_fork
):
    """2506.13585, eq. 4: -sg(clip(ratio)) * A * log pi; clipped tokens have a gradient, too."""
    module = importlib.import_module(write_fork("CISPO"))
    options = rollouts.TINY | {"response_length": 20, "beta": beta, "cliprange": 1.0}
    args = module.Args(**options, number_samples_per_prompt=4, loss_aggregation=aggregation)
    policy = rollouts.tiny_policy().double()
    batch = module.Batch(**vars(rollouts.grpo_rollout(policy, distance=0.4)))
    batch.loss_mask[3] = 0
    mask = batch.loss_mask
    found, sums = rollouts.gradients(rollouts.one_of_ranks(0, 1), [policy], batch, args)

    policy.zero_grad()
    new, _ = policy(batch.input_ids, batch.mask)
    ratio = (new.detach() - batch.logprobs).exp()
    weights = ratio.clamp(max=1 + args.cliprange_higher)
    tis = (batch.logprobs - batch.sampler_logprobs).exp().clamp(max=args.tis_cap)
    losses = -weights * batch.advantages * new * tis
    d = new - batch.ref_logprobs
    losses = losses + beta * tis * (new - batch.logprobs).exp() * ((-d).exp() - 1 + d)
    rows = mask.sum(1).clamp(min=1)
    of_rows = (losses * mask).sum(1)
    loss = (of_rows / rows).sum() / 7 if aggregation == "sequence" else of_rows.sum() / mask.sum()
    loss.backward()
    expected = torch.cat([p.grad.flatten() for p in policy.parameters()])
    assert (found - expected).norm() < 1e-10 * expected.norm()
    clipped = (weights != ratio)[mask.bool()].sum()
    assert 0 < clipped == sums["policy/clipfrac_avg"]
    if not beta:  # the script's own loss is another one
        own = grpo.Batch(**vars(batch))
        other, _ = rollouts.gradients(rollouts.one_of_ranks(0, 1), [policy], own, args)
        assert (other - expected).norm() > 0.01 * expected.norm()


def test_rows_that_are_not_run_change_no_update(run_fork, run_main):
    def score(data_source, response, ground_truth):
        return 0.5 + 0.5 * (response > "5")

    options = {"beta": 0.0, "non_stop_penalty": False}
    whole = run_main(*GRPO, score, **options)
    some = run_fork("Rows that are not run", score=score, **options)
    batch = some.batches[1]
    was_run = (batch.logprobs != batch.sampler_logprobs).any(1)
    assert 0 < was_run.float().mean() < 1
    for line, expected in zip(some.metrics, whole.metrics, strict=True):
        for name in ("objective/loss", "optim/grad_norm", "policy/clipfrac_avg"):
            assert line[name] == pytest.approx(expected[name], abs=1e-5), name


@each_script
def test_response_of_another_mean_ratio_has_no_weight(script, run_fork):
    options = {"mismatch_mask_range": 1.2, "tis_cap": 1.2, "local_mini_batch_size": loops.EPISODES}
    seen = run_fork("A mask of unlike responses", script, **options)
    for step, (batch, line) in enumerate(zip(seen.batches, seen.metrics, strict=True)):
        log_ratios = (batch.logprobs - batch.sampler_logprobs).double()
        means = (log_ratios * batch.mask).sum(1) / batch.mask.sum(1)
        is_near = (means.abs() <= math.log(1.2)).double()[:, None]
        weights = log_ratios.exp().clamp(max=1.2) * is_near
        assert step == 0 or 0 < is_near.mean() < 1
        in_loss = batch.loss_mask.bool()
        loss = -(batch.advantages * weights)[in_loss].mean()
        assert line["loss/policy_avg"] == pytest.approx(loss.item(), abs=1e-6)
        assert line["mismatch/masked"] == pytest.approx(
            1 - is_near.expand_as(in_loss)[in_loss].mean().item()
        )


@pytest.mark.parametrize(("script", "beta"), [(ASYNC[0], 0.3), (*GRPO, 0.0), (*GRPO, 0.3)])
def test_entropy_bonus_raises_the_entropy(script, beta, run_fork):
    heading = "A term of the loss"
    runs = [run_fork(heading, script, beta=beta, entropy_coef=coef) for coef in (5.0, -5.0, 0.0)]
    entropies = [run.metrics[-1]["policy/entropy_avg"] for run in runs]
    assert entropies[0] > entropies[1] + 0.01
    unsure = [run.metrics[-1]["policy/unsure"] for run in runs]
    assert 0 <= unsure[1] < unsure[0] <= 1
    if beta == 0:  # a response of no advantage is as unsure as others
        counts = [sum(map(len, run.rows)) for run in runs]
        assert counts[2] < counts[0] == counts[1] == loops.STEPS * loops.EPISODES


def test_baseline_of_rloo_is_the_mean_of_the_others(run_fork):
    batch = run_fork("Leave one out", advantage_normalization="centered").batches[0]
    scores = batch.scores.view(-1, 4)
    baseline = (scores.sum(1, keepdim=True) - scores) / 3
    found = batch.advantages[range(len(batch.lengths)), batch.lengths - 1]  # at the last tokens
    torch.testing.assert_close(found, (scores - baseline).flatten())


def test_response_scores_the_share_of_its_group_that_it_beats(run_fork):
    """Not of the next group; a tie counts a half, and a reward that failed nothing."""
    seen = run_fork("Rewards that see the group", score=lambda *_: 7.0, non_stop_penalty=False)
    assert set(seen.batches[0].scores.tolist()) == {0.5}
    scores = [3.0, 1.0, None, 3.0, -9.0, 0.0, 9.0, 8.0]
    responses = [SimpleNamespace(score=score) for score in scores]
    seen.script.replace = lambda _, score: SimpleNamespace(score=score)
    args = SimpleNamespace(number_samples_per_prompt=4)
    found = [each.score for each in seen.script.score_groups(responses, args)]
    assert found == [0.75, 0, None, 0.75, 0, 1 / 3, 1, 2 / 3]


@each_script
def test_beta_follows_the_kl_of_whole_responses_and_rests_with_the_policy(
    script, run_fork, run_main
):
    """1909.08593, 2.2: an error clipped to a fifth; of a horizon of 100 episodes a step is 16."""
    resting = 2 if script in PPO else 0  # steps
    options = {"kl_horizon": 100, "lr_scheduler_type": "constant", "seed": 3, "save_freq": 1}
    options |= {"total_episodes": 5 * loops.EPISODES}
    options |= {"value_warmup_steps": resting} if resting else {}
    target = 1e-3  # which the KL starts below, at 0, and soon is above
    for _ in range(2):
        seen = run_fork("A beta that follows the KL", script, kl_target=target, **options)
        divergences = [
            ((batch.logprobs - batch.ref_logprobs) * batch.mask).sum(1).mean().item()
            for batch in seen.batches[resting:-1]
        ]
        errors = [min(0.2, max(-0.2, kl / target - 1)) for kl in divergences]
        expected = [0.3] * (resting + 1)
        for error in errors:
            expected.append(expected[-1] * (1 + error * 16 / 100))
        found = [line["objective/kl_coef"] for line in seen.metrics]
        assert found == pytest.approx(expected, rel=1e-6)
        for line in seen.metrics[1:]:  # and it is the beta of that step's rewards
            cost = line["objective/kl_coef"] * line["objective/kl"]
            assert line["objective/non_score_reward"] == pytest.approx(-cost, rel=1e-4)
        if target == 1e-3:
            assert min(errors) == -0.2 and max(errors) == 0.2
            target = divergences[1] / 1.1  # then one is not clipped
    assert errors[1] == pytest.approx(0.1, rel=1e-3)

    # A resumed run goes on with the beta it had
    options["resume_from_checkpoint"] = seen.run_dir / "checkpoints" / "step_4"
    folder = seen.run_dir.parent
    again = run_main(seen.name, output_dir=folder, kl_target=target, **options)
    assert len(again.batches) == 1 and len(again.metrics) == 5
    assert without_clock(again.metrics[-1]) == without_clock(seen.metrics[-1])


@each_script
def test_signal_has_one_checkpoint_written(script, run_fork):
    calls = itertools.count()

    def score(*_):
        if next(calls) == loops.EPISODES:  # in the second batch
            os.kill(os.getpid(), signal.SIGUSR1)
        return 1.0

    seen = run_fork("A checkpoint on a signal", script, score)
    assert len(seen.metrics) == loops.STEPS
    (path,) = (seen.run_dir / "checkpoints").iterdir()
    assert path.name in ("step_1", "step_2")


# -------------------------------------------------------------------------------- scripts/forks

MOST_CHANGES = {"distill": 60, "refill": 150, "lora": 200, "inflight": 400}  # lines
MOST_CHANGES["multiturn"] = 400


@pytest.mark.parametrize("name", program.names_in(program.FORKS))
def test_fork_is_a_short_diff_and_its_examples_are_right(name, import_fork):
    diff = (program.FORKS / f"{name}.diff").read_text()
    assert len(re.findall(r"^[+-] *[^\s+#-].*", diff, re.MULTILINE)) <= MOST_CHANGES[name]
    module = import_fork(name)
    results = doctest.testmod(module)
    assert results.attempted > 20 and not results.failed
    with pytest.raises(SystemExit, match="exists"):
        program.write_fork(name, Path(module.__file__))


@pytest.mark.parametrize("name", program.FIT_ALL)
def test_fork_of_each_script_is_one_diff(name, tmp_path):
    """What is the same in the scripts is the same in their forks, and nothing is left unused."""
    texts, changes = {}, set()
    for script in SCRIPTS:
        path = tmp_path / program.file_of(name, script)
        assert call_main(program, name, path, "--script", script)[0] == 0
        texts[script] = path.read_text()
        diff = difflib.unified_diff(
            (REPO / script).read_text().splitlines(), texts[script].splitlines(), n=0
        )
        changes.add("\n".join(line for line in diff if not line.startswith("@@")))
    assert len(changes) == len({*texts.values()}) - 2 == 1
    assert call_main(program, "inflight", tmp_path / "x.py", "--script", SCRIPTS[0])[0] == 2
    shutil.copy(REPO / "pyproject.toml", tmp_path)
    ruff = Path(sys.executable).with_name("ruff")
    for words in (["check"], ["format", "--check"]):
        subprocess.run([ruff, *words, "--no-cache", tmp_path], check=True)


def test_deliberate_bug_is_written_by_its_flag_alone(tmp_path):
    path = tmp_path / "copy.py"
    for words in (["stale_weights", path], ["--bug", "inflight", path], ["inflight"], [path]):
        assert call_main(program, *words)[0] == 2
    assert call_main(program, "--bug", "stale_weights", path)[0] == 0
    assert path.read_text().startswith("# A deliberate bug")


@pytest.mark.usefixtures("git")
def test_diff_is_made_again_after_a_change_of_its_script(tmp_path, monkeypatch, capsys):
    """Where both have changed a line, a file is left for who has changed the script."""
    lines = "".join(f"line {number}\n" for number in range(40))
    script = write_text(tmp_path / "script.py", lines)
    head = "--- a/script.py\n+++ b/my_fork.py\n"
    hunk = "@@ -20,4 +20,4 @@\n line 19\n line 20\n-line 21\n+mine\n line 22\n"
    diff = write_text(tmp_path / "scripts/forks/mine.diff", head + hunk)
    change = "```diff\n line 2\n+more\n```\n"
    write_text(tmp_path / "docs/changing_a_script.md", f"In a copy of `script.py`: more.\n{change}")
    git = ["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a@example.org"]
    for words in ("init -q", "add .", "commit -q -m first"):
        subprocess.run([*git, *words.split()], check=True)
    monkeypatch.setattr(program, "REPO", tmp_path)

    script.write_text("above\n" + script.read_text().replace("line 19", "other"))
    assert refit.main(["HEAD"]) == 0
    assert program.apply_diffs([diff]) == script.read_text().replace("line 21", "mine")
    before = diff.read_text()
    assert before.startswith(f"{head}@@ -20,7 +20,7 @@")
    subprocess.run([*git, "commit", "-q", "-a", "-m", "second"], check=True)
    script.write_text(script.read_text().replace("line 21", "theirs"))
    conflict = diff.with_name("mine.diff.conflict.py")
    for _ in range(2):  # what has conflicts is no fork
        assert refit.main(["HEAD~1", "HEAD"]) == 1
        assert f"edit {conflict}" in capsys.readouterr().out and diff.read_text() == before
    mine = script.read_text().replace("theirs", "both") + "at the end\n"
    write_text(conflict, mine)
    assert refit.main(["HEAD"]) == 0
    assert program.apply_diffs([diff]) == mine and not conflict.exists()
    script.write_text(script.read_text().replace("line 2\n", ""))
    assert refit.main(["HEAD"]) == 1 and "docs/changing_a_script.md" in capsys.readouterr().out


def test_debug_script_writes_its_fork_anew_but_not_over_changes(tmp_path):
    """A copy from before a `git pull` would run with old code, and a new one take changes away."""
    script = "scripts/train/debug/multiturn.sh"
    for path in (script, "scripts/train/write_fork.sh", "scripts/train/launch.py"):
        write_text(tmp_path / path, (REPO / path).read_text())
    write_text(tmp_path / "scripts/setup.sh", "")
    python = '#!/bin/sh\nif [ "$1" = scripts/fork.py ]; then cp of_commit.py "$3"; fi\n'
    python += f'case "$1" in */launch.py) exec {sys.executable} "$@" ;; esac\n'
    for name, text in (("python", python), ("accelerate", "#!/bin/sh\ncp grpo_multiturn.py ran\n")):
        write_text(tmp_path / ".venv/bin" / name, text).chmod(0o755)

    def run(commit):
        """What runs at a commit of this name, and whether a file is said to be kept."""
        write_text(tmp_path / "of_commit.py", commit)
        out = subprocess.check_output(["bash", script], cwd=tmp_path, text=True)
        return (tmp_path / "ran").read_text(), "it runs as it is" in out

    assert [run(commit) for commit in ("old", "new")] == [("old", False), ("new", False)]
    mine = write_text(tmp_path / "grpo_multiturn.py", "mine")
    assert [run("new"), run("newer")] == [("mine", True)] * 2
    mine.unlink()
    assert run("newer") == ("newer", False)
