"""Whether a scheduler state in shared memory can be walked: every index is in range, and every list ends.

The scheduler trusts its links: an index out of range would be a store anywhere, and a ring of links an endless loop. Any
process of the job may have written over the arena, so a combiner checks the state once each time it takes a shard lock, which
reads all lanes anyway. Numbers that only count are not checked, and a write while the state is in use is not detected.
"""

from libc.stdint cimport int32_t, int64_t
from libc.string cimport memcmp, memcpy

from fastps.kernels.scheduling.state cimport *
from fastps.kernels.scheduling.tournament cimport tournament_can_be_followed

cdef enum:
    _NO_LIST = -1  # of a count: the list is not one


cdef inline bint _is_index(int64_t number, int64_t end) noexcept nogil:
    return 0 <= number < end


# -- what a copy goes by -----------------------------------------------------------------------------

cdef inline size_t _fixed_bytes(const scheduler_t *state) noexcept nogil:
    """The policy and the places, which lie first and never change."""
    return <const char *> &state.version - <const char *> state


cdef void state_remember(scheduler_t *expected, const scheduler_t *state, int32_t n_workers) noexcept nogil:
    """Keep a state's policy, which the caller then checks, and the offsets that follow from the number of workers."""
    memcpy(expected, state, _fixed_bytes(state))
    expected.n_workers = n_workers
    state_lay_out(expected, n_workers)


cdef bint state_can_be_followed(const scheduler_t *state, const scheduler_t *expected) noexcept nogil:
    """Whether state_copy and state_catch_up of this state stay within it."""
    cdef int32_t n = expected.n_workers
    if memcmp(state, expected, _fixed_bytes(state)) != 0 or state.n_workers != n:
        return False
    if not (_is_index(state.n_dirty_workers, n + 1) and _is_index(state.n_dirty_links, n + 1)
            and _is_index(state.n_dirty_buckets, n + 2)):
        return False
    # Behind the list of dirty workers lies that of folds, a result; then the lists of links and buckets.
    if not (_are_indices(state_dirty(state), state.n_dirty_workers, n)
            and _are_indices(state_dirty(state) + 2 * n, state.n_dirty_links, n)
            and _are_indices(state_dirty(state) + 3 * n, state.n_dirty_buckets, n + 1)):
        return False
    return state.policy.grant != GRANT_ROUND_ROBIN or (
        tournament_can_be_followed(state_iterations(state), n)
        and tournament_can_be_followed(state_equal_times(state), n))


cdef bint _are_indices(const int32_t *numbers, int32_t count, int32_t end) noexcept nogil:
    cdef int32_t i
    for i in range(count):
        if not _is_index(numbers[i], end):
            return False
    return True


# -- what decisions walk -----------------------------------------------------------------------------

cdef bint state_can_be_walked(const scheduler_t *state, int64_t most_kept) noexcept nogil:
    """Whether every decision on this state, which could be followed, ends and stays within it.

    most_kept: descriptors of a lane that the scheduler has seen and that are not done with, at most.
    """
    cdef int64_t waiting[3]  # workers by their value of `waiting`
    waiting[0] = waiting[WAITS_FOR_ALL] = waiting[WAITS_IN_BUCKET] = 0
    return (_are_workers_sound(state, most_kept, waiting)
            and _count(state, &state.waiting, OF_WAITING, -1) == waiting[WAITS_FOR_ALL]
            and _are_buckets_sound(state, waiting[WAITS_IN_BUCKET]))


