"""The arithmetic of a run: what its models take of GPUs and disk, what vLLM takes, and what fits.

scripts/preflight.py prints it. Each function takes its Run: the arguments of a script, where it is
launched, and its models, which have shapes and no weights. Sizes are in bytes. It is an estimate:
docs/results.md has what runs took on CPUs, and PyTorch's own count of what they hold on GPUs
(benchmark/fake_memory.py), where none has run.

    a trained parameter   16: float32 weight, gradient, and AdamW's two moments (1412.6980)
    a frozen parameter    2 or 4: its weight, in --dtype
    on disk               12 a trained parameter: a checkpoint has no gradients
    vLLM                  its weights in --dtype, and the cache of keys and values (2309.06180)

The rest is what a pass holds on the way: pass_parts. FSDP2 gives each of N ranks 1/N of the above.
"""

import itertools
import math
from collections import ChainMap
from dataclasses import replace

import torch

GIB = 2**30
SOME_RESPONSES = 8  # at once are room enough: with a cache for one vLLM starts, but is slow
# With fewer at once vLLM needs about as long for a token of each as for one more of them, since it
# waits for the weights to be read
FEW_RESPONSES = 64

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


# ----------------------------------------------------------------------------- a learner's passes


def residual_size(run, is_trained):
    """Bytes of a number of the residual stream: autocast leaves that of float32 weights alone."""
    is_cast = run.options.num_shards() or (is_trained and rank_of(run))
    return size_of(run) if is_cast else 4


def widths(config):
    """Numbers of a token: its queries, its keys or values, and within an MLP."""
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    keys = getattr(config, "num_key_value_heads", None) or heads
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    return heads * head_dim, keys * head_dim, inner


def layer_activations(run, model, tokens, is_trained):
    """What PyTorch saves in a layer, as of Qwen2 or Llama, for its backward pass."""
    config, size, length = model.config.get_text_config(), size_of(run), run.max_length()
    queries, keys, inner = widths(config)
    residual = 4 * residual_size(run, is_trained)  # what goes into two norms, and out of them
    # What goes into q, k, v, gate and up: autocast copies it for each
    inputs = 10 if size == 2 else 8
    attention = 2 * size  # queries, and what comes out; keys and values
    mlp = 4 * size  # gate, its activation, up, and their product
    if any(hasattr(module, "q_norm") for module in model.modules()):
        # As in Qwen3: what goes into these norms, in float32; for their weights what comes out
        attention += 4 + size * (rank_of(run) == 0)
    of_token = config.hidden_size * (residual + inputs) + inner * mlp
    of_token += (queries + keys) * attention
    if is_trained and rank_of(run):
        # peft 0.21.2, tuners/lora/layer.py, Linear.forward: A x is kept, and x is cast to float32
        # and back, so that what comes out of attention is kept twice
        adapters = len(adapted_layers(model)) / config.num_hidden_layers
        of_token += size * (rank_of(run) * adapters + queries * (size == 2))
    window = getattr(config, "sliding_window", None)
    if window and window < length:  # then there is a mask: (rows, length, length)
        of_token += size * length
    if run.options.has_gpus() and size == 4 and keys < queries:
        # No fused attention of a GPU takes that: there are scores, (rows, heads, length, length)
        of_token += size * config.num_attention_heads * length
    return tokens * of_token


def adapter_buffers(run, model, tokens):
    """What an adapter holds while its layer computes: x in float32, B A x and its multiple."""
    size = size_of(run)
    casts = 4 if size == 2 else 0
    widths = (casts * m.in_features + 2 * size * m.out_features for m in adapted_layers(model))
    return tokens * max(widths)


