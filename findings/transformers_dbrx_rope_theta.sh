#!/usr/bin/env bash
# DbrxConfig does not take RoPE's base from attn_config, where DBRX's config.json has it: transformers 5.24.0, 2026-11-28
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.15.0 transformers==5.24.0
"$folder/venv/bin/python" - <<'PYTHON'
import torch
import transformers
from transformers import DbrxConfig, DbrxForCausalLM

transformers.logging.set_verbosity_error()
print("transformers", transformers.__version__)


def logits(theta):
    config = DbrxConfig(
        d_model=64, n_heads=4, n_layers=1, max_seq_len=128, vocab_size=64,
        attn_config=dict(kv_n_heads=2, clip_qkv=8.0, rope_theta=theta),
        ffn_config=dict(ffn_hidden_size=32, moe_num_experts=4, moe_top_k=2))
    print("attn_config.rope_theta", theta, "gives rope_parameters", config.rope_parameters)
    torch.manual_seed(0)
    model = DbrxForCausalLM(config).eval()
    with torch.no_grad():
        return model(torch.arange(48)[None]).logits


same = logits(10000.0).equal(logits(500000.0))
print("the logits of 48 tokens are the same:", same)
assert same, "the behaviour changed"
PYTHON
