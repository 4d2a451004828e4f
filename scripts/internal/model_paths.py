"""What a path is that a user gave for a model, in words; preflight.py and evaluate.py say it."""

import json
import re
from pathlib import Path

POINTER = b"version https://git-lfs"
HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


def may_be_on_the_hub(path: str | Path) -> bool:
    """Whether a path is not here, and could be a name of the hub.

    >>> [may_be_on_the_hub(path) for path in ("Qwen/Qwen3-0.6B", "./a/b", "runs/a/model", "/")]
    [True, False, False, False]
    """
    return not Path(path).exists() and bool(HUB_NAME.fullmatch(str(path).rstrip("/")))


def number_of(folder: Path) -> int:
    return int(re.sub(r"\D", "", folder.name) or 0)


def trouble_with_model(path: str | Path) -> str:
    """Why this is no folder of a whole model, and what to do; "": a look tells nothing."""
    path = Path(path).expanduser()
    if may_be_on_the_hub(path):
        return ""
    if not path.exists():
        return "no such folder"
    if path.is_file():
        return f"it is a file; give the folder of a model in Hugging Face format, {path.parent}"
    if (path / "adapter_config.json").exists() and not any(path.glob("model*.safetensors")):
        base = json.loads((path / "adapter_config.json").read_text("utf-8"))
        base = base.get("base_model_name_or_path")
        return f"it is an adapter of {base}; merge it into that (peft's merge_and_unload) and save"
    weights = [*path.glob("*.safetensors")] or [*path.glob("*.bin")]
    for file in [*weights, *path.glob("*.json")]:
        with file.open("rb") as opened:
            if opened.read(len(POINTER)) == POINTER:
                return f"{file.name} is a pointer of git-lfs and not the file; run git lfs pull"
    below = [path / "model", *sorted(path.glob("checkpoint-*"), key=number_of)]
    below = [folder for folder in below if (folder / "config.json").exists()]
    if below and not (path / "config.json").exists():
        return f"it has no config.json; its model is in {below[-1]}"
    return ""
