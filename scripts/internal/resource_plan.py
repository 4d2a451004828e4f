"""Compute what a run needs: memory of the GPUs and of the host, disk, time, and flags that fit.

scripts/preflight.py prints it. Each function takes the preflight's Run, with the arguments of a
script, its launch, and its models, which have shapes but no weights. Sizes are in bytes. Memory is
estimated within a tenth of what PyTorch counts (tests/helpers/fake_memory.py; docs/results.md).

    a trained parameter   18 bytes: its weight in --dtype, and in float32 its master, its gradient
                          and AdamW's two moments (1412.6980). With --dtype float32 it is 16,
                          because the weight is the master
    a frozen parameter    2 or 4 bytes: its weight in --dtype
    on disk               12 bytes per trained parameter, because a checkpoint has no gradients
    vLLM                  its weights in --dtype, and the cache of keys and values (2309.06180)

Activations and logits are added, which exist only during a forward or backward pass (pass_parts).
With FSDP2 each of N ranks holds 1/N of the above. Hours are a roofline: the FLOPs, bytes and
operations of the learners, and the bytes that vLLM reads for each token.
"""

import copy
import itertools
import math
import operator
from dataclasses import replace

import torch
from fork import SCRIPTS

GIB = 2**30
# A run fits if vLLM's cache has room for this many responses. With room for only one, vLLM starts,
# but is slow
MIN_RESPONSES = 8
# With fewer responses at once, vLLM mostly waits for its weights to be read, so one more response
# takes almost no time
MANY_RESPONSES = 64
# FLOP/s in dense bfloat16, and bytes of memory per second. A GPU has those of the first name here
# that its own name contains. They are from NVIDIA's data sheets (nvidia.com/en-us/data-center/h100,
# ...), halved if those count sparsity, and for the RTX 4090 from Ada's white paper (float32 sums)
PEAKS = {
    "H100 PCIe": (756e12, 2.0e12),
    "H100 NVL": (835e12, 3.9e12),
    "H100": (989e12, 3.35e12),
    "H200 NVL": (835e12, 4.8e12),
    "H200": (989e12, 4.8e12),
    "A100": (312e12, 1.555e12),  # with 40 GB; the memory of the one with 80 GB is faster
    "L40S": (362e12, 0.864e12),
    "RTX 4090": (165e12, 1.008e12),
}
# The fractions of these peaks that kernels reach (a guess)
REACHED_FLOPS, REACHED_BANDWIDTH = 0.7, 0.8
# Seconds that Python needs to start an operation: a guess for a fast host, and what was measured on
# an H200 in a virtual machine (docs/results.md, "On a GPU")
HOST = (8e-6, 33e-6)
# Operations in the forward and in the backward pass of a layer of Qwen2, and those that norms of
# queries and keys add. tests/programs/test_learner.py counts these and the following numbers
OPS, OPS_OF_NORMS = (38, 86), (16, 28)
# Numbers that a token moves in operations other than matrix products, as multiples of the hidden
# size, of the inner size, of queries and keys, and of their norms
FORWARD, BACKWARD = (42, 5, 12, 18), (111, 9, 22, 47)
# The GPU that is assumed on another machine, by its GiB of memory
LIKELY = {24: "RTX 4090", 40: "A100", 48: "L40S", 80: "H100", 141: "H200"}

# ----------------------------------------------------------------------------- models and adapters


def count_parameters(model):
    return sum(parameter.numel() for parameter in model.parameters())


def size_of(run):
    """Return the bytes of a number in --dtype."""
    return 2 if run.args.dtype == "bfloat16" else 4


def count_trained(run, model):
    """Count the trained parameters: all, or those of adapters (2106.09685) and of a value head.

    A layer W gets A of shape (rank, in_features) and B of shape (out_features, rank). The head of a
    language model gets none.
    """
    if not run.args.lora_rank:
        return count_parameters(model)
    heads = (model.get_output_embeddings(), getattr(model, "score", None))
    layers = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m not in heads]
    features = sum(layer.in_features + layer.out_features for layer in layers)
    return run.args.lora_rank * features + (
        model.score.weight.numel() if hasattr(model, "score") else 0
    )


