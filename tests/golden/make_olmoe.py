#!/usr/bin/env python3
"""OLMoE: Q/K norms over all heads at once, raw router weights, more heads than the others.

    python make_olmoe.py [--out DIR] [NAME ...]
"""

import functools

import layout
from checkpoint import Checkpoint, main
from routing import Reference

OLMOE = layout.COMMON | {
    "architectures": ["OlmoeForCausalLM"],
    "model_type": "olmoe",
    "attention_bias": False,
    "clip_qkv": None,
    "num_hidden_layers": 2,
    "intermediate_size": 32,
    "num_key_value_heads": 4,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "norm_topk_prob": False,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.01,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
}


def attention(prefix, config, layer):
    norms = {f"{prefix}.{n}_norm.weight": (config["hidden_size"],) for n in "qk"}
    return layout.attention(prefix, config) | norms


def feed_forward(prefix, config, layer):
    hidden, count = config["hidden_size"], config["num_experts"]
    shapes = {f"{prefix}.mlp.gate.weight": (count, hidden)}
    return shapes | layout.experts(
        f"{prefix}.mlp.experts", count, hidden, config["intermediate_size"])


def shapes(config):
    return layout.decoder(config, attention, feed_forward)


REFERENCE = functools.partial(Reference, router="OlmoeTopKRouter")
CHECKPOINTS = {"olmoe": Checkpoint(23, "qwen2", OLMOE, shapes, REFERENCE)}

if __name__ == "__main__":
    main(CHECKPOINTS, __doc__)
