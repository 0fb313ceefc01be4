#!/usr/bin/env python3
"""The same request has the same bytes, whatever runs beside it and however the server is set up.

    cargo build --release
    bench/serve_bytes.py [FILE.gguf] [--moeba PATH] [--quick] [--first N]
                         [--reference PATH]

64 seeded requests (greedy, sampled, by schema, with tools, several choices, log probabilities,
plain text, with a long common beginning), whole and streamed, are answered one at a time by a fresh
server. Then each setting of the matrix gets them shuffled, at each concurrency, while other
clients come and go in the middle of their answers: texts, log probabilities, calls, their ids and
the counts of tokens must hash to the same. `--reference` is another build of moeba, whose bytes are
those to have. Prints a line for each run; ends with 1 if one differs.
"""

import argparse
import hashlib
import itertools
import json
import random
import sys
import tempfile
import threading
import time

import serving
from serving import DEMO, MOEBA

N = 64
QUESTIONS = ["What is a branch?", "How do I list files?", "Explain a pointer.", "What is a shell?"]
BEGINNING = "You are a patient teacher of programming. Answer in one sentence. " * 6
SCHEMA = {"type": "object", "properties": {
    "ok": {"type": "boolean"}, "kind": {"enum": ["bug", "feature"]},
    "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["ok", "kind", "n"], "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False}}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {
    "type": "object", "properties": {"town": {"enum": ["Rome", "Oslo", "Bern"]}},
    "required": ["town"], "additionalProperties": False}}} for name in ["weather", "time"]]


