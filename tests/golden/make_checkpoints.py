#!/usr/bin/env python3
"""Write the tiny checkpoints under tests/golden and what transformers computes on them.

    python make_checkpoints.py [--out DIR] [NAME ...]

Needs numpy, torch, transformers, tokenizers, sentencepiece and safetensors. Nothing is downloaded.
README.md in this folder describes the layout and how to read the expected files.

The weights come from numpy's PCG64 and not from torch, and are written under the tensor names of
the released checkpoints and not from `state_dict()`, because both torch's generators and the
in-memory layout of transformers' experts change between versions; these files must not.
"""

import argparse
import json
import pathlib

import numpy as np
import torch
import transformers
from safetensors.torch import save_file

import tokenizers_tiny
from reference import Reference, check_no_gaps_in_loading

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
PROMPTS = {"p5": 5, "p17": 17, "p70": 70}
GREEDY_TOKENS = 24
# Two float32 implementations differ by about 1e-5 here; a prompt whose reference decision is
# closer than these margins would test luck, so another prompt is drawn.
EXPERT_MARGIN = 1e-4
LOGIT_MARGIN = 1e-3
MAX_DRAWS = 2000

COMMON = {
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.02,
    "max_position_embeddings": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
    "use_cache": True,
}

QWEN2MOE = COMMON | {
    "architectures": ["Qwen2MoeForCausalLM"],
    "model_type": "qwen2_moe",
    "bos_token_id": 314,
    "eos_token_id": 314,
    "vocab_size": 320,
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
    "torch_dtype": "bfloat16",
}

QWEN3MOE = COMMON | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "bos_token_id": 314,
    "eos_token_id": 316,
    "vocab_size": 320,
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
    "torch_dtype": "bfloat16",
}

LLAMA = COMMON | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "vocab_size": 384,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "pretraining_tp": 1,
    "intermediate_size": 96,
    "torch_dtype": "bfloat16",
}

MIXTRAL = COMMON | {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "vocab_size": 384,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "intermediate_size": 64,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
    "torch_dtype": "bfloat16",
}

