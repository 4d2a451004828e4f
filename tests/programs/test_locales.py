"""Programs where the locale knows ASCII alone: they write UTF-8, and print the rest escaped."""

import json
import os
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


def run_all(commands, folder):
    """What programs print one after another, which is ASCII."""
    words = []
    for name, *options in commands:
        words += [REPO / "scripts" / name, *options, "END"]
    result = subprocess.run(
        [sys.executable, "-c", RUN_ALL, *words],
        cwd=folder,
        env=environment(ASCII | {"HF_HUB_OFFLINE": "1", "COLUMNS": "200"}),
        capture_output=True,
    )
    assert result.returncode == 0, result.stderr.decode()[-2000:]
    return result.stdout.decode("ascii")


def escaped(text):
    return text.encode("ascii", "backslashreplace").decode()


def test_runs_and_rows_are_read_shown_and_drawn(tmp_path):
    """Also where the folder's name is no UTF-8 but, as on an old disk, bytes of Latin-1."""
    import pyarrow.parquet

    run = write_run(tmp_path / "été")
    old = write_run(tmp_path / os.fsdecode(b"\xe9t\xe9"))
    rows = [{"question": f"{NAME} ?", "answer": "#### 2"}, {"question": "é", "answer": "é"}]
    path = write_rows(tmp_path / "données" / "train.jsonl", rows)
    options = ["--local_dataset_path", path.parent, "--local_save_dir", tmp_path / "prêt"]
    commands = [["push_to_hub.py", run, "--dry_run"], ["data_preprocess/gsm8k.py", *options]]
    for folder in (old, run):
        commands += [["report.py", folder], ["plot_runs.py", folder], ["inspect_run.py", folder]]
    said = run_all(commands, tmp_path)
    assert f"# {escaped(NAME)}\n" in said and "1 kept" in said
    shown = said.rpartition("curves.png")[2]
    assert escaped(NAME) in shown and escaped("« deux »…") in shown
    assert (run / "curves.png").exists() and (old / "curves.png").exists()
    page = (run / "report.html").read_text("utf-8")
    assert NAME in page and "été" in page and "précis" in page
    (row,) = pyarrow.parquet.read_table(tmp_path / "prêt" / "train.parquet").to_pylist()
    assert row["prompt"][0]["content"].startswith(NAME)


def test_card_has_no_half_of_a_character(tmp_path):
    """As in a name that was cut: no file can hold it."""
    import push_to_hub

    card = push_to_hub.gather(tmp_path, "half \ud83d, été")["README.md"]
    assert card.decode() == "half ?, été"


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