def trained_models(run):
    """Return the models that are trained, by role."""
    if run.trains_reward_model():
        return {"reward model": run.model}
    if hasattr(run.args, "value_learning_rate"):
        return {"policy": run.model, "value model": run.value_model}
    return {"policy": run.model}


def frozen_models(run):
    """Return the models that are not trained, by role."""
    if run.trains_reward_model():
        return {}
    models = {"reference policy": run.model} if run.args.beta > 0 else {}
    if run.script.uses_reward_model(run.args):
        models["reward model"] = run.reward_model
    return models


def frozen_weights(run):
    """Return the models with frozen weights. With adapters the policy is its own reference."""
    if not run.args.lora_rank:
        return frozen_models(run)
    models = trained_models(run) | frozen_models(run)
    return {name: models[name] for name in models if name != "reference policy"}


# -------------------------------------------------------------- forward and backward passes


def widths(config):
    """Return how many numbers a token has as queries, as keys (or values), and inside an MLP."""
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    keys = getattr(config, "num_key_value_heads", None) or heads
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    return heads * head_dim, keys * head_dim, inner


def token_in_layer(run, model):
    """Return the bytes that PyTorch saves for a token in a layer like Qwen's or Llama's."""
    config, size = model.config.get_text_config(), size_of(run)
    queries, keys, inner = widths(config)
    # The inputs and outputs of two norms, which compute in float32
    states = config.hidden_size * 9 * size
    attention = (queries + keys) * 2 * size  # queries, output, keys and values
    if any(hasattr(module, "q_norm") for module in model.modules()):
        attention += (queries + keys) * (4 + size)  # these norms compute in float32
    if run.options.has_gpus() and size == 4 and keys < queries:
        # GPUs have no fused attention for this case, so scores exist: (rows, heads, length, length)
        attention += size * config.num_attention_heads * run.max_length()
    if run.args.lora_rank:  # the outputs of adapters, which are added to gate and up
        states += inner * 2 * size
    return states + attention + inner * 4 * size  # gate, its activation, up, and their product


def micro_batch(run, is_trained=True):
    """Return the rows of the largest micro-batch, and the flag that limits them.

    All rows are assumed to be the longest. The number may be fractional, because shorter rows fill
    the rest of the tokens.
    """
    args, rows_flag = run.args, "per_device_train_batch_size"
    if run.trains_reward_model():
        return 2 * args.per_device_train_batch_size, rows_flag  # a pair has two rows
    by_flag = {"micro_batch_tokens": max(1, args.micro_batch_tokens / run.max_length())}
    if args.per_device_train_batch_size:
        by_flag[rows_flag] = args.per_device_train_batch_size
    if is_trained:
        by_flag["local_mini_batch_size"] = args.local_mini_batch_size
    flag = min(by_flag, key=by_flag.get)
    return by_flag[flag], flag


def pass_parts(run, model, rows, is_trained):
    """Estimate the bytes by part at the peak of a pass over some rows, in a layer or in the head.

    While a layer computes, it needs the size of what it saves for the backward pass a second time.
    """
    args, config, size = run.args, model.config.get_text_config(), size_of(run)
    tokens, is_sharded = rows * run.max_length(), bool(run.options.num_shards())
    trains_head = is_trained and not run.args.lora_rank
    layer = tokens * token_in_layer(run, model)
    saved = 0
    if is_trained:  # gradient checkpointing saves only the inputs of layers (1604.06174)
        inputs = tokens * config.hidden_size * size
        saved = config.num_hidden_layers * (inputs if args.gradient_checkpointing else layer)

    # FSDP2 gathers three layers at once, and its root unit with all parameters outside layers
    weights, root = 0, 0
    if is_sharded:
        names = model._no_split_modules or []
        layers = [count_parameters(m) for m in model.modules() if type(m).__name__ in names] or [0]
        weights = 3 * size * max(layers)
        root = (count_parameters(model) - sum(layers)) * size
    in_layer = {"activations": saved + layer, "gathered by FSDP2": weights + root}
    if hasattr(model, "score"):  # a score head is small
        return in_layer

    # Logits are computed in chunks (ChunkedHead in the scripts). Four chunks exist at once, or
    # three and the head's gradient. A copy of the head is in float32, and there are about four
    # copies of the hidden states that it reads
    head = 4 * model.get_input_embeddings().weight.numel()
    chunk = run.script.LOGITS_CHUNK["cuda" if run.options.has_gpus() else "cpu"]
    in_head = {
        "activations": saved + 4 * 4 * tokens * config.hidden_size,
        "gathered by FSDP2": root,
        "head: gradient, a copy in float32": head * (trains_head + (size == 2)),
        "logits": (4 - trains_head)
        * 4
        * min(chunk, rows * args.response_length * config.vocab_size),
    }
    return max(in_layer, in_head, key=total)


