/* The fold's interface: the job of one fold, its constants and its coefficients. All lengths and offsets are in floats; a
 * double is two of them.
 *
 * A state plane is one optimizer-state tensor over all parameters, such as all momentum buffers. */
#ifndef FPS_FOLD_H
#define FPS_FOLD_H

#include <stdint.h>

#include "update/real.h"
#include "update/rules.h"

#define FPS_FOLD_SUM 0  /* one application of the rule on scale * the sum of the pushes, in the order given */
#define FPS_FOLD_EACH 1 /* the rule push by push, each with its own hyper-parameters */

/* The type of pushed gradients, or of shown weights. Weights, state, sums and updates are in single precision, or all in double
 * precision if the gradients are. */
#define FPS_FLOAT32 0
#define FPS_FLOAT16 1
#define FPS_BFLOAT16 2
#define FPS_FLOAT64 3

#define FPS_HYPER_NESTEROV 1
#define FPS_HYPER_MAXIMIZE 2
#define FPS_HYPER_DECOUPLED 4
#define FPS_HYPER_CENTERED 8
#define FPS_HYPER_AMSGRAD 16
#define FPS_HYPER_DOUBLE_PRODUCT 32 /* NAdam's product of momenta is in double precision */

#define FPS_MAX_PUSHES 1024
#define FPS_MAX_USER_PLANES 8
#define FPS_MAX_SUMS 7 /* that a user's rule reads of a parameter */
#ifndef FASTPS_HOOKS
#define FPS_TILE (1024 / FPS_REAL_FLOATS) /* numbers: a fold's working set stays in the first-level cache */
#define FPS_LONG_TILE (8192 / FPS_REAL_FLOATS) /* of a single-pass tile: nothing of it is read again */
#define FPS_STREAMED_TILE (256 / FPS_REAL_FLOATS) /* of one with non-temporal stores, which overlap with the next one's loads */
#else
#define FPS_TILE (32 / FPS_REAL_FLOATS) /* so that a test's small fold has many tiles, and as many failpoints */
#define FPS_LONG_TILE (32 / FPS_REAL_FLOATS)
#define FPS_STREAMED_TILE (16 / FPS_REAL_FLOATS)
#endif

#define FPS_FOLD_TOO_MANY (-1)     /* more pushes than FPS_MAX_PUSHES */
#define FPS_FOLD_UNKNOWN_RULE (-2) /* no such rule, too few state planes for it, or an average outside the last plane */
#define FPS_FOLD_UNKNOWN_TYPE (-3)
#define FPS_FOLD_PART (-4) /* a part of a parameter, and a rule that sums over whole ones */

/* The hyper-parameters of one param_group in a push, named as in torch.optim. RMSprop's alpha and Adadelta's rho are beta2;
 * NAdam's momentum decay is learning_rate_decay. */
typedef struct {
    double learning_rate, momentum, dampening, weight_decay, beta1, beta2, epsilon, learning_rate_decay;
    double sums[FPS_MAX_SUMS]; /* a fold's own copy has the sums of the parameter; no push has any */
    uint64_t flags;
} fps_hyper;
_Static_assert(sizeof(fps_hyper) == 128, "hyper-parameters are two cache lines, with room for more rules");

/* One parameter; its offset is a multiple of 16 floats, so that it begins on a cache line. Its length is 0 while it is frozen. */
typedef struct {
    int64_t offset, length;
    int32_t group, parameter;
} fps_segment;

/* Its place and its length in numbers. */
static inline int64_t fps_segment_first(const fps_segment *segment) { return segment->offset / FPS_REAL_FLOATS; }
static inline int64_t fps_segment_length(const fps_segment *segment) { return segment->length / FPS_REAL_FLOATS; }

/* One push. A parameter whose presence bit is 0 has no gradient in it. `scale` multiplies the gradient, and `rate_scale` the
 * learning rate of every group (for example by the push's staleness). */
typedef struct {
    const void *gradient; /* of the job's gradient_type */
    const fps_hyper *hypers;
    const uint64_t *presence;
    double scale;
    double rate_scale;
} fps_push;

/* A user's rule on `length` floats, at most FPS_TILE. `hyper` points to fps_hyper's doubles with the scaled learning rate,
 * `gradient` is summed and scaled, `steps` counts the applications before this one, and planes are `state_stride` floats apart.
 * An output may alias its input at the same element, never at a shifted one. With FPS_RULE_SUMMING a call without outputs
 * (NULL) adds these floats' terms to the sums behind the hyper-parameters. Calls with outputs, which read the sums, follow. */
