#!/usr/bin/env python3
"""A server under load: a long prompt beside an answer, cancelling, a full queue, many requests.

    cargo build --release
    bench/serve_load.py [FILE.gguf] [--moeba PATH] [--part beside,disk,cancel,queue,grammars,soak]
                        [-t 2] [--ram SIZE] [--prompt 1500] [--requests 10000]

beside   A's answer is written while B's prompt is computed: the gaps between A's tokens alone and
         beside B, bytes of experts that B's prompt reads alone and beside A, and the time that
         /health and /metrics take meanwhile
disk     a disk that reads ten times a second, as root: the time that /health and /metrics take
         while an answer waits for experts, and until it is cancelled
cancel   clients go while they are queued, in their prompt, and in their answer: time until the
         queue or the slot is free, and how much of the prompt a repetition finds in the cache
queue    more clients than the queue holds: 503 with Retry-After, and those within are answered
grammars short answers alone, and beside 8 clients that send schemas of which each would take all
         memory or all time: how long the answers take, and what the server has kept after them
soak     short requests at 16 connections, a tenth of which goes in the middle and a hundredth means
         harm: memory, descriptors and threads, and every request is answered or its end is named
"""

import argparse
import collections
import json
import random
import socket
import sys
import threading
import time

import serving
import tiers
from serving import DEMO, MOEBA, get, metric, n_busy, percentile, wait_until

CHAT = "/v1/chat/completions"
WORDS = "branch file shell commit package server memory network folder pointer".split()


def prompt(n_words, seed):
    """A text of some tokens that no cache has."""
    chance = random.Random(seed)
    return f"{seed}: " + " ".join(chance.choice(WORDS) for _ in range(n_words))


def chat(text, n, **more):
    return {"messages": [{"role": "user", "content": text}], "max_tokens": n, "seed": 1,
            "ignore_eos": True, "stream": True, **more}


def start(args, parallel, *more, group=None):
    ram = ["--ram", args.ram] if args.ram else []
    n_ctx = parallel * args.context
    return serving.moeba(args.moeba, args.file, ["-c", n_ctx, "--parallel", parallel, "-t",
                         args.threads, "--profile", "none", *ram, *more], start=300, group=group)


def times(values, unit=1e3):
    if not values:
        return "none"
    shown = [percentile(values, 0.5), percentile(values, 0.99), max(values)]
    return "p50 {:.1f}, p99 {:.1f}, max {:.1f} ms".format(*(unit * value for value in shown))


def stream(port, body):
    """Times of the pieces of an answer, as they come."""
    connection = serving.send(port, CHAT, body)
    answer = connection.getresponse()
    if answer.status != 200:
        raise ValueError(f"status {answer.status}: {answer.read()[:300]}")
    try:
        for when, chunk in serving.events(answer):
            if "error" in chunk:
                raise ValueError(f"an answer failed: {chunk}")
            for choice in chunk["choices"]:
                if choice["delta"].get("content"):
                    yield when
    finally:
        connection.close()


def read_bytes(port):
    return metric(port, "moeba_expert_read_bytes_total", '{tier="disk"}')


def long_prompt(args, port, seed):
    """Seconds to the answer of a long prompt, and bytes of experts read meanwhile."""
    before, begin = read_bytes(port), time.monotonic()
    first = next(stream(port, chat(prompt(args.prompt, seed), 1)))
    return first - begin, read_bytes(port) - before


class Looks(serving.Meanwhile):
    """Times of /health and /metrics until the block ends."""

    def __init__(self, port):
        super().__init__()
        self.port, self.seconds = port, {"/health": [], "/metrics": []}

    def step(self):
        for path, found in self.seconds.items():
            begin = time.monotonic()
            assert get(self.port, path)[0] == 200
            found.append(time.monotonic() - begin)
        time.sleep(0.01)

    def report(self):
        for path, found in self.seconds.items():
            print(f"{path}, {len(found)} times meanwhile: {times(found)}")
        return all(percentile(found, 0.99) < 0.05 for found in self.seconds.values())


