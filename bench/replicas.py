#!/usr/bin/env python3
"""One, two and three replicas of `moeba serve --ray` on this machine, each with a disk of a rate.

    cargo build --release
    python3 -m venv ray && ray/bin/pip install -r tests/ray/requirements.txt
    ray/bin/python bench/replicas.py [FILE.gguf] [--rate 4M] [--replicas 1 2 3] [--burst]

The file is the demo model's unless another is given; the rate of the disk should be so that its
prompts and tokens take as long as those of a model that is worth it. Three Ray nodes share this
machine; each replica is in a control group that reads so many bytes a second (root, control groups
v1 or v2), so that disks bound it and two cores suffice. Clients hold conversations of some turns,
two clients a replica, without pauses, for --seconds. The figures: answers an hour, tokens a second,
the time to the first token, and the share of second and later turns whose beginning was in the
cache. `-o` writes them for bench/fleet.py. `--burst` then has a burst of requests take
`--replicas 1..3` from one to three and back, with all answers alike.
"""

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests/ray"), str(ROOT / "bench")]
WORDS = "branch file shell commit package server memory network folder pointer".split()


def size(text):
    return int(text[:-1]) << {"K": 10, "M": 20, "G": 30}[text[-1]]


def limited(folder, number, args):
    """A program that starts moeba in a control group with a disk of its own rate."""
    from tiers import Group

    group = Group.__new__(Group)
    group.root, group.paths = Path("/sys/fs/cgroup"), []
    group.name = f"moeba-replica-{os.getpid()}-{number}"
    group.is_v1 = (group.root / "memory").is_dir()
    group.limit_disk(args.model, "bps", size(args.rate))
    path = Path(folder) / f"moeba-{number}"
    enter = "".join(f"echo $$ > {its}/cgroup.procs\n" for its in group.paths)
    path.write_text(f'#!/bin/sh\n{enter}exec {args.moeba} "$@"\n')
    path.chmod(0o755)
    return group, path


class Client(threading.Thread):
    """Conversations one after the other, until the time is over."""

    def __init__(self, url, seed, args, end):
        super().__init__(daemon=True)
        self.url, self.args, self.end = url, args, end
        self.chance, self.answers = random.Random(seed), []
        self.start()

    def run(self):
        while time.monotonic() < self.end:
            messages = []
            for turn in range(self.args.turns):
                text = " ".join(self.chance.choice(WORDS) for _ in range(self.args.words))
                messages.append({"role": "user", "content": text})
                self.answers.append(self.ask(messages, turn))
                if time.monotonic() > self.end:
                    return

    def ask(self, messages, turn):
        from cluster import CHAT, post

        body = {"messages": messages, "max_tokens": self.args.tokens, "ignore_eos": True,
                "stream": True, "stream_options": {"include_usage": True}}
        start, first, said, last = time.monotonic(), None, "", {}
        with post(self.url + CHAT, body, timeout=600) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    last = json.loads(line[6:])
                    for choice in last["choices"]:
                        text = choice["delta"].get("content")
                        if text and first is None:
                            first = time.monotonic()
                        said += text or ""
        messages.append({"role": "assistant", "content": said})
        timings, usage = last["timings"], last["usage"]
        end = time.monotonic()
        return {
            "start": start, "end": end, "ttft": (first or end) - start, "turn": turn,
            "n_prompt": usage["prompt_tokens"], "n_answer": usage["completion_tokens"],
            "n_cached": usage["prompt_tokens_details"]["cached_tokens"],
            "prompt_s": timings["prompt_ms"] / 1e3, "decode_s": timings["predicted_ms"] / 1e3,
        }


def measure(machines, n, args):
    from cluster import App

    app = App(
        machines, "--replicas", str(n), "-c", str(args.context), "--parallel", "1", "-t", "1",
        "--ram", args.ram, "--queue", "100", "--profile", "none", wait=300, model=args.model,
    )
    if not app.is_ready():
        sys.exit(app.said())
    try:
        start = time.monotonic()
        end = start + args.seconds
        clients = [Client(app.url, i, args, end) for i in range(args.clients * n)]
        for client in clients:
            client.join()
    finally:
        app.end()
    answers = [answer for client in clients for answer in client.answers]
    return {"replicas": n, "clients": len(clients), "start": start, "end": end, "answers": answers}


def figures(run):
    """Figures of a run. The first answers of each client fill caches, and do not count."""
    later = sorted(run["answers"], key=lambda a: a["end"])[run["clients"]:]
    since, until = run["answers"] and min(a["end"] for a in later), max(a["end"] for a in later)
    seconds = until - since
    turns = [a for a in later if a["turn"]]
    return {
        "answers_h": 3600 * (len(later) - 1) / seconds,
        "tokens_s": sum(a["n_answer"] for a in later[1:]) / seconds,
        "ttft": statistics.median(a["ttft"] for a in later),
        "cached": sum(a["n_cached"] > 0 for a in turns) / max(1, len(turns)),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    demo = ROOT / "models/demo/moeba-demo.gguf"
    parser.add_argument("model", type=os.path.abspath, nargs="?", default=str(demo))
    parser.add_argument("--moeba", default=str(ROOT / "target/release/moeba"))
    parser.add_argument("--rate", default="4M")
    parser.add_argument("--ram", default="25%")
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--clients", type=int, default=2, help="for each replica")
    parser.add_argument("--seconds", type=float, default=45)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--words", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--burst", action="store_true")
    parser.add_argument("-o", "--out")
    args = parser.parse_args()
    groups, runs = [], []
    with tempfile.TemporaryDirectory(prefix="mr", dir="/tmp") as folder:
        os.environ.update(MOEBA=args.moeba, MOEBA_DEMO=args.model, MOEBA_RAY_TEMP=folder)
        from cluster import Machines

        programs = []
        for number in range(3 if args.burst else max(args.replicas)):
            group, path = limited(folder, number, args)
            groups.append(group)
            programs.append({"MOEBA_PROGRAM": str(path)})
        machines = Machines(programs)
        try:
            print("| replicas | answers/h | tokens/s | first token, s | cached turns | of one |")
            print("|--:|--:|--:|--:|--:|--:|")
            for n in args.replicas:
                run = measure(machines, n, args)
                runs.append(run)
                its, first = figures(run), figures(runs[0])
                share = its["answers_h"] / first["answers_h"] * runs[0]["replicas"]
                print(f"| {n} | {its['answers_h']:.0f} | {its['tokens_s']:.2f} | {its['ttft']:.1f} "
                      f"| {its['cached']:.0%} | {share:.2f} |", flush=True)
            if args.burst:
                from burst import one_three_one

                one_three_one(machines, print)
        finally:
            machines.end()
            # Engines end a moment after Ray.
            time.sleep(2)
            for group in groups:
                group.__exit__()
    if args.out:
        settings = {key: getattr(args, key) for key in ("turns", "words", "tokens", "clients")}
        Path(args.out).write_text(json.dumps({"settings": settings, "runs": runs}))


if __name__ == "__main__":
    main()
