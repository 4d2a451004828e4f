"""The arithmetic of a run: what its models take of GPUs and disk, what vLLM takes, and what fits.

scripts/preflight.py prints it, and makes the runs that these functions take: a script's arguments,
where it is launched, and its models, without their weights. Sizes are in bytes. It is an estimate:
docs/results.md has what runs took on CPUs, and nobody has measured it on GPUs.
"""

import itertools
import math
from dataclasses import replace

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

GIB = 2**30
# Of a shared GPU the scripts leave this to CUDA, of which each process has a context
CONTEXTS = 2 * GIB
# With a cache for one response vLLM starts, but what is proposed has room for some
SOME_RESPONSES = 8

# ----------------------------------------------------------------------------- models and adapters


def count_parameters(model):
    return sum(parameter.numel() for parameter in model.parameters())


def size_of(run):
    """Bytes of a number in --dtype."""
    return 2 if run.args.dtype == "bfloat16" else 4


def rank_of(run):
    """The rank of adapters; 0: all weights are trained."""
    return getattr(run.args, "lora_rank", 0)


def adapted_layers(model):
    """The linear layers that get adapters: all but the head."""
    heads = (model.get_output_embeddings(), getattr(model, "score", None))
    return [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m not in heads]


def count_trained(run, model):
    """Parameters that are trained: all, or those of adapters (2106.09685) and of a value head.

    A layer W gets A, (rank, in_features), and B, (out_features, rank).
    """
    if not rank_of(run):
        return count_parameters(model)
    features = sum(layer.in_features + layer.out_features for layer in adapted_layers(model))
    head = model.score.weight.numel() if hasattr(model, "score") else 0
    return rank_of(run) * features + head


def trained_models(run):
    """The models that are trained, by role."""
    if run.trains_reward_model():
        return {"reward model": run.model}
    if hasattr(run.args, "value_learning_rate"):
        return {"policy": run.model, "value model": run.value_model}
    return {"policy": run.model}


def frozen_models(run):
    """The models that are not trained, by role."""
    models = {}
    if not run.trains_reward_model():
        if run.args.beta > 0:
            models["reference policy"] = run.model
        if run.script.uses_reward_model(run.args):
            models["reward model"] = run.reward_model
    return models


def frozen_weights(run):
    """The models whose weights are there in --dtype. With adapters the policy is its reference."""
    models = frozen_models(run)
    if rank_of(run):
        models = trained_models(run) | models
        models.pop("reference policy", None)
    return models


# ------------------------------------------------------------------------------- memory of learners


