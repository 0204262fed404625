"""The exchange of blocks between the ranks of a process group, and element-wise reductions of several arrays.

`Exchange` is one rank's side of a group, over memory that all ranks map. One collective at a time goes through it, in the same
order on every rank. A caller starts it and calls `advance` until it is done; between two calls it looks for dead ranks and
deadlines.
"""

import os

from cpython.buffer cimport PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport int64_t, uint32_t, uint64_t, uintptr_t

from fastps.kernels.base.atomics cimport fps_block_load, fps_counter_get, fps_counter_set, fps_state_acquire
from fastps.kernels.update import fold

cdef extern from "collectives/exchange.h" nogil:
    """
    #define FPS_NAME(NAME, name, ...) #name,
    static const char *const fps_element_names[] = {FPS_ELEMENT_TYPES(FPS_NAME)};
    static const char *const fps_reduction_names[] = {FPS_REDUCTION_NAMES(FPS_NAME)};
    static const char *const fps_kind_names[] = {FPS_COLLECTIVE_KINDS(FPS_NAME)};
    #undef FPS_NAME
    """
    const char **fps_element_names
    const char **fps_reduction_names
    const char **fps_kind_names

    cpdef enum:
        MAX_RANKS "FPS_MAX_RANKS"
        LIVE "FPS_LIVE", FAILED "FPS_FAILED", LEFT "FPS_LEFT"
        DONE "FPS_DONE", WAITING "FPS_WAITING", DIFFERS "FPS_DIFFERS"

    enum:
        FPS_ELEMENTS, FPS_REDUCTIONS, FPS_KINDS, FPS_MAX_DEPTH, FPS_MESSAGE_BYTES, FPS_LINE
        FPS_BARRIER, FPS_ALL_REDUCE, FPS_ALL_REDUCE_SMALL, FPS_REDUCE, FPS_REDUCE_SCATTER
        FPS_GATHER, FPS_SCATTER, FPS_ALL_TO_ALL, FPS_BROADCAST

    ctypedef void (*fps_reduce_loop)(char *out, char *second, const char *const *parts, int count, int64_t elements) noexcept
    fps_reduce_loop fps_reduce_loop_of(int isa, int element, int reduction)
    int64_t fps_element_bytes(int element)

    ctypedef struct fps_collective_words:
        uint64_t what, bytes

    ctypedef struct fps_rank:
        uint64_t written
        uint32_t state, process_id
        int64_t streams
        fps_collective_words *words
        char *message

    ctypedef struct fps_exchange:
        fps_rank *ranks
        char *blocks
        int rank, size, depth, spins, yields, streams
        int64_t block_bytes
        uint64_t next

    ctypedef struct fps_collective:
        int kind, root
        int64_t bytes, piece, element_bytes
        fps_reduce_loop reduce
        fps_collective_words words
        uint64_t first, end, written, reduced, read
        const char **inputs
        char **outputs

    int64_t fps_exchange_bytes(int size, int depth, int64_t block_bytes)
    int fps_exchange_advance(const fps_exchange *x, fps_collective *c, uint64_t end, int64_t slice_ns, int *other)
    void fps_exchange_end(const fps_exchange *x, uint32_t state, const char *message)

cpdef enum:
    NO_REDUCTION = 255

cdef enum:
    SMALL_BYTES = 16384  # up to this many bytes over all ranks, every rank of an all-reduce reduces everything itself
    # Collectives are cut into at least so many blocks, so that their stages overlap, but not into shorter ones than this.
    PIECES = 4
    LEAST_PIECE = 16384
    STREAMED_BYTES = 1 << 18  # collectives of at least this size may write their blocks past the caches

