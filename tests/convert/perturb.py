"""Changes one field of a config at a time and compares moeba's logits with transformers'.

    python perturb.py [--moeba FILE] [--table FILE] [CLASS ...]

For every class that models/*.toml names and transformers has: a small random checkpoint with its
config as a card or a golden checkpoint has it ("given") and as transformers saves it ("saved"),
each field of both changed alone, and what else the class reads set where it is absent. Outcomes:

    equal    NMSE below 1e-8
    refused  `moeba convert` ends with a message that names the field
    tensor   ... with a message that names a tensor, which the changed config adds or drops
    other    ... with a message that names a field with which the changed one must agree
    unread   transformers does not read the field, and neither does moeba
    error    transformers itself does not load the config
    WRONG    anything else

--table writes the outcomes, a line a class: outcomes.md here. Packages: torch, transformers 5.24,
safetensors, numpy. Not a part of the tests; tests/golden/perturbed.json has cases of it.
"""

import argparse
import copy
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zlib
from pathlib import Path

import numpy as np
import torch
import transformers

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests/golden"
IDS = [1 + i * 37 % 250 for i in range(24)]
INERT = set(
    """_name_or_path architectures model_type transformers_version dtype torch_dtype use_cache
    output_hidden_states output_attentions return_dict id2label label2id problem_type
    is_encoder_decoder chunk_size_feed_forward initializer_range bos_token_id eos_token_id
    pad_token_id auto_map attn_implementation _attn_implementation experts_implementation
    vision_config audio_config image_token_id video_token_id vision_start_token_id
    vision_end_token_id boi_token_id eoi_token_id quantization_config""".split()
)
ENCODER_DECODERS = ("NllbMoe", "SwitchTransformers")


def bases():
    """The configs of each class: cards and golden checkpoints."""
    found = {}
    for path in sorted(GOLDEN.glob("cards/*.json")):
        card = json.loads(path.read_text())
        config = card.get("config")
        if config and card.get("reference") != "llama.cpp":
            found.setdefault(config["architectures"][0], []).append((path.stem, config))
    for path in sorted(GOLDEN.glob("*/config.json")):
        config = json.loads(path.read_text())
        if "quantization_config" not in config:
            found.setdefault(config["architectures"][0], []).append((path.parent.name, config))

    def like(cls, other, **changes):
        name, config = found[other][0]
        config = {**copy.deepcopy(config), "architectures": [cls], **changes}
        found.setdefault(cls, []).append((f"{name} as {cls}", config))

    like("MistralForCausalLM", "LlamaForCausalLM", model_type="mistral", sliding_window=None)
    like("PhimoeForCausalLM", "PhiMoEForCausalLM", model_type="phimoe")
    like("GraniteMoeSharedForCausalLM", "GraniteMoeForCausalLM", model_type="granitemoeshared",
         shared_intermediate_size=48)
    if "Qwen3_5MoeForConditionalGeneration" in found:
        name, config = found["Qwen3_5MoeForConditionalGeneration"][0]
        text = {**config["text_config"], "architectures": ["Qwen3_5MoeForCausalLM"]}
        found.setdefault("Qwen3_5MoeForCausalLM", []).append((f"{name} text", text))
    return found


def classes():
    for path in sorted((ROOT / "models").glob("*.toml")):
        yield from tomllib.loads(path.read_text()).get("hf_classes", [])


def decoded(value):
    """Numbers that JSON lacks, as transformers writes them."""
    if isinstance(value, dict):
        if "__float__" in value:
            return float(value["__float__"].replace("Infinity", "inf"))
        return {k: decoded(v) for k, v in value.items()}
    return [decoded(v) for v in value] if isinstance(value, list) else value


