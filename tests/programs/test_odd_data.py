"""Test scripts/internal/data_warnings.py, and how the preflight tries a reward."""

import json
import re
from types import SimpleNamespace

import preflight
import pytest
from internal import data_warnings
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import grpo_vllm_async as script

TAGS = ["<think>", "</think>", "<answer>", "</answer>"]


def byte_tokenizer(template=None, special=()):
    """Return a tokenizer that can write any text, with these special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, normalized=False) for token in ["<end>", *special]])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>")
    tokenizer.chat_template = template
    return tokenizer


def make_run(tokenizer, prompts=(), rule=None, **args):
    """Return a Run of GRPO with these prompts. compute_score calls rule(text, truth)."""
    args = script.Args(**args)
    args.stop_token_ids = (tokenizer.eos_token_id,)
    run = SimpleNamespace(script=script, args=args, tokenizer=tokenizer, warnings=[], answers={})
    run.train_rows, run.format = list(prompts), ""
    if rule:
        scores = {"compute_score": lambda source, text, truth: float(rule(text, truth))}
        run.script = SimpleNamespace(**vars(script) | scores)
    return run


def make_prompts(truths, text="Q", source="mine"):
    return [
        script.Prompt(f"d.jsonl, row {n}", text, [1], source, truth, None)
        for n, truth in enumerate(truths)
    ]


# ---------------------------------------------------------------- how the template renders a row

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
FULL = {
    "prompt": [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "Q", "name": "Ann"},
        {"role": "assistant", "content": "Let me see", "tool_calls": [CALL]},
        {"role": "tool", "content": "2", "tool_call_id": "x1"},
        {"role": "user", "content": [{"type": "text", "text": "So?"}]},
    ],
    "tools": [{"type": "function", "function": {"name": "add"}}],
    "chat_template_kwargs": {"enable_thinking": True, "effort": "low", "budget": 10},
}
# A piece of a template for each input of the row, by the input's name in the note. The row's
# switches have the template's defaults
WRITERS = {
    "message of the 'system'": "{% if m.role == 'system' %}{{ m.content }}{% endif %}",
    "message of the 'user'": "{% if m.role == 'user' %}{{ m.content }}{% endif %}",
    "message of the 'assistant'": "{% if m.role == 'assistant' %}{{ m.content }}{% endif %}",
    "message of the 'tool'": "{% if m.role == 'tool' %}{{ m.content }}{% endif %}",
    "`name` of a message of the 'user'": "{{ m.name }}",
    "`tool_calls` of a message of the 'assistant'": "{{ m.tool_calls | tojson if m.tool_calls }}",
    "`tools`": "{{ tools | tojson }}",
    "`enable_thinking` of": "{{ 'no thoughts' if enable_thinking is false }}",
    "`effort` of": "{{ raise_exception('which?') if effort | default('low') != 'low' }}",
    "`budget` of": "{{ budget | default(10) }}",
}


@pytest.mark.parametrize("left_out", [None, *WRITERS])
def test_input_that_the_template_leaves_out_is_noted_and_nothing_else(left_out):
    body = "|".join(text for name, text in WRITERS.items() if name != left_out)
    tokenizer = byte_tokenizer("{% for m in messages %}<{{ m.role }}>" + body + "{% endfor %}")
    later = FULL | {"tools": None}  # a row of another kind
    notes = data_warnings.notes_on_traces(make_run(tokenizer), "d.jsonl", [later, FULL])
    if left_out in ("message of the 'system'", "message of the 'user'"):
        with pytest.raises(data_warnings.Mistake, match=f"leaves out the {left_out}"):
            list(notes)
        return
    assert [left_out in note for note in notes] == [True] * (left_out is not None)


def test_prompt_that_ends_in_a_space_is_noted_as_the_model_reads_it():
    """The space is in the text of a row, or at the end of the chat template."""
    asked = [{"role": "user", "content": "Q"}]
    for text, is_noted in (("A: ", True), ("A:\t", True), ("A:\n", False), ("A:", False)):
        tokenizer = byte_tokenizer("{{ messages[0].content }}")
        rows = [{"prompt": text}, {"prompt": asked}]
        notes = list(data_warnings.notes_on_ends(make_run(tokenizer), "d", rows))
        assert ["row 0 (one of 1 in 2)" in note for note in notes] == [True] * is_noted
    tokenizer = byte_tokenizer("{{ messages[0].content }}\nAnswer: ")
    (note,) = data_warnings.notes_on_ends(make_run(tokenizer), "d", [{"prompt": asked}])
    assert "row 0 (one of 1 in 1): the prompt ends in a space" in note


# ---------------------------------------------------------------------- scores of tried answers

FORM = r"(?s)<think>.*</think>\s*<answer>(.*)</answer>"


def in_box(text, truth):
    return f"\\boxed{{{truth}}}" in text


# A rule and a ground truth, the scores of that truth bare, in a box and in the R1 format, and words
# of the note
OF_TESTS, BOX, POOR = (
    '{"inputs": ["1"], "outputs": ["2"]}',
    in_box,
    "scores no more than an incorrect",
)
RULES = [
    (lambda text, truth: truth in text, "16", (1, 1, 1), ""),
    (in_box, "16", (0, 1, 0), ""),
    (lambda text, truth: bool(re.fullmatch(FORM, text)) and truth in text, "16", (0, 0, 1), ""),
    (lambda text, truth: 0.5 * (truth in text), "16", (0.5, 0.5, 0.5), "scores less than 1"),
    (lambda text, truth: truth in text, '["16"]', (0, 0, 0), f"'16', bare, | {POOR}"),
    (lambda text, truth: str(truth) in text, [16], (0, 0, 0), f"'16', bare, | {POOR}"),
    (lambda text, truth: json.loads(truth)[0] in text, '["16"]', (1, 1, 1), ""),
    (lambda text, truth: text == "print(2)", OF_TESTS, (0, 0, 0), "Ignore this for test cases"),
    (lambda text, truth: True, "16", (1, 1, 1), POOR),
    (lambda text, truth: not text, "16", (0, 0, 0), POOR),
    (lambda text, truth: "45" in text, "4<end>5", (0, 0, 0), POOR),  # a stop token truncates it
]


@pytest.mark.parametrize("number", range(len(RULES)))
def test_answers_that_should_be_correct_are_scored_as_in_the_run(number):
    rule, truth, expected, words = RULES[number]
    prompts = make_prompts([truth, truth])
    run = make_run(byte_tokenizer(), prompts, rule)
    sources = preflight.try_reward(run, None, prompts)
    assert run.answers["mine"][:3] == expected
    assert sources == ({"mine"} if max(expected[:2]) > run.answers["mine"][4] else set())
    notes = " ".join(run.warnings)
    assert bool(words) == bool(notes) and all(word in notes for word in words.split(" | "))


ENDS = ["", "<think>", "<think>\n", "<think>\n\n</think>\n\n", "<think></think><answer>"]


@pytest.mark.parametrize("stop_token", [None, "</think>", "</answer>"])
@pytest.mark.parametrize("special", [[], TAGS])
def test_r1_format_that_cannot_be_rewarded_is_noted(special, stop_token):
    """The template writes more of it than `<think>`, or a part of it is a stop token."""
    tokenizer = byte_tokenizer(special=special)
    for end in ENDS:
        prompts = make_prompts(["4"], f"Q\nA: {end}")
        run = make_run(tokenizer, prompts, add_r1_style_format_reward=True)
        if stop_token and special:
            run.args.stop_token_ids += (tokenizer.convert_tokens_to_ids(stop_token),)
        preflight.check_format(run)
        is_lost = "</think>" in end or bool(stop_token and special)
        assert ["does not get" in note for note in run.warnings] == [True] * is_lost
        assert run.format == f"{1 - is_lost} of 1 prompts"
