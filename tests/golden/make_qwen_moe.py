#!/usr/bin/env python3
"""Qwen2-MoE and Qwen3-MoE: shared expert or none, dense layers between, weights raw or not.

    python make_qwen_moe.py [--out DIR] [NAME ...]
"""

import functools

import layout
from checkpoint import Checkpoint, main
from routing import Reference

QWEN2MOE = layout.COMMON | {
    "architectures": ["Qwen2MoeForCausalLM"],
    "model_type": "qwen2_moe",
    "eos_token_id": 314,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 96,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "max_window_layers": 3,
    "sliding_window": 512,
    "use_sliding_window": False,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
}
QWEN3MOE = layout.COMMON | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "rope_scaling": None,
    # 4 heads of 32 make 128, twice the hidden size: a reader that derives head_dim fails here.
    "head_dim": 32,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "max_window_layers": 3,
    "sliding_window": None,
    "use_sliding_window": False,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
}
# Renormalised weights, and a first layer that is dense although the rest is not.
QWEN2MOE_MIXED = QWEN2MOE | {
    "norm_topk_prob": True, "num_experts_per_tok": 3, "mlp_only_layers": [0],
    "torch_dtype": "float16"}
# With a step of 2, only layers 1 and 3 of the four route, and they keep the raw weights.
QWEN3MOE_MIXED = QWEN3MOE | {
    "norm_topk_prob": False, "decoder_sparse_step": 2, "num_hidden_layers": 4}


def has_shared_expert(config):
    return config["model_type"] == "qwen2_moe"


def attention(prefix, config, layer):
    shapes = layout.attention(prefix, config)
    if has_shared_expert(config):
        biases = {
            f"{prefix}.{n}_proj.bias": shapes[f"{prefix}.{n}_proj.weight"][:1] for n in "qkv"}
        return shapes | biases
    return shapes | {f"{prefix}.{n}_norm.weight": (config["head_dim"],) for n in "qk"}


def feed_forward(prefix, config, layer):
    hidden, count = config["hidden_size"], config["num_experts"]
    is_sparse = (layer + 1) % config["decoder_sparse_step"] == 0
    moe = f"{prefix}.mlp"
    if layer in config["mlp_only_layers"] or not is_sparse:
        return layout.mlp(moe, hidden, config["intermediate_size"])
    shapes = {f"{moe}.gate.weight": (count, hidden)} | layout.experts(
        f"{moe}.experts", count, hidden, config["moe_intermediate_size"])
    if has_shared_expert(config):
        shapes |= layout.mlp(
            f"{moe}.shared_expert", hidden, config["shared_expert_intermediate_size"])
        shapes[f"{moe}.shared_expert_gate.weight"] = (1, hidden)
    return shapes


def shapes(config):
    return layout.decoder(config, attention, feed_forward)


QWEN2, QWEN3 = (
    functools.partial(Reference, router=f"{name}TopKRouter") for name in ("Qwen2Moe", "Qwen3Moe"))
SCALES = [("shared_expert_gate", 0.0, 0.15)]
CHECKPOINTS = {
    "qwen2moe": Checkpoint(11, "qwen2", QWEN2MOE, shapes, QWEN2, SCALES),
    "qwen2moe_mixed": Checkpoint(12, "qwen2", QWEN2MOE_MIXED, shapes, QWEN2, SCALES),
    "qwen3moe": Checkpoint(13, "qwen2", QWEN3MOE, shapes, QWEN3, shards=2),
    "qwen3moe_mixed": Checkpoint(14, "qwen2", QWEN3MOE_MIXED, shapes, QWEN3),
}

if __name__ == "__main__":
    main(CHECKPOINTS, __doc__)
