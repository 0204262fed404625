"""Sequences of a few events with the answers that the papers ask for, worked out by hand.

The oracles answer them in tests/oracles/test_by_hand.py, the compiled scheduler in
tests/kernels/scheduling/test_scheduler_timed.py. Nothing here is computed: these are the answers that both were written
towards.
"""

from tests.oracles.by_hand.batches import BATCHES
from tests.oracles.by_hand.events import Event, Sequence
from tests.oracles.by_hand.quorums import BACKUP, PSP
from tests.oracles.by_hand.staggered import STAGGERED
from tests.oracles.by_hand.sums import HARDSYNC, SOFTSYNC
from tests.oracles.by_hand.turns import R2SP

SEQUENCES = [*BACKUP, *PSP, *SOFTSYNC, *HARDSYNC, *R2SP, *BATCHES, *STAGGERED]

__all__ = ["SEQUENCES", "Event", "Sequence"]
