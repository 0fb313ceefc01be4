"""The parts of `serve --ray` that need no cluster."""

import io
import json
import os
import sys
from contextlib import redirect_stderr

sys.path.insert(0, os.environ["MOEBA_RAY_PROGRAMS"])

import main  # noqa: E402
from api import as_local, error_of, seeded  # noqa: E402
from conversation import conversation  # noqa: E402
from exact import Answer, Disagree, Events, failure, parsed  # noqa: E402
from registry import Registry, difference  # noqa: E402
from router import ranked  # noqa: E402


def sse(value, name=None):
    head = f"event: {name}\n" if name else ""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    return f"{head}data: {text}\n\n".encode()


def chunk(text, answer, index=0):
    choice = {"index": index, "delta": {"content": text}, "finish_reason": None}
    return sse({"id": answer, "created": len(answer), "choices": [choice], "logprob": -1e-05})


def told(answer, events):
    return [out for out in map(answer.take, events) if out is not None]


def events_are_cut_where_they_end():
    whole = chunk("x", "a") + chunk("é", "a") + b"data: [DONE]\n\n"
    for size in (1, 7, len(whole)):
        events = Events("text/event-stream; charset=utf-8")
        parts = [whole[i:i + size] for i in range(0, len(whole), size)]
        found = [event for part in parts for event in events.push(part)]
        assert b"".join(found) == whole and len(found) == 3 and events.rest == b""


def an_answer_goes_on_under_its_first_name():
    answer, text = Answer(), '"id":"bb","created":2}'
    first = [chunk("x", "a"), b": ping\n\n", chunk("y", "a", 1), chunk("z", "a")]
    assert told(answer, first) == first
    # Another replica: choices come in another order, and a text that looks like a name stays.
    answer.begin()
    again = [chunk("y", "bb", 1), chunk("x", "bb"), chunk("z", "bb"), chunk(text, "bb")]
    assert told(answer, again + [b"data: [DONE]\n\n"]) == [chunk(text, "a"), b"data: [DONE]\n\n"]
    # And a third one, whose names are again others.
    answer.begin()
    third = [chunk("x", "ccc"), chunk("z", "ccc"), chunk(text, "ccc"), chunk("w", "ccc")]
    assert told(answer, third) == [chunk("w", "a")]


def another_text_is_found_out():
    for later in (chunk("q", "b"), chunk("x", "b", 1)):
        answer = Answer()
        answer.take(chunk("x", "a"))
        answer.take(chunk("y", "a", 1))
        answer.begin()
        try:
            answer.take(later)
        except Disagree as e:
            assert str(e) == "the replicas disagree at event 0"
        else:
            raise AssertionError(later)


def other_wires_go_on_too():
    def line(text, **more):
        message = {"role": "assistant", "content": text}
        body = {"created_at": "now", "message": message, "done": False, **more}
        return (json.dumps(body, separators=(",", ":")) + "\n").encode()

    answer = Answer()
    # A line without a text only says that the answer is computed.
    first = [line(""), line("x"), line("", logprobs=[]), line("y")]
    assert told(answer, first) == first
    answer.begin()
    assert told(answer, [line("x"), line(""), line("y"), line("z")]) == [line("z")]

    def response(kind, number, name="r1", **more):
        data = {"type": kind, "sequence_number": number, "response": {"id": name}, **more}
        return sse(data, kind)

    answer = Answer()
    first = [response("response.created", 0), response("response.in_progress", 1),
             response("response.in_progress", 2), response("delta", 3, delta="x")]
    assert told(answer, first) == first
    answer.begin()
    again = [response("response.created", 0, "r2"), response("response.in_progress", 1, "r2"),
             response("delta", 2, "r2", delta="x"), response("delta", 3, "r2", delta="y")]
    assert told(answer, again) == [response("delta", 4, delta="y")]


def failures_are_told_from_texts():
    assert failure(parsed(sse({"error": {"message": "disk"}}))) == "disk"
    assert failure(parsed(sse({"type": "error", "error": {"message": "disk"}}))) == "disk"
    assert failure(parsed(b'{"error":"disk"}\n')) == "disk"
    assert failure(parsed(chunk("error", "a"))) is None
    assert failure(parsed(b"data: [DONE]\n\n")) is None
    for path in ("/v1/messages", "/api/chat", "/v1/responses", "/completion"):
        assert "gone" in json.dumps(error_of(path, 500, "x", "gone"))


