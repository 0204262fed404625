"""Grants in a fixed order with a gap between them, and batches that equalize the workers' times: R2SP.

Chen, Wang and Li, "Round-Robin Synchronization: Mitigating Communication Bottlenecks in Parameter Servers", sections III to V.
The gap is r T / N after the last grant, with T the slowest worker's mean iteration time. What the paper leaves open is chosen
here: the mean is exponential with weight 1/8 for the newest; a worker's time as a function of its batch is the least-squares
line through its iterations, which are forgotten as in the mean, or the line through the origin while their batches are too
equal to show its slope; a batch grows to at most 16 times the worker's first. The slowest is the winner of a tournament, so
that no decision reads all workers.
"""

from libc.stdint cimport int32_t, int64_t
from libc.string cimport memcpy

from fastps.kernels.scheduling.state cimport *
from fastps.kernels.scheduling.tournament cimport tournament_set

cdef enum:
    NEWEST_WEIGHT = 8   # the newest iteration counts one part in so many
    MOST_GROWTH = 16    # largest tuned batch, as a multiple of the worker's first
    MOST_EQUAL = 1000   # batches whose mean square is so many times their variance or more show no slope


cdef void round_robin_measure(scheduler_t *state, int32_t worker, int64_t samples) noexcept nogil:
    """Learn from a push's time since its worker's grant. The first step has no grant to count from.

    `samples`: its batch, from which nothing is learned if it is 0: the push has no gradient.
    """
    cdef worker_t *w = &state_workers(state)[worker]
    cdef int64_t took_ns = state.now_ns - w.granted_ns
    state_mark_dirty(state, worker)
    if w.base_batch == NO_BATCH:
        w.base_batch = samples
    if w.history == 0:
        return
    if w.measured:
        w.iteration_ns += (took_ns - w.iteration_ns) // NEWEST_WEIGHT
    else:
        w.measured = 1
        w.iteration_ns = took_ns
    tournament_set(state_iterations(state), worker, w.iteration_ns)
    round_robin_space(state)
    if state.policy.tune_batches and samples > 0:
        _learn(state, worker, <double> samples, <double> took_ns)


cdef void round_robin_space(scheduler_t *state) noexcept nogil:
    """The gap r T / N, when T or N may have changed."""
    cdef int64_t slowest_ns = state_iterations(state).most
    if slowest_ns != state.gap_slowest_ns or state.n_live != state.gap_n_live:
        state.gap_slowest_ns = slowest_ns
        state.gap_n_live = state.n_live
        state.gap_ns = <int64_t> (state.policy.relax * <double> slowest_ns / <double> state.n_live) if state.n_live > 0 else 0


cdef void round_robin_grant(scheduler_t *state) noexcept nogil:
    """Grant the worker that is next in the order, as long as it is ready and the gap has passed."""
    cdef int32_t worker
    while state.n_live > 0:
        worker = state.grant_next
        if not round_robin_is_ready(state, worker) or state.now_ns < round_robin_next_ns(state):
            return
        if state.policy.tune_batches:
            state_workers(state)[worker].batch = _tuned_batch(state, worker)
        state_grant(state, worker)
        state.last_grant_ns = state.now_ns
        state.grant_next = state_workers(state)[worker].next_live


cdef void round_robin_join(scheduler_t *state, int32_t worker, int64_t clock) noexcept nogil:
    """Place a joiner in the order as the next to be granted, behind the workers that are granted and not folded.

    Anywhere else the order of folds would wait for a worker whose grant waits for the joiner's fold. Where no worker is granted
    now, the joiner's push is the next to be folded. Its first step keeps the gap, as any other does.
    """
    cdef bint is_only = state.n_live == 0 or round_robin_is_ready(state, state.fold_next)
    state_add(state, worker, clock, state_workers(state)[state.grant_next].previous_live if state.n_live > 0 else -1)
    state.grant_next = worker
    if is_only:
        state.fold_next = worker


# -- batches ---------------------------------------------------------------------------------------

cdef inline void _fit_line(worker_t *w) noexcept nogil:
    """time = constant + slope * batch, by weighted least squares; through the origin where that is not a line upwards."""
    cdef double spread = w.fit_n * w.fit_batch_batch - w.fit_batch * w.fit_batch
    if MOST_EQUAL * spread > w.fit_n * w.fit_batch_batch:
        w.line_slope = (w.fit_n * w.fit_batch_ns - w.fit_batch * w.fit_ns) / spread
        w.line_constant = (w.fit_ns - w.line_slope * w.fit_batch) / w.fit_n
        if w.line_slope > 0 and w.line_constant >= 0:
            return
    w.line_constant = 0
    w.line_slope = w.fit_ns / w.fit_batch


cdef inline double _faded(double total) noexcept nogil:
    """What is left of a sum of earlier iterations when another comes."""
    return (<double> (NEWEST_WEIGHT - 1) / NEWEST_WEIGHT) * total


cdef void _learn(scheduler_t *state, int32_t worker, double samples, double took_ns) noexcept nogil:
    """One more iteration on the worker's line, and so another time for its first batch.

    The tournament compares whole numbers: doubles of at least 0 are in the order of their bits.
    """
    cdef worker_t *w = &state_workers(state)[worker]
    cdef double equal_ns
    cdef int64_t bits
    w.fit_n = _faded(w.fit_n) + 1
    w.fit_batch = _faded(w.fit_batch) + samples
    w.fit_ns = _faded(w.fit_ns) + took_ns
    w.fit_batch_batch = _faded(w.fit_batch_batch) + samples * samples
    w.fit_batch_ns = _faded(w.fit_batch_ns) + samples * took_ns
    if w.fit_batch > 0:
        _fit_line(w)
        equal_ns = max(<double> 0, w.line_constant + w.line_slope * <double> w.base_batch)
        memcpy(&bits, &equal_ns, sizeof(bits))
        tournament_set(state_equal_times(state), worker, bits)


cdef int64_t _tuned_batch(const scheduler_t *state, int32_t worker) noexcept nogil:
    """The batch with which the worker takes as long as the slowest does with its first batch (section IV)."""
    cdef const worker_t *w = &state_workers(state)[worker]
    cdef double target_ns, batch
    if w.base_batch == NO_BATCH or w.fit_batch <= 0 or w.line_slope <= 0:
        return w.base_batch
    memcpy(&target_ns, &state_equal_times(state).most, sizeof(target_ns))
    batch = min((target_ns - w.line_constant) / w.line_slope, <double> (MOST_GROWTH * w.base_batch))
    return max(w.base_batch, <int64_t> batch)
