"""The scheduler: which pushes are folded and who may go on, as a pure function of state and event.

No clock, no input or output, no Python object inside: time comes in as an argument, decisions go out. The live store and the
simulator run this same object code. What it refuses to know: gradients, weights, memory of other processes, and the names of
the disciplines (fastps/job/policy.py turns a name into values).

An event is a push, a leave, or a timer. Its answer is an action (what is folded), with grants written into the workers of the
roster. Whoever brings events fires every timer that is due at or before an event's time before that event, and says when a
drain ends: events that were found together, and are committed together.
"""

from libc.stdint cimport int32_t, int64_t

from fastps.kernels.base.atomics cimport FPS_ASSERT
from fastps.kernels.base.failpoints cimport FPS_FAILPOINT
from fastps.kernels.scheduling.bounded_staleness cimport bounded_decide, bounded_release
from fastps.kernels.scheduling.round_robin cimport (
    round_robin_due,
    round_robin_expect,
    round_robin_grant,
    round_robin_join,
    round_robin_measure,
    round_robin_space,
)
from fastps.kernels.scheduling.state cimport (
    COMBINED_MOST,
    FOLD_ALL,
    FOLD_COUNT,
    FOLD_EACH,
    FOLD_IN_ORDER,
    FOLD_QUORUM,
    GRANT_AT_ONCE,
    GRANT_BOUNDED,
    GRANT_NEXT_VERSION,
    GRANT_ROUND_ROBIN,
    MOSTLY,
    NEVER_NS,
    link_t,
    prefetch,
    state_add,
    state_advance,
    state_folds,
    state_grant,
    state_grant_waiting,
    state_links,
    state_remove,
    state_slowest,
    state_slowest_clock,
    state_stop_waiting,
    state_mark_dirty,
    state_wait,
    state_workers,
    scheduler_t,
    worker_t,
)


# -- folds -----------------------------------------------------------------------------------------

cdef int _fold_all(scheduler_t *state) noexcept nogil:
    """The sum is complete: one fold of all that was kept, and everyone who waits for the version goes on."""
    FPS_FAILPOINT()
    state.version += 1
    state.n_arrived = 0
    state.n_kept = 0
    state.quorum_due_ns = NEVER_NS
    state.folded_ns = state.now_ns
    if state.policy.grant == GRANT_NEXT_VERSION:
        state_grant_waiting(state)
    return ACTION_FOLD_ALL


