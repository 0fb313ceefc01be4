#!/usr/bin/env python3
"""Train the demo model (or its Mixtral-shaped sibling) on CPU cores.

    python train.py --preset qwen3moe --data DATA_DIR --out RUN_DIR --minutes 95 \
        --export MODEL_DIR [--until HH:MM] [--resume]

One process a core, one thread each: threads inside a product wait for each other whenever another
program takes a core, processes wait once a step. Weights and gradients are bfloat16 in memory
shared by the processes; the optimiser's float32 masters are shared too, and each process updates
its own part of the parameters.

The schedule runs on time: progress = training time / budget, a stopped or starved step counting
for at most three median steps. With --steps it runs on steps instead; then the same machine, the
same --workers and the same library versions repeat a run bit for bit, which --minutes cannot.
"""
import argparse
import datetime
import json
import os
import signal
import statistics
import sys
import time

import numpy as np
import torch
import torch.multiprocessing as mp

import model as net

LR_MUON, LR_ADAM, LR_ROUTER = 0.02, 4e-3, 1.5e-3
WARMUP, DECAY_FROM, CHAT_FROM, CHAT_SHARE = 0.01, 0.65, 0.80, 0.22
PROMPTS = ["Debian is", "# Creating a New Layer\n\n", "To install a package, you",
           "The git repository",
           "<|im_start|>user\nWhat is a partition?<|im_end|>\n<|im_start|>assistant\n"]


def is_matrix(name):
    return name.split("_", 1)[-1] in ("qkv", "out", "gate_up", "down")


class Shared:
    """Everything the processes have in common."""

    def __init__(self, config, workers, seed):
        torch.manual_seed(seed)
        first = net.Model(config)
        self.names = list(first.p.keys())
        self.shapes = {n: first.p[n].shape for n in self.names}
        total = sum(s.numel() for s in self.shapes.values())
        self.master = torch.zeros(total).share_memory_()
        self.momentum = torch.zeros(total).share_memory_()
        self.second = torch.zeros(sum(self.shapes[n].numel() for n in self.names
                                      if not is_matrix(n))).share_memory_()
        self.weight = torch.zeros(total, dtype=torch.bfloat16).share_memory_()
        self.grads = [torch.zeros(total, dtype=torch.bfloat16).share_memory_()
                      for _ in range(workers)]
        self.stats = torch.zeros(workers, 2).share_memory_()
        self.counts = torch.zeros(workers, config.layers, config.experts,
                                  dtype=torch.long).share_memory_()
        # for the next step: its number, learning-rate factor, chat rows or not, stop or not
        self.plan = torch.zeros(4, dtype=torch.float64).share_memory_()
        for name, view in self.views(self.master).items():
            view.copy_(first.p[name].detach())
        self.weight.copy_(self.master)

    def views(self, flat):
        out, at = {}, 0
        for name in self.names:
            size = self.shapes[name].numel()
            out[name] = flat[at:at + size].view(self.shapes[name])
            at += size
        return out


def shared_model(shared, config, rank):
    """A model whose parameters are the shared weights and whose gradients are shared as well."""
    net_model = net.Model.__new__(net.Model)
    torch.nn.Module.__init__(net_model)
    with torch.device("meta"):
        blank = net.Model(config)
    net_model.config, net_model.qkv_rows = config, blank.qkv_rows
    angle = torch.arange(config.max_positions)[:, None] / config.rope_theta ** (
        torch.arange(0, config.head_dim, 2) / config.head_dim)
    net_model.cos, net_model.sin = angle.cos()[:, None, :], angle.sin()[:, None, :]
    weight, grad = shared.views(shared.weight), shared.views(shared.grads[rank])
    net_model.p = torch.nn.ParameterDict()
    for name in shared.names:
        parameter = torch.nn.Parameter(weight[name])
        parameter.grad = grad[name]
        net_model.p[name] = parameter
    return net_model


class Stream:
    """The token file cut into one lane per row of a step, every lane read from its start.

    Row r of step s is thus a fixed place: the order depends on nothing else, and the rows of
    one step come from documents far apart.
    """

    def __init__(self, path, lanes, length):
        self.tokens = np.memmap(path, np.uint16, "r")
        self.lane = (len(self.tokens) - 1) // lanes // length * length
        self.length = length

    def rows(self, step, first, count):
        out = np.empty((count, self.length + 1), np.int64)
        for i in range(count):
            at = (first + i) * self.lane + step * self.length % self.lane
            out[i] = self.tokens[at:at + self.length + 1]
        return torch.from_numpy(out)


