"""`moeba serve --ray`: deploys the server on Ray Serve and watches it until it is to end."""

import json
import logging
import os
import secrets
import shutil
import signal
import socket
import sys
import time
import urllib.request

APP = "moeba"
# A place on the machine without which there is no cluster.
AT_HEAD = {"node:__internal_head__": 0.001}


def fail(sentence):
    print(f"error: {sentence}", file=sys.stderr, flush=True)
    sys.exit(1)


def note(sentence):
    if not SETTINGS["quiet"]:
        print(sentence, file=sys.stderr, flush=True)


def warn(sentence):
    print(f"warning: {sentence}", file=sys.stderr, flush=True)


def count(n, name):
    return f"{n} {name}" if n == 1 else f"{n} {name}s"


def read_settings():
    """The settings are in a file beside this one; both are gone once they are read."""
    folder = os.path.dirname(os.path.abspath(__file__))
    with open(os.path.join(folder, "settings.json"), encoding="utf-8") as file:
        settings = json.load(file)
    settings["deployment"] = secrets.token_hex(8)
    settings["peer_token"] = secrets.token_hex(32) if settings["peer_arguments"] else None
    return folder, settings


def has_cluster():
    """Whether Ray runs already: at RAY_ADDRESS, or as `ray start` has left word."""
    address = os.environ.get("RAY_ADDRESS")
    if not address:
        folder = os.environ.get("RAY_TMPDIR", "/tmp")
        try:
            with open(os.path.join(folder, "ray", "ray_current_cluster"), encoding="utf-8") as file:
                address = file.read().strip()
        except OSError:
            return False
    if address in ("local", "auto") or "://" in address:
        return address != "local"
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), 2).close()
        return True
    except (OSError, ValueError):
        return False


