"""Convert GSM8K, word problems whose answer is a number, to prompts in verl's parquet schema.

    # from the hub to ~/data/gsm8k
    python scripts/data_preprocess/gsm8k.py
    python scripts/data_preprocess/gsm8k.py \\
        --local_dataset_path gsm8k_train.jsonl --local_save_dir data/gsm8k

It writes a file for each split (train.parquet, test.parquet). The ground truth is the number after
"####".
"""

import re

from common import main, options, text_of, verl_row

HUB = ("openai/gsm8k", "main")  # name and configuration
INSTRUCTION = 'Think step by step, and write the final answer after "####".'


def final_number(answer: str) -> str:
    """Return the number after the last "####" without thousands commas, or raise ValueError.

    >>> final_number("He has 2 * 600 = <<2*600=1200>>1,200 coins. #### 1,200")
    '1200'
    """
    number = answer.rpartition("####")[2].strip().replace(",", "")
    if "####" not in answer or not re.fullmatch(r"-?\d*\.?\d+", number):
        raise ValueError("no number after ####")
    return number


def convert(row: dict, split: str, index: int) -> dict:
    """Return a row of verl's schema. Raise ValueError with the reason to drop it."""
    question = text_of(row, "question")
    answer = text_of(row, "answer")
    texts = {"question": question, "answer": answer}
    prompt, truth = f"{question} {INSTRUCTION}", final_number(answer)
    return verl_row(HUB[0], prompt, "math", truth, split=split, index=index, **texts)


if __name__ == "__main__":
    main(options(__doc__, "~/data/gsm8k").parse_args(), HUB, convert)
