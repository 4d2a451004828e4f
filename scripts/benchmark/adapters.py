"""What an adapter that vLLM serves costs in speed, on the CPU.

    python scripts/benchmark/adapters.py MODEL [--rounds 2] [--lora_rank 16] [--dtype bfloat16]

It samples the same requests from an engine without adapters and from one with, in turns. (What
check_adapter can tell apart: mismatch.py.)
"""

import argparse
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from transformers import AutoModelForCausalLM, AutoTokenizer

import grpo_vllm_async as script

TASKS = ("Say something about a taxi.", "What is 2 + 2?", "Write a poem on rain.", "Name a city.")
SAMPLES = 16  # of each


def make_prompts(tokenizer):
    prompts = []
    for task in TASKS:
        messages = [{"role": "user", "content": task}]
        text, token_ids = script.tokenize_prompt(messages, {}, tokenizer)
        prompts.append(script.Prompt(task, text, token_ids, None, None, None))
    return prompts


def start(args, max_length):
    """The engine of a model."""
    model = script.load_model(AutoModelForCausalLM, args.model_name_or_path, args, trained=True)
    engine = script.VLLM((0, 1, ()), model.config, max_length, args)
    script.sync_weights(engine, model, 0, args)
    return engine


def measure_speed(engines, prompts, rounds):
    repeated = [prompt for prompt in prompts for _ in range(SAMPLES)]
    for number in range(rounds):
        seeds = range(number * len(repeated), (number + 1) * len(repeated))
        for words, engine in engines.items():
            begin = time.perf_counter()
            responses = engine.sample(repeated, seeds, 1.0)
            tokens = sum(len(response.token_ids) for response in responses)
            speed = tokens / (time.perf_counter() - begin)
            print(f"round {number + 1}, {words}: {speed:.0f} tokens a second", flush=True)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=os.path.expanduser)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--lora_rank", type=int, default=16)
    parser.add_argument("--dtype", default="bfloat16")
    given = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    args = script.Args(model_name_or_path=given.model, dtype=given.dtype, response_length=40)
    args = replace(args, vllm_gpu_memory_utilization=0.3)
    args.stop_token_ids = (tokenizer.eos_token_id,)
    with_adapters = replace(args, lora_rank=given.lora_rank)
    prompts = make_prompts(tokenizer)
    max_length = max(len(prompt.token_ids) for prompt in prompts) + args.response_length
    try:
        engines = {
            "without adapters": start(args, max_length),
            "with adapters": start(with_adapters, max_length),
        }
        measure_speed(engines, prompts, given.rounds)
    finally:
        script.end_children()


if __name__ == "__main__":
    main()