cdef bint _are_workers_sound(const scheduler_t *state, int64_t most_kept, int64_t *waiting) noexcept nogil:
    cdef const worker_t *workers = state_workers(state)
    cdef const worker_t *w
    cdef int32_t worker, n = state.n_workers, live = 0, arrived = 0
    for worker in range(n):
        w = &workers[worker]
        if not (_is_index(w.next_live, n) and _is_index(w.previous_live, n)
                and 0 <= w.relayed <= w.consumed - w.cursor <= most_kept):
            return False
        if w.live:
            if not workers[w.next_live].live or workers[w.next_live].previous_live != worker:
                return False
            live += 1
            arrived += w.kept > 0 and w.kept_version == state.version
        if not 0 <= w.waiting <= WAITS_IN_BUCKET:
            return False
        waiting[w.waiting] += 1
        if state.policy.groups and not _is_leaf_sound(state, worker):
            return False
    if live != state.n_live or not _is_index(state.fold_next, n) or not _is_index(state.grant_next, n):
        return False
    if live and not (workers[state.fold_next].live and workers[state.grant_next].live):
        return False
    # Times of arrival are counted by this number.
    return state.n_arrived == arrived if state.policy.fold in (FOLD_ALL, FOLD_QUORUM) else True


cdef bint _is_leaf_sound(const scheduler_t *state, int32_t worker) noexcept nogil:
    """A worker's leader, and if it is one itself its leaf: a run of workers, and a list of some of them."""
    cdef const worker_t *workers = state_workers(state)
    cdef const worker_t *w = &workers[worker]
    cdef int32_t kept = w.leaf_first, count = 0
    if not _is_index(w.leader, state.n_workers) or not _is_index(w.leaf_end, state.n_workers + 1):
        return False
    while kept != -1:
        if not _is_index(kept, state.n_workers) or count == state.n_workers:
            return False
        count += 1
        kept = workers[kept].next_kept
    return True


cdef bint _are_buckets_sound(const scheduler_t *state, int64_t waiting) noexcept nogil:
    """The buckets in use, in order of their clocks, with their members; then the free ones. Together these are all buckets."""
    cdef const bucket_t *buckets = state_buckets(state)
    cdef const bucket_t *b
    cdef int32_t bucket = state.buckets.first, before = -1, n_buckets = state.n_workers + 1, used = 0
    cdef int64_t live = 0, count, found
    while bucket != -1:
        if not _is_index(bucket, n_buckets) or used == n_buckets:
            return False
        b = &buckets[bucket]
        if b.place.previous != before or (before != -1 and b.clock <= buckets[before].clock):
            return False
        count = _count(state, &b.members, OF_CLOCK, bucket)
        found = _count(state, &b.waiting, OF_WAITING, bucket)
        if count < 1 or found == _NO_LIST:
            return False
        live += count
        waiting -= found
        used += 1
        before = bucket
        bucket = b.place.next
    if state.buckets.last != before or live != state.n_live or waiting != 0 or not -1 <= state.frontier < n_buckets:
        return False
    bucket = state.free_bucket
    while bucket != -1:
        if not _is_index(bucket, n_buckets) or used == n_buckets or buckets[bucket].members.first != -1:
            return False
        used += 1
        bucket = buckets[bucket].place.next
    return used == n_buckets


cdef int64_t _count(const scheduler_t *state, const list_t *ends, int which, int32_t bucket) noexcept nogil:
    """How many workers are in a bucket's list, or for -1 in the list of all that wait; _NO_LIST if one belongs elsewhere."""
    cdef const link_t *link
    cdef const worker_t *w
    cdef int32_t worker = ends.first, before = -1
    cdef int64_t count = 0
    while worker != -1:
        if not _is_index(worker, state.n_workers) or count == state.n_workers:
            return _NO_LIST
        link = &state_links(state)[worker]
        w = &state_workers(state)[worker]
        if link.places[which].previous != before or (bucket >= 0 and link.bucket != bucket):
            return _NO_LIST
        if which == OF_WAITING and w.waiting != (WAITS_FOR_ALL if bucket < 0 else WAITS_IN_BUCKET):
            return _NO_LIST
        if which == OF_CLOCK and (not w.live or w.clock != state_buckets(state)[bucket].clock):
            return _NO_LIST
        count += 1
        before = worker
        worker = link.places[which].next
    return count if ends.last == before else _NO_LIST
