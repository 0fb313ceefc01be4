#!/usr/bin/env python3
"""GraniteMoE: four multipliers, and experts fused in one tensor with gate before up.

    python make_granitemoe.py [--out DIR] [NAME ...]
"""

import functools

import layout
from checkpoint import Checkpoint, main
from routing import Reference

GRANITE = layout.COMMON | {
    "architectures": ["GraniteMoeForCausalLM"],
    "model_type": "granitemoe",
    "attention_bias": False,
    "attention_multiplier": 0.35,
    "embedding_multiplier": 3.0,
    "logits_scaling": 2.5,
    "residual_multiplier": 0.7,
    "num_hidden_layers": 2,
    "intermediate_size": 32,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "tie_word_embeddings": True,
}


def feed_forward(prefix, config, layer):
    hidden, inner, count = (
        config[k] for k in ("hidden_size", "intermediate_size", "num_local_experts"))
    moe = f"{prefix}.block_sparse_moe"
    return {
        f"{moe}.input_linear.weight": (count, 2 * inner, hidden),
        f"{moe}.output_linear.weight": (count, hidden, inner),
        f"{moe}.router.layer.weight": (count, hidden),
    }


def shapes(config):
    return layout.decoder(config, lambda p, c, layer: layout.attention(p, c), feed_forward)


REFERENCE = functools.partial(Reference, router="GraniteMoeTopKRouter")
# Small next to what the layers add, or greedy decoding would only repeat the last id.
TIED = [("embed_tokens", 0.0, 0.1), (r"o_proj|(in|out)put_linear", 0.0, 0.3)]
CHECKPOINTS = {"granitemoe": Checkpoint(24, "qwen2", GRANITE, shapes, REFERENCE, TIED)}

if __name__ == "__main__":
    main(CHECKPOINTS, __doc__)
