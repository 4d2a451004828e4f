"""How much there is to read in a script: its tokens, without comments and docstrings."""

import io
import os
import re
import tokenize

import pytest
from helpers import PAGES, REPO, files_of_project

BUDGETS = {
    "ppo_sync.py": 14_470,
    "ppo_vllm_async.py": 14_760,
    "grpo_vllm_async.py": 14_620,
}

# What stands around the scripts, in lines
SURROUNDINGS = {"scripts/**/*.py": 10_690, "tests/**/*.py": 14_330}

# A page has one subject, and README two screens, in lines
PER_PAGE, PER_README = 150, 120

# A reader must take these idioms apart, and plain English has another word for each
BANNED = ["nobody", "somebody", "likewise", "anew", "alike", "for good", "so many", "whatever"]
BANNED += ["besides", "but for", "other than in", "as such", "what is no", "told", "in words"]
BANNED += ["merely", "whoever", "dearest", "lest", "hence", "therein", "thereof"]

# Of the algorithm alone, from the top to the banner: it stands for a reader's time
PART_ONE = {"ppo_sync.py": 4_190, "ppo_vllm_async.py": 4_410, "grpo_vllm_async.py": 4_310}
BANNER = "# The algorithm ends here."

LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
LAYOUT |= {tokenize.ENDMARKER}


def count_tokens(source):
    """Python 3.12 takes f-strings apart and 3.11 does not; here each is one token, as a whole."""
    count = depth = 0  # of f-strings within each other
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        kind = tokenize.tok_name[token.type]
        if kind == "FSTRING_END":
            depth -= 1
        is_docstring = kind == "STRING" and token.string.startswith('"""')
        if depth == 0 and kind != "FSTRING_START" and not is_docstring:
            count += token.type not in LAYOUT
        if kind == "FSTRING_START":
            depth += 1
    return count


@pytest.mark.parametrize("script", BUDGETS)
def test_script_is_within_its_budget(script):
    assert count_tokens((REPO / script).read_text()) <= BUDGETS[script]


@pytest.mark.parametrize("files", SURROUNDINGS)
def test_what_stands_around_the_scripts_is_within_its_budget(files):
    """A new program or test says which one it replaces."""
    paths = files_of_project(files)
    assert sum(len(path.read_text().splitlines()) for path in paths) <= SURROUNDINGS[files]


@pytest.mark.parametrize("page", [*PAGES, REPO / "scripts/train/README.md"], ids=os.path.relpath)
def test_page_is_short_and_in_plain_english(page):
    lines = page.read_text().splitlines()
    assert len(lines) <= (PER_README if page == REPO / "README.md" else PER_PAGE)
    prose = re.sub(r"^```.*?^```|^    .*?$|`[^`\n]*`", "", "\n".join(lines), flags=re.M | re.S)
    found = re.findall(rf"\b(?:{'|'.join(BANNED)})\b", prose, re.IGNORECASE)
    assert found == []


@pytest.mark.parametrize("script", PART_ONE)
def test_algorithm_is_within_its_budget_and_comes_first(script):
    """From the top: what travels, the loop within the first tenth or so, and what it is made of."""
    text = (REPO / script).read_text()
    algorithm, found, machinery = text.partition(BANNER)
    assert found and count_tokens(algorithm) <= PART_ONE[script]
    loop = algorithm.index("    for training_step in range(first_step")
    assert loop < 0.12 * len(text)
    assert "\nclass Args(Algorithm):" in machinery and "\nclass Algorithm:" in algorithm
    # A step is read without leaving it for long
    lines = algorithm[loop:].partition("    # ---- The end")[0].count("\n")
    assert lines <= 115
    steps = [int(number) for number in re.findall(r"^        # (\d)\. ", algorithm, re.MULTILINE)]
    assert sorted(steps) == list(range(1, 10))
