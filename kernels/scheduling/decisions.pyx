"""The scheduler's decisions: which pushes are folded and which workers may continue, as pure functions of state and event.

There is no clock, no input or output, and no Python object: time comes in as an argument, decisions go out. The live store and
the simulator run this same object code.

An event is a push, a leave, a join or a timer. The answer is an action (what is folded); grants are written into the workers of
the scheduler state. The caller fires every timer that is due at or before an event's time before that event. The caller also
says when a drain ends: its events were found together, and are committed together.
"""

from libc.stdint cimport INT64_MAX, int32_t, int64_t
from libc.stdlib cimport llabs

from fastps.kernels.base.atomics cimport FPS_ASSERT
from fastps.kernels.base.failpoints cimport FPS_FAILPOINT
from fastps.kernels.scheduling.batches cimport batches_level, batches_measure
from fastps.kernels.scheduling.round_robin cimport *
from fastps.kernels.scheduling.state cimport *


# -- folds -----------------------------------------------------------------------------------------

cdef int _fold_all(scheduler_t *state) noexcept nogil:
    """Complete the sum: one fold of all kept pushes, and a grant to every worker that waits for the version."""
    FPS_FAILPOINT()
    state.version += 1
    state.n_arrived = 0
    state.n_kept = 0
    state.quorum_due_ns = NEVER_NS
    state.folded_ns = state.now_ns
    if state.policy.grant == GRANT_NEXT_VERSION:
        if state.policy.tune_batches:
            batches_level(state)
        state_grant_waiting(state)
    return ACTION_FOLD_ALL


cdef inline bint _is_quorum(const scheduler_t *state) noexcept nogil:
    """FOLD_QUORUM: c pushes, or pushes of all live workers but the backups: those of workers that left do not count then."""
    if state.policy.count and state.n_kept >= state.policy.count:
        return True
    return state.n_arrived >= max(<int64_t> 1, state.n_live - state.policy.backups)


