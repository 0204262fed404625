"""A simulated world: several workers in one thread, who run the real lane, turn, holder and shared fold on a real arena.

Each worker is a coroutine. At every access to shared memory (hooks.h) a seeded scheduler may let another one run, stop this one
for a while, or let it die: a dead worker is never resumed. Time is simulated, too: it goes on with every access, and jumps when
everybody sleeps; each process may have a clock that is wrong. One seed, one history. The witness looks at every event
(witness.pyx).

What a worker does around the compiled protocol is fastps/worker.py's loop, written again without Python: wait for the grant,
pull, write the slot, post, try the turn, look at the peers, leave. What it refuses to be: a second protocol.
"""

import mmap

from cpython.ref cimport PyObject
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.string cimport memset

from fastps.kernels.arena_format import format_memory
from fastps.kernels.arena_plan import plan

from fastps.kernels.arena cimport Arena
from fastps.kernels.arena_words cimport (
    fps_commit_buffer,
    fps_commit_version,
    fps_member_generation,
    fps_member_state,
    fps_turn_owner,
)
from fastps.kernels.commit cimport TURN_AWAITING, TURN_LOST
from fastps.kernels.fold cimport FPS_RULE_ADAGRAD, FPS_RULE_SGD, fps_hyper
from fastps.kernels.holder cimport Holder
from fastps.kernels.lane cimport (
    FPS_LANE_FREE,
    FPS_LANE_JOINING,
    FPS_LANE_LEAVING,
    FPS_LANE_LEFT,
    FPS_LANE_LIVE,
    FPS_LEAVE,
    FPS_NULL,
    FPS_PUSH,
    fps_descriptor,
)
from fastps.kernels.turn cimport Lane
from fastps.kernels.witness cimport MAX_STEPS, MAX_WORKERS, SHARD_FLOATS, Witness

cdef extern from "atomics.h" nogil:
    int64_t fps_grant_acquire(const int64_t *granted)
    uint32_t fps_state_acquire(const uint32_t *state)
    uint64_t fps_tail_acquire(const uint64_t *tail)
    void fps_pin_exchange(uint64_t *pin, uint64_t value)
    void fps_plain_store()

    ctypedef struct fps_hook_table:
        void (*at_access)() noexcept nogil
        void (*sleep)(const uint32_t *event, uint32_t seen, int64_t slice_ns) noexcept nogil
        void (*wake)(const uint32_t *event) noexcept nogil
        void (*wait_a_little "yield")() noexcept nogil
        int64_t shared_least
    fps_hook_table fps_hooks

cdef enum:
    RING_SIZE = 8
    # fastps/config.py's, in simulated time.
    SLICE_NS = 50_000_000
    LIVENESS_NS = 50_000_000
    IDLE_NS = 5_000_000         # between two looks of who waits for the others' end
    JOIN_NS = 500_000           # and of who waits to join
    MOST_RESTART_NS = 200_000_000
    MOST_RESTARTS = 4           # of one lane
    YIELD_NS = 300_000          # what a yielded core is away at most
    MOST_STALL_NS = 200_000_000
    EVENT_NS = 128              # simulated time of an access, at most
    # Without a fault: enough for everyone to finish, or there is a deadlock.
    CALM_EVENTS = 4_000_000
    CALM_NS = 10_000_000_000
    OVERDUE_NS = 200_000
    GARBAGE = 1000              # what a slot holds while it is written

cdef PyObject *_world = NULL


cdef void _access_of_world() noexcept nogil:
    if (<World> _world).runs >= 0:
        (<World> _world)._at_access()


cdef void _sleep_of_world(const uint32_t *event, uint32_t seen, int64_t slice_ns) noexcept nogil:
    (<World> _world)._sleep(event, seen, slice_ns)


cdef void _wake_of_world(const uint32_t *event) noexcept nogil:
    (<World> _world)._wake_sleeper(event)


cdef void _yield_of_world() noexcept nogil:
    (<World> _world)._pause((<World> _world)._draw() % YIELD_NS)


