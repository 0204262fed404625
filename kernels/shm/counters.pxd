# What an arena counts.

from fastps.kernels.shm.view cimport ArenaView


cdef class ArenaCounters(ArenaView):
    pass
