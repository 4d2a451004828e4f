#!/usr/bin/env bash
# Set-up, then asynchronous GRPO with a tiny model and real vLLM on a sorting task. Without a GPU, answers improve within
# minutes from under half correct to nearly all.
# Other flags are passed to the script, or to a copy of it, SCRIPT: bash scripts/train/debug/grpo.sh --seed 2 --output_dir elsewhere
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
bash scripts/setup.sh
.venv/bin/python scripts/train/debug/make_debug_assets.py
exec .venv/bin/python scripts/train/launch.py "$0" "$@" -- --config_file scripts/accelerate/one_gpu.yaml "${SCRIPT:-grpo_vllm_async.py}" \
  --dataset debug_assets/train.parquet --eval_dataset debug_assets/test.parquet \
  --model_name_or_path debug_assets/model --dtype float32 --no-gradient_checkpointing --response_length 8 \
  --total_episodes 51200 --local_rollout_batch_size 64 --number_samples_per_prompt 8 --local_mini_batch_size 256 \
  --per_device_train_batch_size 128 \
  --learning_rate 5e-4 --warm_up_steps 10 --lr_scheduler_type linear \
  --non_stop_penalty --penalty_reward_value -1 "$@"
