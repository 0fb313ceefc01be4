#!/usr/bin/env python3
"""Snowflake Arctic: a dense MLP as residual beside experts that read the layer's own input.

    python make_arctic.py [--out DIR] [NAME ...]

transformers dropped the model, whose code lived with the checkpoint. In a routing layer the
attention's sum goes through the dense MLP, the layer's input through the experts, and both are
added (`parallel_attn_mlp_res`); another layer is an ordinary one.
"""

import layout
from checkpoint import Checkpoint, main
from plain_torch import Decoder, rms_norm

ARCTIC = layout.COMMON | {
    "architectures": ["ArcticForCausalLM"],
    "model_type": "arctic",
    "num_hidden_layers": 2,
    "vocab_size": 384,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "intermediate_size": 32,
    "moe_layer_frequency": 1,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "parallel_attn_mlp_res": True,
    "use_residual": True,
    "moe_eval_capacity_factor": 1,
    "moe_token_dropping": True,
    "router_aux_loss_coef": 0.001,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000,
    "sliding_window": None,
}
# Layer 0 dense and 1 routing; no release is so, the configuration allows it.
MIXED = ARCTIC | {"moe_layer_frequency": 2}
NAMES = ("w1", "w3", "w2")


def routes(config, layer):
    return (layer + 1) % config["moe_layer_frequency"] == 0


def feed_forward(prefix, config, layer):
    hidden, inner, count = (
        config[k] for k in ("hidden_size", "intermediate_size", "num_local_experts"))
    moe = f"{prefix}.block_sparse_moe"
    if not routes(config, layer):
        return layout.mlp(f"{moe}.mlp", hidden, inner, NAMES)
    return (
        {f"{moe}.gate.weight": (count, hidden)}
        | layout.experts(f"{moe}.experts", count, hidden, inner, NAMES)
        | layout.norm(f"{prefix}.residual_layernorm", hidden)
        | layout.mlp(f"{prefix}.residual_mlp", hidden, hidden, NAMES))


def shapes(config):
    return layout.decoder(config, lambda p, c, layer: layout.attention(p, c), feed_forward)


class Arctic(Decoder):
    def layer(self, number, weights, x):
        normed = rms_norm(x, weights["input_layernorm"], self.eps)
        attended = x + self.attention(weights.under("self_attn"), normed)
        moe = weights.under("block_sparse_moe")
        if not routes(self.config, number):
            normed = rms_norm(attended, weights["post_attention_layernorm"], self.eps)
            return attended + moe.under("mlp").mlp(normed, NAMES)
        normed = rms_norm(attended, weights["residual_layernorm"], self.eps)
        dense = attended + weights.under("residual_mlp").mlp(normed, NAMES)
        routed = self.experts(
            number, rms_norm(x, weights["post_attention_layernorm"], self.eps), moe["gate"],
            lambda expert, rows: moe.under(f"experts.{expert}").mlp(rows, NAMES),
            renormalise=True)
        return dense + routed


CHECKPOINTS = {
    "arctic": Checkpoint(44, "sentencepiece", ARCTIC, shapes, Arctic),
    "arctic_mixed": Checkpoint(45, "sentencepiece", MIXED, shapes, Arctic),
}

if __name__ == "__main__":
    main(CHECKPOINTS, __doc__)