def total(parts):
    return sum(parts.values())


# ----------------------------------------------------------------------- memory of a learner


def learner_memory(run):
    """Return the name of the pass with the most memory, and the bytes of a learner by part."""
    args, options, trained = run.args, run.options, trained_models(run)
    shards = options.num_shards() or 1
    counts = [count_trained(run, model) for model in trained.values()]
    count = sum(counts) / shards
    kind = "adapters" if run.args.lora_rank else "weights"
    weights = f"{kind} of {' and '.join(trained)}"
    always = {
        weights: size_of(run) * count,
        "their float32 masters": 4 * count if args.dtype == "bfloat16" else 0,
        "AdamW's moments": 8 * count,
        "gradients": 4 * count,  # they stay between updates, as zeros
    }
    for name, model in frozen_weights(run).items():
        always[f"{name}, frozen"] = size_of(run) * count_parameters(model) / shards
    passes = {}
    for name, model in (trained | frozen_models(run)).items():
        is_trained = name in trained
        rows, flag = micro_batch(run, is_trained)
        flags = f"--{flag} {getattr(args, flag)}"
        kind = "forward and backward passes" if is_trained else "forward passes"
        passes[f"{kind} of the {name} ({flags})"] = pass_parts(run, model, rows, is_trained)
    if (
        run.args.lora_rank and not options.has_gpus()
    ):  # with GPUs, this is in the memory of the host
        merged = {"merged model, float32": 4 * count_parameters(run.model)}
        passes["the end, when the adapter is merged"] = merged
    name = max(passes, key=lambda name: total(passes[name]))
    return name, {part: size for part, size in (always | passes[name]).items() if size > 0}


def learner_needs(run):
    """Return the bytes that a learner needs on its GPU."""
    return total(learner_memory(run)[1])


def learner_room(run):
    """Return the bytes of its GPU that a learner can use, or None if the GPU is not known."""
    if run.options.gpu_memory is None:
        return None
    room = run.options.gpu_memory * GIB - cuda_reserve(run)
    if run.is_colocated():
        room -= engine_room(run)
    return max(0, room)


def cuda_reserve(run):
    """Return the bytes of a learner's GPU that limit_memory keeps from PyTorch's allocator.

    Each process needs one GiB for its context. NCCL needs one more, between ranks or from a rank to
    an engine on another GPU.
    """
    has_nccl = run.options.num_processes > 1 or bool(run.args.vllm_gpus)
    return (1 + run.is_colocated() + has_nccl) * GIB


def host_memory(run):
    """Return the bytes of a node's host memory while each learner loads its largest model."""
    models = trained_models(run) | frozen_weights(run)
    largest = max(map(count_parameters, models.values()))
    return size_of(run) * largest * run.options.local_processes()


# -------------------------------------------------------------------------- vLLM's memory, and disk


def engine_room(run):
    """Return the bytes that an engine may take of its GPUs."""
    gpus = run.args.vllm_gpu_memory_utilization * run.args.vllm_tensor_parallel_size
    return gpus * run.options.gpu_memory * GIB


def engine_memory(run):
    """Return the bytes of an engine without its KV cache."""
    config, size = run.model.config.get_text_config(), size_of(run)
    weights = size * count_parameters(run.model)
    if run.args.lora_rank:  # max_loras is 2, so there are two versions of the adapter
        weights += 2 * size * count_trained(run, run.model)
    if not run.options.has_gpus():  # VLLM_CPU_KVCACHE_SPACE, and what vLLM needs for itself
        return weights + 1.2 * GIB
    # vLLM 0.32 first runs the largest batch (engine/arg_utils.py, get_batch_defaults;
    # v1/worker/gpu/model_runner.py, profile_run). Its peak is the activations of a layer, or four
    # copies of the logits in float32. Half a GiB is for CUDA graphs
    tokens = 16_384 if max_num_seqs(run) > 256 else 8192
    activations = tokens * size * (3 * widths(config)[-1] + 4 * config.hidden_size)
    return weights + max(activations, 4 * 4 * max_num_seqs(run) * config.vocab_size) + GIB / 2


