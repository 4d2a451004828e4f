"""A task for the fork multiturn: products that a tiny model cannot compute, and a calculator.

    python scripts/forks/calculator.py --output_dir debug_assets_calculator

This takes a minute on a CPU core. scripts/train/debug/multiturn.sh then trains the model.

The correct answer to "38*947" is "35986". The model can ask the calculator instead, by "=38*947",
and is shown the product. It was trained on demonstrations of asking and copying, then on many
guesses and a few that ask. From a reward of 0 or 1 it has to learn that asking pays.

The model is the Qwen2 of 0.1 M parameters of make_debug_assets.py, with one more token. The same
settings give the same bytes. If settings.json is up to date, nothing is done.
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

DEBUG = Path(__file__).resolve().parent.parent / "train/debug"
SETTINGS = {
    "seed": 1,
    "held_out": 500,
    "training": 20_000,
    "hidden_size": 64,
    "num_layers": 2,
    "batch_size": 256,
    "learning_rate": 3e-3,
    "max_steps": 1000,
    "used_well": 0.8,  # mean probability of a demonstration of asking that ends the first part
    "later_kinds": {"guess": 9, "ask": 1, "copy": 5},  # frequencies in the second part
    "later_steps": 60,
}


def step(text, ground_truth, turn):
    """Return what the calculator shows after a turn, or None, which ends the conversation.

    >>> step("=38*947", None, 0), step("=3**", None, 0), step("35986", None, 0)
    ('35986', '0', None)
    """
    if not text.startswith("="):
        return None
    factors = re.fullmatch(r"=(\d+)\*(\d+)", text)
    return str(int(factors[1]) * int(factors[2])) if factors else "0"


def score(data_source, response, ground_truth, extra_info):
    """Return the reward, which is 1 for the product as the last turn, and whether it was asked."""
    return {"score": float(response == ground_truth), "asked": len(extra_info["turns"]) > 1}


def demonstrate(question, kind, rng):
    """Return the texts of a conversation, which the model reads and writes in turns.

    A guess has the correct length and first digit. To learn to copy, the model reads the question.
    """
    product = step(f"={question}", None, 0)
    prompt, shown = (f"<|user|>{text}<|assistant|>" for text in (question, product))
    ask, answer = f"={question}<|end|>", f"{product}<|end|>"
    if kind == "ask":
        return [prompt, ask, shown, answer]
    if kind == "copy":
        return [prompt + ask + shown, answer]
    digits = rng.choices("0123456789", k=len(product) - 1)
    return [prompt, product[0] + "".join(digits) + "<|end|>"]


def encode(tokenizer, conversations):
    """Return token ids, and labels with -100 for what is read: (conversations, length)."""
    import torch

    rows = []
    for texts in conversations:
        parts = tokenizer(texts)["input_ids"]
        rows.append([(token, i % 2 == 1) for i, part in enumerate(parts) for token in part])
    length = max(map(len, rows))
    padding = [(tokenizer.pad_token_id, False)]
    rows = torch.tensor([row + padding * (length - len(row)) for row in rows])
    ids, is_written = rows.unbind(-1)
    return ids, ids.masked_fill(is_written == 0, -100)


def train(model, tokenizer, questions, settings):
    """Train on demonstrations: of asking until the model asks well, then mostly of guesses."""
    import torch

    rng = random.Random(settings["seed"])
    probe = [demonstrate(question, "ask", rng) for question in rng.sample(questions, 256)]
    probe_ids, probe_labels = encode(tokenizer, probe)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)

    def update(number, kinds):
        kinds = rng.choices([*kinds], kinds.values(), k=settings["batch_size"])
        chosen = rng.sample(questions, settings["batch_size"])
        batch = [demonstrate(*pair, rng) for pair in zip(chosen, kinds, strict=True)]
        ids, labels = encode(tokenizer, batch)
        for group in optimizer.param_groups:
            group["lr"] = settings["learning_rate"] * min(1.0, number / 50)
        optimizer.zero_grad()
        model(ids, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    def probability():
        """Return the mean probability of the demonstrations in the probe."""
        with torch.no_grad():
            logprobs = model(probe_ids).logits[:, :-1].log_softmax(-1)
        labels = probe_labels[:, 1:]
        logprobs = logprobs.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        return (logprobs * (labels >= 0)).sum(1).exp().mean().item()

    for number in range(1, settings["max_steps"] + 1):
        update(number, {"ask": 1})
        if number % 10 == 0 and probability() >= settings["used_well"]:
            break
    else:
        raise SystemExit(
            f"calculator.py: only {probability():.0%} of the demonstrations are learned"
        )
    print(f"  step {number}: uses the calculator well {probability():.0%} of the time", flush=True)
    for later in range(1, settings["later_steps"] + 1):
        update(number + later, settings["later_kinds"])
    print(f"  step {number + later}: asks and answers correctly {probability():.1%} of the time")


def write_rows(path, questions):
    """Write prompts in verl's schema."""
    from datasets import Dataset

    rows = [
        {
            "data_source": "debug/products",
            "prompt": [{"role": "user", "content": question}],
            "reward_model": {"style": "rule", "ground_truth": step(f"={question}", None, 0)},
        }
        for question in questions
    ]
    Dataset.from_list(rows).to_parquet(str(path))


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output_dir", type=Path, default=Path("debug_assets_calculator"))
    folder = parser.parse_args().output_dir.expanduser()
    script = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    stamp = json.dumps({**SETTINGS, "script": script}, indent=2)
    settings_path = folder / "settings.json"
    if settings_path.is_file() and settings_path.read_text("utf-8") == stamp:
        print(f"Calculator's model and data: {folder} is up to date")
        return

    import datasets
    import torch
    import transformers

    sys.path.insert(0, str(DEBUG))
    from make_debug_assets import make_model, make_tokenizer

    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    start = time.time()
    print(f"Calculator's model and data: making {folder}, which takes a minute ...", flush=True)
    torch.set_num_threads(1)  # so that the bits do not depend on the number of cores
    torch.manual_seed(SETTINGS["seed"])
    rng = random.Random(SETTINGS["seed"])
    pairs = rng.sample(range(900 * 900), SETTINGS["held_out"] + SETTINGS["training"])
    questions = [f"{100 + pair // 900}*{100 + pair % 900}" for pair in pairs]
    held_out, questions = questions[: SETTINGS["held_out"]], questions[SETTINGS["held_out"] :]
    tokenizer = make_tokenizer()
    tokenizer.add_tokens("*")
    model = make_model(tokenizer, SETTINGS)
    train(model, tokenizer, questions, SETTINGS)

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    write_rows(folder / "train.parquet", questions)
    write_rows(folder / "test.parquet", held_out)
    settings_path.write_text(stamp, "utf-8")  # comes last, so that a part of a folder is made again
    print(f"  {model.num_parameters():,} parameters, {time.time() - start:.0f} s")


if __name__ == "__main__":
    main()
