"""The placement of a model in a job of several nodes: a leaf arena on this node, and the state on node 0."""

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from fastps.checkpoint.format import Checkpoint
from fastps.checkpoint.snapshot import Pinned
from fastps.errors import UnsupportedError
from fastps.job.layout import Layout
from fastps.job.nodes import Nodes, are_replicas, home_layout, leaf_layout
from fastps.job.update_rules import Hyper
from fastps.membership.job_memory import JobMemory
from fastps.membership.node_board import BoardView
from fastps.network.agent import plan_of
from fastps.network.home_checkpoint import HomeView, LeafStart
from fastps.network.meeting import kept_descriptors
from fastps.store.observer import WorkerStatistics
from fastps.store.store import StartState
from fastps.store.worker import Worker
from fastps.torch import join
from fastps.torch.join import Joining
from fastps.torch.placements.host import HostPlacement
from fastps.tracing import recorder


class NodePlacement(HostPlacement):
    """Placement of a model whose workers are on several nodes. Raises UnsupportedError for parameters on a GPU."""

    name = "node"
    keeps_own = False

    def __init__(self, tensors: list[torch.Tensor], push_dtype: torch.dtype, nodes: Nodes) -> None:
        super().__init__(tensors, push_dtype)
        found = sorted({str(tensor.device) for tensor in tensors if tensor.device.type != "cpu"})
        if found:
            raise UnsupportedError(f"a job of several nodes keeps its model in host memory, found parameters on {found[0]}")
        self._nodes = nodes
        self._home_view: HomeView | None = None
        self._board: BoardView | None = None
        self._first_rank = self._workers = 0  # of this node's workers the first, and how many the job has
        self._resumed = ""

    def layout(self, layout: Layout) -> Layout:
        """The layout of this node's arena. Node 0 has the state, or each node if it is a replica."""
        self._home = home_layout(layout, self._nodes)
        self._is_replica = are_replicas(layout.policy, self._nodes.policy)
        self.saves = self._nodes.is_first
        return leaf_layout(layout, self._nodes)

    def stated_layout(self, layout: Layout) -> Layout:
        return self._home

    def start(self, resumed: Checkpoint) -> StartState:
        """The leaf begins with the weights and the steps; node 0's agent reads the rest from the folder. A replica has all."""
        if self._is_replica:
            return resumed
        self._refuse_scattered_state()
        self._resumed = str(resumed.folder)
        return LeafStart(resumed, self._home, self._nodes.number)

    def saved_version(self, worker: Worker) -> int:
        return self._view(worker).version if self.saves and not self._is_replica else worker.version

    def pin(
        self, worker: Worker, groups: list[dict[str, Any]], extra: Mapping[str, Any], *, waits: bool, **more: Any
    ) -> Pinned:
        """Raises UnsupportedError on other nodes than node 0, unless each node has the whole state."""
        if self._is_replica:
            fields, arrays = more.pop("more", ({}, {}))
            of_job = {**fields, "workers": self._workers}
            return super().pin(worker, groups, extra, waits=waits, more=(of_job, arrays), **more)
        self._refuse_scattered_state()
        if not self.saves:
            raise UnsupportedError(
                f"node {self._nodes.number} has only weights, and node 0 has the optimizer's state: save on a worker of node 0"
            )
        return self._view(worker).pin(groups, extra, waits=waits)

    def _refuse_scattered_state(self) -> None:
        if self._nodes.policy.local_steps:
            raise UnsupportedError(
                "with local_steps each node has an optimizer's state of its own, which no checkpoint has: save the model after"
                " wait_for_others()"
            )

    def _view(self, worker: Worker) -> HomeView:
        if self._home_view is None:
            self._home_view = HomeView(self._home, worker)
        return self._home_view

    def statistics(self, worker: Worker) -> list[WorkerStatistics]:
        """Where this node is a replica, of the workers of all nodes: this node's now, those of others up to a second ago.

        After `wait_for_others` all are the last.
        """
        own = super().statistics(worker)
        if not self._is_replica:
            return own
        if self._board is None:
            self._board = BoardView.of(worker.store.job, worker.store.clock)
        rows = [WorkerStatistics.unpack(data) for data in self._board.workers()] if self._board is not None else []
        first = self._first_rank
        fresh = {first + row.rank: replace(row, rank=first + row.rank) for row in own}
        return [fresh.pop(row.rank, row) for row in rows] + list(fresh.values())

    def end(self) -> None:
        if self._home_view is not None:
            self._home_view.close()
            self._home_view = None

    def join(self, layout: Layout, hypers: list[Hyper], to: Joining, write_state: Callable[[JobMemory], None] | None) -> Worker:
        """The first worker of a node makes its leaf arena and starts its agent."""
        if write_state is not None and not self._is_replica:
            raise UnsupportedError(
                "a job of several nodes begins with a new optimizer: expected one without state, found state that was loaded"
            )
        self._first_rank, self._workers = to.identity.rank - self._nodes.local_rank, to.identity.workers
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun restarts all workers and keeps the store
        # An agent of the launchers' last job may live, and ask at the rendezvous of this one.
        launch = os.environ.get("FASTPS_JOB", "") if "FASTPS_NNODES" in os.environ else ""
        name = f"{attempt}/{launch}/{to.identity.job if to.is_named else to.identity.instance}"
        local = replace(
            to.identity,
            job=f"{to.identity.job}.node{self._nodes.number}",
            rank=self._nodes.local_rank,
            workers=self._nodes.local_workers,
        )
        trace = recorder.file_of_next(self._nodes.number)
        plan = plan_of(self._nodes, name, self._home, hypers, self._resumed, trace, to.identity.workers)
        plan = replace(plan, inherited=kept_descriptors())
        finish = write_state if to.resumed is None else None
        return join.join(layout, self.tensors, hypers, replace(to, identity=local), finish=finish, server_plan=plan)
