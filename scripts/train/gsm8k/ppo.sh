#!/usr/bin/env bash
# Set-up, then asynchronous PPO: Qwen2.5-0.5B-Instruct on GSM8K, with the settings of a run that verl has published.
#   bash scripts/train/gsm8k/ppo.sh             one GPU
#   GPUS=8 bash scripts/train/gsm8k/ppo.sh      eight GPUs, with the same batches and steps (GPUS must divide 64)
#   MODEL=path/to/model DATA=path/to/rows       local folders instead of the Hub
# Further flags go to the script, such as --seed 2, or --no-async_mode: verl's run generated and trained in turns.
#
# Memory, by scripts/preflight.py:
#   GPUS=1: a learner needs 20 GiB of the 26 that it can use on a GPU with 40 GB
#   GPUS=8: a learner needs 20 GiB of the 25 that it can use on a GPU with 40 GB
# PyTorch's own count of a learner's tensors on one GPU is 19.7 GiB.
# Hours are not known. verl's log has 435 steps of about 66 s on one GPU (it does not say which), which is 8 hours.
#
# Expect: verl's score on the test set ended at .5686 (github.com/eric-haibin-lin/verl-data, branch experiments,
# gsm8k/Qwen2.5-0.5B-bsz256_2-prompt1024-resp512-0.567.log). It began at .0008 and moved between .538 and .579 at the end.
# Its grader is strict, and most of the gain from .0008 is the format "#### 72". Here eval/verifiable_correct_rate is
# strict, too. If the format is missing, eval/reward/lenient reads the last number, so it shows how much of a gain is
# arithmetic. The prompt has a different wording than verl's, so the first score can differ.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
gpus=${GPUS:-1}
((64 % gpus == 0)) || { echo "GPUS=$gpus must divide 64" >&2; exit 2; }
if [ -z "${MODEL:-}" ] && ! nvidia-smi -L; then
  echo "This needs a GPU of 40 GB. Without one: bash scripts/train/debug/ppo.sh" >&2
  exit 2
fi
bash scripts/setup.sh
.venv/bin/python scripts/data_preprocess/gsm8k.py --local_save_dir data/gsm8k ${DATA:+--local_dataset_path "$DATA"}
flags=(
  --exp_name gsm8k_ppo
  --dataset data/gsm8k/train.parquet --eval_dataset data/gsm8k/test.parquet
  # The score is strict, and the lenient grade is a metric
  --reward_fn scripts/rewards/gsm8k.py:strict
  # verl limits prompts to 1,024 tokens, but GSM8K has none with half as many
  --max_prompt_token_length 512 --response_length 512
  # 15 epochs of 29 steps with 256 responses (7,473 prompts). Each step has four updates of 64
  --total_episodes 111360 --local_rollout_batch_size $((256 / gpus)) --local_mini_batch_size $((64 / gpus))
  # The value model's learning rate is ten times the policy's, and both are constant
  --learning_rate 1e-6 --value_learning_rate 1e-5 --lr_scheduler_type constant
  # There is no discount, and returns are plain sums, because the reward comes at the end
  --gamma 1 --lam 1 --cliprange 0.2 --cliprange_value 0.5
  # The KL penalty of verl's run. (Its entropy bonus of 0.001 has no flag here)
  --beta 0.001
  # All 1,319 test prompts, about every 10 steps
  --num_evals 43 --num_eval_prompts 0
  --save_freq 50 --keep_last_n 1
)
config=$( ((gpus > 1)) && echo ddp || echo one_gpu)
launch=(--config_file "scripts/accelerate/$config.yaml" --num_processes "$gpus")
run=(ppo_vllm_async.py --model_name_or_path "${MODEL:-Qwen/Qwen2.5-0.5B-Instruct}" "${flags[@]}" "$@")
.venv/bin/python scripts/preflight.py "${launch[@]}" "${run[@]}"  # prints errors and the plan
exec .venv/bin/python scripts/train/launch.py "$0" "$@" -- "${launch[@]}" "${run[@]}"