def randomise(model):
    buffers = {n for n, _ in model.named_buffers()}
    for name, p in [*model.named_parameters(), *model.named_buffers()]:
        if not p.is_floating_point() or (name in buffers and "bias" not in name):
            continue
        g = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        drawn = torch.randn(p.shape, generator=g)
        if "norm" in name and p.ndim == 1:
            p.data = 1 + 0.2 * drawn
        elif any(part in name for part in ("A_log", "dt_bias")):
            p.data = 0.3 * drawn
        elif "embed" in name:
            p.data = drawn
        else:
            p.data = drawn * (0.7 / max(p.shape[-1], 1) ** 0.5 if p.ndim > 1 else 0.1)


def logits_of(model):
    with torch.no_grad():
        return model(torch.tensor([IDS])).logits[0].double().numpy()


def nmse(a, b):
    return float(((a - b) ** 2).sum() / max(((b - b.mean()) ** 2).sum(), 1e-30))


class Harness:
    def __init__(self, cls, moeba, work):
        self.cls, self.moeba, self.work = cls, moeba, work
        self.model_class = getattr(transformers, cls)

    def save(self, config, folder, **how):
        """A checkpoint of this config, with the config as transformers writes it beside it."""
        shutil.rmtree(folder, ignore_errors=True)
        parsed = self.model_class.config_class.from_dict(decoded(copy.deepcopy(config)))
        parsed._attn_implementation = "eager"
        torch.manual_seed(1)
        model = self.model_class(parsed).float().eval()
        randomise(model)
        model.save_pretrained(folder, **how)
        del model
        saved = json.loads(Path(folder, "config.json").read_text())
        Path(folder, "config.json").write_text(json.dumps(config))
        return saved

    def reference(self, folder):
        model = self.model_class.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        return logits_of(model)

    def run(self, *args):
        done = subprocess.run([self.moeba, *map(str, args)], capture_output=True, text=True,
                              errors="replace", timeout=120)
        return done.returncode, (done.stderr.strip().splitlines() or [""])[-1]

    def ours(self, folder):
        out = f"{folder}.gguf"
        code, said = self.run("convert", folder, "-o", out, "--outtype", "f32", "--force")
        if code:
            return None, said.replace(str(folder), "")
        code, said = self.run("logits", out, "--tokens", ",".join(map(str, IDS)),
                              "-o", f"{folder}.npy", "--cache-type-k", "f32",
                              "--cache-type-v", "f32", "--profile", "none")
        if code:
            return None, "accepted by convert, refused by logits: " + said
        return np.load(f"{folder}.npy").astype(np.float64), ""

    def outcome(self, config, field, base_logits, **how):
        folder = f"{self.work}/m"
        try:
            self.save(config, folder, **how)
            want = self.reference(folder)
        except Exception as e:
            return "error", f"{type(e).__name__}: {str(e)[:60]}", None
        if not np.isfinite(want).all():
            return "error", "not finite", None
        tokenizer(folder)
        got, said = self.ours(folder)
        same = base_logits is not None and want.shape == base_logits.shape
        unread = same and np.array_equal(want, base_logits)
        if got is None:
            if said.startswith("accepted"):
                return "WRONG", said, want
            name = field.split(".")[-1]
            if name in said or any(a in said for a in ALSO.get(name, [])):
                return "refused", said, want
            # The checkpoint of the changed config has other tensors, or another field must agree.
            return ("tensor" if TENSOR.search(said) else "other"), said, want
        if got.shape != want.shape:
            return "WRONG", f"shape {got.shape}, expected {want.shape}", want
        error = nmse(got, want)
        if error < 1e-8:
            return ("unread" if unread else "equal"), "", want
        note = "transformers does not read it" if unread else ""
        return "WRONG", f"NMSE {error:.1e} {note}", want


# Words that a message may have in the place of a field.
ALSO = {"num_hidden_layers": ["layer"], "rope": ["partial_rotary_factor"]}
TENSOR = re.compile(r"\btensor |\bblk\.")


