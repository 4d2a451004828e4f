"""What travels in a training step, computed: the table of docs/scaling.md.

    python scripts/benchmark/traffic.py

Weights to vLLM are 2 bytes a parameter for each engine (bfloat16). Gradients are 4 bytes a
parameter, of which a ring of n ranks sends 2 (n - 1) / n from each. What ranks tell one another of
a batch is pickled: the bytes of a token are measured here, by pickling made-up responses.
"""

import pickle
import random
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))

from ppo_sync import Response

PARAMETERS = 0.5e9
PROMPTS, SAMPLES = 64, 8  # of a rank: the defaults of grpo_vllm_async.py


def make_responses(count: int, length: int) -> list[Response]:
    """Responses of so many tokens each, with ids of a vocabulary of 151,936."""
    choice = random.Random(1)
    return [
        Response(
            prompt=None,
            token_ids=[choice.randrange(151_936) for _ in range(length)],
            logprobs=[-choice.random() for _ in range(length)],
            stopped=True,
            text="word" * length,  # a token has about four letters
            verifiable=1.0,
        )
        for _ in range(count)
    ]


def main() -> None:
    length = 256
    pickled = pickle.dumps(make_responses(PROMPTS, length))
    start = time.perf_counter()
    pickle.loads(pickled)
    tokens = PROMPTS * length
    bytes_per_token = len(pickled) / tokens
    seconds_per_token = (time.perf_counter() - start) / tokens
    print(f"{bytes_per_token:.1f} bytes and {1e9 * seconds_per_token:.0f} ns to read for a token")
    print(f"{PARAMETERS / 1e9:g} B parameters, {PROMPTS} x {SAMPLES} responses for each rank\n")
    print("| learners | tokens | weights | gradients | batch | to read it |")
    print("|---|---|---|---|---|---|")
    for ranks in (8, 64):
        for length in (256, 2048, 16_384):
            batch_tokens = ranks * PROMPTS * SAMPLES * length
            gradients = 4 * PARAMETERS * 2 * (ranks - 1) / ranks
            weights = 2 * PARAMETERS
            batch = batch_tokens * bytes_per_token
            sizes = [f"{size / 1e9:.2f} GB" for size in (weights, gradients, batch)]
            seconds = f"{batch_tokens * seconds_per_token:.1f} s"
            print(f"| {' | '.join([str(ranks), f'{length:,}', *sizes, seconds])} |")


if __name__ == "__main__":
    main()
