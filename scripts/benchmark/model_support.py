"""Find out which kinds of models the scripts can train, by three steps of each kind with vLLM.

    python scripts/benchmark/model_support.py                  # all of KINDS, a minute each
    python scripts/benchmark/model_support.py qwen3 llama
    python scripts/benchmark/model_support.py --model PATH     # a folder or a name on the Hub

A model of a kind is tiny and random. GRPO trains it without asynchrony, so that vLLM generates each
step with the weights that the learner has. A cell of the table is the largest KL of the sampler to
the learner in a step, with full training or with adapters (the fork lora), or the error that ended
the run.
"""

import re
import sys
import tempfile
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

import debug_runs as benchmark
import fork
import transformers
from transformers import AutoConfig, AutoTokenizer

DEBUG_MODEL = benchmark.REPO / "debug_assets" / "model"
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 32}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.1}
SIZES |= {"max_position_embeddings": 512, "bos_token_id": None, "tie_word_embeddings": True}
LINEAR = {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2}
LINEAR |= {"linear_num_value_heads": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
VISION = {"hidden_size": 32, "intermediate_size": 64, "depth": 1, "num_heads": 2}
HYBRID = {"layer_types": ["attention"] * 2, "shared_intermediate_size": 128}
UNTIED = {"tie_word_embeddings": False}
# Further options that the config of a tiny model needs
PLAIN = "qwen2 qwen3 llama mistral ministral3 gemma3_text granite smollm3 olmo3"
KINDS = {kind: {} for kind in PLAIN.split()} | {"phi3": UNTIED, "glm4": UNTIED}
KINDS |= {
    "granitemoehybrid": HYBRID | {"num_local_experts": 0, "position_embedding_type": "rope"},
    "gemma4_text": {"hidden_size_per_layer_input": 0, "global_head_dim": 32},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    "lfm2": {"layer_types": ["conv", "full_attention"], "conv_dim": 64, "block_dim": 64},
    "qwen3_5_text": LINEAR,
    "qwen3_5": {"vision_config": VISION | {"out_hidden_size": 64}},  # the text model within it
}


def make_model(kind, folder):
    """Write a tiny random model of a kind, with the debug task's tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(DEBUG_MODEL)
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    sizes = SIZES | ids | {"vocab_size": len(tokenizer)}
    options = sizes | KINDS[kind]
    name = "AutoModelForCausalLM"
    if "vision_config" in options:
        options = {"text_config": sizes | LINEAR} | KINDS[kind] | {"tie_word_embeddings": True}
        name = "AutoModelForImageTextToText"
    transformers.set_seed(1)
    config = AutoConfig.for_model(kind, **options)
    getattr(transformers, name).from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def cell_of(model, **options):
    """Return the largest KL in three steps, or the error that ended the run."""
    flags = {"model_name_or_path": model, "dataset": DEBUG_MODEL.parent / "train.parquet"}
    flags |= {"async_mode": False, "response_length": 8, "num_evals": 0}
    flags |= {"total_episodes": 96, "local_rollout_batch_size": 8, "number_samples_per_prompt": 4}
    flags |= {"local_mini_batch_size": 32, "learning_rate": 1e-3}
    with tempfile.TemporaryDirectory() as folder:
        script = "grpo_vllm_async.py"
        if "lora_rank" in options:
            script = Path(folder, fork.file_of("lora"))
            fork.write_fork("lora", script)
        words = [script, *benchmark.flags_of(flags | options)]
        try:
            steps, _ = benchmark.run(words, folder)
        except SystemExit as error:
            pattern = r"^(?:[\w.]*(?:Error|Exception):|\s*Value error,) (.*)"
            reasons = re.findall(pattern, str(error), re.MULTILINE)
            return re.sub(r"/\S+ ", "", (reasons or str(error).splitlines())[-1])[:150]
    return f"{max(step['mismatch/kl'] for step in steps):.0e}"


def main():
    parser = benchmark.make_parser(__doc__)
    add = parser.add_argument
    add("kinds", nargs="*", metavar="KIND", help=", ".join(KINDS))
    add("--dtype", default="float32", help="On GPUs, adapters need bfloat16 (%(default)s).")
    add("--model", help="A model to try instead of tiny ones. It needs a chat template.")
    args = parser.parse_args()
    benchmark.make_debug_assets()
    print("| kind | KL | KL with adapters |\n|---|---|---|", flush=True)
    for kind in [args.model] if args.model else args.kinds or KINDS:
        with tempfile.TemporaryDirectory() as folder:
            if not args.model:
                make_model(kind, folder)
            model = args.model or folder
            adapters = {"lora_rank": 8, "learning_rate": 1e-2}
            cells = [cell_of(model, dtype=args.dtype, **options) for options in ({}, adapters)]
        print(f"| {Path(kind).name} | {cells[0]} | {cells[1]} |", flush=True)


if __name__ == "__main__":
    main()
