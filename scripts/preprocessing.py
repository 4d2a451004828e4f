"""What the scripts in data_preprocess share: their options, reading rows, converting, writing.

Each of them holds a function that makes a row, and calls from its main()

    args = parse_args(defaults, __doc__)
    splits = load_splits(args, HUB, COLUMNS)
    write_splits(args, splits, convert)

This module is not in their folder, because the math.py there must never be importable.
"""

import contextlib
import functools
import io
import json
import os
import re
import sys
import tempfile
import threading
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import datasets
import huggingface_hub
import pyarrow
import pyarrow.parquet
import tyro

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


def printable(text: str) -> str:
    r"""The text with all that a terminal would not show as it is, such as control codes, escaped.

    >>> printable("\x1b[1mtitle\n")
    '\\x1b[1mtitle\\n'
    """
    return "".join(
        # A space is shown, such as the ideographic one
        character
        if character.isprintable() or unicodedata.category(character) == "Zs"
        else repr(character)[1:-1]
        for character in text
    )


def bad_input(message: str) -> NoReturn:
    """Ends the script with one line that says what is wrong, where, what to do; exit status 2."""
    line = printable(" ".join(message.split()))
    print(f"{Path(sys.argv[0]).name}: error: {line}", file=sys.stderr)
    sys.exit(2)


@functools.cache
def hub_answers() -> bool:
    """Whether the hub answers within five seconds. If not, this process goes offline.

    So do its children. Else each file would be waited for, several times.
    """
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        return False
    answers = []

    def ask() -> None:
        with contextlib.suppress(Exception):
            hub = huggingface_hub.constants.ENDPOINT
            answer = huggingface_hub.utils.get_session().head(hub, timeout=5)
            if answer.status_code < 500:
                answers.append(answer)

    # In a thread: the look-up of the hub's address has no time limit of its own
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(5)
    if not answers:
        os.environ["HF_HUB_OFFLINE"] = "1"  # for what is imported later, and other processes
        huggingface_hub.constants.HF_HUB_OFFLINE = True
    return bool(answers)


def parse_args(defaults: AnyArgs, description: str) -> AnyArgs:
    """The command line's options; one whose default is tyro.MISSING has to be given."""
    sys.stdout.reconfigure(errors="backslashreplace")  # a terminal may know ASCII alone
    return tyro.cli(type(defaults), default=defaults, description=description, use_underscores=True)


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


def find_files(args: Args) -> dict[str, list[Path]]:
    """The local files of each split, by their names."""
    path = Path(args.local_dataset_path).expanduser()
    if not path.exists():
        bad_input(f"--local_dataset_path {path}: no such file or folder")
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    files = [file for file in files if file.suffix in (".jsonl", ".parquet") and file.is_file()]
    if not files:
        bad_input(f"--local_dataset_path {path}: no .jsonl or .parquet file")

    splits = defaultdict(list)
    for file in files:
        split = split_in_name(file.name)
        if split is None:
            bad_input(f"{file}: its name tells no split (train, validation, test); rename it")
        if file.resolve() == (output_folder(args) / f"{split}.parquet").resolve():
            bad_input(f"{file} would be overwritten; choose another --local_save_dir")
        splits[split].append(file)
    for split, files in splits.items():
        names = {re.sub(r"-\d{5}-of-\d{5}", "", file.stem) for file in files}  # shards of the hub
        if len(names) > 1:
            bad_input(f"{path}: several files for {split}, {', '.join(sorted(names))}; give one")
    return splits


# ------------------------------------------------------------------------------------------- rows


def load_splits(
    args: Args, hub: tuple[str, ...], columns: tuple[str, ...]
) -> dict[str, list[dict]]:
    """The rows of each split as they are on the hub, or in local files of the same columns.

    `hub` is the dataset's name there, and its configuration where it has several.
    """
    if args.local_dataset_path is None:
        splits = load_from_hub(hub)
    else:
        splits = {split: load_files(files) for split, files in find_files(args).items()}

    where = args.local_dataset_path or hub[0]
    for split, rows in splits.items():
        names = dict.fromkeys(name for row in rows for name in row)  # ordered, unlike a set
        for column in columns:
            if column not in names:
                bad_input(
                    f"{where}: in the split {split} there is no column `{column}`; "
                    f"the columns are {', '.join(names)}"
                )
    return splits


def load_from_hub(hub: tuple[str, ...]) -> dict[str, list[dict]]:
    """The rows of each split on the hub, or of what the cache has of it."""
    print(f"Loading {hub[0]} from the hub ...", flush=True)
    for library in (datasets, huggingface_hub):  # their errors are told by bad_input
        library.utils.logging.set_verbosity(library.utils.logging.CRITICAL)
    reason = "cannot be loaded from the hub"
    if not hub_answers():
        datasets.config.HF_HUB_OFFLINE = True  # read by it when it was imported
        reason = "the hub does not answer, and the cache has no such dataset"
    try:
        splits = datasets.load_dataset(*hub)
        return {split: rows.to_list() for split, rows in splits.items()}
    except Exception as error:
        bad_input(
            f"{hub[0]}: {reason}; without a network, give --local_dataset_path "
            f"({type(error).__name__}: {error})"
        )