_KIND_NAMES = {number: fps_kind_names[number].decode() for number in range(FPS_KINDS)}
_ELEMENT_NAMES = {number: fps_element_names[number].decode() for number in range(FPS_ELEMENTS)}
_REDUCTION_NAMES = {number: fps_reduction_names[number].decode() for number in range(FPS_REDUCTIONS)}
KINDS = {name: number for number, name in _KIND_NAMES.items()}  # of the two that a name may have, the later one
ELEMENTS = {name: number for number, name in _ELEMENT_NAMES.items()}
REDUCTIONS = {name: number for number, name in _REDUCTION_NAMES.items()}


def can_reduce(int element, int reduction):
    """Whether elements of this type have this reduction: integers have no average, floats no bits."""
    return fps_reduce_loop_of(fold.CHOSEN_ISA, element, reduction) != NULL


def memory_bytes(int size, int depth, int64_t block_bytes):
    """Bytes of memory that a group of `size` ranks shares, each with `depth` blocks."""
    return fps_exchange_bytes(size, depth, block_bytes)


def reduce_arrays(int element, int reduction, addresses, int64_t elements, uintptr_t out, uintptr_t second=0, isa=None):
    """Combine arrays, given by their addresses, in order, and write the result to `out` and, unless it is 0, to `second`.

    `isa` is the number of an instruction set, by default the one of the folds. Raises ValueError for a reduction that the type
    has not, or for no array or more than MAX_RANKS.
    """
    cdef const char *parts[MAX_RANKS]
    cdef int count = len(addresses), k
    cdef fps_reduce_loop loop = fps_reduce_loop_of(fold.CHOSEN_ISA if isa is None else isa, element, reduction)
    if loop == NULL or not 0 < count <= MAX_RANKS:
        raise ValueError(f"expected 1 to {MAX_RANKS} arrays of a type with this reduction, found {count}")
    for k in range(count):
        parts[k] = <const char *> <uintptr_t> addresses[k]
    with nogil:
        loop(<char *> out, <char *> second, parts, count, elements)


def described(uint64_t what, uint64_t bytes):
    """A collective in words, from the two words that ranks compare.

    >>> described(KINDS["all_reduce"] | ELEMENTS["float32"] << 8 | REDUCTIONS["sum"] << 16, 4000)
    'all_reduce (sum) of 1,000 float32'
    >>> described(KINDS["broadcast"] | ELEMENTS["int64"] << 8 | NO_REDUCTION << 16 | 2 << 24, 8)
    'broadcast from rank 2 of 1 int64'
    >>> described(KINDS["barrier"] | 255 << 8 | NO_REDUCTION << 16, 0)
    'barrier'
    """
    cdef int kind = what & 0xff, element = what >> 8 & 0xff, reduction = what >> 16 & 0xff, root = what >> 24 & 0xffff
    text = _KIND_NAMES.get(kind, f"unknown collective {kind}")
    if kind == FPS_BARRIER:
        return text
    if reduction in _REDUCTION_NAMES:
        text += f" ({_REDUCTION_NAMES[reduction]})"
    if kind in (FPS_BROADCAST, FPS_SCATTER):
        text += f" from rank {root}"
    if kind in (FPS_REDUCE, FPS_GATHER):
        text += f" to rank {root}"
    size = fps_element_bytes(element) or 1
    return f"{text} of {bytes // size:,} {_ELEMENT_NAMES.get(element, 'bytes')}"


