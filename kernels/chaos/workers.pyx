"""The workers of a simulated job: each one's life around the real lanes, shard locks and shared folds.

A simulated worker drives the same Lane as a real one: wait for the grant, pull, write the slot, push, look at the peers,
leave.
"""

from cpython.ref cimport PyObject
from libc.stdint cimport UINT64_MAX, int32_t, int64_t, uint32_t, uint64_t

from fastps.kernels.base.failpoints cimport *
from fastps.kernels.chaos.invariants cimport (
    MAX_STEPS, MAX_WATCHED_SHARDS, MAX_WORKERS, RING_SIZE, SHARD_FLOATS, InvariantChecker)
from fastps.kernels.chaos.machine cimport DEAD, ENDED, MOST_LIVES, STALLED, Machine, fps_view_renew
from fastps.kernels.combining.combiner cimport Combiner
from fastps.kernels.combining.lock_word cimport COMBINE_BUSY
from fastps.kernels.protocol.lane cimport PUSH_EXPELLED, PUSH_FULL, Lane
from fastps.kernels.chaos.reading cimport Places, Reading
from fastps.kernels.combining.ring cimport lane_descriptor
from fastps.kernels.protocol.wait cimport *
from fastps.kernels.shm.arena cimport Arena
from fastps.kernels.shm.arena_h cimport *

cdef class Process


