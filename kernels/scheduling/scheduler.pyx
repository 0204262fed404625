"""The scheduler: which pushes are folded and who may go on, as a pure function of state and event.

No clock, no input or output, no Python object inside: time comes in as an argument, decisions go out. The live store and the
simulator run this same object code. What it refuses to know: gradients, weights, memory of other processes, and the names of
the disciplines (fastps/job/policy.py turns a name into values).

An event is a push, a leave, or a timer. Its answer is an action (what is folded), with grants written into the workers of the
roster. Whoever brings events fires every timer that is due at or before an event's time before that event, and says when a
drain ends: events that were found together, and are committed together.
"""

from libc.stdint cimport int32_t, int64_t, uintptr_t

from fastps.kernels.base.atomics cimport FPS_ASSERT
from fastps.kernels.base.failpoints cimport fps_plain_store
from fastps.kernels.scheduling.bounded_staleness cimport bounded_decide, bounded_release
from fastps.kernels.scheduling.policy cimport policy_from_values
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
    policy_t,
    prefetch,
    roster_add,
    roster_advance,
    roster_begin,
    roster_bytes,
    roster_catch_up,
    roster_copy,
    roster_folds,
    roster_grant,
    roster_grant_waiting,
    roster_initialise,
    roster_links,
    roster_remove,
    roster_slowest,
    roster_slowest_clock,
    roster_stop_waiting,
    roster_touch,
    roster_touched,
    roster_wait,
    roster_workers,
    scheduler_t,
    worker_t,
)


# -- folds -----------------------------------------------------------------------------------------

cdef int _fold_all(scheduler_t *state) noexcept nogil:
    """The sum is complete: one fold of all that was kept, and everyone who waits for the version goes on."""
    fps_plain_store()
    state.version += 1
    state.n_arrived = 0
    state.n_kept = 0
    state.quorum_due_ns = NEVER_NS
    state.folded_ns = state.now_ns
    if state.policy.grant == GRANT_NEXT_VERSION:
        roster_grant_waiting(state)
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
        w = &roster_workers(state)[state.fold_next]
        if w.kept == 0:
            break
        _list_fold(state, state.fold_next)
        state.fold_next = w.next_live
    return ACTION_FOLD_LIST if state.n_folds else ACTION_KEEP


cdef void _list_fold(scheduler_t *state, int32_t worker) noexcept nogil:
    cdef worker_t *w = &roster_workers(state)[worker]
    FPS_ASSERT(w.kept == 1 and state.n_folds < state.n_workers)
    w.kept = 0
    roster_touch(state, worker)
    roster_folds(state)[state.n_folds] = worker
    state.n_folds += 1
    state.version += 1
    state.folded_ns = state.now_ns


# -- a tree of servers (Rudra-adv, section 3.3) ------------------------------------------------------

cdef inline void _pass_on(scheduler_t *state, int32_t worker) noexcept nogil:
    cdef worker_t *w = &roster_workers(state)[worker]
    w.relayed += w.kept
    w.kept = 0
    roster_touch(state, worker)


cdef void _relay(scheduler_t *state, int32_t leader) noexcept nogil:
    """A leaf that holds a push for each of its live workers passes all on to the root."""
    cdef worker_t *leaf = &roster_workers(state)[leader]
    cdef int32_t worker = leaf.leaf_first, following
    if leaf.leaf_kept == 0 or leaf.leaf_kept < leaf.leaf_live:
        return
    if leaf.leaf_kept * <int64_t> MOSTLY < leaf.leaf_end - leader:
        while worker >= 0:
            following = roster_workers(state)[worker].next_kept
            _pass_on(state, worker)
            worker = following
    else:
        for worker in range(leader, leaf.leaf_end):
            if roster_workers(state)[worker].kept:
                _pass_on(state, worker)
    state.n_kept += leaf.leaf_kept
    leaf.leaf_kept = 0
    leaf.leaf_first = -1
    roster_touch(state, leader)


cdef void _keep(scheduler_t *state, int32_t worker) noexcept nogil:
    """FOLD_COUNT: the push joins the sum, or in a tree its leaf's."""
    cdef worker_t *w = &roster_workers(state)[worker]
    cdef worker_t *leaf = &roster_workers(state)[w.leader]
    if state.policy.groups == 0:
        state.n_kept += 1
        return
    if w.kept == 0:
        w.next_kept = leaf.leaf_first
        leaf.leaf_first = worker
    w.kept += 1
    leaf.leaf_kept += 1
    roster_touch(state, w.leader)
    _relay(state, w.leader)


