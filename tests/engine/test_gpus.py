"""What GPUs need, as far as a CPU can show it: TF32 in the head alone, room for CUDA itself.

That attention has no mask is in test_heads.py, that gradients are in memory once in test_fsdp2.py.
"""

from types import SimpleNamespace

import pytest
import torch
from helpers import SCRIPTS, TRAINER, preference_pairs, rollouts
from helpers.files import write_rows
from helpers.rollouts import VOCAB, make_rollout, tiny_args
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Gemma3TextConfig

import ppo_vllm_async as script


def test_reward_trainer_refuses_an_encoder(assets, tmp_path):
    """Before it trains one that nothing could use: its tokens attend to later ones."""
    tokenizer = AutoTokenizer.from_pretrained(assets / "model")
    tokenizer.save_pretrained(tmp_path)
    sizes = rollouts.CONFIG | {"vocab_size": len(tokenizer), "num_labels": 1}
    sizes |= {"initializer_range": 0.5, "head_dim": 16}
    config = Gemma3TextConfig(**sizes, use_bidirectional_attention=True)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    pairs = write_rows(tmp_path / "pairs.jsonl", [{"prompt": "5=", "chosen": "5", "rejected": "3"}])
    options = {"dataset": str(pairs), "model_name_or_path": str(tmp_path), "warmup_ratio": 0.0}
    options |= {"output_dir": str(tmp_path), "local_mini_batch_size": 1}
    with pytest.raises(ValueError, match="attends to later tokens, but it must be a causal model"):
        preference_pairs.train(preference_pairs.tiny_args(**options))


PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_)


class Products(TorchDispatchMode):
    """Of each product of two matrices: whether it is the head's, and whether TF32 is allowed."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket in PRODUCTS:
            of_head = any(VOCAB in tensor.shape for tensor in args if tensor.dim() == 2)
            self.seen.add((of_head, torch.backends.cuda.matmul.allow_tf32))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("dtype", "in_head"), [("bfloat16", True), ("float32", False)])
def test_tf32_is_for_the_products_of_the_head_alone(dtype, in_head):
    """A switch for the whole process would round rotary embeddings of positions above 2,048."""
    policy, batch = rollouts.tiny_policy(), rollouts.in_float32(make_rollout())
    policy.to(getattr(torch, dtype))
    with Products() as products:
        logprobs, entropies = policy(batch.input_ids, batch.mask)
        (logprobs.sum() + entropies.sum()).backward()
    assert products.seen == {(True, in_head), (False, False)}
    assert not torch.backends.cuda.matmul.allow_tf32


# ------------------------------------------------------------------ what is set before a run begins


@pytest.fixture
def gpu(monkeypatch):
    """One of 24 GiB: the list of the shares that the script may have of it, set one by one."""
    shares = []
    properties = SimpleNamespace(total_memory=24 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: properties)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", shares.append)
    return shares


@pytest.mark.parametrize(
    ("gpus", "ranks", "left"),
    [((), 1, 0.7 - 2 / 24), ((), 2, 0.7 - 3 / 24), ((6, 7), 6, 1 - 2 / 24)],
)
def test_room_is_left_for_contexts_and_nccl_and_vllm(gpus, ranks, left, gpu):
    """A context takes 0.5 to 0.8 GiB, NCCL 0.5 to 1.6, whatever the size of the GPU."""
    args = tiny_args(vllm_gpus=gpus, world_size=ranks, vllm_gpu_memory_utilization=0.3)
    script.limit_memory(torch.device("cuda"), args)
    script.limit_memory(torch.device("cpu"), args)
    assert gpu == [pytest.approx(left)]


@pytest.mark.parametrize("name", [*SCRIPTS, TRAINER])
def test_before_a_model_is_loaded_memory_is_limited_and_attention_of_cudnn_is_off(
    name, run_main, gpu, monkeypatch
):
    """Its backward pass may give NaN, and vLLM turns it off where there is an engine alone."""
    torch.backends.cuda.enable_cudnn_sdp(True)
    if name == TRAINER:  # which has its GPU for itself
        monkeypatch.setattr("accelerate.Accelerator.__init__", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            preference_pairs.train(preference_pairs.tiny_args())
    else:
        monkeypatch.setattr("accelerate.Accelerator.device", torch.device("cuda"))
        monkeypatch.setattr(f"{name[:-3]}.load_model", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run_main(name, vllm_gpu_memory_utilization=0.3)
        assert gpu == [pytest.approx(0.7 - 2 / 24)]
    assert not torch.backends.cuda.cudnn_sdp_enabled()
