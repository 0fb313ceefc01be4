#!/usr/bin/env python3
"""The speed that a dry run forecasts beside the one that `moeba bench` measures.

    cargo build --release
    bench/forecast.py FILE.gguf... [--moeba PATH] [--ram 100%,50%] [-n 64] [-r 3] [-t 2] [--csv OUT]

For each file and each memory, in turn: `moeba run FILE --ram R --dry-run`, whose last lines name
tokens per second, one number or a range, and `moeba bench -n N`. Prints how far the measured speed
is outside of the forecast: 0 % within the range. Ends with 1 if a file is more than 25 % off.

Files of `moeba synth` route uniformly: their experts repeat by chance alone.
"""

import argparse
import csv
import json
import re
import subprocess
import sys

from serving import MOEBA

BOUND = 0.25


def forecast(args, file, ram):
    run = [args.moeba, "run", file, "--ram", ram, "-t", args.threads, "--dry-run"]
    said = subprocess.run([str(arg) for arg in run], capture_output=True, text=True, check=True)
    found = re.search(r"decode here\s+([0-9.]+)(?:–([0-9.]+))? t/s", said.stdout + said.stderr)
    least, most = found[1], found[2] or found[1]
    return float(least), float(most)


def measured(args, file, ram):
    run = [args.moeba, "bench", file, "--ram", ram, "-t", args.threads, "-p", "0", "-n",
           args.n_gen, "-r", args.repetitions, "--no-machine", "--profile", "none", "-o", "json"]
    said = subprocess.run([str(arg) for arg in run], capture_output=True, text=True, check=True)
    return json.loads(said.stdout)[0]["avg_ts"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", nargs="+")
    parser.add_argument("--moeba", default=MOEBA)
    parser.add_argument("--ram", default=["100%", "50%"], type=lambda text: text.split(","))
    parser.add_argument("-n", "--n-gen", type=int, default=64)
    parser.add_argument("-r", "--repetitions", type=int, default=3)
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("--csv", help="the rows, too")
    args = parser.parse_args()
    rows = []
    for file in args.file:
        for ram in args.ram:
            least, most = forecast(args, file, ram)
            speed = measured(args, file, ram)
            off = min(speed / least - 1, 0) or max(speed / most - 1, 0)
            rows.append([file.rsplit("/", 1)[-1], ram, least, most, round(speed, 2), round(off, 3)])
            print(f"{rows[-1][0]:<36} {ram:>5}  {least:7.1f}–{most:<7.1f} {speed:7.1f} t/s"
                  f"  {100 * off:+.0f} %", flush=True)
    if args.csv:
        with open(args.csv, "w", newline="") as out:
            csv.writer(out).writerows([["file", "ram", "least", "most", "measured", "off"], *rows])
    sys.exit(any(abs(row[-1]) > BOUND for row in rows))


if __name__ == "__main__":
    main()
