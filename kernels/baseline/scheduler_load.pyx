"""A scheduler's load for benchmarks of decisions: pushes in random order, played without Python in between.

Every worker that may push is equally likely to be next, so that clocks drift apart and no processor can predict the memory
accesses. The load is no simulation: time advances by a constant from push to push, and workers have no speeds.
"""

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free

from fastps.kernels.scheduling.state cimport *
from fastps.kernels.scheduling.decisions cimport scheduler_due, scheduler_fire, scheduler_push
from fastps.kernels.scheduling.scheduler cimport Scheduler

cdef extern from "base/rng.h" nogil:
    uint64_t fps_next_word(uint64_t *state)

cdef enum:
    STEP_NS = 1000   # from push to push
    SAMPLES = 32     # of a push whose grant carried no batch
    DRAWN = 4        # numbers drawn before they are used, so that this module's own cache misses are not in a decision's time

# A worker that may push, and the version of its last grant: its push's timestamp, as a store's worker sends it.
cdef struct ready_t:
    int64_t read_version
    int32_t worker


cdef class SchedulerLoad:
    """Random pushes to `scheduler`, which must get no other events meanwhile.

    >>> from fastps.kernels.scheduling.scheduler import Scheduler
    >>> scheduler = Scheduler(4, fold="each", grant="at-once")
    >>> SchedulerLoad(scheduler).play(100)
    100
    >>> sum(scheduler.clock(worker) for worker in range(4))
    100
    """

    cdef readonly Scheduler scheduler
    cdef ready_t *ready
    cdef int32_t n_ready
    cdef uint64_t random
    cdef uint64_t drawn[DRAWN]
    cdef uint32_t n_drawn
    cdef int64_t now_ns
    cdef readonly int64_t decisions  # events answered so far: pushes and timers

    def __cinit__(self, Scheduler scheduler not None, uint64_t seed=0):
        cdef int32_t i
        if scheduler.other != NULL:
            raise ValueError("expected a scheduler with one record, found one whose commits alternate")
        self.scheduler = scheduler
        self.random = seed
        self.ready = <ready_t *> calloc(scheduler.state.n_workers, sizeof(ready_t))
        if self.ready == NULL:
            raise MemoryError("expected memory for the workers that may push, found none")
        for i in range(DRAWN):
            self.drawn[i] = self._draw()
        for i in range(scheduler.state.n_workers):
            if state_workers(scheduler.state)[i].live and not state_workers(scheduler.state)[i].waiting:
                self.ready[self.n_ready].worker = i
                self.n_ready += 1

    def __dealloc__(self):
        free(self.ready)

    def play(self, int64_t events):
        """Play `events` pushes; timers that are due, or for which all workers wait, fire before the next push.

        Returns the number of folds. Raises RuntimeError if no worker may push and no timer is set.
        """
        cdef int64_t played = 0, version = self.scheduler.state.version
        with nogil:
            while played < events and self._play_next():
                played += 1
        if played < events:
            raise RuntimeError(f"expected {events} pushes, found that after {played} no worker may push and no timer is set")
        return self.scheduler.state.version - version

    cdef bint _play_next(self) noexcept nogil:
        """Play a push of a random worker; return False if no worker may push."""
        cdef scheduler_t *state = self.scheduler.state
        cdef ready_t chosen
        cdef worker_t *w
        cdef int64_t samples = SAMPLES
        cdef int32_t place
        self.now_ns += STEP_NS
        self._fire_timers(state)
        if self.n_ready == 0:
            return False
        place = self._choose()
        chosen = self.ready[place]
        self.n_ready -= 1
        self.ready[place] = self.ready[self.n_ready]
        w = &state_workers(state)[chosen.worker]
        state_begin(state)
        w.consumed += 1
        if state.policy.tune_batches and w.batch > 0:
            samples = w.batch
        scheduler_push(state, chosen.worker, self.now_ns, chosen.read_version, samples)
        self.decisions += 1
        self._note_grants(state)
        return True

    cdef inline void _fire_timers(self, scheduler_t *state) noexcept nogil:
        """Fire all due timers, and the next ones while no worker may push."""
        cdef int64_t due_ns = scheduler_due(state)
        while due_ns != NEVER_NS and (due_ns <= self.now_ns or self.n_ready == 0):
            self.now_ns = max(self.now_ns, due_ns)
            state_begin(state)
            scheduler_fire(state)
            self.decisions += 1
            self._note_grants(state)
            due_ns = scheduler_due(state)

    cdef inline uint64_t _draw(self) noexcept nogil:
        """Draw a number below 2^32."""
        return fps_next_word(&self.random) >> 32

    cdef inline int32_t _choose(self) noexcept nogil:
        """Choose a random worker that may push, and prefetch a choice of a few calls later."""
        cdef uint64_t *drawn = &self.drawn[self.n_drawn % DRAWN]
        cdef int32_t place = <int32_t> ((drawn[0] * <uint64_t> self.n_ready) >> 32)
        drawn[0] = self._draw()
        self.n_drawn += 1
        prefetch(&self.ready[(drawn[0] * <uint64_t> self.n_ready) >> 32])
        return place

    cdef inline void _note_grants(self, const scheduler_t *state) noexcept nogil:
        """Let every worker that this event granted a step read the newest version and push."""
        cdef int32_t i, worker
        for i in range(state.n_dirty_workers):
            worker = state_dirty(state)[i]
            if state_workers(state)[worker].granted_at == state.sequence:
                self.ready[self.n_ready].worker = worker
                self.ready[self.n_ready].read_version = state.version
                self.n_ready += 1
