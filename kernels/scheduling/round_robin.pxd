# Grants in a fixed order with a gap between them, and batches that fit: R2SP.

from libc.stdint cimport int32_t, int64_t

from fastps.kernels.scheduling.state cimport FOLD_IN_ORDER, NEVER_NS, scheduler_t, state_workers, worker_t

cdef void round_robin_measure(scheduler_t *state, int32_t worker, int64_t samples) noexcept nogil
cdef void round_robin_space(scheduler_t *state) noexcept nogil
cdef void round_robin_grant(scheduler_t *state) noexcept nogil
cdef void round_robin_join(scheduler_t *state, int32_t worker, int64_t clock) noexcept nogil

# -- in line, for it is asked before and after every event ------------------------------------------------

cdef inline bint round_robin_is_ready(const scheduler_t *state, int32_t worker) noexcept nogil:
    """It has asked to go on, and where pushes are folded in order, its own is folded."""
    cdef const worker_t *w = &state_workers(state)[worker]
    return w.waiting and (state.policy.fold != FOLD_IN_ORDER or w.kept == 0)


cdef inline int64_t round_robin_next_ns(const scheduler_t *state) noexcept nogil:
    """When the next grant may be given at the earliest: the gap after the last."""
    return state.last_grant_ns + state.gap_ns if state.last_grant_ns != NEVER_NS else state.now_ns


cdef inline int64_t round_robin_due(const scheduler_t *state) noexcept nogil:
    """When the worker whose grant is next may go on, if only the gap keeps it; NEVER_NS otherwise."""
    if state.n_live == 0 or not round_robin_is_ready(state, state.grant_next):
        return NEVER_NS
    return round_robin_next_ns(state)
