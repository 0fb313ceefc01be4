"""A replica: a `moeba serve` that is a child of this actor, and the requests that go to it."""

import asyncio
import collections
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading

import aiohttp
import ray

from registry import REGISTRY, SPACE, common_facts

# Headers that belong to a connection, not to what is sent over it.
HOP = {
    "connection", "content-length", "expect", "keep-alive", "proxy-authenticate",
    "proxy-authorization", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade",
}
OWN = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")


def session():
    """A client that adds nothing to requests and changes nothing in answers."""
    connector = aiohttp.TCPConnector(limit=0)
    return aiohttp.ClientSession(
        connector=connector, auto_decompress=False, skip_auto_headers=OWN
    )


def end_to_end(headers):
    return [(name, value) for name, value in headers if name.lower() not in HOP]


def send(http, port, call, seconds=None):
    """A request to a child; with `seconds`, for so long at most."""
    headers = end_to_end(call["headers"])
    url = f"http://127.0.0.1:{port}{call['path']}"
    timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=5)
    data = call["body"] or None
    return http.request(call["method"], url, headers=headers, data=data, timeout=timeout)


def program_of(settings):
    """The same path as where it was started, unless this machine has the program elsewhere."""
    program = os.environ.get("MOEBA_PROGRAM") or settings["program"]
    return program if os.access(program, os.X_OK) else shutil.which("moeba") or program


def clean_environment():
    """This actor's variables without those that are not its children's."""
    environment = dict(os.environ)
    environment.pop("MOEBA_API_KEY", None)
    # Ray hides GPUs from actors that ask for none.
    if environment.get("CUDA_VISIBLE_DEVICES") == "":
        del environment["CUDA_VISIBLE_DEVICES"]
    return environment


class Child:
    """`moeba serve` on a port of its own. It ends when its stdin does, so it never outlives this
    process, whatever ends that."""

    def __init__(self, settings):
        program, environment = program_of(settings), clean_environment()
        command = [program, *settings["arguments"]]
        if settings["peer_token"]:
            environment["MOEBA_PEER_KEY"] = settings["peer_token"]
        folder = tempfile.mkdtemp(prefix="moeba-")
        if settings["keys"]:
            path = os.path.join(folder, "keys")
            with open(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600), "w") as file:
                file.write(settings["keys"])
            command += ["--api-key-file", path]
        cwd = settings["folder"] if os.path.isdir(settings["folder"]) else None
        self.lines = collections.deque(maxlen=20)
        pipe = subprocess.PIPE
        try:
            self.process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=pipe, env=environment, cwd=cwd
            )
        except OSError as e:
            shutil.rmtree(folder, ignore_errors=True)
            raise RuntimeError(f"{program} cannot be started: {e.strerror}") from e
        self.log = threading.Thread(target=self.pass_on, daemon=True)
        self.log.start()
        url = self.process.stdout.readline().decode().strip()
        # The port is known after the keys were read.
        shutil.rmtree(folder, ignore_errors=True)
        if not url:
            raise RuntimeError(self.end())
        self.port = int(url.rpartition(":")[2])

    def pass_on(self):
        for line in self.process.stderr:
            text = line.decode(errors="replace").rstrip()
            self.lines.append(text)
            print(text, file=sys.stderr, flush=True)

    def end(self):
        """Why it has ended, as a sentence."""
        code = self.process.wait()
        self.log.join(1)
        errors = [line for line in self.lines if line.startswith("error: ")]
        return errors[-1].removeprefix("error: ") if errors else f"moeba serve ended with {code}"