cdef int _fold_complete(scheduler_t *state) noexcept nogil:
    """Fold the sum if it is complete, or the pushes that are next in order."""
    if state.policy.fold == FOLD_IN_ORDER:
        return _fold_in_order(state)
    if state.policy.fold == FOLD_EACH or state.n_kept == 0:
        return ACTION_KEEP
    if state.policy.fold == FOLD_COUNT:
        # c = floor(lambda / n) of Rudra's n-softsync (equation 5), with lambda the live workers; at least 1.
        return _fold_all(state) if state.n_kept >= max(<int64_t> 1, state.n_live // state.policy.divisor) else ACTION_KEEP
    if state.n_arrived == state.n_live:
        return _fold_all(state)
    if state.policy.fold == FOLD_ALL or not _is_quorum(state):
        return ACTION_KEEP
    if state.policy.timeout_ns == 0:
        return _fold_all(state)
    if state.quorum_due_ns == NEVER_NS:
        state.quorum_due_ns = state.now_ns + state.policy.timeout_ns
    return ACTION_KEEP


cdef int _fold_in_order(scheduler_t *state) noexcept nogil:
    """List the pushes that are next in R2SP's fixed order of updates (section III-C)."""
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
    """Pass a leaf's pushes on to the root, if it holds one for each of its live workers, or for `relay` of them."""
    cdef worker_t *leaf = &state_workers(state)[leader]
    cdef int32_t worker = leaf.leaf_first, following
    if leaf.leaf_kept == 0 or leaf.leaf_kept < leaf.leaf_live * (state.policy.relay or 1.0):
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
    """FOLD_COUNT: add the push to the sum, or in a tree to its leaf's."""
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
    """Decide what becomes of a push that arrives now."""
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
    elif state.policy.fold == FOLD_IN_ORDER:
        w.kept += 1
    else:
        w.kept = w.kept + 1 if w.kept_version == state.version else 1
        w.kept_version = state.version
        state.n_kept += 1
        state.n_arrived += w.kept == 1
    return _fold_complete(state)


# -- bounded staleness: DSSP, and SSP, its special case without room between the bounds --------------
#
# DSSP is Zhao et al., "Dynamic Stale Synchronous Parallel Distributed Training for Deep Learning", Algorithms 1 and 2.

cdef int64_t _controller(const scheduler_t *state, int32_t worker) noexcept nogil:
    """DSSP, Algorithm 2: how many extra steps lead to the shortest wait for the slowest worker.

    Line 8 asks for the pair (k, r) that minimizes |Sim_slowest[k] - Sim_p[r]|; for each r only the two k beside the crossing
    can be it, so r_max + 1 divisions do instead of (r_max + 1)^2 comparisons. Ties: the smallest r.
    """
    cdef worker_t *p = &state_workers(state)[worker]
    cdef worker_t *slowest = &state_workers(state)[state_slowest(state)]
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
        distance = llabs(target - k * interval_slowest)
        if k < reach:
            distance = min(distance, llabs(target - (k + 1) * interval_slowest))
        if best < 0 or distance < best_distance:
            best = r
            best_distance = distance
    return best


cdef inline int64_t _limit(const policy_t *policy) noexcept nogil:
    """The largest lead at which a step is granted. The push of that step may lead by one more."""
    if policy.bound == BOUND_NONE:
        return INT64_MAX
    return policy.high - (policy.bound == BOUND_PUSH)


cdef void _decide_bounded(scheduler_t *state, int32_t worker) noexcept nogil:
    """DSSP, Algorithm 1, lines 3 to 16. With low == high the controller has no room, and this is SSP.

    As listed, line 14 sends OK without taking from the credit that line 12 gave, so r* = 3 lets the worker begin four steps.
    The paper's text and Figure 2 say three: CREDIT_PROSE takes the first step from the credit, too.
    """
    cdef const policy_t *policy = &state.policy
    cdef worker_t *p = &state_workers(state)[worker]
    cdef int64_t gap = p.clock - state_slowest_clock(state)
    cdef int64_t limit = _limit(policy)
    cdef bint within = gap <= limit
    cdef bint counts_first = policy.credit == CREDIT_PROSE
    if p.credit > 0:
        if within:
            p.credit -= 1
            state_grant(state, worker)
            return
    elif gap <= policy.low and within:
        state_grant(state, worker)
        return
    elif policy.high > policy.low and p.clock == state_fastest_clock(state):
        p.credit = _controller(state, worker)
        if limit < INT64_MAX:
            p.credit = min(p.credit, max(<int64_t> 0, limit - gap + counts_first))
        if p.credit > 0:
            p.credit -= counts_first
            state_grant(state, worker)
            return
    state_wait(state, worker, WAITS_FOR_ALL if gap <= _reach(policy) else WAITS_IN_BUCKET)


cdef inline int64_t _reach(const policy_t *policy) noexcept nogil:
    """How far ahead of the slowest a worker may be to be released when the slowest moves: line 17, in the policy's reading."""
    cdef int64_t limit = _limit(policy)
    return min(policy.low, limit) if policy.release != RELEASE_NEXT_PUSH else limit


cdef void _release_bounded(scheduler_t *state, int32_t pusher) noexcept nogil:
    """DSSP, Algorithm 1, line 17, in the policy's reading of it; `pusher`, the slowest, has pushed, or left (-1).

    No worker is released at other times: the slowest clock changes at no other time, and a waiting worker is further ahead than
    `low`, so that only the next push of the slowest, or a higher clock of it, can release the worker. A pusher that has just
    begun to wait is not released by its own push.
    """
    cdef int64_t reach = _reach(&state.policy)
    cdef bint keeps_pusher = pusher >= 0 and state_workers(state)[pusher].waiting == WAITS_FOR_ALL
    if keeps_pusher:
        state_stop_waiting(state, pusher)
    state_grant_waiting(state)
    if keeps_pusher:
        state_wait(state, pusher, WAITS_FOR_ALL)
    if reach < INT64_MAX:
        state_grant_within(state, state_slowest_clock(state) + reach)


# -- events ----------------------------------------------------------------------------------------

cdef inline void _set_time(scheduler_t *state, int64_t now_ns) noexcept nogil:
    FPS_FAILPOINT()
    state.now_ns = max(state.now_ns, now_ns)
    state.n_folds = 0


cdef int scheduler_push(
        scheduler_t *state, int32_t worker, int64_t now_ns, int64_t timestamp, int64_t samples) noexcept nogil:
    """Receive a push of `worker`; `timestamp` is the version that it was computed with, `samples` its batch.

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
    elif state.policy.tune_batches:
        batches_measure(state, worker, samples)
    w.push_ns[1] = w.push_ns[0]
    w.push_ns[0] = state.now_ns
    w.history = min(2, w.history + 1)
    state_advance(state, worker)
    if state.policy.grant == GRANT_NEXT_VERSION:
        state_wait(state, worker, WAITS_FOR_ALL)
    action = _receive(state, worker, timestamp)
    if state.policy.grant == GRANT_AT_ONCE or action == ACTION_DROP:
        state_grant(state, worker)
    elif state.policy.grant == GRANT_BOUNDED:
        _decide_bounded(state, worker)
        if was_slowest:
            _release_bounded(state, worker)
    elif state.policy.grant == GRANT_ROUND_ROBIN:
        state_wait(state, worker, WAITS_FOR_ALL)
        round_robin_grant(state)
    return action


cdef int scheduler_close(scheduler_t *state) noexcept nogil:
    """End a commit's last drain: under `combine` its pushes are one sum and one version."""
    if not state.policy.combine or state.n_kept == 0:
        return ACTION_NONE
    return _fold_all(state)


cdef int scheduler_leave(scheduler_t *state, int32_t worker, int64_t now_ns) noexcept nogil:
    """Retire `worker`, and grant the workers that waited only for it.

    Its kept pushes are still folded: at once where its place in an order would never come again, otherwise with their sum.
    """
    cdef worker_t *w = &state_workers(state)[worker]
    cdef bint was_slowest = state_slowest(state) == worker
    cdef int action
    if not w.live:
        return ACTION_NONE
    _set_time(state, now_ns)
    state_stop_waiting(state, worker)
    state_remove(state, worker)
    w.credit = w.batch = 0
    if state.policy.groups:
        _relay(state, w.leader)
    elif state.policy.fold == FOLD_IN_ORDER and w.kept:
        _list_fold(state, worker)
    elif w.kept and w.kept_version == state.version:
        state.n_arrived -= 1
    action = _fold_complete(state)
    if state.policy.grant == GRANT_BOUNDED and state.n_live > 0 and was_slowest:
        _release_bounded(state, -1)
    elif state.policy.grant == GRANT_ROUND_ROBIN:
        round_robin_space(state)
        round_robin_grant(state)
    return action


cdef void scheduler_join(scheduler_t *state, int32_t worker, int64_t now_ns, int64_t clock) noexcept nogil:
    """Admit a worker that is not live and has no retained pushes, with an empty history and its first step granted.

    It starts at `clock`, or for a negative `clock` at the slowest live worker's. No worker waits for less than before, so no
    other is granted a step. A sum that was nearly complete waits for the joiner, too. Where grants keep a gap, so does that of
    the first step: until then `granted` is 0.
    """
    cdef worker_t *w = &state_workers(state)[worker]
    FPS_ASSERT(not w.live)
    _set_time(state, now_ns)
    if clock < 0:
        clock = state_slowest_clock(state) if state.n_live > 0 else w.clock
    if state.policy.grant == GRANT_ROUND_ROBIN:
        round_robin_join(state, worker, clock)
    else:
        state_add(state, worker, clock, -1)
    w.granted = clock + 1
    w.granted_at = state.sequence
    w.granted_ns = state.now_ns
    w.push_ns[0] = w.push_ns[1] = w.kept_version = w.credit = w.relayed = w.iteration_ns = w.base_batch = w.batch = 0
    w.kept = w.said_leave = w.history = w.waiting = w.measured = 0
    w.fit_n = w.fit_batch = w.fit_ns = w.fit_batch_batch = w.fit_batch_ns = w.line_constant = w.line_slope = 0
    if state.policy.grant == GRANT_ROUND_ROBIN:
        w.granted = w.granted_at = 0
        state_wait(state, worker, WAITS_FOR_ALL)
        round_robin_space(state)
        round_robin_grant(state)


cdef int64_t scheduler_due(const scheduler_t *state) noexcept nogil:
    """The deadline of the next timer, or NEVER_NS."""
    if state.policy.grant == GRANT_ROUND_ROBIN:
        return round_robin_due(state)
    return state.quorum_due_ns


cdef int scheduler_fire(scheduler_t *state) noexcept nogil:
    """Fire the next timer, at the time of its deadline. There must be one."""
    _set_time(state, scheduler_due(state))
    if state.policy.grant == GRANT_ROUND_ROBIN:
        round_robin_grant(state)
        return ACTION_KEEP
    return _fold_all(state)
