"""Three machines with addresses of their own: network namespaces, one of which loses its link in
the middle of an answer. Needs root."""

import os
import random
import secrets
import shutil
import socket
import subprocess
import sys
import time

from cluster import MOEBA, MODEL, TEMP, Stream, whole

RAY = os.path.join(os.path.dirname(sys.executable), "ray")
BRIDGE = f"mb{os.getpid() % 100000}"
NAMES = [f"{BRIDGE}n{i}" for i in (2, 3)]
NETWORK = f"10.{random.randrange(64, 192)}.{random.randrange(256)}"


def sh(command):
    return subprocess.run(command.split(), check=True, capture_output=True, text=True).stdout


def connect():
    sh(f"ip link add {BRIDGE} type bridge")
    sh(f"ip addr add {NETWORK}.1/24 dev {BRIDGE}")
    sh(f"ip link set {BRIDGE} up")
    for i, name in enumerate(NAMES, 2):
        sh(f"ip netns add {name}")
        sh(f"ip link add {BRIDGE}v{i} type veth peer name eth0 netns {name}")
        sh(f"ip link set {BRIDGE}v{i} master {BRIDGE} up")
        sh(f"ip -n {name} link set lo up")
        sh(f"ip -n {name} addr add {NETWORK}.{i}/24 dev eth0")
        sh(f"ip -n {name} link set eth0 up")


def disconnect():
    for name in NAMES:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    subprocess.run(["ip", "link", "del", BRIDGE], capture_output=True, check=False)


class Node:
    """A machine's Ray, which ends with its process."""

    def __init__(self, number, *args):
        folder = os.path.join(TEMP, str(number))
        os.makedirs(folder)
        environment = dict(os.environ, RAY_TMPDIR=folder)
        inside = ["ip", "netns", "exec", NAMES[number - 2]] if number > 1 else []
        command = inside + [
            RAY, "start", "--block", "--num-cpus", "1", "--object-store-memory", str(80 << 20),
            "--node-ip-address", f"{NETWORK}.{number}", "--disable-usage-stats", *args,
        ]
        with open(os.path.join(folder, "log"), "w", encoding="utf-8") as log:
            self.process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, start_new_session=True)
        self.folder = folder

    def wait(self):
        """Until the machine is a part of the cluster."""
        end = time.monotonic() + 60
        while "will now block" not in self.said():
            late = self.process.poll() is not None or time.monotonic() > end
            assert not late, self.said()
            time.sleep(0.1)

    def said(self):
        with open(os.path.join(self.folder, "log"), encoding="utf-8", errors="replace") as file:
            return file.read()

    def end(self):
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()


def wait_for_port(host, port):
    end = time.monotonic() + 60
    while True:
        try:
            socket.create_connection((host, port), 1).close()
            return
        except OSError:
            assert time.monotonic() < end, "Ray does not start"
            time.sleep(0.2)


def main():
    start, nodes, app = time.monotonic(), [], None
    try:
        connect()
    except (subprocess.CalledProcessError, OSError) as e:
        disconnect()
        print(f"network.py is skipped: {getattr(e, 'stderr', e)}")
        return
    try:
        address = f"{NETWORK}.1:6399"
        nodes.append(Node(1, "--head", "--port", "6399", "--include-dashboard", "false"))
        nodes[0].wait()
        # One after the other: they share a file system, and would choose the same socket in it.
        for n in (2, 3):
            nodes.append(Node(n, "--address", address))
            nodes[-1].wait()
        ready, port = os.path.join(TEMP, f"url-{secrets.token_hex(4)}"), 8000 + os.getpid() % 2000
        environment = dict(os.environ, RAY_ADDRESS=address, RAY_TMPDIR=nodes[0].folder)
        environment["MOEBA_PYTHON"] = sys.executable
        command = [MOEBA, "serve", MODEL, "--ray", "--replicas", "3", "--host", "0.0.0.0",
                   "--port", str(port), "--ready-file", ready, "--insecure", "-c", "512",
                   "--parallel", "1", "-t", "1", "--sse-ping-interval", "1"]
        with open(os.path.join(TEMP, "log"), "w+", encoding="utf-8") as log:
            app = subprocess.Popen(command, env=environment, stderr=log, stdout=log)
            while not os.path.exists(ready):
                late = app.poll() is not None or time.monotonic() - start > 120
                assert not late, logs(nodes)
                time.sleep(0.1)
        print(f"{time.monotonic() - start:6.1f} s  three machines with addresses of their own")
        urls = [f"http://{NETWORK}.{n}:{port}" for n in (1, 2, 3)]
        for url in urls:
            wait_for_port(url.split("/")[2].split(":")[0], port)
        text = whole(urls[0], "What is a branch?", 16)
        assert all(whole(url, "What is a branch?", 16) == text for url in urls)
        print(f"{time.monotonic() - start:6.1f} s  each answers for all, and all say the same")
        unplug(urls[0], start)
    finally:
        if app:
            app.terminate()
            try:
                app.wait(30)
            except subprocess.TimeoutExpired:
                app.kill()
        for node in nodes:
            node.process.terminate()
        for node in nodes:
            node.end()
        disconnect()
        for node in nodes:
            shutil.rmtree(node.folder, ignore_errors=True)


def logs(nodes):
    """The ends of all that was said."""
    with open(os.path.join(TEMP, "log"), encoding="utf-8", errors="replace") as file:
        texts = [file.read()] + [node.said() for node in nodes]
    return "\n".join(text[-1500:] for text in texts)


def unplug(url, start):
    """Takes a machine's link away in the middle of an answer of its own."""
    mine = whose(url)
    for i in range(60):
        question = f"Question {random.random()}: what is a branch, and {i} commits?"
        stream = Stream(url, question, 90)
        stream.begun.wait(60)
        if stream.replica in mine:
            break
        stream.end()
    n_before, number = stream.n_events, mine[stream.replica]
    sh(f"ip link set {BRIDGE}v{number} down")
    stream.end()
    assert n_before < 90 and stream.error is None, stream.error
    assert stream.text == whole(url, question, 90) and len(stream.ids) == 1 and stream.n_done == 1
    print(f"{time.monotonic() - start:6.1f} s  a link that goes down: same bytes, one id, longest "
          f"pause {stream.longest:.1f} s")
    # All can be ended in order.
    sh(f"ip link set {BRIDGE}v{number} up")


def whose(url):
    """The numbers of the machines that are not the head, by the names of their replicas."""
    import ray

    ray.init(address=f"{NETWORK}.1:6399", namespace="moeba", logging_level="ERROR",
             log_to_driver=False)
    names = {node["NodeID"][:8]: int(node["NodeManagerAddress"].rpartition(".")[2])
             for node in ray.nodes()}
    ray.shutdown()
    return {name: number for name, number in names.items() if number > 1}


if __name__ == "__main__":
    main()