def disk(args):
    no_limit = 1 << 40
    group = tiers.Group(no_limit, no_limit, args.file)
    with group, start(args, 1, group=group) as server:
        port = server.port
        group.limit_disk(args.file, "iops", 10)
        before, begin, n = read_bytes(port), time.monotonic(), 0
        with Looks(port) as looks:
            pieces = stream(port, chat("Tell me everything.", 400))
            for _ in pieces:
                n += 1
                if time.monotonic() > begin + 20:
                    break
            seconds = time.monotonic() - begin
            n_bytes = read_bytes(port) - before
            pieces.close()
            freed = wait_until(lambda: n_busy(port) == 0)
        print(f"{n} tokens and {n_bytes / 1e6:.1f} MB in {seconds:.1f} s; the slot is free "
              f"{1e3 * freed:.1f} ms after its client has gone")
        return looks.report() and n_bytes > 0


def beside(args):
    with start(args, 2) as server:
        port = server.port
        alone_s, alone_bytes = long_prompt(args, port, 1)
        stamps, is_on = [], threading.Event()

        def write():
            for when in stream(port, chat("Tell me everything.", args.answer)):
                stamps.append(when)
                is_on.set()

        writer = threading.Thread(target=write)
        writer.start()
        is_on.wait(120)
        wait_until(lambda: len(stamps) > 10 or not writer.is_alive(), 120)
        n, before = len(stamps), read_bytes(port)
        wait_until(lambda: len(stamps) > 60 or not writer.is_alive(), 120)
        of_token = (read_bytes(port) - before) / max(1, len(stamps) - n)
        begin = time.monotonic()
        with Looks(port) as looks:
            beside_s, beside_bytes = long_prompt(args, port, 2)
        end = time.monotonic()
        is_on_still = writer.is_alive()
        writer.join()
        gaps = list(zip(stamps, stamps[1:]))
        meanwhile = [b - a for a, b in gaps if b > begin and a < end]
        otherwise = [b - a for a, b in gaps if b <= begin or a >= end]
        print(f"A's gaps, {len(otherwise)} alone: {times(otherwise)}")
        print(f"A's gaps, {len(meanwhile)} beside B's prompt: {times(meanwhile)}"
              f"{'' if is_on_still else ' (A ended first: raise --answer)'}")
        print(f"B's prompt of {args.prompt} words: {alone_s:.2f} s and "
              f"{alone_bytes / 1e6:.1f} MB of experts alone, {beside_s:.2f} s and "
              f"{beside_bytes / 1e6:.1f} MB beside A, with some "
              f"{of_token * len(meanwhile) / 1e6:.1f} MB of A's {len(meanwhile)} tokens")
        return looks.report() and is_on_still and len(meanwhile) > 0


