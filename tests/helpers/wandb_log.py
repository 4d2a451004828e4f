"""What wandb has written without a network, read back: its own package has no reader for it.

A run-*.wandb file is a log as LevelDB has it (github.com/google/leveldb, doc/log_format.md): blocks
of 32 KiB with records, which go on in the next block where one ends. Each is a message by protobuf.
"""

import json

from wandb.proto.wandb_internal_pb2 import Record

BLOCK = 2**15
HEADER = 7  # bytes: a checksum (4), a length (2), a kind (1); and at the file's beginning
WHOLE, LAST = 1, 4  # kinds: a record, and the end of one that began in an earlier block


def read_records(path):
    """The messages of a run-*.wandb file."""
    log, position, parts = path.read_bytes(), HEADER, b""
    while position < len(log):
        left = BLOCK - position % BLOCK
        if left < HEADER:  # there is no room for a header: zeros
            position += left
            continue
        length = int.from_bytes(log[position + 4 : position + 6], "little")
        kind = log[position + 6]
        parts += log[position + HEADER : position + HEADER + length]
        position += HEADER + length
        if kind in (WHOLE, LAST):
            yield Record.FromString(parts)
            parts = b""


def read_run(path):
    """The config and the history of a run, as dictionaries."""
    config, history = {}, []
    for record in read_records(path):
        for item in (*record.run.config.update, *record.config.update):
            config[item.key] = json.loads(item.value_json)
        named = {i.key or "/".join(i.nested_key): i.value_json for i in record.history.item}
        if named:
            history.append({name: json.loads(value) for name, value in named.items()})
    return config, history
