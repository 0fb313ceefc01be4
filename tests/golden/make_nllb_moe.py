#!/usr/bin/env python3
"""NLLB-MoE: two experts of every n-th layer, their shares and a fifth taken off in inference.

    python make_nllb_moe.py [--out DIR] [NAME ...]

Runs with transformers 4 (4.46 wrote the files): version 5 hands the one-hot mask of the first
choice to its experts as if it were indices and reaches experts 0 and 1 only.
"""

import torch
import transformers
from transformers import NllbMoeForConditionalGeneration

import seq2seq
from checkpoint import Checkpoint, main
from routing import check_loading, rank
from tokenizers_tiny import LANGUAGES, NLLB_SIZE

EOS = 2
ENGLISH, GERMAN = (NLLB_SIZE + 1 + LANGUAGES.index(c) for c in ("eng_Latn", "deu_Latn"))
NLLB = {
    "architectures": ["NllbMoeForConditionalGeneration"],
    "model_type": "nllb-moe",
    "activation_function": "relu",
    "d_model": 64,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "encoder_layers": 4,
    "decoder_layers": 2,
    "encoder_sparse_step": 4,
    "decoder_sparse_step": 2,
    "num_hidden_layers": 4,
    "num_experts": 6,
    # As released: the fraction of 1 makes room for every token, whatever the capacity says.
    "expert_capacity": 64,
    "moe_eval_capacity_token_fraction": 1.0,
    "moe_token_dropout": 0.2,
    "second_expert_policy": "all",
    "normalize_router_prob_before_dropping": False,
    "batch_prioritized_routing": False,
    "router_bias": False,
    "router_dtype": "float32",
    "router_ignore_padding_tokens": False,
    "scale_embedding": True,
    "max_position_embeddings": 256,
    "vocab_size": 392,
    "bos_token_id": 0,
    "pad_token_id": 1,
    "eos_token_id": EOS,
    "decoder_start_token_id": EOS,
    "is_encoder_decoder": True,
    "activation_dropout": 0.0,
    "attention_dropout": 0.1,
    "dropout": 0.1,
    "encoder_layerdrop": 0.05,
    "decoder_layerdrop": 0.05,
    "init_std": 0.02,
    "tie_word_embeddings": True,
    "use_cache": True,
    "torch_dtype": "bfloat16",
}


def linear(name, rows, columns):
    return {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}


def norm(name, size):
    return {f"{name}.weight": (size,), f"{name}.bias": (size,)}


def attention(prefix, hidden):
    shapes = {}
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        shapes |= linear(f"{prefix}.{name}", hidden, hidden)
    return shapes


def dense(prefix, hidden, inner):
    return linear(f"{prefix}.fc1", inner, hidden) | linear(f"{prefix}.fc2", hidden, inner)


def feed_forward(prefix, part, config, layer):
    hidden, inner = config["d_model"], config[f"{part}_ffn_dim"]
    if (layer + 1) % config[f"{part}_sparse_step"]:
        return dense(prefix, hidden, inner)
    shapes = {f"{prefix}.router.classifier.weight": (config["num_experts"], hidden)}
    for expert in range(config["num_experts"]):
        shapes |= dense(f"{prefix}.experts.expert_{expert}", hidden, inner)
    return shapes


def shapes(config):
    hidden = config["d_model"]
    shapes = {"model.shared.weight": (config["vocab_size"], hidden)}
    for part in seq2seq.PARTS:
        for layer in range(config[f"{part}_layers"]):
            prefix = f"model.{part}.layers.{layer}"
            shapes |= attention(f"{prefix}.self_attn", hidden)
            shapes |= norm(f"{prefix}.self_attn_layer_norm", hidden)
            if part == "decoder":
                shapes |= attention(f"{prefix}.cross_attention", hidden)
                shapes |= norm(f"{prefix}.cross_attention_layer_norm", hidden)
            shapes |= feed_forward(f"{prefix}.ffn", part, config, layer)
            shapes |= norm(f"{prefix}.ff_layer_norm", hidden)
        shapes |= norm(f"model.{part}.layer_norm", hidden)
    return shapes


def chosen(logits, output):
    experts, gap = rank(torch.softmax(logits, dim=-1), 2)
    shared = output[1] > 0
    assert shared.sum(-1).eq(2).all() and shared.gather(1, torch.from_numpy(experts)).all()
    return experts, gap


def reference(folder, config):
    if not transformers.__version__.startswith("4."):
        raise SystemExit("transformers 5 routes nllb-moe wrongly, this needs version 4")
    model, info = NllbMoeForConditionalGeneration.from_pretrained(
        folder, torch_dtype=torch.float32, output_loading_info=True)
    check_loading(info, config["num_hidden_layers"])
    return seq2seq.Reference(model, "NllbMoeTop2Router", chosen)


def frame(rng, ordinary, length):
    return [ENGLISH, *(int(i) for i in rng.choice(ordinary, size=length - 2)), EOS]


# After the scaling by 8, the embedding is large enough beside what the layers add, which has large
# parts in common (ReLU, an average over the source): otherwise all tokens would be routed alike.
SCALES = [
    (r"shared", 0.0, 0.25), (r"cross_attention\.out_proj\.weight", 0.0, 0.07),
    (r"fc2\.weight", 0.0, 0.1), (r"(fc2|out_proj)\.bias", 0.0, 0.1), (r"classifier", 0.0, 0.2),
    # With weights around one, each token would be the likeliest to follow itself.
    (r"decoder\.layer_norm\.weight", 0.0, 1.0)]
CHECKPOINTS = {"nllb_moe": Checkpoint(63, "nllb", NLLB, shapes, reference, SCALES)}

if __name__ == "__main__":
    main(CHECKPOINTS, __doc__, seq2seq.writer(frame, [EOS, GERMAN]))
