"""ppo_sync.py with a weight sync that forgets one tensor."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import ppo_sync

if __name__ == "__main__":
    save_file = ppo_sync.save_file

    def forgetful(weights, *args, **kwargs):
        save_file({name: w for name, w in weights.items() if name != "lm_head.weight"}, *args, **kwargs)

    ppo_sync.save_file = forgetful
    ppo_sync.main()