def orthogonal(g):
    """Newton-Schulz iterations towards the nearest orthogonal matrix, a batch at a time."""
    x = g.bfloat16()
    flip = x.shape[-2] > x.shape[-1]
    if flip:
        x = x.transpose(-2, -1).contiguous()
    x = x / (x.float().norm(dim=(-2, -1), keepdim=True) * 1.02 + 1e-7).bfloat16()
    for a, b, c in [(3.4445, -4.7750, 2.0315)] * 5:
        s = torch.bmm(x, x.transpose(1, 2))
        x = torch.baddbmm(x, torch.baddbmm(s, s, s, beta=b, alpha=c), x, beta=a)
    return x.transpose(-2, -1) if flip else x


def gather_direction(grads, momentum, mu, scale):
    """Mean gradient into the momentum, and Nesterov's look-ahead; the gradients end up zero."""
    g = grads[0].float()
    for other in grads[1:]:
        g = g + other.float()
    g = g * scale
    m = momentum * mu + g * (1 - mu)
    momentum.copy_(m)
    for grad in grads:
        grad.zero_()
    return (m * mu + g * (1 - mu)).bfloat16()


def apply_direction(master, weight, direction, keep, rate):
    value = master * keep - direction.float() * rate
    master.copy_(value)
    weight.copy_(value.bfloat16())


FUSED = {"gather": gather_direction, "apply": apply_direction}


def muon_parts(name, tensor, config):
    """The matrices that act separately: q, k, v; each expert's gate and up."""
    kind = name.split("_", 1)[-1]
    if kind == "qkv":
        d = config.head_dim
        return tensor.split([config.heads * d, config.kv_heads * d, config.kv_heads * d])
    if kind == "gate_up":
        return [tensor[:, :config.expert_size], tensor[:, config.expert_size:]]
    return [tensor]


def update(shared, config, rank, workers, step, rate):
    """This process's share of the optimiser step; every parameter belongs to one process."""
    master, momentum, weight = (shared.views(f) for f in (shared.master, shared.momentum,
                                                          shared.weight))
    grads = [shared.views(g) for g in shared.grads]
    at, load = 0, [0] * workers
    for name in shared.names:
        owner = load.index(min(load))
        size = shared.shapes[name].numel()
        load[owner] += size
        second_at = at
        if not is_matrix(name):
            at += size
        if owner != rank:
            continue
        if is_matrix(name):
            mu = torch.tensor(0.85 + 0.10 * min(1.0, step / 200))
            direction = FUSED["gather"]([g[name] for g in grads], momentum[name], mu,
                                        torch.tensor(1 / workers))
            turned = torch.empty_like(direction)
            for d, o in zip(muon_parts(name, direction, config),
                            muon_parts(name, turned, config)):
                d3 = d if d.dim() == 3 else d[None]
                scale = max(1.0, d3.shape[1] / d3.shape[2]) ** 0.5
                torch.mul(orthogonal(d3).view(o.shape), scale, out=o)
            FUSED["apply"](master[name], weight[name], turned,
                           torch.tensor(1 - 0.02 * LR_MUON * rate), torch.tensor(LR_MUON * rate))
        else:
            g = sum(other[name].float() for other in grads) / workers
            second = shared.second[second_at:second_at + size].view(shared.shapes[name])
            momentum[name].lerp_(g, 0.1)
            second.lerp_(g * g, 0.05)
            lr = (LR_ROUTER if name.endswith("router") else LR_ADAM) * rate
            hat = (second / (1 - 0.95 ** (step + 1))).sqrt_().add_(1e-10)
            master[name].sub_(momentum[name] / (1 - 0.9 ** (step + 1)) / hat, alpha=lr)
            weight[name].copy_(master[name])
            for other in grads:
                other[name].zero_()


def worker(rank, workers, shared, config, options, barrier):
    torch.set_num_threads(1)
    if not options.eager:
        net.compile_kernels()
        for name in FUSED:
            FUSED[name] = torch.compile(FUSED[name], dynamic=False)
    model = shared_model(shared, config, rank)
    length = options.length
    rows = options.batch // length // workers
    chat_rows = max(1, round(rows * CHAT_SHARE))
    main_text = Stream(os.path.join(options.data, "main.bin"), rows * workers, length)
    chat_text = Stream(os.path.join(options.data, "chat.bin"), chat_rows * workers, length)
    while True:
        barrier.wait()
        step, rate, chat, command = shared.plan.tolist()
        step = int(step)
        if command:
            return
        batch = main_text.rows(step, rank * rows, rows)
        if chat:
            batch[:chat_rows] = chat_text.rows(step, rank * chat_rows, chat_rows)
        counts = torch.zeros(config.layers, config.experts, dtype=torch.long)
        loss, balance = model.loss(batch[:, :-1].contiguous(), batch[:, 1:].contiguous(), counts)
        (loss + config.aux_coef * balance).backward()
        shared.stats[rank, 0], shared.stats[rank, 1] = loss.detach(), balance.detach()
        shared.counts[rank] += counts
        barrier.wait()
        update(shared, config, rank, workers, step, rate)
        barrier.wait()


