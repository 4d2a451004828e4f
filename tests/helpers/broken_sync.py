"""ppo_sync.py with a weight sync that forgets one tensor."""

import sys
from pathlib import Path

sys.path.extend(str(folder) for folder in Path(__file__).resolve().parents[1:3])

import ppo_sync
from helpers import hooks

if __name__ == "__main__":  # vLLM's processes import this file too
    hooks.leave_out(ppo_sync, "lm_head.weight")
    ppo_sync.main()