cdef class Exchange:
    """One rank's side of a group. `memory` is a writable buffer of `memory_bytes` bytes of zeros, which all ranks map.

    All ranks pass the same `size`, `block_bytes` (a multiple of 64 times `size`) and `depth`. Before a rank sleeps, it looks
    `spins` times, and up to `yields` times, for at most 10 ms, after it has yielded its core. Raises ValueError.

    >>> import threading, numpy
    >>> memory = numpy.zeros(memory_bytes(2, 2, 4096), numpy.uint8)
    >>> arrays = [numpy.full(5, number, numpy.float32) for number in (1, 2)]
    >>> def member(rank):
    ...     mine = Exchange(memory, rank, 2, 4096, 2)
    ...     address = arrays[rank].ctypes.data
    ...     mine.start(KINDS["all_reduce"], ELEMENTS["float32"], REDUCTIONS["sum"], 0, 20, [address], [address])
    ...     while mine.advance(10_000_000) != DONE: pass
    >>> threads = [threading.Thread(target=member, args=(rank,)) for rank in range(2)]
    >>> for each in threads: each.start()
    >>> for each in threads: each.join()
    >>> arrays[0].tolist(), arrays[1].tolist()
    ([3.0, 3.0, 3.0, 3.0, 3.0], [3.0, 3.0, 3.0, 3.0, 3.0])
    """

    cdef fps_exchange exchange
    cdef fps_collective collective
    cdef Py_buffer buffer
    cdef bint is_mapped
    cdef int _other

    def __cinit__(self, memory, int rank, int size, int64_t block_bytes, int depth, int spins=0, int yields=0):
        if not 0 <= rank < size <= MAX_RANKS:
            raise ValueError(f"expected a rank below the size, and a size up to {MAX_RANKS}, found {rank} and {size}")
        if block_bytes < FPS_LINE * size or block_bytes % FPS_LINE or not 1 <= depth <= FPS_MAX_DEPTH:
            raise ValueError(f"expected blocks of at least {FPS_LINE} bytes a rank, found {block_bytes} and depth {depth}")
        PyObject_GetBuffer(memory, &self.buffer, PyBUF_WRITABLE)
        self.is_mapped = True
        if self.buffer.len < fps_exchange_bytes(size, depth, block_bytes) or <uintptr_t> self.buffer.buf % 8:
            raise ValueError(f"expected {fps_exchange_bytes(size, depth, block_bytes)} aligned bytes, found {self.buffer.len}")
        self.exchange.ranks = <fps_rank *> self.buffer.buf
        self.exchange.blocks = <char *> self.buffer.buf + size * sizeof(fps_rank)
        self.exchange.rank, self.exchange.size, self.exchange.depth = rank, size, depth
        self.exchange.block_bytes = block_bytes
        self.exchange.spins, self.exchange.yields = spins, yields
        self.exchange.ranks[rank].process_id = os.getpid()

    def __dealloc__(self):
        if self.is_mapped:
            PyBuffer_Release(&self.buffer)

    def start(self, int kind, int element, int reduction, int root, int64_t bytes, inputs, outputs):
        """Begin a collective. The caller keeps the memory of all addresses until `advance` has returned DONE.

        Args:
            kind, element, reduction, root: one of KINDS; one of ELEMENTS, or another number below 256 that all ranks agree on,
                for a kind that reduces nothing; one of REDUCTIONS, or NO_REDUCTION; a rank.
            bytes: of the tensor, for all_reduce, reduce and broadcast; otherwise of the part that one rank has for another.
            inputs: addresses of what this rank gives: one for each rank for reduce_scatter, all_to_all, and scatter at the
                root; otherwise one.
            outputs: addresses of what it gets: one for each rank for all_gather, all_to_all, and gather at the root; otherwise
                one.

        Raises ValueError.
        """
        cdef fps_collective *c = &self.collective
        cdef fps_exchange *x = &self.exchange
        cdef int64_t each = x.block_bytes, blocks
        cdef int j
        if c.read < c.end:
            raise ValueError("expected that the last collective is done, found it in progress")
        if kind == FPS_ALL_REDUCE and bytes * x.size <= SMALL_BYTES and bytes <= x.block_bytes:
            kind = FPS_ALL_REDUCE_SMALL
        if len(inputs) > x.size or len(outputs) > x.size or not 0 <= root < x.size or bytes < 0:
            raise ValueError(
                f"expected at most {x.size} tensors and a root among them, found {len(inputs)}, {len(outputs)} and {root}")
        c.reduce = fps_reduce_loop_of(fold.CHOSEN_ISA, element, reduction)
        c.element_bytes = fps_element_bytes(element)
        if reduction != NO_REDUCTION and (c.reduce == NULL or bytes % c.element_bytes):
            raise ValueError(
                f"expected a type with reduction {reduction}, and whole elements; found type {element} and {bytes} bytes")
        if kind in (FPS_ALL_REDUCE, FPS_REDUCE_SCATTER, FPS_SCATTER, FPS_ALL_TO_ALL):
            each = x.block_bytes // x.size
        blocks = bytes // (x.size if kind == FPS_ALL_REDUCE else 1) // PIECES
        c.piece = min(each, max(blocks, LEAST_PIECE)) // FPS_LINE * FPS_LINE
        each = c.piece * (x.size if kind == FPS_ALL_REDUCE else 1)
        blocks = max(1, (bytes + each - 1) // each)
        c.kind, c.root, c.bytes = kind, root, bytes
        x.streams = bytes >= STREAMED_BYTES and fps_counter_get(&x.ranks[0].streams)
        c.words.what = kind | element << 8 | reduction << 16 | <uint64_t> root << 24
        c.words.bytes = bytes
        c.first = c.written = c.reduced = c.read = x.next
        c.end = x.next = x.next + blocks
        for j in range(len(inputs)):
            c.inputs[j] = <const char *> <uintptr_t> inputs[j]
        for j in range(len(outputs)):
            c.outputs[j] = <char *> <uintptr_t> outputs[j]

    def set_streams(self, bint streams):
        """On rank 0: let later large collectives of all ranks write their blocks past the caches, or not."""
        fps_counter_set(&self.exchange.ranks[0].streams, streams)

    def advance(self, int64_t slice_ns, bint first=False):
        """Go on with the collective, or with its first block alone.

        Return DONE; WAITING after `slice_ns` without progress, or if a rank has failed; or DIFFERS if rank `other` is in
        another collective.
        """
        cdef int status
        cdef uint64_t end = self.collective.first + 1 if first else self.collective.end
        with nogil:
            status = fps_exchange_advance(&self.exchange, &self.collective, end, slice_ns, &self._other)
        return status

    @property
    def other(self):
        """The rank that `advance` last waited for, or that is in another collective."""
        return self._other

    def own_words(self):
        """What this rank's collective is: two numbers for `described`."""
        return self.collective.words.what, self.collective.words.bytes

    def words_of(self, int rank):
        """What the collective of another rank is that this one waits in: two numbers for `described`."""
        cdef fps_collective *c = &self.collective
        cdef uint64_t number = c.read if c.kind != FPS_ALL_REDUCE or c.reduced == c.written else c.reduced
        cdef fps_collective_words *words = &self.exchange.ranks[self._rank(rank)].words[number % <uint64_t> self.exchange.depth]
        return words.what, words.bytes

    def state_of(self, int rank):
        """A rank's state (LIVE, FAILED or LEFT), its process id and message, and whether it has begun this collective."""
        cdef fps_rank *other = &self.exchange.ranks[self._rank(rank)]
        cdef uint32_t state = fps_state_acquire(&other.state)
        text = other.message[:FPS_MESSAGE_BYTES - 1].split(b"\0", 1)[0] if state == FAILED else b""
        message = text.decode("utf-8", "replace")
        return state, other.process_id, message, fps_block_load(&other.written) > self.collective.first

    def fail(self, str message):
        """Tell the other ranks that this one can take part no more, and why. Only the first call of fail or leave counts."""
        fps_exchange_end(&self.exchange, FAILED, message.encode()[:FPS_MESSAGE_BYTES - 1])

    def leave(self):
        """Tell the other ranks that this one starts no collective any more."""
        fps_exchange_end(&self.exchange, LEFT, b"")

    cdef int _rank(self, int rank) except -1:
        if not 0 <= rank < self.exchange.size:
            raise ValueError(f"expected a rank below {self.exchange.size}, found {rank}")
        return rank
