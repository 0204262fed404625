"""Bounded staleness: who may go on under SSP and DSSP, and for how many extra steps.

DSSP is Zhao et al., "Dynamic Stale Synchronous Parallel Distributed Training for Deep Learning", Algorithms 1 and 2; SSP is its
special case without room between the bounds. What it refuses to know: what is folded.
"""

from libc.stdint cimport int32_t, int64_t

from fastps.kernels.roster cimport (
    RELEASE_NEXT_PUSH,
    policy_t,
    roster_fastest_clock,
    roster_grant,
    roster_slowest,
    roster_slowest_clock,
    roster_wait,
    roster_workers,
    scheduler_t,
    worker_t,
)


cdef int64_t _controller(const scheduler_t *state, int32_t worker) noexcept nogil:
    """DSSP, Algorithm 2: how many extra steps lead to the shortest wait for the slowest worker.

    Line 8 asks for the pair (k, r) that minimizes |Sim_slowest[k] - Sim_p[r]|; for each r only the two k beside the crossing
    can be it, so r_max + 1 divisions do instead of (r_max + 1)^2 comparisons. Ties: the smallest r.
    """
    cdef worker_t *p = &roster_workers(state)[worker]
    cdef worker_t *slowest = &roster_workers(state)[roster_slowest(state)]
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


cdef void bounded_decide(scheduler_t *state, int32_t worker) noexcept nogil:
    """DSSP, Algorithm 1, lines 3 to 16. With low == high the controller has no room, and this is SSP.

    As printed, line 14 sends OK without taking from the credit that line 12 gave, so r* = 3 lets the worker begin four steps.
    """
    cdef const policy_t *policy = &state.policy
    cdef worker_t *p = &roster_workers(state)[worker]
    cdef int64_t gap = p.clock - roster_slowest_clock(state)
    cdef bint within = not policy.hard_bound or gap <= policy.high
    if p.credit > 0:
        if within:
            p.credit -= 1
            roster_grant(state, worker)
        else:
            roster_wait(state, worker)
        return
    if gap <= policy.low:
        roster_grant(state, worker)
        return
    if policy.high > policy.low and p.clock == roster_fastest_clock(state):
        p.credit = _controller(state, worker)
        if policy.hard_bound:
            p.credit = min(p.credit, max(<int64_t> 0, policy.high - gap))
        if p.credit > 0:
            roster_grant(state, worker)
            return
    roster_wait(state, worker)


cdef void bounded_release(scheduler_t *state, int32_t pusher, bint slowest_moved) noexcept nogil:
    """DSSP, Algorithm 1, line 17, in the policy's reading of it."""
    cdef const policy_t *policy = &state.policy
    cdef int64_t slowest_clock = roster_slowest_clock(state)
    cdef int32_t worker = state.first_waiting, following
    cdef int64_t gap
    cdef bint by_push
    while worker >= 0:
        following = roster_workers(state)[worker].next_waiting
        gap = roster_workers(state)[worker].clock - slowest_clock
        by_push = policy.release == RELEASE_NEXT_PUSH and slowest_moved and worker != pusher
        if gap <= policy.low or (by_push and (not policy.hard_bound or gap <= policy.high)):
            roster_grant(state, worker)
        worker = following