def connect():
    """Joins the cluster that is there, or starts one on this machine alone."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_SERVE_LOG_TO_STDERR", "0")
    # moeba fills memory on purpose.
    os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")
    is_own = not has_cluster()
    if is_own and "RAY_AUTH_MODE" not in os.environ:
        os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
    import ray

    common = {"namespace": APP, "logging_level": "ERROR", "log_to_driver": False}
    try:
        if is_own:
            ray.init(
                address="local", include_dashboard=False, object_store_memory=100 << 20, **common
            )
        else:
            ray.init(address=os.environ.get("RAY_ADDRESS", "auto"), **common)
    except Exception as e:  # Ray raises what it likes.
        token = "" if os.environ.get("RAY_AUTH_MODE") == "token" else (
            "; if the cluster has a token, set RAY_AUTH_MODE=token here, too")
        fail(f"Ray cannot be reached: {' '.join(str(e).split())[:300]}{token}")
    return is_own


def nodes():
    import ray

    return [node for node in ray.nodes() if node["Alive"]]


def n_hosts(alive):
    return len({node["NodeManagerAddress"] for node in alive})


def is_shared(alive):
    """Whether nodes share a machine, as in tests: they cannot share its port."""
    return len(alive) > n_hosts(alive)


def check_access():
    """Whoever reaches an open cluster can run code on its machines."""
    n, is_open = len(nodes()), os.environ.get("RAY_AUTH_MODE") != "token"
    if n > 1 and is_open and not SETTINGS["insecure"]:
        fail(
            f"whoever reaches this Ray cluster of {n} machines can run programs on them: set "
            "RAY_AUTH_MODE=token on each before `ray start` (ray get-auth-token --generate makes "
            "the token), or give --insecure"
        )


def check_port():
    """A free port where 0 was asked for; ends the program if the port is taken."""
    from ray import serve

    host, port = SETTINGS["host"], SETTINGS["port"]
    running = serve.context._get_global_client(raise_if_no_controller_running=False)
    if running is not None:
        # Ray Serve has one port for all of its applications.
        if port not in (0, running.http_config.port):
            fail(f"Ray Serve runs in this cluster already, on port {running.http_config.port}")
        SETTINGS.update(host=running.http_config.host, port=running.http_config.port)
        return
    try:
        info = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(info[0], info[1]) as free:
            free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            free.bind(info[4])
            SETTINGS["port"] = free.getsockname()[1]
    except OSError as e:
        fail(f"{host}:{port}: {e.strerror}; --port takes another port")


def affinity():
    """The options that have conversations stay with their replica; none where this version of Ray
    takes no router, as its interface may still change: it chooses replicas by itself then."""
    from ray import cloudpickle

    try:
        import router
        from ray.serve.config import RequestRouterConfig
    except ImportError:
        warn("this version of Ray takes no router: conversations do not stay with their machine")
        return {}
    cloudpickle.register_pickle_by_value(router)
    return {"request_router_config": RequestRouterConfig(request_router_class=router.Affinity)}


class Deployment:
    """The application on the cluster, with as many replicas as there are machines for."""

    def __init__(self):
        import ray
        from ray import cloudpickle, serve

        import api
        import conversation
        import exact
        import peer
        import registry
        import replica

        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        # Classes travel by value: other machines need Ray and moeba, and no file of this one's.
        for module in (api, conversation, exact, peer, registry, replica):
            cloudpickle.register_pickle_by_value(module)
        self.modules, self.serve = (api, replica), serve
        self.routing = affinity()
        self.registry = ray.remote(registry.Registry).options(
            name=registry.REGISTRY, namespace=registry.SPACE, lifetime="detached", num_cpus=0,
            max_restarts=-1, max_task_retries=-1, get_if_exists=True, resources=AT_HEAD,
        ).remote()
        ray.get(self.registry.start.remote(SETTINGS["deployment"]))
        self.n_nodes, self.n_hosts, self.peers = 0, 0, []
        if SETTINGS["peer_arguments"]:
            self.start_peers(peer)

    def start_peers(self, peer):
        """Has every machine but the head compute experts for the replica, which is at the head."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        urls = []
        for node in nodes():
            if "node:__internal_head__" in node["Resources"]:
                continue
            place = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            here = {"scheduling_strategy": place, "num_cpus": 0}
            port = ray.get(ray.remote(peer.free_port).options(**here).remote(), timeout=60)
            host = node["NodeManagerAddress"]
            actor = ray.remote(peer.Peer).options(max_restarts=-1, **here)
            self.peers.append(actor.remote(SETTINGS, host, port))
            urls.append(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")
        if urls:
            SETTINGS["arguments"] += ["--peers", ",".join(urls)]
        else:
            warn("--ray-peers: the cluster has no machine besides this one")

    def start(self):
        where = "HeadOnly" if is_shared(nodes()) else "EveryNode"
        http = {
            "host": SETTINGS["host"], "port": SETTINGS["port"], "keep_alive_timeout_s": 90,
        }
        self.serve.start(proxy_location=where, http_options=http)
        self.adapt()

    def wanted(self):
        all_nodes = 1 if SETTINGS["peer_arguments"] else self.n_nodes
        low, high = SETTINGS["replicas"] or (all_nodes, all_nodes)
        return low, high

    def adapt(self):
        """Deploys as many APIs and replicas as the machines that are there ask for."""
        alive = nodes()
        if len(alive) == self.n_nodes:
            return
        self.n_nodes = len(alive)
        api, replica = self.modules
        low, high = self.wanted()
        up, down = SETTINGS["scale_delays"]
        if low == high:
            scale = {"num_replicas": low}
        else:
            scale = {"autoscaling_config": {
                "min_replicas": low, "max_replicas": high, "initial_replicas": low,
                "target_ongoing_requests": SETTINGS["parallel"], "upscale_delay_s": up,
                "downscale_delay_s": down,
            }}
        common = {"version": SETTINGS["deployment"], "_internal": True}
        replicas = self.serve.deployment(replica.Replica).options(
            name="Replica", max_replicas_per_node=1,
            # One request waits at its replica, so that the engine goes on without a pause, and a
            # conversation does not leave for a replica that is just a little less busy.
            max_ongoing_requests=SETTINGS["parallel"] + 1,
            max_queued_requests=SETTINGS["queue"], health_check_period_s=2,
            health_check_timeout_s=15, graceful_shutdown_timeout_s=SETTINGS["grace"],
            graceful_shutdown_wait_loop_s=0.5,
            ray_actor_options={"num_cpus": 0, **({"resources": AT_HEAD} if self.peers else {})},
            **self.routing, **scale, **common,
        ).bind(SETTINGS)
        self.n_hosts = n_hosts(alive)
        place = {"resources": AT_HEAD} if is_shared(alive) else {}
        app = self.serve.deployment(api.Api).options(
            name="Api", num_replicas=self.n_hosts, max_replicas_per_node=1,
            max_ongoing_requests=100_000, health_check_period_s=2,
            graceful_shutdown_timeout_s=SETTINGS["grace"],
            ray_actor_options={"num_cpus": 0, **place}, **common,
        ).bind(SETTINGS, replicas)
        target = self.serve.RunTarget(app, name=APP, route_prefix="/")
        self.serve.run_many([target], wait_for_applications_running=False)

    def n_running(self):
        """Machines that take requests, and replicas."""
        status = self.serve.status()
        app = status.applications.get(APP)
        n_proxies = sum(state == "HEALTHY" for state in status.proxies.values())
        states = {} if app is None else app.deployments
        running = {
            name: sum(n for state, n in its.replica_states.items() if state == "RUNNING")
            for name, its in states.items()
        }
        return min(n_proxies, running.get("Api", 0)), running.get("Replica", 0)

    def look(self, is_ready):
        """One look at the cluster; says what is new."""
        import ray

        news = ray.get(self.registry.news.remote(), timeout=30)
        for warning in news["warnings"] + news["refusals"] if is_ready else news["warnings"]:
            if warning not in TOLD:
                TOLD.add(warning)
                warn(warning)
        if news["refusals"] and not is_ready:
            fail(news["refusals"][0])
        self.adapt()
        return self.n_running()

    def end(self):
        import ray

        self.serve.delete(APP)
        for actor in [*self.peers, self.registry]:
            ray.kill(actor)
        if not self.serve.status().applications:
            self.serve.shutdown()


TOLD = set()


def watch(deployment):
    """Waits until replicas run, says so, and goes on to say what changes."""
    is_ready, before, since, n_failed = False, 0, time.monotonic(), 0
    while True:
        time.sleep(0.5 if not is_ready else 2)
        try:
            n_apis, n = deployment.look(is_ready)
            n_failed = 0
        except Exception as e:  # A machine that is lost takes a while to be replaced.
            n_failed += 1
            if n_failed == 10:
                fail(f"Ray does not answer any more: {' '.join(str(e).split())[:300]}")
            continue
        low, _ = deployment.wanted()
        if not is_ready:
            is_ready = n_apis >= deployment.n_hosts and n >= min(low, deployment.n_nodes)
            # Ray's proxy hears of its routes a moment later.
            is_ready = is_ready and is_served()
            if is_ready:
                tell_where(n, deployment.n_nodes)
            elif time.monotonic() - since > 60 and "slow" not in TOLD:
                TOLD.add("slow")
                note(f"{n} of {low} replicas have loaded the model")
        elif n != before:
            note(f"{n} of {count(max(low, n), 'replica')} run, on "
                 f"{count(deployment.n_nodes, 'machine')}")
        if is_ready and n < low and deployment.n_nodes < low and "few" not in TOLD:
            TOLD.add("few")
            warn(f"{count(low, 'replica')} are asked for, and there are "
                 f"{count(deployment.n_nodes, 'machine')}")
        before = n


def url_here():
    host, port = SETTINGS["host"], SETTINGS["port"]
    shown = "127.0.0.1" if host in ("0.0.0.0", "::") else host
    return f"http://[{shown}]:{port}" if ":" in shown else f"http://{shown}:{port}"


def is_served():
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(url_here() + "/health", timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


def tell_where(n, n_nodes):
    url = url_here()
    others = f"; {count(n_nodes - 1, 'machine')} more for experts" if SETTINGS["peer_token"] else ""
    note(f"{count(n, 'replica')} on {count(n if others else n_nodes, 'machine')}{others}")
    note(f"OpenAI API: {url}/v1 (chat completions, completions, embeddings, models)")
    note(f"Anthropic API: {url} (messages)")
    if SETTINGS["is_port_chosen"]:
        print(url, flush=True)
    if SETTINGS["ready_file"]:
        path = SETTINGS["ready_file"]
        with open(path + ".new", "w", encoding="utf-8") as file:
            file.write(url + "\n")
        os.replace(path + ".new", path)


def end_by_signal(number, _):
    raise SystemExit(128 + number)


def on_signals(handler):
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, handler)


def main():
    on_signals(end_by_signal)
    is_own = connect()
    # Ray has put its own in their place.
    on_signals(end_by_signal)
    import ray

    check_access()
    check_port()
    deployment = Deployment()
    try:
        deployment.start()
        watch(deployment)
    finally:
        on_signals(signal.SIG_IGN)
        try:
            deployment.end()
        except Exception as e:  # A cluster that is gone needs no end.
            print(f"the end was not in order: {e}", file=sys.stderr)
        if is_own:
            ray.shutdown()


if __name__ == "__main__":
    FOLDER, SETTINGS = read_settings()
    try:
        main()
    finally:
        shutil.rmtree(FOLDER, ignore_errors=True)
