"""A peer: a `moeba experts` that is a child of this actor. It computes experts for the machine that
serves, which needs neither it nor this actor to go on."""

import os
import subprocess
import threading

from replica import clean_environment, program_of


class Peer:
    """Started again with the same port by Ray, whatever has ended it."""

    def __init__(self, settings, host, port):
        arguments = ["experts", *settings["peer_arguments"], "--lifeline"]
        arguments += ["--host", host, "--port", str(port)]
        environment = {**clean_environment(), "MOEBA_API_KEY": settings["peer_token"]}
        cwd = settings["folder"] if os.path.isdir(settings["folder"]) else None
        self.process = subprocess.Popen(
            [program_of(settings), *arguments], stdin=subprocess.PIPE, env=environment, cwd=cwd
        )
        threading.Thread(target=self.end_with_child, daemon=True).start()

    def end_with_child(self):
        self.process.wait()
        os._exit(1)

    def pid(self):
        return self.process.pid


def free_port():
    """A port of the machine that this runs on."""
    import socket

    with socket.socket() as free:
        free.bind(("", 0))
        return free.getsockname()[1]
