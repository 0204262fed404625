"""Grants in a fixed order with a gap between them, and batches that equalize the workers' times: R2SP.

Chen, Wang and Li, "Round-Robin Synchronization: Mitigating Communication Bottlenecks in Parameter Servers", sections III to V.
The gap is r T / N after the last grant, with T the slowest worker's mean iteration time. What the paper leaves open is chosen
here: the mean is exponential with weight 1/8 for the newest; a worker's time as a function of its batch is the least-squares
line through all its iterations, or the line through the origin while they say nothing about its slope; a batch grows to at most
16 times the worker's first. The slowest is the winner of a
tournament, so that no decision reads all workers. What it refuses to know: what is folded, and where the time comes from.
"""

from libc.stdint cimport int32_t, int64_t
from libc.string cimport memcpy

from fastps.kernels.roster cimport (
    FOLD_IN_ORDER,
    NEVER_NS,
    NO_BATCH,
    roster_equal_times,
    roster_grant,
    roster_iterations,
    roster_touch,
    roster_workers,
    scheduler_t,
    worker_t,
)
from fastps.kernels.tournament cimport tournament_set

cdef enum:
    NEWEST_WEIGHT = 8   # the newest iteration counts one part in so many
    MOST_GROWTH = 16    # largest tuned batch, as a multiple of the worker's first


cdef void round_robin_measure(scheduler_t *state, int32_t worker, int64_t samples) noexcept nogil:
    """A push has come: learn from the time since its worker's grant. The first step has no grant to count from."""
    cdef worker_t *w = &roster_workers(state)[worker]
    cdef int64_t took_ns = state.now_ns - w.granted_ns
    roster_touch(state, worker)
    if w.clock == 0:
        w.base_batch = samples
        return
    if w.measured:
        w.iteration_ns += (took_ns - w.iteration_ns) // NEWEST_WEIGHT
    else:
        w.measured = 1
        w.iteration_ns = took_ns
    tournament_set(roster_iterations(state), worker, w.iteration_ns)
    round_robin_space(state)
    if state.policy.tune_batches:
        _fit(state, worker, <double> samples, <double> took_ns)


cdef inline bint _is_ready(const scheduler_t *state, int32_t worker) noexcept nogil:
    """It has asked to go on, and where pushes are folded in order, its own is folded."""
    cdef const worker_t *w = &roster_workers(state)[worker]
    return w.waiting and (state.policy.fold != FOLD_IN_ORDER or w.kept == 0)


cdef void round_robin_space(scheduler_t *state) noexcept nogil:
    """The gap r T / N, when T or N may have changed."""
    cdef int64_t slowest_ns = roster_iterations(state).most
    if slowest_ns != state.gap_slowest_ns or state.n_live != state.gap_n_live:
        state.gap_slowest_ns = slowest_ns
        state.gap_n_live = state.n_live
        state.gap_ns = <int64_t> (state.policy.relax * <double> slowest_ns / <double> state.n_live) if state.n_live > 0 else 0


cdef inline int64_t _next_grant_ns(const scheduler_t *state) noexcept nogil:
    """When the next grant may be given at the earliest: the gap after the last."""
    return state.last_grant_ns + state.gap_ns if state.last_grant_ns != NEVER_NS else state.now_ns


cdef int64_t round_robin_due(const scheduler_t *state) noexcept nogil:
    """When the worker whose grant is next may go on, if only the gap keeps it; NEVER_NS otherwise."""
    if state.n_live == 0 or not _is_ready(state, state.grant_next):
        return NEVER_NS
    return _next_grant_ns(state)


cdef void round_robin_grant(scheduler_t *state) noexcept nogil:
    """Grant whoever's grant is next, as long as it is ready and the gap has passed."""
    cdef int32_t worker
    while state.n_live > 0:
        worker = state.grant_next
        if not _is_ready(state, worker) or state.now_ns < _next_grant_ns(state):
            return
        if state.policy.tune_batches:
            roster_workers(state)[worker].batch = _tuned_batch(state, worker)
        roster_grant(state, worker)
        state.last_grant_ns = state.now_ns
        state.grant_next = roster_workers(state)[worker].next_live


# -- batches ---------------------------------------------------------------------------------------

cdef void _line(const worker_t *w, double *constant, double *slope) noexcept nogil:
    """time = constant + slope * batch, by least squares; through the origin where that is not a line upwards."""
    cdef double spread = w.fit_n * w.fit_batch_batch - w.fit_batch * w.fit_batch
    constant[0] = 0
    if w.fit_n >= 2 and spread > 0:
        slope[0] = (w.fit_n * w.fit_batch_ns - w.fit_batch * w.fit_ns) / spread
        constant[0] = (w.fit_ns - slope[0] * w.fit_batch) / w.fit_n
        if slope[0] > 0 and constant[0] >= 0:
            return
    constant[0] = 0
    slope[0] = w.fit_ns / w.fit_batch


cdef void _fit(scheduler_t *state, int32_t worker, double samples, double took_ns) noexcept nogil:
    """One more iteration on the worker's line, and so another time for its first batch.

    The tournament compares whole numbers: doubles of at least 0 are in the order of their bits.
    """
    cdef worker_t *w = &roster_workers(state)[worker]
    cdef double constant = 0, slope = 0, equal_ns
    cdef int64_t bits
    w.fit_n += 1
    w.fit_batch += samples
    w.fit_ns += took_ns
    w.fit_batch_batch += samples * samples
    w.fit_batch_ns += samples * took_ns
    if w.fit_batch > 0:
        _line(w, &constant, &slope)
        equal_ns = max(<double> 0, constant + slope * <double> w.base_batch)
        memcpy(&bits, &equal_ns, sizeof(bits))
        tournament_set(roster_equal_times(state), worker, bits)


cdef int64_t _tuned_batch(const scheduler_t *state, int32_t worker) noexcept nogil:
    """The batch with which the worker takes as long as the slowest does with its first batch (section IV)."""
    cdef const worker_t *w = &roster_workers(state)[worker]
    cdef double constant = 0, slope = 0, target_ns, batch
    memcpy(&target_ns, &roster_equal_times(state).most, sizeof(target_ns))
    if w.base_batch == NO_BATCH or w.fit_batch <= 0:
        return w.base_batch
    _line(w, &constant, &slope)
    if slope <= 0:
        return w.base_batch
    batch = min((target_ns - constant) / slope, <double> (MOST_GROWTH * w.base_batch))
    return max(w.base_batch, <int64_t> batch)
