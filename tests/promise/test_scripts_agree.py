"""Scripts of one text: what has the same name in two of them is the same, word for word.

And so it is with the functions that scripts of scripts/ have in common.
"""

import ast
import itertools
import re

import pytest
from helpers import PPO, REPO, SCRIPTS, TRAINER

# What GRPO may have otherwise, and why. Anything else of the same name must not.
ALLOWED = {
    "main": "the order of the steps is what the scripts are about; PPO's two have it alone",
    "Batch": "GRPO has no values, returns or rewards of tokens",
    "batch_metrics": "GRPO has no value model to report on, but groups",
    "fill_in": "GRPO has no warm-up of a value model, and refuses groups of one",
    "token_losses": "GRPO's loss is another one",
    "loss_divisor": "GRPO has several means",
    "importance_weights": "GRPO may have one ratio for all tokens of a response",
    "Args.beta": "in PPO the KL is in the reward, in GRPO in the loss",
    "Args.cliprange": "GRPO has a flag of its own for the upper limit",
    "Args.number_samples_per_prompt": "GRPO needs a group",
    "Args.local_rollout_batch_size": "GRPO counts prompts, of which each has a group of responses",
    "Args.local_mini_batch_size": "GRPO's batch is eight times as large",
    "Args.lr_scheduler_type": "PPO's learning rate falls, GRPO's stays",
    "Args.penalty_reward_value": "in a group a large penalty makes wrong answers look good",
}


KINDS = (ast.FunctionDef, ast.ClassDef, ast.Assign)


def definitions(script, kinds=KINDS):
    """{name: source text} of functions, classes, constants, and of Args' fields with their help."""
    source, found = (REPO / script).read_text(), {}
    lines = source.splitlines()
    for node in ast.parse(source).body:
        if not isinstance(node, kinds):
            continue
        if isinstance(node, ast.Assign):
            found[node.targets[0].id] = ast.unparse(node)
        elif node.name in ("Algorithm", "Args"):
            for field, docstring in itertools.pairwise(node.body):
                if isinstance(field, ast.AnnAssign):
                    text = "\n".join(lines[field.lineno - 1 : docstring.end_lineno])
                    found[f"Args.{field.target.id}"] = text
        else:
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            found[node.name] = "\n".join(lines[first - 1 : node.end_lineno])
    return found


def functions_of(script):
    return definitions(script, ast.FunctionDef)


def differing(texts):
    """Names that some of these have, but not in the same words."""
    names = sorted(set().union(*texts))
    return [name for name in names if len({text[name] for text in texts if name in text}) > 1]


def test_same_name_is_same_text_but_for_what_grpo_has_otherwise():
    texts = [definitions(script) for script in SCRIPTS]
    assert len(set.intersection(*map(set, texts))) > 130
    assert differing(texts) == sorted(ALLOWED)


def test_synchronous_and_asynchronous_ppo_differ_in_main_alone():
    assert differing([definitions(script) for script in PPO]) == ["main"]


def test_scripts_are_started_alike():
    ends = [(REPO / script).read_text().rpartition("\nif __name__")[2] for script in SCRIPTS]
    assert "end_at_once(error)" in ends[0]
    assert len(set(ends)) == 1


@pytest.mark.parametrize("script", [*SCRIPTS, TRAINER])
def test_every_argument_has_a_line_of_help(script):
    """--help would break lines where the file does."""
    for name, text in definitions(script).items():
        if name.startswith("Args.") and "FilledIn" not in text:
            assert re.search(r'\n    """[^\n]+"""$', text), name
            assert text.count(f"    {name[5:]}: ") == text.count('"""') - 1 == 1, name


def test_reward_models_training_calls_ppos_functions_and_has_no_copies():
    both = functions_of(TRAINER).keys() & functions_of("ppo_sync.py").keys()
    # These do other things: their data are pairs
    others = {"accumulate_gradients", "load_reward_model", "split_into_micro_batches"}
    assert both == others | {"main"}


def test_what_data_preprocessing_shares_stands_once():
    """In common.py; what else is called alike is each script's own."""
    shared = functions_of("scripts/data_preprocess/common.py").keys()
    assert shared >= {"find_files", "read_rows", "write_splits", "text_of"}
    names = ("gsm8k", "math_dataset", "hellaswag", "full_hh_rlhf")
    each = [functions_of(f"scripts/data_preprocess/{name}.py").keys() for name in names]
    for mine, theirs in itertools.combinations([shared, *each], 2):
        assert mine & theirs <= {"convert", "main"}
