"""One shard's fold, cut into chunks that waiting lanes may take: a worker that has to wait does the server's work.

The combiner writes the work item and issues a ticket; each claim takes one chunk of it. Every lane begins with its own part,
which its core may still have in its cache. A lane announces that it helps before its first claim, and withdraws that after its
last chunk. So the combiner, which looks once no chunk is left to claim, knows which lanes to wait for. A chunk has the same
bits whichever lane folds it, and goes into buffers that nobody reads. The combiner folds again what a dead helper left undone.
"""

from libc.math cimport INFINITY
from libc.stdint cimport uint8_t

from fastps.kernels.base.atomics cimport *
from fastps.kernels.base.failpoints cimport *
from fastps.kernels.shm.arena_h cimport *
from fastps.kernels.update.fold cimport FPS_RULE_SUMMING, FPS_TILE, fps_fold, fps_largest

cdef extern from "<sched.h>" nogil:
    int sched_getcpu()

cdef extern from *:
    """
    #ifndef FASTPS_HOOKS
    /* In floats that a fold reads and writes: at about 10 a nanosecond and core. */
    #define SHARED_LEAST (1LL << 12) /* a shorter fold is over before a helper has the ticket */
    #define SHARD_SHARED_LEAST (1LL << 17) /* the same of one of several shards, where workers fold beside each other anyway */
    #define CHUNK_LEAST (1LL << 16)
    #define WOKEN_LEAST (1LL << 21) /* a shorter one is over before a sleeper is awake */
    /* A longer one outlasts a core's time slice: lanes beyond the cores would be preempted in the middle of chunks. */
    #define ONE_A_CORE_LEAST (1LL << 26)
    /* Polls of the helpers before the caller is told to check whether they live. */
    #define SPINS 4000
    #define YIELDS 1000
    #else /* a test's small fold is shared, too */
    #define SHARED_LEAST fps_failpoints.shared_least
    #define SHARD_SHARED_LEAST fps_failpoints.shared_least
    #define CHUNK_LEAST 64
    #define WOKEN_LEAST 64
    #define ONE_A_CORE_LEAST (2 * fps_failpoints.shared_least)
    #define SPINS 2
    #define YIELDS 1
    #endif
    """
    const int64_t SHARED_LEAST, SHARD_SHARED_LEAST, CHUNK_LEAST, WOKEN_LEAST, ONE_A_CORE_LEAST
    const int SPINS, YIELDS


cdef inline bint _is_exhausted(uint64_t ticket) noexcept nogil:
    """Whether no chunk is left, or no combiner can have issued the ticket."""
    return fps_ticket_left(ticket) == 0 or fps_ticket_chunks(ticket) > FPS_MAX_CHUNKS


cdef void close_ticket(fps_work *work) noexcept nogil:
    """Take the remaining chunks off a ticket, so that no lane claims one."""
    cdef uint64_t ticket
    while True:
        ticket = fps_ticket_acquire(&work.ticket)
        if _is_exhausted(ticket) or fps_ticket_claim(&work.ticket, ticket, fps_ticket_pack(fps_ticket_chunks(ticket), 0)):
            return


cdef uint32_t count_helpers(Arena arena, uint32_t shard, uint64_t workspace, uint32_t mine) noexcept nogil:
    """How many lanes beside lane `mine` may have a chunk of the fold in a workspace."""
    cdef uint32_t index, count = 0
    for index in range(arena.header.n_lanes):
        count += index != mine and fps_member_state(fps_help_load(&arena.lane(index).helping)) == fps_help_of(shard, workspace)
    return count


