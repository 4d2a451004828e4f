"""Tasks for failures that the sorting task cannot show. Each function writes its own folder, in
seconds; scripts/benchmark/failures.py calls them, and has made debug_assets/ before."""

import random

import torch
from datasets import Dataset
from make_debug_assets import (
    SETTINGS,
    careless_sort,
    make_model,
    make_tokenizer,
    sort_digits,
    train,
)
from pyarrow import parquet
from transformers import AutoModelForCausalLM

PAIRS = ("01", "23", "45", "67", "89")  # no digit is in two of them


def save(model, tokenizer, folder):
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")


def debug_model():
    return AutoModelForCausalLM.from_pretrained("debug_assets/model", dtype="float32")


def rows_of(split):
    """The sorting task's rows, "train" or "test"; their prompts are as in "53812="."""
    return parquet.read_table(f"debug_assets/{split}.parquet").to_pylist()


def digits_of(row):
    return row["prompt"][0]["content"].removesuffix("=")


def random_model(folder):
    """A random model of 0.5 M parameters. It ends a response after 16 tokens in the mean."""
    tokenizer = make_tokenizer()
    save(make_model(tokenizer, {"hidden_size": 128, "num_layers": 2}), tokenizer, folder)


def system_prompt(folder):
    """Sorting after a system prompt of worked examples, 133 tokens that all prompts begin with.

    vLLM keeps keys and values of whole blocks of tokens, on a CPU of 128.
    """
    rng = random.Random(1)
    tokenizer = make_tokenizer()
    examples = [f"{rng.randrange(100_000):05d}" for _ in range(12)]
    system = "".join(f"{digits}={sort_digits(digits)}" for digits in examples)
    prefix = torch.tensor([tokenizer(f"<|system|>{system}")["input_ids"]])
    model = debug_model()

    class AfterPrefix(torch.nn.Module):
        """The model, of which the prefix is computed once for all rows."""

        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, ids):
            cache = self.model(prefix, use_cache=True).past_key_values
            cache.batch_repeat_interleave(len(ids))
            return self.model(ids, past_key_values=cache)

    digits = [digits_of(row) for row in rows_of("train")]
    train(AfterPrefix(), tokenizer, digits, SETTINGS | {"batch_size": 128})
    save(model, tokenizer, folder)
    for split in ("train", "test"):
        rows = rows_of(split)
        for row in rows:
            row["prompt"].insert(0, {"role": "system", "content": system})
        Dataset.from_list(rows).to_parquet(folder / f"{split}.parquet")


def pair_tokens(folder, split=0.1):
    """Sorting by a model that writes a pair of digits as two tokens with a chance of `split`.

    Its tokenizer writes each of PAIRS as one.
    """
    rng = random.Random(1)
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(list(PAIRS))
    model = debug_model()
    model.resize_token_embeddings(len(tokenizer))

    def tokenize(texts):
        """Token ids, padded to one length: prompts on the left, answers on the right."""
        are_answers = not texts[0].startswith("<|user|>")
        rows = []
        for text in texts:
            row = []
            for token in tokenizer(text)["input_ids"]:
                pair = tokenizer.decode([token])
                if pair in PAIRS and are_answers and rng.random() < split:
                    row += tokenizer.convert_tokens_to_ids(list(pair))
                else:
                    row.append(token)
            rows.append(row)
        tokenizer.padding_side = "right" if are_answers else "left"
        return tokenizer.pad({"input_ids": rows})

    train(model, tokenize, [digits_of(row) for row in rows_of("train")], SETTINGS)
    tokenizer.padding_side = "left"
    save(model, tokenizer, folder)


def chatty_model(folder, stop_rate=0.05, num_steps=60):
    """The debug model, taught to go on with digits after its answer.

    After the answer, and after each digit more, it ends with a probability of stop_rate. Its
    tokenizer pads with the end token, as those of many models do.
    """
    rng = random.Random(1)
    tokenizer, model = make_tokenizer(), debug_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    for _ in range(num_steps):
        prompts, answers = [], []
        for _ in range(128):
            digits = f"{rng.randrange(100_000):05d}"
            answer = careless_sort(digits) if rng.random() < 0.65 else sort_digits(digits)
            while rng.random() > stop_rate and len(answer) < 24:
                answer += rng.choice("0123456789")
            prompts.append(f"<|user|>{digits}=<|assistant|>")
            answers.append(answer + "<|end|>")
        prompt_ids = torch.tensor(tokenizer(prompts)["input_ids"])
        labels = tokenizer(answers, padding=True, padding_side="right", return_tensors="pt")
        labels = labels["input_ids"]
        ids = torch.cat([prompt_ids, labels[:, :-1]], dim=1)
        logits = model(ids).logits[:, prompt_ids.shape[1] - 1 :]
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=tokenizer.pad_token_id
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    tokenizer.pad_token = tokenizer.eos_token
    save(model, tokenizer, folder)


def half_impossible(folder):
    """The sorting task's prompts; of those that begin with 5 to 9 no answer is right."""
    rows = rows_of("train")
    for row in rows:
        if digits_of(row)[0] >= "5":
            row["reward_model"]["ground_truth"] = "not known"
    Dataset.from_list(rows).to_parquet(folder / "train.parquet")
