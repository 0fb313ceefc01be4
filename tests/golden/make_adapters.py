"""Logits of golden checkpoints with LoRA adapters, as peft computes them in float32.

    python make_adapters.py [NAME...]

Writes adapters/NAME.json: the checkpoint, adapter_config.json as peft saves it and the shapes of
adapter_model.safetensors, whose weights are those of tests/common/cards.rs; and
adapters/NAME.logits.f32, of the tokens of make_cards.py. The adapter is not merged in them: some
cannot be in peft. Packages: torch, transformers, peft, safetensors.
"""

import json
import sys
import tempfile
from pathlib import Path

import peft
import torch
import transformers
from safetensors.torch import load_file, save_file

from make_cards import HERE, N_IDS, TOKENS, values
from pack import unpack

ADAPTERS = HERE / "adapters"
SCALE = 0.4

# Checkpoint and what peft is asked for.
CASES = {
    # Stacked experts and a router, on a checkpoint of single experts.
    "experts_all_linear": ("qwen3moe", dict(r=2, lora_alpha=3, target_modules="all-linear")),
    # Modules that transformers names otherwise than checkpoints do.
    "renamed": ("mixtral", dict(r=3, lora_alpha=2, use_rslora=True, target_modules="all-linear")),
    "stacked": (
        "granitemoe",
        dict(
            r=2,
            target_modules=["q_proj", "v_proj"],
            target_parameters=["experts.gate_up_proj", "experts.down_proj", "router.weight"],
        ),
    ),
    # Experts stored as inputs by outputs, gate and up alternating.
    "transposed": (
        "gpt_oss",
        dict(
            r=2,
            target_modules=["q_proj", "o_proj"],
            target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        ),
    ),
    "down_alone": (
        "qwen2moe",
        dict(r=4, target_modules=["shared_expert_gate"], target_parameters=["experts.down_proj"]),
    ),
    # A pair for each half of what the checkpoint and the model share.
    "tied": (
        "llama_tied",
        dict(
            r=2,
            target_modules=["embed_tokens", "lm_head", "k_proj"],
            rank_pattern={"lm_head": 3},
        ),
    ),
    "embeddings": (
        "llama",
        dict(
            r=3,
            lora_alpha=5,
            use_rslora=True,
            target_modules=["embed_tokens", "lm_head", "q_proj", "gate_proj", "down_proj"],
        ),
    ),
    "tied_embedding": ("qwen3", dict(r=2, target_modules=["embed_tokens"])),
    "saved": (
        "llama",
        dict(
            r=2,
            target_modules=["o_proj", "up_proj"],
            modules_to_save=["lm_head", "q_proj"],
            layers_to_transform=[1],
        ),
    ),
    "biases": (
        "qwen2",
        dict(
            r=4,
            lora_alpha=6,
            lora_bias=True,
            target_modules=["q_proj", "k_proj", "v_proj"],
            alpha_pattern={r"0\.self_attn\..*": 9, "v_proj": 2},
            rank_pattern={"1.self_attn.q_proj": 1},
        ),
    ),
    "lengths": (
        "mixtral",
        dict(r=2, use_dora=True, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]),
    ),
    "latent": (
        "deepseek_v3",
        dict(
            r=2,
            target_modules=["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"],
        ),
    ),
    "delta": (
        "qwen3next",
        dict(r=2, target_modules=["in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj"]),
    ),
}


def weights(name, shapes):
    """Small beside the base, and large enough to change every logit."""
    made = {}
    for tensor, shape in shapes.items():
        scale = SCALE if "lora_" in tensor and "magnitude" not in tensor else 1
        made[tensor] = torch.from_numpy(values(name, tensor, shape)) * scale
    return made


def logits(model):
    with torch.no_grad():
        return model(torch.tensor([TOKENS])).logits[0, :, :N_IDS]


def make(name, base, asked):
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        unpack(base, folder)
        load = transformers.AutoModelForCausalLM.from_pretrained
        how = dict(dtype=torch.float32, attn_implementation="eager")
        fresh = lambda: load(folder / base, **how).eval()
        model = fresh()
        plain = logits(model)
        adapted = peft.get_peft_model(model, peft.LoraConfig(init_lora_weights=False, **asked))
        adapted.save_pretrained(folder / "adapter", save_embedding_layers=False)
        file = folder / "adapter" / "adapter_model.safetensors"
        shapes = {k: list(v.shape) for k, v in sorted(load_file(file).items())}
        save_file(weights(name, shapes), file)
        config = json.loads((folder / "adapter" / "adapter_config.json").read_text())
        config["base_model_name_or_path"] = base
        adapted = peft.PeftModel.from_pretrained(fresh(), folder / "adapter").eval()
        out = logits(adapted)
        changed = ((out - plain) ** 2).sum() / ((plain - plain.mean()) ** 2).sum()
        assert torch.isfinite(out).all() and changed > 1e-3, f"{name}: {changed}"
        print(f"{name}: {len(shapes)} tensors, the adapter changes the logits by {changed:.1e}")
    for key in ("target_modules", "target_parameters", "modules_to_save"):
        if isinstance(config.get(key), list):
            config[key].sort()
    config = {k: v for k, v in config.items() if v not in (None, {}, [])}
    card = {"base": base, "adapter_config": config, "tensors": shapes}
    text = json.dumps(card, indent=1)
    (ADAPTERS / f"{name}.json").write_text(text + "\n")
    out.numpy().astype("<f4").tofile(ADAPTERS / f"{name}.logits.f32")


if __name__ == "__main__":
    for name in sys.argv[1:] or CASES:
        make(name, *CASES[name])
