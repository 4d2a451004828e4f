"""Write short instructions with constraints that a program can check, in verl's parquet schema.

    python scripts/data_preprocess/instructions.py --local_save_dir data/instructions

A prompt is a task about a topic with four constraints of IFEval (arXiv 2311.07911), which
scripts/rewards/if_constraints.py checks: at least five words, fewer than a given number of words,
no commas, and lowercase letters. Without the first one, a policy learns to answer everything with
one word. The texts are made here, without a download and without randomness, so the files are
always the same. Topics of test.parquet do not occur in train.parquet.
"""

import argparse
import itertools
import json
from pathlib import Path

from common import SAVE_DIR_HELP, verl_row, write_splits

TASKS = [
    "Describe {}.",
    "Tell me about {}.",
    "Explain to a child what {} is.",
    "Write a line for a travel diary about {}.",
    "Say something surprising about {}.",
    "Why would anyone miss {}?",
    "What does {} look like at night?",
    "Give a reason to like {}.",
]
MOST_WORDS = [10, 12, 14]
# Two texts with the constraints in different orders
CONSTRAINTS = [
    "Use 5 to {} words, no commas, and only lowercase letters.",
    "Answer in lowercase letters, without commas, in 5 to {} words.",
]
TRAIN_TOPICS = """
    a lighthouse, a bakery, a bicycle, a rainy street, an old library, a mountain lake,
    a night train, a garden, a street market, a wooden bridge, a snowstorm, a desert, a chess club,
    a school bus, a violin, a harbour, a beehive, a campfire, a castle, a ferry, a clock tower,
    a coral reef, a tea house, a windmill, a zoo, a hospital, a film set, a football match, a farm,
    a ghost town, a hot spring, an island, a jazz bar, a kite, a laundry, a maze, a pair of shoes,
    an orchard, a post office, a quarry, a robot, a sailing boat, a theatre, an umbrella, a valley,
    a waterfall, an attic, a canal, a dinosaur, an eclipse
"""
TEST_TOPICS = """
    a swimming pool, a volcano, a birthday cake, a museum, a cave, a taxi, a forest path,
    a piano lesson, a spaceship, a fish market
"""


def make_rows(topics: str, split: str) -> list[dict]:
    """Return rows of verl's schema for all tasks about all topics with all constraints."""
    names = [" ".join(topic.split()) for topic in topics.split(",")]
    combinations = itertools.product(names, TASKS, MOST_WORDS, CONSTRAINTS)
    rows = []
    for index, (topic, task, most_words, constraints) in enumerate(combinations):
        prompt = f"{task.format(topic)} {constraints.format(most_words)}"
        numbers = {"split": split, "index": index}
        truth = ground_truth(most_words)
        rows.append(verl_row("instructions", prompt, "instruction_following", truth, **numbers))
    return rows


def ground_truth(most_words: int) -> str:
    """Return the constraints as JSON.

    >>> json.loads(ground_truth(12))["kwargs"][1]
    {'num_words': 13, 'relation': 'less than'}
    """
    words = "length_constraints:number_words"
    names = [words, words, "punctuation:no_comma", "change_case:english_lowercase"]
    least = {"num_words": 5, "relation": "at least"}
    most = {"num_words": most_words + 1, "relation": "less than"}
    return json.dumps({"instruction_id_list": names, "kwargs": [least, most, {}, {}]})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    folder = Path("data/instructions")
    parser.add_argument("--local_save_dir", type=Path, default=folder, help=SAVE_DIR_HELP)
    topics = {"train": TRAIN_TOPICS, "test": TEST_TOPICS}
    splits = {split: make_rows(topics[split], split) for split in topics}
    write_splits(parser.parse_args().local_save_dir, splits)
