"""Three Ray nodes on this machine, as a user of several machines sees them. Prints a line for each
point, and ends with 1 at the first that does not hold."""

import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request

import peers
from cluster import (
    CHAT, MOEBA, MODEL, TEMP, App, Machines, Stream, body_of, post, second_turn, status_of, whole,
)

START = time.monotonic()
HERE = os.path.dirname(os.path.abspath(__file__))
# The last node's replica lies while this file exists.
LIE = os.path.join(TEMP, "lie")


def point(text):
    print(f"{time.monotonic() - START:6.1f} s  {text}", flush=True)


def units():
    """The kinds of vector units that this processor has, one for each node."""
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        flags = file.read()
    names = ["scalar", "avx2" if " avx2 " in flags else "scalar"]
    return names + ["avx512" if " avx512_vnni" in flags else names[1]]


def environments():
    """Each node has another vector unit and, unless a flag says otherwise, another context; the
    program of the last one may lie."""
    nodes = [
        {"MOEBA_SIMD": unit, "MOEBA_CTX_SIZE": str(256 * (i + 1))} for i, unit in enumerate(units())
    ]
    nodes[2].update(MOEBA_PROGRAM=os.path.join(HERE, "liar.py"), MOEBA_HONEST=MOEBA, MOEBA_LIE=LIE)
    return nodes


def refusals(machines):
    """Refusals before anything is served."""
    app = App(machines)
    assert not app.is_ready() and app.process.wait(60) == 1, app.said()
    why = app.said().strip()
    assert why.startswith("error: ") and " differ in the context" in why, why
    assert why.count("127.0.0.1 (") + why.count("(") >= 2, why
    point(f"machines that differ: {why}")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        app = App(machines, "-c", "512", port=port)
        assert not app.is_ready() and app.process.wait(60) == 1, app.said()
        assert f"127.0.0.1:{port}: Address already in use" in app.said(), app.said()
    point("a port that is taken")


def same_everywhere(machines, app):
    """One text from `moeba run`, from one server, and from three, streamed or not."""
    question, n = "What is a branch?", 24
    run = subprocess.run(
        [MOEBA, "run", MODEL, "-p", question, "-n", str(n), "--seed", "7", "-c", "512", "-q",
         "--ignore-eos"],
        check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL,
    ).stdout.rstrip("\n")
    texts = {}
    for session in range(60):
        more = {"x-session-id": str(session)}
        with post(app.url + CHAT, body_of(question, n), more) as answer:
            text = json.load(answer)["choices"][0]["message"]["content"]
            texts.setdefault(answer.headers["x-moeba-replica"], set()).add(text)
        if len(texts) == 3 and session >= 11:
            break
    streamed = Stream(app.url, question, n).end()
    assert streamed.error is None and streamed.n_done == 1, streamed.error
    assert len(texts) == 3, f"60 conversations came to {len(texts)} replicas"
    assert set.union(*texts.values()) == {streamed.text}, (texts, streamed.text)
    assert run.rstrip() == streamed.text.rstrip(), (run, streamed.text)
    point("moeba run, three replicas with other vector units, streams: one text")
    mib = memory() >> 20
    assert mib < 4096, mib
    point(f"{mib} MiB of memory for Ray's processes, the replicas and this test")


def memory():
    """Bytes of all processes of this test; what they share is counted once."""
    total = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                is_ours = TEMP.encode() in file.read()
            with open(f"/proc/{name}/smaps_rollup", encoding="utf-8") as file:
                pss = next(line for line in file if line.startswith("Pss:"))
            total += int(pss.split()[1]) << 10 if is_ours else 0
        except (OSError, StopIteration):
            pass
    return total


def answer_on(machines, app, names, n):
    """A stream of one of these replicas that has begun, and the text that it must have."""
    for i in range(40):
        question = f"Question {random.random()}: what is a branch, and {i} commits?"
        stream = Stream(app.url, question, n)
        stream.begun.wait(60)
        if stream.replica in names:
            return stream, question
        stream.end()
    raise AssertionError(f"no answer came from {names}")


def survives(machines, app, what, end, names=None, n=90):
    """Ends something of the replica that computes an answer, in the middle of it."""
    names = names or [node.node_id[:8] for node in machines.nodes]
    stream, question = answer_on(machines, app, names, n)
    n_before = stream.n_events
    end(stream.replica)
    stream.end()
    expected = whole(app.url, question, n)
    assert n_before < n and stream.error is None, stream.error
    assert stream.text == expected, (what, stream.text, expected)
    assert len(stream.ids) == 1 and stream.n_done == 1, (stream.ids, stream.n_done)
    point(f"{what}: same bytes, one id, longest pause {stream.longest:.1f} s")


def failures(machines, app):
    def kill_engine(name):
        os.kill(machines.replica(name)[1], signal.SIGKILL)

    def kill_actor(name):
        os.kill(machines.replica(name)[0], signal.SIGKILL)

    def freeze(name):
        os.kill(machines.replica(name)[1], signal.SIGSTOP)

    survives(machines, app, "kill -9 of an engine", kill_engine)
    wait_for_replicas(machines, app, 3)
    survives(machines, app, "kill -9 of a Ray actor", kill_actor)
    wait_for_replicas(machines, app, 3)
    survives(machines, app, "SIGSTOP of an engine", freeze)
    wait_for_replicas(machines, app, 3)


def node_dies(machines, app):
    """The last point that needs three: one node is gone then."""
    survives(machines, app, "the end of a node", machines.remove, machines.others())


