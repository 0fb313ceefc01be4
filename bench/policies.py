#!/usr/bin/env python3
"""All tables of policies, in one command: OUT/POLICIES.md, OUT/policies/*.csv and *.svg.

    cargo build --release --features lab
    bench/policies.py [--text PROSE.txt] [--full FULL.mtrace] [--llapor ACCURACY.csv]
                      [--networks FULL.moeba] [--machine DOCTOR.json]

Simulates the policies on TRACES/demo.mtrace and sibling.mtrace (moeba-lab tables). With --text,
held-out prose, it also runs the engine on the demo model with experts streamed from disk, at 25 and
50 % with every policy. --full is the demo model's trace with --ahead 6 --hidden (bench/traces.py
--full); --llapor is the report of `moeba trace train FULL.mtrace --report`; --networks is the
profile that `moeba trace train FULL.mtrace --held-out 35` wrote: two batches of 32 requests that
those networks have not seen; --machine is what `moeba doctor --json` says of a machine with a GPU,
which tells what asynchronous transfers are worth. Live figures and LLaPor's times depend on the
machine; everything else repeats.
"""

import argparse
import json
import os
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
POLICIES = ["on-demand", "predictor=none,eviction=lfu", "deepspeed", "brainstorm",
            "mixtral-offloading", "moe-infinity", "finemoe", "predictor=next-layer,eviction=lcp",
            "predictor=next-layer,eviction=scan-resistant",
            "predictor=trajectory,eviction=scan-resistant", "auto"]
BUDGETS = [25, 50]


def live_run(args, policy, budget, folder):
    """One line for the report: policy;budget;hit_rate;tpot_ms;stall_ms;mib;policy_share."""
    stats = folder / "stats.json"
    command = [args.moeba, "-q", "perplexity", args.demo, "-f", args.text, "-b", "1",
               "-c", "257", "--chunks", args.chunks, "--threads", args.threads, "--ram",
               f"{budget}%", "--policy", policy, "--profile", "none", "--stats", stats]
    subprocess.run([str(part) for part in command], check=True, stdout=subprocess.DEVNULL)
    s = json.loads(stats.read_text())
    tokens = s["evaluated_tokens"]
    tpot = 1000.0 / s["decode_tokens_per_second"]
    figures = [budget / 100, s["hit_rate"], tpot, s["stall_ms_per_token"],
               s["read_bytes"] / tokens / 2**20, s["policy_ms_per_token"] / tpot]
    return ";".join([policy] + [f"{figure:.6g}" for figure in figures])


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--text", type=Path, help="held-out prose; without it, no live runs")
    parser.add_argument("--full", type=Path)
    parser.add_argument("--llapor", type=Path)
    parser.add_argument("--networks", type=Path)
    parser.add_argument("--machine", type=Path)
    parser.add_argument("--demo", type=Path, default=ROOT / "models/demo/moeba-demo.gguf")
    parser.add_argument("--traces", type=Path, default=ROOT / "bench/traces")
    parser.add_argument("--out", type=Path, default=ROOT / "target/policies")
    parser.add_argument("--moeba", type=Path, default=ROOT / "target/release/moeba")
    parser.add_argument("--lab", type=Path, default=ROOT / "target/release/moeba-lab")
    parser.add_argument("--chunks", type=int, default=4, help="of 256 tokens, a live run")
    parser.add_argument("--rounds", type=int, default=3, help="live runs of each policy, in turn")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    args = parser.parse_args()
    command = [args.lab, "tables", args.traces / "demo.mtrace", "-o", args.out,
               "--coarse", args.traces / "sibling.mtrace"]
    for flag in ["full", "llapor", "networks", "machine"]:
        if getattr(args, flag):
            command += [f"--{flag}", getattr(args, flag)]
    with tempfile.TemporaryDirectory() as folder:
        if args.text:
            folder = Path(folder)
            live = folder / "live.csv"
            runs = [(policy, budget) for budget in BUDGETS for policy in POLICIES]
            rounds = [[live_run(args, *run, folder) for run in runs] for _ in range(args.rounds)]
            # The run of median time of each policy and budget.
            tpot = lambda line: float(line.split(";")[3])
            lines = [sorted(lines, key=tpot)[len(lines) // 2] for lines in zip(*rounds)]
            live.write_text("\n".join(lines) + "\n")
            command += ["--live", live]
        subprocess.run([str(part) for part in command], check=True)


if __name__ == "__main__":
    main()
