#!/usr/bin/env bash
# Set-up, then asynchronous PPO on two nodes: the last stage of Tulu 3 (GSM8K, MATH, constraints), 8 B parameters, with the
# settings of open-instruct's scripts/train/tulu3/ppo_8b.sh.
#   MACHINE_RANK=0 MAIN_PROCESS_IP=HOST bash scripts/train/tulu3/ppo_8b.sh      on HOST, the first node
#   MACHINE_RANK=1 MAIN_PROCESS_IP=HOST bash scripts/train/tulu3/ppo_8b.sh      on the second
#   MODEL=path/to/policy REWARD_MODEL=path/to/reward_model DATA=path/to/rows    local folders instead of the Hub
# Other flags are passed to the script. --output_dir must be on a disk that both nodes share. If they share this folder
# as well, run `bash scripts/setup.sh` once before. docs/clusters.md has more.
#
# Memory, by scripts/preflight.py:
#   two nodes of 8 GPUs: a learner needs 35 GiB of the 78 that it can use on a GPU with 80 GB
# On each node six GPUs train and two have an engine each. FSDP2 shards the models over all twelve learners, which are as many
# as open-instruct's, so the sizes below are the same. Hours are not known.
#
# The result to expect is not known, because this has not run on GPUs. open-instruct says that its command makes
# allenai/Llama-3.1-Tulu-3-8B.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
: "${MACHINE_RANK:?is 0 on the first node, 1 on the second}" "${MAIN_PROCESS_IP:?is the first node}"
bash scripts/setup.sh
.venv/bin/python scripts/data_preprocess/tulu3.py --local_save_dir data/tulu3 ${DATA:+--local_dataset_path "$DATA"}
flags=(
  --exp_name tulu3_8b_ppo
  --dataset data/tulu3/train.parquet --eval_dataset data/tulu3/test.parquet
  # A correct answer or a met constraint scores 10. The reward model does not score, but the value model starts from it
  --reward_fn scripts/rewards/graders.py:compute_score --verification_reward 10
  --reward_model_path "${REWARD_MODEL:-allenai/Llama-3.1-Tulu-3-8B-RM}" --reward_model_multiplier 0
  --max_prompt_token_length 2048 --response_length 2048
  # 10,416 steps of 192 responses, 16 per learner. Each step has four epochs with one update each
  --total_episodes 2000000 --local_rollout_batch_size 16 --local_mini_batch_size 16 --num_epochs 4
  --learning_rate 3e-7 --value_learning_rate 3e-7 --lr_scheduler_type linear
  # open-instruct has no such warm-up. With lambda below 1, an untrained value model can favour short responses
  --lam 0.95 --value_warmup_steps 20
  --gamma 1 --cliprange 0.2 --cliprange_value 0.2
  # This KL penalty is for a reward of 10. For a reward of 1 it would be 0.005
  --beta 0.05
  --temperature 1.0 --stop_token eos --non_stop_penalty --penalty_reward_value -10
  --vllm_gpus 6 7
  --num_evals 100 --num_eval_prompts 200
  --save_freq 80 --keep_last_n 1
)
launch=(--config_file scripts/accelerate/fsdp2_two_nodes.yaml --num_processes 12)
nodes=(--machine_rank "$MACHINE_RANK" --main_process_ip "$MAIN_PROCESS_IP" --main_process_port "${MAIN_PROCESS_PORT:-29500}")
run=(ppo_vllm_async.py --model_name_or_path "${MODEL:-allenai/Llama-3.1-Tulu-3-8B-DPO}" "${flags[@]}" "$@")
.venv/bin/python scripts/preflight.py "${launch[@]}" "${run[@]}"  # prints errors and the plan
exec .venv/bin/python scripts/train/launch.py "$0" "$@" -- "${launch[@]}" "${nodes[@]}" "${run[@]}"
