"""The offset between the clocks of two machines, with a bound of its error, from the times at which messages left and came.

An exchange has four times: this side sends at t1, the other side hears that at t2 and answers at t3 by its own clock, and the
answer comes at t4. As in NTP (RFC 5905), the offset is ((t2 - t1) + (t3 - t4)) / 2, and half of the round trip without the time
that the other side held the message bounds its error, whatever the two ways took. Clocks drift, so the bound grows with the
length of the exchange and with its age. This file reads no clock.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

DRIFT = 1e-4  # two quartz clocks of 50 ppm each; a clock that is slewed faster breaks the bound
_MOST_SAMPLES = 64
_MOST_NS = 1 << 62  # of a difference that is believed
Times = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Offset:
    """At the time `at_ns` of this clock the other clock shows `at_ns + offset_ns`, give or take `error_ns`.

    >>> Offset(at_ns=0, offset_ns=500, error_ns=20, round_trip_ns=40).error_at(1_000_000)
    120
    """

    at_ns: int
    offset_ns: int
    error_ns: int
    round_trip_ns: int  # the exchange without the time that the other side held the message

    def error_at(self, now_ns: int) -> int:
        """The bound of the error at another time: clocks drift."""
        return self.error_ns + _drift(now_ns - self.at_ns)


def sample(sent_ns: int, heard_ns: int, answered_ns: int, came_ns: int) -> Offset | None:
    """The offset that one exchange shows; None for times that no two clocks can show.

    The first and the last time are of this clock, the others of the other one.

    >>> sample(1_000, 501_010, 501_030, 1_040)
    Offset(at_ns=1020, offset_ns=500000, error_ns=13, round_trip_ns=20)
    """
    length_ns, held_ns = came_ns - sent_ns, answered_ns - heard_ns
    drift_ns = _drift(length_ns)
    round_trip_ns = length_ns - held_ns
    offset_ns = ((heard_ns - sent_ns) + (answered_ns - came_ns)) // 2
    is_possible = 0 <= length_ns < _MOST_NS and held_ns >= 0 and round_trip_ns >= -drift_ns and abs(offset_ns) < _MOST_NS
    if not is_possible:
        return None
    # Over the exchange the offset itself changes by the drift at most, and so does the measured round trip.
    error_ns = (max(0, round_trip_ns + drift_ns) + 1) // 2 + drift_ns + 1
    return Offset(sent_ns + length_ns // 2, offset_ns, error_ns, max(0, round_trip_ns))


class OffsetEstimator:
    """Keeps the samples of the last exchanges, and chooses the one whose error is bounded best now.

    >>> estimator = OffsetEstimator()
    >>> estimator.add(0, 1_000, 1_000, 80), estimator.add(100, 1_110, 1_110, 120)
    (True, True)
    >>> estimator.best(200).offset_ns
    1000
    """

    def __init__(self) -> None:
        self._samples: deque[Offset] = deque(maxlen=_MOST_SAMPLES)

    def add(self, sent_ns: int, heard_ns: int, answered_ns: int, came_ns: int) -> bool:
        """Add the times of an exchange. Returns False for times that no two clocks can show."""
        found = sample(sent_ns, heard_ns, answered_ns, came_ns)
        if found is not None:
            self._samples.append(found)
        return found is not None

    def best(self, now_ns: int) -> Offset | None:
        """The sample with the least error now, or None before the first."""
        return min(tuple(self._samples), key=lambda each: each.error_at(now_ns), default=None)

    @property
    def round_trip_ns(self) -> int:
        """The least round trip of the samples; -1 before the first."""
        return min((each.round_trip_ns for each in tuple(self._samples)), default=-1)

    def forget(self) -> None:
        """Forget everything: the other clock is another one."""
        self._samples.clear()


def offsets_at(samples: Sequence[Offset], times: Times) -> tuple[Times, Times]:
    """The offset at each time, linear between the samples, and the bound of its error. At least one sample is needed.

    Between two samples the line is off by the larger of their errors, and by what the clocks can drift until half way.

    >>> first, second = Offset(0, 1_000, 10, 20), Offset(1_000_000, 1_020, 30, 60)
    >>> found, errors = offsets_at([first, second], np.array([0, 500_000, 2_000_000]))
    >>> found.tolist(), errors.tolist()
    ([1000, 1010, 1020], [81, 81, 131])
    """
    ordered = sorted(samples, key=lambda each: each.at_ns)
    base_ns, first_ns = ordered[0].at_ns, ordered[0].offset_ns  # floats are exact for small differences only
    at = np.array([each.at_ns - base_ns for each in ordered], np.int64)
    own = np.array([each.error_ns for each in ordered], np.int64)
    moved = times.astype(np.int64) - base_ns
    rises = [float(each.offset_ns - first_ns) for each in ordered]
    offsets = first_ns + np.rint(np.interp(moved.astype(np.float64), at.astype(np.float64), rises)).astype(np.int64)
    place = np.searchsorted(at, moved, side="right")
    left, right = np.maximum(place - 1, 0), np.minimum(place, len(at) - 1)
    outside = np.maximum(0, np.maximum(at[0] - moved, moved - at[-1]))
    apart = (at[right] - at[left]) / 2
    errors = np.maximum(own[left], own[right]) + np.ceil(DRIFT * (outside + apart)).astype(np.int64) + 1
    return offsets, errors


def _drift(duration_ns: int) -> int:
    return math.ceil(abs(duration_ns) * DRIFT)
