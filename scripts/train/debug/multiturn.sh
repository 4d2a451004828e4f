#!/usr/bin/env bash
# Set-up, then the fork multiturn (docs/ready_made_forks.md) with a tiny model and real vLLM. The model learns to ask a
# calculator for products that it cannot compute. Without a GPU, answers improve within minutes from none correct to all.
# grpo_multiturn.py is written again each time, unless you have changed it.
# Other flags are passed to it: bash scripts/train/debug/multiturn.sh --seed 2 --max_turns 1
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
bash scripts/setup.sh
.venv/bin/python scripts/forks/calculator.py
bash scripts/train/write_fork.sh multiturn grpo_multiturn.py
exec .venv/bin/python scripts/train/launch.py "$0" "$@" -- --config_file scripts/accelerate/one_gpu.yaml grpo_multiturn.py \
  --env_fn scripts/forks/calculator.py:step --reward_fn scripts/forks/calculator.py:score --max_turns 3 \
  --dataset debug_assets_calculator/train.parquet --eval_dataset debug_assets_calculator/test.parquet \
  --model_name_or_path debug_assets_calculator/model --dtype float32 --no-gradient_checkpointing --response_length 40 \
  --total_episodes 25600 --local_rollout_batch_size 64 --number_samples_per_prompt 8 --local_mini_batch_size 256 \
  --per_device_train_batch_size 128 \
  --learning_rate 5e-4 --warm_up_steps 10 --lr_scheduler_type linear \
  --non_stop_penalty --penalty_reward_value -1 "$@"
