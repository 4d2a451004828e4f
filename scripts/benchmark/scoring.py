"""How long verifiable rewards take: responses through grade_responses, as in a run.

1,000 responses of GSM8K (in the script's process) and of MATH (in two workers); and 512 of a reward
that takes 0.2 s on one response of ten, beside one that takes no time.

    python scripts/benchmark/scoring.py
"""

import math
import queue
import random
import sys
import tempfile
import time
from pathlib import Path

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


SLOW = """import time

def slow(data_source, response, ground_truth, extra_info):
    if response.startswith("slow"):
        time.sleep(0.2)
    return 1.0
"""


def measure(script, source, reward_fn, truths, texts, num_workers):
    """The seconds that it takes to grade the texts, and the graded Responses."""
    # Token ids are the characters of a text here
    parts = {"decode": staticmethod("".join), "added_tokens_decoder": {}}
    tokenizer = type("Characters", (), parts | {"bos_token_id": None, "pad_token_id": None})()
    args = script.Args(reward_fn=reward_fn, reward_workers=num_workers)
    responses = []
    for truth, text in zip(truths, texts, strict=True):
        prompt = script.Prompt("", "", [], source, truth, None)
        responses.append(script.Response(prompt, text, [], stopped=True))
    workers = queue.Queue()
    for _ in range(num_workers if reward_fn else 0):
        workers.put(script.start_reward_worker(reward_fn))
    try:
        # The first call of each worker imports what the reward imports
        script.grade_responses(responses[:10], tokenizer, workers, args)
        start = time.perf_counter()
        graded = script.grade_responses(responses, tokenizer, workers, args)
        return time.perf_counter() - start, graded
    finally:
        script.end_children()
        script.process_groups.clear()


def main():
    sys.path.insert(0, str(REPO))
    import ppo_sync as script

    rng = random.Random(1)
    for source, reward_fn in (("gsm8k", None), ("math", f"{GRADERS}:compute_score")):
        truths, texts = zip(*(make(source, rng) for _ in range(1000)), strict=True)
        seconds, graded = measure(script, source, reward_fn, truths, texts, num_workers=2)
        right = sum(response.verifiable or 0.0 for response in graded)
        failed = sum(response.failure is not None for response in graded)
        print(f"{source}: 1,000 responses in {seconds:.2f} s, {right:.0f} right, {failed} failed")

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "slow.py"
        path.write_text(SLOW, "utf-8")
        for num_workers in (2, 8):
            texts = ["fast"] * 512
            fast, _ = measure(script, "any", f"{path}:slow", texts, texts, num_workers)
            slow_texts = [text if i % 10 else "slow" for i, text in enumerate(texts)]
            slow, _ = measure(script, "any", f"{path}:slow", texts, slow_texts, num_workers)
            least = math.ceil(slow_texts.count("slow") / num_workers) * 0.2
            print(
                f"{num_workers} workers, 512 responses: {fast:.2f} s; {slow:.2f} s where one of "
                f"ten takes 0.2 s, of which {least:.1f} s cannot be less"
            )


if __name__ == "__main__":
    main()