cdef int _receive(scheduler_t *state, int32_t worker, int64_t timestamp) noexcept nogil:
    """What becomes of a push that arrives now."""
    cdef worker_t *w = &roster_workers(state)[worker]
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
    fps_plain_store()
    state.now_ns = max(state.now_ns, now_ns)
    state.n_folds = 0


cdef int scheduler_push(
        scheduler_t *state, int32_t worker, int64_t now_ns, int64_t timestamp, int64_t samples) noexcept nogil:
    """A push of `worker` arrives; `timestamp` is the version that it was computed with, `samples` its batch.

    Returns what to fold; grants are written into the workers.
    """
    cdef worker_t *w = &roster_workers(state)[worker]
    cdef bint was_slowest = roster_slowest(state) == worker
    cdef int action
    prefetch(&roster_links(state)[worker])
    FPS_ASSERT(w.live)
    _set_time(state, now_ns)
    if state.policy.grant == GRANT_ROUND_ROBIN:
        round_robin_measure(state, worker, samples)
    elif state.policy.grant == GRANT_BOUNDED:
        roster_stop_waiting(state, worker)  # granted by another shard alone; it waits by its clock, which rises
    w.push_ns[1] = w.push_ns[0]
    w.push_ns[0] = state.now_ns
    w.history = min(2, w.history + 1)
    roster_advance(state, worker)
    if state.policy.grant == GRANT_NEXT_VERSION:
        roster_wait(state, worker)
    action = _receive(state, worker, timestamp)
    if state.policy.grant == GRANT_AT_ONCE or action == ACTION_DROP:
        roster_grant(state, worker)
    elif state.policy.grant == GRANT_BOUNDED:
        bounded_decide(state, worker)
        if was_slowest:
            bounded_release(state, worker)
    elif state.policy.grant == GRANT_ROUND_ROBIN:
        roster_wait(state, worker)
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
    cdef const link_t *link = &roster_links(state)[worker]
    if soon:
        if link.previous >= 0:
            prefetch(&roster_links(state)[link.previous])
        if link.next >= 0:
            prefetch(&roster_links(state)[link.next])
        return
    prefetch(link)
    prefetch(&roster_workers(state)[worker])
    if state.policy.grant == GRANT_ROUND_ROBIN:
        round_robin_expect(state, worker)
    elif state.policy.fold != FOLD_EACH:
        prefetch(&roster_workers(state)[worker].cursor)


cdef int scheduler_leave(scheduler_t *state, int32_t worker, int64_t now_ns) noexcept nogil:
    """`worker` leaves in good order: it is counted no more, and whoever waited only for it goes on.

    What it had pushed and was kept is folded all the same: at once where its place in an order would never come again,
    otherwise with its sum.
    """
    cdef worker_t *w = &roster_workers(state)[worker]
    cdef bint was_slowest = roster_slowest(state) == worker
    cdef int action = ACTION_NONE
    if not w.live:
        return ACTION_NONE
    _set_time(state, now_ns)
    roster_stop_waiting(state, worker)
    roster_remove(state, worker)
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
    cdef worker_t *w = &roster_workers(state)[worker]
    FPS_ASSERT(not w.live)
    _set_time(state, now_ns)
    if clock < 0:
        clock = roster_slowest_clock(state) if state.n_live > 0 else w.clock
    if state.policy.grant == GRANT_ROUND_ROBIN and state.n_live > 0:
        round_robin_join(state, worker, clock)
    else:
        roster_add(state, worker, clock, -1)
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


# -- the same functions for Python: tests, and whoever wants to look -------------------------------

cdef scheduler_t *_on_cache_lines(bytearray memory):
    return <scheduler_t *> ((<uintptr_t> <char *> memory + 63) & ~<uintptr_t> 63)