def pass_parts(run, model, rows, is_trained):
    """About what a pass over some rows holds at its worst moment, backward pass included, by part.

    Counted are the tensors that PyTorch saves for the backward pass of a layer as Qwen2's or
    Llama's. One more such layer stands for what comes and goes.
    """
    args, config, size = run.args, model.config.get_text_config(), size_of(run)
    has_adapters = is_trained and rank_of(run) > 0
    hidden = config.hidden_size
    inner = getattr(config, "intermediate_size", None) or 4 * hidden
    tokens = rows * run.max_length()
    # Of the residual stream and its norms 16 bytes, where it is in bfloat16 8; of inputs of matrix
    # products, which autocast copies for each, 8 or 10; of queries, keys, values and attention's
    # output 16 or 8. The MLP has four of the inner size
    stream = size if run.options.num_shards() or has_adapters else 4
    of_hidden = 4 * stream + 12 + 3 * size
    layer = tokens * (hidden * of_hidden + size * 4 * inner)
    adapter = 0  # what comes and goes
    if has_adapters:
        # peft 0.21.2, tuners/lora/layer.py, Linear.forward: x is cast to float32, and back by
        # autocast, so that attention's output is kept twice; A x is kept; B A x and its multiple
        # are there while a layer computes
        adapted, is_cast = adapted_layers(model), size == 2
        of_ranks = rank_of(run) * len(adapted) / config.num_hidden_layers
        layer += tokens * size * (of_ranks + is_cast * hidden)
        widest = max(4 * is_cast * m.in_features + 2 * size * m.out_features for m in adapted)
        adapter = tokens * widest
    window = getattr(config, "sliding_window", None)
    if window and window < run.max_length():  # then there is a mask: (rows, length, length)
        layer += tokens * size * run.max_length()
    heads = config.num_attention_heads
    has_fewer_key_heads = getattr(config, "num_key_value_heads", heads) != heads
    if run.options.has_gpus() and args.dtype == "float32" and has_fewer_key_heads:
        # No fused attention of a GPU takes that: there are scores, (rows, heads, length, length)
        layer += tokens * size * heads * run.max_length()
    embedding = 4 * model.get_input_embeddings().weight.numel()
    logits = head = 0
    if not hasattr(model, "score"):
        head = embedding  # its gradient, or a copy in float32
        all_logits = rows * args.response_length * config.vocab_size
        device = "cuda" if run.options.has_gpus() else "cpu"
        logits = 16 * min(run.script.LOGITS_CHUNK[device], all_logits)  # four chunks exist at once
    # FSDP2's units: each layer, and the rest
    layers = model._no_split_modules or []
    units = [count_parameters(m) for m in model.modules() if type(m).__name__ in layers] or [0]
    trained = count_trained(run, model) if has_adapters else sum(units)
    # Autocast's, of the weights that are float32, until the pass has ended
    copies = 2 * trained if size == 2 and is_trained else 0
    root = forward = backward = 0
    if run.options.num_shards():
        root = 4 if is_trained and not has_adapters else size
        copies, root = 0, root * (count_parameters(model) - sum(units))
        # Two layers are gathered, and one of them has a buffer. A layer's gradient has a copy in
        # float32 to send, and gloo one more
        forward = root + 3 * size * max(units)
        backward = forward + 8 * (trained / len(units) if has_adapters else max(units))
    # Of a frozen model about half a layer is there at once
    moments = [(layer / 2, 0, 0, 0, forward), (0, 0, logits, head, root)]
    if is_trained:
        kept, kept_copies = layer * config.num_hidden_layers, copies
        if args.gradient_checkpointing:  # the inputs of layers alone
            kept, kept_copies = stream * tokens * hidden * config.num_hidden_layers, 0
        head_gradient = 0 if has_adapters else head
        moments = [
            (kept + layer + adapter, copies, 0, 0, forward),
            (kept, kept_copies, logits, head, root),
            (kept + layer + adapter, kept_copies, 0, head_gradient, backward),
        ]
        if not has_adapters:
            moments += [
                (0, 0, 0, head + embedding, root),
                # The gradient, what is sent of it, and gloo's copy
                (0, 0, 0, 2 * root, 0 if run.options.has_gpus() else root),
            ]
    names = (
        "activations",
        "autocast's copies",
        "logits",
        "float32 copy of the head" if has_adapters else "gradients of embedding and head",
        "gathered by FSDP2",
    )
    return dict(zip(names, max(moments, key=sum), strict=True))