@torch.no_grad()
def held_out(model, data, length, limit=None):
    """Loss per token, bits per byte and expert loads per kind, on documents never trained on."""
    with open(os.path.join(data, "meta.json"), encoding="utf-8") as handle:
        meta = json.load(handle)
    result, loads = {}, {}
    for kind in ("prose", "reference", "code"):
        tokens = np.fromfile(os.path.join(data, f"heldout_{kind}.bin"), np.uint16)
        tokens = tokens[:limit]
        counts = torch.zeros(model.config.layers, model.config.experts, dtype=torch.long)
        usable = (len(tokens) - 1) // length * length
        x = torch.from_numpy(tokens[:usable].astype(np.int64)).view(-1, length)
        y = torch.from_numpy(tokens[1:usable + 1].astype(np.int64)).view(-1, length)
        total, n = 0.0, max(1, 2048 // length)
        for a in range(0, len(x), n):
            loss, _ = model.loss(x[a:a + n], y[a:a + n], counts)
            total += loss.item() * x[a:a + n].numel()
        per_token = total / usable
        size = meta[f"heldout_{kind}"]
        bits = per_token / np.log(2) * size["tokens"] / size["bytes"]
        result[kind] = {"loss": round(per_token, 4), "bits_per_byte": round(float(bits), 4),
                        "tokens": usable}
        loads[kind] = counts
    return result, loads


@torch.no_grad()
def sample(model, tokenizer, count, seed=1, temperature=0.7, top_p=0.9):
    generator, out = torch.Generator().manual_seed(seed), []
    for prompt in PROMPTS:
        ids = tokenizer.encode(prompt).ids
        start = len(ids)
        for _ in range(count):
            logits = model.logits(torch.tensor([ids[-256:]]))[0, -1] / temperature
            p, order = torch.softmax(logits, -1).sort(descending=True)
            p[p.cumsum(0) - p > top_p] = 0
            ids.append(int(order[torch.multinomial(p, 1, generator=generator)]))
            if ids[-1] in (0, 2):
                break
        text = tokenizer.decode(ids[start:], skip_special_tokens=False)
        out.append(prompt + "⟨" + text + "⟩")
    return out


def save(path, shared, state):
    torch.save({"master": shared.master, "momentum": shared.momentum, "second": shared.second,
                "state": state}, path + ".part")
    if os.path.exists(path):
        os.replace(path, path + ".previous")
    os.replace(path + ".part", path)


def seconds_until(text):
    hour, minute = map(int, text.split(":"))
    now = datetime.datetime.now(datetime.timezone.utc)
    goal = now.replace(hour=hour, minute=minute, second=0, microsecond=0)
    if goal < now - datetime.timedelta(hours=12):
        goal += datetime.timedelta(days=1)
    return (goal - now).total_seconds()


def rate_at(progress, step):
    warm = min(1.0, (step + 1) / 40)
    return warm * (1.0 if progress < DECAY_FROM else
                   max(0.0, 1 - (progress - DECAY_FROM) / (1 - DECAY_FROM)) * 0.98 + 0.02)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--preset", choices=sorted(net.PRESETS), default="qwen3moe")
    parser.add_argument("--data", required=True, help="folder written by data.py")
    parser.add_argument("--out", required=True)
    parser.add_argument("--export", required=True, help="the model folder, refreshed as we go")
    parser.add_argument("--minutes", type=float, default=95)
    parser.add_argument("--until", help="UTC hour:minute by which training must have ended")
    parser.add_argument("--steps", type=int, help="a fixed number of steps: repeatable")
    parser.add_argument("--batch", type=int, default=8192, help="tokens a step")
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--eager", action="store_true", help="no torch.compile")
    parser.add_argument("--held-out-tokens", type=int, help="a kind, at the end; all if absent")
    parser.add_argument("--checkpoint-minutes", type=float, default=9)
    options = parser.parse_args()
    os.makedirs(options.out, exist_ok=True)
    config = net.PRESETS[options.preset]
    shared = Shared(config, options.workers, options.seed)
    checkpoint = os.path.join(options.out, "checkpoint.pt")
    state = {"step": 0, "elapsed": 0.0, "tokens": 0, "busy": 0.0}
    if options.resume and os.path.exists(checkpoint):
        saved = torch.load(checkpoint)
        for name in ("master", "momentum", "second"):
            getattr(shared, name).copy_(saved[name])
        shared.weight.copy_(shared.master)
        state = saved["state"]
    from tokenizers import Tokenizer
    tokenizer = Tokenizer.from_file(os.path.join(options.data, "tokenizer.json"))
    torch.set_num_threads(1)
    # large buffers come back every step: let the allocator keep them instead of paging in new ones
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", "2000000000")
    os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", "8000000000")
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "4096")
    # an exit through Python also ends the worker processes
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    context = mp.get_context("spawn")
    barrier = context.Barrier(options.workers + 1)
    processes = [context.Process(target=worker, daemon=True, args=(
        r, options.workers, shared, config, options, barrier)) for r in range(options.workers)]
    for process in processes:
        process.start()
    model = shared_model(shared, config, 0)
    log = open(os.path.join(options.out, "log.txt"), "a", encoding="utf-8")

    def say(*parts):
        print(*parts, file=log, flush=True)
        print(*parts, flush=True)

    say("parameters", shared.master.numel(), "options", vars(options))
    durations, recent, last_save = [], [], time.monotonic()
    while True:
        if options.steps:
            progress = state["step"] / options.steps
        else:
            left = options.minutes * 60 - state["elapsed"]
            if options.until:
                left = min(left, seconds_until(options.until))
            progress = state["elapsed"] / max(state["elapsed"] + max(left, 0), 1e-9)
        done = progress >= 1
        shared.plan.copy_(torch.tensor([
            state["step"], rate_at(progress, state["step"]),
            float(progress >= CHAT_FROM), float(done)], dtype=torch.float64))
        began = time.monotonic()
        barrier.wait()
        if done:
            break
        barrier.wait()
        barrier.wait()
        taken = time.monotonic() - began
        if state["step"] == 0 or len(durations) < 1:
            durations.append(min(taken, 10.0))  # the first step compiles
        else:
            durations = (durations + [taken])[-200:]
        state["elapsed"] += min(taken, 3 * statistics.median(durations))
        state["busy"] += taken
        state["step"] += 1
        state["tokens"] += options.batch
        recent.append(shared.stats.mean(0).tolist())
        if not all(np.isfinite(recent[-1])):
            say("loss is not finite; stopping before it reaches a checkpoint")
            sys.exit(1)
        if state["step"] % 20 == 0:
            mean = np.mean(recent, 0)
            recent.clear()
            spread = shared.counts.sum(0).float()
            worst = (spread.amax(1) / spread.mean(1)).max().item()
            shared.counts.zero_()
            say(f"step {state['step']} tokens {state['tokens']} loss {mean[0]:.4f} balance "
                f"{mean[1]:.3f} worst max/mean {worst:.2f} progress {progress:.4f} rate "
                f"{rate_at(progress, state['step']):.3f} tok/s "
                f"{options.batch / np.mean(durations[-20:]):.0f} "
                f"{datetime.datetime.now(datetime.timezone.utc):%H:%M:%S}")
        if time.monotonic() - last_save > 60 * options.checkpoint_minutes:
            save(checkpoint, shared, state)
            net.export(model, options.data, options.export)
            figures, _ = held_out(model, options.data, options.length, 6144)
            say("held out (first 6k tokens of each kind)", json.dumps(figures))
            for text in sample(model, tokenizer, 32):
                say("sample", repr(text))
            last_save = time.monotonic()
    save(checkpoint, shared, state)
    net.export(model, options.data, options.export)
    figures, loads = held_out(model, options.data, options.length, options.held_out_tokens)
    for kind, load in loads.items():
        load = load.float()
        figures[kind]["max_over_mean"] = [round(v, 2) for v in
                                          (load.amax(1) / load.mean(1)).tolist()]
    state["tokens_per_second"] = state["tokens"] / max(state["busy"], 1e-9)
    report = {"state": state, "held_out": figures, "samples": sample(model, tokenizer, 120)}
    with open(os.path.join(options.out, "report.json"), "w", encoding="utf-8") as out:
        json.dump(report, out, indent=1, ensure_ascii=False)
    say(json.dumps(report, ensure_ascii=False))
    for process in processes:
        process.join(10)


if __name__ == "__main__":
    main()