class Replica:
    async def __init__(self, settings):
        self.settings, self.ping = settings, settings["ping"]
        self.node = ray.get_runtime_context().get_node_id()
        self.machine = ray.util.get_node_ip_address()
        self.n_silent, self.n_checks = 0, 0
        self.child = None
        try:
            self.child = await asyncio.to_thread(Child, settings)
            self.http = session()
            facts = await self.loaded()
            self.facts = common_facts(facts)
            await self.join(is_exact=facts["deterministic"] == "exact")
        except RuntimeError as e:
            await self.registry().refuse.remote(settings["deployment"], self.name(), str(e))
            raise
        threading.Thread(target=self.end_with_child, daemon=True).start()

    def name(self):
        return f"{self.machine} ({self.node[:8]})"

    def registry(self):
        return ray.get_actor(REGISTRY, namespace=SPACE)

    def end_with_child(self):
        """Ray sees at once that a replica without an engine is none."""
        self.child.process.wait()
        os._exit(1)

    async def loaded(self):
        """Waits until the model is loaded, and asks what answers follow from."""
        lines = [line.split() for line in self.settings["keys"].splitlines()]
        keys = [words[0] for words in lines if words and not words[0].startswith("#")]
        headers = [("Authorization", f"Bearer {key}") for key in keys[:1]]
        call = {"method": "GET", "path": "/props", "headers": headers, "body": b""}
        while True:
            if self.child.process.poll() is not None:
                raise RuntimeError(await asyncio.to_thread(self.child.end))
            try:
                async with send(self.http, self.child.port, call) as answer:
                    if answer.status == 200:
                        return json.loads(await answer.read())
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.1)

    async def join(self, is_exact=True):
        warnings = []
        if os.environ.get("RAY_memory_monitor_refresh_ms") != "0":
            warnings.append(
                "Ray ends processes when memory is nearly full, and moeba fills it on purpose: set "
                "RAY_memory_monitor_refresh_ms=0 before `ray start`"
            )
        if not is_exact:
            warnings.append(
                "answers depend on how a prompt was computed, so one that another machine goes on "
                "with may differ: give --exact, or a cache of f32 or bf16"
            )
        me = {
            "name": self.name(), "port": self.child.port, "facts": self.facts, "warnings": warnings,
        }
        registry = self.registry()
        refusal = await registry.join.remote(self.settings["deployment"], self.node, me)
        if refusal:
            raise RuntimeError(refusal)

    async def answers(self):
        """Whether the engine answers at all."""
        call = {"method": "GET", "path": "/health", "headers": [], "body": b""}
        try:
            async with send(self.http, self.child.port, call, 5) as answer:
                return answer.status == 200
        except (aiohttp.ClientError, asyncio.TimeoutError):
            return False

    async def check_health(self):
        """Ray's question, every two seconds."""
        self.n_silent = 0 if await self.answers() else self.n_silent + 1
        if self.n_silent == 2:
            # One that is frozen holds memory and keeps no lifeline: this ends it all the same.
            self.child.process.kill()
        if self.n_silent:
            raise RuntimeError("the engine does not answer")
        self.registry().beat.remote(self.node)
        self.n_checks += 1
        if self.n_checks % 10 == 0:
            # The registry forgets when its machine is lost.
            await self.join()

    async def __call__(self, call):
        """The child's answer: this replica's node, the head, the body in parts, and `end` or
        `lost`. While the child computes, an empty item every few seconds."""
        yield {"node": self.node}
        items = asyncio.Queue(64)
        reading = asyncio.create_task(self.read(call, items))
        following = None
        try:
            while True:
                following = following or asyncio.create_task(items.get())
                done, _ = await asyncio.wait({following}, timeout=self.ping)
                if not done:
                    yield {} if await self.answers() else {"lost": "the engine does not answer"}
                    continue
                item, following = following.result(), None
                yield item
                if "end" in item or "lost" in item:
                    return
        finally:
            reading.cancel()
            if following:
                following.cancel()

    async def read(self, call, items):
        try:
            async with send(self.http, self.child.port, call) as answer:
                headers = end_to_end(answer.headers.items())
                await items.put({"status": answer.status, "headers": headers})
                async for part in answer.content.iter_any():
                    await items.put({"body": part})
            await items.put({"end": True})
        except (aiohttp.ClientError, OSError) as e:
            await items.put({"lost": str(e) or type(e).__name__})

    def __del__(self):
        child = getattr(self, "child", None)
        if child is None:
            return
        child.process.stdin.close()
        try:
            child.process.wait(5)
        except subprocess.TimeoutExpired:
            child.process.kill()
