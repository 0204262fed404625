"""A worker's own lane: its steps, one compiled call for each part of a step, and the tally of them that observers read.

Every step passes through here. Waits, recording, and pushes that another thread or a server delivers belong to the callers.
Times are arguments, and no function here waits.
"""

cimport cython
from libc.math cimport NAN
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset

from fastps.kernels.base.atomics cimport fps_counter_set
from fastps.kernels.shm.arena cimport Arena
from fastps.kernels.shm.arena_h cimport FPS_NULL, FPS_PUSH

FULL = PUSH_FULL    # the ring is full; nothing was done
EARLY = PUSH_EARLY  # the previous push still `awaits` its grant; nothing was done
EXPELLED = PUSH_EXPELLED  # this lane was expelled; nothing was done


@cython.final
cdef class WorkerLane(Lane):
    """Lane `index` of `arena`, whose caller pushes steps of its own.

    Attributes:
        steps: steps pushed so far, as the scheduler counts them; the owner sets the first value.
        earlier_steps: added to `steps` in the tally.
        posts: pushes and null pushes so far; some may still be on their way.
        slot: the slot of the next push, once `advance` or `choose_slot` has chosen it.
        awaits: whether a push was begun since the last completed `advance`.
        granted_ns: when the present step could begin, by its worker's clock.
        wait_ns, compute_ns: time waited, and between grants and pushes.
        push_ns: time from each push's begin to its `advance`: it posts, and folds what it finds.
        pushed_ns: when the push began whose time is not in push_ns yet; 0: there is none.
        samples, stale_blocks, loss: as the owner sets them.
    """

    def __cinit__(self, Arena arena not None, uint32_t index):
        self.free_at = <uint64_t *> calloc(arena.header.n_slots, sizeof(uint64_t))
        if self.free_at == NULL:
            raise MemoryError(f"no memory for the state of {arena.header.n_slots} slots")
        self.loss = NAN
        self._begin()

    def __dealloc__(self):
        free(self.free_at)

    cdef void _begin(self) noexcept nogil:
        """Begin with nothing pushed, behind what the lane's earlier owners posted."""
        memset(self.free_at, 0, self.arena.header.n_slots * sizeof(uint64_t))
        self.posts = self.words.tail
        self.slot = 0
        self.awaits = False

    @property
    def slot_free_at(self):
        """Descriptors that must be done with before the next push's slot may be written."""
        return self.free_at[self.slot]

    def push(self, int64_t now_ns, double scale, uint32_t samples, bint null):
        """Post the slot (or, with `null`, only that the step has no gradient) and try every shard's lock.

        Returns what `try_combine` does, FULL, EARLY or EXPELLED. Releases the GIL.
        """
        cdef int outcome
        with nogil:
            outcome = self._push(now_ns, scale, samples, null)
        return outcome

    cdef int _push(self, int64_t now_ns, double scale, uint32_t samples, bint null) noexcept nogil:
        cdef int kind = FPS_NULL if null else FPS_PUSH
        if self.awaits:
            return PUSH_EARLY
        if not null:
            self._set_versions(self.slot)
        if not self._post(kind, self.steps, self.slot, self._oldest(), now_ns, scale, self.loss, samples):
            return PUSH_EXPELLED if self._is_expelled() else PUSH_FULL
        self._count_push(now_ns, samples, null)
        return self._try_combine(now_ns)

    def begin_push(self, int64_t now_ns, uint32_t samples, bint null):
        """Do all of `push` but to post and to combine. Returns (step, slot, version read) for the caller's `post`."""
        begun = self.steps, self.slot, self._oldest()
        if not null:
            self._set_versions(self.slot)
        self._count_push(now_ns, samples, null)
        return begun

    cdef void _count_push(self, int64_t now_ns, uint32_t samples, bint null) noexcept nogil:
        self.compute_ns += now_ns - self.granted_ns
        self.pushed_ns = now_ns
        self.samples += samples
        self.steps += 1
        self.posts += 1
        self.awaits = self.has_pushed = True
        if not null:
            self.free_at[self.slot] = self.posts

    cpdef bint advance(self, int64_t now_ns, bint at_once) noexcept nogil:
        """Begin the next step if it may begin now: it is granted (or, `at_once`, needs no grant), and its slot is free."""
        self.granted_ns = now_ns
        if self.pushed_ns:
            self.push_ns += now_ns - self.pushed_ns
            self.pushed_ns = 0
        self._choose_slot()
        if not self._reached(0 if at_once else self.steps + 1, self.free_at[self.slot], self.n_shards):
            return False
        self.awaits = False
        self.publish()
        return True

    def choose_slot(self):
        """Choose the slot of the next push. Returns whether it is free, so that it may be written before `advance`."""
        self._choose_slot()
        return self.free_at[self.slot] <= self._done(self.index)

    cdef void _choose_slot(self) noexcept nogil:
        """Stay at the slot if it is free, which keeps one in the cache and in memory; else take the one that is free first."""
        cdef uint64_t done = self._done(self.index)
        cdef uint32_t other
        for other in range(self.arena.header.n_slots):
            if self.free_at[self.slot] <= done:
                return
            if self.free_at[other] < self.free_at[self.slot]:
                self.slot = other

    cpdef void advance_late(self, int64_t now_ns) noexcept nogil:
        """Begin the next step after a wait for it."""
        self._choose_slot()
        self.wait_ns += now_ns - self.granted_ns
        self.granted_ns = now_ns
        self.awaits = False
        self.publish()

    cpdef void publish(self) noexcept nogil:
        """Publish the tally to observers."""
        cdef int64_t loss_bits
        memcpy(&loss_bits, &self.loss, sizeof(loss_bits))
        fps_counter_set(&self.words.steps, self.earlier_steps + self.steps)
        fps_counter_set(&self.words.wait_ns, self.wait_ns)
        fps_counter_set(&self.words.compute_ns, self.compute_ns)
        fps_counter_set(&self.words.samples, self.samples)
        fps_counter_set(&self.words.loss_bits, loss_bits)
        fps_counter_set(&self.words.stale_blocks, self.stale_blocks)
        fps_counter_set(&self.words.push_ns, self.push_ns)