cdef class Scheduler:
    """The scheduler with a memory of its own, one commit an event. Values as in fastps.Policy; times in nanoseconds.

    With `alternate` the commits alternate between two records, of which each follows the other by what that one's commit has
    touched, as in the arena: slower, and for tests.

    >>> ssp = Scheduler(2, fold="each", grant="bounded", low=1, high=1, release="printed")
    >>> ssp.push(0, 10)  # worker 0 is one ahead: within the bound
    ([0], [0])
    >>> ssp.push(0, 20)  # two ahead: it waits
    ([0], [])
    >>> ssp.push(1, 30)  # the slowest moved
    ([1], [0, 1])
    """

    def __cinit__(self, int workers, *, bint alternate=False, **values):
        cdef policy_t policy
        if workers < 1:
            raise ValueError(f"expected at least 1 worker, found {workers}")
        policy_from_values(&policy, values, workers)
        self.dropped_since = {}
        self.memory = bytearray(roster_bytes(workers) + 63)
        self.state = _on_cache_lines(self.memory)
        roster_initialise(self.state, workers, &policy)
        if alternate:
            self.other_memory = bytearray(roster_bytes(workers) + 63)
            self.other = _on_cache_lines(self.other_memory)
            roster_copy(self.other, self.state)

    cdef void _begin(self) noexcept:
        """Begin an event's commit, in the other record where there is one."""
        if self.other != NULL:
            roster_catch_up(self.other, self.state)
            self.state, self.other = self.other, self.state
        roster_begin(self.state)

    cdef worker_t *_worker(self, int worker) except NULL:
        if not 0 <= worker < self.state.n_workers:
            raise IndexError(f"expected a worker of 0 to {self.state.n_workers - 1}, found {worker}")
        return &roster_workers(self.state)[worker]

    cdef tuple _outcome(self, int action, int worker):
        cdef int32_t i, index
        cdef worker_t *w
        folded = []
        granted = []
        for i in range(self.state.n_touched_workers):
            index = roster_touched(self.state)[i]
            if roster_workers(self.state)[index].granted_at == self.state.sequence:
                granted.append(index)
        if action == ACTION_FOLD:
            folded.append(worker)
            self._worker(worker).cursor = self._worker(worker).consumed
            roster_touch(self.state, worker)
        elif action == ACTION_DROP:
            self.dropped_since[worker] = self.dropped_since.get(worker, 0) + 1
        elif action == ACTION_FOLD_ALL:
            for index in range(self.state.n_workers):
                w = &roster_workers(self.state)[index]
                ready = w.relayed if self.state.policy.groups else w.consumed - w.cursor
                folded.extend([index] * (ready - self.dropped_since.pop(index, 0)))
                w.cursor += ready
                w.relayed = 0
                roster_touch(self.state, index)
        elif action == ACTION_FOLD_LIST:
            for i in range(self.state.n_folds):
                folded.append(roster_folds(self.state)[i])
                self._worker(roster_folds(self.state)[i]).cursor += 1
        return folded, sorted(granted)

    def push(self, int worker, int64_t now_ns, timestamp=None, int64_t samples=0):
        """Receive a push of `worker` at `now_ns`; returns (workers whose pushes fold now, workers granted).

        `timestamp` is the version that it was computed with, by default the newest; `samples` its batch.
        """
        cdef worker_t *w = self._worker(worker)
        if not w.live or (w.waiting and not self.state.policy.repeats):
            raise ValueError(f"worker {worker} may not push: it {'waits' if w.live else 'has left'}")
        self._begin()
        w = self._worker(worker)
        w.consumed += 1
        return self._outcome(scheduler_push(
            self.state, worker, now_ns, self.state.version if timestamp is None else timestamp, samples), worker)

    def close(self):
        """A drain ends, of the pushes since the last one: what they are under `combine`; returns the same as push."""
        self._begin()
        return self._outcome(scheduler_close(self.state), 0)

    def leave(self, int worker, int64_t now_ns):
        """`worker` leaves in good order; returns the same as push."""
        self._worker(worker)
        self._begin()
        return self._outcome(scheduler_leave(self.state, worker, now_ns), worker)

    def join(self, int worker, int64_t now_ns, int64_t clock=-1):
        """A worker that had left joins at `clock`, by default the slowest live worker's; returns the same as push."""
        cdef worker_t *w = self._worker(worker)
        if w.live or w.consumed != w.cursor:
            raise ValueError(f"worker {worker} may not join: {'it lives' if w.live else 'a push of it is not folded yet'}")
        self._begin()
        scheduler_join(self.state, worker, now_ns, clock)
        return self._outcome(ACTION_NONE, worker)

    def due_ns(self):
        """The deadline of the next timer, or None."""
        cdef int64_t due_ns = scheduler_due(self.state)
        return None if due_ns == NEVER_NS else due_ns

    def fire(self):
        """The event of the timer that is due at `due_ns`; returns the same as push."""
        if scheduler_due(self.state) == NEVER_NS:
            raise ValueError("no timer is set")
        self._begin()
        return self._outcome(scheduler_fire(self.state), 0)

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

    def dropped(self, int worker):
        """Pushes of `worker` that came too late."""
        return self._worker(worker).dropped

    def batch(self, int worker):
        """The batch that the last grant of `worker` carried; 0 while none was tuned."""
        return self._worker(worker).batch

    def slowest(self):
        """The slowest live worker, or -1."""
        return roster_slowest(self.state)

    @property
    def version(self):
        """Updates so far."""
        return self.state.version
