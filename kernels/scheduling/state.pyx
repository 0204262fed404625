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


cdef inline void _copy_dirty(
        void *target, const void *source, size_t size, const int32_t *dirty, int32_t n_dirty) noexcept nogil:
    """Copy the dirty elements of an array, each of `size` bytes."""
    cdef int32_t i
    for i in range(n_dirty):
        FPS_FAILPOINT()
        memcpy(<char *> target + dirty[i] * size, <const char *> source + dirty[i] * size, size)


cdef void state_catch_up(scheduler_t *target, const scheduler_t *source) noexcept nogil:
    """Bring `target`, which is one commit behind, up to `source`. Idempotent: values are copied, not added."""
    FPS_ASSERT(target.sequence <= source.sequence + 1)  # one more where a combiner began and found nothing to do
    FPS_FAILPOINT()
    memcpy(target, source, sizeof(scheduler_t))
    _copy_dirty(state_workers(target), state_workers(source), sizeof(worker_t), state_dirty(source), source.n_dirty_workers)
    _copy_dirty(state_links(target), state_links(source), sizeof(link_t), _dirty_links(source), source.n_dirty_links)
    _copy_dirty(state_buckets(target), state_buckets(source), sizeof(bucket_t), _dirty_buckets(source), source.n_dirty_buckets)
    if source.policy.grant == GRANT_ROUND_ROBIN:
        tournament_catch_up(state_iterations(target), state_iterations(source))
        tournament_catch_up(state_equal_times(target), state_equal_times(source))


