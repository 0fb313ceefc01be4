"""A small sparse decoder in the Qwen3-MoE or Mixtral arrangement, written for two CPU cores.

The arithmetic is that of transformers' Qwen3MoeForCausalLM and MixtralForCausalLM (`check.py`
compares the logits); only the storage differs, so that each layer needs few, large products:
query, key and value are one matrix, gate and up projections of all experts one tensor.
"""
import json
import math
import os
from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass
class Config:
    kind: str = "qwen3_moe"
    vocab: int = 8192
    layers: int = 12
    hidden: int = 256
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    experts: int = 32
    top_k: int = 4
    expert_size: int = 128
    qk_norm: bool = True
    rope_theta: float = 10000.0
    max_positions: int = 2048
    eps: float = 1e-6
    aux_coef: float = 0.01


PRESETS = {
    "qwen3moe": Config(),
    "mixtral": Config(kind="mixtral", experts=8, top_k=2, expert_size=256, qk_norm=False,
                      eps=1e-5),
}


def gated(h):
    gate, up = h.chunk(2, -1)
    return F.silu(gate) * up


def gated_weighted(h, weight):
    return gated(h.float()).mul(weight[:, None]).bfloat16()


def gated_backward(h, grad, weight):
    """Gradients of silu(gate) * up * weight: for h, for weight, and the value itself again."""
    gate, up = h.float().chunk(2, -1)
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    grad = grad.float()
    grad_weight = (grad * silu * up).sum(-1)
    scaled = grad * weight[:, None]
    grad_gate = scaled * up * (sigmoid + silu * (1 - sigmoid))
    grad_h = torch.cat([grad_gate, scaled * silu], -1)
    return grad_h.bfloat16(), grad_weight, (silu * up * weight[:, None]).bfloat16()


def gather_sum(rows, slot):
    return rows[slot].float().sum(1).bfloat16()


# Segment lengths are rounded up to this: oneDNN builds a kernel for each new product shape, which
# takes milliseconds, so only a few dozen shapes may occur.
BLOCK = 64