cdef class Workers(Machine):
    """The processes of one job in `arena`: its workers, each a reader, too, if the arena has readers, and a server if it has a
    lane for one.

    Args:
        steps: pushes of a worker. spins: polls before it sleeps. null: share of null pushes.
        helpers: how many waiting workers may be woken for a fold; 0: folds are not shared.
        reads_rows: what a step reads of tables is of the version that it pulled.
        fetches: workers fetch the next weights while they compute.
        partial: a step waits for one shard only. at_once: a worker continues without waiting.
        switch: chance at an access that another worker runs next. crash, stall, wake: chances of such a fault at an access.
        crashes, stalls, restarts: how many at most.
        passes: chance that a process which finds a lock taken goes on without its owner, if that one is stopped; now and then
            if it is not.
        busy_factor: by how much likelier crashes and stalls are for a worker that holds a lock or helps with a fold.
        wounds: lanes whose words are damaged, at most.
    """

    cdef list owners                                       # of each place, the processes that may have it
    cdef PyObject *_owners[MAX_WORKERS][MOST_LIVES]        # the same
    cdef int32_t n_steps, spins, wounds_left
    cdef bint is_partial, at_once, reads_rows, fetches
    cdef uint32_t null_share                               # of 2 ** 16
    cdef Places reader_places

    def __cinit__(self, Arena arena not None, InvariantChecker checker not None, uint64_t seed, *, int steps, int spins,
                  double null, int helpers, bint reads_rows, bint fetches, bint partial, bint at_once, double switch,
                  double crash, double stall, double wake, int crashes, int stalls, int restarts, int busy_factor,
                  double passes=0.0, int wounds=0):
        cdef int32_t index, life, lives = min(restarts + 1, MOST_LIVES)
        self.arena, self.checker, self.random = arena, checker, seed * <uint64_t> 0x9e3779b97f4a7c15 + 1
        self.n_places, self.n_processes = arena.header.n_lanes, arena.header.n_lanes + arena.header.n_servers
        self.reader_places = Places(self)
        self.n_steps, self.spins, self.null_share = steps, spins, <uint32_t> (null * (1 << 16))
        self.is_partial, self.at_once, self.reads_rows, self.fetches = partial, at_once, reads_rows, fetches
        self.switch_share, self.pass_share = <uint32_t> (switch * (1 << 16)), <uint32_t> (passes * (1 << 16))
        self.crash_share, self.stall_share = <uint32_t> (crash * (1 << 24)), <uint32_t> (stall * (1 << 24))
        self.wake_share, self.busy_factor = <uint32_t> (wake * (1 << 24)), busy_factor
        self.crashes_left, self.stalls_left, self.restarts_left, self.wounds_left = crashes, stalls, restarts, wounds
        self.owners = [[Worker(self, Lane(arena, index), index, life) for life in range(lives)]
                       for index in range(self.n_places)]
        if arena.header.n_servers:
            self.owners.append([Process(self, Lane(arena, self.n_places), self.n_places, 0)])
        for index, owners in enumerate(self.owners):
            for life, process in enumerate(owners):
                (<Process> process).wait.lane.share_folds(helpers)
                self._owners[index][life] = <PyObject *> process

    def end(self):
        """Tell the invariant checker which processes are dead, and which deaths no survivor has handled. The last call."""
        cdef int32_t index
        cdef uint32_t dead = 0, unnoticed = 0
        for index in range(self.n_processes):
            if self.processes[index].state == DEAD:
                dead |= (<uint32_t> 1) << index
                self.checker.posted[index] = self.arena.lane(index).tail  # not what it was about to post
                if not self.processes[index].settled:
                    unnoticed |= (<uint32_t> 1) << index
        if self.checker.message[0] == 0:
            self.checker.end(dead, unnoticed)
        self.owners.clear()  # they refer to this job

    # -- lives -------------------------------------------------------------------------------------

    cdef void born(self, int32_t index) noexcept nogil:
        """A process gets a place; of the others it knows nothing yet. The death of a place's present owner is still to come."""
        cdef int32_t other
        self.reader_places.attached[index] = False
        for other in range(self.n_processes):
            (<Process> self._owners[index][self.processes[index].generation]).marked_dead[other] = (
                self.processes[other].generation)

    cdef void live(self, int32_t index) noexcept nogil:
        (<Process> self._owners[index][self.processes[index].generation]).live()

    cdef bint is_over(self) noexcept nogil:
        """Whether every worker has ended, and the dead are marked as such."""
        cdef int32_t index
        for index in range(self.n_places):
            if self.processes[index].state != ENDED and not (
                    self.processes[index].state == DEAD and self.processes[index].settled):
                return False
        return True

    cdef void wound(self) noexcept nogil:
        """Damage the words of a lane: its count of posts, or a descriptor that is not done with. No access: nobody is told."""
        cdef int32_t victim = <int32_t> (self.draw() % <uint64_t> self.n_places)
        cdef uint64_t what = self.draw() % 3, draw = self.draw()
        cdef fps_lane *lane = self.arena.lane(victim)
        cdef uint64_t done = UINT64_MAX, position
        cdef uint64_t ends = lane.tail + RING_SIZE + 1 + (self.n_steps + 1) * (self.restarts_left + 1)
        cdef uint32_t member = fps_member_state(lane.state), shard
        if (self.processes[victim].generation != fps_member_generation(lane.state) or lane.tail >= MAX_STEPS
                or member in (FPS_LANE_FREE, FPS_LANE_LEFT, FPS_LANE_EXPELLED)):
            return  # another process is about to take the lane, or nobody reads it
        for shard in range(self.arena.header.n_shards):
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