cdef void state_initialise(scheduler_t *state, int32_t n_workers, const policy_t *policy) noexcept nogil:
    """Write a state in which all workers are live, at clock 0, and granted their first step."""
    cdef int32_t i
    cdef int64_t groups = policy.groups
    cdef worker_t *workers
    memset(state, 0, state_size(n_workers))
    state_lay_out(state, n_workers)
    state.n_workers = n_workers
    state.policy = policy[0]
    state.sequence = 1
    state.buckets.first = state.buckets.last = state.frontier = state.waiting.first = state.waiting.last = -1
    state.quorum_due_ns = state.last_grant_ns = NEVER_NS
    tournament_initialise(state_iterations(state), n_workers)
    tournament_initialise(state_equal_times(state), n_workers)
    for i in range(n_workers + 1):
        state_buckets(state)[i].place.next = i + 1 if i < n_workers else -1
        state_buckets(state)[i].members.first = -1
    workers = state_workers(state)
    for i in range(n_workers):
        workers[i].granted = 1
        workers[i].leaf_first = -1
        if groups:
            # Leaves hold workers in runs of equal length, as far as the numbers allow.
            workers[i].leader = <int32_t> ((i * groups // n_workers * n_workers + groups - 1) // groups)
            workers[workers[i].leader].leaf_end = i + 1
        state_add(state, i, 0, -1)


# -- lists of workers ------------------------------------------------------------------------------

cdef inline void _chain(scheduler_t *state, list_t *list, int32_t before, int32_t following, int which) noexcept nogil:
    """Let two workers follow each other in a list; -1: its end."""
    cdef link_t *links = state_links(state)
    if before >= 0:
        links[before].places[which].next = following
        _mark_link_dirty(state, before)
    else:
        list.first = following
    if following >= 0:
        links[following].places[which].previous = before
        _mark_link_dirty(state, following)
    else:
        list.last = before


cdef inline void _append(scheduler_t *state, list_t *list, int32_t worker, int which) noexcept nogil:
    _chain(state, list, list.last, worker, which)
    _chain(state, list, worker, -1, which)
    list.length += 1


cdef inline void _take_out(scheduler_t *state, list_t *list, int32_t worker, int which) noexcept nogil:
    cdef const place_t *place = &state_links(state)[worker].places[which]
    _chain(state, list, place.previous, place.next, which)
    list.length -= 1


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
        _chain_buckets(state, b.place.previous, b.place.next)
        if state.frontier == bucket:
            state.frontier = b.place.previous
        b.place.next = state.free_bucket
        state.free_bucket = bucket


cdef inline void _chain_buckets(scheduler_t *state, int32_t before, int32_t following) noexcept nogil:
    """Let two buckets follow each other; -1: the end of their list."""
    if before >= 0:
        state_buckets(state)[before].place.next = following
        _mark_bucket_dirty(state, before)
    else:
        state.buckets.first = following
    if following >= 0:
        state_buckets(state)[following].place.previous = before
        _mark_bucket_dirty(state, following)
    else:
        state.buckets.last = before


cdef inline int32_t _bucket_of(scheduler_t *state, int32_t before, int64_t clock) noexcept nogil:
    """The bucket of a clock, at its place in the order behind bucket `before` (-1: anywhere); created if it does not exist."""
    cdef bucket_t *buckets = state_buckets(state)
    cdef bucket_t *made
    cdef int32_t index = state.free_bucket, following = buckets[before].place.next if before >= 0 else state.buckets.first
    while following >= 0 and buckets[following].clock < clock:
        before = following
        following = buckets[following].place.next
    if following >= 0 and buckets[following].clock == clock:
        return following
    if before < 0:
        # The slowest clock falls: buckets that the frontier has passed may get waiting workers again.
        state.frontier = -1
    FPS_ASSERT(index >= 0)
    made = &buckets[index]
    state.free_bucket = made.place.next
    made.clock = clock
    made.members.first = made.members.last = made.waiting.first = made.waiting.last = -1
    made.members.length = made.waiting.length = 0
    _chain_buckets(state, before, index)
    _chain_buckets(state, index, following)
    return index


cdef void state_advance(scheduler_t *state, int32_t worker) noexcept nogil:
    """Count one push of the worker: t_p <- t_p + 1 (Algorithm 1, line 1). It waits in no bucket."""
    cdef worker_t *w = &state_workers(state)[worker]
    cdef int32_t target
    w.clock += 1
    target = _bucket_of(state, state_links(state)[worker].bucket, w.clock)
    _quit(state, worker)
    _enter(state, target, worker)
    state_mark_dirty(state, worker)


# -- workers that come and go ------------------------------------------------------------------------

cdef inline void _chain_live(scheduler_t *state, int32_t before, int32_t following) noexcept nogil:
    """Let two workers follow each other in the ring of live workers."""
    state_workers(state)[before].next_live = following
    state_workers(state)[following].previous_live = before


cdef inline void _count_live(scheduler_t *state, int32_t worker, int8_t change) noexcept nogil:
    """Count a live worker more, or less, also in its leaf."""
    cdef worker_t *leader = &state_workers(state)[state_workers(state)[worker].leader]
    state.n_live += change
    if state.policy.groups:
        leader.leaf_live += change
        state_mark_dirty(state, state_workers(state)[worker].leader)


cdef void state_remove(scheduler_t *state, int32_t worker) noexcept nogil:
    """Remove a live worker from its bucket, its leaf, the order and the tournaments."""
    cdef worker_t *w = &state_workers(state)[worker]
    _quit(state, worker)
    w.live = 0
    _chain_live(state, w.previous_live, w.next_live)
    if state.fold_next == worker:
        state.fold_next = w.next_live
    if state.grant_next == worker:
        state.grant_next = w.next_live
    state_mark_dirty(state, worker)
    state_mark_dirty(state, w.previous_live)
    state_mark_dirty(state, w.next_live)
    _count_live(state, worker, -1)
    if state.policy.grant == GRANT_ROUND_ROBIN:
        tournament_set(state_iterations(state), worker, 0)
        tournament_set(state_equal_times(state), worker, 0)


cdef void state_add(scheduler_t *state, int32_t worker, int64_t clock, int32_t before) noexcept nogil:
    """Add a live worker at this clock: the opposite of state_remove. It does not wait.

    `before`: the live worker that it follows in the order of all; -1: the one with the next lower number.
    """
    cdef worker_t *w = &state_workers(state)[worker]
    _enter(state, _bucket_of(state, -1, clock), worker)
    if state.n_live == 0:
        before = w.next_live = state.fold_next = state.grant_next = worker
    elif before < 0:
        before = worker
        while not state_workers(state)[before].live:
            before = before - 1 if before > 0 else state.n_workers - 1
    w.live = 1
    w.clock = clock
    _chain_live(state, worker, state_workers(state)[before].next_live)
    _chain_live(state, before, worker)
    state_mark_dirty(state, before)
    state_mark_dirty(state, w.next_live)
    state_mark_dirty(state, worker)
    _count_live(state, worker, 1)


# -- waiting and grants ----------------------------------------------------------------------------

cdef inline list_t *_waiting_list(scheduler_t *state, int32_t worker) noexcept nogil:
    """The list in which the worker waits, which is to change."""
    cdef int32_t bucket = state_links(state)[worker].bucket
    if state_workers(state)[worker].waiting == WAITS_FOR_ALL:
        return &state.waiting
    _mark_bucket_dirty(state, bucket)
    return &state_buckets(state)[bucket].waiting


cdef void state_wait(scheduler_t *state, int32_t worker, int8_t waits) noexcept nogil:
    """Let the worker wait, unless it does: WAITS_FOR_ALL, or WAITS_IN_BUCKET, until the frontier reaches its bucket."""
    cdef worker_t *w = &state_workers(state)[worker]
    if not w.waiting:
        w.waiting = waits
        _append(state, _waiting_list(state, worker), worker, OF_WAITING)
        state_mark_dirty(state, worker)


cdef void state_stop_waiting(scheduler_t *state, int32_t worker) noexcept nogil:
    cdef worker_t *w = &state_workers(state)[worker]
    if w.waiting:
        _take_out(state, _waiting_list(state, worker), worker, OF_WAITING)
        w.waiting = 0
        state_mark_dirty(state, worker)


cdef inline void _grant(scheduler_t *state, int32_t worker) noexcept nogil:
    cdef worker_t *w = &state_workers(state)[worker]
    w.granted = w.clock + 1
    w.granted_at = state.sequence
    if state.policy.grant == GRANT_ROUND_ROBIN or state.policy.tune_batches:
        w.granted_ns = state.now_ns
    state_mark_dirty(state, worker)


cdef void state_grant(scheduler_t *state, int32_t worker) noexcept nogil:
    """Grant the worker the step after those that it has pushed."""
    state_stop_waiting(state, worker)
    _grant(state, worker)


cdef void _grant_list(scheduler_t *state, list_t *list, int8_t waits, int64_t clock) noexcept nogil:
    """Grant all workers of a list, and empty it.

    `waits` and `clock` (-1: any) identify its members. Where most workers are in it, they are granted in order of memory, which
    is prefetched, instead of in order of arrival, where each must be read to find the next.
    """
    cdef int32_t worker = list.first, following
    cdef worker_t *w
    if list.length * <int64_t> MOSTLY < state.n_workers:
        while worker >= 0:
            following = state_links(state)[worker].places[OF_WAITING].next
            if following >= 0:
                prefetch(&state_links(state)[following])
                prefetch(&state_workers(state)[following])
            state_workers(state)[worker].waiting = 0
            _grant(state, worker)
            worker = following
    else:
        for worker in range(state.n_workers):
            w = &state_workers(state)[worker]
            if w.waiting == waits and (clock < 0 or w.clock == clock):
                w.waiting = 0
                _grant(state, worker)
    list.first = list.last = -1
    list.length = 0


cdef void state_grant_waiting(scheduler_t *state) noexcept nogil:
    """Grant every worker in the list of all that wait."""
    _grant_list(state, &state.waiting, WAITS_FOR_ALL, -1)


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
        if b.waiting.length:
            _grant_list(state, &b.waiting, WAITS_IN_BUCKET, b.clock)
            _mark_bucket_dirty(state, bucket)
