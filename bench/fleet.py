#!/usr/bin/env python3
"""Computes the work of many replicas from that of one.

    ray/bin/python bench/replicas.py -o replicas.json
    bench/fleet.py replicas.json [MORE.json] [--replicas 10 100 1000]

The times of one replica (a prompt's, by a line through the tokens that were computed; a token's;
what else an answer takes) are those of the run with one replica. Discrete events then serve the
same clients with the same conversations over more replicas: one answer at a time each, one request
that waits, and the router's rule, by which a conversation stays with its replica while that has
room. Before it speaks of numbers that were not measured it computes those that were; if one differs
by more than a tenth it ends there, with 1.
"""

import argparse
import bisect
import hashlib
import heapq
import json
import random
import statistics
import sys
from pathlib import Path

ROUTERS = ("random", "power of two", "hash", "bounded")
# Conversations whose keys and values a replica keeps: many more than its clients hold.
KEEP = 64
# Requests that a replica takes: the one that it computes, and the next.
ROOM = 2
# Answers of each client before any count.
WARM_UP = 1


def figures(run):
    later = sorted(run["answers"], key=lambda a: a["end"])[WARM_UP * run["clients"]:]
    seconds = later[-1]["end"] - later[0]["end"]
    turns = [a for a in later if a["turn"]]
    ttft = sorted(a["ttft"] for a in later)
    return {
        "answers_h": 3600 * (len(later) - 1) / seconds,
        "ttft": statistics.median(ttft),
        "ttft95": ttft[int(0.95 * len(ttft))],
        "cached": sum(a["n_cached"] > 0 for a in turns) / max(1, len(turns)),
    }


class Replica:
    """The times of one replica, from its answers."""

    def __init__(self, run):
        answers = sorted(run["answers"], key=lambda a: a["end"])[WARM_UP * run["clients"]:]
        self.prompt_base, self.prompt_token = line(
            [(a["n_prompt"] - a["n_cached"], a["prompt_s"]) for a in answers])
        self.token = sum(a["decode_s"] for a in answers) / sum(a["n_answer"] for a in answers)
        busy = statistics.mean(a["prompt_s"] + a["decode_s"] for a in answers)
        # One replica with several clients never rests.
        self.rest = max(0.0, 3600 / figures(run)["answers_h"] - busy)
        self.n_new = statistics.mean(a["n_prompt"] for a in answers if not a["turn"])
        turns = [a for a in answers if a["turn"]]
        self.n_more = statistics.mean(
            (a["n_prompt"] - self.n_new) / a["turn"] for a in turns) if turns else 0.0

    def prompt(self, n):
        return self.prompt_base + self.prompt_token * n


def line(points):
    """The least squares of y = a + b x, with b of at least 0."""
    xs, ys = [x for x, _ in points], [y for _, y in points]
    mx, my = statistics.mean(xs), statistics.mean(ys)
    variance = sum((x - mx) ** 2 for x in xs)
    b = sum((x - mx) * (y - my) for x, y in points) / variance if variance else 0.0
    b = max(0.0, b)
    return max(0.0, my - b * mx), b


class Rank:
    """The replicas of a conversation in rank, by a ring."""

    def __init__(self, n):
        points = [(digest(f"{r}:{v}"), r) for r in range(n) for v in range(40)]
        self.ring = sorted(points)
        self.keys = [key for key, _ in self.ring]

    def first(self, conversation, n):
        at, out = bisect.bisect(self.keys, digest(str(conversation))), []
        while len(out) < n:
            replica = self.ring[at % len(self.ring)][1]
            at += 1
            if replica not in out:
                out.append(replica)
        return out


def digest(text):
    return hashlib.blake2b(text.encode(), digest_size=6).digest()


