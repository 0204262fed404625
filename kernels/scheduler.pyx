"""The scheduler: which pushes are folded and who may go on, as a pure function of state and event.

No clock, no input or output, no Python object inside: time comes in as an argument, decisions go out. The live store and the
simulator run this same object code. What it refuses to know: gradients, weights, memory of other processes, and the names of
the disciplines (fastps/policy.py turns a name into the four values).

A decision does not grow with the number of workers. Workers of one clock hang in one bucket, in order of arrival; the buckets
hang in a list in order of their clocks. A push moves its worker to the next bucket; the slowest worker is the first of the
first bucket (fewest pushes, and of those the one that arrived there first), and the fastest clock is the last bucket's.

State is kept twice in the arena, one copy for each commit record. A holder brings the inactive copy up to date from the list
of what the last commit touched (`scheduler_catch_up`), then changes it in place; the flip makes it true.
"""

from libc.string cimport memcpy, memset

cdef extern from "atomics.h" nogil:
    void FPS_ASSERT(bint condition)


# -- layout: the struct, worker_t[n], bucket_t[n + 1], int32 touched workers[n], int32 touched buckets[n + 1] ---

cdef inline int64_t _padded(int64_t size) noexcept nogil:
    return (size + 63) & ~<int64_t>63


cdef int64_t scheduler_bytes(int64_t n_workers) noexcept nogil:
    return (_padded(sizeof(scheduler_t)) + _padded(n_workers * sizeof(worker_t)) + _padded((n_workers + 1) * sizeof(bucket_t))
            + _padded(n_workers * sizeof(int32_t)) + _padded((n_workers + 1) * sizeof(int32_t)))


cdef worker_t *scheduler_workers(const scheduler_t *state) noexcept nogil:
    return <worker_t *> (<char *> state + _padded(sizeof(scheduler_t)))


cdef inline bucket_t *_buckets(const scheduler_t *state) noexcept nogil:
    return <bucket_t *> (<char *> scheduler_workers(state) + _padded(state.n_workers * sizeof(worker_t)))


cdef int32_t *scheduler_touched_workers(const scheduler_t *state) noexcept nogil:
    return <int32_t *> (<char *> _buckets(state) + _padded((state.n_workers + 1) * sizeof(bucket_t)))


cdef inline int32_t *_touched_buckets(const scheduler_t *state) noexcept nogil:
    return <int32_t *> (<char *> scheduler_touched_workers(state) + _padded(state.n_workers * sizeof(int32_t)))


# -- copies: what changed is written down, so that the other copy can follow without reading everything

cdef void scheduler_touch(scheduler_t *state, int32_t worker) noexcept nogil:
    cdef worker_t *w = &scheduler_workers(state)[worker]
    if w.touched_at != state.sequence:
        w.touched_at = state.sequence
        scheduler_touched_workers(state)[state.n_touched_workers] = worker
        state.n_touched_workers += 1


cdef inline void _touch_bucket(scheduler_t *state, int32_t bucket) noexcept nogil:
    cdef bucket_t *b = &_buckets(state)[bucket]
    if b.touched_at != state.sequence:
        b.touched_at = state.sequence
        _touched_buckets(state)[state.n_touched_buckets] = bucket
        state.n_touched_buckets += 1


cdef void scheduler_copy(scheduler_t *target, const scheduler_t *source) noexcept nogil:
    """Everything: after a holder died, or gave up, the inactive copy may hold anything."""
    memcpy(target, source, scheduler_bytes(source.n_workers))


cdef void scheduler_catch_up(scheduler_t *target, const scheduler_t *source) noexcept nogil:
    """Bring `target`, which is one commit behind, up to `source`. Idempotent: values are copied, not added."""
    cdef int32_t i, index
    FPS_ASSERT(target.sequence <= source.sequence)
    memcpy(target, source, sizeof(scheduler_t))
    for i in range(source.n_touched_workers):
        index = scheduler_touched_workers(source)[i]
        scheduler_workers(target)[index] = scheduler_workers(source)[index]
    for i in range(source.n_touched_buckets):
        index = _touched_buckets(source)[i]
        _buckets(target)[index] = _buckets(source)[index]


