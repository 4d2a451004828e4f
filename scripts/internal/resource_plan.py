"""The arithmetic of a run: what its models take of GPUs and disk, what vLLM takes, and what fits.

scripts/preflight.py prints it. Each function takes its Run: the arguments of a script, where it is
launched, and its models, which have shapes and no weights. Sizes are in bytes. It is an estimate,
within a tenth of what PyTorch counts (benchmark/fake_memory.py; docs/results.md).

    a trained parameter   18: its weight in --dtype; in float32 its master, the gradient, and
                          AdamW's two moments (1412.6980). With --dtype float32 it is 16, because
                          the weight is the master
    a frozen parameter    2 or 4: its weight, in --dtype
    on disk               12 a trained parameter: a checkpoint has no gradients
    vLLM                  its weights in --dtype, and the cache of keys and values (2309.06180)

The rest is what a pass holds on the way: pass_parts. FSDP2 gives each of N ranks 1/N of the above.
Hours are a roofline: FLOPs, bytes and operations of the learners, and bytes that vLLM reads for
each token.
"""

import copy
import itertools
import math
import operator
from dataclasses import replace

import torch
from fork import SCRIPTS

GIB = 2**30
SOME_RESPONSES = 8  # at once are room enough: with a cache for one vLLM starts, but is slow
# With fewer at once vLLM needs about as long for a token of each as for one more of them, since it
# waits for the weights to be read
FEW_RESPONSES = 64
# FLOP/s of dense bfloat16 and bytes a second of memory of a GPU whose name has the words, the first
# that fits. By NVIDIA's data sheets (nvidia.com/en-us/data-center/h100, ...), halved where they
# count sparsity; RTX 4090: by Ada's white paper, with sums in float32
PEAKS = {
    "H100 PCIe": (756e12, 2.0e12),
    "H100 NVL": (835e12, 3.9e12),
    "H100": (989e12, 3.35e12),
    "H200 NVL": (835e12, 4.8e12),
    "H200": (989e12, 4.8e12),
    "A100": (312e12, 1.555e12),  # of 40 GB; with 80 its memory is faster
    "L40S": (362e12, 0.864e12),
    "RTX 4090": (165e12, 1.008e12),
}
# Of these, kernels reach about so much (a guess)
REACHED_FLOPS, REACHED_BANDWIDTH = 0.7, 0.8
# Seconds that Python needs for an operation: a guess for a fast host, and what an H200 in a virtual
# machine was measured at (docs/results.md, "On a GPU")
HOST = (8e-6, 33e-6)
# Operations of a layer of Qwen2 forward and backward, and what norms of queries and keys add. Then
# numbers that a token moves in those that are no matrix products: of the hidden size, of the inner
# size, of queries and keys, and of their norms. Counted (tests/programs/test_learner.py)
OPS, OPS_OF_NORMS = (38, 86), (16, 28)
FORWARD, BACKWARD = (42, 5, 12, 18), (111, 9, 22, 47)
LIKELY = {24: "RTX 4090", 40: "A100", 48: "L40S", 80: "H100", 141: "H200"}  # GiB of a GPU elsewhere

# ----------------------------------------------------------------------------- models and adapters


def count_parameters(model):
    return sum(parameter.numel() for parameter in model.parameters())


def size_of(run):
    """Bytes of a number in --dtype."""
    return 2 if run.args.dtype == "bfloat16" else 4


def rank_of(run):
    """The rank of adapters, which a fork has (docs/adapters.md); 0: all weights are trained."""
    return run.args.lora_rank


def count_trained(run, model):
    """Parameters that are trained: all, or those of adapters (2106.09685) and of a value head.

    A layer W gets A, (rank, in_features), and B, (out_features, rank); a head gets none.
    """
    if not rank_of(run):
        return count_parameters(model)
    heads = (model.get_output_embeddings(), getattr(model, "score", None))
    layers = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m not in heads]
    features = sum(layer.in_features + layer.out_features for layer in layers)
    return rank_of(run) * features + (model.score.weight.numel() if hasattr(model, "score") else 0)


