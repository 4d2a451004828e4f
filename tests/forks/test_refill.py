"""The fork refill, with stubs of vLLM: it sends vLLM what the script sends, only more often."""

import hashlib
import inspect
import itertools
import shutil

import numpy as np
import pytest
from helpers import GRPO, loops
from helpers.files import write_text
from helpers.processes import CPU, STUB
from helpers.runs import check_equal_to_the_bit


def flat_for_half(data_source, response, ground_truth):
    """Half of the prompts are hopeless or solved, whatever is answered."""
    kind = hashlib.sha256(ground_truth.encode()).digest()[0] % 4
    return float(kind) if kind < 2 else hashlib.sha256(response.encode()).digest()[0] / 255


@pytest.fixture(scope="module")
def module(import_fork):
    return import_fork("refill")


@pytest.fixture
def run(module, run_main, few_prompts):
    options = {"total_episodes": 96, "eval_dataset": few_prompts / "test.parquet"}
    options |= {"num_evals": 2, "non_stop_penalty": False}
    return lambda score, name="grpo_refill.py", **more: run_main(name, score, **options | more)


def counts(seen, name):  # of each step
    return [line[f"refill/{name}_groups"] for line in seen.metrics]


def test_where_every_group_has_a_signal_it_is_the_script_to_the_bit(run):
    def score(data_source, response, ground_truth):
        return hashlib.sha256(response.encode()).digest()[0] / 255

    forked, script = run(score), run(score, *GRPO)
    assert counts(forked, "dropped") == [0] * 6 and forked.vllm.order == script.vllm.order
    for line, of_fork in zip(script.metrics, forked.metrics, strict=True):
        line |= {name: of_fork[name] for name in of_fork if name.startswith("refill/")}
    check_equal_to_the_bit(forked, script)


@pytest.mark.parametrize("async_mode", [True, False])
def test_batches_are_full_and_of_one_version_and_no_prompt_comes_twice(async_mode, run):
    seen = run(flat_for_half, async_mode=async_mode)
    script = run(flat_for_half, *GRPO, async_mode=async_mode)
    assert {line["val/zero_variance_groups"] for line in seen.metrics} == {0}
    # All requests of a step go out between the same two weight syncs
    in_turn = [each for each, _ in itertools.groupby(seen.vllm.order)]
    assert in_turn == script.vllm.order != seen.vllm.order
    assert seen.vllm.seeds.count(0) == script.vllm.seeds.count(0) == 3  # of evaluations
    prompts = [tuple(ids) for batch in seen.batches for ids in batch.prompt_ids]
    assert len(prompts) == 4 * len(set(prompts)) == 6 * loops.EPISODES
    assert 24 < 24 + sum(counts(seen, "dropped")) == 64 * seen.metrics[-1]["epoch"] <= 64


@pytest.mark.parametrize(("score", "most"), [(flat_for_half, 10), (lambda *_: 0.5, 2)])
def test_resumed_run_goes_on_to_the_bit_also_where_it_asks_in_vain(score, most, run, tmp_path):
    whole = run(score, max_refill=most)
    broken = run(score, max_refill=most, save_freq=3, fails_at=9)
    if most == 2:
        assert (counts(whole, "sampled"), counts(whole, "dropped")) == ([12] * 6, [8] * 6)
    shutil.copytree(broken.run_dir, tmp_path / "run")
    again = {"output_dir": tmp_path, "resume_from_checkpoint": "latest", "max_refill": most}
    check_equal_to_the_bit(resumed := run(score, **again), whole)
    assert resumed.vllm.order == whole.vllm.order[whole.vllm.order.index("weights 3") :]


# Groups and --max_refill: what is asked for, the batch, how many are used up
SIGNALS = {
    ("+ 0 + failed + cut + +", 3): ([(4, 8)], [0, 2, 4, 6], 7),  # the last one comes again
    ("+ + cut + failed + 0", 3): ([(4, 6)], [0, 1, 3, 5], 6),
    ("0 0 0 0 0 0 0 + 0 0 0 0", 2): ([(4, 8), (8, 12)], [0, 1, 2, 7], 12),
    ("0 0 0 0", 0): ([], [0, 1, 2, 3], 4),
}


@pytest.mark.parametrize(("signals", "most"), SIGNALS)
def test_batch_is_the_next_groups_with_a_signal_in_order(signals, most, module, monkeypatch):
    def sample(numbers):
        seen.append((numbers[0] - 100, numbers[-1] - 99))
        return module.Rollout(3, [r for i in numbers for r in groups[i - 100]], [], {})

    def respond(kind, i):
        score = {"0": 1.0, "failed": (None, 1.0)[i > 0]}.get(kind, float(i))
        return module.Response(None, np.array([4]), np.array([-1.0]), kind != "cut", score=score)

    monkeypatch.setattr(module, "score_responses", lambda *given: given[2])
    args = module.Args(number_samples_per_prompt=2, mask_truncated_completions=True)
    args.rollout_batch_size, args.max_refill = 4, most
    groups, seen = [[respond(kind, i) for i in (0, 1)] for kind in signals.split()], []
    filled, changes = module.refill(None, None, sample(range(100, 104)), sample, 100, args)
    asked, batch, used = SIGNALS[signals, most]
    assert (seen[1:], filled.responses) == (asked, [r for i in batch for r in groups[i]])
    assert (changes["used"], changes["next_count"]) == (100 + used, used)


@pytest.mark.slow
def test_two_ranks_decide_the_same(module, run_script, tmp_path):
    """Else one would ask for other groups than the other, and wait for ever."""
    path = write_text(tmp_path / "r.py", f"import hashlib\n{inspect.getsource(flat_for_half)}")
    options = {"reward_fn": f"{path}:flat_for_half", "ranks": 2, "env": CPU | STUB}
    options |= {"local_rollout_batch_size": 4, "number_samples_per_prompt": 4}
    options |= {"local_mini_batch_size": 16, "total_episodes": 3 * 32, "save_batches": True}
    seen = run_script(module.__file__, tmp_path, **options)
    assert len(seen.metrics) == 3 and sum(counts(seen, "dropped")) > 0, seen.output
    assert {line["val/zero_variance_groups"] for line in seen.metrics} == {0}
