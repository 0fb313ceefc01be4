"""As many replicas as requests come: one, three under a burst, and one again (see replicas.py)."""

import threading
import time

from cluster import App, whole


def ready(machines):
    """Replicas that have an engine."""
    return sum(machines.replica(node.node_id[:8]) is not None for node in machines.nodes)


def wait_for(machines, n, seconds):
    end = time.monotonic() + seconds
    while ready(machines) != n:
        assert time.monotonic() < end, f"{ready(machines)} replicas, and not {n}"
        time.sleep(0.2)


def one_three_one(machines, point):
    app = App(
        machines, "--replicas", "1..3", "--scale-delays", "1,3", "-c", "512", "--parallel", "1",
        "-t", "1", "--queue", "100",
    )
    assert app.is_ready(), app.said()
    try:
        assert ready(machines) == 1
        texts, start, done = set(), time.monotonic(), threading.Event()

        def ask():
            while not done.is_set():
                texts.add(whole(app.url, "What is a branch?", 32))

        clients = [threading.Thread(target=ask) for _ in range(9)]
        for client in clients:
            client.start()
        try:
            wait_for(machines, 3, 60)
            up = time.monotonic() - start
        finally:
            done.set()
            for client in clients:
                client.join()
        start = time.monotonic()
        wait_for(machines, 1, 60)
        down = time.monotonic() - start
        assert len(texts) == 1, texts
        assert whole(app.url, "What is a branch?", 32) in texts
        point(f"a burst: three replicas after {up:.0f} s, and one again {down:.0f} s after its end")
    finally:
        app.end()
