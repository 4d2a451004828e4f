"""What the scripts in data_preprocess share: their options, reading rows, converting, writing.

Each of them holds a function that makes a row, and calls from its main()

    args = parse_args(defaults, __doc__)
    splits = load_splits(args, HUB, COLUMNS)
    write_splits(args, splits, convert)

This module is not in their folder, because the math.py there must never be importable.
"""

import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn, TypeVar

import datasets
import tyro
from rich.console import Console
from rich.progress import track

# Makes a row of the output from a row of the dataset, its split and its index there. A ValueError
# from it drops the row, and says why.
Convert = Callable[[dict, str, int], dict]

AnyArgs = TypeVar("AnyArgs")

# Words in the names of files that tell the split
SPLIT_WORDS = {
    "train": "train",
    "val": "validation",
    "valid": "validation",
    "validation": "validation",
    "test": "test",
}


@dataclass(kw_only=True)
class Args:
    local_dataset_path: str | None = None
    """a .jsonl or .parquet file, or a folder with one a split; None: the hub"""
    local_save_dir: str
    """folder for the files that are written"""
    split_name: Literal["train", "validation", "test"] | None = None
    """split of a local file whose name tells none"""


def bad_input(message: str) -> NoReturn:
    """Ends the script with one line that says what is wrong, where, what to do; exit status 2."""
    line = " ".join(message.split())[:400]
    print(f"{Path(sys.argv[0]).name}: error: {line}", file=sys.stderr)
    sys.exit(2)


def parse_args(defaults: AnyArgs, description: str) -> AnyArgs:
    """The command line's options; one whose default is tyro.MISSING has to be given."""
    args, unknown = tyro.cli(
        type(defaults), default=defaults, description=description, return_unknown_args=True
    )
    if unknown:
        bad_input(f"unknown flag {' '.join(unknown)}; --help lists all")
    return args


# ------------------------------------------------------------------------------------ local files


def split_in_name(name: str) -> str | None:
    """The split that a word in a file's name tells; None where none does, or two disagree.

    >>> split_in_name("gsm8k_train.jsonl")
    'train'
    >>> split_in_name("my-Valid.parquet")
    'validation'
    >>> split_in_name("trained.jsonl"), split_in_name("train_test.jsonl")
    (None, None)
    """
    words = re.split("[^a-z]+", Path(name).stem.lower())
    splits = {SPLIT_WORDS[word] for word in words if word in SPLIT_WORDS}
    if len(splits) != 1:
        return None
    return splits.pop()


def without_shard(name: str) -> str:
    """A file's name without the number of the shard, which the hub puts into it.

    >>> without_shard("train-00001-of-00002.parquet")
    'train.parquet'
    >>> without_shard("train.jsonl")
    'train.jsonl'
    """
    path = Path(name)
    return re.sub(r"-\d{5}-of-\d{5}.*", "", path.stem) + path.suffix


def find_files(args: Args) -> dict[str, list[Path]]:
    """The local files of each split, by --split_name or by their names.

    Several of one split must be its shards.
    """
    path = Path(args.local_dataset_path).expanduser()
    if not path.exists():
        bad_input(f"--local_dataset_path {path}: no such file or folder")

    files = [path]
    if path.is_dir():
        files = sorted(path.iterdir())
    files = [file for file in files if file.is_file() and file.suffix in (".jsonl", ".parquet")]
    if not files:
        bad_input(
            f"--local_dataset_path {path}: no .jsonl or .parquet file, and no folder right above "
            "one"
        )
    if args.split_name and path.is_dir():
        bad_input("--split_name is for a single file; give that file")

    splits = defaultdict(list)
    for file in files:
        split = args.split_name or split_in_name(file.name)
        if split is None:
            bad_input(
                f"{file}: its name tells no split (train, validation, test); "
                "give this file alone, with --split_name"
            )
        if file.stat().st_size == 0:
            bad_input(f"{file}: the file is empty")
        target = Path(args.local_save_dir).expanduser() / f"{split}.parquet"
        if file.resolve() == target.resolve():
            bad_input(f"{file} would be overwritten; choose another --local_save_dir")
        splits[split].append(file)

    for split, files in splits.items():
        names = {without_shard(file.name) for file in files}
        if len(names) > 1:
            bad_input(
                f"{path}: several files for {split}, {', '.join(sorted(names))}; give one of them"
            )
    return splits


# ------------------------------------------------------------------------------------------- rows


