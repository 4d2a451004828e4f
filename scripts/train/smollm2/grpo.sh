#!/usr/bin/env bash
# Set-up, then asynchronous GRPO: SmolLM2-135M-Instruct learns to follow instructions (few words, but five;
# no commas; lowercase letters). On two CPU cores in about 13 minutes. At the end: responses before and after.
#   bash scripts/train/smollm2/grpo.sh --seed 2               further flags go to the script
#   MODEL=path/to/model bash scripts/train/smollm2/grpo.sh    another model, or no hub; SCRIPT: a copy of the script
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
bash scripts/setup.sh
.venv/bin/python scripts/data_preprocess/instructions.py --local_save_dir data/instructions
# Without a GPU the learner may use all cores; accelerate would give it one
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$(nproc)}"
flags=(
  --dataset data/instructions/train.parquet --eval_dataset data/instructions/test.parquet
  # The share of its constraints that a response meets
  --reward_fn scripts/rewards/if_constraints.py:compute_score
  # 40 tokens are 30 words: enough to break the rules, and a step stays short
  --max_prompt_token_length 96 --response_length 40
  # 20 steps of 64 responses, each one update: on-policy but for the one step of asynchrony
  --total_episodes 1280 --local_rollout_batch_size 8 --number_samples_per_prompt 8 --local_mini_batch_size 64
  # So few updates need a high rate. The first ones are smaller, while AdamW's moments are made of few gradients
  --learning_rate 3e-5 --warm_up_steps 2
  # A small model needs no help with memory
  --no-gradient_checkpointing --per_device_train_batch_size 16
  # Held-out prompts cost time too: 96 of the 480, before training, twice on the way, and after it
  --num_evals 3 --num_eval_prompts 96
)
run=("${SCRIPT:-grpo_vllm_async.py}" --model_name_or_path "${MODEL:-HuggingFaceTB/SmolLM2-135M-Instruct}" "${flags[@]}" "$@")
launch=(--config_file scripts/accelerate/one_gpu.yaml)  # without a GPU a process on the CPU
.venv/bin/python scripts/preflight.py "${launch[@]}" "${run[@]}"  # what is wrong, in a line each; and the plan
exec .venv/bin/python scripts/train/launch.py "$0" "$@" -- "${launch[@]}" "${run[@]}"
