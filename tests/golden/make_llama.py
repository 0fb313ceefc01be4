#!/usr/bin/env python3
"""Llama and Mixtral: SentencePiece, tied and untied, Llama 3's rotary bands.

    python make_llama.py [--out DIR] [NAME ...]
"""

import functools

import layout
from checkpoint import Checkpoint, main
from routing import Reference

SENTENCEPIECE = layout.COMMON | {"bos_token_id": 1, "eos_token_id": 2, "vocab_size": 384}
LLAMA = SENTENCEPIECE | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "mlp_bias": False,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "pretraining_tp": 1,
    "intermediate_size": 96,
}
LLAMA_TIED = LLAMA | {
    "tie_word_embeddings": True, "torch_dtype": "float32", "hidden_size": 96,
    "intermediate_size": 64}
# original_max_position_embeddings is tiny so that 70 tokens see all three frequency bands (kept,
# blended, divided by the factor) and not only the fast one.
LLAMA3_ROPE = LLAMA | {
    "vocab_size": 320, "bos_token_id": 314, "eos_token_id": 315, "rope_theta": 500000.0,
    "head_dim": 16, "rope_scaling": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64, "rope_type": "llama3"}}
MIXTRAL = SENTENCEPIECE | {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "intermediate_size": 64,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
}


def feed_forward(prefix, config, layer):
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    if config["model_type"] == "llama":
        return layout.mlp(f"{prefix}.mlp", hidden, inner)
    count, moe = config["num_local_experts"], f"{prefix}.block_sparse_moe"
    return {f"{moe}.gate.weight": (count, hidden)} | layout.experts(
        f"{moe}.experts", count, hidden, inner, ("w1", "w3", "w2"))


def shapes(config):
    return layout.decoder(config, lambda p, c, layer: layout.attention(p, c), feed_forward)


ROUTED = functools.partial(Reference, router="MixtralTopKRouter")
CHECKPOINTS = {
    "llama": Checkpoint(15, "sentencepiece", LLAMA, shapes, Reference),
    "llama_tied": Checkpoint(
        16, "sentencepiece", LLAMA_TIED, shapes, Reference, [("embed_tokens", 0.0, 0.3)]),
    "llama3_rope": Checkpoint(17, "llama3", LLAMA3_ROPE, shapes, Reference),
    "mixtral": Checkpoint(18, "sentencepiece", MIXTRAL, shapes, ROUTED, shards=2),
}

if __name__ == "__main__":
    main(CHECKPOINTS, __doc__)
