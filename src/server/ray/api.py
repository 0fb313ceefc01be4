"""The API on one machine: requests go to replicas, and an answer outlives the replica that began
it."""

import asyncio
import json
import random
import time

import aiohttp
import ray
from ray.exceptions import RayError
from ray.serve.exceptions import BackPressureError, RayServeException
from starlette.responses import Response, StreamingResponse

from conversation import conversation
from exact import Answer, Disagree, Events, failure, parsed
from registry import REGISTRY, SILENCE_S, SPACE
from replica import end_to_end, send, session

# Routes whose answers a seed decides.
GENERATE = {
    "/api/chat", "/api/generate", "/chat/completions", "/completion", "/completions", "/responses",
    "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses",
}
STREAMS = ("text/event-stream", "application/x-ndjson")
METRICS = "text/plain; version=0.0.4; charset=utf-8"
# Replicas that a request may be lost on, but the last.
MAX_LOST = 3
# Statuses that say something of the replica, not of the request.
FAULTS = (500, 502, 503, 529)


class Lost(Exception):
    """A replica does not finish a request."""

    def __init__(self, why, final=None):
        super().__init__(why)
        # The client gets this if no replica does better.
        self.final = final


class Full(Exception):
    """No replica takes the request: why, for programs and for people."""

    def __init__(self, code, message):
        super().__init__(message)
        self.code, self.message = code, message


class Machines:
    """The registry's view of the machines, two seconds old at most: the ports of replicas, and
    which nodes are silent. Ray takes a minute to see that a cable was pulled."""

    def __init__(self):
        self.ports, self.silent, self.suspects, self.task = {}, set(), {}, None

    def start(self):
        self.task = self.task or asyncio.create_task(self.follow())

    async def follow(self):
        while True:
            try:
                registry = ray.get_actor(REGISTRY, namespace=SPACE)
                self.ports, self.silent = await registry.state.remote()
            except (RayError, ValueError):
                pass
            await asyncio.sleep(2)

    def suspect(self, node):
        """A replica of this node was silent: others are asked until the registry knows more."""
        self.suspects[node] = time.monotonic()

    def avoided(self):
        now = time.monotonic()
        return self.silent | {node for node, at in self.suspects.items() if now - at < SILENCE_S}


class Api:
    def __init__(self, settings, replicas):
        self.settings, self.replicas = settings, replicas
        self.stream = replicas.options(stream=True)
        self.http, self.machines = None, Machines()
        # Seconds that an answer takes, for those who are to come again.
        self.seconds = 1.0
        self.counts = {"requests": 0, "failovers": 0, "disagree": 0, "rejected": 0}

    async def __call__(self, request):
        self.machines.start()
        body = await request.body()
        query = f"?{request.url.query}" if request.url.query else ""
        path = request.url.path
        call = {
            "method": request.method, "path": path + query, "body": body, "avoid": [],
            "headers": as_local(request),
        }
        if request.method in ("GET", "HEAD", "OPTIONS") or path.startswith("/slots/"):
            response = await self.here(call, path)
            if response is None and path == "/metrics":
                # The router's part alone: another machine's series are not this one's.
                response = response_of(200, [("content-type", METRICS)], self.metrics())
            if response is not None:
                return response
        parsed_body = as_json(body)
        call["key"] = conversation(call["headers"], parsed_body)
        if path.rstrip("/") in GENERATE and isinstance(parsed_body, dict):
            self.counts["requests"] += 1
            if self.settings["seeds"]:
                call["body"] = seeded(path, parsed_body)
        return await Request(self, call, path).response()

    async def here(self, call, path):
        """The answer of this machine's own replica; None if it has none."""
        port = self.machines.ports.get(ray.get_runtime_context().get_node_id())
        if port is None:
            return None
        self.http = self.http or session()
        try:
            answer = await send(self.http, port, call)
        except (aiohttp.ClientError, OSError):
            return None
        headers = end_to_end(answer.headers.items())
        if path == "/metrics" and answer.status == 200:
            text = await answer.read() + self.metrics().encode()
            return response_of(answer.status, headers, text)
        return stream_of(answer.status, headers, parts_of(answer))

    def metrics(self):
        names = {
            "requests": "moeba_router_requests_total", "failovers": "moeba_failovers_total",
            "disagree": "moeba_replicas_disagree_total",
            "rejected": "moeba_router_rejected_total",
        }
        lines = [f"# TYPE {names[key]} counter\n{names[key]} {n}\n"
                 for key, n in self.counts.items()]
        return "".join(lines)


