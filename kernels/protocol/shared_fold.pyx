"""One shard's fold, cut into chunks that whoever waits may take: who has to wait does the server's work.

The holder of the turn writes the order (which buffers, which slots, which scales) into the shard's work area and issues a
ticket, of which each claim takes a chunk. Everyone begins with its own part, which its core may still have in its cache. A lane
says that it helps before it claims, and takes that back after its last chunk, so that the holder, who looks when no chunk is
left to claim, knows whom to wait for. A chunk has the same bits whoever folds it, and goes into buffers that nobody reads: what
a dead helper left undone is folded again.

What it refuses to know: which pushes are folded and why (batch.pyx, scheduler.pyx), who is dead
(fastps/membership/membership.py), and arithmetic (fold.pyx).
"""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset

from fastps.kernels.shm.arena cimport Arena
from fastps.kernels.shm.arena_h cimport (
    FPS_MAX_CHUNKS,
    FPS_STATE_BUFFERS,
    fps_chunks_of,
    fps_folded_push,
    fps_member_generation,
    fps_member_pack,
    fps_member_state,
    fps_ticket_choose,
    fps_ticket_chunks,
    fps_ticket_left,
    fps_ticket_pack,
)
from fastps.kernels.update.fold cimport (
    FPS_MAX_PUSHES,
    FPS_RULE_USER,
    FPS_TILE,
    fps_fold,
    fps_hyper,
    fps_largest,
    fps_push,
)
from fastps.kernels.protocol.ring cimport fps_descriptor, fps_lane, fps_pause

cdef extern from "base/atomics.h" nogil:
    void FPS_ASSERT(bint condition)
    void fps_ticket_release(uint64_t *ticket, uint64_t value)
    uint64_t fps_ticket_acquire(const uint64_t *ticket)
    int fps_ticket_claim(uint64_t *ticket, uint64_t seen, uint64_t next)
    void fps_help_set(uint32_t *helping, uint32_t value)
    uint32_t fps_help_load(const uint32_t *helping)
    void fps_chunk_done(uint64_t *done, uint64_t bit)
    uint64_t fps_chunks_acquire(const uint64_t *done)
    void fps_chunks_clear(uint64_t *done)
    void fps_event_add(uint32_t *event)
    uint32_t fps_sleeping_load(const uint32_t *sleeping)
    void fps_event_wake(uint32_t *event)
    void fps_yield()
    void fps_plain_store()
    bint fps_mutant(int number)
    enum:
        FPS_MUTANT_DONE_FIRST
        FPS_MUTANT_STATE_IN_PLACE

cdef extern from "<sched.h>" nogil:
    int sched_getcpu()

cdef extern from *:
    """
    #ifndef FASTPS_HOOKS
    /* In floats that a fold reads and writes: at about 10 a nanosecond and core. */
    #define SHARED_LEAST (1LL << 12) /* a shorter fold is over before a helper has the ticket */
    #define SHARD_SHARED_LEAST (1LL << 17) /* the same of one of several shards, where workers fold beside each other anyway */
    #define CHUNK_LEAST (1LL << 16)
    #define ROUSED_LEAST (1LL << 21) /* a shorter one is over before a sleeper is awake */
    /* A longer one outlasts a core's time slice: lanes beyond the cores would take turns on it in the middle of chunks. */
    #define ONE_A_CORE_LEAST (1LL << 26)
    /* Looks at the helpers before the caller is told to look whether they live. */
    #define SPINS 4000
    #define YIELDS 1000
    #else /* a test's small fold is shared, too */
    #define SHARED_LEAST fps_hooks.shared_least
    #define SHARD_SHARED_LEAST fps_hooks.shared_least
    #define CHUNK_LEAST 64
    #define ROUSED_LEAST 64
    #define ONE_A_CORE_LEAST (2 * fps_hooks.shared_least)
    #define SPINS 2
    #define YIELDS 1
    #endif
    """
    const int64_t SHARED_LEAST
    const int64_t SHARD_SHARED_LEAST
    const int64_t CHUNK_LEAST
    const int64_t ROUSED_LEAST
    const int64_t ONE_A_CORE_LEAST
    const int SPINS
    const int YIELDS


cdef inline bint _is_exhausted(uint64_t ticket) noexcept nogil:
    """No chunk is left, or it is no ticket that a holder can have issued."""
    return fps_ticket_left(ticket) == 0 or fps_ticket_chunks(ticket) > FPS_MAX_CHUNKS


