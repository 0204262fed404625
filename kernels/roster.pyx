"""The roster: who is live, everyone's clock in order, who waits, and what of it changed in this commit.

The state of a scheduler is one block of memory without pointers, so that it can lie in the arena twice and be copied. Workers
of one clock hang in one bucket, in order of arrival; the buckets hang in a list in order of their clocks. A push moves its
worker to the next bucket; the slowest worker is the first of the first bucket (fewest pushes, and of those the one that
arrived there first), and the fastest clock is the last bucket's. So no decision grows with the number of workers.

What it refuses to know: why somebody waits or is granted (scheduler.pyx decides).
"""

from libc.string cimport memcpy, memset

cdef extern from "atomics.h" nogil:
    void FPS_ASSERT(bint condition)


# -- layout: the struct, worker_t[n], bucket_t[n + 1], int32: touched workers[n], touched buckets[n + 1], folds[n] ---

cdef inline int64_t _padded(int64_t size) noexcept nogil:
    return (size + 63) & ~<int64_t>63


cdef int64_t roster_bytes(int64_t n_workers) noexcept nogil:
    return (_padded(sizeof(scheduler_t)) + _padded(n_workers * sizeof(worker_t)) + _padded((n_workers + 1) * sizeof(bucket_t))
            + 2 * _padded(n_workers * sizeof(int32_t)) + _padded((n_workers + 1) * sizeof(int32_t)))


cdef worker_t *roster_workers(const scheduler_t *state) noexcept nogil:
    return <worker_t *> (<char *> state + _padded(sizeof(scheduler_t)))


cdef inline bucket_t *_buckets(const scheduler_t *state) noexcept nogil:
    return <bucket_t *> (<char *> roster_workers(state) + _padded(state.n_workers * sizeof(worker_t)))


cdef int32_t *roster_touched(const scheduler_t *state) noexcept nogil:
    return <int32_t *> (<char *> _buckets(state) + _padded((state.n_workers + 1) * sizeof(bucket_t)))


cdef inline int32_t *_touched_buckets(const scheduler_t *state) noexcept nogil:
    return <int32_t *> (<char *> roster_touched(state) + _padded(state.n_workers * sizeof(int32_t)))


cdef int32_t *roster_folds(const scheduler_t *state) noexcept nogil:
    """The list that goes with ACTION_FOLD_LIST. An answer, not state: it is not copied."""
    return <int32_t *> (<char *> _touched_buckets(state) + _padded((state.n_workers + 1) * sizeof(int32_t)))


# -- copies: what changed is written down, so that the other copy can follow without reading everything

cdef void roster_touch(scheduler_t *state, int32_t worker) noexcept nogil:
    cdef worker_t *w = &roster_workers(state)[worker]
    if w.touched_at != state.sequence:
        w.touched_at = state.sequence
        roster_touched(state)[state.n_touched_workers] = worker
        state.n_touched_workers += 1


cdef inline void _touch_bucket(scheduler_t *state, int32_t bucket) noexcept nogil:
    cdef bucket_t *b = &_buckets(state)[bucket]
    if b.touched_at != state.sequence:
        b.touched_at = state.sequence
        _touched_buckets(state)[state.n_touched_buckets] = bucket
        state.n_touched_buckets += 1


cdef void roster_copy(scheduler_t *target, const scheduler_t *source) noexcept nogil:
    """Everything: after a holder died, or gave up, the inactive copy may hold anything."""
    memcpy(target, source, roster_bytes(source.n_workers))


cdef void roster_catch_up(scheduler_t *target, const scheduler_t *source) noexcept nogil:
    """Bring `target`, which is one commit behind, up to `source`. Idempotent: values are copied, not added."""
    cdef int32_t i, index
    FPS_ASSERT(target.sequence <= source.sequence + 1)  # one more where a holder began and found nothing to do
    memcpy(target, source, sizeof(scheduler_t))
    for i in range(source.n_touched_workers):
        index = roster_touched(source)[i]
        roster_workers(target)[index] = roster_workers(source)[index]
    for i in range(source.n_touched_buckets):
        index = _touched_buckets(source)[i]
        _buckets(target)[index] = _buckets(source)[index]


cdef void roster_begin(scheduler_t *state) noexcept nogil:
    """Begin the changes of a new commit: nothing is touched yet."""
    state.sequence += 1
    state.n_touched_workers = 0
    state.n_touched_buckets = 0


cdef void roster_initialise(scheduler_t *state, int32_t n_workers, const policy_t *policy) noexcept nogil:
    """All workers live, at clock 0, and granted their first step."""
    cdef int32_t i
    cdef worker_t *w
    memset(state, 0, sizeof(scheduler_t))
    state.n_workers = n_workers
    memset(state, 0, roster_bytes(n_workers))
    state.n_workers = n_workers
    state.n_live = n_workers
    state.policy = policy[0]
    state.sequence = 1
    state.first_waiting = state.last_waiting = -1
    state.quorum_due_ns = state.last_grant_ns = NEVER_NS
    for i in range(n_workers + 1):
        _buckets(state)[i].next = i + 1 if i < n_workers else -1
        _buckets(state)[i].first = _buckets(state)[i].last = -1
    state.free_bucket = 1
    state.first_bucket = state.last_bucket = 0
    _buckets(state)[0].next = _buckets(state)[0].previous = -1
    for i in range(n_workers):
        w = &roster_workers(state)[i]
        w.live = 1
        w.granted = 1
        w.base_batch = NO_BATCH
        w.next_waiting = w.previous_waiting = -1
        _append(state, 0, i)


# -- buckets ---------------------------------------------------------------------------------------

