"""Read, convert and write datasets, for the programs of this folder.

Each program passes a function that makes a row of the output to main().
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
from typing import Any

import datasets
import huggingface_hub
import pyarrow.parquet

# A function that makes a row of the output from a row of the dataset, its split and its index in
# the split. To drop a row it raises ValueError with the reason
Convert = Callable[[dict, str, int], dict]
Splits = dict[str, list[dict]]

SAVE_DIR_HELP = "Folder for the files that are written (%(default)s)."
# Words in a file's name that identify its split
SPLIT_WORDS = {"train": "train", "test": "test", "validation": "validation"}
SPLIT_WORDS |= {"val": "validation", "valid": "validation"}


def printable(text: str) -> str:
    r"""Escape everything that a terminal would not show as it is, such as control codes.

    >>> printable("\x1b[1mtitle\n")
    '\\x1b[1mtitle\\n'
    """
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


@functools.cache
def hub_answers() -> bool:
    """Return whether the Hub answers within five seconds. If not, set this process offline.

    Its child processes are then offline as well. Otherwise they would wait for each file again.
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

    # This needs a thread, because the look-up of the Hub's address has no time limit
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(5)
    if not answers:
        os.environ["HF_HUB_OFFLINE"] = "1"  # for later imports and other processes
        huggingface_hub.constants.HF_HUB_OFFLINE = True
    return bool(answers)


def options(description: str, local_save_dir: str) -> argparse.ArgumentParser:
    """Return a parser with the options of every program, to which some add their own."""
    sys.stdout.reconfigure(errors="backslashreplace")  # a terminal may support only ASCII
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=form)
    source = "A .jsonl or .parquet file, or a folder with one file per split, whose name contains "
    source += "the split. A single file without a split is the training split. Default: the Hub."
    parser.add_argument("--local_dataset_path", type=Path, help=source)
    parser.add_argument("--local_save_dir", default=local_save_dir, help=SAVE_DIR_HELP)
    return parser


def main(
    args: argparse.Namespace,
    hub: tuple,
    convert: Convert,
    rearrange: Callable[[Splits], Splits] = dict,
) -> None:
    """Read all rows, convert them, and write a .parquet file for each split that has rows.

    `hub` is the dataset's name on the Hub, and its configuration if it has several. If the input is
    not valid, print one line and exit with status 2.
    """
    folder = Path(args.local_save_dir).expanduser()
    try:
        if args.local_dataset_path:
            splits = {}
            for split, paths in find_files(args.local_dataset_path.expanduser(), folder).items():
                splits[split] = [row for path in paths for row in read_rows(path)]
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
    """Return the rows of each split on the Hub or in its cache."""
    print(f"Loading {hub[0]} from the Hub ...", flush=True)
    datasets.config.HF_HUB_OFFLINE = not hub_answers()  # datasets read the variable at its import
    try:
        return {split: rows.to_list() for split, rows in datasets.load_dataset(*hub).items()}
    except Exception as error:
        raise ValueError(
            f"{hub[0]} could not be loaded from the Hub or its cache; without a network, pass "
            f"--local_dataset_path ({type(error).__name__}: {error})"
        ) from error


def find_files(path: Path, output: Path) -> dict[str, list[Path]]:
    """Return the local files of each split, by name. A single file without a split is train's."""
    splits = defaultdict(list)
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    files = [file for file in files if file.suffix in (".jsonl", ".parquet")]
    for file in files:
        words = re.split("[^a-z]+", file.stem.lower())
        named = {SPLIT_WORDS[word] for word in words if word in SPLIT_WORDS}
        if not named and len(files) == 1:
            named = {"train"}
        if len(named) != 1:
            raise ValueError(
                f"{file.name} must have one split (train, validation, test) in its name; rename it"
            )
        splits[named.pop()].append(file)
    if not splits:
        raise ValueError(f"--local_dataset_path {path} has no .jsonl or .parquet file")
    for split, files in splits.items():
        names = {re.sub(r"-\d{5}-of-\d{5}", "", file.stem) for file in files}  # shards of the hub
        if len(names) > 1:
            raise ValueError(f"{path} has several files for {split}: {', '.join(sorted(names))}")
        if (output / f"{split}.parquet").resolve() in [file.resolve() for file in files]:
            raise ValueError(f"{files[0]} would be overwritten; choose another --local_save_dir")
    return splits


def read_rows(path: Path) -> list[dict]:
    """Return the rows of a .parquet file, or of a file with a JSON object per line.

    The latter is not read by datasets.load_dataset, which turns texts that look like dates into
    dates.
    """
    if path.suffix == ".parquet":
        return pyarrow.parquet.read_table(path).to_pylist()
    rows = []
    with open(path, encoding="utf-8-sig") as file:  # a file from Windows can start with a mark
        for number, line in enumerate(file, start=1):
            if line.strip():
                try:
                    rows.append(dict(json.loads(line)))
                except (TypeError, ValueError) as error:
                    message = f"line {number} of {path} is not a JSON object: {error}"
                    raise ValueError(message) from error
    return rows


def text_of(row: dict, column: str) -> str:
    """Return the text in a column without surrounding spaces. Raise ValueError if there is none.

    >>> text_of({"question": " How many? "}, "question")
    'How many?'
    """
    text = row[column]
    if not (isinstance(text, str) and text.strip()):
        raise ValueError(f"no text in `{column}`")
    return text.strip()


def verl_row(
    source: str,
    prompt: str | list[dict],
    ability: str,
    ground_truth: str,
    style: str = "rule",
    **extra_info: Any,
) -> dict:
    """Return a row of verl's parquet schema. A prompt that is a text becomes a user's message."""
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    return {
        "data_source": source,
        "prompt": prompt,
        "ability": ability,
        "reward_model": {"style": style, "ground_truth": ground_truth},
        "extra_info": extra_info,
    }


def convert_rows(rows: list[dict], split: str, convert: Convert) -> tuple[list[dict], Counter]:
    """Return the converted rows of a split, and how many were dropped for each reason.

    >>> def convert(row, split, index):
    ...     return {"prompt": text_of(row, "question"), "index": index}
    >>> convert_rows([{"question": " "}, {"question": "Who?"}], "train", convert)
    ([{'prompt': 'Who?', 'index': 1}], Counter({'no text in `question`': 1}))
    """
    converted, dropped = [], Counter()
    columns = dict.fromkeys(name for row in rows for name in row)  # None where a row lacks one
    for index, row in enumerate(rows):
        try:
            new_row = convert(columns | row, split, index)
            json.dumps(new_row, ensure_ascii=False, default=str).encode()
            converted.append(new_row)
        except UnicodeEncodeError:
            dropped["half a character, which cannot be written"] += 1
        except ValueError as reason:
            dropped[str(reason)] += 1
        except KeyError as error:
            name, known = error.args[0], ", ".join(columns)
            message = f"{split} has no column `{name}`; its columns are {known}"
            raise ValueError(message) from error
    return converted, dropped


def write_splits(folder: Path, splits: Splits) -> None:
    """Write a .parquet file for each split that has rows."""
    folder = folder.expanduser()
    if not any(splits.values()):
        raise ValueError(f"no row is left to write to {folder}; the reasons are above")
    datasets.disable_progress_bars()  # writing takes no time, unlike a download
    folder.mkdir(parents=True, exist_ok=True)
    for split, rows in splits.items():
        if rows:
            datasets.Dataset.from_list(rows).to_parquet(folder / f"{split}.parquet")
        done = f"{len(rows):,} rows written" if rows else "not written, because no row is left"
        print(f"{folder / split}.parquet: {done}")
