"""scripts/internal/resource_plan.py, the arithmetic of the preflight's plan."""

import math
from types import SimpleNamespace

import fits
import preflight
import preflight_cases as cases
import pytest
import torch
import transformers
from internal import resource_plan as plan
from torch.distributed import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import ppo_vllm_async

PPO, GRPO = "ppo_vllm_async", "grpo_vllm_async"


def launch(name, size="0.6", gpu_memory=24, file="one_gpu.yaml", *numbers, **more):
    """Return a run of Qwen3 whose models take no memory."""
    return fits.launch(name, size, gpu_memory, file, *numbers, **more)


def tiny(layers=2, hidden=64, family="Qwen2"):
    """Return a small policy and a small value model with weights."""
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "intermediate_size": 192}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4 if family == "Qwen2" else 2}
    sizes |= {"head_dim": 64} if family == "Qwen3" else {}
    config_class = getattr(transformers, f"{family}Config")
    config = config_class(vocab_size=50, num_labels=1, **sizes)
    classes = transformers.AutoModelForCausalLM, transformers.AutoModelForSequenceClassification
    return [auto_class.from_config(config) for auto_class in classes]


def test_longest_row_can_be_a_held_out_one():
    rows = [[SimpleNamespace(token_ids=[5] * length)] for length in (3, 7)]
    args = SimpleNamespace(response_length=10)
    for train_rows, eval_rows in (rows, rows[::-1]):
        run = SimpleNamespace(train_rows=train_rows, eval_rows=eval_rows, args=args)
        run.trains_reward_model = lambda: False
        assert preflight.Run.max_length(run) == 17


def test_checkpoint_takes_what_is_written(tmp_path):
    """It contains weights and AdamW's two moments, but no gradients."""
    run = plan.with_changes(launch(PPO), {"save_freq": 2, "keep_last_n": 0})
    run.args.num_training_steps = 5
    run.model, run.value_model = tiny(hidden=256)
    trained = {"policy": cases.stepped(run.model), "value_model": cases.stepped(run.value_model)}
    for state, path in ppo_vllm_async.checkpoint_parts(trained, tmp_path):
        checkpoint.save(state, checkpoint_id=path)
    written = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert plan.checkpoints_on_disk(run) == (2, pytest.approx(written, rel=0.02))


@pytest.mark.parametrize(("gpu_memory", "most"), [(24, 256), (80, 1024)])
def test_vllm_samples_so_many_at_once_whatever_its_cache_holds(gpu_memory, most):
    """get_batch_defaults of vLLM 0.32."""
    run = launch(GRPO, "0.6", gpu_memory)
    run.args.vllm_gpu_memory_utilization = 0.97
    run.args.response_length, run.args.local_rollout_batch_size = 64, 1000
    assert plan.responses_at_once(run, 10_000) == most
    assert any(f"at most {most:,} at once" in line for _, line in plan.plan_of_engine(run))
    cache = plan.engine_needs(run, math.inf) - plan.engine_memory(run)
    assert cache == most * plan.cache_memory(run)


@pytest.mark.parametrize(
    ("numbers", "num_gpus", "names"),
    [
        ((PPO,), 1, {"lora_rank"}),
        ((PPO, "8", 80), 8, {"config_file", "num_processes", "num_machines"}),
        # Both; two nodes
        ((PPO, "8", 40, "ddp.yaml", 2, 4), 4, {"lora_rank", "config_file", "micro_batch_tokens"}),
    ],
)
def test_what_is_named_fits(numbers, num_gpus, names, monkeypatch):
    run = launch(*numbers)
    run.options.num_gpus = num_gpus
    flags, changed = plan.what_fits(run)
    assert names <= flags.keys() and not plan.fits(run)
    assert plan.fits(changed) and plan.fits(plan.with_changes(run, flags))
    assert changed.options.local_processes() <= num_gpus
    typed = plan.format_flags(flags, changed)
    assert all(f"--{name} {value}" in typed for name, value in flags.items())
    monkeypatch.delattr(run.script, "fully_shard")  # as in a copy without FSDP2
    found = plan.what_fits(run)
    assert found is None or "config_file" not in found[0]


# ---------------------------------------------------------------------------------------- adapters


def test_adapters_take_18_bytes_a_parameter_and_the_base_two():
    run = launch(PPO, rank=16)
    # Queries, keys and values, output; gate and up, down: of 28 layers
    features = (1024 + 2048) + 2 * (1024 + 1024) + (2048 + 1024) + 3 * (1024 + 3072)
    trained = 2 * 16 * 28 * features + 1024  # with the value head
    _, parts = plan.learner_memory(run)
    assert parts["adapters of policy and value model"] == 2 * trained
    assert parts["their float32 masters"] == parts["gradients"] == 4 * trained
    assert parts["AdamW's moments"] == 8 * trained
    assert parts["policy, frozen"] == 2 * plan.count_parameters(run.model)
    assert parts["value model, frozen"] == 2 * plan.count_parameters(run.value_model)
    assert plan.checkpoints_on_disk(run)[1] == 12 * trained


