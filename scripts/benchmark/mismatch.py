"""How far vLLM's log-probabilities are from the learner's at equal weights in bfloat16, and what
check_sampler and check_draws see of bugs, of right runs, and check_adapter of adapters.

    python scripts/data_preprocess/instructions.py --local_save_dir data/instructions
    python scripts/benchmark/mismatch.py --model HuggingFaceTB/SmolLM2-135M-Instruct
    python scripts/benchmark/mismatch.py --adapters 200        # those alone: so many random ones
    python scripts/benchmark/mismatch.py --runs 10             # those alone: an hour on two cores

A real vLLM samples answers to prompts at three temperatures, with its head in bfloat16 (its
default) and in float32 (what the scripts ask for on GPUs). The learner reads them: trained whole,
with a residual stream in float32, or, as with FSDP2, in bfloat16. Then with the bugs: it leaves out
the temperature, reads the text tokenized again, or the sampler has a bias of its head that the
learner lacks (normal, of a deviation of 0.1; no model is changed), a multiplier or a cap. The last
are of samples: the learner reads other responses to the prompts, drawn at a higher temperature, and
takes its own log-probabilities for the sampler's. A line each: the mean difference, its largest,
the KL, which check_sampler limits; and log-probability and entropy, their mean over responses in
standard errors, which check_draws limits to -9.

With --adapters each line is of check_adapter, with a prompt, an A and a B of its own: the KL of a
right engine, of one that has half of lora_alpha, and of one that serves the adapter before.

With --runs each line is of a debug command (ppo.sh, grpo.sh) with a seed of its own. They run with
--no-async_mode, so that both checks see every batch but those of GRPO's first updates; and GRPO
with --beta 0.001, without which check_draws is not called. A line has the steps, the largest KL
(limit: 1e-4 in float32), the lowest of check_draws' standard errors, and the share of right answers
at the end.
"""

import argparse
import atexit
import contextlib
import math
import sys
import tempfile
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from run import REPO, call_main, debug_command, run
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


class Engine:
    """A VLLM for which check_adapter's version, -1, is another one each time: vLLM keeps adapters
    by their version. With stale=True it asks for the one before."""

    def __init__(self, vllm):
        self.vllm, self.version, self.stale = vllm, 0, False

    def sync_weights(self, weights, version):
        self.version += 1
        folder = self.vllm.folder
        self.vllm.policy_version = self.version - 2  # the one before stays
        self.vllm.sync_weights(weights, self.version)
        assert Path(folder, f"version_{self.version}").exists()

    def submit(self, function, prompts, seeds, temperature, version, args):
        version = self.version - self.stale
        return self.vllm.submit(function, prompts, seeds, temperature, version, args)


def compare_adapters(count, prompts, args):
    """The lines of adapters, and the largest and smallest KL of each kind of engine."""
    args = replace(args, lora_rank=16)
    model = script.load_model(AutoModelForCausalLM, args.model_name_or_path, args, trained=True)
    policy = script.PolicyModel(model, args)
    vllm = start_vllm(model.config, "model", longest_row(prompts, args), args)
    engine, found = Engine(vllm), defaultdict(list)
    half = replace(args, lora_alpha=args.lora_alpha // 2)
    kinds = {"right": (args, False), "half of lora_alpha": (half, False), "before": (args, True)}

    def note(*given, limit):
        with mock.patch.object(script, "warn_once"), contextlib.suppress(RuntimeError):
            check_sampler(*given, limit=limit)
        found[kind].append(kl_of(*given[:3]))
        return found[kind][-1]

    check_sampler, script.check_sampler = script.check_sampler, note
    print(f"| draw | {' | '.join(kinds)} |\n|---|---|---|---|")
    for draw in range(count):
        torch.manual_seed(draw)
        for name, matrix in model.named_parameters():
            if "lora_A" in name:  # as peft draws it
                torch.nn.init.kaiming_uniform_(matrix.data, a=math.sqrt(5))
        for kind, (served, engine.stale) in kinds.items():
            if kind == "right" or draw < 20:
                vllm.args = served
                script.check_adapter(engine, policy, model, prompts[draw % len(prompts)], args)
        cells = [f"{found[kind][draw]:.2e}" if draw < len(found[kind]) else "" for kind in kinds]
        print(f"| {draw} | {' | '.join(cells)} |", flush=True)
    for kind, values in found.items():
        print(f"{kind}: {len(values)}, {min(values):.2e} to {max(values):.2e}")
    script.end_children()


def note_checks(script):
    """Has a script print what its checks saw, when it ends."""
    check_sampler, check_draws, kls, errors = script.check_sampler, script.check_draws, [], []

    def note_draws(*given):
        errors.append(errors_of(*given))
        check_draws(*given)

    script.check_sampler = lambda *given: kls.append(check_sampler(*given)) or kls[-1]
    script.check_draws = note_draws
    script.run_program = lambda *_: None  # no pictures
    atexit.register(lambda: print(f"\nseen: {len(errors)} | {max(kls):.1e} | {min(errors):.1f}"))


def compare_runs(seeds):
    print("| run | seed | steps | largest KL | lowest sum | right |\n|---|---|---|---|---|---|")
    for seed in range(1, seeds + 1):
        for name, more in {"ppo": [], "grpo": ["--beta", "0.001"]}.items():
            flags = [*debug_command(name), *more, "--no-async_mode", "--seed", str(seed)]
            with tempfile.TemporaryDirectory() as folder:
                lines, said = run([__file__, "--run", *flags], folder)
            seen = said.rpartition("\nseen: ")[2].partition("\n")[0]
            rate = lines[-1]["eval/verifiable_correct_rate"]
            print(f"| {name} | {seed} | {seen} | {rate:.1%} |", flush=True)


def longest_row(prompts, args):
    return max(len(prompt.token_ids) for prompt in prompts) + args.response_length


def main():
    if sys.argv[1:2] == ["--run"]:
        return call_main(REPO / sys.argv[2], sys.argv[3:], note_checks)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--dataset", default="data/instructions/train.parquet")
    parser.add_argument("--responses", type=int, default=48, help="at each temperature")
    parser.add_argument("--response_length", type=int, default=48)
    parser.add_argument("--temperatures", type=float, nargs="+", default=(1.0, 0.7, 0.5))
    parser.add_argument("--adapters", type=int, default=0, help="draws of adapters, and no more")
    parser.add_argument("--runs", type=int, default=0, help="seeds of debug commands, and no more")
    given = parser.parse_args()
    if given.runs:
        return compare_runs(given.runs)
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
    if given.adapters:
        args.stop_token_ids = (tokenizer.eos_token_id,)
        compare_adapters(given.adapters, drawn, args)
        return
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
