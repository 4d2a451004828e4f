"""Convert texts to write backwards, prime-rl's smallest task, to verl's parquet schema.

    # from the hub to ~/data/reverse_text
    python scripts/data_preprocess/reverse_text.py

It writes a file for each split. The reward is scripts/rewards/yardsticks.py:reverse_text.
"""

from common import main, options, text_of, verl_row

HUB = ("PrimeIntellect/Reverse-Text-RL",)
SYSTEM = "Reverse the text character-by-character. Put your answer in <reversed_text> tags."


def convert(row: dict, split: str, index: int) -> dict:
    """Return a row of verl's schema. Raise ValueError with the reason to drop it."""
    text = text_of(row, "prompt")
    prompt = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]
    return verl_row(HUB[0], prompt, "text", text[::-1], split=split, index=index)


if __name__ == "__main__":
    main(options(__doc__, "~/data/reverse_text").parse_args(), HUB, convert)
