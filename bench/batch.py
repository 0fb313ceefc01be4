#!/usr/bin/env python3
"""The README's program for prompts in a file, on one replica and on three that are killed.

    cargo build --release
    python3 -m venv ray && ray/bin/pip install -r tests/ray/requirements.txt
    ray/bin/pip install "ray[data]"
    ray/bin/python bench/batch.py [-n 300]

Three Ray nodes on this machine serve the demo model. The program is taken from
src/server/docs/machines.md and run as a user would run it: on one replica, then on three, one of
whose engines is killed every four seconds. Fails unless the sorted answers have the same SHA-256.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests/ray"))
THINGS = "branch commit file folder shell package server network pointer thread".split()


def program(path):
    """The page's lines from `import json, sys` to the end of their block."""
    lines = (ROOT / "src/server/docs/machines.md").read_text(encoding="utf-8").splitlines()
    first = lines.index("    import json, sys, urllib.request")
    block = []
    for line in lines[first:]:
        if line and not line.startswith("    "):
            break
        block.append(line[4:])
    path.write_text("\n".join(block), encoding="utf-8")


class Killer(threading.Thread):
    """Kills an engine every four seconds while others run."""

    def __init__(self, machines):
        super().__init__(daemon=True)
        self.machines, self.is_over, self.n = machines, threading.Event(), 0
        self.start()

    def run(self):
        while not self.is_over.wait(4):
            self.n += self.machines.kill_an_engine()

    def end(self):
        self.is_over.set()
        self.join()
        return self.n


def answers(machines, folder, n, is_killed):
    """Seconds, engines killed, and the digest of all answers of `n` replicas."""
    from cluster import App

    app = App(machines, "--replicas", str(n), "-c", "512", "--parallel", "1", "-t", "1",
              "--queue", "64", "--profile", "none")
    assert app.is_ready(), app.said()
    result = folder / f"answers-{n}"
    environment = dict(os.environ, RAY_ADDRESS=machines.address)
    command = [sys.executable, folder / "batch.py", app.url, folder / "prompts.jsonl", result]
    try:
        start, killer = time.monotonic(), Killer(machines) if is_killed else None
        try:
            ran = subprocess.run(command, env=environment, capture_output=True, text=True)
        finally:
            n_killed = killer.end() if killer else 0
        seconds = time.monotonic() - start
        assert ran.returncode == 0, ran.stderr[-3000:]
    finally:
        app.end()
    lines = [line for file in sorted(result.glob("*.json")) for line in file.open()]
    digest = hashlib.sha256("".join(sorted(lines)).encode()).hexdigest()
    return seconds, n_killed, len(lines), digest


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--moeba", default=str(ROOT / "target/release/moeba"))
    parser.add_argument("-n", type=int, default=300, help="prompts")
    args = parser.parse_args()
    digests = set()
    with tempfile.TemporaryDirectory(prefix="mr", dir="/tmp") as folder:
        model = str(ROOT / "models/demo/moeba-demo.gguf")
        os.environ.update(MOEBA=args.moeba, MOEBA_DEMO=model, MOEBA_RAY_TEMP=folder)
        from cluster import Machines

        folder = Path(folder)
        program(folder / "batch.py")
        with open(folder / "prompts.jsonl", "w", encoding="utf-8") as file:
            for i in range(args.n):
                prompt = f"Question {i}: what is a {THINGS[i % len(THINGS)]}?"
                file.write(json.dumps({"prompt": prompt}) + "\n")
        machines = Machines([{}, {}, {}])
        try:
            print("| replicas | engines killed | seconds | answers | SHA-256 |")
            print("|--:|--:|--:|--:|---|")
            for n, is_killed in ((1, False), (3, True)):
                took, n_killed, n_lines, digest = answers(machines, folder, n, is_killed)
                print(f"| {n} | {n_killed} | {took:.0f} | {n_lines} | {digest[:16]} |", flush=True)
                assert n_lines == args.n and (n_killed > 0) == is_killed
                digests.add(digest)
        finally:
            machines.end()
    if len(digests) > 1:
        sys.exit("error: the answers depend on the machines")


if __name__ == "__main__":
    main()
