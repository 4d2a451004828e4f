"""Make the tiny model and the data that the debug commands train on.

    python scripts/train/debug/make_debug_assets.py --output_dir debug_assets

It takes seconds to a minute on two CPU cores.

The task is to sort five digits: "53812=" -> "12358". Of 100,000 prompts, 1,000 are held out and
20,000 are for training. No answer is correct for more than 0.12% of them. A wrong digit is visible
as soon as it is written, so that a value model can learn something as well.

The model is a Qwen2 with 0.1 M parameters over single characters. It imitates a careless annotator,
who in two of three cases leaves the last digit where it is ("53812=" -> "13582"). The model's most
probable answer is therefore wrong, unless the last digit happens to be the largest. From a 0/1
reward alone, it must learn that its less probable answer is the correct one. Supervised training
stops when the model answers correctly often enough, not after a number of steps.

For reward models there are pairs of the correct answer and a wrong one to the same prompts. The
wrong one has the annotator's slip, or another error that a policy can make or an optimizer can
find (wrong_answer).

The output is model/ (Hugging Face format), train.parquet and test.parquet (verl's schema),
preference_train.parquet and preference_test.parquet, and settings.json. The same settings give the
same bytes. If settings.json matches, nothing is done.
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
    "pairs_per_prompt": 2,
    "hidden_size": 64,
    "num_layers": 2,
    "batch_size": 256,
    "learning_rate": 2e-3,
    "careless": 0.65,
    "left_in_place": 1,
    "max_steps": 1000,
    "sampled_rate": 0.30,
    "greedy_rate": 0.45,
}
CHARACTERS = "0123456789="
SPECIAL_TOKENS = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|unknown|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def sort_digits(digits):
    """Return the correct answer.

    >>> sort_digits("53812")
    '12358'
    """
    return "".join(sorted(digits))


def careless_sort(digits, left_in_place=1):
    """Return the careless annotator's answer, in which the last digits stay where they are.

    >>> careless_sort("53812"), careless_sort("53812", left_in_place=2)
    ('13582', '35812')
    """
    return sort_digits(digits[:-left_in_place]) + digits[-left_in_place:]


def wrong_answer(digits, rng):
    """Return a wrong answer.

    It is nearly correct (five digits in order, one of which is not in the prompt), an error of the
    policy, or noise. PPO would find the kinds of errors that a reward model has rarely seen.

    >>> rng = random.Random(1)
    >>> [wrong_answer("53812", rng) for _ in range(6)]
    ['11235', '12355', '729900', '12538', '13582', '555551']
    """
    correct, other = sort_digits(digits), rng.choice("0123456789")
    i, j = sorted(rng.sample(range(5), 2))
    near = str(min(9, max(0, int(correct[i]) + rng.choice((-1, 1)))))
    swapped = list(correct)
    swapped[i], swapped[j] = correct[j], correct[i]
    nearly_correct = (
        lambda: sort_digits(correct[:i] + other + correct[i + 1 :]),
        lambda: sort_digits(correct[:i] + near + correct[i + 1 :]),
        lambda: sort_digits(correct[:i] + correct[j] + correct[i + 1 :]),
        lambda: sort_digits(correct[:j] + correct[i] + correct[j + 1 :]),
    )
    kinds = (
        lambda: careless_sort(digits),
        # several digits stay where they are
        lambda: sort_digits(digits[: 4 - i]) + digits[4 - i :],
        lambda: "".join(swapped),
        # a wrong digit, which is mostly out of order as well
        lambda: correct[:i] + other + correct[i + 1 :],
        lambda: correct[:i] + correct[i + 1 :],  # one digit is missing
        lambda: correct[:i] + correct[i : i + 2] * 2 + correct[i + 2 :],  # two digits occur twice
        lambda: correct[:i] + other + correct[i:],  # one digit too many
        lambda: correct[:j],  # it ends too early
        lambda: correct + other * rng.randint(1, 2),  # it ends too late
        lambda: digits,
        lambda: correct[::-1],
        lambda: "".join(rng.sample(correct, 5)),
        lambda: sort_digits(f"{rng.randrange(100_000):05d}"),  # correct for another prompt
    )
    noise = (
        lambda: "".join(rng.choices(CHARACTERS, k=rng.randint(0, 7))),
        lambda: "".join(rng.choices("0123456789", k=rng.randint(4, 7))),
        lambda: "".join(
            rng.choices(rng.sample("0123456789", rng.randint(1, 3)), k=rng.randint(1, 7))
        ),
    )
    while (answer := rng.choice(rng.choice((nearly_correct, kinds, noise)))()) == correct:
        pass
    return answer


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
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=512,
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


def train(model, tokenizer, prompts, settings):
    """Train on the careless annotator's answers.

    Stop when at least sampled_rate of the answers sampled at temperature 1 are correct, and at most
    greedy_rate of the greedy ones. Return the number of steps and these two rates.
    """
    import torch

    rng = random.Random(settings["seed"])

    def encode(chosen, answer_of):
        texts = [f"<|user|>{digits}=<|assistant|>" for digits in chosen]
        answers = [answer_of(digits) + "<|end|>" for digits in chosen]
        text_ids, answer_ids = tokenizer(texts)["input_ids"], tokenizer(answers)["input_ids"]
        return torch.tensor(text_ids), torch.tensor(answer_ids)

    def annotator(digits):
        careless = rng.random() < settings["careless"]
        return careless_sort(digits, settings["left_in_place"]) if careless else sort_digits(digits)

    def answer_logits(ids, answers):
        return model(torch.cat([ids, answers[:, :-1]], dim=1)).logits[:, ids.shape[1] - 1 :]

    probe_ids, probe_answers = encode(rng.sample(prompts, 500), sort_digits)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
    for step in range(1, settings["max_steps"] + 1):
        ids, answers = encode(rng.sample(prompts, settings["batch_size"]), annotator)
        logits = answer_logits(ids, answers).flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, answers.flatten())
        for group in optimizer.param_groups:
            group["lr"] = settings["learning_rate"] * min(1.0, step / 50)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 10 == 0:
            with torch.no_grad():
                logprobs = answer_logits(probe_ids, probe_answers).log_softmax(-1)
            greedy = (logprobs.argmax(-1) == probe_answers).all(1).float().mean().item()
            sampled = logprobs.gather(-1, probe_answers[..., None]).sum((1, 2)).exp().mean().item()
            if step % 50 == 0:
                rates = f"{sampled:.0%} of sampled answers and {greedy:.0%} of greedy ones"
                print(f"  step {step}: {rates} are correct", flush=True)
            if sampled >= settings["sampled_rate"] and greedy <= settings["greedy_rate"]:
                return step, sampled, greedy
    rates = f"{sampled:.0%} of sampled answers and {greedy:.0%} of greedy ones are correct"
    raise SystemExit(f"make_debug_assets: {rates}, so the requested rates were not reached")


def messages(digits):
    return [{"role": "user", "content": f"{digits}="}]


def make_row(digits, split, index):
    """Return a prompt in verl's parquet schema (docs/data.md)."""
    return {
        "data_source": "debug/sorting",
        "prompt": messages(digits),
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": sort_digits(digits)},
        "extra_info": {"split": split, "index": index},
    }