class Request:
    """A request, on one replica after the other until one has finished it."""

    def __init__(self, api, call, path):
        self.api, self.call, self.path = api, call, path
        self.n_lost, self.start = 0, time.monotonic()
        self.replica = None

    async def response(self):
        while True:
            try:
                head = await self.begin()
                if head["type"].startswith(STREAMS):
                    return stream_of(head["status"], head["headers"], self.events(head))
                body = b"".join([part async for part in self.parts()])
                if head["status"] in FAULTS:
                    raise Lost(f"status {head['status']}", (head, body))
                self.done()
                return response_of(head["status"], head["headers"], body)
            except asyncio.CancelledError:
                # The client has gone: nothing is computed for it.
                if self.replica is not None:
                    self.replica.cancel()
                raise
            except Full as full:
                self.api.counts["rejected"] += 1
                return self.refusal(full.code, full.message)
            except Lost as lost:
                if not await self.again(lost):
                    if lost.final:
                        head, body = lost.final
                        return response_of(head["status"], head["headers"], body)
                    return self.refusal("no_replica", "no replica has finished this request")

    async def begin(self):
        """Sends the request to a replica and takes the head of its answer."""
        self.node, machines = None, self.api.machines
        first, avoided, end = None, None, self.end_of_wait()
        while self.node is None:
            if avoided is None or machines.silent - avoided:
                # Also where the request is on its way to a machine that is silent by now.
                avoided = machines.avoided()
                if first is not None:
                    self.replica.cancel()
                    first.cancel()
                call = {**self.call, "avoid": [*self.call["avoid"], *avoided]}
                self.replica = self.api.stream.remote(call)
                first = asyncio.ensure_future(self.next(0))
            done, _ = await asyncio.wait({first}, timeout=1)
            if done:
                self.node = first.result()["node"]
            elif time.monotonic() > end:
                self.replica.cancel()
                raise Full("queue_timeout", "the request has waited too long for its turn")
        while True:
            item = await self.next()
            if "status" in item:
                break
        kinds = [value for name, value in item["headers"] if name.lower() == "content-type"]
        headers = [*item["headers"], ("x-moeba-replica", self.node[:8])]
        return {**item, "headers": headers, "type": kinds[0] if kinds else ""}

    def end_of_wait(self):
        seconds = self.api.settings["queue_timeout"]
        return self.start + seconds if seconds else float("inf")

    async def next(self, seconds=None):
        """The next item. A replica says something every few seconds: silence is a loss. With 0, any
        time may pass."""
        seconds = 2 * self.api.settings["ping"] + 1 if seconds is None else seconds or None
        try:
            item = await asyncio.wait_for(self.replica.__anext__(), seconds)
        except asyncio.TimeoutError as e:
            self.replica.cancel()
            self.api.machines.suspect(self.node)
            raise Lost("silence") from e
        except StopAsyncIteration as e:
            raise Lost("the stream ended early") from e
        except BackPressureError as e:
            message = "The server is overloaded: all replicas compute, and many requests wait."
            raise Full("server_overloaded", f"{message} Please try again later.") from e
        except (RayError, RayServeException) as e:
            raise Lost(type(e).__name__) from e
        if "lost" in item:
            raise Lost(item["lost"])
        return item

    async def parts(self):
        while True:
            item = await self.next()
            if "end" in item:
                return
            if "body" in item:
                yield item["body"]

    async def again(self, lost):
        """Whether there is another try; the replica is avoided if there are others."""
        self.n_lost += 1
        print(f"a request was lost after {time.monotonic() - self.start:.1f} s: {lost}", flush=True)
        if self.node:
            self.call["avoid"].append(self.node)
        if self.n_lost > MAX_LOST:
            return False
        self.api.counts["failovers"] += 1
        await asyncio.sleep(0.05 * 2**self.n_lost)
        return True

    def done(self):
        took = time.monotonic() - self.start
        self.api.seconds += 0.1 * (took - self.api.seconds)

    async def events(self, head):
        """The frames of a stream, each once, whoever computes them."""
        answer, kind = Answer(), head["type"]
        try:
            while True:
                try:
                    async for event in self.frames(kind):
                        event = answer.take(event)
                        if event:
                            yield event
                    self.done()
                    return
                except Disagree as e:
                    self.api.counts["disagree"] += 1
                    yield self.error_event("replicas_disagree", str(e))
                    return
                except Lost as lost:
                    if not await self.resume(lost, answer, kind):
                        yield lost.final or self.error_event(
                            "no_replica", "no replica has finished this request")
                        return
        finally:
            self.replica.cancel()

    async def frames(self, kind):
        events = Events(kind)
        async for part in self.parts():
            for event in events.push(part):
                why = failure(parsed(event))
                if why:
                    raise Lost(why, event)
                yield event
        if events.rest:
            raise Lost("the stream ended within an event")

    async def resume(self, lost, answer, kind):
        """Has another replica begin the answer again."""
        while await self.again(lost):
            try:
                head = await self.begin()
                if head["type"] == kind:
                    answer.begin()
                    return True
                lost = Lost(f"status {head['status']}")
            except Full:
                lost = Lost("all replicas are full")
            except Lost as e:
                lost = e
        return False

    def refusal(self, code, message):
        seconds = max(1, min(120, round(self.api.seconds)))
        status = 529 if self.path.startswith("/v1/messages") else 503
        body = json.dumps(error_of(self.path, status, code, message)).encode()
        headers = [("content-type", "application/json"), ("retry-after", str(seconds))]
        return response_of(status, headers, body)

    def error_event(self, code, message):
        data = error_of(self.path, 503 if code == "no_replica" else 500, code, message)
        text = json.dumps(data).encode()
        if self.path.startswith("/api/"):
            return text + b"\n"
        is_named = self.path.startswith(("/v1/messages", "/v1/responses", "/responses"))
        return (b"event: error\n" if is_named else b"") + b"data: " + text + b"\n\n"