def tokenizer(folder):
    """One of 200 tokens, which fits whatever the vocabulary."""
    golden = json.loads((GOLDEN / "qwen3moe/tokenizer.json").read_text())
    model = golden["model"]
    model["vocab"] = {token: i for token, i in model["vocab"].items() if i < 200}
    vocab = model["vocab"]
    fits = lambda m: "".join(m if isinstance(m, list) else m.split()) in vocab
    model["merges"] = [m for m in model["merges"] if fits(m)]
    golden["added_tokens"] = []
    Path(folder, "tokenizer.json").write_text(json.dumps(golden))
    Path(folder, "tokenizer_config.json").write_text("{}")


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
ROPES = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 3.0},
    "yarn": YARN,
    "yarn by type": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "yarn truncate": {**YARN, "truncate": False},
    "yarn truncated": {**YARN, "truncate": True},
    "yarn betas": {**YARN, "beta_fast": 8.0, "beta_slow": 2.0},
    "yarn attention_factor": {**YARN, "attention_factor": 1.4},
    "yarn mscale": {**YARN, "mscale": 0.7},
    "yarn mscale_all_dim": {**YARN, "mscale_all_dim": 0.7},
    "yarn mscale both": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    "yarn mscale differ": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5},
    "yarn no original": {"rope_type": "yarn", "factor": 4.0},
    "llama3": {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 16},
    "longrope": {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8,
                 "original_max_position_embeddings": 16, "factor": 4.0},
    "partial": {"rope_type": "default", "partial_rotary_factor": 0.5},
    "theta": {"rope_type": "default", "rope_theta": 500.0},
}


