"""The fold: aggregate pending gradients and apply the update rule, in one pass, into fresh buffers.

The arithmetic is that of torch.optim's single-tensor optimizers, operation by operation, with fused multiply-adds where ATen
has them. The bits are the same on every instruction set, and a NumPy reference is the oracle.

The instruction set is chosen once, at import: the widest of this machine, or the one that FASTPS_ISA names.
"""

import os

import numpy as np

from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memset

cdef extern from "update/fold_double.h" nogil:
    int fps_fold_doubles(int isa, const void *job, void *scratch, int64_t first, int64_t last)
    double fps_largest_of_doubles(int isa, const void *job, const void *push, int64_t first, int64_t last, int32_t *parameter)

cdef extern from "update/fold_run.h" nogil:
    enum:
        FPS_ISA_BASELINE, FPS_ISA_AVX2, FPS_ISA_AVX512, FPS_RULE_NAMES

    cpdef enum:
        HYPER_NESTEROV "FPS_HYPER_NESTEROV", HYPER_MAXIMIZE "FPS_HYPER_MAXIMIZE", HYPER_DECOUPLED "FPS_HYPER_DECOUPLED"
        HYPER_CENTERED "FPS_HYPER_CENTERED", HYPER_AMSGRAD "FPS_HYPER_AMSGRAD"
        HYPER_DOUBLE_PRODUCT "FPS_HYPER_DOUBLE_PRODUCT"
        MAX_USER_PLANES "FPS_MAX_USER_PLANES", MAX_SUMS "FPS_MAX_SUMS", MAX_PUSHES "FPS_MAX_PUSHES", TILE "FPS_TILE"
        RULE_USER "FPS_RULE_USER", RULE_SUMMING "FPS_RULE_SUMMING", FOLD_SUM "FPS_FOLD_SUM", FOLD_EACH "FPS_FOLD_EACH"
        FLOAT32 "FPS_FLOAT32", FLOAT16 "FPS_FLOAT16", BFLOAT16 "FPS_BFLOAT16", FLOAT64 "FPS_FLOAT64"

    ctypedef struct fps_rule_name:
        int number, planes
        const char *name

    const fps_rule_name fps_rule_names[]
    int fps_planes_needed(int rule, const fps_hyper *hyper)
    double fps_mu_product(double beta1, double decay, double steps, int is_double)

    ctypedef struct fps_tile_functions:
        pass

    int fps_isa_available(int isa)
    const fps_tile_functions *fps_isa_functions(int isa)
    int fps_fold_range(const fps_tile_functions *tile, const fps_fold_job *job, fps_fold_scratch *scratch, int64_t first,
                       int64_t last)
    void fps_narrow(const fps_tile_functions *tile, int type, uint16_t *halves, const float *weights, int64_t length)
    float fps_largest_in(const fps_tile_functions *tile, const fps_fold_job *job, const fps_push *push, int64_t first,
                         int64_t last, int32_t *parameter)

RULES = {fps_rule_names[index].name.decode(): fps_rule_names[index].number for index in range(FPS_RULE_NAMES)}
MOST_PLANES = {fps_rule_names[index].number: fps_rule_names[index].planes for index in range(FPS_RULE_NAMES)}
globals().update({f"RULE_{name.upper()}": number for name, number in RULES.items()})

_ISAS = {"baseline": FPS_ISA_BASELINE, "avx2": FPS_ISA_AVX2, "avx512": FPS_ISA_AVX512}


def instruction_sets():
    """Return the names of this machine's instruction sets, the widest last."""
    return [name for name, number in _ISAS.items() if fps_isa_available(number)]


def _isa_of(str name):
    available = instruction_sets()
    if name == "auto":
        return max(_ISAS[each] for each in available)
    if name not in available:
        raise ValueError(f"expected an instruction set of this machine ({', '.join(available)}), found {name!r}")
    return _ISAS[name]


# The number of the chosen instruction set, for the loops over rows of tables.
CHOSEN_ISA = _isa_of(os.environ.get("FASTPS_ISA", "auto"))

cdef int _isa = CHOSEN_ISA


cdef class FoldScratch:
    """Memory that a fold writes and forgets. Only one thread at a time may fold with it."""

    def __cinit__(self):
        # What is never written takes no memory. A fold of doubles takes at most twice what one of floats does.
        self.words = <fps_fold_scratch *> malloc(2 * sizeof(fps_fold_scratch))
        if not self.words:
            raise MemoryError()

    def __dealloc__(self):
        free(self.words)


