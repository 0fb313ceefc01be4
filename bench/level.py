#!/usr/bin/env python3
"""moeba beside a release of llama.cpp, architecture by architecture.

    cargo build --release
    bench/level.py SOURCE [CARD...] [--moeba PATH] [--build FOLDER] [--seeds 7,11] [--tokens 64]

SOURCE is a folder of llama.cpp's source. It is built without its programs, and bench/level.cpp
against it. For each card of a GGUF file in tests/golden/cards llama.cpp makes a random model of the
card's metadata, with the tensors that it creates itself, saves it, and computes its logits; moeba
computes them of the same file. Prints Markdown: the normalised mean squared error and how many
tokens have the same best id, for each seed, llama.cpp's own error where it computes one token at a
time, and in the end the architectures with experts that moeba does not know.

Packages: numpy, gguf; cmake and a C++ compiler. Nothing is installed.
"""

import argparse
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests/golden"))

import make_cards  # noqa: E402

OPTIONS = ["-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=OFF", "-DGGML_NATIVE=ON",
           "-DLLAMA_BUILD_COMMON=OFF", "-DLLAMA_BUILD_TOOLS=OFF", "-DLLAMA_BUILD_SERVER=OFF",
           "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF"]


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("cards", nargs="*")
    parser.add_argument("--moeba", type=Path, default=ROOT / "target/release/moeba")
    parser.add_argument("--build", type=Path, help="is kept, and used again")
    parser.add_argument("--seeds", type=lambda text: text.split(","), default=["7", "11"])
    parser.add_argument("--tokens", type=int, default=64)
    return parser.parse_args()


def build(source, folder):
    """The program of level.cpp."""
    own = folder / "source"
    if not own.exists():
        shutil.copytree(source, own)
    # Some packages of the source leave this folder out.
    if not (own / "app").exists():
        (own / "app").mkdir()
        (own / "app/CMakeLists.txt").touch()
    made = folder / "build"
    quiet = {"check": True, "stdout": subprocess.DEVNULL}
    subprocess.run(["cmake", "-S", own, "-B", made, *OPTIONS], **quiet)
    jobs = str(os.cpu_count())
    subprocess.run(["cmake", "--build", made, "--target", "llama", "-j", jobs], **quiet)
    program = folder / "level"
    libraries = [made / "src/libllama.a", *sorted(made.glob("ggml/src/**/*.a"))]
    # Backends know one another: their order among archives does not matter inside a group.
    subprocess.run(["c++", "-O2", "-std=c++17", f"-I{own}/include", f"-I{own}/ggml/include",
                    ROOT / "bench/level.cpp", "-o", program, "-Wl,--start-group", *libraries,
                    "-Wl,--end-group", "-fopenmp", "-lpthread", "-ldl"], check=True)
    return program


def of_llama_cpp(program, mode, model, tokens, folder):
    out = folder / "logits"
    subprocess.run([program, mode, model, out, *map(str, tokens)], check=True,
                   stderr=subprocess.DEVNULL)
    return np.fromfile(out, dtype=np.float32).reshape(len(tokens), -1)


def of_moeba(moeba, model, tokens, folder):
    out = folder / "logits.npy"
    subprocess.run([moeba, "logits", model, "--tokens", ",".join(map(str, tokens)), "-o", out,
                    "--cache-type-k", "f32", "--cache-type-v", "f32", "--device", "cpu"],
                   check=True, capture_output=True, text=True)
    return np.load(out)


def error(got, expected):
    got, expected = got.astype(np.float64), expected.astype(np.float64)
    return ((got - expected) ** 2).sum() / (expected ** 2).sum()


def compare(args, program, name, card, seed, folder):
    meta, model = folder / "meta.gguf", folder / "model.gguf"
    make_cards.write_gguf(name, card, meta, header_only=True)
    subprocess.run([program, "make", meta, model, seed], check=True, capture_output=True)
    chance = random.Random(int(seed))
    tokens = [chance.randrange(card["keys"]["vocab_size"]) for _ in range(args.tokens)]
    expected = of_llama_cpp(program, "logits", model, tokens, folder)
    steps = of_llama_cpp(program, "steps", model, tokens, folder)
    got = of_moeba(args.moeba, model, tokens, folder)
    same = int((got.argmax(1) == expected.argmax(1)).sum())
    return f"{error(got, expected):.1e} | {same} of {args.tokens} | {error(steps, expected):.1e}"


def unknown(source):
    """Architectures with experts that moeba has no file for."""
    listed = (source / "src/llama-arch.cpp").read_text()
    names = re.findall(r'\{ LLM_ARCH_(\w+), *"([^"]+)"', listed)
    known = {path.stem for path in (ROOT / "models").glob("*.toml")}
    routed = set()
    for path in (source / "src/models").glob("*.cpp"):
        text = path.read_text()
        if "FFN_DOWN_EXPS" in text:
            routed.add(path.stem.replace("-", "").replace("_", ""))
    plain = {name: name.replace("-", "").replace("_", "").replace(".", "") for _, name in names}
    return sorted(name for name, own in plain.items() if own in routed and name not in known)


def main():
    args = arguments()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (args.build or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        program = build(args.source, folder)
        print("| card | seed | error | same best id | llama.cpp, one token at a time |")
        print("|---|--:|--:|--:|--:|")
        failed = False
        for name, card in make_cards.cards("keys", args.cards):
            for seed in args.seeds:
                try:
                    row = compare(args, program, name, card, seed, Path(temporary))
                except subprocess.CalledProcessError as why:
                    # A release may refuse what it has saved itself.
                    who = "moeba" if why.cmd[0] == args.moeba else "llama.cpp"
                    row = f"{who} failed | |"
                    failed |= who == "moeba"
                print(f"| `{name}` | {seed} | {row} |", flush=True)
        print("\nArchitectures with experts that are not known:", ", ".join(unknown(args.source)))
        return failed


if __name__ == "__main__":
    sys.exit(main())
