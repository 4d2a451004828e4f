#!/usr/bin/env bash
# Set-up, then RLHF as it was first done: a reward model from preference pairs, and PPO against it, without a GPU.
# The policy starts worse than that of ppo.sh (it leaves two digits in place). The verifiable reward is off in training.
# In evaluations it counts how many held-out prompts are answered correctly.
# Other flags are passed to PPO: bash scripts/train/debug/ppo_rm.sh --seed 2 --output_dir elsewhere
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
bash scripts/setup.sh
.venv/bin/python scripts/train/debug/make_debug_assets.py
reward_model=output/debug_reward_model/model
if [ ! -d "$reward_model" ] || [ debug_assets/settings.json -nt "$reward_model" ]; then  # a folder of this name is always complete
  rm -rf output/debug_reward_model
  bash scripts/train/debug/reward_model.sh
fi
.venv/bin/python scripts/train/debug/make_debug_assets.py --output_dir debug_assets_rm --left_in_place 2 --careless 0.8 --sampled_rate 0.12
exec bash "$PWD/scripts/train/debug/ppo.sh" --exp_name ppo_rm --model_name_or_path debug_assets_rm/model \
  --reward_model_path "$reward_model" --no-apply_verifiable_reward --penalty_reward_value -5 --beta 0.05 "$@"
