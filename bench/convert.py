#!/usr/bin/env python3
"""Conversion of a checkpoint beside llama.cpp's convert_hf_to_gguf.py: seconds and peak memory.

    cargo build --release
    bench/convert.py LLAMA_CPP [--python PYTHON] [--layers 6] [--types bf16 f16 q8_0] [--rounds 3]

LLAMA_CPP is a source folder with convert_hf_to_gguf.py; PYTHON has torch, transformers, gguf,
safetensors and numpy. The checkpoint is random, of Qwen3-30B-A3B's shape with fewer layers, bf16 in
shards. Both programs write the file into one folder, by turns; a pass before the rounds fills the
page cache. Prints Markdown: medians of seconds, the peak of resident memory, and the median of the
rounds' ratios. The weights of both files are compared byte by byte.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MOEBA = ROOT / "target/release/moeba"
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048,
    "head_dim": 128, "num_attention_heads": 32, "num_key_value_heads": 4, "num_experts": 128,
    "num_experts_per_tok": 8, "moe_intermediate_size": 768, "intermediate_size": 6144,
    "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "hidden_act": "silu",
    "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "eos_token_id": 1, "bos_token_id": 0,
    "attention_bias": False, "use_sliding_window": False, "rope_scaling": None,
}

# Runs in PYTHON, which has the packages: argv are the folder and the number of layers.
MAKE = """
import json, sys, torch
from safetensors.torch import save_file
folder, n = sys.argv[1], int(sys.argv[2])
config = json.load(open(folder + "/config.json"))
names = ("hidden_size", "head_dim", "num_experts", "moe_intermediate_size")
h, d, e, f = (config[name] for name in names)
q, kv = config["num_attention_heads"] * d, config["num_key_value_heads"] * d
v = config["vocab_size"]
make = torch.Generator().manual_seed(7)
rand = lambda *shape: (torch.randn(shape, generator=make) * 0.02).to(torch.bfloat16)
index, shards = {}, n + 1
def shard(i, tensors):
    name = f"model-{i + 1:05}-of-{shards:05}.safetensors"
    save_file(tensors, folder + "/" + name, metadata={"format": "pt"})
    index.update({key: name for key in tensors})
shard(0, {"model.embed_tokens.weight": rand(v, h), "lm_head.weight": rand(v, h),
          "model.norm.weight": rand(h)})
for i in range(n):
    at = f"model.layers.{i}."
    tensors = {at + "input_layernorm.weight": rand(h),
        at + "post_attention_layernorm.weight": rand(h),
        at + "self_attn.q_norm.weight": rand(d), at + "self_attn.k_norm.weight": rand(d),
        at + "self_attn.q_proj.weight": rand(q, h), at + "self_attn.k_proj.weight": rand(kv, h),
        at + "self_attn.v_proj.weight": rand(kv, h), at + "self_attn.o_proj.weight": rand(h, q),
        at + "mlp.gate.weight": rand(e, h)}
    for j in range(e):
        one = f"{at}mlp.experts.{j}."
        tensors |= {one + "gate_proj.weight": rand(f, h), one + "up_proj.weight": rand(f, h),
                    one + "down_proj.weight": rand(h, f)}
    shard(i + 1, tensors)
index = {"metadata": {}, "weight_map": index}
json.dump(index, open(folder + "/model.safetensors.index.json", "w"))
"""

# Runs in PYTHON: llama.cpp's script, whose list of published tokenizers does not have this one.
RUN = """
import runpy, sys
script = sys.argv[1]
sys.argv = sys.argv[1:]
sys.path.insert(0, script.rsplit("/", 1)[0])
from conversion.base import TextModel
TextModel.get_vocab_base_pre = lambda self, tokenizer: "qwen2"
runpy.run_path(script, run_name="__main__")
"""

# Runs in PYTHON: argv are the two files.
COMPARE = """
import sys
import numpy as np
from gguf import GGUFReader
a, b = ({t.name: t for t in GGUFReader(f).tensors} for f in sys.argv[1:3])
assert a.keys() == b.keys(), a.keys() ^ b.keys()
types = {n for n in a if a[n].tensor_type != b[n].tensor_type}
view = lambda tensor: np.asarray(tensor.data).view(np.uint8)
differ = [n for n in a if n not in types and not np.array_equal(view(a[n]), view(b[n]))]
print(f"{len(a)} tensors, {len(types)} of another type, {len(differ)} of other bytes", *differ[:3])
"""


def timed(command):
    """Seconds and MiB of the largest process."""
    start = time.monotonic()
    log = tempfile.TemporaryFile()
    child = subprocess.Popen(command, stdout=log, stderr=log)
    _, status, usage = os.wait4(child.pid, 0)
    if status:
        log.seek(0)
        sys.exit(f"{command}: {log.read().decode()[-2000:]}")
    return time.monotonic() - start, usage.ru_maxrss / 1024


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("llama_cpp", type=Path)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--moeba", default=MOEBA)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--types", nargs="+", default=["bf16", "f16", "q8_0"])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work, "model")
        folder.mkdir()
        tokenizer = ROOT / "tests/golden/qwen3moe"
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (folder / name).write_bytes((tokenizer / name).read_bytes())
        vocab = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
        config = {**CONFIG, "num_hidden_layers": args.layers, "vocab_size": max(4096, len(vocab))}
        (folder / "config.json").write_text(json.dumps(config))
        subprocess.run([args.python, "-c", MAKE, folder, str(args.layers)], check=True)
        n_bytes = sum(f.stat().st_size for f in folder.glob("*.safetensors"))
        print(f"{n_bytes / 1e9:.1f} GB in bf16, {args.layers} layers, {args.rounds} rounds\n")
        print("| type | moeba, s | llama.cpp, s | times faster | moeba, MiB | llama.cpp, MiB |")
        print("|---|--:|--:|--:|--:|--:|")
        notes = []
        for kind in args.types:
            ours, theirs = Path(work, "ours.gguf"), Path(work, "theirs.gguf")
            commands = [
                [args.moeba, "convert", folder, "-o", ours, "--outtype", kind, "--force"],
                [args.python, "-c", RUN, args.llama_cpp / "convert_hf_to_gguf.py", folder,
                 "--outfile", theirs, "--outtype", kind],
            ]
            rounds = []
            for i in range(args.rounds + 1):
                theirs.unlink(missing_ok=True)
                rounds.append([timed(command) for command in commands])
            rounds = rounds[1:]
            (s, m), (t, n) = ([statistics.median(c) for c in zip(*side)] for side in zip(*rounds))
            ratio = statistics.median(b[0] / a[0] for a, b in rounds)
            print(f"| {kind} | {s:.1f} | {t:.1f} | {ratio:.1f} | {m:.0f} | {n:.0f} |", flush=True)
            same = subprocess.run([args.python, "-c", COMPARE, ours, theirs], capture_output=True,
                                  text=True)
            notes.append(f"- {kind}: {same.stdout.strip() or same.stderr.strip()[-300:]}")
        print("\n" + "\n".join(notes))


if __name__ == "__main__":
    main()
