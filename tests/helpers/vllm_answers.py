"""python vllm_answers.py MODEL PROMPTS.json: what plain vLLM answers, greedily, as a line of JSON.

It prints the token ids of each answer, their texts, and the log-probabilities of the ids.
"""

import json
import sys
from pathlib import Path

from vllm import LLM, SamplingParams

if __name__ == "__main__":  # vLLM's processes import this file too
    model, path = sys.argv[1:]
    sizes = {"max_model_len": 64, "gpu_memory_utilization": 0.2}
    llm = LLM(model, dtype="float32", enforce_eager=True, **sizes)
    sampling = SamplingParams(temperature=0.0, max_tokens=8, logprobs=0)
    prompts = json.loads(Path(path).read_text())
    outputs = [output.outputs[0] for output in llm.generate(prompts, sampling, use_tqdm=False)]
    logprobs = [[p[i].logprob for p, i in zip(o.logprobs, o.token_ids)] for o in outputs]  # noqa: B905
    responses = [list(output.token_ids) for output in outputs]
    print("RESULT", json.dumps([responses, [output.text for output in outputs], logprobs]))
