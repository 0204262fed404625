"""The invariant checker of a simulated job: it watches every event, and reports what must be true of it and is not.

It knows only what the protocol promises, not how the protocol works, and reads what is published: commit words, records,
cursors, weights, rule state, heads and grants. Each push has a gradient of its own: 1 in the one place that belongs to its
worker and step, 0 elsewhere. So the difference of two versions' weights tells exactly which pushes were folded, and how often.
Only the pushes of an owner whose own words were damaged may be dropped; those of a lane's other owners may not.
Where versions carry something, each push brings a value that names it.
Where a shard has a table, a push also has the row of its worker and step, which must move as its weight does, and one row that
all pushes have.
"""

from libc.math cimport fabs
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.stdio cimport snprintf
from libc.stdlib cimport calloc, free
from libc.string cimport memcmp, memcpy, memset

from fastps.kernels.base.failpoints cimport FPS_FAILPOINT
from fastps.kernels.scheduling.state cimport scheduler_t, state_slowest_clock, state_workers, worker_t
from fastps.kernels.shm.arena cimport Arena
from fastps.kernels.shm.arena_h cimport *
from fastps.kernels.update.fold cimport fps_hyper
from fastps.kernels.rows.rows_h cimport fps_rows, fps_rows_values_offset, fps_table

cdef enum:
    SHARD_BYTES = SHARD_FLOATS * sizeof(float)
    GARBAGE = 1000  # what a slot holds while it is written


cdef inline bint _differs(double found, double expected) noexcept nogil:
    return not fabs(found - expected) < 1e-3  # a NaN differs


