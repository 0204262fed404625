/* The fold's update rules, one row each. Everything that asks for a rule is made from these rows: the fold's loops, its
 * coefficients, the GPU's kernels, and the names that Python sees. A rule's arithmetic is its body, which the folds on the CPU
 * and on a GPU share.
 *
 * It includes nothing, because NVRTC has no headers. */
#ifndef FPS_RULES_H
#define FPS_RULES_H

/* What one application of a rule does. A loop on the CPU is compiled for each of a rule's variants, which are sums of these. */
#define FPS_BY_DECAY 1    /* weight decay is added to the gradient */
#define FPS_BY_SHRINK 2   /* decoupled weight decay multiplies the weight */
#define FPS_BY_MOMENTUM 4
#define FPS_BY_FIRST 8    /* a parameter's first application of a rule with momentum: no state is read */
#define FPS_BY_NESTEROV 16
#define FPS_BY_CENTERED 32
#define FPS_BY_SMALL_LERP 64 /* interpolate from the start; on the CPU it is no variant */
#define FPS_BY_AMSGRAD 128   /* the largest mean of squares so far divides, instead of the present one */
#define FPS_BY_RECTIFIED 256 /* enough steps for RAdam to divide by the mean of squares */

/* RULE(number, NAME, name, planes, at once, writes, checked, correct):
 *   number: stands in arenas, so it never changes; users' rules have two of them
 *   planes: the most state planes that it uses, at most FPS_RULE_PLANES
 *   at once: the number of gradients that a loop reads. 1, or 4: the loop sums them, or applies them one after the other, while
 *       the element is in registers, and it can use non-temporal stores. 4 compiles 14 times as many loops
 *   writes: the planes that a variant (`flags`) writes, one bit each; unless FPS_BY_FIRST is set, it reads the same
 *   checked: the planes that can stay non-finite while the weight is finite, one bit each
 *   correct: a function that corrects the coefficients, or fps_correct_nothing */
#define FPS_UPDATE_RULES(RULE)                                                                                           \
    RULE(0, SGD, sgd, 1, 4, flags & FPS_BY_MOMENTUM ? 1 : 0, 0, fps_correct_nothing)                                     \
    RULE(1, ADAM, adam, 3, 4, 3 | (flags & FPS_BY_AMSGRAD ? 4 : 0), 2, fps_correct_adam)                                 \
    RULE(2, ADAGRAD, adagrad, 1, 1, 1, 1, fps_correct_adagrad)                                                           \
    RULE(3, RMSPROP, rmsprop, 3, 1, 1 | (flags & FPS_BY_MOMENTUM ? 2 : 0) | (flags & FPS_BY_CENTERED ? 4 : 0), 1,        \
         fps_correct_nothing)                                                                                            \
    RULE(5, NADAM, nadam, 2, 1, 3, 2, fps_correct_nadam)                                                                 \
    RULE(6, RADAM, radam, 2, 1, 3, 2, fps_correct_radam)                                                                 \
    RULE(7, ADAMAX, adamax, 2, 1, 3, 2, fps_correct_adamax)                                                              \
    RULE(8, ADADELTA, adadelta, 2, 1, 3, 3, fps_correct_nothing)

/* The variants of each rule: VARIANT(rule, flags). A flag that is in no variant does not reach the rule's body. */
#define FPS_DECAYED(VARIANT, rule, flags) VARIANT(rule, flags) VARIANT(rule, (flags) | FPS_BY_DECAY)
#define FPS_DECAYED_OR_SHRUNK(VARIANT, rule, flags)                                                                      \
    FPS_DECAYED(VARIANT, rule, flags) VARIANT(rule, (flags) | FPS_BY_SHRINK)
#define FPS_SGD_VARIANTS(VARIANT, rule)                                                                                  \
    FPS_DECAYED(VARIANT, rule, 0)                                                                                        \
    FPS_DECAYED(VARIANT, rule, FPS_BY_MOMENTUM)                                                                          \
    FPS_DECAYED(VARIANT, rule, FPS_BY_MOMENTUM | FPS_BY_NESTEROV)                                                        \
    FPS_DECAYED(VARIANT, rule, FPS_BY_MOMENTUM | FPS_BY_FIRST)                                                           \
    FPS_DECAYED(VARIANT, rule, FPS_BY_MOMENTUM | FPS_BY_FIRST | FPS_BY_NESTEROV)
#define FPS_ADAM_VARIANTS(VARIANT, rule)                                                                                 \
    FPS_DECAYED_OR_SHRUNK(VARIANT, rule, 0) FPS_DECAYED_OR_SHRUNK(VARIANT, rule, FPS_BY_AMSGRAD)
#define FPS_ADAGRAD_VARIANTS(VARIANT, rule) FPS_DECAYED(VARIANT, rule, 0)
#define FPS_RMSPROP_VARIANTS(VARIANT, rule)                                                                              \
    FPS_DECAYED(VARIANT, rule, 0)                                                                                        \
    FPS_DECAYED(VARIANT, rule, FPS_BY_MOMENTUM)                                                                          \
    FPS_DECAYED(VARIANT, rule, FPS_BY_CENTERED)                                                                          \
    FPS_DECAYED(VARIANT, rule, FPS_BY_MOMENTUM | FPS_BY_CENTERED)
#define FPS_NADAM_VARIANTS(VARIANT, rule) FPS_DECAYED_OR_SHRUNK(VARIANT, rule, 0)
#define FPS_RADAM_VARIANTS(VARIANT, rule)                                                                                \
    FPS_DECAYED_OR_SHRUNK(VARIANT, rule, 0) FPS_DECAYED_OR_SHRUNK(VARIANT, rule, FPS_BY_RECTIFIED)
#define FPS_ADAMAX_VARIANTS(VARIANT, rule) FPS_DECAYED(VARIANT, rule, 0)
#define FPS_ADADELTA_VARIANTS(VARIANT, rule) FPS_DECAYED(VARIANT, rule, 0)

#define FPS_RULE_USER 4    /* a user's function; it owns all planes but the average's */
#define FPS_RULE_SUMMING 9 /* the same, of a function that reads sums over a whole parameter */
#define FPS_IS_USERS(rule) ((rule) == FPS_RULE_USER || (rule) == FPS_RULE_SUMMING)
#define FPS_RULE_NUMBERS 16 /* all numbers are smaller */
#define FPS_RULE_PLANES 3  /* the most of a row */

#define FPS_RULE_NUMBER(number, NAME, ...) FPS_RULE_##NAME = number,
enum { FPS_UPDATE_RULES(FPS_RULE_NUMBER) };
#undef FPS_RULE_NUMBER

#endif
