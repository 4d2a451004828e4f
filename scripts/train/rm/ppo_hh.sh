#!/usr/bin/env bash
# Set-up, then a reward model from preference pairs (full-hh-rlhf: helpful and harmless dialogues), and asynchronous PPO
# against it. Both start from Qwen2.5-0.5B-Instruct.
#   bash scripts/train/rm/ppo_hh.sh             one GPU
#   GPUS=8 bash scripts/train/rm/ppo_hh.sh      eight GPUs, with the same batches and steps (GPUS must divide 64)
#   MODEL=path/to/model DATA=path/to/rows       local folders instead of the Hub
# The reward model is trained once. If output/hh_reward_model/model exists, it is used. Other flags are passed to PPO.
#
# Memory, by scripts/preflight.py:
#   reward model, GPUS=1: a learner needs 10 GiB of the 39 that it can use on a GPU with 40 GB
#   GPUS=1: a learner needs 21 GiB of the 26 that it can use on a GPU with 40 GB
#   reward model, GPUS=8: a learner needs 10 GiB of the 38 that it can use on a GPU with 40 GB
#   GPUS=8: a learner needs 21 GiB of the 25 that it can use on a GPU with 40 GB
# Hours are not known.
#
# The result to expect is not known, because no published run has these settings. The reward model should rank more than half
# of the held-out pairs correctly, and then eval/scores should rise. Also read the samples, because a score can rise by
# responses that fool the reward model.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
gpus=${GPUS:-1}
((64 % gpus == 0)) || { echo "GPUS=$gpus must divide 64" >&2; exit 2; }
bash scripts/setup.sh
for split in rm rl; do
  .venv/bin/python scripts/data_preprocess/full_hh_rlhf.py --split "$split" --local_save_dir "data/hh_$split" \
    ${DATA:+--local_dataset_path "$DATA"}
done
model=${MODEL:-Qwen/Qwen2.5-0.5B-Instruct}
config=$( ((gpus > 1)) && echo ddp || echo one_gpu)
launch=(--config_file "scripts/accelerate/$config.yaml" --num_processes "$gpus")

reward_model=output/hh_reward_model/model
flags=(
  --exp_name hh_ppo
  --dataset data/hh_rl/train.parquet --eval_dataset data/hh_rl/test.parquet
  # There is no rule. Only the reward model scores, and the value model starts from it
  --reward_model_path "$reward_model" --no-apply_verifiable_reward
  --max_prompt_token_length 512 --response_length 256
  # 400 steps of 256 responses, with four updates each
  --total_episodes 102400 --local_rollout_batch_size $((256 / gpus)) --local_mini_batch_size $((64 / gpus))
  --learning_rate 1e-6 --value_learning_rate 1e-5
  # As with the reward models of 2403.17031. It is far above the default, which is for verifiable rewards
  --beta 0.05
  # The reward model has never seen a truncated response
  --non_stop_penalty --penalty_reward_value -5
  --num_evals 20 --num_eval_prompts 200
  --save_freq 50 --keep_last_n 1
)
run=(ppo_vllm_async.py --model_name_or_path "$model" "${flags[@]}" "$@")
if [ ! -d "$reward_model" ]; then  # a folder of this name is always complete
  # Check PPO's flags before the reward model is trained, with the reward for a format in its place
  .venv/bin/python scripts/preflight.py "${launch[@]}" "${run[@]}" --reward_model_path None --add_r1_style_format_reward
  reward_flags=(
    --run_name hh_reward_model --resume_from_checkpoint latest
    --dataset data/hh_rm/train.parquet --eval_dataset data/hh_rm/test.parquet
    # The limit is for prompt and response together. There is one epoch, because more soon overfit (2203.02155)
    --max_token_length 768 --num_train_epochs 1
    --local_mini_batch_size $((64 / gpus)) --per_device_train_batch_size 8
    # A small model tolerates more than the default of 3e-6. This is not tuned
    --learning_rate 1e-5
    # Center scores around 0 (2312.09244), so that the penalty is below them
    --center_rewards_coefficient 0.01
  )
  reward_run=(scripts/train_reward_model.py --model_name_or_path "$model" "${reward_flags[@]}")
  .venv/bin/python scripts/preflight.py "${launch[@]}" "${reward_run[@]}"
  .venv/bin/python scripts/train/launch.py "$0" "$@" -- "${launch[@]}" "${reward_run[@]}"
fi
.venv/bin/python scripts/preflight.py "${launch[@]}" "${run[@]}"  # prints errors and the plan
exec .venv/bin/python scripts/train/launch.py "$0" "$@" -- "${launch[@]}" "${run[@]}"