def trained_models(run):
    """The models that are trained, by role."""
    if run.trains_reward_model():
        return {"reward model": run.model}
    if hasattr(run.args, "value_learning_rate"):
        return {"policy": run.model, "value model": run.value_model}
    return {"policy": run.model}


def frozen_models(run):
    """The models that are not trained, by role."""
    if run.trains_reward_model():
        return {}
    models = {"reference policy": run.model} if run.args.beta > 0 else {}
    if run.script.uses_reward_model(run.args):
        models["reward model"] = run.reward_model
    return models


def frozen_weights(run):
    """The models whose weights are there in --dtype. With adapters the policy is its reference."""
    if not rank_of(run):
        return frozen_models(run)
    models = trained_models(run) | frozen_models(run)
    return {name: models[name] for name in models if name != "reference policy"}


# ----------------------------------------------------------------------------- a learner's passes


def widths(config):
    """Numbers of a token: its queries, its keys or values, and within an MLP."""
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    keys = getattr(config, "num_key_value_heads", None) or heads
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    return heads * head_dim, keys * head_dim, inner


def token_in_layer(run, model):
    """Return the bytes of a token that PyTorch saves in a layer, as of Qwen or Llama."""
    config, size = model.config.get_text_config(), size_of(run)
    queries, keys, inner = widths(config)
    # What goes into two norms, which compute in float32, and what comes out of them
    states = config.hidden_size * 9 * size
    attention = (queries + keys) * 2 * size  # queries, and what comes out; keys and values
    if any(hasattr(module, "q_norm") for module in model.modules()):
        attention += (queries + keys) * (4 + size)  # they are normed in float32
    if run.options.has_gpus() and size == 4 and keys < queries:
        # No fused attention of a GPU takes that: there are scores, (rows, heads, length, length)
        attention += size * config.num_attention_heads * run.max_length()
    if rank_of(run):  # what adapters add to gate and up exists beside them
        states += inner * 2 * size
    return states + attention + inner * 4 * size  # gate, its activation, up, and their product


def micro_batch(run, is_trained=True):
    """Return the rows of the largest micro-batch, and the flag that bounds them.

    Rows are the longest, but there may be a fraction of one, because shorter rows fill the budget.
    """
    args, rows_flag = run.args, "per_device_train_batch_size"
    if run.trains_reward_model():
        return 2 * args.per_device_train_batch_size, rows_flag  # a pair has two
    by_flag = {"micro_batch_tokens": max(1, args.micro_batch_tokens / run.max_length())}
    if args.per_device_train_batch_size:
        by_flag[rows_flag] = args.per_device_train_batch_size
    if is_trained:
        by_flag["local_mini_batch_size"] = args.local_mini_batch_size
    flag = min(by_flag, key=by_flag.get)
    return by_flag[flag], flag


def pass_parts(run, model, rows, is_trained):
    """About what a pass over some rows holds at its worst moment, by part: in a layer or the head.

    Of a layer that computes, as much comes and goes as is saved for its backward pass.
    """
    args, config, size = run.args, model.config.get_text_config(), size_of(run)
    tokens, is_sharded = rows * run.max_length(), bool(run.options.num_shards())
    is_whole = is_trained and not rank_of(run)
    layer = tokens * token_in_layer(run, model)
    saved = 0
    if is_trained:  # with checkpoints the inputs of layers alone (1604.06174)
        inputs = tokens * config.hidden_size * size
        saved = config.num_hidden_layers * (inputs if args.gradient_checkpointing else layer)

    # What FSDP2 has gathered: three layers, and the root unit, which is what is in no layer
    weights, root = 0, 0
    if is_sharded:
        names = model._no_split_modules or []
        layers = [count_parameters(m) for m in model.modules() if type(m).__name__ in names] or [0]
        weights = 3 * size * max(layers)
        root = (count_parameters(model) - sum(layers)) * size
    in_layer = {"activations": saved + layer, "gathered by FSDP2": weights + root}
    if hasattr(model, "score"):  # its head is small
        return in_layer

    # The logits are in chunks, of which four exist at once, or three beside the head's gradient
    # (ChunkedHead in the scripts). There are its copy, rounded but in float32, and the hidden
    # states that it reads, about four times
    head = 4 * model.get_input_embeddings().weight.numel()
    chunk = run.script.LOGITS_CHUNK["cuda" if run.options.has_gpus() else "cpu"]
    in_head = {
        "activations": saved + 4 * 4 * tokens * config.hidden_size,
        "gathered by FSDP2": root,
        "head: gradient, a copy in float32": head * (is_whole + (size == 2)),
        "logits": (4 - is_whole) * 4 * min(chunk, rows * args.response_length * config.vocab_size),
    }
    return max(in_layer, in_head, key=total)