def learner_memory(run):
    """The pass that takes the most, and the bytes of a learner's GPU then, by part."""
    args, options, trained = run.args, run.options, trained_models(run)
    tokens = getattr(args, "micro_batch_tokens", 0)
    shards = options.num_shards() or 1
    has_buckets = options.num_processes > shards  # of DDP
    count = sum(count_trained(run, model) for model in trained.values()) / shards
    kind = "adapters" if rank_of(run) else "weights"
    always = {f"{kind} of {' and '.join(trained)}": 4 * count, "AdamW's moments": 8 * count}
    always["gradients"] = 4 * count  # between updates they are zeros
    for name, model in frozen_weights(run).items():
        always[f"{name}, frozen"] = size_of(run) * count_parameters(model) / shards
    always["buckets that DDP sends"] = has_buckets * len(trained) * 50 * 2**20
    # Of a shared GPU it is not the learner's: see learner_room
    always["CUDA"] = (options.has_gpus() and not run.shares_gpus()) * GIB
    passes = {}
    for name, model in (trained | frozen_models(run)).items():
        is_trained = name in trained
        flag = "per_device_train_batch_size" if is_trained else "local_rollout_forward_batch_size"
        rows = getattr(args, flag) * (1 + run.trains_reward_model())  # of pairs two
        if tokens:
            flag, rows = "micro_batch_tokens", tokens // run.max_length()
        parts = always | pass_parts(run, model, rows, is_trained)
        passes[f"passes of the {name} (--{flag} {getattr(args, flag)})"] = parts
    if rank_of(run) and not options.has_gpus():  # with GPUs that is in the memory of the machine
        merged = {"merged model, float32": 4 * count_parameters(run.model)}
        passes["the end, when the adapter is merged"] = always | merged
    name = max(passes, key=lambda name: sum(passes[name].values()))
    return name, {part: size for part, size in passes[name].items() if size > 0}


def learner_needs(run):
    """Bytes that a learner needs of its GPU."""
    return sum(learner_memory(run)[1].values())


def learner_room(run):
    """Bytes of its GPU that a learner may take; None: the GPU is not known."""
    if run.options.gpu_memory is None:
        return None
    room = run.options.gpu_memory * GIB
    if run.shares_gpus():  # the script keeps to it
        room -= engine_room(run) + CONTEXTS
    return max(0, room)


def host_memory(run):
    """Bytes of a machine, not of its GPUs, while each of its learners loads its largest model."""
    sizes = [size_of(run) * count_parameters(model) for model in frozen_weights(run).values()]
    if not rank_of(run):
        sizes += [4 * count_parameters(model) for model in trained_models(run).values()]
    return max(sizes) * run.options.local_processes()


# ---------------------------------------------------------------------------------- memory of vLLM


def engine_room(run):
    """Bytes that vLLM takes of the GPUs of an engine."""
    args = run.args
    gpus = args.vllm_gpu_memory_utilization * args.vllm_tensor_parallel_size
    return gpus * run.options.gpu_memory * GIB


def engine_memory(run):
    """Bytes of an engine without its KV cache."""
    config, size = run.model.config.get_text_config(), size_of(run)
    weights = size * count_parameters(run.model)
    if rank_of(run):  # of two versions: max_loras is 2
        weights += 2 * size * count_trained(run, run.model)
    if not run.options.has_gpus():  # it has VLLM_CPU_KVCACHE_SPACE, and needs some for itself
        return weights + 1.2 * GIB
    # vLLM 0.32 first tries the largest batch (engine/arg_utils.py,
    # get_batch_defaults; v1/worker/gpu/model_runner.py, profile_run): the activations of a layer,
    # or the logits to sample from in float32, with three copies. Half a GiB is for CUDA graphs
    tokens, sequences = 8192, 256
    if (run.options.gpu_memory or 0) >= 70:
        tokens, sequences = 16_384, 1024
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    activations = tokens * size * (3 * inner + 4 * config.hidden_size)
    logits = sequences * 16 * config.vocab_size
    return weights + max(activations, logits) + GIB / 2


def cache_memory(run):
    """Bytes of vLLM's KV cache for the longest prompt with its response."""
    config = run.model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    # Keys and values
    of_token = 2 * config.num_hidden_layers * heads * head_dim * size_of(run)
    return of_token * run.max_length()


def engine_needs(run, responses=1):
    """Bytes that vLLM needs with a cache for so many rows, or for all of a step."""
    return engine_memory(run) + min(responses, local_episodes(run)) * cache_memory(run)


def local_episodes(run):
    """Responses of a step, of each rank; so many has an engine on a shared GPU to sample."""
    return run.args.local_rollout_batch_size * run.args.number_samples_per_prompt