def load_files(files: list[Path]) -> list[dict]:
    """The rows of a split in local files."""
    rows = []
    for file in files:
        try:
            if file.suffix == ".parquet":
                rows += pyarrow.parquet.read_table(file).to_pylist()
            else:
                rows += read_json_lines(file)
        except (OSError, ValueError) as error:
            bad_input(f"{file}: no rows that can be read ({type(error).__name__}: {error})")
    return rows


def read_json_lines(path: Path) -> list[dict]:
    """The rows of a file with a JSON object a line; ValueError says which line is none.

    Not by datasets.load_dataset, which makes a date of a text that looks like one.
    """
    rows = []
    with open(path, encoding="utf-8-sig") as file:  # Windows may put a mark before the first line
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"line {number} is no JSON, {error}") from error
            if not isinstance(row, dict):
                raise ValueError(f"line {number} is no JSON object")
            rows.append(row)
    return rows


def text_of(row: dict, column: str) -> str:
    """The text in a column, without spaces around it; ValueError if there is none.

    >>> text_of({"question": " How many? "}, "question")
    'How many?'
    >>> text_of({"question": None}, "question")
    Traceback (most recent call last):
        ...
    ValueError: no text in `question`
    """
    return checked_text(row.get(column), column)


def checked_text(value: Any, column: str) -> str:
    """A value of a column, without spaces around it; ValueError if it is no text."""
    if not (isinstance(value, str) and value.strip()):
        raise ValueError(f"no text in `{column}`")
    return value.strip()


def convert_rows(rows: list[dict], split: str, convert: Convert) -> tuple[list[dict], Counter]:
    """The converted rows of a split, and how many were dropped for each reason.

    >>> def convert(row, split, index):
    ...     return {"prompt": text_of(row, "question"), "index": index}
    >>> convert_rows([{"question": " "}, {"question": "Who?"}], "train", convert)
    ([{'prompt': 'Who?', 'index': 1}], Counter({'no text in `question`': 1}))
    """
    converted = []
    dropped = Counter()
    for index, row in enumerate(rows):
        try:
            made = convert(row, split, index)
            json.dumps(made, ensure_ascii=False, default=str).encode()
            converted.append(made)
        except UnicodeEncodeError:
            dropped["half a character, which no file can hold"] += 1
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
    counts = f"{num_kept + dropped.total():,} rows, {num_kept:,} kept, {dropped.total():,} dropped"
    reasons = "; ".join(f"{count:,}: {reason}" for reason, count in dropped.most_common())
    return f"{counts} ({reasons})" if dropped else counts


# ----------------------------------------------------------------------------------------- output


def output_folder(args: Args) -> Path:
    """The folder for the files that are written."""
    return Path(args.local_save_dir).expanduser()


def write_splits(args: Args, splits: dict[str, list[dict]], convert: Convert) -> None:
    """Converts all rows, and writes a file for each split with rows left.

    Says how many were dropped and why. Where one cannot be written, none is, and older files stay.
    """
    folder = output_folder(args)
    converted = {}
    for split, rows in splits.items():
        converted[split], dropped = convert_rows(rows, split, convert)
        print(f"{split}: {describe_counts(len(converted[split]), dropped)}")
    if not any(converted.values()):
        bad_input(f"no row is left to write to {folder}; see why above")

    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_files(folder, {split: rows for split, rows in converted.items() if rows})
    except OSError as error:
        bad_input(f"--local_save_dir {folder}: cannot be written to ({error})")
    for split, rows in converted.items():
        done = f"{len(rows):,} rows written" if rows else "not written, for no row is left"
        print(f"{folder / split}.parquet: {done}")


def write_files(folder: Path, splits: dict[str, list[dict]]) -> None:
    """A .parquet file for each split, all of them or none: a cut one never has a final name."""
    datasets.disable_progress_bars()  # writing takes no time, unlike a download
    with tempfile.TemporaryDirectory(prefix="unfinished-", dir=folder) as unfinished:
        for split, rows in splits.items():
            # Not straight into the file: Arrow ends the process by SIGABRT where the disk is full
            file = io.BytesIO()
            datasets.Dataset.from_list(rows).to_parquet(file)
            (Path(unfinished) / f"{split}.parquet").write_bytes(file.getvalue())
        for split in splits:
            os.replace(Path(unfinished) / f"{split}.parquet", folder / f"{split}.parquet")