def gathered(run, model, is_trained):
    """What FSDP2 has gathered: with the root unit; while that is gathered; in a layer's two passes.

    A unit is a layer, or the rest: the root unit, which is gathered as it is.
    """
    if not run.options.num_shards():
        return 0, 0, 0, 0
    layers = layer_sizes(model)
    is_float32 = is_trained and not rank_of(run)
    root = (count_parameters(model) - sum(layers)) * (4 if is_float32 else size_of(run))
    # A buffer for the root unit, and one for the last layer
    layer = size_of(run) * max(layers)
    again = 2 * root + layer
    # Two layers, and a buffer for one of them
    forward = root + 3 * layer
    # A layer's gradient in float32 as it is sent, and gloo's copy
    gradient = max(layers)
    if is_trained and rank_of(run):
        gradient = count_trained(run, model) / len(layers)
    return root, again, forward, forward + 2 * 4 * gradient


ACTIVATIONS, COPIES, GATHERED = "activations", "autocast's copies", "gathered by FSDP2"
HEAD = "head and embedding: gradients, a copy in float32"


def layer_sizes(model):
    """Parameters of each layer."""
    names = model._no_split_modules or []
    return [count_parameters(m) for m in model.modules() if type(m).__name__ in names] or [0]


def pass_parts(run, model, rows, is_trained):
    """About what a pass over some rows holds at its worst moment, by part.

    It is in the last layer, in the head, or, backwards, in the head, in the last layer again, or at
    the embedding. Of a layer that computes, as much comes and goes as is saved for its backward
    pass.
    """
    has_adapters = is_trained and rank_of(run) > 0
    args, config = run.args, model.config.get_text_config()
    tokens, num_layers = rows * run.max_length(), config.num_hidden_layers
    layer = layer_activations(run, model, tokens, is_trained)
    root, again, forward, backward = gathered(run, model, is_trained)

    # The head's logits are in chunks, of which four exist at once, and three in the backward pass
    # (ChunkedHead in the scripts). Beside them are its copy, rounded but in float32, there also its
    # gradient, and the hidden states that it reads, about four times. A classifier's head is small
    embedding = 4 * model.get_input_embeddings().weight.numel()
    chunk = head = copy = states = 0
    if not hasattr(model, "score"):
        chunk = run.script.LOGITS_CHUNK["cuda" if run.options.has_gpus() else "cpu"]
        chunk = 4 * min(chunk, rows * args.response_length * config.vocab_size)
        head, states = embedding, 4 * 4 * tokens * config.hidden_size
        copy = head * (size_of(run) == 2)

    # Of a frozen model about half a layer is there at once
    saved = copies = saved_copies = 0
    in_layer = layer / 2
    if is_trained:
        if size_of(run) == 2 and not run.options.num_shards():
            # Autocast's copies of float32 weights last as long as the pass
            copies = 2 * (count_trained(run, model) if has_adapters else sum(layer_sizes(model)))
        saved, saved_copies = num_layers * layer, copies
        if args.gradient_checkpointing:  # the inputs of layers alone (1604.06174)
            saved = num_layers * residual_size(run, is_trained) * tokens * config.hidden_size
            saved_copies = 0
        in_layer = saved + layer
    if has_adapters:
        in_layer += adapter_buffers(run, model, tokens)
    of_head = {ACTIVATIONS: saved + states, COPIES: saved_copies, HEAD: copy, GATHERED: root}
    moments = [
        {ACTIVATIONS: in_layer, COPIES: copies, GATHERED: forward},
        of_head | {"logits": 4 * chunk},
    ]
    if is_trained:
        gradient = 0 if has_adapters else head
        moments += [
            of_head | {GATHERED: again},
            of_head | {"logits": 3 * chunk, HEAD: copy + gradient},
            {ACTIVATIONS: in_layer, COPIES: saved_copies, HEAD: gradient, GATHERED: backward},
        ]
    if is_trained and not has_adapters:
        # The embedding's gradient beside the head's; then what is sent of it, with gloo's copy
        sent = 0 if run.options.has_gpus() else root
        tied = head * model.config.tie_word_embeddings  # for the sum of both gradients
        moments += [
            {HEAD: head + embedding + tied, GATHERED: root},
            {HEAD: 2 * root, GATHERED: sent},
        ]
    return max(moments, key=total)


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
    always = {
        f"{kind} of {' and '.join(trained)}": 4 * count,
        "AdamW's moments": 8 * count,
        "gradients": 4 * count,  # between updates they are zeros
    }
    for name, model in frozen_weights(run).items():
        always[f"{name}, frozen"] = size_of(run) * count_parameters(model) / shards
    passes = {}
    if options.num_processes > shards:
        # Gradients are in DDP's buckets. After the first update it makes others, one model's at a
        # time, beside the old ones (torch 2.13, reducer.cpp, rebuild_buckets)
        passes["DDP's second update"] = always | {"other buckets of DDP": 4 * max(counts)}
    for name, model in (trained | frozen_models(run)).items():
        is_trained = name in trained
        flag = "per_device_train_batch_size" if is_trained else "local_rollout_forward_batch_size"
        rows = getattr(args, flag) * (1 + run.trains_reward_model())  # of pairs two
        if getattr(args, "micro_batch_tokens", 0):
            flag = "micro_batch_tokens"
            rows = max(1, args.micro_batch_tokens / run.max_length())  # shorter ones fill it, too
        parts = always | pass_parts(run, model, rows, is_trained)
        passes[f"passes of the {name} (--{flag} {getattr(args, flag)})"] = parts
    if rank_of(run) and not options.has_gpus():  # with GPUs that is in the memory of the machine
        merged = {"merged model, float32": 4 * count_parameters(run.model)}
        passes["the end, when the adapter is merged"] = always | merged
    name = max(passes, key=lambda name: total(passes[name]))
    return name, {part: size for part, size in passes[name].items() if size > 0}


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
    has_no_nccl = run.options.num_processes == 1 and not getattr(run.args, "vllm_gpus", ())
    return (2 + run.shares_gpus() - has_no_nccl) * GIB


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
    sequences = most_at_once(run)
    tokens = 16_384 if sequences > 256 else 8192
    *_, inner = widths(config)
    activations = tokens * size * (3 * inner + 4 * config.hidden_size)
    logits = sequences * 4 * 4 * config.vocab_size
    return weights + max(activations, logits) + GIB / 2


