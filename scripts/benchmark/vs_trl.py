"""grpo_vllm_async.py against TRL's GRPOTrainer: the same model, prompts, reward, batches and updates, on this machine.

    python scripts/benchmark/vs_trl.py                  # throughput and memory, two workloads, three pairs each
    python scripts/benchmark/vs_trl.py --what learning  # held-out rate against time on the debug task, with a picture

Throughput: float32, learning rate 0, no KL term, one update a step, both sides with all cores. "varied": a random
model whose responses end by themselves, of a third of 256 tokens on average. "equal": the debug model with an end token
that it never says, 64 tokens each. Sides alternate. Episodes a second are counted from the end of step WARM_UP to the
end of the last step but one (the last async step overlaps with nothing). Memory is the growth of the trainer process's
resident set over what it was before the first step. A pair counts only if both sides made as many updates on as many
response tokens, within 2%.

TRL runs in .venv_trl, which the first call makes.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent.parent
TRL_VERSION = "1.16.0"
WARM_UP = 3
PROMPTS, GROUP, MICRO_BATCH = 16, 8, 32
WORKLOADS = {"varied": 256, "equal": 64}  # response caps
REWARD = "def score(data_source, response, ground_truth, extra_info=None):\n    return float(len(response) % 2)\n"


# ---------------------------------------------------------------------------------------------------- both sides


def watch_memory():
    """Starts a thread that follows this process's resident set; returns a function for its growth since, in MiB."""
    import psutil

    process = psutil.Process()
    seen = {"before": process.memory_info().rss, "peak": 0}

    def sample():
        while True:
            seen["peak"] = max(seen["peak"], process.memory_info().rss)
            time.sleep(0.02)

    threading.Thread(target=sample, daemon=True).start()
    return lambda: (seen["peak"] - seen["before"]) / 2**20


def run_tandem(folder, flags):
    """Our side, in a process of its own: the script as it is, watched from its first weight sync on."""
    sys.path.insert(0, str(REPO))
    import grpo_vllm_async as script

    sync_weights, growth = script.sync_weights, []

    def watched(*args):
        if not growth:
            growth.append(watch_memory())
        return sync_weights(*args)

    script.sync_weights = watched
    sys.argv = ["grpo_vllm_async.py", *flags]
    script.main()
    (folder / "memory.json").write_text(json.dumps(growth[0]()))


def run_trl(folder, settings):
    """TRL's side: writes metrics.jsonl lines with what the comparison needs."""
    import datasets
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(os.cpu_count())
    tokenizer = AutoTokenizer.from_pretrained(settings["model"], padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32)
    rows = datasets.Dataset.from_parquet(settings["dataset"]).to_list()
    texts = [tokenizer.apply_chat_template(r["prompt"], tokenize=False, add_generation_prompt=True) for r in rows]
    truths = [row["reward_model"]["ground_truth"] for row in rows]
    train = datasets.Dataset.from_dict({"prompt": texts, "ground_truth": truths})

    def reward(completions, ground_truth, completion_ids, **_):
        if settings["reward"] == "parity":
            return [float(len(text) % 2) for text in completions]
        ends = [tokenizer.eos_token_id in ids for ids in completion_ids]
        right = [float(text.strip() == truth) for text, truth in zip(completions, ground_truth, strict=True)]
        return [score if end else -1.0 for score, end in zip(right, ends, strict=True)]

    held_out = []
    if settings.get("eval_dataset"):
        rows = datasets.Dataset.from_parquet(settings["eval_dataset"]).to_list()
        held_out = [
            (tokenizer.apply_chat_template(r["prompt"], tokenize=False, add_generation_prompt=True), r["reward_model"])
            for r in rows
        ]

    def correct_rate():
        prompts = [prompt for prompt, _ in held_out]
        inputs = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
        with torch.no_grad():
            output = model.generate(**inputs, do_sample=False, max_new_tokens=settings["response_length"])
        answers = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        truths = [truth["ground_truth"] for _, truth in held_out]
        return sum(a.strip() == t for a, t in zip(answers, truths, strict=True)) / len(truths)

    class Log(TrainerCallback):
        def on_train_begin(self, *_, **__):
            self.growth, self.start, self.paused = watch_memory(), time.perf_counter(), 0.0
            self.file = open(folder / "metrics.jsonl", "w")
            if held_out:
                self.evaluate({"training_step": 0, "seconds": 0.0})

        def evaluate(self, line):
            before = time.perf_counter()
            line["eval/verifiable_correct_rate"] = correct_rate()
            self.paused += time.perf_counter() - before
            self.file.write(json.dumps(line) + "\n")

        def on_log(self, args, state, control, logs, **_):
            if "completions/mean_length" not in logs:
                return
            line = {"training_step": state.global_step, "seconds": time.perf_counter() - self.start - self.paused}
            line["val/sequence_lengths"] = logs["completions/mean_length"]
            if held_out and state.global_step % settings["eval_every"] == 0:
                self.evaluate(line)
            else:
                self.file.write(json.dumps(line) + "\n")

        def on_train_end(self, *_, **__):
            self.file.close()
            (folder / "memory.json").write_text(json.dumps(self.growth()))

    config = GRPOConfig(
        output_dir=str(folder / "trl"), use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none",
        save_strategy="no", logging_steps=1, disable_tqdm=True, seed=settings["seed"],
        per_device_train_batch_size=settings["micro_batch"], num_generations=settings["group"],
        gradient_accumulation_steps=settings["mini_batch"] // settings["micro_batch"],
        steps_per_generation=settings["episodes"] // settings["micro_batch"],
        max_completion_length=settings["response_length"], max_steps=settings["updates"],
        temperature=1.0, top_p=1.0, top_k=0, beta=settings["beta"], epsilon=0.2, loss_type="dapo",
        learning_rate=settings["learning_rate"], lr_scheduler_type="linear", warmup_steps=settings["warm_up"],
        weight_decay=0.0, max_grad_norm=1.0,
    )  # fmt: skip
    trainer = GRPOTrainer(model, reward, args=config, train_dataset=train, processing_class=tokenizer)
    trainer.add_callback(Log())
    trainer.train()
