"""What is odd about the rows of a dataset, and about the chat template that renders them.

scripts/preflight.py says it. Each function takes its Run and yields notes, a line each; a Mistake
tells what is surely not meant. Rows are the dictionaries that the script has read, as plain values.
"""

import inspect
import re
import unicodedata
from pathlib import Path


class Mistake(Exception):
    """What is wrong, where, and what to do."""


# A text that is a list of messages, as JSON or as Python writes it
WRITTEN_MESSAGES = re.compile(r"""\s*\[\s*\{\s*['"](role|content)['"]\s*:.*\}\s*\]\s*""", re.DOTALL)
QUESTION = {"role": "user", "content": "Q"}
ANSWER = {"role": "assistant", "content": "ANSWER"}


def prompt_of(row):
    """What the script renders or takes as it is. In pairs the prompt may begin the dialogues."""
    return row.get("messages") or row.get("prompt") or row.get("chosen")


def messages_of(row):
    """The messages of a prompt; none: it is a text."""
    prompt = prompt_of(row)
    return prompt if isinstance(prompt, list) else []


# Names of files that say a split
SPLITS = re.compile(r"(?<![a-z])(train|test|val|valid|validation|dev|eval)(?![a-z])", re.IGNORECASE)
# Columns of other formats that hold a part of what the model is to read
OF_PROMPTS = ("images", "image", "videos", "video", "audio", "system", "system_prompt")
OF_PROMPTS += ("instruction", "input", "history", "context")


def notes_on_rows(run, path, rows, loaded):
    """What is odd about the rows of a dataset, of which the script has made what is loaded."""
    yield from notes_on_messages(run, path, rows)
    yield from notes_on_traces(run, path, rows)
    yield from notes_on_columns(run, path, rows)
    yield from notes_on_ends(run, path, rows)
    if run.trains_reward_model():
        yield from notes_on_pairs(path, rows)
    else:
        texts = {prompt.origin: prompt.text for prompt in loaded}
        distinct = len({tuple(prompt.token_ids) for prompt in loaded})
        if distinct < len(loaded):
            are = "all are equal" if distinct == 1 else f"{distinct:,} are distinct"
            yield f"{path}: of {len(loaded):,} prompts {are}, as the model reads them"
        check_words(run.tokenizer, path, loaded)
        yield from notes_on_characters(run.tokenizer, "prompt", texts)


