"""What the output head costs: PolicyModel of ppo_vllm_async.py, against all logits at once.

    python scripts/benchmark/head.py                         # 512, 4,096 and 16,384 positions
    python scripts/benchmark/head.py --positions 1024 --rounds 3 --dtype bfloat16
    python scripts/benchmark/head.py --script OTHER.py       # the same of another version

A language model without layers: embedding, norm and head, as large as Qwen2.5-0.5B's (hidden size
896, vocabulary 151,936, float32), rows of 512 tokens. One forward and one backward pass; the
weights and their gradients are there before, and the peak is what the resident set has beyond them.
--dtype is that of the hidden states. Seconds are of the processor, on all of its cores. Each
measurement is a process of its own, and the sides take turns. "plain" is the model's own
forward pass and one log-softmax of all its logits, for as many positions as --plain_limit.
"""

import argparse
import importlib.util
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent.parent
GIB = 2**30
TOKENS = 512  # of a row


def load(path):
    """A script as a module."""
    spec = importlib.util.spec_from_file_location("script", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["script"] = module
    spec.loader.exec_module(module)
    return module


def measure(side, script, positions, dtype, tied):
    """Seconds, and bytes at the peak, of one forward and one backward pass, in this process."""
    import psutil
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    script = load(script)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=151_936,
        hidden_size=896,
        num_hidden_layers=0,
        num_attention_heads=14,
        tie_word_embeddings=tied,
    )
    model = Qwen2ForCausalLM(config)
    model.model.embed_tokens.weight.requires_grad_(tied)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter).mul_(0)  # in memory, other than zeros
    hidden_dtype = getattr(torch, dtype)
    model.model.norm.register_forward_hook(lambda module, given, hidden: hidden.to(hidden_dtype))
    ids = torch.randint(config.vocab_size, (positions // TOKENS, TOKENS + 1))
    mask = torch.ones(ids.shape)
    mask[:, 0] = 0
    policy = script.PolicyModel(model, script.Args(dtype="float32", temperature=0.7))
    before = psutil.Process().memory_info().rss
    start = time.process_time()
    if side == "plain":
        hidden = model.model(ids).last_hidden_state[:, :-1]
        logits = model.lm_head(hidden.float()) / 0.7
        logprobs = torch.log_softmax(logits, -1)
        entropies = -(logprobs.detach().exp() * logprobs.detach()).sum(-1)
        logprobs = logprobs.gather(-1, ids[:, 1:, None]).squeeze(-1)
    else:
        logprobs, entropies = policy(ids, mask)
    (-logprobs.sum() / positions).backward()
    seconds = time.process_time() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    del logprobs
    held = psutil.Process().memory_info().rss - before
    norm = model.lm_head.weight.grad.norm().item()
    return {
        "seconds": seconds,
        "peak": peak,
        "held": held,
        "norm": norm,
        "H": entropies.sum().item(),
    }


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--positions", type=int, nargs="+", default=[512, 4096, 16384])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--plain_limit", type=int, default=1024)
    parser.add_argument("--script", type=Path, default=REPO / "ppo_vllm_async.py")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--tied", action="store_true", help="the head is the embedding")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.script = args.script.expanduser()
    if args.side:
        found = measure(args.side, args.script, args.positions[0], args.dtype, args.tied)
        print(json.dumps(found))
        return
    for positions in args.positions:
        sides = ["script", "plain"] if positions <= args.plain_limit else ["script"]
        found = {side: [] for side in sides}
        for _ in range(args.rounds):
            for side in sides:
                command = [sys.executable, __file__, "--side", side, "--script", args.script]
                command += ["--positions", str(positions), "--dtype", args.dtype]
                command += ["--tied"] * args.tied
                run = subprocess.run(command, stdout=subprocess.PIPE, encoding="utf-8")
                if run.returncode:
                    sys.exit(f"{side}, {positions} positions: status {run.returncode}")
                found[side].append(json.loads(run.stdout))
        for side, results in found.items():
            seconds = statistics.median(result["seconds"] for result in results)
            peak, held = (max(result[name] for result in results) for name in ("peak", "held"))
            print(
                f"{positions:6,} positions, {side:6}: {seconds:6.1f} s, "
                f"peak {peak / GIB:5.2f} GiB, after the backward pass {held / GIB:5.2f} GiB  "
                f"(gradient {results[0]['norm']:.6g}, entropy {results[0]['H']:.8g})",
                flush=True,
            )
        if len(sides) == 2:
            ratios = [
                chunked["seconds"] / plain["seconds"]
                for chunked, plain in zip(found["script"], found["plain"], strict=True)
            ]
            print(f"    {statistics.median(ratios):.2f} times the time of plain", flush=True)


if __name__ == "__main__":
    main()
