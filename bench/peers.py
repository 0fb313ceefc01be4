#!/usr/bin/env python3
"""Decode with experts on one, two and four machines: network namespaces on this one.

    cargo build --release
    moeba synth qwen3-30b-a3b --layers 4 --type q4_k -o q3.gguf
    bench/peers.py q3.gguf [--ram 10% 25%] [--peers 0 1 3] [--rate 200M] [--tokens 24]

Each machine has room for so many of the experts (--ram), a disk that reads --rate bytes a second (a
control group's limit) and one thread; they are joined by 10 Gbit/s and, where the kernel has netem,
20 µs. The head runs `moeba bench` without peers, then with each number of them, in turn. What is
sent and received is compared with what the bodies' format says for so many experts, rows and
requests. Needs root.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "bench")]
BRIDGE = f"mb{os.getpid() % 100000}"
NETWORK = f"10.{64 + os.getpid() % 64}.{os.getpid() % 251}"
KEY = "a-key-for-peers"


def sh(line, check=True):
    return subprocess.run(line.split(), check=check, capture_output=True, text=True)


def size(text):
    return int(text[:-1]) * {"K": 10**3, "M": 10**6, "G": 10**9}[text[-1]]


def connect(n):
    sh(f"ip link add {BRIDGE} type bridge")
    sh(f"ip addr add {NETWORK}.1/24 dev {BRIDGE}")
    sh(f"ip link set {BRIDGE} up")
    has_delay = True
    for i in range(2, n + 2):
        name, link = f"{BRIDGE}n{i}", f"{BRIDGE}v{i}"
        sh(f"ip netns add {name}")
        sh(f"ip link add {link} type veth peer name eth0 netns {name}")
        sh(f"ip link set {link} master {BRIDGE} up")
        sh(f"ip -n {name} link set lo up")
        sh(f"ip -n {name} addr add {NETWORK}.{i}/24 dev eth0")
        sh(f"ip -n {name} link set eth0 up")
        for device in (f"ip netns exec {name} tc qdisc add dev eth0", f"tc qdisc add dev {link}"):
            if sh(f"{device} root netem rate 10gbit delay 20us", check=False).returncode:
                sh(f"{device} root tbf rate 10gbit burst 1mb latency 10ms")
                has_delay = False
    return has_delay


def disconnect(n):
    for i in range(2, n + 2):
        sh(f"ip netns del {BRIDGE}n{i}", check=False)
    sh(f"ip link del {BRIDGE}", check=False)


def disk(number, args):
    """A control group with a disk of its own rate."""
    from tiers import Group

    group = Group.__new__(Group)
    group.root, group.paths = Path("/sys/fs/cgroup"), []
    group.name = f"moeba-peer-{os.getpid()}-{number}"
    group.is_v1 = (group.root / "memory").is_dir()
    group.limit_disk(args.model, "bps", size(args.rate))
    return group


def inside(group, command):
    enter = "".join(f"echo $$ > {path}/cgroup.procs && " for path in group.paths)
    return ["sh", "-c", enter + 'exec "$@"', "sh", *command]


class Peer:
    def __init__(self, number, group, ram, args, folder):
        ready = Path(folder) / f"ready-{number}-{time.monotonic_ns()}"
        command = [args.moeba, "experts", args.model, "--host", "0.0.0.0", "--port", "8090", "-t",
                   "1", "--ram", ram, "--api-key", KEY, "--ready-file", str(ready), "-q"]
        name = f"{BRIDGE}n{number}"
        self.process = subprocess.Popen(
            inside(group, ["ip", "netns", "exec", name, *command]), stdin=subprocess.DEVNULL)
        while not ready.exists():
            if self.process.poll() is not None:
                sys.exit("a peer does not start")
            time.sleep(0.05)
        self.url = f"http://{NETWORK}.{number}:8090"

    def end(self):
        self.process.terminate()
        self.process.wait()


def bench(group, ram, urls, args):
    """Tokens a second of the head, and its figures of peers."""
    command = [args.moeba, "bench", args.model, "-p", "0", "-n", str(args.tokens), "-r",
               str(args.repeat), "-t", "1", "--ram", ram, "--profile", "none", "-o", "json"]
    if urls:
        command += ["--peers", ",".join(urls), "--peer-key", KEY]
    done = subprocess.run(inside(group, command), capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout)[0]


def traffic(run, n_embd, row_bytes):
    """Bytes by the bodies' format (src/experts/peers/wire.rs), and their share of those counted."""
    n, experts, pairs = (run[f"peer_{what}"] for what in ("requests", "experts", "pairs"))
    sent = n * (8 + 32 + 5 * 4 + row_bytes + 4) + 8 * experts + 4 * pairs
    received = n * (8 + 8 + 4) + 4 * n_embd * pairs
    return sent / run["peer_sent_bytes"], received / run["peer_received_bytes"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=os.path.abspath)
    parser.add_argument("--moeba", default=str(ROOT / "target/release/moeba"))
    parser.add_argument("--ram", nargs="+", default=["10%", "25%"])
    parser.add_argument("--peers", type=int, nargs="+", default=[0, 1, 3])
    parser.add_argument("--rate", default="200M")
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--repeat", type=int, default=2)
    args = parser.parse_args()
    shown = sh(f"{args.moeba} inspect {args.model} --json").stdout
    n_embd = int(re.search(r'embedding_length"[^0-9]*(\d+)', shown)[1])
    most, groups = max(args.peers), []
    try:
        if not connect(most):
            print("this kernel has no netem: links have the rate and no delay of their own\n")
        groups = [disk(number, args) for number in range(1, most + 2)]
        print("| experts in memory, each | peers | tokens/s | of none | by peers | lost | "
              "MB a token to, from peers | of the formula |")
        print("|--:|--:|--:|--:|--:|--:|--:|--:|")
        with tempfile.TemporaryDirectory() as folder:
            for ram in args.ram:
                base = None
                for n in args.peers:
                    peers = [Peer(i, groups[i - 1], ram, args, folder) for i in range(2, n + 2)]
                    try:
                        run = bench(groups[0], ram, [peer.url for peer in peers], args)
                    finally:
                        for peer in peers:
                            peer.end()
                    rate = run["avg_ts"]
                    base = base or rate
                    cells = [ram, str(n), f"{rate:.2f}", f"{rate / base:.2f}"]
                    if n:
                        # Q8_K: a byte an element, and a scale for 256 of them.
                        both = traffic(run, n_embd, n_embd + n_embd // 256 * 4)
                        tokens = args.tokens * args.repeat
                        moved = [run[f"peer_{way}_bytes"] / tokens / 1e6
                                 for way in ("sent", "received")]
                        cells += [str(run["peer_experts"]), str(run["peer_lost"]),
                                  f"{moved[0]:.2f}, {moved[1]:.2f}",
                                  ", ".join(f"{share:.2%}" for share in both)]
                    else:
                        cells += ["", "", "", ""]
                    print("| " + " | ".join(cells) + " |", flush=True)
    finally:
        disconnect(most)
        time.sleep(1)
        for group in groups:
            group.__exit__()


if __name__ == "__main__":
    main()