# name -> (seed, tokenizer, shards, config). The seeds are arbitrary and only have to stay.
CHECKPOINTS = {
    "qwen2moe": (11, "qwen2", 1, QWEN2MOE),
    # Renormalised weights, and a first layer that is dense although the rest is not.
    "qwen2moe_mixed": (12, "qwen2", 1, QWEN2MOE | {
        "norm_topk_prob": True, "num_experts_per_tok": 3, "mlp_only_layers": [0],
        "torch_dtype": "float16"}),
    "qwen3moe": (13, "qwen2", 2, QWEN3MOE),
    # With a step of 2, only layers 1 and 3 of the four route, and they keep the raw weights.
    "qwen3moe_mixed": (14, "qwen2", 1, QWEN3MOE | {
        "norm_topk_prob": False, "decoder_sparse_step": 2, "num_hidden_layers": 4}),
    "llama": (15, "sentencepiece", 1, LLAMA),
    "llama_tied": (16, "sentencepiece", 1, LLAMA | {
        "tie_word_embeddings": True, "torch_dtype": "float32", "hidden_size": 96,
        "intermediate_size": 64}),
    # original_max_position_embeddings is tiny so that 70 tokens see all three frequency bands
    # (kept, blended, divided by the factor) and not only the fast one.
    "llama3_rope": (17, "llama3", 1, LLAMA | {
        "vocab_size": 320, "bos_token_id": 314, "eos_token_id": 315, "rope_theta": 500000.0,
        "head_dim": 16, "rope_scaling": {
            "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64, "rope_type": "llama3"}}),
    "mixtral": (18, "sentencepiece", 2, MIXTRAL),
}


def mlp_shapes(prefix, hidden, inner, names=("gate_proj", "up_proj", "down_proj")):
    gate, up, down = names
    return {
        f"{prefix}.{gate}.weight": (inner, hidden),
        f"{prefix}.{up}.weight": (inner, hidden),
        f"{prefix}.{down}.weight": (hidden, inner),
    }


def attention_shapes(prefix, config):
    hidden, heads, kv = (
        config[k] for k in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    dim = config.get("head_dim", hidden // heads)
    shapes = {
        f"{prefix}.q_proj.weight": (heads * dim, hidden),
        f"{prefix}.k_proj.weight": (kv * dim, hidden),
        f"{prefix}.v_proj.weight": (kv * dim, hidden),
        f"{prefix}.o_proj.weight": (hidden, heads * dim),
    }
    if config["model_type"] == "qwen2_moe":
        for name, rows in (("q_proj", heads), ("k_proj", kv), ("v_proj", kv)):
            shapes[f"{prefix}.{name}.bias"] = (rows * dim,)
    if config["model_type"] == "qwen3_moe":
        shapes[f"{prefix}.q_norm.weight"] = (dim,)
        shapes[f"{prefix}.k_norm.weight"] = (dim,)
    return shapes


def is_sparse(config, layer):
    if config["model_type"] == "llama":
        return False
    if config["model_type"] == "mixtral":
        return True
    step = config["decoder_sparse_step"]
    return layer not in config["mlp_only_layers"] and (layer + 1) % step == 0


def feed_forward_shapes(prefix, config, layer):
    hidden = config["hidden_size"]
    if not is_sparse(config, layer):
        return mlp_shapes(f"{prefix}.mlp", hidden, config["intermediate_size"])
    if config["model_type"] == "mixtral":
        moe = f"{prefix}.block_sparse_moe"
        shapes = {f"{moe}.gate.weight": (config["num_local_experts"], hidden)}
        for e in range(config["num_local_experts"]):
            shapes |= mlp_shapes(
                f"{moe}.experts.{e}", hidden, config["intermediate_size"], ("w1", "w3", "w2"))
        return shapes
    moe = f"{prefix}.mlp"
    shapes = {f"{moe}.gate.weight": (config["num_experts"], hidden)}
    for e in range(config["num_experts"]):
        shapes |= mlp_shapes(f"{moe}.experts.{e}", hidden, config["moe_intermediate_size"])
    if config["model_type"] == "qwen2_moe":
        shapes |= mlp_shapes(
            f"{moe}.shared_expert", hidden, config["shared_expert_intermediate_size"])
        shapes[f"{moe}.shared_expert_gate.weight"] = (1, hidden)
    return shapes


def tensor_shapes(config):
    """Every tensor of the released layout, in the order it is drawn and stored."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    shapes = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
        shapes |= attention_shapes(f"{prefix}.self_attn", config)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
        shapes |= feed_forward_shapes(prefix, config, layer)
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    return shapes


def draw(rng, name, shape, config):
    """One tensor. The scales keep attention, routing and logits well away from flat."""
    noise = rng.standard_normal(shape)
    if "norm" in name:
        return 1.0 + 0.15 * noise
    if name.endswith(".bias"):
        return 0.3 * noise
    if name == "model.embed_tokens.weight":
        return (0.3 if config["tie_word_embeddings"] else 0.6) * noise
    if name == "lm_head.weight":
        return 0.3 * noise
    if name.endswith(("q_proj.weight", "k_proj.weight")):
        return 0.2 * noise
    if name.endswith(".gate.weight"):
        return 0.2 * noise
    return 0.15 * noise


def write_weights(folder, seed, shards, config):
    rng = np.random.Generator(np.random.PCG64(seed))
    dtype = DTYPES[config["torch_dtype"]]
    tensors = {
        name: torch.from_numpy(draw(rng, name, shape, config)).to(torch.float32).to(dtype)
        for name, shape in tensor_shapes(config).items()
    }
    metadata = {"format": "pt"}
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata)
        return
    # Cut by bytes and not by layer, so that one layer's experts lie in two files.
    total = sum(t.nbytes for t in tensors.values())
    parts, weight_map, done = [{} for _ in range(shards)], {}, 0
    for name, tensor in tensors.items():
        part = min(done * shards // total, shards - 1)
        parts[part][name] = tensor
        weight_map[name] = f"model-{part + 1:05}-of-{shards:05}.safetensors"
        done += tensor.nbytes
    for i, part in enumerate(parts):
        save_file(part, folder / f"model-{i + 1:05}-of-{shards:05}.safetensors", metadata)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_json(folder / "model.safetensors.index.json", index)


def write_json(path, value):
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_ids(path, ids):
    path.write_text(json.dumps([int(i) for i in ids]) + "\n", encoding="utf-8")


def expert_margin(probabilities, top_k):
    """Smallest gap among the ranks up to k+1, over all routing layers and tokens."""
    smallest = np.inf
    for layer in probabilities:
        if layer is not None:
            ranked = -np.sort(-layer, axis=-1)[:, : top_k + 1]
            smallest = min(smallest, float(np.min(ranked[:, :-1] - ranked[:, 1:])))
    return smallest


def logit_margin(logits):
    """Smallest lead of the best logit over the second, as a part of the best's magnitude."""
    best = -np.sort(-logits, axis=-1)[:, :2]
    return float(np.min((best[:, 0] - best[:, 1]) / np.abs(best[:, 0])))


def chosen_experts(probabilities, top_k):
    tokens = next((p.shape[0] for p in probabilities if p is not None), 0)
    chosen = np.full((len(probabilities), tokens, top_k), -1, dtype=np.int32)
    for i, layer in enumerate(probabilities):
        if layer is not None:
            chosen[i] = np.argsort(-layer, axis=-1, kind="stable")[:, :top_k]
    return chosen


def greedy(reference, prompt, config):
    """The continuation, or None where one of its steps is too close or ends the text."""
    ids, top_k = list(prompt), reference.top_k
    for _ in range(GREEDY_TOKENS):
        logits, probabilities = reference(ids)
        if logit_margin(logits[-1:]) < LOGIT_MARGIN:
            return None
        if expert_margin(probabilities, top_k) < EXPERT_MARGIN:
            return None
        ids.append(int(np.argmax(logits[-1])))
        # An engine that stops at the end of text must give the same 24 ids.
        if ids[-1] == config["eos_token_id"]:
            return None
    return ids[len(prompt):]


def write_expectations(folder, seed, config, specials):
    """Draw prompts until their reference run has no near tie, then write what it computed."""
    out = folder / "expect"
    out.mkdir(exist_ok=True)
    reference = Reference(folder, config)
    ordinary = [i for i in range(config["vocab_size"]) if i not in specials]
    report = {}
    for prompt, length in PROMPTS.items():
        rng = np.random.Generator(np.random.PCG64([seed, length]))
        for attempt in range(MAX_DRAWS):
            ids = [int(i) for i in rng.choice(ordinary, size=length)]
            logits, probabilities = reference(ids)
            margins = expert_margin(probabilities, reference.top_k), logit_margin(logits)
            if margins[0] < EXPERT_MARGIN or margins[1] < LOGIT_MARGIN:
                continue
            continuation = greedy(reference, ids, config)
            if continuation is not None:
                break
        else:
            raise SystemExit(f"{folder.name} {prompt}: every draw came near a tie")
        write_ids(out / f"{prompt}.tokens.json", ids)
        write_ids(out / f"{prompt}.greedy.json", continuation)
        np.save(out / f"{prompt}.logits.npy", logits.astype(np.float32))
        report[prompt] = {"draws": attempt + 1, "logit_margin": round(margins[1], 6)}
        if reference.top_k:
            np.save(out / f"{prompt}.experts.npy", chosen_experts(probabilities, reference.top_k))
            report[prompt]["expert_margin"] = round(margins[0], 6)
        report[prompt]["distinct_in_greedy"] = len(set(continuation))
    return report


def make(root, name):
    seed, tokenizer, shards, config = CHECKPOINTS[name]
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("model*"):
        old.unlink()
    write_json(folder / "config.json", config)
    write_weights(folder, seed, shards, config)
    specials = tokenizers_tiny.write(folder, tokenizer)
    check_no_gaps_in_loading(folder)
    report = write_expectations(folder, seed, config, specials)
    size = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
    print(f"{name}: {size / 1e6:.2f} MB {json.dumps(report)}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(__file__).parent)
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: every checkpoint")
    args = parser.parse_args()
    print(f"torch {torch.__version__}, transformers {transformers.__version__}")
    for name in args.names or CHECKPOINTS:
        make(args.out, name)


if __name__ == "__main__":
    main()