def simulate(replica, n, router, settings, hours, seed=1):
    """Clients that hold conversations without pauses, as bench/replicas.py has them."""
    chance, rank = random.Random(seed), Rank(n)
    # Requests that a replica has, and when it is done with them.
    load, done_at, waiting = [0] * n, [0.0] * n, []
    kept = [dict() for _ in range(n)]
    answers, events, number = [], [], 0

    def choices(conversation):
        if router == "random":
            return [chance.randrange(n)]
        if router == "power of two":
            return sorted((chance.randrange(n), chance.randrange(n)), key=load.__getitem__)
        if router == "hash":
            return rank.first(conversation, 1)
        some = sorted((chance.randrange(n), chance.randrange(n)), key=load.__getitem__)
        return rank.first(conversation, min(2, n)) + some

    def start(now, request):
        """Whether a replica takes it: the first in the router's rank that has room."""
        nonlocal number
        client, conversation, turn, n_prompt, since, ranks = request
        free = next((r for r in ranks if load[r] < ROOM), None)
        if free is None:
            return False
        had = kept[free].pop(conversation, 0)
        prompt = replica.prompt(n_prompt - had)
        begin = max(now, done_at[free])
        end = begin + replica.rest + prompt + replica.token * settings["tokens"]
        kept[free][conversation] = n_prompt + settings["tokens"]
        if len(kept[free]) > KEEP:
            kept[free].pop(next(iter(kept[free])))
        load[free], done_at[free], number = load[free] + 1, end, number + 1
        ttft = begin - since + replica.rest + prompt + replica.token
        answer = {"end": end, "ttft": ttft, "turn": turn, "n_cached": had}
        heapq.heappush(events, (end, number, free, client, conversation, turn, answer))
        return True

    def ask(now, client, conversation, turn):
        n_prompt = replica.n_new + turn * replica.n_more
        request = (client, conversation, turn, n_prompt, now, choices(conversation))
        if not start(now, request):
            waiting.append(request)

    for client in range(settings["clients"] * n):
        ask(0.0, client, chance.getrandbits(60), 0)
    while events and events[0][0] < 3600 * hours:
        now, _, free, client, conversation, turn, answer = heapq.heappop(events)
        load[free] -= 1
        answers.append(answer)
        # Those who wait are asked again, in their order.
        for request in waiting:
            if free in request[5] and start(now, request):
                waiting.remove(request)
                break
        ends = turn + 1 == settings["turns"]
        ask(now, client, chance.getrandbits(60) if ends else conversation, 0 if ends else turn + 1)
    return figures({"answers": answers, "clients": settings["clients"] * n})


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("measured", type=Path, nargs="+", help="runs of equal settings")
    parser.add_argument("--replicas", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--hours", type=float, default=1.0)
    args = parser.parse_args()
    files = [json.loads(path.read_text()) for path in args.measured]
    runs, settings = [run for file in files for run in file["runs"]], files[0]["settings"]
    if any(file["settings"] != settings for file in files):
        sys.exit("the files were measured with other settings")
    one = next((run for run in runs if run["replicas"] == 1), None)
    if one is None:
        sys.exit("there is no run with one replica to compute from")
    replica = Replica(one)
    print(f"a prompt takes {replica.prompt_base:.2f} s + {1e3 * replica.prompt_token:.1f} ms for "
          f"each token that is computed, a token {replica.token:.2f} s, an answer "
          f"{replica.rest:.2f} s more\n")
    print("| replicas | measured, answers/h | of one | computed | difference | first token, s "
          "| computed |")
    print("|--:|--:|--:|--:|--:|--:|--:|")
    is_right = True
    for run in runs:
        its = figures(run)
        said = simulate(replica, run["replicas"], "bounded", settings, args.hours)
        error = said["answers_h"] / its["answers_h"] - 1
        is_right &= abs(error) <= 0.1
        share = its["answers_h"] / figures(one)["answers_h"]
        print(f"| {run['replicas']} | {its['answers_h']:.0f} | {share:.2f} "
              f"| {said['answers_h']:.0f} "
              f"| {error:+.1%} | {its['ttft']:.1f} | {said['ttft']:.1f} |")
    if not is_right:
        sys.exit("the computed figures are not the measured ones: no more is said")
    print("\n| replicas | router | answers/h | of one | first token p50, p95, s | cached turns |")
    print("|--:|---|--:|--:|--:|--:|")
    base = simulate(replica, 1, "bounded", settings, args.hours)["answers_h"]
    for n in args.replicas:
        for router in ROUTERS:
            its = simulate(replica, n, router, settings, args.hours)
            print(f"| {n} | {router} | {its['answers_h']:.0f} | {its['answers_h'] / base:.2f} "
                  f"| {its['ttft']:.1f}, {its['ttft95']:.1f} | {its['cached']:.0%} |", flush=True)


if __name__ == "__main__":
    main()
