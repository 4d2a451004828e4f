#!/usr/bin/env bash
# Set-up, then asynchronous PPO: SmolLM2-135M-Instruct learns to follow instructions (few words, but at least five; no
# commas; lowercase letters). It takes about 16 minutes on two CPU cores, and ends with responses before and after training.
# grpo.sh does the same without a value model, and learns more in the same time.
#   bash scripts/train/smollm2/ppo.sh --seed 2               passes flags to the script
#   MODEL=path/to/model bash scripts/train/smollm2/ppo.sh    uses another or a local model
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
  # 16 steps of 64 prompts, with one update each, so that only asynchrony makes them off-policy (by one step)
  --total_episodes 1024 --local_rollout_batch_size 64 --local_mini_batch_size 64
  # Few updates need a high learning rate. It is lower at first, while AdamW's moments are from few gradients
  --learning_rate 4e-5 --value_learning_rate 4e-5 --warm_up_steps 2
  # There is no reference policy, because it would cost a forward pass per step, and 16 updates change the policy little
  --beta 0
  # Small models do not need to save memory
  --no-gradient_checkpointing --per_device_train_batch_size 16
  # Evaluations take time, so use 96 of the 480 held-out prompts, before training, twice during it, and after it
  --num_evals 3 --num_eval_prompts 96
)
run=(ppo_vllm_async.py --model_name_or_path "${MODEL:-HuggingFaceTB/SmolLM2-135M-Instruct}" "${flags[@]}" "$@")
launch=(--config_file scripts/accelerate/one_gpu.yaml)  # without a GPU it starts one process on the CPU
.venv/bin/python scripts/preflight.py "${launch[@]}" "${run[@]}"  # prints errors and the plan
exec .venv/bin/python scripts/train/launch.py "$0" "$@" -- "${launch[@]}" "${run[@]}"
