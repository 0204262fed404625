"""A worker of a job with a server: it posts pushes and wakes the server, and does not combine while the server lives.

All decisions of the server lie in the arena. If the server dies, the worker combines from then on, as without a server.
"""

from fastps.job import limits
from fastps.kernels.protocol.worker_lane import WorkerLane
from fastps.store.worker import Worker
from fastps.system import proc


class ServedWorker(Worker):
    """A Worker that leaves combining to the server while the server lives.

    Attributes:
        is_served: whether the server combines; False once the server is gone.
    """

    is_served: bool
    _combines_itself = False

    def _make_lane(self) -> WorkerLane:
        lane = super()._make_lane()
        self.is_served = self.store.arena.is_served()
        lane.hand_over(self.is_served)
        return lane

    def _takers(self) -> int:
        """The workers and the server."""
        return super()._takers() + self.is_served

    def try_combine(self) -> None:
        """Wake the server; if the server is gone, combine as a Worker does."""
        if self.is_served and not self.store.arena.is_served():
            self.take_over()
        if self.is_served:
            self._check_not_forked()
            self.lane.call_server()
            with self._combine_lock:
                # Finish with a lock that it recovered from a dead worker and could not release yet. Where the server passed it
                # by, take the lock once: until then the server waits for the next worker that stops.
                self.lane.hand_over(not self.lane.was_passed_by())
                try:
                    self._settle(self.lane.try_combine(self._clock.now_ns()))
                finally:
                    self.lane.hand_over(True)
        else:
            super().try_combine()

    def take_over(self) -> None:
        """Combine from now on, because the server is gone."""
        with self._combine_lock:
            self.is_served = False
            self.lane.hand_over(False)
            self.cores.share_among(self._takers())

    def unlock_shards(self, publish: bool) -> None:
        """Release the shard locks as a Worker does, then wake the server for the pushes that were posted meanwhile."""
        super().unlock_shards(publish)
        self.try_combine()

    def _timeout_text(self) -> str:
        text = super()._timeout_text()
        if self.is_served:
            process = self.store.arena.process_id(self.store.arena.server_lane)
            text += f"; process {process}, the job's server, " + (
                f"is stopped: wake it (kill -CONT {process}), or end it (kill -KILL {process}), and the workers combine"
                if proc.is_stopped(process)
                else "combines"
            )
        return text

    def _slice_ns(self) -> int:
        """The longest sleep of a wait. While the server lives it fires the timers, so they do not shorten the sleep."""
        return limits.SLICE_NS if self.is_served else super()._slice_ns()
