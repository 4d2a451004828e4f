#!/usr/bin/env bash
# Set-up, then asynchronous GRPO: SmolLM2-135M-Instruct learns to follow instructions (few words, but at least five; no
# commas; lowercase letters). It takes about 13 minutes on two CPU cores, and ends with responses before and after training.
#   bash scripts/train/smollm2/grpo.sh --seed 2               passes flags to the script
#   MODEL=path/to/model bash scripts/train/smollm2/grpo.sh    uses another or a local model; SCRIPT, a copy of the script
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
bash scripts/setup.sh
.venv/bin/python scripts/data_preprocess/instructions.py --local_save_dir data/instructions
# Without a GPU the learner should use all cores, but accelerate would give it one
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$(nproc)}"
flags=(
  --dataset data/instructions/train.parquet --eval_dataset data/instructions/test.parquet
  # The score is the fraction of its constraints that a response meets
  --reward_fn scripts/rewards/if_constraints.py:compute_score
  # 40 tokens are 30 words, which is enough to break the rules, and steps stay short
  --max_prompt_token_length 96 --response_length 40
  # 20 steps of 64 responses, with one update each, so that only asynchrony makes them off-policy (by one step)
  --total_episodes 1280 --local_rollout_batch_size 8 --number_samples_per_prompt 8 --local_mini_batch_size 64
  # Few updates need a high learning rate. It is lower at first, while AdamW's moments are from few gradients
  --learning_rate 3e-5 --warm_up_steps 2
  # A small model does not need to save memory
  --no-gradient_checkpointing --per_device_train_batch_size 16
  # Evaluations take time, so use 96 of the 480 held-out prompts, before training, twice during it, and after it
  --num_evals 3 --num_eval_prompts 96
)
run=("${SCRIPT:-grpo_vllm_async.py}" --model_name_or_path "${MODEL:-HuggingFaceTB/SmolLM2-135M-Instruct}" "${flags[@]}" "$@")
launch=(--config_file scripts/accelerate/one_gpu.yaml)  # without a GPU it starts one process on the CPU
.venv/bin/python scripts/preflight.py "${launch[@]}" "${run[@]}"  # prints errors and the plan
exec .venv/bin/python scripts/train/launch.py "$0" "$@" -- "${launch[@]}" "${run[@]}"
