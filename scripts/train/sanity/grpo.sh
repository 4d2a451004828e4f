#!/usr/bin/env bash
# Set-up, then asynchronous GRPO on the sanity set of 2510.26788: R1-Distill-Qwen-1.5B on the 1,460 problems of MATH that it
# solves in 20 to 80% of 40 attempts. A correct algorithm with a correct implementation can learn nearly all of them.
#   bash scripts/train/sanity/grpo.sh             one GPU
#   GPUS=8 bash scripts/train/sanity/grpo.sh      eight GPUs, with the same batches and steps (GPUS must divide 64)
#   MODEL=path/to/model DATA=path/to/rows         local folders (DATA also a file) instead of the Hub
# Other flags are passed to the script, or to a fork of it, SCRIPT. scripts/data_preprocess/by_success.py makes a set for another model.
#
# Memory, by scripts/preflight.py:
#   GPUS=1: a learner needs 35 GiB of the 54 that it can use on a GPU with 80 GB
#   GPUS=8: a learner needs 35 GiB of the 53 that it can use on a GPU with 80 GB
# PyTorch's own count of a learner's tensors on one GPU is 34.7 GiB, with adapters as below 8.3.
# On a GPU of 24 GB: with adapters (docs/adapters.md), by python scripts/fork.py lora grpo_lora.py, SCRIPT=grpo_lora.py and
# --lora_rank 32 --learning_rate 1e-5 --vllm_gpu_memory_utilization 0.56.
# Without a GPU: bash scripts/train/debug/grpo.sh, the same algorithm in a minute.
#
# Expect, by the card of huggingface.co/datasets/sail/Sanity-Test-R1D-1.5B, more than 95% correct answers in training with
# bfloat16 (98% with float16, which this does not have). It does not say after how many steps. TRL's asynchronous run with
# these batches reached .841 in 2,400 updates, as many as here, and a synchronous one .864. Both sampled at top_p 1, like this.
#
# The settings are those of github.com/sail-sg/Precision-RL, oat/scripts/sanity/bf16_grpo.sh. Their run differs: eight GPUs,
# generation and training in turns (--no-async_mode), no importance weights (--tis_cap 0), AdamW's second beta .95 (by
# TRL's notes), and a grader that calls math-verify only if texts differ.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
gpus=${GPUS:-1}
((64 % gpus == 0)) || { echo "GPUS=$gpus must divide 64" >&2; exit 2; }
if [ -z "${MODEL:-}" ] && ! nvidia-smi -L; then
  echo "This needs a GPU of 80 GB. Without one: bash scripts/train/debug/grpo.sh" >&2
  exit 2
fi
bash scripts/setup.sh
flags=(
  --exp_name sanity_grpo
  --dataset "${DATA:-sail/Sanity-Test-R1D-1.5B}" --reward_fn scripts/rewards/yardsticks.py:sanity
  # A truncated answer is incorrect
  --non_stop_penalty --penalty_reward_value 0
  --max_prompt_token_length 1024 --response_length 8192
  # 600 steps of 64 prompts, eight responses each. A step has four updates of 128 responses
  --total_episodes 307200 --local_rollout_batch_size $((64 / gpus)) --number_samples_per_prompt 8
  --local_mini_batch_size $((128 / gpus))
  --learning_rate 1e-6 --lr_scheduler_type constant
  # Dr. GRPO does not divide advantages by a standard deviation, and long responses weigh more
  --advantage_normalization centered --loss_aggregation constant
  --save_freq 20 --keep_last_n 1
)
config=$( ((gpus > 1)) && echo ddp || echo one_gpu)
launch=(--config_file "scripts/accelerate/$config.yaml" --num_processes "$gpus")
run=("${SCRIPT:-grpo_vllm_async.py}" --model_name_or_path "${MODEL:-deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B}" "${flags[@]}" "$@")
.venv/bin/python scripts/preflight.py "${launch[@]}" "${run[@]}"  # prints errors and the plan
exec .venv/bin/python scripts/train/launch.py "$0" "$@" -- "${launch[@]}" "${run[@]}"
