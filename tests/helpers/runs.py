"""What is in the folder of a run, and how it is looked at."""

import operator

import torch

# One optimizer update a step, of rows of unequal length: old and new policy are the same in it, and
# metrics of the update can be recomputed from the batch alone.
VLLM_OPTIONS = {
    "total_episodes": 128,
    "temperature": 1.5,
    "response_length": 6,  # a right answer with its end: others are cut
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
# What a clock or a meter says: no two runs agree on it
OF_A_CLOCK = ("time/", "perf/episodes", "perf/response", "perf/memory")


def without_clock(line):
    """The metrics of a step that the same run gives again, to the last bit."""
    return {name: value for name, value in line.items() if not name.startswith(OF_A_CLOCK)}


def differences(one, other):
    """Names of the fields in which two batches, as dicts, are not the same to the last bit."""
    names = []
    for name, value in one.items():
        equal = torch.equal if isinstance(value, torch.Tensor) else operator.eq
        if not equal(value, other[name]):
            names.append(name)
    return names


def sequences_of(batch):
    """The prompt and the response of each row of a batch, a dict: lists of token ids."""
    sequences = []
    for ids, mask, length in zip(batch["input_ids"], batch["mask"], batch["lengths"], strict=True):
        assert mask[: mask.argmax()].sum() == mask[length:].sum() == 0
        assert mask[mask.argmax() : length].all()
        sequences.append((ids[: mask.argmax()].tolist(), ids[mask.argmax() : length].tolist()))
    return sequences


def batch_of(run, step):
    """The batch of a step of a run with save_batches: as with_lists has it."""
    return with_lists(torch.load(run.run_dir / "batches" / f"{step}.pt"))


def with_lists(batch):
    """The fields of a Batch, as a dict.

    It has sequences besides, and their two halves: prompt_ids and responses, lists of token ids.
    """
    sequences = sequences_of(batch)
    prompt_ids, responses = map(list, zip(*sequences, strict=True))
    return batch | {"sequences": sequences, "prompt_ids": prompt_ids, "responses": responses}


def weights_of_versions(run):
    """{version: the policy's weights that vLLM was sent as this version}"""
    return {int(path.stem): torch.load(path) for path in run.run_dir.glob("versions/*.pt")}


def check_equal_to_the_bit(one, other, steps=()):
    """Two runs, and the batches of these steps."""
    assert [without_clock(line) for line in one.metrics] == [
        without_clock(line) for line in other.metrics
    ]
    for step in steps:
        assert differences(batch_of(one, step), batch_of(other, step)) == []
    for name in ("samples.jsonl", "rollouts.jsonl", "model/model.safetensors"):
        assert (one.run_dir / name).read_bytes() == (other.run_dir / name).read_bytes()


def response_tokens(mask, tensor):
    """A per-token tensor as a list of the tokens of each response, in float64."""
    return [row[inside].double() for row, inside in zip(tensor, mask.bool(), strict=True)]


def flat_tokens(batch):
    """Per-token tensors of a batch without what is outside responses, (tokens,), in float64."""
    inside = batch["mask"].bool()
    return {
        name: value[inside].double()
        for name, value in batch.items()
        if isinstance(value, torch.Tensor) and value.dim() == 2 and value.is_floating_point()
    }