def max_num_seqs(run):
    """Return vLLM's own limit on the responses that it generates at once."""
    return 1024 if (run.options.gpu_memory or 0) >= 70 else 256


def cache_memory(run):
    """Return the bytes of vLLM's KV cache for the longest prompt with its response."""
    config = run.model.config.get_text_config()
    return 2 * config.num_hidden_layers * widths(config)[1] * size_of(run) * run.max_length()


def local_episodes(run):
    """Return the responses of a step per rank, which a colocated engine generates."""
    return run.args.local_rollout_batch_size * run.args.number_samples_per_prompt


def engine_needs(run, responses=1):
    """Return the bytes that vLLM needs to generate `responses` at once, or all of a step."""
    count = min(responses, local_episodes(run), max_num_seqs(run))
    return engine_memory(run) + count * cache_memory(run)


def responses_at_once(run, wanted):
    """Return how many of the wanted responses an engine generates at once, if all are long."""
    room = (engine_room(run) - engine_memory(run)) / cache_memory(run)
    return min(wanted, max_num_seqs(run), max(0, int(room)))


def checkpoints_on_disk(run):
    """Return how many checkpoints exist at once, and the bytes of each."""
    args, count = run.args, 0
    steps = getattr(args, "num_training_steps", args.num_updates)
    if args.save_freq > 0:
        count = (steps - 1) // args.save_freq  # no checkpoint is written after the last step
        if args.keep_last_n > 0:  # the oldest is removed after a new one is complete
            count = min(count, args.keep_last_n + 1)
    # The weights and AdamW's two moments, in float32
    return count, 12 * sum(count_trained(run, model) for model in trained_models(run).values())


def final_model(run):
    """Return the bytes of the final model; of adapters and the float32 model with them merged."""
    if run.args.lora_rank:
        adapters = size_of(run) * count_trained(run, run.model)
        return 4 * count_parameters(run.model) + adapters
    return size_of(run) * count_parameters(run.model)


# --------------------------------------------------------------------------------------- time


def peak_of(name):
    """Return the FLOP/s and the bytes per second of a GPU, or None if they are not known."""
    return next((peak for words, peak in PEAKS.items() if words in name), None)


def gpu_of(run):
    """Return the name of a run's GPU, or of a likely one of its size, or None without a GPU."""
    if torch.cuda.is_available() and not run.options.is_elsewhere():
        return torch.cuda.get_device_name()
    memory = run.options.gpu_memory
    return memory and LIKELY[min(LIKELY, key=lambda gib: abs(gib - memory))]


def flops_of_token(matrices, attention, has_adapters=False):
    """Return a token's model FLOPs in a forward pass, and in a forward and a backward pass.

    The formulas are those of 2204.02311, appendix B. `matrices` is the number of parameters that
    are multiplied, including the head. `attention` is layers x numbers of a query x length. What a
    causal mask saves is ignored, and what gradient checkpointing computes a second time is not
    counted. Frozen matrices have no gradient to compute.

    >>> flops_of_token(1000, 10), flops_of_token(1000, 10, has_adapters=True)
    ((2040, 6120), (2040, 4120))
    """
    return 2 * matrices + 4 * attention, (4 if has_adapters else 6) * matrices + 12 * attention


def flops_of(model, length):
    """Return flops_of_token of a model for rows of this length."""
    config = model.config.get_text_config()
    linear = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    attention = config.num_hidden_layers * widths(config)[0] * length
    return flops_of_token(sum(module.weight.numel() for module in linear), attention)


