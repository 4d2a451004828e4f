"""Find out what is wrong with a path that a user passed for a file, a dataset or a model.

The preflight and evaluate.py print the result. This file imports nothing large, because the
preflight looks for missing paths before it imports libraries, which takes seconds.
"""

import json
import re
from pathlib import Path

POINTER = b"version https://git-lfs"
HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
# No repository on the Hub has a name with such an ending
FILE_NAME = re.compile(r".*\.(arrow|csv|gz|jinja2?|jsonl?|parquet|py|safetensors|txt|ya?ml|zip)")
TILDE = "no shell expands ~ in quotes; write the whole path"
# Flags that name a local file, and what it must be. Other flags may name a repository on the Hub
FILES = {
    "chat_template": "a file with a Jinja template",
    "config_file": "a file of accelerate, such as scripts/accelerate/one_gpu.yaml",
    "env_fn": "path/to/file.py:function",
    "reward_fn": "path/to/file.py:function",
}


def may_be_on_the_hub(path: str | Path) -> bool:
    """Return whether a path does not exist, and could be a name on the Hub.

    >>> [may_be_on_the_hub(path) for path in ("Qwen/Qwen3-0.6B", "./a/b", "runs/a/model", "/")]
    [True, False, False, False]
    >>> may_be_on_the_hub("data/train.jsonl")
    False
    """
    name = str(path).rstrip("/")
    return bool(HUB_NAME.fullmatch(name)) and not (FILE_NAME.fullmatch(name) or Path(path).exists())


def number_of(file: Path) -> int:
    """Return the number in the name of a file's folder, such as that of a checkpoint, or 0."""
    return int(re.sub(r"\D", "", file.parent.name) or 0)


def trouble_with_files(*files: Path) -> str:
    """Return why one of these files cannot be read, and what to do, or "" if no reason is found."""
    for file in files:
        if not file.exists():
            return f"{file.name} is a link to a file that does not exist"
        with file.open("rb") as opened:
            if opened.read(len(POINTER)) == POINTER:
                return f"{file.name} is only a pointer of git-lfs; run git lfs pull"
    return ""


def trouble_with_data(path: Path) -> str:
    """Return why the rows of a file or a folder cannot be read, or "" if no reason is found."""
    if path.is_file():
        if path.suffix in (".jsonl", ".parquet"):
            return trouble_with_files(path)
        return trouble_with_files(path) or "rows are read from .jsonl and .parquet files"
    if snapshots := sorted(path.glob("snapshots/*")):
        return f"it is a folder of the Hub's cache; its files are in {snapshots[-1]}"
    files = [file for file in sorted(path.rglob("*")) if file.suffix in (".jsonl", ".parquet")]
    return trouble_with_files(*files)


def trouble_with_model(path: str | Path) -> str:
    """Return why a folder does not have a complete model, and what to do, or "" if it may have."""
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
    adapter = path / "adapter_config.json"
    if adapter.exists() and not any(path.glob("model*.safetensors")):
        base = json.loads(adapter.read_text("utf-8")).get("base_model_name_or_path")
        return f"it is an adapter of {base}; merge it into that (peft's merge_and_unload) and save"
    for below in ("", "*/", "*/*/", "*/*/*/"):  # such as model/, checkpoint-9/, the Hub's cache
        if configs := sorted(path.glob(f"{below}config.json"), key=number_of):
            return below and f"it has no config.json; its model is in {configs[-1].parent}"
    return "it has no config.json, so it is not the folder of a model"


def not_there(flag: str, path: str) -> str:
    """Return why a flag's path does not exist, or "" if it exists or may be on the Hub."""
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
    """Return what is wrong with a flag's path, or "" if nothing is found."""
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
    """Return a line for each path in the words of a command that does not exist.

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
