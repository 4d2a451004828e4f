"""Convert MATH, competition problems, to prompts in verl's parquet schema.

    # from the hub to ~/data/math
    python scripts/data_preprocess/math_dataset.py
    python scripts/data_preprocess/math_dataset.py \\
        --local_dataset_path math_train.jsonl --local_save_dir data/math

It writes a file for each split (train.parquet, test.parquet). The ground truth is the content of
the solution's last \\boxed{}.
"""

import re

from common import main, options, text_of, verl_row

HUB = ("DigitalLearningGmbH/MATH-lighteval",)
INSTRUCTION = r"Think step by step, and put the final answer in \boxed{}."


def last_boxed(solution: str) -> str:
    """Return the content of the last \\boxed{}, including nested braces.

    Raise ValueError if there is none, or if it is empty.

    >>> last_boxed(r"So $x = \\boxed{3}$, and the answer is $\\boxed{\\frac{1}{2}}$.")
    '\\\\frac{1}{2}'
    """
    _, *boxes = re.split(r"\\boxed\s*\{", solution)
    if not boxes:
        raise ValueError(r"no \boxed{}")
    text, depth = boxes[-1], 1
    for brace in re.finditer(r"\\.|[{}]", text, re.DOTALL):  # \{ and \} are characters, not braces
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if depth == 0:
            if answer := text[: brace.start()].strip():
                return answer
            break
    raise ValueError(r"\boxed{} is empty or not closed")


def convert(row: dict, split: str, index: int) -> dict:
    """Return a row of verl's schema. Raise ValueError with the reason to drop it."""
    problem = text_of(row, "problem")
    truth = last_boxed(text_of(row, "solution"))
    prompt = f"{problem} {INSTRUCTION}"
    return verl_row(HUB[0], prompt, "math", truth, split=split, index=index)


if __name__ == "__main__":
    main(options(__doc__, "~/data/math").parse_args(), HUB, convert)
