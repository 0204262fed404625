"""The arena's control words: which process has which lane, what is committed, which lane copies a version, what was counted.

Each counted value is current, but they are not of one moment.
"""

cimport cython
from libc.stdint cimport INT64_MAX, UINT64_MAX, int64_t, uint32_t, uint64_t
from libc.string cimport memcpy, strncpy

from fastps.kernels.base.atomics cimport *
from fastps.kernels.base.failpoints cimport *
from fastps.kernels.scheduling.state cimport scheduler_t, state_workers, worker_t
from fastps.kernels.shm.arena_h cimport *
from fastps.kernels.shm.view cimport ArenaView

cdef extern from "shm/arena.h" nogil:
    cpdef enum:
        MAX_BUFFERS "FPS_MAX_BUFFERS", STATE_BUFFERS "FPS_STATE_BUFFERS"
        LANE_FREE "FPS_LANE_FREE", LANE_JOINING "FPS_LANE_JOINING", LANE_LIVE "FPS_LANE_LIVE", LANE_LEAVING "FPS_LANE_LEAVING"
        LANE_LEFT "FPS_LANE_LEFT", LANE_FAILED "FPS_LANE_FAILED", LANE_DEAD "FPS_LANE_DEAD"
        LANE_SERVING "FPS_LANE_SERVING", LANE_EXPELLED "FPS_LANE_EXPELLED"
        OUTCOME_FOLDED "FPS_OUTCOME_FOLDED", OUTCOME_DROPPED "FPS_OUTCOME_DROPPED", OUTCOME_REJECTED "FPS_OUTCOME_REJECTED"
        DAMAGED_RING "FPS_DAMAGED_RING", DAMAGED_KIND "FPS_DAMAGED_KIND", DAMAGED_SLOT "FPS_DAMAGED_SLOT"
        DAMAGED_TURN "FPS_DAMAGED_TURN"

ABI = FPS_ABI
LINE_FLOATS = FPS_LINE // 4


