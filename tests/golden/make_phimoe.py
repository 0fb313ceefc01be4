#!/usr/bin/env python3
"""Phi-3.5-MoE: sparsemixer routing, LayerNorm and biases everywhere, longrope.

    python make_phimoe.py [--out DIR] [NAME ...]

transformers 5.23 uses the short factors of longrope at every length; the released code and
transformers 4 take the long ones for a text longer than the original context, and so does this.
"""

import torch

import layout
from checkpoint import Checkpoint, main
from routing import INFINITY, Reference

# Longer than 17 tokens and their continuation, shorter than 70: only p70 sees the long factors.
ORIGINAL_CONTEXT = 48
PHIMOE = layout.COMMON | {
    "architectures": ["PhiMoEForCausalLM"],
    "model_type": "phimoe",
    "attention_bias": True,
    "lm_head_bias": True,
    "num_hidden_layers": 2,
    "vocab_size": 384,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "intermediate_size": 32,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "input_jitter_noise": 0.01,
    # Ten times the released value: the mask of sparsemixer keeps 1, 2 or more experts here, where
    # with 0.01 nearly every weight would be 1.
    "router_jitter_noise": 0.1,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.0,
    "original_max_position_embeddings": ORIGINAL_CONTEXT,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "type": "longrope",
        "short_factor": [1.0, 1.05, 1.1, 1.2, 1.4, 1.7, 2.0, 2.3],
        "long_factor": [1.1, 1.5, 2.5, 4.0, 6.0, 8.5, 10.0, 10.7],
        "short_mscale": 1.243163121016122,
        "long_mscale": 1.243163121016122,
        "original_max_position_embeddings": ORIGINAL_CONTEXT,
    },
    "sliding_window": 512,
}


def attention(prefix, config, layer):
    return layout.attention(prefix, config, biases="qkv", out_bias=True)


def feed_forward(prefix, config, layer):
    hidden, count = config["hidden_size"], config["num_local_experts"]
    moe = f"{prefix}.block_sparse_moe"
    return {f"{moe}.gate.weight": (count, hidden)} | layout.experts(
        f"{moe}.experts", count, hidden, config["intermediate_size"], ("w1", "w3", "w2"))


def shapes(config):
    shapes = layout.decoder(config, attention, feed_forward, norm_bias=True)
    return shapes | {"lm_head.bias": (config["vocab_size"],)}


def sparsemixer(router, logits):
    """The two best logits; an expert also counts by whether it is within the jitter of each."""
    limit, margin = 2 * router.router_jitter_noise, INFINITY
    remaining = logits.clone()
    for _ in range(2):
        best, index = remaining.max(dim=-1, keepdim=True)
        distance = (best - logits) / torch.maximum(logits.abs(), best)
        left = remaining > -INFINITY
        margin = min(margin, float((distance - limit)[left].abs().min()))
        remaining = remaining.scatter(1, index, -INFINITY)
    return torch.softmax(logits, dim=-1), margin


class PhimoeReference(Reference):
    def __init__(self, folder, config):
        super().__init__(folder, config, "PhimoeTopKRouter", sparsemixer)
        self.rotary = self.model.model.rotary_emb
        self.frequencies = self.rotary.rope_init_fn

    def __call__(self, ids):
        self.rotary.rope_init_fn = lambda config: self.frequencies(config, seq_len=len(ids))
        return super().__call__(ids)


CHECKPOINTS = {"phimoe": Checkpoint(25, "sentencepiece", PHIMOE, shapes, PhimoeReference)}

if __name__ == "__main__":
    main(CHECKPOINTS, __doc__)