cdef void _append(scheduler_t *state, int32_t bucket, int32_t worker) noexcept nogil:
    """Hang the worker behind all others of its clock: order of arrival."""
    cdef bucket_t *b = &_buckets(state)[bucket]
    cdef worker_t *w = &roster_workers(state)[worker]
    w.bucket = bucket
    w.next = -1
    w.previous = b.last
    if b.last >= 0:
        roster_workers(state)[b.last].next = worker
        roster_touch(state, b.last)
    else:
        b.first = worker
    b.last = worker
    roster_touch(state, worker)
    _touch_bucket(state, bucket)


cdef void roster_remove(scheduler_t *state, int32_t worker) noexcept nogil:
    """Take the worker out of its bucket, and the bucket out of the list when nobody is left in it."""
    cdef worker_t *w = &roster_workers(state)[worker]
    cdef int32_t bucket = w.bucket
    cdef bucket_t *b = &_buckets(state)[bucket]
    if w.previous >= 0:
        roster_workers(state)[w.previous].next = w.next
        roster_touch(state, w.previous)
    else:
        b.first = w.next
    if w.next >= 0:
        roster_workers(state)[w.next].previous = w.previous
        roster_touch(state, w.next)
    else:
        b.last = w.previous
    roster_touch(state, worker)
    _touch_bucket(state, bucket)
    if b.first < 0:
        _unlink_bucket(state, bucket)


cdef void _unlink_bucket(scheduler_t *state, int32_t bucket) noexcept nogil:
    cdef bucket_t *b = &_buckets(state)[bucket]
    if b.previous >= 0:
        _buckets(state)[b.previous].next = b.next
        _touch_bucket(state, b.previous)
    else:
        state.first_bucket = b.next
    if b.next >= 0:
        _buckets(state)[b.next].previous = b.previous
        _touch_bucket(state, b.next)
    else:
        state.last_bucket = b.previous
    b.next = state.free_bucket
    state.free_bucket = bucket


cdef int32_t _bucket_after(scheduler_t *state, int32_t bucket, int64_t clock) noexcept nogil:
    """The bucket of `clock`, which is one more than `bucket`'s; made if it is not there."""
    cdef bucket_t *b = &_buckets(state)[bucket]
    cdef bucket_t *made
    cdef int32_t index
    if b.next >= 0 and _buckets(state)[b.next].clock == clock:
        return b.next
    index = state.free_bucket
    FPS_ASSERT(index >= 0)
    made = &_buckets(state)[index]
    state.free_bucket = made.next
    made.clock = clock
    made.first = made.last = -1
    made.next = b.next
    made.previous = bucket
    if b.next >= 0:
        _buckets(state)[b.next].previous = index
        _touch_bucket(state, b.next)
    else:
        state.last_bucket = index
    b.next = index
    _touch_bucket(state, bucket)
    _touch_bucket(state, index)
    return index


cdef void roster_advance(scheduler_t *state, int32_t worker) noexcept nogil:
    """Count one push of the worker: t_p <- t_p + 1 (Algorithm 1, line 1)."""
    cdef worker_t *w = &roster_workers(state)[worker]
    cdef int32_t target = _bucket_after(state, w.bucket, w.clock + 1)
    roster_remove(state, worker)
    w.clock += 1
    _append(state, target, worker)


cdef int64_t roster_slowest_clock(const scheduler_t *state) noexcept nogil:
    """The fewest pushes of any live worker."""
    return _buckets(state)[state.first_bucket].clock


cdef int64_t roster_fastest_clock(const scheduler_t *state) noexcept nogil:
    """The most pushes of any live worker."""
    return _buckets(state)[state.last_bucket].clock


cdef int32_t roster_slowest(const scheduler_t *state) noexcept nogil:
    """Fewest pushes, and of those the one that arrived there first; -1 when nobody is live."""
    return _buckets(state)[state.first_bucket].first if state.first_bucket >= 0 else -1


# -- waiting and grants ----------------------------------------------------------------------------

cdef void roster_wait(scheduler_t *state, int32_t worker) noexcept nogil:
    cdef worker_t *w = &roster_workers(state)[worker]
    if w.waiting:
        return
    w.waiting = 1
    w.next_waiting = -1
    w.previous_waiting = state.last_waiting
    if state.last_waiting >= 0:
        roster_workers(state)[state.last_waiting].next_waiting = worker
        roster_touch(state, state.last_waiting)
    else:
        state.first_waiting = worker
    state.last_waiting = worker
    roster_touch(state, worker)


cdef void roster_stop_waiting(scheduler_t *state, int32_t worker) noexcept nogil:
    cdef worker_t *w = &roster_workers(state)[worker]
    if not w.waiting:
        return
    w.waiting = 0
    if w.previous_waiting >= 0:
        roster_workers(state)[w.previous_waiting].next_waiting = w.next_waiting
        roster_touch(state, w.previous_waiting)
    else:
        state.first_waiting = w.next_waiting
    if w.next_waiting >= 0:
        roster_workers(state)[w.next_waiting].previous_waiting = w.previous_waiting
        roster_touch(state, w.next_waiting)
    else:
        state.last_waiting = w.previous_waiting
    roster_touch(state, worker)


cdef void roster_grant(scheduler_t *state, int32_t worker) noexcept nogil:
    """Send OK: the worker may begin the step after those it has pushed."""
    cdef worker_t *w = &roster_workers(state)[worker]
    roster_stop_waiting(state, worker)
    w.granted = w.clock + 1
    w.granted_at = state.sequence
    w.granted_ns = state.now_ns
    roster_touch(state, worker)
