#!/usr/bin/env bash
# Set-up, then a reward model for the sorting task, from pairs of correct and incorrect answers. It starts from the debug
# model and takes about a minute without a GPU. Use it as --reward_model_path output/debug_reward_model/model.
# Other flags are passed to the script: bash scripts/train/debug/reward_model.sh --seed 2 --run_name elsewhere
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
bash scripts/setup.sh
.venv/bin/python scripts/train/debug/make_debug_assets.py
exec .venv/bin/python scripts/train/launch.py "$0" "$@" -- --config_file scripts/accelerate/one_gpu.yaml \
  scripts/train_reward_model.py \
  --dataset debug_assets/preference_train.parquet --eval_dataset debug_assets/preference_test.parquet \
  --model_name_or_path debug_assets/model --dtype float32 --no-gradient_checkpointing --run_name debug_reward_model \
  --num_train_epochs 3 --local_mini_batch_size 128 --per_device_train_batch_size 128 --learning_rate 2e-3 \
  --center_rewards_coefficient 0.01 "$@"