def segments(counts):
    """Padded start of each expert's segment, and the (expert, start, end) products to run."""
    starts, pieces, at = [], [], 0
    for expert, count in enumerate(counts):
        starts.append(at)
        end = at + -(-count // BLOCK) * BLOCK
        if end > at:
            pieces.append((expert, at, end))
        at = end
    return starts, pieces


class ExpertMix(torch.autograd.Function):
    """Every token through its chosen experts: tokens sorted by expert, no token dropped.

    Rows that pad a segment repeat token 0 with weight 0, which makes all their gradients zero.
    """

    @staticmethod
    def forward(ctx, x, chosen, weight, gate_up, down):
        tokens, k = chosen.shape
        experts = gate_up.shape[0]
        flat = chosen.reshape(-1)
        counts = torch.bincount(flat, minlength=experts)
        starts, pieces = segments(counts.tolist())
        order = torch.argsort(flat, stable=True)
        shift = torch.tensor(starts) - (counts.cumsum(0) - counts)
        slot = torch.empty_like(order)  # where each (token, choice) lies among the sorted rows
        slot[order] = torch.arange(order.numel()) + shift[flat[order]]
        rows = tokens * k + experts * BLOCK
        token = torch.zeros(rows, dtype=torch.long)
        token[slot] = torch.arange(order.numel()) // k
        ws = torch.zeros(rows)
        ws[slot] = weight.reshape(-1).float()
        xs = x.index_select(0, token)
        h = x.new_empty(rows, gate_up.shape[1])
        for e, a, b in pieces:
            torch.mm(xs[a:b], gate_up[e].t(), out=h[a:b])
        h[pieces[-1][2]:].zero_()
        act = KERNELS["gated_weighted"](h, ws)
        ys = torch.empty_like(xs)
        for e, a, b in pieces:
            torch.mm(act[a:b], down[e].t(), out=ys[a:b])
        ctx.save_for_backward(xs, h, ws, gate_up, down, token, slot)
        ctx.pieces, ctx.k = pieces, k
        return KERNELS["gather_sum"](ys, slot.view(-1, k))

    @staticmethod
    def backward(ctx, grad):
        xs, h, ws, gate_up, down, token, slot = ctx.saved_tensors
        gs = grad.index_select(0, token)
        grad_act = gs.new_empty(len(gs), down.shape[2])
        for e, a, b in ctx.pieces:
            torch.mm(gs[a:b], down[e], out=grad_act[a:b])
        grad_act[ctx.pieces[-1][2]:].zero_()
        grad_h, grad_w, act = KERNELS["gated_backward"](h, grad_act, ws)
        grad_gate_up, grad_down = torch.zeros_like(gate_up), torch.zeros_like(down)
        gxs = torch.empty_like(xs)
        for e, a, b in ctx.pieces:
            torch.mm(gs[a:b].t(), act[a:b], out=grad_down[e])
            torch.mm(grad_h[a:b].t(), xs[a:b], out=grad_gate_up[e])
            torch.mm(grad_h[a:b], gate_up[e], out=gxs[a:b])
        grad_x = KERNELS["gather_sum"](gxs, slot.view(-1, ctx.k))
        grad_weight = grad_w[slot].view(-1, ctx.k)
        return grad_x, None, grad_weight, grad_gate_up, grad_down


def causal_softmax(scores, scale: float):
    length = scores.shape[-1]
    at = torch.arange(length)
    scores = torch.where(at[None, :] <= at[:, None], scores.float() * scale, -1e30)
    exp = torch.exp(scores - scores.amax(-1, keepdim=True))
    return (exp / exp.sum(-1, keepdim=True)).bfloat16()


def softmax_backward(p, grad, scale: float):
    p, grad = p.float(), grad.float()
    return (p * (grad - (p * grad).sum(-1, keepdim=True)) * scale).bfloat16()


class Attention(torch.autograd.Function):
    """Causal attention with the scores kept: measured faster here than the flash kernel,
    whose bfloat16 backward pass does not use the matrix unit."""

    @staticmethod
    def forward(ctx, q, k, v):
        ctx.scale = q.shape[-1] ** -0.5
        p = KERNELS["causal_softmax"](torch.bmm(q, k.transpose(1, 2)), ctx.scale)
        ctx.save_for_backward(q, k, v, p)
        return torch.bmm(p, v)

    @staticmethod
    def backward(ctx, grad):
        q, k, v, p = ctx.saved_tensors
        grad = grad.contiguous()
        grad_v = torch.bmm(p.transpose(1, 2), grad)
        grad_s = KERNELS["softmax_backward"](p, torch.bmm(grad, v.transpose(1, 2)), ctx.scale)
        return torch.bmm(grad_s, k), torch.bmm(grad_s.transpose(1, 2), q), grad_v


class ChunkedLoss(torch.autograd.Function):
    """Mean cross-entropy of x @ w.T, a slice of tokens at a time, gradients made on the way."""

    @staticmethod
    def forward(ctx, x, w, target, chunk=2048):
        total = x.new_zeros((), dtype=torch.float32)
        grad_x = torch.empty_like(x)
        grad_w = torch.zeros(w.shape, dtype=torch.float32)
        for a in range(0, len(x), chunk):
            part, goal = x[a:a + chunk], target[a:a + chunk]
            logits = part @ w.t()
            loss, grad = KERNELS["loss_and_grad"](logits, goal, 1.0 / len(x))
            total += loss
            torch.mm(grad, w, out=grad_x[a:a + chunk])
            grad_w += grad.t() @ part
        ctx.save_for_backward(grad_x, grad_w.bfloat16())
        return total

    @staticmethod
    def backward(ctx, grad):
        grad_x, grad_w = ctx.saved_tensors
        return grad_x, grad_w, None, None


def loss_and_grad(logits, goal, scale: float):
    logits = logits.float()
    top = logits.amax(-1, keepdim=True)
    exp = torch.exp(logits - top)
    total = exp.sum(-1, keepdim=True)
    picked = logits.gather(1, goal[:, None])
    loss = (total.log() + top - picked).sum() * scale
    hot = torch.arange(logits.shape[-1])[None, :] == goal[:, None]
    grad = ((exp / total - hot.float()) * scale).bfloat16()
    return loss, grad


def rms_norm(x, weight, eps: float):
    f = x.float()
    f = f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + eps)
    return (f * weight.float()).to(x.dtype)