def cached(port, body):
    """Tokens of a prompt, and how many of them a cache had."""
    body = {**body, "stream": False, "max_tokens": 1}
    usage = json.loads(serving.post(port, CHAT, body)[2])["usage"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def cancel(args):
    is_right = True
    with start(args, 1) as server:
        port = server.port
        idle = lambda: n_busy(port) == 0
        queue = lambda: metric(port, "moeba_queue_length")
        # Queued.
        running = serving.send(port, CHAT, chat("Tell me everything.", args.context // 2))
        wait_until(lambda: n_busy(port) == 1)
        waits = []
        for i in range(5):
            waiting = serving.send(port, CHAT, chat(f"Wait {i}.", 4))
            wait_until(lambda: queue() == 1)
            waiting.close()
            waits.append(wait_until(lambda: queue() == 0))
        print(f"queued: out of the queue after {times(waits)}")
        running.close()
        wait_until(idle)
        # In the prompt, after another part of its time each.
        seconds = long_prompt(args, port, 100)[0]
        waits, found = [], []
        for i in range(5):
            body = chat(prompt(args.prompt, 101 + i), 4)
            connection = serving.send(port, CHAT, body)
            time.sleep(seconds * (i + 1) / 6)
            connection.close()
            waits.append(wait_until(idle))
            n, n_cached = cached(port, body)
            found.append(f"{n_cached} of {n}")
        print(f"in the prompt: the slot is free after {times(waits)}; cached then: "
              f"{', '.join(found)}")
        # In the answer.
        waits, found = [], []
        for i in range(5):
            body = chat(prompt(50, 201 + i), args.context // 2)
            pieces = stream(port, body)
            for _ in range(5 * i + 1):
                next(pieces)
            pieces.close()
            waits.append(wait_until(idle))
            n, n_cached = cached(port, body)
            found.append(f"{n_cached} of {n}")
            is_right &= n_cached >= n - 1
        print(f"in the answer: the slot is free after {times(waits)}; cached then: "
              f"{', '.join(found)}")
    return is_right


def queue(args):
    with start(args, 1, "--queue", "8") as server:
        port = server.port
        first = serving.send(port, CHAT, chat("Tell me everything.", 300))
        wait_until(lambda: n_busy(port) == 1)
        results, lock = collections.Counter(), threading.Lock()
        waits, refusals = [], []

        def client(i):
            begin = time.monotonic()
            status, headers, data = serving.post(port, CHAT, chat(f"Wait {i}.", 4, stream=False))
            seconds = time.monotonic() - begin
            with lock:
                results[status] += 1
                if status == 503:
                    refusals.append(seconds)
                    waits.append(int(headers["Retry-After"]))
                    assert json.loads(data)["error"]["code"] == "server_overloaded", data
                else:
                    json.loads(data)["choices"]

        threads = [threading.Thread(target=client, args=(i,)) for i in range(24)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        first.close()
        print(f"queue of 8, 24 clients: {dict(results)}; refused after {times(refusals)}; "
              f"Retry-After {min(waits)} to {max(waits)} s")
        return results == {200: 8, 503: 16}


def explosive(i):
    """A schema of one of four kinds that no cache has seen."""
    twice = [{"$ref": f"#/$defs/d{level}"} for level in range(1, 25)]
    defs = {f"d{level}": {"type": "object", "properties": {"a": next, f"b{i}": next}}
            for level, next in enumerate(twice)}
    return [
        {"type": "string", "pattern": f"((a{{1,{500 + i}}}){{1,500}}){{1,500}}"},
        {"type": "array", "items": {}, "minItems": 1_000_000_000 + i},
        {"$defs": defs | {"d24": {"type": "integer"}}, "$ref": "#/$defs/d0"},
        {"type": "object", "patternProperties": {
            f"^(a|b){{{n}}}{i}$": {"type": "integer"} for n in range(1, 200)}},
    ][i % 4]


def formed(i, stream=False):
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": explosive(i)}}
    return chat("x", 2, response_format=form, stream=stream)


class Attackers:
    """Clients that send explosive schemas until so many were answered."""

    def __init__(self, port, n_clients, n_requests):
        self.port, self.todo = port, iter(range(n_requests))
        self.results, self.lock = collections.Counter(), threading.Lock()
        self.threads = [threading.Thread(target=self.work) for _ in range(n_clients)]

    def work(self):
        while True:
            with self.lock:
                i = next(self.todo, None)
            if i is None:
                return
            status, _, _ = serving.post(self.port, CHAT, formed(i))
            with self.lock:
                self.results[status] += 1

    def go_on(self):
        return any(thread.is_alive() for thread in self.threads)

    def __enter__(self):
        [thread.start() for thread in self.threads]
        return self

    def __exit__(self, *_):
        [thread.join() for thread in self.threads]


def grammars(args):
    with start(args, 4) as server:
        port = server.port

        def plain(i):
            begin = time.monotonic()
            status, _, _ = serving.post(port, CHAT, chat(prompt(20, i), 16, stream=False))
            assert status == 200
            return time.monotonic() - begin

        def kept(when):
            print(f"{when}: {server.status('VmRSS') / 1024:.0f} MiB resident, {server.n_files()} "
                  f"descriptors, {server.status('Threads')} threads", flush=True)
            return server.status("VmRSS"), server.n_files(), server.status("Threads")

        [plain(i) for i in range(100)]
        with Attackers(port, 8, 200):
            pass
        before = kept("after 200")
        alone = [plain(1000 + i) for i in range(300)]
        with Attackers(port, 8, args.requests) as attackers:
            beside = []
            while attackers.go_on():
                beside.append(plain(10_000 + len(beside)))
        after = kept(f"after {args.requests} more")
        print(f"answers: {dict(attackers.results)}\nalone: {times(alone)}\n"
              f"beside: {times(beside)} of {len(beside)}", flush=True)
        ratio = percentile(beside, 0.99) / percentile(alone, 0.99)
        print(f"p99 is {ratio:.2f} times that of alone")
        grown = (after[0] - before[0]) / 1024
        flat = all(a <= b for a, b in zip(after[1:], before[1:]))
        return ratio <= 1.5 and grown < 64 and flat


HARM = [
    b"GET /health HTTP/1.1\r\nHost: evil.example\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHos",
    b"\x16\x03\x01\x02\x00\x01",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999999999999\r\n\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 40000\r\n"
    b"Connection: close\r\n\r\n" + b"[" * 40000,
    b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n"
    b"Content-Encoding: gzip\r\nConnection: close\r\n\r\n\x1f\x8b",
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 90\r\n"
    b"Connection: close\r\n\r\n" + b'{"messages":[{"role":"user","content":"x"}],"max_tokens":1e99'
    b',"temperature":-1,"n":9999999}',
]


def harm(port, chance):
    with socket.create_connection(("127.0.0.1", port), 20) as connection:
        connection.sendall(chance.choice(HARM))
        connection.shutdown(socket.SHUT_WR)
        try:
            head = connection.recv(64)
        except ConnectionResetError:
            return "harm: reset"
    status = head.split(b" ")[1].decode() if head.startswith(b"HTTP/") else "closed"
    return f"harm: {status}"


def one(port, i):
    """A request; how it ended."""
    chance = random.Random(i)
    share = chance.random()
    if share < 0.005:
        return harm(port, chance)
    if share < 0.01:
        return f"harm: {serving.post(port, CHAT, formed(i))[0]}"
    body = chat(prompt(chance.randrange(1, 60), i % 500), chance.randrange(1, 12), seed=i)
    if share < 0.11:
        connection = serving.send(port, CHAT, body | {"max_tokens": 200})
        time.sleep(chance.uniform(0, 0.05))
        connection.close()
        return "left"
    if share < 0.5:
        pieces = list(stream(port, body))
        return "streamed" if pieces else "streamed, empty"
    status, _, data = serving.post(port, CHAT, body | {"stream": False})
    if status == 200:
        assert json.loads(data)["choices"][0]["finish_reason"]
    return f"whole: {status}"


def soak(args):
    # A small store of earlier texts, so that it is full early on.
    with start(args, 4, "--kv-ram", "64M") as server:
        port, lock, results = server.port, threading.Lock(), collections.Counter()
        todo, marks = iter(range(args.requests)), []
        marked = {args.requests * k // 4 for k in range(1, 4)} | {min(200, args.requests // 10)}

        def mark(i):
            kept = server.status("VmRSS") / 1024, server.n_files(), server.status("Threads")
            marks.append((i, *kept))

        def work():
            while True:
                with lock:
                    i = next(todo, None)
                    if i in marked:
                        mark(i)
                if i is None:
                    return
                try:
                    end = one(port, i)
                except Exception as error:
                    end = f"{type(error).__name__}: {error}"[:100]
                with lock:
                    results[end] += 1

        begin = time.monotonic()
        threads = [threading.Thread(target=work) for _ in range(16)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        seconds = time.monotonic() - begin
        wait_until(lambda: n_busy(port) == 0 and metric(port, "moeba_queue_length") == 0)
        # Threads that wait for a file or a grammar end after ten idle seconds.
        time.sleep(12)
        mark(args.requests)
        print(f"{args.requests} requests in {seconds:.0f} s: {dict(sorted(results.items()))}")
        for i, rss, n_files, n_threads in marks:
            print(f"after {i}: {rss:.0f} MiB resident, {n_files} descriptors, {n_threads} threads")
        named = ("harm: ", "left", "streamed", "whole: 200")
        odd = {end: n for end, n in results.items() if not end.startswith(named)}
        if odd:
            print(f"ended otherwise: {odd}")
        first, last = marks[0], marks[-1]
        flat = all(a <= b for a, b in zip(last[2:], first[2:]))
        return not odd and flat and results.total() == args.requests


PARTS = {"beside": beside, "disk": disk, "cancel": cancel, "queue": queue, "grammars": grammars,
         "soak": soak}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("file", nargs="?", default=DEMO)
    parser.add_argument("--moeba", default=MOEBA)
    parser.add_argument("--part", default=",".join(PARTS), type=lambda text: text.split(","))
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("--ram", help="as in moeba serve")
    parser.add_argument("--context", type=int, default=2048, help="tokens of a slot")
    parser.add_argument("--prompt", type=int, default=1500, help="words of a long prompt")
    parser.add_argument("--answer", type=int, default=1500, help="tokens of A's answer")
    parser.add_argument("--requests", type=int, default=10_000,
                        help="of the soak, and explosive schemas of grammars")
    args = parser.parse_args()
    failed = []
    for part in args.part:
        print(f"\n{part}", flush=True)
        if not PARTS[part](args):
            failed.append(part)
    print("\n" + (f"not as promised: {', '.join(failed)}" if failed else "all as promised"))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
