"""The turn: post a push, take the right to run the shard, drain all lanes, fold, commit, grant.

This is the life of a push after backward (docs/architecture.md has the picture). Whoever posts tries the turn; if another has
it, that one is told by the PENDING flag and drains again before it lets go, so no push is stranded although nobody waits
(flat combining). One flip of the commit word makes everything of a commit true: weights, rule state, cursors, the scheduler's
state. A holder that dies before it leaves nothing that anyone reads.

What it refuses to know: processes (fastps/store.py proves an owner dead and then calls `break_turn`), clocks (times come in
descriptors), files, and Python objects on the way of a push.
"""

from libc.math cimport NAN
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset

from fastps.kernels.arena cimport (
    FPS_PENDING,
    Arena,
    fps_commit_buffer,
    fps_commit_epoch,
    fps_commit_pack,
    fps_commit_record,
    fps_commit_version,
    fps_record,
    fps_turn_epoch,
    fps_turn_owner,
    fps_turn_pack,
)
from fastps.kernels.fold cimport (
    FPS_FOLD_EACH,
    FPS_FOLD_SUM,
    fps_fold,
    fps_fold_job,
    fps_hyper,
    fps_push,
    fps_segment,
    fps_user_rule,
)
from fastps.kernels.lane cimport (
    FPS_LEAVE,
    FPS_MAX_BATCH,
    FPS_NULL,
    FPS_PUSH,
    fps_descriptor,
    fps_head_acquire,
    fps_head_release,
    fps_lane,
    fps_pause,
    fps_tail_acquire,
    lane_descriptor,
    lane_post,
)
from fastps.kernels.scheduler cimport (
    ACTION_FOLD,
    ACTION_FOLD_ALL,
    FOLD_ALL,
    scheduler_begin,
    scheduler_catch_up,
    scheduler_copy,
    scheduler_leave,
    scheduler_push,
    scheduler_t,
    scheduler_touch,
    scheduler_touched_workers,
    scheduler_workers,
    worker_t,
)

cdef extern from "atomics.h" nogil:
    void FPS_ASSERT(bint condition)
    uint64_t fps_turn_load(const uint64_t *turn)
    int fps_turn_take(uint64_t *turn, uint64_t seen, uint64_t mine)
    int fps_turn_give(uint64_t *turn, uint64_t mine, uint64_t given)
    uint64_t fps_turn_set_pending(uint64_t *turn, uint64_t flag)
    void fps_turn_clear_pending(uint64_t *turn, uint64_t flag)
    int fps_commit_flip(uint64_t *commit, uint64_t seen, uint64_t next)
    uint64_t fps_commit_load(const uint64_t *commit)
    void fps_pin_exchange(uint64_t *pin, uint64_t value)
    uint64_t fps_pin_load(const uint64_t *pin)
    void fps_grant_release(int64_t *granted, int64_t steps)
    int64_t fps_grant_acquire(const int64_t *granted)
    void fps_event_add(uint32_t *event)
    uint32_t fps_event_load(const uint32_t *event)
    void fps_sleeping_set(uint32_t *sleeping, uint32_t value)
    uint32_t fps_sleeping_load(const uint32_t *sleeping)
    void fps_event_sleep(uint32_t *event, uint32_t seen, int64_t slice_ns)
    void fps_event_wake(uint32_t *event)
    void fps_counter_set(int64_t *counter, int64_t value)
    int64_t fps_counter_get(const int64_t *counter)

cdef enum:
    MAX_ROUNDS = 16  # drains before a holder hands the turn over: nobody does the others' work for ever

# Outcomes of a turn.
cdef enum:
    _DONE = 0
    _BUSY = 1
    _LOST = 2
    _BAD_DESCRIPTOR = -1
    _NO_BUFFER = -2
    _BAD_FOLD = -3

cdef enum:
    _NOTHING = 100  # no event; beyond the scheduler's actions

DONE = _DONE                      # the turn was run, and everything posted before it is decided
BUSY = _BUSY                      # another has it, and will see what was posted
LOST = _LOST                      # another broke this turn; nothing of it was committed after that
BAD_DESCRIPTOR = _BAD_DESCRIPTOR  # lane `bad_lane` holds a descriptor that no worker of ours can have posted
NO_BUFFER = _NO_BUFFER            # every weights buffer is active or pinned: more readers than the arena was made for
BAD_FOLD = _BAD_FOLD              # the fold refused its job

KIND_PUSH = FPS_PUSH
KIND_NULL = FPS_NULL
KIND_LEAVE = FPS_LEAVE