cdef void scheduler_begin(scheduler_t *state) noexcept nogil:
    """Begin the changes of a new commit: nothing is touched yet."""
    state.sequence += 1
    state.n_touched_workers = 0
    state.n_touched_buckets = 0


cdef void scheduler_initialise(scheduler_t *state, int32_t n_workers, const policy_t *policy) noexcept nogil:
    """All workers live, at clock 0, and granted their first step."""
    cdef int32_t i
    cdef worker_t *w
    memset(state, 0, sizeof(scheduler_t))
    state.n_workers = n_workers
    memset(state, 0, scheduler_bytes(n_workers))
    state.n_workers = n_workers
    state.n_live = n_workers
    state.policy = policy[0]
    state.sequence = 1
    state.first_waiting = state.last_waiting = -1
    for i in range(n_workers + 1):
        _buckets(state)[i].next = i + 1 if i < n_workers else -1
        _buckets(state)[i].first = _buckets(state)[i].last = -1
    state.free_bucket = 1
    state.first_bucket = state.last_bucket = 0
    _buckets(state)[0].next = _buckets(state)[0].previous = -1
    for i in range(n_workers):
        w = &scheduler_workers(state)[i]
        w.live = 1
        w.granted = 1
        w.next_waiting = w.previous_waiting = -1
        _append(state, 0, i)


# -- buckets ---------------------------------------------------------------------------------------

cdef void _append(scheduler_t *state, int32_t bucket, int32_t worker) noexcept nogil:
    """Hang the worker behind all others of its clock: order of arrival."""
    cdef bucket_t *b = &_buckets(state)[bucket]
    cdef worker_t *w = &scheduler_workers(state)[worker]
    w.bucket = bucket
    w.next = -1
    w.previous = b.last
    if b.last >= 0:
        scheduler_workers(state)[b.last].next = worker
        scheduler_touch(state, b.last)
    else:
        b.first = worker
    b.last = worker
    scheduler_touch(state, worker)
    _touch_bucket(state, bucket)


cdef void _remove(scheduler_t *state, int32_t worker) noexcept nogil:
    """Take the worker out of its bucket, and the bucket out of the list when nobody is left in it."""
    cdef worker_t *w = &scheduler_workers(state)[worker]
    cdef int32_t bucket = w.bucket
    cdef bucket_t *b = &_buckets(state)[bucket]
    if w.previous >= 0:
        scheduler_workers(state)[w.previous].next = w.next
        scheduler_touch(state, w.previous)
    else:
        b.first = w.next
    if w.next >= 0:
        scheduler_workers(state)[w.next].previous = w.previous
        scheduler_touch(state, w.next)
    else:
        b.last = w.previous
    scheduler_touch(state, worker)
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


cdef void _advance(scheduler_t *state, int32_t worker) noexcept nogil:
    """Count one push of the worker: t_p <- t_p + 1 (Algorithm 1, line 1)."""
    cdef worker_t *w = &scheduler_workers(state)[worker]
    cdef int32_t target = _bucket_after(state, w.bucket, w.clock + 1)
    _remove(state, worker)
    w.clock += 1
    _append(state, target, worker)


cdef inline int64_t _slowest_clock(const scheduler_t *state) noexcept nogil:
    return _buckets(state)[state.first_bucket].clock


cdef int32_t scheduler_slowest(const scheduler_t *state) noexcept nogil:
    """Fewest pushes, and of those the one that arrived there first; -1 when nobody is live."""
    return _buckets(state)[state.first_bucket].first if state.first_bucket >= 0 else -1


# -- waiting and grants ----------------------------------------------------------------------------

cdef void _wait(scheduler_t *state, int32_t worker) noexcept nogil:
    cdef worker_t *w = &scheduler_workers(state)[worker]
    FPS_ASSERT(not w.waiting)
    w.waiting = 1
    w.next_waiting = -1
    w.previous_waiting = state.last_waiting
    if state.last_waiting >= 0:
        scheduler_workers(state)[state.last_waiting].next_waiting = worker
        scheduler_touch(state, state.last_waiting)
    else:
        state.first_waiting = worker
    state.last_waiting = worker
    scheduler_touch(state, worker)