def pass_seconds(run, model, rows, trains=False, host=0.0):
    """Return the seconds of a forward pass over some rows; with `trains` also of its backward pass.

    This is a roofline. Each operation takes as long as its FLOPs or its bytes, whichever is longer.
    Python needs `host` seconds to start each operation, and the GPU waits if that takes longer.
    Exchanges between ranks are not counted.
    """
    config, size = model.config.get_text_config(), size_of(run)
    flops, bandwidth = peak_of(gpu_of(run))
    flops, bandwidth = flops * REACHED_FLOPS, bandwidth * REACHED_BANDWIDTH
    tokens, hidden = rows * run.max_length(), config.hidden_size
    queries, keys, inner = widths(config)
    has_norms = any(hasattr(module, "q_norm") for module in model.modules())
    shapes = [(hidden, queries), (hidden, keys), (hidden, keys), (queries, hidden)]
    shapes += [(hidden, inner), (hidden, inner), (inner, hidden)]
    matrices = sum(
        max(2 * a * b * tokens / flops, size * (a * b + tokens * (a + b)) / bandwidth)
        for a, b in shapes
    )
    attention = 4 * queries * run.max_length() * tokens / flops

    def others(of_hidden, of_inner, of_heads, of_norms):
        heads = (of_heads + of_norms * has_norms) * (queries + keys)
        numbers = of_hidden * hidden + of_inner * inner + heads
        return numbers * tokens * size / bandwidth

    layer = matrices + attention + others(*FORWARD)
    ops = OPS[0] + OPS_OF_NORMS[0] * has_norms
    products, traversals = 1, 8  # matrix products of the head, traversals of the logits
    if trains:
        again = run.args.gradient_checkpointing  # each layer is computed a second time
        # Gradients are added to those of the masters
        added = 0 if run.args.lora_rank else 10 * sum(a * b for a, b in shapes) / bandwidth
        backward = matrices * (1 if run.args.lora_rank else 2) + 2.5 * attention + others(*BACKWARD)
        layer += backward + added + again * layer
        ops += OPS[1] + OPS_OF_NORMS[1] * has_norms + again * ops
        products, traversals = 4, 15
    head = 0
    if not hasattr(model, "score"):  # the head computes in TF32, at half the rate
        logits = tokens * run.args.response_length / run.max_length() * config.vocab_size
        head = products * 4 * hidden * logits / flops + traversals * 4 * logits / bandwidth
    return max(config.num_hidden_layers * layer + head, config.num_hidden_layers * ops * host)


def learner_seconds(run, host=0.0):
    """Return the seconds of a learner's step by pass_seconds, if all rows are the longest."""
    rows, seconds = local_episodes(run), 0
    updates = run.args.num_epochs * rows / run.args.local_mini_batch_size
    trained = trained_models(run)
    for name, model in (trained | frozen_models(run)).items():
        is_trained = name in trained
        batch = run.args.local_mini_batch_size if is_trained else rows
        count = math.ceil(batch / micro_batch(run, is_trained)[0])
        forward = pass_seconds(run, model, batch / count, host=host)
        seconds += rows / batch * count * forward
        if is_trained:
            both = pass_seconds(run, model, batch / count, trains=True, host=host)
            # AdamW reads and writes a master, its gradient and two moments
            moved = 40 * count_trained(run, model) / (run.options.num_shards() or 1)
            seconds += updates * (count * both + moved / peak_of(gpu_of(run))[1])
    return seconds


def sampling_seconds(run):
    """Return the seconds of generating a step's responses at the peak of memory bandwidth.

    All responses are assumed to be the longest. For each token vLLM reads its weights once for all
    responses, and for each response the keys and values before that token.
    """
    args, gpus = run.args, len(run.args.vllm_gpus) * run.options.num_machines
    engines = gpus // args.vllm_tensor_parallel_size or run.options.num_processes
    rows = math.ceil(args.episodes_per_step / engines)
    at_once = max(1, responses_at_once(run, rows))
    read = cache_memory(run) * (1 - args.response_length / run.max_length() / 2)
    weights = size_of(run) * count_parameters(run.model)
    count = args.response_length * (math.ceil(rows / at_once) * weights + rows * read)
    return count / args.vllm_tensor_parallel_size / peak_of(gpu_of(run))[1]


def hours(run):
    """Return the hours of a run with a fast host, and those with a slow one.

    The host limits the learners. Memory bandwidth limits vLLM, which reaches all of it in the first
    number, and a third in the second.
    """
    takes_turns = run.is_colocated() or not run.args.async_mode
    combine = sum if takes_turns else max
    sampling = sampling_seconds(run)
    fast, slow = (learner_seconds(run, host) for host in HOST)
    steps = combine((fast, sampling)), combine((slow, 3 * sampling))
    return [seconds * run.args.num_training_steps / 3600 for seconds in steps]


