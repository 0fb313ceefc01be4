#!/usr/bin/env python3
"""Clients that a server must outlive: a crowd with the retries of SDKs, and large bodies at once.

    serve_crowd.py crowd  --port 8080 [--clients 1000] [--nginx]   # none may fail
    serve_crowd.py bodies --port 8080 [--clients 64] [--mib 32]    # every one is answered
    serve_crowd.py slow   --port 8080 [--clients 2000]             # others beside idle bodies

`--nginx` starts nginx on the next port, in front of the server. The server is started by hand, for
instance in a control group:

    mkdir /sys/fs/cgroup/memory/m
    echo 1100M > /sys/fs/cgroup/memory/m/memory.limit_in_bytes
    sh -c 'echo $$ > /sys/fs/cgroup/memory/m/tasks; exec moeba serve models/demo/moeba-demo.gguf'

Prints one line of JSON.
"""
import argparse
import asyncio
import collections
import json
import random
import subprocess
import tempfile
import time

NGINX = """
worker_processes 2; daemon off; pid {dir}/pid; error_log {dir}/error crit;
worker_rlimit_nofile 8192;
events {{ worker_connections 4096; }}
http {{
  access_log off; client_max_body_size 64m;
  client_body_temp_path {dir}/a; proxy_temp_path {dir}/b; fastcgi_temp_path {dir}/c;
  uwsgi_temp_path {dir}/d; scgi_temp_path {dir}/e;
  server {{ listen 127.0.0.1:{port} backlog=4096; location / {{
    proxy_pass http://127.0.0.1:{to}; proxy_http_version 1.1; proxy_buffering off;
    proxy_read_timeout 600; proxy_set_header X-Forwarded-For $http_x_client; }} }}
}}
"""


async def ask(port, path, body, headers=""):
    """The status, headers and body of an answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        writer.write(f"{head}{headers}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        answer = await reader.read(-1)
    finally:
        writer.close()
    head, _, rest = answer.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    fields = dict(line.lower().split(": ", 1) for line in lines[1:] if ": " in line)
    return int(lines[0].split(" ")[1]), fields, rest


async def with_retries(port, path, body, headers, n_retries=2):
    """2 retries, as the SDKs of OpenAI and Anthropic have, after what the server says."""
    for i in range(n_retries + 1):
        try:
            status, fields, _ = await ask(port, path, body, headers)
        except (OSError, IndexError):
            status, fields = 0, {}
        retry = status in (0, 408, 409, 429) or status >= 500
        if not retry or i == n_retries:
            return status, i
        wait = float(fields.get("retry-after-ms", 0)) / 1000
        wait = wait or float(fields.get("retry-after", 0))
        if not 0 < wait <= 60:
            wait = min(0.5 * 2**i, 8) * (1 - 0.25 * random.random())
        await asyncio.sleep(wait)


async def crowd(args, port):
    messages = [{"role": "user", "content": "Hello"}]
    body = json.dumps({"messages": messages, "max_tokens": 8}).encode()

    async def one(i):
        address = f"10.{i // 4 % 256}.0.{i % 250 + 1}" if args.nginx else ""
        headers = f"X-Client: {address}\r\n" if address else ""
        return await with_retries(port, "/v1/chat/completions", body, headers)

    ends = await asyncio.gather(*(one(i) for i in range(args.clients)))
    return collections.Counter(f"{status} after {n} retries" for status, n in ends)


async def bodies(args, port):
    n = args.mib * 2**20 - 1024
    kinds = [
        b'{"prompt":"' + b"x" * n + b'"}',
        b'{"prompt":[1' + b",1" * (n // 2) + b"]}",
        b'{"x":[1' + b',{"":1}' * (n // 7) + b"]}",
        b'{"x":{"":1' + b"".join(b',"%07d":1' % i for i in range(n // 12)) + b"}}",
    ]

    async def one(i):
        try:
            return (await ask(port, "/v1/completions", kinds[i % len(kinds)]))[0]
        except (OSError, IndexError) as why:
            return type(why).__name__

    ends = await asyncio.gather(*(one(i) for i in range(args.clients)))
    return collections.Counter(str(end) for end in ends)


async def slow(args, port):
    held = []

    async def begin(i):
        try:
            at = (f"127.{i % 50 + 1}.0.1", 0)
            _, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=at)
            writer.write(b"POST /tokenize HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\n{")
            held.append(writer)
        except OSError:
            pass

    await asyncio.gather(*(begin(i) for i in range(args.clients)))
    start, longest, n_bad = time.monotonic(), 0.0, 0
    last_good = start
    while time.monotonic() - start < 20:
        try:
            asked = ask(port, "/tokenize", b'{"content":"x"}')
            status, _, _ = await asyncio.wait_for(asked, 5)
        except (OSError, IndexError, asyncio.TimeoutError):
            status = 0
        if status == 200:
            last_good = time.monotonic()
        n_bad += status != 200
        longest = max(longest, time.monotonic() - last_good)
        await asyncio.sleep(0.1)
    return {"held": len(held), "longest_without_an_answer_s": round(longest, 2), "refused": n_bad}


def main():
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("what", choices=["crowd", "bodies", "slow"])
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--clients", type=int)
    parser.add_argument("--mib", type=int, default=32)
    parser.add_argument("--nginx", action="store_true")
    args = parser.parse_args()
    args.clients = args.clients or {"crowd": 1000, "bodies": 64, "slow": 2000}[args.what]
    port, proxy = args.port, None
    with tempfile.TemporaryDirectory() as folder:
        if args.nginx:
            port += 1
            with open(f"{folder}/conf", "w") as conf:
                conf.write(NGINX.format(dir=folder, port=port, to=args.port))
            proxy = subprocess.Popen(["nginx", "-c", f"{folder}/conf"])
            time.sleep(1)
        start = time.monotonic()
        try:
            work = {"crowd": crowd, "bodies": bodies, "slow": slow}[args.what]
            ends = asyncio.run(work(args, port))
        finally:
            if proxy:
                proxy.terminate()
                proxy.wait()
    seconds = round(time.monotonic() - start, 1)
    print(json.dumps({"what": args.what, "ends": ends, "seconds": seconds}))


if __name__ == "__main__":
    main()
