#!/usr/bin/env python3
"""How warm a second start is: its first 32 tokens against the same tokens in a warm process.

    cargo build --release
    bench/warm_start.py MODEL.gguf TEXT.txt [--ram 25% 50% 75%] [--rounds 5]

Each round begins without a profile. A first server answers a prompt of the text with 160 tokens and
saves its profile. A second one with that profile answers the same prompt with 32 tokens, which are
its first, and then three times more. Greedy, so all four answers are the same tokens by the same
experts. Prints Markdown: medians of milliseconds a token, the first answer's and the later ones',
and the median of the rounds' ratios.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from serving import MOEBA, moeba, post

FIRST, ALL, N_WARM = 32, 160, 3


def answer(args, server, n):
    """Milliseconds a token of an answer of n tokens."""
    body = {"prompt": args.prompt, "n_predict": n, "temperature": 0, "ignore_eos": True,
            "cache_prompt": False}
    status, _, text = post(server.port, "/completion", body)
    assert status == 200, text
    return json.loads(text)["timings"]["predicted_per_token_ms"]


def measure(args, ram):
    """Milliseconds a token of a second start's first answer, and of the same one later."""
    with tempfile.TemporaryDirectory() as folder:
        flags = ["-q", "--ram", ram, "--profile", Path(folder) / "profile.moeba"]
        with moeba(args.moeba, args.model, flags) as server:
            answer(args, server, ALL)
        with moeba(args.moeba, args.model, flags) as server:
            first = answer(args, server, FIRST)
            later = statistics.median(answer(args, server, FIRST) for _ in range(N_WARM))
    return first, later


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--ram", nargs="+", default=["25%", "50%", "75%"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--characters", type=int, default=1200, help="of the prompt")
    parser.add_argument("--moeba", type=Path, default=MOEBA)
    args = parser.parse_args()
    args.prompt = args.text.read_text(encoding="utf-8")[:args.characters]
    print("| experts in memory | first 32 tokens, ms | the same later, ms | ratio |\n"
          "|---|--:|--:|--:|")
    for ram in args.ram:
        pairs = [measure(args, ram) for _ in range(args.rounds)]
        first, later = (statistics.median(column) for column in zip(*pairs))
        ratio = statistics.median(first / later for first, later in pairs)
        print(f"| {ram} | {first:.2f} | {later:.2f} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
