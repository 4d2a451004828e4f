"""A task for the fork multiturn: products that a tiny model cannot compute, and a calculator.

    python scripts/forks/calculator.py --output_dir debug_assets_calculator

makes model and data, in half a minute on a CPU core. scripts/train/debug/multiturn.sh trains.

"38*947" is to be answered "35986". The model may ask the calculator instead, "=38*947", and is
shown what to answer. It starts from demonstrations: first of how one asks and copies, then of many
who guess and a few who ask. What it has to learn from a 0/1 reward is that asking pays.

The model is a Qwen2 of 0.1 M parameters over characters, as in
scripts/train/debug/make_debug_assets.py, with one more token. The same settings give the same
bytes; where settings.json matches, nothing is done.
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
    "used_well": 0.8,  # share of the conversations with the calculator that it would sample
    "later_kinds": {"guess": 9, "ask": 1, "copy": 5},  # after that
    "later_steps": 60,
}


def step(text, ground_truth, turn):
    """The environment: what the calculator shows to a turn that begins with "="; 0 for nonsense.

    >>> step("=38*947", None, 0), step("=3**", None, 0), step("35986", None, 0)
    ('35986', '0', None)
    """
    if not text.startswith("="):
        return None
    factors = re.fullmatch(r"=(\d+)\*(\d+)", text)
    return str(int(factors[1]) * int(factors[2])) if factors else "0"


def score(data_source, response, ground_truth, extra_info):
    """The reward: whether the last turn is the product. A metric: whether it was asked for."""
    return {"score": float(response == ground_truth), "asked": len(extra_info["turns"]) > 1}


def demonstrate(question, kind, rng):
    """What is read and what is written of a conversation, alternately.

    A guess has the right length and the right first digit. What is copied was asked by others.
    """
    right = step(f"={question}", None, 0)
    prompt, shown = (f"<|user|>{text}<|assistant|>" for text in (question, right))
    ask, answer = f"={question}<|end|>", f"{right}<|end|>"
    if kind == "ask":
        return [prompt, ask, shown, answer]
    if kind == "copy":
        return [prompt + ask + shown, answer]
    return [prompt, right[0] + "".join(rng.choices("0123456789", k=len(right) - 1)) + "<|end|>"]


def encode(tokenizer, conversations):
    """Token ids of demonstrations, and labels, -100 where it reads: (conversations, length)."""
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
    """Supervised training: with the calculator until it is used well, then mostly on guesses."""
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
        """Of the probe's demonstrations, on average."""
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
        raise SystemExit(f"calculator.py: used well {probability():.0%} of the time, too little")
    print(f"  step {number}: uses the calculator well {probability():.0%} of the time", flush=True)
    for later in range(1, settings["later_steps"] + 1):
        update(number + later, settings["later_kinds"])
    print(f"  step {number + later}: asks and answers right {probability():.1%} of the time")


def write_rows(path, questions):
    """Prompts in verl's schema."""
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
    print(f"Calculator's model and data: making {folder}, a minute ...", flush=True)
    torch.set_num_threads(1)  # the same bits whatever the number of cores
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
    settings_path.write_text(stamp, "utf-8")  # last: a folder without it is made again
    print(f"  {model.num_parameters():,} parameters, {time.time() - start:.0f} s")


if __name__ == "__main__":
    main()
