"""Links from the documentation to lines: [`NAME`](../FILE.py#L1) and [step N](../FILE.py#L1).

    python tests/helpers/line_links.py    # after a script has changed: writes the numbers anew

The first leads to the definition of a function, a class or a flag of Args, the second to a step of
main's loop.
"""

import re
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent.parent
LINK = re.compile(r"\[([^\]]+)\]\((?:\.\./)?([\w/]+\.py)#L(\d+)\)")


def line_of(text, lines):
    """The number of the line that a link's text means, from 1.

    >>> lines = ["def f(x):", "    # 1. First", "@dataclass", "class A:", "    beta: float = 0.1"]
    >>> [line_of(text, lines) for text in ("`f`", "Step 1", "`A`", "`--beta`")]
    [1, 2, 4, 5]
    >>> line_of("`g`", lines)
    Traceback (most recent call last):
        ...
    ValueError: `g`: 0 lines
    """
    step = re.fullmatch(r"[Ss]tep (\d+)", text)
    name = text.strip("`")
    pattern = rf"(def|class) {name}\b"
    if step:
        pattern = rf"\s+# {step[1]}\. "
    if name.startswith("--"):
        pattern = rf"    {name[2:]}: .* = "
    numbers = [number for number, line in enumerate(lines, 1) if re.match(pattern, line)]
    if len(numbers) != 1:
        raise ValueError(f"{text}: {len(numbers)} lines")
    return numbers[0]


def with_right_numbers(page):
    """The text of a page, whose links lead where their texts say."""

    def right(link):
        text, file, _ = link.groups()
        number = line_of(text, (REPO / file).read_text().splitlines())
        return re.sub(r"#L\d+", f"#L{number}", link[0])

    return LINK.sub(right, page.read_text())


def pages():
    return [REPO / "README.md", *sorted((REPO / "docs").glob("*.md"))]


if __name__ == "__main__":
    for page in pages():
        page.write_text(with_right_numbers(page))
