"""The scheduler state: which workers are live, their clocks in order, which of them wait, and what changed in this commit.

The state is one block of memory without pointers, so that it can lie in the arena twice and be copied. Workers of one clock
hang in one bucket, in order of arrival; the buckets hang in a list in order of their clocks. A push moves its worker to the
next bucket. The slowest worker is the first of the first bucket (the fewest pushes, and of those the one that arrived there
first); the fastest clock is the last bucket's. A worker that waits until the slowest has come nearer waits in the bucket of its
clock. When the slowest clock rises, the frontier moves over the buckets that it reaches and releases their workers. The
frontier passes no bucket twice, and a push makes at most one. So no decision grows with the number of workers.
"""

from libc.stdint cimport int8_t, int32_t, int64_t
from libc.string cimport memcpy, memset

from fastps.kernels.base.atomics cimport FPS_ASSERT
from fastps.kernels.scheduling.tournament cimport tournament_bytes, tournament_catch_up, tournament_initialise, tournament_set


# -- layout: the struct, worker_t[n], link_t[n], bucket_t[n + 1], two tournaments, and lists of int32:
# -- touched workers[n], folds[n], touched links[n], touched buckets[n + 1]

cdef inline int64_t _padded(int64_t size) noexcept nogil:
    return (size + 63) & ~<int64_t>63


cdef int64_t state_lay_out(scheduler_t *state, int64_t n_workers) noexcept nogil:
    """Write the offsets of all parts, and return the size of the state."""
    state.links_offset = _padded(sizeof(scheduler_t)) + n_workers * <int64_t> sizeof(worker_t)
    state.buckets_offset = state.links_offset + _padded(n_workers * sizeof(link_t))
    state.iterations_offset = state.buckets_offset + _padded((n_workers + 1) * sizeof(bucket_t))
    state.equal_times_offset = state.iterations_offset + tournament_bytes(n_workers)
    state.lists_offset = state.equal_times_offset + tournament_bytes(n_workers)
    return state.lists_offset + _padded((4 * n_workers + 1) * sizeof(int32_t))


cdef int64_t state_size(int64_t n_workers) noexcept nogil:
    cdef scheduler_t state
    return state_lay_out(&state, n_workers)


cdef inline int32_t *_dirty_links(const scheduler_t *state) noexcept nogil:
    return state_dirty(state) + 2 * state.n_workers


cdef inline int32_t *_dirty_buckets(const scheduler_t *state) noexcept nogil:
    return state_dirty(state) + 3 * state.n_workers


# -- copies: what changed is written down, so that the other copy can follow without reading everything

cdef inline void _mark_link_dirty(scheduler_t *state, int32_t worker) noexcept nogil:
    state_mark(state, &state_links(state)[worker].dirty_at, _dirty_links(state), &state.n_dirty_links, worker)


cdef inline void _mark_bucket_dirty(scheduler_t *state, int32_t bucket) noexcept nogil:
    state_mark(state, &state_buckets(state)[bucket].dirty_at, _dirty_buckets(state), &state.n_dirty_buckets, bucket)


cdef void state_copy(scheduler_t *target, const scheduler_t *source) noexcept nogil:
    """Copy everything: after a combiner died or gave up, the inactive copy may hold anything."""
    FPS_FAILPOINT()
    memcpy(target, source, state_size(source.n_workers))


cdef void state_catch_up(scheduler_t *target, const scheduler_t *source) noexcept nogil:
    """Bring `target`, which is one commit behind, up to `source`. Idempotent: values are copied, not added."""
    cdef int32_t i, index
    FPS_ASSERT(target.sequence <= source.sequence + 1)  # one more where a combiner began and found nothing to do
    FPS_FAILPOINT()
    memcpy(target, source, sizeof(scheduler_t))
    for i in range(source.n_dirty_workers):
        index = state_dirty(source)[i]
        FPS_FAILPOINT()
        state_workers(target)[index] = state_workers(source)[index]
    for i in range(source.n_dirty_links):
        index = _dirty_links(source)[i]
        FPS_FAILPOINT()
        state_links(target)[index] = state_links(source)[index]
    for i in range(source.n_dirty_buckets):
        index = _dirty_buckets(source)[i]
        FPS_FAILPOINT()
        state_buckets(target)[index] = state_buckets(source)[index]
    if source.policy.grant == GRANT_ROUND_ROBIN:
        tournament_catch_up(state_iterations(target), state_iterations(source))
        tournament_catch_up(state_equal_times(target), state_equal_times(source))


