"""Convert a dataset of TRL's form, a `prompt` and columns for rewards, to the scripts' columns.

    python scripts/data_preprocess/trl.py \\
        --dataset trl-lib/DeepMath-103K --answer solution --local_save_dir data/deepmath
    python scripts/data_preprocess/trl.py \\
        --local_dataset_path train.jsonl --answer answer --local_save_dir data/mine

It writes a file for each split. All columns are in extra_info, where scripts/rewards/trl_rewards.py
reads them. The answer becomes the ground truth, which the preflight tries as a response. If no
column has one, name any column.
"""

from common import main, options

FOR_THE_TEMPLATE = ("tools", "chat_template_kwargs")


def convert(row: dict, answer: str) -> dict:
    """Return a row in the scripts' columns. Raise ValueError with the reason to drop it.

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
    parser.add_argument("--dataset", help="Name on the Hub, instead of --local_dataset_path.")
    parser.add_argument("--dataset_config", help="Configuration of the dataset, if it has several.")
    parser.add_argument("--answer", required=True, help="Column with the ground truth.")
    args = parser.parse_args()
    if not (args.dataset or args.local_dataset_path):
        parser.error("pass --dataset, a name on the Hub, or --local_dataset_path")
    hub = (args.dataset, args.dataset_config)
    main(args, hub, lambda row, *_: convert(row, args.answer))