def wait_for_replicas(machines, app, n):
    end = time.monotonic() + 60
    while True:
        try:
            found = [machines.replica(node.node_id[:8]) for node in machines.nodes]
            ports = machines.ports().values()
            if sum(pair is not None for pair in found) >= n and all(map(is_ready, ports)):
                return
        except OSError:
            pass
        assert time.monotonic() < end, "a replica does not come back"
        time.sleep(0.2)


def is_ready(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5) as answer:
        return answer.status == 200


def second_turns(machines, app):
    """Second turns find the keys and values of the first ones, as their conversation stays: with
    replicas chosen by chance a third would. bench/routers.py has Ray's own router beside it."""
    found = [second_turn(app, f"conversation {i}") for i in range(12)]
    assert sum(found) >= 11, found
    point(f"second turns with cached tokens: {sum(found)} of {len(found)}")


def lies(machines, app):
    """A replica that goes on with something else is found out; nothing of it is sent."""
    liar = machines.nodes[2].node_id[:8]
    stream, _ = answer_on(machines, app, [n.node_id[:8] for n in machines.nodes[:2]], 120)
    # All but the liar are frozen out, so that it must go on.
    honest = [node.node_id[:8] for node in machines.nodes[:2]]
    with open(LIE, "w", encoding="utf-8"):
        pass
    try:
        for name in honest:
            os.kill(machines.replica(name)[1], signal.SIGKILL)
        stream.end()
    finally:
        os.remove(LIE)
    assert stream.error and "disagree at event" in stream.error, (stream.error, liar)
    assert stream.n_done == 0 and "#" not in stream.text, stream.text
    with urllib.request.urlopen(app.url + "/metrics", timeout=10) as answer:
        text = answer.read().decode()
    assert "moeba_replicas_disagree_total 1\n" in text, text[-400:]
    wait_for_replicas(machines, app, 3)
    point(f"a replica that lies: the client is told {stream.error!r}, and gets no [DONE]")


def load(machines, app):
    """A client that goes frees its replica; too many requests are refused at once."""
    took = [rest_after(machines, app, is_stream) for is_stream in (True, False)]
    results, threads = [], []

    def ask(i):
        results.append(status_of(app.url + CHAT, body_of(f"Tell me everything of {i}.", 60)))

    for i in range(40):
        threads.append(threading.Thread(target=ask, args=(i,)))
        threads[-1].start()
    for thread in threads:
        thread.join()
    refused = [headers for status, headers in results if status == 503]
    served = sum(status == 200 for status, _ in results)
    assert refused and served >= 9 and served + len(refused) == 40, [s for s, _ in results]
    assert all(1 <= int(headers["Retry-After"]) <= 120 for headers in refused)
    point(f"a client that goes: its engine rests after {max(took):.2f} s; of 40 requests at once "
          f"{served} are served and {len(refused)} are told to come again")


def rest_after(machines, app, is_stream):
    """Seconds until nothing is computed for a client that has gone in the middle."""
    body = json.dumps(body_of("Tell me everything.", 400, stream=is_stream))
    client = http.client.HTTPConnection(app.url.removeprefix("http://"))
    client.request("POST", CHAT, body, {"Content-Type": "application/json"})
    end = time.monotonic() + 20
    while n_busy(machines) != 1:
        assert time.monotonic() < end, "nothing is computed"
        time.sleep(0.01)
    since = time.monotonic()
    client.close()
    while n_busy(machines):
        assert time.monotonic() - since < 10, "the engine goes on without a client"
        time.sleep(0.01)
    return time.monotonic() - since


def n_busy(machines):
    n = 0
    for port in machines.ports().values():
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/slots", timeout=5) as answer:
            n += sum(slot["is_processing"] for slot in json.load(answer))
    return n


def chaos(machines, app, n=200):
    """Replicas die all the time, and no answer is another one for it."""
    questions = [f"Question {i}: what is a commit?" for i in range(20)]
    expected = {question: whole(app.url, question, 12) for question in questions}
    wrong, done, n_kills = [], threading.Event(), 0

    def client(mine):
        for i in mine:
            question = questions[i % len(questions)]
            try:
                if i % 2:
                    stream = Stream(app.url, question, 12).end()
                    text = stream.text if stream.error is None else stream.error
                else:
                    text = whole(app.url, question, 12)
            except Exception as e:  # It is a failure like any other.
                text = repr(e)
            if text != expected[question]:
                wrong.append((question, text))
            time.sleep(0.05)

    clients = [threading.Thread(target=client, args=(range(i, n, 3),)) for i in range(3)]
    for thread in clients:
        thread.start()

    def kill():
        nonlocal n_kills
        while not done.wait(4):
            n_kills += machines.kill_an_engine()

    killer = threading.Thread(target=kill)
    killer.start()
    for thread in clients:
        thread.join(120)
    done.set()
    killer.join()
    assert not wrong and n_kills >= 2, (n_kills, wrong[:3])
    point(f"{n} answers while {n_kills} engines were killed: all as without")


def main():
    machines = Machines(environments())
    point("a cluster of three nodes")
    try:
        refusals(machines)
        peers.outlived(machines, point)
        app = App(
            machines, "-c", "512", "--parallel", "1", "--sse-ping-interval", "1", "--queue", "6",
            "-t", "1",
        )
        assert app.is_ready(), app.said()
        point(f"three replicas serve: {app.said().strip().splitlines()[0]}")
        try:
            for test in (same_everywhere, second_turns, failures, lies, load, chaos, node_dies):
                test(machines, app)
        except BaseException:
            print(app.said(), file=sys.stderr)
            raise
        finally:
            app.end()
    finally:
        machines.end()
    point("ended")


if __name__ == "__main__":
    main()
