"""Short sequences of events with the answers that the papers require, worked out by hand.

Tests put them to the oracles and to the compiled scheduler. Nothing here is computed: both implementations must reproduce
these answers.
"""

from tests.oracles.by_hand.batches import BATCHES
from tests.oracles.by_hand.dssp import DSSP
from tests.oracles.by_hand.events import Event, Sequence
from tests.oracles.by_hand.quorums import BACKUP, PSP
from tests.oracles.by_hand.rudra import RUDRA
from tests.oracles.by_hand.staggered import STAGGERED
from tests.oracles.by_hand.sums import HARDSYNC, SOFTSYNC
from tests.oracles.by_hand.turns import R2SP

SEQUENCES = [*DSSP, *BACKUP, *PSP, *SOFTSYNC, *HARDSYNC, *RUDRA, *R2SP, *BATCHES, *STAGGERED]

__all__ = ["SEQUENCES", "Event", "Sequence"]
