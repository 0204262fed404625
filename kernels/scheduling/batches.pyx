"""A worker's time as a function of its batch, and batches that equalize the workers' times.

R2SP's coordinator learns them (Chen, Wang and Li, sections IV and V), and so does bsp with batches by speed. The function is
the least-squares line through the worker's iterations, which are forgotten exponentially, or the line through the origin while
their batches are too equal to show its slope.
"""

from libc.stdint cimport int32_t, int64_t

from fastps.kernels.scheduling.state cimport *

cdef enum:
    MOST_EQUAL = 1000    # batches whose mean square is so many times their variance or more show no slope
    MOST_HALVINGS = 100  # more than between two doubles


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


cdef void batches_learn(worker_t *w, int64_t samples, int64_t took_ns) noexcept nogil:
    """One more iteration on the worker's line, of at least one sample."""
    cdef double batch = <double> samples, ns = <double> took_ns
    w.fit_n = _faded(w.fit_n) + 1
    w.fit_batch = _faded(w.fit_batch) + batch
    w.fit_ns = _faded(w.fit_ns) + ns
    w.fit_batch_batch = _faded(w.fit_batch_batch) + batch * batch
    w.fit_batch_ns = _faded(w.fit_batch_ns) + batch * ns
    _fit_line(w)


cdef int64_t batches_of_time(const worker_t *w, double target_ns, int64_t least, int64_t most) noexcept nogil:
    """The largest batch, `least` to `most`, for which the worker takes the target's time; `least` while no time is known."""
    if w.line_slope <= 0:
        return least
    return max(least, <int64_t> min((target_ns - w.line_constant) / w.line_slope, <double> most))


# -- a sum that stays --------------------------------------------------------------------------------

cdef void batches_measure(scheduler_t *state, int32_t worker, int64_t samples) noexcept nogil:
    """Learn from a push's time since its worker's grant, as R2SP does. The first step has no grant to count from."""
    cdef worker_t *w = &state_workers(state)[worker]
    if w.base_batch == NO_BATCH:
        w.base_batch = samples
    if w.history and samples > 0:
        batches_learn(w, samples, state.now_ns - w.granted_ns)


cdef inline double _time_of(const worker_t *w, int64_t batch) noexcept nogil:
    return w.line_constant + w.line_slope * <double> batch


cdef int64_t _within(const worker_t *w, double target_ns) noexcept nogil:
    """The largest batch, from 1 on, that takes no more than this time by the line. A quotient may be wrong by one."""
    cdef int64_t most = MOST_GROWTH * w.base_batch, batch = batches_of_time(w, target_ns, 1, most)
    while batch > 1 and _time_of(w, batch) > target_ns:
        batch -= 1
    while batch < most and _time_of(w, batch + 1) <= target_ns:
        batch += 1
    return batch


cdef int64_t _all_within(const scheduler_t *state, double target_ns) noexcept nogil:
    cdef const worker_t *w = state_workers(state)
    cdef int64_t total = 0
    cdef int32_t worker
    for worker in range(state.n_workers):
        if w[worker].live:
            total += _within(&w[worker], target_ns)
    return total


cdef void batches_level(scheduler_t *state) noexcept nogil:
    """Divide the sum of the live workers' first batches so that all take equally long, for the next version.

    Each sample goes to the worker that is soonest done with one more, the lowest of several. LB-BSP (Chen, Weng, Wang, Li and
    Li, "Semi-Dynamic Load Balancing", 2020) does so with the workers' speeds; here it is with their lines. While one's time is
    not known, each has its first batch.
    """
    cdef worker_t *w = state_workers(state)
    cdef int64_t total = 0, rest, more
    cdef double low = 0, high = 0, middle
    cdef bint is_known = True
    cdef int32_t worker
    for worker in range(state.n_workers):
        if w[worker].live:
            is_known &= w[worker].base_batch != NO_BATCH and w[worker].line_slope > 0
            total += w[worker].base_batch
            high = max(high, 2 * _time_of(&w[worker], w[worker].base_batch))  # by then each can do more than its first batch
    for _ in range(MOST_HALVINGS if is_known else 0):
        middle = low + (high - low) / 2
        if middle == low or middle == high:
            break
        if _all_within(state, middle) <= total:
            low = middle
        else:
            high = middle
    rest = total - _all_within(state, low) if is_known else 0
    for worker in range(state.n_workers):
        if w[worker].live:
            w[worker].batch = w[worker].base_batch
            if is_known:
                w[worker].batch = _within(&w[worker], low)
                more = max(<int64_t> 0, min(rest, _within(&w[worker], high) - w[worker].batch))
                w[worker].batch += more
                rest -= more
            state_mark_dirty(state, worker)
