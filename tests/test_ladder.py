"""The rungs from turns to refilled batches: scripts/benchmark/ladder.py."""

import json

import ladder
import pytest
from helpers import REPO
from transformers import AutoTokenizer, GenerationConfig

import grpo_vllm_async as script


@pytest.fixture(scope="module")
def folder(git, assets, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ladder")
    ladder.prepare_all(folder)
    return folder


def test_no_response_stops_before_its_drawn_length(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")

    class model:
        generation_config = GenerationConfig.from_pretrained(folder / "model")
        config = script.AutoConfig.from_pretrained(folder / "model")

    (stop_token,) = script.find_stop_tokens(script.Args(), tokenizer, model)
    assert tokenizer.convert_ids_to_tokens(stop_token) == "<|unknown|>"


@pytest.mark.parametrize("name", sorted({name for name, _ in ladder.RUNGS.values()}))
def test_each_rung_is_a_script_whose_steps_rows_and_lengths_are_those_of_the_cell(folder, name):
    text = (folder / name).read_text()
    compile(text, name, "exec")
    for part in ("llm.llm_engine.step = take_long", "forward_all = lasting(", "drawn_length(seed"):
        assert part in text.replace("drawn_length(response.seed", "drawn_length(seed"), part
    assert (ladder.EXTRA in text) == (name == "old_pass.py")


def test_tables_in_the_docs_are_of_the_committed_lines_and_can_be_drawn(tmp_path):
    text = (REPO / "docs/ladder.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert len(ladder.fastest(lines)) == 72
    assert ladder.tables(lines).strip() in (REPO / "docs/forks.md").read_text()
    ladder.draw(lines, tmp_path / "ladder.png")
    assert (tmp_path / "ladder.png").stat().st_size > 10_000
