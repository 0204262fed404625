"""What the processes of a simulated job do as readers: they come and go, read, sleep, and give back what others brought.

A process has the reader's place of its lane's number. The kernel frees a place's name when its process dies.
"""

from libc.string cimport memset

from fastps.kernels.base.atomics cimport fps_event_sleep, fps_readers_load
from fastps.kernels.base.failpoints cimport *
from fastps.kernels.chaos.machine cimport DEAD, RESTARTS, process_t
from fastps.kernels.combining.combiner cimport Combiner
from fastps.kernels.shm.arena_h cimport *

cdef enum:
    READER_SLICE_NS = 1_000_000  # of a worker that sleeps as a reader: the others may need its push


cdef class Places:
    """The names of the readers' places."""

    def __cinit__(self, Machine machine not None):
        self.machine = machine
        self.held = machine.n_places

    cdef bint is_taken(self, int64_t place) noexcept nogil:
        """Whether a process has the name of a place."""
        return self.attached[place] and self.machine.processes[place].state not in (DEAD, RESTARTS)

    cdef int64_t held_from(self) noexcept nogil:
        """The first place whose name a process has that gives buffers back."""
        cdef process_t *holder = &self.machine.processes[self.holder]
        if (self.held < self.machine.n_places and holder.state not in (DEAD, RESTARTS)
                and holder.generation == self.holder_generation):
            return self.held
        return self.machine.n_places


cdef class Reading:
    """The process of lane `lane` as a reader."""

    def __cinit__(self, Machine machine not None, Places places not None, Lane lane not None, int32_t index):
        self.machine, self.places, self.lane, self.index = machine, places, lane, index
        self.arena, self.checker = machine.arena, machine.checker
        self.pins = ReaderPins(machine.arena, index)

    cdef void attach(self) noexcept nogil:
        """Take this process's place, unless another has its name for a moment."""
        if self.index < self.places.held_from():
            self.places.attached[self.index] = True
            self.pins.begin()
            self._read()

    cdef void detach(self) noexcept nogil:
        """Read nothing any more, and give the place's name back."""
        self.pins.unpin()
        self.places.attached[self.index] = False

    cdef bint look(self) noexcept nogil:
        """Look, take newer weights, sleep for some, go or come again. Returns whether to give back what others brought."""
        if not self.places.attached[self.index]:
            self.attach()
            return False
        self._check()
        if self.machine.draw() % 3 == 0:
            self._read()
        if self.machine.draw() % 4 == 0:
            self._sleep()
        if self.machine.draw() % 8 == 0:
            self.detach()
        return self.machine.draw() % 4 == 0

    cdef void _read(self) noexcept nogil:
        """Pin the newest version of each shard."""
        cdef uint32_t shard
        for shard in range(self.pins.n_shards):
            self.buffers[shard] = fps_commit_buffer(self.pins._pull(shard))
        self._check()

    cdef void _sleep(self) noexcept nogil:
        """Sleep for one of the next versions, and check the wake: a flip that reached it has moved the event.

        Its combiner moves it under the shard lock, and where that one died, the lane that recovers the lock does.
        """
        cdef uint32_t event = 0
        cdef fps_readers *words = self.arena.readers_words()
        cdef uint64_t version = self.pins._newest() + 1 + self.machine.draw() % 3
        if self.pins._is_there(version, &event):
            return
        fps_event_sleep(&words.event, event, READER_SLICE_NS)
        if self.pins._newest() >= version and words.event == event and not self._is_any_locked():
            self.checker.fail(b"missed wake: reader %ld sleeps for version %ld, which is there", self.index, version, 0)

    cdef bint _is_any_locked(self) noexcept nogil:
        """Whether any lane holds a shard lock."""
        cdef uint32_t shard
        for shard in range(self.pins.n_shards):
            if fps_lock_owner(self.arena.shard_header(shard).lock):
                return True
        return False

    cdef void _check(self) noexcept nogil:
        """What is pinned stays as it was published."""
        cdef uint32_t shard, last = self.pins.n_shards - 1
        for shard in range(self.pins.n_shards):
            if not self.checker.is_content(shard, self.pins.versions[shard], self.buffers[shard]):
                self.checker.fail(b"torn read: reader %ld reads version %ld of shard %ld, and it has changed", self.index,
                                  self.pins.versions[shard], shard)
        if not self.checker.is_carried(self.pins.versions[last], self.buffers[last]):
            self.checker.fail(b"torn tensors: reader %ld reads what version %ld carries in buffer %ld", self.index,
                              self.pins.versions[last], self.buffers[last])

    cdef uint32_t hold(self, uint32_t generation) noexcept nogil:
        """Give back what readers brought that have gone, if all shard locks are free. Returns how many are held now.

        The caller releases them, which ends the hold of the places' names.
        """
        cdef uint64_t ready = fps_readers_load(&self.arena.readers_words().ready)
        cdef int64_t left = self.machine.n_places
        cdef uint32_t held = 0
        while left > 0 and not self.places.is_taken(left - 1):
            left -= 1
        if left >= <int64_t> ready or self.places.held_from() < self.machine.n_places:
            return 0
        self.places.holder, self.places.holder_generation, self.places.held = self.index, generation, left
        while held < self.pins.n_shards and (<Combiner> self.lane._combiners[held]).take(FPS_BY_HAND):
            held += 1
        if held == self.pins.n_shards:
            self._lower(left, ready)
        self.places.held = self.machine.n_places
        return held

    cdef void _lower(self, int64_t left, uint64_t ready) noexcept nogil:
        """Lower the number of readers that count, and overwrite the buffers behind, as the kernel frees their pages."""
        cdef int64_t kept = left
        cdef uint32_t shard
        for shard in range(0 if fps_mutant(FPS_MUTANT_GIVE_BACK_BLIND) else self.pins.n_shards):
            kept = max(kept, (<Combiner> self.lane._combiners[shard]).commit.last_used(<uint32_t> left)
                       + 1 - <int64_t> self.arena.header.n_buffers)
        if kept < <int64_t> ready:
            self.arena.lower_readers(<uint64_t> kept)
            FPS_FAILPOINT()
            memset(self.arena.weights(self.arena.header.n_buffers + kept), 0xee,
                   (ready - kept) * self.arena.header.weights_bytes)
