"""A dataset of TRL's, `prompt` and columns for its rewards, in columns that the scripts read.

    python scripts/data_preprocess/trl.py \\
        --dataset trl-lib/DeepMath-103K --answer solution --local_save_dir data/deepmath
    python scripts/data_preprocess/trl.py \\
        --local_dataset_path train.jsonl --answer answer --local_save_dir data/mine

Writes a file for each split that there is. Every column is in extra_info, from where
scripts/rewards/trl_rewards.py takes it. The answer becomes the ground truth, which the preflight
tries as a response; where no column has one, any column will do.
"""

from common import main, options

FOR_THE_TEMPLATE = ("tools", "chat_template_kwargs")


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


if __name__ == "__main__":
    parser = options(__doc__, "~/data/trl")
    parser.add_argument("--dataset", help="a name on the hub, in place of --local_dataset_path")
    parser.add_argument("--dataset_config", help="its configuration, where it has several")
    parser.add_argument("--answer", required=True, help="the column that says what is right")
    args = parser.parse_args()
    if not (args.dataset or args.local_dataset_path):
        parser.error("say --dataset, a name on the hub, or --local_dataset_path")
    hub = (args.dataset, args.dataset_config)
    main(args, hub, lambda row, *_: convert(row, args.answer))