# --------------------------------------------------------------------------------------- the clock


@pytest.mark.parametrize("family", ["Qwen2", "Qwen3"])  # Qwen3's queries are wider
def test_flops_of_a_token_are_those_that_torch_counts(family):
    model, _ = tiny(family=family)
    model.set_attn_implementation("eager")
    ids = torch.zeros(2, 40, dtype=torch.long)
    for passes, counted in enumerate(plan.flops_of(model, length=40)):
        with FlopCounterMode(display=False) as counter:
            logits = model(ids).logits
            if passes:  # an update
                logits.sum().backward()
        assert counted * ids.numel() == pytest.approx(counter.get_total_flops(), rel=0.02)


def test_hours_are_those_of_a_step_in_turns_or_of_the_slower_side():
    """A step has rows of 512 + 1,024 tokens, on H100s."""
    run = launch(GRPO, "1.7", 80, "ddp.yaml", 1, 2, (2,))
    rows, args = 256, run.args
    args.episodes_per_step, args.num_training_steps = rows, 100
    matrices = plan.count_parameters(run.model)  # without norms; the head is tied
    read = 1024 * (2 * matrices + rows * 2 * 28 * 1024 * 2 * 1024)  # all at once, on average 1,024
    assert plan.sampling_seconds(run) == pytest.approx(read / 3.35e12, rel=1e-3)
    fast, slow = (plan.learner_seconds(run, host) for host in plan.HOST)
    ends = plan.hours(run)
    assert ends[0] == pytest.approx(max(fast, read / 3.35e12) / 36, rel=1e-3)
    args.async_mode = False
    in_turns = (fast + read / 3.35e12) / 36, (slow + 3 * read / 3.35e12) / 36
    assert plan.hours(run) == pytest.approx(in_turns, rel=1e-3)
    assert plan.hours(run)[1] > ends[1] >= ends[0]


def small_step(**flags):
    """Return PPO of 0.5 B on an H200, which can be faster than Python, with 64 responses a step."""
    run = launch(PPO, "0.5", 141)
    sizes = {"response_length": 504, "local_rollout_batch_size": 64, "local_mini_batch_size": 64}
    return plan.with_changes(run, sizes | flags)


def test_learner_takes_as_long_as_the_gpu_or_as_python_whichever_is_slower():
    seconds = [
        [plan.learner_seconds(small_step(micro_batch_tokens=tokens), host) for host in (0, 33e-6)]
        for tokens in (4096, 16_384)
    ]
    assert seconds[0][1] > 1.5 * seconds[0][0]  # with small micro-batches Python is slower
    assert seconds[1][1] < 1.1 * seconds[1][0]
    # FLOPs alone, at the peak, are less: of 2 models, forward and backward, and the reference's
    run = small_step()
    models = [run.model, run.value_model]
    flops = sum(sum(plan.flops_of(model, run.max_length())) for model in models)
    flops += plan.flops_of(run.model, run.max_length())[0]
    assert 1.2 < seconds[1][0] * 989e12 / (flops * 64 * run.max_length()) < 5
    epochs = plan.learner_seconds(small_step(num_epochs=2)) / seconds[1][0]
    assert 1.5 < epochs < 2


def test_learner_is_advised_what_is_faster_and_what_makes_room():
    (cure, faster) = plan.advice(small_step())
    assert "out of memory, --micro_batch_tokens 8192 saves 0." in cure
    assert "--no-gradient_checkpointing (learner: 4" in faster and "% of the time" in faster
    idle, *_ = plan.advice(small_step(per_device_train_batch_size=1))
    assert idle.startswith("--per_device_train_batch_size 1 limits micro-batches to 1,016 tokens")
    lines = [*plan.advice(small_step(micro_batch_tokens=4096))]
    assert any("faster: --micro_batch_tokens 32768 " in line for line in lines)
    crowded = launch(PPO, "0.6", 40)  # 25 of 26 GiB
    assert all("faster" not in line for line in plan.advice(crowded))


def test_budget_is_lowered_as_little_as_makes_the_run_fit():
    run = launch(GRPO, "0.6", 24, "one_gpu.yaml")
    run.args.vllm_gpu_memory_utilization = 0.35
    run.args.micro_batch_tokens = 131_072
    assert not plan.fits(run)
    flags, changed = plan.what_fits(run)
    tokens = flags["micro_batch_tokens"]
    assert run.max_length() < tokens < 131_072 and plan.fits(changed)
    assert (
        plan.with_engine_fraction(plan.with_changes(run, {"micro_batch_tokens": 2 * tokens}))
        is None
    )
