"""The work item of a shard's workspace: the pushes, scales and buffers of the fold that is being made.

The combiner writes an item into the workspace before it publishes the ticket. The combiner and its helpers read the
item from there and make a job of it. Every number that is read is checked, because any process of the job may have written over
the area. This file has the only writer and the only reader.
"""

cimport cython
from libc.stdlib cimport calloc, free
from libc.string cimport memset

from fastps.kernels.base.atomics cimport FPS_ASSERT
from fastps.kernels.base.failpoints cimport *
from fastps.kernels.update.fold cimport FPS_IS_USERS, FPS_MAX_PUSHES, fps_hyper

from fastps.kernels.combining.fold_call import FoldCall, FoldedPush


@cython.final
cdef class WorkItem:
    """The work item that `words` are. Only the lane that holds its shard may write it."""

    def __cinit__(self, Arena arena not None):
        self.arena = arena
        self.pushes = <fps_push *> calloc(FPS_MAX_PUSHES, sizeof(fps_push))
        if not self.pushes:
            raise MemoryError()

    def __dealloc__(self):
        free(self.pushes)

    # -- writing -----------------------------------------------------------------------------------

    cdef void put(self, uint32_t index, uint32_t lane, const fps_descriptor *descriptor, double scale,
                  double rate_scale) noexcept nogil:
        """Write a push, as the `index`th of at most FPS_MAX_PUSHES."""
        cdef fps_folded_push *push = &self.words.pushes[index]
        FPS_ASSERT(index < FPS_MAX_PUSHES)
        FPS_FAILPOINT()
        push.lane = lane
        push.slot = descriptor.slot
        push.step = descriptor.step
        push.samples = descriptor.samples
        push.weight = max(descriptor.weight, <uint32_t> 1)
        push.scale = scale
        push.rate_scale = rate_scale

    cdef fps_folded_push push(self, uint32_t index) noexcept nogil:
        """A copy of a push, unchecked."""
        return self.words.pushes[index]

    cdef void move(self, uint32_t index, const fps_folded_push *push) noexcept nogil:
        """Write a push that was read back, as the `index`th."""
        self.words.pushes[index] = push[0]

    cdef void write(self, int32_t mode, uint32_t n_pushes, double scale, double rate_scale, uint32_t weights_in,
                    uint32_t weights_out, uint32_t state_in, uint32_t state_out) noexcept nogil:
        """Write everything but the pushes and the size of the chunks."""
        FPS_FAILPOINT()
        self.words.mode = mode
        self.words.n_pushes = n_pushes
        self.words.scale = scale
        self.words.rate_scale = rate_scale
        self.words.streaming = self.streaming and not FPS_IS_USERS(<int> self.arena.header.rule)
        FPS_FAILPOINT()
        self.words.weights_in = weights_in
        self.words.weights_out = weights_out
        self.words.state_in = state_in
        self.words.state_out = state_out

    cdef void write_chunks(self, int64_t chunk_floats) noexcept nogil:
        """Write how many floats a chunk has."""
        FPS_FAILPOINT()
        self.chunk_floats = self.words.chunk_floats = chunk_floats

    # -- reading -----------------------------------------------------------------------------------

    cdef bint read(self) noexcept nogil:
        """Make a job of the item. Returns False if any number of it is out of range."""
        cdef fps_work *words = self.words
        cdef uint32_t n_pushes = words.n_pushes, state_in = words.state_in, state_out = words.state_out
        cdef uint32_t weights_in = words.weights_in, weights_out = words.weights_out
        self.chunk_floats = words.chunk_floats
        if n_pushes > FPS_MAX_PUSHES or not self.arena.has_buffer(max(weights_in, weights_out)):
            return False
        if not self.arena.has_state(max(state_in, state_out)) or state_in == state_out or weights_in == weights_out:
            return False
        if not self._read_pushes(n_pushes):
            return False
        memset(&self.job, 0, sizeof(self.job))
        self.job.rule = self.arena.header.rule
        self.job.mode = words.mode
        self.job.gradient_type = self.arena.header.gradient_type
        self.job.streaming = words.streaming
        self.job.user_rule = self.user_rule
        self.job.state_planes = self.arena.header.state_planes
        self.job.state_stride = self.arena.header.buffer_floats
        self.arena.find_thawed()
        self.job.n_segments = self.arena.header.n_parameters
        self.job.segments = self.arena.segments
        self.job.n_pushes = n_pushes
        self.job.pushes = self.pushes
        self.job.scale = words.scale
        self.job.rate_scale = words.rate_scale
        self.job.ema_decay = self.arena.header.ema_decay
        self.job.ema_plane = self.job.state_planes - 1 if self.job.ema_decay > 0 else -1
        self.job.weights_in = self.arena.weights(weights_in)
        self.job.weights_out = self.arena.weights(weights_out)
        self.job.shown_type = self.arena.header.shown_type
        self.job.halves_out = self.arena.halves(weights_out)
        self.job.nonfinite = &self.nonfinite if self.arena.header.checks_finite else NULL
        self.job.steps_in = <int64_t *> self.arena.state(state_in)
        self.job.steps_out = <int64_t *> self.arena.state(state_in if fps_mutant(FPS_MUTANT_STATE_IN_PLACE) else state_out)
        self.job.state_in = <float *> (<char *> self.job.steps_in + self.arena.header.state_steps_bytes)
        self.job.state_out = <float *> (<char *> self.job.steps_out + self.arena.header.state_steps_bytes)
        return True

    cdef bint _read_pushes(self, uint32_t n_pushes) noexcept nogil:
        cdef const fps_folded_push *push
        cdef uint32_t index, lane, number
        cdef char *slot
        for index in range(n_pushes):
            push = &self.words.pushes[index]
            lane, number = push.lane, push.slot
            if lane >= self.arena.header.n_lanes or number >= self.arena.header.n_slots:
                return False
            slot = self.arena.slot(lane, number)
            self.pushes[index].hypers = <fps_hyper *> slot
            self.pushes[index].presence = <uint64_t *> (slot + self.arena.header.slot_presence_offset)
            self.pushes[index].gradient = (slot + self.arena.header.slot_gradient_offset)
            self.pushes[index].scale = push.scale
            self.pushes[index].rate_scale = push.rate_scale
        return True

    cdef object for_device(self, uint32_t shard):
        """The item as a FoldCall."""
        cdef uint32_t index
        cdef fps_folded_push push
        cdef fps_work *words = self.words
        pushes = []
        for index in range(min(words.n_pushes, <uint32_t> FPS_MAX_PUSHES)):
            push = self.push(index)
            pushes.append(FoldedPush(push.lane, push.slot, push.scale, push.rate_scale, push.samples))
        return FoldCall(shard, words.mode, words.scale, words.rate_scale, words.weights_in, words.weights_out, words.state_in,
                        words.state_out, pushes)