def variants(field, value):
    """Other values of a field, by the one that it has."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [v for v in dict.fromkeys([value + 1, 2 * value, value // 2, 0, None]) if v != value]
    if isinstance(value, float):
        return [value * 1.5, value / 2, 0.0, None]
    if isinstance(value, str):
        acts = ["gelu", "relu", "gelu_pytorch_tanh", "silu"]
        if value in acts or "act" in field:
            return [a for a in acts if a != value]
        return [value + "_x"]
    if isinstance(value, list):
        found = [value[::-1], value[1:] + value[:1], value[:-1]]
        if value and all(v == value[0] for v in value) and isinstance(value[0], (int, float)):
            found.append([value[0]] * (len(value) - 1) + [value[0] * 2])
        kinds = list(dict.fromkeys(map(str, value)))
        if len(kinds) > 1 and isinstance(value[0], str):
            found += [[k] * len(value) for k in kinds]
            found += [value[:i] + [k] + value[i + 1 :] for i in (0, len(value) - 1) for k in kinds]
        return [v for i, v in enumerate(found) if v != value and v not in found[:i]]
    if value is None:
        return [8, 0.5, True]
    return []


def edits(config, where=()):
    """(field, config) of every change."""
    part = config
    for name in where:
        part = part[name]
    for field, value in sorted(part.items()):
        path = (*where, field)
        name = ".".join(path)
        if field in INERT:
            continue
        if isinstance(value, dict):
            if field in ("rope_parameters", "rope_scaling"):
                flat = not any(isinstance(v, dict) for v in value.values())
                for kind, rope in ROPES.items():
                    kept = {k: v for k, v in value.items() if k == "rope_theta"}
                    new = {**kept, **rope}
                    if not flat:
                        parts = value.items()
                        new = {k: {**v, **rope} if isinstance(v, dict) else v for k, v in parts}
                    yield f"{name}={kind}", "rope", put(config, path, new)
            yield from edits(config, path)
            continue
        for new in variants(field, value):
            shown = json.dumps(new)
            yield f"{name}={shown[:60]}", field, put(config, path, new)
    if not where and "text_config" not in config or where == ("text_config",):
        for kind, rope in ROPES.items():
            for field in ("rope_scaling", "rope_parameters"):
                if part.get(field) is None:
                    name = ".".join((*where, field))
                    yield f"{name}+={kind}", "rope", put(config, (*where, field), rope)
        added = {"rope_theta": 500.0, "partial_rotary_factor": 0.5, "tie_word_embeddings": True}
        for field, new in added.items():
            if field not in part:
                yield f"{field}+={json.dumps(new)}", field, put(config, (*where, field), new)


def put(config, path, value):
    config = copy.deepcopy(config)
    part = config
    for name in path[:-1]:
        part = part[name]
    part[path[-1]] = value
    return config


def rows(table):
    """The table of outcomes: how many of each, and what is neither equal nor refused by name."""
    kinds = ("equal", "refused", "tensor", "other", "unread", "error", "WRONG")
    yield "# Outcomes of changed configs\n\n"
    yield "`perturb.py` writes this table and explains its columns.\n\n"
    yield "| class | " + " | ".join(kinds) + " |\n|---|" + "--:|" * len(kinds) + "\n"
    total = [0] * len(kinds)
    for cls, outcomes in sorted(table.items()):
        counts = [sum(outcome == kind for outcome, _ in outcomes) for kind in kinds]
        total = [a + b for a, b in zip(total, counts)]
        yield f"| `{cls}` | " + " | ".join(map(str, counts)) + " |\n"
    yield "| all | " + " | ".join(map(str, total)) + " |\n\n"
    for cls, outcomes in sorted(table.items()):
        for kind in ("other", "WRONG"):
            names = [name for outcome, name in outcomes if outcome == kind]
            if names:
                yield f"- {kind}, `{cls}`: " + ", ".join(f"`{name}`" for name in names) + "\n"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--moeba", default=str(ROOT / "target/release/moeba"))
    parser.add_argument("--table")
    parser.add_argument("--only", help="a part of the change's name")
    parser.add_argument("--quick", action="store_true", help="bases only")
    parser.add_argument("classes", nargs="*")
    args = parser.parse_args()
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    import warnings
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    work = tempfile.mkdtemp(prefix="perturb-")
    table, known = {}, bases()
    for cls in dict.fromkeys(classes()):
        if args.classes and cls not in args.classes:
            continue
        if not hasattr(transformers, cls) or cls not in known or cls.startswith(ENCODER_DECODERS):
            print(f"{cls}: not tried", flush=True)
            continue
        harness = Harness(cls, args.moeba, work)
        seen = set()
        for base_name, given in known[cls]:
            try:
                saved = harness.save(given, f"{work}/m")
            except Exception as e:
                print(f"{cls} {base_name}: base: {type(e).__name__}: {e}", flush=True)
                continue
            outcome, said, _ = harness.outcome(saved, "", None, save_original_format=False)
            print(f"{cls} {base_name} stacked: {outcome} {said}", flush=True)
            for kind, config in (("given", given), ("saved", saved)):
                outcome, said, logits = harness.outcome(config, "", None)
                print(f"{cls} {base_name} {kind}: {outcome} {said}", flush=True)
                if logits is None or args.quick:
                    continue
                for name, field, changed in edits(config):
                    if (kind, name) in seen or (args.only and args.only not in name):
                        continue
                    seen.add((kind, name))
                    outcome, said, _ = harness.outcome(changed, field, logits)
                    said = said if outcome in ("other", "WRONG") else ""
                    said = said.replace("error: /config.json: ", "")
                    shown = f"{kind} {name}" + (f": {said[:60]}" if said else "")
                    table.setdefault(cls, []).append((outcome, shown))
                    if outcome == "WRONG" or args.only:
                        print(f"  {outcome} {cls} {kind} {name}: {said}", flush=True)
        counts = {}
        for outcome, _ in table.get(cls, []):
            counts[outcome] = counts.get(outcome, 0) + 1
        print(f"{cls}: {counts}", flush=True)
        if args.table:
            Path(args.table).write_text("".join(rows(table)))
    shutil.rmtree(work)


if __name__ == "__main__":
    main()
