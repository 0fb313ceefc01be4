#!/usr/bin/env python3
"""All tables of policies, in one command: OUT/POLICIES.md, OUT/policies/*.csv and *.svg.

    cargo build --release --features lab
    bench/policies.py [--text PROSE.txt] [--model sibling=SIBLING.gguf] [--full FULL.mtrace]
                      [--llapor ACCURACY.csv] [--networks FULL.moeba] [--machine DOCTOR.json]

Simulates the policies on TRACES/demo.mtrace and sibling.mtrace (moeba-lab tables). With --text,
held-out prose, it also runs the engine with experts streamed from disk, on the demo model and on
every --model: with each policy at three budgets, in rounds of one run of each. A figure is the
median of the rounds; `auto` is held against the fastest of the others. --live-only prints that and
simulates nothing. --full is the demo model's trace with --ahead 6 --hidden (bench/traces.py
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
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
POLICIES = ["on-demand", "predictor=none,eviction=lfu", "deepspeed", "brainstorm",
            "mixtral-offloading", "moe-infinity", "finemoe", "moepic",
            "predictor=next-layer,eviction=lcp", "predictor=next-layer,eviction=scan-resistant",
            "predictor=trajectory,eviction=scan-resistant", "auto"]
BUDGETS = [25, 50, 75]

# `auto` may take this much longer than the fastest policy.
AUTO_LIMIT = 1.03


def live_run(args, model, policy, budget, folder):
    """Figures of one run: hit rate, ms a token, ms of waiting, MiB read, share of the policy."""
    stats = folder / "stats.json"
    command = [args.moeba, "-q", "perplexity", model, "-f", args.text, "-b", "1",
               "-c", "257", "--chunks", args.chunks, "--threads", args.threads, "--ram",
               f"{budget}%", "--policy", policy, "--profile", "none", "--stats", stats]
    subprocess.run([str(part) for part in command], check=True, stdout=subprocess.DEVNULL)
    s = json.loads(stats.read_text())
    tokens = s["evaluated_tokens"]
    tpot = 1000.0 / s["decode_tokens_per_second"]
    return [s["hit_rate"], tpot, s["stall_ms_per_token"], s["read_bytes"] / tokens / 2**20,
            s["policy_ms_per_token"] / tpot]


class Live:
    """Rounds of live runs of one model and budget."""

    def __init__(self, model, budget):
        self.model, self.budget = model, budget
        self.runs = {}  # policy -> one list of figures a round

    def tpot(self, policy):
        return [figures[1] for figures in self.runs[policy]]

    def lines(self):
        """model;policy;budget;hit_rate;tpot_ms;least;most;stall_ms;mib;policy_share, of the round
        of median time, with the least and the most time of all rounds."""
        for policy, rounds in self.runs.items():
            rate, tpot, *rest = sorted(rounds, key=lambda figures: figures[1])[len(rounds) // 2]
            spread = [min(self.tpot(policy)), max(self.tpot(policy))]
            figures = [self.budget / 100, rate, tpot, *spread, *rest]
            yield ";".join([self.model, policy] + [f"{figure:.6g}" for figure in figures])

    def auto(self):
        """The fastest other policy, and the median over the rounds of auto's time beside its."""
        fixed = [policy for policy in self.runs if policy != "auto"]
        best = min(fixed, key=lambda policy: median(self.tpot(policy)))
        ratios = [auto / other for auto, other in zip(self.tpot("auto"), self.tpot(best))]
        return best, median(ratios)


def live_runs(args, folder):
    """One `Live` for each model and budget."""
    models = {"demo": args.demo} | dict(pair.split("=", 1) for pair in args.model)
    policies = args.policies.split(";") if args.policies else POLICIES
    all_runs = []
    for name, path in models.items():
        for budget in BUDGETS:
            live = Live(name, budget)
            for _ in range(args.rounds):
                for policy in policies:
                    figures = live_run(args, path, policy, budget, folder)
                    live.runs.setdefault(policy, []).append(figures)
            all_runs.append(live)
    return all_runs


def print_live(all_runs):
    print("| model | budget | policy | ms a token | least | most | hit rate |")
    print("|---|---:|---|---:|---:|---:|---:|")
    for live in all_runs:
        for line in live.lines():
            model, policy, budget, rate, tpot, least, most, *_ = line.split(";")
            times = " | ".join(f"{float(ms):.3f}" for ms in [tpot, least, most])
            print(f"| {model} | {float(budget):.0%} | {policy} | {times} | {float(rate):.1%} |")
    for live in (live for live in all_runs if "auto" in live.runs and len(live.runs) > 1):
        best, ratio = live.auto()
        verdict = "as promised" if ratio <= AUTO_LIMIT else "more than promised"
        print(f"{live.model}, {live.budget} %: auto takes {ratio:.3f} times as long as {best}, "
              f"{verdict}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--text", type=Path, help="held-out prose; without it, no live runs")
    parser.add_argument("--model", action="append", default=[], metavar="NAME=GGUF",
                        help="another model to run live")
    parser.add_argument("--policies", help="of live runs, with a semicolon between them")
    parser.add_argument("--live-only", action="store_true")
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
            all_runs = live_runs(args, folder)
            print_live(all_runs)
            live = folder / "live.csv"
            live.write_text("".join(f"{line}\n" for runs in all_runs for line in runs.lines()))
            command += ["--live", live]
        if not args.live_only:
            subprocess.run([str(part) for part in command], check=True)


if __name__ == "__main__":
    main()
