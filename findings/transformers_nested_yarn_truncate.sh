#!/usr/bin/env bash
# YaRN's `truncate` counts in a flat rope_parameters and is ignored in one nested by layer type: transformers 5.24.0, 2026-11-28
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.15.0 transformers==5.24.0
"$folder/venv/bin/python" - <<'PYTHON'
import transformers
from transformers import Qwen3MoeConfig, MellumConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

transformers.logging.set_verbosity_error()
print("transformers", transformers.__version__)


def yarn(truncate):
    return dict(rope_type="yarn", rope_theta=10000.0, factor=4.0,
                original_max_position_embeddings=64, truncate=truncate)


shape = dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
             num_hidden_layers=2, max_position_embeddings=256)
flat, nested = [], []
for truncate in (True, False):
    config = Qwen3MoeConfig(**shape, rope_parameters=yarn(truncate))
    flat.append(ROPE_INIT_FUNCTIONS["yarn"](config)[0])
    config = MellumConfig(
        **shape, layer_types=["full_attention", "sliding_attention"],
        rope_parameters={"full_attention": yarn(truncate),
                         "sliding_attention": dict(rope_type="default", rope_theta=10000.0)})
    nested.append(ROPE_INIT_FUNCTIONS["yarn"](config, layer_type="full_attention")[0])
print("flat:   truncate changes the frequencies:", not flat[0].equal(flat[1]))
print("nested: truncate changes the frequencies:", not nested[0].equal(nested[1]))
assert not flat[0].equal(flat[1]) and nested[0].equal(nested[1]), "the behaviour changed"
PYTHON
