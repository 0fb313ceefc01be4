#!/usr/bin/env python3
"""Expected logits of the layers that predict the token after the next.

    python make_next_token.py [NAME ...]

transformers runs no such layer. The layer itself is an ordinary one, so it is loaded as the last
layer of a model that is one layer deeper. What is special is written here, after section 2.2 of
the DeepSeek-V3 report: its input is `eh_proj [enorm(embedding of the next token), hnorm(output)]`,
where `output` is what the model's final norm gives for this token, and its result goes through a
norm and an output matrix of its own or the model's. `expect/p17.next_token.npy` has the logits
[vocab] behind the last but one token of `p17`, which are a forecast of the one behind the last.
"""

import argparse
import json
import pathlib
import tempfile

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

HERE = pathlib.Path(__file__).parent
NAMES = ["glm4moe", "glm4_moe_lite", "qwen3next", "qwen35moe"]
# The names of a layer `mtp.` as those of others have them.
RENAMED = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm",
           "norm": "shared_head.norm"}


def renamed(name, layers):
    """A tensor's name, that of `mtp.layers.0.x` being as of the layer behind the last."""
    if not name.startswith("mtp."):
        return name
    rest = name.removeprefix("mtp.").removeprefix("layers.0.")
    first, _, end = rest.partition(".")
    is_inside = name.startswith("mtp.layers.")
    return f"{layers}{rest}" if is_inside else f"{layers}{RENAMED[first]}.{end}"


def rms_norm(x, weight, config, is_distance):
    """RMSNorm, whose weight may be stored as its distance from one."""
    weight = weight + 1 if is_distance else weight
    variance = x.pow(2).mean(-1, keepdim=True)
    return x * torch.rsqrt(variance + config["rms_norm_eps"]) * weight


def load(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


def text_model(model):
    inner = model.model
    return getattr(inner, "language_model", inner)


def expected(name):
    source = HERE / name
    config = json.loads((source / "config.json").read_text())
    text = config.get("text_config", config)
    n = text["num_hidden_layers"]
    is_qwen = name.startswith("qwen")
    before = "model.language_model.layers." if "text_config" in config else "model.layers."
    tensors = {k: v.float() for k, v in load_file(source / "model.safetensors").items()}
    tensors = {renamed(k, f"{before}{n}."): v for k, v in tensors.items()}
    tokens = torch.tensor([json.loads((source / "expect/p17.tokens.json").read_text())])
    with tempfile.TemporaryDirectory() as scratch:
        models = []
        for n_layers in (n, n + 1):
            text["num_hidden_layers"] = n_layers
            if "layer_types" in text:
                text["layer_types"] = (text["layer_types"] + ["full_attention"])[:n_layers]
            elif is_qwen:
                text["layer_types"] = 3 * ["linear_attention"] + ["full_attention"]
                text["layer_types"] += ["full_attention"] * (n_layers - n)
            folder = pathlib.Path(scratch) / str(n_layers)
            folder.mkdir()
            (folder / "config.json").write_text(json.dumps(config))
            save_file(tensors, folder / "model.safetensors", {"format": "pt"})
            models.append(load(folder))
    model, deeper = models
    own = lambda role: tensors.get(f"{before}{n}.{role}.weight")
    with torch.no_grad():
        output = text_model(model)(tokens[:, :-1]).last_hidden_state
        table = own("embed_tokens")
        table = model.get_input_embeddings().weight if table is None else table
        parts = [rms_norm(x, own(role), text, is_qwen)
                 for x, role in ((table[tokens[:, 1:]], "enorm"), (output, "hnorm"))]
        x = torch.cat(parts, -1) @ own("eh_proj").T
        # The layer alone, without the norm behind it.
        inner = text_model(deeper)
        inner.layers = torch.nn.ModuleList([inner.layers[n]])
        inner.norm = torch.nn.Identity()
        inner.config.num_hidden_layers = 1
        if is_qwen:
            inner.config.layer_types = ["full_attention"]
        x = inner(inputs_embeds=x, use_cache=False).last_hidden_state
        head = own("shared_head.head")
        head = model.get_output_embeddings().weight if head is None else head
        logits = rms_norm(x, own("shared_head.norm"), text, is_qwen) @ head.T
    return logits[0, -1].numpy().astype(np.float32)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: every checkpoint")
    for name in parser.parse_args().names or NAMES:
        logits = expected(name)
        np.save(HERE / name / "expect/p17.next_token.npy", logits)
        print(name, logits.shape, f"largest {np.abs(logits).max():.3f}", int(logits.argmax()))


main()
