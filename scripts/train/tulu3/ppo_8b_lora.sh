#!/usr/bin/env bash
# Set-up, then asynchronous PPO with adapters (LoRA) on one GPU of 80 GB: the task of ppo_8b.sh (GSM8K, MATH, constraints),
# 8 B parameters as policy and as value model.
#   bash scripts/train/tulu3/ppo_8b_lora.sh                                     one GPU
#   GPUS=8 bash scripts/train/tulu3/ppo_8b_lora.sh                              eight: the same batches and steps, shared out
#   MODEL=path/to/policy REWARD_MODEL=path/to/reward_model DATA=path/to/rows    folders in place of the hub
# Further flags go to the script. GPUS must divide 192.
#
# Needs, by scripts/preflight.py:
#   GPUS=1: 37 GiB for a learner, of the 40 that it may take of a GPU of 80
#   GPUS=8: 37 GiB for a learner, of the 39 that it may take of a GPU of 80
# Hours: not known; this has not run on a GPU.
#
# Expect: not known. ppo_8b.sh trains all weights, with open-instruct's numbers; it differs in what is said to be ours.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
gpus=${GPUS:-1}
((192 % gpus == 0)) || { echo "GPUS=$gpus must divide 192" >&2; exit 2; }
bash scripts/setup.sh
.venv/bin/python scripts/data_preprocess/tulu3.py --local_save_dir data/tulu3 ${DATA:+--local_dataset_path "$DATA"}
flags=(
  --exp_name tulu3_8b_ppo_lora
  --dataset data/tulu3/train.parquet --eval_dataset data/tulu3/test.parquet
  # Right answers and met constraints, worth 10. The reward model scores nothing: the value model starts from it
  --reward_fn scripts/rewards/graders.py:compute_score --verification_reward 10
  --reward_model_path "${REWARD_MODEL:-allenai/Llama-3.1-Tulu-3-8B-RM}" --reward_model_multiplier 0
  --max_prompt_token_length 2048 --response_length 2048
  # Steps of 192 responses, four passes over each, one update a pass. Ours: 500 of them, where ppo_8b.sh has 10,416
  --total_episodes 96000 --local_rollout_batch_size $((192 / gpus)) --local_mini_batch_size $((192 / gpus)) --num_epochs 4
  # Ours: ten times the rates of ppo_8b.sh ("LoRA Without Regret", Thinking Machines, 2025)
  --lora_rank 16 --learning_rate 3e-6 --value_learning_rate 3e-6 --lr_scheduler_type linear
  # Ours: with lambda below 1 a value model that does not fit yet may favour short responses
  --lam 0.95 --value_warmup_steps 20
  --gamma 1 --cliprange 0.2 --cliprange_value 0.2
  # A KL penalty for a reward of 10: for one of 1 it would be 0.005. The reference policy takes no memory
  --beta 0.05
  --temperature 1.0 --stop_token eos --non_stop_penalty --penalty_reward_value -10
  # What a learner leaves vLLM, less a tenth of what it needs: room for 40 longest responses at once
  --vllm_gpu_memory_utilization 0.47
  # Two longest rows
  --micro_batch_tokens 8192
  --num_evals 10 --num_eval_prompts 200
  --save_freq 50 --keep_last_n 1
)
config=$( ((gpus > 1)) && echo ddp || echo one_gpu)
launch=(--config_file "scripts/accelerate/$config.yaml" --num_processes "$gpus")
run=(ppo_vllm_async.py --model_name_or_path "${MODEL:-allenai/Llama-3.1-Tulu-3-8B-DPO}" "${flags[@]}" "$@")
.venv/bin/python scripts/preflight.py "${launch[@]}" "${run[@]}"  # what is wrong, in a line each; and the plan
exec .venv/bin/accelerate launch --quiet "${launch[@]}" "${run[@]}"