def load_splits(
    args: Args, hub: tuple[str, ...], columns: tuple[str, ...]
) -> dict[str, datasets.Dataset]:
    """The rows of each split as they are on the hub, or in local files of the same columns.

    `hub` is the dataset's name there, and its configuration where it has several.
    """
    datasets.utils.logging.set_verbosity(datasets.logging.CRITICAL)  # errors are told by bad_input
    if args.local_dataset_path is None:
        splits = load_from_hub(args, hub)
    else:
        splits = load_files(find_files(args))

    where = args.local_dataset_path or hub[0]
    for split, rows in splits.items():
        for column in columns:
            if column not in rows.column_names:
                bad_input(
                    f"{where}: in the split {split} there is no column `{column}`; "
                    f"the columns are {', '.join(rows.column_names)}"
                )
    return splits


def load_from_hub(args: Args, hub: tuple[str, ...]) -> dict[str, datasets.Dataset]:
    """The rows of each split on the hub."""
    if args.split_name:
        bad_input("--split_name is for a local file; give --local_dataset_path")
    print(f"Loading {hub[0]} from the hub ...", flush=True)
    try:
        return dict(datasets.load_dataset(*hub))
    except Exception as error:
        bad_input(
            f"{hub[0]}: cannot be loaded from the hub; without a network, give "
            f"--local_dataset_path ({type(error).__name__}: {error})"
        )


def load_files(files_of_splits: dict[str, list[Path]]) -> dict[str, datasets.Dataset]:
    """The rows of each split in local files."""
    datasets.disable_progress_bars()  # reading takes no time, unlike a download
    splits = {}
    for split, files in files_of_splits.items():
        kind = "parquet" if files[0].suffix == ".parquet" else "json"
        names = [str(file) for file in files]
        try:
            splits[split] = datasets.load_dataset(kind, data_files={split: names}, split=split)
        except Exception as error:
            bad_input(f"{', '.join(names)}: no rows that can be read ({error.__cause__ or error})")
    return splits


def text_of(row: dict, column: str) -> str:
    """The text in a column, without spaces around it; ValueError if there is none.

    >>> text_of({"question": " How many? "}, "question")
    'How many?'
    >>> text_of({"question": None}, "question")
    Traceback (most recent call last):
        ...
    ValueError: no text in `question`
    """
    if not (isinstance(row[column], str) and row[column].strip()):
        raise ValueError(f"no text in `{column}`")
    return row[column].strip()


def convert_rows(
    rows: datasets.Dataset | list[dict], split: str, convert: Convert
) -> tuple[list[dict], Counter]:
    """The converted rows of a split, and how many were dropped for each reason.

    >>> def convert(row, split, index):
    ...     return {"prompt": text_of(row, "question"), "index": index}
    >>> convert_rows([{"question": " "}, {"question": "Who?"}], "train", convert)
    ([{'prompt': 'Who?', 'index': 1}], Counter({'no text in `question`': 1}))
    """
    converted = []
    dropped = Counter()
    no_terminal = not sys.stderr.isatty()
    tracked = track(rows, split, disable=no_terminal, console=Console(stderr=True))
    for index, row in enumerate(tracked):
        try:
            converted.append(convert(row, split, index))
        except ValueError as reason:
            dropped[str(reason)] += 1
    return converted, dropped


def describe_counts(num_kept: int, dropped: Counter) -> str:
    """How many rows of a split are kept, how many dropped, and why, the commonest reason first.

    >>> describe_counts(7000, Counter({"no label": 1, "no text in `ctx`": 2}))
    '7,003 rows, 7,000 kept, 3 dropped (2: no text in `ctx`; 1: no label)'
    >>> describe_counts(5, Counter())
    '5 rows, 5 kept, 0 dropped'
    """
    num_dropped = dropped.total()
    counts = f"{num_kept + num_dropped:,} rows, {num_kept:,} kept, {num_dropped:,} dropped"
    if not dropped:
        return counts
    reasons = "; ".join(f"{count:,}: {reason}" for reason, count in dropped.most_common())
    return f"{counts} ({reasons})"


def write_splits(args: Args, splits: dict[str, datasets.Dataset], convert: Convert) -> None:
    """Converts all rows, and writes a file for each split with rows left.

    Says how many were dropped and why.
    """
    folder = Path(args.local_save_dir).expanduser()
    converted = {}
    for split, rows in splits.items():
        converted[split], dropped = convert_rows(rows, split, convert)
        print(f"{split}: {describe_counts(len(converted[split]), dropped)}")
    if not any(converted.values()):
        bad_input(f"no row is left to write to {folder}; see why above")

    try:
        folder.mkdir(parents=True, exist_ok=True)
        for split, rows in converted.items():
            path = folder / f"{split}.parquet"
            if rows:
                datasets.Dataset.from_list(rows).to_parquet(str(path))
                print(f"{path}: {len(rows):,} rows written")
            else:
                print(f"{path}: not written, for no row is left")
    except OSError as error:
        bad_input(f"--local_save_dir {folder}: cannot be written to ({error})")
