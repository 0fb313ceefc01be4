#!/usr/bin/env python3
"""The first DeepSeek-MoE (16B): fine-grained and shared experts over ordinary attention.

    python make_deepseek_moe.py [--out DIR] [NAME ...]

transformers has no such model. Dai et al., "DeepSeekMoE: Towards Ultimate Expert Specialization in
Mixture-of-Experts Language Models", 2024, section 3: softmax over all routed experts, the best k
keep their raw probabilities, and the shared experts are added unweighted.
"""

import layout
from checkpoint import Checkpoint, main
from plain_torch import Decoder, rms_norm

DEEPSEEK = layout.COMMON | {
    "architectures": ["DeepseekForCausalLM"],
    "model_type": "deepseek",
    "attention_bias": False,
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "norm_topk_prob": False,
    "scoring_func": "softmax",
    "aux_loss_alpha": 0.001,
    "seq_aux": True,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "rope_scaling": None,
}


def feed_forward(prefix, config, layer):
    hidden, count, inner = (
        config[k] for k in ("hidden_size", "n_routed_experts", "moe_intermediate_size"))
    if layer < config["first_k_dense_replace"]:
        return layout.mlp(f"{prefix}.mlp", hidden, config["intermediate_size"])
    return (
        {f"{prefix}.mlp.gate.weight": (count, hidden)}
        | layout.experts(f"{prefix}.mlp.experts", count, hidden, inner)
        | layout.mlp(f"{prefix}.mlp.shared_experts", hidden, inner * config["n_shared_experts"]))


def shapes(config):
    return layout.decoder(config, lambda p, c, layer: layout.attention(p, c), feed_forward)


class DeepseekMoe(Decoder):
    def layer(self, number, weights, x):
        normed = rms_norm(x, weights["input_layernorm"], self.eps)
        x = x + self.attention(weights.under("self_attn"), normed)
        normed = rms_norm(x, weights["post_attention_layernorm"], self.eps)
        mlp = weights.under("mlp")
        if number < self.config["first_k_dense_replace"]:
            return x + mlp.mlp(normed)
        routed = self.experts(
            number, normed, mlp["gate"],
            lambda expert, rows: mlp.under(f"experts.{expert}").mlp(rows),
            self.config["norm_topk_prob"])
        return x + routed + mlp.under("shared_experts").mlp(normed)


CHECKPOINTS = {"deepseek": Checkpoint(43, "qwen2", DEEPSEEK, shapes, DeepseekMoe)}

if __name__ == "__main__":
    main(CHECKPOINTS, __doc__)
