"""The turn of one shard: take it, drain all lanes, decide, fold, commit, grant.

Flat combining: whoever posted tries the turn; if another has it, that one is told by the PENDING flag and drains again before
it lets go, so no push is stranded although nobody waits. One flip of the commit word makes everything of a commit true:
weights, rule state, cursors, the scheduler's state. A holder that dies before it leaves nothing that anyone reads.

What it refuses to know: processes (fastps/worker.py proves an owner dead and then breaks its turn), clocks (times come in
descriptors and as arguments), files, and Python objects on the way of a push.
"""

from libc.math cimport INFINITY, sqrt
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free

from fastps.kernels.arena cimport (
    FPS_FATE_DROPPED,
    FPS_FATE_FOLDED,
    FPS_PENDING,
    FPS_STALENESS_BUCKETS,
    FPS_STATE_BUFFERS,
    Arena,
    fps_commit_buffer,
    fps_commit_epoch,
    fps_commit_pack,
    fps_commit_record,
    fps_commit_version,
    fps_fate,
    fps_folded_push,
    fps_member_generation,
    fps_member_state,
    fps_reader_state,
    fps_reader_weights,
    fps_record,
    fps_statistics,
    fps_time_bucket,
    fps_turn_epoch,
    fps_turn_generation,
    fps_turn_owner,
    fps_turn_pack,
)
from fastps.kernels.fold cimport FPS_FOLD_EACH, FPS_FOLD_SUM, FPS_MAX_PUSHES
from fastps.kernels.lane cimport (
    FPS_LANE_DEAD,
    FPS_LANE_JOINING,
    FPS_LEAVE,
    FPS_MAX_BATCH,
    FPS_NULL,
    fps_descriptor,
    fps_head_release,
    fps_seat,
    fps_tail_acquire,
    lane_descriptor,
)
from fastps.kernels.policy_words cimport policy_check
from fastps.kernels.roster cimport (
    FOLD_ALL,
    FOLD_EACH,
    FOLD_IN_ORDER,
    FOLD_QUORUM,
    NEVER_NS,
    SCALE_BATCH,
    SCALE_DIVISOR,
    SCALE_LINEAR,
    SCALE_SQUARE_ROOT,
    SCALE_STALENESS,
    policy_t,
    roster_begin,
    roster_catch_up,
    roster_copy,
    roster_folds,
    roster_touch,
    roster_touched,
    roster_workers,
    scheduler_t,
    worker_t,
)
from fastps.kernels.roster_check cimport roster_can_be_followed, roster_can_be_walked, roster_remember
from fastps.kernels.scheduler cimport (
    ACTION_DROP,
    ACTION_FOLD,
    ACTION_FOLD_ALL,
    ACTION_FOLD_LIST,
    ACTION_NONE,
    scheduler_due,
    scheduler_fire,
    scheduler_join,
    scheduler_leave,
    scheduler_push,
)

from fastps.kernels.shared_fold cimport FOLD_AWAITING, FOLD_DONE, FOLD_UNSOUND, SharedFold

cdef extern from "atomics.h" nogil:
    void FPS_ASSERT(bint condition)
    uint64_t fps_turn_load(const uint64_t *turn)
    int fps_turn_take(uint64_t *turn, uint64_t seen, uint64_t mine)
    int fps_turn_give(uint64_t *turn, uint64_t mine, uint64_t given)
    uint64_t fps_turn_set_pending(uint64_t *turn, uint64_t flag)
    void fps_turn_clear_pending(uint64_t *turn, uint64_t flag)
    int fps_commit_flip(uint64_t *commit, uint64_t seen, uint64_t next)
    uint64_t fps_commit_load(const uint64_t *commit)
    uint64_t fps_pin_load(const uint64_t *pin)
    uint64_t fps_reader_load(const uint64_t *reader)
    uint32_t fps_state_acquire(const uint32_t *state)
    int64_t fps_grant_acquire(const int64_t *granted)
    void fps_grant_release(int64_t *granted, int64_t steps)
    void fps_event_add(uint32_t *event)
    uint32_t fps_sleeping_load(const uint32_t *sleeping)
    void fps_event_wake(uint32_t *event)
    void fps_counter_set(int64_t *counter, int64_t value)
    int64_t fps_counter_get(const int64_t *counter)
    void fps_plain_store()
    bint fps_mutant(int number)
    enum:
        FPS_MUTANT_ACKNOWLEDGE_FIRST
        FPS_MUTANT_BREAK_AT_ONCE
        FPS_MUTANT_FLIP_FIRST
        FPS_MUTANT_FORGET_CURSOR
        FPS_MUTANT_FORGET_HEADS

