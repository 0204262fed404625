"""A worker of a job with a server: it posts and wakes the server, and takes no turn itself while the server lives.

When the server is gone, everything that it had decided lies in the arena, so that the worker takes the turns from then on as in
a job without one. Refuses to find out about that by itself: membership.py looks at the peers, the server among them.
"""

from fastps.job import limits as config
from fastps.kernels.protocol.worker_lane import WorkerLane
from fastps.store.worker import Worker


class ServedWorker(Worker):
    """See Worker.

    Attributes:
        is_served: whether the server takes the turns; False once it is gone.
    """

    is_served: bool
    _turns_are_plain = False

    def _make_lane(self) -> WorkerLane:
        lane = super()._make_lane()
        self.is_served = self.store.arena.is_served()
        lane.hand_over(self.is_served)
        return lane

    def _takers(self) -> int:
        """The server is one more."""
        return super()._takers() + self.is_served

    def try_combine(self) -> None:
        """Call the server; where it is gone, as Worker.try_combine."""
        if self.is_served and not self.store.arena.is_served():
            self.take_over()
        if self.is_served:
            self._check_not_forked()
            self.lane.call_server()
            with self._turn_lock:  # one that it took of a dead worker, and could not let go of at once
                self._settle(self.lane.try_combine(self._clock.now_ns()))
        else:
            super().try_combine()

    def take_over(self) -> None:
        """The server is gone: take the turns from now on."""
        with self._turn_lock:
            self.is_served = False
            self.lane.hand_over(False)
            self.cores.share_among(self._takers())

    def release_turns(self, publish: bool) -> None:
        """See Worker.release_turns; what was posted meanwhile is the server's."""
        super().release_turns(publish)
        self.try_combine()

    def _timeout_text(self) -> str:
        text = super()._timeout_text()
        if self.is_served:
            text += f"; process {self.store.arena.process_id(self.store.arena.server_lane)}, the job's server, takes the turns"
        return text

    def _slice_ns(self) -> int:
        """Timers are the server's."""
        return config.SLICE_NS if self.is_served else super()._slice_ns()
