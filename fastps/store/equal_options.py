"""Notices workers that push with other options: a rate or a decay that a script sets by rank, or one state dict loaded alone.

Where all pushes of a version are folded together, a fold takes the mean of their rates, and the rest from the first of them. A
worker that has pushed other options than before looks at those of the others, which have pushed then, too.
"""

import logging
from collections.abc import Sequence

from fastps.job.update_rules import Hyper
from fastps.kernels.protocol.lane import Lane
from fastps.kernels.shm.arena import LANE_LIVE
from fastps.store.worker import Worker

logger = logging.getLogger("fastps.torch")

_LOOKS = 64  # at changes of the options: a schedule may change them in each step


class EqualOptions:
    """Compares one worker's options with those of the others. `reads_slots`: whether the CPU can read the slots.

    Attributes:
        pushed: the options of the last push.
        is_due: whether they were new, so that the next call of `look` compares them.
    """

    def __init__(self, worker: Worker, *, reads_slots: bool) -> None:
        policy, layout = worker.store.layout.policy, worker.store.layout
        self._worker, self._left = worker, _LOOKS if reads_slots and layout.workers > 1 and policy.fold == "all" else 0
        self.pushed: Sequence[Hyper] = ()
        self.is_due = False

    def check(self, hypers: Sequence[Hyper]) -> None:
        """Compare the options of the last push with the others', before the push with these. Warns once."""
        before, self.pushed = self.pushed, hypers
        is_due, self.is_due = self.is_due, hypers is not before and self._left > 0
        if not is_due or self._left <= 0:
            return
        self._left -= 1
        store, rank = self._worker.store, self._worker.rank
        states = store.arena.lane_states()[: store.arena.lanes]
        for lane in [lane for lane, state in enumerate(states) if state == LANE_LIVE and lane != rank]:
            other = Lane(store.arena, lane)
            posted = other.posted()
            if not posted or other.posted_null():
                continue
            found = store.slot_words(lane, (posted - 1) % store.arena.slots)[0]
            # The other may have pushed its next step already, which may have other options.
            if found not in (list(before), list(hypers)):
                self._warn(lane, found, before)
                return

    def _warn(self, lane: int, found: Sequence[Hyper], own: Sequence[Hyper]) -> None:
        self._left = 0
        differences = [
            "others than the rates"
            if name == "flags" and self._worker.store.layout.rule.runs_in_python
            else f"{name.replace('flags', 'switches')} {mine:g} and {other:g}"
            for one, two in zip(own, found, strict=True)
            for name, mine, other in zip(Hyper._fields, one, two, strict=True)
            if mine != other
        ]
        layout = self._worker.store.layout
        is_owner = layout.rule.runs_in_python and not layout.has_server
        logger.warning(
            "workers %d and %d push with other options (%s): a version takes %s; set them alike in all workers, also after a"
            " load",
            self._worker.rank,
            lane,
            ", ".join(differences[:4]),
            "those of worker 0" if is_owner else "the mean of the rates, and the rest from the first worker",
        )
