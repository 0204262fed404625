"""A suspend-aware deadline: the timeout of a wait counts only time in which the process could run.

A job that is suspended as a whole (a paused container, a closed laptop, Ctrl-Z) continues where it was. This module reads no
clock: times are arguments.
"""

AWAY_NS = 1_000_000_000  # polls of a wait are some ms apart; a longer gap than this means that the process did not run


class Deadline:
    """The deadline of a wait that began at `began_ns` and may last `timeout_ns`. Call `is_over` at every poll.

    >>> deadline = Deadline(0, 3_000_000_000)
    >>> [deadline.is_over(seconds * 1_000_000_000) for seconds in (1, 100, 101)]  # stopped for 99 s
    [False, False, False]
    >>> deadline.is_over(102_000_000_000)
    True
    """

    def __init__(self, began_ns: int, timeout_ns: int) -> None:
        self._over_ns = began_ns + timeout_ns
        self._looked_ns = began_ns

    def is_over(self, now_ns: int) -> bool:
        """Whether the wait has reached its timeout, not counting time in which this process was suspended."""
        away_ns, self._looked_ns = now_ns - self._looked_ns, now_ns
        if away_ns > AWAY_NS:
            self._over_ns += away_ns
        return now_ns >= self._over_ns
