"""Compute-time models: how long each worker's steps take, drawn from a seed, the same on every machine.

Each worker has its own streams of random numbers, and a draw is a function of seed, worker and the draw's number. A worker
therefore computes equally long in its k-th step under every discipline, and runs can be compared.
"""

from libc.stdint cimport int64_t, uint64_t
from libc.stdlib cimport calloc, free

import numpy as np

cdef extern from "base/rng.h" nogil:
    uint64_t fps_word(uint64_t key, uint64_t counter)
    uint64_t fps_stream(uint64_t seed, uint64_t stream)
    double fps_uniform(uint64_t key, uint64_t counter)
    double fps_log(double x)
    double fps_exp(double x)
    double fps_normal(double p)

cdef enum:
    _CONSTANT
    _NORMAL
    _LOGNORMAL
    _PARETO
    _REPLAY

_KINDS = ("constant", "normal", "lognormal", "pareto", "replay")  # in the order of these numbers
LONGEST_NS = 1_000_000_000_000_000  # 11 days: cuts the Pareto tail, which is unbounded
cdef double _LONGEST_NS = 1e15


cdef class ComputeTimes:
    """The times of `factors.shape[0]` workers' steps, in ns.

    kind, location_ns, spread: "constant" (location_ns, 0); "normal" (mean, standard deviation in ns; cut at 1 ns);
    "lognormal" (median, standard deviation of the logarithm); "pareto" (least time, shape); "replay" (0, 0).
    factors: float64[workers], which multiply each worker's times.
    bursts: (mean ns from one burst to the next, mean ns of a burst, factor during a burst), both exponential, or None. A step
    that begins in a burst is slow as a whole.
    replay: (times in ns: int64[n], bounds of each worker's times: int64[workers + 1]); each worker repeats its times.
    blocked: int64[n]: ns that each replayed step waits without a core; `replay` then has the step's time on a core.

    Raises ValueError for values out of range.

    >>> times = ComputeTimes("constant", 10.0, 0.0, np.array([1.0, 3.0]), seed=1)
    >>> times.draw(0), times.draw(1)
    (10, 30)
    """

    def __cinit__(self, str kind, double location_ns, double spread, double[::1] factors not None, uint64_t seed, *,
                  tuple bursts=None, tuple replay=None, int64_t[::1] blocked=None):
        cdef int64_t worker
        if kind not in _KINDS:
            raise ValueError(f"expected a kind of {', '.join(_KINDS)}, found {kind!r}")
        self.n_workers = factors.shape[0]
        self.model = _KINDS.index(kind)
        self.location_ns = location_ns
        self.spread = spread
        self._check(factors)
        self.workers = <compute_worker_t *> calloc(max(1, self.n_workers), sizeof(compute_worker_t))
        if not self.workers:
            raise MemoryError()
        for worker in range(self.n_workers):
            self.workers[worker].factor = factors[worker]
            self.workers[worker].key = fps_stream(seed, STREAMS * worker + STREAM_COMPUTE)
            self.workers[worker].burst_key = fps_stream(seed, STREAMS * worker + STREAM_BURSTS)
        if bursts is not None:
            self.burst_every_ns, self.burst_length_ns, self.burst_factor = bursts
            if not (self.burst_every_ns >= 1000 and self.burst_length_ns >= 1 and self.burst_factor > 0):
                raise ValueError(f"expected bursts at least 1 us apart, 1 ns long and of a factor above 0, found {bursts}")
        if (replay is not None) != (self.model == _REPLAY):
            raise ValueError(f"times to replay go with the kind 'replay', found {kind!r}")
        if replay is not None:
            self._set_replay(replay[0], replay[1])
        self.blocked = np.zeros(0, np.int64)
        if blocked is not None:
            self._set_blocked(blocked)

    def _check(self, double[::1] factors):
        cdef int64_t worker
        if self.model != _REPLAY and not 1 <= self.location_ns <= _LONGEST_NS:
            raise ValueError(f"expected a time of 1 to {LONGEST_NS} ns, found {self.location_ns}")
        if not 0 <= self.spread <= _LONGEST_NS or (self.model == _PARETO and self.spread <= 0):
            raise ValueError(f"expected a spread of 0 to {LONGEST_NS}, and a Pareto shape of more than 0, found {self.spread}")
        for worker in range(self.n_workers):
            if not 0 < factors[worker] <= 1e9:
                raise ValueError(f"expected factors of more than 0, to 1e9, found {factors[worker]} for worker {worker}")

    def _set_replay(self, int64_t[::1] times, int64_t[::1] bounds):
        cdef int64_t worker
        if bounds.shape[0] != self.n_workers + 1 or bounds[0] < 0 or bounds[self.n_workers] > times.shape[0]:
            raise ValueError(f"expected {self.n_workers + 1} bounds within {times.shape[0]} times, found {list(bounds)[:8]}")
        if times.shape[0] and (np.min(times) < 0 or np.max(times) > LONGEST_NS):
            raise ValueError(f"expected times of 0 to {LONGEST_NS} ns")
        for worker in range(self.n_workers):
            if bounds[worker + 1] <= bounds[worker]:
                raise ValueError(f"expected at least one time to replay for worker {worker}, found none")
            self.workers[worker].first = self.workers[worker].next = bounds[worker]
            self.workers[worker].last = bounds[worker + 1]
        self.times = times

    def _set_blocked(self, int64_t[::1] blocked):
        if self.model != _REPLAY or blocked.shape[0] != self.times.shape[0]:
            raise ValueError(f"expected a blocked time for each that is replayed, found {blocked.shape[0]}")
        if blocked.shape[0] and (np.min(blocked) < 0 or np.max(blocked) > LONGEST_NS):
            raise ValueError(f"expected blocked times of 0 to {LONGEST_NS} ns")
        self.blocked = blocked

    def __dealloc__(self):
        free(self.workers)

    cdef double _plain_ns(self, compute_worker_t *worker) noexcept nogil:
        """Return the model's time before the worker's factors."""
        cdef double p
        cdef int64_t found
        if self.model == _CONSTANT:
            return self.location_ns
        if self.model == _REPLAY:
            found = self.times[worker.next]
            worker.drawn_at = worker.next
            worker.next = worker.next + 1 if worker.next + 1 < worker.last else worker.first
            return <double> found
        p = fps_uniform(worker.key, worker.drawn)
        worker.drawn += 1
        if self.model == _PARETO:
            return self.location_ns * fps_exp(-fps_log(p) / self.spread)
        if self.model == _LOGNORMAL:
            return self.location_ns * fps_exp(self.spread * fps_normal(p))
        return self.location_ns + self.spread * fps_normal(p)

    cdef double _burst(self, compute_worker_t *worker, int64_t now_ns) noexcept nogil:
        """Return the factor of a step that begins now. Bursts do not depend on what the worker does."""
        cdef double gap_ns, length_ns
        while worker.burst_until_ns <= now_ns:
            gap_ns = -fps_log(fps_uniform(worker.burst_key, worker.bursts_drawn)) * self.burst_every_ns
            length_ns = -fps_log(fps_uniform(worker.burst_key, worker.bursts_drawn + 1)) * self.burst_length_ns
            worker.bursts_drawn += 2
            worker.burst_from_ns = worker.burst_until_ns + <int64_t> gap_ns + 1
            worker.burst_until_ns = worker.burst_from_ns + <int64_t> length_ns + 1
        return self.burst_factor if now_ns >= worker.burst_from_ns else 1.0

    cdef int64_t draw_ns(self, int64_t worker, int64_t now_ns) noexcept nogil:
        cdef compute_worker_t *w = &self.workers[worker]
        cdef double found_ns = self._plain_ns(w) * w.factor
        if self.burst_factor > 0:
            found_ns *= self._burst(w, now_ns)
        return max(<int64_t> 1, <int64_t> (min(found_ns, _LONGEST_NS) + 0.5))

    cdef int64_t blocked_ns(self, int64_t worker) noexcept nogil:
        """Return the ns that the step drawn last waits without a core, in addition to its compute time."""
        if self.blocked.shape[0] == 0:
            return 0
        return <int64_t> (<double> self.blocked[self.workers[worker].drawn_at] * self.workers[worker].factor + 0.5)

    def draw(self, int64_t worker, int64_t now_ns=0):
        """Return the time in ns of the worker's next step, which begins at `now_ns`; 1 to LONGEST_NS."""
        if not 0 <= worker < self.n_workers:
            raise IndexError(f"expected a worker of 0 to {self.n_workers - 1}, found {worker}")
        return self.draw_ns(worker, now_ns)


# -- the random functions, which tests compare with published values --------------------------------

def random_word(uint64_t key, uint64_t counter):
    """Return number `counter` of the SplitMix64 sequence that starts at `key`.

    >>> random_word(1234567, 0)
    6457827717110365317
    """
    return fps_word(key, counter)


def uniform(uint64_t key, uint64_t counter):
    """Return the same number as a double in (0, 1)."""
    return fps_uniform(key, counter)


def logarithm(double x):
    """Return the natural logarithm of a positive, normal number."""
    return fps_log(x)


def exponential(double x):
    """Return e^x for x from -700 to 700."""
    return fps_exp(x)


def normal_quantile(double p):
    """Return the quantile of the standard normal distribution for p in (0, 1).

    >>> normal_quantile(0.5)
    0.0
    """
    return fps_normal(p)
