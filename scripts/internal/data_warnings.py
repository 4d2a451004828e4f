"""Find what looks wrong in the rows of a dataset, and in the chat template that renders them.

scripts/preflight.py prints the results. Most functions take its Run and yield notes of one line. A
Mistake is raised for what cannot be intended. Rows are the dictionaries that the script has read.
"""

import inspect
import re
import unicodedata
from pathlib import Path


class Mistake(Exception):
    """Say what is wrong, where, and what to do."""


# A text that is a list of messages, in JSON or in Python's notation
WRITTEN_MESSAGES = re.compile(r"""\s*\[\s*\{\s*['"](role|content)['"]\s*:.*\}\s*\]\s*""", re.DOTALL)
QUESTION = {"role": "user", "content": "Q"}
ANSWER = {"role": "assistant", "content": "ANSWER"}
# Words in the name of a file that identify its split
SPLITS = re.compile(r"(?<![a-z])(train|test|val|valid|validation|dev|eval)(?![a-z])", re.IGNORECASE)
# Columns of other formats that hold a part of the prompt
PROMPT_COLUMNS = ("images", "image", "videos", "video", "audio", "system", "system_prompt")
PROMPT_COLUMNS += ("instruction", "input", "history", "context")


def prompt_of(row):
    """Return what the script renders or uses as it is. In a pair it may begin both dialogues."""
    return row.get("messages") or row.get("prompt") or row.get("chosen")


def messages_of(row):
    """Return the messages of a prompt, or no messages if the prompt is a text."""
    prompt = prompt_of(row)
    return prompt if isinstance(prompt, list) else []


def first_of(path, indices, number):
    """Name the first of some rows, and say how many they are.

    >>> first_of("data.jsonl", [1, 3, 5], 70)
    'data.jsonl, row 1 (one of 3 in 70)'
    """
    return f"{path}, row {indices[0]} (one of {len(indices):,} in {number:,})"


def notes_on_rows(run, path, rows, loaded):
    """Yield notes on the rows of a dataset, from which the script has made what is `loaded`."""
    yield from notes_on_messages(run, path, rows)
    yield from notes_on_traces(run, path, rows)
    yield from notes_on_columns(run, path, rows)
    yield from notes_on_ends(run, path, rows)
    if run.trains_reward_model():
        yield from notes_on_pairs(path, rows)
        return
    distinct = len({tuple(prompt.token_ids) for prompt in loaded})
    if distinct < len(loaded):
        are = "all are equal" if distinct == 1 else f"{distinct:,} are distinct"
        yield f"{path}: of {len(loaded):,} prompts {are}, as the model reads them"
    check_words(run.tokenizer, path, loaded)
    texts = {prompt.origin: prompt.text for prompt in loaded}
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
    """Note files of a local folder that could hold rows but are not read, except other splits."""
    folder = Path(folder)
    if not folder.is_dir():
        return
    suffixes = re.compile(r"\.(arrow|csv|jsonl?|ndjson|parquet|tsv|txt)(\.\w+)?$", re.IGNORECASE)
    names = sorted(str(file.relative_to(folder)) for file in folder.rglob("*"))
    is_hidden = re.compile(r"(^|/)\.")
    names = [name for name in names if suffixes.search(name) and not is_hidden.search(name)]
    read = [name for name in names if name.endswith((".jsonl", ".parquet"))]
    if any("train" in name or "test" in name for name in read):
        read = [name for name in read if split in name]
    unread = [name for name in names if name not in read]
    unread = [name for name in unread if not SPLITS.search(name) or (split and split in name)]
    if unread:
        yield (
            f"{folder}: {len(unread):,} files that may hold rows are not read, first {unread[0]}; "
            f"rows are read from .jsonl and .parquet, by the split if any name has train or test"
        )


def notes_on_lost_rows(path, lengths, flag, limit):
    """Note dropped rows if they are more than a tenth. `lengths` has the tokens of all rows."""
    num_empty = lengths.count(0)
    too_long = [length for length in lengths if length > limit]
    if num_empty + len(too_long) > len(lengths) / 10:
        keeps = f"; --{flag} {max(too_long)} would keep those" if too_long else ""
        yield (
            f"{path}: of {len(lengths):,} rows {num_empty:,} are dropped as empty, and "
            f"{len(too_long):,} as longer than --{flag} {limit}{keeps}"
        )


