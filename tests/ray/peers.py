"""Two Ray nodes compute experts for the one that serves: the same texts whatever happens to the
two, and Ray starts them again."""

import os
import signal
import subprocess
import time
import urllib.request

from cluster import MOEBA, MODEL, App, Stream, children, command_of, whole

QUESTION, N = "What is a branch?", 48


def engines(machines):
    """The processes that compute experts."""
    found = []
    for node in machines.nodes:
        raylet = node.all_processes["raylet"][0].process.pid
        for actor in children(raylet):
            found += [pid for pid in children(actor) if " experts " in command_of(pid)]
    return found


def series(machines, name):
    """A number of the engine's metrics."""
    port = next(iter(machines.ports().values()))
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    return float(next(line for line in lines if line.startswith(name + " ")).split()[1])


def alone():
    """The text of this machine without any other."""
    command = [MOEBA, "run", MODEL, "-p", QUESTION, "-n", str(N), "--seed", "7", "-c", "512", "-q",
               "--ignore-eos"]
    run = subprocess.run(
        command, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    return run.stdout.rstrip()


def wait_for(machines, n):
    end = time.monotonic() + 40
    while series(machines, "moeba_peers") != n:
        assert time.monotonic() < end, f"{series(machines, 'moeba_peers')} peers, and not {n}"
        time.sleep(0.1)


def outlived(machines, point):
    app = App(
        machines, "-c", "512", "--parallel", "1", "-t", "1", "--profile", "none", "--ray-peers",
        "--ram", "25%",
    )
    assert app.is_ready(), app.said()
    try:
        assert "2 machines more for experts" in app.said(), app.said()
        wait_for(machines, 2)
        text = whole(app.url, QUESTION, N)
        assert text.rstrip() == alone(), text
        assert series(machines, "moeba_peer_experts_total") > 0
        pids = engines(machines)
        assert len(pids) == 2, pids
        stream = Stream(app.url, QUESTION, N)
        stream.begun.wait(60)
        os.kill(pids[0], signal.SIGKILL)
        os.kill(pids[1], signal.SIGSTOP)
        stream.end()
        assert stream.error is None and stream.text == text, (stream.error, stream.text)
        os.kill(pids[1], signal.SIGCONT)
        wait_for(machines, 2)
        assert set(engines(machines)) != set(pids)
        assert whole(app.url, QUESTION, N) == text
    finally:
        app.end()
    end = time.monotonic() + 20
    while engines(machines):
        assert time.monotonic() < end, "a peer outlives its head"
        time.sleep(0.1)
    point("two machines compute experts for a third, one is killed and one frozen: the text of one "
          f"machine, longest pause {stream.longest:.1f} s; Ray starts the first one again")
