"""Draw a tiny checkpoint, run its reference and write both: what every make_*.py shares.

A family gives its configuration, the names and shapes of the released checkpoints and how its
routers choose. The weights come from numpy's PCG64 and are written under the released names, so
neither torch's generators nor transformers' in-memory layout can change these files.
"""

import argparse
import dataclasses
import json
import pathlib
import re
import tempfile
from collections.abc import Callable

import numpy as np
import torch
import transformers
from safetensors.torch import save_file

import tokenizers_tiny

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
PROMPTS = {"p5": 5, "p17": 17, "p70": 70}
# Logits of the longest text are kept for so many ids.
LONGEST, N_IDS = "p70", 64
GREEDY_TOKENS = 24
# Two float32 implementations differ by about 1e-5 here; a prompt whose reference decision is
# closer than these margins would test luck, so another prompt is drawn.
EXPERT_MARGIN = 1e-4
LOGIT_MARGIN = 1e-3
# A continuation that repeats one id would hide most errors of a decoder.
DISTINCT_IN_GREEDY = 6
MAX_DRAWS = 2000

# Mean and deviation of a tensor by the first pattern found in its name. The scales keep attention,
# routing and logits well away from flat.
SCALES = [
    (r"norm[^.]*\.weight$", 1.0, 0.15),
    (r"e_score_correction_bias$", 0.0, 0.2),
    (r"bias$", 0.0, 0.3),
    (r"embed_tokens", 0.0, 0.6),
    (r"(lm_head|shared_head\.head)\.weight$", 0.0, 0.3),
    (r"[qk]_proj\.weight$", 0.0, 0.2),
    (r"(gate|router|router\.layer)\.weight$", 0.0, 0.2),
    (r"", 0.0, 0.15),
]


@dataclasses.dataclass
class Checkpoint:
    """One folder under tests/golden."""

    seed: int
    tokenizer: str
    config: dict
    # Every tensor of the released layout, in the order it is drawn and stored.
    shapes: Callable[[dict], dict]
    # (folder, configuration) -> a reference: calling it with ids gives a Run.
    reference: Callable
    # Rows that come before those of SCALES.
    scales: list = dataclasses.field(default_factory=list)
    # Tensors stored in another way than as floats, see formats.py.
    encode: Callable | None = None
    # Names under which a tensor is stored once more, and the name of its original.
    copies: dict = dataclasses.field(default_factory=dict)
    # Into how many files the tensors are cut.
    shards: int = 1


@dataclasses.dataclass
class Run:
    """The results of a reference for one prompt."""

    logits: np.ndarray  # [tokens, vocab]
    experts: np.ndarray | None  # int32 [layers, tokens, k], the first choice first; -1 where dense
    margin: float  # smallest gap that decided for an expert, in units of probability


def text_config(config):
    """The language model's part of a configuration that describes more than one."""
    return config.get("text_config", config)


def draw(rng, name, shape, scales):
    for pattern, mean, deviation in scales:
        if re.search(pattern, name):
            return mean + deviation * rng.standard_normal(shape)
    raise AssertionError(name)


def draw_tensors(checkpoint):
    """The stored tensors, and the floats that the reference computes on."""
    rng = np.random.Generator(np.random.PCG64(checkpoint.seed))
    scales = checkpoint.scales + SCALES
    config = text_config(checkpoint.config)
    default = DTYPES[config.get("torch_dtype") or config["dtype"]]
    stored, plain = {}, {}
    for name, shape in checkpoint.shapes(checkpoint.config).items():
        tensor = torch.from_numpy(draw(rng, name, shape, scales)).to(torch.float32)
        encoded = checkpoint.encode(name, tensor) if checkpoint.encode else None
        if encoded is None:
            # The correction bias decides between experts and is float32 in every release.
            tensor = tensor.to(torch.float32 if name.endswith("correction_bias") else default)
            encoded = {name: tensor}, tensor
        stored |= encoded[0]
        plain[name] = encoded[1]
    for name, original in checkpoint.copies.items():
        stored[name], plain[name] = stored[original].clone(), plain[original].clone()
    return stored, plain


