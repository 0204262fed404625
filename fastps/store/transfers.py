"""Injected transfers: a push and a pull take as long as a network link would need. The waits are real, on shared links.

The papers measure communication, and a store in shared memory has none; an injected transfer adds it. A link carries one
transfer at a time, so workers that share a link wait for each other. Rudra-base has one link, the server's. Rudra-adv has one
per leaf, because the leaf sits beside its learners. Rudra-adv* has one per worker: weights come down a tree of learners.
"""

import fcntl

from fastps.system.clock import Clock


class Transfers:
    """Transfers of `duration_ns` over link number `link`.

    The link is a POSIX lock on one byte of the arena's file. The kernel releases it if the process dies.
    """

    def __init__(self, descriptor: int, link: int, duration_ns: int, clock: Clock) -> None:
        self._descriptor = descriptor
        self._link = link
        self._duration_ns = duration_ns
        self._clock = clock

    def make(self) -> int:
        """Wait for the link, then for the transfer. Return the duration of both together, in ns."""
        if not self._duration_ns:
            return 0
        began_ns = self._clock.now_ns()
        fcntl.lockf(self._descriptor, fcntl.LOCK_EX, 1, self._link)
        try:
            self._clock.sleep_ns(self._duration_ns)
        finally:
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, self._link)
        return self._clock.now_ns() - began_ns
