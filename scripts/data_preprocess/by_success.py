"""Keep the prompts that a model answers correctly in a fraction from --least to --most of tries.

    python scripts/evaluate.py output/RUN --model MODEL --samples 40 \\
        --dataset data/math/train.parquet --prompts 0
    python scripts/data_preprocess/by_success.py output/RUN/evaluations/NAME \\
        --dataset data/math/train.parquet --local_save_dir data/sanity

RUN is any run of a model with this tokenizer, and NAME is the folder that evaluate.py has written.
The sanity test of 2510.26788 keeps prompts to which 20 to 80% of 40 answers are correct.
"""

import argparse
import sys
from collections import defaultdict
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from common import write_splits
from internal.run_files import is_right, read_lines
from pyarrow import parquet


def keep(rows: list[dict], answers: list[dict], least: float, most: float) -> list[dict]:
    """Return the rows with a success rate in these limits, by row numbers in evaluate.py's answers.

    >>> answer = {"origin": "data/train.parquet, row 2", "reward_metrics": {}}
    >>> answers = [answer | {"verifiable_score": score} for score in (1.0, 0.0, 0.0, 0.0, 0.0)]
    >>> answers += [answers[0] | {"origin": "data/train.parquet, row 0"}]
    >>> keep(["zero", "one", "two"], answers, least=0.2, most=0.2)  # both are included
    ['two']
    """
    groups = defaultdict(list)
    for answer in answers:
        number = int(answer["origin"].rpartition(", row ")[2])
        groups[number].append(bool(is_right(answer)))
    rates = {number: sum(correct) / len(correct) for number, correct in groups.items()}
    return [rows[number] for number in sorted(rates) if least <= rates[number] <= most]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("evaluation", type=Path, help="Folder that evaluate.py has written.")
    add("--dataset", type=Path, required=True, help="The .parquet file that was evaluated.")
    add("--local_save_dir", type=Path, required=True, help="Folder for train.parquet.")
    add("--least", type=float, default=0.2, help="Smallest fraction of correct answers (0.2).")
    add("--most", type=float, default=0.8, help="Largest fraction of correct answers (0.8).")
    args = parser.parse_args()
    answers = read_lines(args.evaluation / "responses.jsonl")
    names = {Path(answer.get("origin", "?").rpartition(", row ")[0]).name for answer in answers}
    if names != {args.dataset.name}:
        parser.error(f"the evaluation is of {', '.join(names)}, not of {args.dataset}")
    kept = keep(parquet.read_table(args.dataset).to_pylist(), answers, args.least, args.most)
    write_splits(args.local_save_dir, {"train": kept})


if __name__ == "__main__":
    main()