def seeds_are_set_where_there_is_none():
    def seed(path, body):
        body = json.loads(seeded(path, body))
        return body.get("seed", body.get("options", {}).get("seed"))

    assert seed("/v1/completions", {"seed": 5}) == 5
    for body in ({}, {"seed": None}, {"seed": -1}):
        assert 0 <= seed("/v1/chat/completions", dict(body)) < 1 << 32
    assert seed("/api/chat", {"options": {"seed": 3}}) == 3
    assert seed("/api/generate", {"model": "m"}) >= 0


def conversations_have_a_machine():
    class Fake:
        def __init__(self, number):
            self.node_id = f"{number * 0x9E3779B97F4A7C15 % (1 << 64):016x}" + "0" * 40

    first = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    later = first + [{"role": "assistant", "content": "a"}, {"role": "user", "content": "v"}]
    key = [("Authorization", "Bearer k")]
    assert conversation(key, {"messages": first}) == conversation(key, {"messages": later})
    assert conversation(key, {"messages": first}) != conversation([], {"messages": first})
    assert conversation([], {"input": "a"}) != conversation([], {"input": "b"})
    session = [("X-Session-Id", "1")]
    assert conversation(session, {"prompt": "a"}) == conversation(session, {"prompt": "b"})
    for n in (3, 10, 100):
        replicas, keys = [Fake(i) for i in range(n)], [hash((7, i)) for i in range(4000)]
        before = [ranked(key, replicas)[0] for key in keys]
        gone = replicas.pop(n // 2)
        after = [ranked(key, replicas)[0] for key in keys]
        moved = [b for b, a in zip(before, after) if a is not b]
        assert all(replica is gone for replica in moved)
        assert len(moved) <= len(keys) * (1 / n + 0.05), (n, len(moved))


def machines_that_differ_are_named():
    facts = {"model": "a" * 64, "n_ctx": "512", "fingerprint": "b1"}
    other = {"name": "B", "facts": {"model": "c" * 64, "n_ctx": "512", "fingerprint": "b2"}}
    why = difference("A", facts, other)
    assert why == f"A and B differ in the model file: {'a' * 12} and {'c' * 12}", why
    assert difference("A", facts, {"name": "B", "facts": facts}) is None
    registry = Registry()
    registry.start("d")
    registry.refuse("d", "A", "no such file")
    registry.refuse("d", "A", why)
    assert registry.news()["refusals"] == ["A: no such file", why]


def an_open_cluster_is_refused():
    def verdict(n, mode, insecure):
        main.SETTINGS = {"insecure": insecure}
        main.nodes = lambda: [{}] * n
        os.environ["RAY_AUTH_MODE"] = mode
        said = io.StringIO()
        try:
            with redirect_stderr(said):
                main.check_access()
        except SystemExit as e:
            assert e.code == 1
            return said.getvalue()
        return None

    assert verdict(1, "disabled", False) is None
    assert verdict(3, "token", False) is None
    assert verdict(3, "disabled", True) is None
    why = verdict(3, "disabled", False)
    assert "3 machines" in why and "RAY_AUTH_MODE=token" in why and "--insecure" in why, why


def own_addresses_are_local():
    class Fake:
        scope = {"server": ("10.0.0.5", 8080)}

        def __init__(self, host):
            self.headers = type("H", (dict,), {"raw": [(b"host", host.encode())]})(host=host)

    assert as_local(Fake("10.0.0.5:8080")) == [("host", "127.0.0.1")]
    assert as_local(Fake("evil.example:8080")) == [("host", "evil.example:8080")]


for test in (
    events_are_cut_where_they_end, an_answer_goes_on_under_its_first_name,
    another_text_is_found_out, other_wires_go_on_too, failures_are_told_from_texts,
    seeds_are_set_where_there_is_none, conversations_have_a_machine,
    machines_that_differ_are_named, an_open_cluster_is_refused, own_addresses_are_local,
):
    test()
    print(f"ok  {test.__name__.replace('_', ' ')}")
