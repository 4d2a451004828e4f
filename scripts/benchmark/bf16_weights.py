"""Measures what weights in bfloat16 cost and change: docs/results.md, "Weights in bfloat16".

    python scripts/benchmark/bf16_weights.py operations        # also in a clone of an older commit
    python scripts/benchmark/bf16_weights.py head              # a minute
    python scripts/benchmark/bf16_weights.py embedding --model HuggingFaceTB/SmolLM2-135M-Instruct
    python scripts/benchmark/bf16_weights.py sampler --model HuggingFaceTB/SmolLM2-135M-Instruct

operations: of a layer, forward and backward, with gradient checkpointing and without; and how far a
policy is from its frozen reference. head: ChunkedHead beside torch.utils.checkpoint over the same
chunks, its memory by PyTorch's count and its CPU time. embedding: the error of the gradient of a
lookup. sampler: the KL of a real vLLM to a learner with six layers, over 12 updates at 1e-4. The
last two need data/instructions (scripts/data_preprocess/instructions.py).
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from pyarrow import parquet
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import ppo_vllm_async as script

DATA = "data/instructions/train.parquet"
TINY = {"vocab_size": 23, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
TINY |= {"num_key_value_heads": 1, "initializer_range": 0.3, "bos_token_id": None}
VOCABULARY, HIDDEN_SIZE, POSITIONS = 151_936, 896, 3072


class Operations(TorchDispatchMode):
    """Counts what is computed or copied; a view is neither."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if not function.is_view and function is not torch.ops.aten._unsafe_view.default:
            self.counts[str(function)] += 1
        return function(*args, **(kwargs or {}))


def operations(options):
    for checkpointing in (True, False):
        totals = []
        args = script.Args(gradient_checkpointing=checkpointing, temperature=0.8)
        for layers in (2, 3):
            with tempfile.TemporaryDirectory() as folder:
                torch.manual_seed(0)
                LlamaForCausalLM(LlamaConfig(**TINY, num_hidden_layers=layers)).save_pretrained(
                    folder
                )
                policy, reference = (
                    script.PolicyModel(
                        script.load_model(AutoModelForCausalLM, folder, args, t), args
                    )
                    for t in (True, False)
                )
            script.make_optimizer(policy, args)
            input_ids = torch.randint(23, (4, 20), generator=torch.Generator().manual_seed(0))
            mask = torch.ones_like(input_ids)
            mask[:, :5] = 0
            with Operations() as seen:
                logprobs, _ = policy(input_ids, mask)
                logprobs.sum().backward()
            totals.append(seen.counts)
            distance = (logprobs - reference(input_ids, mask)[0]).abs().sum() / mask.sum()
        print(
            f"checkpointing {checkpointing}: {(totals[1] - totals[0]).total()} operations a layer"
        )
    print(f"policy and reference at equal weights: {distance.item():.3g} a token")


def ours(hidden, weight, labels, size):
    return script.ChunkedHead.apply(hidden.float(), weight, labels, None)


def by_checkpoint(hidden, weight, labels, size):
    head, hidden = weight.float(), hidden.float()

    def chunk(hidden, labels):
        return script.token_logprobs(hidden @ head.T, labels)

    pairs = zip(hidden.split(size), labels.split(size), strict=True)
    return map(
        torch.cat, zip(*(checkpoint(chunk, *p, use_reentrant=False) for p in pairs), strict=True)
    )


