"""Logits of the models of cards/*.json, as references compute them in float32.

    python make_cards.py gguf FOLDER       write the GGUF files of cards with "keys"
    python make_cards.py llama.cpp LEVEL   their logits; LEVEL is bench/level.cpp, built against a
                                           release of llama.cpp by bench/level.py
    python make_cards.py transformers      logits of cards with "config"
    python make_cards.py converted SOURCE LEVEL
                                           logits of cards with "config" whose "reference" is
                                           "llama.cpp": the converter of SOURCE, a release of
                                           it, makes their GGUF files

For qwen4exp LEVEL decodes one token at a time, without reuse of graphs, and before each sets
indexer_top_k of the model's hparams (src/llama-model.h) so that the positions which llama.cpp lets
its indexer choose are whole blocks: the file's number + (n % 4) - 3 for a text of n tokens.

Names may follow, of the cards to do. The weights are those of tests/common/cards.rs.
Packages: numpy, gguf; torch, transformers and safetensors.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
CARDS = HERE / "cards"
TOKENS = [1 + i * 37 % 255 for i in range(24)]
N_IDS = 64
MASK = (1 << 64) - 1


def mixed(n):
    """SplitMix64's output function, for a number or an array."""
    is_array = isinstance(n, np.ndarray)
    u64 = np.uint64 if is_array else int
    wrap = (lambda n: n) if is_array else (lambda n: n & MASK)
    n = wrap(n + u64(0x9E3779B97F4A7C15))
    n = wrap((n ^ (n >> u64(30))) * u64(0xBF58476D1CE4E5B9))
    n = wrap((n ^ (n >> u64(27))) * u64(0x94D049BB133111EB))
    return n ^ (n >> u64(31))


def values(card, tensor, shape):
    """float32 of a shape with the row length last; of a table the ids of experts, of eight."""
    seed = 0
    for byte in (card + tensor).encode():
        seed = mixed(seed ^ byte)
    if tensor.endswith("tid2eid"):
        first = np.array([mixed(seed ^ row) % 8 for row in range(shape[0])], dtype=np.int64)
        return (first[:, None] + np.arange(shape[1])) % 8
    centre, width = np.float32(0), np.sqrt(np.float32(3) / np.float32(shape[-1]))
    if tensor.endswith("ssm_a"):
        centre, width = -0.3, 0.25
    elif len([d for d in shape if d != 1]) == 1:
        centre, width = (1, 0.5) if "norm" in tensor else (0, 0.25)
    elif "token_embd" in tensor or "embed_tokens" in tensor:
        width = 1.7
    with np.errstate(over="ignore"):
        drawn = mixed(np.arange(np.prod(shape), dtype=np.uint64) ^ np.uint64(seed))
    spread = (drawn >> np.uint64(40)).astype(np.float32) / np.float32(1 << 23) - np.float32(1)
    return (np.float32(centre) + np.float32(width) * spread).reshape(shape)


def names(pattern, n_layers):
    befores = (
        "blk.",
        "layers.",
        "model.layers.",
        "backbone.layers.",
        "model.language_model.layers.",
        "language_model.model.layers.",
    )
    for before in befores:
        if pattern.startswith(before):
            layers, rest = pattern[len(before) :].split(".", 1)
            layers = range(n_layers) if layers == "*" else layers.split(",")
            return [f"{before}{layer}.{rest}" for layer in layers]
    return [pattern]


def cards(kind, chosen):
    for path in sorted(CARDS.glob("*.json")):
        card = json.loads(path.read_text())
        if kind in card and (not chosen or path.stem in chosen):
            yield path.stem, card


def keep(name, logits):
    logits.reshape(len(TOKENS), -1)[:, :N_IDS].astype("<f4").tofile(CARDS / f"{name}.logits.f32")


