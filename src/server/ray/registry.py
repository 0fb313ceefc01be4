"""The machines of a deployment: what they have in common, and what there is to tell of them."""

import time

import ray

SPACE = "moeba"
REGISTRY = "machines"
# Replicas tell every two seconds that they live.
SILENCE_S = 10

WORDS = {
    "version": "the version of moeba", "model": "the model file", "tensor_types": "tensor types",
    "n_ctx": "the context (give -c)", "cache_type_k": "the type of the cache's keys",
    "cache_type_v": "the type of the cache's values", "device": "the device",
    "fingerprint": "the arithmetic", "settings": "default settings",
}


def common_facts(props):
    """Facts that servers must have in common, so that one can go on with another's answers."""
    return {name: str(value) for name, value in props["identity"].items()}


def difference(name, facts, other):
    """The sentence about two machines that differ, or None."""
    names = [key for key in facts if facts[key] != other["facts"].get(key)]
    if not names:
        return None
    # The digest differs with any of the others, which explain more.
    named = [key for key in names if key != "fingerprint"] or names
    parts = [f"{WORDS.get(key, key)}: {brief(facts[key])} and {brief(other['facts'].get(key))}"
             for key in named]
    return f"{name} and {other['name']} differ in {'; '.join(parts)}"


def brief(value):
    text = str(value)
    return text[:12] if len(text) == 64 else text


class Registry:
    """One actor, restarted elsewhere if its machine is lost: replicas join again."""

    def __init__(self):
        self.deployment, self.machines = None, {}
        self.refusals, self.warnings = [], []
        # The last time that a replica has told that it lives.
        self.beats = {}

    def start(self, deployment):
        if deployment != self.deployment:
            self.__init__()
            self.deployment = deployment

    def join(self, deployment, node, machine):
        """Takes a replica in; a sentence if it differs from another that is alive."""
        self.start(deployment)
        alive = {n["NodeID"] for n in ray.nodes() if n["Alive"]}
        for other, its in self.machines.items():
            refusal = difference(machine["name"], machine["facts"], its)
            if other != node and other in alive and refusal:
                return refusal
        self.machines = {n: its for n, its in self.machines.items() if n in alive}
        self.machines[node] = machine
        self.beat(node)
        self.warnings += [w for w in machine["warnings"] if w not in self.warnings]
        return None

    def refuse(self, deployment, name, why):
        self.start(deployment)
        sentence = why if why.startswith(name) else f"{name}: {why}"
        if sentence not in self.refusals:
            self.refusals.append(sentence)

    def beat(self, node):
        self.beats[node] = time.monotonic()

    def state(self):
        """The ports of replicas, by node, and the nodes that have been silent for too long."""
        now = time.monotonic()
        ports = {node: machine["port"] for node, machine in self.machines.items()}
        return ports, {node for node, at in self.beats.items() if now - at > SILENCE_S}

    def news(self):
        return {"refusals": self.refusals, "warnings": self.warnings}
