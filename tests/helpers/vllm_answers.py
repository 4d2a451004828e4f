"""python vllm_answers.py MODEL PROMPTS.json: what plain vLLM answers, as a line of JSON."""

import json
import sys
from pathlib import Path

from vllm import LLM, SamplingParams

if __name__ == "__main__":  # vLLM's processes import this file too
    model, path = sys.argv[1:]
    sizes = {"max_model_len": 64, "gpu_memory_utilization": 0.2}
    llm = LLM(model, dtype="float32", enforce_eager=True, **sizes)
    sampling = SamplingParams(temperature=0.0, max_tokens=8)
    prompts = json.loads(Path(path).read_text())
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    print("RESULT", json.dumps([output.outputs[0].text for output in outputs]))
