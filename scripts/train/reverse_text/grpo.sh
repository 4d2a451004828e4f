#!/usr/bin/env bash
# Set-up, then asynchronous GRPO: Qwen3-0.6B, fine-tuned for this task, writes texts backwards, with the settings of prime-rl's
# example. It is the smallest published example: 20 steps of 8 x 16 responses with up to 128 tokens.
#   bash scripts/train/reverse_text/grpo.sh            one GPU
#   GPUS=8 bash scripts/train/reverse_text/grpo.sh     eight GPUs, with the same batches and steps (GPUS must divide 8)
#   MODEL=path/to/model DATA=path/to/rows              local folders instead of the Hub
# Other flags are passed to the script.
#
# Memory, by scripts/preflight.py:
#   GPUS=1: a learner needs 13 GiB of the 15 that it can use on a GPU with 24 GB
#   GPUS=8: a learner needs 13 GiB of the 14 that it can use on a GPU with 24 GB
# PyTorch's own count of a learner's tensors on one GPU is 13.1 GiB.
# Without a GPU: bash scripts/train/debug/grpo.sh, the same algorithm in a minute.
#
# Expect, by tests/integration/test_reverse_text.py of github.com/PrimeIntellect-ai/prime-rl: the training reward rises and is
# above 0.6 at the end, and the KL of the sampler to the learner (mismatch/kl) is below 0.02 in the last three steps, all
# within ten minutes. Their evaluation after 20 steps had a mean of 0.8, and that of Qwen3-0.6B without any training 0.05
# (examples/basic/reverse-text/README.md).
# Their run differs in three ways: two GPUs, a policy that is two or three versions old (here one), and another loss.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
gpus=${GPUS:-1}
((8 % gpus == 0)) || { echo "GPUS=$gpus must divide 8" >&2; exit 2; }
if [ -z "${MODEL:-}" ] && ! nvidia-smi -L; then
  echo "This needs a GPU of 24 GB. Without one: bash scripts/train/debug/grpo.sh" >&2
  exit 2
fi
bash scripts/setup.sh
.venv/bin/python scripts/data_preprocess/reverse_text.py --local_save_dir data/reverse_text ${DATA:+--local_dataset_path "$DATA"}
flags=(
  --exp_name reverse_text_grpo
  --dataset data/reverse_text/train.parquet --reward_fn scripts/rewards/yardsticks.py:reverse_text
  --max_prompt_token_length 512 --response_length 128
  # 20 steps of 8 prompts, 16 responses each, with one update per step
  --total_episodes 2560 --local_rollout_batch_size $((8 / gpus)) --number_samples_per_prompt 16
  --local_mini_batch_size $((128 / gpus))
  --learning_rate 3e-6 --lr_scheduler_type constant
  # The default, twice as much, would leave less than a gibibyte of a GPU with 24 GB
  --micro_batch_tokens 8192
)
config=$( ((gpus > 1)) && echo ddp || echo one_gpu)
launch=(--config_file "scripts/accelerate/$config.yaml" --num_processes "$gpus")
run=(grpo_vllm_async.py --model_name_or_path "${MODEL:-PrimeIntellect/Qwen3-0.6B-Reverse-Text-SFT}" "${flags[@]}" "$@")
.venv/bin/python scripts/preflight.py "${launch[@]}" "${run[@]}"  # prints errors and the plan
exec .venv/bin/python scripts/train/launch.py "$0" "$@" -- "${launch[@]}" "${run[@]}"
