"""A mapping of shared memory that lives until its last user ends: NumPy views, and tensors that torch frees at any time.

`SharedMapping` exports the buffer protocol, so NumPy reads and writes it without a copy. `SharedMapping.tensor` gives a DLPack
capsule over a part of it, which torch takes without a copy; the capsule's deleter needs no GIL.
"""

import os

from cpython.buffer cimport PyBuffer_FillInfo
from cpython.exc cimport PyErr_SetFromErrno
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid, PyCapsule_New
from libc.stdint cimport int64_t, uint8_t
from posix.mman cimport MADV_DONTDUMP, MADV_DONTNEED, MADV_REMOVE, madvise

cdef extern from "memory/private_view.h" nogil:
    ctypedef struct fps_view:
        int is_open

    int fps_handle_faults()
    int fps_view_open(fps_view *view)
    void fps_view_renew(fps_view *view)
    int fps_view_noted(const int *is_open)

cdef extern from "memory/mapping.h" nogil:
    ctypedef struct fps_mapping:
        void *address
        size_t bytes
        fps_view *view

    ctypedef struct fps_dlpack:
        int64_t *shape
        int64_t *strides
        void (*deleter)(fps_dlpack *) noexcept

    fps_mapping *fps_mapping_open(int descriptor, size_t bytes, int writable, int is_private)
    void fps_mapping_close(fps_mapping *mapping)
    fps_dlpack *fps_dlpack_make(fps_mapping *mapping, void *data, int dimensions, uint8_t code, uint8_t bits)

# DLPack's code of each type, and the bits of an element.
DTYPES = {
    "float32": (2, 32), "float16": (2, 16), "bfloat16": (4, 16), "float64": (2, 64),
    "complex64": (5, 64), "complex128": (5, 128),
    "int8": (0, 8), "int16": (0, 16), "int32": (0, 32), "int64": (0, 64), "bool": (6, 8),
    "uint8": (1, 8), "uint16": (1, 16), "uint32": (1, 32), "uint64": (1, 64),
}


cdef void _forget(object capsule) noexcept:
    """Free what a capsule holds, unless it was taken: a consumer renames the capsule and frees it itself."""
    cdef fps_dlpack *managed
    if PyCapsule_IsValid(capsule, "dltensor"):
        managed = <fps_dlpack *> PyCapsule_GetPointer(capsule, "dltensor")
        managed.deleter(managed)


cdef class SharedMapping:
    """All of the shared memory behind a descriptor, which the caller keeps and may close.

    A `private` mapping shows what other processes write, and keeps what this one writes to itself: the pages that it has
    written are its own until `renew`. Arrays over it are read-only, tensors are not.

    Raises ValueError for an empty file, OSError where the kernel refuses.

    >>> descriptor = os.memfd_create("example")
    >>> os.truncate(descriptor, 4096)
    >>> mapping = SharedMapping(descriptor)
    >>> memoryview(mapping)[:3] = b"abc"
    >>> len(mapping), bytes(memoryview(mapping)[:3])
    (4096, b'abc')
    >>> own = SharedMapping(descriptor, private=True)
    >>> bytes(memoryview(own)[:3]), own.is_written()
    (b'abc', False)
    >>> os.close(descriptor)
    """

    cdef fps_mapping *mapping
    cdef bint writable

    def __cinit__(self, int descriptor, bint writable=True, bint private=False):
        cdef int64_t size = os.fstat(descriptor).st_size
        if size < 1:
            raise ValueError("expected memory to map, found an empty file")
        self.writable = writable and not private
        self.mapping = fps_mapping_open(descriptor, size, writable, private)
        if self.mapping == NULL:
            PyErr_SetFromErrno(OSError)

    def __dealloc__(self):
        if self.mapping != NULL:
            fps_mapping_close(self.mapping)

    def __len__(self):
        return self.mapping.bytes

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        PyBuffer_FillInfo(buffer, self, self.mapping.address, self.mapping.bytes, not self.writable, flags)

    def leave_out_of_dumps(self):
        """Keep the pages out of core dumps: a process that crashes is known to have ended only once its core is written."""
        madvise(self.mapping.address, self.mapping.bytes, MADV_DONTDUMP)

    def is_written(self):
        """Return whether this process may have written into a private mapping since it was made or renewed.

        A handler of SIGSEGV notes the first write. It is put in front of one that was set since the last call. Where there can
        be no handler, every answer is yes.
        """
        return self.mapping.view == NULL or not fps_handle_faults() or fps_view_noted(&self.mapping.view.is_open) != 0

    def renew(self):
        """Show the shared memory again in all of a private mapping, if this process may have written into it."""
        if self.mapping.view == NULL:
            madvise(self.mapping.address, self.mapping.bytes, MADV_DONTNEED)
        elif fps_view_noted(&self.mapping.view.is_open):
            fps_view_renew(self.mapping.view)

    def give_back(self, int64_t offset, int64_t length):
        """Free the pages of a range, whole pages, for all processes: they read as zeros, and are allocated by the next write.

        Raises ValueError for a range outside the mapping, OSError where the kernel refuses.
        """
        if not 0 <= offset <= offset + length <= <int64_t> self.mapping.bytes:
            raise ValueError(f"expected a range within {self.mapping.bytes} bytes, found {length} from byte {offset}")
        if length and madvise(<char *> self.mapping.address + offset, length, MADV_REMOVE) != 0:
            PyErr_SetFromErrno(OSError)

    def let_write(self):
        """Open a private mapping for writing: no handler is needed for what still holds its memory."""
        if self.mapping.view != NULL:
            fps_view_open(self.mapping.view)

    def tensor(self, int64_t offset, shape, strides, str dtype not None):
        """A DLPack capsule over the elements of `dtype`, one of DTYPES, from byte `offset` on.

        `shape` and `strides` are in elements. The memory stays mapped as long as the tensor that is made of it.
        Raises ValueError for elements that are not all within the mapping, KeyError for another dtype.
        """
        cdef uint8_t code, bits
        cdef int64_t last = 0, size, stride
        cdef int index, dimensions = len(shape)
        code, bits = DTYPES[dtype]
        if len(strides) != dimensions:
            raise ValueError(f"expected {dimensions} strides, found {len(strides)}")
        for size, stride in zip(shape, strides):
            if size < 0 or stride < 0:
                raise ValueError(f"expected sizes and strides of 0 or more, found {shape} and {strides}")
            last = -1 if size == 0 or last < 0 else last + (size - 1) * stride
        if not 0 <= offset <= offset + (last + 1) * (bits // 8) <= <int64_t> self.mapping.bytes or offset % (bits // 8):
            raise ValueError(f"expected elements within {self.mapping.bytes} bytes, found {last + 1} from byte {offset}")
        cdef fps_dlpack *managed = fps_dlpack_make(self.mapping, <char *> self.mapping.address + offset, dimensions, code, bits)
        if managed == NULL:
            raise MemoryError
        for index in range(dimensions):
            managed.shape[index] = shape[index]
            managed.strides[index] = strides[index]
        try:
            return PyCapsule_New(managed, "dltensor", _forget)
        except BaseException:
            managed.deleter(managed)
            raise