def responses_at_once(run):
    """How many of a step's responses an engine on a shared GPU has room for, if all are longest."""
    room = (engine_room(run) - engine_memory(run)) / cache_memory(run)
    return min(local_episodes(run), max(0, int(room)))


def propose_share(run):
    """The --vllm_gpu_memory_utilization with room for all responses of a step, or the largest.

    A learner on the same GPU keeps what it needs and a tenth more, if that leaves some responses.
    """
    memory = run.options.gpu_memory * GIB
    least = engine_needs(run, SOME_RESPONSES) / memory
    wanted = engine_needs(run, math.inf) / memory
    most = 1 - (1.1 * learner_needs(run) + CONTEXTS) / memory
    return max(math.ceil(100 * least), min(math.ceil(100 * wanted), math.floor(100 * most))) / 100


# -------------------------------------------------------------------------------------------- disk


def checkpoints_on_disk(run):
    """How many checkpoints are there at once, and the bytes of each."""
    args = run.args
    trained = sum(count_trained(run, model) for model in trained_models(run).values())
    steps = getattr(args, "num_training_steps", args.num_updates)
    count = 0
    if args.save_freq > 0:
        count = (steps - 1) // args.save_freq  # there is none after the last step
        if args.keep_last_n > 0:  # the oldest is removed only when a new one is whole
            count = min(count, args.keep_last_n + 1)
    return count, 12 * trained  # weights and AdamW's two moments, in float32


def final_model(run):
    """Bytes of the final model in float32; adapters are there merged, and beside it alone."""
    return 4 * (count_parameters(run.model) + (rank_of(run) and count_trained(run, run.model)))


# --------------------------------------------------------------------------------------- what fits


def with_changes(run, arguments, **launch):
    """The same run with other arguments, and otherwise launched."""
    options = replace(run.options, **launch)
    return replace(run, args=replace(run.args, **arguments), options=options)


def fits(run, responses=1):
    """Whether learners have the memory that they need, and engines, for so many responses."""
    has_room = run.trains_reward_model() or engine_needs(run, responses) <= engine_room(run)
    return has_room and learner_needs(run) <= learner_room(run)


def with_share(run):
    """The run so that it fits, and the flags for that: vLLM's share of a shared GPU. None: none."""
    if fits(run, SOME_RESPONSES):
        return {}, run
    if run.shares_gpus():
        share = {"vllm_gpu_memory_utilization": propose_share(run)}
        changed = with_changes(run, share)
        if fits(changed, SOME_RESPONSES):
            return share, changed
    return None


