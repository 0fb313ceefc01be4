"""Which replica computes a request. A conversation stays with the machine that has its keys and
values, as long as that machine has room."""

import heapq
import random

from ray.serve.request_router import RequestRouter

def mixed(x):
    """64 bits, each of which depends on all of `x`: some tenths of a microsecond."""
    for factor in (0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93):
        x = x * factor & 0xFFFFFFFFFFFFFFFF
        x ^= x >> 32
    return x


def ranked(key, replicas, n=2):
    """The first replicas of a conversation: every router finds the same, without a common state,
    and a machine that goes moves its own conversations alone. Replicas are ranked by machine, so
    that one that was restarted gets its conversations back."""
    return heapq.nlargest(n, replicas, key=lambda r: mixed(key ^ int(r.node_id[:14], 16)))


class Affinity(RequestRouter):
    """The conversation's own replica; if that is full the second in rank, then the one of two
    others that has less to do. Replicas that this request was lost on come last."""

    def initialize_state(self, **_):
        # A machine that computes answers late, and is not to lose a conversation by that.
        self.queue_len_response_deadline_s = 2.0
        self.max_queue_len_response_deadline_s = 4.0

    async def choose_replicas(self, candidate_replicas, pending_request=None):
        if pending_request is None or not pending_request.args:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        call = pending_request.args[0]
        live = [r for r in candidate_replicas if r.node_id not in call["avoid"]]
        live = live or list(candidate_replicas)
        some = random.sample(live, min(2, len(live)))
        return [[replica] for replica in ranked(call["key"], live)] + [some]
