"""Convert HellaSwag, the choice of a text's ending, to prompts in verl's parquet schema.

    # from the hub to ~/data/hellaswag
    python scripts/data_preprocess/hellaswag.py
    python scripts/data_preprocess/hellaswag.py \\
        --local_dataset_path val.jsonl --local_save_dir data/hellaswag

It writes a file for each split (train.parquet, validation.parquet). The ground truth is the index
of the correct ending, from 0. The Hub's test split has no labels, so all of its rows are dropped.
"""

import re

from common import main, options, text_of, verl_row

HUB = ("Rowan/hellaswag",)
INSTRUCTION = (
    'Which ending continues the text best? Think step by step, and write its number after "####".'
)


def clean(text: str) -> str:
    """Remove the marks of WikiHow's headings and steps from a text.

    >>> clean("[header] How to can pears [title] Wash the jars. [step] Use  hot water.")
    'How to can pears. Wash the jars. Use hot water.'
    """
    text = re.sub(r"(?<=[^\s.:?!])\s+\[title\]", ".", text)
    return " ".join(re.sub(r"\[(header|title|step|substeps)\]", " ", text).split())


def convert(row: dict, split: str, index: int) -> dict:
    """Return a row of verl's schema. Raise ValueError with the reason to drop it."""
    label, endings = str(row["label"]), row["endings"]
    if label in ("None", "", "-1"):
        raise ValueError("no label")
    if not isinstance(endings, list):
        raise ValueError("no text in `endings`")
    choices = [clean(text_of({"endings": ending}, "endings")) for ending in endings]
    if not all(choices):
        raise ValueError("no text in `endings`")
    if label not in map(str, range(len(endings))):
        raise ValueError("`label` is not the index of an ending")
    activity = text_of(row, "activity_label")
    text = clean(f"{activity}: {text_of(row, 'ctx')}")
    listed = "\n".join(f"({number}) {choice}" for number, choice in enumerate(choices))
    prompt = f"{text}\n\n{listed}\n\n{INSTRUCTION}"
    return verl_row(HUB[0], prompt, "nlp", label, split=split, index=index)


if __name__ == "__main__":
    main(options(__doc__, "~/data/hellaswag").parse_args(), HUB, convert)
