"""The machine of a simulated job: processes that share one thread, a clock, and chance that stops and kills them.

Each process is a coroutine. At every access to shared memory (a failpoint) chance may let another process run, stop this one
for a while, or kill it. A dead process is never resumed, but another may take its place. Time is simulated, too: it moves with
every access, and jumps when all processes sleep. Each process may have a wrong clock. One seed gives one history. The invariant
checker looks at every event.

Of the arena it reads only what makes a death interesting: which process holds a shard lock, and which one helps.
"""

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

from fastps.kernels.base.failpoints cimport fps_failpoints
from fastps.kernels.shm.arena_h cimport FPS_LANE_FREE, fps_lock_owner, fps_member_generation, fps_member_state

cdef extern from "base/rng.h" nogil:
    uint64_t fps_next_word(uint64_t *state)

cdef enum:
    BEGINNING_NS = 1_000_000_000    # when a job begins
    MOST_RESTART_NS = 200_000_000
    YIELD_NS = 300_000          # what a yielded core is away at most
    MOST_STALL_NS = 200_000_000
    EVENT_NS = 128              # simulated time of an access, at most
    # Without a fault: enough for all processes to finish, or there is a deadlock.
    CALM_EVENTS = 4_000_000
    CALM_NS = 10_000_000_000

cdef Machine _machine = None  # whose processes run


cdef void _access_of_machine() noexcept nogil:
    if _machine.runs >= 0:
        _machine.at_access()


cdef void _sleep_of_machine(const uint32_t *event, uint32_t seen, int64_t slice_ns) noexcept nogil:
    _machine._sleep(event, seen, slice_ns)


cdef void _wake_of_machine(const uint32_t *event) noexcept nogil:
    _machine._wake_sleeper(event)


cdef void _yield_of_machine() noexcept nogil:
    _machine.pause(_machine.draw() % YIELD_NS)


cdef void _life_of_machine(int index) noexcept nogil:
    _machine.live(index)
    _machine.processes[index].state = ENDED