cdef int fps_fold(const fps_fold_job *job, fps_fold_scratch *scratch, int64_t first, int64_t last) noexcept nogil:
    return _fold_by(_isa, job, scratch, first, last)


cdef int _fold_by(int isa, const fps_fold_job *job, fps_fold_scratch *scratch, int64_t first, int64_t last) noexcept nogil:
    if job.gradient_type == FPS_FLOAT64:
        return fps_fold_doubles(isa, job, scratch, first, last)
    return fps_fold_range(fps_isa_functions(isa), job, scratch, first, last)


cdef double fps_largest(
        const fps_fold_job *job, const fps_push *push, int64_t first, int64_t last, int32_t *parameter) noexcept nogil:
    if job.gradient_type == FPS_FLOAT64:
        return fps_largest_of_doubles(_isa, job, push, first, last, parameter)
    return fps_largest_in(fps_isa_functions(_isa), job, push, first, last, parameter)


cdef class Folding:
    """A repeatable fold of given pushes from given buffers into given buffers; running it allocates nothing.

    Arguments are those of `fold`; results go into `weights_out`, `state_out` and `steps_out`, which must not be the inputs.
    `halves_out` (uint16[n]), if given, gets the weights in the half precision `shown_type`, FLOAT16 or BFLOAT16.

    >>> import numpy as np
    >>> gradient, weights, out = np.ones(2, np.float32), np.ones(2, np.float32), np.zeros(2, np.float32)
    >>> none, steps = np.zeros((0, 2), np.float32), np.zeros(1, np.int64)
    >>> pushes = [(gradient, [(0.5, 0, 0, 0, 0, 0, 0, 0, 0)], [True], 1.0)]
    >>> Folding(RULE_SGD, FOLD_SUM, [(0, 2, 0)], pushes, weights, none, steps, out, none, steps.copy()).run(0, 2)
    >>> out.tolist()
    [0.5, 0.5]
    """

    cdef fps_fold_job job
    cdef int isa
    cdef int width  # floats of a number
    cdef fps_segment *segments
    cdef fps_push *pushes
    cdef FoldScratch scratch
    cdef list keep

    def __cinit__(self, int rule, int mode, list segments not None, list pushes not None, weights not None, state not None,
                  const int64_t[::1] steps not None, weights_out not None, state_out not None,
                  int64_t[::1] steps_out not None, *, double scale=1.0, double rate_scale=1.0, int ema_plane=-1,
                  double ema_decay=0.0, size_t user_rule=0, int gradient_type=FPS_FLOAT32, int shown_type=FPS_FLOAT32,
                  uint16_t[::1] halves_out=None, bint streaming=False, str instruction_set="auto"):
        cdef int64_t n = len(weights)
        if steps.shape[0] != len(segments) or state.shape[1] != n:
            raise ValueError(f"expected steps for {len(segments)} parameters and state of {n} floats, "
                             f"found {steps.shape[0]} and {state.shape[1]}")
        if len(weights_out) != n or state_out.shape != state.shape or steps_out.shape[0] != steps.shape[0]:
            raise ValueError(f"expected outputs of the inputs' shapes, {n} floats and {steps.shape[0]} parameters")
        if not weights_out.flags.writeable or not state_out.flags.writeable:
            raise ValueError("expected outputs that can be written, found a read-only array")
        if halves_out is not None and halves_out.shape[0] != n:
            raise ValueError(f"expected room for {n} halves, found {halves_out.shape[0]}")
        self.isa = _isa_of(instruction_set)
        self.width = 2 if gradient_type == FPS_FLOAT64 else 1
        self.keep = [steps, steps_out, halves_out]
        self.scratch = FoldScratch()
        self.segments = <fps_segment *> calloc(len(segments) + 1, sizeof(fps_segment))
        self.pushes = <fps_push *> calloc(len(pushes) + 1, sizeof(fps_push))
        if not self.segments or not self.pushes:
            raise MemoryError()
        self._set_segments(segments, n)
        self.job.gradient_type = gradient_type
        self._set_pushes(pushes, n)
        self.job.rule, self.job.mode, self.job.streaming = rule, mode, streaming
        self.job.user_rule = <fps_user_rule> user_rule
        self.job.state_planes, self.job.state_stride = state.shape[0], n * self.width
        self.job.ema_plane, self.job.ema_decay = ema_plane, ema_decay
        self.job.n_segments, self.job.n_pushes = len(segments), len(pushes)
        self.job.segments, self.job.pushes = self.segments, self.pushes
        self.job.scale, self.job.rate_scale, self.job.shown_type = scale, rate_scale, shown_type
        self.job.weights_in = self._numbers_of(weights)
        self.job.weights_out = self._numbers_of(weights_out)
        if halves_out is not None:
            self.job.halves_out = &halves_out[0]
        self.job.state_in = self._numbers_of(state) if state.shape[0] else self.job.weights_in  # never read without planes
        self.job.state_out = self._numbers_of(state_out) if state.shape[0] else self.job.weights_out
        if steps.shape[0]:
            self.job.steps_in = &steps[0]
            self.job.steps_out = &steps_out[0]

    def __dealloc__(self):
        free(self.segments)
        free(self.pushes)

    cdef float *_numbers_of(self, array) except NULL:
        """The address of a contiguous array of the job's type, which is kept."""
        cdef const float[::1] floats
        cdef const double[::1] doubles
        flat = array.reshape(-1) if array.flags.c_contiguous else array
        self.keep.append(flat)
        if self.width == 2:
            doubles = flat
            return <float *> &doubles[0]
        floats = flat
        return <float *> &floats[0]

    cdef int _set_segments(self, list segments, int64_t n) except -1:
        cdef int index
        for index, (offset, length, group) in enumerate(segments):
            if offset < 0 or length < 0 or offset + length > n:
                raise ValueError(f"expected segments within {n} floats, found {length} from {offset}")
            self.segments[index].offset, self.segments[index].length = offset * self.width, length * self.width
            self.segments[index].group, self.segments[index].parameter = group, index
        return 0

    cdef int _set_pushes(self, list pushes, int64_t n) except -1:
        cdef const unsigned char[::1] gradient
        cdef const double[:, ::1] hypers
        cdef const uint64_t[::1] presence
        cdef int index
        dtypes = {FPS_FLOAT32: np.float32, FPS_FLOAT16: np.float16, FPS_FLOAT64: np.float64}
        for index, (values, groups, present, scale, *rate_scale) in enumerate(pushes):
            gradient = np.ascontiguousarray(values, dtypes.get(self.job.gradient_type, np.uint16)).view(np.uint8)
            hypers = _hyper_words(groups)
            bits = np.packbits(np.array(present, np.bool_), bitorder="little")
            presence = np.pad(bits, (0, 8 - len(bits) % 8)).view(np.uint64)
            if len(values) != n:
                raise ValueError(f"expected gradients of {n} numbers, found {len(values)}")
            self.keep.append((gradient, hypers, presence))
            self.pushes[index].gradient = &gradient[0]
            self.pushes[index].hypers = <const fps_hyper *> &hypers[0, 0]
            self.pushes[index].presence = &presence[0]
            self.pushes[index].scale, self.pushes[index].rate_scale = scale, rate_scale[0] if rate_scale else 1.0
        return 0

    def run(self, int64_t first, int64_t last, int64_t times=1):
        """Fold the numbers [first, last) `times` times. Releases the GIL. Raises ValueError for an invalid job."""
        cdef int outcome = 0
        cdef int64_t _time
        with nogil:
            for _time in range(times):
                outcome = outcome or _fold_by(self.isa, &self.job, self.scratch.words, self.width * first, self.width * last)
        if outcome:
            raise ValueError(f"the fold refused its job: status {outcome} (see fold.h)")


