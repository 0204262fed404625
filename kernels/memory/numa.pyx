"""The kernel's memory policies for a part of a mapping: mbind(2), without a library."""

import errno
import os

from libc.errno cimport errno as last_error
from libc.stdint cimport int64_t

cdef extern from *:
    """
    #include <sys/syscall.h>
    #include <unistd.h>
    static long fps_mbind(void *address, unsigned long length, int mode, const unsigned long *nodes, unsigned flags) {
        return syscall(SYS_mbind, address, length, mode, nodes, nodes ? 8 * sizeof(*nodes) + 1 : 0, flags);
    }
    """
    long fps_mbind(void *address, unsigned long length, int mode, const unsigned long *nodes, unsigned flags) nogil

cdef enum:
    MPOL_INTERLEAVE = 3
    MPOL_LOCAL = 4
    MPOL_MF_MOVE = 2
    MOST_NODES = 64


def interleave(unsigned char[::1] memory not None, nodes):
    """Let the mapping's pages, as they are allocated from now on, alternate between `nodes` (numbers below 64).

    A memfd's policy holds for every process that maps it. Raises ValueError, or OSError where the kernel refuses.
    """
    cdef unsigned long mask = 0
    cdef int node
    for node in nodes:
        if not 0 <= node < MOST_NODES:
            raise ValueError(f"expected nodes of 0 to {MOST_NODES - 1}, found {node}")
        mask |= (<unsigned long> 1) << node
    if mask == 0:
        raise ValueError("expected at least one node, found none")
    _bind(&memory[0], memory.shape[0], MPOL_INTERLEAVE, &mask, 0)


def bring(unsigned char[::1] memory not None, int64_t offset, int64_t length):
    """Move the pages of [offset, offset + length) to the node of the core that this thread runs on.

    The range must begin at a page. Raises ValueError, or OSError where the kernel refuses.
    """
    if not 0 <= offset <= offset + length <= memory.shape[0]:
        raise ValueError(f"expected a range within {memory.shape[0]} bytes, found {length} from {offset}")
    if length:
        _bind(&memory[offset], length, MPOL_LOCAL, NULL, MPOL_MF_MOVE)


cdef int _bind(void *address, int64_t length, int mode, const unsigned long *nodes, unsigned flags) except -1:
    if fps_mbind(address, length, mode, nodes, flags) != 0:
        raise OSError(last_error, f"mbind: {os.strerror(last_error)} ({errno.errorcode.get(last_error, last_error)})")
    return 0
