"""Bounded staleness: which workers may continue under SSP and DSSP, and for how many extra steps.

DSSP is Zhao et al., "Dynamic Stale Synchronous Parallel Distributed Training for Deep Learning", Algorithms 1 and 2; SSP is its
special case without room between the bounds.
"""

from libc.stdint cimport INT64_MAX, int32_t, int64_t
from libc.stdlib cimport llabs

from fastps.kernels.scheduling.state cimport *


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


cdef void bounded_decide(scheduler_t *state, int32_t worker) noexcept nogil:
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


cdef void bounded_release(scheduler_t *state, int32_t pusher) noexcept nogil:
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
