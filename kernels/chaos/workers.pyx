"""The workers of a simulated job: each one's life around the real lanes, shard locks and shared folds.

A simulated worker drives the same WorkerLane as a real one: wait for the grant, pull, write the slot, push, look at the peers,
leave.
"""

from cpython.ref cimport PyObject
from libc.stdint cimport UINT64_MAX, int32_t, int64_t, uint32_t, uint64_t
from libc.string cimport memset

from fastps.kernels.base.atomics cimport fps_event_sleep
from fastps.kernels.base.failpoints cimport *
from fastps.kernels.chaos.invariants cimport MAX_STEPS, RING_SIZE, InvariantChecker
from fastps.kernels.chaos.machine cimport DEAD, ENDED, STALLED, Machine
from fastps.kernels.combining.combiner cimport Combiner
from fastps.kernels.combining.lock_word cimport COMBINE_BUSY
from fastps.kernels.protocol.lane cimport Lane
from fastps.kernels.protocol.reader_pins cimport ReaderPins
from fastps.kernels.combining.ring cimport lane_descriptor
from fastps.kernels.protocol.wait cimport (
    GOAL_CALL,
    GOAL_JOIN,
    GOAL_LAST,
    GOAL_SETTLE,
    HELD_NS,
    SLICE_NS,
    WANT_CHECK_PEERS,
    WANT_EXPEL,
    WANT_EXPELLED,
    WANT_NOTHING,
    WANT_PAUSE,
    WANT_REST,
    WANT_TAKE_OVER,
    Wait,
)
from fastps.kernels.protocol.worker_lane cimport PUSH_EXPELLED, PUSH_FULL, WorkerLane
from fastps.kernels.shm.arena cimport Arena
from fastps.kernels.shm.arena_h cimport *

cdef enum:
    READER_SLICE_NS = 1_000_000  # of a worker that sleeps as a reader: the others may need its push

cdef PyObject *_workers = NULL


cdef void _born(int index) noexcept nogil:
    (<Workers> _workers)._be_born(index)


cdef void _live(int index) noexcept nogil:
    (<Workers> _workers)._live(index)