cdef class Process:
    """One process of a job: the server as it is, and what a worker shares with it."""

    cdef Workers job
    cdef Arena arena
    cdef InvariantChecker checker
    cdef Wait wait
    cdef int32_t index                      # of its place
    cdef uint32_t generation                # how many had the place before
    cdef uint32_t marked_dead[MAX_WORKERS]  # of each lane, the owners whom this process knows to be dead

    def __cinit__(self, Workers job not None, Lane lane not None, int32_t index, uint32_t generation):
        self.job, self.arena, self.checker = job, job.arena, job.checker
        self.index, self.generation = index, generation
        self.wait = Wait(lane)
        self.wait.spins = job.spins

    cdef int64_t _now(self) noexcept nogil:
        return self.job.clock(self.index)

    cdef void live(self) noexcept nogil:
        """The life of a server: combine when called, until every worker has ended and the dead are marked as such."""
        self.wait.begin_calls(self._now())
        self._drive()
        self.arena._end(self.index, 0, FPS_LANE_LEFT)

    cdef bint _is_server(self) noexcept nogil:
        return self.index >= self.job.n_places

    cdef void _promise(self, int64_t posted) noexcept nogil:
        """This process has combined, or called the server: what was posted before is decided, or will be.

        A server that has combined rests if it was not called meanwhile.
        """
        if self._is_server():
            if self.wait.lane.words.event == self.wait.seen:
                self.checker.watch_calls()
        elif self.wait.lane.served:
            self.checker.called[self.index] = posted
        else:
            self.checker.promised[self.index] = posted

    cdef void _drive(self) noexcept nogil:
        """Do what the wait wants, until it is over, or the process is expelled, or its world is."""
        cdef int64_t posted
        cdef int want, outcome
        while True:
            posted = self.wait.lane.words.tail
            want = self.wait._want(self._now())
            if want in (WANT_NOTHING, WANT_REST, WANT_PAUSE) and not self.wait.held:
                self._promise(posted)
            if want in (WANT_NOTHING, WANT_EXPELLED):
                return
            if want in (WANT_REST, WANT_PAUSE):
                if self._is_server() and self.job.is_over():
                    return
                outcome = self._pass_by()
                if outcome != COMBINE_BUSY:
                    self.wait.set_outcome(outcome)
                elif want == WANT_REST:
                    self.wait._rest()
                else:
                    self.job.pause(self.wait.slice_ns)
            elif want == WANT_CHECK_PEERS:
                self._check_peers()
            elif want == WANT_EXPEL:
                self._expel(self.wait.lane.bad_lane, self.wait.lane.damage)
            elif want == WANT_TAKE_OVER:
                self._take_over()
            else:
                self.checker.fail(b"combine: worker %ld's ended with outcome %ld (lane %ld)", self.index, self.wait.outcome,
                                  self.wait.lane.bad_lane)
                return

    cdef void _take_over(self) noexcept nogil:
        """Combine from now on: the server has ended."""
        if not fps_mutant(FPS_MUTANT_FORGET_TAKING_OVER):
            self.wait.lane._leave_to_server(False)

    cdef int _pass_by(self) noexcept nogil:
        """Now and then, go on without another process: mostly one that is stopped, rarely one that runs."""
        cdef int32_t other
        cdef int outcome
        if self.job.pass_share == 0 or (self.job.draw() & 0xffff) >= self.job.pass_share:
            return COMBINE_BUSY
        other = <int32_t> (self.job.draw() % <uint64_t> self.job.n_processes)
        if other == self.index or (self.job.processes[other].state != STALLED and self.job.draw() % 8):
            return COMBINE_BUSY
        outcome = self.wait.lane._pass_by(other, self._now())
        self.job.faults.passed_by += outcome != COMBINE_BUSY
        return outcome

    cdef void _expel(self, int32_t bad, uint64_t damage) noexcept nogil:
        """Expel the owner of a lane, whose words must have been damaged; nothing happens where it has another owner by now."""
        if self.arena.expel(bad, damage) and not self.checker.is_wounded(bad, damage >> 40):
            self.checker.fail(b"expelled: worker %ld expels owner %ld of lane %ld, whose words nobody has damaged", self.index,
                              <int64_t> (damage >> 40), bad)

    cdef void _check_peers(self) noexcept nogil:
        """Recover the locks of dead processes that this one has not seen yet, and mark them dead."""
        cdef int32_t dead
        cdef uint32_t generation
        if self._is_server() and fps_mutant(FPS_MUTANT_SERVE_ON):
            return
        self.wait.lane._recover_stale_locks(self._now())
        for dead in range(self.job.n_processes):
            while dead != self.index and self.marked_dead[dead] < self.job.deaths(dead):
                generation = self.marked_dead[dead]
                if generation == self.job.processes[dead].generation:
                    self.job.notice(dead)
                if dead >= self.job.n_places:
                    self._take_over()
                self.wait.lane._lose(dead, generation, self._now())
                if generation == self.job.processes[dead].generation:
                    self.job.processes[dead].settled = True
                self.marked_dead[dead] = generation + 1


