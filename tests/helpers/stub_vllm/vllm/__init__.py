"""In place of vLLM, for tests of faults: an engine that is up at once and samples nonsense."""

import random
from types import SimpleNamespace


class SamplingParams:
    def __init__(self, seed, max_tokens, stop_token_ids, **_):
        choice = random.Random(seed)
        size = choice.randint(1, max_tokens)
        self.response = [choice.randint(5, 14) for _ in range(size - 1)] + [stop_token_ids[0]]


class LLM:
    def __init__(self, **options):
        pass

    def generate(self, requests, sampling, use_tqdm):
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
        assert method == "reload_weights" and kwargs["weights_iterator"]

    def reset_prefix_cache(self):
        return True
