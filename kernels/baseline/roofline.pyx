"""The roofline of this machine: the plain loops and the plain shared word that `fastps bench` compares fastps with.

The store does not use them, and their results are not right to the bit.
"""

from libc.math cimport sqrt
from libc.stdint cimport int64_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free

from fastps.kernels.base.atomics cimport fps_pause, fps_tail_acquire, fps_tail_release

cdef extern from "baseline/roofline.h" nogil:
    ctypedef struct fps_roofline_job:
        const float *const *gradients
        const float *weights_in
        const float *mean_in
        const float *square_in
        float *weights_out
        float *mean_out
        float *square_out
        float minus_rate, momentum, beta2, root_correction2, epsilon

    void fps_roofline_run(const fps_roofline_job *job, int is_adam, int count, int64_t first, int64_t last, int streaming)

cpdef enum:
    LINE = 64  # bytes


cdef class Loop:
    """One pass over memory: the sum of the gradients, then SGD with momentum, or Adam's first step on one gradient.

    Reads weights (float32[n]) and state (float32[1 or 2, n]), writes weights_out and state_out; all begin on cache lines.
    """

    cdef fps_roofline_job job
    cdef const float **gradients
    cdef bint is_adam
    cdef int count
    cdef int64_t length
    cdef list keep

    def __cinit__(self, list gradients not None, const float[::1] weights not None, const float[:, ::1] state not None,
                  float[::1] weights_out not None, float[:, ::1] state_out not None, *, double learning_rate, double momentum,
                  double beta2=0.0, double epsilon=0.0):
        cdef const float[::1] gradient
        cdef int index
        self.is_adam = state.shape[0] == 2
        if not gradients or (self.is_adam and len(gradients) > 1):
            raise ValueError(f"expected {'one gradient' if self.is_adam else 'at least one gradient'}, found {len(gradients)}")
        self.count = len(gradients)
        self.length = weights.shape[0]
        self.keep = [gradients, weights, state, weights_out, state_out]
        self.gradients = <const float **> calloc(len(gradients), sizeof(self.gradients[0]))
        if self.gradients == NULL:
            raise MemoryError("expected memory for the gradients' addresses, found none")
        self.job.gradients = self.gradients
        for index, values in enumerate(gradients):
            gradient = values
            self.gradients[index] = &gradient[0]
            _check(gradient.shape[0], self.length, <uintptr_t> &gradient[0])
        _check(state.shape[1], self.length, <uintptr_t> &state[0, 0])
        _check(weights_out.shape[0], self.length, <uintptr_t> &weights_out[0])
        _check(state_out.shape[1], self.length, <uintptr_t> &state_out[0, 0])
        self.job.weights_in = &weights[0]
        self.job.weights_out = &weights_out[0]
        self.job.mean_in = &state[0, 0]
        self.job.mean_out = &state_out[0, 0]
        if self.is_adam:
            _check(state_out.shape[0], 2, <uintptr_t> &state_out[1, 0] | <uintptr_t> &state[1, 0])
            self.job.square_in = &state[1, 0]
            self.job.square_out = &state_out[1, 0]
        self.job.minus_rate = -learning_rate / (1 - momentum) if self.is_adam else -learning_rate
        self.job.momentum, self.job.beta2, self.job.epsilon = momentum, beta2, epsilon
        self.job.root_correction2 = sqrt(1 - beta2)

    def __dealloc__(self):
        free(self.gradients)

    def run(self, int64_t first, int64_t last, bint streaming, int64_t times=1, Loop back=None):
        """Run the floats [first, last) `times` times, with non-temporal (`streaming`) or normal stores. Releases the GIL.

        Every second pass is the loop `back`, which may read what this one writes and write what it reads.
        """
        cdef const fps_roofline_job *other = &(self if back is None else back).job
        cdef int64_t time
        if back is not None and (back.is_adam, back.count, back.length) != (self.is_adam, self.count, self.length):
            raise ValueError("expected a loop back with the same rule, number of gradients and length, found another")
        if not 0 <= first <= last <= self.length or first % 16:
            raise ValueError(f"expected a range within {self.length} floats from a multiple of 16, found {first} to {last}")
        with nogil:
            for time in range(times):
                fps_roofline_run(other if time % 2 else &self.job, self.is_adam, self.count, first, last, streaming)


cdef int _check(int64_t length, int64_t expected, uintptr_t address) except -1:
    if length != expected or address % LINE:
        raise ValueError(f"expected {expected} values that begin on a cache line, found {length} at {address:#x}")
    return 0


def spin(unsigned char[::1] memory not None, bint first, uint64_t count, int64_t polls=2_000_000_000):
    """Pass a number back and forth between two processes through two cache lines, `count` times: no lane can be faster.

    `memory` is 128 shared bytes, zero at the start; one process is `first`. Raises TimeoutError after `polls` polls.
    """
    cdef uint64_t *mine
    cdef uint64_t *theirs
    cdef uint64_t begin, i
    cdef int64_t tries = 0
    if memory.shape[0] < 2 * LINE:
        raise ValueError(f"expected {2 * LINE} bytes, found {memory.shape[0]}")
    mine = <uint64_t *> (&memory[0] + (0 if first else LINE))
    theirs = <uint64_t *> (&memory[0] + (LINE if first else 0))
    with nogil:
        begin = mine[0]
        for i in range(begin + 1, begin + count + 1):
            if first:
                fps_tail_release(mine, i)
            tries = 0
            while fps_tail_acquire(theirs) != i and tries <= polls:
                tries += 1
                fps_pause()
            if tries > polls:
                break
            if not first:
                fps_tail_release(mine, i)
    if tries > polls:
        raise TimeoutError(f"expected an answer within {polls} polls, found none")


def update_rows(float[:, ::1] table not None, const int64_t[::1] numbers not None, const float[:, ::1] values not None,
                double learning_rate):
    """Subtract the learning rate times each row of values from the numbered row of the table: no slot, no log, no lock.

    Releases the GIL. Raises ValueError for other shapes, IndexError for a number that is no row.
    """
    cdef int64_t i, j, row, width = table.shape[1]
    cdef float rate = <float> learning_rate
    cdef bint outside = False
    if values.shape[0] != numbers.shape[0] or values.shape[1] != width:
        raise ValueError(f"expected {numbers.shape[0]} rows of {width} values, found {values.shape[0]} of {values.shape[1]}")
    with nogil:
        for i in range(numbers.shape[0]):
            row = numbers[i]
            if not 0 <= row < table.shape[0]:
                outside = True
                break
            for j in range(width):
                table[row, j] -= rate * values[i, j]
    if outside:
        raise IndexError(f"expected rows 0 to {table.shape[0] - 1}, found {row}")