cdef class Worker(Process):
    """A worker, which may read published weights also as one that is no worker."""

    cdef Lane lane
    cdef Reading reading                            # or None
    cdef int64_t pushes
    cdef int64_t buffers[MAX_WATCHED_SHARDS]
    cdef uint64_t fetched[MAX_WATCHED_SHARDS]       # commit words: of the last fetch in the background,
    cdef uint64_t kept[MAX_WATCHED_SHARDS]          # and of what the next step reads

    def __cinit__(self, Workers job, Lane lane, int32_t index, uint32_t generation):
        self.lane = lane
        self.reading = Reading(job, job.reader_places, lane, index) if job.arena.header.n_readers else None

    cdef void live(self) noexcept nogil:
        """Take the lane, push every step, and leave; or be expelled."""
        cdef int64_t generation = self.arena.claim(self.index, self.index, True)
        cdef uint32_t shard
        self.checker.own(self.index, self.lane.words.tail)
        if generation != self.generation:
            self.checker.fail(b"claim: worker %ld got generation %ld, expected %ld", self.index, generation, self.generation)
        for shard in range(self.lane.n_shards):
            (<Combiner> self.lane._combiners[shard]).lock.generation = self.generation
        self.lane._begin()
        self.lane.loss = 0
        self.lane._leave_to_server(self.arena.is_served())
        if generation > 0:
            self._join()
        self.lane.steps = self.lane.begin_steps()
        self._pull(True)
        if self.reading is not None:
            self.reading.attach()
        while self.pushes < self.job.n_steps and not self._is_out():
            self._compute()
            self._push(FPS_NULL if (self.job.draw() & 0xffff) < self.job.null_share else FPS_PUSH)
            self._advance()
            self._pull(False)
        if not self._is_out():
            self._leave()
        if self._is_out():  # the process ends by an error, and another may take its place
            self.arena._drop_pins(self.index)
            self.job._die(&self.job.processes[self.index])
            self.job._switch()

    cdef bint _is_out(self) noexcept nogil:
        """Whether this process was expelled. Where no lane was damaged it does not ask."""
        return self.checker.wounded[self.index] and self.lane.is_expelled()

    cdef void _join(self) noexcept nogil:
        """Wait until every shard counts this worker."""
        self.lane._recover_locks(self.index, self.generation - 1, self._now())
        self.wait.begin_join(self._now())
        self._drive()
        self.arena._move(self.index, FPS_LANE_JOINING, FPS_LANE_LIVE)

    # -- what is read ------------------------------------------------------------------------------

    cdef void _compute(self) noexcept nogil:
        """Read the pulled weights, now and then."""
        cdef int32_t _look
        for _look in range(<int32_t> (self.job.draw() % 4)):
            self.job.at_access()
            self._check_reads()
            self._scribble()
            if self.job.fetches:
                self._fetch()
            if self.reading is not None and self.reading.look():
                self._give_back()

    cdef void _give_back(self) noexcept nogil:
        """Give back what readers brought that have gone, under the shard locks, and release them."""
        cdef uint32_t shard
        cdef int outcome
        for shard in range(self.reading.hold(self.generation)):
            outcome = (<Combiner> self.lane._combiners[shard]).release(False, self._now(), False)
            self.wait.begin_outcome(self.lane._noted(shard, outcome), self._now())
            self._drive()

    cdef void _scribble(self) noexcept nogil:
        """Write into the weights that this worker's model shows, as a script does: into the private view. No draw is made."""
        cdef uint64_t chance = (self.job.random ^ self.job.events) * <uint64_t> 0x9e3779b97f4a7c15 >> 32
        cdef uint32_t shard = chance % self.lane.n_shards
        cdef char *weights = self.job.views[self.index].address + (
            <char *> self.arena.weights(self.buffers[shard]) - self.arena.base)
        if chance % 4 == 0:
            (<float *> weights)[self.arena.first[shard] + (chance >> 8) % SHARD_FLOATS] = 1e30

    cdef void _pull(self, bint is_first) noexcept nogil:
        cdef uint64_t commit, before
        cdef uint32_t shard
        fps_view_renew(self.job.views[self.index].view)
        for shard in range(self.lane.n_shards):
            if self.job.is_partial and not is_first and self.lane._granted(shard) < self.lane.steps + 1:
                continue
            before = self.lane.versions[shard]
            if self.job.fetches and not is_first:
                commit = self.kept[shard]
                self.lane._take(shard, fps_commit_buffer(commit), fps_commit_version(commit))
            else:
                commit = self.lane._pull(shard)
            if fps_commit_version(commit) < before:
                self.checker.fail(b"versions: worker %ld pulled %ld after %ld", self.index, fps_commit_version(commit), before)
            self.kept[shard] = commit
            self.buffers[shard] = fps_commit_buffer(commit)
        self._check_reads()

    cdef void _fetch(self) noexcept nogil:
        """Begin to fetch each shard's newest version in the background, or keep the one that was fetched."""
        cdef uint32_t shard
        for shard in range(self.lane.n_shards):
            if fps_commit_version(self.fetched[shard]) <= fps_commit_version(self.kept[shard]):
                self.fetched[shard] = self.lane._prefetch(shard)
            else:
                self.lane._keep(shard, fps_commit_buffer(self.fetched[shard]))
                self.kept[shard] = self.fetched[shard]

    cdef void _check_reads(self) noexcept nogil:
        """What is pinned is whole, and stays as it was published."""
        cdef uint32_t shard
        for shard in range(self.lane.n_shards):
            if not self.checker.is_content(shard, self.lane.versions[shard], self.buffers[shard]):
                self.checker.fail(b"torn read: worker %ld reads version %ld of shard %ld, and it has changed", self.index,
                                  self.lane.versions[shard], shard)
            # Nobody waits for a worker that was expelled, and may not know it yet.
            if (self.job.reads_rows and not self.lane.awaits
                    and not self.checker.is_wounded(self.index, self.generation)):
                self.checker.watch_rows(shard, self.buffers[shard], b"a step reads that")

    # -- pushes, and waiting for what follows ------------------------------------------------------

    cdef void _push(self, uint32_t kind) noexcept nogil:
        """Push, and end the combine that follows: what was posted before is decided then."""
        cdef int outcome
        if kind == FPS_PUSH:
            self.checker.write_slot(self.index, self.lane.slot, self.lane.posts, self.lane.steps)
        self.checker.promise(self.index, self.lane.words.tail, kind)
        while True:
            outcome = self.lane._push(self._now(), 1.0, 1, kind == FPS_NULL)
            if outcome == PUSH_EXPELLED or self._is_out():
                return
            if outcome != PUSH_FULL:
                break
            self._wait_for_room()
        self.pushes += 1
        if outcome == COMBINE_BUSY:
            outcome = self._pass_by()
        self.wait.begin_outcome(outcome, self._now())
        self._drive()
        if self.job.wounds_left and self.job.draw() % 8 == 0:
            self.job.wound()

    cdef void _wait_for_room(self) noexcept nogil:
        self.wait.begin_step(0, self.lane.words.tail + 1 - self.arena.header.ring_size, self._now())
        self._drive()

    cdef void _advance(self) noexcept nogil:
        """Begin the next step, once it may begin."""
        if self.lane.advance(self._now(), self.job.at_once):
            return
        self.wait.begin_step(0 if self.job.at_once else self.lane.steps + 1, self.lane.free_at[self.lane.slot], self._now(),
                             1 if self.job.is_partial else 0)
        self._drive()
        self.lane.advance_late(self._now())

    cdef void _leave(self) noexcept nogil:
        """Post LEAVE, and combine with the others until every push is decided."""
        self.checker.promise(self.index, self.lane.words.tail, FPS_LEAVE)
        while not self.lane._post(FPS_LEAVE, self.lane.steps, 0, self.lane._oldest(), self._now(), 1.0, 0.0, 0):
            if self._is_out():
                return
            self._wait_for_room()
        self.arena._move(self.index, FPS_LANE_LIVE, FPS_LANE_LEAVING)
        self.wait.begin_last(self.job.n_places, self._now())
        self._drive()
        if self._is_out():
            return
        self._pull(True)
        if self.reading is not None:
            self.reading.detach()
        self.arena._drop_pins(self.index)
        self.arena._end(self.index, self.generation, FPS_LANE_LEFT)
