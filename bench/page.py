#!/usr/bin/env python3
"""Times answers with and without someone who looks at the page: the cost of the experts' stream.

    cargo build --release
    bench/page.py [FILE.gguf] [--moeba PATH] [--ram 50% 100%] [-n TOKENS] [--rounds N] [--viewers N]

The page opens one stream, `/moeba/experts`. curl reads it here and throws it away, as a browser
would take processor time of its own from the same cores. One server answers the same request
again and again: alone, alone again, and watched, in turn, so that the second case says what the
machine's noise is. Prints medians of the milliseconds a token and of the ratios to the answer alone
of the same round, with their quartiles. What a viewer costs the server is steadier in the processor
time of its threads that do not compute (`http`): the difference between watched and alone is given
as a part of all cores' time. Answers must be equal, and a viewer must have read some events, else
it ends with 1.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import serving
from serving import DEMO, MOEBA

CASES = ["alone", "again", "watched"]


def http_seconds(pid):
    """Processor seconds of each thread that does not compute, by thread."""
    spent = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        if (task / "comm").read_text().strip() in ("http", "moeba"):
            spent[task.name] = int((task / "schedstat").read_text().split()[0]) / 1e9
    return spent


def view(port):
    """curl, which reads the stream."""
    url = f"http://127.0.0.1:{port}/moeba/experts"
    return subprocess.Popen(["curl", "-sNo", "/dev/null", url])


def n_bytes_of_events(port, seconds=2):
    """Bytes that a viewer reads in that time; ends the program if there are none."""
    told = subprocess.run(["curl", "-sN", "-m", str(seconds), "-o", "/dev/null", "-w",
                           "%{size_download} %{http_code}",
                           f"http://127.0.0.1:{port}/moeba/experts"], capture_output=True)
    size, status = told.stdout.decode().split()
    if status != "200" or int(size) < 100:
        sys.exit(f"/moeba/experts answers {status} with {size} bytes")
    return int(size)


def answer(args, server):
    """The text, milliseconds a token, and milliseconds of the HTTP threads a second."""
    body = {"prompt": "A branch is a line of work in a tree of versions. Explain it.",
            "n_predict": args.n, "ignore_eos": True, "cache_prompt": False, "temperature": 0.8,
            "seed": 1, "spec": "off"}
    before, start = http_seconds(server.process.pid), time.monotonic()
    status, _, told = serving.post(server.port, "/completion", body)
    seconds, after = time.monotonic() - start, http_seconds(server.process.pid)
    if status != 200:
        sys.exit(told.decode())
    told = json.loads(told)
    spent = sum(all - before.get(thread, 0) for thread, all in after.items())
    return told["content"], told["timings"]["predicted_ms"] / args.n, 1000 * spent / seconds


def in_case(args, server, case):
    if case != "watched":
        return answer(args, server)
    viewers = [view(server.port) for _ in range(args.viewers)]
    try:
        return answer(args, server)
    finally:
        for viewer in viewers:
            viewer.terminate()
            viewer.wait()


def spread(values):
    """A median and the quartiles beside it."""
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.4f} ({low:.4f} to {high:.4f})"


def measure(args, ram):
    """One server, the cases in turn; whether the answers are equal."""
    flags = ["-c", 4096, "--parallel", 1, "-t", 2, "--ram", ram, "--profile", "none"]
    answers = {case: [] for case in CASES}
    with serving.moeba(args.moeba, args.file, flags) as server:
        answer(args, server)
        for i in range(args.rounds):
            for case in CASES[i % 3:] + CASES[:i % 3]:
                answers[case].append(in_case(args, server, case))
        n_bytes = n_bytes_of_events(server.port)
    for case in CASES:
        times = statistics.median(a[1] for a in answers[case])
        ratios = [one[1] / base[1] for one, base in zip(answers[case], answers["alone"])]
        http = statistics.median(a[2] for a in answers[case])
        print(f"{ram:5} {case:8} {times:8.3f} ms a token, ratio {spread(ratios)}; HTTP threads "
              f"{http:.3f} ms a second")
    costs = [watched[2] - alone[2]
             for watched, alone in zip(answers["watched"], answers["alone"])]
    part = statistics.median(costs) / 1000 / os.cpu_count()
    print(f"{ram:5} {args.viewers} watching cost {100 * part:.3f} % of {os.cpu_count()} cores")
    print(f"{ram:5} a viewer who joins reads {n_bytes} bytes in 2 s of rest", flush=True)
    return len({a[0] for of in answers.values() for a in of}) == 1


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("file", nargs="?", default=DEMO)
    parser.add_argument("--moeba", default=MOEBA)
    parser.add_argument("--ram", nargs="+", default=["50%", "100%"])
    parser.add_argument("-n", type=int, default=1024, help="tokens of an answer")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--viewers", type=int, default=1)
    args = parser.parse_args()
    are_equal = [measure(args, ram) for ram in args.ram]
    sys.exit(0 if all(are_equal) else 1)


main()