cdef inline int64_t _needed(const scheduler_t *state) noexcept nogil:
    """FOLD_COUNT: c = floor(lambda / n) of Rudra's n-softsync (equation 5), with lambda the live workers; at least 1."""
    return max(<int64_t> 1, state.n_live // state.policy.divisor)


cdef int _close_sum(scheduler_t *state) noexcept nogil:
    """Fold the sum if it is complete."""
    if state.n_kept == 0:
        return ACTION_KEEP
    if state.policy.fold == FOLD_COUNT:
        return _fold_all(state) if state.n_kept >= _needed(state) or state.n_live == 0 else ACTION_KEEP
    if state.n_arrived == state.n_live:
        return _fold_all(state)
    if state.policy.fold == FOLD_ALL or state.n_kept < state.policy.count:
        return ACTION_KEEP
    if state.policy.timeout_ns == 0:
        return _fold_all(state)
    if state.quorum_due_ns == NEVER_NS:
        state.quorum_due_ns = state.now_ns + state.policy.timeout_ns
    return ACTION_KEEP


cdef int _fold_in_order(scheduler_t *state) noexcept nogil:
    """Fold, one after the other, the pushes whose turn it is: R2SP's fixed order of updates (section III-C)."""
    cdef worker_t *w
    while state.n_live > 0:
        w = &state_workers(state)[state.fold_next]
        if w.kept == 0:
            break
        _list_fold(state, state.fold_next)
        state.fold_next = w.next_live
    return ACTION_FOLD_LIST if state.n_folds else ACTION_KEEP


cdef void _list_fold(scheduler_t *state, int32_t worker) noexcept nogil:
    cdef worker_t *w = &state_workers(state)[worker]
    FPS_ASSERT(w.kept == 1 and state.n_folds < state.n_workers)
    w.kept = 0
    state_mark_dirty(state, worker)
    state_folds(state)[state.n_folds] = worker
    state.n_folds += 1
    state.version += 1
    state.folded_ns = state.now_ns


# -- a tree of servers (Rudra-adv, section 3.3) ------------------------------------------------------

cdef inline void _pass_on(scheduler_t *state, int32_t worker) noexcept nogil:
    cdef worker_t *w = &state_workers(state)[worker]
    w.relayed += w.kept
    w.kept = 0
    state_mark_dirty(state, worker)


cdef void _relay(scheduler_t *state, int32_t leader) noexcept nogil:
    """A leaf that holds a push for each of its live workers passes all on to the root."""
    cdef worker_t *leaf = &state_workers(state)[leader]
    cdef int32_t worker = leaf.leaf_first, following
    if leaf.leaf_kept == 0 or leaf.leaf_kept < leaf.leaf_live:
        return
    if leaf.leaf_kept * <int64_t> MOSTLY < leaf.leaf_end - leader:
        while worker >= 0:
            following = state_workers(state)[worker].next_kept
            _pass_on(state, worker)
            worker = following
    else:
        for worker in range(leader, leaf.leaf_end):
            if state_workers(state)[worker].kept:
                _pass_on(state, worker)
    state.n_kept += leaf.leaf_kept
    leaf.leaf_kept = 0
    leaf.leaf_first = -1
    state_mark_dirty(state, leader)


cdef void _keep(scheduler_t *state, int32_t worker) noexcept nogil:
    """FOLD_COUNT: the push joins the sum, or in a tree its leaf's."""
    cdef worker_t *w = &state_workers(state)[worker]
    cdef worker_t *leaf = &state_workers(state)[w.leader]
    if state.policy.groups == 0:
        state.n_kept += 1
        return
    if w.kept == 0:
        w.next_kept = leaf.leaf_first
        leaf.leaf_first = worker
    w.kept += 1
    leaf.leaf_kept += 1
    state_mark_dirty(state, w.leader)
    _relay(state, w.leader)


cdef int _receive(scheduler_t *state, int32_t worker, int64_t timestamp) noexcept nogil:
    """What becomes of a push that arrives now."""
    cdef worker_t *w = &state_workers(state)[worker]
    if state.policy.combine:
        state.n_kept += 1
        return _fold_all(state) if state.n_kept == COMBINED_MOST else ACTION_KEEP
    if state.policy.fold == FOLD_EACH:
        state.version += 1
        state.folded_ns = state.now_ns
        return ACTION_FOLD
    if state.policy.fold == FOLD_QUORUM and timestamp < state.version:
        # Backup workers, Algorithm 4, line 6; PSP-SGD, Algorithm 1, lines 7 and 8.
        w.dropped += 1
        return ACTION_DROP
    if state.policy.fold == FOLD_COUNT:
        _keep(state, worker)
        return _close_sum(state)
    if state.policy.fold == FOLD_IN_ORDER:
        w.kept += 1
        return _fold_in_order(state)
    w.kept = w.kept + 1 if w.kept_version == state.version else 1
    w.kept_version = state.version
    state.n_kept += 1
    if w.kept == 1:
        state.n_arrived += 1
    return _close_sum(state)


# -- events ----------------------------------------------------------------------------------------

cdef inline void _set_time(scheduler_t *state, int64_t now_ns) noexcept nogil:
    FPS_FAILPOINT()
    state.now_ns = max(state.now_ns, now_ns)
    state.n_folds = 0


cdef int scheduler_push(
        scheduler_t *state, int32_t worker, int64_t now_ns, int64_t timestamp, int64_t samples) noexcept nogil:
    """A push of `worker` arrives; `timestamp` is the version that it was computed with, `samples` its batch.

    Returns what to fold; grants are written into the workers.
    """
    cdef worker_t *w = &state_workers(state)[worker]
    cdef bint was_slowest = state_slowest(state) == worker
    cdef int action
    prefetch(&state_links(state)[worker])
    FPS_ASSERT(w.live)
    _set_time(state, now_ns)
    if state.policy.grant == GRANT_ROUND_ROBIN:
        round_robin_measure(state, worker, samples)
    elif state.policy.grant == GRANT_BOUNDED:
        state_stop_waiting(state, worker)  # granted by another shard alone; it waits by its clock, which rises
    w.push_ns[1] = w.push_ns[0]
    w.push_ns[0] = state.now_ns
    w.history = min(2, w.history + 1)
    state_advance(state, worker)
    if state.policy.grant == GRANT_NEXT_VERSION:
        state_wait(state, worker)
    action = _receive(state, worker, timestamp)
    if state.policy.grant == GRANT_AT_ONCE or action == ACTION_DROP:
        state_grant(state, worker)
    elif state.policy.grant == GRANT_BOUNDED:
        bounded_decide(state, worker)
        if was_slowest:
            bounded_release(state, worker)
    elif state.policy.grant == GRANT_ROUND_ROBIN:
        state_wait(state, worker)
        round_robin_grant(state)
    return action


cdef int scheduler_close(scheduler_t *state) noexcept nogil:
    """A drain ends, the last of its commit: under `combine` the pushes that it has found are one sum, and one version."""
    if not state.policy.combine or state.n_kept == 0:
        return ACTION_NONE
    return _fold_all(state)


cdef void scheduler_expect(const scheduler_t *state, int32_t worker, bint soon) noexcept nogil:
    """Begin to fetch what a push of `worker` will read. It decides nothing.

    Among 100,000 workers nearly every decision waits for memory. Whoever knows the next pushes says so some decisions before,
    and again when a push comes `soon`, for who stands beside its worker in a bucket is known only from the worker's links.
    """
    cdef const link_t *link = &state_links(state)[worker]
    if soon:
        if link.previous >= 0:
            prefetch(&state_links(state)[link.previous])
        if link.next >= 0:
            prefetch(&state_links(state)[link.next])
        return
    prefetch(link)
    prefetch(&state_workers(state)[worker])
    if state.policy.grant == GRANT_ROUND_ROBIN:
        round_robin_expect(state, worker)
    elif state.policy.fold != FOLD_EACH:
        prefetch(&state_workers(state)[worker].cursor)


cdef int scheduler_leave(scheduler_t *state, int32_t worker, int64_t now_ns) noexcept nogil:
    """`worker` leaves in good order: it is counted no more, and whoever waited only for it goes on.

    What it had pushed and was kept is folded all the same: at once where its place in an order would never come again,
    otherwise with its sum.
    """
    cdef worker_t *w = &state_workers(state)[worker]
    cdef bint was_slowest = state_slowest(state) == worker
    cdef int action = ACTION_NONE
    if not w.live:
        return ACTION_NONE
    _set_time(state, now_ns)
    state_stop_waiting(state, worker)
    state_remove(state, worker)
    w.credit = 0
    if state.policy.fold == FOLD_IN_ORDER:
        if w.kept:
            _list_fold(state, worker)
        action = _fold_in_order(state)
    elif state.policy.fold == FOLD_COUNT:
        if state.policy.groups:
            _relay(state, w.leader)
        action = _close_sum(state)
    elif state.policy.fold != FOLD_EACH:
        if w.kept and w.kept_version == state.version:
            state.n_arrived -= 1
        action = _close_sum(state)
    if state.policy.grant == GRANT_BOUNDED and state.n_live > 0 and was_slowest:
        bounded_release(state, -1)
    elif state.policy.grant == GRANT_ROUND_ROBIN:
        round_robin_space(state)
        round_robin_grant(state)
    return action


cdef void scheduler_join(scheduler_t *state, int32_t worker, int64_t now_ns, int64_t clock) noexcept nogil:
    """A worker joins that lives not, and of whom nothing is kept: at `clock`, or where that is less than 0 at the slowest
    live worker's, with an empty history, and granted its first step.

    Nobody waits for less than before, so nobody is granted anything by it; a sum that was nearly complete waits for it, too.
    """
    cdef worker_t *w = &state_workers(state)[worker]
    FPS_ASSERT(not w.live)
    _set_time(state, now_ns)
    if clock < 0:
        clock = state_slowest_clock(state) if state.n_live > 0 else w.clock
    if state.policy.grant == GRANT_ROUND_ROBIN and state.n_live > 0:
        round_robin_join(state, worker, clock)
    else:
        state_add(state, worker, clock, -1)
    w.granted = clock + 1
    w.granted_at = state.sequence
    w.granted_ns = state.now_ns
    w.push_ns[0] = w.push_ns[1] = w.kept_version = w.credit = w.relayed = w.iteration_ns = w.base_batch = w.batch = 0
    w.kept = w.said_leave = w.history = w.waiting = w.measured = 0
    w.fit_n = w.fit_batch = w.fit_ns = w.fit_batch_batch = w.fit_batch_ns = w.line_constant = w.line_slope = 0


cdef int64_t scheduler_due(const scheduler_t *state) noexcept nogil:
    """The deadline of the next timer, or NEVER_NS."""
    if state.policy.grant == GRANT_ROUND_ROBIN:
        return round_robin_due(state)
    return state.quorum_due_ns


cdef int scheduler_fire(scheduler_t *state) noexcept nogil:
    """The timer's event, stamped with its deadline. There must be one."""
    _set_time(state, scheduler_due(state))
    if state.policy.grant == GRANT_ROUND_ROBIN:
        round_robin_grant(state)
        return ACTION_KEEP
    return _fold_all(state)