def request(i):
    """Path and body of a request; every eighth is of the same kind."""
    chat = {"messages": [{"role": "user", "content": QUESTIONS[i // 8 % 4]}],
            "max_tokens": 12 + i % 5, "seed": i}
    kinds = [
        {"temperature": 0, "repeat_penalty": 1.0},
        {"temperature": 1.2, "top_p": 0.9, "min_p": 0.02},
        {"response_format": {"type": "json_schema",
                             "json_schema": {"name": "x", "schema": SCHEMA}}, "max_tokens": 40},
        {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False,
         "max_tokens": 60},
        {"n": 3, "temperature": 1.0},
        {"logprobs": True, "top_logprobs": 4, "frequency_penalty": 0.5},
        {"messages": [{"role": "system", "content": BEGINNING}, *chat["messages"]]},
    ]
    if i % 8 == 7:
        return "/v1/completions", {"prompt": [QUESTIONS[i // 8 % 4], "The file"], "seed": i,
                                   "max_tokens": 8, "logprobs": 2, "stop": ["."]}
    return "/v1/chat/completions", {**chat, **kinds[i % 8]}


def essence(answer):
    """The part that must not change: no id of the request, no time, no cached tokens."""
    usage = answer["usage"]
    return {"choices": answer["choices"], "fingerprint": answer["system_fingerprint"],
            "prompt": usage["prompt_tokens"], "completion": usage["completion_tokens"]}


def text_of(answer):
    """Texts and calls of each choice, which a stream has as well."""
    out = []
    for choice in answer["choices"]:
        message = choice.get("message", choice)
        calls = [(call["id"], call["function"]["name"], call["function"]["arguments"])
                 for call in message.get("tool_calls") or []]
        out.append([message.get("content") or choice.get("text") or "", calls,
                    choice["finish_reason"]])
    return out


def streamed(port, path, body):
    """The same from a stream."""
    connection = serving.send(port, path, body | {"stream": True})
    choices = {}
    for _, chunk in serving.events(connection.getresponse()):
        if "error" in chunk:
            raise ValueError(f"an answer failed: {chunk}")
        for choice in chunk["choices"]:
            text, calls, _ = found = choices.setdefault(choice["index"], ["", {}, None])
            delta = choice.get("delta", choice)
            found[0] = text + (delta.get("content") or delta.get("text") or "")
            for call in delta.get("tool_calls") or []:
                of_call = calls.setdefault(call["index"], ["", "", ""])
                of_call[0] += call.get("id") or ""
                of_call[1] += call["function"].get("name") or ""
                of_call[2] += call["function"].get("arguments") or ""
            found[2] = choice["finish_reason"] or found[2]
    connection.close()
    return [[text, [tuple(call) for call in calls.values()], reason]
            for _, (text, calls, reason) in sorted(choices.items())]


def digest(value):
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def ask(port, i):
    """Hashes of the whole answer, and of what a stream can say."""
    path, body = request(i)
    status, _, data = serving.post(port, path, body)
    if status != 200:
        raise ValueError(f"request {i}: status {status}: {data[:300]}")
    answer = json.loads(data)
    return digest(essence(answer)), digest(text_of(answer))


class Disturbance(serving.Meanwhile):
    """Clients that ask for long answers and go away in the middle."""

    def __init__(self, port, seed):
        super().__init__()
        self.port, self.chance, self.n = port, random.Random(seed), 0

    def step(self):
        body = {"messages": [{"role": "user", "content": BEGINNING * self.chance.randrange(3)}],
                "max_tokens": 200, "stream": True, "seed": self.n, "ignore_eos": True}
        try:
            connection = serving.send(self.port, "/v1/chat/completions", body)
            connection.sock.settimeout(self.chance.uniform(0.005, 0.15))
            connection.getresponse().read()
        except (OSError, ValueError, serving.http.client.HTTPException):
            pass
        connection.close()
        self.n += 1
        time.sleep(0.05)


def compare(port, expected, concurrency, seed):
    """Requests whose bytes are others, of all, with so many at a time in another order."""
    order = list(range(N))
    random.Random(seed).shuffle(order)
    wrong, lock, todo = [], threading.Lock(), iter(order)

    def work():
        while True:
            with lock:
                i = next(todo, None)
            if i is None:
                return
            try:
                if (i + seed) % 3 == 0:
                    same = digest(streamed(port, *request(i))) == expected[i][1]
                else:
                    same = ask(port, i) == expected[i]
            except (OSError, ValueError) as error:
                print(error, file=sys.stderr)
                same = False
            if not same:
                wrong.append(i)

    threads = [threading.Thread(target=work) for _ in range(concurrency)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    return wrong


def matrix(quick):
    """Settings of the server, each with its concurrencies."""
    policies = ["on-demand", "finemoe", "moe-infinity", "moepic", "prescope"]
    if quick:
        return [(["--parallel", "4", "-t", "2"], [8]),
                (["--parallel", "2", "-t", "1", "--ram", "10%", "--kv-ram", "0"], [4])]
    runs = [(["--parallel", n, "-t", t, "--kv-ram", cache], [1, 4, 32])
            for n, t, cache in itertools.product(["1", "2", "8"], ["1", "2"], ["auto", "0"])]
    for share, policy in itertools.product(["10%", "50%", "100%"], policies):
        n = {"10%": "8", "50%": "2", "100%": "1"}[share]
        runs.append((["--parallel", n, "-t", "2", "--ram", share, "--policy", policy], [16]))
    for more in [["--ubatch-size", "32"], ["--prefill-share", "0.05"], ["--prefill-share", "0.95"],
                 ["--io", "pread", "--ram", "10%"], ["--no-mmap"],
                 # Texts are parked.
                 ["-c", "800", "--kv-unified"], ["-c", "800", "--kv-unified", "--kv-ram", "0"]]:
        runs.append((["--parallel", "4", "-t", "2", *more], [8]))
    return runs


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("file", nargs="?", default=DEMO)
    parser.add_argument("--moeba", default=MOEBA)
    parser.add_argument("--reference", help="a moeba whose answers are the right ones")
    parser.add_argument("--quick", action="store_true", help="two settings only")
    parser.add_argument("--first", type=int, default=0, help="settings to leave out")
    args = parser.parse_args()
    common = ["-c", 16384]
    alone = [*common, "--profile", "none", "--parallel", 1, "-t", 1]
    with serving.moeba(args.reference or args.moeba, args.file, alone) as server:
        expected = [ask(server.port, i) for i in range(N)]
        again = [ask(server.port, i) for i in range(N)]
        parted = [digest(streamed(server.port, *request(i))) for i in range(N)]
    n_other = len({whole for whole, _ in expected})
    print(f"{N} requests, {n_other} answers; again: {sum(a == b for a, b in zip(again, expected))} "
          f"the same; streamed: {sum(a == b[1] for a, b in zip(parted, expected))} the same")
    all_same = again == expected and parted == [text for _, text in expected] and n_other > N // 2
    n_answers = 0
    for number, (flags, concurrencies) in list(enumerate(matrix(args.quick)))[args.first:]:
        with tempfile.TemporaryDirectory() as folder:
            profile = ["--profile", f"{folder}/p"] if "--policy" in flags else ["--profile", "none"]
            # Those who come and go must not fill the queue.
            settings = [*common, "--queue", 10_000, *profile, *flags]
            with serving.moeba(args.moeba, args.file, settings) as server:
                for concurrency in concurrencies:
                    start = time.monotonic()
                    with Disturbance(server.port, number) as others:
                        wrong = compare(server.port, expected, concurrency, number)
                    all_same &= not wrong
                    n_answers += N
                    seconds = time.monotonic() - start
                    print(f"{' '.join(flags)}, {concurrency} at a time: {N - len(wrong)} of {N} "
                          f"the same, {others.n} others went away, {seconds:.1f} s"
                          f"{'; not ' + str(wrong) if wrong else ''}", flush=True)
    print(f"{n_answers} answers beside others: " + ("all the same" if all_same else "NOT the same"))
    sys.exit(0 if all_same else 1)


if __name__ == "__main__":
    main()
