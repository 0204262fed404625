"""How long a wait may last: its timeout, in which only the time counts that the process could have waited.

A job that is suspended as a whole (a container that is paused, a laptop's lid, Ctrl-Z) goes on where it was. Refuses to read a
clock: times are arguments.
"""

AWAY_NS = 1_000_000_000  # between two looks of one wait, which are some ms apart: for so long the process did not run


class Patience:
    """A wait that began at `began_ns` and may last `timeout_ns`; ask it at every look.

    >>> patience = Patience(0, 3_000_000_000)
    >>> [patience.is_over(seconds * 1_000_000_000) for seconds in (1, 100, 101)]  # stopped for 99 s
    [False, False, False]
    >>> patience.is_over(102_000_000_000)
    True
    """

    def __init__(self, began_ns: int, timeout_ns: int) -> None:
        self._over_ns = began_ns + timeout_ns
        self._looked_ns = began_ns

    def is_over(self, now_ns: int) -> bool:
        """Whether the wait has lasted for the timeout, without what this process was away for since the last look."""
        away_ns, self._looked_ns = now_ns - self._looked_ns, now_ns
        if away_ns > AWAY_NS:
            self._over_ns += away_ns
        return now_ns >= self._over_ns