def total(parts):
    return sum(parts.values())


# -------------------------------------------------------------------------------- learners in all


def learner_memory(run):
    """The pass that takes the most, and the bytes of a learner's GPU then, by part."""
    args, options, trained = run.args, run.options, trained_models(run)
    shards = options.num_shards() or 1
    counts = [count_trained(run, model) for model in trained.values()]
    count = sum(counts) / shards
    kind = "adapters" if rank_of(run) else "weights"
    weights = f"{kind} of {' and '.join(trained)}"
    always = {
        weights: size_of(run) * count,
        "their float32 masters": 4 * count if args.dtype == "bfloat16" else 0,
        "AdamW's moments": 8 * count,
        "gradients": 4 * count,  # between updates they are zeros
    }
    for name, model in frozen_weights(run).items():
        always[f"{name}, frozen"] = size_of(run) * count_parameters(model) / shards
    passes = {}
    for name, model in (trained | frozen_models(run)).items():
        is_trained = name in trained
        rows, flag = micro_batch(run, is_trained)
        flags = f"--{flag} {getattr(args, flag)}"
        passes[f"passes of the {name} ({flags})"] = pass_parts(run, model, rows, is_trained)
    if rank_of(run) and not options.has_gpus():  # with GPUs that is in the memory of the machine
        merged = {"merged model, float32": 4 * count_parameters(run.model)}
        passes["the end, when the adapter is merged"] = merged
    name = max(passes, key=lambda name: total(passes[name]))
    return name, {part: size for part, size in (always | passes[name]).items() if size > 0}


def learner_needs(run):
    """Bytes that a learner needs of its GPU."""
    return total(learner_memory(run)[1])


def learner_room(run):
    """Bytes of its GPU that a learner may take; None: the GPU is not known."""
    if run.options.gpu_memory is None:
        return None
    room = run.options.gpu_memory * GIB - left_to_cuda(run)
    if run.shares_gpus():
        room -= engine_room(run)
    return max(0, room)


def left_to_cuda(run):
    """Bytes of a learner's GPU that PyTorch's allocator is not to have, as limit_memory has it.

    A GiB is for the context of each process, and one for NCCL: between ranks, and from a rank to an
    engine on other GPUs.
    """
    has_no_nccl = run.options.num_processes == 1 and not run.args.vllm_gpus
    return (2 + run.shares_gpus() - has_no_nccl) * GIB


def host_memory(run):
    """Bytes of a machine, not of its GPUs, while each of its learners loads its largest model."""
    models = trained_models(run) | frozen_weights(run)
    largest = max(map(count_parameters, models.values()))
    return size_of(run) * largest * run.options.local_processes()


# -------------------------------------------------------------------------- vLLM's memory, and disk


def engine_room(run):
    """Bytes that vLLM takes of the GPUs of an engine."""
    gpus = run.args.vllm_gpu_memory_utilization * run.args.vllm_tensor_parallel_size
    return gpus * run.options.gpu_memory * GIB


def engine_memory(run):
    """Bytes of an engine without its KV cache."""
    config, size = run.model.config.get_text_config(), size_of(run)
    weights = size * count_parameters(run.model)
    if rank_of(run):  # of two versions: max_loras is 2
        weights += 2 * size * count_trained(run, run.model)
    if not run.options.has_gpus():  # it has VLLM_CPU_KVCACHE_SPACE, and needs some for itself
        return weights + 1.2 * GIB
    # vLLM 0.32 first tries the largest batch (engine/arg_utils.py, get_batch_defaults;
    # v1/worker/gpu/model_runner.py, profile_run): the activations of a layer, or the logits to
    # sample from in float32, with three copies. Half a GiB is for CUDA graphs
    tokens = 16_384 if most_at_once(run) > 256 else 8192
    activations = tokens * size * (3 * widths(config)[-1] + 4 * config.hidden_size)
    return weights + max(activations, 4 * 4 * most_at_once(run) * config.vocab_size) + GIB / 2


