"""Writes the tiny model and the data that the debug commands train on (seconds to a minute on two CPU cores).

    python scripts/make_debug_assets.py --output_dir debug_assets

The task is addition of two-digit numbers. The answer is written lowest digit first and always with three digits, so
that each digit depends only on what is already there: "37+48=" -> "580" (37 + 48 = 085, reversed). There are 10,000
prompts, of which 1,000 are held out; the commonest answer ("990", 99) is right for 1% of them.

The model is a Qwen2 of half a million parameters over single characters. Supervised training gives it the form of the
answers and some of the skill, and stops as soon as its greedy answers are right often enough, not after a number of
steps: from there on it has to learn from a reward alone.

Output: model/ (Hugging Face format), train.parquet and test.parquet (verl's schema), settings.json. The same settings
give the same bytes; where settings.json matches, nothing is done.
"""

import argparse
import hashlib
import json
import random
import shutil
import time
from pathlib import Path

SETTINGS = {
    "version": 1,
    "seed": 1,
    "held_out": 1000,
    "hidden_size": 128,
    "num_layers": 2,
    "batch_size": 256,
    "learning_rate": 2e-3,
    "max_steps": 1000,
    "stop_at_rate": 0.30,
}
CHARACTERS = "0123456789+="
SPECIAL_TOKENS = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|unknown|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_digits(number):
    """The answer as the task wants it.

    >>> write_digits(85)
    '580'
    """
    return f"{number:03d}"[::-1]


def make_tokenizer():
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<|unknown|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        unk_token="<|unknown|>",
        additional_special_tokens=["<|system|>", "<|user|>", "<|assistant|>"],
        chat_template=CHAT_TEMPLATE,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def make_model(tokenizer, settings):
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=settings["hidden_size"],
        intermediate_size=4 * settings["hidden_size"],
        num_hidden_layers=settings["num_layers"],
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    return model


def greedy_rate(model, prompts, answers):
    """The share of prompts answered right greedily; (n, prompt_length) ids, (n, answer_length) ids with <|end|>."""
    import torch

    with torch.no_grad():
        # Greedy decoding gives the answer exactly where each of its tokens is the likeliest after those before it.
        logits = model(torch.cat([prompts, answers], dim=1)).logits[:, prompts.shape[1] - 1 : -1]
    return (logits.argmax(-1) == answers).all(1).float().mean().item()


def train(model, tokenizer, pairs, settings):
    """Supervised training on right answers, until the greedy rate reaches stop_at_rate; returns (steps, greedy rate)."""
    import torch

    rng = random.Random(settings["seed"])

    def encode(some_pairs):
        texts = [f"<|user|>{a:02d}+{b:02d}=<|assistant|>" for a, b in some_pairs]
        answers = [write_digits(a + b) + "<|end|>" for a, b in some_pairs]
        return torch.tensor(tokenizer(texts)["input_ids"]), torch.tensor(tokenizer(answers)["input_ids"])

    probe = encode(rng.sample(pairs, 500))
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
    for step in range(1, settings["max_steps"] + 1):
        prompts, answers = encode(rng.sample(pairs, settings["batch_size"]))
        logits = model(torch.cat([prompts, answers[:, :-1]], dim=1)).logits[:, prompts.shape[1] - 1 :]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), answers.flatten())
        for group in optimizer.param_groups:
            group["lr"] = settings["learning_rate"] * min(1.0, step / 50)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 5 == 0:
            rate = greedy_rate(model, *probe)
            if step % 25 == 0:
                print(f"  step {step}: loss {loss.item():.2f}, {rate:.0%} right", flush=True)
            if rate >= settings["stop_at_rate"]:
                return step, rate
    raise SystemExit(
        f"make_debug_assets: only {rate:.0%} right after {step} steps, short of {settings['stop_at_rate']}"
    )


def write_rows(path, pairs, split):
    """Writes prompts in verl's parquet schema; see the README's section on data."""
    from datasets import Dataset

    rows = [
        {
            "data_source": "debug/addition",
            "prompt": [{"role": "user", "content": f"{a:02d}+{b:02d}="}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": write_digits(a + b)},
            "extra_info": {"split": split, "index": i},
        }
        for i, (a, b) in enumerate(pairs)
    ]
    Dataset.from_list(rows).to_parquet(str(path))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=Path("debug_assets"))
    for name, value in SETTINGS.items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    args = parser.parse_args()
    settings = {name: getattr(args, name) for name in SETTINGS}
    # The script itself is one of the settings: an edit rebuilds the assets.
    stamp = json.dumps({**settings, "script": hashlib.sha256(Path(__file__).read_bytes()).hexdigest()}, indent=2)
    settings_path = args.output_dir / "settings.json"
    if settings_path.is_file() and settings_path.read_text() == stamp:
        print(f"Debug model and data: {args.output_dir} is up to date")
        return

    import datasets
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    start = time.time()
    print(f"Debug model and data: making {args.output_dir}, half a minute ...", flush=True)
    datasets.disable_progress_bars()
    torch.set_num_threads(1)  # the same bits whatever the number of cores; two threads are no faster at this size
    torch.manual_seed(settings["seed"])
    pairs = [(a, b) for a in range(100) for b in range(100)]
    random.Random(settings["seed"]).shuffle(pairs)
    test_pairs, train_pairs = pairs[: settings["held_out"]], pairs[settings["held_out"] :]
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, settings)
    steps, rate = train(model, tokenizer, train_pairs, settings)

    shutil.rmtree(args.output_dir, ignore_errors=True)
    args.output_dir.mkdir(parents=True)
    model.save_pretrained(args.output_dir / "model")
    tokenizer.save_pretrained(args.output_dir / "model")
    write_rows(args.output_dir / "train.parquet", train_pairs, "train")
    write_rows(args.output_dir / "test.parquet", test_pairs, "test")
    settings_path.write_text(stamp)  # last: a folder without it is made again
    print(
        f"  {model.num_parameters():,} parameters, {rate:.0%} right after {steps} steps; "
        f"{len(train_pairs)} training and {len(test_pairs)} held-out prompts; {time.time() - start:.0f} s"
    )


if __name__ == "__main__":
    main()