def placements(run):
    """Launches on the GPUs that are there: (flags, arguments, changes of the launch)."""
    args, options = run.args, run.options
    yield {}, {}, {}
    local, machines = options.local_processes(), options.num_machines
    num_gpus = max(options.num_gpus or 0, local + len(getattr(args, "vllm_gpus", ())))
    if run.trains_reward_model() or num_gpus == 1:
        return
    own = args.vllm_gpus
    splits = [({}, {})]
    if not own:  # a quarter of the GPUs
        own = tuple(range(num_gpus - max(1, num_gpus // 4), num_gpus))
        changes = {"vllm_gpus": own, "vllm_gpu_memory_utilization": 0.9}
        splits.append((changes | {"vllm_gpus": " ".join(map(str, own))}, changes))
    elif len(own) > args.vllm_tensor_parallel_size:
        changes = {"vllm_tensor_parallel_size": len(own)}
        splits.append((changes, changes))
    for flags, changes in splits:
        learners = (num_gpus - len(changes.get("vllm_gpus", args.vllm_gpus))) * machines
        launch = {"num_processes": learners} if "vllm_gpus" in changes else {}
        if changes:
            yield launch | flags, changes, launch
        if learners > max(1, options.num_shards()):
            file = {"config_file": "scripts/accelerate/fsdp2.yaml"}
            if machines > 1:
                file["num_machines"] = machines
            launch = {"num_processes": learners}
            sharded = options.variables | {"ACCELERATE_USE_FSDP": "true"}
            yield file | launch | flags, changes, launch | {"variables": sharded}


def measures(run):
    """Flags that save memory, each with its value; what changes little comes first."""
    args, values = run.args, {"gradient_checkpointing": True}
    if not run.trains_reward_model():
        values |= {"micro_batch_tokens": run.max_length(), "dtype": "bfloat16", "beta": 0}
        if adapted_layers(run.model):
            values["lora_rank"] = rank_of(run) or 16
    else:
        values["per_device_train_batch_size"] = 1
    return [(name, value) for name, value in values.items() if getattr(args, name, value) != value]


def what_fits(run):
    """The run with few changes, so that it fits: a list of (flags, run), those with fewest first.

    On a shared GPU each has the share of vLLM that leaves the learner what it then needs. None has
    more flags than needed: those of another with some besides.
    """
    found, known = [], measures(run)
    for size in range(len(known) + 1):
        for (flags, arguments, launch), chosen in itertools.product(
            placements(run), itertools.combinations(known, size)
        ):
            flags, arguments = flags | dict(chosen), arguments | dict(chosen)
            solved = with_share(with_changes(run, arguments, **launch))
            if solved is not None:
                found.append((flags | solved[0], solved[1]))
    found = [
        (flags, changed)
        for flags, changed in found
        if not any(other.keys() < flags.keys() for other, _ in found)
    ]
    return sorted(found, key=lambda pair: len(pair[0]))


# Hidden size, layers, attention heads, key-value heads, inner size, whether the head is tied: by
# the config.json of each
FAMILIES = {
    "qwen3": {
        "Qwen3-0.6B": (1024, 28, 16, 8, 3072, True),
        "Qwen3-1.7B": (2048, 28, 16, 8, 6144, True),
        "Qwen3-4B": (2560, 36, 32, 8, 9728, True),
        "Qwen3-8B": (4096, 36, 32, 8, 12_288, False),
        "Qwen3-14B": (5120, 40, 40, 8, 17_408, False),
    },
    "qwen2": {
        "Qwen2.5-0.5B": (896, 24, 14, 2, 4864, True),
        "Qwen2.5-1.5B": (1536, 28, 12, 2, 8960, True),
        "Qwen2.5-3B": (2048, 36, 16, 2, 11_008, True),
        "Qwen2.5-7B": (3584, 28, 28, 4, 18_944, False),
        "Qwen2.5-14B": (5120, 48, 40, 8, 13_824, False),
    },
    "llama": {
        "Llama-3.2-1B": (2048, 16, 32, 8, 8192, True),
        "Llama-3.2-3B": (3072, 28, 24, 8, 8192, True),
        "Llama-3.1-8B": (4096, 32, 32, 8, 14_336, False),
    },
}


def build(config_class, shape, vocab_size):
    """A policy and a classifier of a shape of FAMILIES, without memory for their weights."""
    hidden_size, layers, heads, key_value_heads, inner_size, is_tied = shape
    config = config_class(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        intermediate_size=inner_size,
        tie_word_embeddings=is_tied,
        num_labels=1,
    )
    with torch.device("meta"):
        classes = (AutoModelForCausalLM, AutoModelForSequenceClassification)
        return [auto_class.from_config(config) for auto_class in classes]


def smaller_model(run):
    """The largest smaller model of the family that fits, and with what: (name, flags, run)."""
    config = run.model.config.get_text_config()
    for name, shape in reversed(FAMILIES.get(config.model_type, {}).items()):
        policy, classifier = build(type(config), shape, config.vocab_size)
        if count_parameters(policy) < count_parameters(run.model):
            model = classifier if run.trains_reward_model() else policy
            models = {"model": model, "value_model": classifier}
            for flags, changed in what_fits(replace(run, **models)):
                return name, flags, changed
    return None