def most_at_once(run):
    """Responses that vLLM samples at once, whatever its cache holds; on an A100 256."""
    return 1024 if (run.options.gpu_memory or 0) >= 70 else 256


def cache_memory(run):
    """Bytes of vLLM's KV cache for the longest prompt with its response."""
    config = run.model.config.get_text_config()
    return 2 * config.num_hidden_layers * widths(config)[1] * size_of(run) * run.max_length()


def local_episodes(run):
    """Responses of a step, of each rank; so many has an engine on a shared GPU to sample."""
    return run.args.local_rollout_batch_size * run.args.number_samples_per_prompt


def engine_needs(run, responses=1):
    """Bytes that vLLM needs with a cache for so many rows, or for all of a step."""
    count = min(responses, local_episodes(run), most_at_once(run))
    return engine_memory(run) + count * cache_memory(run)


def responses_at_once(run):
    """How many of a step's responses an engine on a shared GPU samples at once, if all are long."""
    room = (engine_room(run) - engine_memory(run)) / cache_memory(run)
    return min(local_episodes(run), most_at_once(run), max(0, int(room)))


def checkpoints_on_disk(run):
    """How many checkpoints are there at once, and the bytes of each."""
    args, count = run.args, 0
    steps = getattr(args, "num_training_steps", args.num_updates)
    if args.save_freq > 0:
        count = (steps - 1) // args.save_freq  # there is none after the last step
        if args.keep_last_n > 0:  # the oldest is removed only when a new one is whole
            count = min(count, args.keep_last_n + 1)
    # Weights and AdamW's two moments, in float32
    return count, 12 * sum(count_trained(run, model) for model in trained_models(run).values())


def final_model(run):
    """Bytes of the final model; adapters are merged into it in float32, and are beside it."""
    if rank_of(run):
        adapters = size_of(run) * count_trained(run, run.model)
        return 4 * count_parameters(run.model) + adapters
    return size_of(run) * count_parameters(run.model)


# --------------------------------------------------------------------------------------- the clock


def peak_of(name):
    """FLOP/s and bytes a second of a GPU; None: not known."""
    return next((peak for words, peak in PEAKS.items() if words in name), None)


def gpu_of(run):
    """The name of a run's GPU, or of a likely one of its memory; None: it has none."""
    if torch.cuda.is_available() and not run.options.is_elsewhere():
        return torch.cuda.get_device_name()
    memory = run.options.gpu_memory
    return memory and LIKELY[min(LIKELY, key=lambda gib: abs(gib - memory))]


def flops_of_token(matrices, attention, has_adapters=False):
    """Model FLOPs of a token: of a forward pass, and of an update's two (2204.02311, appendix B).

    matrices: parameters that are multiplied, the head among them. attention: layers x numbers of a
    query x length, so without a causal mask's saving. Frozen matrices have no gradient to compute.
    What a backward pass computes a second time, with checkpoints, is not counted.

    >>> flops_of_token(1000, 10), flops_of_token(1000, 10, has_adapters=True)
    ((2040, 6120), (2040, 4120))
    """
    return 2 * matrices + 4 * attention, (4 if has_adapters else 6) * matrices + 12 * attention


def flops_of(model, length, has_adapters=False):
    """flops_of_token, for rows of this length; adapters' own are few."""
    config = model.config.get_text_config()
    linear = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    attention = config.num_hidden_layers * widths(config)[0] * length
    return flops_of_token(sum(m.weight.numel() for m in linear), attention, has_adapters)


