"""Rudra-adv*: the tree in which weights are broadcast to the learners (section 3.3), as plain Python.

"We form a tree within all learners and broadcast the weights down this tree [...] Each learner continuously receives weights
from the weights downcast tree, which consists of the top level parameter server node and all the learners."
"""

import heapq


def arrivals(versions_ns: dict[int, int], learners: int, hop_ns: int) -> list[list[tuple[int, int]]]:
    """Return for each learner the (time, version) pairs at which weights reach it.

    The tree is binary: node 0 is the server, node k learner k - 1. A node sends one version at a time to both its children, and
    then the newest that it has; versions that came in between are skipped.
    """
    has = [0] * (learners + 1)  # the newest version of each node
    sends: list[int | None] = [None] * (learners + 1)
    reached: list[list[tuple[int, int]]] = [[] for _ in range(learners)]
    events = [(now_ns, 0, 0, version) for version, now_ns in versions_ns.items()]
    heapq.heapify(events)

    def begin(node: int, now_ns: int) -> None:
        if sends[node] is None and 2 * node + 1 <= learners:
            sends[node] = has[node]
            heapq.heappush(events, (now_ns + hop_ns, 1, node, has[node]))

    while events:
        now_ns, is_sent, node, version = heapq.heappop(events)
        if not is_sent:
            has[0] = version
            begin(0, now_ns)
            continue
        sends[node] = None
        for child in (2 * node + 1, 2 * node + 2):
            if child <= learners:
                has[child] = version
                reached[child - 1].append((now_ns, version))
                begin(child, now_ns)
        if has[node] > version:
            begin(node, now_ns)
    return reached
