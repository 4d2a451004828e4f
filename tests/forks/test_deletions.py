"""docs/changing_a_script.md, "What can be deleted": any parts may go, and the rest still works."""

import itertools
import re
import shutil
import subprocess
import sys
from pathlib import Path

import fork as program
import pytest
from helpers import GRPO, REPO
from helpers.runs import check_equal_to_the_bit

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
    (tmp_path / GRPO[0]).write_text(text.replace("save_freq: int = 0", "save_freq: int = 10"))
    with pytest.raises(SystemExit, match=r"resume.diff does not fit grpo_vllm_async.py"):
        program.leave_out(PARTS)


@pytest.mark.slow
def test_copy_without_all_parts_makes_the_same_run_to_the_bit(run_script, small_eval, tmp_path):
    copy = tmp_path / "grpo_small.py"
    copy.write_text(program.leave_out(PARTS))
    reward = REPO / "scripts/rewards/graders.py"
    options = {"eval_dataset": small_eval, "num_evals": 2, "beta": 0.1}
    options["reward_fn"] = f"{reward}:compute_score"
    runs = [run_script(path, tmp_path / Path(path).stem, **options) for path in (*GRPO, copy)]
    assert [run.returncode for run in runs] == [0, 0], runs[1].output
    check_equal_to_the_bit(*runs)
    examples = [sys.executable, "-m", "doctest", copy]
    subprocess.run(examples, cwd=REPO, check=True)
