#!/usr/bin/env python3
"""dots.llm1: Qwen3's attention, DeepSeek-V3's experts, layer 0 dense.

    python make_dots1.py [--out DIR] [NAME ...]
"""

import functools

import layout
import routing
from checkpoint import Checkpoint, main
from make_glm4moe import feed_forward

DOTS = layout.COMMON | {
    "architectures": ["Dots1ForCausalLM"],
    "model_type": "dots1",
    "eos_token_id": 314,
    "attention_bias": False,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000000,
    "rope_scaling": None,
}


def attention(prefix, config, layer):
    norms = {f"{prefix}.{n}_norm.weight": (config["head_dim"],) for n in "qk"}
    return layout.attention(prefix, config) | norms


def shapes(config):
    return layout.decoder(config, attention, feed_forward)


REFERENCE = functools.partial(
    routing.Reference, router="Dots1TopkRouter", rule=routing.biased_sigmoid)
CHECKPOINTS = {"dots1": Checkpoint(91, "qwen2", DOTS, shapes, REFERENCE)}

if __name__ == "__main__":
    main(CHECKPOINTS, __doc__)