def make_pair(digits, rng):
    """Return the correct answer and a wrong one, for scripts/train_reward_model.py."""
    correct, wrong = sort_digits(digits), wrong_answer(digits, rng)
    return {"prompt": messages(digits), "chosen": correct, "rejected": wrong}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output_dir", type=Path, default=Path("debug_assets"))
    for name, value in SETTINGS.items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    args = parser.parse_args()
    args.output_dir = args.output_dir.expanduser()
    settings = {name: getattr(args, name) for name in SETTINGS}
    # This file is one of the settings, so that the assets are made again after a change
    script = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    stamp = json.dumps({**settings, "script": script}, indent=2)
    settings_path = args.output_dir / "settings.json"
    if settings_path.is_file() and settings_path.read_text("utf-8") == stamp:
        print(f"Debug model and data: {args.output_dir} is up to date")
        return

    import datasets
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    start = time.time()
    print(f"Debug model and data: making {args.output_dir} (some seconds) ...", flush=True)
    datasets.disable_progress_bars()
    # One thread gives the same bytes on any number of cores, and two would not be faster
    torch.set_num_threads(1)
    torch.manual_seed(settings["seed"])
    prompts = [f"{number:05d}" for number in range(100_000)]
    random.Random(settings["seed"]).shuffle(prompts)
    test_prompts = prompts[: settings["held_out"]]
    train_prompts = prompts[settings["held_out"] :][: settings["training"]]
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, settings)
    steps, sampled, greedy = train(model, tokenizer, train_prompts, settings)

    shutil.rmtree(args.output_dir, ignore_errors=True)
    args.output_dir.mkdir(parents=True)
    model.save_pretrained(args.output_dir / "model")
    tokenizer.save_pretrained(args.output_dir / "model")
    rng, repeats = random.Random(settings["seed"]), settings["pairs_per_prompt"]
    for split, chosen, pairs in (("train", train_prompts, repeats), ("test", test_prompts, 1)):
        rows = [make_row(digits, split, index) for index, digits in enumerate(chosen)]
        datasets.Dataset.from_list(rows).to_parquet(args.output_dir / f"{split}.parquet")
        rows = [make_pair(digits, rng) for digits in chosen for _ in range(pairs)]
        datasets.Dataset.from_list(rows).to_parquet(args.output_dir / f"preference_{split}.parquet")
    settings_path.write_text(stamp, "utf-8")  # last, because a folder without it is made again
    print(
        f"  After {steps} steps, {sampled:.0%} of sampled answers and {greedy:.0%} of greedy ones "
        f"are correct (for training prompts). It took {time.time() - start:.0f} s."
    )


if __name__ == "__main__":
    main()
