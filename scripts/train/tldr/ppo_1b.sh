#!/usr/bin/env bash
# Set-up, then asynchronous PPO: Pythia 1B learns to summarize Reddit posts (TL;DR) against a reward model. The setting is
# that of TRL's benchmark of PPO, which follows "The N+ Implementation Details of RLHF with PPO" (2403.17031), and whose
# fine-tuned policy and reward model are on the hub.
#   bash scripts/train/tldr/ppo_1b.sh           one GPU
#   GPUS=8 bash scripts/train/tldr/ppo_1b.sh    eight, as published: the same batches and steps, shared out (they divide 512)
#   MODEL=path/to/policy REWARD_MODEL=path/to/reward_model DATA=path/to/rows
#                                               folders with the models and with the dataset's splits: no hub
# Further flags go to the script.
#
# Needs, by scripts/preflight.py:
#   GPUS=1: 38 GiB for a learner, of the 54 that it may take of a GPU of 80
#   GPUS=8: 38 GiB for a learner, of the 53 that it may take of a GPU of 80
# Hours: not known.
#
# Expect: of TRL's run a judge (GPT-4o mini) preferred 64.7% of 1,000 summaries to the reference, and of the policy that
# it began with 33.0% (TRL's docs/source/ppo_trainer.md). This recipe has no judge: watch eval/scores, the reward model's.
# It differs: it is asynchronous, its two models have optimizers of their own, and a summary without an end scores -1,
# where TRL takes 1 off its score. vLLM runs Pythia by the code of transformers; that has not been tried here.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
gpus=${GPUS:-1}
((512 % gpus == 0)) || { echo "GPUS=$gpus must divide 512" >&2; exit 2; }
bash scripts/setup.sh
dataset=${DATA:-trl-lib/tldr}
flags=(
  --exp_name tldr_ppo
  # Prompts are plain text that ends with "TL;DR:"; they go to the model as they are
  --dataset "$dataset" --eval_dataset "$dataset" --eval_dataset_split validation
  # The reward model alone scores, and the value model starts from it
  --reward_model_path "${REWARD_MODEL:-cleanrl/EleutherAI_pythia-1b-deduped__reward__tldr}" --no-apply_verifiable_reward
  --max_prompt_token_length 512 --response_length 53 --temperature 0.7
  # 1,953 steps of 512 responses; four passes over each, one update a pass
  --total_episodes 1000000 --local_rollout_batch_size $((512 / gpus)) --local_mini_batch_size $((512 / gpus)) --num_epochs 4
  --learning_rate 3e-6 --value_learning_rate 3e-6 --lr_scheduler_type linear
  # Lambda below 1 without a warm-up, as published: the value model is no beginner, it starts from the reward model
  --gamma 1 --lam 0.95 --cliprange 0.2 --cliprange_value 0.2
  --beta 0.05
  --stop_token eos --non_stop_penalty --penalty_reward_value -1
  --micro_batch_tokens 16384
  # 500 posts that are not trained on, 20 times
  --num_evals 20 --num_eval_prompts 500
  --save_freq 200 --keep_last_n 1
)
config=$( ((gpus > 1)) && echo ddp || echo one_gpu)
launch=(--config_file "scripts/accelerate/$config.yaml" --num_processes "$gpus")
run=(ppo_vllm_async.py --model_name_or_path "${MODEL:-cleanrl/EleutherAI_pythia-1b-deduped__sft__tldr}" "${flags[@]}" "$@")
.venv/bin/python scripts/preflight.py "${launch[@]}" "${run[@]}"  # what is wrong, in a line each; and the plan
exec .venv/bin/accelerate launch --quiet "${launch[@]}" "${run[@]}"