cdef enum:
    MAX_ROUNDS = 16  # drains before a holder hands the turn over: nobody does the others' work for ever
    _NOTHING = 100   # no event; beyond the scheduler's actions
    # What a holder that is TURN_AWAITING waits for.
    _NOBODY = 0
    _FOLD = 1        # helpers of its own fold
    _BROKEN_FOLD = 2  # helpers of the fold whose holder died
    _RUN = 200       # no outcome yet


cdef inline void _count(int64_t *counter, int64_t more) noexcept nogil:
    """Add to a counter that only the holder writes."""
    fps_counter_set(counter, fps_counter_get(counter) + more)


cdef inline void _mark(uint64_t *pinned, uint64_t pin) noexcept nogil:
    """Set the bit of a pinned buffer; a pin out of range is no buffer of ours."""
    if 0 < pin <= 128:
        pinned[(pin - 1) // 64] |= (<uint64_t> 1) << ((pin - 1) % 64)


cdef class Holder:
    """Lane `lane` as it takes the turn of shard `shard`. Only one thread may use it."""

    def __cinit__(self, Arena arena not None, uint32_t lane, uint32_t shard):
        cdef uint32_t lanes = arena.header.n_lanes
        self.arena = arena
        self.lane = lane
        self.shard = shard
        self.domain = arena.domain(shard)
        self.bad_lane = -1
        self.fold = SharedFold(arena, lane, shard)
        self.generation = fps_member_generation(fps_state_acquire(&arena.lane(lane).state))
        roster_remember(
            &self.expected, arena.scheduler(shard, fps_commit_record(fps_commit_load(&self.domain.commit))), lanes)
        policy_check(&self.expected.policy, lanes)
        self.tails = <uint64_t *> calloc(lanes, sizeof(uint64_t))
        self.members = <uint32_t *> calloc(lanes, sizeof(uint32_t))
        self.to_wake = <uint32_t *> calloc(lanes, sizeof(uint32_t))
        if not self.tails or not self.members or not self.to_wake:
            raise MemoryError()

    def __dealloc__(self):
        free(self.tails)
        free(self.members)
        free(self.to_wake)

    # -- taking and letting go ---------------------------------------------------------------------

    cdef int try_turn(self, int64_t now_ns) noexcept nogil:
        """Take the turn if it is free, and run it."""
        if self.awaiting != _NOBODY:
            return self.resume(now_ns)
        self.now_ns = now_ns
        return self.run() if self.take() else TURN_BUSY

    cdef int resume(self, int64_t now_ns) noexcept nogil:
        """Go on with a turn that was TURN_AWAITING; DONE if there is none."""
        cdef int awaited = self.awaiting
        if awaited == _NOBODY:
            return TURN_DONE
        if self.fold.is_helped():
            return TURN_AWAITING
        self.now_ns = now_ns
        self.awaiting = _NOBODY
        if awaited == _FOLD:
            return self.run(self._end_fold(self.fold.finish()))
        self._repair()
        return self.run()

    cdef bint take(self) noexcept nogil:
        cdef uint64_t *word = &self.domain.turn
        cdef uint64_t seen = fps_turn_load(word)
        while True:
            if fps_turn_owner(seen) == 0:
                self.turn = fps_turn_pack(fps_turn_epoch(seen), self.generation, self.lane + 1)
                if fps_turn_take(word, seen, self.turn):
                    return True
                seen = fps_turn_load(word)
                continue
            # The holder may have looked at this lane already: the flag keeps it from letting go before it looks again.
            seen = fps_turn_set_pending(word, FPS_PENDING)
            if fps_turn_owner(seen) != 0:
                return False
            seen = fps_turn_load(word)

    cdef int run(self, int outcome=_RUN) noexcept nogil:
        """Drain until nothing is pending, then let go; after MAX_ROUNDS hand over to whoever comes next.

        `outcome`: of the commit that the turn begins with, if it was under way.
        """
        cdef uint64_t *word = &self.domain.turn
        cdef uint64_t given = fps_turn_pack(fps_turn_epoch(self.turn), 0, 0)
        cdef int rounds = 0
        if self.hands_over:
            return self._hand_over()
        self.is_checked = False
        while True:
            if outcome in (_RUN, TURN_DONE):
                outcome = self._drain()
            if outcome in (TURN_LOST, TURN_AWAITING):
                return outcome
            if outcome < 0:
                self._repair()
            if fps_turn_give(word, self.turn, given):
                self._wake()
                return outcome
            rounds += 1
            if outcome < 0 or rounds == MAX_ROUNDS:
                if fps_turn_give(word, self.turn | FPS_PENDING, given | FPS_PENDING):
                    self._nudge()
                    self._wake()
                    return outcome
                return TURN_LOST
            self._wake()
            fps_turn_clear_pending(word, FPS_PENDING)
            if fps_turn_load(word) & ~FPS_PENDING != self.turn:
                return TURN_LOST
            outcome = _RUN

    cdef void _nudge(self) noexcept nogil:
        """Wake one sleeper to take the turn that is handed over; if nobody sleeps, the next push takes it."""
        cdef uint32_t index
        for index in range(self.arena.header.n_lanes):
            if index != self.lane and fps_sleeping_load(&self.arena.lane(index).sleeping):
                fps_event_add(&self.arena.lane(index).event)
                fps_event_wake(&self.arena.lane(index).event)
                return

    cdef int _hand_over(self) noexcept nogil:
        """Let go of a turn that this lane cannot run, for those who can."""
        cdef uint64_t *word = &self.domain.turn
        cdef uint64_t given = fps_turn_pack(fps_turn_epoch(self.turn), 0, 0)
        while not (fps_turn_give(word, self.turn, given)
                   or fps_turn_give(word, self.turn | FPS_PENDING, given | FPS_PENDING)):
            if fps_turn_load(word) & ~FPS_PENDING != self.turn:
                return TURN_LOST
        self.nudge_all()
        return TURN_BUSY

    cdef void nudge_all(self) noexcept nogil:
        """Move every other lane's event and wake who sleeps: one of them can fold what is pending."""
        cdef uint32_t index
        for index in range(self.arena.header.n_lanes):
            if index != self.lane:
                fps_event_add(&self.arena.lane(index).event)
                if fps_sleeping_load(&self.arena.lane(index).sleeping):
                    fps_event_wake(&self.arena.lane(index).event)

    cdef void _wake(self) noexcept nogil:
        """Wake whom the commits concern, after letting go: a system call inside the turn would make everyone wait for it."""
        cdef uint32_t i
        for i in range(self.n_to_wake):
            fps_event_wake(&self.arena.lane(self.to_wake[i]).event)
        self.n_to_wake = 0

    cdef int _drain(self) noexcept nogil:
        """Decide and commit everything that is posted now."""
        cdef int outcome
        while True:
            outcome = self._commit_once()
            if outcome != TURN_BUSY:
                return outcome

    # -- one commit --------------------------------------------------------------------------------

    cdef int _commit_once(self) noexcept nogil:
        """One commit: up to a batch of events, in order of their times. Returns TURN_BUSY if there may be more, else _DONE."""
        cdef uint64_t record
        cdef scheduler_t *state
        cdef int action
        cdef bint any_event = False
        self.seen = fps_commit_load(&self.domain.commit)
        record = fps_commit_record(self.seen)
        state = self._begin(record)
        if state == NULL:
            return TURN_BAD_STATE
        self._look()
        self.n_batch = 0
        self.batch_samples = 0
        while self.n_batch < FPS_MAX_BATCH:
            action = self._next_event(state)
            if action < 0:
                return action
            if action == _NOTHING:
                break
            any_event = True
            if action == ACTION_FOLD_ALL:
                if self._gather(state) != TURN_DONE:
                    return TURN_BAD_DESCRIPTOR
                break
            if action == ACTION_FOLD_LIST:
                if self._take_listed(state) != TURN_DONE:
                    return TURN_BAD_DESCRIPTOR
                if self.n_batch + self.arena.header.n_lanes > FPS_MAX_PUSHES:
                    break
        if not any_event:
            return TURN_DONE
        action = self._fold_and_flip(state, record)
        return TURN_BUSY if action == TURN_DONE else action

    cdef scheduler_t *_begin(self, uint64_t record) noexcept nogil:
        """The inactive record, brought up to the active one and ready for changes; NULL if it is damaged."""
        cdef scheduler_t *state = self.arena.scheduler(self.shard, 1 - record)
        cdef const scheduler_t *active = self.arena.scheduler(self.shard, record)
        if not self.is_checked and not roster_can_be_followed(active, &self.expected):
            return NULL
        roster_catch_up(state, active)
        if not self.is_checked and not roster_can_be_walked(state, self.arena.header.ring_size):
            return NULL
        self.is_checked = True
        roster_begin(state)
        return state

    cdef void _look(self) noexcept nogil:
        cdef uint32_t index
        for index in range(self.arena.header.n_lanes):
            # The state first: the tail of one who is proved dead is then its last.
            self.members[index] = fps_state_acquire(&self.arena.lane(index).state)
            self.tails[index] = fps_tail_acquire(&self.arena.lane(index).tail)

    cdef fps_descriptor *_earliest(self, scheduler_t *state, uint32_t *lane) noexcept nogil:
        """The earliest descriptor not seen yet, or NULL; of equal times that of the lowest lane."""
        cdef worker_t *workers = roster_workers(state)
        cdef fps_descriptor *descriptor
        cdef fps_descriptor *earliest = NULL
        cdef uint32_t index
        for index in range(self.arena.header.n_lanes):
            if <uint64_t> workers[index].consumed < self.tails[index]:
                descriptor = lane_descriptor(self.arena.lane(index), self.arena.header.ring_size, workers[index].consumed)
                if earliest == NULL or descriptor.post_ns < earliest.post_ns:
                    earliest = descriptor
                    lane[0] = index
        return earliest

    cdef int _next_event(self, scheduler_t *state) noexcept nogil:
        """Give the scheduler its earliest event. Returns its action, _NOTHING or a negative outcome."""
        cdef uint32_t lane = 0
        cdef fps_descriptor *earliest = self._earliest(state, &lane)
        cdef worker_t *worker = &roster_workers(state)[lane]
        cdef int64_t due_ns = scheduler_due(state)
        cdef int action
        if due_ns != NEVER_NS and due_ns <= (self.now_ns if earliest == NULL else earliest.post_ns):
            return scheduler_fire(state)
        if earliest == NULL:
            return self._next_change(state)
        if (earliest.kind > FPS_LEAVE or earliest.slot >= self.arena.header.n_slots or not worker.live
                or (worker.waiting and earliest.kind != FPS_LEAVE and not state.policy.repeats)
                or self.tails[lane] - worker.cursor > self.arena.header.ring_size):
            self.bad_lane = lane
            return TURN_BAD_DESCRIPTOR
        worker.consumed += 1
        roster_touch(state, lane)
        if earliest.kind == FPS_LEAVE:
            action = scheduler_leave(state, lane, earliest.post_ns)
            worker.said_leave = 1
            if worker.cursor + 1 == worker.consumed:
                worker.cursor = worker.consumed  # nothing of this worker is kept for a fold
            return action
        action = self._receive(state, lane, earliest)
        if action == ACTION_FOLD:
            if self._take_push(state, lane, worker.consumed - 1, state.version - 1) != TURN_DONE:
                return TURN_BAD_DESCRIPTOR
            self._end_update(state)
        elif action == ACTION_DROP:
            self._write_fate(state, lane, worker.consumed - 1, FPS_FATE_DROPPED, state.version, 0)
        if fps_mutant(FPS_MUTANT_FORGET_CURSOR):
            worker.consumed = worker.cursor
        if action == ACTION_FOLD or (action == ACTION_DROP and worker.cursor + 1 == worker.consumed):
            worker.cursor = worker.consumed
        return action

    cdef int _next_change(self, scheduler_t *state) noexcept nogil:
        """Who died is counted no more, and who joins is counted, once all that was posted is decided. As _next_event.

        Both follow from the lane's state word and from what is committed, so they are said once, whoever holds the turn.
        """
        cdef uint32_t lane, member
        cdef worker_t *worker
        for lane in range(self.arena.header.n_lanes):
            member = fps_member_state(self.members[lane])
            if member != FPS_LANE_DEAD and member != FPS_LANE_JOINING:
                continue
            worker = &roster_workers(state)[lane]
            if worker.live and (member == FPS_LANE_DEAD
                                or worker.generation != <int32_t> fps_member_generation(self.members[lane])):
                return scheduler_leave(state, lane, self.now_ns)
            # What its last owner pushed and is kept for a fold lies in its slots.
            if (member == FPS_LANE_JOINING and not worker.live and worker.cursor == worker.consumed
                    and (self.shard == 0 or self._clock_of(lane) >= 0)):
                scheduler_join(state, lane, self.now_ns, -1 if self.shard == 0 else self._clock_of(lane))
                worker.generation = fps_member_generation(self.members[lane])
                return ACTION_NONE
        return _NOTHING

    cdef int64_t _clock_of(self, uint32_t lane) noexcept nogil:
        """The clock at which the first shard has let a lane's owner join, which is its clock in all of them; -1: it has not."""
        if fps_grant_acquire(&self.arena.seat(lane, 0).generation) != fps_member_generation(self.members[lane]):
            return -1
        return fps_grant_acquire(&self.arena.seat(lane, 0).granted) - 1

    cdef int _receive(self, scheduler_t *state, uint32_t lane, const fps_descriptor *descriptor) noexcept nogil:
        """Give the scheduler a push, and count when it came within its version."""
        cdef int64_t began_ns = state.folded_ns
        cdef int32_t arrived = state.n_arrived
        cdef int action = scheduler_push(
            state, lane, descriptor.post_ns, descriptor.read_version, descriptor.samples)
        if began_ns > 0 and action != ACTION_DROP and state.policy.fold in (FOLD_ALL, FOLD_QUORUM):
            _count(&self.arena.statistics(self.shard).arrivals[arrived][fps_time_bucket(state.now_ns - began_ns)], 1)
        return action

    # -- what is folded ----------------------------------------------------------------------------

    cdef void _write_fate(self, const scheduler_t *state, uint32_t lane, uint64_t position, uint32_t kind, uint64_t version,
                          int64_t staleness) noexcept nogil:
        """Write down what becomes of a push, if the job is recorded; true once this commit is."""
        cdef fps_fate *fate
        if not fps_counter_get(&self.domain.recorded):
            return
        fate = self.arena.fate(lane, self.shard, position)
        fps_plain_store()
        fate.position, fate.version, fate.decided_ns = position + 1, version, state.now_ns
        fate.staleness, fate.kind = <int32_t> staleness, kind

    cdef int _take_push(self, scheduler_t *state, uint32_t lane, uint64_t position, int64_t version) noexcept nogil:
        """Add the push to the batch, and count its staleness: versions published between its read and `version`.

        Returns TURN_BAD_DESCRIPTOR for a push that was kept and names another slot by now than the lane has.
        """
        cdef worker_t *worker = &roster_workers(state)[lane]
        cdef const fps_descriptor *descriptor = lane_descriptor(
            self.arena.lane(lane), self.arena.header.ring_size, position)
        cdef uint32_t slot = descriptor.slot
        cdef uint64_t *versions
        cdef int64_t staleness
        cdef double scale = descriptor.scale, rate_scale = 1.0
        if slot >= self.arena.header.n_slots or self.n_batch >= FPS_MAX_PUSHES:
            self.bad_lane = lane
            return TURN_BAD_DESCRIPTOR
        versions = <uint64_t *> (self.arena.slot(lane, slot) + self.arena.header.slot_versions_offset)
        staleness = version - <int64_t> (
            descriptor.read_version if descriptor.kind == FPS_NULL else versions[self.shard])
        worker.folded += 1
        worker.staleness_sum += staleness
        worker.staleness_max = max(worker.staleness_max, staleness)
        self.staleness_of_update += staleness
        self.pushes_of_update += 1
        _count(&self.arena.statistics(self.shard).staleness[min(max(staleness, 0), <int64_t> FPS_STALENESS_BUCKETS - 1)], 1)
        self._write_fate(state, lane, position, FPS_FATE_FOLDED, version + 1, staleness)
        if descriptor.kind == FPS_NULL:
            return TURN_DONE
        if state.policy.scale == SCALE_STALENESS and staleness > 1:
            # Rudra, footnote 3: a learning rate of its own for each gradient.
            scale /= <double> staleness
        elif state.policy.scale == SCALE_BATCH and worker.base_batch > 0:
            # R2SP, Algorithm 1, worker, line 5.
            rate_scale = <double> descriptor.samples / <double> worker.base_batch
        self.fold.put(self.n_batch, lane, descriptor, scale, rate_scale)
        self.batch_samples += descriptor.samples
        self.n_batch += 1
        return TURN_DONE

    cdef int _take_listed(self, scheduler_t *state) noexcept nogil:
        """The oldest kept push of each listed worker, one version each."""
        cdef int32_t i, lane
        cdef worker_t *worker
        for i in range(state.n_folds):
            lane = roster_folds(state)[i]
            worker = &roster_workers(state)[lane]
            if self._take_push(state, lane, worker.cursor, state.version - state.n_folds + i) != TURN_DONE:
                return TURN_BAD_DESCRIPTOR
            self._end_update(state)
            worker.cursor += 1
            if worker.said_leave:
                worker.cursor = worker.consumed  # what is left of a leaver is its LEAVE
            roster_touch(state, lane)
        return TURN_DONE

    cdef int _gather(self, scheduler_t *state) noexcept nogil:
        """All pushes kept for this version, in order of the lanes: the sum has the same bits whatever the order of arrival."""
        cdef worker_t *worker
        cdef fps_descriptor *descriptor
        cdef uint32_t lane
        cdef int64_t position, end
        for lane in range(self.arena.header.n_lanes):
            worker = &roster_workers(state)[lane]
            end = worker.cursor + worker.relayed if state.policy.groups else worker.consumed
            if worker.cursor == end:
                continue
            for position in range(worker.cursor, end):
                descriptor = lane_descriptor(self.arena.lane(lane), self.arena.header.ring_size, position)
                if state.policy.fold == FOLD_QUORUM and <int64_t> descriptor.read_version < state.version - 1:
                    continue  # dropped when it came, behind one that was kept
                if (descriptor.kind != FPS_LEAVE and self.n_batch < FPS_MAX_PUSHES
                        and self._take_push(state, lane, position, state.version - 1) != TURN_DONE):
                    return TURN_BAD_DESCRIPTOR
            worker.cursor = end
            worker.relayed = 0
            if not worker.live and worker.said_leave and worker.cursor + 1 == worker.consumed:
                worker.cursor = worker.consumed  # what is left of a leaver is its LEAVE
            roster_touch(state, lane)
        self._end_update(state)
        return TURN_DONE

    cdef void _end_update(self, scheduler_t *state) noexcept nogil:
        """Count one version: its <sigma>, and the gaps between the updates that are its pushes."""
        cdef fps_statistics *counted = self.arena.statistics(self.shard)
        cdef int64_t gap_ns = state.folded_ns - self.domain.last_update_ns
        if self.pushes_of_update == 0:
            return
        if self.domain.last_update_ns > 0:
            _count(&counted.gaps[fps_time_bucket(gap_ns)], 1)
        if self.pushes_of_update > 1:
            _count(&counted.gaps[0], self.pushes_of_update - 1)
        _count(&counted.updates, 1)
        _count(&counted.average_staleness_sum, 1000 * self.staleness_of_update // self.pushes_of_update)
        fps_plain_store()
        self.domain.last_update_ns = state.folded_ns
        self.pushes_of_update = self.staleness_of_update = 0

    cdef int64_t _free_buffer(self) noexcept nogil:
        """The lowest buffer that is neither active nor pinned, or -1.

        The pins are read after the flip that retired the buffers ([PIN] in atomics.h). The lowest first keeps the same few
        buffers in the cache.
        """
        cdef uint64_t pinned[2]
        cdef uint32_t index
        pinned[0] = pinned[1] = 0
        _mark(pinned, fps_reader_weights(fps_reader_load(&self.domain.reader)))
        for index in range(self.arena.header.n_lanes):
            # A dead worker's pin counts no more; the next owner pins what is published after its state changed.
            if fps_member_state(fps_state_acquire(&self.arena.lane(index).state)) == FPS_LANE_DEAD:
                continue
            # A reader moves a pin from `next` to `pin` by writing `pin` first: `next` must be read first, or it is in neither.
            _mark(pinned, fps_pin_load(&self.arena.seat(index, self.shard).next))
            _mark(pinned, fps_pin_load(&self.arena.seat(index, self.shard).pin))
        for index in range(self.arena.header.n_buffers):
            if index == fps_commit_buffer(self.seen):
                continue
            if not (pinned[index // 64] >> (index % 64)) & 1:
                return index
        return -1

    cdef uint32_t _free_state(self) noexcept nogil:
        """The lowest state buffer that is neither active nor being copied; there is always one."""
        cdef uint32_t active = self.domain.records[fps_commit_record(self.seen)].state_buffer
        cdef uint64_t read = fps_reader_state(fps_reader_load(&self.domain.reader))
        cdef uint32_t index
        for index in range(FPS_STATE_BUFFERS - 1):
            if index != active and index + 1 != read:
                return index
        return FPS_STATE_BUFFERS - 1

    cdef int _fold_and_flip(self, scheduler_t *state, uint64_t record) noexcept nogil:
        """Fold the batch into buffers that nobody reads, write the other record, and make all of it true by one flip."""
        cdef uint32_t state_in = self.domain.records[record].state_buffer
        if self.n_batch == 0:
            self.spare_buffer = fps_commit_buffer(self.seen)
            return self._commit(state, record, state_in)
        self.spare_buffer = self._free_buffer()
        if self.spare_buffer < 0:
            return TURN_NO_BUFFER
        self.spare_state = self._free_state()
        self._order(state, state_in)
        if fps_mutant(FPS_MUTANT_ACKNOWLEDGE_FIRST):
            self._publish(state)
        return self._end_fold(self.fold.run())

    cdef int _end_fold(self, int outcome) noexcept nogil:
        """Commit what was folded, unless it was refused or is still waited for."""
        cdef uint64_t record = fps_commit_record(self.seen)
        if outcome == FOLD_AWAITING:
            self.awaiting = _FOLD
            return TURN_AWAITING
        if outcome == FOLD_UNSOUND:
            return self._reject()
        if outcome != FOLD_DONE:
            return TURN_BAD_FOLD
        return self._commit(self.arena.scheduler(self.shard, 1 - record), record, self.spare_state)

    cdef int _reject(self) noexcept nogil:
        """Drop the pushes that the fold would have spoiled the weights with, whole, and fold the others again.

        To the scheduler they are null pushes then: steps that count and change nothing. Where every gradient is finite and
        only the result is not, the largest one goes.
        """
        cdef uint64_t record = fps_commit_record(self.seen)
        cdef scheduler_t *state = self.arena.scheduler(self.shard, 1 - record)
        cdef uint32_t index, kept = 0, largest = 0
        cdef int32_t parameter
        cdef float most = -1, size
        for index in range(self.n_batch):
            if self.fold.work.pushes[index].lane >= self.arena.header.n_lanes:
                return TURN_BAD_FOLD
            size = self.fold.largest(index, &parameter)
            if size > most:
                most = size
                largest = index
        for index in range(self.n_batch):
            size = self.fold.largest(index, &parameter)
            if size == INFINITY or (most < INFINITY and index == largest):
                self._count_rejection(&self.fold.work.pushes[index], parameter)
                roster_workers(state)[self.fold.work.pushes[index].lane].folded -= 1
                roster_workers(state)[self.fold.work.pushes[index].lane].dropped += 1
            else:
                self.fold.work.pushes[kept] = self.fold.work.pushes[index]
                kept += 1
        self.n_batch = kept
        self.batch_samples = 0
        for index in range(kept):
            self.batch_samples += self.fold.work.pushes[index].samples
        return self._fold_and_flip(state, record)

    cdef void _count_rejection(self, const fps_folded_push *push, int32_t parameter) noexcept nogil:
        cdef fps_seat *seat = self.arena.seat(push.lane, self.shard)
        fps_counter_set(&seat.rejected_step, <int64_t> push.step)
        fps_counter_set(&seat.rejected_parameter, parameter)
        _count(&seat.rejected, 1)
        _count(&self.domain.rejections, 1)

    cdef int _commit(self, scheduler_t *state, uint64_t record, uint32_t state_buffer) noexcept nogil:
        cdef fps_record *after = &self.domain.records[1 - record]
        if fps_mutant(FPS_MUTANT_FLIP_FIRST):
            self._flip(state, self.spare_buffer, 1 - record)
            self.seen = fps_commit_load(&self.domain.commit)
        fps_plain_store()
        after.version = state.version
        fps_plain_store()
        after.weights_buffer = self.spare_buffer
        fps_plain_store()
        after.state_buffer = state_buffer
        return self._flip(state, self.spare_buffer, 1 - record)

    cdef int _flip(self, scheduler_t *state, uint64_t weights_buffer, uint64_t record) noexcept nogil:
        cdef uint64_t commit = fps_commit_pack(state.version, fps_commit_epoch(self.seen), weights_buffer, record)
        if not fps_commit_flip(&self.domain.commit, self.seen, commit):
            return TURN_LOST
        self._publish(state)
        return TURN_DONE

    cdef void _order(self, scheduler_t *state, uint32_t state_in) noexcept nogil:
        """What is to be folded, and into which buffers."""
        cdef bint is_sum = state.policy.fold not in (FOLD_EACH, FOLD_IN_ORDER)
        fps_plain_store()
        self.fold.work.mode = FPS_FOLD_SUM if is_sum else FPS_FOLD_EACH
        self.fold.work.n_pushes = self.n_batch
        self.fold.work.scale = 1.0 / self.n_batch if is_sum else 1.0
        self.fold.work.rate_scale = self._rate_scale(&state.policy)
        fps_plain_store()
        self.fold.work.weights_in = fps_commit_buffer(self.seen)
        self.fold.work.weights_out = self.spare_buffer
        self.fold.work.state_in = state_in
        self.fold.work.state_out = self.spare_state

    cdef double _rate_scale(self, const policy_t *policy) noexcept nogil:
        """What the learning rate of a sum is multiplied by."""
        if policy.scale == SCALE_LINEAR:
            return self.n_batch  # PSP-SGD, Algorithm 1, line 13
        if policy.scale == SCALE_SQUARE_ROOT:
            # Rudra, section 3.2: sqrt(lambda mu / B), where lambda mu is the samples of all pushes.
            return sqrt(<double> self.batch_samples / policy.reference)
        if policy.scale == SCALE_DIVISOR:
            return 1.0 / <double> policy.divisor  # Rudra, equation 6
        return 1.0

    # -- what follows from a commit ----------------------------------------------------------------

    cdef void _publish(self, scheduler_t *state) noexcept nogil:
        """Write the words that follow from the commit for everyone whom it touched."""
        cdef int32_t i
        cdef int64_t due_ns = scheduler_due(state)
        for i in range(state.n_touched_workers):
            self._publish_seat(state, roster_touched(state)[i])
        if due_ns != self.domain.due_ns:
            fps_counter_set(&self.domain.due_ns, due_ns)
            if due_ns != NEVER_NS and state.first_waiting >= 0:
                # Whoever sleeps must wake in time for the new deadline; one of them is enough to take the turn then.
                self._rouse(state.first_waiting)

    cdef void _publish_seat(self, scheduler_t *state, uint32_t index) noexcept nogil:
        cdef worker_t *worker = &roster_workers(state)[index]
        cdef fps_seat *seat = self.arena.seat(index, self.shard)
        fps_counter_set(&seat.folded, worker.folded)
        fps_counter_set(&seat.dropped, worker.dropped)
        fps_counter_set(&seat.staleness_sum, worker.staleness_sum)
        fps_counter_set(&seat.staleness_max, worker.staleness_max)
        if (seat.head == <uint64_t> worker.cursor and seat.granted == worker.granted
                and seat.generation == worker.generation):
            return
        fps_counter_set(&seat.batch, worker.batch)
        fps_head_release(&seat.head, worker.cursor)
        fps_grant_release(&seat.granted, worker.granted)
        fps_grant_release(&seat.generation, worker.generation)
        self._rouse(index)

    cdef void _rouse(self, uint32_t index) noexcept nogil:
        """Move the lane's event, and wake its worker once the turn is given back."""
        cdef uint32_t i
        fps_event_add(&self.arena.lane(index).event)
        if not fps_sleeping_load(&self.arena.lane(index).sleeping):
            return
        for i in range(self.n_to_wake):
            if self.to_wake[i] == index:
                return
        self.to_wake[self.n_to_wake] = index
        self.n_to_wake += 1

    cdef void _repair(self) noexcept nogil:
        """Make the inactive copy whole again after an unfinished commit, and every derived word true."""
        cdef uint64_t commit = fps_commit_load(&self.domain.commit)
        cdef scheduler_t *active = self.arena.scheduler(self.shard, fps_commit_record(commit))
        cdef scheduler_t *inactive = self.arena.scheduler(self.shard, 1 - fps_commit_record(commit))
        cdef uint32_t index
        self.pushes_of_update = self.staleness_of_update = 0
        if not roster_can_be_followed(active, &self.expected) or not roster_can_be_walked(
                active, self.arena.header.ring_size):
            return  # nothing follows from what is damaged; the next commit says so
        fps_plain_store()
        inactive.n_workers = active.n_workers
        roster_copy(inactive, active)
        fps_counter_set(&self.domain.due_ns, scheduler_due(active))
        if fps_mutant(FPS_MUTANT_FORGET_HEADS):
            return
        for index in range(self.arena.header.n_lanes):
            self._publish_seat(active, index)

    # -- turns of the dead, and writing by hand ----------------------------------------------------

    cdef int break_turn(self, uint32_t dead_lane, uint32_t generation, int64_t now_ns) noexcept nogil:
        """First the turn, then the commit word's epoch: from then on a flip of the late owner fails.

        Those who help with its fold are waited for: they write the buffers that the next fold will write.
        """
        cdef uint64_t seen = fps_turn_load(&self.domain.turn)
        cdef uint64_t commit, present
        self.now_ns = now_ns
        while True:
            # An owner before the present one has died, too: the next joins after that only.
            present = fps_member_generation(fps_state_acquire(&self.arena.lane(dead_lane).state)) & 0xffff
            if fps_turn_owner(seen) != dead_lane + 1 or (
                    fps_turn_generation(seen) != generation & 0xffff and fps_turn_generation(seen) == present):
                return TURN_BUSY
            self.turn = fps_turn_pack(fps_turn_epoch(seen) + 1, self.generation, self.lane + 1)
            if fps_turn_take(&self.domain.turn, seen, self.turn):
                break
            seen = fps_turn_load(&self.domain.turn)
        while True:
            commit = fps_commit_load(&self.domain.commit)
            if fps_commit_flip(&self.domain.commit, commit, fps_commit_pack(
                    fps_commit_version(commit), fps_turn_epoch(self.turn), fps_commit_buffer(commit),
                    fps_commit_record(commit))):
                break
        self.fold.close()
        if fps_mutant(FPS_MUTANT_BREAK_AT_ONCE):
            self._repair()
            return self.run()
        self.awaiting = _BROKEN_FOLD
        return self.resume(now_ns)

    cdef int64_t spare(self) noexcept nogil:
        """While holding: a weights buffer that nobody reads, or -1."""
        self.seen = fps_commit_load(&self.domain.commit)
        self.spare_buffer = self._free_buffer()
        self.spare_state = self._free_state()
        return self.spare_buffer

    cdef int release(self, bint publish, int64_t now_ns) noexcept nogil:
        """While holding: publish the spare buffers as they are (the version stays), or not; then run the turn as usual."""
        cdef uint64_t record
        cdef scheduler_t *state
        cdef int outcome = TURN_DONE
        self.now_ns = now_ns
        if publish:
            record = fps_commit_record(self.seen)
            self.is_checked = False
            state = self._begin(record)
            outcome = self._commit(state, record, self.spare_state) if state != NULL else TURN_BAD_STATE
        return outcome if outcome == TURN_LOST else self.run(outcome)
