"""Convert helpful and harmless dialogues to prompts, preference pairs, or demonstrations.

    # from the hub to ~/data/full_hh_rlhf/rl
    python scripts/data_preprocess/full_hh_rlhf.py --split rl
    python scripts/data_preprocess/full_hh_rlhf.py --split rm \\
        --local_dataset_path train.jsonl --local_save_dir data/rm

Local files can also be those of Anthropic/hh-rlhf, where chosen and rejected are whole dialogues.

It writes a file for each split (train.parquet, test.parquet). Prompts are messages. Its columns:
  rl   those of verl's parquet schema; the ground truth is the chosen response, which a reward model
       does not need
  rm   prompt, chosen, rejected
  sft  prompt, response (the chosen one)
"""

import functools
import re

from common import main, options, text_of, verl_row

HUB = ("Dahoas/full-hh-rlhf",)


def parse_dialogue(text: str) -> list[dict]:
    """Return the messages of a dialogue that ends before the assistant's turn, or raise ValueError.

    >>> parse_dialogue("Human: Hi!\\n\\nAssistant:")
    [{'role': 'user', 'content': 'Hi!'}]
    """
    before, *parts = re.split(r"(?:\A|\n\n)(Human|Assistant):", text)
    speakers, turns = parts[::2], [turn.strip() for turn in parts[1::2]]
    if before or speakers[:1] != ["Human"]:
        raise ValueError("the prompt does not begin with Human:")
    if speakers[-1] != "Assistant" or turns[-1]:
        raise ValueError("the prompt does not end with Assistant:")
    if not all(turns[:-1]):
        raise ValueError("the prompt has an empty turn")
    if speakers != ["Human", "Assistant"] * (len(speakers) // 2):
        # Many chat templates refuse this
        raise ValueError("the prompt has two turns of one speaker in a row")
    roles = {"Human": "user", "Assistant": "assistant"}
    pairs = zip(speakers[:-1], turns[:-1], strict=True)
    return [{"role": roles[one], "content": turn} for one, turn in pairs]


def with_prompt(row: dict) -> dict:
    """Return a row with a prompt. Of two dialogues it is their beginning, which must be the same.

    >>> start = "\\n\\nHuman: Hi!\\n\\nAssistant:"
    >>> with_prompt({"chosen": f"{start} Hello.", "rejected": f"{start} No."})["chosen"]
    ' Hello.'
    """
    if row.get("prompt") is not None:
        return row
    texts = [text_of(row, column) for column in ("chosen", "rejected")]
    (prompt, _, chosen), (other, _, rejected) = (
        text.rpartition("\n\nAssistant:") for text in texts
    )
    if prompt != other:
        raise ValueError("`chosen` and `rejected` have different prompts")
    return {"prompt": f"{prompt}\n\nAssistant:", "chosen": chosen, "rejected": rejected}


def response_of(row: dict, column: str) -> str:
    """Return the response in a column. Raise ValueError if it is missing or has further turns."""
    response = text_of(row, column)
    if re.search(r"\n\n(Human|Assistant):", response):
        raise ValueError(f"further turns in `{column}`")
    return response


def convert(row: dict, split: str, index: int, kind: str) -> dict:
    """Return a row of verl's schema, a pair or a demonstration. Raise ValueError to drop it."""
    row = with_prompt(row)
    prompt, chosen = parse_dialogue(text_of(row, "prompt")), response_of(row, "chosen")
    rejected = text_of(row, "rejected")  # drop a row without one for every kind
    if kind == "sft":
        return {"prompt": prompt, "response": chosen}
    if kind == "rm":
        if chosen == response_of(row, "rejected"):
            raise ValueError("`chosen` and `rejected` are the same")
        return {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    return verl_row(HUB[0], prompt, "alignment", chosen, "model", split=split, index=index)


if __name__ == "__main__":
    parser = options(__doc__, "~/data/full_hh_rlhf/SPLIT")
    parser.add_argument("--split", choices=("rl", "rm", "sft"), required=True, help="See above.")
    args = parser.parse_args()
    args.local_save_dir = args.local_save_dir.replace("SPLIT", args.split)
    main(args, HUB, functools.partial(convert, kind=args.split))
