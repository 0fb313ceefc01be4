#!/usr/bin/env python3
"""Routing traces of the demo model and of a sibling of another shape, on held-out text.

    cargo build --release
    moeba convert SIBLING_DIR -o sibling.gguf --outtype q6_k
    bench/traces.py --sibling sibling.gguf --prose P.txt --reference R.txt --code C.txt [--full DIR]

The texts are those that `models/demo/data.py` holds out: nothing that the models were trained on.
Writes OUT/MODEL.mtrace, one file a model with all three kinds of text in it: compact, each router
on the activation of the layer before it, no hidden states. bench/traces has every tenth request
of such a recording. With --full DIR also DIR/MODEL-full.mtrace: longer requests, all distances,
hidden states.
"""

import argparse
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KINDS = ["prose", "reference", "code"]
# The separator of documents in the held-out texts: a token of its own, not text.
SEPARATOR = "<|endoftext|>"
SMALL = ["--n-prompt", "8-24", "--n-gen", "30", "--ahead", "1"]
FULL = ["--n-prompt", "32-96", "--n-gen", "64", "--ahead", "6", "--hidden"]


def plain_texts(args, folder):
    """The texts without separators, in `folder`."""
    for kind in KINDS:
        text = getattr(args, kind).read_text(encoding="utf-8")
        (folder / f"{kind}.txt").write_text(text.replace(SEPARATOR, "\n"), encoding="utf-8")


def record(args, model, texts, out, options):
    command = [args.moeba, "trace", "record", model, "-o", out, "--requests", args.requests,
               "--seed", args.seed, "--threads", args.threads, *options]
    for kind in KINDS:
        command += ["-f", texts / f"{kind}.txt", "--kind", kind]
    subprocess.run([str(part) for part in command], check=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--demo", type=Path, default=ROOT / "models/demo/moeba-demo.gguf")
    parser.add_argument("--sibling", type=Path, help="GGUF file; without it, the demo model only")
    for kind in KINDS:
        parser.add_argument(f"--{kind}", type=Path, required=True, help="held-out text")
    parser.add_argument("--out", type=Path, default=ROOT / "target/traces")
    parser.add_argument("--full", type=Path, help="folder for the larger traces")
    parser.add_argument("--moeba", default=ROOT / "target/release/moeba")
    parser.add_argument("--requests", type=int, default=64, help="of each kind of text")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=-1)
    args = parser.parse_args()
    models = {"demo": args.demo}
    if args.sibling:
        models["sibling"] = args.sibling
    for folder in [args.out, args.full]:
        if folder:
            folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        texts = Path(folder)
        plain_texts(args, texts)
        for name, model in models.items():
            record(args, model, texts, args.out / f"{name}.mtrace", SMALL)
            if args.full:
                record(args, model, texts, args.full / f"{name}-full.mtrace", FULL)


if __name__ == "__main__":
    main()
