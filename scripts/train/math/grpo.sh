#!/usr/bin/env bash
# Set-up, then asynchronous GRPO: Qwen2.5-1.5B-Instruct on MATH, graded by math-verify.
#   bash scripts/train/math/grpo.sh             one GPU
#   GPUS=8 bash scripts/train/math/grpo.sh      eight GPUs, with the same batches and steps (GPUS must divide 64)
#   MODEL=path/to/model DATA=path/to/rows       local folders instead of the Hub
# Other flags are passed to the script.
#
# Memory, by scripts/preflight.py:
#   GPUS=1: a learner needs 33 GiB of the 54 that it can use on a GPU with 80 GB
#   GPUS=8: a learner needs 33 GiB of the 53 that it can use on a GPU with 80 GB
# Hours are not known.
#
# The score to expect with these settings is not known. The closest runs are verl's GRPO with adapters (LoRA) instead of all
# weights, at 3e-5, with the same batches: .484 and .502 on the test set after one epoch, with another grader
# (github.com/eric-haibin-lin/verl-data, branch experiments, math/Qwen2.5-1.5B-bsz64_2-prompt1024-resp512-*.log).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
gpus=${GPUS:-1}
((64 % gpus == 0)) || { echo "GPUS=$gpus must divide 64" >&2; exit 2; }
bash scripts/setup.sh
.venv/bin/python scripts/data_preprocess/math_dataset.py --local_save_dir data/math ${DATA:+--local_dataset_path "$DATA"}
flags=(
  --exp_name math_grpo
  --dataset data/math/train.parquet --eval_dataset data/math/test.parquet
  # math-verify checks that the last \boxed{} equals the ground truth. It reads any LaTeX, and can be slow on some
  --reward_fn scripts/rewards/graders.py:compute_score --reward_timeout 10
  --max_prompt_token_length 1024 --response_length 512
  # 117 steps of 64 prompts, five responses each, with one update per step, are one epoch of the 7,500 prompts
  --total_episodes 37440 --local_rollout_batch_size $((64 / gpus)) --number_samples_per_prompt 5
  --local_mini_batch_size $((320 / gpus))
  # All weights are trained, so the learning rate is lower than for adapters
  --learning_rate 1e-6 --lr_scheduler_type constant
  --beta 0.001 --kl_estimator kl3
  # 500 of the test prompts, about every 10 steps
  --num_evals 12 --num_eval_prompts 500
  --save_freq 20 --keep_last_n 1
)
config=$( ((gpus > 1)) && echo ddp || echo one_gpu)
launch=(--config_file "scripts/accelerate/$config.yaml" --num_processes "$gpus")
run=(grpo_vllm_async.py --model_name_or_path "${MODEL:-Qwen/Qwen2.5-1.5B-Instruct}" "${flags[@]}" "$@")
.venv/bin/python scripts/preflight.py "${launch[@]}" "${run[@]}"  # prints errors and the plan
exec .venv/bin/python scripts/train/launch.py "$0" "$@" -- "${launch[@]}" "${run[@]}"
