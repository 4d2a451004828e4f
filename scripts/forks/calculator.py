"""A task for the fork multiturn: products that a tiny model cannot compute, and a calculator.

    python scripts/forks/calculator.py --output_dir debug_assets_calculator

makes model and data, in a minute or two on a CPU core. scripts/train/debug/multiturn.sh trains.

"38*947" is to be answered "35986". The model may press the calculator's key instead, "38*947=",
and is shown what to answer. It starts from demonstrations, of which most are guesses, and a few
press the key and copy what is shown. What it has to learn from a 0/1 reward is that the key pays.

The model is a Qwen2 of 0.1 M parameters over characters, as in scripts/dev/make_debug_assets.py,
with one more token. The same settings give the same bytes; where settings.json matches, nothing is
done.
"""

import argparse
import hashlib
import json
import random
import re
import shutil
import sys
import time
from pathlib import Path

DEV = Path(__file__).resolve().parent.parent / "dev"
SETTINGS = {
    "seed": 1,
    "held_out": 500,
    "training": 20_000,
    "hidden_size": 64,
    "num_layers": 2,
    "batch_size": 256,
    "learning_rate": 3e-3,
    "max_steps": 1000,
    "right_if_asked": 0.8,  # how often the calculator has to be used well, at first
    "asks": 0.1,  # share of the demonstrations that press the key, in the steps after that
    "guessing_steps": 100,
}


def step(text, ground_truth, turn):
    """The environment: what the calculator shows after its key was pressed; 0 for nonsense.

    >>> step("38*947=", None, 0), step("3**=", None, 0), step("35986", None, 0)
    ('35986', '0', None)
    """
    if not text.endswith("="):
        return None
    factors = re.fullmatch(r"(\d+)\*(\d+)=", text)
    return str(int(factors[1]) * int(factors[2])) if factors else "0"


def score(data_source, response, ground_truth, extra_info):
    """The reward: whether the last turn is the product. A metric: whether the key was pressed."""
    return {"score": float(response == ground_truth), "asked": len(extra_info["turns"]) > 1}


def demonstrate(question, asks, rng):
    """What the policy writes and reads after a question, alternately.

    A guess has the right length and the right first digit.
    """
    right = step(f"{question}=", None, 0)
    if asks:
        return [f"{question}=<|end|>", f"<|user|>{right}<|assistant|>", f"{right}<|end|>"]
    return [right[0] + "".join(rng.choices("0123456789", k=len(right) - 1)) + "<|end|>"]


def encode(tokenizer, conversations):
    """Token ids of conversations, (question, demonstration), and labels, -100 where it reads.

    Both are (conversations, length).
    """
    import torch

    rows = []
    for question, texts in conversations:
        parts = tokenizer([f"<|user|>{question}<|assistant|>", *texts])["input_ids"]
        rows.append([(token, i % 2 == 1) for i, part in enumerate(parts) for token in part])
    length = max(map(len, rows))
    padding = [(tokenizer.pad_token_id, False)]
    rows = torch.tensor([row + padding * (length - len(row)) for row in rows])
    ids, is_written = rows.unbind(-1)
    return ids, ids.masked_fill(is_written == 0, -100)


def train(model, tokenizer, questions, settings):
    """Supervised training on demonstrations: of the calculator alone, then mostly of guesses.

    The first part ends where so many conversations would be sampled as they are. Returns its steps.
    """
    import torch

    rng = random.Random(settings["seed"])
    probe = [(each, demonstrate(each, True, rng)) for each in rng.sample(questions, 256)]
    probe_ids, probe_labels = encode(tokenizer, probe)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)

    def update(number, asks):
        batch = [
            (question, demonstrate(question, rng.random() < asks, rng))
            for question in rng.sample(questions, settings["batch_size"])
        ]
        ids, labels = encode(tokenizer, batch)
        for group in optimizer.param_groups:
            group["lr"] = settings["learning_rate"] * min(1.0, number / 50)
        optimizer.zero_grad()
        model(ids, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    for number in range(1, settings["max_steps"] + 1):
        update(number, asks=1.0)
        if number % 20 == 0:
            with torch.no_grad():
                logprobs = model(probe_ids).logits[:, :-1].log_softmax(-1)
            labels = probe_labels[:, 1:]
            logprobs = logprobs.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
            right = (logprobs * (labels >= 0)).sum(1).exp().mean().item()
            print(
                f"  step {number}: it uses the calculator well {right:.0%} of the time", flush=True
            )
            if right >= settings["right_if_asked"]:
                break
    else:
        raise SystemExit(f"calculator.py: {right:.0%}, less than asked for")
    for later in range(settings["guessing_steps"]):
        update(number + later, asks=settings["asks"])
    return number


def write_rows(path, questions):
    """Prompts in verl's schema."""
    from datasets import Dataset

    rows = [
        {
            "data_source": "debug/products",
            "prompt": [{"role": "user", "content": question}],
            "reward_model": {"style": "rule", "ground_truth": step(f"{question}=", None, 0)},
        }
        for question in questions
    ]
    Dataset.from_list(rows).to_parquet(str(path))


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output_dir", type=Path, default=Path("debug_assets_calculator"))
    folder = parser.parse_args().output_dir
    script = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    stamp = json.dumps({**SETTINGS, "script": script}, indent=2)
    settings_path = folder / "settings.json"
    if settings_path.is_file() and settings_path.read_text() == stamp:
        print(f"Calculator's model and data: {folder} is up to date")
        return

    import datasets
    import torch
    import transformers

    sys.path.insert(0, str(DEV))
    from make_debug_assets import make_model, make_tokenizer

    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    start = time.time()
    print(f"Calculator's model and data: making {folder}, a minute or two ...", flush=True)
    torch.set_num_threads(1)  # the same bits whatever the number of cores
    torch.manual_seed(SETTINGS["seed"])
    rng = random.Random(SETTINGS["seed"])
    pairs = rng.sample(range(900 * 900), SETTINGS["held_out"] + SETTINGS["training"])
    questions = [f"{100 + pair // 900}*{100 + pair % 900}" for pair in pairs]
    held_out, questions = questions[: SETTINGS["held_out"]], questions[SETTINGS["held_out"] :]
    tokenizer = make_tokenizer()
    tokenizer.add_tokens("*")
    model = make_model(tokenizer, SETTINGS)
    steps = train(model, tokenizer, questions, SETTINGS)

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    write_rows(folder / "train.parquet", questions)
    write_rows(folder / "test.parquet", held_out)
    settings_path.write_text(stamp)  # last: a folder without it is made again
    print(f"  {model.num_parameters():,} parameters, {steps} steps, {time.time() - start:.0f} s")


if __name__ == "__main__":
    main()