cdef class InvariantChecker:
    """Watches `arena`, in which `n_workers` workers push `n_steps` steps each.

    Args:
        is_sum: whether pushes are folded together; is_mean: whether they are divided by their number then.
        may_drop: whether late pushes may be dropped.
        bound: how far ahead of the slowest a worker may be when it is granted a step; -1: any.
    """

    def __cinit__(self, Arena arena not None, int32_t n_workers, int32_t n_steps, *, bint is_sum, bint is_mean, bint may_drop,
                  int64_t bound):
        cdef int32_t shard, index
        if not (1 <= n_workers <= MAX_WORKERS and 1 <= n_steps < MAX_STEPS and arena.header.n_shards <= MAX_WATCHED_SHARDS):
            raise ValueError(f"expected at most {MAX_WORKERS} workers, {MAX_STEPS - 1} steps and {MAX_WATCHED_SHARDS} shards")
        self.arena = arena
        self.n_workers = n_workers
        self.n_shards = arena.header.n_shards
        self.is_sum = is_sum
        self.is_mean = is_mean
        self.may_drop = may_drop
        self.has_state = arena.header.state_planes > 0
        self.has_tables = arena.header.n_tables > 0
        self.bound = bound
        self.shards = <watched_t *> calloc(self.n_shards, sizeof(watched_t))
        if not self.shards:
            raise MemoryError()
        for shard in range(self.n_shards):
            self.shards[shard].commit = arena.shard_header(shard).commit
            for index in range(n_workers):
                self.shards[shard].granted[index] = self.shards[shard].told_granted[index] = 1

    def __dealloc__(self):
        free(self.shards)

    def outcome(self):
        """What was seen, by name."""
        return {"flips": self.flips, "damaged_lanes": self.wounds, "violation": (<bytes> self.message).decode() or None}

    cdef void fail(self, const char *what, int64_t a, int64_t b, int64_t c) noexcept nogil:
        """Write the first violation down, with three numbers."""
        if self.message[0] == 0:
            snprintf(self.message, sizeof(self.message), what, a, b, c)

    # -- what the processes tell -------------------------------------------------------------------

    cdef void own(self, int32_t index, uint64_t posted) noexcept nogil:
        """A process has a lane from now on, behind `posted` descriptors."""
        cdef uint64_t position
        self.called[index] = 0
        for position in range(posted, MAX_STEPS):
            self.owners[index][position] = 0  # what the last owner was about to post
        if self.wounded[index]:
            self.posted[index] = posted
            self.promised[index] = 0  # what a damaged count promised
            self.starts[index] = posted

    cdef void watch_calls(self) noexcept nogil:
        """A server rests, and was not called since it began to combine.

        An owner that joins calls, too, before it posts: what was left behind a damaged count is skipped only when it joins.
        """
        cdef int32_t shard
        for shard in range(self.n_shards):
            self._watch_left(shard, self.called, b"missed call: the server rests over push %ld of worker %ld (shard %ld)")

    cdef void promise(self, int32_t index, uint64_t position, uint32_t kind) noexcept nogil:
        """A lane's owner is about to post a descriptor."""
        if position >= MAX_STEPS:
            return  # damaged: it cannot be posted
        self.kinds[index][position] = kind
        self.owners[index][position] = self._generation(index) + 1
        self.posted[index] = position + 1

    cdef void wound(self, int32_t index, uint64_t first, uint64_t end, bint is_count) noexcept nogil:
        """Descriptors of a lane are damaged; or its count of posts, which is the present owner's, and says where these end."""
        cdef uint64_t position
        self.wounds += 1
        for position in range(first, end):
            if self.owners[index][position]:
                self.wounded[index] |= <uint32_t> 1 << (self.owners[index][position] - 1)
        if is_count:
            self.wounded[index] |= <uint32_t> 1 << self._generation(index)
            self.miscounted[index] |= self.wounded[index]

    cdef bint is_wounded(self, int32_t index, uint32_t generation) noexcept nogil:
        """Whether words of that owner of a lane were damaged."""
        return (self.wounded[index] >> generation) & 1

    cdef uint32_t _generation(self, int32_t index) noexcept nogil:
        return fps_member_generation(self.arena.lane(index).state)

    cdef float *_range(self, uint32_t shard, uint64_t buffer) noexcept nogil:
        return self.arena.weights(buffer) + self.arena.first[shard]

    # -- what is pushed ----------------------------------------------------------------------------

    cdef void write_slot(self, int32_t index, uint32_t number, int64_t position, uint64_t step) noexcept nogil:
        """The descriptor's own gradient, over what was there; a premature read sees garbage."""
        cdef char *slot = self.arena.slot(index, number)
        cdef fps_hyper *hyper = <fps_hyper *> slot
        cdef float *gradient = <float *> (slot + self.arena.header.slot_gradient_offset)
        cdef int32_t i, shard
        FPS_FAILPOINT()
        for i in range(self.n_shards * SHARD_FLOATS):
            gradient[i] = GARBAGE
        hyper.learning_rate = GARBAGE
        FPS_FAILPOINT()
        memset(gradient, 0, self.n_shards * SHARD_FLOATS * sizeof(float))
        FPS_FAILPOINT()
        for shard in range(self.n_shards):
            gradient[shard * SHARD_FLOATS + index * MAX_STEPS + position % MAX_STEPS] = 1.0
        FPS_FAILPOINT()
        hyper.learning_rate = 1.0
        hyper.epsilon = 1e-10  # the floats without a gradient are 0 / (0 + epsilon)
        (<uint64_t *> (slot + self.arena.header.slot_presence_offset))[0] = (1 << self.arena.header.n_parameters) - 1
        self._write_rows(index, number, position)
        if self.arena.header.carried_bytes:
            self._bring(index, number, index * MAX_STEPS + position % MAX_STEPS + 1, step)

    cdef void _bring(self, int32_t index, uint32_t number, uint64_t value, uint64_t step) noexcept nogil:
        """A value that names the push, several times, for its version to carry."""
        cdef uint64_t *words = <uint64_t *> self.arena.brought(index, number)
        cdef int32_t i
        for i in range(FPS_LINE // 8, CARRIED_BYTES // 8):
            words[i] = value
            if i % 4 == 0:
                FPS_FAILPOINT()
        words[0] = step + 1

    cdef bint is_carried(self, uint64_t version, uint64_t buffer) noexcept nogil:
        """Whether what a pinned buffer carries is whole, of a push, and what the version carried at the first look."""
        cdef const uint64_t *words = <const uint64_t *> self.arena.carried(buffer)
        cdef uint64_t value = words[FPS_LINE // 8]
        cdef int32_t i
        if words[0] == 0:
            return True  # no reader counted when the version was made
        for i in range(FPS_LINE // 8, CARRIED_BYTES // 8):
            if words[i] != value:
                return False
        if not 0 < value <= <uint64_t> self.n_workers * MAX_STEPS:
            return False
        if version >= MAX_VERSIONS:
            return True
        if self.carried[version] == 0:
            self.carried[version] = value
        return self.carried[version] == value

    cdef void _write_rows(self, int32_t index, uint32_t number, int64_t position) noexcept nogil:
        """The row of the worker and step, and the row that every push has, of each table."""
        cdef char *slot = self.arena.row_slot(index, number)
        cdef const fps_table *table
        cdef fps_rows *rows
        cdef float *values
        cdef uint32_t each
        cdef int32_t i
        for each in range(self.arena.header.n_tables):
            table = &self.arena.tables[each]
            rows = <fps_rows *> (slot + table.slot_offset)
            values = <float *> (<char *> rows + fps_rows_values_offset(table))
            FPS_FAILPOINT()
            rows.count = SHARD_FLOATS  # garbage: a premature read would write all rows
            for i in range(SHARD_FLOATS * ROW_FLOATS):
                values[i] = GARBAGE
            FPS_FAILPOINT()
            rows.count = 2
            (<uint32_t *> (rows + 1))[0] = index * MAX_STEPS + position % MAX_STEPS
            (<uint32_t *> (rows + 1))[1] = SHARD_FLOATS
            for i in range(2 * ROW_FLOATS):
                values[i] = 1.0

    # -- at every event ----------------------------------------------------------------------------

    cdef void look(self, int32_t runs) noexcept nogil:
        """Look at what the event before this one published; `runs`: the worker that ran."""
        cdef int32_t shard
        cdef uint64_t commit, lock
        cdef scheduler_t *state
        for shard in range(self.n_shards):
            commit = self.arena.shard_header(shard).commit
            if commit != self.shards[shard].commit:
                self._watch_flip(shard, commit, runs)
            state = self.arena.scheduler(shard, fps_commit_record(commit))
            self._watch_lane_shards(shard, state)
            lock = self.arena.shard_header(shard).lock
            if fps_lock_owner(lock) == 0 and lock != self.shards[shard].lock:
                self.watch_rows(shard, fps_commit_buffer(commit), b"under a free lock")
            self.shards[shard].lock = lock
            self._watch_left(shard, self.promised, b"stranded: push %ld of worker %ld is left under a free lock (shard %ld)")

    cdef void _watch_left(self, uint32_t shard, const int64_t *told, const char *what) noexcept nogil:
        """No lock is free over descriptors whose owner combined, or called the server: of each lane those below `told`."""
        cdef const fps_shard_header *words = self.arena.shard_header(shard)
        cdef const worker_t *workers = state_workers(self.arena.scheduler(shard, fps_commit_record(words.commit)))
        cdef int32_t index
        if fps_lock_owner(words.lock) or words.lock & FPS_PENDING:
            return
        for index in range(self.n_workers):
            if (workers[index].consumed < told[index] != self.starts[index]
                    and not self.is_wounded(index, self._generation(index))):
                self.fail(what, workers[index].consumed, index, shard)

    cdef void _watch_lane_shards(self, uint32_t shard, const scheduler_t *state) noexcept nogil:
        """Heads and grants never go back, and never say what is not committed."""
        cdef int32_t index
        cdef const fps_lane_shard *lane_shard
        cdef const worker_t *worker
        cdef int64_t steps
        cdef bint is_told
        cdef watched_t *known = &self.shards[shard]
        for index in range(self.n_workers):
            lane_shard = self.arena.lane_shard(index, shard)
            worker = &state_workers(state)[index]
            if <int64_t> lane_shard.head > worker.cursor or <int64_t> lane_shard.head < known.head[index]:
                self.fail(b"head: worker %ld was told that descriptors below %ld are done with, committed are %ld",
                          index, lane_shard.head, worker.cursor)
            if worker.generation != known.generation[index]:
                known.generation[index] = worker.generation  # another owner has joined
                if worker.live and worker.clock != state_slowest_clock(state):
                    self.fail(b"join: worker %ld begins at clock %ld of shard %ld, and is not its slowest", index,
                              worker.clock, shard)
                known.granted[index] = worker.granted
                known.told_granted[index] = 0
            steps = fps_granted_steps(lane_shard.granted)
            is_told = fps_granted_generation(lane_shard.granted) == worker.generation
            if is_told and (steps > worker.granted or steps < known.told_granted[index]):
                self.fail(b"grant: worker %ld was told %ld steps, committed are %ld", index, steps, worker.granted)
            known.head[index] = lane_shard.head
            known.told_granted[index] = steps if is_told else 0

    cdef bint is_content(self, uint32_t shard, uint64_t version, uint64_t buffer) noexcept nogil:
        """Whether a buffer has the version's weights, unless the version is too old to be remembered."""
        if version + REMEMBERED <= fps_commit_version(self.shards[shard].commit):
            return True
        return memcmp(self._range(shard, buffer), self.shards[shard].weights[version % REMEMBERED], SHARD_BYTES) == 0

    # -- a flip ------------------------------------------------------------------------------------

    cdef void _watch_flip(self, uint32_t shard, uint64_t commit, int32_t runs) noexcept nogil:
        cdef watched_t *known = &self.shards[shard]
        cdef uint64_t before = known.commit
        cdef int64_t versions = <int64_t> fps_commit_version(commit) - <int64_t> fps_commit_version(before)
        cdef fps_record *record = &self.arena.shard_header(shard).records[fps_commit_record(commit)]
        cdef scheduler_t *state = self.arena.scheduler(shard, fps_commit_record(commit))
        cdef int64_t passed = 0, expected, n
        known.commit = commit
        # A lock that was taken over is fenced only by the epoch in the commit word: until then its late owner may commit.
        if (fps_lock_owner(self.arena.shard_header(shard).lock) != <uint64_t> runs + 1
                and fps_lock_epoch(self.arena.shard_header(shard).lock) == fps_commit_epoch(commit)):
            self.fail(b"flip: worker %ld flipped shard %ld in the shard lock of worker %ld", runs, shard,
                      <int64_t> fps_lock_owner(self.arena.shard_header(shard).lock) - 1)
        if versions == 0 and fps_commit_record(commit) == fps_commit_record(before):
            if fps_commit_buffer(commit) != fps_commit_buffer(before):
                self.fail(b"flip: version %ld of shard %ld changed its buffer to %ld", fps_commit_version(commit), shard,
                          fps_commit_buffer(commit))
            return  # a lock was recovered
        self.flips += 1
        if record.version != fps_commit_version(commit) or record.weights_buffer != fps_commit_buffer(commit) \
                or <uint64_t> state.version != fps_commit_version(commit):
            self.fail(b"record: version %ld was published with a record of version %ld and a scheduler of %ld",
                      fps_commit_version(commit), record.version, state.version)
            return
        n = self._watch_weights(shard, state, before, commit)
        self.watch_rows(shard, fps_commit_buffer(commit), b"at the flip")
        self._watch_cursors(shard, state, &passed)
        expected = passed
        if self.is_sum and self.may_drop:
            expected = 1 if n > 0 else min(versions, <int64_t> 1)  # what was passed may have been dropped
        elif self.is_sum:
            expected = min(passed, <int64_t> 1)
        if versions != expected and not self.wounds:
            self.fail(b"version: %ld pushes were passed at once, and %ld versions (now %ld)", passed, versions, state.version)
        if self.has_state:
            self._watch_state(shard, record.state_buffer, n, 1.0 / n if self.is_mean else 1.0)
        self._watch_grants(shard, state)

    cdef int64_t _watch_weights(
            self, uint32_t shard, const scheduler_t *state, uint64_t before, uint64_t after) noexcept nogil:
        """Which pushes were folded: the differences of the weights. Returns how many."""
        cdef watched_t *known = &self.shards[shard]
        cdef const float *old = known.weights[fps_commit_version(before) % REMEMBERED]
        cdef const float *new = self._range(shard, fps_commit_buffer(after))
        cdef int32_t index, step
        cdef int64_t n = 0
        cdef double expected
        for index in range(SHARD_FLOATS):
            n += new[index] != old[index]
        # Adagrad without an epsilon moves a weight by the learning rate, whatever its first gradient.
        expected = 1.0 / n if self.is_mean and not self.has_state and n > 0 else 1.0
        for index in range(MAX_WORKERS):
            for step in range(MAX_STEPS):
                if new[index * MAX_STEPS + step] == old[index * MAX_STEPS + step]:
                    continue
                if index >= self.n_workers or step >= self.posted[index] or self.kinds[index][step] != FPS_PUSH:
                    self.fail(b"folded: worker %ld's step %ld changed shard %ld, and was not pushed", index, step, shard)
                elif known.is_folded[index][step]:
                    self.fail(b"folded twice: step %ld of worker %ld, in shard %ld", step, index, shard)
                elif not known.cursor[index] <= step < state_workers(state)[index].cursor:
                    self.fail(b"folded: step %ld of worker %ld is not below the cursor %ld", step, index,
                              state_workers(state)[index].cursor)
                elif _differs(old[index * MAX_STEPS + step] - new[index * MAX_STEPS + step], expected):
                    self.fail(b"torn gradient: step %ld of worker %ld moved its weight by %ld millionths", step, index,
                              <int64_t> (1e6 * (old[index * MAX_STEPS + step] - new[index * MAX_STEPS + step])))
                known.is_folded[index][step] = 1
                known.folded[index] += 1
        memcpy(known.weights[fps_commit_version(after) % REMEMBERED], new, SHARD_BYTES)
        return n

    cdef void watch_rows(self, uint32_t shard, uint64_t buffer, const char *what) noexcept nogil:
        """The rows of the shard's table are those of the version in this buffer, and nothing is folded half or twice."""
        cdef const float *weights = self._range(shard, buffer)
        cdef const float *rows
        cdef int32_t index
        cdef double total = 0
        if not self.has_tables:
            return
        rows = <const float *> (self.arena.rows() + self.arena.tables[shard].weights_offset)
        for index in range(SHARD_FLOATS):
            total += weights[index]
            self._watch_row(what, shard, index, rows, weights[index])
        if not self.has_state:
            self._watch_row(what, shard, SHARD_FLOATS, rows, total)

    cdef void _watch_row(self, const char *what, int64_t shard, int64_t row, const float *rows, double expected) noexcept nogil:
        """Every float of a row has the expected value."""
        cdef int32_t column
        for column in range(ROW_FLOATS):
            if _differs(rows[row * ROW_FLOATS + column], expected) and self.message[0] == 0:
                snprintf(self.message, sizeof(self.message), b"rows: %s row %ld of shard %ld is %g, and its weight %g", what,
                         row, shard, <double> rows[row * ROW_FLOATS + column], expected)

    cdef void _watch_cursors(self, uint32_t shard, const scheduler_t *state, int64_t *passed) noexcept nogil:
        """Cursors only move on, not beyond what was posted, and pass no push that is not folded (or may be dropped)."""
        cdef watched_t *known = &self.shards[shard]
        cdef const worker_t *worker
        cdef int32_t index
        cdef int64_t position
        for index in range(self.n_workers):
            worker = &state_workers(state)[index]
            if not known.cursor[index] <= worker.cursor <= worker.consumed or (
                    worker.consumed > self.posted[index] and not self.miscounted[index]):
                self.fail(b"cursor: worker %ld's went from %ld to %ld", index, known.cursor[index], worker.cursor)
                continue
            for position in range(known.cursor[index], min(worker.cursor, self.posted[index])):
                if self.kinds[index][position] == FPS_LEAVE or not self.owners[index][position]:
                    continue
                passed[0] += 1
                if self.kinds[index][position] == FPS_NULL:
                    known.folded[index] += 1
                    known.nulls[index] += 1
                elif not known.is_folded[index][position]:
                    known.dropped[index] += 1
                    if not self.may_drop and not self.is_wounded(index, self.owners[index][position] - 1):
                        self.fail(b"lost: step %ld of worker %ld was passed in shard %ld, and not folded", position, index,
                                  shard)
            known.cursor[index] = worker.cursor

    cdef void _watch_state(self, uint32_t shard, uint64_t buffer, int64_t n, double gradient) noexcept nogil:
        """The rule's state (Adagrad's sum of squares) and its count of steps go with the weights."""
        cdef watched_t *known = &self.shards[shard]
        cdef const int64_t *steps = <const int64_t *> self.arena.state(buffer) + shard
        cdef const float *plane = (<const float *> (self.arena.state(buffer) + self.arena.header.state_steps_bytes)
                                   + self.arena.first[shard])
        cdef const float *rows
        cdef int32_t index
        if n == 0:
            if buffer != known.record_state:
                self.fail(b"state: nothing was folded in shard %ld, and the state's buffer went from %ld to %ld", shard,
                          known.record_state, buffer)
            return
        known.record_state = buffer
        known.rule_steps += 1 if self.is_sum else n
        if steps[0] != known.rule_steps:
            self.fail(b"state: the rule of shard %ld counts %ld steps, expected %ld", shard, steps[0], known.rule_steps)
        for index in range(SHARD_FLOATS):
            if plane[index] != known.state[index] and (known.state[index] != 0 or _differs(plane[index], gradient * gradient)):
                self.fail(b"state: float %ld of shard %ld is %ld millionths", index, shard, <int64_t> (1e6 * plane[index]))
        memcpy(known.state, plane, SHARD_BYTES)
        if self.has_tables:
            rows = <const float *> (self.arena.rows() + self.arena.tables[shard].planes_offset[0])
            for index in range(SHARD_FLOATS):
                self._watch_row(b"the state of", shard, index, rows, plane[index])

    cdef void _watch_grants(self, uint32_t shard, const scheduler_t *state) noexcept nogil:
        """No worker is granted a step that is too far ahead of the slowest.

        Of a commit in which a worker joined, perhaps at a lower clock, the order of events is not visible.
        """
        cdef watched_t *known = &self.shards[shard]
        cdef const worker_t *worker
        cdef int32_t index
        cdef bint joins = False
        for index in range(self.n_workers):
            joins = joins or state_workers(state)[index].generation != known.generation[index]
        for index in range(self.n_workers):
            worker = &state_workers(state)[index]
            if worker.generation != known.generation[index]:
                continue
            if worker.granted < known.granted[index]:
                self.fail(b"grant: worker %ld's went back from %ld to %ld", index, known.granted[index], worker.granted)
            elif worker.granted > known.granted[index] and self.bound >= 0 and worker.live and not joins \
                    and worker.granted - 1 - state_slowest_clock(state) > self.bound:
                self.fail(b"bound: worker %ld was granted step %ld, the slowest is at %ld", index, worker.granted,
                          state_slowest_clock(state))
            known.granted[index] = worker.granted

    # -- the end -----------------------------------------------------------------------------------

    cdef void end(self, uint32_t dead, uint32_t unnoticed) noexcept nogil:
        """All processes have ended: no lock is held, and all pushes are accounted for, in the arena's counters, too.

        `dead`: the dead, as bits. `unnoticed`: those of them that died when all others had ended, were about to end, or died
        while they recovered it. These may still hold a lock and be counted, and their last posts may be undecided.
        The same holds for lanes that they expelled: the next combiner retires an expelled lane, and there was none.
        """
        cdef int32_t shard, index
        cdef bint is_expelled
        cdef scheduler_t *state
        cdef uint64_t owner
        if dead == (<uint32_t> 1 << self.n_workers) - 1:
            return  # the last one was expelled: nobody stays to account for anything
        for shard in range(self.n_shards):
            state = self.arena.scheduler(shard, fps_commit_record(self.shards[shard].commit))
            owner = fps_lock_owner(self.arena.shard_header(shard).lock)
            if owner != 0 and not (unnoticed >> (owner - 1)) & 1:
                self.fail(b"lock: worker %ld holds the lock of shard %ld at the end (%ld)", owner - 1, shard, unnoticed)
            for index in range(self.n_workers):
                is_expelled = fps_member_state(self.arena.lane(index).state) == FPS_LANE_EXPELLED
                if not (unnoticed >> index) & 1 and not (is_expelled and unnoticed):
                    self._check_end(shard, index, state, not (dead >> index) & 1)

    cdef void _check_end(self, uint32_t shard, int32_t index, const scheduler_t *state, bint lives) noexcept nogil:
        """What a lane posted is accounted for in a shard; its last process lives, or its death was noticed."""
        cdef watched_t *known = &self.shards[shard]
        cdef const fps_lane_shard *words = self.arena.lane_shard(index, shard)
        cdef bint is_expelled = fps_member_state(self.arena.lane(index).state) == FPS_LANE_EXPELLED
        # Of a null push it is not visible whether it was folded or dropped.
        cdef int64_t uncertain = known.nulls[index] if self.may_drop or self.wounded[index] else 0
        cdef int64_t counted = words.folded + words.dropped, passed = known.folded[index] + known.dropped[index]
        cdef uint64_t left = fps_lock_left(self.arena.shard_header(shard).lock)
        if state_workers(state)[index].live and (is_expelled or lives):
            self.fail(b"state: worker %ld is still counted at the end (shard %ld, expelled: %ld)", index, shard, is_expelled)
        if (self.miscounted[index] >> self._generation(index)) & 1:
            return  # nobody knows where its posts end
        if known.cursor[index] != self.posted[index] or <int64_t> words.head != known.cursor[index]:
            self.fail(b"push log: worker %ld posted %ld descriptors, done with are %ld", index, self.posted[index],
                      known.cursor[index])
        if left and fps_member_state(self.arena.lane(left - 1).state) == FPS_LANE_EXPELLED:
            return  # it may have written counters late, which the next combiner writes again once it has ended
        if (not known.folded[index] - uncertain <= words.folded <= known.folded[index]
                or (counted > passed if self.miscounted[index] else counted != passed)):
            self.fail(b"push log: worker %ld's counters say that %ld are folded or dropped, seen were %ld", index, counted,
                      passed)
