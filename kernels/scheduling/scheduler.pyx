"""The scheduler as a Python object with memory of its own, for tests, the tables of papers, and the benchmark.

It calls the same decisions as the live store and the simulator.
"""

from libc.stdint cimport int32_t, int64_t, uintptr_t

from fastps.kernels.scheduling.decisions cimport *
from fastps.kernels.scheduling.policy cimport policy_from_values
from fastps.kernels.scheduling.state cimport *


cdef scheduler_t *_on_cache_lines(bytearray memory):
    return <scheduler_t *> ((<uintptr_t> <char *> memory + 63) & ~<uintptr_t> 63)


cdef class Scheduler:
    """The scheduler with a memory of its own, one commit an event. Values as in fastps.Policy; times in nanoseconds.

    With `alternate` the commits alternate between two records, and each follows the other by the entries that are dirty, as in
    the arena: slower, and for tests.

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
        self.memory = bytearray(state_size(workers) + 63)
        self.state = _on_cache_lines(self.memory)
        state_initialise(self.state, workers, &policy)
        if alternate:
            self.other_memory = bytearray(state_size(workers) + 63)
            self.other = _on_cache_lines(self.other_memory)
            state_copy(self.other, self.state)

    cdef void _begin(self) noexcept:
        """Begin an event's commit, in the other record where there is one."""
        if self.other != NULL:
            state_catch_up(self.other, self.state)
            self.state, self.other = self.other, self.state
        state_begin(self.state)

    cdef worker_t *_worker(self, int worker) except NULL:
        if not 0 <= worker < self.state.n_workers:
            raise IndexError(f"expected a worker of 0 to {self.state.n_workers - 1}, found {worker}")
        return &state_workers(self.state)[worker]

    cdef tuple _outcome(self, int action, int worker):
        cdef int32_t i, index
        cdef worker_t *w
        folded = []
        granted = []
        for i in range(self.state.n_dirty_workers):
            index = state_dirty(self.state)[i]
            if state_workers(self.state)[index].granted_at == self.state.sequence:
                granted.append(index)
        if action == ACTION_FOLD:
            folded.append(worker)
            self._worker(worker).cursor = self._worker(worker).consumed
            state_mark_dirty(self.state, worker)
        elif action == ACTION_FOLD_ALL:
            for index in range(self.state.n_workers):
                w = &state_workers(self.state)[index]
                ready = kept = w.relayed if self.state.policy.groups else w.consumed - w.cursor
                if self.state.policy.fold == FOLD_QUORUM:  # without those that were dropped
                    kept = w.kept if w.kept_version == self.state.version - 1 else 0
                folded.extend([index] * kept)
                w.cursor += ready
                w.relayed = 0
                state_mark_dirty(self.state, index)
        elif action == ACTION_FOLD_LIST:
            for i in range(self.state.n_folds):
                folded.append(state_folds(self.state)[i])
                self._worker(state_folds(self.state)[i]).cursor += 1
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
        """End a drain: under `combine` the pushes since the last one are one sum. Returns the same as push."""
        self._begin()
        return self._outcome(scheduler_close(self.state), 0)

    def leave(self, int worker, int64_t now_ns):
        """Let `worker` leave in good order; returns the same as push."""
        self._worker(worker)
        self._begin()
        return self._outcome(scheduler_leave(self.state, worker, now_ns), worker)

    def join(self, int worker, int64_t now_ns, int64_t clock=-1):
        """Let a worker that had left join at `clock`, by default the slowest live worker's; returns the same as push."""
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
        """Fire the timer that is due at `due_ns`; returns the same as push."""
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
        return state_slowest(self.state)

    @property
    def version(self):
        """Updates so far."""
        return self.state.version
