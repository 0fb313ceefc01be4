"""A pre-norm decoder in plain torch, for models whose code transformers does not have.

A family gives the layers; what most of them share is here. Written from the papers and the
released configurations, and compared with llama.cpp on the same checkpoints.
"""

import numpy as np
import torch
from safetensors.torch import load_file
from torch.nn import functional

from checkpoint import Run
from routing import rank


def rms_norm(x, weight, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rotate(x, theta):
    """Rotary embedding of `[heads, tokens, dim]` with the halves of a head paired."""
    tokens, dim = x.shape[1:]
    frequencies = theta ** (-torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    angles = torch.arange(tokens, dtype=torch.float32)[:, None] * frequencies
    a, b = x.chunk(2, dim=-1)
    sin, cos = angles.sin(), angles.cos()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def swiglu(x, gate, up, down):
    return functional.linear(
        functional.silu(functional.linear(x, gate)) * functional.linear(x, up), down)


class Weights:
    """The tensors under one prefix."""

    def __init__(self, tensors, prefix=""):
        self.tensors, self.prefix = tensors, prefix

    def __getitem__(self, name):
        return self.tensors[f"{self.prefix}{name}.weight"]

    def under(self, prefix):
        return Weights(self.tensors, f"{self.prefix}{prefix}.")

    def mlp(self, x, names=("gate_proj", "up_proj", "down_proj")):
        return swiglu(x, *(self[n] for n in names))


class Decoder:
    """Calling it with ids gives a Run; `layer` is the family's."""

    def __init__(self, folder, config):
        tensors = load_file(folder / "model.safetensors")
        self.weights = Weights({k: v.to(torch.float32) for k, v in tensors.items()})
        self.config = config
        self.eps = config["rms_norm_eps"]

    def attention(self, weights, x):
        heads, kv, hidden = (self.config[k] for k in (
            "num_attention_heads", "num_key_value_heads", "hidden_size"))
        theta, dim = self.config["rope_theta"], hidden // heads

        def project(name, count):
            return functional.linear(x, weights[name]).view(len(x), count, dim).transpose(0, 1)

        q, k = rotate(project("q_proj", heads), theta), rotate(project("k_proj", kv), theta)
        k, v = (t.repeat_interleave(heads // kv, 0) for t in (k, project("v_proj", kv)))
        scores = q @ k.transpose(1, 2) / dim**0.5
        later = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        mixed = torch.softmax(scores.masked_fill(later, -torch.inf), dim=-1) @ v
        return functional.linear(mixed.transpose(0, 1).reshape(len(x), hidden), weights["o_proj"])

    def experts(self, layer, x, router, expert, renormalise):
        """The chosen experts' sum; `expert(number, rows)` computes one of them."""
        k = self.config["num_experts_per_tok"]
        probabilities = torch.softmax(functional.linear(x, router), dim=-1)
        self.chosen[layer], gap = rank(probabilities, k)
        self.margin = min(self.margin, gap)
        chosen = torch.from_numpy(self.chosen[layer])
        shares = probabilities.gather(1, chosen)
        if renormalise:
            shares = shares / shares.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for number in chosen.unique().tolist():
            row, place = torch.where(chosen == number)
            out[row] += expert(number, x[row]) * shares[row, place, None]
        return out

    def __call__(self, ids):
        layers = self.config["num_hidden_layers"]
        self.chosen, self.margin = {}, float("inf")
        x = self.weights["model.embed_tokens"][torch.tensor(ids)]
        for number in range(layers):
            x = self.layer(number, self.weights.under(f"model.layers.{number}"), x)
        x = rms_norm(x, self.weights["model.norm"], self.eps)
        logits = functional.linear(x, self.weights["lm_head"])
        experts = np.full(
            (layers, len(ids), self.config["num_experts_per_tok"]), -1, dtype=np.int32)
        for number, chosen in self.chosen.items():
            experts[number] = chosen
        return Run(logits.numpy(), experts, self.margin)