@cython.final
cdef class Arena(ArenaView):
    """The control words of an arena in `memory`, which is checked as ArenaView says."""

    # -- what is committed -------------------------------------------------------------------------

    @property
    def version(self):
        """Updates so far, of the shard that has the fewest."""
        return min(self.shard_version(shard) for shard in range(self.header.n_shards))

    def shard_version(self, uint32_t shard):
        """Updates of one shard so far."""
        return fps_commit_version(fps_commit_load(&self.shard_header(shard).commit))

    def committed(self, uint32_t shard=0):
        """(version, weights buffer, state buffer) of a shard's last commit. Final only for its combiner.

        Raises ValueError for buffers that the arena has not.
        """
        cdef uint64_t commit = fps_commit_load(&self.shard_header(shard).commit)
        cdef fps_record *record = &self.shard_header(shard).records[fps_commit_record(commit)]
        return fps_commit_version(commit), *self._buffers_of(commit, record.state_buffer)

    cdef tuple _buffers_of(self, uint64_t commit, uint32_t state_buffer):
        """(weights buffer, state buffer) of a commit, checked, because readers use these numbers as indices."""
        if not self.has_buffer(fps_commit_buffer(commit)) or not self.has_state(state_buffer):
            raise ValueError(f"expected weights buffer 0 to {self.spare_weights()} and state buffer 0 to "
                             f"{FPS_STATE_BUFFERS}, found {fps_commit_buffer(commit)} and {state_buffer}: the arena is "
                             "damaged")
        return fps_commit_buffer(commit), state_buffer

    def pins(self, uint32_t shard=0):
        """The buffer that each lane pins, or -1."""
        return [<int64_t> fps_pin_load(&self.lane_shard(index, shard).pin) - 1 for index in range(self.header.n_lanes)]

    def is_asked_to_stop(self):
        """Whether a reader has asked the training to stop."""
        return fps_counter_get(&self.readers_words().stop) != 0

    cpdef void lower_readers(self, uint64_t readers) noexcept nogil:
        """Let the pins and buffers of only the first `readers` readers count.

        The caller holds all shard locks and the names of the other readers' places, and nobody reads their buffers.
        """
        cdef uint64_t *ready = &self.readers_words().ready
        cdef uint64_t seen = fps_readers_load(ready)
        while seen > readers and not fps_readers_raise(ready, seen, readers):
            seen = fps_readers_load(ready)

    # -- membership --------------------------------------------------------------------------------

    cpdef int64_t claim(self, uint32_t lane, int64_t process_id, bint rejoin=False) except? -2 nogil:
        """Make the lane this process's own. Returns its new generation, or -1 if another process has it, or had it.

        The first owner of a lane whose worker is counted from the beginning is live at once, as generation 0. Any other owner
        is JOINING until `joined`; `rejoin` allows one after an earlier owner. The caller listens at the lane's name, so no
        other process claims the lane, and the owner that the lane names has ended.
        """
        self._check_lane(lane)
        cdef fps_lane *words = self.lane(lane)
        cdef uint32_t member = fps_state_acquire(&words.state), generation
        cdef bint is_counted = self._committed(lane, 0).live
        if fps_member_state(member) == FPS_LANE_FREE and is_counted:
            # The process id before the state: a process that sees the lane live can name its process.
            FPS_FAILPOINT()
            words.process_id = process_id
            return 0 if fps_state_change(&words.state, member, fps_member_pack(0, FPS_LANE_LIVE)) else -1
        if not rejoin and fps_member_state(member) != FPS_LANE_FREE:
            return -1
        fps_help_set(&words.helping, 0)
        fps_sleeping_set(&words.sleeping, 0)
        self._drop_pins(lane)
        FPS_FAILPOINT()
        words.process_id = process_id
        words.message[0] = 0
        generation = (fps_member_generation(member) + 1) & 0xffffff
        while True:
            self._begin_ring(lane, fps_member_state(member) == FPS_LANE_EXPELLED)
            if fps_state_change(&words.state, member, fps_member_pack(generation, FPS_LANE_JOINING)):
                return generation
            # A peer may mark the last owner dead meanwhile, or expel it; that is no other owner.
            member = fps_state_acquire(&words.state)
            if (fps_member_generation(member) + 1) & 0xffffff != generation:
                return -1

    cdef void _drop_pins(self, uint32_t lane) noexcept nogil:
        cdef uint32_t shard
        for shard in range(self.header.n_shards):
            fps_pin_exchange(&self.lane_shard(lane, shard).pin, 0)
            fps_pin_exchange(&self.lane_shard(lane, shard).ready, 0)
            fps_pin_exchange(&self.lane_shard(lane, shard).next, 0)

    cdef void _begin_ring(self, uint32_t lane, bint was_expelled) noexcept nogil:
        """Let the next owner of a lane, whose last one has ended, begin with a count of posts that is right.

        Behind an owner that was expelled, or whose count is damaged, `begins` lies: what is not decided below is not read.
        """
        cdef fps_lane *words = self.lane(lane)
        cdef uint64_t tail = fps_tail_acquire(&words.tail)
        if fps_mutant(FPS_MUTANT_FORGET_RING):
            return
        if self._is_count_right(lane, tail):
            if was_expelled:
                fps_counter_set(&words.begins, <int64_t> tail)
            return
        # No shard has decided more than the ring can hold beyond what is committed. The count first: if this process dies in
        # between, the lane is still found damaged, and its next owner comes here again.
        tail = self._decided(lane) + self.header.ring_size + 1
        fps_tail_release(&words.tail, tail)
        fps_counter_set(&words.miscounted, <int64_t> tail)
        fps_counter_set(&words.begins, <int64_t> tail)

    cdef bint _is_count_right(self, uint32_t lane, uint64_t tail) noexcept nogil:
        """Whether a worker can have posted so many descriptors: all that are decided, and no more than its ring holds."""
        cdef uint64_t done = UINT64_MAX
        cdef uint32_t shard
        for shard in range(self.header.n_shards):
            done = min(done, fps_head_acquire(&self.lane_shard(lane, shard).head))
        return self._decided(lane) <= tail and tail - max(
            done, <uint64_t> fps_counter_get(&self.lane(lane).begins)) <= self.header.ring_size

    cdef uint64_t _decided(self, uint32_t lane) noexcept nogil:
        """Descriptors of a lane that a shard has decided, or that lie before the first of its present owner."""
        cdef uint64_t decided = <uint64_t> fps_counter_get(&self.lane(lane).begins)
        cdef uint32_t shard
        for shard in range(self.header.n_shards):
            decided = max(decided, <uint64_t> self._committed(lane, shard).consumed)
        return decided

    cpdef bint expel(self, uint32_t lane, uint64_t damage) except -1 nogil:
        """Expel a lane's owner, because of the `damage` that a combiner found: what it posted is not read any more.

        Its process may live. It may not push again, and another one takes the lane once it has ended. Returns False if it was
        expelled already, or if another owner has the lane.
        """
        self._check_lane(lane)
        cdef fps_lane *words = self.lane(lane)
        cdef uint32_t member = fps_state_acquire(&words.state), generation = <uint32_t> (damage >> 40)
        while fps_member_generation(member) == generation and fps_member_state(member) != FPS_LANE_EXPELLED:
            fps_counter_set(&words.damage, <int64_t> damage)
            if fps_state_change(&words.state, member, fps_member_pack(generation, FPS_LANE_EXPELLED)):
                return True
            member = fps_state_acquire(&words.state)
        return False

    def damage(self, uint32_t lane):
        """Why a lane was expelled: (DAMAGED_ constant, what was found)."""
        cdef uint64_t damage
        self._check_lane(lane)
        damage = <uint64_t> fps_counter_get(&self.lane(lane).damage)
        return (damage >> 32) & 0xff, damage & 0xffffffff

    def serve(self, int64_t process_id):
        """Make the server's lane this process's own; False if a server has it, or had it."""
        cdef fps_lane *words = self.lane(self.header.n_lanes)
        if not self.header.n_servers:
            raise ValueError("expected an arena with a lane for a server, found one whose workers take the turns")
        FPS_FAILPOINT()
        words.process_id = process_id
        return bool(fps_state_change(&words.state, fps_member_pack(0, FPS_LANE_FREE), fps_member_pack(0, FPS_LANE_SERVING)))

    cpdef bint is_served(self) noexcept nogil:
        """Whether a server process combines, as far as the lanes say now."""
        return (self.header.n_servers != 0
                and fps_member_state(fps_state_acquire(&self.lane(self.header.n_lanes).state)) == FPS_LANE_SERVING)

    def clock(self, uint32_t lane, uint32_t shard=0):
        """Pushes of the lane's worker that a shard has received: the clock that decides which worker is the slowest."""
        return self._committed(lane, shard).clock

    cpdef bint has_joined(self, uint32_t lane) noexcept nogil:
        """Whether every shard counts the lane's owner, and has granted its first step. It calls `joined` then."""
        cdef uint32_t shard, generation = fps_member_generation(fps_state_acquire(&self.lane(lane).state))
        cdef int64_t granted
        for shard in range(self.header.n_shards):
            granted = fps_grant_acquire(&self.lane_shard(lane, shard).granted)
            if fps_granted_generation(granted) != <int64_t> generation or fps_granted_steps(granted) == 0:
                return False
        return True

    def joined(self, uint32_t lane):
        """The lane's owner may push from now on."""
        self._check_lane(lane)
        self._move(lane, FPS_LANE_JOINING, FPS_LANE_LIVE)

    cdef void _move(self, uint32_t lane, uint32_t seen, uint32_t state) noexcept nogil:
        """Move the lane's owner from one state to another."""
        self._change(lane, fps_member_generation(fps_state_acquire(&self.lane(lane).state)), seen, state)

    cdef bint _end(self, uint32_t lane, uint32_t generation, uint32_t state) noexcept nogil:
        """End the presence of that generation's owner. Returns False if it is not present."""
        return (self._change(lane, generation, FPS_LANE_LIVE, state) or self._change(lane, generation, FPS_LANE_LEAVING, state)
                or self._change(lane, generation, FPS_LANE_JOINING, state)
                or self._change(lane, generation, FPS_LANE_SERVING, state))

    cdef bint _change(self, uint32_t lane, uint32_t generation, uint32_t seen, uint32_t state) noexcept nogil:
        return fps_state_change(&self.lane(lane).state, fps_member_pack(generation, seen), fps_member_pack(generation, state))

    cdef worker_t *_committed(self, uint32_t lane, uint32_t shard) noexcept nogil:
        """What a shard's last commit says of a lane. A hint, unless the caller holds the shard lock."""
        return &state_workers(self.scheduler(shard, fps_commit_record(fps_commit_load(&self.shard_header(shard).commit))))[lane]

    cdef uint32_t _generation_of(self, uint32_t lane, object generation) except? 0:
        """The given generation; for None that of the lane's present owner."""
        self._check_lane(lane)
        return fps_member_generation(fps_state_acquire(&self.lane(lane).state)) if generation is None else generation

    def finish(self, uint32_t lane, str failure=None, generation=None):
        """Record that the lane's worker has ended: in good order, or by the error that `failure` describes in one line.

        Does nothing if another generation than `generation` owns the lane; None: the present owner.
        """
        cdef bytes message
        cdef uint32_t owner = self._generation_of(lane, generation)
        cdef uint32_t state = FPS_LANE_LEFT if failure is None else FPS_LANE_FAILED
        if owner != fps_member_generation(fps_state_acquire(&self.lane(lane).state)):
            return
        if failure is not None:
            message = failure.encode("utf-8", "replace")[:FPS_MESSAGE_BYTES - 1]
            FPS_FAILPOINT()
            strncpy(self.lane(lane).message, message, FPS_MESSAGE_BYTES - 1)
        self._end(lane, owner, state)

    def leave(self, uint32_t lane, generation=None):
        """Record that the worker has posted LEAVE, its last descriptor, and still combines. `generation` as in `finish`."""
        self._change(lane, self._generation_of(lane, generation), FPS_LANE_LIVE, FPS_LANE_LEAVING)

    cpdef bint mark_dead(self, uint32_t lane, uint32_t generation) except -1 nogil:
        """Mark an owner dead whose process is proved to have ended: from the next commit on no worker waits for it.

        Returns False if another owner has the lane. An owner that has left in good order stays so. Releases the reader's place
        that the owner held.
        """
        self._check_lane(lane)
        cdef uint32_t shard
        cdef uint64_t reader
        for shard in range(self.header.n_shards):
            reader = fps_reader_load(&self.shard_header(shard).reader)
            if fps_reader_owner(reader) == (<uint64_t> generation << 16 | (lane + 1)):
                fps_reader_change(&self.shard_header(shard).reader, reader, 0)
        if fps_mutant(FPS_MUTANT_FORGET_GENERATION):
            generation = fps_member_generation(fps_state_acquire(&self.lane(lane).state))
        return (self._end(lane, generation, FPS_LANE_DEAD)
                or self._change(lane, generation, FPS_LANE_FAILED, FPS_LANE_DEAD))

    def lane_state(self, uint32_t lane):
        """One of the LANE_ constants."""
        return fps_member_state(fps_state_acquire(&self.lane(lane).state))

    def generation(self, uint32_t lane):
        """How many owners the lane had before the present one."""
        return fps_member_generation(fps_state_acquire(&self.lane(lane).state))

    def lane_states(self):
        """The state of every worker's lane, as bytes."""
        return bytes([fps_member_state(fps_state_acquire(&self.lane(index).state)) for index in range(self.header.n_lanes)])

    def members(self):
        """(generation, state) of every lane, the server's as the last."""
        return [(fps_member_generation(member), fps_member_state(member))
                for member in [fps_state_acquire(&self.lane(index).state)
                               for index in range(self.header.n_lanes + self.header.n_servers)]]

    # -- copies of a whole version -----------------------------------------------------------------

    def pin_version(self, uint32_t lane, uint32_t shard):
        """Keep a shard's published weights and rule state unchanged: (version, weights buffer, state buffer, clocks).

        Returns None while another lane does. `clocks`: of each lane the steps that are in this version, or -1 where no worker
        is live. Commits continue meanwhile. Call `unpin_version` soon after the copy. Raises ValueError for buffers that the
        arena has not.
        """
        cdef fps_shard_header *shard_header
        cdef uint64_t commit, mine
        cdef uint32_t state_buffer, index
        cdef scheduler_t *state
        cdef worker_t *worker
        cdef int64_t sequence
        self._check_lane(lane)
        self._check_shard(shard)
        shard_header = self.shard_header(shard)
        while True:
            commit = fps_commit_load(&shard_header.commit)
            state = self.scheduler(shard, fps_commit_record(commit))
            sequence = state.sequence
            _, state_buffer = self._buffers_of(commit, shard_header.records[fps_commit_record(commit)].state_buffer)
            mine = fps_reader_pack(fps_member_generation(fps_state_acquire(&self.lane(lane).state)), lane, state_buffer,
                                   fps_commit_buffer(commit))
            if not fps_reader_change(&shard_header.reader, 0, mine):
                return None
            clocks = []
            for index in range(self.header.n_lanes):
                worker = &state_workers(state)[index]
                clocks.append(worker.clock - (worker.consumed - worker.cursor) if worker.live else -1)
            # This exchange keeps the reads above before the loads below. Two commits without a fold give the same word again,
            # after this copy of the state was written over: the sequence shows that.
            fps_reader_change(&shard_header.reader, mine, mine)
            if fps_commit_load(&shard_header.commit) == commit and state.sequence == sequence:
                return fps_commit_version(commit), fps_commit_buffer(commit), state_buffer, clocks
            fps_reader_change(&shard_header.reader, mine, 0)

    def unpin_version(self, uint32_t lane, uint32_t shard, generation=None):
        """End what `pin_version` of this lane began. `generation` as in `finish`."""
        cdef uint64_t reader
        self._check_shard(shard)
        reader = fps_reader_load(&self.shard_header(shard).reader)
        if fps_reader_owner(reader) == (<uint64_t> self._generation_of(lane, generation) << 16 | (lane + 1)):
            fps_reader_change(&self.shard_header(shard).reader, reader, 0)

    def draw(self, uint64_t samples):
        """Draw the next samples of the shared order. Returns the place of the first, counted from the job's beginning."""
        return fps_drawn_add(&self.shard_header(0).drawn, samples)

    @property
    def drawn(self):
        """Samples that were drawn so far."""
        return fps_drawn_load(&self.shard_header(0).drawn)

    def failure(self, uint32_t lane):
        """The message of a failed lane's worker, or of one that goes on elsewhere."""
        cdef char *message = self.lane(lane).message
        return bytes(message[:FPS_MESSAGE_BYTES]).split(b"\0")[0].decode("utf-8", "replace")

    def go_on_in(self, uint32_t lane, bytes job not None):
        """Say before a live lane leaves that its worker goes on in another job, for readers; not if the name is too long."""
        self._check_lane(lane)
        FPS_FAILPOINT()
        strncpy(self.lane(lane).message, job if len(job) < FPS_MESSAGE_BYTES else b"", FPS_MESSAGE_BYTES - 1)

    def process_id(self, uint32_t lane):
        """For messages only."""
        return self.lane(lane).process_id

    def set_cores(self, uint32_t lane, int64_t first, int64_t count):
        """Say on which cores the lane's worker may run: their lowest number, and how many."""
        self._check_lane(lane)
        fps_counter_set(&self.lane(lane).first_core, first)
        fps_counter_set(&self.lane(lane).cores, count)

    def cores(self):
        """Cores on which the attached processes may run. Sets with the same first core and the same size count once."""
        cdef uint32_t index
        cdef fps_lane *words
        found = set()
        for index in range(self.header.n_lanes + self.header.n_servers):
            words = self.lane(index)
            if fps_member_state(fps_state_acquire(&words.state)) in (FPS_LANE_LIVE, FPS_LANE_JOINING, FPS_LANE_SERVING):
                found.add((fps_counter_get(&words.first_core), fps_counter_get(&words.cores)))
        return sum(count for _, count in found)

    # -- pushes that were rejected -----------------------------------------------------------------

    @property
    def rejections(self):
        """Pushes, counted in each shard, that were rejected because they or their results were non-finite."""
        cdef uint32_t shard
        cdef int64_t count = 0
        for shard in range(self.header.n_shards):
            count += fps_counter_get(&self.shard_header(shard).rejections)
        return count

    def rejected(self, uint32_t lane):
        """The number of a lane's rejections, over all shards, and (step, parameter) of the last, or None."""
        cdef fps_lane_shard *lane_shard
        cdef uint32_t shard
        count, last = 0, None
        for shard in range(self.header.n_shards):
            lane_shard = self.lane_shard(lane, shard)
            if fps_counter_get(&lane_shard.rejected):
                count += fps_counter_get(&lane_shard.rejected)
                found = fps_counter_get(&lane_shard.rejected_step), fps_counter_get(&lane_shard.rejected_parameter)
                last = found if last is None else max(last, found)
        return count, last

    # -- what became of pushes ---------------------------------------------------------------------

    def record(self):
        """Let combiners write an outcome for every push that is posted from now on."""
        cdef uint32_t shard
        for shard in range(self.header.n_shards):
            fps_counter_set(&self.shard_header(shard).recorded, 1)

    def push_outcomes(self, uint32_t lane, uint32_t shard, uint64_t first, uint64_t last):
        """The outcomes of the lane's descriptors [first, last) that the shard is done with; shorter if it is not with all.

        A list of (OUTCOME_FOLDED or OUTCOME_REJECTED, version that the push is part of, time, staleness), (OUTCOME_DROPPED,
        version that it was late for, time, 0), or None for a descriptor without an outcome: LEAVE, or posted before `record`.
        Only the lane's last `ring_size` descriptors are known, and only while the lane posts none.
        """
        cdef uint64_t position
        cdef fps_push_outcome *push_outcome
        last = min(last, fps_head_acquire(&self.lane_shard(lane, shard).head))
        found = []
        for position in range(first, last):
            push_outcome = self.push_outcome(lane, shard, position)
            if push_outcome.position != position + 1:
                found.append(None)
            else:
                found.append((<int> push_outcome.kind, push_outcome.version, push_outcome.decided_ns, push_outcome.staleness))
        return found

    # -- counters ----------------------------------------------------------------------------------

    def counters(self, uint32_t lane):
        """The lane's counters by name, over all shards; each is current, but they are not of one moment.

        `done` and `granted` are the least of the shards, `folded`, `dropped` and `rows` (of tables) are sums over shards.
        """
        cdef fps_lane *words = self.lane(lane)
        cdef fps_lane_shard *lane_shard
        cdef int64_t loss_bits = fps_counter_get(&words.loss_bits)
        cdef double loss
        cdef uint32_t shard
        cdef uint64_t done = fps_head_acquire(&self.lane_shard(lane, 0).head)
        cdef int64_t folded = 0, dropped = 0, staleness_sum = 0, staleness_max = 0, rows = 0, granted = INT64_MAX
        memcpy(&loss, &loss_bits, sizeof(loss))
        for shard in range(self.header.n_shards):
            lane_shard = self.lane_shard(lane, shard)
            done = min(done, fps_head_acquire(&lane_shard.head))
            granted = min(granted, fps_granted_steps(fps_grant_acquire(&lane_shard.granted)))
            folded += fps_counter_get(&lane_shard.folded)
            dropped += fps_counter_get(&lane_shard.dropped)
            staleness_sum += fps_counter_get(&lane_shard.staleness_sum)
            staleness_max = max(staleness_max, fps_counter_get(&lane_shard.staleness_max))
            rows += fps_counter_get(&lane_shard.rows)
        return {
            "posted": fps_tail_acquire(&words.tail),
            "done": done,
            "granted": granted,
            "steps": fps_counter_get(&words.steps),
            "wait_ns": fps_counter_get(&words.wait_ns),
            "compute_ns": fps_counter_get(&words.compute_ns),
            "push_ns": fps_counter_get(&words.push_ns),
            "samples": fps_counter_get(&words.samples),
            "stale_blocks": fps_counter_get(&words.stale_blocks),
            "folded": folded,
            "dropped": dropped,
            "rejected": self.rejected(lane)[0],
            "staleness_sum": staleness_sum,
            "staleness_max": staleness_max,
            "rows": rows,
            "loss": loss,
        }

    def histograms(self, uint32_t shard=0):
        """What a shard has counted, as lists of (least value of the bucket, count), empty buckets left out.

        `gaps_ns` between two consecutive updates; `staleness` of folded pushes, in versions; `arrivals_ns`: for each k, when
        the k-th push of a version came, counted from its beginning; `updates`; `average_staleness`: mean over all updates of
        <sigma> (Rudra, equation 2); `rows_written` of tables.
        """
        cdef fps_statistics *found = self.statistics(shard)
        cdef int bucket
        cdef uint32_t k
        updates = fps_counter_get(&found.updates)
        return {
            "updates": updates,
            "rows_written": fps_counter_get(&found.rows_written),
            "average_staleness": fps_counter_get(&found.average_staleness_sum) / 1000.0 / max(1, updates),
            "gaps_ns": [(fps_bucket_time(bucket), found.gaps[bucket]) for bucket in range(FPS_GAP_BUCKETS)
                        if found.gaps[bucket]],
            "staleness": [(bucket, found.staleness[bucket]) for bucket in range(FPS_STALENESS_BUCKETS)
                          if found.staleness[bucket]],
            "arrivals_ns": [
                [(fps_bucket_time(bucket), found.arrivals[k][bucket]) for bucket in range(FPS_GAP_BUCKETS)
                 if found.arrivals[k][bucket]]
                for k in range(self.header.n_lanes)
            ],
        }