def head(options):
    from fake_memory import Tracker
    from torch._subclasses.fake_tensor import FakeTensorMode

    def make(positions):
        weight = torch.nn.Parameter(torch.randn(VOCABULARY, HIDDEN_SIZE).bfloat16() / 30)
        weight.master = torch.nn.Parameter(torch.zeros(VOCABULARY, HIDDEN_SIZE))
        weight.master.grad = torch.zeros_like(weight.master)
        weight.register_post_accumulate_grad_hook(script.add_to_master)
        hidden = torch.randn(positions, HIDDEN_SIZE).bfloat16().requires_grad_()
        return hidden, weight, torch.zeros(positions, dtype=torch.long)

    for way in (ours, by_checkpoint):
        with FakeTensorMode():
            inputs, tracker = make(POSITIONS), Tracker()
            tracker.track_external(*inputs, inputs[1].master.grad)
            script.LOGITS_CHUNK["cpu"] = script.LOGITS_CHUNK["cuda"]
            with tracker:
                logprobs, _ = way(*inputs, script.LOGITS_CHUNK["cuda"] // VOCABULARY)
                logprobs.sum().backward()
        print(f"{way.__name__}: {tracker.peak() / 2**30:.2f} GiB")
    inputs, times = make(512), {ours: [], by_checkpoint: []}
    script.LOGITS_CHUNK["cpu"] = 2**25
    for _ in range(5):
        for way in times:
            start = time.process_time()
            logprobs, _ = way(*inputs, 2**25 // VOCABULARY)
            logprobs.sum().backward()
            times[way].append(time.process_time() - start)
    ratios = [b / a for a, b in zip(times[ours], times[by_checkpoint], strict=True)][1:]
    print(f"CPU seconds, checkpoint / ours: {statistics.median(ratios):.2f} in the median")


# Answers that a model might give
TEXTS = (
    "A lighthouse is a tall tower by the sea that shows ships the way with its bright light.",
    " Bread is made of flour, water, salt and yeast, and it is baked in a hot oven until brown.",
)


def embedding(options):
    args = script.Args(model_name_or_path=options.model, gradient_checkpointing=False)
    model = script.load_model(AutoModelForCausalLM, options.model, args, trained=True)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    responses = []
    for i, row in enumerate(parquet.read_table(DATA).to_pylist()[:16]):
        _, prompt_ids = script.tokenize_prompt(row["prompt"], row, tokenizer)
        prompt = script.Prompt("", "", prompt_ids, None, None, None)
        ids = np.array(tokenizer(TEXTS[i % 2])["input_ids"][:24], np.int32)
        responses.append(script.Response(prompt, ids, np.zeros(len(ids), np.float32), True))
    batch, seen = script.collate(responses, "cpu"), {}

    def note(module, inputs, rows):
        rows.register_hook(lambda gradient: seen.update(ids=inputs[0], gradient=gradient.clone()))

    lookup = model.get_input_embeddings()
    lookup.register_forward_hook(note)
    logprobs, _ = script.PolicyModel(model, args)(batch.input_ids, batch.mask)
    advantages = torch.randn(16, 1, generator=torch.Generator().manual_seed(0))
    (-(logprobs * advantages * batch.mask).sum() / batch.mask.sum()).backward()
    ids, gradient = seen["ids"].flatten(), seen["gradient"].flatten(0, 1)
    exact = torch.zeros(lookup.weight.shape, dtype=torch.float64)
    exact.index_add_(0, ids, gradient.double())
    weight = lookup.weight.detach().clone().requires_grad_()
    torch.nn.functional.embedding(ids, weight).backward(gradient)
    error = weight.grad.double() - exact
    print(f"in all: {error.norm() / exact.norm():.4f} of the gradient, {len(ids)} tokens")
    counts = torch.bincount(ids)
    for token in counts.argsort(descending=True)[:5].tolist():
        size = exact[token].norm()
        if size > 0:  # padding has none
            text, share = tokenizer.decode([token]), error[token].norm() / size
            print(f"{text!r}, {counts[token]} times: {share:.4f}")


def sampler(options):
    class NoValueModel(torch.nn.Module):
        def forward(self, input_ids, mask):
            return torch.zeros_like(mask).requires_grad_()

    args = script.Args(
        model_name_or_path=options.model,
        dataset=DATA,
        response_length=32,
        reward_fn="none is called",
        gradient_checkpointing=False,
        per_device_train_batch_size=12,
    )
    args, accelerator = script.fill_in(args, 1), script.Accelerator(cpu=True)
    tokenizer = script.load_tokenizer(args)
    prompts, _ = script.load_datasets(tokenizer, args)
    prompts = [prompts[i] for i in script.draw_prompts(len(prompts), 0, 48, seed=1)]
    model = script.load_model(AutoModelForCausalLM, options.model, args, trained=True)
    model.model.layers, model.config.num_hidden_layers = model.model.layers[:6], 6
    args.stop_token_ids = script.find_stop_tokens(args, tokenizer, model)
    policy = script.place_model(accelerator, script.PolicyModel(model, args), args)
    optimizer = script.make_optimizer(policy, args)
    length = max(len(prompt.token_ids) for prompt in prompts) + args.response_length
    vllm, draw = script.VLLM((0, 1, ()), model.config, length, args), torch.Generator()
    for update in range(13):
        script.sync_weights(vllm, model, update, args)
        responses = vllm.sample(prompts, range(1000 * update, 1000 * update + 48), 1.0)
        batch = script.collate([replace(each, score=1.0) for each in responses], "cpu")
        rows = list(range(48))
        passes = script.forward_all(accelerator, policy, batch, [rows], 12, args)
        batch.logprobs, batch.entropies = passes
        pair = batch.sampler_logprobs * batch.mask, batch.logprobs * batch.mask
        kl = script.masked_mean(script.kl_penalty(*pair, "kl3"), batch.mask)
        entropy = script.masked_mean(batch.entropies, batch.mask)
        print(f"{update} updates: KL {kl:.2e}, entropy {entropy:.2f}", flush=True)
        batch.advantages = torch.randn(48, 1, generator=draw) * batch.mask
        batch.values = batch.returns = batch.mask.clone()
        script.accumulate_gradients(accelerator, policy, NoValueModel(), batch, rows, True, args)
        script.apply_gradients(accelerator, policy, optimizer, 1e-4, batch, None, args)
    script.end_children()
    os._exit(0)


if __name__ == "__main__":  # vLLM's process imports this file, too
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    measurements = {each.__name__: each for each in (operations, head, embedding, sampler)}
    parser.add_argument("what", choices=measurements)
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    options = parser.parse_args()
    measurements[options.what](options)