def notes_on_columns(run, path, rows):
    """Note columns that the model does not see although they look like a part of the prompt."""
    for name in PROMPT_COLUMNS:
        is_there = any(row.get(name) and str(row[name]) not in str(prompt_of(row)) for row in rows)
        if is_there and f'"{name}"' not in inspect.getsource(run.script):
            yield f"{path}: the column {name} is ignored, because the model reads only the prompt"
    num_texts = sum(isinstance(prompt_of(row), str) for row in rows)
    if num_texts and run.tokenizer.chat_template:
        yield (
            f"{path}: {num_texts:,} of {len(rows):,} prompts are texts, to which the chat template "
            f"is not applied; that is correct for text completion, but write a question as a list "
            f"of messages"
        )


def notes_on_ends(run, path, rows):
    """Note prompts that begin with two begin tokens, and prompts that end with a space."""
    bos, twice, spaces = run.tokenizer.bos_token, [], []
    tried = range(0, len(rows), len(rows) // 200 + 1)  # enough to see what happens to all
    for index in tried:
        row = rows[index]
        text, ids = run.script.tokenize_prompt(prompt_of(row), row, run.tokenizer)
        if text.endswith((" ", "\t", "\u00a0")):
            spaces.append(index)
        if len(ids) > 1 and ids[0] == ids[1] == run.tokenizer.bos_token_id:
            twice.append(index)
    if twice:
        yield (
            f"{first_of(path, twice, len(tried))}: the tokenizer adds {bos!r} a second time at the "
            f"beginning; write prompts as messages, or without this token"
        )
    if spaces:
        yield (
            f"{first_of(path, spaces, len(tried))}: the prompt ends in a space, as the model reads "
            f"it. Most models have learned a space as a part of the next word's token, so end "
            f"prompts without one"
        )


def notes_on_pairs(path, rows):
    """Note responses that repeat their prompt, and pairs that also exist in the opposite order."""
    pairs = [(row.get("prompt"), row.get("chosen"), row.get("rejected")) for row in rows]
    texts = [pair for pair in pairs if all(isinstance(text, str) for text in pair)]
    repeats = sum(bool(p.strip()) and a.startswith(p) and b.startswith(p) for p, a, b in texts)
    if repeats:
        yield (
            f"{path}: {repeats:,} of {len(rows):,} responses begin with their prompt, which the "
            f"model then reads twice; write only the response into `chosen` and `rejected`"
        )
    pairs = [tuple(map(str, pair)) for pair in pairs]
    known = set(pairs)
    turned = sum((p, b, a) in known for p, a, b in pairs if a != b)
    if turned:
        yield f"{path}: {turned:,} pairs exist in both orders, which teaches nothing"


def other_value(value):
    """Return another value of the same type for a switch, or None for a list or a dictionary."""
    match value:
        case bool():
            return not value
        case int() | float():
            return value + 1
        case str():
            return value + "?"


def template_inputs(row):
    """Yield (name, is_content, other rows) for everything that a row passes to the chat template.

    The other rows lack it. A content is made longer instead, because templates may refuse a message
    without one. A switch has a second other row with another value, because the row may have the
    value that is the template's default. Not passed are an answer that ends the messages, and the
    id of a tool's answer, which few templates write.
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


def kind_of(row):
    """Return the roles, columns and keys of a row, and the types of their values."""

    def types_in(values):
        return [(key, type(values[key]), bool(values[key])) for key in sorted(values)]

    messages = [(message["role"], *types_in(message)) for message in messages_of(row)]
    return bool(row.get("tools")), *messages, *types_in(row.get("chat_template_kwargs") or {})


def notes_on_traces(run, path, rows):
    """Find what a row passes to the chat template without a trace in the text.

    Everything is removed once from a row of each kind (kind_of), and the text must change. If the
    message of a user or of the system leaves no trace, raise a Mistake. For an older answer, a
    tool's answer and everything else, yield a note.
    """

    def render(row):
        return run.script.tokenize_prompt(prompt_of(row), row, run.tokenizer)[0]

    def leaves_no_trace(others, text):
        try:
            return all(render(other) == text for other in others)
        except Exception:  # the template has read it
            return False

    kinds, unread = {}, {}
    for index, row in enumerate(rows):
        if messages_of(row):
            kinds.setdefault(kind_of(row), (index, row))
    for index, row in kinds.values():
        text = render(row)
        if not text:  # the user's message is empty, and the script drops the row
            continue
        for name, is_content, others in template_inputs(row):
            if leaves_no_trace(others, text):
                if is_content and not name.endswith(("'assistant'", "'tool'")):
                    raise Mistake(f"{path}, row {index}: the chat template leaves out {name}")
                unread.setdefault(name, index)
    for name, index in unread.items():
        yield (
            f"{path}, row {index}: the chat template leaves out {name}, because without it the "
            f"text is the same"
        )


def notes_on_messages(run, path, rows):
    """Note messages that the chat template does not render as they are meant."""
    tokens = [token for token in run.tokenizer.added_tokens_decoder.values() if token.special]
    special = re.compile("|".join(re.escape(token.content) for token in tokens) or "(?!)")
    rendered, num_answers = {}, 0
    for index, row in enumerate(rows):
        prompt, messages = prompt_of(row), messages_of(row)
        if isinstance(prompt, str) and WRITTEN_MESSAGES.fullmatch(prompt):
            raise Mistake(
                f"{path}, row {index}: the prompt is the text of a list of messages; write the "
                f"list itself"
            )
        num_answers += bool(messages) and messages[-1]["role"] == "assistant"
        contents = [message.get("content") for message in messages]
        texts = " ".join(content for content in contents if isinstance(content, str))
        if token := special.search(texts):
            rendered[index] = token[0]
        # Parts, such as {"type": "text", "text": ...}
        if any(isinstance(content, list) for content in contents):
            text, _ = run.script.tokenize_prompt(prompt, row, run.tokenizer)
            if any(str(content) in text for content in contents if content):
                raise Mistake(
                    f"{path}, row {index}: a content is a list of parts, which the chat template "
                    f"writes with all brackets; write the text itself"
                )
    if num_answers and not run.trains_reward_model():
        yield (
            f"{path}: {num_answers:,} of {len(rows):,} prompts end with a message of the "
            f"assistant, which the script removes"
        )
    if rendered:
        indices = [*rendered]
        yield (
            f"{first_of(path, indices, len(rows))}: the content of a message has the special token "
            f"{rendered[indices[0]]}; if the messages were rendered already, write them without it"
        )


def notes_on_held_out(run):
    """Note held-out prompts that are also in the training data."""
    if run.trains_reward_model():
        return
    prompts = run.eval_rows
    trained = {tuple(prompt.token_ids) for prompt in run.train_rows}
    count = sum(tuple(prompt.token_ids) in trained for prompt in prompts)
    if count:
        yield f"{count:,} of the {len(prompts):,} held-out prompts are also in the training data"


def notes_on_characters(tokenizer, name, texts):
    """Note characters that a tokenizer loses. `texts` is {file and row: the row's `name`}."""
    texts = {origin: unicodedata.normalize("NFC", text) for origin, text in texts.items()}
    alphabet = set().union(*texts.values())
    kept = tokenizer.decode(tokenizer(" ".join(sorted(alphabet)))["input_ids"])
    # Only suspects, because special tokens may have characters that are lost elsewhere
    suspects, lost = alphabet - set(kept), {}
    for origin, text in texts.items():
        if not suspects.isdisjoint(text):
            kept = tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"])
            if characters := (suspects & set(text)) - set(kept):
                lost[origin] = characters
    if lost:
        characters = "".join(sorted(set().union(*lost.values())))
        yield (
            f"{next(iter(lost))} (one of {len(lost):,} in {len(texts):,}): the tokenizer loses "
            f"these characters of the {name}: {characters[:40]!r}"
        )


def notes_on_template(run, rows, stop_ids):
    """Note what the chat template does not write before and after an answer."""
    row = next(filter(messages_of, rows), None)
    if row is None:
        return

    def render(*messages, **options):
        options |= row.get("chat_template_kwargs") or {}
        return run.tokenizer.apply_chat_template(messages, tokenize=False, **options)

    try:
        without_prompt = render(QUESTION, add_generation_prompt=False)
        with_prompt = render(QUESTION, add_generation_prompt=True)
        answered = render(QUESTION, ANSWER)
    except Exception:  # the template may require other messages
        return
    before, has_answer, after = answered.partition("ANSWER")
    if not has_answer:
        return
    # Without a generation prompt, the model must write everything before its answer
    missing = before.removeprefix(with_prompt).strip()
    if without_prompt == with_prompt and before.startswith(with_prompt) and missing:
        yield (
            f"the chat template has no generation prompt, so the model itself has to begin its "
            f"turn with {missing!r}"
        )
    token_ids = run.tokenizer(after.strip(), add_special_tokens=False)["input_ids"]
    if not token_ids:
        yield "the chat template writes nothing after an answer, so no token marks its end"
    elif token_ids[0] not in stop_ids:
        token = run.tokenizer.convert_ids_to_tokens(token_ids[0])
        yield (
            f"the chat template ends an answer with {token!r}, which is not a stop token, so "
            f"responses would go on; add --stop_token '{token}', or see --chat_template"
        )
