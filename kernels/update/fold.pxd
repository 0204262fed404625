# The fold for compiled callers: the job's structures, and the functions that run it.

from libc.stdint cimport int32_t, int64_t, uint16_t, uint64_t

cdef extern from "update/fold.h" nogil:
    enum:
        FPS_RULE_SGD, FPS_RULE_ADAGRAD, FPS_RULE_SUMMING  # of the rules, those that compiled callers name
        FPS_FOLD_SUM, FPS_FOLD_EACH
        FPS_FLOAT32, FPS_FLOAT16, FPS_BFLOAT16, FPS_FLOAT64
        FPS_MAX_PUSHES, FPS_TILE

    ctypedef struct fps_hyper:
        double learning_rate, momentum, dampening, weight_decay, beta1, beta2, epsilon, learning_rate_decay
        uint64_t flags

    ctypedef struct fps_segment:
        int64_t offset, length
        int32_t group, parameter

    ctypedef struct fps_push:
        const void *gradient
        const fps_hyper *hypers
        const uint64_t *presence
        double scale, rate_scale

    ctypedef void (*fps_user_rule)(int64_t length, int64_t steps, double *hyper, const float *gradient,
                                   const float *weight_in, float *weight_out, const float *state_in, float *state_out,
                                   int64_t state_stride) noexcept nogil

    bint FPS_IS_USERS(int rule)

    ctypedef struct fps_fold_job:
        int32_t rule, mode, gradient_type, shown_type, streaming
        fps_user_rule user_rule
        int32_t state_planes, ema_plane, n_pushes
        double ema_decay, scale, rate_scale
        int64_t state_stride, n_segments
        const fps_segment *segments
        const fps_push *pushes
        const float *weights_in
        const float *state_in
        float *weights_out
        float *state_out
        uint16_t *halves_out
        const int64_t *steps_in
        int64_t *steps_out
        int32_t *nonfinite

    ctypedef struct fps_fold_scratch:
        pass


# What a fold writes and forgets, for one thread at a time.
cdef class FoldScratch:
    cdef fps_fold_scratch *words


cdef fps_hyper fps_hyper_of(hyper) except *
cdef int fps_fold(const fps_fold_job *job, fps_fold_scratch *scratch, int64_t first, int64_t last) noexcept nogil
cdef double fps_largest(
    const fps_fold_job *job, const fps_push *push, int64_t first, int64_t last, int32_t *parameter) noexcept nogil