def most_at_once(run):
    """Responses that vLLM samples at once, whatever its cache holds (get_batch_defaults).

    Another machine's GPU is not known by its name: 80 GiB may be an A100's, too.
    """
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    has_more = (run.options.gpu_memory or 0) >= 70 and "a100" not in name.lower()
    return 1024 if has_more else 256


def cache_memory(run):
    """Bytes of vLLM's KV cache for the longest prompt with its response."""
    config = run.model.config.get_text_config()
    _, keys, _ = widths(config)
    return 2 * config.num_hidden_layers * keys * size_of(run) * run.max_length()


def engine_needs(run, responses=1):
    """Bytes that vLLM needs with a cache for so many rows, or for all of a step."""
    count = min(responses, local_episodes(run), most_at_once(run))
    return engine_memory(run) + count * cache_memory(run)


def local_episodes(run):
    """Responses of a step, of each rank; so many has an engine on a shared GPU to sample."""
    return run.args.local_rollout_batch_size * run.args.number_samples_per_prompt


def responses_at_once(run):
    """How many of a step's responses an engine on a shared GPU samples at once, if all are long."""
    room = (engine_room(run) - engine_memory(run)) / cache_memory(run)
    return min(local_episodes(run), most_at_once(run), max(0, int(room)))


def propose_share(run):
    """The --vllm_gpu_memory_utilization with room for all responses of a step, or the largest.

    A learner on the same GPU keeps what it needs and a tenth more, if that leaves some responses.
    """
    memory = run.options.gpu_memory * GIB
    least = engine_needs(run, SOME_RESPONSES) / memory
    wanted = engine_needs(run, math.inf) / memory
    most = 1 - (1.1 * learner_needs(run) + left_to_cuda(run)) / memory
    return max(math.ceil(100 * least), min(math.ceil(100 * wanted), math.floor(100 * most))) / 100


# ---------------------------------------------------------------------------- disk, shared memory


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


