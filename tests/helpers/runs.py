"""The contents of a run's folder, and comparisons of runs."""

import operator

import torch

# A step has one optimizer update, of rows of unequal length. The old and the new policy are the
# same in it, so its metrics can be recomputed from the batch
VLLM_OPTIONS = {
    "total_episodes": 128,
    "temperature": 1.5,
    "response_length": 6,  # a correct answer with its end; longer ones are truncated
    "beta": 0.1,
    "gamma": 0.97,
    "lam": 0.9,
    "value_lam": 1.0,
    "whiten_rewards": True,
    "non_stop_penalty": True,
    "penalty_reward_value": -1.0,
    "lr_scheduler_type": "constant",
    "num_evals": 2,
    "save_batches": True,
}
# Metrics of a clock or a meter, which differ between any two runs
OF_A_CLOCK = ("time/", "perf/episodes", "perf/response", "perf/memory")


def without_clock(line):
    """Return the metrics of a step that are the same to the last bit if the run is repeated."""
    return {name: value for name, value in line.items() if not name.startswith(OF_A_CLOCK)}


def differences(one, other):
    """Return the names of the fields in which two batches (dicts) differ, if only in a bit."""
    names = []
    for name, value in one.items():
        equal = torch.equal if isinstance(value, torch.Tensor) else operator.eq
        if not equal(value, other[name]):
            names.append(name)
    return names


def sequences_of(batch):
    """Return the (prompt, response) of each row of a batch (a dict) as lists of token ids."""
    sequences = []
    for ids, mask, length in zip(batch["input_ids"], batch["mask"], batch["lengths"], strict=True):
        assert mask[: mask.argmax()].sum() == mask[length:].sum() == 0
        assert mask[mask.argmax() : length].all()
        sequences.append((ids[: mask.argmax()].tolist(), ids[mask.argmax() : length].tolist()))
    return sequences


def batch_of(run, step):
    """Return the batch of a step of a run with save_batches, as with_lists returns it."""
    return with_lists(torch.load(run.run_dir / "batches" / f"{step}.pt"))


def with_lists(batch):
    """Return the fields of a Batch as a dict, with its sequences as lists of token ids.

    These are added as `sequences`, and their two halves as `prompt_ids` and `responses`.
    """
    sequences = sequences_of(batch)
    prompt_ids, responses = map(list, zip(*sequences, strict=True))
    return batch | {"sequences": sequences, "prompt_ids": prompt_ids, "responses": responses}


def weights_of_versions(run):
    """Return {version: the policy's weights that vLLM got as this version}."""
    return {int(path.stem): torch.load(path) for path in run.run_dir.glob("versions/*.pt")}


def check_equal_to_the_bit(one, other, steps=()):
    """Check that two runs, and their batches of these steps, are the same to the last bit."""
    assert [without_clock(line) for line in one.metrics] == [
        without_clock(line) for line in other.metrics
    ]
    for step in steps:
        assert differences(batch_of(one, step), batch_of(other, step)) == []
    for name in ("samples.jsonl", "rollouts.jsonl", "model/model.safetensors"):
        assert (one.run_dir / name).read_bytes() == (other.run_dir / name).read_bytes()


def response_tokens(mask, tensor):
    """Return a per-token tensor as a list with the tokens of each response, in float64."""
    return [row[inside].double() for row, inside in zip(tensor, mask.bool(), strict=True)]


def flat_tokens(batch):
    """Return per-token tensors of a batch, (tokens,) and in float64, of responses only."""
    inside = batch["mask"].bool()
    return {
        name: value[inside].double()
        for name, value in batch.items()
        if isinstance(value, torch.Tensor) and value.dim() == 2 and value.is_floating_point()
    }
