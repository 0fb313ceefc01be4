#!/usr/bin/env python3
"""GLM-4.5: rotary over half a head, Q/K norms or none, Q/K/V biases, sigmoid with a correction.

    python make_glm4moe.py [--out DIR] [NAME ...]

`glm4moe` carries the multi-token prediction layer behind the last one, as the released ones do;
`glm4moe_air` comes without it, as files that dropped it.
"""

import functools

import layout
import routing
from checkpoint import Checkpoint, main

GLM = layout.COMMON | {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "vocab_size": 328,
    "bos_token_id": None,
    # End of text, the user's turn and the observation's.
    "eos_token_id": [314, 321, 323],
    "pad_token_id": 314,
    "attention_bias": True,
    "use_qk_norm": True,
    "head_dim": 32,
    "partial_rotary_factor": 0.5,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 1,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000,
    "rope_scaling": None,
}
AIR = GLM | {"use_qk_norm": False, "routed_scaling_factor": 1.0, "num_nextn_predict_layers": 0,
             "num_hidden_layers": 3}


def attention(prefix, config, layer):
    shapes = layout.attention(prefix, config, biases="qkv")
    if config["use_qk_norm"]:
        shapes |= {f"{prefix}.{n}_norm.weight": (config["head_dim"],) for n in "qk"}
    return shapes


def feed_forward(prefix, config, layer):
    hidden, count, inner = (
        config[k] for k in ("hidden_size", "n_routed_experts", "moe_intermediate_size"))
    if layer < config["first_k_dense_replace"]:
        return layout.mlp(f"{prefix}.mlp", hidden, config["intermediate_size"])
    return (
        {f"{prefix}.mlp.gate.weight": (count, hidden),
         f"{prefix}.mlp.gate.e_score_correction_bias": (count,)}
        | layout.experts(f"{prefix}.mlp.experts", count, hidden, inner)
        | layout.mlp(f"{prefix}.mlp.shared_experts", hidden, inner * config["n_shared_experts"]))


def shapes(config):
    shapes = layout.decoder(config, attention, feed_forward)
    if config["num_nextn_predict_layers"]:
        shapes |= layout.next_token_layer(config, attention, feed_forward)
    return shapes


REFERENCE = functools.partial(
    routing.Reference, router="Glm4MoeTopkRouter", rule=routing.biased_sigmoid)
CHECKPOINTS = {
    "glm4moe": Checkpoint(41, "glm4", GLM, shapes, REFERENCE),
    "glm4moe_air": Checkpoint(42, "glm4", AIR, shapes, REFERENCE),
}

if __name__ == "__main__":
    main(CHECKPOINTS, __doc__)
