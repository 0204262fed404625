"""Injected transfers: a push and a pull take as long as a link would need. Honest waits on links that are shared.

Where the papers measure communication, a store in shared memory has none; this puts it back. A link carries one transfer at a
time, so those who share one wait for each other: the server's in Rudra-base, one a leaf in Rudra-adv (the leaf sits beside its
learners), one's own in Rudra-adv* (weights come down a tree of learners). Refuses to know what is transferred.
"""

import fcntl

from fastps.system.clock import Clock


class Transfers:
    """Transfers of `duration_ns` over the link of number `link`: a lock of one byte of the arena's file, freed by any death."""

    def __init__(self, descriptor: int, link: int, duration_ns: int, clock: Clock) -> None:
        self._descriptor = descriptor
        self._link = link
        self._duration_ns = duration_ns
        self._clock = clock

    def make(self) -> int:
        """Wait for the link, then for the transfer; returns how long both took, in ns."""
        if not self._duration_ns:
            return 0
        began_ns = self._clock.now_ns()
        fcntl.lockf(self._descriptor, fcntl.LOCK_EX, 1, self._link)
        try:
            self._clock.sleep_ns(self._duration_ns)
        finally:
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, self._link)
        return self._clock.now_ns() - began_ns
