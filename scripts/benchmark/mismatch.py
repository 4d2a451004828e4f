"""Measure how far vLLM's log-probabilities are from the learner's, and what check_sampler reports.

Both have the same weights in bfloat16.

    python scripts/data_preprocess/instructions.py --local_save_dir data/instructions
    python scripts/benchmark/mismatch.py --model HuggingFaceTB/SmolLM2-135M-Instruct

A real vLLM generates responses at three temperatures, with its head in bfloat16 (its default) and
in float32 (which the scripts request on GPUs). The learner computes log-probabilities correctly,
and then with bugs: it ignores the temperature, reads the text tokenized again, or leaves out a bias
of the head (normal, with a standard deviation of 0.1), a multiplier or a cap. Each line has the
mean difference, the largest one, and the KL, which check_sampler limits.
"""

import sys
from dataclasses import replace
from unittest import mock

import numpy as np
import torch
from debug_runs import REPO, make_parser
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(REPO))

import ppo_vllm_async as script

# Operations of a head on its logits that PolicyModel could leave out
MULTIPLIERS = (0.9, 0.96, 1.04, 1.08)
CAPS = (60.0, 80.0)
TOKEN_LOGPROBS, VLLM_SETTINGS = script.token_logprobs, script.vllm_settings


@torch.no_grad()
def read(model, responses, args, change=lambda logits: logits):
    """Return the batch of responses, with the learner's log-probabilities of changed logits."""
    batch = script.collate(responses, "cpu")
    policy = script.PolicyModel(model, args)

    def changed(logits, labels):
        return TOKEN_LOGPROBS(change(logits), labels)

    with mock.patch.object(script, "token_logprobs", changed):
        micro_batches = zip(batch.input_ids.split(8), batch.mask.split(8), strict=True)
        logprobs = [policy(input_ids, mask)[0] for input_ids, mask in micro_batches]
    return replace(batch, logprobs=torch.cat(logprobs))


def tokenize_again(response, tokenizer):
    """Return a response with the token ids of its text, padded or truncated to their old number."""
    ids = tokenizer(tokenizer.decode(response.token_ids), add_special_tokens=False)["input_ids"]
    count = len(response.token_ids)
    return replace(response, token_ids=np.array((ids + [0] * count)[:count], np.int32))


def report(name, batch, args):
    """Print a line of the table."""
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
    """Print all lines of one engine and temperature."""

    def show(name, responses, learner_args=args, **change):
        report(name, read(model, responses, learner_args, **change), args)

    temperature = args.temperature
    responses = vllm.sample(prompts, range(len(prompts)), temperature)
    show("correct", responses)
    if temperature != 1:
        show("temperature left out", responses, replace(args, temperature=1.0))
    again = [tokenize_again(response, tokenizer) for response in responses]
    count = sum(a.row.tolist() != b.row.tolist() for a, b in zip(again, responses, strict=True))
    show(f"tokenized again ({count} of {len(again)} differ)", again)
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
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="Folder or Hub name.")
    add("--responses", type=int, default=48, help="Number of responses at each temperature (48).")
    add("--temperatures", type=float, nargs="+", default=(1.0, 0.7, 0.5), help="(1.0 0.7 0.5)")
    options = parser.parse_args()
    args = script.Args(
        model_name_or_path=options.model,
        dataset="data/instructions/train.parquet",
        response_length=48,
        reward_fn="none is called",
        gradient_checkpointing=False,
    )
    args = script.fill_in(args, world_size=1)
    tokenizer = script.load_tokenizer(args)
    prompts, _ = script.load_datasets(tokenizer, args)
    indices = script.draw_prompts(len(prompts), 0, options.responses, args.seed)
    prompts = [prompts[i] for i in indices]
    model = script.load_model(AutoModelForCausalLM, options.model, args, trained=True)
    args.stop_token_ids = script.find_stop_tokens(args, tokenizer, model)
    longest = max(len(prompt.token_ids) for prompt in prompts) + args.response_length
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
        for temperature in options.temperatures:
            compare(vllm, model, prompts, tokenizer, replace(args, temperature=temperature))
        script.end_children()


if __name__ == "__main__":  # vLLM's process imports this file as well
    main()
