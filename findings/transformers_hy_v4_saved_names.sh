#!/usr/bin/env bash
# HYV4ForCausalLM saves a checkpoint under other names than it was loaded from: transformers 5.24.0, 2026-11-30
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.15.0 transformers==5.24.0
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import safetensors.torch
import torch
import transformers
from transformers import HYV4Config, HYV4ForCausalLM

transformers.logging.set_verbosity_error()
print("transformers", transformers.__version__)
config = HYV4Config(
    vocab_size=64, hidden_size=32, intermediate_size=32, moe_intermediate_size=16,
    num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, n_routed_experts=4,
    num_experts_per_tok=2, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8,
    qk_nope_head_dim=8, v_head_dim=8, index_n_heads=2, index_head_dim=16, index_topk=4,
    mlp_layer_types=["dense", "sparse"], indexer_types=["full", "shared"],
    pad_token_id=0, bos_token_id=1, eos_token_id=2)

# Names of the published model for what the class has under shorter ones.
PUBLISHED = {
    ".attn_hc.": ".hc_attn_layer.hc_pre.hc_",
    ".ffn_hc.": ".hc_mlp_layer.hc_pre.hc_",
    ".hc_head.hc_": ".hc_head.hc_head_",
    ".self_attn.sinks": ".self_attn.learnable_sink_param",
    ".self_attn.gate_proj": ".self_attn.linear_gate",
}


def published(name):
    for own, theirs in PUBLISHED.items():
        name = name.replace(own, theirs)
    return name


tensors = HYV4ForCausalLM(config).state_dict()
config.save_pretrained("given")
safetensors.torch.save_file(
    {published(name): tensor.contiguous() for name, tensor in tensors.items()},
    "given/model.safetensors", metadata={"format": "pt"})
model, info = HYV4ForCausalLM.from_pretrained("given", output_loading_info=True)
assert not info["missing_keys"] and not info["unexpected_keys"], info
same = all(tensor.equal(tensors[name]) for name, tensor in model.state_dict().items())
print("all tensors of the published names are loaded:", same)
model.save_pretrained("saved")
given, saved = (set(safetensors.torch.load_file(f"{folder}/model.safetensors"))
                for folder in ("given", "saved"))
for name in sorted(given - saved):
    print("given and not saved:", name)
for name in sorted(saved - given):
    print("saved and not given:", name)
assert "model.layers.0.mlp.gate_proj.weight" in given - saved, "the behaviour changed"
assert "model.layers.0.mlp.linear_gate.weight" in saved - given, "the behaviour changed"
assert "model.layers.0.hc_pre.hc_attn_layer.hc_fn" in saved - given, "the behaviour changed"
PYTHON
