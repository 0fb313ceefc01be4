"""Shared by the benchmarks of servers: starting one, requests with times, percentiles."""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "models/demo/moeba-demo.gguf"
MOEBA = ROOT / "target/release/moeba"


class Server:
    """A process that serves on a port of this machine, until the block ends."""

    def __init__(self, command, port, start=60, group=None):
        self.port = port
        self.log = tempfile.TemporaryFile()
        paths = group.paths if group else []
        enter = "".join(f"echo $$ > {path}/cgroup.procs && " for path in paths)
        self.process = subprocess.Popen(["sh", "-c", enter + 'exec "$@"', "sh", *map(str, command)],
                                        stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log)
        end = time.monotonic() + start
        while not self.is_ready():
            if self.process.poll() is not None or time.monotonic() > end:
                self.process.kill()
                sys.exit(f"{command[0]} does not serve:\n{self.text()[-2000:]}")
            time.sleep(0.05)

    def is_ready(self):
        try:
            return get(self.port, "/health")[0] == 200
        except OSError:
            return False

    def text(self):
        self.log.seek(0)
        return self.log.read().decode(errors="replace")

    def status(self, key):
        """KiB of a line of /proc/PID/status."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(rf"{key}:\s+(\d+)", text)[1])

    def n_files(self):
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(15)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.log.close()


class Meanwhile:
    """Takes one step after the other on a thread of its own, until the block ends."""

    def __init__(self):
        self.stops, self.thread = threading.Event(), threading.Thread(target=self.run)

    def run(self):
        while not self.stops.is_set():
            self.step()

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.stops.set()
        self.thread.join()


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def moeba(binary, model, args=(), **more):
    """`moeba serve` with these arguments."""
    port = free_port()
    return Server([binary, "serve", model, "--port", port, *args], port, **more)


def send(port, path, body, timeout=600):
    """A connection whose request is sent."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    data = json.dumps(body) if isinstance(body, (dict, list)) else body
    connection.request("POST", path, data, {"Content-Type": "application/json"})
    return connection


def post(port, path, body, timeout=600):
    """Status, headers and text of an answer."""
    connection = send(port, path, body, timeout)
    try:
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()
    finally:
        connection.close()


def get(port, path, timeout=60):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def events(answer):
    """Each event of a stream with the time when it came."""
    for line in answer:
        if line.startswith(b"data: "):
            now = time.monotonic()
            data = line[6:].strip()
            if data == b"[DONE]":
                return
            yield now, json.loads(data)


def metric(port, name, labels=""):
    """The value of a series; 0 if it is not there."""
    found = re.search(rf"^{name}{re.escape(labels)} (\S+)$", get(port, "/metrics")[1], re.M)
    return float(found[1]) if found else 0.0


def n_busy(port):
    """Slots that compute."""
    return sum(slot["is_processing"] for slot in json.loads(get(port, "/slots")[1]))


def wait_until(test, seconds=60, pause=0.002):
    """Seconds until a test holds."""
    start = time.monotonic()
    while not test():
        if time.monotonic() - start > seconds:
            sys.exit(f"{test.__name__}: not within {seconds} s")
        time.sleep(pause)
    return time.monotonic() - start


def percentile(values, share):
    """The smallest value that so large a share of them does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-int(share * 1000) * len(ordered) // 1000) - 1)] if ordered else None
