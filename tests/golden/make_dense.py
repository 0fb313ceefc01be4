#!/usr/bin/env python3
"""Qwen2 and Qwen3 without experts: what a sequence-parallel draft or a plain file brings.

    python make_dense.py [--out DIR] [NAME ...]
"""

import layout
from checkpoint import Checkpoint, main
from routing import Reference

QWEN = layout.COMMON | {
    "intermediate_size": 96,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "use_sliding_window": False,
    "max_window_layers": 3,
}
QWEN2 = QWEN | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
QWEN3 = QWEN | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 32,
    "rope_scaling": None,
    "tie_word_embeddings": True,
}


def attention(prefix, config, layer):
    if config["model_type"] == "qwen2":
        return layout.attention(prefix, config, biases="qkv")
    norms = {f"{prefix}.{n}_norm.weight": (config["head_dim"],) for n in "qk"}
    return layout.attention(prefix, config) | norms


def feed_forward(prefix, config, layer):
    return layout.mlp(f"{prefix}.mlp", config["hidden_size"], config["intermediate_size"])


def shapes(config):
    return layout.decoder(config, attention, feed_forward)


# Small next to what the layers add, or greedy decoding would only repeat the last id.
TIED = [("embed_tokens", 0.0, 0.15), (r"(o|down)_proj", 0.0, 0.3)]
CHECKPOINTS = {
    "qwen2": Checkpoint(21, "qwen2", QWEN2, shapes, Reference),
    "qwen3": Checkpoint(22, "qwen2", QWEN3, shapes, Reference, TIED),
}

if __name__ == "__main__":
    main(CHECKPOINTS, __doc__)
