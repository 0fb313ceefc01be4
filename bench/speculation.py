#!/usr/bin/env python3
"""Times answers with `spec` auto, always and off in turn: the cost and the gain of speculation.

    cargo build --release
    bench/speculation.py [FILE.gguf] [--moeba PATH] [--ram 25% 50% 100%] [--part warm cold]
                         [-n TOKENS] [--rounds N]

Prose, code and JSON, continued with a temperature of 0.8, and greedily a text that repeats itself:
warm, by one server that has answered the same before, and cold, by a server started for each
answer. Prints medians of milliseconds a token and the ratios to `off`; texts must be equal, else it
ends with 1.
"""

import argparse
import json
import statistics
import sys

import serving
from serving import DEMO, MOEBA

SENTENCE = "A queue is a list in which the first item that was added is the first to leave. "
TEXTS = {
    "prose": "A branch is a line of work in a tree of versions. Explain in your own words what it "
             "is for and how people use it when they work together on a program.",
    "code": "def read(path):\n    with open(path) as f:\n        return f.read()\n\n"
            "def write(path, text):\n    with open(path, 'w') as f:\n        f.write(text)\n\n"
            "def append(path, text):\n",
    "JSON": '{"users": [{"id": 1, "name": "Ann", "active": true}, '
            '{"id": 2, "name": "Bob", "active": false}, {"id": 3, "name":',
    "copy": 6 * SENTENCE,
}


def serve(args, ram, mode):
    flags = ["-c", 2048, "--parallel", 1, "-t", 2, "--ram", ram, "--profile", "none"]
    return serving.moeba(args.moeba, args.file, [*flags, "--spec", mode])


def answer(args, server, text, mode):
    """The continuation, milliseconds a token, drafts and those that were right."""
    body = {"prompt": TEXTS[text], "n_predict": args.n, "ignore_eos": True, "cache_prompt": False,
            "temperature": 0 if text == "copy" else 0.8, "seed": 1, "spec": mode}
    status, _, told = serving.post(server.port, "/completion", body)
    if status != 200:
        sys.exit(told.decode())
    told = json.loads(told)
    times = told["timings"]
    drafts = times.get("draft_n", 0), times.get("draft_n_accepted", 0)
    return told["content"], times["predicted_ms"] / args.n, drafts


def report(name, answers):
    """A line of a case: answers by mode."""
    medians = {mode: statistics.median(a[1] for a in of) for mode, of in answers.items()}
    texts = {a[0] for of in answers.values() for a in of}
    ratios = {mode: ms / medians["off"] for mode, ms in medians.items() if mode != "off"}
    shown = ", ".join(f"{mode} {ratio:.3f} {answers[mode][-1][2]}"
                      for mode, ratio in ratios.items())
    print(f"{name:18} off {medians['off']:7.2f} ms, {shown}", flush=True)
    return len(texts) == 1


def warm(args, ram, text):
    """One server, modes in turn."""
    answers = {"off": [], "auto": [], "always": []}
    with serve(args, ram, "auto") as server:
        answer(args, server, text, "off")
        for i in range(args.rounds):
            modes = ["off", "auto", "always"]
            for mode in modes if i % 2 == 0 else modes[::-1]:
                answers[mode].append(answer(args, server, text, mode))
    return report(f"{ram} warm {text}", answers)


def cold(args, ram, text):
    """A server for each answer."""
    answers = {"off": [], "auto": []}
    for i in range(args.rounds):
        for mode in ["off", "auto"] if i % 2 == 0 else ["auto", "off"]:
            with serve(args, ram, mode) as server:
                answers[mode].append(answer(args, server, text, mode))
    return report(f"{ram} cold {text}", answers)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("file", nargs="?", default=DEMO)
    parser.add_argument("--moeba", default=MOEBA)
    parser.add_argument("--ram", nargs="+", default=["25%", "50%", "100%"])
    parser.add_argument("--part", nargs="+", choices=["warm", "cold"], default=["warm", "cold"])
    parser.add_argument("-n", type=int, default=192, help="tokens of an answer")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    runs = [{"warm": warm, "cold": cold}[part] for part in args.part]
    cases = [(run, ram, text) for ram in args.ram for run in runs for text in TEXTS]
    are_equal = [run(args, ram, text) for run, ram, text in cases]
    sys.exit(0 if all(are_equal) else 1)


main()
