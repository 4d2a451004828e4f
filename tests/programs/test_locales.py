"""Programs where the locale knows ASCII alone: they write UTF-8, and print the rest escaped."""

import json
import subprocess
import sys

import pytest
import test_hub
import test_report
from helpers import REPO
from helpers.files import write_rows, write_text
from helpers.processes import environment

pytestmark = pytest.mark.slow

ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
NAME = "Größe “ça” 模型"


def write_run(folder):
    """A run whose files hold such texts, escaped by JSON and not, as a fork may write them."""
    provenance = test_hub.MADE | {"command": ["ppo_sync.py", "--run_name", NAME]}
    args = test_report.ARGS | test_hub.ARGS | {"run_name": NAME, "provenance": provenance}
    metrics = [line | {"objective/reward/précis\u2028": 0.5} for line in test_report.metrics_of(12)]
    rows = [test_report.response(12, "C'est « deux »…", prompt="été\u2028\x85 = ?")]
    samples = [test_report.answer(1, 0, False, prompt=NAME)]
    write_text(folder / "args.json", json.dumps(args))
    write_text(folder / "model/config.json", '{"model_type": "qwen2"}')
    write_text(folder / "model/tokenizer.json", test_report.byte_tokenizer().to_str())
    for path, lines in {"metrics": metrics, "rollouts": rows, "samples": samples}.items():
        texts = (json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        (folder / f"{path}.jsonl").write_text("".join(texts), encoding="utf-8")
    return folder


# One program after another, as if each were started
RUN_ALL = f"""import runpy, sys
sys.path.insert(0, {str(REPO / "scripts")!r})
words = sys.argv[1:]
while words:
    end = words.index("END")
    sys.argv, words = words[:end], words[end + 1 :]
    sys.stdout.reconfigure(errors="strict")
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
"""


def test_runs_and_rows_are_read_shown_and_drawn(tmp_path):
    import pyarrow.parquet

    run, words = write_run(tmp_path / "été"), []
    path = write_rows(
        tmp_path / "données" / "train.jsonl", [{"question": NAME, "answer": "#### 2"}]
    )
    options = ["--local_dataset_path", path.parent, "--local_save_dir", tmp_path / "prêt"]
    commands = [["push_to_hub.py", run, "--dry_run"], ["data_preprocess/gsm8k.py", *options]]
    commands += [[f"{name}.py", run] for name in ("report", "plot_runs", "inspect_run")]
    for name, *rest in commands:
        words += [REPO / "scripts" / name, *rest, "END"]
    env = environment(ASCII | {"HF_HUB_OFFLINE": "1", "COLUMNS": "200"})
    command = [sys.executable, "-c", RUN_ALL, *words]
    said = subprocess.check_output(command, cwd=tmp_path, env=env).decode("ascii")
    name, two = (text.encode("ascii", "backslashreplace").decode() for text in (NAME, "« deux »…"))
    shown = said.rpartition("curves.png")[2]
    assert f"# {name}\n" in said and name in shown and two in shown
    page = (run / "report.html").read_text("utf-8")
    assert NAME in page and "été" in page and "précis" in page
    (row,) = pyarrow.parquet.read_table(tmp_path / "prêt" / "train.parquet").to_pylist()
    assert row["prompt"][0]["content"].startswith(NAME)


def test_script_gets_past_texts_that_a_terminal_does_not_know(assets, tmp_path):
    """Prompts are counted and shown before a model is loaded, which is not there."""
    row = {"prompt": "été=", "data_source": "debug/sorting", "ground_truth": "1"}
    data = write_rows(tmp_path / "data.jsonl", [row])
    command = [sys.executable, REPO / "ppo_sync.py", "--dataset", data, "--run_name", "a"]
    command += ["--model_name_or_path", tmp_path / "none", "--output_dir", tmp_path]
    command += ["--tokenizer_name_or_path", assets / "model"]
    result = subprocess.run(command, env=environment(ASCII), capture_output=True, cwd=tmp_path)
    assert rb"loses: t\xe9" in result.stdout, result.stderr[-2000:]
    assert b"UnicodeEncodeError" not in result.stderr