cdef void _stop_waiting(scheduler_t *state, int32_t worker) noexcept nogil:
    cdef worker_t *w = &scheduler_workers(state)[worker]
    if not w.waiting:
        return
    w.waiting = 0
    if w.previous_waiting >= 0:
        scheduler_workers(state)[w.previous_waiting].next_waiting = w.next_waiting
        scheduler_touch(state, w.previous_waiting)
    else:
        state.first_waiting = w.next_waiting
    if w.next_waiting >= 0:
        scheduler_workers(state)[w.next_waiting].previous_waiting = w.previous_waiting
        scheduler_touch(state, w.next_waiting)
    else:
        state.last_waiting = w.previous_waiting
    scheduler_touch(state, worker)


cdef void _grant(scheduler_t *state, int32_t worker) noexcept nogil:
    """Send OK: the worker may begin the step after those it has pushed."""
    cdef worker_t *w = &scheduler_workers(state)[worker]
    _stop_waiting(state, worker)
    w.granted = w.clock + 1
    w.granted_at = state.sequence
    scheduler_touch(state, worker)


# -- DSSP ------------------------------------------------------------------------------------------

cdef int64_t _controller(const scheduler_t *state, int32_t worker) noexcept nogil:
    """DSSP, Algorithm 2: how many extra steps lead to the shortest wait for the slowest worker.

    Line 8 asks for the pair (k, r) that minimizes |Sim_slowest[k] - Sim_p[r]|; for each r only the two k beside the crossing
    can be it, so r_max + 1 divisions do instead of (r_max + 1)^2 comparisons. Ties: the smallest r.
    """
    cdef worker_t *p = &scheduler_workers(state)[worker]
    cdef worker_t *slowest = &scheduler_workers(state)[scheduler_slowest(state)]
    cdef int64_t reach = state.policy.high - state.policy.low  # r_max
    cdef int64_t r, k, target, distance, interval_p, interval_slowest
    cdef int64_t best = -1, best_distance = 0
    if p.history < 2 or slowest.history < 2:
        return 0
    interval_p = p.push_ns[0] - p.push_ns[1]
    interval_slowest = slowest.push_ns[0] - slowest.push_ns[1]
    for r in range(reach + 1):
        # The distance to Sim_slowest[0] + k * interval_slowest, for the best k of 0 .. r_max.
        target = p.push_ns[0] + r * interval_p - (slowest.push_ns[0] + interval_slowest)
        k = 0
        if interval_slowest > 0 and target > 0:
            k = min(reach, target // interval_slowest)
        distance = _absolute(target - k * interval_slowest)
        if k < reach:
            distance = min(distance, _absolute(target - (k + 1) * interval_slowest))
        if best < 0 or distance < best_distance:
            best = r
            best_distance = distance
    return best


cdef inline int64_t _absolute(int64_t value) noexcept nogil:
    return -value if value < 0 else value


cdef void _decide_bounded(scheduler_t *state, int32_t worker) noexcept nogil:
    """DSSP, Algorithm 1, lines 3 to 16. With low == high the controller has no room, and this is SSP.

    As printed, line 14 sends OK without taking from the credit that line 12 gave, so r* = 3 lets the worker begin four steps.
    """
    cdef const policy_t *policy = &state.policy
    cdef worker_t *p = &scheduler_workers(state)[worker]
    cdef int64_t gap = p.clock - _slowest_clock(state)
    cdef bint within = not policy.hard_bound or gap <= policy.high
    if p.credit > 0:
        if within:
            p.credit -= 1
            _grant(state, worker)
        else:
            _wait(state, worker)
        return
    if gap <= policy.low:
        _grant(state, worker)
        return
    if policy.high > policy.low and p.clock == _buckets(state)[state.last_bucket].clock:
        p.credit = _controller(state, worker)
        if policy.hard_bound:
            p.credit = min(p.credit, max(<int64_t> 0, policy.high - gap))
        if p.credit > 0:
            _grant(state, worker)
            return
    _wait(state, worker)


cdef void _release_waiting(scheduler_t *state, int32_t pusher, bint slowest_moved) noexcept nogil:
    """DSSP, Algorithm 1, line 17, in the policy's reading of it."""
    cdef const policy_t *policy = &state.policy
    cdef int64_t slowest_clock = _slowest_clock(state)
    cdef int32_t worker = state.first_waiting, following
    cdef int64_t gap
    cdef bint by_push
    while worker >= 0:
        following = scheduler_workers(state)[worker].next_waiting
        gap = scheduler_workers(state)[worker].clock - slowest_clock
        by_push = policy.release == RELEASE_NEXT_PUSH and slowest_moved and worker != pusher
        if gap <= policy.low or (by_push and (not policy.hard_bound or gap <= policy.high)):
            _grant(state, worker)
        worker = following


# -- events ----------------------------------------------------------------------------------------

cdef int _fold_all(scheduler_t *state) noexcept nogil:
    """The version is complete: one fold of all that was kept, and everyone who waits goes on."""
    state.version += 1
    state.n_arrived = 0
    state.n_kept = 0
    while state.first_waiting >= 0:
        _grant(state, state.first_waiting)
    return ACTION_FOLD_ALL


cdef int scheduler_push(scheduler_t *state, int32_t worker, int64_t now_ns) noexcept nogil:
    """A push request of `worker` arrives. Returns what to fold; grants are written into the workers."""
    cdef worker_t *w = &scheduler_workers(state)[worker]
    cdef bint was_slowest = scheduler_slowest(state) == worker
    FPS_ASSERT(w.live)
    state.now_ns = max(state.now_ns, now_ns)
    w.push_ns[1] = w.push_ns[0]
    w.push_ns[0] = state.now_ns
    w.history = min(2, w.history + 1)
    _advance(state, worker)
    if state.policy.fold == FOLD_ALL:
        state.n_arrived += 1
        state.n_kept += 1
        _wait(state, worker)
        return _fold_all(state) if state.n_arrived == state.n_live else ACTION_KEEP
    state.version += 1
    if state.policy.grant == GRANT_BOUNDED:
        _decide_bounded(state, worker)
        if was_slowest:
            _release_waiting(state, worker, True)
    else:
        _grant(state, worker)
    return ACTION_FOLD


cdef int scheduler_leave(scheduler_t *state, int32_t worker, int64_t now_ns) noexcept nogil:
    """`worker` leaves in good order: it is counted no more, and whoever waited only for it goes on."""
    cdef worker_t *w = &scheduler_workers(state)[worker]
    cdef bint was_slowest = scheduler_slowest(state) == worker
    cdef bint was_waiting = w.waiting
    if not w.live:
        return ACTION_NONE
    state.now_ns = max(state.now_ns, now_ns)
    _stop_waiting(state, worker)
    _remove(state, worker)
    w.live = 0
    w.credit = 0
    state.n_live -= 1
    if state.policy.fold == FOLD_ALL:
        state.n_arrived -= was_waiting
        # A push that was kept counts although its worker has left: when the last leaves, nothing stays behind unfolded.
        if state.n_arrived == state.n_live and state.n_kept > 0:
            return _fold_all(state)
        return ACTION_NONE
    if state.policy.grant == GRANT_BOUNDED and state.n_live > 0:
        _release_waiting(state, -1, was_slowest)
    return ACTION_NONE


# -- the same functions for Python: tests, and whoever wants to look -------------------------------

_FOLDS = {"each": FOLD_EACH, "all": FOLD_ALL}
_GRANTS = {"at-once": GRANT_AT_ONCE, "next-version": GRANT_NEXT_VERSION, "bounded": GRANT_BOUNDED}
_RELEASES = {"printed": RELEASE_PRINTED, "next-push": RELEASE_NEXT_PUSH}


cdef int _value_of(dict names, str what, str name) except -1:
    if name not in names:
        raise ValueError(f"expected {what} to be one of {', '.join(names)}, found {name!r}")
    return names[name]


cdef int policy_from_values(policy_t *policy, str fold, str grant, int64_t low, int64_t high, str release,
                            bint hard_bound) except -1:
    """Check and write the policy's values."""
    policy.fold = _value_of(_FOLDS, "fold", fold)
    policy.grant = _value_of(_GRANTS, "grant", grant)
    policy.release = _value_of(_RELEASES, "release", release)
    policy.hard_bound = hard_bound
    if low < 0 or high < low:
        raise ValueError(f"expected bounds 0 <= low <= high, found low={low}, high={high}")
    if (policy.fold == FOLD_ALL) != (policy.grant == GRANT_NEXT_VERSION):
        raise ValueError(f"fold {fold!r} cannot go with grant {grant!r}: a worker that waits for the next version needs a fold "
                         "of all, and a fold of all needs workers that wait for it")
    policy.low = low
    policy.high = high
    return 0


cdef class Scheduler:
    """The scheduler with a memory of its own, one commit an event.

    >>> ssp = Scheduler(2, fold="each", grant="bounded", low=1, high=1, release="printed")
    >>> ssp.push(0, 10)  # worker 0 is one ahead: within the bound
    ([0], [0])
    >>> ssp.push(0, 20)  # two ahead: it waits
    ([0], [])
    >>> ssp.push(1, 30)  # the slowest moved
    ([1], [0, 1])
    """

    cdef scheduler_t *state
    cdef bytearray memory

    def __cinit__(self, int workers, *, str fold, str grant, int64_t low=0, int64_t high=0, str release="next-push",
                  bint hard_bound=False):
        cdef policy_t policy
        if workers < 1:
            raise ValueError(f"expected at least 1 worker, found {workers}")
        policy_from_values(&policy, fold, grant, low, high, release, hard_bound)
        self.memory = bytearray(scheduler_bytes(workers))
        self.state = <scheduler_t *> <char *> self.memory
        scheduler_initialise(self.state, workers, &policy)

    cdef worker_t *_worker(self, int worker) except NULL:
        if not 0 <= worker < self.state.n_workers:
            raise IndexError(f"expected a worker of 0 to {self.state.n_workers - 1}, found {worker}")
        return &scheduler_workers(self.state)[worker]

    cdef tuple _outcome(self, int action, int worker):
        cdef int32_t i, index
        cdef worker_t *w
        folded = []
        granted = []
        for i in range(self.state.n_touched_workers):
            index = scheduler_touched_workers(self.state)[i]
            if scheduler_workers(self.state)[index].granted_at == self.state.sequence:
                granted.append(index)
        if action == ACTION_FOLD:
            folded.append(worker)
            self._worker(worker).cursor = self._worker(worker).consumed
        elif action == ACTION_FOLD_ALL:
            for index in range(self.state.n_workers):
                w = &scheduler_workers(self.state)[index]
                folded.extend([index] * (w.consumed - w.cursor))
                w.cursor = w.consumed
        return folded, sorted(granted)

    def push(self, int worker, int64_t now_ns):
        """Receive a push of `worker` at `now_ns`; returns (workers whose pushes fold now, workers granted)."""
        cdef worker_t *w = self._worker(worker)
        if not w.live or w.waiting:
            raise ValueError(f"worker {worker} may not push: it {'waits' if w.live else 'has left'}")
        scheduler_begin(self.state)
        w.consumed += 1
        return self._outcome(scheduler_push(self.state, worker, now_ns), worker)

    def leave(self, int worker, int64_t now_ns):
        """`worker` leaves in good order; returns the same as push."""
        self._worker(worker)
        scheduler_begin(self.state)
        return self._outcome(scheduler_leave(self.state, worker, now_ns), worker)

    def clock(self, int worker):
        """Pushes received from `worker`."""
        return self._worker(worker).clock

    def granted(self, int worker):
        """Steps that `worker` may have begun."""
        return self._worker(worker).granted

    def waiting(self, int worker):
        """Whether `worker` waits for a grant."""
        return bool(self._worker(worker).waiting)

    def credit(self, int worker):
        """Extra steps that DSSP's controller still allows `worker`."""
        return self._worker(worker).credit

    def slowest(self):
        """The slowest live worker, or -1."""
        return scheduler_slowest(self.state)

    @property
    def version(self):
        """Updates so far."""
        return self.state.version