def fold(int rule, int mode, list segments not None, list pushes not None, weights not None, state not None,
         const int64_t[::1] steps not None, *, ranges=None, **options):
    """Fold pushes into copies of weights (float32[n]), state (float32[planes, n]) and steps (int64[parameters]).

    With gradients of FLOAT64 weights, state and results are float64, and every number below counts doubles.

    Args:
        segments: (offset, length, group) in floats, one a parameter.
        pushes: (gradient float32[n], or of the type of gradient_type; hypers: a list of 9-tuples (learning rate, momentum,
            dampening, weight decay, beta1, beta2, epsilon, learning rate decay, flags), one a group; presence: a list of bools,
            one a parameter; scale of the gradient; and optionally scale of the learning rates, 1 by default).
        scale: multiplies the sum of the gradients under FOLD_SUM.
        ema_plane, ema_decay: the last plane of state if it holds a moving average of the weights, and its decay.
        user_rule: the address of a user's rule, for RULE_USER and RULE_SUMMING.
        rate_scale: multiplies the mean learning rate under FOLD_SUM.
        gradient_type: FLOAT32, FLOAT16 (float16[n]), BFLOAT16 (its bits, uint16[n]) or FLOAT64.
        shown_type, halves_out: as in Folding.
        streaming: whether results use non-temporal stores.
        instruction_set: one of `instruction_sets()`, or "auto" for the widest.
        ranges: (first, last) pairs of floats to fold, each in a call of its own; default: everything at once. With
            RULE_SUMMING they hold whole parameters.

    Returns (weights, state, steps) as new arrays. Raises ValueError for inconsistent sizes.
    """
    dtype = np.float64 if options.get("gradient_type") == FPS_FLOAT64 else np.float32
    outputs = np.zeros(len(weights), dtype), np.zeros(state.shape, dtype), np.zeros(steps.shape[0], np.int64)
    folding = Folding(rule, mode, segments, pushes, weights, state, steps, *outputs, **options)
    for first, last in ranges or [(0, len(weights))]:
        folding.run(first, last)
    return outputs


