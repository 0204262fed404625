"""The part of a trace that a node's agent writes: messages between nodes, and the offset of the node's clock to node 0's.

It lies beside the workers' parts. While the agent lives it holds a lock, and the trace is merged after it: the agent of a home
serves other nodes longer than its own workers run.
"""

import contextlib
import fcntl
import json
import logging
import os
import threading
from pathlib import Path
from typing import Any

from fastps.errors import ArenaError
from fastps.job.nodes import Nodes
from fastps.membership.job_memory import JobMemory
from fastps.membership.node_board import BoardView
from fastps.system.clock_offset import Offset
from fastps.tracing.file import CLOCK_DTYPE, MESSAGE_DTYPE, TraceError
from fastps.tracing.parts import AGENT, PartTable, folder_of, merge_if_over

logger = logging.getLogger("fastps.trace")


def node_note(nodes: Nodes, host: str) -> dict[str, Any]:
    """What a trace says of its node."""
    return {"node": nodes.number, "nodes": nodes.count, "host": host}


def node_of(job: str) -> int | None:
    """The number of the node of a leaf arena, from its board; None for a job of one node."""
    try:
        board = BoardView.of(job)
    except ArenaError:
        return None
    rows = board.rows() if board is not None else []
    return rows[0].node if rows else None


class NodePart:
    """An agent's part of the trace in `file`, for any thread; a full disk ends it. Raises TraceError if it cannot begin."""

    def __init__(self, file: Path, leaf: JobMemory, note: dict[str, Any]) -> None:
        self._file, self._leaf, self._note = file, leaf, note
        self._folder = folder_of(file, leaf)
        self._adding = threading.Lock()
        self._last_ns = 0
        self._is_full = False
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            self._held = os.open(self._folder / f"{AGENT}.note", os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._held, fcntl.LOCK_EX)
            os.write(self._held, json.dumps(note).encode())
            self._messages = PartTable(self._folder / f"{AGENT}.messages", MESSAGE_DTYPE)
            self._clock = PartTable(self._folder / f"{AGENT}.clock", CLOCK_DTYPE)
            if note["node"] == 0:  # the clock of which the others tell their offset
                self._clock.append((leaf.clock.now_ns(), 0, 0, 0, 0, 1))
        except OSError as error:
            raise TraceError(f"the trace's records cannot be written to {self._folder}: {error}; choose another file") from None

    def message(self, kind: int, peer: int, step: int, begin_ns: int, end_ns: int) -> None:
        """Record a message that this node has sent to another one, or taken from it."""
        with self._adding:
            if self._held < 0:  # a thread that still serves a lost node
                return
            self._append(self._messages, (begin_ns, end_ns, step, self._note["node"], peer, kind, 1))

    def offset(self, found: Offset) -> None:
        """Record the offset of node 0's clock to this node's, unless it is the one that was recorded last."""
        with self._adding:
            if found.at_ns > self._last_ns:
                self._last_ns = found.at_ns
                node = self._note["node"]
                self._append(self._clock, (found.at_ns, found.offset_ns, found.error_ns, found.round_trip_ns, node, 1))

    def _append(self, table: PartTable, record: tuple[Any, ...]) -> None:
        if self._is_full:
            return
        try:
            table.append(record)
        except TraceError as error:
            self._is_full = True
            logger.warning("%s; the trace of node %d ends, and the job goes on", error, self._note["node"])

    def close(self) -> None:
        """End the part. If all workers have ended, too, write the trace. May be called twice."""
        with self._adding:
            if self._held < 0:
                return
            self._messages.close()
            self._clock.close()
            os.close(self._held)  # with the lock
            self._held = -1
        with contextlib.suppress(FileNotFoundError):  # the folder was removed: there is nothing to merge
            merge_if_over(self._folder, self._file, self._leaf.arena)
