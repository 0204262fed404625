"""What an oracle's module says in its attribute `PLAYS`. The tests of the scheduler and of the simulator find it there."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Plays:
    """The specs that an oracle plays.

    Attributes:
        make: makes the oracle from the number of workers, then the spec's numbers, then its options by name.
        specs: played beside the compiled scheduler on random traffic of 1 to 64 workers.
        sized: the same for specs that depend on the number of workers: the name of the test, and the spec for so many workers.
        simulated: compared with the simulator, with 7 workers.
        timed: the oracle's push also takes a timestamp and a number of samples, and the oracle may set timers.
        events: pushes and leaves of a full run; fewer for a slow oracle.
    """

    make: Callable[..., Any]
    specs: tuple[str, ...] = ()
    sized: Mapping[str, Callable[[int], str]] = field(default_factory=dict)
    simulated: tuple[str, ...] = ()
    timed: bool = True
    events: int = 104_000
