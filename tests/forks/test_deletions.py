"""docs/changing_a_script.md, "What can be deleted": any parts may go, and the rest still works.

At the end this copy, and the fork inflight, make the same run with vLLM itself as the script.
"""

import itertools
import re
import shutil
import subprocess
import sys
from pathlib import Path

import fork as program
import pytest
from helpers import GRPO, REPO
from helpers.runs import check_equal_to_the_bit, without_clock

PARTS = program.names_in(program.DELETIONS)
ALL_SETS = [names for n in range(1, len(PARTS) + 1) for names in itertools.combinations(PARTS, n)]
# What no copy without the part has a word of, but in a comment
WORDS = {
    "fsdp2": ["fully_shard", "DTensor"],
    "placement": ["vllm_gpus", "tensor_parallel", "nccl", "NoEngine"],
    "resume": ["resume_from_checkpoint", "save_freq", "MUST_AGREE"],
}


def test_any_parts_leave_no_name_behind(tmp_path):
    """Neither one that nobody defines any more, nor one that nobody uses, nor an import."""
    for names in ALL_SETS:
        text = program.leave_out(names)
        for word in itertools.chain(*(WORDS[name] for name in names)):
            assert not re.search(rf"\w*{word}\w*[ (.,:=]", re.sub(r"#.*|\"\"\".*", "", text)), word
        (tmp_path / f"{'_'.join(names)}.py").write_text(text)
    shutil.copy(REPO / "pyproject.toml", tmp_path)
    ruff = Path(sys.executable).with_name("ruff")
    for words in (["check"], ["format", "--check"]):
        done = subprocess.run(
            [ruff, *words, "--no-cache", tmp_path], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout


def test_edited_script_loses_the_same_parts_or_is_refused(tmp_path, monkeypatch):
    """By the numbers of lines other lines had gone, and a reader's own within a part."""
    text, small = (REPO / GRPO[0]).read_text(), program.leave_out(PARTS)
    monkeypatch.setattr(program, "REPO", tmp_path)
    (tmp_path / GRPO[0]).write_text(f"# My notes\n{text}")
    assert program.leave_out(PARTS) == f"# My notes\n{small}"
    for edited in (text.replace("save_freq: int = 0", "save_freq: int = 10"), 2 * text):
        (tmp_path / GRPO[0]).write_text(edited)
        with pytest.raises(SystemExit, match=r"resume.diff does not fit grpo_vllm_async.py"):
            program.leave_out(("resume",))


def test_copy_whose_vllm_is_the_scripts_makes_the_same_run(
    run_main, small_eval, tmp_path, monkeypatch
):
    """With a stub of it, where a batch is sampled while the one before is trained on."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "grpo_smaller.py").write_text(program.leave_out(("fsdp2", "resume")))
    runs = [run_main(name, eval_dataset=small_eval) for name in ("grpo_smaller.py", *GRPO)]
    check_equal_to_the_bit(*runs)


@pytest.fixture(scope="module")
def run_in_turns(run_script, small_eval, tmp_path_factory):
    """Run a script, each of whose batches is sampled by the newest policy."""

    def run(path, **more):
        options = {"eval_dataset": small_eval, "num_evals": 2, "beta": 0.1, "response_length": 24}
        options |= {"temperature": 1.5, "total_episodes": 192}
        options["reward_fn"] = f"{REPO / 'scripts/rewards/graders.py'}:compute_score"
        run = run_script(path, tmp_path_factory.mktemp("run"), **options | more)
        assert run.returncode == 0, run.output
        return run

    return run


@pytest.fixture(scope="module")
def of_script(run_in_turns):
    return run_in_turns(*GRPO, async_mode=False)


@pytest.mark.slow
def test_copy_without_all_parts_makes_the_same_run_to_the_bit(of_script, run_in_turns, tmp_path):
    copy = tmp_path / "grpo_small.py"
    copy.write_text(program.leave_out(PARTS))
    check_equal_to_the_bit(run_in_turns(copy, async_mode=False), of_script)
    examples = [sys.executable, "-m", "doctest", copy]
    subprocess.run(examples, cwd=REPO, check=True)


@pytest.mark.slow
def test_inflight_without_staleness_is_the_script_to_the_bit(of_script, run_in_turns, import_fork):
    forked = run_in_turns(import_fork("inflight").__file__, max_staleness=0)
    lines, of_fork = (list(map(without_clock, run.metrics)) for run in (of_script, forked))
    assert [line | {"policy/staleness_max": 0.0} for line in lines] == of_fork
    for name in ("model/model.safetensors", "samples.jsonl"):
        assert (of_script.run_dir / name).read_bytes() == (forked.run_dir / name).read_bytes()