# --------------------------------------------------------------------------------------- what fits


def with_changes(run, flags):
    """Return the same run with other flags of the script or of the launch."""
    launch = {name: flags[name] for name in flags if hasattr(run.options, name)}
    args = copy.copy(run.args)
    vars(args).update({name: flags[name] for name in flags if name not in launch})
    if "config_file" in launch:
        launch["variables"] = run.options.variables | {"ACCELERATE_USE_FSDP": "true"}
    return replace(run, args=args, options=replace(run.options, **launch))


def fits(run, responses=1):
    """Return whether learners and engines have the memory that they need for `responses`."""
    has_room = run.trains_reward_model() or engine_needs(run, responses) <= engine_room(run)
    return has_room and learner_needs(run) <= learner_room(run)


def engine_fraction(run):
    """Return the --vllm_gpu_memory_utilization with room for all responses of a step.

    If the learner on the same GPU does not leave that much, return the largest fraction with which
    the learner keeps what it needs and a tenth more, but at least room for MIN_RESPONSES.
    """
    memory = run.options.gpu_memory * GIB
    smallest = math.ceil(100 * engine_needs(run, MIN_RESPONSES) / memory)
    wanted = math.ceil(100 * engine_needs(run, math.inf) / memory)
    largest = math.floor(100 * (1 - (1.1 * learner_needs(run) + cuda_reserve(run)) / memory))
    return max(smallest, min(wanted, largest)) / 100


def with_engine_fraction(run):
    """Return the flags for vLLM's fraction of a colocated GPU with which a run fits, and that run.

    Return None if it does not fit with any fraction.
    """
    if fits(run, MIN_RESPONSES):
        return {}, run
    if run.is_colocated():
        flags = {"vllm_gpu_memory_utilization": engine_fraction(run)}
        changed = with_changes(run, flags)
        if fits(changed, MIN_RESPONSES):
            return flags, changed
    return None


