#!/usr/bin/env python3
"""Decode of a real text with a part of the experts in memory, against llama.cpp and the disk.

    cargo build --release && cargo bench --bench disk --no-run
    moeba synth qwen3-30b-a3b --layers 8 --type q4_k -o q3.gguf
    bench/tiers.py q3.gguf text.txt --llama-perplexity PATH [--percent 25 50 75]

For each part of the experts, one after the other in one memory control group of dense weights + KV
cache + budget + 200 MiB: moeba token by token (`perplexity -b 1 --ram N%`), llama.cpp token by
token on the same file and text (`llama-perplexity -b 1 -ub 1`, on its mapped file), and the rate of
the disk for direct reads of moeba's mean length and depth. Without a limit: moeba in memory.

The bound of a token is the larger of: bytes that were missing / rate of the disk, and the time in
memory. Needs root and memory control groups (v1 or v2).
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEAD_ROOM = 200 << 20
DEPTH = 32
# A third of it is a round. A group's limit lets a short burst pass that is faster.
DISK_SECONDS = 9


class Group:
    """Control groups of our own, removed at the end: `limit` bytes of memory, and `read_bps` bytes
    a second from the disk that `path` is on, if that is not None."""

    def __init__(self, limit, read_bps, path):
        self.root, self.name = Path("/sys/fs/cgroup"), f"moeba-bench-{os.getpid()}"
        self.is_v1, self.paths = (self.root / "memory").is_dir(), []
        self.set("memory", "memory.limit_in_bytes" if self.is_v1 else "memory.max", limit)
        if read_bps:
            self.limit_disk(path, "bps", read_bps)

    def limit_disk(self, path, unit, rate):
        """Bytes ("bps") or reads ("iops") a second from the disk that `path` is on."""
        device = os.stat(path).st_dev
        device = f"{os.major(device)}:{os.minor(device)}"
        if self.is_v1:
            self.set("blkio", f"blkio.throttle.read_{unit}_device", f"{device} {rate}")
        else:
            self.set("io", "io.max", f"{device} r{unit}={rate}")

    def set(self, controller, key, value):
        path = self.root / controller / self.name if self.is_v1 else self.root / self.name
        if path not in self.paths:
            path.mkdir(exist_ok=True)
            self.paths.append(path)
        (path / key).write_text(str(value))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for path in self.paths:
            path.rmdir()

    def run(self, command, timeout):
        """stdout and stderr together; None if it took too long."""
        enter = "".join(f"echo $$ > {path}/cgroup.procs && " for path in self.paths)
        child = subprocess.Popen(
            ["sh", "-c", enter + 'exec "$@"', "sh", *map(str, command)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)
        try:
            out, _ = child.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.communicate()
            return None
        if child.returncode != 0:
            sys.exit(f"{command[0]} failed:\n{out}")
        return out


def forget(path):
    """Drops the file from the page cache: what is cached already costs a group nothing."""
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def moeba(args, group, extra, n_tokens):
    with tempfile.NamedTemporaryFile(suffix=".json") as stats:
        command = [args.moeba, "perplexity", args.model, "-f", args.text, "-b", "1", "-t",
                   str(args.threads), "-c", str(n_tokens), "--chunks", "1", "--stats", stats.name,
                   *extra]
        if group:
            group.run(command, args.timeout)
        else:
            subprocess.run(command, check=True, capture_output=True)
        return json.load(open(stats.name))


def llama(args, group, n_tokens):
    """Tokens a second, and whether it had to be stopped first."""
    command = [args.llama_perplexity, "-m", args.model, "-f", args.text, "-c", str(n_tokens),
               "-b", "1", "-ub", "1", "--chunks", "1", "-t", str(args.threads), "--no-warmup",
               # Repacked weights are a second copy in memory: it would be killed.
               "--no-repack"]
    out = group.run(command, args.timeout)
    if out is None:
        return n_tokens / args.timeout, True
    found = re.search(r"perplexity: ([\d.]+) seconds per pass", out)
    if not found:
        sys.exit(f"no time of a pass in llama.cpp's output:\n{out}")
    return n_tokens / float(found[1]), False


def disk_bench():
    """The built benchmark of the disk link."""
    out = subprocess.run(["cargo", "bench", "--bench", "disk", "--no-run"], check=True,
                         capture_output=True, text=True, cwd=ROOT).stderr
    return ROOT / re.findall(r"Executable .*\((.*)\)", out)[-1]


def disk_rate(args, group, n_bytes):
    """GB/s of random direct reads of this length, 32 deep."""
    n_bytes = max(4096, n_bytes // 4096 * 4096)
    out = group.run([disk_bench(), args.model, "--size", n_bytes, "--depth", DEPTH, "--io",
                     args.io, "--seconds", DISK_SECONDS], args.timeout)
    return float(re.findall(r"\d+\.\d+", out)[-1])


def plan(args):
    """Bytes of experts, and of everything else."""
    out = subprocess.run([args.moeba, "inspect", args.model, "--json"], check=True,
                         capture_output=True, text=True).stdout
    info = json.loads(out)
    experts = sum(layer["n_experts"] * layer["expert_bytes"] for layer in info["experts"])
    return experts, info["n_bytes"] - experts


def row(args, percent, in_memory_ms):
    experts, dense = plan(args)
    budget = experts * percent // 100
    # The KV cache of so few tokens is within the head-room.
    read_bps = args.disk_mb_per_second and args.disk_mb_per_second * 10**6
    with Group(dense + budget + HEAD_ROOM, read_bps, args.model) as group:
        forget(args.model)
        stats = moeba(args, group, ["--ram", str(budget), "--io", args.io], args.tokens)
        forget(args.model)
        peer, stopped = llama(args, group, args.peer_tokens)
        rate = disk_rate(args, group, stats["read_bytes"] // stats["n_reads"])
    n = stats["evaluated_tokens"]
    missed = (stats["demand_bytes"] + stats["prefetch_used_bytes"]) / n
    ms = 1e3 / stats["tokens_per_second"]
    bound = max(missed / rate / 1e6, in_memory_ms)
    assert stats["resident_expert_bytes_max"] <= budget, stats
    sign = "<" if stopped else ""
    print(f"| {percent} % | {stats['tokens_per_second']:.1f} | {sign}{peer:.2f} | "
          f"{stats['tokens_per_second'] / peer:.1f} | {100 * stats['hit_rate']:.1f} % | "
          f"{missed / 1e6:.1f} | {rate:.2f} | {ms:.1f} | {bound:.1f} | {ms / bound:.2f} | "
          f"{stats['demand_wait_histogram']} |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("text")
    parser.add_argument("--moeba", default=ROOT / "target/release/moeba")
    parser.add_argument("--llama-perplexity", required=True)
    parser.add_argument("--percent", type=int, nargs="+", default=[25, 50, 75])
    parser.add_argument("--io", default="uring")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--peer-tokens", type=int, default=16, help="llama.cpp decodes fewer")
    parser.add_argument("--disk-mb-per-second", type=int,
                        help="slow the disk down to this rate, for both engines and the probe")
    parser.add_argument("--timeout", type=float, default=120)
    args = parser.parse_args()
    in_memory = 1e3 / moeba(args, None, ["--io", "mmap"], args.tokens)["tokens_per_second"]
    print(f"in memory: {in_memory:.1f} ms a token\n")
    columns = ["experts in memory", "moeba tokens/s", "llama.cpp tokens/s", "ratio", "hits",
               "MB missed a token", "disk GB/s", "ms a token", "bound ms", "ratio to bound",
               "demand loads by granules of prefetch before them: 0, ≤¼, ≤½, ≤¾, ≤1, more"]
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for percent in args.percent:
        row(args, percent, in_memory)


if __name__ == "__main__":
    main()