def pass_seconds(run, model, rows, trains=False, host=0.0):
    """Return seconds of a forward pass over some rows; with `trains` of an update's, with backward.

    It is a roofline. Each operation takes as long as its FLOPs or its bytes, whichever is longer.
    Python needs `host` seconds for each operation. The GPU waits for Python where that is slower.
    Exchanges between ranks are not counted.
    """
    config, size = model.config.get_text_config(), size_of(run)
    flops, bandwidth = peak_of(gpu_of(run))
    flops, bandwidth = flops * REACHED_FLOPS, bandwidth * REACHED_BANDWIDTH
    tokens, hidden = rows * run.max_length(), config.hidden_size
    queries, keys, inner = widths(config)
    has_norms = any(hasattr(module, "q_norm") for module in model.modules())
    sides = [(hidden, queries), (hidden, keys), (hidden, keys), (queries, hidden)]
    sides += [(hidden, inner), (hidden, inner), (inner, hidden)]
    matrices = sum(
        max(2 * a * b * tokens / flops, size * (a * b + tokens * (a + b)) / bandwidth)
        for a, b in sides
    )
    attention = 4 * queries * run.max_length() * tokens / flops

    def others(of_hidden, of_inner, of_heads, of_norms):
        heads = (of_heads + of_norms * has_norms) * (queries + keys)
        numbers = of_hidden * hidden + of_inner * inner + heads
        return numbers * tokens * size / bandwidth

    layer = matrices + attention + others(*FORWARD)
    ops = OPS[0] + OPS_OF_NORMS[0] * has_norms
    passes, walks = 1, 8  # through the logits
    if trains:
        again = run.args.gradient_checkpointing
        added = 0 if rank_of(run) else 10 * sum(a * b for a, b in sides) / bandwidth  # to masters
        backward = matrices * (1 if rank_of(run) else 2) + 2.5 * attention + others(*BACKWARD)
        layer += backward + added + again * layer
        ops += OPS[1] + OPS_OF_NORMS[1] * has_norms + again * ops
        passes, walks = 4, 15
    head = 0
    if not hasattr(model, "score"):  # in TF32, at half the rate
        logits = tokens * run.args.response_length / run.max_length() * config.vocab_size
        head = passes * 4 * hidden * logits / flops + walks * 4 * logits / bandwidth
    return max(config.num_hidden_layers * layer + head, config.num_hidden_layers * ops * host)


def learner_seconds(run, host=0.0):
    """Seconds of a step of a learner by pass_seconds, if all rows are the longest."""
    rows, seconds = local_episodes(run), 0
    in_step = run.args.num_epochs * rows / run.args.local_mini_batch_size  # updates
    trained = trained_models(run)
    for name, model in (trained | frozen_models(run)).items():
        most = rows if name not in trained else run.args.local_mini_batch_size
        count = math.ceil(most / micro_batch(run, name in trained)[0])
        each = pass_seconds(run, model, most / count, host=host)
        seconds += rows / most * count * each
        if name in trained:
            each = pass_seconds(run, model, most / count, trains=True, host=host)
            # AdamW reads and writes a master, its gradient and two moments
            written = 40 * count_trained(run, model) / (run.options.num_shards() or 1)
            seconds += in_step * (count * each + written / peak_of(gpu_of(run))[1])
    return seconds


def sampling_seconds(run):
    """Seconds of a step's responses at the bandwidth of memory, if all are the longest.

    For each token of each of them vLLM reads its weights once, and the keys and values before it.
    """
    args, gpus = run.args, len(run.args.vllm_gpus) * run.options.num_machines
    engines = gpus // args.vllm_tensor_parallel_size or run.options.num_processes
    rows = math.ceil(args.episodes_per_step / engines)
    room = (engine_room(run) - engine_memory(run)) / cache_memory(run)
    at_once = max(1, min(rows, most_at_once(run), int(room)))
    read = cache_memory(run) * (1 - args.response_length / run.max_length() / 2)
    weights = size_of(run) * count_parameters(run.model)
    count = args.response_length * (math.ceil(rows / at_once) * weights + rows * read)
    return count / args.vllm_tensor_parallel_size / peak_of(gpu_of(run))[1]