def narrow(const float[::1] weights not None, uint16_t[::1] halves not None, int shown_type, *, str instruction_set=None):
    """Write weights in the half precision `shown_type`, FLOAT16 or BFLOAT16, as a fold writes them: the bits of each half.

    `instruction_set`: one of `instruction_sets()`; None: the fold's. Raises ValueError for another type or another length.

    >>> import numpy as np
    >>> halves = np.zeros(2, np.uint16)
    >>> narrow(np.array([1, -2], np.float32), halves, FLOAT16)
    >>> halves.view(np.float16).tolist()
    [1.0, -2.0]
    """
    cdef const fps_tile_functions *tile = fps_isa_functions(_isa_of(instruction_set) if instruction_set else _isa)
    if shown_type not in (FPS_FLOAT16, FPS_BFLOAT16) or halves.shape[0] != weights.shape[0]:
        raise ValueError(f"expected {weights.shape[0]} halves of type {FPS_FLOAT16} or {FPS_BFLOAT16}, found "
                         f"{halves.shape[0]} of type {shown_type}")
    if weights.shape[0]:
        fps_narrow(tile, shown_type, &halves[0], &weights[0], weights.shape[0])


def planes_needed(int rule, hyper):
    """Return the number of state planes that a push with these hyper-parameters (a 9-tuple as in `fold`) uses.

    Raises ValueError for an unknown rule.

    >>> planes_needed(RULES["sgd"], (0.1, 0.9, 0, 0, 0, 0, 0, 0, 0))
    1
    """
    cdef fps_hyper words = fps_hyper_of(hyper)
    needed = fps_planes_needed(rule, &words)
    if needed < 0:
        raise ValueError(f"expected a rule of {', '.join(RULES)}, found number {rule}")
    return needed


def mu_product(double beta1, double decay, int64_t steps, bint is_double=False):
    """Return NAdam's product of momenta after so many steps, which torch's state has, in single or in double precision.

    >>> mu_product(0.5, 0.0, 3)
    0.015625
    """
    return fps_mu_product(beta1, decay, <double> steps, is_double)


cdef fps_hyper fps_hyper_of(hyper) except *:
    cdef fps_hyper words
    memset(&words, 0, sizeof(words))
    (words.learning_rate, words.momentum, words.dampening, words.weight_decay, words.beta1, words.beta2, words.epsilon,
     words.learning_rate_decay, flags) = hyper
    words.flags = <uint64_t> int(flags)
    return words


def _hyper_words(groups):
    """Return fps_hyper's 16 words a group: 8 doubles, 7 for a fold's own sums, and the flags as an integer's bits."""
    words = np.zeros((len(groups), 16))
    for index, (*numbers, flags) in enumerate(groups):
        words[index, :8] = numbers
        words[index, 15:].view(np.uint64)[0] = flags
    return words
