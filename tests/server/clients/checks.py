"""Shared by the Python clients: where the server is, and a run of named checks.

    MOEBA_URL=http://127.0.0.1:8080 MOEBA_KEY=KEY python3 SCRIPT

Each script prints a line for each check and ends with 0; with 1 if a check has failed; with 77 if
a package is missing.
"""

import json
import os
import sys
import time
import traceback
import urllib.error
import urllib.request

URL = os.environ.get("MOEBA_URL", "http://127.0.0.1:8080")
KEY = os.environ.get("MOEBA_KEY", "none")
MODEL = "moeba-demo"
SKIPPED = 77

HELLO = [{"role": "user", "content": "What is a branch?"}]

WEATHER = {
    "type": "object",
    "properties": {"town": {"type": "string", "enum": ["Rome", "Oslo"]}},
    "required": ["town"],
    "additionalProperties": False,
}

_checks = []


def skip(reason):
    """Ends the script, as a part that it needs is missing."""
    print(f"skipped: {reason}")
    sys.exit(SKIPPED)


def check(function):
    """Adds a function to the checks."""
    _checks.append(function)
    return function


def http(path, body=None):
    """The status and the JSON of a request without a library."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    request = urllib.request.Request(URL + path, data, headers)
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def has(path):
    """Whether the server has this route, which gets an empty object."""
    return http(path, {})[0] not in (404, 501)


def wait_idle(seconds=30):
    """Waits until no slot computes."""
    end = time.monotonic() + seconds
    while any(slot["is_processing"] for slot in http("/slots")[1]):
        assert time.monotonic() < end, f"a slot is not free after {seconds} s"
        time.sleep(0.02)


def raises(kind, status, call):
    """The exception of a call, which has this type and status."""
    try:
        call()
    except kind as error:
        found = getattr(error, "status_code", None)
        assert found == status, f"status {found}, not {status}: {error}"
        return error
    raise AssertionError(f"no {kind.__name__}")


def run():
    """Runs all checks and ends the script."""
    failed = 0
    for function in _checks:
        name = function.__name__
        start = time.monotonic()
        try:
            function()
            print(f"ok      {name}, {time.monotonic() - start:.2f} s")
        except Exception:
            failed += 1
            print(f"FAILED  {name}\n{traceback.format_exc()}")
    print(f"{len(_checks) - failed} of {len(_checks)} checks passed")
    sys.exit(1 if failed else 0)
