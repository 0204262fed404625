"""A worker's time as a function of its batch, and batches that equalize the workers' times.

R2SP's coordinator learns them (Chen, Wang and Li, sections IV and V), and so does bsp with batches by speed. The function is the
least-squares line through the worker's iterations, which are forgotten exponentially, or the line through the origin while
their batches are too equal to show its slope.
"""

from libc.stdint cimport int32_t, int64_t

from fastps.kernels.scheduling.state cimport *

cdef enum:
    MOST_EQUAL = 1000   # batches whose mean square is so many times their variance or more show no slope


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
