"""A lane's ring of descriptors: single producer, single consumer, fixed 64-byte descriptors, and no copy of the payload.

The producer posts a descriptor and continues. The gradient that it names stays in its slot until the consumer's head has passed
the descriptor. The two indices lie on cache lines of their own, and one side writes each. No
operation blocks.

`Ring` is the same ring on any memory, for tests and for `fastps bench lane`.
"""

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
        cdef fps_descriptor descriptor
        cdef uint64_t i, full = 0
        cdef int64_t tries
        memset(&descriptor, 0, sizeof(descriptor))
        for i in range(count):
            descriptor.step = i
            descriptor.read_version = fps_mix(seed + i)
            descriptor.slot = <uint32_t> fps_mix(seed ^ i)
            tries = 0
            with nogil:
                while lane_post(self.lane, self.size, fps_head_acquire(&self.lane_shard.head), &descriptor) != 0:
                    full += tries == 0
                    tries += 1
                    if tries > max_polls:
                        break
                    fps_pause()
            if tries > max_polls:
                raise TimeoutError(f"the ring stayed full at descriptor {i}")
        return full

    def consume(self, uint64_t count, uint64_t seed, int64_t max_polls=2_000_000_000):
        """Take `count` descriptors and compare each with what `produce` must have posted; returns how often it was empty.

        Raises AssertionError at the first that differs, TimeoutError after `max_polls` fruitless tries in a row.
        """
        cdef fps_descriptor *descriptor
        cdef uint64_t i = 0, head, tail, empty = 0, wrong = 0
        cdef int64_t tries = 0
        with nogil:
            head = self.lane_shard.head
            while i < count and tries <= max_polls:
                tail = fps_tail_acquire(&self.lane.tail)
                if head == tail:
                    empty += tries == 0
                    tries += 1
                    fps_pause()
                    continue
                tries = 0
                descriptor = lane_descriptor(self.lane, self.size, head)
                wrong = (descriptor.step != i or descriptor.read_version != fps_mix(seed + i)
                         or descriptor.slot != <uint32_t> fps_mix(seed ^ i))
                if wrong:
                    break
                head += 1
                i += 1
                fps_head_raise(&self.lane_shard.head, head)
        if wrong:
            raise AssertionError(f"descriptor {i}: expected step {i}, found step {descriptor.step} (seed {seed})")
        if tries > max_polls:
            raise TimeoutError(f"the ring stayed empty at descriptor {i}")
        return empty

    def echo(self, Ring back not None, bint first, uint64_t count, int64_t max_polls=2_000_000_000):
        """Exchange descriptors: the `first` process posts here and waits for the reply in `back`; the other replies.

        Each ring is the other's way back and counts its own tail, so calls may follow each other. Raises AssertionError for a
        wrong descriptor, TimeoutError after `max_polls` fruitless polls in a row.
        """
        cdef uint64_t i, begin = self.lane.tail
        cdef int outcome = 0
        with nogil:
            for i in range(begin, begin + count):
                if first:
                    self._send(i)
                outcome = back._receive(i, max_polls)
                if outcome != 0:
                    break
                if not first:
                    self._send(i)
        if outcome > 0:
            raise AssertionError(f"descriptor {i}: found another step")
        if outcome < 0:
            raise TimeoutError(f"the ring stayed empty at descriptor {i}")

    cdef void _send(self, uint64_t step) noexcept nogil:
        """Post one descriptor into a ring that has room."""
        cdef fps_descriptor descriptor
        memset(&descriptor, 0, sizeof(descriptor))
        descriptor.step = step
        descriptor.read_version = fps_mix(step)
        lane_post(self.lane, self.size, fps_head_acquire(&self.lane_shard.head), &descriptor)

    cdef int _receive(self, uint64_t step, int64_t max_polls) noexcept nogil:
        """Wait for the next descriptor: 0 if it is this step's, 1 if it is not, -1 after `max_polls` polls."""
        cdef uint64_t head = self.lane_shard.head
        cdef fps_descriptor *descriptor
        cdef int64_t tries = 0
        while fps_tail_acquire(&self.lane.tail) == head:
            tries += 1
            if tries > max_polls:
                return -1
            fps_pause()
        descriptor = lane_descriptor(self.lane, self.size, head)
        if descriptor.step != step or descriptor.read_version != fps_mix(step):
            return 1
        fps_head_raise(&self.lane_shard.head, head + 1)
        return 0
