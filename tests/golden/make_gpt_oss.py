#!/usr/bin/env python3
"""gpt-oss: attention sinks, a sliding window in every other layer, biases, a clamped SwiGLU, yarn.

    python make_gpt_oss.py [--out DIR] [NAME ...]

The experts are fused and stored `[experts, in, out]`, gate and up interleaved; `gpt_oss_mxfp4`
stores them as the released checkpoints do.
"""

import functools

import formats
import layout
from checkpoint import Checkpoint, main
from routing import Reference

GPT_OSS = layout.COMMON | {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "attention_bias": True,
    "experts_per_token": 4,
    "head_dim": 32,
    "hidden_act": "silu",
    "initial_context_length": 32,
    "intermediate_size": 32,
    "layer_types": ["sliding_attention", "full_attention"],
    "max_position_embeddings": 256,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 2,
    "num_local_experts": 8,
    "output_router_logits": False,
    "rms_norm_eps": 1e-5,
    # beta_fast is 32 in the releases; with so short a context the blend would begin at 0, and
    # whether its ends are rounded (`truncate`) would show at one end only.
    "rope_scaling": {
        "beta_fast": 4.0, "beta_slow": 1.0, "factor": 8.0,
        "original_max_position_embeddings": 32, "rope_type": "yarn", "truncate": False},
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 16,
    "swiglu_limit": 7.0,
}
MXFP4 = GPT_OSS | {"quantization_config": {
    "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"],
    "quant_method": "mxfp4"}}


def attention(prefix, config, layer):
    shapes = layout.attention(prefix, config, biases="qkv", out_bias=True)
    return shapes | {f"{prefix}.sinks": (config["num_attention_heads"],)}


def feed_forward(prefix, config, layer):
    hidden, inner, count = (
        config[k] for k in ("hidden_size", "intermediate_size", "num_local_experts"))
    return {
        f"{prefix}.mlp.router.weight": (count, hidden),
        f"{prefix}.mlp.router.bias": (count,),
        f"{prefix}.mlp.experts.gate_up_proj": (count, hidden, 2 * inner),
        f"{prefix}.mlp.experts.gate_up_proj_bias": (count, 2 * inner),
        f"{prefix}.mlp.experts.down_proj": (count, inner, hidden),
        f"{prefix}.mlp.experts.down_proj_bias": (count, hidden),
    }


def shapes(config):
    return layout.decoder(config, attention, feed_forward)


# Gates and ups of a few per cent of the tokens pass the limit of 7.
SCALES = [
    (r"gate_up_proj$", 0.0, 0.45), (r"gate_up_proj_bias$", 0.0, 1.0),
    (r"down_proj$", 0.0, 0.05), (r"sinks$", 0.5, 1.0)]
REFERENCE = functools.partial(Reference, router="GptOssTopKRouter")
CHECKPOINTS = {
    "gpt_oss": Checkpoint(26, "qwen2", GPT_OSS, shapes, REFERENCE, SCALES),
    "gpt_oss_mxfp4": Checkpoint(
        27, "qwen2", MXFP4, shapes, REFERENCE, SCALES, formats.mxfp4_experts),
}

if __name__ == "__main__":
    main(CHECKPOINTS, __doc__)
