"""A lane that waits, as a step machine: what it does next is decided here, and nowhere else.

A driver asks `want`, does what it says, and asks again until it wants NOTHING. `want` combines, so a worker that waits does the
server's work. It never waits itself, reads no clock and calls no Python: live workers, servers, and simulated processes are
driven alike.
"""

cimport cython
from libc.stdint cimport INT32_MAX, INT64_MAX

from fastps.kernels.base.atomics cimport fps_event_load, fps_yield
from fastps.kernels.base.failpoints cimport *
from fastps.kernels.combining.lock_word cimport *
from fastps.kernels.protocol.lane cimport LANE_UNSERVED, PUSH_EXPELLED

# For Python: the same numbers.
NOTHING, REST, PAUSE, CHECK_PEERS = WANT_NOTHING, WANT_REST, WANT_PAUSE, WANT_CHECK_PEERS
EXPEL, TAKE_OVER, EXPELLED, FAILURE = WANT_EXPEL, WANT_TAKE_OVER, WANT_EXPELLED, WANT_FAILURE
SLICE, SHORT_WAIT = SLICE_NS, SHORT_WAIT_NS


@cython.final
cdef class Wait:
    """The waits of one lane, one after the other. Threads that share a lane have a Wait each, and a lock around `want`.

    Attributes:
        lane: the lane that waits.
        spins: the polls of a rest before it sleeps.
        short_wait_ns: the duration below which a wait counts as short: the one after it begins awake.
        last_wait_ns: the duration of the last wait for a step or a call, or of this one so far: the estimate for the next.
        slice_ns: the longest duration of the rest or the pause that is wanted now.
        outcome: of FAILURE: what `try_combine` returned.
        checked_ns: when CHECK_PEERS was wanted last; the owner may set it.
        is_awake: whether the rest that is wanted now is a few polls, not a sleep.
        held: whether the lane holds a shard lock for a fold whose helper is not done. No wait is over before it is.
    """

    def __cinit__(self, Lane lane not None):
        self.lane, self.short_wait_ns = lane, SHORT_WAIT_NS

    cdef void _begin(self, int goal, int64_t now_ns, int64_t longest_ns) noexcept nogil:
        self.goal = goal
        self.granted, self.done, self.shards = INT64_MAX, 0, self.lane.n_shards
        self.longest_ns, self.began_ns, self.until_ns = longest_ns, now_ns, INT64_MAX
        self.checked_ns = self.checked_ns or now_ns
        self.is_told = self.must_combine = False
        self.combines = goal not in (GOAL_STEP, GOAL_OWN)  # the push before a step has just combined
        if goal != GOAL_CALL:  # a server reads it before each time that it combines, and at no other time
            self.seen = fps_event_load(&self.lane.words.event)
        self.rounds = 0
        if goal == GOAL_OUTCOME or (not self.spins and self.last_wait_ns < self.short_wait_ns):
            self.rounds = INT32_MAX if goal == GOAL_CALL else ROUNDS_AWAKE

    cpdef void begin_step(
        self, int64_t granted, uint64_t done, int64_t now_ns, uint32_t shards=0, int64_t until_ns=INT64_MAX
    ) noexcept nogil:
        """Wait until `granted` steps are granted by so many shards (0: by all), and `done` descriptors are done with.

        The wait is over at `until_ns` at the latest, but for a fold that this lane has begun.
        """
        self._begin(GOAL_STEP, now_ns, SLICE_NS)
        self.granted, self.done, self.until_ns = granted, done, until_ns
        if shards:
            self.shards = shards

    def take_step(self, int64_t granted, uint64_t done, int64_t now_ns, uint32_t shards=0):
        """Begin the wait of `begin_step` with its first rest, unless something else is due. Returns whether it is over.

        Most waits are. If this one is not, the driver goes on with `want`. Releases the GIL.
        """
        cdef bint is_over
        with nogil:
            self.begin_step(granted, done, now_ns, shards)
            is_over = self._is_reached(now_ns)
            if not is_over and now_ns - self.checked_ns < SLICE_NS and not self.lane.is_expelled():
                self.combines = True
                self._choose_rest(now_ns)
                is_over = self._rest()
        return is_over

    cpdef void begin_join(self, int64_t now_ns) noexcept nogil:
        """Wait until every shard counts this worker."""
        self._begin(GOAL_JOIN, now_ns, 500_000)

    cpdef void begin_last(self, uint32_t started, int64_t now_ns) noexcept nogil:
        """Wait until all of the `started` initial workers have come, no other worker will push, and every push is decided."""
        self._begin(GOAL_LAST, now_ns, 5_000_000)
        self.started = started

    cpdef void begin_calls(self, int64_t now_ns) noexcept nogil:
        """Combine whenever the lane is called, as a server. This wait is never over."""
        self._begin(GOAL_CALL, now_ns, SLICE_NS)

    def begin_own(self, int64_t pause_ns, int64_t now_ns, bint combines=False):
        """Wait for something of the driver's own, with pauses of `pause_ns`. The lane `combines` meanwhile, or does nothing."""
        self._begin(GOAL_ANY if combines else GOAL_OWN, now_ns, pause_ns)

    cpdef void begin_outcome(self, int outcome, int64_t now_ns) noexcept nogil:
        """Wait until the combine that returned `outcome` is over: a helper may still have a chunk of its fold."""
        self._begin(GOAL_OUTCOME, now_ns, HELD_NS)
        self.set_outcome(outcome)

    cpdef void set_outcome(self, int outcome) noexcept nogil:
        """Take the outcome of a combine that the driver made, when it passed a stopped peer by."""
        self.outcome = outcome
        self.is_told = True

    def want(self, int64_t now_ns):
        """What the driver has to do next: NOTHING, REST, PAUSE, CHECK_PEERS, EXPEL, TAKE_OVER, EXPELLED or FAILURE.

        Releases the GIL.
        """
        cdef int found
        with nogil:
            found = self._want(now_ns)
        return found

    cdef int _want(self, int64_t now_ns) noexcept nogil:
        cdef int found
        if self.goal == GOAL_CALL and fps_event_load(&self.lane.words.event) != self.seen:
            self.last_wait_ns = now_ns - self.began_ns
            self._begin(GOAL_CALL, now_ns, SLICE_NS)
        if self._is_reached(now_ns):
            return WANT_NOTHING
        if now_ns - self.checked_ns >= SLICE_NS:
            self.checked_ns = now_ns
            self.must_combine, self.is_told = self.goal != GOAL_OWN, False  # the driver may recover a lock, and hold it
            return WANT_CHECK_PEERS
        if self.combines or self.must_combine or self.is_told:
            found = self._combine(now_ns)
            if found != WANT_NOTHING:
                return found
            if self._is_reached(now_ns):
                return WANT_NOTHING
        self.combines = self.goal != GOAL_OWN
        if self.goal != GOAL_CALL and self.lane.is_expelled():
            return WANT_EXPELLED
        return self._choose_rest(now_ns)

    cdef bint _is_reached(self, int64_t now_ns) noexcept nogil:
        """Whether the wait is over. It has lasted until now."""
        if self.held or self.must_combine or self.is_told:
            return False
        if self.goal == GOAL_STEP:
            self.last_wait_ns = now_ns - self.began_ns
            return now_ns >= self.until_ns or self.lane._reached(self.granted, self.done, self.shards)
        if self.goal == GOAL_JOIN:
            return self.lane.arena.has_joined(self.lane.index)
        if self.goal == GOAL_LAST:
            return not self.combines and self.lane._is_last(self.started)
        return self.goal == GOAL_OUTCOME and not self.combines

    cdef int _combine(self, int64_t now_ns) noexcept nogil:
        """Combine, or look at the outcome that was told. WANT_NOTHING: the lane may go on."""
        if not self.is_told:
            if not fps_mutant(FPS_MUTANT_CALL_LATE):
                self.seen = fps_event_load(&self.lane.words.event)  # before: a post that this combine misses moves it later
            self.outcome = self.lane._try_combine(now_ns)
            if fps_mutant(FPS_MUTANT_CALL_LATE):
                self.seen = fps_event_load(&self.lane.words.event)
        self.is_told = self.must_combine = self.combines = False
        self.held = self.outcome == COMBINE_AWAITING
        # What was posted before is not decided yet: no wait is over before the lane has combined again.
        self.must_combine = self.outcome in (COMBINE_BAD_DESCRIPTOR, LANE_UNSERVED)
        if self.must_combine:
            return WANT_EXPEL if self.outcome == COMBINE_BAD_DESCRIPTOR else WANT_TAKE_OVER
        if self.outcome in (COMBINE_DONE, COMBINE_BUSY, COMBINE_AWAITING):
            return WANT_NOTHING
        return WANT_EXPELLED if self.outcome == PUSH_EXPELLED else WANT_FAILURE

    cdef int _choose_rest(self, int64_t now_ns) noexcept nogil:
        cdef int64_t due_ns = -1
        self.slice_ns = HELD_NS if self.held else min(self.longest_ns, self.until_ns - now_ns)
        if self.goal == GOAL_OWN:
            return WANT_PAUSE
        if not self.lane.served:  # else the server fires the timers
            due_ns = self.lane.due_ns()
        if due_ns >= 0:
            self.slice_ns = min(self.slice_ns, due_ns - now_ns if due_ns > now_ns else <int64_t> OVERDUE_NS)
        if self.goal in (GOAL_JOIN, GOAL_LAST, GOAL_ANY) and not self.held:
            return WANT_PAUSE
        # A core that is yielded may come back late, and miss a timer.
        self.is_awake = self.rounds > 0 and due_ns < 0 and now_ns - self.began_ns < self.short_wait_ns
        self.rounds -= self.is_awake
        return WANT_REST

    def rest(self):
        """Rest as was wanted: for a few polls, or asleep until the lane's event moves or the slice ends. Releases the GIL.

        A worker helps with folds meanwhile. Returns early on a signal, so that Python can run its handler.
        """
        with nogil:
            self._rest()

    cdef bint _rest(self) noexcept nogil:
        """Returns whether steps were waited for and are granted."""
        if self.held:
            if self.is_awake:
                fps_yield()
            else:
                self.lane._sleep(self.seen, 0, self.slice_ns)
        elif self.goal == GOAL_CALL:
            if not self.is_awake:
                self.lane._sleep(self.seen, self.spins, self.slice_ns)
            else:
                self.lane._poll_awake(self.seen, POLLS_AWAKE)
        elif self.is_awake:
            return self.lane._wait_awake(self.granted, self.done, POLLS_AWAKE, self.shards)
        else:
            return self.lane._wait(self.granted, self.done, self.spins, self.slice_ns, self.shards)
        return False
