"""Writes the folder of a made-up run of 3,000 steps, to measure what reads runs.

    python scripts/dev/make_long_run.py output/long
    /usr/bin/time -v python scripts/report.py output/long

Its sizes are those of a real one: 60 metrics, 500 prompts in 21 evaluations, and of each step eight
responses of 100 to 1,000 tokens; in 201 of the steps, each token has its id and eight numbers.
"""

import json
import random
import sys
from pathlib import Path

STEPS, PROMPTS = 3000, 500
NUMBERS = "sampler_logprobs logprobs ref_logprobs values advantages returns rewards entropies"


def response(tokens, **own):
    """A line of samples.jsonl; the debug model's digits have the ids 6 to 15."""
    ids = [random.randrange(6, 16) for _ in range(tokens)]
    row = {"prompt": "<|user|>" + "54321" * 20 + "=<|assistant|>", "ground_truth": "12345"}
    row |= {"response": "".join(str(i - 6) for i in ids), "score": float(tokens % 2)}
    row |= {"verifiable_score": float(tokens % 2), "reward_model_score": None, "failure": None}
    row |= {"reward_metrics": {}, "data_source": "debug/sorting", "length": tokens, "stopped": True}
    return row | own, ids


def main(folder):
    folder.mkdir(parents=True)
    random.seed(1)
    args = {"exp_name": "ppo_vllm_async", "run_name": folder.name, "num_training_steps": STEPS}
    args |= {"model_name_or_path": "debug_assets/model", "model_revision": None, "dtype": "float32"}
    (folder / "args.json").write_text(json.dumps(args | {"tokenizer_name_or_path": None}), "utf-8")
    lines = {"metrics": [], "rollouts": [], "samples": []}

    def write(name, line):
        lines[name].append(json.dumps(line) + "\n")

    for step in range(1, STEPS + 1):
        line = {f"objective/reward/{number}": random.random() for number in range(50)}
        line |= {name: random.random() for name in ("objective/scores", "objective/scores_std")}
        line |= {name: random.random() for name in ("policy/entropy_avg", "objective/kl", "lr")}
        if step % 150 == 1 or step == STEPS:
            line |= {"eval/scores": step / STEPS, "eval/policy_version": step - 1}
            for prompt in range(PROMPTS):
                own = {"prompt": f"held out {prompt}", "policy_version": step - 1}
                write("samples", response(250, **own)[0])
        write("metrics", line | {"training_step": step, "time/from_scratch": 10.0 * step})
        for _ in range(8):
            own = {"policy_version": max(0, step - 2), "training_step": step}
            row, ids = response(random.randint(100, 1000), **own)
            if step % 15 == 1 or step == STEPS:
                row["token_ids"] = ids
                for name in NUMBERS.split():
                    row[name] = [round(random.gauss(0, 1), 4) for _ in ids]
            write("rollouts", row)
    for name, texts in lines.items():
        (folder / f"{name}.jsonl").write_text("".join(texts), "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
