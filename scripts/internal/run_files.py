"""Read the files of a run and the command line, for the programs that show a run.

A line that is only half written is ignored, because the run may still be writing it.
"""

import argparse
import json
import math
import re
import sys
from collections import defaultdict
from pathlib import Path

STEP = re.compile(rb'"training_step": ?(\d+)')  # in a text, quotes would be escaped
NONE_RIGHT = (
    "No answer counts as correct: an answer is correct if it scores 1 or more, or if the reward "
    "returns `right`"
)


def make_parser(docstring: str) -> argparse.ArgumentParser:
    """Return a parser that shows a program's docstring as help."""
    sys.stdout.reconfigure(errors="backslashreplace")  # a terminal may support only ASCII
    style = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=docstring, formatter_class=style)


def read_args(run_dir: Path) -> dict:
    return json.loads((run_dir / "args.json").read_bytes())


def lines_of(path: Path) -> list[bytes]:
    """Return the complete lines of a file, or none if there is no file."""
    return path.read_bytes().split(b"\n")[:-1] if path.is_file() else []


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in lines_of(path)]


def read_metrics(run_dir: Path) -> list[dict]:
    return read_lines(run_dir / "metrics.jsonl")


def read_rollouts(run_dir: Path) -> dict[int, list[bytes]]:
    """Return the lines of rollouts.jsonl by step, not parsed, because they can be many and long."""
    steps = defaultdict(list)
    for line in lines_of(run_dir / "rollouts.jsonl"):
        steps[int(STEP.search(line)[1])].append(line)
    return steps


def matrices_in(folder: Path) -> int:
    """Count the parameters of a saved model that are multiplied, from its .safetensors headers.

    These are its matrices, including the head, tied or not, but not the embeddings.
    """
    shapes = {}
    for path in folder.glob("*.safetensors"):
        with open(path, "rb") as file:
            head = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        shapes |= {name: head[name]["shape"] for name in head if name != "__metadata__"}
    matrices = {name: math.prod(shapes[name]) for name in shapes if len(shapes[name]) == 2}
    embeddings = [count for name, count in matrices.items() if "embed" in name]
    is_tied = "lm_head.weight" not in matrices
    return sum(matrices.values()) - (0 if is_tied else sum(embeddings))


def is_right(row: dict) -> bool | None:
    """Return whether a response is correct, as in the run's metrics, or None without such a score.

    >>> row = {"verifiable_score": 0.9, "reward_metrics": {}, "score": 1.0}
    >>> is_right(row), is_right(row | {"reward_metrics": {"right": 1.0}})
    (False, True)
    >>> is_right(row | {"verifiable_score": None}) is None  # only a reward model scored it
    True
    """
    if row["verifiable_score"] is None:
        return None
    return row["reward_metrics"].get("right", row["verifiable_score"]) >= 1
