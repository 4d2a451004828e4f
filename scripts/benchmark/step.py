"""What a learner's step costs: the log-probabilities before the updates, and the updates.

    python scripts/benchmark/step.py grpo_vllm_async.py
    python scripts/benchmark/step.py grpo_vllm_async.py OTHER/grpo_vllm_async.py --updates 1 2
    python scripts/benchmark/step.py ppo_vllm_async.py OTHER/ppo_vllm_async.py --prompts 20 2000

Seconds of the processor, for 1, 2 and 4 updates a step: time/forward and time/update together, as a
run of the script itself notes them, on one thread. OTHER is another version of the script: the two
take turns, each in a process of its own, and "ratio" is the first's seconds to OTHER's.

In the place of vLLM there is a stub, whose 128 responses a step are made up and scored at random:
lengths are log-normal, about 300 tokens in the mean, and 5% of them are at the cap of 2,048;
prompts have 50 to 250 tokens. A random Qwen2 in float32, with gradient checkpointing, no KL term,
and micro-batches of 8 rows.
"""

import argparse
import math
import random
import statistics
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from run import REPO, call_main, flags_of, run

PROMPTS, GROUP, MICRO_BATCH = 16, 8, 8  # of a step
MOST, AT_MOST = 2048, 0.05  # tokens of a response, and the share of responses that have so many
MEAN, SIGMA = 300, 0.9
SIZES = {
    "vocab_size": 256,
    "max_position_embeddings": 8192,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def response_length(choice):
    if choice.random() < AT_MOST:
        return MOST
    # A log-normal's mean is exp(mu + sigma^2 / 2)
    mu = math.log((MEAN - AT_MOST * MOST) / (1 - AT_MOST)) - SIGMA**2 / 2
    return min(MOST, max(1, round(choice.lognormvariate(mu, SIGMA))))


# ------------------------------------------------------------------------------- inside of the run


def without_vllm(script):
    """Gives the script a stub of vLLM, scores at random, and the processor's clock."""

    class StubVLLM:
        def __init__(self, placement, config, max_length, args):
            self.vocab_size = config.vocab_size
            self.policy_version = None

        def sync_weights(self, weights, version):
            self.policy_version = version

        def sample(self, prompts, seeds, temperature):
            responses = []
            for prompt, seed in zip(prompts, seeds, strict=True):
                length = response_length(random.Random(seed))
                ids = np.random.default_rng(seed).integers(self.vocab_size, size=length)
                logprobs = np.full(length, -math.log(self.vocab_size), np.float32)
                responses.append(script.Response(prompt, ids, logprobs, stopped=True))
            return responses

    def grade_responses(responses, *_):
        choice = random.Random(1)
        return [replace(response, verifiable=choice.random()) for response in responses]

    @contextmanager
    def timed(metrics, name):
        start = time.process_time()
        yield
        metrics[f"time/{name}"] = time.process_time() - start

    torch.set_num_threads(1)
    script.VLLM = StubVLLM
    script.grade_responses = grade_responses
    script.timed = timed
    script.check_sampler = script.check_draws = lambda *_, **__: 0.0  # the stub has no model
    script.subprocess.run = lambda *_, **__: None  # no pictures


# ----------------------------------------------------------------------------------- the comparison


def make_assets(folder, prompts):
    """A model, and a dataset whose prompts have so many tokens, at the least and at the most."""
    sys.path.append(str(REPO / "scripts" / "dev"))
    import make_debug_assets
    from datasets import Dataset
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(1)
    tokenizer = make_debug_assets.make_tokenizer()
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    Qwen2ForCausalLM(Qwen2Config(**SIZES, **ids)).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    choice = random.Random(1)
    rows = []
    for _ in range(1000):
        content = "1" * (choice.randint(*prompts) - 2)  # a token each, and two of the template
        message = {"role": "user", "content": content}
        row = {"prompt": [message], "data_source": "gsm8k"}
        rows.append(row | {"reward_model": {"ground_truth": "0"}})
    Dataset.from_list(rows).to_parquet(str(folder / "train.parquet"))


def measure(path, folder, updates, given):
    """Seconds of a step in the mean, and tokens of a response."""
    flags = {
        "model_name_or_path": folder / "model",
        "dataset": folder / "train.parquet",
        "dtype": "float32",
        "beta": 0.0,
        "max_prompt_token_length": max(given.prompts),
        "response_length": MOST,
        "total_episodes": given.steps * PROMPTS * GROUP,
        "local_rollout_batch_size": PROMPTS,
        "number_samples_per_prompt": GROUP,
        "local_mini_batch_size": PROMPTS * GROUP // updates,
        "per_device_train_batch_size": MICRO_BATCH,
        "num_evals": 0,
    }
    with tempfile.TemporaryDirectory(dir=folder) as output_dir:
        words = [__file__, "--run", path.resolve(), *flags_of(flags)]
        steps, _ = run(words, output_dir, ACCELERATE_USE_CPU="true")
    seconds = statistics.mean(step["time/forward"] + step["time/update"] for step in steps)
    return seconds, statistics.mean(step["objective/sequence_lengths"] for step in steps)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("scripts", type=lambda path: Path(path).expanduser(), nargs="+")
    parser.add_argument("--updates", type=int, nargs="+", default=[1, 2, 4], help="in a step")
    parser.add_argument("--prompts", type=int, nargs=2, default=[50, 250], help="least and most")
    parser.add_argument("--steps", type=int, default=1, help="of a run")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_assets(folder, given.prompts)
        for updates in given.updates:
            seconds, lengths = [], set()  # seconds: [round][script]
            for _ in range(given.rounds):
                found = [measure(path, folder, updates, given) for path in given.scripts]
                seconds.append([of_script for of_script, _ in found])
                lengths |= {length for _, length in found}
            if len(lengths) > 1:
                sys.exit(f"not the same responses: {lengths} tokens in the mean")
            medians = map(statistics.median, zip(*seconds, strict=True))
            words = " against ".join(f"{median:.1f}" for median in medians) + " s"
            if len(given.scripts) == 2:
                words += f", ratio {statistics.median(a / b for a, b in seconds):.2f}"
            print(f"{updates} updates a step: {words}", flush=True)


if __name__ == "__main__":
    if "--run" in sys.argv[1:2]:
        call_main(sys.argv[2], sys.argv[3:], without_vllm)
    else:
        main()