def hours(run):
    """The fewest and the most: with a fast and a slow host, vLLM at all and a third of the rate."""
    takes_turns = run.shares_gpus() or not run.args.async_mode
    seconds = sum if takes_turns else max
    sampling = sampling_seconds(run)
    fast, slow = (learner_seconds(run, host) for host in HOST)
    ends = seconds((fast, sampling)), seconds((slow, 3 * sampling))
    return [end * run.args.num_training_steps / 3600 for end in ends]


# --------------------------------------------------------------------------------------- what fits


def with_changes(run, flags):
    """The same run with other flags, of the script or of the launch."""
    launch = {name: flags[name] for name in flags if hasattr(run.options, name)}
    args = copy.copy(run.args)
    vars(args).update({name: flags[name] for name in flags if name not in launch})
    if "config_file" in launch:
        launch["variables"] = run.options.variables | {"ACCELERATE_USE_FSDP": "true"}
    return replace(run, args=args, options=replace(run.options, **launch))


def fits(run, responses=1):
    """Whether learners have the memory that they need, and engines, for so many responses."""
    has_room = run.trains_reward_model() or engine_needs(run, responses) <= engine_room(run)
    return has_room and learner_needs(run) <= learner_room(run)


def propose_share(run):
    """The --vllm_gpu_memory_utilization with room for all responses of a step, or the largest.

    A learner on the same GPU keeps what it needs and a tenth more, if that leaves some responses.
    """
    memory = run.options.gpu_memory * GIB
    least = engine_needs(run, SOME_RESPONSES) / memory
    wanted = engine_needs(run, math.inf) / memory
    most = 1 - (1.1 * learner_needs(run) + left_to_cuda(run)) / memory
    return max(math.ceil(100 * least), min(math.ceil(100 * wanted), math.floor(100 * most))) / 100


def with_share(run):
    """The run so that it fits, and the flags for that: vLLM's share of a shared GPU. None: none."""
    shares = [{}]
    if run.shares_gpus():
        shares.append({"vllm_gpu_memory_utilization": propose_share(run)})
    for share in shares:
        changed = with_changes(run, share)
        if fits(changed, SOME_RESPONSES):
            return share, changed
    return None


