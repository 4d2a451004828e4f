"""Make configs and models with the shapes of Qwen3, or of Qwen2.5 for sizes that Qwen3 lacks."""

import functools

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Qwen2Config,
    Qwen3Config,
)

VOCABULARY = 151_936
# The class of the config, and the values of NAMES, as in the config.json of these models
SHAPES = {
    "0.5": (Qwen2Config, 896, 24, 14, 2, 4864, True, VOCABULARY),
    "0.6": (Qwen3Config, 1024, 28, 16, 8, 3072, True, VOCABULARY),
    "1.5": (Qwen2Config, 1536, 28, 12, 2, 8960, True, VOCABULARY),
    "1.7": (Qwen3Config, 2048, 28, 16, 8, 6144, True, VOCABULARY),
    "3": (Qwen2Config, 2048, 36, 16, 2, 11_008, True, VOCABULARY),
    "4": (Qwen3Config, 2560, 36, 32, 8, 9728, True, VOCABULARY),
    "7": (Qwen2Config, 3584, 28, 28, 4, 18_944, False, 152_064),
    "8": (Qwen3Config, 4096, 36, 32, 8, 12_288, False, VOCABULARY),
    "14": (Qwen3Config, 5120, 40, 40, 8, 17_408, False, VOCABULARY),
    "32": (Qwen3Config, 5120, 64, 64, 8, 25_600, False, VOCABULARY),
}
TINY = (Qwen2Config, 64, 2, 4, 2, 128, True, 1000)  # for a CPU
NAMES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
NAMES += ("intermediate_size", "tie_word_embeddings", "vocab_size")


def config_of(size, **changes):
    """Return the config of a size in billions of parameters, or of "tiny"."""
    config_class, *shape = SHAPES.get(size, TINY)
    return config_class(num_labels=1, **dict(zip(NAMES, shape, strict=True)) | changes)


@functools.cache
def models_of(size):
    """Return a policy and a value model on "meta", without memory for their weights."""
    with torch.device("meta"):
        classes = (AutoModelForCausalLM, AutoModelForSequenceClassification)
        return [auto_class.from_config(config_of(size)) for auto_class in classes]
