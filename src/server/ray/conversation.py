"""The conversation that a request belongs to."""

import hashlib
import json
import random

# Headers in which clients name a conversation.
SESSIONS = ("x-session-id", "x-claude-code-session-id")


def conversation(headers, body):
    """A number for the conversation of a request: its beginning up to the first turn of the user,
    and the key of its sender, as caches are not shared between keys."""
    headers = {name.lower(): value for name, value in headers}
    key = [headers.get("authorization"), headers.get("x-api-key")]
    session = next((headers[name] for name in SESSIONS if name in headers), None)
    if session is not None:
        return number([key, session])
    if not isinstance(body, dict):
        return number([key, random.getrandbits(64)])
    if body.get("prompt_cache_key"):
        return number([key, body["prompt_cache_key"]])
    begin = [body.get("instructions"), body.get("system")]
    messages = body.get("messages", body.get("input", body.get("prompt")))
    if isinstance(messages, str):
        begin.append(messages[:1024])
    elif isinstance(messages, list):
        for message in messages:
            begin.append(message)
            if isinstance(message, dict) and message.get("role") == "user":
                break
    return number([key, begin])


def number(value):
    text = json.dumps(value, sort_keys=True, default=str).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big")
