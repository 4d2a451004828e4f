#!/usr/bin/env bash
# Set-up, then asynchronous GRPO with adapters (LoRA) on one GPU of 24 GB: Qwen2.5-3B-Instruct on GSM8K, with the settings of
# a run that verl has published. By the preflight's plan it is the largest Qwen2.5 that fits there, because with 7 B
# parameters the learner, vLLM and CUDA would need 37 GiB.
#   bash scripts/train/gsm8k/grpo_lora.sh           one GPU
#   GPUS=8 bash scripts/train/gsm8k/grpo_lora.sh    eight GPUs, with the same batches and steps (GPUS must divide 64)
#   MODEL=path/to/model DATA=path/to/rows           local folders instead of the Hub
# It runs the fork lora (docs/adapters.md), grpo_lora.py, which is written again each time, unless you have changed it.
# Other flags are passed to it.
#
# Memory, by scripts/preflight.py:
#   GPUS=1: a learner needs 10 GiB of the 11 that it can use on a GPU with 24 GB
#   GPUS=8: a learner needs 10 GiB of the 10 that it can use on a GPU with 24 GB
# PyTorch's own count of a learner's tensors on one GPU, with Qwen2.5-1.5B-Instruct, is 6.7 GiB.
# Hours are not known, because this has not run on a GPU. verl's log has 116 steps of about 80 s on two GPUs of 80 GB, which
# is 2.5 hours, without its evaluations.
#
# Expect: verl's score on the test set ended at .8613 (github.com/eric-haibin-lin/verl-data, branch experiments,
# gsm8k/Qwen2.5-3B-bsz64_2-prompt512-resp1024-lorarank32-score0.861.log). Its grader is strict, as
# eval/verifiable_correct_rate is here. verl generates and trains in turns, as this script does with --no-async_mode, and its
# prompt has a different wording.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
gpus=${GPUS:-1}
((64 % gpus == 0)) || { echo "GPUS=$gpus must divide 64" >&2; exit 2; }
if [ -z "${MODEL:-}" ] && ! nvidia-smi -L; then
  echo "This needs a GPU of 24 GB. Without one: bash scripts/train/debug/grpo.sh" >&2
  exit 2
fi
bash scripts/setup.sh
bash scripts/train/write_fork.sh lora grpo_lora.py
.venv/bin/python scripts/data_preprocess/gsm8k.py --local_save_dir data/gsm8k ${DATA:+--local_dataset_path "$DATA"}
flags=(
  --exp_name gsm8k_grpo_lora
  --dataset data/gsm8k/train.parquet --eval_dataset data/gsm8k/test.parquet
  # The score is strict, and the lenient grade is a metric
  --reward_fn scripts/rewards/gsm8k.py:strict
  --max_prompt_token_length 512 --response_length 1024
  # 116 steps of 64 prompts, five responses each, with one update per step, are one epoch of the 7,473 prompts
  --total_episodes 37120 --local_rollout_batch_size $((64 / gpus)) --number_samples_per_prompt 5
  --local_mini_batch_size $((320 / gpus))
  # Thirty times the learning rate of grpo.sh. "LoRA Without Regret" (Thinking Machines, 2025) recommends ten times
  --lora_rank 32 --lora_alpha 32 --learning_rate 3e-5 --lr_scheduler_type constant
  # verl's KL term, by the same estimator (its entropy bonus of 0.001 has no flag here). The reference policy is the policy
  # without its adapter, and takes no memory
  --beta 0.001 --kl_estimator kl3
  # What the learner leaves for vLLM, minus a gibibyte, has room for 70 of the longest responses. On several GPUs NCCL takes
  # one more gibibyte, and a step has fewer responses per GPU
  --vllm_gpu_memory_utilization "$( ((gpus > 1)) && echo 0.42 || echo 0.45)"
  # Two of the longest rows
  --micro_batch_tokens 4096
  # All 1,319 test prompts, about every 10 steps
  --num_evals 12 --num_eval_prompts 0
  --save_freq 10 --keep_last_n 1
)
config=$( ((gpus > 1)) && echo ddp || echo one_gpu)
launch=(--config_file "scripts/accelerate/$config.yaml" --num_processes "$gpus")
run=(grpo_lora.py --model_name_or_path "${MODEL:-Qwen/Qwen2.5-3B-Instruct}" "${flags[@]}" "$@")
.venv/bin/python scripts/preflight.py "${launch[@]}" "${run[@]}"  # prints errors and the plan
exec .venv/bin/python scripts/train/launch.py "$0" "$@" -- "${launch[@]}" "${run[@]}"