cdef class Workers:
    """The processes of one job on `machine`. `lanes`: for each lane of `arena` one WorkerLane for each process that may have
    it. `servers`: the lane of a server, or none.

    `readers`: a reader for each lane, or none: each process then reads published weights also as one that is no worker.
    `steps`: pushes of a worker. `spins`: polls before it sleeps. `at_once`: it continues without waiting.
    `is_partial`: a step waits for one shard only. `null_share`: of 2 ** 16 pushes so many are null. `reads_rows`: what a step
    reads of tables is of the version that it pulled. `wounds`: of so many lanes, at most, words are damaged. `fetches`: workers
    fetch the next weights while they compute.
    """

    def __cinit__(self, Machine machine not None, Arena arena not None, InvariantChecker checker not None,
                  list lanes not None, list servers not None, list readers not None, *, int steps, int spins, bint at_once,
                  bint is_partial, uint32_t null_share, bint reads_rows, int wounds, bint fetches):
        cdef int index, generation
        self.machine, self.arena, self.checker, self.lanes, self.readers = machine, arena, checker, lanes, readers
        self.n_workers, self.n_shards = arena.header.n_lanes, arena.header.n_shards
        self.n_steps, self.spins, self.at_once, self.is_partial = steps, spins, at_once, is_partial
        self.null_share, self.reads_rows, self.wounds_left, self.fetches = null_share, reads_rows, wounds, fetches
        for index, reader in enumerate(readers):
            self._readers[index] = <PyObject *> reader
        self.n_processes = self.n_workers + len(servers)
        self.waits = [[Wait(lane) for lane in owners] for owners in [*lanes, servers]]
        for index, owners in enumerate(self.waits):
            for generation, wait in enumerate(owners):
                (<Wait> wait).spins = spins
                self._all_waits[index][generation] = <PyObject *> wait

    cdef void play(self, double skew_ns, int64_t shared_least):
        """Let all of them live, until they have ended or something is wrong."""
        global _workers
        _workers = <PyObject *> self
        self.machine.arena, self.machine.checker = self.arena, self.checker
        self.machine.born = _born
        self.machine.live = _live
        self.machine.n_places = self.n_workers
        self.machine.begin(self.n_processes, skew_ns)
        self.machine.play(shared_least)
        _workers = NULL

    cdef void _be_born(self, int32_t index) noexcept nogil:
        """A process gets the lane: nothing is left of the private memory of the process before."""
        cdef life_t *me = &self.lives[index]
        cdef int32_t other
        memset(me, 0, sizeof(life_t))
        me.generation = self.machine.processes[index].generation
        for other in range(self.n_processes):
            me.marked_dead[other] = self.machine.processes[other].generation  # the present owner's death is still to come
        self._waits[index] = self._all_waits[index][me.generation]
        self._lanes[index] = <PyObject *> (<Wait> self._waits[index]).lane

    # -- the loop ----------------------------------------------------------------------------------

    cdef void _live(self, int32_t index) noexcept nogil:
        cdef life_t *me = &self.lives[index]
        cdef int64_t generation
        cdef int32_t shard
        if index >= self.n_workers:
            self._serve(index)
            return
        generation = self.arena._claim(index, index, True)
        self.checker.own(index, self.arena.lane(index).tail)
        if generation != me.generation:
            self.checker.fail(b"claim: worker %ld got generation %ld, expected %ld", index, generation, me.generation)
        for shard in range(self.n_shards):
            (<Combiner> (<WorkerLane> self._lanes[index])._combiners[shard]).lock.generation = me.generation
        (<WorkerLane> self._lanes[index])._begin()
        (<WorkerLane> self._lanes[index]).loss = 0
        (<WorkerLane> self._lanes[index])._leave_to_server(self.arena._is_served())
        if generation > 0:
            self._join(index)
        (<WorkerLane> self._lanes[index]).steps = (<WorkerLane> self._lanes[index])._begin_steps()
        self._pull(index, True)
        if self._readers[index] != NULL:
            (<ReaderPins> self._readers[index]).begin()
            self._read(index)
        while me.pushes < self.n_steps and not self._is_out(index):
            self._compute(index)
            self._push(index, FPS_NULL if (self.machine.draw() & 0xffff) < self.null_share else FPS_PUSH)
            self._advance(index)
            self._pull(index, False)
        if not self._is_out(index):
            self._leave(index)
        if self._is_out(index):
            self._end_expelled(index)

    # -- words that somebody damages -----------------------------------------------------------------

    cdef void _wound(self) noexcept nogil:
        """Damage the words of a lane: its count of posts, or a descriptor that is not done with. No access: nobody is told."""
        cdef int32_t victim = <int32_t> (self.machine.draw() % <uint64_t> self.n_workers)
        cdef uint64_t what = self.machine.draw() % 3, draw = self.machine.draw()
        cdef fps_lane *lane = self.arena.lane(victim)
        cdef uint64_t done = UINT64_MAX, position
        cdef uint64_t ends = lane.tail + RING_SIZE + 1 + (self.n_steps + 1) * (self.machine.restarts_left + 1)
        cdef uint32_t member = fps_member_state(lane.state), shard
        if (self.machine.processes[victim].generation != fps_member_generation(lane.state) or lane.tail >= MAX_STEPS
                or member in (FPS_LANE_FREE, FPS_LANE_LEFT, FPS_LANE_EXPELLED)):
            return  # another process is about to take the lane, or nobody reads it
        for shard in range(self.n_shards):
            done = min(done, self.arena.lane_shard(victim, shard).head)
        if what == 0:
            if ends >= MAX_STEPS:
                return
            self.checker.wound(victim, done, lane.tail, True)
            lane.tail += 1000
        else:
            if done >= lane.tail:
                return
            position = done + draw % (lane.tail - done)
            if not self.checker.owners[victim][position]:
                return
            if what == 1 and self.checker.kinds[victim][position] != FPS_LEAVE:
                lane_descriptor(lane, RING_SIZE, position).kind = 77
            else:
                lane_descriptor(lane, RING_SIZE, position).slot = 1 << 20
            self.checker.wound(victim, position, position + 1, False)
        self.wounds_left -= 1

    cdef bint _is_out(self, int32_t index) noexcept nogil:
        """Whether this process was expelled. Where no lane was damaged it does not ask."""
        return self.checker.wounded[index] and (<WorkerLane> self._lanes[index])._is_expelled()

    cdef void _end_expelled(self, int32_t index) noexcept nogil:
        """The process ends by an error, and another may take its place."""
        self.arena._drop_pins(index)
        self.machine._die(&self.machine.processes[index])
        self.machine._switch()

    cdef void _join(self, int32_t index) noexcept nogil:
        """Wait until every shard counts this worker."""
        (<WorkerLane> self._lanes[index])._recover_locks(index, self.lives[index].generation - 1, self.machine.clock(index))
        (<Wait> self._waits[index])._begin(GOAL_JOIN, self.machine.clock(index), 500_000)
        self._drive(index)
        self.arena._move(index, FPS_LANE_JOINING, FPS_LANE_LIVE)

    # -- a server ------------------------------------------------------------------------------------

    cdef void _serve(self, int32_t index) noexcept nogil:
        """The life of a server: combine when called, until every worker has ended and the dead are marked as such."""
        (<Wait> self._waits[index])._begin(GOAL_CALL, self.machine.clock(index), SLICE_NS)
        self._drive(index)
        self.arena._end(index, 0, FPS_LANE_LEFT)

    cdef bint _is_over(self) noexcept nogil:
        cdef int32_t index
        for index in range(self.n_workers):
            if self.machine.processes[index].state != ENDED and not (
                    self.machine.processes[index].state == DEAD and self.machine.processes[index].settled):
                return False
        return True

    cdef void _promise(self, int32_t index, int64_t posted) noexcept nogil:
        """This process has combined, or called the server: what was posted before is decided, or will be.

        A server that has combined rests if it was not called meanwhile.
        """
        if index >= self.n_workers:
            if self.arena.lane(index).event == (<Wait> self._waits[index]).seen:
                self.checker.watch_calls()
        elif (<Lane> self._lanes[index]).served:
            self.checker.called[index] = posted
        else:
            self.checker.promised[index] = posted

    # -- what is read ------------------------------------------------------------------------------

    cdef void _compute(self, int32_t index) noexcept nogil:
        """Read the pulled weights, now and then."""
        cdef int32_t _look
        for _look in range(<int32_t> (self.machine.draw() % 4)):
            self.machine.at_access()
            self._check_reads(index)
            if self.fetches:
                self._fetch(index)
            if self._readers[index] != NULL:
                self._check_reader(index)
                if self.machine.draw() % 3 == 0:
                    self._read(index)
                if self.machine.draw() % 4 == 0:
                    self._sleep_as_reader(index)

    cdef void _pull(self, int32_t index, bint is_first) noexcept nogil:
        cdef life_t *me = &self.lives[index]
        cdef uint64_t commit, before
        cdef int32_t shard
        for shard in range(self.n_shards):
            if (self.is_partial and not is_first
                    and (<WorkerLane> self._lanes[index])._granted(shard) < (<WorkerLane> self._lanes[index]).steps + 1):
                continue
            before = (<WorkerLane> self._lanes[index]).versions[shard]
            if self.fetches and not is_first:
                commit = me.kept[shard]
                (<WorkerLane> self._lanes[index])._take(shard, fps_commit_buffer(commit), fps_commit_version(commit))
            else:
                commit = (<WorkerLane> self._lanes[index])._pull(shard)
            if fps_commit_version(commit) < before:
                self.checker.fail(b"versions: worker %ld pulled %ld after %ld", index, fps_commit_version(commit), before)
            me.kept[shard] = commit
            me.buffers[shard] = fps_commit_buffer(commit)
        self._check_reads(index)

    cdef void _fetch(self, int32_t index) noexcept nogil:
        """Begin to fetch each shard's newest version in the background, or keep the one that was fetched."""
        cdef life_t *me = &self.lives[index]
        cdef int32_t shard
        for shard in range(self.n_shards):
            if fps_commit_version(me.fetched[shard]) <= fps_commit_version(me.kept[shard]):
                me.fetched[shard] = (<WorkerLane> self._lanes[index])._prefetch(shard)
            else:
                (<WorkerLane> self._lanes[index])._keep(shard, fps_commit_buffer(me.fetched[shard]))
                me.kept[shard] = me.fetched[shard]

    cdef void _read(self, int32_t index) noexcept nogil:
        """Pin the newest version of each shard as a reader."""
        cdef int32_t shard
        for shard in range(self.n_shards):
            self.lives[index].read_buffers[shard] = fps_commit_buffer((<ReaderPins> self._readers[index])._pull(shard))
        self._check_reader(index)

    cdef void _sleep_as_reader(self, int32_t index) noexcept nogil:
        """Sleep as a reader for one of the next versions, and check the wake: a flip that reached it has moved the event.

        Its combiner moves it under the shard lock, and where that one died, the lane that recovers the lock does.
        """
        cdef uint32_t event = 0
        cdef fps_readers *words = self.arena.readers_words()
        cdef uint64_t version = (<ReaderPins> self._readers[index])._newest() + 1 + self.machine.draw() % 3
        if (<ReaderPins> self._readers[index])._is_there(version, &event):
            return
        fps_event_sleep(&words.event, event, READER_SLICE_NS)
        if ((<ReaderPins> self._readers[index])._newest() >= version and words.event == event
                and not self._is_any_locked()):
            self.checker.fail(b"missed wake: reader %ld sleeps for version %ld, which is there", index, version, 0)

    cdef bint _is_any_locked(self) noexcept nogil:
        """Whether any lane holds a shard lock."""
        cdef int32_t shard
        for shard in range(self.n_shards):
            if fps_lock_owner(self.arena.shard_header(shard).lock):
                return True
        return False

    cdef void _check_reader(self, int32_t index) noexcept nogil:
        """What a reader has pinned stays as it was published."""
        cdef uint64_t version
        cdef int32_t shard
        for shard in range(self.n_shards):
            version = (<ReaderPins> self._readers[index]).versions[shard]
            if not self.checker.is_content(shard, version, self.checker._range(shard, self.lives[index].read_buffers[shard])):
                self.checker.fail(b"torn read: reader %ld reads version %ld of shard %ld, and it has changed", index, version,
                                  shard)

    cdef void _check_reads(self, int32_t index) noexcept nogil:
        """What is pinned is whole, and stays as it was published."""
        cdef uint64_t version
        cdef int32_t shard
        for shard in range(self.n_shards):
            version = (<WorkerLane> self._lanes[index]).versions[shard]
            if not self.checker.is_content(shard, version, self.checker._range(shard, self.lives[index].buffers[shard])):
                self.checker.fail(b"torn read: worker %ld reads version %ld of shard %ld, and it has changed", index, version,
                                  shard)
            # Nobody waits for a worker that was expelled, and may not know it yet.
            if (self.reads_rows and not (<WorkerLane> self._lanes[index]).awaits
                    and not self.checker.is_wounded(index, self.lives[index].generation)):
                self.checker.watch_rows(
                    shard, self.checker._range(shard, self.lives[index].buffers[shard]), b"a step reads that")

    # -- pushes, and waiting for what follows ------------------------------------------------------

    cdef void _push(self, int32_t index, uint32_t kind) noexcept nogil:
        cdef int outcome
        if kind == FPS_PUSH:
            self.checker.write_slot(index, (<WorkerLane> self._lanes[index]).slot, (<WorkerLane> self._lanes[index]).posts)
        self.checker.promise(index, (<WorkerLane> self._lanes[index]).words.tail, kind)
        while True:
            outcome = (<WorkerLane> self._lanes[index])._push(self.machine.clock(index), 1.0, 1, kind == FPS_NULL)
            if outcome == PUSH_EXPELLED or self._is_out(index):
                return
            if outcome != PUSH_FULL:
                break
            self._wait_for_room(index)
        self.lives[index].pushes += 1
        self._settle(index, outcome)
        if self.wounds_left and self.machine.draw() % 8 == 0:
            self._wound()

    cdef void _wait_for_room(self, int32_t index) noexcept nogil:
        (<Wait> self._waits[index])._begin_step(
            0, (<WorkerLane> self._lanes[index]).words.tail + 1 - self.arena.header.ring_size, 0, self.machine.clock(index))
        self._drive(index)

    cdef void _advance(self, int32_t index) noexcept nogil:
        """Begin the next step, once it may begin."""
        if (<WorkerLane> self._lanes[index])._advance(self.machine.clock(index), self.at_once):
            return
        (<Wait> self._waits[index])._begin_step(
            0 if self.at_once else (<WorkerLane> self._lanes[index]).steps + 1,
            (<WorkerLane> self._lanes[index]).free_at[(<WorkerLane> self._lanes[index]).slot], 1 if self.is_partial else 0,
            self.machine.clock(index))
        self._drive(index)
        (<WorkerLane> self._lanes[index])._advance_late(self.machine.clock(index))

    cdef void _settle(self, int32_t index, int outcome) noexcept nogil:
        """End a combine. What was posted before is decided then."""
        if outcome == COMBINE_BUSY:
            outcome = self._pass_by(index)
        (<Wait> self._waits[index])._begin(GOAL_SETTLE, self.machine.clock(index), HELD_NS)
        (<Wait> self._waits[index])._tell(outcome)
        self._drive(index)

    cdef void _drive(self, int32_t index) noexcept nogil:
        """Do what a process's wait wants, until it is over, or the process is expelled, or its world is."""
        cdef int64_t posted
        cdef int want, outcome
        while True:
            posted = (<Lane> self._lanes[index]).words.tail
            want = (<Wait> self._waits[index])._want(self.machine.clock(index))
            if want in (WANT_NOTHING, WANT_REST, WANT_PAUSE) and not (<Wait> self._waits[index]).held:
                self._promise(index, posted)
            if want in (WANT_NOTHING, WANT_EXPELLED):
                return
            if want in (WANT_REST, WANT_PAUSE):
                if index >= self.n_workers and self._is_over():
                    return
                outcome = self._pass_by(index)
                if outcome != COMBINE_BUSY:
                    (<Wait> self._waits[index])._tell(outcome)
                elif want == WANT_REST:
                    (<Wait> self._waits[index])._rest()
                else:
                    self.machine.pause((<Wait> self._waits[index]).slice_ns)
            elif want == WANT_CHECK_PEERS:
                self._check_peers(index)
            elif want == WANT_EXPEL:
                self._expel(index, (<Lane> self._lanes[index]).bad_lane, (<Lane> self._lanes[index]).damage)
            elif want == WANT_TAKE_OVER:
                self._take_over(index)
            else:
                self.checker.fail(b"combine: worker %ld's ended with outcome %ld (lane %ld)", index,
                                  (<Wait> self._waits[index]).outcome, (<Lane> self._lanes[index]).bad_lane)
                return

    cdef void _take_over(self, int32_t index) noexcept nogil:
        """Combine from now on: the server has ended."""
        if not fps_mutant(FPS_MUTANT_FORGET_TAKING_OVER):
            (<Lane> self._lanes[index])._leave_to_server(False)

    cdef int _pass_by(self, int32_t index) noexcept nogil:
        """Now and then, go on without another process: mostly one that is stopped, rarely one that runs."""
        cdef int32_t other
        cdef int outcome
        if self.machine.pass_share == 0 or (self.machine.draw() & 0xffff) >= self.machine.pass_share:
            return COMBINE_BUSY
        other = <int32_t> (self.machine.draw() % <uint64_t> self.n_processes)
        if other == index or (self.machine.processes[other].state != STALLED and self.machine.draw() % 8):
            return COMBINE_BUSY
        outcome = (<Lane> self._lanes[index])._pass_by(other, self.machine.clock(index))
        if outcome != COMBINE_BUSY:
            self.machine.passed_by()
        return outcome

    cdef void _expel(self, int32_t index, int32_t bad, uint64_t damage) noexcept nogil:
        """Expel the owner of a lane, whose words must have been damaged; nothing happens where it has another owner by now."""
        if self.arena._expel(bad, damage) and not self.checker.is_wounded(bad, damage >> 40):
            self.checker.fail(b"expelled: worker %ld expels owner %ld of lane %ld, whose words nobody has damaged", index,
                              <int64_t> (damage >> 40), bad)

    # -- the others --------------------------------------------------------------------------------

    cdef void _check_peers(self, int32_t index) noexcept nogil:
        """Recover the locks of dead processes that this one has not seen yet, and mark them dead."""
        cdef life_t *me = &self.lives[index]
        cdef int32_t dead
        cdef uint32_t generation
        if index >= self.n_workers and fps_mutant(FPS_MUTANT_SERVE_ON):
            return
        (<Lane> self._lanes[index])._recover_stale_locks(self.machine.clock(index))
        for dead in range(self.n_processes):
            while dead != index and me.marked_dead[dead] < self.machine.deaths(dead):
                generation = me.marked_dead[dead]
                if generation == self.machine.processes[dead].generation:
                    self.machine.notice(dead)
                if dead >= self.n_workers:
                    self._take_over(index)
                (<Lane> self._lanes[index])._recover_locks(dead, generation, self.machine.clock(index))
                self.arena._mark_dead(dead, generation)
                if generation == self.machine.processes[dead].generation:
                    self.machine.processes[dead].settled = True
                me.marked_dead[dead] = generation + 1

    cdef void _leave(self, int32_t index) noexcept nogil:
        self.checker.promise(index, (<WorkerLane> self._lanes[index]).words.tail, FPS_LEAVE)
        while not (<WorkerLane> self._lanes[index])._post(
                FPS_LEAVE, (<WorkerLane> self._lanes[index]).steps, 0, (<WorkerLane> self._lanes[index])._oldest(),
                self.machine.clock(index), 1.0, 0.0, 0):
            if self._is_out(index):
                return
            self._wait_for_room(index)
        self.arena._move(index, FPS_LANE_LIVE, FPS_LANE_LEAVING)
        (<Wait> self._waits[index])._begin(GOAL_LAST, self.machine.clock(index), 5_000_000)
        (<Wait> self._waits[index]).started = self.n_workers
        self._drive(index)
        if self._is_out(index):
            return
        self._pull(index, True)
        self.arena._drop_pins(index)
        self.arena._end(index, self.lives[index].generation, FPS_LANE_LEFT)