def smaller_budgets(run):
    """Yield half of a micro-batch's tokens, a quarter, and so on, down to the longest row."""
    tokens = int(micro_batch(run)[0] * run.max_length())
    while tokens > run.max_length():
        tokens = max(tokens // 2, run.max_length())
        yield tokens


def what_fits(run):
    """Return the flags of the first change with which a run fits, and that run, or None.

    Changes that alter the run least are tried first: each alone, then the first two together, the
    first three, and so on.
    """
    args, options = run.args, run.options
    gpus = options.num_gpus or options.local_processes()
    learners = (gpus - len(args.vllm_gpus)) * options.num_machines
    changes = [{"gradient_checkpointing": True}]
    if run.trains_reward_model():
        changes += [{"per_device_train_batch_size": 1}]
    else:
        changes += [{"micro_batch_tokens": tokens} for tokens in smaller_budgets(run)]
        changes += [{"dtype": "bfloat16"}]
    can_shard = hasattr(run.script, "fully_shard")
    if learners > 1 and can_shard and not options.num_shards():
        sharded = {"config_file": "scripts/accelerate/fsdp2.yaml", "num_processes": learners}
        changes += [sharded | {"num_machines": options.num_machines}]
    # Only the fork of a script has this flag. The preflight answers it with the fork's command
    if f"{run.script.__name__}.py" in SCRIPTS:
        changes += [{"lora_rank": 16}]
    changes += [{"beta": 0}]
    known = {*vars(args), *vars(options), "lora_rank"}  # a fork may lack some flags
    changes = [flags for flags in changes if flags.keys() <= known]
    changes = [flags for flags in changes if not flags.items() <= vars(args).items()]
    for flags in ({}, *changes, *itertools.accumulate(changes, operator.or_)):
        solved = with_engine_fraction(with_changes(run, flags))
        if solved is not None:
            engine_flags, changed = solved
            return flags | engine_flags, changed
    return None


# ----------------------------------------------------------------------------- lines of the plan


def format_bytes(count):
    return f"{count / GIB:.1f} GiB" if count >= GIB / 10 else f"{count / 2**20:.1f} MiB"


def format_flags(flags, run):
    """Return flags as they are typed, and what a learner then needs of what it can use."""
    typed = []
    for name, value in flags.items():
        is_switch = isinstance(value, bool)
        typed.append(f"--{'' if value else 'no-'}{name}" if is_switch else f"--{name} {value}")
    needed, room = format_bytes(learner_needs(run)), format_bytes(learner_room(run))
    return f"{' '.join(typed) or 'these flags'} (learner: {needed} of {room})"


def plan_of_processes(run):
    """Yield the lines on learners, engines and hours."""
    args, options = run.args, run.options
    yield "learners", f"{options.num_processes}"
    if run.trains_reward_model() or args.num_updates == 0:
        return
    engines = options.num_processes
    place = "one on each learner's GPU" if options.has_gpus() else "one for each learner, on CPUs"
    if args.vllm_gpus:
        engines = len(args.vllm_gpus) * options.num_machines // args.vllm_tensor_parallel_size
        place = f"on GPUs {', '.join(map(str, args.vllm_gpus))} of each node"
    yield "engines", f"{engines} of vLLM, {place}"
    if run.knows_sizes() and options.gpu_memory and peak_of(gpu_of(run)):
        low, high = hours(run)
        numbers = f"{low:.2g} to {high:.2g}" if high >= 0.1 else "less than 0.1"
        yield "hours", f"{numbers} on {gpu_of(run)}, if all rows have the maximum length"
        yield "", "(a rough estimate without evaluations; see docs/memory.md)"


def advice(run):
    """Yield lines on the size of micro-batches on a GPU: what is slow, faster, or saves memory."""
    args = run.args
    if run.trains_reward_model() or learner_room(run) is None:
        return
    rows, flag = micro_batch(run)
    tokens = int(rows * run.max_length())
    if flag == "per_device_train_batch_size" and 2 * tokens <= args.micro_batch_tokens:
        yield (
            f"--{flag} {rows} limits micro-batches to {tokens:,} tokens, although "
            f"--micro_batch_tokens allows {args.micro_batch_tokens:,}; small ones leave a GPU idle"
        )
    for smaller in [*smaller_budgets(run)][:1]:
        changed = with_changes(run, {"micro_batch_tokens": smaller})
        saved = format_bytes(learner_needs(run) - learner_needs(changed))
        yield f"if PyTorch runs out of memory, --micro_batch_tokens {smaller} saves {saved}"
    if peak_of(gpu_of(run)):
        seconds = learner_seconds(run, HOST[1])
        for flags in ({"gradient_checkpointing": False}, {"micro_batch_tokens": 32_768}):
            changed = with_changes(run, flags)
            has_room = learner_needs(changed) <= 0.95 * learner_room(run)
            if has_room and (part := learner_seconds(changed, HOST[1]) / seconds) < 0.95:
                yield f"faster: {format_flags(flags, changed)} takes {part:.0%} of the time"


def plan_of_engine(run):
    """Yield the lines on vLLM's memory, and on the responses that it generates at once."""
    if not run.options.has_gpus():
        yield "vLLM", f"needs at least {format_bytes(engine_memory(run))}"
        return
    fraction = run.args.vllm_gpu_memory_utilization
    gets = f"gets {fraction:.0%} of its GPU (--vllm_gpu_memory_utilization)"
    yield "vLLM", f"needs at least {format_bytes(engine_needs(run))}, and {gets}"
    if not (run.is_colocated() and run.options.gpu_memory):
        return
    wanted = local_episodes(run)
    count = responses_at_once(run, wanted)
    length = f"{run.max_length():,} tokens with their prompts"
    yield "", f"generates {count:,} of a step's {wanted:,} responses at once, if all have {length}"
    if count == max_num_seqs(run) < wanted:
        yield "", f"(vLLM generates at most {count:,} at once)"
    if count >= min(wanted, MANY_RESPONSES):
        return
    larger = engine_fraction(run)
    changed = with_changes(run, {"vllm_gpu_memory_utilization": larger})
    if larger > fraction and fits(changed):
        more = f"--vllm_gpu_memory_utilization {larger:g}"
        count = responses_at_once(changed, wanted)
        yield "advice", f"{more} has room for {count:,} responses at once"
    else:
        few = f"vLLM generates only {count:,} responses at once"
        yield "advice", f"{few}, but the learner needs the rest of the GPU; see --vllm_gpus"
