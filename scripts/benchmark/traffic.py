"""What travels in a training step, computed: the table of docs/scaling.md.

    python scripts/benchmark/traffic.py

Weights to vLLM are 2 bytes a parameter for each engine (bfloat16). Gradients are 4 bytes a
parameter, of which a ring of n ranks sends 2 (n - 1) / n from each. What ranks tell one another of
a batch is pickled, once by each rank, and read by all. The bytes of a token and the time to read it
are measured here, on made-up responses without their prompts. The last lines compare arrays, as the
scripts have them, with lists of Python's numbers: 64 shares of 512 responses of 1,024 tokens.
"""

import pickle
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))

import numpy as np

from ppo_sync import Response

PARAMETERS = 0.5e9
PROMPTS, SAMPLES = 64, 8  # of a rank: the defaults of grpo_vllm_async.py
SHARES, LENGTH = 64, 1024  # for the comparison: 33.6 million tokens


def make_responses(count: int, length: int) -> list[Response]:
    """Responses of so many tokens each, with ids of a vocabulary of 151,936."""
    choice = np.random.default_rng(1)
    return [
        Response(
            prompt=None,
            token_ids=choice.integers(151_936, size=length, dtype=np.int32),
            logprobs=-choice.random(length, np.float32),
            stopped=True,
            text="word" * length,  # a token has about four letters
            verifiable=1.0,
        )
        for _ in range(count)
    ]


def with_lists(response: Response) -> Response:
    return replace(
        response, token_ids=response.token_ids.tolist(), logprobs=response.logprobs.tolist()
    )


def measure(responses: list[Response], times: int) -> tuple[int, float, float]:
    """Bytes of the pickled responses, seconds to pickle them, seconds to read them so often."""
    start = time.perf_counter()
    pickled = pickle.dumps(responses)
    written = time.perf_counter()
    for _ in range(times):
        pickle.loads(pickled)
    return len(pickled), written - start, time.perf_counter() - written


def main() -> None:
    print(f"{PARAMETERS / 1e9:g} B parameters, {PROMPTS} x {SAMPLES} responses for each rank\n")
    print("| learners | tokens | weights | gradients | batch | to read it |")
    print("|---|---|---|---|---|---|")
    for ranks in (8, 64):
        for length in (256, 2048, 16_384):
            gradients = 4 * PARAMETERS * 2 * (ranks - 1) / ranks
            weights = 2 * PARAMETERS
            size, _, seconds = measure(make_responses(PROMPTS * SAMPLES, length), times=1)
            sizes = [f"{size / 1e9:.2f} GB" for size in (weights, gradients, ranks * size)]
            cells = [str(ranks), f"{length:,}", *sizes, f"{ranks * seconds:.2f} s"]
            print(f"| {' | '.join(cells)} |")

    responses = make_responses(PROMPTS * SAMPLES, LENGTH)
    tokens = len(responses) * LENGTH
    print(f"\n{SHARES * tokens / 1e6:.1f} million tokens in {SHARES} shares:")
    in_lists = [with_lists(response) for response in responses]
    for name, some in (("lists", in_lists), ("arrays", responses)):
        size, write, read = measure(some, SHARES)
        print(
            f"{name}: {size / tokens:.1f} bytes a token; {write:.3f} s to pickle a share, "
            f"{read:.2f} s to read all"
        )


if __name__ == "__main__":
    main()
