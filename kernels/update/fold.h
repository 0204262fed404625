/* The fold's words: what a job of folding is, for those who make one (turn.pyx, fold.pyx).
 *
 * What it refuses to be: the loops (fold_tile.h) or the walk over segments (fold_run.h). All lengths and offsets are in floats. */
#ifndef FPS_FOLD_H
#define FPS_FOLD_H

#include <stdint.h>

#define FPS_RULE_SGD 0  /* SGD, momentum, Nesterov: 1 state plane when any group has momentum, else none */
#define FPS_RULE_ADAM 1 /* 2 state planes; AdamW is the flag FPS_HYPER_DECOUPLED */
#define FPS_RULE_ADAGRAD 2 /* 1 state plane: the sum of squares */
#define FPS_RULE_RMSPROP 3 /* square average; momentum buffer and gradient average: see fps_planes_needed in fold_run.h */

#define FPS_RULE_USER 4    /* a function of the user's: job.user_rule; all planes but the average's are its own */

#define FPS_FOLD_SUM 0  /* one application of the rule on scale * the sum of the pushes, in the order given */
#define FPS_FOLD_EACH 1 /* the rule push by push, each with its own hyper-parameters */

#define FPS_FLOAT32 0 /* what gradients are pushed as; they are summed and applied in single precision, whatever they were */
#define FPS_FLOAT16 1
#define FPS_BFLOAT16 2

#define FPS_HYPER_NESTEROV 1
#define FPS_HYPER_MAXIMIZE 2
#define FPS_HYPER_DECOUPLED 4
#define FPS_HYPER_CENTERED 8

#define FPS_MAX_PUSHES 1024
#define FPS_MAX_USER_PLANES 8
#ifndef FASTPS_HOOKS
#define FPS_TILE 1024 /* floats: what a fold has in hand at a time stays in the first-level cache */
#define FPS_LONG_TILE 8192 /* of a tile that passes once: nothing of it has to stay */
#define FPS_STREAMED_TILE 256 /* of a tile that is streamed: its stores overlap with the loads of the next */
#else
#define FPS_TILE 32 /* so that a test's small fold has many tiles, and as many places to die at */
#define FPS_LONG_TILE 32
#define FPS_STREAMED_TILE 16
#endif

#define FPS_FOLD_TOO_MANY (-1)     /* more pushes than FPS_MAX_PUSHES */
#define FPS_FOLD_UNKNOWN_RULE (-2) /* no such rule, too few state planes for it, or not the last for the average */
#define FPS_FOLD_UNKNOWN_TYPE (-3)

/* The hyper-parameters of one param_group, as a push carries them; names as in torch.optim. RMSprop's alpha is beta2. */
typedef struct {
    double learning_rate, momentum, dampening, weight_decay, beta1, beta2, epsilon, learning_rate_decay, reserved[7];
    uint64_t flags;
} fps_hyper;
_Static_assert(sizeof(fps_hyper) == 128, "hyper-parameters are two cache lines, with room for rules to come");

/* One parameter; its offset is a multiple of 16 floats, so that it begins on a cache line. */
typedef struct {
    int64_t offset, length;
    int32_t group, parameter;
} fps_segment;

/* One push: a parameter whose presence bit is 0 has no gradient in it; `scale` multiplies its gradient, `rate_scale` the learning
 * rate of every group of it (by its staleness, say). */
typedef struct {
    const void *gradient; /* of the job's gradient_type */
    const fps_hyper *hypers;
    const uint64_t *presence;
    double scale;
    double rate_scale;
} fps_push;

/* A user's rule on `length` floats, which are never more than FPS_TILE: `hyper` are fps_hyper's doubles with the learning rate
 * scaled, `gradient` is summed and scaled, `steps` counts applications before this one, planes are `state_stride` floats
 * apart. Inputs may be the outputs (same element), never shifted against them. */
typedef void (*fps_user_rule)(int64_t length, int64_t steps, const double *hyper, const float *gradient,
                              const float *weight_in, float *weight_out, const float *state_in, float *state_out,
                              int64_t state_stride);

/* Everything a fold reads and writes; in and out never overlap. `steps` counts a parameter's applications of the rule.
 *
 * The moving average of the weights goes with versions: it moves after every application of the rule, once a fold under
 * FPS_FOLD_SUM and once a push under FPS_FOLD_EACH, and for a parameter that the push has no gradient for too. A fold of no
 * pushes changes nothing. */
typedef struct {
    int32_t rule, mode;
    int32_t gradient_type; /* FPS_FLOAT32, or a half of it */
    int32_t streaming; /* whether results go past the caches: pays when they do not fit, costs when they do */
    fps_user_rule user_rule; /* FPS_RULE_USER only */
    int32_t state_planes; /* the rule's own, then that of the average, if one is kept */
    int32_t ema_plane;    /* the last plane where it holds the moving average of the weights, or -1 */
    double ema_decay;     /* average = decay * average + (1 - decay) * weight */
    int64_t state_stride; /* floats between planes */
    int64_t n_segments;
    const fps_segment *segments;
    int32_t n_pushes;
    const fps_push *pushes;
    double scale;      /* FPS_FOLD_SUM: 1 / number of pushes for the mean */
    double rate_scale; /* FPS_FOLD_SUM: multiplies the pushes' mean learning rate */
    const float *weights_in;
    float *weights_out;
    const float *state_in;
    float *state_out;
    const int64_t *steps_in;
    int64_t *steps_out;
    int32_t *unsound; /* set to 1 when a result is infinite or NaN; NULL: nobody asks */
} fps_fold_job;

/* A fraction of the way from one value to another, as torch.lerp takes it: from the nearer end, so `fraction` may be negative. */
typedef struct {
    float fraction;
    int is_small;
} fps_lerp;

/* What one push does to one parameter, in the single precision in which torch does it; made once, used by all tiles. */
typedef struct {
    float scale;          /* of the gradient: the push's, the fold's, and -1 to maximize */
    float weight_decay;   /* coupled: added to the gradient */
    float shrink;         /* decoupled: multiplies the weight */
    float momentum, undampened;
    float minus_rate;     /* -learning rate, or Adam's -step size */
    float beta2, one_minus_beta2, root_correction2, inverse_root_correction2, epsilon;
    fps_lerp lerp;        /* of a mean towards the gradient */
    fps_hyper hyper;      /* a user's rule: with the scaled learning rate */
    int64_t steps;
    int has_decay, has_shrink, has_momentum, is_first, is_nesterov, is_centered;
} fps_coefficients;

/* What one call of the fold writes and forgets: about 260 KB, too much for the stacks that threads are given. One caller at a
 * time may use it. */
typedef struct {
    fps_push present[FPS_MAX_PUSHES];
    fps_coefficients by[FPS_MAX_PUSHES];
} fps_fold_scratch;

#endif
