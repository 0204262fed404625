"""Grants in a fixed order with a gap between them, and batches that make all as slow as the slowest: R2SP.

Chen, Wang and Li, "Round-Robin Synchronization: Mitigating Communication Bottlenecks in Parameter Servers", sections III to V.
The gap is r T / N after the last grant, with T the slowest worker's mean iteration time. What the paper leaves open is chosen
here: the mean is exponential with weight 1/8 for the newest, and a batch grows to at most 16 times the worker's first. The
slowest is the winner of a tournament, so that no decision reads all workers.
"""

from libc.stdint cimport int32_t, int64_t
from libc.string cimport memcpy

from fastps.kernels.scheduling.batches cimport MOST_GROWTH, NEWEST_WEIGHT, batches_learn, batches_of_time
from fastps.kernels.scheduling.state cimport *
from fastps.kernels.scheduling.tournament cimport tournament_set


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
        batches_learn(w, samples, took_ns)
        _set_equal_time(state, worker)


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

cdef void _set_equal_time(scheduler_t *state, int32_t worker) noexcept nogil:
    """The worker's time for its first batch, which may be the slowest.

    The tournament compares whole numbers: doubles of at least 0 are in the order of their bits.
    """
    cdef const worker_t *w = &state_workers(state)[worker]
    cdef double equal_ns = max(<double> 0, w.line_constant + w.line_slope * <double> w.base_batch)
    cdef int64_t bits
    memcpy(&bits, &equal_ns, sizeof(bits))
    tournament_set(state_equal_times(state), worker, bits)


cdef int64_t _tuned_batch(const scheduler_t *state, int32_t worker) noexcept nogil:
    """The batch with which the worker takes as long as the slowest does with its first batch (section IV)."""
    cdef const worker_t *w = &state_workers(state)[worker]
    cdef double target_ns
    memcpy(&target_ns, &state_equal_times(state).most, sizeof(target_ns))
    return batches_of_time(w, target_ns, w.base_batch, MOST_GROWTH * w.base_batch)
