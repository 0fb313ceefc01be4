#!/usr/bin/env python3
"""moeba serve and llama-server on the same file, in turn, with 1 to 8 clients that stream.

    cargo build --release
    bench/vs_llama_server.py FILE.gguf --llama-server PATH [--clients 1,2,4,8] [--rounds 3]
                             [--memory all,50] [-t 2] [-p 256] [-n 64] [--requests 2] [--csv FILE]
                             [--disk-mb-per-second 580]

Each client sends seeded requests one after the other: prompts of random ids that no cache has,
temperature 0, a fixed number of tokens. Both servers have as many slots as there are clients. A
run is a process of its own that has answered one request before; rounds begin with the other
server in turn. Measured at the client: the time to the first token and the gaps between tokens.

--memory: `all`, or the percentage of experts that a memory control group leaves room for, beside
the dense weights, the caches and 300 MiB. moeba gets it as --ram; llama-server maps the file,
without repacking, which would be a second copy. Needs root and control groups (v1 or v2). Both
start with the file out of the page cache, as what is cached before costs a group nothing.

A file of `moeba synth` prints no text: bench/text_vocabulary.py makes a copy that does.
"""

import argparse
import csv
import datetime
import random
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import serving
from serving import MOEBA, ROOT, percentile
from tiers import Group, forget, plan

ENGINES = ["moeba", "llama-server"]
HEAD_ROOM = 300 << 20
FIELDS = ["date", "file", "memory", "clients", "round", "place", "engine", "version", "requests",
          "tokens", "events", "seconds", "tokens_per_second", "first_p50_ms", "first_p99_ms",
          "gap_p50_ms", "gap_p99_ms", "gap_max_ms", "peak_rss_bytes"]