def write_gguf(name, card, path, header_only=False):
    import gguf

    arch, keys = card["architecture"], card["keys"]
    out = gguf.GGUFWriter(path, arch)
    for key, value in keys.items():
        key = f"{arch}.{key}"
        if isinstance(value, bool):
            out.add_bool(key, value)
        elif isinstance(value, float):
            out.add_float32(key, value)
        elif isinstance(value, int):
            out.add_uint32(key, value)
        elif isinstance(value, str):
            out.add_string(key, value)
        elif isinstance(value, dict):
            ((kind, value),) = value.items()
            array = gguf.GGUFValueType.ARRAY
            whole = {"u64": gguf.GGUFValueType.UINT64, "i32": gguf.GGUFValueType.INT32}[kind]
            if isinstance(value, list):
                out.add_key_value(key, value, array, whole)
            else:
                out.add_key_value(key, value, whole)
        else:
            out.add_array(key, value)
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("qwen2")
    out.add_token_list([f"<{i}>" for i in range(256)])
    out.add_token_types([1] * 256)
    # llama.cpp wants a merge.
    out.add_token_merges(["< 0"])
    for pattern, dims in {} if header_only else card["tensors"].items():
        for tensor in names(pattern, keys["block_count"]):
            out.add_tensor(tensor, values(name, tensor, dims[::-1]))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def with_llama_cpp(program, chosen):
    with tempfile.TemporaryDirectory() as folder:
        for name, card in cards("keys", chosen):
            model, out = Path(folder, f"{name}.gguf"), Path(folder, "logits")
            write_gguf(name, card, model)
            subprocess.run([program, "logits", model, out, *map(str, TOKENS)], check=True)
            keep(name, np.fromfile(out, dtype=np.float32))


def write_checkpoint(name, card, folder):
    from safetensors.numpy import save_file

    config = card["config"]
    tensors, n_layers = {}, config.get("text_config", config)["num_hidden_layers"]
    for pattern, shape in card["tensors"].items():
        for tensor in names(pattern, n_layers):
            experts = range(shape[2]) if "#" in tensor else [None]
            for expert in experts:
                full = tensor.replace("#", str(expert))
                own = shape[:2] if "#" in tensor else shape
                tensors[full] = values(name, full, own)
    Path(folder, "config.json").write_text(json.dumps(config))
    save_file(tensors, Path(folder, "model.safetensors"), metadata={"format": "pt"})


def write_converted(source, folder, out):
    """The GGUF file that llama.cpp's converter makes of a checkpoint, with numbers for texts."""
    sys.path[:0] = [str(source), str(source / "gguf-py")]
    import conversion
    import gguf

    loaded = conversion.ModelBase.load_hparams(Path(folder), False)
    kind = conversion.get_model_class(loaded["architectures"][0])

    class Model(kind):
        model_arch = kind.model_arch

        def set_vocab(self):
            out = self.gguf_writer
            out.add_tokenizer_model("gpt2")
            out.add_tokenizer_pre("qwen2")
            out.add_token_list([f"<{i}>" for i in range(self.hparams["vocab_size"])])
            out.add_token_types([1] * self.hparams["vocab_size"])
            out.add_token_merges(["< 0"])

    Model(Path(folder), gguf.LlamaFileType.ALL_F32, Path(out)).write()


def with_converter(source, program, chosen):
    for name, card in cards("config", chosen):
        if card.get("reference") != "llama.cpp":
            continue
        with tempfile.TemporaryDirectory() as folder:
            write_checkpoint(name, card, folder)
            model, out = Path(folder, f"{name}.gguf"), Path(folder, "logits")
            write_converted(Path(source), folder, model)
            subprocess.run([program, "logits", model, out, *map(str, TOKENS)], check=True)
            keep(name, np.fromfile(out, dtype=np.float32))


def with_transformers(chosen):
    import torch
    import transformers

    for name, card in cards("config", chosen):
        if card.get("reference") == "llama.cpp":
            continue
        config = card["config"]
        with tempfile.TemporaryDirectory() as folder:
            write_checkpoint(name, card, folder)
            model, info = getattr(transformers, config["architectures"][0]).from_pretrained(
                folder,
                dtype=torch.float32,
                attn_implementation="eager",
                output_loading_info=True,
            )
        # A card has the text's part of a model that sees pictures. MiniMax computes its decays.
        own = (".visual", ".vision_", "projector.", "_decay", "slope_rate")
        missing = {key for key in info["missing_keys"] if not any(part in key for part in own)}
        info["missing_keys"] = missing
        assert not any(info.values()), f"{name}: {info}"
        with torch.no_grad():
            keep(name, model.eval()(torch.tensor([TOKENS])).logits.numpy())


def main(command, *rest):
    if command == "gguf":
        for name, card in cards("keys", rest[1:]):
            write_gguf(name, card, Path(rest[0], f"{name}.gguf"))
    elif command == "llama.cpp":
        with_llama_cpp(rest[0], rest[1:])
    elif command == "converted":
        with_converter(rest[0], rest[1], rest[2:])
    else:
        with_transformers(rest)


if __name__ == "__main__":
    main(*sys.argv[1:])