def error_of(path, status, code, message):
    """An error in the format that the path's clients expect."""
    kind = "unavailable_error" if status != 500 else "server_error"
    if path.startswith("/api/"):
        return {"error": message}
    if path.startswith("/v1/messages"):
        kind = "overloaded_error" if status != 500 else "api_error"
        return {"type": "error", "error": {"type": kind, "message": message}}
    if path.startswith(("/v1/responses", "/responses")) and status == 500:
        return {"type": "error", "code": code, "message": message, "param": None}
    error = {"message": message, "type": kind, "param": None, "code": code, "status": status}
    return {"error": error}


def as_json(body):
    try:
        return json.loads(body)
    except ValueError:
        return None


def seeded(path, body):
    """The body with a seed, so that every replica computes the same answer."""
    settings = body
    if path.startswith("/api/"):
        settings = body.setdefault("options", {})
        settings = settings if isinstance(settings, dict) else {}
    if settings.get("seed", -1) in (None, -1):
        settings["seed"] = random.getrandbits(32)
    return json.dumps(body).encode()


def as_local(request):
    """The headers. A request to this machine's own address is one to the child's."""
    own = (request.scope.get("server") or ("",))[0]
    headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in
               request.headers.raw]
    host = request.headers.get("host", "").rpartition(":")[0].strip("[]")
    if own and host == own:
        headers = [(n, "127.0.0.1" if n.lower() == "host" else v) for n, v in headers]
    return headers


def response_of(status, headers, body):
    return with_headers(Response(body, status), headers)


def stream_of(status, headers, parts):
    return with_headers(StreamingResponse(parts, status), headers)


def with_headers(response, headers):
    for name, value in headers:
        if name.lower() != "content-length":
            response.headers.append(name, value)
    return response


async def parts_of(answer):
    try:
        async for part in answer.content.iter_any():
            yield part
    finally:
        answer.release()
