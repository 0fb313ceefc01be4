"""Events of a stream that several replicas give one after the other: each computes the answer from
its beginning, so what was sent already must come again, and what follows goes on."""

import json
import re

# Members that a replica chooses by itself, or measures: they are no part of the answer.
OWN = {
    "created", "created_at", "id", "id_slot", "item_id", "moeba", "obfuscation", "response_id",
    "sequence_number", "timings", "tokens_cached", "usage",
    "eval_duration", "load_duration", "prompt_eval_duration", "total_duration",
}
# The client knows the first replica's values of these.
NAMES = {"created", "created_at", "id", "item_id", "response_id"}


class Disagree(Exception):
    """A replica does not repeat what another has said."""


class Events:
    """Cuts bytes into events: frames of server-sent events, or lines of JSON."""

    def __init__(self, content_type):
        self.end = b"\n\n" if content_type.startswith("text/event-stream") else b"\n"
        self.rest = b""

    def push(self, data):
        *whole, self.rest = (self.rest + data).split(self.end)
        return [event + self.end for event in whole]


class Answer:
    """The events that were sent. `begin` says that another replica starts from the beginning."""

    def __init__(self):
        # The events of each choice: choices are computed side by side, in no order.
        self.sent = {}
        self.n_sent = 0
        self.begin()

    def begin(self):
        self.n_seen = {}
        # Members that have a value of this replica's, and what the first one said.
        self.names = {}

    def take(self, event):
        """The bytes for the client, or None where it has them already."""
        data = parsed(event)
        if data is None:
            return event
        is_json = isinstance(data, dict)
        if is_json and is_filler(data):
            return None if self.is_behind() else self.written(event)
        names = []
        text = json.dumps(canonical(data, names)) if is_json else data
        choice = choice_of(data) if is_json else -1
        sent = self.sent.setdefault(choice, [])
        n = self.n_seen.get(choice, 0)
        self.n_seen[choice] = n + 1
        if n == len(sent):
            sent.append((text, [self.names.get(name, name) for name in names]))
            return self.written(event)
        was, first = sent[n]
        if was != text:
            raise Disagree(f"the replicas disagree at event {n}")
        self.names.update((own, its) for own, its in zip(names, first) if own != its)
        return None

    def is_behind(self):
        return any(self.n_seen.get(choice, 0) < len(sent) for choice, sent in self.sent.items())

    def written(self, event):
        """The event with the first replica's names, and the number that comes next. All else keeps
        its bytes: within a text, quotes are escaped, so that a member is found as it is written."""
        for own, its in self.names.items():
            pattern = re.escape(member(own)) + b"(?=[,}])"
            event = re.sub(pattern, lambda _, its=its: member(its), event)
        event = re.sub(b'"sequence_number":[0-9]+', b'"sequence_number":%d' % self.n_sent, event)
        self.n_sent += 1
        return event


def member(name):
    key, value = name
    return f'"{key}":{json.dumps(value, ensure_ascii=False)}'.encode()


def parsed(event):
    """An event's data: an object, a text, or None in comments."""
    mark, text = event.rpartition(b"data: ")[1:]
    if not mark and event.lstrip()[:1] != b"{":
        return None
    try:
        return json.loads(text)
    except ValueError:
        return text.decode(errors="replace").strip()


def canonical(value, names):
    """The value without a replica's own members, whose names are collected."""
    if isinstance(value, list):
        return [canonical(item, names) for item in value]
    if not isinstance(value, dict):
        return value
    out = {}
    for key, item in value.items():
        if key in OWN:
            if key in NAMES and isinstance(item, (str, int)):
                names.append((key, item))
        else:
            out[key] = canonical(item, names)
    return out


def choice_of(data):
    """The choice that an event belongs to; -1 for those of the whole answer."""
    choices = data.get("choices")
    if isinstance(choices, list):
        return choices[0].get("index", 0) if choices else -1
    return 0


def is_filler(data):
    """Whether an event only tells that the answer is still computed, or how far."""
    if data.get("type") in ("ping", "response.in_progress") or "prompt_progress" in data:
        return True
    message = data.get("message", data)
    is_line = data.get("done") is False and isinstance(message, dict)
    texts = ("content", "response", "thinking", "tool_calls")
    return is_line and not any(message.get(name) for name in texts)


def failure(data):
    """The message of an event that ends an answer before its time, or None."""
    if not isinstance(data, dict):
        return None
    if data.get("type") == "response.failed":
        return str((data.get("response") or {}).get("error") or "the response has failed")
    error = data.get("error")
    if not error:
        return None
    return error.get("message", "an error") if isinstance(error, dict) else str(error)
