"""The choice between two kinds of stores into shared blocks, by the times of large all-reduces.

Where the cores share a cache, plain stores are up to twice as fast; where they do not, non-temporal stores are up to three
times as fast. A virtual machine may move from one case to the other. Rank 0 chooses for all ranks. This module reads no clock.
"""

_TRIAL = 3  # collectives in a row; only the last counts, because other ranks may have begun with the kind before
_BETWEEN, _LEAST_BETWEEN = 40, 8  # collectives from one trial of the kind that is not chosen to the next
_SLOWER = 1.5  # times the mean: a collective that takes so long ends the wait for the next trial
_NEW = 0.2  # the share of a new time in the mean of the chosen kind


class StoreChoice:
    """Tries each kind, and then uses the faster. False is plain, True is non-temporal.

    >>> choice = StoreChoice()
    >>> used = []
    >>> for _ in range(12):
    ...     used.append(choice.following())
    ...     choice.note(2.0 if used[-1] else 3.0)
    >>> "".join("n" if each else "p" for each in used)
    'pppnnnnnnnnn'
    """

    def __init__(self) -> None:
        self._times: dict[bool, float] = {}
        self._kind, self._left, self._is_trial = False, _TRIAL, True

    def following(self) -> bool:
        """The kind of the next large collective."""
        if self._left == 0 and len(self._times) == 2 and self._is_trial:
            self._kind, self._left, self._is_trial = self._times[True] < self._times[False], _BETWEEN, False
        elif self._left == 0:
            self._kind, self._left, self._is_trial = not self._kind, _TRIAL, True
        self._left -= 1
        return self._kind

    def note(self, time_per_byte: float) -> None:
        """The time of the collective that used the kind last returned."""
        if not self._is_trial:
            if time_per_byte > _SLOWER * self._times[self._kind] and self._left <= _BETWEEN - _LEAST_BETWEEN:
                self._left, self._times[self._kind] = 0, time_per_byte
            self._times[self._kind] += _NEW * (time_per_byte - self._times[self._kind])
        elif self._left == 0:
            self._times[self._kind] = time_per_byte
