#!/usr/bin/env python3
"""How warm a second start is: its first 32 tokens against the 128 behind them.

    cargo build --release
    bench/warm_start.py MODEL.gguf TEXT.txt [--ram 25% 50% 75%] [--rounds 3]

Each round begins without a profile. A first start answers a prompt of the text with 160 tokens and
saves its profile. A second start on the same prompt, with that profile, answers with 32 tokens, a
third with 160: what their times differ by is 128 tokens of a warm cache. Prints Markdown: medians
of milliseconds a token, and their ratio.
"""

import argparse
import json
import statistics
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FIRST, ALL = 32, 160


def seconds(args, folder, ram, n):
    """Time of the tokens of an answer."""
    stats = folder / "stats.json"
    subprocess.run([args.moeba, "run", "-q", args.model, "-f", folder / "prompt.txt", "-n", str(n),
                    "--ignore-eos", "--temp", "0", "--force", "--ram", ram,
                    "--profile", folder / "profile.moeba", "--stats", stats],
                   check=True, stdout=subprocess.DEVNULL)
    found = json.loads(stats.read_text())
    return found["tpot_ms"] * found["generated_tokens"] / 1e3


def measure(args, ram):
    """Milliseconds a token of a second start's first tokens, and of those behind them."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "prompt.txt").write_text(args.text.read_text(encoding="utf-8")[:args.characters],
                                           encoding="utf-8")
        seconds(args, folder, ram, ALL)
        first, whole = seconds(args, folder, ram, FIRST), seconds(args, folder, ram, ALL)
    return 1e3 * first / FIRST, 1e3 * (whole - first) / (ALL - FIRST)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--ram", nargs="+", default=["25%", "50%", "75%"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--characters", type=int, default=1200, help="of the prompt")
    parser.add_argument("--moeba", type=Path, default=ROOT / "target/release/moeba")
    args = parser.parse_args()
    print("| experts in memory | first 32 tokens, ms | the 128 behind, ms | ratio |\n"
          "|---|--:|--:|--:|")
    for ram in args.ram:
        pairs = [measure(args, ram) for _ in range(args.rounds)]
        first, behind = (statistics.median(column) for column in zip(*pairs))
        print(f"| {ram} | {first:.2f} | {behind:.2f} | {first / behind:.2f} |", flush=True)


if __name__ == "__main__":
    main()
