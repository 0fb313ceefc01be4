#!/usr/bin/env python3
"""Switch Transformer: one expert per token in every other layer, and no more than it has room for.

    python make_switch.py [--out DIR] [NAME ...]

A token that comes after an expert's `expert_capacity` is full gets nothing from the layer but its
residual (Fedus et al. 2022, section 2.2). transformers 4 instead adds the normed token times its
probability there.
"""

import torch
from transformers import SwitchTransformersForConditionalGeneration

import seq2seq
from checkpoint import Checkpoint, main
from routing import check_loading, rank

EOS = 1
SWITCH = {
    "architectures": ["SwitchTransformersForConditionalGeneration"],
    "model_type": "switch_transformers",
    "add_router_probs": False,
    "d_ff": 48,
    "d_kv": 16,
    "d_model": 64,
    "num_heads": 4,
    # The second of the encoder's three layers routes, and of the decoder's two.
    "num_layers": 3,
    "num_decoder_layers": 2,
    "num_sparse_encoder_layers": 1,
    "num_sparse_decoder_layers": 1,
    "encoder_sparse_step": 3,
    "decoder_sparse_step": 2,
    "num_experts": 6,
    # 70 tokens overfill some of the 6 experts, 32 decoder positions were drawn not to.
    "expert_capacity": 18,
    "router_bias": False,
    "router_dtype": "float32",
    "router_ignore_padding_tokens": False,
    "router_jitter_noise": 0.01,
    "router_type": "tokens_masked",
    "dense_act_fn": "relu",
    "feed_forward_proj": "relu",
    "is_gated_act": False,
    "is_encoder_decoder": True,
    "dropout_rate": 0.1,
    "initializer_factor": 1.0,
    "layer_norm_epsilon": 1e-6,
    # Fewer and nearer than the released 32 and 128, so that 70 tokens pass the last boundary.
    "relative_attention_num_buckets": 16,
    "relative_attention_max_distance": 48,
    "n_positions": 512,
    "vocab_size": 208,
    "pad_token_id": 0,
    "eos_token_id": EOS,
    "decoder_start_token_id": 0,
    "tie_word_embeddings": False,
    "use_cache": True,
    "torch_dtype": "bfloat16",
}


SWITCH_TIED = SWITCH | {
    "tie_word_embeddings": True, "num_layers": 2, "encoder_sparse_step": 2}


def attention(prefix, config, has_bias):
    hidden, inner = config["d_model"], config["num_heads"] * config["d_kv"]
    shapes = {f"{prefix}.{n}.weight": (inner, hidden) for n in "qkv"}
    shapes[f"{prefix}.o.weight"] = (hidden, inner)
    if has_bias:
        shapes[f"{prefix}.relative_attention_bias.weight"] = (
            config["relative_attention_num_buckets"], config["num_heads"])
    return shapes


def dense(prefix, config):
    hidden, inner = config["d_model"], config["d_ff"]
    return {f"{prefix}.wi.weight": (inner, hidden), f"{prefix}.wo.weight": (hidden, inner)}


def feed_forward(prefix, config, is_sparse):
    if not is_sparse:
        return dense(prefix, config)
    shapes = {f"{prefix}.router.classifier.weight": (config["num_experts"], config["d_model"])}
    for expert in range(config["num_experts"]):
        shapes |= dense(f"{prefix}.experts.expert_{expert}", config)
    return shapes


def stack(part, config):
    hidden = config["d_model"]
    count = config["num_layers" if part == "encoder" else "num_decoder_layers"]
    shapes = {}
    for block in range(count):
        prefix = f"{part}.block.{block}.layer"
        shapes |= attention(f"{prefix}.0.SelfAttention", config, block == 0)
        shapes[f"{prefix}.0.layer_norm.weight"] = (hidden,)
        last = 1
        if part == "decoder":
            shapes |= attention(f"{prefix}.1.EncDecAttention", config, False)
            shapes[f"{prefix}.1.layer_norm.weight"] = (hidden,)
            last = 2
        is_sparse = block % config[f"{part}_sparse_step"] == 1
        shapes |= feed_forward(f"{prefix}.{last}.mlp", config, is_sparse)
        shapes[f"{prefix}.{last}.layer_norm.weight"] = (hidden,)
    return shapes | {f"{part}.final_layer_norm.weight": (hidden,)}


def shapes(config):
    vocab = (config["vocab_size"], config["d_model"])
    shapes = {"shared.weight": vocab} | stack("encoder", config) | stack("decoder", config)
    return shapes if config["tie_word_embeddings"] else shapes | {"lm_head.weight": vocab}


def chosen(logits, output):
    dispatched = output[0].reshape(logits.shape)
    experts, gap = rank(torch.softmax(logits, dim=-1), 1)
    took = dispatched.sum(-1).numpy() > 0
    assert (dispatched.argmax(-1).numpy()[took] == experts[took, 0]).all()
    experts[~took] = -1
    return experts, gap


def reference(folder, config):
    model, info = SwitchTransformersForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
    check_loading(info, config["num_layers"])
    return seq2seq.Reference(model, "SwitchTransformersTop1Router", chosen)


def frame(rng, ordinary, length):
    return [*(int(i) for i in rng.choice(ordinary, size=length - 1)), EOS]


# The products of queries and keys are not divided by anything, so their matrices are small. What
# the layers add is small next to the embedding, or all tokens would be routed alike: a ReLU and an
# average over the source have large parts in common.
SCALES = [
    (r"Attention\.[qk]\.weight", 0.0, 0.1), (r"relative_attention_bias", 0.0, 0.7),
    (r"EncDecAttention\.o\.", 0.0, 0.07), (r"wo\.weight", 0.0, 0.08),
    (r"shared", 0.0, 1.0), (r"classifier", 0.0, 0.2)]
# With weights around one, each token would be the likeliest to follow itself.
TIED = [(r"decoder\.final_layer_norm", 0.0, 1.0), *SCALES]
# With tie_word_embeddings off, transformers 5 reads each of the three.
COPIES = {f"{part}.embed_tokens.weight": "shared.weight" for part in ("encoder", "decoder")}
CHECKPOINTS = {
    "switch": Checkpoint(61, "t5", SWITCH, shapes, reference, SCALES, copies=COPIES),
    "switch_tied": Checkpoint(
        62, "t5", SWITCH_TIED, shapes, reference, TIED),
}

if __name__ == "__main__":
    main(CHECKPOINTS, __doc__, seq2seq.writer(frame, [0], drops_at="p70"))