cdef class Lane:
    """One attached lane: the compiled half of a worker. Only one thread may use it.

    `index` is the lane of `arena` that the caller has claimed.
    """

    cdef readonly Arena arena
    cdef readonly uint32_t index
    cdef readonly int bad_lane          # of the last BAD_DESCRIPTOR
    cdef readonly uint64_t version      # of the last pull
    cdef fps_lane *words
    cdef uint64_t turn                  # the turn word while this lane holds it
    cdef uint64_t seen                  # the commit word that this turn's flip expects
    cdef int64_t spare_buffer           # the weights buffer that `spare` gave out
    # Scratch of a turn, allocated once.
    cdef uint64_t *tails
    cdef uint32_t *to_wake
    cdef uint32_t n_to_wake
    cdef fps_push *batch
    cdef uint32_t batch_size
    cdef uint32_t n_batch
    cdef fps_user_rule user_rule        # the job's own rule, or NULL

    def __cinit__(self, Arena arena not None, uint32_t index):
        if index >= arena.header.n_lanes:
            raise IndexError(f"expected a lane of 0 to {arena.header.n_lanes - 1}, found {index}")
        self.arena = arena
        self.index = index
        self.bad_lane = -1
        self.words = arena.lane(index)
        self.batch_size = max(<uint32_t> FPS_MAX_BATCH, arena.header.n_lanes)
        self.tails = <uint64_t *> calloc(arena.header.n_lanes, sizeof(uint64_t))
        self.to_wake = <uint32_t *> calloc(arena.header.n_lanes, sizeof(uint32_t))
        self.batch = <fps_push *> calloc(self.batch_size, sizeof(fps_push))
        if not self.tails or not self.to_wake or not self.batch:
            raise MemoryError()

    def __dealloc__(self):
        free(self.tails)
        free(self.to_wake)
        free(self.batch)

    # -- the worker's side: slots, posts, waits, pulls ---------------------------------------------

    def set_hyper(self, uint32_t slot, uint32_t group, double learning_rate, double momentum, double dampening,
                  double weight_decay, double beta1, double beta2, double epsilon, double learning_rate_decay, uint64_t flags):
        """Write one param_group's hyper-parameters into the slot; they travel with its next push."""
        cdef fps_hyper *hyper = <fps_hyper *> self.arena.slot(self.index, slot) + group
        hyper.learning_rate = learning_rate
        hyper.momentum = momentum
        hyper.dampening = dampening
        hyper.weight_decay = weight_decay
        hyper.beta1 = beta1
        hyper.beta2 = beta2
        hyper.epsilon = epsilon
        hyper.learning_rate_decay = learning_rate_decay
        hyper.flags = flags

    def set_user_rule(self, uintptr_t address):
        """Let folds in this lane's turns call the user's rule at `address`; whoever gives it keeps its code alive."""
        self.user_rule = <fps_user_rule> address

    def set_presence(self, uint32_t slot, bytes words not None):
        """Write the bitmap of the parameters that have a gradient in the slot: uint64 words, little endian."""
        cdef uint64_t size = self.arena.header.presence_words * sizeof(uint64_t)
        if <uint64_t> len(words) != size:
            raise ValueError(f"expected {size} bytes of presence, found {len(words)}")
        memcpy(self.arena.slot(self.index, slot) + self.arena.header.slot_presence_offset, <char *> words, size)

    def post(self, int kind, uint64_t step, uint32_t slot, uint64_t read_version, int64_t post_ns, double scale=1.0,
             double loss=NAN, uint32_t samples=0):
        """Post one descriptor; False when the ring is full. The slot must stay as it is until `done` has passed it."""
        cdef fps_descriptor descriptor
        memset(&descriptor, 0, sizeof(descriptor))
        descriptor.kind = kind
        descriptor.step = step
        descriptor.slot = slot
        descriptor.read_version = read_version
        descriptor.post_ns = post_ns
        descriptor.scale = scale
        descriptor.loss = loss
        descriptor.samples = samples
        return lane_post(self.words, self.arena.header.ring_size, &descriptor) == 0

    def posted(self):
        """Descriptors posted so far."""
        return self.words.tail

    def done(self):
        """Descriptors done with so far: their slots are free."""
        return fps_head_acquire(&self.words.head)

    def granted(self):
        """Steps that this worker may have begun."""
        return fps_grant_acquire(&self.words.granted)

    def wait(self, int64_t granted, uint64_t done, int64_t spins, int64_t slice_ns):
        """Wait until `granted` steps are granted and `done` descriptors are done with; False if the slice ended before.

        Spins `spins` times first, then sleeps on the word that commits and grants change. Releases the GIL. Returns early on a
        signal, so that Python can run its handler. On False the caller should try the turn: it may have been handed over.
        """
        cdef bint reached
        with nogil:
            reached = self._wait(granted, done, spins, slice_ns)
        return reached

    cdef bint _reached(self, int64_t granted, uint64_t done) noexcept nogil:
        return fps_grant_acquire(&self.words.granted) >= granted and fps_head_acquire(&self.words.head) >= done

    cdef bint _wait(self, int64_t granted, uint64_t done, int64_t spins, int64_t slice_ns) noexcept nogil:
        cdef uint32_t event
        cdef int64_t _look
        for _look in range(spins + 1):
            if self._reached(granted, done):
                return True
            fps_pause()
        fps_sleeping_set(&self.words.sleeping, 1)
        event = fps_event_load(&self.words.event)
        if not self._reached(granted, done):
            fps_event_sleep(&self.words.event, event, slice_ns)
        fps_sleeping_set(&self.words.sleeping, 0)
        return self._reached(granted, done)

    def pull(self):
        """Pin the published weights and return their buffer; `version` then says which version they are. Copies nothing."""
        cdef uint64_t commit
        with nogil:
            while True:
                commit = fps_commit_load(&self.arena.domain.commit)
                fps_pin_exchange(&self.words.pin, fps_commit_buffer(commit) + 1)
                if fps_commit_load(&self.arena.domain.commit) == commit:
                    break
        self.version = fps_commit_version(commit)
        return fps_commit_buffer(commit)

    def unpin(self):
        """End the reads of whatever buffer was pulled."""
        fps_pin_exchange(&self.words.pin, 0)

    def count(self, int64_t steps, int64_t wait_ns, int64_t compute_ns, int64_t samples, double loss):
        """Publish this worker's counters to whoever looks."""
        cdef int64_t loss_bits
        memcpy(&loss_bits, &loss, sizeof(loss_bits))
        fps_counter_set(&self.words.steps, steps)
        fps_counter_set(&self.words.wait_ns, wait_ns)
        fps_counter_set(&self.words.compute_ns, compute_ns)
        fps_counter_set(&self.words.samples, samples)
        fps_counter_set(&self.words.loss_bits, loss_bits)

    # -- the turn ----------------------------------------------------------------------------------

    def try_turn(self):
        """Take the turn if it is free, and run it. Returns DONE, BUSY, LOST or a negative outcome. Releases the GIL."""
        cdef int outcome
        with nogil:
            outcome = self._run() if self._take() else _BUSY
        return outcome

    def owner(self):
        """The lane that holds the turn, or -1."""
        return <int64_t> fps_turn_owner(fps_turn_load(&self.arena.domain.turn)) - 1

    def break_turn(self, uint32_t dead_lane):
        """Take the turn from `dead_lane`, whose process is proved dead, and run it. BUSY if it is not the owner any more."""
        cdef int outcome
        with nogil:
            outcome = self._break(dead_lane)
        return outcome

    cdef bint _take(self) noexcept nogil:
        cdef uint64_t *word = &self.arena.domain.turn
        cdef uint64_t seen = fps_turn_load(word)
        while True:
            if fps_turn_owner(seen) == 0:
                self.turn = fps_turn_pack(fps_turn_epoch(seen), 0, self.index + 1)
                if fps_turn_take(word, seen, self.turn):
                    return True
                seen = fps_turn_load(word)
                continue
            # The holder may have looked at this lane already: the flag keeps it from letting go before it looks again.
            seen = fps_turn_set_pending(word, FPS_PENDING)
            if fps_turn_owner(seen) != 0:
                return False
            seen = fps_turn_load(word)

    cdef int _run(self) noexcept nogil:
        """Drain until nothing is pending, then let go; after MAX_ROUNDS hand over to whoever comes next."""
        cdef uint64_t *word = &self.arena.domain.turn
        cdef uint64_t given = fps_turn_pack(fps_turn_epoch(self.turn), 0, 0)
        cdef int outcome, rounds = 0
        while True:
            outcome = self._drain()
            if outcome == _LOST:
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
                return _LOST
            self._wake()
            fps_turn_clear_pending(word, FPS_PENDING)
            if fps_turn_load(word) & ~FPS_PENDING != self.turn:
                return _LOST

    cdef void _nudge(self) noexcept nogil:
        """Wake one sleeper to take the turn that is handed over; if nobody sleeps, the next push takes it."""
        cdef uint32_t index
        for index in range(self.arena.header.n_lanes):
            if index != self.index and fps_sleeping_load(&self.arena.lane(index).sleeping):
                fps_event_add(&self.arena.lane(index).event)
                fps_event_wake(&self.arena.lane(index).event)
                return

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
            if outcome != _BUSY:
                return outcome

    cdef int _commit_once(self) noexcept nogil:
        """One commit: up to a batch of events, in order of their times. Returns _BUSY if there may be more, _DONE if not."""
        cdef uint64_t record
        cdef scheduler_t *active
        cdef scheduler_t *state
        cdef int action
        cdef bint any_event = False
        self.seen = fps_commit_load(&self.arena.domain.commit)
        record = fps_commit_record(self.seen)
        active = self.arena.scheduler(record)
        state = self.arena.scheduler(1 - record)
        scheduler_catch_up(state, active)
        scheduler_begin(state)
        self._look(state)
        self.n_batch = 0
        while self.n_batch < FPS_MAX_BATCH:
            action = self._next_event(state)
            if action < 0:
                return action
            if action == _NOTHING:
                break
            any_event = True
            if action == ACTION_FOLD_ALL:
                self._gather(state)
                break
        if not any_event:
            return _DONE
        action = self._fold_and_flip(state, record)
        return _BUSY if action == _DONE else action

    cdef void _look(self, scheduler_t *state) noexcept nogil:
        cdef uint32_t index
        for index in range(self.arena.header.n_lanes):
            self.tails[index] = fps_tail_acquire(&self.arena.lane(index).tail)

    cdef int _next_event(self, scheduler_t *state) noexcept nogil:
        """Give the scheduler its earliest descriptor not seen yet. Returns its action, _NOTHING or a negative outcome."""
        cdef worker_t *workers = scheduler_workers(state)
        cdef worker_t *worker
        cdef fps_descriptor *descriptor
        cdef fps_descriptor *earliest = NULL
        cdef uint32_t index, lane = 0
        cdef int action
        for index in range(self.arena.header.n_lanes):
            if <uint64_t> workers[index].consumed < self.tails[index]:
                descriptor = lane_descriptor(self.arena.lane(index), self.arena.header.ring_size, workers[index].consumed)
                if earliest == NULL or descriptor.post_ns < earliest.post_ns:
                    earliest = descriptor
                    lane = index
        if earliest == NULL:
            return _NOTHING
        worker = &workers[lane]
        if (earliest.kind > FPS_LEAVE or earliest.slot >= self.arena.header.n_slots or not worker.live
                or (worker.waiting and earliest.kind != FPS_LEAVE)
                or self.tails[lane] - worker.cursor > self.arena.header.ring_size):
            self.bad_lane = lane
            return _BAD_DESCRIPTOR
        worker.consumed += 1
        scheduler_touch(state, lane)
        if earliest.kind == FPS_LEAVE:
            action = scheduler_leave(state, lane, earliest.post_ns)
            if state.policy.fold != FOLD_ALL or worker.cursor + 1 == worker.consumed:
                worker.cursor = worker.consumed  # nothing of this worker is kept for a fold
            return action
        action = scheduler_push(state, lane, earliest.post_ns)
        if action == ACTION_FOLD:
            self._take_push(state, lane, earliest)
            worker.cursor = worker.consumed
        return action

    cdef void _take_push(self, scheduler_t *state, uint32_t lane, const fps_descriptor *descriptor) noexcept nogil:
        """Add the push to the batch, and count its staleness: versions published between its read and its fold."""
        cdef worker_t *worker = &scheduler_workers(state)[lane]
        cdef int64_t staleness = state.version - 1 - <int64_t> descriptor.read_version
        cdef char *slot
        worker.folded += 1
        worker.staleness_sum += staleness
        worker.staleness_max = max(worker.staleness_max, staleness)
        if descriptor.kind == FPS_NULL:
            return
        slot = self.arena.slot(lane, descriptor.slot)
        self.batch[self.n_batch].hypers = <fps_hyper *> slot
        self.batch[self.n_batch].presence = <uint64_t *> (slot + self.arena.header.slot_presence_offset)
        self.batch[self.n_batch].gradient = <float *> (slot + self.arena.header.slot_gradient_offset)
        self.batch[self.n_batch].scale = descriptor.scale
        self.batch[self.n_batch].rate_scale = 1.0
        self.n_batch += 1

    cdef void _gather(self, scheduler_t *state) noexcept nogil:
        """All pushes kept for this version, in order of the lanes: the sum has the same bits whatever the order of arrival."""
        cdef worker_t *worker
        cdef fps_descriptor *descriptor
        cdef uint32_t lane
        cdef int64_t position
        for lane in range(self.arena.header.n_lanes):
            worker = &scheduler_workers(state)[lane]
            if worker.cursor == worker.consumed:
                continue
            for position in range(worker.cursor, worker.consumed):
                descriptor = lane_descriptor(self.arena.lane(lane), self.arena.header.ring_size, position)
                if descriptor.kind != FPS_LEAVE and self.n_batch < self.batch_size:
                    self._take_push(state, lane, descriptor)
            worker.cursor = worker.consumed
            scheduler_touch(state, lane)

    cdef int64_t _free_buffer(self) noexcept nogil:
        """The lowest buffer that is neither active nor pinned, or -1.

        The pins are read after the flip that retired the buffers ([PIN] in atomics.h). The lowest first keeps the same few
        buffers in the cache.
        """
        cdef uint64_t pinned_low = 0, pinned_high = 0, pin
        cdef uint32_t index
        for index in range(self.arena.header.n_lanes):
            pin = fps_pin_load(&self.arena.lane(index).pin)
            if 0 < pin <= 64:
                pinned_low |= (<uint64_t> 1) << (pin - 1)
            elif pin > 64:
                pinned_high |= (<uint64_t> 1) << ((pin - 65) & 63)
        for index in range(self.arena.header.n_buffers):
            if index == fps_commit_buffer(self.seen):
                continue
            if not ((pinned_low >> index if index < 64 else pinned_high >> (index - 64)) & 1):
                return index
        return -1

    cdef int _fold_and_flip(self, scheduler_t *state, uint64_t record) noexcept nogil:
        """Fold the batch into buffers that nobody reads, write the other record, and make all of it true by one flip."""
        cdef fps_record *before = &self.arena.domain.records[record]
        cdef fps_record *after = &self.arena.domain.records[1 - record]
        cdef int64_t weights_buffer = fps_commit_buffer(self.seen)
        cdef uint32_t state_buffer = before.state_buffer
        if self.n_batch:
            weights_buffer = self._free_buffer()
            if weights_buffer < 0:
                return _NO_BUFFER
            state_buffer = 1 - state_buffer
            if self._fold(state, weights_buffer, state_buffer) != 0:
                return _BAD_FOLD
        after.version = state.version
        after.weights_buffer = weights_buffer
        after.state_buffer = state_buffer
        return self._flip(state, weights_buffer, 1 - record)

    cdef int _flip(self, scheduler_t *state, uint64_t weights_buffer, uint64_t record) noexcept nogil:
        cdef uint64_t commit = fps_commit_pack(state.version, fps_commit_epoch(self.seen), weights_buffer, record)
        if not fps_commit_flip(&self.arena.domain.commit, self.seen, commit):
            return _LOST
        self._publish(state)
        return _DONE

    cdef int _fold(self, scheduler_t *state, uint64_t weights_buffer, uint32_t state_buffer) noexcept nogil:
        cdef fps_fold_job job
        cdef char *state_in = self.arena.state(1 - state_buffer)
        cdef char *state_out = self.arena.state(state_buffer)
        memset(&job, 0, sizeof(job))
        job.rule = self.arena.header.rule
        job.user_rule = self.user_rule
        job.mode = FPS_FOLD_SUM if state.policy.fold == FOLD_ALL else FPS_FOLD_EACH
        job.state_planes = self.arena.header.state_planes
        job.ema_plane = -1
        job.state_stride = self.arena.header.buffer_floats
        job.n_segments = self.arena.header.n_parameters
        job.segments = <fps_segment *> (self.arena.base + self.arena.header.segments_offset)
        job.n_pushes = self.n_batch
        job.pushes = self.batch
        job.scale = 1.0 / self.n_batch if state.policy.fold == FOLD_ALL else 1.0
        job.rate_scale = 1.0
        job.weights_in = self.arena.weights(fps_commit_buffer(self.seen))
        job.weights_out = self.arena.weights(weights_buffer)
        job.steps_in = <int64_t *> state_in
        job.steps_out = <int64_t *> state_out
        job.state_in = <float *> (state_in + self.arena.header.state_steps_bytes)
        job.state_out = <float *> (state_out + self.arena.header.state_steps_bytes)
        return fps_fold(&job, 0, self.arena.header.buffer_floats)

    cdef void _publish(self, scheduler_t *state) noexcept nogil:
        """Write the words that follow from the commit for everyone whom it touched."""
        cdef int32_t i
        for i in range(state.n_touched_workers):
            self._publish_lane(state, scheduler_touched_workers(state)[i])

    cdef void _publish_lane(self, scheduler_t *state, uint32_t index) noexcept nogil:
        cdef worker_t *worker = &scheduler_workers(state)[index]
        cdef fps_lane *lane = self.arena.lane(index)
        cdef uint32_t i
        fps_counter_set(&lane.folded, worker.folded)
        fps_counter_set(&lane.dropped, worker.dropped)
        fps_counter_set(&lane.staleness_sum, worker.staleness_sum)
        fps_counter_set(&lane.staleness_max, worker.staleness_max)
        if lane.head == <uint64_t> worker.cursor and lane.granted == worker.granted:
            return
        fps_head_release(&lane.head, worker.cursor)
        fps_grant_release(&lane.granted, worker.granted)
        fps_event_add(&lane.event)
        if not fps_sleeping_load(&lane.sleeping):
            return
        for i in range(self.n_to_wake):
            if self.to_wake[i] == index:
                return
        self.to_wake[self.n_to_wake] = index
        self.n_to_wake += 1

    cdef void _repair(self) noexcept nogil:
        """Make the inactive copy whole again after an unfinished commit, and every derived word true."""
        cdef uint64_t commit = fps_commit_load(&self.arena.domain.commit)
        cdef scheduler_t *active = self.arena.scheduler(fps_commit_record(commit))
        cdef scheduler_t *inactive = self.arena.scheduler(1 - fps_commit_record(commit))
        cdef uint32_t index
        inactive.n_workers = active.n_workers
        scheduler_copy(inactive, active)
        for index in range(self.arena.header.n_lanes):
            self._publish_lane(active, index)

    cdef int _break(self, uint32_t dead_lane) noexcept nogil:
        """First the turn, then the commit word's epoch: from then on a flip of the late owner fails."""
        cdef uint64_t seen = fps_turn_load(&self.arena.domain.turn)
        cdef uint64_t commit
        while True:
            if fps_turn_owner(seen) != dead_lane + 1:
                return _BUSY
            self.turn = fps_turn_pack(fps_turn_epoch(seen) + 1, 0, self.index + 1)
            if fps_turn_take(&self.arena.domain.turn, seen, self.turn):
                break
            seen = fps_turn_load(&self.arena.domain.turn)
        while True:
            commit = fps_commit_load(&self.arena.domain.commit)
            if fps_commit_flip(&self.arena.domain.commit, commit, fps_commit_pack(
                    fps_commit_version(commit), fps_turn_epoch(self.turn), fps_commit_buffer(commit),
                    fps_commit_record(commit))):
                break
        self._repair()
        return self._run()

    # -- writing by hand: the start, and loading a checkpoint --------------------------------------

    def hold(self):
        """Take the turn and keep it; False when another has it. The caller writes buffers, then calls `release`."""
        return self._take()

    def spare(self):
        """While holding: (weights buffer, state buffer) that nobody reads, to be written whole and then published."""
        self.seen = fps_commit_load(&self.arena.domain.commit)
        self.spare_buffer = self._free_buffer()
        if self.spare_buffer < 0:
            raise RuntimeError("every weights buffer is pinned: more readers than the arena was made for")
        return self.spare_buffer, 1 - self.arena.domain.records[fps_commit_record(self.seen)].state_buffer

    def release(self, bint publish):
        """While holding: publish the spare buffers as they are (the version stays), or not; then run the turn as usual."""
        cdef uint64_t record
        cdef scheduler_t *state
        cdef int outcome = _DONE
        with nogil:
            if publish:
                record = fps_commit_record(self.seen)
                state = self.arena.scheduler(1 - record)
                scheduler_catch_up(state, self.arena.scheduler(record))
                scheduler_begin(state)
                self.arena.domain.records[1 - record].version = state.version
                self.arena.domain.records[1 - record].weights_buffer = self.spare_buffer
                self.arena.domain.records[1 - record].state_buffer = 1 - self.arena.domain.records[record].state_buffer
                outcome = self._flip(state, self.spare_buffer, 1 - record)
            if outcome == _DONE:
                outcome = self._run()
        return outcome
