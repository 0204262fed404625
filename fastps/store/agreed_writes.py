"""The agreement of a job's workers on weights that their scripts have written between two steps.

Where the pushes of all workers are folded together, the fold may begin from what the scripts wrote, if all wrote the same. A
worker announces a digest of it before it pushes. A push without an announcement says that its worker wrote nothing.
"""

from fastps.kernels.protocol.lane import LEAVING, UNDECIDED, Lane
from fastps.store.worker import Worker

_POLL_NS = 200_000


def others_of(worker: Worker) -> list[Lane]:
    """The lanes of the other workers that push, or are still to attach."""
    return [Lane(worker.store.arena, lane) for lane in worker.store.others(worker.rank)]


def disagreeing(worker: Worker, digest: int) -> list[int]:
    """Announce what this worker's script wrote, wait for the other workers, and return those that did not write the same.

    Each of the others has announced or pushed by then, so it reads the version before no more. Raises as `Worker.wait_until`.
    """
    worker.lane.announce(digest)

    def words() -> dict[int, int]:
        found = {each.index: each.announced() for each in others_of(worker)}
        return {lane: word for lane, word in found.items() if word != LEAVING}

    def overdue() -> str:
        slow = ", ".join(str(lane) for lane, word in words().items() if word == UNDECIDED)
        return f"worker {worker.rank} has written weights, and waited for the next step of worker {slow}"

    try:
        while True:
            worker.wait_until(lambda: UNDECIDED not in words().values() or None, _POLL_NS, overdue)
            with worker.locked():  # no combiner is between a commit and the words that follow from it
                found = words()
            if UNDECIDED not in found.values():
                return [lane for lane, word in found.items() if word != digest]
    except BaseException:
        worker.lane.announce(0)
        raise
