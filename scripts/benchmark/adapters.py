"""What an adapter that vLLM serves costs in speed, and what check_adapter can tell apart.

    python scripts/benchmark/adapters.py MODEL [--rounds 2] [--lora_rank 16] [--dtype bfloat16]

On the CPU. First it samples the same requests from an engine without adapters and from one with,
in turns. Then it gives the second engine noise as check_adapter does, and prints the mean
difference of log-probabilities between vLLM and a learner who applies the adapter rightly, not at
all, or by half.
"""

import argparse
import math
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
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
    """A model, and the engine that serves it."""
    model = script.load_model(AutoModelForCausalLM, args.model_name_or_path, args, trained=True)
    engine = script.VLLM((0, 1, ()), model.config, max_length, args)
    script.sync_weights(engine, model, 0, args)
    return model, engine


def measure_speed(engines, prompts, rounds):
    repeated = [prompt for prompt in prompts for _ in range(SAMPLES)]
    for number in range(rounds):
        seeds = range(number * len(repeated), (number + 1) * len(repeated))
        for words, (_, engine) in engines.items():
            begin = time.perf_counter()
            responses = engine.sample(repeated, seeds, 1.0)
            tokens = sum(len(response.token_ids) for response in responses)
            speed = tokens / (time.perf_counter() - begin)
            print(f"round {number + 1}, {words}: {speed:.0f} tokens a second", flush=True)


@torch.no_grad()
def measure_differences(model, engine, prompts, args):
    policy = script.PolicyModel(model, args)
    short = replace(args, response_length=16)
    for version, prompt in enumerate(prompts, start=1):
        torch.manual_seed(version)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.5 * math.sqrt(args.lora_rank) / args.lora_alpha)
        script.sync_weights(engine, model, version, args)
        call = engine.submit(script.sample_responses, [prompt] * 8, range(8), 1.0, version, short)
        batch = script.collate(call.result(), "cpu")
        found = {}
        for words, scale in (("right", 1.0), ("ignored", 0.0), ("by half", 0.5)):
            script.set_adapter_scale(model, scale)
            logprobs, _ = policy(batch.input_ids, batch.mask)
            difference = (logprobs - batch.sampler_logprobs).abs()
            found[words] = script.masked_mean(difference, batch.mask).item()
        script.set_adapter_scale(model, 1.0)
        print(", ".join(f"{words} {number:.3f}" for words, number in found.items()), flush=True)


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
        measure_differences(*engines["with adapters"], prompts, with_adapters)
    finally:
        script.end_children()


if __name__ == "__main__":
    main()
