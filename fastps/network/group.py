"""The group of the nodes that make versions together: sums over all of them, by Gloo's all-reduce, while training goes on.

A group belongs to one membership. An operation that fails, or makes no progress, loses the group, and the members form another
under another name. Nothing ends an operation of Gloo that has begun but its timeout. So a group that is lost is kept until all
its operations have ended, and so is the memory that they may still write.
"""

import contextlib
import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import (  # type: ignore[attr-defined]
    AllreduceOptions,
    BroadcastOptions,
    ProcessGroupGloo,
    Store,
    Work,
)

from fastps.errors import Error
from fastps.network.link import process_group, reason_of
from fastps.system.clock import Clock

logger = logging.getLogger("fastps.network")
_POLL_NS = 100_000
_LOOK_NS = 50_000_000


class GroupLostError(Error):
    """A member is gone, a connection was reset, or an operation made no progress."""


class Group:
    """The group that has this node as member number `rank` of `members`, the numbers of its nodes, in order.

    Attributes:
        members: the numbers of the nodes.
        nonce: the number that names the group.
        sent_bytes: what this node has sent, and as much came: without what the network adds.
    """

    def __init__(self, members: tuple[int, ...], node: int, nonce: int, clock: Clock) -> None:
        self.members, self.nonce, self.sent_bytes = members, nonce, 0
        self._rank, self._clock = members.index(node), clock
        self._group: ProcessGroupGloo | None = None
        self._under_way: list[Work] = []

    def meet(self, store: Store, name: str, address: str, meet_s: float, timeout_s: float) -> None:
        """Connect with the other members. No operation takes longer than `timeout_s`. Raises GroupLostError."""
        if len(self.members) == 1:
            return
        try:
            self._group = process_group(store, name, self._rank, len(self.members), address, meet_s)
            self._group._set_default_timeout(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise GroupLostError(f"nodes {self.members} expected each other within {meet_s:g} s: {reason_of(error)}") from error
        self._timeout = timedelta(seconds=timeout_s)

    def all_reduce(self, tensor: torch.Tensor) -> Work | None:
        """Begin to sum a tensor over all members, in place. Every member begins the same sums in the same order.

        Raises GroupLostError.
        """
        if self._group is None:
            return None
        options = AllreduceOptions()
        options.timeout = self._timeout
        size = len(self.members)
        self.sent_bytes += 2 * tensor.nbytes * (size - 1) // size
        return self._begun(lambda group: group.allreduce([tensor], options))

    def broadcast(self, tensor: torch.Tensor, source: int) -> Work | None:
        """Begin to copy a tensor of node `source` into those of the others. Raises GroupLostError."""
        if self._group is None:
            return None
        options = BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = self.members.index(source), 0, self._timeout
        self.sent_bytes += tensor.nbytes if self.members[self._rank] == source else 0
        return self._begun(lambda group: group.broadcast([tensor], options))

    def _begun(self, begin: Callable[[Any], Work]) -> Work:
        assert self._group is not None
        try:
            work = begin(self._group)
        except RuntimeError as error:
            raise GroupLostError(reason_of(error)) from error
        self._under_way.append(work)
        return work

    def wait(self, work: Work | None, limit_s: float, look: Callable[[], None]) -> None:
        """Wait for an operation. `look` is called now and then, and raises what ends the wait.

        Raises GroupLostError if it fails, or has not ended after `limit_s`.
        """
        if work is None:
            return
        clock = self._clock
        looked_ns = began_ns = clock.now_ns()
        while not work.is_completed():
            clock.sleep_ns(_POLL_NS)
            now_ns = clock.now_ns()
            if now_ns - looked_ns >= _LOOK_NS:
                look()
                looked_ns = now_ns
            if now_ns - began_ns >= limit_s * 1e9:
                raise GroupLostError(f"a sum over nodes {self.members} made no progress for {limit_s:g} s")
        try:
            work.wait()
        except RuntimeError as error:
            raise GroupLostError(reason_of(error)) from error
        with contextlib.suppress(ValueError):
            self._under_way.remove(work)

    @property
    def is_over(self) -> bool:
        """Whether no operation is under way, so that the group can be taken down without a wait."""
        return all(work.is_completed() for work in self._under_way)


class Groups:
    """The present group of one agent, if there is one, and those that are lost.

    `open_store` gives a new connection to the rendezvous, and `named` makes a group's name there of its nonce.
    """

    def __init__(
        self, node: int, address: str, open_store: Callable[[], Store], named: Callable[[int], str], clock: Clock
    ) -> None:
        self._node, self._address, self._clock = node, address, clock
        self._open_store, self._named = open_store, named
        self.now: Group | None = None
        self._lost: list[Group] = []
        self._bytes_before = 0  # of groups before the present one

    @property
    def nonce(self) -> int:
        """The number that names the present group; 0 without one."""
        return self.now.nonce if self.now is not None else 0

    @property
    def sent_bytes(self) -> int:
        """What this node has sent in all its groups."""
        return self._bytes_before + (self.now.sent_bytes if self.now is not None else 0)

    def form(self, members: tuple[int, ...], nonce: int, meet_s: float, timeout_s: float) -> Group:
        """Form another group. Raises GroupLostError."""
        self.lose()
        logger.info("node %d forms a group with nodes %s", self._node, members)
        made = Group(members, self._node, nonce, self._clock)
        try:
            made.meet(self._open_store(), self._named(nonce), self._address, meet_s, timeout_s)
        except (Error, RuntimeError) as error:
            raise GroupLostError(str(error)) from error
        self.now = made
        return made

    def lose(self) -> None:
        """Give the present group up."""
        if self.now is not None:
            self._bytes_before = self.sent_bytes
            self._lost.append(self.now)
            self.now = None
        self._lost = [group for group in self._lost if not group.is_over]
