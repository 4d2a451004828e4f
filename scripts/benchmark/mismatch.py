"""How far vLLM's log-probabilities are from the learner's at equal weights in bfloat16, and what
check_sampler and check_draws see of bugs.

    python scripts/data_preprocess/instructions.py --local_save_dir data/instructions
    python scripts/benchmark/mismatch.py --model HuggingFaceTB/SmolLM2-135M-Instruct

A real vLLM samples answers to prompts at three temperatures, with its head in bfloat16 (its
default) and in float32 (what the scripts ask for on GPUs). The learner reads them: trained whole,
with a residual stream in float32, or, as with FSDP2, in bfloat16. Then with the bugs: it leaves out
the temperature, reads the text tokenized again, or the sampler has a bias of its head that the
learner lacks (normal, of a deviation of 0.1; no model is changed), a multiplier or a cap. The last
are of samples: the learner reads other responses to the prompts, drawn at a higher temperature, and
takes its own log-probabilities for the sampler's. A line each: the mean difference, its largest,
the KL, which check_sampler limits; and log-probability and entropy, their mean over responses in
standard errors, which check_draws limits to -9.
"""

import argparse
import math
import sys
from dataclasses import replace
from unittest import mock

import numpy as np
import torch
from run import REPO
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(REPO))

import ppo_vllm_async as script

# What a head might do to its logits beside what PolicyModel knows
MULTIPLIERS = (0.9, 0.96, 1.04, 1.08)
CAPS = (60.0, 80.0)


def start_vllm(config, head_dtype, max_length, args):
    """An engine on the CPU, whose head has a dtype: "model" or "float32"."""
    settings = script.vllm_settings

    def with_head(*given):
        environment, options = settings(*given)
        return environment, options | {"hf_overrides": {"head_dtype": head_dtype}}

    with mock.patch.object(script, "vllm_settings", with_head):
        return script.VLLM((0, 1, ()), config, max_length, args)


@torch.no_grad()
def read(model, responses, args):
    """The batch of responses, with the learner's log-probabilities; and its entropies."""
    batch = script.collate(responses, "cpu")
    policy = script.PolicyModel(model, args)
    parts = [slice(start, start + 8) for start in range(0, len(responses), 8)]
    outputs = [policy(batch.input_ids[part], batch.mask[part]) for part in parts]
    logprobs, entropies = map(torch.cat, zip(*outputs, strict=True))
    return replace(batch, logprobs=logprobs), entropies


def tokenize_again(response, tokenizer):
    """A response whose ids are those of its text, as many as there were."""
    ids = tokenizer(tokenizer.decode(response.token_ids), add_special_tokens=False)["input_ids"]
    count = len(response.token_ids)
    ids = (ids + [0] * count)[:count]
    return replace(response, token_ids=np.array(ids, np.int32))


def with_logits(change, token_logprobs=script.token_logprobs):
    """The learner's token_logprobs, of other logits."""
    return lambda logits, labels: token_logprobs(change(logits), labels)


def other_heads(bias, temperature):
    """What the learner's logits would be without something: {what: function}."""
    return (
        {"bias left out": lambda logits: logits - bias / temperature}
        | {f"multiplier {n} left out": lambda logits, n=n: n * logits for n in MULTIPLIERS}
        | {f"cap {n} left out": lambda logits, n=n: n * torch.tanh(logits / n) for n in CAPS}
    )


def kl_of(logprobs, sampler_logprobs, mask):
    """What check_sampler limits."""
    kl = script.kl_penalty(sampler_logprobs * mask, logprobs * mask, "kl3")
    return script.masked_mean(kl, mask).item()


def errors_of(logprobs, entropies, mask):
    """What check_draws limits: the mean over responses, in its standard errors."""
    sums = ((logprobs + entropies) * mask).sum(1)
    sums = sums[sums != 0]
    return (sums.mean() / sums.std()).item() * math.sqrt(len(sums))


def report(head_dtype, name, batch, entropies, args):
    mask = batch.mask
    logprobs, sampler_logprobs = batch.logprobs * mask, batch.sampler_logprobs * mask
    difference = (logprobs - sampler_logprobs).abs()
    kl, errors = kl_of(logprobs, sampler_logprobs, mask), errors_of(logprobs, entropies, mask)
    mean = script.masked_mean(difference, mask)
    with mock.patch.object(script, "warn_once") as warn:
        try:
            script.check_sampler(logprobs, sampler_logprobs, mask, args)
            script.check_draws(logprobs, entropies, mask)
            verdict = "warns" if warn.called else "passes"
        except RuntimeError:
            verdict = "ends"
    numbers = f"{mean:.4f} | {difference.max():.2f} | {kl:.2e} | {errors:.1f}"
    print(f"| {head_dtype} | {args.temperature} | {name} | {numbers} | {verdict} |", flush=True)


def compare(head_dtype, whole, halved, prompts, temperatures, tokenizer, args):
    """All lines of one engine. whole, halved: the model in float32 and in bfloat16."""
    vllm = start_vllm(whole.config, head_dtype, longest_row(prompts, args), args)
    script.sync_weights(vllm, whole, 0, args)
    generator = torch.Generator().manual_seed(args.seed)
    bias = 0.1 * torch.randn(whole.config.vocab_size, generator=generator)
    for temperature in temperatures:
        at = replace(args, temperature=temperature)
        responses = vllm.sample(prompts, range(len(prompts)), temperature)
        report(head_dtype, "right, float32 residual stream", *read(whole, responses, at), at)
        report(head_dtype, "right, bfloat16 residual stream", *read(halved, responses, at), at)
        if temperature != 1:
            without = read(whole, responses, replace(args, temperature=1.0))
            report(head_dtype, "temperature left out", *without, at)
        again = [tokenize_again(response, tokenizer) for response in responses]
        share = sum(a.row.tolist() != b.row.tolist() for a, b in zip(again, responses, strict=True))
        name = f"tokenized again ({share} of {len(again)} differ)"
        report(head_dtype, name, *read(whole, again, at), at)
        for name, change in other_heads(bias, temperature).items():
            with mock.patch.object(script, "token_logprobs", with_logits(change)):
                report(head_dtype, name, *read(whole, responses, at), at)
        for factor in (1.1, 1.2, 2.0):
            others = vllm.sample(prompts, range(len(prompts)), factor * temperature)
            batch, entropies = read(whole, others, at)
            batch = replace(batch, sampler_logprobs=batch.logprobs)
            name = f"drawn at {factor} times the temperature, right log-probabilities"
            report(head_dtype, name, batch, entropies, at)
    script.end_children()


def longest_row(prompts, args):
    return max(len(prompt.token_ids) for prompt in prompts) + args.response_length


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
    whole, halved = (
        script.load_model(AutoModelForCausalLM, args.model_name_or_path, args, trained=trained)
        for trained in (True, False)
    )
    args.stop_token_ids = script.find_stop_tokens(args, tokenizer, whole)
    print("| vLLM's head | temperature | learner | mean | largest | KL | sum | checks |")
    print("|---|---|---|---|---|---|---|---|")
    for head_dtype in ("model", "float32"):
        compare(head_dtype, whole, halved, drawn, given.temperatures, tokenizer, args)


if __name__ == "__main__":  # vLLM's process imports this file, too
    main()
