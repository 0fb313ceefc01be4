#!/usr/bin/env python3
"""Every published shape and every format beside llama.cpp: one table.

    cargo build --release
    bench/formats.py --llama-bench PATH [--folder DIR] [--only NAME,...] [--rounds 3] [--csv FILE]

Makes a file of random weights for each row with `moeba synth`, measures it with both engines in
turn (`vs_llama_cpp.py`: a prompt of 512 tokens and decode of 64 with all cores, decode of 64 with
one thread) and removes it again. A file in the folder under a row's name is measured as it is and
stays. Ratios above 1 are in favour of moeba; the last column is what one thread of moeba reads, as
a share of what a loop that only reads gets from the same pages.

Prints Markdown; every run goes to the CSV file (bench/results/DATE-formats.csv). Nothing else
should run on the machine.
"""

import argparse
import csv
import datetime
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import vs_llama_cpp as pair

PROMPT, DECODE = 512, 64

# (preset, type, layers): published shapes in their usual types, then all types in one shape.
SHAPES = [("qwen3-30b-a3b", "q4_k", 8), ("granite-3.0-1b-a400m", "q4_k_m", 24),
          ("qwen1.5-moe", "q4_k_m", 4), ("phi-3.5-moe", "q4_k_m", 2), ("mixtral-8x7b", "q4_k_m", 2),
          ("gpt-oss-20b", "mxfp4_moe", 4), ("deepseek-v2-lite", "q4_k_m", 4),
          ("llama-4-scout", "q4_k_m", 4), ("minimax-m2", "q4_k_m", 2),
          ("gemma-4-26b-a4b", "q4_k_m", 6), ("glm-5", "q4_k_m", 4),
          ("kimi-linear-48b-a3b", "q4_k_m", 4)]
TYPES = ["f32", "f16", "bf16", "q8_0", "q6_k", "q5_k_m", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl",
         "iq4_xs", "q3_k_m", "q2_k", "tq2_0", "tq1_0"]
ROWS = SHAPES + [("qwen3-30b-a3b", ty, 1 if ty == "f32" else 2) for ty in TYPES]


def name_of(row):
    preset, ty, layers = row
    return f"{preset}-{layers}-{ty}"


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--moeba", type=Path, default=pair.ROOT / "target/release/moeba")
    parser.add_argument("--llama-bench", type=Path, required=True)
    parser.add_argument("--folder", type=Path, help="for the files [default: a temporary one]")
    parser.add_argument("--only", help="rows whose name contains one of these, by commas")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--csv", type=Path, help="every run; appended to if it is there")
    args = parser.parse_args()
    args.cold, args.n_depth = False, [0]
    if args.csv is None:
        args.csv = pair.ROOT / "bench/results" / f"{datetime.date.today()}-formats.csv"
    return args


def measure(args, file):
    """Every run of a file, as rows of the CSV file."""
    args.files = [file]
    args.threads, args.n_prompt, args.n_gen = [os.cpu_count()], [PROMPT], [DECODE]
    yield from pair.measure(args)
    args.threads, args.n_prompt = [1], [0]
    yield from pair.measure(args)


def ratio(rows, test, threads):
    """The median of the rounds' ratios: what disturbs a round disturbs both engines."""
    rows = [row for row in rows if row["test"] == test and row["threads"] == threads]
    ours, theirs = ([row["tokens_per_second"] for row in rows if row["engine"] == engine]
                    for engine in pair.ENGINES)
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def line(name, rows):
    all_cores = os.cpu_count()
    ratios = [ratio(rows, f"pp{PROMPT}", all_cores), ratio(rows, f"tg{DECODE}", all_cores),
              ratio(rows, f"tg{DECODE}", 1)]
    single = [row for row in rows if row["threads"] == 1]
    share = pair.share(single, "read_gb_per_second", "machine_read_gb_per_second")
    cells = [name, *(f"{value:.2f}" for value in ratios), share]
    print("| " + " | ".join(cells) + " |", flush=True)
    return ratios


def run(args, folder, writer, out):
    print("| shapes, layers, types | prompt 512 | decode 64 | decode 64, 1 thread "
          "| of the read rate |\n|---|--:|--:|--:|--:|")
    every = []
    wanted = args.only.split(",") if args.only else [""]
    for row in ROWS:
        name = name_of(row)
        if not any(part in name for part in wanted):
            continue
        file, (preset, ty, layers) = folder / f"{name}.gguf", row
        is_there = file.exists()
        if not is_there:
            subprocess.run([args.moeba, "synth", preset, "--type", ty, "--layers", str(layers),
                            "-q", "-o", file], check=True)
        rows = []
        for found in measure(args, file):
            writer.writerow(found)
            out.flush()
            rows.append(found)
            print(f"{name}: {found['test']}, {found['threads']} threads, {found['engine']}: "
                  f"{found['tokens_per_second']:.2f} tokens/s", file=sys.stderr)
        every.append(line(name, rows))
        if not is_there:
            file.unlink()
    if every:
        medians = [f"{statistics.median(column):.2f}" for column in zip(*every)]
        print("| median | " + " | ".join(medians) + " | |")


def main():
    args = arguments()
    args.csv.parent.mkdir(parents=True, exist_ok=True)
    is_new = not args.csv.exists()
    with open(args.csv, "a", newline="") as out, tempfile.TemporaryDirectory() as temporary:
        writer = csv.DictWriter(out, pair.FIELDS, lineterminator="\n")
        if is_new:
            writer.writeheader()
        run(args, args.folder or Path(temporary), writer, out)


if __name__ == "__main__":
    main()
