"""Three Ray nodes on this machine, a replica of the demo model on each, and a client."""

import json
import os
import random
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request

TEMP = os.environ["MOEBA_RAY_TEMP"]
os.environ.update(
    RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32), RAY_USAGE_STATS_ENABLED="0",
    RAY_memory_monitor_refresh_ms="0", RAY_TMPDIR=TEMP,
)

import ray  # noqa: E402 The environment is read when it is imported.
from ray.cluster_utils import Cluster  # noqa: E402

MOEBA = os.environ["MOEBA"]
MODEL = os.environ["MOEBA_DEMO"]
CHAT = "/v1/chat/completions"


class Machines:
    """Ray nodes, each with variables of its own."""

    def __init__(self, environments):
        common = {"object_store_memory": 80 << 20, "num_cpus": 1}
        head = {"include_dashboard": False, "env_vars": environments[0], **common}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.nodes = [self.cluster.head_node]
        self.nodes += [self.cluster.add_node(env_vars=env, **common) for env in environments[1:]]
        self.address = self.cluster.address
        ray.init(address=self.address, namespace="moeba", logging_level="ERROR",
                 log_to_driver=False)

    def replica(self, name):
        """The processes of a node's replica: (actor, engine)."""
        node = next(node for node in self.nodes if node.node_id.startswith(name))
        raylet = node.all_processes["raylet"][0].process.pid
        for actor in children(raylet):
            if "ServeReplica:moeba:Replica" in command_of(actor):
                for child in children(actor):
                    if "serve" in command_of(child):
                        return actor, child
        return None

    def kill_an_engine(self):
        """Unless it is the last one. Returns whether it did."""
        found = [self.replica(node.node_id[:8]) for node in self.nodes]
        alive = [pair for pair in found if pair]
        if len(alive) < 2:
            return False
        os.kill(random.choice(alive)[1], signal.SIGKILL)
        return True

    def others(self):
        """Names of the nodes that are not the head, as answers have them."""
        return [node.node_id[:8] for node in self.nodes[1:]]

    def remove(self, name):
        node = next(node for node in self.nodes if node.node_id.startswith(name))
        self.cluster.remove_node(node, allow_graceful=False)
        self.nodes.remove(node)

    def ports(self):
        registry = ray.get_actor("machines", namespace="moeba")
        return ray.get(registry.state.remote())[0]

    def end(self):
        ray.shutdown()
        self.cluster.shutdown()


def command_of(pid):
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def children(pid):
    out = []
    for name in os.listdir("/proc"):
        try:
            with open(f"/proc/{name}/stat", encoding="utf-8") as file:
                if name.isdigit() and int(file.read().rpartition(")")[2].split()[1]) == pid:
                    out.append(int(name))
        except (OSError, ValueError):
            pass
    return out


class App:
    """`moeba serve --ray` on the cluster."""

    def __init__(self, machines, *args, wait=120, model=MODEL, port=0):
        self.ready = os.path.join(TEMP, f"url-{secrets.token_hex(4)}")
        self.log = tempfile.TemporaryFile(dir=TEMP, mode="w+")
        environment = dict(os.environ, RAY_ADDRESS=machines.address, MOEBA_PYTHON=sys.executable)
        command = [MOEBA, "serve", model, "--ray", "--port", str(port)]
        command += ["--ready-file", self.ready, *args]
        self.process = subprocess.Popen(
            command, env=environment, stderr=self.log, stdout=subprocess.DEVNULL
        )
        end = time.monotonic() + wait
        while not os.path.exists(self.ready):
            if self.process.poll() is not None or time.monotonic() > end:
                break
            time.sleep(0.05)
        self.url = open(self.ready, encoding="utf-8").read().strip() if self.is_ready() else None

    def is_ready(self):
        return os.path.exists(self.ready)

    def said(self):
        self.log.seek(0)
        return self.log.read()

    def end(self):
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(60) == 143, self.said()


def body_of(text, n, **more):
    message = {"role": "user", "content": text}
    usual = {"messages": [message], "max_tokens": n, "seed": 7, "ignore_eos": True}
    return {**usual, **more}


def post(url, body, headers=None, timeout=120):
    headers = {"Content-Type": "application/json", **(headers or {})}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    return urllib.request.urlopen(request, timeout=timeout)


def whole(url, text, n, **more):
    """The content of an answer that is not streamed."""
    with post(url + CHAT, body_of(text, n, **more)) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]


def second_turn(app, name):
    """Whether the second turn of a new conversation finds the keys and values of its first one."""
    # Longer than a page, so that a cache can have a beginning of it.
    first = f"{name}: " + "Tell me of branches and of commits in a long story. " * 6
    body = body_of(first, 4)
    for _ in range(2):
        with post(app.url + CHAT, body) as answer:
            answer = json.load(answer)
        said = answer["choices"][0]["message"]
        body["messages"] += [said, {"role": "user", "content": "Go on."}]
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 64


class Stream(threading.Thread):
    """An answer that comes in events, on a thread of its own."""

    def __init__(self, url, text, n, **more):
        super().__init__(daemon=True)
        self.url, self.body = url, body_of(text, n, stream=True, **more)
        self.text, self.ids, self.n_done, self.error = "", set(), 0, None
        self.replica, self.longest, self.n_events = None, 0.0, 0
        self.begun = threading.Event()
        self.start()

    def run(self):
        try:
            with post(self.url + CHAT, self.body) as answer:
                self.replica = answer.headers["x-moeba-replica"]
                last = time.monotonic()
                for line in answer:
                    now = time.monotonic()
                    self.longest, last = max(self.longest, now - last), now
                    self.take(line)
        except Exception as e:  # The test looks at it.
            self.error = self.error or repr(e)
        self.begun.set()

    def take(self, line):
        if not line.startswith(b"data: "):
            return
        if line.strip() == b"data: [DONE]":
            self.n_done += 1
            return
        event = json.loads(line[6:])
        if "error" in event:
            self.error = event["error"]["message"]
            return
        self.n_events += 1
        self.ids.add(event["id"])
        for choice in event["choices"]:
            self.text += choice["delta"].get("content") or ""
        if self.n_events == 12:
            self.begun.set()

    def end(self):
        self.join(120)
        assert not self.is_alive(), "the answer has no end"
        return self


def status_of(url, body, **more):
    """The status of a request, and its headers."""
    try:
        with post(url, body, **more) as answer:
            return answer.status, answer.headers
    except urllib.error.HTTPError as e:
        return e.code, e.headers
