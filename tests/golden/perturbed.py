"""Logits of the cases of perturbed.json, as transformers computes them in float32.

    python perturbed.py

A case is a card with fields of its config set, or removed if "drop" lists them; "refused" is the
name in moeba's refusal where there are no logits. perturbed.f32 gets, for each case that has
logits, those of the last tokens' first ids: [N_TOKENS, N_IDS]. Packages as of make_cards.py.
"""

import json
import tempfile
from pathlib import Path

import numpy as np

from make_cards import CARDS, HERE, TOKENS, names, values

N_TOKENS, N_IDS = 6, 32


def edited(config, case):
    for path, value in case.get("set", {}).items():
        *outer, last = path.split("/")
        part = config
        for name in outer:
            part = part[name]
        part[last] = value
    for path in case.get("drop", []):
        *outer, last = path.split("/")
        part = config
        for name in outer:
            part = part[name]
        del part[last]
    return config


def logits(case):
    import torch
    import transformers
    from safetensors.numpy import save_file

    card = json.loads((CARDS / f"{case['card']}.json").read_text())
    n_layers = card["config"].get("text_config", card["config"])["num_hidden_layers"]
    config, tensors = edited(card["config"], case), {}
    for pattern, shape in card["tensors"].items():
        for tensor in names(pattern, n_layers):
            for expert in range(shape[2]) if "#" in tensor else [None]:
                full = tensor.replace("#", str(expert))
                tensors[full] = values(case["card"], full, shape[:2] if "#" in tensor else shape)
    for tensor in case.get("without", []):
        del tensors[tensor]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        save_file(tensors, Path(folder, "model.safetensors"), metadata={"format": "pt"})
        model = getattr(transformers, config["architectures"][0]).from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
    with torch.no_grad():
        return model.eval()(torch.tensor([TOKENS])).logits[0, -N_TOKENS:, :N_IDS].numpy()


def main():
    cases = json.loads((HERE / "perturbed.json").read_text())
    found = [logits(case) for case in cases if "refused" not in case]
    np.stack(found).astype("<f4").tofile(HERE / "perturbed.f32")


if __name__ == "__main__":
    main()