typedef void (*fps_user_rule)(int64_t length, int64_t steps, double *hyper, const FPS_REAL *gradient, const FPS_REAL *weight_in,
                              FPS_REAL *weight_out, const FPS_REAL *state_in, FPS_REAL *state_out, int64_t state_stride);

/* Everything a fold reads and writes; inputs and outputs never overlap. `steps` counts a parameter's applications of the rule.
 *
 * The moving average of the weights follows versions: it moves once a fold under FPS_FOLD_SUM and once a push under
 * FPS_FOLD_EACH, also for a parameter without a gradient in the push. A fold of no pushes changes nothing. */
typedef struct {
    int32_t rule, mode;
    int32_t gradient_type; /* FPS_FLOAT32 or a half of it, or FPS_FLOAT64 */
    int32_t shown_type;    /* the type of halves_out */
    int32_t streaming; /* whether results use non-temporal stores: faster when they exceed the caches, slower when they fit */
    fps_user_rule user_rule; /* of users' rules only */
    int32_t state_planes; /* the rule's own, then the average's if there is one */
    int32_t ema_plane;    /* the last plane where it holds the moving average of the weights, or -1 */
    double ema_decay;     /* average = decay * average + (1 - decay) * weight */
    int64_t state_stride; /* floats between planes */
    int64_t n_segments;
    const fps_segment *segments;
    int32_t n_pushes;
    const fps_push *pushes;
    double scale;      /* FPS_FOLD_SUM: 1 / number of pushes for the mean */
    double rate_scale; /* FPS_FOLD_SUM: multiplies the pushes' mean learning rate */
    const FPS_REAL *weights_in;
    FPS_REAL *weights_out;
    uint16_t *halves_out; /* weights_out in half precision, for a model to read; NULL: not wanted */
    const FPS_REAL *state_in;
    FPS_REAL *state_out;
    const int64_t *steps_in;
    int64_t *steps_out;
    int32_t *nonfinite; /* set to 1 when a result is infinite or NaN; NULL: results are not checked */
} fps_fold_job;

/* An interpolation weight as torch.lerp applies it: from the nearer end, so `fraction` may be negative. */
typedef struct {
    FPS_REAL fraction;
    int is_small;
} fps_lerp;

/* The coefficients of one push for one parameter, in the numbers' precision as torch computes; made once, used by all tiles. */
typedef struct {
    FPS_REAL scale;         /* of the gradient: the push's times the fold's, times -1 to maximize */
    FPS_REAL weight_decay;  /* coupled: added to the gradient */
    FPS_REAL shrink;        /* decoupled: multiplies the weight */
    FPS_REAL momentum, undampened;
    FPS_REAL minus_rate;    /* -learning rate, or the -step size of Adam, Adamax, and NAdam's mean */
    FPS_REAL gradient_rate; /* the -step size of NAdam's gradient */
    FPS_REAL correction;    /* divides NAdam's squares or RAdam's mean */
    FPS_REAL rectification; /* RAdam's */
    FPS_REAL beta2, one_minus_beta2, root_correction2, inverse_root_correction2, epsilon;
    fps_lerp lerp;          /* of a mean towards the gradient */
    fps_hyper hyper;        /* for a user's rule, with the scaled learning rate */
    int64_t steps;
    int flags; /* the rule's variant, FPS_BY_ */
} fps_coefficients;

/* One tile's addresses. */
typedef struct {
    const FPS_REAL *weights;
    FPS_REAL *weights_out;
    const FPS_REAL *state;
    FPS_REAL *state_out;
    int64_t stride;     /* floats between planes */
    int64_t out_stride; /* the same for state_out; it differs from `stride` only with `streaming` */
    int streaming;      /* the rule's own loop uses non-temporal stores: state_out is not the stage */
    FPS_REAL *kept;     /* with `streaming`: where the loop also leaves the weights of whole lines, in the cache; or NULL */
} fps_place;

/* What one call of the fold writes and forgets: about 260 KB, too much for the stacks that threads are given. One caller at a
 * time may use it. */
typedef struct {
    fps_push present[FPS_MAX_PUSHES];
    fps_coefficients by[FPS_MAX_PUSHES];
} fps_fold_scratch;

#endif
