"""Write a library that replaces libnuma into a virtual environment.

    .venv/bin/python scripts/internal/make_libnuma_stub.py

vLLM's CPU build does not load without libnuma.so.1. Many systems lack it, no wheel contains it, and
only root can install it (`apt-get install libnuma1`). vLLM uses it to keep memory on the socket of
the process. In the stub numa_available() returns -1, as libnuma does where this is not permitted,
for example in most containers, and vLLM then makes no other calls. If the system has libnuma, that
is loaded instead. scripts/setup.sh calls this program. Like vLLM's build, it is for x86-64 only.
"""

import struct
import sysconfig
from pathlib import Path

SONAME = "libnuma.so.1"
# The functions that vLLM calls, each with the version of libnuma's interface that vLLM links to
FUNCTIONS = {
    "numa_available": "libnuma_1.1",
    "numa_migrate_pages": "libnuma_1.1",
    "numa_set_strict": "libnuma_1.1",
    "numa_bitmask_free": "libnuma_1.2",
    "numa_get_mems_allowed": "libnuma_1.2",
    "numa_parse_nodestring": "libnuma_1.2",
    "numa_set_interleave_mask": "libnuma_1.2",
    "numa_set_membind": "libnuma_1.2",
}
RETURN_MINUS_ONE = bytes.fromhex("b8ffffffff c3")  # mov eax, -1; ret
# Python runs this line when it starts
PTH = "import libnuma_or_stub\n"
LOADER = f"""import ctypes
import os

try:
    ctypes.CDLL("{SONAME}")
except OSError:
    # Libraries that are loaded later find it by its name
    ctypes.CDLL(os.path.join(os.path.dirname(__file__), "libnuma_stub.so.1"))
"""


def elf_hash(name: str) -> int:
    """Return ELF's hash of a name.

    >>> hex(elf_hash("GLIBC_2.2.5"))
    '0x9691a75'
    """
    value = 0
    for byte in name.encode():
        value = (value << 4) + byte
        value = (value ^ (value & 0xF0000000) >> 24) & 0x0FFFFFFF
    return value


def shared_library(soname: str, functions: dict[str, str], code: bytes) -> bytes:
    """Return an ELF file for Linux on x86-64, in which all functions have the same code.

    `functions` has the version of each. The parts of the file are described in elf(5). They are, in
    this order, headers, the code, tables (names, symbols and their hashes and versions), and the
    dynamic section, which has its own page because the loader writes to it.
    """
    versions = [soname, *sorted(set(functions.values()))]  # the first is that of the file itself
    names = b"\0" + b"".join(f"{name}\0".encode() for name in [*versions, *functions])
    position = {name: names.index(f"\0{name}\0".encode()) + 1 for name in [*versions, *functions]}

    code_at = 64 + 4 * 56  # after the header and four segments
    symbols = bytes(24)
    for name in functions:
        # A global function (0x12) of default visibility. It has a section, so it is defined
        symbols += struct.pack("<IBBHQQ", position[name], 0x12, 0, 1, code_at, len(code))
    # One bucket with a chain of all symbols
    count = len(functions) + 1
    hashes = struct.pack(f"<{3 + count}I", 1, count, 1, 0, *range(2, count), 0)
    indices = [versions.index(version) + 1 for version in functions.values()]
    versions_of_symbols = struct.pack(f"<{count}H", 0, *indices)
    definitions = b""
    for index, name in enumerate(versions, start=1):
        is_file, is_last = index == 1, index == len(versions)
        definitions += struct.pack(
            "<HHHHIII", 1, is_file, index, 1, elf_hash(name), 20, 0 if is_last else 28
        )
        definitions += struct.pack("<II", position[name], 0)

    body = bytearray(code)
    dynamic = [(14, position[soname]), (10, len(names)), (11, 24), (0x6FFFFFFD, len(versions))]
    for tag, table in [
        (5, names),
        (6, symbols),
        (4, hashes),
        (0x6FFFFFF0, versions_of_symbols),
        (0x6FFFFFFC, definitions),
    ]:
        body += bytes(-(code_at + len(body)) % 8)
        dynamic.append((tag, code_at + len(body)))
        body += table
    body += bytes(-(code_at + len(body)) % 8)
    dynamic_at = code_at + len(body)
    dynamic_section = b"".join(struct.pack("<QQ", *entry) for entry in [*dynamic, (0, 0)])

    page, size = 0x1000, len(dynamic_section)
    read, write, execute = 4, 2, 1
    segments = [  # (type, permissions, offset, address, size, alignment)
        (1, read | execute, 0, 0, dynamic_at, page),
        (1, read | write, dynamic_at, page + dynamic_at, size, page),
        (2, read | write, dynamic_at, page + dynamic_at, size, 8),  # the dynamic section
        (0x6474E551, read | write, 0, 0, 0, 16),  # a stack that is not executable
    ]
    header = b"\x7fELF" + bytes([2, 1, 1]) + bytes(9)  # 64 bits, little-endian
    # A shared library (3) for x86-64 (62), sizes of the header and of four segments, no sections
    header += struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 64, 0, 0, 64, 56, 4, 64, 0, 0)
    for kind, flags, offset, address, size, alignment in segments:
        values = (offset, address, address, size, size, alignment)
        header += struct.pack("<IIQQQQQQ", kind, flags, *values)
    return header + body + dynamic_section


def write_stub(folder: Path) -> None:
    """Write the library and the files that load it at Python's start into a folder of packages."""
    library = shared_library(SONAME, FUNCTIONS, RETURN_MINUS_ONE)
    (folder / "libnuma_stub.so.1").write_bytes(library)
    (folder / "libnuma_or_stub.py").write_text(LOADER, "utf-8")
    (folder / "libnuma_or_stub.pth").write_text(PTH, "utf-8")


if __name__ == "__main__":
    write_stub(Path(sysconfig.get_path("purelib")))