def shared_memory(run):
    """Bytes of an engine's files in /dev/shm; with GPUs weights go another way.

    vLLM starts from random weights in float32. Beside that file the next is written, in --dtype,
    which then takes its place. (Measured for 38 M parameters: 8 and 6 bytes each.) Adapters: three.
    """
    if run.options.has_gpus():
        return 0
    if rank_of(run):
        return 3 * size_of(run) * count_trained(run, run.model)
    count = count_parameters(run.model)
    if run.model.config.get_text_config().tie_word_embeddings:  # they are sent as the head, too
        count += run.model.get_input_embeddings().weight.numel()
    return (4 + size_of(run)) * count


# --------------------------------------------------------------------------------------- what fits


def with_changes(run, flags):
    """The same run with other flags, of the script or of the launch."""
    launch = {name: flags[name] for name in flags if hasattr(run.options, name)}
    arguments = {name: flags[name] for name in flags if name not in launch}
    if "config_file" in launch:
        launch["variables"] = run.options.variables | {"ACCELERATE_USE_FSDP": "true"}
    args, options = replace(run.args, **arguments), replace(run.options, **launch)
    return replace(run, args=args, options=options)


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


def savings(run):
    """Changes of flags that save memory; what changes little comes first."""
    args, options = run.args, run.options
    values = {"gradient_checkpointing": True}
    if run.trains_reward_model():
        values["per_device_train_batch_size"] = 1
    else:
        values |= {"micro_batch_tokens": run.max_length(), "dtype": "bfloat16", "beta": 0}
        values["lora_rank"] = rank_of(run) or 16
    changes = [{name: value} for name, value in values.items() if getattr(args, name) != value]
    if not run.trains_reward_model() and not options.num_shards():
        gpus = options.num_gpus or options.local_processes()
        learners = (gpus - len(args.vllm_gpus)) * options.num_machines
        sharded = {"config_file": "scripts/accelerate/fsdp2.yaml", "num_processes": learners}
        if learners > 1:
            changes.append(sharded | {"num_machines": options.num_machines})
    return changes


def what_fits(run):
    """The run with few changes, so that it fits: a list of (flags, run), the fewest changes first.

    On a shared GPU each has the share of vLLM that leaves the learner what it then needs. None has
    more flags than needed: those of another with some besides.
    """
    found, known = [], savings(run)
    for size in range(len(known) + 1):
        for chosen in itertools.combinations(known, size):
            flags = dict(ChainMap(*chosen))
            solved = with_share(with_changes(run, flags))
            if solved is not None:
                share, changed = solved
                found.append((flags | share, changed))
    return [
        (flags, changed)
        for flags, changed in found
        if not any(other.keys() < flags.keys() for other, _ in found)
    ]


# ---------------------------------------------------------------------------------------- in words


def in_words(count):
    """A number of bytes, as MiB or GiB."""
    return f"{count / GIB:.1f} GiB" if count >= GIB / 10 else f"{count / 2**20:.1f} MiB"


def in_flags(flags, run):
    """What is typed, and what a learner then needs and has."""
    typed = (f"--{name}" if value is True else f"--{name} {value}" for name, value in flags.items())
    needed, room = learner_needs(run), learner_room(run)
    return f"{' '.join(typed) or 'these flags'}: {in_words(needed)} of {in_words(room)}"


def plan_of_processes(run):
    """Lines on learners and engines."""
    args, options = run.args, run.options
    yield "learners", f"{options.num_processes}"
    if run.trains_reward_model() or args.num_updates == 0:
        return
    place = "on each learner's GPU" if options.has_gpus() else "for each learner, on the CPU"
    engines = options.num_processes
    if args.vllm_gpus:
        gpus = len(args.vllm_gpus) * options.num_machines
        engines = gpus // args.vllm_tensor_parallel_size
        place = f"on GPUs {', '.join(map(str, args.vllm_gpus))} of each machine"
    yield "engines", f"{engines} of vLLM, {place}"


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