cdef class Machine:
    """Runs the processes of one job, which is a subclass: it sets `arena`, `checker`, the numbers of processes and places, and
    what the seed decides; then `play`.
    """

    def __cinit__(self):
        cdef int index
        for index in range(MAX_WORKERS):
            if not fps_coroutine_make(&self.coroutines[index]):
                raise MemoryError()
        self.runs = -1

    def __dealloc__(self):
        cdef int index
        for index in range(MAX_WORKERS):
            fps_coroutine_free(&self.coroutines[index])

    cdef void born(self, int32_t index) noexcept nogil:
        """Make the private memory of a process that is about to begin."""

    cdef void live(self, int32_t index) noexcept nogil:
        """All that a process does, from its beginning."""

    def play(self, double skew_ns, int64_t shared_least):
        """Run until no process is left or a check fails.

        Clocks are wrong by `skew_ns` at most. `shared_least`: the shortest fold that is shared, in floats moved.
        """
        global _machine
        cdef int64_t before = fps_failpoints.shared_least
        _machine = self
        fps_failpoints.at_access = _access_of_machine
        fps_failpoints.sleep = _sleep_of_machine
        fps_failpoints.wake = _wake_of_machine
        fps_failpoints.wait_a_little = _yield_of_machine
        fps_failpoints.shared_least = shared_least
        self._begin(skew_ns)
        with nogil:
            self._run()
        fps_failpoints.at_access = NULL
        fps_failpoints.sleep = NULL
        fps_failpoints.wake = NULL
        fps_failpoints.wait_a_little = NULL
        fps_failpoints.shared_least = before
        _machine = None

    cdef void _begin(self, double skew_ns) noexcept:
        cdef int32_t index
        cdef process_t *process
        cdef bint has_slow = self.draw() % 4 == 0
        cdef uint32_t weight = 400 if self.draw() % 2 else 8
        self.now_ns = self.calm_ns = BEGINNING_NS
        for index in range(self.n_processes):
            process = &self.processes[index]
            process.weight = weight
            if has_slow and self.draw() % 2:
                process.weight = 1
                self.faults.slow_processes += 1
            if skew_ns >= 1:
                process.skew_ns = <int64_t> (self.draw() % <uint64_t> (2 * skew_ns)) - <int64_t> skew_ns
                self.faults.skewed_clocks += 1
            self._begin_life(index)

    def outcome(self):
        """What happened, by name."""
        return {"events": self.events, "detection_s": self.worst_detection_ns / 1e9, **<dict> self.faults}

    # -- what processes ask for --------------------------------------------------------------------

    cdef uint64_t draw(self) noexcept nogil:
        """64 random bits."""
        return fps_next_word(&self.random)

    cdef int64_t clock(self, int32_t index) noexcept nogil:
        """The time that a process reads."""
        return self.now_ns + self.processes[index].skew_ns

    cdef void pause(self, int64_t duration_ns) noexcept nogil:
        """Sleep for a time that no event cuts short."""
        cdef process_t *me = &self.processes[self.runs]
        me.state = SLEEPS
        me.event = NULL
        me.until_ns = self.now_ns + duration_ns
        self._switch()

    cdef uint32_t deaths(self, int32_t index) noexcept nogil:
        """How many processes have died in this place."""
        return self.processes[index].generation + (self.processes[index].state in (DEAD, RESTARTS))

    cdef void notice(self, int32_t dead) noexcept nogil:
        """A survivor sees that the last process of this place is dead."""
        if not self.processes[dead].noticed:
            self.processes[dead].noticed = True
            self.worst_detection_ns = max(self.worst_detection_ns, self.now_ns - self.processes[dead].died_ns)

    # -- at an access ------------------------------------------------------------------------------

    cdef void at_access(self) noexcept nogil:
        """Between two accesses of the process that runs: check, and let chance decide which process continues."""
        cdef uint64_t draw = self.draw()
        cdef process_t *me = &self.processes[self.runs]
        cdef uint32_t factor
        self.events += 1
        self.calm_events += 1
        self.now_ns += draw & (EVENT_NS - 1)
        self.checker.look(self.runs)
        if self.calm_events > CALM_EVENTS or self.now_ns - self.calm_ns > <int64_t> CALM_NS:
            self.checker.fail(b"deadlock: no end after %ld events and %ld ns without a fault; worker %ld runs",
                              self.calm_events, self.now_ns - self.calm_ns, self.runs)
        if self.checker.message[0]:
            self.over = True
            self._switch()
        draw >>= 8
        factor = self.busy_factor if self.crashes_left + self.stalls_left > 0 and self._is_busy(self.runs) else 1
        if self.crashes_left > 0 and (draw & 0xffffff) < self.crash_share * factor and self._may_die(me):
            self.crashes_left -= 1
            self.faults.crashes += 1
            self.calm_events = 0
            self.calm_ns = self.now_ns
            self._die(me)
            self._switch()
        draw >>= 24
        if self.stalls_left > 0 and (draw & 0xffffff) < self.stall_share * factor:
            self.stalls_left -= 1
            self.faults.stalls += 1
            self.calm_events = 0
            me.state = STALLED
            me.until_ns = self.now_ns + (<int64_t> MOST_STALL_NS >> (self.draw() % (4 if factor > 1 else 24)))
            self.calm_ns = me.until_ns
            if factor > 1 and self.draw() % 4 == 0:
                self._freeze()
            self._switch()
            return
        draw >>= 16
        if (draw & 0xffff) < self.switch_share:
            self._switch()

    cdef bint _is_busy(self, int32_t index) noexcept nogil:
        """Whether a process holds a shard lock or helps with a fold."""
        cdef uint32_t shard
        for shard in range(self.arena.header.n_shards):
            if fps_lock_owner(self.arena.shard_header(shard).lock) == <uint64_t> index + 1:
                return True
        return self.arena.lane(index).helping != 0

    cdef void _freeze(self) noexcept nogil:
        """Stop all that hold a shard lock or help with a fold at once, as a container is frozen. Each wakes at its own time."""
        cdef int32_t index
        cdef process_t *process
        for index in range(self.n_processes):
            process = &self.processes[index]
            if index != self.runs and process.state in (RUNS, SLEEPS) and self._is_busy(index):
                process.state = STALLED
                process.until_ns = self.now_ns + (<int64_t> MOST_STALL_NS >> (self.draw() % 4))
                self.calm_ns = max(self.calm_ns, process.until_ns)

    cdef bint _may_die(self, const process_t *me) noexcept nogil:
        """Whether a peer would notice. A death before the claim of a lane is the launcher's concern."""
        cdef uint32_t member = self.arena.lane(self.runs).state
        cdef int32_t index
        for index in range(self.n_processes):
            if index != self.runs and self.processes[index].state in (RUNS, SLEEPS, STALLED):
                return fps_member_state(member) != FPS_LANE_FREE and fps_member_generation(member) == me.generation
        return False

    cdef void _die(self, process_t *me) noexcept nogil:
        """The process that runs is dead from now on; another may take its place later."""
        me.state = DEAD
        me.died_ns = self.now_ns
        me.noticed = me.settled = False
        if self.runs < self.n_places and self.restarts_left > 0 and me.generation < MOST_LIVES - 1 and self.draw() % 2:
            self.restarts_left -= 1
            me.state = RESTARTS
            me.until_ns = self.now_ns + (<int64_t> MOST_RESTART_NS >> (self.draw() % 16))

    # -- instead of the kernel's futex -------------------------------------------------------------

    cdef void _sleep(self, const uint32_t *event, uint32_t seen, int64_t slice_ns) noexcept nogil:
        """The kernel's futex: compare, and sleep until the event is woken or the slice has passed."""
        cdef process_t *me = &self.processes[self.runs]
        self.at_access()
        if event[0] != seen:
            return
        me.state = SLEEPS
        me.event = event
        me.until_ns = self.now_ns + slice_ns
        self._switch()

    cdef void _wake_sleeper(self, const uint32_t *event) noexcept nogil:
        cdef int32_t index
        self.at_access()
        for index in range(self.n_processes):
            if self.processes[index].state == SLEEPS and self.processes[index].event == event:
                self.processes[index].state = RUNS

    # -- which process runs next -----------------------------------------------------------------------------

    cdef void _run(self) noexcept nogil:
        cdef int32_t next_one
        while not self.over:
            next_one = self._choose()
            if next_one < 0:
                break
            self.runs = next_one
            fps_coroutine_resume(&self.coroutines[next_one])
            if self.processes[next_one].state == ENDED:
                self.checker.look(next_one)
        self.runs = -1

    cdef int32_t _choose(self) noexcept nogil:
        """The process that runs next, or -1 when none is left. Time jumps to the next deadline when all sleep."""
        cdef int32_t index
        cdef int64_t next_ns, total
        cdef process_t *process
        while True:
            next_ns = -1
            total = 0
            for index in range(self.n_processes):
                process = &self.processes[index]
                if process.state in (SLEEPS, STALLED, RESTARTS):
                    if process.until_ns <= self.now_ns and process.state == RESTARTS:
                        self._replace(index)
                    elif process.until_ns <= self.now_ns:
                        process.state = RUNS
                    elif process.state == SLEEPS and self.wake_share and (self.draw() & 0xffffff) < self.wake_share:
                        self.faults.spurious_wakes += 1
                        process.state = RUNS
                    elif next_ns < 0 or process.until_ns < next_ns:
                        next_ns = process.until_ns
                if process.state == RUNS:
                    total += process.weight
            if total > 0:
                break
            if next_ns < 0:
                return -1
            self.now_ns = next_ns
        total = self.draw() % <uint64_t> total
        for index in range(self.n_processes):
            if self.processes[index].state == RUNS:
                total -= self.processes[index].weight
                if total < 0:
                    return index
        return -1

    cdef void _switch(self) noexcept nogil:
        """Let the scheduler choose again; a process that is dead, or whose world is over, does not come back."""
        fps_coroutine_yield(&self.coroutines[self.runs])

    cdef void _replace(self, int32_t index) noexcept nogil:
        """Another process takes the place of a dead one: nothing of that one's private memory is left."""
        cdef process_t *process = &self.processes[index]
        self.faults.restarts += 1
        self.calm_events = 0
        self.calm_ns = self.now_ns
        process.generation += 1
        process.state = RUNS
        self._begin_life(index)

    cdef void _begin_life(self, int32_t index) noexcept nogil:
        self.born(index)
        fps_coroutine_begin(&self.coroutines[index], _life_of_machine, index)
