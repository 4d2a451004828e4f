"""Files that tests give to the scripts, and take from them."""

import json


def write_text(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def write_rows(path, rows):
    """A .parquet file of these rows, or one with a JSON object a line; returns its path."""
    if path.suffix != ".parquet":
        return write_text(path, "".join(json.dumps(row) + "\n" for row in rows))
    import datasets

    path.parent.mkdir(parents=True, exist_ok=True)
    datasets.Dataset.from_list(rows).to_parquet(str(path))
    return path


def read_json_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]
