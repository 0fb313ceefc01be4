#!/usr/bin/env python3
"""moeba and llama.cpp on the same files, in turn; medians and ratios.

    cargo build --release
    bench/vs_llama_cpp.py --llama-bench PATH FILE.gguf... [-t 2] [-p 512] [-n 128] [-d 0]
                          [--rounds 5] [--cold] [--csv FILE]

Each round runs each test (pp512: a prompt of 512; tg128: 128 tokens decoded) with both engines, one
right after the other, and the next round begins with the other one; every run is a process of its
own, with the engine's own warm-up. So whatever the machine does meanwhile, it does to both. Before
each test of a round `moeba bench` measures what memory, the file's own pages or others, and the
vector units give.

--cold: the time from the start of a process to its first decoded token and its end, with the
file's pages dropped from the page cache before. llama.cpp reads the file by mmap, its default.

Prints Markdown; every single run goes to the CSV file (bench/results/DATE-vs-llama-cpp.csv).
Installs nothing and needs nothing but Python. Nothing else should run on the machine.
"""

import argparse
import csv
import ctypes
import datetime
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENGINES = ["moeba", "llama.cpp"]
FIELDS = ["date", "file", "file_bytes", "test", "threads", "round", "place", "engine", "commit",
          "tokens_per_second", "seconds", "peak_rss_bytes", "read_gb_per_second",
          "giga_ops_per_second", "machine_read_gb_per_second", "machine_giga_ops_per_second",
          "machine_steady"]


def numbers(text):
    return [int(part) for part in text.split(",")]


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--moeba", type=Path, default=ROOT / "target/release/moeba")
    parser.add_argument("--llama-bench", type=Path, required=True)
    parser.add_argument("-t", "--threads", type=numbers, default=[os.cpu_count()])
    parser.add_argument("-p", "--n-prompt", type=numbers, default=[512], help="0 for none")
    parser.add_argument("-n", "--n-gen", type=numbers, default=[128], help="0 for none")
    parser.add_argument("-d", "--n-depth", type=numbers, default=[0],
                        help="tokens that are in the context before")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cold", action="store_true", help="time cold starts as well")
    parser.add_argument("--csv", type=Path, help="every run; appended to if it is there")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error("--rounds: at least one")
    for path in [args.moeba, args.llama_bench, *args.files]:
        if not path.is_file():
            parser.error(f"{path}: no such file")
    if args.csv is None:
        args.csv = ROOT / "bench/results" / f"{datetime.date.today()}-vs-llama-cpp.csv"
    return args


def tests(args):
    """(name, prompt, decoded, depth) in llama-bench's order and names."""
    for depth in args.n_depth:
        pairs = [(n, 0) for n in args.n_prompt if n] + [(0, n) for n in args.n_gen if n]
        for prompt, gen in pairs:
            name = f"pp{prompt}" if prompt else f"tg{gen}"
            yield name + (f" @ d{depth}" if depth else ""), prompt, gen, depth


def timed(command):
    """stdout, seconds from start to end, and the most memory that was resident."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        start = time.monotonic()
        process = subprocess.Popen([str(part) for part in command], stdin=subprocess.DEVNULL,
                                   stdout=out, stderr=err)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.monotonic() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        if process.returncode != 0:
            err.seek(0)
            last = err.read().decode(errors="replace").strip().splitlines()[-5:]
            sys.exit(f"{command[0]} ended with {process.returncode}:\n" + "\n".join(last))
        return out.read().decode(), seconds, usage.ru_maxrss * 1024


def run(args, engine, file, threads, test, extra=()):
    """One process: the one row of its JSON, its seconds and its memory."""
    _, prompt, gen, depth = test
    command = [args.moeba, "bench"] if engine == "moeba" else [args.llama_bench]
    command += ["-m", file, "-t", threads, "-p", prompt, "-n", gen, "-d", depth, "-r", 1,
                "-o", "json", *extra]
    if engine == "moeba":
        command.append("--no-machine")
    text, seconds, rss = timed(command)
    rows = json.loads(text)
    if len(rows) != 1:
        sys.exit(f"{command[0]}: one row was expected, not {len(rows)}")
    return rows[0], seconds, rss


def machine(args, file, threads):
    """The memory read rate of so many threads, and the unit that moeba's kernels use."""
    command = [args.moeba, "bench", "-m", file, "-t", threads, "-p", 0, "-n", 1, "-r", 1,
               "--no-warmup", "-o", "json"]
    found = json.loads(timed(command)[0])[0]
    return {"machine_read_gb_per_second": found["machine_read_gb_per_second"],
            "machine_giga_ops_per_second": found["machine_giga_ops_per_second"],
            "machine_steady": found["machine_is_steady"]}


