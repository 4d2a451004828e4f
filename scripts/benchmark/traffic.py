"""What travels in a training step, computed: the table of docs/scaling.md.

    python scripts/benchmark/traffic.py

Weights to vLLM are 2 bytes a parameter for each engine (bfloat16). Gradients are 4 bytes a
parameter, of which a ring of n ranks sends 2 (n - 1) / n from each. What ranks tell one another of
a batch is pickled: the bytes of a token are measured here, by pickling made-up answers.
"""

import pickle
import random
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))

from ppo_sync import Answers

PARAMETERS = 0.5e9
PROMPTS, SAMPLES = 64, 8  # of a rank: the defaults of grpo_vllm_async.py


def make_answers(count: int, length: int) -> Answers:
    """Answers of so many tokens each, with ids of a vocabulary of 151,936."""
    choice = random.Random(1)
    return Answers(
        responses=[[choice.randrange(151_936) for _ in range(length)] for _ in range(count)],
        sampler_logprobs=[[-choice.random() for _ in range(length)] for _ in range(count)],
        texts=["word" * length for _ in range(count)],  # a token has about four letters
        verifiable=[1.0] * count,
        failures=[None] * count,
    )


def main() -> None:
    length = 256
    answers = make_answers(PROMPTS, length)
    pickled = pickle.dumps(answers)
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