def smaller_budgets(run):
    """Yield half of --micro_batch_tokens, a quarter, and so on, down to the longest row."""
    tokens = int(micro_batch(run)[0] * run.max_length())
    while tokens > run.max_length():
        tokens = max(tokens // 2, run.max_length())
        yield tokens


def what_fits(run):
    """[(flags, run)] of the first change that fits, or none; what changes little is tried first.

    They are tried one by one, then the first two, the first three, and so on.
    """
    args, options = run.args, run.options
    gpus = options.num_gpus or options.local_processes()
    learners = (gpus - len(args.vllm_gpus)) * options.num_machines
    sharded = {"config_file": "scripts/accelerate/fsdp2.yaml", "num_processes": learners}
    sharded["num_machines"] = options.num_machines
    can_shard = hasattr(run.script, "fully_shard")
    changes = [
        {"gradient_checkpointing": True},
        *({"micro_batch_tokens": tokens} for tokens in smaller_budgets(run)),
        {"dtype": "bfloat16"},
        *([sharded] if learners > 1 and can_shard and not options.num_shards() else []),
        # Only a fork has this flag. Given to a script, the preflight names the command for a fork
        *([{"lora_rank": 16}] if f"{run.script.__name__}.py" in SCRIPTS else []),
        {"beta": 0},
    ]
    if run.trains_reward_model():
        changes = [changes[0], {"per_device_train_batch_size": 1}]
    known = {*vars(args), *vars(options), "lora_rank"}  # a fork may have fewer
    changes = [flags for flags in changes if flags.keys() <= known]
    changes = [flags for flags in changes if not flags.items() <= vars(args).items()]
    for flags in ({}, *changes, *itertools.accumulate(changes, operator.or_)):
        solved = with_share(with_changes(run, flags))
        if solved is not None:
            share, changed = solved
            return [(flags | share, changed)]
    return []


# ---------------------------------------------------------------------------------------- in words


def in_words(count):
    """A number of bytes, as MiB or GiB."""
    return f"{count / GIB:.1f} GiB" if count >= GIB / 10 else f"{count / 2**20:.1f} MiB"


def in_flags(flags, run):
    """What is typed, and what a learner then needs and has."""
    typed = []
    for name, value in flags.items():
        is_switch = isinstance(value, bool)
        typed.append(f"--{'' if value else 'no-'}{name}" if is_switch else f"--{name} {value}")
    needed, room = learner_needs(run), learner_room(run)
    return f"{' '.join(typed) or 'these flags'}: {in_words(needed)} of {in_words(room)}"


def plan_of_processes(run):
    """Lines on learners and engines."""
    args, options = run.args, run.options
    yield "learners", f"{options.num_processes}"
    if run.trains_reward_model() or args.num_updates == 0:
        return
    engines = options.num_processes
    place = "on each learner's GPU" if options.has_gpus() else "for each learner, on the CPU"
    if args.vllm_gpus:
        engines = len(args.vllm_gpus) * options.num_machines // args.vllm_tensor_parallel_size
        place = f"on GPUs {', '.join(map(str, args.vllm_gpus))} of each machine"
    yield "engines", f"{engines} of vLLM, {place}"
    if run.knows_sizes() and run.options.gpu_memory and peak_of(gpu_of(run)):
        low, high = (f"{float(f'{end:.2g}'):g}" for end in hours(run))
        gpu = gpu_of(run)
        yield "hours", f"{low} to {high} on {gpu}, if all rows are the longest. This is a roofline,"
        yield (
            "",
            f"no measurement: {1e6 * HOST[0]:g} to {1e6 * HOST[1]:g} microseconds of Python for an",
        )
        yield "", "operation, vLLM at all or a third of its memory's bandwidth, no evaluations"


def advice(run):
    """Lines on the size of micro-batches on a GPU: what is slow, is faster, or makes room."""
    args, needed = run.args, learner_needs(run)
    if run.trains_reward_model() or learner_room(run) is None:
        return
    rows, flag = micro_batch(run)
    tokens = int(rows * run.max_length())
    if flag == "per_device_train_batch_size" and 2 * tokens <= args.micro_batch_tokens:
        yield (
            f"--{flag} {rows} keeps micro-batches at {tokens:,} tokens, of the "
            f"{args.micro_batch_tokens:,} of --micro_batch_tokens; small ones leave a GPU idle"
        )
    if smaller := [*smaller_budgets(run)][:1]:
        flags = {"micro_batch_tokens": smaller[0]}
        saved = needed - learner_needs(with_changes(run, flags))
        yield (
            f"if PyTorch is out of memory: --micro_batch_tokens {smaller[0]} takes "
            f"{in_words(saved)} less"
        )
    if peak_of(gpu_of(run)):
        now = learner_seconds(run, HOST[1])
        for flags in ({"gradient_checkpointing": False}, {"micro_batch_tokens": 32_768}):
            changed = with_changes(run, flags)
            has_room = learner_needs(changed) <= 0.95 * learner_room(run)
            if has_room and (part := learner_seconds(changed, HOST[1]) / now) < 0.95:
                yield f"faster, {part:.0%} of the time by the roofline: {in_flags(flags, changed)}"


def room_for_responses(run):
    """In words: how many responses vLLM samples at once on a shared GPU, and what would help."""
    count, share = responses_at_once(run), propose_share(run)
    words = (
        f"which has room for {count:,} of a step's {local_episodes(run):,} responses at once, "
        f"if all are of {run.max_length():,} tokens with their prompts"
    )
    if min(count + 1, local_episodes(run)) > 256:
        words += f"; vLLM samples at most {most_at_once(run):,} at once, on an A100 256"
    if count >= min(local_episodes(run), FEW_RESPONSES):
        return words
    other = with_changes(run, {"vllm_gpu_memory_utilization": share})
    if share <= run.args.vllm_gpu_memory_utilization or not fits(other):
        return f"{words}: few, but the learner needs the rest; see --vllm_gpus"
    return f"{words}: few; with {share:g} there is room for {responses_at_once(other):,}"
