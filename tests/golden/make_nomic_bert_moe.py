#!/usr/bin/env python3
"""nomic-embed-text-v2-moe: an encoder with norms behind its parts and two experts a token.

    python make_nomic_bert_moe.py [--out DIR]

transformers has no such model: the reference here is plain NumPy in double precision. `expect/` has
the outputs of the last layer, `pN.outputs.npy` [tokens, hidden], and no logits.
"""

import argparse
import json
import math
import pathlib

import numpy as np

SEED = 71
PROMPTS = {"p5": 5, "p17": 17, "p70": 70}
EXPERT_MARGIN = 1e-4
MAX_DRAWS = 200

BOS, PAD, EOS, UNK = 0, 1, 2, 3
SPECIALS = ["<s>", "<pad>", "</s>", "<unk>"]
# Pieces with their scores: letters, and longer ones that are likelier than their letters.
LETTERS = "▁etaoinshrdlucmfwygpbvk.,é水"
WORDS = ["▁the", "▁a", "▁mill", "er", "ing", "▁bridge", "ou", "▁wheel", "st", "▁river"]
PIECES = [(letter, -5.0 - i / 10) for i, letter in enumerate(LETTERS)]
PIECES += [(word, -2.0 - i / 10) for i, word in enumerate(WORDS)]
TEXTS = [
    "the miller", "a bridge over the river", "  two   spaces ", "", "é水", "the wheel stood still.",
    "xyz",
]

CONFIG = {
    "activation_function": "gelu",
    "architectures": ["NomicBertModel"],
    "causal": False,
    "expert_choice_router": False,
    "ffn_div": 1,
    "layer_norm_epsilon": 1e-5,
    "mlp_fc1_bias": True,
    "mlp_fc2_bias": True,
    "model_type": "nomic_bert",
    "moe_every_n_layers": 2,
    "moe_impl": "megablocks",
    "moe_normalize_expert_weights": False,
    "moe_top_k": 2,
    "n_embd": 64,
    "n_head": 4,
    "n_inner": 96,
    "n_layer": 4,
    "n_positions": 512,
    "num_experts": 8,
    "num_shared_experts": 0,
    "parallel_block": False,
    "prenorm": False,
    "qkv_proj_bias": True,
    "rotary_emb_base": 10000.0,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "torch_dtype": "bfloat16",
    "type_vocab_size": 1,
    "use_rms_norm": False,
    "vocab_size": 48,
}


def shapes(config):
    """Every tensor of the released layout, in the order it is drawn and stored."""
    hidden, inner, experts = config["n_embd"], config["n_inner"], config["num_experts"]
    out = {
        "embeddings.word_embeddings.weight": (config["vocab_size"], hidden),
        "embeddings.token_type_embeddings.weight": (config["type_vocab_size"], hidden),
        "emb_ln.weight": (hidden,),
        "emb_ln.bias": (hidden,),
    }
    for layer in range(config["n_layer"]):
        prefix = f"encoder.layers.{layer}"
        out |= linear(f"{prefix}.attn.Wqkv", 3 * hidden, hidden)
        out |= linear(f"{prefix}.attn.out_proj", hidden, hidden)
        if layer % config["moe_every_n_layers"] == 1:
            out[f"{prefix}.mlp.router.layer.weight"] = (experts, hidden)
            out[f"{prefix}.mlp.experts.mlp.w1"] = (experts * inner, hidden)
            out[f"{prefix}.mlp.experts.mlp.w2"] = (experts * inner, hidden)
            out[f"{prefix}.mlp.experts.bias"] = (hidden,)
        else:
            out |= linear(f"{prefix}.mlp.fc1", inner, hidden)
            out |= linear(f"{prefix}.mlp.fc2", hidden, inner)
        for norm in ("norm1", "norm2"):
            out |= {f"{prefix}.{norm}.weight": (hidden,), f"{prefix}.{norm}.bias": (hidden,)}
    return out


def linear(name, rows, columns):
    return {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}


def draw(rng, name, shape):
    mean, deviation = 0.0, 0.15
    if "norm" in name or "emb_ln" in name:
        mean = 1.0 if name.endswith("weight") else 0.0
    elif "word_embeddings" in name or "router" in name:
        deviation = 0.6
    return mean + deviation * rng.standard_normal(shape)


class Reference:
    def __init__(self, config, tensors):
        self.config = config
        self.w = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}

    def linear(self, name, x):
        return x @ self.w[f"{name}.weight"].T + self.w[f"{name}.bias"]

    def norm(self, name, x):
        x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + self.config["layer_norm_epsilon"])
        return x * self.w[f"{name}.weight"] + self.w[f"{name}.bias"]

    def rotated(self, x):
        """The halves of each head of [tokens, heads, size] rotate together."""
        half = x.shape[-1] // 2
        powers = np.arange(half) * 2.0 / x.shape[-1]
        angles = np.arange(len(x))[:, None, None] / self.config["rotary_emb_base"] ** powers
        a, b = x[..., :half], x[..., half:]
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    def attention(self, name, x):
        heads = self.config["n_head"]
        q, k, v = self.linear(f"{name}.Wqkv", x).reshape(len(x), 3, heads, -1).swapaxes(0, 1)
        q, k = self.rotated(q), self.rotated(k)
        scores = np.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1])
        seen = np.einsum("hqk,khd->qhd", softmax(scores), v)
        return self.linear(f"{name}.out_proj", seen.reshape(len(x), -1))

    def experts(self, name, x):
        """The sum of two experts by their probabilities, and the smallest gap of a choice."""
        shares = softmax(x @ self.w[f"{name}.router.layer.weight"].T)
        order = np.argsort(-shares, axis=-1)
        ranked = np.take_along_axis(shares, order, -1)
        top = self.config["moe_top_k"]
        w1, w2 = (
            self.w[f"{name}.experts.mlp.{w}"].reshape(self.config["num_experts"], -1, x.shape[-1])
            for w in ("w1", "w2"))
        out = np.zeros_like(x)
        for token, chosen in enumerate(order[:, :top]):
            for expert in chosen:
                inner = gelu(w1[expert] @ x[token])
                out[token] += shares[token, expert] * (inner @ w2[expert])
        gap = float((ranked[:, :top] - ranked[:, 1 : top + 1]).min())
        return out + self.w[f"{name}.experts.bias"], gap

    def __call__(self, ids):
        config, margin = self.config, 1.0
        x = self.w["embeddings.word_embeddings.weight"][ids]
        x = self.norm("emb_ln", x + self.w["embeddings.token_type_embeddings.weight"][0])
        for layer in range(config["n_layer"]):
            name = f"encoder.layers.{layer}"
            x = self.norm(f"{name}.norm1", x + self.attention(f"{name}.attn", x))
            if layer % config["moe_every_n_layers"] == 1:
                y, gap = self.experts(f"{name}.mlp", x)
                margin = min(margin, gap)
            else:
                y = self.linear(f"{name}.mlp.fc2", gelu(self.linear(f"{name}.mlp.fc1", x)))
            x = self.norm(f"{name}.norm2", x + y)
        return x, margin


def softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def gelu(x):
    return x * (1.0 + np.vectorize(math.erf)(x / math.sqrt(2.0))) / 2.0


def bfloat16(x):
    """The float32 whose lower half is zeros, towards zero."""
    return (x.astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)


def save(path, tensors):
    """safetensors: the header's length, the header as JSON, the bytes."""
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, tensor in tensors.items():
        end = at + 2 * tensor.size
        header[name] = {"dtype": "BF16", "shape": tensor.shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    halves = [(tensor.view(np.uint32) >> 16).astype(np.uint16) for tensor in tensors.values()]
    blobs = b"".join(half.tobytes() for half in halves)
    path.write_bytes(len(text).to_bytes(8, "little") + text + blobs)


def pieces():
    return [(text, 0.0) for text in SPECIALS] + PIECES


def added(content):
    return {
        "content": content, "lstrip": False, "normalized": False, "rstrip": False,
        "single_word": False, "special": True}


def write_tokenizer(folder):
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    begin, end = ({"SpecialToken": {"id": text, "type_id": 0}} for text in ("<s>", "</s>"))
    single = [begin, {"Sequence": {"id": "A", "type_id": 0}}, end]
    write_json(folder / "tokenizer.json", {
        "version": "1.0",
        "added_tokens": [{"id": i} | added(text) for i, text in enumerate(SPECIALS)],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, metaspace]},
        "post_processor": {
            "type": "TemplateProcessing", "single": single, "pair": single,
            "special_tokens": {
                text: {"id": text, "ids": [i], "tokens": [text]}
                for i, text in enumerate(SPECIALS) if text in ("<s>", "</s>")}},
        "decoder": metaspace,
        "model": {"type": "Unigram", "unk_id": UNK, "vocab": [list(p) for p in pieces()]},
    })
    write_json(folder / "tokenizer_config.json", {
        "added_tokens_decoder": {str(i): added(text) for i, text in enumerate(SPECIALS)},
        "bos_token": "<s>", "cls_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>",
        "sep_token": "</s>", "unk_token": "<unk>", "model_max_length": 512,
        "tokenizer_class": "XLMRobertaTokenizer",
    })


def encode(text):
    """The likeliest pieces of a text, which unknown letters make unlikely."""
    words = "".join("▁" + word for word in text.split())
    known = {piece: (i, score) for i, (piece, score) in enumerate(pieces()) if i >= len(SPECIALS)}
    worst = min(score for _, score in PIECES) - 10.0
    best = [(0.0, [])] + [None] * len(words)
    for end in range(1, len(words) + 1):
        for start in range(end):
            piece = words[start:end]
            if piece in known:
                i, score = known[piece]
            elif end - start == 1:
                i, score = UNK, worst
            else:
                continue
            total = best[start][0] + score
            if best[end] is None or total > best[end][0]:
                best[end] = total, best[start][1] + [i]
    ids = [BOS]
    for i in best[-1][1]:
        # Unknown letters side by side are one token.
        if i != UNK or ids[-1] != UNK:
            ids.append(i)
    return ids + [EOS]


def write_json(path, value):
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(__file__).parent)
    folder = parser.parse_args().out / "nomic_bert_moe"
    out = folder / "expect"
    out.mkdir(parents=True, exist_ok=True)
    rng = np.random.Generator(np.random.PCG64(SEED))
    tensors = {name: bfloat16(draw(rng, name, shape)) for name, shape in shapes(CONFIG).items()}
    write_json(folder / "config.json", CONFIG)
    save(folder / "model.safetensors", tensors)
    write_tokenizer(folder)
    write_json(out / "text.json", [{"text": text, "ids": encode(text)} for text in TEXTS])
    reference = Reference(CONFIG, tensors)
    for prompt, length in PROMPTS.items():
        for draws in range(MAX_DRAWS):
            ids = rng.integers(len(SPECIALS), len(pieces()), size=length)
            outputs, margin = reference(ids)
            if margin >= EXPERT_MARGIN:
                break
        else:
            raise SystemExit(f"{length} tokens: every draw came near a tie")
        (out / f"{prompt}.tokens.json").write_text(json.dumps(ids.tolist()) + "\n")
        np.save(out / f"{prompt}.outputs.npy", outputs.astype(np.float32))
        print(f"{prompt}: {draws + 1} draws, margin {margin:.6f}")


if __name__ == "__main__":
    main()
