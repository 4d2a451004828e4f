#!/usr/bin/env bash
# Set-up, then asynchronous GRPO on two nodes: the last stage of Tulu 3.1 (GSM8K, MATH, constraints), 8 B parameters, with
# the numbers of open-instruct's scripts/train/tulu3/grpo_8b.sh.
#   MACHINE_RANK=0 MAIN_PROCESS_IP=HOST bash scripts/train/tulu3/grpo_8b.sh     on HOST, the first node
#   MACHINE_RANK=1 MAIN_PROCESS_IP=HOST bash scripts/train/tulu3/grpo_8b.sh     on the second
#   MODEL=path/to/policy DATA=path/to/rows                                      folders in place of the hub
# Further flags go to the script. --output_dir must be a disk that both nodes see. Where they share this folder too, run
# `bash scripts/setup.sh` once before. docs/scaling.md has the rest.
#
# Needs, by scripts/preflight.py:
#   two nodes of 8 GPUs: 24 GiB for a learner, of the 78 that it may take of a GPU of 80
# Of each node six GPUs train, all twelve sharing the models (FSDP2), and two have an engine each. So there are twelve
# learners and four engines, as there were, and the sizes below are open-instruct's. Hours: not known.
#
# Expect: not known; this has not run on GPUs. open-instruct says that it makes allenai/Llama-3.1-Tulu-3.1-8B by that
# command, and that scores on IFEval, GSM8K and MATH all rise (docs/algorithms/grpo.md).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
: "${MACHINE_RANK:?is 0 on the first node, 1 on the second}" "${MAIN_PROCESS_IP:?is the first node}"
bash scripts/setup.sh
.venv/bin/python scripts/data_preprocess/tulu3.py --local_save_dir data/tulu3 ${DATA:+--local_dataset_path "$DATA"}
flags=(
  --exp_name tulu3.1_8b_grpo
  --dataset data/tulu3/train.parquet --eval_dataset data/tulu3/test.parquet
  # Right answers and met constraints, worth 10 as there; advantages are the same for any worth
  --reward_fn scripts/rewards/graders.py:compute_score --verification_reward 10
  --max_prompt_token_length 2048 --response_length 2048
  # 2,604 steps of 48 prompts, four a learner, 16 responses each; two updates a step
  --total_episodes 2000000 --local_rollout_batch_size 4 --number_samples_per_prompt 16 --local_mini_batch_size 32
  --learning_rate 5e-7 --lr_scheduler_type constant
  # open-instruct names the estimator by 2: counted from 0, that is the third
  --beta 0.01 --kl_estimator kl3
  # Without an end there is no reward, and no further penalty
  --temperature 1.0 --stop_token eos --non_stop_penalty --penalty_reward_value 0
  --vllm_gpus 6 7
  # Two longest rows
  --micro_batch_tokens 8192
  --num_evals 100 --num_eval_prompts 200
  --save_freq 40 --keep_last_n 1
)
launch=(--config_file scripts/accelerate/fsdp2_two_nodes.yaml --num_processes 12)
nodes=(--machine_rank "$MACHINE_RANK" --main_process_ip "$MAIN_PROCESS_IP" --main_process_port "${MAIN_PROCESS_PORT:-29500}")
run=(grpo_vllm_async.py --model_name_or_path "${MODEL:-allenai/Llama-3.1-Tulu-3-8B-DPO}" "${flags[@]}" "$@")
.venv/bin/python scripts/preflight.py "${launch[@]}" "${run[@]}"  # what is wrong, in a line each; and the plan
exec .venv/bin/accelerate launch --quiet "${launch[@]}" "${nodes[@]}" "${run[@]}"
