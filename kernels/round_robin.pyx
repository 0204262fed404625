"""Grants in a fixed order with a gap between them, and batches that equalize the workers' times: R2SP.

Chen, Wang and Li, "Round-Robin Synchronization: Mitigating Communication Bottlenecks in Parameter Servers", sections III to V.
The gap is r T / N after the last grant, with T the slowest worker's mean iteration time. What the paper leaves open is chosen
here: the mean is exponential with weight 1/8 for the newest; a worker's time as a function of its batch is the least-squares
line through all its iterations, or the line through the origin while they say nothing about its slope; a batch grows to at most
16 times the worker's first. What it refuses to know: what is folded, and where the time comes from.
"""

from libc.stdint cimport int32_t, int64_t

from fastps.kernels.roster cimport (
    FOLD_IN_ORDER,
    NEVER_NS,
    NO_BATCH,
    roster_grant,
    roster_touch,
    roster_workers,
    scheduler_t,
    worker_t,
)

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
    if w.fit_n == 0:
        w.iteration_ns = took_ns
    else:
        w.iteration_ns += (took_ns - w.iteration_ns) // NEWEST_WEIGHT
    w.fit_n += 1
    w.fit_batch += <double> samples
    w.fit_ns += <double> took_ns
    w.fit_batch_batch += <double> samples * <double> samples
    w.fit_batch_ns += <double> samples * <double> took_ns


cdef int32_t round_robin_after(const scheduler_t *state, int32_t worker) noexcept nogil:
    """The first live worker from `worker` on, round and round; `worker` itself when nobody is live."""
    cdef int32_t _tried
    for _tried in range(state.n_workers):
        if roster_workers(state)[worker].live:
            return worker
        worker = worker + 1 if worker + 1 < state.n_workers else 0
    return worker


cdef bint _is_ready(const scheduler_t *state, int32_t worker) noexcept nogil:
    """It has asked to go on, and where pushes are folded in order, its own is folded."""
    cdef const worker_t *w = &roster_workers(state)[worker]
    return w.live and w.waiting and (state.policy.fold != FOLD_IN_ORDER or w.kept == 0)


cdef int64_t _next_grant_ns(const scheduler_t *state) noexcept nogil:
    """When the next grant may be given at the earliest: r T / N after the last."""
    cdef int64_t slowest_ns = 0
    cdef int32_t i
    if state.last_grant_ns == NEVER_NS:
        return state.now_ns
    for i in range(state.n_workers):
        if roster_workers(state)[i].live:
            slowest_ns = max(slowest_ns, roster_workers(state)[i].iteration_ns)
    return state.last_grant_ns + <int64_t> (state.policy.relax * <double> slowest_ns / <double> state.n_live)


cdef int64_t round_robin_due(const scheduler_t *state) noexcept nogil:
    """When the worker whose grant is next may go on, if only the gap keeps it; NEVER_NS otherwise."""
    if state.n_live == 0 or not _is_ready(state, round_robin_after(state, state.grant_next)):
        return NEVER_NS
    return _next_grant_ns(state)


cdef void round_robin_grant(scheduler_t *state) noexcept nogil:
    """Grant whoever's grant is next, as long as it is ready and the gap has passed."""
    cdef int32_t worker
    while state.n_live > 0:
        worker = round_robin_after(state, state.grant_next)
        state.grant_next = worker
        if not _is_ready(state, worker) or state.now_ns < _next_grant_ns(state):
            return
        if state.policy.tune_batches:
            roster_workers(state)[worker].batch = _tuned_batch(state, worker)
        roster_grant(state, worker)
        state.last_grant_ns = state.now_ns
        state.grant_next = worker + 1 if worker + 1 < state.n_workers else 0


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


cdef int64_t _tuned_batch(const scheduler_t *state, int32_t worker) noexcept nogil:
    """The batch with which the worker takes as long as the slowest does with its first batch (section IV)."""
    cdef const worker_t *w = &roster_workers(state)[worker]
    cdef const worker_t *other
    cdef double constant = 0, slope = 0, target_ns = 0, batch
    cdef int32_t i
    for i in range(state.n_workers):
        other = &roster_workers(state)[i]
        if other.live and other.fit_batch > 0:
            _line(other, &constant, &slope)
            target_ns = max(target_ns, constant + slope * <double> other.base_batch)
    if w.base_batch == NO_BATCH or w.fit_batch <= 0:
        return w.base_batch
    _line(w, &constant, &slope)
    if slope <= 0:
        return w.base_batch
    batch = min((target_ns - constant) / slope, <double> (MOST_GROWTH * w.base_batch))
    return max(w.base_batch, <int64_t> batch)