def numbers(text):
    return [int(part) for part in text.split(",")]


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--moeba", type=Path, default=MOEBA)
    parser.add_argument("--llama-server", type=Path, required=True)
    parser.add_argument("--clients", type=numbers, default=[1, 2, 4, 8])
    parser.add_argument("--memory", type=lambda text: text.split(","), default=["all", "50"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=2, help="of each client")
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("-p", "--n-prompt", type=int, default=256)
    parser.add_argument("-n", "--n-gen", type=int, default=64)
    parser.add_argument("--disk-mb-per-second", type=int,
                        help="slow the disk down to this rate where memory is limited")
    parser.add_argument("--parallel", help="slots of moeba, where not as many as clients")
    parser.add_argument("--csv", type=Path, help="every run; appended to if it is there")
    args = parser.parse_args()
    for path in [args.moeba, args.llama_server, args.file]:
        if not path.is_file():
            parser.error(f"{path}: no such file")
    if args.csv is None:
        args.csv = ROOT / "bench/results" / f"{datetime.date.today()}-vs-llama-server.csv"
    return args


def cache_bytes(args, n_clients, n_ctx, budget):
    """Bytes of the KV caches of all clients together, as the dry run names them."""
    serve = [args.moeba, "serve", args.file, "--parallel", n_clients, "-c", n_ctx, "--ram", budget,
             "--dry-run"]
    said = subprocess.run([str(arg) for arg in serve], capture_output=True, text=True, check=True)
    number, unit = re.search(r"KV cache +([0-9.]+) ([KMG])iB", said.stdout + said.stderr).groups()
    return int(float(number) * (1 << 10 * (1 + "KMG".index(unit))))


def start(args, engine, n_clients, percent):
    """A server with its slots, and the control group that it is in."""
    n_ctx = n_clients * (args.n_prompt + args.n_gen + 64)
    common = ["-t", args.threads, "-c", n_ctx]
    group = None
    if percent is not None:
        experts, dense = plan(args)
        budget = experts * percent // 100
        caches = cache_bytes(args, n_clients, n_ctx, budget)
        read_bps = args.disk_mb_per_second and args.disk_mb_per_second * 10**6
        group = Group(dense + budget + caches + HEAD_ROOM, read_bps, args.file)
        forget(args.file)
    if engine == "moeba":
        ram = ["--ram", budget] if group else []
        slots = args.parallel or n_clients
        extra = ["--parallel", slots, "--kv-ram", 1, "--profile", "none", *ram]
        server = serving.moeba(args.moeba, args.file, common + extra, start=300, group=group)
    else:
        port = serving.free_port()
        extra = ["-np", n_clients, "-cram", 0, "--no-ui"] + (["--no-repack"] if group else [])
        command = [args.llama_server, "-m", args.file, "--port", port, *common, *extra]
        server = serving.Server(command, port, start=300, group=group)
    return server, group


def body(args, number):
    """A request that follows from its number."""
    chance = random.Random(number)
    ids = [chance.randrange(1000, 50_000) for _ in range(args.n_prompt)]
    return {"prompt": ids, "n_predict": args.n_gen, "temperature": 0, "seed": number,
            "ignore_eos": True, "stream": True, "cache_prompt": False,
            # Single bytes: llama-server ends an answer that is not UTF-8 with an error.
            "logit_bias": [[id, False] for id in range(256)]}


def client(args, port, first, results):
    """A client's requests; for each: times of its events from the request on, and its tokens."""
    for i in range(args.requests):
        begin = time.monotonic()
        connection = serving.send(port, "/completion", body(args, first + i))
        answer = connection.getresponse()
        if answer.status != 200:
            raise ValueError(f"status {answer.status}: {answer.read()[:500]}")
        times, n_tokens = [], None
        for when, event in serving.events(answer):
            if "error" in event:
                raise ValueError(f"an answer failed: {event}")
            if event.get("content"):
                times.append(when - begin)
            if event.get("stop"):
                n_tokens = event["timings"]["predicted_n"]
        connection.close()
        results.append((times, n_tokens))


def run(args, engine, n_clients, number, percent):
    """A row of figures."""
    server, group = start(args, engine, n_clients, percent)
    with server:
        warm = body(args, 1) | {"n_predict": 4, "stream": False, "prompt": [2000, 3000]}
        assert serving.post(server.port, "/completion", warm)[0] == 200
        results = []
        threads = []
        begin = time.monotonic()
        for i in range(n_clients):
            first = 1_000_000 * (number + 1) + 1000 * i
            target = threading.Thread(target=client, args=(args, server.port, first, results))
            target.start()
            threads.append(target)
        for thread in threads:
            thread.join()
        seconds = time.monotonic() - begin
        rss = server.status("VmHWM") << 10
    if group:
        group.__exit__()
    if len(results) != n_clients * args.requests or not all(times for times, _ in results):
        sys.exit(f"{engine}: {len(results)} answers of {n_clients * args.requests}")
    firsts = [1e3 * times[0] for times, _ in results]
    gaps = [1e3 * (b - a) for times, _ in results for a, b in zip(times, times[1:])]
    n_tokens = sum(n for _, n in results)
    return {"requests": len(results), "tokens": n_tokens,
            "events": sum(len(times) for times, _ in results), "seconds": round(seconds, 3),
            "tokens_per_second": n_tokens / seconds,
            "first_p50_ms": percentile(firsts, 0.5), "first_p99_ms": percentile(firsts, 0.99),
            "gap_p50_ms": percentile(gaps, 0.5), "gap_p99_ms": percentile(gaps, 0.99),
            "gap_max_ms": max(gaps, default=0), "peak_rss_bytes": rss}, firsts, gaps


def version(binary):
    """The text in brackets behind the number."""
    found = subprocess.run([binary, "--version"], capture_output=True, text=True)
    text = found.stdout + found.stderr
    return (re.search(r"\(([^)]*)\)", text) or ["", text[:40]])[1]


def table(kept):
    print("| experts in memory | clients | engine | first token p50, ms | p99 | gap p50, ms | p99 "
          "| max | tokens/s |")
    print("|---|--:|---|--:|--:|--:|--:|--:|--:|")
    for (memory, n_clients, engine), rows in kept.items():
        firsts = [value for _, firsts, _ in rows for value in firsts]
        gaps = [value for _, _, gaps in rows for value in gaps]
        rate = percentile([row["tokens_per_second"] for row, _, _ in rows], 0.5)
        cells = [percentile(firsts, 0.5), percentile(firsts, 0.99), percentile(gaps, 0.5),
                 percentile(gaps, 0.99), max(gaps, default=0), rate]
        share = "all" if memory == "all" else f"{memory} %"
        print(f"| {share} | {n_clients} | {engine} | "
              + " | ".join(f"{value:,.1f}" for value in cells) + " |")


def main():
    args = arguments()
    # `plan` asks for the model by this name.
    args.model = args.file
    args.csv.parent.mkdir(parents=True, exist_ok=True)
    versions = {"moeba": version(args.moeba), "llama-server": version(args.llama_server)}
    is_new = not args.csv.exists()
    kept = {}
    with open(args.csv, "a", newline="") as out:
        writer = csv.DictWriter(out, FIELDS, lineterminator="\n")
        if is_new:
            writer.writeheader()
        cases = [(n, m, c) for n in range(args.rounds) for m in args.memory for c in args.clients]
        for number, memory, n_clients in cases:
            percent = None if memory == "all" else int(memory)
            order = ENGINES if number % 2 == 0 else ENGINES[::-1]
            for place, engine in enumerate(order):
                row, firsts, gaps = run(args, engine, n_clients, number, percent)
                kept.setdefault((memory, n_clients, engine), []).append((row, firsts, gaps))
                date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
                writer.writerow({"date": date, "file": args.file.name, "memory": memory,
                                 "clients": n_clients, "round": number, "place": place,
                                 "engine": engine, "version": versions[engine], **row})
                out.flush()
                print(f"round {number + 1}: {memory}, {n_clients} clients, {engine}: first "
                      f"{row['first_p50_ms']:.0f} ms, gap {row['gap_p50_ms']:.1f} ms, "
                      f"{row['tokens_per_second']:.1f} tokens/s", file=sys.stderr, flush=True)
    ordered = {key: kept[key] for memory in args.memory for c in args.clients
               for key in [(memory, c, engine) for engine in ENGINES] if key in kept}
    table(ordered)
    print(f"\nmoeba {versions['moeba']}, llama-server {versions['llama-server']}; "
          f"{args.threads} threads, prompts of {args.n_prompt}, answers of {args.n_gen}, "
          f"{args.requests} requests a client, {args.rounds} rounds.")


if __name__ == "__main__":
    main()
