"""The pushes of one commit: taken from the lanes into the work item, counted, and removed if their results are non-finite.

The scheduler has decided what becomes of a push. This file writes its slot and its scales into the work item, moves its lane's
cursor, and counts what an observer may see: staleness, gaps, arrivals and the push outcome.
"""

cimport cython
from libc.math cimport INFINITY, sqrt

from fastps.kernels.base.atomics cimport fps_counter_get, fps_counter_set, fps_state_acquire
from fastps.kernels.base.failpoints cimport *
from fastps.kernels.combining.ring cimport lane_descriptor
from fastps.kernels.scheduling.state cimport *
from fastps.kernels.shm.arena_h cimport *
from fastps.kernels.update.fold cimport FPS_FOLD_EACH, FPS_FOLD_SUM, FPS_MAX_PUSHES


cdef inline void _count(int64_t *counter, int64_t more) noexcept nogil:
    """Add to a counter that only the combiner writes."""
    fps_counter_set(counter, fps_counter_get(counter) + more)


@cython.final
cdef class Batch:
    """What the next commit of shard `shard` folds, written into the work item of `fold`. For the combiner only."""

    def __cinit__(self, Arena arena not None, uint32_t shard, LockWord lock not None, SharedFold fold not None,
                  RowFold rows not None, LaneReads lanes not None):
        self.arena = arena
        self.lock = lock
        self.shard_header = arena.shard_header(shard)
        self.shard = shard
        self.fold = fold
        self.rows = rows
        self.lanes = lanes

    cdef void begin(self) noexcept nogil:
        """Begin without pushes."""
        self.n_pushes = 0
        self.samples = self.weight = 0

    # -- what is taken -----------------------------------------------------------------------------

    cdef bint take_single(self, scheduler_t *state, uint32_t lane, uint64_t position, int64_t version) noexcept nogil:
        """Take a push that makes a version by itself, the one after `version`. Returns as `gather`."""
        if not self._take_push(state, lane, position, version):
            return False
        self._end_update(state)
        return True

    cdef bint take_listed(self, scheduler_t *state) noexcept nogil:
        """Take the oldest kept push of each listed worker, one version each. Returns as `gather`."""
        cdef int32_t i, lane
        cdef worker_t *worker
        for i in range(state.n_folds):
            lane = state_folds(state)[i]
            worker = &state_workers(state)[lane]
            if not self.take_single(state, lane, worker.cursor, state.version - state.n_folds + i):
                return False
            worker.cursor += 1
            if worker.said_leave:
                worker.cursor = worker.consumed  # what is left of a leaver is its LEAVE
            state_mark_dirty(state, lane)
        return True

    cdef bint gather(self, scheduler_t *state) noexcept nogil:
        """Take all pushes kept for this version, in order of lanes: the sum's bits do not depend on the order of arrival.

        Returns False if a push names a slot that its lane has not; `lanes` has noted it.
        """
        cdef worker_t *worker
        cdef fps_descriptor *descriptor
        cdef uint32_t lane
        cdef int64_t position, end
        for lane in range(self.arena.header.n_lanes):
            worker = &state_workers(state)[lane]
            end = worker.cursor + worker.relayed if state.policy.groups else worker.consumed
            if worker.cursor == end:
                continue
            for position in range(worker.cursor, end):
                descriptor = lane_descriptor(self.arena.lane(lane), self.arena.header.ring_size, position)
                if state.policy.fold == FOLD_QUORUM and <int64_t> descriptor.read_version < state.version - 1:
                    continue  # dropped when it came, behind one that was kept
                if descriptor.kind != FPS_LEAVE and not self._take_push(state, lane, position, state.version - 1):
                    return False
            worker.cursor = end
            worker.relayed = 0
            if not worker.live and worker.said_leave and worker.cursor + 1 == worker.consumed:
                worker.cursor = worker.consumed  # what is left of a leaver is its LEAVE
            state_mark_dirty(state, lane)
        self._end_update(state)
        return True

    cdef bint _take_push(self, scheduler_t *state, uint32_t lane, uint64_t position, int64_t version) noexcept nogil:
        """Add the push to the batch, and count its staleness: versions published between its read and `version`."""
        cdef worker_t *worker = &state_workers(state)[lane]
        # A copy, because a word that is damaged after it was checked must not reach the fold.
        cdef fps_descriptor descriptor = lane_descriptor(self.arena.lane(lane), self.arena.header.ring_size, position)[0]
        cdef uint32_t slot = descriptor.slot
        cdef uint64_t *versions
        cdef int64_t staleness
        cdef double scale = descriptor.scale, rate_scale = 1.0
        cdef uint32_t member = fps_state_acquire(&self.arena.lane(lane).state)
        cdef bint is_damaged = slot >= self.arena.header.n_slots or descriptor.kind > FPS_NULL
        # What is damaged of an earlier owner is not blamed on the present one. A fold takes no more pushes than its item holds.
        if (self._is_void(member, lane, position) or self.n_pushes == FPS_MAX_PUSHES
                or is_damaged and fps_member_generation(member) != <uint32_t> worker.generation):
            worker.dropped += 1
            self.drop(state, lane, position)
            return True
        if is_damaged:
            if descriptor.kind > FPS_NULL:
                self.lanes.bad(lane, FPS_DAMAGED_KIND, descriptor.kind)
            else:
                self.lanes.bad(lane, FPS_DAMAGED_SLOT, slot)
            return False
        versions = <uint64_t *> (self.arena.slot(lane, slot) + self.arena.header.slot_versions_offset)
        staleness = version - <int64_t> (
            descriptor.read_version if descriptor.kind == FPS_NULL else versions[self.shard])
        worker.folded += 1
        worker.staleness_sum += staleness
        worker.staleness_max = max(worker.staleness_max, staleness)
        self.staleness_of_update += staleness
        self.pushes_of_update += 1
        _count(&self.arena.statistics(self.shard).staleness[min(max(staleness, 0), <int64_t> FPS_STALENESS_BUCKETS - 1)], 1)
        self._write_outcome(state, lane, position, FPS_OUTCOME_FOLDED, version + 1, staleness)
        if descriptor.kind == FPS_NULL:
            return True
        if state.policy.scale == SCALE_STALENESS and staleness > 1:
            # Rudra, footnote 3: a learning rate of its own for each gradient.
            scale /= <double> staleness
        elif state.policy.scale == SCALE_BATCH and state.policy.fold == FOLD_ALL:
            scale *= <double> descriptor.samples
        elif state.policy.scale == SCALE_BATCH and worker.base_batch > 0:
            # R2SP, Algorithm 1, worker, line 5.
            rate_scale = <double> descriptor.samples / <double> worker.base_batch
        self.fold.item.put(self.n_pushes, lane, &descriptor, scale, rate_scale)
        self.samples += descriptor.samples
        self.weight += max(descriptor.weight, <uint32_t> 1)
        self.n_pushes += 1
        return True

    cdef bint _is_void(self, uint32_t member, uint32_t lane, uint64_t position) noexcept nogil:
        """Whether the lane's owner that posted a descriptor was expelled: nothing of it is read."""
        if fps_mutant(FPS_MUTANT_READ_EXPELLED):
            return False
        return (fps_member_state(member) == FPS_LANE_EXPELLED
                or position < <uint64_t> fps_counter_get(&self.arena.lane(lane).begins))

    # -- what is left out --------------------------------------------------------------------------

    cdef void drop(self, const scheduler_t *state, uint32_t lane, uint64_t position) noexcept nogil:
        """Leave out a push that came too late for its version."""
        self._write_outcome(state, lane, position, FPS_OUTCOME_DROPPED, state.version, 0)

    cdef bint reject(self, scheduler_t *state) noexcept nogil:
        """Remove, whole, the pushes that made the fold's results non-finite.

        The scheduler counts them as null pushes: steps that change nothing. Where every gradient is finite and only the result
        is not, the largest one is removed. Returns False if the work item names a lane that the arena has not: it is damaged.
        """
        cdef uint32_t index, kept = 0, largest = 0
        cdef int32_t parameter
        cdef double most = -1, size
        cdef fps_folded_push push
        for index in range(self.n_pushes):
            size = self._largest(index, &parameter)
            if size > most:
                most = size
                largest = index
        for index in range(self.n_pushes):
            push = self.fold.item.push(index)
            if push.lane >= self.arena.header.n_lanes:
                return False
            size = self._largest(index, &parameter)
            if size == INFINITY or (most < INFINITY and index == largest):
                self._count_rejection(&push, parameter)
                self._write_rejection(push.lane, state_workers(state)[push.lane].consumed, &push)
                state_workers(state)[push.lane].folded -= 1
                state_workers(state)[push.lane].dropped += 1
                self.samples -= push.samples
                self.weight -= push.weight
            else:
                self.fold.item.move(kept, &push)
                kept += 1
        self.n_pushes = kept
        return True

    cdef double _largest(self, uint32_t index, int32_t *parameter) noexcept nogil:
        """The largest absolute value of a push, dense or in rows, and its parameter; infinite where a value is not finite."""
        cdef int32_t of_rows = -1
        cdef double dense = self.fold.largest(index, parameter), rows = self.rows.largest(index, &of_rows)
        if rows > dense:
            parameter[0] = of_rows
        return max(dense, rows)

    # -- what the fold is told ---------------------------------------------------------------------

    cdef void write_item(self, const policy_t *policy, uint32_t weights_in, uint32_t weights_out, uint32_t state_in,
                         uint32_t state_out) noexcept nogil:
        """Write how the pushes are folded (as a sum or one by one, and by what they are multiplied), and into which buffers."""
        cdef bint is_mean = policy.fold not in (FOLD_EACH, FOLD_IN_ORDER)
        cdef int64_t of = self.samples if is_mean and policy.scale == SCALE_BATCH else <int64_t> self.weight
        self.fold.item.write(
            FPS_FOLD_SUM if is_mean or policy.combine else FPS_FOLD_EACH, self.n_pushes,
            1.0 / <double> max(of, <int64_t> 1) if is_mean else 1.0, self._rate_scale(policy), weights_in, weights_out,
            state_in, state_out)

    cdef double _rate_scale(self, const policy_t *policy) noexcept nogil:
        """The factor of the learning rate of a sum."""
        if policy.scale == SCALE_LINEAR:
            return self.n_pushes  # PSP-SGD, Algorithm 1, line 13
        if policy.scale == SCALE_SQUARE_ROOT:
            # Rudra, section 3.2: sqrt(lambda mu / B), where lambda mu is the samples of all pushes.
            return sqrt(<double> self.samples / policy.reference)
        if policy.scale == SCALE_DIVISOR:
            return 1.0 / <double> policy.divisor  # Rudra, equation 6
        return 1.0

    # -- what is counted and written down of it ----------------------------------------------------

    cdef void count_arrival(self, int32_t earlier, int64_t after_ns) noexcept nogil:
        """Count when a push came within its version: after `earlier` others, `after_ns` after the version began."""
        _count(&self.arena.statistics(self.shard).arrivals[earlier][fps_time_bucket(after_ns)], 1)

    cdef void _end_update(self, const scheduler_t *state) noexcept nogil:
        """Count one version: its <sigma>, and the gaps between the updates that are its pushes."""
        cdef fps_statistics *counted = self.arena.statistics(self.shard)
        cdef int64_t gap_ns = state.folded_ns - self.shard_header.last_update_ns
        if self.pushes_of_update == 0:
            return
        if self.shard_header.last_update_ns > 0:
            _count(&counted.gaps[fps_time_bucket(gap_ns)], 1)
        if self.pushes_of_update > 1:
            _count(&counted.gaps[0], self.pushes_of_update - 1)
        _count(&counted.updates, 1)
        _count(&counted.average_staleness_sum, 1000 * self.staleness_of_update // self.pushes_of_update)
        FPS_FAILPOINT()
        self.shard_header.last_update_ns = state.folded_ns
        self.forget_update()

    cdef void forget_update(self) noexcept nogil:
        """Count from the next push on."""
        self.pushes_of_update = self.staleness_of_update = 0

    cdef void _write_outcome(self, const scheduler_t *state, uint32_t lane, uint64_t position, uint32_t kind, uint64_t version,
                             int64_t staleness) noexcept nogil:
        """Write a push outcome, if the job is recorded. It holds once this commit is published."""
        cdef fps_push_outcome *push_outcome
        # A combiner that another lane has passed by leaves the outcome to that one.
        if not fps_counter_get(&self.shard_header.recorded) or not self.lock.is_mine():
            return
        push_outcome = self.arena.push_outcome(lane, self.shard, position)
        FPS_FAILPOINT()
        push_outcome.position, push_outcome.version, push_outcome.decided_ns = position + 1, version, state.now_ns
        push_outcome.staleness, push_outcome.kind = <int32_t> staleness, kind

    cdef void _write_rejection(self, uint32_t lane, uint64_t consumed, const fps_folded_push *push) noexcept nogil:
        """Make the outcome of a push, one of the lane's last descriptors before `consumed`, that of a rejected one."""
        cdef uint64_t position, last = consumed - min(consumed, <uint64_t> self.arena.header.ring_size)
        cdef fps_descriptor *descriptor
        cdef fps_push_outcome *push_outcome
        if not fps_counter_get(&self.shard_header.recorded) or not self.lock.is_mine():
            return
        for position in range(last, consumed):
            descriptor = lane_descriptor(self.arena.lane(lane), self.arena.header.ring_size, position)
            push_outcome = self.arena.push_outcome(lane, self.shard, position)
            if descriptor.kind == FPS_PUSH and descriptor.step == push.step and push_outcome.position == position + 1:
                FPS_FAILPOINT()
                push_outcome.kind = FPS_OUTCOME_REJECTED

    cdef void _count_rejection(self, const fps_folded_push *push, int32_t parameter) noexcept nogil:
        cdef fps_lane_shard *lane_shard = self.arena.lane_shard(push.lane, self.shard)
        fps_counter_set(&lane_shard.rejected_step, <int64_t> push.step)
        fps_counter_set(&lane_shard.rejected_parameter, parameter)
        _count(&lane_shard.rejected, 1)
        _count(&self.shard_header.rejections, 1)
