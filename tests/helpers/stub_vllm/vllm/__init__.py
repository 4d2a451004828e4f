"""In place of vLLM, for tests of faults: an engine that is up at once and samples nonsense.

Of two requests a rollout, it never answers request number STUB_HANGS_AT, and before it hangs it
makes a file in the folder STUB_FOLDER that has the name of its process id.
"""

import os
import random
import time
from pathlib import Path
from types import SimpleNamespace


class SamplingParams:
    def __init__(self, seed, max_tokens, stop_token_ids, **_):
        choice = random.Random(seed)
        size = choice.randint(1, max_tokens)
        self.response = [choice.randint(5, 14) for _ in range(size - 1)] + [stop_token_ids[0]]


class LLM:
    def __init__(self, **options):
        self.requests = 0

    def generate(self, requests, sampling, use_tqdm):
        self.requests += 1
        if str(self.requests) == os.environ.get("STUB_HANGS_AT"):
            (Path(os.environ["STUB_FOLDER"]) / str(os.getpid())).touch()
            time.sleep(1000)
        return [
            SimpleNamespace(
                prompt_token_ids=request["prompt_token_ids"],
                outputs=[
                    SimpleNamespace(
                        token_ids=params.response,
                        logprobs=SimpleNamespace(logprobs=[-1.0] * len(params.response)),
                    )
                ],
            )
            for request, params in zip(requests, sampling, strict=True)
        ]

    def collective_rpc(self, method, kwargs):
        assert method == "reload_weights"

    def reset_prefix_cache(self):
        return True