cdef class SharedFold:
    """The fold of shard `shard`, as lane `lane` orders it or helps with it. Only one thread may use it."""

    def __cinit__(self, Arena arena not None, uint32_t lane, uint32_t shard):
        self.arena = arena
        self.lane = lane
        self.share(0, b"")
        self.turn_to(shard)
        self.pushes = <fps_push *> calloc(FPS_MAX_PUSHES, sizeof(fps_push))
        if not self.pushes:
            raise MemoryError()

    def __dealloc__(self):
        free(self.pushes)

    cdef void share(self, uint32_t helpers, bytes cores):
        """Who helps, and where everyone begins: see Lane.share_folds."""
        self.helpers = helpers
        self.cores = cores
        self.n_cores, self.part_of_core = len(cores), cores

    cdef void turn_to(self, uint32_t shard) noexcept nogil:
        """Be the fold of another shard: for helpers, who go from one to the next."""
        self.shard = shard
        self.work = self.arena.work(shard)
        self.first, self.last = self.arena.first[shard], self.arena.last[shard]

    # -- the holder --------------------------------------------------------------------------------

    cdef void put(self, uint32_t index, uint32_t lane, const fps_descriptor *descriptor, double scale,
                  double rate_scale) noexcept nogil:
        """Write a push into the order, as its `index`th of at most FPS_MAX_PUSHES."""
        cdef fps_folded_push *push = &self.work.pushes[index]
        FPS_ASSERT(index < FPS_MAX_PUSHES)
        fps_plain_store()
        push.lane = lane
        push.slot = descriptor.slot
        push.step = descriptor.step
        push.samples = descriptor.samples
        push.scale = scale
        push.rate_scale = rate_scale

    cdef float largest(self, uint32_t index, int32_t *parameter) noexcept nogil:
        """The largest absolute value of the index-th push of an order that was read, and its parameter; infinite where a value
        is not finite. A pass over one gradient, for the rare fold that came out unsound.
        """
        parameter[0] = -1
        return fps_largest(&self.job, &self.pushes[index], self.first, self.last, parameter)

    cdef int run(self) noexcept nogil:
        """Fold what is ordered, with whoever helps."""
        cdef uint64_t ticket, own, chunk
        cdef int outcome
        if self.on_device:
            with gil:
                outcome = self._run_on_device()
            return outcome
        fps_plain_store()
        self.work.streaming = self.streaming and self.arena.header.rule != FPS_RULE_USER
        if not self._read():
            return FOLD_REFUSED
        self.chunks = self._cut()
        if self.chunks < 2:
            return self._fold_range(self.first, self.last)
        self.own = 0
        fps_chunks_clear(&self.work.done)
        FPS_ASSERT(_is_exhausted(fps_ticket_acquire(&self.work.ticket)))
        ticket = fps_ticket_pack(self.chunks, fps_chunks_of(self.chunks, 0, 1))
        fps_ticket_release(&self.work.ticket, ticket)
        self._rouse_helpers()
        own = self.own_part(self.chunks)
        while True:
            ticket = fps_ticket_acquire(&self.work.ticket)
            if _is_exhausted(ticket):
                return self.finish()
            chunk = fps_ticket_choose(ticket, own)
            if fps_ticket_claim(&self.work.ticket, ticket, ticket & ~((<uint64_t> 1) << chunk)):
                if self._fold(chunk) != 0:
                    self.close()
                    return self.finish()  # what is taken is still waited for, before anyone writes these buffers again
                self.own |= (<uint64_t> 1) << chunk

    cdef int _run_on_device(self) noexcept:
        """Hand the order to who folds on the device: it queues the fold, and whoever reads the result waits for it there."""
        cdef uint32_t index
        try:
            self.device(
                self.shard, self.work.mode, self.work.scale, self.work.rate_scale, self.work.weights_in,
                self.work.weights_out, self.work.state_in, self.work.state_out,
                [(self.work.pushes[index].lane, self.work.pushes[index].slot, self.work.pushes[index].scale,
                  self.work.pushes[index].rate_scale) for index in range(self.work.n_pushes)])
        except BaseException as error:
            self.failure = error
            return FOLD_REFUSED
        return FOLD_DONE

    cdef int finish(self) noexcept nogil:
        """Wait until nobody helps, for so long; then fold what is missing."""
        cdef uint64_t done, chunk
        cdef int look, outcome
        for look in range(SPINS + YIELDS):
            if not self.is_helped():
                break
            if look < SPINS:
                fps_pause()
            else:
                fps_yield()
        else:
            return FOLD_AWAITING
        done = self.own | fps_chunks_acquire(&self.work.done)
        for chunk in range(self.chunks):
            if not (done >> chunk) & 1:
                outcome = self._fold(chunk)
                if outcome != FOLD_DONE:
                    return outcome
        return FOLD_DONE

    cdef bint is_helped(self) noexcept nogil:
        """Whether a chunk may be in another lane's hands. Only once the ticket is exhausted a False lasts."""
        return self._helpers_now() > 0

    cdef uint32_t _helpers_now(self) noexcept nogil:
        """How many other lanes may have a chunk in hand."""
        cdef uint32_t index, count = 0
        for index in range(self.arena.header.n_lanes):
            count += index != self.lane and fps_member_state(fps_help_load(&self.arena.lane(index).helping)) == self.shard + 1
        return count

    cdef void close(self) noexcept nogil:
        """Let nobody claim another chunk."""
        cdef uint64_t ticket
        while True:
            ticket = fps_ticket_acquire(&self.work.ticket)
            if _is_exhausted(ticket) or fps_ticket_claim(
                    &self.work.ticket, ticket, fps_ticket_pack(fps_ticket_chunks(ticket), 0)):
                return

    cdef uint64_t _cut(self) noexcept nogil:
        """The number of chunks, and their size into the order; whole tiles, so that all but the last are of one size."""
        cdef int64_t floats = self.last - self.first
        cdef int64_t moved = floats * (self.job.n_pushes + 2 * (1 + self.job.state_planes))
        cdef int64_t chunks
        if self.helpers == 0 or moved < (SHARED_LEAST if self.arena.header.n_shards == 1 else SHARD_SHARED_LEAST):
            return 1
        chunks = min(max(moved // CHUNK_LEAST, <int64_t> 2), <int64_t> FPS_MAX_CHUNKS)
        fps_plain_store()
        self.chunk_floats = self.work.chunk_floats = (floats + chunks * FPS_TILE - 1) // (chunks * FPS_TILE) * FPS_TILE
        return (floats + self.chunk_floats - 1) // self.chunk_floats

    cdef void _rouse_helpers(self) noexcept nogil:
        """Wake as many sleepers as there are cores for them, if the fold is longer than a wake-up takes."""
        cdef uint32_t index, roused = 0
        cdef fps_lane *lane
        if (self.last - self.first) * self.job.n_pushes < ROUSED_LEAST:
            return
        for index in range(self.arena.header.n_lanes):
            lane = self.arena.lane(index)
            if roused < self.helpers and index != self.lane and fps_sleeping_load(&lane.sleeping):
                fps_event_add(&lane.event)
                fps_event_wake(&lane.event)
                roused += 1

    # -- the helper --------------------------------------------------------------------------------

    cdef bint help(self) noexcept nogil:
        """Fold chunks of the fold in the making, if there is one and any are left; False if there were none."""
        cdef fps_lane *mine = self.arena.lane(self.lane)
        cdef uint64_t ticket = fps_ticket_acquire(&self.work.ticket)
        cdef uint64_t chunk
        cdef bint is_read = False, helped = False
        if _is_exhausted(ticket) or self._has_enough():
            return False
        fps_help_set(&mine.helping, fps_member_pack(fps_member_generation(mine.state), self.shard + 1))
        while True:
            ticket = fps_ticket_acquire(&self.work.ticket)
            if _is_exhausted(ticket):
                break
            chunk = fps_ticket_choose(ticket, self.own_part(fps_ticket_chunks(ticket)))
            if not fps_ticket_claim(&self.work.ticket, ticket, ticket & ~((<uint64_t> 1) << chunk)):
                continue
            helped = True
            # From the first claim on the order stays as it is, for its holder waits for this lane. What is not marked as done
            # the holder folds itself: it answers for an order that makes no sense.
            is_read = is_read or self._read()
            if fps_mutant(FPS_MUTANT_DONE_FIRST):
                fps_chunk_done(&self.work.done, (<uint64_t> 1) << chunk)
            if is_read and self._fold(chunk) == 0:
                fps_chunk_done(&self.work.done, (<uint64_t> 1) << chunk)
                self.helped += 1
        fps_help_set(&mine.helping, 0)
        return helped

    cdef bint _has_enough(self) noexcept nogil:
        """Whether a fold that is long whoever pushes has a helper for every core beside the holder's."""
        cdef int64_t moved = (self.last - self.first) * (1 + 2 * (1 + <int64_t> self.arena.header.state_planes))
        return moved >= ONE_A_CORE_LEAST and self._helpers_now() >= self.helpers

    # -- both --------------------------------------------------------------------------------------

    cdef uint64_t own_part(self, uint64_t chunks) noexcept nogil:
        """With which of so many chunks this lane begins, claimed or not, one bit each: in each fold those of the same core."""
        cdef uint64_t part = self.lane
        cdef int core
        if self.n_cores > 0:
            core = sched_getcpu()
            part = <uint8_t> self.part_of_core[core] if 0 <= core < self.n_cores else 0
        return fps_chunks_of(chunks, part % (self.helpers + 1), self.helpers + 1)

    cdef int _fold(self, uint64_t chunk) noexcept nogil:
        cdef int64_t first
        # Whole tiles within the shard: streamed stores need their alignment.
        if not 0 < self.chunk_floats <= self.last - self.first + FPS_TILE or self.chunk_floats % FPS_TILE:
            return FOLD_REFUSED
        first = self.first + <int64_t> chunk * self.chunk_floats
        if not self.first <= first < self.last:
            return FOLD_REFUSED
        return self._fold_range(first, min(first + self.chunk_floats, self.last))

    cdef int _fold_range(self, int64_t first, int64_t last) noexcept nogil:
        self.unsound = 0
        if fps_fold(&self.job, first, last) != 0:
            return FOLD_REFUSED
        return FOLD_UNSOUND if self.unsound else FOLD_DONE

    cdef bint _read(self) noexcept nogil:
        """Make a job of the order; False if any number of it is out of range."""
        cdef fps_work *order = self.work
        cdef uint32_t index, n_pushes = order.n_pushes, state_in = order.state_in
        cdef uint32_t weights_in = order.weights_in, weights_out = order.weights_out, state_out = order.state_out
        cdef uint32_t lane, number
        cdef fps_folded_push *push
        cdef char *slot
        self.chunk_floats = order.chunk_floats
        if n_pushes > FPS_MAX_PUSHES or max(weights_in, weights_out) >= self.arena.header.n_buffers:
            return False
        if max(state_in, state_out) >= FPS_STATE_BUFFERS or state_in == state_out or weights_in == weights_out:
            return False
        for index in range(n_pushes):
            push = &order.pushes[index]
            lane, number = push.lane, push.slot
            if lane >= self.arena.header.n_lanes or number >= self.arena.header.n_slots:
                return False
            slot = self.arena.slot(lane, number)
            self.pushes[index].hypers = <fps_hyper *> slot
            self.pushes[index].presence = <uint64_t *> (slot + self.arena.header.slot_presence_offset)
            self.pushes[index].gradient = (slot + self.arena.header.slot_gradient_offset)
            self.pushes[index].scale = push.scale
            self.pushes[index].rate_scale = push.rate_scale
        memset(&self.job, 0, sizeof(self.job))
        self.job.rule = self.arena.header.rule
        self.job.mode = order.mode
        self.job.gradient_type = self.arena.header.gradient_type
        self.job.streaming = order.streaming
        self.job.user_rule = self.user_rule
        self.job.state_planes = self.arena.header.state_planes
        self.job.state_stride = self.arena.header.buffer_floats
        self.job.n_segments = self.arena.header.n_parameters
        self.job.segments = self.arena.segments
        self.job.n_pushes = n_pushes
        self.job.pushes = self.pushes
        self.job.scale = order.scale
        self.job.rate_scale = order.rate_scale
        self.job.ema_decay = self.arena.header.ema_decay
        self.job.ema_plane = self.job.state_planes - 1 if self.job.ema_decay > 0 else -1
        self.job.weights_in = self.arena.weights(weights_in)
        self.job.weights_out = self.arena.weights(weights_out)
        self.job.nonfinite = &self.unsound if self.arena.header.checks_finite else NULL
        self._read_state(self.arena.state(state_in), self.arena.state(
            state_in if fps_mutant(FPS_MUTANT_STATE_IN_PLACE) else state_out))
        return True

    cdef void _read_state(self, char *state_in, char *state_out) noexcept nogil:
        self.job.steps_in = <int64_t *> state_in
        self.job.steps_out = <int64_t *> state_out
        self.job.state_in = <float *> (state_in + self.arena.header.state_steps_bytes)
        self.job.state_out = <float *> (state_out + self.arena.header.state_steps_bytes)
