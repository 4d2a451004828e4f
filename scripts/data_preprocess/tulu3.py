"""Convert Tulu 3's last stage (GSM8K, MATH, constraints) to prompts in verl's parquet schema.

    # from the hub to ~/data/tulu3
    python scripts/data_preprocess/tulu3.py
    python scripts/data_preprocess/tulu3.py --local_dataset_path train.jsonl \\
        --local_save_dir data/tulu3

It writes train.parquet and test.parquet. The dataset has one split, of which every 60th row is held
out. The reward is scripts/rewards/graders.py:compute_score.
"""

from common import main, options, text_of, verl_row

HUB = ("allenai/RLVR-GSM-MATH-IF-Mixed-Constraints",)
HELD_OUT = 60  # one row in this many


def hold_out(splits: dict[str, list]) -> dict[str, list]:
    """Split the rows of all splits into train and test.

    >>> {split: len(rows) for split, rows in hold_out({"train": list(range(120))}).items()}
    {'train': 118, 'test': 2}
    """
    rows = [row for rows_of_split in splits.values() for row in rows_of_split]
    train = [row for index, row in enumerate(rows) if index % HELD_OUT]
    return {"train": train, "test": rows[::HELD_OUT]}


def convert(row: dict, split: str, index: int) -> dict:
    """Return a row of verl's schema. Raise ValueError with the reason to drop it."""
    messages = row["messages"]
    if not messages or messages[-1]["role"] != "user":
        raise ValueError("the last message is not the user's")
    source, truth = text_of(row, "dataset"), text_of(row, "ground_truth")
    prompt = [{name: message[name] for name in ("role", "content")} for message in messages]
    ability = "instruction_following" if source == "ifeval" else "math"
    return verl_row(source, prompt, ability, truth, split=split, index=index)


if __name__ == "__main__":
    main(options(__doc__, "~/data/tulu3").parse_args(), HUB, convert, hold_out)
