"""The store of a leaf arena. Its workers cannot fold, because the home has the weights; they end when their agent is lost."""

from fastps.errors import NodeLostError
from fastps.kernels.shm.arena import LANE_LEFT
from fastps.store.served_worker import ServedWorker
from fastps.store.store import Store


class LeafWorker(ServedWorker):
    """A worker of a leaf arena."""

    def take_over(self) -> None:
        """Never combine. Raises NodeLostError unless the agent has left, as it does once the other nodes have left."""
        arena = self.store.arena
        if arena.lane_state(arena.server_lane) != LANE_LEFT:
            reason = arena.failure(arena.server_lane).partition(": ")[2]
            raise NodeLostError(reason or f"this node's agent (process {arena.process_id(arena.server_lane)}) was killed")
        self.is_served = False

    def _others_are_done(self) -> bool:
        """Whether the workers of all nodes have left: the agent leaves last."""
        return not self.store.arena.is_served() and super()._others_are_done()


class LeafStore(Store):
    """The arena of one node, whose server is the node's agent."""

    served_class = LeafWorker
