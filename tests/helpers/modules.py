"""The modules that the preflight loads are its own: those of the tests come back afterwards."""

import contextlib
import sys


@contextlib.contextmanager
def put_back(names):
    """Without these modules, if they are there; afterwards all is as it was, sys.path too."""
    path = [*sys.path]
    before = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    try:
        yield
    finally:
        sys.path[:] = path
        for name in names:
            sys.modules.pop(name, None)
        sys.modules.update(before)
