#!/usr/bin/env python3
"""Qwen3-Next and Qwen3.5-MoE: three gated delta-net layers to one of gated attention.

    python make_qwen_hybrid.py [--out DIR] [NAME ...]

The norms are stored around zero but for the one inside the delta net; the last layers' draft head
(`mtp.`) and, in Qwen3.5, a picture encoder stand in the file as they do in the released ones.
"""

import functools

import layout
from checkpoint import Checkpoint, main, text_config
from routing import Reference

HYBRID = layout.COMMON | {
    "attention_bias": False,
    "head_dim": 32,
    "num_hidden_layers": 4,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 16,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
    "rms_norm_eps": 1e-6,
}
NEXT = HYBRID | {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "decoder_sparse_step": 1,
    "intermediate_size": 96,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "partial_rotary_factor": 0.25,
    "rope_scaling": None,
    "rope_theta": 10000000,
}
QWEN35_TEXT = {k: v for k, v in HYBRID.items() if k != "torch_dtype"} | {
    "model_type": "qwen3_5_moe_text",
    "dtype": "bfloat16",
    "attn_output_gate": True,
    "layer_types": 3 * ["linear_attention"] + ["full_attention"],
    "mamba_ssm_dtype": "float32",
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    # All three sections count the same position in a text, so this is ordinary rotation.
    "rope_parameters": {
        "mrope_interleaved": True, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25,
        "rope_theta": 10000000, "rope_type": "default"},
}
QWEN35 = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "model_type": "qwen3_5_moe",
    "image_token_id": 317,
    "video_token_id": 318,
    "vision_start_token_id": 319,
    "vision_end_token_id": 319,
    "text_config": QWEN35_TEXT,
    "tie_word_embeddings": False,
    "vision_config": {
        "depth": 1, "hidden_size": 16, "in_channels": 3, "intermediate_size": 32,
        "model_type": "qwen3_5_moe", "num_heads": 2, "num_position_embeddings": 4,
        "out_hidden_size": 64, "patch_size": 2, "spatial_merge_size": 2, "temporal_patch_size": 2},
}


def is_fused(config):
    return config["model_type"] != "qwen3_next"


def full_attention(prefix, config):
    """Each head's query is followed by its gate in `q_proj`."""
    dim = config["head_dim"]
    shapes = layout.attention(prefix, config)
    rows, hidden = shapes[f"{prefix}.q_proj.weight"]
    shapes[f"{prefix}.q_proj.weight"] = (2 * rows, hidden)
    return shapes | {f"{prefix}.{n}_norm.weight": (dim,) for n in "qk"}


def delta_net(prefix, config):
    hidden, heads = config["hidden_size"], config["linear_num_value_heads"]
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = heads * config["linear_value_head_dim"]
    if is_fused(config):
        shapes = {
            f"{prefix}.in_proj_qkv.weight": (2 * keys + values, hidden),
            f"{prefix}.in_proj_z.weight": (values, hidden),
            f"{prefix}.in_proj_b.weight": (heads, hidden),
            f"{prefix}.in_proj_a.weight": (heads, hidden)}
    else:
        shapes = {
            f"{prefix}.in_proj_qkvz.weight": (2 * keys + 2 * values, hidden),
            f"{prefix}.in_proj_ba.weight": (2 * heads, hidden)}
    return shapes | {
        f"{prefix}.conv1d.weight": (2 * keys + values, 1, config["linear_conv_kernel_dim"]),
        f"{prefix}.A_log": (heads,),
        f"{prefix}.dt_bias": (heads,),
        f"{prefix}.norm.weight": (config["linear_value_head_dim"],),
        f"{prefix}.out_proj.weight": (hidden, values)}


def experts(prefix, config):
    hidden, count, inner = (
        config[k] for k in ("hidden_size", "num_experts", "moe_intermediate_size"))
    if not is_fused(config):
        return layout.experts(prefix, count, hidden, inner)
    return {
        f"{prefix}.gate_up_proj": (count, 2 * inner, hidden),
        f"{prefix}.down_proj": (count, hidden, inner)}


def layer(prefix, config, is_full):
    hidden = config["hidden_size"]
    mlp = f"{prefix}.mlp"
    mixer = (
        full_attention(f"{prefix}.self_attn", config) if is_full
        else delta_net(f"{prefix}.linear_attn", config))
    return (
        layout.norm(f"{prefix}.input_layernorm", hidden)
        | mixer
        | layout.norm(f"{prefix}.post_attention_layernorm", hidden)
        | {f"{mlp}.gate.weight": (config["num_experts"], hidden),
           f"{mlp}.shared_expert_gate.weight": (1, hidden)}
        | experts(f"{mlp}.experts", config)
        | layout.mlp(f"{mlp}.shared_expert", hidden, config["shared_expert_intermediate_size"]))


def draft_head(config):
    hidden = config["hidden_size"]
    shapes = {"mtp.fc.weight": (hidden, 2 * hidden)}
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        shapes |= layout.norm(f"mtp.{name}", hidden)
    return shapes | layer("mtp.layers.0", config, is_full=True)


def shapes(config):
    text = text_config(config)
    model = "model.language_model" if is_fused(text) else "model"
    hidden, vocab = text["hidden_size"], text["vocab_size"]
    shapes = {f"{model}.embed_tokens.weight": (vocab, hidden)}
    for number in range(text["num_hidden_layers"]):
        is_full = (number + 1) % text["full_attention_interval"] == 0
        shapes |= layer(f"{model}.layers.{number}", text, is_full)
    shapes |= layout.norm(f"{model}.norm", hidden) | {"lm_head.weight": (vocab, hidden)}
    if is_fused(text):
        shapes["model.visual.patch_embed.proj.bias"] = (config["vision_config"]["hidden_size"],)
    return shapes | draft_head(text)


SCALES = [
    (r"linear_attn\.norm\.weight$", 1.0, 0.15),
    (r"norm[^.]*\.weight$", 0.0, 0.15),
    # Decays between forgetting at once and remembering all 70 tokens.
    (r"A_log$", -1.5, 1.5),
    (r"conv1d", 0.0, 0.5),
    (r"in_proj_(ba|a|b)\.", 0.0, 0.2),
]
CHECKPOINTS = {
    name: Checkpoint(
        seed, "qwen2", config, shapes, functools.partial(Reference, router=router), SCALES)
    for name, seed, config, router in (
        ("qwen3next", 51, NEXT, "Qwen3NextTopKRouter"),
        ("qwen35moe", 52, QWEN35, "Qwen3_5MoeTopKRouter"))
}

if __name__ == "__main__":
    main(CHECKPOINTS, __doc__)
