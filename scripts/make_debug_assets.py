"""Writes the tiny model and the data that the debug commands train on (seconds to a minute on two CPU cores).

    python scripts/make_debug_assets.py --output_dir debug_assets

The task is to sort five digits: "53812=" -> "12358". There are 100,000 prompts, of which 1,000 are held out and 20,000
are for training; no answer is right for more than 0.12% of them. A wrong digit can be seen as soon as it is written, so a
value model has something to learn as well.

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
    "training": 20000,
    "hidden_size": 128,
    "num_layers": 2,
    "batch_size": 256,
    "learning_rate": 1e-3,
    "max_steps": 1000,
    "stop_at_rate": 0.35,
}
CHARACTERS = "0123456789="
SPECIAL_TOKENS = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|unknown|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def sort_digits(digits):
    """The answer that the task wants.

    >>> sort_digits("53812")
    '12358'
    """
    return "".join(sorted(digits))


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


def train(model, tokenizer, prompts, settings):
    """Supervised training on right answers, until the greedy rate reaches stop_at_rate; returns (steps, greedy rate)."""
    import torch

    rng = random.Random(settings["seed"])

    def encode(chosen):
        texts = [f"<|user|>{digits}=<|assistant|>" for digits in chosen]
        answers = [sort_digits(digits) + "<|end|>" for digits in chosen]
        return torch.tensor(tokenizer(texts)["input_ids"]), torch.tensor(tokenizer(answers)["input_ids"])

    probe = encode(rng.sample(prompts, 500))
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
    for step in range(1, settings["max_steps"] + 1):
        ids, answers = encode(rng.sample(prompts, settings["batch_size"]))
        logits = model(torch.cat([ids, answers[:, :-1]], dim=1)).logits[:, ids.shape[1] - 1 :]
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


def write_rows(path, prompts, split):
    """Writes prompts in verl's parquet schema; see the README's section on data."""
    from datasets import Dataset

    rows = [
        {
            "data_source": "debug/sorting",
            "prompt": [{"role": "user", "content": f"{digits}="}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": sort_digits(digits)},
            "extra_info": {"split": split, "index": i},
        }
        for i, digits in enumerate(prompts)
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
    print(f"Debug model and data: making {args.output_dir}, some seconds ...", flush=True)
    datasets.disable_progress_bars()
    torch.set_num_threads(1)  # the same bits whatever the number of cores; two threads are no faster at this size
    torch.manual_seed(settings["seed"])
    prompts = [f"{number:05d}" for number in range(100_000)]
    random.Random(settings["seed"]).shuffle(prompts)
    test_prompts = prompts[: settings["held_out"]]
    train_prompts = prompts[settings["held_out"] :][: settings["training"]]
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, settings)
    steps, rate = train(model, tokenizer, train_prompts, settings)

    shutil.rmtree(args.output_dir, ignore_errors=True)
    args.output_dir.mkdir(parents=True)
    model.save_pretrained(args.output_dir / "model")
    tokenizer.save_pretrained(args.output_dir / "model")
    write_rows(args.output_dir / "train.parquet", train_prompts, "train")
    write_rows(args.output_dir / "test.parquet", test_prompts, "test")
    settings_path.write_text(stamp)  # last: a folder without it is made again
    print(
        f"  {model.num_parameters():,} parameters, {rate:.0%} right after {steps} steps; "
        f"{len(train_prompts)} training and {len(test_prompts)} held-out prompts; {time.time() - start:.0f} s"
    )


if __name__ == "__main__":
    main()