def check_words(tokenizer, path, prompts):
    """Raise a Mistake if the tokenizer loses most words of the prompts, or the spaces between them.

    transformers loads some tokenizers by the rules of another kind, which have no spaces.
    """
    tried = prompts[:: len(prompts) // 200 + 1]
    words = sum(len(prompt.text.split()) for prompt in tried)
    kept_words = sum(len(tokenizer.decode(prompt.token_ids).split()) for prompt in tried)
    if kept_words < words / 2:
        raise Mistake(
            f"{path}: the tokenizer loses most words, or the spaces between them; if transformers "
            f"issue 48206 is the cause, set tokenizer_class to TokenizersBackend in its "
            f"tokenizer_config.json"
        )


def notes_on_files(folder, split):
    """Note files of a local folder that could hold rows, and that the script does not read.

    Files of other splits are left out, and so are hidden ones.
    """
    folder = Path(folder)
    if not folder.is_dir() or (folder / "state.json").exists():
        return
    kinds = re.compile(r"\.(arrow|csv|jsonl?|ndjson|parquet|tsv|txt)(\.\w+)?$", re.IGNORECASE)
    names = sorted(str(file.relative_to(folder)) for file in folder.rglob("*"))
    names = [name for name in names if kinds.search(name) and "/." not in f"/{name}"]
    read = [name for name in names if name.endswith((".jsonl", ".parquet"))]
    if any("train" in name or "test" in name for name in read):
        read = [name for name in read if split in name]
    others = [name for name in names if name not in read]
    others = [name for name in others if not SPLITS.search(name) or (split and split in name)]
    page = folder / "README.md"
    if page.exists() and "config_name:" in page.read_text("utf-8", errors="replace"):
        yield f"{folder}: the rows of all configurations are read; see --dataset_config"
    if others:
        yield (
            f"{folder}: {len(others):,} files that may hold rows are not read, first {others[0]}; "
            f"rows are read from .jsonl and .parquet, by the split if any name has train or test"
        )


def notes_on_lost_rows(path, lengths, flag, limit):
    """Rows that are dropped, if they are more than a tenth. lengths: of all rows, in tokens."""
    num_empty = lengths.count(0)
    too_long = [length for length in lengths if length > limit]
    if num_empty + len(too_long) > len(lengths) / 10:
        keeps = f"; --{flag} {max(too_long)} would keep those" if too_long else ""
        yield (
            f"{path}: of {len(lengths):,} rows {num_empty:,} are dropped as empty, and "
            f"{len(too_long):,} as longer than --{flag} {limit}{keeps}"
        )


def notes_on_columns(run, path, rows):
    """Columns that look as if the model would see them."""
    for name in OF_PROMPTS:
        is_there = any(row.get(name) and str(row[name]) not in str(prompt_of(row)) for row in rows)
        if is_there and f'"{name}"' not in inspect.getsource(run.script):
            yield f"{path}: nobody reads the column {name}: the model reads the prompt alone"
    texts = sum(isinstance(prompt_of(row), str) for row in rows)
    if texts and run.tokenizer.chat_template:
        yield (
            f"{path}: {texts:,} of {len(rows):,} prompts are texts, which the chat template does "
            f"not render: right for texts to go on with; a question is to be messages"
        )


def notes_on_ends(run, path, rows):
    """Tokens that the tokenizer adds at the beginning or the end of a text; a space at its end."""
    tokenizer, found, spaces = run.tokenizer, {}, []
    tried = range(0, len(rows), len(rows) // 200 + 1)  # what is added is added to each
    for index in tried:
        row, prompt = rows[index], prompt_of(rows[index])
        text, ids = run.script.tokenize_prompt(prompt, row, tokenizer)
        if text.endswith((" ", "\t", "\u00a0")):
            spaces.append(index)
        if len(ids) > 1 and ids[0] == ids[1] == tokenizer.bos_token_id:
            found.setdefault((ids[0], "a second time at its beginning"), []).append(index)
        if isinstance(prompt, str) and ids:
            plain = tokenizer(prompt, add_special_tokens=False)["input_ids"]
            if plain and ids[-1] != plain[-1]:
                found.setdefault((ids[-1], "at its end"), []).append(index)
    for (token_id, where), indices in found.items():
        yield (
            f"{path}, row {indices[0]}, and so {len(indices):,} of {len(tried):,} that were tried: "
            f"the tokenizer adds {tokenizer.convert_ids_to_tokens(token_id)!r} {where}; give "
            f"messages, or one that does not"
        )
    if spaces:
        yield (
            f"{path}, row {spaces[0]}, and so {len(spaces):,} of {len(tried):,} that were tried: "
            f"the prompt ends in a space, as the model reads it. Most models have learned a space "
            f"as a part of the next word's token, so end prompts without one"
        )


def notes_on_pairs(path, rows):
    """Texts of pairs that hold the prompt once more; pairs that say nothing, or the contrary."""
    both = [(row.get("prompt"), row.get("chosen"), row.get("rejected")) for row in rows]
    texts = [each for each in both if all(isinstance(text, str) for text in each)]
    again = [p for p, a, b in texts if p.strip() and a.startswith(p) and b.startswith(p)]
    if again:
        yield (
            f"{path}: {len(again):,} of {len(rows):,} responses begin with their prompt, which is "
            f"read twice then; the columns are the prompt, and what follows it"
        )
    both = [tuple(map(str, each)) for each in both]
    known = set(both)
    turned = sum((p, b, a) in known for p, a, b in both if a != b)
    if turned:
        yield f"{path}: {turned:,} pairs are there in both orders, which teaches nothing"


def other_value(value):
    """Return a value of the same type for a switch; for a list or a dictionary None."""
    match value:
        case bool():
            return not value
        case int() | float():
            return value + 1
        case str():
            return value + "?"


def what_is_given(row):
    """Yield (name, is_content, others) for each thing that a row gives to the chat template.

    others: rows without it. A content is not taken away but made longer, because templates may
    refuse a message without one. A switch has a second other row with another value, because the
    row may have the value that is the template's default. An answer that ends the messages is not
    given, and few templates write the id of a tool's answer.
    """
    column = next(name for name in ("messages", "prompt", "chosen") if row.get(name))
    messages = row[column]
    for number, message in enumerate(messages):
        role = message["role"]
        if role == "assistant" and number == len(messages) - 1:
            continue
        for name in message.keys() - {"role", "tool_call_id"}:
            value = message[name]
            other = {key: message[key] for key in message if key != name}
            if name == "content":
                more = "?" if isinstance(value, str) else [{"type": "text", "text": "?"}]
                other["content"] = value + more
            if value:
                others = [row | {column: [*messages[:number], other, *messages[number + 1 :]]}]
                what = "message" if name == "content" else f"`{name}` of a message"
                yield f"the {what} of the {role!r}", name == "content", others
    if row.get("tools"):
        yield "the `tools`", False, [row | {"tools": None}]
    switches = row.get("chat_template_kwargs") or {}
    for name, value in switches.items():
        without = {key: switches[key] for key in switches if key != name}
        changed = switches | {name: other_value(value)}
        others = [row | {"chat_template_kwargs": each} for each in (without, changed)]
        yield f"`{name}` of `chat_template_kwargs`", False, others


def notes_on_traces(run, path, rows):
    """Things that a row gives to the chat template, and that leave no trace in the text.

    Each is taken away once from a row of each kind, and the text must change. Rows are of one kind
    if they have the same roles, columns and keys, with values of the same types, and the same ones
    are empty. If what a user or a system message says leaves no trace, that is a Mistake; of an
    older answer, a tool's answer and all else it is a note.
    """

    def render(row):
        return run.script.tokenize_prompt(prompt_of(row), row, run.tokenizer)[0]

    def leaves_no_trace(others, text):
        try:
            return all(render(other) == text for other in others)
        except Exception:  # so the template has looked at it
            return False

    def kind_of(value):
        return type(value).__name__, bool(value)

    kinds, unread = {}, {}
    for index, row in enumerate(rows):
        if messages := messages_of(row):
            switches = row.get("chat_template_kwargs") or {}
            keys = [(m["role"], *((key, *kind_of(m[key])) for key in sorted(m))) for m in messages]
            keys += [(name, *kind_of(switches[name])) for name in sorted(switches)]
            kinds.setdefault((bool(row.get("tools")), *keys), (index, row))
    for index, row in kinds.values():
        text = render(row)
        if not text:  # a row whose user says nothing, which is dropped
            continue
        for name, is_content, others in what_is_given(row):
            if leaves_no_trace(others, text):
                may_be_left_out = not is_content or name.endswith(("'assistant'", "'tool'"))
                if not may_be_left_out:
                    raise Mistake(f"{path}, row {index}: the chat template leaves out {name}")
                unread.setdefault(name, index)
    for name, index in unread.items():
        yield (
            f"{path}, row {index}: the chat template leaves out {name}: without it the text is the "
            f"same"
        )


def notes_on_messages(run, path, rows):
    """Messages that the chat template does not take as they are meant."""
    tokens = [token for token in run.tokenizer.added_tokens_decoder.values() if token.special]
    special = re.compile("|".join(re.escape(token.content) for token in tokens) or "(?!)")
    rendered, prefills = {}, 0
    for index, row in enumerate(rows):
        prompt, messages = prompt_of(row), messages_of(row)
        if isinstance(prompt, str) and WRITTEN_MESSAGES.fullmatch(prompt):
            raise Mistake(
                f"{path}, row {index}: the prompt is the text of a list of messages; write the "
                f"list itself"
            )
        prefills += bool(messages) and messages[-1]["role"] == "assistant"
        contents = [message.get("content") for message in messages]
        texts = " ".join(content for content in contents if isinstance(content, str))
        if found := special.search(texts):
            rendered[index] = found[0]
        # Parts, such as {"type": "text", "text": ...}
        if any(isinstance(content, list) for content in contents):
            text, _ = run.script.tokenize_prompt(prompt, row, run.tokenizer)
            if any(str(content) in text for content in contents if content):
                raise Mistake(
                    f"{path}, row {index}: a content is a list of parts, and the chat template "
                    f"writes it as such, brackets and all; write the text itself"
                )
    if prefills and not run.trains_reward_model():
        yield (
            f"{path}: {prefills:,} of {len(rows):,} prompts end with a message of the assistant, "
            f"an answer or the beginning of one, which is left out"
        )
    for index, token in [*rendered.items()][:1]:
        yield (
            f"{path}, row {index}, and so {len(rendered):,} of {len(rows):,}: the content of a "
            f"message has the special token {token}; was it rendered already? Then it is a turn "
            f"within a turn"
        )


def notes_on_held_out(run):
    """Held-out prompts that are trained on."""
    if run.trains_reward_model():
        return
    prompts = run.eval_rows
    trained = {tuple(prompt.token_ids) for prompt in run.train_rows}
    count = sum(tuple(prompt.token_ids) in trained for prompt in prompts)
    if count:
        yield f"{count:,} of the {len(prompts):,} held-out prompts are trained on"


def notes_on_characters(tokenizer, name, texts):
    """Characters that a tokenizer loses. texts: by file and row, each of a row's `name`."""
    texts = {origin: unicodedata.normalize("NFC", text) for origin, text in texts.items()}
    alphabet = set().union(*texts.values())
    kept = tokenizer.decode(tokenizer(" ".join(sorted(alphabet)))["input_ids"])
    suspects, lost = alphabet - set(kept), {}  # special tokens are made of others than they are
    for origin, text in texts.items():
        if not suspects.isdisjoint(text):
            kept = tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"])
            lost[origin] = (suspects & set(text)) - set(kept)
    rows = [origin for origin in lost if lost[origin]]
    if rows:
        characters = "".join(sorted(set().union(*lost.values())))
        yield (
            f"{rows[0]}, and so {len(rows):,} of {len(texts):,}: the tokenizer loses characters of "
            f"the {name}, of all together {characters[:40]!r}"
        )


def notes_on_template(run, rows, stop_ids):
    """What the chat template writes before and after an answer."""
    row = next(filter(messages_of, rows), None)
    if row is None:
        return

    def render(*messages, **options):
        options |= row.get("chat_template_kwargs") or {}
        return run.tokenizer.apply_chat_template(messages, tokenize=False, **options)

    try:
        plain, asked = (render(QUESTION, add_generation_prompt=is_on) for is_on in (False, True))
        answered = render(QUESTION, ANSWER)
    except Exception:  # a template may want other messages
        return
    before, found, after = answered.partition("ANSWER")
    if not found:
        return
    # Without a generation prompt, what stands before an answer is the model's to write
    missing = before.removeprefix(asked).strip()
    if plain == asked and before.startswith(asked) and missing:
        yield (
            f"the chat template has no generation prompt: the model itself has to begin its turn "
            f"with {missing!r}"
        )
    token_ids = run.tokenizer(after.strip(), add_special_tokens=False)["input_ids"]
    if not token_ids:
        yield "the chat template writes nothing after an answer: no token says that it ends"
    elif token_ids[0] not in stop_ids:
        token = run.tokenizer.convert_ids_to_tokens(token_ids[0])
        yield (
            f"the chat template ends an answer with {token!r}, which is no stop token: a response "
            f"would go on; add --stop_token '{token}', or see --chat_template"
        )
