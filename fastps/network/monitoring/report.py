"""An agent's report: it collects the figures of its node, and on node 0 those of all nodes, and keeps the node's board.

A thread writes the board four times a second, whatever the agent waits for.
"""

import platform
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from fastps.job.nodes import Nodes
from fastps.kernels.shm.arena import LANE_FREE, LANE_JOINING, LANE_LEFT, Arena
from fastps.membership.job_memory import JobMemory
from fastps.membership.node_board import NodeBoard, NodeFigures, NodeStatistics
from fastps.membership.peers import WORKER_LOST
from fastps.network.monitoring.watch import EdgeWatch
from fastps.tracing.node_part import NodePart

_EVERY_S = 0.25
_STATES = {LANE_FREE: "joining", LANE_JOINING: "joining", LANE_LEFT: "left"}
_STATES |= dict.fromkeys(WORKER_LOST, "lost")


class Groups(Protocol):
    """What counts the bytes of sums."""

    @property
    def sent_bytes(self) -> int:
        """What this node has sent, and as much came."""


class Report(threading.Thread):
    """The report of one agent. Raises ArenaError if there is no memory for the board, and OSError if its name is taken."""

    home: Arena | None = None  # on node 0 its home's

    def __init__(self, leaf: JobMemory, nodes: Nodes, workers: int = 0, trace: NodePart | None = None) -> None:
        super().__init__(name="fastps-report", daemon=True)
        self._leaf, self._nodes, self._trace = leaf, nodes, trace
        self._host = platform.node()
        self.of_home = self._watch(0)  # the edges to node 0's home; unused on node 0
        self._leaves: dict[int, EdgeWatch] = {}
        self._ends = threading.Event()
        self._board = NodeBoard(leaf.job, nodes.count if nodes.is_first else 1, workers)
        self.wait_ns = 0  # in exchanges
        self.groups: Groups | None = None  # of a replica, over which sums travel
        self._write()  # workers find the node's number here when they join

    def show_workers(self, rows: Sequence[bytes]) -> None:
        """Show the packed counters of the job's workers, by rank."""
        self._board.write_workers(rows)

    def of_leaf(self, node: int) -> EdgeWatch:
        """The watch over the edges to the leaf of another node."""
        return self._leaves.setdefault(node, self._watch(node))

    def _watch(self, peer: int) -> EdgeWatch:
        return EdgeWatch(self.figures, peer, self._trace.message if self._trace is not None else None)

    def figures(self) -> NodeFigures:
        """What this node says of itself."""
        watches = list(self._leaves.values()) if self._nodes.is_first else [self.of_home]
        in_groups = self.groups.sent_bytes if self.groups is not None else 0
        return NodeFigures(
            workers=self._nodes.local_workers,
            steps=self._leaf.version,
            wait_ns=self.wait_ns,
            sent_bytes=sum(each.sent_bytes for each in watches) + in_groups,
            received_bytes=sum(each.received_bytes for each in watches) + in_groups,
            host=self._host,
        )

    def rows(self, now_ns: int) -> list[NodeStatistics]:
        """The rows of the board: of this node, and on node 0 of all."""
        nodes = range(self._nodes.count) if self._nodes.is_first else (self._nodes.number,)
        return [self._row(node, now_ns) for node in nodes]

    def _row(self, node: int, now_ns: int) -> NodeStatistics:
        told, told_ns, offset_ns, error_ns, trip_ns = self.figures(), now_ns, 0, 0, -1
        if node != self._nodes.number:
            watch = self.of_leaf(node)
            told, told_ns = watch.told or NodeFigures(), watch.told_ns
            offset_ns, error_ns, trip_ns = _clock_of(watch, now_ns)
        elif node != 0:
            offset_ns, error_ns, trip_ns = _clock_of(self.of_home, now_ns)
            offset_ns = -offset_ns
        row = NodeStatistics(
            node, state="live", **vars(told), heard_ns=told_ns,
            round_trip_ns=trip_ns, clock_offset_ns=offset_ns, clock_error_ns=error_ns,
        )  # fmt: skip
        if (home := self.home) is None:
            return row
        counted, clocks = home.counters(node), [home.clock(lane) for lane in range(self._nodes.count)]
        return replace(
            row, state=_STATES.get(home.lane_state(node), "live"), pushes=counted["steps"], lag=max(clocks) - clocks[node],
            folded=counted["folded"], dropped=counted["dropped"],
            staleness_sum=counted["staleness_sum"], staleness_max=counted["staleness_max"],
        )  # fmt: skip

    def run(self) -> None:
        """See threading.Thread."""
        while not self._ends.wait(_EVERY_S):
            self._write()

    def _write(self) -> None:
        now_ns = self._leaf.clock.now_ns()
        self._board.write(self.rows(now_ns))
        if self._trace is not None and not self._nodes.is_first and (found := self.of_home.clock.best(now_ns)) is not None:
            self._trace.offset(found)

    def close(self) -> None:
        """Write the last figures, and end. May be called twice."""
        if self._ends.is_set():
            return
        self._ends.set()
        if self.is_alive():
            self.join()
        self._write()
        self._board.close()


def _clock_of(watch: EdgeWatch, now_ns: int) -> tuple[int, int, int]:
    """The offset of the other node's clock, the bound of its error, and the least round trip, in ns."""
    found = watch.clock.best(now_ns)
    offset = (found.offset_ns, found.error_at(now_ns)) if found is not None else (0, -1)
    return *offset, watch.clock.round_trip_ns
