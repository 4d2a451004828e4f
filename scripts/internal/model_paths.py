"""What is wrong with a path that a user gave for a file, a dataset or a model.

The preflight and evaluate.py print it. Nothing large is imported here, because the preflight
looks for missing paths before it imports what takes seconds.
"""

import json
import re
from pathlib import Path

POINTER = b"version https://git-lfs"
HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
# Nothing on the hub has a name that ends so
FILE_NAME = re.compile(r".*\.(arrow|csv|gz|jinja2?|jsonl?|parquet|py|safetensors|txt|ya?ml|zip)")
TILDE = "no shell expands ~ in quotes; write the whole path"
# Flags that name a file on this machine, and what it must be. Other flags may name something on the
# hub
FILES = {
    "chat_template": "a file with a Jinja template",
    "config_file": "a file of accelerate, such as scripts/accelerate/one_gpu.yaml",
    "env_fn": "path/to/file.py:function",
    "reward_fn": "path/to/file.py:function",
}


def may_be_on_the_hub(path: str | Path) -> bool:
    """Return whether a path is not here, and could be a name of the hub.

    >>> [may_be_on_the_hub(path) for path in ("Qwen/Qwen3-0.6B", "./a/b", "runs/a/model", "/")]
    [True, False, False, False]
    >>> may_be_on_the_hub("data/train.jsonl")
    False
    """
    name = str(path).rstrip("/")
    return bool(HUB_NAME.fullmatch(name)) and not (FILE_NAME.fullmatch(name) or Path(path).exists())


def number_of(file: Path) -> int:
    return int(re.sub(r"\D", "", file.parent.name) or 0)


def trouble_with_files(*files: Path) -> str:
    """Return why one of these files cannot be read, and what to do; "" if a look shows nothing."""
    for file in files:
        if not file.exists():
            return f"{file.name} is a link to a file that is not there"
        with file.open("rb") as opened:
            if opened.read(len(POINTER)) == POINTER:
                return f"{file.name} is a pointer of git-lfs and not the file; run git lfs pull"
    return ""


def trouble_with_data(path: Path) -> str:
    """Return why the rows of a file or a folder cannot be read; "" if a look shows nothing."""
    if path.is_file():
        other = "rows are read from .jsonl and .parquet files"
        return trouble_with_files(path) or other * (path.suffix not in (".jsonl", ".parquet"))
    if snapshots := sorted(path.glob("snapshots/*")):
        return f"it is a folder of the hub's cache; its files are in {snapshots[-1]}"
    kinds = (".arrow", ".json", ".jsonl", ".parquet")
    return trouble_with_files(*(file for file in sorted(path.rglob("*")) if file.suffix in kinds))


def trouble_with_model(path: str | Path) -> str:
    """Return why this is not the folder of a whole model, and what to do.

    The answer is "" if a look shows nothing.
    """
    path = Path(path)
    if may_be_on_the_hub(path):
        return ""
    if not path.exists():
        return "no such folder"
    if path.is_file():
        return f"it is a file; give the folder of a model in Hugging Face format, {path.parent}"
    weights = [*path.glob("*.safetensors")] or [*path.glob("*.bin")]
    if trouble := trouble_with_files(*weights, *path.glob("*.json")):
        return trouble
    if (path / "adapter_config.json").exists() and not any(path.glob("model*.safetensors")):
        base = json.loads((path / "adapter_config.json").read_text("utf-8"))
        base = base.get("base_model_name_or_path")
        return f"it is an adapter of {base}; merge it into that (peft's merge_and_unload) and save"
    for below in ("", "*/", "*/*/", "*/*/*/"):  # such as model/, checkpoint-9/, the hub's cache
        if configs := sorted(path.glob(f"{below}config.json"), key=number_of):
            return below and f"it has no config.json; its model is in {configs[-1].parent}"
    return "it has no config.json: it is not the folder of a model"


def not_there(flag: str, path: str) -> str:
    """Return why there is nothing at the path that a flag names; "" if there may be."""
    place = Path(path.rpartition(":")[0] if flag.endswith("_fn") else path)
    if flag == "config_file":
        place = place.expanduser()  # as the preflight does
    elif path.startswith("~"):
        return f"no such path, because {TILDE}"
    if flag in FILES and not place.is_file():
        return f"{'it is a folder' if place.is_dir() else 'no such file'}; give {FILES[flag]}"
    if flag in FILES or place.exists() or may_be_on_the_hub(path):
        return ""
    return "no such file or folder" if flag.endswith("dataset") else "no such folder"


def trouble_with(flag: str, path: str) -> str:
    """Return what is wrong with the path that a flag names; "" if a look shows nothing."""
    if trouble := not_there(flag, path):
        return trouble
    if flag in FILES:
        return "" if flag.endswith("_fn") else trouble_with_files(Path(path))
    if may_be_on_the_hub(path):
        return ""
    if flag == "tokenizer_name_or_path":
        return trouble_with_files(*Path(path).glob("*.json"))
    if flag.endswith("dataset"):
        return trouble_with_data(Path(path))
    return trouble_with_model(path)


def missing(words: list[str]) -> list[str]:
    """Return a line for each path in the words of a command that is not there.

    >>> missing(["--beta", "0", "--dataset", "none.jsonl", "--chat-template=chatml"])[0]
    '--dataset none.jsonl: no such file or folder'
    """
    script = next((word for word in words if word.endswith(".py")), "")
    lines = [] if Path(script).exists() else [f"{script}: no such file"]
    for word, following in zip(words, [*words[1:], "--"], strict=True):
        flag, has_value, path = word.removeprefix("--").partition("=")
        flag, path = flag.replace("-", "_"), path if has_value else following
        is_path = flag in FILES or flag.endswith(("dataset", "_path"))
        if word.startswith("--") and is_path and path and not path.startswith("--"):
            trouble = not_there(flag, path)
            lines += [f"--{flag} {path}: {trouble}"] if trouble else []
    return lines
