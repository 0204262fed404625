"""A lane's ring of descriptors: single producer, single consumer, fixed 64-byte descriptors, and no copy of the payload.

The producer posts a descriptor and continues. The gradient that it names stays in its slot until the consumer's head has passed
the descriptor. The two indices lie on cache lines of their own, and one side writes each. No
operation blocks.

`Ring` is the same ring on any memory, for tests and for `fastps bench lane`.
"""

cimport cython
from libc.string cimport memset

from fastps.kernels.base.atomics cimport fps_head_acquire, fps_head_raise, fps_pause, fps_tail_acquire
from fastps.kernels.shm.arena_h cimport fps_lane_shard

cdef extern from "base/rng.h" nogil:
    # A pseudo-random value of a position: a torn or repeated descriptor does not have the right one by chance.
    uint64_t fps_mix(uint64_t position)

cdef enum:
    LANE_BYTES = sizeof(fps_lane)
    DESCRIPTOR_BYTES = sizeof(fps_descriptor)
    LANE_SHARD_BYTES = sizeof(fps_lane_shard)
    # Of an exchange: nothing came for as many polls as were allowed, or not what was to come.
    _LATE = -1
    _WRONG = -2


@cython.final
cdef class Ring:
    """A ring of `size` descriptors in `memory`, a writable buffer that may be shared by two processes.

    >>> ring = Ring(bytearray(Ring.bytes_for(4)), 4)
    >>> ring.post(step=7, slot=1)
    True
    >>> ring.take()
    (7, 1)
    >>> ring.take() is None
    True
    """

    cdef fps_lane *lane
    cdef fps_lane_shard *lane_shard
    cdef uint32_t size
    cdef unsigned char[::1] memory

    def __cinit__(self, unsigned char[::1] memory not None, uint32_t size):
        if size < 1 or size & (size - 1):
            raise ValueError(f"expected the ring's size to be a power of two, found {size}")
        if memory.shape[0] < self.bytes_for(size):
            raise ValueError(f"expected at least {self.bytes_for(size)} bytes for a ring of {size}, found {memory.shape[0]}")
        self.memory = memory
        self.size = size
        self.lane = <fps_lane *> &memory[0]
        self.lane_shard = <fps_lane_shard *> (&memory[0] + LANE_BYTES + size * DESCRIPTOR_BYTES)

    @staticmethod
    def bytes_for(uint32_t size):
        """Bytes of memory that a ring of `size` descriptors needs."""
        return LANE_BYTES + size * DESCRIPTOR_BYTES + LANE_SHARD_BYTES

    def post(self, uint64_t step, uint32_t slot):
        """Post one descriptor; False when the ring is full."""
        cdef fps_descriptor descriptor
        memset(&descriptor, 0, sizeof(descriptor))
        descriptor.step = step
        descriptor.slot = slot
        return lane_post(self.lane, self.size, fps_head_acquire(&self.lane_shard.head), &descriptor) == 0

    def take(self):
        """The oldest descriptor as (step, slot), or None when the ring is empty."""
        cdef uint64_t head = self.lane_shard.head
        cdef fps_descriptor *descriptor
        if head == fps_tail_acquire(&self.lane.tail):
            return None
        descriptor = lane_descriptor(self.lane, self.size, head)
        taken = (descriptor.step, descriptor.slot)
        fps_head_raise(&self.lane_shard.head, head + 1)
        return taken

    def __len__(self):
        return fps_tail_acquire(&self.lane.tail) - fps_head_acquire(&self.lane_shard.head)

    def produce(self, uint64_t count, uint64_t seed, int64_t max_polls=2_000_000_000):
        """Post `count` descriptors whose contents follow from `seed` and their position; returns how often the ring was full.

        Raises TimeoutError after `max_polls` fruitless tries in a row.
        """
        cdef uint64_t i = 0, full = 0
        cdef int outcome = 0
        with nogil:
            for i in range(count):
                outcome = self._send(i, seed, max_polls)
                if outcome < 0:
                    break
                full += outcome
        if outcome < 0:
            raise TimeoutError(f"the ring stayed full at descriptor {i}")
        return full

    def consume(self, uint64_t count, uint64_t seed, int64_t max_polls=2_000_000_000):
        """Take `count` descriptors and compare each with what `produce` must have posted; returns how often it was empty.

        Raises AssertionError at the first that differs, TimeoutError after `max_polls` fruitless tries in a row.
        """
        cdef uint64_t i = 0, empty = 0
        cdef int outcome = 0
        with nogil:
            for i in range(count):
                outcome = self._receive(i, seed, max_polls)
                if outcome < 0:
                    break
                empty += outcome
        self._check(outcome, i, seed)
        return empty

    def echo(self, Ring back not None, bint first, uint64_t count, int64_t max_polls=2_000_000_000):
        """Exchange descriptors: the `first` process posts here and waits for the reply in `back`; the other replies.

        Each ring is the other's way back and counts its own tail, so calls may follow each other. Raises as `consume`.
        """
        cdef uint64_t i = 0, begin = self.lane.tail
        cdef int outcome = 0
        with nogil:
            for i in range(begin, begin + count):
                if first:
                    self._send(i, 0, max_polls)
                outcome = back._receive(i, 0, max_polls)
                if outcome < 0:
                    break
                if not first:
                    self._send(i, 0, max_polls)
        back._check(outcome, i, 0)

    cdef int _send(self, uint64_t step, uint64_t seed, int64_t max_polls) noexcept nogil:
        """Post a step's descriptor: 0, 1 if the ring was full at first, or _LATE after `max_polls` polls."""
        cdef fps_descriptor descriptor
        cdef int64_t polls = 0
        memset(&descriptor, 0, sizeof(descriptor))
        descriptor.step = step
        descriptor.read_version = fps_mix(seed + step)
        descriptor.slot = <uint32_t> descriptor.read_version
        while lane_post(self.lane, self.size, fps_head_acquire(&self.lane_shard.head), &descriptor) != 0:
            polls += 1
            if polls > max_polls:
                return _LATE
            fps_pause()
        return polls > 0

    cdef int _receive(self, uint64_t step, uint64_t seed, int64_t max_polls) noexcept nogil:
        """Take the next descriptor: 0, 1 if the ring was empty at first, _WRONG if it is not the step's, or _LATE."""
        cdef uint64_t head = self.lane_shard.head, drawn = fps_mix(seed + step)
        cdef fps_descriptor *descriptor
        cdef int64_t polls = 0
        while fps_tail_acquire(&self.lane.tail) == head:
            polls += 1
            if polls > max_polls:
                return _LATE
            fps_pause()
        descriptor = lane_descriptor(self.lane, self.size, head)
        if descriptor.step != step or descriptor.read_version != drawn or descriptor.slot != <uint32_t> drawn:
            return _WRONG
        fps_head_raise(&self.lane_shard.head, head + 1)
        return polls > 0

    cdef int _check(self, int outcome, uint64_t step, uint64_t seed) except -1:
        """Raise what is wrong, by the outcome of `_receive`."""
        if outcome == _WRONG:
            found = lane_descriptor(self.lane, self.size, self.lane_shard.head).step
            raise AssertionError(f"descriptor {step}: expected step {step}, found step {found} (seed {seed})")
        if outcome == _LATE:
            raise TimeoutError(f"the ring stayed empty at descriptor {step}")
        return 0
