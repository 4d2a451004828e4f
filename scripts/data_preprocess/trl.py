"""A dataset of TRL's, `prompt` and columns for its rewards, in columns that the scripts read.

    python scripts/data_preprocess/trl.py \\
        --dataset trl-lib/DeepMath-103K --answer solution --local_save_dir data/deepmath
    python scripts/data_preprocess/trl.py \\
        --local_dataset_path train.jsonl --answer answer --local_save_dir data/mine

Writes a file for each split that there is. Every column is in extra_info, from where
scripts/rewards/trl_rewards.py takes it. The answer becomes the ground truth, which the preflight
tries as a response; where no column has one, any column will do.
"""

import os
import sys

# Python puts the script's folder first on its path, and would take the math.py in it for its own.
# So the folder goes before anything imports math, and preprocessing.py is loaded by its own path.
if os.path.realpath(sys.path[0]) == os.path.dirname(os.path.realpath(__file__)):
    sys.path.pop(0)

import importlib.util
from dataclasses import dataclass
from pathlib import Path

import tyro

shared = Path(__file__).resolve().parent.parent / "preprocessing.py"
spec = importlib.util.spec_from_file_location("preprocessing", shared)
preprocessing = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(preprocessing)

FOR_THE_TEMPLATE = ("tools", "chat_template_kwargs")


@dataclass(kw_only=True)
class Args:
    dataset: str | None = None
    """a dataset's name on the hub"""
    dataset_config: str | None = None
    """its configuration there, where it has several"""
    local_dataset_path: str | None = None
    """instead of it, a .jsonl or .parquet file, or a folder with one a split"""
    local_save_dir: str
    """folder for the files that are written"""
    answer: str
    """the column that says what is right, such as solution"""


def convert(row: dict, answer: str) -> dict:
    """A row in the scripts' columns; ValueError says why a row is dropped.

    >>> convert({"prompt": "2 + 2 = ", "solution": "4"}, "solution")["ground_truth"]
    '4'
    """
    for column in ("prompt", answer):
        if row[column] is None:
            raise ValueError(f"nothing in `{column}`")
    converted = {"prompt": row["prompt"], "data_source": "trl", "ground_truth": row[answer]}
    converted |= {name: row[name] for name in FOR_THE_TEMPLATE if name in row}
    return converted | {"extra_info": row}


def main() -> None:
    defaults = Args(local_save_dir=tyro.MISSING, answer=tyro.MISSING)
    args = preprocessing.parse_args(defaults, __doc__)
    if not (args.dataset or args.local_dataset_path):
        preprocessing.bad_input("say --dataset, a name on the hub, or --local_dataset_path")
    shared_args = preprocessing.Args(
        local_dataset_path=args.local_dataset_path, local_save_dir=args.local_save_dir
    )
    hub = (args.dataset, args.dataset_config)
    splits = preprocessing.load_splits(shared_args, hub, ("prompt", args.answer))
    preprocessing.write_splits(shared_args, splits, lambda row, *_: convert(row, args.answer))


if __name__ == "__main__":
    main()