def resident_bytes(file):
    """Bytes of a file that are in the page cache (mincore)."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(file, "rb") as opened:
        size = os.fstat(opened.fileno()).st_size
        with mmap.mmap(opened.fileno(), size, access=mmap.ACCESS_COPY) as memory:
            first = ctypes.c_char.from_buffer(memory)
            pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
            failed = libc.mincore(ctypes.c_void_p(ctypes.addressof(first)),
                                  ctypes.c_size_t(size), pages)
            del first
    if failed:
        raise OSError(ctypes.get_errno(), "mincore")
    return sum(page & 1 for page in pages) * mmap.PAGESIZE


def drop_pages(file):
    """Answers whether the file is out of the page cache."""
    with open(file, "rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    left = resident_bytes(file)
    if left > 0.01 * os.path.getsize(file):
        print(f"{file}: {left >> 20} MiB stay in the page cache (someone has them mapped, or the "
              "file system keeps them): no cold start", file=sys.stderr)
        return False
    return True


def in_turn(number):
    """The engines, the first one another in each round."""
    return ENGINES if number % 2 == 0 else ENGINES[::-1]


def measure(args):
    """Every run, as a row of the CSV file."""
    for number in range(args.rounds):
        for threads in args.threads:
            for file in args.files:
                cold = ("cold start", 0, 1, 0)
                todo = list(tests(args)) + ([cold] if args.cold else [])
                for test in todo:
                    # Right before: what memory gives changes within minutes where others share it.
                    walls = machine(args, file, threads)
                    for place, engine in enumerate(in_turn(number)):
                        if test is cold and not drop_pages(file):
                            continue
                        extra = ["--no-warmup"] if test is cold else []
                        row, seconds, rss = run(args, engine, file, threads, test, extra)
                        yield {"date": row["test_time"], "file": file.name,
                               "file_bytes": file.stat().st_size, "test": test[0],
                               "threads": threads, "round": number, "place": place,
                               "engine": engine, "commit": row["build_commit"],
                               "tokens_per_second": row["avg_ts"], "seconds": seconds,
                               "peak_rss_bytes": rss,
                               "read_gb_per_second": row.get("read_gb_per_second"),
                               "giga_ops_per_second": row.get("giga_ops_per_second"), **walls}


def median(rows, engine, key):
    values = [row[key] for row in rows if row["engine"] == engine and row[key] is not None]
    return statistics.median(values) if values else None


def share(rows, key, most):
    """The median of each run's share in what the machine gave right before it."""
    shares = [row[key] / row[most] for row in rows
              if row["engine"] == "moeba" and row[key] is not None and row[most]]
    return f"{100 * statistics.median(shares):.0f} %" if shares else "-"


def number_text(value, digits):
    return "-" if value is None else f"{value:,.{digits}f}"


def line(file, test, threads, rows):
    """A line of the table; ratios above 1 are in favour of moeba."""
    cold = test == "cold start"
    key, digits = ("seconds", 3) if cold else ("tokens_per_second", 1)
    ours, theirs = (median(rows, engine, key) for engine in ENGINES)
    ratio = "-"
    if ours and theirs:
        ratio = f"{theirs / ours if cold else ours / theirs:.2f}"
    def rss(engine):
        value = median(rows, engine, "peak_rss_bytes")
        return number_text(value and value / 2**20, 0)
    walls = ["-", "-", "-", "-"]
    if not cold:
        read, ops = (median(rows, "moeba", key)
                     for key in ["read_gb_per_second", "giga_ops_per_second"])
        walls = [number_text(read, 1),
                 share(rows, "read_gb_per_second", "machine_read_gb_per_second"),
                 number_text(ops, 0),
                 share(rows, "giga_ops_per_second", "machine_giga_ops_per_second")]
    unit = " (s)" if cold else ""
    cells = [file, test + unit, threads, number_text(ours, digits), number_text(theirs, digits),
             ratio, *walls, rss("moeba"), rss("llama.cpp")]
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def table(rows):
    print("| file | test | threads | moeba, t/s | llama.cpp, t/s | ratio | GB/s | of read rate "
          "| GOP/s | of peak | RSS, MiB | llama.cpp's |")
    print("|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|")
    cases = {}
    for row in rows:
        cases.setdefault((row["file"], row["test"], row["threads"]), []).append(row)
    for case, of_case in cases.items():
        print(line(*case, of_case))
    for engine in ENGINES:
        commits = {row["commit"] for row in rows if row["engine"] == engine}
        print(f"\n{engine}: {', '.join(sorted(commits))}", end="")
    ours = [row for row in rows if row["engine"] == "moeba"]
    unsteady = sum(not row["machine_steady"] for row in ours)
    print(f"\n\nMedians of {len({row['round'] for row in rows})} rounds; the machine was too busy "
          f"to be measured before {unsteady} of {len(ours)} tests.")


def main():
    args = arguments()
    args.csv.parent.mkdir(parents=True, exist_ok=True)
    rows = []
    is_new = not args.csv.exists()
    with open(args.csv, "a", newline="") as out:
        writer = csv.DictWriter(out, FIELDS, lineterminator="\n")
        if is_new:
            writer.writeheader()
        for row in measure(args):
            writer.writerow(row)
            out.flush()
            rows.append(row)
            print(f"round {row['round'] + 1} of {args.rounds}: {row['file']} {row['test']} "
                  f"{row['engine']}: {row['tokens_per_second']:.2f} tokens/s", file=sys.stderr)
    if rows:
        table(rows)


if __name__ == "__main__":
    main()
