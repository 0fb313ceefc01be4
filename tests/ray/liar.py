#!/usr/bin/env python3
"""Stands between a replica's actor and its engine: passes all on, and changes a letter of streamed
answers as long as the file MOEBA_LIE exists. It takes the engine's place as MOEBA_PROGRAM."""

import http.client
import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

if sys.argv[1] == "experts":
    os.execv(os.environ["MOEBA_HONEST"], [os.environ["MOEBA_HONEST"], *sys.argv[1:]])
engine = subprocess.Popen(
    [os.environ["MOEBA_HONEST"], *sys.argv[1:]], stdin=subprocess.PIPE, stdout=subprocess.PIPE
)
URL = engine.stdout.readline().decode().strip()
if not URL:
    sys.exit(engine.wait())
ADDRESS = URL.removeprefix("http://")


def lied(part):
    if not os.path.exists(os.environ["MOEBA_LIE"]):
        return part
    return re.sub(rb'("content":" ?)[a-z]', rb"\1#", part)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def answer(self):
        n = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(n) if n else None
        upstream = http.client.HTTPConnection(ADDRESS)
        try:
            upstream.request(self.command, self.path, body, dict(self.headers))
            answer = upstream.getresponse()
            self.send_response(answer.status)
            for name, value in answer.headers.items():
                if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                    self.send_header(name, value)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            while part := answer.read1(65536):
                part = lied(part)
                self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
                self.wfile.flush()
            self.wfile.write(b"0\r\n\r\n")
        except (OSError, http.client.HTTPException):
            self.close_connection = True
        finally:
            # A client that has gone ends what is computed for it.
            upstream.close()

    do_GET = do_POST = do_OPTIONS = answer


def end_with_it():
    sys.stdin.buffer.read()
    engine.stdin.close()
    os._exit(engine.wait())


def end_with_engine():
    os._exit(engine.wait())


server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(f"http://127.0.0.1:{server.server_address[1]}", flush=True)
for target in (end_with_it, end_with_engine):
    threading.Thread(target=target, daemon=True).start()
server.serve_forever()