cdef class SharedFold:
    """The fold of shard `shard`, as lane `lane` makes it or helps with it. Only one thread may use it."""

    def __cinit__(self, Arena arena not None, uint32_t lane, uint32_t shard):
        self.arena = arena
        self.lane = lane
        self.scratch = FoldScratch()
        self.item = WorkItem(arena)
        self.share(0, b"")
        self.switch_to(shard)

    cdef void share(self, uint32_t helpers, bytes cores):
        """Set how many sleepers are woken, and the part of each core."""
        self.helpers = helpers
        self.cores = cores
        self.n_cores, self.part_of_core = len(cores), cores

    cdef void switch_to(self, uint32_t shard) noexcept nogil:
        """Switch to another shard's fold: helpers go from one to the next."""
        self.shard = shard
        self.use(0)
        self.first, self.last = self.arena.first[shard], self.arena.last[shard]

    cdef void use(self, uint64_t workspace) noexcept nogil:
        """Use that workspace's work item."""
        self.workspace = workspace
        self.item.words = self.arena.work(self.shard, workspace)

    # -- the combiner --------------------------------------------------------------------------------

    cdef double largest(self, uint32_t index, int32_t *parameter) noexcept nogil:
        """The largest absolute value of the index-th push of the item that was read, and its parameter.

        Infinite where a value is not finite. This is a pass over one gradient, for the rare fold with non-finite results.
        """
        parameter[0] = -1
        if self.on_device:
            parameter[0] = self.nonfinite[index]
            return INFINITY if self.nonfinite[index] >= 0 else 0.0
        return fps_largest(&self.item.job, &self.item.pushes[index], self.first, self.last, parameter)

    cdef int run(self) noexcept nogil:
        """Fold the work item, together with the lanes that help."""
        cdef uint64_t ticket, own, chunk
        cdef int outcome
        if self.on_device:
            with gil:
                outcome = self._run_on_device()
            return outcome
        if not self.item.read():
            return FOLD_REFUSED
        self.chunks = self._cut()
        if self.chunks < 2:
            return self._fold_range(self.first, self.last)
        self.own = 0
        fps_chunks_set(&self.item.words.done, 0)
        FPS_ASSERT(_is_exhausted(fps_ticket_acquire(&self.item.words.ticket)))
        ticket = fps_ticket_pack(self.chunks, fps_chunks_of(self.chunks, 0, 1))
        fps_ticket_release(&self.item.words.ticket, ticket)
        self._wake_helpers()
        own = self.own_part(self.chunks)
        while True:
            ticket = fps_ticket_acquire(&self.item.words.ticket)
            if _is_exhausted(ticket):
                return self.finish()
            chunk = fps_ticket_choose(ticket, own)
            if fps_ticket_claim(&self.item.words.ticket, ticket, ticket & ~((<uint64_t> 1) << chunk)):
                if self._fold(chunk) != 0:
                    close_ticket(self.item.words)
                    return self.finish()  # waits for claimed chunks, before these buffers are written again
                self.own |= (<uint64_t> 1) << chunk

    cdef int _run_on_device(self) noexcept:
        """Queue the fold on the device. A reader of the result waits for it on the device.

        If the device tells non-finite pushes instead, nothing was queued.
        """
        cdef uint32_t index
        try:
            told = self.device(self.item.for_device(self.shard))
            if told is not None:
                for index in range(FPS_MAX_PUSHES):
                    self.nonfinite[index] = told[index] if index < <uint32_t> len(told) else -1
                return FOLD_NONFINITE
        except BaseException as error:
            self.failure = error
            return FOLD_REFUSED
        return FOLD_DONE

    cdef int finish(self) noexcept nogil:
        """Wait for the helpers, for a limited number of polls and a limited time; then fold what is missing."""
        cdef uint64_t done, chunk
        cdef int spins = SPINS, outcome
        cdef fps_yields yields = fps_yields(YIELDS, 0)
        while self.is_helped():
            if spins > 0:
                spins -= 1
                fps_pause()
            elif not fps_yield_again(&yields):
                return FOLD_AWAITING
        done = self.own | fps_chunks_acquire(&self.item.words.done)
        for chunk in range(self.chunks):
            if not (done >> chunk) & 1:
                outcome = self._fold(chunk)
                if outcome != FOLD_DONE:
                    return outcome
        return FOLD_DONE

    cdef bint is_helped(self) noexcept nogil:
        """Whether another lane may have a chunk. False is final only once the ticket is exhausted."""
        return count_helpers(self.arena, self.shard, self.workspace, self.lane) > 0

    cdef uint64_t _cut(self) noexcept nogil:
        """Write the size of a chunk, in whole tiles, and return the number of chunks. All but the last have that size.

        A rule that sums over whole parameters has one chunk: a chunk's border may be inside a parameter.
        """
        cdef int64_t floats = self.last - self.first, chunk_floats
        cdef int64_t moved = floats * (self.item.job.n_pushes + 2 * (1 + self.item.job.state_planes))
        cdef int64_t chunks
        if self.helpers == 0 or moved < (SHARED_LEAST if self.arena.header.n_shards == 1 else SHARD_SHARED_LEAST):
            return 1
        if self.arena.header.rule == FPS_RULE_SUMMING:
            return 1
        chunks = min(max(moved // CHUNK_LEAST, <int64_t> 2), <int64_t> FPS_MAX_CHUNKS)
        chunk_floats = (floats + chunks * FPS_TILE - 1) // (chunks * FPS_TILE) * FPS_TILE
        self.item.write_chunks(chunk_floats)
        return (floats + chunk_floats - 1) // chunk_floats

    cdef void _wake_helpers(self) noexcept nogil:
        """Wake as many sleepers as there are cores for them, if the fold is longer than a wake-up takes."""
        cdef uint32_t index, roused = 0
        cdef fps_lane *lane
        if (self.last - self.first) * self.item.job.n_pushes < WOKEN_LEAST:
            return
        for index in range(self.arena.header.n_lanes):
            lane = self.arena.lane(index)
            if roused < self.helpers and index != self.lane and fps_sleeping_load(&lane.sleeping):
                fps_event_add(&lane.event)
                fps_event_wake(&lane.event)
                roused += 1

    # -- the helper --------------------------------------------------------------------------------

    cdef bint help(self) noexcept nogil:
        """Fold chunks of the fold that is being made. Returns False if there were none to claim.

        It looks at the tickets of both workspaces: the commit word, which names the one in use, is written too often to poll.
        """
        cdef uint64_t workspace
        for workspace in range(FPS_WORKSPACES):
            self.use(workspace)
            if self._help_here():
                return True
        return False

    cdef bint _help_here(self) noexcept nogil:
        cdef fps_lane *mine = self.arena.lane(self.lane)
        cdef uint64_t ticket = fps_ticket_acquire(&self.item.words.ticket)
        cdef uint64_t chunk
        cdef bint is_read = False, helped = False
        if _is_exhausted(ticket) or self._has_enough():
            return False
        fps_help_set(&mine.helping, fps_member_pack(
            fps_member_generation(mine.state), fps_help_of(self.shard, self.workspace)))
        while True:
            ticket = fps_ticket_acquire(&self.item.words.ticket)
            if _is_exhausted(ticket):
                break
            chunk = fps_ticket_choose(ticket, self.own_part(fps_ticket_chunks(ticket)))
            if not fps_ticket_claim(&self.item.words.ticket, ticket, ticket & ~((<uint64_t> 1) << chunk)):
                continue
            helped = True
            # From the first claim on the item does not change, because its combiner waits for this lane. The combiner folds
            # every chunk that is not marked as done, so a damaged item is its to report.
            is_read = is_read or self.item.read()
            if fps_mutant(FPS_MUTANT_DONE_FIRST):
                fps_chunk_done(&self.item.words.done, (<uint64_t> 1) << chunk)
            if is_read and self._fold(chunk) == 0:
                fps_chunk_done(&self.item.words.done, (<uint64_t> 1) << chunk)
                self.helped += 1
        fps_help_set(&mine.helping, 0)
        return helped

    cdef bint _has_enough(self) noexcept nogil:
        """Whether every core beside the combiner's has a helper already, for a fold that is long even with one push."""
        cdef int64_t moved = (self.last - self.first) * (1 + 2 * (1 + <int64_t> self.arena.header.state_planes))
        return moved >= ONE_A_CORE_LEAST and (
            count_helpers(self.arena, self.shard, self.workspace, self.lane) >= self.helpers)

    # -- both --------------------------------------------------------------------------------------

    cdef uint64_t own_part(self, uint64_t chunks) noexcept nogil:
        """The chunks with which this lane begins, claimed or not, one bit each. In each fold a core begins with the same."""
        cdef uint64_t part = self.lane
        cdef int core
        if self.n_cores > 0:
            core = sched_getcpu()
            part = <uint8_t> self.part_of_core[core] if 0 <= core < self.n_cores else 0
        return fps_chunks_of(chunks, part % (self.helpers + 1), self.helpers + 1)

    cdef int _fold(self, uint64_t chunk) noexcept nogil:
        cdef int64_t first, chunk_floats = self.item.chunk_floats
        # Whole tiles within the shard: non-temporal stores need the alignment.
        if not 0 < chunk_floats <= self.last - self.first + FPS_TILE or chunk_floats % FPS_TILE:
            return FOLD_REFUSED
        first = self.first + <int64_t> chunk * chunk_floats
        if not self.first <= first < self.last:
            return FOLD_REFUSED
        return self._fold_range(first, min(first + chunk_floats, self.last))

    cdef int _fold_range(self, int64_t first, int64_t last) noexcept nogil:
        self.item.nonfinite = 0
        if fps_fold(&self.item.job, self.scratch.words, first, last) != 0:
            return FOLD_REFUSED
        return FOLD_NONFINITE if self.item.nonfinite else FOLD_DONE
