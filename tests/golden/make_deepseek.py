#!/usr/bin/env python3
"""DeepSeek-V2 and V3 and their kin: latent attention, shared experts, dense layers first.

    python make_deepseek.py [--out DIR] [NAME ...]

V2 chooses by softmax, V3 by a sigmoid with a correction bias; both may choose groups first.
"""

import functools

import formats
import layout
import routing
from checkpoint import Checkpoint, main

MLA = layout.COMMON | {
    "attention_bias": False,
    "num_key_value_heads": 4,
    # Four different head sizes, so that a mix-up cannot fit: 16 + 16 for keys, 24 for values.
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "aux_loss_alpha": 0.001,
    "seq_aux": True,
    "ep_size": 1,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "max_position_embeddings": 256,
}


def yarn(mscale):
    return {
        "beta_fast": 32, "beta_slow": 1, "factor": 8, "mscale": mscale, "mscale_all_dim": mscale,
        "original_max_position_embeddings": 32, "type": "yarn"}


V2 = MLA | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "scoring_func": "softmax",
    "topk_method": "group_limited_greedy",
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": False,
    "routed_scaling_factor": 2.5,
    "rope_scaling": yarn(0.707),
}
V2_LITE = V2 | {
    "q_lora_rank": None, "topk_method": "greedy", "n_group": 1, "topk_group": 1,
    "routed_scaling_factor": 1.0, "n_shared_experts": 2}
V3 = MLA | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "n_group": 2,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 0,
    "rope_scaling": yarn(1.0),
}
FP8_BLOCK = 32
V3_FP8 = V3 | {
    "num_nextn_predict_layers": 1,
    "quantization_config": {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
        "weight_block_size": [FP8_BLOCK, FP8_BLOCK]}}
MOONLIGHT = V3 | {
    "q_lora_rank": None, "n_group": 1, "topk_group": 1, "n_shared_experts": 2,
    "routed_scaling_factor": 2.446, "rope_scaling": None, "rope_theta": 50000.0,
    "num_hidden_layers": 2}
GLM_LITE = V3 | {
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "model_type": "glm4_moe_lite",
    "vocab_size": 328, "bos_token_id": None, "eos_token_id": [314, 321, 323],
    "pad_token_id": 314,
    "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.8, "rms_norm_eps": 1e-5,
    "rope_scaling": None, "rope_theta": 1000000, "partial_rotary_factor": 1.0,
    "num_nextn_predict_layers": 1, "num_hidden_layers": 2}


def attention(prefix, config, layer):
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    nope, rope, value = (
        config[k] for k in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    query, latent = config["q_lora_rank"], config["kv_lora_rank"]
    if query is None:
        shapes = {f"{prefix}.q_proj.weight": (heads * (nope + rope), hidden)}
    else:
        shapes = {
            f"{prefix}.q_a_proj.weight": (query, hidden),
            f"{prefix}.q_a_layernorm.weight": (query,),
            f"{prefix}.q_b_proj.weight": (heads * (nope + rope), query)}
    return shapes | {
        f"{prefix}.kv_a_proj_with_mqa.weight": (latent + rope, hidden),
        f"{prefix}.kv_a_layernorm.weight": (latent,),
        f"{prefix}.kv_b_proj.weight": (heads * (nope + value), latent),
        f"{prefix}.o_proj.weight": (hidden, heads * value)}


def feed_forward(prefix, config, layer):
    hidden, count, inner = (
        config[k] for k in ("hidden_size", "n_routed_experts", "moe_intermediate_size"))
    if layer < config["first_k_dense_replace"]:
        return layout.mlp(f"{prefix}.mlp", hidden, config["intermediate_size"])
    shapes = {f"{prefix}.mlp.gate.weight": (count, hidden)}
    if config["scoring_func"] == "sigmoid":
        shapes[f"{prefix}.mlp.gate.e_score_correction_bias"] = (count,)
    shapes |= layout.experts(f"{prefix}.mlp.experts", count, hidden, inner)
    return shapes | layout.mlp(
        f"{prefix}.mlp.shared_experts", hidden, inner * config["n_shared_experts"])


def shapes(config):
    shapes = layout.decoder(config, attention, feed_forward)
    if config.get("num_nextn_predict_layers"):
        shapes |= layout.next_token_layer(config, attention, feed_forward)
    return shapes


def is_fp8(name):
    return name.endswith("proj.weight") or "kv_a_proj" in name


V2_REFERENCE = functools.partial(
    routing.Reference, router="DeepseekV2TopkRouter", rule=routing.grouped_softmax)
V3_REFERENCE, GLM_REFERENCE = (
    functools.partial(routing.Reference, router=name, rule=routing.biased_sigmoid)
    for name in ("DeepseekV3TopkRouter", "Glm4MoeLiteTopkRouter"))
SCALES = [(r"q_[ab]_proj|kv_a_proj", 0.0, 0.2)]
CHECKPOINTS = {
    "deepseek_v2_lite": Checkpoint(31, "qwen2", V2_LITE, shapes, V2_REFERENCE, SCALES),
    "deepseek_v2": Checkpoint(32, "qwen2", V2, shapes, V2_REFERENCE, SCALES),
    "deepseek_v3": Checkpoint(33, "qwen2", V3, shapes, V3_REFERENCE, SCALES),
    "deepseek_v3_fp8": Checkpoint(
        34, "qwen2", V3_FP8, shapes, V3_REFERENCE, SCALES,
        formats.fp8_blocks(is_fp8, FP8_BLOCK)),
    "moonlight": Checkpoint(35, "qwen2", MOONLIGHT, shapes, V3_REFERENCE, SCALES),
    "glm4_moe_lite": Checkpoint(36, "glm4", GLM_LITE, shapes, GLM_REFERENCE, SCALES),
}

if __name__ == "__main__":
    main(CHECKPOINTS, __doc__)
