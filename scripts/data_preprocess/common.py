"""What the programs in data_preprocess share: their options, reading rows, converting, writing.

Each has a function that makes a row of the output, and gives it to main().
"""

import argparse
import contextlib
import functools
import json
import os
import re
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path

import datasets
import huggingface_hub
import pyarrow.parquet

# Makes a row of the output from a row of the dataset, its split and its index there. A ValueError
# from it drops the row, and says why.
Convert = Callable[[dict, str, int], dict]
Splits = dict[str, list[dict]]

# Words in the names of files that tell the split
SPLIT_WORDS = {"train": "train", "test": "test", "validation": "validation"}
SPLIT_WORDS |= {"val": "validation", "valid": "validation"}


def printable(text: str) -> str:
    r"""The text with all that a terminal would not show as it is, such as control codes, escaped.

    >>> printable("\x1b[1mtitle\n")
    '\\x1b[1mtitle\\n'
    """
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


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


def options(description: str, local_save_dir: str) -> argparse.ArgumentParser:
    """What every program takes on its command line; some add options of their own."""
    sys.stdout.reconfigure(errors="backslashreplace")  # a terminal may know ASCII alone
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=form)
    where = "a .jsonl or .parquet file, or a folder with one a split by its name (one alone may be "
    where += "without, and is the training split); without this option the hub is read"
    parser.add_argument("--local_dataset_path", type=Path, help=where)
    where = "folder for the files that are written (%(default)s)"
    parser.add_argument("--local_save_dir", default=local_save_dir, help=where)
    return parser


def main(
    args: argparse.Namespace,
    hub: tuple,
    convert: Convert,
    rearrange: Callable[[Splits], Splits] = dict,
) -> None:
    """Reads all rows, converts them, and writes a .parquet file for each split with rows left.

    `hub` is the dataset's name there, and its configuration where it has several. What is wrong
    with the input is said in a line, with exit status 2.
    """
    folder = Path(args.local_save_dir).expanduser()
    try:
        if args.local_dataset_path:
            files = find_files(args.local_dataset_path.expanduser(), folder)
            splits = {
                split: [row for path in files[split] for row in read_rows(path)] for split in files
            }
        else:
            splits = load_from_hub(hub)
        converted = {}
        for split, rows in rearrange(splits).items():
            converted[split], dropped = convert_rows(rows, split, convert)
            reasons = "; ".join(f"{count:,}: {reason}" for reason, count in dropped.most_common())
            counts = f"{len(converted[split]):,} kept, {dropped.total():,} dropped"
            print(f"{split}: {len(rows):,} rows, {counts}{reasons and f' ({reasons})'}")
        write_splits(folder, converted)
    except (OSError, ValueError) as error:
        line = printable(" ".join(str(error).split()))
        print(f"{Path(sys.argv[0]).name}: error: {line}", file=sys.stderr)
        sys.exit(2)


def load_from_hub(hub: tuple) -> Splits:
    """The rows of each split on the hub, or of what the cache has of it."""
    print(f"Loading {hub[0]} from the hub ...", flush=True)
    datasets.config.HF_HUB_OFFLINE = not hub_answers()  # read by it when it was imported
    try:
        return {split: rows.to_list() for split, rows in datasets.load_dataset(*hub).items()}
    except Exception as error:
        raise ValueError(
            f"{hub[0]}: neither the hub nor the cache gives it; without a network, give "
            f"--local_dataset_path ({type(error).__name__}: {error})"
        ) from error


def find_files(path: Path, output: Path) -> dict[str, list[Path]]:
    """The local files of each split, by their names; one file without a split's name is train's."""
    splits = defaultdict(list)
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    files = [file for file in files if file.suffix in (".jsonl", ".parquet")]
    for file in files:
        words = re.split("[^a-z]+", file.stem.lower())
        told = {SPLIT_WORDS[word] for word in words if word in SPLIT_WORDS}
        if not told and len(files) == 1:
            told = {"train"}
        if len(told) != 1:
            raise ValueError(
                f"{file.name}: one split (train, validation, test) must be in the name; rename it"
            )
        splits[told.pop()].append(file)
    if not splits:
        raise ValueError(f"--local_dataset_path {path}: no .jsonl or .parquet file")
    for split, files in splits.items():
        names = {re.sub(r"-\d{5}-of-\d{5}", "", file.stem) for file in files}  # shards of the hub
        if len(names) > 1:
            raise ValueError(f"{path}: several files for {split}, {', '.join(sorted(names))}")
        if (output / f"{split}.parquet").resolve() in [file.resolve() for file in files]:
            raise ValueError(f"{files[0]} would be overwritten; choose another --local_save_dir")
    return splits


def read_rows(path: Path) -> list[dict]:
    """The rows of a .parquet file, or of one with a JSON object a line.

    That one not by datasets.load_dataset, which makes a date of a text that looks like one.
    """
    if path.suffix == ".parquet":
        return pyarrow.parquet.read_table(path).to_pylist()
    rows = []
    with open(path, encoding="utf-8-sig") as file:  # Windows may put a mark before the first line
        for number, line in enumerate(file, start=1):
            if line.strip():
                try:
                    rows.append(dict(json.loads(line)))
                except (TypeError, ValueError) as error:
                    raise ValueError(f"{path}: line {number} is no JSON object, {error}") from error
    return rows


def text_of(row: dict, column: str) -> str:
    """The text in a column, without spaces around it; ValueError if there is none.

    >>> text_of({"question": " How many? "}, "question")
    'How many?'
    """
    text = row[column]
    if not (isinstance(text, str) and text.strip()):
        raise ValueError(f"no text in `{column}`")
    return text.strip()


def convert_rows(rows: list[dict], split: str, convert: Convert) -> tuple[list[dict], Counter]:
    """The converted rows of a split, and how many were dropped for each reason.

    >>> def convert(row, split, index):
    ...     return {"prompt": text_of(row, "question"), "index": index}
    >>> convert_rows([{"question": " "}, {"question": "Who?"}], "train", convert)
    ([{'prompt': 'Who?', 'index': 1}], Counter({'no text in `question`': 1}))
    """
    converted, dropped = [], Counter()
    columns = dict.fromkeys(name for row in rows for name in row)  # None where a row lacks one
    for index, row in enumerate(rows):
        try:
            made = convert(columns | row, split, index)
            json.dumps(made, ensure_ascii=False, default=str).encode()
            converted.append(made)
        except UnicodeEncodeError:
            dropped["half a character, which no file can hold"] += 1
        except ValueError as reason:
            dropped[str(reason)] += 1
        except KeyError as error:
            name, known = error.args[0], ", ".join(columns)
            raise ValueError(f"{split}: no column `{name}`; the columns are {known}") from error
    return converted, dropped


def write_splits(folder: Path, splits: Splits) -> None:
    """A .parquet file for each split that has rows."""
    folder = folder.expanduser()
    if not any(splits.values()):
        raise ValueError(f"no row is left to write to {folder}; see why above")
    datasets.disable_progress_bars()  # writing takes no time, unlike a download
    folder.mkdir(parents=True, exist_ok=True)
    for split, rows in splits.items():
        if rows:
            datasets.Dataset.from_list(rows).to_parquet(folder / f"{split}.parquet")
        done = f"{len(rows):,} rows written" if rows else "not written, for no row is left"
        print(f"{folder / split}.parquet: {done}")