def rotate(x, cos, sin):
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def split_heads(qkv, q_norm, k_norm, cos, sin, heads: int, kv_heads: int, dim: int,
                norm: bool, eps: float):
    batch, length, _ = qkv.shape
    qkv = qkv.view(batch, length, heads + 2 * kv_heads, dim)
    q, k, v = qkv.split([heads, kv_heads, kv_heads], 2)
    q, k = q.float(), k.float()
    if norm:
        q, k = rms_norm(q, q_norm, eps), rms_norm(k, k_norm, eps)
    q, k = rotate(q, cos, sin).to(v.dtype), rotate(k, cos, sin).to(v.dtype)
    k = k.repeat_interleave(heads // kv_heads, 2)
    v = v.repeat_interleave(heads // kv_heads, 2)
    return [t.transpose(1, 2).reshape(batch * heads, length, dim) for t in (q, k, v)]


def route(logits, top_k: int):
    probability = torch.softmax(logits.float(), -1)
    weight, chosen = torch.topk(probability, top_k, -1)
    return probability, weight / weight.sum(-1, keepdim=True), chosen


KERNELS = {"gated_weighted": gated_weighted, "gated_backward": gated_backward,
           "loss_and_grad": loss_and_grad, "rms_norm": rms_norm, "split_heads": split_heads,
           "gather_sum": gather_sum, "route": route, "causal_softmax": causal_softmax,
           "softmax_backward": softmax_backward}


def compile_kernels():
    """Fuse the element-wise parts; the products already run at the hardware's speed."""
    for name in list(KERNELS):
        KERNELS[name] = torch.compile(KERNELS[name], dynamic=False)


class Model(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = c = config
        self.qkv_rows = (c.heads + 2 * c.kv_heads) * c.head_dim
        small = 0.02 / math.sqrt(2 * c.layers)

        def new(*shape, std=0.02):
            return torch.nn.Parameter(torch.randn(*shape) * std)

        def ones(*shape):
            return torch.nn.Parameter(torch.ones(*shape))

        p = {"embed": new(c.vocab, c.hidden), "norm": ones(c.hidden)}
        for i in range(c.layers):
            p[f"{i}_norm1"], p[f"{i}_norm2"] = ones(c.hidden), ones(c.hidden)
            p[f"{i}_qkv"] = new(self.qkv_rows, c.hidden, std=0.04)
            if c.qk_norm:
                p[f"{i}_qnorm"], p[f"{i}_knorm"] = ones(c.head_dim), ones(c.head_dim)
            p[f"{i}_out"] = new(c.hidden, c.heads * c.head_dim, std=small)
            p[f"{i}_router"] = new(c.experts, c.hidden)
            p[f"{i}_gate_up"] = new(c.experts, 2 * c.expert_size, c.hidden, std=0.04)
            p[f"{i}_down"] = new(c.experts, c.hidden, c.expert_size, std=small)
        self.p = torch.nn.ParameterDict(p)
        angle = torch.arange(c.max_positions)[:, None] / c.rope_theta ** (
            torch.arange(0, c.head_dim, 2) / c.head_dim)
        self.cos, self.sin = angle.cos()[:, None, :], angle.sin()[:, None, :]

    def hidden_states(self, ids, counts=None):
        """Final normalised hidden states and the load-balancing loss, both before weighting."""
        c, p = self.config, self.p
        batch, length = ids.shape
        cos, sin = self.cos[:length], self.sin[:length]
        norm, split = KERNELS["rms_norm"], KERNELS["split_heads"]
        x = F.embedding(ids, p["embed"])
        balance = 0.0
        for i in range(c.layers):
            y = norm(x, p[f"{i}_norm1"], c.eps)
            qn, kn = (p[f"{i}_qnorm"], p[f"{i}_knorm"]) if c.qk_norm else (None, None)
            q, k, v = split(F.linear(y, p[f"{i}_qkv"]), qn, kn, cos, sin, c.heads, c.kv_heads,
                            c.head_dim, c.qk_norm, c.eps)
            y = Attention.apply(q, k, v).view(batch, c.heads, length, c.head_dim)
            y = y.transpose(1, 2).reshape(batch, length, -1)
            x = x + F.linear(y, p[f"{i}_out"])
            y = norm(x, p[f"{i}_norm2"], c.eps).view(-1, c.hidden)
            probability, weight, chosen = KERNELS["route"](
                F.linear(y, p[f"{i}_router"]), c.top_k)
            load = torch.bincount(chosen.reshape(-1), minlength=c.experts)
            if counts is not None:
                counts[i] += load
            # transformers pools all layers before this product; per layer is the stricter form
            balance = balance + c.experts * (
                load.float() / len(y) * probability.mean(0)).sum() / c.layers
            y = ExpertMix.apply(y, chosen, weight, p[f"{i}_gate_up"], p[f"{i}_down"])
            x = x + y.view(batch, length, -1)
        return norm(x, p["norm"], c.eps), balance

    def loss(self, ids, target, counts=None):
        x, balance = self.hidden_states(ids, counts)
        loss = ChunkedLoss.apply(x.reshape(-1, x.shape[-1]), self.p["embed"], target.reshape(-1))
        return loss, balance

    def logits(self, ids):
        x, _ = self.hidden_states(ids)
        return F.linear(x, self.p["embed"]).float()


def released_tensors(model):
    """The parameters under the names and shapes of the published checkpoints."""
    c, out = model.config, {}
    p = {name: value.detach().to(torch.bfloat16) for name, value in model.p.items()}
    out["model.embed_tokens.weight"], out["model.norm.weight"] = p["embed"], p["norm"]
    sizes = [c.heads * c.head_dim, c.kv_heads * c.head_dim, c.kv_heads * c.head_dim]
    for i in range(c.layers):
        base = f"model.layers.{i}."
        out[base + "input_layernorm.weight"] = p[f"{i}_norm1"]
        out[base + "post_attention_layernorm.weight"] = p[f"{i}_norm2"]
        for letter, part in zip("qkv", p[f"{i}_qkv"].split(sizes)):
            out[f"{base}self_attn.{letter}_proj.weight"] = part
        out[base + "self_attn.o_proj.weight"] = p[f"{i}_out"]
        if c.qk_norm:
            out[base + "self_attn.q_norm.weight"] = p[f"{i}_qnorm"]
            out[base + "self_attn.k_norm.weight"] = p[f"{i}_knorm"]
        block, names = ("mlp", ("gate_proj", "up_proj", "down_proj"))
        if c.kind == "mixtral":
            block, names = ("block_sparse_moe", ("w1", "w3", "w2"))
        out[f"{base}{block}.gate.weight"] = p[f"{i}_router"]
        for e in range(c.experts):
            gate, up = p[f"{i}_gate_up"][e].chunk(2)
            for name, part in zip(names, (gate, up, p[f"{i}_down"][e])):
                out[f"{base}{block}.experts.{e}.{name}.weight"] = part
    return {name: value.contiguous().clone() for name, value in out.items()}


def released_config(c):
    common = {
        "attention_dropout": 0.0, "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 0,
        "hidden_act": "silu", "hidden_size": c.hidden, "initializer_range": 0.02,
        "max_position_embeddings": c.max_positions, "num_attention_heads": c.heads,
        "num_hidden_layers": c.layers, "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_dim, "num_experts_per_tok": c.top_k, "output_router_logits": False,
        "rms_norm_eps": c.eps, "rope_theta": c.rope_theta, "router_aux_loss_coef": c.aux_coef,
        "sliding_window": None, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        "use_cache": True, "vocab_size": c.vocab,
    }
    if c.kind == "mixtral":
        return {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral",
                "intermediate_size": c.expert_size, "num_local_experts": c.experts,
                "router_jitter_noise": 0.0, **common}
    return {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
            "attention_bias": False, "decoder_sparse_step": 1, "intermediate_size": 1024,
            "max_window_layers": c.layers, "mlp_only_layers": [],
            "moe_intermediate_size": c.expert_size, "norm_topk_prob": True,
            "num_experts": c.experts, "rope_scaling": None, "use_sliding_window": False,
            **common}


def export(model, tokenizer_dir, target):
    """Write an ordinary model folder; it appears under its final name only when complete."""
    import shutil
    from safetensors.torch import save_file
    part = target.rstrip("/") + ".part"
    shutil.rmtree(part, ignore_errors=True)
    os.makedirs(part)
    save_file(released_tensors(model), os.path.join(part, "model.safetensors"),
              metadata={"format": "pt"})
    os.chmod(os.path.join(part, "model.safetensors"), 0o644)
    with open(os.path.join(part, "config.json"), "w", encoding="utf-8") as out:
        json.dump(released_config(model.config), out, indent=2)
    with open(os.path.join(part, "generation_config.json"), "w", encoding="utf-8") as out:
        json.dump({"bos_token_id": 0, "eos_token_id": [2, 0], "pad_token_id": 0,
                   "do_sample": True, "temperature": 0.7, "top_p": 0.9,
                   "repetition_penalty": 1.1}, out, indent=2)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(os.path.join(tokenizer_dir, name), part)
    old = target.rstrip("/") + ".old"
    shutil.rmtree(old, ignore_errors=True)
    if os.path.isdir(target):
        os.rename(target, old)
    os.rename(part, target)
    shutil.rmtree(old, ignore_errors=True)
