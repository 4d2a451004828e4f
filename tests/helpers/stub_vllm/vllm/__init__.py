"""In place of vLLM, for tests of processes: an engine that is up at once and samples nonsense.

A response is a function of its seed, and of the most tokens that it may have.
"""

import random
import sys
from types import SimpleNamespace

sys.modules["vllm.inputs"] = SimpleNamespace(tokens_input=list)


class SamplingParams:
    def __init__(self, seed, max_tokens, stop_token_ids=(), **_):
        choice = random.Random(seed)
        size = choice.randint(1, max_tokens) if stop_token_ids else max_tokens
        self.response = [choice.randint(5, 14) for _ in range(size)]
        self.response[-1:] = stop_token_ids[:1] or self.response[-1:]


def output_of(token_ids, **more):
    logprobs = SimpleNamespace(logprobs=[-1.0] * len(token_ids))
    return SimpleNamespace(token_ids=token_ids, logprobs=logprobs, **more)


class LLM:
    def __init__(self, **options):
        self.llm_engine = self  # of forks that call it token by token
        self.requests = {}  # id: (response, the number of tokens that it has)

    def generate(self, requests, sampling, use_tqdm):
        return [
            SimpleNamespace(
                prompt_token_ids=request["prompt_token_ids"],
                outputs=[output_of(params.response)],
            )
            for request, params in zip(requests, sampling, strict=True)
        ]

    def add_request(self, i, tokens, params):
        self.requests[i] = params.response, 0

    def step(self):
        outputs = []
        for i, (response, length) in self.requests.items():
            self.requests[i] = response, length + 1
            is_over = length + 1 == len(response)
            output = output_of(response[: length + 1], finish_reason=["length", "stop"][is_over])
            outputs.append(SimpleNamespace(request_id=i, outputs=[output], finished=is_over))
        self.abort_request([output.request_id for output in outputs if output.finished])
        return outputs

    def abort_request(self, ids):
        for i in ids:
            del self.requests[i]

    def collective_rpc(self, method, kwargs):
        assert method == "reload_weights" and kwargs["weights_iterator"]

    def reset_prefix_cache(self):
        return True
