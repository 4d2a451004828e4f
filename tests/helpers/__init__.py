"""What several test files need; conftest.py says what is where."""

from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
SCRIPTS = ("ppo_sync.py", "ppo_vllm_async.py", "grpo_vllm_async.py")
PPO, GRPO, ASYNC = SCRIPTS[:2], SCRIPTS[2:], SCRIPTS[1:]
TRAINER = "scripts/train_reward_model.py"
PAGES = [REPO / "README.md", *sorted((REPO / "docs").glob("**/*.md"))]
