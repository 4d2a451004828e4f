"""What several test files need; conftest.py says what is where."""

import subprocess
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
SCRIPTS = ("ppo_sync.py", "ppo_vllm_async.py", "grpo_vllm_async.py")
PPO, GRPO, ASYNC = SCRIPTS[:2], SCRIPTS[2:], SCRIPTS[1:]
# The fork lora of each script, which the fixture lora_forks makes: {its file: the script}
LORA = {f"{name[:-3].replace('_vllm_async', '')}_lora.py": name for name in SCRIPTS}
TRAINER = "scripts/train_reward_model.py"
PAGES = [REPO / "README.md", *sorted((REPO / "docs").glob("**/*.md"))]


def files_of_project(pattern):
    """Return the paths that match a pattern and that git knows; or all, where it knows none.

    A reader's own files may lie beside those of the project.
    """
    command = f"git ls-files ':(glob){pattern}'"
    listed = subprocess.run(command, shell=True, cwd=REPO, capture_output=True, text=True).stdout
    known = {REPO / name for name in listed.splitlines()}
    return sorted(path for path in REPO.glob(pattern) if path in known or not known)
