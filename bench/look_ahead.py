#!/usr/bin/env python3
"""Times answers with and without the look-ahead of a layer that predicts the token after the next.

    cargo build --release && pip install gguf
    moeba synth deepseek-v2-lite --layers 8 -o synth.gguf
    bench/look_ahead.py synth.gguf [--moeba PATH] [--ram 25% 50%] [-n TOKENS] [--rounds N]

`moeba synth` writes no such layer, so a copy of the file gets one, whose weights are those of its
last layer and an input matrix of its own: a random one, by which what the layer foretells is wrong,
and one that passes the token's embedding on. Routers of such a file go by the token, so this one is
right: it shows the most that a look-ahead can gain. Two servers of each copy answer the same
requests in turn without drafts, one of them without the layer (`--spec off`). Prints medians of
milliseconds a token, the median ratio with its quartiles, and what was found, read and prefetched.
Answers must be equal, else it ends with 1.
"""

import argparse
import contextlib
import json
import statistics
import sys
from pathlib import Path

import gguf
import numpy as np

import serving
from serving import MOEBA

KINDS = ["wrong", "right"]
NAMES = ["hits", "partial_hits", "misses", "read_bytes", "prefetch_useful_bytes"]


def with_next_layer(path, kind):
    """A copy of a file with a layer behind the last that predicts the token after the next."""
    out = path.with_name(f"{path.stem}-{kind}.gguf")
    reader = gguf.GGUFReader(path)
    arch = reader.fields["general.architecture"].contents()
    n = reader.fields[f"{arch}.block_count"].contents()
    n_embd = reader.fields[f"{arch}.embedding_length"].contents()
    writer = gguf.GGUFWriter(out, arch)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        value = n + 1 if name == f"{arch}.block_count" else field.contents()
        sub_type = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, value, field.types[0], sub_type)
    writer.add_uint32(f"{arch}.nextn_predict_layers", 1)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    last, behind = f"blk.{n - 1}.", f"blk.{n}."
    for tensor in reader.tensors:
        if tensor.name.startswith(last):
            name = behind + tensor.name.removeprefix(last)
            writer.add_tensor(name, tensor.data, raw_dtype=tensor.tensor_type)
    if kind == "right":
        matrix = np.eye(n_embd, 2 * n_embd)
    else:
        matrix = np.random.default_rng(1).normal(0, n_embd ** -0.5, (n_embd, 2 * n_embd))
    writer.add_tensor(behind + "nextn.eh_proj.weight", matrix.astype(np.float16))
    for norm in ["enorm", "hnorm"]:
        writer.add_tensor(behind + f"nextn.{norm}.weight", np.ones(n_embd, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def answer(args, server, seed):
    body = {"prompt": "A branch is a line of work in a tree of versions.", "n_predict": args.n,
            "ignore_eos": True, "cache_prompt": False, "temperature": 1, "seed": seed,
            "spec": "off", "return_tokens": True}
    status, _, told = serving.post(server.port, "/completion", body)
    if status != 200:
        sys.exit(told.decode())
    told = json.loads(told)
    return told["tokens"], told["timings"]["predicted_ms"] / args.n


def metric(server, name):
    return serving.metric(server.port, f"moeba_expert_{name}_total", '{tier="disk"}')


def measure(args, path, kind, ram):
    """Both servers in turn; whether their answers are equal."""
    flags = ["-c", 2048, "--parallel", 1, "-t", 2, "--ram", ram, "--profile", "none"]
    times, equal = {"off": [], "auto": []}, True
    with contextlib.ExitStack() as stack:
        servers = {mode: stack.enter_context(
            serving.moeba(args.moeba, path, [*flags, "--spec", mode])) for mode in times}
        for i in range(args.rounds):
            answers = {}
            for mode in list(servers)[::1 if i % 2 == 0 else -1]:
                answers[mode], ms = answer(args, servers[mode], i)
                times[mode].append(ms)
            equal &= answers["off"] == answers["auto"]
        found = {mode: [metric(server, name) for name in NAMES]
                 for mode, server in servers.items()}
    ratios = [a / b for a, b in zip(times["auto"][1:], times["off"][1:])]
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(f"{kind:5} {ram:4} off {statistics.median(times['off'][1:]):.2f} ms a token, "
          f"look-ahead {statistics.median(times['auto'][1:]):.2f}, ratio {middle:.3f} "
          f"({low:.3f} to {high:.3f}), first answer {times['auto'][0] / times['off'][0]:.3f}; "
          f"{'equal' if equal else 'NOT EQUAL'}")
    for mode, (hits, part, misses, read, useful) in found.items():
        print(f"           {mode:4} hits {100 * hits / (hits + part + misses):.1f} %, "
              f"{read / 2**20:.0f} MiB read, {useful / 2**20:.0f} MiB prefetched and used",
              flush=True)
    return equal


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--moeba", default=MOEBA)
    parser.add_argument("--ram", nargs="+", default=["25%", "50%"])
    parser.add_argument("--kind", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("-n", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    equal = True
    for kind in args.kind:
        path = with_next_layer(args.file, kind)
        for ram in args.ram:
            equal &= measure(args, path, kind, ram)
    sys.exit(0 if equal else 1)


main()
