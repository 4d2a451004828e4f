"""The real vLLM of ppo_vllm_async.py beside the policy whose weights it gets."""

from dataclasses import replace

import torch

import ppo_vllm_async as script
from helpers.rollouts import STOP, VOCAB, prompt_of, tiny_language_model

MAX_LENGTH = 400


# Of 3 to 283 tokens
PROMPTS = [
    prompt_of([2 + (7 * i * row + row) % (VOCAB - 2) for i in range(1, 4 + 40 * row)])
    for row in range(8)
]


def tiny_model(tied=False):
    """A policy that vLLM takes on a CPU: heads of 32 numbers."""
    options = {"hidden_size": 64, "max_position_embeddings": 512}
    return tiny_language_model(tie_word_embeddings=tied, **options)


def vllm_args(module=script, **changes):
    options = {
        "dtype": "float32",
        "response_length": 16,
        "stop_token_ids": (STOP,),
        "vllm_enforce_eager": True,
        "vllm_gpu_memory_utilization": 0.3,
    }
    return module.Args(**options | changes)


def sample(vllm, prompts=PROMPTS, seeds=None, temperature=1.0):
    seeds = list(range(len(prompts))) if seeds is None else seeds
    return vllm.sample(prompts, seeds, temperature)


def differences(system, responses=None, temperature=1.0):
    """|learner's - vLLM's log-probability| of each token of some responses; None: of new ones."""
    responses = sample(system.vllm) if responses is None else responses
    batch = script.collate(responses, "cpu")
    policy = script.PolicyModel(system.model, replace(system.args, temperature=temperature))
    with torch.no_grad():
        logprobs, _ = policy(batch.input_ids, batch.mask)
    return (logprobs - batch.sampler_logprobs)[batch.mask.bool()].abs()


def sync(system, version):
    system.vllm.sync_weights(script.gather_weights(system.model, system.args), version)


def perturb(model, seed):
    """A large change of all weights."""
    torch.manual_seed(seed)
    for parameter in model.parameters():
        parameter.data.mul_(torch.empty_like(parameter).uniform_(0.2, 1.8))
