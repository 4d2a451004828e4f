"""Measure how far vLLM's log-probabilities are from the learner's, and what check_sampler finds.

Both have equal weights in bfloat16.

    python scripts/data_preprocess/instructions.py --local_save_dir data/instructions
    python scripts/benchmark/mismatch.py --model HuggingFaceTB/SmolLM2-135M-Instruct

A real vLLM generates answers to prompts at three temperatures, with its head in bfloat16 (its
default) and in float32 (which the scripts request on GPUs). The learner computes log-probabilities
correctly, and then with bugs: it ignores the temperature, reads the text tokenized again, or lacks
a bias of the head (normal, with a standard deviation of 0.1), a multiplier or a cap. Each line has
the mean difference, the largest one, and the KL, which check_sampler limits.
"""

import argparse
import sys
from dataclasses import replace
from unittest import mock

import numpy as np
import torch
from debug_runs import REPO
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(REPO))

import ppo_vllm_async as script

# What a head might do to its logits beside what PolicyModel knows
MULTIPLIERS = (0.9, 0.96, 1.04, 1.08)
CAPS = (60.0, 80.0)
TOKEN_LOGPROBS, VLLM_SETTINGS = script.token_logprobs, script.vllm_settings


@torch.no_grad()
def read(model, responses, args, change=lambda logits: logits):
    """The batch of responses, with the learner's log-probabilities."""
    batch = script.collate(responses, "cpu")
    policy = script.PolicyModel(model, args)
    parts = [slice(start, start + 8) for start in range(0, len(responses), 8)]

    def changed(logits, labels):
        return TOKEN_LOGPROBS(change(logits), labels)

    with mock.patch.object(script, "token_logprobs", changed):
        logprobs = [policy(batch.input_ids[part], batch.mask[part])[0] for part in parts]
    return replace(batch, logprobs=torch.cat(logprobs))


def tokenize_again(response, tokenizer):
    """A response whose ids are those of its text, as many as there were."""
    ids = tokenizer(tokenizer.decode(response.token_ids), add_special_tokens=False)["input_ids"]
    count = len(response.token_ids)
    return replace(response, token_ids=np.array((ids + [0] * count)[:count], np.int32))


def report(name, batch, args):
    """Prints a line of the table."""
    mask = batch.mask
    logprobs, sampler_logprobs = batch.logprobs * mask, batch.sampler_logprobs * mask
    difference = (logprobs - sampler_logprobs).abs()
    mean = script.masked_mean(difference, mask)
    kl = script.masked_mean(script.kl_penalty(sampler_logprobs, logprobs, "kl3"), mask)
    with mock.patch.object(script, "warn_once") as warn:
        try:
            script.check_sampler(logprobs, sampler_logprobs, mask, args)
            verdict = "warns" if warn.called else "passes"
        except RuntimeError:
            verdict = "ends"
    numbers = f"{mean:.4f} | {difference.max():.2f} | {kl:.2e}"
    print(f"| {args.temperature} | {name} | {numbers} | {verdict} |", flush=True)


def compare(vllm, model, prompts, tokenizer, args):
    """Prints all lines of one engine and temperature."""

    def show(name, responses, given=args, **change):
        report(name, read(model, responses, given, **change), args)

    temperature = args.temperature
    responses = vllm.sample(prompts, range(len(prompts)), temperature)
    show("right", responses)
    if temperature != 1:
        show("temperature left out", responses, replace(args, temperature=1.0))
    again = [tokenize_again(response, tokenizer) for response in responses]
    share = sum(a.row.tolist() != b.row.tolist() for a, b in zip(again, responses, strict=True))
    show(f"tokenized again ({share} of {len(again)} differ)", again)
    generator = torch.Generator().manual_seed(args.seed)
    bias = 0.1 * torch.randn(model.config.vocab_size, generator=generator) / temperature
    show("bias left out", responses, change=lambda logits: logits - bias)
    for n in MULTIPLIERS:
        name = f"multiplier {n} left out"
        show(name, responses, change=lambda logits, n=n: n * logits)
    for n in CAPS:
        name = f"cap {n} left out"
        show(name, responses, change=lambda logits, n=n: n * torch.tanh(logits / n))


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--dataset", default="data/instructions/train.parquet")
    parser.add_argument("--responses", type=int, default=48, help="at each temperature")
    parser.add_argument("--response_length", type=int, default=48)
    parser.add_argument("--temperatures", type=float, nargs="+", default=(1.0, 0.7, 0.5))
    given = parser.parse_args()
    args = script.Args(
        model_name_or_path=given.model,
        dataset=given.dataset,
        response_length=given.response_length,
        reward_fn="none is called",
        gradient_checkpointing=False,
    )
    args = script.fill_in(args, world_size=1)
    tokenizer = script.load_tokenizer(args)
    prompts, _ = script.load_datasets(tokenizer, args)
    drawn = script.draw_prompts(len(prompts), 0, given.responses, args.seed)
    drawn = [prompts[i] for i in drawn]
    path = args.model_name_or_path
    model = script.load_model(AutoModelForCausalLM, path, args, trained=True)
    args.stop_token_ids = script.find_stop_tokens(args, tokenizer, model)
    longest = max(len(prompt.token_ids) for prompt in drawn) + args.response_length
    for head_dtype in ("model", "float32"):
        print(f"\nvLLM's head: {head_dtype}\n")
        print("| temperature | learner | mean | largest | KL | check_sampler |")
        print("|---|---|---|---|---|---|")

        def with_head(*settings, head_dtype=head_dtype):
            environment, options = VLLM_SETTINGS(*settings)
            return environment, options | {"hf_overrides": {"head_dtype": head_dtype}}

        with mock.patch.object(script, "vllm_settings", with_head):
            vllm = script.VLLM((0, 1, ()), model.config, longest, args)
        script.sync_weights(vllm, model, 0, args)
        for temperature in given.temperatures:
            at = replace(args, temperature=temperature)
            compare(vllm, model, drawn, tokenizer, at)
        script.end_children()


if __name__ == "__main__":  # vLLM's process imports this file, too
    main()
