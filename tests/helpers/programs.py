"""Calls a program's main() in this process."""

import contextlib
import io
import os
import sys
from pathlib import Path
from unittest import mock


def call_main(program, *words):
    """(exit status, what it prints, its errors) of a module's main(), called with these words."""
    streams = [io.TextIOWrapper(io.BytesIO(), "utf-8") for _ in range(2)]
    command = [Path(program.__file__).name, *map(str, words)]
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(sys, "argv", command))
        stack.enter_context(mock.patch.dict(os.environ, COLUMNS="200"))
        stack.enter_context(contextlib.redirect_stdout(streams[0]))
        stack.enter_context(contextlib.redirect_stderr(streams[1]))
        status = 0
        try:
            program.main()
        except SystemExit as end:
            status = end.code
    for stream in streams:
        stream.seek(0)
    return status, *(stream.read() for stream in streams)
