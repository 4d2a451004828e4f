"""How long verifiable rewards take: 1,000 responses through score_responses, as in a run with two
workers.

python scripts/benchmark/scoring.py
"""

import random
import sys
import time
from pathlib import Path
from types import SimpleNamespace

from accelerate import Accelerator

REPO = Path(__file__).resolve().parent.parent.parent
GRADERS = REPO / "scripts" / "rewards" / "graders.py"

FORMS = (
    r"\frac{%d}{%d}",
    r"%d\sqrt{%d}",
    r"(%d, %d)",
    r"%d x^2 + %d x - 1",
    r"%d.%d",
    r"\left[ %d, %d \right)",
)


def make(source, rng):
    """A ground truth and a response of some hundred characters, which is right half of the time."""
    numbers = (rng.randint(2, 99), rng.randint(2, 99))
    other = numbers if rng.random() < 0.5 else (numbers[0] + 1, numbers[1])
    text = (
        "First we add what is known, $x = 3 + {}$, and then we divide by {}. ".format(*numbers) * 6
    )
    if source == "gsm8k":
        return str(numbers[0]), f"{text}#### {other[0]}"
    form = rng.choice(FORMS)
    return form % numbers, rf"{text}So the answer is $\boxed{{{form % other}}}$."


def main():
    sys.path.insert(0, str(REPO))
    import ppo_sync as script

    rng = random.Random(1)
    accelerator = Accelerator(cpu=True)
    tokenizer = SimpleNamespace(batch_decode=lambda texts, skip_special_tokens: texts)
    for source, reward_fn in (("gsm8k", None), ("math", f"{GRADERS}:compute_score")):
        args = script.Args(reward_fn=reward_fn, reward_workers=2)
        workers = script.start_reward_workers(args)
        pairs = [make(source, rng) for _ in range(1000)]
        prompts = [script.Prompt("", "", [], [], source, truth, None) for truth, _ in pairs]
        texts = [text for _, text in pairs]
        # The first call starts the workers
        script.score_responses(
            accelerator, None, workers, tokenizer, prompts[:10], texts[:10], args
        )
        start = time.perf_counter()
        scored = script.score_responses(accelerator, None, workers, tokenizer, prompts, texts, args)
        seconds = time.perf_counter() - start
        workers.stop()
        workers.join()
        right = sum(scored.correct)
        print(
            f"{source}: 1,000 responses in {seconds:.2f} s, {right} right, {scored.failures} failed"
        )


if __name__ == "__main__":
    main()