cdef void _life_of_world(int index) noexcept nogil:
    (<World> _world)._live(index)
    (<World> _world).processes[index].state = ENDED


cdef class World:
    """Runs one simulated job after the other; keeps the coroutines' stacks and the arena's memory in between."""

    def __cinit__(self):
        cdef int index
        memset(self.coroutines, 0, sizeof(self.coroutines))
        for index in range(MAX_WORKERS):
            if not fps_coroutine_make(&self.coroutines[index]):
                raise MemoryError()
        self.memory_bytes = 0
        self.runs = -1

    def __dealloc__(self):
        cdef int index
        for index in range(MAX_WORKERS):
            fps_coroutine_free(&self.coroutines[index])

    # -- making a job ------------------------------------------------------------------------------

    def run(self, uint64_t seed, *, int workers, int steps, int shards, int slots, bint adagrad, bint is_sum, bint may_drop,
            int64_t bound, bint partial, bint at_once, int helpers, int shared_least, int spins, double switch,
            double crash, double stall,
            double wake, double null, int crashes, int stalls, int restarts,
            int busy_factor, double skew_ns, dict policy not None):
        """Play one seed; returns what happened as a dict.

        Args:
            workers, steps, shards, slots: measures; `adagrad`: a rule with state, else SGD.
            is_sum, may_drop, bound: what the witness must know of the policy.
            partial: a step waits for one shard only. at_once: a worker goes on without waiting for anything.
            helpers: how many waiting workers may be woken for a fold; 0: folds are not shared. shared_least: the shortest fold
                that is, in floats moved.
            spins: looks before a worker sleeps.
            switch: chance of another worker's turn at an access. crash, stall, wake: chances of such a fault at an access.
            busy_factor: by how much likelier crashes and stalls are for who holds a turn or helps with a fold.
            null: share of null pushes. crashes, stalls, restarts: how many at most. skew_ns: how wrong clocks are at most.
            policy: the scheduler's values.
        """
        global _world
        self.random = seed * <uint64_t> 0x9e3779b97f4a7c15 + 1
        self._make(workers, steps, shards, slots, adagrad, helpers, restarts, policy)
        self.witness = Witness(self.arena, workers, steps, is_sum=is_sum, may_drop=may_drop, bound=bound)
        self.switch_share = <uint32_t> (switch * (1 << 16))
        self.crash_share = <uint32_t> (crash * (1 << 24))
        self.stall_share = <uint32_t> (stall * (1 << 24))
        self.wake_share = <uint32_t> (wake * (1 << 24))
        self.null_share = <uint32_t> (null * (1 << 16))
        self.crashes_left, self.stalls_left, self.restarts_left, self.spins = crashes, stalls, restarts, spins
        self.busy_factor = busy_factor
        self.at_once, self.is_partial = at_once, partial
        self._make_processes(skew_ns)
        _world = <PyObject *> self
        fps_hooks.at_access = _access_of_world
        fps_hooks.sleep = _sleep_of_world
        fps_hooks.wake = _wake_of_world
        fps_hooks.wait_a_little = _yield_of_world
        fps_hooks.shared_least = shared_least
        with nogil:
            self._run()
        fps_hooks.at_access = NULL
        fps_hooks.sleep = NULL
        fps_hooks.wake = NULL
        fps_hooks.wait_a_little = NULL
        _world = NULL
        return self._outcome()

    def _make(self, int workers, int steps, int shards, int slots, bint adagrad, int helpers, int restarts, dict policy):
        """A fresh arena in the same memory, and a lane for each worker."""
        header, size = plan(
            lanes=workers, slots=slots, ring_size=RING_SIZE, groups=1, parameters=shards, buffer_floats=shards * SHARD_FLOATS,
            rule=FPS_RULE_ADAGRAD if adagrad else FPS_RULE_SGD, state_planes=1 if adagrad else 0, extra_bytes=0,
            buffers=workers + 2, shards=shards)
        self.lanes, self.arena = [], None
        if size > self.memory_bytes:
            self.memory, self.memory_bytes = mmap.mmap(-1, 2 * size), 2 * size
        cdef unsigned char[::1] view = self.memory
        memset(&view[0], 0, size)
        format_memory(self.memory, header, [(SHARD_FLOATS * i, SHARD_FLOATS, 0) for i in range(shards)],
                      shards=[(SHARD_FLOATS * i, SHARD_FLOATS * (i + 1)) for i in range(shards)], **policy)
        self.arena = Arena(self.memory)
        self.n_workers, self.n_steps, self.n_shards, self.has_adagrad = workers, steps, shards, adagrad
        self.spares = []
        for index in range(workers):
            lane = Lane(self.arena, index)
            lane.share_folds(helpers)
            self.lanes.append(lane)
            self._lanes[index] = <PyObject *> lane
            for generation in range(1, min(restarts, MOST_RESTARTS - 1) + 1):
                lane = Lane(self.arena, index)
                lane.share_folds(helpers)
                self.spares.append(lane)
                self._spares[index][generation] = <PyObject *> lane

    cdef void _make_processes(self, double skew_ns) noexcept:
        cdef int index
        cdef process_t *process
        cdef bint has_slow = self._draw() % 4 == 0
        cdef uint32_t weight = 400 if self._draw() % 2 else 8
        memset(self.processes, 0, sizeof(self.processes))
        memset(self.faults, 0, sizeof(self.faults))
        self.worst_detection_ns = 0
        self.runs = -1
        self.over = False
        self.events = self.calm_events = 0
        self.now_ns = self.calm_ns = 1_000_000_000
        for index in range(self.n_workers):
            process = &self.processes[index]
            process.weight = weight
            if has_slow and self._draw() % 2:
                process.weight = 1
                self.faults[FAULT_SLOW] += 1
            if skew_ns >= 1:
                process.skew_ns = <int64_t> (self._draw() % <uint64_t> (2 * skew_ns)) - <int64_t> skew_ns
                self.faults[FAULT_SKEW] += 1
            process.looked_ns = self._clock(process)
            fps_coroutine_begin(&self.coroutines[index], _life_of_world, index)

    def _outcome(self):
        return {
            "events": self.events,
            "flips": self.witness.flips,
            "seconds": (self.now_ns - 1_000_000_000) / 1e9,
            "crashes": self.faults[FAULT_CRASH],
            "stalls": self.faults[FAULT_STALL],
            "spurious_wakes": self.faults[FAULT_WAKE],
            "skewed_clocks": self.faults[FAULT_SKEW],
            "slow_processes": self.faults[FAULT_SLOW],
            "restarts": self.faults[FAULT_RESTART],
            "detection_s": self.worst_detection_ns / 1e9,
            "violation": (<bytes> self.witness.message).decode() or None,
        }

    # -- chance and time ---------------------------------------------------------------------------

    cdef uint64_t _draw(self) noexcept nogil:
        """64 random bits (splitmix64)."""
        cdef uint64_t value
        self.random += <uint64_t> 0x9e3779b97f4a7c15
        value = self.random
        value = (value ^ (value >> 30)) * <uint64_t> 0xbf58476d1ce4e5b9
        value = (value ^ (value >> 27)) * <uint64_t> 0x94d049bb133111eb
        return value ^ (value >> 31)

    cdef int64_t _clock(self, process_t *me) noexcept nogil:
        return self.now_ns + me.skew_ns

    cdef void _at_access(self) noexcept nogil:
        """Between two accesses of the process that runs: look, and let chance decide who goes on."""
        cdef uint64_t draw = self._draw()
        cdef process_t *me = &self.processes[self.runs]
        cdef uint32_t factor
        self.events += 1
        self.calm_events += 1
        self.now_ns += draw & (EVENT_NS - 1)
        self.witness.look(self.runs)
        if self.witness.message[0]:
            self.over = True
            self._switch()
        if self.calm_events > CALM_EVENTS or self.now_ns - self.calm_ns > <int64_t> CALM_NS:
            self.witness.fail(b"deadlock: no end after %ld events and %ld ns without a fault; worker %ld runs",
                              self.calm_events, self.now_ns - self.calm_ns, self.runs)
            self.over = True
            self._switch()
        draw >>= 8
        factor = self.busy_factor if self.crashes_left + self.stalls_left > 0 and self._is_busy() else 1
        if self.crashes_left > 0 and (draw & 0xffffff) < self.crash_share * factor and self._may_die(me):
            self.crashes_left -= 1
            self.faults[FAULT_CRASH] += 1
            self.calm_events = 0
            self.calm_ns = self.now_ns
            self._die(me)
            self._switch()
        draw >>= 24
        if self.stalls_left > 0 and (draw & 0xffffff) < self.stall_share * factor:
            self.stalls_left -= 1
            self.faults[FAULT_STALL] += 1
            self.calm_events = 0
            me.state = STALLED
            me.until_ns = self.now_ns + (<int64_t> MOST_STALL_NS >> (self._draw() % (4 if factor > 1 else 24)))
            self.calm_ns = me.until_ns
            self._switch()
            return
        draw >>= 16
        if (draw & 0xffff) < self.switch_share:
            self._switch()

    cdef bint _may_die(self, process_t *me) noexcept nogil:
        """Whether a peer would miss it. Who dies before it has claimed its lane is its launcher's concern."""
        cdef uint32_t member = self.arena.lane(self.runs).state
        cdef int32_t index
        for index in range(self.n_workers):
            if index != self.runs and self.processes[index].state in (RUNS, SLEEPS, STALLED):
                return fps_member_state(member) != FPS_LANE_FREE and fps_member_generation(member) == me.generation
        return False

    cdef void _die(self, process_t *me) noexcept nogil:
        """The process that runs is dead from now on; another may take its lane later."""
        me.state = DEAD
        me.died_ns = self.now_ns
        me.noticed = False
        if self.restarts_left > 0 and me.generation < MOST_RESTARTS - 1 and self._draw() % 2:
            self.restarts_left -= 1
            me.state = RESTARTS
            me.until_ns = self.now_ns + (<int64_t> MOST_RESTART_NS >> (self._draw() % 16))

    cdef void _begin_life(self, int32_t index) noexcept nogil:
        """Another process takes the lane of a dead one: nothing of that one's private memory is left."""
        cdef process_t *process = &self.processes[index]
        cdef int32_t other
        self.faults[FAULT_RESTART] += 1
        self.calm_events = 0
        self.calm_ns = self.now_ns
        for other in range(self.n_workers):
            if other != index:
                process.buried[other] = self.processes[other].generation  # of the present owner it will be told
        process.generation += 1
        self._lanes[index] = self._spares[index][process.generation]
        process.state = RUNS
        process.looked_ns = self._clock(process)
        process.pushes = 0
        process.slot = 0
        memset(process.versions, 0, sizeof(process.versions))
        memset(process.slot_free_at, 0, sizeof(process.slot_free_at))
        fps_coroutine_begin(&self.coroutines[index], _life_of_world, index)

    cdef bint _is_busy(self) noexcept nogil:
        """Whether the process that runs holds a turn or helps with a fold."""
        cdef int32_t shard
        for shard in range(self.n_shards):
            if fps_turn_owner(self.arena.domain(shard).turn) == <uint64_t> self.runs + 1:
                return True
        return self.arena.lane(self.runs).helping != 0

    cdef void _switch(self) noexcept nogil:
        """Let the scheduler choose again; a process that is dead, or whose world is over, does not come back."""
        fps_coroutine_yield(&self.coroutines[self.runs])

    cdef void _sleep(self, const uint32_t *event, uint32_t seen, int64_t slice_ns) noexcept nogil:
        """The kernel's futex: compare, and sleep until the event is woken or the slice has passed."""
        cdef process_t *me = &self.processes[self.runs]
        self._at_access()
        if event[0] != seen:
            return
        me.state = SLEEPS
        me.event = event
        me.until_ns = self.now_ns + slice_ns
        self._switch()

    cdef void _pause(self, int64_t duration_ns) noexcept nogil:
        """Sleep for a time that nobody cuts short."""
        cdef process_t *me = &self.processes[self.runs]
        me.state = SLEEPS
        me.event = NULL
        me.until_ns = self.now_ns + duration_ns
        self._switch()

    cdef void _wake_sleeper(self, const uint32_t *event) noexcept nogil:
        cdef int32_t index
        self._at_access()
        for index in range(self.n_workers):
            if self.processes[index].state == SLEEPS and self.processes[index].event == event:
                self.processes[index].state = RUNS

    cdef int32_t _choose(self) noexcept nogil:
        """Who runs next, or -1 when nobody is left; time goes on to the next deadline when everybody sleeps."""
        cdef int32_t index
        cdef int64_t next_ns, total
        cdef process_t *process
        while True:
            next_ns = -1
            total = 0
            for index in range(self.n_workers):
                process = &self.processes[index]
                if process.state in (SLEEPS, STALLED, RESTARTS):
                    if process.until_ns <= self.now_ns and process.state == RESTARTS:
                        self._begin_life(index)
                    elif process.until_ns <= self.now_ns:
                        process.state = RUNS
                    elif process.state == SLEEPS and self.wake_share and (self._draw() & 0xffffff) < self.wake_share:
                        self.faults[FAULT_WAKE] += 1
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
        total = self._draw() % <uint64_t> total
        for index in range(self.n_workers):
            if self.processes[index].state == RUNS:
                total -= self.processes[index].weight
                if total < 0:
                    return index
        return -1

    cdef void _run(self) noexcept nogil:
        cdef int32_t next_one
        cdef uint32_t dead = 0, unnoticed = 0
        while not self.over:
            next_one = self._choose()
            if next_one < 0:
                break
            self.runs = next_one
            fps_coroutine_resume(&self.coroutines[next_one])
            if self.processes[next_one].state == ENDED:
                self.witness.look(next_one)
        self.runs = -1
        for next_one in range(self.n_workers):
            if self.processes[next_one].state == DEAD:
                dead |= (<uint32_t> 1) << next_one
                self.witness.posted[next_one] = self.arena.lane(next_one).tail  # not what it was about to post
            if self.processes[next_one].state == DEAD and not self.processes[next_one].noticed:
                unnoticed |= (<uint32_t> 1) << next_one
        if self.witness.message[0] == 0:
            self.witness.end(dead, unnoticed)

    # -- a worker's life: fastps/worker.py's loop --------------------------------------------------

    cdef void _live(self, int32_t index) noexcept nogil:
        cdef process_t *me = &self.processes[index]
        cdef uint32_t kind
        cdef int64_t generation
        cdef int32_t shard
        generation = self.arena._claim(index, index, True)
        if generation != me.generation:
            self.witness.fail(b"claim: worker %ld got generation %ld, expected %ld", index, generation, me.generation)
        for shard in range(self.n_shards):
            (<Holder> (<Lane> self._lanes[index])._holders[shard]).generation = me.generation
        me.posts = (<Lane> self._lanes[index]).words.tail
        if generation > 0:
            self._join(index)
        me.steps = fps_grant_acquire(&self.arena.seat(index, 0).granted) - 1
        self._pull(index, True)
        while me.pushes < self.n_steps:
            self._compute(index)
            kind = FPS_NULL if (self._draw() & 0xffff) < self.null_share else FPS_PUSH
            self._push(index, kind)
            self._wait(index, 0 if self.at_once else me.steps + 1, me.slot_free_at[me.slot], 1 if self.is_partial else 0)
            self._pull(index, False)
        self._leave(index)

    cdef void _join(self, int32_t index) noexcept nogil:
        """Wait until every shard counts this worker."""
        cdef process_t *me = &self.processes[index]
        (<Lane> self._lanes[index])._break_turns(index, me.generation - 1, self._clock(me))
        while not self.arena._has_joined(index):
            self._try_turn(index)
            self._look_around(index)
            self._pause(JOIN_NS)
        self.arena._move(index, FPS_LANE_JOINING, FPS_LANE_LIVE)

    cdef void _compute(self, int32_t index) noexcept nogil:
        """Read the pulled weights, now and then."""
        cdef int32_t _look
        for _look in range(<int32_t> (self._draw() % 4)):
            self._at_access()
            self._check_reads(index)

    cdef void _pull(self, int32_t index, bint is_first) noexcept nogil:
        cdef process_t *me = &self.processes[index]
        cdef uint64_t commit
        cdef int32_t shard
        for shard in range(self.n_shards):
            if self.is_partial and not is_first and self.arena.seat(index, shard).granted < me.steps + 1:
                continue
            commit = (<Lane> self._lanes[index])._pull(shard)
            if fps_commit_version(commit) < me.versions[shard]:
                self.witness.fail(b"versions: worker %ld pulled %ld after %ld", index, fps_commit_version(commit),
                                  me.versions[shard])
            me.versions[shard] = fps_commit_version(commit)
            me.buffers[shard] = fps_commit_buffer(commit)
        self._check_reads(index)

    cdef void _check_reads(self, int32_t index) noexcept nogil:
        """What is pinned is whole, and stays as it was published."""
        cdef process_t *me = &self.processes[index]
        cdef int32_t shard
        for shard in range(self.n_shards):
            if not self.witness.is_content(shard, me.versions[shard], self.witness._range(shard, me.buffers[shard])):
                self.witness.fail(b"torn read: worker %ld reads version %ld of shard %ld, and it has changed", index,
                                  me.versions[shard], shard)

    cdef void _write_slot(self, int32_t index, int64_t position) noexcept nogil:
        """The descriptor's own gradient, over whatever was there; who reads too early sees garbage."""
        cdef process_t *me = &self.processes[index]
        cdef char *slot = self.arena.slot(index, me.slot)
        cdef fps_hyper *hyper = <fps_hyper *> slot
        cdef float *gradient = <float *> (slot + self.arena.header.slot_gradient_offset)
        cdef int32_t i, shard
        fps_plain_store()
        for i in range(self.n_shards * SHARD_FLOATS):
            gradient[i] = GARBAGE
        hyper.learning_rate = GARBAGE
        fps_plain_store()
        memset(gradient, 0, self.n_shards * SHARD_FLOATS * sizeof(float))
        fps_plain_store()
        for shard in range(self.n_shards):
            gradient[shard * SHARD_FLOATS + index * MAX_STEPS + position] = 1.0
        fps_plain_store()
        hyper.learning_rate = 1.0
        hyper.epsilon = 1e-10  # the floats without a gradient are 0 / (0 + epsilon)
        (<uint64_t *> (slot + self.arena.header.slot_presence_offset))[0] = (1 << self.n_shards) - 1
        (<Lane> self._lanes[index])._set_versions(me.slot)

    cdef void _push(self, int32_t index, uint32_t kind) noexcept nogil:
        cdef process_t *me = &self.processes[index]
        if kind == FPS_PUSH:
            self._write_slot(index, me.posts)
        self._post(index, kind)
        me.steps += 1
        me.pushes += 1
        if kind == FPS_PUSH:
            me.slot_free_at[me.slot] = me.posts
            me.slot = (me.slot + 1) % self.arena.header.n_slots
        self._try_turn(index)
        if self._clock(me) - me.looked_ns > LIVENESS_NS:
            self._look_around(index)

    cdef void _post(self, int32_t index, uint32_t kind) noexcept nogil:
        cdef process_t *me = &self.processes[index]
        cdef fps_descriptor descriptor
        cdef int32_t shard
        memset(&descriptor, 0, sizeof(descriptor))
        descriptor.kind = kind
        descriptor.step = me.steps
        descriptor.slot = me.slot
        for shard in range(self.n_shards):
            descriptor.read_version = max(descriptor.read_version, me.versions[shard])
        descriptor.scale = 1.0
        descriptor.samples = 1
        self.witness.kinds[index][me.posts] = kind
        self.witness.posted[index] = me.posts + 1
        while True:
            descriptor.post_ns = self._clock(me)
            if (<Lane> self._lanes[index])._post(&descriptor):
                break
            self._wait(index, 0, me.posts + 1 - RING_SIZE, 0)
        me.posts += 1

    cdef void _wait(self, int32_t index, int64_t granted, uint64_t done, uint32_t shards) noexcept nogil:
        cdef process_t *me = &self.processes[index]
        cdef int64_t due_ns, slice_ns
        if shards == 0:
            shards = self.n_shards
        while True:
            due_ns = (<Lane> self._lanes[index])._due_ns()
            slice_ns = SLICE_NS
            if due_ns >= 0:
                due_ns -= self._clock(me)
                slice_ns = min(slice_ns, due_ns if due_ns > 0 else <int64_t> OVERDUE_NS)
            if (<Lane> self._lanes[index])._wait(granted, done, self.spins, slice_ns, shards):
                return
            self._try_turn(index)
            if self._clock(me) - me.looked_ns > LIVENESS_NS:
                self._look_around(index)

    cdef void _try_turn(self, int32_t index) noexcept nogil:
        cdef process_t *me = &self.processes[index]
        cdef int64_t posted = me.posts
        cdef int outcome
        while True:
            outcome = (<Lane> self._lanes[index])._try_turns(self._clock(me))
            if outcome != TURN_AWAITING:
                break
            if self._clock(me) - me.looked_ns > LIVENESS_NS:
                self._look_around(index)
        if outcome < 0 or outcome == TURN_LOST:
            self.witness.fail(b"turn: worker %ld's ended with outcome %ld (lane %ld)", index, outcome,
                              (<Lane> self._lanes[index]).bad_lane)
        self.witness.promised[index] = posted

    cdef uint32_t _dead_owners(self, int32_t lane) noexcept nogil:
        """How many of a lane's owners have died."""
        return self.processes[lane].generation + (self.processes[lane].state in (DEAD, RESTARTS))

    cdef void _look_around(self, int32_t index) noexcept nogil:
        """Break the turns of the dead whom this process has not seen yet, and bury them: fastps/membership.py."""
        cdef process_t *me = &self.processes[index]
        cdef int32_t dead
        cdef uint32_t generation
        me.looked_ns = self._clock(me)
        for dead in range(self.n_workers):
            while dead != index and me.buried[dead] < self._dead_owners(dead):
                generation = me.buried[dead]
                if generation == self.processes[dead].generation and not self.processes[dead].noticed:
                    self.processes[dead].noticed = True
                    self.worst_detection_ns = max(self.worst_detection_ns, self.now_ns - self.processes[dead].died_ns)
                (<Lane> self._lanes[index])._break_turns(dead, generation, self._clock(me))
                self.arena._bury(dead, generation)
                me.buried[dead] = generation + 1
                self._try_turn(index)

    cdef bint _others_are_done(self, int32_t index) noexcept nogil:
        cdef int32_t other
        self._try_turn(index)
        for other in range(self.n_workers):
            if fps_member_state(fps_state_acquire(&self.arena.lane(other).state)) in (
                    FPS_LANE_FREE, FPS_LANE_LIVE, FPS_LANE_JOINING):
                return False
            if (<Lane> self._lanes[other])._done() < fps_tail_acquire(&self.arena.lane(other).tail):
                return False
        return True

    cdef void _leave(self, int32_t index) noexcept nogil:
        cdef process_t *me = &self.processes[index]
        cdef int32_t shard
        self._post(index, FPS_LEAVE)
        self.arena._move(index, FPS_LANE_LIVE, FPS_LANE_LEAVING)
        self._try_turn(index)
        while not self._others_are_done(index):
            if self._clock(me) - me.looked_ns > LIVENESS_NS:
                self._look_around(index)
            self._pause(IDLE_NS)
        self._pull(index, True)
        for shard in range(self.n_shards):
            fps_pin_exchange(&self.arena.seat(index, shard).pin, 0)
        self.arena._end(index, me.generation, FPS_LANE_LEFT)