def save(folder, tensors, shards):
    metadata = {"format": "pt"}
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata)
        return
    # Cut by bytes and not by layer, so that one layer's experts lie in two files.
    total = sum(t.nbytes for t in tensors.values())
    parts, weight_map, done = [{} for _ in range(shards)], {}, 0
    for name, tensor in tensors.items():
        part = min(done * shards // total, shards - 1)
        parts[part][name] = tensor
        weight_map[name] = f"model-{part + 1:05}-of-{shards:05}.safetensors"
        done += tensor.nbytes
    for i, part in enumerate(parts):
        save_file(part, folder / f"model-{i + 1:05}-of-{shards:05}.safetensors", metadata)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_json(folder / "model.safetensors.index.json", index)


def write_json(path, value):
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_ids(path, ids):
    path.write_text(json.dumps([int(i) for i in ids]) + "\n", encoding="utf-8")


def logit_margin(logits):
    """Smallest lead of the best logit over the second, as a part of the best's magnitude."""
    best = -np.sort(-logits, axis=-1)[:, :2]
    return float(np.min((best[:, 0] - best[:, 1]) / np.abs(best[:, 0])))


def end_ids(config):
    eos = config["eos_token_id"]
    return set(eos) if isinstance(eos, list) else {eos}


def greedy(reference, prompt, ends):
    """The continuation, or None where a step is too close or ends the text, or it only repeats."""
    ids = list(prompt)
    for _ in range(GREEDY_TOKENS):
        run = reference(ids)
        if logit_margin(run.logits[-1:]) < LOGIT_MARGIN or run.margin < EXPERT_MARGIN:
            return None
        ids.append(int(np.argmax(run.logits[-1])))
        # An engine that stops at the end of text must give the same ids.
        if ids[-1] in ends:
            return None
    continuation = ids[len(prompt):]
    return continuation if len(set(continuation)) >= DISTINCT_IN_GREEDY else None


def draw_prompt(reference, rng, ordinary, length, ends):
    """Redraw until no decision of the reference is a near tie."""
    for attempt in range(MAX_DRAWS):
        ids = [int(i) for i in rng.choice(ordinary, size=length)]
        run = reference(ids)
        if run.margin < EXPERT_MARGIN or logit_margin(run.logits) < LOGIT_MARGIN:
            continue
        continuation = greedy(reference, ids, ends)
        if continuation is not None:
            return ids, run, continuation, attempt + 1
    raise SystemExit(f"{length} tokens: every draw came near a tie")


def write_expectations(folder, checkpoint, reference, specials):
    out = folder / "expect"
    report = {}
    config = text_config(checkpoint.config)
    ordinary = [i for i in range(config["vocab_size"]) if i not in specials]
    for prompt, length in PROMPTS.items():
        rng = np.random.Generator(np.random.PCG64([checkpoint.seed, length]))
        ends = end_ids(config)
        ids, run, continuation, draws = draw_prompt(reference, rng, ordinary, length, ends)
        write_ids(out / f"{prompt}.tokens.json", ids)
        write_ids(out / f"{prompt}.greedy.json", continuation)
        logits = run.logits.astype(np.float32)
        if prompt == LONGEST:
            write_ids(out / f"{prompt}.best.json", logits.argmax(1))
            logits = np.ascontiguousarray(logits[:, :N_IDS])
        np.save(out / f"{prompt}.logits.npy", logits)
        report[prompt] = {"draws": draws, "logit_margin": round(logit_margin(run.logits), 6)}
        if run.experts is not None:
            np.save(out / f"{prompt}.experts.npy", run.experts.astype(np.int32))
            routed = run.experts[run.experts[:, 0, 0] >= 0]
            report[prompt] |= {
                "expert_margin": round(run.margin, 6),
                "experts_used": [len(np.unique(layer)) for layer in routed]}
        report[prompt]["distinct_in_greedy"] = len(set(continuation))
        largest = round(float(np.abs(run.logits).max()), 2)
        report[prompt]["largest_logit"] = largest
    return report


def make(root, name, checkpoint, write):
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("model*"):
        old.unlink()
    write_json(folder / "config.json", checkpoint.config)
    stored, plain = draw_tensors(checkpoint)
    save(folder, stored, checkpoint.shards)
    specials = tokenizers_tiny.write(folder, checkpoint.tokenizer)
    with tempfile.TemporaryDirectory() as scratch:
        # The reference sees plain floats: it must not depend on a library's own decoders.
        scratch = pathlib.Path(scratch)
        config = {k: v for k, v in checkpoint.config.items() if k != "quantization_config"}
        write_json(scratch / "config.json", config)
        save(scratch, plain, shards=1)
        reference = checkpoint.reference(scratch, config)
    report = write(folder, checkpoint, reference, specials)
    size = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
    print(f"{name}: {size / 1e6:.2f} MB {json.dumps(report)}", flush=True)


def main(checkpoints, about, write=write_expectations):
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(__file__).parent)
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: every checkpoint")
    args = parser.parse_args()
    print(f"torch {torch.__version__}, transformers {transformers.__version__}")
    for name in args.names or checkpoints:
        make(args.out, name, checkpoints[name], write)
