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


def write_configurations(folder, configurations):
    """A dataset of several configurations, {name: rows of its split `train`}; returns its path."""
    lines = ["---", "configs:"]
    for name, rows in configurations.items():
        write_rows(folder / name / "train.jsonl", rows)
        lines += [f"- config_name: {name}", "  data_files:"]
        lines += ["  - split: train", f"    path: {name}/train.jsonl"]
    write_text(folder / "README.md", "\n".join([*lines, "---"]))
    return folder


def read_json_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def swap_tokens(folder):
    """Has a tokenizer read two words for each other."""
    path = folder / "tokenizer.json"
    tokens = json.loads(path.read_text())
    words = tokens["model"]["vocab"]
    words["1"], words["2"] = words["2"], words["1"]
    path.write_text(json.dumps(tokens))