cdef void state_initialise(scheduler_t *state, int32_t n_workers, const policy_t *policy) noexcept nogil:
    """Write a state in which all workers are live, at clock 0, and granted their first step."""
    cdef int32_t i
    memset(state, 0, state_size(n_workers))
    state_lay_out(state, n_workers)
    state.n_workers = n_workers
    state.n_live = n_workers
    state.policy = policy[0]
    state.sequence = 1
    state.frontier = state.waiting.first = state.waiting.last = -1
    state.quorum_due_ns = state.last_grant_ns = NEVER_NS
    tournament_initialise(state_iterations(state), n_workers)
    tournament_initialise(state_equal_times(state), n_workers)
    for i in range(n_workers + 1):
        state_buckets(state)[i].place.next = i + 1 if i < n_workers else -1
        state_buckets(state)[i].members.first = -1
    state.buckets.first = state.buckets.last = -1
    _make_bucket(state, -1, -1, 0)
    for i in range(n_workers):
        _initialise_worker(state, i)
        _enter(state, 0, i)


cdef void _initialise_worker(scheduler_t *state, int32_t worker) noexcept nogil:
    cdef worker_t *w = &state_workers(state)[worker]
    cdef int64_t groups = state.policy.groups
    w.live = 1
    w.granted = 1
    w.base_batch = NO_BATCH
    w.next_live = worker + 1 if worker + 1 < state.n_workers else 0
    w.previous_live = worker - 1 if worker > 0 else state.n_workers - 1
    w.leaf_first = -1
    state_mark_dirty(state, worker)
    if groups:
        # Leaves hold workers in runs of equal length, as far as the numbers allow.
        w.leader = <int32_t> ((worker * groups // state.n_workers * state.n_workers + groups - 1) // groups)
        state_workers(state)[w.leader].leaf_live += 1
        state_workers(state)[w.leader].leaf_end = worker + 1


# -- lists of workers ------------------------------------------------------------------------------

cdef inline void _append(scheduler_t *state, ends_t *ends, int32_t worker, int which) noexcept nogil:
    cdef link_t *links = state_links(state)
    links[worker].places[which].next = -1
    links[worker].places[which].previous = ends.last
    if ends.last >= 0:
        links[ends.last].places[which].next = worker
        _mark_link_dirty(state, ends.last)
    else:
        ends.first = worker
    ends.last = worker
    _mark_link_dirty(state, worker)


cdef inline void _take_out(scheduler_t *state, ends_t *ends, int32_t worker, int which) noexcept nogil:
    cdef link_t *links = state_links(state)
    cdef const place_t *place = &links[worker].places[which]
    if place.previous >= 0:
        links[place.previous].places[which].next = place.next
        _mark_link_dirty(state, place.previous)
    else:
        ends.first = place.next
    if place.next >= 0:
        links[place.next].places[which].previous = place.previous
        _mark_link_dirty(state, place.next)
    else:
        ends.last = place.previous


# -- buckets ---------------------------------------------------------------------------------------

cdef inline void _enter(scheduler_t *state, int32_t bucket, int32_t worker) noexcept nogil:
    """Append the worker to its clock's bucket, in order of arrival."""
    state_links(state)[worker].bucket = bucket
    _append(state, &state_buckets(state)[bucket].members, worker, OF_CLOCK)
    _mark_bucket_dirty(state, bucket)


cdef inline void _quit(scheduler_t *state, int32_t worker) noexcept nogil:
    """Take the worker out of its bucket, and an empty bucket out of the list."""
    cdef int32_t bucket = state_links(state)[worker].bucket
    cdef bucket_t *b = &state_buckets(state)[bucket]
    _take_out(state, &b.members, worker, OF_CLOCK)
    _mark_bucket_dirty(state, bucket)
    if b.members.first < 0:
        _unlink_bucket(state, bucket)


cdef void state_remove(scheduler_t *state, int32_t worker) noexcept nogil:
    """Remove a live worker from its bucket, its leaf, the order and the tournaments."""
    cdef worker_t *w = &state_workers(state)[worker]
    _quit(state, worker)
    w.live = 0
    state.n_live -= 1
    state_workers(state)[w.previous_live].next_live = w.next_live
    state_workers(state)[w.next_live].previous_live = w.previous_live
    if state.fold_next == worker:
        state.fold_next = w.next_live
    if state.grant_next == worker:
        state.grant_next = w.next_live
    state_mark_dirty(state, worker)
    state_mark_dirty(state, w.previous_live)
    state_mark_dirty(state, w.next_live)
    if state.policy.groups:
        state_workers(state)[w.leader].leaf_live -= 1
        state_mark_dirty(state, w.leader)
    if state.policy.grant == GRANT_ROUND_ROBIN:
        tournament_set(state_iterations(state), worker, 0)
        tournament_set(state_equal_times(state), worker, 0)


cdef void state_add(scheduler_t *state, int32_t worker, int64_t clock, int32_t before) noexcept nogil:
    """Add a live worker at this clock: the opposite of state_remove. It does not wait.

    `before`: the live worker that it follows in the order of all; -1: the one with the next lower number.
    """
    cdef worker_t *w = &state_workers(state)[worker]
    _enter(state, _bucket_of(state, clock), worker)
    w.live = 1
    w.clock = clock
    if state.n_live == 0:
        w.next_live = w.previous_live = state.fold_next = state.grant_next = worker
    else:
        if before < 0:
            before = worker - 1 if worker > 0 else state.n_workers - 1
            while before == worker or not state_workers(state)[before].live:
                before = before - 1 if before > 0 else state.n_workers - 1
        w.previous_live = before
        w.next_live = state_workers(state)[before].next_live
        state_workers(state)[before].next_live = worker
        state_workers(state)[w.next_live].previous_live = worker
        state_mark_dirty(state, before)
        state_mark_dirty(state, w.next_live)
    state.n_live += 1
    state_mark_dirty(state, worker)
    if state.policy.groups:
        state_workers(state)[w.leader].leaf_live += 1
        state_mark_dirty(state, w.leader)


cdef int32_t _bucket_of(scheduler_t *state, int64_t clock) noexcept nogil:
    """The bucket of any clock; created at its place in the order if it does not exist."""
    cdef int32_t following = state.buckets.first, before = -1
    while following >= 0 and state_buckets(state)[following].clock < clock:
        before = following
        following = state_buckets(state)[following].place.next
    if following >= 0 and state_buckets(state)[following].clock == clock:
        return following
    if before < 0:
        # The slowest clock falls: buckets that the frontier has passed may get waiting workers again.
        state.frontier = -1
    return _make_bucket(state, before, following, clock)


cdef inline int32_t _make_bucket(scheduler_t *state, int32_t before, int32_t following, int64_t clock) noexcept nogil:
    """Create the bucket of `clock` between two buckets that follow each other; -1: there is none on that side."""
    cdef int32_t index = state.free_bucket
    cdef bucket_t *made = &state_buckets(state)[index]
    FPS_ASSERT(index >= 0)
    state.free_bucket = made.place.next
    made.clock = clock
    made.members.first = made.members.last = made.waiting.first = made.waiting.last = -1
    made.n_waiting = 0
    made.place.previous = before
    made.place.next = following
    if before >= 0:
        state_buckets(state)[before].place.next = index
        _mark_bucket_dirty(state, before)
    else:
        state.buckets.first = index
    if following >= 0:
        state_buckets(state)[following].place.previous = index
        _mark_bucket_dirty(state, following)
    else:
        state.buckets.last = index
    _mark_bucket_dirty(state, index)
    return index


cdef inline void _unlink_bucket(scheduler_t *state, int32_t bucket) noexcept nogil:
    cdef bucket_t *b = &state_buckets(state)[bucket]
    if b.place.previous >= 0:
        state_buckets(state)[b.place.previous].place.next = b.place.next
        _mark_bucket_dirty(state, b.place.previous)
    else:
        state.buckets.first = b.place.next
    if b.place.next >= 0:
        state_buckets(state)[b.place.next].place.previous = b.place.previous
        _mark_bucket_dirty(state, b.place.next)
    else:
        state.buckets.last = b.place.previous
    if state.frontier == bucket:
        state.frontier = b.place.previous
    b.place.next = state.free_bucket
    state.free_bucket = bucket


cdef inline int32_t _bucket_after(scheduler_t *state, int32_t bucket, int64_t clock) noexcept nogil:
    """The bucket of `clock`, which is more than `bucket`'s and at most its next's; created if it does not exist."""
    cdef int32_t following = state_buckets(state)[bucket].place.next
    if following >= 0 and state_buckets(state)[following].clock == clock:
        return following
    return _make_bucket(state, bucket, following, clock)


cdef void state_advance(scheduler_t *state, int32_t worker) noexcept nogil:
    """Count one push of the worker: t_p <- t_p + 1 (Algorithm 1, line 1). It waits in no bucket."""
    cdef worker_t *w = &state_workers(state)[worker]
    cdef int32_t target
    w.clock += 1
    target = _bucket_after(state, state_links(state)[worker].bucket, w.clock)
    _quit(state, worker)
    _enter(state, target, worker)
    state_mark_dirty(state, worker)


# -- waiting and grants ----------------------------------------------------------------------------

cdef inline void _enqueue(scheduler_t *state, ends_t *ends, int32_t worker, int8_t waits) noexcept nogil:
    state_workers(state)[worker].waiting = waits
    _append(state, ends, worker, OF_WAITING)
    state_mark_dirty(state, worker)


cdef void state_wait(scheduler_t *state, int32_t worker) noexcept nogil:
    """Put the worker into the list of all that wait."""
    if not state_workers(state)[worker].waiting:
        _enqueue(state, &state.waiting, worker, WAITS_FOR_ALL)
        state.n_waiting += 1


cdef void state_wait_in_bucket(scheduler_t *state, int32_t worker) noexcept nogil:
    """Put the worker into its bucket's list, until the frontier reaches the bucket."""
    cdef int32_t bucket = state_links(state)[worker].bucket
    cdef bucket_t *b = &state_buckets(state)[bucket]
    b.n_waiting += 1
    _enqueue(state, &b.waiting, worker, WAITS_IN_BUCKET)
    _mark_bucket_dirty(state, bucket)


cdef void state_stop_waiting(scheduler_t *state, int32_t worker) noexcept nogil:
    cdef worker_t *w = &state_workers(state)[worker]
    cdef int32_t bucket = state_links(state)[worker].bucket
    cdef ends_t *ends = &state.waiting
    if not w.waiting:
        return
    if w.waiting == WAITS_IN_BUCKET:
        ends = &state_buckets(state)[bucket].waiting
        state_buckets(state)[bucket].n_waiting -= 1
        _mark_bucket_dirty(state, bucket)
    else:
        state.n_waiting -= 1
    w.waiting = 0
    state_mark_dirty(state, worker)
    _take_out(state, ends, worker, OF_WAITING)


cdef inline void _grant(scheduler_t *state, int32_t worker) noexcept nogil:
    cdef worker_t *w = &state_workers(state)[worker]
    w.granted = w.clock + 1
    w.granted_at = state.sequence
    if state.policy.grant == GRANT_ROUND_ROBIN:
        w.granted_ns = state.now_ns
    state_mark_dirty(state, worker)


cdef void state_grant(scheduler_t *state, int32_t worker) noexcept nogil:
    """Grant the worker the step after those that it has pushed."""
    state_stop_waiting(state, worker)
    _grant(state, worker)


cdef void _grant_list(scheduler_t *state, int32_t first, int32_t n_waiting, int8_t waits, int64_t clock) noexcept nogil:
    """Grant all workers of a list, and drop the list.

    `waits` and `clock` (-1: any) identify its members. Where most workers are in it, they are granted in order of memory, which
    is prefetched, instead of in order of arrival, where each must be read to find the next.
    """
    cdef int32_t worker = first, following
    cdef worker_t *w
    if n_waiting * <int64_t> MOSTLY < state.n_workers:
        while worker >= 0:
            following = state_links(state)[worker].places[OF_WAITING].next
            if following >= 0:
                prefetch(&state_links(state)[following])
                prefetch(&state_workers(state)[following])
            state_workers(state)[worker].waiting = 0
            _grant(state, worker)
            worker = following
        return
    for worker in range(state.n_workers):
        w = &state_workers(state)[worker]
        if w.waiting == waits and (clock < 0 or w.clock == clock):
            w.waiting = 0
            _grant(state, worker)


cdef void state_grant_waiting(scheduler_t *state) noexcept nogil:
    """Grant every worker in the list of all that wait."""
    _grant_list(state, state.waiting.first, state.n_waiting, WAITS_FOR_ALL, -1)
    state.waiting.first = state.waiting.last = -1
    state.n_waiting = 0


cdef void state_grant_within(scheduler_t *state, int64_t clock) noexcept nogil:
    """Move the frontier over all buckets up to this clock, and grant the workers that wait in them."""
    cdef int32_t bucket
    cdef bucket_t *b
    while True:
        bucket = state_buckets(state)[state.frontier].place.next if state.frontier >= 0 else state.buckets.first
        if bucket < 0 or state_buckets(state)[bucket].clock > clock:
            return
        state.frontier = bucket
        b = &state_buckets(state)[bucket]
        if b.n_waiting:
            _grant_list(state, b.waiting.first, b.n_waiting, WAITS_IN_BUCKET, b.clock)
            b.waiting.first = b.waiting.last = -1
            b.n_waiting = 0
            _mark_bucket_dirty(state, bucket)
